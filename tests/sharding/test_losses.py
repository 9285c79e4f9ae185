"""A step over many devices has the numbers of one device, whatever its loss is, and what comes beside the loss."""

import functools
import re
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import sharding

from ..long import LONG
from ..nets import AUTO, EXPLICIT, SPLIT, mesh_of
from ..zoo import enable_x64

pytestmark = pytest.mark.usefixtures("standard_promotion")
DRAW = np.random.default_rng(0)
X = DRAW.normal(size=(16, 8))
# Masks of which some devices have much and others little: the mean of their means is another number.
MASK = (DRAW.random((16, 4)) < np.linspace(0.1, 0.9, 16)[:, None]).astype(float)


def model_of(dtype=jnp.float64):
    draw = np.random.default_rng(1)
    matrix = lambda *shape: jnp.asarray(draw.normal(size=shape) / 2, dtype)
    return {
        "layers": [{"b": matrix(8), "w": matrix(8, 8)} for _ in range(3)],
        "out": matrix(8, 4),
        "scale": jnp.full(8, 1.5, dtype),
    }


LAYOUT = tp.layout(model_of(jnp.float32), freeze="scale")


def layer(x, layer):
    return x + jnp.tanh(x @ layer["w"] + layer["b"][None])


def errors(model, x, mask):
    """One for each example and output."""
    y = x
    for each in model["layers"]:
        y = layer(y, each)
    return (y * model["scale"][None] @ model["out"] - x[:, :4]) ** 2


def errors_of_form(stacks, restructure, x, mask):
    y, _ = restructure.scan(lambda y, each: (layer(y, each), None), x, stacks, "layers.*")
    scaled = y * restructure.part(stacks, "scale")[None]
    return (scaled @ restructure.part(stacks, "out") - x[:, :4]) ** 2


def mean(errors, x, mask):
    return jnp.mean(errors)


def masked(errors, x, mask):
    return jnp.sum(errors * mask) / jnp.sum(mask)


def pair(errors, x, mask):
    return jnp.sum(errors * mask), jnp.sum(mask)


def contrastive(errors, x, mask):
    likeness = errors @ errors.T
    return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(likeness)))


def over(f, errors):
    """A loss of errors as one of a model, or of parameters in their form."""
    return lambda *args: f(errors(*args), *args[-2:])


class Kind(NamedTuple):
    """A loss of errors, its value on one device, the options that say what it is."""

    f: Any
    of_one: Any
    options: dict
    takes_pieces: bool


KINDS = {
    "mean": Kind(mean, mean, {"loss_is": "mean"}, True),
    "masked": Kind(masked, masked, {}, False),
    "sum and weight": Kind(pair, masked, {}, True),
    "contrastive": Kind(contrastive, contrastive, {}, False),
    "in two parts": Kind(contrastive, contrastive, {"outputs": errors}, True),
    "masked, in two parts": Kind(pair, masked, {"outputs": errors}, True),
}
WAYS = {  # form, split, pieces, kind of mesh
    "vector": ("vector", "gradients", 1, AUTO),
    "tree, pieces": ("tree", "gradients", 2, EXPLICIT),
    "state": ("stacks", "state", 1, EXPLICIT),
    "parameters, pieces": ("stacks", "parameters", 2, AUTO),
    "parameters": ("stacks", "parameters", 1, EXPLICIT),
}
# Each way to the gradient with each split, in pieces where it takes them. Means are those of test_step.py, too.
USUAL = {
    "mean": ("tree, pieces",),
    "masked": ("state", "tree, pieces"),
    "sum and weight": ("state", "parameters, pieces"),
    "contrastive": ("vector", "parameters"),
    "in two parts": ("vector", "tree, pieces"),
    "masked, in two parts": ("parameters",),
}
CASES = [
    pytest.param(name, way, marks=() if way in USUAL[name] else LONG, id=f"{name}, {way}")
    for name in KINDS
    for way in WAYS
]


@functools.cache
def on_one_device(of_one):
    """The losses and parameters of two steps, by Optax alone."""
    params, rest = tp.partition(model_of(), tp.layout(model_of(), freeze="scale"))
    tx, values = optax.adam(1e-2), []
    state = tx.init(params)
    for _ in range(2):
        value, gradient = jax.value_and_grad(lambda params: over(of_one, errors)(tp.combine(params, rest), X, MASK))(
            params
        )
        updates, state = tx.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        values.append(value)
    return values, tp.trainables(tp.combine(params, rest), rest.layout)


