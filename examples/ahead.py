"""What a step of training takes of each device: compiled from shapes alone, before there are so many devices.

    python examples/ahead.py [--parameters 1e9] [--devices 8 64] [--rule muon] [--split gradients] [--plot FILE]

The model is a plain decoder-only transformer of which no array is ever made, so it may be larger than this machine.
`sharding.plan` says by rules over paths where each parameter would lie, `sharding.make_step` makes the step of
training, and `sharding.ahead` compiles it: bytes at rest, temporary ones, what is moved between devices. XLA compiles
for as many devices of CPU as there would be; that number is fixed where JAX starts, so each has a process of its own.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array
from matplotlib.figure import Figure

import treeparams as tp
from treeparams import optim, sharding

HEAD = 64  # the width of a head of attention
SHARED = 512  # the width is a multiple of it, so that as many devices can share each matrix
OF_DEVICE = "parameters", "state", "gathered", "gradients", "activations"  # bytes
RULES = {"sgd": lambda: optax.sgd(0.1), "adamw": lambda: optax.adamw(1e-3)}
OF_MATRICES = {"adafactor": lambda: optax.adafactor(1e-3), "muon": lambda: optax.contrib.muon(1e-3)}


def transformer(layers: int, width: int, vocabulary: int) -> dict[str, Any]:
    """Its parameters, by their shapes."""
    leaf = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    layer = {name: leaf(width, width) for name in ("query", "key", "value", "out")}
    layer |= {"norm_attention": leaf(width), "norm_feed_forward": leaf(width)}
    layer |= {"up": leaf(width, 4 * width), "down": leaf(4 * width, width)}
    ends = {"embed": leaf(vocabulary, width), "norm": leaf(width), "head": leaf(width, vocabulary)}
    return {**ends, "layers": [layer] * layers}


def width_of(parameters: float, layers: int, vocabulary: int) -> int:
    """The width at which it has about so many parameters: 12 layers width^2 + 2 vocabulary width."""
    half = vocabulary / (12 * layers)
    width = math.sqrt(half**2 + parameters / (12 * layers)) - half
    return max(1, round(width / SHARED)) * SHARED


def loss(params: Any, restructure: tp.Restructure[Any], tokens: Array) -> Array:
    """The mean cross entropy of each token but the first."""
    x = restructure.part(params, "embed")[tokens[:, :-1]]
    x, _ = restructure.scan(lambda x, layer: (jax.checkpoint(block)(x, layer), None), x, params, "layers.*")
    logits = normed(x, restructure.part(params, "norm")) @ restructure.part(params, "head")
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]))


def block(x: Array, layer: Mapping[str, Array]) -> Array:
    before = normed(x, layer["norm_attention"])
    heads = (*x.shape[:-1], -1, HEAD)
    query, key, value = ((before @ layer[name]).reshape(heads) for name in ("query", "key", "value"))
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + attended.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(normed(x, layer["norm_feed_forward"]) @ layer["up"]) @ layer["down"]


def normed(x: Array, scale: Array) -> Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * scale[None, None]


def compiled(model: Any, rule: str, split: Any, tokens: int) -> sharding.Ahead:
    """A step over all devices of this process."""
    mesh, rules = jax.sharding.Mesh(jax.devices(), "data"), {"**": "split"}
    if rule in RULES:
        tx = RULES[rule]()
    else:
        # Matrices of layers have the rule for matrices, a row on each device at a time; the rest has Adam, as is usual.
        rules = {"layers.*.norm_*": "split", "layers.**": "owned", "**": "split"}
        of_matrices = optim.per_leaf(OF_MATRICES[rule](), at_once=len(jax.devices()))
        tx = optim.groups({"owned": of_matrices}, default=optax.adamw(1e-3))
    plan = sharding.plan(model, mesh, rules, form="stacks")
    init, step = sharding.make_step(loss, tx, plan, loss_is="mean", split=split, loss_takes="form")
    params, state = init(model)
    batch = jax.ShapeDtypeStruct((len(jax.devices()), tokens + 1), jnp.int32)
    return sharding.ahead(step, params, state, batch)


def main() -> dict[int, dict[str, int]]:
    """Prints what a step takes of each device, for each number of devices, and returns the largest parts of it."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--parameters", type=float, default=1e9, help="about how many; gives the width")
    parser.add_argument("--layers", type=int, default=64)
    parser.add_argument("--vocabulary", type=int, default=65536)
    parser.add_argument("--tokens", type=int, default=512, help="of each device: one sequence")
    parser.add_argument("--devices", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--rule", choices=[*RULES, *OF_MATRICES], default="adamw")
    parser.add_argument("--split", choices=("state", "gradients", "parameters"), default="parameters")
    parser.add_argument("--bandwidth", type=float, default=4.5e10, help="bytes per second that each device moves")
    parser.add_argument("--flops", type=float, default=2e14, help="operations per second of each device")
    parser.add_argument("--plot", help="a picture to write")
    options = parser.parse_args()
    width = width_of(options.parameters, options.layers, options.vocabulary)
    model = transformer(options.layers, width, options.vocabulary)
    if "AHEAD" in os.environ:  # in a process of its own
        try:
            found = compiled(model, options.rule, options.split, options.tokens)
            print(f"\n{found}\n{found.seconds(bandwidth=options.bandwidth, flops=options.flops)}")
            with open(os.environ["AHEAD"], "w") as file:
                json.dump({name: getattr(found, name) for name in OF_DEVICE}, file)
        except ValueError as error:  # of the plan, in words
            raise SystemExit(f"\nover {len(jax.devices())} devices: {error}") from None
        return {}
    print(f"A transformer of {options.layers} layers of width {width:,}:\n\n{tp.summary(model, depth=1)}", flush=True)
    taken: dict[int, dict[str, int]] = {}
    for devices in options.devices:
        flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
        with tempfile.NamedTemporaryFile("r") as file:
            environment = os.environ | {"AHEAD": file.name, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
            if subprocess.run([sys.executable, *sys.argv], env=environment).returncode:
                raise SystemExit(1)
            taken[devices] = json.load(file)
    if options.plot:
        draw(taken, options.plot)
    return taken


def draw(found: dict[int, dict[str, int]], plot: str) -> None:
    """The bytes of a device, over how many there are."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes, below = picture.subplots(), [0.0] * len(found)
    for name in OF_DEVICE:
        heights = [each[name] / 1e9 for each in found.values()]
        axes.bar([f"{devices} devices" for devices in found], heights, bottom=below, label=name)
        below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.set(title="Parameters and the optimiser's state shrink with the devices", ylabel="GB on each device")
    axes.legend()
    picture.savefig(plot)


def claims(found: dict[int, dict[str, int]]) -> dict[str, Any]:
    if len(found) < 2:  # or a process that compiles
        return {}
    few, many = min(found), max(found)
    rest = {devices: each["parameters"] + each["state"] for devices, each in found.items()}
    share = rest[many] * many / (rest[few] * few)
    return {
        f"{many} devices together keep as much as {few}, to 10 %: {share:.3f} times": abs(share - 1) <= 0.1,
    }


if __name__ == "__main__":
    checked = claims(main())
    if checked:
        print(
            "\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n"
        )
    sys.exit(not all(checked.values()))
