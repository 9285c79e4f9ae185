"""plan: decides which array goes where before anything is loaded."""

import functools
import os
from typing import Any, Generic, NamedTuple, TypeVar, overload

from .._average import Ema
from .._files.names import Names, head_of, heads_of
from .._slots.layout import Trainable
from .._tree.paths import nearest
from .._tree.text import Printed, Table, describe, in_short, quoted
from ..optim._state import TrainableState
from ._contents import Contents
from ._fit import Fit, shown
from ._movers import Movers
from ._names import Rename, Transforms, names_of
from ._states import carried_average, carried_state

M = TypeVar("M")


class Plan(Printed, Generic[M]):
    r"""Which array goes where, by name, into a model; made by `saving.plan`. Prints as a table.

    Attributes:
        rows: one row for each array of the model, ties once: its path, the names it comes from, the function applied to
            them, its shape and dtype. The table leaves out the middle of many rows; `print(*plan.rows, sep="\n")` shows
            all of them.
        missing: the paths of the model that get no array.
        unused: the names of the source that go nowhere.
        disagrees: a sentence for each array that would go somewhere but does not fit.
    """

    def __init__(self, found: Fit) -> None:
        """For internal use. Call `saving.plan(source, model)` instead."""
        self._fit = found
        self.missing = tuple(found.contents.names[leaf] for leaf in found.missing)
        self.unused, self.disagrees = tuple(found.unused), tuple(found.disagrees)
        self.rows = tuple(map(self._row, found.contents.stored.values()))

    def _row(self, leaf: int) -> "Row":
        structure, move = self._fit.contents.structure, self._fit.comes.get(leaf)
        names, how = (move.route.sources, move.route.how) if move else ((), "")
        if move and len(move.route.targets) > 1:
            how += f", {move.number + 1} of {len(move.route.targets)}"
        return Row(structure.paths[leaf], names, how, *structure.spec(leaf)[:2])

    def __call__(self, arrays: Any) -> M:
        """Returns the model with these arrays in it.

        Args:
            arrays: arrays from any kind of `source`, with values; they may be traced. Their names and shapes must be
                those of the plan's `source`. Arrays that the plan does not use may be missing, but new names are an
                error unless the plan is not strict.

        Returns:
            The model. Leaves that are not arrays are those of the model that the plan was made for. So are its refs
            (`jax.new_ref`), into which the arrays that come to them are written. So are, with
            `strict=False`, the arrays that nothing comes to. Each array is placed on the devices of the model's array
            if that one is committed to them. JAX arrays that the plan does not change may share their buffers with
            `arrays`.

        Raises:
            ValueError: an array is missing, or has another shape or dtype than in the source; a name is not in the
                source; arrays differ that were the same array in the source, or that go to one tie; 64-bit values do
                not fit into JAX's 32 bits; nothing comes to an array that has no value in the model; or the file is
                damaged. Inside `jax.jit`, names, shapes and dtypes are compared when the function is traced, and values
                cannot be compared.
        """
        found = self._fit
        return found.contents.tree(found.filled(found.compared(names_of(arrays))))

    def state(self, source: Any, like: TrainableState) -> TrainableState:
        """Carries a state of an optimiser over from the old model to the new one.

        Moments go where their parameters go: renamed, split, merged or stacked. If several go to one tie, those of the
        first are kept. Arrays that all parameters of one history share, such as step counts and rates, stay as they
        are. A parameter that waits because `optim.set_trainable` froze it still waits in the new state; `layout` of the
        result shows which parameters train. A parameter that nothing comes to begins a new history, as after
        `optim.set_trainable`: with its state in `like`, the rates of the others and count 0. Parameters that `like`
        does not train are left out.

        A function of the plan may move elements, drop and join them, cast them, and put constants in their place or
        beside them: by a constant mask, `x * mask`, by padding, or as the rows of new tokens in
        `jnp.concatenate([embed, fresh])`. `state` reads this from its program. Moments are moved in the same way, in
        their own dtypes, and begin as in `like` where the constants are. A function that computes new values, such as
        the mean of two layers, is an error, because moments do not follow from it.

        >>> import jax.numpy as jnp, optax
        >>> from treeparams import optim, saving
        >>> before, after = {"a": jnp.ones((2, 3))}, {"b": jnp.zeros((3, 2))}
        >>> plan = saving.plan(before, after, rename={"a": "b"}, transform={"a": jnp.transpose})
        >>> tx = optim.trainable(optax.sgd(0.1, momentum=0.9))
        >>> _, state = optim.step(tx, {"a": jnp.ones((2, 3))}, tx.init(before), before)
        >>> plan.state(state, like=tx.init(after))
        TrainableState
          trains, 1 step taken: b

        Args:
            source: a state of `optim.trainable`, or the names of one, such as
                `saving.names(path, "optimiser")` of a file. It belongs to the model that the plan was made from. Of a
                state of plain Optax, `optim.from_optax` makes one.
            like: a fresh state of the new model, `tx.init(model)`, of the same Optax rule. Its form (`form=`) may
                differ, and so may the names of its groups (`optim.groups`), if they keep arrays of parameters. It is
                always needed, because only the rule knows the state that a parameter begins with.

        Returns:
            The state, for the same `tx` as `like`.

        Raises:
            ValueError: a function of the plan changes or repeats elements instead of moving them; a parameter is made
                from several that have taken different numbers of steps, or of which only some wait; the states are of
                different rules; `like` or the state belongs to another model than the plan; the rule keeps arrays of
                other shapes than the parameters', such as Adafactor's rows and columns, for a parameter that is more
                than renamed; or the rule does not keep its state leaf by leaf.
            TypeError: `like` is not such a state.
        """
        try:
            return carried_state(self._movers, source, like)
        except (AttributeError, LookupError, TypeError) as error:
            if not (isinstance(source, (str, os.PathLike, Names)) and isinstance(like, TrainableState)):
                raise
            where = "the source" if isinstance(source, Names) else repr(os.fspath(source))
            raise ValueError(f"{where}: its description of the state cannot be read: {in_short(error)}") from error

    @overload
    def average(self, source: Any, like: Ema[M]) -> Ema[M]: ...

    @overload
    def average(self, source: Any, like: None = None) -> M: ...

    def average(self, source: Any, like: Ema[M] | None = None) -> Ema[M] | M:
        """Carries an average over from the old model to the new one.

        The functions of the plan are applied to the averages of their arrays, in the dtype of these. So an average
        follows every affine function exactly: moves and constants as in `state`, and sums, means, repeats, negations
        and products with constants too.

        Args:
            source: if you pass `like`, a `tp.Ema` or the names of one, such as `saving.names(path, "average")` of a
                file. Otherwise an average that is a model, as `tp.ema` makes it, or the names of one.
            like: a fresh average of the new model, `tp.Ema(model, decay=...)`, whose decay counts from now on. Arrays
                that nothing comes to keep their values in `like`. With `None` you get a model, as the plan makes it.

        Returns:
            The average.

        Raises:
            ValueError: a function of the plan is not affine; or `like` or the average belongs to another model than
                the plan: if that is strict, to one with more arrays, too.
            TypeError: `like` is not a `tp.Ema`.
        """
        names = names_of(source)
        heads = set(map(head_of, names))
        if like is None and {"shadow", "count", "weight"} <= heads <= {"shadow", "rest", "count", "weight"}:
            raise TypeError("the source is a tp.Ema, so pass a fresh one of the new model too: like=tp.Ema(model, ...)")
        if like is not None:
            return carried_average(self._movers, names, like)
        self._movers.check()
        return self(names)

    @functools.cached_property
    def _movers(self) -> Movers:
        return Movers(self._fit)

    def __repr__(self) -> str:
        counts = [(len(self.missing), "missing"), (len(self.unused), "unused"), (len(self.disagrees), "disagree")]
        wrong = "".join(f", {count} {word}" for count, word in counts if count)
        return f"Plan({len(self.rows)} arrays{wrong})"

    def problems(self) -> list[str]:
        """Returns all problems, one line each."""
        found = self._fit
        heads = heads_of(self.missing, found.source.specs)
        if heads:
            call = f"names = saving.names(path, {heads[-1]!r}), saving.plan(names, model)(names)"
            return [f"the source has such a model below {quoted(heads)}; to load one, write {call}"]
        paths = [found.contents.short_names[leaf] for leaf in found.missing]
        few = len(paths) * len(found.unused) < 1000  # the nearest of many takes long to find
        unused, missing = (found.unused, paths) if few else ((), ())
        return [
            *(f"{path!r} is missing: nothing comes to it{nearest(path, unused)}" for path in paths),
            *(f"{name!r} is unused: no array is at {to!r}{nearest(to, missing)}" for name, to in found.unused.items()),
            *found.disagrees,
        ]

    def _blocks(self) -> list[Table | str]:
        """Returns the table, a line with the number of arrays that come from the source, and all problems."""
        contents, found = self._fit.contents, self._fit
        why = dict.fromkeys(found.missing, "missing") | dict.fromkeys(found.stay, "stays")
        cells = list[list[str]]()
        for leaf, row in zip(contents.stored.values(), self.rows, strict=True):
            how = row.how if row.names else why.get(leaf, "disagrees")
            cells.append([shown([contents.short_names[leaf]]), shown(row.names) or "-", how, describe(row)])
        used = sum(bool(row.names) for row in self.rows)
        said = f"{used} of {len(self.rows)} arrays come from the source"
        return [Table(["path", "from", "how", "is"], cells), said, *self.problems()]


