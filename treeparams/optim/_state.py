"""The state of a transformation over a model.

Parameters that trained together from the start have one *history*: one step count, one state of the rule. A frozen
parameter keeps its history; thawed later, it has taken fewer steps than the others, so it goes on with a separate
history. The usual case is one.
"""

import contextlib
import dataclasses
import functools
import itertools
import operator
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.core import Tracer
from jaxtyping import Array, Float, Int

from .._forms.states import Copies, Division, Entries, entries_of
from .._slots.layout import Layout, index_of, trained_at
from .._tree.static_keys import contents
from .._tree.structure import is_array
from .._tree.text import describe, first_few, function_name, warn
from .._tree.types import PyTree, is_key

T = TypeVar("T")

ONE = (
    "use one transformation over models, outermost, with plain Optax inside it: write one optim.trainable, "
    "optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(1e-3)))"
)

Plain = optax.GradientTransformation | optax.MultiSteps
"""A rule of Optax."""
Extended = optax.GradientTransformationExtraArgs
"""A rule of Optax, as `extended` returns it."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """The parameters of each history, as positions of leaves; static."""

    layout: Layout  # of the parameters that train
    running: tuple[tuple[int, ...], ...]  # the parameters of each history that trains
    held: tuple[tuple[int, ...], ...]  # of each that waits
    divisions: tuple[Division, ...]  # of all: the parameters that each array of the state is of


contents[Roles] = lambda roles: [roles.layout]


class ClipState(NamedTuple):
    """The state of `optim.clip_by_global_norm`, with fields that you can plot.

    Attributes:
        norm: the global norm in the last call, before clipping; float32, or float64 for a float64 model.
        clipped: the number of calls in which it was finite and above the limit.
        nonfinite: the number of calls in which it was infinite or NaN.
    """

    norm: Float[Array, ""]
    clipped: Int[Array, ""]
    nonfinite: Int[Array, ""]


ClipState.__module__ = "treeparams.types"


@dataclasses.dataclass(frozen=True, repr=False)
class TrainableState:
    """The state of `optim.trainable`, a pytree.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> optim.trainable(optax.adam(1e-3)).init({"a": jnp.ones(2), "b": jnp.ones(2)})
    TrainableState
      trains, 0 steps taken: a, b

    Attributes:
        runs: the states of the inner optimiser, one per history that trains. Usually there is one, `state.runs[0]`. It
            is plain Optax: pass it to functions of Optax that read or map a state (`optax.tree_utils`).
        held: the states of the histories that are frozen now and were trained before.
        counts: how many steps each history has taken, those of `runs` and then of `held`; int32.
        roles: the parameters of each history; static.
        still: for each parameter with fewer bits than float32, how many nonzero steps have left it as it was since it
            last moved; int32. Negative once a warning has named it. `()` if no such parameter trains without a copy
            that `optim.master` keeps.
    """

    runs: Any  # tuples; of a state that was mapped over, anything
    held: Any
    counts: Any
    roles: Roles
    still: Any = ()
    seen: int = dataclasses.field(default=0, init=False, compare=False)  # steps outside of a trace that led here

    @property
    def layout(self) -> Layout:
        """The parameters that train, and their ties: you may pass it to any function with an argument `trainable`."""
        return self.roles.layout

    @property
    def stuck(self) -> str:
        """The parameters that three nonzero steps or more have left as they were, in words; empty if unknown or none.

        >>> import jax.numpy as jnp, optax
        >>> from treeparams import optim
        >>> model, grads = {"k": jnp.ones(2, jnp.bfloat16)}, {"k": jnp.ones(2)}
        >>> tx = optim.trainable(optax.sgd(1e-4))
        >>> state = tx.init(model)
        >>> for _ in range(4):  # 1 - 0.0001 rounds to 1
        ...     model, state = optim.step(tx, grads, state, model)
        >>> state.stuck
        '1 of 1 leaves stuck for 4 steps: k (bfloat16)'
        """
        if not isinstance(self.still, (jax.Array, np.ndarray)) or isinstance(self.still, Tracer):
            return ""
        index = index_of(self.layout)
        counts = np.abs(self.still).reshape(-1, len(index.narrow)).max(0)  # the most among the members of an ensemble
        of_slots = {slot: int(counts[index.narrow[index.positions[slot]]]) for slot in index.narrow_slots}
        found = {index.slots[slot]: count for slot, count in of_slots.items() if count >= _LEAST}
        if not found:
            return ""
        paths, dtypes = [slot.path or repr("") for slot in found], dict.fromkeys(str(slot.dtype) for slot in found)
        steps = " to ".join(map(str, sorted({min(found.values()), max(found.values())})))
        where = f"{first_few(paths)} ({first_few(list(dtypes))})"
        return f"{len(found)} of {len(index.slots)} leaves stuck for {steps} steps: {where}"

    @property
    def hyperparams(self) -> dict[str, Any]:
        """The hyperparameters that `optax.inject_hyperparams` keeps, of the history that trains; a `dict`.

        >>> import jax.numpy as jnp, optax
        >>> from treeparams import optim
        >>> tx = optim.trainable(optax.inject_hyperparams(optax.sgd)(learning_rate=0.1))
        >>> tx.init({"a": jnp.ones(2)}).hyperparams["learning_rate"]
        Array(0.1, dtype=float32)

        To change them, write `optim.adjust`. All histories share them, but for those inside `optim.per_leaf`, which
        each row has: if several histories train there, or several nodes have one name, as in groups, read
        `state.runs`, or `optax.tree.get(state.runs[0], "learning_rate")`.
        """
        if len(self.runs) > 1 and "hyperparams" in self.roles.divisions[0].names:
            its = [first_few(trained_at(self.layout, leaves).paths) for leaves in self.roles.running]
            raise ValueError(f"several histories train, each with hyperparameters in state.runs: {'; '.join(its)}")
        nodes: list[dict[str, Any]] = []
        map_injected(lambda _, node: nodes.append(node.hyperparams) or node, self.runs[:1])
        names = [name for node in nodes for name in node]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise ValueError(f"several nodes have {twice}; read them in state.runs[0]")
        return {name: value for node in nodes for name, value in node.items()}

    @property
    def clip(self) -> ClipState:
        """The state of `optim.clip_by_global_norm`: its last norm, and how often it clipped; a `ClipState`.

        >>> import jax.numpy as jnp, optax
        >>> from treeparams import optim
        >>> model, grads = {"a": jnp.zeros(2)}, {"a": jnp.array([3.0, 4.0])}
        >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(0.1)))
        >>> model, state = optim.step(tx, grads, tx.init(model), model)
        >>> state.clip.norm
        Array(5., dtype=float32)

        Of several histories it is that of the oldest one that trains now, in its last call with gradients; of several
        clips, as in groups, the first.
        """
        found = nodes_of(ClipState, (self.runs, self.held))
        if not found:
            raise ValueError("no clip here keeps its norm: put optim.clip_by_global_norm(max_norm) into the chain")
        return found[0]

    def summary_notes(self) -> dict[str, str]:
        """Returns lines for `tp.summary`, by their first words."""
        return {"stuck": self.stuck} if self.stuck else {}

    def __repr__(self) -> str:
        paths = index_of(self.layout).structure.paths
        words = ["trains"] * len(self.roles.running) + ["waits"] * len(self.roles.held)
        counts = itertools.chain(jax.tree.leaves(self.counts), itertools.repeat("unknown"))
        lines = [
            f"  {word}, {_in_words(count)} taken: {first_few([paths[leaf] or repr('') for leaf in leaves])}"
            for word, leaves, count in zip(words, (*self.roles.running, *self.roles.held), counts, strict=False)
        ]
        return "\n".join(["TrainableState", *(lines or ["  nothing trains"])])


def _in_words(count: Any) -> str:
    if isinstance(count, (Tracer, jax.ShapeDtypeStruct)) or getattr(count, "shape", None) != ():
        return f"{describe(count) if is_array(count) else count} steps"
    return "1 step" if count == 1 else f"{int(count):,} steps"


TrainableState.__module__ = "treeparams.types"
jtu.register_dataclass(TrainableState, ["runs", "held", "counts", "still"], ["roles"])
_LEAST = 3  # lost steps, from which on a parameter is stuck


def noticed(tree: PyTree) -> PyTree:
    """Warns of stuck parameters where their counts are known, and returns the states in a tree with a note of that.

    The note is the sign of the counts, so a parameter is named once, until it has moved again.
    """
    leaves, treedef = jtu.tree_flatten(tree, is_leaf=TrainableState.__instancecheck__)
    for i, state in enumerate(leaves):  # no function of JAX calls what warns
        if isinstance(state, TrainableState) and state.stuck:
            unsaid = dataclasses.replace(state, still=np.maximum(state.still, 0)).stuck
            still = jnp.where(state.still >= _LEAST, -state.still, state.still)
            leaves[i] = dataclasses.replace(state, still=still) if unsaid else state
            if unsaid:
                warn(
                    f"{unsaid}. A step below half the spacing between neighbouring numbers rounds to zero. To train "
                    "them, keep copies, optim.trainable(optim.master(tx)), or make the parameters float32"
                )
    return jtu.tree_unflatten(treedef, leaves)


def nodes_of(cls: type[T], tree: PyTree) -> list[T]:
    """Returns the nodes of a class in a tree."""
    return [node for node in jax.tree.leaves(tree, is_leaf=cls.__instancecheck__) if isinstance(node, cls)]


def extended(tx: object) -> Extended:
    """Returns the transformation as one that accepts extra arguments."""
    if isinstance(tx, optax.MultiSteps):  # its own `gradient_transformation` takes no extra arguments
        return optax.GradientTransformationExtraArgs(cast(Any, tx.init), cast(Any, tx.update))
    if not isinstance(tx, optax.GradientTransformation):
        name = function_name(tx) if isinstance(tx, (type, types.FunctionType)) else describe(tx)
        hint = "call it with its arguments" if name != describe(tx) else "it comes first"
        raise TypeError(f"expected an Optax transformation, got {name}; {hint}, as in optax.adam(1e-3)")
    return optax.with_extra_args_support(tx)


def in_own_buffers(state: PyTree, others: Iterable[Any] = ()) -> PyTree:
    """Returns the state with no array twice, and none of these others, so that you can donate it beside them."""
    taken = {id(other) for other in others}
    leaves, treedef = jtu.tree_flatten(state)
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, jax.Array) and id(leaf) in taken:
            leaves[i] = jnp.copy(leaf)
        taken.add(id(leaves[i]))
    return jtu.tree_unflatten(treedef, leaves)


class ModelTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation over whole models, as `optim.trainable` return it."""

    # Optax's own types take arrays, sequences and mappings for parameters, and no Modules.
    init: Callable[[PyTree], TrainableState]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Callable[..., tuple[PyTree, TrainableState]]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __repr__(self) -> str:
        rule = rule_of(self)
        # Rules of Optax have no names, but the name of their `init` contains the function that made them.
        inner = getattr(rule.tx.init, "__qualname__", type(rule.tx).__name__).partition(".")[0]
        form = None if rule.form == "tree" else rule.form
        options = {"trainable": rule.trainable, "form": form, "missing": rule.missing}
        said = [inner, *(f"{name}={value!r}" for name, value in options.items() if value is not None)]
        return f"optim.trainable({', '.join(said)})"


