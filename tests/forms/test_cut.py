"""A vector cut into leaves, stacks cut into rows, and both joined again: each the transpose of the other."""

import math
import re

import jax
import jax.experimental.jet
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..zoo import cost, flops

SHAPES = ((2,), ()) * 16 + ((3, 1), (0,), (2, 0))  # some stand often enough to share a kernel, some once
SIZE = sum(map(math.prod, SHAPES))
VECTOR = np.linspace(-1.0, 1.0, SIZE + 1, dtype=np.float32)  # one more than the leaves take
COUNT = 20  # so many rows are cut at offsets that are known at run time alone
ROWS = np.sin(np.arange(2.0 * COUNT, dtype=np.float32)).reshape(COUNT, 1, 2)
ON_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is looked at here is XLA's code for CPUs")


def leaves_in(shapes, pad_to=1):
    """From a vector to leaves of these shapes, and back."""
    restructure = tp.ravel([np.zeros(shape, np.float32) for shape in shapes], pad_to=pad_to)[1]
    return restructure, restructure.ravel


def rows(count, *shape):
    """From a stack of so many leaves of one shape to these, and back."""
    way = tp.stack([np.zeros(shape, np.float32) for _ in range(count)])[1]
    key = f"float32[{','.join(map(str, shape))}]"
    return (lambda stack: way({key: stack})), (lambda leaves: way.ravel(leaves)[key])


FORMS = {  # there and back, an array, and the number of the leaf that each element belongs to
    "vector": (
        *leaves_in(SHAPES, SIZE + 1),
        VECTOR,
        np.append(np.repeat(np.arange(len(SHAPES)) + 1, [math.prod(shape) for shape in SHAPES]), 0).astype("f"),
    ),
    "rows": (*rows(COUNT, 1, 2), ROWS, np.arange(1, COUNT + 1, dtype=np.float32)[:, None, None]),
}
CUT, JOIN = FORMS["rows"][:2]
forms = pytest.mark.parametrize("form", FORMS)
DERIVATIVES = {
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third order": lambda f: jax.grad(lambda v: jnp.sum(jax.grad(lambda v: jnp.sum(jax.grad(f)(v) ** 3))(v))),
    "vmap of hessian": lambda f: lambda v: jax.vmap(jax.hessian(f), 1, 1)(jnp.stack([v, -v], 1)),
    "scan": lambda f: lambda v: jax.lax.scan(lambda v, _: (v - jax.grad(jax.checkpoint(f))(v), f(v)), v, None, 3),
    "jet": lambda f: lambda v: jax.experimental.jet.jet(f, (v,), ([jnp.ones_like(v), jnp.cos(v)],)),
}


@forms
@pytest.mark.parametrize("name", DERIVATIVES)
def test_every_derivative_is_that_of_the_whole_array(form, name):
    of, (cut, _, array, numbers) = DERIVATIVES[name], FORMS[form]
    in_leaves = lambda array: sum((i + 1) * jnp.sum(jnp.sin(piece)) for i, piece in enumerate(cut(array)))
    whole = lambda array: jnp.sum(numbers * jnp.sin(array))
    got, want = jax.jit(lambda array: (of(in_leaves)(array), of(whole)(array)))(array)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, want)


def test_jet_of_joining():
    series = [[np.cos((k + 1) * row) for k in range(3)] for row in ROWS]
    primal, terms = jax.jit(lambda p, s: jax.experimental.jet.jet(lambda *p: JOIN(list(p)), p, s))(list(ROWS), series)
    np.testing.assert_array_equal(primal, ROWS)
    for k, term in enumerate(terms):
        np.testing.assert_allclose(term, np.stack([each[k] for each in series]), 1e-6)


JOINED = {  # there and back, the shape of the array, and how many of its elements are in leaves
    "a padded vector": (leaves_in(SHAPES, 4), (52,), SIZE),
    "one number": (leaves_in([()]), (1,), 1),
    "leaves of three axes": (leaves_in([(0, 3), (2, 1, 2), (3,)], 5), (10,), 7),
    "many rows": (rows(40, 1, 2), (40, 1, 2), 80),
    "numbers": (rows(3), (3,), 3),
    "empty rows": (rows(2, 3, 0), (2, 3, 0), 0),
}


@pytest.mark.parametrize("name", JOINED)
def test_joining_inverts_cutting_and_is_its_transpose(name):
    (cut, join), shape, count = JOINED[name]
    array = np.arange(1.0, math.prod(shape) + 1, dtype=np.float32).reshape(shape)

    @jax.jit
    def all_of_it(array):
        leaves = cut(array)
        transposed = jax.linear_transpose(cut, array)(leaves)[0]
        back = jax.linear_transpose(join, leaves)(array)[0]
        return leaves, join(leaves), transposed, back

    leaves, joined, transposed, back = all_of_it(array)
    np.testing.assert_array_equal(np.concatenate([np.ravel(leaf) for leaf in leaves]), array.ravel()[:count])
    jax.tree.map(np.testing.assert_array_equal, back, leaves)
    np.testing.assert_array_equal(joined, np.where(array <= count, array, 0))
    np.testing.assert_array_equal(transposed, joined)
    with jax.disable_jit():
        np.testing.assert_array_equal(join(cut(array)), joined)


def test_joining_what_is_mapped_with_what_is_not():
    join, of_rows = leaves_in(((), (2,)), pad_to=4)[1], rows(3, 2)[1]
    joined = jax.vmap(lambda a, b: join([a, b]), (0, None))(np.arange(3, dtype=np.float32), np.ones(2, "f"))
    np.testing.assert_array_equal(joined, [[0, 1, 1, 0], [1, 1, 1, 0], [2, 1, 1, 0]])
    many, one = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones(2, "f")
    joined = jax.vmap(lambda a, b, c: of_rows([a, b, c]), (1, None, 1), 2)(many, one, 2 * many)
    want = [[many[:, i], one, 2 * many[:, i]] for i in range(4)]
    np.testing.assert_array_equal(np.moveaxis(joined, 2, 0), want)


