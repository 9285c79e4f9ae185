"""`tp.rolled`: a loop over equal layers is compiled as one of them, and is the function that it was."""

import gc
import warnings
import weakref
from collections.abc import Callable

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from numpy.testing import assert_allclose

import treeparams as tp

from ..long import some
from ..zoo import filled

WIDTH = 4
WEIGHTS, X = np.linspace(-1, 1, 36, dtype=np.float32).reshape(4, 3, 3), np.ones(3, np.float32)


class Layer(eqx.Module):
    """A residual layer with a function, a number, and dropout."""

    linear: eqx.nn.Linear
    norm: eqx.Module
    dropout: eqx.nn.Dropout
    scale: float
    activation: Callable = jax.nn.relu  # which has a rule of its own for its derivative

    def __call__(self, x, key):
        return x + self.scale * self.dropout(self.activation(self.linear(self.norm(x))), key=key)


class Net(eqx.Module):
    """A stem and a head that are one array, a frozen mean, and layers between."""

    embedding: jax.Array
    layers: list
    mean: jax.Array = tp.field(trainable=False)

    def __call__(self, x, key):
        x = self.embedding[x] - self.mean
        for layer, each in zip(self.layers, jax.random.split(key, len(self.layers)), strict=True):
            x = layer(x, key=each)
        return self.embedding @ x


def layer(seed, scale=0.3):
    linear, norm = filled(eqx.nn.Linear, WIDTH, WIDTH, seed=seed), eqx.nn.LayerNorm(WIDTH)
    return Layer(linear, norm, eqx.nn.Dropout(0.2), scale)


def plain(seed, scale):
    return Layer(filled(eqx.nn.Linear, WIDTH, WIDTH, seed=seed), eqx.nn.Identity(), eqx.nn.Dropout(0), scale)


def other(seed):
    """A layer of another kind, of the same shapes."""
    return filled(eqx.nn.MLP, WIDTH, WIDTH, WIDTH, 1, activation=jnp.tanh, seed=10 + seed)


def net(kinds):
    embedding = np.random.default_rng(1).normal(size=(3, WIDTH)).astype("f")
    layers = [kind(seed) for seed, kind in enumerate(kinds)]
    return Net(jax.device_put(embedding), layers, np.full(WIDTH, 0.1, "f"))


NETS = {  # the kinds of their layers
    "one kind after another": [layer] * 4 + [other] * 4,
    "in turn": [layer, other] * 3,
    "numbers that differ, and frozen layers": [lambda seed, i=i: plain(seed, 1 / (2 + i)) for i in range(6)],
}
XS, KEYS = np.array([0, 2, 1, 0]), jax.random.split(jax.random.key(2), 4)


def losses(model, trainable=None):
    stacks, restructure = tp.stack(model, trainable)

    def loss(stacks, xs, keys):
        return jnp.mean(jnp.cos(jax.vmap(restructure(stacks))(xs, keys)))

    return stacks, loss


def products(function, *args):
    """How many products of matrices the program of a gradient has, those within loops once."""
    return str(jax.make_jaxpr(jax.grad(function))(*args)).count("dot_general[")


def close(found, expected):
    jax.tree.map(lambda a, b: assert_allclose(a, b, rtol=2e-4, atol=2e-5), found, expected)


@pytest.mark.parametrize("name", some(NETS, ["one kind after another"]))
def test_it_is_the_function_and_its_gradient(name):
    stacks, loss = losses(net(NETS[name]), "!layers.[0-2]" if "frozen" in name else None)
    args = stacks, XS, KEYS
    both = [jax.value_and_grad(each) for each in (tp.rolled(loss), loss)]
    close(*jax.jit(lambda *args: [each(*args) for each in both])(*args))
    assert products(tp.rolled(loss), *args) < products(loss, *args) / 1.4


def test_under_other_transformations():
    stacks, restructure = tp.stack([*map(jnp.asarray, WEIGHTS)])

    def loss(stacks, x):
        for weight in restructure(stacks):
            x = jax.nn.relu(weight @ x) + jnp.sin(x)
        return jnp.sum(x**2)

    rolled = tp.rolled(loss)
    assert products(rolled, stacks, X) < products(loss, stacks, X)

    def each(f, stacks, several):
        gradient = jax.value_and_grad(f)
        along = jax.jvp(jax.checkpoint(gradient), (stacks, X), (jax.tree.map(jnp.cos, stacks), X))
        return along, jax.vmap(gradient, (0, None))(several, X)[1]

    several = jax.tree.map(lambda s: np.stack([s, np.float32(2) * np.asarray(s)]), stacks)
    found, expected = jax.jit(lambda *args: [each(f, *args) for f in (rolled, loss)])(stacks, several)
    close(found, expected)
    close(rolled(stacks, X), expected[0][0][0])  # without `jit`


