"""plan: where each parameter of a model lies on a mesh, in the form in which it rests, and the optimiser's state."""

import functools
import operator
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._forms.mesh import automatic
from .._forms.restructure import Restructure, released
from .._slots.layout import Layout
from .._slots.parts import Rest, kept_arrays, put_together, take_apart
from .._tree.lost_ties import keep_apart
from .._tree.tables import as_html, as_text
from .._tree.types import PyTree
from ._check import check_layout
from ._placement import Placement
from ._processes.patience import Watched
from ._put import put_leaf
from ._specs import AxisNames, FormName, Rules, axes_of
from ._update import Average, Update, ema_maker, sharding_of

M = TypeVar("M")


class Plan:
    """Where the parameters of a model lie on a mesh, and in which form. Made by `sharding.plan`.

    It is static: it holds shapes, and the frozen arrays of the model that it was made of.

    Attributes:
        layout: which parameters train.
        mesh: the mesh.
        form: `"tree"`, `"vector"` or `"stacks"`.
    """

    layout: Layout
    mesh: Mesh | AbstractMesh
    form: FormName

    def __init__(self, placement: Placement, rest: Rest[Any] | None, notes: tuple[str, ...] = ()) -> None:
        """For this library's own use; users write `sharding.plan(model, mesh, rules)`."""
        self._placement = placement
        self._rest = rest
        self._notes = notes  # lines that are printed last
        self.layout = placement.layout
        self.mesh = placement.axes.mesh
        self.form = placement.name

    # -- Shardings

    @property
    def params(self) -> PyTree:
        """The `NamedSharding` of each array of the parameters, a tree like these."""
        return self._placement.params

    @property
    def batch(self) -> NamedSharding:
        """That of arrays with the examples as their leading axis."""
        return self._placement.batch

    @property
    def whole(self) -> NamedSharding:
        """That of arrays that are whole on each device."""
        return self._placement.whole

    def state(self, tx: Any) -> PyTree:
        """The `NamedSharding` of each array in the state of a rule of Optax, a tree like `tx.init(params)`.

        >>> import jax, jax.numpy as jnp, optax
        >>> from treeparams import sharding
        >>> plan = sharding.plan({"w": jnp.ones((8, 3))}, jax.make_mesh((1,), ("data",)), {"**": "split"})
        >>> state = plan.state(optax.adam(1e-3))
        >>> state[0].mu["w"].spec, state[0].count.spec
        (PartitionSpec('data',), PartitionSpec())

        An array that belongs to a parameter lies as the parameter does. Which arrays do is found by asking `init`, for
        shapes alone. If an array has another shape, a second question tells which of its axes grows with which axis of
        the parameter.

        Args:
            tx: a rule of Optax over parameters in the form of this plan.

        Returns:
            The shardings. An array that has no axis in common with one that is split is whole on each device.

        Raises:
            ValueError: `tx` is `optim.trainable` or the like, which takes models; or does not keep its state parameter
                by parameter, so that it cannot be told which array belongs to which.
        """
        return sharding_of(self._placement.made(Update.of(tx, self._placement.layout, self._placement.form).start))[0]

    def average(self, average: Average) -> PyTree:
        """The `NamedSharding` of each array in an average of the parameters, a tree like that `tp.Ema`.

        Args:
            average: as for `sharding.make_step`: an `Ema` has static fields, which the tree of its shardings has too.
        """
        return sharding_of(self._placement.made(ema_maker(average)))

    def shapes(self) -> PyTree:
        """The parameters as `jax.ShapeDtypeStruct`s, with their shardings."""
        return self._placement.shapes()

    # -- Values

    def ravel(self, model: PyTree) -> PyTree:
        """The parameters of a model, in the form of this plan and laid over the mesh.

        Args:
            model: a model of this layout; a traced one, or one of `jax.ShapeDtypeStruct`s, too.

        Returns:
            The canonical tree, the vector or the stacks, in buffers of their own.

        Raises:
            ValueError: the model does not fit the layout.
        """
        return self._placement.laid(take_apart(model, self.layout).slots)

    def model(self, params: PyTree, state: Any = None, *, whole: bool = False) -> Any:
        """The model of parameters in the form of this plan.

        Args:
            params: the parameters, or another tree of their form: gradients, an average.
            state: the state of the step, which has the frozen arrays of the model. Without it they are those of the
                model that the plan was made of.
            whole: whether each parameter is whole on each device, to be called there as any model is. An array that
                is split over an explicit mesh, the default of `jax.make_mesh`, JAX indexes and multiplies only where
                you tell it how the result lies.

        Returns:
            The model, each array where `plan.put` has it, or whole, in a buffer of its own.

        Raises:
            ValueError: the parameters have another form, or the state is of another layout; the plan was made of
                shapes, and there is no state.
        """
        if state is not None:
            check_layout(self._placement, state.layout)
        rest = self._rest if state is None else state.rest
        if isinstance(rest, Restructure):
            rest = released(rest)
        if rest is None or any(isinstance(array, jax.ShapeDtypeStruct) for array in kept_arrays(rest).values()):
            raise ValueError(
                "the plan was made of shapes, so it has no frozen arrays and no functions; give the state of the step, "
                "which has them: plan.model(params, state)"
            )
        self._placement.check(params)
        slots = self._slots[whole](params)
        keep_apart(slots)
        # In buffers of its own: a step donates its state.
        specs = [PartitionSpec()] * len(kept_arrays(rest)) if whole else None
        return put_together(self._placement.put_rest(rest, specs), slots)

    @functools.cached_property
    def _slots(self) -> dict[bool, Callable[[PyTree], list[Any]]]:
        """From parameters to slots that lie as planned, or whole."""
        placement = self._placement
        to = {False: placement.of_slots, True: [placement.whole] * len(self.layout.slots)}
        programs = {whole: jax.jit(automatic(placement.slots_of, each, self.mesh)) for whole, each in to.items()}
        return {whole: Watched(each, "plan.model, call", counts_first=True) for whole, each in programs.items()}

    def put(self, model: M) -> M:
        """The model over the mesh.

        Args:
            model: a model of this layout.

        Returns:
            The model, in buffers of its own, ties kept: each parameter, trained or frozen, as its own rule lays it, as
            far as that is about its own axes. Trained parameters of a vector, rows that are owned, integers, keys and
            buffers are whole on each device. A leaf that is no array is as it is.

        Raises:
            ValueError: the model does not fit the layout.
        """
        parts = take_apart(model, self.layout)
        slots = list(map(put_leaf, parts.slots, self._placement.of_slots))
        keep_apart(slots)
        return put_together(self._placement.put_rest(parts.rest), slots)

    # -- In words

    @property
    def replicated(self) -> dict[str, int]:
        """The parameters, trained or frozen, that are not split, with their bytes on each device; the largest first."""
        return self._placement.replicated

    def __repr__(self) -> str:
        return as_text([*self._placement.blocks(), *self._notes])

    def _repr_html_(self) -> str:
        return as_html([*self._placement.blocks(), *self._notes])


