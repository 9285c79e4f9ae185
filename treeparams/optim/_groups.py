"""groups: an optimiser for each of several groups of parameters.

A rule inside `optim.trainable` sees only the trained parameters. So the entries of `{where: value}` are read in the
tree that the rule sees, and checked in the whole model, which `init` has.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.tree_util as jtu
import optax

from .._forms.form import Form
from .._slots.index import Index
from .._slots.where import Where, name_of
from .._tree.static_keys import contents
from .._tree.structure import is_array, structure_of
from .._tree.text import describe, quoted
from .._tree.types import PyTree
from ._state import Plain, extended, nodes_of


class Keys:
    """The keys of entries in a state, for the check at `init`.

    All are equal, and a pickled copy has none, so that programs and files do not depend on functions that select.
    """

    def __init__(self, wheres: Sequence[Where] = (), by_parameter: Callable[..., PyTree] | None = None) -> None:
        self.wheres = tuple(wheres)
        self.by_parameter = by_parameter  # reads factors by parameter in one update, see `told`

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Keys)

    def __hash__(self) -> int:
        return 0

    def __reduce__(self) -> Any:
        return Keys, ()

    def numbers_in(self, params: PyTree, *, is_whole: bool = False) -> dict[str, int]:
        """Returns the number of the entry that selects each parameter of a canonical tree; others are left out.

        If the tree is not a whole model, an entry may select nothing. It has nothing at aliases, so an entry that names
        one selects nothing in it.
        """
        structure = structure_of(params)[2]
        index = Index(structure, (True,) * len(structure.specs), ())
        found = index.first_entries(self.wheres, asked=None if is_whole else (), may_be_empty=not is_whole)
        return {structure.paths[leaf]: number for leaf, number in found.items()}


contents[Keys] = lambda _: ()


class Compared:
    """A node around a leaf, or around the stack of several, that is shown to a rule to compare the two.

    Its key is that of the leaf, so a rule that reads the last key of a path reads this.
    """

    def __init__(self, leaf: Any, key: Any = None) -> None:
        self.leaf = leaf
        self.key = jtu.GetAttrKey("leaf") if key is None else key


jtu.register_pytree_with_keys(
    Compared,
    lambda node: ([(node.key, node.leaf)], node.key),
    lambda key, leaves: Compared(next(iter(leaves)), key),
    lambda node: ([node.leaf], node.key),
)


def compared(form: Form, leaves: Sequence[Any]) -> PyTree:
    """Returns a form with a node around each leaf."""
    pairs = zip(form.keys, leaves, strict=True)
    return jtu.tree_unflatten(form.treedef, [Compared(leaf, path[-1] if path else None) for path, leaf in pairs])


def is_compared(tree: PyTree) -> bool:
    """Returns whether there are such nodes in a tree."""
    return bool(nodes_of(Compared, tree))


def without_nodes(tree: PyTree) -> PyTree:
    """Returns a tree with the leaves in place of such nodes."""
    is_node = Compared.__instancecheck__
    return jax.tree.map(lambda node: node.leaf if is_node(node) else node, tree, is_leaf=is_node)


class Group(NamedTuple):
    """One group: its name and its parameters."""

    name: str
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class GroupsState:
    """The state of `optim.groups`, a pytree.

    Attributes:
        inner_states: `{group: state}`, as `optax.partition` keeps it.
        groups: the name and the parameters of each group; static.
        keys: the keys that you passed to `optim.groups`; static.
    """

    inner_states: Any
    groups: tuple[Group, ...]
    keys: Keys


GroupsState.__module__ = "treeparams.types"
jtu.register_dataclass(GroupsState, ["inner_states"], ["groups", "keys"])


def groups(transformations: Mapping[Any, Plain], default: Plain | None = None) -> optax.GradientTransformationExtraArgs:
    """Uses a different optimiser for each group of parameters; the first group that selects a parameter gets it.

    >>> import equinox as eqx, jax, optax, treeparams as tp
    >>> from treeparams import optim
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> matrices = tp.leaves(lambda path, leaf: leaf.ndim == 2)
    >>> rules = {"layers.0": optax.sgd(0.1), matrices: optax.contrib.muon(1e-3)}
    >>> tx = optim.trainable(optim.groups(rules, default=optax.adam(1e-3)))
    >>> print(optim.report(tx, mlp))
    path             shape  dtype    group
    layers.0.weight  4,2    float32  layers.0
    layers.0.bias    4      float32  layers.0
    layers.1.weight  1,4    float32  tp.leaves(<lambda>)
    layers.1.bias    1      float32  default

    It is `optax.partition` with labels by path, for use inside `optim.trainable`. Each optimiser sees only the leaves
    of its group, so a norm in it is the norm of that group. **A tied parameter belongs to the group of its source**,
    the path that `tp.layout(model)` lists. A group is empty if all of its leaves are frozen. If you pass stacks in
    groups, as `tp.stack(model, groups={"a": ...})` makes them, each goes to the optimiser of its name, or to the
    default.

    Args:
        transformations: `{where: tx}`, with any hashable `where` of `tp.layout`.
        default: the optimiser for the leaves that no group selects.

    Returns:
        A transformation with a `GroupsState`; `optim.adjust(state, where, ...)` sets the hyperparameters of one group.

    Raises:
        ValueError: two groups have the same name; `init`: a leaf is in no group, and there is no default; a key selects
            nothing, or only parameters that earlier keys select, or only one place of an array that is at several.
        TypeError: not a dictionary of transformations; `init`: a leaf is not an array, as in a model.
    """
    if not isinstance(transformations, Mapping):
        raise TypeError(f"expected a dictionary {{where: transformation}}, got {describe(transformations)}")
    called = [*map(group_name, transformations), *(["default"] if default is not None else [])]
    if len(set(called)) < len(called):
        raise ValueError(f"two groups have the same name, among {', '.join(called)}; name functions by `def`")
    wheres = dict(zip(called, transformations, strict=False))
    rules = dict(zip(wheres, map(extended, transformations.values()), strict=True))
    if default is not None:
        rules["default"] = extended(default)
    by_name = _Groups(rules, wheres)
    return optax.GradientTransformationExtraArgs(by_name.init, by_name.update)


@dataclasses.dataclass(frozen=True, eq=False)
class _Groups:
    """The rules by the names of their groups, and the keys that they were given under; the default has none."""

    rules: Mapping[str, optax.GradientTransformationExtraArgs]
    wheres: Mapping[str, Any]

    def init(self, params: PyTree) -> Any:
        """Returns the states of the rules, and the parameters of each."""
        shown, params = params, without_nodes(params)
        structure = structure_of(params)[2]
        are_of_stacks, paths = are_stacks(params), structure.paths
        if None in structure.specs:
            path = paths[structure.specs.index(None)]
            raise TypeError(f"{path!r} is not an array; for models write optim.trainable(optim.groups(...))")
        found = self.of_stacks(params) if are_of_stacks else self.of_parameters(params, paths)
        members: dict[str, list[str]] = {name: [] for name in self.rules}
        for path, name in zip(paths, found, strict=True):
            members[name].append(path)
        groups = tuple(Group(name, tuple(own)) for name, own in members.items())
        keys = Keys([] if are_of_stacks else [*self.wheres.values()])
        return GroupsState(self._partition(groups).init(shown).inner_states, groups, keys)

    def update(self, updates: PyTree, state: Any, params: PyTree | None = None, **extra: object) -> tuple[PyTree, Any]:
        """Returns the updates, each from the rule of its group, and the next states."""
        updates, after = self._partition(state.groups).update(updates, state, params, **extra)  # reads `inner_states`
        return updates, dataclasses.replace(state, inner_states=after.inner_states)

    def of_parameters(self, params: PyTree, paths: Sequence[str]) -> list[str]:
        """Returns the group of each parameter, the first that selects it."""
        entries, names = Keys([*self.wheres.values()]).numbers_in(params), [*self.wheres]
        lost = [path for path in paths if path not in entries]
        if lost and len(self.rules) == len(self.wheres):  # no default
            raise ValueError(f"trained, but in no group: {quoted(lost, 5)}; write optim.groups({{...}}, default=...)")
        return [names[entries[path]] if path in entries else "default" for path in paths]

    def of_stacks(self, stacks: PyTree) -> list[str]:
        """Returns the group of each stack.

        Its rows have no paths here, so the group that it lies in among the stacks decides.
        """
        leaves = jtu.tree_flatten_with_path(stacks)[0]
        found = [_keys_of_stack(path, leaf) or () for path, leaf in leaves]
        given = {i: str(keys[-2].key) for i, keys in enumerate(found) if len(keys) > 1}
        if len(self.rules) > len(self.wheres):
            # A rule for a group that the stacks do not have is a mistake: the default is for groups without a rule.
            is_fine = self.wheres.keys() <= set(stacks)
        else:
            is_fine = self.rules.keys() >= set(given.values())
        if len(given) < len(leaves) or not is_fine:
            names = ", ".join(map(repr, dict.fromkeys(given.values()))) or "none"
            raise ValueError(
                f"expected stacks of groups {', '.join(self.rules)}, got {names}; write tp.stack(model, groups=...), "
                "or optim.trainable(optim.groups(...), form='stacks')"
            )
        return [name if name in self.rules else "default" for name in given.values()]

    def _partition(self, groups: Sequence[Group]) -> Any:
        rules: Any = self.rules
        names = {path: group.name for group in groups for path in group.paths}
        # Labels are passed as a function: a tree of labels may be callable, like its model, and Optax would call it.
        return optax.partition(rules, functools.partial(_labelled, names), mask_compatible_extra_args=True)


def are_stacks(params: PyTree) -> bool:
    """Returns whether all arrays of a tree are stacks, whose rows have no paths."""
    leaves = jtu.tree_flatten_with_path(params)[0]
    return bool(leaves) and None not in [_keys_of_stack(path, leaf) for path, leaf in leaves]


def _keys_of_stack(path: Sequence[Any], leaf: Any) -> Sequence[Any] | None:
    """Returns the keys up to one that describes the rows of an array, as `tp.stack` has it, or a row that is compared.

    Behind it there may be that of a node around the array.
    """
    rows = [jax.ShapeDtypeStruct(leaf.shape[n:], leaf.dtype) for n in (0, 1)] if is_array(leaf) else []
    words = set(map(describe, rows))
    ends = [end for end in (len(path) - 1, len(path)) if end > 0]
    return next(
        (path[:end] for end in ends if words.intersection(str(getattr(path[end - 1], "key", "")).split(" "))), None
    )


def _labelled(names: Mapping[str, str], tree: PyTree) -> PyTree:
    """Returns a tree of parameters with each replaced by the name of its group."""
    paths = structure_of(without_nodes(tree))[2].paths
    return jtu.tree_unflatten(jtu.tree_structure(tree), [names[path] for path in paths])


def group_name(where: object) -> str:
    """Returns the name of the group with this key."""
    # It is a key in the state and in saved files. A line number in it would change whenever the program is edited.
    return where if isinstance(where, str) else name_of(where, with_line=False).strip("'")


def check_groups(state: PyTree, index: Index) -> None:
    """Checks the keys of groups in the whole model, since the rule sees neither frozen parameters nor aliases."""
    for node in nodes_of(GroupsState, state):
        found = index.first_entries(node.keys.wheres) if node.keys.wheres else {}
        numbers = {path: n for n, group in enumerate(node.groups) for path in group.paths}  # the default comes last
        for leaf in set(found).intersection(index.positions):
            path, where = index.structure.paths[leaf], node.keys.wheres[found[leaf]]
            if numbers.get(path, found[leaf]) != found[leaf]:
                name = name_of(where)
                raise ValueError(f"{name} names {path!r} by an alias, which the optimiser does not see; write {path!r}")
        check_groups(node.inner_states, index)


def groups_in(state: PyTree) -> Iterator[Group]:
    """Yields the groups in a state, including groups within groups."""
    for node in nodes_of(GroupsState, state):
        yield from node.groups
        yield from groups_in(node.inner_states)
