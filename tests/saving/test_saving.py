"""save and load: a tree in one file and back, bit for bit, in a format that others read."""

import functools
import io
import pickle
import warnings
import zipfile

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax.serialization import msgpack_serialize
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

import treeparams as tp
from treeparams import saving

from ..zoo import ZOO, as_data, assert_same, enable_x64, models, pattern, ramp


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Each test writes it anew: that is what a file of `save` is for."""
    return tmp_path_factory.mktemp("saving") / "model.safetensors"


def emptied(tree):
    """The tree with zeros, tied as it is."""
    made = {}

    def zeros(leaf):
        if type(leaf) in (bool, int, float, complex, str):
            return type(leaf)()
        if not hasattr(leaf, "dtype"):
            return leaf
        if isinstance(leaf, np.ndarray):
            return np.zeros_like(leaf)
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = jax.random.key_data(leaf)
            return jax.random.wrap_key_data(jnp.asarray(np.zeros(data.shape, "u4")), impl=jax.random.key_impl(leaf))
        return jnp.asarray(np.zeros(leaf.shape, leaf.dtype))

    return jax.tree.map(lambda leaf: made.setdefault(id(leaf), zeros(leaf)), tree)


def abstract(leaf):
    """As `eqx.filter_eval_shape` gives it."""
    is_key = jnp.issubdtype(getattr(leaf, "dtype", None), jax.dtypes.prng_key)
    if not hasattr(leaf, "dtype") or is_key:
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if is_key else leaf
    return jax.ShapeDtypeStruct(leaf.shape, jax.dtypes.canonicalize_dtype(leaf.dtype))


def assert_bits(got, want):
    """Equal structure, types and bits; the same parameters tied. Returns how many arrays were compared."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    pairs = list(zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True))
    arrays = [pair for pair in pairs if hasattr(pair[1], "dtype")]
    for a, b in arrays:
        assert (type(a), a.dtype, a.shape) == (type(b), b.dtype, b.shape)
        assert np.asarray(as_data(a)).tobytes() == np.asarray(as_data(b)).tobytes()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nothing is trained
        are_trained = jax.tree.leaves(tp.layout(want).mask)
    assert pattern([a for (a, _), it in zip(pairs, are_trained, strict=True) if it]) == pattern([
        b for (_, b), it in zip(pairs, are_trained, strict=True) if it
    ])
    others = [pair for pair in pairs if not hasattr(pair[1], "dtype")]
    assert all(a is b or (type(a), repr(a)) == (type(b), repr(b)) for a, b in others)
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
    assert {leaf.weak_type for leaf in jax.tree.leaves(got) if hasattr(leaf, "weak_type")} <= {False}
    differ = tp.diff(got, model)  # Equinox's counter is weak
    assert list(differ.paths) == (["state.batch_counter"] if name == "batch norm" else [])
    # A message is such a file, too; and so is the change to a model with equal bits.
    message = saving.dumps(model, version=3)
    got, version = saving.loads(message, emptied(model), version=2)
    assert version == 3
    assert_bits(got, model)
    same = saving.dumps(model, version=4, since=(3, model))
    assert_bits(saving.loads(same, got if name != "numpy leaves" else model, version=3)[0], model)
    assert len(same) <= len(message)


def test_what_is_made_of_a_model(path):
    for make in (tp.partition, tp.ravel, tp.stack, functools.partial(tp.Ema, decay=0.5)):
        saved, like = (make({"a": ramp(2, start=start), "b": [ramp(2, 2), jnp.tanh]}) for start in (0, 1))
        got = there_and_back(path, saved, like)
        assert not tp.diff(got, saved)
        assert tp.diff(got, like)


@hypothesis.settings(max_examples=20, deadline=None)
@hypothesis.given(model=models(), key=st.text(max_size=20))
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
    data = np.random.default_rng(0).permutation(np.arange(256, dtype=np.uint8))
    return data.view(dtype).reshape(2, -1)


def test_every_dtype_with_every_bit(path):
    of_numpy = {name: patterns(name) for name in [*JAX_DTYPES, *WIDE]}
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


def _archive(*names):
    """A zip archive with these names."""
    with io.BytesIO() as file:
        with zipfile.ZipFile(file, "w") as archive:
            for name in names:
                archive.writestr(name, b"")
        return file.getvalue()


