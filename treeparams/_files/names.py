"""Named arrays, each read when you access it; and names as files spell them."""

import dataclasses
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from .._tree.paths import join_path, nearest, quote, split_path, unquote
from .._tree.structure import Spec
from .._tree.text import describe, first_few, in_short
from .file import File, file_at
from .values import Value, from_words

_INDEX = ".safetensors.index.json"  # Hugging Face's list of the files that a checkpoint is in


def name_of(path: str) -> str:
    """Returns a path as a name in the format, in which one name is reserved."""
    return '"__metadata__"' if path == "__metadata__" else path


def split_name(name: str) -> tuple[str, ...]:
    r"""Returns the entries of a name, as of a path; if it is not a path, the texts between its dots, quoted.

    >>> split_name('"a.b".w'), split_name('"a.w')
    (('"a.b"', 'w'), ('"\\"a"', 'w'))
    """
    try:
        return split_path(name)
    except ValueError:  # an array in a file of another program
        return tuple(map(quote, name.split(".")))


def bare(name: str) -> str:
    """Returns a name without quotes, as people write a key with dots.

    >>> bare('x."layers.0.weight"'), bare("layers.0.weight")
    ('x.layers.0.weight', 'layers.0.weight')
    """
    return ".".join(map(unquote, split_name(name))) if '"' in name else name


def head_of(name: str) -> str:
    """Returns the first entry of a name: the item of a file that it belongs to."""
    return join_path(split_name(name)[:1])


def is_below(name: str, node: str) -> bool:
    """Returns whether a name is that of a node, or below it."""
    return f"{name}.".startswith(f"{node}.")


def heads_of(names: Collection[str], among: Collection[str]) -> list[str]:
    """Returns the nodes that have all of these names below them, such as the model in a file of several items."""
    heads = dict.fromkeys(map(head_of, among))
    return [head for head in heads if names and all(f"{head}.{name}" in among for name in names)]


@dataclasses.dataclass(frozen=True, eq=False, repr=False)
class Names(Mapping[str, Any]):
    """Named arrays, each read when you access it.

    Attributes:
        specs: the shape and the dtype in JAX for each name, including further names of an array.
        read: returns the array of a name.
        aliases: for each further name of an array, its first name.
        states: the words about the states of optimisers, by path.
        numbers: the numbers and texts beside the arrays, by path; `None` if the source does not record them.
        unkeyed: of each node whose children go by number its class and their number, by path; `None` if the source
            does not record them.
        computed: the further names of arrays that a transform makes from others, such as a transposed tied weight. A
            source need not have these arrays.
        is_file: whether each array is read into a new buffer.
    """

    specs: Mapping[str, Spec]
    read: Callable[[str], Any]
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    states: Mapping[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    numbers: Mapping[str, Value] | None = None
    unkeyed: Mapping[str, Any] | None = None
    computed: Collection[str] = ()
    is_file: bool = False

    def __getitem__(self, name: str) -> Any:
        if name not in self.specs:
            raise KeyError(f"{name!r}{nearest(name, self.specs)}")
        return self.read(name)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.specs if name not in self.aliases)

    def __len__(self) -> int:
        return len(self.specs) - len(self.aliases)

    def __repr__(self) -> str:
        return f"Names({', '.join(f'{name}: {describe(self.specs[name])}' for name in self)})"

    def below(self, path: str) -> "Names":
        """Returns the names below a node, without its path."""
        if not any(is_below(name, path) for name in self.specs):
            heads = dict.fromkeys(map(head_of, self.specs))
            raise ValueError(f"nothing lies below {path!r}{nearest(path, heads)}")
        return self.under(lambda name: name[len(path) + 1 :] if is_below(name, path) else None)

    def under(self, new: Callable[[str], str | None]) -> "Names":
        """Returns the same arrays under new names; an array whose new name is `None` is left out."""
        its = lambda values: values and {to: each for name, each in values.items() if (to := new(name)) is not None}
        names = its({name: name for name in self.specs})
        return dataclasses.replace(
            self,
            specs=its(self.specs),
            read=lambda name: self[names[name]],
            aliases={alias: to for alias, name in its(self.aliases).items() if (to := new(name)) is not None},
            states=its(self.states),
            numbers=its(self.numbers),
            unkeyed=its(self.unkeyed),
            computed=its(dict.fromkeys(self.computed)),
        )

    def spelt_as(self, known: Collection[str]) -> "Names":
        """Returns the same arrays under the known names, from which those here may differ in quotes.

        The keys of a flat dictionary are names as they are. In the paths of a layout, a file or a state they have
        quotes.
        """
        have = self.specs.keys() | (self.numbers or {}).keys()
        lost = [name for name in known if name not in have]
        by_text = {bare(name): name for name in have if name not in known} if lost else {}
        spelt = {by_text[bare(name)]: name for name in lost if bare(name) in by_text}
        return self.under(lambda name: spelt.get(name, name)) if spelt else self

    def tied_as(self, known: "Names") -> "Names":
        """Returns the same arrays under the known names, each under all names of its tie.

        A moment or an average has each tie once, under one of its names.
        """
        given = self.spelt_as(known.specs)
        there = {known.aliases.get(name, name): name for name in reversed([*given.specs])}
        roots = {name: known.aliases.get(name, name) for name in known.specs if name not in given.specs}
        more = {name: there[root] for name, root in roots.items() if root in there}
        specs = {**given.specs, **{name: given.specs[other] for name, other in more.items()}}
        return Names(specs, lambda name: given[more.get(name, name)], {**given.aliases, **more})


