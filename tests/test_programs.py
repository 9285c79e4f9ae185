"""Random programs through `tp.moved` and `tp.reached`: parameters that change, or have a derivative, are all found.

To name a parameter that does not move is allowed. To leave out one that moves is a fault.
"""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.extend.core import jaxpr_as_fun

import treeparams as tp

from .long import some

SHAPE = (3, 2)
DTYPES = {"a": jnp.float32, "b": jnp.float16, "c": jnp.float32, "d": jnp.bfloat16}
THIRDS = np.arange(1, 7).reshape(SHAPE) / 3  # rounded by each narrower dtype
MODEL = {name: jax.device_put((THIRDS + i).astype(dtype)) for i, (name, dtype) in enumerate(DTYPES.items())}
X = np.linspace(-1, 1, 6, dtype=np.float32).reshape(SHAPE)


with_jvp = jax.custom_jvp(lambda x: 1 * x)
with_jvp.defjvp(lambda primals, tangents: (with_jvp(*primals), 2 * tangents[0]))


def with_vjp(kept):
    rule = jax.custom_vjp(lambda x: 1 * x)
    rule.defvjp(lambda x: (1 * x, None), lambda _, cotangent: (kept * cotangent,))
    return rule


def in_a_ref(f, v):
    ref = jax.new_ref(v)
    ref[...] = f(ref[...])
    return ref[...]


def lagging(f, v):
    """The rows of an array, each in the round after its own."""
    (last, _), rows = jax.lax.scan(lambda carry, row: ((f(row), carry[0]), carry[1]), (v[0], v[1]), v)
    return rows + 0 * jnp.broadcast_to(last, rows.shape)


def row_by_row(f, v):
    ref = jax.new_ref(jnp.zeros_like(v))

    def body(i, carry):
        ref[i] = f(v[i])
        return carry

    jax.lax.fori_loop(0, 3, body, 0)
    return ref[...]


each = lambda f, v: jax.lax.scan(lambda carry, row: (carry, f(row)), 0, v)[1]
backwards = lambda f, v: jax.lax.scan(lambda carry, row: (row, f(row)), v[0], v, reverse=True)[1]
partly = lambda f, v: jnp.concatenate([each(f, v[:2]), v[2:]])


def of_rows(way, f):
    """Leaves a single row as it is."""
    return lambda v: way(f, v) if v.ndim > 1 else v


def choice(seed):
    """Returns a random function of arrays of the shape that keeps shape and dtype of its first operand."""
    rng = np.random.default_rng(seed)

    def any_of(depth):
        f, g = [any_of(depth - 1) if depth else lambda v: v for _ in range(2)]
        narrow = [jnp.float16, jnp.bfloat16, jnp.float32][rng.integers(3)]
        number = [0, 1, 1.5][rng.integers(3)]
        ways = [
            lambda v: f(v),
            lambda v: f(g(v)),
            lambda v: f(v.astype(narrow)).astype(v.dtype),
            lambda v: f(v) + jnp.zeros_like(v),
            lambda v: f(v) * jnp.asarray(number, v.dtype),
            lambda v: jax.jit(f)(v),
            lambda v: jax.checkpoint(f)(v),
            lambda v: with_jvp(f(v)),
            lambda v: with_vjp(number)(f(v)),
            of_rows(each, f),
            of_rows(backwards, f),
            of_rows(lagging, f),
            of_rows(partly, f),
            lambda v: in_a_ref(f, v),
            of_rows(row_by_row, f),
            lambda v: jax.lax.cond(jnp.sum(v) > 0, f, g, v),
            lambda v: jax.lax.fori_loop(0, 2, lambda i, u: f(u), v),
            lambda v: jnp.ldexp(f(v), 0),
            lambda v: jnp.where(v > 1, f(v), g(v)),
            lambda v: jax.lax.stop_gradient(f(v)) + 0 * v,
            lambda v: f(v)[::-1],
            lambda v: jnp.concatenate([f(v)[:1], f(v)[1:]]),
        ]
        return ways[rng.integers(len(ways))]

    return rng, any_of


def a_step(seed):
    """Returns a random step: each parameter becomes a function of one of them, mostly of itself."""
    rng, any_of = choice(seed)
    sources = {name: name if rng.random() < 0.7 else str(rng.choice([*DTYPES])) for name in DTYPES}
    functions = {name: any_of(2) for name in DTYPES}
    return lambda m: {name: functions[name](m[sources[name]]).astype(DTYPES[name]) for name in DTYPES}


def a_loss(seed):
    """Returns a random loss of some of the parameters."""
    rng, any_of = choice(seed)
    used = [name for name in DTYPES if rng.random() < 0.7]
    functions = {name: any_of(2) for name in used}
    cut = jax.lax.stop_gradient if rng.random() < 0.3 else lambda v: v
    return lambda m: sum((jnp.sum(cut(functions[n](m[n])).astype(jnp.float32) * X) for n in used), jnp.zeros(()))


blocks = pytest.mark.parametrize("block", some(range(200), range(1, 200)))


def drawn(make, block):
    """Ten random functions by their seeds."""
    return {seed: make(seed) for seed in range(10 * block, 10 * block + 10)}


@pytest.mark.usefixtures("standard_promotion")
@blocks
def test_what_changes_is_found(block):
    steps = drawn(a_step, block)
    results = jax.jit(lambda m: {seed: step(m) for seed, step in steps.items()})(MODEL)
    for seed, after in results.items():
        changed = {name for name in MODEL if np.asarray(MODEL[name]).tobytes() != np.asarray(after[name]).tobytes()}
        assert changed <= set(tp.moved(steps[seed])(MODEL).paths), seed


@pytest.mark.usefixtures("standard_promotion")
@blocks
def test_what_has_a_derivative_is_found(block):
    found, gradients = {}, {}
    for seed, loss in drawn(a_loss, block).items():
        found[seed] = set(tp.reached(loss)(MODEL).paths)
        # A few that write to refs have none; JAX 0.10 loses them in a checkpoint.
        with contextlib.suppress(NotImplementedError, KeyError):
            gradients[seed] = jaxpr_as_fun(jax.make_jaxpr(jax.grad(loss))(MODEL))
    assert len(gradients) > 5
    results = jax.jit(lambda m: {seed: dict(zip(m, f(*m.values()), strict=True)) for seed, f in gradients.items()})(
        MODEL
    )
    for seed, grads in results.items():
        assert {name for name in MODEL if np.asarray(grads[name]).any()} <= found[seed], seed
