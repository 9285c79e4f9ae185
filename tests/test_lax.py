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
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim

from .long import some
from .zoo import STRUCTURE_ALONE, ZOO, Norm, Pair, assert_close, assert_same, inexact_leaves, pattern, ramp

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
            *[tp.lax.map(lambda each: each(x), ensemble, batch_size=size) for size in (None, 1, 2)],
            tp.lax.scan(lambda last, _: (agents[0](x), last), by_hand[1], None, 2)[1][::-1],
        ]  # fmt: skip

    outputs, by_hand, found = ways(agents, ensemble, ramp(3))
    np.testing.assert_allclose(found, [by_hand] * 5, 1e-6)
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
        theirs = [each for each in theirs.values() if each.name not in ("_split_transpose", "operand")]
        described = lambda parameters: [(each.name, each.default, each.kind) for each in parameters]
        assert described(ours.values()) == described(theirs)


scanned = lambda change, carry: tp.lax.scan(lambda c, _: (change(c), None), carry, length=2)
CHANGES = [
    (lambda c: {**c, "f": jnp.sin}, r"'f' has other values: .*tanh.* before the step, .*sin.* after it"),
    (lambda c: {**c, "n": c["n"] + 1}, r"'n' has other values: 1 .* before the step, 2 .* after it\nA Python number"),
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
    (lambda a: scanned(lambda c: (other_rate(c[0]), X), (a, X)), ValueError, r"'0\.rate' has other values"),
    (lambda a: scanned(lambda c: (other_bias(c[0]),), (a,)), TypeError, r"'0\.bias'\] .*t32\[3\] .*t32\[4\]"),
    (lambda a: tp.lax.fori_loop(0, 2, lambda _, c: other_rate(c), a), ValueError, OTHER + "'rate' has other values"),
    (lambda a: tp.lax.while_loop(lambda _: True, other_rate, a), ValueError, OTHER + "'rate' has other values"),
    (lambda a: tp.lax.scan(lambda c, _: c, X, length=2), TypeError, r"must return a pair, \(carry, output\), got"),
    *[(lambda a, fs=fs, of=of: of(fs, a), *answer) for of in CHOICES for fs, *answer in BRANCHES],
    *[(lambda _, change=change: scanned(change, CARRY), ValueError, OTHER + lines) for change, lines in CHANGES],
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
    branches = [lambda a, b: a, lambda a, b: b]
    for flag, want in ((True, tied), (False, apart)):
        for got in (tp.lax.cond(flag, *branches, tied, apart), tp.lax.switch(1 - flag, branches * 2, tied, apart)):
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


# These are compiled, for Python would run each operation as a program.
@tp.jit
def score(model, x):
    return sum(jnp.sum(jnp.sin(leaf * x + place)) for place, leaf in enumerate(inexact_leaves(model)))


@tp.jit
def train(carry):
    grads = tp.grad(score)(carry["model"], jnp.float32(0.5))
    model, state = optim.step(TX, grads, carry["state"], carry["model"])
    return carry | {"model": model, "state": state}


@tp.jit
def follow(carry):
    model = carry["model"]
    return carry | {"target": tp.ema(carry["target"], model, tau=0.25), "average": carry["average"].update(model)}


def count(lax, carry):
    noise = lax.map(lambda x: score(carry["model"], x), jnp.arange(3, dtype=jnp.float32)).sum()
    changes = {"seen": 0.5 * carry["seen"] + 0.5 * noise, "key": jax.random.split(carry["key"])[0]}
    return carry | changes | {"steps": carry["steps"] + 1}


def nested(lax, carry):
    """Steps in branches and loops within loops, of `tp.lax` or unrolled in Python."""

    def outer(both):
        carry, rounds = both
        copied = lambda carry: carry | {"target": carry["model"]}
        return count(lax, lax.cond(carry["steps"] % 2 == 0, follow, copied, train(carry))), rounds - 1

    def inner(_, carry):
        loop = lambda carry: lax.scan(lambda carry, _: (follow(carry), None), carry, None, 2)[0]
        return lax.switch((carry["steps"] + 1) % 2, [loop, lambda carry: count(lax, carry)], carry)

    carry, _ = lax.while_loop(lambda both: both[1] > 0, outer, (carry, jnp.array(2)))
    return lax.fori_loop(0, 2, inner, carry)


class Python:
    """Control flow as in `jax.lax`, unrolled."""

    cond = staticmethod(lambda flag, yes, no, carry: (yes if flag else no)(carry))
    switch = staticmethod(lambda index, branches, carry: branches[int(index)](carry))
    map = staticmethod(lambda f, xs: jnp.stack([f(x) for x in xs]))

    @staticmethod
    def scan(step, carry, _, length):
        for _ in range(length):
            carry, _ = step(carry, None)
        return carry, None

    @staticmethod
    def fori_loop(lower, upper, step, carry):
        for i in range(lower, upper):
            carry = step(i, carry)
        return carry

    @staticmethod
    def while_loop(condition, step, carry):
        while condition(carry):
            carry = step(carry)
        return carry


@standard
@pytest.mark.timeout(300)
def test_nested_control_flow_is_as_unrolled_python():
    model = {"w": ramp(1), "pair": Pair(*[ramp(2)] * 2), "norm": Norm(ramp(2), ramp(2)), "rest": [jnp.tanh, "name", 2]}
    counter = jnp.array(0)
    start = {
        "model": model,
        "target": model,
        "average": tp.Ema(model, decay=0.5),
        "state": TX.init(model),
        "steps": counter,
        "other": counter,
        "key": jax.random.key(1),
        "seen": jnp.zeros((), jnp.float32),
    }
    got = tp.jit(lambda carry: nested(tp.lax, carry))(start)
    assert_close(got, nested(Python, start), 1e-4)
    assert pattern(inexact_leaves(got["model"])) == pattern(inexact_leaves(model))


def test_checkpoint_is_that_of_jax():
    agent, plain = agent_of(), lambda agent, x: agent.act(agent(x))
    saving = tp.checkpoint(plain)
    assert saving.__wrapped__ is plain
    assert re.search("checkpoint|remat", str(jax.make_jaxpr(lambda x: saving(agent, x))(ramp(3))))
    with_policy = tp.checkpoint(agent, policy=jax.checkpoint_policies.everything_saveable)
    assert jax.eval_shape(with_policy, ramp(3)).shape == (3,)


def test_the_options_of_vmap():
    agent, xs = agent_of(), ramp(4, 3)

    @tp.jit
    def ways(agent, xs):
        both = tp.vmap(lambda agent, x: (agent(x), agent.bias), [None, 0], out_axes=(1, None))(agent, xs)
        named = tp.vmap(lambda x, scale: jax.lax.psum(x * scale, "i"), axis_name="i")(xs, scale=xs)
        return both, jnp.stack([agent(x) for x in xs]), named, tp.vmap(scaled, None, axis_size=2)(agent)

    (outputs, bias), by_hand, named, doubled = ways(agent, xs)
    np.testing.assert_allclose(outputs.T, by_hand, 1e-6)
    np.testing.assert_array_equal(bias, agent.bias)
    np.testing.assert_allclose(named[0], np.sum(np.asarray(xs) ** 2, axis=0), 1e-6)
    assert doubled.embed is doubled.head
