"""What goes into a rule: groups with the rates of each, the norm that is clipped, a factor for each parameter."""

import pickle
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, PartitionSpec

import treeparams as tp
from treeparams import optim

from ..zoo import STACKS, VECTOR, ZOO, Norm, assert_close, assert_same, filled, first_devices, ramp
from .shared import Tied, forms

sgd = optax.inject_hyperparams(optax.sgd)
two_forms = pytest.mark.parametrize("form", [optim.trainable, STACKS])
_model = lambda: {"a": jnp.ones(2), "b": {"w": jnp.ones((2, 2)), "v": jnp.ones(2)}, "n": jnp.array(3)}
groups = lambda rules, default=None, trainable=None, form=optim.trainable: form(optim.groups(rules, default), trainable)


def rates(tx, model, state=None, grads=None):
    """The rates of plain gradient descent, by path: the updates where the gradient is one, at the first element."""
    if grads is None:
        grads = jax.tree.map(lambda x: 1 + np.arange(x.size, dtype=x.dtype).reshape(x.shape), tp.partition(model)[0])
    updates, _ = tx.update(grads, tx.init(model) if state is None else state, model)
    return {path: -float(leaf.ravel()[0]) for path, leaf in tp.trainables(updates).items()}


@two_forms
def test_any_where_is_a_key_and_the_first_match_wins(form):
    model = {"b": _model()["b"], "c": [filled(eqx.nn.Linear, 2, 2)], "d": {"x": ramp(2), "y": ramp(2)}}
    keys = ("b.w", re.compile("b"), eqx.nn.Linear, lambda model: model["d"]["x"], ("d.y", "b.v"))
    tx = groups({key: optax.sgd(float(i)) for i, key in enumerate(keys, 1)}, form=form)
    want = {"b.v": 2, "b.w": 1, "c.0.weight": 3, "c.0.bias": 3, "d.x": 4, "d.y": 5}
    assert rates(tx, model) == want
    state = tx.init(model)
    assert_same(pickle.loads(pickle.dumps(state)), state)  # the keys do not pickle, their names do


def test_equals_optax_partition_wherever_it_stands():
    model, momentum = _model(), optax.sgd(0.1, momentum=0.9)
    clip = optax.chain(optim.clip_by_global_norm(1.0), optax.scale(-1.0))  # its norm is that of the group
    rules = optim.groups({"b": momentum}, default=clip)
    around = [rules, optax.chain(optax.identity(), rules), optax.inject_hyperparams(lambda: rules)()]
    labels = lambda params: {"a": "clip", "b": {"w": "momentum", "v": "momentum"}, "n": None}
    plain = optax.multi_transform({"momentum": momentum, "clip": clip}, labels)
    grads = tp.copy(model)
    after = lambda tx: tx.update(grads, tx.update(grads, tx.init(model), model)[1], model)[0]
    want, *others = map(after, (*map(optim.trainable, (plain, *around)), *map(STACKS, around)))
    for got in others:
        assert_same(got, want, identity=False)
    np.testing.assert_allclose(want["a"], -np.sqrt(0.5), rtol=1e-6)


@two_forms
def test_labels_are_those_of_the_parameters_and_positions_count_from_the_end(form):
    class Calls(eqx.Module):
        w: jax.Array
        v: jax.Array
        head: jax.Array = tp.field(tied_to="v", transform=jnp.transpose)

        def __call__(self, x):
            raise AssertionError("a model of labels that can be called is not called")

    model, one = Calls(jnp.ones(2, jnp.bfloat16), jnp.ones((2, 2)), jnp.ones((2, 2))), optax.sgd(1.0)
    narrow = tp.leaves(lambda path, leaf: leaf.dtype == jnp.bfloat16)
    wide = Calls(jnp.ones(2), model.v, None)  # and not those of gradients, which may be wider
    found = rates(groups({narrow: one}, optax.sgd(100.0), form=form), model, grads=wide)
    assert (found["w"], found["v"]) == (1, 100)
    assert rates(groups({("v", "head"): one, "**": optax.sgd(2.0)}, form=form), model)["v"] == 1.0
    last = groups({"-2": one}, optax.sgd(2.0), "!-1", form)  # positions count from the end where that is frozen
    last.init([ramp(2), ramp(2), ramp(2)])
    assert optim.report(last, [ramp(2), ramp(2), ramp(2)]).groups == {"0": "default", "1": "-2"}


