"""Optax over whole models: the laws of `optim.trainable`, over the zoo and around and within Optax's own wrappers; what
its states have in them, and what stays untouched."""

import collections
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

from .. import zoo
from ..zoo import STACKS, VECTOR, ZOO, Specimen, assert_close, assert_same, ramp
from .shared import FORMS, MOMENTUM, Tied, forms, made, two

CLIPPED = optax.chain(optim.clip_by_global_norm(0.5), MOMENTUM)
ADAM = optax.adam(0.1)
BY_LEAF = optim.per_leaf(MOMENTUM)
BY_ROW = optax.chain(optim.clip_by_global_norm(0.5), BY_LEAF)
LINE_SEARCH = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(10))
trained = {name: each for name, each in ZOO.items() if name not in ("nothing trained", "all frozen")}


# Of the other models a vector and stacks have other shapes, and programs for these, but nothing new.
JOINED = ("bare array", "complex", "bf16 with f32", "transposed tie", "empty leaves")


def test_equals_optax_over_every_model_in_each_form():
    # Outside of `jit`: there an operation on a shape is a program for all models, and in it there would be thousands.
    kinds = lambda tree: [(leaf.shape, leaf.dtype) for leaf in zoo.inexact_leaves(tree)]
    half = lambda tree: jax.tree.map(lambda leaf: jax.device_put((0.5 * np.asarray(leaf)).astype(leaf.dtype)), tree)
    for name, specimen in trained.items():
        model = specimen.make()
        params, rest = tp.partition(model, specimen.layout(model))
        grads, want, plain = half(params), params, CLIPPED.init(params)
        conjugate = jax.tree.map(lambda x: jax.device_put(np.conj(x)) if jnp.iscomplexobj(x) else x, grads)
        for _ in range(2):
            updates, plain = CLIPPED.update(conjugate, plain, want)
            want = optax.apply_updates(want, updates)
        joined = ((VECTOR, CLIPPED), (STACKS, BY_ROW)) if name in JOINED else ()
        for form, rule in ((optim.trainable, CLIPPED), *joined):
            tx, after = form(rule, rest.layout), model
            state = tx.init(model)
            traced, _ = eqx.filter_eval_shape(optim.step, tx, grads, state, model)
            for _ in range(2):
                after, state = optim.step(tx, grads, state, after)
            assert kinds(traced) == kinds(after)
            got, kept = tp.partition(after, rest.layout)
            assert all(new is old for new, old in zip(jax.tree.leaves(kept), jax.tree.leaves(rest), strict=True))
            for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
                assert_close(a, b, 1e-2 if b.dtype in (jnp.bfloat16, jnp.float16) else 1e-5)
            if form is optim.trainable:
                assert_close(state.runs[0], plain, 1e-2 if specimen is ZOO["bf16 with f32"] else 1e-5)


WRAPPERS = {  # of a transformation and of its maker from a rate
    "inject_hyperparams": lambda tx, make: optax.inject_hyperparams(make)(optax.linear_schedule(0.1, 0.01, 5)),
    "line search": lambda tx, make: optax.chain(tx, optax.scale_by_zoom_linesearch(5)),
}


@pytest.mark.parametrize("name", WRAPPERS)
def test_around_wrappers_of_optax_on_the_model_and_within_them_on_the_parameters(name):
    wrap = WRAPPERS[name]
    model = {"w": zoo.ramp(2, 2), "b": zoo.ramp(2), "frozen": zoo.ramp(3), "act": jnp.tanh, "n": 3}
    params, rest = tp.partition(model, ("w", "b"))
    make = functools.partial(optax.sgd, momentum=0.9)
    around = lambda form: wrap(made(form, MOMENTUM), lambda rate: form(make(rate)))
    plainly = wrap(MOMENTUM, make)

    def run(tx, at, loss):
        tx = optax.with_extra_args_support(tx)

        def step(_, run):
            value, grads = tp.value_and_grad(loss)(run[0])
            extra = {"value": value, "grad": grads, "value_fn": loss} if name == "line search" else {}
            updates, state = tx.update(grads, run[1], run[0], **extra)
            return eqx.apply_updates(run[0], updates), state

        return tp.lax.fori_loop(0, 3, step, (at, tx.init(at)))

    @jax.jit
    def all_ways(params):
        on_params = lambda params: zoo.loss(tp.combine(params, rest))
        after, state = run(optim.trainable(plainly, ("w", "b")), tp.combine(params, rest), zoo.loss)
        others = [run(around(form), params, on_params)[0] for form in FORMS]
        return [tp.partition(after, ("w", "b"))[0], *others], state.runs[0], run(plainly, params, on_params)

    afters, run_state, (want, plain) = all_ways(params)
    for after in afters:
        assert_close(after, want)
    assert_close(run_state, plain)


