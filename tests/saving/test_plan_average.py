"""plan.average, and which functions may carry what is kept beside parameters: those that only move elements."""

import dataclasses

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import assert_same, ramp
from .test_plan import row

# -- Functions that move elements --------------------------------------------------------------------------------------


def _shadows(arrays):
    """The names of an average in which these are the shadows."""
    return {f"shadow.{name}": its for name, its in arrays.items()} | {
        "count": np.array(3),
        "weight": np.array(0.5, "f"),
    }


def _moved(sources, targets, rename, transform, shadows):
    """The shadows after a plan, by path."""
    plan = saving.plan(sources, targets, rename=rename, transform=transform)
    return plan.average(_shadows(shadows), tp.Ema(targets, 0.9)).shadow


_NOISE = np.random.default_rng(7).normal(size=(19, 17)).astype(np.float32)


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "complex64", "cast"])
def test_movers_in_dtypes_that_hold_few_numbers(dtype):
    """More elements than that; what is moved are the shadows, which are wider."""
    before, after = ("float32", "bfloat16") if dtype == "cast" else (dtype, dtype)
    shadow = _NOISE * np.complex64(1 + 2j) if dtype == "complex64" else _NOISE
    target = {"w": np.ones((17, 18), jnp.dtype(after))}
    function = lambda x: x[1:, ::-1].T.astype(after)
    got = _moved({"w": np.ones((19, 17), jnp.dtype(before))}, target, None, {"w": function}, {"w": shadow})
    np.testing.assert_array_equal(got["w"], shadow[1:, ::-1].T)


def test_movers_of_several_arrays():
    a, b = row(3, 2), row(2, 4, start=50)
    join = lambda a, b: (jnp.concatenate([a.T.reshape(-1), b[0]]), b[1:, ::-1])
    targets = {"flat": ramp(10), "left": ramp(1, 4)}
    both = {("a", "b"): ("flat", "left")}
    got = _moved({"a": a, "b": b}, targets, both, {("a", "b"): join}, {"a": a / 3, "b": b / 3})
    np.testing.assert_array_equal(got["flat"], np.concatenate([(a / 3).T.reshape(-1), b[0] / 3]))
    np.testing.assert_array_equal(got["left"], b[1:, ::-1] / 3)
    stacked = _moved(
        {"l": [a, b.reshape(4, 2)[:3]]}, {"l": ramp(2, 3, 2)}, {"l.*": "l"}, None, {"l.0": a / 7, "l.1": a / 9}
    )
    np.testing.assert_array_equal(stacked["l"], np.stack([a / 7, a / 9]))


_ROWS = jnp.array([2, 0, 3, 1])


MOVERS = {
    "a mask": lambda x: x[np.array([True, False, True, True])],
    "take along": lambda x: jnp.take_along_axis(x, jnp.argsort(_ROWS)[:, None], axis=1),
    "mapped": jax.vmap(lambda row: row[::-1]),
    "computed places": lambda x: x[(_ROWS * 3 + 1) % 4, jnp.arange(4)],
    "named": lambda x: jax.checkpoint(jnp.rot90)(x),
    "no gradient": lambda x: jax.lax.stop_gradient(1 * x).T,
    "padded and cut": lambda x: jnp.pad(x, 1)[2:-1, 1:-1],
    "put together": lambda x: jnp.zeros((4, 4)).at[:2].set(x[2:]).at[2:].set(x[:2]),
    "of two by a mask": lambda x: jnp.where(np.arange(4) > 1, x, x[::-1]),
    "zeros by places": lambda x: x.at[_ROWS[:2]].set(0).T,
    "padding": lambda x: jnp.pad(x, ((1, 0), (0, 2))),
    "a product": lambda x: jnp.eye(4)[_ROWS] @ x,
    "a sum of halves": lambda x: jnp.pad(x[:2], ((2, 0), (0, 0))) + jnp.pad(x[2:], ((0, 2), (0, 0))),
    "shuffled": lambda x: jax.random.permutation(jax.random.key(0), x, axis=1),
    "zeros": jnp.zeros_like,
}


