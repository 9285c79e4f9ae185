"""The mistakes of newcomers around optimisers: see tests/test_mistakes.py."""

import itertools
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import treeparams as tp
from treeparams import optim

from ..mistakes import NEAREST, Row, check
from ..zoo import STACKS, VECTOR
from .shared import FORMS, MOMENTUM

pytestmark = pytest.mark.usefixtures("without_type_checks")


def of_nnx(t: Any) -> object:
    net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return nnx.Optimizer(net, t.tx, wrt=nnx.Param).update(net, nnx.grad(lambda net: jnp.sum(net(jnp.ones(2))))(net))


def complex_search(t: Any) -> object:
    search, by = optim.trainable(optax.lbfgs()), {"w": jnp.zeros(2, jnp.complex64)}
    return search.update(tp.copy(by), search.init(by), by, value=0.0, grad=by, value_fn=lambda model: 0.0)


injected = optax.inject_hyperparams(optax.sgd)
lbfgs, polyak = map(optim.trainable, (optax.lbfgs(), optax.polyak_sgd()))
rated = injected(0.1)
filtered = lambda t: t.tx.init(eqx.filter(t.model, eqx.is_array))  # as Equinox's examples have it
updated = lambda t, grads: t.descent.update(grads, t.descent.init(t.dict), t.dict)
of_dict = lambda tx, t, grads, **extra: optim.step(tx, grads, tx.init(t.dict), t.dict, **extra)
of_all = lambda tx, t, **extra: of_dict(tx, t, tp.copy(t.dict) | {"n": None}, **extra)
around = lambda wrap, t: wrap(t.tx).init({"a": t.x, "b": t.x})
apart = lambda tx: optax.partition({"x": tx, "y": tx}, {"a": "x", "b": "y"})
# It selects a parameter that the mask hides.
of_the_other = lambda tx: optax.masked(optim.trainable(optax.sgd(0.1), "b"), {"a": True, "b": False})


def changing(change: Any) -> Any:
    """A rule that changes its state."""
    update = lambda updates, state, params=None: (updates, change(state))
    return optim.trainable(optax.GradientTransformation(lambda params: jnp.zeros(2), update))


