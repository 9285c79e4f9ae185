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

from ..zoo import with_refs


def emptied():
    return {**with_refs(), "w": jnp.zeros(2), "mean": jax.new_ref(jnp.zeros(3)), "steps": jax.new_ref(jnp.array(0))}


def assert_full(model):
    np.testing.assert_array_equal(model["mean"][...], [7, 7, 7])
    np.testing.assert_array_equal(model["w"], with_refs()["w"])
    assert int(model["steps"][...]) == 4


@pytest.fixture
def path(tmp_path):
    saving.save(tmp_path / "model.safetensors", with_refs())
    return tmp_path / "model.safetensors"


def test_a_file_has_the_values_of_refs_and_the_digest_of_arrays(path, tmp_path):
    stored = load_file(path)
    assert sorted(stored) == ["mean", "seen", "steps", "w"]
    np.testing.assert_array_equal(stored["mean"], [7, 7, 7])
    model = with_refs()
    arrays = {**model, "mean": model["mean"][...], "steps": model["steps"][...]}
    saving.save(tmp_path / "arrays", arrays)
    assert (tmp_path / "arrays").read_bytes() == path.read_bytes()
    assert saving.dumps(arrays) == saving.dumps(model)
    for names in (saving.names(model), saving.names({"net": model}, "net"), saving.names(path)):
        assert sorted(names) == sorted(stored)
        np.testing.assert_array_equal(names["mean"], [7, 7, 7])


def loads(path, like):
    return saving.loads(path.read_bytes(), like)[0]


@pytest.mark.parametrize("is_of_refs", [True, False])
def test_what_is_loaded_is_written_into_refs(path, is_of_refs):
    if not is_of_refs:
        model = with_refs()
        saving.save(path, {**model, "mean": model["mean"][...], "steps": model["steps"][...]})
    for load in (
        saving.load,
        loads,
        lambda path, like: saving.plan(path, like)(path),
        lambda path, like: saving.plan(with_refs(), like)(with_refs()),
        lambda path, like: saving.plan(saving.names(path), like)(load_file(path)),
    ):
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


def test_a_file_is_compared_with_refs_by_value(path):
    model = with_refs()
    assert not tp.diff(str(path), model)
    model["mean"][...] = jnp.array([7.0, 5.0, 7.0])
    assert [(row.path, row.absolute) for row in tp.diff(model, str(path)).rows] == [("mean", 2.0)]


@pytest.mark.skipif(not hasattr(jax, "Ref"), reason="before JAX 0.7.2 the type of refs is private")
def test_a_ref_in_a_leaf_that_is_no_pytree_is_refused():
    with pytest.raises(TypeError, match=r"SimpleNamespace and not a pytree, so its array .*\[2\]"):
        saving.dumps({"held": types.SimpleNamespace(mean=jax.new_ref(jnp.ones(2)))})


def test_nothing_is_written_before_all_is_checked(path):
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    like = emptied()
    for load in (saving.load, lambda path, like: saving.plan(path, like)(path), loads):
        with pytest.raises(ValueError, match="checksum"):
            load(path, like)
        with pytest.raises(ValueError, match="mean"):
            load(path, {**like, "mean": jax.new_ref(jnp.zeros(2))})
        np.testing.assert_array_equal(like["mean"][...], [0, 0, 0])
        assert int(like["steps"][...]) == 0


def test_a_change_of_a_ref_is_sent():
    have, model, before = with_refs(), with_refs(), with_refs()
    model["mean"][...] = jnp.array([7.0, 8.0, 7.0])
    message = saving.dumps(model, version=2, since=(1, before))
    got, _ = saving.loads(message, have, version=1)
    assert got["mean"] is have["mean"]
    np.testing.assert_array_equal(have["mean"][...], [7, 8, 7])


def test_keys_and_refs_at_two_paths(tmp_path):
    model, like = ({"key": jax.new_ref(jax.random.key(seed)), "a": ref, "b": ref} for seed, ref in
                   ((3, jax.new_ref(jnp.ones(2))), (0, jax.new_ref(jnp.zeros(2)))))  # fmt: skip
    saving.save(tmp_path / "two", model)
    got = saving.load(tmp_path / "two", like)
    assert got["a"] is got["b"] is like["a"]
    np.testing.assert_array_equal(got["a"][...], [1, 1])
    np.testing.assert_array_equal(jax.random.key_data(got["key"][...]), jax.random.key_data(jax.random.key(3)))


@pytest.mark.skipif(not hasattr(nnx, "with_vars"), reason="this version of Flax has no variables that are refs")
def test_a_model_of_nnx_under_ref(tmp_path):
    class Net(nnx.Module):
        def __init__(self, seed):
            rngs = nnx.Rngs(seed)
            self.dense, self.norm = nnx.Linear(2, 3, rngs=rngs), nnx.BatchNorm(3, rngs=rngs)

    with nnx.var_defaults(ref=True):
        net, like = Net(0), Net(1)
    states = [nnx.split(each)[1] for each in (net, like)]
    saving.save(tmp_path / "net", states[0])
    names = ["dense.bias", "dense.kernel", "norm.bias", "norm.mean", "norm.scale", "norm.var"]
    assert sorted(load_file(tmp_path / "net")) == sorted(saving.names(net)) == names
    assert tp.diff(*states).paths == ("dense.kernel",)
    refs = jax.tree.leaves(like)
    got = saving.load(tmp_path / "net", states[1])
    assert all(a is b is c for a, b, c in zip(jax.tree.leaves(got), refs, jax.tree.leaves(like), strict=True))
    np.testing.assert_array_equal(like.dense.kernel[...], net.dense.kernel[...])
    target = tp.copy(net)
    net.dense.kernel[...] = jnp.zeros((2, 3))
    np.testing.assert_array_equal(target.dense.kernel[...], like.dense.kernel[...])
    with pytest.raises(ValueError, match=r"got a ref.* at 'dense.bias', 'dense.kernel', 'norm.bias' and 1 more"):
        tp.layout(states[0])
    arrays = nnx.split(nnx.with_vars(net, ref=False))[1]
    assert len(tp.layout(arrays).slots) == 4
