"""A step of Adam on a sentence encoder of 22.7 M parameters: all of it, or changes of rank 8.

The encoder, its checkpoint and its loss are those of `examples/sentences.py`. What is trained goes into the program and
out of it, with its moments; what is frozen is an argument. The state is what the moments take.
"""

import importlib
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
import optax

import treeparams as tp
from treeparams import matrices, optim

from ._harness import Scale, Table, as_ratios
from ._programs import Function, built, in_bytes, rows, timed

_EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
_SMALL = {
    "vocab_size": 50, "max_position_embeddings": 16, "type_vocab_size": 1, "hidden_size": 8, "num_hidden_layers": 1,
    "num_attention_heads": 2, "intermediate_size": 16, "layer_norm_eps": 1e-12,
}  # fmt: skip


def run(scale: Scale) -> Iterator[Table]:
    sys.path.insert(0, str(_EXAMPLES))
    example: Any = importlib.import_module("sentences")
    if scale.is_smoke:
        model, rank, (batch, length) = example.Encoder(_SMALL, key=jax.random.key(0)), 1, (4, 8)
    else:
        model, rank, (batch, length) = example.load(example.folder()), 8, (example.BATCH, example.LENGTH)
    upper = f"layers.[{'0' if scale.is_smoke else '345'}].attention"
    tokens = example.Tokens(np.ones((batch, length), np.int32), np.ones((batch, length), bool))
    texts = example.Texts(tokens, tokens)
    changed = {
        "all": (model, None),
        "changes in every layer": _changed(model, "layers.*.attention", rank),
        "in the upper three": _changed(model, upper, rank),
    }
    functions = {name: _step(example, each, layout, texts) for name, (each, layout) in changed.items()}
    programs = built(functions, patience=0)
    found = rows(programs.values(), timed(programs, functions, scale._replace(rounds=min(scale.rounds, 3))).values())
    states = [sum(leaf.nbytes for leaf in jax.tree.leaves(arguments[2])) for _, arguments in functions.values()]
    found.append(["state", *as_ratios(states, in_bytes)])
    found.append(["trained", *(f"{tp.layout(*each).size:,}" for each in changed.values())])
    yield Table(f"{batch} pairs of {length} tokens", ["", *changed], found)


def _changed(model: Any, where: str, rank: int) -> tuple[Any, tp.Layout]:
    model = matrices.lora(model, where, rank, key=jax.random.key(1))
    return model, tp.layout(model, matrices.LowRank)


def _step(example: Any, model: Any, layout: tp.Layout | None, texts: Any) -> Function:
    optimiser = optim.trainable(optax.adam(1e-3), layout)

    def step(params: Any, rest: Any, state: Any, texts: Any) -> Any:
        model = tp.combine(params, rest)
        value, grads = tp.value_and_grad(example.loss, layout)(model, texts)
        model, state = optim.step(optimiser, grads, state, model)
        return tp.partition(model, layout)[0], state, value

    return step, (*tp.partition(model, layout), optimiser.init(model), texts)
