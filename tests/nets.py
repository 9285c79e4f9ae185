"""A small net, meshes of several devices, and what Optax alone does on one."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import treeparams as tp

from .zoo import first_devices

AUTO, EXPLICIT = AxisType.Auto, AxisType.Explicit


def mesh_of(count=4, kind=AUTO):
    return jax.make_mesh((count,), ("data",), axis_types=(kind,), devices=first_devices(count))


def two_axes(names, kind=AUTO):
    return jax.make_mesh((2, 2), names, axis_types=(kind, kind), devices=first_devices(4))


def model_of(dtype=jnp.float32):
    """256 parameters, 16 frozen ones, functions and names."""
    draw = np.random.default_rng(0)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) / 2, dtype)
    layers = [{"b": matrix(4), "u": matrix(4, 4), "w": matrix(4, 4)} for _ in range(4)]
    embed, out, scale = matrix(12, 4), matrix(4, 16), jnp.ones(16, dtype)
    return {"embed": embed, "f": jnp.tanh, "layers": layers, "name": "net", "out": out, "scale": scale}


LAYOUT = tp.layout(model_of(), freeze="scale")
X = np.random.default_rng(1).normal(size=(16, 12))
Y = np.random.default_rng(2).normal(size=(16, 16))
BATCH = (X.astype(np.float32), Y.astype(np.float32))


def loss(model, x, y):
    x = x @ model["embed"]
    for layer in model["layers"]:
        x = x + model["f"](x @ layer["w"] + layer["b"][None]) @ layer["u"]
    return jnp.mean((x @ model["out"] * model["scale"][None] - y) ** 2)


ADAM = optax.adam(1e-2)
SPLIT = {"**": "split"}


def by_optax(of, tx, params, batches):
    """The parameters after each step by Optax alone, on one device, and the values of `of(params, *batch)` there."""

    @jax.jit
    def step(params, state, batch):
        value, gradient = jax.value_and_grad(of)(params, *batch)
        gradient = jax.tree.map(jnp.conj, gradient)
        updates, state = optax.with_extra_args_support(tx).update(gradient, state, params, value=value)
        return optax.apply_updates(params, updates), state, value

    state, found = tx.init(params), []
    for batch in batches:
        params, state, value = step(params, state, batch)
        found.append((params, value))
    return tuple(zip(*found, strict=True))
