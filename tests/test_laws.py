"""What must always hold: the laws of the contract, over the zoo and over models made by hypothesis."""

import operator

import equinox as eqx
import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

import treeparams as tp

from . import zoo
from .long import some
from .zoo import STRUCTURE_ALONE, ZOO, assert_close, assert_same

# Of these models others have all that goes into programs.
OF_OTHERS = [*STRUCTURE_ALONE, "numpy leaves", "ints and bools", "all frozen"]
programs = pytest.mark.parametrize("specimen", some(ZOO, OF_OTHERS), indirect=True)


@pytest.fixture(params=ZOO)
def specimen(request):
    return ZOO[request.param]


@pytest.fixture
def model(specimen):
    return specimen.make()


@pytest.fixture
def layout(specimen, model):
    return specimen.layout(model)


def generated(examples):
    return hypothesis.settings(deadline=None, max_examples=examples, derandomize=True)


def _nested(function, *arguments):
    """What the function returns inside of `scan` of `checkpoint` of `jit` of `vmap` over its first argument."""

    def nested(first, *others):
        rows = jax.tree.map(lambda x: jnp.stack([jnp.stack([x, x])] * 2), first)
        mapped = jax.jit(jax.vmap(function, in_axes=(0, *[None] * len(others))))
        scanned = jax.lax.scan(lambda _, row: (None, jax.checkpoint(mapped)(row, *others)), None, rows)[1]
        return jax.tree.map(lambda x: x[1, 1], scanned)

    return jax.jit(nested)(*arguments)


# -- 1. Taking apart and putting together ------------------------------------------------------------------------------


def test_a_model_comes_back_from_each_form(model, layout):
    assert_same(tp.combine(*tp.partition(model, layout)), model)
    assert_same(tp.combine(*jax.jit(lambda *halves: halves)(*tp.partition(model, layout))), model)
    forms = [tp.ravel(model, layout), tp.stack(model, layout)]
    for at_rest, restructure in forms:
        assert restructure.layout == layout  # how it was raveled is no part of it
        assert_same(restructure(at_rest), model)
        assert_same(restructure.ravel(restructure(at_rest)), at_rest)
    assert (forms[0][0].shape, forms[0][0].dtype) == ((layout.size,), layout.dtype)


