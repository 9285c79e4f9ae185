"""dumps, loads: parameters as a message to another process, and back."""

from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from .._files.arrays import Inventory, Kind, bytes_of, inventory_of, kind_of
from .._files.file import Draft
from .._files.message import Change, Message, Version, as_version, change_of
from .._forms.makers import tree_of
from .._tree.text import first_few, first_lines
from ._contents import Contents
from ._parameters import form_from, inventory, layout_and_form, parts_of
from ._save import filled, fitted, leaves_in, named_if_deleted, stored_in
from ._unlike import unlike_leaves

M = TypeVar("M")


def dumps(
    model: Any,
    restructure: object = None,
    *,
    version: object = None,
    since: object = None,
) -> bytes:
    """Parameters as one message, for processes that share no memory and no job with this one.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import saving
    >>> model = {"w": jnp.ones((2, 3)), "b": jnp.zeros(2), "scale": jnp.array(2)}
    >>> vector, restructure = tp.ravel(model)
    >>> message = saving.dumps(vector, restructure, version=3)
    >>> vector, version = saving.loads(message, jnp.zeros(8), restructure)
    >>> version, restructure(vector)["w"].sum()
    (3, Array(6., dtype=float32))
    >>> change = saving.dumps(vector.at[0].set(5), restructure, version=4, since=(3, vector))
    >>> vector, version = saving.loads(change, vector, restructure, version=version)
    >>> version, restructure(vector)["b"]
    (4, Array([5., 0.], dtype=float32))

    A message is what `saving.save` writes to a file, and so in the safetensors format: paths, dtypes, the digest of the
    layout, checksums, the version of the format, and the arrays. The checksums (CRC-32) find accidents. They do not
    keep out somebody who changes a message on purpose: encrypt or sign what goes over a network that you do not trust.

    Args:
        model: a tree - a model, a state of an optimiser, an average, a dictionary of these - of which all arrays,
            numbers and texts are sent, ties once. With `restructure` the vector or the stacks that it opens.
        restructure: what `tp.ravel` or `tp.stack` gave. The message then has the trained parameters alone, ties once,
            each in its own shape and dtype, whatever form they lie in. Its digest is `restructure.layout.digest`.
        version: a number, or `(run, number)`, that grows from message to message. A receiver refuses what is not newer
            than what it has. Count the runs of a sender that is restarted: `(2, 0)` is newer than `(1, 500)`.
        since: `(version, before)`: a version that the receivers have, and what was sent for it. An array of which no
            bit has changed is not sent. Of an array of which few elements have changed these are sent. The message is
            never larger than the whole. Of weights in bfloat16, a step of Adam changes few elements at small rates.

    Returns:
        The message.

    Raises:
        ValueError: as `saving.save`; `before` has other arrays than the model; `since` is not older than `version`.
        TypeError: as `saving.save`; `model` is not the vector or the stacks of `restructure`; a version is something
            else; `since` is given without `version`.
    """
    version = as_version(version)
    with named_if_deleted(model):
        inventory, parts, words = _sent(model, restructure)
        said = {"is_tree": restructure is None, "version": version, "since": None}
        whole = Draft(inventory, words | {"message": said}, {})
        if since is None:
            return whole.to_memory(parts)
        last, before = _as_since(since, version)
        with named_if_deleted(before):
            changed, rows, how = change_of(inventory.kinds, _before(before, restructure, inventory.kinds, words), parts)
        change = Draft(changed, words | {"message": said | {"since": {"version": last, **how}}}, {})
        return change.to_memory(rows) if change.size < whole.size else whole.to_memory(parts)


def loads(message: object, have: M, restructure: object = None, *, version: object = None) -> tuple[M, Version | None]:
    """What a message of `saving.dumps` makes of what you have.

    All of the message is checked before you get anything. Where it is refused, you keep what you have, which is never
    written into. What you get lies in buffers of its own, so the message can go.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import saving
    >>> have = {"w": jnp.zeros(2), "b": jnp.zeros(1)}
    >>> message = saving.dumps({"w": jnp.ones(2), "b": jnp.ones(1)}, version=(1, 7))
    >>> have, version = saving.loads(message, have)
    >>> have["w"], version
    (Array([1., 1.], dtype=float32), (1, 7))
    >>> saving.loads(message, have, version=version)
    Traceback (most recent call last):
        ...
    ValueError: the message is of version (1, 7), and you have (1, 7): it is old, or came twice. Keep what you have

    Args:
        message: bytes, or what lies in memory like bytes: a `memoryview`, a NumPy array of `uint8`.
        have: a tree, a vector or stacks like what was sent. Of it are structure, functions and static fields, and where
            the arrays are to lie: on which devices, in NumPy or in JAX, as for `saving.load`. A message of all arrays
            needs no values of it: `jax.ShapeDtypeStruct`s do.
        restructure: that of the vector or of the stacks in `have`. The sender may have the same parameters in another
            form.
        version: of `have`, as the call before returned it. `None` takes whatever comes.

    Returns:
        The tree, the vector or the stacks, and the version that the message says, if any. Nothing has a weak type, so a
        compiled function that takes them is traced once.

    Raises:
        ValueError: the message is torn or damaged; it is of another layout; it is not newer than `version`, or changes
            another version than that, or other numbers than `have`.
        TypeError: it is no message; `have` is not the vector or the stacks of `restructure`.
    """
    received = Message(message)
    if not received.is_ours:
        raise ValueError("the message was not made by saving.dumps: it says no digest and no checksums")
    if received.is_tree != (restructure is None):
        sent, call = ("a tree", "message, tree") if received.is_tree else ("parameters", "message, vector, restructure")
        raise ValueError(f"the message is of {sent}; write saving.loads({call})")
    _check_version(received, as_version(version))
    got = _tree_of(received, have) if restructure is None else _form_of(received, have, restructure)
    return got, received.version


