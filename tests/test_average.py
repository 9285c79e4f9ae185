"""Copies and averages."""

import itertools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import ZOO, Norm, as_data, assert_same, bits, enable_x64, pattern, ramp, with_refs

ids = lambda tree: {id(leaf) for leaf in jax.tree.leaves(tree) if hasattr(leaf, "dtype")}


@pytest.mark.parametrize("name", ZOO)
def test_a_copy_is_equal_and_shares_nothing(name):
    model = ZOO[name].make()
    got = tp.copy(model)
    assert_same(got, model)
    assert not ids(got) & ids(model)
    for ours, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(model), strict=True):
        if isinstance(ours, jax.Array) and ours.size:
            assert as_data(ours).unsafe_buffer_pointer() != as_data(theirs).unsafe_buffer_pointer()


@pytest.mark.filterwarnings("ignore:an average in bfloat16")
def test_one_step_in_at_least_float32():
    dtypes = [np.float32, jnp.bfloat16, np.float16, np.complex64]
    old, new = ([ramp(4, dtype=dtype, start=start) for dtype in dtypes] for start in (0.5, 3.0))
    wide = lambda x: np.asarray(x).astype(x.dtype if x.dtype.itemsize > 2 else np.float32)
    ways = (tp.ema, jax.jit(lambda a, m, decay: tp.ema(a, m, decay=decay)))
    for decay, ema in itertools.product((0.0, 0.9, 1.0, jnp.float32(0.9), np.float64(0.9)), ways):
        for got, before, after, dtype in zip(ema(old, new, decay=decay), old, new, dtypes, strict=True):
            want = (wide(before) + np.float32(1 - decay) * (wide(after) - wide(before))).astype(dtype)
            assert got.dtype == dtype
            np.testing.assert_allclose(wide(got), wide(want), 1e-6)


def test_an_average_in_half_precision_warns_once_and_names_the_way_out():
    for dtype in ("bfloat16", "float16"):
        model = {"wide": ramp(1), "narrow": ramp(2, dtype=jnp.dtype(dtype))}
        for exact in (0, 0.5, 1.0):
            tp.ema(model, model, decay=exact)
        with pytest.warns(UserWarning, match=rf"in {dtype}, as at 'narrow', stops moving.*tp.Ema") as caught:
            tp.ema(model, model, decay=0.99)
        assert [warning.filename for warning in caught] == [__file__]
        tp.ema(model, model, decay=0.99)
        tp.Ema(model, 0.99).update(model)
        with pytest.warns(UserWarning, match=rf"in {dtype} stops moving"):
            tp.ema(model["narrow"], model["narrow"], decay=0.99)


@pytest.mark.filterwarnings("ignore:an average in")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "complex64"])
def test_near_the_largest_float_and_with_all_the_weight(dtype):
    huge = jnp.finfo("float32" if dtype == "complex64" else jnp.dtype(dtype)).max
    of = lambda *numbers: np.array(numbers, jnp.dtype(dtype))
    old, new = of(0.9 * huge, -0.9 * huge, -0.0, 0.0, 3.0), of(-0.9 * huge, 0.9 * huge, 1.0, -1.0, 5.0)
    odd = of(np.inf, -np.inf, np.nan, 1.0, 2.0)
    # XLA takes denormal numbers for zeros in a product, which `tau` is one of if it is traced.
    few, many = of(1e-3, -0.0, 0.0, np.nan, np.inf, 2.0, 1e-40), of(6e4, 1.0, -1.0, np.inf, np.nan, -np.inf, 0.0)

    def ways(zero, one, last):
        near = tp.ema(old, new, decay=0.75), tp.ema(old, new, tau=0.25)
        keeps = [tp.ema(old, new, decay=1.0), tp.ema(old, new, tau=0.0), tp.ema(old, odd, decay=1.0)]
        takes = tp.ema(many, few, decay=zero), tp.Ema(many, decay=0.0).update(few).average
        by_tau = tp.ema(many[:last], few[:last], tau=one), tp.Ema(many[:last], tau=1.0).update(few[:last]).average
        return near, keeps, takes, by_tau

    wide = lambda x: np.asarray(x).astype(np.complex128 if dtype == "complex64" else np.float64)
    want = 0.75 * wide(old) + 0.25 * wide(new)
    for near, keeps, takes, by_tau in (ways(0, 1, 6), jax.jit(lambda zero, one: ways(zero, one, 6))(0.0, 1.0)):
        for got in near:
            np.testing.assert_allclose(wide(got), want, 2e-2 if old.itemsize < 4 else 1e-6)
        assert {bits(got) for got in keeps} == {bits(old)}
        assert {bits(got) for got in takes} == {bits(few)}
        assert {bits(got) for got in by_tau} == {bits(few[:6])}
    assert bits(tp.ema(many, few, tau=1)) == bits(few)


