"""The functions that take a model, each called with nothing else and returning arrays: for laws that hold for all."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import nested, optim


def loss(model: Any, x: Any = 1.0) -> Any:
    return jnp.mean(x) * sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf))


def stepped(form: Any) -> Any:
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9), form=form)
    return lambda model: jax.tree.leaves(optim.step(tx, tp.grad(loss)(model), tx.init(model), model))


# Those that say what they notice of ties.
VERBS = {
    "layout": lambda model: tp.layout(model).size,
    "layout of ties": lambda model: tp.layout(model, ties={}).size,
    "a where": lambda model: tp.trainables(model, "**"),
    "partition": lambda model: jax.tree.leaves(tp.partition(model)[0]),
    "ravel": lambda model: tp.ravel(model)[0],
    "stack": lambda model: tp.stack(model)[0],
    "grad": lambda model: jax.tree.leaves(tp.grad(loss)(model)),
    "value_and_grad": lambda model: tp.value_and_grad(loss)(model)[0],
    "accumulate": lambda model: tp.accumulate(loss, pieces=2)(model, np.ones(4, "f"))[0],
    "maptrainable": lambda model: jax.tree.leaves(tp.maptrainable(lambda leaf: 2 * leaf, model)),
    "mapreduce": lambda model: tp.mapreduce(jnp.sum, jnp.add, model, init=0.0),
    "biwalk": lambda model: [leaf for _, leaf, _ in tp.biwalk(model, {})],
    "project": lambda model: jax.tree.leaves(tp.project(model, {}, missing="zeros")),
    "replace": lambda model: jax.tree.leaves(tp.replace(model, {"**": jnp.negative})),
    "ema": lambda model: jax.tree.leaves(tp.ema(model, model, decay=0.5)),
    "summary": lambda model: tp.summary(model).totals["trained"].elements,
    "init": lambda model: jax.tree.leaves(optim.trainable(optax.sgd(1.0)).init(model)),
    "hvp": lambda model: jax.tree.leaves(nested.hvp(loss)(model, tp.partition(model)[0])),
}
OTHERS = {
    "copy": lambda model: jax.tree.leaves(tp.copy(model)),
    "Ema": lambda model: jax.tree.leaves(tp.Ema(model, 0.9).update(model).average),
    "untie": lambda model: jax.tree.leaves(tp.untie(model)),
    "jit": lambda model: jax.tree.leaves(tp.jit(tp.grad(loss))(model)),
    "reached": lambda model: tp.reached(loss)(model).size,
    "moved": lambda model: tp.moved(lambda model: tp.maptrainable(jnp.sin, model))(model).size,
    **{f"{form} step": stepped(form) for form in ("tree", "vector", "stacks")},
}
