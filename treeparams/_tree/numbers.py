"""Remembers where models hold Python numbers: inside `jax.jit` these are scalars like any other.

JAX turns a number into a scalar of weak type, and `jnp.asarray(0.5)` has that type too. So the library remembers the
paths of numbers in models that it has met outside a trace. It keeps no values.
"""

import functools
from collections.abc import Iterable

from .structure import Structure

NUMBERS = frozenset({bool, int, float, complex})

_met: dict[tuple[int, int], None] = {}  # a node by what it is made of, and the number of a leaf within it
_NAMES = frozenset(kind.__name__ for kind in NUMBERS)


def note_numbers(structure: Structure) -> None:
    """Remembers where a tree that is met outside a trace holds numbers, and where it no longer does."""
    numbers = [i for i, kind in enumerate(structure.values) if kind in _NAMES]
    if _met:
        scalars = [i for i, spec in enumerate(structure.specs) if spec is not None and not spec.shape]
        for place in _places(structure, scalars):
            _met.pop(place, None)
    _met.update(dict.fromkeys(_places(structure, numbers)))


def was_number(structure: Structure, leaf: int) -> bool:
    """Returns whether a number was at this leaf in such a model, or in such a part of one, that was met before."""
    return bool(_met) and not _met.keys().isdisjoint(_places(structure, [leaf]))


def _places(structure: Structure, leaves: Iterable[int]) -> list[tuple[int, int]]:
    """Returns each leaf as numbered within each node that holds it."""
    found, made_of = [], functools.cache(functools.partial(_made_of, structure))
    for leaf in leaves:
        nodes = [n for n, node in enumerate(structure.nodes) if node.start <= leaf < node.stop]
        found += [(made_of(number), leaf - structure.nodes[number].start) for number in nodes]
    return found


def _made_of(structure: Structure, number: int) -> int:
    """Returns a key that is equal for nodes of the same paths and classes.

    The kind of a node would also include which leaves may train, and no number may.
    """
    node = structure.nodes[number]
    entries = tuple([each[len(node.entries) :] for each in structure.entries[node.start : node.stop]])
    return hash((entries, tuple([each.cls for each in structure.nodes[number : node.last]])))
