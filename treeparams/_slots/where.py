"""From a `where` (see `tp.layout`) or a mask to leaves, and from these and declarations to the trained parameters."""

import dataclasses
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.tree_util as jtu
import numpy as np

from .._tree.declare import Declared, declared, registry
from .._tree.paths import nearest, quote, selects, split_path
from .._tree.structure import Node, Structure, flatten, same_treedef, scan
from .._tree.text import describe, quoted
from .._tree.types import PyTree, TreeDef


@dataclasses.dataclass(frozen=True)
class _Leaves:
    """A `where` that asks each parameter by itself."""

    predicate: Callable[[str, jax.ShapeDtypeStruct], bool]


Where = str | re.Pattern[str] | type | _Leaves | Callable[[Any], Any] | Sequence[Any]


def leaves(predicate: Callable[[str, jax.ShapeDtypeStruct], bool]) -> Where:
    """A `where` that selects the parameters for which a predicate holds.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> tp.layout(mlp, tp.leaves(lambda path, leaf: leaf.ndim >= 2)).paths  # the matrices
    ('layers.0.weight', 'layers.1.weight')

    Args:
        predicate: called as `predicate(path, leaf)` once per path, with a `jax.ShapeDtypeStruct` for the leaf, and
            returns a bool. A tie is asked at each of its paths and must be selected as a whole.

    Returns:
        The `where`, for any function of this library that takes one.

    Raises:
        TypeError: the predicate cannot be called; when it is used: it does not return a bool.
    """
    if not callable(predicate):
        raise TypeError(f"tp.leaves takes a function of path and leaf, got {describe(predicate)}")
    return _Leaves(predicate)


# -- Statements on parameters ------------------------------------------------------------------------------------------

Said = dict[int, bool]
"""Whether each parameter is to be trained. An alias with a transform has no entry, and so follows its source, unless a
statement names the alias itself; a later statement about its source removes that entry again."""


def choose(structure: Structure, follows: Mapping[int, int], trainable: object) -> Said:
    """Reads a mask, a `where` or the declarations (`None`) for each parameter.

    `follows` has the source of each alias that has a transform.
    """
    # Later statements win: first `trainable`, then its `!` globs, then the declarations. A mask stands above them all,
    # since it says of each leaf by itself what it is.
    declarations = _declarations(structure)
    frozen = frozenset[int]().union(*declarations)
    mask = as_mask(structure, trainable)
    if mask is not None:
        return {i: mask[i] for i in structure.parameters}
    chosen, taken = ([], []) if trainable is None else _sides(trainable)
    said = {i: not chosen for i in structure.parameters if i not in follows}
    for each in chosen:
        selected = _selected(structure, each, structure.parameters, "parameter")
        if selected <= frozen:
            raise ValueError(
                f"{name_of(each)} selects only leaves that are declared frozen ({_some(structure, selected)}); "
                "to train them all the same, write thaw=... in place of trainable=..."
            )
        say(said, follows, selected, True)
    for each in taken:
        say(said, follows, _selected(structure, each, structure.parameters, "parameter"), False)
    for each in declarations:
        say(said, follows, each.intersection(structure.parameters), False)
    if taken and not any(said.values()):
        raise ValueError(f"{name_of(trainable)} selects nothing: all of it is taken away or declared frozen")
    return said


def say(said: Said, follows: Mapping[int, int], selected: frozenset[int], trained: bool) -> None:
    """Adds one statement.

    An alias with a transform is named by a statement that selects nothing but such aliases. One that selects it beside
    others, as a node does that holds it, says nothing of it.
    """
    # `freeze="decoder"` is about a weight tied to the encoder's only if the decoder holds nothing else: with
    # a bias of its own beside the weight, it is about the bias alone.
    is_named = selected <= follows.keys()
    said |= dict.fromkeys(selected if is_named else selected - follows.keys(), trained)
    for alias, source in follows.items():
        if source in selected:
            said.pop(alias, None)


