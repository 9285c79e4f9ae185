"""Accidents with ties: arrays that are one though nobody says so, and arrays that are two though nobody said so."""

import copy
import io
import itertools
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import optim
from treeparams._slots import accidents

from .. import verbs
from ..verbs import VERBS
from ..zoo import Pair, first_devices, ramp

zeros = lambda *shape: jnp.zeros(shape)
one_array = lambda *paths: pytest.warns(
    UserWarning, match=".*".join(map(repr, paths)) + " are one array, whose elements"
)
lost = lambda *paths: pytest.warns(UserWarning, match=" and ".join(map(repr, paths)) + " were one array")


def with_equal_biases(zero: Any) -> dict[str, Any]:
    return {"w": ramp(3, 3), "b1": zero, "b2": zero}


class Tower(eqx.Module):
    layers: Any
    norm: Any = None
    head: Any = tp.field(tied_to="layers.0", default=None)


class Block(eqx.Module):
    norm: Any
    weight: Any
    bias: Any


block = lambda bias=None: Block(jnp.ones(3), ramp(3, 3), zeros(3) if bias is None else bias)
table = lambda: tp.tie({"w": ramp(2), "a": zeros(2), "b": zeros(2), "c": zeros(2)}, "b", to="a")

# -- One array, though nobody says so ----------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", VERBS)
def test_one_initial_array_for_two_biases_is_noticed_once(verb: str):
    model = with_equal_biases(zeros(3))
    remedies = r"tp.untie\(model\), .*tied_to=.*tp.tie\(model, 'b2', to='b1'\).*, ties={'b2': 'b1'}"
    with pytest.warns(UserWarning, match=f"^'b1' and 'b2' are one array, whose elements .*{remedies}") as caught:
        VERBS[verb](model)
    assert [each.filename for each in caught] == [verbs.__file__]  # it points at the caller
    for again in (model, with_equal_biases(jnp.ones(4)), {"net": model, "temperature": ramp(2)}):
        tp.layout(again)


ACCIDENTS = {
    "biases of a net": (lambda: Tower([block(no := zeros(3)), block(no), block(no)]), [0, 1, 2], "layers.{}.bias"),
    "a NumPy array": (lambda: with_equal_biases(np.zeros(3, np.float32)), [1, 2], "b{}"),
    "beside a declared tie": (lambda: Tower([no := zeros(2)], no, no), ["layers.0", "norm"], "{}"),
    "two norms": (lambda: [Block(no := zeros(3), ramp(2), ramp(2)), Block(no, *ramp(2, 2))], [0, 1], "{}.norm"),
    "nodes of zeros alone": (lambda: Tower({"a": (no := [zeros(2), zeros()]), "c": no}), ["a", "c"], "layers.{}.0"),
}


@pytest.mark.parametrize(("make", "numbers", "name"), ACCIDENTS.values(), ids=ACCIDENTS)
def test_one_number_throughout_is_no_shared_parameter(make: Callable[[], Any], numbers: list[Any], name: str):
    paths = list(map(name.format, numbers))
    with one_array(*paths):
        assert tp.layout(make()).ties[paths[0]][: len(paths) - 1]  # a tie it stays


@pytest.mark.parametrize("copies", [lambda one: [one] * 4, lambda one: {"online": one, "target": one}])
def test_an_ensemble_that_is_one_member_is_noticed(copies: Callable[[Any], Any]):
    model = copies({"w": ramp(2, 3), "f": jnp.tanh, "layers": [ramp(3)]})
    with pytest.warns(UserWarning, match=r"are one array, in nodes that are the same throughout.*= tp.untie\(model\)"):
        tp.ravel(model)
    tp.layout(model)  # once
    assert tp.layout(jax.tree.map(tp.copy, model)).ties == {}  # as the warning asked for, so nothing was lost


