"""Stacks: what goes in, comes out and is refused; what is frozen beside them; what they are in transformations."""

import pickle
import types
from collections.abc import Callable

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .. import zoo
from ..zoo import Norm, Pair, assert_close, assert_same, cost, enable_x64, filled, ramp

SHARED = ramp(2, 3)
MIXED = {
    "bf16": [ramp(3, dtype=jnp.bfloat16), ramp(3, dtype=jnp.bfloat16, start=2)],
    "c64": ramp(3, dtype=jnp.complex64) * (1 + 2j),
    "f16": ramp(2, 3, dtype=jnp.float16),
    "f32": {"decoder": SHARED.T, "embed": SHARED, "head": SHARED, "other": ramp(2, 3, start=4), "row": ramp(3)},
    "scalars": (ramp(start=7), ramp(start=8)),
}
LAYOUT = tp.layout(MIXED, ties={"f32.decoder": ("f32.embed", jnp.transpose)})
STACKS, RESTRUCTURE = tp.stack(MIXED, LAYOUT)


# -- What they are -----------------------------------------------------------------------------------------------------


def test_a_tie_is_one_row_also_through_a_transpose():
    shapes = {
        "bfloat16[3]": 2,
        "complex64[3]": 1,
        "float16[2,3]": 1,
        "float32[2,3]": 2,
        "float32[3]": 1,
        "float32[]": 2,
    }
    assert {key: len(array) for key, array in STACKS.items()} == shapes
    for slot in LAYOUT.slots:
        assert RESTRUCTURE.place(slot.path) == (None, slot.key, slot.row)
    for path in ("f32.embed", "f32.decoder", "f32.head"):
        assert RESTRUCTURE.place(path) == (None, "float32[2,3]", 0)
    line = next(line for line in str(RESTRUCTURE).splitlines() if line.startswith("f32.other"))
    assert line.split()[-2:] == ["float32[2,3]", "1"]


def test_wide_and_weak_dtypes():
    assert_same(RESTRUCTURE(STACKS), MIXED)
    with enable_x64(True):
        wide = {"f64": [jnp.array([1 / 3], jnp.float64)] * 1, "c128": jnp.array([1j / 3]), "f32": ramp(1)}
        stacks, restructure = tp.stack(wide)
        assert list(stacks) == ["complex128[1]", "float32[1]", "float64[1]"]
        assert_same(restructure(stacks), wide)
    weak, restructure = tp.stack([jnp.array(1.0), jnp.array(2.0)])
    assert [leaf.weak_type for leaf in (*weak.values(), *restructure(weak))] == [False] * 3


@pytest.mark.filterwarnings("ignore:nothing is trained")
@pytest.mark.parametrize("model", [{}, None, {"n": 3, "i": np.arange(2)}], ids=str)
def test_nothing_trained(model):
    stacks, restructure = tp.stack(model)
    assert stacks == restructure.ravel(model) == restructure.ravel_gradient(model) == {}
    assert_same(restructure({}), model)
    assert jax.jit(lambda stacks, restructure: restructure.ravel(restructure(stacks)))(stacks, restructure) == {}
    assert len(restructure.view({})) == 0
    with pytest.raises(ValueError, match=r"one too many, 'float32\[3\]'"):
        restructure({"float32[3]": ramp(1, 3)})


@pytest.mark.parametrize("form", [tp.ravel, tp.stack])
@pytest.mark.parametrize(
    "model", [[ramp(3)], [np.ones(3, np.float32)], [ramp(3), ramp(3, start=2)], ramp(), ramp(0, 2)]
)
def test_fresh_buffers_always(form, model):
    before = jax.tree.map(np.array, model)
    at_rest, restructure = form(model)
    donated = jax.jit(lambda at_rest: jax.tree.map(lambda x: x + 1, at_rest), donate_argnums=0)
    for made in (at_rest, restructure.ravel(model)):
        donated(made)
        assert not jax.tree.leaves(model)[0].size or all(array.is_deleted() for array in jax.tree.leaves(made))
        jax.tree.map(np.testing.assert_array_equal, model, before)


def test_a_leaf_of_a_shape_of_its_own_is_not_copied_in_a_compiled_step():
    stacks, restructure = tp.stack({"big": ramp(64, 64), "b": ramp(3)})
    of_stacks = cost(lambda stacks: jnp.sum(restructure(stacks)["big"] ** 2), stacks)
    of_tree = cost(lambda model: jnp.sum(model["big"] ** 2), restructure(stacks))
    assert of_stacks["bytes accessed"] <= 1.01 * of_tree["bytes accessed"]


