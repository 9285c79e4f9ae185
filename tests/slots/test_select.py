"""What is trained: by a `where`, a mask or a given layout, by `freeze` and `thaw`; and what is refused."""

import collections
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..zoo import Norm, Pair, filled, ramp


class Net(eqx.Module):
    body: list[Any]
    head: eqx.nn.Linear
    scale: jax.Array = tp.field(trainable=False)
    steps: jax.Array
    act: Any

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.head(x)


NET = Net(
    [filled(eqx.nn.Linear, 2, outputs) for outputs in (2, 2)],
    filled(eqx.nn.Linear, 2, 1),
    ramp(1),
    np.array(0),
    jax.nn.relu,
)
BODY = ("body.0.weight", "body.0.bias", "body.1.weight", "body.1.bias")
HEAD = ("head.weight", "head.bias")
WEIGHTS = ("body.0.weight", "body.1.weight", "head.weight")
PAIR = [ramp(1), ramp(1)]
TIED = {"a": (_shared := ramp(2)), "b": _shared, "c": [5, 5, ramp(3)]}
CODER = {"encoder": {"embed": _shared, "w": ramp(2)}, "head": _shared}
BLOCKS = {"blocks": [{"w": ramp(2)}, {"w": ramp(2)}, (ramp(2), ramp(3))], "-1": ramp(4)}
WHERES = {
    "a glob": ("**.weight", WEIGHTS),
    "a regex": (re.compile(r"head\.w.*"), HEAD[:1]),
    "a class": (eqx.nn.Linear, BODY + HEAD),
    "a node": (lambda m: m.head, HEAD),
    "arrays": (lambda m: [layer.weight for layer in m.body], WEIGHTS[:2]),
    "an array and a node": (lambda m: (m.head.bias, {"k": m.body[1]}), (*BODY[2:], HEAD[1])),
    "a callable Module": (eqx.nn.Lambda(lambda m: m.head), HEAD),
    "a glob and a regex": (["head.bias", re.compile(r"body\.1")], (*BODY[2:], HEAD[1])),
    "all but": (["body", "!body.0"], BODY[2:]),
    "all but, in another order": (["!body.0", "body"], BODY[2:]),
    "leaves, and not": ([tp.leaves(lambda path, leaf: leaf.ndim == 2), "!head"], WEIGHTS[:2]),
}


def test_what_is_no_parameter():
    never = [1, 0.5, True, 1j, "text", jax.nn.relu, None, np.float32(1), np.bool_(True), jnp.arange(2), np.arange(2)]
    never += [jax.random.key(0), jax.random.PRNGKey(0), jnp.array(True), np.array(["a"]), np.array([None])]
    never += [np.zeros(2, jax.dtypes.float0)]
    assert tp.layout(never).paths == ()
    parameters = [ramp(), np.ones(1), ramp(1, dtype=jnp.complex64), np.ones(2, jnp.bfloat16), ramp(0)]
    assert len(tp.layout(parameters).paths) == len(parameters)


@pytest.mark.parametrize(("where", "selected"), WHERES.values(), ids=WHERES)
def test_only_what_is_selected_is_trained(where: Any, selected: tuple[str, ...]):
    assert tp.layout(NET, where).paths == selected
    assert tp.ravel(NET, where)[1].layout.paths == selected
    rest = tuple(path for path in (*BODY, *HEAD, "scale") if path not in selected)
    assert tp.layout(NET, thaw="scale", freeze=where).paths == rest
    assert tp.layout(NET).thaw("scale").freeze(where).paths == rest
    assert tp.layout(NET, freeze="**").thaw(where).paths == selected


