"""make_step: one compiled program of value, gradient and update over a mesh, the same in all processes."""

import collections
import concurrent.futures
import dataclasses
import difflib
import hashlib
import sys
from collections.abc import Callable, Mapping
from typing import Any, Literal, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from .._average import Ema
from .._forms.form import Form
from .._forms.mesh import lay
from .._forms.restructure import Restructure
from .._forms.states import Copies
from .._slots.layout import index_of
from .._slots.parts import Rest, take_apart
from .._tree.text import count_of, describe, first_lines
from .._tree.types import PyTree, is_key
from ..optim._joined import check_form
from ..optim._per_leaf import check_rows
from ..optim._updates import check_names
from ._loss import Loss
from ._placement import Placement, StepState, described
from ._plan import Plan, Update, placement_of
from ._specs import automatic, mesh_within, put_leaf

_PACKAGES = ("jax", "jaxlib", "optax", "equinox", "treeparams")
_LINES = 40  # of what differs, at most: a plan may have thousands
_SHOWN = 8  # elements of an array that are shown; of more, a hash


def agree(words: str) -> None:
    """Checks that all processes have the same text, and raises an error in every process if they differ.

    All processes call it together. The arrays that they exchange have the same shape whatever the texts are, so `agree`
    cannot hang or mix up data as other collectives do between processes that differ.

    >>> agree("float32[64,64]  split")  # one process agrees with itself
    """
    if jax.process_count() > 1:
        # The caller may be within `jax.jit`, which each thread has for itself.
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            thread.submit(_agree, words).result()


def _agree(words: str) -> None:
    text = np.frombuffer(words.encode(), np.uint8)
    digests = multihost_utils.process_allgather(np.frombuffer(hashlib.sha256(words.encode()).digest(), np.uint8))
    if (digests == digests[0]).all():
        return
    # Only where they differ is all of the text exchanged, padded to one length: a gather needs arrays of one shape.
    sizes = multihost_utils.process_allgather(np.asarray(text.size, np.int32))
    padded = np.pad(text, (0, sizes.max() - text.size))
    rows = zip(multihost_utils.process_allgather(padded), sizes, strict=True)
    texts = [row[:size].tobytes().decode() for row, size in rows]
    # Against what most of them say; among equals, against the first process.
    usual = collections.Counter(texts).most_common(1)[0][0]
    other = next(text for text in texts if text != usual)
    names = [f"process {texts.index(text)}" for text in (usual, other)]
    lines = difflib.unified_diff(usual.split("\n"), other.split("\n"), *names, lineterm="", n=0)
    raise ValueError(
        "the plans, steps or values differ between the processes; make them from the same model, rules, options and "
        f"seeds in all of them:\n{first_lines(list(lines), _LINES)}"
    )


# -- What they compare -------------------------------------------------------------------------------------------------


def _surroundings_in_words(mesh: Mesh | AbstractMesh) -> str:
    """Returns the versions of packages, and the devices of a mesh in order."""
    lines = [f"{name} {getattr(sys.modules.get(name), '__version__', 'of no version')}" for name in _PACKAGES]
    axes = zip(mesh.shape.items(), mesh.axis_types, strict=True)
    lines.append("mesh  " + ", ".join(f"{name!r}: {size} {kind.name}" for (name, size), kind in axes))
    if isinstance(mesh, Mesh) and _is_shared(mesh):
        lines.append("devices  " + " ".join(str(device.id) for device in mesh.devices.flat))
    return "\n".join(lines)


def _is_shared(mesh: Mesh | AbstractMesh) -> bool:
    """Returns whether a mesh has devices of other processes. On its own devices a process may train alone."""
    return isinstance(mesh, Mesh) and any(device.process_index != jax.process_index() for device in mesh.devices.flat)


def _values_in_words(tree: PyTree) -> str:
    """Returns the values of all arrays and numbers of a tree as text; large arrays as a hash."""
    return "\n".join(f"{jtu.keystr(path)}  {_value(leaf)}" for path, leaf in jtu.tree_flatten_with_path(tree)[0])


