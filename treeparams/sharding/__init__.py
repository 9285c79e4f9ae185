"""Where parameters lie: over many devices.

    _collectives  what a compiled program moves between devices
"""

from ._collectives import Collectives as Collectives, collectives as collectives
