"""`tp.lax`, `tp.checkpoint`, `tp.vmap`: models through control flow, as through the same in plain Python."""

import collections
import gc
import inspect
import re
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import treeparams as tp
from treeparams import optim

from .long import some
from .zoo import STRUCTURE_ALONE, ZOO, assert_same, first_devices, pattern, ramp

standard = pytest.mark.usefixtures("standard_promotion")


class Agent(eqx.Module):
    embed: jax.Array
    head: jax.Array  # one with `embed`
    bias: jax.Array
    frozen: jax.Array = tp.field(trainable=False)
    mean: jax.Array = tp.field(trainable=False)  # changes in each step
    steps: jax.Array
    key: jax.Array
    act: Callable[..., Any] = jnp.tanh
    rate: float = 0.5
    name: str = "agent"

    def __call__(self, x):
        return self.act(x - self.mean) @ self.embed @ self.frozen @ self.head.T + self.bias


def agent_of(tied=True):
    shared = ramp(3, 2)
    mean = np.full(3, 0.25, np.float32)
    head = shared if tied else ramp(3, 2, start=0.25)
    arrays = shared, head, ramp(3), ramp(2, 2), jnp.asarray(mean), jnp.array(0), jax.random.key(0)
    return Agent(*arrays)


def loss(agent, target, x, y):
    return jnp.mean((jax.vmap(agent)(x) - y - 0.9 * jax.vmap(target)(x)) ** 2)