TRAINED = [  # of which model, what of `tp.layout`, and what is trained then
    # Masks that are other wheres too.
    (PAIR, {"trainable": [True, False]}, ("0",)),
    (ramp(1), {"trainable": True}, ("",)),
    ({"a": PAIR, "n": None}, {"trainable": {"a": [False, True], "n": None}}, ("a.1",)),
    # A rule or a callable names each place of a tie; a new list may be built like one of the model.
    (TIED, {"trainable": lambda m: m["c"]}, ("c.2",)),
    (TIED, {"freeze": lambda m: (m["a"], m["b"])}, ("c.2",)),
    ({"x": PAIR, "y": ramp(1)}, {"trainable": lambda m: {"new": [m["x"][0], m["y"]]}}, ("x.0", "y")),
    # First `freeze`, then `thaw`, before anything is checked: between the two a tie may be half frozen.
    (CODER, {"freeze": "encoder", "thaw": "encoder.embed"}, ("encoder.embed",)),
    (CODER, {"trainable": tp.layout(CODER), "freeze": "encoder", "thaw": "encoder.embed"}, ("encoder.embed",)),
    (NET, {"trainable": "head", "thaw": "scale"}, (*HEAD, "scale")),
    (NET, {"trainable": "body", "freeze": "body.0", "thaw": ["scale", "body.0.bias"]}, (*BODY[1:], "scale")),
    (NET, {"thaw": "head.bias", "freeze": "**"}, HEAD[1:]),
    # What takes away takes from what is declared.
    (NET, {"trainable": "!head"}, BODY),
    (NET, {"trainable": ["!head", "!body.0"]}, BODY[2:]),
    (NET, {"trainable": "!**.bias"}, WEIGHTS),
    ({"!a": ramp(1), "b": ramp(1)}, {"trainable": '"!a"'}, ('"!a"',)),
    # Positions in a list count from the end.
    (BLOCKS, {"trainable": "blocks.-1"}, ("blocks.2.0", "blocks.2.1")),
    (BLOCKS, {"trainable": "blocks.-1.-2"}, ("blocks.2.0",)),
    (BLOCKS, {"trainable": ["blocks", "!blocks.-1"]}, ("blocks.0.w", "blocks.1.w")),
    (BLOCKS, {"trainable": "-1"}, ("-1",)),
]


@pytest.mark.parametrize(("model", "options", "paths"), TRAINED)
def test_what_is_trained(model: Any, options: dict[str, Any], paths: tuple[str, ...]):
    assert tp.layout(model, **options).paths == paths
    if options.keys() == {"trainable"}:
        assert tuple(tp.trainables(model, options["trainable"])) == paths


def test_a_mask_is_tried_first_and_is_over_declarations():
    nothing, everything = (jax.tree.map(lambda _, word=word: word, NET) for word in (False, True))
    head = eqx.tree_at(lambda m: (m.head.weight, m.head.bias), nothing, (True, True))
    of_numpy = jax.tree.map(np.bool_, head)
    of_others_too = eqx.tree_at(lambda m: (m.steps, m.act), head, (True, True))  # which are no parameters
    for mask in (head, of_numpy, of_others_too, tp.layout(NET, "head").mask):
        assert callable(mask)
        assert tp.layout(NET, mask) == tp.layout(NET, "head")
    assert tp.layout(NET, everything).paths == (*BODY, *HEAD, "scale")
    assert tp.layout(NET, everything, freeze="body", thaw="body.0.bias").paths == ("body.0.bias", *HEAD, "scale")


def test_the_last_word_wins():
    layout = tp.layout(NET)
    assert tp.layout(NET, freeze="scale", thaw="scale") == layout.thaw("scale") != layout
    assert layout.thaw("scale").freeze("scale") == layout.freeze("body").thaw("body") == layout
    assert layout.freeze("**").size == 0
    assert layout.freeze("**").thaw("head").freeze("head.bias").paths == HEAD[:1]
    words = {"freeze": "encoder", "thaw": "encoder.embed"}
    assert tp.layout(CODER, tp.layout(CODER), **words) == tp.layout(CODER, **words)
    given = tp.layout(CODER, ties={"encoder.w": "head"})
    assert tp.layout(CODER, given).ties == {"head": ("encoder.embed", "encoder.w")}


