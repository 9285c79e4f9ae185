"""A model taken apart into parameters and the rest, and put together again.

The yardstick flattens and unflattens the model once. Parameters that have the shape of the model cannot be had under
twice that, whoever makes them: two trees are flattened and two unflattened (the floor). Paramax holds the first layer
fixed, as its documentation says; the others train everything. What the two calls do once, however large the model is,
takes some 20 microseconds: that is half of what ten leaves take, and a tenth of what a hundred take.

In the first call the structure is one never seen. Paths and static fields are then read node by node: the tree is taken
apart one level at a time (in one column that is done alone, and nothing kept), each path is named and looked up among
its siblings, and each static value gets a key. That takes 2.5 times as long as the tree alone. To flatten it, to note
types, shapes and dtypes of all leaves and what is one array, and to make the parameters takes as much again. It is done
once per kind of model.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping

import equinox as eqx
import jax
import paramax
from flax import nnx

import treeparams as tp

from ._harness import Case, Scale, Table, sweep
from ._models import Net, is_non_trainable, net, nnx_net, paramax_net

_ONCE, _TP, _FLOOR, _FIRST = "flatten+unflatten", "treeparams", "floor", "treeparams, first call"
_LEVELS = "level by level"
_versions = itertools.count(1)


def run(scale: Scale) -> Iterator[Table]:
    found = sweep(_cases, scale)
    yield found.table(
        "`tp.partition` + `tp.combine`",
        [
            found.ratio_target(_TP, _FLOOR, 1.25, sizes=(1000, 5000)),
            found.ratio_target(_TP, _FLOOR, 1.5, sizes=(100,)),
            found.ratio_target(_TP, _FLOOR, 2.1, sizes=(10,)),
            found.ratio_target(_FIRST, _LEVELS, 6.5, sizes=(1000,)),
            found.growth_target(_TP),
            found.growth_target(_FIRST),
        ],
    )


def _cases(leaves: int) -> Mapping[str, Callable | Case]:
    model, wrapped, nnx_model = net(leaves), paramax_net(leaves), nnx_net(leaves)
    return {
        _ONCE: lambda: _again(model),
        _FLOOR: lambda: _again(_again(model)),
        _LEVELS: lambda: _level_by_level(model),
        _TP: lambda: tp.combine(*tp.partition(model)),
        "equinox": lambda: eqx.combine(*eqx.partition(model, eqx.is_inexact_array)),
        "nnx": lambda: nnx.merge(*nnx.split(nnx_model)),
        "paramax": lambda: _with_paramax(wrapped),
        # Few rounds: JAX hashes trees by their shape alone, so each structure makes the search for the next one longer.
        _FIRST: Case(tp.partition, prepare=lambda: Net(model.layers, next(_versions)), rounds=9),
    }


def _again(model: Net) -> Net:
    leaves, treedef = jax.tree.flatten(model)
    return jax.tree.unflatten(treedef, leaves)


def _level_by_level(model: Net) -> None:
    left = [model]
    while left:
        taken = jax.tree_util.default_registry.flatten_one_level_with_keys(left.pop())
        if taken is not None:
            left += [child for _, child in taken[0]]


def _with_paramax(model: Net) -> Net:
    params, static = eqx.partition(model, eqx.is_inexact_array, is_leaf=is_non_trainable)
    return paramax.unwrap(eqx.combine(params, static))