def started(f, form="vector", mesh=None, dtype=jnp.float64, **options):
    model = model_of(dtype)
    plan = sharding.plan(tp.layout(model, freeze="scale"), mesh or mesh_of(8), {"scale": "whole", **SPLIT}, form=form)
    init, step = sharding.make_step(f, optax.adam(1e-2), plan, **options)
    return plan, step, *init(model)


def loss_in(name, split):
    """The loss of a kind and its options, of a model or of parameters that are split."""
    kind = KINDS[name]
    options, own = dict(kind.options), errors_of_form if split == "parameters" else errors
    if split == "parameters":
        options["loss_takes"] = "form"
    if "outputs" in options:
        return kind.f, options | {"outputs": own}
    return over(kind.f, own), options


@pytest.mark.parametrize(("name", "way"), CASES)
def test_any_loss_is_that_of_one_device(name, way):
    kind, (form, split, pieces, mesh) = KINDS[name], WAYS[way]
    f, options = loss_in(name, split)
    with enable_x64(True):
        plan, step, params, state = started(f, form, mesh_of(8, mesh), split=split, microbatches=pieces, **options)
        if pieces > 1 and not kind.takes_pieces:
            with pytest.raises(ValueError, match=r"microbatches=2 needs a loss that can be summed.*\(sum, weight\)"):
                step(params, state, X, MASK)
            return
        values, want = on_one_device(kind.of_one)
        for expected in values:
            params, state, value = step(params, state, X, MASK)
            np.testing.assert_allclose(value, expected, 1e-12)
        for path, array in tp.trainables(plan.model(params, state, whole=True), plan.layout).items():
            np.testing.assert_allclose(array, want[path], 1e-9, 1e-10)


# -- What is moved -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "form", "pieces", "moved"),
    [
        ("masked", "stacks", 1, 3),
        ("masked", "vector", 1, 3),
        ("sum and weight", "stacks", 2, 2),
        ("in two parts", "vector", 2, 2),
    ],
)
def test_what_a_loss_moves(name, form, pieces, moved):
    """In bytes of the parameters, apart from what the loss itself moves, which is of the size of its outputs."""
    f, options = loss_in(name, "gradients")
    _, step, params, state = started(f, form, dtype=jnp.float32, microbatches=pieces, **options)
    found = sharding.collectives(step.lower(params, state, X.astype("f"), MASK.astype("f")).compile())
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    assert moved * size * 0.97 <= found.bytes <= moved * size + 4 * 16 * 20
    if moved == 2:
        count = len(jax.tree.leaves(params))
        assert found.count("reduce-scatter") == count


# -- Keys --------------------------------------------------------------------------------------------------------------


def noisy(model, x, key):
    return jnp.mean((errors(model, x, None) + jax.random.normal(key, (len(x), 4))) ** 2)


def test_a_key_is_for_the_whole_batch_or_refused():
    key = jax.random.key(3)
    _, step, params, state = started(noisy, dtype=jnp.float32)
    value = step(params, state, X.astype("f"), key)[2]
    np.testing.assert_allclose(value, noisy(model_of(jnp.float32), X.astype("f"), key), 1e-6)
    for options in ({"loss_is": "mean"}, {"outputs": lambda model, x, key: errors(model, x, None)}):
        f = noisy if "loss_is" in options else lambda errors, x, key: jnp.mean(errors)
        _, step, params, state = started(f, dtype=jnp.float32, **options)
        with pytest.raises(ValueError, match=r"batch\[1\] is one key.*jax\.random\.split\(key, n\)"):
            step(params, state, X.astype("f"), key)


# -- Weights -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("weight", [lambda errors: jnp.sum(errors), lambda errors: jnp.sum(errors < 0.1)])
def test_a_weight_depends_on_no_parameter(weight):
    """Not even without a derivative: an accuracy beside a loss is no weight."""
    of = lambda *args: (jnp.sum(errors(*args)), weight(errors(*args)))
    _, step, params, state = started(of, dtype=jnp.float32)
    with pytest.raises(ValueError, match=r"the second depends on the parameters.*has_aux=True"):
        step(params, state, X.astype("f"), MASK.astype("f"))


