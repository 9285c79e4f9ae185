"""Derivatives in the parameters, sample by sample, and kernels of them, are the dense ones, whatever the chunk."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from ..long import some
from ..zoo import ZOO, Specimen, assert_close, enable_x64, inexact_leaves, ramp


@pytest.fixture(autouse=True)
def _double():
    with enable_x64(True):
        yield


def normal(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


close = functools.partial(assert_close, tolerance=1e-10)


def product(rows, others=None):
    """The kernel of dense Jacobians of (samples, outputs, n)."""
    flat = lambda each: each.reshape(each.shape[0] * each.shape[1], each.shape[2])  # of no parameters, too
    rows, others = map(flat, (rows, rows if others is None else others))
    return rows @ others.conj().T


def doubled(model):
    """The model in double precision; one array at two places stays one."""
    wide = {np.dtype("float32"): np.float64, np.dtype("complex64"): np.complex128}
    put = lambda leaf: np.asarray if isinstance(leaf, np.ndarray) else jax.device_put
    cast = lambda leaf: put(leaf)(np.asarray(leaf).astype(wide[leaf.dtype]))  # by NumPy, which compiles nothing
    known = {id(leaf): cast(leaf) for leaf in inexact_leaves(model) if leaf.dtype in wide}
    return jax.tree.map(lambda leaf: known.get(id(leaf), leaf), model)


def complex_outputs(model, x):
    """Complex numbers, one for each entry of x, of all floating leaves, different in each place."""
    pairs = [[leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf] for leaf in inexact_leaves(model)]
    parts = [part for pair in pairs for part in pair]
    # Joined first: XLA takes 20 ms for each loop in a program.
    joined = jnp.concatenate([np.zeros(0, x.dtype), *[jnp.asarray(part, x.dtype).ravel() for part in parts]])
    places = np.repeat(np.arange(1, len(parts) + 1, dtype=x.dtype), [part.size for part in parts])[:, None]
    each = jnp.outer(joined, x) + places
    bounded = each / (1 + each**2)
    return jax.lax.complex(1 + jnp.sum(bounded * np.cos(places), 0), x + jnp.sum(bounded**2 * places, 0))


with enable_x64(True):
    NET = {"a": normal(0, 3), "b": normal(1, 4, 3), "c": normal(2, 2, 4)}
    COMPLEX = {name: jax.device_put(np.asarray(leaf) + 1j * np.cos(leaf)) for name, leaf in NET.items()}
    X = normal(3, 7, 3)
    LAYER = {"shift": normal(1, 2), "weight": normal(0, 2, 3)}


def net(model, x):
    return model["c"] @ jnp.tanh(model["b"] @ (x.astype(model["a"].dtype) * model["a"]))


def modulus(model, x):
    return jnp.sum(jnp.abs(net(model, x)) ** 2)


def matrix(layer, x):
    y = jnp.tanh(layer["weight"] @ x["in"] + layer["shift"]) * x["scale"]
    return jnp.outer(y, x["in"][:2])


def outer(model, x):
    return jnp.outer(x, model["w"].astype(x.dtype) ** 2) + model["b"].astype(x.dtype)[:, None]


def noisy(model, key):
    return jnp.sum(model["a"] * jax.random.normal(key, (3,)))


def mixed(model, x):
    return jnp.tanh(x @ model["b"]) * jnp.sum(model["a"].astype(x.dtype) ** 2)


NARROW = {"b": ramp(1), "w": ramp(2)}
keys = lambda: jax.random.split(jax.random.key(0), 5)
CASES = {  # f, its mode, the model, and samples, whose number no chunk divides
    **{name: (complex_outputs, "complex", each, np.linspace(-1, 1, 10).reshape(5, 2)) for name, each in ZOO.items()},
    "real": (modulus, "real", Specimen(lambda: COMPLEX), X),
    "holomorphic": (net, "holomorphic", Specimen(lambda: COMPLEX), X),
    "matrices": (matrix, "real", Specimen(lambda: LAYER, {"freeze": "shift"}), {"in": X, "scale": np.arange(1.0, 8)}),
    "keys": (noisy, "real", Specimen(lambda: NET), keys),
    "indices": (lambda model, i: model["b"][i], "real", Specimen(lambda: NET), np.array([0, 3, 3, 1])),
    "more outputs than parameters": (outer, "real", Specimen(lambda: NARROW), X),
    "mixed widths": (mixed, "real", Specimen(lambda: {"a": ramp(3), "b": NET["a"]}), X),
}
# Gradients are in the leaves' own dtypes.
TOLERANCES = {"bf16 with f32": 5e-2, "more outputs than parameters": 2e-7, "mixed widths": 1e-6}
EVERY_TIME = {"complex", "transposed tie", "empty leaves", "prng keys"}


@pytest.mark.parametrize("name", some(CASES, ZOO.keys() - EVERY_TIME))
def test_jacobians_and_kernels_are_the_dense_ones_whatever_the_chunk(name):
    """A chunk is of some samples, not dividing their number, or of more than there are; one sample is a batch, too."""
    f, mode, specimen, xs = CASES[name]
    model, xs = doubled(specimen.make()) if name in ZOO else specimen.make(), xs() if callable(xs) else xs
    layout = specimen.layout(model)
    vector, restructure = (tp.ravel if mode == "holomorphic" else nested.real_vector)(model, layout)
    first = lambda count: jax.tree.map(lambda leaf: leaf[:count], xs)

    def of_vector(vector, x):
        y = jnp.ravel(f(restructure(vector), x))
        return jnp.concatenate([y.real, y.imag]) if mode == "complex" else y

    @jax.jit
    def run(vector, xs):
        jacobian = lambda **options: nested.parameter_jacobian(f, layout, mode=mode, **options)
        kernel = lambda **options: nested.kernel(f, layout, mode=mode, **options)
        model, dense = restructure(vector), jnp.zeros((len(jax.tree.leaves(xs)[0]), 4, 0))
        if vector.size:
            dense = jax.vmap(jax.jacrev(of_vector, holomorphic=mode == "holomorphic"), (None, 0))(vector, xs)
        whole, square, tolerance = jacobian()(model, xs), kernel()(model, xs), TOLERANCES.get(name, 1e-10)
        found = [(whole, dense, tolerance), (square, product(dense), tolerance)]
        if name in ("real", "holomorphic", "keys", "more outputs than parameters"):
            found += [(jacobian(chunk=3)(model, xs), whole, 1e-13)]
        if name in ("real", "holomorphic", "indices", "mixed widths"):  # as precise as the widest
            kernels = square, kernel(chunk=3)(model, xs)
            found += [(each, product(whole), 1e-12) for each in kernels]
            found += [(each, each.conj().T, 1e-14) for each in kernels]
        if name == "matrices":
            found += [
                (jacobian()(model, first(1)), whole[:1], 1e-13),
                (kernel()(model, first(1)), product(whole[:1]), 1e-12),
            ]
        if name in ("real", "holomorphic"):
            found += [(kernel(chunk=9)(model, xs, xs[-2:]), product(whole, whole[-2:]), 1e-12)]
        if f is outer:  # fewer outputs on the right
            found += [(kernel(chunk=2)(model, xs, xs[:3, :2]), product(whole, whole[:3, :4]), 1e-12)]
        return found

    for got, want, tolerance in jax.device_get(run(vector, xs)):
        close(got, want.astype(got.dtype), tolerance=max(tolerance, 2e-7 if f is outer else 0))
        assert got.dtype == (complex if mode == "holomorphic" else np.promote_types(vector.dtype, np.float32))


# -- What is empty, and dtypes -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 2])
def test_nothing_in_nothing_out(chunk):
    frozen, none = tp.layout(COMPLEX, freeze="**"), lambda model, x: net(model, x)[:0]

    def shape(method, f, *samples, trainable=None):
        of = method(f, trainable, mode="complex", chunk=chunk)
        return jax.eval_shape(lambda *samples: of(COMPLEX, *samples), *samples).shape

    assert shape(nested.parameter_jacobian, net, X[:0]) == (0, 4, 46)
    assert shape(nested.parameter_jacobian, none, X) == (7, 0, 46)
    assert shape(nested.parameter_jacobian, net, X, trainable=frozen) == (7, 4, 0)
    assert shape(nested.kernel, net, X, trainable=frozen) == (28, 28)
    assert shape(nested.kernel, net, X[:0]) == (0, 0)
    assert shape(nested.kernel, net, X[:0], X) == (0, 28)
    assert shape(nested.kernel, net, X, X[:0]) == (28, 0)
    assert shape(nested.kernel, none, X) == (0, 0)


def test_products_of_half_precision_are_summed_in_single_precision():
    model = {"w": ramp(512, dtype=jnp.bfloat16), "b": ramp(2)}
    f = lambda model, x: jnp.sum(model["w"]).astype(jnp.float32) * x + jnp.sum(model["b"])
    kernel = jax.jit(nested.kernel(f))(model, ramp(3, start=1.0))
    assert kernel.dtype == jnp.float32
    rows = np.asarray(ramp(3, dtype=jnp.bfloat16, start=1.0), np.float64)
    np.testing.assert_allclose(kernel, 512 * np.outer(rows, rows) + 2, 1e-6)
    of_half = nested.kernel(lambda model, x: jnp.sum(model["w"]) * x)
    assert jax.eval_shape(of_half, {"w": model["w"]}, ramp(3, dtype=jnp.bfloat16)).dtype == jnp.float32


def test_under_vmap_and_grad():
    """What fills up a chunk is a sample, and no zeros, of which f has no value here; a gradient would be NaN."""
    f = lambda a, x: jnp.tanh(a[:2] * x[:2]) * jnp.log(jnp.sum(x**2)) + jnp.sin(a @ x)
    xs, vectors = X[:3], jnp.stack([NET["a"], 2 * NET["a"]])
    ours = lambda a: (nested.parameter_jacobian(f, chunk=2)(a, xs), nested.kernel(f, chunk=2)(a, xs))
    dense = lambda a: (lambda rows: (rows, product(rows)))(jax.vmap(jax.jacrev(f), (None, 0))(a, xs))
    loss = lambda jacobian, kernel: jnp.sum(jnp.sin(jacobian)) + jnp.sum(jnp.cos(kernel))
    both = lambda of: (jax.vmap(of)(vectors), jax.grad(lambda a: loss(*of(a)))(vectors[0]))
    got, want = jax.jit(lambda: (both(ours), both(dense)))()
    assert np.abs(want[1]).min() > 0
    close(got, want)


# -- Gradients of examples ---------------------------------------------------------------------------------------------


def _loss(model, x, weight):
    total = sum(jnp.sum(jnp.sin(jnp.abs(jnp.asarray(leaf, jnp.complex64)) * x)) for leaf in inexact_leaves(model))
    return weight * jnp.real(total)


EXAMPLES = (np.linspace(0.5, 1.5, 5, dtype=np.float32), np.arange(5, dtype=np.float32))


@pytest.mark.parametrize("name", some(["complex", "bf16 with f32", "transposed tie", "mlp"], {"mlp"}))
def test_gradients_of_examples(name):
    with enable_x64(False):
        model = ZOO[name].make()
        layout = ZOO[name].layout(model)
        _, restructure = tp.ravel(model, layout)
        flat = lambda example: restructure.ravel_gradient(tp.grad(_loss, layout)(model, *example))

        @jax.jit
        def run():
            tree = nested.per_example_gradients(_loss, layout, chunk=2)(model, *EXAMPLES)
            matrix = nested.per_example_gradients(_loss, layout, flat=True)(model, *EXAMPLES)
            return jax.lax.map(flat, EXAMPLES), tree, jax.vmap(restructure.ravel_gradient)(tree), matrix

        want, tree, *found = run()
    assert jax.tree.structure(tree) == jax.tree.structure(tp.partition(model, layout)[0])
    for matrix in found:
        np.testing.assert_allclose(matrix, want, 1e-2 if layout.nbytes < 4 * layout.size else 1e-5, 1e-6)


_AXIS, _KIND = "arrays with one leading axis in common, got shapes ", "f to return a floating or complex array, got "
_COUNT, _PAIR, HOLOMORPHIC = "a whole number of (samples|rows), at least 1, got ", {"x": X, "y": X[:2]}, "holomorphic"
_mapped = lambda model, xs: jax.vmap(lambda x: model["b"] @ x)(xs)
ERRORS = [  # f, options, model, samples
    (net, {"mode": "imaginary"}, NET, X, ValueError, "mode must be 'real', 'complex' or 'holomorphic', got 'imagin"),
    (net, {}, COMPLEX, X, TypeError, "f returns complex128; mode='complex' gives the derivatives of its real and"),
    (modulus, {"mode": HOLOMORPHIC}, COMPLEX, X, TypeError, "needs complex outputs, and f returns float64; use mode"),
    (net, {"mode": HOLOMORPHIC}, COMPLEX | {"a": NET["a"]}, X, TypeError, "parameters, and 'a' is float64; freeze it"),
    (net, {"chunk": 2.5}, NET, X, ValueError, _COUNT + "2.5"),
    (net, {}, NET, _PAIR, ValueError, _AXIS + r"\[\(7, 3\), \(2, 3\)\]"),
    (net, {}, NET, None, ValueError, _AXIS + r"\[\]"),
    (lambda model, x: jnp.arange(3), {}, NET, X, TypeError, _KIND + r"int64\[3\]"),
    (_mapped, {}, NET, X, ValueError, r"f gets one sample .*shapes \[\(3,\)\]"),
]  # fmt: skip
OTHERS = [
    (lambda: nested.kernel(net)(NET, X, _PAIR), ValueError, _AXIS + r"\[\(7, 3\), \(2, 3\)\]"),
    (lambda: nested.linearised(net)(NET, jnp.ones(22), X[0]), ValueError, r"vector of 23 elements, .*shape \(22,\)"),
    (lambda: nested.per_example_gradients(_loss)(NET, X, X[:2]), ValueError, _AXIS),
    (lambda: nested.per_example_gradients(_loss, chunk=0)(NET, *EXAMPLES), ValueError, "number of examples, at least"),
    (lambda: nested.per_example_gradients(net)(NET, X), TypeError, r"a scalar, got float64\[2\]; write jnp.mean"),
]  # fmt: skip


def test_errors(without_type_checks):
    for f, options, model, samples, error, words in ERRORS:
        for method in (nested.parameter_jacobian, nested.kernel):
            with pytest.raises(error, match=words):
                method(f, **options)(model, samples)
    for call, error, words in OTHERS:
        with pytest.raises(error, match=words):
            call()
