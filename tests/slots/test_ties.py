"""Ties: how they arise, that they are trained or frozen as a whole, what no tie can be; and accidents with them."""

import copy
import io
import itertools
import pickle
import re
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
from treeparams import optim, sharding
from treeparams._slots import accidents

from .. import verbs
from ..verbs import VERBS
from ..zoo import Norm, Pair, first_devices, ramp


class Codec(eqx.Module):
    encoder: Any
    decoder: Any


tp.declare(Codec, ties={"decoder": ("encoder", jnp.transpose)})


class Declares(eqx.Module):
    encoder: Any
    decoder: Any = tp.field(tied_to="encoder", transform=jnp.transpose)
    inner: Any = None
    shifted: Any = tp.field(tied_to="inner.encoder", default=None)


codec = lambda: Codec(ramp(2, 3), ramp(3, 2))
squares = lambda: {name: ramp(2, 2) for name in "abcd"}
shared = lambda: {"online": {"w": (array := ramp(2)), "b": ramp(1)}, "target": {"w": array}}


def test_the_same_array_is_tied_wherever_it_stands():
    array, view = ramp(2, 2), np.array(ramp(2, 2))
    model = {"a": [array, view], "b": Pair(array, (view, array)), "c": ramp(2, 2)}
    assert tp.layout(model).ties == {"a.0": ("b.first", "b.second.1"), "a.1": ("b.second.0",)}
    assert tp.layout(model).paths == ("a.0", "a.1", "c")


def test_what_only_looks_the_same_never_ties():
    array, numpy, number, integers, key = ramp(2, 2), np.ones((2, 2)), 0.5, np.arange(2), jax.random.key(0)
    never = [ramp(2, 2), array, array.copy(), array.T, array[:2, :1], jnp.asarray(np.asarray(array))]
    never += [numpy, numpy[:], numpy.T, numpy.view(), [number, number, np.float32(1)], integers, integers, key, key]
    assert tp.layout(never).ties == {}
    assert len(tp.layout(never).paths) == 10


def test_the_path_named_as_source_is_the_slot():
    for ties, paths, found in (
        ({"b": "a"}, "acd", {"a": ("b",)}),
        ({"a": "b"}, "bcd", {"b": ("a",)}),
        ({"a": "d", "b": "d"}, "cd", {"d": ("a", "b")}),
        ({"b": "a", "c": "b", "d": "c"}, "a", {"a": ("b", "c", "d")}),
        ({"a": ("c", jnp.transpose), "d": "b"}, "bc", {"b": ("d",), "c": ("a",)}),
    ):
        layout = tp.layout(squares(), ties=ties)
        assert (layout.paths, layout.ties) == (tuple(paths), found)
        assert layout.mask == dict.fromkeys("abcd", True)
    joined = squares()
    joined["b"], joined["d"] = joined["a"], joined["c"]
    assert tp.layout(joined, ties={"a": "d"}).ties == {"d": ("a", "b", "c")}
    assert tp.layout(joined, ties={"a": "b"}).ties == {"b": ("a",), "c": ("d",)}


def test_ties_that_a_field_declares():
    inner = {"encoder": ramp(2, 3)}
    model = [Declares(ramp(2, 3), ramp(3, 2), inner, ramp(2, 3)), {"k": Declares(ramp(2, 3), ramp(3, 2))}]
    assert tp.layout(model).ties == {
        "0.encoder": ("0.decoder",),
        "0.inner.encoder": ("0.shifted",),
        "1.k.encoder": ("1.k.decoder",),
    }
    tied = tp.tie(model)[0]
    np.testing.assert_array_equal(tied.decoder, tied.encoder.T)
    assert tied.shifted is tied.inner["encoder"] is inner["encoder"]
    nothing = Declares(ramp(2, 3), None)  # nothing there is no alias
    assert tp.layout(nothing).ties == {}
    assert tp.tie(nothing).encoder is nothing.encoder

    class Narrower(Declares):
        decoder: Any = tp.field(trainable=False)  # a field defined anew is declared anew

    assert tp.layout(Narrower(ramp(2, 3), ramp(3, 2))).ties == {}