def test_the_vector_is_as_long_as_it_says(model, layout):
    @tp.jit
    def there_and_back(model):
        vector, restructure = tp.ravel(model, layout, pad_to=8)
        stacks, of_stacks = tp.stack(model, layout)
        return vector, [restructure(vector), of_stacks(stacks)], restructure.ravel(restructure(vector))

    vector, again, same = there_and_back(model)
    assert (vector.shape, vector.dtype) == ((-(-layout.size // 8) * 8,), layout.dtype)
    assert not np.any(np.asarray(vector)[layout.size :])
    assert_same((again, same), ([model, model], vector), identity=False)


def test_each_stack_has_a_row_for_each_slot_in_tree_order(model, layout):
    stacks, restructure = tp.stack(model, layout)
    rows = {}
    for path, leaf in tp.trainables(model, layout).items():
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype)
        key = f"{dtype}[{','.join(map(str, leaf.shape))}]"
        assert restructure.place(path) == (None, key, len(rows.setdefault(key, [])))
        rows[key].append(np.asarray(leaf, dtype))
    assert_same(dict(stacks), {key: np.stack(its) for key, its in rows.items()})


@pytest.mark.filterwarnings("ignore:.*(same node|equal bit for bit)")  # as small models are by accident
@pytest.mark.filterwarnings("ignore:nothing is trained")
@generated(6)
@hypothesis.given(zoo.models())
def test_forms_and_gradients_of_generated_models(model):
    assert_same(tp.combine(*tp.partition(model)), model)
    forms = [tp.ravel(model), tp.stack(model)]
    for at_rest, restructure in forms:
        assert_same(restructure(at_rest), model)
        assert_same(restructure.ravel(model), at_rest)
    if tp.layout(model).slots:

        def gradients(forms, model):
            in_tree = tp.grad(zoo.loss)(model)
            for at_rest, restructure in forms:
                of_form = jax.grad(lambda at_rest, restructure=restructure: zoo.loss(restructure(at_rest)))
                yield of_form(at_rest), restructure.ravel_gradient(in_tree)

        for got, want in tp.jit(lambda *both: list(gradients(*both)))(forms, model):
            assert_close(got, want, 2e-2)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_a_given_dtype_is_kept_up_to_the_cast(dtype):
    model = ZOO["bf16 with f32"].make()
    vector, restructure = tp.ravel(model, dtype=dtype)
    assert vector.dtype == dtype == restructure.ravel(model).dtype
    for got, want in zip(restructure(vector), model, strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(got, np.asarray(want).astype(dtype).astype(want.dtype))


# -- 2. and 3. A form and its transpose --------------------------------------------------------------------------------


def _pairing(a, b):
    """The real part of the bilinear pairing."""
    wide = lambda x: np.asarray(x).astype(np.complex128)
    return np.real(sum(np.sum(wide(x) * wide(y)) for x, y in zip(a, b, strict=True)))


@pytest.mark.parametrize("form", [tp.ravel, tp.stack])
def test_ravel_gradient_is_the_transpose_of_restructure(model, layout, form):
    at_rest, restructure = form(model, layout)
    wave = lambda x: np.cos(np.arange(x.size)).reshape(x.shape).astype(x.dtype)
    cotangents = jax.tree.map(lambda trained, leaf: wave(leaf) if trained else None, layout.mask, model)
    flat = restructure.ravel_gradient(cotangents)
    direction = jax.tree.map(lambda x: np.sin(np.arange(x.size)).astype(x.dtype).reshape(x.shape), at_rest)
    image = jax.tree.map(lambda trained, leaf: leaf if trained else None, layout.mask, restructure(direction))
    assert jax.tree.map(np.shape, flat) == jax.tree.map(np.shape, at_rest)
    want = _pairing(jax.tree.leaves(cotangents), jax.tree.leaves(image))
    tolerance = 1e-2 if "float16" in str(restructure.layout) else 1e-4
    got = _pairing(jax.tree.leaves(flat), jax.tree.leaves(direction))
    np.testing.assert_allclose(got, want, tolerance, tolerance)


@programs
def test_the_gradient_in_a_form_is_the_gradient_in_that_form(model, layout):
    forms, (params, rest) = [tp.ravel(model, layout), tp.stack(model, layout)], tp.partition(model, layout)

    @jax.jit
    def gradients(forms, params, rest):
        in_form = [jax.grad(lambda at_rest, r=r: zoo.loss(r(at_rest)))(at_rest) for at_rest, r in forms]
        in_params = jax.grad(lambda params: zoo.loss(tp.combine(params, rest)))(params)
        inside = tp.combine(params, rest)
        in_tree = tp.grad(zoo.loss, layout)(inside)
        walked = tp.maptrainable(lambda _, grad: grad, inside, in_tree, trainable=layout)
        of_forms = [restructure.ravel_gradient(in_tree) for _, restructure in forms]
        return (in_form, in_params, tp.partition(walked, layout)[0]), (of_forms, in_tree, in_tree)

    (in_form, in_params, walked), of_tree = gradients(forms, params, rest)
    assert_close((in_form, in_params, walked), of_tree, 1e-5)
    if not all(hasattr(leaf, "dtype") for leaf in jax.tree.leaves(model)):  # of arrays alone law 8 says it
        assert_close(in_params, tp.grad(zoo.loss, layout)(model), 1e-5)  # and the same outside of `jit`


# -- 5. As JAX has it (4, of walks, is in `test_walk.py`) --------------------------------------------------------------


@generated(6)
@hypothesis.given(zoo.models(floating=True))
def test_without_ties_and_frozen_parts_all_is_as_jax_has_it(model):
    layout = tp.layout(model, jax.tree.map(lambda _: True, model))
    hypothesis.assume(len(layout.slots) == len(jax.tree.leaves(model)))
    double = lambda x: np.float32(2) * np.asarray(x)
    assert_same(tp.maptrainable(double, model, trainable=layout), jax.tree.map(double, model), identity=False)
    if layout.slots:
        vector, restructure = tp.ravel(model, layout)
        want, unravel = ravel_pytree(model)
        np.testing.assert_array_equal(vector, want)
        assert_same(restructure(vector), unravel(want), identity=False)
    squares = [np.sum(np.square(np.asarray(leaf, np.float64))) for leaf in jax.tree.leaves(model)]
    np.testing.assert_allclose(tp.global_norm(model), np.sqrt(sum(squares)), 1e-6)


# -- 6. Frozen is frozen -----------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("standard_promotion")  # Optax relies on it
@pytest.mark.parametrize("name", ["functions and static fields", "frozen tie", "all frozen"])
@pytest.mark.parametrize(
    ("form", "tx"), [(tp.partition, optax.adamw(0.1, weight_decay=0.1)), (tp.stack, optax.rmsprop(0.1, momentum=0.9))]
)
def test_no_optimiser_moves_a_frozen_leaf(name, form, tx):
    start = ZOO[name].make()
    layout = ZOO[name].layout(start)
    params, rest = form(start, layout)
    back = tp.combine if form is tp.partition else lambda params, rest: rest(params)

    def step(params, state, rest):
        grads = jax.grad(lambda params: zoo.loss(back(params, rest)))(params)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    state, jitted = tx.init(params), jax.jit(step)
    for _ in range(10):
        params, state = jitted(params, state, rest)
    model = back(params, rest)
    was_trained = jax.tree.leaves(layout.mask)
    assert any(was_trained) != (name == "all frozen")
    for before, after, moved in zip(jax.tree.leaves(start), jax.tree.leaves(model), was_trained, strict=True):
        assert np.array_equal(before, after) is not moved if hasattr(before, "dtype") else after is before
        if form is tp.partition:  # frozen arrays of one shape rest in stacks too
            assert (after is before) is not moved


# -- 7. One trace, no constants ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [tp.partition, tp.ravel, tp.stack])
def test_one_trace_for_equal_layouts(specimen, form):
    first, second = specimen.make(), specimen.make()
    second = tp.maptrainable(lambda x: -np.asarray(x), second, trainable=specimen.layout(second))
    layouts = specimen.layout(first), specimen.layout(second)
    assert layouts[0] == layouts[1]
    assert hash(layouts[0]) == hash(layouts[1])
    traces = []
    f = jax.jit(lambda *halves: traces.append(halves) or 0)
    for model, layout in zip((first, second), layouts, strict=True):
        f.trace(*form(model, layout))
    assert len(traces) == 1


def test_frozen_values_are_arguments_of_the_program():
    model, traces = {"w": zoo.ramp(4), "table": zoo.ramp(1234), "f": jnp.tanh}, []
    loss = lambda model: jnp.sum(model["w"]) * jnp.sum(model["f"](model["table"]))
    step = tp.jit(lambda model: traces.append(1) or tp.grad(loss, "w")(model))
    programs = [step.lower(model)]
    halves, forms = tp.partition(model, "w"), [tp.ravel(model, "w"), tp.stack(model, "w")]
    of_form = lambda at_rest, restructure: loss(restructure(at_rest))
    for f, arguments in ((lambda *halves: loss(tp.combine(*halves)), halves), *((of_form, each) for each in forms)):
        assert not jax.make_jaxpr(f)(*arguments).consts
        programs.append(jax.jit(f).lower(*arguments))
    for program in programs:
        assert not [line for line in program.as_text().splitlines() if "constant" in line and "1234" in line]
    results = [step({**model, "table": scale * model["table"]})["w"] for scale in (1, 2)]
    assert (len(traces), np.array_equal(*results)) == (1, False)


# -- 8. Inside is as outside, with the layout, the rest or the restructure ---------------------------------------------


@programs
def test_inside_of_transformations_all_is_as_outside(specimen):
    whole = specimen.make()
    at_rest, ways = zip(
        *(form(whole, specimen.layout(whole)) for form in (tp.ravel, tp.stack, tp.partition)), strict=True
    )
    model = jax.tree.map(lambda x: x if hasattr(x, "dtype") else None, whole)  # what plain `jit` takes
    layout = specimen.layout(model)

    def walks(model, grads):
        stepped = tp.maptrainable(operator.sub, model, grads, trainable=layout)
        average = tp.ema(model, stepped, decay=0.5, trainable=layout)
        forms = [form(average, layout) for form in (tp.ravel, tp.stack)]
        found = [(at_rest, restructure.ravel_gradient(grads)) for at_rest, restructure in forms]
        return tp.global_norm(grads), tp.trainables(average, layout), found

    def everything(arguments, ways):
        (model, (vector, stacks, params)), (of_vector, of_stacks, rest) = arguments, ways
        value, grads = tp.value_and_grad(zoo.loss, layout)(model)
        models = of_vector(vector), of_stacks(stacks), tp.combine(params, rest)
        return [zoo.inexact_leaves(each) for each in models], (value, grads, walks(model, grads))

    value, grads = tp.value_and_grad(zoo.loss, layout)(model)
    in_numpy = lambda tree: jax.tree.map(lambda x: np.asarray(x) if eqx.is_inexact_array(x) else x, tree)
    want = value, grads, walks(in_numpy(model), in_numpy(grads))
    leaves, got = _nested(everything, (jax.tree.map(jnp.asarray, model), at_rest), ways)
    assert_same(leaves, [zoo.inexact_leaves(model)] * 3, identity=False)
    assert_close(got, want, 1e-2 if "float16" in str(layout) else 1e-5)
