"""Steps that are called over and over, and models with which that leads somewhere."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from flax import nnx

from ._models import Net, net, nnx_net
from ._programs import unburdened

WIDTH = 8


class Loop:
    """A step called over and over, each time with the state that it gave: what it donates is gone.

    A call returns what the step returns beside its state, as soon as that is there, and with it all else. The state is
    not waited for, since looking through a tree of thousands of arrays takes longer than some steps.
    """

    def __init__(
        self, step: Callable[..., tuple[Any, jax.Array]], state: Any, *args: Any, lower: Callable | None = None
    ) -> None:
        self.step, self.state, self.args = step, state, args
        self.lower = lower or getattr(step, "lower", None)

    def __call__(self) -> jax.Array:
        self.state, result = self.step(self.state, *self.args)
        return result.block_until_ready()

    def build(self) -> float:
        """Seconds for tracing, lowering and compiling, of which the first call finds the result."""
        with unburdened():
            start = time.perf_counter()
            self.lower(self.state, *self.args).compile()
            return time.perf_counter() - start


def check_losses(loops: Mapping[str, Loop]) -> None:
    """All take the same steps, and these lead somewhere.

    Raises:
        AssertionError: they do not.
    """
    losses = {name: [float(loop()) for _ in range(4)] for name, loop in loops.items()}
    first = next(iter(losses.values()))
    for name, each in losses.items():
        assert np.allclose(each, first, rtol=1e-4), f"{name}: {each}, not {first}"
    assert first[-1] < (1 - 1e-3) * first[0], f"the loss stays where it was: {first}"


def arrays(leaves: int, width: int = WIDTH) -> list[jax.Array]:
    """Weight, bias, weight, bias ...: rotations and zeros.

    There still is a signal behind hundreds of such layers, and a gradient before them.
    """
    random = np.random.default_rng(0)
    made = []
    for _ in range(leaves // 2):
        rotation = np.linalg.qr(random.normal(size=(width, width)))[0]
        made += [rotation.astype(np.float32), np.zeros(width, np.float32)]
    return jax.device_put(made)


def model(leaves: int, width: int = WIDTH) -> Net:
    """A `Net` of these."""
    return jax.tree.unflatten(jax.tree.structure(net(leaves, width)), arrays(leaves, width))


def nnx_model(leaves: int) -> Any:
    """A Flax model of the same parameters."""
    made = iter(arrays(leaves))
    pairs = {i: {"weight": weight, "bias": bias} for i, (weight, bias) in enumerate(zip(made, made, strict=True))}
    found = nnx_net(leaves)
    state = nnx.state(found)
    nnx.update(found, jax.tree.unflatten(jax.tree.structure(state), jax.tree.leaves({"layers": pairs})))
    return found
