"""Which nodes: what a part is, and what is refused as nodes of one kind."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import treeparams as tp

from ..zoo import Pair, assert_close, assert_same, ramp
from .test_nodes import FORMS, NET, Layer

# -- One node ----------------------------------------------------------------------------------------------------------


@FORMS
def test_a_part_is_a_node_by_itself(form):
    at_rest, restructure = form(NET)
    cases = {
        "head": NET["head"],
        "head.w": NET["head"]["w"],
        "layers.2": NET["layers"][2],
        "layers.1.scale": NET["layers"][1].scale,
        "head.f": jnp.sin,
        "layers.0.rate": 0.5,
        "**": NET,
        "layers": NET["layers"],
    }
    for where, want in cases.items():
        assert_same(restructure.part(at_rest, where), want)
    for where, want in ((lambda m: m["head"]["w"], NET["head"]["w"]), (lambda m: m["layers"][1], NET["layers"][1])):
        assert_same(restructure.part(at_rest, where), want)
    lone, way = form({"head": {"w": ramp(2)}, "z": ramp(2)})
    assert_same(way.part(lone, lambda m: m["head"]["w"]), ramp(2))
    assert_same(way.part(lone, lambda m: m["head"]), {"w": ramp(2)})


@FORMS
def test_a_tie_within_nodes_is_one_array_in_the_node(form):
    everywhere, own = ramp(2), [ramp(2, start=k) for k in range(3)]
    layers = [{"a": everywhere, "b": everywhere, "c": each, "d": each} for each in own]
    at_rest, restructure = form({"layers": layers, "z": everywhere})
    node = restructure.repeated(at_rest, "layers.*")
    assert node["a"] is node["b"]
    assert node["c"] is node["d"]
    seen = []
    restructure.scan(lambda carry, node: seen.append(node) or (carry, None), 0, at_rest, "layers.*")
    assert seen[0]["a"] is seen[0]["b"]
    assert seen[0]["c"] is seen[0]["d"]


@FORMS
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_part_keeps_its_ties(form, dtype):
    shared = ramp(2, 3, dtype=jnp.bfloat16)
    model = {"n": {"a": shared, "b": shared, "t": shared.T, "z": ramp(2)}, "other": ramp(2, 3)}
    at_rest, restructure = form(model, tp.layout(model, ties={"n.t": ("n.a", jnp.transpose)}))
    given = jax.tree.map(lambda x: x.astype(dtype), at_rest)
    node = restructure.part(given, "n")
    assert_same(node, restructure(given)["n"])
    assert node["a"] is node["b"]
    of = lambda node: jnp.sum(node["a"].astype(jnp.float32) * 2 + node["b"].astype(jnp.float32))
    got, want = (
        jax.jit(jax.grad(f))(given) for f in (lambda a: of(restructure.part(a, "n")), lambda a: of(restructure(a)["n"]))
    )
    assert_close(got, want)


def test_a_part_builds_nothing_else():
    stacks, restructure = tp.stack([ramp(2, 2, start=k) for k in range(100)] + [ramp(3)])
    for where, count in (("100", 0), ("7", 2)):
        program = jax.make_jaxpr(lambda s, where=where: restructure.part(s, where))(stacks)
        assert sum(len(equation.outvars) for equation in program.eqns) <= 3 + count


# -- What is refused ---------------------------------------------------------------------------------------------------


class Relu(eqx.Module):
    def __call__(self, x):
        return x


@FORMS
@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([Layer(0), Layer(1, weight=ramp(3, 2))], r"'weight' is float32.*'layers.0', float32.*'layers.1'"),
        ([Layer(0), Layer(1, bias=ramp(2, dtype=jnp.float16))], r"'bias' is .*float16\[2\] in 'layers.1'"),
        ([Layer(0), Layer(1), Layer(2, width=3)], "'layers.0' and 'layers.2' .*'width' has other static"),
        ([Layer(0), Layer(1, activation=jnp.sin)], "'layers.0.activation' and .*, .* not arrays, differ"),
        ([Layer(0), Layer(1, rate=0.25)], "'layers.0.rate' and 'layers.1.rate', .* differ"),
        ([Layer(0), Layer(1, bias=None)], r"'layers.0' and 'layers.1' .*'bias'"),
        ([{"w": ramp(2)}, {"v": ramp(2)}], r"'layers.0' and 'layers.1' .*'w' is only in 'layers.0'"),
        ([Pair(ramp(2), None), Pair(ramp(2), ())], "'layers.0' and 'layers.1' cannot be one"),
        ([[ramp(2)], (ramp(2),)], "the node is a list in 'layers.0', a tuple in 'layers.1'"),
        ([ramp(2), [ramp(2)]], "'layers.0' and 'layers.1' cannot be one"),
        ([Layer(0), Relu(), Layer(1)], "'layers.0' and 'layers.1' cannot be one"),
    ],
)
def test_nodes_that_differ(form, layers, message):
    at_rest, restructure = form({"layers": layers})
    wheres = (
        ["layers.*"] if any(jax.tree.leaves(layer) == [] for layer in layers) else ["layers.*", lambda m: m["layers"]]
    )
    for where in wheres:
        with pytest.raises(ValueError, match=message):
            restructure.repeated(at_rest, where)
        with pytest.raises(ValueError, match=message):
            restructure.scan(lambda carry, _: (carry, None), 0, at_rest, where)


@FORMS
@pytest.mark.usefixtures("without_type_checks")
@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda r, s: r.repeated(s, "layers"), ValueError, r"'layers' is one node, a list; .* write 'layers\.\*'"),
        (lambda r, s: r.scan(lambda c, _: (c, None), 0, s, "dict"), ValueError, r"'dict' is one node, a .*'dict\.\*'"),
        (lambda r, s: r.repeated(s, ["layers"]), ValueError, r"'layers' is one node, a list; .* write 'layers\.\*'"),
        (lambda r, s: r.repeated(s, re.compile("layers")), ValueError, r"'layers' is one .* 'layers\.\*'"),
        (lambda r, s: r.repeated(s, lambda m: m["dict"]), ValueError, r"'dict' is one node, .* 'dict\.\*'"),
        (lambda r, s: r.repeated(s, "layer.*"), ValueError, r"'layer\.\*' selects nothing; nearest: .*layers"),
        (lambda r, s: r.part(s, "layers.9"), ValueError, "'layers.9' selects nothing; nearest: .*layers"),
        (lambda r, s: r.part(s, re.compile("x+")), ValueError, "selects nothing"),
        (lambda r, s: r.part(s, eqx.nn.Linear), ValueError, "Linear.* selects nothing"),
        (lambda r, s: r.part(s, "layers.*"), ValueError, r"matches 'layers.0', 'layers.1'.*; a part is one node"),
        (lambda r, s: r.part(s, ["layers.0", "layers.1"]), ValueError, r"'layers.0', 'layers.1'; a part is one node"),
        (lambda r, s: r.repeated(s, "!layers.0"), ValueError, "'!layers.0'"),
        (lambda r, s: r.repeated(s, ["layers.*", "!layers"]), ValueError, "layers"),
        (lambda r, s: r.repeated(s, 3), TypeError, r"expected a mask or a `where` \(a glob, .* got int"),
        (lambda r, s: r.repeated(s, lambda m: 3), ValueError, "must return nodes of the model .* got int"),
        (lambda r, s: r.repeated(s, lambda m: m.layers), (ValueError, AttributeError), "layers"),
        (lambda r, s: r.repeated(s, lambda m: {"x": m["layers"][0], "y": m["dict"]}), ValueError, "cannot be one node"),
        (lambda r, s: r.repeated({}, "layers.*"), (TypeError, ValueError), "no such array|expected a vector"),
        (lambda r, s: r.repeated(jax.tree.map(lambda x: x[None], s), "layers.*"), ValueError, "jax.vmap"),
    ],
)
def test_what_is_refused(form, use, error, message):
    at_rest, restructure = form({"dict": {"a": ramp(2), "b": ramp(2)}, "layers": [Layer(0), Layer(1)]})
    with pytest.raises(error, match=message):
        use(restructure, at_rest)


def test_a_node_that_ends_in_a_node_without_leaves_is_one_node():
    layers = [{"a": ramp(2), "z": {"of": {}, "no": eqx.nn.Identity()}} for _ in range(2)]
    at_rest, restructure = tp.stack({"layers": layers, "one": layers[0] | {"a": ramp(3)}})
    assert list(restructure.part(at_rest, "one")) == ["a", "z"]
    assert restructure.repeated(at_rest, "layers.*")["a"].shape == (2, 2)
