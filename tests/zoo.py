"""Small models with one difficulty each, models made by hypothesis, and what it means that two are the same."""

import copy
import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import hypothesis.strategies as st
import jax
import jax.experimental
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import optim

# Its place in JAX has changed, in 0.8.
enable_x64 = jax.enable_x64 if hasattr(jax, "enable_x64") else jax.experimental.enable_x64

VECTOR, STACKS = (functools.partial(optim.trainable, form=form) for form in ("vector", "stacks"))
"""The other forms, beside `optim.trainable`."""


def first_devices(count: int) -> list[jax.Device]:
    """The first devices. Where there are not so many, the test is skipped, or the file that asks while it is read."""
    found = jax.devices()
    if len(found) < count:
        pytest.skip(f"needs {count} devices, has {len(found)}", allow_module_level=True)
    return found[:count]


def ramp(*shape: int, dtype: Any = jnp.float32, start: float = 0.5) -> jax.Array:
    """Distinct values, so that a mixed-up leaf shows."""
    # NumPy makes and casts them: JAX would compile a program for each shape, `jnp.asarray` too.
    return jax.device_put(np.linspace(start, start + 1, math.prod(shape)).reshape(shape).astype(dtype))


def filled(make: Callable[..., Any], *sizes: Any, seed: int = 0, **options: Any) -> Any:
    """A layer or net whose parameters NumPy makes: those of Equinox are a program of 0.1 s for each shape."""
    random = np.random.default_rng(seed)
    draw = lambda leaf: jax.device_put(random.normal(size=leaf.shape, scale=0.5).astype(leaf.dtype))
    shapes = eqx.filter_eval_shape(make, *sizes, key=jax.eval_shape(lambda: jax.random.key(0)), **options)
    return jax.tree.map(lambda leaf: draw(leaf) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf, shapes)


class Norm(eqx.Module):
    scale: jax.Array
    mean: jax.Array = tp.field(trainable=False)


class Net(eqx.Module):
    layers: list[Any]
    activation: Callable[..., Any]
    width: int = eqx.field(static=True)
    rate: float = 0.5


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Plain:
    weight: Any
    frozen: Any = dataclasses.field(metadata={"trainable": False})


class Pair(NamedTuple):
    first: Any
    second: Any


def _tied() -> Any:
    shared = ramp(2, 3)
    return {"embed": shared, "body": [ramp(3), shared], "head": shared}


def _batch_norm() -> Any:
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    return {"norm": norm, "state": state}


@dataclasses.dataclass
class Specimen:
    make: Callable[[], Any]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)  # of tp.layout

    def layout(self, model: Any) -> tp.Layout:
        return tp.layout(model, **self.options)


ZOO = {
    "bare array": Specimen(lambda: ramp(3)),
    "nested dict": Specimen(lambda: {"a": {"b": ramp(2, 2), "a.b": ramp(1)}, "z": ramp()}),
    "tuple with None": Specimen(lambda: (ramp(2), None, (None, ramp(3)))),
    "ints and bools": Specimen(lambda: {"w": ramp(2), "n": jnp.arange(3), "flag": jnp.array([True]), "i": [7, 1.5]}),
    "complex": Specimen(lambda: [ramp(2, dtype=jnp.complex64) * (1 + 2j), ramp(3)]),
    "bf16 with f32": Specimen(lambda: [ramp(3, dtype=jnp.bfloat16), ramp(2, 2), ramp(1, dtype=jnp.float16)]),
    "nothing trained": Specimen(lambda: {"n": jnp.arange(3), "name": "x"}),
    "all frozen": Specimen(lambda: {"a": ramp(2)}, {"freeze": "**"}),
    "functions and static fields": Specimen(
        lambda: Net([Norm(ramp(3), ramp(3)), None, eqx.nn.Dropout(0.5), Norm(ramp(3), ramp(3))], jnp.tanh, 3)
    ),
    "plain dataclass": Specimen(lambda: Plain(ramp(2), {"deep": ramp(3)})),
    "named tuple": Specimen(lambda: Pair(ramp(2), Pair(ramp(1), None))),
    "same array twice": Specimen(_tied),
    "frozen tie": Specimen(_tied, {"freeze": ("embed", "body.1", "head")}),
    "transposed tie": Specimen(
        lambda: {"decoder": ramp(2, 3).T, "encoder": ramp(2, 3), "bias": ramp(2)},
        {"ties": {"decoder": ("encoder", jnp.transpose)}},
    ),
    "batch norm": Specimen(_batch_norm),
    "prng keys": Specimen(lambda: {"key": jax.random.key(0), "raw": jax.random.PRNGKey(1), "weight": ramp(2)}),
    "numpy leaves": Specimen(lambda: {"w": np.ones((2, 2), np.float32), "n": np.arange(2), "f": ramp(2)}),
    "empty leaves": Specimen(lambda: [ramp(0), ramp(2, 0), ramp(2), ramp()]),
    "mlp": Specimen(lambda: filled(eqx.nn.MLP, 2, 1, 3, 1), {"freeze": "layers.0"}),
}

# Only their tree is of another kind, and programs are those of other models.
STRUCTURE_ALONE = ("bare array", "nested dict", "tuple with None", "plain dataclass", "named tuple", "mlp")


def inexact_leaves(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(getattr(leaf, "dtype", bool), jnp.inexact)]


