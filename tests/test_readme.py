"""The README does what it says."""

import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving, sharding

from .blocks import run

README = pathlib.Path(__file__).parent.parent / "README.md"


@pytest.mark.usefixtures("standard_promotion")
def test_the_code_runs_and_prints_what_is_shown():
    namespace, blocks = run(README)
    assert all(block.shown for block in blocks)
    agent, target = namespace["agent"], namespace["target"]
    assert agent.mean.tolist() == target.mean.tolist() == [0, 1]
    moved = jnp.abs(agent.q.layers[0].weight - target.q.layers[0].weight)
    assert 1e-4 < moved.max() < 2e-3  # one step of Adam, of which the target has taken 0.005
    assert namespace["vector"].shape == (11,)


class Net(eqx.Module):
    embed: eqx.nn.Linear
    head: eqx.nn.Linear


@pytest.mark.usefixtures("standard_promotion")
def test_what_it_says_to_write_can_be_written(tmp_path):
    keys, path = jax.random.split(jax.random.key(0)), tmp_path / "net.safetensors"
    net = Net(*[eqx.nn.Linear(3, 3, key=key) for key in keys])
    adam, batch = optax.adam(1e-2), jnp.ones((2, 3))
    trainable = optim.trainable(adam)

    def step(net, state, x):
        grads = tp.grad(lambda net: jnp.sum(jax.vmap(net.embed)(x) ** 2))(net)
        return optim.step(trainable, grads, state, net)

    namespace = {"eqx": eqx, "jax": jax, "jnp": jnp, "optax": optax, "tp": tp, "optim": optim, "saving": saving}
    namespace |= {"Net": Net, "net": net, "adam": adam, "path": path, "batch": batch, "step": step}
    namespace |= {"sharding": sharding, "mesh": jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))}
    namespace |= {"loss": lambda net, x: jnp.sum(jax.vmap(net.embed)(x) ** 2)}
    namespace |= {"update": lambda carry, x: (step(*carry, x), None), "batches": jnp.stack([batch] * 3)}
    rows = re.search(r"^\| You want to .*?\n\n", README.read_text(), re.M | re.S)[0].splitlines()[2:-1]
    found = {}
    for row in rows:
        wanted, code = re.match(r"\| (.*?) \| (.*) \|$", row).groups()
        for line in re.findall("`(.+?)`", code):
            statement = line if re.match(r"\w+ = ", line) else f"found = {line}"
            exec(statement.replace("found = sharding.plan", "plan = sharding.plan"), namespace)
            found[wanted] = namespace.get("found")
        if wanted == "train a part":
            assert namespace["tx"].init(net).layout.paths == ("head.weight", "head.bias")
            namespace["state"] = namespace["tx"].init(net)
        if wanted == "then everything":
            assert found[wanted].layout.paths == ("embed.weight", "embed.bias", "head.weight", "head.bias")
            namespace |= {"tx": trainable, "state": trainable.init(net)}
        elif "tie" in code:
            namespace["state"] = trainable.init(namespace["net"])
    assert len(found) == 8
    assert namespace["net"].head.weight is namespace["net"].embed.weight
    assert jax.tree.leaves(found["use several devices"][0](net))
    loaded, state = found["write a checkpoint, resume"]
    assert (loaded.head.bias == net.head.bias).all()
    assert state.layout == namespace["state"].layout
    assert found["see which parameters your step trains"].paths == ("embed.weight", "embed.bias", "head.bias")


def test_it_is_short():
    text = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(re.sub(r"\]\(\S+\)", "]", text).split()) <= 450  # beside code and addresses
