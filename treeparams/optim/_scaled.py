"""scaled, clip_by_global_norm: plain Optax that multiplies updates by numbers."""

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.typing import ArrayLike
from jaxtyping import Array

from .._forms.block import Block
from .._forms.form import Form
from .._slots.index import Index, first_entries
from .._slots.layout import Layout, index_of
from .._slots.where import Where, name_of
from .._tree.structure import is_array, structure_of
from .._tree.text import describe
from .._tree.types import PyTree, common_dtype
from .._walk import global_norm
from ._groups import Keys, are_stacks, check_groups, entries_of
from ._state import ClipState, nodes_of

Factors = Mapping[Where, ArrayLike]
ByParameter = Callable[[Factors], PyTree]
"""From `{where: number}` to a tree like the one a rule sees: a number for each array, or an array that broadcasts."""


@dataclasses.dataclass(frozen=True)
class ScaledState:
    """The state of `optim.scaled`, a pytree without arrays.

    Attributes:
        keys: the keys of the factors; static.
    """

    keys: Keys


ScaledState.__module__ = "treeparams.types"
jtu.register_dataclass(ScaledState, [], ["keys"])


def told(state: PyTree, by_parameter: ByParameter | None) -> PyTree:
    """Returns the state of a rule in which `optim.scaled` reads its factors this way in one update; `None`: by path.

    A rule over a vector or stacks sees no names, so its state brings a function that reads the factors. An extra
    argument would not arrive everywhere: some wrappers of Optax pass none on, and its line searches give them to the
    loss.
    """
    is_scaled = lambda node: isinstance(node, ScaledState)
    tell = lambda node: ScaledState(Keys(node.keys.wheres, by_parameter)) if is_scaled(node) else node
    return jax.tree.map(tell, state, is_leaf=is_scaled) if nodes_of(ScaledState, state) else state


def spread(index: Index, layout: Layout, form: Form, given: Factors) -> PyTree:
    """Returns the number of each parameter of a layout, 1 by default, in arrays that broadcast against a form.

    The index is that of the whole model.
    """
    numbers: list[Any] = [*given.values(), 1.0]
    found = first_entries(index, [*given], asked=())  # `init` has checked that each is of use
    return form.spread([numbers[found.get(leaf, -1)] for leaf in index_of(layout).positions])


def scaled(factors: Factors) -> optax.GradientTransformationExtraArgs:
    """Multiplies the updates of each parameter by a number; the first entry that selects a parameter gives it.

    >>> import equinox as eqx, jax, jax.numpy as jnp, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, 1, 4, 2, key=jax.random.key(0))
    >>> decay = {"layers.2": 1.0, "layers.1": 0.5, "layers.0": 0.25}
    >>> tx = optim.trainable(optax.chain(optax.sgd(0.1), optim.scaled(decay)))
    >>> grads = tp.maptrainable(jnp.ones_like, mlp)
    >>> updates, state = tx.update(grads, tx.init(mlp), mlp)
    >>> print([f"{layer.bias[0]:.3f}" for layer in updates.layers])
    ['-0.025', '-0.050', '-0.100']

    After an optimiser such as Adam, a factor scales its learning rate, and its weight decay if it has one. Use it for
    **layer-wise learning-rate decay** (discriminative fine-tuning, ULMFiT, arXiv:1801.06146; BEiT, arXiv:2106.08254),
    for the **rates by width of muP** (Yang et al., arXiv:2203.03466; with Adam `1 / m` for the weights of hidden and
    output layers, in a net that is `m` times as wide as the one that was tuned), or for a slower encoder, `{"encoder":
    0.1}`. Before an optimiser, a factor scales the gradient, which Adam nearly undoes.

    You may give as many factors as you like: 48 groups over 769 leaves take five times as long to trace as 48 factors.
    Use groups for different optimisers or schedules. `optim.scaled` works anywhere inside `optim.trainable` and
    `optim.groups`; beside `optim.per_leaf`, not in it. In plain Optax it uses the paths of the tree that it receives.

    Args:
        factors: `{where: number}`, with any hashable `where` of `tp.layout`. A number may be a traced scalar, so one
            program serves a sweep by `jax.vmap`, and a hyperparameter: `optax.inject_hyperparams(lambda slow:
            optax.chain(optax.adam(1e-3), optim.scaled({"encoder": slow})))(slow=0.1)`. Parameters that no entry selects
            have 1.

    Returns:
        A transformation with a `ScaledState`. Each update keeps its dtype; the product is computed in at least single
        precision. A tied parameter has the factor of its source.

    Raises:
        ValueError: a factor is not a scalar; `init` of `optim.trainable` and the like, or `update` in plain Optax: an
            entry selects nothing, or only parameters that earlier entries select, or only one place of an array that is
            at several.
        TypeError: not a dictionary of numbers; a factor is a schedule.
    """
    if not isinstance(factors, Mapping):
        raise TypeError(f"expected a dictionary {{where: factor}}, got {describe(factors)}")
    for where, factor in factors.items():
        _check_factor(name_of(where), factor)
    rule = _Scaled(dict(factors))
    return optax.GradientTransformationExtraArgs(rule.init, rule.update)