@two_forms
def test_a_tie_goes_where_its_own_path_goes(form):
    shared = jnp.array([1.0, 2.0])
    model, both, one = {"embed": shared, "head": shared, "body": ramp(2)}, ("embed", "head"), optax.sgd(1.0)
    tx = groups({both: one, "**": optax.sgd(2.0)}, None, both, form)
    assert rates(tx, model) == {"embed": 1.0}
    assert rates(tx, model, optim.set_trainable(tx, tx.init(model), model)) == {"embed": 1.0, "body": 2.0}
    tx = groups({path: optax.sgd(2.0) for path in tp.layout(model).paths}, None, None, form)
    assert rates(tx, model) == {"embed": 2.0, "body": 2.0}
    with pytest.raises(ValueError, match=r"names 'head', but 'embed' and 'head' are one array.* or write 'embed'"):
        groups({"head": one}, one, None, form).init(model)
    parted = {"embed": shared, "head": -shared, "body": ramp(2)}
    with pytest.raises(ValueError, match=r"'head' names 'embed' by an alias, .*; write 'embed'"):
        groups({"head": one}, one, tp.layout(parted, ties={"head": ("embed", jnp.negative)}), form).init(parted)


@two_forms
@pytest.mark.parametrize("where", ["body", lambda m: m["body"]])
def test_a_group_of_frozen_leaves_is_empty_until_they_thaw(where, form):
    model = {"embed": ramp(2), "body": ramp(2)}
    tx = groups({where: optax.sgd(0.5)}, optax.sgd(1.0), "embed", form)
    assert optim.report(tx, model).groups == {"embed": "default"}
    state = optim.set_trainable(tx, tx.init(model), model)
    assert rates(tx, model, state) == {"embed": 1.0, "body": 0.5}


def test_report(without_type_checks):
    model = {**_model(), "frozen": jnp.ones((3, 4), jnp.bfloat16)}
    inner = optim.groups({"b.v": optax.sgd(1.0), "**": optax.adam(1.0)})
    rules = optax.chain(optim.clip_by_global_norm(1.0), optim.groups({"a": optax.sgd(1.0), "b": inner}))
    report = optim.report(optim.trainable(rules, ("a", "b")), model)
    assert report.groups == {"a": "a", "b.v": "b / b.v", "b.w": "b / **"}
    rows = ["path    shape  dtype     group", "b.v     2      float32   b / b.v", "frozen  3,4    bfloat16  frozen"]
    assert str(report).splitlines()[::2] == rows


def test_over_stacks_by_the_names_of_their_groups():
    model = {"embed": ramp(3, 2), "layers": [{"w": ramp(2, 2, start=i), "b": ramp(2, start=i)} for i in range(3)]}
    wheres = {"embed": "embed", "matrices": tp.leaves(lambda path, leaf: leaf.ndim == 2), "rest": "**"}
    stacks, restructure = tp.stack(model, groups=wheres)
    of = {"embed": optax.sgd(1.0), "matrices": optax.lamb(0.1), "rest": optax.adam(0.1)}
    rules = {"embed": of["embed"], "matrices": optim.per_leaf(of["matrices"])}
    misnamed = optim.groups({"embed": rules["embed"], "matrix": rules["matrices"]}, default=of["rest"])
    plain = optim.groups({wheres[name]: rule for name, rule in of.items()})
    for wrong in (misnamed, optim.groups(rules)):
        with pytest.raises(ValueError, match=r"groups embed, matri.*, got 'embed', 'matrices', 'rest'; write"):
            wrong.init(stacks)
    tx = optim.groups(rules, default=of["rest"])
    steps = lambda tx, at: tx.update(at, tx.update(at, tx.init(at), at)[1], at)[0]
    updates, want = jax.jit(lambda: (steps(tx, stacks), steps(plain, model)))()
    assert_close(restructure(updates), want, 1e-6)
    state = tx.init(stacks)
    assert_same(pickle.loads(pickle.dumps(state)), state)
    match = r"embed, matrices, .*, got none; write tp.stack\(model, groups=.*\(\.\.\.\), form='stacks'\)"
    with pytest.raises(ValueError, match=match):
        tx.init(tp.stack(model)[0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_adjust_does_not_retrace_takes_traced_numbers_and_may_be_donated(dtype):
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(9.0), optim.groups({"w": sgd(0.1)}, sgd(0.1))))
    model, step = {"w": jnp.ones(2, dtype), "v": jnp.ones(1, dtype)}, jax.jit(tx.update, donate_argnums=1)
    single = jnp.float32(0.3)
    for rate in (0.1, 1, np.float64(0.2), single, single, jnp.bfloat16(0.3)):
        step(model, optim.adjust(tx.init(model), learning_rate=rate), model)  # one number for two groups, and again
    assert step._cache_size() == 1
    of = lambda tx, rate: tx.update(tp.copy(model), optim.adjust(tx.init(model), learning_rate=rate), model)[0]["w"]
    for updates in jax.jit(lambda rate: [of(tx, rate), of(sgd(0.1), rate)])(0.5):
        np.testing.assert_allclose(np.asarray(updates, np.float32), -0.5)


