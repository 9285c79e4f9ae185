"""Files that are read: by threads, past damage, with dtypes that few have; one that is made up is one clear error."""

import concurrent.futures
import functools
import json
import operator
import os
import re
import socket
import sys
import threading
import tracemalloc

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
from .files import entry, header_of, lying, names_in, planned, refused, tree_of, write

_TRAINED = {"a": np.ones(2, "f"), "b": np.ones((), "f")}
_SAME = saving.plan(_TRAINED, _TRAINED)


@pytest.fixture(scope="module")
def like():
    state = optim.trainable(optax.sgd(0.1, momentum=0.9)).init(_TRAINED)
    return tree_of(0) | {"epoch": 5, "x": np.float16(2), "key": np.zeros(2, "u4"), "state": state}


@pytest.fixture(scope="module")
def good(path, like):
    saving.save(path, like | tree_of(1), metadata={"run": "7"})
    return path.read_bytes(), header_of(path.read_bytes())[1]


def unreadable(path, read, *args):
    said = refused(re.escape(repr(str(path))), read, path, *args)
    assert len(said) < 2000
    return said


DAMAGED = "is no safetensors file, or damaged: "


def test_cut_anywhere(path, like, good):
    data, start = good
    path.write_bytes(data)
    assert (saving.load(path, like)["first"] == 1).all()
    places = {*range(0, start, 3), *np.linspace(start, len(data) - 1, 100).astype(int)}
    for place in sorted(places, reverse=True):
        os.truncate(path, place)
        assert DAMAGED in unreadable(path, saving.load, like)
    path.write_bytes(data + b"\0")
    said = unreadable(path, saving.metadata)
    assert f"its arrays end at byte {len(data):,}, and the file has {len(data) + 1:,}" in said


