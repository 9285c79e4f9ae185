"""States of rules: those that cannot be divided by parameter, what they hold, and those of plain Optax and back."""

import collections
import functools
import gc
import pickle
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from ..zoo import STACKS, VECTOR, assert_close, assert_same, ramp
from .shared import pair

# Arrays of all parameters: they go into one another, or have a number for each pair.
_zeros = lambda params: {"n": jnp.zeros((len(jax.tree.leaves(params)),) * 2)}
_pairs = optax.GradientTransformation(_zeros, lambda grads, state, params: (grads, state))
OF_ALL = {"flatten": optax.flatten(optax.adam(0.1)), "numbered": optax.chain(optax.adam(0.1), _pairs)}
NOT_BY_LEAF = "is not kept leaf by leaf, so it"


@pytest.mark.parametrize("rule", OF_ALL.values(), ids=OF_ALL)
def test_a_state_that_cannot_be_divided_trains_and_is_refused_where_it_would_have_to_be(rule, tmp_path):
    tx, model = optim.trainable(rule), pair()
    updates, state = tx.update(tp.copy(model), tx.init(model), model)
    assert_close(updates, rule.update(tp.copy(model), rule.init(model), model)[0])
    with pytest.raises(ValueError, match=NOT_BY_LEAF):
        optim.set_trainable(tx, state, model, "a")
    with pytest.raises(ValueError, match=NOT_BY_LEAF):
        tx.update({"a": model["a"]}, state, model)
    for rename in ({"a": "b", "b": "a"}, {"a": "c", "b": "d"}):
        new = {rename[path]: leaf for path, leaf in model.items()}
        with pytest.raises(ValueError, match=NOT_BY_LEAF):
            saving.plan(model, new, rename=rename).state(state, like=tx.init(new))
    saving.save(tmp_path / "state", state)
    assert_same(saving.load(tmp_path / "state", tx.init(model)), state)
    turned = collections.OrderedDict((name, model[name]) for name in "ba")
    with pytest.raises(ValueError, match=r"not kept leaf by leaf.*: a, b in the file, b, a in the tree"):
        saving.load(tmp_path / "state", tx.init(turned))


def test_numbers_that_all_share_are_not_of_the_parameters():
    rates = optax.inject_hyperparams(lambda rates: optax.sgd(rates[0], momentum=0.9))(jnp.array([0.1, 0.2]))
    tx, model = optim.trainable(optax.chain(rates, optax.add_noise(0.0, 0.5, 1))), pair()
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    state = optim.set_trainable(tx, state, model, "b")
    assert_same(state.runs[0][0].hyperparams["rates"], jnp.array([0.1, 0.2]))


class Grid(eqx.Module):
    w: jax.Array
    at: object = eqx.field(static=True)


@pytest.mark.filterwarnings("ignore:A JAX array is being set as static")
def test_models_of_one_class_have_static_arrays_of_their_own():
    rule = optax.adam(0.1)
    tx, gradient = optim.trainable(rule), {"net": {"w": jnp.array([3.0, 4.0])}}
    plain, plain_state = jnp.ones(2), rule.init(jnp.ones(2))
    for _ in range(2):
        step, plain_state = rule.update(gradient["net"]["w"], plain_state, plain)
        plain = plain + step
    for at in (np.arange(2.0), np.arange(2.0), np.arange(3), jnp.ones(2)):
        model = {"net": Grid(jnp.ones(2), at)}
        state = tx.init(model)
        for _ in range(2):  # the second in another process
            model, state = pickle.loads(pickle.dumps(optim.step(tx, gradient, state, model)))
        assert_same((model["net"].w, model["net"].at), (plain, at))


def test_nothing_that_models_hold_lives_as_long_as_the_transformation():
    class Net(eqx.Module):
        w: jax.Array
        f: object = eqx.field(static=True)

    def make():
        captured = np.ones(3)
        return Net(jnp.ones((2, 2)), lambda x: x + captured), weakref.ref(captured)

    tx = STACKS(optax.chain(optim.clip_by_global_norm(1.0), optim.per_leaf(optax.sgd(0.1, momentum=0.9))))
    model, captured = make()
    tx.update(tp.partition(model)[0], tx.init(model), model)
    del model
    gc.collect()
    assert captured() is None


