"""Matrices around another one: that fill in missing data (NaN), or add a change of low rank to a frozen matrix (LoRA).

No NaN may reach a gradient. It is not enough to select the result after the product, since the product's derivative is
zero times NaN. So every NaN is replaced before the product, and the result is selected once more after it.
"""

import abc
import collections
from typing import Any, ClassVar

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, Inexact

from .._slots.ties import find_ties
from .._slots.where import Where, declared_frozen, select
from .._tree.declare import field
from .._tree.static_keys import identical
from .._tree.structure import Structure, same_treedef, scan_tree, structure_of
from .._tree.types import PyTree, TreeDef, is_complex
from ._constrained import as_parameter, as_row, constrained_kinds, is_jax_or_numpy, replaced, wide
from ._matrix import AbstractMatrix, Weight, apply, apply_transposed, as_weight, to_dense


class AbstractImputing(AbstractMatrix):
    """A matrix, and the values that replace missing data in the product with it."""

    matrix: Weight = eqx.field(converter=as_weight)
    psi: Inexact[Array, " entries"] = eqx.field(converter=as_parameter)

    is_of_samples: ClassVar[bool]  # missing as a whole, so that psi has one entry per output; else one per input

    def __check_init__(self) -> None:
        size, one_per = (self.shape[0], "output") if self.is_of_samples else (self.shape[1], "input")
        if self.psi.shape != (size,):
            raise ValueError(
                f"psi of a {type(self).__name__} must have one entry per {one_per}: "
                f"expected shape ({size},) for a matrix of shape {self.shape}, got {self.psi.shape}"
            )

    @property
    def shape(self) -> tuple[int, ...]:
        return self.matrix.shape

    def apply(self, x: Array) -> Array:
        return self._imputed(x, jnp.isnan(x))

    def apply_transposed(self, x: Array) -> Array:
        spoilt = jnp.any(jnp.isnan(x), axis=-1)
        y = apply_transposed(self.matrix, jnp.where(spoilt[..., None], 0, x))
        name = type(self).__name__
        refusal = f"{{}} have NaN, but x @ M of a {name} imputes nothing: use M @ x, or x @ M.T if samples are rows"
        return _nan_where(spoilt, y, refusal)

    def to_dense(self) -> Array:
        """Returns the entries of the matrix alone, which multiply entries that are not missing."""
        return to_dense(self.matrix).astype(self.dtype)

    def matmul(self, x: Array | np.ndarray, *, missing: ArrayLike | None = None) -> Array:
        """Returns the product `M @ x`, with a mask of missing entries.

        >>> import jax.numpy as jnp
        >>> from treeparams import matrices
        >>> weight = matrices.PreImputing(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([10.0, 20.0]))
        >>> weight.matmul(jnp.array([5.0, -1.0]), missing=jnp.array([False, True]))
        Array([45., 95.], dtype=float32)

        The values of x at missing entries have no influence and get a gradient of zero. If your samples are rows, write
        `M.matmul(x.T, missing=missing.T).T`, or `jax.vmap` of this.

        Args:
            x: shape `(in,)`, `(in, batch)` or `(..., in, batch)`, an array.
            missing: bools of the shape of x; for a `PostImputing` also of whole samples, of the shape of x without the
                axis `in`. `None`: entries that are NaN are missing, as in `M @ x`. With a mask, NaN elsewhere is not
                missing.

        Raises:
            ValueError: x holds NaN that the mask does not cover, and as `M @ x`; within a trace such products are NaN.
        """
        if not is_jax_or_numpy(x):
            raise TypeError(f"expected an array, got {type(x).__name__}")
        if missing is None:
            return self @ x
        missing, axis, shape = jnp.asarray(missing), -1 if x.ndim == 1 else -2, x.shape
        x = self._operand(x, axis)
        if missing.dtype != jnp.bool_:
            raise TypeError(f"expected a mask of bools, True where x is missing, got {missing.dtype}")
        shapes = [shape, shape[:axis] + shape[axis:][1:]] if self.is_of_samples else [shape]
        if missing.shape not in shapes:
            expected = " or ".join(map(str, shapes))
            raise ValueError(f"expected a mask of shape {expected} for x of shape {shape}, got {missing.shape}")
        missing = jnp.moveaxis(missing, axis, -1) if missing.ndim == x.ndim else missing[..., None]
        nan = jnp.isnan(x) & ~missing
        y = self._imputed(jnp.where(nan, 0, x), missing)
        refusal = f"{type(self).__name__}.matmul: {{}} have NaN where the mask says that nothing is missing"
        return jnp.moveaxis(_nan_where(jnp.any(nan, axis=-1), y, refusal), -1, axis)

    @abc.abstractmethod
    def _imputed(self, x: Inexact[Array, "*batch columns"], missing: Bool[Array, "*batch #columns"]) -> Array:
        """Returns the product with each vector along the last axis, which holds NaN only at missing entries."""


