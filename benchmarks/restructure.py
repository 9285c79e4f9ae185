"""A net evaluated and differentiated from one vector.

Each layer has a weight of 16x16 and a bias of 16, the batch is 8, the loss is the sum of squares of what comes out. The
yardstick takes the arrays of the model as they are. `restructure` of `tp.ravel` cuts the vector with one kernel for all leaves of
a shape, the unraveling function of `ravel_pytree` with one each: it is `jax.lax.split` and a reshape. Every program is
built from nothing up to three times, in turn, for as long as that takes a few seconds; the median counts.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import SMOKE, Scale, Sweep, Table, Timing, as_ratios, fit_exponent, verdict
from ._models import net
from ._programs import Program, build, in_bytes, in_millions, rows, run_times

_TREE, _TP, _RAVEL, _SPLIT, _SLICES = "tree", "restructure", "ravel_pytree", "lax.split", "static slices"
_WIDTH, _BATCH = 16, 8
_SIZES = (10, 100, 1000, 3000)
_LARGEST = {_RAVEL: 1000, _SPLIT: 100, _SLICES: 100}
_NOTES = [
    f"{_RAVEL} was not run above 1000 leaves: compilation is quadratic in them and would take minutes.",
    f"{_SPLIT} was not run above 100 leaves: it is the program of {_RAVEL}.",
    f"{_SLICES} were not run above 100 leaves: the transpose of each is an addition of two whole vectors.",
]
_PATIENCE = 6  # seconds after which a program is not built again

Function = tuple[Callable[..., Any], tuple[Any, ...]]  # and its arguments


def run(scale: Scale) -> Iterator[Table]:
    built(_gradients(4), SMOKE)  # what JAX loads for its first program is nobody's cost
    programs, times = {}, {}
    for size in scale.sizes if scale.is_smoke else _SIZES:
        functions = {name: each for name, each in _gradients(size).items() if size <= _LARGEST.get(name, size)}
        programs[size] = built(functions, scale)
        times[size] = run_times(programs[size], {name: args for name, (_, args) in functions.items()}, scale)
    yield _build_table(programs)
    yield _run_table(times)
    yield _cost_table(programs)
    yield _derivatives(4 if scale.is_smoke else 200, scale)


def built(functions: Mapping[str, Function], scale: Scale) -> dict[str, Program]:
    """Each program as built in median time."""
    found: dict[str, list[Program]] = {name: [] for name in functions}
    for _, (name, (f, args)) in itertools.product(range(1 if scale.is_smoke else 3), functions.items()):
        if sum(program.build for program in found[name]) < _PATIENCE:
            found[name].append(build(f, *args))
    ordered = {name: sorted(programs, key=lambda program: program.build) for name, programs in found.items()}
    return {name: programs[(len(programs) - 1) // 2] for name, programs in ordered.items()}


def _gradients(leaves: int) -> dict[str, Function]:
    return {name: (jax.value_and_grad(loss), (at,)) for name, (loss, at) in _losses(leaves).items()}


def _losses(leaves: int) -> dict[str, tuple[Callable[[Any], jax.Array], Any]]:
    """The loss as a function of the model or of a vector, and at what."""
    model, x = net(leaves, _WIDTH), jnp.ones((_BATCH, _WIDTH))
    vector, restructure = tp.ravel(model)
    unravel = ravel_pytree(model)[1]
    arrays, treedef = jax.tree.flatten(model)
    shapes, sizes = [array.shape for array in arrays], [array.size for array in arrays]
    bounds = list(itertools.pairwise(np.cumsum([0, *sizes]).tolist()))

    def shaped(pieces: Sequence[jax.Array]) -> Any:
        return treedef.unflatten([piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    def loss_of(to_model: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
        return lambda at: jnp.sum(to_model(at)(x) ** 2)

    return {
        _TREE: (loss_of(lambda model: model), model),
        _TP: (loss_of(restructure), vector),
        _RAVEL: (loss_of(unravel), vector),
        _SPLIT: (loss_of(lambda v: shaped(jax.lax.split(v, sizes))), vector),
        _SLICES: (loss_of(lambda v: shaped([v[start:stop] for start, stop in bounds])), vector),
    }


# -- Value and gradient ------------------------------------------------------------------------------------------------


def _build_table(programs: Mapping[int, Mapping[str, Program]]) -> Table:
    found = Sweep(_timings(programs, lambda program: program.build), _NOTES if len(programs) > 2 else [])
    size = max(size for size, row in programs.items() if _RAVEL in row)  # the largest that all three ran at
    of_tree, of_ravel = found.ratios(_TP, _TREE)[size], found.ratios(_TP, _RAVEL)[size]
    tree = f"that of {_TREE} is {found.exponent(_TREE):.2f}, in the last step {found.exponent(_TREE, last=2):.2f}"
    targets = [
        verdict(f"{_TP} <= 1.6x {_TREE} at {size} leaves", of_tree <= 1.6, f"{of_tree:.2f}x"),
        verdict(f"{_TP} <= 1/5 of {_RAVEL} at {size} leaves", of_ravel <= 1 / 5, f"1/{1 / of_ravel:.1f}"),
        f"{found.growth_target(_TP)}; {tree}",
    ]
    return found.table("Value and gradient: trace, lower, compile", targets)


def _run_table(times: Mapping[int, Mapping[str, float]]) -> Table:
    found = Sweep(_timings(times, lambda seconds: seconds), [])
    ratios = {}
    for size, row in times.items():
        others = [row[name] for name in row if name not in {_TREE, _TP}]
        if others:
            ratios[size] = row[_TP] / min(others)
    worst = max(ratios, key=lambda size: ratios[size])
    explained = f"{ratios[worst]:.2f}x at {worst} leaves"
    targets = [
        verdict(f"{_TP} <= 1.1x the fastest of the other vectors", ratios[worst] <= 1.1, explained),
        found.ratio_target(_TP, _RAVEL, 1.1),
    ]
    return found.table("Value and gradient: run time", targets)


def _timings(found: Mapping[int, Mapping[str, Any]], seconds: Callable[[Any], float]) -> dict[int, dict[str, Timing]]:
    return {
        size: {name: Timing(seconds(each), seconds(each)) for name, each in row.items()} for size, row in found.items()
    }


def _cost_table(programs: Mapping[int, Mapping[str, Program]]) -> Table:
    names = list(programs[min(programs)])
    cells = []
    for what, field, unit in (("operations", "flops", in_millions), ("temporary memory", "temporary", in_bytes)):
        for size, row in programs.items():
            values = [getattr(row[name], field) if name in row else None for name in names]
            cells.append([f"{what}, {size} leaves", *as_ratios(values, unit)])
    worst = max(row[_TP].flops / row[_TREE].flops for row in programs.values())
    target = verdict(f"operations of {_TP} <= 1.001x {_TREE}", worst <= 1.001, f"{worst:.6f}x at most")
    lengths = {size: row[_TP].temporary for size, row in programs.items()}
    growth = f"The temporary memory of {_TP} is the leaves and their gradients; its growth is {fit_exponent(lengths):.2f}."
    return Table("Value and gradient: operations and memory", ["", *names], cells, [target, growth])


# -- Other derivatives -------------------------------------------------------------------------------------------------


def _derivatives(leaves: int, scale: Scale) -> Table:
    found = {name: each for name, each in _losses(leaves).items() if name in {_TREE, _TP, _RAVEL}}
    cells = []
    for what, derivative, arguments in (
        ("jvp", lambda f: lambda at, along: jax.jvp(f, (at,), (along,)), lambda at: (at, at)),
        ("jvp of grad", lambda f: lambda at, along: jax.jvp(jax.grad(f), (at,), (along,))[1], lambda at: (at, at)),
        ("grad of grad", lambda f: jax.grad(lambda at: _square(jax.grad(f)(at))), lambda at: (at,)),
        ("vmap of grad over 4", lambda f: jax.vmap(jax.grad(f)), lambda at: (_stack(at),)),
    ):
        functions = {name: (derivative(loss), arguments(at)) for name, (loss, at) in found.items()}
        programs = built(functions, scale)
        times = run_times(programs, {name: args for name, (_, args) in functions.items()}, scale)
        cells += [[f"{what}: {label}", *values] for label, *values in rows(programs.values(), times.values())[:2]]
    return Table(f"Other derivatives at {leaves} leaves", ["", *found], cells)


def _square(tree: Any) -> jax.Array:
    return sum(jnp.sum(array**2) for array in jax.tree.leaves(tree))


def _stack(tree: Any) -> Any:
    return jax.tree.map(lambda array: jnp.stack([array] * 4), tree)
