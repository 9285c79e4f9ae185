"""Optax over whole models: the laws of `optim.trainable`, over the zoo and around and within Optax's own wrappers."""

import copy
import functools
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest

import treeparams as tp
from treeparams import optim

from . import zoo
from .zoo import ZOO, Specimen, assert_close, assert_same

MOMENTUM = optax.sgd(0.1, momentum=0.9)
CLIPPED = optax.chain(optim.clip_by_global_norm(0.5), MOMENTUM)
LINE_SEARCH = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
trained = {name: each for name, each in ZOO.items() if name not in ("nothing trained", "all frozen")}
specimens = pytest.mark.parametrize("specimen", trained.values(), ids=trained.keys())
forms = pytest.mark.parametrize("form", [optim.trainable, optim.flat])


class Declared(eqx.Module):
    """A tie that the class knows."""

    encoder: jax.Array
    decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)


TIED = {name: each for name, each in trained.items() if each.layout(each.make()).ties}
TIED["declared"] = Specimen(lambda: Declared(zoo.ramp(2, 3), zoo.ramp(2, 3).T))
pytestmark = pytest.mark.usefixtures("standard_promotion")  # Optax's rules promote


@functools.cache
def made(form, rule, trainable=None):
    """`flat` tries each of its transformations at the first `init`."""
    return form(rule, trainable)


def assert_near(got, want):
    assert jax.tree.structure(got) == jax.tree.structure(want)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert_close(a, b, 1e-2 if b.dtype in (jnp.bfloat16, jnp.float16) else 1e-5)


def two():
    return {"a": jnp.ones(2), "b": jnp.ones(2)}


# -- The same as Optax by hand ---------------------------------------------------------------------------------------


