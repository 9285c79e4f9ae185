"""Complex parameters as pairs of reals: curvature is symmetric, and solvers and damping work on re + i im."""

import functools
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from ..long import some
from ..zoo import assert_close, enable_x64, inexact_leaves, ramp


@pytest.fixture(autouse=True)
def _double():
    with enable_x64(True):
        yield


close = functools.partial(assert_close, tolerance=1e-10)


def complex_ramp(*shape, dtype=jnp.complex128, start=0.3):
    values = np.asarray(ramp(*shape, dtype=np.float64, start=start))
    return jax.device_put((values + 1j * np.cos(3 * values)).astype(dtype))


class Wave(eqx.Module):
    phase: jax.Array
    scale: jax.Array
    reference: jax.Array = tp.field(trainable=False)


def _with_ties():
    shared = complex_ramp(2, 2)
    return {"first": shared, "real": ramp(3, dtype=np.float64), "second": shared, "third": shared.T}


MODELS = {
    "ties": (_with_ties, {"ties": {"third": ("first", jnp.transpose)}}),
    "module, frozen part, single precision": (
        lambda: Wave(complex_ramp(2, dtype=jnp.complex64), ramp(3, dtype=np.float64), complex_ramp(2)),
        {},
    ),
}


def outputs(model, scale):
    """Three complex numbers, not holomorphic in the leaves, different in each place."""
    flat = jnp.concatenate([jnp.asarray(leaf, complex).ravel() for leaf in inexact_leaves(model)])
    waves = np.exp(1j * np.add.outer(np.arange(3.0), np.arange(len(flat))))
    return 1 + jnp.asarray(scale, complex) * (waves**2 @ flat**2) + waves @ (flat**2 * flat.conj())


def energy(y):
    return jnp.sum(jnp.abs(y) ** 4) + y[0].real


def loss(model, scale):
    return energy(outputs(model, scale)) / 10


@pytest.mark.parametrize("name", some(MODELS, {"module, frozen part, single precision"}))
def test_products_and_matrices_are_those_over_the_real_vector(name):
    make, options = MODELS[name]
    model = make()
    layout = tp.layout(model, **options)
    vector, restructure = nested.real_vector(model, layout)
    complex_form = tp.ravel(model, layout)[1]

    def forms(real):
        model = restructure(real)
        return real, complex_form.ravel(model), tp.partition(model, layout)[0]

    direction = np.sin(np.arange(1.0, len(vector) + 1))

    @jax.jit
    def run(vector, direction):
        model = restructure(vector)
        pairs = lambda v: (lambda y: jnp.concatenate([y.real, y.imag]))(outputs(restructure(v), 0.1))
        jacobian = jax.jacrev(pairs)(vector)
        curvature = jax.hessian(lambda y: energy(jax.lax.complex(y[:3], y[3:])))(pairs(vector))
        tangents = forms(direction)
        operator = nested.hessian_operator(loss, layout, damping=0.5)(model, 0.1)
        gauss_newton = nested.ggn_operator(outputs, energy, layout)(model, 0.1)
        return {
            "hessian": jax.hessian(lambda v: loss(restructure(v), 0.1))(vector),
            "gauss newton": jacobian.T @ curvature @ jacobian,
            "matrix": nested.hessian(loss, layout)(model, 0.1),
            "products": {2: nested.hvp(loss, layout)(model, tangents[2], 0.1)},
            "by operator": {1: operator(tangents[1])},
            "by ggn": {0: gauss_newton(tangents[0])},
        }

    got = run(vector, direction)
    tolerance = 1e-4 if "single" in name else 1e-10
    damped = got["hessian"] + 0.5 * np.eye(len(vector))
    close(got["matrix"], got["hessian"], tolerance=tolerance)
    close(got["matrix"], got["matrix"].T, tolerance=tolerance)
    for key, matrix in {"products": got["hessian"], "by operator": damped, "by ggn": got["gauss newton"]}.items():
        want = forms(jnp.asarray(np.asarray(matrix) @ direction))
        for i, product in got[key].items():
            close(product, want[i], tolerance=tolerance)


