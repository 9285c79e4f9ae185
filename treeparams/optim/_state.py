"""The state of a transformation over a model.

Leaves that were trained together from the start have one *history*: one step count, one state of the rule. A leaf that
is frozen takes its history with it; thawed later, it has taken fewer steps than the others, so it goes on with a
history of its own. The usual case is one.
"""

import dataclasses
import functools
import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jax.core import Tracer

from .._forms.owners import Division
from .._slots.layout import Layout, index_of
from .._tree.static_keys import contents
from .._tree.structure import is_array
from .._tree.text import describe, first_few
from .._tree.types import PyTree

T = TypeVar("T")

ONE = (
    "one transformation over models stands outermost, and all within it is plain Optax: write one optim.trainable, "
    "optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(1e-3)))"
)

Plain = optax.GradientTransformation | optax.MultiSteps
"""A rule of Optax."""


@dataclasses.dataclass(frozen=True)
class Roles:
    """Which parameters each history is of, as positions of leaves; static."""

    layout: Layout  # of the parameters that train
    running: tuple[tuple[int, ...], ...]  # the parameters of each history that trains
    held: tuple[tuple[int, ...], ...]  # of each that waits
    origins: tuple[int, ...]  # of all: the number of the history that it was split from
    divisions: tuple[Division, ...]  # of all: the parameters that each array of the state is of


contents[Roles] = lambda roles: [roles.layout]


@dataclasses.dataclass(frozen=True, repr=False)
class TrainableState:
    """The state of `optim.trainable`, `optim.flat` and `optim.stacked`, a pytree.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> optim.trainable(optax.adam(1e-3)).init({"a": jnp.ones(2), "b": jnp.ones(2)})
    TrainableState
      trains, 0 steps taken: a, b

    Attributes:
        runs: the states of the rule, one per history that trains; in the usual case one, `state.runs[0]`, which is
            plain Optax: pass it to functions of Optax that read or map a state (`optax.tree_utils`).
        held: the states of the histories that are frozen now and were trained before.
        counts: how many steps each history has taken, those of `runs` and then of `held`; int32.
        roles: which parameters each history is of; static.
    """

    runs: Any  # tuples; of a state that was mapped over, anything
    held: Any
    counts: Any
    roles: Roles

    @property
    def layout(self) -> Layout:
        """The parameters that train, and their ties: you may pass it to any function that takes `trainable`."""
        return self.roles.layout

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
    if isinstance(count, Tracer) or getattr(count, "shape", None) != ():
        return f"{describe(count) if is_array(count) else count} steps"
    return "1 step" if count == 1 else f"{int(count):,} steps"


TrainableState.__module__ = "treeparams.optim"
jtu.register_dataclass(TrainableState, ["runs", "held", "counts"], ["roles"])


def nodes_of(cls: type[T], tree: PyTree) -> list[T]:
    """The nodes of a class in a tree."""
    return [node for node in jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, cls)) if isinstance(node, cls)]


def extended(tx: object) -> optax.GradientTransformationExtraArgs:
    """A transformation that takes extra arguments."""
    if isinstance(tx, optax.MultiSteps):  # its own `gradient_transformation` takes no extra arguments
        return optax.GradientTransformationExtraArgs(cast(Any, tx.init), cast(Any, tx.update))
    if not isinstance(tx, optax.GradientTransformation):
        hint = "; call it with its arguments, as in optax.adam(1e-3)" if callable(tx) else ""
        raise TypeError(f"expected an Optax transformation, got {describe(tx)}{hint}")
    return optax.with_extra_args_support(tx)


def in_own_buffers(state: PyTree, others: Iterable[Any] = ()) -> PyTree:
    """The state with no array twice, and none of these others, so that it can be donated beside them."""
    taken = {id(other) for other in others}

    def own(leaf: Any) -> Any:
        leaf = jnp.copy(leaf) if isinstance(leaf, jax.Array) and id(leaf) in taken else leaf
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


class ModelTransformation(optax.GradientTransformationExtraArgs):
    """An Optax transformation over whole models, as `optim.trainable`, `flat` and `stacked` return it."""

    # Optax's own types take arrays, sequences and mappings for parameters, and no Modules.
    init: Callable[[PyTree], TrainableState]  # pyright: ignore[reportIncompatibleVariableOverride]
    update: Callable[..., tuple[PyTree, TrainableState]]  # pyright: ignore[reportIncompatibleVariableOverride]

    def __new__(
        cls, init: Callable[[PyTree], TrainableState], update: Callable[..., tuple[PyTree, TrainableState]]
    ) -> "ModelTransformation":
        """For this library's own use; users write `optim.trainable(tx)`."""
        return super().__new__(cls, cast(Any, init), cast(Any, update))

    def __repr__(self) -> str:
        return repr(rule_of(self))


