"""Reads a `where` (see `tp.layout`): the nodes and leaves that it matches, and the leaves in these."""

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._tree.flattening import flatten, same_treedef
from .._tree.globs import Glob
from .._tree.messages import AS_ARRAY
from .._tree.paths import nearest
from .._tree.structure import Structure, is_array
from .._tree.text import describe, function_name, in_short, quoted
from .._tree.types import PyTree
from .spans import Span, below, by_treedef, items_in, outermost, spans_of, subtreedefs


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


class Match(NamedTuple):
    """A single `where`, without its exclamation mark, and the outermost nodes and leaves that it matches."""

    where: object
    spans: tuple[Span, ...]
    is_listed: bool = False  # one of several nodes that a callable returns

    def leaves(self) -> frozenset[int]:
        """Returns the leaves in these nodes."""
        return frozenset(leaf for span in self.spans for leaf in range(span.start, span.stop))


def read(structure: Structure, where: object, *, may_only_take: bool = False) -> tuple[list[Match], list[Match]]:
    """Returns the matches that a `where` selects and those that it excludes, one for each single `where` in it."""
    chosen: list[Match] = []
    away: list[Match] = []
    for each in _single(where):
        if isinstance(each, str) and each.startswith("!"):
            away.append(Match(each[1:], tuple(_by_glob(structure, each[1:]))))
        elif isinstance(each, str):
            chosen.append(Match(each, tuple(_by_glob(structure, each))))
        elif isinstance(each, re.Pattern):
            chosen.append(Match(each, outermost(structure, lambda span, each=each: bool(each.fullmatch(span.path)))))
        elif isinstance(each, type):
            chosen.append(Match(each, outermost(structure, lambda span, each=each: _is_of(structure, span, each))))
        elif isinstance(each, Leaves):
            chosen.append(Match(each, tuple(_by_predicate(structure, each))))
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
            for span in spans_of(structure)
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
    return f"{expected}, got {describe(value)}: {value!r:.80}"


def _single(where: object) -> Iterator[object]:
    if not isinstance(where, (list, tuple, set, frozenset)) or hasattr(where, "_fields"):
        yield where
        return
    if not where:
        raise ValueError("an empty sequence selects nothing; leave the argument out, or write None")
    for each in where:
        yield from _single(each)


def _by_glob(structure: Structure, text: str) -> Iterator[Span]:
    if any(entry.startswith(("['", '["')) for entry in Glob(text).entries):
        raise ValueError(
            f"{text!r} is a path in the style of jax.tree_util.keystr; write entries with dots between them, such as "
            "'layers.0.weight'"
        )
    # From the root down, so that a glob is followed only where it can still match.
    glob, children = Glob(text), below(structure)
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
            count = items_in(structure, span) if from_the_end else 0
            if count:  # -1 is the last
                after |= glob.step(states, str(int(child.entries[-1]) - count))
            if after:
                waiting.append((child, after))


_FROM_THE_END = re.compile(r"(^|\.)-\d")


def _is_of(structure: Structure, span: Span, cls: type) -> bool:
    return span.number is not None and issubclass(structure.nodes[span.number].cls, cls)


def _by_predicate(structure: Structure, where: Leaves) -> Iterator[Span]:
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
            yield Span(i, i + 1, structure.entries[i], None)


def _by_callable(structure: Structure, where: Callable[[Any], Any]) -> list[Match]:
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
        return [Match(where, tuple(_nodes_in(structure, number, found)))]
    nodes = [tuple(_nodes_in(structure, number, each)) for each in found]
    if _node(structure, number, found) is not None:  # a list that the model holds is named as a whole
        nodes = [tuple(itertools.chain(*nodes))]
    return [Match(where, spans, is_listed=True) for spans in nodes]


def _nodes_in(structure: Structure, number: Mapping[int, int], found: PyTree) -> Iterator[Span]:
    """Yields the nodes of the model in a tree that is one, or that contains some."""
    node = _node(structure, number, found)
    if node is not None:
        yield node
    elif jtu.tree_leaves(found):
        for child in jtu.tree_leaves(found, is_leaf=lambda each: each is not found):
            yield from _nodes_in(structure, number, child)


def _node(structure: Structure, number: Mapping[int, int], found: PyTree) -> Span | None:
    """Returns the node of the model that a tree is, or `None`."""
    own, treedef = jtu.tree_flatten(found)
    numbers = [number[id(leaf)] for leaf in own]
    # Leaves one after another may be a node of the model; a new list of them is none, by its treedef.
    node = by_treedef(structure).get((numbers[0], treedef)) if numbers else None
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
    structure: Structure, match: Match, among: Collection[int], kind: str = "parameter", may_be_empty: bool = False
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