@specimens
def test_equals_optax_on_the_canonical_tree_in_either_form_and_eagerly(specimen: Specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    params, rest = tp.partition(model, layout)
    txs = [made(form, CLIPPED, layout if specimen.options else None) for form in (optim.trainable, optim.flat)]

    def by_us(tx, carry, _):
        current = tp.combine(carry[0], rest)
        current, state = optim.step(tx, tp.grad(zoo.loss, layout)(current), carry[1], current)
        return (tp.partition(current, layout)[0], state), None

    def by_hand(carry, _):
        grads = tp.grad(zoo.loss, layout)(tp.combine(carry[0], rest))
        grads = jax.tree.map(lambda x: jnp.conj(x) if jnp.iscomplexobj(x) else x, grads)
        updates, state = CLIPPED.update(grads, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    @jax.jit
    def run(params):
        starts = [(functools.partial(by_us, tx), (params, tx.init(model))) for tx in txs]
        starts.append((by_hand, (params, CLIPPED.init(params))))
        return [jax.lax.scan(step, start, length=2)[0] for step, start in starts]

    (ours, state), (flat, _), (plain, of_plain) = run(params)
    assert_near((ours, jax.tree.leaves(state.runs), flat), (plain, jax.tree.leaves(of_plain), plain))
    eager, state = model, txs[0].init(model)
    for _ in range(2):
        eager, state = optim.step(txs[0], zoo.gradient_of_loss(layout)(eager), state, eager)
    after, kept = tp.partition(eager, layout)
    assert_near(after, ours)
    kept = zip(jax.tree.leaves(rest), jax.tree.leaves(kept), strict=True)
    assert all(new is old for old, new in kept)  # what is frozen: the very same objects


def test_over_an_ensemble_by_vmap():
    models = {"w": zoo.ramp(3, 2), "b": zoo.ramp(3, 1), "n": jnp.arange(3)}
    tx = optim.trainable(MOMENTUM)

    @jax.jit
    def train(model):
        state = tx.init(model)
        for _ in range(2):
            model, state = optim.step(tx, tp.grad(zoo.loss)(model), state, model)
        return model, state

    together = jax.vmap(train)(models)
    for i in range(3):
        member = functools.partial(jax.tree.map, lambda x, i=i: x[i])
        assert_close(member(together), train(member(models)))


WRAPPERS = {
    "inject_hyperparams": lambda make: optax.inject_hyperparams(make)(optax.linear_schedule(0.1, 0.01, 5)),
    "MultiSteps": lambda make: optax.MultiSteps(make(0.1), 2).gradient_transformation(),
    "apply_if_finite": lambda make: optax.apply_if_finite(make(0.1), 3),
    "masked": lambda make: optax.masked(make(0.1), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
    "partition": lambda make: optax.multi_transform(
        {"a": optax.sgd(0.2), "b": make(0.1)}, lambda params: jax.tree.map(lambda x: "ab"[x.ndim > 1], params)
    ),
    "line search": lambda make: optax.chain(make(1.0), optax.scale_by_backtracking_linesearch(10)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_around_wrappers_of_optax_on_the_model_and_within_them_on_the_parameters(name):
    wrap = WRAPPERS[name]
    model = {"w": zoo.ramp(2, 2), "b": zoo.ramp(2), "frozen": zoo.ramp(3), "act": jnp.tanh, "n": 3}
    params, rest = tp.partition(model, ("w", "b"))
    make = lambda rate: optax.sgd(rate, momentum=0.9)
    around = lambda form: wrap(lambda rate: form(make(rate)))

    def run(tx, at, loss):
        tx = optax.with_extra_args_support(tx)
        state = tx.init(at)
        for _ in range(3):
            value, grads = tp.value_and_grad(loss)(at)
            extra = {"value": value, "grad": grads, "value_fn": loss} if name == "line search" else {}
            updates, state = tx.update(grads, state, at, **extra)
            at = eqx.apply_updates(at, updates)
        return at, state

    @jax.jit
    def all_ways(params):
        on_params = lambda params: zoo.loss(tp.combine(params, rest))
        after, state = run(optim.trainable(wrap(make), ("w", "b")), tp.combine(params, rest), zoo.loss)
        others = [run(around(form), params, on_params)[0] for form in (optim.trainable, optim.flat)]
        return [tp.partition(after, ("w", "b"))[0], *others], state.runs[0], run(wrap(make), params, on_params)

    afters, run_state, (want, plain) = all_ways(params)
    for after in afters:
        assert_close(after, want)
    assert_close(run_state, plain)


def test_lbfgs_with_its_line_search_and_further_arguments_of_the_loss():
    loss = lambda model, x: jnp.sum((model["w"] * x - 1) ** 2)
    model, tx, x = {"w": jnp.zeros(2)}, optim.trainable(optax.lbfgs()), jnp.array([1.0, 2.0])

    @jax.jit
    def train(model, state):
        def step(_, carry):
            value, grads = optax.value_and_grad_from_state(loss)(carry[0], x, state=carry[1])
            return optim.step(tx, grads, carry[1], carry[0], value=value, grad=grads, value_fn=loss, x=x)

        return jax.lax.fori_loop(0, 10, step, (model, state))

    np.testing.assert_allclose(train(model, tx.init(model))[0]["w"], [1.0, 0.5], rtol=1e-3)


@forms
def test_a_run_is_plain_optax(form):
    model, rule = two(), optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1))
    tx = form(rule)
    state = tx.init(model)
    sevens = optax.tree_utils.tree_map_params(rule, lambda x: jnp.full_like(x, 7), state.runs[0])
    assert all(bool((leaf == 7).all()) for leaf in jax.tree.leaves((sevens[1][0].mu, sevens[1][0].nu)))
    assert int(optax.tree_utils.tree_get(state, "clipped")) == 0
    with pytest.raises(TypeError, match=r"the transformation within optim.trainable and state.runs\[0\]"):
        optax.tree_utils.tree_map_params(tx, lambda x: x, state)


# -- Ties ------------------------------------------------------------------------------------------------------------

three, five, seven = (np.full(2, x, np.float32) for x in (3.0, 5.0, 7.0))


@forms
@pytest.mark.parametrize(
    ("grads", "tie"),
    [([three, 10 + seven], [-1.0, 0.0]), ([three, None], [0.7, 1.7]), ([None, five + 2], [0.3, 1.3])],
)
def test_a_tie_stays_one_array_and_gets_the_sum(form, grads, tie):
    t = jnp.array([1.0, 2.0])
    model, tx = {"t": [t, (t,)], "copy": [t + 0, t + 0]}, made(form, MOMENTUM)
    grads = {"t": [grads[0], (grads[1],)], "copy": [None, five]}
    state = tx.init(model)
    after, _ = optim.step(tx, grads, state, model)
    assert after["t"][0] is after["t"][1][0]
    np.testing.assert_allclose(after["t"][0], tie, atol=1e-6)
    np.testing.assert_allclose(after["copy"][1], [0.5, 1.5], rtol=1e-6)
    by_jit, _ = jax.jit(functools.partial(optim.step, tx))(grads, state, model)  # knows the tie from the state
    assert_same(by_jit, after, identity=False)


@pytest.mark.parametrize("specimen", TIED.values(), ids=TIED.keys())
def test_the_places_of_a_tie_hold_equal_values_after_any_step(specimen: Specimen):
    model = specimen.make()
    layout = specimen.layout(model)
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(0.5), optax.adamw(0.1)), layout)
    arrays, static = eqx.partition(model, eqx.is_array)

    def step(apply, carry, _):
        model, state = eqx.combine(carry[0], static), carry[1]
        grads = tp.grad(zoo.loss, state.layout)(model)
        if apply is None:
            model, state = optim.step(tx, grads, state, model)
        else:
            updates, state = tx.update(grads, state, model)
            model = apply(model, updates)
        return (eqx.filter(model, eqx.is_array), state), None

    @jax.jit
    def run(arrays, state):
        ways = (None, optim.apply_updates, eqx.apply_updates)
        return [jax.lax.scan(functools.partial(step, way), (arrays, state), length=3)[0][0] for way in ways]

    (eager, _), _ = step(None, (arrays, tx.init(model)), None)
    for each in (eager, *run(arrays, tx.init(model))):
        after = eqx.combine(each, static)
        assert_same(jax.tree.leaves(tp.tie(after, layout)), jax.tree.leaves(after), identity=False)
        first = layout.paths[0]
        assert not np.array_equal(tp.trainables(after, layout)[first], tp.trainables(model, layout)[first])


def test_init_refuses_an_alias_of_another_value():
    codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.zeros((3, 2))}
    layout = tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)})
    for form in (optim.trainable, optim.flat):
        tx = form(optax.sgd(0.1), layout)
        match = r"'decoder' is tied to 'encoder', but has another .*tp.tie\(model, layout\)"
        with pytest.raises(ValueError, match=match):
            tx.init(codec)
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(lambda tx=tx: tx.init(codec))  # of a concrete model within a trace, too
        tx.init(tp.tie(codec, layout))
        jax.eval_shape(tx.init, codec)  # of a trace there is nothing to see
    known = tp.layout(two(), ties={"b": "a"})
    assert optim.trainable(optax.sgd(0.1), known).init(two()).layout.ties == {"a": ("b",)}
    frozen = {"a": jnp.ones(2), "b": jnp.zeros(2), "c": jnp.ones(1)}  # of what is frozen the aliases stay as they are
    optim.trainable(optax.sgd(0.1), tp.layout(frozen, "c", ties={"b": "a"})).init(frozen)


