"""diff: lists how two trees differ, by path: first as a compiler sees them, then in the elements of their arrays."""

import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Set
from typing import Any, SupportsFloat

import jax
import jax.tree_util as jtu
import numpy as np
from jax.core import Tracer

from ._files.arrays import array_spec
from ._files.names import Names, name_of, names_in, split_name
from ._files.values import kind_in_words
from ._slots.layout import Layout
from ._slots.ties import find_ties
from ._tree.difference import Diff, Difference, compare
from ._tree.paths import join_path, split_path, unquote
from ._tree.static_keys import static_key
from ._tree.structure import Spec, naming_deleted, structure_of
from ._tree.text import describe
from ._tree.types import PyTree, is_complex, is_inexact, is_key, value_of

_AT_ONCE = 1 << 18  # elements; of more than these no temporary is made
_Rows = Iterator[Difference]


def diff(a: PyTree, b: PyTree, *, atol: float | int | None = None, rtol: float | int | None = None) -> Diff:
    """Lists how two trees differ, by path: as a compiler sees them, and in the elements of their arrays.

    You can compare any two pytrees: models, gradients, optimiser states, averages, stacks, vectors.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> shared = jnp.arange(6.0).reshape(2, 3)
    >>> model = {
    ...     "embed": shared,
    ...     "head": shared,
    ...     "norm": eqx.nn.LayerNorm(3),
    ...     "rate": 0.5,
    ...     "steps": jnp.array(0),
    ... }
    >>> other = {
    ...     **model,
    ...     "head": jnp.copy(shared),
    ...     "norm": eqx.nn.LayerNorm(3, eps=1e-6),
    ...     "steps": jnp.array(0.0),
    ... }
    >>> print(tp.diff(model, other))
    path      what    first          second
    norm.eps  static  1e-05 (float)  1e-06 (float)
    steps     dtype   int32[]        float32[]
    embed     tie     head           nothing
    <BLANKLINE>
    3 differences: static 1, dtype 1, tie 1

    Among arrays whose elements differ, the one with the largest difference comes first. You see the two elements that
    differ most:

    >>> model = {"bias": jnp.zeros(3), "weight": jnp.array([1.0, 2.0, 3.0])}
    >>> other = {"bias": jnp.array([1e-6, 0.0, 0.0]), "weight": jnp.array([1.0, 2.5, jnp.nan])}
    >>> print(tp.diff(model, other))
    path    largest  relative  elements   NaN  first  second
    weight      inf       inf    2 of 3  0, 1    3.0     nan
    bias      1e-06         1    1 of 3  0, 0    0.0   1e-06
    <BLANKLINE>
    2 differences
    >>> tp.diff(model, other, atol=1e-5).paths
    ('weight',)

    If a subtree exists in only one of the two trees, the table lists it once, at its topmost node, as `structure`.
    `None` is neither an array nor zeros.

    You can compare files by name: `tp.diff("a.safetensors", "b.safetensors")`, a file with a tree, or the names in a
    file, `saving.names(path, "model")`. Their arrays are read two at a time. A file has no classes and no functions, so
    a tree is compared with it in arrays and ties only; with a file from `saving.save` also in numbers and texts.

    Args:
        a: any pytree; leaves may be `jax.ShapeDtypeStruct`s or tracers, which have no elements to compare. Or the path
            of a safetensors file, or the result of `saving.names`. Or a `Layout`.
        b: another tree or file; a `Layout` if `a` is one.
        atol: the absolute tolerance: elements are equal if `|a - b| <= atol + rtol * |b|`; `None` means 0. It applies
            to floating and integer arrays and to Python floats; bools and PRNG keys are compared exactly.
        rtol: the tolerance relative to the element of `b`.

    Returns:
        A `Diff`, which is false if nothing differs. It prints as a table; `diff.rows` are the differences and
        `diff.paths` their paths. The second column holds one of these words:

        - `structure`: a subtree exists in only one tree; the other has nothing, `None` or a leaf there. `class`: a node
          has another class.
        - `static`: a static value of a node differs in type or content (for static arrays: in identity); `2`, `2.0` and
          `True` differ. `value`: the same for a leaf that is not an array, such as a function or a Python number.
        - `type`: an array in one tree, something else in the other. `shape`, `dtype`: as JAX sees them, so a NumPy
          array can equal a JAX array. `weak type`: like the one of `jnp.asarray(1.0)`.
        - `sharding`: two JAX arrays are on different devices, are split differently, or only one of them is committed
          to its device, as by `jax.device_put(x, device)`: `jax.jit` compiles once for each.
        - `tie`: the array at a path is the same object as the arrays at other paths. To compare ties that you declared
          or passed, or to see which parameters are trained, compare two layouts with `tp.diff`.
        - `elements`: compared by value, so `0.1` in float64 is not `0.1` in float32. NaN equals NaN, in each part of a
          complex number, and `-0.0` equals `0.0`. A NaN or infinity against anything else is an infinite difference.
          The relative difference is relative to the element of `b`. Arrays of different shapes are not compared.

    Raises:
        OSError: the file does not exist.
        ValueError: `atol` or `rtol` is negative or NaN; a tree contains itself; a file is damaged.
        TypeError: only one of the two is a `Layout`; `atol` or `rtol` is not a number.
        RuntimeError: an array to compare has been deleted, or is on devices of other processes.
    """
    tolerance = _tolerance("atol", atol), _tolerance("rtol", rtol)
    if isinstance(a, Layout) and isinstance(b, Layout):
        return a.diff(b)
    if isinstance(a, Layout) or isinstance(b, Layout):
        got = " and ".join(f"a {type(each).__name__}" for each in (a, b))
        raise TypeError(f"expected two models or two layouts, got {got}; make a layout of both, tp.layout(model)")
    if _is_of_files(a) or _is_of_files(b):
        return _diff_by_name(a, b, tolerance)
    ours, _, these = structure_of(a)
    theirs, _, those = structure_of(b)
    ours, theirs = list(map(value_of, ours)), list(map(value_of, theirs))

    def at_leaves(i: int, j: int) -> Iterator[Difference]:
        if ours[i] is not theirs[j]:
            values = these.specs[i] or ours[i], those.specs[j] or theirs[j]
            yield from _leaf_rows(these.paths[i], *values, lambda: (ours[i], theirs[j]), tolerance)

    def is_shared(path: str) -> bool:
        i, j = these.index.get(path), those.index.get(path)
        return not (i is None or j is None or any(type(leaf) is jax.ShapeDtypeStruct for leaf in (ours[i], theirs[j])))

    with naming_deleted(a, b):
        rows = list(compare(these, those, at_leaves, (ours, theirs)))
    return _sorted([*rows, *Difference.of_ties(these.ties, those.ties, is_shared)])


