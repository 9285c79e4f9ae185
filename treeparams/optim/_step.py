"""step, apply_updates: the model after a step."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from .._forms.block import Block, cut_blocks
from .._forms.states import Owners
from .._slots.layout import look_up, trained_at
from .._slots.match import per_slot
from .._slots.parts import Parts, take_apart
from .._tree.recognise import structure_of
from .._tree.text import describe
from .._tree.types import PyTree, common_dtype, is_complex
from ._master import copies_in, landed
from ._state import ONE, ModelTransformation, TrainableState, extended, nodes_of, rule_of

M = TypeVar("M")

if TYPE_CHECKING:  # this refuses plain Optax, and also a chain around a transformation over models, of the same type
    OverModels = ModelTransformation
    State = TrainableState
else:
    OverModels = State = Any


def step(tx: OverModels, grads: PyTree, state: State, model: M, **extra: object) -> tuple[M, State]:
    """Takes one training step, `tx.update` and `optim.apply_updates` in one, and keeps the ties that the state records.

    >>> import jax, jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> shared = jnp.array([1.0, 2.0])
    >>> model = {"a": shared, "b": shared, "steps": jnp.array(3)}
    >>> tx = optim.trainable(optax.sgd(0.1))
    >>> state = tx.init(model)
    >>> @jax.jit
    ... def train(model, state):
    ...     grads = tp.grad(lambda m: jnp.sum(m["a"] + 2 * m["b"]), state.layout)(model)
    ...     return optim.step(tx, grads, state, model)
    >>> model, state = train(model, state)
    >>> print(model["a"], model["b"], model["steps"])
    [0.7 1.7] [0.7 1.7] 3

    Args:
        tx: `optim.trainable(...)`, or a chain or wrapper around one of them.
            A type checker cannot tell the latter from plain Optax: annotate it as `Any`.
        grads: the gradient: a tree or a vector, as `tp.project` accepts it.
        state: from `tx.init(model)` or the last step.
        model: any pytree.
        **extra: for `tx`, such as `value` and `value_fn`.

    Returns:
        The model and the next state. Each parameter keeps its dtype, and is its wide copy rounded if `optim.master`
        keeps one; frozen leaves are the same objects. Outside of a trace all paths of a tie have the same array.

    Raises:
        ValueError: the state is of two transformations over models; as `tx.update`.
        TypeError: `tx` is plain Optax; the arguments are in another order; as `tx.update`; a complex update of a real
            parameter.
    """
    is_ours = isinstance(tx, ModelTransformation)
    update: Any = None if is_ours else extended(tx).update
    try:
        if is_ours:
            parts, steps, after = rule_of(tx).step(grads, state, model, extra)
            return _moved(parts, steps, _copies(after)), after
        updates, after = update(grads, state, model, **extra)
    except Exception:
        _check_arguments(tx, grads, state, model)  # plain Optax fails at a model in many ways that name no reason
        raise
    states = nodes_of(TrainableState, after)
    if len(states) != 1:
        _check_arguments(tx, grads, after, model)
    parts = take_apart(model, states[0].layout)
    return _moved(parts, per_slot(parts.index, updates, "first", exact_shapes=True), _copies(states[0])), after


_ORDER = "the order is model, state = optim.step(tx, grads, state, model)"
_PLAIN = "tx is plain Optax, which does not accept models: write tx = optim.trainable(tx), state = tx.init(model)"


def _check_arguments(tx: object, grads: PyTree, state: PyTree, model: PyTree) -> None:
    """Refuses arguments in another order, and a transformation that is not over one model."""
    is_ours, states = isinstance(tx, ModelTransformation), nodes_of(TrainableState, state)
    if len(states) > 1:
        raise ValueError(f"the state is of {len(states)} transformations over models; {ONE}")
    if states and not is_ours and states[0] is state:
        raise TypeError(f"{_PLAIN}. The state is of another transformation")
    if states:
        return
    is_elsewhere = any(nodes_of(TrainableState, each) for each in (grads, model))
    if is_ours or is_elsewhere:
        made = "" if is_elsewhere else "; write state = tx.init(model)"
        raise TypeError(f"the third argument is the state, got {describe(state)}; {_ORDER}{made}")
    raise TypeError(_PLAIN)


def _copies(state: TrainableState) -> dict[str, jax.Array]:
    """Returns the wide copies that `optim.master` keeps, by parameter."""
    divisions = zip(state.runs, state.roles.divisions, strict=False)
    found = [pair for run, division in divisions for pair in copies_in(run, division)]
    if not found:
        return {}
    blocks = [_block(owners, copy, [state.layout[path].shape for path in owners.paths]) for owners, copy in found]
    pieces = cut_blocks(blocks, [copy for _, copy in found])
    return {
        path: piece
        for (owners, _), own in zip(found, pieces, strict=True)
        for path, piece in zip(owners.paths, own, strict=True)
    }


def _block(owners: Owners, copy: jax.Array, shapes: list[tuple[int, ...]]) -> Block:
    """Returns where the pieces of parameters of these shapes lie in a copy."""
    if owners.axis is None:
        return Block.single(copy.shape, copy.dtype)
    if owners.has_rows:
        return Block.rows(shapes[0], copy.dtype, len(shapes))
    return Block.vector(shapes, [copy.dtype] * len(shapes), copy.dtype, copy.size)


def apply_updates(model: M, updates: PyTree) -> M:
    """Adds the updates to the parameters of a model, each in its own dtype.

    >>> import jax.numpy as jnp
    >>> from treeparams import optim
    >>> shared = jnp.array([1.0, 2.0], jnp.bfloat16)
    >>> updates = {"a": jnp.ones(2), "b": jnp.ones(2), "n": None}
    >>> model = optim.apply_updates({"a": shared, "b": shared, "n": 3}, updates)
    >>> model["a"].dtype, model["a"] is model["b"], model["n"]
    (dtype(bfloat16), True, 3)

    The arrays at the paths of a tie stay equal inside `jax.jit` too, since the updates are at all of them. (So you may
    use `eqx.apply_updates` as well; it adds as JAX promotes dtypes.) With `optim.master` use `optim.step`, which sees
    the copies.

    Args:
        model: any pytree.
        updates: the updates that `tx.update` returned; `None` or nothing at a path is no step.

    Returns:
        The model; a leaf without an update is the same object. Outside of a trace all paths of a tie have the same
        array, if the model has the tie or its class declares it; `optim.step` also keeps ties that you gave to a
        layout.

    Raises:
        ValueError: an update at a path that the model does not have, or of another shape.
        TypeError: a complex update of a real parameter.
    """
    # A leaf that has an update moves, also where a class declares it frozen and a layout thawed it.
    layout, index = look_up(structure_of(model)[2], None)
    parts = take_apart(model, trained_at(layout, index.distinct))
    try:
        return _moved(parts, per_slot(parts.index, updates, "first", exact_shapes=True), {})
    except ValueError as error:
        if type(model) is type(updates) and len(jax.tree.leaves(updates)) > len(jax.tree.leaves(model)):
            raise ValueError("the model comes first; write optim.apply_updates(model, updates)") from error
        raise


def _moved(parts: Parts[M], steps: Sequence[Any], copies: Mapping[str, jax.Array]) -> M:
    """Returns the model after a step of each slot; parameters with a wide copy are that copy, rounded."""
    paths = [slot.path for slot in parts.layout.slots]
    slots = list(map(added, paths, parts.slots, steps))
    for slot, path in enumerate(paths if copies else ()):
        old, step = parts.slots[slot], steps[slot]
        if path in copies and step is not None:
            slots[slot] = landed(old, step, copies[path], slots[slot])
    return parts.model(slots)


def added(path: str, leaf: jax.Array | np.ndarray, step: jax.Array | np.ndarray | None) -> jax.Array | np.ndarray:
    """Returns a parameter after its update, in its own dtype."""
    if step is None:
        return leaf
    # Outside of jit, to ask for more, or a cast that does nothing, takes as long as the sum.
    if isinstance(leaf, jax.Array) and isinstance(step, jax.Array) and leaf.dtype == step.dtype and not leaf.weak_type:
        return leaf + step
    if jnp.iscomplexobj(step) and not is_complex(leaf.dtype):
        raise TypeError(f"expected a real update at {path!r}, where the parameter is {leaf.dtype}, got {step.dtype}")
    leaf, step = jnp.asarray(leaf), jnp.asarray(step)
    dtype = common_dtype([leaf.dtype, step.dtype])
    return jax.lax.convert_element_type(leaf.astype(dtype) + step.astype(dtype), leaf.dtype)
