"""Deep nets that compile in a second: their layers are a loop, and are scanned over stacks.

    python examples/deep.py [--layers 500] [--blocks 24] [--steps 50] [--plot FILE]

A residual net of 500 layers learns handwritten digits, and a transformer of 24 learns to go on with a text, the help
topics that come with Python. Both are plain Equinox: a list of layers, and a loop over them. `jax.jit` unrolls the
loop, so the program grows with the layers. `tp.stack` turns the same model into one array for each shape, and
`restructure.scan` goes over the layers in these: they are traced and compiled as one. Both forms train by the same rule
on the same batches, and have the same losses.

The images come with scikit-learn: `pip install -e '.[examples]'`.
"""

import argparse
import pydoc_data.topics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array
from matplotlib.figure import Figure
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split
from tqdm import tqdm

import treeparams as tp

WIDTH, LENGTH, LETTERS, HEADS, BATCH = 32, 32, 128, 4, 8
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))  # takes leaves and stacks alike


class Net(eqx.Module):
    """Layers between a stem and a head."""

    stem: Callable[[Array], Array]
    layers: Sequence[Callable[[Array], Array]]
    head: Callable[[Array], Array]

    def __call__(self, x: Array) -> Array:
        """The scores of an image, or at each letter of a text those of the next one."""
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Residual(eqx.Module):
    """A small step, so that rounding does not grow through 500 of them."""

    linear: eqx.nn.Linear
    size: float

    def __call__(self, x: Array) -> Array:
        """Shape `(width,)`, as that of `x`."""
        return x + self.size * jnp.tanh(self.linear(x))


class Block(eqx.Module):
    """Attention to the letters before, and beside it a perceptron for each letter."""

    norm: eqx.nn.LayerNorm
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP  # its activation, a function, is one of its leaves

    def __init__(self, *, key: Array) -> None:
        attention, mlp = jax.random.split(key)
        self.norm = eqx.nn.LayerNorm(WIDTH)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=attention)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, 1, jax.nn.gelu, key=mlp)

    def __call__(self, x: Array) -> Array:
        """Shape `(letters, width)`, as that of `x`."""
        normed = jax.vmap(self.norm)(x)
        before = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        return x + self.attention(normed, normed, normed, before) + jax.vmap(self.mlp)(normed)


class Embedding(eqx.Module):
    """A vector for each letter, and for the place where it stands."""

    letters: Array
    places: Array = tp.field(trainable=False)  # sines of many lengths: no parameter

    def __call__(self, text: Array) -> Array:
        """Shape `(letters, width)`."""
        return WIDTH**0.5 * self.letters[text] + self.places


class Scores(eqx.Module):
    """Of all letters, at each place."""

    norm: eqx.nn.LayerNorm
    letters: Array  # those of the embedding: one array at two places is one parameter

    def __call__(self, x: Array) -> Array:
        """Shape `(places, letters)`."""
        return jax.vmap(self.norm)(x) @ self.letters.T


def images(layers: int, key: Array) -> tuple[Net, Any, Any]:
    """A residual net, handwritten digits, and which they are."""
    stem, head, *keys = jax.random.split(key, 2 + layers)
    residuals = [Residual(eqx.nn.Linear(WIDTH, WIDTH, key=each), 1 / layers) for each in keys]
    pixels, labels = load_digits(return_X_y=True)
    pixels, _, labels, _ = train_test_split(
        (pixels / 16).astype(np.float32), labels.astype(np.int32), test_size=0.2, stratify=labels, random_state=0
    )
    net = Net(eqx.nn.Linear(64, WIDTH, key=stem), residuals, eqx.nn.Linear(WIDTH, 10, key=head))
    return net, pixels, labels


def texts(layers: int, key: Array) -> tuple[Net, Any, Any]:
    """A transformer, texts of Python's help, and at each letter the next one."""
    first, *keys = jax.random.split(key, 1 + layers)
    letters = jax.random.normal(first, (LETTERS, WIDTH)) / WIDTH**0.5
    places = jnp.sin(jnp.arange(LENGTH)[:, None] / 10_000 ** jnp.linspace(0, 1, WIDTH)[None])
    net = Net(Embedding(letters, places), [Block(key=each) for each in keys], Scores(eqx.nn.LayerNorm(WIDTH), letters))
    topics = "\n".join(pydoc_data.topics.topics.values()).encode("ascii", "ignore")
    codes = np.frombuffer(topics, np.uint8).astype(np.int32)
    size = len(codes) // LENGTH * LENGTH
    return net, codes[: size - LENGTH].reshape(-1, LENGTH), codes[1 : size - LENGTH + 1].reshape(-1, LENGTH)


def scanned(stacks: Any, restructure: tp.Restructure[Net]) -> Callable[[Array], Array]:
    """The net as a function, without cutting its layers out of the stacks."""
    stem, head = restructure.part(stacks, "stem"), restructure.part(stacks, "head")

    def forward(x: Array) -> Array:
        x, _ = restructure.scan(lambda x, layer: (layer(x), None), stem(x), stacks, "layers.*")
        return head(x)

    return forward


