"""Reads a `where` (see `tp.layout`); finds nodes that are alike; decides which parameters train.

A mask, a `where`, declarations of classes, `freeze` and `thaw` say which parameters train. A tied parameter is trained
or frozen as a whole.
"""

import dataclasses
import itertools
import re
import sys
import typing
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import jax.tree_util as jtu
import numpy as np

from .._tree.difference import compare
from .._tree.paths import Glob, nearest, quote
from .._tree.structure import Node, Structure, flatten, is_array, same_treedef, scan_tree
from .._tree.text import AS_ARRAY, describe, first_few, function_name, in_short, quoted
from .._tree.types import PyTree
from .ties import Alias, followers


@dataclasses.dataclass(frozen=True)
class _Leaves:
    """A `where` that applies a predicate to each parameter."""

    predicate: Callable[[str, jax.ShapeDtypeStruct], bool]


Where = str | re.Pattern[str] | type | _Leaves | Callable[[Any], Any] | Sequence[Any]
if not TYPE_CHECKING and sys.version_info >= (3, 12):  # a signature that is printed then shows the name
    Where = typing.TypeAliasType("Where", Where)


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
    return _Leaves(predicate)


# -- Nodes and leaves --------------------------------------------------------------------------------------------------


class _Match(NamedTuple):
    """A single `where`, without its exclamation mark, and the outermost nodes and leaves that it matches."""

    where: object
    nodes: Sequence[Node]


def _nodes_and_leaves(structure: Structure) -> list[Node]:
    """Returns all nodes, in preorder, and then all leaves."""
    return [*structure.nodes, *(Node(object, entries, i, i + 1) for i, entries in enumerate(structure.entries))]


def read(structure: Structure, where: object, *, may_only_take: bool = False) -> tuple[list[_Match], list[_Match]]:
    """Returns the matches that a `where` selects and those that it excludes, one for each single `where` in it."""
    chosen, away = list[_Match](), list[_Match]()
    for each in _single(where):
        if isinstance(each, str) and each.startswith("!"):
            away.append(_Match(each[1:], _outermost(structure, each[1:])))
        elif isinstance(each, (str, re.Pattern, type, _Leaves)):
            chosen.append(_Match(each, _outermost(structure, each)))
        elif callable(each) and not any(map(is_array, jtu.tree_leaves(each))):
            chosen += [_Match(each, nodes) for nodes in _returned(structure, each)]
        else:
            raise TypeError(_no_where(structure, each))
    if not (chosen or may_only_take):
        raise ValueError(f"{name_of(where)} only excludes; write what to select before it: ['**', {where!r}]")
    return chosen, away


def _single(where: object) -> Iterator[object]:
    if not isinstance(where, (list, tuple, set, frozenset)) or hasattr(where, "_fields"):
        yield where
        return
    if not where:
        raise ValueError("an empty sequence selects nothing; leave the argument out, or write None")
    for each in where:
        yield from _single(each)


def _outermost(structure: Structure, where: str | re.Pattern[str] | type | _Leaves) -> list[Node]:
    """Returns the nodes and leaves that a `where` matches, without those below another one."""
    matches = _matcher(structure, where)
    found, inside, below = list[Node](), set[int](), range(0)
    for node in _nodes_and_leaves(structure):  # a node comes before all below it, of which some may hold no leaf
        if node.start not in inside and node.number not in below and matches(node):
            found.append(node)
            inside.update(range(node.start, node.stop))
            below = below if node.number < 0 else range(node.number, node.last)
    return found