def change(structure: Structure, follows: Mapping[int, int], said: Said, where: Where | None, trained: bool) -> None:
    """Adds the statement of `freeze=` or `thaw=`."""
    if where is None:
        return
    chosen, taken = _sides(where)
    rest = select(structure, where) if taken else frozenset(structure.parameters)
    for each in chosen:
        say(said, follows, _selected(structure, each, structure.parameters, "parameter") & rest, trained)
    for each in taken:
        away = _selected(structure, each, structure.parameters, "parameter")
        if away <= follows.keys():  # names aliases alone, and says that they stay as they are
            say(said, follows, away, not trained)


def declared_frozen(structure: Structure) -> frozenset[int]:
    """The leaves that the classes of the nodes above them declare frozen."""
    return frozenset[int]().union(*_declarations(structure))


def _declarations(structure: Structure) -> list[frozenset[int]]:
    """The leaves that each declaration freezes."""
    return [each for node, said in declaring_nodes(structure) for each in _frozen_below(structure, node, said)]


def declaring_nodes(structure: Structure) -> list[tuple[Node, Declared]]:
    """The nodes whose classes declare something, with the declarations."""
    found = [(node, declared(node.cls, registry.version)) for node in structure.nodes]
    return [(node, said) for node, said in found if any(said)]


def _frozen_below(structure: Structure, node: Node, said: Declared) -> Iterator[frozenset[int]]:
    # Globs of a class are relative to its instances, so they are matched against paths without the node's own entries.
    depth = len(node.entries)
    for glob in said.frozen:
        pattern = split_path(glob)
        yield frozenset(i for i in range(node.start, node.stop) if selects(pattern, structure.entries[i][depth:]))
    if not said.fields:
        return
    below: dict[str, list[int]] = {}
    for i in range(node.start, node.stop):
        below.setdefault(structure.entries[i][depth : depth + 1][0], []).append(i)
    if any(entry.isdigit() for entry in below):
        raise TypeError(
            f"{node.cls.__qualname__} says of its fields what is trained but is a pytree without names; register "
            "it with keys (jax.tree_util.register_dataclass), or write tp.declare(cls, frozen=...) with positions"
        )
    for name, trained in said.fields.items():
        inside = below.get(quote(name), [])
        if not trained:
            yield frozenset(inside)
        elif inside and not any(map(structure.is_parameter, inside)):
            spec = structure.specs[inside[0]]
            kind = f"{spec.dtype} of shape {spec.shape}" if spec else "a Python value, not an array"
            raise TypeError(
                f"{structure.paths[inside[0]]!r} is declared trainable=True, but holds {kind}, and only floating and "
                "complex arrays can be trained; write tp.field(trainable=True, converter=jnp.asarray) for a number, "
                "make the array floating, or drop trainable=True"
            )


# -- Masks and wheres --------------------------------------------------------------------------------------------------


def as_mask(structure: Structure, value: object) -> list[bool] | None:
    """The flags per leaf if `value` is a mask; `None` if it is something else."""
    if value is None or isinstance(value, (str, re.Pattern, type, _Leaves)):
        return None
    # A mask and a `where` may both be a sequence, a function or a Module. A tree whose leaves are all bools is a mask;
    # numbers in a tree of the model's structure, or in any that is no sequence, are a mask written wrongly.
    flags, treedef = flatten(value)
    if flags and all(isinstance(flag, (bool, np.bool_)) for flag in flags):
        if same_treedef(treedef, structure.treedef):
            return list(map(bool, flags))
        raise ValueError(_other_structure(structure, value, flags, treedef))
    has_its_structure = same_treedef(treedef, structure.treedef)
    is_sequence = jtu.treedef_is_leaf(treedef) or isinstance(value, (list, tuple, set, frozenset))
    if (has_its_structure or not is_sequence) and any(
        isinstance(flag, (int, float, np.generic)) or hasattr(flag, "dtype") for flag in flags
    ):
        if any(hasattr(flag, "dtype") and flag.dtype.kind != "b" and flag.ndim for flag in flags):
            raise TypeError(f"trainable= says which leaves are trained, got a {describe(value)} with arrays in it")
        kinds = ", ".join(sorted({describe(flag) for flag in flags})[:3])
        raise TypeError(f"a mask holds Python bools, got {kinds}; write jax.tree.map(bool, mask) where these are flags")
    return [] if has_its_structure and not flags else None


