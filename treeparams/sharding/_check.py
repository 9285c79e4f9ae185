"""Checks that a state and an optimiser fit a plan.

The state must have the plan's layout. The optimiser must give the same result over the plan's form as leaf by leaf, and
must not move parameters between devices.
"""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from .._forms.mesh import automatic
from .._tree.text import describe, in_bytes, in_short, quoted
from .._tree.types import PyTree
from ..optim._separability import check_form
from ..optim._stacked import WITHIN
from ._compiled.collectives import collectives
from ._placement import Placement
from ._update import Update, sharding_of

_QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # it is not run
_SCALARS = 64  # bytes for each slot: of a rule that takes the norm of each


def check_layout(placement: Placement, said: Mapping[str, Any]) -> None:
    """Checks that a state belongs to this layout; `said` is its `StepState.layout`."""
    digest = placement.layout.digest
    if said.keys() != {digest}:
        raise ValueError(
            f"the state belongs to another layout: its digest is {quoted([*said]) or 'missing'}, the plan's is "
            f"{digest!r}. The layouts differ in paths, shapes, dtypes, trained parameters or ties, so values would go "
            "to the wrong parameters. Make the plan from the model of the state, or start with init(model)"
        )


def check_over_form(placement: Placement, rule: Any) -> None:
    """Checks that a rule gives the same result over joined leaves as leaf by leaf."""
    instead = WITHIN if any(placement.stacked) else 'use form="stacks" with optim.per_leaf, or form="tree"'
    check_form(rule, placement.form, ("sharding.make_step", instead), {})


def check_moves(placement: Placement, update: Update, kept: tuple[PyTree, PyTree]) -> None:
    """Checks that an update moves no parameters; `kept` is its state and average, as shapes with shardings."""
    if not placement.layout.slots:
        return
    # First with shapes alone, without shardings, to tell an error of the rule from one that shardings cause.
    params = placement.shapes()
    value = _value(placement)
    bare = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), (params, params, *kept, value))
    try:
        jax.eval_shape(update.step, *bare)
    except Exception as error:
        raise ValueError(
            f"the update of the rule fails ({in_short(error)}). sharding.make_step passes it gradients, parameters and "
            "only one extra argument, value=; for a rule that calls the loss itself (a line search), use optim.flat"
        ) from error
    if placement.axes.devices == 1 or isinstance(placement.axes.mesh, jax.sharding.AbstractMesh):
        return
    # Only a compiled program tells which arrays XLA moves. So the update is compiled, quickly, and the collectives in
    # its text are counted: a norm of all parameters moves a few numbers, a matrix that is put together moves megabytes.
    compiled = lowered(placement, update, kept).compile(compiler_options=_QUICK)
    moved = collectives(compiled, ignore=0)
    if moved.bytes is not None and moved.bytes <= _SCALARS * len(placement.layout.slots):
        return
    size = "an unknown number of bytes" if moved.bytes is None else in_bytes(moved.bytes)
    raise ValueError(
        f"the update moves parameters between devices (by {moved.rows[0].kind}; {size} in all): {_why_moved(placement)}"
    )


def lowered(placement: Placement, update: Update, kept: tuple[PyTree, PyTree]) -> jax.stages.Lowered:
    """Lowers the program of an update over the mesh."""
    params, value = placement.shapes(), _value(placement)
    run = jax.jit(automatic(update.step, (placement.params, *sharding_of(kept)), placement.axes.mesh))
    return run.lower(params, params, *kept, value)


def _value(placement: Placement) -> jax.ShapeDtypeStruct:
    """Returns the shape of the loss."""
    return jax.ShapeDtypeStruct((), np.float32, sharding=placement.whole)


def _why_moved(placement: Placement) -> str:
    """Says why a rule moves parameters, and how to avoid it."""
    matrices = [
        f"{slot.path} ({describe(slot)}, {each.words})"
        for slot, each in placement.rows
        if each.devices > 1 and len(slot.shape) > 1 and not each.is_owned
    ]
    if matrices:
        reason = (
            f"the rule needs whole leaves, but devices have parts of {quoted(matrices)}. If it treats each leaf "
            "separately (Muon, Adafactor), let devices own whole rows, sharding.plan(model, mesh, "
            '{"**": "owned"}, form="stacks") with optim.per_leaf(tx), or write "whole" for these leaves. A rule that '
            "treats all elements alike (optax.adam) works with any plan, and one with norms and sums over all leaves "
            'with form="vector"'
        )
    else:
        reason = (
            "the rule runs on one row after another, but the rows lie on different devices. In optim.per_leaf leave "
            f"out at_once, or run as many rows together as devices own them, at_once={placement.axes.devices}"
        )
    if not getattr(jax.config, "jax_use_shardy_partitioner", True):  # the default in JAX 0.6
        reason += (
            ". You are using XLA's older partitioner, which moves data needlessly if leaves of one shape are sharded "
            'differently; write jax.config.update("jax_use_shardy_partitioner", True)'
        )
    return reason
