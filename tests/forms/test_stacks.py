"""Stacks: what goes in, what comes out, what is refused."""

import pickle
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .. import zoo
from ..zoo import Norm, assert_close, assert_same, cost, enable_x64, ramp

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


def test_one_array_for_each_shape_and_dtype_with_rows_in_tree_order():
    assert {key: (array.shape, str(array.dtype)) for key, array in STACKS.items()} == {
        "bfloat16[3]": ((2, 3), "bfloat16"),
        "complex64[3]": ((1, 3), "complex64"),
        "float16[2,3]": ((1, 2, 3), "float16"),
        "float32[2,3]": ((2, 2, 3), "float32"),  # a tie once, also through a transpose
        "float32[3]": ((1, 3), "float32"),
        "float32[]": ((2,), "float32"),
    }
    for key, paths in {"float32[2,3]": ["f32.embed", "f32.other"], "float32[]": ["scalars.0", "scalars.1"]}.items():
        assert [RESTRUCTURE.place(path) for path in paths] == [(None, key, 0), (None, key, 1)]
    for slot in LAYOUT.slots:
        assert RESTRUCTURE.place(slot.path) == (None, slot.key, slot.row)
        np.testing.assert_array_equal(np.asarray(STACKS[slot.key])[slot.row], tp.trainables(MIXED, LAYOUT)[slot.path])
    assert RESTRUCTURE.place("f32.decoder") == RESTRUCTURE.place("f32.head") == (None, "float32[2,3]", 0)
    assert LAYOUT["f32.other"][-2:] == (LAYOUT["f32.other"].key, LAYOUT["f32.other"].row) == ("float32[2,3]", 1)
    line = next(line for line in str(RESTRUCTURE).splitlines() if line.startswith("f32.other"))
    assert line.split()[-2:] == ["float32[2,3]", "1"]


def test_the_model_comes_back_with_its_dtypes_and_ties():
    back = RESTRUCTURE(STACKS)
    assert_same(back, MIXED)
    assert back["f32"]["head"] is back["f32"]["embed"]
    assert_same(RESTRUCTURE.ravel(back), STACKS)
    with enable_x64(True):
        wide = {"f64": [jnp.array([1 / 3], jnp.float64)] * 1, "c128": jnp.array([1j / 3]), "f32": ramp(1)}
        stacks, restructure = tp.stack(wide)
        assert list(stacks) == ["complex128[1]", "float32[1]", "float64[1]"]
        assert_same(restructure(stacks), wide)
    weak, restructure = tp.stack([jnp.array(1.0), jnp.array(2.0)])
    assert [leaf.weak_type for leaf in (*weak.values(), *restructure(weak))] == [False] * 3


def test_one_declared_tie_is_one_row():
    class Tied(eqx.Module):
        embed: jax.Array
        head: jax.Array = tp.field(tied_to="embed", transform=jnp.transpose)

    stacks, restructure = tp.stack([Tied(ramp(2, 2), ramp(2, 2).T), Tied(ramp(2, 2, start=3), ramp(2, 2, start=3).T)])
    assert {key: array.shape for key, array in stacks.items()} == {"float32[2,2]": (2, 2, 2)}
    assert restructure.place("1.head") == (None, "float32[2,2]", 1)
    np.testing.assert_array_equal(restructure(stacks)[1].head, np.asarray(stacks["float32[2,2]"])[1].T)


@pytest.mark.filterwarnings("ignore:nothing is trained")
@pytest.mark.parametrize("model", [{}, None, {"n": 3, "i": np.arange(2)}], ids=str)
def test_nothing_trained(model):
    stacks, restructure = tp.stack(model)
    assert stacks == restructure.ravel(model) == restructure.ravel_gradient(model) == {}
    assert_same(restructure({}), model)
    assert_same(
        jax.jit(lambda stacks, restructure: restructure.ravel(restructure(stacks)))(stacks, restructure), stacks
    )
    assert len(restructure.view({})) == 0
    with pytest.raises(ValueError, match=r"one too many, 'float32\[3\]'"):
        restructure({"float32[3]": ramp(1, 3)})


