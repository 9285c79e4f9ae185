"""Nodes of one kind as one: `restructure.repeated`, `scan` and `part`, over stacks and a vector; and which nodes."""

import functools
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..matrices.zoo import equations
from ..zoo import Norm, Pair, assert_close, assert_same, inexact_leaves, ramp

FORMS = pytest.mark.parametrize("form", [tp.stack, tp.ravel], ids=["stacks", "vector"])


class Layer(eqx.Module):
    weight: jax.Array
    bias: jax.Array
    scale: jax.Array = tp.field(trainable=False)
    activation: Callable[..., jax.Array]
    rate: float
    count: jax.Array
    width: int = eqx.field(static=True)

    def __init__(self, k, **changes):
        self.weight, self.bias, self.scale = ramp(2, 2, start=k), ramp(2, start=k), ramp(2, start=k + 0.3)
        self.activation, self.rate, self.count, self.width = jnp.tanh, 0.5, jnp.asarray([k, 2 * k]), 2
        for name, value in changes.items():
            setattr(self, name, value)

    def __call__(self, x):
        return self.rate * self.activation(self.weight @ x + self.bias) * self.scale + self.count.astype(jnp.float32)


def attention(k):
    """A layer in a dictionary."""
    matrices = {name: ramp(2, 2, start=10 * k + j) for j, name in enumerate("qkvo")}
    return matrices | {"norm": {"mean": ramp(2, start=k), "scale": ramp(2, start=k + 1)}}


SHARED, TABLE, OWN = ramp(2, 2), ramp(2, 3), [ramp(2, start=k) for k in range(3)]
ATTENTIONS = [attention(k) for k in range(3)]
KEYED = [
    {"key": jax.random.key(k), "n": np.arange(2) + k, "raw": jax.random.PRNGKey(k), "w": ramp(2, start=k)}
    for k in range(3)
]
TO_LATER = [{name: ramp(2, start=k + (name == "b")) for name in "abc"} for k in range(3)]
MIXED = [{"half": ramp(2, start=k, dtype=jnp.bfloat16), "w": ramp(2, start=k)} for k in range(3)]
case = lambda layers, where="layers.*", **options: (layers, where, options)  # of `tp.layout`
# The nodes are all that stands in `layers`, or in a list of that name in there.
CASES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "modules": case([Layer(k) for k in range(3)]),
    "one": case([Layer(0)]),
    "frozen in all": case(ATTENTIONS, freeze=["layers.*.norm", "layers.*.o"]),
    "trained in one alone": case(ATTENTIONS, freeze=["layers.0", "layers.2.*", "layers.1.q"]),
    "all frozen": case(ATTENTIONS, freeze="layers"),
    "keys": case(KEYED),
    "mixed dtypes": case(MIXED),
    "tied across all": case([{"w": SHARED, "own": ramp(2, 2, start=k)} for k in range(4)]),
    "tied across two": case([{"w": SHARED if k in (1, 3) else ramp(2, 2, start=k)} for k in range(4)]),
    "tied to others before": case(
        {"before": OWN, "layers": [{"own": ramp(2, start=9), "tied": each} for each in OWN]}, "layers.layers.*"
    ),
    "tied to a later one": case(TO_LATER, ties={f"layers.{k}.a": f"layers.{k}.c" for k in range(3)}),
    "transposed within": case(
        [{"in": ramp(2, 3, start=k), "out": ramp(2, 3, start=k).T} for k in range(3)],
        ties={f"layers.{k}.out": (f"layers.{k}.in", jnp.transpose) for k in range(3)},
    ),
    "transposed from outside": case(
        {"layers": [{"out": TABLE.T, "own": each} for each in OWN], "table": TABLE},
        "layers.layers.*",
        ties={f"layers.layers.{k}.out": ("layers.table", jnp.transpose) for k in range(3)},
    ),
    "empty leaves": case([{"e": ramp(0, 3), "n": ramp(2, 0), "s": ramp(start=k)} for k in range(3)]),
}
# Differentiated twice: of a second derivative it matters how rows are gathered, not what the nodes are.
TWICE = ("modules", "trained in one alone")
EAGERLY = ("modules", "keys", "all frozen", "tied across two")  # and outside of `jit`
# A scan has the same arrays as one node, but for what is the same in all nodes.
SCANNED = (*TWICE, "one", "all frozen", "keys", "mixed dtypes", "tied across all", "transposed from outside")
OVER_A_VECTOR = ("modules", "mixed dtypes", "transposed from outside")