# -- Gradients in any form -------------------------------------------------------------------------------------------


def test_gradients_of_every_maker_are_the_same_step():
    pair = lambda: {"w": zoo.ramp(2), "b": zoo.ramp(1)}
    model = {"first": pair(), "last": [pair()], "steps": jnp.array(3), "flag": True}
    tx = optim.trainable(MOMENTUM, "last")
    state = tx.init(model)
    grads = tp.grad(zoo.loss)(model)
    arrays, static = eqx.partition(model, eqx.is_array)
    want, _ = tx.update(tp.grad(zoo.loss, "last")(model), state, model)
    for form in (
        eqx.filter_grad(zoo.loss)(model),
        jax.grad(lambda arrays: zoo.loss(eqx.combine(arrays, static)), allow_int=True)(arrays),  # float0 for integers
        grads | {"first": optax.MaskedNode()},
        {"last": {0: grads["last"][0]}},  # by path
    ):
        got, _ = tx.update(form, state, model)
        assert_same(got, want)
    assert (got["first"]["w"], got["steps"]) == (None, None)


@pytest.mark.parametrize("missing", [None, optax.MaskedNode(), np.zeros(2, jax.dtypes.float0)])
def test_none_is_not_zero(missing):
    model, tx = two(), made(optim.trainable, MOMENTUM)
    _, state = tx.update(model, tx.init(model), model)
    updates, after = tx.update({"a": np.zeros(2, np.float32), "b": missing}, state, model)
    before, trace = state.runs[0][0].trace, after.runs[0][0].trace
    np.testing.assert_allclose((before["b"], trace["a"]), [[1, 1], [0.9, 0.9]], rtol=1e-6)
    assert_same(trace["b"], before["b"])
    assert updates["b"] is None
    assert optim.apply_updates(model, updates)["b"] is model["b"]
    assert jax.tree.structure(after) == jax.tree.structure(state)
    updates, unmoved = tx.update({"a": None, "b": missing}, after, model)
    assert jax.tree.leaves(updates) == []
    assert_same(unmoved, after)


