"""save and load: a tree in one file and back, bit for bit; what does not fit is refused, with all that does not."""

import pickle
import re

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import treeparams as tp
from treeparams import saving
from treeparams.saving import _file

from .zoo import ZOO, as_data, assert_same, enable_x64, models, pattern, ramp


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Each test writes it anew: that is what a file of `save` is for."""
    return tmp_path_factory.mktemp("saving") / "model.safetensors"


def emptied(tree):
    """The tree with zeros, tied as it is."""
    made = {}

    def zeros(leaf):
        if isinstance(leaf, np.ndarray):
            return np.zeros_like(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
            return jax.random.wrap_key_data(jnp.asarray(np.zeros(data.shape, "u4")), impl=jax.random.key_impl(leaf))
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))

    return jax.tree.map(lambda leaf: made.setdefault(id(leaf), zeros(leaf)) if hasattr(leaf, "dtype") else leaf, tree)


def abstract(leaf):
    """As `eqx.filter_eval_shape` gives it."""
    is_key = jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    if not hasattr(leaf, "dtype") or is_key:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_key else leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def assert_bits(got, want):
    """Equal structure, types and bits; the same arrays tied. Returns how many arrays were compared."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    arrays = [pair for pair in pairs if hasattr(pair[1], "dtype")]
    for a, b in arrays:
        assert (type(a), a.dtype, a.shape) == (type(b), b.dtype, b.shape)
        assert np.asarray(as_data(a)).tobytes() == np.asarray(as_data(b)).tobytes()
    assert pattern([a for a, _ in pairs]) == pattern([b for _, b in pairs])
    assert all(a is b for a, b in pairs if not hasattr(b, "dtype"))
    return len(arrays)


def there_and_back(path, tree, like=None):
    saving.save(path, tree)
    return saving.load(path, emptied(tree) if like is None else like)


# -- There and back ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_a_round_trip_keeps_every_bit_and_every_tie(path, name):
    model = ZOO[name].make()
    arrays = [leaf for leaf in jax.tree.leaves(model) if hasattr(leaf, "dtype")]
    assert assert_bits(there_and_back(path, model), model) == len(arrays) > 0
    # An abstract leaf takes the ties of the file, and gives an array of JAX.
    got = saving.load(path, jax.tree.map(abstract, model))
    assert assert_same(got, model) >= len(arrays)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(got) if hasattr(leaf, "dtype"))
    weak = {leaf.weak_type for leaf in jax.tree.leaves(got) if hasattr(leaf, "weak_type")}
    assert weak <= {False}
    differ = tp.diff(got, model)  # Equinox's counter is weak
    assert list(differ.paths) == (["state.0"] if name == "batch norm" else [])


@hypothesis.settings(max_examples=40, deadline=None)
@hypothesis.given(model=models(), key=st.text(max_size=20))
@hypothesis.example(model=ramp(2), key="__metadata__")
@hypothesis.example(model={"__metadata__": ramp(2), '"__metadata__"': ramp(1)}, key="treeparams.checksum")
@hypothesis.example(model=[ramp(1)], key="00000000" * 1000)
@hypothesis.example(model=ramp(2), key='é.\0\n"\\*[!\u2028😀')
def test_any_tree_under_any_name(path, model, key):
    tree = {key: model, "key" + key: (model, jnp.tanh)}
    assert_bits(there_and_back(path, tree), tree)


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
    data = np.random.default_rng(0).permutation(np.arange(256, dtype=np.uint8))
    return data.view(dtype).reshape(2, -1)


def test_every_dtype_with_every_bit(path):
    of_numpy = {name: patterns(name) for name in [*(n for n in JAX_DTYPES if hasattr(jnp, n)), *WIDE]}
    strange = {
        "scalar": np.array(3, np.int16),
        "empty": np.zeros((2, 0, 3), np.complex128),
        "Fortran": np.asfortranarray(patterns("float64")),
        "strided": patterns("float32")[:, ::-3],
        "broadcast": np.broadcast_to(np.float16(0.1), (3, 2)),
        "read only": np.frombuffer(b"12345678", np.int32),
    }
    of_jax = {name: jnp.asarray(array) for name, array in of_numpy.items() if name not in WIDE}
    tree = {"numpy": of_numpy, "jax": of_jax, "strange": strange}
    assert assert_bits(there_and_back(path, tree), tree) > 40
    with enable_x64(True):
        wide = {name: jnp.asarray(of_numpy[name]) for name in WIDE}
        assert assert_bits(there_and_back(path, wide), wide) == 4


def test_a_wider_array_is_never_cut_in_silence(path):
    saving.save(path, {"w": np.array([2**40, 5])})
    for like in (np.zeros(2, np.int32), jnp.zeros(2, jnp.int32)):
        with pytest.raises(ValueError, match=r"'w'.*int"):
            saving.load(path, {"w": like})