ModelTransformation.__module__ = "treeparams.optim"


def rule_of(tx: object) -> Any:
    """The `Rule` whose methods a transformation over models is."""
    if isinstance(tx, ModelTransformation):
        return getattr(tx.init, "__self__")  # noqa: B009 - no attribute of the protocol
    expected = f"expected optim.trainable(...), optim.flat(...) or optim.stacked(...), got {describe(tx)}"
    if isinstance(tx, optax.GradientTransformation):
        hint = "Put the whole chain into optim.trainable; of a wrapper around it, pass what is wrapped"
        raise TypeError(f"{expected}, plain Optax, which knows no model. {hint}")
    raise TypeError(f"{expected}; the transformation is first")


def model_state(state: PyTree) -> TrainableState:
    """The state of the one transformation over models in it."""
    states = nodes_of(TrainableState, state)
    if len(states) != 1:
        raise ValueError(
            f"expected the state of one transformation over models, tx.init(model), got {len(states)}; {ONE}"
        )
    return states[0]


def map_injected(f: Callable[[Any, Any], Any], state: PyTree, above: tuple[Any, ...] = ()) -> PyTree:
    """The state with `f(path, node)` at each node that `optax.inject_hyperparams` made, from the outside in."""
    return jtu.tree_map_with_path(functools.partial(_visit_injected, f, above), state, is_leaf=_is_injected)


def _visit_injected(f: Callable[[Any, Any], Any], above: tuple[Any, ...], path: tuple[Any, ...], node: Any) -> Any:
    if not _is_injected(node):
        return node
    node = f((*above, *path), node)
    return node._replace(inner_state=map_injected(f, node.inner_state, (*above, *path)))


def _is_injected(node: object) -> bool:
    # By its fields: the two classes of Optax that have them are not the only ones.
    return {"hyperparams", "inner_state"} <= set(getattr(node, "_fields", ()))


def rates_in(state: PyTree) -> list[dict[str, Any]]:
    """The hyperparameters of each such node that no schedule sets."""
    found: list[dict[str, Any]] = []
    map_injected(lambda _, node: found.append(free_rates(node)) or node, state)
    return found


def free_rates(node: Any) -> dict[str, Any]:
    """The hyperparameters of such a node that no schedule sets."""
    scheduled = getattr(node, "hyperparams_states", {})
    return {name: value for name, value in node.hyperparams.items() if name not in scheduled}


# -- The dtypes of a state ---------------------------------------------------------------------------------------------


def settled(state: PyTree) -> PyTree:
    """The state as arrays of fixed dtypes: a weak type, or a Python number, becomes another after the first step."""
    return jax.tree.map(_settled_leaf, state)


def _settled_leaf(leaf: Any) -> Any:
    if not (isinstance(leaf, (bool, int, float, complex)) or _is_numbers(leaf)):
        return leaf
    array = jnp.asarray(leaf)
    return jax.lax.convert_element_type(array, array.dtype)


def steady(new: PyTree, old: PyTree) -> PyTree:
    """The new state in the dtypes of the old one, whose structure and shapes it must have."""
    news, new_treedef = jtu.tree_flatten(new)
    leaves, treedef = jtu.tree_flatten(old)
    if treedef != new_treedef:
        raise ValueError(f"the transformation changed the structure of its state from {treedef} to {new_treedef}")
    kind = operator.attrgetter("shape", "dtype", "weak_type")
    try:
        if list(map(kind, news)) == list(map(kind, leaves)):
            return new
    except AttributeError:  # not all are arrays
        pass
    for i, (leaf, before) in enumerate(zip(news, leaves, strict=True)):
        if not _is_numbers(before):
            continue
        if jnp.shape(leaf) != before.shape:
            where = jtu.keystr(jtu.tree_flatten_with_path(old)[0][i][0])
            got = f"from {before.shape} to {jnp.shape(leaf)}"
            raise ValueError(f"the transformation changed the shape of its state at {where} {got}")
        news[i] = jax.lax.convert_element_type(leaf, before.dtype)
    return jtu.tree_unflatten(treedef, news)


def _is_numbers(leaf: Any) -> bool:
    return is_array(leaf) and not jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
