"""`tp.jit`: models as they are through a compiled function."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import ZOO, assert_same, ramp


@pytest.mark.parametrize("name", ZOO)
def test_models_survive_the_way_in_and_out(name):
    model = ZOO[name].make()
    as_jax = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, model)
    assert_same(tp.jit(lambda m: m)(model), as_jax)


def test_ties_are_known_inside_and_hold_after():
    shared = ramp(2)
    seen = []

    @tp.jit
    def step(first, second):
        seen.append((tp.layout(first).ties, first["a"] is second))
        return tp.maptrainable(lambda x: x + 1, first)

    got = step({"a": shared, "b": shared}, shared)
    assert seen == [({"a": ("b",)}, True)]
    assert got["a"] is got["b"]
    np.testing.assert_array_equal(got["a"], shared + 1)


def test_one_trace_for_one_kind_of_model_and_exactly_that():
    class Net(eqx.Module):
        w: jax.Array
        f: object
        n: object = eqx.field(static=True)

    traces = []
    f = tp.jit(lambda m: traces.append(1) or (m.w.sum(), str(m.n)))
    for n in (2, 2.0, True, 2):
        assert f(Net(jnp.ones(2), jnp.tanh, n))[1] == str(n)
    assert len(traces) == 3
    ints = tp.jit(lambda m: jnp.arange(2) * m["p"])
    assert ints({"p": 2}).dtype == jnp.int32
    with jax.numpy_dtype_promotion("standard"):
        assert ints({"p": 2.0}).dtype == jnp.float32
    f(Net(jnp.ones(2), jnp.sin, 2))
    assert len(traces) == 4
    shared = jnp.ones(2)
    tied, apart = (shared, shared), (shared, shared + 0)
    count = tp.jit(lambda m: traces.append(1) or len(tp.layout(m).slots))
    assert [count(tied), count(apart), count(tied)] == [1, 2, 1]
    assert len(traces) == 6


@pytest.mark.parametrize("donate", ["all", "all-except-first", "warn", "warn-except-first", "none"])
def test_what_is_donated(donate):
    shared, other = ramp(4), ramp(4)
    f = tp.jit(lambda a, b: (a["x"] + 1, b["y"] + 2, b["s"] + 3), donate=donate)
    first, second = {"x": shared + 0, "s": shared}, {"y": other, "s": shared}
    f(first, second)
    deleted = [first["x"].is_deleted(), second["y"].is_deleted(), shared.is_deleted()]
    assert deleted == {"all": [True, True, True], "warn": [True, True, True], "none": [False, False, False]}.get(
        donate, [False, True, False]  # what also stands in the first argument is kept
    )  # fmt: skip


def test_a_tied_model_can_be_donated():
    shared = ramp(4)
    step = tp.jit(lambda m: tp.maptrainable(lambda x: 2 * x, m), donate="all")
    model = {"a": shared, "b": shared}
    for _ in range(3):
        model = step(model)
        assert model["a"] is model["b"]
    np.testing.assert_allclose(model["a"], 8 * ramp(4), 1e-6)


def test_unusable_donations_warn_only_where_asked():
    for donate, warns in (("all", False), ("warn", True)):
        f = tp.jit(lambda m: jnp.sum(m), donate=donate)
        if warns:
            with pytest.warns(UserWarning, match="donated buffers were not usable"):
                f(ramp(3))
        else:
            f(ramp(3))  # warnings are errors here


def test_decorator_method_and_module(without_type_checks):
    class Scale(eqx.Module):
        w: jax.Array

        @tp.jit
        def __call__(self, x, *, by=1.0):
            return self.w * x * by

    scale = Scale(ramp(2))
    np.testing.assert_allclose(scale(2.0, by=2.0), 4 * ramp(2), 1e-6)
    traces = []

    @tp.jit(donate="none", inline=True)
    def named(model):
        """Says what it does."""
        traces.append(1)
        return model(1.0)

    assert (named.__name__, named.__doc__) == ("named", "Says what it does.")
    named(scale)
    mlp = eqx.nn.MLP(2, 1, 3, 1, key=jax.random.key(0))
    compiled = tp.jit(mlp)
    np.testing.assert_allclose(compiled(jnp.ones(2)), mlp(jnp.ones(2)), 1e-6)
    assert "constant dense<[" not in compiled.lower(jnp.ones(2)).as_text()
    with pytest.raises(ValueError, match=r"donate must be 'all', .* got 'some'"):
        tp.jit(named, donate="some")


def test_inside_of_other_transformations():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "f": jnp.tanh}
    f = tp.jit(lambda m, x: jnp.sum(m["f"](m["a"] * m["b"] * x)))
    np.testing.assert_allclose(tp.grad(f)(model, 1.0)["a"], jax.grad(lambda a: jnp.sum(jnp.tanh(a * a)))(shared), 1e-6)
    np.testing.assert_allclose(jax.vmap(lambda x: f(model, x))(jnp.ones(3)), jnp.full(3, f(model, 1.0)), 1e-6)
    assert jax.jit(lambda x: f(model, x))(1.0).shape == ()
    total, _ = jax.lax.scan(lambda c, x: (c + f(model, x), None), 0.0, jnp.ones(3))
    np.testing.assert_allclose(total, 3 * f(model, 1.0), 1e-6)


def test_numpy_goes_in_and_comes_out_as_arrays():
    traces = []
    step = tp.jit(lambda w, rate: (traces.append(1) or w - rate * w, np.zeros(2, np.float32)))
    for rate in np.linspace(0.1, 0.01, 5, dtype=np.float32):
        got, constant = step(np.ones(2, np.float32), np.asarray(rate))
    assert len(traces) == 1
    assert all(isinstance(each, jax.Array) for each in (got, constant))
    assert tp.jit(lambda names: names)(np.array(["a"]))[0] == "a"


def test_a_later_declaration_is_another_program():
    class Late(eqx.Module):
        w: jax.Array
        b: jax.Array

    double = tp.jit(lambda m: tp.maptrainable(lambda x: 2 * x, m))
    model = Late(jnp.ones(1), jnp.ones(1))
    assert float(double(model).b[0]) == 2.0
    tp.declare(Late, frozen="b")
    assert float(double(model).b[0]) == 1.0


def test_lowered_and_compiled_programs_can_be_called():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "f": jnp.tanh}
    lowered = tp.jit(lambda m, x: {"out": m["f"](m["a"]) * x, "same": m["a"]}).lower(model, 2.0)
    assert "tanh" in lowered.as_text()
    compiled = lowered.compile()
    assert compiled.cost_analysis()["flops"] >= 0
    np.testing.assert_allclose(compiled(model, 2.0)["out"], 2 * jnp.tanh(shared), 1e-6)


@pytest.mark.parametrize("option", ["static_argnums", "donate_argnames", "in_shardings"])
def test_options_about_single_arguments_are_refused(option):
    with pytest.raises(ValueError, match=f"cannot have '{option}'; see `donate`, or use jax.jit"):
        tp.jit(lambda x: x, **{option: 0})


def test_sizes_do_not_disturb_each_other():
    traces = []
    f = tp.jit(lambda m: traces.append(1) or tp.global_norm(m))
    small, large = {"w": jnp.ones(2), "b": jnp.ones(2)}, {"w": jnp.ones(3), "b": jnp.ones(3)}
    for model in (small, large, small):
        f(model)
        tp.layout(model)
        f(large)
    assert len(traces) == 2


class Scaled(eqx.Module):
    weight: jax.Array
    scale: Any


def test_numpy_scalars_are_static_as_python_numbers_are():
    model = Scaled(ramp(2), np.sqrt(4.0))
    loss = lambda m: jnp.sum((m.weight * jnp.float32(m.scale)) ** 2)

    @tp.jit
    def step(model):
        return tp.maptrainable(lambda x, g: x - 0.1 * g, model, tp.grad(loss)(model))

    for _ in range(5):
        model = step(model)
    assert type(model.scale) is np.float64
    assert model.scale == 2.0
    assert tp.layout(model).paths == ("weight",)
    traces = []
    f = tp.jit(lambda m: traces.append(1) or loss(m))
    for scale in (np.float64(2), np.float64(2), np.float32(2), 2.0):
        f(Scaled(ramp(2), scale))
    assert len(traces) == 3
    assert float(tp.jit(tp.global_norm)([jnp.full(1, 4.0), np.float32(3)])) == float(tp.global_norm([jnp.full(1, 4.0)]))
    made = tp.jit(lambda x: (x + 1, np.float32(3)))(jnp.ones(1))
    assert type(made[1]) is np.float32


def test_a_compiled_program_refuses_what_it_was_not_lowered_for():
    a, b = jnp.full(1, 1.0), jnp.full(1, 10.0)
    weigh = lambda m: m["a"] + 10 * m["b"] + 100 * m["c"]
    compiled = tp.jit(weigh).lower({"a": a, "b": a, "c": b}).compile()
    assert float(compiled({"a": a, "b": a, "c": b})[0]) == 1011
    with pytest.raises(
        ValueError, match=r"one array at several places: .*a is .*b.*in the first, .*b is .*c.*in the sec"
    ):
        compiled({"a": a, "b": b, "c": b})
    both = tp.jit(lambda m: jax.tree.leaves(m)[0]).lower([a, b]).compile()
    with pytest.raises(ValueError, match=r"lowered for other arguments .*\n.*is only in the first"):
        both({"x": {"y": a}, "z": b})
    named = tp.jit(lambda x, name: {name: x}).lower(a, "one").compile()
    assert set(named(a, "one")) == {"one"}
    with pytest.raises(ValueError, match=r"other values: .*'one'.* in the first, .*'two'.* in the second"):
        named(a, "two")
    layer = eqx.nn.Linear(2, 2, key=jax.random.key(0))
    lowered = tp.jit(lambda m: m.weight).lower(layer).compile()
    with pytest.raises(ValueError, match=r"has other static values"):
        lowered(eqx.tree_at(lambda m: m.weight, eqx.nn.Linear(2, 3, key=jax.random.key(0)), layer.weight))
