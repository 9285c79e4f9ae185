"""A vector cut into leaves, stacks cut into rows, and both joined again: each the transpose of the other."""

import math
import re

import hypothesis
import hypothesis.strategies as st
import jax
import jax.experimental.jet
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..long import LONG, some
from ..zoo import cost, flops

SHAPES = ((2,), ()) * 16 + ((3, 1), (0,), (2, 0))  # some stand often enough to share a kernel, some once
SIZE = sum(map(math.prod, SHAPES))
VECTOR = np.linspace(-1.0, 1.0, SIZE + 1, dtype=np.float32)  # one more than the leaves take
WEIGHTS = np.repeat(np.arange(len(SHAPES)) + 1, [math.prod(shape) for shape in SHAPES]).astype(np.float32)


def form(shapes, pad_to=1):
    """The `Restructure` of a list of leaves of these shapes: called it cuts, `.ravel` joins."""
    return tp.ravel([np.zeros(shape, np.float32) for shape in shapes], pad_to=pad_to)[1]


RESTRUCTURE = form(SHAPES, pad_to=SIZE + 1)


DERIVATIVES = {
    "gradient": jax.grad,
    "reverse over reverse": lambda f: jax.jacrev(jax.jacrev(f)),
    "forward over forward": lambda f: jax.jacfwd(jax.jacfwd(f)),
    "forward over reverse": jax.hessian,
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third order": lambda f: jax.grad(lambda v: jnp.sum(jax.grad(lambda v: jnp.sum(jax.grad(f)(v) ** 3))(v))),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "linearize": lambda f: lambda v: jax.linearize(f, v)[1](jnp.cos(v)),
    "vmap": lambda f: lambda v: jax.vmap(jax.grad(f), 1, 1)(jnp.stack([v, 2 * v], 1)),
    "vmap of hessian": lambda f: lambda v: jax.vmap(jax.hessian(f))(jnp.stack([v, -v])),
    "scan": lambda f: lambda v: jax.lax.scan(lambda v, _: (v - 0.1 * jax.grad(f)(v), f(v)), v, None, length=3),
    "jet": lambda f: lambda v: jax.experimental.jet.jet(f, (v,), ([jnp.ones_like(v), jnp.cos(v)],)),
}
# Over rows; others in each run go through the same rules.
LONG_OF_ROWS = (
    "forward over forward",
    "forward over reverse",
    "reverse over reverse",
    "third order",
    "vmap of hessian",
)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_every_derivative_is_that_of_slices(name):
    of = DERIVATIVES[name]
    cut = lambda vector: sum((i + 1) * jnp.sum(jnp.sin(piece)) for i, piece in enumerate(RESTRUCTURE(vector)))
    slices = lambda vector: jnp.sum(WEIGHTS * jnp.sin(vector[:SIZE]))
    got, want = jax.jit(lambda v: (of(cut)(v), of(slices)(v)))(VECTOR)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, want)


def test_without_jit():
    with jax.disable_jit():
        np.testing.assert_array_equal(RESTRUCTURE.ravel(RESTRUCTURE(VECTOR)), np.append(VECTOR[:-1], 0))


