"""The vector and the stacks: what goes in, comes out and is refused; what is frozen beside them; transformations."""

import pickle

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

FORMS = pytest.mark.parametrize("form", [tp.ravel, tp.stack], ids=["vector", "stacks"])
SHARED = ramp(2, 3)
MIXED = {
    "bf16": [ramp(3, dtype=jnp.bfloat16), ramp(3, dtype=jnp.bfloat16, start=2)],
    "c64": ramp(3, dtype=jnp.complex64) * (1 + 2j),
    "f16": ramp(2, 3, dtype=jnp.float16),
    "f32": {"decoder": SHARED.T, "embed": SHARED, "head": SHARED, "other": ramp(2, 3, start=4), "row": ramp(3)},
    "int": jnp.array([2**24 + 1]),
    "scalars": (ramp(start=7), ramp(start=8)),
}
LAYOUT = tp.layout(MIXED, ties={"f32.decoder": ("f32.embed", jnp.transpose)})
STACKS, RESTRUCTURE = tp.stack(MIXED, LAYOUT)


# -- What they are -----------------------------------------------------------------------------------------------------


def test_a_tie_is_one_row_also_through_a_transpose():
    for path in ("f32.embed", "f32.decoder", "f32.head"):
        assert RESTRUCTURE.place(path) == (None, "float32[2,3]", 0)
    assert RESTRUCTURE.place("f32.other") == (None, "float32[2,3]", 1) == (None, *LAYOUT["f32.other"][-2:])
    assert STACKS["float32[2,3]"].shape == (2, 2, 3)


@FORMS
def test_wide_and_weak_dtypes(form):
    at_rest, restructure = form(MIXED, LAYOUT)
    assert_same(restructure(at_rest), MIXED)
    weak, restructure = form([jnp.array(1.0), jnp.array(2.0)])
    assert not any(leaf.weak_type for leaf in jax.tree.leaves((weak, restructure(weak))))
    with enable_x64(True):
        f64, c128 = jnp.array([1 / 3], jnp.float64), jnp.array([1j / 3])
        for model in (MIXED | {"f64": f64}, {"f64": [f64], "c128": c128, "f32": ramp(1)}):
            at_rest, restructure = form(model)
            assert form is tp.stack or at_rest.dtype == jnp.complex128
            assert_same(restructure(at_rest), model)
        assert form is tp.ravel or list(at_rest) == ["complex128[1]", "float32[1]", "float64[1]"]


def test_the_dtype_of_the_vector():
    assert tp.ravel(MIXED, "bf16", jnp.float32)[0].dtype == jnp.float32
    assert tp.ravel({"w": ramp(2)}, dtype=float)[0].dtype == jnp.float32  # JAX's dtypes
    with pytest.warns(UserWarning, match="is float32 and not float64, because jax_enable_x64 is not set"):
        assert tp.ravel({"w": ramp(2)}, dtype=np.float64)[0].dtype == jnp.float32
    with enable_x64(True):
        assert tp.ravel(ramp(2), dtype="float64")[0].dtype == jnp.float64
    # A gradient in float32 is not rounded to the leaf's dtype on its way.
    _, restructure = tp.ravel({"w": ramp(4, dtype=jnp.bfloat16)}, dtype=jnp.float32)
    fine = np.full(4, 1 + 2**-12, np.float32)
    np.testing.assert_array_equal(restructure.ravel_gradient({"w": fine}), fine)
    # An option means what it says at each call.
    model = {"a": ramp(3), "b": ramp(2, dtype=jnp.bfloat16)}
    padded = tp.ravel(model, dtype=jnp.bfloat16, pad_to=np.int64(4))[1].layout
    vector, restructure = tp.ravel(model, padded)
    assert (vector.shape, vector.dtype) == ((5,), jnp.float32)
    assert padded == tp.layout(model) == restructure.layout


@pytest.mark.filterwarnings("ignore:nothing is trained")
@pytest.mark.parametrize("model", [{}, None, {"n": 3, "i": np.arange(2)}], ids=str)
def test_nothing_trained(model):
    stacks, restructure = tp.stack(model)
    assert stacks == restructure.ravel(model) == restructure.ravel_gradient(model) == {}
    assert_same(restructure({}), model)
    assert len(restructure.view({})) == 0
    with pytest.raises(ValueError, match=r"shape \(0,\) .* got shape \(1,\)"):
        tp.ravel(model)[1](np.ones(1, "f"))