def _sorted(rows: Iterable[Difference]) -> Diff:
    """Returns the rows as they are, and after them those of elements, the largest difference first."""
    return Diff(sorted(rows, key=lambda row: (row.what == "elements", -(row.absolute or 0))))


def _leaf_rows(
    path: str, one: Any, other: Any, read: Callable[[], Any], tolerance: tuple[float, float], *, of_jax: bool = True
) -> Iterator[Difference]:
    """Yields how two leaves differ, each a `Spec` of an array that is then read, or a value."""
    if not (isinstance(one, Spec) and isinstance(other, Spec)):
        are_values = not (isinstance(one, Spec) or isinstance(other, Spec))
        if not (are_values and _are_equal_values(one, other, tolerance)):
            yield Difference.of_values(path, "value" if are_values else "type", one, other)
        return
    yield from Difference.of_specs(path, one, other)
    if not (of_jax or one.shape == other.shape):
        return
    here, there = read()
    weak = [of_jax and bool(getattr(array, "weak_type", False)) for array in (here, there)]
    if weak[0] != weak[1]:
        yield Difference(path, "weak type", describe(one) + ", weak" * weak[0], describe(other) + ", weak" * weak[1])
    if one.shape == other.shape and _is_concrete(here) and _is_concrete(there):
        if of_jax and isinstance(here, jax.Array) and isinstance(there, jax.Array):
            first, second = _placed(here.sharding), _placed(there.sharding)
            if not here.sharding.is_equivalent_to(there.sharding, here.ndim):
                yield Difference(path, "sharding", first, f"{second}, other devices" if first == second else second)
            elif here.committed != there.committed:
                first, second = (_placed(each.sharding) + ", committed" * each.committed for each in (here, there))
                yield Difference(path, "sharding", first, second)
        yield from _element_rows(path, here, there, tolerance)


