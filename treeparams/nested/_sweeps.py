"""Linear functions of a batch, of many directions, each of them the same for all samples.

`jax.vmap` over the directions would put their axis in front of that of the batch. What multiplies a sample then lies
far apart in memory for one direction, and a net of dense layers takes up to half as long again as `jax.vmap` of
`jax.jacfwd` over samples, which has the axes the other way round. So the axis of the directions is kept second,
equation by equation.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ._equations import CALLS, bind, evaluate, inner


class _Swept(NamedTuple):
    """An array with the directions as its second axis; the first, if it were a scalar."""

    array: jax.Array


def swept(f: Callable[[Any], Any], directions: jax.Array, batch: int) -> Any:
    """The linear function f of the directions, each repeated for all samples.

    Args:
        f: a linear function of one array with a leading axis, the samples.
        directions: of a sample, with a leading axis.
        batch: the number of samples.

    Returns:
        The results, shape `(directions, batch, ...)`.
    """
    one = jax.ShapeDtypeStruct((batch, *directions.shape[1:]), directions.dtype)
    closed = jax.make_jaxpr(f)(one)
    start = _Swept(jnp.broadcast_to(directions[None], (batch, *directions.shape)))
    (result,) = evaluate(closed.jaxpr, closed.consts, [start], _results)
    if not isinstance(result, _Swept):  # it does not depend on the direction
        return jnp.broadcast_to(result, (len(directions), *result.shape))
    return jnp.moveaxis(result.array, 1, 0)


def _results(eqn: Any, operands: list[Any]) -> list[Any]:
    if not any(isinstance(operand, _Swept) for operand in operands):
        return bind(eqn, operands)
    if eqn.primitive.name in CALLS:
        return evaluate(inner(eqn).jaxpr, inner(eqn).consts, operands, _results)
    arrays = [operand.array if isinstance(operand, _Swept) else operand for operand in operands]
    axes = [min(1, operand.array.ndim - 1) if isinstance(operand, _Swept) else None for operand in operands]
    behind = [min(1, len(var.aval.shape)) for var in eqn.outvars]
    return list(map(_Swept, jax.vmap(lambda *arrays: bind(eqn, arrays), axes, behind)(*arrays)))
