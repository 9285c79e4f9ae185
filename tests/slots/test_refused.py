"""What layouts, masks, ties and the halves of a model refuse, each with its words; beside `tests/test_mistakes.py`."""

import collections
import dataclasses
import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import pytest

import treeparams as tp

from ..zoo import Norm, Pair, ramp
from .test_select import net

NET = net()
DICT = {"a": ramp(2), "b": {"c": ramp(2)}, "n": None}
SHARED = {"online": {"w": (shared := ramp(2)), "b": ramp(1)}, "target": {"w": shared}}
SQUARES = {name: ramp(2, 2) for name in "abcd"}
OTHERS = {"wide": ramp(2, 3), "tall": ramp(3, 2), "again": SQUARES["a"], "count": np.arange(2), "node": {"x": ramp(2)}}
PARAMS, REST = tp.partition(Pair(ramp(2), Norm(ramp(1), ramp(1))))
PAIR = tp.layout({"a": ramp(2), "b": ramp(2)})
HALF = r"'online.w' is trained and 'target.w' is frozen.*one array.*tp\.copy.*\['online.w', 'target.w'\]\), or thaw="


class Codec(eqx.Module):
    encoder: Any
    decoder: Any = tp.field(tied_to="encoder", transform=jnp.transpose)


class Language(eqx.Module):
    weight: Any
    bias: Any


@dataclasses.dataclass
class Nameless:
    mean: Any = dataclasses.field(metadata={"trainable": False})


jtu.register_pytree_node(Nameless, lambda node: ((node.mean,), None), lambda _, children: Nameless(*children))


class Wrong(eqx.Module):
    weight: Any = eqx.field(metadata={"trainable": "no"})


class Promised(eqx.Module):
    value: Any = tp.field(trainable=True)


def tied(ties: Any, words: str) -> Any:
    return lambda: tp.layout(SQUARES | OTHERS, ties=ties), ValueError, words


def masked(mask: Any, words: str, error: type[Exception] = ValueError) -> Any:
    return lambda: tp.layout(DICT, mask), error, words


def unfit(model: Any, words: str) -> Any:
    return lambda: tp.layout(model, tp.layout({"a": ramp(2), "n": 5})), ValueError, words


def frozen_alone(where: Any) -> Any:
    words = r"selects only leaves that are declared frozen \('scale' \(float32\[1\]\)\); .*tp\.layout\(model, thaw="
    return lambda: tp.layout(NET, where), ValueError, words


def half(make: Any) -> Any:
    return lambda: make(SHARED), ValueError, HALF


def combined(params: Any, words: str, rest: Any = REST, error: type[Exception] = ValueError) -> Any:
    return lambda: tp.combine(params, rest), error, words


def unread(path: str) -> Any:
    return lambda: tp.layout({"a": ramp(2)}, path), ValueError, "the path .* cannot be read"


def of_one_text(keys: Any, words: str, wrap: Any = lambda node: node) -> Any:
    node = collections.OrderedDict((key, ramp(1)) for key in keys)
    return lambda: tp.layout(wrap(node)), ValueError, words


def not_in_jax(dtype: Any) -> Any:
    words = r"'a.0' is a NumPy array of .*, which JAX does not support; convert it, or hold it"
    return lambda: tp.ravel({"a": [np.zeros(2, dtype)], "w": ramp(2)}), TypeError, words


def promised(value: Any, words: str) -> Any:
    remedy = r"\) is declared trainable=True, .* write tp.field\(trainable=True, converter=jnp."
    return lambda: tp.layout([Promised(value), ramp(2)], freeze="**"), TypeError, words + remedy


def projected(entry: Any, error: type[Exception], words: str, **options: Any) -> Any:
    return lambda: tp.project({"w": ramp(2)}, {"w": entry}, **options), error, words


def back(entry: Any, error: type[Exception], words: str) -> Any:
    return lambda: tp.ravel({"w": ramp(2)})[1].ravel_gradient({"w": entry}), error, words


