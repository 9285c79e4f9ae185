"""treeparams: which leaves of a JAX model are trained, which of them are one array, and what follows from it.

A *layout* says so once, statically; everything else is a walk over it. The files, from the ground up - each imports
only from those above it:

    _paths       key paths as text and back; globs; the nearest path to a misspelt one
    _declare     field, declare: what a class says of its fields
    _mesh        arrays that lie over several devices
    _cut         one vector cut into arrays, arrays joined into one
    _exact       static values compared by value and type
    _structure   what is static about a tree: nodes, paths, shapes
    _seen        recognising a tree whose structure is known
    _describe    two trees' differences in words; tables
    _select      from a mask or a `where` to leaves
    _transform   linear functions that are recognised again
    _groups      ties: by identity, declared, given
    _pack        Slot; in which vector it lies, and where
    _layout      Layout
    _resolve     layout, trainable: from what a user passes to a layout
    _summary     summary: a model as a table
    _match       other trees matched to a model by path
    _partition   partition, combine, Rest
    _jit         jit
    _project     project
    _norm        global_norm
    _walk        maptrainable, biwalk, mapreduce, trainables
    _grad        grad, value_and_grad
    _flat        slots to vectors and back
    _view        names over a vector
    _vector      ravel, Restructure
    _accumulate  accumulate
    _average     copy, ema
    _ties        tie, untie, ties
    _ema         Ema
    optim        Optax over models; a module of its own, imported by name
    nested       derivatives within losses, curvature, by sample; a module of its own, imported by name
    matrices     matrices made of parameters, constraints; a module of its own, imported by name
    plot         pictures of layouts; a module of its own, imported by name
"""

from ._accumulate import accumulate as accumulate
from ._average import copy as copy, ema as ema
from ._declare import declare as declare, field as field
from ._ema import Ema as Ema
from ._grad import grad as grad, value_and_grad as value_and_grad
from ._jit import jit as jit
from ._layout import Layout as Layout
from ._norm import global_norm as global_norm
from ._pack import Slot as Slot
from ._partition import Rest as Rest, combine as combine, partition as partition
from ._project import project as project
from ._resolve import layout as layout, trainable as trainable
from ._summary import Summary as Summary, summary as summary
from ._ties import tie as tie, ties as ties, untie as untie
from ._vector import Restructure as Restructure, ravel as ravel
from ._view import View as View
from ._walk import (
    biwalk as biwalk,
    mapreduce as mapreduce,
    maptrainable as maptrainable,
    trainables as trainables,
)

__version__ = "0.1.0"
