"""Stacks: what is frozen beside them, and what they are in transformations."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp

from ..zoo import Norm, Pair, assert_close, assert_same, ramp

# -- What is frozen ----------------------------------------------------------------------------------------------------


def _frozen(start):
    bits = np.array([0x7FC00123, 0x80000000, 1], np.uint32).view(np.float32)  # a NaN with a message, -0, a denormal
    return {
        "w": [ramp(3, start=start), ramp(3, start=start + 1)],
        "same shape": [Norm(ramp(3), jnp.asarray(bits)), Norm(ramp(3), ramp(3, start=start))],
        "ints": [jnp.arange(3) + int(start), jnp.arange(3) * 2, jnp.array([True, False]), jnp.array([False, False])],
        "keys": [jax.random.key(int(start)), jax.random.key(1), jax.random.PRNGKey(2), jax.random.PRNGKey(3)],
        "numpy": [np.array([2**40, 1]), np.array([2**40, 2]), np.arange(2, dtype=np.int8)],  # JAX has no such int
        "weak": [jnp.asarray(1.0), jnp.asarray(2.0), jnp.asarray(3), jnp.asarray(4)],
        "values": Pair(jnp.tanh, (7, 0.5, True, "name", None)),
        "tied": [FROZEN_TWICE, FROZEN_TWICE, ramp(1, 2)],
    }


FROZEN_TWICE = ramp(1, 2, start=9)
FREEZE = ["weak", "tied"]


def test_frozen_parts_come_back_bit_for_bit():
    model = _frozen(1.0)
    stacks, restructure = tp.stack(model, tp.layout(model, freeze=FREEZE))
    assert {key: array.shape for key, array in stacks.items()} == {"float32[3]": (4, 3)}
    back = restructure(stacks)
    assert_same(back, model)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True):
        if hasattr(want, "dtype") and not jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
            assert getattr(got, "weak_type", False) == getattr(want, "weak_type", False)
    assert all(isinstance(each, np.ndarray) for each in back["numpy"])
    shapes = sorted(leaf.shape for leaf in jax.tree.leaves(restructure))
    assert (2, 3) in shapes  # the two frozen means, held as one array


def test_with_frozen():
    first, second = _frozen(1.0), _frozen(5.0)
    layout = tp.layout(first, freeze=FREEZE)
    stacks, restructure = tp.stack(first, layout)
    other = restructure.with_frozen(second)
    want = tp.maptrainable(lambda _, mine: mine, second, first, trainable=layout, tied="first")
    assert_same(other(stacks), want)
    assert jax.tree.structure(other) == jax.tree.structure(restructure)  # so it takes no new trace
    with pytest.raises(ValueError, match=r"'ints\.2' is bool\[2\] in the first, bool\[3\] in the second"):
        restructure.with_frozen(second | {"ints": [*second["ints"][:2], jnp.ones(3, bool), second["ints"][3]]})


def test_a_restructure_is_a_pytree_of_the_frozen_arrays():
    model = {"norms": [Norm(ramp(2), ramp(3)), Norm(ramp(2), ramp(3, start=2))], "n": jnp.arange(2), "f": jnp.tanh}
    stacks, restructure = tp.stack(model)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(restructure)) == [(2,), (2, 3)]
    passed = jax.jit(lambda r: jax.tree.map(lambda x: x + x.dtype.type(1), r))(restructure)(stacks)
    np.testing.assert_array_equal(passed["norms"][1].mean, model["norms"][1].mean + 1)
    assert passed["f"] is jnp.tanh
    twice = jax.tree.map(lambda x: np.stack([x, 2 * x]), restructure)
    means = jax.vmap(lambda r, s: r(s)["norms"][1].mean, (0, None))(twice, stacks)
    np.testing.assert_array_equal(means, np.stack([ramp(3, start=2), 2 * ramp(3, start=2)]))


# -- In transformations ------------------------------------------------------------------------------------------------


class Deep(eqx.Module):
    layers: list[eqx.nn.Linear]
    table: list[jax.Array]  # of one shape, frozen
    head: jax.Array
    activation: Callable[..., jax.Array]

    def __init__(self, start):
        self.layers = [eqx.nn.Linear(2, 2, key=jax.random.key(k + int(start))) for k in range(3)]
        self.table = [ramp(2, start=start), ramp(2, start=start + 1)]
        self.head = self.layers[0].weight
        self.activation = jnp.tanh

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x) + self.table[0]) * self.table[1]
        return jnp.sum((self.head @ x) ** 2)


DEEP = Deep(1.0)
DEEP_STACKS, DEEP_WAY = tp.stack(DEEP, "!table")
X = np.array([0.3, -0.4], np.float32)


def _stepped(stacks, gradient):
    return jax.tree.map(lambda x, g: x - 0.1 * g, stacks, gradient)


def test_donated_steps_leave_the_model_alive_and_take_one_trace():
    traces = []

    def step(stacks, restructure, x):
        traces.append(1)
        value, gradient = jax.value_and_grad(lambda stacks: restructure(stacks)(x))(stacks)
        return _stepped(stacks, gradient), value

    for compiled in (jax.jit(step, donate_argnums=0), eqx.filter_jit(step, donate="all-except-first")):
        traces.clear()
        found = []
        for start in (1.0, 5.0):
            model = Deep(start)
            before = jax.tree.map(np.array, eqx.filter(model, eqx.is_array))
            stacks, restructure = tp.stack(model, "!table")
            for _ in range(3):
                stacks, value = compiled(stacks, restructure, jnp.asarray(X))
                restructure = tp.stack(model, "!table")[1]  # `filter_jit` was given the other one
            found.append(float(value))
            jax.tree.map(np.testing.assert_array_equal, eqx.filter(model, eqx.is_array), before)
        assert len(traces) == 1
        assert found[0] != found[1]


def test_frozen_values_are_arguments_of_the_program():
    model = {"w": [ramp(4), ramp(4)], "table": [ramp(1234), ramp(1234, start=2)], "lone": ramp(777)}
    stacks, restructure = tp.stack(model, "w")
    loss = lambda s, r: sum(jnp.sum(leaf) for leaf in jax.tree.leaves(r(s)))
    closed = lambda s: loss(s, restructure)
    for step in (jax.jit(jax.value_and_grad(loss)), eqx.filter_jit(eqx.filter_value_and_grad(loss))):
        program = step.lower(stacks, restructure).as_text()
        header = next(line for line in program.splitlines() if "@main" in line)
        assert "2x1234xf32" in header  # one argument for both
        assert "777xf32" in header
        assert "dense<[" not in program
    assert not jax.make_jaxpr(jax.grad(loss))(stacks, restructure).consts
    assert len(jax.make_jaxpr(jax.grad(closed))(stacks).consts) <= 2


def test_ensembles():
    models = [Deep(1.0), Deep(4.0), Deep(7.0)]
    each = [tp.stack(model, "!table") for model in models]
    stacks, restructure = jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)
    values = jax.jit(jax.vmap(lambda s, r: r(s)(X)))(stacks, restructure)
    np.testing.assert_allclose(values, [model(X) for model in models], 1e-5)
    # One frozen part for all; rows of the ensemble along the second axis.
    along = jax.tree.map(lambda x: jnp.moveaxis(x, 0, 1), stacks)
    gradients = jax.jit(jax.vmap(jax.grad(lambda s, r: r(s)(X)), (1, None), 1))(along, each[0][1])
    want = jax.jit(jax.grad(lambda s, r: r(s)(X)))(each[1][0], each[0][1])
    assert_close(jax.tree.map(lambda x: x[:, 1], gradients), want)
    # Stacked inside of the map.
    inside = jax.jit(jax.vmap(lambda s: tp.stack(each[0][1](s), each[0][1].layout)[0]))(stacks)
    assert_same(inside, stacks)


def test_programs_made_ahead_of_time():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), DEEP_STACKS)
    lowered = jax.jit(jax.value_and_grad(lambda s, r, x: r(s)(x))).lower(shapes, DEEP_WAY, X)
    value, gradient = lowered.compile()(DEEP_STACKS, DEEP_WAY, X)
    np.testing.assert_allclose(value, DEEP(X), 1e-5)
    assert_close(gradient, DEEP_WAY.ravel_gradient(tp.grad(lambda m: m(X), DEEP_WAY.layout)(DEEP)))
    matrices, restructure = tp.stack([ramp(2, 2, start=k) for k in range(20)])
    of = jax.jit(lambda s: (restructure(s), jax.grad(lambda s: jnp.sum(restructure(s)[3]))(s)))
    leaves, gradient = jax.export.export(of, platforms=("cpu", "cuda", "tpu"))(matrices).call(matrices)
    assert_same(leaves, restructure(matrices))
    np.testing.assert_array_equal(gradient["float32[2,2]"].sum((1, 2)), np.eye(20)[3] * 4)


EVERYDAY = {
    "the model": lambda s, d: tp.stack(DEEP)[1](d),
    "a map of both": lambda s, d: (jax.tree.map(jnp.add, s, d), jax.tree.map(jnp.add, d, s)),
    "Optax": lambda s, d: optax.adam(0.1).update(d, optax.adam(0.1).init(s), s),
    "a carry": lambda s, d: jax.lax.scan(lambda c, _: ({k: 2 * v for k, v in c.items()}, None), s, None, 2),
    "a branch": lambda s, d: jax.lax.cond(True, lambda c: {**c}, lambda c: c, s),
    "in_axes": lambda s, d: jax.vmap(lambda c: jax.tree.map(jnp.sum, c), (dict.fromkeys(s, 1),))({
        k: jnp.ones((2, 3)) for k in s
    }),
    "in_shardings": lambda s, d: jax.jit(lambda c: c, in_shardings=({k: s[k].sharding for k in s},))(s),
}


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("use", EVERYDAY)
def test_stacks_are_a_dictionary(use):
    stacks = tp.stack(DEEP)[0]
    assert type(stacks) is dict
    assert all(type(own) is dict for own in tp.stack(DEEP, groups={"a": "**"})[0].values())
    EVERYDAY[use](stacks, dict(stacks.items()))


def test_an_exported_function_takes_stacks_and_closes_over_the_way_back():
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    sums = jax.jit(lambda s: jax.tree.map(jnp.sum, s))
    assert (
        jax.export.deserialize(jax.export.export(sums)(DEEP_STACKS).serialize()).call(DEEP_STACKS).keys()
        == DEEP_STACKS.keys()
    )
    for own in (DEEP_WAY, tp.partition(DEEP)[1]):
        exported = jax.export.export(jax.jit(lambda own: jax.tree.leaves(own)))(own)
        with pytest.raises(ValueError, match=r"cannot take a Rest or a Restructure.*close over it, as in jax.jit"):
            exported.serialize()


def test_nothing_is_longer_than_programs_can_address():
    shapes = [jax.ShapeDtypeStruct((2**16, 2**8), "float32")] * 300  # together more than 2^31 elements
    stacks = jax.eval_shape(lambda model: tp.stack(model)[0], shapes)
    assert jax.tree.map(lambda x: x.shape, stacks) == {"float32[65536,256]": (300, 2**16, 2**8)}
