"""The boundary between models and Optax: checks of models, states and gradients, and updates without `None`.

It also counts the steps that narrow parameters lose to rounding.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer

from .._slots.layout import MisfitError, index_of
from .._slots.parts import Parts, take_apart
from .._tree.structure import flatten, is_array, structure_of
from .._tree.types import PyTree
from ._master import MasterState, copies_in
from ._state import ONE, TrainableState, free_rates, map_injected, nodes_of
from ._step import added

# By their states.
_OTHER = {
    optax.LookaheadState: "optax.lookahead needs a pair of models, slow and fast, in place of one",
    optax.contrib.DifferentiallyPrivateAggregateState: "differential privacy needs a gradient for each example",
}


def check_model(params: PyTree) -> None:
    """Checks that `init` received a model, and the whole of it."""
    if type(params).__name__ == "_ParamsPlaceholder":  # of optax.tree_utils.tree_map_params
        raise TypeError(
            "tree_map_params maps the state of plain Optax: pass the transformation inside optim.trainable, and "
            "state.runs[0]"
        )
    if nodes_of(optax.MaskedNode, params):
        raise ValueError(f"a mask, or optax.partition, is around a transformation over models; {ONE}")


def check_run(run: PyTree, parts: Parts[Any]) -> None:
    """Checks that a fresh state is one of plain Optax over the parameters of one model."""
    if nodes_of(TrainableState, run):
        raise ValueError(ONE)
    for kind, why in _OTHER.items():
        if nodes_of(kind, run):
            raise ValueError(f"{why}: run it over tp.partition(model)[0] by hand")
    if nodes_of(MasterState, run):
        jax.tree.map(_check_chain, run, is_leaf=_is_chain)
    rates = list[Any]()
    map_injected(lambda _, node: rates.extend(free_rates(node).values()) or node, run)
    if any(map(jnp.iscomplexobj, rates)) and len(parts.index.complex_slots) < len(parts.slots):
        raise ValueError(
            "because of complex leaves, optax.inject_hyperparams makes the hyperparameters of real ones complex too; "
            "write inject_hyperparams(..., hyperparam_dtype=jnp.float32)"
        )


def taken_apart(model: PyTree, state: TrainableState, grads: PyTree = None) -> Parts[Any]:
    """Takes the model apart by its state's layout, or raises an error that names the argument that does not fit."""
    try:
        return take_apart(model, state.roles.layout)
    except MisfitError as error:
        if None in structure_of(grads)[2].specs:  # functions and numbers are in a model, and not in gradients
            raise ValueError(
                "the gradients contain values that are not arrays, as a model does; the order is tx.update(grads, "
                "state, model), optim.step(tx, grads, state, model)"
            ) from None
        nodes = index_of(state.roles.layout).structure.nodes
        if any(node.cls.__module__.startswith("flax.nnx") for node in nodes):
            raise ValueError(
                "the state was made from variables of flax.nnx, and the model has none: nnx.Optimizer passes one kind "
                "of tree to init and another to update, so write the step yourself: graph, params, rest = "
                "nnx.split(net, nnx.Param, ...); state = tx.init(params); params, state = optim.step(tx, grads, state, "
                "params)"
            ) from None
        raise ValueError(
            "the state was made from another tree (the first below) than this model (the second): write state = "
            "tx.init(model) with the whole model, not eqx.filter(model, ...) or a part of it, and pass the whole model "
            f"to each step:\n{error.differences}"
        ) from None


def _is_chain(node: object) -> bool:
    return type(node) is tuple and len(node) > 1


def _check_chain(node: Any) -> None:
    """Refuses a chain in which another transformation follows wide copies."""
    # It would change the updates, so that no parameter is its copy rounded. Then all copies restart from the parameters
    # in each step, and small steps are lost as without copies.
    if not _is_chain(node):
        return
    *before, last = (bool(nodes_of(MasterState, each)) for each in node)
    if any(before):
        raise ValueError(
            "optim.master must be last in a chain, with everything that makes the step inside it, rates and clips too: "
            "write optim.master(optax.chain(optax.scale_by_adam(), optax.scale_by_learning_rate(1e-4)))"
        )
    if last:
        jax.tree.map(_check_chain, node[-1], is_leaf=_is_chain)


