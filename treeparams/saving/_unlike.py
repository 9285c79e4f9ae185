"""Describes how a tree differs from a file: its arrays, ties, histories, and the parameters in joined arrays."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import equinox as eqx
import jax
import numpy as np

from .._files.arrays import array_spec
from .._files.file import File
from .._files.names import head_of, heads_of, split_name
from .._files.values import from_words, histories_in, specs_in
from .._slots.layout import index_of
from .._tree.paths import join_path, nearest
from .._tree.text import describe, first_few, quoted
from ._contents import Contents, places_in_words
from ._resume import form_of, together

_ARRAYS_ALONE = "; saving.plan(path, tree)(path) loads only the arrays of the file, no numbers"


def unlike_leaves(contents: Contents, leaves: Mapping[str, int], file: File) -> Iterator[str]:
    """Yields a sentence for each array, number or text that is missing in the tree or the file, or differs."""
    said = file.words["values"]
    there = dict.fromkeys([*file.specs, *file.words["ties"], *said])
    here = {name: i for name, i in leaves.items() if i in contents.names or i in contents.values}
    # Equal names, however many, are never those of another tree below a node, and none is missing.
    heads = heads_of(here, there) if here.keys() != there.keys() else []
    if heads:
        yield (
            f"the {file.noun} has such a tree below {quoted(heads)}: load into a dictionary of all its trees, or load "
            f"one alone, names = saving.names(path, {heads[-1]!r}), saving.plan(names, tree)(names)"
        )
        return
    for name in [name for name in here if name not in there]:
        hint = _ARRAYS_ALONE if here[name] in contents.values else ""
        yield f"{name!r} is in the tree and not in the {file.noun}{nearest(name, there)}{hint}"
    rest, others = [name for name in there if name not in leaves], dict[str, None]()
    heads = set(map(head_of, leaves)) if rest else set[str]()
    for name in rest:
        if head_of(name) in heads:
            hint = _ARRAYS_ALONE if name in said else ""
            yield f"{name!r} is in the {file.noun} and not in the tree{nearest(name, here)}{hint}"
        else:
            others[head_of(name)] = None
    part = "names = saving.names(path, 'model'), saving.plan(names, model)(names)"
    hint = f"; to load a part of a file, such as 'model', write {part}" if file.noun == "file" else ""
    for other in others:
        yield f"the {file.noun} also has {other!r}, which the tree lacks{hint}"
    yield from filter(None, [_unlike_leaf(contents, leaves[name], name, file) for name in there if name in leaves])


def unlike_nodes(
    contents: Contents, marks: Mapping[str, Any] | None, pairs: Iterable[tuple[str, str]], noun: str
) -> dict[str, str]:
    """Returns a sentence for each name below a node without keys that is another one in the tree, or one with keys.

    Args:
        contents: the tree.
        marks: the nodes without keys where the names come from; `None` if it does not tell.
        pairs: each name, and where it goes.
        noun: the word for where the names come from.
    """
    here, sentences, known = contents.structure.unkeyed, dict[str, str](), dict[tuple[str, str], str]()
    if marks is None or not (marks or here):
        return {}
    for name, target in pairs:
        source, goal = split_name(name), split_name(target)
        while source and goal and source[-1] == goal[-1]:
            source, goal = source[:-1], goal[:-1]
            at = join_path(source), join_path(goal)
            if at not in known:
                known[at] = _unlike_node(contents, marks.get(at[0]), here.get(at[1]), at, noun)
            if known[at]:
                sentences[name] = known[at]
    return sentences


def _unlike_node(contents: Contents, there: Any, here: Any, at: tuple[str, str], noun: str) -> str:
    """Returns a sentence if a node has no keys, and the other one has, or is of another class or number of children."""
    its = [node.cls for node in contents.structure.nodes if node.path == at[1]] if here != there else []
    if not its:
        return ""
    is_state = its[0] is eqx.nn.State
    named = "with the names of its layers" if is_state else "another node, whose children have names"
    theirs, ours = (f"a {each[0]} of {each[1]} children without keys" if each else named for each in (there, here))
    says = f"{at[0]!r} is {theirs} in the {noun}, {ours} in the tree, so nothing tells which child is which; "
    if is_state:
        return f"{says}save a state and its model in one tree, (model, state), and load them into one: so it has names"
    return (
        f"{says}register the class with jax.tree_util.register_pytree_with_keys, or write a plan that renames each of "
        f"its arrays, rename={{{join_path([at[0], '0'])!r}: ...}}"
    )


def _unlike_leaf(contents: Contents, i: int, name: str, file: File) -> str | None:
    """Describes how a leaf of the tree differs from the file's entry of the same name; `None` if it does not."""
    leaf, said = contents.leaves[i], file.words["values"].get(name)
    stored, transforms = file.words["ties"].get(name, (name, ""))
    if said is not None:
        if i not in contents.values and not _is_scalar_of_numpy(leaf, said):
            hint = "; eqx.filter_eval_shape keeps Python's numbers" if i in contents.abstract else ""
            return f"{name!r} is {_leaf_in_words(contents, i)} in the tree, {said[0]} in the {file.noun}{hint}"
    elif i not in contents.names:
        there = describe(file.specs[stored])
        hint = "; write jnp.asarray(...) in the tree" if i in contents.values else ""
        return f"{name!r} is {_leaf_in_words(contents, i)} in the tree, an array {there} in the {file.noun}{hint}"
    elif not transforms:
        here, there = contents.spec(i), file.specs[stored]
        if isinstance(leaf, np.ndarray) and leaf.dtype != file.dtype(stored) and here == there:
            return f"{name!r} is {leaf.dtype} of NumPy in the tree, {file.dtype(stored)} in the {file.noun}"
        if here != there:
            return f"{name!r} is {describe(here)} in the tree, {describe(there)} in the {file.noun}"
    return None


