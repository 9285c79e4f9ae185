"""Walks over the trained parameters of a model, each slot once, with other trees that are matched by path; the norm."""

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._forms.mesh import is_sharded
from ._slots.index import Tied
from ._slots.layout import Trainable
from ._slots.parts import Parts, take_apart
from ._tree.structure import flatten, is_array, naming_deleted
from ._tree.text import describe, warn
from ._tree.types import PyTree

M = TypeVar("M")
Accumulated = TypeVar("Accumulated")


def maptrainable(
    f: Callable[..., Any],
    model: M,
    *rest: PyTree,
    trainable: Trainable = None,
    tied: Tied | Sequence[Tied] = None,
    with_path: bool = False,
) -> M:
    """Applies `f` to the trained parameters of a model and returns the new model.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> model = {"weight": jnp.ones(2), "steps": jnp.array(3), "name": "linear"}
    >>> tp.maptrainable(lambda x: 2 * x, model)
    {'name': 'linear', 'steps': Array(3, dtype=int32, weak_type=True), 'weight': Array([2., 2.], dtype=float32)}

    With a gradient, in which `None` means that you take no step:

    >>> step = lambda x, g: x if g is None else x - 0.1 * g
    >>> tp.maptrainable(step, model, {"weight": jnp.ones(2)})["weight"]
    Array([0.9, 0.9], dtype=float32)

    If you pass a gradient and a state, say for each how to read several entries of a tied parameter. The entries of a
    gradient are added; those of the state are one value.

    >>> shared = jnp.array([1.0, 2.0])
    >>> tied = {"a": shared, "b": shared}
    >>> grads = {"a": jnp.ones(2), "b": 2 * jnp.ones(2)}
    >>> state = {"a": 7 * jnp.ones(2), "b": 7 * jnp.ones(2)}
    >>> tp.maptrainable(lambda x, g, s: g + s, tied, grads, state, tied=("sum", "first"))["b"]
    Array([10., 10.], dtype=float32)

    You can read leaves by path, change them and put them back by path:

    >>> halved = {path: leaf / 2 for path, leaf in tp.trainables(model).items()}
    >>> tp.maptrainable(lambda _, new: new, model, halved)["weight"]
    Array([0.5, 0.5], dtype=float32)

    With `with_path=True` your function gets the path too, as in `jax.tree_util.tree_map_with_path`, but as text:

    >>> noisy = lambda path, x: x + 1 if path.endswith("weight") else x
    >>> tp.maptrainable(noisy, model, with_path=True)["weight"]
    Array([2., 2.], dtype=float32)

    Args:
        f: called as `f(leaf, *others)` once per slot, with `None` where another tree has nothing.
        model: any pytree.
        *rest: trees with entries at paths of the model, or dictionaries `{path: entry}`; entries at frozen leaves are
            ignored.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        tied: how to read several entries of another tree for one tied parameter: `"sum"` adds them (gradients),
            `"first"` takes the first (values). One word for all trees, or a tuple with one word per tree.
        with_path: whether `f` is called as `f(path, leaf, *others)`, with the path of the slot as text.

    Returns:
        The model with the results in place of the parameters, at all paths of a tied one; everything else is unchanged.
        If `f` returns a NumPy scalar, as NumPy's arithmetic does for arrays without axes, it becomes an array again.

    Raises:
        ValueError: another tree has an entry at a path that the model does not have; it has several entries for a tied
            parameter and you did not pass `tied`; `tied` does not have one word per tree; see also `tp.layout`.
        TypeError: `f` is not a function; see also `tp.layout`.
    """
    parts, arguments = _taken(f, model, rest, trainable, tied, with_path)
    with naming_deleted(model):
        results = list(map(f, *arguments))
    # Asked of the types, of which there are few, so that no call is made for each leaf.
    if any(issubclass(kind, np.generic) for kind in set(map(type, results))):
        for i, (result, leaf) in enumerate(zip(results, parts.slots, strict=True)):
            if isinstance(result, np.generic):
                results[i] = np.asarray(result) if isinstance(leaf, np.ndarray) else jnp.asarray(result)
    return parts.model(results)


def _taken(
    f: object, model: M, trees: Sequence[PyTree], trainable: Trainable, tied: Tied | Sequence[Tied], with_path: bool
) -> tuple[Parts[M], list[Sequence[Any]]]:
    """Returns a model taken apart, and the arguments of `f`: paths if asked for, values, entries of other trees."""
    parts = take_apart(model, trainable)
    # A model may be callable too.
    if not callable(f) or (callable(model) and not parts.slots and any(map(is_array, jax.tree.leaves(f)))):
        orders = "tp.maptrainable(f, model), tp.mapreduce(f, op, model, init=0)"
        raise TypeError(f"the function comes first: {orders}; got {describe(f)} in its place")
    words: list[Tied] = [tied] * len(trees) if tied is None or isinstance(tied, str) else list(tied)
    if len(words) != len(trees):
        raise ValueError(f"tied has {len(words)} words for {len(trees)} trees besides the model; pass one per tree")
    others = [parts.index.per_slot(tree, word) for tree, word in zip(trees, words, strict=True)]
    return parts, [*([parts.layout.paths] if with_path else []), parts.slots, *others]


