"""How much of each device training a transformer would take: compiled from shapes alone, and never run."""

import argparse
import dataclasses
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from .. import optim
from .._forms.restructure import Restructure
from .._tree.text import in_bytes, in_columns
from .._tree.types import PyTree
from ._ahead import Ahead, ahead
from ._collectives import Collective, Collectives
from ._plan import plan
from ._step import step

_HEAD = 64  # the width of a head of attention, of which the width is a multiple
_STEP = 512  # what a width that is found is a multiple of, so that as many devices can share each matrix
_RULES = {"sgd": lambda: optax.sgd(0.1), "adamw": lambda: optax.adamw(1e-3)}
_OF_MATRICES = {"adafactor": lambda: optax.adafactor(1e-3), "muon": lambda: optax.contrib.muon(1e-3)}
_HANDED_ON = (
    "layers",
    "width",
    "vocabulary",
    "tokens",
    "rule",
    "form",
    "split",
)  # options, to the process that compiles


def transformer(layers: int, width: int, vocabulary: int) -> PyTree:
    """A plain decoder-only transformer, by its shapes."""
    square = {name: _leaf(width, width) for name in ("query", "key", "value", "out")}
    norms = {"norm_attention": _leaf(width), "norm_feed_forward": _leaf(width)}
    layer = {**square, **norms, "up": _leaf(width, 4 * width), "down": _leaf(4 * width, width)}
    return {
        "embed": _leaf(vocabulary, width),
        "layers": [layer] * layers,
        "norm": _leaf(width),
        "head": _leaf(width, vocabulary),
    }


