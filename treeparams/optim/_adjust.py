"""adjust: set hyperparameters between steps."""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import PyTree

from .._where import Where
from ._groups import GroupsState, label
from ._state import map_hyperparams

S = TypeVar("S")


def adjust(state: S, group: Where | None = None, **hyperparams: ArrayLike) -> S:
    """The state with other hyperparameters: those that `optax.inject_hyperparams` keeps in it.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> sgd = optax.inject_hyperparams(optax.sgd)
    >>> tx = optim.groups({"a": sgd(0.1), "**": sgd(0.1)})
    >>> model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    >>> state = optim.adjust(tx.init(model), "a", learning_rate=0.5)
    >>> tx.update(model, state, model)[0]
    {'a': Array([-0.5], dtype=float32), 'b': Array([-0.1], dtype=float32)}

    A jitted step is not traced again. What is frozen now is adjusted too, so that it has the same rate when thawed.

    Args:
        state: any state, of this library or of Optax.
        group: the key of one group of `optim.groups`; `None` is everywhere.
        **hyperparams: the new values, of the shapes they have; they may be traced.

    Returns:
        The new state.

    Raises:
        ValueError: no group of this name; no group has such a hyperparameter, or a schedule sets it; another shape.
    """
    known: set[str] = set()
    found: set[str] = set()

    def change(node: Any) -> Any:
        known.update(node.hyperparams)
        new = {name: value for name, value in hyperparams.items() if name in node.hyperparams}
        found.update(new)
        return node._replace(hyperparams=node.hyperparams | {k: _set(node, k, v) for k, v in new.items()})

    if group is None:
        state = map_hyperparams(change, state)
    else:
        state = _in_group(label(group), lambda part: map_hyperparams(change, part), state)
    unknown = [name for name in hyperparams if name not in found]
    if unknown:
        there = f"there are {', '.join(map(repr, sorted(known)))}" if known else "there are none"
        where = "the state" if group is None else f"the state of group {group!r}"
        raise ValueError(
            f"no hyperparameter {unknown[0]!r} in {where}; {there}. Only what optax.inject_hyperparams keeps can be "
            "adjusted: optax.inject_hyperparams(optax.sgd)(learning_rate=0.1)"
        )
    return state


def _set(node: Any, name: str, value: Any) -> Any:
    if name in getattr(node, "hyperparams_states", {}):
        raise ValueError(f"{name!r} follows a schedule, which would set it again in the next step; give a number there")
    old = jnp.asarray(node.hyperparams[name])
    if jnp.shape(value) != old.shape:
        raise ValueError(f"expected {name} of shape {old.shape}, got shape {jnp.shape(value)}")
    if not jnp.issubdtype(old.dtype, jnp.inexact) and jnp.issubdtype(jnp.result_type(value), jnp.inexact):
        raise ValueError(
            f"{name} is {old.dtype}, which does not hold {value}; write the number in inject_hyperparams as a float"
        )
    return jax.lax.full_like(old, value) if not old.shape else jnp.asarray(value, old.dtype)


def _in_group(name: str, f: Callable[[Any], Any], state: PyTree) -> PyTree:
    known: list[str] = []
    hits = 0

    def visit(node: Any) -> Any:
        nonlocal hits
        if not isinstance(node, GroupsState):
            return node
        known.extend(node.names.names)
        hits += node.names.names.count(name) > 0
        names = zip(node.names.names, node.states, strict=True)
        return node._replace(states=tuple(f(part) if each == name else descend(part) for each, part in names))

    def descend(part: Any) -> Any:
        return jax.tree.map(visit, part, is_leaf=lambda node: isinstance(node, GroupsState))

    state = descend(state)
    if not hits:
        raise ValueError(
            f"no group {name!r} in the state; there are {', '.join(map(repr, dict.fromkeys(known))) or 'none'}"
        )
    return state
