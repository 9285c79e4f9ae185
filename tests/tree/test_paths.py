"""Paths are unique, parse back to the keys they were written from, and select what they name."""

import fnmatch
import itertools
import json
from collections import OrderedDict
from typing import Any

import jax.tree_util as jtu
import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import treeparams as tp

from ..zoo import Pair

# Few characters, so that what needs care is met often; and any text.
texts = st.text(alphabet="ab1.*?[]!\"'\\#\n é", max_size=6) | st.text(max_size=8)
keys = texts | st.integers(2, 12) | st.booleans() | st.sampled_from([0.5, -1.5])
few = settings(deadline=None, max_examples=30)


class Nameless:
    def __init__(self, *children: Any) -> None:
        self.children = children


jtu.register_pytree_node(Nameless, lambda node: (node.children, None), lambda _, children: Nameless(*children))


leaf = lambda: np.ones(2, np.float32)
ordered = lambda *keys: OrderedDict((key, leaf()) for key in keys)


def quoted(text: str) -> str:
    """An entry of a path, as the contract has it."""
    needs_it = text == "" or text.startswith("!") or any(character in text for character in ".*?[]\"'")
    return json.dumps(text, ensure_ascii=False) if needs_it else text


@few
@given(st.lists(texts, min_size=1, max_size=4))
def test_a_path_is_its_keys_quoted_where_the_contract_says_and_reads_back(keys: list[str]):
    model: Any = leaf()
    for key in reversed(keys):
        model = {key: model}
    path = ".".join(map(quoted, keys))
    assert tp.layout(model).paths == (path,)
    assert tp.layout(model)[path].path == path
    assert tp.layout([model, leaf()], "0." + path).paths == ("0." + path,)


@few
@given(st.lists(keys, unique_by=str, min_size=1, max_size=5))
def test_siblings_never_share_a_path_and_each_selects_its_own_leaf_alone(keys: list[Any]):
    model = ordered(*keys)
    paths = tp.layout(model).paths
    assert len(set(paths)) == len(keys)
    for path in paths:
        assert tp.layout(model, path).paths == (path,)
        assert tp.layout(model)[path].path == path


NODES = [
    (lambda a, b: {"b": a, "a": {"c": b}}, ("a.c", "b")),
    (lambda a, b: Pair(a, [b]), ("first", "second.0")),
    (lambda a, b: Nameless(a, Nameless(None, b)), ("0", "1.1")),
    (lambda a, b: {1: a, 1.5: b}, ("1", '"1.5"')),
    (lambda a, b: {"a/b c": {"ü": a, "": b}}, ('a/b c.""', "a/b c.ü")),
    (lambda a, b: [None, a, (), {}, b], ("1", "4")),
    (lambda a, b: a, ("",)),
]


@pytest.mark.parametrize(("build", "paths"), NODES)
def test_a_path_has_one_entry_per_key_whatever_the_node(build: Any, paths: tuple[str, ...]):
    assert tp.layout(build(leaf(), leaf())).paths == paths


def by_recursion(pattern: tuple[str, ...], entries: tuple[str, ...]) -> bool:
    """What a glob means, straight from its definition."""
    if not pattern:
        return True  # all is matched: the leaf, or a node above it
    if pattern[0] == "**":
        return any(by_recursion(pattern[1:], entries[at:]) for at in range(len(entries) + 1))
    return bool(entries) and fnmatch.fnmatchcase(entries[0], pattern[0]) and by_recursion(pattern[1:], entries[1:])


NAMES = ("a", "ab", "c")
DEEP = {first: {second: ordered(*NAMES) for second in NAMES} | {"d": leaf()} for first in NAMES}
DEEP_PATHS = {*itertools.product(NAMES, NAMES, NAMES), *itertools.product(NAMES, ("d",))}


@few
@given(st.lists(st.sampled_from(["**", "*", "a", "ab", "a*", "?", "[ad]", "[!a]", "*b"]), min_size=1, max_size=5))
def test_globs_are_matched_entry_by_entry(pattern: list[str]):
    want = {".".join(path) for path in DEEP_PATHS if by_recursion(tuple(pattern), path)}
    if want:
        assert set(tp.layout(DEEP, ".".join(pattern)).paths) == want
    else:
        with pytest.raises(ValueError, match="selects nothing; nearest: '"):
            tp.layout(DEEP, ".".join(pattern))


BLOCKS = [("a", [ordered("w", "b"), ordered("w")]), ("a.b", ordered("w")), ("*", ordered("w")), ("w", leaf())]
SELECTED = {
    "**.w": ("a.0.w", "a.1.w", '"a.b".w', '"*".w', "w"),
    "*.w": ('"a.b".w', '"*".w'),
    '"a.b"': ('"a.b".w',),
    "a?b": ('"a.b".w',),
    "a[.]b": ('"a.b".w',),
    '"*"': ('"*".w',),
    '"a".0': ("a.0.w", "a.0.b"),
    "[*].w": ('"*".w',),
}


@pytest.mark.parametrize("glob", SELECTED)
def test_globs_and_entries_with_quotes(glob: str):
    assert tp.layout(OrderedDict(BLOCKS), glob).paths == SELECTED[glob]


def cycles() -> list[tuple[Any, str]]:
    """Of nodes that jaxlib leaves without having called Python: only then does it leave them as it came."""
    nested = {"a": [leaf()]}
    nested["a"].append({"deep": nested["a"]})
    single: dict[str, Any] = {}
    single |= {"a": (single,)}
    return [(nested, "a.1.deep"), (single, "a.0")]


@pytest.mark.parametrize(("model", "path"), cycles())
def test_a_cyclic_model_is_a_clear_error_and_nothing_is_broken_by_it(model: Any, path: str):
    for use in (tp.layout, tp.tie, tp.untie, tp.partition, tp.ravel, tp.copy, tp.global_norm):
        with pytest.raises(ValueError, match=f"model is cyclic: the node at '{path}' is one of the nodes above it"):
            use(model)
    deep: Any = leaf()
    for _ in range(200):
        deep = [deep]
    assert tp.layout(deep).size == 2  # there are levels left
