"""Where parameters lie: placement by rules, one step over many devices and processes.

`sharding.plan` says where each parameter of a model lies on a mesh, and in which form; `sharding.step` is the whole
step of training over it. Over several processes `sharding.initialize` comes first. The files, from the ground up:

    _collectives  collectives: how much a compiled program moves between devices
    _processes    initialize; whether all processes have the same plan
    _specs        from rules over paths to where each parameter lies
    _put          arrays put there
    _owners       arrays of a rule's state, or of an average, lie as the parameters that they are of
    _placement    where all that lies, in the form in which it rests
    _update       the update of a step, and the state that it keeps
    _plan         plan, Plan
    _gather       parameters that devices share, brought together
    _gradient     the loss and its gradient, by hand over the devices
    _check        whether a rule of Optax fits a plan
    _step         step, StepState
    _ahead        how much a step takes of each device, compiled and never run
"""

from ._ahead import Ahead as Ahead, ahead as ahead
from ._collectives import Collectives as Collectives, collectives as collectives
from ._plan import Plan as Plan, plan as plan
from ._processes import initialize as initialize
from ._step import StepState as StepState, step as step
