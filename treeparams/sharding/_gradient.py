"""The value and the gradient of a loss over a mesh.

A loss is a function of the whole batch, of which each device has a share. Any loss is right if XLA divides it:
parameters are gathered by hand, with one collective for each array, and everything else is left to XLA (`in_view`).
Three kinds of losses can be divided by hand, which moves fewer bytes, because one collective sums the gradients and
divides them among the devices. A mean over examples is the mean of the devices' means, and a sum with a weight is
summed before it is divided (both `by_hand`). Of a loss in two parts, the first is divided by hand and the second by XLA
(`in_two_parts`).
"""

import contextlib
import functools
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._forms.mesh import automatic, lay, over_devices
from .._forms.restructure import Restructure
from .._slots.parts import Rest
from .._tree.types import PyTree
from ._batch import check_keys, taken
from ._call import Call, Setup
from ._loss import aux_of, check_model_state, check_rows, check_sums, check_weights
from ._pieces import Result, as_pieces, in_pieces, over_pieces, uncut, with_scalars
from ._specs import is_spec

# Of `jax.shard_map`, and of a function under automatic partitioning. Both show the type of the array, with its axes.
_SAID_BY_JAX = ("Closing over inputs to shard_map", "should match the aval mesh")


class Found(NamedTuple):
    """The results of a loss, and its gradient."""

    value: Any
    gradients: PyTree
    aux: PyTree
    model_state: PyTree


def value_and_gradient(
    setup: Setup, params: PyTree, rest: Rest[Any] | Restructure[Any], model_state: Any, batch: PyTree
) -> Found:
    """Returns the value of the loss, its gradient, sharded as the parameters are, and its other results."""
    placement, mesh = setup.placement, setup.placement.axes.mesh
    arrays, treedef, shardings = taken(batch, placement, setup.pieces)
    laid = list(map(lay, map(jnp.asarray, arrays), shardings))

    def run(leaves: list[Any], rest: Any, model_state: Any, arrays: list[Any]) -> Found:
        # The mesh is asked for within `automatic`, where it is another one.
        specs = jtu.tree_leaves(placement.rest_specs(rest), is_leaf=is_spec)
        rest, dtypes = setup.compute.rest(rest)
        return _found(Call(setup, treedef, rest, specs, dtypes, model_state, arrays), leaves)

    whole = placement.whole
    run_over = automatic(run, Found(whole, placement.params, whole, whole), mesh)
    with _naming_closed_over():
        return run_over(jtu.tree_leaves(params), rest, model_state, laid)


@contextlib.contextmanager
def _naming_closed_over() -> Iterator[None]:
    """Rewords the errors with which JAX rejects a loss that closes over a split array."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        found = re.search(r"\w+\[[^\]]*@[^\]]*\]", str(error))
        if found is None or not any(words in str(error) for words in _SAID_BY_JAX):
            raise
        raise ValueError(
            f"the loss closes over an array {found.group()}, which is split over explicit axes of the mesh. Pass it in "
            "the batch or in the model, or let it be whole on each device: jax.device_put(array, plan.whole)"
        ) from error


def _found(call: Call, leaves: list[Any]) -> Found:
    """Checks the loss, and computes its value and gradient in the way that fits it."""
    loss, axes, pieces = call.of.loss, call.of.placement.axes, call.of.pieces
    whole = call.looked_at(leaves, 1)
    looked = whole.result
    check_weights(whole, is_divided=loss.outputs is None)
    check_model_state(call.model_state, looked.model_state)
    if loss.outputs is not None:
        return in_two_parts(call, leaves, looked)
    is_sum = loss.is_mean or looked.weight is not None
    if pieces > 1 and not is_sum:
        raise ValueError(
            f"microbatches={pieces} needs a loss that can be summed over pieces of a batch, but one that returns a "
            "single number may be any function of all examples. Return (sum, weight), which is divided once for all "
            'pieces and devices; or pass loss_is="mean" if it is a mean over examples; or pass the part that is '
            "computed for each example separately as outputs="
        )
    is_by_hand = is_sum and not loss.has_state
    parts = pieces * axes.devices_along(axes.batch) if is_by_hand else pieces
    check_sums(whole, lambda: call.looked_at(leaves, parts), parts)
    return by_hand(call, leaves, looked) if is_by_hand else in_view(call, leaves, looked)


def by_hand(call: Call, leaves: list[Any], looked: Result) -> Found:
    """Computes the gradient of each device's examples on the device, then sums and divides the gradients at once."""
    of, axes = call.of, call.of.placement.axes
    check_keys(call.treedef, call.arrays)
    batch, aux = PartitionSpec(axes.batch), aux_of(looked.aux, call.examples, of.loss.is_mean, in_parts=True)

    def on_device(leaves: list[Any], rest: list[Any], arrays: list[Any]) -> Any:
        objective = call.objective(call.rest_of(rest), aux, is_automatic=False)
        sums, found, _ = over_pieces(objective, call.entered(leaves), None, arrays, of.pieces)
        value, gradients = jax.lax.psum(sums.value, axes.batch), call.reduced(sums.gradients)
        if sums.weight is not None:
            value, gradients = divided(value, gradients, jax.lax.psum(sums.weight, axes.batch))
        of_all, of_rows = aux.over_devices(aux.over_pieces(found), axes.batch)
        return value, call.as_parameters(gradients), of_all, of_rows

    ins = of.specs, call.rest_specs, call.batch_specs
    outs = PartitionSpec(), call.out_specs, PartitionSpec(), batch
    run = over_devices(on_device, axes.mesh, ins, outs, axes.batch)
    value, gradients, of_all, of_rows = run(leaves, jtu.tree_leaves(call.rest), call.arrays)
    return _done(call, value, gradients, aux.tree(of_all, of_rows), None, looked)


