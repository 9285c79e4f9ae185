"""A vector cut into leaves, stacks cut into rows, and both joined again: each the transpose of the other."""

import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import layout

import treeparams as tp
from treeparams._forms import block, form

from ..zoo import assert_same, cost, flops, ramp

SHAPES = ((2,), ()) * 3 + ((3, 1), (0,), (2, 0))  # some stand often enough to share a kernel, some once
SIZE = sum(map(math.prod, SHAPES))
VECTOR = np.linspace(-1.0, 1.0, SIZE + 1, dtype=np.float32)  # one more than the leaves take
COUNT = 4  # so many rows are cut at offsets that are known at run time alone
ROWS = np.sin(np.arange(2.0 * COUNT, dtype=np.float32)).reshape(COUNT, 1, 2)
ON_CPU = pytest.mark.skipif(jax.default_backend() != "cpu", reason="what is looked at here is XLA's code for CPUs")
BOTH = pytest.mark.parametrize("form", [tp.ravel, tp.stack])


@pytest.fixture(autouse=True)
def few(monkeypatch):
    """Programs of few leaves are as those of many: they share kernels from 3 on."""
    monkeypatch.setattr(block, "_FEW", 3)


def leaves_in(shapes, pad_to=1):
    """From a vector to leaves of these shapes, and back."""
    restructure = tp.ravel([np.zeros(shape, np.float32) for shape in shapes], pad_to=pad_to)[1]
    return restructure, restructure.ravel


def rows(count, *shape):
    """From a stack of so many leaves of one shape to these, and back."""
    way = tp.stack([np.zeros(shape, np.float32) for _ in range(count)])[1]
    key = f"float32[{','.join(map(str, shape))}]"
    return (lambda stack: way({key: stack})), (lambda leaves: way.ravel(leaves)[key])


# There and back, an array, and the number of the leaf that each element belongs to.
NUMBERS = np.append(np.repeat(np.arange(len(SHAPES)) + 1, [math.prod(shape) for shape in SHAPES]), 0).astype("f")
FORMS = {
    "vector": (*leaves_in(SHAPES, SIZE + 1), VECTOR, NUMBERS),
    "rows": (*rows(COUNT, 1, 2), ROWS, np.arange(1, COUNT + 1, dtype=np.float32)[:, None, None]),
}
CUT, JOIN = FORMS["rows"][:2]
DERIVATIVES = {
    "reverse over forward": lambda f: jax.jacrev(jax.jacfwd(f)),
    "third order": lambda f: jax.grad(lambda v: jnp.sum(jax.grad(lambda v: jnp.sum(jax.grad(f)(v) ** 3))(v))),
    "vmap of hessian": lambda f: lambda v: jax.vmap(jax.hessian(f), 1, 1)(jnp.stack([v, -v], 1)),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_every_derivative_is_that_of_the_whole_array(name):
    def both(form, array):
        cut, _, _, numbers = FORMS[form]

        def in_leaves(array):
            leaves = cut(array)
            places = np.repeat(np.arange(1, len(leaves) + 1, dtype=np.float32), [leaf.size for leaf in leaves])
            return jnp.sum(places * jnp.sin(jnp.concatenate(list(map(jnp.ravel, leaves)))))  # one loop for all

        whole = lambda array: jnp.sum(numbers * jnp.sin(array))
        return [DERIVATIVES[name](of)(array) for of in (in_leaves, whole)]

    for got, want in jax.jit(lambda *arrays: list(map(both, FORMS, arrays)))(VECTOR, ROWS):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-4), got, want)


JOINED = {  # there and back, the shape of the array, and how many of its elements are in leaves
    "a padded vector": (leaves_in(SHAPES, 5), (15,), SIZE),
    "leaves of three axes": (leaves_in([(0, 3), (2, 1, 2), (3,)], 5), (10,), 7),
    "many rows": (rows(9, 1, 2), (9, 1, 2), 18),
    "numbers": (rows(3), (3,), 3),
    "empty rows": (rows(2, 3, 0), (2, 3, 0), 0),
}


