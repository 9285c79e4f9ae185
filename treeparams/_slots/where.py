"""Reads a `where` (see `tp.layout`): the nodes and leaves that it matches, as spans of leaves; nodes that are alike."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._tree.difference import static_differences
from .._tree.paths import Glob, join_path, nearest, split_path
from .._tree.structure import Structure, flatten, is_array, same_treedef
from .._tree.text import AS_ARRAY, describe, function_name, in_short, quoted
from .._tree.types import PyTree, TreeDef


class _Span(NamedTuple):
    """A node, or a leaf, given by the leaves in it."""

    start: int
    stop: int
    entries: tuple[str, ...]
    number: int | None  # of the node; none of a leaf

    @property
    def path(self) -> str:
        return join_path(self.entries)


def _spans_of(structure: Structure) -> list[_Span]:
    """Returns all nodes, in preorder, and then all leaves."""
    nodes = [_Span(node.start, node.stop, node.entries, n) for n, node in enumerate(structure.nodes)]
    return nodes + [_Span(i, i + 1, entries, None) for i, entries in enumerate(structure.entries)]


def _children_below(structure: Structure) -> Mapping[Any, list[_Span]]:
    """Returns the children of each node, by its entries; under `None` the root."""

    def find() -> dict[Any, list[_Span]]:
        found: dict[Any, list[_Span]] = {}
        named = {(*state, *its): state for state, values in structure.states.items() for its in values}
        for span in _spans_of(structure):
            above = named.get(span.entries, span.entries[:-1])
            found.setdefault(above if span.entries else None, []).append(span)
        return found

    return structure.remember("below", find)


def _outermost(structure: Structure, matches: Callable[[_Span], bool]) -> tuple[_Span, ...]:
    """Returns the nodes and leaves for which a predicate holds, without those below another one."""
    found: list[_Span] = []
    inside = set[int]()  # leaves; a node stands before those in it, and all leaves stand last
    for span in _spans_of(structure):
        if not (span.start in inside and span.stop > span.start) and matches(span):
            found.append(span)
            inside.update(range(span.start, span.stop))
    return tuple(found)


def _items_in(structure: Structure, span: _Span) -> int:
    """Returns the number of items of a list or tuple, including `None`, which frozen ones may be; 0 for other nodes."""
    if span.number is None or structure.nodes[span.number].cls not in (list, tuple):
        return 0
    return len(subtreedefs(structure)[span.number].children())


def _by_treedef(structure: Structure) -> Mapping[tuple[int, TreeDef], _Span]:
    """Returns the nodes by their first leaf and their treedef."""
    treedefs = subtreedefs(structure)
    make = lambda: {(span.start, treedefs[span.number]): span for span in _spans_of(structure)}
    return structure.remember("by treedef", make)


def subtreedefs(structure: Structure) -> dict[int | None, TreeDef]:
    """Returns the treedef of each node of a structure, and of a leaf."""

    def find() -> dict[int | None, TreeDef]:
        # In preorder, as a structure numbers its nodes: the children are put on the stack last first.
        found: dict[int | None, TreeDef] = {None: jtu.tree_structure(0)}
        waiting = [structure.treedef]
        while waiting:
            each = waiting.pop()
            if each.node_data() is not None and each.node_data()[0] is not type(None):
                found[len(found) - 1] = each
                waiting += reversed(each.children())
        return found

    return structure.remember("subtreedefs", find)


# -- Reading -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Leaves:
    """A `where` that applies a predicate to each parameter."""

    predicate: Callable[[str, jax.ShapeDtypeStruct], bool]


Where = str | re.Pattern[str] | type | Leaves | Callable[[Any], Any] | Sequence[Any]


def leaves(predicate: Callable[[str, jax.ShapeDtypeStruct], bool]) -> Where:
    """Returns a `where` that selects the parameters for which a predicate holds.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> tp.layout(mlp, tp.leaves(lambda path, leaf: leaf.ndim >= 2)).paths  # the matrices
    ('layers.0.weight', 'layers.1.weight')

    Args:
        predicate: called as `predicate(path, leaf)` once per path, with a `jax.ShapeDtypeStruct` for the leaf; returns
            a bool. It is called for each path of a tie, and must select all of them or none.

    Returns:
        The `where`, which you can pass to any function of this library that accepts one.

    Raises:
        TypeError: the predicate is not callable; or, when it is used, it does not return a bool.
    """
    if not callable(predicate):
        raise TypeError(f"tp.leaves expects a function of path and leaf, got {describe(predicate)}")
    return Leaves(predicate)


# -- Nodes and leaves --------------------------------------------------------------------------------------------------


class _Match(NamedTuple):
    """A single `where`, without its exclamation mark, and the outermost nodes and leaves that it matches."""

    where: object
    spans: tuple[_Span, ...]
    is_listed: bool = False  # one of several nodes that a callable returns

    def leaves(self) -> frozenset[int]:
        """Returns the leaves in these nodes."""
        return frozenset(leaf for span in self.spans for leaf in range(span.start, span.stop))


def read(structure: Structure, where: object, *, may_only_take: bool = False) -> tuple[list[_Match], list[_Match]]:
    """Returns the matches that a `where` selects and those that it excludes, one for each single `where` in it."""
    chosen: list[_Match] = []
    away: list[_Match] = []
    for each in _single(where):
        if isinstance(each, str) and each.startswith("!"):
            away.append(_Match(each[1:], tuple(_by_glob(structure, each[1:]))))
        elif isinstance(each, str):
            chosen.append(_Match(each, tuple(_by_glob(structure, each))))
        elif isinstance(each, re.Pattern):
            chosen.append(_Match(each, _outermost(structure, lambda span, each=each: bool(each.fullmatch(span.path)))))
        elif isinstance(each, type):
            chosen.append(_Match(each, _outermost(structure, lambda span, each=each: _is_of(structure, span, each))))
        elif isinstance(each, Leaves):
            chosen.append(_Match(each, tuple(_by_predicate(structure, each))))
        elif callable(each) and not any(map(is_array, jtu.tree_leaves(each))):
            chosen += _by_callable(structure, each)
        else:
            raise TypeError(no_where(structure, each))
    if not (chosen or may_only_take):
        raise ValueError(f"{name_of(where)} only excludes; write what to select before it: ['**', {where!r}]")
    return chosen, away


def no_where(structure: Structure, value: object) -> str:
    """Returns the error message for a value that is not a `where`."""
    expected = (
        "expected a mask or a `where` (a glob, a compiled regex, a class, tp.leaves(predicate), a callable from the "
        "model to nodes of it, or a sequence of these)"
    )
    leaves, treedef = flatten(value)
    if any(map(is_array, leaves)):
        # A part of a model in place of its name. The model's arrays are not at hand here, so it is told by its shapes.
        specs = [(leaf.shape, leaf.dtype) if is_array(leaf) else (None, None) for leaf in leaves]
        treedefs = subtreedefs(structure)
        places = [
            repr(span.path) if span.entries else "'**'"
            for span in _spans_of(structure)
            if [spec[:2] if spec else (None, None) for spec in structure.specs[span.start : span.stop]] == specs
            and same_treedef(treedefs[span.number], treedef)
        ]
        remedy = (
            f"write its path, {' or '.join(places[:3])}"
            if places
            else ("the model has none like it; write a path. Pass the model to the result: tp.grad(loss)(model, x)")
        )
        return f"{expected}, got {describe(value)} itself: {remedy}"
    if leaves and not jtu.treedef_is_leaf(treedef) and all(isinstance(leaf, (bool, np.bool_)) for leaf in leaves):
        return f"{expected}, got a mask, which is not accepted here: pass it as trainable="
    position = "; a path is one text, such as 'layers.0'" if isinstance(value, int) else ""
    return f"{expected}, got {describe(value)}: {value!r:.80}{position}"


def _single(where: object) -> Iterator[object]:
    if not isinstance(where, (list, tuple, set, frozenset)) or hasattr(where, "_fields"):
        yield where
        return
    if not where:
        raise ValueError("an empty sequence selects nothing; leave the argument out, or write None")
    for each in where:
        yield from _single(each)


def _by_glob(structure: Structure, text: str) -> Iterator[_Span]:
    if any(entry.startswith(("['", '["')) for entry in Glob(text).entries):
        raise ValueError(
            f"{text!r} is a path in the style of jax.tree_util.keystr; write entries with dots between them, such as "
            "'layers.0.weight'"
        )
    # From the root down, so that a glob is followed only where it can still match.
    glob, children = Glob(text), _children_below(structure)
    from_the_end = _FROM_THE_END.search(text) is not None
    waiting = [(span, glob.start) for span in children.get(None, ())]
    while waiting:
        span, states = waiting.pop()
        if glob.end(states) is not None:
            yield span
            continue
        for child in children.get(span.entries, ()):
            after = states
            for entry in child.entries[len(span.entries) :]:  # the name of a value of a state has several
                after = after if glob.end(after) is not None else glob.step(after, entry)
            count = _items_in(structure, span) if from_the_end else 0
            if count:  # -1 is the last
                after |= glob.step(states, str(int(child.entries[-1]) - count))
            if after:
                waiting.append((child, after))


_FROM_THE_END = re.compile(r"(^|\.)-\d")


def _is_of(structure: Structure, span: _Span, cls: type) -> bool:
    return span.number is not None and issubclass(structure.nodes[span.number].cls, cls)


def _by_predicate(structure: Structure, where: Leaves) -> Iterator[_Span]:
    for i in structure.parameters:
        spec, path = structure.spec(i), structure.paths[i]
        try:
            holds = where.predicate(path, jax.ShapeDtypeStruct(spec.shape, spec.dtype))
        except Exception as error:
            raise TypeError(
                f"{name_of(where)} is called as predicate(path, leaf), with a text and a jax.ShapeDtypeStruct; at "
                f"{path!r} it failed with {in_short(error)}"
            ) from error
        if not isinstance(holds, (bool, np.bool_)):
            raise TypeError(f"the predicate of tp.leaves must return a bool, got {describe(holds)} at {path!r}")
        if holds:
            yield _Span(i, i + 1, structure.entries[i], None)


def _by_callable(structure: Structure, where: Callable[[Any], Any]) -> list[_Match]:
    """Returns the nodes that a callable returns, as one match each."""
    # Called with a tree that has an object of its own at each leaf, so that its nodes can be found again: the model's
    # own leaves may be one object at several paths.
    objects = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) if spec else object() for spec in structure.specs]
    tree: PyTree = jtu.tree_unflatten(structure.treedef, objects)
    expected = f"{name_of(where)} must return nodes of the model it is given, as for eqx.tree_at"
    to_ask = "To test each leaf, write tp.leaves(lambda path, leaf: ...)"
    try:
        found: Any = where(tree)
    except Exception as error:
        reason = f"(it is given shapes in place of arrays); it failed with {in_short(error)}"
        # Of an array is what belongs to each leaf; another name, or position, is one that the model has not.
        is_of_model = isinstance(error, LookupError) or not hasattr(np.ndarray, getattr(error, "name", None) or "ndim")
        more = "" if is_of_model else f". {to_ask}"
        raise ValueError(f"{expected} {reason}{more}") from error
    number = {id(each): i for i, each in enumerate(objects)}
    for leaf in jtu.tree_leaves(found):
        if id(leaf) not in number:
            raise ValueError(f"{expected}; got {describe(leaf)}. {to_ask}")
    if type(found) not in (list, tuple) or not found:  # as in eqx.tree_at, where a list is several nodes
        return [_Match(where, tuple(_spans_returned(structure, number, found)))]
    nodes = [tuple(_spans_returned(structure, number, each)) for each in found]
    if _node(structure, number, found) is not None:  # a list that the model holds is named as a whole
        nodes = [tuple(itertools.chain(*nodes))]
    return [_Match(where, spans, is_listed=True) for spans in nodes]


def _spans_returned(structure: Structure, number: Mapping[int, int], found: PyTree) -> Iterator[_Span]:
    """Yields the nodes of the model in a tree that is one, or that contains some."""
    node = _node(structure, number, found)
    if node is not None:
        yield node
    elif jtu.tree_leaves(found):
        for child in jtu.tree_leaves(found, is_leaf=lambda each: each is not found):
            yield from _spans_returned(structure, number, child)


def _node(structure: Structure, number: Mapping[int, int], found: PyTree) -> _Span | None:
    """Returns the node of the model that a tree is, or `None`."""
    own, treedef = jtu.tree_flatten(found)
    numbers = [number[id(leaf)] for leaf in own]
    # Leaves one after another may be a node of the model; a new list of them is none, by its treedef.
    node = _by_treedef(structure).get((numbers[0], treedef)) if numbers else None
    return node if node is not None and numbers == list(range(node.start, node.stop)) else None


# -- Leaves ------------------------------------------------------------------------------------------------------------

Follows = Mapping[int, frozenset[int]]
"""For each alias of a declared or given tie, the leaves of its source."""


def select(
    structure: Structure,
    where: Where,
    follows: Follows | None = None,
    *,
    among: Collection[int] | None = None,
    kind: str = "parameter",
    may_be_empty: bool = False,
) -> frozenset[int]:
    """Returns the leaves that `where` selects, among the parameters or among other leaves.

    `follows` holds the aliases that are selected together with their source; otherwise they are selected only if
    nothing else is.
    """
    among = structure.parameters if among is None else among
    chosen, away = read(structure, where)
    find = functools.partial(found_in, structure, among=among, kind=kind, may_be_empty=may_be_empty)
    sides = [frozenset[int]().union(*[whole(find(each), follows) for each in side]) for side in (chosen, away)]
    if sides[0] <= sides[1] and not may_be_empty:
        raise ValueError(f"{name_of(where)} selects nothing: everything that it selects is excluded")
    return sides[0] - sides[1]


def whole(selected: frozenset[int], follows: Follows | None) -> frozenset[int]:
    """Returns the leaves of parameters that a single `where` selects, from all leaves that it matches.

    A tie that a class declares, or a layout was given, is selected by its source, or by an alias if nothing else is
    selected. A `where` that selects an alias together with others, as the node that holds it does, leaves the tie as it
    is.
    """
    # `freeze="decoder"` is about a weight tied to the encoder's only if the decoder holds nothing else: with a bias of
    # its own beside the weight, it is about the bias alone.
    if not follows or selected.isdisjoint(follows):
        return selected
    named = frozenset[int]().union(*[follows[leaf] for leaf in selected]) if selected <= follows.keys() else frozenset()
    return selected.difference(follows) | named


def found_in(
    structure: Structure, match: _Match, among: Collection[int], kind: str = "parameter", may_be_empty: bool = False
) -> frozenset[int]:
    """Returns the leaves that a single `where` selects; raises a `ValueError` if there are none."""
    selected = match.leaves()
    found = selected.intersection(among)
    if found or may_be_empty:
        return found
    if selected:
        why = "; only floating and complex arrays are parameters" if kind == "parameter" else ""
        if why and any(structure.values[i] in ("float", "complex") for i in selected):
            why += f"; to train a number, {AS_ARRAY}"
        raise ValueError(f"{name_of(match.where)} selects no {kind}, only {some(structure, selected)}{why}")
    raise ValueError(f"{name_of(match.where)} selects nothing{_hint(structure, match.where)}")


def some(structure: Structure, selected: Collection[int], count: int = 3) -> str:
    """Describes a few of these leaves."""
    shown = ", ".join(structure.describe(i) for i in sorted(selected)[:count])
    return shown + (f" and {len(selected) - count} more" if len(selected) > count else "")


def name_of(where: object, *, with_line: bool = True) -> str:
    """Returns the name of a `where` for messages; for a lambda its line, which is right until the file changes."""
    if isinstance(where, re.Pattern):
        return repr(where.pattern)
    if isinstance(where, Leaves):
        return f"tp.leaves({function_name(where.predicate, with_line=with_line)})"
    if isinstance(where, str) or not hasattr(where, "__qualname__"):
        return f"{where!r:.80}"
    name = function_name(where, with_line=with_line)
    return name if name.startswith("lambda at ") else repr(name)


_DTYPES = frozenset({"float16", "bfloat16", "float32", "float64", "complex64", "complex128"})


def _hint(structure: Structure, where: object) -> str:
    known = [structure.paths[i] for i in structure.parameters]
    if isinstance(where, str) and where in _DTYPES:
        return f"; pass a dtype by keyword, tp.ravel(model, dtype={where!r})"
    if isinstance(where, (str, re.Pattern)):
        text = where if isinstance(where, str) else where.pattern
        return nearest(text, [*known, *(node.path for node in structure.nodes if node.entries)])
    if isinstance(where, type):
        if isinstance(getattr(where, "dtype", None), np.dtype) or issubclass(where, np.generic):
            return f"; pass a dtype by keyword, tp.ravel(model, dtype={where.__name__})"
        classes = {node.cls.__qualname__ for node in structure.nodes}
        return f"; the model has nodes of {', '.join(sorted(classes))}"
    return f"; the model's parameters are {quoted(known, 5)}" if known else ""


# -- Nodes that are alike, such as the layers of a net -----------------------------------------------------------------


def nodes_in(structure: Structure, where: Where, are_alike: bool) -> list[_Span]:
    """Returns the outermost nodes, or leaves, that a `where` matches, in tree order; an error if they are not alike.

    Alike nodes whose paths differ in numbers alone are in the order of these, `Block_2` before `Block_10`. JAX sorts
    the keys of a dictionary as texts, and layers run in the order of their numbers.

    The result is remembered, except for functions, which may find others at the next call.
    """

    def find() -> list[_Span]:
        found = _outermost_nodes(structure, where)
        return _check_alike(structure, where, found) if are_alike else found

    is_sure = isinstance(where, (str, re.Pattern, type))
    return structure.remember(("nodes", where, are_alike), find) if is_sure else find()


def _outermost_nodes(structure: Structure, where: Where) -> list[_Span]:
    chosen, away = read(structure, where)
    every = range(len(structure.specs))
    for match in (*chosen, *away):
        found_in(structure, match, every, "leaf")
    taken = frozenset[int]().union(*[match.leaves() for match in away])
    # From the largest to the smallest, so that a node is met before all that is below it: the outermost is found.
    found, covered = list[_Span](), set[int]()
    for span in sorted({span for match in chosen for span in match.spans}, key=lambda span: span.start - span.stop):
        leaves = range(span.start, span.stop)
        if taken.isdisjoint(leaves):
            if covered.isdisjoint(leaves):
                found.append(span)
                covered.update(leaves)
        elif not taken.issuperset(leaves):
            raise ValueError(
                f"{name_of(where)} excludes a part of the node {span.path!r}; name the nodes that you mean"
            )
    if not found:
        raise ValueError(f"{name_of(where)} selects nothing: everything that it selects is excluded")
    return sorted(found, key=lambda span: (span.start, span.stop))


def _check_alike(structure: Structure, where: Where, spans: list[_Span]) -> list[_Span]:
    """Returns the nodes, if they have one structure, with leaves of the same shapes and dtypes."""
    first = spans[0]
    cls = None if first.number is None else structure.nodes[first.number].cls
    if len(spans) == 1 and cls in (list, tuple, dict) and _means_the_node(structure, where, cls):
        inner = f"{first.path}.*".lstrip(".")
        raise ValueError(f"{first.path!r} is one node, a {cls.__name__}; for the nodes in it write {inner!r}")
    for span in spans[1:]:
        difference = next(_differences(structure, first, span), None)
        if difference is not None:
            raise ValueError(
                f"{first.path!r} and {span.path!r} cannot be one node with an axis over both: {difference}. Select "
                "nodes that are alike"
            )
    if len({re.sub("[0-9]+", "0", span.path) for span in spans}) > 1:
        return spans
    return sorted(spans, key=lambda span: [*map(int, re.findall("[0-9]+", span.path))])


def _means_the_node(structure: Structure, where: object, cls: type | None) -> bool:
    """Returns whether a `where` that found one list, or dictionary, means that node and not the nodes in it.

    A glob that matches one dictionary may mean the layers of a net with a single layer; for a list that is unlikely.
    """
    if isinstance(where, str):
        return cls is not dict or not set("*?[") & set("".join(split_path(where)[-1:])) or where.endswith("**")
    if isinstance(where, (list, tuple)):
        return all(_means_the_node(structure, each, cls) for each in where)
    return not any(match.is_listed for match in read(structure, where)[0])


def _differences(structure: Structure, first: _Span, other: _Span) -> Iterator[str]:
    ours, theirs = _entries_within(structure, first), _entries_within(structure, other)
    if ours != theirs:
        only = set(ours) ^ set(theirs)
        yield f"only one of them has {quoted(sorted(map(join_path, only - {()})) or ['leaves'])}"
        return
    for i, j in zip(range(first.start, first.stop), range(other.start, other.stop), strict=True):
        if structure.specs[i] != structure.specs[j]:
            yield f"{structure.describe(i)} differs from {structure.describe(j)}"
    if first.number is None or other.number is None:
        return
    nodes = [structure.nodes[n : structure.nodes[n].last] for n in (first.number, other.number)]
    for here, there in zip(*nodes, strict=False):
        if here.cls is not there.cls:
            yield f"{here.path!r} is a {here.cls.__qualname__}, {there.path!r} a {there.cls.__qualname__}"
        if here.cls is there.cls:
            for row in static_differences(structure, here, there):
                yield f"the static value {row.path!r} is {row.first}, and {row.second} at {there.path!r}"
    treedefs = subtreedefs(structure)
    if not same_treedef(treedefs[first.number], treedefs[other.number]):
        yield "they differ in where they hold None"


def _entries_within(structure: Structure, span: _Span) -> list[tuple[str, ...]]:
    """Returns the entries of the leaves in a node, relative to the node."""
    return [entries[len(span.entries) :] for entries in structure.entries[span.start : span.stop]]
