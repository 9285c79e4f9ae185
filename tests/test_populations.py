"""Many models as one matrix: what holds of each row holds of all, and the methods that the pages show are right."""

import ast
import pathlib
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .blocks import blocks
from .zoo import ZOO, as_data, assert_close, assert_same, filled, gradient_of_loss, loss, ramp

HOW_TO = pathlib.Path(__file__).parent.parent / "docs" / "pages" / "how-to"


def functions_of(name):
    """The functions that a page defines, without all else that it runs."""
    code = ast.parse("\n".join(block.code for block in blocks((HOW_TO / f"{name}.md").read_text())))
    code.body = [node for node in code.body if isinstance(node, ast.Import | ast.FunctionDef)]
    namespace = {}
    exec(compile(code, name, "exec"), namespace)
    return types.SimpleNamespace(**namespace)


POPULATIONS, TASKS = functions_of("populations"), functions_of("task-vectors")


def population(name, rows=3):
    """A model of the zoo, its way back from a vector, and vectors of others like it, all different."""
    model = ZOO[name].make()
    vector, restructure = tp.ravel(model, ZOO[name].layout(model))
    factors = np.linspace(0.5, 1.5, rows, dtype=np.float32).astype(vector.dtype)
    return model, restructure, factors[:, None] * np.asarray(vector)


WITH_FUNCTIONS = "functions and static fields"  # which are called within the map


@pytest.mark.parametrize("name", [WITH_FUNCTIONS, "same array twice", "transposed tie", "complex", "prng keys"])
def test_values_gradients_and_models_of_all_are_those_of_each(name):
    _, restructure, matrix = population(name)
    of_loss = jax.value_and_grad(lambda vector: loss(restructure(vector)))
    model = restructure if name != WITH_FUNCTIONS else lambda _: []
    gradient = lambda row: restructure.ravel_gradient(gradient_of_loss(restructure.layout)(restructure(row)))

    @jax.jit
    def ways(matrix):
        each = [(loss(restructure(row)), gradient(row)) for row in matrix]
        return jax.vmap(of_loss)(matrix), each, jax.vmap(model)(matrix), [model(row) for row in matrix]

    found, each, stacked, models = ways(matrix)
    assert_close(found, jax.tree.map(lambda *leaves: np.stack(leaves), *each))
    assert len({float(value) for value in found[0]}) == len(matrix)
    assert jax.tree.structure(stacked) == jax.tree.structure(models[0])
    for array, *each in zip(*map(jax.tree.leaves, [stacked, *models]), strict=True):
        np.testing.assert_array_equal(as_data(array), np.stack([np.asarray(as_data(leaf)) for leaf in each]))


@pytest.mark.parametrize("form", [tp.ravel, tp.stack])
def test_a_model_with_functions_is_called_within_the_map(form):
    one, restructure = form(filled(eqx.nn.MLP, 2, 1, 3, 1, activation=jnp.tanh), "layers.1")
    rows = [jax.tree.map(lambda array, by=by: by * np.asarray(array), one) for by in np.float32([1, 2])]
    stacked = jax.tree.map(lambda *arrays: np.stack(arrays), *rows)

    @jax.jit
    def ways(rows, stacked, x, way):
        every = eqx.filter_vmap(restructure)(stacked)  # hands functions around the map
        return jnp.stack([restructure(row)(x) for row in rows]), [
            jax.vmap(lambda v, x: restructure(v)(x), (0, None))(stacked, x),
            jax.vmap(lambda v, x, way: way(v)(x), (0, None, None))(stacked, x, way),
            eqx.filter_vmap(lambda net, x: net(x), in_axes=(eqx.if_array(0), None))(every, x),
        ]

    want, found = ways(rows, stacked, ramp(2), restructure)
    assert_close(found, [want] * 3)
    for jit in (tp.jit, eqx.filter_jit):  # which hand functions on
        assert_same(jit(restructure)(rows[0]), restructure(rows[0]))


def test_an_estimate_of_evolution_is_the_derivative_along_its_noise():
    _, _, matrix = population("same array twice", rows=2)
    start, goal = np.asarray(matrix, np.float64)
    away = lambda vector: jnp.sum((vector - matrix[1]) ** 2)  # of which the antithetic difference is the derivative
    noise = np.asarray(jax.random.normal(jax.random.key(0), (5, goal.size)), np.float64)
    got = jax.jit(lambda vector, key: POPULATIONS.es_gradient(away, vector, key, pairs=5))(matrix[0], jax.random.key(0))
    np.testing.assert_allclose(got, np.mean([e * (e @ (2 * (start - goal))) for e in noise], 0), 1e-3, 1e-3)


