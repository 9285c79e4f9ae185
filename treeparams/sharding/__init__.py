"""Shards a model over devices by rules, and trains it over many devices and processes.

`sharding.plan` decides where each parameter of a model lies on a mesh, and in which form. `sharding.make_step` makes a
whole training step for that plan, as one compiled program.
"""

from .._tree.text import answer_calls as _answer_calls
from ._plan import Plan as Plan, plan as plan
from ._step import Step as Step, make_step as make_step

_answer_calls(__name__, globals())