class PreImputing(AbstractImputing):
    """A matrix that fills in missing entries before the product: those of input i are psi[i].

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> weight = matrices.PreImputing(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([10.0, 20.0]))
    >>> x = jnp.array([[5.0, jnp.nan], [jnp.nan, jnp.nan]])  # two samples: columns
    >>> weight @ x
    Array([[ 45.,  50.],
           [ 95., 110.]], dtype=float32)
    >>> # 1 and 2 missing, times the sum of W's column
    >>> tp.grad(lambda weight: jnp.sum(weight @ x))(weight).psi
    Array([ 4., 12.], dtype=float32)

    An entry that is NaN is missing, and a complex one if either part is NaN; integers have none. Samples are columns in
    `M @ x` and rows in `x @ M.T`; an `equinox.nn.Linear` with this as its weight, under `jax.vmap`, works unchanged. `x
    @ M` and `M.T @ x` are products with the transpose, which impute nothing: NaN there raises a `ValueError`, or makes
    the product NaN within a trace. If you have the mask separately from the data, use `matmul`.

    With psi at zero and centred inputs it starts as mean imputation does. No NaN of x reaches a gradient, of any order:
    missing entries of x get zero, and so does psi if nothing is missing.

    You may put a `LowRank` or an `SVD` inside it. It cannot be the base of a `LowRank`, whose other term would see NaN:
    that raises a `ValueError`.
    Source: Mandlik et al. 2021, "Mill.jl and JsonGrinder.jl: automated differentiable feature extraction for learning
    from raw JSON data".

    Args:
        matrix: `out` by `in`, an array or a matrix.
        psi: shape `(in,)`.
    """

    is_of_samples = False

    def _imputed(self, x: Array, missing: Array) -> Array:
        return apply(self.matrix, jnp.where(missing, as_row(self.psi, x), x))


class PostImputing(AbstractImputing):
    """A matrix whose product with a sample that is missing as a whole is psi.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> weight = matrices.PostImputing(jnp.array([[1.0, 2.0], [3.0, 4.0]]), jnp.array([10.0, 20.0]))
    >>> x = jnp.array([[5.0, jnp.nan], [6.0, jnp.nan]])  # two samples: columns
    >>> weight @ x
    Array([[17., 10.],
           [39., 20.]], dtype=float32)
    >>> tp.grad(lambda weight: jnp.sum(weight @ x))(weight).psi  # how many are missing
    Array([1., 1.], dtype=float32)

    Use it for data that are present or missing as a whole: the readings of one of several instruments, a branch of a
    record. A sample of which only some entries are missing raises a `ValueError` if the values are known, which is
    outside of `jax.jit` and `jax.vmap`; `jax.grad` alone does not hide them. This check adds one reduction to each
    product, and waits for it. Within a trace the product with such a sample is NaN, and it adds nothing to the gradient
    of the matrix or of x.

    Missing entries, the axes of samples, and gradients are as for `PreImputing`. A layer's bias is added to psi as to
    any product. Source: as for `PreImputing`.

    Args:
        matrix: `out` by `in`, an array or a matrix.
        psi: shape `(out,)`.
    """

    is_of_samples = True

    def _imputed(self, x: Array, missing: Array) -> Array:
        some, every = jnp.any(missing, axis=-1), jnp.all(missing, axis=-1)
        whole = some & every  # if there are no entries, `every` is True although nothing is missing
        y = apply(self.matrix, jnp.where(some[..., None], 0, x))
        y = jnp.where(whole[..., None], as_row(self.psi, y), y)
        refusal = "{} are missing in part, but PostImputing needs whole ones: use PreImputing for single entries"
        return _nan_where(some & ~every, y, refusal)