def test_so_many_layers_take_as_many_operations_as_few():
    few, many = [losses(net([layer] * number)) for number in (3, 5)]
    count = lambda stacks, loss: str(jax.make_jaxpr(jax.grad(tp.rolled(loss)))(stacks, XS, KEYS)).count(" = ")
    assert count(*few) == count(*many)


def test_what_each_layer_gives_can_be_kept():
    def hidden(weights, x, scale):
        found = []
        for weight in weights:
            x = jnp.tanh(weight @ x) + jnp.sin(x) * jnp.cos(x) + scale
            found.append(x)
        return {"all": jnp.stack(found), "third": found[2], "name": "tanh"}, x

    gradient = lambda f: jax.grad(lambda weights, *args: jnp.sum(f(weights, *args)[0]["all"] ** 2))
    both = lambda *args: [(f(*args), gradient(f)(*args)) for f in (tp.rolled(hidden), hidden)]
    (found, in_weights), (expected, wanted) = eqx.filter_jit(both)(WEIGHTS, X, 2)
    assert found[0].pop("name") == expected[0].pop("name")
    close((found, in_weights), (expected, wanted))


def in_rows(*rows):
    def chain(weights, x):
        for row in rows:
            x = jnp.sin(weights[row] @ x) + 0.5 * x
        return jnp.sum(x) + weights[0, 0, 0]

    return chain


def from_two_before(weights, x):
    before = x
    for weight in weights[:6]:
        x, before = jnp.sin(weight @ before) + 0.5 * x, x
    return jnp.sum(x)


# A dictionary sorts its keys, so `layer_7` comes behind `layer_10`.
LOOPS = {"some": in_rows(0, 3, 6, 9), "in any order": in_rows(0, 1, 4, 5, 2, 3), "two carries": from_two_before}


@pytest.mark.parametrize("loop", LOOPS)
def test_rows_in_any_order_and_a_carry_of_several_arrays(loop):
    weights, chain = np.linspace(-1, 1, 90, dtype=np.float32).reshape(10, 3, 3), LOOPS[loop]
    assert products(tp.rolled(chain), weights, X) < products(chain, weights, X)
    both = [jax.vmap(jax.value_and_grad(f), (0, None)) for f in (tp.rolled(chain), chain)]
    close(*jax.jit(lambda *args: [each(*args) for each in both])(np.stack([weights, 2 * weights]), X))


# -- What is left as it is ---------------------------------------------------------------------------------------------


def clipped(limit):
    @jax.custom_jvp
    def identity(x):
        return 1.0 * x

    @identity.defjvp
    def rule(primals, tangents):
        return identity(*primals), limit * tangents[0]

    return identity


def scaled_back(limit):
    @jax.custom_vjp
    def identity(x):
        return 1.0 * x

    identity.defvjp(lambda x: (1.0 * x, None), lambda _, cotangent: (limit * cotangent,))
    return identity


def with_rules(limits, rule=clipped):
    rules = list(map(rule, limits))

    def chain(weights, x):
        for weight, rule in zip(weights, rules, strict=True):
            x = rule(jnp.sin(weight @ x)) - jnp.cos(x) * x
        return jnp.sum(x)

    return chain


@pytest.mark.parametrize("rule", [clipped, scaled_back])
def test_rules_of_derivatives_are_compared(rule):
    same, different = with_rules([0.5] * 4, rule), with_rules([0.1, 0.2, 0.3, 0.4], rule)
    assert products(tp.rolled(same), WEIGHTS, X) < products(same, WEIGHTS, X)
    both = jax.jit(lambda *args: [jax.grad(f)(*args) for f in (tp.rolled(different), different)])
    with pytest.warns(UserWarning, match="there are no equal layers in sequence"):
        assert_allclose(*both(WEIGHTS, X), rtol=1e-6)


def printing(weights, x):
    for weight in weights:
        x = jnp.sin(weight @ x) - jnp.cos(x) * x
        jax.debug.print("{}", x[0])
    return jnp.sum(x)