def test_a_declared_tie_holds_where_arrays_no_longer_tell():
    grads = jax.jit(tp.grad(lambda m: jnp.sum(m.encoder * 2) + jnp.sum(m.decoder * 3)))(codec())  # a plain `jit`
    np.testing.assert_array_equal(grads.encoder, np.full((2, 3), 5.0))
    assert grads.decoder is None
    assert tp.layout(grads).paths == ("encoder",)  # a canonical tree is a model too


# -- Trained as a whole


def test_the_remedies_that_are_named_help():
    model = shared()
    model["third"] = dict(model["target"])
    with pytest.raises(ValueError, match=r"is trained and '.*' is frozen") as caught:
        tp.layout(model, freeze="third")
    ((named,),) = [re.findall(r"freeze=\[(.*?)\]", str(caught.value))]
    every = re.findall(r"'(.*?)'", named)
    assert tp.layout(model, freeze=every).paths == ("online.b",)
    assert tp.layout(model, freeze="**", thaw=every).paths == tp.layout(model, every).paths == ("online.w",)
    assert tp.layout(model | {"third": tp.copy(model["third"])}, freeze="third").paths == ("online.b", "online.w")


def test_ties_of_frozen_parameters_are_remembered_and_an_alias_with_a_transform_follows_its_source():
    layout = tp.layout(codec())
    for each in (tp.layout(shared()), layout):
        frozen = each.freeze("**")
        assert (frozen.size, frozen.ties, frozen.thaw("**")) == (0, each.ties, each)
    frozen = layout.freeze("encoder")
    assert layout == tp.layout(codec(), "encoder") == frozen.thaw("encoder")
    assert frozen == tp.layout(codec(), freeze=["encoder", "decoder"]) != layout
    assert jax.tree.leaves(frozen.mask) == [False, False]


class Language(eqx.Module):
    embed: Any
    head: Any = tp.field(tied_to="embed")
    bias: Any = None


HEAD = {"embed": ramp(2, 3), "head": ramp(2, 3), "bias": ramp(2)}
BODY = {"embed": ramp(2, 3), "body": {"head": ramp(3, 2)}, "bias": ramp(2)}
DECLARED = Language(ramp(2, 3), ramp(2, 3), ramp(2))
SAID = [  # a model, its ties, and what names the tie: its source, its alias, a node that holds nothing else
    (HEAD, {"head": "embed"}, ["embed", "head"]),
    (BODY, {"body.head": ("embed", jnp.transpose)}, ["embed", "body.head", "body"]),
    (DECLARED, None, ["embed", "head"]),
    (tp.tie(DECLARED), None, ["head", "embed"]),
]


@pytest.mark.parametrize(("model", "ties", "names"), SAID)
def test_a_tie_that_is_said_or_declared_is_named_by_either_end(model: Any, ties: Any, names: list[str]):
    layout = tp.layout(model, ties=ties)
    assert layout.ties == {"embed": tuple(ties or ["head"])}
    bias, mesh = layout.freeze("embed"), jax.make_mesh((2,), ("data",), devices=first_devices(2))
    assert bias.paths == ("bias",)
    total = tp.grad(lambda model: sum(map(jnp.sum, jax.tree.leaves(model))), tp.layout(model, names[0], ties=ties))
    assert [grads.tolist() for grads in jax.tree.leaves(total(model))] == [[[2.0] * 3] * 2]
    for name in names:
        assert layout.freeze(name) == bias == layout.freeze(["**", "!bias"]) == tp.layout(model, freeze=name, ties=ties)
        assert bias.thaw(name) == layout == layout.freeze("**").thaw(["**"]) != layout.freeze(["**", f"!{name}"])
        assert tp.layout(model, f"!{name}", ties=ties) == bias
        assert tp.layout(model, name, ties=ties).paths == ("embed",)
        assert layout.indices(name).tolist() == layout.indices("embed").tolist()
        vector, restructure = tp.ravel(tp.tie(model, layout), layout)
        assert list(restructure.view(vector)[f"{name}.**"]) == ["embed"]
        stacks, _ = tp.stack(model, layout, groups={"tied": name, "rest": "**"})
        assert jax.tree.map(jnp.shape, stacks) == {"tied": {"float32[2,3]": (1, 2, 3)}, "rest": {"float32[2]": (1, 2)}}
        plan = sharding.plan(layout, mesh, {name: "split", "**": "whole"})
        assert plan.replicated.keys() == {"bias"}
    assert tp.layout(model, freeze=[*names, "embed"], ties=ties) == bias


