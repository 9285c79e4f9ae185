"""saving.plan: from whatever has names, into whatever model: what it is made of and what it is given, ties, devices."""

import functools
import json
import pathlib
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import saving

from ..zoo import assert_same, first_devices, ramp
from .files import Transposed, planned, refused, row, shapes

_NESTED = {"fc": {"weight": row(3, 2), "bias": row(3)}, "n": row(2, dtype=np.int32)}
_FLAT = {"fc.weight": row(3, 2), "fc.bias": row(3), "n": row(2, dtype=np.int32)}
_layers = lambda count: {f"l.{i}.w": row(2, start=i) for i in range(count)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sources")
    ours, whole, theirs = (str(folder / f"{name}.safetensors") for name in ("ours", "whole", "theirs"))
    saving.save(ours, _NESTED)
    saving.save(whole, {"model": _NESTED, "average": ramp(2)})
    safetensors.numpy.save_file(_FLAT, theirs)
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(folder / "orbax", _NESTED)
    checkpointer.wait_until_finished()
    values = [_FLAT, _NESTED, saving.names(_NESTED), saving.names(whole, "model"), ours, pathlib.Path(ours), theirs]
    values += [checkpointer.restore(folder / "orbax"), jax.tree.map(jnp.asarray, _NESTED)]
    return values, [tp.layout(_NESTED), shapes(_FLAT), shapes(_NESTED), checkpointer.metadata(folder / "orbax")]


def test_sources(sources):
    values, only_shapes = sources
    model = {"linear": {"weight": ramp(3, 2), "bias": ramp(3)}, "n": jnp.arange(2)}
    want = jax.tree.map(jnp.asarray, {"linear": _NESTED["fc"], "n": _NESTED["n"]})
    rows = [("linear.bias", "fc.bias"), ("linear.weight", "fc.weight"), ("n", "n")]
    for source in (*values, *only_shapes):
        plan = saving.plan(source, model, rename={"fc.*": "linear.*"})
        assert [(each.path, *each.names) for each in plan.rows] == rows
        for arrays in values if source is values[0] or source is only_shapes[0] else values[:1]:
            assert assert_same(plan(arrays), want) == 3


def test_a_folder_and_its_index_are_the_files_of_a_checkpoint(tmp_path):
    model, want = jax.tree.map(jnp.zeros_like, _FLAT), jax.tree.map(jnp.asarray, _FLAT)
    refused(r"the folder '.*' has no \*\.safetensors; it has nothing", saving.plan, tmp_path, model)
    for name, array in _FLAT.items():
        safetensors.numpy.save_file({name: array}, tmp_path / f"part-{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    said = {"metadata": {"total_size": 9}, "weight_map": {name: f"part-{name}.safetensors" for name in _FLAT}}
    assert_same(planned(tmp_path, model), want)
    index.write_text(json.dumps(said))
    safetensors.numpy.save_file(_FLAT, tmp_path / "of-something-else.safetensors")  # the index does not name it
    for source in (str(tmp_path), index):
        assert_same(planned(source, model), want)
    index.write_text("{}")
    refused("is no index, JSON with a weight_map of files: KeyError", saving.plan, index, model)
    index.unlink()
    refused(r"'fc\.bias' is in two of the files .*of-something-else\.safetensors", saving.plan, tmp_path, model)


def test_metadata_of_hugging_face_are_further_names_of_tied_tensors(path):
    said = {"format": "pt", "shared.weight": "lm_head.weight", "encoder.weight": "lm_head.weight"}
    safetensors.numpy.save_file({"lm_head.weight": row(3, 2)}, path, metadata=said)
    names = ["shared.weight", "encoder.weight", "lm_head.weight"]
    assert_same(planned(path, {name: ramp(3, 2) for name in names}), {name: jnp.asarray(row(3, 2)) for name in names})
    plan = saving.plan(path, {"wte": ramp(3, 2)}, rename={"shared.weight": "wte"})
    assert (plan.rows[0].names, plan.unused) == (("shared.weight",), ())
    np.testing.assert_array_equal(plan(path)["wte"], row(3, 2))
    saving.save(path, {"w": ramp(2)}, metadata={"best": "w"})  # a text of the user
    assert saving.names(path).keys() == {"w"}


def test_files_of_numpy_and_arrays_of_another_byte_order(tmp_path):
    path, model = tmp_path / "model.npz", {"w": ramp(2)}
    np.savez_compressed(path, w=np.arange(2, dtype=">f4"), text=np.array("adam"), wide=np.zeros(2, np.longdouble))
    with np.load(path) as file:
        for transform in (None, {"w": jnp.asarray}, {"w": lambda array: array.astype("float32")}):
            for source, rename in ((file, {"wide": None}), ({"w": file["w"]}, None)):
                assert_same(planned(source, model, rename=rename, transform=transform), {"w": jnp.arange(2.0)})
        refused("'wide' is unused: no array is at 'wide'", saving.plan, file, model)
        words = r"'wide' is float\d+\[2\], which JAX does not support; drop it, rename=\{'wide': None\}"
        for transform in (None, {"wide": jnp.sin}):
            refused(words, saving.plan, file, model | {"wide": ramp(2)}, transform=transform)


def test_names_that_the_plan_does_not_know_and_those_that_are_missing_or_go_nowhere():
    model, rename, more = {"l": {"w": ramp(12, 2)}}, {"l.*.w": "l.w"}, _layers(16)
    plan = saving.plan(_layers(12), model, rename=rename)
    words = r"the plan does not know 'l\.12\.w', 'l\.13\.w', 'l\.14\.w' and 1 more, .* make the plan from these arrays"
    for use in (plan, jax.jit(plan)):
        refused(words, use, more)
    assert_same(saving.plan(_layers(12), model, rename=rename, strict=False)(more), plan(_layers(12)))
    source = {"a": row(2), "dropped": row(1), "step": 3, "scale": np.float32(1), "nothing": None}
    assert list(saving.names(source)) == ["a", "dropped"]
    plan = saving.plan(source, {"a": ramp(2)}, rename={"dropped": None})
    for given in (source, {"a": row(2)}, source | {"dropped": row(7), "step": 4, "more": 0.5, "text": np.array("t")}):
        assert_same(plan(given), {"a": jnp.arange(2.0)})
    assert_same(planned(source, {"a": ramp(2)}, strict=False), {"a": jnp.arange(2.0)})
    for given, words in [
        ({"model": {"a": row(2)}, "s": row(1)}, "at 'a', .* got nothing; .* such names below 'model': saving.names"),
        (shapes({"a": row(2)}), r"'a' has no value: expected arrays, .* jax.eval_shape\(plan, arrays\)"),
        ({"a": row(1, 2)}, r"expected float32\[2\] at 'a', .* plan was made, got float32\[1,2\]"),
        ({"a": row(2, dtype=np.float16)}, r"expected float32\[2\] at 'a', .* plan was made, got float16\[2\]"),
        ({}, r"expected float32\[2\] at 'a', .* plan was made, got nothing"),
    ]:
        refused(words, plan, given)
    assert jax.eval_shape(plan, shapes({"a": row(2)}))["a"].shape == (2,)


_X = row(2)
GIVEN = {
    "tied": {"a": _X, "b": _X, "w": row(3)},
    "equal": {"a": _X, "b": _X.copy(), "w": row(3)},
    "other": {"a": _X, "b": _X + 1, "w": row(3)},
    "another shape": {"a": _X, "b": row(3), "w": row(3)},
    "a alone": {"a": _X, "w": row(3)},
    "b alone": {"b": _X, "w": row(3)},
}
_A = ramp(2)
MODELS = {
    "a alone": {"a": _A, "w": ramp(3)},
    "tied": {"a": _A, "b": _A, "w": ramp(3)},
    "untied": {"a": ramp(2), "b": ramp(2), "w": ramp(3)},
}
_NOT_ALL, _DIFFER = "got nothing", r"'b' and 'a' differ, but were the same array when the plan was made"
_TIED = r"'b' goes to 'b', which is tied to 'a', but another .* one of them, rename={'b': None}, or tp.untie the model"
# What is made of each that is given: `b`, or why it is refused.
TIES = {
    ("a alone", "tied"): [None, None, _DIFFER, _DIFFER, None, _NOT_ALL],
    ("tied", "tied"): ["a", "a", _DIFFER, _DIFFER, "a", _NOT_ALL],
    ("tied", "equal"): ["a", "a", _TIED, "got float32", *2 * [_NOT_ALL]],
    ("tied", "a alone"): ["a", "does not know 'b'", "does not know 'b'", "does not know 'b'", "a", _NOT_ALL],
    ("tied", "b alone"): ["a", "does not know 'a'", "does not know 'a'", "got float32", _NOT_ALL, "b"],
    ("untied", "tied"): ["b", "b", "b", "got float32", *2 * [_NOT_ALL]],
    ("untied", "other"): ["b", "b", "b", "got float32", *2 * [_NOT_ALL]],
}


@pytest.mark.parametrize(("model", "source"), TIES, ids=map(" from ".join, TIES))
def test_entries_of_a_tie(model, source):
    plan = saving.plan(GIVEN[source], MODELS[model])
    for given, want in zip(GIVEN.values(), TIES[model, source], strict=True):
        if want not in (None, "a", "b"):
            refused(want, plan, given)
            continue
        made = plan(given)
        np.testing.assert_array_equal(made["a"], _X)
        if want:
            np.testing.assert_array_equal(made["b"], given[want])
            assert (made["a"] is made["b"]) == (model == "tied")


def test_entries_of_a_tie_that_are_not_numbers_that_are_left_out_or_that_no_value_tells():
    tied, other, nan = GIVEN["tied"], GIVEN["other"], np.array([np.nan, 1], "f")
    np.testing.assert_array_equal(planned(tied | {"a": nan, "b": nan.copy()}, MODELS["tied"])["b"], nan)
    dropped = saving.plan(other, MODELS["tied"], rename={"b": None})
    assert [each.path for each in dropped.rows] == ["a", "w"]
    np.testing.assert_array_equal(dropped(other)["b"], _X)
    words = r"'a' and 'b' differ, .* uses only 'b'; .* rename=\{'a': None\}"
    refused(words, saving.plan(tied, {"q": ramp(2), "w": ramp(3)}, rename={"b": "q"}), other)
    # One description of several arrays is no tie.
    one, model = jax.ShapeDtypeStruct((2,), np.float32), {"l": [{"w": ramp(2)}]}
    for source in (dict.fromkeys(("l.0.w", "l.1.w"), one), {"l": [{"w": one}] * 2}, tp.layout({"l": [{"w": one}] * 2})):
        refused(r"'l\.1\.w' is unused", saving.plan, source, model)
        assert len(saving.plan(source, model, strict=False).unused) == 1
    # A layout knows the ties of an abstract model.
    alone, abstract = GIVEN["a alone"], shapes(MODELS["tied"])
    refused("'b' is missing", saving.plan, alone, abstract)
    made = planned(alone, abstract, trainable=tp.layout(MODELS["tied"]))
    assert made["b"] is made["a"]


@pytest.mark.parametrize("kind", ["model", "NumPy", "file", "layout"])
def test_a_source_that_is_tied(kind, path):
    shared = row(2, 3) if kind == "NumPy" else ramp(2, 3)
    tied = {"net": {"embed": shared, "head": shared, "w": ramp(2)}}
    saving.save(path, tied)
    source, arrays = {"file": path, "layout": tp.layout(tied)}.get(kind, tied), path if kind == "file" else tied
    array = ramp(2, 3)
    for way in ({"net.embed": "wte", "net.head": "lm"}, {"net.embed": "wte"}, {"net.head": "lm"}):
        plan = saving.plan(source, {"wte": array, "lm": array, "w": ramp(2)}, rename={"net.w": "w"} | way)
        assert plan.unused == ()
        made = plan(arrays)
        assert made["wte"] is made["lm"]
        np.testing.assert_array_equal(made["wte"], shared)
    for array in (ramp(2, 3), row(2, 3)):
        made = saving.plan(source, {"net": tp.untie({"embed": array, "head": array, "w": ramp(2)})})(arrays)
        np.testing.assert_array_equal(made["net"]["head"], shared)
        assert tp.layout(made).ties == {}


def test_a_tie_through_a_transform(path):
    model, array = Transposed(ramp(2, 3), ramp(2, 3).T), row(2, 3)
    rounded = array.T * np.float32(1 + 1e-6)  # what is computed is rounded otherwise by another machine
    for source in ({"encoder": array}, {"encoder": array, "decoder": rounded}, {"encoder": array, "decoder": array.T}):
        assert_same(planned(source, model), Transposed(jnp.asarray(array), jnp.asarray(array.T)))
    words = "'decoder' goes to 'decoder', which is tied to 'encoder', but another array"
    refused(words, saving.plan(source, model), {"encoder": array, "decoder": array.T + 1})
    refused("'encoder' is missing", saving.plan, {"decoder": array.T}, model)
    assert_same(planned(model, model), model)
    # An alias has a name where it is not what its source gives.
    for each, want in ((model, ["encoder"]), (Transposed(ramp(2, 3), ramp(3, 2) + 1), ["decoder", "encoder"])):
        saving.save(path, each)
        assert sorted(saving.names(each)) == sorted(saving.names(path)) == want
    assert list(saving.names(tp.layout(model))) == ["encoder"]


def test_a_flat_dictionary_is_a_model_without_quotes(path):
    deep = {"layers": [{"w": row(2)}, {"w": row(2, start=5)}], "b": row(1)}
    named = saving.names(deep)
    for source, rename in (
        (deep, None),
        (named, None),
        ({"h.0": row(2), "h.1": row(2, start=5), "b": row(1)}, {"h.*": "layers.*.w"}),
        ({"h": np.stack([row(2), row(2, start=5)]), "b": row(1)}, {"h": "layers.*.w"}),
    ):
        plan = saving.plan(source, named, rename=rename)
        assert_same(plan(source), named)
        assert '"' not in str(plan)
        assert [each.path for each in plan.rows] == ["b", '"layers.0.w"', '"layers.1.w"']
    # In a file its keys are paths, with quotes; each is still one name.
    flat = jax.tree.map(jnp.asarray, named)
    saving.save(path, flat)
    for plan in [saving.plan(source, flat) for source in (path, flat, tp.layout(flat))]:
        for given in (path, flat, named):
            assert_same(plan(given), flat)
    assert_same(planned(path, deep), deep)
    wrong = named | {"layers.0.w": row(3)}
    plan = saving.plan(wrong, shapes(named), rename={"b": None}, strict=False)
    disagrees = "'layers.0.w' is float32[2], but float32[3] comes from layers.0.w"
    assert plan.problems() == ["'b' is missing: nothing comes to it", disagrees]
    refused(r"nothing comes to b, layers\.0\.w, and the model has no value", plan, wrong)


def test_within_jit_and_vmap():
    others = {"key": jax.random.key(3), "n": jnp.arange(2), "on": jnp.array([True])}
    source = {"l.0": ramp(2), "l.1": ramp(2, start=1.5), "t": ramp(2, 3), "e": _A, "h": _A} | others
    model = {"l": ramp(2, 2), "t": ramp(3, 2), "e": ramp(2), "h": ramp(2)} | others
    model["h"] = model["e"]
    plan = saving.plan(source, model, rename={"l.*": "l"}, transform={"t": jnp.transpose})
    want = plan(source)
    assert_same(jax.jit(plan)(source), want, identity=False)
    begun = jax.jit(lambda e: saving.plan({"e": row(2)}, {"e": e})({"e": row(2)})["e"].at[0].set(5))
    assert begun(ramp(2)).tolist() == [5, 1]
    twice = functools.partial(jax.tree.map, lambda leaf: jnp.stack([leaf, leaf]))
    second = functools.partial(jax.tree.map, lambda leaf: leaf[1])
    assert_same(jax.jit(lambda source: second(jax.vmap(plan)(twice(source))))(source), want, identity=False)
    gradient = jax.jit(jax.grad(lambda layer: jnp.sum(plan(source | {"l.1": layer})["l"] ** 2)))(source["l.1"])
    np.testing.assert_allclose(gradient, 2 * source["l.1"])


def test_a_model_owns_what_came_from_numpy_and_a_plan_holds_nothing_of_it():
    source, model = {"a": row(2), "b": row(2)}, {"a": ramp(2), "b": row(2) + 1}
    made = planned(source, model)
    source["a"][:] = source["b"][:] = 7
    assert_same(made, {"a": jnp.arange(2.0), "b": row(2)})
    assert planned({"b": row(2, dtype=np.float64)}, {"b": row(2)})["b"].dtype == np.float32
    # A function gets arrays of JAX, as when the plan was made.
    made = planned({"a": row(2)}, {"a": ramp(2)}, transform={"a": lambda a: a.at[0].set(7)})
    np.testing.assert_array_equal(made["a"], [7, 1])
    for same in (lambda a: a, jnp.asarray, lambda a: jnp.reshape(a, -1)):
        source = {"a": np.ones(4096, np.float32)}  # NumPy aligns large arrays, and JAX may take such as they are
        made = planned(source, {"a": ramp(4096)}, transform={"a": same})
        source["a"][:] = 7
        np.testing.assert_array_equal(made["a"], 1)
    source = {"a": row(2, 2), "b": row(2)}
    plan = saving.plan(source, {"a": ramp(2, 2), "b": ramp(2)}, transform={"b": lambda b: 2 * b})
    array = weakref.ref(source["b"])
    plan(source)
    del source
    assert array() is None


@pytest.mark.parametrize("wide", [np.array([1e300, 1.0]), np.array([2**40, 1])])
def test_64_bits_that_do_not_fit_into_32(wide):
    """Whichever way they go; where NumPy has them on both sides, they are not cut."""
    narrow = jax.dtypes.canonicalize_dtype(wide.dtype)
    source = {"a": wide, "r.0": wide, "r.1": wide[::-1], "u": wide, "f": wide}
    rename, transform = {"r.*": "r", "u": "u.*"}, {"f": lambda f: f + 0}
    make = lambda of, dtype: {"a": of(2, dtype), "r": of((2, 2), dtype), "u": [of((), dtype), of((), dtype)]}
    kept = saving.plan(source | {"f": row(1)}, make(np.zeros, wide.dtype), rename=rename | {"f": None})(source)
    assert_same(kept, {"a": wide, "r": np.stack([wide, wide[::-1]]), "u": [np.asarray(each) for each in wide]})
    words = f"has values that {narrow} cannot hold; switch on jax_enable_x64"
    for model in (make(np.zeros, narrow), make(jnp.zeros, narrow)):
        plan = saving.plan(source, model | {"f": jnp.zeros(2, narrow)}, rename=rename, transform=transform)
        for name in source:
            refused(words, plan, {other: its if other == name else np.ones_like(its) for other, its in source.items()})
    refused(f"'a' {words}", saving.names, {"a": wide}, transform={"a": jnp.negative})
    assert saving.names({"a": wide[1:]}, transform={"a": np.negative})["a"].dtype == wide.dtype


def test_a_stack_lies_where_that_of_the_model_does():
    mesh = Mesh(np.array(first_devices(2)), ("d",))
    over, lies = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), (None, "d")))
    rows = {f"l.{i}": jax.device_put(row(2, start=i), over) for i in range(40)}
    plan = saving.plan(rows, {"l": jax.device_put(ramp(40, 2), lies)}, rename={"l.*": "l"})
    for given in (rows, {name: np.asarray(its) if name < "l.2" else its for name, its in rows.items()}):
        made = plan(given)["l"]
        assert made.sharding == lies
        np.testing.assert_array_equal(made, [row(2, start=i) for i in range(40)])


