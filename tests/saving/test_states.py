"""Optimisers and averages in a file: training goes on as if it had not stopped; what another process does."""

import dataclasses
import functools
import json
import pathlib
import subprocess
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import treeparams as tp
from treeparams import optim, saving

from ..zoo import ramp
from .test_saving import assert_bits

pytestmark = pytest.mark.usefixtures("standard_promotion")
RULE = optax.sgd(optax.linear_schedule(0.1, 0.0, 20), momentum=0.9)
TXS = {
    "trainable": optim.trainable(RULE),
    "flat": optim.trainable(RULE, form="vector"),
    "stacked": optim.trainable(RULE, form="stacks"),
}


# -- Runs in all forms of the optimiser, in one program ---------------------------------------------------------------


def begun(seed):
    """A tied model, an optimiser, a key and an average, for each form of the optimiser."""
    runs = {}
    for name, tx in TXS.items():
        shared = ramp(2, 3, start=seed)
        model = {"embed": shared, "head": shared, "bias": ramp(3, start=seed), "n": jnp.asarray(np.int32(seed))}
        runs[name] = {
            "model": model,
            "state": tx.init(model),
            "average": tp.Ema(model, 0.5),
            "key": jax.random.key(seed),
        }
    return runs


@tp.jit
def step(runs):
    done = {}
    for name, run in runs.items():
        model, (key, now) = run["model"], jax.random.split(run["key"])
        noise = jax.random.normal(now, (3,))
        grads = {"embed": jnp.cos(model["embed"]) * noise[None], "bias": noise}
        model, state = optim.step(TXS[name], grads, run["state"], model)
        model |= {"n": model["n"] + 1}
        done[name] = {"model": model, "state": state, "average": run["average"].update(model), "key": key}
    return done


def later(state):
    """The state after a step, made without one."""
    after = lambda leaf: jnp.asarray(np.asarray(leaf) + 1)
    counts = [after(count) if run < len(state.runs) else count for run, count in enumerate(state.counts)]
    return dataclasses.replace(state, runs=jax.tree.map(after, state.runs), counts=tuple(counts))


