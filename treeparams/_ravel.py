"""The two forms of trained parameters besides the tree: ravel, one vector; stack, an array for each shape."""

from collections.abc import Mapping
from typing import Any, SupportsIndex, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact

from ._forms.makers import stacks_of, vector_of
from ._forms.restructure import Restructure, restructure_over
from ._slots.layout import Trainable
from ._slots.parts import take_apart
from ._slots.untrained import warn_of_nothing
from ._slots.where import Where
from ._tree.messages import name_deleted, warn

M = TypeVar("M")


def ravel(
    model: M, trainable: Trainable = None, dtype: DTypeLike | None = None, *, pad_to: SupportsIndex = 1
) -> tuple[Inexact[Array, " n"], Restructure[M]]:
    """The trained parameters of a model as one contiguous vector, and the way back.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    >>> vector, restructure = tp.ravel(mlp, "!layers.0")  # all but the first; tp.ravel(mlp): everything
    >>> vector.shape, bool(restructure(vector)(jnp.ones(2)) == mlp(jnp.ones(2)))
    ((5,), True)
    >>> loss = jax.jit(lambda vector, restructure, x: restructure(vector)(x) ** 2)
    >>> jax.grad(loss)(vector, restructure, jnp.ones(2)).shape
    (5,)

    Only trained floating and complex arrays are in the vector, in tree order, each tie once, at the offsets that
    `restructure.layout` prints. Integers, keys and functions are not converted: they stay with `restructure`.

    **Its cost.** An update, a norm, an average of one vector is one operation in place of thousands, and compiles as
    one. But XLA has no views: while a step runs, the leaves exist beside the vector, and so do their gradients. If you
    have many small leaves, take the vector. If you have a few huge ones, take the tree form (`tp.partition`). For rules
    for matrices and layers to scan over take stacks (`tp.stack`). For master weights write `dtype=jnp.float32` over
    bfloat16 leaves; the forward pass runs in bfloat16, the gradient and the update are one float32 vector.

    Args:
        model: any pytree.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        dtype: the dtype of the vector; `None`: `jnp.result_type` of the slots that have elements. A narrower one loses
            digits; float32 over bfloat16 leaves keeps a master copy. Weak types do not survive.
        pad_to: zeros follow the parameters until the length is a multiple of this, so that the vector can be laid over
            so many devices. No parameter, gradient or view ever includes them.

    Returns:
        The vector, shape `(layout.size,)`, always in a buffer of its own and whole on each device, and the
        `Restructure`. Nothing trained: shape `(0,)`.

    Raises:
        ValueError: `pad_to` is not positive; more than 2^31 - 1 elements; as `tp.layout`.
        TypeError: `dtype` is not floating, real where a slot is complex or complex where none is; as `tp.layout`.

    Warns:
        UserWarning: `dtype` has 64 bits, and JAX is set to have none; nothing is trained.
    """
    parts = take_apart(model, trainable)
    if not parts.slots:
        warn_of_nothing(parts.index)
    form = vector_of(parts.layout, dtype, pad_to)
    if not (dtype is None or dtype is float or dtype is complex) and jnp.dtype(dtype) != form.dtype:
        warn(f"the vector is {form.dtype}, not {jnp.dtype(dtype)} as asked, unless jax_enable_x64 is set")
    try:
        return form.join(parts.slots), Restructure(parts.rest, form)
    except (RuntimeError, ValueError) as error:
        name_deleted(error, model)
        raise


def stack(
    model: M, trainable: Trainable = None, *, groups: Mapping[str, Where] | None = None
) -> tuple[dict[str, Any], Restructure[M]]:
    """The trained parameters of a model as one array for each shape and dtype, and the way back.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(4, 4, 4, depth=8, key=jax.random.key(0))
    >>> stacks, restructure = tp.stack(mlp)
    >>> {key: array.shape for key, array in stacks.items()}
    {'float32[4,4]': (9, 4, 4), 'float32[4]': (9, 4)}
    >>> restructure.place("layers.2.weight")
    (None, 'float32[4,4]', 2)
    >>> loss = jax.jit(lambda stacks, restructure, x: jnp.sum(restructure(stacks)(x)))
    >>> jax.grad(loss)(stacks, restructure, jnp.ones(4))["float32[4]"].shape
    (9, 4)

    For rules that look at matrices (Muon, Adafactor, LAMB: `optim.per_leaf`), for layers to scan over
    (`restructure.scan`), for parameters of mixed dtypes, and to lay parameters over devices. An element-wise rule, a
    global norm or an average is the same over stacks as over the leaves, in a few operations in place of thousands.

    **Its cost.** Hold on to the stacks between steps: if you stack a tree anew in each step, you pay for the copies
    that stacks save. As of a vector, leaves that `restructure(stacks)` cuts out exist beside the stacks while a step
    runs; those of a shape of their own do not, nor do layers that are scanned. Large leaves of one shape that you do
    not scan are best each in a group of its own, a stack of one, of which a compiled step makes no copy. Frozen arrays
    of one shape are stacked too, once, by `restructure`, so that layers are scanned with their frozen arrays. Where
    most is frozen and you scan nothing, take `tp.ravel` or `tp.partition`, which copy no frozen array.

    Args:
        model: any pytree.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        groups: `{name: where}`. Each group has stacks of its own, so that labels, masks and shardings apply to it as a
            subtree; the first that selects a parameter has it. A tie goes where its source goes.

    Returns:
        `{key: array}`, or `{group: {key: array}}`: for each shape and dtype among the slots, `"float32[4,4]"`, an array
        of shape `(k, *shape)` and that dtype in a buffer of its own, with a row for each slot in tree order, ties once.
        The dictionary is a pytree of its own kind, by which `optim.per_leaf` knows that rows are leaves. `jax.tree.map`
        and `stacks | {key: array}` keep the kind; a dictionary that you build from the items is a tree of plain arrays.
        And the `Restructure`. Nothing trained: `{}`.

    Raises:
        ValueError: a group selects nothing, or nothing that earlier groups left, or a further place alone of an array;
            a parameter is in none. (A group of frozen parameters alone is `{}`.) As `tp.layout`.
        TypeError: `groups` is no dictionary; as `tp.layout`.

    Warns:
        UserWarning: nothing is trained.
    """
    parts = take_apart(model, trainable)
    if not parts.slots:
        warn_of_nothing(parts.index)
    form = stacks_of(parts.layout, groups)
    try:
        return form.join(parts.slots), restructure_over(parts.rest, form)
    except (RuntimeError, ValueError) as error:
        name_deleted(error, model)
        raise