ModelTransformation.__module__ = "treeparams.types"


def rule_of(tx: object) -> Any:
    """Returns the `Rule` whose methods a transformation over models consists of."""
    if isinstance(tx, ModelTransformation):
        return getattr(tx.init, "__self__")  # noqa: B009 - no attribute of the protocol
    hint = "the transformation is the first argument"
    if isinstance(tx, optax.GradientTransformation):
        hint = "put the whole chain into optim.trainable, or pass the transformation inside a wrapper"
    raise TypeError(f"expected optim.trainable(...), got {describe(tx)}; {hint}")


def model_state(state: PyTree) -> TrainableState:
    """Returns the state of the one transformation over models in a state."""
    states = nodes_of(TrainableState, state)
    if len(states) != 1:
        raise ValueError(f"expected the state of one transformation over models, got {len(states)}; {ONE}")
    return states[0]


def map_injected(f: Callable[[Any, Any], Any], state: PyTree, above: tuple[Any, ...] = ()) -> PyTree:
    """Returns the state with `f(path, node)` at each node of `optax.inject_hyperparams`, from the outside in."""

    def visit(path: tuple[Any, ...], node: Any) -> Any:
        if not _is_injected(node):
            return node
        node = f((*above, *path), node)
        return node._replace(inner_state=map_injected(f, node.inner_state, (*above, *path)))

    return jtu.tree_map_with_path(visit, state, is_leaf=_is_injected)