def test_a_word_for_a_node_is_no_word_for_an_alias_with_a_transform_below_it():
    ties = {"mean.w": ("scale", jnp.transpose)}
    model = {"mean": {"w": ramp(3, 2), "b": ramp(2)}, "scale": ramp(2, 3)}
    assert tp.layout(model, freeze="mean", ties=ties).mask == {"mean": {"w": True, "b": False}, "scale": True}
    assert tp.layout(model, "mean", ties=ties).mask == {"mean": {"w": False, "b": True}, "scale": False}
    assert tp.layout(Norm(**model), ties=ties).ties == {"scale": ("mean.w",)}
    with pytest.raises(ValueError, match=r"'mean.w' is transpose of 'scale', its source"):
        tp.layout(Norm(ramp(2, 3), {"w": ramp(3, 2)}), ties=ties)  # said of nothing else


# -- tie, untie


def test_tie_and_untie():
    once = tp.tie(model := squares(), "c", to="b")
    assert once["c"] is once["b"] is model["b"]
    assert all(once[name] is model[name] for name in "abd")
    assert tp.layout(once).ties == {"b": ("c",)}
    both = tp.tie(once, "d", to="a")
    assert tp.layout(tp.untie(both, "d")).ties == {"b": ("c",)} == tp.layout(tp.untie(both, "a")).ties
    apart = tp.untie(both)
    assert tp.layout(apart).ties == {}
    jax.tree.map(np.testing.assert_array_equal, apart, both)
    assert len({array.unsafe_buffer_pointer() for array in apart.values()}) == 4


def test_tie_sets_what_a_class_or_a_layout_says():
    for declared in (tp.tie(codec()), tp.tie(codec(), "decoder", to="encoder", transform=jnp.transpose)):
        np.testing.assert_array_equal(declared.decoder, declared.encoder.T)
    assert tp.layout(tp.untie(declared)).ties == {"encoder": ("decoder",)}
    model = {"a": ramp(2, 3), "b": ramp(3, 2), "c": ramp(2, 3), "frozen": ramp(1), "too": ramp(1)}
    ties = {"b": ("a", jnp.transpose), "c": "a", "too": "frozen"}
    tied = tp.tie(model, tp.layout(model, freeze=["frozen", "too"], ties=ties))
    np.testing.assert_array_equal(tied["b"], tied["a"].T)
    assert tied["c"] is tied["a"] is model["a"]
    assert tied["too"] is tied["frozen"]
    assert tp.layout(tied).ties == {"a": ("c",), "frozen": ("too",)}


# -- Accidents: arrays that are one though nobody says so, and arrays that are two though nobody said so ---------------

zeros = lambda *shape: jnp.zeros(shape)
warned = lambda words: pytest.warns(UserWarning, match=words)
one_array = lambda *paths: warned(".*".join(map(repr, paths)) + " are one array, whose elements")
lost = lambda *paths: warned(" and ".join(map(repr, paths)) + " were one array")
with_equal_biases = lambda zero: {"w": ramp(3, 3), "b1": zero, "b2": zero}


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


