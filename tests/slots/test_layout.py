"""A layout is a static, exact, picklable description: what it says, what it equals, what it refuses."""

import collections
import contextlib
import dataclasses
import functools
import html
import inspect
import os
import pickle
import re
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import saving

from ..zoo import enable_x64, ramp


class Net(eqx.Module):
    first: eqx.nn.Linear
    scale: jax.Array = tp.field(trainable=False)
    count: jax.Array
    rate: float
    act: Any
    config: Any = eqx.field(static=True)


def net(seed: int = 0, config: Any = 2) -> Net:
    first = eqx.nn.Linear(3, 2, key=jax.random.key(seed))
    return Net(first, ramp(2), np.arange(3), 0.5, jax.nn.relu, config)


def tied() -> dict[str, Any]:
    shared = ramp(2, 3)
    return {"a": shared, "b": ramp(4, dtype=jnp.bfloat16), "c": [shared, np.arange(2)], "d": ramp(3, 2)}


TIES = {"d": ("a", jnp.transpose)}


def test_slots_paths_sizes_and_mask():
    layout = tp.layout(tied(), ties=TIES)
    assert layout.slots == (
        tp.Slot("a", ("c.0", "d"), (2, 3), jnp.dtype("float32"), 0, 6, "float32[2,3]", 0),
        tp.Slot("b", (), (4,), jnp.dtype("bfloat16"), 6, 4, "bfloat16[4]", 0),
    )
    assert layout.paths == ("a", "b")
    assert (layout.size, layout.nbytes, layout.dtype) == (10, 32, jnp.float32)
    assert layout.ties == {"a": ("c.0", "d")}
    assert layout.mask == {"a": True, "b": True, "c": [True, False], "d": True}
    assert layout["c.0"] == layout["d"] == layout["a"] == layout.slots[0]


def test_dtype_is_that_of_the_slots_that_have_elements():
    for leaves, dtype in (
        ([np.ones(0, jnp.complex64)], jnp.float32),
        ([np.ones(2, jnp.bfloat16), np.ones(0)], jnp.bfloat16),
        ([np.ones(2, np.float64)], jnp.float32),  # as JAX takes it
        ([np.ones(2, jnp.float8_e4m3fn)], jnp.float8_e4m3fn),
    ):
        assert tp.layout(leaves).dtype == tp.ravel(leaves)[0].dtype == dtype


def test_it_prints_as_a_table():
    layout = tp.layout(tied(), freeze="b", ties=TIES)
    assert str(layout).splitlines() == [
        "path  shape  dtype     elements  bytes  role     tied to",
        "a     2,3    float32          6   24 B  trained  c.0, d (transpose)",
        "b     4      bfloat16         4    8 B  frozen",
        "c.1   2      int32            2    8 B  other",
        "",
        "trained  6 elements in 1 array, 24 B",
        "frozen   4 elements in 1 array, 8 B",
        "other    2 elements in 1 array, 8 B",
    ]
    assert str(layout) == str(tp.summary(tied(), layout))
    assert "[0:6]" in str(tp.ravel(tied(), layout)[1]) == str(tp.summary(tp.ravel(tied(), layout)[1]))
    assert repr(layout) == f"Layout(1 slot (a), 6 elements, float32; 1 frozen; digest {layout.digest})"
    assert "c.0, d (transpose)" in str(layout.freeze("**"))
    of_partial = str(tp.layout(tied(), ties={"d": ("a", functools.partial(jnp.reshape, shape=(3, 2)))}))
    assert "reshape" in of_partial
    assert " at 0x" not in of_partial
    assert str(tp.layout({"a\nb": ramp(2)})).splitlines()[1].startswith(r"a\nb ")


def test_what_a_user_sees_is_what_the_contract_names_and_cannot_be_changed():
    layout, (_, rest) = tp.layout({"w": ramp(2)}), tp.partition({"w": ramp(2)})
    layout.dtype, layout.ties, layout.slots, hash(layout)  # what is made at the first look stays hidden
    names = "slots paths size nbytes dtype ties mask digest freeze thaw diff slice indices block"
    assert sorted(name for name in dir(layout) if name[0] != "_") == sorted(names.split())
    assert [name for name in dir(rest) if name[0] != "_"] == ["layout"]
    named = "trainable: Trainable = None" in str(inspect.signature(tp.layout))  # not all that it may be
    assert named or sys.version_info < (3, 12)  # which has no names of types
    layout.ties["a"] = ()  # of a copy: all equal models get this very layout
    assert layout.ties == tp.layout({"w": ramp(2)}).ties == {}
    vector, restructure = tp.ravel({"a": (shared := ramp(2)), "b": shared, "c": {"d": ramp(1)}})
    assert restructure.layout._ipython_key_completions_() == ["a", "b", "c.d"]
    assert restructure.view(vector)["c"]._ipython_key_completions_() == ["c.d"]