def _matcher(structure: Structure, where: str | re.Pattern[str] | type | _Leaves) -> Callable[[Node], bool]:
    """Returns the function that tells whether a `where` matches a node or leaf."""
    if isinstance(where, str):
        return _glob_matcher(structure, where)
    if isinstance(where, re.Pattern):
        return lambda node: where.fullmatch(node.path) is not None
    if isinstance(where, type):
        return lambda node: node.number >= 0 and issubclass(node.cls, where)

    def holds(leaf: Node) -> bool:
        if leaf.number >= 0 or not structure.is_parameter(leaf.start):
            return False
        try:
            answer: object = where.predicate(leaf.path, jax.ShapeDtypeStruct(*structure.spec(leaf.start)[:2]))
        except Exception as error:
            called = f"{name_of(where)} is called as predicate(path, leaf), with a text and a jax.ShapeDtypeStruct"
            raise TypeError(f"{called}; at {leaf.path!r} it failed with {in_short(error)}") from error
        if not isinstance(answer, (bool, np.bool_)):
            raise TypeError(f"the predicate of tp.leaves must return a bool, got {describe(answer)} at {leaf.path!r}")
        return bool(answer)

    return holds


def _glob_matcher(structure: Structure, text: str) -> Callable[[Node], bool]:
    glob = Glob(text)
    if any(entry.startswith(("['", '["')) for entry in glob.entries):
        style = f"{text!r} is in the style of jax.tree_util.keystr"
        raise ValueError(f"{style}; write entries with dots, 'layers.0.weight'")
    # It may match a node above, too: the name of a value of a state has several entries, and a glob may end within it.
    if not re.search(r"(^|\.)-\d", text):
        return lambda node: glob.selects(node.entries)
    # How many items each list and tuple has, `None` among them, for positions from its end: -1 is the last.
    counts = [count for kind, count, _ in structure.statics if kind is not type(None)]
    nodes = zip(structure.nodes, counts, strict=True)
    sizes = {node.entries: count for node, count in nodes if node.cls in (list, tuple)}

    def ways(entries: tuple[str, ...]) -> Iterator[Sequence[str]]:
        for n, entry in enumerate(entries):
            size = sizes.get(entries[:n])
            yield (entry,) if size is None else (entry, str(int(entry) - size))

    return lambda node: any(map(glob.selects, itertools.product(*ways(node.entries))))


def _returned(structure: Structure, where: Callable[[Any], Any]) -> list[list[Node]]:
    """Returns the nodes that a callable returns; of a list or tuple of nodes those in each item."""
    # Called with a tree that has an object of its own at each leaf, so that its nodes can be found again: the model's
    # own leaves may be one object at several paths.
    objects = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) if spec else object() for spec in structure.specs]
    tree: PyTree = jtu.tree_unflatten(structure.treedef, objects)
    every: list[Any] = []
    jtu.tree_leaves(tree, is_leaf=lambda each: every.append(each) is not None)  # asks of all, in preorder
    leaves_too = _nodes_and_leaves(structure)
    known = {id(each): leaf for each, leaf in zip(objects, leaves_too[len(structure.nodes) :], strict=True)}
    inner = [each for each in every if each is not None and id(each) not in known]
    known |= {id(each): node for each, node in zip(inner, structure.nodes, strict=False) if node.stop > node.start}
    expected = f"{name_of(where)} must return nodes of the model it is given, as for eqx.tree_at"
    to_ask = "To test each leaf, write tp.leaves(lambda path, leaf: ...)"
    try:
        found: Any = where(tree)
    except Exception as error:
        reason = f"(it is given shapes in place of arrays); it failed with {in_short(error)}"
        # Of an array is what belongs to each leaf; another name, or position, is one that the model has not.
        is_of_model = isinstance(error, LookupError) or not hasattr(np.ndarray, getattr(error, "name", None) or "ndim")
        raise ValueError(f"{expected} {reason}{'' if is_of_model else f'. {to_ask}'}") from error

    def named(node: PyTree) -> list[Node]:
        nodes = jtu.tree_leaves(node, is_leaf=lambda each: id(each) in known)
        for each in nodes:
            if id(each) not in known:
                raise ValueError(f"{expected}; got {describe(each)}. {to_ask}")
        return [known[id(each)] for each in nodes]

    several = found if type(found) in (list, tuple) and found else [found]  # as in eqx.tree_at
    items = list(map(named, several))
    # A list that the model holds is named as a whole.
    return [list(itertools.chain(*items))] if id(found) in known else items


