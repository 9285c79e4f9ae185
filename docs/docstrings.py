"""How docstrings are read for the site: extensions of griffe, which mkdocstrings takes from the configuration."""

import ast
import functools
import re
from pathlib import Path
from typing import Any

import griffe
from names import linked

ROOT = Path(__file__).parent.parent
_SECTION = re.compile(r"^(Args|Returns|Raises|Warns):\n(?: .*\n|\n)*", re.MULTILINE)
_AROUND = ("Args", "Returns"), ("Raises", "Warns")


class Examples(griffe.Extension):
    """Puts the arguments of a docstring before its long text, shows its examples as code, and links the names in it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Rewrites one docstring."""
        if obj.docstring:
            text = linked(_fenced(_arguments_first(obj.docstring.value)))
            obj.docstring.value = _typed(text, getattr(obj, "returns", None))


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


def with_contents(page: str) -> str:
    """A page of the API, with a table of its entries before the first of them."""
    names = re.findall(r"^::: (\S+)$", page, re.MULTILINE)
    rows = [f"| [`{name.rpartition('.')[2]}`][{name}] | {_first_sentence(name)} |" for name in names]
    table = "\n".join(["| | |", "|---|---|", *rows, "\n"])
    return re.sub(r"^(?=:::|## )", lambda _: table, page, count=1, flags=re.MULTILINE)


def _first_sentence(name: str) -> str:
    found = _package()[name.partition(".")[2]]
    text = found.docstring.value if found.docstring else ""
    return re.split(r"(?<=\.)\s|\n\n", text)[0].replace("\n", " ").replace("|", r"\|")


@functools.cache
def _package() -> griffe.Object | griffe.Alias:
    return griffe.load("treeparams", search_paths=[ROOT], extensions=griffe.load_extensions(Runtime))


def _arguments_first(text: str) -> str:
    """Arguments and result directly behind the first sentence and its example; errors and warnings stay at the end."""
    sections = {found[1]: found[0].rstrip() for found in _SECTION.finditer(text + "\n")}
    first, *rest = _SECTION.sub("", text + "\n").strip().split("\n\n")
    example = [rest.pop(0)] if rest and rest[0].startswith(">>>") else []
    before, after = ([sections[name] for name in names if name in sections] for names in _AROUND)
    return "\n\n".join([first, *example, *before, *rest, *after])


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
