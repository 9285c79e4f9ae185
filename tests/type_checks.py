"""Annotations checked at run time by beartype, at a fraction of what the import hook of jaxtyping takes for each call.

The hook puts `jaxtyping.jaxtyped` before each function. So that names of axes mean the same in all annotations of a
function, it binds the arguments of every call and checks them twice. Few functions name axes; beartype alone checks the
others.
"""

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jaxtyping

_of_jaxtyping = jaxtyping.jaxtyped

# Compiled under such a name since this library knows by it what checks have put between its calls.
_SWITCH = """
def switch(function, typechecker):
    checked = None  # until the first call: it takes a millisecond for each function, and there are thousands
    def either(*arguments, **keywords):
        nonlocal checked
        if config.jaxtyping_disable:
            return function(*arguments, **keywords)
        if checked is None:
            checked = typechecker(function)
        return checked(*arguments, **keywords)
    return either
"""
_names: dict[str, Any] = {"__name__": "beartype.switch", "config": jaxtyping.config}
exec(compile(_SWITCH, "<@beartype(treeparams)>", "exec"), _names)


def _names_axes(hint: object) -> bool:
    return re.search(r"jaxtyping\.\w+\[", str(hint)) is not None


def _checked(function: Any, typechecker: Any) -> Any:
    if inspect.isclass(function):
        made = getattr(function.__init__, "__globals__", {}).get("__name__")
        if dataclasses.is_dataclass(function) and made not in (_names["__name__"], _of_jaxtyping.__module__):
            function.__init__ = _checked(function.__init__, typechecker)
        return function
    if any(map(_names_axes, function.__annotations__.values())):
        return _of_jaxtyping(function, typechecker=typechecker)
    if not function.__annotations__:
        return function
    return functools.wraps(function)(_names["switch"](function, typechecker))


def _jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_checked, typechecker=typechecker)


def install(package: str) -> AbstractContextManager[Any]:
    """Checks the annotations of a package that is yet to be imported."""
    jaxtyping.jaxtyped = _jaxtyped
    return jaxtyping.install_import_hook(package, "beartype.beartype")