def loss(model: Any) -> jax.Array:
    """A smooth function of all floating leaves, different in each place, frozen ones coupled in."""
    return _loss(inexact_leaves(model))


@jax.jit
def _loss(leaves: list[jax.Array]) -> jax.Array:
    # Joined first: XLA takes 20 ms for each loop in a program, and so there is one for all leaves.
    parts = [part for leaf in leaves for part in ([leaf.real, leaf.imag] if jnp.iscomplexobj(leaf) else [leaf])]
    places = np.repeat(np.arange(len(parts), dtype=np.float32), [part.size for part in parts])
    joined = jnp.concatenate([np.zeros(0, np.float32), *[jnp.ravel(part).astype(jnp.float32) for part in parts]])
    return (1 + jnp.sum((places + 1) * jnp.sin(joined + places)) / max(len(places), 1)) ** 2


@functools.cache
def gradient_of_loss(layout: tp.Layout) -> Callable[[Any], Any]:
    """`tp.grad(loss, layout)`, compiled once for all tests of a specimen."""
    return tp.jit(tp.grad(loss, layout))


def with_refs() -> Any:
    """Parameters and a number of steps, of each kind one in an array and one in a ref."""
    return {
        "w": ramp(2),
        "mean": jax.new_ref(jnp.full(3, 7.0, jnp.float32)),
        "steps": jax.new_ref(jnp.array(4)),
        "seen": jnp.array(2),
        "act": jnp.tanh,
    }


def as_data(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return jax.random.key_data(leaf)
    return leaf


def assert_same(got: Any, want: Any, *, identity: bool = True) -> int:
    """Equal structure, types, dtypes and bits; the same arrays tied. Returns how many leaves were compared."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    ours, theirs = jax.tree.leaves(got), jax.tree.leaves(want)
    for a, b in zip(ours, theirs, strict=True):
        if not hasattr(b, "dtype"):
            assert a is b or (type(a) is type(b) and a == b)
            continue
        a, b = as_data(a), as_data(b)
        assert jax.dtypes.canonicalize_dtype(a.dtype) == jax.dtypes.canonicalize_dtype(b.dtype)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    if identity:
        assert pattern(ours) == pattern(theirs)
    return len(ours)


def pattern(leaves: list[Any]) -> list[int]:
    """For each array, the first place where the same object stands."""
    first: dict[int, int] = {}
    return [first.setdefault(id(leaf), i) for i, leaf in enumerate(leaves) if hasattr(leaf, "dtype")]


def assert_close(got: Any, want: Any, tolerance: float = 1e-5) -> None:
    """Equal structures, dtypes and what is no array; numbers up to rounding."""
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if not hasattr(b, "dtype"):
            assert (type(a), a) == (type(b), b)
            continue
        a, b = as_data(a), as_data(b)
        assert a.dtype == b.dtype
        wide = np.complex128 if np.iscomplexobj(a) else np.float64
        np.testing.assert_allclose(np.asarray(a).astype(wide), np.asarray(b).astype(wide), tolerance, tolerance)


def bits(array: Any) -> bytes:
    """Its bytes; a GPU computes one NaN for all, so there they stand for each other."""
    array = np.asarray(array)
    if jax.default_backend() != "cpu":
        array = np.where(np.isnan(array), array.dtype.type("nan"), array)
    return array.tobytes()


def cost(f: Callable[..., Any], *args: Any) -> dict[str, float]:
    """What XLA counts in the program as it is compiled for a CPU: `"flops"`, `"bytes accessed"`."""
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        analysis = jax.jit(f).lower(*args).compile().cost_analysis()
    return analysis[0] if isinstance(analysis, list) else analysis


def flops(f: Callable[..., Any], *args: Any) -> float:
    return cost(f, *args)["flops"]


# -- Models made by hypothesis ----------------------------------------------------------------------------------------

_DTYPES = [jnp.float32, jnp.bfloat16, jnp.float16, jnp.complex64, jnp.int32, jnp.bool_]
_SHAPES = st.sampled_from([(), (0,), (1,), (3,), (2, 0), (2, 3), (1, 2, 3)])  # few: programs are made for each


@st.composite
def models(draw: Any, floating: bool = False) -> Any:
    """A nested container in which some arrays stand at several places; or of float32 arrays alone, each at one."""
    if floating:
        leaves = st.builds(lambda shape: ramp(*shape), _SHAPES)
    else:
        arrays = st.builds(
            lambda shape, dtype, start: ramp(*shape, dtype=dtype, start=start),
            _SHAPES,
            st.sampled_from(_DTYPES),
            st.integers(-2, 2),
        )
        leaf = st.sampled_from(draw(st.lists(arrays, min_size=1, max_size=4)))
        leaves = st.one_of(leaf, leaf, st.sampled_from([None, 3, [0.5], "name", jnp.tanh]))
    names = st.sampled_from(["a", "b", "a.b", "", "*", '"'])
    return draw(
        st.recursive(
            leaves,
            lambda inner: st.one_of(
                st.lists(inner, max_size=3),
                st.tuples(inner, inner),
                st.dictionaries(names, inner, max_size=3),
                st.builds(Pair, inner, inner),
                st.builds(lambda scale, mean: Norm(scale, copy.deepcopy(mean)), inner, inner),  # no tie is half frozen
            ),
            max_leaves=8,
        )
    )
