"""plan: which array goes where, before anything is loaded."""

import functools
import operator
import os
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, TypeVar, overload

import jax.tree_util as jtu
import numpy as np

from .._average import Ema
from .._files.arrays import as_in_jax, placed
from .._files.names import Names, head_of, heads_of
from .._slots.layout import Trainable
from .._tree.copying import copy_leaf
from .._tree.paths import nearest
from .._tree.tables import Table, as_html, as_text
from .._tree.text import describe, first_few, quoted
from ..optim import TrainableState
from ._contents import Contents
from ._elements import Movers
from ._migration import carried_average, carried_state
from ._moves import Fit, Move, check_same, fit
from ._names import names_of, names_of_contents
from ._rename import Rename, Transforms

M = TypeVar("M")


class Row(NamedTuple):
    """An array of the model, and the names that come there."""

    path: str
    names: tuple[str, ...]  # of the source; none: nothing comes
    how: str  # what is done to them; empty: nothing
    shape: tuple[int, ...]
    dtype: Any


class Plan(Generic[M]):
    """Which array goes where, by name, into a model. You make one by `saving.plan`; it prints as a table.

    Attributes:
        rows: of each array of the model, ties once: its path, the names that it comes from, how, its shape and dtype.
        missing: the paths to which nothing comes.
        unused: the names that go nowhere.
        disagrees: arrays that would come and do not fit, in words.
    """

    def __init__(self, contents: Contents, source: Names, found: Fit) -> None:
        """For this library's own use; users write `saving.plan(source, model)`."""
        self._contents = contents
        self._source = source
        self._fit = found
        self.missing, self.unused, self.disagrees = found.missing, tuple(found.unused), found.disagrees
        rows = []
        for leaf in contents.stored.values():
            spec, move = contents.spec(leaf), found.comes.get(leaf)
            several = (
                f", {move.number + 1} of {len(move.route.targets)}" if move and len(move.route.targets) > 1 else ""
            )
            names, how = (move.route.sources, move.route.how + several) if move else ((), "")
            rows.append(Row(contents.structure.paths[leaf], names, how, spec.shape, spec.dtype))
        self.rows = tuple(rows)

    def __call__(self, arrays: Any) -> M:
        """The model with these arrays in it.

        Args:
            arrays: whatever `source` may be, with values, traced ones too.

        Returns:
            The model. A leaf that is no array is that of the model that the plan was made for, and so are, with
            `strict=False`, the arrays to which nothing comes. Arrays lie where those of that model do, if these are
            committed to a place. JAX arrays that go somewhere as they are may share their buffers with `arrays`.

        Raises:
            ValueError: an array is not there, or another one than the plan is for; several that go to one tie differ;
                nothing comes to an array without a value; the file is damaged.
        """
        contents, given = self._contents, self._checked(names_of(arrays))
        empty = sorted(contents.abstract - self._fit.comes.keys() - contents.aliases.keys())
        if empty:
            raise ValueError(
                f"nothing comes to {first_few([contents.names[i] for i in empty])}, which has no value in the model "
                "either; make the model"
            )
        wanted: dict[int, list[Move]] = {}
        for move in (*self._fit.comes.values(), *self._fit.also):
            wanted.setdefault(id(move.route), []).append(move)
        values, besides, taken = dict[int, Any](), list[tuple[Move, Any]](), set[int]()
        # A route runs once, though several of its results may be wanted.
        for moves in wanted.values():
            route = moves[0].route
            arrays = [given[name] for name in route.sources]
            made = arrays if route.function is None else route(*map(as_in_jax, route.sources, arrays))
            for move in moves:
                if self._fit.comes.get(move.leaf) is move:
                    array = made[move.number]
                    # NumPy arrays may change; and a model that is not tied stays so, though the source be.
                    is_shared = id(array) in taken or (isinstance(array, np.ndarray) and not given.is_file)
                    taken.add(id(array))
                    array = copy_leaf(array) if is_shared else array
                    values[move.leaf] = placed(contents.names[move.leaf], array, contents.leaves[move.leaf])
                else:
                    besides.append((move, made[move.number]))
        leaves = contents.leaves_with(values)
        for move, value in besides:
            check_same(move, value, leaves[move.leaf], contents)
        return jtu.tree_unflatten(contents.treedef, leaves)

    def state(self, source: Any, like: TrainableState) -> TrainableState:
        """The state of an optimiser of the model before, as one of the model after.

        Moments go where their parameters go: renamed, split, merged, stacked; where several go to one tie, those of the
        first. Arrays that all parameters of one history share, such as step counts and rates, stay. A parameter to
        which nothing comes begins a history of its own, as after `optim.set_trainable`: with the state that it has in
        `like`, the rates of the others and count 0. One that `like` does not train is left out.

        Args:
            source: a state of `optim.trainable`, `flat` or `stacked`, or the names of one, as
                `saving.names(path, "optimiser")` of a file. It is of the model that the plan was made from.
            like: a fresh state of the model after, `tx.init(model)`, of the same rule; its form (`trainable`, `flat`,
                `stacked`) may be another. Only the rule knows with which state a parameter begins, so it is always
                needed.

        Returns:
            The state, for the same `tx`.

        Raises:
            ValueError: a function of the plan changes or repeats elements, in place of moving them; a parameter is made
                of some that have not taken their steps together; the states are of different rules; the rule does not
                keep its state leaf by leaf.
            TypeError: `like` is no such state.
        """
        return carried_state(self._movers, names_of(source), like)

    @overload
    def average(self, source: Any, like: Ema[M]) -> Ema[M]: ...

    @overload
    def average(self, source: Any, like: None = None) -> M: ...

    def average(self, source: Any, like: Ema[M] | None = None) -> Ema[M] | M:
        """An average of the model before, as one of the model after.

        Args:
            source: a `tp.Ema` or the names of one, as `saving.names(path, "average")` of a file, where `like` is one;
                else an average that is a model, as `tp.ema` makes it, or the names of one.
            like: a fresh average of the model after, `tp.Ema(model, decay=...)`; its decay is the one from now on. What
                nothing comes to stays as it is in it. `None`: a model, as the plan makes it.

        Returns:
            The average.

        Raises:
            ValueError: as `state`.
            TypeError: `like` is no `tp.Ema`.
        """
        self._movers.check()
        names = names_of(source)
        heads = set(map(head_of, names))
        if like is None and {"shadow", "count", "weight"} <= heads <= {"shadow", "rest", "count", "weight"}:
            raise TypeError(
                "the source is a tp.Ema, so it needs a fresh one of the model after: like=tp.Ema(model, ...)"
            )
        return self(names) if like is None else carried_average(self._movers, names, like)

    @functools.cached_property
    def _movers(self) -> Movers:
        names = self._contents.names
        return Movers({names[leaf]: (move.route, move.number) for leaf, move in self._fit.comes.items()}, self._source)

    def _checked(self, given: Names) -> Names:
        moves = (*self._fit.comes.values(), *self._fit.also)
        used = dict.fromkeys(name for move in moves for name in move.route.sources)
        for name in used:
            want, got = self._source.specs[name], given.specs.get(name)
            if got != want:
                got = "nothing" if got is None else describe(got)
                raise ValueError(f"expected {describe(want)} at {name!r}, of which the plan was made, got {got}")
        return given

    def __str__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    def _blocks(self) -> list[Table | str]:
        why = dict.fromkeys(self.missing, "missing") | dict.fromkeys(self._fit.kept, "stays")
        rows = [
            [
                row.path or '""',
                first_few(row.names) or "-",
                row.how if row.names else why.get(row.path, "disagrees"),
                describe(row),
            ]
            for row in self.rows
        ]
        used = sum(1 for row in self.rows if row.names)
        table = Table(["path", "from", "how", "is"], rows)
        return [table, f"{used} of {len(rows)} arrays come from the source", *self.problems()]

    def __repr__(self) -> str:
        counts = [(len(self.missing), "missing"), (len(self.unused), "unused"), (len(self.disagrees), "disagree")]
        wrong = "".join(f", {count} {word}" for count, word in counts if count)
        return f"Plan({len(self.rows)} arrays{wrong})"

    def problems(self) -> list[str]:
        """All that is wrong, one line each."""
        heads = heads_of(self.missing, self._source.specs)
        if heads:
            call = f"names = saving.names(path, {heads[-1]!r}), saving.plan(names, model)(names)"
            return [f"the source holds such a model below {quoted(heads)}; take one alone: {call}"]
        few = len(self.missing) * len(self.unused) < 1000  # the nearest of many takes long to find
        unused, missing = (self.unused, self.missing) if few else ((), ())
        return [
            *(f"{path!r} is missing: nothing comes to it{nearest(path, unused)}" for path in self.missing),
            *(
                f"{name!r} is unused: no array is at {to or name!r}{nearest(to or name, missing)}"
                for name, to in self._fit.unused.items()
            ),
            *self.disagrees,
        ]


