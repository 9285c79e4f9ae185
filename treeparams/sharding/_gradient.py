"""The value of a loss over a mesh and its gradient: by hand over the devices along the batch, where XLA would guess."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.sharding import PartitionSpec

from .._forms.mesh import automatic, lay, over_devices
from .._forms.restructure import Restructure, released
from .._grad import accumulate
from .._slots.parts import Rest, put_together
from .._tree.structure import is_array
from .._tree.text import describe
from .._tree.types import PyTree
from ._batch import taken
from ._gather import DeviceShare, Dims, ShareRestructure, divided, divided_rest, gather, scatter, summed
from ._placement import Placement
from ._specs import is_spec

Split = Literal["state", "gradients", "parameters"]


@dataclasses.dataclass(frozen=True, eq=False)
class Gradient:
    """The value and the gradient of a loss, the mean over the examples of a batch that devices share."""

    placement: Placement
    loss: Callable[..., Any]
    split: Split
    pieces: int  # in which each device takes its examples, one after another
    takes_form: bool  # whether the loss is of parameters in their form and of the way back, and not of the model

    @property
    def splits(self) -> list[Dims]:
        """The axes along which each block is gathered."""
        return list(map(self.placement.axes.by_hand, self.placement.specs))

    @property
    def specs(self) -> PyTree:
        """The spec of each block along the batch; other axes of the mesh are left to XLA."""
        along_batch = self.placement.axes.along_batch
        return self.placement.tree([along_batch(spec) for spec in self.placement.specs])

    def rest_specs(self, rest: Rest[Any] | Restructure[Any], of: Callable[[PartitionSpec], Any]) -> PyTree:
        """Something of the spec of each frozen array."""
        return jax.tree.map(of, self.placement.rest_specs(rest), is_leaf=is_spec)

    def __call__(self, params: PyTree, rest: Rest[Any] | Restructure[Any], batch: PyTree) -> tuple[jax.Array, PyTree]:
        """The value, and the gradient, which lies as parameters do."""
        placement, axes = self.placement, self.placement.axes
        arrays, treedef, shardings = taken(batch, placement, self.pieces)
        laid = list(map(lay, map(jnp.asarray, arrays), shardings))
        in_specs = (self.specs, self.rest_specs(rest, axes.along_batch), *(each.spec for each in shardings))
        # What is whole on each device afterwards is divided on the way out.
        out_specs = (PartitionSpec(), PartitionSpec() if self.split == "state" else self.specs)
        f = functools.partial(self.on_device, treedef)

        def run(*args: Any) -> Any:  # the mesh is asked for within `automatic`, where it is another one
            return over_devices(f, axes.mesh, in_specs, out_specs, axes.batch)(*args)

        return automatic(run, (placement.whole, placement.params), axes.mesh)(params, rest, *laid)

    def on_device(
        self, treedef: Any, params: PyTree, rest: Rest[Any] | Restructure[Any], *arrays: jax.Array
    ) -> tuple[jax.Array, PyTree]:
        """The same on one device: of its shares of the parameters and of the arrays of a batch."""
        leaves, splits, batch_axes = jtu.tree_leaves(params), self.splits, self.placement.axes.batch
        if self.split != "parameters":
            leaves = list(map(gather, leaves, splits))
            rest = jax.tree.map(gather, rest, self.rest_specs(rest, self.placement.axes.by_hand))
        value_of = functools.partial(self.value, treedef, rest, arrays)
        run = jax.value_and_grad(value_of) if self.pieces == 1 else accumulate(value_of, pieces=self.pieces)
        # A scalar is for all examples, and none of the pieces: `accumulate` would cut it.
        value, gradients = run(leaves, [array if array.ndim else None for array in arrays])
        # Three ways to the same sum. Of split parameters, gradients have been summed where these were gathered, by the
        # transpose of that. Split gradients are summed and divided in one collective here. With a split state alone,
        # each device keeps the whole sum, and XLA takes from it on the way out.
        reduce = scatter if self.split == "gradients" else summed
        done = [()] * len(splits) if self.split == "state" else splits
        gradients = [reduce(each, its, batch_axes) for each, its in zip(gradients, done, strict=True)]
        return jax.lax.psum(value, batch_axes), self.placement.tree(gradients)

    def value(
        self,
        treedef: Any,
        rest: Any,
        arrays: Sequence[jax.Array],
        leaves: list[Any],
        examples: list[Any],
    ) -> jax.Array | float:
        """The share of some examples in the value of the loss, of the arrays of parameters."""
        found = [array if each is None else each for array, each in zip(arrays, examples, strict=True)]
        of_leaves = self._of_shares if self.split == "parameters" else self._of_whole
        value = of_leaves(leaves, rest, jtu.tree_unflatten(treedef, found))
        is_number = is_array(value) and not value.shape and jnp.issubdtype(value.dtype, jnp.floating)
        if not (is_number or isinstance(value, float)):
            raise TypeError(f"the loss must return one real number, the mean over its examples, got {describe(value)}")
        # Divided before it is summed over the devices, so that sums of narrow floats do not overflow.
        axes = self.placement.axes
        return value / axes.devices_along(axes.batch)

    def _of_whole(self, leaves: list[Any], rest: Any, batch: Sequence[Any]) -> Any:
        if self.takes_form:
            return self.loss(self.placement.tree(leaves), rest, *batch)
        rest = released(rest) if isinstance(rest, Restructure) else rest
        return self.loss(put_together(rest, self.placement.form.cut_leaves(leaves)), *batch)

    def _of_shares(self, leaves: list[Any], rest: Restructure[Any], batch: Sequence[Any]) -> Any:
        pairs = zip(leaves, self.placement.specs, strict=True)
        shares = [divided(leaf, spec, self.placement.axes) for leaf, spec in pairs]
        frozen, of_frozen = divided_rest(rest, self.placement.rest_specs(rest), self.placement.axes)
        restructure = ShareRestructure.over(frozen, [split for _, split in shares], of_frozen)
        return self.loss(DeviceShare(self.placement.tree([leaf for leaf, _ in shares])), restructure, *batch)
