"""A diff names what differs between two trees or files, at its path, and nothing else."""

import dataclasses
import functools
import math
from typing import Any

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import save_file

import treeparams as tp
from treeparams import _diff, optim, saving

from .saving.files import Transposed, refused
from .zoo import ZOO, Net, Norm, enable_x64, filled, first_devices, models, ramp, with_refs

f32 = functools.partial(np.array, dtype=np.float32)
i64 = functools.partial(np.array, dtype=np.int64)
c64 = functools.partial(np.array, dtype=np.complex64)
f8 = functools.partial(np.array, dtype=ml_dtypes.float8_e4m3fn)


def seen(a: Any, b: Any, **options: Any) -> list[tuple[str, ...]]:
    """What differs, in words; the other way round it is the same with the sides exchanged."""
    rows, turned = tp.diff(a, b, **options).rows, tp.diff(b, a, **options).rows
    if not any(options.values()):
        assert {(row.path, row.what) for row in rows} == {(row.path, row.what) for row in turned}
    return [row[:4] for row in rows]


def elements(here: Any, there: Any, **options: Any) -> Any:
    """The one row, of the elements of two arrays."""
    (row,) = tp.diff(here, there, **options).rows
    assert (row.path, row.what) == ("", "elements")
    return row


@pytest.fixture
def stored(tmp_path):
    """A function that writes a tree to a file, as `saving.save` or another function does, and returns its path."""

    def store(name: str, tree: Any, save: Any = lambda tree, path: saving.save(path, tree)) -> Any:
        save(tree, tmp_path / name)
        return tmp_path / name

    return store


# -- Laws --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ZOO)
def test_a_tree_does_not_differ_from_itself_a_copy_or_its_file(name, stored):
    specimen = ZOO[name]
    tree = specimen.make()
    abstract, file = eqx.filter_eval_shape(lambda: tree), stored("a", tree)
    copies = (tree, jax.tree.map(lambda leaf: leaf, tree), tp.copy(tree), abstract, file)
    pairs = [*((tree, other) for other in copies), (abstract, abstract), (str(file), tree)]
    for pair in [*pairs, (file, file), (file, saving.names(file)), (saving.names(file), str(file))]:
        diff = tp.diff(*pair)
        found = (bool(diff), diff.rows, diff.paths, str(diff), repr(diff))
        assert found == (False, (), (), "no differences", "Diff(no differences)")
    layout = specimen.layout(tree)
    by_identity = layout.ties and not specimen.options.get("ties")  # of which shapes alone tell nothing
    assert {row.what for row in tp.diff(layout, specimen.layout(abstract)).rows} == ({"tie"} if by_identity else set())


def _moved(leaf: Any) -> tuple[Any, str]:
    """Another leaf in place of this one, and what differs."""
    if not hasattr(leaf, "dtype"):
        return (leaf, 1), "structure"
    if not leaf.size:
        return np.zeros((*leaf.shape, 1), leaf.dtype), "shape"
    return np.array(~leaf if leaf.dtype == bool else leaf + np.ones((), leaf.dtype)), "elements"


@settings(deadline=None, max_examples=25)
@given(models(), st.data())
def test_one_change_is_found_at_its_path(model, data):
    model = jax.tree.map(lambda leaf: np.array(leaf) if hasattr(leaf, "dtype") else leaf, model)  # no ties
    leaves, treedef = jax.tree.flatten(model)
    if not leaves or isinstance(model, str):  # a text alone is a file
        return
    at = data.draw(st.integers(0, len(leaves) - 1))
    leaf, what = _moved(leaves[at])
    other = jax.tree.unflatten(treedef, [*leaves[:at], leaf, *leaves[at + 1 :]])
    alone = jax.tree.unflatten(treedef, [np.ones(2, np.float32) if i == at else 0 for i in range(len(leaves))])
    path = tp.layout(alone).paths or tp.layout(alone, thaw="**").paths
    diff = tp.diff(model, other)
    assert (diff.paths, [row.what for row in diff.rows]) == (path, [what])
    assert seen(model, other)[0][0] == path[0]
    assert not tp.diff(model, tp.copy(model))


# -- What a compiler sees ----------------------------------------------------------------------------------------------


