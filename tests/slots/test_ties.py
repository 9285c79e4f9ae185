"""Ties: how they arise, that they are trained or frozen as a whole, and what no tie can be."""

import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import sharding

from ..zoo import Norm, Pair, first_devices, ramp as leaf


class Codec(eqx.Module):
    encoder: Any
    decoder: Any


tp.declare(Codec, ties={"decoder": ("encoder", jnp.transpose)})


class Declares(eqx.Module):
    encoder: Any
    decoder: Any = tp.field(tied_to="encoder", transform=jnp.transpose)
    inner: Any = None
    shifted: Any = tp.field(tied_to="inner.encoder", default=None)


codec = lambda: Codec(leaf(2, 3), leaf(3, 2))
squares = lambda: {name: leaf(2, 2) for name in "abcd"}
shared = lambda: (lambda array: {"online": {"w": array, "b": leaf(1)}, "target": {"w": array}})(leaf(2))


def test_the_same_array_is_tied_wherever_it_stands():
    array, view = leaf(2, 2), np.array(leaf(2, 2))
    model = {"a": [array, view], "b": Pair(array, (view, array)), "c": leaf(2, 2)}
    assert tp.layout(model).ties == {"a.0": ("b.first", "b.second.1"), "a.1": ("b.second.0",)}
    assert tp.layout(model).paths == ("a.0", "a.1", "c")


def test_what_only_looks_the_same_never_ties():
    array, numpy, number, integers, key = leaf(2, 2), np.ones((2, 2)), 0.5, np.arange(2), jax.random.key(0)
    never = [leaf(2, 2), array, array.copy(), array.T, array[:2, :1], jnp.asarray(np.asarray(array))]
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
    inner = {"encoder": leaf(2, 3)}
    model = [Declares(leaf(2, 3), leaf(3, 2), inner, leaf(2, 3)), {"k": Declares(leaf(2, 3), leaf(3, 2))}]
    assert tp.layout(model).ties == {
        "0.encoder": ("0.decoder",),
        "0.inner.encoder": ("0.shifted",),
        "1.k.encoder": ("1.k.decoder",),
    }
    tied = tp.tie(model)[0]
    np.testing.assert_array_equal(tied.decoder, tied.encoder.T)
    assert tied.shifted is tied.inner["encoder"] is inner["encoder"]
    nothing = Declares(leaf(2, 3), None)  # nothing there is no alias
    assert tp.layout(nothing).ties == {}
    assert tp.tie(nothing).encoder is nothing.encoder

    class Narrower(Declares):
        decoder: Any = tp.field(trainable=False)  # a field defined anew is declared anew

    assert tp.layout(Narrower(leaf(2, 3), leaf(3, 2))).ties == {}

    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class NoModule:
        a: Any
        b: Any = dataclasses.field(metadata={"tied_to": "a"})

    assert tp.layout(NoModule(leaf(2), leaf(2))).ties == {"a": ("b",)}


def test_a_declared_tie_holds_where_arrays_no_longer_tell():
    loss = lambda m: jnp.sum(m.encoder * 2) + jnp.sum(m.decoder * 3)
    grads = jax.jit(tp.grad(loss))(codec())  # a plain `jit`, and no layout
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


@pytest.mark.parametrize("transform", [None, jnp.transpose])
@pytest.mark.parametrize("end", ["embed", "head", "body.head"])
def test_a_tie_that_is_said_is_named_by_either_end(end: str, transform: Any):
    """By its source, or by its alias alone, also by a node that holds nothing else."""
    alias = "head" if end == "embed" else end
    head = {"head": leaf(3, 2) if transform else leaf(2, 3)}
    model: Any = {"embed": leaf(2, 3), "bias": leaf(2)} | (head if alias == "head" else {"body": head})
    ties: Any = {alias: ("embed", transform) if transform else "embed"}
    layout = tp.layout(model, ties=ties)
    assert layout.ties == {"embed": (alias,)}
    bias, mesh = layout.freeze("embed"), jax.make_mesh((2,), ("data",), devices=first_devices(2))
    for node in dict.fromkeys((end, end.split(".")[0])):
        assert layout.freeze(node) == bias == layout.freeze(["**", "!bias"])
        assert bias.thaw(node) == layout == layout.freeze("**").thaw(["**"]) != layout.freeze(["**", f"!{node}"])
        assert tp.layout(model, f"!{node}", ties=ties).size == 2
        assert tp.layout(model, node, ties=ties).paths == ("embed",)
        assert layout.indices(node).tolist() == layout.indices("embed").tolist()
        vector, restructure = tp.ravel(tp.tie(model, layout), layout)
        assert list(restructure.view(vector)[f"{node}.**"]) == ["embed"]
        stacks, _ = tp.stack(model, layout, groups={"tied": node, "rest": "**"})
        assert jax.tree.map(jnp.shape, stacks) == {"tied": {"float32[2,3]": (1, 2, 3)}, "rest": {"float32[2]": (1, 2)}}
        plan = sharding.plan(layout, mesh, {node: "split", "**": "whole"})
        assert plan.replicated.keys() == {"bias"}


class Language(eqx.Module):
    embed: Any
    head: Any = tp.field(tied_to="embed")
    bias: Any = None


def test_a_declared_tie_is_named_by_either_end():
    apart = Language(leaf(2, 3), leaf(2, 3), leaf(2))
    for model, end in ((model, end) for model in (apart, tp.tie(apart)) for end in ("embed", "head")):
        assert tp.layout(model, freeze=end).paths == tp.layout(model, f"!{end}").paths == ("bias",)
        assert tp.layout(model, freeze=["head", "embed"]).paths == ("bias",)
        assert tp.layout(model, f"!{end}").size == 2
        grads = tp.grad(lambda m: jnp.sum(m.embed) + jnp.sum(m.head), end)(model)
        assert grads.bias is None is grads.head
        assert grads.embed.tolist() == [[2.0] * 3] * 2


def test_a_word_for_a_node_is_no_word_for_an_alias_with_a_transform_below_it():
    ties = {"mean.w": ("scale", jnp.transpose)}
    model = {"mean": {"w": leaf(3, 2), "b": leaf(2)}, "scale": leaf(2, 3)}
    assert tp.layout(model, freeze="mean", ties=ties).mask == {"mean": {"w": True, "b": False}, "scale": True}
    assert tp.layout(model, "mean", ties=ties).mask == {"mean": {"w": False, "b": True}, "scale": False}
    assert tp.layout(Norm(**model), ties=ties).ties == {"scale": ("mean.w",)}
    with pytest.raises(ValueError, match=r"'mean.w' is transpose of 'scale', its source"):
        tp.layout(Norm(leaf(2, 3), {"w": leaf(3, 2)}), ties=ties)  # said of nothing else


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
    model = {"a": leaf(2, 3), "b": leaf(3, 2), "c": leaf(2, 3), "frozen": leaf(1), "too": leaf(1)}
    ties = {"b": ("a", jnp.transpose), "c": "a", "too": "frozen"}
    tied = tp.tie(model, tp.layout(model, freeze=["frozen", "too"], ties=ties))
    np.testing.assert_array_equal(tied["b"], tied["a"].T)
    assert tied["c"] is tied["a"] is model["a"]
    assert tied["too"] is tied["frozen"]
    assert tp.layout(tied).ties == {"a": ("c",), "frozen": ("too",)}
