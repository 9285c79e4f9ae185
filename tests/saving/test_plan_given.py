"""What a plan is given, beside what it was made of: names, ties, kinds of sources; and what it prints of them."""

import functools
import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import saving
from treeparams.saving._names import stack

from ..zoo import assert_same, first_devices, ramp
from .test_plan import row, shapes

# -- Names -------------------------------------------------------------------------------------------------------------


def _layers(count):
    return {f"l.{i}.w": row(2, start=i) for i in range(count)}


def test_names_that_the_plan_does_not_know():
    model, rename = {"l": {"w": ramp(12, 2)}}, {"l.*.w": "l.w"}
    plan, more = saving.plan(_layers(12), model, rename=rename), _layers(16)
    message = (
        r"the plan does not know 'l\.12\.w', 'l\.13\.w', 'l\.14\.w' and 1 more, .* make the plan from these arrays"
    )
    for use in (plan, jax.jit(plan)):
        with pytest.raises(ValueError, match=message):
            use(more)
    loose = saving.plan(_layers(12), model, rename=rename, strict=False)
    assert_same(loose(more), plan(_layers(12)))


def test_names_that_the_plan_knows_may_be_missing_or_go_nowhere():
    source = {"a": row(2), "dropped": row(1), "step": 3}
    plan = saving.plan(source, {"a": ramp(2)}, rename={"dropped": None})
    for given in (source, {"a": row(2)}, source | {"dropped": row(7), "step": 4, "more": 0.5, "text": np.array("t")}):
        assert_same(plan(given), {"a": jnp.arange(2.0)})
    loose = saving.plan(source, {"a": ramp(2)}, strict=False)
    assert_same(loose(source), {"a": jnp.arange(2.0)})
    with pytest.raises(ValueError, match=r"at 'a', .* got nothing; there are such names below 'model': saving.names\("):
        plan({"model": {"a": row(2)}, "state": row(1)})
    with pytest.raises(ValueError, match=r"'a' has no value: expected arrays, .* jax.eval_shape\(plan, arrays\)"):
        plan(shapes({"a": row(2)}))
    assert jax.eval_shape(plan, shapes({"a": row(2)}))["a"].shape == (2,)


# -- Ties --------------------------------------------------------------------------------------------------------------

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
# What is made of each that is given: `b`, or why it is refused.
TIES = {
    ("a alone", "tied"): [None, None, _DIFFER, _DIFFER, None, _NOT_ALL],
    ("tied", "tied"): ["a", "a", _DIFFER, _DIFFER, "a", _NOT_ALL],
    ("tied", "equal"): ["a", "a", "'b' goes to 'b', which is tied to", "got float32", *2 * [_NOT_ALL]],
    ("untied", "tied"): ["b", "b", "b", "got float32", *2 * [_NOT_ALL]],
    ("untied", "other"): ["b", "b", "b", "got float32", *2 * [_NOT_ALL]],
}


@pytest.mark.parametrize(("model", "source"), TIES, ids=map(" from ".join, TIES))
def test_entries_of_a_tie(model, source):
    plan = saving.plan(GIVEN[source], MODELS[model])
    for given, want in zip(GIVEN.values(), TIES[model, source], strict=True):
        if want not in (None, "a", "b"):
            with pytest.raises(ValueError, match=want):
                plan(given)
            continue
        made = plan(given)
        np.testing.assert_array_equal(made["a"], given["a"])
        if want:
            np.testing.assert_array_equal(made["b"], given[want])


def test_entries_of_a_tie_that_are_left_out_on_purpose_or_that_no_value_tells():
    tied, other = GIVEN["tied"], GIVEN["other"]
    with pytest.raises(ValueError, match=r"'a' and 'b' differ, .* uses only 'b'; .* rename=\{'a': None\}"):
        saving.plan(tied, {"q": ramp(2), "w": ramp(3)}, rename={"b": "q"})(other)
    keys = {name: jax.random.key(0) for name in "ab"}
    with pytest.raises(ValueError, match=_DIFFER):
        saving.plan(dict.fromkeys("ab", keys["a"]), {"a": keys["a"]})(keys | {"b": jax.random.key(1)})


def test_one_description_of_several_arrays_is_no_tie():
    one = jax.ShapeDtypeStruct((2,), np.float32)
    model = {"l": [{"w": ramp(2)}]}
    for source in (dict.fromkeys(("l.0.w", "l.1.w"), one), {"l": [{"w": one}] * 2}, tp.layout({"l": [{"w": one}] * 2})):
        with pytest.raises(ValueError, match=r"'l\.1\.w' is unused"):
            saving.plan(source, model)
        assert len(saving.plan(source, model, strict=False).unused) == 1