def _is_scalar_of_numpy(leaf: object, said: Sequence[str]) -> bool:
    """Returns whether a leaf represents this NumPy scalar without its value, as in `eqx.filter_eval_shape`."""
    value = from_words(said)
    if not isinstance(leaf, jax.ShapeDtypeStruct) or not isinstance(value, (np.number, np.bool_)):
        return False
    return array_spec(leaf) == array_spec(value)


def _leaf_in_words(contents: Contents, i: int) -> str:
    """Describes a leaf that differs from the file: an array by its spec, a number by its type."""
    if i in contents.names:
        return f"an array {describe(contents.spec(i))}"
    said = contents.values.get(i)
    return said[0] if said is not None else f"{contents.structure.values[i]}"


def unlike_ties(contents: Contents, leaves: Mapping[str, int], file: File) -> Iterator[str]:
    """Yields a sentence for each tie of trained parameters that only the tree or only the file has."""
    first = contents.structure.first
    if not file.words["ties"] and not [i for i in contents.names if first[i] != i]:
        return
    aliases, apart = contents.aliases, contents.in_states | contents.frozen
    names = {i: name for name, i in leaves.items() if contents.structure.is_parameter(i) and i not in apart}
    roots = {i: aliases[i].source if i in aliases else i for i in names}
    for alias, (source, transforms) in file.words["ties"].items():
        here, there = leaves.get(alias), leaves.get(source)
        if here is None or there is None or not (transforms or {here, there} <= names.keys()):
            continue
        if transforms:
            if here not in aliases or (aliases[here].source, str(aliases[here])) != (there, transforms):
                yield (
                    f"{alias!r} is {transforms} of {source!r} in the {file.noun}, but the tree declares no such tie:"
                    f" declare it, tp.field(tied_to=..., transform={transforms})"
                )
        elif roots[here] != roots[there] and not {here, there} & contents.abstract:
            call = f"tp.tie(model, {alias!r}, to={source!r})"
            yield f"{alias!r} and {source!r} are one array in the {file.noun} only: {call}"
    for i, name in names.items():
        same = names.get(first[i], name)
        if same != name and {same, name} <= file.specs.keys():
            yield f"{same!r} and {name!r} are one array in the tree only: tp.untie(model, {name!r})"


