"""Shards a model over devices by rules, and trains it over many devices and processes.

`sharding.plan` decides where each parameter of a model lies on a mesh, and in which form. `sharding.make_step` compiles
a whole training step for that plan. With several processes, call `sharding.initialize` first.
"""

from ._ahead import Ahead as Ahead, Lying as Lying, Seconds as Seconds, ahead as ahead
from ._compiled.collectives import Collectives as Collectives, collectives as collectives
from ._plan import Plan as Plan, plan as plan
from ._processes.initialize import initialize as initialize
from ._processes.interrupted import interrupted as interrupted
from ._program import StepState as StepState
from ._step import Step as Step, make_step as make_step
