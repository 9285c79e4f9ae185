"""Plain Optax that changes updates: clipping by the global norm, and a number for each parameter."""

import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, ZOO, Norm, assert_close, assert_same, first_devices, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
ALL_FORMS = optim.trainable, VECTOR, STACKS
forms = pytest.mark.parametrize("form", ALL_FORMS)

# -- Clipping ----------------------------------------------------------------------------------------------------------


def clipped(grads, max_norm=1.0, state=None):
    tx = optim.clip_by_global_norm(max_norm)
    return tx.update(grads, tx.init(grads) if state is None else state)


def _norm_of(tree):
    return np.sqrt(sum(np.sum(np.abs(np.asarray(leaf).astype(np.complex128)) ** 2) for leaf in jax.tree.leaves(tree)))


def test_clips_any_mix_of_dtypes_at_any_traced_limit_and_again_and_again():
    names = ("complex", "bf16 with f32", "same array twice", "empty leaves")
    trees = [tp.partition(ZOO[name].make())[0] for name in names] + [{"narrow": np.full(1000, 300, np.float16)}]
    trees += [{"w": np.ones(2, jnp.float8_e4m3fn)}, {"zero": np.zeros(2, np.float32)}]
    run = jax.jit(lambda trees, limit: [clipped(tree, limit) for tree in trees])
    for limit in (0.1, 1e6, np.inf):
        for (below, state), tree in zip(run(trees, limit), trees, strict=True):
            norm = _norm_of(tree)
            np.testing.assert_allclose(state.norm, norm, rtol=1e-5)
            assert int(state.clipped) == (norm > limit)
            if norm <= limit:
                assert_same(below, jax.tree.map(jnp.asarray, tree), identity=False)  # bit for bit
            else:
                np.testing.assert_allclose(_norm_of(below), limit, rtol=0.1 if "w" in tree else 1e-2)
    assert_same(clipped(trees[0], 1e39)[0], trees[0])
    slope = jax.grad(lambda x: clipped({"a": x}, np.inf)[0]["a"].sum())
    once, state = clipped({"a": np.arange(1, 9, dtype=np.float32), "b": np.full((3, 3), -0.1, np.float32)}, 0.7)
    again = lambda once: jax.lax.scan(lambda grads, _: (clipped(grads, 0.7, state)[0], None), once, length=10_000)[0]
    slopes, after = jax.jit(lambda once: (slope(jnp.zeros(2)), again(once)))(once)
    np.testing.assert_array_equal(slopes, 1.0)
    assert_close(after, once, 1e-6)


@pytest.mark.parametrize("compiled", [lambda f: f, jax.jit], ids=["outside", "jit"])
def test_a_limit_that_comes_as_an_array_may_reach_zero_and_be_adjusted(compiled):
    falling, make = optax.linear_schedule(1.0, 0.0, 2), optax.inject_hyperparams(optim.clip_by_global_norm)
    grads, update = {"w": jnp.array([3.0, 4.0]), "none": jnp.zeros(1)}, compiled(make(max_norm=falling).update)
    state, fixed = make(max_norm=falling).init(grads), make(max_norm=1.0)
    for limit in (1.0, 0.5, 0.0, 0.0):
        below, state = update(grads, state)
        np.testing.assert_allclose(below["w"], limit * np.array([0.6, 0.8]), 1e-6)
    update, begun = compiled(fixed.update), fixed.init(grads)
    for limit, scale in ((1.0, 0.2), (100.0, 1), (np.inf, 1), (0.0, 0), (-1.0, 0)):
        below, _ = update(grads, optim.adjust(begun, max_norm=limit))
        np.testing.assert_allclose(below["w"], scale * np.array([3.0, 4.0]), 1e-6)


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_is_seen(bad):
    fine = {"a": jnp.ones(2), "b": jnp.ones(1)}
    below, state = clipped(fine | {"a": jnp.array([1.0, bad])})
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(below))
    assert not np.isfinite(state.norm)
    assert (int(state.clipped), int(state.nonfinite)) == (0, 1)
    below, state = clipped(fine, state=state)
    assert (int(state.clipped), int(state.nonfinite)) == (1, 1)
    assert float(tp.global_norm(below)) == pytest.approx(1.0)