@pytest.mark.parametrize("function", MOVERS.values(), ids=MOVERS.keys())
def test_movers_that_say_by_arrays_where_elements_go(function):
    values = _NOISE[:4, :4]
    want = np.asarray(jax.jit(function)(values))
    got = _moved({"w": row(4, 4)}, {"w": np.ones(want.shape, np.float32)}, None, {"w": function}, {"w": values})
    np.testing.assert_array_equal(got["w"], want)


# An average follows these, and moments do not, or only where the elements are that they move.
AFFINE = {
    "out of bounds": lambda x: jnp.take(x, jnp.array([0, 7])),
    "scaling": lambda x: 2 * x,
    "sum": lambda x: x + x[::-1],
    "padding with its edge": lambda x: jnp.pad(x, 1, mode="edge"),
    "mean": lambda x: (x + x[::-1]) / 2,
    "half a mask": lambda x: x * np.float32([1, 0.5, 1]),
    "whole sum": lambda x: jnp.zeros(3).at[jnp.array([0, 0, 1])].add(x),
    "twice": lambda x: jnp.concatenate([x, x[:1]]),
    "moves that cancel": lambda x: x + x[::-1] - x,
    "of rows and columns": lambda x: x[:1] + x[1:] - 2 * x[:1],
}
GROWING = {
    "concatenated": lambda x: jnp.concatenate([x, jnp.full((2,), 7, x.dtype)]),
    "padded": lambda x: jnp.pad(x, (0, 2), constant_values=1),
    "added": lambda x: jnp.pad(x, (0, 2)) + 1,
    "masked": lambda x: jnp.where(np.arange(5) < 3, jnp.pad(x, (0, 2)), 7),
}
NOT_AFFINE = {
    "places that depend on values": lambda x: x[jnp.argsort(x)],
    "scanned": lambda x: jax.lax.scan(lambda total, each: (total + each, total), 0.0, x)[1],
    "square of one": lambda x: (x * x)[:1],
    "clip": lambda x: jnp.clip(x, -1e6, 1e6),
    "unit size": lambda x: x / jnp.max(jnp.abs(x)),
    "branch by values": lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: x[::-1]),
    "whole numbers": lambda x: x.astype(jnp.int32).astype(x.dtype),
    # These move elements, and nobody reads it from their programs.
    "scanned rows": lambda x: jax.lax.scan(lambda _, row: (None, row), None, x)[1],
    "a callback": lambda x: jax.pure_callback(lambda x: np.asarray(x)[::-1], x, x),
}


def _plan_of(function, values):
    target = {"w": jnp.zeros(jax.eval_shape(function, jnp.asarray(values["w"])).shape)}
    plan = saving.plan(values, target, transform={"w": function})
    np.testing.assert_array_equal(plan(values)["w"], function(jnp.asarray(values["w"])))
    return plan, target


_MOMENTUM = optim.trainable(optax.sgd(0.1, momentum=0.9))


def _carried(plan, values, target):
    """A state in which the moment is this number and count, and what the fresh one begins with."""
    tx = _MOMENTUM
    state = jax.tree.map(lambda x: jnp.asarray(values["w"]) if x.shape == values["w"].shape else x, tx.init(values))
    like = jax.tree.map(lambda x: x - 5 if jnp.issubdtype(x.dtype, jnp.floating) else x, tx.init(target))
    return plan.state(state, like).runs[0][0].trace["w"]


