"""saving.plan: what goes where from arrays by name into a model, said before anything is loaded."""

import fnmatch
import functools
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import saving

from ..zoo import assert_same, ramp


def row(*shape, dtype=np.float32, start=0):
    """Distinct values, in NumPy."""
    return np.arange(start, start + np.prod(shape, dtype=int)).reshape(shape).astype(dtype)


def shapes(tree):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), tree)


def renamed(names, rename, **options):
    """`{new name: old names}`, found by values."""
    arrays = {name: np.float32([i]) for i, name in enumerate(names)}
    return {new: names[int(its[0])] for new, its in saving.names(arrays, rename=rename, **options).items()}


# -- Names to names ----------------------------------------------------------------------------------------------------

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
        assert renamed(list(want), rename) == {new: old for old, new in want.items() if new is not None}


def test_quotes_of_a_path_are_not_in_its_way():
    """What a glob selects in a layout, it takes in a rename; keys with dots are one entry each."""
    model = {"a.b": {"w": row(2)}, "c": {"w": row(1)}}
    assert list(saving.names(model, rename={"*.w": "*.v"})) == ['"a.b".v', "c.v"]
    flat = {"a.b.w": row(2), "c": row(1)}
    inside = saving.plan(tp.layout(flat), {"x": flat}, rename={"*": "x.*"})
    assert [each.names for each in inside.rows] == [('"a.b.w"',), ("c",)]
    assert_same(inside({'"a.b.w"': row(2), "c": row(1)}), {"x": jax.tree.map(jnp.asarray, flat)})
    back = saving.plan({"x": flat}, flat, rename={"x.*": "*"})
    assert_same(back({"x": flat}), jax.tree.map(jnp.asarray, flat))
    # Keys of a flat dictionary of arrays are names, as of a file, and end at their dots; and so they may as a model.
    assert list(saving.names(flat, rename={"a.*.w": "*.v"})) == ["c", "b.v"]
    nested = saving.plan({"m": {"a": {"b": {"w": row(2)}}}, "c": row(1)}, flat, rename={"m.**": "**"})
    assert [each.names for each in nested.rows] == [("m.a.b.w",), ("c",)]


_ENTRIES = st.text("ab0", min_size=1, max_size=2)
_PATTERNS = st.sampled_from(["a", "b", "0", "ab", "*", "*", "a*", "*b", "*a*", "?", "?*", "[ab]", "[!a]*", "**", "**"])


@hypothesis.given(st.lists(_ENTRIES, min_size=1, max_size=5), st.lists(_PATTERNS, min_size=1, max_size=5))
@hypothesis.settings(deadline=None, max_examples=80, derandomize=True)
def test_stars_stand_for_texts_that_put_in_their_place_give_the_name(entries, pattern):
    stars = [star for entry in pattern for star in (["**"] if entry == "**" else ["*"] * entry.count("*"))]
    rename = {".".join(pattern): ".".join(["x", *(part for star in stars for part in ("-", star))])}
    parts = ["([^.]+[.])*" if each == "**" else fnmatch_of(each) for each in pattern]
    if not re.fullmatch("".join(parts), "".join(f"{entry}." for entry in entries)):
        with pytest.raises(ValueError, match="matches no name"):
            renamed([".".join(entries)], rename)
        return
    (new,) = renamed([".".join(entries)], rename)
    texts = [each.strip(".") for each in new.split("-")[1:]]
    filled = [each for entry in pattern for each in put_in(entry, texts)]
    assert list(map(fnmatch.fnmatchcase, entries, filled)) == [True] * len(filled) == [True] * len(entries)


def fnmatch_of(entry):
    return "".join({"*": "[^.]*", "?": "[^.]"}.get(each, each) for each in entry).replace("[!", "[^.") + "[.]"


def put_in(entry, texts):
    """The entry of a pattern with the next texts in place of its stars; those of `**` are entries."""
    if entry == "**":
        return [each for each in texts.pop(0).split(".") if each]
    return [re.sub("[*]", lambda _: texts.pop(0).replace('""', ""), entry)]


