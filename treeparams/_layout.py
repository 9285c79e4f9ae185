"""The layout of a model: which leaves are trained, which of them are one, and where each lies in the vector.

A layout is static. It holds paths, shapes, dtypes and bools but no array, so it is hashable, goes into `jax.jit` as a
static argument or a closure, and is the same for all models of one kind. Made outside a `jit` and passed in, it tells
what the traced arguments no longer know: which of them are one array.
"""

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jaxtyping import PyTree

from ._describe import differences, first_few
from ._groups import Alias, Group, settle
from ._pack import ONE, Packing, Slot, Vector, count, is_complex, pack, table, unplaced
from ._paths import nearest
from ._select import Choice, Where, change, select
from ._structure import Structure, common_dtype


class Layout:
    """Which leaves of a model are trained and which of them are one: the static map of its parameters.

    Made by `tp.layout`. Two layouts are equal when they describe models of the same structure, static fields, shapes,
    dtypes, trained leaves and ties.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> layout = tp.layout(eqx.nn.Linear(3, 2, key=jax.random.key(0)))
    >>> print(layout)
    path    shape  dtype    offset  size  tied to
    weight  2,3    float32       0     6
    bias    2      float32       6     2
    2 slots, 8 elements, 32 bytes
    >>> layout["bias"].offset, layout.freeze("weight").paths
    (6, ('bias',))
    """

    def __init__(
        self, structure: Structure, trained: tuple[bool, ...], groups: tuple[Group, ...], packing: Packing = ONE
    ) -> None:
        """For this library's own use; users write `tp.layout(model)`."""
        # Equal models share one layout, so it must not change.
        vars(self).update(structure=structure, trained=trained, groups=groups, packing=packing)

    structure: Structure
    trained: tuple[bool, ...]  # of each leaf
    groups: tuple[Group, ...]
    packing: Packing  # as asked of `tp.ravel`

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"a Layout does not change; {name!r} cannot be set. layout.freeze and thaw make another")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Layout does not change; {name!r} cannot be deleted")

    # -- What it says

    @property
    def slots(self) -> tuple[Slot, ...]:
        """The distinct trained parameters, in tree order of the paths that name them."""
        return self._packed[0]

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """The vectors that `tp.ravel` makes: one, unless it was asked for more. Each has `.dtype`, `.size`, `.length`.

        The length is the size, padded as `tp.ravel` was asked to.
        """
        return self._packed[1]

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each slot, in order."""
        return tuple(slot.path for slot in self.slots)

    @functools.cached_property
    def size(self) -> int:
        """The number of trained elements, ties once."""
        return sum(slot.size for slot in self.slots)

    @functools.cached_property
    def nbytes(self) -> int:
        """The bytes of the trained leaves, ties once."""
        return sum(slot.size * jnp.dtype(slot.dtype).itemsize for slot in self.slots)

    @functools.cached_property
    def dtype(self) -> Any:
        """The dtype of the vector: `jnp.result_type` of the slots that have elements; JAX's float when none has.

        Where there are several vectors, that of all of them together.
        """
        return common_dtype(vector.dtype for vector in self.vectors)

    @functools.cached_property
    def ties(self) -> Mapping[str, tuple[str, ...]]:
        """The further paths of each parameter that has any, frozen ones included: `{path: (aliases, ...)}`."""
        paths = self.structure.paths
        ties = {paths[group.source]: tuple(paths[alias.leaf] for alias in group.aliases) for group in self.groups}
        return types.MappingProxyType(ties)

    @property
    def mask(self) -> PyTree[bool]:
        """A tree of the model's structure: `True` at each trained parameter, aliases included."""
        return jtu.tree_unflatten(self.structure.treedef, self.trained)

    def __getitem__(self, path: str) -> Slot:
        """The slot at a path; an alias finds its slot.

        Raises:
            KeyError: there is none; the message names the nearest.
        """
        leaf = self.structure.index.get(path)
        if leaf in self.by_leaf:
            return self.slots[self.by_leaf[leaf]]
        if leaf is None and any(path == node.path for node in self.structure.nodes):
            raise KeyError(f"{path!r} is a node; layout.indices({path!r}) tells where what is trained below it lies")
        if leaf is None:
            known = [self.structure.paths[i] for i in self.by_leaf]
            raise KeyError(f"{path!r} is no path of the model{nearest(path, known)}")
        if self.structure.is_parameter(leaf):
            raise KeyError(f"{path!r} is frozen, so it has no slot; layout.thaw({path!r}) gives it one")
        raise KeyError(f"{self.structure.describe(leaf)} is no parameter")

    # -- Places in the vector

    def slice(self, path: str) -> slice:
        """Where a parameter lies in its vector.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> layout = tp.layout({"a": jnp.ones(2), "b": jnp.ones((2, 2))})
        >>> layout.slice("b")
        slice(2, 6, None)

        Raises:
            KeyError: as `layout[path]`.
        """
        slot = self[path]
        return slice(slot.offset, slot.offset + slot.size)

    def indices(self, where: Where) -> np.ndarray:
        """Where in the vector all that `where` selects lies: positions in ascending order, each once.

        >>> import jax.numpy as jnp, treeparams as tp
        >>> layout = tp.layout({"a": {"w": jnp.ones(2), "b": jnp.ones(1)}, "c": {"w": jnp.ones(2)}})
        >>> print(layout.indices("*.w"))
        [1 2 3 4]

        Raises:
            ValueError: `where` selects nothing that is trained, or parameters in different vectors.
        """
        slots = [self.slots[i] for i in self.chosen(where)]
        if len({slot.vector for slot in slots}) > 1:
            first, other = slots[0], next(slot for slot in slots if slot.vector != slots[0].vector)
            raise ValueError(
                f"{first.path!r} and {other.path!r} lie in different vectors; ask for each vector by itself"
            )
        return np.concatenate([np.arange(slot.offset, slot.offset + slot.size) for slot in slots])

    def block(self, matrix: Any, rows: Where, columns: Where) -> Any:
        """The part of a matrix over the vector - a Hessian, a covariance - that belongs to two parameters.

        >>> import jax, jax.numpy as jnp, treeparams as tp
        >>> vector, restructure = tp.ravel({"a": jnp.ones(2), "b": jnp.ones(3)})
        >>> hessian = jax.hessian(lambda v: jnp.sum(restructure(v)["a"]) * jnp.sum(restructure(v)["b"]))(vector)
        >>> restructure.layout.block(hessian, "a", "b").shape
        (2, 3)

        Args:
            matrix: shape `(n, n)`, with n the length of the vector, or a stack of such, `(*batch, n, n)`.
            rows: a path, or a `where` that selects several parameters.
            columns: the same.

        Returns:
            The block, shape `(*batch, n_rows, n_columns)`.

        Raises:
            ValueError: the matrix has another shape; as `layout.indices`.
        """
        if len(self.vectors) != 1:
            raise ValueError(f"a matrix is over one vector, but {self!r} has {len(self.vectors)}")
        length = self.vectors[0].length
        shape = getattr(matrix, "shape", None)
        if shape is None or shape[-2:] != (length, length):
            got = type(matrix).__name__ if shape is None else f"shape {tuple(shape)}"
            raise ValueError(f"expected an array of shape ({length}, {length}) over the vector of {self!r}, got {got}")
        places = self.indices(rows), self.indices(columns)
        in_one_piece = all(len(each) and each[-1] - each[0] + 1 == len(each) for each in places)
        # Slices put no indices into a compiled program; of a NumPy matrix they would be a view.
        if in_one_piece and not isinstance(matrix, np.ndarray):
            return matrix[(..., *(slice(int(each[0]), int(each[-1]) + 1) for each in places))]
        return matrix[(..., *np.ix_(*places))]

    # -- A new word

    def freeze(self, where: Where) -> "Layout":
        """The layout with what `where` selects frozen. Ties are remembered.

        Raises:
            ValueError: `where` selects nothing, or half of a tie.
        """
        return self.changed(freeze=where)

    def thaw(self, where: Where) -> "Layout":
        """The layout with what `where` selects trained, also where a class declares it frozen.

        Raises:
            ValueError: `where` selects nothing, or half of a tie.
        """
        return self.changed(thaw=where)

    def changed(self, freeze: Where | None = None, thaw: Where | None = None) -> "Layout":
        """The layout after both words; only then are the ties looked at."""
        choice = Choice({i: self.trained[i] for i in self.structure.parameters}, {})
        choice = change(self.structure, change(self.structure, choice, freeze, False), thaw, True)
        return self._with(settle(self.structure, self.groups, choice), self.packing)

    def packed(self, packing: Packing) -> "Layout":
        """The layout with its slots in other vectors.

        Raises:
            TypeError: the dtype asked for does not fit the slots.
        """
        if packing == self.packing:
            return self
        if packing.is_complex and not any(is_complex(slot.dtype) for slot in self.slots):
            raise TypeError(f"no parameter is complex, so the vector cannot be {packing.dtype}")
        return self.structure.remember(("packed", self, packing), lambda: self._with(self.trained, packing))

    def _with(self, trained: tuple[bool, ...], packing: Packing) -> "Layout":
        layout = Layout(self.structure, trained, self.groups, packing)
        if packing.dtype is not None:
            layout.vectors  # noqa: B018 - raises here and not at the first use where the dtype cannot hold a slot
        return layout

    def diff(self, other: "Layout") -> str:
        """What differs between two layouts, in words, one line each; empty when they are equal."""
        lines = list(differences(self.structure, other.structure))
        for path, i in self.structure.index.items():
            j = other.structure.index.get(path)
            if j is not None and self.trained[i] != other.trained[j]:
                here, there = ("trained", "not") if self.trained[i] else ("not trained", "trained")
                lines.append(f"{path!r} is {here} in the first, {there} in the second")
        for path in dict.fromkeys([*self.ties, *other.ties]):
            here, there = self.ties.get(path, ()), other.ties.get(path, ())
            if here != there:
                lines.append(f"{path!r} is tied to {list(here)} in the first, to {list(there)} in the second")
        if not lines and self.groups != other.groups:
            lines.append("their ties have other transforms")
        for name, here, there in zip(Packing._fields, self.packing, other.packing, strict=True):
            if here != there:
                lines.append(f"raveled with {name}={here!r} in the first, {name}={there!r} in the second")
        return "\n".join(lines)

    # -- As a value

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.structure, self.trained, self.groups, self.packing))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Layout):
            return NotImplemented
        return self is other or (
            (self.trained, self.groups, self.packing) == (other.trained, other.groups, other.packing)
            and self.structure == other.structure
        )

    def __reduce__(self) -> Any:
        return Layout, (self.structure, self.trained, self.groups, self.packing)

    def __repr__(self) -> str:
        options = "".join(f"; {option}" for option in self.packing.options())
        names = f" ({first_few(self.paths)})" if self.slots else ""
        frozen = f"{len(self.frozen)} frozen"
        return f"Layout({count(self.slots)}{names}, {self.size:,} elements, {self.dtype}; {frozen}{options})"

    def __str__(self) -> str:
        paths, spec = self.structure.paths, self.structure.spec
        frozen = [unplaced(paths[i], (), spec(i).shape, spec(i).dtype) for i in self.frozen]
        return table(self.slots, frozen, self.tied_to)

    # -- For the other files of this library

    @functools.cached_property
    def tied_to(self) -> dict[str, str]:
        """The further places of each parameter that has any, in words."""
        paths = self.structure.paths
        name = lambda alias: paths[alias.leaf] + (f" ({alias.formula})" if alias.chain else "")
        return {paths[group.source]: ", ".join(map(name, group.aliases)) for group in self.groups}

    @functools.cached_property
    def _packed(self) -> tuple[tuple[Slot, ...], tuple[Vector, ...]]:
        paths, slots = self.structure.paths, []
        for i, aliases in zip(self.positions, self.aliases, strict=True):
            spec, names = self.structure.spec(i), tuple(paths[alias.leaf] for alias in aliases)
            slots.append(unplaced(paths[i], names, spec.shape, spec.dtype))
        return pack(slots, self.packing)

    def chosen(self, where: Where) -> tuple[int, ...]:
        """The slots that `where` selects, in order."""
        leaves = select(self.structure, where)
        found = {self.by_leaf[leaf] for leaf in leaves if leaf in self.by_leaf}
        if not found:
            path = self.structure.paths[min(leaves)]
            raise ValueError(
                f"{where!r} selects only what is frozen, such as {path!r}, which has no place in the vector"
            )
        return tuple(sorted(found))

    @functools.cached_property
    def _by_source(self) -> dict[int, tuple[Alias, ...]]:
        return {group.source: group.aliases for group in self.groups}

    @functools.cached_property
    def distinct(self) -> tuple[int, ...]:
        """The leaf of each parameter, trained or frozen, ties once."""
        return tuple(i for i in self.structure.parameters if i not in self.sources)

    @functools.cached_property
    def positions(self) -> tuple[int, ...]:
        """The leaf of each slot."""
        return tuple(i for i in self.distinct if self.trained[i])

    @functools.cached_property
    def frozen(self) -> tuple[int, ...]:
        """The leaf of each frozen parameter, ties once."""
        return tuple(i for i in self.distinct if not self.trained[i])

    @functools.cached_property
    def aliases(self) -> tuple[tuple[Alias, ...], ...]:
        """The further places of each slot."""
        return tuple(self._by_source.get(i, ()) for i in self.positions)

    @functools.cached_property
    def sources(self) -> dict[int, int]:
        """The leaf that each alias is tied to, frozen ones included."""
        return {alias.leaf: group.source for group in self.groups for alias in group.aliases}

    @functools.cached_property
    def by_leaf(self) -> dict[int, int]:
        """The slot of each trained leaf, aliases included."""
        slots = dict(zip(self.positions, range(len(self.positions)), strict=True))
        return slots | {alias.leaf: slot for slot, aliases in enumerate(self.aliases) for alias in aliases}

    @functools.cached_property
    def canonical_treedef(self) -> Any:
        """The treedef of the canonical tree."""
        return jtu.tree_structure(self.canonical([0] * len(self.positions)))

    def canonical(self, values: Sequence[Any], treedef: Any = None) -> PyTree:
        """The canonical tree of one value per slot: model-shaped, `None` everywhere else."""
        leaves: list[Any] = [None] * len(self.trained)
        for position, value in zip(self.positions, values, strict=True):
            leaves[position] = value
        return jtu.tree_unflatten(self.structure.treedef if treedef is None else treedef, leaves)


Layout.__module__ = "treeparams"