def test_inside_plain_jit_a_layout_made_outside_knows_what_is_lost_there():
    model = {"a": _shared, "b": _shared, "n": [0.5, 2]}  # the tie and that `n` is no array
    layout = tp.layout(model)
    inside = jax.jit(lambda model: tp.grad(lambda m: jnp.sum(m["a"] + m["b"]) * m["n"][0], layout)(model))(model)
    assert inside["b"] is inside["n"][0] is None
    assert inside["a"].tolist() == [1.0, 1.0]


def test_leaves_by_shape_and_path():
    seen, threshold = [], [1]

    def is_large(path: str, leaf: jax.ShapeDtypeStruct) -> bool:
        seen.append((path, leaf.shape, leaf.dtype))
        return leaf.ndim > threshold[0]

    rule = tp.leaves(is_large)
    assert tp.layout(NET, rule).paths == WEIGHTS
    assert seen == [(path, tp.layout(NET, thaw="**")[path].shape, jnp.float32) for path in (*BODY, *HEAD, "scale")]
    threshold[0] = 0  # a rule may close over what changes: it is asked anew each time
    assert tp.layout(NET, rule).paths == (*BODY, *HEAD)


# -- What selects nothing


def test_other_lists_need_one_that_selects():
    layout, (vector, restructure) = tp.layout(NET), tp.ravel(NET)
    assert layout.freeze("**").thaw(["**", "!scale", "!head"]).paths == BODY
    assert layout.freeze(["!head.bias", "head"]).paths == (*BODY, HEAD[1])
    assert layout.indices(["head", "!head.weight"]).tolist() == [14]
    assert list(restructure.view(vector)["**", "!body"]) == list(HEAD)
    for use in (layout.freeze, layout.thaw, layout.indices):
        with pytest.raises(ValueError, match=r"'!head' only excludes; write .* before it: \['\*\*', '!head'\]"):
            use("!head")
        with pytest.raises(ValueError, match=r"selects nothing: everything is excluded"):
            use(["head", "!head"])


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ("heat.weight", r"'heat.weight' selects nothing; nearest: 'head.weight'"),
        (lambda m: (m.act, m.steps), r"no parameter, only 'act' \(function, not an array\); only floating"),
        (["body", "!boddy"], r"'boddy' selects nothing"),
    ],
)
def test_what_selects_nothing_says_so(where: Any, message: str):
    layout = tp.layout(NET)
    for use in (
        layout.freeze,
        layout.thaw,
        lambda where: tp.layout(NET, where),
        lambda where: tp.layout(NET, freeze=where),
        lambda where: tp.layout(NET, thaw=where),
        lambda where: tp.ravel(NET, where),
    ):
        with pytest.raises(ValueError, match=message):
            use(where)


# -- What layouts, masks, ties and the halves of a model refuse; beside `tests/test_mistakes.py` -----------------------

DICT = {"a": ramp(2), "b": {"c": ramp(2)}, "n": None}
SHARED = {"online": {"w": (shared := ramp(2)), "b": ramp(1)}, "target": {"w": shared}}
SQUARES = {name: ramp(2, 2) for name in "abcd"}
OTHERS = {"wide": ramp(2, 3), "tall": ramp(3, 2), "again": SQUARES["a"], "count": np.arange(2), "node": {"x": ramp(2)}}
PARAMS, REST = tp.partition(Pair(ramp(2), Norm(ramp(1), ramp(1))))
APART = tp.layout({"a": ramp(2), "b": ramp(2)})
WITHIN = {"net": NET, "x": ramp(1)}
HALF = r"'online.w' is trained and 'target.w' is frozen.*one array.*tp\.copy.*\['online.w', 'target.w'\]\), or thaw="


class Codec(eqx.Module):
    encoder: Any
    decoder: Any = tp.field(tied_to="encoder", transform=jnp.transpose)


