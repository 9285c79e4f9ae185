"""Whether a rule fits a plan: the same over its form as leaf by leaf, and no parameters moved by the update."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from .._mesh import automatic
from .._stacks import in_groups
from .._summary import in_bytes
from .._text import describe, in_short, quoted
from ..optim._separability import ANY, check_form, kinds_of, over_vector
from ..optim._stacked import WITHIN
from ._collectives import collectives
from ._like import sharding_of
from ._placement import Placement

_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it is not run
_SCALARS = 64  # bytes for each slot: of a rule that takes the norm of each


def check_rule(rule: Any, place: Placement, update: Callable[..., Any], states: Any) -> None:
    """Checks a rule; `update` is what is done with it, and `states` what it keeps, as shapes with their shardings."""
    if not place.layout.slots:
        return
    if place.form == "vector":
        instead = 'take form="stacks" with optim.per_leaf, or form="tree"'
        check_form(rule, ANY, over_vector, ("sharding.step", instead), {})
    if place.form == "stacks" and place.joined is not None:
        check_form(rule, kinds_of(place.joined), in_groups, ("sharding.step", WITHIN), {})
    params = place.shapes()
    value = jax.ShapeDtypeStruct((), np.float32, sharding=place.whole)
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, params, *states, value))
    try:
        jax.eval_shape(update, *bare)
    except Exception as error:
        raise ValueError(
            f"the update of the rule fails ({in_short(error)}). sharding.step gives it gradients, parameters and, of "
            "extra arguments, value= alone; a rule that calls the loss itself (a line search) goes with optim.flat"
        ) from error
    if place.axes.parts == 1 or isinstance(place.mesh, jax.sharding.AbstractMesh):
        return
    run = jax.jit(automatic(update, (place.params, *sharding_of(states)), place.mesh))
    compiled = run.lower(params, params, *states, value).compile(compiler_options=_QUICK)
    moved = collectives(compiled, ignore=0)
    if moved.bytes is not None and moved.bytes <= _SCALARS * len(place.layout.slots):
        return
    size = "an unknown number of bytes" if moved.bytes is None else in_bytes(moved.bytes)
    matrices = [
        f"{slot.path} ({describe(slot)}, {lies})"
        for slot, lies, parts in place.rows()
        if parts > 1 and len(slot.shape) > 1 and not lies.startswith("whole rows")
    ]
    if matrices:
        reason = (
            f"the rule looks at whole leaves, and has parts of {quoted(matrices)}. If it treats each leaf for itself "
            "(Muon, Adafactor), let devices own whole rows, sharding.plan(model, mesh, "
            '{"**": "owned"}, form="stacks") with optim.per_leaf(tx), or write "whole" for these. What treats all '
            'elements alike (optax.adam) takes any plan, and norms and sums over all leaves form="vector"'
        )
    else:
        reason = (
            f"rows run one after another that lie on different devices. In optim.per_leaf leave at_once out, or let as "
            f"many run together as own them, at_once={place.axes.parts}"
        )
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):  # as in JAX 0.6, if nothing else is said
        reason += (
            ". XLA's older partitioner, which is in use, also moves what it need not where leaves of one shape lie in "
            'different ways: jax.config.update("jax_use_shardy_partitioner", True)'
        )
    raise ValueError(f"the update moves parameters between devices (by {moved.rows[0].kind}; {size} in all): {reason}")
