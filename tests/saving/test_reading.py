"""Files that are read by name: by threads, past damage, with dtypes that few have; and what is no file."""

import json
import os
import re
import socket
import sys
import threading

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

import treeparams as tp
from treeparams import optim, saving

from ..zoo import ramp
from .test_faults import entry, write

# -- At one time -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_preadv", [True, False])
def test_threads_that_read_from_one_file_get_what_they_ask_for(tmp_path, monkeypatch, request, has_preadv):
    path, rounds = tmp_path / "m", 1000 if request.config.getoption("--long") else 10
    arrays = {f"w{i}": np.full(50 + i, i, np.float32) for i in range(8)}
    save_file(arrays, path)  # without checksums, so that another array would come in silence
    names, start, wrong = saving.names(path), threading.Barrier(8), []
    if not has_preadv:
        monkeypatch.delattr(os, "preadv")

    def read(first):
        start.wait()
        for i in range(first, first + 8 * rounds):
            name = f"w{i % 8}"
            if not np.array_equal(names[name], arrays[name]):
                wrong.append(name)

    threads = [threading.Thread(target=read, args=(i,)) for i in range(8)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert wrong == []


def test_a_read_that_is_interrupted_goes_on(tmp_path, monkeypatch):
    path, preadv = tmp_path / "m", os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:1000]], at))
    tree = {"small": ramp(3), "large": np.random.default_rng(0).random((30, 700))}
    saving.save(path, tree)
    for got in (saving.load(path, tree), saving.names(path)):
        assert all(np.array_equal(got[name], tree[name]) for name in tree)


# -- Damaged -----------------------------------------------------------------------------------------------------------


def test_each_array_that_is_read_is_compared_with_its_checksum(tmp_path):
    """Of a model, its optimiser's state and its average, of which one byte of each is another one."""
    path, model = tmp_path / "run", {"w": ramp(3), "v": ramp(2)}
    tx, average = optim.trainable(optax.sgd(0.1, momentum=0.9)), tp.Ema(model, decay=0.5)
    saving.save(path, {"model": model, "optimiser": tx.init(model), "average": average})
    data = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    said = json.loads(data[8:first])
    for name in ("model.w", "optimiser.runs.0.0.trace.w", "average.shadow.w"):
        data[first + said[name]["data_offsets"][0] + 3] ^= 0x40
    path.write_bytes(data)
    names, plan = saving.names(path), saving.plan(model, model)
    np.testing.assert_array_equal(names["model.v"], model["v"])  # one that is whole is read
    for name, read in [
        ("model.w", lambda: names["model.w"]),
        ("model.w", lambda: dict(names.below("model"))),
        ("model.w", lambda: saving.names(names, "model", transform={"*": jnp.negative})),
        ("average.shadow.w", lambda: saving.names(names, "average", rename={"shadow.*": "*"})),
        ("model.w", lambda: plan(names.below("model"))),
        ("optimiser.runs.0.0.trace.w", lambda: plan.state(names.below("optimiser"), like=tx.init(model))),
        ("average.shadow.w", lambda: plan.average(names.below("average"), like=average)),
    ]:
        with pytest.raises(ValueError, match=f"{re.escape(repr(str(path)))}.*{name!r} has another checksum than when"):
            read()


# -- Dtypes ------------------------------------------------------------------------------------------------------------

READ = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


def test_a_narrow_dtype_of_another_program_is_read(tmp_path):
    data = bytes(range(256))
    for dtype, its in READ.items():
        write(tmp_path / "m", {"w": entry(dtype, [2, 128], [0, 256])}, data)
        names = saving.names(tmp_path / "m")
        assert (names["w"].dtype, names.specs["w"].dtype) == (np.dtype(getattr(ml_dtypes, its)),) * 2
        assert names["w"].tobytes() == data
        like = {"w": jax.ShapeDtypeStruct((2, 128), its)}
        assert np.asarray(saving.plan(names, like)(names)["w"]).tobytes() == data
        saving.save(tmp_path / "ours", {"w": names["w"]})  # as bytes: earlier readers of the format lack it
        with safe_open(tmp_path / "ours", "np") as file:
            assert file.get_slice("w").get_dtype() == "U8"


