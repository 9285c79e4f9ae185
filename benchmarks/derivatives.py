"""Derivatives of a net whose parameters are one vector, but for its gradient (that is `restructure`).

Nets, batch and columns are those of `restructure`. Each program is built from nothing. Two builds of one program differ
in run time, by where their code and buffers lie, so vectors are built twice, and the mean of both counts; of 100
leaves `ravel_pytree` is built once, since that takes many times as long. Of 1000 leaves it takes half a minute to build
each, so they were timed once, and are not in the table: 0.81x of `ravel_pytree` for `jvp`, 1.08x (0.93 to 1.17) for
`jvp` of `grad`, 0.96x for `grad` of `grad`, 0.90x for `vmap` of `grad`.
"""

import statistics
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ._harness import Median, Scale, Table, as_ratios, at_most, in_time, medians
from ._programs import build, until_done
from .restructure import losses

_TREE, _TP, _RAVEL = _COLUMNS = "tree", "restructure", "ravel_pytree"
_TWICE = 10  # leaves of which peers are built twice too


def run(scale: Scale) -> Iterator[Table]:
    for leaves in (4,) if scale.is_smoke else (10, 100):
        yield _table(leaves, scale)


def _table(leaves: int, scale: Scale) -> Table:
    chosen = {name: each for name, each in losses(leaves).items() if name in _COLUMNS}
    cells, targets = [], []
    for what, (derivative, arguments) in DERIVATIVES.items():
        functions = {name: (derivative(loss), arguments(at)) for name, (loss, at) in chosen.items()}
        builds = {
            (name, i): build(f, *args)
            for i in range(1 if scale.is_smoke else 2)
            for name, (f, args) in functions.items()
            if not i or name == _TP or (name == _RAVEL and leaves <= _TWICE)
        }
        found = medians({key: until_done(each.call, functions[key[0]][1]) for key, each in builds.items()}, scale)
        times = {name: _mean([found[key] for key in found if key[0] == name]) for name in chosen}
        seconds = [statistics.mean(builds[key].build for key in builds if key[0] == name) for name in chosen]
        cells.append([f"{what}: trace, lower, compile", *as_ratios(seconds, in_time)])
        cells.append([f"{what}: run time", *as_ratios(list(times.values()), in_time)])
        targets.append(at_most(1.1, f"{leaves} leaves, {what}: run time", times, _TP, _RAVEL))
    return Table(f"{leaves} leaves", ["", *chosen], cells, targets)


def _mean(builds: list[Any]) -> Median:
    """The median of the rounds' means."""
    return Median(np.mean([each.samples for each in builds], axis=0))


def _square(tree: Any) -> jax.Array:
    return sum(jnp.sum(array**2) for array in jax.tree.leaves(tree))


def _stack(tree: Any) -> Any:
    return jax.tree.map(lambda array: jnp.stack([array] * 4), tree)


DERIVATIVES = {  # of a loss, and at what it is taken
    "jvp": (lambda f: lambda at, along: jax.jvp(f, (at,), (along,)), lambda at: (at, at)),
    "jvp of grad": (lambda f: lambda at, along: jax.jvp(jax.grad(f), (at,), (along,))[1], lambda at: (at, at)),
    "grad of grad": (lambda f: jax.grad(lambda at: _square(jax.grad(f)(at))), lambda at: (at,)),
    "vmap of grad over 4": (lambda f: jax.vmap(jax.grad(f)), lambda at: (_stack(at),)),
}
