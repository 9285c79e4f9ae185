"""treeparams: choose which parameters of a JAX model train, once; gradients, optimisers and averages follow.

A *layout* records which parameters of a model are trained and which are tied (one array at several paths). It is
static, so you can use it inside `jax.jit`. Every other function reads it:

    declare        field, declare
    lay out        layout, leaves, Layout, Slot
    differentiate  grad, value_and_grad, accumulate, project, reached, moved
    walk           maptrainable, biwalk, mapreduce, trainables, replace, global_norm
    one vector     ravel, Restructure, View
    stacks         stack, rolled
    tree           partition, combine, Rest
    transform      jit, checkpoint, vmap
    tie            tie, untie
    average        copy, ema, Ema
    look           summary, diff

    tp.lax         scan, cond, while_loop and others of jax.lax, over models
    tp.optim       Optax over models
    tp.nested      derivatives within losses, curvature, derivatives by sample
    tp.matrices    matrices made of parameters, parameters that stay where they belong
    tp.saving      files, and which array goes where, by name
    tp.sharding    where parameters lie on devices, and a step over them
    tp.plot        pictures of layouts
    tp.types       types for annotations
"""

import importlib as _importlib
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._average import Ema as Ema, copy as copy, ema as ema
from ._diff import diff as diff
from ._forms.restructure import Restructure as Restructure
from ._forms.rolled import rolled as rolled
from ._forms.view import View as View
from ._grad import accumulate as accumulate, grad as grad, value_and_grad as value_and_grad
from ._jit import checkpoint as checkpoint, jit as jit, vmap as vmap
from ._moved import moved as moved
from ._ravel import ravel as ravel, stack as stack
from ._reached import reached as reached
from ._replace import replace as replace
from ._slots.index import Slot as Slot
from ._slots.layout import Layout as Layout, layout as layout
from ._slots.parts import Rest as Rest, combine as combine, partition as partition, project as project
from ._slots.where import leaves as leaves
from ._summary import summary as summary
from ._tie import tie as tie, untie as untie
from ._tree.declare import declare as declare, field as field
from ._tree.text import answer_calls as _answer_calls
from ._walk import (
    biwalk as biwalk,
    global_norm as global_norm,
    mapreduce as mapreduce,
    maptrainable as maptrainable,
    trainables as trainables,
)

if _TYPE_CHECKING:
    from . import (
        lax as lax,
        matrices as matrices,
        nested as nested,
        optim as optim,
        plot as plot,
        saving as saving,
        sharding as sharding,
        types as types,
    )

__version__ = "0.1.0"

_answer_calls(__name__, globals())

_MODULES = ("lax", "matrices", "nested", "optim", "plot", "saving", "sharding", "types")


def __getattr__(name: str) -> _ModuleType:
    # `optim` is the name of a variable in most programs: write `tp.optim`, and it is imported when you do.
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
