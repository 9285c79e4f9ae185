"""dumps, loads: turns parameters into a message to another process, and back."""

import itertools
import operator
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np

from .._files.arrays import placed
from .._files.file import File, Inventory, StoredAs, bytes_of, stored_as
from .._files.names import name_of
from .._files.source import InMemory, aligned, crc32, damaged
from .._forms.block import Block
from .._forms.form import Form
from .._forms.restructure import Restructure, halves_of
from .._slots.layout import Layout
from .._tree.paths import nearest
from .._tree.static_keys import with_object
from .._tree.structure import naming_deleted
from .._tree.text import describe, first_few, first_lines
from .._tree.types import is_complex
from ._reading import Reading
from ._resume import with_histories
from ._save import stored_in

M = TypeVar("M")
_Bytes = Mapping[str, np.ndarray]
_ALL = "ask for all arrays, saving.dumps without `since`"
# A number, or a run and a number. The versions of one sender grow.
_Version = int | tuple[int, int]


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

    A message has the content that `saving.save` writes to a file, in the safetensors format: paths, dtypes, checksums,
    the version of the format, and the arrays. The checksums (CRC-32) detect accidents. They
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
    version = _as_version(version)
    with naming_deleted(model):
        inventory, parts, words = _sent(model, restructure)
        said = {"is_tree": restructure is None, "version": version, "since": None}
        whole = inventory.header(words | {"message": said}, {})
        if since is None:
            return inventory.to_memory(whole, parts)
        if not isinstance(since, tuple) or len(since) != 2:
            raise TypeError("a change needs two versions: saving.dumps(model, version=4, since=(3, before))")
        last, before = _as_version(since[0]), since[1]
        if not _is_newer(version, last):
            raise ValueError(f"since={last} is not older than version={version}; the versions of a sender must grow")
        with naming_deleted(before):
            its, old, theirs = _sent(before, restructure)
            differ = [name for name in inventory.kinds | its.kinds if inventory.kinds.get(name) != its.kinds.get(name)]
            differ += [what for what in ("ties", "frozen", "layout") if words.get(what) != theirs.get(what)]
            if differ:
                where = first_few(sorted(differ))
                raise ValueError(f"since=(version, before): `before` and the model differ at {where}")
        rows = {name: _rows_of(old[name], part, inventory.kinds[name].itemsize) for name, part in parts.items()}
        checksum = _checksum_of(inventory.kinds, old)
    changed = {name: each for name, each in rows.items() if each is not None}
    sent = Inventory(inventory.kinds | {name: StoredAs("U8", each.shape, 1, {}) for name, each in changed.items()})
    how = {"version": last, "checksum": checksum, "changed": list(changed)}
    change = sent.header(words | {"message": said | {"since": how}}, {})
    is_smaller = len(change) + sent.size < len(whole) + inventory.size
    return sent.to_memory(change, {**parts, **changed}) if is_smaller else inventory.to_memory(whole, parts)


def _sent(model: Any, restructure: object) -> tuple[Inventory, _Bytes, dict[str, Any]]:
    """Returns how the arrays of a message are stored, their bytes by name, and the words beside its version."""
    if restructure is None:
        inventory, leaves, words = stored_in(model, "write saving.dumps(model)")
        return inventory, {name: bytes_of(leaf) for name, leaf in leaves.items()}, words
    layout, form = _layout_and_form(restructure)
    return _inventory(form), _bytes_in(form, model), {"layout": layout.digest, "ties": {}, "states": {}}


def loads(message: object, have: M, restructure: object = None, *, version: object = None) -> tuple[M, _Version | None]:
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
    ValueError: the message has version (1, 7), and you have (1, 7): it is old, came twice, or counts otherwise

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
    received = _Message(message)
    if not received.is_ours:
        raise ValueError("the message was not made by saving.dumps: it has no checksums")
    if received.is_tree != (restructure is None):
        sent, call = ("a tree", "message, tree") if received.is_tree else ("parameters", "message, vector, restructure")
        raise ValueError(f"the message contains {sent}; write saving.loads({call})")
    version = _as_version(version)
    if version is not None and not _is_newer(received.version, version):
        what = f"the message has version {received.version}, and you have {version}"
        raise ValueError(f"{what}: it is old, came twice, or counts otherwise")
    if received.since is not None and version not in (None, received.last):
        raise ValueError(f"the message has the changes from version {received.last}, and you have {version}; {_ALL}")
    got = _tree_from(received, have) if restructure is None else _form_from(received, have, restructure)
    return got, received.version


