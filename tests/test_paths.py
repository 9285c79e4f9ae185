"""Paths are unique, parse back to the keys they were written from, and select what they name."""

import concurrent.futures
import fnmatch
import json
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import flax.nnx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import optax
import pytest
from hypothesis import given, settings, strategies as st

import treeparams as tp
from treeparams._paths import join_path, nearest, quote, selects, sibling_entries, split_path, unquote

# Few characters, so that what needs care is met often; and any text.
texts = st.text(alphabet="ab1.*?[]!\"'\\#\n é", max_size=6) | st.text(max_size=8)
keys = texts | st.integers(-3, 12) | st.booleans() | st.floats(allow_nan=False, width=16)
mixed_keys = keys | st.sampled_from([1, "1", True, "True", 1.5, "1.5", "1.5#2", "", "-1", -1, "1#2"])


class Point(NamedTuple):
    x: Any
    y: Any


class Pair(eqx.Module):
    left: Any
    right: Any


@jtu.register_pytree_node_class
class Nameless:
    def __init__(self, *children: Any) -> None:
        self.children = children

    def tree_flatten(self) -> tuple[Any, None]:
        return self.children, None

    @classmethod
    def tree_unflatten(cls, _: None, children: Any) -> "Nameless":
        return cls(*children)


def floats(count: int) -> list[jax.Array]:
    return [jnp.full(2, float(i)) for i in range(count)]


def ordered(*keys: Any) -> OrderedDict[Any, jax.Array]:
    return OrderedDict(zip(keys, floats(len(keys)), strict=True))


# -- Text and back


@given(texts)
def test_an_entry_reads_back(text: str):
    entry = quote(text)
    assert unquote(entry) == text
    assert split_path(entry) == (entry,)


@given(texts)
def test_an_entry_is_quoted_exactly_where_the_contract_says(text: str):
    quoted = text == "" or text.startswith("!") or any(character in text for character in ".*?[]\"'")
    assert quote(text) == (json.dumps(text, ensure_ascii=False) if quoted else text)


@given(st.lists(texts))
def test_a_path_splits_into_its_entries(keys: list[str]):
    entries = tuple(map(quote, keys))
    assert split_path(join_path(entries)) == entries


@given(st.lists(texts, min_size=1, max_size=4))
def test_a_path_parses_back_to_the_keys_of_the_model(keys: list[str]):
    model: Any = jnp.ones(2)
    for key in reversed(keys):
        model = {key: model}
    (path,) = tp.layout(model).paths
    assert [unquote(entry) for entry in split_path(path)] == keys


@pytest.mark.parametrize("path", ['"a', '"a.b', 'x."a', '"a"b', '"a""b".c', 'layers."a"b.0'])
def test_text_that_is_no_path_says_so(path: str):
    with pytest.raises(ValueError, match=r"the path .* cannot be read at"):
        split_path(path)


# -- Unique


@given(st.lists(mixed_keys, unique=True, max_size=6))
def test_siblings_never_share_an_entry(keys: list[Any]):
    entries = sibling_entries([jtu.DictKey(key) for key in keys])
    assert len(set(entries)) == len(keys)
    assert all(split_path(entry) == (entry,) for entry in entries)


@settings(deadline=None)
@given(st.lists(mixed_keys, unique=True, min_size=1, max_size=5))
def test_every_path_taken_as_a_glob_selects_its_own_leaf_alone(keys: list[Any]):
    model = ordered(*keys)
    for path in tp.layout(model).paths:
        assert tp.layout(model, path).paths == (path,)
        assert tp.layout(model)[path].path == path


@pytest.mark.parametrize(
    ("keys", "paths"),
    [
        ((1, "1"), ("1", '"1"')),
        (("1", 1), ('"1"', "1")),
        ((1.5, "1.5"), ('"1.5"', '"1.5#2"')),
        (("a.b", "a", ""), ('"a.b"', "a", '""')),
        (("a b", "a/b", "ü"), ("a b", "a/b", "ü")),
    ],
)
def test_paths_of_keys(keys: tuple[Any, ...], paths: tuple[str, ...]):
    assert tp.layout(ordered(*keys)).paths == paths


