"""Where parameters lie: over many devices.

_collectives  what a compiled program moves between devices
_ahead        what a step takes of each device, compiled and never run
__main__      the same of a transformer by its shapes: python -m treeparams.sharding
"""

from ._ahead import Ahead as Ahead, ahead as ahead
from ._collectives import Collectives as Collectives, collectives as collectives
