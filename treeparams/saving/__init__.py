"""Arrays by name: trees into files and back, and from any arrays by name into a model.

`save` and `load` keep a tree - model, optimiser, average - in one file, by path. `plan` says which array goes where,
from any arrays by name into a model, before you load anything; it takes states and averages along. `dumps` and
`loads` are `save` and `load` for messages between processes.
"""

from ._message import dumps as dumps, loads as loads
from ._names import names as names
from ._plan import Plan as Plan, plan as plan
from ._save import load as load, metadata as metadata, save as save