def _nan_where(spoilt: Bool[Array, "*batch"], y: Inexact[Array, "*batch rows"], refusal: str) -> Array:
    """Makes these samples NaN, without a gradient from them; outside of a trace raises an error if there are any."""
    if isinstance(spoilt, Tracer):
        return jnp.where(spoilt[..., None], jnp.nan, y)
    count = int(jnp.sum(spoilt))
    if count:
        raise ValueError(refusal.format(f"{count} of {spoilt.size} samples"))
    return y


PostImputing.__module__ = PreImputing.__module__ = "treeparams.matrices"


# -- Changes of low rank -----------------------------------------------------------------------------------------------


class LowRank(AbstractMatrix):
    """A frozen matrix plus a trained change of low rank: `base + scale * a @ b`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import matrices
    >>> weight = matrices.LowRank(jnp.ones((3, 2)), jnp.ones((3, 1)), jnp.zeros((1, 2)))
    >>> weight @ jnp.ones(2), tp.layout(weight).paths
    (Array([2., 2., 2.], dtype=float32), ('a', 'b'))

    The dtype is that of the base, so that the dtype of a layer's output does not change; factors may have a wider one.
    Source: Hu et al. 2021, "LoRA: Low-Rank Adaptation of Large Language Models".

    Args:
        base: `m` by `n`, an array or a matrix; declared frozen, so that no gradient of it is computed.
        a: shape `(m, rank)`, complex only if the base is.
        b: shape `(rank, n)`.
        scale: a number, not a parameter.
    """

    base: Weight = field(converter=as_weight, trainable=False)
    a: Inexact[Array, "m rank"] = eqx.field(converter=as_parameter)
    b: Inexact[Array, "rank n"] = eqx.field(converter=as_parameter)
    scale: float = eqx.field(static=True, default=1.0)

    def __check_init__(self) -> None:
        m, n = self.base.shape
        rank = self.a.shape[-1]
        if self.a.shape != (m, rank) or self.b.shape != (rank, n):
            raise ValueError(
                f"expected factors of shapes ({m}, rank) and (rank, {n}) for a base of shape ({m}, {n}), "
                f"got {self.a.shape} and {self.b.shape}"
            )
        if is_complex(jnp.result_type(self.a, self.b)) and not is_complex(self.dtype):
            raise TypeError(f"the factors are complex, but the base is {self.dtype}: imaginary parts would be lost")
        for node in filter(_imputes, jax.tree.leaves(self.base, is_leaf=_imputes)):
            name = type(node).__name__
            raise ValueError(
                f"a LowRank cannot have a {name} in its base: the change would multiply the NaN of missing data. Put "
                f"the change inside it: {name}(LowRank(matrix, a, b), psi)"
            )

    @classmethod
    def random(
        cls, base: Weight | Any, rank: int, *, key: Array, scale: float = 1.0, dtype: DTypeLike | None = None
    ) -> "LowRank":
        """Makes factors that change nothing yet: random columns of `a`, about of unit length, and `b` zero.

        The other arguments are as for `lora`.
        """
        if rank < 1:
            raise ValueError(f"the rank of a change must be at least 1, got {rank}")
        base = as_weight(base)
        m, n = base.shape
        dtype = base.dtype if dtype is None else dtype
        a = jax.random.normal(key, (m, rank), dtype) / max(m, 1) ** 0.5
        return cls(base, a, jnp.zeros((rank, n), dtype), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.base.shape

    @property
    def dtype(self) -> np.dtype:
        return jnp.result_type(self.base.dtype)

    def apply(self, x: Array) -> Array:
        return apply(self.base, x) + self.scale * apply(self.a, apply(self.b, x))

    def apply_transposed(self, x: Array) -> Array:
        change = apply_transposed(self.b, apply_transposed(self.a, x))
        return apply_transposed(self.base, x) + self.scale * change

    def to_dense(self) -> Array:
        base = to_dense(self.base)
        return _with_change(base, (self.scale * wide(self.a) @ wide(self.b)).astype(base.dtype))


def _imputes(node: object) -> bool:
    return isinstance(node, AbstractImputing)


@jax.custom_jvp
def _with_change(base: Array, change: Array) -> Array:
    # Minus zero plus zero is zero, but an untouched base must stay the same bit for bit.
    return jnp.where(change == 0, base, base + change)


@_with_change.defjvp
def _changed_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]) -> tuple[Array, Array]:
    return _with_change(*primals), tangents[0] + tangents[1]