SHARED = {
    "another value in one place": lambda: with_equal_biases(jnp.array([0.0, 0.0, 1.0])),
    "one element, and none": lambda: [one := zeros(1), one, none := zeros(0), none, number := zeros(), number],
    "a layer with its norm and bias": lambda: Tower([one := block(), block(), one]),
    "a layer many times": lambda: {"embed": ramp(2), "layers": [block()] * 12},
    "layers in a tuple of its own class": lambda: Pair(one := block(), one),
    "a declared tie": lambda: tp.tie(Tower([zeros(2)], None, zeros(2))),
    "tp.tie": table,
    "tp.tie, within": lambda: {"net": table(), "w": ramp(2)},
    "tp.tie, and then a part": lambda: tp.tie({"net": table()}, "net.c", to="net.a")["net"],
    "frozen by its class": lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch"),
    "integers": lambda: with_equal_biases(np.zeros(3, int)),
    "shapes": lambda: with_equal_biases(jax.ShapeDtypeStruct((3,), jnp.float32)),
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_what_is_shared_or_said_is_silent(make: Callable[[], Any]):
    tp.layout(make())


def test_ties_that_are_given_or_frozen_are_silent_and_values_of_others_are_read_once(monkeypatch):
    read, values = [], accidents._values_read
    monkeypatch.setattr(accidents, "_values_read", lambda array: read.append(array) or values(array))
    model = with_equal_biases(zeros(3))
    jax.eval_shape(lambda model: tp.layout(model).size, model)  # inside of a trace there is nothing to read
    for options in ({"freeze": ["b1", "b2"]}, {"ties": {"b2": "b1"}}, {}):
        tp.layout(model, **options)
    tp.layout({"net": model})
    assert not read
    shared = {"x": ramp(2), "y": ramp(3)}
    for _ in range(3):
        tp.layout(shared | {"z": shared["x"]})
        tp.layout(shared | {"z": shared["x"]}, lambda model: (model["x"], model["z"]))  # not remembered
    assert len(read) == 1


# -- Two arrays that were one ------------------------------------------------------------------------------------------


_count = itertools.count()


def tied() -> dict[str, Any]:
    """A model of a structure that this process has not met: that of one that is known teaches nothing new."""
    embed = ramp(2, 3)
    return {"embed": embed, "head": embed, f"zero{next(_count)}": zeros(2)}


def reloaded(model: Any) -> Any:
    eqx.tree_serialise_leaves(file := io.BytesIO(), model)
    file.seek(0)
    return eqx.tree_deserialise_leaves(file, model)


on_two = lambda *spec: NamedSharding(jax.make_mesh((2,), ("data",), devices=first_devices(2)), PartitionSpec(*spec))
PART = {
    "a file of Equinox": reloaded,
    "tree.map": lambda model: jax.tree.map(lambda a: a * 1, model),
    "a cast": lambda model: jax.tree.map(lambda a: a.astype(jnp.bfloat16), model),
    "jit": jax.jit(lambda model: model),
    "filter_jit": eqx.filter_jit(lambda model: model),
    "filter_shard": lambda model: eqx.filter_shard(model, on_two()),
}
KEEP = {
    "device_put": jax.device_put,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "tp.copy": tp.copy,
    "tp.jit": tp.jit(lambda model: model),
    "tp.ema": lambda model: tp.ema(tp.copy(model), model, decay=0.5),
}
WAYS = {
    "layout": tp.layout,
    "trainable": optim.trainable(optax.sgd(1.0)).init,
    "within": lambda model: tp.layout({"net": model, "temperature": ramp(2)}),
    "a mask": lambda model: tp.layout(model, jax.tree.map(lambda _: True, model)),
}


@pytest.mark.parametrize("name", [*PART, *KEEP])
def test_operations_that_part_a_tie_are_noticed(name: str):
    tp.layout(model := tied())
    after = (PART | KEEP)[name](model)
    if name in KEEP:
        assert tp.layout(after).ties == {"embed": ("head",)}
        return
    assert after["embed"] is not after["head"]
    call = r"model = tp.tie\(model, 'head', to='embed'\);.*model = tp.untie\(model\)"
    with pytest.warns(
        UserWarning, match=f"^'embed' and 'head' were one array .* two, equal bit for bit.*{call}"
    ) as caught:
        tp.layout(after)
    assert [each.filename for each in caught] == [__file__]
    tp.layout(after)  # once
    tp.layout(PART["tree.map"](model))


@pytest.mark.parametrize("way", WAYS)
def test_layouts_and_optimisers_notice_it(way: str):
    tp.layout(model := tied())
    with lost(*("net.embed", "net.head") if way == "within" else ("embed", "head")):
        WAYS[way](PART["tree.map"](model))


def test_what_only_looks_at_a_model_says_nothing_of_a_tie_that_its_layout_knows():
    embed = ramp(4, 3)
    model = {"in": embed, "out": embed, "scale": ramp(2)}
    state = (tx := optim.trainable(optax.sgd(0.1))).init(model)
    train = jax.jit(lambda m, s: optim.step(tx, tp.grad(lambda m: jnp.sum(m["in"] + m["out"]), s.layout)(m), s, m))
    model, state = train(model, state)
    tp.summary(model), tp.replace(model, {"scale": jnp.zeros_like}), optim.report(tx, model, state)
    with lost("in", "out"):
        tx.init(model)


def test_a_known_model_is_looked_at_again_when_a_tie_is_met():
    apart = {"embed": ramp(2, 3), "head": ramp(2, 3)}
    tp.layout(apart)
    tp.tie(apart, "head", to="embed")
    with lost("embed", "head"):
        tp.layout(apart)


def test_what_untie_made_is_remembered_and_so_is_what_follows_from_it():
    for part in (tp.untie, lambda model: tp.untie(model, "head"), lambda model: tp.untie({"net": model})["net"]):
        tp.layout(model := tied())
        apart = part(model)
        for follow in (*PART.values(), *KEEP.values()):
            assert tp.layout(follow(apart)).ties == tp.layout({"net": follow(apart)}).ties == {}
        jax.eval_shape(tp.grad(lambda model: jnp.sum(model["embed"])), apart)
        with lost("embed", "head"):  # tied again, it may be lost again
            tp.layout(PART["tree.map"](tp.tie(apart, "head", to="embed")))
    tp.layout(model := tied())
    tp.layout(tp.untie(PART["jit"](model)))  # the remedy for a model that has lost it already


def test_untying_one_tie_parts_no_other():
    tp.layout(model := {"a": (a := ramp(2)), "a2": a, "b": (b := ramp(3)), "b2": b})
    with lost("b", "b2"):
        tp.layout(PART["tree.map"](tp.untie(model, ["a", "a2"])))


SILENT = {
    "zeros": lambda model: {name: jnp.zeros_like(leaf) for name, leaf in model.items()},
    "another shape": lambda model: dict.fromkeys(model, zeros(1)) | {"embed": ramp(4), "head": ramp(4)},
    "one of another dtype": lambda model: model | {"head": model["embed"].astype(jnp.float16)},
    "other paths": lambda model: {"embed": ramp(2, 3), "other": ramp(2, 3), "head": zeros(2)},
    "gradients": lambda model: tp.grad(lambda model: jnp.sum(model["embed"] * model["head"]))(model),
}


@pytest.mark.parametrize("make", SILENT.values(), ids=SILENT)
def test_what_is_apart_on_purpose_is_silent(make: Callable[[Any], Any]):
    tp.layout(model := tied())
    assert tp.layout(make(model)).ties == {}


def test_ties_that_are_known_frozen_or_forgotten_are_not_lost():
    tp.layout(model := tied())
    after = PART["tree.map"](model)
    for options in ({"ties": {"head": "embed"}}, {"freeze": "head"}, {"trainable": "embed"}):
        tp.layout(after, **options)
    tower = tp.tie(Tower([ramp(2)], None, ramp(2)))
    assert tp.layout(PART["tree.map"](tower)).ties == {"layers.0": ("head",)}
    with pytest.warns(UserWarning, match="a layout of such a model ties 'head' to 'embed'") as caught:
        optim.trainable(optax.sgd(1.0)).init(after)
    assert len(caught) == 1


def test_shapes_are_no_model_that_was_met_apart():
    model = tied()
    shapes = jax.eval_shape(lambda: PART["tree.map"](model))
    tp.layout(shapes)
    tp.layout(model)
    tp.layout(shapes)  # of which nothing can be compared
    with lost("embed", "head"):
        tp.layout(PART["tree.map"](model))


def test_arrays_over_several_devices_and_such_as_are_gone():
    split = on_two("data")
    model = jax.device_put(tied(), split)
    with one_array("b1", "b2"):
        tp.layout(with_equal_biases(jax.device_put(zeros(4), split)))
    tp.layout(model := tp.tie(model, "head", to="embed"))
    parted = model | {"head": jax.device_put(np.asarray(model["embed"]), split)}
    with lost("embed", "head"), jax.transfer_guard("disallow"):
        tp.layout(parted)
    gone = {"a": (array := ramp(2) * 0), "c": array, "d": ramp(2)}
    array.delete()
    tp.layout(gone)