def test_keys(path):
    keys = {impl: jax.random.key(7, impl=impl) for impl in ("threefry2x32", "rbg", "unsafe_rbg")}
    tree = keys | {"batch": jax.random.split(jax.random.key(0), (2, 3)), "raw": jax.random.PRNGKey(3)}
    got = there_and_back(path, tree)
    assert assert_bits(got, tree) == 5
    np.testing.assert_array_equal(jax.random.bits(got["batch"][1, 2]), jax.random.bits(tree["batch"][1, 2]))
    saving.save(path, {"key": keys["rbg"]})
    for like, words in ((keys["threefry2x32"], r"key<fry>\[\]"), (jax.random.key_data(keys["rbg"]), r"uint32\[4\]")):
        with pytest.raises(ValueError, match=rf"'key' is {words} in the tree, key<rbg>\[\] in the file"):
            saving.load(path, {"key": like})
    saving.save(path, {"key": jax.random.PRNGKey(3)})
    with pytest.raises(ValueError, match=r"'key' is key<fry>\[\] in the tree, uint32\[2\] in the file"):
        saving.load(path, {"key": jax.random.key(0)})


# -- The format --------------------------------------------------------------------------------------------------------


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
    assert pairs.tobytes() == plain_bytes(patterns("complex128"))
    save_file(plain, path)
    theirs = saving.names(path)
    assert assert_bits(dict(theirs), load_file(path)) == len(plain)
    assert saving.metadata(path) == {}


def plain_bytes(array):
    return np.ascontiguousarray(array).tobytes()


def test_a_foreign_file_goes_through_a_plan(path):
    save_file({"w": np.ones(2, "f")}, path, metadata={"format": "pt"})
    assert saving.metadata(path) == {"format": "pt"}
    with pytest.raises(ValueError, match=r"was not written by saving.save.*write saving.plan\(path, model\)\(path\)"):
        saving.load(path, {"w": jnp.zeros(2)})
    assert_same(saving.plan(path, {"w": jnp.zeros(2)})(path), {"w": jnp.ones(2)})


@pytest.mark.parametrize("start", [pickle.dumps([1], 2), pickle.dumps([1]), b"PK\3\4"], ids=["2", "new", "zip"])
def test_a_pickle_is_not_opened(path, start):
    path.write_bytes(start)
    for read in (lambda: saving.load(path, {}), lambda: saving.metadata(path), lambda: saving.names(path)):
        with pytest.raises(ValueError, match=r"is a pickle, as PyTorch .*convert it once.*safetensors.torch.save_file"):
            read()


def test_it_is_read_whatever_its_name(tmp_path):
    for name in ("model.pt", "checkpoint", "é.bin", "x" * 255):
        for path in (tmp_path / name, str(tmp_path / name), bytes(tmp_path / name)):
            saving.save(path, {"w": ramp(2)}, metadata={"name": name})
            assert_same(saving.load(path, {"w": ramp(2)}), {"w": ramp(2)})
            assert saving.metadata(path) == {"name": name}


def test_a_damaged_file_is_no_pickle_whatever_its_length(path):
    """The length of a header stands first, and may be what a pickle begins with."""
    saving.save(path, {"w": ramp(2)}, metadata={"padding": ""})
    missing = 0x480 - (path.stat().st_size - 8 - ramp(2).nbytes)
    saving.save(path, {"w": ramp(2)}, metadata={"padding": missing * "x"})
    assert path.read_bytes()[:3] == b"\x80\4\0"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ValueError, match="is no safetensors file, or damaged"):
        saving.metadata(path)


def test_metadata_is_text_by_text(path, tmp_path):
    said = {"": "", "run": "7", 'é"\n': "😀\0", "treeparams": "1", "checksum": "00000000"}
    saving.save(path, {"w": ramp(2)}, metadata=said)
    assert saving.metadata(path) == said
    assert saving.metadata(str(path)) == said
    assert_same(saving.load(path, {"w": ramp(2)}), {"w": ramp(2)})
    with pytest.raises(ValueError, match=r"metadata 'treeparams.x': names that start with 'treeparams.' are this lib"):
        saving.save(path, {"w": ramp(2)}, metadata={"treeparams.x": "1"})
    with pytest.raises(ValueError, match=r"'\\ud800' is no Unicode text"):
        saving.save(path, {"w": ramp(2)}, metadata={"x": "\ud800"})
    assert saving.metadata(path) == said
    with pytest.raises(FileNotFoundError):
        saving.metadata(tmp_path / "none")


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize("metadata", [{"x": 1}, {1: "x"}, [1], "text"], ids=repr)
def test_metadata_that_are_no_text(path, metadata):
    with pytest.raises(TypeError, match=r"metadata is text by text, \{str: str\}, got"):
        saving.save(path, {"w": ramp(2)}, metadata=metadata)