OTHER_TREE = r"from another tree.*write state = tx.init\(model\) with the whole model, not eqx.filter\(model, ...\)"
ORDER = "the third argument is the state, got {}; the order is model, state = optim.step"
PLAIN = r"tx is plain Optax.*write tx = optim.trainable\(tx\)"
ONE = "outermost, with plain Optax inside it: write one optim.trainable"
OF_TWO = f"state is of 2 transformations.*{ONE}"
MASK = rf"a mask, or optax\.partition, is around a transformation.*{ONE}"
OPTIM: list[Row] = [
    ("init(filter)", lambda t: optim.step(t.tx, t.grads, filtered(t), t.model), ValueError, OTHER_TREE),
    ("update(filter)", lambda t: t.tx.update(t.grads, t.state, t.params), ValueError, OTHER_TREE),
    ("another model", lambda t: optim.step(t.tx, t.grads, t.state, t.other), ValueError, f"(?s){OTHER_TREE}.*width"),
    ("model, state", lambda t: optim.step(t.tx, t.grads, t.model, t.state), TypeError, ORDER.format("MLP")),
    ("the model for grads", lambda t: optim.step(t.tx, t.model, t.state, t.grads), ValueError, "not arrays.*order is"),
    ("the model first", lambda t: optim.step(t.model, t.tx, t.state, t.grads), TypeError, "got MLP; it comes first"),
    ("no init", lambda t: optim.step(t.tx, t.grads, t.tx, t.model), TypeError, "got ModelTr.*state = tx.init"),
    ("the state of Optax", lambda t: optim.step(t.tx, t.grads, t.state.runs[0], t.model), TypeError, "got tuple.*init"),
    ("plain Optax", lambda t: optim.step(t.sgd, t.grads, t.sgd.init(t.params), t.model), TypeError, PLAIN),
    ("plain Optax over arrays", lambda t: of_dict(t.sgd, t, {"w": t.dict["w"], "b": None}), TypeError, PLAIN),
    ("plain Optax, our state", lambda t: optim.step(t.adam, t.grads, t.state, t.model), TypeError, PLAIN),
    ("update in another order", lambda t: t.tx.update(t.grads, t.model, t.state), TypeError, "got MLP; the order is"),
    ("update without a model", lambda t: t.tx.update(t.grads, t.state), ValueError, r"write tx.update\(grads, sta"),
    ("another's state", lambda t: optim.step(t.descent, t.grads, t.state, t.model), ValueError, "pass the other"),
    ("a vector's", lambda t: t.tx.update(t.grads, VECTOR(t.adam).init(t.model), t.model), ValueError, "pass the other"),
    ("map_params", lambda t: optax.tree_utils.tree_map_params(t.tx, abs, t.state), TypeError, r"plain.*state\.runs\["),
    ("the model as grads", lambda t: optim.step(t.tx, t.model, t.state, t.model), TypeError, r"tp.grad\(loss\)\(mod"),
    ("integer grads", lambda t: updated(t, {"b": jnp.arange(3)}), TypeError, r"floating .* 'b', got int32.*astype"),
    ("the loss as grads", lambda t: t.tx.update(t.x[0, 0], t.state, t.model), ValueError, "got float32.*by restruc"),
    ("value and grads", lambda t: t.tx.update((1.0, t.grads), t.state, t.model), ValueError, "got a tuple of 2.*pass"),
    ("grads of examples", lambda t: t.tx.update({"layers": ({"bias": t.x},)}, t.state, t.model), ValueError, "at 'lay"),
    ("a complex update", lambda t: optim.apply_updates(t.x, t.x + 0j), TypeError, "expected a real update at"),
    ("updates elsewhere", lambda t: optim.apply_updates(t.dict, {"x": t.x}), ValueError, "'x', where the model has no"),
    ("a complex search", complex_search, TypeError, "make two real parameters of 'w'"),
    ("nnx", of_nnx, ValueError, r"variables of flax.nnx.*nnx.split\(net, nnx.Param, \.\.\.\).*optim.step"),
    ("no value_fn", lambda t: of_all(lbfgs, t), TypeError, r"'value_fn'\): write optim.step\(tx.*value=value"),
    ("another structure", lambda t: of_all(changing(lambda s: (s,)), t), ValueError, "structure of its state"),
    ("another shape", lambda t: of_all(changing(lambda s: s[:1]), t), ValueError, "shape of its state at"),
    ("None for grads", lambda t: t.tx.update(None, t.state, t.model), TypeError, r"as tp.grad\(loss\)\(model\) ret"),
    ("trainable(freeze=)", lambda t: optim.trainable(t.adam, freeze="w"), TypeError, "'freeze'; write trainable=\"!"),
    ("missing=True", lambda t: optim.trainable(t.sgd, missing=True), ValueError, 'must be None or "zeros", got True'),
    ("updates first", lambda t: optim.apply_updates({"w": t.x}, t.dict | {"f": len}), ValueError, "model comes first"),
    ("lookahead", lambda t: optim.trainable(optax.lookahead(t.sgd, 3, 0.5)).init(t.dict), ValueError, "by hand"),
    ("complex rates", lambda t: optim.trainable(rated).init({"a": t.x, "b": t.x + 0j}), ValueError, "dtype=float"),
    ("optax.adam", lambda t: optim.trainable(optax.adam), TypeError, "got adam; call it with its arguments, as in"),
    ("a rate", lambda t: optim.trainable(1e-3), TypeError, r"an Optax transformation, got float.*optax.adam\(1e-3\)"),
    ("trainable(model, tx)", lambda t: optim.trainable(t.model, t.adam), TypeError, "got MLP; it comes first, as in"),
    ("trainable(tx, model)", lambda t: optim.trainable(t.adam, t.model).init(t.model), TypeError, "MLP itself: write"),
    ("twice", lambda t: optim.trainable(t.tx), ValueError, ONE),
    ("master around", lambda t: optim.master(t.tx), ValueError, "over models, outermost"),
    ("master: integers", lambda t: optim.master(t.sgd, jnp.int32), TypeError, "expected a floating dtype, got"),
    ("master: x64", lambda t: optim.master(t.sgd, jnp.float64), ValueError, "float64 need 64 bits: call jax.config.up"),
    ("master alone", lambda t: optim.master(t.sgd).update(t.x, None), ValueError, r"update\(grads, state, params\)"),
    ("inside a chain", lambda t: optim.trainable(optax.chain(t.adam, t.tx)).init(t.dict), ValueError, ONE),
    ("two in a chain", lambda t: of_dict(optax.chain(t.tx, t.tx), t, t.dict | {"n": None}), ValueError, OF_TWO),
    ("a mask around", lambda t: around(lambda tx: optax.masked(tx, {"a": True, "b": False}), t), ValueError, MASK),
    ("a mask of what trains", lambda t: around(of_the_other, t), ValueError, ONE),
    ("partition around a tie", lambda t: around(apart, t), ValueError, MASK),
    ("per_leaf around", lambda t: optim.per_leaf(t.tx), ValueError, ONE),
]


