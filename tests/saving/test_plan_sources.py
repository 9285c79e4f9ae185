"""saving.plan: from whatever has names, into whatever model: ties, traces, devices."""

import json
import pathlib

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint
import pytest
import safetensors.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import saving

from ..zoo import ZOO, assert_same, first_devices, ramp
from .test_plan import row, shapes

_NESTED = {"fc": {"weight": row(3, 2), "bias": row(3)}, "n": row(2, dtype=np.int32)}
_FLAT = {"fc.weight": row(3, 2), "fc.bias": row(3), "n": row(2, dtype=np.int32)}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """The same arrays from everywhere; and those without values."""
    folder = tmp_path_factory.mktemp("sources")
    ours, whole, theirs = (str(folder / f"{name}.safetensors") for name in ("ours", "whole", "theirs"))
    saving.save(ours, _NESTED)
    saving.save(whole, {"model": _NESTED, "average": ramp(2)})
    safetensors.numpy.save_file(_FLAT, theirs)
    parts = [str(folder / f"part-{name}.safetensors") for name in _FLAT]
    for part, (name, array) in zip(parts, _FLAT.items(), strict=True):
        safetensors.numpy.save_file({name: array}, part)
    checkpointer = orbax.checkpoint.StandardCheckpointer()
    checkpointer.save(folder / "orbax", _NESTED)
    checkpointer.wait_until_finished()
    values = {
        "flat": _FLAT,
        "nested": _NESTED,
        "names": saving.names(_NESTED),
        "names of a file": saving.names(whole, "model"),
        "our file": ours,
        "a path": pathlib.Path(ours),
        "their file": theirs,
        "their files": parts,
        "Orbax": checkpointer.restore(folder / "orbax"),
        "JAX": jax.tree.map(jnp.asarray, _NESTED),
    }
    only_shapes = {
        "flat shapes": shapes(_FLAT),
        "nested shapes": shapes(_NESTED),
        "layout": tp.layout(_NESTED),
        "Orbax metadata": checkpointer.metadata(folder / "orbax"),
    }
    return values, values | only_shapes


def test_sources(sources):
    values, all_sources = sources
    model = {"linear": {"weight": ramp(3, 2), "bias": ramp(3)}, "n": jnp.arange(2)}
    want = jax.tree.map(jnp.asarray, {"linear": _NESTED["fc"], "n": _NESTED["n"]})
    rows = [("linear.bias", "fc.bias"), ("linear.weight", "fc.weight"), ("n", "n")]
    for name, source in all_sources.items():
        plan = saving.plan(source, model, rename={"fc.*": "linear.*"})
        assert [(each.path, *each.names) for each in plan.rows] == rows, name
        for arrays in values.values() if name in ("flat", "layout") else [_FLAT]:
            assert assert_same(plan(arrays), want) == 3