def _is_injected(node: object) -> bool:
    # By its fields: the two classes of Optax that have them are not the only ones.
    return {"hyperparams", "inner_state"} <= set(getattr(node, "_fields", ()))


# -- The dtypes of a state ---------------------------------------------------------------------------------------------


def settled(state: PyTree) -> PyTree:
    """Returns the state as arrays of fixed dtypes: weak types and Python numbers would change after the first step."""
    return jax.tree.map(_settled_leaf, state)


def _settled_leaf(leaf: Any) -> Any:
    if not (isinstance(leaf, (bool, int, float, complex)) or _is_numbers(leaf)):
        return leaf
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)


def steady(new: PyTree, old: PyTree) -> PyTree:
    """Returns the new state in the dtypes of the old one, whose structure and shapes it must have."""
    news, new_treedef = jtu.tree_flatten(new)
    leaves, treedef = jtu.tree_flatten(old)
    if treedef != new_treedef:
        raise ValueError(f"the transformation changed the structure of its state from {treedef} to {new_treedef}")
    kind = operator.attrgetter("shape", "dtype", "weak_type")
    with contextlib.suppress(AttributeError):  # where not all are arrays
        if list(map(kind, news)) == list(map(kind, leaves)):
            return new
    for i, (leaf, before) in enumerate(zip(news, leaves, strict=True)):
        if _is_numbers(before):
            if jnp.shape(leaf) != before.shape:
                where = jtu.keystr(jtu.tree_flatten_with_path(old)[0][i][0])
                raise ValueError(f"the transformation changed the shape of its state at {where}: {before.shape}")
            news[i] = jax.lax.convert_element_type(leaf, before.dtype)
    return jtu.tree_unflatten(treedef, news)