def test_names_of_a_model_for_other_programs(path):
    model = {"net": [ramp(2, 3), ramp(2, dtype=jnp.bfloat16)], "tied": None, "key": jax.random.key(1), "f": jnp.sin}
    model["tied"] = model["net"][0]
    theirs = saving.names(model, rename={"net.*": "layer_*", "key": None}, transform={"net.0": np.transpose})
    assert {name: type(its) for name, its in theirs.items()} == {"layer_0": np.ndarray, "layer_1": np.ndarray}
    assert theirs["layer_0"].flags.c_contiguous  # safetensors writes the buffer as it is
    safetensors.numpy.save_file(theirs, path)
    refused("'layer'; nearest: 'layer_", saving.names(path).__getitem__, "layer", kind=KeyError)
    turned = {"rename": {"layer_*": "net.*"}, "transform": {"layer_0": jnp.transpose}}
    back = saving.plan(path, model, **turned, strict=False)
    assert (back.missing, back.unused, back.disagrees) == (("key",), (), ())
    assert_same(back(path), model)


def test_errors_of_names():
    tensor = type("Tensor", (), {"shape": (2,), "dtype": "torch.float32", "__module__": "torch"})()
    arrays, two, same = {"a": row(2), "b": row(2)}, {"a": ("x", "y")}, {"a": lambda a: a}
    for source, options, kind, words in [
        (arrays, {"rename": {"a": "x", "b": "x"}}, ValueError, "'b' and another array both get one name of x"),
        (arrays, {"rename": two, "transform": same}, ValueError, "gives 1 arrays, but the names are x"),
        ({"w": np.ma.masked_array([1.0], [True])}, {}, TypeError, r"'w' is a masked array, .* pass array.filled\("),
        *((each, {}, TypeError, "is a PyTorch tensor; pass") for each in ({"w": tensor}, {"net": [tensor]})),
    ]:
        refused(words, saving.names, source, **options, kind=kind)


def test_a_plan_is_printed_in_one_line_for_each_array():
    strange = {name: row(2) for name in ("a\nb", "\ud800", "\x00")}
    assert str(saving.plan(strange, strange)).replace("\n", "").isprintable()
    plan = saving.plan(_layers(2), {"l": {"w": row(2, 2)}, "k": row(1)}, rename={"l.*.w": "l.w", None: "k"})
    said = ["k: float32[1], from nothing", "l.w: float32[2,2], from l.0.w, l.1.w by stack"]
    assert list(map(str, plan.rows)) == said