def test_extra_arguments_reach_what_is_within_multisteps():
    update = lambda grads, state, params=None, *, scale=1.0, **_: (jax.tree.map(lambda g: -scale * g, grads), state)
    scaled = optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
    plateau, model = optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()), pair()
    for tx, extra in (
        (STACKS(optim.per_leaf(optax.MultiSteps(scaled, 1))), {"scale": 0.1}),
        (optim.trainable(optax.MultiSteps(plateau, 1)), {"value": jnp.float32(1.0)}),
    ):
        updates, _ = tx.update(tp.copy(model), tx.init(model), model, **extra)
        assert_close(updates, jax.tree.map(lambda leaf: -0.1 * leaf, model))


def test_a_state_prints_a_line_for_each_history_and_a_transformation_what_it_is():
    model = {"a": ramp(2), "b": ramp(1)}
    tx = optim.trainable(optax.sgd(0.1, momentum=0.9), "a", missing="zeros", form="vector")
    assert repr(tx) == "optim.trainable(chain, trainable='a', form='vector', missing='zeros')"
    state = tx.update(tp.copy(model), tx.init(model), model)[1]
    assert repr(state) == "TrainableState\n  trains, 1 step taken: a"
    both = optim.set_trainable(tx, state, model, "b")
    assert repr(both) == "TrainableState\n  trains, 0 steps taken: b\n  waits, 1 step taken: a"
    texts = []
    jax.jit(lambda state: texts.append(repr(state)))(state)
    assert texts == ["TrainableState\n  trains, int32[] steps taken: a"]
    assert repr(jax.tree.map(lambda _: None, state)) == "TrainableState\n  trains, unknown steps taken: a"


SCHEDULE, NOTHING = optax.linear_schedule(0.1, 0.01, 5), optax.set_to_zero()
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(SCHEDULE))
FLAT = optax.clip(1.0), optax.trace(0.9), optax.scale_by_learning_rate(SCHEDULE)
RATES, FACTORS = optax.inject_hyperparams(optax.adam)(0.1), optax.adafactor(0.1, min_dim_size_to_factor=2)
GROUPS = optim.groups({"w": optax.adam(0.1)}, default=RATES)
_mask = lambda frozen: {"w": not frozen, "b": [not frozen], "mean": frozen, "n": None, "f": None}
masked = lambda rule, *, frozen: optax.masked(rule, _mask(frozen))


def parted(w, b, labels=("w", "b", "frozen"), frozen=NOTHING):
    first, second, third = labels
    its = {"w": first, "b": [second], "mean": third, "n": None, "f": None}
    return optax.partition({first: w, second: b, third: frozen}, its)


alone = lambda rule: parted(rule, rule, ("train", "train", "frozen"))
steps_of_two = lambda rule: optax.MultiSteps(rule, 2).gradient_transformation()
# Each rule of plain Optax, and what continues its run here.
RULES = {
    "momentum": (optax.sgd(0.1, momentum=0.9),) * 2,
    "clip": (CLIPPED,) * 2,
    "injected": (RATES,) * 2,
    "by name": (optim.groups({"w": optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.5)),) * 2,
    "partition": (alone(CLIPPED), CLIPPED),
    "partition without moments": (alone(optax.sgd(SCHEDULE)), optax.sgd(SCHEDULE)),
    "partition of another rule": (parted(CLIPPED, CLIPPED, ("a", "a", "b"), optax.adam(0.0)), CLIPPED),
    "masked": (optax.chain(masked(CLIPPED, frozen=False), masked(NOTHING, frozen=True)), CLIPPED),
    "zeros last": (optax.chain(CLIPPED, masked(NOTHING, frozen=True)), CLIPPED),
    "zeros in a chain": (optax.chain(masked(NOTHING, frozen=True), *FLAT), optax.chain(*FLAT)),
    "within steps": (steps_of_two(alone(RATES)), steps_of_two(RATES)),
    "labels": (parted(optax.adam(0.1), RATES, ("head", "body", "frozen")), GROUPS),
    "swapped labels": (parted(optax.adam(0.1), RATES, ("default", "w", "frozen")), GROUPS),
    "one to groups": (alone(RATES), optim.groups({"w": RATES}, default=RATES)),
    "groups to one": (parted(RATES, RATES), RATES),
}
SAME = {name for name, (rule, ours) in RULES.items() if rule is ours}
IN_ROWS = {"muon": optax.contrib.muon(0.1), "rows": FACTORS, "rates": RATES}
IN_FORMS = {"in a vector": VECTOR(optax.adam(0.1), "!mean"), "in stacks": STACKS(optax.adam(0.1), "!mean")}
TXS = {name: optim.trainable(rule, "!mean") for name, (_, rule) in RULES.items()} | IN_FORMS
TXS |= {name: STACKS(optim.per_leaf(rule), "!mean") for name, rule in IN_ROWS.items()}
RULES = {name: rule for name, (rule, _) in RULES.items()} | IN_ROWS | dict.fromkeys(IN_FORMS, optax.adam(0.1))
ADAM = optax.adam(0.1)
WITH_ADAM = optim.trainable(ADAM)
MEMORY = optax.scale_by_lbfgs(memory_size=2)
whole = lambda: {"w": ramp(2, 3), "b": [ramp(3)], "mean": ramp(3), "n": jnp.array(3), "f": jnp.tanh}
arrays_of = lambda model: eqx.filter(model, eqx.is_inexact_array)
added = lambda *leaves: jax.device_put(sum(map(np.asarray, leaves)))