# -- What goes in ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.float64, np.float16, jnp.bfloat16, jnp.float32])
def test_stacks_of_numpy_and_of_other_floating_dtypes(dtype):
    real = {key: array for key, array in STACKS.items() if array.dtype != jnp.complex64}
    given = {key: np.asarray(array).astype(dtype) for key, array in real.items()}
    got = RESTRUCTURE(given | {"complex64[3]": np.ones((1, 3), dtype)})
    for path, leaf in tp.trainables(got, LAYOUT).items():
        want = np.ones(3) if path == "c64" else np.asarray(tp.trainables(MIXED, LAYOUT)[path]).astype(np.float32)
        assert leaf.dtype == LAYOUT[path].dtype
        np.testing.assert_allclose(np.asarray(leaf).astype(np.complex64), want, 1e-2)
    assert got["f32"]["head"] is got["f32"]["embed"]


SMALL = {"a": [ramp(2), ramp(2, start=3)], "m": ramp(2, 2), "n": 3}
ROWS, WAY = tp.stack(SMALL)
GROUPED, WITH_GROUPS = tp.stack(SMALL, groups={"vectors": "a", "rest": "**"})


REFUSED = [
    (lambda: WAY({"float32[2]": ramp(2, 2)}), ValueError, r"for 'm' in 'float32\[2,2\]', but there is no such"),
    (lambda: WAY(ROWS | {"float32[2]": None}), ValueError, r"for 'a.0', 'a.1' in 'float32\[2\]', but there is no"),
    (lambda: WAY(ROWS | {"float32[3]": ramp(1, 3)}), ValueError, r"too many, 'float32\[3\]'; nearest: 'float32"),
    (lambda: WAY(ROWS | {"x": {"y": ramp(1)}}), ValueError, "one too many, 'y' of group 'x'"),
    (lambda: WAY(ROWS | {"float32[2]": ramp(2)}), ValueError, r"'a.1' in 'float32\[2\]', got shape \(2,\)"),
    (lambda: jax.eval_shape(WAY, ROWS | {"float32[2]": ramp(1, 2)}), ValueError, r"got shape \(1, 2\)"),
    (lambda: WAY(jax.tree.map(lambda x: x[None], ROWS)), ValueError, r"\(1, 1, 2, 2\); map over a stack .* jax.vmap"),
    (lambda: WAY(ROWS | {"float32[2]": np.ones((2, 2), int)}), TypeError, r"'a.1' in 'float32\[2\]', got int"),
    (lambda: WAY(ROWS | {"float32[2]": np.ones((2, 2), "F")}), TypeError, r"in 'float32\[2\]', got complex64"),
    (lambda: WAY(ROWS | {"float32[2]": 3.0}), TypeError, r"'a.0', 'a.1' in 'float32\[2\]', got float"),
    (lambda: WAY(ROWS["float32[2]"]), TypeError, r"the stacks of tp.stack, a dictionary, got float32\[2,2\]"),
    (lambda: WAY(WAY.view(ROWS)), (TypeError, ValueError), "the stacks of tp.stack.* got .*View"),
    (lambda: WAY(types.MappingProxyType(ROWS)), (TypeError, ValueError), "stacks of tp.stack.* got .*mappingproxy"),
    (lambda: WAY(GROUPED), ValueError, r"one too many, 'float32\[2(,2)?\]' of group '(vectors|rest)'"),
    (lambda: WITH_GROUPS(ROWS), ValueError, r"one too many, 'float32\[2(,2)?\]'"),
    (lambda: WITH_GROUPS({"vectors": GROUPED["vectors"]}), ValueError, r"of group 'rest', but there"),
    (lambda: tp.ravel(SMALL)[1](ROWS), TypeError, r"a vector of shape \(8,\) and floating dtype, got dict"),
    (lambda: tp.ravel(SMALL)[1].place("m"), ValueError, r"'m' is in a vector, at layout.slice\('m'\)"),
    (lambda: WAY.place("a"), KeyError, "'a'.*no path of a leaf|'a' is"),
    (lambda: WAY.place("n"), KeyError, "not a parameter"),
    (lambda: WAY.ravel({"a": SMALL["a"]}), ValueError, "found none for 'm'"),
    (lambda: WAY.ravel(SMALL | {"m": ramp(3)}), ValueError, r"expected float32\[2,2\] at 'm', got float32\[3\]"),
    (lambda: WAY.ravel_gradient({"m": ramp(3)}), ValueError, r"float32\[2,2\] at 'm', got float32\[3\]"),
]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(("use", "error", "message"), REFUSED)
def test_what_is_refused(use, error, message):
    with pytest.raises(error, match=message):
        use()


