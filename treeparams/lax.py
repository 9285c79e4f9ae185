"""Control flow of `jax.lax` for whole models, in the carry, among the operands and in the results.

Each function calls its namesake of `jax.lax` with the arrays of your trees, and puts the trees together again. `_Kind`
turns a carry, or the result of a branch, into a dictionary of its arrays by path, with each tied parameter once.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import jax
import jax.tree_util as jtu

from ._slots.parts import Rest
from ._tree.static_keys import with_object
from ._tree.structure import Structure
from ._tree.text import describe, first_few, warn
from ._tree.types import PyTree, is_inexact

C = TypeVar("C")
Y = TypeVar("Y")
_Function = Callable[..., Any]


def scan(
    f: Callable[[C, Any], tuple[C, Y]],
    init: C,
    xs: Any = None,
    length: int | None = None,
    reverse: bool = False,
    unroll: int | bool = 1,
) -> tuple[C, Y]:
    """`jax.lax.scan` over models: in `init`, in `xs`, and in the outputs.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.array([1.0, 2.0])
    >>> model = {"a": shared, "b": shared, "act": jnp.tanh, "steps": jnp.array(0)}
    >>> def step(model, rate):
    ...     model = tp.maptrainable(lambda x: (1 - rate) * x, model)
    ...     return model | {"steps": model["steps"] + 1}, model["a"].sum()
    >>> model, sums = tp.lax.scan(step, model, jnp.array([0.5, 0.5]))
    >>> model["a"] is model["b"], model["a"], int(model["steps"]), sums
    (True, Array([0.25, 0.5 ], dtype=float32), 2, Array([1.5 , 0.75], dtype=float32))

    Every array of the carry is carried: parameters, counters, keys, statistics. All other leaves, Python and NumPy
    numbers included, are static, and your step must return them unchanged. So write `jnp.zeros(())` for a running
    total, not `0.0`. A tie holds in the loop if your step keeps it, as `optim.step` does.

    Args:
        f: the step, from carry and element to the next carry and an output.
        init: the carry at the start.
        xs: a tree whose arrays are scanned along their first axes. Its other leaves are the same in each step.
        length: the number of steps, if `xs` has no arrays.
        reverse: whether to scan from the last element to the first.
        unroll: the number of steps to compile as one iteration.

    Returns:
        The last carry, and the outputs with their arrays stacked. The other leaves of an output come back unchanged.

    Raises:
        ValueError: the step changes a leaf of the carry that is not an array, or the structure of the carry.
        TypeError: `f` returns no pair; or the shape or dtype of an array changes, as in `jax.lax.scan`.

    Warns:
        UserWarning: two parameters of a model are one array before the step, and two after it.
    """
    elements = Rest.of(xs)
    wrap = lambda kind, f: [lambda carry, x: _closed(kind, f(kind.tree(carry), x.unpacked()))]
    run = lambda kind, body: _outcome(kind, *jax.lax.scan(body, kind.arrays(init), elements, length, reverse, unroll))
    return _agreed(wrap, run, [f], (init, xs), _LOOP)


def while_loop(cond_fun: Callable[[C], Any], body_fun: Callable[[C], C], init_val: C) -> C:
    """`jax.lax.while_loop` over models. Your step may change the arrays of the value, as for `tp.lax.scan`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> halve = lambda model: tp.maptrainable(lambda x: x / 2, model)
    >>> model = {"w": jnp.array(8.0), "act": jnp.tanh}
    >>> float(tp.lax.while_loop(lambda model: model["w"] > 1, halve, model)["w"])
    1.0
    """
    wrap = lambda kind, go_on, body: [lambda x: go_on(kind.tree(x)), lambda x: kind.arrays(body(kind.tree(x)))]
    run = lambda kind, go_on, body: kind.tree(jax.lax.while_loop(go_on, body, kind.arrays(init_val)))
    return _agreed(wrap, run, [cond_fun, body_fun], (init_val,), _LOOP)


def fori_loop(
    lower: Any, upper: Any, body_fun: Callable[[Any, C], C], init_val: C, *, unroll: int | bool | None = None
) -> C:
    """`jax.lax.fori_loop` over models. Your step may change the arrays of the value, as for `tp.lax.scan`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> add = lambda i, model: tp.maptrainable(lambda x: x + i, model)
    >>> float(tp.lax.fori_loop(0, 4, add, {"w": jnp.array(0.0), "act": jnp.tanh})["w"])
    6.0
    """
    wrap = lambda kind, body: [lambda i, x: kind.arrays(body(i, kind.tree(x)))]
    run = lambda kind, body: kind.tree(jax.lax.fori_loop(lower, upper, body, kind.arrays(init_val), unroll=unroll))
    return _agreed(wrap, run, [body_fun], (init_val,), _LOOP)


def cond(pred: Any, true_fun: Callable[..., Y], false_fun: Callable[..., Y], *operands: Any) -> Y:
    """`jax.lax.cond` over models: among the operands, and in the results.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> agent, target = ({"w": jnp.array(w), "act": jnp.tanh} for w in (1.0, 0.0))
    >>> update = lambda step, target: tp.lax.cond(
    ...     step % 10 == 0, lambda agent, _: agent, lambda _, target: target, agent, target
    ... )
    >>> float(update(5, target)["w"]), float(update(10, target)["w"])
    (0.0, 1.0)

    The results of the branches may differ in their arrays alone. A tie holds in the result if both branches return it.
    """
    return _choose(lambda branches, rest: jax.lax.cond(pred, *branches, rest), [true_fun, false_fun], operands)


def switch(index: Any, branches: Sequence[Callable[..., Y]], *operands: Any) -> Y:
    """`jax.lax.switch` over models: among the operands, and in the results, as for `tp.lax.cond`.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> scale = [lambda model, k=k: tp.maptrainable(lambda x: k * x, model) for k in range(3)]
    >>> float(tp.lax.switch(2, scale, {"w": jnp.array(3.0), "act": jnp.tanh})["w"])
    6.0
    """
    return _choose(lambda branches, rest: jax.lax.switch(index, branches, rest), branches, operands)


def map(f: Callable[[Any], Y], xs: Any, *, batch_size: int | None = None) -> Y:
    """`jax.lax.map` over the arrays of a model, such as an ensemble; `f` may return models.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> ensemble = {"w": jnp.arange(3.0), "act": jnp.square}
    >>> tp.lax.map(lambda member: member["act"](member["w"]), ensemble)
    Array([0., 1., 4.], dtype=float32)

    Leaves that are not arrays are the same in each call, and come back unchanged.
    """
    elements = Rest.of(xs)
    wrap = lambda _, f: [lambda carry, x: (carry, Rest.of(f(x.unpacked())))]
    if batch_size is None:  # `jax.lax.map` would trace anew at each call outside of `jit`
        mapped = lambda body: jax.lax.scan(body, (), elements)[1]
    else:
        mapped = lambda body: jax.lax.map(lambda x: body((), x)[1], elements, batch_size=batch_size)
    return _agreed(wrap, lambda _, body: mapped(body).model(), [f], (xs,), _LOOP)


# -- The common part of trees ------------------------------------------------------------------------------------------

_LOOP = "the step returns another carry", "before the step", "after it", "the carry itself"
_BRANCHES = "the branches return different trees", "in one branch", "in another", "the result itself"
_KINDS = 64  # of arguments, for which the wrappers of one function are kept
_PARTED = (
    "{} are one array before the step and two after it, so the loop carries them as two parameters. To keep the tie, "
    "update the model by optim.step, or end the step with tp.tie(model, layout)"
)


class _Parted(Exception):  # noqa: N818, caught in this file
    """Ends a trace in which a tree parts ties of those before: the ties that are left, and the lost ones in words."""


class _Kind:
    """The common part of the trees of a loop, or of branches: ties of parameters, and leaves that are not arrays."""

    def __init__(self, words: tuple[str, str, str, str], first: Mapping[int, int]) -> None:
        self._words = words
        self._first = first  # of each parameter the first leaf that is the same array in every tree so far
        self._rest: Any = None  # the first tree without its arrays

    def arrays(self, tree: PyTree) -> dict[str, Any]:
        """Returns the arrays of a tree by path, each tied parameter once; ends the trace if the tree parts a tie."""
        rest = Rest.of(tree, tied=False)
        without = rest.replaced(())
        self._rest = self._rest or without
        if jtu.tree_structure(without) != jtu.tree_structure(self._rest):
            what, *words = self._words
            differences = self._rest.diff(without).in_words(*words)
            number = "A Python number is static: write jnp.asarray(number), or jnp.zeros(()) for a running total"
            raise ValueError(f"{what}, and only arrays may differ:\n{differences}\n{number}")
        arrays, seen, both = dict(zip(self._leaves, rest.arrays, strict=True)), {}, {}
        own = {i: seen.setdefault(id(array), i) for i, array in arrays.items() if is_inexact(array.dtype)}
        before = self._first or own
        self._first = {i: both.setdefault((first, own.get(i, i)), i) for i, first in before.items()}
        if self._first != before:
            raise _Parted(self._first, _lost(rest.index.structure, before, self._first))
        return {self._key(i): array for i, array in arrays.items() if before.get(i, i) == i}

    def tree(self, arrays: Mapping[str, Any]) -> Any:
        """Returns the tree of such arrays."""
        return self._rest.replaced([arrays[self._key(self._first.get(i, i))] for i in self._leaves]).unpacked()

    @property
    def _leaves(self) -> tuple[int, ...]:
        """The leaves that are arrays."""
        index = self._rest.index
        return index.gathers.kept(range(len(index.trained)))

    def _key(self, leaf: int) -> str:
        return self._rest.index.structure.paths[leaf] or self._words[-1]


def _lost(structure: Structure, before: Mapping[int, int], after: Mapping[int, int]) -> list[str]:
    """Returns the parted pairs of parameters, except those of two whole nodes that were one, as in `target = agent`."""
    entries, nodes = structure.entries, {node.entries: node for node in structure.nodes}

    @functools.cache
    def were_one(*paths: tuple[str, ...]) -> bool:
        one, other = [nodes[path] for path in paths]
        if one.cls is not other.cls or one.stop > other.start:
            return False
        below = lambda node: [i for i in range(node.start, node.stop) if i in before]
        here, there = ({entries[i][len(node.entries) :]: before[i] for i in below(node)} for node in (one, other))
        shared = here.keys() & there.keys()
        return bool(shared) and all(here[path] == there[path] for path in shared)

    def is_within(a: int, b: int) -> bool:
        above = [[entries[i][:k] for k in range(1, len(entries[i]))] for i in (a, b)]
        if issubclass(structure.nodes[0].cls, (tuple, list)) and not all(above):
            return False  # a place of the carry: `(x, x)` for this value and the last one
        return not any(itertools.starmap(were_one, itertools.product(*above)))

    groups: dict[int, list[int]] = {}
    for i, first in before.items():
        groups.setdefault(first, []).append(i)
    pairs = [pair for group in groups.values() for pair in itertools.combinations(group, 2)]
    lost = [(a, b) for a, b in pairs if after[a] != after[b] and is_within(a, b)]
    return [f"{structure.paths[a]!r} and {structure.paths[b]!r}" for a, b in lost]


# -- Functions of arrays -----------------------------------------------------------------------------------------------


def _choose(choose: _Function, branches: Sequence[_Function], operands: tuple[Any, ...]) -> Any:
    """Calls one of some branches."""
    rest = Rest.of(operands)
    wrap = lambda kind, *branches: [lambda rest, f=f: kind.arrays(f(*rest.unpacked())) for f in branches]
    return _agreed(wrap, lambda kind, *wrapped: kind.tree(choose(wrapped, rest)), branches, operands, _BRANCHES)


def _closed(kind: _Kind, result: Any) -> tuple[dict[str, Any], Rest[Any]]:
    """Returns the arrays of the pair that a step of `scan` returns."""
    if not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"the step of a scan must return a pair, (carry, output), got {describe(result)}")
    return kind.arrays(result[0]), Rest.of(result[1])


def _outcome(kind: _Kind, carry: dict[str, Any], outputs: Rest[Any]) -> tuple[Any, Any]:
    return kind.tree(carry), outputs.model()


def _agreed(wrap: _Function, run: _Function, functions: Sequence[_Function], given: Any, words: Any) -> Any:
    """Runs a loop or a choice; if a step parts ties, runs it again without them.

    JAX traces a function once for equal arguments. So the wrappers are kept as long as the first function lives, and
    hold the functions weakly.
    """
    call = Rest.of((None, given, {}), by_shape=False)  # as a call: each argument is a separate tree
    known, tokens = _known(functions[0])[0], [_known(each)[1] for each in functions]
    key = (wrap.__qualname__, *tokens, jtu.tree_structure(call), *[jax.typeof(array) for array in call.arrays])
    found, first = known.get(key), {}
    while True:
        kind = found[0] if found else _Kind(words, first)
        wrapped = found[1] if found else wrap(kind, *[_weakly(each) for each in functions])
        try:
            result = run(kind, *wrapped)
        except _Parted as parted:
            found, (first, lost) = None, parted.args
        else:
            if len(known) >= _KINDS:
                known.clear()
            known[key] = kind, wrapped
            return result
        if lost and words is _LOOP:
            warn(_PARTED.format(first_few(lost)), about=(_PARTED, *lost))


@with_object
def _known(function: _Function) -> tuple[dict[Any, Any], object]:
    """Returns the wrappers of a function by the kind of their arguments, and an object that is its key in others."""
    return {}, object()


def _weakly(function: _Function) -> _Function:
    held: Any = weakref.ref(function)
    return lambda *args: held()(*args)
