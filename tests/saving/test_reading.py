"""Files that are read by name: by threads, past damage, with dtypes that few have; and what is no file."""

import itertools
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


@pytest.mark.parametrize("without", [[], ["preadv"], ["preadv", "pread"]], ids=["preadv", "pread", "seek"])
def test_threads_that_read_from_one_file_get_what_they_ask_for(tmp_path, monkeypatch, request, without):
    path, rounds = tmp_path / "m", 1000 if request.config.getoption("--long") else 10
    arrays = {f"w{i}": np.full(50 + i, i, np.float32) for i in range(8)}
    save_file(arrays, path)  # without checksums, so that another array would come in silence
    names, start, wrong = saving.names(path), threading.Barrier(8), []
    for each in without:
        monkeypatch.delattr(os, each)

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


@pytest.fixture(scope="module")
def damaged(tmp_path_factory):
    """A model, its optimiser's state and its average in a file, of which one byte of each is another one."""
    path = tmp_path_factory.mktemp("reading") / "run"
    model = {"w": ramp(3), "v": ramp(2)}
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9))
    trees = {"model": model, "optimiser": tx.init(model), "average": tp.Ema(model, decay=0.5)}
    saving.save(path, trees)
    data = bytearray(path.read_bytes())
    first = 8 + int.from_bytes(data[:8], "little")
    said = json.loads(data[8:first])
    for name in ("model.w", "optimiser.runs.0.0.trace.w", "average.shadow.w"):
        data[first + said[name]["data_offsets"][0] + 3] ^= 0x40
    path.write_bytes(data)
    return path, model, tx


DAMAGED = {
    "names": (lambda names, plan, tx: names["model.w"], "model.w"),
    "dict": (lambda names, plan, tx: dict(names.below("model")), "model.w"),
    "items": (lambda names, plan, tx: list(names.below("model").items()), "model.w"),
    "transform": (lambda names, plan, tx: saving.names(names, "model", transform={"*": jnp.negative}), "model.w"),
    "rename": (lambda names, plan, tx: saving.names(names, "average", rename={"shadow.*": "*"}), "average.shadow.w"),
    "plan": (lambda names, plan, tx: plan(names.below("model")), "model.w"),
    "state": (
        lambda names, plan, tx: plan.state(names.below("optimiser"), like=tx.init({"w": ramp(3), "v": ramp(2)})),
        "optimiser.runs.0.0.trace.w",
    ),
    "average": (
        lambda names, plan, tx: plan.average(
            names.below("average"), like=tp.Ema({"w": ramp(3), "v": ramp(2)}, decay=0.5)
        ),
        "average.shadow.w",
    ),
}


@pytest.mark.parametrize("case", DAMAGED)
def test_each_array_that_is_read_is_compared_with_its_checksum(damaged, case):
    path, model, tx = damaged
    read, name = DAMAGED[case]
    names = saving.names(path)
    np.testing.assert_array_equal(names["model.v"], model["v"])  # one that is whole is read
    with pytest.raises(ValueError, match=f"{re.escape(repr(str(path)))}.*{name!r} has another checksum than when it"):
        read(names, saving.plan(model, model), tx)


# -- Dtypes ------------------------------------------------------------------------------------------------------------

