"""Nodes of one kind as one: `restructure.repeated`, `.scan` and `.part`, over stacks and over a vector."""

from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..long import some
from ..zoo import Pair, assert_close, assert_same, inexact_leaves, ramp

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


class Attention(eqx.Module):
    q: jax.Array
    k: jax.Array
    v: jax.Array
    o: jax.Array
    norm: dict[str, jax.Array]

    def __init__(self, k):
        self.q, self.k, self.v, self.o = (ramp(2, 2, start=10 * k + j) for j in range(4))
        self.norm = {"mean": ramp(2, start=k), "scale": ramp(2, start=k + 1)}


def _attentions():
    return [Attention(k) for k in range(3)]


def _tied_across_all():
    shared = ramp(2, 2)
    return [{"w": shared, "own": ramp(2, 2, start=k)} for k in range(4)]


def _tied_across_two():
    shared = ramp(2, 2)
    return [{"w": shared if k in (1, 3) else ramp(2, 2, start=k), "own": ramp(2, start=k)} for k in range(4)]


def _transposed_within():
    return [{"in": ramp(2, 3, start=k), "out": ramp(2, 3, start=k).T} for k in range(3)]


def _transposed_from_outside():
    table = ramp(2, 3)
    return {"layers": [{"out": table.T, "own": ramp(2, start=k)} for k in range(3)], "table": table}


def _last_two(x):
    return x[-2:]


def _slices_of_unlike_sizes():
    return {"layers": [{"t": ramp(2), "w": ramp(2)} for _ in range(2)], "of": [ramp(3), ramp(5, start=9)]}


KEYED = lambda k: {"key": jax.random.key(k), "n": np.arange(2) + k, "raw": jax.random.PRNGKey(k), "w": ramp(2, start=k)}
MIXED = lambda k: {"half": ramp(2, start=k, dtype=jnp.bfloat16), "w": ramp(2, start=k)}

# The model, the nodes in it, where, and what of tp.layout. Around the layers there is more of the same shapes.
CASES = {
    "modules": (lambda: [Layer(k) for k in range(3)], "layers.*", {}),
    "by class": (lambda: {"x": [Layer(0)], "y": (Layer(1), [Layer(2)])}, Layer, {}),
    "by list of globs": (lambda: [Layer(k) for k in range(4)], ["layers.3", "layers.[01]"], {}),
    "one": (lambda: [Layer(0)], "layers.*", {}),
    "nested": (lambda: [{"layers": [Layer(2 * b + k) for k in range(2)]} for b in range(2)], "layers.*.layers.*", {}),
    "named tuples": (lambda: [Pair(ramp(2, start=k), (None, ramp(2, start=k))) for k in range(3)], "layers.*", {}),
    "frozen in all": (_attentions, "layers.*", {"freeze": ["layers.*.norm", "layers.*.o"]}),
    "trained in one alone": (_attentions, "layers.*", {"freeze": ["layers.0", "layers.2.*", "layers.1.q"]}),
    "all frozen": (_attentions, "layers.*", {"freeze": "layers"}),
    "keys": (lambda: list(map(KEYED, range(3))), "layers.*", {}),
    "mixed dtypes": (lambda: list(map(MIXED, range(3))), "layers.*", {}),
    "tied across all": (_tied_across_all, "layers.*", {}),
    "tied across two": (_tied_across_two, "layers.*", {}),
    "transposed within": (
        _transposed_within,
        "layers.*",
        {"ties": {f"layers.{k}.out": (f"layers.{k}.in", jnp.transpose) for k in range(3)}},
    ),
    "transposed from outside": (
        _transposed_from_outside,
        "layers.layers.*",
        {"ties": {f"layers.layers.{k}.out": ("layers.table", jnp.transpose) for k in range(3)}},
    ),
    "slices of unlike sizes": (
        _slices_of_unlike_sizes,
        "layers.layers.*",
        {"ties": {f"layers.layers.{k}.t": (f"layers.of.{k}", _last_two) for k in range(2)}},
    ),
    "empty leaves": (
        lambda: [{"e": ramp(0, 3), "n": ramp(2, 0), "s": ramp(start=k)} for k in range(3)],
        "layers.*",
        {},
    ),
}
NAMED = {  # the nodes, where they are not all that stand in `layers`
    "by class": lambda layers: [layers["x"][0], layers["y"][0], layers["y"][1][0]],
    "by list of globs": lambda layers: [layers[0], layers[1], layers[3]],
    "nested": lambda layers: [layer for block in layers for layer in block["layers"]],
    "transposed from outside": lambda layers: layers["layers"],
    "slices of unlike sizes": lambda layers: layers["layers"],
}
# Differentiated twice: of a second derivative it matters how rows are gathered, not what the nodes are.
TWICE = ("modules", "trained in one alone")
EAGERLY = ("modules", "keys", "all frozen", "tied across two")  # and outside of `jit`
OVER_A_VECTOR = ("modules", "trained in one alone", "mixed dtypes", "transposed from outside", "slices of unlike sizes")
LONG_CASES = [(tp.ravel, "trained in one alone"), *((tp.stack, name) for name in ("named tuples", "by class"))]