of_ema = lambda average, model, its="copy": tp.Ema(average, 0.5, buffers=its).update(model).average
one_step = lambda average, model, its="copy": tp.ema(average, model, decay=0.5, buffers=its)
of_both = pytest.mark.parametrize("of", [one_step, of_ema], ids=["ema", "Ema"])


@of_both
def test_equal_numbers_stay_and_bools_are_flags(of):
    numbers = {"p": 0.5, "n": 5, "c": 2j, "s": np.float32(0.25), "nan": float("nan")}
    average, model = {"w": ramp(2), "on": False, **numbers}, {"w": 3 * ramp(2), "on": True, **numbers, "n": 5.0}
    for policy in ("copy", "average", "keep"):
        got = of(average, model, policy)
        assert all(got[name] is average[name] for name in (*numbers, "on"))
    assert of(average, {"w": ramp(2)})["p"] == 0.5  # the model has none


@of_both
@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (1.0, 3.0, r"1\.0; 3\.0"),
        (np.float32(1), np.float32(3), r"1\.0\)?; .*3\.0"),
        (jnp.array(3), 4, r"int32\[\]; 4"),  # not trained
        (jnp.array(1.0), 3.0, r"float32\[\]; 3\.0"),  # trained
        (0.5, "fast", r"0\.5; str"),
    ],
)
def test_a_number_beside_an_array_or_another_number_is_an_error_that_names_the_path(of, old, new, words):
    average, model = {"w": ramp(1), "ics": old}, {"w": ramp(1), "ics": new}
    for each in (of, tp.jit(of)):
        with pytest.raises(ValueError, match=rf"(?s)'ics' \(.*{words}\).*jnp\.asarray\(number\)"):
            each(average, model)
    if not isinstance(old, jax.Array):
        assert of(average, model, {"ics": "keep"})["ics"] == old


def test_a_traced_float_is_averaged_for_what_it_is_whatever_was_met_before():
    of = lambda a, m: tp.ema(a, m, decay=0.9)
    old, new = ({"w": jnp.full(2, value), "a": jnp.asarray(value)} for value in (1.0, 3.0))
    got = [jax.jit(of)(old, new)]
    look_alike = {"w": jnp.ones(2), "a": 1.0}
    with pytest.warns(UserWarning, match="'a': a Python number is not a parameter"):
        known = tp.layout(look_alike)
    got += [jax.jit(lambda a, m: of(a, m))(old, new), jax.jit(of)(look_alike, look_alike | {"a": 3.0}), of(old, new)]
    for each in got:
        assert float(each["a"]) == pytest.approx(1.2)
    # With a layout that was made outside it is what that says: no parameter, and copied.
    within = jax.jit(lambda a, m: tp.ema(a, m, decay=0.9, trainable=known))
    assert float(within(look_alike, look_alike)["a"]) == 1.0
    assert float(within(look_alike, look_alike | {"a": 3.0})["a"]) == 3.0
    # Nobody can say whether a traced scalar is the number that an average outside has.
    with pytest.raises(ValueError, match=r"'a' \(1\.0; float32\[\]\)"):
        jax.jit(lambda ema, m: ema.update(m).average)(tp.Ema(look_alike, 0.9), look_alike)