def _no_where(structure: Structure, value: object) -> str:
    """Returns the error message for a value that is not a `where`."""
    kinds = "a glob, a compiled regex, a class, tp.leaves(predicate), a callable from the model to nodes of it"
    expected = f"expected a mask or a `where` ({kinds}, or a sequence of these)"
    leaves, treedef = flatten(value)
    if any(map(is_array, leaves)):
        # A part of a model in place of its name. The model's arrays are not at hand here, so it is told by its shapes.
        shapes = [(leaf.shape, leaf.dtype) if is_array(leaf) else None for leaf in leaves]
        known, treedefs = [spec and spec[:2] for spec in structure.specs], structure.subtreedefs
        alike = [node for node in _nodes_and_leaves(structure) if known[node.start : node.stop] == shapes]
        alike = [repr(each.path or "**") for each in alike if same_treedef(treedefs[each.number], treedef)]
        none = "the model has none like it; write a path. Pass the model to the result: tp.grad(loss)(model, x)"
        remedy = f"write its path, {' or '.join(alike[:3])}" if alike else none
        return f"{expected}, got {describe(value)} itself: {remedy}"
    if leaves and not jtu.treedef_is_leaf(treedef) and all(isinstance(leaf, (bool, np.bool_)) for leaf in leaves):
        return f"{expected}, got a mask, which is not accepted here: pass it as trainable="
    position = "; a path is one text, such as 'layers.0'" if isinstance(value, int) else ""
    return f"{expected}, got {describe(value)}: {value!r:.80}{position}"


# -- Leaves ------------------------------------------------------------------------------------------------------------


def select(
    structure: Structure,
    where: object,
    follows: Mapping[int, frozenset[int]] | None = None,
    *,
    among: Collection[int] | None = None,
    may_be_empty: bool = False,
    frozen: frozenset[int] | None = None,
) -> frozenset[int]:
    """Returns the leaves that `where` selects.

    Args:
        structure: of the model.
        where: see `tp.layout`.
        follows: the aliases that are selected together with their source; otherwise only if nothing else is.
        among: the leaves that can be selected; `None`: the parameters.
        may_be_empty: whether nothing may be selected, as in a tree of which only a part is shown.
        frozen: the parameters that are declared frozen, for a `where` that selects the trained ones. It must not
            select frozen parameters alone. If it only takes away, it takes from all other parameters.
    """
    among = structure.parameters if among is None else among
    chosen, away = read(structure, where, may_only_take=frozen is not None)
    find = lambda match, *of: _whole(_found_in(structure, match, among, may_be_empty, *of), follows)
    every = [] if chosen or frozen is None else [frozenset(among).difference(frozen, follows or ())]
    selected = frozenset[int]().union(*[find(match, frozen) for match in chosen], *every)
    selected = selected.difference(*map(find, away))
    if not (selected.difference(frozen or ()) or may_be_empty):
        also = "" if frozen is None else " or declared frozen"
        raise ValueError(f"{name_of(where)} selects nothing: everything is excluded{also}")
    return selected


def _whole(selected: frozenset[int], follows: Mapping[int, frozenset[int]] | None) -> frozenset[int]:
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


def _found_in(
    structure: Structure, match: _Match, among: Collection[int], may_be_empty: bool = False, frozen: Any = None
) -> frozenset[int]:
    """Returns the leaves that a single `where` selects; an error if there are none, or none but frozen ones."""
    selected = frozenset(leaf for node in match.nodes for leaf in range(node.start, node.stop))
    found, name = selected.intersection(among), name_of(match.where)
    if not (found or may_be_empty):
        if not selected:
            raise ValueError(f"{name} selects nothing{_hint(structure, match.where)}")
        kind, why = "frozen or integer array", ""
        if among is structure.parameters:
            kind, why = "parameter", "; only floating and complex arrays are parameters"
            if any(structure.values[i] in ("float", "complex") for i in selected):
                why += f"; to train a number, {AS_ARRAY}"
        raise ValueError(f"{name} selects no {kind}, only {_described(structure, selected)}{why}")
    if frozen is not None and found.issubset(frozen):
        what = f"{name} selects only leaves that are declared frozen ({_described(structure, found)})"
        raise ValueError(f"{what}; to train them anyway, pass a layout that thaws them: tp.layout(model, thaw=...)")
    return found