@pytest.mark.parametrize(
    ("weight", "expected"),
    [
        (lambda x, rate: len(x), 16.0),
        (lambda x, rate: rate * jnp.sum(jnp.ones(len(x))), 32.0),
        (lambda x, rate: 1.0, None),
        (lambda x, rate: jnp.full((), 16.0), None),
        (lambda x, rate: rate, None),
    ],
)
@pytest.mark.parametrize("where", ["loss", "aux"])
def test_a_weight_is_of_the_examples(weight, expected, where):
    """One that is the same for any part of the batch would be summed to the number of parts."""
    total = lambda model, x: jnp.sum(errors(model, x, None))

    def of(model, x, rate):
        found = total(model, x), weight(x, rate)
        return found if where == "loss" else (total(model, x) / 1e3, {"a": found})

    options = {} if where == "loss" else {"has_aux": True, "loss_is": "mean"}
    _, step, params, state = started(of, mesh=mesh_of(4), dtype=jnp.float32, microbatches=2, **options)
    run = lambda: step(params, state, X.astype("f"), np.float32(2.0))
    if expected is None:
        name = "the weight of the loss" if where == "loss" else r"the weight in aux\['a'\]"
        with pytest.raises(ValueError, match=name + " does not depend on the examples: it is the same for all 16"):
            run()
        return
    value = run()[2]
    value = value if where == "loss" else value[1]["a"]
    np.testing.assert_allclose(value, total(model_of(jnp.float32), X.astype("f")) / expected, 1e-5)


# -- Dtypes ------------------------------------------------------------------------------------------------------------


def partitioned(lowered, folder):
    """Bytes of each collective in a program as XLA divides it; later CPU widens what is narrow."""
    lowered.compile(compiler_options={"xla_dump_to": str(folder), "xla_dump_hlo_pass_re": "spmd-partitioning"})
    (path,) = folder.glob("*after_spmd-partitioning*")
    found = re.findall(r"= (\w+)\[([\d,]+)\]\S* (all-gather|reduce-scatter|all-reduce)\(", path.read_text())
    sizes = {"f32": 4, "bf16": 2}
    whole = {"all-gather": 1, "reduce-scatter": 8, "all-reduce": 2}
    return sum(
        whole[kind] * sizes[dtype] * int(np.prod([int(each) for each in shape.split(",")]))
        for dtype, shape, kind in found
    )


@pytest.mark.parametrize(
    ("form", "options", "moved"),
    [
        ("stacks", {}, 2.0),
        ("vector", {"compute_dtype": jnp.bfloat16}, 1.5),
        ("tree", {"compute_dtype": {"**.b": "float32", "**": "bfloat16"}, "reduce_dtype": jnp.bfloat16}, 1.0),
    ],
)
def test_narrow_dtypes_move_less(tmp_path, form, options, moved):
    f, said = loss_in("sum and weight", "gradients")
    _, step, params, state = started(f, form, dtype=jnp.float32, **said, **options)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    found = partitioned(step.lower(params, state, X.astype("f"), MASK.astype("f")), tmp_path)
    assert found / size == pytest.approx(moved, abs=0.06)


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("mean", "parameters"),
        ("masked", "gradients"),
        ("in two parts", "parameters"),
        *[pytest.param(*each, marks=LONG) for each in (("mean", "gradients"), ("masked", "parameters"))],
        pytest.param("in two parts", "gradients", marks=LONG),
    ],
)
def test_the_loss_computes_in_the_dtype_that_it_is_told(name, split):
    """Frozen parameters too; what is told to stay single does, and parameters rest in their own dtype."""
    dtypes = []

    def watched(f):
        def of(*args):
            if split == "gradients":
                model = args[0]
            else:
                model = args[1](args[0])
            dtypes.append({path: str(leaf.dtype) for path, leaf in tp.trainables(model).items()})
            return f(*args)

        return of

    f, options = loss_in(name, split)
    if "outputs" in options:
        options["outputs"] = watched(options["outputs"])
    else:
        f = watched(f)
    rules = {"layers.*.b": jnp.float32, "**": jnp.bfloat16}
    _, step, params, state = started(f, "stacks", dtype=jnp.float32, split=split, compute_dtype=rules, **options)
    params, state, value = step(params, state, X.astype("f"), MASK.astype("f"))
    of_one = over(KINDS[name].of_one, errors)
    np.testing.assert_allclose(value, of_one(model_of(jnp.float32), X.astype("f"), MASK.astype("f")), 3e-2)
    assert {path: dtype == "float32" for path, dtype in dtypes[-1].items()} == {
        path: path.endswith(".b") for path in dtypes[-1]
    }
    assert "scale" in dtypes[-1]
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(params)} == {"float32"}


