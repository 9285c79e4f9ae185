"""A rule over each leaf by itself, and whether a rule is right over joined leaves: read from its programs, whatever the
numbers in it are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec as P
from optax import contrib

import treeparams as tp
from treeparams import optim
from treeparams.optim._per_leaf import coupling

from ..zoo import STACKS, VECTOR, assert_close, assert_same, enable_x64, first_devices, ramp
from .shared import FORMS

FACTORED = optax.adafactor(0.1, min_dim_size_to_factor=4)
SHAPES = {"float32[8,6]": (4, 8, 6), "float32[5]": (2, 5), "float32[]": (2,)}


def _stacks(*without):
    rng = np.random.default_rng(0)
    arrays = {k: jax.device_put(rng.normal(size=s).astype(np.float32)) for k, s in SHAPES.items()}
    return {key: array for key, array in arrays.items() if key not in without}


OF_ROWS, UNKNOWN = optim.per_leaf(optax.sgd(0.1, momentum=0.9)), {"a": np.ones(2, np.float32)}
WHOLE = "at_once must be a whole .*, at least 1, got"
at_once = lambda n: (lambda: optim.per_leaf(optax.sgd(0.1), at_once=n), ValueError, WHOLE)
REFUSED = [  # call, kind of error, words; of a rule what its `init` says over rows
    *map(at_once, (0, 1.5)),
    (lambda: optax.chain(optim.trainable(optax.sgd(0.1))), ValueError, "use one transformation"),
    (lambda: optim.groups({"**": optax.sgd(0.1)}), ValueError, r"groups selects by path.*optim.groups\({'layers.0'"),
    (lambda: optax.adamw(0.1, mask={"float32[5]": True}), ValueError, r"init fails there \(.*mask=lambda params: jax"),
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
    total = lambda grads: sum(map(jnp.sum, jax.tree.leaves(grads)))
    hot = lambda grads, state, params=None, *, heat: (jax.tree.map(lambda g: g * heat * total(grads), grads), state)
    with pytest.raises(ValueError, match="the update of one leaf depends on another"):
        optim.per_leaf(optax.GradientTransformationExtraArgs(lambda params: (), hot)).update(stacks, state, heat=2.0)
    heat = lambda row: row / jnp.max(jnp.abs(row))
    updates, _ = jax.jit(lambda stacks: tx.update(stacks, state, heat=heat))(stacks)
    largest = lambda stack: np.max(np.abs(stack), tuple(range(1, stack.ndim)), keepdims=True)
    assert_close(updates, ({key: np.asarray(stack) / largest(stack) for key, stack in stacks.items()}))


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


def test_the_leading_axis_is_that_of_rows_wherever_the_array_stands_and_forms_without_rows_refuse_it():
    tree = {"stacks": {"float32[2,3]": ramp(4, 2, 3)}, "nested": [ramp(3, 2, dtype=jnp.bfloat16)], "other": ramp(5)}
    tx = optim.per_leaf(optax.scale_by_schedule(lambda count: 1.0))
    shapes, count = jax.tree.map(jnp.shape, tx.init(tree).states), optax.ScaleByScheduleState
    assert shapes == {"stacks": {"float32[2,3]": count((4,))}, "nested": [count((3,))], "other": count((5,))}
    for form in FORMS[:2]:
        with pytest.raises(ValueError, match=r"optim.per_leaf is for rows of stacks: write"):
            form(optax.chain(optax.clip(1.0), optim.per_leaf(optax.sgd(0.1)))).init({"a": ramp(2, 3)})


def test_rows_in_turns_and_what_a_stack_costs():
    stacks, rule, muon = _stacks(), optax.chain(optax.clip_by_block_rms(0.1), optax.trace(0.9)), optax.contrib.muon(0.1)
    txs = [optim.per_leaf(rule), *(optim.per_leaf(rule, at_once=at_once) for at_once in (1, np.int64(2), 3, 9))]
    want, *others = jax.jit(lambda stacks: [tx.update(stacks, tx.init(stacks)) for tx in txs])(stacks)
    for got in others:
        assert_close(got, want, 1e-6)
    stack = {"float32[16,16]": ramp(20, 16, 16)}
    count = lambda tx, params: jax.jit(tx.update).lower(params, tx.init(params), params).cost_analysis()["flops"]
    assert 1e5 < count(optim.per_leaf(muon), stack) <= 1.01 * count(muon, list(stack["float32[16,16]"]))


def test_what_has_no_gradient_waits():
    stacks, tx, nothing = _stacks(), optim.per_leaf(optax.lamb(0.1)), [None, optax.MaskedNode()]

    @jax.jit
    def run():
        state = tx.update(tp.copy(stacks), tx.init(stacks), stacks)[1]
        some = [tx.update(stacks | {"float32[5]": each}, state, stacks) for each in nothing]
        states = [tx.init(stacks | {"float32[5]": each}).states for each in nothing]
        return state, tx.update(tp.copy(stacks), state, stacks), some, states

    state, (want, both), some, states = run()
    for each, (updates, after), begun in zip(nothing, some, states, strict=True):
        assert type(updates["float32[5]"]) is type(each) is type(begun["float32[5]"])
        assert_same(updates, want | {"float32[5]": each})
        assert_same(after.states, both.states | {"float32[5]": state.states["float32[5]"]})
    assert tx.update(None, state, stacks) == (None, state)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=["auto", "explicit"])
def test_the_state_of_rows_lies_where_they_do(kind):
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=first_devices(4))
    stack, tx = ramp(8, 4, 6), optim.per_leaf(FACTORED)
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


def test_a_hyperparameter_inside_is_one_for_all_rows_and_for_those_that_begin():
    model = {"a": ramp(2), "b": ramp(3), "c": [ramp(2) + i for i in range(4)], "low": ramp(2, dtype=jnp.bfloat16)}
    rule = optax.chain(optax.inject_hyperparams(optax.adam)(0.1), optax.inject_hyperparams(optax.scale)(3.0))
    tx = STACKS(optim.per_leaf(rule), ("a", "low"))
    update, adjust = jax.jit(tx.update), jax.jit(lambda state, rate: optim.adjust(state, learning_rate=rate))
    _, begun = update(model, adjust(tx.init(model), 0.25), model)
    state = optim.set_trainable(tx, begun, model, "**")
    assert len(state.runs) == 2
    updates, _ = update(model, state, model, active={"b": jnp.array(False)})  # waits, by its row
    # The first step of Adam is as long as the rate, whatever the gradient.
    np.testing.assert_allclose(np.concatenate([*updates["c"], updates["b"]]), [-0.75] * 8 + [0] * 3, 1e-6)
    found = {k: v[0].hyperparams for run in state.runs for k, v in run.states.items()}
    assert_same(found["float32[3]"]["b2"], np.full(1, 0.999, np.float32))  # as made, and not as of bfloat16, 1


# -- Whether a rule couples leaves: found in its programs, wherever they hide it ---------------------------------------

LEAF = [jax.ShapeDtypeStruct((5,), jnp.float32)]
UPDATE, STATE = "the update of one leaf depends on another", "depends on more than one leaf"
_skips = functools.partial(optax.MultiSteps, should_skip_update_fn=optax.skip_not_finite)
COUPLED = {
    "clip_by_global_norm": (lambda: optax.clip_by_global_norm(1.0), UPDATE),
    "ours": (lambda: optim.clip_by_global_norm(1.0), rf"{UPDATE}, and ClipState\.norm {STATE}"),
    "apply_if_finite": (lambda: optax.apply_if_finite(optax.sgd(0.1), 3), rf"ApplyIfFiniteState\.\w+ {STATE}"),
    "prodigy": (optax.contrib.prodigy, rf"{UPDATE}, and ProdigyState\.exp_avg\[0\] {STATE}"),
    "mechanize": (lambda: optax.contrib.mechanize(optax.sgd(0.1)), rf"{UPDATE}, and MechanicState\.r {STATE}"),
    "polyak_sgd": (optax.polyak_sgd, UPDATE),
    "normalize_by_update_norm": (optax.normalize_by_update_norm, UPDATE),
    "flatten": (lambda: optax.flatten(optax.adam(0.1)), rf"{UPDATE}, and state\[0\]\.mu {STATE}"),
    "lbfgs": (optax.lbfgs, rf"{UPDATE}, and state\[0\]\.weights_memory {STATE}"),
    "steps that are skipped": (lambda: _skips(optax.sgd(0.1), 2), rf"MultiStepsState\.mini_step {STATE}"),
    "add_noise": (lambda: optax.add_noise(0.1, 0.1, jax.random.key(0)), "it draws random numbers, which would be the"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_refuses_what_couples_leaves(name):
    make, match = COUPLED[name]
    instead = r"put it around, optax.chain\(optim.clip_by_global_norm\(1.0\), optim.per_leaf\(...\)\)"
    with pytest.raises(ValueError, match=rf"(?s){match}.*{instead}"):
        optim.per_leaf(make()).init({"float32[4,3]": jnp.ones((2, 4, 3)), "float32[5]": jnp.ones((3, 5))})


def _of_pairs(f):
    """A rule of `f(a, b) -> (a, b)` over two leaves."""
    return lambda params: (), lambda grads, state, params: ([*f(*grads)], state)


_until = lambda a, b: jax.lax.while_loop(lambda c: jnp.sum(c[0]) < 9, lambda c: (c[0] + 1, 2 * c[1]), (a, b))
_by_value = lambda a, b: jax.lax.cond(a[0] > 0, lambda a, b: (2 * a, b + jnp.sum(b)), lambda a, b: (a, b), a, b)
_later = lambda carry, _: ((carry[0], carry[1] + carry[2], carry[0]), None)


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


# -- Over a vector and over stacks -------------------------------------------------------------------------------------

MODEL = {"a": [jnp.ones((3, 4)), jnp.full((3, 4), 9.0)], "bias": [jnp.ones(4), jnp.full(4, 9.0)], "c": jnp.ones(())}
joined = pytest.mark.parametrize("form", [VECTOR, STACKS], ids=["vector", "stacks"])
LOOKS = "looks at the shapes of leaves, their axes or norms, or at their names: '.*' gets another update"


def _of_leaves(f):
    """A rule of `f(leaf, leaves)`."""
    return optax.stateless(lambda grads, params: jax.tree.map(lambda leaf: f(leaf, jax.tree.leaves(grads)), grads))


by_rank = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
matrices = tp.leaves(lambda path, leaf: leaf.ndim == 2)
slow, fast = optim.scaled({"a": 0.5}), optim.scaled({"a": 2.0})
RULES = {
    optax: "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw polyak_sgd "
    "radam rmsprop rprop sgd sign_sgd yogi",
    contrib: "acprop ademamix adopt cocob dadapt_adamw madgrad momo_adam prodigy schedule_free_adamw schedule_free_sgd",
}
# Older versions of Optax lack some.
_named = [(each, name) for each, names in RULES.items() for name in names.split()]
ELEMENT_WISE = {name: getattr(each, name)(0.1) for each, name in _named if hasattr(each, name)}
late = {"should_transform_fn": lambda step: step >= 3}
clipped = optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1))
_squares = lambda leaves: sum(jnp.sum(x**2) for x in leaves)
RIGHT = ELEMENT_WISE | {
    "memory": optax.lbfgs(0.1, memory_size=2, linesearch=None),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.0, 3), momentum=0.9, nesterov=True),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 3)),
    "clip": optax.chain(optax.clip(0.1), optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1)),
    "apply_if_finite": optax.apply_if_finite(clipped, 3),
    "MultiSteps": _skips(clipped, 2),
    "later": optax.transforms.conditionally_transform(clipped, **late),
    "ema": optax.chain(optax.ema(0.9), optax.zero_nans(), optax.normalize_by_update_norm()),
    "a line search": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    "mechanize": contrib.mechanize(optax.adam(0.1)),
    "the largest": _of_leaves(lambda leaf, leaves: leaf / jax.tree.reduce(jnp.maximum, [jnp.max(x) for x in leaves])),
    "finite": _of_leaves(lambda leaf, leaves: leaf * jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves]))),
    "scaled before they are added": _of_leaves(lambda x, leaves: x * sum(-3 * jnp.vdot(y, y) / 2 for y in leaves)),
    "root mean square": _of_leaves(
        lambda leaf, leaves: leaf / jnp.sqrt(_squares(leaves) / sum(x.size for x in leaves))
    ),
}


WIDE = ("memory", "MultiSteps", "a line search", "mechanize")  # in which indices of 64 bits are of two dtypes


@pytest.mark.parametrize(("name", "is_wide"), [*[(name, False) for name in RIGHT], *[(name, True) for name in WIDE]])
def test_takes_what_treats_elements_alike(name, is_wide):
    form = STACKS if name in ("MultiSteps", "ema") and not is_wide else VECTOR
    with enable_x64(is_wide):
        jax.eval_shape(form(RIGHT[name]).init, MODEL)


WRONG = {
    "fromage": optax.fromage(0.1),
    "novograd at rest": optax.novograd(0.0),
    "adaptive_grad_clip": optax.adaptive_grad_clip(1e9),
    "injected lamb at rest": optax.inject_hyperparams(optax.lamb)(0.0),
    "later": optax.transforms.conditionally_transform(optax.scale_by_trust_ratio(), **late),
    "centralize at rest": optax.chain(optax.centralize(), optax.scale(0.0)),
    "a mask by rank": optax.adamw(0.1, mask=by_rank),
    "muon": contrib.muon(0.1),
    "adafactor": optax.adafactor(0.1, 2, multiply_by_parameter_scale=False, clipping_threshold=None),
    "noise": optax.add_noise(0.1, 0.1, 0),
    "in a group by shape": optim.groups({matrices: optax.lamb(0.1)}, default=optax.sgd(0.1)),
    "factors by label": optax.partition({True: slow, False: fast}, by_rank),
    "the mean of means": _of_leaves(lambda leaf, leaves: leaf * sum(map(jnp.mean, leaves))),
    "norms in another norm": _of_leaves(lambda leaf, leaves: leaf * sum(jnp.sqrt(jnp.vdot(x, x)) for x in leaves)),
    "sums in whole numbers": _of_leaves(lambda leaf, leaves: leaf * sum(jnp.sum(x).astype(int) for x in leaves)),
    "the first leaf": _of_leaves(lambda leaf, leaves: leaf * jnp.sum(leaves[0])),
    "places": _of_leaves(lambda leaf, leaves: leaf * jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)),
    "axes": _of_leaves(lambda leaf, leaves: leaf - 0 * jnp.flip(leaf, range(leaf.ndim))),
    "a loop": _of_leaves(lambda leaf, _: jax.lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x / 2, leaf)),
    "a branch": _of_leaves(lambda leaf, leaves: jax.lax.cond(jnp.sum(leaf) > 0, jnp.sin, jnp.cos, leaf)),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_what_looks_at_leaves_whatever_the_numbers(name):
    form = VECTOR if name in ("later", "fromage", "axes", "factors by label") else STACKS
    with pytest.raises(ValueError, match=LOOKS) as caught:
        form(WRONG[name]).init(MODEL)
    instead = 'use form="stacks" with' if form is VECTOR else "optim.per_leaf: optax.chain(optim.clip_by_global_norm("
    assert instead in str(caught.value)


@joined
def test_a_rule_that_looks_at_long_axes_is_right_for_short_ones(form):
    centred = lambda leaf: leaf - jnp.mean(leaf, 0, keepdims=True)
    rule = _of_leaves(lambda leaf, leaves: centred(leaf) if leaf.ndim > 1 and leaf.shape[-1] > 8 else leaf)
    tx, short, long = form(rule), {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}, {"c": jnp.ones((9, 9))}
    state = form(rule, "[ab]").init(short | long)
    tx.init(short)
    with pytest.raises(ValueError, match=LOOKS):
        tx.init(short | long | {"d": jnp.ones((9, 9))})
    with pytest.raises(ValueError, match=LOOKS):
        optim.set_trainable(tx, state, short | long)  # what thaws is looked at too


@joined
def test_norms_of_leaves_are_refused_under_a_traced_rate_and_what_is_right_is_not(form):
    def after(make, rate):
        tx = form(make(rate))
        return optim.step(tx, tp.copy(MODEL), tx.init(MODEL), MODEL)[0]["c"]

    for transform, rate in ((jax.vmap, np.ones(3, np.float32)), (jax.jit, np.float32(1))):
        with pytest.raises(ValueError, match=LOOKS):
            transform(functools.partial(after, optax.lamb))(rate)
    np.testing.assert_allclose(jax.jit(functools.partial(after, optax.sgd))(np.float32(0.25)), 0.75)


_is_bias = lambda path: "bias" in jax.tree_util.keystr(path)
_twice = lambda grads: jax.tree.map_with_path(lambda path, leaf: 2 * leaf if _is_bias(path) else leaf, grads)
_biases = lambda tree: jax.tree.map_with_path(lambda path, _: _is_bias(path), tree)
MASKED = optax.masked(optax.sgd(0.1), _biases)
OTHERS = {"a": jnp.ones((3, 4)), "c": [jnp.ones(4), jnp.ones(4)]}
MANY = {"layers": [{"w": np.ones(2, np.float32), "bias": np.ones(2, np.float32)} for _ in range(20)]}
BY_NAME = {  # the form, the rule, and models
    "labels": (STACKS, optax.partition({True: optax.sgd(0.1), False: optax.adam(0.1)}, _biases), [MODEL]),
    "groups": (VECTOR, optim.groups({"bias": optax.sgd(0.1)}, default=optax.adam(0.1)), [MODEL]),
    "update": (VECTOR, optax.stateless(lambda grads, params: _twice(grads)), [MODEL, MANY]),  # two names of one
    "a mask": (STACKS, MASKED, [MODEL, OTHERS | {"bias": [jnp.ones(4), jnp.ones(4)]}]),
}


@pytest.mark.parametrize(("form", "rule", "models"), BY_NAME.values(), ids=BY_NAME)
def test_refuses_what_goes_by_names(form, rule, models):
    tx = form(rule)
    if rule is MASKED:
        tx.init(OTHERS)  # a name that the model does not have makes no difference, until one has it
    for model in models:
        with pytest.raises(ValueError, match=LOOKS):
            tx.init(model)


def test_rows_within_are_known_to_be_right_but_not_what_goes_into_them():
    by_rows = lambda rate: optax.chain(optax.scale(2.0), optim.per_leaf(optax.lamb(rate)))
    jax.eval_shape(optim.trainable(optax.inject_hyperparams(by_rows)(0.1), form="stacks").init, MODEL)

    def by_the_first(grads, state, params=None):
        rows = optim.per_leaf(optax.scale(jnp.sum(jax.tree.leaves(grads)[0])))
        return rows.update(grads, state, params)

    rule = optax.GradientTransformation(optim.per_leaf(optax.scale(1.0)).init, by_the_first)
    with pytest.raises(ValueError, match=LOOKS):
        optim.trainable(rule, form="stacks").init(MODEL)


def _called_back(scale):
    """What no program shows."""
    call = lambda leaf: jax.pure_callback(lambda x: np.asarray(x) * 2, leaf, leaf)
    return optax.stateless(lambda grads, params: jax.tree.map(lambda leaf: call(leaf) * scale, grads))


@joined
def test_what_no_program_shows_is_refused_by_its_name(form):
    for init in (form(_called_back(1.0)).init, jax.jit(form(optax.chain(_called_back(1.0), optax.lamb(0.1))).init)):
        with pytest.raises(ValueError, match="calls pure_callback, which may do something else to joined leaves"):
            init(MODEL)
