"""Names over a vector or stacks: a mapping from paths to parameters, and updates that return a new vector or stacks."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike

from .._slots.index import Index, Slot
from .._slots.layout import Layout, index_of
from .._slots.where import Where, select
from .._tree.text import first_few
from .._tree.types import is_complex
from .form import Form
from .mesh import laid_as, replicated

Values = Mapping[str, Any] | Sequence[Any] | ArrayLike
"""The values that a user passes for some parameters: a number, an array, or an array for each path."""


class View(Mapping[str, Any]):
    """A mapping from paths to the parameters in a vector or in stacks. You get one from `restructure.view(vector)`.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> model = {"a": {"w": jnp.ones((1, 2)), "b": jnp.zeros(1)}, "c": {"w": jnp.ones(3)}}
    >>> vector, restructure = tp.ravel(model)
    >>> view = restructure.view(vector)
    >>> {path: array.shape for path, array in view.items()}
    {'a.b': (1,), 'a.w': (1, 2), 'c.w': (3,)}

    A path returns the array in the shape of its leaf and the dtype of the vector or stack. An alias returns the array
    of its slot, through its transform. Any other `where` - a glob, a regex, a class - returns the view of the
    parameters that it selects:

    >>> dict(view["a"])
    {'a.b': Array([0.], dtype=float32), 'a.w': Array([[1., 1.]], dtype=float32)}

    You can read a gradient in the same way as parameters, and differentiate a function that reads from a view:

    >>> restructure.view(jax.grad(lambda v: jnp.sum(restructure.view(v)["a.w"] ** 2))(vector))["a.w"]
    Array([[2., 2.]], dtype=float32)

    `view.at[where].set(value)`, `.add(value)` and `.multiply(value)` return the changed vector or stacks. A view is
    neither an array nor a pytree: do arithmetic on `view.form`, and pass `view.form` to `jax.jit`.
    """

    def __init__(
        self, layout: Layout, form: Form, leaves: Sequence[Any], chosen: tuple[int, ...] | None = None
    ) -> None:
        """Used by this library; write `restructure.view(vector)`."""
        self._layout = layout
        self._form = form
        self._leaves = leaves
        self._chosen = tuple(range(len(layout.slots))) if chosen is None else chosen
        self._inside = frozenset(self._chosen)
        # Inside of a trace all pieces are cut at once: the transpose of many slices, each by itself, is as many padded
        # additions. XLA drops the pieces that nobody reads. Outside of one, only what is read is cut.
        pairs = enumerate(zip(form.blocks, leaves, strict=True))
        self._pieces = {b: block.pieces(leaf) for b, (block, leaf) in pairs if isinstance(leaf, Tracer)}

    @property
    def _index(self) -> Index:
        return index_of(self._layout)  # which is pickled as its model's structure, and an `Index` is not

    @property
    def form(self) -> Any:
        """The vector, or the stacks, of this view."""
        return jtu.tree_unflatten(self._form.treedef, self._leaves)

    @property
    def at(self) -> "_At":
        """Selects parameters to change: `view.at[where].set(value)` returns the new vector or stacks."""
        return _At(self._change)

    def __getitem__(self, where: Where) -> Any:
        if not self._is_path(where):
            return View(self._layout, self._form, self._leaves, self._select(where))
        slot, index = self._slot(where), self._index
        leaf, source = index.structure.index[where], index.positions[slot]
        alias = next((each for each in index.aliases.get(source, ()) if each.leaf == leaf), None)
        return alias.value_from(self._array(slot), index.structure.spec(source)) if alias else self._array(slot)

    def __iter__(self) -> Iterator[str]:
        return (self._index.slots[i].path for i in self._chosen)

    def __len__(self) -> int:
        return len(self._chosen)

    def __contains__(self, path: object) -> bool:
        leaf = self._index.structure.index.get(path, -1) if isinstance(path, str) else -1
        return self._index.by_leaf.get(leaf) in self._inside

    def __eq__(self, other: object) -> bool:
        return self is other  # whether all is equal is a question for what they are made of, as it is for arrays

    __hash__ = object.__hash__  # pyright: ignore[reportAssignmentType] - a `Mapping` has none

    def _ipython_key_completions_(self) -> list[str]:
        return list(self)

    def __repr__(self) -> str:
        return f"View({first_few(list(map(repr, self)))})"

    def _select(self, where: Where) -> tuple[int, ...]:
        """Returns the slots of this view that `where` selects."""
        if self._is_path(where):
            return (self._slot(where),)
        try:
            found = [i for i in self._index.slots_in(where) if i in self._inside]
        except ValueError as error:
            raise KeyError(str(error)) from None
        if not found:
            raise KeyError(f"{where!r} selects nothing in this part of the view, which has {list(self)}")
        return tuple(found)

    def _change(self, where: Where) -> "_Selected":
        """Returns the slots that `where` selects, for writing."""
        slots, index = self._select(where), self._index
        change = _Selected(self._form, self._leaves, slots, tuple([index.slots[i] for i in slots]))
        if not index.computed:
            return change
        paths = index.structure.index
        leaves = {paths[where]} if self._is_path(where) else select(index.structure, where)
        for i in slots:
            # A slot may be selected through an alias that is computed from it, and by no path of its own.
            its = [leaf for leaf in sorted(leaves) if index.by_leaf.get(leaf) == i]
            if index.follows.keys() >= set(its):
                path, source = index.structure.paths[its[0]], index.slots[i].path
                raise KeyError(f"{path!r} is computed from {source!r}; change {source!r} instead")
        return change

    def _is_path(self, where: Where) -> TypeGuard[str]:
        return isinstance(where, str) and where in self._index.structure.index

    def _slot(self, path: str) -> int:
        slot = self._index.slot_at(path)
        if slot not in self._inside:
            raise KeyError(f"{path!r} is not in this part of the view, which has {list(self)}")
        return slot

    def _array(self, i: int) -> jax.Array:
        """Returns the array of a slot, in its own shape."""
        b, number = self._form.locations[i]
        if b in self._pieces:
            return self._pieces[b][number]
        block = self._form.blocks[b]
        leaf = block.gathered(self._leaves[b])
        # With the offset as an operand one compiled slice serves all arrays of one size.
        start, stop = block.starts[number : number + 2]
        zeros = [np.uint32(0)] * block.rank
        piece = jax.lax.dynamic_slice(leaf, [np.uint32(start), *zeros], (stop - start, *leaf.shape[1:]))
        return piece.reshape(block.shapes[number])


View.__module__ = "treeparams"


class _At:
    """`view.at`: index it with a `where`."""

    def __init__(self, change: "Callable[[Where], _Selected]") -> None:
        self._change = change

    def __getitem__(self, where: Where) -> "_Selected":
        return self._change(where)


class _Selected(NamedTuple):
    """`view.at[where]`: call one of its methods to change the selected parameters.

    Each method accepts a number, which applies to all elements; an array, for one parameter in its shape or flat, for
    several as one vector in the order of the view; or a mapping with an array for each path, such as a view. It returns
    the whole new vector, or all stacks.
    """

    form: Form
    leaves: Sequence[Any]
    numbers: tuple[int, ...]
    slots: tuple[Slot, ...]

    def set(self, value: Values) -> Any:
        """Returns the form with the selected elements replaced by `value`."""
        return self._changed(lambda old, new: jnp.broadcast_to(new, old.shape), value)

    def add(self, value: Values) -> Any:
        """Returns the form with `value` added to the selected elements."""
        return self._changed(jnp.add, value)

    def multiply(self, value: Values) -> Any:
        """Returns the form with the selected elements multiplied by `value`."""
        return self._changed(jnp.multiply, value)

    def _changed(self, change: Callable[[Any, Any], Any], value: Values) -> Any:
        leaves = list(map(jnp.asarray, self.leaves))
        news: dict[int, dict[int, jax.Array]] = {}  # of each leaf, by number within it
        dtypes = [leaves[self.form.locations[number][0]].dtype for number in self.numbers]

        def changed(old: jax.Array, new: jax.Array) -> jax.Array:
            new = replicated(new.astype(old.dtype))
            return laid_as(change(old, laid_as(new.reshape(old.shape), old) if new.ndim else new), old)

        for number, new in zip(self.numbers, _values_for(self.slots, dtypes, value), strict=True):
            b, n = self.form.locations[number]
            news.setdefault(b, {})[n] = new
        for b, its in news.items():
            leaves[b] = self.form.blocks[b].changed(leaves[b], its, changed)
        return jtu.tree_unflatten(self.form.treedef, leaves)


def _values_for(slots: Sequence[Slot], dtypes: Sequence[Any], value: Values) -> list[jax.Array]:
    """Returns the value for each slot: a number, or an array in its shape or flat."""
    if len(slots) == 1 and not isinstance(value, Mapping):
        value = {slots[0].path: value}
    if isinstance(value, Mapping):
        paths = [slot.path for slot in slots]
        if set(value) != set(paths):
            raise ValueError(f"expected values at {paths}, got them at {list(value)}")
        values = [jnp.asarray(value[path]) for path in paths]
        for slot, new in zip(slots, values, strict=True):
            if new.ndim and new.shape not in (slot.shape, (slot.size,)):
                raise ValueError(f"expected a number or shape {slot.shape} at {slot.path!r}, got shape {new.shape}")
    else:
        whole = jnp.asarray(value)
        size = sum(slot.size for slot in slots)
        if whole.ndim and whole.shape != (size,):
            what = f"expected a number, a mapping from paths to arrays, or a vector of the {size} elements selected"
            raise ValueError(f"{what}, got shape {whole.shape}")
        ends = np.cumsum([slot.size for slot in slots])[:-1]
        values = jnp.split(replicated(whole), ends) if whole.ndim else [whole] * len(slots)
    for slot, dtype, new in zip(slots, dtypes, values, strict=True):
        if is_complex(new.dtype) and not is_complex(dtype):
            raise TypeError(f"{slot.path!r} is in an array of {dtype}, which cannot hold {new.dtype}")
    return values
