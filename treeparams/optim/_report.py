"""report: which leaf goes where."""

from collections.abc import Iterator, Mapping

import jax
from jaxtyping import PyTree

from .._layout import Layout, index_of
from .._text import in_columns
from ._context import given
from ._forms import shapes_of
from ._groups import GroupsState
from ._state import Transformation
from ._whole import collected_in


class Report:
    """Which leaf goes where; prints as a table.

    Attributes:
        groups: `{path: group}` of each trained parameter; the empty text where there is one transformation for all.
    """

    def __init__(self, groups: Mapping[str, str], table: str) -> None:
        """For this library's own use; users write `optim.report(tx, model)`."""
        self.groups = dict(groups)
        self._table = table

    def __repr__(self) -> str:
        return self._table


Report.__module__ = "treeparams.optim"


def report(tx: Transformation, model: PyTree) -> Report:
    """Shows which leaf goes to which group of a transformation, and what is frozen.

    >>> import jax.numpy as jnp, optax
    >>> from treeparams import optim
    >>> tx = optim.trainable(
    ...     optax.chain(optax.clip(1.0), optim.groups({"a": optax.sgd(1.0), "**": optax.adam(1.0)})), "[ab]"
    ... )
    >>> print(optim.report(tx, {"a": jnp.ones(2), "b": jnp.ones(3), "c": jnp.ones(1)}))
    path  shape  dtype    group
    a     2      float32  a
    b     3      float32  **
    c     1      float32  frozen

    Args:
        tx: a transformation with `optim.trainable`, `flat`, `groups` or `accumulate` in it.
        model: the model that its `init` is to take. No state of a transformation over models is made.

    Returns:
        A `Report`, which prints as a table; groups within groups stand with a slash. `.groups` has the same by path.

    Raises:
        TypeError: nothing in `tx` is of this library; as `tp.layout`.
        ValueError: as `init`.
    """
    found: dict[str, list[str]] = {}
    collected = collected_in(tx, model)
    layouts = [given(each.params, each.whole.trainable).layout for each in collected]
    for each, layout in zip(collected, layouts, strict=True):
        for path in layout.paths:
            found.setdefault(path, [])
        for path, name in _named(shapes_of(each.whole.tx, each.whole.form, layout)):
            found[path].append(name)
    groups = {path: " / ".join(names) for path, names in found.items()}
    rows = [_row(layouts[0], i, groups) for i in index_of(layouts[0]).distinct]
    return Report(groups, "\n".join(in_columns(["path", "shape", "dtype", "group"], rows)))


def _row(layout: Layout, leaf: int, groups: Mapping[str, str]) -> list[str]:
    structure = index_of(layout).structure
    path, spec = structure.paths[leaf], structure.spec(leaf)
    return [path, ",".join(map(str, spec.shape)), str(spec.dtype), groups.get(path, "frozen") or "trained"]


def _named(state: PyTree) -> Iterator[tuple[str, str]]:
    for node in jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, GroupsState)):
        if isinstance(node, GroupsState):
            for name, paths in zip(node.names.names, node.names.paths or (), strict=True):
                yield from ((path, name) for path in paths)
            yield from _named(node.states)
