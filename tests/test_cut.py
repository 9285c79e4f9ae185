"""Cut and join: two linear maps, each the transpose of the other, that compile to few kernels."""

import collections
import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from treeparams._primitives import cut, join

from .zoo import flops

MANY = ((2, 2), (2,), ()) * 16 + ((3, 1), (0,), (2, 0))  # shapes that repeat, and some that stand once
SIZE = sum(map(math.prod, MANY))
SHAPES = st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=30).map(tuple)


def reference(vector, shapes):
    """The same by indexing, in NumPy."""
    vector = np.asarray(vector)
    pieces, at = [], 0
    for shape in shapes:
        pieces.append(vector[at : at + math.prod(shape)].reshape(shape))
        at += math.prod(shape)
    return pieces


def weighed(pieces):
    return sum((i + 1) * jnp.sum(jnp.sin(piece)) for i, piece in enumerate(pieces))


def f(vector):
    return weighed(cut(vector, MANY))


WEIGHTS = np.repeat(np.arange(len(MANY)) + 1, [math.prod(shape) for shape in MANY]).astype(np.float32)


def slow(vector):
    return jnp.sum(WEIGHTS * jnp.sin(vector[:SIZE]))


VECTOR = jnp.linspace(-1.0, 1.0, SIZE + 3)  # three more than is cut

