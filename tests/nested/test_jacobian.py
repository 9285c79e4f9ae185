"""Jacobians in the parameters, and their kernels, agree with dense ones, whatever the chunk."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from ..long import some
from ..zoo import STRUCTURE_ALONE, ZOO, assert_close, enable_x64, inexact_leaves, ramp


@pytest.fixture(autouse=True)
def _double():
    with enable_x64(True):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def close(got, want, tolerance=1e-10):
    assert_close(got, want, tolerance)


def product(rows, others=None):
    """The kernel of dense Jacobians of (samples, outputs, n)."""
    rows, others = (jnp.concatenate(list(each)) for each in (rows, rows if others is None else others))
    return rows @ others.conj().T


def doubled(model):
    """The model in double precision; one array at two places stays one."""
    wide = {np.dtype("float32"): np.float64, np.dtype("complex64"): np.complex128}
    known = {}

    def convert(leaf):
        dtype = wide.get(getattr(leaf, "dtype", None))
        return known.setdefault(id(leaf), leaf.astype(dtype)) if dtype else leaf

    return jax.tree.map(convert, model)


def complex_outputs(model, x):
    """Complex numbers, one for each entry of x, of all floating leaves, different in each place."""
    real, imag = jnp.ones_like(x), x
    for place, leaf in enumerate(inexact_leaves(model)):
        for part in (leaf.real, leaf.imag) if jnp.iscomplexobj(leaf) else (leaf,):
            each = jnp.outer(jnp.asarray(part, x.dtype).ravel(), x) + place + 1
            bounded = each / (1 + each**2)
            real, imag = imag + jnp.sum(bounded, axis=0), real * jnp.sum(bounded**2, axis=0)
    return jax.lax.complex(real, imag)


def real_outputs(model, x):
    return complex_outputs(model, x).real


ROUGH = {"bf16 with f32": 5e-2}  # gradients are in the leaves' own dtypes
XS = np.linspace(-1, 1, 10).reshape(5, 2)


@pytest.mark.parametrize("name", some(ZOO, STRUCTURE_ALONE))
def test_jacobians_and_kernels_are_the_dense_ones(name):
    model = doubled(ZOO[name].make())
    layout = ZOO[name].layout(model)
    vector, restructure = nested.real_vector(model, layout)

    @jax.jit
    def run(vector, xs):
        model = restructure(vector)
        pairs = lambda v, x: (lambda y: jnp.concatenate([y.real, y.imag]))(complex_outputs(restructure(v), x))
        dense = jnp.zeros((5, 4, 0), vector.dtype)
        if vector.size:
            dense = jax.vmap(jax.jacrev(pairs), (None, 0))(vector, xs)
        jacobian = nested.parameter_jacobian(complex_outputs, mode="complex", trainable=layout)(model, xs)
        return dense, jacobian, nested.kernel(real_outputs, trainable=layout)(model, xs)

    dense, jacobian, kernel = map(np.asarray, run(vector, XS))
    assert dense.shape == (5, 4, vector.size)
    close(jacobian, dense, ROUGH.get(name, 1e-10))
    close(kernel, product(dense[:, :2]).astype(kernel.dtype), ROUGH.get(name, 1e-10))
    assert kernel.dtype == np.promote_types(vector.dtype, np.float32)


# -- Chunks, modes, forms ----------------------------------------------------------------------------------------------

with enable_x64(True):
    NET = {"a": normal(0, 3), "b": normal(1, 4, 3), "c": normal(2, 2, 4)}
    COMPLEX = {name: jax.lax.complex(leaf, jnp.cos(leaf)) for name, leaf in NET.items()}
    X = normal(3, 7, 3)


def net(model, x):
    return model["c"] @ jnp.tanh(model["b"] @ (x.astype(model["a"].dtype) * model["a"]))


def modulus(model, x):
    return jnp.sum(jnp.abs(net(model, x)) ** 2)


@pytest.mark.parametrize(
    ("f", "model", "mode"),
    [(modulus, COMPLEX, "real"), (net, COMPLEX, "holomorphic")],
    ids=["real scalar of complex", "holomorphic"],
)
def test_every_chunk_gives_the_same(f, model, mode):
    """Some samples, dividing their number and not, and more than there are."""

    @jax.jit
    def run(model, xs):
        whole, other = (nested.parameter_jacobian(f, mode=mode)(model, each) for each in (xs, xs[:4] + 1))
        options = [{"chunk": chunk, "mode": mode} for chunk in (None, 3, 9)]
        jacobians = [nested.parameter_jacobian(f, **each)(model, xs) for each in options[1:]]
        kernels = [nested.kernel(f, **each)(model, xs) for each in options[:2]]
        with_others = [nested.kernel(f, **each)(model, xs, xs[:4] + 1) for each in options[1:]]
        return whole, other, jacobians, kernels, with_others

    whole, other, jacobians, kernels, with_others = jax.tree.map(np.asarray, run(model, X))
    for got in jacobians:
        close(got, whole, 1e-13)
    for got in kernels:
        close(got, product(whole), 1e-12)
        close(got, got.conj().T, 1e-14)
    for got in with_others:
        close(got, product(whole, other), 1e-12)


def test_a_holomorphic_jacobian_is_the_complex_one():
    vector, restructure = tp.ravel(COMPLEX)
    of_vector = jax.vmap(jax.jacrev(lambda v, x: net(restructure(v), x), holomorphic=True), (None, 0))
    modes = jax.jit(lambda: [nested.parameter_jacobian(net, mode=m)(COMPLEX, X) for m in ("holomorphic", "complex")])
    whole, pairs = modes()
    close(whole, jax.jit(of_vector)(vector, X))
    # Cauchy and Riemann: the same as of pairs, of each slot real parts before imaginary ones.
    columns = []
    for start, stop in ((0, 3), (3, 15), (15, 23)):
        slot = np.asarray(whole)[:, :, start:stop]
        columns += [np.concatenate([slot.real, slot.imag], 1), np.concatenate([-slot.imag, slot.real], 1)]
    close(pairs, np.concatenate(columns, axis=2))


class Layer(eqx.Module):
    weight: jax.Array
    shift: jax.Array = tp.field(trainable=False)

    def __call__(self, x):
        return jnp.tanh(self.weight @ x["in"] + self.shift) * x["scale"]


@pytest.mark.parametrize("scalar", [False, True])
def test_models_samples_and_outputs_of_any_form(scalar):
    """Samples are a tree; an output is a number, or keeps its entries in order of a matrix."""
    layer, xs = Layer(normal(0, 2, 3), normal(1, 2)), {"in": X, "scale": np.arange(7.0)}
    f = lambda layer, x: layer(x)[0] if scalar else jnp.outer(layer(x), x["in"][:2])
    by_hand = lambda weight, x: f(Layer(weight, layer.shift), x).reshape(-1)
    want = jax.jit(jax.vmap(jax.jacrev(by_hand), (None, 0)))(layer.weight, xs).reshape(7, -1, 6)
    assert want.shape[1] == (1 if scalar else 4)
    both = jax.jit(lambda *args: (nested.parameter_jacobian(f)(*args), nested.kernel(f)(*args)))
    jacobian, kernel = both(layer, xs)
    close(jacobian, want)
    close(kernel, product(want))


@pytest.mark.parametrize("chunk", [None, 2])
@pytest.mark.parametrize("mode", ["real", "complex", "holomorphic"])
def test_nothing_in_nothing_out(mode, chunk):
    model, n = {"real": (NET, 23), "complex": (COMPLEX, 46), "holomorphic": (COMPLEX, 23)}[mode]
    outputs, dtype = 4 if mode == "complex" else 2, complex if mode == "holomorphic" else float
    frozen, none = tp.layout(model, freeze="**"), lambda model, x: net(model, x)[:0]

    def shape(method, f, *samples, trainable=None):
        call = lambda *samples: method(f, mode=mode, chunk=chunk, trainable=trainable)(model, *samples)
        got = jax.eval_shape(call, *samples)
        assert got.dtype == dtype
        return got.shape

    assert shape(nested.parameter_jacobian, net, X[:0]) == (0, outputs, n)
    assert shape(nested.parameter_jacobian, none, X) == (7, 0, n)
    assert shape(nested.parameter_jacobian, net, X, trainable=frozen) == (7, outputs, 0)
    assert shape(nested.kernel, net, X, trainable=frozen) == (7 * outputs, 7 * outputs)
    assert shape(nested.kernel, net, X[:0]) == (0, 0)
    assert shape(nested.kernel, net, X[:0], X) == (0, 7 * outputs)
    assert shape(nested.kernel, net, X, X[:0]) == (7 * outputs, 0)
    assert shape(nested.kernel, none, X) == (0, 0)


def test_nothing_trained_one_sample_and_other_outputs():
    frozen, f = tp.layout(NET, freeze="**"), lambda model, x: jnp.sum(model["b"]) * x

    @jax.jit
    def run(model, xs):
        one = nested.kernel(net)(model, xs[:1]), nested.parameter_jacobian(net)(model, xs[:1])
        untouched = nested.kernel(net, trainable=frozen)(model, xs)
        return one, untouched, [nested.kernel(f, chunk=chunk)(model, xs, xs[:3, :2]) for chunk in (None, 2)]

    (kernel, jacobian), untouched, others = run(NET, X)
    close(kernel, product(jacobian))
    assert not np.any(untouched)
    for got in others:  # each entry of x is an output, of which those on the right are fewer
        close(got, 12 * jnp.outer(X.ravel(), X[:3, :2].ravel()))


def test_more_outputs_than_parameters_have_the_same_dtype_and_rows():
    model = {"w": ramp(2), "b": ramp(1)}
    f = lambda model, x: jnp.outer(x, model["w"].astype(x.dtype) ** 2) + model["b"].astype(x.dtype)[:, None]

    @jax.jit
    def run(model, xs):
        dense = jax.vmap(jax.jacrev(lambda w, x: f(model | {"w": w}, x)), (None, 0))(model["w"], xs)
        jacobians = [nested.parameter_jacobian(f, chunk=chunk)(model, xs) for chunk in (None, 2)]
        one_output = nested.parameter_jacobian(lambda model, x: f(model, x)[0, 0])(model, xs)
        return dense.reshape(7, 6, 2), jacobians, one_output, nested.kernel(f)(model, xs)

    want, jacobians, one_output, kernel = run(model, X)
    for got in jacobians:
        assert got.dtype == one_output.dtype == jnp.float32
        np.testing.assert_allclose(got[:, :, 1:], want, 1e-6)
        np.testing.assert_array_equal(got[:, :, 0], 1)
    close(kernel, product(jacobians[0]), 1e-6)


def test_products_of_half_precision_are_summed_in_single_precision():
    model = {"w": ramp(512, dtype=jnp.bfloat16), "b": ramp(2)}
    f = lambda model, x: jnp.sum(model["w"]).astype(jnp.float32) * x + jnp.sum(model["b"])
    kernel = jax.jit(nested.kernel(f))(model, ramp(3, start=1.0))
    assert kernel.dtype == jnp.float32
    rows = np.asarray(ramp(3, start=1.0).astype(jnp.bfloat16), np.float64)
    np.testing.assert_allclose(kernel, 512 * np.outer(rows, rows) + 2, 1e-6)
    of_half = nested.kernel(lambda model, x: jnp.sum(model["w"]) * x)
    half = jax.eval_shape(of_half, {"w": model["w"]}, ramp(3).astype(jnp.bfloat16))
    assert half.dtype == jnp.float32


def test_samples_are_keys_or_indices():
    noisy = lambda model, key: jnp.sum(model["a"] * jax.random.normal(key, (3,)))
    chosen = lambda model, i: model["b"][i]

    @jax.jit
    def run(keys, places):
        rows = jax.vmap(lambda key: jax.random.normal(key, (3,)))(keys)
        kernels = [nested.kernel(chosen, chunk=chunk)(NET, places) for chunk in (None, 2)]
        return (
            rows,
            nested.parameter_jacobian(noisy, chunk=2, trainable="a")(NET, keys),
            nested.kernel(noisy, chunk=2)(NET, keys),
            kernels,
        )

    rows, jacobian, kernel, kernels = run(jax.random.split(jax.random.key(0), 5), np.array([0, 3, 3]))
    close(jacobian[:, 0], rows)
    close(kernel, rows @ rows.T)
    for got in kernels:
        close(got, np.kron([[1.0, 0, 0], [0, 1, 1], [0, 1, 1]], np.eye(3)))


# -- Under transformations ---------------------------------------------------------------------------------------------


def test_under_vmap_and_grad():
    vector, restructure = tp.ravel(NET)
    vectors, some = jnp.stack([vector, 2 * vector]), X[:3]
    jacobian = lambda v: nested.parameter_jacobian(net, chunk=2)(restructure(v), some)
    kernel = lambda v: nested.kernel(net, chunk=2)(restructure(v), some)
    dense = lambda v: jax.vmap(jax.jacrev(lambda v, x: net(restructure(v), x)), (None, 0))(v, some)
    loss = lambda jacobian, kernel: jnp.sum(jnp.sin(jacobian)) + jnp.sum(jnp.cos(kernel))

    @jax.jit
    def run(vectors):
        return (
            jax.vmap(dense)(vectors),
            jax.vmap(lambda v: (jacobian(v), kernel(v)))(vectors),
            jax.grad(lambda v: loss(jacobian(v), kernel(v)))(vectors[0]),
            jax.grad(lambda v: loss(dense(v), product(dense(v))))(vectors[0]),
        )

    want, (jacobians, kernels), gradient, by_hand = run(vectors)
    close(jacobians, want)
    close(kernels, jnp.stack([product(each) for each in want]))
    assert np.abs(by_hand).min() > 0
    close(gradient, by_hand)


def test_what_fills_up_a_chunk_is_a_sample():
    """And no zeros, of which f may have no value; a gradient would be NaN."""
    f = lambda model, x: jnp.sin(jnp.sum(model["a"] * x)) * jnp.log(jnp.sum(x**2))
    xs = X[:3]
    dense = lambda a: jax.vmap(lambda x: jax.grad(lambda a: f({"a": a}, x))(a))(xs)
    total = lambda kernel: lambda a: jnp.sum(jnp.sin(kernel(a)))
    want = jax.jit(jax.grad(total(lambda a: dense(a) @ dense(a).T)))(NET["a"])
    close(jax.jit(jax.grad(total(lambda a: nested.kernel(f, chunk=2)({"a": a}, xs))))(NET["a"]), want)


# -- Errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [nested.parameter_jacobian, nested.kernel])
def test_errors(method, without_type_checks):
    with pytest.raises(ValueError, match="mode must be 'real', 'complex' or 'holomorphic', got 'imaginary'"):
        method(net, mode="imaginary")(NET, X)
    with pytest.raises(TypeError, match=r"f returns complex128; mode='complex' gives the derivatives of its real and"):
        method(net)(COMPLEX, X)
    with pytest.raises(TypeError, match=r"'holomorphic' needs complex outputs, and f returns float64; use mode='real'"):
        method(modulus, mode="holomorphic")(COMPLEX, X)
    some_real, square = COMPLEX | {"a": NET["a"]}, lambda model, x: model["b"][0] ** 2
    with pytest.raises(TypeError, match=r"'holomorphic' needs complex parameters, and 'a' is float64; freeze it, or"):
        method(square, mode="holomorphic")(some_real, X)
    jax.eval_shape(method(square, mode="holomorphic", trainable=["b", "c"]), some_real, X[:1])
    for chunk in (0, -1, 2.5, True, "all"):
        with pytest.raises(
            ValueError, match=f"chunk must be a whole number of (samples|rows), at least 1, got {chunk!r}"
        ):
            method(net, chunk=chunk)(NET, X)
    with pytest.raises(ValueError, match=r"arrays with one leading axis in common, got shapes \[\(7, 3\), \(2, 3\)\]"):
        method(net)(NET, {"x": X, "y": X[:2]})
    with pytest.raises(ValueError, match=r"arrays with one leading axis in common, got shapes \[\(\)\]"):
        method(net)(NET, jnp.float32(1))
    with pytest.raises(ValueError, match=r"arrays with one leading axis in common, got shapes \[\]"):
        method(net)(NET, None)
    with pytest.raises(TypeError, match=r"expected f to return a floating or complex array, got int64\[3\]"):
        method(lambda model, x: jnp.arange(3))(NET, X)
    with pytest.raises(TypeError, match="expected f to return a floating or complex array, got tuple"):
        method(lambda model, x: (net(model, x),))(NET, X)
    with pytest.raises(ValueError, match="'missing'"):
        method(net, trainable="missing")(NET, X)


def test_errors_of_others():
    with pytest.raises(ValueError, match=r"arrays with one leading axis in common, got shapes \[\(7, 3\), \(2, 3\)\]"):
        nested.kernel(net)(NET, X, {"x": X, "y": X[:2]})
    with pytest.raises(ValueError, match=r"expected a vector of 23 elements, .* got an array of shape \(22,\)"):
        nested.linearised(net)(NET, jnp.ones(22), X[0])
    with pytest.raises(ValueError, match="entry at 'x', where the model has no leaf"):
        nested.linearised(net)(NET, {"x": jnp.ones(2)}, X[0])