@pytest.mark.parametrize("rule", [optax.adamw(0.1), optax.adafactor(0.1), CLIPPED])
def test_a_missing_branch_is_as_if_the_leaf_were_not_there(rule):
    both = {"a": jnp.array([[3.0, 4.0], [1.0, 2.0]]), "b": jnp.array([2.0])}
    alone, tx = {"a": both["a"]}, optim.trainable(rule)

    @jax.jit
    def run(state, single):
        for _ in range(2):
            updates, state = tx.update(alone, state, both)
            want, single = tx.update(alone, single, alone)
        return updates["a"], want["a"]  # a norm runs over what has a gradient

    assert_close(*run(tx.init(both), tx.init(alone)), 1e-6)


def test_a_state_that_is_not_kept_leaf_by_leaf_is_refused_for_some_leaves_only():
    listed = optax.GradientTransformation(
        lambda params: [jnp.zeros_like(x) for x in jax.tree.leaves(params)], lambda u, s, p=None: (u, s)
    )
    for rule, match in (
        (listed, r'not kept leaf by leaf.*missing="zeros"'),
        (optax.flatten(MOMENTUM), r'not kept leaf by leaf.*missing="zeros"'),
        (optax.scale_by_lbfgs(memory_size=1), r'L-BFGS remembers.*missing="zeros".*reset=True'),
    ):
        tx, model = optim.trainable(rule), two()
        state = tx.init(model)
        with pytest.raises(ValueError, match=match):
            tx.update({"a": jnp.ones(2)}, state, model)
        whole = tp.project(model, {"a": jnp.ones(2)}, missing="zeros")
        jax.eval_shape(tx.update, whole, state, model)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64"])  # of NumPy; without x64 single precision
