"""Flattens trees as JAX does, with clear errors for one that contains itself or is too deep; compares treedefs."""

import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.tree_util as jtu

from .paths import join_path, sibling_entries
from .types import PyTree, TreeDef

take = jtu.default_registry.flatten_one_level_with_keys
"""The children of a node with their keys, and its static value; `None` of a leaf."""


def same_treedef(a: TreeDef, b: TreeDef) -> bool:
    """Returns whether two treedefs are equal as JAX sees it: static fields by `==`, whatever their types."""
    try:
        return bool(a == b)
    except Exception:  # static arrays, whose `==` has no truth value
        return False


def getter(indices: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """Returns the function that picks the items at these indices, as `operator.itemgetter` but always as a tuple."""
    start, stop = (indices[0], indices[-1] + 1) if indices else (0, 0)
    if list(indices) == list(range(start, stop)):  # a slice takes a fifth of the time, and a model is often one
        return lambda items: tuple(items[start:stop])
    return operator.itemgetter(*indices)


class Avals:
    """The avals of the arrays that fitted last.

    Arrays that come out of one program share these objects from call to call. To find them the same takes a third of
    the time of comparing shapes and dtypes.
    """

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: list[Any] = []

    def fit(self, arrays: Sequence[Any], are_right: Callable[[], bool]) -> bool:
        """Returns whether the arrays have the avals of the last ones that fitted, or else whether they are right."""
        try:
            avals = list(map(_aval, arrays))
        except AttributeError:  # of NumPy arrays, of labels, and of arrays that are only described
            return are_right()
        # Lists compare objects before values. Comparing the values of each takes longer than comparing shapes, so the
        # last ones tell whether it is worth a try.
        if avals and self._last and avals[-1] is self._last[-1] and avals == self._last:
            return True
        if are_right():
            self._last = avals
            return True
        return False


_aval = operator.attrgetter("aval")


def flatten(tree: PyTree) -> tuple[list[Any], TreeDef]:
    """Flattens a tree like `jax.tree.flatten`, with clear errors if it contains itself or has too many levels."""
    try:
        return jtu.tree_flatten(tree)
    # JAX raises one of several, by what it was doing when the stack was full. After some of them, such as those of a
    # cycle through a class, jaxlib never gives back the levels of the stack that it took; then nothing can be said.
    except Exception as error:
        path = _find_cycle(tree)
        if path is not None:
            raise ValueError(
                f"the model is cyclic: the node at {path!r} is one of the nodes above it. A pytree is a tree; "
                "keep one of the two references, or hold it in a static field"
            ) from error
        if not _is_of_depth(error):
            raise
        raise ValueError(
            "the tree is nested too deeply for jax.tree.flatten; if it is a chain of nodes, keep the nodes of the "
            "chain in one list"
        ) from error


def _is_of_depth(error: BaseException | None) -> bool:
    """Returns whether an error comes from a full stack, whatever it was turned into since."""
    while error is not None and not isinstance(error, RecursionError):
        error = error.__cause__ or error.__context__
    return error is not None


def _find_cycle(tree: PyTree) -> str | None:
    """Returns the path of the first node that is one of those above it."""
    # No recursion: the tree may be as deep as memory allows.
    above, entries = {id(tree)}, list[str]()
    opened = [(tree, _children_of(tree, entries))]
    while opened:
        node, children = opened[-1]
        for entry, child in children:
            entries.append(entry)
            if id(child) in above:
                return join_path(entries)
            above.add(id(child))
            opened.append((child, _children_of(child, entries)))
            break
        else:
            opened.pop()
            above.discard(id(node))
            del entries[-1:]
    return None


def _children_of(node: PyTree, entries: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Returns the children of a node, each with its entry in a path."""
    taken = take(node)
    children = list(taken[0]) if taken is not None else []
    names = sibling_entries([key for key, _ in children], entries)
    return iter([(entry, child) for entry, (_, child) in zip(names, children, strict=True)])