def test_stacks_are_in_numeric_order():
    names = [f"h.{head}.layers.{n}.w" for head in "ba" for n in (10, 9, 0, 1)]
    arrays = {name: np.array(i) for i, name in enumerate(names)}
    stacked = saving.names(arrays, rename={"h.*.layers.*.w": "*.w"})
    assert {name: its.tolist() for name, its in stacked.items()} == {"b.w": [2, 3, 1, 0], "a.w": [6, 7, 5, 4]}
    layers = lambda: {n: {"w": np.array(0)} for n in (0, 1, 9, 10)}
    model = {"h": {head: {"layers": layers()} for head in "ab"}}
    unstack = saving.plan(stacked, model, rename={"*.w": "h.*.layers.*.w"})
    assert {name: its.tolist() for name, its in saving.names(unstack(stacked)).items()} == arrays
    rows = saving.names({"w": row(3)}, rename={"w": "l.*.w"})  # without a model all that there are
    assert {name: float(its) for name, its in rows.items()} == {"l.0.w": 0, "l.1.w": 1, "l.2.w": 2}


def test_which_star_stacks():
    """That of the numbers, of several the last one; which rows there are, the paths of the model say."""
    ours = {"net": [{"w": row(2), "b": {"c": row(3)}}, {}, {"w": row(2) + 5, "b": {"c": row(3) + 5}}]}
    stack = saving.names(ours, rename={"net.*.**": "net.**"})
    assert {name: its[:, 0].tolist() for name, its in stack.items()} == {"net.w": [0, 5], "net.b.c": [0, 5]}
    unstack = saving.plan(stack, ours, rename={"net.**": "net.*.**"})
    assert_same(unstack(stack), ours)
    heads = {f"l.{n}.h.{m}.w": np.array(10 * n + m) for n in (0, 1) for m in (0, 1)}
    assert saving.names(heads, rename={"l.*.h.*.w": "l.*.w"})["l.1.w"].tolist() == [10, 11]
    by_word = saving.names({"h.0.mlp.up": row(2), "h.1.mlp.up": row(2)}, rename={"h.*.mlp.*": "layers.mlp.*"})
    assert {name: its.shape for name, its in by_word.items()} == {"layers.mlp.up": (2, 2)}


def test_layers_are_split_and_merged_each_by_itself():
    sizes = [("w", (6, 2)), ("b", (6,))]
    theirs = {f"layers.{n}.qkv.{what}": row(*size, start=100 * n) for n in range(3) for what, size in sizes}
    ours = {"blocks": [{name: {"w": ramp(2, 2), "b": ramp(2)} for name in "qkv"} for _ in range(3)]}
    left = "layers.*.qkv.*"
    rights = tuple(f"blocks.*.{name}.*" for name in "qkv")
    split = saving.plan(theirs, ours, rename={left: rights}, transform={left: lambda whole: jnp.split(whole, 3)})
    made = split(theirs)
    for n, block in enumerate(made["blocks"]):
        for i, name in enumerate("qkv"):
            np.testing.assert_array_equal(block[name]["w"], theirs[f"layers.{n}.qkv.w"][2 * i : 2 * i + 2])
            np.testing.assert_array_equal(block[name]["b"], theirs[f"layers.{n}.qkv.b"][2 * i : 2 * i + 2])
    merge = {"rename": {rights: left}, "transform": {rights: lambda *parts: jnp.concatenate(parts)}}
    assert_same(saving.names(made, **merge), theirs)


