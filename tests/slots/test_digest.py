"""The digest of a layout: equal where parameters are the same, whatever holds them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import treeparams as tp

from ..zoo import enable_x64, ramp


class Net(eqx.Module):
    a: jax.Array
    b: jax.Array
    name: str = eqx.field(static=True, default="net")


def twice(x):
    return 2 * x


A, B = ramp(2, 3), ramp(3)


def of(model, **options):
    return tp.layout(model, **options).digest


def test_it_is_of_paths_shapes_dtypes_and_not_of_what_holds_them():
    same = [
        {"a": A, "b": B},
        {"a": A, "b": B, "f": jnp.tanh, "n": 3},
        {"a": np.asarray(A), "b": np.asarray(B)},
        {"a": jax.ShapeDtypeStruct((2, 3), jnp.float32), "b": B},
        Net(A, B),
        Net(A, B, "another"),
    ]
    # Fixed for all versions: if this changes, no checkpoint fits.
    assert {of(model) for model in same} == {"c8db26219b45e84f"}
    with enable_x64(True):
        assert of(Net(A, B)) == of(same[2]) == of(same[0])


def test_each_difference_of_a_layout_changes_it():
    model = {"a": A, "b": B, "c": A.T}
    others = [
        {"a": A, "c": B, "b": A.T},
        {"a": A, "b": ramp(4), "c": A.T},
        {"a": A, "b": B.astype(jnp.bfloat16), "c": A.T},
        {"a": A, "b": B, "c": A.T, "key": jax.random.key(0)},
        {"a": A, "b": B, "c": A.T, "count": jnp.zeros((), jnp.int32)},
        {"a": A, "b": B},
    ]
    digests = [
        of(model),
        *map(of, others),
        of(model, freeze="b"),
        of(model, freeze="a"),
        of(model, ties={"c": ("a", jnp.transpose)}),
        of({"a": A, "b": A, "c": A.T}, ties={"c": ("a", jnp.transpose)}),
        of({"a": A, "b": A + 1, "c": A.T}),
        of({"a": A, "b": A, "c": A.T}),
        of({"a": A, "b": A + 1, "c": A + 2}, ties={"b": "a"}),
        of({"a": A, "b": A + 1, "c": A + 2}, ties={"b": ("a", twice)}),
        of({"a": A, "b": A + 1, "c": A + 2}, ties={"b": ("a", jnp.negative)}),
        of({"a": A, "b": A + 1, "c": A + 2}, ties={"b": "c"}),
    ]
    assert len(set(digests)) == len(digests)