TX = optim.trainable(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
RANDOM = np.random.default_rng(0)
BATCHES = tuple(RANDOM.normal(size=(6, 4, 3)).astype(np.float32) for _ in range(2))


def update(carry, batch):
    """Adam, a counter, a running mean, a key, and a soft update."""
    agent, target, state = carry
    value, grads = tp.value_and_grad(loss)(agent, target, *batch)
    agent, state = optim.step(TX, grads, state, agent)
    seen = 0.9 * agent.mean + 0.1 * batch[0].mean(0)
    changed = seen, agent.steps + 1, jax.random.split(agent.key)[0]
    agent = eqx.tree_at(lambda a: (a.mean, a.steps, a.key), agent, changed)
    return (agent, tp.ema(target, agent, tau=0.005), state), value


def assert_near(got, want, tolerance=1e-5):
    """Equal structures, statics and integers; floats up to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        if not hasattr(b, "dtype"):
            assert type(a) is type(b)
            assert a == b
            continue
        if jnp.issubdtype(b.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        assert a.dtype == b.dtype
        np.testing.assert_allclose(np.asarray(a, np.float64), np.asarray(b, np.float64), tolerance, tolerance)


@pytest.fixture
def traces():
    """Counts how often a function is traced: `traces(f)` is `f`, and `len(traces.seen)`."""
    seen = []

    def counted(f):
        def run(*args):
            seen.append(f)
            return f(*args)

        return run

    counted.seen = seen
    return counted


# -- What is carried ---------------------------------------------------------------------------------------------------


@standard
@pytest.mark.parametrize(
    ("compiled", "start"), [(tp.jit, lambda agent: agent), (lambda f: f, tp.copy)], ids=["jit, target = agent", "eager"]
)
def test_updates_in_one_call_are_those_of_a_loop_outside(compiled, start):
    agent = agent_of()
    carry, step, values = (agent, start(agent), TX.init(agent)), tp.jit(update), []
    want = carry
    for i in range(len(BATCHES[0])):
        want, value = step(want, [each[i] for each in BATCHES])
        values.append(value)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got, losses = compiled(lambda carry, xs: tp.lax.scan(update, carry, xs))(carry, BATCHES)
    assert_near(got, want)
    np.testing.assert_allclose(losses, values, 1e-5)
    assert int(got[0].steps) == 6
    assert not np.any(np.asarray(got[0].mean) == agent.mean)
    for each in got[:2]:
        assert each.embed is each.head
    assert got[0].embed is not got[1].embed


@pytest.mark.parametrize("name", some(ZOO, STRUCTURE_ALONE))
def test_models_survive_every_way(name):
    as_jax = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, ZOO[name].make())
    same, after = lambda model: model, lambda *_: as_jax
    for got in (
        tp.lax.scan(lambda model, _: (model, None), as_jax, length=2)[0],
        tp.lax.while_loop(lambda _: False, same, as_jax),
        tp.lax.fori_loop(0, 2, lambda _, model: model, as_jax),
        tp.lax.cond(True, same, after, as_jax),
        tp.lax.switch(1, [after, same, same], as_jax),
        tp.checkpoint(same)(as_jax),
    ):
        # The carry ties parameters alone; this zoo has no buffer that is one array with another.
        assert_same(got, as_jax)


def test_outputs_are_models_too_and_numbers_in_them_come_back_as_they_are():
    def step(agent, x):
        return agent, {"agent": eqx.tree_at(lambda a: a.bias, agent, agent.bias + x), "rate": 0.5, "f": jnp.sin}

    _, outputs = tp.lax.scan(step, agent_of(), jnp.arange(3.0))
    assert (outputs["rate"], outputs["f"], outputs["agent"].name) == (0.5, jnp.sin, "agent")
    assert outputs["agent"].embed is outputs["agent"].head
    assert outputs["agent"].embed.shape == (3, 3, 2)
    np.testing.assert_array_equal(outputs["agent"].bias[:, 0] - ramp(3)[0], [0, 1, 2])
    mapped = tp.lax.map(lambda x: {"x": x, "rate": 0.5}, jnp.arange(3.0))
    assert mapped["rate"] == 0.5


def test_models_are_scanned_over_and_closed_over():
    members = [agent_of(), eqx.tree_at(lambda a: a.bias, agent_of(), 2 * ramp(3))]
    scaled = lambda scale: eqx.tree_at(lambda a: a.bias, agent_of(), scale * ramp(3))
    ensemble = tp.vmap(scaled)(np.array([1, 2], np.float32))

    @tp.jit
    def ways(members, ensemble, x):
        by_hand = jnp.stack([each(x) for each in members])
        return by_hand, [
            tp.lax.scan(lambda _, member: (None, member(x)), None, ensemble)[1],
            tp.vmap(lambda each: each(x))(ensemble),
            *[tp.lax.map(lambda each: each(x), ensemble, batch_size=size) for size in (None, 1, 2)],
            tp.lax.scan(lambda last, _: (members[0](x), last), by_hand[1], None, 2)[1][::-1],
        ]

    by_hand, found = ways(members, ensemble, ramp(3))
    for each in found:
        np.testing.assert_allclose(each, by_hand, 1e-6)


def test_options_are_those_of_jax():
    def step(carry, x):
        return carry | {"w": carry["w"] * 2 + x}, carry["w"]

    start, xs = {"w": jnp.zeros(()), "f": jnp.tanh}, jnp.arange(5.0)
    _, forward = tp.lax.scan(step, start, xs)
    for options in ({"reverse": True}, {"unroll": 2}, {"length": 5, "unroll": True}):
        got = tp.lax.scan(step, start, xs, **options)
        want = jax.lax.scan(lambda w, x: (w * 2 + x, w), start["w"], xs, **options)
        np.testing.assert_array_equal(got[0]["w"], want[0])
        np.testing.assert_array_equal(got[1], want[1])
    assert forward.shape == (5,)
    add = lambda i, carry: carry | {"w": carry["w"] + i}
    assert tp.lax.fori_loop(jnp.array(1), 4, add, start, unroll=None)["w"] == 6
    assert tp.lax.fori_loop(1, 4, add, start, unroll=2)["w"] == 6
    for name in ("scan", "cond", "switch", "while_loop", "fori_loop", "map"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (tp.lax, jax.lax))
        assert list(ours) == [each for each in theirs if each not in ("_split_transpose", "operand")]
        assert [each.default for each in ours.values()] == [theirs[each].default for each in ours]
        assert [each.kind for each in ours.values()] == [theirs[each].kind for each in ours]


@pytest.mark.parametrize(
    ("change", "lines"),
    [
        (lambda c: {**c, "f": jnp.sin}, r"'f' has other values: .*tanh.* before the step, .*sin.* after it"),
        (lambda c: {**c, "name": "b"}, r"'name' has other values: 'a' .* before the step, 'b' .* after it"),
        (
            lambda c: {**c, "n": c["n"] + 1},
            r"'n' has other values: 1 .* before the step, 2 .* after it\nA Python number .*asarray",
        ),
        (lambda c: {**c, "n": 1.0}, r"'n' has other values: 1 \(int\) before the step, 1.0 \(float\) after it"),
        (lambda c: {**c, "n": c["w"][0]}, r"'n' is no array before the step, an array after it\n.*jnp\.zeros\(\(\)\)"),
        (lambda c: {**c, "w": 1.0}, r"'w' is an array before the step, no array after it"),
        (lambda c: {**c, "more": c["w"]}, r"'more' is only after it"),
        (lambda c: {"w": c["w"]}, r"'f' is only before the step"),
        (lambda c: None, r"the carry itself is dict of 4 leaves before the step, None after it"),
    ],
)
@pytest.mark.parametrize("loop", ["scan", "fori_loop", "while_loop"])
def test_what_a_step_may_not_change(loop, change, lines):
    run = {
        "scan": lambda carry: tp.lax.scan(lambda c, _: (change(c), None), carry, length=2),
        "fori_loop": lambda carry: tp.lax.fori_loop(0, 2, lambda _, c: change(c), carry),
        "while_loop": lambda carry: tp.lax.while_loop(lambda _: True, change, carry),
    }[loop]
    with pytest.raises(ValueError, match=f"the step returns another carry, and only arrays may differ:\n{lines}"):
        run({"w": ramp(2), "f": jnp.tanh, "n": 1, "name": "a"})


def test_errors_begin_with_the_place_in_a_tuple_and_name_a_carry_that_is_one_leaf():
    with pytest.raises(ValueError, match=r"the carry itself is no array .* an array after it\n.*jnp.zeros"):
        tp.lax.scan(lambda total, x: (total + x, None), 0.0, ramp(3))
    with pytest.raises(ValueError, match=r"'0\.rate' has other values"):
        tp.lax.fori_loop(0, 2, lambda _, c: (eqx.tree_at(lambda a: a.rate, c[0], 1.0), c[1]), (agent_of(), ramp(2)))
    with pytest.raises(TypeError, match=r"'0\.bias'\] has type float32\[3\] .* float32\[4\]"):
        tp.lax.scan(lambda c, _: ((eqx.tree_at(lambda a: a.bias, c[0], ramp(4)),), None), (agent_of(),), length=2)
    with pytest.raises(TypeError, match=r"carry\['the carry itself'\] has type float32\[2\] .* int32\[2\]"):
        tp.lax.scan(lambda c, _: (c.astype(int), None), ramp(2), length=2)
    with pytest.raises(TypeError, match=r"must return a pair, \(carry, output\), got"):
        tp.lax.scan(lambda c, _: c, ramp(2), length=2)


def test_weak_types_are_made_strong():
    weak = {"w": jnp.asarray(1.0), "f": jnp.tanh}
    strong = {"w": jnp.ones((), jnp.float32), "f": jnp.tanh}
    for start, other in ((weak, strong), (strong, weak)):
        step = lambda carry, _, other=other: ({**carry, "w": other["w"]}, None)
        got = tp.lax.scan(step, start, length=2)[0]["w"]
        assert got.weak_type == jax.lax.scan(lambda w, _, o=other: (o["w"], None), start["w"], length=2)[0].weak_type
        assert tp.lax.while_loop(lambda _: False, lambda c, s=step: s(c, None)[0], start)["w"] == 1
        assert tp.lax.cond(True, lambda a, b: a, lambda a, b: b, start, other)["w"] == 1


# -- Ties --------------------------------------------------------------------------------------------------------------


def cut(agent):
    """As `eqx.apply_updates` and the like do: one array at two places comes back as two."""
    return eqx.tree_at(lambda a: a.head, agent, agent.head + 1)


def test_a_tie_within_a_model_that_the_step_parts_is_warned_of_and_carried_as_two(traces):
    step = traces(lambda agent, _: (cut(agent), None))
    run = tp.jit(lambda agent: tp.lax.scan(step, agent, length=2)[0])
    with pytest.warns(UserWarning, match=r"'embed' and 'head' are one array before .* optim\.step, .* tp\.tie\("):
        got = run(agent_of())
    np.testing.assert_array_equal(got.embed, ramp(3, 2))
    np.testing.assert_array_equal(got.head, ramp(3, 2) + 2)
    assert len(traces.seen) == 2


def test_the_warning_points_at_the_line_of_the_caller_and_comes_once():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tp.lax.fori_loop(0, 2, lambda _, agent: cut(agent), agent_of())
    assert [each.filename for each in caught] == [__file__]


class Nets(eqx.Module):
    online: Any
    target: Any


X = ramp(2)


@pytest.mark.filterwarnings("error")
def test_whole_nodes_that_were_one_are_parted_without_a_word():
    net, agent = ZOO["mlp"].make(), agent_of()
    got = tp.lax.fori_loop(0, 1, lambda _, c: (tp.maptrainable(lambda x: x + 1, c[0]), c[1]), (agent, agent))
    assert all(each.embed is each.head for each in got)  # what is tied in each stays so
    np.testing.assert_array_equal(got[0].embed, got[1].embed + 1)
    for carry in ({"nets": Nets(net, net), "count": jnp.array(0)}, (X, X), (X, optax.TraceState({"w": X}))):
        count = iter(range(100))
        change = lambda leaf, count=count: leaf + next(count) if eqx.is_inexact_array(leaf) else leaf
        got = tp.lax.fori_loop(0, 1, lambda _, c, change=change: jax.tree.map(change, c), carry)
        pairs = [(a, b) for a, b in zip(*map(jax.tree.leaves, (carry, got)), strict=True) if eqx.is_inexact_array(a)]
        differences = {round(float(np.ravel(np.asarray(b) - np.asarray(a))[0]), 3) for a, b in pairs}
        assert len(differences) == len(pairs)


def test_a_layer_of_one_class_whose_weight_alone_is_shared_is_no_whole_node():
    shared = ramp(2, 2)
    layer = lambda start: {"w": shared, "b": ramp(2, start=start)}
    model = {"encoder": layer(0.0), "decoder": layer(1.0)}
    step = lambda _, model: model | {"encoder": {"w": 2 * shared, "b": model["encoder"]["b"]}}
    with pytest.warns(UserWarning, match=r"'decoder\.w' and 'encoder\.w' are one"):
        tp.lax.fori_loop(0, 1, step, model)


def test_what_a_step_ties_is_two_values_and_ties_that_it_parts_in_turn_are_found(traces):
    hard = lambda carry, _: ((carry[0], carry[0]), None)
    (agent, target), _ = tp.lax.scan(hard, (agent_of(), agent_of(tied=False)), length=2)
    np.testing.assert_array_equal(target.head, agent.embed)
    assert target.head is not agent.head
    assert target.head is not target.embed  # which were two at the start
    assert agent.head is agent.embed

    # `c` is parted in the first step, `b` in the second, when it gets what `c` has.
    step = traces(lambda carry, _: ((carry[0], carry[2], carry[2] + 1, carry[3]), None))
    got, _ = tp.lax.scan(step, (X, X, X, X), length=3)
    for found, plus in zip(got, (0, 2, 3, 0), strict=True):
        np.testing.assert_array_equal(found, X + plus)
    assert got[0] is got[3]
    assert len(traces.seen) <= 3


def test_only_parameters_are_tied():
    zero, key = jnp.array(0), jax.random.key(0)
    carry = {"steps": zero, "episodes": zero, "key": key, "other": key, "a": X, "b": X}
    change = lambda _, c: {**c, "steps": c["steps"] + 1, "key": jax.random.split(c["key"])[0]}
    got = tp.lax.fori_loop(0, 3, change, carry)
    assert (int(got["steps"]), int(got["episodes"])) == (3, 0)
    assert got["key"] != got["other"]
    assert got["a"] is got["b"]
    same = tp.lax.cond(True, lambda c: change(0, c), lambda c: c, carry)
    assert (int(same["steps"]), int(same["episodes"])) == (1, 0)


@pytest.mark.filterwarnings("error")
def test_a_tie_of_a_result_is_one_that_all_branches_give():
    tied, apart = agent_of(), agent_of(tied=False)
    for flag, want in ((True, tied), (False, apart)):
        got = tp.lax.cond(flag, lambda a, b: a, lambda a, b: b, tied, apart)
        assert_same(got, want, identity=False)
        assert got.embed is not got.head
        got = tp.lax.switch(1 - flag, [lambda a, b: a, lambda a, b: b, lambda a, b: a], tied, apart)
        assert_same(got, want, identity=False)
        both = tp.lax.cond(flag, lambda a: a, lambda a: tp.maptrainable(jnp.negative, a), tied)
        assert both.embed is both.head


def test_branches_give_models_of_one_structure():
    for choose in (tp.lax.cond, lambda p, *branches: tp.lax.switch(p, branches[:2], *branches[2:])):
        with pytest.raises(
            ValueError, match=r"branches return different trees.*\n'rate' .* 0.5 .* in one .*, 1.0 .* in ano"
        ):
            choose(1, lambda a: a, lambda a: eqx.tree_at(lambda a: a.rate, a, 1.0), agent_of())
        with pytest.raises(ValueError, match=r"the result itself is no array in one branch, an array in another"):
            choose(0, lambda a: 1.0, lambda a: a.bias, agent_of())
        with pytest.raises(TypeError, match=r"bias'\].*float32\[3\].*float32\[4\]|float32\[4\].*float32\[3\]"):
            choose(0, lambda a: a, lambda a: eqx.tree_at(lambda a: a.bias, a, ramp(4)), agent_of())


# -- Within the rest of JAX --------------------------------------------------------------------------------------------


def unrolled(agent, xs):
    for x in xs:
        agent = tp.maptrainable(lambda leaf, x=x: jnp.sin(leaf + x), agent)
    return agent


def rolled(agent, xs):
    return tp.lax.scan(lambda a, x: (tp.maptrainable(lambda leaf: jnp.sin(leaf + x), a), None), agent, xs)[0]


def test_within_jit_grad_vmap_and_each_other():
    agent, xs = agent_of(), np.arange(3, dtype=np.float32)
    saving = tp.checkpoint(lambda a, x: tp.maptrainable(lambda leaf: jnp.sin(leaf + x), a))
    saved = lambda a, xs: tp.lax.scan(lambda a, x: (saving(a, x), None), a, xs)[0]
    batch = np.stack([xs, 2 * xs])

    @tp.jit
    def everything(agent, xs, batch):
        x = ramp(3)
        total = lambda run: lambda agent, xs: jnp.sum(run(agent, xs)(x) ** 2)
        of = lambda run: (total(run)(agent, xs), tp.grad(total(run))(agent, xs))
        mapped = jax.vmap(lambda xs: total(rolled)(agent, xs))(batch)
        by_hand = jnp.stack([total(unrolled)(agent, each) for each in batch])
        members = tp.vmap(rolled, in_axes=(None, 0))(agent, batch)
        return of(unrolled), [of(rolled), of(saved)], (mapped, by_hand), (members, unrolled(agent, batch[1]))

    want, found, sums, (members, second) = everything(agent, xs, batch)
    for got in [*found, (jax.jit(lambda xs: jnp.sum(rolled(agent, xs)(ramp(3)) ** 2))(xs), want[1])]:
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-6)
    np.testing.assert_allclose(*sums, 1e-4)
    np.testing.assert_allclose(members.embed[1], second.embed, 1e-4)
    assert members.embed is members.head


def test_within_shard_map():
    mesh = jax.make_mesh((4,), ("data",), devices=first_devices(4))
    spec, agent = PartitionSpec("data"), agent_of()
    xs = jax.device_put(np.arange(8, dtype=np.float32).reshape(4, 2), jax.NamedSharding(mesh, spec))

    def within(xs):
        total = lambda carry, x: ({**carry, "sum": carry["sum"] + x * agent.bias[0]}, None)
        start = {"sum": 0 * xs[0, 0], "f": jnp.tanh}
        return tp.lax.scan(total, start, xs[0])[0]["sum"][None]

    got = jax.jit(jax.shard_map(within, mesh=mesh, in_specs=spec, out_specs=spec))(xs)
    np.testing.assert_allclose(got, xs.sum(1) * agent.bias[0], 1e-6)


def test_what_enters_jit_can_be_donated():
    agent = agent_of()
    step = tp.jit(lambda agent, xs: (rolled(agent, xs), xs), donate="all")
    got, _ = step(agent, jnp.arange(3.0))
    assert agent.embed.is_deleted()
    assert got.embed is got.head


@pytest.mark.filterwarnings("error")
def test_as_python_where_jit_is_disabled():
    xs = jnp.arange(3.0)
    with jax.disable_jit():
        got = rolled(agent_of(), xs)
        chosen = tp.lax.cond(True, lambda a: a, lambda a: a, got)
    np.testing.assert_allclose(got.embed, unrolled(agent_of(), xs).embed, 1e-6)
    assert chosen.embed is chosen.head


def test_equal_models_share_a_trace_outside_of_jit_too(traces):
    xs = jnp.arange(3.0)
    step = traces(lambda agent, x: (tp.maptrainable(lambda leaf: leaf + x, agent), None))
    add, minus = (traces(lambda *args, by=by: tp.maptrainable(lambda x: x + by, args[-1])) for by in (1, -1))
    keep, value, never = traces(lambda a: a), traces(lambda a: a.bias), traces(lambda _: False)
    calls = {
        1: [
            lambda a: tp.lax.scan(step, a, xs),
            lambda a: tp.lax.fori_loop(0, 2, add, a),
            lambda a: tp.lax.map(value, tp.vmap(lambda _: a)(xs)),
        ],
        2: [
            lambda a: tp.lax.cond(True, keep, minus, a),
            lambda a: tp.lax.switch(0, [minus, keep], a),
            lambda a: tp.lax.while_loop(never, keep, a),
        ],
    }
    for count, found in calls.items():
        for call in found:
            traces.seen.clear()
            for start in (1.0, 2.0):
                call(eqx.tree_at(lambda a: a.bias, agent_of(), jnp.full(3, start)))
            assert len(traces.seen) == count
            call(eqx.tree_at(lambda a: a.rate, agent_of(), 0.75))
            assert len(traces.seen) == 2 * count
            call(agent_of(tied=False))
            assert len(traces.seen) == 3 * count


def test_nothing_is_kept_once_the_function_is_gone():
    class Act:
        def __call__(self, x):
            return x

    def run():
        step = lambda model, x: (model | {"w": model["w"] + x}, None)
        model = {"w": ramp(2), "act": Act()}
        tp.lax.scan(step, model, jnp.arange(2.0))
        return weakref.ref(step), weakref.ref(model["act"])

    gone = run()
    gc.collect()
    assert [each() for each in gone] == [None, None]


@pytest.mark.filterwarnings("error")
def test_a_loop_over_a_model_that_was_met_tied_does_not_warn_of_one_that_is_not():
    tp.layout(agent_of())
    slope = lambda a: tp.grad(lambda a: jnp.sum(a(ramp(3))))(a)
    step = lambda _, a: tp.maptrainable(lambda x, g: x - g, a, slope(a))
    tp.lax.fori_loop(0, 2, step, agent_of(tied=False))


# -- Programs ----------------------------------------------------------------------------------------------------------


def operations(f, *args):
    """The operations of the compiled program, with their types; a loop's in the order of their names."""
    text = jax.jit(f).lower(*args).compile().as_text()
    found = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(", text, re.MULTILINE)
    types = [(kind, *sorted(re.findall(r"\w+\[[\d,]*\]", result))) for result, kind in found]
    return collections.Counter(types)


@standard
def test_the_compiled_program_is_that_by_hand_over_params_and_rest():
    agent = agent_of()
    carry = agent, tp.copy(agent), TX.init(agent)
    parts = [tp.partition(each) for each in carry[:2]]
    apart = lambda models: [tp.partition(each, rest.layout) for each, (_, rest) in zip(models, parts, strict=True)]

    def with_lax(parts, state, batches):
        start = *[tp.combine(*each) for each in parts], state
        (*models, state), values = tp.lax.scan(update, start, batches)
        return apart(models), state, values

    def by_hand(parts, state, batches):
        def step(carry, batch):
            parts, state = carry
            (*models, state), value = update((*[tp.combine(*each) for each in parts], state), batch)
            return (apart(models), state), value

        (parts, state), values = jax.lax.scan(step, (parts, state), batches)
        return parts, state, values

    assert operations(with_lax, parts, carry[2], BATCHES) == operations(by_hand, parts, carry[2], BATCHES)


def test_no_array_becomes_a_constant_of_the_program():
    big = {"w": jnp.asarray(RANDOM.normal(size=(40, 50)).astype(np.float32)), "f": jnp.tanh, "n": jnp.arange(2000)}
    step = lambda model, x: ({**model, "w": model["f"](model["w"] * x)}, model["n"].sum())
    text = tp.jit(lambda model, xs: tp.lax.scan(step, model, xs)).lower(big, ramp(3)).as_text()
    assert len(text) < 20_000


# Each of these programs is as short as with `jax.lax` over a dictionary of arrays, which is beside it.


def rollout(agent, start):
    def act(carry, _):
        agent, x = carry
        agent = eqx.tree_at(lambda a: a.steps, agent, agent.steps + 1)
        return (agent, agent(x)), x

    (agent, _), xs = tp.lax.scan(act, (agent, start), length=4)
    return agent.steps, xs


def rollout_of_arrays(agent, start):
    def act(carry, _):
        agent, x = carry
        agent = agent | {"steps": agent["steps"] + 1}
        return (agent, apply(agent, x)), x

    (agent, _), xs = jax.lax.scan(act, (agent, start), length=4)
    return agent["steps"], xs


def updates_per_call(agent, xs):
    def update(agent, x):
        grads = tp.grad(lambda agent: jnp.sum(agent(x) ** 2))(agent)
        return tp.maptrainable(lambda p, g: p - 0.01 * g, agent, grads), None

    return tp.lax.scan(update, agent, xs)[0].embed


def updates_per_call_of_arrays(agent, xs):
    def update(agent, x):
        trained, rest = ({name: agent[name] for name in names} for names in (TRAINED, FIXED))
        grads = jax.grad(lambda trained: jnp.sum(apply(trained | rest, x) ** 2))(trained)
        return jax.tree.map(lambda p, g: p - 0.01 * g, trained, grads) | rest, None

    return jax.lax.scan(update, agent, xs)[0]["embed"]


def delayed_actor(agent, xs):
    def update(i, carry):
        agent, actor = carry
        agent = tp.maptrainable(lambda leaf: leaf + xs[i, 0], agent)
        return agent, tp.lax.cond(i % 2 == 0, lambda a, _: a, lambda _, a: a, agent, actor)

    return tp.lax.fori_loop(0, 3, update, (agent, agent))[1].embed


def delayed_actor_of_arrays(agent, xs):
    def update(i, carry):
        agent, actor = carry
        agent = agent | {name: agent[name] + xs[i, 0] for name in TRAINED}
        return agent, jax.lax.cond(i % 2 == 0, lambda a, _: a, lambda _, a: a, agent, actor)

    return jax.lax.fori_loop(0, 3, update, (agent, agent))[1]["embed"]


def target_every_k_steps(agent, xs):
    def update(carry, x):
        agent, target = carry
        agent = tp.maptrainable(lambda p, t: p - 0.1 * t * x[0], agent, target, tied="first")
        agent = eqx.tree_at(lambda a: a.steps, agent, agent.steps + 1)
        now = agent.steps % 2 == 0
        return (agent, tp.lax.cond(now, lambda a, _: a, lambda _, t: t, agent, target)), None

    return tp.lax.scan(update, (agent, agent), xs)[0][1].embed


def target_every_k_steps_of_arrays(agent, xs):
    def update(carry, x):
        agent, target = carry
        agent = agent | {name: agent[name] - 0.1 * target[name] * x[0] for name in TRAINED}
        agent = agent | {"steps": agent["steps"] + 1}
        now = agent["steps"] % 2 == 0
        return (agent, jax.lax.cond(now, lambda a, _: a, lambda _, t: t, agent, target)), None

    return jax.lax.scan(update, (agent, agent), xs)[0][1]["embed"]


def maml(agent, xs):
    error = lambda agent, x: jnp.sum(agent(x) ** 2)

    def adapt(agent, x):
        return tp.maptrainable(lambda p, g: p - 0.01 * g, agent, tp.grad(error)(agent, x)), None

    after = lambda agent: error(tp.lax.scan(adapt, agent, xs)[0], xs[0])
    return tp.grad(after)(agent).embed


def maml_of_arrays(agent, xs):
    trained, rest = ({name: agent[name] for name in names} for names in (TRAINED, FIXED))
    error = lambda trained, x: jnp.sum(apply(trained | rest, x) ** 2)

    def adapt(trained, x):
        return jax.tree.map(lambda p, g: p - 0.01 * g, trained, jax.grad(error)(trained, x)), None

    after = lambda trained: error(jax.lax.scan(adapt, trained, xs)[0], xs[0])
    return jax.grad(after)(trained)["embed"]


TRAINED, FIXED = ("embed", "bias"), ("frozen", "mean", "steps")


def apply(agent, x):
    return jnp.tanh(x - agent["mean"]) @ agent["embed"] @ agent["frozen"] @ agent["embed"].T + agent["bias"]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (rollout, rollout_of_arrays),
        (updates_per_call, updates_per_call_of_arrays),
        (delayed_actor, delayed_actor_of_arrays),
        (target_every_k_steps, target_every_k_steps_of_arrays),
        (maml, maml_of_arrays),
    ],
)
def test_everyday_programs_are_no_longer_than_over_dictionaries_of_arrays(ours, theirs):
    agent = agent_of()
    xs = ramp(3) if ours is rollout else jnp.asarray(BATCHES[0][:3, 0])
    want = jax.jit(theirs)({name: getattr(agent, name) for name in (*TRAINED, *FIXED)}, xs)
    for got in (tp.jit(ours)(agent, xs), ours(agent, xs)):
        for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(one, other, 1e-5, 1e-6)
    assert len(inspect.getsource(ours).splitlines()) <= len(inspect.getsource(theirs).splitlines())


