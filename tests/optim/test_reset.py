"""`set_trainable(..., reset=where)`: a part begins anew, and the rest does not notice."""

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

DECAYED = optax.adamw(0.1, weight_decay=0.5)
INJECTED = optax.inject_hyperparams(optax.adam)(0.1)
CASES = {
    "vector": (VECTOR, DECAYED),
    "groups": (optim.trainable, optim.groups({"head": DECAYED}, default=INJECTED)),
    "stacks in groups": (STACKS, optim.groups({"body": optim.per_leaf(DECAYED)}, default=INJECTED)),
}


def _model():
    return {"body": ramp(2), "head": {"w": ramp(2, 2), "b": ramp(2, start=1)}, "other": ramp(1)}


def _steps(tx, state, model, count=2):
    for time in range(count):
        grads = jax.tree.map(lambda x, time=time: jnp.sin(x + time), model)
        model, state = optim.step(tx, grads, state, model)
    return model, state


@pytest.mark.parametrize(("form", "rule"), CASES.values(), ids=CASES)
def test_a_part_is_as_by_a_fresh_optimiser_and_the_rest_as_before(form, rule):
    tx = form(rule, ("body", "head"))
    model, state = _steps(tx, tx.init(_model()), _model(), 3)
    has_rate = bool(optax.tree_utils.tree_get_all_with_path(state.runs[0], "hyperparams"))
    adjusted = lambda state: optim.adjust(state, learning_rate=0.25) if has_rate else state
    state = adjusted(state)  # which no reset forgets
    model["head"] = jax.tree.map(lambda x: x / 2, model["head"])  # a head that is made anew
    as_before, _ = _steps(tx, state, model)
    alone = form(rule, "head")
    want, _ = _steps(alone, adjusted(alone.init(model)), model)
    anew = optim.set_trainable(tx, state, model, reset="head")
    got, after = _steps(tx, anew, model)
    assert optim.set_trainable(tx, after, got, reset="head").roles == after.roles  # a step is not traced again
    assert_close(got, as_before | {"head": want["head"]}, 1e-6)
    assert [int(count) for count in after.counts] == [5, 2]
    # Of what is frozen too: nothing is held any more.
    frozen = optim.set_trainable(tx, state, model, "body")
    dropped = optim.set_trainable(tx, frozen, model, reset=("head", "other"))
    assert (len(frozen.held), dropped.held, dropped.layout.paths) == (1, (), ("body",))
    assert_same(optim.set_trainable(tx, dropped, model, ("body", "head")), anew)


@forms
def test_what_trains_stays_as_it_is_unless_it_is_said(form):
    model = _model()
    tx = form(optax.adam(0.1), "body")
    _, state = _steps(tx, tx.init(model), model, 1)
    paths = lambda **said: optim.set_trainable(tx, state, model, **said).layout.paths
    assert paths(reset="body") == ("body",)
    assert paths() == paths(trainable=None, reset="body") == paths(reset=True) == tp.layout(model).paths
    assert paths(trainable="head.w", reset="body") == ("head.w",)
    assert_same(optim.set_trainable(tx, state, model, reset="head"), state)  # it has not begun
    assert_same(optim.set_trainable(tx, state, model, reset="**"), tx.init(model))


def test_a_tie_is_reset_whole():
    class Model(eqx.Module):
        embed: jax.Array
        head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)
        bias: jax.Array

    model, tx = Model(ramp(2, 3), ramp(2, 3).T, ramp(2)), optim.trainable(optax.sgd(0.1, momentum=0.5))
    _, state = tx.update(tp.partition(model)[0], tx.init(model), model)
    for where in ("embed", "head", lambda m: m.head):
        after = optim.set_trainable(tx, state, model, reset=where)
        assert [[int(count) for count in after.counts], *map(len, after.roles.running)] == [[1, 0], 1, 1]
    shared = jnp.array([1.0, 2.0])
    model = {"a": shared, "b": shared, "c": jnp.ones(1)}
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    for where in ("a", ("a", "b")):
        assert len(optim.set_trainable(tx, state, model, reset=where).runs) == 2
    with pytest.raises(ValueError, match=r"'b' names 'b', but 'a' and 'b' are one array.* or write 'a'"):
        optim.set_trainable(tx, state, model, reset="b")


def test_errors(without_type_checks):
    model, tx = _model(), optim.trainable(optax.adam(0.1))
    state = tx.init(model)
    for reset, error, match in (
        ("haed", ValueError, "'haed' selects nothing; nearest: 'head"),
        (None, TypeError, r"reset must be True, False or a `where` such as 'head' or '\*\*.bias', got None"),
        (1, TypeError, "or a `where` such as .*, got int"),
        (np.True_, TypeError, "or a `where` such as .*, got bool"),
        ({"head": True}, TypeError, "or a `where` such as .*, got dict"),
    ):
        with pytest.raises(error, match=match):
            optim.set_trainable(tx, state, model, reset=reset)
    tx = optim.trainable(optax.scale_by_lbfgs(memory_size=2))
    with pytest.raises(ValueError, match=r"L-BFGS remembers steps of all trained leaves.*reset=True"):
        optim.set_trainable(tx, tx.init(model), model, reset="head")
