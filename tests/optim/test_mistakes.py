"""The mistakes of newcomers around optimisers: see tests/test_mistakes.py."""

import operator
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import treeparams as tp
from treeparams import optim

from ..mistakes import NEAREST, Row, check
from ..zoo import STACKS, VECTOR

pytestmark = pytest.mark.usefixtures("without_type_checks")


def of_nnx(t: Any) -> object:
    net = nnx.Linear(2, 1, rngs=nnx.Rngs(0))
    return nnx.Optimizer(net, t.tx, wrt=nnx.Param).update(net, nnx.grad(lambda net: jnp.sum(net(jnp.ones(2))))(net))


def complex_search(t: Any) -> object:
    search, by = optim.trainable(optax.lbfgs()), {"w": jnp.zeros(2, jnp.complex64)}
    return search.update(tp.copy(by), search.init(by), by, value=0.0, grad=by, value_fn=lambda model: 0.0)


rated = optax.inject_hyperparams(optax.sgd)(0.1)
filtered = lambda t: t.tx.init(eqx.filter(t.model, eqx.is_array))  # as Equinox's examples have it
updated = lambda t, grads: t.descent.update(grads, t.descent.init(t.dict), t.dict)
of_dict = lambda tx, t, grads: optim.step(tx, grads, tx.init(t.dict), t.dict)
of_all = lambda rule, t: of_dict(optim.trainable(rule), t, tp.copy(t.dict) | {"n": None})
within = lambda rate: VECTOR(optax.sgd(rate))
around = lambda wrap, t: wrap(t.tx).init({"a": t.x, "b": t.x})
apart = lambda tx: optax.partition({"x": tx, "y": tx}, {"a": "x", "b": "y"})
# It selects a parameter that the mask hides.
of_the_other = lambda tx: optax.masked(optim.trainable(optax.sgd(0.1), "b"), {"a": True, "b": False})


def behind(chained: Any) -> Row:
    """What stands behind `optim.master` in a chain."""
    words = r"optim.master must be last in a chain.* optim.master\(optax.chain\("
    return (
        "behind master",
        lambda t: optim.trainable(chained).init({"w": t.x.astype("bfloat16"), "b": t.x}),
        ValueError,
        words,
    )


