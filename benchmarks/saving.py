"""Saving a model of 250 MB to a file and loading it, next to the formats of others; two models that share all arrays.

The numbers are float32 of random bits, so that nothing can be compressed, in leaves of one size. Files lie where Python
puts temporary ones (the variable TMPDIR says where), which should be a local disk. Every save ends when the file and
its folder are on the disk (`fsync`), that of Orbax when it says so; what was written before is on the disk by then, and
the file of the round before is gone. Loads find the file in memory; they end with arrays in JAX. The yardstick of both
is `safetensors.flax`, which is given arrays by their paths and writes a file that then gets its name, as `saving.save`
does. A pass of `zlib.crc32` over the same bytes stands beside it, and is in no other column but those
of treeparams with checksums. A plan is made and applied, as it is to a file whose names are others. Of a load of 5000
leaves, `jax.device_put` takes three quarters of what safetensors takes for all of it, and reading takes the rest. What
this library adds is 10 us per leaf.

Anonymous memory (RssAnon, of Linux) is looked at from outside, in a fresh process for each load, into a tree of shapes.
The tied model has one array at two paths, and nine others. Many small arrays are of NumPy, so that the time is not
JAX's, and their yardstick is `safetensors.numpy`; Python looks for cycles meanwhile, which it does not in the other
tables. `tp.diff` compares two models that hold the same arrays, as after a change that changed nothing.
"""

import gc
import importlib.util
import multiprocessing
import operator
import os
import pathlib
import shutil
import tempfile
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import equinox as eqx
import jax
import numpy as np
import orbax.checkpoint
import safetensors.flax
import safetensors.numpy

import treeparams as tp
from treeparams import saving

from ._harness import Case, Median, Scale, Table, Verdict, as_ratios, at_most, in_time, interleave, sweep
from ._models import net
from ._programs import in_bytes

_SAFETENSORS, _TP, _UNCHECKED, _PLAN = "safetensors", "treeparams", "without checksums", "plan"
_CRC, _EQX, _ORBAX, _TORCH = "CRC-32", "equinox", "orbax", "torch"
_BOTH = f"{_SAFETENSORS} and {_CRC}"
_SLACK = 1.1
_FEW = 10  # leaves
_PER_LEAF = 7000  # bytes that a leaf takes besides its own
_MOST = 5  # rounds
_ROUNDS = dict.fromkeys((_EQX, _ORBAX, _TORCH), 2)  # nothing is claimed of these, and Orbax takes long


class Peer(NamedTuple):
    """A way to write a model to a path, and to read it into one like it."""

    save: Callable[[str, Any], None]
    load: Callable[[str, Any], Any]


