"""Deep nets that compile in a second: their layers are a loop, and are scanned over stacks.

    python examples/deep.py [--layers 500] [--blocks 24] [--steps 50]

A residual net of 500 layers learns handwritten digits, and a transformer of 24 learns to go on with a text, the help
topics that come with Python. Both are plain Equinox: a list of layers, and a loop over them (`_nets.py`). `jax.jit`
unrolls the loop, so the program grows with the layers. `tp.stack` turns the same model into one array for each shape,
and `restructure.scan` goes over the layers in these: they are traced and compiled as one. Both forms train by the same
rule on the same batches, and have the same losses.

The images come with scikit-learn: `pip install -e '.[examples]'`.
"""

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from _common import command_line, progress, table
from _nets import Net, images, texts
from jax import Array

import treeparams as tp

BATCH = 8
OPTIMISER = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(3e-3))  # takes leaves and stacks alike


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

    bar = progress(chosen, f"{title}, {form}")
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


def main(layers: int = 500, blocks: int = 24, steps: int = 50, seed: int = 0) -> dict[str, dict[str, Trained]]:
    """Trains a residual net and a transformer, each as a loop and scanned; returns all four."""
    made, drawn = jax.random.split(jax.random.key(seed))
    found, rows = {}, []
    for title, data in {f"{layers} layers": images(layers, made), f"{blocks} blocks": texts(blocks, made)}.items():
        chosen = np.asarray(jax.random.randint(drawn, (steps, BATCH), 0, len(data[1])))
        found[title] = {form: train(title, form, data, chosen) for form in FORMS}
        for form, each in found[title].items():
            times = f"{each.build:.1f} s", f"{1000 * each.run / steps:.1f} ms"
            rows.append((title, form, f"{each.arrays:,}", *times, f"{each.losses[-1]:.6f}"))
    print("\n" + table(("net", "form", "arrays", "to build", "a step", "loss at the end"), *rows))
    return found


def claims(found: dict[str, dict[str, Trained]]) -> dict[str, Any]:
    pairs = [(forms["loop"], forms["scan"]) for forms in found.values()]
    return {
        "loop and scan have the same loss at each step, to 1e-5": all(
            np.allclose(loop.losses, scan.losses, rtol=0, atol=1e-5) for loop, scan in pairs
        ),
        "both scans are built in less than half the time": sum(2 * scan.build - loop.build for loop, scan in pairs) < 0,
        "each of them learns": all(scan.losses[-5:].mean() < 0.8 * scan.losses[0] for _, scan in pairs),
    }


if __name__ == "__main__":
    command_line(main, claims)