three, five, seven = (np.full(2, x, np.float32) for x in (3.0, 5.0, 7.0))


@forms
def test_a_tie_stays_one_array_and_gets_the_sum_and_a_run_is_plain_optax(form):
    t, copy, other = (jnp.array([1.0, 2.0]) for _ in range(3))
    model, tx = {"t": [t, (t,)], "copy": [copy, other]}, made(form, BY_LEAF if form is STACKS else MOMENTUM)
    cases = [(three, 10 + seven), (three, None), (None, five + 2)]
    grads = [{"t": [first, (second,)], "copy": [None, five]} for first, second in cases]
    state = tx.init(model)
    by_jit = jax.jit(lambda grads, *args: [optim.step(tx, each, *args)[0] for each in grads])(grads, state, model)
    for each, tie, traced in zip(grads, ([-1.0, 0.0], [0.7, 1.7], [0.3, 1.3]), by_jit, strict=True):
        after, _ = optim.step(tx, each, state, model)
        assert after["t"][0] is after["t"][1][0]
        np.testing.assert_allclose(after["t"][0], tie, atol=1e-6)
        np.testing.assert_allclose(after["copy"][1], [0.5, 1.5], rtol=1e-6)
        assert_same(traced, after, identity=False)  # knows the tie from the state
    rule = optax.chain(optim.clip_by_global_norm(1.0), optax.adam(0.1))
    state = form(rule).init(model)
    sevens = optax.tree_utils.tree_map_params(rule, lambda x: np.full_like(x, 7), state.runs[0])
    assert all((leaf == 7).all() for leaf in jax.tree.leaves((sevens[1][0].mu, sevens[1][0].nu)))
    assert int(optax.tree_utils.tree_get(state, "clipped")) == 0


@pytest.mark.parametrize("form", [optim.trainable, STACKS])
def test_the_places_of_a_tie_hold_equal_values_after_any_step(form):
    specimen = ZOO["transposed tie"] if form is STACKS else Specimen(lambda: Tied(ramp(2, 3), ramp(2, 3).T))  # declared
    model, within = specimen.make(), optim.per_leaf if form is STACKS else lambda tx: tx
    layout = specimen.layout(model)
    tx = form(optax.chain(optim.clip_by_global_norm(0.5), within(optax.adamw(0.1))), layout)

    def step(run, apply):
        model, state = run
        grads = tp.grad(zoo.loss, state.layout)(model)
        if apply is None:
            return optim.step(tx, grads, state, model)
        updates, state = tx.update(grads, state, model)
        return apply(model, updates), state

    steps = lambda runs: list(map(step, runs, (None, optim.apply_updates, eqx.apply_updates)))
    for call in (steps, eqx.filter_jit(steps)):  # in which arrays do not show the tie
        runs = [(model, tx.init(model))] * 3
        for _ in range(3):
            runs = call(runs)
        for after, _ in runs:
            assert_same(jax.tree.leaves(tp.tie(after, layout)), jax.tree.leaves(after), identity=False)
            assert not np.array_equal(tp.trainables(after, layout)[layout.paths[-1]], ramp(2, 3))


