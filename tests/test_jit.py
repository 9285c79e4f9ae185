"""`tp.jit`: models as they are through a compiled function."""

import types
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .zoo import filled, ramp


class Net(eqx.Module):
    w: jax.Array
    f: Any = None
    n: Any = eqx.field(static=True, default=0)


def tied(**others: Any) -> dict[str, Any]:
    shared = ramp(2)
    return {"a": shared, "b": shared, **others}


def test_ties_are_known_inside_and_hold_after_donation_too():
    model, seen = tied(), []

    @tp.jit(donate="all")
    def step(first, second):
        seen.append((tp.layout(first).ties, first["a"] is second))
        return tp.maptrainable(lambda x: 2 * x, first)

    for _ in range(3):
        model = step(model, model["a"])
        assert model["a"] is model["b"]
    assert seen == [({"a": ("b",)}, True)]
    np.testing.assert_allclose(model["a"], 8 * ramp(2), 1e-6)


def test_one_trace_for_one_kind_of_model_and_exactly_that():
    traces, shared = [], ramp(2)
    f = tp.jit(lambda m: traces.append(1) or (m, len(tp.layout(m).slots)))
    nets = [Net(shared, jnp.tanh, n) for n in (2, 2.0, True, 2)]
    pairs = [(shared, shared), (shared, ramp(2, start=2)), (shared, shared)]
    # NumPy's arrays, JAX's and tracers are met in structures of their own, each with the shapes met first.
    shapes = [{"w": w} for w in (np.ones(2, "f"), jnp.ones(3), np.ones(3, "f"), jnp.ones(2))]
    for models, count in ((nets, 3), ([Net(shared, jnp.sin, 2)], 1), (pairs, 2), (shapes, 2)):
        traces.clear()
        results = [f(model) for model in models]
        assert len(traces) == count
        for (got, slots), model in zip(results, models, strict=True):
            assert slots == len(tp.layout(model).slots)
            assert type(getattr(got, "n", None)) is type(getattr(model, "n", None))
    jax.grad(lambda w: f({"w": w})[0]["w"].sum())(jnp.ones(4))
    f({"w": jnp.ones(4)})
    assert len(traces) == 3


def test_the_state_of_an_optimiser_of_a_model_with_bare_objects_shares_a_trace():
    model = {"w": ramp(2), "index": eqx.nn.StateIndex(ramp(1))}  # its marker is an `object()`
    tx, traces = optim.trainable(optax.sgd(0.1, momentum=0.9)), []
    step = tp.jit(lambda model, state: traces.append(1) or optim.step(tx, {"w": model["w"]}, state, model))
    both = model, tx.init(model)
    for _ in range(3):
        both = step(*both)
    assert len(traces) == 1


@pytest.mark.parametrize(
    ("donate", "deleted"),
    [
        ("all", [True, True, True]),
        ("warn", [True, True, True]),
        ("all-except-first", [False, True, False]),  # what also stands in the first argument is kept
        ("warn-except-first", [False, True, False]),
        ("none", [False, False, False]),
    ],
)
def test_what_is_donated(donate, deleted):
    x, y, shared = ramp(4), ramp(4), ramp(4)
    f = tp.jit(lambda a, b: (a["x"] + 1, b["y"] + 2, b["s"] + 3), donate=donate)
    f({"x": x, "s": shared}, {"y": y, "s": shared})
    assert [x.is_deleted(), y.is_deleted(), shared.is_deleted()] == deleted
    arrays = {"a": ramp(2), "count": jnp.arange(3), "key": jax.random.key(0)}
    tp.jit(lambda *models: models, donate=donate)((), {**arrays, "again": arrays["a"], "f": jnp.tanh})
    assert [array.is_deleted() for array in arrays.values()] == [donate != "none"] * 3


