"""treeparams: freeze, tie, average and flatten the parameters of JAX models.

A *layout* says once, statically, which leaves train and which of them are one; everything else is a walk over it. The
files, from the ground up - each imports only from those above it:

    _paths        key paths as text and back; globs; the nearest path to a misspelt one
    _types        PyTree, for type checkers and at run time
    _text         tables; values in words
    _declare      field, declare: what a class says of its fields
    _mesh         arrays that lie over several devices
    _primitives   one vector cut into arrays, arrays joined into one
    _static_keys  static values compared by type and content
    _structure    what is static about a tree: nodes, paths, shapes, which arrays are one
    _programs     programs as JAX traces them, and what their results depend on
    _recognise    recognising a tree whose structure is known; ties that a trace has lost
    _difference   Diff; what differs between two structures, in words
    _where        masks, globs, classes, leaves(): from what a user says to leaves
    _transform    linear functions that are recognised again
    _ties         ties: by identity, declared, given
    _index        Slot; where each leaf lies in each form
    _layout       Layout
    _resolve      layout: from what a user passes to a layout
    _match        other trees matched to a model by path; project
    _parts        a model taken apart, slots and rest; partition, combine
    _jit          jit
    _norm         global_norm
    _walk         maptrainable, biwalk, mapreduce, trainables
    _reached      reached: what a function has derivatives in
    _grad         grad, value_and_grad, accumulate
    _average      copy, ema, Ema
    _tie          tie, untie
    _joined       one array of many: a vector, a stack; the form that these are the leaves of
    _stacks       which slots are the rows of which stack
    _view         names over a form
    _nodes        which nodes a `where` matches itself, and whether they are alike
    _repeated     equal nodes as one, single nodes by themselves: from a form
    _restructure  Restructure
    _forms        ravel, stack
    _summary      summary: a model as a table
    _diff         diff: what differs between two trees, by path
    optim        Optax over models; a module of its own, imported by name
    nested       derivatives within losses, curvature, by sample; a module of its own, imported by name
    matrices     matrices made of parameters, constraints; a module of its own, imported by name
    saving       files, and what goes where, by name; a module of its own, imported by name
    sharding     where parameters lie on devices, and a step over them; a module of its own, imported by name
    plot         pictures of layouts; a module of its own, imported by name
"""

from ._average import Ema as Ema, copy as copy, ema as ema
from ._declare import declare as declare, field as field
from ._diff import diff as diff
from ._difference import Diff as Diff
from ._forms import ravel as ravel, stack as stack
from ._grad import accumulate as accumulate, grad as grad, value_and_grad as value_and_grad
from ._index import Slot as Slot
from ._jit import jit as jit
from ._layout import Layout as Layout
from ._match import project as project
from ._norm import global_norm as global_norm
from ._parts import Rest as Rest, combine as combine, partition as partition
from ._reached import reached as reached
from ._resolve import layout as layout
from ._restructure import Restructure as Restructure
from ._summary import Summary as Summary, summary as summary
from ._tie import tie as tie, untie as untie
from ._view import View as View
from ._walk import (
    biwalk as biwalk,
    mapreduce as mapreduce,
    maptrainable as maptrainable,
    trainables as trainables,
)
from ._where import leaves as leaves

__version__ = "0.1.0"