class Promised(eqx.Module):
    value: Any = tp.field(trainable=True)


FROZEN = r"selects only leaves that are declared frozen \('scale' \(float32\[1\]\)\); .*tp\.layout\(model, thaw="
PROMISE = r"'0.value' \(int\d\d\[3\]\) is declared trainable=True, .* write tp.field\(trainable=True, converter=jnp."
NOT_IN_JAX = r"'a.0' is a NumPy array of .*, which JAX does not support; convert it, or hold it"

# Rows of one kind.
refused = lambda model, words, **options: (lambda: tp.layout(model, **options), ValueError, words)
tied = lambda ties, words: (lambda: tp.layout(SQUARES | OTHERS, ties=ties), ValueError, words)
masked = lambda mask, words, error=ValueError: (lambda: tp.layout(DICT, mask), error, words)
unfit = lambda model, words: (lambda: tp.layout(model, tp.layout({"a": ramp(2), "n": 5})), ValueError, words)
frozen_alone = lambda where: (lambda: tp.layout(NET, where), ValueError, FROZEN)
half = lambda make: (lambda: make(SHARED), ValueError, HALF)
combined = lambda params, words, rest=REST, error=ValueError: (lambda: tp.combine(params, rest), error, words)
unread = lambda path: (lambda: tp.layout({"a": ramp(2)}, path), ValueError, "the path .* cannot be read")
named = lambda *keys: collections.OrderedDict((key, ramp(1)) for key in keys)
of_one_text = lambda model, words: (lambda: tp.layout(model), ValueError, words)
not_in_jax = lambda dtype: (lambda: tp.ravel({"a": [np.zeros(2, dtype)], "w": ramp(2)}), TypeError, NOT_IN_JAX)
projected = lambda entry, error, words: (lambda: tp.project({"w": ramp(2)}, {"w": entry}), error, words)


