"""dumps and loads: what one process sends to another, whole or as a change; torn, old and foreign messages."""

import functools
import gc
import itertools
import pickle
import tracemalloc
import weakref
import zlib

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load, save

import treeparams as tp
from treeparams import saving

from ..zoo import Norm, assert_same, first_devices, ramp
from .files import abstract, assert_bits, bits, emptied, refused, row


def params(start=0.0):
    shared = ramp(2, 3, start=start)
    narrow = ramp(70, dtype=jnp.bfloat16, start=start)
    return {"a": shared, "n": jnp.arange(3), "b": [narrow, ramp(2, 3, start=start + 1)], "z": shared}


def unchanged(words, message, have, *rest, **options):
    before = bits(have)
    refused(words, saving.loads, message, have, *rest, **options)
    assert bits(have) == before


def test_parameters_come_in_their_own_dtypes_from_any_form_into_any():
    for send, receive in itertools.product([tp.ravel, functools.partial(tp.ravel, pad_to=16), tp.stack], repeat=2):
        (sent, restructure), (have, other) = send(params(0.25)), receive(params())
        got, version = saving.loads(saving.dumps(sent, restructure, version=(1, 2)), have, other, version=(1, 1))
        assert version == (1, 2)
        assert bits(got) == bits(other.ravel(params(0.25)))
        change = saving.dumps(*send(params(0.75)), version=(1, 3), since=((1, 2), sent))
        got, _ = saving.loads(change, got, other, version=(1, 2))
        assert bits(got) == bits(other.ravel(params(0.75)))
    found = load(saving.dumps(*tp.ravel(params() | {"b": [ramp(70, dtype=jnp.float16), ramp(2, 3)]})))  # others read it
    assert {name: array.shape for name, array in found.items()} == {"a": (2, 3), "b.0": (70,), "b.1": (2, 3)}


def test_a_vector_lies_where_that_of_have_does():
    eight = first_devices(8)
    sharding = jax.sharding.NamedSharding(jax.make_mesh((8,), ("x",), devices=eight), jax.sharding.PartitionSpec("x"))
    vector, restructure = tp.ravel({"w": ramp(8, 4)})
    for have in (jax.device_put(vector, eight[3]), jax.device_put(vector, sharding)):
        got, _ = saving.loads(saving.dumps(have, restructure), have, restructure)
        assert (got.sharding, bits(got)) == (have.sharding, bits(vector))
    got, _ = saving.loads(saving.dumps({"w": have}), {"w": np.zeros(32, np.float32)})
    assert isinstance(got["w"], np.ndarray)


def test_what_comes_lies_in_buffers_of_its_own():
    model = {"w": row(5000), "key": jax.random.key(3), "v": ramp(5000)}
    vector, restructure = tp.ravel(model)
    after = jnp.asarray(np.append(np.float32(9), np.asarray(vector)[1:]))
    wanted = list(map(bits, ([model["w"], model["v"], vector], model["key"], after)))
    tree, flat = map(bytearray, (saving.dumps(model, version=1), saving.dumps(vector, restructure, version=1)))
    (got, _), (back, _) = saving.loads(tree, model), saving.loads(flat, vector, restructure)
    change = bytearray(saving.dumps(after, restructure, version=2, since=(1, vector)))
    changed, _ = saving.loads(change, back, restructure, version=1)
    for buffer in (tree, flat, change):
        buffer[:] = bytes(len(buffer))
    model["w"][:] = 0
    back.delete()
    assert list(map(bits, ([got["w"], got["v"], vector], got["key"], changed))) == wanted


@st.composite
def changes(draw):
    dtype = np.dtype(draw(st.sampled_from(["?", "i1", "f2", "f4", "f8", "c8", jnp.bfloat16])))
    size = draw(st.sampled_from([0, 1, 2, 255, 256, 257, 258, 513, 3000]))
    random = np.random.default_rng(draw(st.integers(0, 99)))
    before = random.integers(0, 2 if dtype.kind == "b" else 256, size * dtype.itemsize, np.uint8)
    after = before.reshape(size, dtype.itemsize).copy()
    steps = draw(st.sampled_from([[1], [255], [256], [257], [2, 512, 1], [700, 3], [5000]]))
    at = np.cumsum(np.resize(steps, size)) - draw(st.integers(0, 1))
    after[at[(at >= 0) & (at < size)], -1] ^= 1
    return before.view(dtype), after.reshape(-1).view(dtype)