_contents_of: Callable[[Plan[Any]], Contents] = operator.attrgetter("_contents")


def plan(
    source: Any,
    model: M,
    *,
    rename: Rename | None = None,
    transform: Transforms | None = None,
    strict: bool = True,
    trainable: Trainable = None,
) -> Plan[M]:
    """Says which array goes where, by name, into a model, before anything is loaded.

    >>> import jax, jax.numpy as jnp, numpy as np
    >>> from treeparams import saving
    >>> theirs = {
    ...     "fc.weight": np.ones((3, 2), np.float32),
    ...     "fc.bias": np.zeros(3, np.float32),
    ...     "step": np.array(7),
    ... }
    >>> model = {"linear": {"weight": jnp.zeros((3, 2)), "bias": jnp.zeros(3)}}
    >>> plan = saving.plan(theirs, model, rename={"fc.*": "linear.*", "step": None})
    >>> print(plan)
    path           from       how  is
    linear.bias    fc.bias         float32[3]
    linear.weight  fc.weight       float32[3,2]
    2 of 2 arrays come from the source
    >>> plan(theirs)["linear"]["weight"].sum()
    Array(6., dtype=float32)

    **`rename={left: right}`** from names to paths. The first entry that matches a name takes it, and names that none
    takes stay as they are. The left side is a glob over whole names, as over paths: `*` stands for an entry or a part
    of one, `**` for any number of entries, also none, and those of the right side stand for the same text as those of
    the left side, in order; `?` and `[...]` only match. An entry for which earlier ones leave no name is an error, but
    for `**` at the end. `None` on the right drops on purpose, and under `None` on the left you write the paths that
    stay as they are in the model, so that strictness stays on: `{"pooler.**": None, None: "head.**"}`. Several arrays
    to one, or one to several, go through a function:

    >>> row = lambda *shape: np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    >>> def thirds(qkv):
    ...     return jnp.split(qkv, 3)
    >>> def joined(*both):
    ...     return jnp.concatenate(both)
    >>> split = saving.plan(
    ...     {"qkv": row(6, 2)},
    ...     {"q": jnp.zeros((2, 2)), "k": jnp.zeros((2, 2)), "v": jnp.zeros((2, 2))},
    ...     rename={"qkv": ("q", "k", "v")},
    ...     transform={"qkv": thirds},
    ... )
    >>> merge = saving.plan(
    ...     {"q": row(2, 2), "k": row(2, 2)},
    ...     {"qk": jnp.zeros((4, 2))},
    ...     rename={("q", "k"): "qk"},
    ...     transform={("q", "k"): joined},
    ... )

    One `*` more on the left stacks arrays in numeric order, one more on the right takes a stack apart. If there are
    several, it is the last `*` that stands for numbers only.

    >>> layers = {"layers": [{"w": jnp.zeros(2)} for _ in range(3)]}
    >>> stacked = {"layers": {"w": jnp.zeros((3, 2))}}
    >>> stack = saving.plan(layers, stacked, rename={"layers.*.**": "layers.**"})
    >>> unstack = saving.plan({"layers.w": row(3, 2)}, layers, rename={"layers.**": "layers.*.**"})
    >>> for each in (split, merge, stack, unstack):
    ...     print(*(f"{row.path}: {', '.join(row.names)} ({row.how})" for row in each.rows[:2]), sep="; ")
    k: qkv (thirds, 2 of 3); q: qkv (thirds, 1 of 3)
    qk: q, k (joined)
    layers.w: layers.0.w, layers.1.w, layers.2.w (stack)
    layers.0.w: layers.w (unstack, 1 of 3); layers.1.w: layers.w (unstack, 2 of 3)

    **States and averages go along.** `plan.state(state, like=tx.init(model))` and `plan.average(average, like=...)`
    take moments and averages of the model before through the same renames. There a function may only move, drop and
    join elements, each as it is - a transpose, a slice, a concatenation - which is read from its program.

    Args:
        source: arrays by name: a dictionary, whose values may be `jax.ShapeDtypeStruct`s; the path of a safetensors
            file, of which the header is read, or a list of several; the result of `saving.names`; Orbax's metadata of a
            checkpoint, `checkpointer.metadata(path)`; another model or a `Layout`, whose names are paths; another plan,
            for the model that it makes.
        model: the model to fill, ties once; its arrays may be `jax.ShapeDtypeStruct`s (`eqx.filter_eval_shape`).
        rename: as above, or a function of a name that returns the new one, or `None` to drop it.
        transform: `{left: function}`, by the left side as it is written in `rename`; or by a pattern over names, for
            arrays that go one to one. A function gets one array for each source and returns one, or a sequence for
            several targets; it need not be linear. Of arrays that are stacked it gets all, in order.
        strict: whether to refuse what is missing, unused or does not fit. Otherwise the plan takes what fits and
            reports the rest; arrays to which nothing comes stay as they are in the model.
        trainable: a `Layout` knows ties that an abstract model does not show; which leaves it trains does not matter
            here.

    Returns:
        The plan: `plan(arrays)` is the model.

    Raises:
        OSError: there is no such file.
        ValueError: with `strict`, all that is missing, unused or does not fit; dtypes must be equal as JAX has them, a
            cast is a transform. A pattern of `rename` or `transform` matches nothing; two arrays go to one path; arrays
            are merged or split and `transform` does not say how; a function fails; the file is damaged, or a pickle.
        TypeError: a side of `rename` is no pattern, or a transform no function.
    """
    if isinstance(model, (str, os.PathLike)):
        raise TypeError("expected a model, got a path; the source comes first: saving.plan(path, model)")
    contents = Contents(model, trainable)
    known = names_of_contents(_contents_of(source)) if isinstance(source, Plan) else names_of(source)
    made = Plan(contents, known, fit(contents, known, rename, transform))
    problems = made.problems()
    if strict and problems:
        raise ValueError("the source does not fit the model; strict=False takes what fits:\n" + "\n".join(problems))
    return made