def test_init_refuses_an_alias_of_another_value():
    codec = {"encoder": jnp.ones((2, 3)), "decoder": jnp.zeros((3, 2))}
    layout = tp.layout(codec, ties={"decoder": ("encoder", jnp.transpose)})
    match = r"'decoder' is tied to 'encoder', but does not have the value that the tie gives.*tp.tie\(model, layout\)"
    for form in FORMS:
        tx = form(optax.sgd(0.1), layout)
        with pytest.raises(ValueError, match=match):
            tx.init(codec)
        with pytest.raises(ValueError, match=match):
            jax.eval_shape(lambda tx=tx: tx.init(codec))  # of a concrete model within a trace, too
        tx.init(tp.tie(codec, layout))
        jax.eval_shape(tx.init, codec)  # of a trace there is nothing to see
    known = tp.layout(two(), ties={"b": "a"})
    assert optim.trainable(optax.sgd(0.1), known).init(two()).layout.ties == {"a": ("b",)}
    with pytest.warns(UserWarning, match=r"ties 'b' to 'a'; without that layout they are.*\(tx, known\)"):
        optim.trainable(optax.sgd(0.1)).init(two())
    optim.trainable(optax.sgd(0.1)).init(two())  # once
    frozen = {"a": jnp.ones(2), "b": jnp.zeros(2), "c": jnp.ones(1)}  # of what is frozen the aliases stay as they are
    optim.trainable(optax.sgd(0.1), tp.layout(frozen, "c", ties={"b": "a"})).init(frozen)


def test_gradients_of_every_maker_are_the_same_step():
    model, tx = {"first": two(), "last": [two()], "n": jnp.array(3), "on": True}, optim.trainable(MOMENTUM, "last")
    state, grads, (arrays, static) = tx.init(model), tp.grad(zoo.loss)(model), eqx.partition(model, eqx.is_array)
    loss = lambda arrays: zoo.loss(eqx.combine(arrays, static))
    want, _ = tx.update(tp.grad(zoo.loss, "last")(model), state, model)
    for made_by_others in (
        eqx.filter_grad(zoo.loss)(model),
        jax.grad(loss, allow_int=True)(arrays),  # float0 for integers
        jax.vjp(loss, arrays)[1](jnp.ones(()))[0],
        grads | {"first": optax.MaskedNode()},
        {"last": {0: grads["last"][0]}},  # by path
    ):
        assert_same(tx.update(made_by_others, state, model)[0], want, identity=False)
    assert (want["first"]["a"], want["n"]) == (None, None)


def of_b(state, is_b):
    found = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree.leaves_with_path(state)]
    return [leaf for path, leaf in found if path.endswith("['b']") == is_b]


@pytest.mark.parametrize("rule", [MOMENTUM, optim.groups({"a": ADAM, "**": ADAM})], ids=["one", "groups"])
@pytest.mark.parametrize("missing", [None, optax.MaskedNode(), np.zeros(2, jax.dtypes.float0)])
def test_none_is_not_zero(missing, rule):
    model, tx = two() | {"c": ramp(2)}, made(optim.trainable, rule)
    zero = dict.fromkeys(model, np.zeros(2, np.float32))
    _, state = tx.update(tp.copy(model), tx.init(model), model)
    (want, both), (updates, after) = (tx.update(grads, state, model) for grads in (zero, zero | {"b": missing}))
    assert not np.array_equal(of_b(state, True), of_b(both, True))
    assert_same((of_b(after, True), of_b(after, False)), (of_b(state, True), of_b(both, False)))
    assert_close(updates, want | {"b": None}, 1e-6)
    assert jax.tree.structure(after) == jax.tree.structure(state)
    only, _ = tx.update({"c": zero["c"]}, state, model)  # all of a group without a gradient
    assert_close(only, want | {"a": None, "b": None}, 1e-6)
    assert optim.apply_updates(model, updates)["b"] is model["b"]
    updates, unmoved = tx.update({"b": missing}, after, model)
    assert jax.tree.leaves(updates) == []
    assert_same(unmoved, after)


@forms
def test_gradients_wider_than_their_leaf_keep_single_precision_up_to_the_rule(form):
    seen = []
    look = optax.stateless(lambda grads, params: seen.append(jax.tree.leaves(grads)[0].dtype) or grads)
    tx = form(optax.chain(look, optim.clip_by_global_norm(1.0), optax.sgd(1.0)))
    grads = {"w": np.full(2, 1e5, np.float32)}  # no number of half precision

    def stepped(dtype):
        model = {"w": np.ones(2, dtype)}
        after, _ = optim.step(tx, grads, tx.init(model), model)
        assert seen[-1] == jnp.float32
        tx.update(tp.copy(model), tx.init(model), model)
        assert seen[-1] == after["w"].dtype == jax.dtypes.canonicalize_dtype(dtype)
        return after["w"].astype(jnp.float32)

    dtypes = ("float16", "bfloat16", "float64")  # of NumPy; without x64 single precision
    np.testing.assert_allclose(jax.jit(lambda: list(map(stepped, dtypes)))(), np.full((3, 2), 1 - np.sqrt(0.5)), 1e-2)


