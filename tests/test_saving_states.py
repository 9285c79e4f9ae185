"""Optimisers and averages in a file: training goes on as if it had not stopped, in another process too."""

import dataclasses
import pathlib
import re
import subprocess
import sys

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from .test_saving import assert_bits
from .zoo import assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
RULE = optax.sgd(optax.linear_schedule(0.1, 0.0, 20), momentum=0.9)
TXS = {"trainable": optim.trainable(RULE), "flat": optim.flat(RULE), "stacked": optim.stacked(RULE)}
forms = pytest.mark.parametrize("form", TXS)


# -- A run in three forms of the optimiser, in one program -------------------------------------------------------------


def begun(seed):
    """A tied model, an optimiser, a key and an average, three times."""
    runs = {}
    for name, tx in TXS.items():
        shared = ramp(2, 3, start=seed)
        model = {"embed": shared, "head": shared, "bias": ramp(3, start=seed), "n": jnp.asarray(np.int32(seed))}
        runs[name] = {
            "model": model, "state": tx.init(model), "average": tp.Ema(model, 0.5), "key": jax.random.key(seed)
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


def choose(runs, trainable):
    choice = lambda name, run: optim.set_trainable(TXS[name], run["state"], run["model"], trainable)
    return {name: run | {"state": choice(name, run)} for name, run in runs.items()}


def state_of_calls(calls, tx, model):
    """The state that the calls in an error make."""
    scope = {"jax": jax, "tx": tx, "model": model, "optim": optim}
    exec(calls, scope)
    return scope["state"]


def go_on(folder, *names):
    """In another process: each run as it was saved, one step, and saved again."""
    for name in names:
        runs = begun(5)
        try:
            runs = saving.load(f"{folder}/{name}", runs)
        except ValueError as error:
            found = re.findall(r"the state at '(\w+)\.state' .*\n((?:state = .*\n?)+)", str(error))
            states = {form: state_of_calls(calls, TXS[form], runs[form]["model"]) for form, calls in found}
            like = {form: runs[form] | {"state": state} for form, state in states.items()}
            runs = saving.load(f"{folder}/{name}", like)
        saving.save(f"{folder}/{name} later", step(runs))


def test_training_goes_on_in_another_process_bit_for_bit(tmp_path):
    runs = {"as begun": step(step(begun(3)))}
    runs["thawed"] = choose(step(choose(runs["as begun"], "bias")), None)
    assert [int(count) for count in runs["thawed"]["flat"]["state"].counts] == [3, 2]
    for name, each in runs.items():
        saving.save(tmp_path / name, each)
    call = f"from tests.test_saving_states import go_on; go_on({str(tmp_path)!r}, *{[*runs]})"
    root = pathlib.Path(__file__).parents[1]
    child = subprocess.run([sys.executable, "-c", call], cwd=root, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    for name, each in runs.items():
        want = step(each)
        assert assert_bits(saving.load(tmp_path / f"{name} later", want), want) > 30


# -- Histories ---------------------------------------------------------------------------------------------------------


MODEL = {"a": ramp(2), "b": [ramp(2, 2), ramp(2, start=3)], "*.c": ramp(), "d": eqx.nn.Linear(2, 1, key=jax.random.key(0))}
MODEL["tied"] = MODEL["b"][1]
SLOTS = tp.layout(MODEL).paths
NONE = jax.tree.map(lambda _: False, MODEL)


def with_ties(paths):
    """A tie is trained as a whole."""
    return sorted(paths | {"tied"}) if "b.1" in paths else sorted(paths)


def later(state):
    """The state after a step, made without one."""
    after = lambda leaf: jnp.asarray(np.asarray(leaf) + 1)
    counts = [after(count) if run < len(state.runs) else count for run, count in enumerate(state.counts)]
    return dataclasses.replace(state, runs=jax.tree.map(after, state.runs), counts=tuple(counts))


@forms
@hypothesis.settings(max_examples=12, deadline=None)
@hypothesis.given(
    first=st.sets(st.sampled_from(SLOTS), min_size=1),
    then=st.lists(st.tuples(st.sets(st.sampled_from(SLOTS)), st.booleans()), max_size=4),
)
@hypothesis.example(first={"a"}, then=[({"b.0"}, True), (set(SLOTS), False), (set(), False)])
@hypothesis.example(first={"a", "b.1"}, then=[({"b.0", "a"}, True), ({"b.1", '"*.c"'}, True), ({"a"}, True)])
def test_the_calls_in_the_error_make_a_state_that_fits(tmp_path_factory, form, first, then):
    path, tx = tmp_path_factory.getbasetemp() / f"states of {form}", TXS[form]
    state = optim.set_trainable(tx, tx.init(MODEL), MODEL, with_ties(first), reset=True)
    for chosen, is_stepped in then:
        state = later(state) if is_stepped else state
        state = optim.set_trainable(tx, state, MODEL, with_ties(chosen) or NONE)
    saving.save(path, {"state": state})
    like = tx.init(MODEL)
    try:
        got = saving.load(path, {"state": like})["state"]
    except ValueError as error:
        assert "the state at 'state' has other histories than the tree's: of " in str(error)
        like = state_of_calls(str(error)[str(error).index("state = ") :], tx, MODEL)
        got = saving.load(path, {"state": like})["state"]
    else:
        assert like.roles == state.roles
    # It is the same state, and in what follows too.
    for change in (lambda state: state, lambda state: optim.set_trainable(tx, later(state), MODEL)):
        leaves = jax.tree.leaves(change(got))
        assert assert_same(leaves, jax.tree.leaves(change(state))) == len(leaves)
