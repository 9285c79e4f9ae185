"""The functions `init` and `step` before they are compiled, and the checks that they make."""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from .._forms.mesh import automatic, lay
from .._forms.restructure import Restructure
from .._slots.parts import Rest, take_apart
from .._tree.text import describe
from .._tree.types import PyTree
from ._batch import put_batch
from ._call import Setup
from ._check import check_layout, lowered
from ._gradient import value_and_gradient
from ._placement import Placement, described
from ._processes.agree import agree, is_shared, is_whole, surroundings_in_words, values_in_words
from ._put import put_leaf, shapes_over
from ._specs import names_of
from ._update import Update, sharding_of


@dataclasses.dataclass(frozen=True)
class StepState:
    """Everything that `sharding.make_step` keeps beside the parameters, as a pytree.

    Attributes:
        rule: the state of the optimiser, as Optax returns it.
        average: the `tp.Ema` of the parameters, in their form, or `None`. `plan.model(state.average.average, state)` is
            the averaged model.
        rest: the model without its trained parameters.
        layout: a zero, stored under the digest of the plan's layout. It identifies the parameters that the state
            belongs to, so the step, `treeparams.saving` and Orbax reject a state of other parameters, even if a padded
            vector has the same length.
        model_state: the state that the model changes, such as running statistics. `None` without `has_state=True`.
    """

    rule: Any
    average: Any
    rest: Any
    layout: dict[str, Any]
    model_state: Any = None


StepState.__module__ = "treeparams.sharding"
jtu.register_dataclass(StepState, ["rule", "average", "rest", "layout", "model_state"], [])


@dataclasses.dataclass(frozen=True, eq=False)
class Program:
    """The functions `init` and `step`, not compiled."""

    placement: Placement
    setup: Setup
    update: Update
    kept: tuple[PyTree, PyTree]  # what the update keeps, as shapes with their shardings

    def init(self, model: Any, model_state: Any = None, *, check_values: bool = False) -> tuple[PyTree, StepState]:
        """Places the parameters of a model on the devices, and makes the first state."""
        self.check_model_state(model_state)
        if jax.process_count() > 1:
            self.compare(model if check_values else None)
        placement, parts = self.placement, take_apart(model, self.placement.layout)
        lay_rest = placement.restructure if self.takes_restructure else placement.put_rest
        params, rest = placement.laid(parts.slots), lay_rest(parts.rest)
        is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves((params, rest)))
        kept = self.kept if is_of_shapes else self.start(params)
        if is_shared(placement.axes.mesh):
            # Numbers of the rule that belong to no parameter come from the program of each process.
            whole = {path: leaf for path, leaf in described(kept, lambda leaf: leaf) if is_whole(leaf)}
            agree(values_in_words(whole), "the first values of the optimiser's state")
        model_state = jax.tree.map(lambda leaf: put_leaf(leaf, placement.whole), model_state)
        zero = (jax.ShapeDtypeStruct if is_of_shapes else jnp.zeros)((), np.int32)
        mark = {placement.layout.digest: put_leaf(zero, placement.whole, is_own=True)}
        return params, StepState(*kept, rest, mark, model_state)

    def compare(self, model: Any) -> None:
        """Checks that all processes have the same plan, update and, if a model is given, the same values."""
        agree(self.in_words(), "the plans")
        if not is_shared(self.placement.axes.mesh):
            return
        agree(lowered(self.placement, self.update, self.kept).as_text(), "the programs of the update")
        if model is not None:
            agree(values_in_words(model), "the values of the models")

    def start(self, params: PyTree) -> tuple[PyTree, PyTree]:
        """Makes the state that the update keeps, for parameters that lie on the mesh."""
        if not jtu.tree_leaves(self.kept):
            return self.kept
        shardings = sharding_of(self.kept)
        begin = automatic(self.update.start, shardings, self.placement.axes.mesh)
        # A rule may not look at the parameters, and without any argument JAX would not know the devices.
        return jax.jit(begin, keep_unused=True, out_shardings=shardings)(params)

    def put(self, batch: PyTree) -> PyTree:
        """Places a batch on the devices."""
        return put_batch(batch, self.placement, self.setup.pieces)

    def step(self, params: PyTree, state: StepState, *batch: Any) -> tuple[PyTree, StepState, Any]:
        """Returns the next parameters and state, and the value of the loss (with its `aux`)."""
        placement = self.placement
        placement.check(params)
        self.check_state(state)
        params = lay(placement.tree(jtu.tree_leaves(params)), placement.params)
        found = value_and_gradient(self.setup, params, state.rest, state.model_state, batch)
        shardings = (placement.params, *sharding_of(self.kept))
        run = automatic(self.update.step, shardings, placement.axes.mesh)
        params, after, average = run(params, found.gradients, state.rule, state.average, found.value)
        value = (found.value, found.aux) if self.setup.loss.has_aux else found.value
        return params, StepState(after, average, state.rest, state.layout, found.model_state), value

    def over(self, mesh: Mesh | AbstractMesh) -> "Program":
        """Returns the same program over a mesh of other devices with the same axes."""
        placement = self.placement.over(mesh)
        setup = dataclasses.replace(self.setup, placement=placement)
        return Program(placement, setup, self.update, shapes_over(self.kept, mesh))

    @property
    def gradient_bytes(self) -> int:
        """The bytes of the gradient on a device at their peak: before it is divided, unless it is never whole."""
        axes, found = self.placement.axes, 0
        leaves = jtu.tree_leaves(self.placement.shapes())
        for leaf, size, spec in zip(leaves, self.setup.gradient_itemsizes, self.placement.specs, strict=True):
            split = [name for name in names_of(spec) if self.setup.split == "parameters" or name not in axes.batch]
            found += math.prod(leaf.shape) * size // axes.devices_along(split)
        return found

    @property
    def takes_restructure(self) -> bool:
        """Whether the state holds a `Restructure`: because the loss takes one, or because frozen rows are owned."""
        placement = self.placement
        return placement.frozen.are_owned or (self.setup.loss.takes_form and placement.has_restructure)

    def check_model_state(self, model_state: Any) -> None:
        """Checks that a model state is given if, and only if, the loss takes one."""
        has_state = self.setup.loss.has_state
        if has_state and model_state is None:
            raise ValueError(
                "with has_state=True the loss needs the state of the model; pass the one that eqx.nn.make_with_state "
                "returns to init(model, model_state)"
            )
        if model_state is not None and not has_state:
            raise ValueError("init got the state of a model, but its loss takes none; give make_step has_state=True")

    def check_state(self, state: object) -> None:
        """Checks that a state belongs to this step."""
        if not isinstance(state, StepState):
            raise TypeError(f"expected the state that init or the last step returned, got {describe(state)}")
        check_layout(self.placement, state.layout)
        kept, rest = (state.rule, state.average), Restructure if self.takes_restructure else Rest
        is_alike = described(kept, jnp.shape) == described(self.kept, jnp.shape) and isinstance(state.rest, rest)
        if not is_alike or (state.model_state is not None) != self.setup.loss.has_state:
            raise ValueError(
                "the state belongs to another step: its rule, its average, its form or the arguments of its loss "
                "differ; start with init(model)"
            )

    def in_words(self) -> str:
        """Returns a text that must be the same in all processes."""
        kept = [f"state{path}  {spec}" for path, spec in described(self.kept, describe)]
        how = f"split {self.setup.split}, microbatches {self.setup.pieces}, {self.setup.compute.in_words}"
        around = surroundings_in_words(self.placement.axes.mesh)
        return "\n".join([self.placement.in_words(), *kept, how, self.setup.loss.in_words, around])
