"""`tp.lax`, `tp.checkpoint`, `tp.vmap`: models through control flow, as through the same in plain Python."""

import collections
import functools
import gc
import inspect
import re
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
from .zoo import (
    STRUCTURE_ALONE,
    ZOO,
    Norm,
    Pair,
    assert_close,
    assert_same,
    first_devices,
    inexact_leaves,
    pattern,
    ramp,
)

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


def agent_of(tied=True, **fields):
    shared = ramp(3, 2)
    head = shared if tied else ramp(3, 2, start=0.25)
    mean = jnp.asarray(np.full(3, 0.25, np.float32))
    arrays = {"bias": ramp(3), "frozen": ramp(2, 2), "mean": mean, "steps": jnp.array(0), "key": jax.random.key(0)}
    return Agent(shared, head, **arrays | fields)


def loss(agent, target, x, y):
    return jnp.mean((jax.vmap(agent)(x) - y - 0.9 * jax.vmap(target)(x)) ** 2)


TX = optim.trainable(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-2)))
RANDOM = np.random.default_rng(0)
BATCHES = tuple(RANDOM.normal(size=(6, 4, 3)).astype(np.float32) for _ in range(2))
X = ramp(2)


def update(carry, batch):
    """Adam, a counter, a running mean, a key, and a soft update."""
    agent, target, state = carry
    value, grads = tp.value_and_grad(loss)(agent, target, *batch)
    agent, state = optim.step(TX, grads, state, agent)
    seen = 0.9 * agent.mean + 0.1 * batch[0].mean(0)
    changed = seen, agent.steps + 1, jax.random.split(agent.key)[0]
    agent = eqx.tree_at(lambda a: (a.mean, a.steps, a.key), agent, changed)
    return (agent, tp.ema(target, agent, tau=0.005), state), value


def scaled(agent, by=2, plus=0):
    return tp.maptrainable(lambda x: by * x + plus, agent)


@pytest.fixture
def traces():
    """Counts how often a function is traced: `traces(f)` is `f`, and `len(traces.seen)`."""

    def counted(f):
        return lambda *args: counted.seen.append(f) or f(*args)

    counted.seen = []
    return counted


@standard
def test_updates_in_one_call_are_those_of_a_loop_outside():
    agent, step, values = agent_of(), tp.jit(update), []
    carry = want = agent, agent, TX.init(agent)
    start = np.array(agent.mean)
    for i in range(len(BATCHES[0])):
        want, value = step(want, [each[i] for each in BATCHES])
        values.append(value)
    got, losses = tp.jit(lambda carry, xs: tp.lax.scan(update, carry, xs), donate="all")(carry, BATCHES)
    assert agent.embed.is_deleted()
    assert_close(got, want)
    np.testing.assert_allclose(losses, values, 1e-5)
    agent, target, _ = got
    assert (int(agent.steps), np.any(np.asarray(agent.mean) == start)) == (6, False)
    assert pattern([agent.embed, agent.head, target.embed, target.head]) == [0, 0, 2, 2]


@pytest.mark.parametrize("name", some(ZOO, STRUCTURE_ALONE))
def test_models_survive_every_way(name):
    as_jax = jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, np.ndarray) else x, ZOO[name].make())
    same, after = lambda model: model, lambda *_: as_jax

    @tp.jit
    def ways(model):
        return [
            tp.lax.scan(lambda model, _: (model, None), model, length=2)[0],
            tp.lax.while_loop(lambda _: False, same, model),
            tp.lax.fori_loop(0, 2, lambda _, model: model, model),
            tp.lax.cond(True, same, after, model),
            tp.lax.switch(1, [after, same, same], model),
            tp.checkpoint(same)(model),
        ]

    for got in ways(as_jax):  # the carry ties parameters alone; no buffer of this zoo is one array with another
        assert_same(got, as_jax)