def go_on(folder):
    """In another process: the runs as they were saved, one step, and saved again."""
    runs = saving.load(f"{folder}/before", begun(5))
    saving.save(f"{folder}/after", step(runs))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Runs in the middle of their training, and the folder in which they are saved."""
    folder, runs = tmp_path_factory.mktemp("states"), begun(3)
    for form, tx in TXS.items():
        run = runs[form]
        state = later(later(run["state"]))
        for trainable in ("bias", None):  # a part is frozen for a step, and thawed
            state = later(optim.set_trainable(tx, state, run["model"], trainable))
        runs[form] = run | {"state": state}
    saving.save(folder / "before", runs)
    return folder, runs


@pytest.fixture(scope="module")
def in_another_process(trained, tmp_path_factory, request):
    """What one process writes that does all that another process has to do here: starting it takes longest."""
    folders, is_long = [str(tmp_path_factory.mktemp("writing")) for _ in range(2)], request.config.getoption("--long")
    calls = (
        "from tests.saving.test_writing import processes_at_one_file, saves_that_end_early\n"
        f"saves_that_end_early({folders[0]!r}, {is_long})\n"
        f"processes_at_one_file({folders[1]!r}, {is_long})\n"
        f"from tests.saving.test_states import go_on; go_on({str(trained[0])!r})"
    )
    root = pathlib.Path(__file__).parents[2]
    child = subprocess.run([sys.executable, "-W", "ignore", "-c", calls], cwd=root, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return [json.loads(line) for line in child.stdout.splitlines()]


def test_training_goes_on_in_another_process_bit_for_bit(trained, in_another_process):
    folder, runs = trained
    assert [[int(count) for count in run["state"].counts] for run in runs.values()] == [[4, 3]] * 3
    want = step(runs)
    assert assert_bits(saving.load(folder / "after", want), want) > 30


def test_a_save_that_is_killed_or_finds_the_disk_full_leaves_the_old_file_or_the_new(in_another_process):
    found = in_another_process[0]
    *killed, done = [each for each in found["killed"] if each[0] != "SIGXFSZ"]
    assert len(killed) >= 20
    assert done == ["done", 2, 1]
    assert {ending for ending, *_ in killed} == {"SIGKILL"}
    assert [fill for _, fill, _ in killed] == sorted(fill for _, fill, _ in killed)  # the old one first, then the new
    assert {fill for _, fill, _ in killed} == {1, 2}
    assert {left for *_, left in killed} == {1, 2}  # what is left of some is gone after the next save
    in_a_write = [each for each in found["killed"] if each[0] == "SIGXFSZ"]
    assert in_a_write == [["SIGXFSZ", 1, 2]] * 5
    assert found["full"] == [["EFBIG", 1, 1]] * 5


def test_processes_that_save_to_one_path_or_read_from_one_file(in_another_process):
    found = in_another_process[1]
    errors, values, left = found["savers"]
    assert (errors, left) == (0, ["shared"])
    assert values in [[[number]] * 3 for number in range(8)]  # all of one saver
    assert found["readers"] == 0


# -- Histories ---------------------------------------------------------------------------------------------------------


MODEL = {
    "a": ramp(2),
    "b": [ramp(2, 2), ramp(2, start=3)],
    "*.c": ramp(),
    "d": eqx.nn.Linear(2, 1, key=jax.random.key(0)),
}
MODEL["tied"] = MODEL["b"][1]
SLOTS = tp.layout(MODEL).paths
NONE = jax.tree.map(lambda _: False, MODEL)


def with_ties(paths):
    """A tie is trained as a whole."""
    return sorted(paths | {"tied"}) if "b.1" in paths else sorted(paths)


RULES = {
    "momentum": lambda: RULE,
    "clip": lambda: optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.01)),  # the histories share its last norm
    "master": lambda: optim.master(optax.adam(0.01)),
    "groups": lambda: optim.groups({"b": optax.sgd(0.1, momentum=0.9)}, default=optax.adam(0.01)),
    "rows": lambda: optim.per_leaf(optax.adafactor(0.01, min_dim_size_to_factor=2)),
}
SEVERAL = [MODEL, MODEL | {"a": ramp(2, dtype=jnp.bfloat16)}]
_EACH, _PART = '"*.c"', {"a", "b.0", '"*.c"'}
# The rule, its form, and what trained first and then, each with whether a step was taken before; whether a parameter is
# narrow; and the state into which the file is loaded.
RUNS = [
    ("momentum", "tree", set(SLOTS), [], False, "shapes"),
    ("momentum", "vector", {_EACH}, [], False, "everything"),  # a scalar is a row of its vector, too
    ("clip", "tree", {"a"}, [({"b.0"}, True), (set(SLOTS), False), (set(), False)], True, "a part"),
    ("clip", "vector", {"b.1", "d.weight"}, [({"b.1", "a", "b.0"}, True), ({"a", "d.weight"}, False)], True, "a part"),
    ("master", "stacks", _PART, [({_EACH}, True), ({"a"}, True)], True, "everything"),
    ("master", "tree", {"a", "b.1"}, [({"a"}, True), (set(SLOTS), True)], True, "shapes"),
    ("groups", "tree", {"b.0", "a"}, [({"a", "b.1"}, True), ({"b.0"}, True)], False, "a part"),
    ("groups", "stacks", _PART, [({"b.0"}, True), (set(SLOTS), True)], False, "shapes"),
    ("rows", "stacks", _PART, [({_EACH, "b.1"}, True), ({"a"}, True), (set(SLOTS), True)], True, "a part"),
]


@pytest.mark.filterwarnings("ignore:'b.1' and 'tied' were one array")  # of shapes alone they are not
@pytest.mark.parametrize(("rule", "form", "first", "then", "of_narrow", "started"), RUNS)
def test_a_state_is_restored_whatever_was_frozen_and_thawed(tmp_path, rule, form, first, then, of_narrow, started):
    path, model = tmp_path / "states", SEVERAL[of_narrow]
    make = functools.partial(optim.trainable, form=form)
    tx = make(RULES[rule]())
    state = optim.set_trainable(tx, tx.init(model), model, with_ties(first), reset=True)
    for chosen, is_stepped in then:
        state = later(state) if is_stepped else state
        state = optim.set_trainable(tx, state, model, with_ties(chosen) or NONE)
    saving.save(path, {"state": state})
    start = make(RULES[rule](), "b.0" if started == "a part" else None).init
    like = eqx.filter_eval_shape(start, model) if started == "shapes" else start(model)
    got = saving.load(path, {"state": like})["state"]
    # It is the same state, whatever the order of its histories, and in what follows too.
    for change in (lambda state: state, lambda state: optim.set_trainable(tx, later(state), model)):
        ours, theirs = (by_history(change(each)) for each in (got, state))
        assert ours.keys() == theirs.keys()
        for each, its in theirs.items():
            np.testing.assert_equal(list(map(np.asarray, ours[each])), list(map(np.asarray, its)))


def by_history(state):
    """The leaves and the count of each history, by what it is of."""
    roles = state.roles
    histories = [*((True, *its) for its in roles.running), *((False, *its) for its in roles.held)]
    leaves = [jax.tree.leaves(each) for each in (*state.runs, *state.held)]
    return {its: [*own, count] for its, own, count in zip(histories, leaves, state.counts, strict=True)}


@pytest.mark.parametrize("form", ["tree", "stacks"])
def test_the_state_of_a_net_of_flax_is_restored_whatever_was_frozen(form, tmp_path):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Linear(2, 3, rngs=rngs), nnx.Linear(3, 1, rngs=rngs)

    _, params = nnx.split(Net(nnx.Rngs(0)))
    tx = optim.trainable(optax.adam(0.1), form=form)
    model, state = optim.step(tx, tp.copy(params), tx.init(params), params)
    everything = tp.layout(model)
    frozen = optim.set_trainable(tx, state, model, tp.layout(model, freeze="a"))
    for held, trained in (
        (frozen, ("b.bias", "b.kernel")),
        (optim.set_trainable(tx, frozen, model, everything), everything.paths),
    ):
        saving.save(tmp_path / "run", held)
        loaded = saving.load(tmp_path / "run", tx.init(params))
        assert loaded.layout.paths == trained
        assert not tp.diff(loaded, held)


@pytest.mark.parametrize("form", ["tree", "vector", "stacks"])
def test_a_rule_whose_state_is_the_gradients_alone(form, tmp_path):
    zeros = lambda params: jax.tree.map(jnp.zeros_like, params)
    tx = optim.trainable(optax.GradientTransformation(zeros, lambda updates, state, _: (updates, updates)), form=form)
    model = {"a": ramp(3), "b": ramp(2)}
    held = optim.set_trainable(tx, optim.step(tx, tp.copy(model), tx.init(model), model)[1], model, "a")
    saving.save(tmp_path / "run", held)
    assert not tp.diff(saving.load(tmp_path / "run", tx.init(model)), held)
