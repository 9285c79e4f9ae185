"""Steps that are called over and over, and models with which that leads somewhere."""

import functools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import treeparams as tp
from treeparams import optim

from ._harness import Median, Scale, Sweep, Timing, medians
from ._models import Net, net, nnx_net
from ._programs import unburdened

WIDTH = 8
RATE = 1e-3
IN_A_ROW = 10  # a first step after one of another library finds cold caches, and can take three times as long
_KEPT, _BATCH = 0.01, 8


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

    def __call__(self) -> Any:
        self.state, result = self.step(self.state, *self.args)
        return jax.block_until_ready(result)

    def build(self) -> float:
        """Seconds for tracing, lowering and compiling, of which the first call finds the result."""
        with unburdened():
            start = time.perf_counter()
            self.compiled = self.lower(self.state, *self.args).compile()
            return time.perf_counter() - start

    def cost(self) -> Mapping[str, float]:
        """XLA's own figures of the program that was built."""
        return getattr(self.compiled, "compiled", self.compiled).cost_analysis()  # Equinox and Flax wrap it


def check_losses(loops: Mapping[str, Loop], rtol: float = 1e-4) -> None:
    """All take the same steps, and these lead somewhere.

    Raises:
        AssertionError: they do not.
    """
    losses = {name: [float(loop()) for _ in range(4)] for name, loop in loops.items()}
    first = next(iter(losses.values()))
    for name, each in losses.items():
        assert np.allclose(each, first, rtol=rtol), f"{name}: {each}, not {first}"
    assert first[-1] < (1 - 1e-3) * first[0], f"the loss stays where it was: {first}"


Makers = Mapping[str, Callable[[], Loop]]
_SECONDS = 2  # what takes longer to build is built once


def measured(
    makers: Makers, scale: Scale, unchecked: Collection[str] = ()
) -> tuple[dict[str, Timing], dict[str, Loop]]:
    """Seconds to build each step and to take it, and the steps; all but some must come to the same losses."""
    builds: dict[str, list[float]] = {name: [] for name in makers}
    loops: dict[str, Loop] = {}
    for _ in range(1 if scale.is_smoke else 3):
        for name, make in makers.items():
            if max(builds[name], default=0) < _SECONDS:
                loops[name] = make()
                builds[name].append(loops[name].build())
    checked = {name: loop for name, loop in loops.items() if name not in unchecked}
    if checked:
        check_losses(checked)
    steps = medians(loops, scale, IN_A_ROW)
    return {name: Timing(Median(builds[name]), steps[name]) for name in makers}, loops


def sweep_of_steps(
    makers: Callable[[int], Makers], sizes: Sequence[int], largest: Mapping[str, int], scale: Scale, **options: Any
) -> Sweep:
    """The same for several sizes; some steps only up to a largest one, above which they take minutes to build."""
    timings = {}
    for size in sizes:
        chosen = {name: make for name, make in makers(size).items() if size <= largest.get(name, size)}
        timings[size], _ = measured(chosen, scale, **options)
    left = ", ".join(f"{name} above {most} leaves" for name, most in largest.items() if most < max(sizes))
    return Sweep(timings, [f"Not run: {left}."] if left else [])


def builds_and_steps(timings: Mapping[str, Timing]) -> tuple[dict[str, float], dict[str, float]]:
    """The seconds of both, by name."""
    return {name: each.first for name, each in timings.items()}, {name: each.median for name, each in timings.items()}


def arrays(leaves: int, width: int = WIDTH) -> list[jax.Array]:
    """Weight, bias, weight, bias ...: rotations and zeros.

    There still is a signal behind hundreds of such layers, and a gradient before them.
    """
    return jax.device_put([each.copy() for each in _numbers(leaves, width)])  # or what is donated were theirs