# -- Random models in random nestings ----------------------------------------------------------------------------------


class Python:
    """The same by unrolled Python."""

    @staticmethod
    def scan(f, init, xs=None, length=None):
        for i in range(length):
            init, _ = f(init, None if xs is None else xs[i])
        return init, None

    @staticmethod
    def fori_loop(lower, upper, body, carry):
        for i in range(lower, upper):
            carry = body(jnp.array(i), carry)
        return carry

    @staticmethod
    def while_loop(go_on, body, carry):
        while go_on(carry):
            carry = body(carry)
        return carry

    @staticmethod
    def cond(pred, true_fun, false_fun, *operands):
        return (true_fun if pred else false_fun)(*operands)

    @staticmethod
    def switch(index, branches, *operands):
        return branches[int(np.clip(index, 0, len(branches) - 1))](*operands)

    @staticmethod
    def map(f, xs):
        return jnp.stack([f(x) for x in xs])


def score(model, x):
    floats = [leaf for leaf in jax.tree.leaves(model) if eqx.is_inexact_array(leaf)]
    return sum(jnp.sum(jnp.sin(leaf * x + place)) for place, leaf in enumerate(floats))


def changed(carry, **changes):
    return {**carry, **changes}


def train(carry, _):
    grads = tp.grad(score)(carry["model"], jnp.float32(0.5))
    model, state = optim.step(TX, grads, carry["state"], carry["model"])
    return changed(carry, model=model, state=state)


