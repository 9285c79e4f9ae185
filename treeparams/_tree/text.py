"""Values and counts in words; tables as text and as HTML, for terminals and notebooks."""

import contextlib
import functools
import html
import importlib
import inspect
import operator
import os
import warnings
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jaxtyping

from .paths import nearest

_ROWS = 40
_NAMES = 6


def describe(value: object) -> str:
    """Returns the dtype and shape of an array, or the type of any other value.

    >>> import jax.numpy as jnp
    >>> describe(jnp.ones((2, 3))), describe(0.5)
    ('float32[2,3]', 'float')
    """
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is not None and dtype is not None:
        return f"{dtype}[{','.join(map(str, shape))}]"
    return type(value).__name__


def function_name(function: object, *, with_line: bool = True) -> str:
    """Returns the name of a function or class, for a lambda its line; describes any other value.

    >>> function_name(len), function_name(dict.get), function_name(0.5)
    ('len', 'dict.get', 'float')

    Without the line, the name does not change when somebody edits the lines above.

    >>> function_name(lambda x: x, with_line=False)
    '<lambda>'
    """
    name = getattr(function, "__qualname__", getattr(function, "__name__", None))  # ufuncs have the latter alone
    if not isinstance(name, str):
        return describe(function)
    if not with_line:
        return name
    code = getattr(inspect.unwrap(function), "__code__", None) if callable(function) else None
    if name.endswith("<lambda>") and code is not None:
        return f"lambda at {os.path.basename(code.co_filename)}:{code.co_firstlineno}"
    return name.rpartition("<locals>.")[2]


def _in_one_line(cell: str) -> str:
    r"""Escapes a text that would break a row or cannot be printed: the key of a dictionary may be any text.

    >>> print(_in_one_line("a\nb"))
    a\nb
    """
    return cell if cell.isprintable() else repr(cell)[1:-1]


def in_short(error: Exception) -> str:
    """Describes an error by its class and the first line of its message.

    >>> in_short(ValueError("no such thing")), in_short(KeyError())
    ('ValueError: no such thing', 'KeyError')
    """
    return " ".join([f"{type(error).__name__}:", *str(error).strip().splitlines()[:1]]).rstrip(":")


def first_few(names: Sequence[str]) -> str:
    """Returns names in one line; if there are many, the first ones and the last."""
    shown = names if len(names) <= _NAMES else [*names[: _NAMES - 1], "...", names[-1]]
    return ", ".join(map(_in_one_line, shown))


def first_lines(lines: Iterable[str], count: int = 5) -> str:
    """Returns the lines of a message; if there are many, the first ones and how many more there are."""
    lines = list(lines)
    more = [f"... and {len(lines) - count:,} more"] if len(lines) > count else []
    return "\n".join([*lines[:count], *more])


def quoted(paths: Sequence[str], count: int = 3) -> str:
    """Returns paths in quotes for a message; if there are many, the first ones and how many more there are."""
    more = f" and {len(paths) - count:,} more" if len(paths) > count else ""
    return ", ".join(map(repr, paths[:count])) + more


def count_of(name: str, value: Any, what: str, least: int = 1) -> int:
    """Returns an argument that counts something as a Python int; raises a `ValueError` if it is not a count."""
    with contextlib.suppress(TypeError):  # also of arrays, which have `__index__` but may not be whole numbers
        if not isinstance(value, bool) and operator.index(value) >= least:
            return operator.index(value)
    raise ValueError(f"{name} must be a whole number of {what}, at least {least}, got {value!r}")


