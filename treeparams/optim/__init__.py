"""Optax optimisers for models with frozen and tied parameters.

`trainable`, `flat` and `stacked` wrap an Optax optimiser so that it accepts a whole model. Use one of them, as the
outermost transformation; everything inside it is plain Optax.

    whole models   trainable, flat, stacked
    one step       step, apply_updates, value_and_grad_from_state
    inside         groups, scaled, master, per_leaf, clip_by_global_norm
    between steps  set_trainable, adjust
    inspect        report, Report, clip_state, eval_params
    plain Optax    from_optax, to_optax
    states, types  TrainableState, ModelTransformation, ClipState, GroupsState, MasterState, PerLeafState, ScaledState

Only this module and `saving`, which handles its states, import Optax.
"""

from ._adjust import adjust as adjust
from ._clip import ClipState as ClipState, clip_by_global_norm as clip_by_global_norm, clip_state as clip_state
from ._from_state import eval_params as eval_params, value_and_grad_from_state as value_and_grad_from_state
from ._groups import GroupsState as GroupsState, Report as Report, groups as groups, report as report
from ._master import MasterState as MasterState, master as master
from ._per_leaf import PerLeafState as PerLeafState, per_leaf as per_leaf
from ._plain import from_optax as from_optax, to_optax as to_optax
from ._scaled import ScaledState as ScaledState, scaled as scaled
from ._set_trainable import set_trainable as set_trainable
from ._stacked import stacked as stacked
from ._state import ModelTransformation as ModelTransformation, TrainableState as TrainableState
from ._step import apply_updates as apply_updates, step as step
from ._trainable import flat as flat, trainable as trainable