@pytest.mark.parametrize("function", AFFINE.values(), ids=AFFINE.keys())
def test_averages_follow_affine_functions_and_moments_do_not(function):
    values = {"w": np.float32([-0.5, 3.25, 1.0])}
    plan, target = _plan_of(function, values)
    ema = tp.Ema(values, decay=0.75, debias=True)
    for factor in (2, -3):
        ema = ema.update({"w": values["w"] ** 2 * factor})
    want = function(ema.shadow["w"])
    np.testing.assert_allclose(plan.average(ema, tp.Ema(target, 0.75, debias=True)).shadow["w"], want, rtol=1e-6)
    np.testing.assert_allclose(plan.average(values)["w"], function(jnp.asarray(values["w"])), rtol=1e-6)
    with pytest.raises(ValueError, match=r"moments can follow .* from \['w'\] to \['w'\], changes or repeats them"):
        _carried(plan, values, target)


@pytest.mark.parametrize("function", GROWING.values(), ids=GROWING.keys())
def test_what_grows_begins_where_constants_are(function):
    """A vocabulary with new tokens: averages have the constants, and moments begin as those of the fresh state."""
    values = {"w": np.float32([-0.5, 3.25, 1.0])}
    plan, target = _plan_of(function, values)
    got = plan.average(_shadows(values), tp.Ema(target, 0.9)).shadow["w"]
    np.testing.assert_array_equal(got, function(jnp.asarray(values["w"])))
    np.testing.assert_array_equal(_carried(plan, values, target), [*values["w"], -5, -5])


@pytest.mark.parametrize("function", NOT_AFFINE.values(), ids=NOT_AFFINE.keys())
def test_what_is_not_affine_is_refused_for_averages_alone(function):
    values = {"w": np.float32([-0.5, 3.25, 1.0])}
    plan, target = _plan_of(function, values)
    message = r"averages can follow sums, .* from \['w'\] to \['w'\], is not affine"
    for average in (lambda: plan.average(values), lambda: plan.average(_shadows(values), tp.Ema(target, 0.9))):
        with pytest.raises(ValueError, match=message):
            average()
    with pytest.raises(ValueError, match=r"moments can follow .*, changes or repeats them"):
        _carried(plan, values, target)


def test_more_elements_than_memory_holds():
    """Where each operation moves a whole array, that is seen without numbers; where not, it is refused."""
    many = {"w": jax.ShapeDtypeStruct((2**16, 2**15 + 1), np.float32)}
    wide, narrow = ({"w": jax.ShapeDtypeStruct(shape, np.float32)} for shape in ((2, 2**30 + 1), (2**30 + 1, 2)))
    turned = jax.jit(lambda x: jnp.stack(jnp.split(x, 2), -1)[0])
    for source, target, function, message in (
        (many, many, lambda x: jnp.roll(x, 1), r"\['w'\] to .* is of 2,147,549,184 elements, and .*each array.*fresh"),
        (wide, narrow, jnp.transpose, "the state has no values at"),
        (wide, narrow, turned, "the state has no values at"),
    ):
        plan = saving.plan(source, target, transform={"w": function})
        state, like = (jax.eval_shape(_MOMENTUM.init, each) for each in (source, target))
        with pytest.raises(ValueError, match=message):
            plan.state(dataclasses.replace(state, counts=(np.array(0, np.int32),)), like)


# Each composition of these is of a matrix of four rows and columns, and gives one.
_MOVES = {
    "transpose": jnp.transpose,
    "reshape": lambda x: x.reshape(2, 8).T.reshape(4, 4),
    "flip": lambda x: x[:, ::-1],
    "take": lambda x: jnp.take(x, _ROWS, axis=1),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
    "stack": lambda x: jnp.stack([x[2], x[0], x[1], x[3]], axis=1),
    "mask": lambda x: x * np.tri(4).astype(x.dtype),
    "pad": lambda x: jnp.pad(x[1:, :3], ((0, 1), (1, 0))),
    "where": lambda x: jnp.where(np.eye(4, dtype=bool), x, x.T),
    "narrow": lambda x: x.astype(jnp.bfloat16).astype(x.dtype),
}
_CHANGES = {
    "scale": lambda x: 2 * x,
    "clip": lambda x: jnp.clip(x, -1e6, 1e6),
    "threshold": lambda x: jnp.where(x > 0, x, 0),
    "repeat": lambda x: jnp.broadcast_to(x[:1], (4, 4)),
    "of rows and columns": lambda x: x[:1] + x[:, :1] - x[:1, :1],
    "negative": jnp.negative,
}