@forms
def test_gradients_wider_than_their_leaf_keep_single_precision_up_to_the_rule(form, dtype):
    seen = []
    look = optax.GradientTransformation(
        lambda p: (), lambda u, s, p=None: (seen.append(jax.tree.leaves(u)[0].dtype) or u, s)
    )
    model, tx = {"w": np.ones(2, dtype)}, form(optax.chain(look, optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    after, _ = optim.step(tx, {"w": np.full(2, 1e5, np.float32)}, tx.init(model), model)  # no number of half precision
    np.testing.assert_allclose(after["w"].astype(jnp.float32), 1 - np.sqrt(0.5), rtol=1e-2)
    jax.eval_shape(tx.update, model, tx.init(model), model)
    assert [jnp.float32, after["w"].dtype] == seen[-2:] == [jnp.float32, jax.dtypes.canonicalize_dtype(dtype)]


def test_functions_among_the_extra_arguments_are_called_with_models():
    model = {"w": jnp.zeros(2), "f": jnp.tanh, "n": 3, "v": jnp.ones(1)}
    loss = lambda m: jnp.sum((m["f"](m["w"]) - 0.5) ** 2) + m["n"] * jnp.sum(m["v"] ** 2)
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2, opaque_mode=True)
    value, grads = tp.value_and_grad(loss)(model)
    for tx, extra in (
        (optim.trainable(sam, "w"), {"grad_fn": lambda m, _: eqx.filter_grad(loss)(m)}),
        (optim.trainable(optax.contrib.hutchinson_estimator_diag_hessian(), "w"), {"obj_fn": loss}),
        (optim.flat(LINE_SEARCH, "w"), {"value": value, "grad": grads, "value_fn": loss}),
    ):
        after, _ = tp.jit(lambda state, tx=tx, extra=extra: optim.step(tx, grads, state, model, **extra))(
            tx.init(model)
        )
        np.testing.assert_array_equal(after["v"], model["v"])
        assert bool((after["w"] != model["w"]).all())


# -- Complex ---------------------------------------------------------------------------------------------------------


@forms
def test_complex_parameters_descend(form):
    target = jnp.array([1 + 2j, -1 - 1j], jnp.complex64)
    loss = lambda model: jnp.sum(jnp.abs(model["w"] - target) ** 2)
    model, tx = {"w": jnp.zeros(2, jnp.complex64)}, form(optax.sgd(0.1))
    step = lambda _, carry: optim.step(tx, jax.grad(loss)(carry[0]), carry[1], carry[0])
    model, _ = jax.lax.fori_loop(0, 40, step, (model, tx.init(model)))
    assert loss(model) < 1e-4


def test_a_complex_rate_beside_real_leaves_is_refused():
    model = {"a": jnp.ones(2, jnp.complex64), "b": jnp.ones(2)}
    match = r"the hyperparameters of real ones complex too; .*hyperparam_dtype=jnp.float32"
    with pytest.raises(ValueError, match=match):
        optim.trainable(optax.inject_hyperparams(optax.sgd)(0.1)).init(model)
    tx = optim.trainable(optax.inject_hyperparams(optax.sgd, hyperparam_dtype=jnp.float32)(0.1))
    after, _ = optim.step(tx, model, tx.init(model), model)
    np.testing.assert_allclose(after["b"], 0.9, rtol=1e-6)


# -- One boundary ----------------------------------------------------------------------------------------------------


def test_one_transformation_over_models():
    one, model = optim.trainable(optax.sgd(0.1)), {"w": jnp.ones(2), "v": jnp.ones(1)}
    for form in (optim.trainable, optim.flat):
        with pytest.raises(ValueError, match=r"write one optim\.trainable"):
            form(one)
    for within in (
        optax.chain(optim.clip_by_global_norm(1.0), one),
        optim.groups({"w": one}, default=optax.sgd(1.0)),
        optax.inject_hyperparams(lambda rate: optim.flat(optax.sgd(rate)))(0.1),
    ):
        with pytest.raises(ValueError, match=r"write one optim\.trainable"):
            optim.trainable(within).init(model)


def test_two_in_a_chain_are_refused():
    # Complex gradients would be conjugated twice and ascend, and those of ties added up twice.
    model = {"w": jnp.zeros(2, jnp.complex64)}
    one = optim.trainable(optax.sgd(0.1))
    tx = optax.chain(optim.clip_by_global_norm(1.0), one, optim.trainable(optax.sgd(0.1)))
    for update in (tx.update, jax.jit(tx.update)):
        with pytest.raises(ValueError, match=r"updates of another transformation over models.*write one"):
            update(model, tx.init(model), model)
    apart = optax.chain(one, optax.scale(1.0), one)
    with pytest.raises(ValueError, match="expected one transformation over models in `tx`, got 2"):
        optim.step(apart, model, apart.init(model), model)


def test_updates_may_be_gradients_where_nothing_could_go_wrong():
    # An outer optimiser over the steps of an inner one; nothing is tied, nothing complex.
    model, tx = two(), optim.trainable(optax.sgd(0.5))
    state = tx.init(model)
    again, _ = tx.update(tx.update(model, state, model)[0], state, model)
    np.testing.assert_array_equal(again["a"], 0.25)
    tied = {"a": model["a"], "b": model["a"]}
    hands_on = optim.trainable(optax.identity())
    chain = optax.chain(hands_on, tx)
    with pytest.raises(ValueError, match=r"updates of another transformation over models"):
        chain.update(tied, chain.init(tied), tied)
    for _ in range(2):  # gradients that a rule hands on are no updates of another
        assert hands_on.update(model, hands_on.init(model), model)[0]["a"] is model["a"]


# -- What the state is -----------------------------------------------------------------------------------------------


def test_what_trains_is_what_the_state_says():
    model, state = two(), optim.trainable(optax.sgd(1.0), "a").init(two())
    assert state.layout.paths == ("a",)
    updates, _ = optim.trainable(optax.sgd(1.0), "b").update(model, state, model)
    assert updates["b"] is None
    np.testing.assert_array_equal(updates["a"], -1)


@forms
def test_dtypes_never_drift(form):
    with zoo.enable_x64(True):
        model = {"half": jnp.ones(3, "float16"), "low": jnp.ones(3, "bfloat16"), "single": jnp.ones(2, jnp.float32)}
        tx = form(optax.chain(optax.clip(10.0), optax.adamw(optax.constant_schedule(1e-3))))
        state = tx.init(model)
        grads = jax.tree.map(lambda x: np.ones(x.shape), model)  # wider than any leaf
        shapes = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
        after = jax.eval_shape(lambda model, state: optim.step(tx, grads, state, model), model, state)
        assert shapes(after) == shapes((model, state))


TRANSFORMATIONS = {
    "trainable": lambda: optim.trainable(optax.chain(optim.clip_by_global_norm(0.5), optax.adam(0.1))),
    "flat": lambda: optim.flat(optax.contrib.schedule_free_sgd(0.1)),
    "groups": lambda: optim.trainable(
        optim.groups({"b": optax.inject_hyperparams(optax.sgd)(0.1)}, default=optax.MultiSteps(optax.adam(0.1), 3))
    ),
    "line search": lambda: optim.trainable(optim.groups({"a": LINE_SEARCH}, default=optax.sgd(0.1))),
}


@pytest.mark.parametrize("make", TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())
def test_one_trace_donation_and_checkpoints_by_pickle_and_by_orbax(make, tmp_path):
    traces = []
    loss = lambda model: jnp.sum((model["a"] - 3) ** 2) + jnp.sum(model["b"] ** 2)
    tx, model = make(), two()
    state = tx.init(model)
    leaves = [leaf for leaf in jax.tree.leaves((model, state)) if isinstance(leaf, jax.Array) and leaf.size]
    assert len({leaf.unsafe_buffer_pointer() for leaf in leaves}) == len(leaves)  # no buffer twice

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(model, state):
        traces.append(1)
        value, grads = tp.value_and_grad(loss)(model)
        return optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss)

    for _ in range(10):
        model, state = step(model, state)
    assert loss(model) < loss(two())
    restored = [pickle.loads(pickle.dumps(state))]
    with orbax.checkpoint.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored.append(checkpointer.restore(tmp_path / "state", tx.init(two())))
    for each in restored:
        assert_same(each, state, identity=False)
    steps = [step(tp.copy(model), tp.copy(each))[0] for each in (state, *restored)]
    for each in steps[1:]:
        assert_same(each, steps[0], identity=False)
    assert len(traces) == 1


