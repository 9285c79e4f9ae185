"""adjust: changes hyperparameters between steps."""

import itertools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from .._slots.where import Where
from .._tree.structure import is_array
from .._tree.text import describe
from ._groups import group_name, groups_in
from ._per_leaf import PerLeafState
from ._state import TrainableState, check_state, free_rates, map_injected, nodes_of, noticed

S = TypeVar("S")


def adjust(state: S, group: Where | None = None, **hyperparams: ArrayLike) -> S:
    """Changes hyperparameters that `optax.inject_hyperparams` keeps in an optimiser's state.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> sgd = optax.inject_hyperparams(optax.sgd)
    >>> tx = optim.trainable(optim.groups({"a": sgd(0.1)}, default=sgd(0.1)))
    >>> model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    >>> state = optim.adjust(tx.init(model), "a", learning_rate=0.5)
    >>> tx.update({"a": jnp.ones(1), "b": jnp.ones(1)}, state, model)[0]
    {'a': Array([-0.5], dtype=float32), 'b': Array([-0.1], dtype=float32)}

    A jitted step is not traced again. The hyperparameters of frozen parameters change too, so that you thaw them with
    the same rate.

    Args:
        state: any state of this library or of Optax.
        group: the key of one group of `optim.groups`, or "default"; `None` changes all groups.
        **hyperparams: the new values, in the shapes of the old ones; they may be traced. They are copied. Inside
            `optim.per_leaf` a number applies to all leaves and rows.

    Returns:
        The new state.

    Warns:
        UserWarning: steps leave a bfloat16 or float16 parameter as it was; see `TrainableState.stuck`.

    Raises:
        ValueError: there is no such group; there is no such hyperparameter in it, or a schedule sets it; the shape
            differs.
    """
    check_state(state)
    state = noticed(state)
    if isinstance(group, (int, float)) or is_array(group):
        raise TypeError(f"expected a group, or hyperparameters by name as in learning_rate=0.1; got {group!r:.40}")
    if isinstance(group, TrainableState):
        raise TypeError("the state comes first: optim.adjust(state, group, learning_rate=0.1)")
    name = None if group is None else group_name(group)
    groups, known, found = {each.name for each in groups_in(state)}, set[str](), set[str]()
    of_rows = {id(leaf) for leaf in jax.tree.leaves(nodes_of(PerLeafState, state))}

    def change(path: tuple[Any, ...], node: Any) -> Any:
        keys = [str(getattr(key, "name", getattr(key, "key", ""))) for key in path]
        above = {key for before, key in itertools.pairwise(keys) if before == "inner_states"}
        groups.update(above)
        if name is not None and name not in above:
            return node
        known.update(node.hyperparams)
        here = hyperparams.keys() & node.hyperparams.keys()
        found.update(here)
        new = {each: _as_before(node, each, hyperparams[each], of_rows) for each in here}
        return node._replace(hyperparams=node.hyperparams | new)

    changed = map_injected(change, state)
    if name is not None and name not in groups:
        raise ValueError(f"no group {name!r} in the state; it has {', '.join(map(repr, sorted(groups))) or 'none'}")
    for each in hyperparams.keys() - found:
        there = f"it has {', '.join(map(repr, sorted(known))) or 'none'}"
        where = "the state" if name is None else f"the state of group {name!r}"
        raise ValueError(
            f"no hyperparameter {each!r} in {where}; {there}. You can adjust only those that optax.inject_hyperparams "
            "keeps in the state: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)"
        )
    return changed


def _as_before(node: Any, name: str, value: Any, of_rows: set[int]) -> jax.Array:
    if name not in free_rates(node):
        raise ValueError(f"{name!r} follows a schedule, which would set it again in the next step; use a number there")
    if not (isinstance(value, (bool, int, float, complex)) or is_array(value)):
        raise TypeError(f"expected a number for {name}, got {describe(value)}")
    old, given = jnp.asarray(node.hyperparams[name]), jnp.result_type(value)
    is_for_all = jnp.shape(value) == () and id(node.hyperparams[name]) in of_rows
    if jnp.shape(value) != old.shape and not is_for_all:
        raise ValueError(f"expected {name} of shape {old.shape}, got shape {jnp.shape(value)}")
    wider = (jnp.complexfloating, jnp.inexact)
    if any(jnp.issubdtype(given, kind) and not jnp.issubdtype(old.dtype, kind) for kind in wider):
        raise ValueError(
            f"{name} is {old.dtype}, which cannot hold {value}; write the number in inject_hyperparams as a float"
        )
    # A new buffer, for traced values too, since the state may be donated.
    return jnp.array(jnp.broadcast_to(jnp.asarray(value, old.dtype), old.shape), copy=True)