def test_where_one_of_those_that_go_together_is_not_there():
    arrays = {"0.q": row(2), "0.k": row(2), "1.q": row(2)}
    merge = {"rename": {("*.q", "*.k"): "*.qk"}, "transform": {("*.q", "*.k"): lambda *both: jnp.concatenate(both)}}
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
        with pytest.raises(kind, match=re.escape(words)):
            saving.plan(_AB, _TO, rename=rename, transform=transform, strict=False)
    with pytest.raises(ValueError, match=r"which matches 'l\.0', but that goes with others; write the transform"):
        saving.plan({"l.0": row(2), "l.1": row(2)}, _TO, rename={"l.*": "x"}, transform={"l.?": jnp.sin})
    with pytest.raises(
        ValueError, match=r"'h.\*' matches no name; h.\*.\*\* matches the names below it, such as 'h.0.w'"
    ):
        saving.plan({"h.0.w": row(2)}, {"b": [{"w": ramp(2)}]}, rename={"h.*": "b.*"})
    with pytest.raises(ValueError, match=r"rename, '\*': it matches '1' and '01', which go to one place"):
        saving.plan({"1": ramp(2), "01": ramp(2)}, {"w": ramp(2, 2)}, rename={"*": "w"})
    for use in (saving.names, functools.partial(saving.plan, model={"x": [ramp(2)]}, strict=False)):
        with pytest.raises(ValueError, match=r"unstack of 'n' \(int32\[\]\) fails: TypeError: len\(\)"):
            use({"n": row(dtype=np.int32)}, rename={"n": "x.*"})
        with pytest.raises(ValueError, match=r"stack of 'l.0' \(float32\[1\]\), 'l.1' \(float32\[2\]\) fails"):
            use({"l.0": row(1), "l.1": row(2)}, rename={"l.*": "x.0"})


# -- The report --------------------------------------------------------------------------------------------------------


def test_report():
    model = {"low": ramp(3, dtype=jnp.bfloat16), "n": jnp.arange(2), "old": ramp(2), "turned": ramp(2, 3), "w": ramp(2)}
    model["key"] = jax.random.key(0)
    theirs = {"low": row(3), "n": row(2, dtype=np.int64), "turned": row(3, 2), "v": row(2, dtype=np.float64)}
    theirs |= {"news": row(1), "key": jax.random.PRNGKey(3)}
    with pytest.raises(ValueError, match="the source does not fit the model; strict=False loads the rest:\n") as error:
        saving.plan(theirs, model, rename={"v": "w"})
    plan = saving.plan(theirs, model, rename={"v": "w"}, strict=False)
    assert plan.missing == ("old",)
    assert plan.unused == ("news",)
    disagrees = (
        "'low' is bfloat16[3], but float32[3] comes from low; to cast it, write a transform, "
        "lambda array: array.astype('bfloat16')",
        "'turned' is float32[2,3], but float32[3,2] comes from turned; "
        "to transpose it, write transform={...: jnp.transpose}",
        "'key' is key<fry>[], but uint32[2] comes from key",
    )
    assert sorted(plan.disagrees) == sorted(disagrees)
    for line in ("'old' is missing: nothing comes to it; nearest: 'news'", "'news' is unused: ", *disagrees):
        assert line in str(error.value)
        assert line in str(plan)
    assert repr(plan) == "Plan(6 arrays, 1 missing, 1 unused, 3 disagree)"
    rows = {each.path: each for each in plan.rows}
    assert list(rows) == sorted(model)
    assert rows["w"] == ("w", ("v",), "", (2,), np.float32)  # float64 is float32 in JAX here
    assert rows["n"] == ("n", ("n",), "", (2,), np.int32)
    assert rows["old"] == ("old", (), "", (2,), np.float32)
    assert rows["low"][1:4] == ((), "", (3,))
    lines = str(plan).splitlines()
    assert lines[0].split() == ["path", "from", "how", "is"]
    cells = {line.split()[0]: line.split()[1:] for line in lines[1:7]}
    assert (cells["old"], cells["low"]) == (["-", "missing", "float32[2]"], ["-", "disagrees", "bfloat16[3]"])
    assert cells["w"] == ["v", "float32[2]"]
    assert "2 of 6 arrays come from the source" in lines
    made = plan(theirs)
    assert_same(made, model | {"n": jnp.arange(2), "w": jnp.arange(2.0)})
    assert made["old"] is model["old"]


