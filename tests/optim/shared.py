"""What several of these files use: rules, forms, small models, and steps in one program."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR

MOMENTUM = optax.sgd(0.1, momentum=0.9)
FORMS = optim.trainable, VECTOR, STACKS
forms = pytest.mark.parametrize("form", FORMS)
pair = lambda: {"a": jax.device_put(np.float32([1, 2])), "b": jax.device_put(np.float32([[3], [4]]))}
two = lambda: {name: jax.device_put(np.ones(2, np.float32)) for name in "ab"}
ones = lambda model: jax.tree.map(np.ones_like, model)


class Tied(eqx.Module):
    """A tie that the class knows."""

    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)
    other: Any = None


@functools.cache
def made(form, rule, trainable=None):
    """A vector and stacks try each of their transformations at the first `init`."""
    return form(rule, trainable)


@functools.partial(jax.jit, static_argnums=0)
def steps(tx, state, model, count, time=0):
    """The model and the state after some steps."""
    step = lambda i, carry: optim.step(tx, jax.tree.map(lambda x: jnp.sin(x + time + i), carry[0]), carry[1], carry[0])
    return jax.lax.fori_loop(0, count, step, (model, state))
