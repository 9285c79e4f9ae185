"""Optax optimisers for models with frozen and tied parameters.

`trainable` wraps an Optax optimiser so that it accepts a whole model. Use it as the outermost transformation;
everything inside it is plain Optax.

    whole models   trainable
    one step       step, apply_updates, value_and_grad_from_state
    inside         groups, scaled, master, per_leaf, clip_by_global_norm
    between steps  set_trainable, adjust
    inspect        report, eval_params
    plain Optax    from_optax, to_optax

Their states and reports are in `treeparams.types`, for annotations. Only this module and `saving`, which handles its
states, import Optax.
"""

from .._tree.text import answer_calls as _answer_calls
from ._groups import groups as groups
from ._per_leaf import per_leaf as per_leaf
from ._plain import from_optax as from_optax, to_optax as to_optax
from ._set_trainable import adjust as adjust, report as report, set_trainable as set_trainable
from ._trainable import (
    apply_updates as apply_updates,
    eval_params as eval_params,
    step as step,
    trainable as trainable,
    value_and_grad_from_state as value_and_grad_from_state,
)
from ._updates import clip_by_global_norm as clip_by_global_norm, master as master, scaled as scaled

_answer_calls(__name__, globals())