def imported(module: str, extra: str, by: str) -> Any:
    """Imports an optional module; raises an error that names its extra if it is not installed."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        needed = f"{by} needs {module}, of the extra treeparams[{extra}]: pip install {module}"
        raise ModuleNotFoundError(needed) from None


def in_bytes(count: int) -> str:
    """Formats a number of bytes, with at most four digits.

    >>> in_bytes(999), in_bytes(1000), in_bytes(999_950), in_bytes(90_853_376)
    ('999 B', '1.0 kB', '1.0 MB', '90.9 MB')
    """
    scaled, prefixes = count / 1000, "kMGTPEZ"
    while scaled >= 999.95 and len(prefixes) > 1:
        scaled, prefixes = scaled / 1000, prefixes[1:]
    return f"{count} B" if count < 1000 else f"{scaled:,.1f} {prefixes[0]}B"


# -- Warnings at the line that calls this library ----------------------------------------------------------------------

AS_ARRAY = "write jnp.asarray(number), or tp.field(converter=jnp.asarray) in its class"
# Where run-time checks of annotations are switched on, they stand between the calls of this library.
_OURS = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(jaxtyping.__file__), "<@beartype(treeparams")
_given: dict[Hashable, None] = {}  # what warnings were about, the oldest first


def warn(message: str, about: Hashable = None) -> None:
    """Gives a warning at the line that called this library; only once for each `about`."""
    if about in _given:
        return
    if about is not None:
        _given[about] = None
        if len(_given) > 1000:
            del _given[next(iter(_given))]
    frame, levels = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, UserWarning, stacklevel=levels)


# -- Tables ------------------------------------------------------------------------------------------------------------


class Table(NamedTuple):
    """Rows of text below a header; the columns in `right` are aligned to the right. Many rows lose their middle."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    right: Sequence[int] = ()

    def shown(self) -> list[list[str]]:
        """Returns the header and the rows; of many the first and last ones, and a row that counts the rest."""
        rows, left_out = list(self.rows), len(self.rows) - _ROWS
        if left_out > 0:
            rows[_ROWS // 2 : -_ROWS // 2] = [[f"... {left_out:,} more", *[""] * (len(self.header) - 1)]]
        return [list(map(_in_one_line, row)) for row in (self.header, *rows)]


def _as_text(blocks: Sequence[Table | str]) -> str:
    """Formats tables with aligned columns, and lines of text.

    >>> print(_as_text([Table(["path", "size"], [["a", "10"]], right=[1]), "", "10 elements"]))
    path  size
    a       10
    <BLANKLINE>
    10 elements
    """
    lines = list[str]()
    for block in blocks:
        if isinstance(block, str):
            lines.append(block)
            continue
        columns = list(zip(*block.shown(), strict=True))
        for i, column in enumerate(columns):
            width = max(map(len, column))
            columns[i] = tuple([cell.rjust(width) if i in block.right else cell.ljust(width) for cell in column])
        lines += ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
    return "\n".join(lines)


def _as_html(blocks: Sequence[Table | str]) -> str:
    """Formats tables and lines of text for a notebook.

    >>> _as_html(["10 elements"])
    '<div style="text-align:left"><p style="font-family:monospace">10 elements</p></div>'
    """
    # Every cell says for itself how it looks: nbconvert, Colab and GitHub keep different parts of a style sheet, and
    # show a bare `<pre>` in a proportional font or not at all.
    parts, lines = list[str](), list[str]()
    for block in [*blocks, Table((), ())]:  # the last for the lines above it
        if isinstance(block, str):
            lines += [html.escape(block)] if block else []
            continue
        parts += [f'<p style="font-family:monospace">{"<br>".join(lines)}</p>'] if lines else []
        lines = []
        rows = list[str]()
        for n, row in enumerate(block.shown()):
            rows.append("".join([_cell("td" if n else "th", i in block.right, cell) for i, cell in enumerate(row)]))
        parts += [f"<table>{''.join(f'<tr>{row}</tr>' for row in rows)}</table>"] if block.header else []
    return f'<div style="text-align:left">{"".join(parts)}</div>'


class Printed:
    """An object that prints as its tables and lines of text; in a notebook, as HTML."""

    def _blocks(self) -> Sequence[Table | str]:
        raise NotImplementedError

    def __str__(self) -> str:
        return _as_text(self._blocks())

    def _repr_html_(self) -> str:
        return _as_html(self._blocks())


def _cell(tag: str, is_right: bool, cell: str) -> str:
    style = f"text-align:{'right' if is_right else 'left'};font-family:monospace;white-space:pre"
    return f'<{tag} style="{style}">{html.escape(cell)}</{tag}>'


# -- Calls that do not fit ---------------------------------------------------------------------------------------------

# What others call an argument, by the name that it has here; the first that a function has is meant.
_MEANT = {
    "freeze": "freeze frozen freezed freezing requires_grad train",
    "thaw": "thawed unfreeze unfrozen",
    "ties": "tie tied tied_to",
    "tied_to": "tie tied ties",
    "to": "tie tied ties tied_to source",
    "trainable": "where mask filter_spec filter wrt argnums params thaw freeze frozen freezed requires_grad train",
    "decay": "momentum beta alpha",
    "pieces": "steps microbatches chunks num_microbatches every_k_schedule",
    "like": "target template item",
}


def answer_calls(package: str, names: dict[str, Any]) -> None:
    """Makes the functions among the public names of a package answer calls that do not fit them."""
    for name, value in list(names.items()):
        if name[0] != "_" and inspect.isfunction(value):
            label = "tp" if package == "treeparams" else package.removeprefix("treeparams.")
            names[name] = _answering(f"{label}.{name}", value)
            names[name].__module__ = package  # under which it pickles


def _answering(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def answering(*args: Any, **kwargs: Any) -> Any:
        try:
            result = function(*args, **kwargs)
            # What a verb returns, such as a gradient's function, answers too; one of the user's is left alone.
            is_ours = inspect.isfunction(result) and result.__qualname__.startswith(f"{function.__qualname__}.<locals>")
            return _answering(f"{name}(...)", result) if is_ours else result
        except TypeError:  # only then is it worth a look at the call
            signature = inspect.signature(function)
            try:
                signature.bind(*args, **kwargs)
            except TypeError as slip:
                shown = [each + "=..." * (its.kind is its.KEYWORD_ONLY) for each, its in signature.parameters.items()]
                said = _unknown_argument(name, signature.parameters, kwargs) or f"{name}: {slip}"
                raise TypeError(f"{said}; it is {name}({', '.join(shown)})") from None
            raise

    return answering


def _unknown_argument(name: str, known: Collection[str], given: Mapping[str, object]) -> str:
    """Returns words for the first argument that a function does not have, with a nearer one; empty for none."""
    for other in given.keys() - known:
        meant = next((each for each, words in _MEANT.items() if each in known and other in words.split()), "")
        if given[other] == "zeros" and "missing" in known:
            hint = '; write missing="zeros"'
        elif meant == "trainable" and other in _MEANT["freeze"].split():
            hint = "; write trainable=False" if "tied_to" in known else '; write trainable="!..." with what is frozen'
        else:
            hint = f"; write {meant}=..." if meant else nearest(other, known, 1)
        return f"{name} has no argument {other!r}{hint}"
    return ""