def _composed(names):
    def composed(x):
        for name in names:
            x = (_MOVES | _CHANGES)[name](x)
        return x

    return composed


@hypothesis.given(st.lists(st.sampled_from([*_MOVES]), max_size=6), st.sampled_from(["float32", "bfloat16"]))
@hypothesis.settings(deadline=None, max_examples=5, derandomize=True)
def test_compositions_of_moves_are_followed(names, dtype):
    """What is moved keeps its digits, of which the parameters and casts within the function may hold fewer."""
    values = _NOISE[:4, :4]
    exact = _composed([name for name in names if name != "narrow"])
    source = {"w": row(4, 4).astype(dtype)}
    got = _moved(source, {"w": jnp.zeros((4, 4), dtype)}, None, {"w": _composed(names)}, {"w": values})
    np.testing.assert_array_equal(got["w"], exact(values))


@hypothesis.given(
    st.lists(st.sampled_from([name for name in _MOVES if name not in ("mask", "pad", "where")]), max_size=4),
    st.sampled_from([*_CHANGES]),
    st.integers(0, 4),
)
@hypothesis.settings(deadline=None, max_examples=4, derandomize=True)
def test_one_change_among_moves_is_refused(names, change, at):
    function = _composed([*names[:at], change, *names[at:]])
    plan = saving.plan({"w": row(4, 4)}, {"w": ramp(4, 4)}, transform={"w": function})
    with pytest.raises(ValueError, match="changes or repeats them"):
        _carried(plan, {"w": row(4, 4)}, {"w": ramp(4, 4)})


@pytest.mark.parametrize("shape", [(), (1,), (2,), (0, 3), (300, 256), (1030, 1024)])
def test_sizes_of_one_to_three_digits(shape):
    """Of bfloat16, which holds eight binary digits; a change of one row is noticed among many."""
    dtype = jnp.bfloat16
    values = np.random.default_rng(0).normal(size=shape).astype("f")
    source, flat = {"w": jnp.zeros(shape, dtype)}, {"w": jnp.zeros((values.size,), dtype)}
    got = _moved(source, flat, None, {"w": lambda x: x.T.ravel()[::-1]}, {"w": values})
    np.testing.assert_array_equal(got["w"], values.T.ravel()[::-1])
    changes = [lambda x: x.at[-1].set(jnp.abs(x[-1]))] if shape and values.size else []
    # Of 300 rows of 256 this is right on all digits, each of which is that of the row or that of the column.
    changes += [lambda x: x[:1] + x[:, :1] - x[:1, :1]] if shape == (300, 256) else []
    for change in changes:
        with pytest.raises(ValueError, match="changes or repeats them"):
            _carried(saving.plan(source, source, transform={"w": change}), source, source)


def test_arrays_that_are_no_parameters_beside_those_that_are():
    """The function computes them as it does for the model, and no place may depend on them."""
    old = {"w": row(3, 2), "n": row(3, dtype=np.int32), "on": np.array([True, False]), "key": jax.random.key(3)}
    new = {"w": ramp(2, 3), "n": jnp.arange(3), "on": jnp.array([False, True]), "key": jax.random.key(0)}
    names = tuple(old)

    def plan_of(function):
        return saving.plan(old, new, rename={names: names}, transform={names: function})

    average = {**old, "w": old["w"] / 7}
    made = plan_of(lambda w, n, on, key: (w.T, n[::-1], ~on, jax.random.fold_in(key, 1))).average(
        tp.Ema(average, 0.5), tp.Ema(new, 0.5)
    )
    assert_same(made.shadow["w"], jnp.asarray(average["w"].T))
    rest = made.average
    assert rest["n"].tolist() == [2, 1, 0]
    assert rest["on"].tolist() == [False, True]
    assert rest["key"] == jax.random.fold_in(old["key"], 1)
    for place in (
        lambda w, n, on, key: w[n].T,
        lambda w, n, on, key: jnp.where(n[:, None] > 0, w, 0).T,
        lambda w, n, on, key: jnp.where(on, w, w[::-1]).T,
        lambda w, n, on, key: jax.random.permutation(key, w).T,
    ):
        plan = plan_of(lambda w, n, on, key, place=place: (place(w, n, on, key), n, on, key))
        with pytest.raises(ValueError, match="is not affine"):
            plan.average(average)


