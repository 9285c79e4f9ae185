"""Optax over models with frozen and tied parameters.

`trainable`, `flat` or `stacked` takes the model and stands outermost; all within is plain Optax. The files, from the
ground up:

    _state         TrainableState
    _master        master: a rule over wide copies of narrow parameters
    _named         what a rule is shown while it is read
    _entries       `{where: value}` within plain Optax, and a check of it in the whole model
    _groups        groups: a rule for each part; report: which leaf goes where
    _scaled        scaled: the updates of each parameter times a number
    _history       what a rule has learned of parameters that step together
    _formulas      the formula of each element in the programs of a rule
    _moves         operations that only move elements
    _reader        programs read as formulas
    _coupling      whether a rule couples leaves
    _per_leaf      per_leaf: a rule over each leaf by itself, over the rows of stacks at once
    _clip          clip_by_global_norm
    _separability  whether a rule is the same over joined leaves
    _apart         one update of parameters that have taken different numbers of steps
    _sight         what a rule is shown in one update
    _boundary      what is refused at the boundary between models and Optax
    _rule          a rule over the parameters of models
    _trainable     trainable: the boundary between models and Optax
    _flat          flat: the same over one vector
    _stacked       stacked: the same over stacks; rows that wait
    _step          step, apply_updates
    _set_trainable set_trainable: what trains, and what begins anew
    _adjust        adjust: hyperparameters that change between steps

This is the only part of the library that imports optax.
"""

from ._adjust import adjust as adjust
from ._clip import ClipState as ClipState, clip_by_global_norm as clip_by_global_norm, clip_state as clip_state
from ._flat import flat as flat
from ._groups import GroupsState as GroupsState, Report as Report, groups as groups, report as report
from ._master import MasterState as MasterState, master as master
from ._per_leaf import PerLeafState as PerLeafState, per_leaf as per_leaf
from ._scaled import ScaledState as ScaledState, scaled as scaled
from ._set_trainable import set_trainable as set_trainable
from ._stacked import stacked as stacked
from ._state import ModelTransformation as ModelTransformation, TrainableState as TrainableState
from ._step import apply_updates as apply_updates, step as step
from ._trainable import trainable as trainable
