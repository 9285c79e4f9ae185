"""From a `where` or a mask to leaves: what is trained before ties are looked at.

A `where` is one of
- a glob over paths, matched entry by entry (`*`, `?`, `[..]` within one entry, `**` for any number of entries); one
  that matches a node selects all below it;
- a compiled regular expression that matches the whole path of a node or leaf;
- a class: every node of it;
- a callable from the model to a node or nodes of it, as for `equinox.tree_at`;
- a sequence of these.
"""

import re
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from ._declare import declared
from ._paths import key_text, nearest, selects, split
from ._structure import Node, Structure, describe, flatten, same_treedef, scan

Where = str | re.Pattern[str] | type | Callable[[Any], Any] | Sequence[Any]


class Word(NamedTuple):
    """One statement about parameters: a declaration, a mask, one `where`."""

    step: int  # a later one overrules; those of one step are said together
    leaves: frozenset[int]  # what it names
    singly: bool  # whether it names each leaf for itself, as a mask does and a glob over a node does not


class Choice(NamedTuple):
    """What is to be trained, per parameter, and by which word; what no word named is missing in `said`."""

    trained: dict[int, bool]
    said: dict[int, Word]

    def after(self, word: Word, trained: bool) -> "Choice":
        """The choice after a further word."""
        return Choice(self.trained | dict.fromkeys(word.leaves, trained), self.said | dict.fromkeys(word.leaves, word))


def choose(structure: Structure, trainable: Any) -> Choice:
    """What a mask, a `where` or the declarations (`None`) say of each parameter.

    Raises:
        ValueError: a mask of another structure; a `where` that selects nothing that may be trained.
        TypeError: neither mask nor `where`; a field declared trained that cannot be.
    """
    frozen = declared_frozen(structure).intersection(structure.parameters)
    declared = Word(0, frozen, True)
    if trainable is None:
        return Choice(dict.fromkeys(structure.parameters, True), {}).after(declared, False)
    mask = as_mask(structure, trainable)
    if mask is not None:
        word = Word(0, frozenset(structure.parameters), True)
        return Choice({i: mask[i] for i in structure.parameters}, dict.fromkeys(structure.parameters, word))
    choice = Choice(dict.fromkeys(structure.parameters, False), {})
    for each in _each(trainable):
        selected = select(structure, each)
        if selected <= frozen:
            raise ValueError(
                f"{name_of(each)} selects only leaves that are declared frozen ({_some(structure, selected)}); "
                "to train them all the same, write thaw=... in place of trainable=..."
            )
        choice = choice.after(Word(0, selected, False), True)
    return choice.after(declared, False)


def change(structure: Structure, choice: Choice, where: Any, trained: bool) -> Choice:
    """The choice after a further step: what `where` selects is trained, or is not."""
    step = 1 + max((word.step for word in choice.said.values()), default=0)
    for each in () if where is None else _each(where):
        choice = choice.after(Word(step, select(structure, each), False), trained)
    return choice


def select(
    structure: Structure, where: Any, among: Collection[int] | None = None, kind: str = "parameter"
) -> frozenset[int]:
    """The leaves that `where` selects, as positions: of the parameters, or among others.

    Raises:
        ValueError: it, or one of a sequence, selects no parameter.
        TypeError: it is no `where`.
    """
    among = structure.parameters if among is None else among
    return frozenset(i for each in _each(where) for i in _select_one(structure, each, among, kind))


def as_mask(structure: Structure, value: Any) -> list[bool] | None:
    """The flags per leaf if `value` is a mask; `None` if it is something else.

    Raises:
        ValueError: it holds only bools, but has another structure than the model.
    """
    if value is None or isinstance(value, (str, re.Pattern, type)):
        return None
    leaves, treedef = flatten(value)
    if not all(isinstance(leaf, (bool, np.bool_)) for leaf in leaves):
        if leaves and all(str(getattr(leaf, "dtype", None)) == "bool" for leaf in leaves):
            raise TypeError("a mask holds Python bools, got arrays; write jax.tree.map(bool, mask)")
        return None
    if same_treedef(treedef, structure.treedef):
        return list(map(bool, leaves))
    if not leaves:
        return None
    paths = scan(value, leaves).paths
    missing, extra = set(structure.paths) - set(paths), set(paths) - set(structure.paths)
    differs = (
        f"it has no {min(missing)!r}"
        if missing
        else f"it has {min(extra)!r}, which the model has not"
        if extra
        else f"its nodes are of other types: got {treedef}"
    )
    raise ValueError(
        f"a mask must have the structure of the model, with a bool at every leaf; {differs}. "
        'Write jax.tree.map(..., model) to make one, or select by path: trainable="head.**"'
    )


def declared_frozen(structure: Structure) -> frozenset[int]:
    """The leaves that the classes of the nodes above them declare frozen.

    Raises:
        TypeError: a field declared `trainable=True` holds a leaf that cannot be trained.
    """
    frozen = lambda: frozenset(i for node in structure.nodes for i in _declared(structure, node))
    return structure.remember("declared", frozen)


