"""Moves moments, averages and other arrays that belong to parameters as a plan moves the parameters."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .._files.names import Names
from .._tree.paths import nearest
from .._tree.structure import Spec
from .._tree.text import describe
from ._contents import Contents
from ._fit import Move
from ._program import Program
from ._rename import Route, stack, unstack

Done = dict[tuple[int, int], Any]
"""Results that a function made together with one that was asked for, kept until they are asked for too."""


class Movers:
    """The moves of a plan, by the paths of its model, for arrays that belong to the parameters.

    Attributes:
        specs: the specs of the arrays of the plan's source, by name.
        roots: for each further name of an array of the source, its first name.
    """

    def __init__(self, contents: Contents, comes: Mapping[int, Move], source: Names) -> None:
        self.specs, self.roots = source.specs, source.aliases
        paths = contents.structure.paths
        # In a model that was untied after the plan was made each place gets the array of the tie, unless computed.
        roots = {i: alias.source for i, alias in contents.aliases.items() if not alias.transforms}
        leaves = [i for i in contents.names if i in roots or i not in contents.aliases]
        self._model = {paths[i]: contents.spec(i) for i in leaves}
        self._comes = {paths[i]: comes[roots.get(i, i)] for i in leaves if roots.get(i, i) in comes}
        self._programs: dict[int, Program] = {}

    def check_like(self, arrays: Iterable[tuple[str, Any]], write: str) -> None:
        """Rejects a fresh state or average that has a path or a shape that the plan's model does not have."""
        for path, array in arrays:
            spec = self._model.get(path)
            if spec is None or spec.shape != tuple(array.shape):
                got = "has none" if spec is None else f"has {describe(spec)}"
                hint = nearest(path, self._model) if spec is None else ""
                raise ValueError(
                    f"like has {describe(array)} at {path!r}, but the plan's model {got} there{hint}: it belongs to "
                    f"another model; write like={write} with the model that the plan makes"
                )

    def sources(self, path: str) -> tuple[str, ...]:
        """Returns the names that come to a path together; empty if none do."""
        return self._comes[path].route.sources if path in self._comes else ()

    def reads(self, path: str) -> tuple[str, ...]:
        """Returns those of the names that the array at a path is made from."""
        route, number, _ = self._comes[path]
        program = self._program(route)
        return route.sources if program is None else tuple([route.sources[i] for i in program.reads[number]])

    def is_plain(self, path: str) -> bool:
        """Returns whether one array comes to a path unchanged, except for its dtype."""
        route, number, _ = self._comes[path]
        program = self._program(route)
        return route.function is None or (program is not None and program.same[number] is not None)

    def how(self, path: str) -> str:
        """Returns the name of the function that makes the array for a path."""
        return self._comes[path].route.how

    def move(self, path: str, read: Callable[[str], Any], done: Done) -> Any:
        """Returns the array for a path, from the arrays that belong to the parameters it is made from."""
        route, number, _ = self._comes[path]
        if route.function is None:
            return read(route.sources[0])
        if route.function is unstack:
            return read(route.sources[0])[number]
        if (id(route), number) not in done:
            program = self._program(route)
            if program is None:  # rows that are stacked, or of no parameters
                results = dict(enumerate(route(*map(read, route.sources))))
            else:
                results = program.results(number, lambda i: read(route.sources[i]))
            done.update({(id(route), i): array for i, array in results.items()})
        return done.pop((id(route), number))

    def dropped(self, path: str) -> Any:
        """Returns where a mask has dropped elements of the array for a path; `None` if nowhere."""
        route, number, _ = self._comes[path]
        program = self._program(route)
        return None if program is None else program.dropped[number]

    def check(self) -> None:
        """Checks that all functions of parameters only move elements."""
        for move in self._comes.values():
            self._program(move.route)

    def _program(self, route: Route) -> Program | None:
        """Returns the program of a function of parameters, which moves their elements; `None` if there is none."""
        specs: list[Spec] = [self.specs[name] for name in route.sources]
        if route.function in (None, stack, unstack) or not any(spec.parameter for spec in specs):
            return None
        if id(route) not in self._programs:
            self._programs[id(route)] = Program(route, specs)
        return self._programs[id(route)]