def _leaf(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def loss(params: PyTree, restructure: Restructure, tokens: jax.Array) -> jax.Array:
    """The mean cross entropy of each token but the first."""
    x = restructure.part(params, "embed")[tokens[:, :-1]]
    x, _ = restructure.scan(lambda x, layer: (jax.checkpoint(_layer)(x, layer), None), x, params, "layers.*")
    logits = _normed(x, restructure.part(params, "norm")) @ restructure.part(params, "head")
    chosen = jnp.take_along_axis(logits, tokens[:, 1:, None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


def _layer(x: jax.Array, layer: Mapping[str, jax.Array]) -> jax.Array:
    normed = _normed(x, layer["norm_attention"])
    heads = (*x.shape[:-1], -1, _HEAD)
    query, key, value = ((normed @ layer[name]).reshape(heads) for name in ("query", "key", "value"))
    attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
    x = x + attended.reshape(x.shape) @ layer["out"]
    return x + jax.nn.gelu(_normed(x, layer["norm_feed_forward"]) @ layer["up"]) @ layer["down"]


def _normed(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x**2, axis=-1, keepdims=True) + 1e-6) * jnp.expand_dims(scale, (0, 1))


def width_of(parameters: float, layers: int, vocabulary: int) -> int:
    """The width at which the transformer has about so many parameters: 12 layers width^2 + 2 vocabulary width."""
    half = vocabulary / (12 * layers)
    width = math.sqrt(half**2 + parameters / (12 * layers)) - half
    return max(1, round(width / _STEP)) * _STEP


def compiled(options: argparse.Namespace) -> Ahead:
    """The step over all devices of this process."""
    model = transformer(options.layers, options.width, options.vocabulary)
    mesh = jax.sharding.Mesh(jax.devices(), "data")
    devices = len(jax.devices())
    rules: dict[Any, Any] = {"**": "split"}
    if options.rule in _RULES:
        tx = _RULES[options.rule]()
    else:
        # Matrices of layers have the rule for matrices, a row on each device at a time; the rest has Adam, as is usual.
        rules = {"layers.*.norm_*": "split", "layers.**": "owned", "**": "split"}
        of_matrices = optim.per_leaf(_OF_MATRICES[options.rule](), at_once=devices)
        tx = optim.groups({"owned": of_matrices}, default=optax.adamw(1e-3))
    lies = plan(model, mesh, rules, form=options.form)
    init, run = step(loss, tx, lies, split=options.split, loss_takes="form")
    params, state = init(model)
    tokens = jax.ShapeDtypeStruct((devices, options.tokens + 1), jnp.int32)
    return ahead(run, params, state, tokens)


def compiled_for(devices: int, options: argparse.Namespace) -> Ahead | str:
    """The same in a process that has so many devices of CPU; or why not. The number is fixed where JAX starts."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    given = [f"--{name}={value}" for name, value in vars(options).items() if name in _HANDED_ON]
    run = subprocess.run(
        [sys.executable, "-m", "treeparams.sharding", "--here", *given],
        env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
    )
    if run.returncode:
        return run.stderr.strip() or f"the process ended with status {run.returncode}"
    found = json.loads(run.stdout)
    rows, notes = found.pop("moved").values()
    moved = Collectives(tuple(Collective(*row) for row in rows), tuple(notes))
    return Ahead(**found, moved=moved)


def main(arguments: list[str] | None = None) -> int:
    """The command; returns its status."""
    parser = argparse.ArgumentParser(prog="python -m treeparams.sharding", description=__doc__)
    parser.add_argument("--parameters", type=float, default=1e9, help="about how many, such as 1e9; gives the width")
    parser.add_argument("--width", type=_count, help=f"in place of --parameters; a multiple of {_HEAD}")
    parser.add_argument("--layers", type=_count, default=64)
    parser.add_argument("--vocabulary", type=_count, default=65536)
    parser.add_argument("--tokens", type=_count, default=512, help="of each device: one sequence")
    parser.add_argument("--devices", type=_count, nargs="+", default=[8, 64])
    parser.add_argument("--rule", choices=[*_RULES, *_OF_MATRICES], default="adamw")
    parser.add_argument("--form", choices=("stacks", "vector"), default="stacks")
    parser.add_argument("--split", choices=("state", "gradients", "parameters"), default="parameters")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # in the process that compiles
    options = parser.parse_args(arguments)
    options.width = options.width or width_of(options.parameters, options.layers, options.vocabulary)
    if options.width % _HEAD:
        parser.error(f"--width must be a multiple of {_HEAD}, got {options.width}")
    if options.here:
        try:
            print(json.dumps(dataclasses.asdict(compiled(options))))
        except (TypeError, ValueError) as error:  # of the plan, in words
            print(error, file=sys.stderr)
            return 1
        return 0
    found = {devices: compiled_for(devices, options) for devices in options.devices}
    print(_tables(options, [each for each in found.values() if isinstance(each, Ahead)]))
    refused = {devices: each for devices, each in found.items() if isinstance(each, str)}
    for devices, words in refused.items():
        print(f"over {devices} devices: {words}", file=sys.stderr)
    return int(bool(refused))


def _count(text: str) -> int:
    number = float(text)  # of 1e3, too
    if number < 1 or number % 1:
        raise argparse.ArgumentTypeError(f"expected a whole number, at least 1, got {text}")
    return int(number)


def _tables(options: argparse.Namespace, steps: list[Ahead]) -> str:
    model = transformer(options.layers, options.width, options.vocabulary)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model))
    lines = [
        f"a transformer of {options.layers:,} layers of width {options.width:,}, vocabulary {options.vocabulary:,}",
        f"{count:,} parameters, {in_bytes(4 * count)} in float32; {options.tokens:,} tokens per device and step",
        f"{options.rule}, form {options.form!r}, split {options.split!r}",
    ]
    compiled, calculated = [], []
    for each in steps:
        moved = each.moved.bytes
        assert moved is not None, "all loops of this step are scans"
        of_each = (each.parameters, each.state, each.temporaries, each.total)
        compiled.append([f"{each.devices:,}", *map(in_bytes, of_each), f"{each.moved.count():,}", in_bytes(moved)])
        multiples = (each.temporaries / (4 * count), moved / (4 * count))
        share = in_bytes(-(-4 * count // each.devices))
        calculated.append([f"{each.devices:,}", share, *(f"{number:.2f}" for number in multiples)])
    if steps:
        header = ("devices", "parameters", "state", "temporaries", "total", "collectives", "moved")
        lines += ["", "compiled, for CPU: bytes of each device, and what it moves in a step"]
        lines += in_columns(header, compiled, right=range(len(header)))
        for each in steps:
            lines += ["", f"moved, over {each.devices:,} devices", repr(each.moved)]
        header = ("devices", "parameters / devices", "temporaries / parameters", "moved / parameters")
        lines += ["", "calculated, from the numbers above"]
        lines += in_columns(header, calculated, right=range(len(header)))
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