def test_more_that_is_no_mover():
    pair = {"a": row(3), "b": row(3)}
    plan = saving.plan(pair, {"c": ramp(3)}, rename={("a", "b"): "c"}, transform={("a", "b"): jnp.add})
    np.testing.assert_array_equal(plan.average(_shadows(pair), tp.Ema({"c": ramp(3)}, 0.9)).shadow["c"], 2 * row(3))
    choice = lambda a, b: jnp.where(a > 1, a, b)
    plan = saving.plan(pair, {"c": ramp(3)}, rename={("a", "b"): "c"}, transform={("a", "b"): choice})
    with pytest.raises(ValueError, match="is not affine"):
        plan.average(pair)
    values = {"z": np.complex64([1 + 2j, 3])}
    swapped = lambda z: jax.lax.complex(z.imag, z.real)
    for function in (lambda z: z.real.astype(z.dtype), swapped):
        with pytest.raises(ValueError, match="is not affine"):
            saving.plan(values, values, transform={"z": function}).average(values)
    for function in (jnp.conj, lambda z: z * 1j, lambda z: z + 0, lambda z: z * 1, jnp.positive):
        got = saving.plan(values, values, transform={"z": function}).average(values)
        np.testing.assert_array_equal(got["z"], function(values["z"]))
    ints = {"n": row(3, dtype=np.int32), "w": row(2)}  # integers are no parameters, and no average is taken of them
    scaled = {"rename": {("n", "w"): "w"}, "transform": {("n", "w"): lambda n, w: w * n[:2]}}
    with jax.numpy_dtype_promotion("standard"), pytest.raises(ValueError, match="is not affine"):
        saving.plan(ints, {"w": ramp(2)}, **scaled).average(ints)
    assert saving.plan(ints, ints, transform={"n": lambda n: 2 * n}).average(ints)["n"].tolist() == [0, 2, 4]


# -- Averages ----------------------------------------------------------------------------------------------------------


class _Old(eqx.Module):
    low: jax.Array
    pair: list
    scale: jax.Array = tp.field(trainable=False)
    steps: jax.Array
    keys: list


class _New(eqx.Module):
    one: jax.Array
    three: jax.Array
    two: jax.Array
    steps: jax.Array
    gain: jax.Array
    keys: jax.Array
    new: jax.Array
    frozen: jax.Array = tp.field(trainable=False)


def _old():
    low, pair = ramp(4, dtype=jnp.bfloat16), [ramp(2), ramp(2) + 1, ramp(3)]
    return _Old(low, pair, ramp(3), jnp.array(7), [jax.random.key(1), jax.random.key(2)])


def _new():
    low = ramp(2, dtype=jnp.bfloat16)
    return _New(low, ramp(2, 2), low + 0, jnp.array(0), ramp(3), jax.random.split(jax.random.key(0)), ramp(1), ramp(3))


RENAME = {"low": ("one", "two"), "pair.2": "frozen", "pair.*": "three", "scale": "gain", "keys.*": "keys"}


