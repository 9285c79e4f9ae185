"""scaled, clip_by_global_norm, master: plain Optax for use inside `optim.trainable`."""

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array

from .._forms.block import Block
from .._forms.form import Form
from .._forms.states import Division, Owners
from .._slots.index import Index
from .._slots.layout import Layout, index_of
from .._slots.where import Where, name_of
from .._tree.structure import is_array, structure_of
from .._tree.text import describe
from .._tree.types import PyTree, common_dtype, is_complex, is_inexact
from .._walk import global_norm
from ._groups import Keys, are_stacks, check_groups
from ._state import ONE, ClipState, ModelTransformation, Plain, extended, in_own_buffers, nodes_of

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
    found = index.first_entries([*given], asked=())  # `init` has checked that each is of use
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
        name, is_number = name_of(where), is_array(factor) or isinstance(factor, (int, float, np.number))
        if not is_number or jnp.iscomplexobj(factor) or not jnp.issubdtype(jnp.result_type(factor), jnp.number):
            raise TypeError(
                f"the factor of {name} must be a real number, got {describe(factor)}; for a schedule write "
                f"optim.groups({{{name}: optax.scale_by_schedule(schedule)}}, default=optax.identity())"
            )
        if jnp.shape(factor):
            raise ValueError(f"the factor of {name} must be one number, got {describe(factor)}; write an entry each")
    factors = dict(factors)

    def init(params: PyTree) -> Any:
        return ScaledState(Keys([*factors]))  # which are checked later, in the whole model

    def update(updates: PyTree, state: Any, params: PyTree | None = None, **_: object) -> tuple[PyTree, Any]:
        by_parameter = state.keys.by_parameter or functools.partial(_by_path, updates if params is None else params)
        leaves, treedef = jtu.tree_flatten(updates, is_leaf=is_nothing)
        pairs = zip(leaves, _like(treedef, by_parameter(factors)), strict=True)
        return treedef.unflatten([leaf if is_nothing(leaf) else _times(leaf, number) for leaf, number in pairs]), state

    return optax.GradientTransformationExtraArgs(init, update)


def _like(treedef: Any, factors: PyTree) -> list[Any]:
    """Returns the factors at the leaves of the updates."""
    with contextlib.suppress(ValueError):
        found = treedef.flatten_up_to(factors)
        if all(jtu.tree_structure(each).num_nodes == 1 for each in found):
            return found
    raise ValueError(
        f"optim.scaled needs an update for each parameter: it got updates as {treedef!s:.80}, but the parameters are "
        f"{jtu.tree_structure(factors)!s:.80}; put it outside of optax.flatten and others that change the form"
    )


def _by_path(tree: PyTree, factors: Factors) -> PyTree:
    """Returns the factor of each array of a tree, by its path."""
    if are_stacks(tree):
        raise ValueError("optim.scaled goes by names, which stacks do not have; write trainable(tx, form='stacks')")
    leaves, treedef = jtu.tree_flatten(tree)
    found = Keys([*factors]).numbers_in(tree, is_whole=not nodes_of(optax.MaskedNode, tree))
    numbers = [*factors.values(), 1.0]
    of_paths = [numbers[found.get(path, -1)] for path in structure_of(tree)[2].paths]
    return treedef.unflatten([
        Block.single(leaf.shape, leaf.dtype).spread([number]) for leaf, number in zip(leaves, of_paths, strict=True)
    ])


def check_names(state: PyTree, index: Index) -> None:
    """Checks the keys of groups and factors in the whole model, since a rule sees only the trained parameters."""
    check_groups(state, index)
    for node in nodes_of(ScaledState, state):
        index.first_entries(node.keys.wheres)


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
    if not (isinstance(max_norm, (int, float)) or is_array(max_norm)):
        schedule = "for a schedule write optax.inject_hyperparams(optim.clip_by_global_norm)(max_norm=...)"
        raise TypeError(f"max_norm must be a number, got {describe(max_norm)}; {schedule}")
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


# -- Wide copies -------------------------------------------------------------------------------------------------------

# A bfloat16 number has 8 significant bits. A step of 0.001 from 1.0 is less than half the spacing between neighbouring
# numbers, so the sum rounds back to 1.0, in this step and in all others. Here the optimiser trains float32 copies, and
# each parameter is its copy, rounded.
#
# The caller adds the update to the parameter, in the parameter's dtype. The difference of two narrow numbers is narrow,
# too, if they differ by less than a factor of two (Sterbenz), so then the sum is the rounded copy, bit for bit.
# Otherwise it may not be: no bfloat16 number added to 1.0 gives 1e-5. So `optim.step`, which has the state, writes the
# rounded copy itself (`landed`), if the update is still the one that was computed here.

# The extra arguments of Optax's rules that are functions of parameters.
_FUNCTIONS = ("value_fn", "obj_fn", "grad_fn")


