"""Which array by name comes to each array of a model, and which do not fit."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from .._files.arrays import Array, array_spec, in_numpy
from .._files.format import Packed
from .._files.names import Names
from .._tree.paths import nearest, split_path, unquote
from .._tree.structure import Spec
from .._tree.text import describe, first_few
from ._contents import Contents
from ._rename import Rename, Route, Transforms, routes


class Move(NamedTuple):
    """One of the results of a route, and the leaf of the model that it is for."""

    route: Route
    number: int
    leaf: int


class Fit(NamedTuple):
    """Which move fills each array, ties once, and which arrays do not fit."""

    comes: dict[int, Move]  # to each leaf that is stored
    also: list[Move]  # what comes to a tie besides, and is to be the same
    missing: tuple[str, ...]
    unused: dict[str, str]  # and where they would go
    disagrees: tuple[str, ...]
    kept: set[str]  # to what nothing comes on purpose


def fit(contents: Contents, source: Names, rename: Rename | None, transform: Transforms | None) -> Fit:
    """Finds the move that fills each array of a model."""
    leaves = {name: i for i, name in contents.names.items()}
    # A dictionary of arrays may itself be the model; then its keys are not written as paths are.
    leaves = {
        unquote(name): i for name, i in leaves.items() if name.startswith('"') and len(split_path(name)) == 1
    } | leaves
    found, used, kept = routes(source.specs, rename, transform, leaves)
    offers: dict[int, list[Move]] = {}  # by the leaf that is stored of a tie
    goes_to: dict[str, str] = {}
    disagrees, refused, nowhere = list[str](), set[int](), dict[str, str]()
    for route in found:
        targets = [(number, leaves[target]) for number, target in enumerate(route.targets) if target in leaves]
        if not targets:
            nowhere |= dict.fromkeys(route.sources, first_few(route.targets))
            continue
        for target in route.targets:
            if target not in leaves:
                disagrees.append(f"{first_few(route.sources)}: no array is at {target!r}{nearest(target, leaves)}")
        used.update(route.sources)
        packed = [name for name in route.sources if isinstance(source.specs[name].dtype, Packed)]
        if packed:
            is_what = f"{packed[0]!r} is {describe(source.specs[packed[0]])}, of which NumPy and JAX have no arrays"
            disagrees.append(f"{is_what}; drop it, rename={{{packed[0]!r}: None}}")
            refused.update(leaf for _, leaf in targets)
            continue
        made = _results(route, source.specs)
        if len(made) != len(route.targets):
            why = f"gives {len(made)} arrays, and the paths are {first_few(route.targets)}"
            disagrees.append(f"{first_few(route.sources)}: {route.how} {why}")
            continue
        for number, leaf in targets:
            name, want, alias = contents.names[leaf], contents.spec(leaf), contents.aliases.get(leaf)
            # Several names may go to one tie. Of these moves one fills the array, that to its own path if there is one;
            # the others are compared with it. An alias with a transform is never filled: it is computed.
            root = leaf if alias is None or alias.transforms else alias.source
            if name in goes_to:
                raise ValueError(f"{goes_to[name]!r} and {route.sources[0]!r} both go to {name!r}; drop one by None")
            goes_to[name] = route.sources[0]
            if made[number] == want:
                offers.setdefault(root, []).append(Move(route, number, leaf))
            else:
                refused.add(root)
                disagrees.append(_disagreement(name, want, made[number], route))
    comes, also = dict[int, Move](), list[Move]()
    for root, moves in offers.items():
        if root in contents.aliases:  # it is computed, and what comes there is compared with that
            also += moves
            continue
        first, *others = sorted(moves, key=lambda move: move.leaf != root)
        comes[root] = first._replace(leaf=root)
        also += [move for move in others if not _is_again(first.route, move.route, source.aliases)]
    # A file has a tie under several names; the one that is stored is used where another one is.
    used.update([source.aliases[name] for name in used if name in source.aliases])
    for name in kept & goes_to.keys():
        raise ValueError(f"rename, None: nothing is to come to {name!r}, and {goes_to[name]!r} does")
    here = {*comes, *refused, *(leaves[name] for name in kept)}
    missing = [name for name, leaf in contents.stored.items() if leaf not in here]
    unused = {name: nowhere.get(name, "") for name in source if name not in used}
    return Fit(comes, also, tuple(missing), unused, tuple(disagrees), kept)


def _results(route: Route, specs: Mapping[str, Spec]) -> list[Spec]:
    """The results of a route, as shapes."""
    if route.function is None:
        return [specs[route.sources[0]]]
    made = jax.eval_shape(route, *(jax.ShapeDtypeStruct(*specs[name][:2]) for name in route.sources))
    return list(map(array_spec, made))


def _disagreement(name: str, want: Spec, got: Spec, route: Route) -> str:
    hint = ""
    if want.shape == got.shape:
        hint = f"; a cast is a transform, lambda array: array.astype({str(want.dtype)!r})"
    elif want.shape == got.shape[::-1]:
        hint = "; transform={...: jnp.transpose} turns it"
    by = f" by {route.how}" if route.how else ""
    return f"{name!r} is {describe(want)}, and {describe(got)} comes from {first_few(route.sources)}{by}{hint}"


def _is_again(one: Route, other: Route, aliases: Mapping[str, str]) -> bool:
    """Whether two routes take one array that the source has under two names."""
    first, second = ([aliases.get(name, name) for name in route.sources] for route in (one, other))
    return one.function is other.function is None and first == second


def check_same(move: Move, value: Array, have: Array, contents: Contents) -> None:
    """Refuses another array for a tie than the one that has come there; of tracers nothing can be told."""
    if isinstance(value, Tracer) or isinstance(have, Tracer):
        return
    alias = contents.aliases.get(move.leaf)
    value, have = in_numpy(value), in_numpy(have)
    if alias and alias.transforms:
        # An alias that is computed, as a norm or an inverse, is the same up to half of its digits.
        tolerance = float(jnp.finfo(have.dtype).eps) ** 0.5
        wide = np.complex128 if have.dtype.kind == "c" else np.float64  # NumPy does not compare the narrowest floats
        is_same = np.allclose(value.astype(wide), have.astype(wide), tolerance, tolerance, equal_nan=True)
    else:
        is_same = bool(np.all((value == have) | ((value != value) & (have != have))))
    if not is_same:
        names = contents.names
        raise ValueError(
            f"{move.route.sources[0]!r} goes to {names[move.leaf]!r}, which is one array with "
            f"{names[alias.source if alias else move.leaf]!r}, and another one goes there; drop one of them, "
            f"rename={{{move.route.sources[0]!r}: None}}, or tp.untie the model"
        )
