"""flat: Optax over one vector, for rules that are the same on a vector as on the leaves in it: found by trying."""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.core import Tracer

from .._layout import Trainable
from ._shown import Vector, settled, steady
from ._state import ModelTransformation, Plain, nodes_of
from ._trainable import Rule


def flat(tx: Plain, trainable: Trainable = None, *, trial: Mapping[str, Any] | None = None) -> ModelTransformation:
    """The same as `optim.trainable`, over one vector: one operation where there were thousands, and compiled as one.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model = {"a": jnp.ones(2), "b": jnp.ones((2, 2)), "steps": jnp.array(3)}
    >>> tx = optim.flat(optax.sgd(0.1, momentum=0.9))
    >>> state = tx.init(model)
    >>> state.runs[0][0].trace.shape
    (6,)
    >>> updates, state = tx.update({"a": jnp.ones(2)}, state, model)
    >>> updates["a"].shape, updates["steps"]
    ((2,), None)

    **One vector has no holes**: a leaf without a gradient counts as zero here, so its moments decay and it may move.

    For rules that do not look at shapes the result is that of Optax leaf by leaf. Those that do (adafactor, lamb, lars,
    muon, clipping by block) are refused at the first `init`, as are masks of leaves and `optim.groups`. They are found
    by trying, in 0.1 to 0.3 s: some updates of three leaves, of 128 by 128 and of 6 and 3 elements, apart and joined. A
    rule that treats only larger leaves in another way is not found, nor one that closes over traced numbers (a rate
    under `jax.vmap`), of which no values are known.

    Args:
        tx: any Optax transformation that treats all elements alike.
        trainable: as for `optim.trainable`.
        trial: extra arguments that `tx` needs, for the trial. `value`, `grad` and `value_fn` are there.

    Returns:
        A transformation that takes and returns what `optim.trainable` does.

    Raises:
        ValueError: `init`: `tx` is not the same on a vector; otherwise as `optim.trainable`.
        TypeError: as `optim.trainable`.
    """
    rule = Rule(tx, Vector, trainable)
    plain: Any = rule.tx
    tried: list[bool] = []

    def init(vector: Any) -> Any:
        if tried:
            return plain.init(vector)
        try:
            worst = _differences(plain, dict(trial or {}))
        except Exception as error:
            reason = " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]]).rstrip(":")
            raise ValueError(
                "optim.flat tries the transformation on three small leaves, apart and joined to one vector, and it "
                f"fails there ({reason}). Use optim.trainable; if it needs more arguments, give examples of them "
                "(trial={...})"
            ) from error
        if not np.max(worst) <= _TOLERANCE:  # NaN is not, either
            raise ValueError(
                "the transformation looks at the shapes of leaves: of three leaves, apart and joined to one vector, "
                f"its updates differ by {', '.join(f'{each:.0e}' for each in worst)} of the largest; use "
                "optim.trainable"
            )
        tried.append(True)
        return plain.init(vector)

    rule.tx = plain._replace(init=init)
    return ModelTransformation(rule.init, rule.update)


# What rules look at: rank, the sizes of axes (128 is where adafactor begins to factorise), the norm of a leaf, so that
# gradients of the second leaf are larger.
_SHAPES, _FACTORS = ((128, 128), (3,), (2, 3)), (1.0, 30.0, 5.0)
_CALLS, _UPDATES = 512, 3  # up to so many calls, until so many updates were not zero: a rule may gather, or warm up
_SCALES = (1e-3, 1.0, 1e3)  # thresholds are passed at one scale or another
_TOLERANCE = 1e-4  # of the largest update of a leaf; sums in another order differ by less
_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it runs for milliseconds


def _differences(tx: Any, extra: dict[str, Any]) -> list[float]:
    """The largest difference of each leaf at any scale and step, relative to its largest update there."""
    ends = np.cumsum([math.prod(shape) for shape in _SHAPES])
    start, centre, curves = np.random.default_rng(0).normal(size=(3, ends[-1])).astype(np.float32)
    curves = np.repeat(np.array(_FACTORS, np.float32), np.diff(ends, prepend=0)) * curves**2
    divide = lambda vector: [x.reshape(s) for x, s in zip(jnp.split(vector, ends[:-1]), _SHAPES, strict=True)]
    join = lambda tree: jnp.concatenate([jnp.ravel(leaf) for leaf in jax.tree.leaves(tree)])

    def step(carry: Any, scale: Any) -> Any:
        params, state = carry
        loss = lambda params, *_, **__: scale * jnp.sum(curves * (join(params) - centre) ** 2)
        slope = 2 * scale * curves * (join(params) - centre)
        grad = divide(slope) if isinstance(params, list) else slope
        known = {"value": loss(params), "grad": grad, "value_fn": loss}
        updates, after = tx.update(grad, state, params, **known | extra)
        return join(updates), (jax.tree.map(jnp.add, params, updates), steady(after, state))

    begin = lambda: [(params, settled(tx.init(params))) for params in (jnp.asarray(start), divide(start))]
    both = lambda carries, scale: [step(carry, scale) for carry in carries]
    shapes = jax.eval_shape(begin)
    if nodes_of(optax.MaskedState, shapes):
        raise ValueError("it has a mask of leaves, as optax.masked and optim.groups have")
    traced = jax.make_jaxpr(begin)(), jax.make_jaxpr(both)(shapes, np.float32(1))
    if any(isinstance(leaf, Tracer) for each in traced for leaf in each.consts):
        return [0.0]  # there are no values to compare
    # Compiled ahead, they run within jit too, where `init` may be called; of what they return only NumPy sees values.
    begin, both = (
        jax.jit(f).lower(*args).compile(compiler_options=_QUICK)
        for f, args in ((begin, ()), (both, (shapes, np.float32(1))))
    )
    worst = [0.0] * len(_SHAPES)
    for scale in map(np.float32, _SCALES):
        carries, calls, moved = begin(), 0, 0
        while calls < _CALLS and moved < _UPDATES:
            (one, *first), (other, *second) = both(carries, scale)
            carries = [*first, *second]
            one, other = np.asarray(one), np.asarray(other)
            pairs = zip(np.split(one, ends[:-1]), np.split(other, ends[:-1]), strict=True)
            for i, (a, b) in enumerate(pairs):
                gap = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0, np.abs(a - b))
                worst[i] = float(np.maximum(worst[i], np.max(gap) / max(np.nanmax(np.abs([a, b])), 1e-30)))
            calls, moved = calls + 1, moved + bool(np.any(one))
    return worst
