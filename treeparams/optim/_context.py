"""What stands around an element of a chain: nothing, or a transformation that has chosen the leaves already.

Every public transformation of `treeparams.optim` takes a whole model where it stands alone. Inside of another one - a
clip in `trainable(chain(clip, adam))` - it is given a canonical tree, in which all that is there is trained, thawed
leaves of frozen fields included, or one vector. A tree does not tell which of these it is, so whoever hands it on says
it here.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

from jaxtyping import PyTree

from .._layout import Layout, trained_at
from .._parts import Parts, take_apart
from .._recognise import structure_of
from .._resolve import look_up, retrained


class Around(NamedTuple):
    """The transformation around an element."""

    layout: Layout | None  # of the whole model; none where `optax.tree.map_params` asks what a state looks like
    is_vector: bool  # whether a vector is handed on in place of a canonical tree
    is_partial: bool  # whether some leaf that trains has no gradient in this call


_around: ContextVar[Around | None] = ContextVar("around", default=None)
_collecting: ContextVar[bool] = ContextVar("collecting", default=False)


def around() -> Around | None:
    """What stands around; `None` where a whole model is given."""
    return _around.get()


@contextlib.contextmanager
def within(layout: Layout | None, is_vector: bool, is_partial: bool = False) -> Iterator[None]:
    """Calls in this block are given what is trained of a model of this layout."""
    token = _around.set(Around(layout, is_vector, is_partial))
    try:
        yield
    finally:
        _around.reset(token)


def is_collecting() -> bool:
    """Whether `init` is to name the transformation in place of its state; see `set_trainable`."""
    return _collecting.get()


@contextlib.contextmanager
def collecting() -> Iterator[None]:
    """In this block `init` names the transformation in place of its state."""
    token = _collecting.set(True)
    try:
        yield
    finally:
        _collecting.reset(token)


def given(tree: PyTree, trainable: Any) -> Parts:
    """What an element was given, taken apart by the leaves that count for it.

    Raises:
        ValueError: as `tp.layout`; a choice of leaves where a vector is given.
        TypeError: as `tp.layout`.
    """
    above = around()
    if above is None:
        return take_apart(tree, trainable)
    chosen = None
    if trainable is None or above.layout is None:
        pass
    elif above.is_vector:
        raise ValueError(
            f"inside of optim.flat there is one vector and no leaves, so trainable={trainable!r} chooses none"
        )
    else:
        chosen = set(retrained(above.layout, trainable).paths)
    # In what is handed on all counts, also where a class declares it frozen and a layout thawed it.
    declared, index = look_up(structure_of(tree)[2], None)
    paths = index.structure.paths
    return take_apart(tree, trained_at(declared, [i for i in index.distinct if chosen is None or paths[i] in chosen]))
