"""Annotations checked at run time by beartype, at a fraction of what the import hook of jaxtyping takes for each call.

The hook puts `jaxtyping.jaxtyped` before each function. So that names of axes mean the same in all annotations of a
function, it binds the arguments of every call and checks them twice. Few functions name axes; beartype alone checks the
others. Tests of slots, walks and laws take 71 s of computing under the hook, 47 s so, and 50 s without any checks.
"""

import contextlib
import dataclasses
import functools
import inspect
import re
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import jaxtyping

_of_jaxtyping = jaxtyping.jaxtyped

# Compiled under such a name since this library knows by it what checks have put between its calls.
_EITHER = """
def either(*arguments, __plain, __checked, **keywords):
    return (__plain if config.jaxtyping_disable else __checked())(*arguments, **keywords)
"""
_names: dict[str, Any] = {"__name__": "beartype.switch", "config": jaxtyping.config}
exec(compile(_EITHER, "<@beartype(treeparams)>", "exec"), _names)
_making: list[Any] = []
_checking: list[tuple[Any, Any, Any]] = []  # functions that check their arguments, and what they were before


def _switch(function: Any, typechecker: Any) -> Any:
    either = functools.wraps(function)(types.FunctionType(_names["either"].__code__, _names))
    replaced = [] if "<locals>" in function.__qualname__ else [either]  # those within others must not live on in a list
    made: list[Any] = []

    # At the first call, since it takes a millisecond for each function, and there are thousands. From then on the
    # checks are the function itself: with a call in between, tests of functions that read programs take a tenth longer.
    def checked() -> Any:
        if not made:
            if _making:  # called by the garbage collector while another is made, under the lock of beartype
                return function
            _making.append(function)
            made.append(typechecker(function))
            _making.pop()
        code, defaults = made[0].__code__, made[0].__kwdefaults__
        for each in replaced if made[0] is not function else ():
            if code.co_flags == each.__code__.co_flags:  # no generator
                _checking.append((each, each.__code__, each.__kwdefaults__))
                each.__code__, each.__kwdefaults__ = code, defaults
        return made[0]

    either.__kwdefaults__ = {"__plain": function, "__checked": checked}
    return either


@contextlib.contextmanager
def off() -> Iterator[None]:
    """Functions are called as users call them."""
    while _checking:
        function, function.__code__, function.__kwdefaults__ = _checking.pop()
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


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
    return _switch(function, typechecker)


def _jaxtyped(*, typechecker: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(_checked, typechecker=typechecker)


def install(package: str) -> AbstractContextManager[Any]:
    """Checks the annotations of a package that is yet to be imported."""
    jaxtyping.jaxtyped = _jaxtyped
    return jaxtyping.install_import_hook(package, "beartype.beartype")