def _check_factor(name: str, factor: Any) -> None:
    if callable(factor):
        raise TypeError(
            f"the factor of {name} must be a number, got a function; for a schedule write "
            f"optim.groups({{{name}: optax.scale_by_schedule(schedule)}}, default=optax.identity())"
        )
    if not (is_array(factor) or isinstance(factor, (int, float, np.number))) or not _is_real(jnp.result_type(factor)):
        raise TypeError(f"the factor of {name} must be a real number, got {describe(factor)}")
    if jnp.shape(factor):
        raise ValueError(f"the factor of {name} must be one number, got {describe(factor)}; write an entry for each")


def _is_real(dtype: Any) -> bool:
    return any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer))


@dataclasses.dataclass(frozen=True, eq=False)
class _Scaled:
    """The factors of a transformation."""

    factors: Factors

    def init(self, params: PyTree) -> Any:
        """Returns the keys, which are checked later, in the whole model."""
        return ScaledState(Keys([*self.factors]))

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **_: object) -> tuple[PyTree, Any]:
        """Returns the updates, each times its factor."""
        by_parameter = state.keys.by_parameter or functools.partial(_by_path, updates if params is None else params)
        leaves, treedef = jtu.tree_flatten(updates, is_leaf=_is_nothing)
        pairs = zip(leaves, _like(treedef, by_parameter(self.factors)), strict=True)
        return treedef.unflatten([leaf if _is_nothing(leaf) else _times(leaf, number) for leaf, number in pairs]), state


def _is_nothing(node: object) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _like(treedef: Any, factors: PyTree) -> list[Any]:
    """Returns the factors at the leaves of the updates."""
    try:
        found = treedef.flatten_up_to(factors)
    except ValueError:
        found = [factors]
    if any(jtu.tree_structure(each).num_nodes > 1 for each in found):
        raise ValueError(
            f"optim.scaled needs an update for each parameter: it got updates as {treedef!s:.80}, but the parameters "
            f"are {jtu.tree_structure(factors)!s:.80}; put it outside of optax.flatten and others that change the form"
        )
    return found


def _by_path(tree: PyTree, factors: Factors) -> PyTree:
    """Returns the factor of each array of a tree, by its path."""
    if are_stacks(tree):
        raise ValueError(
            "optim.scaled selects by the names of parameters, which the stacks of tp.stack do not have; pass the model "
            "to optim.trainable(optax.chain(..., optim.scaled(...)), form='stacks')"
        )
    leaves, treedef = jtu.tree_flatten(tree)
    found = entries_of(tree, [*factors], is_whole=not nodes_of(optax.MaskedNode, tree))
    numbers = [*factors.values(), 1.0]
    of_paths = [numbers[found.get(path, -1)] for path in structure_of(tree)[2].paths]
    return treedef.unflatten([
        Block.single(leaf.shape, leaf.dtype).spread([number]) for leaf, number in zip(leaves, of_paths, strict=True)
    ])


def check_names(state: PyTree, index: Index) -> None:
    """Checks the keys of groups and factors in the whole model, since a rule sees only the trained parameters."""
    check_groups(state, index)
    for node in nodes_of(ScaledState, state):
        first_entries(index, node.keys.wheres)


def _times(leaf: Any, factor: Any) -> Any:
    """Multiplies an update by a real number, in its own dtype; returns updates that are not floating unchanged."""
    is_one = isinstance(factor, np.ndarray) and not factor.shape and factor == 1
    if is_one or not (is_array(leaf) and jnp.issubdtype(leaf.dtype, jnp.inexact)):
        return leaf
    wide = common_dtype([leaf.dtype, factor.dtype])
    return (jnp.asarray(leaf, wide) * jnp.asarray(factor, jnp.finfo(wide).dtype)).astype(leaf.dtype)