def test_functions_among_the_extra_arguments_are_called_with_models():
    model = {"w": jax.device_put(np.zeros(2, np.float32)), "f": jnp.tanh, "n": 3, "v": zoo.ramp(1)}
    loss = lambda m: jnp.sum((m["f"](m["w"]) - 0.5) ** 2) + m["n"] * jnp.sum(m["v"] ** 2)
    sam = optax.contrib.sam(optax.sgd(0.1), optax.sgd(0.01), sync_period=2, opaque_mode=True)
    grads = tp.jit(tp.grad(loss))(model)
    ways = (
        (optim.trainable(sam, "w"), {"grad_fn": lambda m, _: eqx.filter_grad(loss)(m)}),
        (optim.trainable(optax.contrib.hutchinson_estimator_diag_hessian(), "w"), {"obj_fn": loss}),
    )
    run = lambda: [optim.step(tx, grads, tx.init(model), model, **extra)[0] for tx, extra in ways]
    for after in tp.jit(run)():
        np.testing.assert_array_equal(after["v"], model["v"])
        assert (np.asarray(after["w"]) != 0).all()


@forms
def test_dtypes_never_drift(form):
    with zoo.enable_x64(True):
        model = {dtype: jax.device_put(np.ones(3).astype(dtype)) for dtype in ("float16", "bfloat16", "float32")}
        tx = form(optax.chain(optax.clip(10.0), optax.adamw(optax.constant_schedule(1e-3))))
        state = tx.init(model)
        grads = {dtype: np.ones(3) for dtype in model}  # wider than any leaf
        kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)
        after = jax.eval_shape(lambda model, state: optim.step(tx, grads, state, model), model, state)
        assert kinds(after) == kinds((model, state))


keeps = optax.GradientTransformation(lambda params: params, lambda updates, state, _: (updates, state))
TRANSFORMATIONS = {
    "flat": (optax.contrib.schedule_free_sgd(0.1), "vector"),
    "which keeps parameters": (optax.chain(optax.sgd(0.1), keeps), "tree"),
    "stacked groups": (optim.groups({"b": LINE_SEARCH}, default=optim.per_leaf(optax.lamb(0.1))), "stacks"),
}


@pytest.mark.parametrize(("rule", "form"), TRANSFORMATIONS.values(), ids=TRANSFORMATIONS.keys())
def test_one_trace_donation_and_checkpoints_by_pickle_and_by_orbax(rule, form, tmp_path):
    traces = []
    loss = lambda model: jnp.sum((model["a"] - 3) ** 2) + jnp.sum(model["b"] ** 2)
    tx, model = optim.trainable(rule, form=form), two()
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
    steps = [step(tp.copy(model), tp.copy(each))[0] for each in (state, *restored)]
    for each, after in zip(restored, steps[1:], strict=True):
        assert_same((each, after), (state, steps[0]), identity=False)
    assert len(traces) == 1


@forms
@pytest.mark.parametrize("name", ["nothing trained", "all frozen"])
def test_nothing_trained_warns_and_changes_nothing(form, name):
    model = ZOO[name].make()
    tx = form(MOMENTUM, ZOO[name].layout(model))
    with pytest.warns(UserWarning, match="nothing is trained"):
        state = tx.init(model)
    same, after = optim.step(tx, jax.tree.map(lambda _: None, model), state, model)
    assert_same((same, after), (model, state))


SEARCH = optax.chain(optax.sgd(1.0), optax.scale_by_backtracking_linesearch(9, store_grad=True))


def problem():
    """A model of which a part is frozen and two places are tied, and the parameters that plain Optax would have."""
    shared = ramp(2)
    return {"a": shared, "b": [shared, ramp(3)], "mean": ramp(2), "n": np.array(3)}, {"a": shared, "c": ramp(3)}


