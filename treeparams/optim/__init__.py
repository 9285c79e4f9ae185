"""Optax over models with frozen and tied parameters.

The files, from the ground up:

    _context     what stands around an element of a chain
    _state       TrainableState; what is static in it
    _forms       a canonical tree or a vector, and states divided by leaves
    _whole       one update over each history
    _trial       whether a rule is the same on a vector
    _trainable   trainable, flat
    _apply       apply_updates, layout
    _thaw        set_trainable
    _groups      groups: a transformation for each part
    _report      report: which leaf goes where
    _adjust      adjust: hyperparameters between steps
    _clip        clip_by_global_norm
    _ema         ema, as_ema
    _accumulate  accumulate

This is the only part of the library that imports optax.
"""

from ._accumulate import AccumulateState as AccumulateState, accumulate as accumulate
from ._adjust import adjust as adjust
from ._apply import apply_updates as apply_updates, layout as layout
from ._clip import ClipState as ClipState, clip_by_global_norm as clip_by_global_norm
from ._ema import EmaState as EmaState, as_ema as as_ema, ema as ema
from ._groups import GroupsState as GroupsState, groups as groups
from ._report import Report as Report, report as report
from ._state import TrainableState as TrainableState
from ._thaw import set_trainable as set_trainable
from ._trainable import flat as flat, trainable as trainable