def nodes_of(name, model):
    layers = model["layers"]
    plain = lambda layers: [layers[name] for name in sorted(layers)] if isinstance(layers, dict) else list(layers)
    return NAMED.get(name, plain)(layers)


def measure(node):
    """A smooth function of all numbers in a node, different in each place."""
    is_key = lambda leaf: jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    leaves = jax.tree.leaves(eqx.filter(node, eqx.is_array))
    return _measure([jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in leaves])


@jax.jit
def _measure(leaves):
    total = jnp.float32(1)
    for place, leaf in enumerate(leaves):
        total = (1.1 + place) * total + jnp.sum(jnp.sin(leaf.astype(jnp.float32) * (place + 1)))
    return total


def fold(totals):
    result = jnp.float32(0)
    for each in totals:
        result = 0.5 * result + each**2
    return result


def stacked(nodes):
    """The nodes as one, leaf by leaf."""

    def one(*leaves):
        is_key = jnp.issubdtype(getattr(leaves[0], "dtype", int), jax.dtypes.prng_key)
        if not hasattr(leaves[0], "dtype"):
            return leaves[0]
        return jnp.stack(leaves) if is_key else jax.device_put(np.stack([np.asarray(leaf) for leaf in leaves]))

    return jax.tree.map(one, *nodes)


@pytest.mark.parametrize(
    ("form", "name"),
    some([*((tp.stack, name) for name in CASES), *((tp.ravel, name) for name in OVER_A_VECTOR)], LONG_CASES),
)
def test_nodes_are_what_they_are_in_the_model_and_so_are_derivatives(form, name):
    make, where, options = CASES[name]
    model = {"before": ramp(2, 2, start=20), "layers": make(), "z": [ramp(2, start=30), ramp(2, 3, start=31)]}
    at_rest, restructure = form(model, tp.layout(model, **options))
    alike = stacked(nodes_of(name, restructure(at_rest)))  # an alias is what its source makes of it

    def in_model(at_rest, restructure):
        return fold(map(measure, nodes_of(name, restructure(at_rest))))

    def repeated(at_rest, restructure):
        node = restructure.repeated(at_rest, where)
        return fold(eqx.filter_vmap(measure)(node))

    def scanned(at_rest, restructure):
        step = lambda total, node: (0.5 * total + measure(node) ** 2, measure(node))
        total, each = restructure.scan(step, jnp.float32(0), at_rest, where)
        return total + 0 * jnp.sum(each)

    def all_of_it(at_rest, restructure):
        direction = jax.tree.map(lambda x: jnp.cos(jnp.arange(x.size)).astype(x.dtype).reshape(x.shape), at_rest)
        found = []
        for each in (in_model, repeated, scanned):
            of = lambda at_rest, each=each: each(at_rest, restructure)
            gradient = jax.jvp(jax.grad(of), (at_rest,), (direction,)) if name in TWICE else jax.grad(of)(at_rest)
            found.append((of(at_rest), gradient))
        return restructure.repeated(at_rest, where), found

    node, (want, *others) = eqx.filter_jit(all_of_it)(at_rest, restructure)
    assert_same(node, alike, identity=False)
    if name in EAGERLY:
        assert_same(restructure.repeated(at_rest, where), alike, identity=False)
    gradient = want[1][0] if name in TWICE else want[1]
    assert name == "all frozen" or any(np.any(np.asarray(leaf)) for leaf in jax.tree.leaves(gradient))
    for got in others:
        assert_close(got, want, 1e-2 if name == "mixed dtypes" else 1e-3)


# -- Options and other transformations ---------------------------------------------------------------------------------

NET = {
    "embed": ramp(2, 2, start=9),
    "head": {"f": jnp.sin, "w": ramp(2, start=5)},
    "layers": [Layer(k) for k in range(4)],
}
NET_STACKS, NET_WAY = tp.stack(NET)
X = np.array([0.3, -0.4], np.float32)


@FORMS
@pytest.mark.parametrize("options", [{}, {"unroll": 2, "reverse": True}], ids=str)
def test_scan_takes_the_options_of_jax(form, options):
    at_rest, restructure = form(NET)
    step = lambda x, layer: (layer(x), x[0] * layer.rate)
    last, outs = jax.jit(lambda a, r: r.scan(step, jnp.asarray(X), a, "layers.*", **options))(at_rest, restructure)
    x, want = X, {}
    for k in reversed(range(4)) if "reverse" in options else range(4):
        want[k], x = x[0] * 0.5, NET["layers"][k](x)
    np.testing.assert_allclose(last, x, 1e-5)
    np.testing.assert_allclose(outs, [want[k] for k in range(4)], 1e-5)