# -- Ties --------------------------------------------------------------------------------------------------------------


class Codec(eqx.Module):
    encoder: jax.Array
    decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)


class Language(eqx.Module):
    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embed")
    other: jax.Array | None = None


def test_a_tie_is_in_the_file_once(path):
    shared, count, key = ramp(100, 100), jnp.arange(1000), jax.random.key(0)
    model = {"embed": shared, "head": [shared, shared], "n": count, "m": count, "key": (key, key)}
    got = there_and_back(path, model)
    assert assert_bits(got, model) == 7
    assert path.stat().st_size < shared.nbytes + count.nbytes + 2000
    assert set(saving.names(path)) == {"embed", "m", "key.0"}
    # A declared tie too, also through a transform, where its alias is what it is declared to be.
    codec, language = Codec(shared, shared.T), Language(shared, tp.copy(shared))
    for model in (codec, language):
        got = there_and_back(path, model)
        assert assert_same(got, model, identity=False) == 2
        assert path.stat().st_size < shared.nbytes + 1000
    assert got.embed is got.head


@pytest.mark.parametrize("make", [jnp.asarray, np.asarray], ids=["jax", "numpy"])
def test_an_alias_that_does_not_agree_yet_is_stored_by_itself(path, make):
    first, second = make(ramp(2, 3)), make(ramp(3, 2, start=7))
    third = make(ramp(2, 3, start=9))
    for model in (Codec(first, second), Language(first, third), Language(first, third, third), Codec(first, first.T)):
        got = there_and_back(path, model, like=model)
        assert_bits(got, model)


@pytest.mark.parametrize("where", ["file", "tree"])
def test_other_ties_are_refused_with_the_call_that_mends_it(path, where):
    shared = ramp(2)
    tied, apart = ({"a": shared, "deep": [leaf]} for leaf in (shared, tp.copy(shared)))
    saved, like = (tied, apart) if where == "file" else (apart, tied)
    saving.save(path, saved)
    call = {"file": "tp.tie(model, 'deep.0', to='a')", "tree": "tp.untie(model, 'deep.0')"}[where]
    with pytest.raises(ValueError, match=rf"'a'.* are one array in the {where} only: {re.escape(call)}$"):
        saving.load(path, like)
    assert_bits(saving.load(path, eval(call, {"tp": tp, "model": like})), saved)


def test_what_is_no_parameter_may_be_shared_or_not(path):
    """It is tied to nothing: whether it is one array in the file changes no meaning."""
    for leaf in (jnp.arange(2), jax.random.key(0)):
        shared, apart = (leaf, leaf), (leaf, tp.copy(leaf))
        for saved, like in ((shared, apart), (apart, shared)):
            assert_same(there_and_back(path, saved, like), saved, identity=False)


def test_a_declared_tie_in_the_file_only(path):
    saving.save(path, Codec(ramp(2, 3), ramp(2, 3).T))
    like = {"encoder": ramp(2, 3), "decoder": ramp(3, 2)}
    with pytest.raises(
        ValueError, match=r"'decoder' is transpose.* of 'encoder' in the file, .* declare it, tp.field\("
    ):
        saving.load(path, like)


# -- What does not fit -------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_said_at_once_before_anything_is_read(path, monkeypatch):
    read = []
    monkeypatch.setattr(_file, "read_bytes", lambda *args: read.append(args))
    saving.save(path, {"layers": [{"weight": ramp(2), "bias": ramp(1)}], "n": jnp.arange(2), "old": ramp(1)})
    like = {"layers": [{"weight": ramp(3), "bais": ramp(1)}], "n": ramp(2), "new": {"deep": ramp(1)}, "old": 0.5}
    with pytest.raises(ValueError, match=re.escape(f"{str(path)!r} does not fit the tree:\n")) as error:
        saving.load(path, like)
    for line in (
        "'layers.0.weight' is float32[3] in the tree, float32[2] in the file",
        "'layers.0.bais' is in the tree and not in the file; nearest: 'layers.0.bias'",
        "'layers.0.bias' is in the file and not in the tree; nearest: 'layers.0.bais'",
        "'n' is float32[2] in the tree, int32[2] in the file",
        "'new.deep' is in the tree and not in the file",
        "'old' is in the file and not in the tree",
    ):
        assert line in str(error.value)
    assert read == []


