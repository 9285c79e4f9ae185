"""Models of any number of leaves, made of ready arrays: initialisers would take longer than the benchmarks."""

import functools
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

try:
    import folx  # noqa: F401
    import lineax  # noqa: F401
    import orbax.checkpoint  # noqa: F401
    import paramax
    import quax  # noqa: F401
    import safetensors  # noqa: F401
    from flax import nnx
except ImportError as error:
    raise ImportError("the benchmarks compare with other libraries: pip install -e '.[bench]'") from error


PACKAGES = ("jax", "equinox", "optax", "flax", "folx", "lineax", "orbax-checkpoint", "paramax", "quax", "safetensors")


class Net(eqx.Module):
    """A stack of linear layers."""

    layers: list[eqx.nn.Linear]
    version: int = eqx.field(static=True, default=0)

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(x @ layer.weight.T + layer.bias)
        return x


def arrays(leaves: int, width: int = 2) -> list[jax.Array]:
    """Weight, bias, weight, bias ..., each with a buffer of its own."""
    shapes = [(width, width), (width,)] * (leaves // 2)
    scale = width**-0.5
    return jax.device_put([np.full(shape, scale, np.float32) for shape in shapes])


def net(leaves: int, width: int = 2) -> Net:
    """A `Net` with so many leaves, two per layer."""
    layers = [_linear(width)] * (leaves // 2)
    return jax.tree.unflatten(jax.tree.structure(Net(layers)), arrays(leaves, width))


@functools.cache
def _linear(width: int) -> eqx.nn.Linear:
    return eqx.nn.Linear(width, width, key=jax.random.key(0))


class _NnxLayer(nnx.Module):
    def __init__(self, weight: jax.Array, bias: jax.Array) -> None:
        self.weight = nnx.Param(weight)
        self.bias = nnx.Param(bias)


class _NnxNet(nnx.Module):
    def __init__(self, leaves: int) -> None:
        made = iter(arrays(leaves))
        layers = [_NnxLayer(weight, bias) for weight, bias in zip(made, made, strict=True)]
        self.layers = nnx.List(layers)


def nnx_net(leaves: int) -> Any:
    """A Flax model of the same parameters."""
    return _NnxNet(leaves)


def paramax_net(leaves: int) -> Net:
    """A `Net` whose first layer Paramax holds fixed."""
    return eqx.tree_at(lambda model: model.layers[0], net(leaves), replace_fn=paramax.non_trainable)


def is_non_trainable(node: Any) -> bool:
    """The `is_leaf` with which Paramax's documentation partitions."""
    return isinstance(node, paramax.NonTrainable)


class Recurrent(eqx.Module):
    """A number of a sequence, by a recurrent cell."""

    cell: eqx.nn.GRUCell
    head: jax.Array

    def __init__(self, width: int) -> None:
        self.cell = eqx.nn.GRUCell(4, width, key=jax.random.key(0))
        self.head = jnp.ones(width)

    def __call__(self, x: jax.Array) -> jax.Array:
        state, _ = jax.lax.scan(lambda state, each: (self.cell(each, state), None), jnp.zeros_like(self.head), x)
        return self.head @ state


class Attention(eqx.Module):
    """A number of a set of tokens, by one layer of attention."""

    attention: eqx.nn.MultiheadAttention
    head: eqx.nn.Linear

    def __init__(self, width: int) -> None:
        self.attention = eqx.nn.MultiheadAttention(4, width, key=jax.random.key(0))
        self.head = eqx.nn.Linear(width, "scalar", key=jax.random.key(1))

    def __call__(self, x: jax.Array) -> jax.Array:
        return jnp.mean(jnp.tanh(jax.vmap(self.head)(x + self.attention(x, x, x))))