@pytest.mark.parametrize(
    ("form", "options", "kind", "message"),
    [
        ("tree", {"compute_dtype": "int8"}, TypeError, r"compute_dtype of '\*\*': expected a floating dtype.*got int8"),
        ("tree", {"reduce_dtype": int}, TypeError, r"reduce_dtype: expected a floating dtype"),
        ("tree", {"compute_dtype": {"none": "bfloat16"}}, ValueError, "'none' selects nothing"),
        (
            "vector",
            {"compute_dtype": {"**.b": "float32", "**": "bfloat16"}},
            ValueError,
            "a vector is moved in one dtype, but compute_dtype gives its parameters 'bfloat16', 'float32'",
        ),
        ("tree", {"loss_is": "sum"}, ValueError, r"loss_is must be \"mean\", or None.*return \(sum, weight\)"),
        ("tree", {"outputs": errors, "loss_is": "mean"}, ValueError, "outputs= cannot be combined"),
        ("tree", {"outputs": errors, "has_state": True}, ValueError, "outputs= cannot be combined"),
        ("tree", {"outputs": 3}, TypeError, "outputs must be a function of the model and a batch, got int"),
        ("tree", {"has_aux": 1}, TypeError, "has_aux must be True or False"),
    ],
)
@pytest.mark.usefixtures("without_type_checks")
def test_options_that_cannot_be(form, options, kind, message):
    with pytest.raises(kind, match=message):
        started(mean, form, dtype=jnp.float32, **options)


# -- Beside the loss ---------------------------------------------------------------------------------------------------


def with_aux(f):
    def of(model, x, mask):
        found = errors(model, x, mask)
        aux = {"masked": pair(found, x, mask), "rows": (found, x > 0), "none": None}
        return f(found, x, mask), aux if f is pair else aux | {"number": jnp.mean(found)}

    return of


@pytest.mark.parametrize(
    ("f", "options", "mesh", "pieces"),
    [
        (mean, {"loss_is": "mean"}, AUTO, 2),
        (masked, {}, EXPLICIT, 1),
        (pair, {}, EXPLICIT, 2),
        pytest.param(mean, {"loss_is": "mean"}, AUTO, 1, marks=LONG),
        pytest.param(mean, {"loss_is": "mean"}, EXPLICIT, 2, marks=LONG),
        pytest.param(masked, {}, AUTO, 1, marks=LONG),
        pytest.param(pair, {}, AUTO, 1, marks=LONG),
    ],
)
def test_results_beside_the_loss_are_those_of_one_device(f, options, mesh, pieces):
    x, mask = X.astype("f"), MASK.astype("f")
    _, step, params, state = started(
        with_aux(f), mesh=mesh_of(4, mesh), dtype=jnp.float32, has_aux=True, microbatches=pieces, **options
    )
    _, _, (value, aux) = step(params, state, x, mask)
    found = errors(model_of(jnp.float32), x, mask)
    np.testing.assert_allclose(value, (masked if f is pair else f)(found, x, mask), 1e-5)
    np.testing.assert_allclose(aux["masked"], masked(found, x, mask), 1e-5)
    np.testing.assert_allclose(aux["rows"][0], found, 1e-4, 1e-5)
    np.testing.assert_array_equal(aux["rows"][1], x > 0)
    assert aux["rows"][0].is_fully_replicated
    if f is not pair:
        np.testing.assert_allclose(aux["number"], jnp.mean(found), 1e-5)


@pytest.mark.parametrize(
    ("f", "aux", "options", "message"),
    [
        (pair, lambda found: {"a": found[0, 0]}, {}, r"aux\['a'\]: expected a pair of numbers.*got float32\[\]"),
        (mean, lambda found: [found.T], {"loss_is": "mean"}, r"aux\[0\]: .*16 examples, got float32\[4,16\]"),
        (pair, lambda found: [found.T @ found], {}, r"aux\[0\]: expected a pair of numbers.*got float32\[4,4\]"),
        (masked, lambda found: (found[0, 0], found[0, 1]), {}, r"the weight in aux depends on the parameters.*a list"),
        (masked, lambda found: {"name": "a"}, {}, r"aux\['name'\]: expected arrays and numbers, got str"),
        (pair, lambda found: [jnp.zeros(16)], {}, r"float32\[16\] has as many rows.*4 examples it also has 16 rows"),
        (mean, lambda found: [jax.random.key(0)], {"loss_is": "mean"}, r"aux\[0\]: expected a pair.*got key<"),
        (
            pair,
            lambda found: found,
            {"outputs": lambda model, x, mask: {"a": model["out"][:4]}},
            r"outputs\['a'\]: expected an array with one row for each of the 16 examples.*got float32\[4,4\]",
        ),
    ],
)
def test_results_of_the_examples_of_one_device_are_refused(f, aux, options, message):
    of = lambda model, x, mask: (f(errors(model, x, mask), x, mask), aux(errors(model, x, mask)))
    _, step, params, state = started(of, mesh=mesh_of(4), dtype=jnp.float32, has_aux=True, **options)
    with pytest.raises(ValueError, match=message):
        step(params, state, X.astype("f"), MASK.astype("f"))