@two_forms
def test_adjust_one_group_and_all_what_is_held_and_nested_and_no_parameter_of_that_name(form):
    tx, model = groups({"a": sgd(0.1), "**": sgd(0.25, momentum=0.0)}, form=form), _model()
    state = optim.adjust(tx.init(model), "a", learning_rate=1.0)
    assert rates(tx, model, state) == {"a": 1.0, "b.w": 0.25, "b.v": 0.25}
    state = optim.adjust(optim.adjust(state, learning_rate=3.0), momentum=0.5)  # only one of them knows it
    _, state = tx.update(jax.tree.map(np.ones_like, tp.partition(model)[0]), state, model)
    assert rates(tx, model, state) == {"a": 3.0, "b.w": 4.5, "b.v": 4.5}
    model = {"hyperparams": {"learning_rate": jnp.ones(2)}, "w": jnp.ones(2)}
    outer = optax.inject_hyperparams(lambda scale: optax.chain(sgd(0.1, momentum=0.5), optax.scale(scale)))
    tx = form(outer(1.0), "w")
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    waits = optim.adjust(optim.set_trainable(tx, state, model, "hyperparams"), scale=2.0, learning_rate=0.5)
    rates_of = lambda run: {name: float(value) for name, value in run.hyperparams.items()}
    assert rates_of(waits) == {"scale": 2.0, "learning_rate": 0.5, "momentum": 0.5}
    assert [rates_of(run) for run in (*waits.runs, *waits.held)] == [{"scale": 2.0}] * 2
    both = optim.set_trainable(tx, waits, model)
    assert rates(tx, model, both) == {"hyperparams.learning_rate": 1.0, "w": 1.5}


def clipped(grads, max_norm=1.0, state=None):
    tx = optim.clip_by_global_norm(max_norm)
    return tx.update(grads, tx.init(grads) if state is None else state)


def test_clips_any_mix_of_dtypes_at_any_traced_limit():
    squares = lambda leaf: np.sum(np.abs(np.asarray(leaf).astype(np.complex128)) ** 2)
    norm_of = lambda tree: np.sqrt(sum(map(squares, jax.tree.leaves(tree))))
    names = ("complex", "bf16 with f32", "same array twice", "empty leaves")
    trees = [tp.partition(ZOO[name].make())[0] for name in names] + [{"narrow": np.full(1000, 300, np.float16)}]
    trees += [{"w": np.ones(2, jnp.float8_e4m3fn)}, {"zero": np.zeros(2, np.float32)}]
    run = jax.jit(lambda trees, limit: [clipped(tree, limit) for tree in trees])
    for limit in (0.1, 1e6, np.inf):
        for (below, state), tree in zip(run(trees, limit), trees, strict=True):
            norm = norm_of(tree)
            np.testing.assert_allclose(state.norm, norm, rtol=1e-5)
            assert int(state.clipped) == (norm > limit)
            if norm <= limit:
                assert_same(below, jax.tree.map(jnp.asarray, tree), identity=False)  # bit for bit
            else:
                np.testing.assert_allclose(norm_of(below), limit, rtol=0.1 if "w" in tree else 1e-2)
    assert_same(clipped(trees[0], 1e39)[0], trees[0])
    np.testing.assert_array_equal(jax.grad(lambda x: clipped({"a": x}, np.inf)[0]["a"].sum())(jnp.zeros(2)), 1.0)