def follow(carry, _):
    model = carry["model"]
    return changed(carry, target=tp.ema(carry["target"], model, tau=0.25), average=carry["average"].update(model))


def count(carry, lax):
    noise = lax.map(lambda x: score(carry["model"], x), jnp.arange(3, dtype=jnp.float32)).sum()
    statistics = 0.5 * carry["seen"] + 0.5 * noise
    return changed(carry, steps=carry["steps"] + 1, key=jax.random.split(carry["key"])[0], seen=statistics)


LEAVES = st.sampled_from([train, follow, count, lambda carry, _: changed(carry, target=carry["model"])])
NESTINGS = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["scan", "fori_loop", "while_loop"]), st.integers(1, 2), st.lists(inner, max_size=2)),
        st.tuples(st.sampled_from(["cond", "switch"]), st.integers(0, 1), st.lists(inner, min_size=2, max_size=2)),
    ),
    max_leaves=4,
)


def interpret(program, carry, lax):
    if callable(program):
        return program(carry, lax)
    name, number, inner = program

    def all_of(carry):
        for each in inner:
            carry = interpret(each, carry, lax)
        return count(carry, lax)

    if name == "scan":
        return lax.scan(lambda carry, _: (all_of(carry), None), carry, length=number)[0]
    if name == "fori_loop":
        return lax.fori_loop(0, number, lambda _, carry: all_of(carry), carry)
    if name == "while_loop":
        end = carry["steps"] + number
        go_on = lambda both: both[0]["steps"] < both[1]
        return lax.while_loop(go_on, lambda both: (all_of(both[0]), both[1]), (carry, end))[0]
    branches = [lambda carry, each=each: interpret(each, carry, lax) for each in inner]
    which = (carry["steps"] + number) % 2
    return lax.cond(which == 0, *branches, carry) if name == "cond" else lax.switch(which, branches, carry)


