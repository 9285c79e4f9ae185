"""plan.average, and which functions may carry what is kept beside parameters: those that only move elements."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import assert_same, ramp
from .files import refused, row

# The names of an average in which these are the shadows.
_shadows = lambda arrays: {f"shadow.{name}": its for name, its in arrays.items()} | _COUNTS
_COUNTS = {"count": np.array(3), "weight": np.array(0.5, "f")}


def _moved(sources, targets, rename, transform, shadows):
    plan = saving.plan(sources, targets, rename=rename, transform=transform)
    return jax.jit(lambda its: plan.average(_shadows(its), tp.Ema(targets, 0.9)).shadow)(shadows)


_NOISE = np.random.default_rng(7).normal(size=(19, 17)).astype(np.float32)
_ROWS = jnp.array([2, 0, 3, 1])
# Each is of a matrix of four rows and columns, and gives one.
MOVES = {
    "transpose": jnp.transpose,
    "reshape": lambda x: x.reshape(2, 8).T.reshape(4, 4),
    "flip": lambda x: x[:, ::-1],
    "take along": lambda x: jnp.take_along_axis(x, np.array([1, 3, 0, 2])[:, None], axis=1),
    "split": lambda x: jnp.concatenate(jnp.split(x, 2)[::-1]),
    "stack": lambda x: jnp.stack([x[2], x[0], x[1], x[3]], axis=1),
    "mapped": jax.vmap(lambda row: row[::-1]),
    "computed places": lambda x: x[(_ROWS * 3 + 1) % 4],
    "named": lambda x: jax.checkpoint(jnp.rot90)(x),
    "no gradient": lambda x: jax.lax.stop_gradient(1 * x).T,
    "padded and cut": lambda x: jnp.pad(x, 1)[1:-1, 1:-1],
    "put together": lambda x: jnp.zeros((4, 4), x.dtype).at[:2].set(x[2:]).at[2:].set(x[:2]),
    "a product": lambda x: jnp.eye(4, dtype=x.dtype)[_ROWS] @ x,
    "a sum of halves": lambda x: jnp.pad(x[:2], ((2, 0), (0, 0))) + jnp.pad(x[2:], ((0, 2), (0, 0))),
}
DROPS = {
    "some rows": lambda x: x[np.array([True, False, True, True])],
    "mask": lambda x: x * np.tri(4).astype(x.dtype),
    "pad": lambda x: jnp.pad(x[1:, :3], ((0, 1), (1, 0))),
    "of two by a mask": lambda x: jnp.where(np.eye(4, dtype=bool), x, x.T),
    "zeros by places": lambda x: x.at[_ROWS[:2]].set(0).T,
}
_composed = lambda *functions: lambda x: functools.reduce(lambda x, f: f(x), functions, x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn"])
def test_what_moves_elements_moves_averages_with_all_their_digits(dtype):
    cast, values = lambda x: x.astype(jnp.bfloat16).astype(x.dtype), _NOISE[:4, :4]
    source, casts = {"w": row(4, 4).astype(dtype)}, [cast] if dtype != "float8_e4m3fn" else []
    its = [*MOVES.values()][:9] if casts == [] else MOVES.values()  # it has no product
    for function in (_composed(*its), *(DROPS.values() if dtype == "float32" else ())):
        want = jax.jit(function)(values)
        transform = {"w": _composed(*casts, function)}
        got = _moved(source, {"w": np.zeros(want.shape, dtype)}, None, transform, {"w": values})
        np.testing.assert_array_equal(got["w"], want)


def test_movers_of_several_arrays():
    a, b = row(3, 2), row(2, 4, start=50)
    join = lambda a, b: (jnp.concatenate([a.T.reshape(-1), b[0]]), b[1:, ::-1])
    targets, both = {"flat": ramp(10), "left": ramp(1, 4)}, {("a", "b"): ("flat", "left")}
    got = _moved({"a": a, "b": b}, targets, both, {("a", "b"): join}, {"a": a / 3, "b": b / 3})
    np.testing.assert_array_equal(got["flat"], np.concatenate([(a / 3).T.reshape(-1), b[0] / 3]))
    np.testing.assert_array_equal(got["left"], b[1:, ::-1] / 3)


_MOMENTUM = optim.trainable(optax.sgd(0.1, momentum=0.9))
_AFFINE, _GROWS, _NEITHER = "moments can follow", "", "averages can follow sums"
FOLLOWED = {
    "scaling": (_AFFINE, lambda x: 2 * x),
    "padding with its edge": (_AFFINE, lambda x: jnp.pad(x, 1, mode="edge")),
    "mean": (_AFFINE, lambda x: (x + x[::-1]) / 2),
    "whole sum": (_AFFINE, lambda x: jnp.zeros(3).at[jnp.array([0, 0, 1])].add(x)),
    "twice": (_AFFINE, lambda x: jnp.concatenate([x, x[:1]])),
    "negative": (_AFFINE, jnp.negative),
    "a change among moves": (_AFFINE, lambda x: (-x[::-1])[np.array([1, 2, 0])].reshape(3, 1).T.ravel()),
    "moves that cancel": (_AFFINE, lambda x: x + x[::-1] - x),
    # A vocabulary with new tokens: averages have the constants, and moments begin as those of the fresh state.
    "concatenated": (_GROWS, lambda x: jnp.concatenate([x, jnp.full((2,), 7, x.dtype)])),
    "padded": (_GROWS, lambda x: jnp.pad(x, (0, 2), constant_values=1)),
    "added": (_GROWS, lambda x: jnp.pad(x, (0, 2)) + 1),
    "put into zeros": (_GROWS, lambda x: jnp.zeros(5, x.dtype).at[:3].set(x)),
    "updated": (_GROWS, lambda x: jax.lax.dynamic_update_slice(jnp.zeros(5, x.dtype), x, (0,))),
    "masked": (_GROWS, lambda x: jnp.where(np.arange(5) < 3, jnp.pad(x, (0, 2)), 7)),
    # Casts in between cost no digits, and what a mask drops begins, too.
    "rounded": (_GROWS, lambda x: x.astype(jnp.bfloat16)[::-1].astype(x.dtype)),
    "a mask": (_GROWS, lambda x: x * np.float32([1, 0, 1])),
    "set": (_GROWS, lambda x: x.at[1].set(0)),
    "zeros": (_GROWS, jnp.zeros_like),
    "clipped": (_NEITHER, lambda x: jnp.clip(x, -1e6, 1e6)),
    "a choice by values": (_NEITHER, lambda x: jnp.where(x > 1, x, x[::-1])),
    "places that depend on values": (_NEITHER, lambda x: x[jnp.argsort(x)]),
    "scanned": (_NEITHER, lambda x: jax.lax.scan(lambda total, each: (total + each, total), 0.0, x)[1]),
    "square of one": (_NEITHER, lambda x: (x * x)[:1]),
    "unit size": (_NEITHER, lambda x: x / jnp.max(jnp.abs(x))),
    "branch by values": (_NEITHER, lambda x: jax.lax.cond(x[0] > 0, lambda: x, lambda: x[::-1])),
    "whole numbers": (_NEITHER, lambda x: x.astype(jnp.int32).astype(x.dtype)),
    "a callback": (_NEITHER, lambda x: jax.pure_callback(lambda x: np.asarray(x)[::-1], x, x)),
}


def _carried(plan, values, target):
    tx = _MOMENTUM
    state = jax.tree.map(lambda x: jnp.asarray(values["w"] / 3) if x.shape == values["w"].shape else x, tx.init(values))
    like = jax.tree.map(lambda x: x - 5 if jnp.issubdtype(x.dtype, jnp.floating) else x, tx.init(target))
    return plan.state(state, like).runs[0][0].trace["w"]


@pytest.mark.parametrize("name", FOLLOWED)
def test_averages_follow_what_is_affine_and_moments_what_moves(name):
    said, function = FOLLOWED[name]
    values = {"w": np.float32([-0.5, 3.25, 1.0])}
    want = function(jnp.asarray(values["w"]))
    target = {"w": jnp.zeros(want.shape)}
    plan, like = saving.plan(values, target, transform={"w": function}), tp.Ema(target, 0.9)
    np.testing.assert_array_equal(plan(values)["w"], want)
    for average in (lambda: plan.average(values)["w"], lambda: plan.average(_shadows(values), like).shadow["w"]):
        if said is _NEITHER:
            refused(rf"{said}, .* from \['w'\] to \['w'\], is not affine", average)
        else:
            np.testing.assert_allclose(average(), want, rtol=1e-6)
    if said:
        refused(r"moments can follow .* from \['w'\] to \['w'\], changes or rep", _carried, plan, values, target)
        return
    moment = values["w"] / 3
    some = [moment[0], -5, moment[2]]
    begin = {"rounded": moment[::-1], "a mask": some, "set": some, "zeros": [-5] * 3}
    np.testing.assert_array_equal(_carried(plan, values, target), begin.get(name, [*moment, -5, -5]))


def test_more_elements_than_memory_holds():
    sizes = ((2**16, 2**15 + 1), (2, 2**30 + 1), (2**30 + 1, 2))
    many, wide, narrow = ({"w": jax.ShapeDtypeStruct(shape, np.float32)} for shape in sizes)
    turned = jax.jit(lambda x: jnp.stack(jnp.split(x, 2), -1)[0])
    for source, target, function, words in (
        (many, many, lambda x: jnp.roll(x, 1), r"\['w'\] to .* is of 2,147,549,184 elements, and .*each array.*fresh"),
        (wide, narrow, turned, "the state has no values at"),
    ):
        plan = saving.plan(source, target, transform={"w": function})
        state, like = (jax.eval_shape(_MOMENTUM.init, each) for each in (source, target))
        refused(words, plan.state, dataclasses.replace(state, counts=(np.array(0, np.int32),)), like)


@pytest.mark.parametrize("shape", [(), (0, 3), (300, 256)])
def test_sizes_of_one_to_three_digits(shape):
    values = np.random.default_rng(0).normal(size=shape).astype("f")
    source, flat = ({"w": jnp.zeros(each, jnp.bfloat16)} for each in (shape, (values.size,)))
    got = _moved(source, flat, None, {"w": lambda x: x.T.ravel()[::-1]}, {"w": values})
    np.testing.assert_array_equal(got["w"], values.T.ravel()[::-1])
    # The second is right on all digits, each of which is that of the row or that of the column.
    changes = [lambda x: x.at[-1].set(jnp.abs(x[-1])), lambda x: x[:1] + x[:, :1] - x[:1, :1]]
    for change in changes if values.size > 1 else ():
        plan = saving.plan(source, source, transform={"w": change})
        refused("changes or repeats them", _carried, plan, source, source)


def test_arrays_that_are_no_parameters_beside_those_that_are():
    """The function computes them as it does for the model, and no place may depend on them."""
    old = {"w": row(3, 2), "n": row(3, dtype=np.int32), "on": np.array([True, False]), "key": jax.random.key(3)}
    new = {"w": ramp(2, 3), "n": jnp.arange(3), "on": jnp.array([False, True]), "key": jax.random.key(0)}
    names = tuple(old)
    plan_of = lambda function: saving.plan(old, new, rename={names: names}, transform={names: function})
    average = {**old, "w": old["w"] / 7}
    plan = plan_of(lambda w, n, on, key: (w.T, n[::-1], ~on, jax.random.fold_in(key, 1)))
    made = plan.average(tp.Ema(average, 0.5), tp.Ema(new, 0.5))
    assert_same(made.shadow["w"], jnp.asarray(average["w"].T))
    rest = made.average
    assert (rest["n"].tolist(), rest["on"].tolist()) == ([2, 1, 0], [False, True])
    assert rest["key"] == jax.random.fold_in(old["key"], 1)
    for place in (lambda w, n, on, key: w[n].T, lambda w, n, on, key: jnp.where(on, w, w[::-1]).T):
        plan = plan_of(lambda w, n, on, key, place=place: (place(w, n, on, key), n, on, key))
        refused("is not affine", plan.average, average)


def test_sums_complex_numbers_and_integers(path):
    pair, both = {"a": row(3), "b": row(3)}, {("a", "b"): "c"}
    plan = saving.plan(pair, {"c": ramp(3)}, rename=both, transform={("a", "b"): jnp.add})
    np.testing.assert_array_equal(plan.average(_shadows(pair), tp.Ema({"c": ramp(3)}, 0.9)).shadow["c"], 2 * row(3))
    values = {"z": np.complex64([1 + 2j, 3])}
    plan = saving.plan(values, values, transform={"z": lambda z: jax.lax.complex(z.imag, z.real)})
    refused("is not affine", plan.average, values)
    for function in (jnp.conj, lambda z: z * 1j, lambda z: z + 0, jnp.positive):
        got = saving.plan(values, values, transform={"z": function}).average(values)
        np.testing.assert_array_equal(got["z"], function(values["z"]))
    ints = {"n": row(3, dtype=np.int32), "w": row(2)}  # integers are no parameters, and no average is taken of them
    saving.save(path, {"average": ints})
    plan = saving.plan(ints, ints, transform={"n": lambda n: 2 * n, "w": lambda w: w[::-1]})
    for average in (ints, tp.ema(ints, ints, decay=0.5), saving.names(path, "average")):
        assert_same(plan.average(average), {"n": row(3, dtype=np.int32) * 2, "w": row(2)[::-1]})


LOW, GAIN, PAIR = ramp(4, dtype=jnp.bfloat16), ramp(3), [ramp(2), ramp(2) + 1, ramp(3)]
OLD = {"low": LOW, "pair": PAIR, "scale": GAIN, "steps": jnp.array(7), "keys": [jax.random.key(1), jax.random.key(2)]}
NEW = {"one": LOW[:2], "three": ramp(2, 2), "two": LOW[2:], "steps": jnp.array(0), "gain": GAIN}
NEW |= {"keys": jax.random.split(jax.random.key(0)), "new": ramp(1), "frozen": ramp(3)}
RENAME = {"low": ("one", "two"), "pair.2": "frozen", "pair.*": "three", "scale": "gain", "keys.*": "keys"}


def test_an_average_goes_along(path):
    ema = tp.Ema(OLD, 0.5, debias=True, trainable=tp.layout(OLD, freeze="scale"))
    fresh = lambda decay: tp.Ema(NEW, decay, debias=True, trainable=tp.layout(NEW, freeze="frozen"))
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    for factor in (2, 3):
        ema = ema.update(jax.tree.map(lambda x, by=factor: x if is_key(x) else (x * by).astype(x.dtype), OLD))
    saving.save(path, {"model": OLD, "average": ema})
    plan = saving.plan(OLD, NEW, rename=RENAME, transform={"low": lambda low: (low[:2], low[2:])}, strict=False)
    assert (plan.missing, plan.unused, plan.disagrees) == (("new",), (), ())
    like = fresh(0.9)
    made = plan.average(ema, like)
    assert jax.tree.structure(made) == jax.tree.structure(like)
    assert not tp.diff(made, plan.average(saving.names(path, "average"), like))
    assert (int(made.count), float(made.weight), made.decay) == (2, 0.75, 0.9)
    shadow, before, average, rest = made.shadow, ema.shadow, ema.average, made.average
    np.testing.assert_array_equal(np.concatenate([shadow["one"], shadow["two"]]), before["low"])  # float32, as it was
    np.testing.assert_array_equal(shadow["three"], np.stack(before["pair"][:2]))
    others = [shadow["gain"], shadow["new"], rest["frozen"]]
    assert_same(others, [average["scale"], NEW["new"], before["pair"][2]], identity=False)
    assert_same(jax.random.key_data(rest["keys"]), jnp.stack([jax.random.key_data(key) for key in average["keys"]]))
    assert int(rest["steps"]) == 21
    # Updated and moved is the same as moved and updated.
    after, later = plan.average(ema.update(OLD), fresh(0.5)), plan.average(ema, fresh(0.5)).update(plan(OLD))
    for name in ("one", "two", "three"):
        np.testing.assert_array_equal(after.shadow[name], later.shadow[name])
    assert_same((after.count, after.weight), (later.count, later.weight))


def test_ties_and_bare_arrays():
    shared = ramp(2, 2)
    tied, apart = {"embed": shared, "head": shared}, {"a": ramp(2, 2), "b": ramp(2, 2)}
    ema = tp.Ema(tied, 0.5).update({"embed": shared + 1, "head": shared + 1})
    plan = saving.plan(tp.layout(tied), apart, rename={"embed": "a", "head": "b"})
    shadow = plan.average(ema, tp.Ema(apart, 0.5)).shadow
    assert_same(shadow, dict.fromkeys("ab", ema.shadow["embed"]), identity=False)
    assert len(set(map(id, jax.tree.leaves(shadow)))) == 2  # so it can be donated
    bare = saving.plan(ramp(2), {"w": ramp(2)}, rename={"": "w"})
    assert_same(bare.average(tp.Ema(ramp(2) + 3, 0.5), tp.Ema({"w": ramp(2)}, 0.5)).shadow, {"w": ramp(2) + 3})
    frozen = tp.Ema(tied, 0.5, trainable=tp.layout(tied, freeze="**"))
    assert_same(plan.average(frozen, tp.Ema(apart, 0.5)).shadow, {"a": shared, "b": shared}, identity=False)


def test_an_average_of_a_larger_model_is_refused_as_its_state_is(path):
    small = {"layers": [ramp(2) for _ in range(12)]}
    large = {"layers": [ramp(2) + i for i in range(16)]}
    tx, ema = _MOMENTUM, tp.Ema(large, 0.5)
    saving.save(path, {"average": ema, "state": tx.init(large)})
    cases = [(saving.Plan.__call__, large), (saving.Plan.average, large)]
    cases += [(saving.Plan.state, each, tx.init(small)) for each in (tx.init(large), saving.names(path, "state"))]
    cases += [(saving.Plan.average, each, tp.Ema(small, 0.5)) for each in (ema, saving.names(path, "average"))]
    for call, source, *like in cases:
        refused(r"does not know 'layers\.12', .*, which would be lost", call, saving.plan(small, small), source, *like)
        assert call(saving.plan(small, small, strict=False), source, *like) is not None


@pytest.mark.usefixtures("without_type_checks")
def test_errors_of_averages():
    model, ema = {"w": ramp(2)}, tp.Ema({"w": ramp(2)}, 0.5)
    for source, like, kind, words in [
        (ema, model, TypeError, r"expected a fresh average of the new model, like=tp.Ema\(.*\), got dict"),
        (model, ema, ValueError, r"expected a tp\.Ema, or the names of one, .*; got names such as w"),
        (tp.Ema({"v": ramp(2)}, 0.5), ema, ValueError, r"expected .* at 'w', .*, got nothing; nearest: 'v'"),
        (tp.Ema({"w": ramp(3)}, 0.5), ema, ValueError, r"expected float32\[2\] at 'w', .* got float32\[3\]"),
        (ema, None, TypeError, r"the source is a tp.Ema, so pass a fresh one .*: like=tp.Ema\("),
        (ema, tp.Ema(model | {"n": ramp(2)}, 0.5), ValueError, r"has float32\[2\] at 'n', but .*like=tp\.Ema"),
    ]:
        refused(words, saving.plan(model, model).average, source, like, kind=kind)
