"""saving.plan: what goes where from arrays by name into a model, said before anything is loaded; and plan.average.

Averages, and what is kept beside parameters, are carried by functions that only move elements.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import assert_same, ramp
from .files import planned, refused, row

RENAMES = [
    ({"a.*": "x.*", "**": "y.**"}, {"a.w": "x.w", "b": "y.b", "a.b.w": "y.a.b.w"}),  # the first that matches
    ({"a": "x"}, {"a": "x", "a.b": "a.b", "ab": "ab", "b.a": "b.a"}),  # others stay
    ({"*.layer.*.**": "net.*.**.*"}, {"a.layer.b.c": "net.a.b.c", "a.layer.0.b.c": "net.a.0.b.c"}),
    ({"layer_*.w*": "layers.*.weight*"}, {"layer_10.w": "layers.10.weight", "layer_1.w1": "layers.1.weight1"}),
    ({"**.w": "m.**.v"}, {"w": "m.v", "a.w": "m.a.v", "a.b.w": "m.a.b.v"}),  # stars for no entries
    ({"a?.w": "x.w"}, {"ab.w": "x.w", "a.w": "a.w", "abc.w": "abc.w"}),
    ({"w[0]": "x.[?]", "a[*]": "b", "?[?]": "c"}, {"w[0]": "x.[?]", "a*": "b", "d?": "c"}),  # of a name itself
    ({"a+(b)|$": "x", "^.*": "y.*"}, {"a+(b)|$": "x", "^.z": "y.z", "aab": "aab"}),  # no regular expressions
    ({"a.**.**": "x.**.**"}, {"a.b.c": "x.b.c", "a": "x"}),
    ({"model.**": "**"}, {"model": "", "model.a": "a", "models": "models"}),
    (lambda name: None if name == "a" else name.upper(), {"a": None, "b.c": "B.C"}),
    ({"a.**": None, ("b", "c"): None}, {"a.x": None, "a": None, "b": None, "c": None, "d": "d"}),
    # Entries with quotes, and parts of these; several entries in place of a part.
    ({"*.w": "*.v", "*.*": "x.*.y_*"},
     {'"a.b".w': '"a.b".v', '"*"."w[0]"': 'x."*"."y_w[0]"', 'a."1.5"': 'x.a."y_1.5"'}),
    ({"layer*.w": "*.w", 'm."*".*': "n.*", "b?*": "*.b"},
     {'"layer1.5".w': '"1.5".w', '"layer".w': '"".w', 'm."*".w': "n.w", "m.a.w": "m.a.w", '"b.c"': "c.b"}),
    # Names of other programs.
    ({"net.**": "**", "*:0": "v.*", "w*": "v*"},
     {'net."x.y"z': '"\\"x"."y\\"z"', "net.a[0].b": "a[0].b", "a/b:0": "v.a/b", "w[1]": "v[1]", '"q': '"q'}),
]  # fmt: skip


def test_rename():
    for rename, want in RENAMES:
        arrays = {name: np.array(i) for i, name in enumerate(want)}  # known by their values
        found = {new: list(want)[its] for new, its in saving.names(arrays, rename=rename).items()}
        assert found == {new: old for old, new in want.items() if new is not None}


def test_quotes_of_a_path_are_not_in_its_way():
    model = {"a.b": {"w": row(2)}, "c": {"w": row(1)}}
    assert list(saving.names(model, rename={"*.w": "*.v"})) == ['"a.b".v', "c.v"]
    flat = {"a.b.w": row(2), "c": row(1)}
    inside = saving.plan(tp.layout(flat), {"x": flat}, rename={"*": "x.*"})
    assert [each.names for each in inside.rows] == [('"a.b.w"',), ("c",)]
    assert_same(inside({'"a.b.w"': row(2), "c": row(1)}), {"x": jax.tree.map(jnp.asarray, flat)})
    assert_same(planned({"x": flat}, flat, rename={"x.*": "*"}), jax.tree.map(jnp.asarray, flat))
    # Keys of a flat dictionary of arrays are names, as of a file, and end at their dots; and so they may as a model.
    assert list(saving.names(flat, rename={"a.*.w": "*.v"})) == ["c", "b.v"]
    nested = saving.plan({"m": {"a": {"b": {"w": row(2)}}}, "c": row(1)}, flat, rename={"m.**": "**"})
    assert [each.names for each in nested.rows] == [("m.a.b.w",), ("c",)]


def test_which_star_stacks_and_in_which_order():
    names = [f"h.{head}.layers.{n}.w" for head in "ba" for n in (10, 9, 0, 1)]
    arrays = {name: np.array(i) for i, name in enumerate(names)}
    stacked = saving.names(arrays, rename={"h.*.layers.*.w": "*.w"})
    assert {name: its.tolist() for name, its in stacked.items()} == {"b.w": [2, 3, 1, 0], "a.w": [6, 7, 5, 4]}
    model = {"h": {head: {"layers": {n: {"w": np.array(0)} for n in (0, 1, 9, 10)}} for head in "ab"}}
    assert saving.names(planned(stacked, model, rename={"*.w": "h.*.layers.*.w"})) == arrays
    assert saving.names({"w": row(3)}, rename={"w": "l.*.w"}) == {"l.0.w": 0, "l.1.w": 1, "l.2.w": 2}  # of no model
    ours = {"net": [{"w": row(2), "b": {"c": row(3)}}, {}, {"w": row(2) + 5, "b": {"c": row(3) + 5}}]}
    stack = saving.names(ours, rename={"net.*.**": "net.**"})
    assert {name: its[:, 0].tolist() for name, its in stack.items()} == {"net.w": [0, 5], "net.b.c": [0, 5]}
    assert_same(planned(stack, ours, rename={"net.**": "net.*.**"}), ours)
    heads = {f"l.{n}.h.{m}.w": np.array(10 * n + m) for n in (0, 1) for m in (0, 1)}
    assert saving.names(heads, rename={"l.*.h.*.w": "l.*.w"})["l.1.w"].tolist() == [10, 11]


def test_layers_are_split_and_merged_each_by_itself():
    theirs = {f"layers.{n}.qkv.{what}": row(6, 2, start=100 * n) for n in range(3) for what in "wb"}
    ours = {"blocks": [{name: {what: ramp(2, 2) for what in "wb"} for name in "qkv"} for _ in range(3)]}
    left, rights = "layers.*.qkv.*", tuple(f"blocks.*.{name}.*" for name in "qkv")
    made = planned(theirs, ours, rename={left: rights}, transform={left: lambda whole: jnp.split(whole, 3)})
    for n, block in enumerate(made["blocks"]):
        for i, name in enumerate("qkv"):
            for what, its in block[name].items():
                np.testing.assert_array_equal(its, theirs[f"layers.{n}.qkv.{what}"][2 * i : 2 * i + 2])
    merge = {"rename": {rights: left}, "transform": {rights: lambda *parts: np.concatenate(parts)}}
    assert_same(saving.names(made, **merge), theirs)
    # Where one of those that go together is not there.
    arrays, both = {"0.q": row(2), "0.k": row(2), "1.q": row(2)}, ("*.q", "*.k")
    merge = {"rename": {both: "*.qk"}, "transform": {both: lambda *both: jnp.concatenate(both)}}
    plan = saving.plan(arrays, [{"qk": ramp(4)}, {"qk": ramp(4)}], strict=False, **merge)
    assert [each.names for each in plan.rows] == [("0.q", "0.k"), ()]
    assert (plan.missing, plan.unused) == (("1.qk",), ("1.q",))


_AB, _TO = {"a": row(2), "b": row(2)}, {"x": ramp(2), "y": ramp(2)}
STARS = "are not those of the left side; one more '*' on the left stacks arrays"
ERRORS = [  # rename, transform, kind of error, and words of it
    ({"c": "x"}, None, ValueError, "rename: 'c' matches no name; nearest: 'a', 'b'"),
    ({("a", "c"): None}, None, ValueError, "rename: 'c' matches no name"),
    ({"*": "x.*", "b": "y"}, None, ValueError, "rename: 'b' comes too late: '*' took all that it matches"),
    *(({left: right}, None, ValueError, STARS) for left, right in {"*.*": "x", "a": "x.*.*"}.items()),
    *(({left: "x"}, None, ValueError, STARS) for left in (("a*", "b*"), ("a", "b.*"))),
    ({"*": "x"}, None, ValueError, "'*': none of its '*' matches numbers alone, so nothing can be stacked"),
    ({"?": "x"}, None, ValueError, "'?': it matches 'a' and 'b', which go to one place"),
    ({"a": "x", "b": "x"}, None, ValueError, "'a' and 'b' both go to 'x'; drop one with None"),
    ({("a", "b"): "x"}, None, ValueError, "('a', 'b'): it merges or splits arrays, so write how: transform="),
    (None, {"c": jnp.sin}, ValueError, "transform: 'c' matches no name; nearest: 'a', 'b'"),
    (None, {("a", "b"): jnp.sin}, ValueError, "transform has ('a', 'b'), which is no left side"),
    ({("a", "b"): "x"}, {("a", "b"): jnp.add, "a": jnp.sin}, ValueError, "'a', but that goes with others"),
    ({"a": "x"}, {"a": lambda a: a @ jnp.ones((3, 3))}, ValueError, "of 'a' (float32[2]) fails: TypeError"),
    ({3: "x"}, None, TypeError, "a left side of rename must be a name, a glob or several of these, got 3"),
    ({"a": ()}, None, TypeError, "a right side of rename must be a name, a glob or several"),
    (lambda name: 7, None, TypeError, "rename('a') must return a name, or None to drop it, got int"),
    (None, {"a": "transpose"}, TypeError, "transform['a'] must be a function of arrays, got str"),
]


@pytest.mark.usefixtures("without_type_checks")
def test_errors():
    for rename, transform, kind, words in ERRORS:
        refused(re.escape(words), saving.plan, _AB, _TO, rename=rename, transform=transform, strict=False, kind=kind)
    refused("a plan is no source of another one", saving.plan, saving.plan(_AB, _AB), _AB, kind=TypeError)
    layers, below = {"l.0": row(2), "l.1": row(2)}, "'h.*' matches no name; h.*.** matches the names below it, such as"
    for source, rename, transform, words in [
        (layers, {"l.*": "x"}, {"l.?": jnp.sin}, "which matches 'l.0', but that goes with others; write the transform"),
        ({"h.0.w": row(2)}, {"h.*": "b.*"}, None, f"{below} 'h.0.w'"),
        ({"1": ramp(2), "01": ramp(2)}, {"*": "x"}, None, "'*': it matches '1' and '01', which go to one place"),
    ]:
        refused(re.escape(words), saving.plan, source, _TO, rename=rename, transform=transform)
    for use in (saving.names, functools.partial(saving.plan, model={"x": [ramp(2)]}, strict=False)):
        refused(r"unstack of 'n' \(int32\[\]\) fails: TypeError", use, {"n": row(dtype=np.int32)}, rename={"n": "x.*"})
        words = r"stack of 'l.0' \(float32\[1\]\), 'l.1' \(float32\[2\]\) fails"
        refused(words, use, {"l.0": row(1), "l.1": row(2)}, rename={"l.*": "x.0"})


PROBLEMS = """\
'old' is missing: nothing comes to it; nearest: 'news'
'news' is unused: no array is at 'news'; nearest: 'old'
'b' is bfloat16[3], but float32[3] comes from b; to cast it, write a transform, lambda array: array.astype('bfloat16')
'turned' is float32[2,3], but float32[3,2] comes from turned; to transpose it, write transform={...: jnp.transpose}
'key' is key<fry>[], but uint32[2] comes from key"""


def test_report():
    model = {"b": ramp(3, dtype=jnp.bfloat16), "n": jnp.arange(2), "old": ramp(2), "turned": ramp(2, 3), "w": ramp(2)}
    model["key"] = jax.random.key(0)
    theirs = {"b": row(3), "n": row(2, dtype=np.int64), "turned": row(3, 2), "v": row(2, dtype=np.float64)}
    theirs |= {"news": row(1), "key": jax.random.PRNGKey(3)}
    words = "the source does not fit the model; strict=False loads the rest:\n"
    assert refused(words, saving.plan, theirs, model, rename={"v": "w"}) == words + PROBLEMS
    plan = saving.plan(theirs, model, rename={"v": "w"}, strict=False)
    assert (plan.missing, plan.unused, plan.disagrees) == (("old",), ("news",), tuple(PROBLEMS.splitlines()[2:]))
    assert str(plan).endswith(f"\n2 of 6 arrays come from the source\n{PROBLEMS}")
    assert repr(plan) == "Plan(6 arrays, 1 missing, 1 unused, 3 disagree)"
    assert plan.rows[-1] == ("w", ("v",), "", (2,), np.float32)  # float64 is float32 in JAX here
    made = plan(theirs)
    assert_same(made, model | {"n": jnp.arange(2), "w": jnp.arange(2.0)})
    assert made["old"] is model["old"]


def test_a_function_that_gives_another_number_of_arrays():
    two, thrice = {"a": ("x", "y")}, {"a": lambda a: [a, a, a]}
    plan = saving.plan({"a": row(2)}, _TO, rename=two, transform=thrice, strict=False)
    assert re.fullmatch(r"a: lambda at test_plan.py:\d+ gives 3 arrays, but the paths are x, y", *plan.disagrees)
    halves = {"rename": {"a": ("x", "z")}, "transform": {"a": lambda a: jnp.split(a, 2)}}
    refused("'z'", saving.plan, {"a": row(4)}, {"x": ramp(2)}, **halves)  # a part that goes nowhere


def test_how_is_the_name_of_what_is_done():
    twice = functools.partial(jnp.multiply, 2.0)
    plan = saving.plan(_AB, _AB, transform={"b": twice, "*": jnp.sin})  # the first that matches
    assert [each.how for each in plan.rows] == ["sin", "multiply"]
    np.testing.assert_allclose(plan(_AB)["b"], [0, 2])
    layers = {"l.1": row(2), "l.0": row(2) + 5}  # all of them, in order
    stacked = saving.plan(layers, {"l": ramp(2)}, rename={"l.*": "l"}, transform={"l.*": lambda a, b: a - b})
    assert stacked.rows[0][1] == ("l.0", "l.1")
    assert stacked.rows[0].how.startswith("lambda at test_plan.py")
    np.testing.assert_array_equal(stacked(layers)["l"], [5, 5])


def test_what_stays_as_it_is_is_named_under_none():
    model = {"a": ramp(2), "new": {"w": ramp(2), "b": ramp(1)}, "other": ramp(3)}
    source = {"a": np.ones(2, np.float32)}
    assert_same(planned(source, model, rename={None: ["new.**", "other"]}), model | {"a": jnp.ones(2)})
    for right, words in {
        "new.**": r"'other' is missing",
        "knew": r"rename, None: 'knew' matches no path; nearest: 'new.w'",
        "**": r"rename, None: 'a' should stay as it is, but 'a' goes there",
    }.items():
        refused(words, saving.plan, source, model, rename={None: right})


# The names of an average in which these are the shadows.
_shadows = lambda arrays: {f"shadow.{name}": its for name, its in arrays.items()} | _COUNTS
_COUNTS = {"count": np.array(3), "weight": np.array(0.5, "f")}


def _moved(sources, targets, transform, shadows):
    plan = saving.plan(sources, targets, transform=transform)
    return jax.jit(lambda its: plan.average(_shadows(its), tp.Ema(targets, 0.9)).shadow)(shadows)


_NOISE = np.random.default_rng(7).normal(size=(4, 4)).astype(np.float32)
_ROWS = np.array([2, 0, 3, 1])
# Each is of a matrix of four rows and columns, and gives one.
MOVES = {
    "transpose": jnp.transpose,
    "reshape": lambda x: x.reshape(2, 8).T.reshape(4, 4),
    "flip": lambda x: x[:, ::-1],
    "take along": lambda x: jnp.take_along_axis(x, np.array([[1, 3, 0, 2]]), axis=1),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
    "mapped": jax.vmap(lambda row: row[::-1]),
    "computed places": lambda x: x[(jnp.asarray(_ROWS) * 3 + 1) % 4],
    "no gradient": lambda x: jax.lax.stop_gradient(1 * x).T,
    "padded and cut": lambda x: jnp.pad(x, 1)[1:-1, 1:-1],
    "put together": lambda x: jnp.zeros((4, 4), x.dtype).at[:2].set(x[2:]).at[2:].set(x[:2]),
    "a product": lambda x: jnp.eye(4, dtype=x.dtype)[_ROWS] @ x,
    "a sum of halves": lambda x: jnp.pad(x[:2], ((2, 0), (0, 0))) + jnp.pad(x[2:], ((0, 2), (0, 0))),
}
DROPS = {
    "some rows": lambda x: x[np.array([True, False, True, True])],
    "mask": lambda x: x * np.tri(4).astype(x.dtype),
    "pad": lambda x: jnp.pad(x[1:, :3], ((0, 1), (1, 0))),
    "of two by a mask": lambda x: jnp.where(np.eye(4, dtype=bool), x, x.T),
    "zeros by places": lambda x: x.at[jnp.asarray(_ROWS)[:2]].set(0).T,
}
_composed = lambda *functions: lambda x: functools.reduce(lambda x, f: f(x), functions, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_moves_elements_moves_averages_with_all_their_digits(dtype):
    cast, values = lambda x: x.astype(jnp.bfloat16).astype(x.dtype), _NOISE
    functions = {"moves": _composed(*MOVES.values())} | (DROPS if dtype == "float32" else {})
    source = {name: row(4, 4).astype(dtype) for name in functions}
    want = jax.jit(lambda values: {name: function(values) for name, function in functions.items()})(values)
    transform = {name: _composed(cast, function) for name, function in functions.items()}
    target = {name: np.zeros(its.shape, dtype) for name, its in want.items()}
    got = _moved(source, target, transform, dict.fromkeys(functions, values))
    for name, its in want.items():
        np.testing.assert_array_equal(got[name], its, name)


_MOMENTUM = optim.trainable(optax.sgd(0.1, momentum=0.9))
_AFFINE, _GROWS, _NEITHER = "moments can follow", "", "averages can follow sums"
FOLLOWED = {
    "scaling": (_AFFINE, lambda x: 2 * x),
    "padding with its edge": (_AFFINE, lambda x: jnp.pad(x, 1, mode="edge")),
    "whole sum": (_AFFINE, lambda x: jnp.zeros(3).at[jnp.array([0, 0, 1])].add(x)),
    "a change among moves": (_AFFINE, lambda x: (-x[::-1])[np.array([1, 2, 0])].reshape(3, 1).T.ravel()),
    "moves that cancel": (_AFFINE, lambda x: x + x[::-1] - x),
    # A vocabulary with new tokens: averages have the constants, and moments begin as those of the fresh state.
    "concatenated": (_GROWS, lambda x: jnp.concatenate([x, jnp.full((2,), 7, x.dtype)])),
    "padded": (_GROWS, lambda x: jnp.pad(x, (0, 2), constant_values=1)),
    "put into zeros": (_GROWS, lambda x: jnp.zeros(5, x.dtype).at[:3].set(x)),
    "masked": (_GROWS, lambda x: jnp.where(np.arange(5) < 3, jnp.pad(x, (0, 2)), 7)),
    # Casts in between cost no digits, and what a mask drops begins, too.
    "rounded": (_GROWS, lambda x: x.astype(jnp.bfloat16)[::-1].astype(x.dtype)),
    "a mask": (_GROWS, lambda x: x * np.float32([1, 0, 1])),
    "zeros": (_GROWS, jnp.zeros_like),
    "clipped": (_NEITHER, lambda x: jnp.clip(x, -1e6, 1e6)),
    "a choice by values": (_NEITHER, lambda x: jnp.where(x > 1, x, x[::-1])),
    "places that depend on values": (_NEITHER, lambda x: x[jnp.argsort(x)]),
    "unit size": (_NEITHER, lambda x: x / jnp.max(jnp.abs(x))),
    "branch by values": (_NEITHER, lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: x[::-1])),
    "whole numbers": (_NEITHER, lambda x: x.astype(jnp.int32).astype(x.dtype)),
    "a callback": (_NEITHER, lambda x: jax.pure_callback(lambda x: np.asarray(x)[::-1], x, x)),
}


def _carried(plan, values, target):
    state, like = (jax.eval_shape(_MOMENTUM.init, each) for each in (values, target))
    moment = np.asarray(values["w"]) / 3
    filled = lambda x, value: np.asarray(np.broadcast_to(value, x.shape), x.dtype)
    is_float = lambda x: jnp.issubdtype(x.dtype, jnp.floating)
    state = jax.tree.map(lambda x: filled(x, moment if x.shape == moment.shape else 0), state)
    return plan.state(state, jax.tree.map(lambda x: filled(x, -5 if is_float(x) else 0), like)).runs[0][0].trace["w"]


@pytest.mark.parametrize("name", FOLLOWED)
def test_averages_follow_what_is_affine_and_moments_what_moves(name):
    said, function = FOLLOWED[name]
    values = {"w": np.float32([-0.5, 3.25, 1.0])}
    target = jax.device_put({"w": np.zeros(jax.eval_shape(function, values["w"]).shape, np.float32)})
    plan, like = saving.plan(values, target, transform={"w": function}), tp.Ema(target, 0.9)
    averages = [lambda its: plan.average(its)["w"], lambda its: plan.average(_shadows(its), like).shadow["w"]]
    followed = [] if said is _NEITHER else averages
    all_at_once = lambda its: [plan(its)["w"], *(average(its) for average in followed), function(its["w"])]
    made, *found, want = jax.jit(all_at_once)(jax.device_put(values))
    np.testing.assert_array_equal(made, want)
    for average in found:
        np.testing.assert_allclose(average, want, rtol=1e-6)
    for average in averages[len(followed) :]:
        refused(rf"{said}, .* from \['w'\] to \['w'\], is not affine", average, values)
    if said:
        refused(r"moments can follow .* from \['w'\] to \['w'\], changes or rep", _carried, plan, values, target)
        return
    moment = values["w"] / 3
    begin = {"rounded": moment[::-1], "a mask": [moment[0], -5, moment[2]], "zeros": [-5] * 3}
    np.testing.assert_array_equal(_carried(plan, values, target), begin.get(name, [*moment, -5, -5]))


def test_more_elements_than_memory_holds():
    sizes = ((2**16, 2**15 + 1), (2, 2**30 + 1), (2**30 + 1, 2))
    many, wide, narrow = ({"w": jax.ShapeDtypeStruct(shape, np.float32)} for shape in sizes)
    turned = jax.jit(lambda x: jnp.stack(jnp.split(x, 2), -1)[0])
    for source, target, function, words in (
        (many, many, lambda x: jnp.roll(x, 1), r"\['w'\] to .* is of 2,147,549,184 elements, and .*each array.*fresh"),
        (wide, narrow, turned, "the state has no values at"),
    ):
        plan = saving.plan(source, target, transform={"w": function})
        state, like = (jax.eval_shape(_MOMENTUM.init, each) for each in (source, target))
        refused(words, plan.state, dataclasses.replace(state, counts=(np.array(0, np.int32),)), like)


@pytest.mark.parametrize("shape", [(), (0, 3), (300, 256)])
def test_sizes_of_one_to_three_digits(shape):
    values = np.random.default_rng(0).normal(size=shape).astype("f")
    source, flat = ({"w": jnp.zeros(each, jnp.bfloat16)} for each in (shape, (values.size,)))
    got = _moved(source, flat, {"w": lambda x: x.T.ravel()[::-1]}, {"w": values})
    np.testing.assert_array_equal(got["w"], values.T.ravel()[::-1])
    # The second is right on all digits, each of which is that of the row or that of the column.
    changes = [lambda x: x.at[-1].set(jnp.abs(x[-1])), lambda x: x[:1] + x[:, :1] - x[:1, :1]]
    for change in changes if values.size > 1 else ():
        plan = saving.plan(source, source, transform={"w": change})
        refused("changes or repeats them", _carried, plan, source, source)


def test_no_place_may_depend_on_arrays_that_are_no_parameters():
    old, names = {"w": row(3, 2), "n": row(3, dtype=np.int32), "on": np.array([True, False])}, ("w", "n", "on")
    new = {"w": ramp(2, 3), "n": jnp.arange(3), "on": jnp.array([False, True])}
    for place in (lambda w, n, on: w[n].T, lambda w, n, on: jnp.where(on, w, w[::-1]).T):
        moved = {names: lambda w, n, on, place=place: (place(w, n, on), n, on)}
        refused("is not affine", saving.plan(old, new, rename={names: names}, transform=moved).average, old)


def test_sums_complex_numbers_and_integers():
    pair, both = {"a": row(3), "b": row(3)}, {("a", "b"): "c"}
    plan = saving.plan(pair, {"c": ramp(3)}, rename=both, transform={("a", "b"): jnp.add})
    np.testing.assert_array_equal(plan.average(_shadows(pair), tp.Ema({"c": ramp(3)}, 0.9)).shadow["c"], 2 * row(3))
    values = {"z": np.complex64([1 + 2j, 3])}
    plan = saving.plan(values, values, transform={"z": lambda z: jax.lax.complex(z.imag, z.real)})
    refused("is not affine", plan.average, values)
    for function in (jnp.conj, lambda z: z * 1j):
        got = saving.plan(values, values, transform={"z": function}).average(values)
        np.testing.assert_array_equal(got["z"], function(values["z"]))
    ints = {"n": row(3, dtype=np.int32), "w": row(2)}  # integers are no parameters, and no average is taken of them
    plan = saving.plan(ints, ints, transform={"n": lambda n: 2 * n, "w": lambda w: w[::-1]})
    assert_same(plan.average(tp.ema(ints, ints, decay=0.5)), {"n": row(3, dtype=np.int32) * 2, "w": row(2)[::-1]})


LOW, GAIN, PAIR = ramp(4, dtype=jnp.bfloat16), ramp(3), [ramp(2), ramp(2) + 1, ramp(3)]
OLD = {"low": LOW, "pair": PAIR, "scale": GAIN, "steps": jnp.array(7), "keys": [jax.random.key(1), jax.random.key(2)]}
NEW = {"one": LOW[:2], "three": ramp(2, 2), "two": LOW[2:], "steps": jnp.array(0), "gain": GAIN}
NEW |= {"keys": jax.random.split(jax.random.key(0)), "new": ramp(1), "frozen": ramp(3)}
RENAME = {"low": ("one", "two"), "pair.2": "frozen", "pair.*": "three", "scale": "gain", "keys.*": "keys"}


def test_an_average_goes_along(path):
    ema = tp.Ema(OLD, 0.5, debias=True, trainable=tp.layout(OLD, freeze="scale"))
    fresh = lambda decay: tp.Ema(NEW, decay, debias=True, trainable=tp.layout(NEW, freeze="frozen"))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    for factor in (2, 3):
        times = lambda x, by=factor: x if is_key(x) else np.asarray(np.asarray(x) * by, x.dtype)
        ema = ema.update(jax.tree.map(times, OLD))
    saving.save(path, {"model": OLD, "average": ema})
    plan = saving.plan(OLD, NEW, rename=RENAME, transform={"low": lambda low: (low[:2], low[2:])}, strict=False)
    assert (plan.missing, plan.unused, plan.disagrees) == (("new",), (), ())
    like = fresh(0.9)
    made = plan.average(ema, like)
    assert jax.tree.structure(made) == jax.tree.structure(like)
    assert not tp.diff(made, plan.average(saving.names(path, "average"), like))
    assert (int(made.count), float(made.weight), made.decay) == (2, 0.75, 0.9)
    shadow, before, average, rest = made.shadow, ema.shadow, ema.average, made.average
    np.testing.assert_array_equal(np.concatenate([shadow["one"], shadow["two"]]), before["low"])  # float32, as it was
    np.testing.assert_array_equal(shadow["three"], np.stack(before["pair"][:2]))
    others = [shadow["gain"], shadow["new"], rest["frozen"]]
    assert_same(others, [average["scale"], NEW["new"], before["pair"][2]], identity=False)
    assert_same(jax.random.key_data(rest["keys"]), jnp.stack([jax.random.key_data(key) for key in average["keys"]]))
    assert int(rest["steps"]) == 21
    # Updated and moved is the same as moved and updated.
    after, later = plan.average(ema.update(OLD), fresh(0.5)), plan.average(ema, fresh(0.5)).update(plan(OLD))
    for name in ("one", "two", "three"):
        np.testing.assert_array_equal(after.shadow[name], later.shadow[name])
    assert_same((after.count, after.weight), (later.count, later.weight))


def test_ties_and_bare_arrays():
    shared = ramp(2, 2)
    tied, apart = {"embed": shared, "head": shared}, {"a": ramp(2, 2), "b": ramp(2, 2)}
    ema = tp.Ema(tied, 0.5).update({"embed": shared + 1, "head": shared + 1})
    plan = saving.plan(tp.layout(tied), apart, rename={"embed": "a", "head": "b"})
    shadow = plan.average(ema, tp.Ema(apart, 0.5)).shadow
    assert_same(shadow, dict.fromkeys("ab", ema.shadow["embed"]), identity=False)
    assert len(set(map(id, jax.tree.leaves(shadow)))) == 2  # so it can be donated
    bare = saving.plan(ramp(2), {"w": ramp(2)}, rename={"": "w"})
    assert_same(bare.average(tp.Ema(ramp(2) + 3, 0.5), tp.Ema({"w": ramp(2)}, 0.5)).shadow, {"w": ramp(2) + 3})
    frozen = tp.Ema(tied, 0.5, trainable=tp.layout(tied, freeze="**"))
    assert_same(plan.average(frozen, tp.Ema(apart, 0.5)).shadow, {"a": shared, "b": shared}, identity=False)


def test_an_average_of_a_larger_model_is_refused_as_its_state_is(path):
    small = {"layers": [ramp(2) for _ in range(12)]}
    large = {"layers": [ramp(2) + i for i in range(16)]}
    tx, ema = _MOMENTUM, tp.Ema(large, 0.5)
    saving.save(path, {"average": ema, "state": tx.init(large)})
    cases = [(saving.Plan.__call__, large), (saving.Plan.average, large)]
    cases += [(saving.Plan.state, each, tx.init(small)) for each in (tx.init(large), saving.names(path, "state"))]
    cases += [(saving.Plan.average, each, tp.Ema(small, 0.5)) for each in (ema, saving.names(path, "average"))]
    for call, source, *like in cases:
        refused(r"does not know 'layers\.12', .*, which would be lost", call, saving.plan(small, small), source, *like)
        assert call(saving.plan(small, small, strict=False), source, *like) is not None


@pytest.mark.usefixtures("without_type_checks")
def test_errors_of_averages():
    model, ema = {"w": ramp(2)}, tp.Ema({"w": ramp(2)}, 0.5)
    for source, like, kind, words in [
        (ema, model, TypeError, r"expected a fresh average of the new model, like=tp.Ema\(.*\), got dict"),
        (model, ema, ValueError, r"expected a tp\.Ema, or the names of one, .*; got names such as w"),
        (tp.Ema({"v": ramp(2)}, 0.5), ema, ValueError, r"expected .* at 'w', .*, got nothing; nearest: 'v'"),
        (ema, None, TypeError, r"the source is a tp.Ema, so pass a fresh one .*: like=tp.Ema\("),
        (ema, tp.Ema(model | {"n": ramp(2)}, 0.5), ValueError, r"has float32\[2\] at 'n', but .*like=tp\.Ema"),
    ]:
        refused(words, saving.plan(model, model).average, source, like, kind=kind)