def check_ties(model: PyTree, parts: Parts[Any]) -> None:
    """Checks that the places of each trained tie agree, where their values are known."""
    index, leaves = parts.index, jtu.tree_leaves(model)
    for alias in index.ties:
        pair = have, source = leaves[alias.leaf], leaves[alias.source]
        is_seen = all(isinstance(each, (jax.Array, np.ndarray)) and not isinstance(each, Tracer) for each in pair)
        if not (is_seen and index.trained[alias.source]) or (have is source and not alias.transforms):
            continue
        with jax.ensure_compile_time_eval():  # in a trace, too
            want = alias.value_from(source, index.structure.spec(alias.source))
            tolerance = float(jnp.finfo(want.dtype).eps) ** 0.5 if alias.transforms else 0.0  # many steps of rounding
            is_equal = bool(jnp.allclose(have, want, tolerance, tolerance, equal_nan=True))
        if not is_equal:
            paths = index.structure.paths
            raise ValueError(
                f"{paths[alias.leaf]!r} is tied to {paths[alias.source]!r}, but does not have the value that the tie "
                "gives, so the first step would change it; set it first: layout = tp.layout(model), model = "
                "tp.tie(model, layout)"
            )


def zeros_filled(model: PyTree, updates: PyTree) -> PyTree:
    """Returns the updates, with a zero at each number and array of numbers that has no update."""
    leaves, treedef = flatten(model)
    steps = treedef.flatten_up_to(updates)
    return jtu.tree_unflatten(treedef, map(_or_zero, leaves, steps))


def _or_zero(leaf: Any, step: Any) -> Any:
    """Returns the step, or else -0.0: adding it changes no number, whereas 0.0 would turn -0.0 into 0.0."""
    if step is not None:
        return step
    if is_array(leaf):
        # Nothing can be added to a PRNG key, so no update is right for code that adds one to each leaf.
        is_number = leaf.dtype == bool or jnp.issubdtype(leaf.dtype, jnp.number)
        return jnp.full_like(leaf, complex(-0.0, -0.0) if jnp.iscomplexobj(leaf) else -0.0) if is_number else None
    # Numbers too: a plain `jax.jit` makes arrays of them.
    kind: Any = type(leaf)
    return kind(-0.0) if isinstance(leaf, (bool, int, float, complex, np.number, np.bool_)) else None


# -- Narrow parameters -------------------------------------------------------------------------------------------------


def counting(state: TrainableState) -> TrainableState:
    """Returns the state with counts of lost steps, if it is of narrow parameters without copies by `optim.master`."""
    index, roles, copied = index_of(state.layout), state.roles, _copied(state)
    kept = {leaf for positions in (*roles.running, *roles.held) for leaf in positions}
    is_any = any(leaf in kept and index.structure.paths[leaf] not in copied for leaf in index.narrow)
    known = jnp.zeros(len(index.narrow), jnp.int32) if isinstance(state.still, tuple) else state.still
    return dataclasses.replace(state, still=known if is_any else ())


def _copied(state: TrainableState) -> set[str]:
    """Returns the parameters that `optim.master` keeps copies of."""
    pairs = zip((*state.runs, *state.held), state.roles.divisions, strict=True)
    return {path for run, division in pairs for owners, _ in copies_in(run, division) for path in owners.paths}


def counted(parts: Parts[Any], state: TrainableState, steps: Sequence[Any]) -> Any:
    """Returns the counts of lost steps after one step of each slot."""
    if isinstance(state.still, tuple):
        return state.still
    index, copied = parts.index, _copied(state)
    pairs: list[Any] = [None] * len(index.narrow)
    for slot in index.narrow_slots:
        leaf = index.positions[slot]
        if steps[slot] is not None and index.structure.paths[leaf] not in copied:
            pairs[index.narrow[leaf]] = parts.slots[slot], steps[slot]
    return _counted(state.still, pairs)


_MOVES = 2


@jax.jit  # one call outside of a trace
def _counted(still: jax.Array, pairs: Sequence[tuple[jax.Array, jax.Array] | None]) -> jax.Array:
    effects = jnp.stack([jnp.zeros((), jnp.int32) if pair is None else _effect(*pair) for pair in pairs])
    return jnp.where(effects == _MOVES, 0, still + jnp.where(still < 0, -effects, effects))


@jax.jit  # traced once for all parameters of a shape
def _effect(leaf: jax.Array, step: jax.Array) -> jax.Array:
    """Returns `_MOVES` if a step changes its parameter, 1 if it is not zero and is lost, otherwise 0."""
    # The bits are compared, since compilers may leave out the rounding of a sum that is compared as a number.
    after, bits = added("", leaf, step), f"uint{jnp.finfo(leaf.dtype).bits}"
    has_moved = jax.lax.bitcast_convert_type(after, bits) != jax.lax.bitcast_convert_type(leaf, bits)
    is_lost = jnp.isfinite(leaf) & (jnp.abs(step) > 0)
    # In bytes, since not every compiler reduces the effects as it makes them.
    return jnp.max(jnp.where(has_moved, _MOVES, is_lost.astype(jnp.int8)), initial=0).astype(jnp.int32)
