"""What a function reaches, read from its program, against what JAX's derivatives say."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import treeparams as tp
from treeparams import optim

from .zoo import ZOO, ramp

MODEL = {name: ramp(3) for name in "abcd"}
total, stop = jnp.sum, lax.stop_gradient


by_jvp = jax.custom_jvp(lambda x, y: x * y)
by_jvp.defjvp(lambda primals, tangents: (primals[0] * primals[1], tangents[0] * primals[1]))


def ruled(second):
    product = jax.custom_vjp(lambda x, y: x * y)
    product.defvjp(lambda x, y: (x * y, y), lambda y, cotangent: (cotangent * y, second(y, cotangent)))
    return product


broken = jax.custom_vjp(lambda x: 2 * x)
broken.defvjp(lambda x: (2 * x, None), lambda _, cotangent: 1 / 0)


def scanned(m):
    """`a` is reached in the last round alone, by way of `b` and `c`."""
    step = lambda carry, x: ((carry[1], carry[2], carry[2] * x), carry[0])
    return lax.scan(step, (m["a"].sum(), m["b"].sum(), m["c"].sum()), jnp.ones(3))


def counted_down(m):
    start = (0, m["a"].sum(), m["b"].sum())
    return lax.while_loop(lambda c: c[0] < m["d"].sum(), lambda c: (c[0] + 1, c[2], c[2]), start)[1]


def loop_of_equinox(m):
    body = lambda carry: (carry[0] + 1, carry[1] * m["b"])
    return eqx.internal.while_loop(lambda c: c[0] < 2, body, (0, m["a"]), kind="checkpointed", max_steps=2)[1][0]


@eqx.filter_custom_vjp
def asked(operands):
    return operands[0] * operands[1]


# A derivative in the second one only where the first is fixed.
asked.def_fwd(lambda perturbed, operands: (operands[0] * operands[1], None))
asked.def_bwd(
    lambda _, cotangent, perturbed, operands: (
        (cotangent * operands[1], None) if perturbed[0] else (None, cotangent * operands[0])
    )
)


def _whole(rule):
    """The identity of a tree, with a rule of values and cotangents."""

    identity = jax.custom_vjp(lambda tree: tree)
    identity.defvjp(lambda tree: (tree, tree), lambda tree, cotangents: (jax.tree.map(rule, tree, cotangents),))
    return identity


decayed = _whole(lambda leaf, cotangent: cotangent + leaf / 10)
# Zero at zero cotangents: a choice, a branch, an entry, and a norm that is bounded below.
_limits = lambda leaf, cotangent: cotangent / jnp.maximum(jnp.sqrt(jnp.sum(abs(cotangent))), leaf[0])
limited = _whole(
    lambda leaf, cotangent: lax.cond(
        leaf[0] > 0, _limits, lambda leaf, cotangent: jnp.where(leaf > 0, leaf * cotangent[0], 0), leaf, cotangent
    )
)
normalised = _whole(lambda _, cotangent: cotangent / jnp.sum(abs(cotangent)))  # 0 / 0


def written(m):
    ref = jax.new_ref(m["b"])
    ref[...] = m["a"]
    return ref[...].sum()


def written_in_a_loop(m):
    ref = jax.new_ref(jnp.zeros(3))

    def body(i, so_far):
        ref[i] += m["a"][i] * so_far
        return so_far + 1

    lax.fori_loop(0, 3, body, m["b"].sum())
    return ref[...].sum()


def written_in_a_branch(m):
    ref, unused = jax.new_ref(m["a"]), jax.new_ref(m["c"])

    def write():
        ref[...] = m["b"]
        unused[...] = m["d"]

    lax.cond(m["c"][0] > 0, write, lambda: None)
    return ref[...].sum()


by_rule = lambda rule: lambda m: total(ruled(rule)(m["a"], m["b"]))
rounds = lambda step, carry: lax.scan(lambda carry, _: (step(carry), None), carry, None, 2)[0]
PROGRAMS = {
    "a rule of a tree that adds its own": (lambda m: total(decayed(m)["a"]), "abcd"),
    "it, of what is fixed": (lambda m: total(decayed({**m, "b": stop(m["b"])})["a"]), "acd"),
    "it, fixed after": (lambda m: total(m["a"] + stop(decayed(m)["b"])), "a"),
    "it, unused": (lambda m: (total(m["a"]), decayed(m))[0], "a"),
    "it, jitted": (lambda m: total(jax.jit(decayed)(m)["a"]), "abcd"),
    "it, in a loop": (lambda m: total(rounds(decayed, m)["a"]), "abcd"),
    "it, in a branch": (lambda m: total(lax.cond(m["d"][0] > 0, decayed, lambda m: m, m)["a"]), "abcd"),
    "it, where another rule has no derivative": (
        lambda m: total(ruled(lambda y, c: None)(m["a"], decayed({"b": m["b"]})["b"])), "ab"),
    "a rule of a tree that adds nothing": (lambda m: total(limited(m)["a"]), "a"),
    "a rule of a tree that divides zeros, in doubt": (lambda m: total(normalised(m)["a"]), "abcd"),
    "a rule that asks what moves": (lambda m: total(asked((m["a"], m["b"]))), "a"),
    "what moves is asked, of what is fixed": (lambda m: total(asked((stop(m["a"]), m["b"]))), "b"),
    "a rule for vjp with computed ones": (by_rule(lambda y, c: jnp.exp(jnp.zeros_like(y))), "ab"),
    "a rule for vjp with jitted zeros": (by_rule(lambda y, c: jax.jit(lambda: jnp.zeros(3))()), "a"),
    "a whole tree at once": (lambda m: total(lax.optimization_barrier(m)["b"]), "b"),
    "put on a device": (lambda m: total(jax.device_put(m, jax.devices()[0])["b"]), "b"),
    "a product": (lambda m: total(m["a"] * m["c"]), "ac"),
    "nothing": (lambda m: jnp.float32(3), ""),
    "a Python number": (lambda m: 3.0, ""),
    "stop_gradient": (lambda m: total(m["a"] * stop(m["b"])), "a"),
    "by way of integers": (lambda m: total(m["a"].astype(int).astype(float) + m["b"]), "b"),
    "by way of an order": (lambda m: total(m["b"][jnp.argsort(m["a"])]), "b"),
    "a choice": (lambda m: total(jnp.where(m["a"] > 1, m["b"], m["c"])), "bc"),
    "branches": (lambda m: lax.cond(m["a"][0] > 1, lambda: m["b"][0], lambda: m["c"][0]), "bc"),
    "a switch with operands": (
        lambda m: lax.switch(1, [lambda x, y: x, lambda x, y: y * 2, lambda x, y: 0.0], m["a"][0], m["d"][0]), "ad"),
    "scan, the carry": (lambda m: scanned(m)[0][0], "abc"),
    "scan, what comes out": (lambda m: total(scanned(m)[1]), "abc"),
    "scan, one of its results": (lambda m: scanned(m)[0][2], "c"),
    "while": (counted_down, "ab"),
    "fori_loop": (lambda m: total(lax.fori_loop(0, 2, lambda i, x: x * m["b"], m["a"])), "ab"),
    "jit": (lambda m: total(jax.jit(lambda x, y: (x, y))(m["a"], m["b"])[1]), "b"),
    "checkpoint": (lambda m: total(jax.checkpoint(lambda x, y: (jnp.sin(x), y))(m["a"], m["b"])[0]), "a"),
    "eqx.filter_checkpoint": (lambda m: eqx.filter_checkpoint(lambda m: total(m["a"]))(m), "a"),
    "vmap": (lambda m: total(jax.vmap(lambda x, y: by_jvp(x, y))(m["a"], m["b"])), "a"),
    "a derivative": (lambda m: total(jax.grad(lambda x: total(x**2 * m["b"] + m["c"]))(m["a"])), "ab"),
    "a solve": (lambda m: total(jnp.linalg.solve(jnp.diag(m["a"]), m["b"])), "ab"),
    "a loop of Equinox": (loop_of_equinox, "ab"),
    "a rule for jvp": (lambda m: total(by_jvp(m["a"], m["b"])), "a"),
    "a rule for jvp, in a loop": (lambda m: total(rounds(lambda x: by_jvp(x, m["b"]), m["a"])), "a"),
    "a rule for vjp with None": (by_rule(lambda y, c: None), "a"),
    "a rule for vjp with zeros": (by_rule(lambda y, c: jnp.zeros_like(y)), "a"),
    "a rule for vjp of values": (by_rule(lambda y, c: y), "ab"),
    "a rule that fails, but is not used": (lambda m: total(m["b"] * stop(broken(m["a"]))), "b"),
    "a product with zero, in doubt": (lambda m: total(m["a"] * 0), "a"),
    "what is written over": (written, "a"),
    "what is written in a loop": (written_in_a_loop, "ab"),
    "what is written in a branch": (written_in_a_branch, "ab"),
}  # fmt: skip
# A loop of Equinox takes long, and JAX 0.7 has no reverse mode for a branch that writes.
NOT_IN_REVERSE = ("while", "a rule that fails, but is not used", "a loop of Equinox", "what is written in a branch")


@pytest.mark.parametrize(("f", "expected"), PROGRAMS.values(), ids=PROGRAMS)
def test_programs(f, expected):
    assert tp.reached(f)(MODEL).paths == tuple(expected)


def test_where_nothing_is_reached_jax_gives_zeros():
    programs = {name: f for name, (f, _) in PROGRAMS.items() if name not in NOT_IN_REVERSE}

    @jax.jit
    def gradients(m):
        for f, expected in map(PROGRAMS.get, NOT_IN_REVERSE):
            assert tp.reached(f)(m).paths == tuple(expected)
        ours = {name: tp.grad(f, unreached="none")(m) for name, f in programs.items()}
        return ours, {name: jax.grad(lambda m, f=f: jnp.asarray(f(m)))(m) for name, f in programs.items()}

    ours, by_jax = gradients(MODEL)
    for name in programs:
        expected = PROGRAMS[name][1]
        assert "".join(each for each in MODEL if ours[name][each] is not None) == expected, name
        for each, gradient in by_jax[name].items():
            if each in expected:
                np.testing.assert_allclose(ours[name][each], gradient, 1e-6, err_msg=name)
            assert each in expected or not np.any(gradient), name


UNARY = {
    jnp: "abs arctan cbrt ceil conj copy cos cumsum exp exp2 expm1 floor log log1p negative real reciprocal rint round "
    "sign sin sinc sort sqrt square tanh trunc max median isfinite signbit argmax argsort",
    jax.nn: "relu relu6 hard_tanh gelu silu logsumexp softmax standardize",
    jax.scipy.special: "erf gammaln digamma",
}


def test_functions_of_jax_are_reached_where_their_derivative_is_not_zero():
    model, functions = {"x": np.array([0.3, 0.9, 0.6], np.float32)}, {}
    for function in [getattr(home, name) for home, names in UNARY.items() for name in names.split()]:
        functions[function.__name__] = lambda m, g=function: jnp.sum(jnp.square(g(m["x"]).astype(float)))
    flat = {name: f for name, f in functions.items() if not tp.reached(f)(model).slots}
    assert " ".join(flat) == "ceil floor rint round sign trunc isfinite signbit argmax argsort"
    slopes = jax.jit(lambda m: {name: jax.grad(f)(m)["x"] for name, f in flat.items()})(model)
    assert not [name for name, slope in slopes.items() if np.any(slope)]


@pytest.mark.parametrize("name", [name for name in ZOO if name != "all frozen"])
def test_a_subset_of_the_slots(name):
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)
    slots = lambda model: tp.trainables(model, layout)
    for chosen in (layout.paths[::2], layout.paths[1::2]):
        got = tp.reached(lambda model, chosen=chosen: [abs(slots(model)[path]) for path in chosen], layout)(model)
        assert (got.paths, got.ties) == (chosen, layout.ties)


def test_a_tie_is_reached_at_any_of_its_places_and_by_the_value_alone():
    shared = ramp(2)
    model = {"embed": shared, "head": shared, "decoder": ramp(2, 2).T, "encoder": ramp(2, 2)}
    layout = tp.layout(model, ties={"decoder": ("encoder", jnp.transpose)})
    assert tp.reached(lambda m: jnp.sum(m["head"]) + jnp.sum(m["decoder"]), layout)(model) == layout
    f = lambda m: (jnp.sum(m["a"]), {"more": m["b"], "text": "x"})
    assert (tp.reached(f, has_aux=True)(MODEL).paths, tp.reached(f)(MODEL).paths) == (("a",), ("a", "b"))
    grads, aux = tp.grad(f, has_aux=True, unreached="none")(MODEL)
    assert (grads["b"], aux["text"]) == (None, "x")


def test_nothing_is_run():
    ran, large = [], jax.ShapeDtypeStruct((3, 10**12), jnp.float32)

    def f(m, x):
        jax.debug.callback(ran.append, m["a"])
        return jnp.sum(m["a"] @ x)

    assert tp.reached(f)(MODEL, large).paths == ("a",)
    assert tp.reached(f, ["a", "b"])(jax.eval_shape(lambda: MODEL), x=large) == tp.layout(MODEL, "a")
    jax.effects_barrier()
    assert ran == []


def test_within_transformations():
    gradient = tp.grad(lambda m, x: jnp.sum(m["a"] * x) ** 2, unreached="none")
    models = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), MODEL)

    @jax.jit
    def ways(model, models, x):
        mapped = jax.vmap(gradient)(models, x)
        _, scanned = lax.scan(lambda _, x: (None, gradient(model, x)), None, x)
        of_a_norm = jax.grad(lambda m: jnp.sum(gradient(m, 2.0)["a"] ** 2))(model)
        return gradient(model, 2.0), mapped, scanned, of_a_norm

    expected, mapped, scanned, of_a_norm = ways(MODEL, models, np.full(2, 2, np.float32))
    assert sorted(path for path, leaf in expected.items() if leaf is not None) == ["a"]
    for each in (mapped, scanned):
        np.testing.assert_allclose(each["a"], [expected["a"]] * 2, 1e-6)
        assert each["b"] is None
    np.testing.assert_allclose(of_a_norm["a"], 2 * 3 * 8 * expected["a"], 1e-6)


def test_no_error_where_all_that_trains_is_reached():
    gradient = jax.eval_shape(tp.grad(PROGRAMS["a product"][0], ["a", "c"], unreached="error"), MODEL)
    assert [name for name in MODEL if gradient[name] is not None] == ["a", "c"]


def test_one_more_trace_and_nothing_in_the_program():
    traces = []
    f = lambda m: traces.append(1) or jnp.sum(m["a"])
    compiled = jax.jit(tp.grad(f, unreached="none")).lower(MODEL).compile()
    assert len(traces) == 2
    by_hand = jax.jit(lambda m: jax.grad(lambda a: f(m | {"a": a}))(m["a"])).lower(MODEL).compile()
    assert compiled.as_text().count(" = ") == by_hand.as_text().count(" = ")


def test_a_state_that_may_be_used_once():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    in_batches = lambda norm, state, x: jax.vmap(norm, (0, None), (0, None), axis_name="batch")(x, state)

    def f(model, state, x):
        y, state = in_batches(model["norm"], state, x)
        return jnp.sum(y**2), state

    def step(norm, state, x, *, scale):
        return eqx.tree_at(lambda n: n.bias, norm, norm.bias * scale), in_batches(norm, state, x)[1]

    x, model = ramp(4, 3), {"norm": norm, "unused": ramp(2)}
    assert tp.moved(step)(norm, state, x, scale=2.0).paths == ("bias",)
    grads, _ = jax.eval_shape(lambda: tp.grad(f, has_aux=True, unreached="none")(model, state, x))
    assert grads["unused"] is None
    assert grads["norm"].weight is not None


def test_programs_that_are_called_at_many_places_are_walked_once():
    f, g = lambda x: jnp.sin(x), lambda m: m
    for _ in range(30):  # 2^30 calls, if each were followed
        f, g = jax.jit(lambda x, f=f: f(x) + f(x)), jax.jit(lambda m, g=g: g(g(m)))
    assert tp.reached(lambda m: jnp.sum(f(m["a"])))(MODEL).paths == ("a",)
    assert tp.moved(g)(MODEL).paths == ()


@pytest.mark.usefixtures("standard_promotion")  # Optax relies on it
def test_a_parameter_that_is_never_used_stays_put_under_adamw():
    start = {"w": ramp(3), "v": np.ones(2, np.float32)}
    tx = optim.trainable(optax.adamw(0.1, weight_decay=0.1))

    @functools.partial(jax.jit, static_argnames="unreached")
    def step(model, state, unreached):
        grads = tp.grad(lambda model: jnp.sum(model["w"] ** 2), state.layout, unreached=unreached)(model)
        return optim.step(tx, grads, state, model)[0]

    for unreached, kept, tolerance in (("none", 1.0, 0), ("zeros", 0.99, 1e-6)):  # zeros: decayed by 0.1 * 0.1
        model = step(start, tx.init(start), unreached)
        assert not np.array_equal(model["w"], start["w"])
        np.testing.assert_allclose(model["v"], kept * start["v"], tolerance)