@st.composite
def models(draw):
    shared = ramp(2)
    leaves = st.sampled_from(["shared", "own", "frozen", jnp.tanh, "a name", 2, 0.5, None])
    drawn = draw(st.lists(leaves, min_size=1, max_size=5))
    make = {"shared": lambda: shared, "own": lambda: ramp(3), "frozen": lambda: Frozen(ramp(2))}
    model = [make[each]() if isinstance(each, str) and each in make else each for each in drawn]
    return {"layers": model, "w": ramp(1)}


class Frozen(eqx.Module):
    value: jax.Array = tp.field(trainable=False)


@standard
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*floats? in")
@hypothesis.settings(deadline=None, max_examples=12, derandomize=True)
@hypothesis.given(models(), st.lists(NESTINGS, min_size=1, max_size=2), st.booleans())
def test_random_models_in_random_nestings_are_as_in_unrolled_python(model, programs, is_copy):
    counter = jnp.array(0)
    start = {
        "model": model,
        "target": tp.copy(model) if is_copy else model,
        "average": tp.Ema(model, decay=0.5),
        "state": TX.init(model),
        "steps": counter,
        "other": counter,
        "key": jax.random.key(1),
        "seen": jnp.zeros((), jnp.float32),
        "f": jnp.cos,
    }
    want, got = start, start
    for each in programs:
        want = interpret(each, want, Python)
    run = tp.jit(lambda carry: [carry := interpret(each, carry, tp.lax) for each in programs][-1])
    got = run(start)
    assert_near(got, want, 1e-4)
    places = lambda carry: pattern([leaf for leaf in jax.tree.leaves(carry["model"]) if eqx.is_inexact_array(leaf)])
    assert places(got) == places(start)