@hypothesis.settings(max_examples=60, deadline=None)
@hypothesis.given(changes())
def test_a_change_makes_one_of_the_other_bit_for_bit(pair):
    before, after = ({"w": each, "same": np.ones(9)} for each in pair)
    whole, change = saving.dumps(after, version=2), saving.dumps(after, version=2, since=(1, before))
    assert len(change) <= len(whole) + 80  # what a whole message says beside, where it is the smaller one
    got, version = saving.loads(change, before, version=1)
    assert version == 2
    assert [got["w"].tobytes(), got["same"].tobytes()] == [after["w"].tobytes(), after["same"].tobytes()]


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_a_change_is_as_small_as_what_has_changed_and_versions_follow_one_another(dtype):
    random = np.random.default_rng(0)
    vector, restructure = tp.ravel({"w": jnp.asarray(random.normal(size=100_000), dtype), "frozen": jnp.arange(9)})
    sizes, version = [], 0
    for number, share in enumerate((0.0, 0.01, 0.1, 0.6, 1.0), 1):
        new = jnp.where(random.random(vector.size) < share, vector + 1, vector)
        message = saving.dumps(new, restructure, version=number, since=(number - 1, vector))
        vector, version = saving.loads(message, vector, restructure, version=version)
        assert (bits(vector), version) == (bits(new), number)
        sizes.append(len(message) / len(saving.dumps(new, restructure, version=number)))
    assert sizes[0] < 0.01 < sizes[1] < sizes[2] < 0.3
    assert sizes[3:] == [1.0, 1.0]


def test_only_newer_messages_and_changes_of_what_you_have_come():
    vector, restructure = tp.ravel({"w": ramp(4000)})
    new = jnp.asarray(np.append(np.float32(9), np.asarray(vector)[1:]))
    elsewhere = jnp.asarray(np.append(np.asarray(vector)[:-1], np.float32(9)))  # where nothing changes
    send = lambda version, **options: saving.dumps(new, restructure, version=version, **options)
    for have, sent in ((3, np.int64(4)), ((1, 500), (2, 0)), (None, 1), (None, None)):
        got, version = saving.loads(send(sent), vector, restructure, version=have)
        assert (bits(got), version) == (bits(new), sent)
    change = send(4, since=(3, vector))
    assert len(change) < len(saving.dumps(vector, restructure))
    for message, have, version, words in [
        (change, new, 3, "change of other numbers than you have"),
        *((change, elsewhere, version, "change of other numbers than you have") for version in (3, None)),
        (change, vector, 2, r"changes from version 3, and you have 2; ask for all"),
        (change, vector, 4, r"has version 4, and you have 4: it is old, came twice"),
        (send(3), vector, 4, "has version 3, and you have 4"),
        (send((1, 500)), vector, (2, 0), r"has version \(1, 500\), and you have \(2, 0\)"),
        (send(None), vector, 4, "has version None, and you have 4"),
        (send((1, 0)), vector, 4, r"has version \(1, 0\), and you have 4: .* counts otherwise"),
    ]:
        unchanged(words, message, have, restructure, version=version)
    tree = {"w": ramp(4000), "v": ramp(2)}
    change = saving.dumps(tree | {"v": ramp(2, start=3)}, version=4, since=(3, tree))
    unchanged("change of other numbers", change, tree | {"v": ramp(2, start=1)}, version=3)
    unchanged("changes v, which you do not have", change, {"w": tree["w"]})
    refused("has no values", saving.loads, change, jax.tree.map(abstract, tree))


def test_what_is_no_change_and_no_version():
    vector, restructure = tp.ravel({"w": ramp(4)})
    gone = tp.copy(vector)
    gone.delete()
    for kind, words, since, version in [
        (ValueError, r"since=2 is not older than version=2", (2, vector), 2),
        (TypeError, r"a change needs two versions", vector, 2),
        (RuntimeError, r"has been deleted, as by a step that donates it; keep a copy", (1, gone), 2),
        *((TypeError, r"a version must be a number, or", None, its) for its in ("3", 1.5, (1,), (1, 2, 3), (1, "2"))),
    ]:
        refused(words, saving.dumps, vector, restructure, version=version, since=since, kind=kind)
    refused(r"`before` and the model differ at w", saving.dumps, {"w": ramp(4)}, version=2, since=(1, {"w": ramp(5)}))


def messages():
    tree, long = {"w": ramp(3, dtype=jnp.float16), "key": jax.random.key(1), "n": 5}, {"w": ramp(300)}
    vector, restructure = tp.ravel(long)
    yield saving.dumps(tree, version=2), (tree,)
    yield saving.dumps(vector.at[5].set(1), restructure, version=2, since=(1, vector)), (vector, restructure)
    yield saving.dumps(long, version=2, since=(1, long)), (long,)