def test_ties_and_declarations_are_those_of_the_average():
    shared = ramp(2)
    average = {"a": shared, "b": shared, "norm": Norm(ramp(1), ramp(1))}
    model = {"a": 3 * shared, "b": 5 * shared, "norm": {"scale": ramp(1, start=2), "mean": ramp(1, start=7)}}
    got = tp.ema(average, model, decay=0.5)
    assert got["a"] is got["b"]
    np.testing.assert_allclose(got["a"], 2 * shared, 1e-6)  # the value at the slot's own path
    np.testing.assert_array_equal(got["norm"].mean, model["norm"]["mean"])


def buffers_model(scale):
    return {
        "w": ramp(1) * scale,
        "norm": Norm(ramp(1), ramp(2) * scale),
        "n": np.arange(2) * scale,
        "flag": np.array([scale > 1]),
        "key": jax.random.key(scale),
        "f": jnp.tanh,
        "p": 0.5,
    }


def test_each_array_that_is_not_trained_has_a_policy_of_its_own():
    average, model = buffers_model(1), buffers_model(3)
    rules = {Norm: "average", "key": "copy", "**": "keep"}
    of = lambda average, model: one_step(average, model, rules)
    for got in (of(average, model), tp.jit(of)(average, model)):
        np.testing.assert_allclose(got["norm"].mean, 2 * average["norm"].mean, 1e-6)
        np.testing.assert_array_equal(as_data(got["key"]), as_data(jax.random.key(3)))
        assert (got["f"], got["p"], got["flag"].tolist(), got["n"].tolist()) == (jnp.tanh, 0.5, [False], [0, 1])
        assert not ids(got) & ids(model)


def test_buffers_keep_the_dtypes_of_the_average():
    average = {"w": ramp(2), "c": ramp(2), "n": jnp.array(3)}
    narrow = {"w": ramp(2, dtype=jnp.bfloat16), "c": ramp(2, dtype=jnp.bfloat16), "n": np.array(4, np.int8)}
    got = tp.ema(average, narrow, decay=0.5, trainable="w")
    assert (got["c"].dtype, got["n"].dtype, int(got["n"])) == (jnp.float32, jnp.int32, 4)


def step(change=(), **options):
    return lambda: tp.ema(buffers_model(1), buffers_model(3) | dict(change), **options or {"decay": 0.5})


