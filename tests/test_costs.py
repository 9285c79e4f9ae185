"""How many Python functions of this library a call runs, and in how many files: few, and as many for many leaves."""

import json
import pathlib
import subprocess
import sys

import pytest

# In a process of its own, without the run-time checks of annotations, which are functions too. The second model is of
# classes that have been met, the third has been met itself.
CODE = """
import gc, json, os, sys
import jax, jax.numpy as jnp, optax, tempfile, treeparams as tp
from treeparams import optim, saving

HERE = os.path.dirname(tp.__file__)

def calls(f):
    found = []
    inlined = ("<listcomp>", "<dictcomp>", "<setcomp>")  # from Python 3.12 on they are no calls
    is_call = lambda frame, event: event == "call" and frame.f_code.co_name not in inlined
    note = lambda frame, event, _: found.append(frame.f_code.co_filename) if is_call(frame, event) else None
    gc.disable()  # a collection lets go of structures, which is no part of a call
    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
        gc.enable()
    own = [name for name in found if name.startswith(HERE)]
    return len(own), len(set(own))

def of_optim():  # of two arrays: what is straight, and how far a thaw goes
    pair = {"a": jnp.ones(2), "b": jnp.ones((2, 2))}
    grads, tx = jax.tree.map(jnp.ones_like, pair), optim.trainable(optax.adam(1e-3))
    _, state = tx.update(grads, tx.init(pair), pair)
    optim.step(tx, grads, state, pair)
    frozen = optim.set_trainable(tx, state, pair, "a")
    found = {
        "update": calls(lambda: tx.update(grads, state, pair)),
        "step": calls(lambda: optim.step(tx, grads, state, pair)),
        "set_trainable": calls(lambda: optim.set_trainable(tx, frozen, pair)),
    }
    for form in ("vector", "stacks"):
        found[f"first init, {form}"] = calls(lambda: optim.trainable(optax.adam(1e-3), form=form).init(pair))
    return found

def of_saving():  # of two arrays, and of their state
    pair, new = ({name: jnp.ones(2 + i) for i, name in enumerate(names)} for names in ("ab", "cd"))
    path, tx = os.path.join(tempfile.mkdtemp(), "run"), optim.trainable(optax.adam(1e-3))
    state, like, plans = tx.init(pair), tx.init(new), []
    for _ in range(2):
        found = {
            "save": calls(lambda: saving.save(path, pair)),
            "load": calls(lambda: saving.load(path, pair)),
            "save, state": calls(lambda: saving.save(path, state)),
            "load, state": calls(lambda: saving.load(path, state)),
            "plan": calls(lambda: plans.append(saving.plan(pair, new, rename={"a": "c", "b": "d"}))),
            "Plan.state": calls(lambda: plans[-1].state(state, like)),
        }
    return found

def of_all(leaves):
    net = {f"{i:02}": jnp.ones((2, 2) if i % 2 else 2) for i in range(leaves)} | {"name": "net"}
    loss = lambda net: sum(jnp.sum(leaf) for name, leaf in net.items() if name != "name")
    first = calls(lambda: tp.layout(net))
    tp.grad(loss)(net), tp.ravel(net)
    found = {
        "grad": calls(lambda: tp.grad(loss)(net)),
        "ravel": calls(lambda: tp.ravel(net)),
        "partition": calls(lambda: tp.partition(net)),
    }
    gradient = tp.grad(loss)(net)
    for form in ("tree", "vector", "stacks"):
        tx = optim.trainable(optax.sgd(1e-3, momentum=0.9), form=form)  # of few operations, which are programs
        state = tx.init(net)
        _, state = tx.update(gradient, state, net)
        found[f"update, {form}"] = calls(lambda: tx.update(gradient, state, net))
    leaf = tp.jit(lambda tree: jax.tree.leaves(tree)[:1])
    for name, tree in {"state": state, "Ema": tp.Ema(net, 0.9), "Rest": tp.partition(net)[1]}.items():
        leaf(tree), leaf(tree)
        found[f"jit of {name}"] = calls(lambda: leaf(tree))
    return first, found

of_all(4)
(first, few), (_, many) = of_all(8), of_all(48)
print(json.dumps({"few": few | {"layout, first time": first} | of_optim() | of_saving(), "many": many}))
"""

# Twice of what the calls took when they were first counted: no more than that, for code that reads better.
LIMITS = {"layout, first time": 240, "grad": 60, "ravel": 56, "partition": 44}
LIMITS |= {"update, tree": 80, "update, vector": 104, "update, stacks": 150}
LIMITS |= {f"jit of {name}": 90 for name in ("state", "Ema", "Rest")}
# In how many files, as it is: whoever follows a call reads no more of them, beside that of the answer to a slip.
FILES = {"layout, first time": 10, "grad": 7, "ravel": 8, "partition": 5, "step": 10}
OF_OPTIM = {"update": 55, "step": 85, "set_trainable": 250, "first init, vector": 1900, "first init, stacks": 2300}
OF_SAVING = {"save": 90, "load": 100, "save, state": 220, "load, state": 340, "plan": 200, "Plan.state": 250}


@pytest.fixture(scope="module")
def found():
    root = pathlib.Path(__file__).parent.parent
    printed = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=root).stdout
    return json.loads(printed)


@pytest.mark.parametrize("verb", LIMITS | OF_OPTIM | OF_SAVING)
def test_a_call_is_short_to_follow(found, verb):
    calls, files = found["few"][verb]
    assert calls <= (LIMITS | OF_OPTIM | OF_SAVING)[verb]
    assert files <= FILES.get(verb, files)


@pytest.mark.parametrize("verb", [verb for verb in LIMITS if verb != "layout, first time"])
def test_a_call_is_as_short_for_many_leaves(found, verb):
    assert found["many"][verb][0] <= found["few"][verb][0]