def lora(
    model: PyTree, where: Where, rank: int, *, key: Array, scale: float = 1.0, dtype: DTypeLike | None = None
) -> PyTree:
    """Adds low-rank changes to the matrices that `where` selects, and freezes only these matrices.

    They are frozen for this library: differentiate with `tp.grad`, or split with `tp.partition`. A plain loop of
    Equinox, with `eqx.filter_grad` and Optax over all arrays, ignores this and moves the base as well.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> from treeparams import matrices
    >>> mlp = eqx.nn.MLP(4, 2, 8, depth=1, key=jax.random.key(0))
    >>> model = matrices.lora(mlp, "layers.0", 2, key=jax.random.key(1))
    >>> print(tp.layout(model))
    path                  shape  dtype    elements  bytes  role
    layers.0.weight.base  8,4    float32        32  128 B  frozen
    layers.0.weight.a     8,2    float32        16   64 B  trained
    layers.0.weight.b     2,4    float32         8   32 B  trained
    layers.0.bias         8      float32         8   32 B  trained
    layers.1.weight       2,8    float32        16   64 B  trained
    layers.1.bias         2      float32         2    8 B  trained
    <BLANKLINE>
    trained    50 elements in 5 arrays, 200 B
    frozen     32 elements in 1 array, 128 B
    no arrays  activation (function), final_activation (function)

    At first the model computes the same. (This does not hold for an embedding, which looks up rows and multiplies
    nothing: leave it out.) Inside a plain `jax.jit` ties are not known. To train the factors alone, pass
    `tp.layout(model, matrices.LowRank)` or write `trainable=matrices.LowRank`; `merge` folds them in.

    Args:
        model: any pytree.
        where: as for `tp.layout`. It changes every selected parameter with two axes, and every matrix, including your
            own classes, of which it selects all parameters. Parameters with one axis or none, such as a bias, stay as
            they are. An array at several paths must be selected at all of them and gets one change.
        rank: of the changes.
        key: of `jax.random`.
        scale: of the changes.
        dtype: of the factors; `None`: that of each base.

    Raises:
        ValueError: `where` selects nothing with two axes, an array with more, a part of a matrix, or only some of the
            paths of one array.
        TypeError: the model does not come first.
    """
    if isinstance(model, (str, type)):
        raise TypeError(f"the model comes first, got {model!r}: matrices.lora(model, where, rank, key=key)")
    structure = structure_of(model)[2]
    units, treedef = jtu.tree_flatten(model, is_leaf=_is_unit)
    unit_of = [i for i, unit in enumerate(units) for _ in jtu.tree_leaves(unit)]
    chosen = _units_to_change(structure, _above(units, treedef), units, unit_of, where)
    first = _first_of_tie(structure, units, unit_of, chosen, where)
    bases = sorted(set(first.values()))
    keys = dict(zip(bases, jax.random.split(key, len(bases)), strict=True))
    changed = {i: LowRank.random(units[i], rank, key=keys[i], scale=scale, dtype=dtype) for i in bases}
    for i in chosen:
        units[i] = changed[first[i]]
    return jtu.tree_unflatten(treedef, units)


def merge(model: PyTree) -> PyTree:
    """Returns the model with every `LowRank` folded into an array, as if it had never been there.

    >>> import equinox as eqx, jax, jax.numpy as jnp
    >>> from treeparams import matrices
    >>> layer = eqx.nn.Linear(4, 2, key=jax.random.key(0))
    >>> model = matrices.lora(layer, "weight", 1, key=jax.random.key(1))
    >>> bool(jnp.all(matrices.merge(model).weight == layer.weight))
    True

    A `LowRank` at several paths becomes one array. If its change is still zero, you get its base bit for bit. A base
    that is a matrix becomes an array too, so a base of integers then takes the memory of floating numbers; make another
    matrix of it, or keep the `LowRank`.

    Args:
        model: any pytree.
    """
    return replaced(model, LowRank, LowRank.to_dense)


