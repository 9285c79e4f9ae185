"""How many Python functions of this library a call runs, in how many files: what a reader has to follow."""

import json
import pathlib
import subprocess
import sys

import pytest

# In a process of its own, without the run-time checks of annotations, which are functions too. The second model is of
# classes that have been met, the third has been met itself.
CODE = """
import json, os, sys
import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp

HERE = os.path.dirname(tp.__file__)

def calls(f):
    found = []
    note = lambda frame, event, _: found.append(frame.f_code.co_filename) if event == "call" else None
    sys.setprofile(note)
    try:
        f()
    finally:
        sys.setprofile(None)
    ours = [name for name in found if name.startswith(HERE)]
    return len(ours), len(set(ours))

import optax
from treeparams import optim

mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
loss = lambda model, x: jnp.sum(model(x))
first = calls(lambda: tp.layout(mlp))
tp.grad(loss)(mlp, jnp.ones(2)), tp.ravel(mlp)
again = {
    "grad": calls(lambda: tp.grad(loss)(mlp, jnp.ones(2))),
    "ravel": calls(lambda: tp.ravel(mlp)),
    "partition": calls(lambda: tp.partition(mlp)),
}
tx, gradient = optim.trainable(optax.adam(1e-3)), tp.grad(loss)(mlp, jnp.ones(2))
state = tx.init(mlp)
_, state = tx.update(gradient, state, mlp)
again["update"] = calls(lambda: tx.update(gradient, state, mlp))
leaf = tp.jit(lambda tree: jax.tree.leaves(tree)[:1])
for name, tree in {"state": state, "Ema": tp.Ema(mlp, 0.9), "Rest": tp.partition(mlp)[1]}.items():
    leaf(tree), leaf(tree)
    again["jit of " + name] = calls(lambda: leaf(tree))
print(json.dumps({"layout, first time": first} | again))
"""

LIMITS = {"layout, first time": (120, 10), "grad": (30, 6), "ravel": (28, 8), "partition": (24, 6), "update": (60, 8)}
LIMITS |= {f"jit of {name}": (45, 5) for name in ("state", "Ema", "Rest")}


@pytest.fixture(scope="module")
def found():
    root = pathlib.Path(__file__).parent.parent
    printed = subprocess.run([sys.executable, "-c", CODE], capture_output=True, text=True, check=True, cwd=root).stdout
    return json.loads(printed)


@pytest.mark.parametrize("verb", LIMITS)
def test_a_call_is_short_to_follow(found, verb):
    functions, files = found[verb]
    assert functions <= LIMITS[verb][0]
    assert files <= LIMITS[verb][1]
