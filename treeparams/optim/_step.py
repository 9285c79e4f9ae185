"""step, apply_updates: the model after a step; value_and_grad_from_state, eval_params: other results from a state."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from .._forms.form import Form, cut_blocks, stacks_of, tree_of, vector_of
from .._forms.states import Division
from .._grad import value_and_grad
from .._slots.layout import Layout, look_up, trained_at
from .._slots.match import per_slot
from .._slots.parts import Parts, take_apart
from .._tree.paths import key_entries
from .._tree.structure import structure_of
from .._tree.text import describe
from .._tree.types import PyTree, common_dtype, is_complex
from ._master import copies_in, landed
from ._per_leaf import PerLeafState
from ._state import ONE, History, ModelTransformation, TrainableState, extended, model_state, nodes_of, rule_of

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
    blocks = [dataclasses.replace(owners.block, dtype=copy.dtype, dtypes=()) for owners, copy in found]
    pieces = cut_blocks(blocks, [copy for _, copy in found])
    return {
        path: piece
        for (owners, _), own in zip(found, pieces, strict=True)
        for path, piece in zip(owners.paths, own, strict=True)
    }


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


# -- What a state holds beside its moments -----------------------------------------------------------------------------


def value_and_grad_from_state(f: Callable[..., Any]) -> Callable[..., tuple[jax.Array, PyTree]]:
    """Makes `tp.value_and_grad(f)` reuse the value and gradient that a line search has left in the state.

    >>> import jax, jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model = {"w": jnp.array([1.0, 2.0]), "steps": 3, "activation": jnp.tanh}
    >>> loss = lambda model: jnp.sum(model["w"] ** 2)
    >>> tx = optim.trainable(
    ...     optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9, store_grad=True))
    ... )
    >>> state, value_and_grad = tx.init(model), optim.value_and_grad_from_state(loss)
    >>> for _ in range(2):
    ...     value, grads = value_and_grad(model, state=state)
    ...     model, state = optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss)
    >>> round(float(value), 3), model["steps"], model["activation"] is jnp.tanh
    (1.8, 3, True)

    It is `optax.value_and_grad_from_state` for models that contain frozen parts, ties, functions and integers. A line
    search ends with the loss and its gradient at the point where the next step begins, so each step evaluates the loss
    once less. The model and the further arguments must be those that the search has seen: if each step has another
    batch, write `tp.value_and_grad`. The function calls `f` if the state holds no finite value, as before the first
    step, and if parameters have taken different numbers of steps, as after `optim.set_trainable`.

    Args:
        f: the loss, a function of the model and further arguments, as you pass it to the line search as `value_fn`.

    Returns:
        A function of the same arguments and `state=`, the state of `optim.trainable`. It returns
        the value, in the dtype that the state has it in, and the canonical gradient.

    Raises:
        ValueError: when called: no line search in the state keeps value and gradient, or several do; the state is not
            that of one transformation over models; as `tp.value_and_grad`.
        TypeError: when called: as `tp.value_and_grad`.
    """

    @functools.wraps(f)
    def of_state(model: Any, /, *args: Any, state: PyTree, **kwargs: Any) -> tuple[Any, PyTree]:
        ours = model_state(state)
        compute = functools.partial(value_and_grad(f, ours.layout), model, *args, **kwargs)
        if len(ours.runs) != 1:
            return compute()
        value, slots = _searched(ours)
        kept = value, take_apart(model, ours.layout).canonical(slots)

        def computed() -> tuple[Any, PyTree]:
            found, grads = compute()
            return jax.lax.convert_element_type(found, value.dtype), grads

        if isinstance(value, Tracer):
            return jax.lax.cond(jnp.isfinite(value), lambda: kept, computed)
        return kept if bool(jnp.isfinite(value)) else computed()

    return of_state


def _searched(state: TrainableState) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the value, and the gradient of each slot, that a line search has left in a state."""
    nodes = jtu.tree_flatten_with_path(state.runs[0], is_leaf=_has_searched)[0]
    found = [(path, node) for path, node in nodes if _has_searched(node)]
    if len(found) != 1:
        raise ValueError(
            f"expected one line search that keeps value and gradient in the state, found {len(found)}: use "
            "optax.lbfgs() or optax.scale_by_backtracking_linesearch(..., store_grad=True), or write tp.value_and_grad"
        )
    ((path, node),) = found
    place = (key_entries((*path, jtu.GetAttrKey("grad"))), ())
    copies = History(state.layout, state.runs[0], state.roles.divisions[0]).copies
    slots = state.layout.slots
    pieces = [copies.piece(place, slot.path).alone() for slot in slots]
    return node.value, [piece.astype(slot.dtype) for piece, slot in zip(pieces, slots, strict=True)]