class Layer(eqx.Module):
    weight: Any
    kind: Any = eqx.field(static=True)


@functools.partial(jax.tree_util.register_dataclass, data_fields=["weight"], meta_fields=["kind"])
@dataclasses.dataclass
class Registered:
    weight: Any
    kind: Any


W = ramp(2)
SHARED = ramp(2, 3)
SEEN = {  # two trees, and the rows of their diff
    "a node alone": ({"a": [W, {"b": W}]}, {}, ("a", "structure", "list of 2 leaves", "nothing")),
    "None and an array": ([None, W], [W, W], ("0", "structure", "None", "float32[2]")),
    "None and an empty node": ([None], [()], ("0", "structure", "None", "tuple of 0 leaves")),
    "another class": ([{"a": W}], [Norm(W, W)],
        ("0", "class", "dict", "Norm"), ("0.a", "structure", "float32[2]", "nothing"),
        ("0.scale", "structure", "nothing", "float32[2]"), ("0.mean", "structure", "nothing", "float32[2]")),
    "int and float": (Layer(W, 2), Layer(W, 2.0), ("kind", "static", "2 (int)", "2.0 (float)")),
    "within a static value": (Layer(W, ([1, 2], {"k": {"x": 3}})), Layer(W, ([1, 4], {"k": {"x": 5}})),
        ("kind.0.1", "static", "2 (int)", "4 (int)"), ("kind.1.k.x", "static", "3 (int)", "5 (int)")),
    "static values of other sizes": (Layer(W, (1, 2)), Layer(W, (1,)),
        ("kind", "static", "(1, 2) (tuple)", "(1,) (tuple)")),
    "static arrays": (Registered(W, W), Registered(W, ramp(2)), ("", "static", "float32[2]", "another float32[2]")),
    "keys of one text": ({1: W}, {"1": W}, ("", "static", "1 (int)", "'1' (str)")),
    "functions": ([jnp.tanh], [jax.nn.relu], ("0", "value", "tanh (PjitFunction)", "relu (custom_jvp)")),
    "numbers": ([2, 2, 0.5], [2.0, True, 0.5],
        ("0", "value", "2 (int)", "2.0 (float)"), ("1", "value", "2 (int)", "True (bool)")),
    "a number and an array": ([0.5, 0.5], [f32(0.5), np.float64(0.5)],
        ("0", "type", "0.5 (float)", "float32[]"), ("1", "value", "0.5 (float)", "0.5 (float64)")),
    "shapes and dtypes": ([W], [np.arange(3)], ("0", "shape, dtype", "float32[2]", "int32[3]")),
    "weak types": ([jnp.asarray(1.0)], [jnp.float32(1)], ("0", "weak type", "float32[], weak", "float32[]")),
    "kinds of keys": ([jax.random.key(0)], [jax.random.key(0, impl="rbg")], ("0", "dtype", "key<fry>[]", "key<rbg>[]")),
    "a tie lost": ({"a": SHARED, "b": [SHARED]}, {"a": SHARED, "b": [ramp(2, 3)]}, ("a", "tie", "b.0", "nothing")),
    "a smaller tie": ([SHARED] * 3, [ramp(2, 3), SHARED, SHARED],
        ("0", "tie", "1, 2", "nothing"), ("1", "tie", "0, 2", "2")),
}  # fmt: skip


@pytest.mark.parametrize("name", SEEN)
def test_what_a_compiler_sees(name):
    a, b, *rows = SEEN[name]
    assert seen(a, b) == rows
    assert bool(tp.diff(a, b)) is True
    assert not tp.diff(b, b)


def test_rows_stand_in_tree_order_and_a_path_stands_once():
    shared = ramp(3)
    here = Net([Norm(shared, shared), 1], jnp.tanh, 2)
    there = Net([Norm(ramp(4), ramp(3, dtype=jnp.int32)), 1.0, W], jax.nn.relu, 3, 0.25)
    diff = tp.diff(here, there)
    assert [f"{path}: {what}" for path, what, *_ in diff.rows] == [
        *("width: static", "layers.0.scale: shape", "layers.0.mean: dtype", "layers.1: value", "layers.2: structure"),
        *("activation: value", "rate: value", "layers.0.scale: tie", "layers.0.mean: elements"),
    ]
    assert diff.paths == tuple(dict.fromkeys(row.path for row in diff.rows))


