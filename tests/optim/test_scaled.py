"""Updates times a number by parameter: the same over a tree, in groups, over a vector and stacks."""

import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, assert_close, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
forms = pytest.mark.parametrize("form", [optim.trainable, VECTOR, STACKS])


class Language(eqx.Module):
    """A tie with a transform, a tie by identity beside it, equal layers, a scalar and what is frozen."""

    embed: jax.Array
    layers: list[dict[str, jax.Array]]
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)
    scale: jax.Array
    mean: jax.Array = tp.field(trainable=False)


def _model():
    layers = [{"w": ramp(2, 2, start=i), "b": ramp(2, start=i)} for i in range(3)]
    return Language(ramp(2, 3), layers, ramp(2, 3).T, jnp.ones(()), jnp.ones(2))


def _grads(model, time=0.0):
    return jax.tree.map(lambda x: jnp.sin(x + time), tp.partition(model)[0])


FACTORS = {"head": 0.5, "layers.0": 0.25, "layers.1.w": jnp.float32(4), "mean": 3.0, "scale": np.float64(2)}


def _rule(rate=0.1):
    """Without a count: that of a parameter by itself is another than that of all."""
    return optax.chain(optax.add_decayed_weights(0.5), optax.sgd(rate, momentum=0.9))


def _trained(tx, fills=False):
    """The model after three steps, of which the second has no gradient for the first layer."""
    model = _model()
    state = tx.init(model)
    for time in range(3):
        grads = _grads(model, time)
        if time == 1:
            grads = eqx.tree_at(lambda m: m.layers[0], grads, {"w": None, "b": None})
            grads = tp.project(model, grads, missing="zeros") if fills else grads
        model, state = optim.step(tx, grads, state, model)
    return model


@functools.cache
def _by_groups(fills=False):
    """A group for each factor, with its rate."""
    named = FACTORS | {"embed": FACTORS["head"]}  # a group is named by the source of a tie
    rules = {where: _rule(0.1 * float(named[where])) for where in named if where != "head"}
    return _trained(optim.trainable(optim.groups(rules, default=_rule())), fills)


def _ways():
    scaled, each = optim.scaled(FACTORS), optim.per_leaf(_rule())
    of_all, of_rows = optax.chain(_rule(), scaled), optax.chain(each, scaled)
    inject = optax.inject_hyperparams(lambda half: optax.chain(_rule(), optim.scaled(FACTORS | {"head": half})))
    return {
        "in groups": optim.trainable(optim.groups({"layers": of_all}, default=of_all)),
        "stacks in groups": optim.trainable(optim.groups({"layers": of_rows}, default=of_rows), form="stacks"),
        "a hyperparameter": optim.trainable(inject(0.5)),
        "a vector": optim.trainable(of_all, form="vector"),
    }


@pytest.mark.parametrize("way", _ways())
def test_equals_a_group_for_each_factor(way):
    fills = way in ("a vector", "stacks of all")
    assert_close(_trained(_ways()[way], fills), _by_groups(fills), 1e-6)


@forms
def test_traced_factors_in_one_program_and_their_dtypes(form):
    model = {"low": jnp.ones(3, jnp.bfloat16), "single": jnp.ones(2), "complex": jnp.ones(2, jnp.complex64)}
    model = model if form is not VECTOR else {"low": model["low"], "other": jnp.ones(2, jnp.bfloat16)}
    name = [*model][-1]
    rule = lambda slow: form(optax.chain(optax.scale(-1.0), optim.scaled({"low": slow, name: 2})))

    @jax.jit
    @jax.vmap
    def updates(slow):
        tx = rule(slow)
        return tx.update(tp.copy(model), tx.init(model), model)[0]

    got = updates(jnp.float32([1, 1 / 3]))
    assert {name: leaf.dtype for name, leaf in got.items()} == {name: leaf.dtype for name, leaf in model.items()}
    np.testing.assert_array_equal(got["low"], jnp.bfloat16([[-1] * 3, [-1 / 3] * 3]))
    np.testing.assert_array_equal(got[name], np.full((2, 2), -2))


@forms
def test_histories_go_on_with_their_factors(form):
    model = {"a": jnp.ones(1), "b": jnp.ones(1)}
    tx = form(optax.chain(optax.sgd(1.0), optim.scaled({"a": 0.5, "b": 0.25})), "a")  # what is frozen may be named
    state = tx.init(model)
    assert not jax.tree.leaves(state.runs[0])
    assert pickle.loads(pickle.dumps(state)).roles.layout == state.layout
    _, state = tx.update(tp.copy(model), state, model)
    both = optim.set_trainable(tx, state, model)
    updates, after = jax.jit(tx.update)(model, both, model)
    assert_same(updates, {"a": jnp.float32([-0.5]), "b": jnp.float32([-0.25])}, identity=False)
    assert len(after.runs) == 2


def test_plain_optax_goes_by_path():
    params = {"a": jnp.ones(2), "b": {"w": jnp.ones(2), "none": None}}
    tx = optim.scaled({"b.w": 0.5})
    want = {"a": jnp.ones(2), "b": {"w": jnp.full(2, 0.5), "none": None}}
    assert_same(tx.update(params, tx.init(params))[0], want, identity=False)
    masked = optax.masked(tx, {"a": True, "b": False})
    assert_same(masked.update(tp.copy(params), masked.init(params), params)[0], params)
    for tree, match in ((tp.stack(params)[0], "which stacks do not have"), ({"a": jnp.ones(1)}, "'b.w' selects noth")):
        with pytest.raises(ValueError, match=match):
            tx.update(tree, tx.init(tree))
    flat = optim.trainable(optax.flatten(optax.chain(tx)))
    with pytest.raises(ValueError, match=r"updates as PyTreeDef\(\*\), but the parameters are PyTree"):
        flat.update(tp.copy(params), flat.init(params), params)


@forms
def test_errors(form, without_type_checks):
    model = {"encoder": jnp.ones(2), "body": jnp.ones(1), "frozen": jnp.ones(1)}
    for factors, error, match in (
        ({"encodr": 0.1}, ValueError, "'encodr' selects nothing; nearest: 'encoder'"),
        ({"**": 0.1, "body": 1}, ValueError, r"'body' comes too late: '\*\*' before it selects"),
        (
            {"body": optax.linear_schedule(1, 0, 9)},
            TypeError,
            r"got function; .* optim.groups\(\{'body': optax.scale_",
        ),
        ({"body": True}, TypeError, "the factor of 'body' must be a real number, got bool"),
        ({"body": 1j}, TypeError, "must be a real number, got complex"),
        ({"body": None}, TypeError, "must be a real number, got None"),
        (
            {"body": jnp.ones(2)},
            ValueError,
            r"the factor of 'body' must be one number, got float32\[2\]; write an entry",
        ),
        ([0.1], TypeError, r"expected a dictionary \{where: factor\}, got list"),
    ):
        with pytest.raises(error, match=match):
            form(optim.scaled(factors), "!frozen").init(model)
    with pytest.raises(
        ValueError, match=r"inside optim.per_leaf no leaf has one; write .*per_leaf\(...\), optim.scaled"
    ):
        form(optim.per_leaf(optim.scaled({"body": 2.0}))).init(model)