def biwalk(
    model: PyTree, other: PyTree, *, trainable: Trainable = None, tied: Tied = None
) -> Iterator[tuple[str, Any, Any]]:
    """Iterates over the trained parameters of a model and the matching entries of another tree.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online, target = {"w": jnp.ones(2), "n": 3}, {"w": jnp.zeros(2), "n": 3}
    >>> for path, leaf, other in tp.biwalk(online, target):
    ...     print(path, leaf, other)
    w [1. 1.] [0. 0.]

    Args:
        model: any pytree; its parameters are iterated over.
        other: a tree with entries at paths of the model.
        trainable: see `maptrainable`.
        tied: see `maptrainable`.

    Returns:
        An iterator of `(path, leaf, other_leaf)`, one per slot in tree order; `other_leaf` is `None` where the other
        tree has nothing.

    Raises:
        ValueError: see `maptrainable`; raised by the call, not by the first step of the iteration.
        TypeError: see `tp.layout`.
    """
    return zip(*_taken(tuple, model, [other], trainable, tied, with_path=True)[1], strict=True)


def mapreduce(
    f: Callable[..., Any],
    op: Callable[[Accumulated, Any], Accumulated],
    model: PyTree,
    *rest: PyTree,
    init: Accumulated,
    trainable: Trainable = None,
    tied: Tied | Sequence[Tied] = None,
    with_path: bool = False,
) -> Accumulated:
    """Applies `f` to each trained parameter and folds the results with `op`.

    >>> import operator, jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.arange(3.0)
    >>> model = {"a": shared, "b": shared, "c": jnp.ones(2)}
    >>> tp.mapreduce(lambda x: x.size, operator.add, model, init=0)  # the tie counts once
    5
    >>> tp.mapreduce(lambda path, x: {path: x.size}, operator.or_, model, init={}, with_path=True)
    {'a': 3, 'c': 2}

    Args:
        f: called as `f(leaf, *others)` once per slot, with `None` where another tree has nothing.
        op: called as `op(accumulated, result)`.
        model: any pytree.
        *rest: see `maptrainable`.
        init: the initial value, and the result if nothing is trained.
        trainable: see `maptrainable`.
        tied: see `maptrainable`.
        with_path: see `maptrainable`.

    Returns:
        `op(... op(op(init, f(first)), f(second)) ...)`.

    Raises:
        ValueError: see `maptrainable`.
        TypeError: see `tp.layout`.
    """
    return functools.reduce(op, map(f, *_taken(f, model, rest, trainable, tied, with_path)[1]), init)


def trainables(model: PyTree, trainable: Trainable = None) -> dict[str, Any]:
    """Returns the trained parameters by path, each once.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    >>> {path: array.shape for path, array in tp.trainables(linear).items()}
    {'weight': (2, 3), 'bias': (2,)}
    >>> penalty = sum(jnp.sum(jnp.square(array)) for array in tp.trainables(linear, "**.weight").values())

    Args:
        model: any pytree.
        trainable: see `maptrainable`.

    Returns:
        `{path: array}` in tree order; a tied parameter appears only at its first path.

    Raises:
        ValueError: see `tp.layout`.
        TypeError: see `tp.layout`.
    """
    parts = take_apart(model, trainable)
    return dict(zip(parts.layout.paths, parts.slots, strict=True))


# -- The global norm: in float32 for narrower leaves, without overflow, with a gradient at zero ------------------------

# Leaves of one shape up to this many elements are summed as one array: XLA compiles one kernel for all in place of one
# for each (1000 leaves of 2x2: 0.8 s in place of 2.8 s, and a third of the run time). Larger ones would cost a copy.
# They are stacked and not joined to a vector, so that arrays that are split over devices stay where they are.
_SMALL = 4096
# A sum of squares above this has lost nothing that counts to underflow, whatever the number of terms.
_SAFE = 2.0**-60


