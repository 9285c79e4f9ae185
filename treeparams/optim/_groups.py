"""groups: an optimiser for each of several groups of parameters. report: the group of each parameter.

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
from .._slots.index import Index, first_entries
from .._slots.layout import index_of
from .._slots.parts import take_apart
from .._slots.ties import declaring_nodes, find_ties
from .._slots.where import Where, name_of
from .._tree.paths import join_path, key_entries, split_path
from .._tree.static_keys import contents
from .._tree.structure import is_array, structure_of
from .._tree.text import Printed, Table, describe, quoted
from .._tree.types import PyTree
from ._coupling import without_nodes
from ._master import copies_in
from ._state import Plain, TrainableState, extended, nodes_of, rule_of


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


contents[Keys] = lambda _: ()


def entries_of(params: PyTree, wheres: Sequence[Where], *, is_whole: bool = False) -> dict[str, int]:
    """Returns the number of the entry that selects each parameter of a canonical tree; others are left out.

    You may name a tie that a class declares by either end, although the tree has nothing at its alias. If the tree is
    not a whole model, an entry may select nothing.
    """
    structure = structure_of(_with_aliases(params))[2]
    index = Index(structure, (True,) * len(structure.specs), find_ties(structure))
    found = first_entries(index, wheres, asked=None if is_whole else (), may_be_empty=not is_whole)
    return {structure.paths[leaf]: number for leaf, number in found.items()}


def _check_entries(index: Index, keys: Keys, numbers: Mapping[str, int | None]) -> None:
    """Checks entries in the whole model, and that each parameter has the entry that the rule found for it."""
    found = first_entries(index, keys.wheres)
    for leaf in index.positions:
        path = index.structure.paths[leaf]
        if path in numbers and numbers[path] != found.get(leaf):
            name = name_of(keys.wheres[found[leaf]])
            raise ValueError(
                f"{name} names {path!r} by an alias that only a layout has, and the optimiser does not see it; write "
                f"{path!r}, or declare the tie in its class"
            )


def _with_aliases(params: PyTree) -> PyTree:
    """Returns the tree as shapes, with further ones at the aliases that its classes declare."""
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    structure, aliases = structure_of(shapes)[2], dict[str, Any]()
    for node, said in declaring_nodes(structure):
        for alias, (path, transform) in said.ties.items():
            at = structure.index.get(join_path((*node.entries, *split_path(path))))
            if at is not None:
                shape = jax.ShapeDtypeStruct(*structure.spec(at)[:2])
                there = join_path((*node.entries, *split_path(alias)))
                aliases[there] = shape if transform is None else jax.eval_shape(transform, shape)
    if not aliases:
        return shapes
    pairs, treedef = jtu.tree_flatten_with_path(shapes, is_leaf=lambda node: node is None)
    paths = [join_path(key_entries(keys)) for keys, _ in pairs]
    leaves = [aliases.get(path) if leaf is None else leaf for path, (_, leaf) in zip(paths, pairs, strict=True)]
    return jtu.tree_unflatten(treedef, leaves)


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
        raise ValueError(
            f"two groups have the same name, among {', '.join(called)}; name functions by `def`, so that they differ"
        )
    wheres = dict(zip(called, transformations, strict=False))
    for name, rule in zip(called, transformations.values(), strict=False):
        if not isinstance(rule, optax.GradientTransformation | optax.MultiSteps):
            raise TypeError(
                f"expected an Optax transformation for {name!r}, such as optax.sgd(0.1), got {describe(rule)}"
            )
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
            raise TypeError(
                f"{paths[structure.specs.index(None)]!r} is not an array: optim.groups is plain Optax, which accepts "
                "only arrays; write tx = optim.trainable(optim.groups(...)), state = tx.init(model)"
            )
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
        entries, names = entries_of(params, [*self.wheres.values()]), [*self.wheres]
        lost = [path for path in paths if path not in entries]
        if lost and not self._has_default():
            raise ValueError(
                f"trained, but in no group: {quoted(lost, 5)}. The groups are {', '.join(self.wheres)}; write "
                "optim.groups({...}, default=...) for the others"
            )
        return [names[entries[path]] if path in entries else "default" for path in paths]

    def of_stacks(self, stacks: PyTree) -> list[str]:
        """Returns the group of each stack.

        Its rows have no paths here, so the group that it lies in among the stacks decides.
        """
        leaves = jtu.tree_flatten_with_path(stacks)[0]
        found = [_keys_of_stack(path, leaf) or () for path, leaf in leaves]
        given = {i: str(keys[-2].key) for i, keys in enumerate(found) if len(keys) > 1}
        if self._has_default():
            # A rule for a group that the stacks do not have is a mistake: the default is for groups without a rule.
            is_fine = self.wheres.keys() <= set(stacks)
        else:
            is_fine = self.rules.keys() >= set(given.values())
        if len(given) < len(leaves) or not is_fine:
            names = ", ".join(map(repr, dict.fromkeys(given.values()))) or "none"
            raise ValueError(
                "a group of stacks needs an optimiser of the same name: expected groups among "
                f"{', '.join(self.rules)}, got {names}; write tp.stack(model, groups={{name: where}}), or "
                "optim.trainable(optim.groups(...), form='stacks'), or name the optimisers after these groups, with "
                "default= for others"
            )
        return [name if name in self.rules else "default" for name in given.values()]

    def _has_default(self) -> bool:
        return self.rules.keys() > self.wheres.keys()

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
    return jtu.tree_unflatten(
        jtu.tree_structure(tree), [names[path] for path in structure_of(without_nodes(tree))[2].paths]
    )


def group_name(where: object) -> str:
    """Returns the name of the group with this key."""
    # It is a key in the state and in saved files. A line number in it would change whenever the program is edited.
    return where if isinstance(where, str) else name_of(where, with_line=False).strip("'")


def check_groups(state: PyTree, index: Index) -> None:
    """Checks the keys of groups in the whole model, since the rule sees neither frozen parameters nor aliases."""
    for node in nodes_of(GroupsState, state):
        if node.keys.wheres:
            count = len(node.keys.wheres)  # the default comes behind them
            numbers = {path: n if n < count else None for n, group in enumerate(node.groups) for path in group.paths}
            _check_entries(index, node.keys, numbers)
        check_groups(node.inner_states, index)


def groups_in(state: PyTree) -> Iterator[Group]:
    """Yields the groups in a state, including groups within groups."""
    for node in nodes_of(GroupsState, state):
        yield from node.groups
        yield from groups_in(node.inner_states)


def _paths_at(form: Form, paths: Sequence[str]) -> Iterator[str]:
    """Yields the parameters that lie at these paths of a form."""
    members = {join_path(entries): slots for entries, slots in zip(form.entries, form.members, strict=True)}
    for path in paths:
        yield from [path] if path in form.paths else [form.paths[slot] for slot in members[path]]


@dataclasses.dataclass(frozen=True)
class Report(Printed):
    """The group of each leaf; you see it printed as a table.

    Attributes:
        groups: `{path: group}` of each trained parameter; the empty text if all share one optimiser.
        table: the rows, as the texts that are printed.
        notes: the lines below: the parameters that steps leave as they were, see `TrainableState.stuck`.
    """

    groups: dict[str, str]
    table: Table
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        return str(self)

    def _blocks(self) -> list[Table | str]:
        return [self.table, *self.notes]


Report.__module__ = "treeparams.types"


def report(tx: Any, model: PyTree, state: TrainableState | None = None) -> Report:
    """Shows each leaf with its group in `optim.groups`, whether it is frozen, and how many steps it has taken.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> tx = optim.trainable(optim.groups({"a": optax.sgd(1.0)}, default=optax.sgd(0.1)), "[ab]")
    >>> model = {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}
    >>> state = tx.update({"a": jnp.ones(2), "b": jnp.ones(3)}, tx.init(model), model)[1]
    >>> print(optim.report(tx, model, optim.set_trainable(tx, state, model)))
    path  shape  dtype    group    history  steps
    a     2      float32  a        0            1
    b     3      float32  default  0            1
    c     1      float32  default  1            0

    If bfloat16 or float16 parameters train, the column "copy" shows the dtype of the copy that `optim.master` keeps of
    each. A parameter with "none" loses steps that are below half the spacing between its neighbouring numbers. Those
    that three steps or more have left as they were are named below the table; see `TrainableState.stuck`.

    Args:
        tx: `optim.trainable(...)`.
        model: any pytree. `report` makes no optimiser state of it.
        state: a state of `tx`: you then see the leaves that train by this state, their histories and their step counts.
            Steps in which a row of stacks waited (`active=`) count too; the row's own count is in the state.

    Returns:
        An object that prints as this table; the names of groups within groups are joined by slashes.

    Raises:
        TypeError: `tx` is plain Optax; as `tp.layout`.
        ValueError: as `init`.
    """
    rule = rule_of(tx)
    if state is not None and not isinstance(state, TrainableState):
        raise TypeError(f"expected the state of this transformation, got {describe(state)}")
    if isinstance(model, TrainableState):
        raise TypeError("expected the model, got its state: write optim.report(tx, model, state)")
    layout = take_apart(model, rule.trainable if state is None else state.layout).layout
    header, index = ["path", "shape", "dtype", "group"], index_of(layout)
    names: dict[str, list[str]] = {path: [] for path in layout.paths}
    like = rule.like(layout) if names else None
    shapes = () if like is None else like.state
    check_groups(shapes, index)
    for group in groups_in(shapes):
        for path in _paths_at(rule.form_of(layout), group.paths):
            names[path].append(group.name)
    groups = {path: " / ".join(each) for path, each in names.items()}
    structure, steps = index.structure, {}
    if state is not None:
        header += ["history", "steps"]
        runs = zip((*state.roles.running, *state.roles.held), state.counts, strict=True)
        steps = {leaf: [str(n), str(count)] for n, (leaves, count) in enumerate(runs) for leaf in leaves}
    narrow = {layout.paths[slot]: "none" for slot in index.narrow_slots}
    if narrow and like is not None:
        header.append("copy")
        narrow |= {path: str(copy.dtype) for owners, copy in copies_in(shapes, like.division) for path in owners.paths}
    rows = []
    for leaf in index.distinct:
        path, spec = structure.paths[leaf], structure.spec(leaf)
        group = groups.get(path, "frozen") or "trained"
        counts = steps.get(leaf, ["", ""]) if state is not None else []
        row = [path, ",".join(map(str, spec.shape)), str(spec.dtype), group, *counts, narrow.get(path, "")]
        rows.append(row[: len(header)])
    return Report(groups, Table(header, rows, [5]), ("", state.stuck) if state is not None and state.stuck else ())
