"""Whether a rule does the same to joined leaves as to the same leaves apart: found by trying a few small ones.

Numbers and shapes are such that what a rule looks at - axes, sizes, norms - tells the leaves apart.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._text import in_short
from ._state import settled, steady


class Way(NamedTuple):
    """A way to show a list of leaves to a rule."""

    show: Callable[[list[Any]], Any]
    read: Callable[[Any], list[Any]]  # and back to the list


_FACTORS = (1.0, 30.0, 5.0)  # gradients of some leaves are larger
_CALLS, _UPDATES = 512, 3  # up to so many calls, until so many updates were not zero: a rule may gather, or warm up
_SCALES = (1e-3, 1.0, 1e3)  # thresholds are passed at one scale or another
_TOLERANCE = 1e-4  # of the largest update of a leaf; sums in another order differ by less
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it runs for milliseconds


def check_same(
    tx: Any,
    shapes: Sequence[tuple[int, ...]],
    ways: Sequence[Way],
    reads_leaves: Callable[[Any], bool],
    extra: Mapping[str, Any],
    words: tuple[str, str, str],
) -> None:
    """Checks that the updates of leaves of these shapes are the same, shown in either way.

    `words` are the name of the function that asks, what the leaves are, and what to write instead.
    """
    name, leaves, instead = words
    try:
        worst = _differences(tx, shapes, ways, reads_leaves, extra)
    except Exception as error:
        raise ValueError(
            f"{name} tries the transformation on {leaves}, and it fails there ({in_short(error)}). {instead[0].upper()}"
            f"{instead[1:]}; if it needs more arguments, give examples of them (trial={{...}})"
        ) from error
    if not np.max(worst) <= _TOLERANCE:  # NaN is not, either
        differ = f"of {leaves}, its updates differ by {', '.join(f'{each:.0e}' for each in worst)} of the largest"
        why = "its state has a mask of leaves, or is factorised by their axes" if worst == [np.inf] else differ
        raise ValueError(f"the transformation looks at the shapes of leaves: {why}; {instead}")


def _differences(
    tx: Any,
    shapes: Sequence[tuple[int, ...]],
    ways: Sequence[Way],
    reads_leaves: Callable[[Any], bool],
    extra: Mapping[str, Any],
) -> list[float]:
    """The largest difference of each leaf at any scale and step, relative to its largest update there."""
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    start, centre, curves = np.random.default_rng(0).normal(size=(3, ends[-1])).astype(np.float32)
    factors = np.resize(np.array(_FACTORS, np.float32), len(shapes))
    curves = np.repeat(factors, np.diff(ends, prepend=0)) * curves**2
    divide = lambda vector: [x.reshape(s) for x, s in zip(jnp.split(vector, ends[:-1]), shapes, strict=True)]
    join = lambda leaves: jnp.concatenate([jnp.ravel(leaf) for leaf in leaves])

    def step(way: Way, carry: Any, scale: Any) -> Any:
        params, state = carry
        at = join(way.read(params))
        loss = lambda params, *_, **__: scale * jnp.sum(curves * (join(way.read(params)) - centre) ** 2)
        grad = way.show(divide(2 * scale * curves * (at - centre)))
        known = {"value": loss(params), "grad": grad, "value_fn": loss}
        updates, after = tx.update(grad, state, params, **known | dict(extra))
        return join(way.read(updates)), (jax.tree.map(jnp.add, params, updates), steady(after, state))

    def begin() -> list[Any]:
        all_params = [way.show(divide(jnp.asarray(start))) for way in ways]
        return [(params, settled(tx.init(params))) for params in all_params]

    both = lambda carries, scale: [step(way, carry, scale) for way, carry in zip(ways, carries, strict=True)]
    carries = jax.eval_shape(begin)
    if reads_leaves(carries):
        return [np.inf]
    traced = jax.make_jaxpr(begin)(), jax.make_jaxpr(both)(carries, np.float32(1))
    if any(isinstance(leaf, Tracer) for each in traced for leaf in each.consts):
        return [0.0]  # there are no values to compare
    # Compiled ahead, they run within jit too, where `init` may be called; of what they return only NumPy sees values.
    begin_now, both_now = (
        jax.jit(f).lower(*args).compile(compiler_options=_QUICK)
        for f, args in ((begin, ()), (both, (carries, np.float32(1))))
    )
    worst = [0.0] * len(shapes)
    for scale in map(np.float32, _SCALES):
        carries, calls, moved = begin_now(), 0, 0
        while calls < _CALLS and moved < _UPDATES:
            (one, first), (other, second) = both_now(carries, scale)
            carries = [first, second]
            one, other = np.asarray(one), np.asarray(other)
            pairs = zip(np.split(one, ends[:-1]), np.split(other, ends[:-1]), strict=True)
            for i, (a, b) in enumerate(pairs):
                gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
                worst[i] = float(np.maximum(worst[i], np.max(gap) / max(np.nanmax(np.abs([a, b])), 1e-30)))
            calls, moved = calls + 1, moved + bool(np.any(one))
    return worst
