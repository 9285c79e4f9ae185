"""The README does what it says."""

import pathlib
import re

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

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
    tx, batch = optax.adam(1e-2), jnp.ones((2, 3))
    trainable = optim.trainable(tx)

    def step(net, state, x):
        grads = tp.grad(lambda net: jnp.sum(jax.vmap(net.embed)(x) ** 2))(net)
        return optim.step(trainable, grads, state, net)

    namespace = {"eqx": eqx, "jax": jax, "jnp": jnp, "optax": optax, "tp": tp, "optim": optim, "saving": saving}
    namespace |= {"Net": Net, "net": net, "tx": tx, "path": path, "batch": batch, "step": step}
    namespace |= {"update": lambda carry, x: (step(*carry, x), None), "batches": jnp.stack([batch] * 3)}
    rows = re.search(r"^\| You want to .*?\n\n", README.read_text(), re.M | re.S)[0].splitlines()[2:-1]
    found = {}
    for row in rows:
        wanted, code = re.match(r"\| (.*?) \| (.*) \|$", row).groups()
        for line in re.findall("`(.+?)`", code):
            if "set_trainable" in line:
                namespace["state"] = found[wanted].init(namespace["net"])
                namespace["tx"] = found[wanted]
            exec(f"found = {line}" if not line.startswith(("net =", "vector,")) else line, namespace)
            found[wanted] = namespace.pop("found", None)
        namespace["state"] = trainable.init(namespace["net"])
    assert len(found) == 7
    assert namespace["net"].head.weight is namespace["net"].embed.weight
    assert namespace["restructure"].layout.paths == ("embed.weight", "embed.bias", "head.bias")
    assert found["fine-tune the head, then everything"].layout.paths == ("embed.weight", "embed.bias", "head.bias")
    assert found["save all, load by name"].head.bias.tolist() == net.head.bias.tolist()
    assert found["see which parameters your step trains"].paths == ("embed.weight", "embed.bias", "head.bias")


def test_it_is_short():
    text = re.sub(r"^```.*?^```$", "", README.read_text(), flags=re.MULTILINE | re.DOTALL)
    assert len(re.sub(r"\]\(\S+\)", "]", text).split()) <= 600  # beside code and addresses
