"""groups, report and adjust: a transformation for each part of a model, and the rates of each."""

import pickle
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, assert_close, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
sgd = optax.inject_hyperparams(optax.sgd)
forms = pytest.mark.parametrize("form", [optim.trainable, STACKS])


def _model():
    return {"a": jnp.ones(2), "b": {"w": jnp.ones((2, 2)), "v": jnp.ones(1)}, "n": jnp.array(3)}


def groups(rules, default=None, trainable=None, form=optim.trainable):
    return form(optim.groups(rules, default), trainable)


def rates(tx, model, state=None, grads=None):
    """The rates of plain gradient descent, by path: the updates where the gradient is one, at the first element."""
    if grads is None:
        grads = jax.tree.map(lambda x: 1 + np.arange(x.size, dtype=x.dtype).reshape(x.shape), tp.partition(model)[0])
    updates, _ = tx.update(grads, tx.init(model) if state is None else state, model)
    return {path: -float(leaf.ravel()[0]) for path, leaf in tp.trainables(updates).items()}


@forms
def test_any_where_is_a_key_and_the_first_match_wins(form):
    model = {"b": _model()["b"], "c": [eqx.nn.Linear(2, 1, key=jax.random.key(0))], "d": {"x": ramp(1), "y": ramp(1)}}
    keys = ("b.w", re.compile("b"), eqx.nn.Linear, lambda model: model["d"]["x"], ("d.y", "b.v"))
    tx = groups({key: optax.sgd(float(i)) for i, key in enumerate(keys, 1)}, form=form)
    want = {"b.v": 2, "b.w": 1, "c.0.weight": 3, "c.0.bias": 3, "d.x": 4, "d.y": 5}
    assert rates(tx, model) == want
    state = tx.init(model)
    assert_same(pickle.loads(pickle.dumps(state)), state)  # the keys do not pickle, their names do


def test_equals_optax_partition_wherever_it_stands():
    model, momentum = _model(), optax.sgd(0.1, momentum=0.9)
    clip = optax.chain(optim.clip_by_global_norm(1.0), optax.scale(-1.0))  # its norm is that of the group
    rules = optim.groups({"b": momentum}, default=clip)
    around = [rules, optax.chain(optax.identity(), rules), optax.inject_hyperparams(lambda: rules)()]
    labels = lambda params: {"a": "clip", "b": {"w": "momentum", "v": "momentum"}, "n": None}
    plain = optax.multi_transform({"momentum": momentum, "clip": clip}, labels)

    @jax.jit
    def run(model):
        results = []
        for tx in (*map(optim.trainable, (plain, *around)), *map(STACKS, around)):
            _, state = tx.update(tp.copy(model), tx.init(model), model)
            results.append(tx.update(tp.copy(model), state, model)[0])
        return results

    want, *others = run(model)
    for got in others:
        assert_same(got, want, identity=False)
    np.testing.assert_allclose(want["a"], -np.sqrt(0.5), rtol=1e-6)


@forms
def test_labels_are_those_of_the_parameters_and_positions_count_from_the_end(form):
    class Calls(eqx.Module):
        w: jax.Array
        v: jax.Array
        head: jax.Array = tp.field(tied_to="v", transform=jnp.transpose)

        def __call__(self, x):
            raise AssertionError("a model of labels that can be called is not called")

    model, one = Calls(jnp.ones(2, jnp.bfloat16), jnp.ones((1, 2)), jnp.ones((2, 1))), optax.sgd(1.0)
    narrow = tp.leaves(lambda path, leaf: leaf.dtype == jnp.bfloat16)
    wide = Calls(jnp.ones(2), model.v, None)  # and not those of gradients, which may be wider
    found = rates(groups({narrow: one}, optax.sgd(100.0), form=form), model, grads=wide)
    assert (found["w"], found["v"]) == (1, 100)
    assert rates(groups({("v", "head"): one, "**": optax.sgd(2.0)}, form=form), model)["v"] == 1.0
    last = groups({"-2": one}, optax.sgd(2.0), "!-1", form)  # positions count from the end where that is frozen
    last.init([jnp.ones(2), jnp.ones(3), jnp.ones(4)])
    assert optim.report(last, [jnp.ones(2), jnp.ones(3), jnp.ones(4)]).groups == {"0": "default", "1": "-2"}


def test_none_is_not_zero_in_groups():
    tx, model = groups({"a": optax.adam(0.1), "**": optax.adam(0.1)}), _model()
    update = jax.jit(tx.update)
    _, state = update(tp.partition(model)[0], tx.init(model), model)
    updates, after = update({"b": {"w": jnp.ones((2, 2))}}, state, model)
    assert (updates["a"], updates["b"]["v"]) == (None, None)
    before, after = (each.runs[0].inner_states["**"].inner_state[0] for each in (state, after))
    assert_same((after.mu["b"]["v"], int(after.count)), (before.mu["b"]["v"], int(before.count) + 1))


def _plus_nothing(x):
    return 1.0 * x


