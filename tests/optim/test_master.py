"""Wide copies of narrow parameters: each parameter is its copy rounded, and the copies train as Optax trains them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving, sharding

from ..zoo import STACKS, VECTOR, assert_close, assert_same, first_devices, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
LOW, HALF = jnp.bfloat16, jnp.float16


def _model():
    low = {"a": ramp(2, 2, dtype=LOW), "b": ramp(2, 2, dtype=LOW, start=1e-3)}
    return low | {"c": ramp(2, 2), "h": ramp(2, 2, dtype=HALF), "n": 7}


def _grads(model, time=0):
    """In single precision, with steps of any size among them."""
    grow = lambda path, leaf: 10.0 ** (time % 3) * jnp.sin(jnp.arange(leaf.size) + time).reshape(leaf.shape)
    return tp.maptrainable(grow, model, with_path=True)


def _wide(model):
    return tp.maptrainable(lambda leaf: leaf.astype(jnp.float32), model)


def _rounded(wide, like):
    return tp.maptrainable(lambda leaf, own: leaf.astype(own.dtype), wide, like, tied="first")


def _rule():
    return optax.chain(optax.add_decayed_weights(0.1), optax.sgd(0.5, momentum=0.9))


def _ways():
    """The form, the rule with `optim.master` or without, and whether a leaf is frozen and thawed meanwhile."""
    plain = lambda of: of(_rule())
    in_groups = lambda of: optim.groups({"[ac]": optim.per_leaf(of(_rule()))}, default=of(optim.per_leaf(_rule())))
    scaled = optax.chain(_rule(), optim.scaled({"b": 0.5}))
    clipped = lambda of: optax.chain(optim.clip_by_global_norm(1e9), of(scaled))
    return {
        "tree": (optim.trainable, clipped, False),
        "vectors": (VECTOR, plain, True),
        "stacks in groups": (STACKS, in_groups, False),
    }


@pytest.mark.parametrize("way", _ways())
def test_equals_optax_over_wide_parameters_rounded(way):
    form, rule, is_frozen_meanwhile = _ways()[way]
    tx, plain = form(rule(optim.master)), form(rule(lambda tx: tx))
    model, wide = _model(), _wide(_model())
    state, of_wide = tx.init(model), plain.init(wide)
    for time in range(4):
        if is_frozen_meanwhile and time in (1, 2):
            trained = "!a" if time == 1 else None
            state = optim.set_trainable(tx, state, model, trained)
            of_wide = optim.set_trainable(plain, of_wide, wide, trained)
        grads = _grads(model, time)
        if way == "tree" and time == 3:
            del grads["h"]
        model, state = optim.step(tx, grads, state, model)
        wide, of_wide = optim.step(plain, grads, of_wide, wide)
        assert_same(model, _rounded(wide, model))
    assert {name: leaf.dtype.name for name, leaf in tp.trainables(model).items()} == DTYPES


DTYPES = {"a": "bfloat16", "b": "bfloat16", "c": "float32", "h": "float16"}


def test_what_is_changed_from_outside_begins_anew():
    model = _model()
    tx = optim.trainable(optim.master(optax.sgd(1e-3)), form="vector")
    once, state = optim.step(tx, _grads(model), tx.init(model), model)
    changed = tp.replace(once, {"a": once["a"].at[0, 1].set(5.0), "b": once["b"].at[0].set(jnp.inf)})
    zero = jax.tree.map(jnp.zeros_like, _grads(model))
    twice, after = optim.step(tx, zero, state, changed)
    assert_same(twice, changed)
    back, _ = optim.step(tx, tp.maptrainable(lambda leaf: -leaf, _grads(model)), after, twice)
    keep, _ = optim.step(tx, tp.maptrainable(lambda leaf: -leaf, _grads(model)), state, once)
    at = np.array([[True, False], [True, True]])
    np.testing.assert_array_equal(back["a"][at], keep["a"][at])
    np.testing.assert_array_equal(back["a"][at], model["a"][at])  # nothing was lost on the way
    assert back["a"][0, 1] == LOW(5.0 + 1e-3 * np.sin(1))
    np.testing.assert_array_equal(np.isinf(back["b"]), [[True, True], [False, False]])


def test_with_eqx_apply_updates_while_a_step_is_less_than_a_factor_of_two():
    model = {"w": jnp.asarray([1.0, 1.0, -0.5], LOW)}
    tx = optim.trainable(optim.master(optax.sgd(1.0)))
    state, wide = tx.init(model), _wide(model)
    for step in ([0.3, 0.01, 0.1], [0.2, 1e-3, -0.2]):
        grads = {"w": jnp.asarray(step)}
        updates, state = tx.update(grads, state, model)
        assert updates["w"].dtype == LOW
        model = eqx.apply_updates(model, updates)
        wide = {"w": wide["w"] - grads["w"]}
        assert_same(model, _rounded(wide, model))
    far = {"w": jnp.asarray([0.5 - 1e-5, 0.0, 0.0])}  # to 1e-5, which no sum of narrow numbers gives
    updates, after = tx.update(far, state, model)
    summed, stepped = optim.apply_updates(model, updates), optim.step(tx, far, state, model)[0]
    assert (summed["w"][0], stepped["w"][0]) == (0.0, LOW(after.runs[0].copies["w"][0]))
    again, _ = optim.step(tx, {"w": jnp.zeros(3)}, after, summed)
    assert_same(again, summed)


class _Tied(eqx.Module):
    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)
    one: jax.Array
    two: jax.Array


def test_ties_are_kept_and_states_saved_and_moved(tmp_path):
    embed, shared = ramp(2, 3, dtype=LOW), ramp(3, dtype=LOW)
    model = _Tied(embed, embed.T, shared, shared)
    tx = optim.trainable(optim.master(optax.sgd(1e-3)), form="vector")
    state = tx.init(model)
    loss = lambda m: jnp.sum(jnp.sin(_wide(m).embed @ _wide(m).head)) + jnp.sum(_wide(m).one * _wide(m).two)
    step = jax.jit(lambda model, state: optim.step(tx, tp.grad(loss, state.layout)(model), state, model))
    for _ in range(3):
        model, state = step(model, state)
    np.testing.assert_array_equal(model.head, model.embed.T)
    np.testing.assert_array_equal(model.one, model.two)
    saving.save(tmp_path / "run", {"model": model, "state": state})
    loaded = saving.load(tmp_path / "run", {"model": model, "state": state})
    assert_same(loaded["state"], state)
    other = optim.trainable(optim.master(optax.sgd(1e-3)))
    moved = saving.plan(model, model).state(state, other.init(tp.tie(model, state.layout)))
    grads = tp.grad(loss, state.layout)(model)
    assert_same(optim.step(other, grads, moved, model)[0], optim.step(tx, grads, state, model)[0])


def test_over_devices_copies_lie_as_their_parameters():
    mesh = jax.make_mesh((2,), ("data",), devices=first_devices(2))
    model = {"a": ramp(8, 2, dtype=LOW), "b": ramp(8, 2, dtype=LOW, start=1e-3), "c": ramp(8)}
    loss = lambda m, x: jnp.mean((x @ (_wide(m)["a"] + _wide(m)["b"])) ** 2) + jnp.sum(m["c"] ** 2)
    rule, plan = optim.master(optax.sgd(0.5)), sharding.plan(model, mesh, {"**": "split"}, form="stacks")
    init, step = sharding.make_step(loss, rule, plan)
    params, state = init(model)
    tx = optim.trainable(rule)
    alone, own = model, tx.init(model)
    for time in range(2):
        x = jnp.sin(jnp.arange(32.0).reshape(4, 8) + time)
        params, state, _ = step(params, state, x)
        alone, own = optim.step(tx, tp.grad(loss)(alone, x), own, alone)
    for copy, leaf in zip(jax.tree.leaves(state.rule.copies), jax.tree.leaves(params), strict=False):
        assert not leaf.sharding.is_fully_replicated
        assert copy.sharding.is_equivalent_to(leaf.sharding, leaf.ndim)
        np.testing.assert_array_equal(copy.astype(LOW), leaf)  # large steps among them
    assert_close(plan.model(params), alone, 2**-7)


def test_plain_optax_shares_no_buffer_and_leaves_out_what_has_no_gradient():
    tx = optim.master(optax.contrib.schedule_free(optax.sgd(1e-3), 1e-3))  # keeps parameters
    params = {"a": jnp.ones(3), "b": jnp.ones(3, LOW), "c": jnp.ones(3, LOW)}
    state = tx.init(params)
    leaves = [*jax.tree.leaves(params), *jax.tree.leaves(state)]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)
    tx = optim.master(optax.sgd(0.1))
    state = tx.init(params)
    grads = {"a": jnp.ones(3), "b": None, "c": jnp.ones(3)}
    updates, after = tx.update(grads, state, params)
    assert (updates["b"], updates["c"].dtype) == (None, LOW)
    assert_same(after.copies, {"a": None, "b": jnp.ones(3), "c": jnp.ones(3) - jnp.float32(0.1)}, identity=False)
    masked = optax.masked(tx, {"a": True, "b": False, "c": True})
    assert_same(masked.update(tp.copy(params), masked.init(params), params)[0]["b"], params["b"])


# -- Where a narrow parameter trains without it ------------------------------------------------------------------------


def test_report_and_summary_name_narrow_parameters():
    model = _model() | {"frozen": jnp.ones(1, LOW)}
    tx = optim.trainable(optim.groups({"a": optim.master(optax.sgd(1.0))}, default=optax.sgd(1.0)), "!frozen")
    lines = str(optim.report(tx, model)).splitlines()
    assert [line.split()[-1] for line in lines] == ["copy", "float32", "none", "default", "frozen", "none"]
    lines = str(optim.report(tx, model, tx.init(model))).splitlines()
    assert [line.split()[-1] for line in lines] == ["copy", "float32", "none", "0", "frozen", "none"]
    flat = optim.trainable(optim.master(optax.sgd(1.0)), form="vector")
    assert str(optim.report(flat, _model())).split().count("float32") == 4  # of `c` the dtype
    assert "copy" not in str(optim.report(flat, {"a": jnp.ones(1)}))
    narrow = "narrow     12 trained in bfloat16, float16, where small steps round to zero; optim.master and tp.Ema"
    assert narrow in str(tp.summary(model, "!frozen"))
    assert "narrow" not in str(tp.summary(model, "c"))


def test_errors(without_type_checks):
    for call, error, match in (
        (lambda: optim.master(optax.sgd(1.0), jnp.int32), TypeError, r"expected a floating dtype, got"),
        (lambda: optim.master(optax.sgd(1.0), jnp.complex64), TypeError, "copies of complex parameters are complex"),
        (lambda: optim.master(optax.sgd(1.0), jnp.float64), ValueError, "float64 need 64 bits: call jax.config.update"),
        (lambda: optim.master(optim.trainable(optax.sgd(1.0))), ValueError, "over models, outermost"),
        (lambda: optim.master(optax.sgd), TypeError, "call it with its arguments"),
    ):
        with pytest.raises(error, match=match):
            call()
    tx, params = optim.master(optax.sgd(1.0)), {"a": jnp.ones(1, LOW)}
    with pytest.raises(ValueError, match=r"write tx.update\(grads, state, params\)"):
        tx.update(params, tx.init(params))


@pytest.mark.parametrize(
    "chained",
    [
        optax.chain(optim.master(optax.adam(1e-4)), optax.clip(1e-3)),
        optax.chain(optax.clip(1.0), optax.chain(optim.master(optax.scale_by_adam()), optax.scale(-1e-4))),
        optim.groups({"w": optax.chain(optim.master(optax.sgd(0.1)), optax.scale(0.5))}, default=optax.sgd(0.1)),
    ],
    ids=["clip", "nested", "group"],
)
def test_what_stands_behind_it_in_a_chain_is_refused(chained):
    model = {"w": ramp(2, dtype=jnp.bfloat16), "b": ramp(1)}
    with pytest.raises(ValueError, match=r"optim.master must be last in a chain.* optim.master\(optax.chain\("):
        optim.trainable(chained).init(model)
    optim.trainable(optax.chain(optax.clip(1.0), optim.master(optax.chain(optax.adam(0.1))))).init(model)