def test_joining_inverts_cutting_and_is_its_transpose():
    def all_of_it(cut, join, array):
        leaves = cut(array)
        transposed = jax.linear_transpose(cut, array)(leaves)[0], jax.linear_transpose(join, leaves)(array)[0]
        return leaves, join(leaves), *transposed

    arrays = [np.arange(1.0, math.prod(shape) + 1, dtype=np.float32).reshape(shape) for _, shape, _ in JOINED.values()]
    ways = [way for way, _, _ in JOINED.values()]
    found = jax.jit(lambda arrays: [all_of_it(*way, x) for way, x in zip(ways, arrays, strict=True)])(arrays)
    for name, each, array in zip(JOINED, found, arrays, strict=True):
        (cut, join), _, count = JOINED[name]
        leaves, joined, transposed, back = each
        np.testing.assert_array_equal(np.concatenate([np.ravel(leaf) for leaf in leaves]), array.ravel()[:count])
        jax.tree.map(np.testing.assert_array_equal, back, leaves)
        want = np.where(array <= count, array, 0)
        jax.tree.map(np.testing.assert_array_equal, (joined, transposed), (want, want))
        with jax.disable_jit():
            np.testing.assert_array_equal(join(cut(array)), joined)


def test_joining_what_is_mapped_with_what_is_not():
    join, of_rows = leaves_in(((), (2,)), pad_to=4)[1], rows(3, 2)[1]
    many, one = np.arange(8, dtype=np.float32).reshape(2, 4), np.ones(2, "f")

    @jax.jit
    def run(numbers, many, one):
        joined = jax.vmap(lambda a, b: join([a, b]), (0, None))(numbers, one)
        return joined, jax.vmap(lambda a, b, c: of_rows([a, b, c]), (1, None, 1), 2)(many, one, 2 * many)

    joined, stacked = run(np.arange(3, dtype=np.float32), many, one)
    np.testing.assert_array_equal(joined, [[0, 1, 1, 0], [1, 1, 1, 0], [2, 1, 1, 0]])
    want = [[many[:, i], one, 2 * many[:, i]] for i in range(4)]
    np.testing.assert_array_equal(np.moveaxis(stacked, 2, 0), want)


def test_maps_over_any_axis():
    def run(axis, many):
        of = jax.vmap(jax.vmap(CUT, axis, 0), None, -1, axis_size=2)
        back = jax.vmap(jax.vmap(JOIN, 0, axis), -1, -1)
        along = jax.vmap(jax.grad(lambda x: jnp.sum(CUT(x)[3] ** 2)), axis, axis)
        return of(many), back(of(many)), along(many)

    stacks = {axis: np.stack([ROWS, 2 * ROWS, ROWS + 1], axis) for axis in (0, 2, -1)}
    found = jax.jit(lambda stacks: [run(axis, many) for axis, many in zip((0, 2, -1), stacks, strict=True)])
    for (axis, many), (leaves, joined, sums) in zip(stacks.items(), found([*stacks.values()]), strict=True):
        for i, leaf in enumerate(leaves):
            np.testing.assert_array_equal(leaf[..., 1], np.take(np.moveaxis(many, axis, 0), i, 1))
        np.testing.assert_array_equal(joined[..., 1], many)
        want = np.zeros((3, *ROWS.shape), np.float32)
        want[:, 3] = 2 * np.moveaxis(many, axis, 0)[:, 3]
        np.testing.assert_array_equal(sums, np.moveaxis(want, 0, axis))


def test_many_rows_outside_of_a_trace(monkeypatch):
    monkeypatch.setattr(form, "_AT_ONCE", 4)
    counts = {(): 5, (2,): 9, (2, 2): 1, (3, 0): 6}
    leaves = [np.full(shape, n + 100 * i, np.float32) for i, shape in enumerate(counts) for n in range(counts[shape])]
    leaves += [np.full((2,), -n, np.float32) for n in range(3)]  # rows of one shape need not be neighbours
    model = list(map(jax.device_put, leaves))
    stacks, way = tp.stack(model)
    for shape in counts:
        want = np.stack([leaf for leaf in leaves if leaf.shape == shape])
        np.testing.assert_array_equal(stacks[f"float32[{','.join(map(str, shape))}]"], want)
    for dtype in (np.float32, np.float16):
        assert_same(way(jax.tree.map(lambda x, dtype=dtype: np.asarray(x).astype(dtype), stacks)), model)
    jax.jit(lambda stacks: jax.tree.map(lambda x: x + 1, stacks), donate_argnums=0)(stacks)
    jax.tree.map(np.testing.assert_array_equal, model, leaves)  # in buffers of their own


# -- What it costs -----------------------------------------------------------------------------------------------------


