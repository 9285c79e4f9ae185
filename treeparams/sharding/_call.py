"""One call of a step's gradient while it is traced: the arguments of the loss, and how gradients come back."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._forms.mesh import over_devices
from .._forms.restructure import Restructure, released
from .._slots.parts import put_together
from .._tree.dtypes import widened
from ._by_hand import Dims, gather, scatter, summed
from ._compute import Compute
from ._gather import AS_IT_IS, Gathering, Whole, constrained_to
from ._loss import Aux, Looked, Loss, check_aux_rows, check_rows, look
from ._pieces import Result, examples_of
from ._placement import Placement
from ._share import DeviceShare, ShareRestructure, divided_rest

Split = Literal["state", "gradients", "parameters"]


@dataclasses.dataclass(frozen=True, eq=False)
class Setup:
    """A loss over a batch that devices share, and the options for its gradient."""

    placement: Placement
    loss: Loss
    split: Split
    pieces: int  # in which the batch is taken, one after another
    compute: Compute

    @property
    def splits(self) -> list[Dims]:
        """The axes along which each block is gathered."""
        return list(map(self.placement.axes.by_hand, self.placement.specs))

    @property
    def specs(self) -> list[PartitionSpec]:
        """The spec of each block along the batch axes. Other axes of the mesh are left to XLA."""
        return list(map(self.placement.axes.along_batch, self.placement.specs))

    @property
    def gradient_itemsizes(self) -> list[int]:
        """The bytes of each number in the gradient of each block, in the widest dtype that the whole gradient has."""
        # A share is differentiated in the dtype in which it is summed. A whole gradient comes in the dtype of the loss,
        # and is added up over pieces in a wide one.
        if self.split == "parameters":
            dtypes = [[self.compute.summed_in(block.dtype)] for block in self.placement.form.blocks]
        else:
            own = [block.dtype for block in self.compute.form.blocks]
            dtypes = [[each, self.compute.summed_in(each)] for each in own]
        if self.pieces > 1:
            dtypes = [[*each, widened(each[0])] for each in dtypes]
        return [max(jax.dtypes.canonicalize_dtype(dtype).itemsize for dtype in each) for each in dtypes]


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of the gradient: a batch, and the rest of a model."""

    of: Setup
    treedef: Any  # of the batch
    rest: Any  # of the model, its arrays as they lie
    specs: list[PartitionSpec]  # of these
    dtypes: list[Any]  # of these within the loss; none as it is
    model_state: Any
    arrays: list[jax.Array]  # of the batch

    # -- What the loss is given

    @property
    def examples(self) -> int:
        """The number of examples in the batch."""
        return examples_of(self.arrays)

    @property
    def batch_specs(self) -> list[PartitionSpec]:
        """The spec of each array of the batch: examples are split, arrays for all examples are whole."""
        rows = PartitionSpec(self.of.placement.axes.batch)
        return [rows if array.ndim else PartitionSpec() for array in self.arrays]

    def cast_rest(self) -> Any:
        """Returns the rest of the model in the dtypes of the loss, from whole arrays."""
        leaves, treedef = jtu.tree_flatten(self.rest)
        return treedef.unflatten([_cast(leaf, dtype) for leaf, dtype in zip(leaves, self.dtypes, strict=True)])

    def unsplit(self, rest: Any) -> Any:
        """Returns the rest that goes with unsplit parameters; with split ones, the restructure that opens them."""
        if self.of.split != "parameters":
            return rest
        gathering = Gathering(self.of.placement.axes, is_automatic=False)
        return ShareRestructure.over(rest, [()] * len(self.of.specs), [AS_IT_IS] * len(self.specs), gathering)

    def result(self, leaves: Sequence[Any], rest: Any, model_state: Any, arrays: Sequence[Any]) -> Result:
        """Calls the loss with whole arrays of parameters, and returns its checked result."""
        loss, batch = self.of.loss, jtu.tree_unflatten(self.treedef, arrays)
        given = self.model(leaves, rest)
        if loss.outputs is not None:
            outputs = loss.outputs(*given, *batch)
            check_rows(outputs, arrays)
            return loss.result(loss.function(outputs, *batch))
        return loss.result(loss.function(*given, *([model_state] if loss.has_state else []), *batch))

    def looked_at(self, leaves: list[Any], parts: int) -> Looked:
        """Traces the loss for one of `parts` equal parts of the batch."""
        pairs = zip(leaves, self.of.compute.form.blocks, strict=True)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, block.dtype) for leaf, block in pairs]
        f = lambda leaves, arrays: self.result(leaves, self.unsplit(self.cast_rest()), self.model_state, arrays)
        return look(f, shapes, [_part_of(array, parts) for array in self.arrays])

    def model(self, leaves: Sequence[Any], rest: Any) -> tuple[Any, ...]:
        """Returns the first arguments of the loss: the model, or the parameters in their form and the rest."""
        if self.of.loss.takes_form:
            params = self.of.placement.tree(leaves)
            return DeviceShare(params) if isinstance(rest, ShareRestructure) else params, rest
        rest = released(rest) if isinstance(rest, Restructure) else rest
        return (put_together(rest, self.of.compute.form.cut_leaves(leaves)),)

    def entered(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns arrays of parameters as they enter the loss.

        Unsplit ones are gathered, in the dtypes of the loss. Split ones stay split, in the dtypes in which gradients
        are summed.
        """
        compute = self.of.compute
        if self.of.split == "parameters":
            return [leaf.astype(compute.summed_in(leaf.dtype)) for leaf in leaves]
        triples = zip(leaves, self.of.splits, compute.form.blocks, strict=True)
        return [gather(leaf.astype(block.dtype), split) for leaf, split, block in triples]

    def objective(self, rest: Any, aux: Aux, is_automatic: bool) -> Callable[..., tuple[jax.Array, Result]]:
        """Returns the function to differentiate in entered parameters; its results are summed over devices and pieces.

        The function is called with the device's examples, or with all examples of a piece.
        """
        axes, pieces = self.of.placement.axes, self.of.pieces
        # Of a mean it is divided before it is summed over the devices, so that sums of narrow floats do not overflow.
        parts = 1 if not self.of.loss.is_mean else pieces if is_automatic else pieces * axes.devices_along(axes.batch)

        def value(leaves: list[Any], model_state: Any, arrays: list[Any]) -> tuple[jax.Array, Result]:
            found = self.result(*self.shared(leaves, rest, is_automatic), model_state, arrays)
            check_aux_rows(aux, found.aux, arrays)
            return found.value / parts, found

        return value

    def shared(self, leaves: Sequence[Any], rest: Any, is_automatic: bool) -> tuple[Any, Any]:
        """Returns entered arrays and the rest; for split parameters, shares and the restructure that opens them."""
        if self.of.split != "parameters":
            return leaves, rest
        gathering = Gathering(self.of.placement.axes, is_automatic)
        pairs = zip(leaves, self.of.placement.specs, strict=True)
        shares = [gathering.divided(leaf, spec) for leaf, spec in pairs]
        frozen, ways = divided_rest(rest, self.ways, self.specs, gathering)
        restructure = ShareRestructure.over(frozen, [split for _, split in shares], ways, gathering)
        return [leaf for leaf, _ in shares], restructure

    def by_device(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """Like `entered`, but with a first axis over the devices, so that each has its own gradient; and the rest."""
        return self._brought(leaves, self._widened, PartitionSpec(self.of.placement.axes.batch))

    def _widened(self, leaf: jax.Array) -> jax.Array:
        return leaf.astype(self.of.compute.summed_in(leaf.dtype))[None]

    def whole(self, leaves: list[Any]) -> tuple[list[Any], Any]:
        """Gathers arrays of parameters and the rest, each with one explicit collective."""
        leaves, rest = self._brought(leaves, lambda leaf: leaf, PartitionSpec())
        return leaves, jtu.tree_structure(self.rest).unflatten(rest)

    def _brought(
        self, leaves: list[Any], finish: Callable[[jax.Array], jax.Array], spec: PartitionSpec
    ) -> tuple[list[Any], list[Any]]:
        """Gathers parameters and the rest, and applies `finish` to parameters on each device; these lie by `spec`."""
        if self.of.split == "parameters":
            return self.entered(leaves), jtu.tree_leaves(self.rest)

        def bring(leaves: list[Any], rest: list[Any]) -> tuple[list[Any], list[Any]]:
            return list(map(finish, self.entered(leaves))), jtu.tree_leaves(self.rest_of(rest))

        axes, ins = self.of.placement.axes, (self.of.specs, self.rest_specs)
        run = over_devices(bring, axes.mesh, ins, (spec, PartitionSpec()), axes.batch)
        return run(leaves, jtu.tree_leaves(self.rest))

    @property
    def rest_specs(self) -> list[PartitionSpec]:
        """The spec of each array of the rest along the batch axes."""
        return list(map(self.of.placement.axes.along_batch, self.specs))

    @property
    def ways(self) -> list[Whole]:
        """How each array of the rest is gathered."""
        return list(map(Whole, map(self.of.placement.axes.by_hand, self.specs), self.dtypes))

    def rest_of(self, leaves: Sequence[jax.Array]) -> Any:
        """Returns the rest of the model on a device from its shares of arrays: whole, unless parameters stay split."""
        if self.of.split != "parameters":
            gathering = Gathering(self.of.placement.axes, is_automatic=False)
            leaves = [way.of(leaf, gathering) for way, leaf in zip(self.ways, leaves, strict=True)]
        return jtu.tree_structure(self.rest).unflatten(leaves)

    # -- Gradients

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """How gradients lie that are computed by hand. One that each device holds whole is divided on the way out."""
        return [PartitionSpec()] * len(self.of.specs) if self.of.split == "state" else self.of.specs

    def reduced(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """Returns each device's part of the sum of gradients over the devices."""
        # Three ways to the same sum. Of split parameters, gradients have been summed where these were gathered, by the
        # transpose of that. Split gradients are summed and divided in one collective here. With a split state alone,
        # each device keeps the whole sum, and XLA takes from it on the way out.
        of, batch = self.of, self.of.placement.axes.batch
        wide = [each.astype(of.compute.summed_in(each.dtype)) for each in gradients]
        if of.split == "state":
            return [jax.lax.psum(each, batch) for each in wide]
        if of.split == "gradients":
            wide = list(map(scatter, wide, of.splits))
        return [summed(each, split, batch) for each, split in zip(wide, of.splits, strict=True)]

    def reduced_by_device(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """Like `reduced`, for gradients with a first axis over the devices."""
        return self.reduced([each[0] for each in gradients])

    def laid(self, gradients: list[jax.Array]) -> list[jax.Array]:
        """Constrains gradients under automatic partitioning to the shardings of the parameters."""
        # The gradient of a vector is joined where each device has all of it. If XLA were to divide it at once, it would
        # divide the gradient of each leaf first, and bring all of these together again.
        placement = self.of.placement
        is_vector = [block.length is not None and not block.rank for block in placement.form.blocks]
        whole = [
            constrained_to(each, PartitionSpec(), placement.axes) if yes else each
            for each, yes in zip(gradients, is_vector, strict=True)
        ]
        return [constrained_to(each, spec, placement.axes) for each, spec in zip(whole, placement.specs, strict=True)]

    def as_parameters(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """Casts gradients to the dtypes of the parameters."""
        blocks = self.of.placement.form.blocks
        return [
            each.astype(jax.dtypes.canonicalize_dtype(block.dtype))
            for each, block in zip(gradients, blocks, strict=True)
        ]


def _cast(array: Any, dtype: Any) -> Any:
    return array if dtype is None else array.astype(dtype)


def _part_of(array: jax.Array, parts: int) -> jax.ShapeDtypeStruct:
    """Returns the shape of one of `parts` equal parts of an array of a batch."""
    shape = (array.shape[0] // parts, *array.shape[1:]) if array.ndim else ()
    return jax.ShapeDtypeStruct(shape, array.dtype, weak_type=array.weak_type)