def _is_numbers(leaf: Any) -> bool:
    return is_array(leaf) and not is_key(leaf)


# -- Histories ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, eq=False)
class History:
    """A state of the rule, the layout of its parameters, and the steps it has taken."""

    layout: Layout
    state: PyTree
    division: Division
    count: Any = None

    @functools.cached_property
    def copies(self) -> Copies:
        """The arrays of the state, and the parameters of each."""
        return Copies(entries_of(self.state), self.division)

    def holding(self, arrays: Mapping[Entries, Any]) -> "History":
        """Returns the history with these arrays in place of its own."""
        if not arrays:
            return self
        leaves = [arrays.get(entries, leaf) for entries, leaf in self.copies.arrays.items()]
        return dataclasses.replace(self, state=jtu.tree_unflatten(jtu.tree_structure(self.state), leaves))

    def made_of(self, histories: "Sequence[History]") -> PyTree:
        """Returns the state for these parameters: their pieces of other histories, and the shared arrays of the first.

        Raises:
            ValueError: the rule does not keep its state leaf by leaf, or another rule made it.
        """
        treedef, first = jtu.tree_structure(self.state), histories[0]
        if first.layout == self.layout and jtu.tree_structure(first.state) == treedef:
            return first.state
        History.check_no_memory(histories)
        return jtu.tree_unflatten(treedef, self.copies.regrouped([each.copies for each in histories]))

    @staticmethod
    def of_run(histories: "Sequence[History]") -> frozenset[Entries]:
        """Returns the shared arrays that no parameter's step count decides, by their entries.

        Such as the state of a schedule, a plateau or a rate: the node that holds them holds no array of any parameter.
        """
        owned = [owners for each in histories for owners in each.division.owners if owners is not None]
        nodes = {owners.place[0][:-1] for owners in owned}
        shared = frozenset[Entries]().union(*[each.copies.common for each in histories])
        return frozenset([entries for entries in shared if entries[:-1] not in nodes])

    @staticmethod
    def check_no_memory(histories: "Sequence[History]") -> None:
        """Refuses L-BFGS, which couples leaves."""
        if nodes_of(optax.ScaleByLBFGSState, [each.state for each in histories]):
            raise ValueError(
                "L-BFGS remembers steps of all trained leaves together: give all of them gradients, tp.project(model, "
                'grads, missing="zeros"), or begin anew, optim.set_trainable(..., reset=True)'
            )


def state_of(layout: Layout, running: Sequence[History], held: Sequence[History], still: Any) -> TrainableState:
    """Returns the state of these histories."""
    sides, both = (running, held), (*running, *held)
    trains, waits = (tuple([index_of(each.layout).positions for each in side]) for side in sides)
    runs, kept = (tuple([each.state for each in side]) for side in sides)
    roles = Roles(layout, trains, waits, tuple([each.division for each in both]))
    return TrainableState(runs, kept, tuple([each.count for each in both]), roles, still)
