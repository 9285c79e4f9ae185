"""Optax over models with frozen and tied parameters.

`trainable`, or `flat`, takes the model and stands outermost; all within is plain Optax. The files, from the ground up:

    _state      TrainableState
    _groups     groups: a rule for each part; report: which leaf goes where
    _shown      what a rule is shown of a model, and states divided by leaves
    _coupling   whether a rule couples leaves, read from its programs
    _per_leaf   per_leaf: a rule over each leaf by itself, over the rows of stacks at once
    _trainable  trainable: the boundary between models and Optax
    _flat       flat: the same over one vector
    _step       step, apply_updates
    _change     set_trainable, adjust: what changes between steps
    _clip       clip_by_global_norm

This is the only part of the library that imports optax.
"""

from ._change import adjust as adjust, set_trainable as set_trainable
from ._clip import ClipState as ClipState, clip_by_global_norm as clip_by_global_norm, clip_state as clip_state
from ._flat import flat as flat
from ._groups import GroupsState as GroupsState, Report as Report, groups as groups, report as report
from ._per_leaf import PerLeafState as PerLeafState, per_leaf as per_leaf
from ._state import ModelTransformation as ModelTransformation, TrainableState as TrainableState
from ._step import apply_updates as apply_updates, step as step
from ._trainable import trainable as trainable
