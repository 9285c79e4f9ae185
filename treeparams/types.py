"""Types for annotations: the argument `trainable`, states of optimisers, and tables that are printed.

accepted  Trainable
printed   Summary, Diff, Report
optim     ModelTransformation, TrainableState; GroupsState, ScaledState, MasterState, PerLeafState, ClipState
sharding  StepState
"""

from ._slots.index import Summary as Summary
from ._slots.layout import Trainable as Trainable
from ._tree.difference import Diff as Diff
from .optim._groups import GroupsState as GroupsState, Report as Report
from .optim._master import MasterState as MasterState
from .optim._per_leaf import PerLeafState as PerLeafState
from .optim._scaled import ScaledState as ScaledState
from .optim._state import (
    ClipState as ClipState,
    ModelTransformation as ModelTransformation,
    TrainableState as TrainableState,
)
from .sharding._plan import StepState as StepState
