"""The forms on accelerators: programs for a TPU that is not there, compiled and not run, and times where a GPU is.

All other subjects are measured on CPU. A step is loss, gradient, clipping by the global norm and Adam, of nets of
layers of one width on a batch of 64; the yardstick is the tree of `tp.partition` under `jax.jit`, and what it donates
the other forms donate too. "Moved" are the bytes that a program reads from the main memory of the device and writes to
it, in sizes of the parameters: arrays as they are padded there, loops with their rounds. XLA's own `bytes accessed` has
the fast memory of the core in it too, and the body of a loop once. No step moves less than 6: parameters and both
moments are read and written.

A TPU pads the last axis of an array to 128 numbers and the one before it to 8, so a weight of 32x32 takes four times
its bytes at rest, and a vector takes its own. Compiling for TPU needs `pip install libtpu`, and no TPU.
"""

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

import treeparams as tp
from treeparams import optim

from ._harness import Scale, Table, Verdict, as_ratios, in_time
from ._programs import in_bytes
from ._steps import RATE, Loop, Makers, Task, arrays, averaged, by_hand, mean_error, measured, model
from ._tpu import ONE, OnTpu, compiled_for_one, has_compiler
from .derivatives import DERIVATIVES
from .losses import of_tpus
from .restructure import losses

_TREE, _VECTOR, _STACKS = "tree", "vector", "stacks"
_SCANNED, _VECTOR_SCANNED = "stacks, scanned", "vector, scanned"
_WHOLE_STEP = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(RATE))
_EXAMPLES = 64
Groups = Mapping[str, Callable[[], Makers]]
_CLAIMED = (_VECTOR, _SCANNED, "restructure")  # of the others the figures are for you to choose by
_SLACK = 1.3
_LIMITS = {"clip": 1.5}  # leaves of some MB wait in fast memory between norm and scaling, a vector does not


def run(scale: Scale) -> Iterator[Table]:
    sizes = ((4, 8),) if scale.is_smoke else ((20, 1024), (100, 256), (100, 32))
    leaves, width = sizes[0] if scale.is_smoke else (100, 256)
    is_gpu = jax.default_backend() == "gpu"
    many = ((1000, 32),) if is_gpu and not scale.is_smoke else ()
    groups: dict[str, Groups] = {
        "Whole steps": {f"{n} leaves, {w} wide": functools.partial(_steps, n, w) for n, w in (*sizes, *many)},
        f"Derivatives of `restructure`: {leaves} leaves, {width} wide": {
            name: functools.partial(_derivatives, name, leaves, width) for name in ("value and gradient", *DERIVATIVES)
        },
        f"Parts of a step: {leaves} leaves, {width} wide": {
            name: functools.partial(make, leaves, width) for name, make in _PARTS.items()
        },
    }
    for title, group in groups.items():
        if has_compiler() and not scale.is_smoke:
            yield _for_tpu(title, group)
        if is_gpu or scale.is_smoke:
            yield _as_run(title, group, scale)
    if has_compiler() or not is_gpu:
        yield of_tpus(scale)  # which says so where no compiler is


# -- Two kinds of tables -----------------------------------------------------------------------------------------------


def _for_tpu(title: str, group: Groups) -> Table:
    columns: dict[str, None] = {}
    found: dict[str, dict[str, OnTpu]] = {}
    for label, make in group.items():
        found[label] = {name: compiled_for_one(maker()) for name, maker in make().items()}
        columns |= dict.fromkeys(found[label])
    cells, targets = [], []
    for label, row in found.items():
        size = row[next(iter(row))].parameters  # of the yardstick's
        of = lambda what, row=row: [getattr(row[name], what) if name in row else None for name in columns]
        for words, what in {"moved": "moved", "temporary memory": "temporary", "at rest": "at_rest"}.items():
            cells.append([f"{label}: {words}", *("-" if it is None else f"{it / size:.2f}" for it in of(what))])
        cells.append([f"{label}: trace, lower, compile", *as_ratios(of("build"), in_time)])
        targets += _targets(label, {name: each.moved for name, each in row.items()})
    return Table(f"For a TPU ({ONE}): {title}", ["", *columns], cells, targets)


def _targets(label: str, moved: Mapping[str, float]) -> list[Verdict]:
    """What is asked of the forms that are for many leaves, next to the first one."""
    first, limit = next(iter(moved)), 1 if label.endswith(" 32 wide") else _LIMITS.get(label, _SLACK)
    ratios = {name: moved[name] / moved[first] for name in moved if name in _CLAIMED}
    return [
        Verdict(f"{label}: bytes moved of {name} <= {limit:g}x {first}", ratio <= limit, f"{ratio:.2f}x")
        for name, ratio in ratios.items()
    ]