OTHER_TREE = r"from another tree.*write state = tx.init\(model\) with the whole model, not eqx.filter\(model, ...\)"
ORDER = "the third argument is the state, got {}; the order is model, state = optim.step"
PLAIN = r"tx is plain Optax.*write tx = optim.trainable\(tx\)"
ONE = "outermost, with plain Optax inside it: write one optim.trainable"
OPTIM: list[Row] = [
    ("init(filter)", lambda t: optim.step(t.tx, t.grads, filtered(t), t.model), ValueError, OTHER_TREE),
    ("init(params)", lambda t: t.tx.update(t.grads, t.tx.init(t.params), t.model), ValueError, OTHER_TREE),
    ("update(filter)", lambda t: t.tx.update(t.grads, t.state, t.params), ValueError, OTHER_TREE),
    ("another model", lambda t: optim.step(t.tx, t.grads, t.state, t.other), ValueError, f"(?s){OTHER_TREE}.*width"),
    ("model, state", lambda t: optim.step(t.tx, t.grads, t.model, t.state), TypeError, ORDER.format("MLP")),
    ("grads last", lambda t: optim.step(t.tx, t.model, t.grads, t.state), TypeError, ORDER.format("MLP")),
    ("the model for grads", lambda t: optim.step(t.tx, t.model, t.state, t.grads), ValueError, "not arrays.*order is"),
    ("the model first", lambda t: optim.step(t.model, t.tx, t.state, t.grads), TypeError, "got MLP; it comes first"),
    ("no init", lambda t: optim.step(t.tx, t.grads, t.tx, t.model), TypeError, "got ModelTr.*state = tx.init"),
    ("None", lambda t: optim.step(t.tx, t.grads, None, t.model), TypeError, "got NoneType.*write state = tx.init"),
    ("the state of Optax", lambda t: optim.step(t.tx, t.grads, t.state.runs[0], t.model), TypeError, "got tuple.*init"),
    ("plain Optax", lambda t: optim.step(t.sgd, t.grads, t.sgd.init(t.params), t.model), TypeError, PLAIN),
    ("plain Optax over arrays", lambda t: of_dict(t.sgd, t, {"w": t.dict["w"], "b": None}), TypeError, PLAIN),
    ("plain Optax, our state", lambda t: optim.step(t.adam, t.grads, t.state, t.model), TypeError, PLAIN),
    ("update in another order", lambda t: t.tx.update(t.grads, t.model, t.state), TypeError, "got MLP; the order is"),
    ("update without a model", lambda t: t.tx.update(t.grads, t.state), ValueError, r"write tx.update\(grads, sta"),
    ("another's state", lambda t: optim.step(t.descent, t.grads, t.state, t.model), ValueError, "pass the other"),
    ("no moments", lambda t: t.tx.update(t.grads, t.descent.init(t.model), t.model), ValueError, "pass the other"),
    ("a vector's", lambda t: t.tx.update(t.grads, VECTOR(t.adam).init(t.model), t.model), ValueError, "pass the other"),
    ("a tree's", lambda t: VECTOR(t.adam).update(t.grads, t.state, t.model), ValueError, "pass the other"),
    ("map_params", lambda t: optax.tree_utils.tree_map_params(t.tx, abs, t.state), TypeError, r"plain.*state\.runs\["),
    ("the model as grads", lambda t: optim.step(t.tx, t.model, t.state, t.model), TypeError, r"tp.grad\(loss\)\(mod"),
    ("update of the model", lambda t: t.tx.update(t.tied, t.tx.init(t.tied), t.tied), TypeError, "the model itself"),
    ("integer grads", lambda t: updated(t, {"b": jnp.arange(3)}), TypeError, r"floating .* 'b', got int32.*astype"),
    ("the loss as grads", lambda t: t.tx.update(t.x[0, 0], t.state, t.model), ValueError, "got float32.*by restruc"),
    ("value and grads", lambda t: t.tx.update((1.0, t.grads), t.state, t.model), ValueError, "got a tuple of 2.*pass"),
    ("grads of examples", lambda t: t.tx.update({"layers": ({"bias": t.x},)}, t.state, t.model), ValueError, "at 'lay"),
    ("grads of no leaf", lambda t: updated(t, {"ww": t.x}), ValueError, "at 'ww', where the model has no leaf.*'w'"),
    ("grads of a shape", lambda t: updated(t, {"w": jnp.ones(3)}), ValueError, r"at 'w', got float32\["),
    ("True for grads", lambda t: updated(t, True), TypeError, r"expected a tree of gradients, as tp\.grad"),
    ("3 for grads", lambda t: updated(t, 3), TypeError, r"expected a tree of gradients, as tp\.grad"),
    ("a complex update", lambda t: optim.apply_updates(t.x, t.x + 0j), TypeError, "expected a real update at"),
    ("updates elsewhere", lambda t: optim.apply_updates(t.dict, {"x": t.x}), ValueError, "'x', where the model has no"),
    ("a complex search", complex_search, TypeError, "make two real parameters of 'w'"),
    ("nnx", of_nnx, ValueError, r"variables of flax.nnx.*nnx.split\(net, nnx.Param, \.\.\.\).*optim.step"),
    ("no value_fn", lambda t: of_all(optax.lbfgs(), t), TypeError, r"'value_fn'\): write optim.step\(tx.*value=value"),
    ("no value", lambda t: of_all(optax.polyak_sgd(), t), TypeError, r"'value'\): write optim.step\(tx, grads, st"),
    ("a state for grads", lambda t: updated(t, t.sgd.init(t.dict)), TypeError, "of gradients, .*got a state of Optax"),
    ("None for grads", lambda t: t.tx.update(None, t.state, t.model), TypeError, r"as tp.grad\(loss\)\(model\) ret"),
    ("trainable(freeze=)", lambda t: optim.trainable(t.adam, freeze="w"), TypeError, "'freeze'; write trainable=\"!"),
    ("trainable(frozen=)", lambda t: optim.trainable(t.adam, frozen="zeros"), TypeError, 'write missing="zeros"'),
    ("missing=True", lambda t: optim.trainable(t.sgd, missing=True), ValueError, 'must be None or "zeros", got True'),
    ("to_optax(tx=)", lambda t: optim.to_optax(t.tx, t.state, target=t.x), TypeError, "'target'; write like=..."),
    ("init(grads)", lambda t: t.tx.update(t.grads, t.tx.init(t.grads), t.model), ValueError, OTHER_TREE),
    ("updates first", lambda t: optim.apply_updates({"w": t.x}, t.dict | {"f": len}), ValueError, "model comes first"),
    ("updates and state", lambda t: optim.apply_updates(t.model, (t.grads, t.state)), ValueError, "got a tuple of 2"),
    ("lookahead", lambda t: optim.trainable(optax.lookahead(t.sgd, 3, 0.5)).init(t.dict), ValueError, "by hand"),
    ("complex rates", lambda t: optim.trainable(rated).init({"a": t.x, "b": t.x + 0j}), ValueError, "dtype=float"),
    ("optax.adam", lambda t: optim.trainable(optax.adam), TypeError, "got adam; call it with its arguments, as in"),
    ("a rate", lambda t: optim.trainable(1e-3), TypeError, r"an Optax transformation, got float.*optax.adam\(1e-3\)"),
    ("trainable(model, tx)", lambda t: optim.trainable(t.model, t.adam), TypeError, "got MLP; it comes first, as in"),
    ("trainable(tx, model)", lambda t: optim.trainable(t.adam, t.model).init(t.model), TypeError, "MLP itself: write"),
    ("twice", lambda t: optim.trainable(t.tx), ValueError, ONE),
    ("twice, in a vector", lambda t: VECTOR(t.tx), ValueError, ONE),
    ("twice, in stacks", lambda t: STACKS(t.tx), ValueError, ONE),
    ("master around", lambda t: optim.master(t.tx), ValueError, "over models, outermost"),
    ("master(optax.sgd)", lambda t: optim.master(optax.sgd), TypeError, "call it with its arguments"),
    ("master: integers", lambda t: optim.master(t.sgd, jnp.int32), TypeError, "expected a floating dtype, got"),
    ("master: complex", lambda t: optim.master(t.sgd, jnp.complex64), TypeError, "copies of complex parameters are"),
    ("master: x64", lambda t: optim.master(t.sgd, jnp.float64), ValueError, "float64 need 64 bits: call jax.config.up"),
    ("master alone", lambda t: optim.master(t.sgd).update(t.x, None), ValueError, r"update\(grads, state, params\)"),
    behind(optax.chain(optim.master(optax.adam(1e-4)), optax.clip(1e-3))),
    behind(optax.chain(optax.clip(1.0), optax.chain(optim.master(optax.scale_by_adam()), optax.scale(-1e-4)))),
    behind(optim.groups({"w": optax.chain(optim.master(optax.sgd(0.1)), optax.scale(0.5))}, default=optax.sgd(0.1))),
    ("inside a chain", lambda t: optim.trainable(optax.chain(t.adam, t.tx)).init(t.dict), ValueError, ONE),
    ("inside rates", lambda t: optim.trainable(optax.inject_hyperparams(within)(0.1)).init(t.dict), ValueError, ONE),
    (
        "two in a chain",
        lambda t: of_dict(optax.chain(t.tx, t.tx), t, t.dict | {"n": None}),
        ValueError,
        f"state is of 2 transformations.*{ONE}",
    ),
    ("a mask around", lambda t: around(lambda tx: optax.masked(tx, {"a": True, "b": False}), t), ValueError, ONE),
    ("a mask of what trains", lambda t: around(of_the_other, t), ValueError, ONE),
    ("partition in a trace", lambda t: jax.jit(lambda: around(apart, t))(), ValueError, f"optax.partition, .*{ONE}"),
    ("partition around a tie", lambda t: around(apart, t), ValueError, f"optax.partition, is around.*{ONE}"),
    ("groups of ours", lambda t: optim.trainable(optim.groups({"a": t.tx}, t.sgd)).init({"a": t.x}), ValueError, ONE),
    ("per_leaf around", lambda t: optim.per_leaf(t.tx), ValueError, ONE),
]