def _value(leaf: Any) -> str:
    if isinstance(leaf, (bool, int, float, complex)):
        return repr(leaf)
    if not isinstance(leaf, (jax.Array, np.ndarray)) or isinstance(leaf, Tracer):
        return describe(leaf)
    if isinstance(leaf, jax.Array):
        if not leaf.is_fully_replicated and not leaf.is_fully_addressable:
            return describe(leaf)  # each process has a part of it
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
    array = np.asarray(leaf)
    if array.size <= _SHOWN:
        return f"{describe(array)} {array.tolist()}"
    # As JAX has it: NumPy's float64 in one process is the same model as float32 in another.
    array = np.ascontiguousarray(array, jax.dtypes.canonicalize_dtype(array.dtype))
    return f"{describe(array)} values {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def make_step(
    loss: Callable[..., Any],
    tx: Any,
    plan: Plan,
    *,
    has_aux: bool = False,
    has_state: bool = False,
    loss_takes: Literal["model", "form"] = "model",
    microbatches: SupportsIndex = 1,
    compute_dtype: DTypeLike | Mapping[Any, DTypeLike] | None = None,
    average: float | Callable[[Any], Ema[Any]] | None = None,
) -> tuple[Callable[..., Any], "Step"]:
    """Makes a training step over the devices of a mesh as one compiled program, and its `init` function.

    >>> import jax, jax.numpy as jnp, optax
    >>> from treeparams import sharding
    >>> model = {"w": jnp.ones((8, 2)), "b": jnp.zeros(2), "name": "linear"}
    >>> plan = sharding.plan(model, jax.make_mesh((1,), ("data",)), {"**": "split"})
    >>> loss = lambda model, x, y: jnp.mean((x @ model["w"] + model["b"][None] - y) ** 2)
    >>> init, step = sharding.make_step(loss, optax.sgd(0.1), plan)
    >>> params, state = init(model)
    >>> params, state, value = step(params, state, jnp.ones((4, 8)), jnp.zeros((4, 2)))
    >>> print(value, plan.model(params, state)["b"])
    64.0 [-0.8 -0.8]

    The step is one `jax.jit` of value, gradient and update over the whole batch. Parameters and the optimiser's state
    rest as the plan says. XLA gathers each weight where the loss begins, and sums and divides each gradient as its
    weight rests. So the numbers are those of one device up to rounding, for any loss: a mean, a masked mean, a
    contrastive loss, batch statistics. The optimiser sees whole arrays that lie over the devices, so a norm of all
    parameters is that of one device.

    Args:
        loss: `loss(model, *batch)`, a function of the whole batch that returns a real number.
        tx: an Optax optimiser for parameters in the plan's form: the canonical tree, one vector, or stacks.
        plan: the plan that `sharding.plan` returned.
        has_aux: whether the loss returns `(value, aux)`. The step then returns `(value, aux)` too.
        has_state: whether the model has a state that the loss changes, such as the running statistics of BatchNorm
            (`eqx.nn.State`). The loss is then `loss(model, model_state, *batch)` and returns `(value, model_state)`, or
            with `has_aux` `((value, aux), model_state)`. Pass the first state to `init`; the current one is
            `state.model_state`.
        loss_takes: `"form"` if the loss is `loss(params, restructure, *batch)`, where `params` are the vector or the
            stacks and `restructure` is their `Restructure`; for a plan with `form="tree"`, they are the canonical tree
            and the `Rest`, for `tp.combine`. With split stacks, no device ever holds the whole model: each node is
            gathered where you ask for it, by `restructure.scan(layer, x, params, "layers.*")` or
            `restructure.part(params, "head")`, and a layer of a scan is gathered and computed again in the backward
            pass.
        microbatches: the number k of pieces `x[i::k]` of the batch, which the step computes one after another. The
            value is the mean of the loss over the pieces, on any number of devices. Entries of `aux` get a leading axis
            of k. Each piece passes the model's state on to the next.
        compute_dtype: the dtype that parameters have within the loss, frozen ones included, such as `jnp.bfloat16`. Or
            a dictionary `{where: dtype}`, in which the first entry that selects a parameter counts:
            `{"**.norm": jnp.float32, "**": jnp.bfloat16}`. Parameters are kept and updated in their own dtype, and cast
            before they are gathered. Gradients are cast to at least float32 before they are divided. Complex parameters
            and the batch are not cast.
        average: the decay of a `tp.Ema` of the parameters, or a function that makes one, such as
            `functools.partial(tp.Ema, decay=0.99, warmup=True)`.

    Returns:
        `init` and `step`.

        `params, state = init(model)`, or `init(model, model_state)`, places the parameters of a model that fits the
        plan on the devices, in new buffers. For a model of `jax.ShapeDtypeStruct`s it returns shapes, for `step.lower`.

        `params, state, value = step(params, state, *batch)` donates `params` and `state`, so do not use them again.
        Arrays of the batch have the examples as their leading axis and are split along `batch_axis`. A number or a
        typed PRNG key applies to all examples. `state` is a `StepState`.

        Several processes compare plan, step and values before `init` and the first step.

    Raises:
        ValueError: `tx` is a transformation over whole models, gives another result for the plan's form than leaf by
            leaf, or fails on it. `init`: the model does not fit; or the processes differ in something they compare.
            `step`: arrays of the batch have different numbers of examples, or a number that the devices cannot share
            equally.
        TypeError: an argument is not what it should be; `average` does not make a `tp.Ema`; a dtype is not floating.
            `step`: the loss does not take the batch, or does not return a real number.
    """
    _check_step_options(loss, tx, plan, {"has_aux": has_aux, "has_state": has_state}, loss_takes)
    placement = placement_of(plan)
    options = {"takes_form": loss_takes == "form", "has_aux": has_aux, "has_state": has_state}
    pieces = count_of("microbatches", microbatches, "pieces")
    of_loss = Loss.of(loss, placement, compute_dtype, pieces=pieces, **options)
    update = Update.of(tx, placement.layout, placement.in_update[0], average)
    check_form(update.rule, placement.layout, placement.form, "sharding.make_step", {})
    kept = placement.made(update.start)
    check_names(kept[0], index_of(placement.layout))
    check_rows(kept[0], placement.form)
    update.check()
    step = Step(placement, of_loss, update, kept)
    return step.init, step


