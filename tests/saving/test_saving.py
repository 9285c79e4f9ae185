"""save and load: a tree in one file and back, bit for bit, in a format that others read."""

import io
import pickle
import re
import zipfile

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import treeparams as tp
from treeparams import saving
from treeparams._files.file import File
from treeparams._files.source import OnDisk

from ..zoo import ZOO, Norm, assert_same, enable_x64, first_devices, models, ramp
from .files import Transposed, abstract, assert_bits, emptied, names_in, planned, refused, row, there_and_back


@pytest.mark.parametrize("name", ZOO)
def test_a_round_trip_keeps_every_bit_and_every_tie(path, name):
    model, other, layout = ZOO[name].make(), ZOO[name].make(), ZOO[name].layout
    arrays = [leaf for leaf in jax.tree.leaves(model) if hasattr(leaf, "dtype")]
    assert assert_bits(there_and_back(path, model), model) == len(arrays) > 0
    # An abstract leaf takes the ties of the file, and gives an array of JAX.
    got = saving.load(path, jax.tree.map(abstract, model))
    assert assert_same(got, model) >= len(arrays)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got) if hasattr(leaf, "dtype"))
    assert {leaf.weak_type for leaf in jax.tree.leaves(got) if hasattr(leaf, "weak_type")} <= {False}
    differ = tp.diff(got, model)  # Equinox's counter is weak
    assert list(differ.paths) == (["state.batch_counter"] if name == "batch norm" else [])
    # It has the names of the model, which a plan puts into it.
    plan = saving.plan(model, other, trainable=layout(other))
    assert assert_same(plan(model), model) > 0
    by_layout = saving.plan(layout(model), other, trainable=layout(other))
    assert [each[:2] for each in by_layout.rows] == [each[:2] for each in plan.rows]
    assert set(saving.names(model)) == set(saving.names(path)) <= set(saving.names(tp.layout(model)))
    # A message is such a file, too; and so is the change to a model with equal bits.
    message = saving.dumps(model, version=3)
    got, version = saving.loads(message, emptied(model), version=2)
    assert version == 3
    assert_bits(got, model)
    same = saving.dumps(model, version=4, since=(3, model))
    assert_bits(saving.loads(same, got if name != "numpy leaves" else model, version=3)[0], model)
    assert len(same) <= len(message)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(model=models(), key=st.text('az0."\0\n\\*[!\u2028é😀', max_size=20))
@hypothesis.example(model=ramp(2), key="__metadata__")
@hypothesis.example(model={"__metadata__": ramp(2), '"__metadata__"': ramp(1)}, key="treeparams.checksum")
@hypothesis.example(model=[ramp(1)], key="00000000" * 1000)
@hypothesis.example(model=ramp(2), key='é.\0\n"\\*[!\u2028😀')
def test_any_tree_under_any_name(path, model, key):
    tree = {key: model, "key" + key: (model, jnp.tanh)}
    assert_bits(there_and_back(path, tree), tree)
    assert_bits(saving.loads(saving.dumps(tree), emptied(tree))[0], tree)


JAX_DTYPES = [
    *("bool_", "int2", "int4", "int8", "int16", "int32", "uint2", "uint4", "uint8", "uint16", "uint32"),
    *("bfloat16", "float16", "float32", "complex64", "float4_e2m1fn", "float8_e3m4", "float8_e4m3", "float8_e4m3fn"),
    *("float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"),
]
WIDE = ["int64", "uint64", "float64", "complex128"]


def patterns(dtype):
    """An array of all patterns of bits that a byte has, or of many: NaN of all kinds, infinities, subnormals."""
    dtype = jnp.dtype(dtype)
    if dtype.name in {"bool", "int2", "int4", "uint2", "uint4", "float4_e2m1fn"}:  # not all of their byte
        return (np.arange(6) % 2).astype(dtype).reshape(2, 3)
    return np.random.default_rng(0).permutation(np.arange(256, dtype=np.uint8)).view(dtype).reshape(2, -1)