@FORMS
@pytest.mark.parametrize("model", [[np.ones(3, np.float32)], [ramp(3), ramp(3, start=2)], ramp(), ramp(0, 2)])
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


def test_padding_never_leaks():
    model = {"a": ramp(3), "b": ramp(2)}
    (vector, restructure), (plain, unpadded) = tp.ravel(model, pad_to=4), tp.ravel(model)
    assert (vector.shape, restructure.layout.size) == ((8,), 5)
    assert "padded to 8" in repr(restructure)
    noisy = np.append(plain, np.full(3, np.nan, "f"))
    assert_same(restructure(noisy), model)
    assert_same(dict(restructure.view(noisy)), model)
    gradient = jax.grad(lambda v: zoo.loss(restructure(v)))(noisy)
    np.testing.assert_array_equal(gradient, np.append(jax.grad(lambda v: zoo.loss(unpadded(v)))(plain), [0, 0, 0]))
    np.testing.assert_array_equal(restructure.view(vector).at["**"].set(1.0), [1, 1, 1, 1, 1, 0, 0, 0])


@pytest.mark.parametrize("pad_to", [1, 4])
def test_a_gradient_in_a_vector_is_never_weakly_typed(pad_to):
    vector, restructure = tp.ravel({"w": ramp(3)}, pad_to=pad_to)
    gradient = lambda vector: jax.vjp(lambda vector: restructure(vector)["w"].sum(), vector)[1](1.0)[0]
    assert jax.eval_shape(gradient, vector).weak_type is gradient(vector).weak_type is False