def test_an_average_goes_along(tmp_path):
    """Split, stacked, thawed, frozen; count and weight as they were."""
    old, ema = _old(), tp.Ema(_old(), 0.5, debias=True)
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    for factor in (2, 3):
        ema = ema.update(jax.tree.map(lambda x, by=factor: x if is_key(x) else (x * by).astype(x.dtype), old))
    saving.save(tmp_path / "run.safetensors", {"model": old, "average": ema})
    plan = saving.plan(old, _new(), rename=RENAME, transform={"low": lambda low: (low[:2], low[2:])}, strict=False)
    assert (plan.missing, plan.unused, plan.disagrees) == (("new",), (), ())
    like = tp.Ema(_new(), 0.9, debias=True)
    made = plan.average(ema, like)
    assert jax.tree.structure(made) == jax.tree.structure(like)
    assert not tp.diff(made, plan.average(saving.names(tmp_path / "run.safetensors", "average"), like))
    assert (int(made.count), float(made.weight), made.decay) == (2, 0.75, 0.9)
    shadow, before, average = made.shadow, ema.shadow, ema.average
    np.testing.assert_array_equal(jnp.concatenate([shadow.one, shadow.two]), before.low)  # float32, as it was
    np.testing.assert_array_equal(shadow.three, jnp.stack(before.pair[:2]))
    np.testing.assert_array_equal(shadow.gain, average.scale)
    np.testing.assert_array_equal(shadow.new, like.shadow.new)
    np.testing.assert_array_equal(made.average.frozen, before.pair[2])
    assert_same(jax.random.key_data(made.average.keys), jnp.stack([jax.random.key_data(key) for key in average.keys]))
    assert int(made.average.steps) == 21
    # Updated and moved is the same as moved and updated.
    like = tp.Ema(_new(), 0.5, debias=True)
    after, later = plan.average(ema.update(old), like), plan.average(ema, like).update(plan(old))
    for name in ("one", "two", "three"):
        np.testing.assert_array_equal(getattr(after.shadow, name), getattr(later.shadow, name))
    assert_same((after.count, after.weight), (later.count, later.weight))


def test_an_average_that_is_a_model(tmp_path):
    old = {"a": row(2, 3), "n": row(2, dtype=np.int32)}
    average = tp.ema(tp.copy(old), jax.tree.map(lambda x: x + 1, old), decay=0.5)
    saving.save(tmp_path / "run.safetensors", {"model": old, "average": average})
    model = {"b": ramp(3, 2), "n": jnp.arange(2)}
    plan = saving.plan(old, model, rename={"a": "b"}, transform={"a": jnp.transpose})
    want = {"b": jnp.asarray(old["a"].T + 0.5), "n": jnp.arange(2) + 1}
    assert_same(plan.average(average), want)
    assert_same(plan.average(saving.names(tmp_path / "run.safetensors", "average")), want)


def test_ties_and_bare_arrays():
    shared = ramp(2, 2)
    tied, apart = {"embed": shared, "head": shared}, {"a": ramp(2, 2), "b": ramp(2, 2)}
    ema = tp.Ema(tied, 0.5).update({"embed": shared + 1, "head": shared + 1})
    plan = saving.plan(tp.layout(tied), apart, rename={"embed": "a", "head": "b"})
    shadow = plan.average(ema, tp.Ema(apart, 0.5)).shadow
    assert_same(shadow, dict.fromkeys("ab", ema.shadow["embed"]), identity=False)
    bare = saving.plan(ramp(2), {"w": ramp(2)}, rename={"": "w"})
    assert_same(bare.average(tp.Ema(ramp(2) + 3, 0.5), tp.Ema({"w": ramp(2)}, 0.5)).shadow, {"w": ramp(2) + 3})
    frozen = tp.Ema(tied, 0.5, trainable=tp.layout(tied, freeze="**"))
    assert_same(plan.average(frozen, tp.Ema(apart, 0.5)).shadow, {"a": shared, "b": shared}, identity=False)