def test_only_warn_says_what_could_not_be_donated():
    with pytest.warns(UserWarning, match="donated buffers were not usable"):
        tp.jit(lambda m: [jnp.sum(m[0])], donate="warn")([ramp(3)])
    tp.jit(lambda m: [jnp.sum(m[0])], donate="all")([ramp(3)])


def test_the_arrays_of_a_module_that_is_compiled_are_no_constants():
    assert "constant dense<[" not in tp.jit(filled(eqx.nn.Linear, 2, 2)).lower(ramp(2)).as_text()


def test_errors_of_jax_name_the_argument_by_its_path():
    model = {"layers": [tied(), tied()]}
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"the argument call\['1\.0\.layers\.1\.a'\]"):
        tp.jit(lambda m: 1 if m["layers"][1]["a"][0] else 2)(model)
    with pytest.raises(jax.errors.TracerBoolConversionError, match=r"the argument first\['1\.0\.layers\.1\.a'\]"):
        tp.jit(lambda m, x: 1 if m["layers"][1]["a"][0] else 2, donate="all-except-first")(model, ramp(2))


def test_arrays_of_numpy_are_traced_and_its_scalars_are_static_as_python_numbers_are():
    traces = []
    step = tp.jit(lambda w, rate: (traces.append(1) or w - rate * w, np.zeros(2, np.float32), np.float32(3)))
    for rate in np.linspace(0.1, 0.01, 5, dtype=np.float32):
        got, constant, scalar = step(np.ones(2, np.float32), np.asarray(rate))
    assert len(traces) == 1
    assert all(isinstance(each, jax.Array) for each in (got, constant))
    assert type(scalar) is np.float32
    assert tp.jit(lambda names: names)(np.array(["a"]))[0] == "a"
    f = tp.jit(lambda m: traces.append(1) or m)
    for scale in (np.float64(2), np.float64(2), np.float32(2), 2.0):
        assert type(f(Net(ramp(2), scale)).f) is type(scale)
    assert len(traces) == 4


A, B = ramp(1), ramp(1, start=2)
FIRST_TIE = r"'1.0.0' is tied to 1.0.1 in the first, to nothing .*\n"


@pytest.mark.parametrize(
    ("known", "other", "message"),
    [
        ([A, A, B], [A, B, B], rf"{FIRST_TIE}'1.0.1' is tied to 1.0.0 in the first, to 1.0.2 "),
        ([A, B], {"x": {"y": A}, "z": B}, r"lowered for other .*\n'1.0' is a list in .*\n.*is only in the first"),
        ([A, "one"], [A, "two"], r"other values: .*'one'.* in the first, .*'two'.* in the second"),
        (Net(A, n=1), Net(A, n=2), r"has other static values"),
        ([A, "one"], [A, B], r"'1.0.1' is no array in the first, an array in the second"),
    ],
)
def test_a_compiled_program_refuses_what_it_was_not_lowered_for(known, other, message):
    compiled = tp.jit(lambda tree: jax.tree.leaves(tree)[0]).lower(known).compile()
    np.testing.assert_array_equal(compiled(known), A)
    with pytest.raises(ValueError, match=message):
        compiled(other)


def test_a_compiled_program_refuses_what_has_changed_since():
    class Late(Net): ...

    rates = types.SimpleNamespace(its=[1])
    double = tp.jit(lambda model, rates: tp.maptrainable(lambda x: 2 * x * rates.its[0], model))
    compiled = double.lower(Late(A), rates).compile()
    np.testing.assert_array_equal(compiled(Late(A), rates).w, 2 * A)
    rates.its.append(2)
    with pytest.raises(ValueError, match="a value that is no array has been changed in place"):
        compiled(Late(A), rates)
    rates.its.pop()
    tp.declare(Late, freeze="w")
    with pytest.raises(ValueError, match=r"tp\.declare has been called since"):
        compiled(Late(A), rates)
    np.testing.assert_array_equal(double(Late(A), rates).w, A)  # another program
