"""Copies, and exponential moving averages of models: target networks, Polyak averages."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer
from jaxtyping import PyTree

from ._match import read_slots
from ._partition import Rest, split
from ._seen import structure_of
from ._select import select
from ._structure import flatten

Policy = Literal["copy", "keep", "average"]
Buffers = Policy | Mapping[Any, Policy]


def copy(tree: PyTree) -> PyTree:
    """The tree with every array in a buffer of its own; ties are kept.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online = {"w": jnp.ones(2)}
    >>> target = tp.copy(online)
    >>> target["w"] is online["w"], bool((target["w"] == online["w"]).all())
    (False, True)

    A target network that *is* the online one is tied to it, and gone when a step donates it; its copy is neither.

    Args:
        tree: any pytree.

    Returns:
        A tree of the same structure. An array that stands at several places is copied once; what is no array stays.
    """
    leaves, treedef = flatten(tree)
    copies: dict[int, Any] = {}
    for leaf in leaves:
        if id(leaf) not in copies:
            copies[id(leaf)] = copy_leaf(leaf)
    return jtu.tree_unflatten(treedef, [copies[id(leaf)] for leaf in leaves])


def ema(average: PyTree, model: PyTree, *, decay: Any, buffers: Buffers = "copy", trainable: Any = None) -> PyTree:
    """One step of an exponential moving average: `average + (1 - decay) * (model - average)`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> online = {"w": jnp.ones(2), "steps": jnp.array(5)}
    >>> target = {"w": jnp.zeros(2), "steps": jnp.array(0)}
    >>> target = tp.ema(target, online, decay=0.9)
    >>> print(target["w"], target["steps"])
    [0.1 0.1] 5

    Each slot is averaged once, in at least float32, and cast back to its own dtype. In bfloat16 an average sticks when
    the step is under half a digit; `tp.Ema` keeps it in float32.

    Args:
        average: the model averaged so far; it decides what is trained and tied, and the dtypes. Start with
            `tp.copy(model)`.
        model: the model now, or another tree with its parameters at the same paths.
        decay: the weight of `average`, a number in [0, 1] or a traced scalar, which never promotes a dtype.
        buffers: what to do with integers, bools, keys and frozen arrays: `"copy"` takes the model's, in a buffer of its
            own; `"keep"` leaves the average's; `"average"` averages the floating ones and copies the others. Or
            `{where: policy}`; a later entry wins, and what no entry selects is copied.
        trainable: what is trained: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        The new average. What is no array (functions, Python numbers) is that of `average`.

    Raises:
        ValueError: `decay` is not in [0, 1]; the model lacks an array of the average, or has another shape there;
            `buffers` is no policy, or selects nothing; as `tp.layout`.
        TypeError: the model is complex where the average is real.
    """
    slots, rest = split(average, trainable)
    step = step_size(decay)
    news = read_slots(rest.layout, model, exact_shapes=True)
    frozen = next_buffers(rest, model, step, buffers)
    return rest.fixed.fill(lerp(slots, news, step), frozen)


def step_size(decay: Any) -> Any:
    """`1 - decay`, in double precision where the decay is a Python number.

    Raises:
        ValueError: the decay is not a scalar in [0, 1].
    """
    if jnp.ndim(decay) != 0:
        raise ValueError(f"decay must be a scalar, got shape {jnp.shape(decay)}")
    if isinstance(decay, (int, float)) and not 0 <= decay <= 1:
        raise ValueError(f"decay must be between 0 and 1, got {decay}")
    return 1 - decay


def as_decay(decay: Any) -> Any:
    """The decay of an average that is carried along: a Python float, or a function of the count.

    Raises:
        ValueError: it is not in [0, 1].
        TypeError: it is traced.
    """
    if isinstance(decay, Tracer):
        raise TypeError("the decay of an Ema is static; pass a function of the count, or use tp.ema")
    if callable(decay):
        return decay
    step_size(decay)
    return float(decay)


def next_step(decay: Any, count: Any, weight: Any, *, debias: bool, warmup: bool) -> tuple[Any, Any]:
    """How far the average moves, and how much of it then comes from updates.

    Args:
        decay: from `as_decay`.
        count: of the updates so far.
        weight: how much of the average comes from them.
        debias: whether the values at the start have no weight.
        warmup: whether the decay starts low.
    """
    decay = decay(count) if callable(decay) else decay
    step = step_size(jnp.minimum(decay, (1 + count) / (10 + count)) if warmup else decay)
    weight = jnp.asarray(weight + step * (1 - weight), jnp.float32)
    if debias:
        # The same as dividing by the weight at the end, but the shadow is itself the average at any time.
        step = jnp.where(weight > 0, step / jnp.where(weight > 0, weight, 1), 0)
    return step, weight


@jax.jit
def lerp(olds: Sequence[Any], news: Sequence[Any], step: Any) -> list[Any]:
    """`old + step * (new - old)` of each pair, computed in at least float32, in the dtype of `old`."""

    def one(old: Any, new: Any) -> Any:
        wide = widened(old.dtype)
        start = old.astype(wide)
        return (start + jnp.asarray(step).astype(wide) * (jnp.asarray(new).astype(wide) - start)).astype(old.dtype)

    return [one(old, new) for old, new in zip(olds, news, strict=True)]


def widened(dtype: Any) -> Any:
    """The dtype to average in: at least single precision."""
    return jax.dtypes.canonicalize_dtype(dtype) if jnp.finfo(dtype).bits >= 32 else jnp.dtype(jnp.float32)


def next_buffers(rest: Rest, model: PyTree, step: Any, buffers: Buffers) -> list[Any]:
    """The arrays beside the slots after a step, by their policies.

    Raises:
        ValueError: the model lacks one that is to be taken from it, or has another shape there.
    """
    policies = _policies(rest, buffers)
    if all(policy == "keep" for policy in policies.values()):  # or there are none
        return list(rest.frozen)
    leaves, _, structure = structure_of(model)
    found = {path: leaves[i] for path, i in structure.index.items()}
    wrong = [
        f"{path!r} (shape {jnp.shape(old)}; {'nothing' if path not in found else f'shape {jnp.shape(found[path])}'})"
        for path, old in zip(policies, rest.frozen, strict=True)
        if policies[path] != "keep" and (path not in found or jnp.shape(found[path]) != jnp.shape(old))
    ]
    if wrong:
        raise ValueError(
            f"what is not trained is taken from the model, which has not what the average has at {', '.join(wrong)}; "
            'write buffers="keep" to leave the average\'s, or buffers={where: "keep"} for some'
        )
    return [
        old if policy == "keep" else _next_buffer(old, found[path], policy, step)
        for (path, policy), old in zip(policies.items(), rest.frozen, strict=True)
    ]


def _next_buffer(old: Any, new: Any, policy: str, step: Any) -> Any:
    if policy == "average" and all(jnp.issubdtype(jnp.result_type(each), jnp.inexact) for each in (old, new)):
        return lerp([old], [new], step)[0]
    if jnp.issubdtype(old.dtype, jax.dtypes.prng_key):
        return copy_leaf(new)
    return jnp.array(new, jax.dtypes.canonicalize_dtype(old.dtype), copy=True)


def _policies(rest: Rest, buffers: Buffers) -> dict[str, str]:
    structure, paths = rest.fixed.structure, rest.fixed.plan.frozen_paths
    if isinstance(buffers, str):
        return dict.fromkeys(paths, _check_policy(buffers))
    among = frozenset(structure.index[path] for path in paths)
    policies = dict.fromkeys(paths, "copy")
    for where, policy in buffers.items():
        for leaf in select(structure, where, among, "frozen or integer array"):
            policies[structure.paths[leaf]] = _check_policy(policy)
    return policies


def _check_policy(policy: Any) -> str:
    if policy not in ("copy", "keep", "average"):
        raise ValueError(f'buffers must be "copy", "keep" or "average", or a dict from where to these, got {policy!r}')
    return policy


def copy_leaf(leaf: Any) -> Any:
    """A copy of an array; anything else as it is."""
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    return jnp.copy(leaf) if isinstance(leaf, jax.Array) else leaf