@pytest.mark.parametrize("leaves", [1, 16])
def test_what_programs_cannot_address_is_refused_by_name_as_a_vector_and_taken_as_stacks(leaves):
    model = [jax.ShapeDtypeStruct((2**32 // leaves,), "float32")] * leaves
    edge = [jax.ShapeDtypeStruct((2**31 - 1,), "float32")]
    shape_of = lambda model, pad_to=1: jax.eval_shape(lambda model: tp.ravel(model, pad_to=pad_to)[0], model).shape
    assert tp.layout(model).size == 2**32
    for ravel in (tp.ravel, shape_of):
        with pytest.raises(
            ValueError, match=r"of 4,294,967,296 elements is longer than the 2,147,483,647 .*, tp.stack"
        ):
            ravel(model)
    assert shape_of(edge) == (2**31 - 1,)
    with pytest.raises(ValueError, match="a vector of 2,147,483,648 elements"):
        shape_of(edge, pad_to=2)
    stacks = jax.eval_shape(lambda model: tp.stack(model)[0], model)
    assert [array.shape for array in stacks.values()] == [(leaves, 2**32 // leaves)]


# -- What goes in ------------------------------------------------------------------------------------------------------


@FORMS
@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16, jnp.float32])
def test_arrays_of_numpy_and_of_other_floating_dtypes(form, dtype):
    model = {"half": ramp(2, dtype=jnp.bfloat16), "own": ramp(1), "tied": [shared := ramp(2), shared]}
    at_rest, restructure = form(model)
    got = restructure(jax.tree.map(lambda x: np.asarray(x).astype(dtype), at_rest))
    assert_close(got, model, 1e-2)
    assert got["tied"][0] is got["tied"][1]
    # What is complex takes real numbers.
    got = RESTRUCTURE(STACKS | {"complex64[3]": np.ones((1, 3), dtype)})["c64"]
    assert_same(got, jnp.ones(3, jnp.complex64))


def test_ravel_reads_any_tree_with_the_slots():
    shared = ramp(2)
    vector, restructure = tp.ravel({"a": shared, "b": shared, "c": ramp(1)})
    got = restructure.ravel({"a": 2 * shared, "b": 3 * shared, "c": ramp(1)})  # values: never asks
    np.testing.assert_array_equal(got[:2], 2 * shared)
    np.testing.assert_array_equal(restructure.ravel({"b": shared, "c": ramp(1)}), vector)


SMALL = {"a": [ramp(2), ramp(2, start=3)], "m": ramp(2, 2), "n": 3}
ROWS, WAY = tp.stack(SMALL)
GROUPED, WITH_GROUPS = tp.stack(SMALL, groups={"vectors": "a", "rest": "**"})
OF_VECTOR = tp.ravel(SMALL)[1]
in_groups = lambda groups, words: (lambda: tp.stack(SMALL | {"t": SMALL["m"]}, groups=groups), ValueError, words)
REFUSED = [
    (lambda: WAY({"float32[2]": ramp(2, 2)}), ValueError, r"for 'm' in 'float32\[2,2\]', but there is no such"),
    (lambda: WAY(ROWS | {"float32[3]": ramp(1, 3)}), ValueError, r"too many, 'float32\[3\]'; nearest: 'float32"),
    (lambda: WAY(ROWS | {"x": {"y": ramp(1)}}), ValueError, "one too many, 'y' of group 'x'"),
    (lambda: WAY(ROWS | {"float32[2]": ramp(2)}), ValueError, r"'a.1' in 'float32\[2\]', got shape \(2,\)"),
    (lambda: WAY(jax.tree.map(lambda x: x[None], ROWS)), ValueError, r"\(1, 1, 2, 2\); map over a stack .* jax.vmap"),
    (lambda: WAY(ROWS | {"float32[2]": np.ones((2, 2), int)}), TypeError, r"'a.1' in 'float32\[2\]', got int"),
    (lambda: WAY(ROWS | {"float32[2]": np.ones((2, 2), "F")}), TypeError, r"in 'float32\[2\]', got complex64"),
    (lambda: WAY(WAY.view(ROWS)), (TypeError, ValueError), "the stacks of tp.stack.* got .*View"),
    (lambda: WAY(GROUPED), ValueError, r"one too many, 'float32\[2(,2)?\]' of group '(vectors|rest)'"),
    (lambda: WITH_GROUPS(ROWS), ValueError, r"one too many, 'float32\[2(,2)?\]'"),
    (lambda: WAY.ravel({"a": SMALL["a"]}), ValueError, "found none for 'm'"),
    (lambda: WAY.ravel_gradient({"m": ramp(3)}), ValueError, r"float32\[2,2\] at 'm', got float32\[3\]"),
    (lambda: OF_VECTOR(ROWS), TypeError, r"a vector of shape \(8,\) and floating dtype, got dict"),
    (lambda: OF_VECTOR.place("m"), ValueError, r"'m' is in a vector, at layout.slice\('m'\)"),
    (lambda: OF_VECTOR(np.ones(8, "F")), TypeError, "got complex64, and no parameter is .*; pass vector.real"),
    (lambda: OF_VECTOR.ravel(SMALL | {"d": ramp(1)}), ValueError, "entry at 'd', where the model has no leaf"),
    (lambda: tp.ravel(MIXED, dtype=jnp.float32), TypeError, "'c64' is complex64, which a vector of float32"),
    (lambda: tp.ravel(SMALL, dtype=np.complex64), TypeError, "no parameter is complex, so the .* be complex64"),
    in_groups({"x": "m"}, r"in no group: 'a.0', 'a.1'.*'rest': '\*\*'"),
    in_groups({"x": "a", "rest": "b*"}, r"'b\*' selects nothing"),
    in_groups({"x": "n", "rest": "**"}, "'n' selects no parameter"),
    in_groups({"x": "t", "rest": "**"}, "'t' names 't', but 'm' and 't' are one array.* or write 'm'"),
    in_groups({"all": "**", "a": "a"}, r"'a' comes too late: '\*\*' before it selects the same parameters"),
    # It is not the 1 that is known by now.
    (lambda: tp.ravel(SMALL, pad_to=True), ValueError, "pad_to must be a whole number .* at least 1, got True"),
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
    updates = jax.jit(lambda grads, model: [rule.update(grads, rule.init(model), model)[0] for rule in (tx, plain)])
    assert_close(*updates(model, model))


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
    for path, leaf in tp.trainables(model).items():
        group, key, row = restructure.place(path)
        np.testing.assert_array_equal(np.asarray(stacks[group][key])[row], leaf)


def test_a_group_left_empty_and_a_tie_by_its_source():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "c": ramp(2), "frozen": ramp(1)}
    for groups, shapes in (
        ({"all": ["a", "b", "c"], "f": "frozen", "late": "**"}, {"all": {"float32[2]": (2, 2)}, "f": {}, "late": {}}),
        ({"of a": "a", "of b and c": ["b", "c"]}, {key: {"float32[2]": (1, 2)} for key in ("of a", "of b and c")}),
    ):
        stacks, restructure = tp.stack(model, "!frozen", groups=groups)
        assert jax.tree.map(np.shape, stacks) == shapes
        assert_same(restructure(stacks), model)
        assert_same(restructure.ravel(model), stacks)
        assert restructure.place("b") == restructure.place("a") == (next(iter(groups)), "float32[2]", 0)
    of = lambda *groups: jax.tree.structure(tp.stack(model, "!frozen", groups=dict(zip("xy", groups, strict=True)))[1])
    assert of("a", "c") == of("a", "c") != of("c", "a")


# -- As a plain tree ---------------------------------------------------------------------------------------------------


def test_the_way_back_is_pickled():
    stacks, restructure = tp.stack(MIXED, LAYOUT, groups={"x": "f32", "y": "**"})
    again = pickle.loads(pickle.dumps(restructure))
    assert again.layout == restructure.layout
    assert jax.tree.structure(again) == jax.tree.structure(restructure)
    assert_same((again(stacks), again.ravel(MIXED)), (MIXED, stacks))
    assert again.place("f32.other") == restructure.place("f32.other")


def test_what_takes_trees_takes_stacks():
    model = {"row": ramp(2, start=3), "tied": [SHARED, SHARED]}
    stacks, restructure = tp.stack(model)
    moved = jax.tree.map(lambda x: jax.device_put(-np.asarray(x)), stacks)
    assert_same(restructure(tp.ema(stacks, moved, decay=0.5)), tp.ema(model, restructure(moved), decay=0.5))
    vector, back = tp.ravel(stacks)
    assert_same(back(vector), stacks)


# -- What is frozen ----------------------------------------------------------------------------------------------------

BITS = np.array([0x7FC00123, 0x80000000, 1], np.uint32).view(np.float32)  # a NaN with a message, -0, a denormal
FROZEN_TWICE = ramp(1, 2, start=9)
FREEZE = ["weak", "tied"]


def _frozen(start):
    return {
        "w": [ramp(3, start=start), ramp(3, start=start + 1)],
        "same shape": [Norm(ramp(3), jnp.asarray(BITS)), Norm(ramp(3), ramp(3, start=start))],
        "ints": [jnp.arange(3) + int(start), jnp.arange(3) * 2, jnp.array([True, False]), jnp.array([False, False])],
        "keys": [jax.random.key(int(start)), jax.random.key(1), jax.random.PRNGKey(2), jax.random.PRNGKey(3)],
        "numpy": [np.array([2**40, 1]), np.array([2**40, 2]), np.arange(2, dtype=np.int8)],  # JAX has no such int
        "weak": [jnp.asarray(1.0), jnp.asarray(2.0), jnp.asarray(3), jnp.asarray(4)],
        "values": Pair(jnp.tanh, (7, 0.5, True, "name", None)),
        "tied": [FROZEN_TWICE, FROZEN_TWICE, ramp(1, 2)],
    }


def test_frozen_parts_come_back_bit_for_bit_and_can_be_those_of_another_model():
    model, second = _frozen(1.0), _frozen(5.0)
    layout = tp.layout(model, freeze=FREEZE)
    stacks, restructure = tp.stack(model, layout)
    assert {key: array.shape for key, array in stacks.items()} == {"float32[3]": (4, 3)}
    back = restructure(stacks)
    assert_same(back, model)
    for got, want in zip(jax.tree.leaves(back), jax.tree.leaves(model), strict=True):
        if hasattr(want, "dtype") and not jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
            assert np.asarray(got).tobytes() == np.asarray(want).tobytes()
            assert getattr(got, "weak_type", False) == getattr(want, "weak_type", False)
    assert all(isinstance(each, np.ndarray) for each in back["numpy"])
    other = restructure.with_frozen(second)
    assert_same(other(stacks), tp.maptrainable(lambda _, mine: mine, second, model, trainable=layout, tied="first"))
    of_second = tp.stack(second, tp.layout(second, freeze=FREEZE))[1]
    assert len(set(map(jax.tree.structure, (restructure, other, of_second)))) == 1  # so they take no new trace
    with pytest.raises(ValueError, match=r"'ints\.2' is bool\[2\] in the first, bool\[3\] in the second"):
        restructure.with_frozen(second | {"ints": [*second["ints"][:2], jnp.ones(3, bool), second["ints"][3]]})


def test_a_restructure_is_a_pytree_of_the_frozen_arrays():
    model = {"norms": [Norm(ramp(2), ramp(3)), Norm(ramp(2), ramp(3, start=2))], "n": jnp.arange(2), "f": jnp.tanh}
    stacks, restructure = tp.stack(model)
    assert sorted(leaf.shape for leaf in jax.tree.leaves(restructure)) == [(2,), (2, 3)]  # of one shape they are one
    passed = jax.jit(lambda r: jax.tree.map(lambda x: x + x.dtype.type(1), r))(restructure)(stacks)
    np.testing.assert_array_equal(passed["norms"][1].mean, model["norms"][1].mean + 1)
    assert passed["f"] is jnp.tanh
    twice = jax.tree.map(lambda x: np.stack([x, 2 * np.asarray(x)]), restructure)
    means = jax.vmap(lambda r, s: r(s)["norms"][1].mean, (0, None))(twice, stacks)
    np.testing.assert_array_equal(means, np.stack([ramp(3, start=2), 2 * ramp(3, start=2)]))
    # Means that are stacked are in buffers of their own.
    jax.jit(lambda r: jax.tree.map(lambda x: x * x, r), donate_argnums=0)(restructure)
    np.testing.assert_array_equal(model["norms"][0].mean, ramp(3))


# -- In transformations ------------------------------------------------------------------------------------------------


NET = filled(eqx.nn.MLP, 2, "scalar", 2, 2)
NET_STACKS, NET_WAY = tp.stack(NET, "!**.bias")
X = np.array([0.3, -0.4], np.float32)


@FORMS
def test_programs_made_ahead_of_time_from_shapes_and_for_elsewhere(form):
    at_rest, way = form(NET, "!**.bias")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), at_rest)
    of = jax.jit(jax.value_and_grad(lambda a, r: r(a)(X)))
    assert_same(of.lower(shapes, way).compile()(at_rest, way), of(at_rest, way))
    weights = [ramp(2, 2, start=k) for k in range(17)]  # so many that they share kernels on a CPU
    at_rest, restructure = form(weights)
    of = jax.jit(lambda a: (restructure(a), jax.grad(lambda a: jnp.sum(restructure(a)[3]))(a)))
    leaves, gradient = jax.export.export(of, platforms=("cpu", "cuda", "tpu"))(at_rest).call(at_rest)
    assert_same(leaves, weights)
    assert_same(gradient, restructure.ravel([np.full((2, 2), k == 3, "f") for k in range(17)]))


def test_stacks_are_plain_dictionaries():
    """So a comprehension, `in_axes`, a carry and the like take them as such."""
    stacks, grouped = NET_STACKS, tp.stack(NET, groups={"a": "**"})[0]
    view = NET_WAY.view(stacks)
    made = NET_WAY.ravel(NET), NET_WAY.ravel_gradient(NET), view.form, view.at["**"].add(1.0)
    assert {type(each) for each in (stacks, *made, grouped, *grouped.values())} == {dict}
    assert {type(array) for each in (stacks, *made) for array in each.values()} == {type(jnp.ones(1))}


def test_an_exported_function_takes_stacks_and_closes_over_the_way_back():
    pytest.importorskip("flatbuffers", reason="jax.export writes with it")
    sums = jax.jit(lambda s: jax.tree.map(jnp.sum, s))
    exported = jax.export.deserialize(jax.export.export(sums)(NET_STACKS).serialize())
    assert exported.call(NET_STACKS).keys() == NET_STACKS.keys()
    for own in (NET_WAY, tp.partition(NET)[1]):
        exported = jax.export.export(jax.jit(lambda own: jax.tree.leaves(own)))(own)
        with pytest.raises(ValueError, match=r"cannot take a Rest or a Restructure.*close over it, as in jax.jit"):
            exported.serialize()