def test_svgd_is_its_double_loop():
    svgd = jax.jit(lambda matrix: POPULATIONS.svgd(lambda x: jnp.sum(jnp.cos(x)) - 0.5 * jnp.sum(x**2), matrix))
    matrix = np.random.default_rng(0).normal(10, size=(5, 3)).astype(np.float32)
    x, n = np.asarray(matrix, np.float64), len(matrix)
    slopes, width = -np.sin(x) - x, np.median([np.sum((a - b) ** 2) for a in x for b in x]) / np.log(n + 1)
    want = np.zeros_like(x)
    for i in range(n):
        for j in range(n):
            kernel = np.exp(-np.sum((x[j] - x[i]) ** 2) / width)
            want[i] += (kernel * slopes[j] - 2 / width * (x[j] - x[i]) * kernel) / n
    np.testing.assert_allclose(svgd(matrix), want, 1e-4, 1e-4)
    one = np.asarray(ramp(3))  # equal ones climb together
    np.testing.assert_allclose(svgd(np.stack([one] * n)), [-np.sin(one) - one] * n, 1e-5)


@pytest.mark.parametrize(
    ("where", "changed"), [("head", ["body.1"]), ("body.0", ["body.0"]), ("**", ["body.0", "body.1"])]
)
def test_a_task_vector_of_one_part(where, changed):
    _, restructure, (base, tuned, _) = population("same array twice")
    task = tuned - base
    places = restructure.layout.indices(where)
    got = base.copy()
    got[np.asarray(places)] += task[np.asarray(places)]
    base, task = map(jax.device_put, (base, task))
    part = restructure.view(task)[where]
    assert_same(restructure.view(base).at[where].add(part), got)
    before, after = (dict(restructure.view(each).items()) for each in (base, jax.device_put(got)))
    assert [path for path in before if np.any(np.asarray(before[path]) != after[path])] == changed
    model = restructure(got)
    assert model["head"] is model["embed"] is model["body"][1]


def test_pcgrad_takes_out_what_opposes_the_other_tasks():
    pcgrad, key = jax.jit(TASKS.pcgrad), jax.random.key(1)
    # Of these, one comes to oppose what it was itself; that is no other task.
    grads = np.random.default_rng(7).normal(size=(4, 11)).astype(np.float32)[:, :7]
    operated = pcgrad(grads, key)
    orders = jax.vmap(lambda key: jax.random.permutation(key, len(grads)))(jax.random.split(key, len(grads)))
    rows, want = np.asarray(grads, np.float64), []
    for i, order in enumerate(np.asarray(orders)):
        row = rows[i]
        for j in order:
            if j != i and row @ rows[j] < 0:
                row = row - row @ rows[j] / (rows[j] @ rows[j]) * rows[j]
        want.append(row)
    np.testing.assert_allclose(operated, want, 1e-5, 1e-5)
    assert (abs(operated - grads).max(1) > 0.1).sum() >= 3
    agree = np.eye(4, 7, 2, dtype=np.float32) + np.eye(4, 7, 1, dtype=np.float32)
    agree[2] = 0  # what agrees stays as it is, and what is zero
    assert_same(pcgrad(agree, key), agree)


def test_hmc_with_the_variances_as_inverse_mass_sees_a_standard_normal():
    @jax.jit
    def samples(starts, keys, variances):
        log_density = lambda vector: -0.5 * jnp.sum(vector**2 / variances)
        hmc = lambda row, key: POPULATIONS.hmc(log_density, row, key, variances, step=0.5, steps=5)
        return jax.lax.scan(lambda rows, keys: (jax.vmap(hmc)(rows, keys), None), starts, keys)[0]

    variances = jnp.array([4.0, 1.0, 0.25, 2**-6])
    keys, starts = jax.random.split(jax.random.key(0), (20, 400)), jnp.ones((400, 4))
    found = samples(jnp.sqrt(variances)[None] * starts, keys, variances)
    assert_close(found, jnp.sqrt(variances)[None] * samples(starts, keys, jnp.ones(4)))
    np.testing.assert_allclose(found.var(0) / variances, 1.0, atol=0.25)