def test_checksums_are_compared_before_anything_is_read(path, monkeypatch):
    read, read_bytes = [], _file.read_bytes
    monkeypatch.setattr(_file, "read_bytes", lambda *args: read.append(args) or read_bytes(*args))
    tree = {"a": ramp(2), "z": ramp(3)}
    saving.save(path, tree)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1  # of the array that is read last
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match="'z' has another checksum than when it was saved"):
        saving.load(path, tree)
    assert read == []
    got = saving.load(path, tree, checksum=False)
    assert len(read) == 2
    assert [(got[name] == tree[name]).tolist() for name in tree] == [[True, True], [True, True, False]]


def test_what_is_no_array_stays_with_like(path):
    saved = {"w": ramp(2), "f": jnp.tanh, "n": 3, "x": np.float32(0.5), "name": "old", "none": None}
    like = {"w": jnp.zeros(2), "f": jnp.sin, "n": 4.5, "x": np.float64(7), "name": object(), "none": None}
    got = there_and_back(path, saved, like)
    assert [got[name] for name in ("f", "n", "x", "name")] == [like[name] for name in ("f", "n", "x", "name")]
    np.testing.assert_array_equal(got["w"], saved["w"])


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "m"
    saving.save(path, {"w": ramp(2)})
    gone, key = ramp(3), jax.random.key(1)
    gone.delete()
    jax.jit(lambda key: key, donate_argnums=0)(key)
    first = {"big": ramp(100, 1000)}  # it is written before what fails
    refused = [
        (
            {"abstract": jax.ShapeDtypeStruct((2,), jnp.float32)},
            ValueError,
            r"'abstract' is float32\[2\] without values",
        ),
        (first | {"gone": gone}, RuntimeError, "'gone' has been deleted, as by a step that donates it; keep a copy"),
        (first | {"n\ud800": ramp(1)}, ValueError, r"'n\\ud800' is no Unicode text"),
        (first | {"times": np.zeros(2, ">f4")}, TypeError, "'times' is a NumPy array of >f4, which JAX does not have"),
    ]
    if key.is_deleted():
        refused.append((first | {"key": key}, RuntimeError, "'key' has been deleted"))
    for tree, error, message in refused:
        with pytest.raises(error, match=message):
            saving.save(path, tree)
    with pytest.raises(ValueError, match=r"'w' is float32\[2\] without values"):
        jax.jit(lambda w: saving.save(path, {"w": w}))(ramp(2))
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    assert_same(saving.load(path, {"w": ramp(2)}), {"w": ramp(2)})


# -- Where arrays lie --------------------------------------------------------------------------------------------------


def test_loaded_arrays_lie_where_those_of_like_do(path):
    devices = jax.devices()
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    rows, whole, third = NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), SingleDeviceSharding(devices[3])
    tree = {"rows": ramp(8, 3), "whole": ramp(3), "third": ramp(4), "free": ramp(5), "keys": jax.random.split(KEY, 4)}
    saving.save(path, tree)
    like = emptied(tree)
    places = {"rows": rows, "whole": whole, "third": third, "keys": rows}
    like |= {name: jax.device_put(like[name], place) for name, place in places.items()}
    shapes = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places.get(n)) for n, leaf in tree.items()}
    for each in (like, shapes):
        got = saving.load(path, each)
        assert assert_same(got, tree) == 5
        assert {name: got[name].sharding for name in places} == places
        assert (got["third"].committed, got["free"].committed) == (True, False)
    # Sharded arrays are written whole, and go back onto one device.
    saving.save(path, got)
    assert_bits(saving.load(path, emptied(tree)), tree)
    with jax.default_device(devices[2]):
        free = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in tree.items() if name != "keys"}
    saving.save(path, {name: tree[name] for name in free})
    for leaf in saving.load(path, free).values():
        assert (leaf.devices(), leaf.committed) == ({devices[2]}, False)


KEY = jax.random.key(5)


def test_a_tie_over_several_devices(path):
    place = NamedSharding(jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",)), P("x"))
    codec = Codec(jax.device_put(ramp(2, 4), place), jax.device_put(ramp(2, 4).T, place))
    got = there_and_back(path, codec, like=codec)
    assert assert_same(got, codec) == 2
    assert (got.encoder.sharding, got.decoder.sharding) == (place, place)


def test_loaded_arrays_hang_on_nothing(path):
    tree = {"jax": ramp(300, 300), "numpy": np.arange(1000.0), "small": ramp(3)}
    got = there_and_back(path, tree)
    with open(path, "r+b") as file:
        file.truncate(0)
    assert assert_bits(got, tree) == 3
    again = there_and_back(path, tree)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert assert_bits(again, tree) == 3
    again["numpy"] += 1  # it may be written to
    arrays = {name: got[name] for name in ("jax", "small")}
    twice = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(arrays)
    np.testing.assert_array_equal(twice["jax"], 2 * tree["jax"])
    assert arrays["jax"].is_deleted()
    np.testing.assert_array_equal(again["jax"], tree["jax"])
