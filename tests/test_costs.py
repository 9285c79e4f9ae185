"""How many Python functions of this library a call runs: few, and as many for many leaves."""

import gc
import os
import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving
from treeparams._slots import accidents

from . import type_checks
from .zoo import ramp

HERE = os.path.dirname(tp.__file__)
INLINED = ("<listcomp>", "<dictcomp>", "<setcomp>")  # from Python 3.12 on they are no calls


def calls(f):
    """How many functions a call runs."""
    seen = []

    def note(frame, event, _):
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(HERE) and code.co_name not in INLINED:
            seen.append(code)

    gc.disable()  # a collection lets go of structures, which is no part of a call
    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
        gc.enable()
    return len(seen)


def of_optim():
    """Of two arrays: what is straight, and how far a thaw goes."""
    pair, tx = {"cost_a": ramp(2), "cost_b": ramp(2, 2)}, optim.trainable(optax.adam(1e-3))
    grads = jax.tree.map(jnp.copy, pair)
    _, state = tx.update(grads, tx.init(pair), pair)
    optim.step(tx, grads, state, pair)
    frozen = optim.set_trainable(tx, state, pair, "cost_a")
    firsts = {f"first init, {form}": optim.trainable(optax.adam(1e-3), form=form) for form in ("vector", "stacks")}
    return {
        "update": calls(lambda: tx.update(grads, state, pair)),
        "step": calls(lambda: optim.step(tx, grads, state, pair)),
        "set_trainable": calls(lambda: optim.set_trainable(tx, frozen, pair)),
        **{name: calls(lambda tx=tx: tx.init(pair)) for name, tx in firsts.items()},
    }


def of_saving(path):
    """Of two arrays, and of their state, the second time."""
    pair, new = {"cost_a": ramp(2), "cost_b": ramp(3)}, {"cost_c": ramp(2), "cost_d": ramp(3)}
    tx, renamed = optim.trainable(optax.adam(1e-3)), {"cost_a": "cost_c", "cost_b": "cost_d"}
    state, like, plans = tx.init(pair), tx.init(new), []
    verbs = {
        "save": lambda: saving.save(path, pair),
        "load": lambda: saving.load(path, pair),
        "save, state": lambda: saving.save(path, state),
        "load, state": lambda: saving.load(path, state),
        "plan": lambda: plans.append(saving.plan(pair, new, rename=renamed)),
        "Plan.state": lambda: plans[-1].state(state, like),
    }
    return [{name: calls(verb) for name, verb in verbs.items()} for _ in range(2)][1]


def of_all(leaves):
    net = {f"cost_{i:02}": ramp(2, 2) if i % 2 else ramp(2) for i in range(leaves)} | {"name": "net"}
    loss = lambda net: sum(jnp.sum(leaf) for name, leaf in net.items() if name != "name")
    found = {"layout, first time": calls(lambda: tp.layout(net))}
    tp.ravel(net)
    gradient = tp.grad(loss)(net)
    found["grad"] = calls(lambda: tp.grad(loss)(net))
    found["ravel"] = calls(lambda: tp.ravel(net))
    found["partition"] = calls(lambda: tp.partition(net))
    for form in ("tree", "vector", "stacks"):
        tx = optim.trainable(optax.sgd(1e-3, momentum=0.9), form=form)  # of few operations, which are programs
        _, state = tx.update(gradient, tx.init(net), net)
        found[f"update, {form}"] = calls(lambda tx=tx, state=state: tx.update(gradient, state, net))
    leaf = tp.jit(lambda tree: jax.tree.leaves(tree)[:1])
    for name, tree in {"state": state, "Ema": tp.Ema(net, 0.9), "Rest": tp.partition(net)[1]}.items():
        leaf(tree), leaf(tree)
        found[f"jit of {name}"] = calls(lambda tree=tree: leaf(tree))
    return found


# Twice of what the calls took when they were first counted: no more than that, for code that reads better.
LIMITS = {"grad": 60, "ravel": 56, "partition": 44, "update, tree": 80, "update, vector": 104, "update, stacks": 150}
LIMITS |= {f"jit of {name}": 90 for name in ("state", "Ema", "Rest")}
OF_OPTIM = {"update": 55, "step": 85, "set_trainable": 250, "first init, vector": 1900, "first init, stacks": 2300}
OF_SAVING = {"save": 90, "load": 100, "save, state": 220, "load, state": 340, "plan": 200, "Plan.state": 250}
OF_FEW = {"layout, first time": 240} | LIMITS | OF_OPTIM | OF_SAVING


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    path = tmp_path_factory.mktemp("costs") / "run"
    # As in a process of a user that has met no tie; of all that are met from then on each trace takes note.
    with type_checks.off(), jax.numpy_dtype_promotion("standard"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(accidents, "changes", 0)
        tp.layout({"cost": ramp(2), "name": "net"})  # the next ones are of classes that have been met
        return of_all(8) | of_optim() | of_saving(path), of_all(48)


@pytest.mark.parametrize("verb", OF_FEW)
def test_a_call_is_short_to_follow(found, verb):
    assert found[0][verb] <= OF_FEW[verb]


@pytest.mark.parametrize("verb", LIMITS)
def test_a_call_is_as_short_for_many_leaves(found, verb):
    few, many = found
    assert many[verb] <= few[verb]