# -- A flat dictionary -------------------------------------------------------------------------------------------------

_NESTED = {"layers": [{"w": row(2)}, {"w": row(2, start=5)}], "b": row(1)}
_FLAT = saving.names(_NESTED)


def test_a_flat_dictionary_is_a_model_without_quotes():
    for source, rename in (
        (_NESTED, None),
        (_FLAT, None),
        ({"h.0": row(2), "h.1": row(2, start=5), "b": row(1)}, {"h.*": "layers.*.w"}),
        ({"h": np.stack([row(2), row(2, start=5)]), "b": row(1)}, {"h": "layers.*.w"}),
    ):
        plan = saving.plan(source, _FLAT, rename=rename)
        assert_same(plan(source), _FLAT)
        assert '"' not in str(plan)
        assert [each.path for each in plan.rows] == ["b", '"layers.0.w"', '"layers.1.w"']


def test_a_flat_dictionary_in_words():
    wrong = _FLAT | {"layers.0.w": row(3)}
    plan = saving.plan(wrong, shapes(_FLAT), rename={"b": None}, strict=False)
    assert plan.problems() == [
        "'b' is missing: nothing comes to it",
        "'layers.0.w' is float32[2], but float32[3] comes from layers.0.w",
    ]
    with pytest.raises(ValueError, match=r"nothing comes to b, layers\.0\.w, and the model has no value"):
        plan(wrong)
    stays = saving.plan({"b": row(1)}, _FLAT, rename={None: "layers.**"})
    assert str(stays).count("stays") == 2
    assert stays.missing == ()


def test_a_flat_dictionary_that_was_saved(tmp_path):
    """In a file its keys are paths, with quotes; each is still one name."""
    path, flat = tmp_path / "flat.safetensors", jax.tree.map(jnp.asarray, _FLAT)
    saving.save(path, flat)
    plans = [saving.plan(source, flat) for source in (path, flat, tp.layout(flat))]
    for plan in plans:
        for given in (path, flat, _FLAT):
            assert_same(plan(given), flat)
    assert_same(saving.plan(path, _NESTED)(path), _NESTED)
    stacked = saving.names(path, rename={"layers.*.w": "w", "b": None})
    np.testing.assert_array_equal(stacked["w"], [[0, 1], [5, 6]])


# -- Arrays that JAX has otherwise, or not at all ----------------------------------------------------------------------


def test_a_file_of_numpy_is_a_source(tmp_path):
    path, model = tmp_path / "model.npz", {"fc": {"weight": ramp(3, 2), "bias": ramp(3)}}
    others = {"text": np.array("adam"), "wide": np.zeros(2, np.longdouble), "pairs": np.zeros(2, [("é", "f4")])}
    np.savez_compressed(path, **{"fc.weight": row(3, 2), "fc.bias": row(3)}, **others)
    drop = {"wide": None, "pairs": None}
    with np.load(path) as file:
        plan = saving.plan(file, model, rename=drop)
        assert_same(plan(file), {"fc": {"weight": jnp.asarray(row(3, 2)), "bias": jnp.arange(3.0)}})
        with pytest.raises(ValueError, match="'wide' is unused: no array is at 'wide'\n'pairs' is unused"):
            saving.plan(file, model)
        message = r"'wide' is float\d+\[2\], which JAX does not support; drop it, rename=\{'wide': None\}"
        for transform in (None, {"wide": jnp.sin}):
            with pytest.raises(ValueError, match=message):
                saving.plan(file, model | {"wide": ramp(2)}, rename={"pairs": None}, transform=transform)
        loose = saving.plan(file, model | {"wide": ramp(2)}, strict=False)
        assert_same(loose(file)["wide"], ramp(2))


WIDE = {
    "float64": np.array([1e300, 1.0]),
    "int64": np.array([2**40, 1]),
    "complex128": np.array([1e300j, 1.0]),
}


@pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE.keys())
def test_64_bits_that_do_not_fit_into_32(wide):
    """Whichever way they go; where NumPy has them on both sides, they are not cut."""
    narrow = jax.dtypes.canonicalize_dtype(wide.dtype)
    source = {"a": wide, "r.0": wide, "r.1": wide[::-1], "u": wide, "f": wide}
    rename, transform = {"r.*": "r", "u": "u.*"}, {"f": lambda f: f + 0}
    make = lambda of, dtype: {"a": of(2, dtype), "r": of((2, 2), dtype), "u": [of((), dtype), of((), dtype)]}
    kept = saving.plan(source | {"f": row(1)}, make(np.zeros, wide.dtype), rename=rename | {"f": None})(source)
    want = {"a": wide, "r": np.stack([wide, wide[::-1]]), "u": [np.asarray(each) for each in wide]}
    assert_same(kept, want)
    for name in source:
        fitting = {other: array if other == name else np.ones_like(array) for other, array in source.items()}
        for model in (make(np.zeros, narrow), make(jnp.zeros, narrow)):
            plan = saving.plan(source, model | {"f": jnp.zeros(2, narrow)}, rename=rename, transform=transform)
            with pytest.raises(ValueError, match=f"has values that {narrow} cannot hold; switch on jax_enable_x64"):
                plan(fitting)
    with pytest.raises(ValueError, match=f"'a' has values that {narrow} cannot hold"):
        saving.names({"a": wide}, transform={"a": jnp.negative})
    assert saving.names({"a": wide[1:]}, transform={"a": np.negative})["a"].dtype == wide.dtype


# -- Functions ---------------------------------------------------------------------------------------------------------


def test_a_function_gets_arrays_of_jax_as_when_the_plan_was_made():
    source, model = {"a": row(2)}, {"a": ramp(2)}
    plan = saving.plan(source, model, transform={"a": lambda a: a.at[0].set(7)})
    np.testing.assert_array_equal(plan(source)["a"], [7, 1])
    for same in (lambda a: a, jnp.asarray, lambda a: jnp.reshape(a, -1)):
        source = {"a": np.ones(4096, np.float32)}  # NumPy aligns large arrays, and JAX may take such as they are
        made = saving.plan(source, {"a": ramp(4096)}, transform={"a": same})(source)
        source["a"][:] = 7
        np.testing.assert_array_equal(made["a"], 1)


def test_a_stack_of_thousands_of_rows():
    assert isinstance(stack(row(2), row(2)), np.ndarray)
    mesh = Mesh(np.array(first_devices(2)), ("d",))
    over, lies = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (("d",), (None, "d")))
    rows = {f"l.{i}": jax.device_put(row(2, start=i), over) for i in range(40)}
    plan = saving.plan(rows, {"l": jax.device_put(ramp(40, 2), lies)}, rename={"l.*": "l"})
    for given in (rows, {name: np.asarray(its) if name < "l.2" else its for name, its in rows.items()}):
        made = plan(given)["l"]
        assert made.sharding == lies
        np.testing.assert_array_equal(made, [row(2, start=i) for i in range(40)])


# -- What is printed, and kept -----------------------------------------------------------------------------------------

STRANGE = ["", "a\nb", "a\tb", "\ud800", '"', "'", "é", "**", "!x", "[z]", "\x00", "a b", "a.b\nc", "x" * 200]


def test_any_name_can_be_printed():
    source = {name: row(2) for name in STRANGE}
    plans = [
        saving.plan(source, source),
        saving.plan(source, {name: ramp(3) for name in STRANGE}, strict=False),
        saving.plan(source, {"x": ramp(2)}, strict=False),
        saving.plan({"x": row(2)}, source, strict=False),
        saving.plan({}, {}),
        saving.plan(row(2), row(3), strict=False),
    ]
    for plan in plans:
        texts = [str(plan), repr(plan), *map(str, plan.rows), *plan.problems()]
        assert all(text.isprintable() for text in "\n".join(texts).split("\n"))
        assert plan._repr_html_().encode()


def test_all_rows_can_be_printed():
    plan = saving.plan(_layers(100), {"l": {"w": ramp(100, 2)}, "k": ramp(1)}, rename={"l.*.w": "l.w", None: "k"})
    names = ", ".join(_layers(100))
    assert list(map(str, plan.rows)) == ["k: float32[1], from nothing", f"l.w: float32[100,2], from {names} by stack"]
    key, other = jax.random.key(0), jax.random.key(0, impl="rbg")
    keys = saving.plan({"k": key}, {"k": other}, strict=False)
    assert keys.disagrees == ("'k' is key<rbg>[], but key<fry>[] comes from k",)


def _doubled(array):
    return 2 * array


def test_a_plan_holds_nothing_of_its_source():
    source, model = {"weight": row(2, 2), "b": row(2)}, {"linear": tp.copy(ramp(2, 2)), "b": ramp(2)}
    plan = saving.plan(source, model, rename={"weight": "linear"}, transform={"b": functools.partial(_doubled)})
    array = weakref.ref(source["b"])
    plan(source)
    del source
    gc.collect()
    assert array() is None