def test_static_lists_that_have_changed_in_place_or_contain_themselves():
    model = Layer(W, [1])
    layout = tp.layout(model)
    model.kind.append(2)
    (row,) = layout.diff(tp.layout(model)).rows
    assert (row.path, row.what, row.second) == ("", "static", "the same, changed in place since")
    model.kind.append(model.kind)
    assert tp.diff(model, Layer(W, [1])).paths == ("kind",)


def test_states_stacks_vectors_averages(stored):
    model, rule = {"a": W, "b": ramp(3)}, optax.sgd(1e-2, momentum=0.9)
    state, frozen = (optim.trainable(rule, which).init(model) for which in (None, "a"))
    moved = jax.tree.map(lambda x: np.asarray(np.asarray(x) + np.ones((), x.dtype)), state)
    by_element = tp.diff(state, moved)
    assert {row.what for row in by_element.rows} == {"elements"}
    file = stored("before", {"model": model, "optimiser": state})
    assert set(tp.diff(saving.names(file, "optimiser"), moved).paths) == set(by_element.paths)
    assert ("b", "trained", "trained", "frozen") in seen(state, frozen)
    other = {"a": ramp(2, start=3), "b": ramp(3, start=3)}
    assert tp.diff(tp.stack(model)[0], tp.stack(other)[0]).paths == ('"float32[2]"', '"float32[3]"')
    assert not tp.diff(tp.ravel(model)[1], tp.ravel(other)[1])
    assert seen(tp.Ema(model, 0.9), tp.Ema(model, 0.5))[0] == ("decay", "static", "0.9 (float)", "0.5 (float)")


def test_sharding():
    mesh = Mesh(np.array(first_devices(4)), ("d",))
    put = lambda *axes: jax.device_put(np.arange(8.0, dtype=np.float32), NamedSharding(mesh, PartitionSpec(*axes)))
    one = jnp.asarray(np.arange(8.0, dtype=np.float32))
    assert not tp.diff(put("d"), put("d"))
    assert not tp.diff(put(), put(None))  # the same in other words
    turned = NamedSharding(Mesh(np.array(jax.devices()[3::-1]), ("d",)), PartitionSpec("d"))
    first, second = map(repr, first_devices(2))
    for here, there, words in (
        (put(), put("d"), ("() over d=4", "('d',) over d=4")),
        (one, jax.device_put(one, jax.devices()[1]), (first, second)),
        (one, jax.device_put(one, jax.devices()[0]), (first, f"{first}, committed")),
        (put("d"), jax.device_put(one, turned), ("('d',) over d=4", "('d',) over d=4, other devices")),
    ):
        assert seen([here], [there]) == [("0", "sharding", *words)]
    assert [row.what for row in tp.diff(put("d"), put() + np.float32(1)).rows] == ["sharding", "elements"]


def test_abstract_and_traced_leaves_have_no_elements():
    model = {"a": SHARED, "b": SHARED, "n": 2}
    abstract = eqx.filter_eval_shape(lambda: model)
    other = {"a": jax.ShapeDtypeStruct((2, 3), jnp.bfloat16), "b": ramp(2, 3, start=3), "n": 2}
    assert seen(model, abstract) == []
    assert seen(abstract, other) == [("a", "dtype", "float32[2,3]", "bfloat16[2,3]")]
    found = []

    def traced(a: Any, b: Any) -> Any:
        found.extend([seen(a, a), seen(a, [W, a[1] + 1]), seen(a, [W, b]), seen([b, b], [b, b + 1])])

    jax.eval_shape(traced, [W, W], W.astype(jnp.bfloat16))
    assert found == [[], [], [("1", "dtype", "float32[2]", "bfloat16[2]")], [("0", "tie", "1", "nothing")]]


# -- Elements ----------------------------------------------------------------------------------------------------------