def _other_structure(structure: Structure, mask: object, flags: Sequence[Any], treedef: TreeDef) -> str:
    """The message on a mask that has not the structure of the model."""
    if jtu.treedef_is_leaf(treedef):
        return (
            f"trainable={mask!r} is no mask, which has a bool at every leaf of the model. Everything that is not "
            "declared frozen trains by itself; write freeze='**' in tp.layout to train nothing"
        )
    paths = scan(mask, flags, treedef).paths
    missing, extra = set(structure.paths) - set(paths), set(paths) - set(structure.paths)
    differs = (
        f"it has no {min(missing)!r}"
        if missing
        else f"it has {min(extra)!r}, which the model has not"
        if extra
        else f"its nodes are of other types: got {treedef}"
    )
    return (
        f"a mask must have the structure of the model, with a bool at every leaf; {differs}. "
        'Write jax.tree.map(..., model) to make one, or select by path: trainable="head.**"'
    )


def select(
    structure: Structure,
    where: Where,
    among: Collection[int] | None = None,
    kind: str = "parameter",
    *,
    may_be_empty: bool = False,
) -> frozenset[int]:
    """The leaves that `where` selects, as positions: of the parameters, or among others."""
    among = structure.parameters if among is None else among
    chosen, taken = _sides(where)
    if not chosen:
        raise ValueError(f"{name_of(where)} only takes away; write what it takes from before it: ['**', {where!r}]")

    find = _selected_or_none if may_be_empty else _selected
    selected, away = (
        frozenset[int]().union(*[find(structure, each, among, kind) for each in side]) for side in (chosen, taken)
    )
    if selected <= away and not may_be_empty:
        raise ValueError(f"{name_of(where)} selects nothing: all that it selects is taken away")
    return selected - away


def _sides(where: object) -> tuple[list[object], list[object]]:
    """Divides a `where` into single ones that select and single ones that take away."""
    chosen: list[object] = []
    taken: list[object] = []
    for each in _single(where):
        if isinstance(each, str) and each.startswith("!"):
            taken.append(each[1:])
        else:
            chosen.append(each)
    return chosen, taken


def _single(where: object) -> Iterator[object]:
    if not isinstance(where, (list, tuple, set, frozenset)):
        yield where
        return
    if not where:
        raise ValueError("an empty sequence selects nothing; leave the argument out, or write None")
    for each in where:
        yield from _single(each)


def _selected_or_none(structure: Structure, where: object, among: Collection[int], _: str) -> frozenset[int]:
    return frozenset(_leaves_of(structure, where)).intersection(among)


def _selected(structure: Structure, where: object, among: Collection[int], kind: str) -> frozenset[int]:
    """The leaves that a single `where` selects; an error if there are none."""
    selected = frozenset(_leaves_of(structure, where))
    found = selected.intersection(among)
    if found:
        return found
    if selected:
        why = "; only floating and complex arrays are parameters" if kind == "parameter" else ""
        raise ValueError(f"{name_of(where)} selects no {kind}, only {_some(structure, selected)}{why}")
    raise ValueError(f"{name_of(where)} selects nothing{_hint(structure, where)}")


def _some(structure: Structure, selected: frozenset[int], count: int = 3) -> str:
    shown = ", ".join(structure.describe(i) for i in sorted(selected)[:count])
    return shown + (f" and {len(selected) - count} more" if len(selected) > count else "")