def _tolerance(name: str, value: float | int | None) -> float:
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, SupportsFloat):
        raise TypeError(f"{name} must be a number, at least 0, or None, got {value!r}")
    if not float(value) >= 0:
        raise ValueError(f"{name} must be at least 0, got {value!r}")
    return float(value)


def _is_concrete(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) or (isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer))


def _placed(sharding: jax.sharding.Sharding) -> str:
    """Describes the devices of an array in a few words."""
    if len(sharding.device_set) == 1:
        return repr(next(iter(sharding.device_set)))
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"{type(sharding).__name__} over {len(sharding.device_set)}"
    axes = ", ".join(f"{name}={size}" for name, size in sharding.mesh.shape.items())
    return f"{tuple(sharding.spec)} over {axes}"


def _are_equal_values(here: object, there: object, tolerance: tuple[float, float]) -> bool:
    """Returns whether two leaves that are not JAX arrays are equal."""
    if type(here) is not type(there):
        return False
    if isinstance(here, np.ndarray) and isinstance(there, np.ndarray):  # of texts or objects
        return here.dtype == there.dtype and bool(np.array_equal(here, there))
    if here is there or static_key(here, strict=True) == static_key(there, strict=True):
        return True
    are_numbers = any(tolerance) and isinstance(here, (float, complex, np.inexact))
    return are_numbers and not list(_element_rows("", np.asarray(here), np.asarray(there), tolerance))


# -- By name -----------------------------------------------------------------------------------------------------------


def _is_of_files(source: object) -> bool:
    """Returns whether a source is a file, or the names in one."""
    return isinstance(source, (str, os.PathLike, Names))


def _diff_by_name(a: Any, b: Any, tolerance: tuple[float, float]) -> Diff:
    """Compares two sources by name, at least one of them a file: arrays, ties, numbers and texts, but no classes."""
    ours, theirs = map(_by_name, (a, b))
    if _is_of_files(b):
        ours = ours.spelt_as([*theirs.specs, *(theirs.numbers or ())])
    else:
        theirs = theirs.spelt_as([*ours.specs, *(ours.numbers or ())])
    # Other programs write arrays alone; then nothing is known of numbers.
    say_numbers = ours.numbers is not None and theirs.numbers is not None
    here, there = ({**each.specs, **(each.numbers or {} if say_numbers else {})} for each in (ours, theirs))
    computed = {*ours.computed, *theirs.computed}
    rows = [*_missing_rows(here, there, computed, 0), *_missing_rows(there, here, computed, 1)]
    for name in [name for name in here if name in there]:
        # What is the same array again is read once.
        is_again = name in ours.aliases and ours.aliases[name] == theirs.aliases.get(name)
        read = lambda name=name, is_again=is_again: (None, None) if is_again else (ours[name], theirs[name])
        rows += _leaf_rows(name, here[name], there[name], read, tolerance, of_jax=False)
    one, other = ([(name, alias, "") for alias, name in each.aliases.items()] for each in (ours, theirs))
    return _sorted([*rows, *Difference.of_ties(one, other, lambda name: name in ours.specs and name in theirs.specs)])


def _by_name(source: Any) -> Names:
    """Returns the names in a file or a tree."""
    if _is_of_files(source) and (known := names_in(source)) is not None:  # a list of texts is a tree
        return known
    if isinstance(source, Mapping) and jtu.all_leaves([source]):  # as NumPy's of a file
        source = dict(source)
    leaves, _, structure = structure_of(source)
    leaves = list(map(value_of, leaves))
    # The keys of a flat dictionary of arrays are names as they are: dots in them need no quotes.
    is_one_key = lambda path: path.startswith('"') and len(split_path(path)) == 1
    names = [unquote(path) if is_one_key(path) else name_of(path) for path in structure.paths]
    arrays = {names[i]: i for i, spec in enumerate(structure.specs) if spec is not None}
    specs = {name: array_spec(leaves[i]) for name, i in arrays.items()}
    # As in a file, identity ties parameters alone: two counters that are one array are two places.
    ties = find_ties(structure)
    aliases = {names[tie.leaf]: names[tie.source] for tie in ties if not tie.transforms}
    values = [(name, leaf) for name, leaf in zip(names, leaves, strict=True) if name not in arrays]
    numbers = {name: leaf for name, leaf in values if kind_in_words(type(leaf))}
    computed = [names[tie.leaf] for tie in ties if tie.transforms]
    return Names(specs, lambda name: leaves[arrays[name]], aliases, numbers=numbers, computed=computed)


