"""Curvature of what is trained: products agree with matrices, in every form and under every transformation.

Complex parameters are pairs of reals: curvature is symmetric, and solvers and damping work on re + i im.
"""

import functools
import sys
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import nested

from ..long import some
from ..zoo import ZOO, Specimen, assert_close, assert_same, enable_x64, filled, flops, inexact_leaves, loss, ramp


def complex_ramp(*shape, dtype=jnp.complex128, start=0.3):
    values = np.asarray(ramp(*shape, dtype=np.float64, start=start))
    return jax.device_put((values + 1j * np.cos(3 * values)).astype(dtype))


def _with_ties():
    shared = complex_ramp(2, 2)
    return {"first": shared, "real": ramp(3, dtype=np.float64), "second": shared, "third": shared.T}


def _in_single_precision():
    return {"phase": complex_ramp(2, dtype=np.complex64), "r": complex_ramp(2), "scale": ramp(3, dtype=np.float64)}


COMPLEX = {
    "complex with ties": Specimen(_with_ties, {"ties": {"third": ("first", jnp.transpose)}}),
    "complex, a frozen part, single precision": Specimen(_in_single_precision, {"freeze": "r"}),
}
MODELS = ZOO | COMPLEX
del MODELS["complex"]
EVERY_TIME = {"bf16 with f32", "frozen tie", "empty leaves", "all frozen", "complex with ties"}
# Gradients are in the leaves' own dtypes.
ROUGH = {"bf16 with f32": 5e-2, "complex, a frozen part, single precision": 1e-4}


def outputs(model, scale=0.1):
    """Three complex numbers, not holomorphic in the leaves, different in each place."""
    leaves = [jnp.asarray(leaf, complex).ravel() for leaf in inexact_leaves(model)]
    flat = jnp.concatenate([np.ones(1, complex), *leaves])
    waves = np.exp(1j * np.add.outer(np.arange(3.0), np.arange(-1.0, len(flat) - 1)))
    return 1 + jnp.asarray(scale, complex) * (waves**2 @ flat**2) + waves @ (flat**2 * flat.conj())


def energy(y):
    return jnp.sum(jnp.abs(y) ** 4) + y[0].real


def of_outputs(model, scale=0.1):
    return energy(outputs(model, scale)) / 10


def as_pair(y):
    return jnp.concatenate([y.real, y.imag])


@pytest.mark.parametrize("name", some(MODELS, MODELS.keys() - EVERY_TIME))
def test_products_and_matrices_are_those_over_the_real_vector(name):
    """With a tangent as real or complex vector, canonical tree or model. So are operators, and linearised models."""
    with enable_x64(name in COMPLEX):
        model = MODELS[name].make()
        layout = MODELS[name].layout(model)
        vector, restructure = nested.real_vector(model, layout)
        form = tp.ravel(model, layout)[1]
        direction = jax.device_put(np.sin(np.arange(1.0, len(vector) + 1)).astype(vector.dtype))

        def in_forms(real):
            model = restructure(real)
            of_complex = [form.ravel(model)] if name in COMPLEX else []
            return [real, tp.partition(model, layout)[0], model, *of_complex]

        def along(matrix):
            """The product in each form; of a model, too, it is a canonical tree."""
            real, tree, _, *others = in_forms(matrix @ direction)
            return [real, tree, tree, *others]

        @jax.jit
        def run(vector):
            params, rest = tp.partition(restructure(vector), layout)
            model, tangents = tp.combine(params, rest), in_forms(direction)
            matrix = nested.hessian(of_outputs, layout)(model)
            by_jax = jax.hessian(lambda v: of_outputs(restructure(v)))(vector) if layout.size else matrix
            products = [nested.hvp(of_outputs, layout)(model, tangent) for tangent in tangents]
            found = [(matrix, by_jax), (matrix.T, by_jax), *zip(products, along(by_jax), strict=True)]
            if name not in COMPLEX:
                return found
            pairs = lambda v: as_pair(outputs(restructure(v)))
            jacobian = jax.jacrev(pairs)(vector)
            curvature = jax.hessian(lambda y: energy(jax.lax.complex(y[:3], y[3:])))(pairs(vector))
            damped = nested.hessian_operator(of_outputs, layout, damping=0.5)(model)
            gauss_newton = nested.ggn_operator(lambda m: {"y": outputs(m)}, lambda y: energy(y["y"]), layout)(model)
            near = [as_pair(nested.linearised(outputs, layout)(model, tangent)) for tangent in tangents]
            # `tp.grad` gives the derivative in the real part minus i times that in the imaginary one.
            slope = lambda params: tp.grad(of_outputs, layout)(tp.combine(params, rest))
            found += [
                (damped(tangents[-1]), along(by_jax + 0.5 * jnp.eye(len(vector)))[-1]),
                (gauss_newton(tangents[0]), along(jacobian.T @ curvature @ jacobian)[0]),
                *((each, pairs(vector) + jacobian @ direction) for each in near),
                (jax.tree.map(jnp.conj, jax.jvp(slope, (params,), (tangents[1],))[1]), products[1]),
            ]
            return found

        tolerance = ROUGH.get(name, 1e-10 if name in COMPLEX else 1e-5)
        for got, want in run(vector):
            assert jax.tree.structure(got) == jax.tree.structure(want)
            for a, b in zip(*map(jax.tree.leaves, jax.device_get((got, want))), strict=True):
                largest = 1 if name in COMPLEX else np.abs(b).max(initial=1)
                assert a.dtype == b.dtype
                np.testing.assert_allclose(a.astype(complex), b.astype(complex), tolerance, tolerance * largest)


