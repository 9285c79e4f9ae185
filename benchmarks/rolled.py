"""A loop over layers that is found and rolled up (`tp.rolled`), next to the loop as it is, and to a scan by hand.

Value and gradient over stacks. The yardstick is `jax.jit` of the model as it is written, `restructure(stacks)`. A scan
by hand is `restructure.scan`. The residual net has 150 layers of 32x32 on a batch of 8, the transformer 24 blocks of 32
wide on 8 texts of 32 letters, with dropout, its embedding tied to its head. In the last table layers of two kinds come
in turn, so each round of the loop is two of them. Their rows lie in turn in one stack too, and are copied apart first.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp

import treeparams as tp

from ._harness import Scale, Table, at_most
from ._programs import built, rows, timed

_LOOP, _ROLLED, _SCAN = "the loop", "tp.rolled", "a scan by hand"


def run(scale: Scale) -> Iterator[Table]:
    small, keys = scale.is_smoke, jax.random.split(jax.random.key(0), 200)
    count, width = (6, 4) if small else (150, 32)
    layers = [_Residual(eqx.nn.Linear(width, width, key=key), 1 / count) for key in keys[:count]]
    yield _table(f"A residual net of {count} layers", layers, jnp.ones((8, width)), scale, 1 / 1.8)
    count, width, letters = (4, 8, 4) if small else (24, 32, 32)
    x = jax.random.normal(keys[-1], (8, letters, width))
    yield _table(f"A transformer of {count} blocks", [_Block(width, key) for key in keys[:count]], x, scale, 1 / 3)
    kinds = [
        _Gated(width, key) if i % 2 else _Residual(eqx.nn.Linear(width, width, key=key), 0.1)
        for i, key in enumerate(keys[: 2 * count])
    ]
    yield _table(f"{2 * count} layers of two kinds, in turn", kinds, jnp.ones((8, width)), scale, 1, is_alike=False)


class _Residual(eqx.Module):
    linear: eqx.nn.Linear
    scale: float

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return x + self.scale * jnp.tanh(self.linear(x))


class _Gated(eqx.Module):
    value: eqx.nn.Linear
    gate: eqx.nn.Linear

    def __init__(self, width: int, key: jax.Array) -> None:
        self.value, self.gate = [eqx.nn.Linear(width, width, key=each) for each in jax.random.split(key)]

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        return self.value(x) * jax.nn.sigmoid(self.gate(x))


class _Block(eqx.Module):
    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, key: jax.Array) -> None:
        attention, mlp = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=attention)
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=mlp)
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        normed = jax.vmap(self.norm)(x)
        return x + self.dropout(self.attention(normed, normed, normed) + jax.vmap(self.mlp)(normed), key=key)


class _Net(eqx.Module):
    embedding: jax.Array
    layers: list[Callable[..., Any]]

    def __call__(self, x: jax.Array, key: jax.Array) -> jax.Array:
        x = x @ self.embedding
        for layer, each in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True):
            x = layer(x, each)
        return x @ self.embedding.T


def _table(title: str, layers: list[Any], x: jax.Array, scale: Scale, limit: float, is_alike: bool = True) -> Table:
    width = x.shape[-1]
    stacks, restructure = tp.stack(_Net(jnp.eye(width), layers))
    keys = jax.random.split(jax.random.key(1), len(x))
    mean = lambda outs: jnp.mean(jnp.cos(outs))

    def loop(stacks: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
        return mean(jax.vmap(restructure(stacks))(x, keys))

    def scan(stacks: Any, x: jax.Array, keys: jax.Array) -> jax.Array:
        def forward(x: jax.Array, key: jax.Array) -> jax.Array:
            embedding, each = restructure.part(stacks, "embedding"), jax.random.split(key, len(layers))
            step = lambda x, layer, key: (layer(x, key), None)
            return restructure.scan(step, x @ embedding, stacks, "layers.*", each)[0] @ embedding.T

        return mean(jax.vmap(forward)(x, keys))

    losses = {_LOOP: loop, _ROLLED: tp.rolled(loop)} | ({_SCAN: scan} if is_alike else {})
    functions = {name: (jax.value_and_grad(loss), (stacks, x, keys)) for name, loss in losses.items()}
    programs = built(functions, 0 if scale.is_smoke else 6)
    times = timed(programs, functions, scale)
    of, slack = (_SCAN, 1.1) if is_alike else (_LOOP, 1.25)
    builds = {name: program.build for name, program in programs.items()}
    targets = [
        at_most(limit, f"{title}: build", builds, _ROLLED, _LOOP),
        at_most(slack, f"{title}: run time", times, _ROLLED, of),
    ]
    return Table(f"{title}: value and gradient", ["", *programs], rows(programs.values(), times.values()), targets)