def test_a_step_evaluates_the_loss_as_often_as_in_the_loop_of_optax():
    counted, sizes, (model, params) = collections.Counter(), jnp.array([1.0, 9.0]), problem()
    layout = tp.layout(model).freeze("mean")

    def run(name, tx, start, fetch, apply, parts_of):
        def loss(tree, sizes):
            jax.debug.callback(lambda: counted.update([name]))
            first, again, other = parts_of(tree)
            return jnp.sum(sizes * first**2 + again**4) + jnp.sum(other**2)

        def one(carry, _):
            tree, state = carry
            value, grad = fetch(loss)(tree, sizes, state=state)
            updates, state = tx.update(grad, state, tree, value=value, grad=grad, value_fn=loss, sizes=sizes)
            return (apply(tree, updates), state), value

        return jax.lax.scan(one, (start, tx.init(start)), length=6)[1]

    by_optax = optax.value_and_grad_from_state, optax.apply_updates, lambda p: (p["a"], p["a"], p["c"])
    ours = optim.value_and_grad_from_state, optim.apply_updates, lambda model: (model["a"], *model["b"])
    of = lambda form: run(form, optim.trainable(SEARCH, layout, form=form), model, *ours)
    wanted, *found = jax.jit(lambda: [run("optax", SEARCH, params, *by_optax), of("tree"), of("vector")])()
    jax.effects_barrier()
    np.testing.assert_allclose(found, [wanted] * 2, rtol=1e-5)
    assert (len(counted), len(set(counted.values()))) == (3, 1), counted


def test_without_a_trace_the_state_says_whether_to_compute():
    model, calls = {"w": ramp(2), "frozen": ramp(2), "rate": 0.5}, list[int]()
    loss = lambda model: calls.append(1) or jnp.sum(model["w"] ** 2)
    tx = optim.trainable(SEARCH, "w")
    state, fetch = tx.init(model), optim.value_and_grad_from_state(loss)
    value, grads = fetch(model, state=state)
    assert len(calls) == 1
    after, state = optim.step(tx, grads, state, model, value=value, grad=grads, value_fn=loss)
    calls.clear()
    found = fetch(after, state=state)
    assert not calls
    assert_close(found, tp.value_and_grad(loss, "w")(after))
    thawed = optim.set_trainable(tx, state, after, ["w", "frozen"], reset=True)  # which has not searched yet
    calls.clear()
    assert_close(fetch(after, state=thawed), tp.value_and_grad(loss, thawed.layout)(after))
    assert len(calls) == 2


FREE, EVALUATE = optax.contrib.schedule_free_sgd(0.1), optax.contrib.schedule_free_eval_params
ways = [("tree", lambda tx: tx), ("vector", lambda tx: tx), ("stacks", lambda tx: tx), ("stacks", optim.per_leaf)]


def later(state):
    """A state as if steps had been taken."""
    return jax.tree.map(lambda leaf: leaf + np.float32(0.25) if leaf.dtype == jnp.float32 else leaf, state)


@pytest.mark.parametrize(("form", "within"), ways)
def test_parameters_to_evaluate_at_are_those_of_optax(form, within):
    model, params = problem()
    state = later(optim.trainable(within(FREE), "!mean", form=form).init(model))
    evaluated, wanted = optim.eval_params(EVALUATE, state, model), EVALUATE(later(FREE.init(params)), params)
    assert float(wanted["a"][0]) != float(params["a"][0])
    assert_close([evaluated["a"], evaluated["b"][1]], [wanted["a"], wanted["c"]])
    kept = (evaluated["b"][0] is evaluated["a"], evaluated["mean"] is model["mean"], evaluated["n"] is model["n"])
    assert kept == (True, True, True)


def test_each_history_is_evaluated_by_itself():
    model, of_second = {"x": ramp(2), "y": ramp(3)}, lambda state, params: EVALUATE(state[1], params)
    tx = optim.trainable(optax.chain(optax.identity(), FREE), "x")
    state = optim.set_trainable(tx, later(tx.init(model)), model)
    evaluated = optim.eval_params(of_second, state, model)
    for path in model:
        (run,) = [run for run in state.runs if run[1].z[path] is not None]
        assert_same(evaluated[path], EVALUATE(run[1], model | {other: None for other in model if other != path})[path])
    held = optim.set_trainable(tx, state, model, "x")
    assert optim.eval_params(of_second, held, model)["y"] is model["y"]