def _check_step_options(loss: Any, tx: Any, plan: Any, flags: Mapping[str, Any], loss_takes: Any) -> None:
    if not isinstance(plan, Plan) or not callable(loss) or hasattr(loss, "update"):
        raise TypeError(
            f"expected a loss, an optimiser and a plan, got {', '.join(map(describe, (loss, tx, plan)))}. Write "
            "sharding.make_step(loss, optax.adam(1e-3), sharding.plan(model, mesh, rules))"
        )
    if loss_takes not in ("model", "form"):
        raise ValueError(f'loss_takes must be "model" or "form", got {loss_takes!r}')
    for name, value in flags.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, got {describe(value)}")


class Step:
    """A training step, made by `sharding.make_step`: `params, state, value = step(params, state, *batch)`."""

    def __init__(self, placement: Placement, loss: Loss, update: Update, kept: tuple[PyTree, PyTree]) -> None:
        """For internal use. Call `sharding.make_step` instead."""
        self._placement = placement
        self._loss = loss
        self._update = update
        self._kept = kept  # what the update keeps, as shapes with their shardings
        self._shardings = jax.tree.map(lambda shape: shape.sharding, kept)
        self._has_agreed = False
        self._compiled = jax.jit(self._run, donate_argnums=(0, 1))

    def __call__(self, params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, Any]:
        """Runs one step. It donates `params` and `state`, so do not use them again."""
        self._check(params, state)
        if not self._has_agreed and _is_shared(self._placement.axes.mesh):
            agree("\n".join([self._in_words(), _values_in_words((params, state))]))
        self._has_agreed = True
        return self._compiled(params, state, *self._loss.put(batch))

    def lower(self, params: PyTree, state: StepState, *batch: Any) -> jax.stages.Lowered:
        """Lowers the step, like `lower` of a `jax.jit` function. Arguments may be `jax.ShapeDtypeStruct`s."""
        self._check(params, state)
        return self._compiled.lower(params, state, *self._loss.put(batch))

    def init(self, model: Any, model_state: Any = None) -> tuple[PyTree, StepState]:
        """Places the parameters of a model on the devices, and makes the first state; `init` of `make_step`."""
        self._check_model(model, model_state)
        placement, parts = self._placement, take_apart(model, self._placement.layout)
        if _is_shared(placement.axes.mesh):
            agree("\n".join([self._in_words(), _values_in_words((model, model_state))]))
        lay_rest = placement.restructure if self._loss.takes_restructure else placement.put_rest
        params, rest = placement.laid(parts.slots), lay_rest(parts.rest)
        is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves((params, rest)))
        kept = self._kept if is_of_shapes else self._start(params)
        model_state = jax.tree.map(lambda leaf: put_leaf(leaf, placement.whole), model_state)
        zero = (jax.ShapeDtypeStruct if is_of_shapes else jnp.zeros)((), np.int32)
        mark = {placement.layout.digest: put_leaf(zero, placement.whole, is_own=True)}
        return params, StepState(*kept, rest, mark, model_state)

    # -- Files

    def to_file(self, params: PyTree, state: StepState) -> tuple[PyTree, StepState]:
        """Returns parameters and state in arrays that do not depend on the rules and the number of devices.

        A plan divides a stack if rules place rows of one shape differently, and pads a vector for unusual numbers of
        devices. If yours does neither, you get what you gave. Else save what this returns, and give what you load to
        `from_file` of the step over other devices, or by other rules.
        """
        return self._regrouped(params, state, self._placement.form, self._placement.in_files)

    def from_file(self, params: PyTree, state: StepState) -> tuple[PyTree, StepState]:
        """Returns the result of `to_file` as the parameters and the state of this step, on its devices."""
        params, state = self._regrouped(params, state, self._placement.in_files, self._placement.form)
        kept = jax.tree.map(put_leaf, (state.rule, state.average), self._shardings)
        params = jax.tree.map(put_leaf, params, self._placement.params)
        return params, dataclasses.replace(state, rule=kept[0], average=kept[1])

    def _regrouped(self, params: PyTree, state: StepState, source: Form, to: Form) -> tuple[PyTree, StepState]:
        if source == to:
            return params, state
        make = lambda params: (params, *self._update.start(params))
        tree, like = (params, state.rule, state.average), jax.eval_shape(make, to.shapes())
        whole = jax.tree.map(lambda leaf: put_leaf(leaf, self._placement.whole, is_own=True), tree)
        made = Copies.of(make, to, like).regrouped([Copies.of(make, source, whole)])
        params, rule, average = jtu.tree_unflatten(jtu.tree_structure(like), made)
        return params, dataclasses.replace(state, rule=rule, average=average)

    # -- The program

    def _start(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Makes the state that the update keeps, for parameters that lie on the mesh."""
        if not jtu.tree_leaves(self._kept):
            return self._kept
        begin = automatic(self._update.start, self._shardings, self._placement.axes.mesh)
        # A rule may not look at the parameters, and without any argument JAX would not know the devices.
        return jax.jit(begin, keep_unused=True, out_shardings=self._shardings)(params)

    def _run(self, params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, Any]:
        """Returns the next parameters and state, and the value of the loss (with its `aux`)."""
        placement = self._placement
        placement.check(params)
        self._check_state(state)
        params = lay(placement.tree(jtu.tree_leaves(params)), placement.params)
        found = self._loss(params, state.rest, state.model_state, batch)
        params, after = self._updated(params, found.gradients, state.rule, found.value)
        average = state.average
        if average is not None:
            run = automatic(lambda old, new: old.update(new), self._shardings[1], placement.axes.mesh)
            average = run(average, params)
        value = (found.value, found.aux) if self._loss.has_aux else found.value
        return params, StepState(after, average, state.rest, state.layout, found.model_state), value

    @property
    def _updated(self) -> Callable[..., Any]:
        """The update over the mesh."""
        shardings = self._placement.params, self._shardings[0]
        return automatic(self._lent, shardings, self._placement.axes.mesh)

    def _lent(self, params: PyTree, gradients: PyTree, rule: PyTree, value: Any) -> tuple[PyTree, PyTree]:
        """Makes the update; rows that devices cannot share equally between steps go to their owners for it."""
        placement, before = self._placement, (params, gradients, rule)
        if placement.in_update[0] == placement.form:
            return self._update.step(params, gradients, rule, value)
        mesh = mesh_within(placement.axes.mesh)

        def lend(leaf: Any, like: Any, spec: PartitionSpec) -> Any:
            missing = [(0, size - own) for size, own in zip(like.shape, leaf.shape, strict=True)]
            leaf = jnp.pad(leaf, missing) if any(map(any, missing)) else leaf
            return jax.lax.with_sharding_constraint(leaf, NamedSharding(mesh, spec))

        kept = lambda params: (params, params, self._update.start(params)[0])
        like, specs = placement.made_over(kept, *placement.in_update)
        specs = jtu.tree_unflatten(jtu.tree_structure(like), specs)
        params, gradients, rule = jax.tree.map(lend, before, like, specs)
        after = self._update.step(params, gradients, rule, value)
        back = lambda leaf, own: leaf[tuple(map(slice, own.shape))]
        return jax.tree.map(back, after, before[::2])

    # -- Checks

    def _check_model(self, model: Any, model_state: Any) -> None:
        """Checks that a model is given, and its state if, and only if, the loss takes one."""
        own = jtu.tree_structure(model) == self._placement.form.treedef
        if own and jtu.tree_structure(model) != index_of(self._placement.layout).structure.treedef:
            raise ValueError(
                f"init got parameters in the form of the plan, a {self._placement.name}, and no model. Pass the model: "
                "params, state = init(model)"
            )
        has_state = self._loss.has_state
        if has_state and model_state is None:
            raise ValueError(
                "with has_state=True the loss needs the state of the model, and init got none. Pass the one that "
                "eqx.nn.make_with_state returns: init(model, model_state)"
            )
        if model_state is not None and not has_state:
            raise ValueError(
                "init got the state of a model, but its loss takes none. Write init(model), or give make_step "
                "has_state=True"
            )

    def _check(self, params: PyTree, state: object) -> None:
        """Checks what `jax.jit` would say nothing of, or too much; each call of a step comes by here."""
        leaves, treedef = jtu.tree_flatten(params)
        first: Any = leaves[0] if leaves else None
        self._placement.check_state(state)
        # JAX, when run over several devices of a CPU, ends the process without a word.
        if isinstance(first, jax.Array) and not isinstance(first, Tracer) and first.is_deleted():
            raise ValueError(
                "params were given to an earlier step, which donates params and state. Use those that it returned: "
                "params, state, value = step(params, state, *batch)"
            )
        if treedef != self._placement.form.treedef:
            self._placement.check(params)

    def _check_state(self, state: StepState) -> None:
        """Checks that a state belongs to this step."""
        kept, rest = (state.rule, state.average), Restructure if self._loss.takes_restructure else Rest
        is_alike = described(kept, jnp.shape) == described(self._kept, jnp.shape) and isinstance(state.rest, rest)
        if not is_alike or (state.model_state is not None) != self._loss.has_state:
            raise ValueError(
                "the state belongs to another step: its rule, its average, its form or the arguments of its loss "
                "differ. Start with init(model), or bring a state of other rules by step.from_file"
            )

    def _in_words(self) -> str:
        """Returns a text that must be the same in all processes."""
        kept = [f"state{path}  {spec}" for path, spec in described(self._kept, describe)]
        shapes, value = self._placement.shapes(), jax.ShapeDtypeStruct((), np.float32, sharding=self._placement.whole)
        update = jax.jit(self._updated).lower(shapes, shapes, self._kept[0], value).as_text()
        around = _surroundings_in_words(self._placement.axes.mesh)
        return "\n".join([self._placement.in_words(), *kept, self._loss.in_words, around, update])


Step.__module__ = "treeparams.sharding"
