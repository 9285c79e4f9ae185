"""The two forms of trained parameters besides the tree: `ravel` for one vector, `stack` for one array per shape."""

from collections.abc import Mapping
from typing import Any, SupportsIndex, TypeVar

import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Inexact

from ._forms.form import Form
from ._forms.restructure import Restructure, restructure_over
from ._slots.layout import Trainable
from ._slots.parts import take_apart
from ._slots.where import Where
from ._tree.structure import naming_deleted
from ._tree.text import warn

M = TypeVar("M")


def ravel(
    model: M, trainable: Trainable = None, dtype: DTypeLike | None = None, *, pad_to: SupportsIndex = 1
) -> tuple[Inexact[Array, " n"], Restructure[M]]:
    """Flattens the trained parameters of a model into one contiguous vector, and returns the way back.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, "scalar", 4, 1, key=jax.random.key(0))
    >>> vector, restructure = tp.ravel(mlp, "!layers.0")  # all but the first; tp.ravel(mlp): everything
    >>> vector.shape, bool(restructure(vector)(jnp.ones(2)) == mlp(jnp.ones(2)))
    ((5,), True)
    >>> loss = jax.jit(lambda vector, restructure, x: restructure(vector)(x) ** 2)
    >>> jax.grad(loss)(vector, restructure, jnp.ones(2)).shape
    (5,)

    The vector holds only the trained floating and complex arrays, in tree order, each tied parameter once, at the
    offsets that `restructure.layout` prints. Integers, keys and functions are not converted; they stay in
    `restructure`.

    **Cost.** An update, a norm or an average of one vector is one operation instead of thousands, and compiles as one.
    But XLA has no views: during a step, the leaves and their gradients exist beside the vector. Use the vector if you
    have many small leaves, and the tree form (`tp.partition`) if you have a few huge ones. Use stacks (`tp.stack`) for
    rules that look at matrices and for layers to scan over. For master weights, write `dtype=jnp.float32` over bfloat16
    leaves: the forward pass runs in bfloat16, and the gradient and the update are one float32 vector.

    Args:
        model: any pytree.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        dtype: the dtype of the vector; `None` means `jnp.result_type` of the slots that have elements. A narrower dtype
            loses digits; float32 over bfloat16 leaves keeps a master copy. Weak types do not survive.
        pad_to: zeros follow the parameters until the length is a multiple of this number, so that you can split the
            vector over that many devices. No parameter, gradient or view ever includes them.

    Returns:
        The vector, of shape `(layout.size,)`, in a new buffer and whole on each device; and the `Restructure`. If
        nothing is trained, the shape is `(0,)`.

    Raises:
        ValueError: `pad_to` is not positive; there are more than 2^31 - 1 elements; see also `tp.layout`.
        TypeError: `dtype` is not floating, is real although a slot is complex, or is complex although no slot is; see
            also `tp.layout`.

    Warns:
        UserWarning: `dtype` has 64 bits and jax_enable_x64 is not set; nothing is trained.
    """
    parts = take_apart(model, trainable)
    if not parts.slots:
        parts.index.warn_of_nothing()
    form = Form.vector(parts.layout, dtype, pad_to)
    if not (dtype is None or dtype is float or dtype is complex) and jnp.dtype(dtype) != form.dtype:
        warn(f"the vector is {form.dtype} and not {jnp.dtype(dtype)}, because jax_enable_x64 is not set")
    with naming_deleted(model):
        return form.join(parts.slots), Restructure(parts.rest, (), form)


def stack(
    model: M, trainable: Trainable = None, *, groups: Mapping[str, Where] | None = None
) -> tuple[dict[str, Any], Restructure[M]]:
    """Stacks the trained parameters of a model into one array per shape and dtype, and returns the way back.

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

    Use stacks for optimisers that look at matrices (Muon, Adafactor, LAMB: `optim.per_leaf`), for layers to scan over
    (`restructure.scan`), for parameters of mixed dtypes, and to place parameters on devices. An element-wise rule, a
    global norm or an average gives the same result on stacks as on the leaves, in a few operations instead of
    thousands.

    **Cost.** Keep the stacks between steps: if you stack a tree anew in each step, you pay for the copies that stacks
    save. As with a vector, the leaves that `restructure(stacks)` cuts out exist beside the stacks during a step. The
    exceptions are leaves whose shape no other leaf has, and layers that you scan. If you have large leaves of one shape
    and do not scan them, put each into a group that holds nothing else: a compiled step makes no copy of a stack of
    one. `restructure` also stacks frozen arrays of one shape, once, so that layers are scanned with their frozen
    arrays. If most parameters are frozen and you scan nothing, use `tp.ravel` or `tp.partition`, which copy no frozen
    array.

    Args:
        model: any pytree.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        groups: `{name: where}`. Each group has separate stacks, so labels, masks and shardings apply to it as a
            subtree. A parameter belongs to the first group that selects it. A tied parameter goes with its source.

    Returns:
        `{key: array}`, or `{group: {key: array}}`, and the `Restructure`. For each shape and dtype among the slots,
        such as `"float32[4,4]"`, there is one array of shape `(k, *shape)` and that dtype in a new buffer. It has one
        row per slot, in tree order, so a tied parameter has one row. If nothing is trained, the result is `{}`.

    Raises:
        ValueError: a group selects nothing, or only parameters that earlier groups selected, or only one of several
            places of an array; a parameter is in no group. (A group with only frozen parameters is `{}`.) See also
            `tp.layout`.
        TypeError: `groups` is not a dictionary; see also `tp.layout`.

    Warns:
        UserWarning: nothing is trained.
    """
    parts = take_apart(model, trainable)
    if not parts.slots:
        parts.index.warn_of_nothing()
    form = Form.stacks(parts.layout, groups)
    with naming_deleted(model):
        return form.join(parts.slots), restructure_over(parts.rest, form)
