"""make_step: one step of training over a mesh - gather, gradient, scatter, update - as one compiled program."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from .._forms.mesh import automatic, lay
from .._forms.restructure import Restructure
from .._slots.layout import index_of
from .._slots.parts import Rest, take_apart
from .._tree.text import count_of, describe
from .._tree.types import PyTree
from ..optim._scaled import check_names
from ._batch import put_batch
from ._check import check_moves, check_over_form
from ._gradient import Gradient, Split
from ._placement import Placement, described
from ._plan import Plan, placement_of
from ._processes import agree
from ._update import Average, Update, sharding_of


@dataclasses.dataclass(frozen=True)
class StepState:
    """All that `sharding.make_step` keeps beside the parameters, a pytree.

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


def make_step(
    loss: Callable[..., Any],
    tx: Any,
    plan: Plan,
    *,
    split: Split = "gradients",
    microbatches: SupportsIndex = 1,
    average: Average | None = None,
    loss_takes: Literal["model", "form"] = "model",
) -> tuple[Callable[[Any], Any], Any]:
    """One step of training over the devices of a mesh, as one compiled program, and the function that starts it.

    >>> import jax, jax.numpy as jnp, optax
    >>> from treeparams import sharding
    >>> model = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2), "name": "linear"}
    >>> plan = sharding.plan(model, jax.make_mesh((1,), ("data",)), {"**": "split"}, form="vector")
    >>> loss = lambda model, x, y: jnp.mean((x @ model["w"] + model["b"][None] - y) ** 2)
    >>> init, step = sharding.make_step(loss, optax.sgd(0.1), plan)
    >>> params, state = init(model)
    >>> params, state, value = step(params, state, jnp.ones((4, 8)), jnp.zeros((4, 2)))
    >>> print(value, plan.model(params)["b"])
    64.0 [-0.8 -0.8]

    Each device has its share of the parameters, of the gradient and of the optimiser's state. It computes the gradient
    for its share of the batch, and updates its own parameters. The rule sees the whole, laid over the devices, so norms
    of all and checks for numbers that are not finite are those of one device; they cost a scalar each. (So that nothing
    else is moved, the update is compiled here and looked at, which takes about as long as compiling the step.)

    Args:
        loss: `loss(model, *batch)`, the *mean* over the examples of the batch, a real scalar.
        tx: plain Optax over the plan's form: the canonical tree, one vector, or stacks.
        plan: from `sharding.plan`.
        split: how much is never whole on a device while a step runs (ZeRO 1, 2 and 3, arXiv 1910.02054). The parameters
            rest as the plan says, with any.

            - `"state"`: the optimiser's state. Parameters are gathered, gradients summed on each device.
            - `"gradients"`: gradients too: they are summed and divided at once. The least that is moved.
            - `"parameters"`: parameters too, of stacks, for a loss that takes these: a layer is gathered when
              `restructure.scan` comes to it, and again on the way back, where it is computed again from its
              input. A node that you take by `restructure.part` is whole from there on. Rows that are owned are first
              divided among all devices, by one exchange. The loss is given the parameters as something that only the
              restructure opens: a sum over them would be one over the share of a device.
        microbatches: into how many pieces each device cuts its share of the batch, to take them one after another.
            Gradients are reduced once for all (with split parameters for each).
        average: the decay of a `tp.Ema` of the parameters, a number; or a function that makes one, such as
            `functools.partial(tp.Ema, decay=0.99, warmup=True)`.
        loss_takes: `"form"`: the loss is `loss(params, restructure, *batch)`, with the vector or the stacks and the
            `Restructure` to the model (of a tree: the canonical tree and the `Rest`, for `tp.combine`). So it can say
            `restructure.scan(layer, x, params, "layers.*")` and `restructure.part(params, "head")`.

    Returns:
        `init` and `step`.

        `params, state = init(model)` puts the parameters of a model, which fits the plan, where they are to be, in
        buffers of their own; of `jax.ShapeDtypeStruct`s it returns such, for `step.lower`. With several processes it
        first compares their plans.

        `params, state, value = step(params, state, *batch)` is a function of `jax.jit`, and donates `params` and
        `state`, which are not to be used again. Arrays of the batch have the examples as their leading axis, and are
        laid along `batch_axis`; put an array of other devices there before, `jax.device_put(batch, plan.batch)`. A
        scalar is for all of them. So is a key: for noise of its own give each example one, `jax.random.split(key, n)`.
        `state` is a `StepState`.

    Raises:
        ValueError: `tx` is a transformation over models, is not the same over the plan's form as leaf by leaf, or would
            move parameters between devices (a rule for matrices over split leaves); parameters stay split, and the loss
            does not take stacks. `init`: the model does not fit; the plans of processes differ. `step`: arrays of the
            batch have different numbers of examples, or ones that the devices cannot share equally.
        TypeError: `plan` is no plan, `average` makes no `tp.Ema`; `step`: the loss returns no real number.
    """
    _check_options(plan, split, loss_takes)
    placement = placement_of(plan)
    update = Update.of(tx, placement.layout, placement.form, average)
    pieces = count_of("microbatches", microbatches, "pieces")
    check_over_form(placement, update.rule)
    kept = placement.made(update.start)
    check_names(kept[0], index_of(placement.layout))
    check_moves(placement, update, kept)
    program = Program(placement, Gradient(placement, loss, split, pieces, loss_takes == "form"), update, kept)
    return program.init, Step(program)


