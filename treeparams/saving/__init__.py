"""Saves trees to files and loads them back, and moves arrays from other programs into a model by name.

`save` and `load` keep a tree (a model, an optimiser's state, an average) in one file, by path. `plan` maps named arrays
from any source to the arrays of a model, and shows you the mapping before you load anything. It carries optimiser
states and averages along. `dumps` and `loads` do the same as `save` and `load` for messages between processes.
"""

from .._tree.text import answer_calls as _answer_calls
from ._message import dumps as dumps, loads as loads
from ._names import names as names
from ._plan import Plan as Plan, plan as plan
from ._save import load as load, metadata as metadata, save as save

_answer_calls(__name__, globals())