def test_hyperparameters_are_where_the_users_of_optax_read_them():
    model = {"a": ramp(2), "b": ramp(2)}
    tx = optim.trainable(optax.inject_hyperparams(optax.sgd)(0.1, momentum=0.5), "a")
    state = optim.adjust(tx.init(model), learning_rate=0.25)
    assert {name: float(value) for name, value in state.hyperparams.items()} == {"learning_rate": 0.25, "momentum": 0.5}
    _, state = tx.update(tp.copy(model), state, model)
    for where in ("b", "**"):  # they are of the run
        assert optim.set_trainable(tx, state, model, where).hyperparams["learning_rate"] == 0.25
    rows = optim.trainable(optim.per_leaf(optax.inject_hyperparams(optax.sgd)(0.1)), "a", form="stacks")
    assert rows.init(model).hyperparams["learning_rate"].shape == (1,)
    with pytest.raises(ValueError, match=r"several histories train, each with hyperparameters in state.runs: a; b"):
        _ = optim.set_trainable(rows, rows.update(tp.copy(model), rows.init(model), model)[1], model).hyperparams


def test_apply_updates_keeps_what_has_no_update():
    for specimen in ZOO.values():
        model = specimen.make()
        same = optim.apply_updates(model, tp.project(model, {}, specimen.layout(model)))
        assert all(a is b for a, b in zip(jax.tree.leaves(same), jax.tree.leaves(model), strict=True))


SPECIAL = [-0.0, 0.0, np.inf, -np.inf, np.nan, 1.5]
PAYLOADS = np.array([0x7FC12345, 0x80000000, 0x7F812345, 0x00000001], "u4")  # numbers by their bits


def specials():
    """Trained, without a gradient, and frozen arrays of each kind; numbers."""
    frozen = [np.array(SPECIAL, "f4"), np.array(SPECIAL, jnp.bfloat16), np.array([-0.0, complex(-0.0, np.nan)], "c8")]
    bits = [PAYLOADS.view("f4"), (PAYLOADS >> 16).astype("u2").view(jnp.bfloat16)]
    model = {"frozen": jax.device_put(frozen), "bits": jax.device_put(bits), "rate": -0.0, "is_on": True}
    model |= {"count": jnp.array(7), "mask": jnp.array([True, False]), "key": jax.random.PRNGKey(3)}
    return model | {"w": ramp(2, 3), "no gradient": ramp(3, dtype=jnp.bfloat16), "numpy": np.array([-0.0, 2.0], "f4")}


def bits_of(tree):
    arrays = [np.asarray(jnp.asarray(leaf)) for leaf in jax.tree.leaves(tree)]
    return [(array.dtype, array.shape, array.tobytes()) for array in arrays]


def test_updates_have_the_structure_and_dtypes_of_the_model_and_change_no_bit_of_it():
    before, tx = specials(), optim.trainable(optax.sgd(0.1), ["w", "no gradient"], missing="zeros")
    state = tx.init(before)
    update = lambda model: tx.update({"w": ramp(2, 3)}, state, model)[0]
    updates = update(before)
    assert jax.tree.structure(updates) == jax.tree.structure(before)  # code over dm-tree asks no more
    assert [each[:2] for each in bits_of(updates)] == [each[:2] for each in bits_of(before)]
    apply = lambda model: optax.apply_updates(model, update(model))
    for after, moved in ((apply(before), {"w": 0, "bits": 0}), (jax.jit(apply)(before), {"w": 0})):  # XLA adds nothing
        np.testing.assert_allclose(after["w"], 0.9 * before["w"], rtol=1e-6)
        assert bits_of(after | moved) == bits_of(before | moved)
    assert optim.step(tx, {"w": ramp(2, 3)}, state, before)[0]["frozen"][0] is before["frozen"][0]


@forms
def test_what_nothing_can_be_added_to_has_no_zero(form):
    model = {"w": ramp(2), "key": jax.random.key(0), "f": jnp.tanh, "text": "relu", "n": 2}
    tx = form(MOMENTUM, "w", missing="zeros")
    updates, _ = tx.update({"w": ramp(2)}, tx.init(model), model)
    assert {path: updates[path] for path in model.keys() - {"w"}} == {"key": None, "f": None, "text": None, "n": 0}
