"""Converts numbers and texts among the leaves of a tree to words of a file and back: `5` is `["int", "5"]`.

JSON alone is not enough. It has no complex numbers, no NaN and no `float32`, and Python reads and writes only numbers
of up to 4,300 digits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._tree.static_keys import with_object
from .._tree.structure import Spec

Value = bool | int | float | complex | str | np.generic
"""A number or a text."""

_LONGEST = 10**18  # of the numbers in decimal digits, which people can read
_KINDS: Mapping[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    bool: ("bool", str, {"True": True, "False": False}.__getitem__),
    int: ("int", lambda number: str(number) if abs(number) < _LONGEST else hex(number), lambda text: int(text, 0)),
    float: ("float", repr, float),
    complex: ("complex", repr, complex),
    str: ("str", str, str),
    np.str_: ("numpy.str", str, np.str_),
}
_FROM_TEXT = {name: read for name, _, read in _KINDS.values()}
# Their bits differ between kinds of machines, so they are not stored; and JAX lacks them.
LONG: tuple[type, ...] = (np.longdouble, np.clongdouble)


def in_words(leaf: Value) -> list[str]:
    """Returns the type and the value of a number or text as text.

    >>> in_words(5), in_words(float("inf")), in_words(True), in_words("gelu")
    (['int', '5'], ['float', 'inf'], ['bool', 'True'], ['str', 'gelu'])
    >>> in_words(np.float32(0.5))
    ['numpy.float32', '0000003f']
    """
    kind = type(leaf)
    # Of a NumPy scalar the bytes are written, which tell one NaN from another.
    return [str(kind_in_words(kind)), _KINDS[kind][1](leaf) if kind in _KINDS else np.asarray(leaf).tobytes().hex()]


def from_words(said: Sequence[str]) -> Value:
    """Returns the number or text for words of a file; raises a `ValueError`, `TypeError` or `KeyError` for other words.

    >>> from_words(["int", "5"]), from_words(["float", "inf"])
    (5, inf)
    """
    name, text = said
    if name in _FROM_TEXT:
        return _FROM_TEXT[name](text)
    dtype = np.dtype(name.removeprefix("numpy."))
    if kind_in_words(dtype.type) != name:
        raise ValueError(f"{name!r} is no type of numbers or texts")
    (value,) = np.frombuffer(bytes.fromhex(text), dtype)
    return value


@with_object
def kind_in_words(kind: type) -> str | None:
    """Returns the name in a file of a type of numbers or texts; `None` for any other type.

    >>> kind_in_words(float), kind_in_words(np.float32), kind_in_words(list)
    ('float', 'numpy.float32', None)
    """
    if kind in _KINDS:
        return _KINDS[kind][0]
    if not issubclass(kind, np.generic) or issubclass(kind, LONG):
        return None
    dtype = np.dtype(kind)
    is_number = dtype.kind == "b" or (jnp.issubdtype(dtype, np.number) and dtype.kind != "m")
    return f"numpy.{dtype.name}" if is_number else None


# -- States of optimisers ---------------------------------------------------------------------------------------------


_SIDES = {"runs": "running", "held": "held"}


class Recorded(NamedTuple):
    """A history of a state, as a file records it."""

    side: str  # "runs", or "held" if its parameters wait
    number: int  # of its count, and of its words
    path: str  # of its arrays in the state
    parameters: list[str]

    @property
    def key(self) -> tuple[str, ...]:
        """Identifies the history among those of a state, whatever their order; each parameter has one history."""
        return self.side, *self.parameters


def histories_in(words: Mapping[str, Any]) -> list[Recorded]:
    """Returns the histories of a state in the order of the counts."""
    sides = [(side, i, paths) for side, its in _SIDES.items() for i, paths in enumerate(words[its])]
    return [Recorded(side, n, f"{side}.{i}", paths) for n, (side, i, paths) in enumerate(sides)]


def specs_in(words: Mapping[str, Any]) -> dict[str, Spec]:
    """Returns the shapes and dtypes of the parameters that a state belongs to."""
    return {said[0]: Spec(tuple(said[2]), np.dtype(said[3]), True) for said in words["slots"]}