def _missing_rows(these: Mapping[str, Any], those: Mapping[str, Any], computed: Set[str], side: int) -> _Rows:
    """Returns a row for each node that only one of the two has, at the topmost node that the other lacks."""
    entries = map(split_name, those)
    known = {its[:depth] for its in entries for depth in range(len(its) + 1)}
    heads: dict[str, list[str]] = {}
    for name in these:
        if name not in those and name not in computed:
            its = split_name(name)
            depth = next((depth for depth in range(len(its)) if its[:depth] not in known), len(its))
            heads.setdefault(join_path(its[:depth]), []).append(name)
    for head, names in heads.items():
        count = f"{len(names):,} lea{'f' if len(names) == 1 else 'ves'}"
        yield Difference.of_one(head, Difference.value_in_text(these[head]) if names == [head] else count, side)


# -- Elements of two arrays of one shape, by value ---------------------------------------------------------------------


def _element_rows(path: str, here: Any, there: Any, tolerance: tuple[float, float]) -> _Rows:
    """Yields the row for two arrays of one shape, if their elements differ by more than `(atol, rtol)`."""
    are_keys = [is_key(each) for each in (here, there)]
    if (any(are_keys) and here.dtype != there.dtype) or jax.dtypes.float0 in (here.dtype, there.dtype):
        return
    if any(are_keys):
        here, there = jax.random.key_data(here), jax.random.key_data(there)
    first, second = np.asarray(here).reshape(-1), np.asarray(there).reshape(-1)
    is_exact = any(are_keys) or bool in (first.dtype, second.dtype)
    atol, rtol = (0.0, 0.0) if is_exact else tolerance
    largest, relative, differing, largest_at, nans = 0.0, 0.0, 0, 0, [0, 0]
    # Slice by slice: two arrays may be most of the memory, and the temporaries in double precision would be twice them.
    for start in range(0, first.size, _AT_ONCE):
        x, y = first[start : start + _AT_ONCE], second[start : start + _AT_ONCE]
        if first.dtype == second.dtype and not (x != y).any():  # nor is there a NaN
            continue
        with np.errstate(all="ignore"):
            gaps, sizes = _gaps(x, y, nans)
            far = gaps > 0
            if atol or rtol:
                far &= ~((gaps <= atol + rtol * sizes) & np.isfinite(gaps))
            if not far.any():
                continue
            gaps, ratios = np.where(far, gaps, 0), np.where(far, gaps / sizes, 0)
        differing += int(np.count_nonzero(far))
        relative = max(relative, float(np.where(np.isnan(ratios), np.inf, ratios).max()))
        at = int(gaps.argmax())
        if gaps[at] > largest:
            largest, largest_at = float(gaps[at]), start + at
    if differing:
        words = str(first[largest_at]), str(second[largest_at])
        yield Difference(path, "elements", *words, largest, relative, differing, first.size, (nans[0], nans[1]))


def _gaps(x: np.ndarray, y: np.ndarray, nans: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the distances of elements, and the sizes of the second ones, in double precision; counts NaNs."""
    dtype = np.result_type(*(each.dtype if each.dtype.kind in "iu" else np.int64 for each in (x, y)))
    if not is_inexact(x.dtype) and not is_inexact(y.dtype) and dtype.kind in "iu":
        x, y = x.astype(dtype), y.astype(dtype)
        # The difference of two integers of 64 bits needs these bits and no sign: it is right where it wraps around.
        return np.where(x > y, x - y, y - x).view(f"u{dtype.itemsize}").astype(np.float64), np.abs(y.astype(np.float64))
    wide = np.complex128 if is_complex(x.dtype) or is_complex(y.dtype) else np.float64
    x, y = x.astype(wide), y.astype(wide)
    for side, each in enumerate((x, y)):
        nans[side] += int(np.count_nonzero(np.isnan(each)))
    gaps = np.abs(x - y)
    # NaN comes of a NaN on either side and of infinities: all are infinitely far apart, but for those that are equal.
    gaps[np.isnan(gaps)] = math.inf
    gaps[_are_equal_numbers(np.real(x), np.real(y)) & _are_equal_numbers(np.imag(x), np.imag(y))] = 0
    return gaps, np.abs(y)


def _are_equal_numbers(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns whether numbers are equal, or both NaN; pass each part of a complex number separately."""
    return (x == y) | ((x != x) & (y != y))
