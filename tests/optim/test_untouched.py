"""Code that adds an update to every leaf: updates of zeros, in place of `None`."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from treeparams import optim

from ..zoo import STACKS, VECTOR, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")
forms = pytest.mark.parametrize("form", [optim.trainable, VECTOR, STACKS])
SPECIAL = [-0.0, 0.0, np.inf, -np.inf, np.nan, 1.5]


def model():
    """Trained, without a gradient, and frozen arrays of each kind; a number."""
    return {
        "w": ramp(2, 3),
        "no gradient": ramp(3, dtype=jnp.bfloat16),
        "frozen": [
            *(jnp.asarray(np.array(SPECIAL, dtype)) for dtype in ("f4", jnp.bfloat16)),
            jnp.asarray(np.array([complex(-0.0, -0.0), complex(0.0, -0.0), complex(-0.0, np.nan)], "c8")),
        ],
        "numpy": np.array([-0.0, 2.0], "f4"),
        "count": jnp.array(7),
        "mask": jnp.array([True, False]),
        "key": jax.random.PRNGKey(3),
        "rate": -0.0,
        "is_on": True,
    }


WHERE = ["w", "no gradient"]


def bits_of(leaf):
    array = np.asarray(leaf)
    return array.dtype, array.shape, array.tobytes()


def test_updates_have_the_structure_and_dtypes_of_the_model():
    before = model()
    tx = optim.trainable(optax.sgd(0.1), WHERE, missing="zeros")
    updates, state = tx.update({"w": ramp(2, 3)}, tx.init(before), before)
    assert jax.tree.structure(updates) == jax.tree.structure(before)  # code over dm-tree asks no more
    kinds = lambda tree: [(jnp.asarray(leaf).dtype, jnp.shape(leaf)) for leaf in jax.tree.leaves(tree)]
    assert kinds(updates) == kinds(before)
    after = optax.apply_updates(before, updates)
    np.testing.assert_allclose(after["w"], 0.9 * before["w"], rtol=1e-6)
    for path in before.keys() - {"w"}:
        assert [*map(bits_of, jax.tree.leaves(after[path]))] == [
            bits_of(jnp.asarray(leaf)) for leaf in jax.tree.leaves(before[path])
        ], path
    stepped, _ = optim.step(tx, {"w": ramp(2, 3)}, state, before)
    assert stepped["frozen"][0] is before["frozen"][0]


class TrainState(NamedTuple):
    """As Flax has it."""

    params: Any
    tx: Any
    opt_state: Any

    @classmethod
    def create(cls, params, tx):
        return cls(params, tx, tx.init(params))

    def apply_gradients(self, grads):
        updates, opt_state = self.tx.update(grads, self.opt_state, self.params)
        return self._replace(params=optax.apply_updates(self.params, updates), opt_state=opt_state)


@forms
def test_a_train_state_trains_what_is_not_frozen_with_ties(form):
    shared = ramp(2, 3)
    params = {"encoder": {"table": ramp(3)}, "embed": shared, "head": shared, "count": jnp.array(3)}
    run = TrainState.create(params, form(optax.adamw(0.1), "!encoder", missing="zeros"))
    run = run.apply_gradients(jax.tree.map(lambda leaf: np.ones(leaf.shape, "f4"), params))
    # The first step of Adam is as long as the rate, whatever the gradient; then comes the decay.
    np.testing.assert_allclose(run.params["embed"], np.asarray(shared) * (1 - 0.1 * 1e-4) - 0.1, rtol=1e-5)
    np.testing.assert_array_equal(run.params["embed"], run.params["head"])
    np.testing.assert_array_equal(run.params["encoder"]["table"], params["encoder"]["table"])
    assert int(run.params["count"]) == 3


@pytest.mark.usefixtures("without_type_checks")
def test_another_word_is_refused():
    with pytest.raises(ValueError, match='missing must be None or "zeros", got True'):
        optim.trainable(optax.sgd(0.1), missing=True)
    for form, right in (
        ("flat", "vector"),
        ("stacked", "stacks"),
        ("ravel", "vector"),
        ("partition", "tree"),
        ("vectors", "vector"),
    ):
        with pytest.raises(ValueError, match=f'form must be "tree", "vector" or "stacks", got {form!r}; .*{right}'):
            optim.trainable(optax.sgd(0.1), form=form)