def test_averages_within_jit_and_of_another_model():
    values, target = {"w": _NOISE[:4, :4]}, {"w": ramp(4, 4)}
    plan = saving.plan(values, target, transform={"w": lambda x: x[_ROWS] * np.tri(4, dtype=np.float32)})
    moved = jax.jit(lambda ema: plan.average(ema, tp.Ema(target, 0.5)).shadow["w"])(tp.Ema(values, 0.5))
    np.testing.assert_array_equal(moved, values["w"][np.asarray(_ROWS)] * np.tri(4))
    for other, message in (
        ({"new": ramp(2)}, r"like has float32\[2\] at 'new', but the plan's model has none there.*like=tp\.Ema"),
        ({"n": jnp.arange(2)}, r"like has int32\[2\] at 'n', but the plan's model has none"),
    ):
        with pytest.raises(ValueError, match=message):
            plan.average(tp.Ema(values, 0.5), tp.Ema(target | other, 0.5))
    with pytest.raises(ValueError, match=r"expected float32\[4,4\] at 'w', .* got float32\[2,2\]"):
        plan.average(tp.Ema({"w": ramp(2, 2)}, 0.5), tp.Ema(target, 0.5))


def test_an_average_of_a_larger_model_is_refused_as_its_state_is(tmp_path):
    """A strict plan drops nothing in silence, for the model, its state and its average; one that is not strict may."""
    small = {"layers": [ramp(2) for _ in range(12)]}
    large = {"layers": [ramp(2) + i for i in range(16)]}
    tx, ema = _MOMENTUM, tp.Ema(large, 0.5)
    saving.save(tmp_path / "run.safetensors", {"average": ema, "state": tx.init(large)})
    plan, lax = (saving.plan(small, small, strict=strict) for strict in (True, False))
    names = lambda item: saving.names(tmp_path / "run.safetensors", item)
    for call in (
        lambda plan: plan(large),
        lambda plan: plan.state(tx.init(large), tx.init(small)),
        lambda plan: plan.state(names("state"), tx.init(small)),
        lambda plan: plan.average(ema, tp.Ema(small, 0.5)),
        lambda plan: plan.average(names("average"), tp.Ema(small, 0.5)),
        lambda plan: plan.average(large),
    ):
        with pytest.raises(ValueError, match=r"the plan does not know 'layers\.12', .*, which would be lost"):
            call(plan)
        assert call(lax) is not None


@pytest.mark.usefixtures("without_type_checks")
def test_errors_of_averages():
    model = {"w": ramp(2)}
    plan, ema = saving.plan(model, model), tp.Ema(model, 0.5)
    with pytest.raises(TypeError, match=r"expected a fresh average of the new model, like=tp.Ema\(.*\), got dict"):
        plan.average(ema, model)
    with pytest.raises(ValueError, match=r"expected a tp\.Ema, or the names of one, .*; got names such as w"):
        plan.average(model, ema)
    with pytest.raises(ValueError, match=r"expected float32\[2\] at 'w', .*, got nothing; nearest: 'v'"):
        plan.average(tp.Ema({"v": ramp(2)}, 0.5), ema)
    with pytest.raises(ValueError, match=r"expected float32\[2\] at 'w', .* got float32\[3\]"):
        plan.average(tp.Ema({"w": ramp(3)}, 0.5), ema)
    with pytest.raises(TypeError, match=r"the source is a tp.Ema, so pass a fresh one .*: like=tp.Ema\("):
        plan.average(ema)


def test_an_average_can_be_donated():
    """Of a tied model as that of an untied one, it holds no array twice."""
    shared = ramp(2)
    tied, untied = {"a": shared, "b": shared}, {"a": ramp(2), "b": ramp(2)}
    made = saving.plan(tied, untied).average(tp.Ema(tied, 0.5), like=tp.Ema(untied, 0.5))
    assert len({id(leaf) for leaf in jax.tree.leaves(made.shadow)}) == 2