def grads_of(model):
    """Nothing moves `mean`, so that a norm over all is that of the others."""
    return jax.tree.map(lambda leaf: 0.5 * np.asarray(leaf), arrays_of(model)) | {"mean": np.zeros(3, np.float32)}


def test_the_next_steps_are_those_of_optax_and_the_way_back_is_its_state():
    # Outside of `jit`: there an operation on a shape is a program for all rules, and both round alike.
    model = whole()
    begin = arrays_of(model)
    for name, tx in TXS.items():
        rule, params, after, step = RULES[name], begin, model, functools.partial(optim.step, tx)
        theirs, ours, update = rule.init(params), None, rule.update
        if name in [*IN_ROWS, *IN_FORMS, "within steps"]:  # of which others have no operation
            update, step = jax.jit(update), tp.jit(step)
        for time in range(4):
            if time == 2:
                ours, after = optim.from_optax(tx, theirs, model), eqx.combine(params, model)
                assert_same(optim.to_optax(tx, ours, like=theirs), theirs, identity=False)
                assert int(ours.counts[0]) == {"momentum": 0, "within steps": 1}.get(name, 2)
            if time >= 2:
                after, ours = step(grads_of(after), ours, after)
            updates, theirs = update(grads_of(params), theirs, params)
            params = jax.tree.map(added, params, updates)
        same = assert_same if name in SAME else assert_close  # of another program XLA rounds otherwise
        same([after["w"], after["b"]], [params["w"], params["b"]])
        back = optim.to_optax(tx, ours, rule.init(begin))
        assert jax.tree.structure(back) == jax.tree.structure(theirs)
        assert_same(optim.from_optax(tx, back, model).runs, ours.runs)


NAMED = [ramp(2), {"a.w": ramp(2), "a": ramp(3)}, [ramp(2), [ramp(3), ramp(1)]]]


@pytest.mark.parametrize(("rule", "model"), [(MEMORY, {"w": ramp(2, 3), "b": ramp(3)}), *((RATES, m) for m in NAMED)])
def test_any_names_go_over_and_the_memory_of_lbfgs_as_a_whole(rule, model):
    theirs, tx = jax.tree.map(lambda leaf: np.asarray(leaf) + 1, rule.init(model)), optim.trainable(rule)
    state = optim.from_optax(tx, theirs, model)
    assert_same((state.runs[0], optim.to_optax(tx, state, rule.init(model))), (theirs, theirs), identity=False)


def test_a_restored_state_may_be_dictionaries_of_numpy():
    (made, *_), model = ADAM.init(arrays_of(whole())), whole()
    restored = {"0": {"count": np.int32(5), "mu": jax.tree.map(np.asarray, made.mu), "nu": made.nu}}
    assert_same(optim.from_optax(WITH_ADAM, restored, model).runs[0][0], made._replace(count=jnp.array(5, jnp.int32)))


def test_ties_are_one_if_their_moments_are():
    shared, moment, rule = ramp(2, 3), ramp(2, 3, start=3.0), ADAM
    model = {"embed": shared, "head": shared, "decoder": shared.T}
    layout = tp.layout(model, ties={"decoder": ("embed", jnp.transpose)})
    tx, theirs = optim.trainable(rule, layout), rule.init(model)
    theirs = (theirs[0]._replace(mu={"embed": moment, "head": moment, "decoder": moment.T}), *theirs[1:])
    state = optim.from_optax(tx, theirs, model)
    assert_same(state.runs[0][0].mu, {"embed": moment, "head": None, "decoder": None})
    assert_same(optim.to_optax(tx, state, rule.init(model)), theirs, identity=False)  # each has a buffer of its own
    canonical = tp.partition(model, layout)[0]  # there is nothing at the aliases
    assert_same(optim.to_optax(tx, state, rule.init(canonical)), state.runs[0])
    assert_same(optim.from_optax(tx, state.runs[0], model).runs, state.runs)
    for path in ("head", "decoder"):
        apart = (theirs[0]._replace(mu=theirs[0].mu | {path: theirs[0].mu[path] + 1}), *theirs[1:])
        with pytest.raises(ValueError, match=rf"'{path}' is tied to 'embed'.* at '0.mu.{path}' than at '0.mu.embed'"):
            optim.from_optax(tx, apart, model)