def test_scan_takes_inputs_for_each_node():
    keys = jax.random.split(jax.random.key(0), 4)
    step = lambda x, layer, each: (layer(x) * jax.random.uniform(each["key"]), each["n"] * layer.rate)
    inputs = {"key": keys, "n": np.arange(4, dtype=np.float32)}
    last, outs = jax.jit(lambda s, r: r.scan(step, jnp.asarray(X), s, "layers.*", inputs))(NET_STACKS, NET_WAY)
    x = X
    for layer, key in zip(NET["layers"], keys, strict=True):
        x = layer(x) * jax.random.uniform(key)
    np.testing.assert_allclose(last, x, 1e-5)
    np.testing.assert_allclose(outs, [0, 0.5, 1, 1.5])


@FORMS
def test_layers_of_a_dictionary_run_in_the_order_of_their_numbers(form):
    """JAX sorts keys as texts: `layer_10` before `layer_2`."""
    model = {f"layer_{k}": {"w": ramp(2, 2, start=k / 12)} for k in range(12)}
    at_rest, restructure = form(model)

    def by_hand(at_rest):
        model, x = restructure(at_rest), jnp.asarray(X)
        for k in range(12):
            x = jnp.tanh(model[f"layer_{k}"]["w"] @ x)
        return jnp.sum(x)

    def scanned(at_rest):
        step = lambda x, layer: (jnp.tanh(layer["w"] @ x), None)
        return jnp.sum(restructure.scan(step, jnp.asarray(X), at_rest, "layer_*")[0])

    for got, want in zip(*(jax.tree.leaves(jax.value_and_grad(f)(at_rest)) for f in (scanned, by_hand)), strict=True):
        np.testing.assert_allclose(got, want, 1e-4, 1e-6)


def test_groups_may_part_the_nodes():
    groups = {"q of two": ["layers.0.q", "layers.2.q"], "norms": "**.norm", "rest": "**"}
    model = {"layers": _attentions()}
    stacks, restructure = tp.stack(model, groups=groups)
    plain, plainly = tp.stack(model)
    assert_same(restructure.repeated(stacks, "layers.*"), plainly.repeated(plain, "layers.*"), identity=False)
    scanned = lambda s, r: r.scan(lambda c, node: (0.5 * c + measure(node), None), jnp.float32(0), s, "layers.*")[0]
    got = jax.jit(jax.grad(scanned))(stacks, restructure)
    want = restructure.ravel(plainly(jax.jit(jax.grad(scanned))(plain, plainly)))
    assert_close(got, want)


def test_in_ensembles_in_checkpoints_and_with_other_dtypes():
    scanned = lambda s, r: jnp.sum(r.scan(lambda x, layer: (layer(x), None), jnp.asarray(X), s, "layers.*")[0])
    plain = lambda s, r: jnp.sum(forward(r(s)))
    many = jax.tree.map(lambda x: np.stack([x, np.float32(0.5) * np.asarray(x)]), NET_STACKS)
    of = lambda f: jax.vmap(jax.grad(jax.checkpoint(f)), (0, None))
    assert_close(*jax.jit(lambda *both: (of(scanned)(*both), of(plain)(*both)))(many, NET_WAY), 1e-4)
    half = jax.tree.map(lambda x: jax.device_put(np.asarray(x).astype(np.float16)), NET_STACKS)
    node = NET_WAY.repeated(half, "layers.*")
    assert {leaf.dtype.name for leaf in inexact_leaves(node)} == {"float32"}
    np.testing.assert_allclose(node.weight, np.stack([layer.weight for layer in NET["layers"]]), 1e-2)


def forward(model):
    x = jnp.asarray(X)
    for layer in model["layers"]:
        x = layer(x)
    return x


def equations(jaxpr):
    """All equations of a program, those of programs within it too."""
    count = 0
    for equation in jaxpr.eqns:
        inner = [
            x for x in jax.tree.leaves(list(equation.params.values())) if hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ]
        count += 1 + sum(equations(getattr(each, "jaxpr", each)) for each in inner)
    return count


@FORMS
def test_the_program_is_as_long_for_twelve_layers_as_for_four(form):
    def lengths(layers):
        model = {"embed": ramp(2, 2), "head": ramp(2), "layers": list(map(Attention, range(layers)))}
        at_rest, restructure = form(model, ["!head", "!layers.*.norm", "!layers.*.k"])

        def loss(at_rest, restructure):
            start = jnp.sum(restructure.part(at_rest, "embed")) + jnp.sum(restructure.part(at_rest, "head"))
            total, _ = restructure.scan(lambda c, node: (c * measure(node), None), start, at_rest, "layers.*")
            return total + fold([jnp.sum(eqx.filter_vmap(measure)(restructure.repeated(at_rest, "layers.*")))])

        squares = lambda tree: sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(tree))
        second = jax.grad(lambda a, r: squares(jax.grad(loss)(a, r)))
        programs = [jax.make_jaxpr(f)(at_rest, restructure) for f in (jax.value_and_grad(loss), second)]
        assert not any("pad[" in str(program) for program in programs)  # a slice for itself is transposed to one
        return [equations(program.jaxpr) for program in programs]

    few = lengths(4)
    assert few[0] > 50
    assert few[1] > few[0]
    assert lengths(12) == few