def test_signs_are_those_of_the_pair_and_conjugate_to_gradients():
    """`tp.grad` gives the derivative in the real part minus i times that in the imaginary one, as JAX does."""
    model = {"z": complex_ramp(3), "x": ramp(2, dtype=np.float64)}
    tangent = {"z": complex_ramp(3, start=2.0), "x": jnp.array([1.0, -1.0])}

    @jax.jit
    def run(model, tangent):
        _, change = jax.jvp(lambda m: tp.grad(loss)(m, 0.1), (model,), (tangent,))
        return change, nested.hvp(loss)(model, tangent, 0.1)

    change, product = run(model, tangent)
    close(product, jax.tree.map(jnp.conj, change))
    assert np.abs(product["z"].imag).min() > 1e-3


# -- Operators ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem():
    """A model, its damped operator, that as a matrix, and a right side in reals, as a complex vector and as a tree."""
    with enable_x64(True):
        model = {"x": ramp(2, dtype=np.float64), "z": complex_ramp(2)}
        form, restructure, right = tp.ravel(model)[1], nested.real_vector(model)[1], np.arange(1.0, 7.0)

        @jax.jit
        def run(model):
            operator = nested.ggn_operator(outputs, energy, damping=50.0)(model, 0.1)
            rights = jnp.asarray(right), form.ravel(restructure(right)), restructure(right)
            return model, operator, operator @ jnp.eye(6), rights

        return run(model)


def test_conjugate_gradients_take_real_and_complex_vectors(problem):
    model, operator, matrix, rights = problem
    assert np.linalg.eigvalsh(matrix)[0] > 49
    solve = lambda right: jax.scipy.sparse.linalg.cg(operator, right, tol=1e-13)[0]
    found = jax.jit(lambda *rights: list(map(solve, rights)))(*rights[:2])
    want = jax.device_put(np.linalg.solve(matrix, rights[0]))
    close(found, [want, tp.ravel(model)[1].ravel(nested.real_vector(model)[1](want))], tolerance=1e-9)


def test_vectors_and_matrices_are_multiplied(problem):
    _, operator, matrix, (real, compl, _) = problem
    close(np.asarray(matrix), np.asarray(matrix).T, tolerance=1e-12)
    assert (operator @ np.ones((6, 0))).shape == (6, 0)
    some = np.cos(np.arange(24.0)).reshape(6, 4)

    @jax.jit
    def run(operator):
        products = operator @ real, operator @ some, operator @ jnp.stack([compl, 2 * compl], 1)
        return products, operator(compl), operator.diagonal(chunk=4)

    products, of_complex, diagonal = run(operator)
    entries, of_complex = np.asarray(matrix), np.asarray(of_complex)
    close(products, (entries @ np.asarray(real), entries @ some, np.stack([of_complex, 2 * of_complex], 1)))
    close(diagonal, np.diag(matrix))


def test_lineax_solves_with_an_operator(problem):
    lx = pytest.importorskip("lineax", reason="needs lineax")
    _, operator, matrix, (right, _, _) = problem
    linear = operator.as_lineax()
    assert lx.is_symmetric(linear)
    assert not lx.is_positive_semidefinite(linear)
    assert linear.in_structure() == jax.ShapeDtypeStruct((6,), jnp.float64)

    @jax.jit
    def run(operator, right):
        positive = operator.as_lineax(lx.positive_semidefinite_tag)
        return operator.as_lineax().mv(right), lx.linear_solve(positive, right, lx.CG(1e-12, 1e-12)).value

    want = np.asarray(matrix) @ np.asarray(right), np.linalg.solve(matrix, right)
    close(run(operator, right), want, tolerance=1e-9)
    frozen = nested.hessian_operator(lambda model: 1.0, tp.layout({"x": ramp(3)}, freeze="x"))({"x": ramp(3)})
    assert frozen.diagonal().shape == (0,)