# -- A unit is an array, a matrix, or a constrained array: it is changed as a whole, or stays as it is


def _is_unit(node: object) -> bool:
    # A change of an imputing matrix would multiply NaN, so the matrix inside it is changed.
    return isinstance(node, (AbstractMatrix, *constrained_kinds())) and not _imputes(node)


def _above(units: list[Any], treedef: TreeDef) -> Structure:
    """Returns the structure of the model above its units: each is one array there."""
    arrays = [jax.ShapeDtypeStruct((), jnp.float32) if _is_unit(unit) else unit for unit in units]
    return scan_tree(jtu.tree_unflatten(treedef, arrays), arrays, treedef)


def _units_to_change(
    structure: Structure, above: Structure, units: list[Any], unit_of: list[int], where: Where
) -> list[int]:
    """Returns the units that are changed."""
    selected: dict[int, list[int]] = {}
    for leaf in sorted(select(structure, where)):
        selected.setdefault(unit_of[leaf], []).append(leaf)
    sizes = collections.Counter(unit_of[leaf] for leaf in structure.parameters)
    frozen, chosen = declared_frozen(above), []
    for i, inside in selected.items():
        unit, path, is_matrix = units[i], above.paths[i], isinstance(units[i], AbstractMatrix)
        if not is_matrix and all(len(structure.spec(leaf).shape) < 2 for leaf in inside):
            continue
        is_inside = (
            f"{structure.paths[inside[0]]!r} is a part of {f'{path!r}, ' if path else ''}a {type(unit).__name__}"
        )
        if isinstance(unit, constrained_kinds()):
            raise ValueError(f"{is_inside}, whose constraint a low-rank change would break: leave it out")
        if len(inside) < sizes[i]:
            raise ValueError(f"{is_inside}, which is changed as a whole: select all of it, or nothing")
        if len(unit.shape) > 2:
            raise ValueError(
                f"a low-rank change needs a matrix, but {path!r} has shape {unit.shape}. Leave out other arrays, such "
                "as a convolution with its bias, by name: ['**.weight', '!conv']. For an ensemble, call lora inside "
                "equinox.filter_vmap"
            )
        if i in frozen:
            raise ValueError(f"{path!r} is declared frozen, so the factors in its place would be frozen too")
        chosen.append(i)
    if not chosen:
        raise ValueError(f"{where!r} selects no parameter with two axes, so there is nothing to change at low rank")
    return chosen


def _first_of_tie(
    structure: Structure, units: list[Any], unit_of: list[int], chosen: list[int], where: Where
) -> dict[int, int]:
    """Returns for each chosen unit the first unit of its tie, found by identity or declared."""
    first = {i: i for i in chosen}
    for alias in find_ties(structure):
        ends = {unit_of[leaf]: repr(structure.paths[leaf]) for leaf in (alias.leaf, alias.source)}
        inside = [i for i in ends if i in first]
        if not inside or len(ends) == 1:
            continue
        if alias.transforms:
            why = "tied through a transform, which a low-rank change of either would undo: leave both out"
        elif len(inside) == 1:
            why = f"one array, but {where!r} selects only the latter: select both, or tp.untie the model first"
        elif not _are_one_matrix(*(units[i] for i in ends)):
            why = "one array in matrices that differ, so that neither gets the other's change: leave both out"
        else:
            first |= dict.fromkeys(ends, min(first[i] for i in ends))
            continue
        raise ValueError(f"{' and '.join(ends[i] for i in sorted(ends, key=first.__contains__))} are {why}")
    return first


def _are_one_matrix(unit: Any, other: Any) -> bool:
    """Returns whether two units that share an array are the same matrix."""
    (leaves, treedef), (others, of_other) = map(jtu.tree_flatten, (unit, other))
    both_arrays = not _is_unit(unit) and not _is_unit(other)  # which may be declared to be one
    return both_arrays or (same_treedef(treedef, of_other) and identical(leaves, others))


LowRank.__module__ = "treeparams.matrices"
