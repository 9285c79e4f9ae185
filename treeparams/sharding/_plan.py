"""plan: where each parameter of a model and each array of the optimiser's state lies on a mesh, and in which form."""

import dataclasses
import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from .._average import Ema
from .._forms.form import Form
from .._forms.restructure import Restructure, halves_of
from .._forms.states import Division
from .._slots.layout import Layout, index_of
from .._slots.parts import Rest, take_apart
from .._tree.text import Printed, describe
from .._tree.types import PyTree
from ..optim._state import ModelTransformation, extended, nodes_of, settled, steady
from ..optim._step import added
from ..optim._updates import MasterState, copies_in, landed, spread, told
from ._placement import Placement
from ._specs import Axes, FormName, Rules, automatic, put_leaf

Average = float | Callable[[Any], Ema[Any]]
"""A decay, or a function that makes the average of parameters."""


@dataclasses.dataclass(frozen=True, eq=False)
class Update:
    """One step of a rule, and of an average if there is one."""

    rule: Any  # plain Optax that takes extra arguments
    form: Form  # of the parameters, while the rule runs
    by_parameter: Callable[[Any], PyTree]  # from factors by `where` to a tree like the form
    make_average: Callable[[PyTree], Ema[Any]] | None = None

    @classmethod
    def of(cls, tx: Any, layout: Layout, form: Form, average: Average | None = None) -> "Update":
        """Makes the update from an Optax optimiser, a form of a model, and the user's option for the average."""
        if isinstance(tx, ModelTransformation):
            raise ValueError(
                "expected an Optax optimiser, got a transformation over whole models; the plan's layout already says "
                "which parameters train: pass the optimiser inside it, such as optax.adam(1e-3)"
            )
        by_parameter = functools.partial(spread, index_of(layout), layout, form)
        return cls(extended(tx), form, by_parameter, None if average is None else _ema_maker(average))

    def start(self, params: PyTree) -> tuple[PyTree, Ema[Any] | None]:
        """Returns the first state of the rule, and the average."""
        state = settled(self.rule.init(params))
        return state, None if self.make_average is None else self.make_average(params)

    def check(self) -> None:
        """Checks, on shapes, that the rule can make a step."""
        params, value = self.form.shapes(), jax.ShapeDtypeStruct((), np.float32)
        try:
            jax.eval_shape(self.step, params, params, jax.eval_shape(self.start, params)[0], value)
        except Exception as error:
            raise ValueError(
                f"the update of the rule fails ({type(error).__name__}). sharding.make_step passes it gradients, "
                "parameters and only one extra argument, value=; for a rule that calls the loss itself (a line "
                "search), use optim.trainable(tx, form='vector')"
            ) from error

    def step(self, params: PyTree, gradients: PyTree, state: PyTree, value: jax.Array) -> tuple[PyTree, PyTree]:
        """Returns the next parameters and state, from gradients in JAX's convention."""
        before = told(state, self.by_parameter)
        updates, after = self.rule.update(jax.tree.map(jnp.conj, gradients), before, params, value=value)
        leaves, treedef = jtu.tree_flatten(params)
        steps = treedef.flatten_up_to(updates)
        moved = list(map(added, map(str, range(len(leaves))), leaves, steps))
        for i, copy in self._copies(after).items():
            moved[i] = moved[i] if steps[i] is None else landed(leaves[i], steps[i], copy, moved[i])
        return treedef.unflatten(moved), steady(told(after, None), state)

    def _copies(self, state: PyTree) -> dict[int, jax.Array]:
        """Returns the wide copy of each array of the parameters that `optim.master` keeps one for."""
        if not nodes_of(MasterState, state):
            return {}
        blocks = {tuple([self.form.paths[slot] for slot in slots]): i for i, slots in enumerate(self.form.members)}
        division = Division.of(self.rule.init, self.form, state)
        return {blocks[owners.paths]: copy for owners, copy in copies_in(state, division)}


def _ema_maker(average: Average) -> Callable[[PyTree], Ema[Any]]:
    """Returns a function that makes an average of parameters."""

    def make(params: PyTree) -> Ema[Any]:
        made = average(params) if callable(average) else Ema(params, average)
        if not isinstance(made, Ema):
            raise TypeError(f"{expected}; it made {describe(made)}")
        return made

    expected = (
        "average must be a decay, such as 0.999, or a function that makes a tp.Ema of parameters, such as "
        "functools.partial(tp.Ema, decay=0.999, warmup=True)"
    )
    is_decay = isinstance(average, (int, float, np.floating)) and not isinstance(average, bool)
    if isinstance(average, type) or not (is_decay or callable(average)):
        raise TypeError(f"{expected}, got {average!r}")
    return make


M = TypeVar("M")
_sharding = operator.attrgetter("sharding")


