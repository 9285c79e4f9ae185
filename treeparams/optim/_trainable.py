"""trainable, step, apply_updates: Optax over models. value_and_grad_from_state, eval_params: results from a state."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.core import Tracer

from .._forms.form import Form
from .._forms.states import Division
from .._grad import value_and_grad
from .._slots.layout import Layout, Trainable, look_up, trained_at
from .._slots.parts import Parts, take_apart
from .._tree.paths import nearest
from .._tree.structure import structure_of
from .._tree.text import describe
from .._tree.types import PyTree
from ._per_leaf import PerLeafState
from ._state import ONE, ModelTransformation, Plain, TrainableState, extended, model_state, nodes_of, rule_of
from ._step import Rule, added
from ._updates import copies_in, landed

M = TypeVar("M")
FormName = Literal["tree", "vector", "stacks"]
_FORMS = ("tree", "vector", "stacks")
_OTHER_WORDS = {"flat": "vector", "ravel": "vector", "stacked": "stacks", "stack": "stacks", "partition": "tree"}

if TYPE_CHECKING:  # this refuses plain Optax, and also a chain around a transformation over models, of the same type
    OverModels = ModelTransformation
    State = TrainableState
else:
    OverModels = State = Any


def trainable(
    tx: Plain,
    trainable: Trainable = None,
    *,
    form: FormName = "tree",
    missing: Literal["zeros"] | None = None,
    trial: Mapping[str, Any] | None = None,
) -> ModelTransformation:
    """Wraps an Optax optimiser so that it accepts a whole model.

    It updates only the trainable parameters, updates a tied parameter once, and leaves everything else unchanged.

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))  # with functions and integers in it
    >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(0.1)), "layers.1")
    >>> state = tx.init(mlp)
    >>> grads = tp.grad(lambda mlp: mlp(jnp.ones(2)) ** 2, state.layout)(mlp)
    >>> trained, state = optim.step(tx, grads, state, mlp)
    >>> trained.layers[0].weight is mlp.layers[0].weight, state.layout.paths
    (True, ('layers.1.weight', 'layers.1.bias'))

    **Use it once, as the outermost transformation.** Everything inside it is plain Optax over the form, so chains,
    masks, `optax.MultiSteps`, line searches and `optim.groups` work as their documentation says. A transformation
    around it must accept any tree as a whole: no mask, no `optax.partition`, and no second transformation over models,
    which would add up the places of ties and conjugate complex gradients once more. Put transformations that compare
    gradients with updates (`optax.apply_if_finite`), make zeros of the model (`optax.MultiSteps`) or ask it for a dtype
    (`optax.inject_hyperparams` without `hyperparam_dtype`) *inside*. There they see each parameter once and nothing
    else; outside they would see the whole model and may fail.

    **The state records which parameters train**: `init` fixes them, `optim.set_trainable` changes them. It also records
    the ties for `update`, since inside `jax.jit` arrays no longer show them. Take gradients by `state.layout`. `init`
    sees ties outside of a trace, in `tp.jit(tx.init)`, or if you pass a `Layout`.

    **Three forms.** The rule sees the result of `tp.partition`, `tp.ravel` or `tp.stack`:

    - `form="tree"`: the canonical tree, model-shaped, with `None` at aliases and at everything that is not trained. Any
      optimiser is right over it.
    - `form="vector"`: one vector, one operation instead of thousands. It has the widest dtype of its leaves; with
      `optim.master` in `tx` there is a vector for each dtype.
    - `form="stacks"`: one array for each shape, `{"float32[2,3]": array of shape (4, 2, 3)}`. Element-wise optimisers
      (Adam, SGD) and global ones (clipping by the norm of all) work on stacks directly. **Put optimisers that look at a
      leaf's shape or norm inside `optim.per_leaf`**: to Muon a stack of biases would be a matrix. `tx` may contain
      `optim.groups`; each group has separate stacks.

    Over a vector or stacks, an optimiser that would not do the same as leaf by leaf raises a `ValueError` at `init`:
    one that looks at shapes (adafactor, lamb, muon, masks by shape, in stacks outside of `optim.per_leaf`) or at names
    (masks by path). `init` reads the programs of `tx` over the leaves of the model, apart and joined, in 5 to 500 ms;
    of more than 32 leaves, those of one shape whose names differ only in a number count as two. So the numbers do not
    matter, nor whether they are traced. **Kernels and callbacks show no program**: an optimiser that calls one, for
    more than something beside its updates, is refused by its name.

    **`None` is not zero.** A leaf without a gradient takes no step in this call and its moments stay as they are;
    optimisers that couple leaves (a global norm, a line search) run over the leaves that have one. All leaves of one
    history share a step count, which goes on if any of them has a gradient. `optax.MultiSteps` needs all gradients in
    each call: `tp.project(model, grads, missing="zeros")`. **One vector has no holes**: there a leaf without a gradient
    counts as zero, so its moments decay and it may move. In stacks its row waits.

    **Freeze without a new trace**: with `form="stacks"`, `update(grads, state, model, active={where: flag})` accepts
    flags that may be traced. A parameter whose flag is `False` takes no step and its state waits, including its step
    count, as if you had not made the call for it. The first `where` that selects a parameter gives its flag; a
    parameter that no entry selects moves. Make this dictionary inside `jax.jit`, which sorts the keys of dictionaries
    that you pass in. The gradient of a parameter that waits counts as zero in a norm and may be NaN. So "train another
    layer every hundred steps" compiles once. Only state that is kept row by row can wait, so put transformations with
    state inside `optim.per_leaf`; the state of `optim.clip_by_global_norm` describes the whole call and goes on.

    >>> layers = [{"w": jnp.ones((2, 3)), "b": jnp.ones(3)} for _ in range(4)]
    >>> model, grads = {"layers": layers, "steps": jnp.array(3)}, {"layers": layers}
    >>> adafactor = optim.per_leaf(optax.adafactor(0.1))
    >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), adafactor), form="stacks")
    >>> active = {"layers.2": True, "**": False}
    >>> updates, state = tx.update(grads, tx.init(model), model, active=active)
    >>> updates["layers"][0]["b"], bool(jnp.all(updates["layers"][2]["b"] < 0)), updates["steps"]
    (Array([-0., -0., -0.], dtype=float32), True, None)

    **`update` conjugates complex gradients for `tx`**, and nothing else in this library does: JAX's gradient of a real
    loss is the conjugate of the direction of ascent.

    Args:
        tx: any Optax transformation or chain. If gradients are partial or you freeze leaves later, it must keep its
            state leaf by leaf.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        form: the tree that `tx` sees: `"tree"`, `"vector"` or `"stacks"`.
        missing: the updates of everything that does not move: `None`, or with `"zeros"` zeros of the leaf's dtype, for
            code that adds an update to every leaf, such as `optax.apply_updates` and Flax's `TrainState`. Integers and
            numbers get zeros too, but not functions, texts and typed keys, to which nothing can be added. A floating
            zero is -0.0, which changes no number. In a compiled step zeros cost nothing.
        trial: examples of extra arguments that `tx` needs, for the check of a vector or stacks. `value`, `grad` and
            `value_fn` are there.

    Returns:
        A transformation. `init(model)` returns a `TrainableState`, which shares no buffer with the model.
        `update(grads, state, model, **extra)` accepts a gradient in any form that `tp.project` accepts; one that is
        wider than its leaf keeps single precision. A tied parameter has its update at all places, through the transform
        of an alias that has one, and everything that does not move has `None` (see `missing`); a row of stacks that
        waits has -0.0. So `eqx.apply_updates(model, updates)` is right; `optim.step` does both, and recomputes an alias
        that has a transform, since sums would let it drift by rounding. Among the extra arguments `grad` may be in any
        form too, functions are called with models (`grad_fn` may return a gradient in any form), and others are passed
        on.

    Warns:
        UserWarning: `init`: nothing is trained. `update`, outside of a trace: no leaf of a history has had a gradient
            since it was made; three nonzero steps or more have left a bfloat16 or float16 leaf as it was, see
            `TrainableState.stuck`. It looks after 0, 1, 2, 4, 8 ... such calls, so as not to wait for a device in each.

    Raises:
        TypeError: `tx` is not a transformation; `init`: as `tp.layout`; `update`: the gradients are the model itself,
            or integers; a flag is not a bool; as `tp.project`, and for a line search over complex parameters.
        ValueError: `form` or `missing` is another word; `tx` contains a transformation over models; `init`: an alias
            has another value than its source gives, as `tp.layout`; `tx` is not the same over the form, or has groups
            within groups, or several that divide the stacks in different ways; `update`: there is no model, it does not
            fit the state; some rows wait, and `tx` keeps state outside of `optim.per_leaf`; a `where` of `active`
            selects nothing, or only parameters that earlier entries select; as `tp.project`.
    """
    if form not in _FORMS:
        right = f"; write form={_OTHER_WORDS[form]!r}" if form in _OTHER_WORDS else nearest(str(form), _FORMS)
        raise ValueError(f'form must be "tree", "vector" or "stacks", got {form!r}{right}')
    if missing not in (None, "zeros"):
        raise ValueError(f'missing must be None or "zeros", got {missing!r}')
    if isinstance(tx, ModelTransformation):
        raise ValueError(ONE)
    rule = Rule(extended(tx), trainable, form, missing, trial or {})
    return cast(Any, ModelTransformation)(rule.init, rule.update)


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
            return _with_steps(parts, steps, after), after
        updates, after = update(grads, state, model, **extra)
    except Exception:
        _check_arguments(tx, grads, state, model)  # plain Optax fails at a model in ways that name no reason
        raise
    states = nodes_of(TrainableState, after)
    if len(states) != 1:
        _check_arguments(tx, grads, after, model)
    parts = take_apart(model, states[0].layout)
    return _with_steps(parts, parts.index.per_slot(updates, "first", exact_shapes=True), states[0]), after


def _with_steps(parts: Parts[M], steps: Sequence[Any], state: TrainableState | None = None) -> M:
    """Returns the model after a step of each slot; a parameter with a wide copy in the state is that copy, rounded."""
    paths = [slot.path for slot in parts.layout.slots]
    slots = list(map(added, paths, parts.slots, steps))
    if state is not None and any("copies" in division.names for division in state.roles.divisions):
        copies = _copies(state)
        for slot, path in enumerate(paths):
            old, step = parts.slots[slot], steps[slot]
            if path in copies and step is not None:
                slots[slot] = landed(old, step, copies[path], slots[slot])
    return parts.model(slots)


def _copies(state: Any) -> dict[str, jax.Array]:
    """Returns the wide copies that `optim.master` keeps of the parameters that train."""
    divisions = zip(state.runs, state.roles.divisions, strict=False)
    found = dict[str, jax.Array]()
    for owners, copy in [pair for run, division in divisions for pair in copies_in(run, division)]:
        length = None if owners.axis is None else copy.shape[owners.axis]
        block = dataclasses.replace(owners.block, dtype=copy.dtype, dtypes=(), length=length)
        form = Form(jtu.tree_structure(0), (block,), (tuple(range(len(owners.paths))),), owners.paths, "a copy")
        found |= zip(owners.paths, form.cut_leaves([copy]), strict=True)
    return found


_ORDER = "the order is model, state = optim.step(tx, grads, state, model)"
_PLAIN = "tx is plain Optax, which does not accept models: write tx = optim.trainable(tx), state = tx.init(model)"


def _check_arguments(tx: object, grads: PyTree, state: PyTree, model: PyTree) -> None:
    """Refuses arguments of `optim.step` in another order, and a transformation that is not over one model."""
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
    return _with_steps(parts, parts.index.per_slot(updates, "first", exact_shapes=True))


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
    found = [node for node in jax.tree.leaves(state.runs[0], is_leaf=_has_searched) if _has_searched(node)]
    if len(found) != 1:
        raise ValueError(f"expected one line search with value and gradient, found {len(found)}: use optax.lbfgs()")
    return found[0].value, _form_of(state.layout, state.roles.divisions[0]).read(found[0].grad)


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
        made = form.read(_applied(f, run, form.join([values[slot] for slot in slots])))
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
    for make in (Form.tree, Form.vector, Form.stacks):
        form = make(layout)
        blocks = zip(form.members, form.blocks, strict=True)
        known = {(tuple([form.paths[slot] for slot in slots]), block.length is None) for slots, block in blocks}
        if owned <= known:
            return form
    raise ValueError("the state is in stacks of groups, which no single function can read; call it by hand")