def test_within_each_parameter_counts_once_and_before_the_model_all_that_is_given():
    shared = jnp.array([1.0, 2.0])
    model, halves = {"a": shared, "b": shared}, {"a": jnp.array([1.0, 2.0]), "b": jnp.array([1.0, 2.0])}
    within = optim.trainable(optim.clip_by_global_norm(1.0))
    _, state = within.update(halves, within.init(model), model)
    np.testing.assert_allclose(state.clip.norm, np.sqrt(20.0), rtol=1e-6)  # not sqrt(10)
    model, grads = Norm(jnp.ones(1), jnp.ones(1)), Norm(jnp.full(1, 3.0), jnp.full(1, 100.0))
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    updates, _ = tx.update(grads, tx.init(model), model)
    np.testing.assert_allclose(updates.scale, -1.0, rtol=1e-6)
    assert updates.mean is None
    before = optax.chain(optim.clip_by_global_norm(1.0), optim.trainable(optax.sgd(1.0)))
    updates, state = before.update(grads, before.init(model), model)
    np.testing.assert_allclose([updates.scale[0], state[0].norm], [-3 / np.sqrt(10009), np.sqrt(10009)], rtol=1e-6)


def test_apply_if_finite_holds_all_other_state_and_that_of_a_clip_is_of_the_run():
    model = {"a": jnp.ones(2), "b": jnp.ones(1)}
    tx = optim.trainable(optax.apply_if_finite(optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1)), 5))
    update = jax.jit(tx.update)
    _, state = update(model, tx.init(model), model)
    updates, after = update(model | {"a": jnp.array([jnp.inf, 1.0])}, state, model)
    np.testing.assert_array_equal(updates["a"], 0)
    assert_same(after.runs[0].inner_state, state.runs[0].inner_state)
    tx = optim.trainable(optim.clip_by_global_norm(0.5), "a")
    state = tx.init(model)
    for choice, steps in (("a", 3), ("b", 1), (None, 1)):
        state = optim.set_trainable(tx, state, model, choice)
        for _ in range(steps):
            _, state = tx.update(tp.copy(model), state, model)
    assert (float(state.clip.norm), int(state.clip.clipped)) == (pytest.approx(np.sqrt(3)), 5)


@pytest.mark.parametrize("spread", [1.0, 1e25])
def test_across_devices(spread):
    mesh = Mesh(np.array(first_devices(4)), ("data",))
    grads = {"w": jnp.arange(1.0, 9.0) * spread}
    tx = optim.clip_by_global_norm(1.0, axis_name="data")

    def local(grads):
        clipped, state = tx.update(tp.copy(grads), tx.init(grads), grads)
        return clipped, state.norm

    spec = PartitionSpec("data")
    below, norm = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec())))(grads)
    np.testing.assert_allclose(norm, np.sqrt(204.0) * spread, rtol=1e-6)
    np.testing.assert_allclose(below["w"], np.arange(1.0, 9.0) / np.sqrt(204.0), rtol=1e-6)


def test_errors_of_clip(without_type_checks):
    for bad, error, match in (
        (optax.constant_schedule(1.0), TypeError, "max_norm must be a number, got function; for a schedule write"),
        (-1, ValueError, "max_norm must be positive, got -1"),
        (0.0, ValueError, "max_norm must be positive, got 0"),
        (float("nan"), ValueError, "max_norm must be positive, got nan"),
        ("1", TypeError, "max_norm must be a number, got"),
        (None, TypeError, "max_norm must be a number, got"),
    ):
        with pytest.raises(error, match=match):
            optim.clip_by_global_norm(bad)


# -- Factors -----------------------------------------------------------------------------------------------------------


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
    in_steps = optax.MultiSteps(of_all, 1)
    inject = optax.inject_hyperparams(lambda half: optax.chain(_rule(), optim.scaled(FACTORS | {"head": half})))
    return {
        "in groups": optim.trainable(optim.groups({"layers": of_all}, default=in_steps)),
        "stacks in groups": optim.trainable(optim.groups({"layers": of_rows}, default=of_all), form="stacks"),
        "a hyperparameter": optim.trainable(inject(0.5)),
        "a vector": optim.trainable(of_all, form="vector"),
    }