EITHER = r"pass either decay, .*, or tau = 1 - decay, .*; got {}$"


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (step(buffers="copy"), TypeError, EITHER.format("neither")),
        (lambda: tp.Ema(ramp(2), 0.9, tau=0.1), TypeError, EITHER.format("both")),
        (step(tau=1.5), ValueError, r"^tau must be a scalar between 0 and 1, got 1\.5$"),
        (lambda: tp.Ema(ramp(2), -1.0), ValueError, "decay must be a scalar between 0 and 1, got -1"),
        (step(decay=np.ones(2)), ValueError, r"decay must be a scalar between 0 and 1, got \[1. 1.\]"),
        (step({"w": np.ones(5, "f")}), ValueError, r"expected float32\[1\] at 'w', got float32\[5\]"),
        (step({"w": 1j * np.ones(1, np.complex64)}), TypeError, r"a real float32 at 'w', got complex64\[1\]"),
        (step({"n": None}), ValueError, r"average at 'n' \(.*\[2\]; None.* write buffers=\"keep\""),
        (step(decay=0.5, buffers={"w": "keep"}), ValueError, "'w' selects no frozen or integer array, only 'w'"),
        (lambda: jax.jit(lambda d: tp.Ema(ramp(2), d).count)(0.5), TypeError, "decay and tau of an Ema are static; p"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_average_is_that_of_its_definition():
    first, *models = [{"w": ramp(3, start=float(i**2 % 7)), "n": np.array(i)} for i in range(5)]
    tau = lambda count: 1 / (2.0 + jnp.asarray(count, jnp.float32))
    rates = ({"decay": 0.9}, {"decay": lambda count: 1 - tau(count)}, {"tau": tau})
    cases = [*itertools.product(rates, (False, True), (False, True))]
    emas = [tp.Ema(first, debias=debias, warmup=warmup, **rate) for rate, debias, warmup in cases]
    update = jax.jit(lambda emas, model: [ema.update(model) for ema in emas])
    updated = [*itertools.accumulate(models, update, initial=emas)][1:]
    for (rate, debias, warmup), *of_case in zip(cases, *updated, strict=True):
        shadow, weight = np.zeros(3) if debias else np.asarray(first["w"], np.float64), 0.0
        for count, (ema, model) in enumerate(zip(of_case, models, strict=True)):
            d = rate["decay"] if rate == rates[0] else 1 - float(tau(count))
            d = min(d, (1 + count) / (10 + count)) if warmup else d
            shadow = d * shadow + (1 - d) * np.asarray(model["w"], np.float64)
            weight = d * weight + (1 - d)
            np.testing.assert_allclose(ema.average["w"], shadow / weight if debias else shadow, 1e-5)
            np.testing.assert_allclose(ema.weight, weight, 1e-5)
            assert (int(ema.count), int(ema.average["n"])) == (count + 1, int(model["n"]))


@pytest.mark.parametrize(("debias", "updated"), [(False, 0.9 + 0.1 / 3), (True, 1 / 3)])
def test_an_ema_starts_as_the_model_is_not_trained_and_as_wide_as_float64(debias, updated):
    model = ZOO["same array twice"].make()
    ema = tp.Ema(model, 0.9, debias=debias)
    assert_same(ema.average, model)
    assert not ids(ema.average) & ids(model)
    assert tp.layout(ema).paths == ()
    with enable_x64(True):
        wide = tp.Ema(np.ones(2), 0.9, debias=debias).update(np.full(2, 1 / 3))
        np.testing.assert_allclose(wide.average, updated, 1e-15)


@pytest.mark.parametrize("name", ["transposed tie", "bf16 with f32"])
def test_one_structure_in_scan_and_jit(name):
    model = ZOO[name].make()
    ema = tp.Ema(model, 0.9, trainable=ZOO[name].layout(model))
    eager = ema.update(model).update(model)
    scanned, _ = jax.lax.scan(lambda ema, _: (ema.update(model), None), ema, None, length=2)
    jitted = jax.jit(lambda ema: ema.update(model), donate_argnums=0)(ema.update(model))
    for other in (scanned, jitted):
        assert jax.tree.structure(other) == jax.tree.structure(ema)
        assert pattern(jax.tree.leaves(other.average)) == pattern(jax.tree.leaves(eager.average))
        for a, b in zip(*map(jax.tree.leaves, (other.shadow, eager.shadow)), strict=True):
            np.testing.assert_allclose(a, b, 1e-5)
    kinds = ["complex64" if "complex" in str(slot.dtype) else "float32" for slot in ema.rest.layout.slots]
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(ema.shadow)] == kinds


def test_an_average_writes_its_own_refs():
    zeros = lambda: with_refs() | {"mean": jax.new_ref(jnp.zeros(3)), "steps": jax.new_ref(jnp.array(0))}
    for buffers, mean, steps in (("copy", 7, 4), ("keep", 0, 0), ("average", 3.5, 4)):
        target, online = zeros(), with_refs()
        got = tp.ema(target, online, tau=0.5, buffers=buffers)
        assert (got["mean"], got["steps"]) == (target["mean"], target["steps"])
        assert (got["mean"][...].tolist(), int(got["steps"][...])) == ([mean] * 3, steps)
        np.testing.assert_array_equal(online["mean"][...], [7, 7, 7])
    array = {"mean": jnp.ones(3)}  # on one side, and a ref on the other
    assert tp.ema(zeros(), with_refs() | array, tau=1)["mean"][...].tolist() == [1, 1, 1]
    assert tp.ema(zeros() | array, with_refs(), tau=1)["mean"].tolist() == [7, 7, 7]


