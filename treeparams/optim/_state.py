"""The state of a transformation over a model, and what is static in it.

Leaves that were trained together from the start have one *history*: one step count, one state, one run of the
transformation. A leaf that is frozen takes its history with it; thawed later, it has taken fewer steps than the others,
so it goes on with a run of its own. The usual case is one history.
"""

import functools
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
from jaxtyping import PyTree

from .._layout import Layout, trained_at
from .._structure import is_array
from .._text import describe, first_few

Positions = tuple[int, ...]
"""Some parameters of a model, as positions of leaves."""


class Roles:
    """Which parameters have a history, and which of these train: static, without leaves."""

    def __init__(
        self, layout: Layout | None, runs: tuple[Positions, ...] = (), held: tuple[Positions, ...] = ()
    ) -> None:
        self._layout = layout  # of what trains; none where `optax.tree.map_params` asks what a state looks like
        self.runs = runs
        self.held = held

    @property
    def layout(self) -> Layout:
        """What trains."""
        assert self._layout is not None
        return self._layout

    @functools.cached_property
    def layouts(self) -> tuple[Layout, ...]:
        """One for each history of what trains, in which its leaves alone are trained."""
        return tuple(trained_at(self.layout, positions) for positions in self.runs)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Roles):
            return NotImplemented
        if self._layout is None or other._layout is None:
            return self._becomes(other) if self._layout is None else other._becomes(self)
        return self is other or (self._layout, self.runs, self.held) == (other._layout, other.runs, other.held)

    def _becomes(self, other: "Roles") -> bool:
        # `map_params` asks `init` for a pattern, without a model, and returns the state that it maps as one of the
        # pattern's structure. So the pattern takes the roles of the first state it is compared with.
        if len(other.runs) > 1 or other.held:
            raise ValueError(
                f"optax.tree.map_params takes a state with one history, got {other!r}; map each of its runs"
            )
        self._layout, self.runs, self.held = other._layout, other.runs, other.held
        return True

    def __hash__(self) -> int:
        return hash((self._layout, self.runs, self.held))

    def __reduce__(self) -> Any:
        return Roles, (self._layout, self.runs, self.held)

    def __repr__(self) -> str:
        names = "any" if self._layout is None else first_few(self._layout.paths)
        return f"Roles({names}; histories: {len(self.runs)} running, {len(self.held)} held)"


jtu.register_pytree_node(Roles, lambda roles: ((), roles), lambda roles, _: roles)


class TrainableState(NamedTuple):
    """The state of `optim.trainable` and `optim.flat`.

    Attributes:
        roles: what trains; static.
        runs: the states of the transformation, one per history of what trains; in the usual case one, `state.runs[0]`,
            which is what functions of Optax take that read a state.
        held: those of what is frozen now and was trained before.
    """

    roles: Roles
    runs: tuple[Any, ...]
    held: tuple[Any, ...]

    @property
    def layout(self) -> Layout:
        """What trains, and its ties: a `Layout` as all functions of this library take under `trainable`."""
        return self.roles.layout


TrainableState.__module__ = "treeparams.optim"


def settled(state: PyTree) -> PyTree:
    """The state as arrays of fixed dtypes: a weak type, or a Python number, becomes another after the first step."""

    def fix(leaf: Any) -> Any:
        if isinstance(leaf, (bool, int, float, complex)) or (is_array(leaf) and _is_number(leaf)):
            array = jnp.asarray(leaf)
            return jax.lax.convert_element_type(array, array.dtype)
        return leaf

    return jax.tree.map(fix, state)


def steady(new: PyTree, old: PyTree) -> PyTree:
    """The new state in the shapes and dtypes of the old one.

    Raises:
        ValueError: it has others that no cast mends.
    """
    leaves, treedef = jtu.tree_flatten_with_path(old)
    news, new_treedef = jtu.tree_flatten(new)
    if treedef != new_treedef:
        raise ValueError(f"the transformation changed the structure of its state from {treedef} to {new_treedef}")
    return jtu.tree_unflatten(treedef, [_as_before(*each) for each in zip(leaves, news, strict=True)])