def in_groups(model, layout):
    """Stacks whose groups part the nodes."""
    return tp.stack(model, layout, groups={"q of two": ["layers.0.q", "layers.2.q"], "k": "layers.*.k", "rest": "**"})


nodes_of = lambda model: model["layers"]["layers"] if isinstance(model["layers"], dict) else list(model["layers"])
arrays_of = lambda node: eqx.filter(node, eqx.is_array)
all_else = lambda node: eqx.filter(node, eqx.is_array, inverse=True)


def stacked(nodes):
    """The nodes as one, leaf by leaf."""

    def one(*leaves):
        if not hasattr(leaves[0], "dtype"):
            return leaves[0]
        is_key = jnp.issubdtype(leaves[0].dtype, jax.dtypes.prng_key)
        return jnp.stack(leaves) if is_key else jax.device_put(np.stack([np.asarray(leaf) for leaf in leaves]))

    return jax.tree.map(one, *nodes)


def test_nodes_by_class_by_globs_and_in_the_order_of_their_numbers():
    a, b, c, d = (Norm(ramp(2, start=k), None) for k in range(4))
    for model, where, nodes in (
        ({"x": [a], "y": (b, [c])}, Norm, [a, b, c]),
        ([a, b, c, d], ["3", "[01]"], [a, b, d]),
        ({"w_1": a, "w_2": b, "w_10": c}, "w_*", [a, b, c]),  # as texts, 10 is before 2
        ([{"layers": [a, b]}, {"layers": [c]}], "*.layers.*", [a, b, c]),
        ([Pair(a, (None, b)), Pair(c, (None, d))], "*", [Pair(a, (None, b)), Pair(c, (None, d))]),
    ):
        stacks, restructure = tp.stack(model)
        assert_same(restructure.repeated(stacks, where), stacked(nodes), identity=False)


@pytest.mark.parametrize(
    ("form", "name"),
    [
        *((tp.stack, name) for name in CASES),
        *((tp.ravel, name) for name in OVER_A_VECTOR),
        (in_groups, "frozen in all"),
    ],
)
def test_nodes_are_what_they_are_in_the_model_and_so_are_derivatives(form, name):
    """The derivatives are those of the sum of `-cos` of all numbers in the nodes."""
    layers, where, options = CASES[name]
    model = {"before": ramp(2, 2, start=20), "layers": layers, "z": [ramp(2, start=30), ramp(2, 3, start=31)]}
    at_rest, restructure = form(model, tp.layout(model, **options))
    parts = nodes_of(restructure(at_rest))
    alike = stacked(parts)  # an alias is what its source makes of it
    direction = jax.tree.map(lambda x: np.cos(np.arange(x.size)).astype(x.dtype).reshape(x.shape), at_rest)
    others = []

    def divided(node):
        others.append(all_else(node))
        return eqx.partition(arrays_of(node), eqx.is_inexact_array)

    ways = [lambda at_rest, way: divided(way.repeated(at_rest, where))]
    if name in SCANNED:
        as_results = lambda _, node: (None, divided(node))
        ways.append(lambda at_rest, way: way.scan(as_results, None, at_rest, where)[1])

    def derivatives(at_rest, restructure, of):
        def gradient(at_rest):
            floats, pull, integers = jax.vjp(lambda at_rest: of(at_rest, restructure), at_rest, has_aux=True)
            return pull(jax.tree.map(jnp.sin, floats))[0], eqx.combine(floats, integers)

        if name in TWICE:
            return jax.jvp(gradient, (at_rest,), (direction,), has_aux=True)
        return gradient(at_rest)

    def brought(nodes):
        """The gradient in the form, from that of the nodes."""
        nothing = jax.tree.map(lambda _: None, model)
        apart = [jax.tree.map(lambda x, k=k: x[k], nodes) for k in range(len(parts))]
        return restructure.ravel_gradient(eqx.tree_at(nodes_of, nothing, apart, is_leaf=lambda x: x is None))

    floats = eqx.filter(alike, eqx.is_inexact_array)
    want = [brought(jax.tree.map(np.sin, floats))]
    if name in TWICE:
        along = eqx.filter(stacked(nodes_of(restructure(direction))), eqx.is_inexact_array)
        want.append(brought(jax.tree.map(lambda x, d: np.cos(x) * d, floats, along)))
    assert name == "all frozen" or all(any(map(np.any, jax.tree.leaves(each))) for each in want)
    for *got, node in jax.jit(lambda *args: [derivatives(*args, of) for of in ways])(at_rest, restructure):
        assert_same(node, arrays_of(alike), identity=False)
        assert_close(got, want, 1e-2 if name == "mixed dtypes" else 1e-5)
    for other in others:
        assert_same(other, all_else(alike))
    if name in EAGERLY:
        assert_same(restructure.repeated(at_rest, where), alike, identity=False)


