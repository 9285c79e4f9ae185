"""Types for annotations: the argument `trainable`, states of optimisers, and tables that are printed.

accepted  Trainable
printed   Summary, Diff, Report
optim     ModelTransformation, TrainableState; GroupsState, ScaledState, MasterState, PerLeafState, ClipState
sharding  StepState
"""

from ._slots.index import Summary as Summary
from ._slots.layout import Trainable as Trainable
from ._tree.difference import Diff as Diff
from .optim._groups import GroupsState as GroupsState
from .optim._per_leaf import PerLeafState as PerLeafState
from .optim._set_trainable import Report as Report
from .optim._state import (
    ClipState as ClipState,
    ModelTransformation as ModelTransformation,
    TrainableState as TrainableState,
)
from .optim._updates import MasterState as MasterState, ScaledState as ScaledState
from .sharding._placement import StepState as StepState