@hypothesis.settings(deadline=None, max_examples=6, derandomize=True)
@hypothesis.example(SHAPES, 4)  # generated lists have no shape often enough to share a kernel
@hypothesis.given(
    st.lists(st.lists(st.integers(0, 3), max_size=3).map(tuple), min_size=1, max_size=30).map(tuple),
    st.integers(1, 4),
)
def test_joining_inverts_cutting_and_is_its_transpose(shapes, pad_to):
    restructure = form(shapes, pad_to)
    size = restructure.layout.size
    vector = np.arange(1.0, -(-size // pad_to) * pad_to + 1, dtype=np.float32)

    @jax.jit
    def all_of_it(vector):
        pieces = restructure(vector)
        transposed = jax.linear_transpose(restructure, vector)(pieces)[0]
        back = jax.linear_transpose(restructure.ravel, pieces)(vector)[0]
        return pieces, restructure.ravel(pieces), transposed, back

    pieces, joined, transposed, back = all_of_it(vector)
    ends = np.cumsum([math.prod(shape) for shape in shapes])
    for piece, part, shape in zip(pieces, np.split(vector, ends)[:-1], shapes, strict=True):
        np.testing.assert_array_equal(piece, part.reshape(shape))
    jax.tree.map(np.testing.assert_array_equal, back, pieces)
    np.testing.assert_array_equal(joined, np.where(np.arange(vector.size) < size, vector, 0))
    np.testing.assert_array_equal(transposed, joined)


def test_joining_what_is_mapped_with_what_is_not():
    small = form(((), (2,)), pad_to=4)
    joined = jax.vmap(lambda a, b: small.ravel([a, b]), (0, None))(np.arange(3, dtype=np.float32), np.ones(2, "f"))
    np.testing.assert_array_equal(joined, [[0, 1, 1, 0], [1, 1, 1, 0], [2, 1, 1, 0]])


def test_what_is_not_read_is_not_cut():
    restructure = form(((1000,), (2,)))
    assert cost(lambda v: restructure(v)[1], np.ones(1002, np.float32))["bytes accessed"] <= 32


def net(layers):
    return form(((4, 4), (4,)) * layers), np.ones(20 * layers, np.float32)


def chain(leaves):
    x = jnp.ones((2, 4))
    for weight, bias in zip(leaves[::2], leaves[1::2], strict=True):
        x = jnp.tanh(x @ weight + bias[None])
    return jnp.sum(x**2)


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is looked at here is XLA's code for CPUs")
def test_leaves_of_one_shape_share_their_kernels():
    restructure, vector = net(20)
    program = jax.jit(restructure).lower(vector).compile().as_text()
    # A slice at an offset that XLA knows is a kernel of its own.
    assert program.count(" dynamic-slice(") == 40
    assert " slice(" not in program


def test_operations_are_those_of_the_tree():
    restructure, vector = net(18)
    of_tree = flops(jax.value_and_grad(chain), restructure(vector))
    assert of_tree > 1000
    additions = len(restructure.layout.slots)  # where a leaf begins is a sum of two numbers
    assert flops(jax.value_and_grad(lambda v: chain(restructure(v))), vector) - additions <= 1.001 * of_tree


@pytest.mark.parametrize("order", [1, 2])
def test_the_program_grows_with_the_leaves_and_no_faster(order):
    def lines(layers):
        restructure, vector = net(layers)
        of = jax.grad(lambda v: chain(restructure(v)))
        if order == 2:
            of = jax.grad(lambda v, of=of: jnp.sum(of(v) ** 2))
        program = str(jax.make_jaxpr(of)(vector))
        assert f"f32[{vector.size}]" in program
        assert "pad[" not in program  # a slice for itself would be transposed to one
        return len(jax.jit(of).lower(vector).as_text().splitlines())

    assert lines(40) <= 2.1 * lines(20)


# -- Rows of stacks: the axis that is cut is followed by others --------------------------------------------------------

COUNT = 20  # so many rows are cut at offsets that are known at run time alone
ROWS = np.sin(np.arange(2.0 * COUNT, dtype=np.float32)).reshape(COUNT, 1, 2)


def rows(count, *shape):
    """The `Restructure` of so many leaves of one shape, of one stack: there and back."""
    way = tp.stack([np.zeros(shape, np.float32) for _ in range(count)])[1]
    key = f"float32[{','.join(map(str, shape))}]"
    return (lambda stack: way({key: stack})), (lambda leaves: way.ravel(leaves)[key])


CUT, JOIN = rows(COUNT, 1, 2)


@pytest.mark.parametrize("name", some(DERIVATIVES, LONG_OF_ROWS))
def test_every_derivative_is_that_of_the_whole_stack(name):
    of = DERIVATIVES[name]
    cut = lambda stack: sum((i + 1) * jnp.sum(jnp.sin(row)) for i, row in enumerate(CUT(stack)))
    weights = np.arange(1, COUNT + 1, dtype=np.float32)[:, None, None]
    whole = lambda stack: jnp.sum(weights * jnp.sin(stack))
    got, want = jax.jit(lambda s: (of(cut)(s), of(whole)(s)))(ROWS)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, want)


def test_jet_of_joining():
    series = [[np.cos((k + 1) * row) for k in range(3)] for row in ROWS]
    primal, terms = jax.jit(lambda p, s: jax.experimental.jet.jet(lambda *p: JOIN(list(p)), p, s))(list(ROWS), series)
    np.testing.assert_array_equal(primal, ROWS)
    for k, term in enumerate(terms):
        np.testing.assert_allclose(term, np.stack([each[k] for each in series]), 1e-6)


@pytest.mark.parametrize("axis", [0, 1, 2, 3, -1])
def test_maps_over_any_axis(axis):
    many = np.stack([ROWS, 2 * ROWS, ROWS + 1], axis)
    of = jax.vmap(jax.vmap(CUT, axis, 0), None, -1, axis_size=2)
    back = jax.vmap(jax.vmap(JOIN, 0, axis), -1, -1)
    leaves, joined = jax.jit(lambda x: (of(x), back(of(x))))(many)
    for i, leaf in enumerate(leaves):
        np.testing.assert_array_equal(leaf[..., 1], np.take(np.moveaxis(many, axis, 0), i, 1))
    np.testing.assert_array_equal(joined[..., 1], many)
    sums = jax.jit(jax.vmap(jax.grad(lambda x: jnp.sum(CUT(x)[7] ** 2)), axis, axis))(many)
    want = np.zeros((3, *ROWS.shape), np.float32)
    want[:, 7] = 2 * np.moveaxis(many, axis, 0)[:, 7]
    np.testing.assert_array_equal(sums, np.moveaxis(want, 0, axis))


@hypothesis.settings(deadline=None, max_examples=4, derandomize=True)
@hypothesis.example(40, [1, 2])
@hypothesis.given(st.integers(1, 40), st.lists(st.integers(0, 3), max_size=3))
def test_joining_rows_inverts_cutting_and_is_its_transpose(count, shape):
    cut, join = rows(count, *shape)
    stack = np.arange(1.0, count * math.prod(shape) + 1, dtype=np.float32).reshape(count, *shape)

    @jax.jit
    def all_of_it(stack):
        leaves = cut(stack)
        transposed = jax.linear_transpose(cut, stack)(leaves)[0]
        back = jax.linear_transpose(join, leaves)(stack)[0]
        return leaves, join(leaves), transposed, back

    leaves, joined, transposed, back = all_of_it(stack)
    for leaf, row in zip(leaves, stack, strict=True):
        np.testing.assert_array_equal(leaf, row)
    jax.tree.map(np.testing.assert_array_equal, back, leaves)
    np.testing.assert_array_equal(joined, stack)
    np.testing.assert_array_equal(transposed, stack)
    with jax.disable_jit():
        np.testing.assert_array_equal(join(cut(stack)), stack)


def test_joining_rows_that_are_mapped_with_those_that_are_not():
    join = rows(3, 2)[1]
    many, one = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones(2, "f")
    joined = jax.vmap(lambda a, b, c: join([a, b, c]), (1, None, 1), 2)(many, one, 2 * many)
    want = [[many[:, i], one, 2 * many[:, i]] for i in range(4)]
    np.testing.assert_array_equal(np.moveaxis(joined, 2, 0), want)


def test_rows_that_are_not_read():
    assert cost(lambda s: CUT(s)[3], ROWS)["bytes accessed"] <= 64  # of 160
    of_one = jax.make_jaxpr(jax.grad(lambda s: jnp.sum(CUT(s)[3] ** 2)))(ROWS)
    assert str(of_one).count("= join[") == 1
    only_some = lambda f: jax.jit(lambda s: jax.linear_transpose(f, s)(list(ROWS[5:9]))[0])(ROWS)
    np.testing.assert_array_equal(only_some(lambda s: CUT(s)[5:9])[5:9], ROWS[5:9])
    assert np.count_nonzero(only_some(lambda s: CUT(s)[5:9])) == np.count_nonzero(ROWS[5:9])


@pytest.mark.parametrize("dtype", [np.float32, pytest.param(np.float64, marks=LONG), np.float16])
def test_many_rows_outside_of_a_trace(dtype):
    counts = {(): 65, (1, 2): 64, (2,): 129, (2, 2): 1, (3, 0): 70}
    leaves = [np.full(shape, n + 100 * i, np.float32) for i, shape in enumerate(counts) for n in range(counts[shape])]
    leaves += [np.full((2,), -n, np.float32) for n in range(3)]  # rows of one shape need not be neighbours
    model = list(map(jnp.asarray, leaves))
    stacks, way = tp.stack(model)
    for shape in counts:
        want = np.stack([leaf for leaf in leaves if leaf.shape == shape])
        np.testing.assert_array_equal(stacks[f"float32[{','.join(map(str, shape))}]"], want)
    back = way(jax.tree.map(lambda x: np.asarray(x).astype(dtype), stacks))
    assert {leaf.dtype.name for leaf in back} == {"float32"}
    jax.tree.map(np.testing.assert_array_equal, back, model)
    jax.jit(lambda stacks: jax.tree.map(lambda x: x + 1, stacks), donate_argnums=0)(stacks)
    jax.tree.map(np.testing.assert_array_equal, model, leaves)  # in buffers of their own


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is looked at here is XLA's code for CPUs")
def test_rows_share_their_kernels():
    program = jax.jit(CUT).lower(ROWS).compile().as_text()
    assert program.count(" dynamic-slice(") == COUNT
    assert " slice(" not in program


@pytest.mark.parametrize("order", [1, 2])
def test_the_program_over_stacks_grows_with_the_leaves_and_no_faster(order):
    def lines(layers):
        stacks, restructure = tp.stack([np.ones(shape, np.float32) for shape in ((4, 4), (4,)) * layers])
        of = jax.grad(lambda s: chain(restructure(s)))
        if order == 2:
            of = jax.grad(lambda s, of=of: sum(jnp.sum(each**2) for each in of(s).values()))
        program = str(jax.make_jaxpr(of)(stacks))
        assert f"f32[{layers},4,4]" in program
        assert "pad[" not in program  # a row for itself would be transposed to one
        return len(jax.jit(of).lower(stacks).as_text().splitlines())

    assert lines(40) <= 2.1 * lines(20)


def test_operations_over_stacks_are_those_of_the_tree():
    stacks, restructure = tp.stack([np.ones(shape, np.float32) for shape in ((4, 4), (4,)) * 18])
    of_tree = flops(jax.value_and_grad(chain), restructure(stacks))
    assert of_tree > 1000
    additions = len(restructure.layout.slots)
    assert flops(jax.value_and_grad(lambda s: chain(restructure(s))), stacks) - additions <= 1.001 * of_tree


# -- Offsets that are hidden from the compiler -------------------------------------------------------------------------

ORDERS = {
    "layers": ((4, 4), (4,)) * 100,
    "several in a layer": ((4, 4), (4, 4), (4,), (4, 4)) * 50,
    "no order": tuple((4,) if i * i % 7 < 4 else (4, 4) for i in range(100)),
}


@pytest.mark.parametrize("shapes", ORDERS.values(), ids=ORDERS)
def test_leaves_in_any_order_are_cut_where_they_lie(shapes):
    _, restructure = tp.ravel([np.ones(shape, np.float32) for shape in shapes])
    sizes = [math.prod(shape) for shape in shapes]
    vector = np.arange(sum(sizes), dtype=np.float32)
    lying = np.split(vector, np.cumsum(sizes)[:-1])
    for leaf, shape, expected in zip(jax.jit(restructure)(vector), shapes, lying, strict=True):
        np.testing.assert_array_equal(leaf, expected.reshape(shape))


@pytest.mark.parametrize("name", ["layers", "several in a layer"])
def test_layers_that_repeat_share_hidden_numbers(name):
    vector, restructure = tp.ravel([np.ones(shape, np.float32) for shape in ORDERS[name]])
    program = jax.jit(restructure).lower(vector).as_text()
    numbers = re.search(r"stablehlo\.case.*?stablehlo\.return ([^:]*):", program, re.DOTALL).group(1).split(",")
    assert 2 <= len(numbers) <= 4 * math.ceil(math.sqrt(len(ORDERS[name])))