def unlike_states(contents: Contents, file: File) -> Iterator[str]:
    """Yields a sentence for each state of another kind, form or rule, with the calls that make one that fits."""
    for path, state in contents.states.items():
        here, there = contents.states_in_words[path], file.words["states"].get(path)
        if there is None:
            yield from _unlike_optax(path, here, file)
            continue
        form, other = form_of(here), form_of(there)
        if form != other:
            names = f"saving.names(path, {path!r})" if path else "saving.names(path)"
            yield (
                f"the state at {path!r} has the form {other!r} in the {file.noun}, {form!r} in the tree. A plan "
                f"converts it:\nstate = saving.plan(model, model).state({names}, like=tx.init(model))"
            )
            continue
        structure = index_of(state.layout).structure
        known = dict(zip(structure.paths, structure.specs, strict=True))
        is_whole = any(each["problem"] for each in here["divisions"] + there["divisions"])
        # Of parameters that the tree lacks the arrays tell.
        if together(here) != together(there) and (is_whole or specs_in(there).items() <= known.items()):
            there, here = (first_few([path for path, *_ in words["slots"]]) for words in (there, here))
            yield (
                f"the state at {path!r} has other histories in the {file.noun} than in the tree, and is not kept leaf "
                f"by leaf, so it fits only the parameters that it was made for: {there} in the {file.noun}, {here} in "
                "the tree; begin with tx.init(model)"
            )


def _unlike_optax(path: str, words: Mapping[str, Any], file: File) -> Iterator[str]:
    """Yields a sentence if a file has a state of plain Optax at a path: arrays of the parameters, below other names."""
    start = f"{path}." if path else ""
    names = [name[len(start) :] for name in file.specs if name.startswith(start)]
    is_ours = file.words["states"] if not path else any(name.startswith(("runs.", "held.")) for name in names)
    ends = tuple([f".{name}" for name, *_ in words["slots"]])
    if not is_ours and any(name.endswith(ends) for name in names):
        yield (
            f"the state at {path!r} is one of plain Optax in the {file.noun}, of optim.trainable in the tree: "
            "load it into a state of plain Optax, and write state = optim.from_optax(tx, state, model)"
        )


def unlike_joined(contents: Contents, file: File) -> Iterator[str]:
    """Yields a sentence if joined arrays hold other parameters than in the file, or in another order.

    Their lengths may still be equal.
    """
    for path, restructure in contents.ways_back.items():
        here, there = places_in_words(restructure), file.words["restructures"].get(path)
        for name in here if there is None else here | there:
            ours, theirs = (_location(each, name) for each in (here, there or here))
            if ours != theirs:
                yield f"in the form that {path!r} opens, {name!r} is {ours} in the tree, {theirs} in the {file.noun}"
                break
    for path, words in contents.states_in_words.items():
        here, there = (_pieces_in(each) for each in (words, file.words["states"].get(path)))
        for at, pieces in here.items():
            pairs = itertools.zip_longest(pieces, there.get(at, pieces), fillvalue="none")
            ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            if ours != theirs:
                yield f"in the state at {path!r}, {at[-1]!r} holds {ours} in the tree, {theirs} in the {file.noun}"
                break


def _location(locations: Mapping[str, Any], name: str) -> str:
    location, shape = locations.get(name, ("nothing", []))
    return f"{location} of shape {tuple(shape)}"


def _pieces_in(words: Mapping[str, Any] | None) -> dict[tuple[str, ...], list[str]]:
    """Returns the parameters in each array of a state, in order, by history and name."""
    if words is None:
        return {}
    pieces = [f"{path!r} of shape {tuple(shape)}" for path, _, shape, _ in words["slots"]]
    return {
        (*history.key, name): [pieces[slot] for slot in said["blocks"][block][0]]
        for history, said in zip(histories_in(words), words["divisions"], strict=True)
        for name, (block, *_) in said["owners"].items()
    }