def _as_before(old: tuple[Any, Any], new: Any) -> Any:
    path, before = old
    if not (hasattr(before, "dtype") and _is_number(before)):
        return new
    if jnp.shape(new) != before.shape:
        where = jtu.keystr(path)
        raise ValueError(
            f"the transformation changed the shape of its state at {where} from {before.shape} to {jnp.shape(new)}"
        )
    if isinstance(new, jax.Array) and new.dtype == before.dtype and not new.weak_type:
        return new
    return jax.lax.convert_element_type(new, before.dtype)


def _is_number(array: Any) -> bool:
    return not jnp.issubdtype(array.dtype, jax.dtypes.prng_key)


def in_own_buffers(state: PyTree, others: Iterable[Any] = ()) -> PyTree:
    """The state with no array twice, and none of these others, so that it can be donated beside them."""
    taken = {id(other) for other in others}

    def own(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        if id(leaf) in taken:
            leaf = jnp.copy(leaf)
        taken.add(id(leaf))
        return leaf

    return jax.tree.map(own, state)


def is_placeholder(model: Any) -> bool:
    """Whether this is no model but what `optax.tree.map_params` passes in its place."""
    return isinstance(model, _placeholder())


@functools.cache
def _placeholder() -> type:
    seen: list[type] = []

    def init(params: Any) -> Any:
        seen.append(type(params))
        return params

    optax.tree_utils.tree_map_params(init, lambda leaf: leaf, ())
    return seen[0]


def map_hyperparams(f: Callable[[Any], Any], state: PyTree) -> PyTree:
    """The state with `f` applied to each part of it that `optax.inject_hyperparams` made, from the outside in."""

    def visit(node: Any) -> Any:
        if not _has_hyperparams(node):
            return node
        node = f(node)
        return node._replace(inner_state=map_hyperparams(f, node.inner_state))

    return jax.tree.map(visit, state, is_leaf=_has_hyperparams)


def _has_hyperparams(node: Any) -> bool:
    # By what it has: the two classes of Optax that have it are not the only ones.
    return {"hyperparams", "inner_state"} <= set(getattr(node, "_fields", ()))


Transformation = optax.GradientTransformation | optax.MultiSteps
"""What functions of this module take as `tx`."""

if TYPE_CHECKING:  # Optax's own types take arrays, sequences and mappings for parameters, and no Modules

    class _Init(Protocol):
        def __call__(self, params: PyTree) -> TrainableState: ...

    class _Update(Protocol):
        def __call__(
            self, updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
        ) -> tuple[PyTree, TrainableState]: ...

    class ModelTransformation(optax.GradientTransformationExtraArgs):
        """Over whole models."""

        init: _Init  # pyright: ignore[reportIncompatibleVariableOverride] - a field of a NamedTuple, narrowed
        update: _Update  # pyright: ignore[reportIncompatibleVariableOverride]

else:
    ModelTransformation = optax.GradientTransformationExtraArgs


def extended(tx: Any) -> optax.GradientTransformationExtraArgs:
    """A transformation that takes extra arguments.

    Raises:
        TypeError: it is no transformation.
    """
    if isinstance(tx, optax.MultiSteps):
        tx = tx.gradient_transformation()
    if not isinstance(tx, optax.GradientTransformation):
        hint = "; call it with its arguments, as in optax.adam(1e-3)" if callable(tx) else ""
        raise TypeError(f"expected an Optax transformation, got {describe(tx)}{hint}")
    return optax.with_extra_args_support(tx)


def layout_in(state: PyTree) -> Layout | None:
    """What trains, of the first `TrainableState` in a state; `None` where there is none."""
    is_whole = lambda node: isinstance(node, TrainableState)
    return next((node.layout for node in jax.tree.leaves(state, is_leaf=is_whole) if is_whole(node)), None)