@pytest.mark.parametrize(("frozen", "left"), [("1", '"1"'), ('"1"', "1")])
def test_of_two_keys_that_read_alike_each_can_be_frozen_alone(frozen: str, left: str):
    assert tp.layout(ordered(1, "1"), freeze=frozen).paths == (left,)


@pytest.mark.parametrize("where", ["True", '"True"'])
def test_quotes_tell_a_text_from_what_reads_alike(where: str):
    assert tp.layout(ordered(True, "True"), where).paths == (where,)


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode(), (), {}])
def test_a_path_does_not_depend_on_which_siblings_hold_a_leaf(nothing: Any):
    # Canonical and masked trees hold nothing in the place of what is frozen; by path they must still find their leaves.
    model, there = ordered(1, "1"), jnp.full(2, 7.0)
    other = OrderedDict([(1, nothing), ("1", there)])
    walked = {path: other for path, _, other in tp.biwalk(model, other)}
    assert walked["1"] is None
    assert walked['"1"'] is there


# -- One entry per key, whatever the node


@pytest.mark.parametrize(
    ("build", "paths"),
    [
        (lambda a, b: [a, (b,)], ("0", "1.0")),
        (lambda a, b: {"b": a, "a": {"c": b}}, ("a.c", "b")),
        (lambda a, b: OrderedDict(b=a, a=b), ("b", "a")),
        (lambda a, b: defaultdict(list, b=a, a=b), ("a", "b")),
        (lambda a, b: Point(a, [b]), ("x", "y.0")),
        (lambda a, b: Pair({"k": a}, b), ("left.k", "right")),
        (lambda a, b: Nameless(a, Nameless(None, b)), ("0", "1.1")),
        (lambda a, b: {"mlp/~/linear_0": {"w": a, "b": b}}, ("mlp/~/linear_0.b", "mlp/~/linear_0.w")),
        (lambda a, b: {0: a, 1: b}, ("0", "1")),
        (lambda a, b: [None, a, (), {}, b], ("1", "4")),
        (lambda a, b: Pair(flax.nnx.Param(a), [flax.nnx.Param(b)]), ("left", "right.0")),
    ],
)
def test_paths_of_nodes(build: Any, paths: tuple[str, ...]):
    assert tp.layout(build(*floats(2))).paths == paths


def test_the_root_is_the_empty_path():
    layout = tp.layout(jnp.ones(2))
    assert layout.paths == ("",)
    assert layout[""].size == 2
    assert tp.layout({"": jnp.ones(2)}).paths == ('""',)


# -- Globs


def by_recursion(pattern: tuple[str, ...], entries: tuple[str, ...]) -> bool:
    """What a glob means, straight from its definition: an oracle for `selects`."""
    if not pattern:
        return True  # all is matched: the leaf, or a node above it
    if pattern[0] == "**":
        return any(by_recursion(pattern[1:], entries[at:]) for at in range(len(entries) + 1))
    return bool(entries) and fnmatch.fnmatchcase(entries[0], pattern[0]) and by_recursion(pattern[1:], entries[1:])


@given(
    st.lists(st.sampled_from(["**", "*", "a", "b", "ab", "a*", "?", "[ab]", "[!a]", "*b"]), max_size=5).map(tuple),
    st.lists(st.sampled_from(["a", "b", "ab", "c", "abc"]), max_size=5).map(tuple),
)
def test_globs_are_matched_entry_by_entry(pattern: tuple[str, ...], entries: tuple[str, ...]):
    assert selects(pattern, entries) == by_recursion(pattern, entries)