@pytest.mark.parametrize(
    "model", [[ramp(3)], [np.ones(3, np.float32)], [ramp(3), ramp(3, start=2)], ramp(), ramp(0, 2)]
)
def test_fresh_buffers_always(model):
    before = jax.tree.map(np.array, model)
    stacks, restructure = tp.stack(model)
    donated = jax.jit(lambda stacks: jax.tree.map(lambda x: x + 1, stacks), donate_argnums=0)
    donated(stacks)
    assert not jax.tree.leaves(model)[0].size or all(array.is_deleted() for array in stacks.values())
    jax.tree.map(np.testing.assert_array_equal, model, before)
    again = restructure.ravel(model)
    donated(again)
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


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: WAY({"float32[2]": ramp(2, 2)}), ValueError, r"for 'm' in 'float32\[2,2\]', but there is no such"),
        (lambda: WAY(ROWS | {"float32[2]": None}), ValueError, r"for 'a.0', 'a.1' in 'float32\[2\]', but there is no"),
        (lambda: WAY(ROWS | {"float32[3]": ramp(1, 3)}), ValueError, r"too many, 'float32\[3\]'; nearest: 'float32"),
        (lambda: WAY(ROWS | {"x": {"y": ramp(1)}}), ValueError, "one too many, 'y' of group 'x'"),
        (lambda: WAY(ROWS | {"float32[2]": ramp(2)}), ValueError, r"'a.1' in 'float32\[2\]', got shape \(2,\)"),
        (lambda: jax.eval_shape(WAY, ROWS | {"float32[2]": ramp(1, 2)}), ValueError, r"got shape \(1, 2\)"),
        (
            lambda: WAY(jax.tree.map(lambda x: x[None], ROWS)),
            ValueError,
            r"\(1, 1, 2, 2\); map over a stack .* jax.vmap",
        ),
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
        (lambda: WAY.ravel_gradient({"m": ramp(3)}), ValueError, r"'m'"),
    ],
)
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
    model = {
        "layers": [{"w": ramp(2, 2, start=k), "b": ramp(2, start=k)} for k in range(3)],
        "norm": Norm(ramp(2), ramp(2)),
    }
    groups = {"first": "layers.0", "norms": Norm, "matrices": tp.leaves(lambda _, leaf: leaf.ndim == 2), "rest": "**"}
    stacks, restructure = tp.stack(model, groups=groups)
    assert jax.tree.map(np.shape, stacks) == {
        "first": {"float32[2,2]": (1, 2, 2), "float32[2]": (1, 2)},
        "norms": {"float32[2]": (1, 2)},
        "matrices": {"float32[2,2]": (2, 2, 2)},
        "rest": {"float32[2]": (2, 2)},
    }
    assert restructure.place("layers.2.w") == ("matrices", "float32[2,2]", 1)
    assert (restructure.layout["layers.2.w"].key, restructure.layout["layers.2.w"].row) == ("float32[2,2]", 2)
    assert restructure.layout == tp.layout(model)
    assert_same(restructure(stacks), model)
    assert_same(restructure.ravel(model), stacks)
    for slot in restructure.layout.slots:
        group, key, row = restructure.place(slot.path)
        np.testing.assert_array_equal(np.asarray(stacks[group][key])[row], tp.trainables(model)[slot.path])

    @jax.jit
    def gradients(stacks, model):
        of_stacks = jax.grad(lambda stacks: zoo.loss(restructure(stacks)))(stacks)
        return of_stacks, restructure.ravel_gradient(tp.grad(zoo.loss)(model))

    assert_close(*gradients(stacks, model))
    labels = {"first": 0.0, "norms": 1.0, "matrices": 2.0, "rest": 3.0}  # a prefix tree, as of Optax
    marked = jax.tree.map(lambda label, group: jax.tree.map(lambda x: np.full_like(x, label), group), labels, stacks)
    assert np.asarray(restructure(marked)["layers"][1]["b"])[0] == 3.0


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
    assert len(tp.trainables(stacks)) == len(jax.tree.leaves(stacks))
    assert_same(tp.combine(*tp.partition(stacks)), stacks)
