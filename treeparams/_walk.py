"""Walks over the trained parameters of a model, with other trees beside it.

The model comes first and decides what is trained; each slot is visited once, in tree order. The other trees are matched
by path: they may be canonical, partial (`None`, `optax.MaskedNode`, `float0`, a missing branch: nothing here) or of
another type with the same paths, or a dictionary `{path: array}` as `trainables` returns it.
"""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from jaxtyping import PyTree

from ._match import Tied, per_slot
from ._partition import rest_of, slots_of
from ._resolve import resolve

Accumulated = TypeVar("Accumulated")


def maptrainable(
    f: Callable[..., Any], model: PyTree, *rest: PyTree, trainable: Any = None, tied: Tied = None
) -> PyTree:
    """The model with `f` applied to its trained parameters.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> model = {"weight": jnp.ones(2), "steps": jnp.array(3), "name": "linear"}
    >>> tp.maptrainable(lambda x: 2 * x, model)
    {'name': 'linear', 'steps': Array(3, dtype=int32, weak_type=True), 'weight': Array([2., 2.], dtype=float32)}

    With a gradient, in which `None` is no step:

    >>> step = lambda x, g: x if g is None else x - 0.1 * g
    >>> tp.maptrainable(step, model, {"weight": jnp.ones(2)})["weight"]
    Array([0.9, 0.9], dtype=float32)

    What was taken out by path goes back in by path:

    >>> halved = {path: leaf / 2 for path, leaf in tp.trainables(model).items()}
    >>> tp.maptrainable(lambda _, new: new, model, halved)["weight"]
    Array([0.5, 0.5], dtype=float32)

    Args:
        f: called as `f(leaf, *others)` once per slot, with `None` where another tree has nothing.
        model: any pytree.
        *rest: trees with entries at paths of the model, or dictionaries `{path: entry}`; entries at frozen leaves are
            ignored.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        tied: what several entries of another tree at one tie mean: `"sum"` adds them (gradients), `"first"` takes the
            first (values).

    Returns:
        The model with the results in place of the parameters, a tie's at all its paths; all else is as it was.

    Raises:
        ValueError: another tree has an entry at a path that the model has not; it has several entries for a tie and
            `tied` is not given; as `tp.layout`.
        TypeError: as `tp.layout`.
    """
    resolved = resolve(model, trainable)
    others = [per_slot(resolved.layout, tree, tied) for tree in rest]
    kept = rest_of(resolved)
    return kept.fill(list(map(f, slots_of(resolved), *others)))


def biwalk(model: PyTree, other: PyTree, *, trainable: Any = None, tied: Tied = None) -> Iterator[tuple[str, Any, Any]]:
    """The trained parameters of a model together with what another tree has for them.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online, target = {"w": jnp.ones(2), "n": 3}, {"w": jnp.zeros(2), "n": 3}
    >>> for path, leaf, other in tp.biwalk(online, target):
    ...     print(path, leaf, other)
    w [1. 1.] [0. 0.]

    Args:
        model: any pytree; it decides what is trained.
        other: a tree with entries at paths of the model.
        trainable: as for `maptrainable`.
        tied: as for `maptrainable`.

    Returns:
        An iterator of `(path, leaf, other_leaf)`, one per slot in tree order; `other_leaf` is `None` where the other
        tree has nothing.

    Raises:
        ValueError: as `maptrainable`, at once and not at the first step.
        TypeError: as `tp.layout`.
    """
    resolved = resolve(model, trainable)
    others = per_slot(resolved.layout, other, tied)
    return zip(resolved.layout.paths, slots_of(resolved), others, strict=True)


def mapreduce(
    f: Callable[..., Any],
    op: Callable[[Accumulated, Any], Accumulated],
    model: PyTree,
    *rest: PyTree,
    init: Accumulated,
    trainable: Any = None,
    tied: Tied = None,
) -> Accumulated:
    """Folds `f` of the trained parameters with `op`.

    >>> import operator, jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.ones(3)
    >>> model = {"a": shared, "b": shared, "c": jnp.ones(2)}
    >>> tp.mapreduce(lambda x: x.size, operator.add, model, init=0)  # the tie counts once
    5

    Args:
        f: called as `f(leaf, *others)` once per slot, with `None` where another tree has nothing.
        op: called as `op(accumulated, result)`.
        model: any pytree.
        *rest: as for `maptrainable`.
        init: what the fold starts from, and the result when nothing is trained.
        trainable: as for `maptrainable`.
        tied: as for `maptrainable`.

    Returns:
        `op(... op(op(init, f(first)), f(second)) ...)`.

    Raises:
        ValueError: as `maptrainable`.
        TypeError: as `tp.layout`.
    """
    resolved = resolve(model, trainable)
    others = [per_slot(resolved.layout, tree, tied) for tree in rest]
    accumulated = init
    for result in map(f, slots_of(resolved), *others):
        accumulated = op(accumulated, result)
    return accumulated


def trainables(model: PyTree, trainable: Any = None) -> dict[str, Any]:
    """The trained parameters by path, each once.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> linear = eqx.nn.Linear(3, 2, key=jax.random.key(0))
    >>> {path: array.shape for path, array in tp.trainables(linear).items()}
    {'weight': (2, 3), 'bias': (2,)}
    >>> penalty = sum(jnp.sum(jnp.square(array)) for array in tp.trainables(linear, "**.weight").values())

    Args:
        model: any pytree.
        trainable: as for `maptrainable`.

    Returns:
        `{path: array}` in tree order; a tie stands at its first path alone.

    Raises:
        ValueError: as `tp.layout`.
        TypeError: as `tp.layout`.
    """
    resolved = resolve(model, trainable)
    return dict(zip(resolved.layout.paths, slots_of(resolved), strict=True))
