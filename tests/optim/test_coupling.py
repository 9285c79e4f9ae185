"""What couples leaves: found in the programs of a rule, wherever they hide it."""

import jax
import jax.numpy as jnp
import optax
import pytest

from treeparams import optim
from treeparams.optim._per_leaf import coupling

pytestmark = pytest.mark.usefixtures("standard_promotion")

VECTOR = [jax.ShapeDtypeStruct((5,), jnp.float32)]
MODEL = {"float32[4,3]": jnp.ones((2, 4, 3)), "float32[5]": jnp.ones((3, 5))}
_matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
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
        optim.per_leaf(make()).init(MODEL)


def _of_pairs(f):
    """A rule of `f(a, b, count) -> (a, b)` over two leaves."""
    update = lambda grads, count, params=None: ([*f(*grads, count)], count + 1)
    rule = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    return optax.with_extra_args_support(rule)


def _exchanged(a, b):
    return a * jnp.sum(b), b * jnp.sum(a)


def _apart(a, b):
    return 2 * a, b + jnp.sum(b)


def _with_jvp(f):
    made = jax.custom_jvp(f)
    made.defjvp(lambda primals, tangents: (f(*primals), tangents))
    return made


def _with_vjp(f):
    made = jax.custom_vjp(f)
    made.defvjp(lambda a, b: (f(a, b), None), lambda _, cotangents: cotangents)
    return made


WITHIN = {
    "jit": lambda f: lambda a, b, n: jax.jit(f)(a, b),
    "checkpoint": lambda f: lambda a, b, n: jax.checkpoint(f)(a, b),
    "custom_jvp": lambda f: lambda a, b, n: _with_jvp(f)(a, b),
    "custom_vjp": lambda f: lambda a, b, n: _with_vjp(f)(a, b),
    "cond": lambda f: lambda a, b, n: jax.lax.cond(n > 0, f, _apart, a, b),
    "scan": lambda f: lambda a, b, n: jax.lax.scan(lambda c, _: (f(*c), None), (a, b), length=3)[0],
    "scan over": lambda f: lambda a, b, n: jax.lax.scan(lambda c, x: (c, f(*x)), n, (a[None], b[None]))[1],
    "while": lambda f: lambda a, b, n: jax.lax.fori_loop(0, n, lambda _, c: f(*c), (a, b)),
}


@pytest.mark.parametrize("name", WITHIN)
def test_looks_into_programs_within_the_program(name):
    assert coupling(_of_pairs(WITHIN[name](_apart)), VECTOR, {}) == ""
    assert coupling(_of_pairs(WITHIN[name](_exchanged)), VECTOR, {}) == UPDATE


def _late(a, b, n):  # in the second round b is what a was in the first
    return jax.lax.scan(lambda c, _: ((c[0], c[1] + c[2], c[0]), None), (a, b, jnp.zeros_like(a)), length=2)[0][:2]


def _until(a, b, n):
    return jax.lax.while_loop(lambda c: jnp.sum(c[0]) < 9, lambda c: (c[0] + 1, 2 * c[1]), (a, b))


HIDDEN = {
    "a branch by the value of the other": lambda a, b, n: jax.lax.cond(a[0] > 0, _apart, lambda a, b: (a, b), a, b),
    "as long as the other is small": _until,
    "in the second round": _late,
    "an operation of which nothing is known": lambda a, b, n: jax.lax.sort([a, b], num_keys=1),
}


@pytest.mark.parametrize("name", HIDDEN)
def test_finds_what_decides(name):
    assert coupling(_of_pairs(HIDDEN[name]), VECTOR, {}) == UPDATE


_times = lambda grads, others: [grad * other for grad, other in zip(grads, others[::-1], strict=True)]
WAYS = {
    "gradients, a step later": (lambda p: [*map(jnp.zeros_like, p)], lambda grads, last, params: (last, grads[::-1])),
    "parameters": (lambda params: (), lambda grads, state, params: (_times(grads, params), state)),
    "where the parameters began": (lambda params: params, lambda grads, start, params: (_times(grads, start), start)),
}


@pytest.mark.parametrize("name", WAYS)
def test_finds_what_comes_by_way_of(name):
    assert coupling(optax.with_extra_args_support(optax.GradientTransformation(*WAYS[name])), VECTOR, {}) == UPDATE