def rows(name: str, call: Callable[..., object], table: list[Any], forms: Any = (None,)) -> list[Row]:
    """A row for each wrong argument of one call, in each form."""
    cases = itertools.product(forms, table)
    made = lambda form, wrong: lambda t: call(form, t, wrong)
    return [(f"{name} {i}", made(form, wrong), *answer) for i, (form, (wrong, *answer)) in enumerate(cases)]


one, TREE_AND_STACKS = optax.sgd(1.0), (optim.trainable, STACKS)
three, SAME = lambda t: t.dict | {"a": t.x}, "two groups have the same name"
GROUPS = [  # and the default
    (({"w": one}, None), ValueError, r"trained, but in no group: 'a', 'b'; write optim.groups.*default="),
    (({"ww": one, "**": one}, None), ValueError, "'ww' selects nothing; nearest: 'w'"),
    (({"**": one, "w": one}, None), ValueError, r"'w' comes too late: '\*\*' before it selects"),
    (({lambda model: model["w"]: one, lambda model: [model["a"], model["b"]]: one}, None), ValueError, SAME),
]
scaled = lambda of: optim.scaled(of) if isinstance(of, dict | list) else of
NO_LEAF = r"inside optim.per_leaf no leaf has one; write .*per_leaf\(...\), optim.scaled"
MAX_NORM = [
    (optax.constant_schedule(1.0), TypeError, "max_norm must be a number, got function; for a schedule write"),
    (0.0, ValueError, "max_norm must be positive, got 0"),
    (None, TypeError, "max_norm must be a number, got"),
]
FACTORS = [
    ({"ww": 0.1}, ValueError, "'ww' selects nothing; nearest: 'w'"),
    ({"**": 0.1, "w": 1}, ValueError, r"'w' comes too late: '\*\*' before it selects"),
    ({"w": optax.linear_schedule(1, 0, 9)}, TypeError, r"got function; .* optim.groups\(\{'w': optax.sc"),
    ({"w": True}, TypeError, "the factor of 'w' must be a real number, got bool"),
    ({"w": jnp.ones(2)}, ValueError, r"factor of 'w' must be one number, got float32\[2\]; write an entry"),
    ([0.1], TypeError, r"expected a dictionary \{where: factor\}, got list"),
    (optim.per_leaf(optim.scaled({"w": 2.0})), ValueError, NO_LEAF),
]
by_group = optim.trainable(optim.groups({"w": rated, "**": optax.adam(0.1)}))
falling, whole = (optim.trainable(injected(rate)) for rate in (optax.linear_schedule(1.0, 0.0, 10), 1))
HYPERPARAMETERS = [  # the transformation, the group and what is adjusted
    ((by_group, None, {"rate": 1}), ValueError, r"no hyperparameter 'rate' in the state; it has 'learning_rate'.*inj"),
    ((by_group, "**", 0.1), ValueError, r"'learning_rate' in the state of group '\*\*'; it has none"),
    ((by_group, "c", 0.1), ValueError, r"no group 'c' in the state; it has '\*\*', 'w'"),
    ((falling, None, 0.1), ValueError, "'learning_rate' follows a schedule"),
    ((by_group, None, jnp.ones(2)), ValueError, r"expected learning_rate of shape \(\), got shape \(2,\)"),
    ((by_group, None, [0.1]), TypeError, "expected a number for learning_rate, got list"),
    ((whole, None, 0.5), ValueError, "learning_rate is int32, which cannot hold 0.5; write a float"),
]
FLAG = "must be a bool, or a scalar array of one, got"
ACTIVE = [
    ({"ww": True}, ValueError, "'ww' selects nothing; nearest: 'w'"),
    ({"w": 1}, TypeError, rf"active\['w'\] {FLAG} int"),
    ({"w": jnp.ones(())}, TypeError, rf"{FLAG} float32\[\]"),
    ({"w": np.array([True])}, TypeError, rf"{FLAG} bool\[1\]"),
    ("w", TypeError, r"active must be a dictionary \{where: flag\}, got "),
]
NO_ROWS = [(active, TypeError, r"write optim.trainable\(tx, form=\"stacks\"\)") for active in ({"w": False}, {}, None)]
RESET = r"reset must be True, False or a `where` such as 'head' or '\*\*.bias', got "
ANEW = [
    ("layer.0", ValueError, NEAREST),
    (None, TypeError, RESET + "None"),
    (np.True_, TypeError, RESET + "bool"),
]


def adjusted(_: Any, t: Any, given: Any) -> object:
    tx, group, values = given
    values = values if isinstance(values, dict) else {"learning_rate": values}
    return optim.adjust(tx.init(t.dict), group, **values)