def test_every_byte_counts():
    for message, have in messages():
        saving.loads(message, *have, version=1)
        before, data = bits(have[0]), bytearray(message)
        for place in range(len(message)):
            data[place] ^= 1 << place % 8
            refused("the message", saving.loads, data, *have, version=1)
            data[place] = message[place]
        torn = [message[:size] for size in (*range(0, len(message), 7), len(message) - 1)]
        for other in (*torn, message + b"\0", pickle.dumps(5), np.random.default_rng(0).bytes(100)):
            refused("is no message of saving.dumps, or damaged", saving.loads, other, *have)
        assert bits(have[0]) == before


def test_a_message_is_a_file_and_a_change_is_not(path):
    model = {"w": ramp(3000), "v": ramp(2)}
    saving.save(path, model, metadata={"run": "7"})
    assert_bits(saving.loads(path.read_bytes(), emptied(model))[0], model)
    path.write_bytes(saving.dumps(model, version=2))
    assert_bits(saving.load(path, emptied(model)), model)
    path.write_bytes(saving.dumps(model | {"v": ramp(2, start=3)}, version=2, since=(1, model)))
    for read, *like in ((saving.load, model), (saving.names,), (saving.plan, model)):
        refused(r"changes another one; write saving\.loads\(message, have\)", read, path, *like)


def test_what_is_no_message():
    tree = {"w": ramp(2)}
    vector, restructure = tp.ravel(tree)
    message, of_vector = saving.dumps(tree), saving.dumps(vector, restructure)
    unchanged("was not made by saving.dumps", save({"w": np.ones(2)}), tree)
    unchanged(r"write saving.loads\(message, vector, restructure\)", of_vector, tree)
    unchanged(r"contains a tree; write saving.loads\(message, tree\)", message, vector, restructure)
    refused(r"expected a message, the bytes that saving\.dumps made, got", saving.loads, tree, tree, kind=TypeError)
    refused(r"expected the restructure that tp\.ravel or tp\.stack", saving.dumps, vector, tree, kind=TypeError)
    refused("without values", jax.jit(saving.dumps), vector)


def test_another_layout_is_refused_by_path():
    shared = ramp(2, 2)
    have = {"w": shared, "v": shared, "b": ramp(3)}
    for other, words in [
        ({"b": ramp(4)}, r"'b' is float32\[3\] in the tree, float32\[4\] in the message"),
        ({"b": ramp(3, dtype=jnp.float16)}, r"'b' is float32\[3\] in the tree, float16\[3\] in the message"),
        ({"c": ramp(3)}, "the message also has 'c', which the tree lacks$"),
        ({"v": tp.copy(ramp(2, 2))}, "are one array in the tree only|also has 'w'"),
        ({"n": jnp.zeros((), jnp.int32)}, "trained parameters or ties differ|'n'"),
    ]:
        unchanged(words, saving.dumps(have | other), have)
        unchanged(words, saving.dumps(*tp.ravel(have | other)), *tp.ravel(have))

    frozen, trained = Norm(ramp(2), ramp(3)), {"scale": ramp(2), "mean": ramp(3)}
    for sent, here in ((frozen, trained), (trained, frozen)):
        unchanged("only one of them declares 'mean' as frozen", saving.dumps(sent), here)
        assert_same(saving.loads(saving.dumps(sent), emptied(sent))[0], sent)


def test_a_thousand_arrays_in_one_buffer_are_copied_and_summed_once(monkeypatch):
    vector, restructure = tp.ravel([ramp(60, 40) for _ in range(300)])
    message = saving.dumps(vector, restructure, version=1)
    saving.loads(message, vector, restructure)
    summed, crc32 = [], zlib.crc32
    monkeypatch.setattr(zlib, "crc32", lambda data, *value: summed.append(len(data)) or crc32(data, *value))
    for module in ("_files.file", "saving._message"):
        monkeypatch.setattr(f"treeparams.{module}.crc32", zlib.crc32)
    for call, first in ((functools.partial(saving.dumps, version=1), ()), (saving.loads, (message,))):
        summed.clear()
        tracemalloc.start()
        made = call(*first, vector, restructure)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        del made
        assert peak < 1.15 * len(message)
        assert len(message) - 8 <= sum(summed) < 1.03 * len(message)


def test_nothing_is_kept_alive():
    vector, restructure = tp.ravel({"w": ramp(3, 2), "b": ramp(2)})
    message = saving.dumps(vector + 3, restructure)
    array, big = jnp.ones(1000), np.frombuffer(message, np.uint8).view(type("Buffer", (np.ndarray,), {}))
    refs = [weakref.ref(array), weakref.ref(big)]
    saving.dumps({"w": array})
    got, _ = saving.loads(big, vector, restructure)
    assert bits(got) == bits(vector + 3)
    del array, big
    gc.collect()
    assert [ref() for ref in refs] == [None, None]
