"""Value and gradient of a net whose parameters are one vector.

Each layer has a weight of 16x16 and a bias of 16, the batch is 8, the loss is the sum of squares of what comes out. The
yardstick takes the arrays of the model as they are. The `restructure` of `tp.ravel` cuts the vector with one kernel for
all leaves of a shape, the unraveling function of `ravel_pytree` with one each: it is `jax.lax.split` and a reshape.
Every program is built from nothing. `ravel_pytree` and `lax.split` are the same program: what their run times differ by
is where their code and buffers lie.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import treeparams as tp

from ._harness import Scale, Sweep, Table, Timing, Verdict, as_ratios
from ._models import net
from ._programs import Function, Program, built, in_bytes, in_millions, timed

_TREE, _TP, _RAVEL, _SPLIT = "tree", "restructure", "ravel_pytree", "lax.split"
_WIDTH, _BATCH = 16, 8
_SIZES = (10, 100, 1000)
_LARGEST = {_SPLIT: 100}
_NOTES = [f"{_SPLIT} was not run above 100 leaves: it is the program of {_RAVEL}."]


def run(scale: Scale) -> Iterator[Table]:
    built(_gradients(4), 0)  # what JAX loads for its first program is nobody's cost
    programs, times = {}, {}
    for size in (4, 16) if scale.is_smoke else _SIZES:
        functions = {name: each for name, each in _gradients(size).items() if size <= _LARGEST.get(name, size)}
        own = {name: functions.pop(name) for name in (_TREE, _TP)}
        programs[size] = built(own, 0 if scale.is_smoke else 6) | built(functions, 0)
        times[size] = timed(programs[size], own | functions, scale)
    yield _build_table(programs)
    yield _run_table(times)
    yield _cost_table(programs)


def _gradients(leaves: int) -> dict[str, Function]:
    return {name: (jax.value_and_grad(loss), (at,)) for name, (loss, at) in losses(leaves).items()}


def losses(leaves: int, width: int = _WIDTH) -> dict[str, tuple[Callable[[Any], jax.Array], Any]]:
    """The loss as a function of the model or of a vector, and at what."""
    model, x = net(leaves, width), jnp.ones((_BATCH, width))
    vector, restructure = tp.ravel(model)
    unravel = ravel_pytree(model)[1]
    arrays, treedef = jax.tree.flatten(model)
    shapes, sizes = [array.shape for array in arrays], [array.size for array in arrays]

    def shaped(pieces: Sequence[jax.Array]) -> Any:
        return treedef.unflatten([piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)])

    def loss_of(to_model: Callable[[Any], Any]) -> Callable[[Any], jax.Array]:
        return lambda at: jnp.sum(to_model(at)(x) ** 2)

    return {
        _TREE: (loss_of(lambda model: model), model),
        _TP: (loss_of(restructure), vector),
        _RAVEL: (loss_of(unravel), vector),
        _SPLIT: (loss_of(lambda v: shaped(jax.lax.split(v, sizes))), vector),
    }


# -- Value and gradient ------------------------------------------------------------------------------------------------


def _build_table(programs: Mapping[int, Mapping[str, Program]]) -> Table:
    found = Sweep(_timings(programs, lambda program: program.build), _NOTES if len(programs) > 2 else [])
    size = max(programs)
    of_tree, of_ravel = found.ratios(_TP, _TREE)[size], found.ratios(_TP, _RAVEL)[size]
    tree = f"that of {_TREE} is {found.exponent(_TREE):.2f}, in the last step {found.exponent(_TREE, last=2):.2f}"
    targets = [
        Verdict(f"{_TP} <= 1.6x {_TREE} at {size} leaves", of_tree <= 1.6, f"{of_tree:.2f}x"),
        Verdict(f"{_TP} <= 1/5 of {_RAVEL} at {size} leaves", of_ravel <= 1 / 5, f"1/{1 / of_ravel:.1f}"),
        f"{found.growth_target(_TP)}; {tree}",
    ]
    return found.table("Value and gradient: trace, lower, compile", targets)


def _run_table(times: Mapping[int, Mapping[str, float]]) -> Table:
    found = Sweep(_timings(times, lambda seconds: seconds), [])
    return found.table("Value and gradient: run time", [found.ratio_target(_TP, _RAVEL, 1.1)])


def _timings(found: Mapping[int, Mapping[str, Any]], seconds: Callable[[Any], float]) -> dict[int, dict[str, Timing]]:
    return {
        size: {name: Timing(seconds(each), seconds(each)) for name, each in row.items()} for size, row in found.items()
    }


def _cost_table(programs: Mapping[int, Mapping[str, Program]]) -> Table:
    names = list(programs[min(programs)])
    cells = []
    for size, row in programs.items():
        flops = [row[name].flops if name in row else None for name in names]
        cells.append([f"operations, {size} leaves", *as_ratios(flops, in_millions)])
    for size, row in programs.items():  # not as ratios: the tree has next to none, its gradient being its result
        memory = [in_bytes(row[name].temporary) if name in row else "-" for name in names]
        cells.append([f"temporary memory, {size} leaves", *memory])
    worst = max(row[_TP].flops / row[_TREE].flops for row in programs.values())
    target = Verdict(f"operations of {_TP} <= 1.001x {_TREE}", worst <= 1.001, f"{worst:.6f}x at most")
    explained = "In temporary memory the vectors have the leaves; the gradients of the tree are its result."
    return Table("Value and gradient: operations and memory", ["", *names], cells, [target, explained])