def test_an_average_shares_no_ref_with_the_model():
    model = with_refs()
    shared, ema = tp.ema(dict(model), model, tau=0.5), tp.Ema(model, tau=0.5)
    for each in (shared, ema.update(model).average, tp.copy(model)):
        assert {each[name] is model[name] for name in ("mean", "steps")} == {False}
    model["mean"][...] = jnp.zeros(3)
    for average, mean in ((shared, 7), (ema.average, 7), (ema.update(model).average, 0)):
        np.testing.assert_array_equal(average["mean"][...], [mean] * 3)
    # One of another shape is refused before anything is written.
    target, other = with_refs(), {"steps": jax.new_ref(jnp.zeros(2, int)), "mean": jax.new_ref(jnp.ones(3))}
    with pytest.raises(ValueError, match=r"'steps' \(int32\[\]; .*\[2\]\)"):
        tp.ema(target, with_refs() | other, tau=0.5)
    np.testing.assert_array_equal(target["mean"][...], [7, 7, 7])


def of_shared_arrays():
    """Places of each kind that share an array, and others; a layer with its state, whose arrays are in both."""
    weights, means, counts = [ramp(2), ramp(2, start=2)], [ramp(2), ramp(2, start=7)], [jnp.array(0), jnp.arange(3)]
    norms = [Norm(weights[w], means[m]) for w, m in ((0, 0), (0, 1), (1, 0), (1, 1))]
    flags, keys = np.array([True, False]), [jax.random.key(0), jax.random.PRNGKey(0)]
    index = eqx.nn.StateIndex((means[0], counts[0]))
    others = [[counts[0], counts[1], flags, keys[0], keys[1], 0.5, True] for _ in range(2)]
    return {"norms": norms, "others": others, "index": index, "state": eqx.nn.State(index)}


def at_each_path(i, leaf, start):
    """An array or value of its own at each path, or the same number."""
    if not hasattr(leaf, "dtype"):
        return leaf
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key(start + i)
    return ~leaf if leaf.dtype == bool else leaf + np.asarray(start + i).astype(leaf.dtype)


@pytest.mark.parametrize("buffers", ["copy", "average", "keep"])
def test_what_is_no_parameter_goes_by_its_path_outside_in_jit_and_by_hand(buffers):
    average = of_shared_arrays()
    layout, (leaves, treedef) = tp.layout(average), jax.tree.flatten(average)
    ids, are_trained = list(map(id, leaves)), jax.tree.leaves(layout.mask)

    def by_hand(olds, news):
        for i, (old, new, is_trained) in enumerate(zip(olds, news, are_trained, strict=True)):
            if is_trained or (buffers == "average" and jnp.issubdtype(getattr(old, "dtype", bool), jnp.floating)):
                new = news[ids.index(ids[i])] if is_trained else new  # that of the first place of a tie
                yield np.asarray(0.75 * np.asarray(old) + 0.25 * np.asarray(new, np.float64), np.float32)
            else:
                yield new if buffers != "keep" and hasattr(old, "dtype") else old

    models = [[at_each_path(i, leaf, start) for i, leaf in enumerate(leaves)] for start in (3, 50)]
    wants = [*itertools.accumulate(models, lambda olds, news: list(by_hand(olds, news)), initial=leaves)]
    of = lambda average, model: tp.ema(average, model, decay=0.75, buffers=buffers, trainable=layout)
    update = lambda ema, model: ema.update(model)
    make = lambda average: tp.Ema(average, 0.75, buffers=buffers)
    ways = {
        "outside": (of, tp.copy),
        "tp.jit": (tp.jit(of), tp.copy),
        "jax.jit": (jax.jit(of), tp.copy),
        "Ema": (update, make),
        "Ema, tp.jit": (tp.jit(update), make),
    }
    as_floats = lambda leaf: np.asarray(as_data(leaf)).astype(np.float64)
    for name, (step, start) in ways.items():
        found = itertools.accumulate(map(treedef.unflatten, models), step, initial=start(average))
        for got, want in zip(found, wants, strict=True):
            got = jax.tree.leaves(got.average if isinstance(got, tp.Ema) else got)
            for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
                np.testing.assert_allclose(as_floats(ours), as_floats(theirs), 1e-6, 1e-6, err_msg=f"{name}, leaf {i}")