# -- Options and other transformations ---------------------------------------------------------------------------------

NET = {
    "embed": ramp(2, 2, start=9),
    "head": {"f": jnp.sin, "w": ramp(2, start=5)},
    "layers": [Layer(k) for k in range(3)],
}
NET_STACKS, NET_WAY = tp.stack(NET)
X = np.array([0.3, -0.4], np.float32)


@FORMS
def test_scan_takes_the_options_of_jax_and_inputs_for_each_node(form):
    at_rest, restructure = form(NET)
    inputs = {"key": jax.random.split(jax.random.key(0), 3), "n": np.arange(3, dtype=np.float32)}

    def step(turn, layer, each):
        return turn + 1, (turn, layer(X), each["n"] * layer.rate, each["key"])

    run = lambda at_rest: restructure.scan(step, 0, at_rest, "layers.*", inputs, unroll=2, reverse=True)
    (scan,) = [eqn for eqn in equations(jax.make_jaxpr(run)(at_rest).jaxpr) if eqn.primitive.name == "scan"]
    assert (scan.params["unroll"], scan.params["reverse"]) == (2, True)
    turns, (order, results, numbers, keys) = run(at_rest)
    assert (turns, order.tolist(), numbers.tolist()) == (3, [2, 1, 0], [0, 0.5, 1])
    np.testing.assert_allclose(results, [layer(X) for layer in NET["layers"]], 1e-5)
    assert_same(keys, inputs["key"])


def test_in_ensembles_in_checkpoints_and_with_other_dtypes():
    scanned = lambda s, r: jnp.sum(r.scan(lambda x, layer: (layer(x), None), jnp.asarray(X), s, "layers.*")[0])
    plain = lambda s, r: jnp.sum(functools.reduce(lambda x, layer: layer(x), r(s)["layers"], jnp.asarray(X)))
    many = jax.tree.map(lambda x: np.stack([x, np.float32(0.5) * np.asarray(x)]), NET_STACKS)
    of = lambda f: jax.vmap(jax.grad(jax.checkpoint(f)), (0, None))
    assert_close(*jax.jit(lambda *both: (of(scanned)(*both), of(plain)(*both)))(many, NET_WAY), 1e-4)
    half = jax.tree.map(lambda x: jax.device_put(np.asarray(x).astype(np.float16)), NET_STACKS)
    node = NET_WAY.repeated(half, "layers.*")
    assert {leaf.dtype.name for leaf in inexact_leaves(node)} == {"float32"}
    np.testing.assert_allclose(node.weight, np.stack([layer.weight for layer in NET["layers"]]), 1e-2)
    # A frozen number of a weak type beside bfloat16 leaves the carry of a loop as it is.
    narrow = [{"w": ramp(2, 2, dtype=jnp.bfloat16), "scale": jnp.asarray(0.5 + k)} for k in range(3)]
    weights, restructure = tp.stack(narrow, "**.w")
    apply = lambda x, layer: (layer["scale"] * (layer["w"] @ x), None)
    scan = lambda weights, restructure: restructure.scan(apply, jnp.ones(2, jnp.bfloat16), weights, "*")[0]
    assert scan(weights, restructure).dtype == jax.eval_shape(scan, weights, restructure).dtype == jnp.bfloat16