DERIVATIVES = {
    "value": lambda f: f,
    "gradient": jax.grad,
    "jvp": lambda f: lambda v: jax.jvp(f, (v,), (jnp.cos(v),))[1],
    "hessian": jax.hessian,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third order": lambda f: jax.grad(lambda v: jnp.sum(jax.grad(lambda v: jnp.sum(jax.grad(f)(v) ** 3))(v))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "linearize": lambda f: lambda v: jax.linearize(f, v)[1](jnp.cos(v)),
    "vmap": lambda f: jax.vmap(jax.grad(f), 1, 1),
    "scan": lambda f: lambda v: jax.lax.scan(lambda v, _: (v - 0.1 * jax.grad(f)(v), f(v)), v, None, length=3),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_every_derivative_is_that_of_slices(name):
    of, at = DERIVATIVES[name], jnp.stack([VECTOR, 2 * VECTOR], 1) if name == "vmap" else VECTOR
    want = of(slow)(at)
    for got in (of(f)(at), jax.jit(of(f))(at)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, want)


@hypothesis.settings(deadline=None, max_examples=40, derandomize=True)
@hypothesis.given(SHAPES, st.integers(0, 3), st.booleans())
def test_join_inverts_cut_and_is_its_transpose(shapes, padding, compiled):
    size = sum(map(math.prod, shapes))
    vector = jnp.arange(1.0, size + padding + 1)
    apply = jax.jit if compiled else lambda f: f
    pieces = apply(lambda v: cut(v, shapes))(vector)
    for got, want in zip(pieces, reference(vector, shapes), strict=True):
        assert got.shape == want.shape
        np.testing.assert_array_equal(got, want)
    joined = apply(lambda p: join(p, shapes, size + padding))(pieces)
    np.testing.assert_array_equal(joined, np.where(np.arange(size + padding) < size, vector, 0))
    transposed = jax.linear_transpose(lambda v: cut(v, shapes), vector)(pieces)[0]
    np.testing.assert_array_equal(transposed, joined)
    back = jax.linear_transpose(lambda p: join(p, shapes, size + padding), pieces)(vector)[0]
    assert len(back) == len(shapes)
    jax.tree.map(np.testing.assert_array_equal, back, pieces)


def test_stacks_of_vectors():
    stack = jnp.stack([VECTOR, -VECTOR])
    for axis in (0, 1):
        got = jax.vmap(lambda v: cut(v, MANY), axis)(jnp.moveaxis(stack, 0, axis))
        for piece, first, second in zip(got, reference(VECTOR, MANY), reference(-VECTOR, MANY), strict=True):
            np.testing.assert_array_equal(piece, np.stack([first, second]))
    twice = jax.vmap(jax.vmap(lambda v: cut(v, MANY)[0]))(jnp.stack([stack, stack, stack]))
    assert twice.shape == (3, 2, 2, 2)
    joined = jax.vmap(lambda a, b: join([a, b], ((), (2,)), 4), (0, None))(jnp.arange(3.0), jnp.ones(2))
    np.testing.assert_array_equal(joined, [[0, 1, 1, 0], [1, 1, 1, 0], [2, 1, 1, 0]])
    hessians = jax.jit(jax.vmap(jax.hessian(f)))(stack)
    np.testing.assert_allclose(hessians[1], jax.hessian(slow)(-VECTOR), 1e-5, 1e-5)


def test_nothing_compiled():
    with jax.disable_jit():
        np.testing.assert_allclose(f(VECTOR), slow(VECTOR), 1e-5)
        np.testing.assert_array_equal(join(cut(VECTOR, MANY), MANY, SIZE), VECTOR[:SIZE])


def test_no_part_of_it_is_kept_where_it_is_not_read():
    text = jax.jit(lambda v: cut(v, ((3,), (2,)))[1]).lower(jnp.ones(5)).compile().as_text()
    assert "f32[3]" not in text


# -- What it compiles to -----------------------------------------------------------------------------------------------


def kernels(compiled):
    """How many different programs XLA has made of the loops of a module: fusions that are the same but for names."""
    bodies = re.findall(r"^%?(\S*fused_computation\S*|\S*wrapped_\S*) .*?\{\n(.*?)^\}", compiled.as_text(), re.M | re.S)
    assert bodies
    plain = [re.sub(r", metadata=\{.*?\}|%?[\w.\-]+(?=[ ,):=])", "", body) for _, body in bodies]
    return collections.Counter(plain)


def chain(leaves, x):
    for weight, bias in zip(leaves[::2], leaves[1::2], strict=True):
        x = jnp.tanh(x @ weight + bias[None])
    return jnp.sum(x**2)


def net(layers):
    shapes = ((4, 4), (4,)) * layers
    return shapes, jnp.ones(20 * layers), jnp.ones((2, 4))


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is measured here is XLA's code for CPUs")
def test_leaves_of_one_shape_share_their_kernels():
    def count(layers):
        shapes, vector, _ = net(layers)
        return len(kernels(jax.jit(lambda v: cut(v, shapes)).lower(vector).compile()))

    assert count(20) == count(40) <= 4
    static = jax.jit(lambda v: [2 * each for each in jax.lax.split(v, (20,) * 40)]).lower(jnp.ones(800)).compile()
    assert len(kernels(static)) == 40  # what it is compared with has one kernel each


def test_operations_are_those_of_the_tree():
    shapes, vector, x = net(30)
    tree = [2 * jnp.ones(shape) for shape in shapes]
    by_vector = lambda v, x: chain(cut(v, shapes), x)
    of_tree, of_vector = flops(jax.value_and_grad(chain), tree, x), flops(jax.value_and_grad(by_vector), vector, x)
    assert of_tree > 1000
    assert of_vector <= 1.001 * of_tree


@pytest.mark.parametrize("order", [1, 2])
def test_the_program_grows_with_the_leaves_and_no_faster(order):
    def lines(layers):
        shapes, vector, x = net(layers)
        of = jax.grad(lambda v: chain(cut(v, shapes), x))
        if order == 2:
            of = jax.grad(lambda v, of=of: jnp.sum(of(v) ** 2))
        assert f"f32[{vector.size}]" in str(jax.make_jaxpr(of)(vector))
        padded = str(jax.make_jaxpr(of)(vector)).count("pad[")
        assert padded == 0  # a slice for itself would be transposed to one
        return len(jax.jit(of).lower(vector).as_text().splitlines())

    small, large = lines(20), lines(40)
    assert large <= 2.1 * small
