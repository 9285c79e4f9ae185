"""Converts numbers and texts among the leaves of a tree to words of a file and back: `5` is `["int", "5"]`.

JSON alone is not enough. It has no complex numbers, no NaN and no `float32`, and Python reads and writes only numbers
of up to 4,300 digits.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._tree.static_keys import with_object

Value = bool | int | float | complex | str | np.generic
"""A number or a text."""

_LONGEST = 10**18  # of the numbers in decimal digits, which people can read


def _int_as_text(number: int) -> str:
    return str(number) if abs(number) < _LONGEST else hex(number)


def _int_in(text: str) -> int:
    return int(text, 0)


_TO_TEXT: Mapping[type, Callable[[Any], str]] = {
    bool: str,
    int: _int_as_text,
    float: repr,
    complex: repr,
    str: str,
    np.str_: str,
}
_FROM_TEXT: Mapping[str, Callable[[str], Any]] = {
    "bool": {"True": True, "False": False}.__getitem__,
    "int": _int_in,
    "float": float,
    "complex": complex,
    "str": str,
    "numpy.str": np.str_,
}
_OF_NUMPY = "numpy."
LONG: tuple[type, ...] = (np.longdouble, np.clongdouble)
"""Numbers whose bits differ between kinds of machines, so they are not stored."""


def in_words(leaf: Value) -> list[str]:
    """Returns the type and the value of a number or text as text.

    >>> in_words(5), in_words(float("inf")), in_words(True), in_words("gelu")
    (['int', '5'], ['float', 'inf'], ['bool', 'True'], ['str', 'gelu'])
    >>> in_words(np.float32(0.5))
    ['numpy.float32', '0000003f']
    """
    kind = type(leaf)
    name = kind_in_words(kind)
    if name is None:
        raise TypeError(f"a {kind.__name__} is neither a number nor a text")
    # Of a NumPy scalar the bytes are written, which tell one NaN from another.
    return [name, _TO_TEXT[kind](leaf) if kind in _TO_TEXT else np.asarray(leaf).tobytes().hex()]


def from_words(said: Sequence[str]) -> Value:
    """Returns the number or text for words of a file; raises a `ValueError` or `KeyError` for other words.

    >>> from_words(["int", "5"]), from_words(["float", "inf"])
    (5, inf)
    """
    name, text = said
    if name in _FROM_TEXT:
        return _FROM_TEXT[name](text)
    dtype = np.dtype(name.removeprefix(_OF_NUMPY))
    if kind_in_words(dtype.type) != name:
        raise ValueError(f"{name!r} is no type of numbers or texts")
    return np.frombuffer(bytes.fromhex(text), dtype)[0]


@with_object
def kind_in_words(kind: type) -> str | None:
    """Returns the name in a file of a type of numbers or texts; `None` for any other type.

    >>> kind_in_words(float), kind_in_words(np.float32), kind_in_words(list)
    ('float', 'numpy.float32', None)
    """
    if kind in _TO_TEXT:
        return f"{_OF_NUMPY}str" if kind is np.str_ else kind.__name__
    if not issubclass(kind, np.generic) or issubclass(kind, LONG):
        return None
    dtype = np.dtype(kind)
    is_number = dtype.kind == "b" or (jnp.issubdtype(dtype, np.number) and dtype.kind != "m")
    return f"{_OF_NUMPY}{dtype.name}" if is_number else None
