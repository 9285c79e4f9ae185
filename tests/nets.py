"""A small net and the rules that train it, over several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType

import treeparams as tp
from treeparams import optim, sharding

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
RULES = {
    "sgd": optax.sgd(0.05),
    "momentum": optax.sgd(0.05, momentum=0.9),
    "adam": ADAM,
    "clip by Optax": optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(1.0, momentum=0.9)),
    "clip": optax.chain(optim.clip_by_global_norm(0.1), ADAM),
    "if finite": optax.apply_if_finite(ADAM, 3),
    "every second step": optax.MultiSteps(
        optax.inject_hyperparams(optax.adam)(optax.linear_schedule(1e-2, 0.0, 10)), every_k_schedule=2
    ),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": optax.contrib.muon(1e-2),
    "lamb": optax.lamb(1e-2),
}
OF_MATRICES = ("adafactor", "muon", "lamb")
SPLIT = {"**": "split"}
MIXED = {"layers": "owned", "**": "whole"}


def started(tx=ADAM, rules=SPLIT, form="vector", mesh=None, *, of=loss, model=None, layout=None, **options):
    """The plan, the step and its arguments."""
    model = model_of() if model is None else model
    layout = LAYOUT if layout is None else layout
    plan = sharding.plan(layout, mesh or mesh_of(), rules, form=form)
    init, step = sharding.make_step(of, tx, plan, **options)
    return plan, step, *init(model)


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
