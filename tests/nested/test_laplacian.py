"""The forward Laplacian is the trace of the Hessian, whatever the function is made of."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested
from treeparams.nested import _inputs

from ..long import some
from ..zoo import assert_close, enable_x64, filled, flops

A = np.cos(np.arange(12.0)).reshape(3, 4)
IMAGE = np.sin(np.arange(18.0)).reshape(1, 2, 3, 3)
WHERE = np.array([True, False, True, True])
PLACES = np.array([2, 0, 3])


def _positive(x):
    return jnp.sum(x**2, keepdims=True) + x**2 + 0.5


def _within(x):
    return 0.4 * jnp.sin(x) + 0.1 * x[0]


@jax.custom_jvp
def _flipped_rule(x):
    return x**2


@jax.custom_jvp
def _inner(x):
    return jax.nn.relu(x) * x


@jax.custom_jvp
def _outer(x):
    return _inner(x)


# One is not elementwise, as its function is; one calls a function with a rule, and itself.
_flipped_rule.defjvp(lambda primals, tangents: (_flipped_rule(*primals), primals[0][0] * jnp.flip(tangents[0])))
_inner.defjvp(lambda primals, tangents: (_inner(*primals), 2 * _inner(*primals) * tangents[0]))
_outer.defjvp(lambda primals, tangents: (_outer(*primals), _outer(*primals) * tangents[0]))
_UNARY = {
    "acos": _within, "acosh": lambda x: 1 + _positive(x), "asin": _within, "asinh": None, "atan": None,
    "atanh": _within, "cbrt": _positive, "cos": None, "cosh": None, "digamma": _positive, "erf": None,
    "erf_inv": _within, "erfc": None, "exp": None, "exp2": None, "expm1": None, "lgamma": _positive, "log": _positive,
    "log1p": _positive, "logistic": None, "rsqrt": _positive, "sin": None, "sinh": None, "sqrt": _positive,
    "square": None, "tan": _within, "tanh": None,
}  # fmt: skip


def _unary(name):
    inner = _UNARY[name]
    return lambda x: getattr(jax.lax, name)(A @ x if inner is None else inner(x))


EVERY_TIME = {name: _unary(name) for name in ("tanh", "sqrt")} | {
    "integer powers": lambda x: (A @ x) ** 3 + x[:3] ** -2,
    "powers of two series": lambda x: _positive(x)[:3] ** (A @ x),
    "quotients": lambda x: (A @ x) / (2 + jnp.sin(x[:3])) + x[:3] / 3 + 1 / _positive(x)[:3],
    "gelu": lambda x: jax.nn.gelu(A @ x),
    "scalars": lambda x: jnp.sin(x[0] * x[1]) * jnp.exp(x[2]) + x[3],
    "chains with two ends": lambda x: jnp.sin(A @ x) + (lambda y: jnp.exp(y) * jnp.cos(y) + jnp.flip(y**2))(A @ x),
    "the same jitted function on itself": lambda x: _jitted(_jitted(A @ x)) + _jitted(A @ x),
    "sums": lambda x: jnp.sum(jnp.outer(x, x**2), 1) - jnp.cumsum(x**3) + jnp.sum(x) ** 2,
    "shapes": lambda x: jnp.transpose(jnp.reshape(jnp.tile(x**2, 3), (3, 4)))[:, ::-1].ravel() + 1,
    "joins and splits": lambda x: jnp.concatenate([*jnp.split(jnp.sin(x), 2), jnp.pad(x**2, (1, 2))]),
    "a choice": lambda x: jnp.where(WHERE, x**2, jnp.sin(x)) * jnp.where(x > 0.6, x, 2.0),
    "extremes": lambda x: jnp.max(x**2) * jnp.min(jnp.sin(x)) + jnp.maximum(x, 0.7) ** 2 * jnp.minimum(x**3, x)
    + jax.lax.clamp(0.1, x**2, 0.9) + jnp.abs(x - 0.5) * x,
    "sorting": lambda x: jnp.sort(jnp.sin(3 * x)) ** 2,
    "indices": lambda x: (x**2)[PLACES] * jnp.zeros(3).at[PLACES % 2].add(x[:3] ** 2)
    + jnp.ones(3).at[1].set(x[0] ** 3),
    "slices at": lambda x: jax.lax.dynamic_slice(x**2, (PLACES[1],), (3,))
    * jax.lax.dynamic_update_slice(x[:3], x[2:] ** 2, (PLACES[1],)),
    "windows": lambda x: jax.lax.reduce_window(x**2, np.array(0.0, x.dtype), jax.lax.add, (2,), (1,), "VALID"),
    "matrix products": lambda x: jnp.outer(x, x**2) @ jnp.outer(jnp.sin(x), x) @ A.T,
    "batched products": lambda x: jnp.einsum("bi,bij->bj", _table(x), jnp.stack([_table(x).T] * 2)),
    "convolutions": lambda x: jax.lax.conv(IMAGE, jnp.reshape(x, (1, 2, 1, 2)) ** 2, (1, 1), "SAME"),
    "a number": lambda x: 3.0,
    "a jitted number": lambda x: jax.jit(lambda x: 2.0)(x),
    "no dependence, later": lambda x: jax.lax.stop_gradient(x**2) + jnp.floor(x) * 0 + jnp.sign(x),
    "precision": lambda x: jax.lax.reduce_precision(x**2, 11, 52) + (x**2).astype(jnp.float64).astype(x.dtype),
    "a rule for jvp": lambda x: _outer(jnp.sin(3 * x)),
    "a flipped rule for jvp": _flipped_rule,
    "entropy": lambda x: jax.scipy.special.entr(jnp.abs(x)),
    "checkpoint": lambda x: jax.checkpoint(lambda y: jnp.tanh(A @ y) * y[:3])(x),
    "softmax": lambda x: jax.nn.log_softmax(x**2) + jax.nn.logsumexp(x),
    "empty": lambda x: x[:0] ** 2,
    "waves": lambda x: jnp.real(jnp.exp(_complex(x[1:], A @ x)) * jnp.conj(_complex(x[:3], x[1:])))
    + jnp.imag(1 / _complex(x[:3], 2 + x[1:])),
    "complex results": lambda x: jnp.log(_complex(2 + x[1:], A @ x)) * jnp.exp(_complex(x[:3] ** 2, x[1:])),
}  # fmt: skip
LONG_CASES = {name: _unary(name) for name in _UNARY if name not in EVERY_TIME} | {
    "real powers": lambda x: _positive(x) ** 1.7,
    "atan2": lambda x: jnp.arctan2(A @ x, x[:3]),
    "products": lambda x: (A @ x) * x[:3] * jnp.cumsum(x)[:3] * 2,
    "relu": lambda x: jax.nn.relu(A @ x) ** 2,
    "elu": lambda x: jax.nn.elu(A @ x),
    "broadcast against each other": lambda x: jnp.outer(x, jnp.sin(x)) / jnp.outer(1 + x**2, jnp.ones(4)) ** x[:, None],
    "a scalar with an array": lambda x: jax.lax.pow(_positive(x), jnp.sum(x)) * jax.lax.div(x**3, jnp.sum(x**2)),
    "convolutions by itself": lambda x: jnp.convolve(jnp.sin(x), x**2),
    "Fourier": lambda x: jnp.abs(jnp.fft.fft(x**2)) ** 2 + jnp.fft.irfft(jnp.fft.rfft(x**3), 4),
    "complex chains": lambda x: jnp.log(jnp.abs(jnp.sin(_complex(x, x**2)) ** 2 + 3)),
}  # fmt: skip

_jitted, _complex = jax.jit(lambda y: jnp.tanh(y) * y), jax.lax.complex


def _table(x):
    return jnp.reshape(x, (2, 2)) ** 3


def _of(f):
    return lambda model, x: f(x)


def _by_hessian(f, x):
    """The value, the Jacobian and the trace."""

    def slope(x):
        jacobian, y = jax.jacfwd(lambda x: (f(x),) * 2, has_aux=True)(x)
        return jacobian, (y, jacobian)

    hessian, (y, jacobian) = jax.jacfwd(slope, has_aux=True)(x)
    return y, jacobian, jnp.trace(hessian.reshape(*jnp.shape(y), x.size, x.size), axis1=-2, axis2=-1)


X = np.array([0.3, 0.9, -0.4, 0.55])
CASES = EVERY_TIME | LONG_CASES


@pytest.mark.parametrize("name", some(CASES, LONG_CASES))
def test_it_is_the_trace(name):
    """With the value and the Jacobian."""
    f = CASES[name]
    with enable_x64(True):
        got, want = jax.jit(lambda x: (nested.input_laplacian(_of(f), full=True)(None, x), _by_hessian(f, x)))(X)
    for each, by_hessian in zip(got, want, strict=True):
        np.testing.assert_allclose(each, by_hessian, 1e-11, 1e-11)
        assert jnp.shape(each) == jnp.shape(by_hessian)


# -- Beyond the rules


def _scanned(x):
    return jax.lax.scan(lambda carry, row: (jnp.tanh(carry * (row @ x)), carry), x[0], jnp.asarray(A, x.dtype))[1]


OTHERS = {
    "scan": _scanned,
    "cond": lambda x: jax.lax.cond(x[0] > 0, lambda x: x**3, jnp.sin, x),
    "cumprod": lambda x: jnp.cumprod(x**2),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_rule_is_exact_and_named(name):
    f = OTHERS[name]
    with enable_x64(True), pytest.warns(UserWarning, match=f"no rule for {name}: the result is exact, but"):
        got, want = jax.jit(lambda x: (nested.input_laplacian(_of(f))(None, x), _by_hessian(f, x)[2]))(jnp.asarray(X))
    np.testing.assert_allclose(got, want, 1e-10, 1e-12)


def test_the_branch_not_taken_has_no_say():
    x = jnp.array([-1.0, 2.0, 0.0])
    cases = [
        (lambda x: jnp.where(x > 0, jnp.sqrt(x), x**3), -6 - 0.25 * 2.0**-1.5),  # no slope below zero, infinite there
        (lambda x: jnp.where(x > 0, jnp.sqrt(x), 2 * x), -0.25 * 2.0**-1.5),
        (lambda x: jnp.where(x[2] > 0, jnp.sqrt(x[2]), x[2] ** 2), 2.0),
    ]
    run = jax.jit(lambda x: [nested.input_laplacian(lambda _, x, f=f: jnp.sum(f(x)))(None, x) for f, _ in cases])
    np.testing.assert_allclose(run(x), [want for _, want in cases], 1e-6)


def test_a_chain_with_many_ends_is_traced_in_linear_time(monkeypatch):
    monkeypatch.setattr(_inputs, "_LONGEST", 6)

    def size(count):
        def of(model, x):
            ends = [x := jnp.sin(x) for _ in range(count)]
            return sum(map(jnp.sum, ends))

        return len(jax.make_jaxpr(lambda x: nested.input_laplacian(of)(None, x))(jnp.ones(2)).eqns)

    assert size(24) < 2.3 * size(12)


def test_its_gradient_and_curvature_are_those_of_the_trace():
    mlp = filled(eqx.nn.MLP, 3, "scalar", 3, 1, lambda x: x * jnp.tanh(x))
    params, rest = tp.partition(mlp, "!layers.1.bias")
    x, direction = np.sin(np.arange(6, dtype=np.float32)).reshape(2, 3), np.ones(rest.layout.size, np.float32)

    @jax.jit
    def both(params, x):
        found = []
        for laplacian in (nested.input_laplacian(lambda m, x: m(x)), lambda m, x: jnp.trace(jax.hessian(m)(x))):
            loss = lambda m, x, of=laplacian: jnp.mean((jax.vmap(of, (None, 0))(m, x) - jax.vmap(m)(x)) ** 2)
            gradient = lambda params, loss=loss: tp.grad(loss, rest.layout)(tp.combine(params, rest), x)
            tangent = tp.partition(tp.ravel(tp.combine(params, rest), rest.layout)[1](direction), rest.layout)[0]
            found.append(jax.jvp(gradient, (params,), (tangent,)))
        return found

    assert_close(*both(params, x), 2e-5)


def test_of_other_arguments_shapes_and_dtypes():
    of_many = nested.input_laplacian(lambda model, x, t: model["w"] * jnp.sum(x**2, 1) * t)
    cube = nested.input_laplacian(lambda model, x: jnp.sum(x**3))
    of_wide = nested.input_laplacian(lambda model, x: jnp.sum(jnp.sin(x.astype(jnp.float32)) ** 2))
    ones = jnp.ones(4, jnp.bfloat16)
    got = tp.jit(of_many)({"w": jnp.float32(2), "n": 3}, jnp.ones((3, 2)), jnp.float32(5))
    half, wide, number = jax.jit(lambda: (cube(None, ones), of_wide(None, ones), cube(None, 2.0)))()
    np.testing.assert_allclose(got, [40.0, 40, 40])
    assert (half.dtype, wide.dtype, half, number) == (jnp.bfloat16, jnp.float32, 24, 12)
    np.testing.assert_allclose(wide, 8 * np.cos(2), 1e-2)
    own = nested.input_laplacian(lambda model, x: model, full=True)(jnp.float32(3), jnp.ones(2))
    assert [(each.shape, float(each.sum())) for each in own] == [((), 3), ((2,), 0), ((), 0)]


def _of_mlp(activation, laplacian):
    """The function and its arguments."""
    mlp = filled(eqx.nn.MLP, 10, "scalar", 64, 3, activation)
    params, static = eqx.partition(mlp, eqx.is_array)
    f = lambda params, x: eqx.combine(params, static)(x)
    return jax.vmap(laplacian(f), (None, 0)), params, jnp.ones((16, 10))


def test_half_the_operations_of_the_trace():
    trace = lambda f: lambda params, x: jnp.trace(jax.hessian(f, 1)(params, x))
    assert flops(*_of_mlp(jax.nn.gelu, nested.input_laplacian)) < 0.56 * flops(*_of_mlp(jax.nn.gelu, trace))


def test_an_activation_of_many_equations_takes_the_memory_of_one():
    def memory(activation):
        f, *args = _of_mlp(activation, nested.input_laplacian)
        return jax.jit(f).lower(*args).compile().memory_analysis().temp_size_in_bytes

    assert memory(jax.nn.gelu) < 1.3 * memory(jnp.tanh)


_backward = jax.custom_vjp(lambda x: x**2)
_backward.defvjp(lambda x: (x**2, x), lambda x, g: (2 * x * g,))
_KIND = "expected f to return a floating or complex array, got "
ERRORS = [
    (lambda x: x**2, jnp.arange(3), "expected x to be real and floating, got int32"),
    (lambda x: x**2, [1.0], "expected an array for x, got list"),
    (lambda x: {"y": x}, jnp.ones(3), _KIND + "dict"),
    (lambda x: jnp.arange(3), jnp.ones(3), _KIND + r"int32\[3\]"),
    (_backward, jnp.ones(2), "f calls a function with a rule for vjp alone"),
]


def test_errors():
    for f, x, words in ERRORS:
        with pytest.raises(TypeError, match=words):
            nested.input_laplacian(_of(f))(None, x)
