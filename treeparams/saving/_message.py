"""dumps, loads: turns parameters into a message to another process, and back."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np

from .._files.arrays import Inventory, Kind, bytes_of, inventory_of, kind_of, placed
from .._files.file import Draft
from .._files.message import Change, Message, Version, as_version, change_of
from .._files.names import name_of
from .._files.source import aligned
from .._forms.block import Block
from .._forms.form import Form, tree_of
from .._forms.restructure import Restructure, halves_of
from .._slots.layout import Layout
from .._tree.static_keys import with_object
from .._tree.structure import naming_deleted
from .._tree.text import describe, first_few, first_lines
from .._tree.types import is_complex
from ._contents import Contents
from ._resume import with_histories
from ._save import filled, fitted, leaves_in, stored_in
from ._unlike import unlike_leaves

M = TypeVar("M")


def dumps(
    model: Any,
    restructure: object = None,
    *,
    version: object = None,
    since: object = None,
) -> bytes:
    """Writes parameters into one message, for a process that shares neither memory nor a JAX job with this one.

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

    A message has the content that `saving.save` writes to a file, in the safetensors format: paths, dtypes, the digest
    of the layout, checksums, the version of the format, and the arrays. The checksums (CRC-32) detect accidents. They
    do not protect you from someone who changes a message on purpose: encrypt or sign messages that go over a network
    that you do not trust.

    Args:
        model: a tree (a model, a state of an optimiser, an average, a dictionary of these), whose arrays, numbers and
            texts are all sent, ties once. With `restructure`, the vector or the stacks that it opens.
        restructure: the `Restructure` that `tp.ravel` or `tp.stack` returned. The message then has only the trained
            parameters, ties once, each in its own shape and dtype, whatever form they lie in. Its digest is
            `restructure.layout.digest`.
        version: a number, or `(run, number)`, that grows from message to message. A receiver rejects messages that are
            not newer than the version it has. If you restart a sender, count its runs: `(2, 0)` is newer than
            `(1, 500)`.
        since: `(version, before)`: a version that the receivers have, and the model that was sent for it. Arrays in
            which no bit has changed are not sent. If few elements of an array have changed, only these are sent. The
            message is never larger than one with all arrays. With weights in bfloat16 and small rates, a step of Adam
            changes few elements.

    Returns:
        The message.

    Raises:
        ValueError: as for `saving.save`; `before` has other arrays than the model; or `since` is not older than
            `version`.
        TypeError: as for `saving.save`; `model` is not the vector or the stacks of `restructure`; a version is neither
            a number nor a pair; or you gave `since` without `version`.
    """
    version = as_version(version)
    with naming_deleted(model):
        inventory, parts, words = _sent(model, restructure)
        said = {"is_tree": restructure is None, "version": version, "since": None}
        whole = Draft(inventory, words | {"message": said}, {})
        if since is None:
            return whole.to_memory(parts)
        last, before = _as_since(since, version)
        with naming_deleted(before):
            changed, rows, how = change_of(inventory.kinds, _before(before, restructure, inventory.kinds, words), parts)
        change = Draft(changed, words | {"message": said | {"since": {"version": last, **how}}}, {})
        return change.to_memory(rows) if change.size < whole.size else whole.to_memory(parts)


def loads(message: object, have: M, restructure: object = None, *, version: object = None) -> tuple[M, Version | None]:
    """Reads a message of `saving.dumps` into a tree, a vector or stacks like those that were sent.

    `loads` checks the whole message before it returns anything. If it raises an error, you keep `have`, which it never
    changes, except that it writes into its refs (`jax.new_ref`) if all is right. The result has new buffers, so you may
    discard the message.

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
    ValueError: the message has version (1, 7), and you have (1, 7): it is old, or came twice. Keep your arrays

    Args:
        message: bytes, or an object that shares its memory as bytes: a `memoryview`, a NumPy array of `uint8`.
        have: a tree, a vector or stacks like those that were sent. You get the structure, functions and static fields
            from it. Arrays go where its arrays are: to their devices, in NumPy or in JAX, as for `saving.load`. For a
            message of all arrays it needs no values and may consist of `jax.ShapeDtypeStruct`s.
        restructure: the `Restructure` of the vector or the stacks in `have`. The sender may have the same parameters in
            another form.
        version: the version of `have`, as the previous call returned it. With `None`, you accept any message.

    Returns:
        The tree, the vector or the stacks, and the version of the message, or `None`. No array has a weak type, so a
        compiled function that uses them is traced once.

    Raises:
        ValueError: the message is incomplete or damaged; it has another layout; it is not newer than `version`; it is a
            change of another version, or of other numbers than those in `have`.
        TypeError: `message` is not a message, or `have` is not the vector or the stacks of `restructure`.
    """
    received = Message(message)
    if not received.is_ours:
        raise ValueError("the message was not made by saving.dumps: it has no digest and no checksums")
    if received.is_tree != (restructure is None):
        sent, call = ("a tree", "message, tree") if received.is_tree else ("parameters", "message, vector, restructure")
        raise ValueError(f"the message contains {sent}; write saving.loads({call})")
    _check_version(received, as_version(version))
    got = _tree_of(received, have) if restructure is None else _form_of(received, have, restructure)
    return got, received.version


# -- What is sent ------------------------------------------------------------------------------------------------------


def _sent(model: Any, restructure: object) -> tuple[Inventory, dict[str, np.ndarray], dict[str, Any]]:
    """Returns how the arrays of a message are stored, their bytes by name, and the words beside its version."""
    if restructure is None:
        leaves, words = stored_in(model, "write saving.dumps(model)")
        kinds = {name: kind_of(name, leaf) for name, leaf in leaves.items()}
        return inventory_of(kinds), {name: bytes_of(leaf) for name, leaf in leaves.items()}, words
    layout, form = _layout_and_form(restructure)
    nothing = {"ties": {}, "states": {}, "restructures": {}, "frozen": [], "values": {}}
    return _inventory(form), _bytes_of(form, model), {"layout": layout.digest, **nothing}


def _before(
    before: Any, restructure: object, kinds: Mapping[str, Kind], words: Mapping[str, Any]
) -> dict[str, np.ndarray]:
    """Returns the bytes of the receivers' arrays, after checking that they are like the new ones."""
    its, parts, said = _sent(before, restructure)
    differ = [name for name in kinds.keys() | its.kinds.keys() if kinds.get(name) != its.kinds.get(name)]
    if differ or said["layout"] != words["layout"]:
        where = f"; they differ at {first_few(sorted(differ))}" if differ else ""
        raise ValueError(
            f"since=(version, before): expected `before` to have the layout {words['layout']}, as the model has, got "
            f"{said['layout']}{where}"
        )
    return parts