def _has_searched(node: object) -> bool:
    has_both = {"value", "grad"} <= set(getattr(node, "_fields", ()))
    return has_both and getattr(node, "grad") is not None and jnp.ndim(getattr(node, "value")) == 0  # noqa: B009


def eval_params(f: Callable[[Any, Any], Any], state: PyTree, model: M) -> M:
    """Returns the model with the parameters that an Optax function computes from the state and the parameters.

    >>> import equinox as eqx, jax, optax
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> tx = optim.trainable(optax.contrib.schedule_free_sgd(0.1), "!layers.0", form="vector")
    >>> evaluated = optim.eval_params(optax.contrib.schedule_free_eval_params, tx.init(mlp), mlp)
    >>> evaluated.layers[0].weight is mlp.layers[0].weight, evaluated.layers[1].weight.shape
    (True, (1, 4))

    Args:
        f: called with the state of the inner optimiser, `state.runs[0]`, and the parameters in the form that this state
            has: a canonical tree, a vector, stacks. If the optimiser is a chain, pick one of its states: `lambda state,
            params: optax.contrib.schedule_free_eval_params(state[1], params)`. If parameters have taken different
            numbers of steps, as after `optim.set_trainable`, there is a state for each history, and `f` is called with
            each. If the optimiser is `optim.per_leaf(tx)`, `f` is called with the state of `tx`, and the parameter, of
            each row, by `jax.vmap`.
        state: the state of `optim.trainable`, or of a chain or wrapper around it.
        model: the model that was trained.

    Returns:
        The model. A tied parameter has its new value at all places; everything that is not trained is unchanged.

    Raises:
        ValueError: the state is not that of one transformation over models; it is in the stacks of `optim.groups`; the
            model does not fit it; `f` returns other shapes.
    """
    ours = model_state(state)
    parts = take_apart(model, ours.layout)
    values = list(parts.slots)
    for run, positions, division in zip(ours.runs, ours.roles.running, ours.roles.divisions, strict=False):
        form = _form_of(trained_at(ours.layout, positions), division)
        slots = [parts.index.by_leaf[position] for position in positions]
        made = form.read(_applied(f, run, form.holding([values[slot] for slot in slots])))
        for slot, value in zip(slots, made, strict=True):
            values[slot] = values[slot] if value is None else value
    return parts.model(values)


def _applied(f: Callable[[Any, Any], Any], run: PyTree, shown: PyTree) -> PyTree:
    """Returns the result of `f`; of a rule over rows, called with the state and the parameter of each row."""
    if not isinstance(run, PerLeafState):
        return f(run, shown)
    stacks, treedef = jtu.tree_flatten(shown)
    return treedef.unflatten(list(map(jax.vmap(f), treedef.flatten_up_to(run.states), stacks)))


def _form_of(layout: Layout, division: Division) -> Form:
    """Returns the form of the parameters that a state holds copies of."""
    owned = {(each.paths, each.axis is None) for each in division.owners if each is not None}
    for make in (tree_of, vector_of, stacks_of):
        form = make(layout)
        blocks = zip(form.members, form.blocks, strict=True)
        known = {(tuple([form.paths[slot] for slot in slots]), block.length is None) for slots, block in blocks}
        if owned <= known:
            return form
    raise ValueError("the state is in stacks of groups, which eval_params cannot pass to the function; call it by hand")