def names_in(source: object) -> Names | None:
    """Returns the names in a file, a list of files or a folder; `Names` unchanged; and `None` for any other source."""
    if isinstance(source, Names):
        return source
    several: Sequence[Any] = source if isinstance(source, (list, tuple)) else [source]
    if not several or not all(isinstance(each, (str, os.PathLike)) for each in several):
        return None
    return _of_files([part for path in several for part in _parts_of(os.fsdecode(path))])


def _parts_of(path: str) -> list[str]:
    """Returns the files of a checkpoint: of a folder or of an index those that hold its arrays; else the path alone."""
    if os.path.isdir(path):
        there = sorted(os.listdir(path))
        indices = [name for name in there if name.endswith(_INDEX)]
        found = indices if len(indices) == 1 else [name for name in there if name.endswith(".safetensors")]
        if not found:
            raise ValueError(f"the folder {path!r} has no *.safetensors; it has {first_few(there) or 'nothing'}")
        return [part for name in found for part in _parts_of(os.path.join(path, name))]
    if not path.endswith(_INDEX):
        return [path]
    try:
        with open(path, encoding="utf-8") as file:
            names = dict.fromkeys(map(str, json.load(file)["weight_map"].values()))
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"{path!r} is no index, JSON with a weight_map of files: {in_short(error)}") from None
    return [os.path.join(os.path.dirname(path), name) for name in names]


def _of_files(paths: Sequence[str]) -> Names:
    """Returns the names of several files together, such as those of a model that is saved in shards."""
    stored, aliases, computed = dict[str, tuple[File, str]](), dict[str, str](), list[str]()
    states, numbers, unkeyed = dict[str, Any](), dict[str, Value](), dict[str, Any]()
    specs, files = dict[str, Spec](), list(map(file_at, paths))
    for file in files:
        with file.understood():
            words = file.words
            its = {alias: source for alias, (source, transforms) in words["ties"].items() if not transforms}
            # Hugging Face writes a tied tensor once, and its other names as metadata, each with the stored one.
            also = {} if file.is_ours else file.metadata
            its |= {alias: to for alias, to in also.items() if to in file.specs and alias not in file.specs}
            own = {name: (file, its.get(name, name)) for name in (*file.specs, *its)}
            specs |= {name: file.specs[at] for name, (_, at) in own.items()}
            states |= words["states"]
            numbers |= {path: from_words(said) for path, said in words["values"].items()}
            unkeyed |= {at: [str(kind), int(count)] for at, (kind, count) in words.get("unkeyed", {}).items()}
            computed += words["ties"].keys() - its.keys()
        twice = own.keys() & stored.keys()
        if twice:
            raise ValueError(f"{min(twice)!r} is in two of the files {first_few(paths)}")
        stored |= own
        aliases |= its
    said = numbers if all(file.is_ours for file in files) else None
    marks = unkeyed if all("unkeyed" in file.words for file in files) else None
    read = lambda name: stored[name][0].read(stored[name][1])
    return Names(specs, read, aliases, states, said, marks, computed, is_file=True)
