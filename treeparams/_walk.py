"""Walks over the trained parameters of a model, each slot once, together with other trees that are matched by path."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from ._slots.layout import Trainable
from ._slots.match import Tied, per_slot
from ._slots.parts import Parts, take_apart
from ._tree.memory import name_deleted
from ._tree.structure import is_array
from ._tree.text import describe
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
    parts = take_apart(model, trainable)
    _check_function(f, model, parts)
    try:
        results = list(map(f, *_arguments(parts, rest, tied, with_path)))
    except (RuntimeError, ValueError) as error:
        name_deleted(error, model)
        raise
    # Asked of the types, of which there are few, so that no call is made for each leaf.
    if any(issubclass(kind, np.generic) for kind in set(map(type, results))):
        for i, (result, leaf) in enumerate(zip(results, parts.slots, strict=True)):
            if isinstance(result, np.generic):
                results[i] = np.asarray(result) if isinstance(leaf, np.ndarray) else jnp.asarray(result)
    return parts.model(results)


def _check_function(f: object, model: PyTree, parts: Parts) -> None:
    """Raises a `TypeError` if a model, which may be callable, is passed in place of the function."""
    if not callable(f) or (callable(model) and not parts.slots and any(map(is_array, jax.tree.leaves(f)))):
        orders = "tp.maptrainable(f, model), tp.mapreduce(f, op, model, init=0)"
        raise TypeError(f"the function comes first: {orders}; got {describe(f)} in its place")


def _arguments(
    parts: Parts, trees: Sequence[PyTree], tied: Tied | Sequence[Tied], with_path: bool
) -> list[Sequence[Any]]:
    """Returns the arguments of a function, one list for each: paths if asked for, values, entries of other trees."""
    return [*([parts.layout.paths] if with_path else []), parts.slots, *_others(parts, trees, tied)]


def _others(parts: Parts, trees: Sequence[PyTree], tied: Tied | Sequence[Tied]) -> list[list[Any]]:
    """Returns the entries of each of the other trees, one for each slot."""
    words: list[Tied] = [tied] * len(trees) if tied is None or isinstance(tied, str) else list(tied)
    if len(words) != len(trees):
        raise ValueError(f"tied has {len(words)} words for {len(trees)} trees besides the model; pass one per tree")
    return [per_slot(parts.index, tree, word) for tree, word in zip(trees, words, strict=True)]


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
    parts = take_apart(model, trainable)
    return zip(parts.layout.paths, parts.slots, *_others(parts, [other], tied), strict=True)


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
    parts = take_apart(model, trainable)
    _check_function(f, model, parts)
    accumulated = init
    for result in map(f, *_arguments(parts, rest, tied, with_path)):
        accumulated = op(accumulated, result)
    return accumulated


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
