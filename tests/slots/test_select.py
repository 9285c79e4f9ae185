"""What is trained: by a `where`, a mask or a given layout, by `freeze` and `thaw`; and what is said when nothing is."""

import functools
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..zoo import ramp


class Net(eqx.Module):
    body: list[Any]
    head: eqx.nn.Linear
    scale: jax.Array = tp.field(trainable=False)
    steps: jax.Array
    act: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x)


@functools.cache
def net() -> Net:
    linear = lambda outputs: eqx.nn.Linear(2, outputs, key=jax.random.key(outputs))
    return Net([linear(2), linear(2)], linear(1), ramp(1), jnp.array(0), jax.nn.relu)


BODY = ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias")
HEAD = ("head.weight", "head.bias")
WEIGHTS = ("body.0.weight", "body.1.weight", "head.weight")


def test_what_is_no_parameter():
    never = [1, 0.5, True, 1j, "text", jax.nn.relu, None, np.float32(1), np.bool_(True), jnp.arange(2), np.arange(2)]
    never += [jax.random.key(0), jax.random.PRNGKey(0), jnp.array(True), np.array(["a"]), np.array([None])]
    never += [np.zeros(2, jax.dtypes.float0)]
    assert tp.layout(never).paths == ()
    parameters = [ramp(), np.ones(1), ramp(1, dtype=jnp.complex64), np.ones(2, jnp.bfloat16), ramp(0)]
    assert len(tp.layout(parameters).paths) == len(parameters)


@pytest.mark.parametrize(
    ("where", "selected"),
    [
        ("**.weight", WEIGHTS),
        (re.compile(r"head\.w.*"), HEAD[:1]),
        (eqx.nn.Linear, BODY + HEAD),
        (lambda m: m.head, HEAD),
        (lambda m: [layer.weight for layer in m.body], WEIGHTS[:2]),
        (lambda m: (m.head.bias, {"k": m.body[1]}), (*BODY[2:], HEAD[1])),
        (eqx.nn.Lambda(lambda m: m.head), HEAD),  # a callable Module may be a `where`
        (["head.bias", re.compile(r"body\.1")], (*BODY[2:], HEAD[1])),
        (["body", "!body.0"], BODY[2:]),
        (["!body.0", "body"], BODY[2:]),  # whatever the order
        ([tp.leaves(lambda path, leaf: leaf.ndim == 2), "!head"], WEIGHTS[:2]),
    ],
)
def test_only_what_is_selected_is_trained(where: Any, selected: tuple[str, ...]):
    assert tp.layout(net(), where).paths == selected
    assert tp.ravel(net(), where)[1].layout.paths == selected
    rest = tuple(path for path in (*BODY, *HEAD, "scale") if path not in selected)
    assert tp.layout(net(), thaw="scale", freeze=where).paths == rest
    assert tp.layout(net()).thaw("scale").freeze(where).paths == rest
    assert tp.layout(net(), freeze="**").thaw(where).paths == selected


def test_a_rule_or_a_callable_names_each_place_of_a_tie():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "c": [5, 5, ramp(3)]}
    assert tp.layout(model, lambda m: m["c"]).paths == ("c.2",)
    assert tp.layout(model, freeze=lambda m: (m["a"], m["b"])).paths == ("c.2",)
    pairs = {"x": [ramp(1), ramp(1)], "y": ramp(1)}  # a new list that is built like one of the model
    assert tp.layout(pairs, lambda m: {"new": [m["x"][0], m["y"]]}).paths == ("x.0", "y")
    assert tp.layout(model, tp.leaves(lambda path, leaf: leaf.shape == (2,))).paths == ("a",)
    for only_a in (lambda m: m["a"], tp.leaves(lambda path, leaf: path == "a")):
        with pytest.raises(ValueError, match=r"'a' is frozen and 'b' is trained"):
            tp.layout(model, freeze=only_a)


# -- What selects nothing


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("heat.weight", r"'heat.weight' selects nothing; nearest: 'head.weight'"),
        (lambda m: None, r"^lambda at test_select.py:\d+ selects nothing; the model's parameters are 'body.0.weight'"),
        (lambda m: (m.act, m.steps), r"no parameter, only 'act' \(function, not an array\); only floating"),
        (["head", "boddy"], r"'boddy' selects nothing; nearest: 'body"),
        (["body", "!boddy"], r"'boddy' selects nothing"),
    ],
)
def test_what_selects_nothing_says_so(where: Any, message: str):
    layout = tp.layout(net())
    for use in (
        layout.freeze,
        layout.thaw,
        lambda where: tp.layout(net(), where),
        lambda where: tp.layout(net(), freeze=where),
        lambda where: tp.layout(net(), thaw=where),
        lambda where: tp.ravel(net(), where),
    ):
        with pytest.raises(ValueError, match=message):
            use(where)


def test_a_mask_is_tried_first_and_is_over_declarations():
    nothing, everything = (jax.tree.map(lambda _, word=word: word, net()) for word in (False, True))
    head = eqx.tree_at(lambda m: (m.head.weight, m.head.bias), nothing, (True, True))
    of_numpy = jax.tree.map(np.bool_, head)
    of_others_too = eqx.tree_at(lambda m: (m.steps, m.act), head, (True, True))  # which are no parameters
    for mask in (head, of_numpy, of_others_too, tp.layout(net(), "head").mask):
        assert callable(mask)
        assert tp.layout(net(), mask) == tp.layout(net(), "head")
    assert tp.layout(net(), everything).paths == (*BODY, *HEAD, "scale")
    assert tp.layout(net(), everything, freeze="body", thaw="body.0.bias").paths == ("body.0.bias", *HEAD, "scale")


