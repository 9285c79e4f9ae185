"""Rules that look at matrices, over stacks (`optim.per_leaf`): an update, and the new parameters, of matrices of 64x64.

The yardstick is Optax leaf by leaf under `jax.jit`. Stacks take the rule by way of `optim.per_leaf`, all rows together
or one after another (`at_once=1`). `form="stacks"` takes the tree: it stacks parameters and gradients in each step. (In
a vector there are no matrices.) Steps donate their state. What is built within two seconds is built three times, in
turn, and the median counts.

Most of Muon is products of matrices. Two columns have these alone, five iterations of three products, of all matrices
at once and of one after another: XLA for CPU takes longer for a product of many small matrices than for one product
after another, so rows together cannot be faster than the first of these columns. Momentum, norm and the new parameters
come on top: row by row what they read is in the cache still, all together they are passes over megabytes.
"""

from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
import optax

import treeparams as tp
from treeparams import optim

from ._harness import Scale, Table, at_most
from ._steps import RATE, Loop, builds_and_steps, sweep_of_steps, update_of

_JAX, _STACKS, _ROW_BY_ROW, _STACKED = "jax.jit", "stacks", "stacks, row by row", "form='stacks'"
_AT_ONCE, _ONE_BY_ONE = "products at once", "products one by one"
_RULES = {"Muon": optax.contrib.muon(RATE), "Adafactor": optax.adafactor(RATE, min_dim_size_to_factor=32)}


def run(scale: Scale) -> Iterator[Table]:
    for rule in ("Adafactor",) if scale.is_smoke else _RULES:
        yield from _updates(rule, (2, 4) if scale.is_smoke else (200, 1000), scale)


def _updates(rule: str, sizes: tuple[int, int], scale: Scale) -> Iterator[Table]:
    makers, many = lambda leaves: _updating(rule, leaves), sizes[0]
    largest = dict.fromkeys((_JAX, _STACKED, _AT_ONCE, _ONE_BY_ONE) if rule == "Muon" else (_JAX, _STACKED), many)
    found = sweep_of_steps(makers, sizes, largest, scale, unchecked=makers(2))
    builds, steps = builds_and_steps(found.timings[many])
    what = f"{rule}, {many} leaves:"
    target = at_most(1 / 10, f"{what} build", builds, _STACKS, _JAX)
    yield found.firsts(f"{rule}: trace, lower, compile", [target], found.names)
    if rule == "Muon":
        pairs = {_STACKS: (1.6, _AT_ONCE), _ROW_BY_ROW: (1.3, _ONE_BY_ONE)}
        targets = [at_most(limit, f"{what} run time", steps, name, of) for name, (limit, of) in pairs.items()]
        targets.append(at_most(0.75, f"{what} run time", steps, _ROW_BY_ROW, _JAX))
    else:
        limits = {_STACKS: 1 / 2.5, _ROW_BY_ROW: 1 / 1.8}
        targets = [at_most(limit, f"{what} run time", steps, name, _JAX) for name, limit in limits.items()]
    targets.append(at_most(1, f"{what} run time", steps, _STACKS, _STACKED))
    yield found.table(f"{rule}: run time", targets)


def _updating(rule: str, leaves: int) -> dict[str, Callable[[], Loop]]:
    random, tx = np.random.default_rng(0), _RULES[rule]
    tree = jax.device_put([random.normal(size=(64, 64)).astype(np.float32) for _ in range(leaves)])

    def jitted(tx: optax.GradientTransformation, params: jax.Array | list[jax.Array]) -> Loop:
        return Loop(jax.jit(update_of(tx), donate_argnums=0), (tp.copy(params), tx.init(params)), params)

    made = {
        _JAX: lambda: jitted(tx, tree),
        _STACKS: lambda: jitted(optim.per_leaf(tx), tp.stack(tree)[0]),
        _ROW_BY_ROW: lambda: jitted(optim.per_leaf(tx, at_once=1), tp.stack(tree)[0]),
        _STACKED: lambda: jitted(optim.trainable(optim.per_leaf(tx), form="stacks"), tree),
    }
    if rule == "Muon":
        for name, through in {_AT_ONCE: jax.vmap, _ONE_BY_ONE: lambda f: lambda rows: jax.lax.map(f, rows)}.items():
            made[name] = lambda through=through: _products(through, jnp.stack(tree) / 64)
    return made


def _products(through: Callable, matrices: jax.Array) -> Loop:
    def iterations(x: jax.Array) -> jax.Array:
        for _ in range(5):
            square = x @ x.T
            x = 1.875 * x + (0.375 * square @ square - 1.25 * square) @ x  # stays orthogonal
        return x

    def step(matrices: jax.Array) -> tuple[jax.Array, jax.Array]:
        after = through(iterations)(matrices)
        return after, after[0, 0, 0]

    return Loop(jax.jit(step, donate_argnums=0), matrices)