def grouped(key: object, words: str, **others: Any) -> Row:
    """A mistake in a key of `optim.groups`."""

    def init(t: Any) -> object:
        return optim.trainable(optim.groups({key: t.sgd} | others, t.sgd)).init(t.model)

    return f"groups: {key if isinstance(key, str) else type(key).__name__}", init, ValueError, words


def formed(form: str, right: str) -> Row:
    """Another word for a form."""
    words = f'form must be "tree", "vector" or "stacks", got {form!r}; .*{right}'
    return f"form={form}", lambda t: optim.trainable(t.sgd, form=form), ValueError, words


ADAPTED: list[Row] = [
    formed("flat", "vector"),
    formed("stacked", "stacks"),
    formed("ravel", "vector"),
    formed("partition", "tree"),
    formed("vectors", "vector"),
    grouped("layer.0", NEAREST),
    grouped(("**", "!layer.0"), NEAREST),
    grouped("!layers.0", r"only excludes; write what to select before it: \['\*\*', '!layers.0'\]"),
    grouped(re.compile("wieght"), "'wieght' selects nothing; nearest"),
    grouped(eqx.nn.Conv2d, "'Conv2d' selects nothing; the model has nodes of Linear"),
    grouped(tp.leaves(lambda path, leaf: leaf.ndim == 5), r"lambda at test_mistakes.py:\d+\) selects nothing"),
    grouped("**", "comes too late: '\\*\\*' before it selects", **{"layers.0": optax.sgd(0.1)}),
    ("groups alone", lambda t: optim.groups({"layers.0": t.sgd}, t.sgd).init(t.model), TypeError, "optim.trainable.op"),
    ("groups of rates", lambda t: optim.groups({"w": 0.1}), TypeError, r"an Optax transformation, got float"),
    ("a list of groups", lambda t: optim.groups([("w", t.sgd)]), TypeError, "a dictionary {where: transformation}"),
    ("a rate without a name", lambda t: optim.adjust(t.state, 0.1), TypeError, "as in learning_rate=0.1; got 0.1"),
    ("adjust(tx)", lambda t: optim.adjust(t.tx, learning_rate=0.1), TypeError, "expected a state.*the state comes fir"),
    ("no clip", lambda t: t.state.clip, ValueError, r"no clip here.*clip_by_global_norm\(max_norm"),
    ("set_trainable: order", lambda t: optim.set_trainable(t.tx, t.model, t.state), ValueError, "order: tx, state"),
    ("set_trainable: plain", lambda t: optim.set_trainable(t.sgd, t.state, t.model), TypeError, "whole chain into opt"),
    ("set_trainable: a part", lambda t: optim.set_trainable(t.tx, t.state, t.params), ValueError, OTHER_TREE),
    ("report: plain", lambda t: optim.report(t.adam, t.dict), TypeError, "optim.trainable.*; put the whole chain"),
    ("report: a dict", lambda t: optim.report(t.tx, t.dict, {}), TypeError, "state of tx, got dict and dict: write"),
    ("report(tx, state)", lambda t: optim.report(t.tx, t.state), TypeError, r"optim.report\(tx, model, state\)"),
]


@pytest.mark.parametrize("row", [*OPTIM, *ADAPTED], ids=operator.itemgetter(0))
def test_a_mistake_is_answered(row):
    check(row)
