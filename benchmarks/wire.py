"""Parameters as messages between processes, next to a pickle of the model, a buffer for each array, and safetensors.

To send ends with bytes, of all arrays or of each. To receive ends with arrays of JAX in buffers of their own. Models
are of random numbers in leaves of one size, 64 MB of float32 or 32 MB of bfloat16 together. The yardstick of both is a
copy of the same bytes - to `bytes`, or to an array of NumPy - and one pass of `zlib.crc32` over them, which no other
column has but those of treeparams. As a vector, parameters come as one array. As a tree they come as arrays of JAX,
each of which takes it as long to make as a copy of some 100 kB. `safetensors.flax.load` does not know bfloat16. Each
parameter costs some 2 us whatever its size. Where memory is fast, and the copy takes 27 ms, that is a third of it to
receive 4000. At half the bytes, and half the time of the yardstick, twice its time is allowed.

Changes are of a network of 1,000 by 1,000 weights in each of three layers, trained by Adam in float32 and sent in
bfloat16 after each step. Other encodings of which elements have changed stand beside that of treeparams: a bit for each
element, and `zlib` (level 1) of the exclusive or.
"""

import math
import pickle
import statistics
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.flax

import treeparams as tp
from treeparams import saving
from treeparams.saving import _message as message

from ._harness import Case, Scale, Table, Verdict, as_ratios, in_time, sweep

_COPY, _PICKLE, _APART, _SAFETENSORS = "copy and CRC-32", "pickle", "an array each", "safetensors"
_TREE, _VECTOR = "treeparams, tree", "treeparams, vector"
_CLAIMED, _CLAIMED_ROUNDS = (_COPY, _PICKLE, _VECTOR), 3
_SLACK = {"float32": {"Send": 1.2, "Receive": 1.45}, "bfloat16": {"Send": 2, "Receive": 2}}
_OF_PICKLE = {"Send": 1 / 1.5, "Receive": 1 / 5.5}


def run(scale: Scale) -> Iterator[Table]:
    elements, sizes = (40_000, (10, 20)) if scale.is_smoke else (16_000_000, (10, 4000))
    # The bytes are the same, however many leaves. New pages for so many take longer in one round than in another.
    scale = scale._replace(sizes=sizes, patience=math.inf, rounds=scale.rounds * _CLAIMED_ROUNDS)
    for dtype in (jnp.float32, jnp.bfloat16):
        name = jnp.dtype(dtype).name
        for verb, make in (("Send", _sends), ("Receive", _receives)):
            cases = lambda leaves, make=make, dtype=dtype: _in_rounds(
                make(_model(leaves, elements, dtype)), scale, _CLAIMED if leaves == sizes[-1] else ()
            )
            found = sweep(cases, scale)
            targets = [
                found.ratio_target(_VECTOR, _COPY, _SLACK[name][verb], sizes=(sizes[1],)),
                found.ratio_target(_VECTOR, _PICKLE, _OF_PICKLE[verb], sizes=sizes[-1:]),
            ]
            yield found.table(f"{verb} {name}", targets)
    yield _steps(60 if scale.is_smoke else 1000, scale)
    yield _encodings(10_000 if scale.is_smoke else 4_000_000, scale)


def _in_rounds(calls: Mapping[str, Callable[[], Any]], scale: Scale, claimed: Collection[str]) -> dict[str, Case]:
    """All that is claimed of in all rounds, the others in fewer."""
    fewer = scale.rounds // _CLAIMED_ROUNDS
    return {name: Case(call, rounds=scale.rounds if name in claimed else fewer) for name, call in calls.items()}


