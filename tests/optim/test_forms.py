"""Optax over a vector and over stacks: equal to Optax leaf by leaf, and refused where it is not."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

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


def _loss(model):
    """Of small curvature, so that rounding does not grow."""
    leaves = [leaf for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf)]
    return sum(jnp.sum(jnp.sin(leaf.astype(jnp.float32) + i)) for i, leaf in enumerate(leaves))


def _groups(of):
    rules = {
        "layers.0.b": optax.adam(0.1),
        "scale": optax.set_to_zero(),
        Layer: of(optax.lamb(0.1)),
        matrices: of(optax.contrib.muon(0.1)),
    }
    doubled = optim.groups(dict.fromkeys(rules, optax.scale(2.0)), default=optax.identity())
    momentum = optax.sgd(optax.linear_schedule(0.9, 0.1, 3), momentum=0.9)
    return optax.chain(clip(0.5), optim.groups(rules, default=of(momentum)), doubled)


EQUAL = {  # within `of`, over stacks, is what looks at each leaf
    "clip and lamb": lambda of: optax.chain(clip(0.5), of(optax.lamb(0.1))),
    "MultiSteps around": lambda of: optax.MultiSteps(of(optax.lamb(0.1)), 2),
    "groups in a chain": _groups,
    "adamw as it is": lambda of: optax.apply_if_finite(optax.adamw(optax.linear_schedule(0.1, 0.01, 3)), 3),
}
BLIND = {  # over a vector, rules of each kind that treats all elements alike
    "global norm": optax.chain(optax.normalize_by_update_norm(), optax.sgd(0.1, momentum=0.9)),
    "further arguments": optax.chain(optax.sgd(0.1), optax.scale_by_backtracking_linesearch(3)),
    "memory of steps": optax.chain(optax.scale_by_lbfgs(memory_size=2), optax.scale(-0.01)),
    "wrapped": optax.MultiSteps(optax.inject_hyperparams(optax.lion, hyperparam_dtype=jnp.float32)(0.1), 2),
}


@pytest.mark.parametrize(
    ("form", "name"), [*[("stacks", name) for name in EQUAL], *[("vector", name) for name in BLIND]]
)
def test_equals_optax_leaf_by_leaf(form, name):
    # A vector has one dtype: what couples leaves would see other digits of a bfloat16 one.
    model = _model() if form == "stacks" else _model() | {"low": _normal(4)}
    layout = tp.layout(model, ties={"decoder": ("embed", jnp.transpose)})
    params, rest = tp.partition(model, layout)

    def after(tx, params):
        def step(carry, _):
            model = tp.combine(carry[0], rest)
            value, grads = tp.value_and_grad(_loss, layout)(model)
            extra = {"value": value, "grad": grads, "value_fn": _loss} if name == "further arguments" else {}
            model, state = optim.step(tx, grads, carry[1], model, **extra)
            return (tp.partition(model, layout)[0], state), None

        return jax.lax.scan(step, (params, tx.init(tp.combine(params, rest))), length=5)[0][0]

    over, leaves = (EQUAL[name](rows), EQUAL[name](lambda tx: tx)) if form == "stacks" else [BLIND[name]] * 2
    txs = optim.trainable(over, layout, form=form), optim.trainable(leaves, layout)
    got, want = jax.jit(lambda params: [after(tx, params) for tx in txs])(params)
    for path, leaf in tp.trainables(want).items():
        here, wide, start = (np.asarray(tp.trainables(tree)[path], np.float32) for tree in (got, want, params))
        assert (np.max(np.abs(wide - start)) > 1e-3) is not (name == "groups in a chain" and path == "scale")  # at rest
        # The products of Muon are added up in another order where XLA optimises: some tens of roundings in five steps.
        np.testing.assert_allclose(here, wide, *[1e-2 if leaf.dtype == jnp.bfloat16 else 1e-5] * 2)


# -- What is refused at init -------------------------------------------------------------------------------------------

pair = lambda *shape: [_normal(*shape, seed=i) for i in range(2)]


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


# -- A vector ----------------------------------------------------------------------------------------------------------


def test_a_rule_that_needs_further_arguments_is_tried_with_examples_and_once():
    calls = []

    def update(updates, state, params=None, *, temperature, **_):
        return jax.tree.map(lambda u: u * temperature, updates), state

    rule = optax.GradientTransformationExtraArgs(lambda params: calls.append(1) or (), update)
    model = {"a": np.ones(2, np.float32)}
    with pytest.raises(ValueError, match=r"it fails there.*temperature.*give examples of them, trial="):
        optim.trainable(rule, form="vector").init(model)
    tx = optim.trainable(rule, trial={"temperature": 2.0}, form="vector")
    state = tx.init(model)
    tried = len(calls)
    np.testing.assert_array_equal(tx.update(tp.copy(model), state, model, temperature=3.0)[0]["a"], 3.0)
    tx.init(model)
    assert len(calls) == tried + 1