def test_nodes_of_which_one_is_frozen_are_one_cut_of_the_vector():
    model = [{name: ramp(2, 2, start=k) for name in "abcd"} for k in range(3)]
    vector, restructure = tp.ravel(model, ["**", "!0"])
    squares = lambda vector: sum(jnp.sum(leaf**2) for leaf in restructure.repeated(vector, "*").values())
    for f, cuts in ((squares, 1), (jax.grad(squares), 5)):  # and one of each of the four stacks of the gradient
        names = [eqn.primitive.name for eqn in equations(jax.make_jaxpr(f)(vector).jaxpr)]
        assert (names.count("cut"), names.count("add_any")) == (cuts, 0)


@FORMS
def test_the_program_is_as_long_for_twelve_layers_as_for_four(form):
    measure = lambda node: sum(jnp.sum(jnp.sin(leaf)) for leaf in jax.tree.leaves(node))

    def lengths(layers):
        model = {"embed": ramp(2, 2), "head": ramp(2), "layers": list(map(attention, range(layers)))}
        at_rest, restructure = form(model, ["!head", "!layers.*.norm", "!layers.*.k"])

        def loss(at_rest, restructure):
            start = jnp.sum(restructure.part(at_rest, "embed")) + jnp.sum(restructure.part(at_rest, "head"))
            total, _ = restructure.scan(lambda c, node: (c * measure(node), None), start, at_rest, "layers.*")
            return total + jnp.sum(eqx.filter_vmap(measure)(restructure.repeated(at_rest, "layers.*"))) ** 2

        squares = lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))
        second = jax.grad(lambda a, r: squares(jax.grad(loss)(a, r)))
        programs = [jax.make_jaxpr(f)(at_rest, restructure) for f in (jax.value_and_grad(loss), second)]
        assert not any("pad[" in str(program) for program in programs)  # a slice for itself is transposed to one
        return [len(list(equations(program.jaxpr))) for program in programs]

    few = lengths(4)
    assert few[0] > 50
    assert few[1] > few[0]
    assert lengths(12) == few


# -- One node ----------------------------------------------------------------------------------------------------------


@FORMS
def test_a_part_is_a_node_by_itself(form):
    at_rest, restructure = form(NET)
    cases = [
        ("head", NET["head"]),
        ("layers.2", NET["layers"][2]),
        ("layers.1.scale", NET["layers"][1].scale),
        ("head.f", jnp.sin),
        ("**", NET),
        (lambda m: m["head"]["w"], NET["head"]["w"]),
        (lambda m: m["layers"][1], NET["layers"][1]),
    ]
    parts = lambda at_rest, restructure: [restructure.part(at_rest, where) for where, _ in cases]
    for got, (_, want) in zip(eqx.filter_jit(parts)(at_rest, restructure), cases, strict=True):
        assert_same(got, want)
    lone, way = form({"head": {"w": ramp(2)}, "z": ramp(2)})
    assert_same(way.part(lone, lambda m: m["head"]["w"]), ramp(2))
    assert_same(way.part(lone, lambda m: m["head"]), {"w": ramp(2)})


@FORMS
def test_a_tie_within_nodes_is_one_array_in_the_node(form):
    everywhere, own = ramp(2), [ramp(2, start=k) for k in range(3)]
    layers = [{"a": everywhere, "b": everywhere, "c": each, "d": each} for each in own]
    at_rest, restructure = form({"layers": layers, "z": everywhere})
    nodes = [restructure.repeated(at_rest, "layers.*")]
    restructure.scan(lambda carry, node: nodes.append(node) or (carry, None), 0, at_rest, "layers.*")
    assert len(nodes) > 1
    for node in nodes:
        assert node["a"] is node["b"]
        assert node["c"] is node["d"]


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
    both = (lambda given: of(restructure.part(given, "n")), lambda given: of(restructure(given)["n"]))
    assert_close(*jax.jit(lambda given: [jax.grad(f)(given) for f in both])(given))


