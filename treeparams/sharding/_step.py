"""make_step: one step of training over a mesh - gather, gradient, scatter, update - as one compiled program."""

import operator
from collections.abc import Callable
from typing import Any, Literal, SupportsIndex

import jax
import jax.tree_util as jtu
from jax.core import Tracer
from jax.sharding import AbstractMesh, Mesh
from jax.typing import DTypeLike

from .._slots.layout import index_of
from .._tree.text import count_of, describe
from .._tree.types import PyTree
from ..optim._scaled import check_names
from ._call import Setup, Split
from ._check import check_moves, check_over_form
from ._compute import Compute, ComputeDtype
from ._loss import Loss, LossIs
from ._plan import Plan, placement_of
from ._processes.patience import Watched
from ._program import Program, StepState
from ._update import Average, Update


def make_step(
    loss: Callable[..., Any],
    tx: Any,
    plan: Plan,
    *,
    loss_is: LossIs = None,
    outputs: Callable[..., Any] | None = None,
    has_aux: bool = False,
    has_state: bool = False,
    loss_takes: Literal["model", "form"] = "model",
    split: Split = "gradients",
    microbatches: SupportsIndex = 1,
    compute_dtype: ComputeDtype = None,
    reduce_dtype: DTypeLike | None = None,
    average: Average | None = None,
) -> tuple[Callable[..., Any], "Step"]:
    """One step of training over the devices of a mesh, as one compiled program, and the function that starts it.

    >>> import jax, jax.numpy as jnp, optax
    >>> from treeparams import sharding
    >>> model = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2), "name": "linear"}
    >>> plan = sharding.plan(model, jax.make_mesh((1,), ("data",)), {"**": "split"}, form="vector")
    >>> loss = lambda model, x, y: jnp.mean((x @ model["w"] + model["b"][None] - y) ** 2)
    >>> init, step = sharding.make_step(loss, optax.sgd(0.1), plan, loss_is="mean")
    >>> params, state = init(model)
    >>> params, state, value = step(params, state, jnp.ones((4, 8)), jnp.zeros((4, 2)))
    >>> print(value, plan.model(params)["b"])
    64.0 [-0.8 -0.8]

    Each device has its share of the parameters, of the gradient and of the optimiser's state, computes its part of the
    gradient, and updates its own parameters. The numbers are those of one device, up to rounding, for any loss. The
    rule sees the whole, laid over the devices, so norms of all and checks for numbers that are not finite are those of
    one device; they cost a scalar each. (So that nothing else is moved, the update is compiled here and looked at,
    which takes about as long as compiling the step.)

    Args:
        loss: `loss(model, *batch)`, a function of the whole batch that returns a real scalar: a mean, a masked mean, a
            contrastive loss. XLA divides it among the devices; parameters are gathered by one collective for each
            array, and gradients are summed on all devices. In bytes of the parameters, 3 are moved in a step. A loss
            that can be added up over examples moves 2, and takes any number of `microbatches`; say so in one of three
            ways. Return `(sum, weight)`, two numbers: both are summed over all devices and pieces, and divided once;
            the weight is of the examples, such as `len(x)` or the sum of a mask, and must not depend on the
            parameters. Or give `loss_is`, or `outputs`.
        tx: plain Optax over the plan's form: the canonical tree, one vector, or stacks.
        plan: from `sharding.plan`.
        loss_is: `"mean"`: the loss is a mean over examples, so it is the mean of the devices' means.
        outputs: `outputs(model, *batch)`, computed by each device of its examples alone: arrays with a row for each
            example. The loss is then `loss(outputs, *batch)`, of the outputs of all examples.
        has_aux: whether the loss returns `(value, aux)`. The step then returns `(value, aux)` too. In `aux`, a tree of
            arrays, a tuple `(sum, weight)` of two numbers is summed over the batch and divided (the weight is of the
            examples, as above); a number is averaged where `loss_is="mean"`; an array with a row for each example comes
            back whole, in order. Where the loss sees the whole batch, other numbers and arrays are as it returned them.
        has_state: whether the model has a state that the loss changes, such as the running statistics of BatchNorm
            (`eqx.nn.State`): `loss(model, model_state, *batch)` returns `(value, model_state)`, with `has_aux`
            `((value, aux), model_state)`. Such a loss sees all examples of a piece, over all devices, and pieces pass
            the state on in order. You give the first state to `init`, and find it in `state.model_state`.
        loss_takes: `"form"`: the loss is `loss(params, restructure, *batch)`, with the vector or the stacks and the
            `Restructure` to the model (of a tree: the canonical tree and the `Rest`, for `tp.combine`). So it can say
            `restructure.scan(layer, x, params, "layers.*")` and `restructure.part(params, "head")`.
        split: how much is never whole on a device while a step runs (ZeRO 1, 2 and 3, arXiv 1910.02054). The parameters
            rest as the plan says, with any.

            - `"state"`: the optimiser's state. Parameters are gathered, gradients summed on each device.
            - `"gradients"`: gradients too: they are summed and divided at once. The least that is moved.
            - `"parameters"`: parameters too, of stacks, for a loss that takes these: a layer is gathered when
              `restructure.scan` comes to it, and again on the way back, where it is computed again from its
              input. A node that you take by `restructure.part` is whole from there on. Rows that are owned are first
              divided among all devices, by one exchange. The loss is given the parameters as something that only the
              restructure opens: a sum over them would be one over the share of a device.
        microbatches: into how many pieces the batch is cut, to be taken one after another. Piece k has every example
            whose number is k modulo their number. Gradients are reduced once for all (with split parameters, and with a
            state, for each).
        compute_dtype: the dtype in which the loss has the parameters, frozen ones too, such as `jnp.bfloat16`; or
            `{where: dtype}`, of which the first entry that selects a parameter counts: `{"**.norm": jnp.float32, "**":
            jnp.bfloat16}`. They rest, and are updated, in their own. They are cast before they are gathered, so fewer
            bytes are moved. Complex parameters, and the batch, stay as they are. `None`: no cast.
        reduce_dtype: the dtype in which gradients are summed over devices; `None`: at least float32. Where the loss
            sees the whole batch, XLA sums in the dtype that it computes in.
        average: the decay of a `tp.Ema` of the parameters, a number; or a function that makes one, such as
            `functools.partial(tp.Ema, decay=0.99, warmup=True)`.

    Returns:
        `init` and `step`.

        `params, state = init(model)`, or `init(model, model_state)`, puts the parameters of a model, which fits the
        plan, where they are to be, in buffers of their own; of `jax.ShapeDtypeStruct`s it returns such, for
        `step.lower`. Several processes first compare their plans, the order of devices, versions, the update as a
        program and what the rule starts with; with `init(model, check_values=True)` the values of the model, too.

        `params, state, value = step(params, state, *batch)` donates `params` and `state`, which are not to be used
        again; `step.lower` is that of `jax.jit`. Arrays of the batch have the examples as their leading axis, and are
        laid along `batch_axis`. A number is for all examples. So is a key where the loss sees the whole batch;
        otherwise give each example one, `jax.random.split(key, n)`. `state` is a `StepState`.

    Raises:
        ValueError: `tx` is a transformation over models, is not the same over the plan's form as leaf by leaf, or would
            move parameters between devices (a rule for matrices over split leaves); parameters stay split, and the loss
            does not take stacks. `init`: the model does not fit; processes differ in what they compare. `step`: arrays
            of the batch have different numbers of examples, or ones that the devices cannot share equally;
            `microbatches` of a loss that cannot be added up; a weight depends on parameters, or is no sum over
            examples; one key for devices that each draw by it; an entry of `aux` is of the examples of one device.
        TypeError: `plan` is no plan, `average` makes no `tp.Ema`; a dtype is not floating; `step`: the loss returns no
            real number.
    """
    _check_options(plan, split, loss_takes)
    of_loss = _loss_of(loss, loss_is, outputs, loss_takes, has_aux, has_state)
    placement = placement_of(plan)
    compute = Compute.of(placement.layout, placement.form, compute_dtype, reduce_dtype)
    update = Update.of(tx, placement.layout, placement.form, average)
    pieces = count_of("microbatches", microbatches, "pieces")
    check_over_form(placement, update.rule)
    kept = placement.made(update.start)
    check_names(kept[0], index_of(placement.layout))
    check_moves(placement, update, kept)
    program = Program(placement, Setup(placement, of_loss, split, pieces, compute), update, kept)
    return program.init, Step(program)