def _declared(structure: Structure, node: Node) -> Iterator[int]:
    said = declared(node.cls)
    if said.fields and any(isinstance(child.key, jtu.FlattenedIndexKey) for child in node.children):
        raise TypeError(
            f"{node.cls.__qualname__} says of its fields what is trained but is a pytree without names; register it "
            "with keys (jax.tree_util.register_dataclass), or write tp.declare(cls, frozen=...) with positions"
        )
    for child in node.children:
        trained = said.fields.get(key_text(child.key))
        if trained is False:
            yield from range(child.start, child.stop)
        elif trained and child.is_leaf and not structure.is_parameter(child.start):
            raise TypeError(
                f"{structure.paths[child.start]!r} is declared trainable=True, but holds "
                f"{_kind(structure, child.start)}, and only floating and complex arrays can be trained; write "
                "tp.field(trainable=True, converter=jnp.asarray) for a number, make the array floating, or drop "
                "trainable=True"
            )
    depth = len(node.entries)
    for glob in said.frozen:
        pattern = split(glob)
        yield from (i for i in range(node.start, node.stop) if selects(pattern, structure.entries[i][depth:]))


def _select_one(structure: Structure, where: Any, among: Collection[int], kind: str) -> frozenset[int]:
    selected = frozenset(_leaves_of(structure, where))
    found = selected.intersection(among)
    if found:
        return found
    if selected:
        why = "; only floating and complex arrays are parameters" if kind == "parameter" else ""
        raise ValueError(f"{name_of(where)} selects no {kind}, only {_some(structure, selected)}{why}")
    raise ValueError(f"{name_of(where)} selects nothing{_hint(structure, where)}")


def _leaves_of(structure: Structure, where: Any) -> Iterator[int]:
    if isinstance(where, str):
        yield from _matched(structure, split(where))
    elif isinstance(where, re.Pattern):
        yield from (i for i, path in enumerate(structure.paths) if where.fullmatch(path))
        for node in structure.nodes:
            yield from range(node.start, node.stop) if where.fullmatch(node.path) else ()
    elif isinstance(where, type):
        for node in structure.nodes:
            yield from range(node.start, node.stop) if issubclass(node.cls, where) else ()
    elif callable(where):
        yield from _pointed_at(structure, where)
    else:
        raise TypeError(
            f"expected a mask or a `where` (a glob, a compiled regex, a class, a callable from the model to nodes of "
            f"it, or a sequence of these), got {describe(where)}: {where!r:.80}"
        )


def _matched(structure: Structure, pattern: tuple[str, ...]) -> Iterator[int]:
    # A path stands for itself first, so that `1` and `"1"` select one each where a node has both.
    literal = [i for i, entries in enumerate(structure.entries) if entries[: len(pattern)] == pattern]
    yield from literal or (i for i, entries in enumerate(structure.entries) if selects(pattern, entries))


def _pointed_at(structure: Structure, where: Callable[[Any], Any]) -> Iterator[int]:
    # The callable gets the model with a distinct object for each leaf, so that what it returns can be found again by
    # identity; the model's own leaves may be one object in several places.
    places = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) if spec else _Place() for spec in structure.specs]
    index = {id(place): i for i, place in enumerate(places)}
    for leaf in jtu.tree_leaves(where(jtu.tree_unflatten(structure.treedef, places))):
        if id(leaf) not in index:
            raise ValueError(
                f"{name_of(where)} must return nodes of the model it is given, as for eqx.tree_at; got {describe(leaf)}"
            )
        yield index[id(leaf)]


class _Place:
    """Stands for a leaf that is no array."""


def _each(where: Any) -> Sequence[Any]:
    if isinstance(where, (list, tuple, set, frozenset)):
        if not where:
            raise ValueError("an empty sequence selects nothing; leave the argument out, or write None")
        return [one for each in where for one in _each(each)]
    return (where,)


def _kind(structure: Structure, i: int) -> str:
    spec = structure.specs[i]
    return f"{spec.dtype} of shape {spec.shape}" if spec else "a Python value, not an array"


def name_of(where: Any) -> str:
    """What a `where` is called in messages."""
    return repr(
        getattr(where, "pattern", where)
        if isinstance(where, (str, re.Pattern))
        else getattr(where, "__qualname__", where)
    )


def _some(structure: Structure, leaves: frozenset[int], count: int = 3) -> str:
    shown = ", ".join(structure.describe(i) for i in sorted(leaves)[:count])
    return shown + (f" and {len(leaves) - count} more" if len(leaves) > count else "")


def _hint(structure: Structure, where: Any) -> str:
    known = [structure.paths[i] for i in structure.parameters]
    if isinstance(where, (str, re.Pattern)):
        text = where if isinstance(where, str) else where.pattern
        return nearest(text, [*known, *(node.path for node in structure.nodes if node.entries)])
    if isinstance(where, type):
        classes = {node.cls.__qualname__ for node in structure.nodes}
        return f"; the model has nodes of {', '.join(sorted(classes))}"
    return f"; the model's parameters are {', '.join(map(repr, known[:5]))}{', ...' if len(known) > 5 else ''}"
