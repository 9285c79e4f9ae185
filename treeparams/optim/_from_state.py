"""value_and_grad_from_state, eval_params: results that an optimiser's state holds beside its moments."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer

from .._forms.form import Form, stacks_of, tree_of, vector_of
from .._forms.states import Division
from .._grad import value_and_grad
from .._slots.layout import Layout, trained_at
from .._slots.parts import take_apart
from .._tree.paths import key_entries
from .._tree.types import PyTree
from ._per_leaf import PerLeafState
from ._state import History, TrainableState, model_state

M = TypeVar("M")


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
    pieces = [copies.piece(place, slot.path).alone(slot.shape) for slot in slots]
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