def _described(structure: Structure, leaves: Collection[int]) -> str:
    return first_few(list(map(structure.describe, sorted(leaves))))


def name_of(where: object, *, with_line: bool = True) -> str:
    """Returns the name of a `where` for messages; for a lambda its line, which is right until the file changes."""
    if isinstance(where, re.Pattern):
        return repr(where.pattern)
    if isinstance(where, _Leaves):
        return f"tp.leaves({function_name(where.predicate, with_line=with_line)})"
    if isinstance(where, str) or not hasattr(where, "__qualname__"):
        return f"{where!r:.80}"
    name = function_name(where, with_line=with_line)
    return name if name.startswith("lambda at ") else repr(name)


def _hint(structure: Structure, where: object) -> str:
    known = [structure.paths[i] for i in structure.parameters]
    dtype = getattr(where, "__name__", where) if isinstance(where, (str, type)) else ""
    if re.fullmatch("b?float[0-9]+|complex[0-9]+", str(dtype)):
        return f"; pass a dtype by keyword, tp.ravel(model, dtype={repr(dtype) if isinstance(where, str) else dtype})"
    if isinstance(where, (str, re.Pattern)):
        text = where if isinstance(where, str) else where.pattern
        return nearest(text, [*known, *(node.path for node in structure.nodes if node.entries)])
    if isinstance(where, type):
        return f"; the model has nodes of {', '.join(sorted({node.cls.__qualname__ for node in structure.nodes}))}"
    return f"; the model's parameters are {quoted(known, 5)}" if known else ""


# -- Nodes that are alike, such as the layers of a net -----------------------------------------------------------------


def nodes_in(structure: Structure, where: Where, are_alike: bool) -> list[Node]:
    """Returns the outermost nodes, or leaves, that a `where` matches, in tree order; an error if they are not alike.

    Alike nodes whose paths differ in numbers alone are in the order of these, `Block_2` before `Block_10`. JAX sorts
    the keys of a dictionary as texts, and layers run in the order of their numbers.

    The result is remembered, except for functions, which may find others at the next call.
    """

    def find() -> list[Node]:
        found = _outermost_nodes(structure, where)
        return _as_alike(structure, where, found) if are_alike else found

    is_sure = isinstance(where, (str, re.Pattern, type))
    return structure.remember(("nodes", where, are_alike), find) if is_sure else find()


def _outermost_nodes(structure: Structure, where: Where) -> list[Node]:
    chosen, away = read(structure, where)
    every = range(len(structure.specs))
    for match in chosen:
        _found_in(structure, match, every)
    taken = frozenset[int]().union(*[_found_in(structure, match, every) for match in away])
    # From the largest to the smallest, so that a node is met before all that is below it: the outermost is found.
    found, covered = list[Node](), set[int]()
    matched = {(node.number, node.start): node for match in chosen for node in match.nodes}
    for node in sorted(matched.values(), key=lambda node: (node.start - node.stop, len(node.entries))):
        leaves = range(node.start, node.stop)
        if taken.isdisjoint(leaves):
            if covered.isdisjoint(leaves):
                found.append(node)
                covered.update(leaves)
        elif not taken.issuperset(leaves):
            raise ValueError(f"{name_of(where)} excludes a part of {node.path!r}; name the nodes that you mean")
    if not found:
        raise ValueError(f"{name_of(where)} selects nothing: everything is excluded")
    return sorted(found, key=lambda node: (node.start, node.stop))


