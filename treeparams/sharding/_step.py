"""make_step: compiles one training step over a mesh - gather, gradient, scatter, update - into one program."""

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
    """Makes a training step that runs over the devices of a mesh as one compiled program, and its `init` function.

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

    Each device holds its share of the parameters, the gradient and the optimiser's state, computes its part of the
    gradient, and updates its own parameters. The results equal those of a single device up to rounding, for any loss.
    The optimiser sees the whole parameters, sharded over the devices, so global norms and checks for non-finite numbers
    are those of a single device; each costs one scalar of communication. To make sure that the update moves nothing
    else, `make_step` compiles it and inspects the program, which takes about as long as compiling the step.

    Args:
        loss: `loss(model, *batch)`, a function of the whole batch that returns a real scalar: a mean, a masked mean, a
            contrastive loss. XLA divides it among the devices. Parameters are gathered by one collective for each
            array, and gradients are summed on all devices, so a step moves 3 times the bytes of the parameters. A loss
            that can be summed over examples moves only 2 times these bytes and works with any number of `microbatches`.
            You can declare it in three ways. Return `(sum, weight)`, two numbers: both are summed over all devices and
            pieces, then divided once. The weight depends on the examples alone, such as `len(x)` or the sum of a mask,
            and not on the parameters. Or pass `loss_is`. Or pass `outputs`.
        tx: an Optax optimiser for parameters in the plan's form: the canonical tree, one vector, or stacks.
        plan: the plan that `sharding.plan` returned.
        loss_is: `"mean"` if the loss is a mean over examples, so that it equals the mean of the devices' means.
        outputs: `outputs(model, *batch)`, which each device computes for its own examples. It returns arrays with a row
            for each example. The loss is then `loss(outputs, *batch)`, of the outputs of all examples.
        has_aux: whether the loss returns `(value, aux)`. The step then returns `(value, aux)` too. `aux` is a tree of
            arrays. A tuple `(sum, weight)` of two numbers is summed over the batch and divided; its weight depends on
            the examples alone, as above. A number is averaged if `loss_is="mean"`. An array with a row for each example
            comes back whole, in order. If the loss sees the whole batch, you get other numbers and arrays as it
            returned them.
        has_state: whether the model has a state that the loss changes, such as the running statistics of BatchNorm
            (`eqx.nn.State`). The loss is then `loss(model, model_state, *batch)` and returns `(value, model_state)`, or
            with `has_aux` `((value, aux), model_state)`. Such a loss sees all examples of a piece, over all devices,
            and each piece passes the state on to the next. Pass the first state to `init`; the current one is
            `state.model_state`.
        loss_takes: `"form"` if the loss is `loss(params, restructure, *batch)`, where `params` are the vector or the
            stacks and `restructure` is their `Restructure`. Inside it you can call
            `restructure.scan(layer, x, params, "layers.*")` and `restructure.part(params, "head")`. For a plan with
            `form="tree"`, the two arguments are the canonical tree and the `Rest`, for `tp.combine`.
        split: which arrays are never whole on a device while a step runs (ZeRO 1, 2 and 3, arXiv 1910.02054). Between
            steps the parameters lie as the plan says, whichever you choose.

            - `"state"`: the optimiser's state. Parameters are gathered, and gradients are summed on each device.
            - `"gradients"`: the gradients too; they are summed and divided in one collective. This moves the fewest
              bytes.
            - `"parameters"`: the parameters too. This needs stacks and a loss that accepts them. Each layer is gathered
              when `restructure.scan` reaches it, and gathered and recomputed from its input in the backward pass. A
              node that you get from `restructure.part` stays whole from there on. Owned rows are first divided among
              all devices by one exchange. The loss gets the parameters as an object that only the restructure can open,
              because a sum over them would be the sum over one device's share.
        microbatches: the number of pieces that the batch is cut into and that the step computes one after another. Of n
            pieces, piece k has the examples whose number is k modulo n. Gradients are reduced once for all pieces; with
            split parameters or a state, once for each piece.
        compute_dtype: the dtype that parameters have within the loss, frozen ones included, such as `jnp.bfloat16`. Or
            a dictionary `{where: dtype}`, in which the first entry that selects a parameter counts:
            `{"**.norm": jnp.float32, "**": jnp.bfloat16}`. Parameters are kept and updated in their own dtype. They are
            cast before they are gathered, so fewer bytes are moved. Complex parameters and the batch are not cast.
            `None`: no cast.
        reduce_dtype: the dtype in which gradients are summed over devices. `None`: at least float32. If the loss sees
            the whole batch, XLA sums gradients in the dtype that it computes in.
        average: the decay of a `tp.Ema` of the parameters, or a function that makes one, such as
            `functools.partial(tp.Ema, decay=0.99, warmup=True)`.

    Returns:
        `init` and `step`.

        `params, state = init(model)`, or `init(model, model_state)`, places the parameters of a model that fits the
        plan on the devices, in new buffers. For a model of `jax.ShapeDtypeStruct`s it returns shapes, for `step.lower`.
        Several processes first compare their plans, the order of their devices, their package versions, the compiled
        update and the initial values of the optimiser's state; with `init(model, check_values=True)` they also compare
        the values of the model.

        `params, state, value = step(params, state, *batch)` donates `params` and `state`, so do not use them again.
        `step.lower` is that of `jax.jit`. Arrays of the batch have the examples as their leading axis and are split
        along `batch_axis`. A number applies to all examples. So does a PRNG key if the loss sees the whole batch;
        otherwise give each example its own key, `jax.random.split(key, n)`. `state` is a `StepState`.

    Raises:
        ValueError: `tx` is a transformation over whole models, gives another result for the plan's form than leaf by
            leaf, or would move parameters between devices (an optimiser for matrices, over split leaves); or you chose
            `split="parameters"` and the loss does not accept stacks. `init`: the model does not fit; or the processes
            differ in something they compare. `step`: arrays of the batch have different numbers of examples, or a
            number that the devices cannot share equally; you asked for `microbatches` of a loss that cannot be summed;
            a weight depends on parameters, or is not a sum over examples; the devices would all draw random numbers
            with the same key; or an entry of `aux` depends on the examples of one device.
        TypeError: `plan` is not a plan; `average` does not make a `tp.Ema`; a dtype is not floating. `step`: the loss
            does not return a real number.
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
    """Checks the options about the loss, and returns them as a `Loss`."""
    if loss_is not in (None, "mean"):
        raise ValueError(
            f'loss_is must be "mean", or None for any function of the whole batch, got {loss_is!r}; for a sum over '
            "examples return (sum, weight)"
        )
    for name, value in {"has_aux": has_aux, "has_state": has_state}.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {describe(value)}")
    if outputs is not None and not callable(outputs):
        raise TypeError(f"outputs must be a function of the model and a batch, got {describe(outputs)}")
    if outputs is not None and (loss_is or has_state):
        raise ValueError(
            "outputs= cannot be combined with loss_is= (the loss sees the outputs of all examples) or has_state=True "
            "(each device would change the state by its own examples alone)"
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
            'split="parameters" needs a loss that reads the parameters layer by layer: use form="stacks" and '
            'loss_takes="form", with restructure.scan(layer, x, stacks, "layers.*") in the loss; or write '
            'split="gradients"'
        )


class Step:
    """A training step, made by `sharding.make_step`: `params, state, value = step(params, state, *batch)`."""

    def __init__(self, program: Program) -> None:
        """For internal use. Call `sharding.make_step` instead."""
        self._program = program
        self._compiled = jax.jit(program.step, donate_argnums=(0, 1))
        self._watched = Watched(self._compiled, "step")

    def __call__(self, params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, Any]:
        """Runs one step. It donates `params` and `state`, so do not use them again."""
        first = next(iter(jtu.tree_leaves(params)), None)
        # JAX, when run over several devices of a CPU, ends the process without a word.
        if isinstance(first, jax.Array) and not isinstance(first, Tracer) and first.is_deleted():
            raise ValueError(
                "params were given to an earlier step, which donates params and state; use those that it returned: "
                "params, state, value = step(params, state, *batch)"
            )
        return self._watched(params, state, *self._program.put(batch))

    def lower(self, params: PyTree, state: StepState, *batch: Any) -> jax.stages.Lowered:
        """Lowers the step, like `lower` of a `jax.jit` function. Arguments may be `jax.ShapeDtypeStruct`s."""
        return self._compiled.lower(params, state, *self._program.put(batch))

    def over(self, mesh: Mesh | AbstractMesh) -> "Step":
        """Returns the same step over a mesh of other devices with the same axes; for internal use."""
        return Step(self._program.over(mesh))


program_of: Callable[[Step], Program] = operator.attrgetter("_program")
"""Returns the `Program` of a step; for other files of this library."""

Step.__module__ = "treeparams.sharding"