# -- State of a model --------------------------------------------------------------------------------------------------


class Normed(eqx.Module):
    """A net with running statistics."""

    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key):
        self.first, self.last = eqx.nn.Linear(8, 6, key=key), eqx.nn.Linear(6, 4, key=key)
        self.norm = eqx.nn.BatchNorm(6, "batch", mode="batch")

    def __call__(self, x, state):
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


def normed(model, state, x, mask):
    y, state = jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
    return (jnp.sum((y - x[:, :4]) ** 2 * mask), jnp.sum(mask)), state


@pytest.mark.parametrize(("pieces", "mesh"), [pytest.param(1, AUTO, marks=LONG), (2, EXPLICIT)])
def test_the_state_of_a_model_is_that_of_one_device(pieces, mesh):
    """Statistics are of all examples of a piece, over all devices; pieces pass them on in order."""
    model, first = eqx.nn.make_with_state(Normed)(jax.random.key(0))
    plan = sharding.plan(model, mesh_of(4, mesh), {"first.weight": "whole", "**": "whole"})
    init, step = sharding.make_step(normed, optax.sgd(0.1), plan, has_state=True, microbatches=pieces)
    params, state = init(model, first)
    x, mask = X.astype("f"), MASK.astype("f")
    want, wanted = tp.partition(model), first
    for _ in range(2):
        params, state, value = step(params, state, x, mask)
        want, wanted, expected = one_step(want, wanted, x, mask, pieces)
        np.testing.assert_allclose(value, expected, 1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-6), state.model_state, wanted)
    assert not all(map(np.allclose, jax.tree.leaves(wanted), jax.tree.leaves(first)))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-4, 1e-5), params, want[0])


def one_step(parts, model_state, x, mask, pieces):
    """On one device, piece by piece."""
    (params, rest), total = parts, 0.0
    gradient = jax.tree.map(jnp.zeros_like, params)
    for k in range(pieces):
        own = x[k::pieces], mask[k::pieces]

        def of(params, model_state=model_state, own=own):
            (value, _), after = normed(tp.combine(params, rest), model_state, *own)
            return value, after

        (value, model_state), each = jax.value_and_grad(of, has_aux=True)(params)
        total, gradient = total + value, jax.tree.map(jnp.add, gradient, each)
    params = jax.tree.map(lambda leaf, each: leaf - 0.1 * each / mask.sum(), params, gradient)
    return (params, rest), model_state, total / mask.sum()


def test_a_state_is_given_where_the_loss_takes_one():
    plan = sharding.plan(LAYOUT, mesh_of(), {"scale": "whole", **SPLIT})
    for options, args, message in (
        ({"has_state": True}, (), r"returns to init\(model, model_state\)"),
        ({}, ({},), "give make_step has_state=True"),
    ):
        init, _ = sharding.make_step(mean, optax.sgd(0.1), plan, **options)
        with pytest.raises(ValueError, match=message):
            init(model_of(jnp.float32), *args)


def test_a_step_refuses_the_state_of_a_loss_without_one_and_what_it_donated():
    x, mask = X.astype("f"), MASK.astype("f")
    plan, step, params, state = started(over(mean, errors), dtype=jnp.float32)
    of = lambda model, model_state, *batch: (mean(errors(model, *batch), *batch), model_state)
    _, of_state = sharding.make_step(of, optax.adam(1e-2), plan, has_state=True)
    with pytest.raises(ValueError, match="the state belongs to another step"):
        of_state(params, state, x, mask)
    step(params, state, x, mask)
    with pytest.raises(ValueError, match="params were given to an earlier step, which donates"):
        step(params, state, x, mask)


def test_a_state_stays_what_it_was():
    plan = sharding.plan(LAYOUT, mesh_of(), {"scale": "whole", **SPLIT})
    of = lambda model, state, x: (jnp.mean(errors(model, x, None)), {"count": state["count"] + 0.5})
    init, step = sharding.make_step(of, optax.sgd(0.1), plan, has_state=True)
    with pytest.raises(ValueError, match=r"state\['count'\] was int32\[\] and is float32\[\]"):
        step(*init(model_of(jnp.float32), {"count": jnp.zeros((), jnp.int32)}), X.astype("f"))