@dataclasses.dataclass(frozen=True)
class MasterState:
    """The state of `optim.master`, a pytree.

    Attributes:
        copies: a tree like the parameters: the wide copy of each narrow one, `None` at the others.
        inner: the state of the inner optimiser, over the copies and the parameters that are wide already.
    """

    copies: Any
    inner: Any


MasterState.__module__ = "treeparams.types"
jtu.register_dataclass(MasterState, ["copies", "inner"], [])


def master(tx: Plain, dtype: DTypeLike = jnp.float32) -> optax.GradientTransformationExtraArgs:
    """Trains bfloat16 and float16 parameters through float32 copies, so that no small step is lost.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> model = {"w": jnp.ones(2, jnp.bfloat16), "b": jnp.zeros(2)}
    >>> tx = optim.trainable(optim.master(optax.sgd(1e-3)))
    >>> state = tx.init(model)
    >>> for _ in range(100):  # in bfloat16 alone, 1 - 0.001 is 1
    ...     model, state = optim.step(tx, {"w": jnp.ones(2)}, state, model)
    >>> print(model["w"], state.runs[0].copies["w"].round(4), state.runs[0].copies["b"])
    [0.898438 0.898438] [0.9 0.9] None

    Each parameter is its copy, rounded to the parameter's dtype; under `optim.step` bit for bit after every step. You
    may pass narrow or wide gradients. The copies cost 4 bytes for each narrow element, and optimisers keep their
    moments in float32 too: with Adam, 12 bytes beside the 2 of a bfloat16 weight, and 4 without copies. A parameter
    that is as wide as `dtype` has no copy.

    It is plain Optax, and works anywhere inside `optim.trainable`, in `optim.groups`
    and `optim.per_leaf`, and in `sharding.make_step`. **Put everything that makes the step inside it**: clips, weight
    decay, `optim.scaled`, `optax.apply_if_finite`, and `optax.MultiSteps`, which then accumulates in float32. If a
    later transformation changes the updates, parameters differ from their copies, all copies restart in each step, and
    small steps are lost again. So `optim.master` must be the last in a chain; otherwise `init` of `optim.trainable`
    raises a `ValueError`.

    **If you change a parameter yourself, it stays changed.** An element that is not its copy rounded when a step begins
    (after `tp.replace`, a part that was loaded, a projection) restarts its copy. So save the state with the model: a
    copy that restarts has lost the digits below the rounding.

    **With `eqx.apply_updates` or `optim.apply_updates`**, which do not see the state, a parameter is its copy rounded
    as long as a step changes it by less than a factor of two. In other steps its copy restarts from the sum.

    Functions among the extra arguments (`value_fn`, `grad_fn`) are called with rounded parameters in their own dtypes,
    since that is the model that you train. So a line search tries steps in narrow numbers; it works better on a wide
    model.

    Args:
        tx: any Optax transformation or chain. It sees only wide arrays.
        dtype: the dtype of the copies, floating. Narrower parameters have a copy. A complex parameter counts by its
            real part, and its copy is complex.

    Returns:
        A transformation with a `MasterState`. Each update has the dtype of its parameter. `None` or `optax.MaskedNode`
        is no step: the copy stays as it is.

    Raises:
        TypeError: `dtype` is not floating; `tx` is not a transformation.
        ValueError: `dtype` is float64 and JAX has 32 bits; `tx` is a transformation over models; `update`: there are no
            parameters.
    """
    if isinstance(tx, ModelTransformation):
        raise ValueError(ONE)
    wide = jnp.dtype(dtype)
    if not jnp.issubdtype(wide, jnp.floating):
        raise TypeError(f"expected a floating dtype, got {wide}; copies of complex parameters are complex anyway")
    if jax.dtypes.canonicalize_dtype(wide) != wide:
        raise ValueError(f'copies in {wide} need 64 bits: call jax.config.update("jax_enable_x64", True) at the start')
    rule = _Master(extended(tx), wide)
    return optax.GradientTransformationExtraArgs(rule.init, rule.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Master:
    """A rule, and the dtype of the copies that it sees in place of narrower parameters."""

    tx: optax.GradientTransformationExtraArgs
    dtype: np.dtype

    def init(self, params: PyTree) -> Any:
        """Returns the copies, and the state of the rule over them."""
        copies = jax.tree.map(self.copy_of, params)
        state = MasterState(copies, self.tx.init(self.widened(params)))
        return in_own_buffers(state, jtu.tree_leaves(params))  # a rule may keep what it is given

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        """Returns the updates in the dtypes of the parameters, and the next copies and state."""
        if params is None:
            raise ValueError("optim.master needs the parameters: write tx.update(grads, state, params)")
        # A copy begins anew where you changed the parameter.
        before = jax.tree.map(lambda leaf, copy: leaf if copy is None else _kept(leaf, copy), params, state.copies)
        extra = {name: self._argument(name, value, params) for name, value in extra.items()}
        made, inner = self.tx.update(self.widened(updates), state.inner, before, **extra)
        steps, treedef = jtu.tree_flatten(made, is_leaf=is_nothing)
        copies, currents, olds = map(treedef.flatten_up_to, (state.copies, before, params))
        for i, step in enumerate(steps):
            if not (is_nothing(step) or copies[i] is None):
                copies[i], steps[i] = _step(currents[i], step, olds[i])
        return treedef.unflatten(steps), MasterState(treedef.unflatten(copies), inner)

    def copy_of(self, leaf: Any) -> jax.Array | None:
        """Returns the copy of a narrow parameter, or `None` for a wide one."""
        if not (is_array(leaf) and is_inexact(leaf.dtype)) or jnp.finfo(leaf.dtype).bits >= jnp.finfo(self.dtype).bits:
            return None
        wide = jnp.result_type(self.dtype, jnp.complex64) if is_complex(leaf.dtype) else self.dtype
        return jax.lax.convert_element_type(leaf, wide)

    def widened(self, tree: PyTree) -> PyTree:
        """Returns a tree with its narrow arrays made wide."""
        return jax.tree.map(lambda leaf: leaf if (copy := self.copy_of(leaf)) is None else copy, tree)

    def _argument(self, name: str, value: Any, params: PyTree) -> Any:
        """Converts an extra argument for a rule that sees copies; a function of parameters sees these rounded."""
        if name == "grad":
            return self.widened(value)
        if name not in _FUNCTIONS or not callable(value):
            return value

        @functools.wraps(value)  # Optax looks at the names of its arguments
        def of_copies(copies: PyTree, *args: Any, **kwargs: Any) -> Any:
            rounded = jax.tree.map(lambda leaf, copy: _rounded(copy, leaf.dtype), params, copies)
            return self.widened(value(rounded, *args, **kwargs))

        return of_copies


def is_nothing(node: object) -> bool:
    """Returns whether there is no update: `None`, or the place of a masked leaf."""
    return node is None or isinstance(node, optax.MaskedNode)


# Compiled, so that outside of a trace each of these is one call and not about ten.


@functools.partial(jax.jit, inline=True)
def _kept(leaf: jax.Array, copy: jax.Array) -> jax.Array:
    """Returns the copy, but with the parameter's elements where these differ from the rounded copy."""
    rounded = _rounded(copy, leaf.dtype)
    is_same = (rounded == leaf) | (jnp.isnan(rounded) & jnp.isnan(leaf))
    return jnp.where(is_same, copy, jax.lax.convert_element_type(leaf, copy.dtype))


@functools.partial(jax.jit, inline=True)
def _step(copy: jax.Array, step: jax.Array, leaf: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the copy after a step, and the update of the parameter."""
    copy = copy + jax.lax.convert_element_type(step, copy.dtype)
    return copy, _difference(_rounded(copy, leaf.dtype), leaf)


def _difference(rounded: jax.Array, leaf: jax.Array) -> jax.Array:
    """Returns the update that turns a parameter into the rounded copy."""
    return jnp.where(rounded == leaf, jnp.zeros((), leaf.dtype), rounded - leaf)  # that of infinities is NaN


def _rounded(copy: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Rounds a copy to the dtype of its parameter."""
    narrow, wide = jnp.finfo(dtype), jnp.finfo(copy.dtype)
    # Compilers may leave out a cast down that is followed by a cast up (`xla_allow_excess_precision`); the comparison
    # would then find that no parameter is its copy rounded. They keep `reduce_precision`, which rounds alike if both
    # exponents have the same range, as in bfloat16 and float32.
    if narrow.nexp == wide.nexp and narrow.nmant < wide.nmant:
        copy = jax.lax.reduce_precision(copy, narrow.nexp, narrow.nmant)
    return jax.lax.convert_element_type(copy, dtype)


# -- For the code that applies the step --------------------------------------------------------------------------------


def copies_in(state: PyTree, division: Division) -> Iterator[tuple[Owners, Any]]:
    """Yields the wide copies in the state of a rule, with the parameters of each."""
    if "copies" not in division.names:  # most states need no further look
        return
    owners = iter(division.owners)
    for node in jtu.tree_leaves(state, is_leaf=MasterState.__instancecheck__):
        leaves = jtu.tree_leaves(node)
        count = len(jtu.tree_leaves(node.copies)) if isinstance(node, MasterState) else 0
        for n, (own, leaf) in enumerate(zip(itertools.islice(owners, len(leaves)), leaves, strict=True)):
            if n < count and own is not None:
                yield own, leaf


@functools.partial(jax.jit, inline=True)
def landed(leaf: jax.Array, step: jax.Array, copy: jax.Array, moved: jax.Array) -> jax.Array:
    """Returns a parameter after a step: its rounded copy if the update leads there, otherwise the sum `moved`."""
    if step.dtype != leaf.dtype:
        return moved
    rounded = _rounded(copy, leaf.dtype)
    return jnp.where(step == _difference(rounded, leaf), rounded, moved)