ROWS = [
    # what selects half of a tie, or leaves nothing
    refused(TIED, "'a' is frozen and 'b' is trained", freeze=lambda m: m["a"]),
    refused(TIED, "'a' is frozen and 'b' is trained", freeze=tp.leaves(lambda path, leaf: path == "a")),
    refused(NET, "selects nothing: everything is excluded", trainable="!**"),
    refused(NET, "selects nothing: everything is excluded", trainable=["head", "!head"]),
    refused(WITHIN, "excluded or declared frozen", trainable=[re.compile("net.(scale|head.*)"), "!net.head"]),
    # paths
    (lambda: tp.layout(NET)["head.wieght"], KeyError, "'head.wieght' is not a path of the model; nearest: 'head.weig"),
    (lambda: tp.layout(NET)["scale"], KeyError, r"'scale' is frozen, so it has no slot; layout.thaw\('scale'\) gives"),
    (lambda: tp.layout(NET)["steps"], KeyError, r"'steps' \(int32\[\]\) is not a parameter"),
    *map(unread, ('"a', '"a.b', 'x."a', '"a"b', '"a""b".c', 'layers."a"b.0', r'"\q"')),
    of_one_text(named(1, "1"), r"\[1\] and \['1'\] of the root have the same text in a path, '1'"),
    of_one_text({"a": [named("b", 1.5, "1.5")]}, r"of the node at 'a\.0' have the same text"),
    *map(not_in_jax, ([("x", "f4")], ">f4", np.longdouble, ">c8")),
    # declarations
    (lambda: tp.layout([Promised(np.arange(3)), ramp(2)], freeze="**"), TypeError, PROMISE),
    (lambda: tp.declare(Codec, ties={"decoder": "encodr.0"}), ValueError, "no field for 'encodr.0'; nearest: 'enc"),
    # masks, and what selects frozen leaves alone
    masked({"a": True, "b": {"c": True, "d": True}}, r"'b.d' is only in the mask"),
    masked({"a": True, "b": {"c": True}, "n": True}, r"'n' is None in the model, .* in the mask"),
    masked({"a": 1, "b": {"c": True}, "n": None}, r"Python bools, got .*int; write jax.tree.map\(bool, mas", TypeError),
    *map(frozen_alone, ("scale", re.compile("scale"), lambda m: m.scale, ["head", "scale"])),
    # ties
    tied({"node": "a"}, r"a tie names 'node', where the model has a node; name an array in it; nearest: 'node.x'"),
    tied({"count": "a"}, r"a tie names 'count' \(int32\[2\]\), which is not a parameter"),
    tied({"wide": ("tall", jnp.negative)}, r"'wide' is float32\[2,3\] .* 'tall', which is float32\[3,2\] after neg"),
    tied({"a": "b", "b": ("c", jnp.transpose), "c": "a"}, r"the ties of '[abc]' form a cycle; name one path as"),
    tied({"again": ("a", jnp.transpose)}, r"'again' and 'a' are one array already, so one cannot be transpose of the"),
    tied({"a": "b", "again": "c"}, r"'again' is tied twice: to 'b' and to 'c'"),
    (lambda: tp.layout(Codec(ramp(2, 3), ramp(3, 2)), Codec(True, False)), ValueError, "decoder' is transpose of 'enc"),
    (lambda: tp.tie({"a": ramp(2)}, tp.layout(SQUARES)), ValueError, "does not fit the layout"),
    (
        lambda: tp.tie(SQUARES, "b", to="a", transform=jnp.negative),
        ValueError,
        r"an array cannot record that 'b' is negative of 'a'.*tied_to=\"a\".*ties=\{\"b\": \(\"a\", jnp.negative\)",
    ),
    half(lambda model: tp.layout(model, "online")),
    half(lambda model: tp.layout(model, {"online": {"w": True, "b": True}, "target": {"w": False}})),
    half(lambda model: tp.layout(model, freeze="target")),
    half(lambda model: tp.layout(model, freeze="**", thaw="online")),
    half(lambda model: tp.layout(model).freeze("target")),
    # a given layout
    (lambda: tp.layout(DICT, tp.layout(DICT), ties={"a": "b.c"}), ValueError, "has its ties already; pass `ties` wh"),
    (lambda: tp.ravel({"a": shared, "b": shared}, APART), ValueError, r"are one array, but .* with ties=\{'b': 'a'\}"),
    unfit({"a": ramp(3), "n": 5}, r"does not fit the layout[^$]*'a' is float32\[2\] in the first, float32\[3\]"),
    unfit({"a": ramp(2), "m": 5}, r"does not fit[^$]*'n' is only in the first[^$]*'m' is only in the second"),
    unfit(collections.OrderedDict(a=ramp(2), n=0.5), r"is a dict in the first, a OrderedDict in the second"),
    # the halves
    combined({}, r"each of the 2 trained parameters, found none for 'first', 'second\.scale'"),
    combined({**PARAMS._asdict(), "third": 1.0}, "entry at 'third', where the model has no leaf"),
    combined(PARAMS._replace(first=ramp(3)), r"expected float32\[2\] at 'first', got float32\[3\]"),
    combined(REST, "expected the Rest of tp.partition, got Pair; the parameters come first", PARAMS, TypeError),
    combined(PARAMS, "expected the Rest of tp.partition, got int", 3, TypeError),
    projected(np.ones(3, "f"), ValueError, r"expected float32\[2\] at 'w', got float32\[3\]"),
    projected(0.5, ValueError, r"expected float32\[2\] at 'w', got float of shape \(\)"),
    projected("adam", TypeError, "expected an array at 'w', got str"),
    (lambda: tp.project(DICT, {}, missing=0), ValueError, 'missing must be None or "zeros", got 0'),
]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.filterwarnings("ignore:Using `field")
@pytest.mark.parametrize(("call", "error", "words"), ROWS)
def test_what_is_refused(call: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        call()