@pytest.mark.parametrize("verb", VERBS)
def test_one_initial_array_for_two_biases_is_noticed_once(verb: str):
    model = with_equal_biases(zeros(3))
    remedies = r"tp.untie\(model\), .*tied_to=.*tp.tie\(model, 'b2', to='b1'\).*, ties={'b2': 'b1'}"
    with warned(f"^'b1' and 'b2' are one array, whose elements .*{remedies}") as caught:
        VERBS[verb](model)
    assert [each.filename for each in caught] == [verbs.__file__]  # it points at the caller
    for again in (model, with_equal_biases(jnp.ones(4)), {"net": model, "temperature": ramp(2)}):
        tp.layout(again)


ACCIDENTS = {
    "biases of a net": (lambda: Tower([block(no := zeros(3)), block(no), block(no)]), [0, 1, 2], "layers.{}.bias"),
    "beside a declared tie": (lambda: Tower([no := zeros(2)], no, no), ["layers.0", "norm"], "{}"),
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
    with warned(r"are one array, in nodes that are the same throughout.*= tp.untie\(model\)"):
        tp.ravel(model)
    tp.layout(model)  # once
    assert tp.layout(jax.tree.map(tp.copy, model)).ties == {}  # as the warning asked for, so nothing was lost


SHARED = {
    "another value in one place": lambda: with_equal_biases(jnp.array([0.0, 0.0, 1.0])),
    "one element, and none": lambda: [one := zeros(1), one, none := zeros(0), none, number := zeros(), number],
    "a layer with its norm and bias": lambda: Tower([one := block(), block(), one]),
    "a layer many times": lambda: {"embed": ramp(2), "layers": [block()] * 12},
    "a declared tie": lambda: tp.tie(Tower([zeros(2)], None, zeros(2))),
    "tp.tie, within": lambda: {"net": table(), "w": ramp(2)},
    "tp.tie, and then a part": lambda: tp.tie({"net": table()}, "net.c", to="net.a")["net"],
    "frozen by its class": lambda: eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch"),
    "integers": lambda: with_equal_biases(np.zeros(3, int)),
}


@pytest.mark.parametrize("make", SHARED.values(), ids=SHARED)
def test_what_is_shared_or_said_is_silent(make: Callable[[], Any]):
    tp.layout(make())


def test_ties_that_are_given_frozen_or_known_are_silent_and_no_value_is_read(monkeypatch):
    read = []
    monkeypatch.setattr(accidents, "_values_read", read.append)
    model = with_equal_biases(zeros(3))
    jax.eval_shape(lambda model: tp.layout(model).size, model)  # inside of a trace there is nothing to read
    for options in ({"freeze": ["b1", "b2"]}, {"ties": {"b2": "b1"}}, {}):
        tp.layout(model, **options)
    tp.layout({"net": model})
    assert not read


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
}
KEEP = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "tp.copy": tp.copy,
    "tp.jit": tp.jit(lambda model: model),
    "tp.ema": lambda model: tp.ema(tp.copy(model), model, decay=0.5),
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
    with warned(f"^'embed' and 'head' were one array .* two, equal bit for bit.*{call}") as caught:
        tp.layout(after)
    assert [each.filename for each in caught] == [__file__]
    tp.layout(after)  # once
    tp.layout(PART["tree.map"](model))


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
    with warned("a layout of such a model ties 'head' to 'embed'") as caught:
        optim.trainable(optax.sgd(1.0)).init(after)
    assert len(caught) == 1


def test_arrays_over_several_devices_are_compared():
    split = on_two("data")
    model = jax.device_put(tied(), split)
    with one_array("b1", "b2"):
        tp.layout(with_equal_biases(jax.device_put(zeros(4), split)))
    tp.layout(model := tp.tie(model, "head", to="embed"))
    parted = model | {"head": jax.device_put(np.asarray(model["embed"]), split)}
    with lost("embed", "head"), jax.transfer_guard("disallow"):
        tp.layout(parted)
