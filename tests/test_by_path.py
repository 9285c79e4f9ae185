"""What is not a parameter goes by its path: places of an average and a model that share an array are several places."""

import dataclasses
from typing import Any

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from .zoo import as_data, ramp


class Part(eqx.Module):
    weight: jax.Array
    count: Any
    key: jax.Array
    rate: float
    on: bool
    mean: jax.Array = tp.field(trainable=False)
    variance: jax.Array = tp.field(trainable=False)


class Norm(eqx.Module):
    index: eqx.nn.StateIndex


def average_of(parts: list[dict[str, int]], has_state: bool) -> Any:
    """Parts that share a few arrays, weights among them, and a layer with its state, whose arrays are in both."""
    shared = {
        "weight": [ramp(2), ramp(2, start=2)],
        "count": [jnp.array(0), jnp.arange(3), np.array([True, False])],
        "key": [jax.random.key(0), jax.random.PRNGKey(0)],
        "rate": [0.5, 0],
        "on": [True, False],
        "mean": [ramp(2), ramp(2, start=7)],
    }
    shared["variance"] = shared["mean"]
    norm = Norm(eqx.nn.StateIndex((shared["mean"][0], shared["count"][0]))) if has_state else None
    made = [Part(**{name: shared[name][which % len(shared[name])] for name, which in part.items()}) for part in parts]
    return {"parts": made, "norm": norm, "state": norm and eqx.nn.State(norm)}


NAMES = [field.name for field in dataclasses.fields(Part)]
PARTS = st.lists(st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(0, 2))), min_size=1, max_size=3)


def model_of(average: Any, start: int) -> Any:
    """A model of the same structure, with arrays and values of its own at each path, and the same numbers."""
    leaves, treedef = jax.tree.flatten(average)
    for i, leaf in enumerate(leaves):
        if not hasattr(leaf, "dtype"):
            continue
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaves[i] = jax.random.key(start + i)
        else:
            leaves[i] = ~leaf if leaf.dtype == bool else (leaf + np.asarray(start + i).astype(leaf.dtype))
    return jax.tree.unflatten(treedef, leaves)


def by_hand(average: Any, model: Any, decay: float, buffers: str, first: list[int]) -> list[Any]:
    """The leaves of the next average; `first` is the leaf whose value each trained one has, and -1 of others."""
    mixed = lambda old, new: np.asarray(old + (1 - decay) * (np.asarray(new, np.float64) - old), np.float32)
    olds, news = jax.tree.leaves(average), jax.tree.leaves(model)
    nexts = []
    for old, new, source in zip(olds, news, first, strict=True):
        is_mixed = source >= 0 or (buffers == "average" and jnp.issubdtype(getattr(old, "dtype", bool), jnp.floating))
        if is_mixed:
            nexts.append(mixed(np.asarray(old), news[source] if source >= 0 else new))
        else:
            nexts.append(new if buffers != "keep" and hasattr(old, "dtype") else old)
    return nexts


def check(got: Any, want: list[Any], path: str) -> None:
    as_floats = lambda leaf: np.asarray(as_data(leaf)).astype(np.float64)
    for i, (ours, theirs) in enumerate(zip(jax.tree.leaves(got), want, strict=True)):
        np.testing.assert_allclose(as_floats(ours), as_floats(theirs), 1e-6, 1e-6, err_msg=f"{path} {i}")


@pytest.mark.timeout(180)
@hypothesis.settings(deadline=None, max_examples=5, derandomize=True, phases=[hypothesis.Phase.generate])
@hypothesis.given(PARTS, st.booleans(), st.sampled_from(["copy", "average", "keep"]))
def test_outside_in_jit_and_by_hand_are_one(parts, has_state, buffers):
    average = average_of(parts, has_state)
    layout = tp.layout(average)
    ids, are_trained = list(map(id, jax.tree.leaves(average))), jax.tree.leaves(layout.mask)
    first = [ids.index(each) if trained else -1 for each, trained in zip(ids, are_trained, strict=True)]
    models = [model_of(average, start) for start in (3, 50)]
    want, wants = average, []
    for model in models:
        leaves = by_hand(want, model, 0.75, buffers, first)
        want = jax.tree.unflatten(jax.tree.structure(average), leaves)
        wants.append(leaves)

    of = lambda average, model: tp.ema(average, model, decay=0.75, buffers=buffers, trainable=layout)
    update = lambda ema, model: ema.update(model)
    arrays = jax.jit(lambda ema, model: ema.update(eqx.combine(model, average)))
    make = lambda average: tp.Ema(average, 0.75, buffers=buffers)
    ways = {
        "outside": (of, tp.copy),
        "not copied": (of, lambda average: average),
        "tp.jit": (tp.jit(of), tp.copy),
        "jax.jit": (jax.jit(of), tp.copy),
        "Ema": (update, make),
        "Ema, tp.jit": (tp.jit(update), make),
        "Ema, jax.jit": (lambda ema, model: arrays(ema, eqx.filter(model, eqx.is_array)), make),
    }
    for name, (step, start) in ways.items():
        got = start(average)
        for model, leaves in zip(models, wants, strict=True):
            got = step(got, model)
            check(got.average if isinstance(got, tp.Ema) else got, leaves, name)
    check(tp.copy(average), jax.tree.leaves(average), "copy")