def test_outputs_are_models_and_models_are_scanned_over_and_closed_over():
    agents = [agent_of(), agent_of(bias=2 * ramp(3))]
    ensemble = tp.vmap(lambda scale: agent_of(bias=scale * ramp(3)))(np.array([1, 2], np.float32))

    def step(agent, x):
        return agent, {"agent": eqx.tree_at(lambda a: a.bias, agent, agent.bias + x), "rate": 0.5, "f": jnp.sin}

    @tp.jit
    def ways(agents, ensemble, x):
        by_hand = jnp.stack([each(x) for each in agents])
        return tp.lax.scan(step, agents[0], jnp.arange(3.0))[1], by_hand, [
            tp.lax.scan(lambda _, member: (None, member(x)), None, ensemble)[1],
            tp.vmap(lambda each: each(x))(ensemble),
            *[tp.lax.map(lambda each: each(x), ensemble, batch_size=size) for size in (None, 1, 2)],
            tp.lax.scan(lambda last, _: (agents[0](x), last), by_hand[1], None, 2)[1][::-1],
        ]  # fmt: skip

    outputs, by_hand, found = ways(agents, ensemble, ramp(3))
    np.testing.assert_allclose(found, [by_hand] * 6, 1e-6)
    agent = outputs["agent"]
    assert (outputs["rate"], outputs["f"], agent.name, agent.embed.shape) == (0.5, jnp.sin, "agent", (3, 3, 2))
    assert agent.embed is agent.head
    np.testing.assert_array_equal(np.asarray(agent.bias)[:, 0] - np.asarray(ramp(3))[0], [0, 1, 2])


def test_options_are_those_of_jax():
    start, xs = {"w": np.zeros((), "f"), "f": jnp.tanh}, np.arange(5, dtype=np.float32)
    step = lambda w, x: (w * 2 + x, w)
    ours = lambda carry, x: (carry | {"w": step(carry["w"], x)[0]}, carry["w"])
    add = lambda i, carry: carry | {"w": carry["w"] + i}

    @tp.jit
    def ways(start, xs, low):
        loops = [tp.lax.fori_loop(low, 4, add, start), tp.lax.fori_loop(1, 4, add, start, unroll=2)]
        for options in ({"reverse": True}, {"unroll": 2}, {"length": 5, "unroll": True}):
            carry, outputs = tp.lax.scan(ours, start, xs, **options)
            loops.append(((carry["w"], outputs), jax.lax.scan(step, start["w"], xs, **options)))
        loops.append(tp.lax.while_loop(lambda carry: carry["w"] < 5, lambda carry: add(2, carry), start))
        return loops

    *loops, reverse, unrolled, whole, by_condition = ways(start, xs, jnp.array(1))
    assert [int(each["w"]) for each in (*loops, by_condition)] == [6, 6, 6]
    for got, want in (reverse, unrolled, whole):
        jax.tree.map(np.testing.assert_array_equal, got, want)
    for name in ("scan", "cond", "switch", "while_loop", "fori_loop", "map"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (tp.lax, jax.lax))
        assert list(ours) == [each for each in theirs if each not in ("_split_transpose", "operand")]
        for each in ours.values():
            assert (each.default, each.kind) == (theirs[each.name].default, theirs[each.name].kind)


