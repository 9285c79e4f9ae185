"""Names over a vector: its parts as a mapping from paths to arrays, and changes of parts that give a new vector."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Inexact

from ._cut import cut, join
from ._describe import first_few
from ._flat import as_given, pieces_of
from ._groups import Alias
from ._layout import Layout
from ._mesh import laid_as, replicated
from ._pack import Slot, is_complex
from ._select import Where, select


class View(Mapping[str, Any]):
    """A mapping from paths to the parts of a vector. Made by `restructure.view(vector)`.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> vector, restructure = tp.ravel({"a": {"w": jnp.ones((1, 2)), "b": jnp.zeros(1)}, "c": {"w": jnp.ones(3)}})
    >>> view = restructure.view(vector)
    >>> {path: part.shape for path, part in view.items()}
    {'a.b': (1,), 'a.w': (1, 2), 'c.w': (3,)}

    A path gives the part in the shape of its leaf and the dtype of the vector (an alias gives that of its slot, through
    its transform); any other `where` - a glob, a regex, a class - gives the view of what it selects:

    >>> dict(view["a"])
    {'a.b': Array([0.], dtype=float32), 'a.w': Array([[1., 1.]], dtype=float32)}

    It reads a gradient as it reads parameters, and what reads it can be differentiated in the vector:

    >>> restructure.view(jax.grad(lambda v: jnp.sum(restructure.view(v)["a.w"] ** 2))(vector))["a.w"]
    Array([[2., 2.]], dtype=float32)

    `view.at[where].set(value)`, `.add(value)` and `.multiply(value)` give the changed vector. A view is a pytree whose
    leaves are its vectors. It is no array: arithmetic is done on `view.vector`.
    """

    def __init__(self, layout: Layout, vectors: tuple[Any, ...], chosen: tuple[int, ...] | None = None) -> None:
        """For this library's own use; users write `restructure.view(vector)`."""
        self.layout = layout
        self.chosen = tuple(range(len(layout.slots))) if chosen is None else chosen
        self._inside = frozenset(self.chosen)
        self.vectors = vectors
        # Inside of a trace all is cut at once, since the transpose of many single slices would be slow; XLA drops what
        # nobody reads. Not at the first read: that may be in an inner trace, which the pieces would not outlive. JAX
        # also makes views of stacks, of one number for each vector or of nothing at all; those have no parts.
        is_traced = any(isinstance(vector, Tracer) for vector in vectors)
        shapes = [getattr(vector, "shape", None) for vector in vectors]
        self._has_parts = shapes == [(vector.length,) for vector in layout.vectors]
        self._pieces = pieces_of(layout, vectors) if is_traced and self._has_parts else None

    @property
    def vector(self) -> Inexact[Array, " n"] | Any:
        """The whole vector, or the tuple of them, below the view."""
        return as_given(self.layout, self.vectors)

    @property
    def at(self) -> "At":
        """For `view.at[where].set(value)`: a vector with some of its parts changed."""
        return At(self)

    def __getitem__(self, where: Where) -> Any:
        if self._is_path(where):
            slot = self._slot(where)
            part, alias = self._part(slot), self._alias(slot, where)
            return alias.fill(part, self.layout.structure.spec(self.layout.positions[slot])) if alias else part
        return View(self.layout, self.vectors, self.select(where))

    def __iter__(self) -> Iterator[str]:
        return (self.layout.slots[i].path for i in self.chosen)

    def __len__(self) -> int:
        return len(self.chosen)

    def __contains__(self, path: object) -> bool:
        leaf = self.layout.structure.index.get(path) if isinstance(path, str) else None
        return self.layout.by_leaf.get(leaf) in self._inside if leaf is not None else False

    def __eq__(self, other: object) -> bool:
        return self is other  # whether all is equal is a question for the vectors, as it is for arrays

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"View({first_few(list(map(repr, self)))})"

    def select(self, where: Where) -> tuple[int, ...]:
        """The slots of this view that `where` selects, as positions.

        Raises:
            KeyError: there are none.
        """
        if self._is_path(where):
            return (self._slot(where),)
        try:
            found = [i for i in self.layout.chosen(where) if i in self._inside]
        except ValueError as error:
            raise KeyError(str(error)) from None
        if not found:
            raise KeyError(f"{where!r} selects nothing of this part of the view, which has {list(self)}")
        return tuple(found)

    def to_change(self, where: Where) -> tuple[int, ...]:
        """The same, for writing.

        Raises:
            KeyError: there are none, or `where` selects one only where it is transformed.
            ValueError: the vectors are not such as the layout describes.
        """
        self._check()
        slots, layout = self.select(where), self.layout
        computed = {i: {alias.leaf for alias in layout.aliases[i] if alias.chain} for i in slots}
        if not any(computed.values()):
            return slots
        leaves = {layout.structure.index[where]} if self._is_path(where) else select(layout.structure, where)
        for i in slots:
            its = [leaf for leaf in sorted(leaves) if layout.by_leaf.get(leaf) == i]
            if computed[i].issuperset(its):
                path, source = layout.structure.paths[its[0]], layout.slots[i].path
                raise KeyError(f"{path!r} is computed from {source!r}; change it there")
        return slots

    def _is_path(self, where: Where) -> TypeGuard[str]:
        return isinstance(where, str) and where in self.layout.structure.index

    def _check(self) -> None:
        if not self._has_parts:
            expected = " and ".join(f"({vector.length},)" for vector in self.layout.vectors)
            shapes = [str(getattr(vector, "shape", "none")) for vector in self.vectors]
            raise ValueError(
                f"the parts of a view are those of vectors of shape {expected}, this one has {' and '.join(shapes)}; "
                "read views of a stack of vectors in jax.vmap"
            )

    def _slot(self, path: str) -> int:
        self.layout[path]  # raises where there is no slot
        slot = self.layout.by_leaf[self.layout.structure.index[path]]
        if slot not in self._inside:
            raise KeyError(f"{path!r} is not in this part of the view, which has {list(self)}")
        return slot

    def _alias(self, slot: int, path: str) -> Alias | None:
        """The alias with a transform that a path names."""
        leaf = self.layout.structure.index[path]
        return next((each for each in self.layout.aliases[slot] if each.leaf == leaf and each.chain), None)

    def _part(self, i: int) -> Any:
        if self._pieces is not None:
            return self._pieces[i]
        self._check()
        slot = self.layout.slots[i]
        # With the offset as an operand one compiled slice serves all parts of one size.
        vector = replicated(jnp.asarray(self.vectors[slot.vector]))
        return jax.lax.dynamic_slice(vector, (np.uint32(slot.offset),), (slot.size,)).reshape(slot.shape)