def test_a_part_builds_nothing_else():
    stacks, restructure = tp.stack([ramp(2, 2, start=k) for k in range(100)] + [ramp(3)])
    for where, count in (("100", 0), ("7", 2)):
        program = jax.make_jaxpr(lambda s, where=where: restructure.part(s, where))(stacks)
        assert sum(len(equation.outvars) for equation in program.eqns) <= 3 + count


# -- What is refused ---------------------------------------------------------------------------------------------------


_ARRAYS = "'layers.0' and 'layers.1' "
DIFFER = [
    ([Layer(0), Layer(1, weight=ramp(3, 2))], r"'weight' is float32.*'layers.0', float32.*'layers.1'"),
    ([Layer(0), Layer(1), Layer(2, width=3)], "'layers.0' and 'layers.2' .*'width' has other static"),
    ([Layer(0), Layer(1, activation=jnp.sin)], "'layers.0.activation' and .*, .* not arrays, differ"),
    ([Layer(0), Layer(1, rate=0.25)], "'layers.0.rate' and 'layers.1.rate', .* differ"),
    ([{"w": ramp(2)}, {"v": ramp(2)}], _ARRAYS + ".*'w' is only in 'layers.0'"),
    ([[ramp(2)], (ramp(2),)], "the node is a list in 'layers.0', a tuple in 'layers.1'"),
    ([Layer(0), eqx.nn.Identity(), Layer(1)], _ARRAYS + "cannot be one"),
]


@FORMS
@pytest.mark.parametrize(("layers", "message"), DIFFER)
def test_nodes_that_differ(form, layers, message):
    at_rest, restructure = form({"layers": layers})
    by_call = [] if any(jax.tree.leaves(layer) == [] for layer in layers) else [lambda m: m["layers"]]
    for where in ["layers.*", *by_call]:
        with pytest.raises(ValueError, match=message):
            restructure.repeated(at_rest, where)
        with pytest.raises(ValueError, match=message):
            restructure.scan(lambda carry, _: (carry, None), 0, at_rest, where)


REPEATED = [  # a `where`, and what is said of it
    ("layers", ValueError, r"'layers' is one node, a list; .* write 'layers\.\*'"),
    (lambda m: m["dict"], ValueError, r"'dict' is one node, .* 'dict\.\*'"),
    ("layer.*", ValueError, r"'layer\.\*' selects nothing; nearest: .*layers"),
    ("!layers.0", ValueError, "'!layers.0'"),
    (lambda m: {"x": m["layers"][0], "y": m["dict"]}, ValueError, "cannot be one node"),
]
PART = [
    ("layers.9", "'layers.9' selects nothing; nearest: .*layers"),
    (eqx.nn.Linear, "Linear.* selects nothing"),
    ("layers.*", r"matches 'layers.0', 'layers.1'.*; a part is one node"),
    (["layers.0", "layers.1"], r"'layers.0', 'layers.1'; a part is one node"),
]


@FORMS
@pytest.mark.usefixtures("without_type_checks")
def test_what_is_refused(form):
    at_rest, restructure = form({"dict": {"a": ramp(2), "b": ramp(2)}, "layers": [Layer(0), Layer(1)]})
    for where, error, message in REPEATED:
        with pytest.raises(error, match=message):
            restructure.repeated(at_rest, where)
    for where, message in PART:
        with pytest.raises(ValueError, match=message):
            restructure.part(at_rest, where)
    with pytest.raises(ValueError, match=r"'dict' is one node, a .*'dict\.\*'"):
        restructure.scan(lambda carry, _: (carry, None), 0, at_rest, "dict")
    with pytest.raises((TypeError, ValueError), match=r"no such array|expected a vector"):
        restructure.repeated({}, "layers.*")
    with pytest.raises(ValueError, match=r"jax\.vmap"):
        restructure.repeated(jax.tree.map(lambda x: x[None], at_rest), "layers.*")


def test_a_node_that_ends_in_a_node_without_leaves_is_one_node():
    layers = [{"a": ramp(2), "z": {"of": {}, "no": eqx.nn.Identity()}} for _ in range(2)]
    at_rest, restructure = tp.stack({"layers": layers, "one": layers[0] | {"a": ramp(3)}})
    assert list(restructure.part(at_rest, "one")) == ["a", "z"]
    assert restructure.repeated(at_rest, "layers.*")["a"].shape == (2, 2)
