"""A rule over each leaf by itself: over stacks equal to Optax over the leaves, and refused where it couples them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import optim
from treeparams.optim._per_leaf import coupling

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


_by_rank = lambda params: jax.tree.map(lambda x: x.ndim, params)
_matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
_of_rank = {0: optax.adamw(0.1, weight_decay=0.5, mask=_matrices), 1: optax.sm3(0.1), 2: optax.lars(0.1)}
RULES = {
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=4),
    "schedule_free": optax.contrib.schedule_free_adamw(0.1, warmup_steps=2),
    "MultiSteps": optax.MultiSteps(optax.novograd(0.1), 2),
    "by block": optax.chain(
        optax.centralize(), optax.adaptive_grad_clip(0.1), optax.sgd(0.1), optax.clip_by_block_rms(0.01)
    ),
    "labels by rank": optax.partition(_of_rank, _by_rank),
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
OF_ROWS, UNKNOWN = optim.per_leaf(optax.sgd(0.1, momentum=0.9)), {"a": np.ones(2, np.float32)}
REFUSED = [  # call, kind of error, words; of a rule what its `init` says over rows
    (lambda: optim.trainable(optax.sgd(0.1)), ValueError, "use one transformation over models, outermost"),
    (lambda: optax.chain(optim.trainable(optax.sgd(0.1))), ValueError, "use one transformation"),
    (lambda: optim.groups({"**": optax.sgd(0.1)}), ValueError, r"groups selects by path.*optim.groups\({'layers.0'"),
    (lambda: optax.adamw(0.1, mask=_mask), ValueError, r"init fails there \(.*mask=lambda params: jax.tree.map\("),
    (lambda: optax.partition({True: optax.sgd(0.1), False: optax.adam(0.1)}, _mask), ValueError, "as functions"),
    *[
        (
            lambda n=n: optim.per_leaf(optax.sgd(0.1), at_once=n),
            ValueError,
            "at_once must be a whole .*, at least 1, got",
        )
        for n in (0, 1.5, True)
    ],
    (lambda: optax.sgd, TypeError, "expected an Optax transformation, got sgd; call it"),
    (lambda: OF_ROWS.update(_stacks(), (), _stacks()), TypeError, "state that init or the last.* returned, got tuple"),
    (lambda: OF_ROWS.update(UNKNOWN, OF_ROWS.init(_stacks())), ValueError, "Dict key mismatch"),
    (lambda: OF_ROWS.init({"b": ramp()}), ValueError, r"leading axis for rows, as of tp.stack, and got float32\[\]"),
]


@pytest.mark.parametrize(("make", "error", "words"), REFUSED)
def test_what_is_refused(make, error, words, without_type_checks):
    with pytest.raises(error, match=words):
        optim.per_leaf(make()).init(_stacks())


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


def test_a_rule_is_looked_at_once_even_if_it_is_made_anew_for_each_update():
    calls = []
    rule = optax.GradientTransformation(lambda params: (), lambda grads, *_: calls.append(1) or (grads, ()))
    tx, model = optim.per_leaf(rule), {"a": ramp(2), "b": ramp(2)}
    state = tx.init(_stacks())
    tx.init(_stacks("float32[]"))
    tx.update(_stacks(), state)
    assert len(calls) == 1 + len(SHAPES)
    tx.init(_stacks() | {"matrix": ramp(20, 20)})  # larger than what it was tried with
    assert len(calls) == 2 + len(SHAPES)
    made = optax.inject_hyperparams(lambda rate: optim.per_leaf(optax.chain(rule, optax.scale(rate))))(0.1)
    state = made.init(model)
    calls.clear()
    made.update(model, state, model)
    assert len(calls) == len(model)


# -- What is a stack, and what is not there ----------------------------------------------------------------------------


def test_the_leading_axis_is_that_of_rows_wherever_the_array_stands_and_forms_without_rows_refuse_it():
    tree = {"stacks": {"float32[2,3]": ramp(4, 2, 3)}, "nested": [ramp(3, 2, dtype=jnp.bfloat16)], "other": ramp(5)}
    tx = optim.per_leaf(optax.scale_by_schedule(lambda count: 1.0))
    shapes, count = jax.tree.map(jnp.shape, tx.init(tree).states), optax.ScaleByScheduleState
    assert shapes == {"stacks": {"float32[2,3]": count((4,))}, "nested": [count((3,))], "other": count((5,))}
    for form in (optim.trainable, VECTOR):
        with pytest.raises(ValueError, match=r"optim.per_leaf is for rows of stacks: write"):
            form(optax.chain(optax.clip(1.0), optim.per_leaf(optax.sgd(0.1)))).init({"a": ramp(2, 3)})


def test_rows_in_turns_and_what_a_stack_costs():
    stacks, rule, muon = _stacks(), optax.chain(optax.clip_by_block_rms(0.1), optax.trace(0.9)), optax.contrib.muon(0.1)
    txs = [optim.per_leaf(rule), *(optim.per_leaf(rule, at_once=at_once) for at_once in (1, np.int64(2), 9))]
    want, *others = jax.jit(lambda stacks: [tx.update(stacks, tx.init(stacks)) for tx in txs])(stacks)
    for got in others:
        assert_close(got, want, 1e-6)
    stack = {"float32[16,16]": ramp(20, 16, 16)}
    count = lambda tx, params: jax.jit(tx.update).lower(params, tx.init(params), params).cost_analysis()["flops"]
    assert 1e5 < count(optim.per_leaf(muon), stack) <= 1.01 * count(muon, _leaves(stack))


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


# -- Hyperparameters of rows -------------------------------------------------------------------------------------------


def test_a_hyperparameter_inside_is_one_for_all_rows_and_for_those_that_begin():
    model = {"a": ramp(2), "b": ramp(3), "c": [ramp(2) + i for i in range(4)], "low": ramp(2, dtype=jnp.bfloat16)}
    rule = optax.chain(optax.inject_hyperparams(optax.adam)(0.1), optax.inject_hyperparams(optax.scale)(3.0))
    tx, plain = optim.trainable(optim.per_leaf(rule), ("a", "low"), form="stacks"), optim.trainable(rule, "c")
    update, adjust = jax.jit(tx.update), jax.jit(lambda state, rate: optim.adjust(state, learning_rate=rate))
    _, begun = update(model, adjust(tx.init(model), 0.25), model)
    state = optim.set_trainable(tx, begun, model, "**")
    assert len(state.runs) == 2
    want, _ = plain.update(tp.copy(model), optim.adjust(plain.init(model), learning_rate=0.25), model)
    updates, after = update(model, state, model, active={"b": jnp.array(False)})  # waits, by its row
    assert_close((updates["c"], tp.global_norm(updates["b"])), (want["c"], jnp.zeros(())), 1e-6)
    found = {k: v[0].hyperparams for run in state.runs for k, v in run.states.items()}
    assert_same(found["float32[3]"]["b2"], np.full(1, 0.999, np.float32))  # as made, and not as of bfloat16, 1
    anew = optim.set_trainable(tx, optim.adjust(after, step_size=2.0), model, reset="c")
    assert [float(x) for run in anew.runs for v in run.states.values() for x in v[1].hyperparams["step_size"]] == [
        2.0
    ] * 7
    assert_same(optim.set_trainable(tx, state, model, ("a", "low"), reset=True), tx.init(model))  # all begins anew
    with pytest.raises(ValueError, match=r"expected learning_rate of shape \(\), got shape \(4,\)"):
        optim.adjust(after, learning_rate=np.ones(4))


# -- Whether a rule couples leaves: found in its programs, wherever they hide it ---------------------------------------

LEAF = [jax.ShapeDtypeStruct((5,), jnp.float32)]
UPDATE, STATE = "the update of one leaf depends on another", "depends on more than one leaf"
COUPLED = {
    "clip_by_global_norm": (lambda: optax.clip_by_global_norm(1.0), UPDATE),
    "ours": (lambda: optim.clip_by_global_norm(1.0), rf"{UPDATE}, and ClipState\.norm {STATE}"),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), rf"ApplyIfFiniteState\.\w+ {STATE}"),
    "prodigy": (optax.contrib.prodigy, rf"{UPDATE}, and ProdigyState\.exp_avg\[0\] {STATE}"),
    "dadapt_adamw": (optax.contrib.dadapt_adamw, rf"{UPDATE}, and DAdaptAdamWState\..* {STATE}"),
    "mechanize": (lambda: optax.contrib.mechanize(optax.sgd(0.1)), rf"{UPDATE}, and MechanicState\.r {STATE}"),
    "lbfgs": (optax.lbfgs, rf"{UPDATE}, and state\[0\]\.weights_memory {STATE}"),
    "polyak_sgd": (optax.polyak_sgd, UPDATE),
    "normalize_by_update_norm": (optax.normalize_by_update_norm, UPDATE),
    "flatten": (lambda: optax.flatten(optax.adam(0.1)), rf"{UPDATE}, and state\[0\]\.mu {STATE}"),
    "of matrices alone": (lambda: optax.masked(optax.clip_by_global_norm(1.0), _matrices), UPDATE),
    "steps that are skipped": (
        lambda: optax.MultiSteps(optax.sgd(0.1), 2, should_skip_update_fn=optax.skip_not_finite),
        rf"MultiStepsState\.mini_step {STATE}",
    ),
    "add_noise": (lambda: optax.add_noise(0.1, 0.1, jax.random.key(0)), "it draws random numbers, which would be the"),
    "noisy_sgd": (lambda: optax.noisy_sgd(0.1, key=7), "it draws random numbers"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_refuses_what_couples_leaves(name):
    make, match = COUPLED[name]
    instead = r"put it around, optax.chain\(optim.clip_by_global_norm\(1.0\), optim.per_leaf\(...\)\)"
    with pytest.raises(ValueError, match=rf"(?s){match}.*{instead}"):
        optim.per_leaf(make()).init({"float32[4,3]": jnp.ones((2, 4, 3)), "float32[5]": jnp.ones((3, 5))})


# Rules for derivatives are followed by what the function itself does, other than in tests/test_reached.py.


def _of_pairs(f):
    """A rule of `f(a, b) -> (a, b)` over two leaves."""
    return lambda params: (), lambda grads, state, params: ([*f(*grads)], state)


def _until(a, b):
    return jax.lax.while_loop(lambda c: jnp.sum(c[0]) < 9, lambda c: (c[0] + 1, 2 * c[1]), (a, b))


def _by_value(a, b):
    return jax.lax.cond(a[0] > 0, lambda a, b: (2 * a, b + jnp.sum(b)), lambda a, b: (a, b), a, b)


def _later(carry, _):
    a, b, last = carry
    return (a, b + last, a), None


def _with_jvp(f):
    made = jax.custom_jvp(f)
    made.defjvp(lambda primals, tangents: (f(*primals), tangents))
    return made


def _with_vjp(f):
    made = jax.custom_vjp(f)
    made.defvjp(lambda a, b: (f(a, b), None), lambda _, cotangents: cotangents)
    return made


_times = lambda grads, others: [grad * other for grad, other in zip(grads, others[::-1], strict=True)]
HIDDEN = {
    "a branch by the value of the other": _of_pairs(_by_value),
    "as long as the other is small": _of_pairs(_until),
    "an operation of which nothing is known": _of_pairs(lambda a, b: jax.lax.sort([a, b], num_keys=1)),
    "gradients, a step later": (lambda p: [*map(jnp.zeros_like, p)], lambda grads, last, params: (last, grads[::-1])),
    "parameters": (lambda params: (), lambda grads, state, params: (_times(grads, params), state)),
    "in the second round": _of_pairs(lambda a, b: jax.lax.scan(_later, (a, b, jnp.zeros_like(a)), length=2)[0][:2]),
    "where the parameters began": (lambda params: params, lambda grads, start, params: (_times(grads, start), start)),
}


@pytest.mark.parametrize("way", HIDDEN.values(), ids=HIDDEN)
def test_finds_what_couples_wherever_it_is_hidden(way):
    assert coupling(optax.with_extra_args_support(optax.GradientTransformation(*way)), LEAF, {}) == UPDATE


_rounds = lambda f: lambda a, b: jax.lax.while_loop(lambda c: c[0] < 2, lambda c: (c[0] + 1, *f(*c[1:])), (0, a, b))[1:]
WITHIN = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "a rule for jvp": _with_jvp,
    "a rule for vjp": _with_vjp,
    "a loop of two rounds": _rounds,
    "scan": lambda f: lambda a, b: jax.lax.scan(lambda carry, _: (f(*carry), None), (a, b), length=3)[0],
    "scan over rows": lambda f: lambda a, b: jax.lax.scan(lambda c, rows: (c, f(*rows)), 0, (a[None], b[None]))[1],
}


@pytest.mark.parametrize("within", WITHIN.values(), ids=WITHIN)
def test_looks_into_programs_within_the_program(within):
    for f, said in (
        (lambda a, b: (2 * a, b + jnp.sum(b)), ""),
        (lambda a, b: (a * jnp.sum(b), b * jnp.sum(a)), UPDATE),
    ):
        rule = optax.GradientTransformation(*_of_pairs(within(f)))
        assert coupling(optax.with_extra_args_support(rule), LEAF, {}) == said