def test_every_dtype_with_every_bit(path):
    of_numpy = {name: patterns(name) for name in [*JAX_DTYPES, *WIDE]}
    strange = {"scalar": np.array(3, np.int16), "empty": np.zeros((2, 0, 3), np.complex128)}
    strange |= {"Fortran": np.asfortranarray(patterns("float64")), "strided": patterns("float32")[:, ::-3]}
    strange |= {"broadcast": np.broadcast_to(np.float16(0.1), (3, 2)), "read only": np.frombuffer(b"12345678", "i4")}
    of_jax = {name: jnp.asarray(array) for name, array in of_numpy.items() if name not in WIDE}
    tree = {"numpy": of_numpy, "jax": of_jax, "strange": strange}
    assert assert_bits(there_and_back(path, tree), tree) > 40
    with enable_x64(True):
        wide = {name: jnp.asarray(of_numpy[name]) for name in WIDE}
        assert assert_bits(there_and_back(path, wide), wide) == 4


def test_keys(path):
    rbg, unsafe, fry = (jax.random.key(7, impl=impl) for impl in ("rbg", "unsafe_rbg", "threefry2x32"))
    raw, tree = jax.random.PRNGKey(3), {"all": [rbg, unsafe, fry], "batch": jax.random.split(fry, (2, 3))}
    assert assert_bits(there_and_back(path, tree), tree) == 4
    for saved, like, words in [
        (rbg, fry, r"key<fry>\[\] in the tree, key<rbg>\[\] in"),
        (rbg, jax.random.key_data(rbg), r"uint32\[4\] in the tree, key<rbg>\[\] in"),
        (raw, fry, r"key<fry>\[\] in the tree, uint32\[2\] in"),
    ]:
        refused(rf"'key' is {words} the file", there_and_back, path, {"key": saved}, {"key": like})


def test_anything_that_reads_safetensors_reads_it(path):
    plain = {name: patterns(name) for name in ("bool_", "int8", "uint16", "int32", "uint64", "float16", "float64")}
    saving.save(path, plain | {"pairs": patterns("complex128"), "low": patterns("bfloat16")}, metadata={"run": "7"})
    with safe_open(path, "np") as file:
        assert {name: file.get_slice(name).get_dtype() for name in ("pairs", "low")} == {"pairs": "F64", "low": "BF16"}
        assert file.metadata()["run"] == "7"
        for name, array in plain.items():
            np.testing.assert_array_equal(file.get_tensor(name), array)
        pairs = file.get_tensor("pairs")
    assert pairs.shape == (2, 8, 2)
    assert pairs.tobytes() == patterns("complex128").tobytes()
    for said in ({}, {"format": "pt"}):
        save_file(plain, path, metadata=said)
        assert saving.metadata(path) == said
    assert assert_bits(dict(saving.names(path)), load_file(path)) == len(plain)
    refused(r"was not written by saving.save.*write saving.plan\(path, model\)\(p", saving.load, path, emptied(plain))
    assert_same(planned(path, emptied(plain)), plain)


def _archive(*names):
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name in names:
            archive.writestr(name, b"")
    return file.getvalue()