LOOPS = {
    "scan": lambda change, carry: tp.lax.scan(lambda c, _: (change(c), None), carry, length=2),
    "fori_loop": lambda change, carry: tp.lax.fori_loop(0, 2, lambda _, c: change(c), carry),
    "while_loop": lambda change, carry: tp.lax.while_loop(lambda _: True, change, carry),
}
CHANGES = [
    (lambda c: {**c, "f": jnp.sin}, r"'f' has other values: .*tanh.* before the step, .*sin.* after it"),
    (lambda c: {**c, "n": c["n"] + 1}, r"'n' has other values: 1 .* before the step, 2 .* after it\nA Python number"),
    (lambda c: {**c, "n": 1.0}, r"'n' has other values: 1 \(int\) before the step, 1.0 \(float\) after it"),
    (lambda c: {**c, "n": c["w"][0]}, r"'n' is no array before the step, an array after it\n.*jnp\.zeros\(\(\)\)"),
    (lambda c: {**c, "w": 1.0}, r"'w' is an array before the step, no array after it"),
    (lambda c: {**c, "more": c["w"]}, r"'more' is only after it"),
    (lambda c: {"w": c["w"]}, r"'f' is only before the step"),
    (lambda c: None, r"the carry itself is dict of 3 leaves before the step, None after it"),
]
CARRY = {"w": X, "f": jnp.tanh, "n": 1}
OTHER = "the step returns another carry, and only arrays may differ:\n"
same = lambda agent: agent
other_bias = lambda agent: eqx.tree_at(lambda a: a.bias, agent, ramp(4))
other_rate = lambda agent: eqx.tree_at(lambda a: a.rate, agent, 1.0)
CHOICES = [lambda fs, a: tp.lax.cond(True, *fs, a), lambda fs, a: tp.lax.switch(0, fs, a)]
BRANCHES = [
    ((same, other_rate), ValueError, r"branches return different trees.*\n'rate' .* 0.5 .* in one .*, 1.0 .* in ano"),
    ((lambda a: 1.0, lambda a: a.bias), ValueError, "the result itself is no array in one branch, an array in ano"),
    ((same, other_bias), TypeError, r"bias'\].*float32\[3\].*float32\[4\]|float32\[4\].*float32\[3\]"),
]
FAULTS = [
    (lambda a: tp.lax.scan(lambda c, x: (c + x, None), 0.0, X), ValueError, r"the carry itself is no .*\n.*jnp.zeros"),
    (lambda a: LOOPS["scan"](lambda c: (other_rate(c[0]), X), (a, X)), ValueError, r"'0\.rate' has other values"),
    (lambda a: LOOPS["scan"](lambda c: (other_bias(c[0]),), (a,)), TypeError, r"'0\.bias'\] .*t32\[3\] .*t32\[4\]"),
    (lambda a: LOOPS["scan"](lambda c: c.astype(int), X), TypeError, r"carry\['the carry itself'\] has type float32"),
    (lambda a: tp.lax.scan(lambda c, _: c, X, length=2), TypeError, r"must return a pair, \(carry, output\), got"),
    *[(lambda a, fs=fs, of=of: of(fs, a), *answer) for of in CHOICES for fs, *answer in BRANCHES],
    *[
        (lambda _, loop=loop, change=change: loop(change, CARRY), ValueError, OTHER + lines)
        for loop in LOOPS.values()
        for change, lines in CHANGES
    ],
]


@pytest.mark.parametrize(("call", "error", "words"), FAULTS)
def test_errors_name_the_place(call, error, words):
    with pytest.raises(error, match=words):
        call(agent_of())


@pytest.mark.parametrize("turn", [1, -1])
def test_weak_types_are_made_strong(turn):
    start, other = [{"w": w, "f": jnp.tanh} for w in (jnp.asarray(1.0), jnp.ones((), jnp.float32))][::turn]

    def every():
        step = lambda carry, _: ({**carry, "w": other["w"]}, None)
        loop = tp.lax.while_loop(lambda _: False, lambda c: step(c, None)[0], start)
        chosen = tp.lax.cond(True, lambda a, b: a, lambda a, b: b, start, other)
        theirs = jax.lax.scan(lambda w, _: (other["w"], None), start["w"], length=2)[0]
        return tp.lax.scan(step, start, length=2)[0]["w"], theirs, loop["w"], chosen["w"]

    got, want, *others = jax.eval_shape(every)
    assert got == want
    assert [(each.shape, each.dtype) for each in others] == [((), jnp.float32)] * 2


def test_a_tie_within_a_model_that_the_step_parts_is_warned_of_once_and_carried_as_two(traces):
    # As `eqx.apply_updates` and the like do: one array at two places comes back as two.
    step = traces(lambda agent, _: (eqx.tree_at(lambda a: a.head, agent, agent.head + 1), None))
    run = tp.jit(lambda agent: tp.lax.scan(step, agent, length=2)[0])
    with pytest.warns(UserWarning, match=r"'embed' and 'head' are one array before .* optim\.step, .* tp\.tie\("):
        got = run(agent_of())
    np.testing.assert_array_equal(got.embed, ramp(3, 2))
    np.testing.assert_array_equal(got.head, np.asarray(ramp(3, 2)) + 2)
    assert len(traces.seen) == 2
    shared = ramp(2, 2)  # a layer of one class of which the weight alone is shared is no whole node
    model = {name: {"w": shared, "b": ramp(2, start=i)} for i, name in enumerate(("encoder", "decoder"))}
    step = lambda _, model: model | {"encoder": {"w": 2 * shared, "b": model["encoder"]["b"]}}
    with pytest.warns(UserWarning, match=r"'decoder\.w' and 'encoder\.w' are one") as caught:
        [tp.lax.fori_loop(0, 1, step, model) for _ in range(2)]
    assert [each.filename for each in caught] == [__file__]  # the line of the caller