SHOWN = {
    "layout": tp.layout,
    "diff": lambda model: tp.diff(model, {**model, "b": 3}),
    "plan": lambda model: saving.plan(model, model),
}


@pytest.mark.parametrize("make", SHOWN.values(), ids=SHOWN)
def test_a_table_in_a_notebook_has_the_cells_of_the_text(make):
    shown = make({"<a>": ramp(2, 3), "b": {"long name": ramp(1)}, "n": jnp.tanh})
    lines, page = [line for line in str(shown).splitlines() if line], shown._repr_html_()
    found = [re.findall("<t[hd][^>]*>([^<]+)</t", row) for row in page.split("<tr>")[1:]]
    rows = [[html.unescape(cell) for cell in row] for row in found]
    below = [line for each in re.findall("<p[^>]*>(.*?)</p>", page) for line in html.unescape(each).split("<br>")]
    is_row = [re.split("  +", line.strip()) in rows for line in lines]
    assert sum(is_row) == len(rows) > 1
    assert below == [line for line, yes in zip(lines, is_row, strict=True) if not yes]


# -- Equality


def test_values_do_not_count_but_structure_does():
    model, layout = net(), tp.layout(net())
    weight = lambda new: eqx.tree_at(lambda m: m.first.weight, model, new)
    bias = lambda new: eqx.tree_at(lambda m: m.first.bias, model, new)
    alike = [net(7), dataclasses.replace(model, rate=2, act=jax.nn.gelu), weight(np.ones((2, 3), np.float64))]
    assert {tp.layout(other) for other in alike} == {layout}
    differ = [weight(ramp(2, 4)), *map(bias, (ramp(2, dtype=jnp.bfloat16), None, model.scale))]
    differ += [eqx.tree_at(lambda m: m.count, model, ramp(3)), *(net(config=each) for each in ([2], [2.0], [True]))]
    assert len({tp.layout(net(7, config=[2])), tp.layout(net(config=[2]))}) == 1
    layouts = [layout, layout.freeze("first.bias"), *(tp.layout(other, thaw="scale") for other in differ)]
    assert len(set(layouts)) == len(layouts)
    assert layout != "a layout"


def test_diff_says_what_differs():
    def rows(**changes: Any) -> list[tuple[str, ...]]:
        model = {"a": ramp(2), "n": net()}
        return changed(tp.layout(model), tp.layout(model | changes))

    def changed(layout: tp.Layout, other: tp.Layout) -> list[tuple[str, ...]]:
        assert bool(layout.diff(other)) is (layout != other)
        assert tp.diff(layout, other).rows == layout.diff(other).rows
        return [row[:4] for row in layout.diff(other).rows]

    assert rows() == []
    assert rows(a=5) == [("a", "type", "float32[2]", "no array")]
    assert rows(a=ramp(2).astype(jnp.int32)) == [("a", "dtype", "float32[2]", "int32[2]")]
    assert rows(n=net(config=2.0)) == [("n.config", "static", "2 (int)", "2.0 (float)")]
    layout = tp.layout(tied(), ties=TIES)
    assert changed(layout, layout.freeze("b")) == [("b", "trained", "trained", "frozen")]
    assert changed(layout, tp.layout(tied())) == [("a", "tie", "c.0, d (transpose)", "c.0")]
    square = {"a": ramp(2, 2), "b": ramp(2, 2)}
    straight, other = tp.layout(square, ties={"b": "a"}), tp.layout(square, ties={"a": "b"})
    assert changed(straight, other) == [("a", "tie", "b", "b (its source)"), ("b", "tie", "a (its source)", "a")]


PICKLED = [
    lambda: tp.layout(net(config=[1, {"a": {2, 3}}])).thaw("scale"),
    lambda: tp.layout(tied(), freeze="b", ties=TIES),
    lambda: tp.layout(tied(), ties={"d": ("a", functools.partial(jnp.reshape, shape=(3, 2)))}),
    lambda: tp.layout(eqx.nn.BatchNorm(3, "b", mode="batch")),  # whose marker is still an `object()`
]


@pytest.mark.parametrize("make", PICKLED)
def test_it_equals_itself_after_pickling(make: Any):
    again = pickle.loads(pickle.dumps(known := make()))
    assert again == known
    assert str(again) == str(known)
    assert {known: 1}[again] == 1


def test_it_is_found_in_a_process_with_another_hash_seed(pytestconfig: pytest.Config):
    code = f"""
import pickle, sys
from {__name__} import PICKLED
print([{{make(): "found"}}.get(read) for make, read in zip(PICKLED, pickle.load(sys.stdin.buffer))])
"""
    options = {"cwd": pytestconfig.rootpath, "env": os.environ | {"PYTHONHASHSEED": "1"}}
    given = pickle.dumps([make() for make in PICKLED])
    printed = subprocess.run([sys.executable, "-c", code], input=given, stdout=subprocess.PIPE, check=True, **options)
    assert printed.stdout.decode() == f"{['found'] * len(PICKLED)}\n"


# -- Models that are not as others