def _as_run(title: str, group: Groups, scale: Scale) -> Table:
    columns: dict[str, None] = {}
    found, cells = {}, []
    for label, make in group.items():
        makers = make()
        timings, loops = measured(makers, scale, unchecked=makers)
        memory = {name: loop.compiled.memory_analysis().temp_size_in_bytes for name, loop in loops.items()}
        found[label] = timings, memory
        columns |= dict.fromkeys(timings)
    for label, (timings, memory) in found.items():
        of = lambda what, timings=timings: [
            getattr(timings[name], what) if name in timings else None for name in columns
        ]
        cells.append([f"{label}: run time", *as_ratios(of("median"), in_time)])
        cells.append([f"{label}: trace, lower, compile", *as_ratios(of("first"), in_time)])
        held = [in_bytes(memory[name]) if name in memory else "-" for name in columns]
        cells.append([f"{label}: temporary memory", *held])
    return Table(f"{jax.devices()[0].device_kind}: {title}", ["", *columns], cells)


# -- What is compiled --------------------------------------------------------------------------------------------------


def _steps(leaves: int, width: int) -> Makers:
    net, x = model(leaves, width), jnp.ones((_EXAMPLES, width))
    layer = lambda x, layer: (jnp.tanh(jax.vmap(layer)(x)), None)

    def whole(form: Any, restructure: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return mean_error(restructure(form)(x), y)

    def scanned(form: Any, restructure: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        return mean_error(restructure.scan(layer, x, form, "layers.*")[0], y)

    def maker(loss: Callable, make: Callable[[Any], tuple[Any, Any]]) -> Callable[[], Loop]:
        form, restructure = make(net)
        return lambda: by_hand(
            Task(leaves, _WHOLE_STEP), loss, tp.copy(form), averaged, restructure, batch=(x, jnp.roll(x, 1, axis=1))
        )

    params, rest = tp.partition(net)
    return {
        _TREE: maker(lambda params, rest, x, y: mean_error(tp.combine(params, rest)(x), y), lambda _: (params, rest)),
        _VECTOR: maker(whole, tp.ravel),
        _STACKS: maker(whole, tp.stack),
        _VECTOR_SCANNED: maker(scanned, tp.ravel),
        _SCANNED: maker(scanned, tp.stack),
    }


def _function(f: Callable, *args: Any) -> Callable[[], Loop]:
    """A function as a step that has no state."""
    return lambda: Loop(jax.jit(lambda _, *args: (None, f(*args))), None, *args)


def _derivatives(name: str, leaves: int, width: int) -> Makers:
    derive, at_what = DERIVATIVES.get(name, (jax.value_and_grad, lambda at: (at,)))
    return {
        each: _function(derive(loss), *at_what(at))
        for each, (loss, at) in losses(leaves, width).items()
        if each not in ("ravel_pytree", "lax.split")  # which are slow to build
    }


def _of_forms(call: Callable[[Any], tuple[Callable, tuple]], leaves: int, width: int) -> Makers:
    """The same of a tree, a vector and stacks."""
    net = model(leaves, width)
    forms = {_TREE: tp.partition(net)[0], _VECTOR: tp.ravel(net)[0], _STACKS: tp.stack(net)[0]}
    found = {}
    for name, form in forms.items():
        f, args = call(form)
        found[name] = _function(f, *args)
    return found


def _clip(form: Any) -> tuple[Callable, tuple]:
    return lambda grads: optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())[0], (form,)


def _average(form: Any) -> tuple[Callable, tuple]:
    return lambda average, params: tp.ema(average, params, decay=0.99), (form, tp.copy(form))


def _muon(leaves: int, width: int) -> Makers:
    tree, tx = arrays(leaves, width)[::2], optax.contrib.muon(RATE)

    def maker(tx: Any, params: Any) -> Callable[[], Loop]:
        return _function(lambda grads, state, params: tx.update(grads, state, params), params, tx.init(params), params)

    stacks = tp.stack(tree)[0]
    one_by_one = optim.per_leaf(tx, at_once=1)
    return {_TREE: maker(tx, tree), _STACKS: maker(optim.per_leaf(tx), stacks), "row by row": maker(one_by_one, stacks)}


_PARTS: dict[str, Callable[[int, int], Makers]] = {
    "clip": functools.partial(_of_forms, _clip),
    "EMA": functools.partial(_of_forms, _average),
    "Muon, matrices alone": _muon,
}