Plan.__module__ = "treeparams.sharding"


def plan(
    model: PyTree,
    mesh: Mesh | AbstractMesh | None = None,
    rules: Rules | None = None,
    *,
    form: FormName = "tree",
    axis: AxisNames = None,
    batch_axis: AxisNames = None,
) -> Plan:
    """Where each parameter of a model lies on a mesh, by rules over paths.

    >>> import jax, jax.numpy as jnp
    >>> from treeparams import sharding
    >>> layers = [{"w": jnp.ones((4, 4)), "b": jnp.ones(3)} for _ in range(2)]
    >>> model = {"embed": jnp.ones((16, 4)), "layers": layers}
    >>> mesh = jax.sharding.AbstractMesh((4,), ("data",))
    >>> sharding.plan(model, mesh, {"layers.*.b": "whole", "**": "split"})
    path        key            lies       bytes per device
    embed       float32[16,4]  P('data')                64
    layers.0.b  float32[3]     whole                    12
    layers.0.w  float32[4,4]   P('data')                16
    layers.1.b  float32[3]     whole                    12
    layers.1.w  float32[4,4]   P('data')                16
    tree over ('data': 4): 408 bytes, 120 on each device
    whole on each device: 2, the largest 'layers.0.b' of 12 bytes

    Args:
        model: a model, one of `jax.ShapeDtypeStruct`s, or a `Layout`. No value is read.
        mesh: a `jax.sharding.Mesh` or, to look at a plan, an `AbstractMesh`; `None`: JAX's default device alone, a mesh
            of one with the axis `"data"`.
        rules: `{where: rule}`; `None`: `{"**": "whole"}`. The first that selects a parameter says how it lies, and one
            that earlier rules left nothing is an error:

            - `"split"`: over `axis`, a leaf along its first axis that can be divided by the number of devices; a vector
              in equal parts (it is padded);
            - `"owned"`: whole rows of a stack on each device, as rules for matrices need (Muon, Adafactor, LAMB);
            - `"whole"`: on each device;
            - a `PartitionSpec` over the axes of the leaf. Axes of the mesh other than those of the batch are left to
              XLA (tensor parallelism).

            A tie lies as its source does. Vectors lie by one rule.

            Rules are for frozen parameters too. Beside a vector these lie as in a tree, and one that no rule selects is
            whole. Integers, keys and buffers, such as running statistics, are whole whatever rules say.
        form: in which form the parameters rest: `"tree"` (as `tp.partition`), `"vector"` (`tp.ravel`) or `"stacks"`
            (`tp.stack`). Stacks that lie in different ways are in groups named after their rules, `{"owned": {key:
            array}, "whole": {...}}`. The form does not depend on how many devices there are (a vector is padded to a
            multiple of 128), so that others can read a file that some have saved.
        axis: the axis of the mesh, or several as a tuple, over which is split; `None`: the only one, or `batch_axis`.
        batch_axis: along which the batch lies; `None`: `axis`.

    Returns:
        The `Plan`.

    Raises:
        ValueError: a trained parameter is matched by no rule; any parameter cannot be divided as its rule says; an
            alias has another rule than its source; parts of a vector have different rules; `axis` is no axis of the
            mesh or must be given.
        TypeError: `mesh` is no mesh, `rules` no dictionary.
    """
    axes = axes_of(_this_device() if mesh is None else mesh, axis, batch_axis)
    rest = None if isinstance(model, Layout) else take_apart(model, None).rest
    layout = model if rest is None else rest.layout
    is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves(model))
    placement = Placement(layout, axes, {"**": "whole"} if rules is None else rules, form)
    return Plan(placement, rest, (_OF_SHAPES,) * is_of_shapes)


_OF_SHAPES = "made of shapes, which do not tell which arrays are one: name ties, tp.layout(shapes, ties={alias: path})"


def _this_device() -> Mesh:
    """A mesh of the device on which JAX puts arrays if nothing else is said."""
    # Not the first of `jax.devices()`, which may be another one, and over several processes that of another process.
    return Mesh(np.array([*jnp.zeros(()).sharding.device_set]), ("data",))


placement_of: Callable[[Plan], Placement] = operator.attrgetter("_placement")
"""For the other files of this library."""