_MANY = msgpack_serialize({f"w{i}": np.ones(1) for i in range(20)})
_OTHERS = [
    (pickle.dumps([1], 2), r"is a pickle; .*pickle\.load\(open\(path"),
    (pickle.dumps({"w": np.ones(2)}), r"is a pickle; .*pickle\.load\(open\(path"),
    (_archive("model/data.pkl", "model/data/0"), r"as PyTorch writes it; .*safetensors\.torch\.save_file"),
    (b"\x80\2\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19.", r"as PyTorch writes it; .*with PyTorch"),  # before archives
    (_archive("m/data.pkl", "m/constants.pkl", "m/code/a.py"), r"TorchScript; .*torch\.jit\.load"),
    (_archive("w.npy"), r"np\.savez; use np.load\(path\) as source: saving\.plan\(np\.load\(path\), model\)"),
    (b"\x93NUMPY\1\0", r"NumPy, as by eqx\.tree_serialise_leaves"),
    (msgpack_serialize({"params": {"w": np.ones(2)}}), r"MessagePack, as Flax .*msgpack_restore"),
    (_MANY, r"MessagePack, as Flax .*msgpack_restore"),
    (b"\x89HDF\r\n\x1a\n" + bytes(40), r"HDF5; open it with h5py\.File"),
    (b"GGUF\3\0\0\0" + bytes(40), r"GGUF; .*gguf\.GGUFReader\(path\)"),
    (b"\x08\x08\x12\x07pytorch\x1a\x05", r"ONNX; .*onnx\.load\(path\)"),
    (b"version https://git-lfs.github.com/spec/v1\noid sha256:4d\n", "pointer of Git LFS .*git lfs pull"),
    (b"\n<!DOCTYPE html><html lang='en'>", "a web page, as a failed download .*again"),
]


def test_a_file_of_another_program_is_called_by_its_name(path):
    for content, said in _OTHERS:
        path.write_bytes(content)
        for read in (lambda: saving.load(path, {}), lambda: saving.metadata(path), lambda: saving.names(path)):
            with pytest.raises(ValueError, match=said):
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
    with pytest.raises(ValueError, match=r"metadata .*: names that start with 'treeparams.' are reserved"):
        saving.save(path, {"w": ramp(2)}, metadata={"treeparams.x": "1"})
    with pytest.raises(ValueError, match=r"ud800' is not Unicode text"):
        saving.save(path, {"w": ramp(2)}, metadata={"x": "\ud800"})
    assert saving.metadata(path) == said
    with pytest.raises(FileNotFoundError):
        saving.metadata(tmp_path / "none")


@pytest.mark.usefixtures("without_type_checks")
def test_metadata_that_are_no_text(path):
    for metadata in ({"x": 1}, {1: "x"}, [1], "text"):
        with pytest.raises(TypeError, match=r"metadata must be a dictionary of texts, \{str: str\}, got"):
            saving.save(path, {"w": ramp(2)}, metadata=metadata)


# -- What is not in a file ---------------------------------------------------------------------------------------------


def test_what_cannot_be_saved_leaves_the_old_file(tmp_path):
    path = tmp_path / "m"
    saving.save(path, {"w": ramp(2)})
    gone, key = ramp(3), jax.random.key(1)
    gone.delete()
    key.delete()
    first = {"big": ramp(100, 1000)}  # it is written before what fails
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    refused = [
        ({"abstract": shape}, ValueError, r"'abstract' is float32\[2\] without values"),
        (first | {"gone": gone}, RuntimeError, "'gone' has been deleted, as by a step that donates it; keep a copy"),
        (first | {"key": key}, RuntimeError, "'key' has been deleted"),
        (first | {"n\ud800": ramp(1)}, ValueError, r"n\\ud800' is not Unicode text"),
        (first | {"note": "\udcff"}, ValueError, r"note.*udcff' is not Unicode text, so it cannot be saved"),
        (first | {"times": np.zeros(2, ">f4")}, TypeError, "'times' is a NumPy array of >f4, which JAX does not sup"),
    ]
    for tree, error, message in refused:
        with pytest.raises(error, match=message):
            saving.save(path, tree)
    with pytest.raises(ValueError, match=r"'w' is float32\[2\] without values"):
        jax.jit(lambda w: saving.save(path, {"w": w}))(ramp(2))
    assert [each.name for each in tmp_path.iterdir()] == ["m"]
    assert_same(saving.load(path, {"w": ramp(2)}), {"w": ramp(2)})