class Plan(Printed):
    """Where the parameters of a model lie on a mesh, and in which form; made by `sharding.plan`.

    A plan holds shapes and the frozen arrays of the model it was made from. It does not change.

    Attributes:
        layout: the `Layout`, which records which parameters train.
        mesh: the mesh.
        form: `"tree"`, `"vector"` or `"stacks"`.
    """

    layout: Layout
    mesh: Mesh | AbstractMesh
    form: FormName

    def __init__(self, placement: Placement, rest: Rest[Any] | None, notes: tuple[str, ...] = ()) -> None:
        """For internal use. Call `sharding.plan(model, mesh, rules)` instead."""
        self._placement = placement
        self._rest = rest
        self._notes = notes  # lines that are printed last
        self.layout = placement.layout
        self.mesh = placement.axes.mesh
        self.form = placement.name

    # -- Shardings

    @property
    def params(self) -> PyTree:
        """The `NamedSharding` of each array of the parameters, as a tree of the same structure."""
        return self._placement.params

    @property
    def batch(self) -> NamedSharding:
        """The `NamedSharding` of arrays whose leading axis runs over the examples."""
        return self._placement.batch

    @property
    def whole(self) -> NamedSharding:
        """The `NamedSharding` of arrays that are whole on each device."""
        return self._placement.whole

    def state(self, tx: Any) -> PyTree:
        """Returns the `NamedSharding` of each array in an Optax optimiser's state, as a tree like `tx.init(params)`.

        >>> import jax, jax.numpy as jnp, optax
        >>> from treeparams import sharding
        >>> plan = sharding.plan({"w": jnp.ones((8, 3))}, jax.make_mesh((1,), ("data",)), {"**": "split"})
        >>> state = plan.state(optax.adam(1e-3))
        >>> state[0].mu["w"].spec, state[0].count.spec
        (PartitionSpec('data',), PartitionSpec())

        An array that belongs to a parameter and has its shape is sharded as the parameter is. `state` finds these
        arrays by tracing `init` with shapes alone.

        Args:
            tx: an Optax optimiser for parameters in the form of this plan.

        Returns:
            The shardings. An array that belongs to no parameter, or has another shape (a factor of Adafactor), is
            whole on each device; of stacks, rows that devices own are divided whatever their shape.

        Raises:
            ValueError: `tx` is `optim.trainable` or another transformation that accepts whole models; or `tx` does not
                keep its state parameter by parameter, so `state` cannot tell which array belongs to which parameter.
        """
        update = Update.of(tx, self._placement.layout, self._placement.form)
        return jax.tree.map(_sharding, self._placement.made(update.start))[0]

    def average(self, average: Average) -> PyTree:
        """Returns the `NamedSharding` of each array in a `tp.Ema` of the parameters, as a tree of the same structure.

        Args:
            average: the same `average` that you pass to `sharding.make_step`. An `Ema` has static fields, so the tree
                of its shardings has them too.
        """
        return jax.tree.map(_sharding, self._placement.made(_ema_maker(average)))

    def shapes(self) -> PyTree:
        """Returns the parameters as `jax.ShapeDtypeStruct`s with their shardings."""
        return self._placement.shapes()

    # -- Values

    def ravel(self, model: PyTree) -> PyTree:
        """Returns the parameters of a model in the form of this plan, sharded over the mesh.

        Args:
            model: a model with the layout of this plan. It may be traced, or consist of `jax.ShapeDtypeStruct`s.

        Returns:
            The canonical tree, the vector or the stacks, in new buffers.

        Raises:
            ValueError: the model does not fit the layout.
        """
        return self._placement.laid(take_apart(model, self.layout).slots)

    def model(self, params: PyTree, state: Any = None, *, whole: bool = False) -> Any:
        """Returns the model for parameters in the form of this plan.

        Args:
            params: the parameters, or another tree in their form, such as gradients or an average.
            state: the state of the step, which holds the frozen arrays of the model. Without it you get the frozen
                arrays of the model that the plan was made from.
            whole: whether to make each parameter whole on each device, so that you can call the model as usual. An
                explicit mesh is the default of `jax.make_mesh`; JAX indexes and multiplies an array that is split over
                one only if you state the sharding of the result.

        Returns:
            The model, in new buffers. Each array is sharded as `plan.put` shards it, or whole.

        Raises:
            ValueError: the parameters have another form; the state has another layout; or the plan was made from shapes
                and you gave no state.
        """
        if state is not None:
            self._placement.check_state(state)
        rest = self._rest if state is None else state.rest
        if isinstance(rest, Restructure):
            rest = halves_of(rest).released()
        if rest is None or any(isinstance(array, jax.ShapeDtypeStruct) for array in rest.arrays):
            raise ValueError(
                "the plan was made from shapes, so it has no frozen arrays and no functions; pass the state of the "
                "step, which has them: plan.model(params, state)"
            )
        self._placement.check(params)
        slots = self._slots[whole](params)
        # In buffers of its own: a step donates its state.
        specs = [PartitionSpec()] * len(rest.arrays) if whole else None
        return self._placement.put_rest(rest, specs).model(slots)

    @functools.cached_property
    def _slots(self) -> dict[bool, Callable[[PyTree], list[Any]]]:
        """The compiled functions from parameters to slots, sharded as planned (`False`) or whole (`True`)."""
        placement = self._placement
        to = {False: placement.of_slots, True: [placement.whole] * len(self.layout.slots)}
        return {whole: jax.jit(automatic(placement.form.read, each, self.mesh)) for whole, each in to.items()}

    def put(self, model: M) -> M:
        """Places a model on the mesh.

        Args:
            model: a model with the layout of this plan.

        Returns:
            The model in new buffers, with its ties kept. Each parameter, trained or frozen, is sharded along its own
            axes by its rule. Trained parameters of a vector, owned rows, integers, keys and buffers are whole on each
            device. Leaves that are not arrays are unchanged.

        Raises:
            ValueError: the model does not fit the layout.
        """
        parts = take_apart(model, self.layout)
        slots = list(map(put_leaf, parts.slots, self._placement.of_slots))
        return self._placement.put_rest(parts.rest).model(slots)

    # -- In words

    @property
    def replicated(self) -> dict[str, int]:
        """The bytes of each parameter, trained or frozen, that is whole on each device, by path; the largest first."""
        return self._placement.replicated

    def __repr__(self) -> str:
        return str(self)

    def _blocks(self) -> list[Any]:
        return [*self._placement.blocks(), *self._notes]


