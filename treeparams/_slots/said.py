"""Decides which parameters are trained: by a mask, a `where`, declarations of classes, `freeze` and `thaw`."""

import re
from collections.abc import Iterator, Sequence
from typing import Any

import jax.tree_util as jtu
import numpy as np

from .._tree.declare import Declared, declared, registry
from .._tree.paths import Glob, quote
from .._tree.structure import Node, Structure, flatten, same_treedef, scan_tree
from .._tree.text import describe
from .._tree.types import TreeDef
from .where import Follows, Leaves, Where, found_in, name_of, no_where, read, select, some, whole

Said = dict[int, bool]
"""Whether each parameter is trained. An alias of a declared or given tie has an entry only if a mask or a declaration
names it; the entry must agree with the source."""


def choose(structure: Structure, follows: Follows, trainable: object) -> Said:
    """Reads a mask, a `where` or the declarations (`None`) for each parameter."""
    # Declarations stand above a `where`. A mask stands above both, since it says of each leaf by itself what it is.
    declarations = _declarations(structure)
    frozen = frozenset[int]().union(*declarations)
    mask = _as_mask(structure, trainable)
    if mask is not None:
        return {i: mask[i] for i in structure.parameters}
    every = frozenset(structure.parameters).difference(follows)
    chosen, away = ([], []) if trainable is None else read(structure, trainable, may_only_take=True)
    selected = frozenset[int]() if chosen else every
    for match in chosen:
        found = found_in(structure, match, structure.parameters)
        if found <= frozen:
            raise ValueError(
                f"{name_of(match.where)} selects only leaves that are declared frozen ({some(structure, found)}); "
                "to train them anyway, pass a layout that thaws them: tp.layout(model, thaw=...)"
            )
        selected |= whole(found, follows)
    for match in away:
        selected -= whole(found_in(structure, match, structure.parameters), follows)
    said = {i: i in selected for i in every}
    for each in declarations:
        own = each.intersection(structure.parameters)
        said |= dict.fromkeys(own if own <= follows.keys() else own.difference(follows), False)
    if away and not any(said.values()):
        raise ValueError(f"{name_of(trainable)} selects nothing: everything is excluded or declared frozen")
    return said


def change(structure: Structure, follows: Follows, said: Said, where: Where | None, trained: bool) -> None:
    """Applies `freeze=` or `thaw=`, which overrides everything before it."""
    if where is None:
        return
    selected = select(structure, where, follows)
    if trained and all(said.get(i, True) for i in selected):
        raise ValueError(f"{name_of(where)} selects nothing that is frozen, so there is nothing to thaw")
    said |= dict.fromkeys(selected, trained)
    for alias, places in follows.items():
        if not places.isdisjoint(selected):
            said.pop(alias, None)


def declared_frozen(structure: Structure) -> frozenset[int]:
    """Returns the leaves that the classes of the nodes above them declare frozen."""
    return frozenset[int]().union(*_declarations(structure))


def _declarations(structure: Structure) -> list[frozenset[int]]:
    """Returns the leaves that each declaration freezes."""
    return [each for node, said in declaring_nodes(structure) for each in _frozen_below(structure, node, said)]


def declaring_nodes(structure: Structure) -> list[tuple[Node, Declared]]:
    """Returns the nodes whose classes declare something, with the declarations."""
    classes = dict.fromkeys([node.cls for node in structure.nodes])  # few, of many nodes
    found = {cls: declared(cls, registry.version) for cls in classes}
    declaring = {cls: said for cls, said in found.items() if any(said)}
    return [(node, declaring[node.cls]) for node in structure.nodes if node.cls in declaring]


def _frozen_below(structure: Structure, node: Node, said: Declared) -> Iterator[frozenset[int]]:
    # Globs of a class are relative to its instances, so they are matched against paths without the node's own entries.
    depth = len(node.entries)
    for glob in said.frozen:
        pattern = Glob(glob)
        yield frozenset(i for i in range(node.start, node.stop) if pattern.selects(structure.entries[i][depth:]))
    if not said.fields:
        return
    below: dict[str, list[int]] = {}
    for i in range(node.start, node.stop):
        below.setdefault(structure.entries[i][depth : depth + 1][0], []).append(i)
    if any(entry.isdigit() for entry in below):
        raise TypeError(
            f"{node.cls.__qualname__} declares which fields train but is a pytree without field names; register "
            "it with keys (jax.tree_util.register_dataclass), or write tp.declare(cls, freeze=...) with positions"
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


def _as_mask(structure: Structure, value: object) -> list[bool] | None:
    """Returns the flag of each leaf if `value` is a mask, otherwise `None`."""
    if value is None or isinstance(value, (str, re.Pattern, type, Leaves)):
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
            raise TypeError(no_where(structure, value))
        kinds = ", ".join(sorted({describe(flag) for flag in flags})[:3])
        raise TypeError(f"a mask must hold Python bools, got {kinds}; write jax.tree.map(bool, mask) if they are flags")
    return [] if has_its_structure and not flags else None


def _other_structure(structure: Structure, mask: object, flags: Sequence[Any], treedef: TreeDef) -> str:
    """Returns the error message for a mask that does not have the structure of the model."""
    if jtu.treedef_is_leaf(treedef):
        return (
            f"trainable={mask!r} is not a mask, which has a bool at every leaf of the model. Everything that is not "
            "declared frozen trains by default; write freeze='**' in tp.layout to train nothing"
        )
    paths = scan_tree(mask, flags, treedef).paths
    missing, extra = set(structure.paths) - set(paths), set(paths) - set(structure.paths)
    differs = (
        f"it has no {min(missing)!r}"
        if missing
        else f"it has {min(extra)!r}, which the model does not have"
        if extra
        else f"its nodes are of other types: got {treedef}"
    )
    return (
        f"a mask must have the structure of the model, with a bool at every leaf; {differs}. "
        'Write jax.tree.map(..., model) to make one, or select by path: trainable="head.**"'
    )