def _as_alike(structure: Structure, where: object, nodes: list[Node]) -> list[Node]:
    """Returns the nodes, if they have one structure, with leaves of the same shapes and dtypes."""
    first, cls = nodes[0], nodes[0].cls
    # A glob that matches one dictionary may mean the layers of a net with a single layer; for a list that is unlikely.
    is_layer = cls is dict and isinstance(where, str) and re.search(r"[*?\[][^.]*$", where) and where[-2:] != "**"
    if len(nodes) == 1 and cls in (list, tuple, dict) and not is_layer:
        inner = f"{first.path}.*".lstrip(".")
        raise ValueError(f"{first.path!r} is one node, a {cls.__name__}; for the nodes in it write {inner!r}")
    one, *others = (_structure_below(structure, node) for node in nodes)
    for node, other in zip(nodes[1:], others, strict=True):
        if other != one:
            row = next(iter(compare(one, other)))
            why = row.in_words(f"in {first.path!r}", f"in {node.path!r}", "the node")
            raise ValueError(f"{first.path!r} and {node.path!r} cannot be one node with an axis over both: {why}")
    if len({re.sub("[0-9]+", "0", node.path) for node in nodes}) > 1:
        return nodes
    return sorted(nodes, key=lambda node: [*map(int, re.findall("[0-9]+", node.path))])


def _structure_below(structure: Structure, node: Node) -> Structure:
    """Returns the structure of a node, as if it were a model; it says nothing of leaves that are not arrays."""
    specs, treedef = structure.specs[node.start : node.stop], structure.subtreedefs[node.number]
    leaves = [jax.ShapeDtypeStruct(spec.shape, spec.dtype) if spec else 0 for spec in specs]
    return scan_tree(jtu.tree_unflatten(treedef, leaves), leaves, treedef)


# -- Which parameters train --------------------------------------------------------------------------------------------


def decide(
    structure: Structure, ties: Sequence[Alias], trainable: Any, freeze: Any = None, thaw: Any = None, said: Any = None
) -> tuple[bool, ...]:
    """Decides for each leaf whether it is trained, so that every tied parameter is trained or frozen as a whole.

    Args:
        structure: of the models.
        ties: of the models.
        trainable: a mask, a `where`, or `None` for the declarations of classes.
        freeze: a `where`, which overrides all before it.
        thaw: the same; ties are checked only after both.
        said: in place of `trainable`, whether each parameter is trained. An alias of a declared or given tie has an
            entry only if a mask or a declaration names it; the entry must agree with the source.
    """
    follows = followers(ties)
    said = _chosen(structure, follows, trainable) if said is None else said
    for where, is_trained in ((freeze, False), (thaw, True)):
        if where is not None:
            selected = select(structure, where, follows)
            if is_trained and all(said.get(i, True) for i in selected):
                raise ValueError(f"{name_of(where)} selects nothing that is frozen, so there is nothing to thaw")
            said |= dict.fromkeys(selected, is_trained)
            for alias, places in follows.items():
                if not places.isdisjoint(selected):
                    said.pop(alias, None)
    trained = dict(said)
    for alias in ties:
        # A source is no alias, so its own entry is final. An alias that nothing is said of agrees with its source.
        of_source = trained[alias.source]
        if said.get(alias.leaf, of_source) != of_source:
            raise ValueError(_half_trained(structure, ties, alias, of_source))
        trained[alias.leaf] = of_source
    return tuple([trained.get(i, False) for i in range(len(structure.specs))])


def _chosen(structure: Structure, follows: Mapping[int, frozenset[int]], trainable: object) -> dict[int, bool]:
    """Reads a mask, a `where` or the declarations (`None`) for each parameter."""
    # Declarations stand above a `where`. A mask stands above both, since it says of each leaf by itself what it is.
    declarations = _declarations(structure)
    frozen = frozenset[int]().union(*declarations)
    mask = _as_mask(structure, trainable)
    if mask is not None:
        return {i: mask[i] for i in structure.parameters}
    every = frozenset(structure.parameters).difference(follows)
    selected = every if trainable is None else select(structure, trainable, follows, frozen=frozen)
    said = {i: i in selected for i in every}
    for each in declarations:
        own = each.intersection(structure.parameters)
        said |= dict.fromkeys(own if own <= follows.keys() else own.difference(follows), False)
    return said


def declared_frozen(structure: Structure) -> frozenset[int]:
    """Returns the leaves that the classes of the nodes above them declare frozen."""
    return frozenset[int]().union(*_declarations(structure))