View.__module__ = "treeparams"
jtu.register_pytree_with_keys(
    View,
    lambda view: ([(jtu.SequenceKey(i), each) for i, each in enumerate(view.vectors)], (view.layout, view.chosen)),
    lambda aux, vectors: View(aux[0], tuple(vectors), aux[1]),
    lambda view: (view.vectors, (view.layout, view.chosen)),
)


class At:
    """`view.at`; waits for what is to be changed."""

    def __init__(self, view: View) -> None:
        self.view = view

    def __getitem__(self, where: Where) -> "Change":
        return Change(self.view, self.view.to_change(where))


class Change(NamedTuple):
    """`view.at[where]`; waits for how it is to be changed.

    Each method takes a number, for all elements; an array, for one parameter in its shape or flat, for several as one
    vector in the order of the view; or a mapping with an array for each path, such as a view. It returns the whole new
    vector.
    """

    view: View
    slots: tuple[int, ...]

    def set(self, value: Any) -> Inexact[Array, " n"] | Any:
        """The vector with these elements in place of what was there."""
        return self._changed(lambda part, new: jnp.broadcast_to(new, part.shape), value)

    def add(self, value: Any) -> Inexact[Array, " n"] | Any:
        """The vector with this added to the parts."""
        return self._changed(jnp.add, value)

    def multiply(self, value: Any) -> Inexact[Array, " n"] | Any:
        """The vector with the parts multiplied by this."""
        return self._changed(jnp.multiply, value)

    def _changed(self, change: Callable[[Any, Any], Any], value: Any) -> Any:
        layout = self.view.layout
        slots = [layout.slots[i] for i in self.slots]
        values = dict(zip(self.slots, _values(layout, slots, value), strict=True))
        vectors = list(self.view.vectors)
        for number, old in enumerate(vectors):
            inside = [i for i in layout.vectors[number].slots if i in values]
            if inside:
                vectors[number] = _replaced(jnp.asarray(old), [(layout.slots[i], values[i]) for i in inside], change)
        return as_given(layout, vectors)


def _replaced(vector: Any, parts: Sequence[tuple[Slot, Any]], change: Callable[[Any, Any], Any]) -> Any:
    # The parts and what lies between them, cut, changed and joined: one copy, however many parts there are.
    shapes, news, at = [], {}, 0
    for slot, new in parts:
        if slot.offset > at:
            shapes.append((slot.offset - at,))
        news[len(shapes)] = new.astype(vector.dtype).reshape(-1 if new.ndim else ())
        shapes.append((slot.size,))
        at = slot.offset + slot.size
    shapes.append((vector.shape[0] - at,))
    pieces = cut(replicated(vector), tuple(shapes))
    for i, new in news.items():
        pieces[i] = change(pieces[i], replicated(new))
    return laid_as(join(pieces, tuple(shapes), vector.shape[0]), vector)


def _values(layout: Layout, slots: Sequence[Slot], value: Any) -> list[jax.Array]:
    if isinstance(value, Mapping):
        unwrapped(layout, value)
        paths = [slot.path for slot in slots]
        if set(value) != set(paths):
            raise ValueError(f"expected values at {paths}, got them at {list(value)}")
        values = [_fitting(slot, jnp.asarray(value[slot.path])) for slot in slots]
    elif len(slots) == 1:
        values = [_fitting(slots[0], jnp.asarray(value))]
    else:
        whole = jnp.asarray(value)
        size = sum(slot.size for slot in slots)
        if whole.ndim and whole.shape != (size,):
            raise ValueError(
                f"expected a number, a mapping from paths to arrays, or a vector of the {size} elements selected, got "
                f"shape {whole.shape}"
            )
        values = cut(replicated(whole), tuple((slot.size,) for slot in slots)) if whole.ndim else [whole] * len(slots)
    for slot, new in zip(slots, values, strict=True):
        if is_complex(new.dtype) and not is_complex(layout.vectors[slot.vector].dtype):
            raise TypeError(f"{slot.path!r} lies in a vector of {layout.vectors[slot.vector].dtype}, got {new.dtype}")
    return values


def _fitting(slot: Slot, value: jax.Array) -> jax.Array:
    if value.ndim and value.shape not in (slot.shape, (slot.size,)):
        raise ValueError(f"expected a number or shape {slot.shape} at {slot.path!r}, got shape {value.shape}")
    return value


def unwrapped(layout: Layout, vector: Any) -> Any:
    """What lies below a view, or the vector itself.

    Raises:
        ValueError: the view is one of another layout.
    """
    if not isinstance(vector, View):
        return vector
    if vector.layout != layout:
        raise ValueError(f"a view of another layout than expected (the second):\n{layout.diff(vector.layout)}")
    return vector.vector
