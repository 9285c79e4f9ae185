"""What a state has in it: value and gradient of a line search, and the parameters to evaluate at."""

import jax
import jax.numpy as jnp
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import assert_close, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")

SEARCH = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9, store_grad=True))


forms_with_rules = pytest.mark.parametrize(
    ("form", "within"),
    [("tree", lambda tx: tx), ("vector", lambda tx: tx), ("stacks", lambda tx: tx), ("stacks", optim.per_leaf)],
)


def test_without_a_trace_the_state_says_whether_to_compute():
    model, calls = {"w": ramp(2), "frozen": ramp(2), "rate": 0.5}, list[int]()

    def loss(model):
        calls.append(1)
        return jnp.sum(model["w"] ** 2)

    tx = optim.trainable(SEARCH, "w")
    state, fetch = tx.init(model), optim.value_and_grad_from_state(loss)
    value, grads = fetch(model, state=state)
    assert len(calls) == 1
    after, state = optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss)
    calls.clear()
    value, grads = fetch(after, state=state)
    assert not calls
    assert_close((value, grads), tp.value_and_grad(loss, "w")(after))
    # Histories that have not taken their steps together have searched at other points: a search is one for all.
    with pytest.raises(ValueError, match="different numbers of steps"):
        optim.set_trainable(tx, state, after, ["w", "frozen"])
    thawed = optim.set_trainable(tx, state, after, ["w", "frozen"], reset=True)
    calls.clear()
    assert_close(fetch(after, state=thawed), tp.value_and_grad(loss, thawed.layout)(after))
    assert calls


def test_a_state_without_value_and_gradient_is_refused():
    model, loss = {"w": ramp(2)}, lambda model: jnp.sum(model["w"])
    forgets = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9))
    for rule, count in ((optax.adam(0.1), 0), (forgets, 0), (optax.chain(SEARCH, SEARCH), 2)):
        with pytest.raises(ValueError, match=rf"expected one line search .*, found {count}: use optax\.lbfgs"):
            optim.value_and_grad_from_state(loss)(model, state=optim.trainable(rule).init(model))
    with pytest.raises(ValueError, match=r"expected the state of one transformation over models"):
        optim.value_and_grad_from_state(loss)(model, state=SEARCH.init(model))


FREE = optax.contrib.schedule_free_sgd(0.1)
EVALUATE = optax.contrib.schedule_free_eval_params


def test_a_state_in_no_form_is_refused():
    model = {"x": ramp(2), "y": ramp(2)}
    tx = optim.trainable(optim.groups({"x": FREE}, default=optax.sgd(0.1, momentum=0.9)), form="stacks")
    with pytest.raises(ValueError, match="in stacks of groups"):
        optim.eval_params(EVALUATE, tx.init(model), model)
    with pytest.raises(ValueError, match="expected the state of one transformation over models"):
        optim.eval_params(EVALUATE, FREE.init(model), model)


@forms_with_rules
def test_the_evaluated_parameters_are_those_of_each_leaf(form, within):
    model = {"a": ramp(2, 3), "b": [ramp(3), ramp(3) + 1], "frozen": ramp(2)}
    schedule_free = optax.contrib.schedule_free_sgd(0.5)
    tx = optim.trainable(within(schedule_free), "!frozen", form=form)
    state = tx.init(model)
    for _ in range(2):
        model, state = optim.step(tx, jax.tree.map(jnp.ones_like, model), state, model)
    found = optim.eval_params(optax.contrib.schedule_free_eval_params, state, model)
    plain = optim.trainable(schedule_free, "!frozen")
    want, of_plain = {"a": ramp(2, 3), "b": [ramp(3), ramp(3) + 1], "frozen": ramp(2)}, None
    of_plain = plain.init(want)
    for _ in range(2):
        want, of_plain = optim.step(plain, jax.tree.map(jnp.ones_like, want), of_plain, want)
    assert_close(found, optim.eval_params(optax.contrib.schedule_free_eval_params, of_plain, want), 1e-6)


def test_hyperparameters_are_where_the_users_of_optax_read_them():
    model = {"a": ramp(2), "b": ramp(2)}
    tx = optim.trainable(optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.5), "a")
    state = optim.adjust(tx.init(model), learning_rate=0.25)
    assert {name: float(value) for name, value in state.hyperparams.items()} == {"learning_rate": 0.25, "momentum": 0.5}
    _, state = tx.update(tp.copy(model), state, model)
    for where in ("b", "**"):  # they are of the run
        assert optim.set_trainable(tx, state, model, where).hyperparams["learning_rate"] == 0.25
    rows = optim.trainable(optim.per_leaf(optax.inject_hyperparams(optax.sgd)(0.1)), "a", form="stacks")
    assert rows.init(model).hyperparams["learning_rate"].shape == (1,)
    with pytest.raises(ValueError, match=r"several histories train, each with hyperparameters in state.runs: a; b"):
        _ = optim.set_trainable(rows, rows.update(tp.copy(model), rows.init(model), model)[1], model).hyperparams
