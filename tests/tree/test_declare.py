"""What classes say of their fields, their own and those of other packages."""

from typing import Any

import equinox as eqx
import flax.nnx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import paramax
import pytest

import treeparams as tp

from ..zoo import Norm, Pair, Plain, ramp as leaf

pair = lambda: {"bias": leaf(3), "weight": leaf()}


class Thawing(Norm):
    mean: jax.Array = tp.field(trainable=True)


class Options(eqx.Module):
    rate: Any = tp.field(trainable=True, converter=jnp.asarray, default=0.5)
    offset: Any = tp.field(trainable=False, default_factory=lambda: leaf(3))
    size: int = tp.field(static=True, default=2)
    plain: Any = tp.field(default=None)


class Holder(eqx.Module):
    frozen: Any = tp.field(trainable=False)
    free: Any = None


class Written(eqx.Module):
    value: Any = tp.field(trainable=True)


# -- tp.field


@pytest.mark.filterwarnings("ignore:Using `field")
def test_a_field_is_a_field_of_equinox_and_a_frozen_one_freezes_all_below_it():
    for model, paths in (
        (Thawing(leaf(), leaf()), ("scale", "mean")),
        (Options(rate=1.0, plain=[leaf()]), ("rate", "plain.0")),
        (Holder(Thawing(leaf(), leaf()), [leaf()]), ("free.0",)),
    ):
        assert tp.layout(model).paths == paths
    options = Options(rate=2.0)
    assert isinstance(options.rate, jax.Array)
    assert (options.size, options.plain) == (2, None)
    assert [array.size for array in jax.tree.leaves(options)] == [1, 3]
    metadata = tp.field(trainable=False, metadata={"unit": "m"}).metadata
    assert (metadata["unit"], metadata["trainable"]) == ("m", False)
    assert "trainable" not in tp.field().metadata


def test_trainable_written_out_says_nothing_of_what_is_below():
    mlp = eqx.nn.MLP(2, 1, 2, 1, key=jax.random.key(0))  # with functions in it
    for value, parameters in ((np.ones(2, np.complex64), 1), (None, 0), ([leaf(), 1], 1), (mlp, 4)):
        assert len(tp.layout(Written(value)).paths) == parameters


@flax.struct.dataclass
class Struct:
    weight: Any
    frozen: Any = flax.struct.field(metadata={"trainable": False})


@pytest.mark.parametrize("cls", [Plain, Struct])
def test_metadata_declares_for_any_dataclass(cls: Any):
    model = {"a": cls(leaf(), [leaf(3), pair()])}
    assert tp.layout(model).paths == ("a.weight",)
    assert set(tp.layout(model, thaw="a.frozen.1.bias").paths) == {"a.weight", "a.frozen.1.bias"}


# -- Other libraries


class Variables(flax.nnx.Module):
    def __init__(self) -> None:
        self.layers = flax.nnx.List([flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0))])
        self.drop = flax.nnx.Dropout(0.5, rngs=flax.nnx.Rngs(0))
        self.lora, self.bare = flax.nnx.LoRAParam(leaf()), flax.nnx.Variable(leaf())
        self.cache, self.intermediate = flax.nnx.Cache(leaf()), flax.nnx.Intermediate(leaf())
        self.statistic = flax.nnx.BatchStat(leaf())


def test_variables_of_flax():
    paths = ("layers.0.bias", "layers.0.kernel", "lora")  # neither `.value` nor keys
    for state in (flax.nnx.state(Variables()), flax.nnx.split(Variables())[1]):
        assert tp.layout(state).paths == tp.layout(state, flax.nnx.Param).paths == paths
        assert tp.layout(state, thaw="cache").paths == ("cache", *paths)


def test_running_statistics_are_no_parameters():
    for mode in ("ema", "batch"):
        options = {"axis_name": "batch", "mode": mode}
        assert tp.layout(eqx.nn.BatchNorm(3, **options)).paths == ("weight", "bias")
        made, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, **options)
        assert tp.layout({"model": made, "state": state}, "model").paths == ("model.weight", "model.bias")


def test_non_trainable_of_paramax():
    model = {"a": paramax.NonTrainable({"w": leaf()}), "b": leaf(3)}
    assert tp.layout(model).paths == ("b",)
    assert tp.layout(model, thaw="a").paths == ("a.tree.w", "b")
    assert tp.layout(paramax.non_trainable({"a": [jnp.asarray(leaf())]})).paths == ()


# -- tp.declare


class Foreign(eqx.Module):
    """Stands for a class of another package; each test declares a subclass of its own."""

    weight: Any
    bias: Any
    layers: Any = None


def test_frozen_globs_are_relative_to_each_instance():
    for frozen, paths in (
        ("bias", ("0.weight", "0.layers.0.bias", "0.layers.0.weight")),
        (("bias", "weight", "layers.*.bias"), ("0.layers.0.weight",)),
        ("layers.7", ("0.weight", "0.bias", "0.layers.0.bias", "0.layers.0.weight")),
    ):
        cls = type("Declared", (Foreign,), {})
        tp.declare(cls, freeze=frozen)
        assert tp.layout([cls(leaf(), leaf(), [pair()])]).paths == paths


def test_subclasses_inherit_and_declaring_again_replaces():
    base = type("Base", (Foreign,), {})
    child = type("Child", (base,), {})
    build = lambda cls: cls(leaf(2), leaf(2))
    assert tp.layout(build(base)).paths == ("weight", "bias")
    tp.declare(base, freeze="bias")  # after a first look
    assert tp.layout(build(base)).paths == tp.layout(build(child)).paths == ("weight",)
    tp.declare(child, ties={"bias": "weight"}, freeze="weight")
    assert tp.layout(build(child)).paths == ()
    assert tp.layout(build(child)).ties == {"weight": ("bias",)}
    tp.declare(base, freeze=())
    tp.declare(child, ties={"weight": "bias"})
    assert tp.layout(build(base)).paths == ("weight", "bias")
    assert tp.layout(build(child)).paths == ("bias",)


def test_classes_that_are_no_dataclass():
    cls = type("Declared", (Pair,), {})
    tp.declare(cls, freeze="second", ties={"first.1": "first.0"})
    layout = tp.layout({"p": cls([leaf(), leaf()], leaf()), "q": Pair(leaf(), leaf())})
    assert layout.paths == ("p.first.0", "q.first", "q.second")
    assert layout.ties == {"p.first.0": ("p.first.1",)}