def _model(leaves: int, elements: int, dtype: Any) -> list[jax.Array]:
    random = np.random.default_rng(0)
    return [jnp.asarray(random.random(elements // leaves, np.float32), dtype) for _ in range(leaves)]


def _by_name(model: list[jax.Array]) -> dict[str, jax.Array]:
    return {f"{i:05}": leaf for i, leaf in enumerate(model)}


def _sends(model: list[jax.Array]) -> Mapping[str, Callable[[], Any]]:
    vector, restructure = tp.ravel(model)
    message = saving.dumps(vector, restructure, version=1)
    return {
        _COPY: lambda: (bytes(memoryview(message)[1:]), zlib.crc32(message)),
        _PICKLE: lambda: pickle.dumps(model),
        _APART: lambda: [np.asarray(leaf).tobytes() for leaf in model],
        _SAFETENSORS: lambda: safetensors.flax.save(_by_name(model)),
        _TREE: lambda: saving.dumps(model, version=1),
        _VECTOR: lambda: saving.dumps(vector, restructure, version=1),
    }


def _receives(model: list[jax.Array]) -> Mapping[str, Callable[[], Any]]:
    vector, restructure = tp.ravel(model)
    message, tree = saving.dumps(vector, restructure, version=1), saving.dumps(model, version=1)
    pickled, named = pickle.dumps(model), safetensors.flax.save(_by_name(model))
    apart, leaf = [np.asarray(leaf).tobytes() for leaf in model], model[0]
    cases = {
        _COPY: lambda: (np.frombuffer(message, np.uint8).copy(), zlib.crc32(message)),
        _PICKLE: lambda: jax.block_until_ready(pickle.loads(pickled)),
        _APART: lambda: jax.block_until_ready([jnp.array(np.frombuffer(each, leaf.dtype)) for each in apart]),
        _SAFETENSORS: lambda: jax.block_until_ready(list(safetensors.flax.load(named).values())),
        _TREE: lambda: jax.block_until_ready(saving.loads(tree, model)),
        _VECTOR: lambda: jax.block_until_ready(saving.loads(message, vector, restructure)),
    }
    if leaf.dtype == jnp.bfloat16:
        del cases[_SAFETENSORS]
    return cases


# -- Changes -----------------------------------------------------------------------------------------------------------


def _steps(width: int, scale: Scale) -> Table:
    rates, rows = (1e-6, 1e-5, 1e-4, 1e-3), []
    keys = jax.random.split(jax.random.key(0), 5)
    weights = [jax.random.normal(key, (width, width)) / width**0.5 for key in keys[:3]]
    inputs, wanted = (jax.random.normal(key, (256, width)) for key in keys[3:])

    def loss(weights: list[jax.Array]) -> jax.Array:
        out = inputs
        for weight in weights:
            out = jnp.tanh(out @ weight)
        return jnp.mean((out - wanted) ** 2)

    for rate in rates:
        rule = optax.adam(rate)

        @jax.jit
        def step(weights: Any, state: Any, rule: Any = rule) -> Any:
            updates, state = rule.update(jax.grad(loss)(weights), state)
            return optax.apply_updates(weights, updates), state

        now, state, sent = weights, rule.init(weights), []
        for _ in range(3 if scale.is_smoke else 12):
            now, state = step(now, state)
            sent.append([weight.astype(jnp.bfloat16) for weight in now])
        (before, restructure), (after, _) = map(tp.ravel, sent[-2:])
        changed = float(jnp.mean(before != after))
        whole = saving.dumps(after, restructure, version=2)
        message = saving.dumps(after, restructure, version=2, since=(1, before))
        seconds = {
            "whole": _median(lambda after=after, of=restructure: saving.dumps(after, of, version=2)),
            "change": _median(
                lambda after=after, of=restructure, before=before: saving.dumps(after, of, version=2, since=(1, before))
            ),
            "read": _median(lambda message=message, of=restructure, before=before: saving.loads(message, before, of)),
        }
        bytes_and_share = [f"{len(message):,}", f"{len(message) / len(whole):.3f}"]
        rows.append([f"{rate:g}", f"{changed:.2%}", *bytes_and_share, *as_ratios(list(seconds.values()), in_time)])
    header = [
        "rate",
        "elements that change",
        "bytes",
        "of the whole",
        "send the whole",
        "send the change",
        "receive it",
    ]
    is_met = all(float(row[3]) <= 1 for row in rows)
    return Table(
        "A step of Adam, in bfloat16",
        header,
        rows,
        [Verdict("a change <= 1x the whole, in bytes", is_met, ", ".join(row[3] for row in rows))],
    )


def _median(call: Callable[[], Any]) -> float:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        jax.block_until_ready(call())
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def _encodings(elements: int, scale: Scale) -> Table:
    random, rows = np.random.default_rng(0), []
    for dtype in ("uint16", "uint32"):
        itemsize = np.dtype(dtype).itemsize
        before = random.integers(0, 1 << 8 * itemsize, elements, dtype)
        for share in (0.007, 0.02, 0.06, 0.18):
            differs = random.random(elements) < share
            after = np.where(differs, before ^ random.integers(1, 8, elements, dtype), before)
            old, new = before.view(np.uint8), after.view(np.uint8)

            def ours(old: Any = old, new: Any = new, itemsize: int = itemsize) -> int:
                rows = message._rows_of(old, new, itemsize)
                return old.size if rows is None else rows.size

            def mask(before: Any = before, after: Any = after) -> int:
                differs = before != after
                return np.packbits(differs).size + after[differs].nbytes

            def compressed(old: Any = old, new: Any = new) -> int:
                return len(zlib.compress(old ^ new, 1))

            cells = [f"{call() / old.size:.3f}, {in_time(_median(call))}" for call in (ours, mask, compressed)]
            rows.append([f"{itemsize} bytes, {share:.1%}", *cells])
    header = ["elements, and share that changes", "rows", "bit mask", "zlib of the exclusive or"]
    return Table(f"Encodings of {elements:,} elements: size relative to the whole, time", header, rows)