ROWS = [
    # paths
    (lambda: tp.layout(NET)["head.wieght"], KeyError, "'head.wieght' is not a path of the model; nearest: 'head.weig"),
    (lambda: tp.layout(NET)["scale"], KeyError, r"'scale' is frozen, so it has no slot; layout.thaw\('scale'\) gives"),
    (lambda: tp.layout(NET)["steps"], KeyError, r"'steps' \(int32\[\]\) is not a parameter"),
    *map(unread, ('"a', '"a.b', 'x."a', '"a"b', '"a""b".c', 'layers."a"b.0', r'"\q"')),
    of_one_text([1, "1"], r"\[1\] and \['1'\] of the root have the same text in a path, '1'"),
    of_one_text([True, "True"], r"of the root have the same text in a path, 'True'"),
    of_one_text(["b", 1.5, "1.5"], r"of the node at 'a\.0' have the same text", lambda node: {"a": [node]}),
    *map(not_in_jax, ([("x", "f4")], ">f4", np.longdouble, ">c8")),
    # declarations
    promised(np.arange(3), r"'0.value' \(int\d\d\[3\]"),
    promised(jax.random.key(0), r"'0.value' \(key<fry>\[\]"),
    promised([0.1, 0.2], r"'0.value.0' \(float, not an array"),
    (lambda: tp.field(trainable=True, static=True), ValueError, "a static field is .*drop `static=True` or `trainable"),
    (lambda: tp.field(tied_to="a", static=True), ValueError, r"is not part of the tree: drop .* or `tied_to=`"),
    (
        lambda: tp.layout(Nameless(ramp(2))),
        TypeError,
        "Nameless declares which fields train but .* without field names",
    ),
    (lambda: tp.layout(Wrong(ramp(2))), TypeError, r"Wrong.weight: `trainable` must be True or False, got 'no'"),
    (lambda: tp.declare(Language, freeze=("bias", "wieght.*")), ValueError, "Language has no field for 'wieght.*neare"),
    (lambda: tp.declare(Language, ties={"bias": "wieght.0"}), ValueError, "no field for 'wieght.0'; nearest: 'weight'"),
    (lambda: tp.declare(Codec, ties={"decoder": 3}), TypeError, "tp.declare, 'decoder': a tie needs a path .*, got 3"),
    # masks, and what selects frozen leaves alone
    masked({"a": True}, "a mask must have the structure of the model, .* at every leaf; 'b' is only in the model"),
    masked({"a": True, "b": {"c": True, "d": True}}, r"'b.d' is only in the mask"),
    masked({"a": True, "b": {"c": True}, "n": True}, r"'n' is None in the model, .* in the mask"),
    masked({"a": True, "b": Pair(True, True)}, r"'b' is a dict in the model, a Pair in the mask"),
    masked({"a": 1, "b": {"c": True}, "n": None}, r"Python bools, got .*int; write jax.tree.map\(bool, mas", TypeError),
    (lambda: tp.layout([ramp(1)] * 1, (True,)), ValueError, "the root is a list in the model, a tuple in the mask"),
    *map(frozen_alone, ("scale", re.compile("scale"), lambda m: m.scale, ["head", "scale"])),
    # ties
    tied({"b": "A"}, r"a tie names 'A', where the model has no leaf; nearest: "),
    tied({"node": "a"}, r"a tie names 'node', where the model has a node; name an array in it; nearest: 'node.x'"),
    tied({"count": "a"}, r"a tie names 'count' \(int32\[2\]\), which is not a parameter"),
    tied({"wide": ("tall", jnp.negative)}, r"'wide' is float32\[2,3\] .* 'tall', which is float32\[3,2\] after neg"),
    tied({"a": "b", "b": ("c", jnp.transpose), "c": "a"}, r"the ties of '[abc]' form a cycle; name one path as"),
    tied({"again": ("a", jnp.transpose)}, r"'again' and 'a' are one array already, so one cannot be transpose of the"),
    tied({"a": "b", "again": "c"}, r"'again' is tied twice: to 'b' and to 'c'"),
    (lambda: tp.layout(SQUARES, ties={"b": ("a", "b")}), TypeError, r"a tie needs a path such as .*, got \('a', 'b'\)"),
    (lambda: tp.layout(Codec(ramp(2), [ramp(2)])), TypeError, r"'decoder' tied to 'encoder', but it is a node, not"),
    (lambda: tp.layout(Codec(None, ramp(2))), ValueError, r"a tie names 'encoder', where the model has no leaf"),
    (lambda: tp.layout(Codec(ramp(2, 3), ramp(3, 2)), Codec(True, False)), ValueError, "decoder' is transpose of 'enc"),
    (
        lambda: tp.tie(Codec(ramp(1), ramp(1)), "decode", to="encoder"),
        ValueError,
        "'decode'.* leaf; nearest: 'decoder'",
    ),
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
    (
        lambda: tp.layout(DICT, tp.layout(DICT), ties={"a": "b.c"}),
        ValueError,
        "has its ties already; pass `ties` where",
    ),
    (lambda: tp.ravel({"a": shared, "b": shared}, PAIR), ValueError, r"are one array, but .* with ties=\{'b': 'a'\}"),
    unfit({"a": ramp(3), "n": 5}, r"does not fit the layout[^$]*'a' is float32\[2\] in the first, float32\[3\]"),
    unfit({"a": ramp(2), "m": 5}, r"does not fit[^$]*'n' is only in the first[^$]*'m' is only in the second"),
    unfit([ramp(1)] + [0.5] * 200, r"make the layout from this model, tp.layout\(model\)[^$]*\.\.\. and 199 more"),
    unfit({"a": 1.0, "n": 5}, r"'a' is float32\[2\] in the first, no array in the second"),
    unfit(collections.OrderedDict(a=ramp(2), n=0.5), r"is a dict in the first, a OrderedDict in the second"),
    # the halves
    combined({}, r"each of the 2 trained parameters, found none for 'first', 'second\.scale'"),
    combined({**PARAMS._asdict(), "third": 1.0}, "entry at 'third', where the model has no leaf"),
    combined(PARAMS._replace(first=ramp(3)), r"expected float32\[2\] at 'first', got float32\[3\]"),
    combined(PARAMS._replace(first=ramp()), r"expected float32\[2\] at 'first', got float32\[\]"),
    combined(REST, "expected the Rest of tp.partition, got Pair; the parameters come first", PARAMS, TypeError),
    combined(PARAMS, "expected the Rest of tp.partition, got int", 3, TypeError),
    *[
        row
        for use in (projected, back)
        for row in (
            use(np.ones(3, "f"), ValueError, r"expected float32\[2\] at 'w', got float32\[3\]"),
            use(0.5, ValueError, r"expected float32\[2\] at 'w', got float of shape \(\)"),
            use("adam", TypeError, "expected an array at 'w', got str"),
        )
    ],
    projected(None, ValueError, 'missing must be None or "zeros", got 0', missing=0),
]


@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.filterwarnings("ignore:Using `field")
@pytest.mark.parametrize(("call", "error", "words"), ROWS)
def test_what_is_refused(call: Any, error: type[Exception], words: str):
    with pytest.raises(error, match=words):
        call()