def test_what_is_not_read_is_not_cut():
    restructure = leaves_in(((1000,), (2,)))[0]
    assert cost(lambda v: restructure(v)[1], np.ones(1002, np.float32))["bytes accessed"] <= 32
    assert cost(lambda s: rows(20, 1, 2)[0](s)[3], np.ones((20, 1, 2), "f"))["bytes accessed"] <= 64  # of 160
    of_one = jax.make_jaxpr(jax.grad(lambda s: jnp.sum(CUT(s)[3] ** 2)))(ROWS)
    assert str(of_one).count("= join[") == 1
    only_some = jax.jit(lambda s: jax.linear_transpose(lambda s: CUT(s)[1:3], s)(list(ROWS[1:3]))[0])(ROWS)
    some = (np.arange(COUNT) >= 1) & (np.arange(COUNT) < 3)
    np.testing.assert_array_equal(only_some, np.where(some[:, None, None], ROWS, 0))


def net(layers, form):
    return form([np.ones(shape, np.float32) for shape in ((4, 4), (4,)) * layers])


def chain(leaves):
    x = jnp.ones((2, 4))
    for weight, bias in zip(leaves[::2], leaves[1::2], strict=True):
        x = jnp.tanh(x @ weight + bias[None])
    return jnp.sum(x**2)


@ON_CPU
def test_leaves_of_one_shape_share_their_kernels():
    vector, restructure = net(5, tp.ravel)
    for f, array, count in ((restructure, vector, 10), (CUT, ROWS, COUNT)):
        program = jax.jit(f).lower(array).compile().as_text()
        # A slice at an offset that XLA knows is a kernel of its own.
        assert program.count(" dynamic-slice(") == count
        assert " slice(" not in program


@BOTH
def test_operations_are_those_of_the_tree(form):
    at_rest, restructure = net(5, form)
    of_tree = flops(jax.value_and_grad(chain), restructure(at_rest))
    assert of_tree > 1000
    additions = len(restructure.layout.slots)  # where a leaf begins is a sum of two numbers
    assert flops(jax.value_and_grad(lambda v: chain(restructure(v))), at_rest) - additions <= 1.001 * of_tree


@BOTH
def test_the_program_grows_with_the_leaves_and_no_faster(form):
    def lines(layers):
        at_rest, restructure = net(layers, form)
        first = jax.grad(lambda v: chain(restructure(v)))
        of = jax.grad(lambda v: sum(jnp.sum(each**2) for each in jax.tree.leaves(first(v))))
        traced = jax.jit(of).trace(at_rest)
        program = str(traced.jaxpr)
        assert (f"f32[{20 * layers}]" if form is tp.ravel else f"f32[{layers},4,4]") in program
        assert "pad[" not in program  # a slice for itself would be transposed to one
        return len(traced.lower().as_text().splitlines())

    assert lines(12) <= 2.1 * lines(6)


# -- Offsets that are hidden from the compiler -------------------------------------------------------------------------


def test_leaves_in_no_order_are_cut_where_they_lie():
    model = [ramp(*((4,) if i * i % 7 < 4 else (4, 4)), start=i) for i in range(40)]
    vector, restructure = tp.ravel(model)
    assert_same(jax.jit(restructure)(vector), model)


def test_layers_share_hidden_numbers():
    restructure = leaves_in(((4, 4), (4,)) * 100)[0]
    program = jax.jit(restructure).lower(np.ones(2000, "f")).as_text()
    case = re.search(r"stablehlo\.case.*?stablehlo\.return ([^:]*):", program, re.DOTALL).group(1)
    assert 2 <= len(case.split(",")) <= 4 * math.ceil(math.sqrt(200))


# -- What differs between machines, in programs that are lowered for others than this one ------------------------------


@pytest.mark.skipif(not hasattr(layout, "Format"), reason="this JAX has other names for layouts")
@pytest.mark.parametrize("platform", ["tpu", "cpu", "cuda"])
def test_rows_are_outermost_before_a_loop_over_stacks_on_tpu_alone(platform):
    model = [{"w": ramp(4, 4, start=i / 10)} for i in range(20)]
    (stacks, restructure), (vector, from_vector) = tp.stack(model), tp.ravel(model)
    turn = lambda x, layer: (x @ layer["w"], None)
    scanned = lambda stacks, x: restructure.scan(turn, x, stacks, "*")[0]
    for f, at_rest, constrained in (
        (jax.grad(lambda stacks, x: jnp.sum(scanned(stacks, x))), stacks, platform == "tpu"),
        (lambda stacks, x: functools.reduce(lambda x, layer: x @ layer["w"], restructure(stacks), x), stacks, False),
        (lambda vector, x: from_vector.scan(turn, x, vector, "*")[0], vector, False),
    ):
        lowered = jax.jit(f).trace(at_rest, jnp.ones(4)).lower(lowering_platforms=(platform,))
        assert ("LayoutConstraint" in lowered.as_text()) is constrained
