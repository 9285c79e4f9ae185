"""treeparams: freeze, tie, average and flatten the parameters of JAX models.

A *layout* says once, statically, which leaves train and which of them are one; everything else is a walk over it. The
folders and files, from the ground up - each imports only from those above it:

    _tree         any pytree: what is static about it, paths, dtypes, declarations, messages; copy
    _programs     programs as JAX traces them, and what their results depend on
    _slots        from a model to its slots: layouts, ties, a model taken apart; layout, project, partition, combine
    _forms        where slots lie: the canonical tree, one vector, stacks; what a rule keeps; Restructure, View
    _jit          jit
    _norm         global_norm
    _walk         maptrainable, biwalk, mapreduce, trainables
    _reached      reached: what a function has derivatives in
    _grad         grad, value_and_grad, accumulate
    _mixing       one step of an average, and the policies of `buffers`
    _average      ema, Ema
    _tie          tie, untie
    _replace      replace: other values of some parameters
    _ravel        ravel, stack
    _summary      summary: a model as a table
    _diff         diff: what differs between two trees, by path
    optim         Optax over models; a module of its own, imported by name
    nested        derivatives within losses, curvature, by sample; a module of its own, imported by name
    matrices      matrices made of parameters, constraints; a module of its own, imported by name
    saving        files, and what goes where, by name; a module of its own, imported by name
    sharding      where parameters lie on devices, and a step over them; a module of its own, imported by name
    plot          pictures of layouts; a module of its own, imported by name
"""

import importlib as _importlib
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING as _TYPE_CHECKING

from ._average import Ema as Ema, ema as ema
from ._diff import diff as diff
from ._forms.restructure import Restructure as Restructure
from ._forms.view import View as View
from ._grad import accumulate as accumulate, grad as grad, value_and_grad as value_and_grad
from ._jit import jit as jit
from ._norm import global_norm as global_norm
from ._ravel import ravel as ravel, stack as stack
from ._reached import reached as reached
from ._replace import replace as replace
from ._slots.index import Slot as Slot
from ._slots.layout import Layout as Layout
from ._slots.match import project as project
from ._slots.parts import Rest as Rest, combine as combine, partition as partition
from ._slots.trainable import layout as layout
from ._slots.where import leaves as leaves
from ._summary import Summary as Summary, summary as summary
from ._tie import tie as tie, untie as untie
from ._tree.copying import copy as copy
from ._tree.declare import declare as declare, field as field
from ._tree.difference import Diff as Diff
from ._walk import (
    biwalk as biwalk,
    mapreduce as mapreduce,
    maptrainable as maptrainable,
    trainables as trainables,
)

if _TYPE_CHECKING:
    from . import (
        matrices as matrices,
        nested as nested,
        optim as optim,
        plot as plot,
        saving as saving,
        sharding as sharding,
    )

__version__ = "0.1.0"

_MODULES = ("matrices", "nested", "optim", "plot", "saving", "sharding")


def __getattr__(name: str) -> _ModuleType:
    # `optim` is the name of a variable in most programs: write `tp.optim`, and it is imported when you do.
    if name in _MODULES:
        return _importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