@pytest.mark.parametrize(
    ("glob", "selected"),
    [
        ("*", ("a.0.w", "a.0.b", "a.1.w", '"a.b".w', '"*".w', "w")),
        ("**", ("a.0.w", "a.0.b", "a.1.w", '"a.b".w', '"*".w', "w")),
        ("a", ("a.0.w", "a.0.b", "a.1.w")),
        ("a.0", ("a.0.w", "a.0.b")),
        ("a.*.w", ("a.0.w", "a.1.w")),
        ("**.w", ("a.0.w", "a.1.w", '"a.b".w', '"*".w', "w")),
        ("*.w", ('"a.b".w', '"*".w')),
        ("a.**.b", ("a.0.b",)),
        ("a.[1-9].?", ("a.1.w",)),
        ("a.[!1]", ("a.0.w", "a.0.b")),
        ('"a.b"', ('"a.b".w',)),
        ('"a.b".*', ('"a.b".w',)),
        ("a?b", ('"a.b".w',)),
        ("a[.]b", ('"a.b".w',)),
        ('"*"', ('"*".w',)),
        ('"a".0', ("a.0.w", "a.0.b")),
        ("[*].w", ('"*".w',)),
    ],
)
def test_what_a_glob_selects(glob: str, selected: tuple[str, ...]):
    w = floats(6)
    model = OrderedDict([("a", [OrderedDict(w=w[0], b=w[1]), {"w": w[2]}]), ("a.b", {"w": w[3]}), ("*", {"w": w[4]})])
    model["w"] = w[5]
    assert tp.layout(model, glob).paths == selected


@pytest.mark.parametrize("glob", ["a.w", "A", "a*w", "*.*.*.*", "a.2", '"a.0"', '"a.*"', "b", "w.**.x"])
def test_a_glob_does_not_run_over_dots_nor_ignore_case(glob: str):
    model = {"a": [{"w": jnp.ones(2)}], "w": jnp.ones(1)}
    with pytest.raises(ValueError, match=r"selects nothing; nearest: '"):
        tp.layout(model, glob)


def test_nearest_names_the_most_like_first_and_nothing_of_nothing():
    assert nearest("head.wieght", ["body.bias", "head.weight"], count=1) == "; nearest: 'head.weight'"
    assert nearest("head", []) == ""


# -- Cycles


class Link(eqx.Module):
    next: Any
    weight: Any = 1.0


def _cycles() -> dict[str, tuple[Any, str]]:
    nested = {"a": [jnp.ones(2)]}
    nested["a"].append({"deep": nested["a"]})
    module = Link([])
    module.next.append(module)
    both: dict[str, Any] = {}
    both |= {"a": both, "b": both}
    inner: dict[str, Any] = {}
    through = Link({"x": inner})
    inner["back"] = through
    return {
        "list in a dictionary": (nested, "a.1.deep"),
        "module": (module, "next.0"),
        "two keys": (both, "a"),
        "module in a dictionary": (through, "next.x.back"),
    }


def _in_a_thread(f: Callable[[], None]) -> None:
    """Runs tests in which JAX runs out of stack: levels that jaxlib loses belong to a thread."""
    limit = sys.getrecursionlimit()
    try:
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            pool.submit(f).result()
    finally:
        sys.setrecursionlimit(limit)


@pytest.mark.parametrize("use", ["layout", "tie", "untie", "partition", "ravel", "copy", "global_norm"])
@pytest.mark.parametrize("name", ["list in a dictionary", "module", "two keys", "module in a dictionary"])
def test_a_cyclic_model_is_a_clear_error_and_nothing_is_broken_by_it(name: str, use: str):
    model, path = _cycles()[name]

    def run() -> None:
        for _ in range(3):
            with pytest.raises(ValueError, match=f"model is cyclic: the node at '{path}' is one of the nodes above it"):
                getattr(tp, use)(model)
        deep: Any = jnp.ones(2)
        for _ in range(200):
            deep = [deep]
        assert tp.layout(deep).size == 2  # there are levels left

    _in_a_thread(run)