def _as_since(since: object, version: Version | None) -> tuple[Version, Any]:
    """Returns the version before a change and its model, after checking that the version is older."""
    if not isinstance(since, tuple) or len(since) != 2:
        raise TypeError(f"expected since=(version, before), a version and the model sent for it, got {since!r}")
    last = as_version(since[0])
    if version is None or last is None:
        raise TypeError("a change needs two versions: saving.dumps(model, version=4, since=(3, before))")
    if not _is_newer(version, last):
        raise ValueError(f"since={last} is not older than version={version}; the versions of a sender must grow")
    return last, since[1]


# -- What is received --------------------------------------------------------------------------------------------------


def _is_newer(one: Version, other: Version) -> bool:
    """Returns whether a version is newer than another one."""
    if isinstance(one, tuple) != isinstance(other, tuple):
        raise ValueError(f"versions must all be numbers, or all (run, number): cannot compare {one} and {other}")
    return one > other  # type: ignore[operator]


def _check_version(received: Message, have: Version | None) -> None:
    """Rejects a message that is not newer than the receiver's version, or a change of another version."""
    if have is None:
        return
    if received.version is None:
        raise ValueError(f"the message has no version, and you have {have}; write saving.dumps(model, version=...)")
    if not _is_newer(received.version, have):
        raise ValueError(
            f"the message has version {received.version}, and you have {have}: it is old, or came twice. Keep your "
            "arrays"
        )
    if received.since is not None and received.since["version"] != have:
        raise ValueError(
            f"the message has the changes from version {received.since['version']} to {received.version}, and you "
            f"have {have}: a message between is missing. Ask for all arrays, saving.dumps without `since`"
        )


def _tree_of(received: Message, have: Any) -> Any:
    """Returns the tree that a message makes from another tree."""
    if received.since is None:
        with received.understood():
            have = with_histories(have, received)
    contents = Contents(have)
    known, said = contents.aliases, received.words["layout"]
    if received.since is not None:
        if contents.abstract:
            raise ValueError("the message changes arrays, but `have` has no values: expected arrays")
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
    """Returns the vector or the stacks that a message makes from others."""
    (layout, form), said = _layout_and_form(restructure), received.words["layout"]
    if said != layout.digest:
        slots = Contents(tree_of(layout).shapes())
        leaves = {name: i for i, name in slots.names.items()}
        raise _of_another_layout(said, layout.digest, list(unlike_leaves(slots, leaves, received)))
    if received.since is not None:
        received = Change(received.bytes, _inventory(form).kinds, _bytes_of(form, have))
    return _form_from(form, received, have)