@pytest.mark.parametrize("axis", [0, 2, -1])
def test_maps_over_any_axis(axis):
    many = np.stack([ROWS, 2 * ROWS, ROWS + 1], axis)
    of = jax.vmap(jax.vmap(CUT, axis, 0), None, -1, axis_size=2)
    back = jax.vmap(jax.vmap(JOIN, 0, axis), -1, -1)
    along = jax.vmap(jax.grad(lambda x: jnp.sum(CUT(x)[7] ** 2)), axis, axis)
    leaves, joined, sums = jax.jit(lambda x: (of(x), back(of(x)), along(x)))(many)
    for i, leaf in enumerate(leaves):
        np.testing.assert_array_equal(leaf[..., 1], np.take(np.moveaxis(many, axis, 0), i, 1))
    np.testing.assert_array_equal(joined[..., 1], many)
    want = np.zeros((3, *ROWS.shape), np.float32)
    want[:, 7] = 2 * np.moveaxis(many, axis, 0)[:, 7]
    np.testing.assert_array_equal(sums, np.moveaxis(want, 0, axis))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
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


# -- What it costs -----------------------------------------------------------------------------------------------------


def test_what_is_not_read_is_not_cut():
    restructure = leaves_in(((1000,), (2,)))[0]
    assert cost(lambda v: restructure(v)[1], np.ones(1002, np.float32))["bytes accessed"] <= 32
    assert cost(lambda s: CUT(s)[3], ROWS)["bytes accessed"] <= 64  # of 160
    of_one = jax.make_jaxpr(jax.grad(lambda s: jnp.sum(CUT(s)[3] ** 2)))(ROWS)
    assert str(of_one).count("= join[") == 1
    only_some = jax.jit(lambda s: jax.linear_transpose(lambda s: CUT(s)[5:9], s)(list(ROWS[5:9]))[0])(ROWS)
    some = (np.arange(COUNT) >= 5) & (np.arange(COUNT) < 9)
    np.testing.assert_array_equal(only_some, np.where(some[:, None, None], ROWS, 0))


def net(layers, form):
    model = [np.ones(shape, np.float32) for shape in ((4, 4), (4,)) * layers]
    return form(model)


def chain(leaves):
    x = jnp.ones((2, 4))
    for weight, bias in zip(leaves[::2], leaves[1::2], strict=True):
        x = jnp.tanh(x @ weight + bias[None])
    return jnp.sum(x**2)


@ON_CPU
def test_leaves_of_one_shape_share_their_kernels():
    vector, restructure = net(20, tp.ravel)
    for f, array, count in ((restructure, vector, 40), (CUT, ROWS, COUNT)):
        program = jax.jit(f).lower(array).compile().as_text()
        # A slice at an offset that XLA knows is a kernel of its own.
        assert program.count(" dynamic-slice(") == count
        assert " slice(" not in program


@pytest.mark.parametrize("form", [tp.ravel, tp.stack])
def test_operations_are_those_of_the_tree(form):
    at_rest, restructure = net(18, form)
    of_tree = flops(jax.value_and_grad(chain), restructure(at_rest))
    assert of_tree > 1000
    additions = len(restructure.layout.slots)  # where a leaf begins is a sum of two numbers
    assert flops(jax.value_and_grad(lambda v: chain(restructure(v))), at_rest) - additions <= 1.001 * of_tree


@pytest.mark.parametrize("form", [tp.ravel, tp.stack])
def test_the_program_grows_with_the_leaves_and_no_faster(form):
    def lines(layers):
        at_rest, restructure = net(layers, form)
        first = jax.grad(lambda v: chain(restructure(v)))
        of = jax.grad(lambda v: sum(jnp.sum(each**2) for each in jax.tree.leaves(first(v))))
        program = str(jax.make_jaxpr(of)(at_rest))
        assert (f"f32[{20 * layers}]" if form is tp.ravel else f"f32[{layers},4,4]") in program
        assert "pad[" not in program  # a slice for itself would be transposed to one
        return len(jax.jit(of).lower(at_rest).as_text().splitlines())

    assert lines(40) <= 2.1 * lines(20)


# -- Offsets that are hidden from the compiler -------------------------------------------------------------------------

ORDERS = {
    "layers": ((4, 4), (4,)) * 100,
    "several in a layer": ((4, 4), (4, 4), (4,), (4, 4)) * 50,
    "no order": tuple((4,) if i * i % 7 < 4 else (4, 4) for i in range(100)),
}


@pytest.mark.parametrize("name", ORDERS)
def test_leaves_in_any_order_are_cut_where_they_lie_and_layers_share_hidden_numbers(name):
    shapes = ORDERS[name]
    _, restructure = tp.ravel([np.ones(shape, np.float32) for shape in shapes])
    sizes = [math.prod(shape) for shape in shapes]
    vector = np.arange(sum(sizes), dtype=np.float32)
    lowered = jax.jit(restructure).lower(vector)
    lying = np.split(vector, np.cumsum(sizes)[:-1])
    for leaf, shape, expected in zip(lowered.compile()(vector), shapes, lying, strict=True):
        np.testing.assert_array_equal(leaf, expected.reshape(shape))
    if name != "no order":
        case = re.search(r"stablehlo\.case.*?stablehlo\.return ([^:]*):", lowered.as_text(), re.DOTALL).group(1)
        assert 2 <= len(case.split(",")) <= 4 * math.ceil(math.sqrt(len(shapes)))