def _tree_from(received: "_Message", have: Any) -> Any:
    """Returns the tree that a message makes from another tree."""
    if received.since is None:
        with received.understood():
            have = with_histories(have, received)
    reading = Reading(have, received)
    contents = reading.contents
    if received.since is not None:
        if contents.abstract:
            raise ValueError("the message changes arrays, but `have` has no values: expected arrays")
        stored = {name: contents.leaves[i] for name, i in reading.leaves.items() if i in contents.names}
        kinds = {name: stored_as(name, leaf) for name, leaf in stored.items()}
        received.complete(kinds, {name: bytes_of(leaf) for name, leaf in stored.items()})
    with received.understood():
        reading.fit()
    frozen = contents.frozen.intersection(contents.stored.values())
    differ = {name for name, i in reading.leaves.items() if i in frozen}.symmetric_difference(received.words["frozen"])
    if differ:
        raise ValueError(f"the message does not fit the tree: only one of them declares {min(differ)!r} as frozen")
    return reading.tree(received.owned())


def _form_from(received: "_Message", have: Any, restructure: object) -> Any:
    """Returns the vector or the stacks that a message makes from others."""
    (layout, form), said = _layout_and_form(restructure), received.words.get("layout")
    if said != layout.digest:
        differ = list(Reading(Form.tree(layout).shapes(), received).unlike_leaves())
        differ = differ or ["its arrays fit; trained parameters or ties differ, so compare tp.layout(model) of both"]
        raise ValueError(f"the message has the layout {said}, and you have {layout.digest}:\n{first_lines(differ, 20)}")
    if received.since is not None:
        received.complete(_inventory(form).kinds, _bytes_in(form, have))
    return _filled_form(form, received, have)


# -- Versions ----------------------------------------------------------------------------------------------------------


def _as_version(version: object) -> _Version | None:
    """Converts a version to Python integers; NumPy integers are accepted too."""
    try:
        if not isinstance(version, (tuple, list)):
            return None if version is None else operator.index(version)  # type: ignore[arg-type]
        run, number = map(operator.index, version)
        return run, number
    except (TypeError, ValueError):
        raise TypeError(f"a version must be a number, or (run, number), got {version!r}") from None


def _is_newer(one: Any, other: Any) -> bool:
    """Returns whether a version is newer than another one of its kind."""
    return one is not None and type(one) is type(other) and one > other


# -- A file in memory: all arrays, or changes of arrays that both have -------------------------------------------------