def _loss_of(loss: Any, loss_is: object, outputs: object, loss_takes: str, has_aux: object, has_state: object) -> Loss:
    """The loss and what the user says of it, checked."""
    if loss_is not in (None, "mean"):
        raise ValueError(
            f'loss_is must be "mean", or None for any function of the whole batch, got {loss_is!r}; of a sum over '
            "examples return (sum, weight)"
        )
    for name, value in {"has_aux": has_aux, "has_state": has_state}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {describe(value)}")
    if outputs is not None and not callable(outputs):
        raise TypeError(f"outputs is a function of the model and a batch, got {describe(outputs)}")
    if outputs is not None and (loss_is or has_state):
        raise ValueError(
            "outputs= goes with neither loss_is= (the loss is of the outputs of all examples) nor has_state=True (a "
            "device would change the state by its examples alone)"
        )
    return Loss(loss, outputs, loss_is == "mean", loss_takes == "form", bool(has_aux), bool(has_state))


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

    def __init__(self, program: Program) -> None:
        """For this library's own use."""
        self._program = program
        self._compiled = jax.jit(program.step, donate_argnums=(0, 1))
        self._watched = Watched(self._compiled, "step")

    def __call__(self, params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, Any]:
        """Takes a step; donates `params` and `state`."""
        first = next(iter(jtu.tree_leaves(params)), None)
        # JAX, when run over several devices of a CPU, ends the process without a word.
        if isinstance(first, jax.Array) and not isinstance(first, Tracer) and first.is_deleted():
            raise ValueError(
                "params were given to an earlier step, which donates params and state; go on with those that it "
                "returned: params, state, value = step(params, state, *batch)"
            )
        return self._watched(params, state, *self._program.put(batch))

    def lower(self, params: PyTree, state: StepState, *batch: Any) -> jax.stages.Lowered:
        """As `lower` of what `jax.jit` returns; arguments may be `jax.ShapeDtypeStruct`s."""
        return self._compiled.lower(params, state, *self._program.put(batch))

    def over(self, mesh: Mesh | AbstractMesh) -> "Step":
        """The same over a mesh of other devices, with the same axes; for this library's own use."""
        return Step(self._program.over(mesh))


program_of: Callable[[Step], Program] = operator.attrgetter("_program")
"""For the other files of this library."""

Step.__module__ = "treeparams.sharding"
