"""A file on its way into a tree: whether it fits, how the two differ, and the tree with what the file has."""

import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import equinox as eqx
import numpy as np

from .._files.arrays import Like, array_spec, placed, placed_in_turn
from .._files.file import File
from .._files.names import head_of, heads_of, is_below, name_of, split_name
from .._files.values import from_words, histories_in
from .._forms.restructure import Restructure
from .._slots.ties import Alias
from .._tree.paths import join_path, nearest
from .._tree.text import describe, first_few, first_lines, quoted
from .._tree.types import PyTree
from ._contents import Contents, places_in_words

_ARRAYS_ALONE = "; saving.plan(path, tree)(path) loads only the arrays of the file, no numbers"


class Reading:
    """A file, or a message, that is read into a tree."""

    def __init__(self, tree: PyTree, file: File) -> None:
        self.contents, self._file = Contents(tree), file

    @functools.cached_property
    def leaves(self) -> dict[str, int]:
        """The leaves by their names in the file, in which the histories of a state may have another order.

        After `fit`, those that are missing in an older file are left out.
        """
        contents = self.contents
        leaves = {contents.names.get(i) or name_of(path): i for i, path in enumerate(contents.structure.paths)}
        for path, words in contents.states_in_words.items():
            start, here = f"{path}." if path else "", histories_in(words)
            there = {each.key: each for each in histories_in(self._file.words["states"].get(path, words))}
            pairs = [(ours, there.get(ours.key, ours)) for ours in here]
            moves = {start + ours.path: start + theirs.path for ours, theirs in pairs}
            moves |= {f"{start}counts.{ours.number}": f"{start}counts.{theirs.number}" for ours, theirs in pairs}
            of_name = {name: next((ours for ours in moves if is_below(name, ours)), "") for name in leaves}
            leaves = {moves.get(ours, "") + name[len(ours) :]: leaves[name] for name, ours in of_name.items()}
        return leaves

    def fit(self) -> None:
        """Gives the tree the ties of the file; raises an error that lists the differences if it does not fit."""
        contents, leaves, file = self.contents, self.leaves, self._file
        for path in contents.states_in_words:
            name = name_of(f"{path}.still" if path else "still")
            if name in leaves and name not in file.specs:  # saved before there were counts of lost steps
                i = leaves.pop(name)
                contents.leaves[i] = placed(name, np.zeros(*contents.structure.spec(i)[:2]), contents.leaves[i])
        wrong = self._differences()
        if wrong:
            raise ValueError(f"{file.source.name} does not fit the tree:\n{first_lines(wrong, 20)}")
        known = contents.aliases
        ties = [(leaves[alias], leaves[source], said) for alias, (source, said) in file.words["ties"].items()]
        contents.aliases = {i: Alias(i, source, known[i].transforms if said else ()) for i, source, said in ties}

    def tree(self, arrays: Iterator[tuple[str, Any]]) -> PyTree:
        """Returns the tree with the arrays, numbers and texts of a file that fits."""

        def with_its_leaf(name_and_array: tuple[str, Any]) -> tuple[int, Like]:
            """Of one array; `map` releases it before the next one is read."""
            (name, array), i = name_and_array, self.leaves[name_and_array[0]]
            return i, (name, array, self.contents.leaves[i])

        with self._file.understood():
            numbers = {self.leaves[name]: from_words(said) for name, said in self._file.words["values"].items()}
        values = dict(placed_in_turn(map(with_its_leaf, arrays))) | numbers
        return self.contents.tree(self.contents.leaves_with(values))

    # -- How they differ

    def _differences(self) -> list[str]:
        """Returns a sentence for each difference of a tree from a file, of the first kind of which there are any."""
        leaves, file, paths = self.leaves, self._file, self.contents.structure.paths
        there = itertools.chain(file.specs, file.words["ties"], file.words["values"])
        pairs = ((name, paths[leaves[name]] if name in leaves else name) for name in there)
        of_nodes = unlike_nodes(self.contents, file.words.get("unkeyed"), pairs, file.noun)
        return (
            list(dict.fromkeys(of_nodes.values()))
            or list(self._unlike_states())
            or [*self.unlike_leaves(), *self._unlike_ties()]
            or list(self._unlike_joined())
        )

    def unlike_leaves(self) -> Iterator[str]:
        """Yields a sentence for each array, number or text that is missing in the tree or the file, or differs."""
        contents, leaves, file = self.contents, self.leaves, self._file
        noun, said = file.noun, file.words["values"]
        there = dict.fromkeys([*file.specs, *file.words["ties"], *said])
        here = {name: i for name, i in leaves.items() if i in contents.names or i in contents.values}
        # Equal names, however many, are never those of another tree below a node, and none is missing.
        heads = heads_of(here, there) if here.keys() != there.keys() else []
        if heads:
            alone = f"or load one alone, names = saving.names(path, {heads[-1]!r}), saving.plan(names, tree)(names)"
            yield f"the {noun} has such a tree below {quoted(heads)}: load into a dictionary of all its trees, {alone}"
            return
        for name in [name for name in here if name not in there]:
            hint = _ARRAYS_ALONE * (here[name] in contents.values)
            yield f"{name!r} is in the tree and not in the {noun}{nearest(name, there)}{hint}"
        rest = [name for name in there if name not in leaves]
        others = set(map(head_of, rest)) - set(map(head_of, leaves if rest else ()))
        for name in [name for name in rest if head_of(name) not in others]:
            yield f"{name!r} is in the {noun} and not in the tree{nearest(name, here)}{_ARRAYS_ALONE * (name in said)}"
        part = "names = saving.names(path, 'model'), saving.plan(names, model)(names)"
        hint = f"; to load a part of a file, such as 'model', write {part}" if noun == "file" else ""
        for other in sorted(others):
            yield f"the {noun} also has {other!r}, which the tree lacks{hint}"
        for name in [name for name in there if name in leaves]:
            i, spec = leaves[name], file.specs.get(name)
            leaf, is_same = contents.leaves[i], spec is not None and spec == contents.structure.specs[i]
            is_same = is_same and not (isinstance(leaf, np.ndarray) and leaf.dtype != file.dtype(name))
            if name in said or not is_same:  # words take long
                yield from self._unlike_leaf(i, name)

    def _unlike_leaf(self, i: int, name: str) -> Iterator[str]:
        """Yields how a leaf of the tree differs from the file's entry of the same name, if it does."""
        contents, file = self.contents, self._file
        leaf, spec, said = contents.leaves[i], contents.structure.specs[i], file.words["values"].get(name)
        stored, transforms = file.words["ties"].get(name, (name, ""))
        ours, is_same, hint = describe(spec) if spec else str(contents.structure.values[i]), False, ""
        if said is None:
            theirs = describe(file.specs[stored])
            is_same = spec is not None and (bool(transforms) or spec == file.specs[stored])
            if is_same and not transforms and isinstance(leaf, np.ndarray) and leaf.dtype != file.dtype(stored):
                is_same, ours, theirs = False, f"{leaf.dtype} of NumPy", str(file.dtype(stored))
        else:
            theirs = said[0]
            if i in contents.abstract:  # as `eqx.filter_eval_shape` has a scalar of NumPy
                value, hint = from_words(said), "; eqx.filter_eval_shape keeps Python's numbers"
                is_same = isinstance(value, (np.number, np.bool_)) and array_spec(value) == spec
        if i in contents.values:
            is_same, ours, hint = said is not None, contents.values[i][0], "; write jnp.asarray(...) in the tree"
        if not is_same:
            yield f"{name!r} is {ours} in the tree, {theirs} in the {file.noun}{hint}"

    def _unlike_ties(self) -> Iterator[str]:
        """Yields a sentence for each tie of trained parameters that only the tree or only the file has."""
        contents, leaves, file = self.contents, self.leaves, self._file
        structure, aliases, apart = contents.structure, contents.aliases, contents.in_states | contents.frozen
        is_tied = lambda i: structure.is_parameter(i) and i not in apart
        root = lambda i: aliases[i].source if i in aliases else i
        for alias, (source, transforms) in file.words["ties"].items():
            here, there = leaves.get(alias), leaves.get(source)
            if here is None or there is None:
                continue
            if transforms and (root(here), str(aliases.get(here))) != (there, transforms):
                what = f"{alias!r} is {transforms} of {source!r} in the {file.noun}, but the tree declares no such tie"
                yield f"{what}: declare it, tp.field(tied_to=..., transform={transforms})"
            are_apart = root(here) != root(there) and contents.abstract.isdisjoint((here, there))
            if not transforms and are_apart and is_tied(here) and is_tied(there):
                call = f"tp.tie(model, {alias!r}, to={source!r})"
                yield f"{alias!r} and {source!r} are one array in the {file.noun} only: {call}"
        names = {i: name for name, i in leaves.items() if is_tied(i)}
        for i, name in names.items():
            same = names.get(structure.first[i], name)
            if same != name and {same, name} <= file.specs.keys():
                yield f"{same!r} and {name!r} are one array in the tree only: tp.untie(model, {name!r})"

    def _unlike_states(self) -> Iterator[str]:
        """Yields a sentence for each state of plain Optax: arrays of the parameters, below other names than ours."""
        states, specs, noun = self._file.words["states"], self._file.specs, self._file.noun
        for path, words in self.contents.states_in_words.items():
            is_ours = path in states or (not path and states)
            start, ends = f"{path}." if path else "", tuple([f".{name}" for name, *_ in words["slots"]])
            if not is_ours and any(name.startswith(start) and name.endswith(ends) for name in specs):
                what = f"the state at {path!r} is one of plain Optax in the {noun}, of optim.trainable in the tree"
                how = "load it into a state of plain Optax, and write state = optim.from_optax(tx, state, model)"
                yield f"{what}: {how}"

    def _unlike_joined(self) -> Iterator[str]:
        """Yields a sentence if joined arrays hold other parameters than in the file, or in another order.

        Their lengths may still be equal.
        """
        contents, file = self.contents, self._file
        said = file.words["restructures"], file.words["states"]
        places = {path: places_in_words(each) for path, each in contents.of_class(Restructure).items()}
        pairs = list[tuple[str, Any, Any]]()
        for path, here in places.items():
            one, other = ({(path,): place for path, place in its.items()} for its in (here, said[0].get(path, here)))
            pairs.append((f"the form that {path!r} opens", one, other))
        for path, words in contents.states_in_words.items():
            pairs.append((f"the state at {path!r}", _pieces_in(words), _pieces_in(said[1].get(path, words))))
        for where, here, there in pairs:
            held = [dict.fromkeys(path for path, *_ in each) for each in (here, there)]
            name = next((name for name in (*here, *there) if here.get(name) != there.get(name)), None)
            if held[0].keys() != held[1].keys():
                ours, theirs = (first_few(list(names)) or "nothing" for names in held)
                plan = "state = saving.plan(old_model, model, rename={old: new}).state(path, like=tx.init(model))"
                what = f"{where} holds {ours} in the tree, {theirs} in the {file.noun}"
                yield f"{what}: load with the model that was saved, or map the names of a state, {plan}"
            elif name is not None:
                both = here.get(name), there.get(name)
                ours, theirs = (f"{its[0]} of shape {tuple(its[1])}" if its else "nothing" for its in both)
                yield f"in {where}, {' at '.join(name)!r} is {ours} in the tree, {theirs} in the {file.noun}"


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
    here, sentences = contents.structure.unkeyed, dict[str, str]()
    if marks is None or not (marks or here):
        return {}
    unlike = functools.cache(lambda *at: _unlike_node(contents, marks.get(at[0]), here.get(at[1]), at, noun))
    for name, target in pairs:
        source, goal = split_name(name), split_name(target)
        while source and goal and source[-1] == goal[-1]:
            source, goal = source[:-1], goal[:-1]
            if why := unlike(join_path(source), join_path(goal)):
                sentences[name] = why
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
    plan = f"write a plan that renames each of its arrays, rename={{{join_path([at[0], '0'])!r}: ...}}"
    return f"{says}register the class with jax.tree_util.register_pytree_with_keys, or {plan}"


def _pieces_in(words: Mapping[str, Any]) -> dict[tuple[str, ...], tuple[Any, Any]]:
    """Returns the place of each parameter in the joined arrays of a state, and its shape."""
    found = dict[tuple[str, ...], tuple[Any, Any]]()
    for said in words["divisions"]:
        for name, (block, *_) in said["owners"].items():
            for number, slot in enumerate(said["blocks"][block][0]):
                path, _, shape, _ = words["slots"][slot]
                found[path, name] = number, shape
    return found
