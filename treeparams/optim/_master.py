"""master: plain Optax that trains wide copies of narrow parameters.

A bfloat16 number has 8 significant bits. A step of 0.001 from 1.0 is less than half the spacing between neighbouring
numbers, so the sum rounds back to 1.0, in this step and in all others. Here the optimiser trains float32 copies, and
each parameter is its copy, rounded.

The caller adds the update to the parameter, in the parameter's dtype. The difference of two narrow numbers is a narrow
number if they differ by less than a factor of two (Sterbenz), so then the sum is the rounded copy, bit for bit.
Otherwise it may not be: no bfloat16 number added to 1.0 gives 1e-5. So `optim.step`, which has the state, writes the
rounded copy itself (`landed`), if the update is still the one that was computed here.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
from jax.typing import DTypeLike

from .._forms.states import Division, Owners
from .._tree.structure import is_array
from .._tree.types import PyTree, is_complex, is_inexact
from ._state import ONE, ModelTransformation, Plain, extended, in_own_buffers

_FUNCTIONS = ("value_fn", "obj_fn", "grad_fn")
"""The extra arguments of Optax's rules that are functions of parameters."""


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
    wide = _checked(dtype)
    rule = _Master(extended(tx), wide)
    return optax.GradientTransformationExtraArgs(rule.init, rule.update)


def _checked(dtype: DTypeLike) -> np.dtype:
    try:
        given = jnp.dtype(dtype)
    except TypeError:
        given = None
    if given is None or not jnp.issubdtype(given, jnp.floating):
        raise TypeError(
            "dtype must be a floating dtype for the wide copies, such as jnp.float32, got "
            f"{getattr(dtype, '__name__', dtype)}; copies of complex parameters are complex anyway"
        )
    if jax.dtypes.canonicalize_dtype(given) != given:
        raise ValueError(f'copies in {given} need 64 bits: call jax.config.update("jax_enable_x64", True) at the start')
    return given


@dataclasses.dataclass(frozen=True, eq=False)
class _Master:
    """A rule, and the dtype of the copies that it sees in place of narrower parameters."""

    tx: optax.GradientTransformationExtraArgs
    dtype: np.dtype

    def init(self, params: PyTree) -> Any:
        """Returns the copies, and the state of the rule over them."""
        copies = jax.tree.map(self.copy_of, params)
        state = MasterState(copies, self.tx.init(jax.tree.map(_copy_or_own, params, copies)))
        return in_own_buffers(state, jtu.tree_leaves(params))  # a rule may keep what it is given

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: Any) -> tuple[PyTree, Any]:
        """Returns the updates in the dtypes of the parameters, and the next copies and state."""
        if params is None:
            raise ValueError("optim.master needs the parameters: write tx.update(grads, state, params)")
        before = jax.tree.map(_current, params, state.copies)
        extra = {name: self._argument(name, value, params) for name, value in extra.items()}
        made, inner = self.tx.update(self.widened(updates), state.inner, before, **extra)
        steps, treedef = jtu.tree_flatten(made, is_leaf=_is_nothing)
        copies, currents, olds = map(treedef.flatten_up_to, (state.copies, before, params))
        for i, step in enumerate(steps):
            if not (_is_nothing(step) or copies[i] is None):
                copies[i], steps[i] = _step(currents[i], step, olds[i])
        return treedef.unflatten(steps), MasterState(treedef.unflatten(copies), inner)

    def copy_of(self, leaf: Any) -> jax.Array | None:
        """Returns the copy of a narrow parameter, or `None` for a wide one."""
        wide = self._wide(leaf)
        return None if wide is None else jax.lax.convert_element_type(leaf, wide)

    def widened(self, tree: PyTree) -> PyTree:
        """Returns a tree with its narrow arrays made wide."""
        return jax.tree.map(lambda leaf: _copy_or_own(leaf, self.copy_of(leaf)), tree)

    def _wide(self, leaf: Any) -> Any:
        """Returns the dtype of a parameter's copy, or `None` if it has none."""
        if not (is_array(leaf) and is_inexact(leaf.dtype)) or jnp.finfo(leaf.dtype).bits >= jnp.finfo(self.dtype).bits:
            return None
        return jnp.result_type(self.dtype, jnp.complex64) if is_complex(leaf.dtype) else self.dtype

    def _argument(self, name: str, value: Any, params: PyTree) -> Any:
        """Converts an extra argument for a rule that sees copies."""
        if name == "grad":
            return self.widened(value)
        if name not in _FUNCTIONS or not callable(value):
            return value
        return self._over_copies(value, params)

    def _over_copies(self, f: Callable[..., Any], params: PyTree) -> Callable[..., Any]:
        """Turns a function of parameters into one of copies, which it sees rounded; it returns wide gradients."""

        def of_copies(copies: PyTree, *args: Any, **kwargs: Any) -> Any:
            rounded = jax.tree.map(lambda leaf, copy: _rounded(copy, leaf.dtype), params, copies)
            return self.widened(f(rounded, *args, **kwargs))

        return functools.wraps(f)(of_copies)  # Optax looks at the names of its arguments


def _is_nothing(node: object) -> bool:
    return node is None or isinstance(node, optax.MaskedNode)


def _copy_or_own(leaf: Any, copy: jax.Array | None) -> Any:
    return leaf if copy is None else copy


def _current(leaf: Any, copy: jax.Array | None) -> Any:
    """Returns the array that the rule sees for a parameter: its copy, restarted where you changed the parameter."""
    return leaf if copy is None else _kept(leaf, copy)


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
    for node in jtu.tree_leaves(state, is_leaf=_is_master):
        leaves = jtu.tree_leaves(node)
        count = len(jtu.tree_leaves(node.copies)) if isinstance(node, MasterState) else 0
        for n, (own, leaf) in enumerate(zip(itertools.islice(owners, len(leaves)), leaves, strict=True)):
            if n < count and own is not None:
                yield own, leaf


def _is_master(node: object) -> bool:
    return isinstance(node, MasterState)


@functools.partial(jax.jit, inline=True)
def landed(leaf: jax.Array, step: jax.Array, copy: jax.Array, moved: jax.Array) -> jax.Array:
    """Returns a parameter after a step: its rounded copy if the update leads there, otherwise the sum `moved`."""
    if step.dtype != leaf.dtype:
        return moved
    rounded = _rounded(copy, leaf.dtype)
    return jnp.where(step == _difference(rounded, leaf), rounded, moved)