@forms
def test_a_tie_goes_where_its_own_path_goes(form):
    shared = jnp.array([1.0, 2.0])
    model = {"embed": shared, "head": shared, "body": jnp.ones(1)}
    both = ("embed", "head")
    tx = groups({both: optax.sgd(1.0), "**": optax.sgd(2.0)}, None, both, form)
    assert rates(tx, model) == {"embed": 1.0}
    assert rates(tx, model, optim.set_trainable(tx, tx.init(model), model)) == {"embed": 1.0, "body": 2.0}
    tx = groups({path: optax.sgd(2.0) for path in tp.layout(model).paths}, None, None, form)
    assert rates(tx, model) == {"embed": 2.0, "body": 2.0}
    with pytest.raises(ValueError, match=r"names 'head', but 'embed' and 'head' are one array.* or write 'embed'"):
        groups({"head": optax.sgd(1.0)}, optax.sgd(1.0), None, form).init(model)
    parted = {"embed": shared, "head": shared + 1, "body": jnp.ones(1)}
    tied = tp.layout(parted, ties={"head": ("embed", _plus_nothing)})
    tx = groups({"head": optax.sgd(1.0)}, optax.sgd(1.0), tied, form)
    with pytest.raises(ValueError, match=r"'head' names 'embed' by an alias, .*; write 'embed'"):
        tx.init(tp.tie(parted, tied))


@forms
@pytest.mark.parametrize("where", ["body", tp.leaves(lambda path, leaf: path == "body"), lambda m: m["body"]])
def test_a_group_of_frozen_leaves_is_empty_until_they_thaw(where, form):
    model = {"embed": jnp.ones(2), "body": jnp.ones(1)}
    tx = groups({where: optax.sgd(0.5)}, optax.sgd(1.0), "embed", form)
    assert optim.report(tx, model).groups == {"embed": "default"}
    state = optim.set_trainable(tx, tx.init(model), model)
    assert rates(tx, model, state) == {"embed": 1.0, "body": 0.5}


@forms
def test_errors_of_groups(form, without_type_checks):
    one = optax.sgd(1.0)
    for rules, default, match in (
        ({"b.w": one}, None, r"trained, but in no group: 'a', 'b.v'; write optim.groups.*default="),
        ({"bb": one, "**": one}, None, "'bb' selects nothing; nearest: 'b'"),
        ({("a", "nope"): one}, one, "'nope' selects nothing"),
        ({lambda m: m["a"]: one, lambda m: m["b"]: one}, None, "two groups have the same name"),
        ({"default": one}, one, "two groups have the same name"),
    ):
        for use in (lambda tx: tx.init(_model()), lambda tx: optim.report(tx, _model())):
            with pytest.raises(ValueError, match=match):
                use(groups(rules, default, form=form))


def test_report(without_type_checks):
    model = {**_model(), "frozen": jnp.ones((3, 4), jnp.bfloat16)}
    inner = optim.groups({"b.v": optax.sgd(1.0), "**": optax.adam(1.0)})
    rules = optax.chain(optim.clip_by_global_norm(1.0), optim.groups({"a": optax.sgd(1.0), "b": inner}))
    report = optim.report(optim.trainable(rules, ("a", "b")), model)
    assert report.groups == {"a": "a", "b.v": "b / b.v", "b.w": "b / **"}
    assert str(report).splitlines() == [
        "path    shape  dtype     group",
        "a       2      float32   a",
        "b.v     1      float32   b / b.v",
        "b.w     2,2    float32   b / **",
        "frozen  3,4    bfloat16  frozen",
    ]
    flat = optim.trainable(sgd(0.1), form="vector")
    assert str(optim.report(flat, {"a": jnp.ones(2)})).splitlines()[1:] == ["a     2      float32  trained"]


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adjust_does_not_retrace_takes_traced_numbers_and_may_be_donated(dtype):
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(9.0), optim.groups({"w": sgd(0.1)}, sgd(0.1))))
    model, step = {"w": jnp.ones(2, dtype), "v": jnp.ones(1, dtype)}, jax.jit(tx.update, donate_argnums=1)
    single = jnp.float32(0.3)
    for rate in (0.1, 1, np.float64(0.2), single, single, jnp.bfloat16(0.3)):
        step(model, optim.adjust(tx.init(model), learning_rate=rate), model)  # one number for two groups, and again
    assert step._cache_size() == 1
    for each, state in ((tx, tx.init(model)), (sgd(0.1), sgd(0.1).init(model))):
        rated = jax.jit(lambda rate, state=state: optim.adjust(state, learning_rate=rate))(0.5)
        np.testing.assert_allclose(each.update(tp.copy(model), rated, model)[0]["w"].astype(jnp.float32), -0.5)