def _of_another_layout(sent: str, have: str, differ: list[str]) -> ValueError:
    """Makes the error for a message of another layout; `differ` lists the differences that its arrays show."""
    why = differ or ["its arrays fit; trained parameters or ties differ, so compare tp.layout(model) of both"]
    return ValueError(f"the message has the layout {sent}, and you have {have}:\n{first_lines(why, 20)}")


# -- Parameters in a vector or in stacks ------------------------------------------------------------------------------


def _layout_and_form(restructure: object) -> tuple[Layout, Form]:
    """Returns the layout of a `Restructure`, and the form that it opens."""
    if not isinstance(restructure, Restructure):
        raise TypeError(
            f"expected the restructure that tp.ravel or tp.stack returns with the vector or the stacks, got "
            f"{describe(restructure)}"
        )
    return restructure.layout, halves_of(restructure)[1]


@with_object
def _inventory(form: Form) -> Inventory:
    """Returns how the parameters in a form are stored, by name, each in its own dtype; senders often ask."""
    kinds = dict[str, Kind]()
    for slot, path in enumerate(form.paths):
        block, number = form.locations[slot]
        zero = np.zeros((), form.blocks[block].dtypes[number])
        kinds[name_of(path)] = kind_of(path, np.broadcast_to(zero, form.blocks[block].shapes[number]))
    return inventory_of(kinds)


def _bytes_of(form: Form, given: Any) -> dict[str, np.ndarray]:
    """Returns the bytes of the parameters in a vector or stacks, each in its own dtype; without a copy if possible."""
    leaves, found = form.leaves(given), dict[str, np.ndarray]()
    for block, names, leaf in zip(form.blocks, _names(form), leaves, strict=True):
        kind_of(form.noun, leaf)  # refuses arrays without values
        array = np.asarray(leaf)
        if _is_as_stored(block, array.dtype):
            found |= zip(names, _cut(block, bytes_of(array)), strict=True)
        else:
            arrays = map(_as_dtype, _views(block, array), block.dtypes)
            found |= zip(names, map(bytes_of, arrays), strict=True)
    return found


def _form_from(form: Form, received: Message, like: Any) -> Any:
    """Makes a new vector or new stacks from the parameters in a message, placed like `like`."""
    leaves, wholes, buffers = form.leaves(like), list[np.ndarray](), dict[str, np.ndarray]()
    others = list[tuple[np.ndarray, np.ndarray]]()  # parameters in another dtype than their block has
    for block, names in zip(form.blocks, _names(form), strict=True):
        dtype = np.dtype(block.dtype)
        data = aligned(block.size * dtype.itemsize)
        wholes.append(data.view(dtype).reshape(block.shape))
        if block.length is not None:
            wholes[-1][block.starts[-1] :] = 0  # the padding
        if _is_as_stored(block, dtype):
            buffers |= zip(names, _cut(block, data), strict=True)
        else:
            own = list(map(np.empty, block.shapes, block.dtypes))
            buffers |= zip(names, map(bytes_of, own), strict=True)
            others += zip(_views(block, wholes[-1]), own, strict=True)
    received.fill(buffers)
    for into, array in others:
        into[...] = array
    return jtu.tree_unflatten(form.treedef, list(map(placed, [form.noun] * len(leaves), wholes, leaves)))


@with_object
def _names(form: Form) -> list[list[str]]:
    """Returns the names of the parameters in each block."""
    return [[name_of(form.paths[slot]) for slot in slots] for slots in form.members]


def _is_as_stored(block: Block, dtype: Any) -> bool:
    """Returns whether the bytes of a block in a dtype are those of its arrays, each in its own dtype."""
    return set(block.dtypes) <= {dtype}


def _cut(block: Block, data: np.ndarray) -> list[np.ndarray]:
    """Returns the bytes of each array in a block."""
    if block.length is None:
        return [data]
    row = len(data) // block.length if block.length else 0
    return [data[row * a : row * b] for a, b in itertools.pairwise(block.starts)]


def _views(block: Block, whole: np.ndarray) -> Sequence[np.ndarray]:
    """Returns the arrays in a block as views."""
    if block.length is None:
        return [whole]
    spans = zip(itertools.pairwise(block.starts), block.shapes, strict=True)
    return [whole[start:stop].reshape(shape) for (start, stop), shape in spans]


def _as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Casts an array as JAX does when it reads a form: a complex array becomes its real part if the dtype is real."""
    if array.dtype == dtype:
        return array
    real = np.real(array) if array.dtype.kind == "c" and not is_complex(dtype) else array
    with np.errstate(over="ignore", under="ignore"):
        return real.astype(dtype)