def test_a_file_of_another_program_is_called_by_its_name(path):
    for content, said in [
        (pickle.dumps({"w": np.ones(2)}), r"is a pickle; .*pickle\.load\(open\(path"),
        (_archive("model/data.pkl", "model/data/0"), r"as PyTorch writes it; .*safetensors\.torch\.save_file"),
        (b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", r"as PyTorch writes it; .*with PyTorch"),  # before archives
        (_archive("w.npy"), r"np\.savez; use np.load\(path\) as source: saving\.plan\(np\.load\(path\), model\)"),
        (b"\x93NUMPY\1\0", r"NumPy, as by eqx\.tree_serialise_leaves"),
        (msgpack_serialize({"params": {"w": np.ones(2)}}), r"MessagePack, as Flax .*msgpack_restore"),
        (b"\x89HDF\r\n\x1a\n" + bytes(40), r"HDF5; open it with h5py\.File"),
        (b"GGUF\3\0\0\0" + bytes(40), r"GGUF; .*gguf\.GGUFReader\(path\)"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "pointer of Git LFS .*git lfs pull"),
        (b"\n<!DOCTYPE html><html lang='en'>", "a web page, as a failed download .*again"),
    ]:
        path.write_bytes(content)
        for read, *like in ((saving.load, {}), (saving.metadata,), (saving.names,)):
            refused(said, read, path, *like)


def test_it_is_read_whatever_its_name(tmp_path):
    for name in ("model.pt", "é.bin", "x" * 255):
        for path in (tmp_path / name, str(tmp_path / name), bytes(tmp_path / name)):
            saving.save(path, {"w": ramp(2)}, metadata={"name": name})
            assert_same(saving.load(path, {"w": ramp(2)}), {"w": ramp(2)})
            assert saving.metadata(path) == {"name": name}


@pytest.mark.usefixtures("without_type_checks")
def test_metadata_is_text_by_text(path):
    said = {"": "", "run": "7", 'é"\n': "😀\0", "treeparams": "1", "checksum": "00000000"}
    saving.save(path, {"w": ramp(2)}, metadata=said)
    assert saving.metadata(path) == said
    for wrong, kind, words in [
        ({"treeparams.x": "1"}, ValueError, r"metadata .*: names that start with 'treeparams.' are reserved"),
        ({"x": "\ud800"}, ValueError, r"ud800' is not Unicode text"),
        *((its, TypeError, "metadata must be a dictionary of texts, .*got") for its in ({1: "x"}, [1], "x")),
    ]:
        refused(words, saving.save, path, {"w": ramp(2)}, metadata=wrong, kind=kind)
    assert saving.metadata(path) == said


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "m"
    saving.save(path, {"w": ramp(2)})
    gone = jax.random.key(1)
    gone.delete()
    first = {"big": row(100, 1000)}  # it is written before what fails
    for tree, kind, words in [
        ({"abstract": jax.ShapeDtypeStruct((2,), "f4")}, ValueError, r"'abstract' is float32\[2\] without values"),
        (first | {"gone": gone}, RuntimeError, "'gone' has been deleted, as by a step that donates it; keep a copy"),
        (first | {"n\ud800": ramp(1)}, ValueError, r"n\\ud800' is not Unicode text"),
        (first | {"note": "\udcff"}, ValueError, r"note.*udcff' is not Unicode text, so it cannot be saved"),
        (first | {"times": np.zeros(2, ">f4")}, TypeError, "'times' is a NumPy array of >f4, which JAX does not sup"),
    ]:
        refused(words, saving.save, path, tree, kind=kind)
    refused(r"'w' is float32\[2\] without values", jax.jit(lambda w: saving.save(path, {"w": w})), ramp(2))
    assert names_in(tmp_path) == ["m"]
    assert_same(saving.load(path, {"w": ramp(2)}), {"w": ramp(2)})


def with_state(is_one):
    norm = eqx.nn.BatchNorm(3, "batch", mode="ema")
    state = eqx.nn.State(norm)  # its arrays are those in the norm
    return norm, state if is_one else jax.tree.map(jnp.ones_like, state)


ZERO, KEY, RAMP = jnp.array(0), jax.random.key(0), ramp(3)
UNTRAINED = {
    "frozen": lambda is_one: [Norm(ramp(1), RAMP), Norm(ramp(2), RAMP if is_one else RAMP + 1)],
    "integers": lambda is_one: {"a": ZERO, "b": ZERO if is_one else jnp.array(1)},
    "keys": lambda is_one: {"a": KEY, "b": KEY if is_one else jax.random.key(1)},
    "statistics": with_state,
}


@pytest.mark.parametrize("case", UNTRAINED)
@pytest.mark.parametrize("is_one", [True, False], ids=["one in the file", "one in the tree"])
def test_what_does_not_train_is_read_at_its_own_path(path, case, is_one):
    saved, like = UNTRAINED[case](is_one), UNTRAINED[case](not is_one)
    saving.save(path, saved)
    plan = saving.plan(path, like)
    for got in (saving.load(path, like), plan(path), saving.plan(saved, like)(saved)):
        assert not [row for row in tp.diff(got, saved).rows if row.what == "elements"]
    if case == "frozen":
        arrays = dict(saving.names(path))
        arrays.setdefault("1.mean", arrays["0.mean"])
        np.testing.assert_array_equal(jax.jit(plan)(arrays)[1].mean, saved[1].mean)
    assert_bits(there_and_back(path, like, like), like)  # into the very same arrays


class Language(eqx.Module):
    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embed")
    other: jax.Array | None = None


def test_a_tie_is_in_the_file_once(path):
    shared, count, key = ramp(100, 100), jnp.arange(10), jax.random.key(0)
    model = {"embed": shared, "head": [shared, shared], "n": count, "m": count, "key": (key, key)}
    assert assert_bits(there_and_back(path, model), model) == 7
    assert path.stat().st_size < shared.nbytes + 2000
    assert set(saving.names(path)) == {"embed", "m", "n", "key.0", "key.1"}  # what is no parameter goes by its path
    for other in (5.0, "gelu", jnp.tanh):  # in place of its second name
        refused(r"'head.1' is \w+ in the tree, float32", saving.load, path, model | {"head": [shared, other]})
    # A declared tie too, also through a transform, where its alias is what it is declared to be.
    for model in (Transposed(shared, shared.T), Language(shared, tp.copy(shared))):
        got = there_and_back(path, model)
        assert assert_same(got, model, identity=False) == 2
        assert path.stat().st_size < shared.nbytes + 1000
    assert got.embed is got.head
    # An alias that does not agree yet is stored by itself.
    first, second, third = ramp(2, 3), np.asarray(ramp(3, 2, start=7)), ramp(2, 3, start=9)
    codecs, languages = [Transposed(first, its) for its in (second, first.T)], [Language(first, third)]
    for model in (*codecs, *languages, Language(first, third, third)):
        assert_bits(there_and_back(path, model, like=model), model)


@pytest.mark.parametrize("where", ["file", "tree"])
def test_other_ties_are_refused_with_the_call_that_mends_it(path, where):
    shared = ramp(2)
    tied, apart = ({"a": shared, "deep": [leaf]} for leaf in (shared, tp.copy(shared)))
    saved, like = (tied, apart) if where == "file" else (apart, tied)
    call = {"file": "tp.tie(model, 'deep.0', to='a')", "tree": "tp.untie(model, 'deep.0')"}[where]
    refused(rf"'a'.* are one array in the {where} only: {re.escape(call)}$", there_and_back, path, saved, like)
    assert_bits(saving.load(path, eval(call, {"tp": tp, "model": like})), saved)
    like, declared = {"encoder": ramp(2, 3), "decoder": ramp(3, 2)}, Transposed(ramp(2, 3), ramp(2, 3).T)
    refused(r"'decoder' is transpose.* of 'encoder' in the file, .* tp.field\(", there_and_back, path, declared, like)


UNLIKE = {  # what is saved, what the tree has in its place, and words of the line that says so
    "shapes": (ramp(2), ramp(3), "'shapes' is float32[3] in the tree, float32[2] in the file"),
    "dtypes": (row(2, dtype=np.int32), ramp(2), "'dtypes' is float32[2] in the tree, int32[2] in the file"),
    "int_and_array": (5, ramp(), "float32[] in the tree", "int in the file"),
    "int_and_shape": (5, jax.ShapeDtypeStruct((), jnp.int32), "int32[]", "int in the file", "filter_eval_shape"),
    "array_and_int": (ramp(), 5, "int in the tree", "float32[] in the file", "jnp.asarray("),
    "array_and_text": (ramp(2), "text", "str in the tree", "float32[2] in the file", "jnp.asarray("),
    "array_and_function": (ramp(2), jnp.tanh, "function in the tree", "float32[2]"),
    "function_and_int": (jnp.tanh, 5, "in the tree and not in the file"),
    "int_and_none": (5, None, "the file also has 'int_and_none', which the tree lacks"),
    "more": ([5, 6], [5], "'more.1' is in the file and not in the tree", "nearest: 'more.0'", "saving.plan"),
    "here": ({"bias": 1}, {"bais": 1}, "'here.bais' is in the tree and not in the file; nearest: 'here.bias'"),
}


def test_all_that_does_not_fit_is_said_at_once_before_anything_is_read(path, monkeypatch):
    read = []
    monkeypatch.setattr(File, "arrays", lambda *args, **_: read.append(args))
    saved, like = ({name: each[i] for name, each in UNLIKE.items()} for i in (0, 1))
    saving.save(path, saved | {"w": ramp(1)})
    said = refused(re.escape(f"{str(path)!r} does not fit the tree:\n"), saving.load, path, like | {"w": ramp(1)})
    for name, (_, _, *words) in UNLIKE.items():
        assert any(all(word in line for word in (f"'{name}", *words)) for line in said.splitlines())
    assert read == []


def test_small_arrays_of_a_whole_file_are_read_together(path, monkeypatch):
    tree = {f"w{i:03}": ramp(3, start=i) for i in range(300)} | {
        "large": ramp(70, 100),
        "x": ramp(2),
        "z": ramp(70, 80),
    }
    saving.save(path, tree)
    read, read_at = [], OnDisk.read_at
    monkeypatch.setattr(OnDisk, "read_at", lambda *args: read.append(len(args[1])) or read_at(*args))
    assert assert_same(saving.load(path, tree), tree) == len(tree)
    assert len(read) <= 8  # of these two for the header
    assert sum(read) < 1.7 * path.stat().st_size


def test_arrays_lie_where_those_of_like_do_whatever_reads_them(path):
    devices = first_devices(4)
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    rows, whole, third = NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), SingleDeviceSharding(devices[3])
    in_numpy = {"rows": row(8, 3), "whole": row(3), "third": row(4), "free": row(5), "numpy": row(2)}
    in_numpy["keys"] = jax.random.split(jax.random.key(5), 4)
    tree = jax.device_put(in_numpy) | {"numpy": row(2)}
    saving.save(path, tree)
    places = {"rows": rows, "whole": whole, "third": third, "keys": rows}
    put = lambda name, leaf: leaf if name == "numpy" else jax.device_put(leaf, places.get(name))
    like = {name: put(name, leaf) for name, leaf in emptied(in_numpy).items()}
    without = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places.get(n)) for n, leaf in tree.items()}
    of = lambda source: lambda _, like: saving.plan(source, like)(source)
    of_message = lambda path, like: saving.loads(path.read_bytes(), like)[0]
    for each in (like, without | {"numpy": row(2)}):
        for read in (saving.load, planned, of_message, of(jax.device_put(in_numpy)), of(in_numpy)):
            got = read(path, each)
            assert assert_same(got, tree) == 6
            assert {name: got[name].sharding for name in places} == places
            assert (got["third"].committed, got["free"].committed, got["free"].device) == (True, False, devices[0])
            assert (type(got["numpy"]), got["numpy"].flags.writeable) == (np.ndarray, True)
    # Sharded arrays are written whole, and go back onto one device.
    saving.save(path, got)
    assert_bits(saving.load(path, emptied(tree)), tree)
    codec = Transposed(jax.device_put(row(4, 8), rows), jax.device_put(row(4, 8).T, rows))
    got = there_and_back(path, codec, like=codec)
    assert assert_same(got, codec) == 2
    assert (got.encoder.sharding, got.decoder.sharding) == (rows, rows)


