"""A function mapped over values, all at once or some at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._text import count_of


def mapped(f: Callable[[Any], Any], values: Any, chunk: int | None, what: str) -> Any:
    """`f` of each of the values, stacked.

    Args:
        f: of one value, a tree without the leading axis.
        values: a tree of arrays with one leading axis.
        chunk: how many at once; `None`: all.
        what: the values, in words.

    Raises:
        ValueError: `chunk` is no count.
    """
    return in_chunks(jax.vmap(f), values, chunk, what)


def in_chunks(together: Callable[[Any], Any], values: Any, chunk: int | None, what: str) -> Any:
    """The same of a function that takes some of the values at once."""
    length = len(jax.tree.leaves(values)[0])
    size = length if chunk is None else count_of("chunk", chunk, what)
    if size >= length:
        return together(values)
    # `jax.lax.map(..., batch_size=size)` does this too, but fails where a result has no elements.
    whole = length // size
    cut = jax.tree.map(lambda leaf: leaf[: whole * size].reshape(whole, size, *leaf.shape[1:]), values)
    done = jax.tree.map(lambda leaf: leaf.reshape(whole * size, *leaf.shape[2:]), jax.lax.map(together, cut))
    if whole * size == length:
        return done
    last = together(jax.tree.map(lambda leaf: leaf[whole * size :], values))
    return jax.tree.map(lambda *parts: jnp.concatenate(parts), done, last)
