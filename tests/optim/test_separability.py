"""Whether a rule is right over a vector and over stacks: read from its programs, whatever the numbers in it are."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, enable_x64

pytestmark = pytest.mark.usefixtures("standard_promotion")

MODEL = {"a": [jnp.ones((3, 4)), jnp.full((3, 4), 9.0)], "bias": [jnp.ones(4), jnp.full(4, 9.0)], "c": jnp.ones(())}
forms = pytest.mark.parametrize("form", [VECTOR, STACKS], ids=["vector", "stacks"])
SHAPES = "looks at the shapes of leaves, their axes or norms, or at their names: '.*' gets another update"


def _of_leaves(f):
    """A rule of `f(leaf, leaves)`."""
    return optax.stateless(lambda grads, params: jax.tree.map(lambda leaf: f(leaf, jax.tree.leaves(grads)), grads))


def _lowest(f):
    return _of_leaves(lambda leaf, leaves: leaf * jnp.min(jnp.array([jnp.min(f(each)) for each in leaves])))


by_rank = lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)
matrices = tp.leaves(lambda path, leaf: leaf.ndim == 2)
slow, fast = optim.scaled({"a": 0.5}), optim.scaled({"a": 2.0})


def _until_small(leaf):
    return jax.lax.while_loop(lambda x: jnp.sum(x**2) > 1, lambda x: x / 2, leaf)


RULES = {
    optax: "adabelief adadelta adagrad adam adamax adamaxw adamw adan amsgrad lion nadam nadamw polyak_sgd "
    "radam rmsprop rprop sgd sign_sgd yogi",
    contrib: "acprop ademamix adopt cocob dadapt_adamw madgrad momo_adam prodigy schedule_free_adamw schedule_free_sgd",
}
# Older versions of Optax lack some.
ELEMENT_WISE = {
    name: getattr(each, name)(0.1) for each, names in RULES.items() for name in names.split() if hasattr(each, name)
}
late = {"should_transform_fn": lambda step: step >= 3}
clipped = optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1))
RIGHT = ELEMENT_WISE | {
    "memory": optax.lbfgs(0.1, memory_size=2, linesearch=None),
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.0, 3), momentum=0.9, nesterov=True),
    "injected": optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(0.1, 0.0, 3)),
    "clip": optax.chain(optax.clip(0.1), optax.clip_by_global_norm(1.0), optax.add_decayed_weights(0.1)),
    "our clip": clipped,
    "apply_if_finite": optax.apply_if_finite(clipped, 3),
    "MultiSteps": optax.MultiSteps(clipped, 2, should_skip_update_fn=optax.skip_not_finite),
    "later": optax.transforms.conditionally_transform(clipped, **late),
    "ema": optax.chain(optax.ema(0.9), optax.zero_nans(), optax.normalize_by_update_norm()),
    "a line search": optax.chain(optax.sgd(1.0), optax.scale_by_zoom_linesearch(5)),
    "another": optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5)),
    "reduce_on_plateau": optax.chain(optax.adam(0.1), contrib.reduce_on_plateau()),
    "mechanize": contrib.mechanize(optax.adam(0.1)),
    "a mask of all": optax.masked(optax.adam(0.1), lambda tree: jax.tree.map(lambda _: True, tree)),
    "the largest": _of_leaves(lambda leaf, leaves: leaf / jax.tree.reduce(jnp.maximum, [jnp.max(x) for x in leaves])),
    "the least": _lowest(jnp.abs),
    "finite": _of_leaves(lambda leaf, leaves: leaf * jnp.all(jnp.array([jnp.all(jnp.isfinite(x)) for x in leaves]))),
    "scaled before they are added": _of_leaves(lambda x, leaves: x * sum(-3 * jnp.vdot(y, y) / 2 for y in leaves)),
    "root mean square": _of_leaves(
        lambda leaf, leaves: leaf / jnp.sqrt(sum(jnp.sum(x**2) for x in leaves) / sum(x.size for x in leaves))
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_takes_what_treats_elements_alike(name):
    form = STACKS if name in ("our clip", "MultiSteps", "ema") else VECTOR
    jax.eval_shape(form(RIGHT[name]).init, MODEL)


@pytest.mark.parametrize("name", ["memory", "MultiSteps", "another", "mechanize"])
def test_takes_it_with_64_bits_where_indices_are_of_two_dtypes(name):
    with enable_x64(True):
        jax.eval_shape(optim.trainable(RIGHT[name], form="vector").init, MODEL)


WRONG = {
    "injected lamb at rest": optax.inject_hyperparams(optax.lamb)(0.0),
    "later": optax.transforms.conditionally_transform(optax.scale_by_trust_ratio(), **late),
    "fromage": optax.fromage(0.1),
    "novograd at rest": optax.novograd(0.0),
    "centralize at rest": optax.chain(optax.centralize(), optax.scale(0.0)),
    "adaptive_grad_clip": optax.adaptive_grad_clip(1e9),
    "a norm of matrices": optax.masked(optax.clip_by_global_norm(1e9), by_rank),
    "a mask by rank": optax.adamw(0.1, mask=by_rank),
    "muon": contrib.muon(0.1),
    "adafactor": optax.adafactor(0.1, 2, multiply_by_parameter_scale=False, clipping_threshold=None),
    "lars": optax.lars(0.1),
    "noise": optax.add_noise(0.1, 0.1, 0),
    "in a group by shape": optim.groups({matrices: optax.lamb(0.1)}, default=optax.sgd(0.1)),
    "factors by rank": optax.masked(slow, by_rank),
    "factors by label": optax.partition({True: slow, False: fast}, by_rank),
    "the mean of means": _of_leaves(lambda leaf, leaves: leaf * sum(map(jnp.mean, leaves))),
    "norms in another norm": _of_leaves(lambda leaf, leaves: leaf * sum(jnp.sqrt(jnp.vdot(x, x)) for x in leaves)),
    "sums in whole numbers": _of_leaves(lambda leaf, leaves: leaf * sum(jnp.sum(x).astype(int) for x in leaves)),
    "how many leaves": _of_leaves(lambda leaf, leaves: leaf / len(leaves)),
    "the first leaf": _of_leaves(lambda leaf, leaves: leaf * jnp.sum(leaves[0])),
    "places": _of_leaves(lambda leaf, leaves: leaf * jnp.arange(leaf.size, dtype=leaf.dtype).reshape(leaf.shape)),
    "order": _of_leaves(lambda leaf, leaves: jnp.sort(leaf.ravel()).reshape(leaf.shape)),
    "axes": _of_leaves(lambda leaf, leaves: leaf - 0 * jnp.flip(leaf, range(leaf.ndim))),
    "a matrix": _of_leaves(lambda leaf, leaves: leaf @ leaf.mT @ leaf if leaf.ndim == 2 else leaf),
    "a loop": _of_leaves(lambda leaf, leaves: _until_small(leaf)),
    "a branch": _of_leaves(lambda leaf, leaves: jax.lax.cond(jnp.sum(leaf) > 0, jnp.sin, jnp.cos, leaf)),
}


@pytest.mark.parametrize("name", WRONG)
def test_refuses_what_looks_at_leaves_whatever_the_numbers(name):
    form = VECTOR if name in ("later", "fromage", "axes", "factors by rank", "factors by label") else STACKS
    with pytest.raises(ValueError, match=SHAPES) as caught:
        form(WRONG[name]).init(MODEL)
    instead = 'use form="stacks" with' if form is VECTOR else "optim.per_leaf: optax.chain(optim.clip_by_global_norm("
    assert instead in str(caught.value)
    if name == "muon":  # of stacks alone, and in a trace
        for model in (MODEL["bias"], [MODEL["bias"], MODEL["c"]]):
            with pytest.raises(ValueError, match=SHAPES):
                jax.eval_shape(form(WRONG[name]).init, model)


@forms
def test_a_rule_that_looks_at_long_axes_is_right_for_short_ones(form):
    centred = lambda leaf: leaf - jnp.mean(leaf, 0, keepdims=True)
    rule = _of_leaves(lambda leaf, leaves: centred(leaf) if leaf.ndim > 1 and leaf.shape[-1] > 8 else leaf)
    tx, short, long = form(rule), {"a": jnp.ones((3, 4)), "b": jnp.ones(4)}, {"c": jnp.ones((9, 9))}
    state = form(rule, "[ab]").init(short | long)
    tx.init(short)
    for call in (
        lambda: tx.init(short | long | {"d": jnp.ones((9, 9))}),
        lambda: optim.set_trainable(tx, state, short | long),  # what thaws is looked at too
    ):
        with pytest.raises(ValueError, match=SHAPES):
            call()


@forms
def test_norms_of_leaves_are_refused_under_a_traced_rate_and_what_is_right_is_not(form):
    def after(make, rate):
        tx = form(make(rate))
        return optim.step(tx, tp.copy(MODEL), tx.init(MODEL), MODEL)[0]["c"]

    momentum = functools.partial(after, functools.partial(optax.sgd, momentum=0.9))
    for transform, rate in ((jax.vmap, np.ones(3, np.float32)), (jax.jit, np.float32(1))):
        with pytest.raises(ValueError, match=SHAPES):
            transform(functools.partial(after, optax.lamb))(rate)
    rates = np.float32([0.5, 0.25])
    np.testing.assert_allclose(jax.jit(jax.vmap(momentum))(rates), 1 - rates)
    np.testing.assert_allclose(jax.grad(momentum)(0.5), -1.0)


def _is_bias(path):
    return "bias" in jax.tree_util.keystr(path)


def _twice_the_biases(tree):
    return jax.tree_util.tree_map_with_path(lambda path, leaf: 2 * leaf if _is_bias(path) else leaf, tree)


def _first_alone(tree):
    first, *_ = tp.trainables(tree).values()
    return jax.tree.map(lambda leaf: leaf if leaf is first else 0 * leaf, tree)


_biases = lambda tree: jax.tree.map_with_path(lambda path, _: _is_bias(path), tree)
BY_NAME = {
    "a mask": optax.masked(optax.sgd(0.1), _biases),
    "labels": optax.partition({True: optax.sgd(0.1), False: optax.adam(0.1)}, _biases),
    "groups": optim.groups({"bias": optax.sgd(0.1)}, default=optax.adam(0.1)),
    "update": optax.stateless(lambda grads, params: _twice_the_biases(grads)),
    "the first": optax.stateless(lambda grads, params: _first_alone(grads)),
}


@pytest.mark.parametrize("name", BY_NAME)
def test_refuses_what_goes_by_names(name):
    form = VECTOR if name in ("update", "groups") else STACKS
    many = {"layers": [{"w": np.ones(2, np.float32), "bias": np.ones(2, np.float32)} for _ in range(20)]}
    cases = [(form, MODEL)] + [(VECTOR, many), (STACKS, many)] * (name == "update")  # numbers make two names of one
    for each, model in cases:
        with pytest.raises(ValueError, match=SHAPES):
            each(BY_NAME[name]).init(model)
    if name == "a mask":  # a name that the model does not have makes no difference, until one has it
        tx, others = form(BY_NAME[name]), {"a": jnp.ones((3, 4)), "c": [jnp.ones(4), jnp.ones(4)]}
        tx.init(others)
        with pytest.raises(ValueError, match=SHAPES):
            tx.init(others | {"bias": [jnp.ones(4), jnp.ones(4)]})


def test_rows_within_are_known_to_be_right_but_not_what_goes_into_them():
    by_rows = lambda rate: optax.chain(optax.scale(2.0), optim.per_leaf(optax.lamb(rate)))
    jax.eval_shape(optim.trainable(optax.inject_hyperparams(by_rows)(0.1), form="stacks").init, MODEL)

    def by_the_first(grads, state, params=None):
        rows = optim.per_leaf(optax.scale(jnp.sum(jax.tree.leaves(grads)[0])))
        return rows.update(grads, state, params)

    rule = optax.GradientTransformation(optim.per_leaf(optax.scale(1.0)).init, by_the_first)
    with pytest.raises(ValueError, match=SHAPES):
        optim.trainable(rule, form="stacks").init(MODEL)


def _called_back(scale):
    """What no program shows."""
    call = lambda leaf: jax.pure_callback(lambda x: np.asarray(x) * 2, leaf, leaf)
    return optax.stateless(lambda grads, params: jax.tree.map(lambda leaf: call(leaf) * scale, grads))


@forms
def test_what_no_program_shows_is_refused_by_its_name(form):
    for init in (form(_called_back(1.0)).init, jax.jit(form(optax.chain(_called_back(1.0), optax.lamb(0.1))).init)):
        with pytest.raises(ValueError, match="calls pure_callback, which may do something else to joined leaves"):
            init(MODEL)
