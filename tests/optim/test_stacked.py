"""Optax over stacks: equal to Optax leaf by leaf, and refused where it is not."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from ..zoo import assert_close, assert_same

pytestmark = pytest.mark.usefixtures("standard_promotion")


class Layer(eqx.Module):
    w: jax.Array
    b: jax.Array
    mean: jax.Array = tp.field(trainable=False)


def _normal(*shape, seed=0):
    return jax.device_put(np.asarray(np.random.default_rng(seed).normal(size=shape), np.float32))


def _net():
    layers = [Layer(_normal(4, 4, seed=i), _normal(4, seed=9 + i), _normal(4)) for i in range(3)]
    return {"layers": layers, "out": _normal(4, seed=30)}


def _model():
    embed, low = _normal(4, 6, seed=20), jax.device_put(np.asarray(_normal(4)).astype(jnp.bfloat16))
    return _net() | {"decoder": embed.T, "embed": embed, "head": embed, "low": low, "scale": _normal(), "steps": 3}


LAYOUT = tp.layout(_model(), ties={"decoder": ("embed", jnp.transpose)})
rows, clip = optim.per_leaf, optim.clip_by_global_norm
matrices = tp.leaves(lambda path, leaf: leaf.ndim == 2)
by_rank = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)


def _loss(model):
    """Of small curvature, so that rounding does not grow."""
    leaves = [leaf for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf)]
    return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32) + i)) for i, leaf in enumerate(leaves))


def _groups(of):
    rules = {"layers.0.b": optax.adam(0.1), Layer: of(optax.lamb(0.1)), matrices: of(optax.contrib.muon(0.1))}
    doubled = optim.groups(dict.fromkeys(rules, optax.scale(2.0)), default=optax.identity())
    momentum = optax.sgd(optax.linear_schedule(0.9, 0.1, 3), momentum=0.9)
    return optax.chain(clip(0.5), optim.groups(rules, default=of(momentum)), doubled)


EQUAL = {  # within `of`, over stacks, is what looks at each leaf
    "clip and lamb": lambda of: optax.chain(clip(0.5), of(optax.lamb(0.1))),
    "adamw as it is": lambda of: optax.adamw(optax.linear_schedule(0.1, 0.01, 3), weight_decay=0.5),
    "injected": lambda of: optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(0.1),
    "MultiSteps around": lambda of: optax.MultiSteps(of(optax.lamb(0.1)), 2),
    "apply_if_finite around": lambda of: optax.apply_if_finite(of(optax.lion(0.1)), 3),
    "groups in a chain": _groups,
    "layers at rest": lambda of: optim.groups({"layers": optax.set_to_zero()}, default=of(optax.novograd(0.1))),
}


@pytest.mark.parametrize("name", EQUAL)
def test_equals_optax_leaf_by_leaf(name):
    params, rest = tp.partition(_model(), LAYOUT)

    def after(tx, params):
        def step(carry, _):
            model = tp.combine(carry[0], rest)
            model, state = optim.step(tx, tp.grad(_loss, LAYOUT)(model), carry[1], model)
            return (tp.partition(model, LAYOUT)[0], state), None

        return jax.lax.scan(step, (params, tx.init(tp.combine(params, rest))), length=5)[0][0]

    txs = optim.trainable(EQUAL[name](rows), LAYOUT, form="stacks"), optim.trainable(EQUAL[name](lambda tx: tx), LAYOUT)
    got, want = jax.jit(lambda params: [after(tx, params) for tx in txs])(params)
    for path, leaf in tp.trainables(want).items():
        here, wide, start = (np.asarray(tp.trainables(tree)[path], np.float32) for tree in (got, want, params))
        assert (np.max(np.abs(wide - start)) > 1e-3) is not (name == "layers at rest" and "layers" in path)
        # The products of Muon are added up in another order where XLA optimises: some tens of roundings in five steps.
        np.testing.assert_allclose(here, wide, *[1e-2 if leaf.dtype == jnp.bfloat16 else 1e-5] * 2)


def test_plain_optax_and_averages_of_stacks_are_those_of_the_leaves():
    stacks, restructure = tp.stack(_model(), LAYOUT)
    tx, leaves = optax.chain(clip(0.5), optax.adamw(0.1)), tp.trainables(_model(), LAYOUT)

    @jax.jit
    def run(params):
        state, ema, average = tx.init(params), tp.Ema(params, 0.5, debias=True), params
        for _ in range(2):
            updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
            params = optax.apply_updates(params, updates)
            ema, average = ema.update(params), tp.ema(average, params, decay=0.5)
        return [params, ema.average, average, tp.copy(updates)], tp.global_norm(params)

    (got, norm), (want, whole) = run(stacks), run(leaves)
    for ours, theirs in zip(got, want, strict=True):
        assert_close(tp.trainables(restructure(ours), LAYOUT), theirs, 1e-2)
        assert_close(tp.trainables(restructure(ours), LAYOUT)["embed"], theirs["embed"], 1e-6)
    np.testing.assert_allclose(norm, whole, 1e-6)


# -- What is refused at init -------------------------------------------------------------------------------------------

AWARE = {
    "muon": optax.contrib.muon(0.1),
    "adafactor": optax.adafactor(0.1),
    "adafactor without norms": optax.adafactor(
        0.1, min_dim_size_to_factor=2, multiply_by_parameter_scale=False, clipping_threshold=None
    ),
    "lamb": optax.lamb(0.1),
    "lars": optax.lars(0.1),
    "a mask by rank": optax.adamw(0.1, mask=by_rank),
    "clip_by_block_rms": optax.clip_by_block_rms(1.0),
    "noise": optax.add_noise(0.1, 0.1, 0),
    "in a group by shape": optim.groups({matrices: optax.lamb(0.1)}, default=optax.sgd(0.1)),
    "in a group of some shapes": optim.groups(
        {tp.leaves(lambda path, leaf: leaf.size == 6): optax.chain(clip(1.0), optax.lamb(0.1))}, default=optax.sgd(0.1)
    ),
}
pair = lambda *shape: [_normal(*shape, seed=i) for i in range(2)]
MANY = [*pair(3), *pair(2, 3), *pair(2, 3, 4), _normal(7), _normal(7, 7)]


@pytest.mark.parametrize("name", AWARE)
def test_refuses_what_looks_at_a_leaf_by_itself(name):
    match = r"inside optim.per_leaf: optax.chain\(optim.clip"
    with pytest.raises(ValueError, match=match):
        optim.trainable(AWARE[name], form="stacks").init(MANY)
    for model in [pair(3), [pair(3), _normal()]] if name == "muon" else []:
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(optim.trainable(AWARE[name], form="stacks").init, model)


def test_a_rule_is_tried_once_for_each_model():
    traces, tried = [], [0]
    tx = optim.trainable(optax.stateless(lambda updates, params: traces.append(1) or updates), form="stacks")
    for model in ([*pair(3), _normal(2)], pair(7), _normal(2, 3), [_normal(4, 4)], pair(2, 2)):
        for init in (tx.init, tx.init, functools.partial(jax.eval_shape, tx.init)):
            init(model)
            tried.append(len(traces))
    assert [bool(new) for new in np.diff(tried)] == [True, False, False] * 5


def test_groups_over_stacks_are_one_division():
    one = optax.sgd(0.1)
    for rules in (
        optax.chain(optim.groups({"layers": one}, one), optim.groups({"embed": one}, one)),
        optim.groups({"layers": optim.groups({"**": one})}, one),
    ):
        with pytest.raises(ValueError, match=r"stacks for one optim\.groups, but there are"):
            optim.trainable(rules, form="stacks").init(_model())
    tall = lambda model: [layer.w for layer in model["layers"] if layer.w.shape[0] > 2]
    tx = optim.trainable(optim.groups({"embed": one, tall: one}, one), LAYOUT, form="stacks")
    report = optim.report(tx, _model(), tx.init(_model()))
    assert {path for path, name in report.groups.items() if "lambda" in name} == {f"layers.{i}.w" for i in range(3)}
    assert report.groups["embed"] == "embed"


def test_an_example_of_further_arguments_for_the_trial():
    heated = lambda updates, state, params=None, *, heat, **_: (jax.tree.map(lambda u: u * heat, updates), state)
    rule, net = optax.GradientTransformationExtraArgs(lambda params: (), heated), _net()
    with pytest.raises(ValueError, match=r"it fails there.*heat.*give examples of them, trial="):
        optim.trainable(rule, form="stacks").init(net)
    tx = optim.trainable(rule, trial={"heat": 2.0}, form="stacks")
    assert_same(tx.update(tp.copy(net), tx.init(net), net, heat=3.0)[0]["out"], np.float32(3) * np.asarray(net["out"]))


@pytest.mark.parametrize("way", [{"grads": {"b": None}}, {"active": {"b": False}}])
def test_rows_wait_beside_a_group_without_parameters(way):
    model = {"a": jnp.ones((2, 2)), "b": jnp.ones((2, 2)), "c": jnp.ones(3)}
    both = optim.groups({"[ab]": rows(optax.adam(0.1))}, default=rows(optax.adam(0.1)))
    tx = optim.trainable(both, "[ab]", form="stacks")
    extra = {"active": way["active"]} if "active" in way else {}
    new, state = optim.step(tx, model | way.get("grads", {}), tx.init(model), model, **extra)
    np.testing.assert_allclose([new["a"][0, 0], new["b"][0, 0]], [0.9, 1.0], rtol=1e-5)
    again = optim.step(tx, model, optim.set_trainable(tx, state, new), new)[0]  # the group has a parameter now
    assert float(again["c"][0]) < 1