def test_whole_nodes_that_were_one_are_parted_without_a_word():
    net, agent = ZOO["mlp"].make(), agent_of()

    def every_other(i, carry):  # a target that is set every other step
        agent = scaled(carry[0], 1, 1)
        return agent, tp.lax.cond(i % 2 == 0, lambda agent, _: agent, lambda _, target: target, agent, carry[1])

    got = tp.lax.fori_loop(0, 4, every_other, (agent, agent))
    assert all(each.embed is each.head for each in got)  # what is tied in each stays so
    np.testing.assert_allclose(got[0].bias, np.asarray(got[1].bias) + 1, 1e-6)
    for carry in ({"nets": Pair(net, net), "count": jnp.array(0)}, (X, X), (X, optax.TraceState({"w": X}))):
        count = iter(range(100))
        change = lambda leaf, count=count: leaf + next(count) if eqx.is_inexact_array(leaf) else leaf
        got = tp.lax.fori_loop(0, 1, lambda _, c, change=change: jax.tree.map(change, c), carry)
        pairs = zip(inexact_leaves(carry), inexact_leaves(got), strict=True)
        differences = [round(float(np.ravel(np.asarray(b) - np.asarray(a))[0]), 3) for a, b in pairs]
        assert len(differences) == len(set(differences))


def test_what_a_step_ties_is_two_values_and_ties_that_it_parts_in_turn_are_found(traces):
    hard = lambda carry, _: ((carry[0], carry[0]), None)
    (agent, target), _ = tp.lax.scan(hard, (agent_of(), agent_of(tied=False)), length=2)
    np.testing.assert_array_equal(target.head, agent.embed)
    assert pattern([agent.embed, agent.head, target.embed, target.head]) == [0, 0, 2, 3]  # two at the start are two

    # `c` is parted in the first step, `b` in the second, when it gets what `c` has.
    step = traces(lambda carry, _: ((carry[0], carry[2], carry[2] + 1, carry[3]), None))
    got, _ = tp.lax.scan(step, (X, X, X, X), length=3)
    np.testing.assert_array_equal(got, [np.asarray(X) + plus for plus in (0, 2, 3, 0)])
    assert got[0] is got[3]
    assert len(traces.seen) <= 3


def test_only_parameters_are_tied():
    zero, key = jnp.array(0), jax.random.key(0)
    carry = {"steps": zero, "episodes": zero, "key": key, "other": key, "a": X, "b": X}
    change = lambda c: {**c, "steps": c["steps"] + 1, "key": jax.random.split(c["key"])[0]}
    ways = tp.lax.fori_loop(0, 3, lambda _, c: change(c), carry), tp.lax.cond(True, change, lambda c: c, carry)
    for got, steps in zip(ways, (3, 1), strict=True):
        assert (int(got["steps"]), int(got["episodes"])) == (steps, 0)
        assert got["key"] != got["other"]
        assert got["a"] is got["b"]


def test_a_tie_of_a_result_is_one_that_all_branches_give():
    tied, apart = agent_of(), agent_of(tied=False)
    for flag, want in ((True, tied), (False, apart)):
        for got in (
            tp.lax.cond(flag, lambda a, b: a, lambda a, b: b, tied, apart),
            tp.lax.switch(1 - flag, [lambda a, b: a, lambda a, b: b, lambda a, b: a], tied, apart),
        ):
            assert_same(got, want, identity=False)
            assert got.embed is not got.head
    both = tp.lax.cond(True, lambda a: a, lambda a: scaled(a, -1), tied)
    assert both.embed is both.head


def adapted(agent, x):
    """One step of an inner loop: each parameter by its own gradient."""
    grads = tp.grad(lambda agent: jnp.sum(agent(ramp(3)) ** 2))(agent)
    return tp.maptrainable(lambda leaf, grad: jnp.sin(leaf + x - 0.01 * grad), agent, grads)


def rolled(agent, xs, step=adapted):
    return tp.lax.scan(lambda a, x: (step(a, x), None), agent, xs)[0]


