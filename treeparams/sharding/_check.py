"""Whether a rule fits a plan: the same over its form as leaf by leaf, and no parameters moved by the update."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import optax

from .._mesh import automatic
from .._summary import in_bytes
from .._text import describe, quoted
from ..optim._flat import check_over_vector
from ..optim._per_leaf import PerLeafState
from ..optim._stacked import check_over_stacks
from ._collectives import collectives
from ._plan import Plan

_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it is not run
_SCALARS = 64  # bytes for each slot: of a rule that takes the norm of each


def check_rule(rule: Any, plan: Plan, update: Callable[..., Any], start: Callable[..., Any], shardings: Any) -> None:
    """Checks a rule; `update` and `start` are what is done with it, and `shardings` those of what `start` returns."""
    if not plan.layout.slots:
        return
    if plan.form == "vector":
        check_over_vector(rule, {}, ("sharding.step", 'take form="stacks" with optim.per_leaf, or form="tree"'))
    if plan.form == "stacks" and plan.joined is not None:
        check_over_stacks(rule, plan.joined, {}, "sharding.step", _is_factored, dict)
    if plan.axes.parts == 1 or isinstance(plan.mesh, jax.sharding.AbstractMesh):
        return
    params = plan.shapes()
    with_sharding = lambda leaf, to: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=to)
    state = jax.tree.map(with_sharding, jax.eval_shape(start, params), shardings)
    run = jax.jit(automatic(update, (plan.params, *shardings), plan.mesh))
    value = jax.ShapeDtypeStruct((), np.float32, sharding=plan.whole)
    compiled = run.lower(params, params, *state, value).compile(compiler_options=_QUICK)
    moved = [row for row in collectives(compiled).rows if row.bytes > _SCALARS * len(plan.layout.slots)]
    if not moved:
        return
    matrices = [
        f"{slot.path} ({describe(slot)}, {lies})"
        for slot, lies, parts in plan.rows()
        if parts > 1 and len(slot.shape) > 1
    ]
    raise ValueError(
        f"the update moves parameters between devices ({moved[0].kind} of {in_bytes(moved[0].bytes)}): the rule looks "
        f"at whole leaves, and has parts of {quoted(matrices)}. Let each device own whole rows of stacks: "
        'sharding.plan(model, mesh, {"**": "owned"}, form="stacks") with optim.per_leaf(tx), all rows at once; or '
        'write "whole" for them. Rules that treat all elements alike (optax.adam) take any plan'
    )


def _is_factored(state: Any) -> bool:
    """Whether a state, outside of `optim.per_leaf`, says that large axes are factorised."""
    kinds = (optax.FactoredState, PerLeafState)
    nodes = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, kinds))
    return any(isinstance(node, optax.FactoredState) for node in nodes)