def test_a_limit_that_comes_as_an_array_may_reach_zero_and_be_adjusted():
    falling, make = optax.linear_schedule(1.0, 0.0, 2), optax.inject_hyperparams(optim.clip_by_global_norm)
    grads, update = {"w": jnp.array([3.0, 4.0]), "none": jnp.zeros(1)}, jax.jit(make(max_norm=falling).update)
    state, fixed = make(max_norm=falling).init(grads), make(max_norm=1.0)
    for limit in (1.0, 0.5, 0.0, 0.0):
        below, state = update(grads, state)
        np.testing.assert_allclose(below["w"], limit * np.array([0.6, 0.8]), 1e-6)
    update, begun = jax.jit(fixed.update), fixed.init(grads)
    for limit, scale in ((1.0, 0.2), (100.0, 1), (np.inf, 1), (0.0, 0), (-1.0, 0)):
        below, _ = update(grads, optim.adjust(begun, max_norm=limit))
        np.testing.assert_allclose(below["w"], scale * np.array([3.0, 4.0]), 1e-6)


@pytest.mark.parametrize("bad", [-np.inf, np.nan])
def test_what_is_not_finite_is_seen(bad):
    fine = {"a": jnp.ones(2), "b": jnp.ones(1)}
    below, state = clipped(fine | {"a": jnp.array([1.0, bad])})
    assert all(np.isnan(leaf).all() for leaf in jax.tree.leaves(below))
    assert not np.isfinite(state.norm)
    assert (int(state.clipped), int(state.nonfinite)) == (0, 1)
    below, state = clipped(fine, state=state)
    assert (int(state.clipped), int(state.nonfinite)) == (1, 1)
    assert float(tp.global_norm(below)) == pytest.approx(1.0)


def test_before_the_model_all_that_is_given_counts():
    model, grads = Norm(jnp.ones(1), jnp.ones(1)), Norm(jnp.full(1, 3.0), jnp.full(1, 100.0))
    before = optax.chain(optim.clip_by_global_norm(1.0), optim.trainable(optax.sgd(1.0)))
    updates, state = before.update(grads, before.init(model), model)
    np.testing.assert_allclose([updates.scale[0], state[0].norm], [-3 / np.sqrt(10009), np.sqrt(10009)], rtol=1e-6)


def test_across_devices():
    mesh, spread = Mesh(np.array(first_devices(4)), ("data",)), 1e25  # whose square is infinite
    grads = {"w": jnp.arange(1.0, 9.0) * spread}
    tx = optim.clip_by_global_norm(1.0, axis_name="data")

    def local(grads):
        clipped, state = tx.update(tp.copy(grads), tx.init(grads), grads)
        return clipped, state.norm

    spec = PartitionSpec("data")
    below, norm = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec())))(grads)
    np.testing.assert_allclose(norm, np.sqrt(204.0) * spread, rtol=1e-6)
    np.testing.assert_allclose(below["w"], np.arange(1.0, 9.0) / np.sqrt(204.0), rtol=1e-6)


FACTORS = {"head": 0.5, "other.layers.0": 0.25, "other.layers.1.w": jnp.float32(4), "other.scale": np.float64(2)}
# The tie goes by its source.
OF_PATHS = {"embed": 0.5, "other.layers.0.w": 0.25, "other.layers.0.b": 0.25, "other.layers.1.w": 4, "other.scale": 2}
DECAYED = optax.chain(optax.add_decayed_weights(0.5), optax.sgd(0.1, momentum=0.9))
decayed = jax.jit(DECAYED.update)
OF_ALL, OF_ROWS = (optax.chain(rule, optim.scaled(FACTORS)) for rule in (DECAYED, optim.per_leaf(DECAYED)))
RATED = optax.inject_hyperparams(lambda half: optax.chain(DECAYED, optim.scaled(FACTORS | {"head": half})))
SCALED = {
    "in groups": optim.trainable(optim.groups({"other.layers": OF_ALL}, default=optax.MultiSteps(OF_ALL, 1))),
    "stacks in groups": STACKS(optim.groups({"other.layers": OF_ROWS}, default=OF_ALL)),
    "a hyperparameter": optim.trainable(RATED(0.5)),
    "a vector": VECTOR(OF_ALL),
}


