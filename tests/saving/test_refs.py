"""Refs are saved by their values, and loaded into the refs of the tree that is given."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

import treeparams as tp
from treeparams import saving
from treeparams._tree.types import value_of

from ..zoo import ramp, with_refs
from .files import planned, refused

without_refs = lambda: {name: value_of(leaf) for name, leaf in with_refs().items()}
refs_of = lambda **arrays: {name: jax.new_ref(array) for name, array in arrays.items()}
emptied = lambda: with_refs() | {"w": jnp.zeros(2)} | refs_of(mean=jnp.zeros(3), steps=jnp.array(0))
loads = lambda path, like: saving.loads(path.read_bytes(), like)[0]


def assert_full(model):
    for name, want in {"w": ramp(2), "mean": [7, 7, 7], "steps": 4}.items():
        np.testing.assert_array_equal(value_of(model[name]), want)


@pytest.fixture
def path(path):
    saving.save(path, with_refs())
    return path


def test_a_file_has_the_values_of_refs_and_the_digest_of_arrays(path, tmp_path):
    stored = load_file(path)
    assert sorted(stored) == ["mean", "seen", "steps", "w"]
    np.testing.assert_array_equal(stored["mean"], [7, 7, 7])
    model = with_refs()
    saving.save(tmp_path / "arrays", without_refs())
    assert (tmp_path / "arrays").read_bytes() == path.read_bytes()
    assert saving.dumps(without_refs()) == saving.dumps(model)
    for names in (saving.names(model), saving.names({"net": model}, "net"), saving.names(path)):
        assert sorted(names) == sorted(stored)
        np.testing.assert_array_equal(names["mean"], [7, 7, 7])


@pytest.mark.parametrize("made", [with_refs, without_refs])
def test_what_is_loaded_is_written_into_refs(path, made):
    saving.save(path, made())
    of_memory = lambda path, like: planned(with_refs(), like)
    of_theirs = lambda path, like: saving.plan(saving.names(path), like)(load_file(path))
    for load in (saving.load, loads, planned, of_memory, of_theirs):
        like = emptied()
        got = load(path, like)
        assert (got["mean"], got["steps"]) == (like["mean"], like["steps"])
        assert_full(got)
        got = load(path, {**like, "mean": jnp.zeros(3), "steps": jnp.array(0)})
        assert isinstance(got["mean"], jax.Array)
        assert_full(got)
    like = emptied()
    got = saving.plan({"mean": np.ones(3, np.float32)}, like, strict=False)({"mean": np.full(3, 2, np.float32)})
    np.testing.assert_array_equal(like["mean"][...], [2, 2, 2])  # what comes, and nothing else
    assert got["steps"] is like["steps"]
    assert int(like["steps"][...]) == 0


def test_refs_are_compared_by_value_and_none_is_lost_in_a_leaf(path):
    model = with_refs()
    assert not tp.diff(str(path), model)
    model["mean"][...] = jnp.array([7.0, 5.0, 7.0])
    assert [(row.path, row.absolute) for row in tp.diff(model, str(path)).rows] == [("mean", 2.0)]
    if hasattr(jax, "Ref"):  # before JAX 0.7.2 the type of refs is private
        held = types.SimpleNamespace(mean=jax.new_ref(jnp.ones(2)))
        refused(r"SimpleNamespace and not a pytree, so its ar.*\[2\]", saving.dumps, {"held": held}, kind=TypeError)


def test_nothing_is_written_before_all_is_checked(path):
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    like = emptied()
    for load in (saving.load, planned, loads):
        refused("checksum", load, path, like)
        refused("mean", load, path, {**like, "mean": jax.new_ref(jnp.zeros(2))})
        np.testing.assert_array_equal(like["mean"][...], [0, 0, 0])
        assert int(like["steps"][...]) == 0


def test_changes_of_refs_keys_and_refs_at_two_paths(path):
    have, model = with_refs(), with_refs()
    model["mean"][...] = jnp.array([7.0, 8.0, 7.0])
    got, _ = saving.loads(saving.dumps(model, version=2, since=(1, with_refs())), have, version=1)
    assert got["mean"] is have["mean"]
    np.testing.assert_array_equal(have["mean"][...], [7, 8, 7])
    refs = [jax.new_ref(jnp.full(2, fill)) for fill in (1.0, 0.0)]
    model, like = ({"key": jax.new_ref(jax.random.key(i)), "a": ref, "b": ref} for i, ref in enumerate(refs))
    saving.save(path, model)
    got = saving.load(path, like)
    assert got["a"] is got["b"] is like["a"]
    np.testing.assert_array_equal(got["a"][...], [1, 1])
    np.testing.assert_array_equal(*(jax.random.key_data(its["key"][...]) for its in (got, model)))


@pytest.mark.skipif(not hasattr(nnx, "with_vars"), reason="this version of Flax has no variables that are refs")
def test_a_model_of_nnx_under_ref(path):
    class Net(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.dense, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

    with nnx.var_defaults(ref=True):
        net, like = Net(0), Net(1)
    states = [nnx.split(each)[1] for each in (net, like)]
    saving.save(path, states[0])
    names = ["dense.bias", "dense.kernel", "norm.bias", "norm.mean", "norm.scale", "norm.var"]
    assert sorted(load_file(path)) == sorted(saving.names(net)) == names
    assert tp.diff(*states).paths == ("dense.kernel",)
    refs = jax.tree.leaves(like)
    got = saving.load(path, states[1])
    assert all(a is b is c for a, b, c in zip(jax.tree.leaves(got), refs, jax.tree.leaves(like), strict=True))
    np.testing.assert_array_equal(like.dense.kernel[...], net.dense.kernel[...])
    target = tp.copy(net)
    net.dense.kernel[...] = jnp.zeros((2, 3))
    np.testing.assert_array_equal(target.dense.kernel[...], like.dense.kernel[...])
    refused(r"got a ref.* at 'dense.bias', 'dense.kernel', 'norm.bias' and 1 more", tp.layout, states[0])
    assert len(tp.layout(nnx.split(nnx.with_vars(net, ref=False))[1]).slots) == 4
