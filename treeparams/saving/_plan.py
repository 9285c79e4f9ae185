"""plan: which array goes where, before anything is loaded."""

import functools
import operator
import os
from collections.abc import Callable
from typing import Any, Generic, TypeVar, overload

import jax.tree_util as jtu

from .._average import Ema
from .._files.names import Names, head_of
from .._slots.layout import Trainable
from .._slots.ties import Alias
from .._tree.tables import Table, as_html, as_text
from ..optim import TrainableState
from ._averages import carried_average
from ._contents import Contents
from ._fill import compared, filled
from ._fit import Fit, fit
from ._movers import Movers
from ._names import names_of, names_of_contents
from ._rename import Rename, Transforms
from ._report import blocks, problems, rows_of
from ._states import carried_state

M = TypeVar("M")


class Plan(Generic[M]):
    r"""Which array goes where, by name, into a model. You make one by `saving.plan`; it prints as a table.

    Attributes:
        rows: of each array of the model, ties once: its path, the names that it comes from, how, its shape and dtype.
            The table leaves out the middle of many rows; `print(*plan.rows, sep="\n")` shows all of them.
        missing: the paths to which nothing comes.
        unused: the names that go nowhere.
        disagrees: arrays that would come and do not fit, in words.
    """

    def __init__(self, contents: Contents, source: Names, found: Fit, strict: bool) -> None:
        """For this library's own use; users write `saving.plan(source, model)`."""
        self._contents = contents
        # A plan holds no array of its source, which may be large, and may be gone when the plan is applied.
        self._source = source.without_values()
        self._fit, self._strict = found, strict
        self.missing = tuple(contents.names[leaf] for leaf in found.missing)
        self.unused, self.disagrees = tuple(found.unused), found.disagrees
        self.rows = rows_of(contents, found)

    def __call__(self, arrays: Any) -> M:
        """The model with these arrays in it.

        Args:
            arrays: whatever `source` may be, with values, traced ones too. The names and shapes are those of the
                `source`: what is not used may be missing, but no name may be new, unless the plan is not strict.

        Returns:
            The model. A leaf that is no array is that of the model that the plan was made for, and so are, with
            `strict=False`, the arrays to which nothing comes. Arrays lie where those of that model do, if these are
            committed to a place. JAX arrays that go somewhere as they are may share their buffers with `arrays`.

        Raises:
            ValueError: an array is not there, or of another shape or dtype than in the source; there is one that the
                source had not; arrays that were one in the source, or that go to one tie, differ; 64 bits do not fit
                into the 32 that JAX has; nothing comes to an array without a value; the file is damaged. Within
                `jax.jit` names, shapes and dtypes are compared when the function is traced, and values cannot be.
        """
        given = compared(names_of(arrays), self._source, self._fit, self._strict)
        return jtu.tree_unflatten(self._contents.treedef, filled(self._contents, self._fit, given))

    def state(self, source: Any, like: TrainableState, tx: Any = None) -> TrainableState:
        """The state of an optimiser of the model before, as one of the model after.

        Moments go where their parameters go: renamed, split, merged, stacked; where several go to one tie, those of the
        first. Arrays that all parameters of one history share, such as step counts and rates, stay. A parameter that
        waits, since `optim.set_trainable` has frozen it, waits afterwards: `layout` of the result says what trains. A
        parameter to which nothing comes begins a history of its own, as after `optim.set_trainable`: with the state
        that it has in `like`, the rates of the others and count 0. One that `like` does not train is left out.

        A function of the plan may move elements, drop and join them, cast them, and zero them by a constant mask,
        `x * mask`, which is read from its program. Its moments are moved as they are, in their own dtypes. An element
        that a mask zeroes has in the state what it has in `like`, as if all its gradients had been zero. A function
        that computes, as a mean of two layers does, is refused: moments do not follow from it.

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
            source: a state of `optim.trainable`, `flat` or `stacked`, or the names of one, as
                `saving.names(path, "optimiser")` of a file. It is of the model that the plan was made from. With `tx`
                also a state of plain Optax, `rule.init(eqx.filter(model, eqx.is_inexact_array))`, or its names.
            like: a fresh state of the model after, `tx.init(model)`, of the same rule; its form (`trainable`, `flat`,
                `stacked`) may be another, and so may the names of its groups (`optim.groups`). Only the rule knows with
                which state a parameter begins, so it is always needed.
            tx: the rule that made a state of plain Optax, or the `optim.trainable(rule)` that it is in now.

        Returns:
            The state, for the same `tx`.

        Raises:
            ValueError: a function of the plan changes or repeats elements, in place of moving them; a parameter is made
                of some that have not taken their steps together, or of which some wait; the states are of different
                rules; `like`, or the state, is of another model than the plan; the rule keeps arrays of other shapes
                than the parameters', as Adafactor's rows and columns, of one that is more than renamed; the rule does
                not keep its state leaf by leaf.
            TypeError: `like` is no such state; `source` is of plain Optax, and `tx` is missing.
        """
        return carried_state(self._movers, names_of(source), like, tx)

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
            ValueError: a function of the plan computes; `like`, or the average, is of another model than the plan.
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
        return Movers(self._contents, self._fit.comes, self._source)

    def __str__(self) -> str:
        return as_text(self._blocks())

    def _repr_html_(self) -> str:
        return as_html(self._blocks())

    def __repr__(self) -> str:
        counts = [(len(self.missing), "missing"), (len(self.unused), "unused"), (len(self.disagrees), "disagree")]
        wrong = "".join(f", {count} {word}" for count, word in counts if count)
        return f"Plan({len(self.rows)} arrays{wrong})"

    def __reduce__(self) -> Any:
        # A treedef of a class need not be one of that class when it has been pickled; a model is.
        model = jtu.tree_unflatten(self._contents.treedef, self._contents.leaves)
        return _unpickled, (model, self._contents.aliases, self._source, self._fit, self._strict)

    def problems(self) -> list[str]:
        """All that is wrong, one line each."""
        return problems(self._contents, self._source, self._fit)

    def _blocks(self) -> list[Table | str]:
        return [*blocks(self._contents, self._fit, self.rows), *self.problems()]