def _leaves_of(structure: Structure, where: object) -> Iterator[int]:
    if isinstance(where, str):
        pattern = split_path(where)
        if any(entry[:1] == "[" and entry[1:2] in ("'", '"') for entry in pattern):
            raise ValueError(
                f"{where!r} is written as jax.tree_util.keystr writes paths; write entries with dots between them, "
                "such as 'layers.0.weight'"
            )
        yield from (i for i, entries in enumerate(structure.entries) if selects(pattern, entries))
    elif isinstance(where, re.Pattern):
        yield from (i for i, path in enumerate(structure.paths) if where.fullmatch(path))
        for node in structure.nodes:
            yield from range(node.start, node.stop) if where.fullmatch(node.path) else ()
    elif isinstance(where, type):
        for node in structure.nodes:
            yield from range(node.start, node.stop) if issubclass(node.cls, where) else ()
    elif isinstance(where, _Leaves):
        for i in structure.parameters:
            spec, path = structure.spec(i), structure.paths[i]
            holds = where.predicate(path, jax.ShapeDtypeStruct(spec.shape, spec.dtype))
            if not isinstance(holds, (bool, np.bool_)):
                raise TypeError(f"the predicate of tp.leaves must return a bool, got {describe(holds)} at {path!r}")
            yield from (i,) if holds else ()
    elif callable(where):
        yield from _pointed_leaves(structure, where)
    else:
        raise TypeError(
            f"expected a mask or a `where` (a glob, a compiled regex, a class, tp.leaves(predicate), a callable from "
            f"the model to nodes of it, or a sequence of these), got {describe(where)}: {where!r:.80}"
        )


def with_distinct_leaves(structure: Structure) -> tuple[PyTree, dict[int, tuple[int, object]]]:
    """A tree of this structure with an object of its own at each leaf; and by its identity each leaf's number.

    A callable that points at nodes is called with the tree, so that its nodes can be found again: the model's own
    leaves may be one object at several paths. Beside each number stands the object, whose identity it keeps in use.
    """
    objects = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) if spec else object() for spec in structure.specs]
    return jtu.tree_unflatten(structure.treedef, objects), {id(each): (i, each) for i, each in enumerate(objects)}


def _pointed_leaves(structure: Structure, where: Callable[[Any], Any]) -> Iterator[int]:
    tree, index = with_distinct_leaves(structure)
    expected = f"{name_of(where)} must return nodes of the model it is given, as for eqx.tree_at"
    try:
        found = where(tree)
    except (AttributeError, TypeError) as error:
        raise ValueError(f"{expected} (it is given shapes in place of arrays); it failed with {error!r}") from error
    for leaf in jtu.tree_leaves(found):
        if isinstance(leaf, (bool, np.bool_)):
            raise ValueError(f"{expected}; got bool. To ask each leaf, write tp.leaves(lambda path, leaf: ...)")
        if id(leaf) not in index:
            raise ValueError(f"{expected}; got {describe(leaf)}")
        yield index[id(leaf)][0]


def name_of(where: object) -> str:
    """The name of a `where` in messages."""
    if isinstance(where, re.Pattern):
        return repr(where.pattern)
    if isinstance(where, _Leaves):
        return f"tp.leaves({getattr(where.predicate, '__qualname__', where.predicate)})"
    return repr(where if isinstance(where, str) else getattr(where, "__qualname__", where))


def _hint(structure: Structure, where: object) -> str:
    known = [structure.paths[i] for i in structure.parameters]
    if isinstance(where, (str, re.Pattern)):
        text = where if isinstance(where, str) else where.pattern
        return nearest(text, [*known, *(node.path for node in structure.nodes if node.entries)])
    if isinstance(where, type):
        if isinstance(getattr(where, "dtype", None), np.dtype) or issubclass(where, np.generic):
            return f"; a dtype is passed by name, tp.ravel(model, dtype={where.__name__})"
        classes = {node.cls.__qualname__ for node in structure.nodes}
        return f"; the model has nodes of {', '.join(sorted(classes))}"
    return f"; the model's parameters are {quoted(known, 5)}" if known else ""
