"""Carries averages of the old model over to the new one."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import equinox as eqx
import jax.numpy as jnp
import jax.tree_util as jtu

from .._average import Ema
from .._files.arrays import placed
from .._files.names import Names
from .._slots.parts import kept_arrays, with_kept_arrays
from .._tree.paths import nearest, quote
from .._tree.text import describe, first_few
from .._tree.types import Array, in_dtype
from ..optim._state import in_own_buffers
from ._movers import Movers

M = TypeVar("M")


def carried_average(movers: Movers, source: Names, like: Ema[M]) -> Ema[M]:
    """Carries an average over to the new model; see `Plan.average`."""
    if not isinstance(like, Ema):
        raise TypeError(f"expected a fresh average of the new model, like=tp.Ema(model, ...), got {describe(like)}")
    if not {"count", "weight"} <= source.specs.keys():
        raise ValueError(
            'expected a tp.Ema, or the names of one, such as saving.names(path, "average"); got names such as '
            f"{first_few(list(source)[:3])}"
        )
    shadows, treedef = jtu.tree_flatten(like.shadow)
    trained, kept = dict(zip(like.rest.layout.paths, shadows, strict=True)), kept_arrays(like.rest)
    movers.check_like([*trained.items(), *kept.items()], "tp.Ema(model, ...)")
    # Of an array that is split, each result asks for the whole array, one after another.
    read = functools.lru_cache(maxsize=4)(functools.partial(_average_of, source))
    shadow, others = ([_moved(movers, read, *each) for each in its.items()] for its in (trained, kept))
    rest = with_kept_arrays(like.rest, others)
    made = jtu.tree_unflatten(treedef, shadow), rest, *(jnp.asarray(source[name]) for name in ("count", "weight"))
    return in_own_buffers(eqx.tree_at(lambda ema: (ema.shadow, ema.rest, ema.count, ema.weight), like, made))


def _moved(movers: Movers, average_of: Callable[[str], Any], path: str, like: Array) -> Array:
    """Returns the average for a path of the new model; the fresh one if nothing comes there."""
    if not movers.sources(path):
        return like
    is_plain = movers.is_plain(path)

    def read(name: str) -> Any:
        array, want = average_of(movers.roots.get(name, name)), movers.specs[name]
        if not is_plain and array.shape != want.shape:
            raise ValueError(
                f"the average of {name!r} is {describe(array)}, but the plan's source has {describe(want)}"
            )
        return array

    new = movers.move(path, read)
    if new.shape != like.shape:
        raise ValueError(f"the average of {path!r} is {describe(new)}, but like has {describe(like)} there")
    return placed(path, in_dtype(new, like.dtype), like)


def _average_of(source: Names, name: str) -> Any:
    """Returns the average of an old parameter, or another array of its model."""
    # An average has the trained parameters as a canonical tree, and all other arrays in its `rest`, by path. Which of
    # the two a name is in may have changed since: a parameter that trained may be frozen now.
    shadow = f"shadow.{name}" if name else "shadow"
    # A key with dots is a name as it is, and a path in quotes.
    for known in (shadow, f"rest.{quote(name)}", f"shadow.{quote(name)}", f"rest.{quote(quote(name))}"):
        if known in source.specs:
            return source[known]
    raise ValueError(f"the average has no array for {name!r}{nearest(shadow, source.specs)}")