Plan.__module__ = "treeparams.sharding"


def plan(
    model: PyTree,
    mesh: Mesh | AbstractMesh | None = None,
    rules: Rules | None = None,
    *,
    form: FormName = "tree",
    axis: str | Sequence[str] | None = None,
    batch_axis: str | Sequence[str] | None = None,
) -> Plan:
    """Decides where each parameter of a model lies on a mesh, by rules over paths.

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
        model: a model, a model of `jax.ShapeDtypeStruct`s, or a `Layout`. No values are read.
        mesh: a `jax.sharding.Mesh`, or an `AbstractMesh` to look at a plan. `None` means a mesh of JAX's default device
            alone, with the axis `"data"`.
        rules: a dictionary `{where: rule}`; `None` leaves all parameters whole on each device. Each parameter follows
            the first rule that selects it. A rule for which earlier rules left no parameter is an error. The rules are:

            - `"split"`: splits a leaf over `axis`, along its first dimension that the number of devices divides. A
              vector is padded and split into equal parts.
            - `"owned"`: gives each device whole rows of a stack, as optimisers for matrices need (Muon, Adafactor,
              LAMB). If the devices do not divide the rows, they are split or whole between steps, and go to their
              owners for the update. A leaf that is alone in its stack, or frozen, is split or whole.
            - `"whole"`: keeps the whole parameter on each device.
            - a `PartitionSpec` for the dimensions of the leaf. Mesh axes that are not batch axes are left to XLA
              (tensor parallelism).

            A tied parameter follows the rule of its source. All parts of a vector follow one rule.

            Rules also apply to frozen parameters. Beside a vector, frozen parameters lie as they would in a tree, and
            those that no rule selects are whole. Integers, keys and buffers, such as running statistics, are always
            whole.
        form: the form in which the parameters are kept between steps: `"tree"` (as `tp.partition` returns), `"vector"`
            (`tp.ravel`) or `"stacks"` (`tp.stack`). The keys of stacks are those of `tp.stack`; rows of one shape that
            rules place differently are two stacks, `"float32[4,4] whole"` beside `"float32[4,4] P('data')"`. A vector
            is padded to a multiple of 128. See `Step.to_file` for files that other devices read.
        axis: the mesh axis, or a tuple of mesh axes, that parameters are split over. `None` means `batch_axis`, or the
            only axis of the mesh.
        batch_axis: the mesh axis or axes that the batch is split over. `None` means `axis`.

    Returns:
        The `Plan`.

    Raises:
        ValueError: no rule selects a trained parameter; a parameter cannot be divided as its rule says; an alias has
            another rule than its source; parts of a vector have different rules; `axis` is not an axis of the mesh, or
            is missing although the mesh has several.
        TypeError: `mesh` is not a mesh, or `rules` is not a dictionary.
    """
    # Not the first of `jax.devices()`, which may be another one, and over several processes that of another process.
    here = [*jnp.zeros(()).sharding.device_set]
    axes = Axes.of(Mesh(np.array(here), ("data",)) if mesh is None else mesh, axis, batch_axis)
    rest = None if isinstance(model, Layout) else take_apart(model, None).rest
    layout = model if rest is None else rest.layout
    is_of_shapes = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jtu.tree_leaves(model))
    placement = Placement(layout, axes, {"**": "whole"} if rules is None else rules, form)
    return Plan(placement, rest, (_NO_RULES,) * (rules is None) + (_OF_SHAPES,) * is_of_shapes)


_NO_RULES = 'no rules were given, so all parameters are whole on each device; write {"**": "split"} to divide them'
_OF_SHAPES = "made from shapes, which do not show ties; name them, tp.layout(shapes, ties={alias: path})"


placement_of: Callable[[Plan], Placement] = operator.attrgetter("_placement")
"""Returns the `Placement` of a plan; for other files of this library."""