READ = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}
PACKED = {"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}


@pytest.mark.parametrize("dtype", READ)
def test_a_narrow_dtype_of_another_program_is_read(tmp_path, dtype):
    data = bytes(range(256))
    write(tmp_path / "m", {"w": entry(dtype, [2, 128], [0, 256])}, data)
    names = saving.names(tmp_path / "m")
    assert (names["w"].dtype, names.specs["w"].dtype) == (np.dtype(getattr(ml_dtypes, READ[dtype])),) * 2
    assert names["w"].tobytes() == data
    like = {"w": jax.ShapeDtypeStruct((2, 128), READ[dtype])}
    assert np.asarray(saving.plan(names, like)(names)["w"]).tobytes() == data
    saving.save(tmp_path / "ours", {"w": names["w"]})  # as bytes: earlier readers of the format lack it
    with safe_open(tmp_path / "ours", "np") as file:
        assert file.get_slice("w").get_dtype() == "U8"


@pytest.mark.parametrize("dtype", PACKED)
def test_a_packed_dtype_is_listed_and_its_array_is_not_read(tmp_path, dtype):
    path, size = tmp_path / "m", PACKED[dtype]
    write(path, {"w": entry(dtype, [2, 4], [0, size]), "v": entry(offsets=[size, size + 4])}, bytes(size + 4))
    names = saving.names(path)
    assert repr(names) == f"Names(w: {dtype}[2,4], v: float32[1])"
    np.testing.assert_array_equal(names["v"], [0.0])
    refused = [
        lambda: names["w"],
        lambda: dict(names),
        lambda: saving.names(path, rename={"v": "u"}),
    ]
    for read in refused:
        with pytest.raises(ValueError, match=f"'w' of {re.escape(repr(str(path)))} .* it is {dtype}, which NumPy"):
            read()
    model = {"v": jnp.ones(1)}
    assert saving.plan(path, model, rename={"w": None})(path)["v"].tolist() == [0.0]
    assert dict(saving.names(path, rename={"w": None})) == {"v": np.zeros(1)}
    for like, transform in (({"w": jnp.ones((2, 4))}, None), ({"w": jnp.ones((2, 4))}, {"w": jnp.negative})):
        with pytest.raises(ValueError, match=rf"'w' is {dtype}\[2,4\], which NumPy .*drop it, rename=\{{'w': None"):
            saving.plan(path, model | like, transform=transform)
    for shape, stop in (([3], 2), ([4], 4), ([8], size - 1)):
        write(path, {"w": entry(dtype, shape, [0, stop])}, bytes(stop))
        with pytest.raises(ValueError, match=f"'w' is {dtype} of shape .* in {stop} bytes"):
            saving.names(path)


# -- What is no file ---------------------------------------------------------------------------------------------------


@pytest.fixture
def irregular(tmp_path):
    """A FIFO, a socket, a device and a link to the first, and what each is."""
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        yield {
            tmp_path / "fifo": "a FIFO",
            tmp_path / "link": "a FIFO",
            tmp_path / "socket": "a socket",
            "/dev/null": "a character device",
        }


def test_what_is_no_file_is_neither_read_nor_replaced(irregular, tmp_path, monkeypatch):
    tree, before = {"w": ramp(2)}, sorted(os.listdir(tmp_path))
    calls = [
        lambda path: saving.save(path, tree),
        lambda path: saving.load(path, tree),
        saving.metadata,
        saving.names,
        lambda path: saving.plan(path, tree),
    ]
    # A save that is wrong must not replace `/dev/null` of this machine.
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("it is replaced"))
    for (path, kind), call in itertools.product(irregular.items(), calls):
        with pytest.raises(
            ValueError, match=f"{re.escape(repr(str(path)))} is {kind}, but arrays are read from and wr"
        ):
            call(path)
    assert sorted(os.listdir(tmp_path)) == before


def test_a_file_of_np_savez_is_a_source_and_no_path(tmp_path):
    np.savez(tmp_path / "a.npz", w=np.ones(2))
    with pytest.raises(ValueError, match=r"use np.load\(path\) as source: saving.plan\(np.load\(path\), model\)"):
        saving.names(tmp_path / "a.npz")


# -- 64 bits -----------------------------------------------------------------------------------------------------------

LOST = [2**32 + 5, -(2**31) - 1, 1e300, -1e39, 1e-300, 5e-50, complex(1, 1e300), complex(np.inf, 1e39), 1e-60j]
KEPT = [2**31 - 1, 0.1, -0.0, np.nan, np.inf, 1e-40, complex(np.nan, np.inf), complex(np.inf, 3), complex(1e-40, 0)]


READS = [
    saving.load,
    lambda path, like: saving.plan(path, like)(path),
    lambda path, like: saving.plan(path, like, transform={"w": lambda array: array})(path),
]


@pytest.mark.parametrize("value", [*LOST, *KEPT], ids=repr)
def test_64_bits_that_32_cannot_hold_are_never_cut_in_silence(tmp_path, value):
    path, array = tmp_path / "m", np.array([0, value, 1])
    assert array.dtype.itemsize >= 8
    saving.save(path, {"w": array})
    with np.errstate(over="ignore"):
        want = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
    like = {"w": jax.ShapeDtypeStruct(want.shape, want.dtype)}
    for read in READS:
        if any(value is each for each in KEPT):
            assert np.asarray(read(path, like)["w"]).tobytes() == want.tobytes()
        else:
            with pytest.raises(ValueError, match=r"'w' is .*, and has values that .* cannot hold; switch on jax_en"):
                read(path, like)


def test_small_arrays_are_placed_together(tmp_path, monkeypatch):
    """In a third of the time of one after another. A large one does not wait for others, which would take memory."""
    model = {f"{i:03}": jnp.full(64, i, jnp.float32) for i in range(200)} | {"large": jnp.ones((2, 1 << 20))}
    saving.save(tmp_path / "model.safetensors", model)
    together, put = [], jax.device_put

    def counting(arrays, *args):
        together.append(len(arrays))
        return put(arrays, *args)

    monkeypatch.setattr(jax, "device_put", counting)
    loaded = saving.load(tmp_path / "model.safetensors", model)
    moved = saving.plan(tmp_path / "model.safetensors", model)(tmp_path / "model.safetensors")
    assert sum(together) == 2 * 201
    assert len(together) <= 4
    for tree in (loaded, moved):
        assert all(np.array_equal(tree[name], model[name]) for name in model)