def _check_options(plan: Plan, split: str, loss_takes: str) -> None:
    if not isinstance(plan, Plan):
        raise TypeError(f"expected a plan, sharding.plan(model, mesh, rules), got {describe(plan)}")
    if split not in ("state", "gradients", "parameters"):
        raise ValueError(f'split must be "state", "gradients" or "parameters", got {split!r}')
    if loss_takes not in ("model", "form"):
        raise ValueError(f'loss_takes must be "model" or "form", got {loss_takes!r}')
    placement = placement_of(plan)
    is_scanned = loss_takes == "form" and placement.has_restructure and all(placement.stacked)
    if split == "parameters" and not is_scanned:
        raise ValueError(
            'parameters stay split where the loss takes them layer by layer: form="stacks" and loss_takes="form", with '
            'restructure.scan(layer, x, stacks, "layers.*") in the loss; or write split="gradients"'
        )


class Step:
    """One step of training, made by `sharding.make_step`: `params, state, value = step(params, state, *batch)`."""

    def __init__(self, program: "Program") -> None:
        """For this library's own use."""
        self._program = program
        self._compiled = jax.jit(program.step, donate_argnums=(0, 1))

    def __call__(self, params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, Any]:
        """Takes a step; donates `params` and `state`."""
        return self._compiled(params, state, *self._program.put(batch))

    def lower(self, params: PyTree, state: StepState, *batch: Any) -> jax.stages.Lowered:
        """As `lower` of what `jax.jit` returns; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._compiled.lower(params, state, *self._program.put(batch))


Step.__module__ = "treeparams.sharding"


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """How a step starts and what it computes: `init` and `step`, not compiled."""

    placement: Placement
    gradient: Gradient
    update: Update
    kept: tuple[PyTree, PyTree]  # what the update keeps, as shapes with their shardings

    def init(self, model: Any) -> tuple[PyTree, StepState]:
        """The parameters of a model and the first state, where they are to be."""
        agree(self.in_words(), "the plans")
        placement, parts = self.placement, take_apart(model, self.placement.layout)
        lay_rest = placement.restructure if self.takes_restructure else placement.put_rest
        params, rest = placement.laid(parts.slots), lay_rest(parts.rest)
        is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves((params, rest)))
        kept = self.kept if is_of_shapes else self.start(params)
        return params, StepState(*kept, rest)

    def start(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """The state that the update keeps, of parameters that are laid over the mesh."""
        if not jtu.tree_leaves(self.kept):
            return self.kept
        shardings = sharding_of(self.kept)
        begin = automatic(self.update.start, shardings, self.placement.axes.mesh)
        # A rule may not look at the parameters, and without any argument JAX would not know the devices.
        return jax.jit(begin, keep_unused=True, out_shardings=shardings)(params)

    def put(self, batch: PyTree) -> PyTree:
        """A batch over the devices."""
        return put_batch(batch, self.placement, self.gradient.pieces)

    def step(self, params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, jax.Array]:
        """The next parameters and state, and the value of the loss."""
        placement = self.placement
        placement.check(params)
        self.check_state(state)
        params = lay(placement.tree(jtu.tree_leaves(params)), placement.params)
        value, gradients = self.gradient(params, state.rest, batch)
        shardings = (placement.params, *sharding_of(self.kept))
        run = automatic(self.update.step, shardings, placement.axes.mesh)
        params, after, average = run(params, gradients, state.rule, state.average, value)
        return params, StepState(after, average, state.rest), value

    @property
    def takes_restructure(self) -> bool:
        """Whether the state holds a `Restructure`, as the loss takes it or as rows that are owned need it."""
        placement = self.placement
        return placement.frozen.are_owned or (self.gradient.takes_form and placement.has_restructure)

    def check_state(self, state: object) -> None:
        """Checks that a state is that of this step."""
        if not isinstance(state, StepState):
            raise TypeError(f"expected the state that init or the last step returned, got {describe(state)}")
        kept, rest = (state.rule, state.average), Restructure if self.takes_restructure else Rest
        if described(kept, jnp.shape) != described(self.kept, jnp.shape) or not isinstance(state.rest, rest):
            raise ValueError(
                "the state is of another step: its rule, its average, its form or what its loss takes is another; "
                "start with init(model)"
            )

    def in_words(self) -> str:
        """All that is the same in all processes."""
        kept = [f"state{path}  {spec}" for path, spec in described(self.kept, describe)]
        taken = "form" if self.gradient.takes_form else "model"
        how = f"split {self.gradient.split}, microbatches {self.gradient.pieces}, the loss takes the {taken}"
        return "\n".join([self.placement.in_words(), *kept, how])