def _declarations(structure: Structure) -> list[frozenset[int]]:
    """Returns the leaves that each declaration freezes."""
    found = list[frozenset[int]]()
    for node, said in structure.declaring:
        # Globs of a class are relative to its instances: they are matched against paths without the node's own entries.
        within = {i: structure.entries[i][len(node.entries) :] for i in range(node.start, node.stop)}
        found += [frozenset(i for i, its in within.items() if glob.selects(its)) for glob in map(Glob, said.frozen)]
        if said.fields and any(entries[0].isdigit() for entries in within.values()):
            what = f"{node.cls.__qualname__} declares which fields train but is a pytree without field names"
            raise TypeError(f"{what}; register it with keys, as by jax.tree_util.register_dataclass")
        for name, trained in said.fields.items():
            inside = [i for i, entries in within.items() if entries[0] == quote(name)]
            found += [] if trained else [frozenset(inside)]
            if trained and inside and not any(map(structure.is_parameter, inside)):
                what = f"{structure.describe(inside[0])} is declared trainable=True"
                remedy = "write tp.field(trainable=True, converter=jnp.asarray) for a number"
                raise TypeError(f"{what}, but only floating and complex arrays can be trained; {remedy}")
    return found


def _as_mask(structure: Structure, value: object) -> list[bool] | None:
    """Returns the flag of each leaf if `value` is a mask, otherwise `None`."""
    if value is None or isinstance(value, (str, re.Pattern, type, _Leaves)):
        return None
    # A mask and a `where` may both be a sequence, a function or a Module. A tree whose leaves are all bools is a mask;
    # numbers in a tree of the model's structure, or in any that is no sequence, are a mask written wrongly.
    flags, treedef = flatten(value)
    has_its_structure, is_leaf = same_treedef(treedef, structure.treedef), jtu.treedef_is_leaf(treedef)
    if all(isinstance(flag, (bool, np.bool_)) for flag in flags) and (flags or has_its_structure):
        if has_its_structure:
            return list(map(bool, flags))
        if is_leaf:
            what = f"trainable={value!r} is not a mask, which has a bool at every leaf of the model"
            default = "All that is not declared frozen trains by default"
            raise ValueError(f"{what}. {default}; write freeze='**' in tp.layout to train nothing")
        difference = next(iter(compare(structure, scan_tree(value, flags, treedef), lambda i, j: ())))
        what = "a mask must have the structure of the model, with a bool at every leaf"
        how = difference.in_words("in the model", "in the mask")
        raise ValueError(f'{what}; {how}. Or select by path: trainable="head.**"')
    is_no_where = has_its_structure or not (is_leaf or isinstance(value, (list, tuple, set, frozenset)))
    if is_no_where and any(isinstance(flag, (int, float, np.generic)) or hasattr(flag, "dtype") for flag in flags):
        if any(hasattr(flag, "dtype") and flag.dtype.kind != "b" and flag.ndim for flag in flags):
            raise TypeError(_no_where(structure, value))
        kinds = ", ".join(sorted({describe(flag) for flag in flags})[:3])
        raise TypeError(f"a mask must hold Python bools, got {kinds}; write jax.tree.map(bool, mask) if they are flags")
    return None


def _half_trained(structure: Structure, ties: Sequence[Alias], alias: Alias, of_source: bool) -> str:
    source, leaf = structure.paths[alias.source], structure.paths[alias.leaf]
    is_, other = ("trained", "frozen") if of_source else ("frozen", "trained")
    if alias.is_said:
        how = f"is {alias} of" if alias.transforms else "is tied to"
        what = f"{leaf!r} {how} {source!r}, its source, and is trained or frozen with it"
        return f"{what}, but the source is {is_} and the alias {other}; select the source {source!r} (or both)"
    every = [structure.paths[each.leaf] for each in ties if each.source == alias.source and not each.is_said]
    what = f"{source!r} is {is_} and {leaf!r} is {other}, but they are one array"
    either = "Either make one of them a separate array (tp.copy, as for a target network; tp.untie)"
    call = f"tp.layout(model, freeze={[source, *every]!r}), or thaw=... or trainable=... with all these"
    return f"{what}. {either}, or name all in one call: {call}"