nan, inf = math.nan, math.inf
NUMBERS = {
    "floats": (f32([1, 2, 3]), f32([1, 2.5, 4]), (1.0, 0.25, 2), ("3.0", "4.0")),
    "NaN": (f32([nan, nan, 1]), f32([nan, 1, 1]), (inf, inf, 1), ("nan", "1.0")),
    "largest floats": (f32([3e38]), f32([-3e38]), (2 * float(f32(3e38)), 2.0, 1), ("3e+38", "-3e+38")),
    "float8": (f8([1, 2]), f8([1, 4]), (2.0, 0.5, 1), ("2", "4")),
    "complex": (np.complex64([1, 3 + 4j]), np.complex64([1, 0]), (5.0, inf, 1), ("(3+4j)", "0j")),
    "wide beside narrow": (i64([2**32 + 5]), np.int32([5]), (2.0**32, 2.0**32 / 5, 1), (str(2**32 + 5), "5")),
    "a wide complex": (np.complex128([1e300j]), c64([complex(0, inf)]), (inf, inf, 1), ("1e+300j", "infj")),
    "widest ints": (i64([2**63 - 1]), i64([-(2**63)]), (2.0**64, 2.0, 1), (str(2**63 - 1), str(-(2**63)))),
    "bools": (np.array([True, False]), np.array([False, False]), (1.0, inf, 1), ("True", "False")),
}  # fmt: skip


@pytest.mark.parametrize(("here", "there", "numbers", "words"), NUMBERS.values(), ids=NUMBERS)
def test_the_numbers_of_elements(here, there, numbers, words):
    row = elements(here, there)
    assert (row.absolute, row.relative, row.differing, row.size) == (*numbers, here.size)
    assert (row.first, row.second) == words
    count = lambda array: int(np.isnan(np.asarray(array).astype(np.complex128)).sum())
    assert row.nans in ((count(here), count(there)), (0, 0))
    assert elements(there, here).absolute == row.absolute
    assert not tp.diff(here.reshape(1, -1), np.array(here).reshape(1, -1))


def test_what_is_equal_by_value():
    for here, there in [
        (f32([0.0, nan]), f32([-0.0, nan])),
        (np.float64([0.5]), ramp(1)),  # to JAX they are of one dtype
        (np.complex64([complex(nan, 1), nan]), np.complex128([complex(nan, 1), nan])),
        (np.zeros((0, 3)), np.zeros((0, 3))),
        (W, np.asarray(W)),
        (jax.random.split(jax.random.key(0)), jax.random.split(jax.random.key(0))),
        ([np.zeros(2, jax.dtypes.float0)], [np.zeros(2, jax.dtypes.float0)]),
    ]:
        assert not tp.diff(here, there)
    assert elements(jax.random.key(0), jax.random.key(1), atol=9).differing == 1
    assert tp.diff(np.zeros((2, 2))[:, ::-1].T, np.eye(2)[::-1]).rows[0].differing == 2
    rows = tp.diff([W], [2 * np.asarray(W, jnp.bfloat16)]).rows  # by value
    assert [(row.what, row.absolute) for row in rows] == [("dtype", None), ("elements", 1.5)]
    assert [row.what for row in tp.diff([np.float16([2])], [jnp.bfloat16([3])]).rows] == ["dtype", "elements"]
    with enable_x64():
        assert seen(np.float64([0.5]), f32([0.5])) == [("", "dtype", "float64[1]", "float32[1]")]


def test_tolerance():
    here, there = f32([1.0, 100.0, inf]), f32([1.01, 101.0, inf])
    for atol, rtol, differing in ((0.5, 0, 1), (0, 0.005, 2), (0.85, 0.001, 1)):
        close = np.isclose(here, there, rtol, atol)
        assert elements(here, there, atol=atol, rtol=rtol).differing == differing == np.sum(~close)
    assert not tp.diff(here, there, atol=1)
    assert not tp.diff(here, there, rtol=0.01)
    assert elements(f32([1, nan, inf]), f32([1, 1, 1]), atol=inf, rtol=1).differing == 2
    assert elements(np.array([True]), np.array([False]), atol=2)
    assert seen([0.5, 2, "a"], [0.6, 3, "a"], atol=0.2) == [("1", "value", "2 (int)", "3 (int)")]
    assert elements(f32([0, 0]), f32([1, 2]), atol=1.5)[2:7] == ("0.0", "2.0", 2.0, 1.0, 1)