def test_without_lineax_the_extra_is_named(problem, monkeypatch):
    monkeypatch.setitem(sys.modules, "lineax", None)
    with pytest.raises(ModuleNotFoundError, match=r"as_lineax needs lineax, of the extra treeparams\[lineax\]"):
        problem[1].as_lineax()


def test_directions_of_linearised_models_and_gradients_of_examples(problem):
    """A complex vector, the real one and the tree say the same; gradients of examples are JAX's."""
    model, _, _, (real, compl, tree) = problem

    @jax.jit
    def run(model, tree):
        near = nested.linearised(outputs)
        want = outputs(model, 0.1) + jax.jvp(lambda m: outputs(m, 0.1), (model,), (tree,))[1]
        rows = nested.per_example_gradients(loss, flat=True)(model, jnp.array([0.1, 0.2]))
        row = tp.ravel(model)[1].ravel_gradient(tp.grad(loss)(model, 0.1))
        return want, [near(model, direction, 0.1) for direction in (real, compl, tree)], row, rows[0]

    want, near, row, got = run(model, tree)
    close(got, row)
    for value in near:
        close(value, want)


# -- Errors ------------------------------------------------------------------------------------------------------------


_LENGTH = r"a vector of 4 elements \(or 6, complex ones as pairs of reals\), .* got an array of shape \(5,\)"
_MATRIX = r"operator @ needs a vector \(n,\) or a matrix .*, got "
_REAL, FIVE = r"a real vector, .* as pairs of reals \(nested.real_vector\), got complex128", jnp.ones(5)
_of_z = lambda model: jnp.sum(model["z"])
ERRORS = [  # of a model, its operator, its restructure, and a tangent as real vector and as complex one
    (lambda model, *_: nested.hvp(loss)(model, FIVE, 0.1), ValueError, _LENGTH),
    (lambda _, operator, *__: operator(FIVE), ValueError, _LENGTH),
    (lambda _, operator, *__: operator @ jnp.ones((5, 2)), ValueError, _LENGTH),
    (lambda model, *_: nested.linearised(outputs)(model, FIVE, 0.1), ValueError, _LENGTH),
    (lambda model, operator, *_: operator @ model, TypeError, _MATRIX + "dict; for a tree call it"),
    (lambda _, operator, *__: operator @ jnp.ones(()), TypeError, _MATRIX + r"float64\[\]; for a tree call it"),
    (lambda _, operator, *__: operator @ jnp.ones((6, 1, 1)), TypeError, _MATRIX + r"float64\[6,1,1\]"),
    (lambda model, operator, *_: operator({"x": model["z"]}), TypeError, r"a real tangent at 'x', got complex128"),
    (lambda _, operator, *__: operator({"z": complex_ramp(3)}), ValueError, r"complex128\[2\] at 'z', got complex"),
    (lambda _, operator, *__: operator({"y": FIVE}), ValueError, "entry at 'y', where the model has no leaf"),
    (lambda _, operator, *__: operator.diagonal(chunk=0), ValueError, "chunk must be a whole number of products"),
    (lambda _, operator, *__: operator.matrix(chunk=1.5), ValueError, "number of products, at least 1, got 1.5"),
    (lambda _, operator, __, real, ___: operator(real.astype(complex)), TypeError, _REAL),
    (lambda _, __, restructure, ___, compl: restructure(compl), TypeError, _REAL),
    (lambda _, __, restructure, ___, compl: restructure(compl.real), ValueError, r"of shape \(6,\) .*, got shape"),
    (lambda model, _, __, real, ___: nested.hvp(_of_z)(model, real), TypeError, "complex128"),
    (lambda model, *_: nested.hessian(_of_z)(model), TypeError, "complex128"),
]  # fmt: skip


def test_errors(problem, without_type_checks):
    model, operator, _, (real, compl, _) = problem
    for call, error, words in ERRORS:
        with pytest.raises(error, match=words):
            call(model, operator, nested.real_vector(model)[1], real, compl)
