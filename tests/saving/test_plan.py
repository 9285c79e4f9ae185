"""saving.plan: what goes where from arrays by name into a model, said before anything is loaded."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import saving

from ..zoo import assert_same, ramp
from .files import planned, refused, row, shapes

RENAMES = [
    ({"a.*": "x.*", "**": "y.**"}, {"a.w": "x.w", "b": "y.b", "a.b.w": "y.a.b.w"}),  # the first that matches
    ({"a": "x"}, {"a": "x", "a.b": "a.b", "ab": "ab", "b.a": "b.a"}),  # others stay
    ({("a.*",): ("b.*",)}, {"a.x": "b.x"}),
    ({"*.layer.*.**": "net.*.**.*"}, {"a.layer.b.c": "net.a.b.c", "a.layer.0.b.c": "net.a.0.b.c"}),
    ({"layer_*.w*": "layers.*.weight*"}, {"layer_10.w": "layers.10.weight", "layer_1.w1": "layers.1.weight1"}),
    ({"**.w": "m.**.v"}, {"w": "m.v", "a.w": "m.a.v", "a.b.w": "m.a.b.v"}),  # stars for no entries
    ({"a.**": "**"}, {"a.b.c": "b.c", "a": ""}),
    ({"a?.w": "x.w"}, {"ab.w": "x.w", "a.w": "a.w", "abc.w": "abc.w"}),
    ({"[a-c]": "x", "[!a-c]": "y"}, {"b": "x", "d": "y", "bb": "bb"}),
    ({"w[0]": "x.[?]", "a[*]": "b", "?[?]": "c"}, {"w[0]": "x.[?]", "a*": "b", "d?": "c"}),  # of a name itself
    ({"a.*": "*"}, {"a.b\nc": "b\nc"}),
    ({"a+(b)|$": "x", "^.*": "y.*"}, {"a+(b)|$": "x", "^.z": "y.z", "aab": "aab"}),  # no regular expressions
    ({"**.b": "**.c"}, {"a..b": "a..c"}),
    ({"a.**.**": "x.**.**"}, {"a.b.c": "x.b.c", "a": "x"}),
    ({"": "w"}, {"": "w"}),
    ({"model.**": "**"}, {"model": "", "model.a": "a", "models": "models"}),
    (lambda name: None if name == "a" else name.upper(), {"a": None, "b.c": "B.C"}),
    (lambda name: re.sub("^(module|_orig_mod)[.]", "", name), {"a.w": "a.w", "module.b": "b", "_orig_mod.c": "c"}),
    ({"a.**": None, ("b", "c"): None}, {"a.x": None, "a": None, "b": None, "c": None, "d": "d"}),
    ({"a": None, ("b", "b*"): None, "**": "x.**"}, {"a": None, "b": None, "bc": None}),  # nothing left for the default
    # Entries with quotes, and parts of these; several entries in place of a part.
    (
        {"*.w": "*.v", "*.*": "x.*.y_*"},
        {'"a.b".w': '"a.b".v', '"*"."w[0]"': 'x."*"."y_w[0]"', 'a."1.5"': 'x.a."y_1.5"'},
    ),
    (
        {"layer*.w": "*.w", 'm."*".*': "n.*", "b?*": "*.b"},
        {'"layer1.5".w': '"1.5".w', '"layer".w': '"".w', 'm."*".w': "n.w", "m.a.w": "m.a.w", '"b.c"': "c.b"},
    ),
    ({"a.**": "b_*", "**.c": "d.*_"}, {'a."b.c".d': '"b_b.c".d', "x.y.c": "d.x.y_"}),
    (  # names of other programs
        {"net.**": "**", "*:0": "v.*", "w*": "v*"},
        {'net."x.y"z': '"\\"x"."y\\"z"', "net.a[0].b": "a[0].b", "a/b:0": "v.a/b", "w[1]": "v[1]", '"q': '"q'},
    ),
]


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


def test_stacks_are_in_numeric_order():
    names = [f"h.{head}.layers.{n}.w" for head in "ba" for n in (10, 9, 0, 1)]
    arrays = {name: np.array(i) for i, name in enumerate(names)}
    stacked = saving.names(arrays, rename={"h.*.layers.*.w": "*.w"})
    assert {name: its.tolist() for name, its in stacked.items()} == {"b.w": [2, 3, 1, 0], "a.w": [6, 7, 5, 4]}
    model = {"h": {head: {"layers": {n: {"w": np.array(0)} for n in (0, 1, 9, 10)}} for head in "ab"}}
    unstacked = saving.names(planned(stacked, model, rename={"*.w": "h.*.layers.*.w"}))
    assert {name: its.tolist() for name, its in unstacked.items()} == arrays
    rows = saving.names({"w": row(3)}, rename={"w": "l.*.w"})  # without a model all that there are
    assert {name: float(its) for name, its in rows.items()} == {"l.0.w": 0, "l.1.w": 1, "l.2.w": 2}


def test_which_star_stacks():
    ours = {"net": [{"w": row(2), "b": {"c": row(3)}}, {}, {"w": row(2) + 5, "b": {"c": row(3) + 5}}]}
    stack = saving.names(ours, rename={"net.*.**": "net.**"})
    assert {name: its[:, 0].tolist() for name, its in stack.items()} == {"net.w": [0, 5], "net.b.c": [0, 5]}
    assert_same(planned(stack, ours, rename={"net.**": "net.*.**"}), ours)
    heads = {f"l.{n}.h.{m}.w": np.array(10 * n + m) for n in (0, 1) for m in (0, 1)}
    assert saving.names(heads, rename={"l.*.h.*.w": "l.*.w"})["l.1.w"].tolist() == [10, 11]
    by_word = saving.names({"h.0.mlp.up": row(2), "h.1.mlp.up": row(2)}, rename={"h.*.mlp.*": "layers.mlp.*"})
    assert {name: its.shape for name, its in by_word.items()} == {"layers.mlp.up": (2, 2)}


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
    ({("a", "bb"): "x"}, None, ValueError, "rename: 'bb' matches no name; nearest: 'b'"),
    ({"[z-a]": "x"}, None, ValueError, "matches no name"),
    *(({left: None}, None, ValueError, "rename: 'c' matches no name") for left in ("c", ("a", "c"))),
    ({"*": "x.*", "b": "y"}, None, ValueError, "rename: 'b' comes too late: '*' took all that it matches"),
    ({"*": "x.*", "**": "y.**", "c": None}, None, ValueError, "'**' comes too late"),
    ({("?", "b"): "x"}, {("?", "b"): jnp.add}, ValueError, "rename: 'b' comes too late: ('?', 'b') took all"),
    *(({left: right}, None, ValueError, STARS) for left, right in {"*.*": "x", "a": "x.*.*", "**": "x"}.items()),
    *(({left: "x"}, None, ValueError, STARS) for left in (("a*", "b*"), ("a", "b.*"))),
    ({"*": "x"}, None, ValueError, "'*': none of its '*' matches numbers alone, so nothing can be stacked"),
    ({"?": "x"}, None, ValueError, "'?': it matches 'a' and 'b', which go to one place"),
    ({"a": "x", "b": "x"}, None, ValueError, "'a' and 'b' both go to 'x'; drop one with None"),
    ({("a", "b"): "x"}, None, ValueError, "('a', 'b'): it merges or splits arrays, so write how: transform="),
    ({"a": ("x", "y")}, None, ValueError, "'a': it merges or splits arrays, so write how: transform="),
    (None, {"c": jnp.sin}, ValueError, "transform: 'c' matches no name; nearest: 'a', 'b'"),
    (None, {("a", "b"): jnp.sin}, ValueError, "transform has ('a', 'b'), which is no left side"),
    ({("a", "b"): "x"}, {("a", "b"): jnp.add, "a": jnp.sin}, ValueError, "'a', but that goes with others"),
    ({"a": "x"}, {"a": lambda a: a @ jnp.ones((3, 3))}, ValueError, "of 'a' (float32[2]) fails: TypeError"),
    ({"a": "x"}, {"a": lambda a: {"a": a}}, ValueError, "of 'a' (float32[2]) fails: TypeError: it returned dict"),
    ({"a": "x"}, {"a": np.asarray}, ValueError, "of 'a' (float32[2]) fails: TracerArrayConversionError"),
    ({3: "x"}, None, TypeError, "a left side of rename must be a name, a glob or several of these, got 3"),
    ({("a", 1): "x"}, None, TypeError, "a left side of rename must be a name, a glob or several of these, got ('a'"),
    *(({"a": right}, None, TypeError, "a right side of rename must be a name, a glob or several") for right in (3, ())),
    (lambda name: 7, None, TypeError, "rename('a') must return a name, or None to drop it, got int"),
    (None, {"a": "transpose"}, TypeError, "transform['a'] must be a function of arrays, got str"),
    (None, [jnp.sin], TypeError, "transform must be a dictionary"),
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


REPORT = """\
path    from  how        is
b       -     disagrees  bfloat16[3]
key     -     disagrees  key<fry>[]
n       n                int32[2]
old     -     missing    float32[2]
turned  -     disagrees  float32[2,3]
w       v                float32[2]
2 of 6 arrays come from the source
"""
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
    assert str(plan) == REPORT + PROBLEMS
    assert repr(plan) == "Plan(6 arrays, 1 missing, 1 unused, 3 disagree)"
    rows = {each.path: each for each in plan.rows}
    assert rows["w"] == ("w", ("v",), "", (2,), np.float32)  # float64 is float32 in JAX here
    assert [rows[path][1:4] for path in ("old", "b")] == [((), "", (2,)), ((), "", (3,))]
    made = plan(theirs)
    assert_same(made, model | {"n": jnp.arange(2), "w": jnp.arange(2.0)})
    assert made["old"] is model["old"]


def test_arrays_without_values_need_something():
    model, some = shapes({"a": ramp(2), "b": ramp(2), "c": ramp(3)}), {"a": row(2), "c": row(2)}
    refused("comes to b, c, and the model has no value there either; pass a model", planned, some, model, strict=False)
    full = {"a": row(2), "b": row(2), "c": row(3)}
    assert all(isinstance(leaf, jax.Array) for leaf in saving.plan(full, model)(full).values())


def test_a_function_that_gives_another_number_of_arrays():
    two, thrice = {"a": ("x", "y")}, {"a": lambda a: [a, a, a]}
    plan = saving.plan({"a": row(2)}, _TO, rename=two, transform=thrice, strict=False)
    assert re.fullmatch(r"a: lambda at test_plan.py:\d+ gives 3 arrays, but the paths are x, y", *plan.disagrees)
    halves = {"rename": {"a": ("x", "z")}, "transform": {"a": lambda a: jnp.split(a, 2)}}
    refused("'z'", saving.plan, {"a": row(4)}, {"x": ramp(2)}, **halves)  # a part that goes nowhere
    unstack = saving.plan({"a": row(3, 2)}, {"l": [ramp(2), ramp(2)]}, rename={"a": "l.*"}, strict=False)
    assert unstack.disagrees == ("a: unstack gives 3 arrays, but the paths are l.0, l.1",)


def test_how_is_the_name_of_what_is_done():
    plan = saving.plan(_AB, _AB, transform={"a": jnp.sin, "b": functools.partial(jnp.multiply, 2.0)})
    assert [each.how for each in plan.rows] == ["sin", "multiply"]
    np.testing.assert_allclose(plan(_AB)["b"], [0, 2])
    by_pattern = saving.plan(_AB, _AB, transform={"b": jnp.cos, "*": jnp.sin})  # the first one
    assert [each.how for each in by_pattern.rows] == ["sin", "cos"]
    turned = {"rename": {"t.*": "*"}, "transform": {"t.w": jnp.transpose}}
    np.testing.assert_array_equal(planned({"t.w": row(3, 2)}, {"w": ramp(2, 3)}, **turned)["w"], row(3, 2).T)
    layers = {"l.1": row(2), "l.0": row(2) + 5}  # all of them, in order
    stacked = saving.plan(layers, {"l": ramp(2)}, rename={"l.*": "l"}, transform={"l.*": lambda a, b: a - b})
    assert stacked.rows[0][1] == ("l.0", "l.1")
    assert stacked.rows[0].how.startswith("lambda at test_plan.py")
    np.testing.assert_array_equal(stacked(layers)["l"], [5, 5])


def test_what_stays_as_it_is_is_named_under_none():
    model = {"a": ramp(2), "new": {"w": ramp(2), "b": ramp(1)}, "other": ramp(3)}
    source = {"a": np.ones(2, np.float32)}
    plan = saving.plan(source, model, rename={None: ["new.**", "other"]})
    assert plan.problems() == []
    assert [line.split()[2] for line in str(plan).splitlines() if " - " in line] == ["stays"] * 3
    assert_same(plan(source), model | {"a": jnp.ones(2)})
    for right, words in {
        "new.**": r"'other' is missing",
        "knew": r"rename, None: 'knew' matches no path; nearest: 'new.w'",
        "**": r"rename, None: 'a' should stay as it is, but 'a' goes there",
    }.items():
        refused(words, saving.plan, source, model, rename={None: right})
