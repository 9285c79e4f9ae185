"""A rule over each leaf by itself: over stacks equal to Optax over the leaves, and refused where it couples them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import optim

from ..zoo import VECTOR, assert_close, assert_same, first_devices, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHAPES = {"float32[8,6]": (3, 8, 6), "float32[5]": (2, 5), "float32[]": (2,)}


def _stacks(*without):
    rng = np.random.default_rng(0)
    arrays = {k: jax.device_put(rng.normal(size=s).astype(np.float32)) for k, s in SHAPES.items()}
    return {key: array for key, array in arrays.items() if key not in without}


def _leaves(stacks):
    return {key: list(stack) for key, stack in stacks.items()}


def _loss(tree):
    return sum(jnp.sum(jnp.sin(3 * leaf) + leaf**2) for leaf in jax.tree.leaves(tree))


def _run(tx, params, steps=3):
    """The parameters after each of some steps, in one program."""

    def step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(_loss)(params)
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, value=value)
        params = optax.apply_updates(params, updates)
        return (params, state), params

    return jax.lax.scan(step, (params, tx.init(params)), length=steps)[1]


_labels = lambda params: jax.tree.map(lambda x: "vector" if x.ndim < 2 else "matrix", params)
RULES = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1, warmup_steps=2),
    "MultiSteps": optax.MultiSteps(optax.novograd(0.1), 2),
    "by block": optax.chain(
        optax.centralize(), optax.adaptive_grad_clip(0.1), optax.sgd(0.1), optax.clip_by_block_rms(0.01)
    ),
    "labels by rank": optax.partition({"vector": optax.sgd(0.1), "matrix": optax.novograd(0.1)}, _labels),
    "inject_hyperparams": optax.inject_hyperparams(optax.lamb)(optax.linear_schedule(0.1, 0.01, 3)),
    "reduce_on_plateau": optax.chain(optax.novograd(0.1), optax.contrib.reduce_on_plateau(patience=1, rtol=0.9)),
}


@pytest.mark.parametrize("name", RULES)
def test_equals_optax_over_the_leaves(name):
    stacks, rule = _stacks(), RULES[name]
    plain = rule.gradient_transformation() if isinstance(rule, optax.MultiSteps) else rule
    got, want = jax.jit(lambda stacks: (_run(optim.per_leaf(rule), stacks), _run(plain, _leaves(stacks))))(stacks)
    for key, stack in got.items():
        rows = np.stack(want[key], 1)
        assert np.max(np.abs(rows[-1] - stacks[key])) > 1e-3
        np.testing.assert_allclose(stack, rows, rtol=1e-6, atol=1e-6)


# -- What it refuses ---------------------------------------------------------------------------------------------------

_mask = {key: len(shape) > 2 for key, shape in SHAPES.items()}
REFUSED = {
    "a model": (lambda: optim.trainable(optax.sgd(0.1)), "use one transformation over models, outermost"),
    "a model within": (
        lambda: optax.chain(optim.trainable(optax.sgd(0.1), form="vector")),
        "use one transformation over models",
    ),
    "groups": (
        lambda: optim.groups({"**": optax.sgd(0.1)}),
        r"optim.groups selects by path.*write optim.groups\({'layers.0': opt",
    ),
    "a mask": (lambda: optax.adamw(0.1, mask=_mask), r"init fails there \(.*mask=lambda params: jax.tree.map\("),
    "labels": (
        lambda: optax.partition({True: optax.sgd(0.1), False: optax.adam(0.1)}, _mask),
        "give them as functions",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refuses_what_goes_by_a_model(name):
    make, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        optim.per_leaf(make()).init(_stacks())


@pytest.mark.usefixtures("without_type_checks")
def test_refuses_wrong_arguments():
    for at_once in (0, 1.5, True):
        with pytest.raises(ValueError, match="at_once must be a whole number of rows, at least 1, got"):
            optim.per_leaf(optax.sgd(0.1), at_once=at_once)
    with pytest.raises(TypeError, match="expected an Optax transformation, got sgd; call it"):
        optim.per_leaf(optax.sgd)
    tx = optim.per_leaf(optax.sgd(0.1, momentum=0.9))
    with pytest.raises(TypeError, match="expected the state that init or the last update returned, got tuple"):
        tx.update(_stacks(), (), _stacks())
    with pytest.raises(ValueError, match=r"Dict key mismatch"):
        tx.update({"a": jnp.ones(2)}, tx.init(_stacks()))


def test_extra_arguments_go_to_every_row_and_may_be_needed_to_tell():
    heated = lambda grads, state, params=None, *, heat: (jax.tree.map(lambda g: heat(g), grads), state)
    tx = optim.per_leaf(optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), heated))
    stacks = _stacks()
    state = tx.init(stacks)
    with pytest.raises(ValueError, match=r"its update fails there \(TypeError: .*heat.*pass a number by"):
        tx.update(stacks, state)
    with pytest.raises(ValueError, match="the update of one leaf depends on another"):
        optim.per_leaf(optax.GradientTransformationExtraArgs(lambda params: (), _hot)).update(stacks, state, heat=2.0)
    heat = lambda row: row / jnp.max(jnp.abs(row))
    updates, _ = jax.jit(lambda stacks: tx.update(stacks, state, heat=heat))(stacks)
    largest = lambda stack: np.max(np.abs(stack), tuple(range(1, stack.ndim)), keepdims=True)
    assert_close(updates, ({key: np.asarray(stack) / largest(stack) for key, stack in stacks.items()}))


def _hot(grads, state, params=None, *, heat):
    total = heat * sum(map(jnp.sum, jax.tree.leaves(grads)))
    return jax.tree.map(lambda g: g * total, grads), state


# -- What is a stack, and what is not there ----------------------------------------------------------------------------


@pytest.mark.parametrize("form", [optim.trainable, VECTOR])
def test_forms_without_rows_refuse_it(form):
    with pytest.raises(ValueError, match=r"optim.per_leaf is for rows of stacks: write"):
        form(optax.chain(optax.clip(1.0), optim.per_leaf(optax.sgd(0.1)))).init({"a": ramp(2, 3)})


@pytest.mark.parametrize("nothing", [None, optax.MaskedNode()])
def test_what_has_no_gradient_waits(nothing):
    stacks = _stacks()
    tx = optim.per_leaf(optax.lamb(0.1))

    @jax.jit
    def run(stacks):
        _, state = tx.update(tp.copy(stacks), tx.init(stacks), stacks)
        updates, after = tx.update(stacks | {"float32[5]": nothing}, state, stacks)
        assert updates["float32[5]"] is nothing
        return state, (updates, after), tx.update(tp.copy(stacks), state, stacks)

    state, (updates, after), (want, both) = run(stacks)
    assert_same(updates, want | {"float32[5]": nothing})
    assert_same(after.states, both.states | {"float32[5]": state.states["float32[5]"]})
    without = tx.init(stacks | {"float32[5]": nothing})
    assert_same(without.states["float32[5]"], nothing)
    assert tx.update(None, state, stacks) == (None, state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_the_state_of_rows_lies_where_they_do(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=first_devices(4))
    stack, tx = ramp(8, 4, 6), optim.per_leaf(RULES["adafactor"])
    stacks = {"float32[4,6]": jax.device_put(stack, NamedSharding(mesh, P("x")))}
    with jax.set_mesh(mesh):
        state = tx.init(stacks)
        (updates, after), traced = jax.jit(tx.update)(stacks, state, stacks), jax.jit(tx.init)(stacks)
        if kind == AxisType.Explicit:  # by type, within a trace too
            assert_same(jax.jit(tx.update)(stacks, traced, stacks), (updates, after))
    for leaf in jax.tree.leaves(state):
        assert leaf.sharding.is_equivalent_to(NamedSharding(mesh, P("x")), leaf.ndim)
    whole = {"float32[4,6]": stack}
    assert_close((updates, after), jax.jit(lambda whole: tx.update(tp.copy(whole), tx.init(whole), whole))(whole), 1e-6)


# -- Within optim.trainable --------------------------------------------------------------------------------------------