# -- What is sent ------------------------------------------------------------------------------------------------------


def _sent(model: Any, restructure: object) -> tuple[Inventory, dict[str, np.ndarray], dict[str, Any]]:
    """How the arrays of a message are stored, their bytes by name, and what it says beside its version."""
    if restructure is None:
        leaves, words = stored_in(model, "write saving.dumps(model)")
        kinds = {name: kind_of(name, leaf) for name, leaf in leaves.items()}
        return inventory_of(kinds), {name: bytes_of(leaf) for name, leaf in leaves.items()}, words
    layout, form = layout_and_form(restructure)
    nothing = {"ties": {}, "states": {}, "restructures": {}, "frozen": [], "values": {}}
    return inventory(form, form.paths), parts_of(form, model), {"layout": layout.digest, **nothing}


def _before(
    before: Any, restructure: object, kinds: Mapping[str, Kind], words: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """The bytes of what receivers have, once it is like what they will have."""
    its, parts, said = _sent(before, restructure)
    differ = [name for name in kinds.keys() | its.kinds.keys() if kinds.get(name) != its.kinds.get(name)]
    if differ or said["layout"] != words["layout"]:
        where = f"; they differ at {first_few(sorted(differ))}" if differ else ""
        raise ValueError(
            f"since=(version, before): expected `before` to be of the layout {words['layout']}, as the model is, got "
            f"{said['layout']}{where}"
        )
    return parts


def _as_since(since: object, version: Version | None) -> tuple[Version, Any]:
    """The version that a change is a change of, and what it was, once that is older than the new one."""
    if not isinstance(since, tuple) or len(since) != 2:
        raise TypeError(f"expected since=(version, before), a version and what was sent for it, got {since!r}")
    last = as_version(since[0])
    if version is None or last is None:
        raise TypeError("a change says two versions: saving.dumps(model, version=4, since=(3, before))")
    if not _is_newer(version, last):
        raise ValueError(f"since={last} is not older than version={version}; versions of one sender grow")
    return last, since[1]


# -- What is received --------------------------------------------------------------------------------------------------


def _is_newer(one: Version, other: Version) -> bool:
    """Whether a version is newer than another one."""
    if isinstance(one, tuple) != isinstance(other, tuple):
        raise ValueError(f"versions are numbers, or (run, number), of one kind: {one} and {other} cannot be compared")
    return one > other  # type: ignore[operator]


def _check_version(received: Message, have: Version | None) -> None:
    """Refuses a message that is not newer than what the receiver has, or a change of another version than that."""
    if have is None:
        return
    if received.version is None:
        raise ValueError(f"the message says no version, and you have {have}; write saving.dumps(model, version=...)")
    if not _is_newer(received.version, have):
        raise ValueError(
            f"the message is of version {received.version}, and you have {have}: it is old, or came twice. Keep what "
            "you have"
        )
    if received.since is not None and received.since["version"] != have:
        raise ValueError(
            f"the message says what changed from version {received.since['version']} to {received.version}, and you "
            f"have {have}: one between is missing. Ask for all arrays, saving.dumps without `since`"
        )


def _tree_of(received: Message, have: Any) -> Any:
    """The tree that a message makes of one."""
    contents = Contents(have)
    known, said = contents.aliases, received.words["layout"]
    if received.since is not None:
        if contents.abstract:
            raise ValueError("the message changes what you have, and that has no values: expected arrays in `have`")
        if contents.digest(known) != said:
            raise _of_another_layout(said, contents.digest(known), [])
        stored = {name: contents.leaves[i] for name, i in leaves_in(contents, received).items() if i in contents.names}
        kinds = {name: kind_of(name, leaf) for name, leaf in stored.items()}
        received = Change(received.bytes, kinds, {name: bytes_of(leaf) for name, leaf in stored.items()})
    leaves = fitted(contents, received)
    digest = contents.digest(contents.aliases | known)  # of shapes alone no tie is known by identity
    if digest != said:
        raise _of_another_layout(said, digest, [])
    return filled(contents, leaves, received.words, received.owned())


def _form_of(received: Message, have: Any, restructure: object) -> Any:
    """The vector or the stacks that a message makes of one."""
    (layout, form), said = layout_and_form(restructure), received.words["layout"]
    if said != layout.digest:
        slots = Contents(tree_of(layout).shapes())
        leaves = {name: i for i, name in slots.names.items()}
        raise _of_another_layout(said, layout.digest, list(unlike_leaves(slots, leaves, received)))
    if received.since is not None:
        received = Change(received.bytes, inventory(form, form.paths).kinds, parts_of(form, have))
    return form_from(form, received, have)


def _of_another_layout(sent: str, have: str, differ: list[str]) -> ValueError:
    """The error of a message of another layout; `differ`: how, line by line, where its arrays show it."""
    why = differ or ["its arrays fit; trained parameters or ties differ, which tp.layout(model) of both shows"]
    return ValueError(f"the message is of the layout {sent}, and you have {have}:\n{first_lines(why, 20)}")