@pytest.mark.parametrize("way", SCALED)
def test_each_step_is_that_of_the_rule_times_the_factor(way):
    layers = [{"w": ramp(2, 2, start=i), "b": ramp(2, start=i)} for i in range(3)]
    model, tx = Tied(ramp(2, 2), ramp(2, 2).T, {"layers": layers, "scale": jnp.ones(())}), SCALED[way]
    state = tx.init(model)
    want = {path: (np.asarray(leaf), DECAYED.init(leaf)) for path, leaf in tp.trainables(model).items()}
    for time in range(3):  # in the second step the first layer has no gradient, which in a vector counts as zero
        grads = jax.tree.map(lambda leaf: np.sin(np.asarray(leaf)), tp.partition(model)[0])
        grads = eqx.tree_at(lambda m: m.other["layers"][0], grads, {"w": None, "b": None}) if time == 1 else grads
        model, state = optim.step(tx, grads, state, model)
        for path, (leaf, own) in want.items():
            is_missing = time == 1 and path.startswith("other.layers.0")
            if not is_missing or way == "a vector":
                step, own = decayed(0 * leaf if is_missing else np.sin(leaf), own, leaf)
                want[path] = leaf + OF_PATHS.get(path, 1) * np.asarray(step), own
    for path, (leaf, _) in want.items():
        np.testing.assert_allclose(tp.trainables(model)[path], leaf, rtol=1e-5, atol=1e-6)


@forms
def test_traced_factors_in_one_program_and_their_dtypes(form):
    model = {"low": jnp.full(3, 5.84375, "bfloat16"), "single": jnp.ones(2), "complex": jnp.ones(2, jnp.complex64)}
    model = model if form is not VECTOR else {"low": model["low"], "other": jnp.ones(2, jnp.bfloat16)}
    name = [*model][-1]
    rule = lambda slow: form(optax.chain(optax.scale(-1.0), optim.scaled({"low": slow, name: 2})))

    @jax.jit
    @jax.vmap
    def updates(slow):
        tx = rule(slow)
        return tx.update(tp.copy(model), tx.init(model), model)[0]

    got = updates(jnp.float32([1, 1 / 3]))
    assert {name: leaf.dtype for name, leaf in got.items()} == {name: leaf.dtype for name, leaf in model.items()}
    np.testing.assert_array_equal(got["low"], jnp.bfloat16([[-5.84375] * 3, [-5.84375 / 3] * 3]))
    np.testing.assert_array_equal(got[name], np.full((2, 2), -2))


@forms
def test_histories_go_on_with_their_factors(form):
    model = {"a": jnp.ones(2), "b": jnp.ones(2)}
    tx = form(optax.chain(optax.sgd(1.0), optim.scaled({"a": 0.5, "b": 0.25})), "a")  # what is frozen may be named
    state = tx.init(model)
    assert not jax.tree.leaves(state.runs[0])
    assert pickle.loads(pickle.dumps(state)).roles.layout == state.layout
    _, state = tx.update(tp.copy(model), state, model)
    both = optim.set_trainable(tx, state, model)
    updates, after = jax.jit(tx.update)(model, both, model)
    assert_same(updates, {"a": np.full(2, -0.5, "f4"), "b": np.full(2, -0.25, "f4")}, identity=False)
    assert len(after.runs) == 2


def test_in_a_vector_there_is_no_constant_and_no_index_for_each_element():
    model = {name: jnp.ones(2**13) for name in "abcd"}
    tx = VECTOR(optax.chain(optax.scale(-1.0), optim.scaled({"a": 0.5, "c": jnp.float32(2)})))
    lowered = jax.jit(tx.update).lower(model, tx.init(model), model)
    assert "gather" not in lowered.as_text()
    for text in (lowered.as_text(), lowered.compile().as_text()):
        assert len(text) < 60_000  # of constants each element would be written out


def test_plain_optax_goes_by_path():
    params = {"a": jnp.ones(2), "b": {"w": jnp.ones(2), "none": None}}
    tx = optim.scaled({"b.w": 0.5})
    want = {"a": jnp.ones(2), "b": {"w": jnp.full(2, 0.5), "none": None}}
    assert_same(tx.update(params, tx.init(params))[0], want, identity=False)
    masked = optax.masked(tx, {"a": True, "b": False})
    assert_same(masked.update(tp.copy(params), masked.init(params), params)[0], params)
    for tree, match in ((tp.stack(params)[0], "which stacks do not have"), ({"a": jnp.ones(1)}, "'b.w' selects noth")):
        with pytest.raises(ValueError, match=match):
            tx.update(tree, tx.init(tree))