def test_masks_of_trees_that_are_other_wheres_too():
    pair = [ramp(1), ramp(1)]
    assert tp.layout(pair, [True, False]).paths == ("0",)
    assert tp.layout(tuple(pair), (False, True)).paths == ("1",)
    assert tp.layout(ramp(1), True).paths == ("",)
    assert tp.layout({"a": pair, "n": None}, {"a": [False, True], "n": None}).paths == ("a.1",)


# -- Freeze, then thaw


def test_freeze_then_thaw_before_anything_is_checked_and_the_last_word_wins():
    shared = ramp(2)
    model = {"encoder": {"embed": shared, "w": ramp(2)}, "head": shared}
    words = {"freeze": "encoder", "thaw": "encoder.embed"}  # between the two the tie is half frozen
    assert tp.layout(model, **words).paths == ("encoder.embed",)
    assert tp.layout(model, tp.layout(model), **words) == tp.layout(model, **words)
    assert tp.layout(model, "head", thaw="encoder.embed").paths == ("encoder.embed",)
    assert tp.layout(net(), "head", thaw="scale").paths == (*HEAD, "scale")
    given = tp.layout(model, ties={"encoder.w": "head"})
    assert tp.layout(model, given).ties == {"head": ("encoder.embed", "encoder.w")}
    assert tp.layout(net(), "body", freeze="body.0", thaw=["scale", "body.0.bias"]).paths == (*BODY[1:], "scale")
    assert tp.layout(net(), thaw="head.bias", freeze="**").paths == HEAD[1:]
    layout = tp.layout(net())
    assert tp.layout(net(), freeze="scale", thaw="scale") == layout.thaw("scale") != layout
    assert layout.thaw("scale").freeze("scale") == layout.freeze("body").thaw("body") == layout
    assert layout.freeze("**").size == 0
    assert layout.freeze("**").thaw("head").freeze("head.bias").paths == HEAD[:1]


# -- A given layout


def test_inside_plain_jit_a_layout_made_outside_knows_what_is_lost_there():
    shared = ramp(2)
    model = {"a": shared, "b": shared, "n": [0.5, 2]}  # the tie and that `n` is no array
    layout = tp.layout(model)
    inside = jax.jit(lambda model: tp.grad(lambda m: jnp.sum(m["a"] + m["b"]) * m["n"][0], layout)(model))(model)
    assert inside["b"] is inside["n"][0] is None
    assert inside["a"].tolist() == [1.0, 1.0]


def test_other_lists_need_one_that_selects():
    layout, (vector, restructure) = tp.layout(net()), tp.ravel(net())
    assert layout.freeze("**").thaw(["**", "!scale", "!head"]).paths == BODY
    assert layout.freeze(["!head.bias", "head"]).paths == (*BODY, HEAD[1])
    assert layout.indices(["head", "!head.weight"]).tolist() == [14]
    assert list(restructure.view(vector)["**", "!body"]) == list(HEAD)
    for use in (layout.freeze, layout.thaw, layout.indices):
        with pytest.raises(ValueError, match=r"'!head' only excludes; write .* before it: \['\*\*', '!head'\]"):
            use("!head")
        with pytest.raises(ValueError, match=r"selects nothing: everything is excluded"):
            use(["head", "!head"])


def test_what_takes_away_takes_from_what_is_declared():
    for where, selected in (("!head", BODY), (["!head", "!body.0"], BODY[2:]), ("!**.bias", WEIGHTS)):
        assert tp.layout(net(), where).paths == tuple(tp.trainables(net(), where)) == selected
    assert tp.layout(net(), "!head", thaw="scale").paths == (*BODY, "scale")
    with pytest.raises(ValueError, match="selects nothing: everything is excluded or declared frozen"):  # as `scale` is
        tp.layout({"net": net(), "x": ramp(1)}, [re.compile("net.(scale|head.*)"), "!net.head"])
    assert tp.layout({"!a": ramp(1), "b": ramp(1)}, '"!a"').paths == ('"!a"',)
    for where in ("!**", ["head", "!head"]):
        with pytest.raises(ValueError, match=r"selects nothing: everything is excluded"):
            tp.layout(net(), where)


def test_leaves_by_shape_and_path():
    seen = []

    def is_matrix(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
        seen.append((path, leaf.shape, leaf.dtype))
        return leaf.ndim >= 2

    assert tp.layout(net(), tp.leaves(is_matrix)).paths == WEIGHTS
    assert seen == [(path, tp.layout(net(), thaw="**")[path].shape, jnp.float32) for path in (*BODY, *HEAD, "scale")]
    threshold = [1]
    rule = tp.leaves(lambda path, leaf: leaf.ndim > threshold[0])
    assert tp.layout(net(), rule).paths == WEIGHTS
    threshold[0] = 0  # a rule may close over what changes: it is asked anew each time
    assert tp.layout(net(), rule).paths == (*BODY, *HEAD)


def test_positions_in_a_list_count_from_the_end():
    net = {"blocks": [{"w": jnp.ones(2)}, {"w": jnp.ones(2)}, (jnp.ones(2), jnp.ones(3))], "-1": jnp.ones(4)}
    for where, paths in (
        ("blocks.-1", ("blocks.2.0", "blocks.2.1")),
        ("blocks.-1.-2", ("blocks.2.0",)),
        ("**.-3.w", ("blocks.0.w",)),
        (["blocks", "!blocks.-1"], ("blocks.0.w", "blocks.1.w")),
        ("-1", ("-1",)),
    ):
        assert tp.layout(net, where).paths == paths
    with pytest.raises(ValueError, match=r"'blocks.-4' selects nothing; nearest"):
        tp.layout(net, "blocks.-4")