def test_a_folder_and_its_index_are_the_files_of_a_checkpoint(tmp_path):
    model = jax.tree.map(jnp.zeros_like, _FLAT)
    with pytest.raises(ValueError, match=r"the folder '.*' has no \*\.safetensors; it has nothing"):
        saving.plan(tmp_path, model)
    for name, array in _FLAT.items():
        safetensors.numpy.save_file({name: array}, tmp_path / f"part-{name}.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    said = {"metadata": {"total_size": 9}, "weight_map": {name: f"part-{name}.safetensors" for name in _FLAT}}
    want = jax.tree.map(jnp.asarray, _FLAT)
    assert_same(saving.plan(tmp_path, model)(tmp_path), want)
    index.write_text(json.dumps(said))
    safetensors.numpy.save_file(_FLAT, tmp_path / "of-something-else.safetensors")  # the index does not name it
    for source in (tmp_path, str(tmp_path), index):
        assert_same(saving.plan(source, model)(source), want)
    (tmp_path / "other.safetensors.index.json").write_text("{}")
    with pytest.raises(ValueError, match=r"'fc\.bias' is in two of the files .*of-something-else\.safetensors"):
        saving.plan(tmp_path, model)
    with pytest.raises(ValueError, match=r"other.*is no index, JSON with a weight_map of files: KeyError"):
        saving.plan(tmp_path / "other.safetensors.index.json", model)


def test_metadata_of_hugging_face_are_further_names_of_tied_tensors(tmp_path):
    path = tmp_path / "model.safetensors"
    said = {"format": "pt", "shared.weight": "lm_head.weight", "encoder.weight": "lm_head.weight"}
    safetensors.numpy.save_file({"lm_head.weight": row(3, 2)}, path, metadata=said)
    names = ["shared.weight", "encoder.weight", "lm_head.weight"]
    untied = saving.plan(path, {name: ramp(3, 2) for name in names})(path)
    for name in names:
        np.testing.assert_array_equal(untied[name], row(3, 2))
    plan = saving.plan(path, {"wte": ramp(3, 2)}, rename={"shared.weight": "wte"})
    assert (plan.rows[0].names, plan.unused) == (("shared.weight",), ())
    np.testing.assert_array_equal(plan(path)["wte"], row(3, 2))
    saving.save(path, {"w": ramp(2)}, metadata={"best": "w"})  # a text of the user
    assert saving.names(path).keys() == {"w"}


def test_another_spec_than_planned():
    plan = saving.plan(_FLAT, {"fc": {"weight": ramp(3, 2), "bias": ramp(3)}}, rename={"n": None})
    others = {
        r"float32\[2,3\]": {"fc.weight": row(2, 3)},
        r"float16\[3,2\]": {"fc.weight": row(3, 2, dtype=np.float16)},
    }
    for got, other in (others | {"nothing": {}}).items():
        with pytest.raises(ValueError, match=rf"expected float32\[3,2\] at 'fc.weight', .* plan was made, got {got}"):
            plan({"fc.bias": row(3)} | other)
    plan({"fc.weight": row(3, 2), "fc.bias": row(3), "n": row(1)})  # what is dropped may be anything


class _Tensor:
    shape, dtype = (2,), "torch.float32"


_Tensor.__module__ = "torch"


def test_arrays_of_another_byte_order(tmp_path):
    array, model = np.arange(2, dtype=">f4"), {"w": ramp(2)}
    np.savez(tmp_path / "a.npz", w=array)
    with np.load(tmp_path / "a.npz") as file:
        for source in ({"w": array}, file):
            for transform in (None, {"w": jnp.asarray}, {"w": lambda array: array.astype("float32")}):
                plan = saving.plan(source, model, transform=transform)
                np.testing.assert_array_equal(plan(source)["w"], [0, 1])


@pytest.mark.parametrize("name", ZOO)
def test_each_model_goes_into_itself_and_has_the_names_of_its_file(tmp_path, name):
    specimen = ZOO[name]
    model, other = specimen.make(), specimen.make()
    plan = saving.plan(model, other, trainable=specimen.layout(other))
    assert assert_same(plan(model), model) > 0
    by_layout = saving.plan(specimen.layout(model), other, trainable=specimen.layout(other))
    assert [each[:2] for each in by_layout.rows] == [each[:2] for each in plan.rows]
    saving.save(tmp_path / "m", model)
    known = saving.names(model)
    assert set(known) == set(saving.names(tmp_path / "m"))
    assert set(known) <= set(saving.names(tp.layout(model)))


def test_an_alias_has_a_name_where_it_is_not_what_its_source_gives(tmp_path):
    class Codec(eqx.Module):
        encoder: jax.Array
        decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)

    tied, apart = Codec(ramp(2, 3), ramp(2, 3).T), Codec(ramp(2, 3), ramp(3, 2) + 1)
    for model, want in ((tied, ["encoder"]), (apart, ["decoder", "encoder"])):
        saving.save(tmp_path / "m", model)
        assert sorted(saving.names(model)) == sorted(saving.names(tmp_path / "m")) == want
    assert list(saving.names(tp.layout(tied))) == ["encoder"]


# -- Ties --------------------------------------------------------------------------------------------------------------


def _tied(*names, values=None):
    shared = ramp(2, 3) if values is None else values
    return dict.fromkeys(names, shared) | {"w": ramp(2)}


