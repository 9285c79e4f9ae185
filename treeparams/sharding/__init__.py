"""Where parameters lie: placement by rules, one step over many devices and processes.

`sharding.plan` says where each parameter of a model lies on a mesh, and in which form; `sharding.make_step` makes the
whole step of training over it. Over several processes `sharding.initialize` comes first.
"""

from ._ahead import Ahead as Ahead, Lying as Lying, Seconds as Seconds, ahead as ahead
from ._compiled.collectives import Collectives as Collectives, collectives as collectives
from ._plan import Plan as Plan, plan as plan
from ._processes.initialize import initialize as initialize
from ._processes.interrupted import interrupted as interrupted
from ._program import StepState as StepState
from ._step import Step as Step, make_step as make_step