@pytest.mark.parametrize("way", _ways())
def test_equals_a_group_for_each_factor(way):
    fills = way == "a vector"
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


@forms
def test_no_constant_and_no_index_for_each_element(form):
    model = {name: jnp.ones(2**13) for name in "abcd"}
    tx = form(optax.chain(optax.scale(-1.0), optim.scaled({"a": 0.5, "c": jnp.float32(2)})))
    lowered = jax.jit(tx.update).lower(model, tx.init(model), model)
    assert "gather" not in lowered.as_text()
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert len(text) < 60_000  # of constants each element would be written out


def test_rows_that_wait_and_ties_that_a_layout_was_given():
    model = {"a": jnp.ones(2), "b": jnp.ones(2), "c": jnp.ones(2)}
    rule = optax.chain(optim.per_leaf(optax.sgd(1.0, momentum=0.5)), optim.scaled({"a": 0.5, "c": 0.25}))
    tx, grads = optim.trainable(rule, tp.layout(model, ties={"c": "b"}), form="stacks"), {"a": ramp(2), "b": ramp(2)}
    updates, _ = tx.update(grads, tx.init(model), model, active={"a": jnp.array(False)})
    assert_same(updates, {"a": -jnp.zeros(2)} | dict.fromkeys("bc", -0.25 * ramp(2)), identity=False)


def test_beside_a_line_search_whose_loss_trains_by_itself():
    model, inner = {"a": jnp.ones(2), "b": jnp.ones(2)}, optim.scaled({"c": 0.5})

    def loss(model):
        params = {"c": model["a"] + model["b"], "d": np.ones(2, np.float32)}
        return jnp.sum(params["c"] ** 2 + inner.update(params, inner.init(params))[0]["c"])

    rule = optax.chain(optax.scale(-0.1), optim.scaled({"a": 0.5}), optax.scale_by_backtracking_linesearch(10))

    @jax.jit
    def run():
        value, grads = tp.value_and_grad(loss)(model)
        extra = {"value": value, "grad": grads, "value_fn": loss}
        after = [tx.update(grads, tx.init(model), model, **extra)[0] for tx in (form(rule) for form in ALL_FORMS)]
        return after, value, [loss(optim.apply_updates(model, each)) for each in after]

    after, before, values = run()
    for updates in after:
        np.testing.assert_allclose(updates["a"], updates["b"] / 2)
    assert max(values) < before


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
def test_errors_of_factors(form, without_type_checks):
    model = {"encoder": jnp.ones(2), "body": jnp.ones(1), "frozen": jnp.ones(1)}
    for factors, error, match in (
        ({"encodr": 0.1}, ValueError, "'encodr' selects nothing; nearest: 'encoder'"),
        ({"**": 0.1, "body": 1}, ValueError, r"'body' comes too late: '\*\*' before it selects"),
        ({"body": optax.linear_schedule(1, 0, 9)}, TypeError, r"got function; .* optim.groups\(\{'body': optax.sc"),
        ({"body": True}, TypeError, "the factor of 'body' must be a real number, got bool"),
        ({"body": 1j}, TypeError, "must be a real number, got complex"),
        ({"body": None}, TypeError, "must be a real number, got None"),
        ({"body": jnp.ones(2)}, ValueError, r"factor of 'body' must be one number, got float32\[2\]; write an entry"),
        ([0.1], TypeError, r"expected a dictionary \{where: factor\}, got list"),
    ):
        with pytest.raises(error, match=match):
            form(optim.scaled(factors), "!frozen").init(model)
    match = r"inside optim.per_leaf no leaf has one; write .*per_leaf\(...\), optim.scaled"
    with pytest.raises(ValueError, match=match):
        form(optim.per_leaf(optim.scaled({"body": 2.0}))).init(model)
