"""Files are compared as trees are: by name, with whatever of the two is a file."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from safetensors.numpy import save_file

import treeparams as tp
from treeparams import optim, saving

from .zoo import ZOO, filled, ramp


@pytest.fixture
def mlp():
    return filled(eqx.nn.MLP, 2, 1, 3, 1)


def rows(a, b, **options):
    return [(row.path, row.what, row.first, row.second) for row in tp.diff(a, b, **options).rows]


@pytest.mark.parametrize("name", ZOO)
def test_a_tree_does_not_differ_from_its_file(name, tmp_path):
    tree = ZOO[name].make()
    saving.save(tmp_path / "a", tree)
    for other in (tree, tmp_path / "a", saving.names(tmp_path / "a")):
        assert not tp.diff(tmp_path / "a", other)
        assert not tp.diff(other, str(tmp_path / "a"))


def test_the_same_rows_from_files_as_from_trees(mlp, tmp_path):
    a, b = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    other = eqx.tree_at(lambda mlp: mlp.layers[0].bias, mlp, mlp.layers[0].bias + 1)
    saving.save(a, mlp)
    saving.save(b, other)
    want = tp.diff(mlp, other).rows
    assert (want[0].what, want[0].absolute) == ("elements", pytest.approx(1))
    for pair in ((str(a), str(b)), (a, other), (mlp, b), (saving.names(a), saving.names(b)), (saving.names(a), b)):
        assert tp.diff(*pair).rows == want
    assert not tp.diff(str(a), str(b), atol=1.5)
    # An array that another program stores, and a dictionary of arrays by name.
    save_file(saving.names(other), b)
    assert tp.diff(a, b).rows == tp.diff(a, saving.names(other)).rows == want


def test_what_only_one_has_is_named_by_its_topmost_node(mlp, tmp_path):
    deep = filled(eqx.nn.MLP, 2, 1, 3, 3)
    saving.save(tmp_path / "a", {"model": mlp, "steps": jnp.array(3)})
    saving.save(tmp_path / "b", {"model": deep, "best": mlp})
    assert rows(tmp_path / "a", tmp_path / "b", atol=9) == [
        ("steps", "structure", "int32[]", "nothing"),
        ("best", "structure", "nothing", "4 leaves"),
        ("model.layers.2", "structure", "nothing", "2 leaves"),
        ("model.layers.3", "structure", "nothing", "2 leaves"),
        ("model.layers.1.weight", "shape", "float32[1,3]", "float32[3,3]"),
        ("model.layers.1.bias", "shape", "float32[1]", "float32[3]"),
    ]
    assert not tp.diff(saving.names(tmp_path / "a", "model"), mlp)
    assert tp.diff(tmp_path / "a", mlp).paths[:2] == ("model", "steps")


def test_ties_and_dtypes(tmp_path):
    shared = jnp.arange(3.0)
    tied, untied = {"a": shared, "b": shared}, {"a": shared, "b": jnp.copy(shared)}
    saving.save(tmp_path / "tied", tied)
    saving.save(tmp_path / "untied", untied)
    want = [("a", "tie", "b", "nothing")]
    assert rows(tmp_path / "tied", tmp_path / "untied") == rows(tied, tmp_path / "untied") == rows(tied, untied) == want
    assert rows(tmp_path / "tied", {"a": shared, "b": shared + 1})[-1][0] == "b"
    half = {"a": shared.astype(jnp.bfloat16), "b": shared}
    assert rows(tmp_path / "untied", half) == [("a", "dtype", "float32[3]", "bfloat16[3]")]
    saving.save(tmp_path / "wide", {"a": np.arange(3.0) + 1e-12, "b": np.arange(3.0)})
    assert tp.diff(tmp_path / "wide", tmp_path / "untied").rows[0].absolute == pytest.approx(1e-12, rel=1e-3)


def test_a_tie_that_is_computed_is_in_no_file(tmp_path):
    class Tied(eqx.Module):
        down: jax.Array
        up: jax.Array = tp.field(tied_to="down", transform=jnp.transpose)

    weight = jnp.arange(6.0).reshape(2, 3)
    model = Tied(weight, weight.T)
    saving.save(tmp_path / "a", model)
    assert list(saving.names(tmp_path / "a")) == ["down"]
    assert not tp.diff(tmp_path / "a", model)
    assert not tp.diff(tmp_path / "a", saving.names(model))
    assert rows(Tied(weight, weight.T + 1), tmp_path / "a") == []
    saving.save(tmp_path / "b", Tied(weight, weight.T + 1))  # which is stored by itself
    assert tp.diff(tmp_path / "b", model).paths == ("up",)


@pytest.mark.parametrize(
    "tree",
    [{"a.b": ramp(2)}, {"a.b": ramp(2), "c": {"d": ramp(1)}, "n.m": 3}, {"m": {"a.b": ramp(2), "__metadata__": 1}}],
)
def test_keys_with_dots(tree, tmp_path):
    saving.save(tmp_path / "a", tree)
    assert not tp.diff(tmp_path / "a", tree)
    assert not tp.diff(tree, tmp_path / "a")
    save_file(saving.names(tree), tmp_path / "b")
    save_file({name.replace('"', ""): each for name, each in saving.names(tree).items()}, tmp_path / "c")
    for other in (tmp_path / "b", tmp_path / "c"):
        assert not tp.diff(other, tmp_path / "a")
        assert not tp.diff(tree, other)
    more = jax.tree.map(lambda leaf: leaf + 1 if hasattr(leaf, "shape") else leaf, tree)
    assert len(tp.diff(tmp_path / "c", more).rows) == len(tp.diff(more, tree).rows)


def test_states_by_name(tmp_path):
    model = {"w": ramp(2, 3), "b": ramp(3)}
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9))
    state = tx.init(model)
    saving.save(tmp_path / "a", {"model": model, "optimiser": state})
    _, after = optim.step(tx, tp.copy(model), state, model)
    saving.save(tmp_path / "b", {"model": model, "optimiser": after})
    diff = tp.diff(tmp_path / "a", tmp_path / "b")
    assert {path.split(".")[0] for path in diff.paths} == {"optimiser"}
    assert set(tp.diff(saving.names(tmp_path / "a", "optimiser"), after).paths) == set(tp.diff(state, after).paths)


def test_numbers_and_texts(tmp_path):
    run = {"w": np.ones(2, np.float32), "epoch": 5, "best": 0.25, "name": "a", "rate": np.float32(0.5), "f": jnp.tanh}
    saving.save(tmp_path / "a", {"run": run})
    other = run | {"epoch": 6, "best": 0.5, "rate": 0.5, "f": jnp.sin}
    saving.save(tmp_path / "b", {"run": other})
    want = [
        ("run.best", "value", "0.25 (float)", "0.5 (float)"),
        ("run.epoch", "value", "5 (int)", "6 (int)"),
        ("run.rate", "value", "0.5 (float32)", "0.5 (float)"),
    ]
    assert sorted(rows(tmp_path / "a", tmp_path / "b")) == sorted(rows(tmp_path / "a", {"run": other})) == want
    assert sorted(rows(saving.names(tmp_path / "a", "run"), other))[0] == ("best", *want[0][1:])
    assert [path for path, *_ in rows(tmp_path / "a", tmp_path / "b", atol=1)] == ["run.epoch", "run.rate"]
    assert rows(tmp_path / "a", {"run": run | {"epoch": np.int32([5])}}) == [
        ("run.epoch", "type", "5 (int)", "int32[1]")
    ]
    assert rows({"run": {"w": run["w"]}, "step": 3}, tmp_path / "a")[0] == ("step", "structure", "3 (int)", "nothing")
    # A file of another program has no numbers, so nothing is said of them.
    save_file({"run.w": run["w"]}, tmp_path / "theirs")
    assert not tp.diff(tmp_path / "a", tmp_path / "theirs")
    assert not tp.diff(tmp_path / "theirs", {"run": other})


def test_errors(tmp_path, mlp):
    with pytest.raises(OSError, match="nothing"):
        tp.diff(tmp_path / "nothing", mlp)
    with pytest.raises(OSError, match="relu"):
        tp.diff("relu", "relu")
    saving.save(tmp_path / "texts", ["relu", "tanh"])
    assert not tp.diff(tmp_path / "texts", ["relu", "tanh"])  # no two files
    assert tp.diff(["relu", "tanh"], ["relu", "gelu"]).paths == ("1",)
    with pytest.raises(TypeError, match="a Layout and a str"):
        tp.diff(tp.layout(mlp), "a")