# -- What it costs ---------------------------------------------------------------------------------------------------


def test_costs_what_optax_costs_by_hand():
    model = eqx.nn.MLP(16, 16, 32, 2, key=jax.random.key(0))
    params, rest = tp.partition(model)
    x, rule = np.ones((8, 16), np.float32), optax.adamw(0.1)
    tx = optim.trainable(rule, rest.layout)
    loss = lambda model: jnp.sum(jax.vmap(model)(x) ** 2)

    def ours(params, state):
        model = tp.combine(params, rest)
        updates, state = tx.update(tp.grad(loss, rest.layout)(model), state, model)
        return tp.partition(optim.apply_updates(model, updates), rest.layout)[0], state

    def by_hand(params, state):
        grads = jax.grad(lambda params: loss(tp.combine(params, rest)))(params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    got, want = zoo.cost(ours, params, tx.init(model)), zoo.cost(by_hand, params, rule.init(params))
    for each in ("flops", "bytes accessed"):
        assert got[each] <= 1.005 * want[each]


def test_the_norm_does_not_bring_the_backward_pass_of_what_is_frozen_back():
    model = eqx.nn.MLP(64, 64, 256, 6, key=jax.random.key(0))
    params, rest = tp.partition(model)  # jax.grad of everything; XLA drops what nobody needs
    x = np.ones((128, 64), np.float32)
    tx = optim.trainable(optax.chain(optim.clip_by_global_norm(1.0), optax.sgd(0.1)), "layers.6")

    def step(params, state):
        grads = jax.grad(lambda params: jnp.mean(jax.vmap(tp.combine(params, rest))(x) ** 2))(params)
        model, state = optim.step(tx, grads, state, tp.combine(params, rest))
        return tp.partition(model)[0], state

    assert 90e6 < zoo.flops(step, params, tx.init(model)) < 100e6  # 97 MFLOP; with the whole backward pass 275


# -- Errors, and the edges -------------------------------------------------------------------------------------------


def test_errors_of_update(without_type_checks):
    model, tx = {"w": jnp.ones(2), "b": jnp.ones(1)}, optim.trainable(optax.sgd(0.1))
    state, plain = tx.init(model), optax.sgd(0.1)
    for arguments, error, match in (
        ((model, state), ValueError, r"expected the model as the third argument.*tx.update\(grads, state, model\)"),
        (({"ww": jnp.ones(2)}, state, model), ValueError, r"entry at 'ww', where the model has no leaf.*'w'"),
        (({"w": jnp.ones(3)}, state, model), ValueError, r"at 'w', got float32\["),
        ((model, state, {"w": jnp.ones(3), "b": jnp.ones(1)}), ValueError, "the model does not fit the layout"),
        ((model, plain.init(model), model), TypeError, "expected the state that init or the last update returned, got"),
        *(((bad, state, model), TypeError, r"expected a tree of gradients as of tp\.grad") for bad in (None, True, 3)),
    ):
        with pytest.raises(error, match=match):
            tx.update(*arguments)
    match = r"expected one transformation over models in `tx`, got 0; .* stands outermost"
    with pytest.raises(ValueError, match=match):
        optim.step(plain, model, plain.init(model), model)
    with pytest.raises(TypeError, match=r"expected an Optax transformation.*call it with its arguments"):
        optim.trainable(optax.adam)
    with pytest.raises(TypeError, match="expected a real update at 'w'"):
        optim.apply_updates(model, {"w": jnp.ones(2, jnp.complex64)})
    with pytest.raises(ValueError, match="entry at 'x', where the model has no leaf"):
        optim.apply_updates(model, {"x": jnp.ones(2)})
    search, by = optim.trainable(optax.lbfgs()), {"w": jnp.zeros(2, jnp.complex64)}
    with pytest.raises(TypeError, match="'w' is complex64; keep its real and imaginary parts as two real parameters"):
        search.update(by, search.init(by), by, value=0.0, grad=by, value_fn=lambda model: 0.0)


def test_rules_of_another_kind_are_refused_by_name():
    for rule, match in (
        (optax.lookahead(optax.sgd(0.1), 2, 0.5), "optax.lookahead takes a pair of models.*by hand"),
        (optax.contrib.differentially_private_aggregate(1.0, 0.1, 0), "a gradient for each example.*by hand"),
    ):
        with pytest.raises(ValueError, match=match):
            optim.trainable(optax.chain(rule)).init(two())


def test_a_rule_that_changes_its_state_is_refused():
    model = two()
    for change, match in ((lambda s: (s,), "structure of its state"), (lambda s: s[:1], "shape of its state at")):
        rule = optax.GradientTransformation(lambda p: jnp.zeros(2), lambda u, s, p=None, c=change: (u, c(s)))
        tx = optim.trainable(rule)
        with pytest.raises(ValueError, match=match):
            tx.update(model, tx.init(model), model)


@forms
@pytest.mark.parametrize("name", ["nothing trained", "all frozen"])
def test_nothing_trained_warns_and_changes_nothing(form, name):
    model = ZOO[name].make()
    tx = form(MOMENTUM, ZOO[name].layout(model))
    with pytest.warns(UserWarning, match="nothing is trained"):
        state = tx.init(model)
    same, after = optim.step(tx, jax.tree.map(lambda _: None, model), state, model)
    assert_same((same, after), (model, state))


@specimens
def test_apply_updates_keeps_what_has_no_update(specimen: Specimen):
    model = specimen.make()
    same = optim.apply_updates(model, tp.project(model, {}, specimen.layout(model)))
    assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(model), strict=True))


def test_injected_hyperparameters_around_and_copies():
    model, plain = two(), optim.trainable(optax.sgd(0.1))
    tx = optax.inject_hyperparams(lambda rate: optim.trainable(optax.sgd(rate)), hyperparam_dtype=jnp.float32)(0.1)
    want = optim.step(plain, model, plain.init(model), model)[0]
    for each in (tx, copy.deepcopy(plain), copy.deepcopy(optim.flat(optax.sgd(0.1)))):
        assert_same(optim.step(each, model, each.init(model), model)[0], want)
    assert tx.init(model).inner_state.layout == tp.layout(model)