def test_one_byte_flipped_anywhere(path, like, good):
    data, start = good
    path.write_bytes(data)
    places = [*range(0, start, 3), *np.linspace(start, len(data) - 1, 60).astype(int)]
    with open(path, "r+b", buffering=0) as file:
        for count, place in enumerate(places):
            flip = [1 << count % 8, 0xFF][count // 8 % 2]
            os.pwrite(file.fileno(), bytes([data[place] ^ flip]), place)
            said = unreadable(path, saving.load, like)
            assert DAMAGED in said
            assert place < start or "has another checksum than when it was saved" in said
            os.pwrite(file.fileno(), data[place : place + 1], place)
    assert saving.metadata(path) == {"run": "7"}
    assert (saving.load(path, like)["low"] == 1).all()


def test_a_file_that_changes_while_it_is_read(path, good):
    path.write_bytes(good[0])
    names = saving.names(path)
    saving.save(path, tree_of(2))  # another file, that replaces the one that is open
    assert (names["low"] == 1).all()
    names = saving.names(path)
    os.truncate(path, path.stat().st_size - 10)
    assert "it has become shorter while it was read" in unreadable(path, lambda _: dict(names))


def test_each_array_that_is_read_is_compared_with_its_checksum(path):
    model = {"w": ramp(3), "v": ramp(2)}
    tx, average = optim.trainable(optax.sgd(0.1, momentum=0.9)), tp.Ema(model, decay=0.5)
    run = {"model": model, "optimiser": tx.init(model), "average": average}
    saving.save(path, run)
    data = bytearray(path.read_bytes())
    said, first = header_of(data)
    for name in ("model.w", "optimiser.runs.0.0.trace.w", "average.shadow.w"):
        data[first + said[name]["data_offsets"][0] + 3] ^= 0x40
    path.write_bytes(data)
    names, plan = saving.names(path), saving.plan(model, model)
    got = saving.load(path, run, checksum=False)["model"]
    for read in (names["model.v"], got["v"]):  # one that is whole
        np.testing.assert_array_equal(read, model["v"])
    assert not np.array_equal(got["w"], model["w"])
    for name, read in [
        (r"[\w.]+\.w", lambda: saving.load(path, run)),
        ("model.w", lambda: names["model.w"]),
        ("model.w", lambda: dict(names.below("model"))),
        ("model.w", lambda: saving.names(names, "model", transform={"*": jnp.negative})),
        ("average.shadow.w", lambda: saving.names(names, "average", rename={"shadow.*": "*"})),
        ("model.w", lambda: plan(names.below("model"))),
        ("optimiser.runs.0.0.trace.w", lambda: plan.state(names.below("optimiser"), like=tx.init(model))),
        ("average.shadow.w", lambda: plan.average(names.below("average"), like=average)),
    ]:
        refused(f"{re.escape(repr(str(path)))}.*'{name}' has another checksum than when", read)


MANY, AXES = b"9" * 4299, ([1 << 32, 1 << 32], [0, 1 << 63], [1 << 31, 0, 1 << 31], [0] * 33)
METADATA = [b'{"__metadata__":{},"__metadata__":{}}', {"__metadata__": {"a": 1}}, {"__metadata__": None}]
ENTRIES = [1, {"dtype": "F32"}, entry() | {"code": "x"}, entry(["F32"]), entry("F7")]
ENTRIES += [entry(shape=its) for its in (1, ["1"], [1.0], [True], [-1, -1])]
ENTRIES += [entry(offsets=its) for its in ([0], [-4, 0], [0, 4.0])]
MADE_UP = [  # what is said of some headers, of which some say another length
    ("its header is said to have 1,073,741,824 bytes, and the file has 18", [(b"{}", 1 << 30)]),
    ("its header is said to have 18,446,744", [(b"{}", (1 << 64) - 1)]),
    ("its header is no JSON", [b"", b"[]", b"1e999", b'{"\xff": 1}', b"{}{}", b'{"a":' * 200_000]),
    ("its header is no JSON", [b'{"w":{"dtype":"U8","shape":[%b9],"data_offsets":[0,4]}}' % (MANY * 2)]),
    ("a name occurs twice", [b'{"w":{"dtype":"F32","dtype":"F32"}}', b'{"w":1,"w":1}']),
    ("metadata are not one dictionary of texts", METADATA),
    ("its entry 'w' is not a dtype (", [b'{"w":' + b"[" * 900 + b"]" * 900 + b"}", *({"w": its} for its in ENTRIES)]),
    ("its entry 'w' is not a dtype (", [b'{"w":{"dtype":"F32","shape":[1e999],"data_offsets":[0,4]}}']),
    # A product that is 0 or 1 in 64 bits, and shapes that are too large for NumPy, empty or not.
    ("'w'", [{"w": entry(shape=its, offsets=(0, 0))} for its in AXES]),
    ("'w' is U8 of shape", [{"w": entry("U8", [(1 << 64) + 1], (0, 1))}]),
    ("'w'", [b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[%b9,%b9]}}' % (MANY, MANY)]),
    ("'w' is F32 of shape [1] in -4 bytes", [{"w": entry(offsets=[4, 0])}]),
    ("its arrays end at byte 1,073,741", [{"w": entry(shape=[1 << 28], offsets=[0, 1 << 30])}]),
    ("the array 'w' begins at byte", [{"w": entry(offsets=[4, 8])}, {"v": entry(), "w": entry()}]),
    ("its entry", [{"x" * 100_000: 1}]),
]


@pytest.mark.parametrize("case", range(len(MADE_UP)))
def test_headers_that_are_made_up(path, request, case):
    words, headers = MADE_UP[case]
    for each in headers:
        header, length = each if isinstance(each, tuple) else (each, None)
        write(path, header, bytes(8), length)
        tracemalloc.start()
        request.addfinalizer(tracemalloc.stop)
        for read, *like in ((saving.metadata,), (saving.names,), (saving.load, {}), (saving.plan, {})):
            assert words in unreadable(path, read, *like)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 1_000_000 + 30 * path.stat().st_size  # the error and its traceback; the JSON


LACKING = object()
LIES = [  # words that are right but for the value below some keys, which is one of these
    ("", ["", "{", "[]", "1e999"]),
    ("version ties states marks states.state.slots states.state.divisions values.x", [LACKING]),
    ("message ties marks values states states.state states.state.slots values.epoch", [5, ["a"]]),
    ("unkeyed", [["Normal", 2]]),
    # Ties to a number, nothing, itself, an array of another shape; a transform that is a number or made up.
    ("ties.second", [5, *([to, ""] for to in ("nothing", "second", "low")), ["first", 5], ["first", "os.system"]]),
    ("ties.z ties.nothing", [["first", ""]]),
    # Marks of keys that are none or stored otherwise, of no dtype or one of objects, texts, fields.
    ("marks.z", [{"dtype": its} for its in ("O", "f4,f4", "S8", "complex65", "complex128")]),
    ("marks.key", [{"key": its} for its in ("nonsense", 5, "rbg")]),
    ("marks.low", [{"pickle": "x"}, {"key": "threefry2x32"}, {"dtype": "complex64"}]),
    ("states.state", [{"slots": [], "running": [], "held": []}]),
    ("states.state.running", [[5], [[["a"]]]]),
    ("states.state.divisions.0.owners.0,trace,a", [[7, 2, 0, None], ["0", 2, 0, None]]),
    ("states.state.divisions.0.blocks.0", [[[0, 1], its, False] for its in ([0, 2], [0, 2, 1])]),
    ("values.epoch", [["int", "5", ""], ["int", 5], ["int", "five"], ["int", "9" * 5000], ["list", "5"]]),
    ("values.x", [["numpy.float16", "00"], *([f"numpy.{its}", "00" * 8] for its in ("f4,f4", "float16", "object"))]),
    ("values.first values.nothing", [["int", "5"]]),
]


def read_all(path):
    saving.metadata(path)
    names = saving.names(path)
    return [names[name] for name in names]


def is_read_or_refused(path, read, *args):
    try:
        read(path, *args)
    except ValueError as error:
        return type(error) is ValueError and repr(str(path)) in str(error)
    return True


def change_to(keys, value, words):
    if not keys:
        return value
    *keys, last = [int(key) if key.isdecimal() else key.replace(",", ".") for key in keys.split(".")]
    node = functools.reduce(operator.getitem, keys, words)
    node[last] = value
    if value is LACKING:
        del node[last]
    return None


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("case", range(len(LIES)))
def test_words_that_lie(path, like, good, case):
    several, values = LIES[case]
    for keys in several.split(" "):
        for value in values:
            lying(path, good[0], functools.partial(change_to, keys, value))
            unreadable(path, saving.load, like)
            refused("the message", saving.loads, path.read_bytes(), like)
            assert is_read_or_refused(path, read_all)
            assert is_read_or_refused(path, lambda path: saving.plan(path, like, strict=False)(path))
            if keys.startswith("states.state.") and "blocks" not in keys:  # where a joined array begins, shapes say
                refused("state|arrays", lambda: _SAME.state(saving.names(path, "state"), like["state"]))


def test_a_newer_version_is_named(path, like, good):
    # Whatever else it says: a newer version may say it otherwise.
    lying(path, good[0], lambda words: json.dumps({"version": 3, "other": 1}))
    said = "has version 3 of the format of treeparams.saving, but this library reads 1"
    assert said in unreadable(path, saving.load, like)
    lying(path, good[0], lambda words: None)
    assert (saving.load(path, like)["first"] == 1).all()


def test_no_file_stays_open(path, like, good):
    opened = lambda: len(os.listdir("/proc/self/fd"))
    before = opened()
    for data in (good[0], good[0][:-1], good[0][: good[1] - 1]):
        path.write_bytes(data)
        for read, *args in ((saving.metadata,), (saving.load, like), (read_all,)):
            assert is_read_or_refused(path, read, *args)
    saving.save(path, like)
    assert opened() == before


@pytest.mark.parametrize("has_preadv", [True, False])
def test_threads_that_read_from_one_file_get_what_they_ask_for(path, monkeypatch, request, has_preadv):
    rounds = 1000 if request.config.getoption("--long") else 10
    arrays = {f"w{i}": np.full(50 + i, i, np.float32) for i in range(8)}
    save_file(arrays, path)  # without checksums, so that another array would come in silence
    names, start = saving.names(path), threading.Barrier(8)
    if not has_preadv:
        monkeypatch.delattr(os, "preadv")

    def are_right(first):
        start.wait()
        each = [f"w{i % 8}" for i in range(first, first + 8 * rounds)]
        return all(np.array_equal(names[name], arrays[name]) for name in each)

    request.addfinalizer(functools.partial(sys.setswitchinterval, sys.getswitchinterval()))
    sys.setswitchinterval(1e-6)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        assert all(pool.map(are_right, range(8)))


def test_a_read_that_is_interrupted_goes_on(path, monkeypatch):
    preadv = os.preadv
    monkeypatch.setattr(os, "preadv", lambda file, buffers, at: preadv(file, [buffers[0][:1000]], at))
    tree = {"small": ramp(3), "large": np.random.default_rng(0).random((30, 700))}
    saving.save(path, tree)
    for got in (saving.load(path, tree), saving.names(path)):
        assert all(np.array_equal(got[name], tree[name]) for name in tree)


READ = {"F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz"}


@pytest.mark.parametrize("dtype", READ)
def test_a_narrow_dtype_of_another_program_is_read(path, dtype):
    data, its = bytes(range(256)), READ[dtype]
    write(path, {"w": entry(dtype, [2, 128], [0, 256])}, data)
    names, like = saving.names(path), {"w": jax.ShapeDtypeStruct((2, 128), its)}
    assert (names["w"].dtype, names["w"].tobytes()) == (np.dtype(getattr(ml_dtypes, its)), data)
    assert np.asarray(planned(names, like)["w"]).tobytes() == data
    saving.save(path, {"w": names["w"]})  # as bytes: earlier readers of the format lack it
    with safe_open(path, "np") as file:
        assert file.get_slice("w").get_dtype() == "U8"


def test_a_packed_dtype_is_listed_and_its_array_is_not_read(path):
    write(path, {"w": entry("F6_E2M3", [2, 4], [0, 6]), "v": entry(offsets=[6, 10])}, bytes(10))
    names, model = saving.names(path), {"v": jnp.ones(1)}
    assert repr(names) == "Names(w: F6_E2M3[2,4], v: float32[1])"
    refused(f"'w' of {re.escape(repr(str(path)))} .* it is F6_E2M3, which NumPy", names.__getitem__, "w")
    assert planned(path, model, rename={"w": None})["v"].tolist() == [0.0]
    words = r"'w' is F6_E2M3\[2,4\], which NumPy .*drop it, rename=\{'w': None"
    refused(words, saving.plan, path, model | {"w": jnp.ones((2, 4))})
    write(path, {"w": entry("F6_E3M2", [8], [0, 5])}, bytes(5))
    refused("'w' is F6_E3M2 of shape .* in 5 bytes", saving.names, path)


def test_64_bits_that_32_cannot_hold_are_never_cut_in_silence(path):
    lost = [2**32 + 5, -(2**31) - 1, 1e300, -1e39, 1e-300, 5e-50, complex(1, 1e300), complex(np.inf, 1e39), 1e-60j]
    kept = [2**31 - 1, 0.1, -0.0, np.nan, np.inf, 1e-40, complex(np.nan, np.inf), complex(np.inf, 3), complex(1e-40, 0)]
    for number, value in enumerate([*lost, *kept]):
        array = np.array([0, value, 1])
        assert array.dtype.itemsize >= 8
        saving.save(path, {"w": array})
        with np.errstate(over="ignore"):
            want = array.astype(jax.dtypes.canonicalize_dtype(array.dtype))
        like = {"w": jax.ShapeDtypeStruct(want.shape, want.dtype)}
        for read in (saving.load, planned, functools.partial(planned, transform={"w": lambda array: array})):
            if number >= len(lost):
                assert np.asarray(read(path, like)["w"]).tobytes() == want.tobytes()
            else:
                refused(r"'w' has values that .* cannot hold; switch on jax_en", read, path, like)


def test_what_is_no_file_is_neither_read_nor_replaced(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "link").symlink_to("fifo")
    # A save that is wrong must not replace `/dev/null` of this machine.
    monkeypatch.setattr(os, "replace", lambda *_: pytest.fail("it is replaced"))
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
        for path in [*(tmp_path / name for name in ("fifo", "link", "socket")), "/dev/null"]:
            said = f"{re.escape(repr(str(path)))} is a FIFO, a socket or a device"
            for call, *tree in ((saving.save, {}), (saving.load, {}), (saving.plan, {}), (saving.names,)):
                refused(said, call, path, *tree)
        assert names_in(tmp_path) == ["fifo", "link", "socket"]