@forms
def test_adjust_one_group_and_all_what_is_held_and_nested_and_no_parameter_of_that_name(form):
    tx, model = groups({"a": sgd(0.1), "**": sgd(0.25, momentum=0.0)}, form=form), _model()
    state = optim.adjust(tx.init(model), "a", learning_rate=1.0)
    assert rates(tx, model, state) == {"a": 1.0, "b.w": 0.25, "b.v": 0.25}
    state = optim.adjust(optim.adjust(state, learning_rate=3.0), momentum=0.5)  # only one of them knows it
    _, state = tx.update(jax.tree.map(np.ones_like, tp.partition(model)[0]), state, model)
    assert rates(tx, model, state) == {"a": 3.0, "b.w": 4.5, "b.v": 4.5}
    model = {"hyperparams": {"learning_rate": jnp.ones(1)}, "w": jnp.ones(1)}
    outer = optax.inject_hyperparams(lambda scale: optax.chain(sgd(0.1, momentum=0.5), optax.scale(scale)))
    tx = form(outer(1.0), "w")
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    waits = optim.adjust(optim.set_trainable(tx, state, model, "hyperparams"), scale=2.0, learning_rate=0.5)
    rates_of = lambda run: {name: float(value) for name, value in run.hyperparams.items()}
    assert rates_of(waits) == {"scale": 2.0, "learning_rate": 0.5, "momentum": 0.5}
    assert [rates_of(run) for run in (*waits.runs, *waits.held)] == [{"scale": 2.0}] * 2
    both = optim.set_trainable(tx, waits, model)
    assert rates(tx, model, both) == {"hyperparams.learning_rate": 1.0, "w": 1.5}


def test_errors_of_adjust(without_type_checks):
    tx = groups({"a": sgd(0.1), "**": optax.adam(0.1)}).init(_model())
    rate = "learning_rate"
    ints, scheduled = (optim.trainable(sgd(x)).init(_model()) for x in (1, optax.linear_schedule(1.0, 0.0, 10)))
    for state, group, given, error, match in (
        (tx, None, {"rate": 1.0}, ValueError, r"no hyperparameter 'rate' in the state; it has 'learning_rate'.*inj"),
        (tx, "**", {rate: 0.1}, ValueError, r"'learning_rate' in the state of group '\*\*'; it has none"),
        (tx, "c", {rate: 0.1}, ValueError, r"no group 'c' in the state; it has '\*\*', 'a'"),
        (scheduled, None, {rate: 0.1}, ValueError, "'learning_rate' follows a schedule"),
        (tx, None, {rate: jnp.ones(2)}, ValueError, r"expected learning_rate of shape \(\), got shape \(2,\)"),
        (tx, None, {rate: None}, TypeError, "expected a number for learning_rate, got None"),
        (tx, None, {rate: [0.1]}, TypeError, "expected a number for learning_rate, got list"),
        (tx, None, {rate: 1j}, ValueError, "learning_rate is float32, which cannot hold 1j"),
        (ints, None, {rate: 0.5}, ValueError, "learning_rate is int32, which cannot hold 0.5; write a float"),
    ):
        with pytest.raises(error, match=match):
            optim.adjust(state, group, **given)
    assert rates(optim.trainable(sgd(1)), _model(), optim.adjust(ints, learning_rate=2))["a"] == 2.0


def test_over_stacks_by_the_names_of_their_groups():
    model = {"embed": ramp(6, 4), "layers": [{"w": ramp(4, 4, start=i), "b": ramp(4, start=i)} for i in range(3)]}
    wheres = {"embed": "embed", "matrices": tp.leaves(lambda path, leaf: leaf.ndim == 2), "rest": "**"}
    stacks, restructure = tp.stack(model, groups=wheres)
    of = {"embed": optax.sgd(1.0), "matrices": optax.lamb(0.1), "rest": optax.adam(0.1)}
    rules = {"embed": of["embed"], "matrices": optim.per_leaf(of["matrices"])}
    misnamed = optim.groups({"embed": rules["embed"], "matrix": rules["matrices"]}, default=of["rest"])
    plain = optim.groups({wheres[name]: rule for name, rule in of.items()})
    with pytest.raises(ValueError, match="groups embed, matrix, default, got 'embed', 'matrices', 'rest'; write"):
        misnamed.init(stacks)
    with_default, tx = optim.groups(rules, default=of["rest"]), optim.groups(rules | {"rest": of["rest"]})
    assert_same(*(rule.update(tp.copy(stacks), rule.init(stacks), stacks)[0] for rule in (with_default, tx)))

    @jax.jit
    def run(stacks):
        state, both = tx.init(stacks), plain.init(model)
        for _ in range(2):
            updates, state = tx.update(tp.copy(stacks), state, stacks)
            want, both = plain.update(tp.copy(model), both, model)
        return restructure(updates), want

    assert_close(*run(stacks), 1e-6)
    assert_same(pickle.loads(pickle.dumps(tx.init(stacks))), tx.init(stacks))
    for wrong, given in ((tp.stack(model)[0], "none"), (tp.stack(model, groups={"all": "**"})[0], "'all'")):
        match = rf"embed, matrices, rest, got {given}; write tp.stack\(model, groups=.*\(\.\.\.\), form='stacks'\)"
        with pytest.raises(ValueError, match=match):
            tx.init(wrong)