def test_a_model_whose_keys_read_like_stacks_is_a_model():
    model = {"float32[3]": ramp(2, 3), "deep": [{"bfloat16[]": ramp(4)}], "float32[2,2]": ramp(1, 2, 2)}
    stacks, restructure = tp.stack(model)
    assert_same(restructure(stacks), model)
    assert_same(tp.stack(stacks)[1](tp.stack(stacks)[0]), stacks)
    tx, plain = optim.trainable(optim.per_leaf(optax.lion(0.1)), form="stacks"), optax.lion(0.1)
    want = plain.update(tp.copy(model), plain.init(model), model)[0]
    assert_close(tx.update(tp.copy(model), tx.init(model), model)[0], want)


# -- Groups ------------------------------------------------------------------------------------------------------------


def test_groups_have_stacks_of_their_own():
    layers = [{"w": ramp(2, 2, start=k), "b": ramp(2, start=k)} for k in range(3)]
    model = {"layers": layers, "norm": Norm(ramp(2), ramp(2))}
    groups = {"first": "layers.0", "norms": Norm, "matrices": tp.leaves(lambda _, leaf: leaf.ndim == 2), "rest": "**"}
    stacks, restructure = tp.stack(model, groups=groups)
    assert jax.tree.map(np.shape, stacks) == {
        "first": {"float32[2,2]": (1, 2, 2), "float32[2]": (1, 2)},
        "norms": {"float32[2]": (1, 2)},
        "matrices": {"float32[2,2]": (2, 2, 2)},
        "rest": {"float32[2]": (2, 2)},
    }
    assert restructure.place("layers.2.w") == ("matrices", "float32[2,2]", 1)
    assert restructure.layout["layers.2.w"][-2:] == ("float32[2,2]", 2)
    assert restructure.layout == tp.layout(model)
    assert_same(restructure(stacks), model)
    assert_same(restructure.ravel(model), stacks)
    for slot in restructure.layout.slots:
        group, key, row = restructure.place(slot.path)
        np.testing.assert_array_equal(np.asarray(stacks[group][key])[row], tp.trainables(model)[slot.path])
    of_stacks = jax.grad(lambda stacks: zoo.loss(restructure(stacks)))
    of_model = lambda model: restructure.ravel_gradient(tp.grad(zoo.loss)(model))
    assert_close(*jax.jit(lambda stacks, model: (of_stacks(stacks), of_model(model)))(stacks, model))


def test_a_group_left_empty_and_a_tie_by_its_source():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "c": ramp(2), "frozen": ramp(1)}
    stacks, restructure = tp.stack(model, "!frozen", groups={"all": ["a", "b", "c"], "f": "frozen", "late": "**"})
    assert stacks["late"] == stacks["f"] == {}
    assert_same(restructure(stacks), model)
    assert_same(restructure.ravel(model), stacks)
    groups = {"of a": "a", "of b and c": ["b", "c"]}
    stacks, restructure = tp.stack(model, "!frozen", groups=groups)
    assert jax.tree.map(np.shape, stacks) == {"of a": {"float32[2]": (1, 2)}, "of b and c": {"float32[2]": (1, 2)}}
    assert restructure.place("b") == restructure.place("a") == ("of a", "float32[2]", 0)
    of = lambda *groups: jax.tree.structure(tp.stack(model, "!frozen", groups=dict(zip("xy", groups, strict=True)))[1])
    assert of("a", "c") == of("a", "c") != of("c", "a")


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("groups", "error", "message"),
    [
        ({"x": "m"}, ValueError, r"in no group: 'a.0', 'a.1'.*'rest': '\*\*'"),
        ({"x": "a", "rest": "b*"}, ValueError, r"'b\*' selects nothing"),
        ({"x": "n", "rest": "**"}, ValueError, "'n' selects no parameter"),
        ({"x": "t", "rest": "**"}, ValueError, "'t' names 't', but 'm' and 't' are one array.* or write 'm'"),
        ({"all": "**", "a": "a"}, ValueError, r"'a' comes too late: '\*\*' before it selects the same parameters"),
        ({"x": ["a", "!m.wrong"], "rest": "**"}, ValueError, "'m.wrong' selects nothing"),
        (["**"], TypeError, r"groups must be a dictionary \{name: where\}, got"),
        ({3: "**"}, TypeError, r"groups must be a dictionary \{name: where\}, got"),
    ],
)
def test_groups_that_are_refused(groups, error, message):
    with pytest.raises(error, match=message):
        tp.stack(SMALL | {"t": SMALL["m"]}, groups=groups)


@pytest.mark.parametrize("groups", [None, {"x": "f32", "y": "**"}])
def test_pickling(groups):
    stacks, restructure = tp.stack(MIXED, LAYOUT, groups=groups)
    again = pickle.loads(pickle.dumps(restructure))
    assert again.layout == restructure.layout
    assert_same(again(stacks), MIXED)
    assert_same(again.ravel(MIXED), stacks)
    assert again.place("f32.other") == restructure.place("f32.other")
    assert jax.tree.structure(again) == jax.tree.structure(restructure)


