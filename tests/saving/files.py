"""What tests of files share: errors, trees that are compared bit for bit, and files as other programs write them."""

import dataclasses
import json
import os
import warnings
import zlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import saving

from ..zoo import as_data, pattern


def refused(words, call, *args, kind=ValueError, **options):
    """Makes a call that is refused by this kind of error, and no subclass, in these words; returns all of them."""
    with pytest.raises(kind, match=words) as error:
        call(*args, **options)
    assert kind is OSError or type(error.value) is kind
    return str(error.value)


planned = lambda source, like, **options: saving.plan(source, like, **options)(source)
names_in = lambda folder: sorted(os.listdir(folder))
flipped = lambda renames: {right: left for left, right in renames.items()}
shapes = lambda tree: jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


class Transposed(eqx.Module):
    encoder: jax.Array
    decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)


def row(*shape, dtype=np.float32, start=0):
    """Distinct values, in NumPy."""
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def emptied(tree):
    """The tree with zeros, tied as it is."""
    made = {}

    def zeros(leaf):
        if type(leaf) in (bool, int, float, complex, str):
            return type(leaf)()
        if not hasattr(leaf, "dtype"):
            return leaf
        data = as_data(leaf)
        empty = np.zeros_like(data)  # in the same order, such as Fortran's
        if isinstance(leaf, np.ndarray):
            return empty
        return jnp.asarray(empty) if data is leaf else jax.random.wrap_key_data(empty, impl=jax.random.key_impl(leaf))

    return jax.tree.map(lambda leaf: made.setdefault(id(leaf), zeros(leaf)), tree)


def abstract(leaf):
    """As `eqx.filter_eval_shape` gives it."""
    if not hasattr(leaf, "dtype"):
        return leaf
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype if is_key else jax.dtypes.canonicalize_dtype(leaf.dtype))


def bits(tree):
    arrays = [as_data(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")]
    return [(array.shape, array.dtype, np.asarray(array).tobytes()) for array in arrays]


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
    ours, theirs = ([pair[i] for pair, it in zip(pairs, are_trained, strict=True) if it] for i in (0, 1))
    assert pattern(ours) == pattern(theirs)
    others = [pair for pair in pairs if not hasattr(pair[1], "dtype")]
    assert all(a is b or (type(a), repr(a)) == (type(b), repr(b)) for a, b in others)
    return len(arrays)


def fresh(tx, model):
    """What `tx.init(model)` returns, with zeros of NumPy: JAX compiles a program for each of its own."""
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), jax.eval_shape(lambda: tx.init(model)))


def taken(state, steps=2):
    """The state with other numbers in all that runs, as if steps had been taken."""
    leaves, treedef = jax.tree.flatten(state.runs)
    floats = [jnp.issubdtype(x.dtype, jnp.inexact) for x in leaves]
    others = lambda i, x: row(*x.shape, dtype=x.dtype, start=9 * i) if floats[i] else np.asarray(x + steps, x.dtype)
    runs = [others(i, x) for i, x in enumerate(leaves)]
    counts = [np.asarray(count + steps * (i < len(state.runs)), np.int32) for i, count in enumerate(state.counts)]
    return dataclasses.replace(state, runs=treedef.unflatten(runs), counts=tuple(counts))


def there_and_back(path, tree, like=None):
    saving.save(path, tree)
    return saving.load(path, emptied(tree) if like is None else like)


def tree_of(fill):
    """All of NumPy, so that JAX stays at rest; one array is larger than what is written at once."""
    weight = np.full((2, 3), fill, np.float32)
    low = np.full((3, 600), fill, "f2")
    return {"first": weight, "second": weight, "z": np.full(2, fill, np.complex64), "low": low}


fill_of = lambda path: float(saving.load(path, tree_of(0))["first"][0, 0])
entry = lambda dtype="F32", shape=(1,), offsets=(0, 4): {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def write(path, header, data=b"", length=None):
    """Writes a file in the format of safetensors, right or wrong."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)


def header_of(data):
    """The JSON of a file, and where its arrays begin."""
    start = 8 + int.from_bytes(data[:8], "little")
    return json.loads(data[8:start]), start


def lying(path, data, change):
    """Writes a good file with other words in its header, and the checksum that is right for them."""
    header, start = header_of(data)
    said = header["__metadata__"]
    words = json.loads(said["treeparams.header"])
    changed = change(words)
    said["treeparams.header"] = json.dumps(words) if changed is None else changed
    if changed == "":
        del said["treeparams.header"]
    said["treeparams.checksum"] = "0" * 8
    text = json.dumps(header, separators=(",", ":")).encode()
    write(path, text.replace(b"0" * 8, b"%08x" % zlib.crc32(text), 1), data[start:])
