"""save, load, metadata: a tree in one file, and back into a tree like it."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import jax.tree_util as jtu
import numpy as np

from .._layout import index_of
from .._paths import nearest
from .._recognise import name_deleted
from .._text import describe, first_lines, quoted
from .._ties import Alias
from .._types import PyTree
from ._arrays import placed
from ._contents import Contents, heads_of, histories_in, places_in_words, specs_in, state_in_words
from ._file import PREFIX, File, write

M = TypeVar("M")


def save(path: Any, model: PyTree, *, metadata: Mapping[str, str] | None = None) -> None:
    """Writes all arrays of a tree to a file in the safetensors format, each once, by its path.

    >>> import os, tempfile, jax.numpy as jnp, optax
    >>> from treeparams import optim, saving
    >>> path = os.path.join(tempfile.mkdtemp(), "run.safetensors")
    >>> shared = jnp.ones(2)
    >>> model = {"embed": shared, "head": shared, "steps": jnp.array(3)}
    >>> tx = optim.trainable(optax.adam(0.1))
    >>> saving.save(path, {"model": model, "optimiser": tx.init(model)}, metadata={"run": "7"})
    >>> list(saving.names(path, "model"))
    ['embed', 'steps']

    Trained and frozen parameters, integers, bools, keys, of JAX or NumPy, in the dtypes they have. What is no array -
    functions, Python numbers, structure - is not in the file: it comes from the code that builds the model. The file
    says which paths are one array, what each array's checksum is, and which parameters each array of an optimiser's
    state is of. Of a `Restructure` in the tree it says which parameter lies where in what that opens. Anything that
    reads safetensors reads it. Complex numbers are stored as pairs, and dtypes that the format lacks as bytes.

    The file takes the place of the one before when all of it is on the disk: a process that is killed, or a disk that
    is full, leaves the old one.

    Args:
        path: of the file; `.safetensors` is usual.
        model: any pytree: a model, a state, an average, or a dictionary of these.
        metadata: text by text, for people and other programs; `saving.metadata(path)` reads it.

    Raises:
        OSError: the file cannot be written.
        ValueError: an array has no values, lies over several processes (Orbax is for these), or is of a dtype that
            the format cannot hold; a name is not Unicode text; `metadata` has a name that starts with `treeparams.`.
        TypeError: `metadata` is not text by text; a mapping that is no pytree stands in the tree.
    """
    said = dict(metadata) if isinstance(metadata, Mapping) else metadata or {}
    if not isinstance(said, dict) or not all(isinstance(each, str) for pair in said.items() for each in pair):
        raise TypeError(f"metadata is text by text, {{str: str}}, got {said!r}")
    for name in said:
        if name.startswith(PREFIX):
            raise ValueError(f"metadata {name!r}: names that start with {PREFIX!r} are this library's own")
    contents = Contents(model)
    for at, leaf in zip(contents.structure.paths, contents.leaves, strict=True):
        if isinstance(leaf, Mapping):
            raise TypeError(f"{at!r} is a mapping and no pytree, so none of its arrays would be saved; write dict(...)")
    for name in [*contents.names.values(), *said, *said.values()]:
        try:
            name.encode()
        except UnicodeEncodeError:
            raise ValueError(f"{name!r} is not Unicode text, so it cannot be a name in a file") from None
    try:
        contents.store_what_differs()
        frozen = contents.frozen
        words = {
            "ties": contents.ties,
            "states": {path: state_in_words(state) for path, state in contents.states.items()},
            "restructures": {path: places_in_words(each) for path, each in contents.ways_back.items()},
            "frozen": [name for name, i in contents.stored.items() if i in frozen],
        }
        write(path, {name: contents.leaves[i] for name, i in contents.stored.items()}, words, said)
    except RuntimeError as error:
        name_deleted(error, model)
        raise


def metadata(path: Any) -> dict[str, str]:
    """What was passed to `save` as metadata, or what another program has written there.

    >>> import os, tempfile, jax.numpy as jnp
    >>> from treeparams import saving
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> saving.save(path, {"w": jnp.ones(2)}, metadata={"accuracy": "0.93"})
    >>> saving.metadata(path)
    {'accuracy': '0.93'}

    Args:
        path: of a safetensors file.

    Returns:
        Text by text.

    Raises:
        OSError: there is no such file.
        ValueError: it is no safetensors file, or damaged.
    """
    return File(path).metadata


def load(path: Any, like: M, *, checksum: bool = True) -> M:
    """Reads a file of `save` into a tree like the one that was saved.

    >>> import os, tempfile, equinox as eqx, jax, treeparams as tp
    >>> from treeparams import saving
    >>> path = os.path.join(tempfile.mkdtemp(), "model.safetensors")
    >>> make = lambda key: eqx.nn.MLP(2, 1, 4, 1, key=key)
    >>> model = make(jax.random.key(0))
    >>> saving.save(path, model)
    >>> bool(tp.diff(saving.load(path, make(jax.random.key(1))), model))
    False
    >>> shapes = eqx.filter_eval_shape(make, jax.random.key(1))  # draws no random numbers
    >>> bool(tp.diff(saving.load(path, shapes), model))
    False

    **By name.** Each array goes to its path, whatever the order of fields. All that can be wrong is looked at before
    the first array is made: names, shapes, dtypes, ties, histories, checksums. Where names or shapes have changed
    since, `saving.plan(path, model, rename=...)` says what goes where.

    Args:
        path: of a file that `save` wrote.
        like: a tree of the same structure, shapes, dtypes and ties. Of it are all leaves that are no arrays, and where
            the arrays are to lie: on which devices, by which sharding, in NumPy or in JAX. A leaf may be a
            `jax.ShapeDtypeStruct`, and takes the ties of the file. A state of an optimiser must have the histories of
            the saved one: that of `tx.init` has one; the error says the calls that make another.
        checksum: whether to compare the arrays with their checksums, which takes about as long as reading them again.

    Returns:
        The tree, in buffers of its own, with one array at all paths of a tie. No array has a weak type.

    Raises:
        OSError: there is no such file.
        ValueError: the file is damaged or none of `save`; it does not fit `like`, with all that does not.
    """
    file = File(path)
    if not file.is_ours:
        raise ValueError(
            f"{file.path!r} was not written by saving.save, so it does not say what is tied; write "
            "saving.plan(path, model)(path), which says what goes where"
        )
    contents = Contents(like)
    leaves = _leaves_in(contents, file)
    wrong = list(_unlike_states(contents, file))
    wrong = wrong or [*_unlike_arrays(contents, leaves, file), *_unlike_ties(contents, leaves, file)]
    wrong = wrong or list(_unlike_joined(contents, file))
    if wrong:
        raise ValueError(f"{file.path!r} does not fit the tree:\n{first_lines(wrong, 20)}")
    known = contents.aliases
    contents.aliases = {}
    for alias, (source, transforms) in file.words["ties"].items():
        its = known[leaves[alias]].transforms if transforms else ()
        contents.aliases[leaves[alias]] = Alias(leaves[alias], leaves[source], its)
    if checksum:
        for name in file.specs:
            file.check(name)
    values = {leaves[name]: placed(name, file.read(name), contents.leaves[leaves[name]]) for name in file.specs}
    return jtu.tree_unflatten(contents.treedef, contents.leaves_with(values))


def _leaves_in(contents: Contents, file: File) -> dict[str, int]:
    """The leaves by their names in the file, where the histories of a state may stand in another order."""
    places: dict[str, str] = {}
    for path, state in contents.states.items():
        here, there = (_places_of(words, path) for words in (state_in_words(state), file.words["states"].get(path)))
        for paths, ours in here.items():
            places |= dict(zip(ours, there.get(paths, ours), strict=True))
    names = {}
    for i, name in contents.names.items():
        start = next((ours for ours in places if name == ours or name.startswith(f"{ours}.")), "")
        names[places.get(start, "") + name[len(start) :]] = i
    return names


def _places_of(words: Mapping[str, Any] | None, path: str) -> dict[Any, tuple[str, str]]:
    """Where the state and the count of each history are, by whether it runs and by its parameters."""
    if words is None:
        return {}
    start = f"{path}." if path else ""
    return {
        (place.partition(".")[0], *paths): (f"{start}{place}", f"{start}counts.{number}")
        for number, (place, paths) in enumerate(histories_in(words))
    }


def _unlike_arrays(contents: Contents, leaves: Mapping[str, int], file: File) -> Iterator[str]:
    """Says which arrays are in one only, or are others."""
    there = dict.fromkeys([*file.specs, *file.words["ties"]])
    heads = heads_of(leaves, there)
    if heads:
        yield (
            f"the file holds such a tree below {quoted(heads)}: load into a dictionary of all that is in the file, or "
            f"take one alone, names = saving.names(path, {heads[-1]!r}), saving.plan(names, tree)(names)"
        )
        return
    for name in [name for name in leaves if name not in there]:
        yield f"{name!r} is in the tree and not in the file{nearest(name, there)}"
    head = lambda name: name.partition(".")[0]
    heads, lacking = set(map(head, leaves)), [name for name in there if name not in leaves]
    for name in [name for name in lacking if head(name) in heads]:
        yield f"{name!r} is in the file and not in the tree{nearest(name, leaves)}"
    for part in dict.fromkeys(head(name) for name in lacking if head(name) not in heads):
        yield (
            f"the file also holds {part!r}, which the tree has not; to take a part of a file, as 'model', write "
            "names = saving.names(path, 'model'), saving.plan(names, model)(names)"
        )
    plain = {alias: source for alias, (source, transforms) in file.words["ties"].items() if not transforms}
    for name in [name for name in there if name in leaves and (name in plain or name in file.specs)]:
        stored = plain.get(name, name)
        here, there = contents.spec(leaves[name]), file.specs[stored]
        leaf = contents.leaves[leaves[name]]
        if isinstance(leaf, np.ndarray) and leaf.dtype != file.dtype(stored) and here == there:
            yield f"{name!r} is {leaf.dtype} of NumPy in the tree, {file.dtype(stored)} in the file"
        if here != there:
            yield f"{name!r} is {describe(here)} in the tree, {describe(there)} in the file"


def _unlike_ties(contents: Contents, leaves: Mapping[str, int], file: File) -> Iterator[str]:
    """Says what is one array in the tree or in the file only."""
    aliases, first = contents.aliases, contents.structure.first
    names = {i: name for name, i in leaves.items()}
    source_of = lambda i: aliases[i].source if i in aliases else i
    for alias, (source, transforms) in file.words["ties"].items():
        if alias not in leaves or source not in leaves:
            continue
        here, there = leaves[alias], leaves[source]
        if not contents.structure.is_parameter(here):
            continue
        if transforms:
            if here not in aliases or (source_of(here), str(aliases[here])) != (source_of(there), transforms):
                yield (
                    f"{alias!r} is {transforms} of {source!r} in the file, and the tree declares no such tie: "
                    f"declare it, tp.field(tied_to=..., transform={transforms})"
                )
        elif source_of(here) != source_of(there) and not {here, there} & contents.abstract:
            yield f"{alias!r} and {source!r} are one array in the file only: tp.tie(model, {alias!r}, to={source!r})"
    for i, name in names.items():
        same = names[first[i]]
        if contents.structure.is_parameter(i) and same != name and {same, name} <= file.specs.keys():
            yield f"{same!r} and {name!r} are one array in the tree only: tp.untie(model, {name!r})"


def _unlike_states(contents: Contents, file: File) -> Iterator[str]:
    """Says which states have other histories, and how to make one that fits."""
    for path, state in contents.states.items():
        here, there = state_in_words(state), file.words["states"].get(path)
        if there is None or _parts_in(here) == _parts_in(there):
            continue
        structure = index_of(state.layout).structure
        known = dict(zip(structure.paths, structure.specs, strict=True))
        if not specs_in(there).items() <= known.items():  # the names and shapes of arrays tell, or `_unlike_joined`
            continue
        yield (
            f"the state at {path!r} has other histories than the tree's: {_histories(there)} in the file, "
            f"{_histories(here)} in the tree. A state like the saved one is made by\n{calls_for(there)}"
        )


def _unlike_joined(contents: Contents, file: File) -> Iterator[str]:
    """Says which arrays hold other parameters, or in another order, than in the file: joined, they may be as long."""
    for path, restructure in contents.ways_back.items():
        here, there = places_in_words(restructure), file.words["restructures"].get(path)
        for name in here if there is None else here | there:
            ours, theirs = (_place(each, name) for each in (here, there or here))
            if ours != theirs:
                yield f"of what {path!r} opens, {name!r} is {ours} in the tree, {theirs} in the file"
                break
    for path, state in contents.states.items():
        here, there = (_pieces_in(words) for words in (state_in_words(state), file.words["states"].get(path)))
        for at, pieces in here.items():
            pairs = itertools.zip_longest(pieces, there.get(at, pieces), fillvalue="none")
            ours, theirs = next((pair for pair in pairs if pair[0] != pair[1]), ("", ""))
            if ours != theirs:
                yield f"in the state at {path!r}, {at[-1]!r} holds {ours} in the tree, {theirs} in the file"
                break


def _place(places: Mapping[str, Any], name: str) -> str:
    place, shape = places.get(name, ("nothing", []))
    return f"{place} of shape {tuple(shape)}"


def _pieces_in(words: Mapping[str, Any] | None) -> dict[Any, list[str]]:
    """The parameters in each array of a state, in order, by history and name."""
    if words is None:
        return {}
    pieces = [f"{path!r} of shape {tuple(shape)}" for path, _, shape, _ in words["slots"]]
    return {
        (place.partition(".")[0], *paths, name): [pieces[slot] for slot in said["blocks"][block][0]]
        for (place, paths), said in zip(histories_in(words), words["divisions"], strict=True)
        for name, (block, *_) in said["owners"].items()
    }


def _parts_in(words: Mapping[str, Any]) -> Any:
    """What a state is said to be of, whatever the order of its histories."""
    together: dict[int, list[str]] = {}
    histories = [(place.partition(".")[0], *paths) for place, paths in histories_in(words)]
    for origin, (_, *paths) in zip(words["origins"], histories, strict=True):
        together.setdefault(origin, []).extend(paths)
    parts = zip(histories, words["origins"], strict=True)
    return specs_in(words), {history: frozenset(together[origin]) for history, origin in parts}


def _histories(words: Mapping[str, Any]) -> str:
    running, held = (", ".join(str(len(each)) for each in words[side]) for side in ("running", "held"))
    return f"of {running or 'no'} parameters" + (f" and {held} that wait" if held else "")


def calls_for(words: Mapping[str, Any]) -> str:
    """The calls that make a state of these histories."""
    places = {path: [path, *aliases] for path, aliases, *_ in words["slots"]}  # a tie is named whole
    running, held = ([[at for p in paths for at in places[p]] for paths in words[side]] for side in ("running", "held"))
    together: dict[int, list[str]] = {}
    for origin, paths in zip(words["origins"], [*running, *held], strict=True):
        together.setdefault(origin, []).extend(paths)
    lines, trained = ["state = tx.init(model)"], list[str]()
    for paths in together.values():
        trained += paths
        reset = ", reset=True" if len(lines) == 1 else ""
        lines.append(f"state = optim.set_trainable(tx, state, model, {trained}{reset})")
    if held:
        now = [path for paths in running for path in paths] or "jax.tree.map(lambda _: False, model)"
        lines.append(f"state = optim.set_trainable(tx, state, model, {now})")
    return "\n".join(lines)