def test_both_names_of_a_tie():
    nan = row(2, 3)
    nan[0, 0] = np.nan
    both = {"embed": nan, "head": nan.copy(), "w": row(2)}
    plan = saving.plan(both, _tied("embed", "head"))
    assert [each.path for each in plan.rows] == ["embed", "w"]
    made = plan(both)
    assert made["embed"] is made["head"]
    np.testing.assert_array_equal(made["head"], nan)
    message = (
        "'head' goes to 'head', which is tied to 'embed', but another array goes there; drop one of them, "
        "rename={'head': None}, or tp.untie the model"
    )
    with pytest.raises(ValueError, match=message):
        plan(both | {"head": nan + 1})
    dropped = saving.plan(both, _tied("embed", "head"), rename={"head": None})
    assert_same(dropped(both | {"head": nan + 1})["head"], jnp.asarray(nan))
    for one in ("embed", "head"):
        alone = {one: row(2, 3), "w": row(2)}
        made = saving.plan(alone, _tied("embed", "head"))(alone)
        assert made["embed"] is made["head"]
    apart = saving.plan(both, tp.untie(_tied("embed", "head")))
    assert_same(apart(both | {"head": nan + 1})["head"], jnp.asarray(nan + 1))


@pytest.mark.parametrize("kind", ["model", "NumPy", "file", "layout"])
def test_a_source_that_is_tied(kind, tmp_path):
    tied = _tied("embed", "head", values=row(2, 3) if kind == "NumPy" else None)
    tied = {"net": tied}
    path = str(tmp_path / "tied.safetensors")
    saving.save(path, tied)
    source = {"file": path, "layout": tp.layout(tied)}.get(kind, tied)
    arrays = path if kind == "file" else tied
    ways = ({"net.embed": "wte", "net.head": "lm"}, {"net.embed": "wte"}, {"net.head": "lm"})
    for rename in ({"net.w": "w"} | way for way in ways):
        plan = saving.plan(source, tp.copy(_tied("wte", "lm")), rename=rename)
        assert plan.unused == ()
        made = plan(arrays)
        assert made["wte"] is made["lm"]
        np.testing.assert_array_equal(made["wte"], tied["net"]["embed"])
    for untied in (tp.untie(_tied("embed", "head")), tp.untie(_tied("embed", "head", values=row(2, 3)))):
        made = saving.plan(source, {"net": untied})(arrays)
        np.testing.assert_array_equal(made["net"]["head"], tied["net"]["head"])
        assert tp.layout(made).ties == {}


class _Transposed(eqx.Module):
    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)


def test_a_tie_through_a_transform():
    model, array = _Transposed(ramp(2, 3), ramp(2, 3).T), row(2, 3)
    for source in ({"embed": array}, {"embed": array, "head": array.T}):
        made = saving.plan(source, model)(source)
        assert_same((made.embed, made.head), (jnp.asarray(array), jnp.asarray(array.T)))
    with pytest.raises(ValueError, match="'head' goes to 'head', which is tied to 'embed', but another array"):
        saving.plan(source, model)({"embed": array, "head": array.T + 1})
    with pytest.raises(ValueError, match="'embed' is missing"):
        saving.plan({"head": array.T}, model)
    assert_same(saving.plan(model, model)(model), model)


def test_a_layout_knows_the_ties_of_an_abstract_model():
    abstract, source = shapes(_tied("embed", "head")), {"embed": row(2, 3), "w": row(2)}
    with pytest.raises(ValueError, match="'head' is missing"):
        saving.plan(source, abstract)
    made = saving.plan(source, abstract, trainable=tp.layout(_tied("embed", "head")))(source)
    assert made["head"] is made["embed"]


# -- Plans are pure ----------------------------------------------------------------------------------------------------


def test_within_jit_and_vmap():
    others = {"key": jax.random.key(3), "n": jnp.arange(2), "on": jnp.array([True])}
    source = {"l.0": ramp(2), "l.1": ramp(2) + 1, "t": ramp(2, 3)} | others
    model = {
        "l": ramp(2, 2),
        "t": ramp(3, 2),
        "key": jax.random.key(0),
        "n": jnp.zeros(2, int),
        "on": jnp.array([False]),
    }
    plan = saving.plan(source, model, rename={"l.*": "l"}, transform={"t": jnp.transpose})
    want = plan(source)
    assert_same(jax.jit(plan)(source), want)
    many = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), source)
    assert_same(jax.tree.map(lambda leaf: leaf[1], jax.vmap(plan)(many)), want)
    tied = _tied("embed", "head")
    assert_same(jax.jit(saving.plan(tied, tp.copy(tied)))(tied), tied, identity=False)
    gradient = jax.grad(lambda layer: jnp.sum(plan(source | {"l.1": layer})["l"] ** 2))(source["l.1"])
    np.testing.assert_allclose(gradient, 2 * source["l.1"])