def test_large_arrays_in_pieces(monkeypatch):
    monkeypatch.setattr(_diff, "_AT_ONCE", 3)
    here, there = np.zeros(20, np.float32), np.zeros(20, np.float32)
    there[[4, 11, 19]] = 1, -7, nan
    row = elements(here.reshape(4, 5), there.reshape(4, 5))
    assert row[2:] == ("0.0", "nan", inf, inf, 3, 20, (0, 1))
    there[19] = 5
    assert elements(here, there)[2:] == ("0.0", "-7.0", 7.0, 1.0, 3, 20, (0, 0))


# -- As a value --------------------------------------------------------------------------------------------------------


def test_the_table():
    here = {"a": f32([1, 2, 3]), "b": f32([0.5]), "n": 2, "same": W, "<i>": None}
    there = {"a": f32([1, 2, 4]), "b": f32([nan]), "n": 2.0, "same": W, "<i>": ()}
    diff = tp.diff(here, there)
    assert str(diff).splitlines() == [
        "path  what       first    second",
        "<i>   structure  None     tuple of 0 leaves",
        "n     value      2 (int)  2.0 (float)",
        "",
        "path  largest  relative  elements   NaN  first  second",
        "b         inf       inf    1 of 1  0, 1    0.5     nan",
        "a           1      0.25    1 of 3  0, 0    3.0     4.0",
        "",
        "4 differences: structure 1, value 1, elements 2",
    ]
    assert repr(diff) == "Diff(4 differences (<i>, n, b, a))"
    assert ">path</th>" in diff._repr_html_()
    assert "&lt;i&gt;" in diff._repr_html_()
    many = str(tp.diff(list(range(100)), list(range(1, 101))))
    assert "... 60 more" in many
    assert many.endswith("100 differences")


@pytest.mark.usefixtures("without_type_checks")
def test_errors(tmp_path):
    layout, looped, deleted = tp.layout([W]), [W], {"w": W + 1}
    looped.append(looped)
    deleted["w"].delete()
    for kind, words, *pair in [
        (TypeError, r"two models or two layouts, got a Layout and a list.*tp\.layout\(model\)", layout, [W]),
        (TypeError, r"a Layout and a str", layout, "a"),
        (OSError, "nothing", tmp_path / "nothing", [W]),
        (OSError, "relu", "relu", "relu"),
        (ValueError, "the model is cyclic", [W], looped),
        (RuntimeError, r"the array at 'w' has been deleted.*tp\.copy", {"w": W}, deleted),
    ]:
        refused(words, tp.diff, *pair, kind=kind)
    assert not tp.diff(deleted, dict(deleted))  # one object, of which nothing is read
    for value in (-1, nan):
        refused("atol must be at least 0, got", tp.diff, W, W, atol=value, kind=ValueError)
    for value in ("1", True):
        refused("rtol must be a number, at least 0, or None, got", tp.diff, W, W, rtol=value, kind=TypeError)


def test_refs_are_compared_by_value(stored):
    model, other = with_refs(), with_refs()
    file = stored("refs", model)
    assert not tp.diff(model, other)
    assert not tp.diff(str(file), other)
    # JAX commits a ref to its device, as `jax.device_put` does an array.
    assert {row.what for row in tp.diff(model, {**model, "mean": jnp.full((3,), np.float32(7))}).rows} <= {"sharding"}
    other["mean"][...] = jnp.array([7.0, 5.0, 7.0])
    for here, there in ((model, other), (other, str(file))):
        (row,) = tp.diff(here, there).rows
        assert (row.path, row.what, row.absolute, row.differing) == ("mean", "elements", 2.0, 1)


# -- Files: as trees are, by name, with whatever of the two is a file --------------------------------------------------


@pytest.fixture
def mlp():
    return filled(eqx.nn.MLP, 2, 1, 3, 1)


def test_the_same_rows_from_files_as_from_trees(mlp, stored):
    other = eqx.tree_at(lambda mlp: mlp.layers[0].bias, mlp, mlp.layers[0].bias + 1)
    a, b = stored("a", mlp), stored("b", other)
    want = tp.diff(mlp, other).rows
    assert (want[0].what, want[0].absolute) == ("elements", pytest.approx(1))
    for pair in ((str(a), str(b)), (a, other), (mlp, b), (saving.names(a), saving.names(b)), (saving.names(a), b)):
        assert tp.diff(*pair).rows == want
    assert not tp.diff(str(a), str(b), atol=1.5)
    # An array that another program stores, and a dictionary of arrays by name.
    theirs = stored("theirs", saving.names(other), save_file)
    assert tp.diff(a, theirs).rows == tp.diff(a, saving.names(other)).rows == want