def in_view(call: Call, leaves: list[Any], looked: Result) -> Found:
    """Computes the loss of all examples at once, and lets XLA divide the work."""
    of = call.of
    aux = aux_of(looked.aux, call.examples, of.loss.is_mean, in_parts=of.pieces > 1)
    leaves, rest = call.whole(leaves)
    objective = call.objective(rest, aux, is_automatic=True)
    sums, found, model_state = over_pieces(objective, leaves, call.model_state, call.arrays, of.pieces, call.laid)
    value, gradients = sums.value, sums.gradients
    if sums.weight is not None:
        value, gradients = divided(value, gradients, sums.weight)
    return _done(call, value, call.as_parameters(gradients), aux.of_whole(found), model_state, looked)


def in_two_parts(call: Call, leaves: list[Any], looked: Result) -> Found:
    """Computes the outputs of each device's examples on the device; XLA divides the loss of all outputs."""
    of, axes = call.of, call.of.placement.axes
    check_keys(call.treedef, call.arrays)
    aux = aux_of(looked.aux, call.examples, of.loss.is_mean, in_parts=False)
    rows, is_split = PartitionSpec(axes.batch), of.split == "parameters"
    leaves, rest = call.by_device(leaves)
    given = (of.specs, call.rest_specs) if is_split else ([rows] * len(leaves), PartitionSpec())
    ins = *given, call.batch_specs
    run = over_devices(functools.partial(outputs_of, call), axes.mesh, ins, rows, axes.batch)
    outputs, pull_back = eqx.filter_vjp(lambda leaves: run(leaves, rest, call.arrays), leaves)
    batch = jtu.tree_unflatten(call.treedef, call.arrays)

    def value(outputs: PyTree) -> tuple[jax.Array, Result]:
        found = of.loss.result(of.loss.function(outputs, *batch))
        return found.value if found.weight is None else divided(found.value, [], found.weight)[0], found

    (value_of_all, result), cotangents = eqx.filter_value_and_grad(value, has_aux=True)(outputs)
    (gradients,) = pull_back(cotangents)
    if not is_split:
        gradients = over_devices(call.reduced_by_device, axes.mesh, (rows,), call.out_specs, axes.batch)(gradients)
    found = aux.of_whole(as_pieces(result.aux))
    return _done(call, value_of_all, call.as_parameters(gradients), found, None, looked)


def outputs_of(call: Call, leaves: list[Any], rest: list[Any], arrays: list[Any]) -> PyTree:
    """Computes the outputs of a device's examples, from the results of `by_device`."""
    of, whole = call.of, jtu.tree_structure(call.rest).unflatten(rest)
    f: Any = of.loss.outputs
    pairs = list(zip(leaves, of.compute.form.blocks, strict=True))

    def of_piece(arrays: list[Any]) -> PyTree:
        # Cast here, so that gradients of pieces are added in the wide dtype.
        own = leaves if of.split == "parameters" else [leaf[0].astype(block.dtype) for leaf, block in pairs]
        batch = jtu.tree_unflatten(call.treedef, arrays)
        outputs = f(*call.model(*call.shared(own, whole, is_automatic=False)), *batch)
        check_rows(outputs, arrays)
        return outputs

    if of.pieces == 1:
        return of_piece(arrays)
    # Of all pieces only the outputs are kept; the rest is computed again on the way back.
    run = jax.checkpoint(lambda piece: of_piece(with_scalars(piece, arrays)))
    return jax.tree.map(uncut, jax.lax.map(run, in_pieces(arrays, of.pieces)))


def _done(
    call: Call, value: jax.Array, gradients: list[jax.Array], aux: Any, model_state: Any, looked: Result
) -> Found:
    """Returns the value in the dtype of the loss, and the gradient as a tree like the parameters."""
    return Found(value.astype(looked.value.dtype), call.of.placement.tree(gradients), aux, model_state)


def divided(value: jax.Array, gradients: Sequence[jax.Array], weight: jax.Array) -> tuple[jax.Array, list[jax.Array]]:
    """Divides a sum and its gradients by the weight, each in its own dtype."""
    value, *gradients = [each / weight.astype(each.dtype) for each in (value, *gradients)]
    return value, gradients