def test_a_product_has_the_wider_of_the_two_dtypes():
    """Computed in the parameters' own, and returned so that a solver goes on in that of its vectors."""
    model = {"w": ramp(3, dtype=jnp.bfloat16), "b": ramp(1, dtype=jnp.bfloat16)}
    right = jnp.array([1.0, 0.5, 0.25, 2.0], jnp.bfloat16)
    partial, single = {"w": jnp.ones(3, jnp.float32)}, {"w": ramp(3), "b": ramp(1)}

    @jax.jit
    def run(model, right):
        product = nested.hvp(loss)
        of_complex = product({"w": ramp(3).astype(jnp.complex64), "b": ramp(1)}, jnp.ones(4))
        vectors = product(model, right), product(model, right.astype(np.float32)), product(single, right), of_complex
        return vectors, product(model, partial)

    vectors, tree = run(model, right)
    assert [str(each.dtype) for each in vectors] == ["bfloat16", "float32", "float32", "complex64"]
    np.testing.assert_array_equal(vectors[1], vectors[0].astype(np.float32))
    assert (tree["w"].dtype, tree["b"].dtype) == (jnp.float32, jnp.bfloat16)


def test_floating_point_operations():
    mlp, x = filled(eqx.nn.MLP, 16, 4, 64, 4, jnp.tanh), jnp.ones((32, 16))
    f = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    vector, restructure = tp.ravel(mlp)
    one = flops(lambda v, t: nested.hvp(f)(restructure(v), t, x), vector, vector)
    assert one <= 4 * flops(lambda v: jax.grad(lambda v: f(restructure(v), x))(v), vector)

    def five(v, directions):
        operator = nested.hessian_operator(f)(restructure(v), x)
        return [operator(direction) for direction in directions]

    assert flops(five, vector, [np.sin(i + np.asarray(vector)) for i in range(5)]) <= 4.2 * one


# -- Operators ---------------------------------------------------------------------------------------------------------


def _quartic(model, x):
    return jnp.sum(x * model["w"] ** 4) + model["b"] * jnp.sum(model["w"])


MODEL, X = {"w": ramp(3), "b": jnp.array(2.0)}, jnp.arange(1.0, 4.0)


@functools.cache
def _problem(kind):
    if kind == "real":
        model, make, name = MODEL, nested.hessian_operator(_quartic, damping=3.0), "w"
    else:
        model = {"x": ramp(2, dtype=np.float64), "z": complex_ramp(2)}
        make, name = nested.ggn_operator(outputs, energy, damping=50.0), "z"
    vector, restructure = nested.real_vector(model)
    form = tp.ravel(model)[1]

    @jax.jit
    def run(model):
        operator = make(model, X if kind == "real" else 0.1)
        real = jnp.arange(1.0, len(vector) + 1)
        return operator, operator @ jnp.eye(len(vector)), [real, form.ravel(restructure(real)), restructure(real)]

    operator, matrix, rights = run(model)
    return types.SimpleNamespace(
        kind=kind, model=model, operator=operator, matrix=np.asarray(matrix), rights=jax.device_get(rights), name=name,
        in_forms=lambda real: [real, form.ravel(restructure(real)), restructure(real)], restructure=restructure,
    )  # fmt: skip


@pytest.fixture(params=["real", "complex"])
def problem(request):
    """A model, its damped operator, that as a matrix, and a right side: as real and complex vector, and as tree."""
    with enable_x64(request.param == "complex"):
        yield _problem(request.param)