# -- As a plain tree ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("groups", [None, {"x": "f32", "y": "**"}])
def test_what_takes_trees_takes_stacks(groups):
    stacks, restructure = tp.stack(MIXED, LAYOUT, groups=groups)
    copied = tp.copy(stacks)
    assert_same(copied, stacks)
    assert all(a is not b for a, b in zip(jax.tree.leaves(copied), jax.tree.leaves(stacks), strict=True))
    np.testing.assert_allclose(tp.global_norm(stacks), tp.global_norm(tp.partition(MIXED, LAYOUT)[0]), 1e-6)
    moved = jax.tree.map(lambda x: jax.device_put((2 * np.asarray(x)).astype(x.dtype)), stacks)
    average = restructure(tp.ema(stacks, moved, decay=0.5))
    assert_same(average, tp.ema(MIXED, restructure(moved), decay=0.5, trainable=LAYOUT))
    vector, back = tp.ravel(stacks)
    assert vector.shape == (restructure.layout.size,)
    assert_same(back(vector), stacks)


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
        self.layers = [filled(eqx.nn.Linear, 2, 2, seed=k + int(start)) for k in range(3)]
        self.table = [ramp(2, start=start), ramp(2, start=start + 1)]
        self.head = self.layers[0].weight
        self.activation = jnp.tanh

    def __call__(self, x):
        for layer in self.layers:
            x = self.activation(layer(x) + self.table[0]) * self.table[1]
        return jnp.sum((self.head @ x) ** 2)


DEEPS = list(map(Deep, (1.0, 4.0, 7.0)))
DEEP = DEEPS[0]
DEEP_STACKS, DEEP_WAY = tp.stack(DEEP, "!table")
X = np.array([0.3, -0.4], np.float32)


def test_donated_steps_leave_the_model_alive_and_take_one_trace():
    traces = []

    def step(stacks, restructure, x):
        traces.append(1)
        value, gradient = jax.value_and_grad(lambda stacks: restructure(stacks)(x))(stacks)
        return jax.tree.map(lambda x, g: x - 0.1 * g, stacks, gradient), value

    for compiled in (jax.jit(step, donate_argnums=0), eqx.filter_jit(step, donate="all-except-first")):
        traces.clear()
        found = []
        for model in DEEPS[:2]:
            before = jax.tree.map(np.array, eqx.filter(model, eqx.is_array))
            stacks, restructure = tp.stack(model, "!table")
            for _ in range(2):
                stacks, value = compiled(stacks, restructure, jnp.asarray(X))
                restructure = tp.stack(model, "!table")[1]  # `filter_jit` was given the other one
            found.append(float(value))
            jax.tree.map(np.testing.assert_array_equal, eqx.filter(model, eqx.is_array), before)
        assert len(traces) == 1
        assert found[0] != found[1]


def test_ensembles():
    each = [tp.stack(model, "!table") for model in DEEPS]
    stacks, restructure = jax.tree.map(lambda *leaves: np.stack(leaves), *each)
    along = jax.tree.map(lambda x: np.moveaxis(x, 0, 1), stacks)  # rows of the ensemble along the second axis
    of = lambda s, r: r(s)(X)

    @jax.jit
    def run(stacks, restructure, along, first, second):
        gradients = jax.vmap(jax.grad(of), (1, None), 1)(along, first[1])  # one frozen part for all
        again = jax.vmap(lambda s: tp.stack(first[1](s), first[1].layout)[0])(stacks)  # stacked inside of the map
        return jax.vmap(of)(stacks, restructure), gradients, jax.grad(of)(second[0], first[1]), again

    values, gradients, want, again = run(stacks, restructure, along, *each[:2])
    np.testing.assert_allclose(values, [model(X) for model in DEEPS], 1e-5)
    assert_close(jax.tree.map(lambda x: np.asarray(x)[:, 1], gradients), jax.device_get(want))
    assert_same(jax.device_get(again), stacks)


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
    exported = jax.export.deserialize(jax.export.export(sums)(DEEP_STACKS).serialize())
    assert exported.call(DEEP_STACKS).keys() == DEEP_STACKS.keys()
    for own in (DEEP_WAY, tp.partition(DEEP)[1]):
        exported = jax.export.export(jax.jit(lambda own: jax.tree.leaves(own)))(own)
        with pytest.raises(ValueError, match=r"cannot take a Rest or a Restructure.*close over it, as in jax.jit"):
            exported.serialize()


def test_nothing_is_longer_than_programs_can_address():
    shapes = [jax.ShapeDtypeStruct((2**16, 2**8), "float32")] * 300  # together more than 2^31 elements
    stacks = jax.eval_shape(lambda model: tp.stack(model)[0], shapes)
    assert jax.tree.map(lambda x: x.shape, stacks) == {"float32[65536,256]": (300, 2**16, 2**8)}