class _Message(File):
    """A message with a checked header.

    Attributes:
        is_tree: whether it is of a tree; otherwise it is of the parameters in a vector or stacks.
        version: the version of the arrays, or `None`.
        since: for a change, the words about the arrays that it changes.
        last: for a change, their version.
    """

    def __init__(self, message: object) -> None:
        source = InMemory(message)
        super().__init__(source)
        with self.understood():
            # A file that `save` wrote is a message too.
            said = self.words["message"] or {"is_tree": True, "version": None, "since": None}
            self.is_tree, self.version, self.since = said["is_tree"], _as_version(said["version"]), said["since"]
            self.last = None if self.since is None else _as_version(self.since["version"])
        data = np.asarray(source.bytes)[self._first :]
        self._parts = {name: data[start:stop] for name, (_, _, start, stop) in self._arrays.items()}
        self._have = dict[str, tuple[np.ndarray, int]]()  # the arrays of which elements change, and the size of these

    def complete(self, kinds: Mapping[str, StoredAs], have: _Bytes) -> None:
        """Adds the rest of each array from those that you have, as if the sender had sent all of them.

        Args:
            kinds: how these are stored, by name.
            have: their bytes.
        """
        since = self.since or {}
        with self.understood():
            changed, said = frozenset(since["changed"]), since["checksum"]
        lost = [name for name in self._parts if name not in have]
        if lost:
            raise ValueError(f"the message changes {first_few(lost)}, which you do not have{nearest(lost[0], have)}")
        if _checksum_of(kinds, {name: have[name] for name in self._parts}) != said:
            # It comes from another sender, or from one that was restarted and counts from the same number.
            raise ValueError(f"the message is a change of other numbers than you have, or of other dtypes; {_ALL}")
        for name, part in self._parts.items():
            self.compare(name, part)
        self._have = {name: (have[name], kinds[name].itemsize) for name in changed}
        self._arrays = self._arrays | {name: (*kinds[name][:2], 0, kinds[name].size) for name in changed}
        self._marks = self._marks | {name: kinds[name].mark for name in changed if kinds[name].mark}

    def fill(self, buffers: _Bytes) -> None:
        """Copies the bytes of each array into its buffer; raises a `ValueError` if one differs from the sent one."""
        if buffers.keys() != self._arrays.keys():
            raise damaged(self.source, "its arrays are not those of its layout")
        for name, part in self._parts.items():
            (before, itemsize), into = self._have.get(name, (part, 0)), buffers[name].data
            into[:] = before.data  # as `memoryview`s a copy takes a third of the time
            if self.since is None:  # of the copy: somebody may write into the message meanwhile. It is in the cache now
                self.compare(name, into)
            elif itemsize and part.size:
                with self.understood():
                    _set_rows(part, buffers[name], itemsize)

    def owned(self) -> Iterator[tuple[str, Any]]:
        """Yields all arrays with their names: NumPy arrays in new buffers, or typed keys."""
        data = {name: aligned(stop - start) for name, (_, _, start, stop) in self._arrays.items()}
        self.fill(data)
        for name in list(data):
            yield name, self.decoded(name, data.pop(name))


def _checksum_of(kinds: Mapping[str, StoredAs], parts: _Bytes) -> str:
    """Returns a checksum of arrays with their names and dtypes, whatever their order."""
    lines = [f"{name} {kinds[name].dtype} {crc32(parts[name])}\n" for name in sorted(parts)]
    return str(crc32("".join(lines).encode()))


# -- Elements that have changed ---------------------------------------------------------------------------------------

# Small rates change few of the bits of narrow weights: some 1 to 3 % of bfloat16 elements in a step of Adam at rate
# 1e-6. A change has the number of equal elements before each one that differs, in one byte (and in one more for each
# 255 of them), and the new elements. For 2 % of bfloat16 elements this takes 3.0 % of the bytes of all. A bit for each
# element takes 8.3 %, in half of the time. `zlib` of the exclusive or takes 3.8 %, in three times the time. At 18 %
# they take 27, 24 and 17 % (`benchmarks/wire.py`).

_FURTHEST = 255  # the byte after which a gap goes on
_MOST = 0.5  # of the bytes of an array, above which all of it is sent


def _rows_of(before: np.ndarray, after: np.ndarray, itemsize: int) -> np.ndarray | None:
    """Returns the bytes that turn one array into another; `None` if they are more than about half of the array's.

    Args:
        before: the bytes of an array.
        after: as many bytes.
        itemsize: the size of an element in bytes.
    """
    old, new = (each.view(f"u{itemsize}") for each in (before, after))
    at = np.flatnonzero(old != new)
    if at.size * (1 + itemsize) > _MOST * after.size:
        return None
    further, rest = np.divmod(np.diff(at, prepend=-1) - 1, _FURTHEST)
    gaps = np.full(at.size + further.sum(), _FURTHEST, np.uint8)
    gaps[np.cumsum(further + 1) - 1] = rest
    count = np.array([gaps.size] if at.size else [], np.uint64)
    return np.concatenate([count.view(np.uint8), gaps, new[at].view(np.uint8)])