def run(scale: Scale) -> Iterator[Table]:
    total, counts = (100_000, (4,)) if scale.is_smoke else (250_000_000, (10, 5000))
    fewer = scale._replace(rounds=min(scale.rounds, _MOST))
    saves, loads, memory = {}, {}, {}
    measured = [_TP] if scale.is_smoke else [_SAFETENSORS, _TP] if os.path.exists("/proc/self/status") else []
    with tempfile.TemporaryDirectory() as folder:
        free = shutil.disk_usage(folder).free
        if free < 8 * total:
            raise OSError(f"{folder} has {in_bytes(free)} free, and {in_bytes(8 * total)} are needed; set TMPDIR")
        for leaves in counts:
            model = _model(leaves, total)
            peers = [name for name in _PEERS if name != _ORBAX or leaves < 1000]  # 5000 take it a quarter of a minute
            paths = {name: os.path.join(folder, f"{leaves} leaves.{name}") for name in peers}
            saves[leaves] = _saves(model, paths, fewer)
            loads[leaves] = _loads(model, paths, fewer)
            memory[leaves] = {name: _memory(name, paths[name], leaves, total) for name in measured}
            for path in paths.values():
                _remove(path)
        tied = _tied(folder, total // 10)
        many = _many(folder, 100 if scale.is_smoke else 100_000, fewer)
    yield _save_table(saves, f"Files in {tempfile.gettempdir()}.")
    yield _load_table(loads)
    if measured:
        yield _memory_table(memory, total)
    yield tied
    yield many
    found = sweep(_comparisons, scale)
    at = (scale.sizes[-1],)
    yield found.table("Two models that share all arrays", [found.ratio_target("tp.diff", "jax.tree.map", 2, sizes=at)])


def _model(leaves: int, total: int) -> Any:
    random = np.random.default_rng(0)
    draw = lambda spec: np.frombuffer(random.bytes(spec.size * 4), np.float32)
    return jax.device_put(jax.tree.map(draw, _shapes(leaves, total)))


def _shapes(leaves: int, total: int) -> Any:
    each = jax.ShapeDtypeStruct((total // leaves // 4,), np.float32)
    return {"layers": [{"up": each, "down": each} for _ in range(leaves // 2)]}


# -- The peers ---------------------------------------------------------------------------------------------------------


def _by_name(model: Any) -> dict[str, jax.Array]:
    """The arrays by their paths, as in a file of treeparams; numbered, so that they are sorted as the leaves are."""
    leaves = jax.tree_util.tree_flatten_with_path(model)[0]
    return {f"{i:05}{jax.tree_util.keystr(path)}": leaf for i, (path, leaf) in enumerate(leaves)}


def _to_disk(path: str) -> None:
    for each in (path, os.path.dirname(path)):
        descriptor = os.open(each, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)


def _save_with_safetensors(path: str, model: Any) -> None:
    unfinished = f"{path}.unfinished"
    safetensors.flax.save_file(_by_name(model), unfinished)
    _to_disk(unfinished)
    os.replace(unfinished, path)  # so that a killed process leaves the old file whole
    _to_disk(path)


def _save_with_equinox(path: str, model: Any) -> None:
    with open(path, "wb") as file:
        eqx.tree_serialise_leaves(file, model)
    _to_disk(path)


def _load_with_equinox(path: str, like: Any) -> Any:
    with open(path, "rb") as file:
        return eqx.tree_deserialise_leaves(file, like)


def _save_with_orbax(path: str, model: Any) -> None:
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(path, model)
        checkpointer.wait_until_finished()


def _load_with_orbax(path: str, like: Any) -> Any:
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        return checkpointer.restore(path, like)


def _save_with_torch(path: str, model: Any) -> None:
    import torch

    torch.save({name: torch.from_dlpack(leaf) for name, leaf in _by_name(model).items()}, path)
    _to_disk(path)


def _load_with_torch(path: str, like: Any) -> Any:
    import torch

    tensors = torch.load(path, weights_only=True)
    return jax.device_put({name: tensor.numpy() for name, tensor in tensors.items()})


_PEERS = {
    _SAFETENSORS: Peer(_save_with_safetensors, lambda path, like: safetensors.flax.load_file(path)),
    _TP: Peer(saving.save, saving.load),
    _EQX: Peer(_save_with_equinox, _load_with_equinox),
    _ORBAX: Peer(_save_with_orbax, _load_with_orbax),
}
if importlib.util.find_spec(_TORCH):
    _PEERS[_TORCH] = Peer(_save_with_torch, _load_with_torch)


# -- Seconds -----------------------------------------------------------------------------------------------------------


def _saves(model: Any, paths: Mapping[str, str], scale: Scale) -> dict[str, float]:
    def saving_by(name: str) -> Case:
        return Case(
            lambda _: _PEERS[name].save(paths[name], model), lambda: prepare(paths[name]), _ROUNDS.get(name, _MOST)
        )

    def prepare(path: str) -> None:
        _remove(path)
        os.sync()  # or this save would wait for what the one before has left to be written

    return _medians({name: saving_by(name) for name in paths}, model, scale)


def _loads(model: Any, paths: Mapping[str, str], scale: Scale) -> dict[str, float]:
    def loading_by(load: Callable[[str, Any], Any], name: str) -> Case:
        _check_same(load(paths[name], model), model)
        return Case(lambda: jax.block_until_ready(load(paths[name], model)), rounds=_ROUNDS.get(name, _MOST))

    os.sync()
    cases = {name: loading_by(_PEERS[name].load, name) for name in paths}
    cases[_UNCHECKED] = loading_by(lambda path, like: saving.load(path, like, checksum=False), _TP)
    cases[_PLAN] = loading_by(lambda path, like: saving.plan(path, like)(path), _TP)
    return _medians(cases, model, scale)


def _medians(cases: Mapping[str, Case], model: Any, scale: Scale) -> dict[str, float]:
    crc = Case(lambda: [zlib.crc32(np.asarray(leaf)) for leaf in jax.tree.leaves(model)], rounds=_MOST)
    found = interleave({_SAFETENSORS: cases[_SAFETENSORS], _CRC: crc, **cases}, scale)  # both on a quiet disk
    return {name: timing.median for name, timing in found.items()}


def _check_same(loaded: Any, model: Any) -> None:
    pairs = zip(jax.tree.leaves(loaded), jax.tree.leaves(model), strict=True)
    assert all(np.array_equal(*(np.asarray(each).view(np.uint32) for each in pair)) for pair in pairs)


def _remove(path: str) -> None:
    if os.path.isdir(path):
        shutil.rmtree(path)
    else:
        pathlib.Path(path).unlink(missing_ok=True)


def _both(row: Mapping[str, Any]) -> dict[str, float]:
    return {_BOTH: Median(row[_SAFETENSORS].samples + row[_CRC].samples)}


def _save_table(found: Mapping[int, Mapping[str, float]], where: str) -> Table:
    targets = []
    for leaves, row in found.items():
        targets.append(at_most(_SLACK, f"{leaves} leaves: save", row | _both(row), _TP, _BOTH))
    return _table("Save", found, [*targets, where])


def _load_table(found: Mapping[int, Mapping[str, float]]) -> Table:
    targets = []
    for leaves, row in found.items():
        unchecked, checked = (1.25, 1.2) if leaves > _FEW else (_SLACK, _SLACK)
        targets.append(at_most(unchecked, f"{leaves} leaves: load", row, _UNCHECKED, _SAFETENSORS))
        targets.append(at_most(checked, f"{leaves} leaves: load", row | _both(row), _TP, _BOTH))
    return _table("Load", found, targets)


def _table(title: str, found: Mapping[int, Mapping[str, float]], lines: Sequence[str | Verdict]) -> Table:
    names = list(next(iter(found.values())))
    rows = [[str(leaves), *as_ratios([row.get(name) for name in names], in_time)] for leaves, row in found.items()]
    return Table(title, ["leaves", *names], rows, lines)


# -- Bytes -------------------------------------------------------------------------------------------------------------


def _load_on_demand(orders: Connection, name: str, path: str, leaves: int, total: int) -> None:
    """Loads a file when told to; a small file first, which imports all."""
    with tempfile.TemporaryDirectory() as folder:
        small = os.path.join(folder, "small")
        _PEERS[name].save(small, _model(2, 1000))
        jax.block_until_ready(_PEERS[name].load(small, _shapes(2, 1000)))
    like = _shapes(leaves, total)
    gc.collect()
    orders.send("ready")
    orders.recv()
    loaded = jax.block_until_ready(_PEERS[name].load(path, like))
    orders.send("loaded")
    orders.recv()
    del loaded


def _memory(name: str, path: str, leaves: int, total: int) -> tuple[int, int]:
    """By how many bytes the anonymous memory of a process grows while a file is loaded, at most and at the end."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    ours, theirs = context.Pipe()
    process = context.Process(target=_load_on_demand, args=(theirs, name, path, leaves, total))
    process.start()
    theirs.close()
    assert ours.recv() == "ready"
    before = most = _anonymous(process.pid)
    ours.send("load")
    while not ours.poll(0.5e-3):
        most = max(most, _anonymous(process.pid))
    assert ours.recv() == "loaded"
    after = _anonymous(process.pid)
    ours.send("end")
    process.join()
    return max(most, after) - before, after - before


def _anonymous(process: int | None) -> int:
    status = pathlib.Path(f"/proc/{process}/status").read_text(encoding="ascii")
    return int(status.split("RssAnon:")[1].split()[0]) * 1024


def _memory_table(found: Mapping[int, Mapping[str, tuple[int, int]]], total: int) -> Table:
    names = list(next(iter(found.values())))
    rows, targets = [], []
    for leaves, row in found.items():
        for i, what in enumerate(("at most", "at the end")):
            rows.append([f"{leaves} leaves, {what}", *(f"{row[name][i] / total:.2f}x" for name in names)])
        ratio, allowed = row[_TP][0] / total, 1.01 + leaves * _PER_LEAF / total
        target = f"anonymous memory of load, {leaves} leaves <= {allowed:.2f}x the model"
        targets.append(Verdict(target, ratio <= allowed, f"{ratio:.3f}x"))
    return Table("Anonymous memory while loading, in sizes of the model", ["", *names], rows, targets)


def _tied(folder: str, total: int) -> Table:
    model = _model(10, total)
    model["head"] = model["layers"][0]["up"]
    sizes = {}
    for name, peer in _PEERS.items():
        path = pathlib.Path(folder, f"tied.{name}")
        peer.save(str(path), model)
        files = [path] if path.is_file() else filter(pathlib.Path.is_file, path.rglob("*"))
        sizes[name] = sum(each.stat().st_size for each in files) / total
    ratio = sizes[_TP]
    target = Verdict("the file of a tied model <= 1.001x its distinct bytes", ratio <= 1.001, f"{ratio:.5f}x")
    cells = [f"{size:.3f}x" for size in sizes.values()]
    title = "The file of 11 leaves of which two are one array, in sizes of the 10"
    return Table(title, ["", *sizes], [["on disk", *cells]], [target])


def _many(folder: str, count: int, scale: Scale) -> Table:
    model = {f"{i:06}": np.full(4, i, np.float32) for i in range(count)}
    paths = {name: os.path.join(folder, f"many.{name}") for name in (_SAFETENSORS, _TP)}

    def save_with_safetensors() -> None:
        safetensors.numpy.save_file(model, paths[_SAFETENSORS])
        _to_disk(paths[_SAFETENSORS])

    calls = {
        "save": (save_with_safetensors, lambda: saving.save(paths[_TP], model)),
        "load": (
            lambda: safetensors.numpy.load_file(paths[_SAFETENSORS]),
            lambda: saving.load(paths[_TP], model),
        ),
    }
    rows, targets = [], []
    for what, several in calls.items():
        cases = {name: Case(_collecting(call)) for name, call in zip(paths, several, strict=True)}
        found = {name: timing.median for name, timing in interleave(cases, scale).items()}
        rows.append([what, *as_ratios(list(found.values()), in_time)])
        limit = 2 if what == "save" else 2.25  # each is compared with its checksum, and with the leaf where it goes
        targets.append(at_most(limit, f"{count:,} arrays: {what}", found, _TP, _SAFETENSORS))
    return Table(f"{count:,} arrays of NumPy, of four numbers each", ["", *paths], rows, targets)


def _collecting(call: Callable[[], Any]) -> Callable[[], Any]:
    """A call during which Python looks for cycles, as it does where many objects are made."""

    def with_collector() -> Any:
        gc.enable()
        try:
            return call()
        finally:
            gc.disable()

    return with_collector


# -- What differs ------------------------------------------------------------------------------------------------------


def _comparisons(leaves: int) -> dict[str, Callable[[], Any]]:
    model = net(leaves)
    same = jax.tree.map(lambda leaf: leaf, model)
    assert not tp.diff(model, same)
    return {"jax.tree.map": lambda: jax.tree.map(operator.is_, model, same), "tp.diff": lambda: tp.diff(model, same)}
