"""The value of a loss over a mesh and its gradient.

A loss is of the whole batch, of which each device has a share. Whichever it is, it is right where XLA divides it: the
parameters are brought together by hand, one collective for each array, and all else is left to XLA (`in_view`). Three
kinds of losses can be divided by hand, which moves less: gradients are summed and divided among the devices at once.
A mean over examples is the mean of the devices' means, a sum with a weight is summed before it is divided
(`by_hand`), and of a loss in two parts the first is by hand and the second is not (`_two_parts`).
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._forms.mesh import automatic, lay, over_devices
from .._forms.restructure import Restructure, released
from .._slots.parts import Rest, put_together
from .._tree.types import PyTree
from ._batch import check_keys, taken
from ._closed_over import naming_closed_over
from ._compute import Compute
from ._gather import (
    DeviceShare,
    Dims,
    Gathering,
    ShareRestructure,
    Whole,
    constrained_to,
    divided_rest,
    gather,
    scatter,
    summed,
)
from ._loss import Aux, Looked, Loss, aux_of, check_aux_rows, check_rows, check_sums, check_weight, look
from ._pieces import Result, cut, over_pieces, uncut
from ._placement import Placement
from ._specs import is_spec

Split = Literal["state", "gradients", "parameters"]


class Found(NamedTuple):
    """What a loss and its gradient come to."""

    value: Any
    gradients: PyTree
    aux: PyTree
    model_state: PyTree


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """The value and the gradient of a loss over a batch that devices share."""

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
        """The spec of each block along the batch; other axes of the mesh are left to XLA."""
        return list(map(self.placement.axes.along_batch, self.placement.specs))

    def __call__(self, params: PyTree, rest: Rest[Any] | Restructure[Any], model_state: Any, batch: PyTree) -> Found:
        """The value, the gradient, which lies as parameters do, and what comes beside."""
        placement, mesh = self.placement, self.placement.axes.mesh
        arrays, treedef, shardings = taken(batch, placement, self.pieces)
        laid = list(map(lay, map(jnp.asarray, arrays), shardings))

        def run(leaves: list[Any], rest: Any, model_state: Any, arrays: list[Any]) -> Found:
            # The mesh is asked for within `automatic`, where it is another one.
            specs = jtu.tree_leaves(placement.rest_specs(rest), is_leaf=is_spec)
            rest, dtypes = self.compute.rest(rest)
            return Call(self, treedef, rest, specs, dtypes, model_state, arrays).found(leaves)

        whole = placement.whole
        run_over = automatic(run, Found(whole, placement.params, whole, whole), mesh)
        with naming_closed_over():
            return run_over(jtu.tree_leaves(params), rest, model_state, laid)


@dataclasses.dataclass(frozen=True, eq=False)
class Call:
    """One call of a `Gradient`, while it is traced."""

    of: Gradient
    treedef: Any  # of the batch
    rest: Any  # of the model, its arrays as they lie
    specs: list[PartitionSpec]  # of these
    dtypes: list[Any]  # of these within the loss; none as it is
    model_state: Any
    arrays: list[jax.Array]  # of the batch

    def found(self, leaves: list[Any]) -> Found:
        """The value, the gradient, and what comes beside."""
        loss, axes, pieces = self.of.loss, self.of.placement.axes, self.of.pieces
        whole = self.looked_at(leaves, 1)
        looked = whole.result
        if loss.outputs is None:
            check_weight(whole)
        is_sum = loss.is_mean or (looked.weight is not None and loss.outputs is None)
        if pieces > 1 and not is_sum and loss.outputs is None:
            raise ValueError(
                f"microbatches={pieces} takes a loss that can be added up over pieces of a batch, and one that "
                "returns a single number may be any function of all examples. Return (sum, weight), which is divided "
                'once for all pieces and devices; or say loss_is="mean" of a mean over examples; or give the part that '
                "is computed for each example by itself as outputs="
            )
        if loss.outputs is not None:
            return self.in_two_parts(leaves, looked)
        is_by_hand = is_sum and not loss.has_state
        parts = pieces * axes.devices_along(axes.batch) if is_by_hand else pieces
        check_sums(whole, lambda: self.looked_at(leaves, parts), parts)
        return self.by_hand(leaves, looked) if is_by_hand else self.in_view(leaves, looked)

    def looked_at(self, leaves: list[Any], parts: int) -> Looked:
        """The loss as a program of one of so many parts of the batch."""
        pairs = zip(leaves, self.of.compute.form.blocks, strict=True)
        shapes = [jax.ShapeDtypeStruct(leaf.shape, block.dtype) for leaf, block in pairs]
        f = lambda leaves, arrays: self.result(leaves, self.unsplit(self.cast_rest()), self.model_state, arrays)
        return look(f, shapes, [_part_of(array, parts) for array in self.arrays])

    # -- What the loss is given

    @property
    def examples(self) -> int:
        """How many there are in the batch."""
        return next((array.shape[0] for array in self.arrays if array.ndim), 0)

    def cast_rest(self) -> Any:
        """The rest of the model within the loss, of arrays that are whole."""
        leaves, treedef = jtu.tree_flatten(self.rest)
        return treedef.unflatten([_cast(leaf, dtype) for leaf, dtype in zip(leaves, self.dtypes, strict=True)])

    def unsplit(self, rest: Any) -> Any:
        """The rest of the model beside parameters that nobody has a share of; what opens them, if they are split."""
        if self.of.split != "parameters":
            return rest
        nothing, gathering = [Whole((), None)] * len(self.specs), Gathering(self.of.placement.axes, is_automatic=False)
        return ShareRestructure.over(rest, [()] * len(self.of.specs), nothing, gathering)

    def result(self, leaves: Sequence[Any], rest: Any, model_state: Any, arrays: Sequence[Any]) -> Result:
        """What the loss returns, of arrays of parameters that are whole."""
        loss, batch = self.of.loss, jtu.tree_unflatten(self.treedef, arrays)
        given = self.model(leaves, rest)
        if loss.outputs is not None:
            outputs = loss.outputs(*given, *batch)
            check_rows(outputs, arrays)
            return loss.result(loss.function(outputs, *batch))
        return loss.result(loss.function(*given, *([model_state] if loss.has_state else []), *batch))

    def model(self, leaves: Sequence[Any], rest: Any) -> tuple[Any, ...]:
        """The first arguments of the loss: the model, or the parameters in their form and the way back."""
        if self.of.loss.takes_form:
            params = self.of.placement.tree(leaves)
            return DeviceShare(params) if isinstance(rest, ShareRestructure) else params, rest
        rest = released(rest) if isinstance(rest, Restructure) else rest
        return (put_together(rest, self.of.compute.form.cut_leaves(leaves)),)

    def entered(self, leaves: Sequence[jax.Array]) -> list[jax.Array]:
        """Arrays of parameters as they enter the loss: whole, in its dtypes; or, split, in those that sum gradients."""
        compute = self.of.compute
        if self.of.split == "parameters":
            return [leaf.astype(compute.summed_in(leaf.dtype)) for leaf in leaves]
        triples = zip(leaves, self.of.splits, compute.form.blocks, strict=True)
        return [gather(leaf.astype(block.dtype), split) for leaf, split, block in triples]

    def objective(self, rest: Any, aux: Aux, is_automatic: bool) -> Callable[..., tuple[jax.Array, Result]]:
        """What is differentiated in arrays of parameters that have entered; its sum over devices and pieces is wanted.

        It is given the device's examples, or all examples of a piece.
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
        """Arrays that have entered and the rest, or what opens those that each device has a share of."""
        if self.of.split != "parameters":
            return leaves, rest
        gathering = Gathering(self.of.placement.axes, is_automatic)
        pairs = zip(leaves, self.of.placement.specs, strict=True)
        shares = [gathering.divided(leaf, spec) for leaf, spec in pairs]
        frozen, ways = divided_rest(rest, self.ways, self.specs, gathering)
        restructure = ShareRestructure.over(frozen, [split for _, split in shares], ways, gathering)
        return [leaf for leaf, _ in shares], restructure

    # -- Ways to the gradient

    def by_hand(self, leaves: list[Any], looked: Result) -> Found:
        """Each device computes the gradient of its examples; gradients are summed and divided at once."""
        of, axes = self.of, self.of.placement.axes
        check_keys(self.treedef, self.arrays)
        batch, aux = PartitionSpec(axes.batch), aux_of(looked.aux, self.examples, of.loss.is_mean, in_parts=True)

        def on_device(leaves: list[Any], rest: list[Any], arrays: list[Any]) -> Any:
            objective = self.objective(self.rest_of(rest), aux, is_automatic=False)
            sums, found, _ = over_pieces(objective, self.entered(leaves), None, arrays, of.pieces)
            value, gradients = jax.lax.psum(sums.value, axes.batch), self.reduced(sums.gradients)
            if sums.weight is not None:
                value, gradients = divided(value, gradients, jax.lax.psum(sums.weight, axes.batch))
            of_all, of_rows = aux.over_devices(aux.over_pieces(found), axes.batch)
            return value, self.as_parameters(gradients), of_all, of_rows

        arrays = [batch if array.ndim else PartitionSpec() for array in self.arrays]
        ins = of.specs, self.rest_specs, arrays
        outs = PartitionSpec(), self.out_specs, PartitionSpec(), batch
        run = over_devices(on_device, axes.mesh, ins, outs, axes.batch)
        value, gradients, of_all, of_rows = run(leaves, jtu.tree_leaves(self.rest), self.arrays)
        return self.done(value, gradients, aux.tree(of_all, of_rows), None, looked)

    def in_view(self, leaves: list[Any], looked: Result) -> Found:
        """The loss sees all examples; XLA divides what it computes."""
        of = self.of
        aux = aux_of(looked.aux, self.examples, of.loss.is_mean, in_parts=of.pieces > 1)
        leaves, rest = self.whole(leaves)
        objective = self.objective(rest, aux, is_automatic=True)
        sums, found, model_state = over_pieces(objective, leaves, self.model_state, self.arrays, of.pieces, self.laid)
        value, gradients = sums.value, sums.gradients
        if sums.weight is not None:
            value, gradients = divided(value, gradients, sums.weight)
        found = aux.tree(*aux.over_devices(aux.over_pieces(found), ()))
        return self.done(value, self.as_parameters(gradients), found, model_state, looked)

    def in_two_parts(self, leaves: list[Any], looked: Result) -> Found:
        """Each device computes the outputs of its examples; XLA divides the loss, which sees the outputs of all."""
        of, axes = self.of, self.of.placement.axes
        check_keys(self.treedef, self.arrays)
        aux = aux_of(looked.aux, self.examples, of.loss.is_mean, in_parts=False)
        rows, is_split = PartitionSpec(axes.batch), of.split == "parameters"
        leaves, rest = self.by_device(leaves)
        arrays = [rows if array.ndim else PartitionSpec() for array in self.arrays]
        ins = of.specs if is_split else [rows] * len(leaves), self.rest_specs if is_split else PartitionSpec(), arrays
        run = over_devices(self.outputs, axes.mesh, ins, rows, axes.batch)
        outputs, pull_back = eqx.filter_vjp(lambda leaves: run(leaves, rest, self.arrays), leaves)
        batch = jtu.tree_unflatten(self.treedef, self.arrays)

        def value(outputs: PyTree) -> tuple[jax.Array, Result]:
            found = of.loss.result(of.loss.function(outputs, *batch))
            return found.value if found.weight is None else divided(found.value, [], found.weight)[0], found

        (value_of_all, result), cotangents = eqx.filter_value_and_grad(value, has_aux=True)(outputs)
        (gradients,) = pull_back(cotangents)
        if not is_split:
            reduce = lambda gradients: self.reduced([each[0] for each in gradients])
            gradients = over_devices(reduce, axes.mesh, (rows,), self.out_specs, axes.batch)(gradients)
        found = jax.tree.map(lambda each: jnp.asarray(each)[None], result.aux)
        found = aux.tree(*aux.over_devices(aux.over_pieces(found), ()))
        return self.done(value_of_all, self.as_parameters(gradients), found, None, looked)

    def by_device(self, leaves: list[Any]) -> tuple[list[Any], list[Any]]:
        """As `entered`, with a first axis over the devices, so that each has a gradient of its own; and the rest."""
        of, axes = self.of, self.of.placement.axes
        if of.split == "parameters":
            return self.entered(leaves), jtu.tree_leaves(self.rest)
        wide = lambda leaves: [leaf.astype(of.compute.summed_in(leaf.dtype))[None] for leaf in leaves]
        bring = lambda leaves, rest: (wide(self.entered(leaves)), jtu.tree_leaves(self.rest_of(rest)))
        ins = of.specs, self.rest_specs
        outs = PartitionSpec(axes.batch), PartitionSpec()
        return over_devices(bring, axes.mesh, ins, outs, axes.batch)(leaves, jtu.tree_leaves(self.rest))

    def outputs(self, leaves: list[Any], rest: list[Any], arrays: list[Any]) -> PyTree:
        """The outputs of the examples of a device, of what `by_device` returns."""
        of, whole = self.of, jtu.tree_structure(self.rest).unflatten(rest)
        f: Any = of.loss.outputs
        pairs = list(zip(leaves, of.compute.form.blocks, strict=True))

        def of_piece(arrays: list[Any]) -> PyTree:
            # Cast here, so that gradients of pieces are added in the wide dtype.
            own = leaves if of.split == "parameters" else [leaf[0].astype(block.dtype) for leaf, block in pairs]
            batch = jtu.tree_unflatten(self.treedef, arrays)
            outputs = f(*self.model(*self.shared(own, whole, is_automatic=False)), *batch)
            check_rows(outputs, arrays)
            return outputs

        if of.pieces == 1:
            return of_piece(arrays)
        in_pieces = [cut(array, of.pieces) if array.ndim else None for array in arrays]
        fill = lambda piece: [array if each is None else each for array, each in zip(arrays, piece, strict=True)]
        # Of all pieces only the outputs are kept; the rest is computed again on the way back.
        return jax.tree.map(uncut, jax.lax.map(jax.checkpoint(lambda piece: of_piece(fill(piece))), in_pieces))

    def whole(self, leaves: list[Any]) -> tuple[list[Any], Any]:
        """Arrays of parameters and the rest brought together, each by a collective by hand."""
        of, axes = self.of, self.of.placement.axes
        if of.split == "parameters":
            return self.entered(leaves), self.rest
        bring = lambda leaves, rest: (self.entered(leaves), jtu.tree_leaves(self.rest_of(rest)))
        ins = of.specs, self.rest_specs
        run = over_devices(bring, axes.mesh, ins, PartitionSpec(), axes.batch)
        leaves, rest = run(leaves, jtu.tree_leaves(self.rest))
        return leaves, jtu.tree_structure(self.rest).unflatten(rest)

    @property
    def rest_specs(self) -> list[PartitionSpec]:
        """The spec of each array of the rest along the batch."""
        return list(map(self.of.placement.axes.along_batch, self.specs))

    @property
    def ways(self) -> list[Whole]:
        """How each array of the rest is brought together."""
        return list(map(Whole, map(self.of.placement.axes.by_hand, self.specs), self.dtypes))

    def rest_of(self, leaves: Sequence[jax.Array]) -> Any:
        """The rest of the model on a device, of its shares of arrays: whole, unless parameters stay split."""
        if self.of.split != "parameters":
            gathering = Gathering(self.of.placement.axes, is_automatic=False)
            leaves = [way.of(leaf, gathering) for way, leaf in zip(self.ways, leaves, strict=True)]
        return jtu.tree_structure(self.rest).unflatten(leaves)

    # -- Gradients

    @property
    def out_specs(self) -> list[PartitionSpec]:
        """How gradients by hand lie. What is whole on each device afterwards is divided on the way out."""
        return [PartitionSpec()] * len(self.of.specs) if self.of.split == "state" else self.of.specs

    def reduced(self, gradients: Sequence[jax.Array]) -> list[jax.Array]:
        """Each device's part of the sum of gradients over the devices."""
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

    def laid(self, gradients: list[jax.Array]) -> list[jax.Array]:
        """Gradients under automatic partitioning, laid as parameters are."""
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
        """Gradients in the dtypes of the parameters."""
        blocks = self.of.placement.form.blocks
        return [
            each.astype(jax.dtypes.canonicalize_dtype(block.dtype))
            for each, block in zip(gradients, blocks, strict=True)
        ]

    def done(self, value: jax.Array, gradients: list[jax.Array], aux: Any, model_state: Any, looked: Result) -> Found:
        """The value in the dtype of the loss, and the gradient as a tree like the parameters."""
        return Found(value.astype(looked.value.dtype), self.of.placement.tree(gradients), aux, model_state)


def divided(value: jax.Array, gradients: Sequence[jax.Array], weight: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """A sum and its gradients, divided by the weight, each in its dtype."""
    by = lambda each: each / weight.astype(each.dtype)
    return by(value), list(map(by, gradients))


def _part_of(array: jax.Array, parts: int) -> jax.ShapeDtypeStruct:
    """One of so many parts of an array of a batch, as a shape."""
    shape = (array.shape[0] // parts, *array.shape[1:]) if array.ndim else ()
    return jax.ShapeDtypeStruct(shape, array.dtype, weak_type=array.weak_type)


def _cast(array: Any, dtype: Any) -> Any:
    return array if dtype is None else array.astype(dtype)