def test_arrays_without_values_need_something():
    model = shapes({"a": ramp(2), "b": ramp(2), "c": ramp(3)})
    plan = saving.plan({"a": row(2), "c": row(2)}, model, strict=False)
    with pytest.raises(
        ValueError, match="nothing comes to b, c, and the model has no value there either; pass a model"
    ):
        plan({"a": row(2), "c": row(2)})
    full = saving.plan({"a": row(2), "b": row(2), "c": row(3)}, model)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(full({"a": row(2), "b": row(2), "c": row(3)})))


def test_a_function_that_gives_another_number_of_arrays():
    two = {"rename": {"a": ("x", "y")}, "transform": {"a": lambda a: [a, a, a]}}
    plan = saving.plan({"a": row(2)}, _TO, strict=False, **two)
    assert re.fullmatch(r"a: lambda at test_plan.py:\d+ gives 3 arrays, but the paths are x, y", *plan.disagrees)
    with pytest.raises(ValueError, match="'z'"):  # a part of a split that goes nowhere
        saving.plan({"a": row(4)}, {"x": ramp(2)}, rename={"a": ("x", "z")}, transform={"a": lambda a: jnp.split(a, 2)})
    unstack = saving.plan({"a": row(3, 2)}, {"l": [ramp(2), ramp(2)]}, rename={"a": "l.*"}, strict=False)
    assert unstack.disagrees == ("a: unstack gives 3 arrays, but the paths are l.0, l.1",)


def test_how_is_the_name_of_what_is_done():
    functions = {"a": jnp.sin, "b": functools.partial(jnp.multiply, 2.0)}
    plan = saving.plan(_AB, {"a": ramp(2), "b": ramp(2)}, transform=functions)
    assert [each.how for each in plan.rows] == ["sin", "multiply"]
    np.testing.assert_allclose(plan(_AB)["b"], [0, 2])
    by_pattern = saving.plan(_AB, _AB, transform={"b": jnp.cos, "*": jnp.sin})  # the first one
    assert [each.how for each in by_pattern.rows] == ["sin", "cos"]
    renamed_too = saving.plan(
        {"t.w": row(3, 2)}, {"w": ramp(2, 3)}, rename={"t.*": "*"}, transform={"t.w": jnp.transpose}
    )
    np.testing.assert_array_equal(renamed_too({"t.w": row(3, 2)})["w"], row(3, 2).T)
    layers = {"l.1": row(2), "l.0": row(2) + 5}  # all of them, in order
    stacked = saving.plan(layers, {"l": ramp(2)}, rename={"l.*": "l"}, transform={"l.*": lambda a, b: a - b})
    assert stacked.rows[0][1] == ("l.0", "l.1")
    assert stacked.rows[0].how.startswith("lambda at test_plan.py")
    np.testing.assert_array_equal(stacked(layers)["l"], [5, 5])


def test_what_stays_as_it_is_is_named_under_none():
    model = {"a": ramp(2), "new": {"w": ramp(2), "b": ramp(1)}, "other": ramp(3)}
    source = {"a": np.ones(2, np.float32)}
    plan = saving.plan(source, model, rename={None: ["new.**", "other"]})
    assert (plan.missing, plan.unused, plan.disagrees) == ((), (), ())
    assert [line.split()[2] for line in str(plan).splitlines() if " - " in line] == ["stays"] * 3
    assert_same(plan(source), model | {"a": jnp.ones(2)})
    with pytest.raises(ValueError, match=r"'other' is missing"):
        saving.plan(source, model, rename={None: "new.**"})
    with pytest.raises(ValueError, match=r"rename, None: 'knew' matches no path; nearest: 'new.w'"):
        saving.plan(source, model, rename={None: "knew"})
    with pytest.raises(ValueError, match=r"rename, None: 'a' should stay as it is, but 'a' goes there"):
        saving.plan(source, model, rename={None: "**"})