@pytest.mark.parametrize("problem", ["complex"], indirect=True)
def test_conjugate_gradients_solve_over_real_and_complex_vectors(problem):
    rights, want = problem.rights[:2], np.linalg.solve(problem.matrix, problem.rights[0])
    solve = lambda right: jax.scipy.sparse.linalg.cg(problem.operator, right, tol=1e-13)[0]
    found, want = jax.jit(lambda want: (list(map(solve, rights)), problem.in_forms(want)[:2]))(want)
    assert_close(found, want, 1e-9)


def test_an_operator_multiplies_from_both_sides_and_passes_through_jit_vmap_and_scan(problem):
    """It is symmetric."""
    matrix, operator, (real, compl, tree) = problem.matrix, problem.operator, problem.rights
    n = len(matrix)
    alone = np.where(np.arange(n) < tree[min(tree)].size, 0, real)  # of the second leaf
    units, some = np.eye(n, dtype=matrix.dtype), np.cos(np.arange(4.0 * n, dtype=matrix.dtype)).reshape(n, 4)
    near = lambda a, b: np.testing.assert_allclose(a, b, *((1e-6, 0) if problem.kind == "real" else (1e-10, 1e-10)))
    apply = jax.jit(lambda operator, tangent: operator(tangent))
    near([apply(operator, each) for each in units], matrix)
    np.testing.assert_allclose(matrix, matrix.T, *((1e-6, 0) if problem.kind == "real" else (1e-12, 1e-12)))
    assert apply._cache_size() == 1
    assert jax.eval_shape(lambda nothing: operator @ nothing, np.ones((n, 0))).shape == (n, 0)

    @jax.jit
    def run(operator):
        matrices, left = [operator.matrix(chunk=3)], []
        if problem.kind == "real":  # what JAX does with it is the same for both
            scanned = jax.lax.scan(lambda c, t: (c, operator(t)), 0, units)[1]
            matrices += [jax.vmap(operator)(units), scanned, operator.matrix()]
            left = [of(array) @ operator for of in (jnp.asarray, np.asarray) for array in (some[:, 0], some.T)]
        right = operator @ real, operator @ some, operator @ jnp.stack([compl, 2 * compl], 1)
        of_part = operator({problem.name: tree[problem.name]}), problem.restructure(jnp.asarray(matrix @ alone))
        return matrices, left, right, (operator(compl), of_part), operator.diagonal(chunk=3)

    matrices, left, right, (of_complex, of_part), diagonal = jax.device_get(run(operator))
    for each in matrices:
        near(each, matrix)
    jax.tree.map(near, left, [some[:, 0] @ matrix, some.T @ matrix] * (len(left) // 2))
    jax.tree.map(near, right, (matrix @ real, matrix @ some, np.stack([of_complex, 2 * of_complex], 1)))
    near(diagonal, np.diag(matrix))
    jax.tree.map(near, *of_part)


@pytest.mark.parametrize("problem", ["complex"], indirect=True)
def test_lineax_solves_with_an_operator(problem, monkeypatch):
    lx = pytest.importorskip("lineax", reason="needs lineax")
    linear, right = problem.operator.as_lineax(), problem.rights[0]
    assert lx.is_symmetric(linear)
    assert not lx.is_positive_semidefinite(linear)
    assert linear.in_structure() == jax.ShapeDtypeStruct((6,), jnp.float64)

    @jax.jit
    def run(operator, right):
        positive = operator.as_lineax(lx.positive_semidefinite_tag)
        return operator.as_lineax().mv(right), lx.linear_solve(positive, right, lx.CG(1e-12, 1e-12)).value

    want = problem.matrix @ np.asarray(right), np.linalg.solve(problem.matrix, right)
    assert_close(run(problem.operator, right), want, 1e-9)
    frozen = nested.hessian_operator(lambda model: 1.0, tp.layout({"x": ramp(3)}, freeze="x"))({"x": ramp(3)})
    assert frozen.diagonal().shape == (0,)
    monkeypatch.setitem(sys.modules, "lineax", None)
    with pytest.raises(ModuleNotFoundError, match=r"as_lineax needs lineax, of the extra treeparams\[lineax\]"):
        problem.operator.as_lineax()


# -- The real vector, and a model that is linear along a direction -----------------------------------------------------


@pytest.mark.parametrize("name", ["complex", "transposed tie", "bf16 with f32", "empty leaves", "all frozen"])
def test_the_real_vector_goes_there_and_back(name):
    """Of a complex slot it has all real parts, then all imaginary ones; else it is the vector of `tp.ravel`."""
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)
    vector, restructure = nested.real_vector(model, layout)
    parts = [np.zeros(0)]
    for leaf in map(np.asarray, jax.tree.leaves(tp.partition(model, layout)[0])):
        parts += [leaf.real.ravel(), leaf.imag.ravel()] if np.iscomplexobj(leaf) else [leaf.astype(float).ravel()]
    np.testing.assert_array_equal(vector, np.concatenate(parts))
    assert vector.dtype == (jnp.float32 if name == "complex" else layout.dtype)
    assert_same(restructure(vector), tp.tie(model, layout))
    assert_same(jax.jit(lambda pair: pair[1](pair[0]))((vector, restructure)), model, identity=False)


NET = {"a": ramp(3), "b": ramp(2, 3, start=-1.0), "frozen": ramp(2)}
LAYOUT = tp.layout(NET, freeze="frozen")


def net(model, x, scale):
    """Of its outputs one is not floating, and one is nothing."""
    y = jnp.tanh(model["b"] @ (x * model["a"])) * scale + model["frozen"]
    return {"y": y, "norm": jnp.sum(model["a"] ** 2), "whole": jnp.arange(3), "nothing": None}


def test_linearised_is_value_and_derivative():
    vector, restructure = tp.ravel(NET, LAYOUT)
    directions, x = np.cos(np.arange(18, dtype=np.float32)).reshape(2, 9), ramp(3)

    @jax.jit
    def run(vector, directions):
        near = functools.partial(nested.linearised(net, LAYOUT), restructure(vector))
        floating = lambda v: {name: net(restructure(v), x, 2.0)[name] for name in ("y", "norm")}
        return (
            jax.jacrev(floating)(vector),
            jax.vmap(lambda d: near(d, x, 2.0))(directions),
            (near(0 * vector, x, 2.0), net(restructure(vector), x, 2.0)),
            jax.grad(lambda d: jnp.sum(near(d, x, 2.0)["y"]))(directions[0]),
        )

    jacobian, along, (here, value), gradient = jax.device_get(run(vector, directions))
    assert_close(here, value)
    assert_close(along["y"], value["y"][None] + directions @ jacobian["y"].T)
    assert_close(along["norm"], value["norm"] + directions @ jacobian["norm"])
    assert_close(gradient, jacobian["y"].sum(0))


FIVE = jnp.ones(5)
_LENGTH = r"a vector of 4 elements \(or 6, complex ones as pairs of reals\), .* got an array of shape \(5,\)"
_REAL = r"a real vector, .* as pairs of reals \(nested.real_vector\), got complex128"
_FROM_RIGHT = r"operator @ needs a vector \(n,\) or a matrix .*, got "
_FROM_LEFT = r"@ operator needs a real vector \(n,\) or matrix \(k, n\), got "
_CHUNK = "chunk must be a whole number of products"
_of_z = lambda model: jnp.sum(model["z"])
ERRORS = [  # of the complex problem, and an operator over a real model
    (lambda t, _: nested.hvp(of_outputs)(t.model, FIVE), ValueError, _LENGTH),
    (lambda t, _: t.operator @ jnp.ones((5, 2)), ValueError, _LENGTH),
    (lambda t, _: t.operator @ t.model, TypeError, _FROM_RIGHT + "dict; for a tree call it"),
    (lambda t, _: t.operator @ jnp.ones((6, 1, 1)), TypeError, _FROM_RIGHT + r"float64\[6,1,1\]"),
    (lambda t, _: t.operator({"x": t.model["z"]}), TypeError, r"a real tangent at 'x', got complex128"),
    (lambda t, _: t.operator({"z": complex_ramp(3)}), ValueError, r"complex128\[2\] at 'z', got complex"),
    (lambda t, _: t.operator({"y": FIVE}), ValueError, "entry at 'y', where the model has no leaf"),
    (lambda t, _: t.operator.matrix(chunk=1.5), ValueError, _CHUNK + ", at least 1, got 1.5"),
    (lambda t, _: t.operator(t.rights[0].astype(complex)), TypeError, _REAL),
    (lambda t, _: t.restructure(t.rights[1].real), ValueError, r"of shape \(6,\) .*, got shape"),
    (lambda t, _: nested.hvp(_of_z)(t.model, t.rights[0]), TypeError, "complex128"),
    (lambda t, _: nested.hessian(of_outputs, chunk=0)(t.model), ValueError, _CHUNK + ", at"),
    (lambda _, of: np.ones((2, 2, 4)) @ of, TypeError, _FROM_LEFT),
    (lambda _, of: np.ones(4, np.complex64) @ of, TypeError, _FROM_LEFT),
]  # fmt: skip


@pytest.mark.parametrize("problem", ["complex"], indirect=True)
def test_errors(problem, without_type_checks):
    of_real = _problem("real").operator
    for call, error, words in ERRORS:
        with pytest.raises(error, match=words):
            call(problem, of_real)
