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

from ..zoo import Norm, Pair, Plain, filled, ramp as leaf

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


@flax.struct.dataclass
class Struct:
    weight: Any
    frozen: Any = flax.struct.field(metadata={"trainable": False})


class Variables(flax.nnx.Module):
    def __init__(self) -> None:
        self.layers = flax.nnx.List([flax.nnx.Linear(2, 3, rngs=flax.nnx.Rngs(0))])
        self.drop = flax.nnx.Dropout(0.5, rngs=flax.nnx.Rngs(0))
        self.lora, self.bare = flax.nnx.LoRAParam(leaf()), flax.nnx.Variable(leaf())
        self.cache, self.intermediate = flax.nnx.Cache(leaf()), flax.nnx.Intermediate(leaf())
        self.statistic = flax.nnx.BatchStat(leaf())


class Foreign(eqx.Module):
    """Stands for a class of another package, of which a subclass is declared."""

    weight: Any
    bias: Any
    layers: Any = None


def declared(cls: type, *fields: Any, **options: Any) -> Any:
    """An instance of a subclass of its own, declared with these options."""
    tp.declare(cls := type("Declared", (cls,), {}), **options)
    return cls(*fields)


def with_running_statistics(mode: str) -> tuple[Any, Any]:
    """A layer by itself, and one with its state."""
    options = {"axis_name": "batch", "mode": mode}
    made, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, **options)
    return eqx.nn.BatchNorm(3, **options), {"layer": made, "state": state}


written = lambda value: [Written(value)]
holders = lambda: [{"a": cls(leaf(), [leaf(3), pair()])} for cls in (Plain, Struct)]
of_flax = lambda: [flax.nnx.state(Variables()), flax.nnx.split(Variables())[1]]
norms = lambda place: [with_running_statistics(mode)[place] for mode in ("ema", "batch")]
non_trainable = lambda: [{"a": paramax.NonTrainable({"w": leaf()}), "b": leaf(3)}]
foreign = lambda frozen: [[declared(Foreign, leaf(), leaf(), [pair()], freeze=frozen)]]
MLP = tuple(f"value.layers.{i}.{name}" for i in range(2) for name in ("weight", "bias"))
FLAX = ("layers.0.bias", "layers.0.kernel", "lora")  # neither `.value` nor keys
PATHS = [  # models, options of their layout, and the paths of what trains
    (lambda: [Thawing(leaf(), leaf())], {}, ("scale", "mean")),
    (lambda: [Options(rate=1.0, plain=[leaf()])], {}, ("rate", "plain.0")),
    (lambda: [Holder(Thawing(leaf(), leaf()), [leaf()])], {}, ("free.0",)),  # a frozen field freezes all below it
    # `trainable` written out says nothing of what is below.
    (lambda: written(np.ones(2, np.complex64)), {}, ("value",)),
    (lambda: written([leaf(), 1]), {}, ("value.0",)),
    (lambda: written(filled(eqx.nn.MLP, 2, 1, 2, 1)), {}, MLP),  # with functions in it
    (holders, {}, ("a.weight",)),
    (holders, {"thaw": "a.frozen.1.bias"}, ("a.weight", "a.frozen.1.bias")),
    (of_flax, {}, FLAX),
    (of_flax, {"thaw": "cache"}, ("cache", *FLAX)),
    (lambda: norms(0), {}, ("weight", "bias")),  # running statistics are no parameters
    (lambda: norms(1), {"trainable": "layer"}, ("layer.weight", "layer.bias")),
    (non_trainable, {}, ("b",)),
    (non_trainable, {"thaw": "a"}, ("a.tree.w", "b")),
    # Globs of `tp.declare` are relative to each instance.
    (lambda: foreign("bias"), {}, ("0.weight", "0.layers.0.bias", "0.layers.0.weight")),
    (lambda: foreign(("bias", "weight", "layers.*.bias")), {}, ("0.layers.0.weight",)),
]


@pytest.mark.filterwarnings("ignore:Using `field")
@pytest.mark.parametrize(("make", "options", "paths"), PATHS)
def test_what_trains_is_what_classes_say(make: Any, options: dict[str, Any], paths: tuple[str, ...]):
    for model in make():
        assert tp.layout(model, **options).paths == paths


@pytest.mark.filterwarnings("ignore:Using `field")
def test_a_field_is_a_field_of_equinox():
    options = Options(rate=2.0)
    assert isinstance(options.rate, jax.Array)
    assert (options.size, options.plain) == (2, None)
    assert [array.size for array in jax.tree.leaves(options)] == [1, 3]
    metadata = tp.field(trainable=False, metadata={"unit": "m"}).metadata
    assert (metadata["unit"], metadata["trainable"]) == ("m", False)
    assert "trainable" not in tp.field().metadata


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


def test_a_class_that_is_no_dataclass():
    two = declared(Pair, [leaf(), leaf()], leaf(), freeze="second", ties={"first.1": "first.0"})
    layout = tp.layout({"p": two, "q": Pair(leaf(), leaf())})
    assert (layout.paths, layout.ties) == (("p.first.0", "q.first", "q.second"), {"p.first.0": ("p.first.1",)})
