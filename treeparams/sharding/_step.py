"""step: one step of training over a mesh - gather, gradient, scatter, update - as one compiled program."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._grad import accumulate
from .._mesh import automatic, lay, over_devices
from .._parts import Rest, put_together, take_apart
from .._restructure import Restructure, over_stacks
from .._structure import is_array
from .._text import count_of, describe, quoted
from .._types import PyTree
from ..optim._shown import settled, steady
from ..optim._step import added
from ._check import check_rule
from ._gather import DevicePart, PartRestructure, divided, gather, scatter, summed
from ._like import Average, ema_maker, plain, sharding_of
from ._placement import Placement
from ._plan import Plan, placement_of
from ._processes import agree
from ._put import put_leaf
from ._specs import Axes, names_in

Split = Literal["state", "gradients", "parameters"]


@dataclasses.dataclass(frozen=True)
class StepState:
    """What `sharding.step` keeps beside the parameters, a pytree.

    Attributes:
        rule: the state of the rule, plain Optax.
        average: the `tp.Ema` of the parameters, in their form; `None` without one. `plan.model(state.average.average,
            state)` is the averaged model.
        rest: all of the model but its parameters.
    """

    rule: Any
    average: Any
    rest: Any


StepState.__module__ = "treeparams.sharding"
jtu.register_dataclass(StepState, ["rule", "average", "rest"], [])


def step(
    loss: Callable[..., Any],
    tx: Any,
    plan: Plan,
    *,
    split: Split = "gradients",
    microbatches: SupportsIndex = 1,
    average: Average | None = None,
    loss_takes: Literal["model", "form"] = "model",
) -> tuple[Callable[[Any], Any], Any]:
    """One step of training over the devices of a mesh, as one compiled program, and what starts it.

    >>> import jax, jax.numpy as jnp, optax
    >>> from treeparams import sharding
    >>> model = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2), "name": "linear"}
    >>> plan = sharding.plan(model, jax.make_mesh((1,), ("data",)), {"**": "split"}, form="vector")
    >>> loss = lambda model, x, y: jnp.mean((x @ model["w"] + model["b"][None] - y) ** 2)
    >>> init, step = sharding.step(loss, optax.sgd(0.1), plan)
    >>> params, state = init(model)
    >>> params, state, value = step(params, state, jnp.ones((4, 8)), jnp.zeros((4, 2)))
    >>> print(value, plan.model(params)["b"])
    64.0 [-0.8 -0.8]

    Each device has its part of the parameters, of the gradient and of the optimiser's state, computes the gradient for
    its part of the batch, and updates what it has. The rule sees the whole, laid over the devices, so norms of all and
    checks for numbers that are not finite are those of one device; they cost a scalar each. (So that nothing else is
    moved, the update is compiled here and looked at, which takes about as long as compiling the step.)

    Args:
        loss: `loss(model, *batch)`, the *mean* over the examples of the batch, a real scalar.
        tx: plain Optax over the plan's form: the canonical tree, one vector, or stacks.
        plan: from `sharding.plan`.
        split: how much is never whole on a device while a step runs (ZeRO 1, 2 and 3, arXiv 1910.02054). The parameters
            rest as the plan says, with any.

            - `"state"`: the optimiser's state. Parameters are gathered, gradients summed on each device.
            - `"gradients"`: gradients too: they are summed and divided at once. The least that is moved.
            - `"parameters"`: parameters too, of stacks, for a loss that takes these: a layer is gathered when
              `restructure.scan` comes to it, and again on the way back, where it is computed again from what entered
              it. What `restructure.part` takes is whole from there on. Rows that are owned are first divided among all
              devices, by one exchange. The loss is given the parameters as something that only the restructure opens:
              a sum over them would be one over the part of a device.
        microbatches: into how many pieces each device takes its part of the batch, one after another. Gradients are
            reduced once for all (with split parameters for each).
        average: the decay of a `tp.Ema` of the parameters, a number; or what makes one of them, such as
            `functools.partial(tp.Ema, decay=0.99, warmup=True)`.
        loss_takes: `"form"`: the loss is `loss(params, restructure, *batch)`, with the vector or the stacks and the
            `Restructure` to the model (of a tree: the canonical tree and the `Rest`, for `tp.combine`). So it can say
            `restructure.scan(layer, x, params, "layers.*")` and `restructure.part(params, "head")`.

    Returns:
        `init` and `step`.

        `params, state = init(model)` puts the parameters of a model, which fits the plan, where they are to be, in
        buffers of their own; of `jax.ShapeDtypeStruct`s it returns such, for `step.lower`. With several processes it
        first compares their plans.

        `params, state, value = step(params, state, *batch)` is what `jax.jit` returns, and donates `params` and
        `state`, which are not to be used again. Arrays of the batch have the examples as their leading axis, and are
        laid along `batch_axis`; what lies on other devices is put there before, `jax.device_put(batch, plan.batch)`. A
        scalar is for all of them. So is a key: for noise of its own give each example one, `jax.random.split(key, n)`.
        `state` is a `StepState`.

    Raises:
        ValueError: `tx` is a transformation over models, is not the same over the plan's form as leaf by leaf, or would
            move parameters between devices (a rule for matrices over split leaves); parameters stay split, and the loss
            does not take stacks. `init`: the model does not fit; the plans of processes differ. `step`: arrays of the
            batch have different numbers of examples, or ones that the devices cannot share equally.
        TypeError: `plan` is no plan, `average` makes no `tp.Ema`; `step`: the loss returns no real number.
    """
    if not isinstance(plan, Plan):
        raise TypeError(f"expected a plan, sharding.plan(model, mesh, rules), got {describe(plan)}")
    if split not in ("state", "gradients", "parameters"):
        raise ValueError(f'split must be "state", "gradients" or "parameters", got {split!r}')
    if loss_takes not in ("model", "form"):
        raise ValueError(f'loss_takes must be "model" or "form", got {loss_takes!r}')
    if split == "parameters" and (plan.form != "stacks" or loss_takes != "form"):
        raise ValueError(
            'parameters stay split where the loss takes them layer by layer: form="stacks" and loss_takes="form", with '
            'restructure.scan(layer, x, stacks, "layers.*") in the loss; or write split="gradients"'
        )
    rule, pieces = plain(tx), count_of("microbatches", microbatches, "pieces")
    make_average = None if average is None else ema_maker(average)

    def start(params: PyTree) -> Any:
        return settled(rule.init(params)), None if make_average is None else make_average(params)

    def update(params: PyTree, gradients: PyTree, before: Any, average: Any, value: Any) -> Any:
        updates, after = rule.update(jax.tree.map(jnp.conj, gradients), before, params, value=value)
        leaves, treedef = jtu.tree_flatten(params)
        leaves = list(map(added, map(str, range(len(leaves))), leaves, treedef.flatten_up_to(updates)))
        params = treedef.unflatten(leaves)
        return params, steady(after, before), None if average is None else average.update(params)

    place = placement_of(plan)
    states = place.made(start)
    shardings = sharding_of(states)
    check_rule(rule, place, update, states)
    gradient = _gradient(place, loss, split, pieces, loss_takes)

    def init(model: Any) -> tuple[Any, StepState]:
        lines = [f"state{jtu.keystr(path)}  {describe(leaf)}" for path, leaf in jtu.tree_flatten_with_path(states)[0]]
        how = f"split {split}, microbatches {pieces}, the loss takes the {loss_takes}"
        agree("\n".join([place.in_words(all_rows=True), *lines, how]), "the plans")
        params, rest = plan.ravel(model), place.put_rest(take_apart(model, plan.layout).rest)
        of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves((params, rest)))
        if loss_takes == "form" and place.joined is not None:
            if plan.form == "vector":
                rest = Restructure(rest, place.joined)
            elif of_shapes:
                whole = jax.eval_shape(functools.partial(over_stacks, form=place.joined), rest)
                rest = jax.tree.map(lambda leaf: put_leaf(leaf, plan.whole), whole)
            else:
                rest = over_stacks(rest, place.joined)
        # A rule may not look at the parameters, and without any argument JAX would not know the devices.
        begin = jax.jit(automatic(start, shardings, plan.mesh), keep_unused=True, out_shardings=shardings)
        rule_state, averaged = begin(params) if jtu.tree_leaves(states) and not of_shapes else states
        return params, StepState(rule_state, averaged, rest)

    def one_step(params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, jax.Array]:
        place.check(params)
        _check_state(state, states, Restructure if loss_takes == "form" and place.joined is not None else Rest)
        params = lay(params, plan.params)
        value, gradients = gradient(params, state.rest, batch)
        run = automatic(update, (plan.params, *shardings), plan.mesh)
        params, after, averaged = run(params, gradients, state.rule, state.average, value)
        return params, StepState(after, averaged, state.rest), value

    return init, jax.jit(one_step, donate_argnums=(0, 1))


def _gradient(
    place: Placement, loss: Callable[..., Any], split: Split, pieces: int, loss_takes: str
) -> Callable[..., Any]:
    """The value of the loss and the gradient in the parameters, by hand over the devices along the batch."""
    axes = place.axes
    splits = [axes.by_hand(spec) for spec in place.specs]
    by_hand = lambda spec: PartitionSpec(*[e if (names_in(e) or ("",))[0] in axes.batch else None for e in spec])
    specs = place.tree([by_hand(spec) for spec in place.specs])
    devices = axes.parts_along(axes.batch)

    def checked(value: Any) -> Any:
        is_number = is_array(value) and not value.shape and jnp.issubdtype(value.dtype, jnp.floating)
        if not (is_number or isinstance(value, float)):
            raise TypeError(f"the loss must return one real number, the mean over its examples, got {describe(value)}")
        return value

    def value_of(leaves: list[Any], rest: Any, batch: Any) -> Any:
        if loss_takes == "form":
            return loss(place.tree(leaves), rest, *batch)
        return loss(put_together(rest, place.slots_of(place.tree(leaves))), *batch)

    def of_parts(leaves: list[Any], rest: Any, batch: Any) -> Any:
        parts = [divided(leaf, spec, axes) for leaf, spec in zip(leaves, place.specs, strict=True)]
        restructure = PartRestructure.over(rest, [split for _, split in parts])
        return loss(DevicePart(place.tree([leaf for leaf, _ in parts])), restructure, *batch)

    def on_device(treedef: Any, params: PyTree, rest: Any, *arrays: Any) -> Any:
        examples = [array if array.ndim else None for array in arrays]

        def of_examples(leaves: list[Any], examples: list[Any]) -> Any:
            # A scalar is for all examples.
            found = [array if each is None else each for array, each in zip(arrays, examples, strict=True)]
            batch = jtu.tree_unflatten(treedef, found)
            value = checked((of_parts if split == "parameters" else value_of)(leaves, rest, batch))
            # Divided before it is summed over the devices, so that sums of narrow floats do not overflow.
            return value / devices

        leaves = jtu.tree_leaves(params)
        if split != "parameters":
            leaves = list(map(gather, leaves, splits))
        run = jax.value_and_grad(of_examples) if pieces == 1 else accumulate(of_examples, pieces=pieces)
        value, gradients = run(leaves, examples)
        # Those of split parameters have been summed where they were gathered.
        reduce = scatter if split == "gradients" else summed
        done = splits if split != "state" else [()] * len(splits)
        gradients = [reduce(each, its, axes.batch) for each, its in zip(gradients, done, strict=True)]
        return jax.lax.psum(value, axes.batch), place.tree(gradients)

    def gradient(params: PyTree, rest: Any, batch: Any) -> tuple[jax.Array, PyTree]:
        arrays, treedef = jtu.tree_flatten_with_path(batch)
        _check_batch(arrays, axes, pieces)
        shardings = [place.batch if jnp.ndim(array) else place.whole for _, array in arrays]
        laid = [lay(jnp.asarray(array), to) for (_, array), to in zip(arrays, shardings, strict=True)]
        out = specs if split != "state" else jax.tree.map(lambda _: PartitionSpec(), specs, is_leaf=_is_spec)
        f = functools.partial(on_device, treedef)
        in_specs = (specs, PartitionSpec(), *(each.spec for each in shardings))
        # What is whole on each device afterwards is divided on the way out.
        run = lambda *args: over_devices(f, place.mesh, in_specs, (PartitionSpec(), out), axes.batch)(*args)
        return automatic(run, (place.whole, place.params), place.mesh)(params, rest, *laid)

    return gradient


def _check_state(state: Any, expected: Any, rest: type) -> None:
    """Checks that a state is that of this step."""
    shapes = lambda tree: [(jtu.keystr(path), jnp.shape(leaf)) for path, leaf in jtu.tree_flatten_with_path(tree)[0]]
    if not isinstance(state, StepState):
        raise TypeError(f"expected the state that init or the last step returned, got {describe(state)}")
    if shapes((state.rule, state.average)) != shapes(expected) or not isinstance(state.rest, rest):
        raise ValueError(
            "the state is of another step: its rule, its average, its form or what its loss takes is another; start "
            "with init(model)"
        )


def _check_batch(arrays: Sequence[tuple[Any, Any]], axes: Axes, pieces: int) -> None:
    """Checks that all arrays have the same number of examples, and that the devices can share them."""
    counts = {f"batch{jtu.keystr(path)}": jnp.shape(array)[0] for path, array in arrays if jnp.ndim(array)}
    if not counts and pieces == 1:
        return
    (name, count), *others = [*counts.items()] or [("the batch", 0)]
    for other, its in others:
        if its != count:
            raise ValueError(
                f"{name} has {count} examples and {other} {its}; each array of a batch has the examples as its leading "
                "axis, and is cut along it. What is none of examples goes into the loss itself, as by "
                "functools.partial; keys as one for each, jax.random.split(key, count)"
            )
    devices = axes.parts_along(axes.batch)
    if not count:
        raise ValueError(f"{name} has no examples")
    if count % devices:
        raise ValueError(
            f"{name} has {count} examples, which {devices} devices along {quoted(axes.batch)} cannot share equally; "
            f"give a multiple of {devices}"
        )


def _is_spec(node: Any) -> bool:
    return isinstance(node, PartitionSpec)