def test_abstract_models_have_the_same_layout_but_no_ties_by_identity():
    build = lambda: {"net": net(), "pair": [jnp.ones(2)] * 2, "half": jnp.ones((3, 2), jnp.bfloat16)}
    abstract = eqx.filter_eval_shape(build)
    assert tp.layout(abstract["net"]) == tp.layout(net())
    assert tp.layout(abstract).ties == tp.layout([jax.ShapeDtypeStruct((2,), jnp.float32)] * 2).ties == {}
    assert tp.layout(abstract, ties={"pair.1": "pair.0"}) == tp.layout(build())


def test_a_deleted_array_is_named_by_path():
    model = {"a": ramp(2), "b": [ramp(3)]}
    model["b"][0].delete()
    mapped = lambda model: tp.maptrainable(lambda x: x + 1, model)
    average = lambda model: tp.ema(model, {"a": ramp(2), "b": [ramp(3)]}, decay=0.5)
    for use in (tp.ravel, tp.copy, mapped, average, tp.grad(lambda model: jnp.sum(model["b"][0]))):
        with pytest.raises(RuntimeError, match=r"'b.0' has been deleted, as by a step that donates it; .*tp.copy"):
            use(model)


# -- Numbers -----------------------------------------------------------------------------------------------------------


class Physics(eqx.Module):
    w: jax.Array
    nu: float = 0.1
    settings: dict = dataclasses.field(default_factory=lambda: {"rate": 0.5})
    held: Any = tp.field(trainable=False, default=None)


def test_a_table_names_what_is_no_array():
    model = {"act": jnp.tanh, "net": Physics(np.ones(2, np.float32)), "name": "x"}
    last = "no arrays  net.nu (float), net.settings.rate (float), act (function), name (str)"
    assert str(tp.layout(model)).splitlines()[-1] == last
    known = tp.layout({"w": ramp(1), "n": [3]})
    assert str(pickle.loads(pickle.dumps(known))).endswith("\nno arrays  n.0 (int)")
    assert known == tp.layout({"w": ramp(1), "n": ["x"]})


def test_a_float_beside_parameters_is_warned_of_once_per_kind():
    held = {"w": ramp(1), "c": 0.5}
    for quiet in ({"w": ramp(1), "net": Physics(ramp(2), held=held)}, [0.5, {"n": np.arange(2)}]):
        tp.layout(quiet)
    said = r"^'alpha', 'body.1': a Python number is not a parameter.*jnp.asarray\(number\), or tp.field\(converter="
    for shape in (1, 2):
        model = {"alpha": 0.0, "body": (ramp(shape), 0.5, 3), "net": Physics(ramp(2))}
        with pytest.warns(UserWarning, match=said) if shape == 1 else contextlib.nullcontext():
            tp.layout(model)
    with pytest.raises(ValueError, match=r"no parameter, only 'alpha' \(float, not an array\).* write jnp.asarray\("):
        tp.layout(model, "alpha")


@pytest.mark.parametrize("form", [tp.ravel, tp.stack])
def test_a_form_of_nothing_is_warned_of(form):
    with pytest.warns(UserWarning, match="^nothing is trained: .* arrays, and 'nu': numbers are not parameters; write"):
        form({"nu": 0.1})
    with pytest.warns(UserWarning, match=r"^nothing is trained: all parameters are frozen \('w'\); thaw"):
        form({"w": ramp(1)}, tp.layout({"w": ramp(1)}, freeze="w"))


# -- The digest

A, B = ramp(2, 3), ramp(3)


def test_the_digest_is_of_paths_shapes_and_dtypes_and_each_difference_changes_it():
    of = lambda model, **options: tp.layout(model, **options).digest
    same = [
        {"a": A, "b": B, "f": jnp.tanh, "n": 3},
        {"a": np.asarray(A), "b": np.asarray(B)},
        {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": B},
        collections.namedtuple("AB", "a b")(A, B),
    ]
    # Fixed for all versions: if this changes, no checkpoint fits.
    assert {of(model) for model in same} == {"c8db26219b45e84f"}
    with enable_x64(True):
        assert of(same[1]) == "c8db26219b45e84f"
    model, three = {"a": A, "b": B, "c": A.T}, {"a": A, "b": A + 1, "c": A + 2}
    others = {"b": ramp(4)}, {"b": B.astype(jnp.bfloat16)}, {"key": jax.random.key(0)}, {"count": np.array(0)}
    ties = {"b": "a"}, {"b": ("a", functools.partial(jnp.multiply, 2.0))}, {"b": ("a", jnp.negative)}, {"b": "c"}
    digests = [
        *(of(model | other) for other in ({}, *others)),
        *(of(model, freeze=name) for name in "ab"),
        of(same[1]),
        of(model, ties={"c": ("a", jnp.transpose)}),
        of({"a": A, "b": A, "c": A.T}),
        *(of(three, ties=each) for each in ties),
    ]
    assert len(set(digests)) == len(digests)