def _set_rows(rows: np.ndarray, array: np.ndarray, itemsize: int) -> None:
    """Changes the bytes of an array by those between it and another one."""
    count = int(rows[:8].copy().view(np.uint64)[0])
    gaps, elements = rows[8 : 8 + count], rows[8 + count :].copy().view(f"u{itemsize}")
    at = np.cumsum(gaps, dtype=np.int64)[gaps < _FURTHEST] + np.arange(elements.size)
    array.view(f"u{itemsize}")[at] = elements


# -- Parameters in a vector or in stacks ------------------------------------------------------------------------------


def _layout_and_form(restructure: object) -> tuple[Layout, Form]:
    """Returns the layout of a `Restructure`, and the form that it opens."""
    if not isinstance(restructure, Restructure):
        raise TypeError(f"expected the restructure that tp.ravel or tp.stack returns, got {describe(restructure)}")
    return restructure.layout, halves_of(restructure)[1]


@with_object
def _inventory(form: Form) -> Inventory:
    """Returns how the parameters in a form are stored, by name, each in its own dtype; senders often ask."""
    kinds = dict[str, StoredAs]()
    for block, names in zip(form.blocks, _names(form), strict=True):
        for name, dtype, shape in zip(names, block.dtypes, block.shapes, strict=True):
            kinds[name] = stored_as(name, np.broadcast_to(np.zeros((), dtype), shape))
    return Inventory(kinds)


def _bytes_in(form: Form, given: Any) -> _Bytes:
    """Returns the bytes of the parameters in a vector or stacks, each in its own dtype; without a copy if possible."""
    found = dict[str, np.ndarray]()
    for block, names, leaf in zip(form.blocks, _names(form), form.leaves(given), strict=True):
        stored_as(form.noun, leaf)  # refuses arrays without values
        flat = np.asarray(leaf).reshape(-1)
        if set(block.dtypes) <= {flat.dtype}:
            found |= zip(names, _cut(block, flat.view(np.uint8)), strict=True)
        else:
            found |= zip(names, map(bytes_of, map(_as_dtype, _cut(block, flat), block.dtypes)), strict=True)
    return found


def _filled_form(form: Form, received: _Message, like: Any) -> Any:
    """Makes a new vector or new stacks from the parameters in a message, placed like `like`."""
    wholes, buffers = list[np.ndarray](), dict[str, np.ndarray]()
    others = list[tuple[np.ndarray, np.ndarray]]()  # parameters in another dtype than their block has
    for block, names in zip(form.blocks, _names(form), strict=True):
        data = aligned(block.size * np.dtype(block.dtype).itemsize)
        flat = data.view(block.dtype)
        wholes.append(flat.reshape(block.shape))
        if block.length is not None:
            wholes[-1][block.starts[-1] :] = 0  # the padding
        if set(block.dtypes) <= {flat.dtype}:
            buffers |= zip(names, _cut(block, data), strict=True)
        else:
            pieces = _cut(block, flat)
            own = [np.empty(piece.shape, dtype) for piece, dtype in zip(pieces, block.dtypes, strict=True)]
            buffers |= zip(names, map(bytes_of, own), strict=True)
            others += zip(pieces, own, strict=True)
    received.fill(buffers)
    for into, array in others:
        into[...] = array
    leaves = form.leaves(like)
    return jtu.tree_unflatten(form.treedef, list(map(placed, [form.noun] * len(leaves), wholes, leaves)))


@with_object
def _names(form: Form) -> list[list[str]]:
    """Returns the names of the parameters in each block."""
    return [[name_of(form.paths[slot]) for slot in slots] for slots in form.members]


def _cut(block: Block, flat: np.ndarray) -> list[np.ndarray]:
    """Returns views of each array in a flat block, or of the bytes of each in those of the block."""
    row = len(flat) // (block.length or 1)  # of a single array, all of it
    return [flat[row * a : row * b] for a, b in itertools.pairwise(block.starts)]


def _as_dtype(array: np.ndarray, dtype: Any) -> np.ndarray:
    """Casts an array as JAX does when it reads a form: a complex array becomes its real part if the dtype is real."""
    real = np.real(array) if array.dtype.kind == "c" and not is_complex(dtype) else array
    with np.errstate(over="ignore", under="ignore"):
        return real.astype(dtype, copy=False)