def _unpickled(model: Any, aliases: dict[int, Alias], source: Names, found: Fit, strict: bool) -> Plan[Any]:
    contents = Contents(model)
    contents.aliases = aliases
    return Plan(contents, source, found, strict)


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
    join elements, each as it is - a transpose, a slice, a concatenation, a cast, a constant mask - which is read from
    its program.

    Args:
        source: arrays by name: a dictionary, whose values may be `jax.ShapeDtypeStruct`s; the path of a safetensors
            file, of which the header is read, or a list of several; what `np.load` gives of an `.npz` file; the result
            of `saving.names`; Orbax's metadata of a checkpoint, `checkpointer.metadata(path)`; another model or a
            `Layout`, whose names are paths; another plan, for the model that it makes.
        model: the model to fill, ties once; its arrays may be `jax.ShapeDtypeStruct`s (`eqx.filter_eval_shape`). The
            keys of a flat dictionary, as `layers.0.weight`, are names, too.
        rename: as above, or a function of a name that returns the new one, or `None` to drop it.
        transform: `{left: function}`, by the left side as it is written in `rename`; or by a pattern over names, for
            arrays that go one to one. A function gets one array for each source and returns one, or a sequence for
            several targets; it need not be linear. Of arrays that are stacked it gets all, in order.
        strict: whether to refuse what is missing, unused or does not fit, and later names that the source has not.
            Otherwise the plan takes what fits and reports the rest; arrays to which nothing comes stay as they are in
            the model.
        trainable: a `Layout` knows ties that an abstract model does not show; which leaves it trains does not matter
            here.

    Returns:
        The plan: `plan(arrays)` is the model.

    Raises:
        OSError: there is no such file.
        ValueError: with `strict`, all that is missing, unused or does not fit; dtypes must be equal as JAX has them, a
            cast is a transform, and an array of a dtype that JAX has not is dropped by `None`. A pattern of `rename` or
            `transform` matches nothing; two arrays go to one path; arrays are merged or split and `transform` does not
            say how; a function fails; the file is damaged, or a pickle.
        TypeError: a side of `rename` is no pattern, or a transform no function.
    """
    if isinstance(model, (str, os.PathLike)):
        raise TypeError("expected a model, got a path; the source comes first: saving.plan(path, model)")
    contents = Contents(model, trainable)
    known = names_of_contents(_contents_of(source)) if isinstance(source, Plan) else names_of(source)
    made = Plan(contents, known, fit(contents, known, rename, transform), strict)
    problems = made.problems()
    if strict and problems:
        raise ValueError("the source does not fit the model; strict=False takes what fits:\n" + "\n".join(problems))
    return made