def test_within_jit_grad_vmap_and_each_other():
    agent, batch = agent_of(), np.array([[0, 1], [0, 2]], np.float32)
    unrolled = lambda agent, xs: functools.reduce(adapted, xs, agent)
    saved = lambda agent, xs: rolled(agent, xs, tp.checkpoint(adapted))
    total = lambda run, agent, xs: jnp.sum(run(agent, xs)(ramp(3)) ** 2)

    @tp.jit
    def everything(agent, batch):
        of = lambda run: tp.value_and_grad(lambda agent: total(run, agent, batch[1]))(agent)
        sums = jax.vmap(lambda xs: total(rolled, agent, xs))(batch)
        members = tp.vmap(rolled, in_axes=(None, 0))(agent, batch)
        return of(unrolled), [of(rolled), of(saved)], sums, members, unrolled(agent, batch[1]).embed

    want, found, sums, members, second = everything(agent, batch)
    for got in [*found, (jax.jit(lambda xs: total(rolled, agent, xs))(batch[1]), want[1])]:
        for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
            np.testing.assert_allclose(one, other, 1e-4, 1e-6)
    np.testing.assert_allclose(sums[1], want[0], 1e-4)
    np.testing.assert_allclose(members.embed[1], second, 1e-4)
    assert members.embed is members.head


def test_as_python_where_jit_is_disabled():
    step = lambda a, x: (scaled(a, x), None)
    with jax.disable_jit():
        got = tp.lax.scan(step, agent_of(), np.arange(2, 4, dtype=np.float32))[0]
        chosen = tp.lax.cond(True, lambda a: a, lambda a: a, got)
    np.testing.assert_allclose(got.embed, 6 * np.asarray(ramp(3, 2)), 1e-6)
    assert chosen.embed is chosen.head
    # Such a model was met tied; of one that is not, nothing is said within a loop.
    apart = agent_of(tied=False)
    jax.eval_shape(lambda: tp.lax.fori_loop(0, 2, lambda _, a: adapted(a, 1.0), apart).bias)


def test_within_shard_map():
    mesh, spec = jax.make_mesh((4,), ("data",), devices=first_devices(4)), PartitionSpec("data")
    total = lambda carry, x: ({**carry, "sum": carry["sum"] + x}, None)
    within = lambda xs: tp.lax.scan(total, {"sum": 0 * xs[0, 0], "f": jnp.tanh}, xs[0])[0]["sum"][None]
    xs = np.arange(8, dtype=np.float32).reshape(4, 2)
    got = jax.jit(jax.shard_map(within, mesh=mesh, in_specs=spec, out_specs=spec))(
        jax.device_put(xs, jax.NamedSharding(mesh, spec))
    )
    np.testing.assert_array_equal(got, xs.sum(1))


def test_equal_models_share_a_trace_outside_of_jit_too(traces):
    step = traces(lambda agent, x: (scaled(agent, 1, x), None))
    add, minus = (traces(lambda *args, by=by: scaled(args[-1], 1, by)) for by in (1, -1))
    keep, value, never = traces(lambda a: a), traces(lambda a: a.bias), traces(lambda _: False)
    calls = [  # and how many functions each traces
        (1, lambda a: tp.lax.scan(step, a, X)),
        (1, lambda a: tp.lax.fori_loop(0, 2, add, a)),
        (1, lambda a: tp.lax.map(value, tp.vmap(lambda _: a)(X))),
        (2, lambda a: tp.lax.cond(True, keep, minus, a)),
        (2, lambda a: tp.lax.switch(0, [minus, keep], a)),
        (2, lambda a: tp.lax.while_loop(never, keep, a)),
    ]
    agents = agent_of(), agent_of(bias=2 * ramp(3)), agent_of(rate=0.75), agent_of(tied=False)
    for count, call in calls:
        traces.seen.clear()
        for agent, kinds in zip(agents, (1, 1, 2, 3), strict=True):
            call(agent)
            assert len(traces.seen) == kinds * count