# How each form takes a net apart, makes a function of what this gives, and the net itself.
FORMS: dict[str, tuple[Callable[..., Any], ...]] = {
    "loop": (tp.partition, tp.combine, tp.combine),
    "scan": (tp.stack, scanned, lambda stacks, restructure: restructure(stacks)),
}


class Trained(NamedTuple):
    """A net after training in one of the forms, and what it took."""

    net: Net
    losses: np.ndarray  # at each step
    arrays: int
    build: float  # seconds to trace and compile a step
    run: float  # seconds for all steps


def train(title: str, form: str, data: tuple[Net, Any, Any], chosen: np.ndarray) -> Trained:
    """Trains a net on the chosen examples of each step."""
    net, *examples = data
    apart, function, together = FORMS[form]
    params, rest = apart(net)

    def loss(params: Any, rest: Any, inputs: Array, targets: Array) -> Array:
        scores = jax.vmap(function(params, rest))(inputs)
        return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(scores, targets))

    def step(params: Any, state: Any, rest: Any, batch: Any) -> tuple[Any, Any, Array]:
        value, grads = jax.value_and_grad(loss)(params, rest, *batch)
        updates, state = OPTIMISER.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    bar = tqdm(chosen, f"{title}, {form}", ncols=100)
    bar.set_postfix_str("compiles")
    state, losses, start = OPTIMISER.init(params), [], time.perf_counter()
    compiled = jax.jit(step).lower(params, state, rest, [each[chosen[0]] for each in examples]).compile()
    built = time.perf_counter()
    for batch in bar:
        params, state, value = compiled(params, state, rest, [each[batch] for each in examples])
        losses.append(float(value))
        bar.set_postfix(loss=f"{value:.4f}", refresh=False)
    run = time.perf_counter() - built
    return Trained(together(params, rest), np.array(losses), len(jax.tree.leaves(params)), built - start, run)


def main(
    layers: int = 500, blocks: int = 24, steps: int = 50, seed: int = 0, plot: str = ""
) -> dict[str, dict[str, Trained]]:
    """Trains a residual net and a transformer, each as a loop and scanned; returns all four."""
    made, drawn = jax.random.split(jax.random.key(seed))
    found, row, rows = {}, "{:10}  {:>4}  {:>6}  {:>8}  {:>7}  {:>15}".format, []
    for title, data in {f"{layers} layers": images(layers, made), f"{blocks} blocks": texts(blocks, made)}.items():
        chosen = np.asarray(jax.random.randint(drawn, (steps, BATCH), 0, len(data[1])))
        found[title] = {form: train(title, form, data, chosen) for form in FORMS}
        for form, each in found[title].items():
            times = f"{each.build:.1f} s", f"{1000 * each.run / steps:.1f} ms"
            rows.append(row(title, form, f"{each.arrays:,}", *times, f"{each.losses[-1]:.6f}"))
    print("", row("net", "form", "arrays", "to build", "a step", "loss at the end"), *rows, sep="\n")
    if plot:
        draw(found, plot)
    return found


def draw(found: dict[str, dict[str, Trained]], plot: str) -> None:
    """The losses of both forms, one over the other, with the time that each was built in."""
    picture = Figure(figsize=(8.5, 4), layout="constrained")
    picture.suptitle("Scanned, a deep net compiles in a fraction of the time, and trains the same", x=0.01, ha="left")
    for axes, (title, forms) in zip(picture.subplots(1, len(found)), found.items(), strict=True):
        lines: tuple[dict[str, Any], ...] = {"lw": 5, "alpha": 0.4}, {"ls": "--"}
        for (form, each), line in zip(forms.items(), lines, strict=True):
            axes.plot(each.losses, **line, label=f"{form}: built in {each.build:.1f} s")
        axes.set(title=title, xlabel="step")
        axes.legend()
    picture.axes[0].set_ylabel("loss")
    picture.savefig(plot)


def claims(found: dict[str, dict[str, Trained]]) -> dict[str, Any]:
    pairs = [(forms["loop"], forms["scan"]) for forms in found.values()]
    apart = max(np.abs(loop.losses - scan.losses).max() for loop, scan in pairs)
    loops, scans = (sum(each.build for each in forms) for forms in zip(*pairs, strict=True))
    left = max(scan.losses[-5:].mean() / scan.losses[0] for _, scan in pairs)
    return {
        f"loop and scan have the same loss at each step, to 1e-5: {apart:.0e}": apart <= 1e-5,
        f"both scans are built in less than half the time: {scans:.1f} s for {loops:.1f} s": 2 * scans < loops,
        f"each of them learns: at most {left:.0%} of the loss is left": left < 0.8,
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=main.__doc__, argument_default=argparse.SUPPRESS)
    parser.add_argument("--layers", type=int)
    parser.add_argument("--blocks", type=int)
    parser.add_argument("--steps", type=int)
    parser.add_argument("--plot", help="a picture to write")
    checked = claims(main(**vars(parser.parse_args())))
    print("\nChecked:", *(f"  {'ok' if holds else 'FAILED'}  {claim}" for claim, holds in checked.items()), sep="\n")
    sys.exit(not all(checked.values()))