def global_norm(tree: PyTree) -> jax.Array:
    """Computes the Euclidean norm of all floating and complex leaves, safely in every dtype.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> tp.global_norm({"a": jnp.array([3.0]), "b": jnp.array([4.0]), "steps": 7})
    Array(5., dtype=float32)
    >>> print(tp.global_norm([jnp.ones((), jnp.bfloat16)] * 1000))  # added up in bfloat16 it would be 16
    31.622776
    >>> jax.grad(tp.global_norm)(jnp.zeros(2))
    Array([0., 0.], dtype=float32)

    It counts every leaf that you pass, including the frozen leaves of a whole model. So pass the gradient of `tp.grad`
    or `tp.project`, or `tp.partition(model)[0]`, in which a tied parameter appears once. Inside `shard_map` it returns
    the norm of the local shard. Under `jax.vmap`, the data are read twice if any norm in the batch is zero, tiny, huge
    or not finite.

    Args:
        tree: any pytree; leaves that are not floating or complex arrays are ignored.

    Returns:
        A float32 scalar (float64 if any leaf is float64 or complex128); 0 for an empty tree. Complex leaves count by
        modulus. The sum is scaled by the largest entry, so it neither overflows nor vanishes; infinite entries give
        infinity, NaN gives NaN. The gradient at zero is zero.
    """
    if type(tree) is tuple and len(tree) == 2 and getattr(tree[0], "shape", None) == () and not is_array(tree[1]):
        warn("the norm is of a scalar too; of (value, grads) write tp.global_norm(grads)", about=(global_norm,))
    arrays = [leaf for leaf in flatten(tree)[0] if is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)]
    return _norm_of_arrays(arrays)


@jax.jit
def _norm_of_arrays(arrays: Sequence[Any]) -> jax.Array:
    wide = any(jnp.finfo(array.dtype).bits > 32 for array in arrays)
    dtype = jnp.float64 if wide else jnp.float32
    real = [x for array in arrays for x in ([array.real, array.imag] if jnp.iscomplexobj(array) else [array])]
    groups: dict[Any, list[jax.Array]] = {}  # of small ones by their shape
    for i, x in enumerate(real):
        if x.size:
            groups.setdefault(i if x.size > _SMALL or is_sharded(x) else x.shape, []).append(x.astype(dtype))
    stacks = [jnp.stack(each) if len(each) > 1 else each[0] for each in groups.values()]
    return _norm(stacks) if stacks else jnp.zeros((), dtype)


@jax.custom_jvp
def _norm(arrays: list[jax.Array]) -> jax.Array:
    return _batched_norms(0)(arrays)


@functools.cache
def _batched_norms(rank: int) -> Callable[[list[jax.Array]], jax.Array]:
    """Returns the function that computes the norms of real arrays with this many leading batch axes.

    Under `jax.vmap`, a `cond` with a mapped predicate runs both branches. Here one predicate decides for the whole
    batch.
    """

    @jax.custom_batching.custom_vmap
    def norms(arrays: list[jax.Array]) -> jax.Array:
        total = _sum_of_squares(arrays, rank)
        usual = jnp.isfinite(total) & (total > _SAFE)
        # The usual case reads the data once. Only data whose sum overflowed or may have vanished is read again, scaled.
        again = lambda arrays: _scaled_norm(arrays, rank)
        return jax.lax.cond(jnp.all(usual), lambda _: jnp.sqrt(total), again, arrays)

    @norms.def_vmap
    def over_a_batch(size: int, is_mapped: list[list[bool]], arrays: list[jax.Array]) -> tuple[jax.Array, bool]:
        pairs = zip(arrays, is_mapped[0], strict=True)
        return _batched_norms(rank + 1)([x if mapped else jnp.stack([x] * size) for x, mapped in pairs]), True

    return norms


@_norm.defjvp
def _norm_jvp(primals: tuple[list[jax.Array]], tangents: tuple[list[jax.Array]]) -> tuple[jax.Array, jax.Array]:
    # d|x| = <x, dx> / |x|, and zero at zero, where the square root has no derivative. Both are scaled, since near the
    # largest numbers the reciprocal of the norm vanishes.
    norm = _norm(*primals)
    scale = _power_of_two(norm)
    safe = jnp.where(norm == 0, 1, norm / scale)
    pairs = zip(*primals, *tangents, strict=True)
    return norm, functools.reduce(jnp.add, [jnp.sum(x / scale / safe * tangent) for x, tangent in pairs])


def _scaled_norm(arrays: list[jax.Array], rank: int) -> jax.Array:
    scale = _power_of_two(functools.reduce(jnp.maximum, [jnp.max(jnp.abs(x), _axes(x, rank)) for x in arrays]))
    scaled = [x / scale.reshape(*scale.shape, *[1] * (x.ndim - rank)) for x in arrays]
    return scale * jnp.sqrt(_sum_of_squares(scaled, rank))


def _power_of_two(size: jax.Array) -> jax.Array:
    # The one at or below `size`, by which is scaled without rounding; 1 for zero, infinity and NaN. Its reciprocal is a
    # normal number too, since XLA may multiply by that in place of dividing.
    usable = jnp.isfinite(size) & (size > 0)
    exponent = jnp.frexp(jnp.where(usable, size, 1))[1]
    tiny = jnp.finfo(size.dtype).tiny
    return jnp.clip(jnp.ldexp(jnp.ones_like(size), exponent - 1), tiny, 1 / tiny)


def _sum_of_squares(arrays: list[jax.Array], rank: int) -> jax.Array:
    return functools.reduce(jnp.add, [jnp.sum(jnp.square(x), _axes(x, rank)) for x in arrays])


def _axes(array: jax.Array, rank: int) -> tuple[int, ...]:
    return tuple(range(rank, array.ndim))
