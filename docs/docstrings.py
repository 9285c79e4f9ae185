"""How docstrings are read for the site: extensions of griffe, which mkdocstrings takes from the configuration."""

import ast
import re
from typing import Any

import griffe
from names import linked


class Examples(griffe.Extension):
    """Shows the examples of a docstring as code, wherever they stand in it, and links the names in it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring:
            obj.docstring.value = _typed(linked(_fenced(obj.docstring.value)), getattr(obj, "returns", None))


class Runtime(griffe.Extension):
    """Shows what runs, where type checkers are told something else."""

    def on_module_node(self, *, node: Any, **_: Any) -> None:
        """Leaves out what stands under `if TYPE_CHECKING:` with an `else:`."""
        node.body[:] = [each for statement in node.body for each in _that_runs(statement)]


class Constructors(griffe.Extension):
    """Shows how a class is called if its docstring says so under `Args`; what it is called with are its fields.

    Griffe knows the fields of dataclasses, and not that modules of Equinox are some.
    """

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Gives the classes of the package their constructors, or takes them away."""
        for module in [pkg, *(each for each in pkg.modules.values() if not each.is_alias)]:
            if module is not pkg:
                self.on_package(pkg=module)
            for each in module.classes.values():
                if not each.is_alias:
                    _with_constructor(each)


def _with_constructor(cls: griffe.Class) -> None:
    own = cls.members.get("__init__")
    if own and own.docstring:
        return
    if not cls.docstring or not re.search(r"^Args:$", cls.docstring.value, re.MULTILINE):
        cls.members.pop("__init__", None)
    elif not own:
        fields = {name: each for base in [*reversed(cls.mro()), cls] for name, each in base.attributes.items()}
        parameters = [_parameter(each) for each in fields.values() if each.annotation and "property" not in each.labels]
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))


def _parameter(field: griffe.Attribute) -> griffe.Parameter:
    given = {each.name: each.value for each in getattr(field.value, "arguments", ()) if hasattr(each, "name")}
    default = given.get("default") if given else field.value
    return griffe.Parameter(
        field.name, annotation=field.annotation, default=default, kind=griffe.ParameterKind.positional_or_keyword
    )


def _that_runs(statement: ast.stmt) -> list[ast.stmt]:
    is_both = isinstance(statement, ast.If) and statement.orelse and ast.unparse(statement.test) == "TYPE_CHECKING"
    return statement.orelse if is_both else [statement]


def _typed(text: str, returns: Any) -> str:
    """With the type of what is returned, or a colon in its first sentence would be taken for the end of one."""
    return re.sub(r"^(Returns:\n +)", rf"\g<1>{returns}: ", text, flags=re.MULTILINE) if returns else text


def _fenced(text: str) -> str:
    """Doctests in fences: each from `>>>` to the next blank line."""
    return re.sub(r"^( *)(>>> .*?)(?=\n\s*\n|\s*\Z)", r"\1```pycon\n\1\2\n\1```", text, flags=re.MULTILINE | re.DOTALL)