def behind_master(_: Any, t: Any, chained: Any) -> object:
    return optim.trainable(chained).init({"w": t.x.astype("bfloat16"), "b": t.x})


LAST = r"optim.master must be last in a chain.* optim.master\(optax.chain\("
BEHIND = [
    (optax.chain(optim.master(optax.adam(1e-4)), optax.clip(1e-3)), ValueError, LAST),
    (optax.chain(optax.clip(1.0), optax.chain(optim.master(optax.scale_by_adam()), optax.scale(-1))), ValueError, LAST),
]
FORM = 'must be "tree", "vector" or "stacks", got {!r}; .*{}'
WORDS = [(word, ValueError, FORM.format(word, right)) for word, right in (("flat", "vector"), ("stackd", "stacks"))]
SEARCH, FREE = optax.scale_by_backtracking_linesearch(9, store_grad=True), optax.contrib.schedule_free_sgd(0.1)
searched = lambda tx, t: optim.value_and_grad_from_state(sum)(t.dict, state=tx.init(t.dict))
evaluated = lambda tx, model: optim.eval_params(optax.contrib.schedule_free_eval_params, tx.init(model), model)
forgets = optim.trainable(optax.scale_by_backtracking_linesearch(9))
searches, mixed = optim.trainable(optax.chain(SEARCH, SEARCH)), STACKS(optim.groups({"w": FREE}, MOMENTUM))
FOUND = r"expected one line search .*, found {}: use optax\.lbfgs"
changed = lambda t, *to, **said: optim.set_trainable(t.tx, t.state, t.model, *to, **said)
in_a_trace = lambda t: jax.jit(lambda state: optim.set_trainable(t.tx, state, t.model, "layers.0"))(t.state)
other = lambda t: optim.set_trainable(t.tx, optim.trainable(MOMENTUM).init(t.model), t.model, "layers.0")

ADAPTED: list[Row] = [
    *rows("groups", lambda form, t, of: form(optim.groups(*of)).init(three(t)), GROUPS, TREE_AND_STACKS),
    *rows("behind master", behind_master, BEHIND),
    *rows("form", lambda _, t, form: optim.trainable(t.sgd, form=form), WORDS),
    *rows("max_norm", lambda _, t, bad: optim.clip_by_global_norm(bad), MAX_NORM),
    *rows("factors", lambda form, t, of: form(scaled(of), "!b").init(t.dict), FACTORS, TREE_AND_STACKS),
    *rows("adjust", adjusted, HYPERPARAMETERS),
    *rows("active", lambda form, t, active: of_all(form(t.sgd), t, active=active), ACTIVE, [STACKS]),
    *rows("active without rows", lambda form, t, active: of_all(form(t.sgd), t, active=active), NO_ROWS, FORMS[:2]),
    *rows("reset", lambda _, t, where: changed(t, reset=where), ANEW),
    ("no search", lambda t: searched(t.tx, t), ValueError, FOUND.format(0)),
    ("a search that keeps no gradient", lambda t: searched(forgets, t), ValueError, FOUND.format(0)),
    ("two searches", lambda t: searched(searches, t), ValueError, FOUND.format(2)),
    ("averages of groups", lambda t: evaluated(mixed, {"w": t.x, "b": t.x + 1}), ValueError, "in stacks of groups"),
    ("set_trainable: True", lambda t: changed(t, True), TypeError, "trainable=True selects nothing; write None"),
    ("set_trainable: in a trace", in_a_trace, ValueError, "between steps, outside of jax.jit"),
    ("set_trainable: another's state", other, ValueError, "made by another transformat"),
    ("groups alone", lambda t: optim.groups({"layers.0": t.sgd}, t.sgd).init(t.model), TypeError, "optim.trainable.op"),
    ("a rate without a name", lambda t: optim.adjust(t.state, 0.1), TypeError, "as in learning_rate=0.1; got 0.1"),
    ("adjust(tx)", lambda t: optim.adjust(t.tx, learning_rate=0.1), TypeError, "expected a state.*the state comes fir"),
    ("no clip", lambda t: t.state.clip, ValueError, r"no clip here.*clip_by_global_norm\(max_norm"),
    ("set_trainable: order", lambda t: optim.set_trainable(t.tx, t.model, t.state), ValueError, "order: tx, state"),
    ("set_trainable: plain", lambda t: optim.set_trainable(t.sgd, t.state, t.model), TypeError, "whole chain into opt"),
    ("report(tx, state)", lambda t: optim.report(t.tx, t.state), TypeError, r"optim.report\(tx, model, state\)"),
]


@pytest.mark.parametrize("row", [*OPTIM, *ADAPTED], ids=operator.itemgetter(0))
def test_a_mistake_is_answered(row):
    check(row)