@functools.cache
def _numbers(leaves: int, width: int) -> list[np.ndarray]:
    random = np.random.default_rng(0)
    made = []
    for _ in range(leaves // 2):
        rotation = np.linalg.qr(random.normal(size=(width, width)))[0]
        made += [rotation.astype(np.float32), np.zeros(width, np.float32)]
    return made


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


# -- An update alone ---------------------------------------------------------------------------------------------------


def update_of(optimiser: optax.GradientTransformation) -> Callable[[Any, Any], tuple[Any, jax.Array]]:
    """A step that takes gradients as they are given: an update, and the new parameters."""

    def step(state: Any, grads: Any) -> tuple[Any, jax.Array]:
        params, moments = updated(optimiser, grads, *state)
        return (params, moments), jax.tree.leaves(moments)[0]  # the count

    return step


def updated(optimiser: optax.GradientTransformation, grads: Any, params: Any, moments: Any) -> tuple[Any, Any]:
    """Parameters and state after an update by plain Optax, or by what takes models."""
    if isinstance(optimiser, tp.types.ModelTransformation):
        return optim.step(optimiser, grads, moments, params)
    updates, after = optimiser.update(grads, moments, params)
    return optax.apply_updates(params, updates), after


# -- One step, for each library ----------------------------------------------------------------------------------------


class Task(NamedTuple):
    """What a step is to do: a mean squared error, its gradient, an update, maybe an average of the parameters."""

    leaves: int
    optimiser: optax.GradientTransformation
    averages: bool = False


def examples() -> tuple[jax.Array, jax.Array]:
    """What goes into the model, and what is to come out."""
    x = np.random.default_rng(1).normal(size=(_BATCH, WIDTH)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(np.roll(x, 1, axis=1))


def mean_error(out: jax.Array, y: jax.Array) -> jax.Array:
    """The loss."""
    return jnp.mean((out - y) ** 2)


def through(layers: Any, x: jax.Array) -> jax.Array:
    """What comes out of pairs of weight and bias."""
    for weight, bias in layers:
        x = jnp.tanh(x @ weight.T + bias)
    return x


def averaged(params: Any, average: Any, step: float) -> Any:
    """The average of `treeparams`, called as that of Optax."""
    return tp.ema(average, params, decay=1 - step)


def by_hand(
    task: Task, loss: Callable, params: Any, average_of: Callable, *context: Any, batch: tuple[jax.Array, ...] = ()
) -> Loop:
    """Plain JAX and Optax over parameters of any form; the loss takes them, the context and the batch."""

    def step(state: Any, *args: Any) -> tuple[Any, jax.Array]:
        params, moments, average = state
        value, grads = jax.value_and_grad(loss)(params, *args)
        updates, moments = task.optimiser.update(grads, moments, params)
        params = optax.apply_updates(params, updates)
        return (params, moments, average_of(params, average, _KEPT) if task.averages else None), value

    state = params, task.optimiser.init(params), tp.copy(params) if task.averages else None
    return Loop(jax.jit(step, donate_argnums=0), state, *context, *(batch or examples()))


def with_tree(task: Task) -> Loop:
    """The same of the tree of `tp.partition`."""
    params, rest = tp.partition(model(task.leaves))
    return by_hand(task, lambda params, rest, x, y: mean_error(tp.combine(params, rest)(x), y), params, averaged, rest)


def with_equinox(task: Task) -> Loop:
    """Equinox passes its model."""

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
        model, moments, average = state
        value, grads = eqx.filter_value_and_grad(lambda model: mean_error(model(x), y))(model)
        updates, moments = task.optimiser.update(grads, moments, eqx.filter(model, eqx.is_inexact_array))
        model = eqx.apply_updates(model, updates)
        return (model, moments, optax.incremental_update(model, average, _KEPT) if task.averages else None), value

    start = model(task.leaves)
    average = tp.copy(start) if task.averages else None
    state = start, task.optimiser.init(eqx.filter(start, eqx.is_inexact_array)), average
    return filtered(eqx.filter_jit, step, state, *examples())


def filtered(jit: Callable, step: Callable[..., tuple[Any, jax.Array]], state: Any, *args: Any) -> Loop:
    """A loop of a step that is jitted by Equinox's way of it, or one like it, and donates its state."""
    jitted = jit(lambda args, state: step(state, *args), donate="all-except-first")
    swapped = lambda f: lambda state, *args: f(args, state)
    return Loop(swapped(jitted), state, *args, lower=swapped(jitted.lower))


def with_nnx(task: Task) -> Loop:
    """Flax passes its model and changes it in place."""

    def loss(model: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return mean_error(through([(layer.weight[...], layer.bias[...]) for layer in model.layers], x), y)

    def step(model: Any, optimiser: Any, average: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        value, grads = nnx.value_and_grad(loss)(model, x, y)
        optimiser.update(model, grads)
        if task.averages:
            nnx.update(average, optax.incremental_update(nnx.state(model), nnx.state(average), _KEPT))
        return value

    online = nnx_model(task.leaves)
    average = nnx_model(task.leaves) if task.averages else None
    state = online, nnx.Optimizer(online, task.optimiser, wrt=nnx.Param), average
    jitted = nnx.jit(step, donate_argnums=(0, 1, 2))
    call = lambda state, *args: (state, jitted(*state, *args))  # it mutates what it is given
    return Loop(call, state, *examples(), lower=lambda state, *args: jitted.lower(*state, *args))