def test_what_only_one_has_is_named_by_its_topmost_node(mlp, stored):
    deep = filled(eqx.nn.MLP, 2, 1, 3, 3)
    a, b = stored("a", {"model": mlp, "steps": jnp.array(3)}), stored("b", {"model": deep, "best": mlp})
    assert seen(a, b, atol=9) == [
        ("steps", "structure", "int32[]", "nothing"),
        ("best", "structure", "nothing", "4 leaves"),
        ("model.layers.2", "structure", "nothing", "2 leaves"),
        ("model.layers.3", "structure", "nothing", "2 leaves"),
        ("model.layers.1.weight", "shape", "float32[1,3]", "float32[3,3]"),
        ("model.layers.1.bias", "shape", "float32[1]", "float32[3]"),
    ]
    assert not tp.diff(saving.names(a, "model"), mlp)
    assert tp.diff(a, mlp).paths[:2] == ("model", "steps")


def test_ties_and_dtypes(stored):
    shared = ramp(3)
    tied, apart = {"a": shared, "b": shared}, {"a": shared, "b": ramp(3)}
    of_tied, of_apart = stored("tied", tied), stored("apart", apart)
    for here, there in ((of_tied, of_apart), (tied, of_apart), (tied, apart)):
        assert seen(here, there) == [("a", "tie", "b", "nothing")]
    assert seen(of_tied, {"a": shared, "b": ramp(3, start=3)})[-1][0] == "b"
    assert seen(of_apart, apart | {"a": shared.astype(jnp.bfloat16)}) == [("a", "dtype", "float32[3]", "bfloat16[3]")]
    zero = jnp.zeros((), int)  # two counters that are one array are no tie, and two arrays in the file
    counters = {"steps": zero, "episodes": zero}
    assert seen(stored("counters", counters), counters) == []
    wide = np.asarray(shared, np.float64)
    difference = tp.diff(stored("wide", {"a": wide + 1e-12, "b": wide}), of_apart).rows[0].absolute
    assert difference == pytest.approx(1e-12, rel=1e-3)
    # One that is computed is in no file, unless it is not what it is declared to be.
    model, other = Transposed(ramp(2, 3), ramp(2, 3).T), Transposed(ramp(2, 3), ramp(3, 2, start=3))
    file = stored("computed", model)
    assert not tp.diff(file, model)
    assert seen(other, file) == []
    assert tp.diff(stored("other", other), model).paths == ("decoder",)


def test_numbers_and_texts(stored):
    run = {"w": np.ones(2, np.float32), "epoch": 5, "best": 0.25, "name": "a", "rate": np.float32(0.5), "f": jnp.tanh}
    other = run | {"epoch": 6, "best": 0.5, "rate": 0.5, "f": jnp.sin}
    a, b = stored("a", {"run": run}), stored("b", {"run": other})
    want = [
        ("run.best", "value", "0.25 (float)", "0.5 (float)"),
        ("run.epoch", "value", "5 (int)", "6 (int)"),
        ("run.rate", "value", "0.5 (float32)", "0.5 (float)"),
    ]
    assert sorted(seen(a, b)) == sorted(seen(a, {"run": other})) == want
    assert [path for path, *_ in seen(a, b, atol=1)] == ["run.epoch", "run.rate"]
    assert seen(a, {"run": run | {"epoch": np.int32([5])}}) == [("run.epoch", "type", "5 (int)", "int32[1]")]
    assert seen({"run": {"w": run["w"]}, "step": 3}, a)[0] == ("step", "structure", "3 (int)", "nothing")
    # A file of another program has no numbers, so nothing is said of them.
    theirs = stored("theirs", {"run.w": run["w"]}, save_file)
    assert not tp.diff(a, theirs)
    assert not tp.diff(theirs, {"run": other})
    assert tp.diff(["relu", "tanh"], ["relu", "gelu"]).paths == ("1",)  # two texts are two files, and here texts
