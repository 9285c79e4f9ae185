"""The tables of mistakes: a row, what it is about, and the test of one."""

import functools
import types
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, sharding

from .zoo import filled, ramp

NEAREST = "selects nothing; nearest: 'layers"


class Tied(eqx.Module):
    embed: jax.Array
    head: jax.Array
    bias: jax.Array


@functools.cache
def things() -> Any:
    """What the rows are about; nothing in it is changed."""
    made: Any = types.SimpleNamespace()
    made.model, made.other = (filled(eqx.nn.MLP, 2, 1, width, 1) for width in (4, 5))
    made.x, shared = jax.device_put(np.ones((3, 2), np.float32)), ramp(3, 2)
    made.dict = {"w": ramp(2, 3), "b": ramp(3), "n": jnp.array(3)}
    made.tied = Tied(shared, shared, ramp(2))
    made.adam, made.sgd = optax.adam(1e-3), optax.sgd(0.1)
    made.tx, made.descent = optim.trainable(made.adam), optim.trainable(made.sgd)
    made.state = made.tx.init(made.model)
    made.grads = jax.device_put(jax.tree.map(np.ones_like, eqx.filter(made.model, eqx.is_array)))
    made.layout = tp.layout(made.model)
    made.params, made.rest = tp.partition(made.model)
    made.vector, made.back = tp.ravel(made.model)
    made.plan = sharding.plan(made.model, jax.make_mesh((1,), ("d",)), {"**": "split"})
    return made


def loss(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return jnp.mean(jax.vmap(model)(x) ** 2)


def value(model: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    return model(x)[0]


Row = tuple[str, Callable[[Any], object], type[Exception] | tuple[type[Exception], ...], str]
"""A mistake: its name, what is written, and what comes back, by its type and a pattern of its words."""


def check(row: Row) -> None:
    """Makes a mistake, and looks at what comes back."""
    _, call, error, words = row
    with pytest.raises(error, match=words):
        call(things())