def test_leaves_stay_where_and_what_they_are():
    devices = Mesh(np.array(first_devices(4)), ("d",))
    over = NamedSharding(devices, PartitionSpec("d"))
    _, other = first_devices(2)
    model = {
        "numpy": row(2),
        "jax": ramp(4),
        "sharded": jax.device_put(ramp(4), over),
        "elsewhere": jax.device_put(ramp(4), other),
        "abstract": jax.ShapeDtypeStruct((4,), jnp.float32, sharding=over),
    }
    for kind in (np.asarray, jnp.asarray):
        source = {name: kind(row(*leaf.shape)) for name, leaf in model.items()}
        made = saving.plan(source, model)(source)
        assert isinstance(made["numpy"], np.ndarray)
        assert [made[name].sharding for name in ("sharded", "abstract")] == [over, over]
        assert (made["elsewhere"].devices(), made["jax"].devices()) == ({other}, {jax.devices()[0]})
        for name, its in source.items():
            np.testing.assert_array_equal(made[name], its)
    wide = saving.plan({"numpy": row(2, dtype=np.float64)}, {"numpy": row(2)})({"numpy": row(2, dtype=np.float64)})
    assert wide["numpy"].dtype == np.float32


# -- Names of a model --------------------------------------------------------------------------------------------------


def test_names_of_a_model_for_other_programs(tmp_path):
    model = {"net": [ramp(2, 3), ramp(2, dtype=jnp.bfloat16)], "tied": None, "key": jax.random.key(1), "f": jnp.sin}
    model["tied"] = model["net"][0]
    theirs = saving.names(model, rename={"net.*": "layer_*", "key": None}, transform={"net.0": jnp.transpose})
    assert {name: (its.shape, its.dtype.name, type(its)) for name, its in theirs.items()} == {
        "layer_0": ((3, 2), "float32", np.ndarray),
        "layer_1": ((2,), "bfloat16", np.ndarray),
    }
    assert theirs["layer_0"].flags.c_contiguous  # safetensors writes the buffer as it is
    safetensors.numpy.save_file(theirs, tmp_path / "theirs.safetensors")
    with pytest.raises(KeyError, match="'layer'; nearest: 'layer_"):
        saving.names(tmp_path / "theirs.safetensors")["layer"]
    path = tmp_path / "theirs.safetensors"
    turned = {"layer_0": jnp.transpose}
    back = saving.plan(path, model, rename={"layer_*": "net.*"}, transform=turned, strict=False)
    assert (back.missing, back.unused, back.disagrees) == (("key",), (), ())
    assert_same(back(path), model)
    np.testing.assert_array_equal(saving.names(model)["key"], jax.random.key_data(model["key"]))
    assert list(saving.names(model, "net")) == ["0", "1"]


def test_errors_of_names():
    arrays = {"a": row(2), "b": row(2)}
    for source, options, words in [
        ({"net": [row(2)]}, {"below": "nett"}, "nothing lies below 'nett'; nearest: 'net'"),
        (arrays, {"rename": {"a": "x", "b": "x"}}, "'b' and another array both get one name of x"),
        (arrays, {"rename": {"a": ("x", "y")}, "transform": {"a": lambda a: a}}, "gives 1 arrays, but the names are x"),
        (arrays, {"transform": {"a": lambda a: a @ np.ones((3, 3))}}, r"of 'a' \(float32\[2\]\) fails"),
        ({"w": np.ma.masked_array([1.0], [True])}, {}, r"'w' is a masked array, .* pass array.filled\("),
        *((each, {}, r"is a PyTorch tensor; pass NumPy arrays") for each in ({"w": _Tensor()}, {"net": [_Tensor()]})),
    ]:
        with pytest.raises((ValueError, TypeError), match=words):
            saving.names(source, **options)


def test_a_dictionary_of_arrays_is_names_whatever_else_is_in_it():
    source = {"fc.weight": np.ones(2, np.float32), "steps": 3, "scale": np.float32(1), "nothing": None}
    assert list(saving.names(source)) == ["fc.weight"]
    assert_same(saving.plan(source, {"weight": ramp(2)}, rename={"fc.*": "*"})(source), {"weight": jnp.ones(2)})


def test_a_model_owns_what_came_from_numpy():
    source = {"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}
    made = saving.plan(source, {"a": ramp(2), "b": source["b"] + 1})(source)
    source["a"][:] = source["b"][:] = 7
    assert_same(made, {"a": jnp.ones(2), "b": np.ones(2, np.float32)})