def plan(
    source: Any,
    model: M,
    *,
    rename: Rename | None = None,
    transform: Transforms | None = None,
    strict: bool = True,
    trainable: Trainable = None,
) -> Plan[M]:
    """Decides which array goes where, by name, into a model, before anything is loaded.

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

    **`rename={left: right}`** maps names to paths. Each name follows the first entry that matches it; names that no
    entry matches stay as they are. The left side is a glob over whole names, as over paths: `*` matches an entry or a
    part of one, `**` any number of entries, including none, and the stars of the right side are replaced, in order, by
    the text that those of the left side matched. `?` and `[...]` match but are not carried over. An entry for which
    earlier ones leave no name is an error, except for `**` at the end. `None` on the right drops names. Under `None` on
    the left you list the paths that keep their values in the model, so that you need not give up `strict`:
    `{"pooler.**": None, None: "head.**"}`. To map several arrays to one, or one to several, add a function:

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

    With one more `*` on the left, arrays are stacked in numeric order; with one more on the right, a stack is taken
    apart. If there are several stars, it is the last `*` that matches numbers only.

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
    carry moments and averages of the old model over by the same renames. For moments, a function may only move, drop
    and join elements without changing them: a transpose, a slice, a concatenation, a cast, a constant mask. For
    averages it may also compute sums, with constant factors. The plan reads this from the function's program.

    Args:
        source: arrays by name. This can be a dictionary, whose values may be `jax.ShapeDtypeStruct`s; the path of a
            safetensors file, of which only the header is read, or a list of several; a folder of such files, or its
            `model.safetensors.index.json`; the result of `np.load` for an `.npz` file; the result of `saving.names`;
            Orbax's metadata of a checkpoint, `checkpointer.metadata(path)`; or another model or a `Layout`, whose names
            are its paths.
        model: the model to fill, ties once. Its arrays may be `jax.ShapeDtypeStruct`s (`eqx.filter_eval_shape`). The
            keys of a flat dictionary, such as `layers.0.weight`, are names too.
        rename: a dictionary as above, or a function of a name that returns the new name, or `None` to drop it.
        transform: a dictionary `{left: function}`. Its keys are left sides exactly as in `rename`, or patterns over
            names for arrays that go one to one. A function gets one array for each source, and returns one array, or a
            sequence for several targets; it need not be linear. For stacked arrays it gets all of them, in order.
        strict: whether missing, unused and misfitting arrays are errors, and later names that the source does not have.
            Otherwise the plan uses the arrays that fit and reports the rest; arrays that nothing comes to keep their
            values in the model.
        trainable: a `Layout`, for its ties, which an abstract model does not show. It does not matter which leaves it
            trains.

    Returns:
        The plan. `plan(arrays)` returns the model.

    Raises:
        OSError: the file does not exist.
        ValueError: with `strict`, an array is missing, unused or does not fit. Dtypes must be equal in JAX, so write a
            cast as a transform, and drop an array of a dtype that JAX lacks with `None`. Children of a class without
            keys go by position into the same class alone; `rename` takes them anywhere by their names, without a star.
            Also, strict or not: a pattern
            of `rename` or `transform` matches nothing; two arrays go to one path; arrays are merged or split without a
            `transform`; a function fails; or the file is damaged, or is a pickle.
        TypeError: a side of `rename` is not a pattern, or a transform is not a function.
    """
    if isinstance(source, Plan):
        raise TypeError("a plan is no source of another one; pass its model, saving.plan(plan(arrays), model, ...)")
    if isinstance(model, (str, os.PathLike)):
        raise TypeError("expected a model, got a path; the source comes first: saving.plan(path, model)")
    made = Plan(Fit(Contents(model, trainable), names_of(source), rename, transform, strict))
    problems = made.problems()
    if strict and problems:
        raise ValueError("the source does not fit the model; strict=False loads the rest:\n" + "\n".join(problems))
    return made


# -- The rows ---------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """An array of the model, and the names that come there."""

    path: str
    names: tuple[str, ...]  # of the source; none: nothing comes
    how: str  # the function applied to them; empty if none
    shape: tuple[int, ...]
    dtype: Any

    def __str__(self) -> str:
        names = ", ".join(shown([name]) for name in self.names) or "nothing"
        how = f" by {self.how}" if self.how else ""
        return f"{shown([self.path])}: {describe(self)}, from {names}{how}"