def test_what_is_frozen_has_on_the_way_back_what_the_state_holds_and_its_group_is_dropped_on_the_way_here():
    model = [ramp(2), ramp(3)]
    rule = optim.groups({"0": optax.sgd(0.1, momentum=0.9)}, default=optax.adam(0.1))
    assert optim.from_optax(optim.trainable(rule, "0"), rule.init(model), model).layout.paths == ("0",)
    model, rule = whole(), optax.adam(0.1)
    tx = optim.trainable(rule)
    state = optim.from_optax(tx, jax.tree.map(lambda leaf: leaf + 1, rule.init(arrays_of(model))), model)
    held = optim.set_trainable(tx, state, model, "!b")
    back = optim.to_optax(tx, held, rule.init(arrays_of(model)))
    assert_same(back[0].mu, state.runs[0][0].mu)
    _, stepped = optim.step(tx, grads_of(model), held, model)
    apart = optim.set_trainable(tx, stepped, model)
    with pytest.raises(ValueError, match=r"have not taken their steps together \(mean, w 2; b\.0 1\)"):
        optim.to_optax(tx, apart, rule.init(arrays_of(model)))


def run_apart():
    """Groups that have not run alike, as one."""
    theirs = theirs_of(parted(RATES, RATES, ("body", "head", "frozen")))
    theirs.inner_states["head"].inner_state.hyperparams["learning_rate"] = jnp.float32(0.2)
    return optim.from_optax(optim.trainable(RATES, "!mean"), theirs, whole())


theirs_of = lambda rule, **others: rule.init(arrays_of(whole()) | others)
taken = lambda tx, rule, **others: optim.from_optax(tx, theirs_of(rule, **others), whole())
given = lambda rule, **others: optim.to_optax(WITH_ADAM, WITH_ADAM.init(whole()), theirs_of(rule, **others))
SGD = optax.sgd(0.1, momentum=0.9)
APART = r"other values at 'inner_states\.body\..*than at 'inner_states\.head\..*keep them apart"
LOW = optax.adam(0.1, mu_dtype=jnp.bfloat16)
REFUSED = [
    (run_apart, ValueError, APART),
    (lambda: taken(WITH_ADAM, SGD), ValueError, r"nothing at 0\.count, 0\.mu\.b\.0.*but has 0\.trace\.b\.0"),
    (lambda: taken(WITH_ADAM, LOW), ValueError, r"bfloat16\[3\] at '0\.mu\.b\.0', .*keeps float32\[3\]"),
    (lambda: taken(optim.trainable(MEMORY, "!mean"), MEMORY), ValueError, "L-BFGS remembers steps of all parameters"),
    (lambda: taken(WITH_ADAM, ADAM, mean=ramp(4)), ValueError, r"float32\[4\] at '0\.mu\.mean', .* keeps float32\[3\]"),
    (lambda: taken(WITH_ADAM, optim.trainable(ADAM)), ValueError, "already a state of a transformation over models"),
    (lambda: jax.jit(lambda x: taken(WITH_ADAM, ADAM, mean=x).runs)(ramp(3)), ValueError, r"outside of jax\.jit"),
    (lambda: taken(ADAM, ADAM), TypeError, r"expected optim\.trainable\(\.\.\.\)"),
    (lambda: given(ADAM, mean=None), ValueError, "has 0.mu.mean, 0.nu.mean, for which the other one has no place"),
    (lambda: given(SGD), ValueError, r"nothing at 0\.trace\.b\.0, .* but has 0\.count, 0\.mu\.b\.0"),
]


@pytest.mark.parametrize(("call", "error", "words"), REFUSED)
def test_what_is_refused(call, error, words):
    with pytest.raises(error, match=words):
        call()


def test_of_a_model_that_trains_nothing_nothing_goes_over():
    theirs = ADAM.init(arrays_of(whole()))
    with pytest.warns(UserWarning, match="nothing is trained"):
        nothing = optim.from_optax(WITH_ADAM, theirs, {"n": 1})
    assert nothing.runs == ()
    assert_same(optim.to_optax(WITH_ADAM, nothing, theirs), theirs)