def test_loaded_arrays_hang_on_nothing(path):
    tree = {"jax": ramp(300, 300), "numpy": np.arange(1000.0), "small": ramp(3)}
    got = there_and_back(path, tree)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert assert_bits(got, tree) == 3
    got["numpy"] += 1  # it may be written to
    arrays = {name: got[name] for name in ("jax", "small")}
    twice = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(arrays)
    np.testing.assert_array_equal(twice["jax"], 2 * tree["jax"])


def test_a_part_of_a_file(path):
    saving.save(path, {"a.b": {"w": ramp(2)}})
    refused(r"""the file has such a tree below '"a\.b"': load into""", saving.load, path, {"w": ramp(2)})
    assert_same(planned(saving.names(path, '"a.b"'), {"w": ramp(2) + 1}), {"w": ramp(2)})
    saving.save(path, {"model": {"w": ramp(2)}, "average": {"w": ramp(2)}})
    for call, like, words in [
        (saving.load, {"w": ramp(2)}, "the file has such a tree below 'average', 'model': load into"),
        (saving.load, {"model": {"w": ramp(2)}}, "also has 'average', which the tree lacks; to load a part"),
        (saving.plan, {"w": ramp(2)}, "the source has such a model below 'average', 'model'; to load one, write names"),
    ]:
        refused(words, call, path, like)
    refused("'' is a Names, which .* would not be saved", saving.save, path, saving.names(path), kind=TypeError)