# -- `checkpoint` and `vmap` -------------------------------------------------------------------------------------------


def test_checkpoint_saves_nothing_and_keeps_ties():
    agent = agent_of()
    plain = lambda agent, x: jnp.sum(agent.act(agent.act(agent(x))))
    saving = tp.checkpoint(plain)
    assert saving.__wrapped__ is plain
    got, want = tp.jit(lambda a, x: [tp.grad(lambda a, f=f: f(a, x))(a) for f in (saving, plain)])(agent, ramp(3))
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, 1e-6)
    assert got.head is None
    text = str(jax.make_jaxpr(lambda x: saving(agent, x))(ramp(3)))
    assert "checkpoint" in text or "remat" in text
    with_policy = tp.checkpoint(agent, policy=jax.checkpoint_policies.everything_saveable)
    assert jax.eval_shape(with_policy, ramp(3)).shape == (3,)


def test_an_ensemble_is_made_called_and_trained_by_vmap():
    make = lambda row: {"w": jnp.outer(row, row), "f": jnp.tanh}
    call = lambda member, x: member["f"](member["w"] @ x)
    rows, x = ramp(4, 3), ramp(3)
    ensemble = tp.vmap(make)(rows)
    assert ensemble["f"] is jnp.tanh
    w, rows = np.asarray(ensemble["w"]), np.asarray(rows)
    np.testing.assert_allclose(w, rows[:, :, None] * rows[:, None], 1e-6)
    outputs = tp.vmap(call, in_axes=[0, None])(ensemble, x)
    np.testing.assert_allclose(outputs, np.tanh(w @ np.asarray(x)), 1e-5)
    both = tp.vmap(lambda member, x: (call(member, x), x), (0, None), out_axes=(1, None))(ensemble, x)
    assert (both[0].shape, both[1].shape) == ((3, 4), (3,))
    named = tp.vmap(lambda x, scale: jax.lax.psum(x * scale, "i"), axis_name="i")(ramp(4), scale=ramp(4))
    np.testing.assert_allclose(named[0], np.sum(np.asarray(ramp(4)) ** 2), 1e-6)
    tied = tp.vmap(lambda agent: tp.maptrainable(lambda x: 2 * x, agent), None, axis_size=2)(agent_of())
    assert tied.embed is tied.head