def test_nothing_is_kept_once_the_function_is_gone():
    def run():
        act = type("Act", (), {"__call__": lambda self, x: x})()
        step = lambda model, x: (model | {"w": model["w"] + x}, None)
        tp.lax.scan(step, {"w": X, "act": act}, np.arange(2, dtype=np.float32))
        return weakref.ref(step), weakref.ref(act)

    gone = run()
    gc.collect()
    assert [each() for each in gone] == [None, None]


def operations(f, *args):
    """The operations of the compiled program, with their types; a loop's in the order of their names."""
    text = jax.jit(f).lower(*args).compile().as_text()
    found = re.findall(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([a-z][\w\-]*)\(", text, re.MULTILINE)
    return collections.Counter((kind, *sorted(re.findall(r"\w+\[[\d,]*\]", result))) for result, kind in found)


@standard
def test_the_compiled_program_is_that_by_hand_over_params_and_rest():
    agent = agent_of()
    carry = agent, tp.copy(agent), TX.init(agent)
    parts = [tp.partition(each) for each in carry[:2]]
    apart = lambda models: [tp.partition(each, rest.layout) for each, (_, rest) in zip(models, parts, strict=True)]
    together = lambda parts: [tp.combine(*each) for each in parts]

    def with_lax(parts, state, batches):
        (*models, state), values = tp.lax.scan(update, (*together(parts), state), batches)
        return apart(models), state, values

    def by_hand(parts, state, batches):
        def step(carry, batch):
            parts, state = carry
            (*models, state), value = update((*together(parts), state), batch)
            return (apart(models), state), value

        (parts, state), values = jax.lax.scan(step, (parts, state), batches)
        return parts, state, values

    assert operations(with_lax, parts, carry[2], BATCHES) == operations(by_hand, parts, carry[2], BATCHES)


def test_no_array_becomes_a_constant_of_the_program():
    big = {"w": RANDOM.normal(size=(40, 50)).astype(np.float32), "f": jnp.tanh, "n": np.arange(2000)}
    step = lambda model, x: ({**model, "w": model["f"](model["w"] * x)}, model["n"].sum())
    text = tp.jit(lambda model, xs: tp.lax.scan(step, model, xs)).lower(big, ramp(3)).as_text()
    assert len(text) < 20_000


def score(model, x):
    return sum(jnp.sum(jnp.sin(leaf * x + place)) for place, leaf in enumerate(inexact_leaves(model)))


def train(carry, _):
    grads = tp.grad(score)(carry["model"], jnp.float32(0.5))
    model, state = optim.step(TX, grads, carry["state"], carry["model"])
    return carry | {"model": model, "state": state}


def follow(carry, _):
    model = carry["model"]
    return carry | {"target": tp.ema(carry["target"], model, tau=0.25), "average": carry["average"].update(model)}


def count(carry, in_python):
    noisy, xs = lambda x: score(carry["model"], x), jnp.arange(3, dtype=jnp.float32)
    noise = sum(map(noisy, xs)) if in_python else tp.lax.map(noisy, xs).sum()
    changes = {"seen": 0.5 * carry["seen"] + 0.5 * noise, "key": jax.random.split(carry["key"])[0]}
    return carry | changes | {"steps": carry["steps"] + 1}


NESTINGS = st.recursive(
    st.sampled_from([train, follow, count, lambda carry, _: carry | {"target": carry["model"]}]),
    lambda inner: st.one_of(
        st.tuples(st.sampled_from(["scan", "fori_loop", "while_loop"]), st.integers(1, 2), st.lists(inner, max_size=2)),
        st.tuples(st.sampled_from(["cond", "switch"]), st.integers(0, 1), st.lists(inner, min_size=2, max_size=2)),
    ),
    max_leaves=4,
)


def in_turn(programs, carry, in_python):
    return functools.reduce(lambda carry, each: interpret(each, carry, in_python), programs, carry)


def interpret(program, carry, in_python):
    """Runs a step, a loop or a branch; in Python unrolled."""
    if callable(program):
        return program(carry, in_python)
    name, number, inner = program
    branches = [lambda carry, each=each: interpret(each, carry, in_python) for each in inner]
    change = lambda carry: count(in_turn(inner, carry, in_python), in_python)
    which = (carry["steps"] + number) % 2
    if name == "cond":
        return branches[int(which)](carry) if in_python else tp.lax.cond(which == 0, *branches, carry)
    if name == "switch":
        return branches[int(which)](carry) if in_python else tp.lax.switch(which, branches, carry)
    if in_python:
        return functools.reduce(lambda carry, _: change(carry), range(number), carry)
    if name == "scan":
        return tp.lax.scan(lambda carry, _: (change(carry), None), carry, length=number)[0]
    if name == "fori_loop":
        return tp.lax.fori_loop(0, number, lambda _, carry: change(carry), carry)
    rounds = jnp.array(number)
    return tp.lax.while_loop(lambda both: both[1] > 0, lambda both: (change(both[0]), both[1] - 1), (carry, rounds))[0]


# Few shapes: Python runs each operation as a program.
PARTS = [
    lambda: Pair(*[ramp(2)] * 2),
    lambda: Norm(ramp(2), ramp(2)),
    lambda: [jnp.tanh, "a name", 2, 0.5, None],
    lambda: ramp(3),
]
MODELS = st.lists(st.sampled_from(PARTS), max_size=3).map(lambda parts: {"w": ramp(1), "parts": [of() for of in parts]})


@standard
@pytest.mark.timeout(300)
@pytest.mark.filterwarnings("ignore:.*floats? in")
@hypothesis.settings(deadline=None, max_examples=2, derandomize=True)
@hypothesis.example(
    {"w": ramp(1), "parts": [Pair(*[ramp(2)] * 2), Norm(ramp(2), ramp(2))]},
    [
        ("while_loop", 2, [train, ("cond", 0, [follow, lambda carry, _: carry | {"target": carry["model"]}])]),
        ("fori_loop", 1, [("switch", 1, [("scan", 2, [follow]), count])]),
    ],
    False,
)
@hypothesis.given(MODELS, st.lists(NESTINGS, min_size=1, max_size=2), st.booleans())
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
    got = tp.jit(lambda carry: in_turn(programs, carry, in_python=False))(start)
    assert_close(got, in_turn(programs, start, in_python=True), 1e-4)
    assert pattern(inexact_leaves(got["model"])) == pattern(inexact_leaves(start["model"]))


def test_checkpoint_saves_nothing_and_keeps_ties():
    agent = agent_of()
    plain = lambda agent, x: jnp.sum(agent.act(agent.act(agent(x))))
    saving = tp.checkpoint(plain)
    assert saving.__wrapped__ is plain
    got, want = tp.jit(lambda a, x: [tp.grad(f)(a, x) for f in (saving, plain)])(agent, ramp(3))
    for one, other in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(one, other, 1e-6)
    assert got.head is None
    assert re.search("checkpoint|remat", str(jax.make_jaxpr(lambda x: saving(agent, x))(ramp(3))))
    with_policy = tp.checkpoint(agent, policy=jax.checkpoint_policies.everything_saveable)
    assert jax.eval_shape(with_policy, ramp(3)).shape == (3,)


def test_an_ensemble_is_made_called_and_trained_by_vmap():
    call = lambda member, x: member["f"](member["w"] @ x)

    @tp.jit
    def ways(rows, x):
        ensemble = tp.vmap(lambda row: {"w": jnp.outer(row, row), "f": jnp.tanh})(rows)
        both = tp.vmap(lambda member, x: (call(member, x), x), (0, None), out_axes=(1, None))(ensemble, x)
        named = tp.vmap(lambda x, scale: jax.lax.psum(x * scale, "i"), axis_name="i")(x, scale=x)
        tied = tp.vmap(scaled, None, axis_size=2)(agent_of())
        return ensemble, tp.vmap(call, in_axes=[0, None])(ensemble, x), both, named, tied

    rows, x = ramp(4, 3), ramp(3)
    ensemble, outputs, both, named, tied = ways(rows, x)
    assert ensemble["f"] is jnp.tanh
    w, rows = np.asarray(ensemble["w"]), np.asarray(rows)
    np.testing.assert_allclose(w, rows[:, :, None] * rows[:, None], 1e-6)
    np.testing.assert_allclose(outputs, np.tanh(w @ np.asarray(x)), 1e-5)
    assert (both[0].shape, both[1].shape) == ((3, 4), (3,))
    np.testing.assert_allclose(named[0], np.sum(np.asarray(x) ** 2), 1e-6)
    assert tied.embed is tied.head