def clip_by_global_norm(
    max_norm: float | int | Array, *, axis_name: str | Sequence[str] | None = None
) -> optax.GradientTransformationExtraArgs:
    """Scales gradients down to a maximum global norm, in which each parameter counts once.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> shared = jnp.array([1.0, 2.0])
    >>> model = {"a": shared, "b": shared, "steps": jnp.array(3)}
    >>> tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    >>> gradients = {"a": jnp.array([1.0, 2.0]), "b": jnp.array([2.0, 2.0])}
    >>> updates, state = tx.update(gradients, tx.init(model), model)
    >>> clip = state.clip
    >>> updates["a"], clip.norm, clip.clipped
    (Array([-0.6, -0.8], dtype=float32), Array(5., dtype=float32), Array(1, dtype=int32))

    It is plain Optax and uses `tp.global_norm` of the tree that it receives, in any mix of dtypes. Inside
    `optim.trainable` this tree has each tied parameter once and no frozen ones, so the norm needs no backward pass
    through a frozen trunk.

    **If the norm is not finite**, the whole update becomes NaN, so that you see it: scaling by an infinite norm would
    make all finite entries zero. To skip such steps and keep the state, write
    `optim.trainable(optax.apply_if_finite(tx, max_consecutive_errors=10))`. A limit of infinity changes nothing.

    Args:
        max_norm: the limit, a positive number, or an array that may be traced (`optax.inject_hyperparams`). An array at
            or below zero, as at the end of a schedule, gives zeros.
        axis_name: one or more named axes (`jax.shard_map`, `jax.vmap`) over which the gradient is split; the norm is
            then that of all pieces together. Leave it out if each device has the whole gradient.

    Returns:
        A transformation with a `ClipState`; each leaf keeps its dtype.

    Raises:
        ValueError: `max_norm` is a number that is not positive.
        TypeError: `max_norm` is a schedule.
    """
    if callable(max_norm):
        injected = "optax.inject_hyperparams(optim.clip_by_global_norm)(max_norm=...)"
        raise TypeError(f"max_norm must be a number; for a schedule write {injected}")
    if not (isinstance(max_norm, (int, float)) or is_array(max_norm)):
        raise TypeError(f"max_norm must be a number, got {describe(max_norm)}")
    if not is_array(max_norm) and not max_norm > 0:
        raise ValueError(f"max_norm must be positive, got {max_norm}")

    def init(params: PyTree) -> ClipState:
        norm = jax.eval_shape(global_norm, [leaf for leaf in jax.tree.leaves(params) if is_array(leaf)])
        return ClipState(jnp.zeros((), norm.dtype), jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32))

    def update(updates: PyTree, state: Any, params: object = None, **_: object) -> tuple[PyTree, ClipState]:
        norm = global_norm(updates)
        if axis_name is not None:
            norm = _norm_over(axis_name, norm)
        with np.errstate(over="ignore"):  # 1e39 is infinity
            limit = jnp.maximum(jnp.asarray(max_norm, norm.dtype), 0)
        is_within = norm <= limit
        # Within the limit the scale is 1 exactly. The inner `where` keeps infinity / infinity out of the gradient, too.
        is_finite = jnp.isfinite(norm)
        scale = jnp.where(is_within, 1, jnp.where(is_finite, limit / jnp.where(is_within, 1, norm), jnp.nan))
        counted = ClipState(
            norm.astype(state.norm.dtype),
            clipped=state.clipped + (is_finite & ~is_within).astype(state.clipped.dtype),
            nonfinite=state.nonfinite + (~is_finite).astype(state.nonfinite.dtype),
        )
        return jax.tree.map(lambda leaf: _times(leaf, scale), updates), counted

    return optax.GradientTransformationExtraArgs(init, update)


def _norm_over(axis_name: str | Sequence[str], norm: jax.Array) -> jax.Array:
    """Returns the norm of a gradient that is split over named axes, from the norm of the piece on each device."""
    # Scaled by the largest, so that squares neither overflow nor vanish.
    largest = jax.lax.pmax(norm, axis_name)
    safe = jnp.where((largest > 0) & jnp.isfinite(largest), largest, 1)
    return safe * jnp.sqrt(jax.lax.psum(jnp.square(norm / safe), axis_name))