@pytest.mark.parametrize("dtype", PACKED)
def test_a_packed_dtype_is_listed_and_its_array_is_not_read(tmp_path, dtype):
    path, size, model = tmp_path / "m", PACKED[dtype], {"v": jnp.ones(1)}
    write(path, {"w": entry(dtype, [2, 4], [0, size]), "v": entry(offsets=[size, size + 4])}, bytes(size + 4))
    names = saving.names(path)
    assert repr(names) == f"Names(w: {dtype}[2,4], v: float32[1])"
    np.testing.assert_array_equal(names["v"], [0.0])
    for read in (lambda: names["w"], lambda: saving.names(path, rename={"v": "u"})):
        with pytest.raises(ValueError, match=f"'w' of {re.escape(repr(str(path)))} .* it is {dtype}, which NumPy"):
            read()
    assert saving.plan(path, model, rename={"w": None})(path)["v"].tolist() == [0.0]
    assert dict(saving.names(path, rename={"w": None})) == {"v": np.zeros(1)}
    for transform in (None, {"w": jnp.negative}):
        with pytest.raises(ValueError, match=rf"'w' is {dtype}\[2,4\], which NumPy .*drop it, rename=\{{'w': None"):
            saving.plan(path, model | {"w": jnp.ones((2, 4))}, transform=transform)
    for shape, stop in (([3], 2), ([4], 4), ([8], size - 1)):
        write(path, {"w": entry(dtype, shape, [0, stop])}, bytes(stop))
        with pytest.raises(ValueError, match=f"'w' is {dtype} of shape .* in {stop} bytes"):
            saving.names(path)


# -- What is no file ---------------------------------------------------------------------------------------------------


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path, monkeypatch):
    tree, there = {"w": ramp(2)}, ["fifo", "link", "socket"]
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    # A save that is wrong must not replace `/dev/null` of this machine.
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("it is replaced"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path in [*(tmp_path / name for name in there), "/dev/null"]:
            calls = [lambda path: saving.save(path, tree), lambda path: saving.load(path, tree), saving.names]
            for call in [*calls, saving.metadata, lambda path: saving.plan(path, tree)]:
                with pytest.raises(ValueError, match=f"{re.escape(repr(str(path)))} is a FIFO, a socket or a device"):
                    call(path)
        assert sorted(os.listdir(tmp_path)) == there


# -- 64 bits -----------------------------------------------------------------------------------------------------------

LOST = [2**32 + 5, -(2**31) - 1, 1e300, -1e39, 1e-300, 5e-50, complex(1, 1e300), complex(np.inf, 1e39), 1e-60j]
KEPT = [2**31 - 1, 0.1, -0.0, np.nan, np.inf, 1e-40, complex(np.nan, np.inf), complex(np.inf, 3), complex(1e-40, 0)]
READS = [
    saving.load,
    lambda path, like: saving.plan(path, like)(path),
    lambda path, like: saving.plan(path, like, transform={"w": lambda array: array})(path),
]


def test_64_bits_that_32_cannot_hold_are_never_cut_in_silence(tmp_path):
    path = tmp_path / "m"
    for number, value in enumerate([*LOST, *KEPT]):
        array = np.array([0, value, 1])
        assert array.dtype.itemsize >= 8
        saving.save(path, {"w": array})
        with np.errstate(over="ignore"):
            want = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
        like = {"w": jax.ShapeDtypeStruct(want.shape, want.dtype)}
        for read in READS:
            if number >= len(LOST):
                assert np.asarray(read(path, like)["w"]).tobytes() == want.tobytes()
            else:
                with pytest.raises(ValueError, match=r"'w' has values that .* cannot hold; switch on jax_en"):
                    read(path, like)


def test_small_arrays_are_placed_together(tmp_path, monkeypatch):
    """In a third of the time of one after another. A large one does not wait for others, which would take memory."""
    path, put, together = tmp_path / "model.safetensors", jax.device_put, []
    model = {f"{i:03}": jnp.full(64, i, jnp.float32) for i in range(200)} | {"large": jnp.ones((2, 1 << 20))}
    saving.save(path, model)
    monkeypatch.setattr(jax, "device_put", lambda arrays, *args: together.append(len(arrays)) or put(arrays, *args))
    for tree in (saving.load(path, model), saving.plan(path, model)(path)):
        assert all(np.array_equal(tree[name], model[name]) for name in model)
    assert (sum(together), len(together) <= 4) == (2 * 201, True)