def convolved(weights, x):
    for weight in weights:
        x = jnp.sin(jnp.convolve(x, weight[0], mode="same")) - jnp.cos(x) * x
    return jnp.sum(x)


def in_a_vector(weights, x):
    return with_rules([0.5] * 4)(tp.ravel(list(WEIGHTS))[1](weights.ravel()), x)


LEFT = {
    "side effects": (printing, "side effects, such as those of jax.debug.print"),
    "convolutions": (convolved, "convolutions, which are slow in loops on a CPU"),
    "a vector": (in_a_vector, "parameters come from a vector.* take tp.stack"),
    "no stack": (lambda weights, x: jnp.sum(weights @ x), "no parameter comes from a stack; write `stacks"),
}


@pytest.mark.parametrize("name", LEFT)
def test_it_says_why_nothing_is_rolled(name, capfd):
    function, words = LEFT[name]
    with pytest.warns(UserWarning, match="tp.rolled found no loop.*" + words):
        found = jax.jit(tp.rolled(function))(WEIGHTS, X)
    assert_allclose(found, jax.jit(function)(WEIGHTS, X), rtol=1e-6)


# -- Keys, and random nets: the same as the function, or the function unchanged with a warning -------------------------


def same_or_said(function, *args):
    """Checks a rolled function beside the function; returns whether a loop was found."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        close(*jax.jit(lambda *args: [f(*args) for f in (tp.rolled(function), function)])(*args))
    assert all("tp.rolled found no loop" in str(each.message) for each in said)
    return not said


def a_net(n, kind, has, seed=0):
    """Returns a net over stacks, with what programs of users have around their layers."""
    weights = np.random.default_rng(seed).normal(size=(n, 3, 3)).astype("f")
    stacks, restructure = tp.stack([*map(jnp.asarray, weights)])

    def layer(w, x, key):
        z = jnp.tanh(w @ x) + jnp.sin(x)
        if key is None:
            return z
        first, second = jax.random.split(key)
        return z * jax.random.uniform(first, z.shape) + jax.random.uniform(second, z.shape)

    own = jax.jit(layer) if "jit" in has else layer

    def net(stacks, x, key):
        layers, total, found, start = restructure(stacks), 0.0, [], x
        if "stem" in has:
            key, first = jax.random.split(key)
            x = x + jax.random.uniform(first, x.shape)
        keys = jax.random.split(key, n)
        for i, w in enumerate(layers):
            if kind == "chain":
                key, each = jax.random.split(key)
            else:
                each = {"index": keys[i], "zip": keys[n - 1 - i], "fold": jax.random.fold_in(key, i)}.get(kind)
            x = own(w, x, each) + (start if "skip" in has else 0.0)
            x = x / (i + 1.0) if "counter" in has else x
            total = total + jnp.sum(x**2) if "total" in has else total
            found.append(x)
        x = layers[0] @ x if "first" in has else x
        return (jnp.mean(x) if "head" in has else x), total, jnp.stack(found) if "all" in has else ()

    return net, stacks


OF_KEYS = [
    ("index", ("jit", "stem", "skip")),
    ("chain", ("jit", "stem")),
    ("fold", ("counter", "all", "first", "head")),
]


@pytest.mark.parametrize(("kind", "has"), OF_KEYS)
def test_layers_may_split_their_keys_and_be_compiled_by_themselves(kind, has):
    net, stacks = a_net(3, kind, has)
    assert same_or_said(net, stacks, jnp.ones(3), jax.random.key(0))


@pytest.mark.parametrize("seed", some(range(200), {*range(200)} - {168}))  # which has what no row above has
def test_random_nets(seed):
    rng = np.random.default_rng(seed)
    names = ("total", "head", "skip", "counter", "stem", "jit", "first", "all")
    kind, has = rng.choice(["index", "zip", "fold", "chain", "none"]), [name for name in names if rng.random() < 0.4]
    net, stacks = a_net(int(rng.integers(3, 8)), kind, has, seed)
    same_or_said(net, stacks, jnp.ones(3), jax.random.key(seed))


def test_nothing_of_a_function_lives_on():
    def rolled(rule, limit):
        jax.make_jaxpr(jax.grad(tp.rolled(with_rules([limit] * 4, rule))))(WEIGHTS, X)
        return weakref.ref(limit)

    found = [rolled(rule, jnp.ones(3)) for rule in (clipped, scaled_back)]
    jax.clear_caches()
    gc.collect()
    assert [limit() for limit in found] == [None, None]
