"""What a step takes of each device, before there is one: of any jitted step, and of the transformer of an example."""

import functools
import importlib.util
import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import sharding
from treeparams.sharding._compiled.collectives import Collective
from treeparams.sharding._step import program_of

from ..nets import BATCH, loss, mesh_of, model_of
from ..zoo import first_devices

MESH = Mesh(np.array(first_devices(4)), "d")


def shape(*sizes, spec=("d",)):
    return jax.ShapeDtypeStruct(sizes, jnp.float32, sharding=NamedSharding(MESH, P(*spec)))


@jax.jit
def step(params, state, x, y):
    value = jnp.sum(x @ jnp.tanh(params["w"]))
    return {"w": params["w"] + value, "b": params["b"]}, state["m"] * value, value


ARGUMENTS = (
    {"w": shape(64, 32), "b": shape(8, spec=()), "none": None},
    {"m": shape(64, 32), "count": jax.ShapeDtypeStruct((), jnp.int32), "unread": shape(16)},
    shape(8, 64),
    jax.ShapeDtypeStruct((5,), jnp.int32),
)


def test_bytes_of_each_device():
    found = sharding.ahead(step, *ARGUMENTS)
    assert found.devices == 4
    assert found.parameters == 64 * 32 // 4 * 4 + 8 * 4
    assert found.state == 64 * 32 // 4 * 4 + 4 + 16 // 4 * 4
    assert found.batch == 8 // 4 * 64 * 4 + 5 * 4
    compiled = step.lower(*ARGUMENTS).compile()
    memory = compiled.memory_analysis()
    unread = 16 + 4 + 5 * 4  # are no arguments of the program, but lie on the device
    assert found.parameters + found.state + found.batch == memory.argument_size_in_bytes + unread
    assert found.temporaries == memory.temp_size_in_bytes > 0
    assert found.results == memory.output_size_in_bytes > 64 * 32 * 4 // 4  # the step donates nothing
    assert found.frozen == found.gradients == 0
    assert found.total == found.parameters + found.state + found.batch + found.temporaries + found.results
    assert found.moved == sharding.collectives(compiled, mesh=MESH)
    assert found.moved.count() > 0


def test_it_prints_as_a_table():
    moved = sharding.Collectives(())
    largest = (sharding.Lying("params.w", 1000, "P('d')"),)
    found = sharding.Ahead(64, 1000, 500, 2000, 24, 8, 500_000, 4000, 6000, 3_000_000, largest, moved)
    assert repr(found).splitlines() == [
        "each of 64      bytes",
        "parameters     1.0 kB",
        "frozen          500 B  arrays of the model that do not train",
        "state          2.0 kB  of the optimiser, and averages",
        "batch            24 B",
        "results           8 B  that take no buffer of an argument",
        "temporaries  500.0 kB",
        "total        503.5 kB",
        "",
        "gathered       4.0 kB  of the temporaries: by all-gathers, of a loop those of one round",
        "gradients      6.0 kB  of the temporaries, at most",
        "activations  490.0 kB  the rest of the temporaries",
        "",
        "the largest arrays   bytes  lies",
        "params.w            1.0 kB  P('d')",
        "",
        "nothing is moved between devices",
        "",
        "3.0 MFLOP of matrix products and convolutions",
    ]
    assert "503.5 kB" in found._repr_html_()


@functools.cache
def started_of_shapes(mesh):
    """A plan of shapes alone, a step, and its arguments; the scale is frozen."""
    shaped = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else leaf
    model = jax.tree.map(shaped, model_of())
    layout = tp.layout(model, freeze="scale")
    plan = sharding.plan(layout, mesh, {"**": "split"}, form="vector")
    init, step = sharding.make_step(loss, optax.sgd(0.05, 0.9), plan, loss_is="mean")
    return step, *init(model)


@functools.cache
def ahead_of_eight():
    return sharding.ahead(*started_of_shapes(mesh_of(8)), *BATCH)


def test_what_a_step_of_this_library_takes():
    _, params, _ = started_of_shapes(mesh_of(8))
    found = ahead_of_eight()
    size = params.size * 4
    assert (found.parameters, found.frozen, found.state) == (size // 8, 8, size // 8 + 4)
    assert (found.gathered, found.gradients) == (size + 64, size)  # with the frozen array
    assert found.activations == max(0, found.temporaries - 2 * size - 64)
    assert found.results <= 4 + 5 * 8  # the value, and pointers to five arrays; all else takes the buffers of arguments
    assert found.moved.over == {("data",): 2 * size}
    assert found.largest[:2] == (("params", size // 8, "P('data')"), ("state.rule.0.trace", size // 8, "P('data')"))
    # Of each device's two examples: embedding, four layers of two products, the last one. On the way back a product
    # for each argument, but none for the examples.
    forwards = 2 * 2 * (12 * 4 + 4 * 2 * 4 * 4 + 4 * 16)
    assert found.flops == 3 * forwards - 2 * 2 * 12 * 4


@pytest.mark.parametrize(
    ("options", "form", "bytes_each"),
    [
        ({}, "vector", 4),
        ({"compute_dtype": jnp.bfloat16}, "vector", 4),  # summed in single precision
        ({"reduce_dtype": jnp.bfloat16}, "vector", 4),  # computed in it
        ({"compute_dtype": jnp.bfloat16, "reduce_dtype": jnp.bfloat16}, "tree", 2),
        ({"compute_dtype": jnp.bfloat16, "reduce_dtype": jnp.bfloat16, "microbatches": 2}, "stacks", 4),
        ({"split": "parameters", "loss_takes": "form", "compute_dtype": jnp.bfloat16}, "stacks", 4 / 4),
        ({"split": "parameters", "loss_takes": "form", "reduce_dtype": jnp.bfloat16}, "stacks", 2 / 4),
    ],
)
def test_a_gradient_has_the_dtype_in_which_it_is_computed_or_summed(options, form, bytes_each):
    model = {"layers": [{"w": jnp.ones((8, 8))} for _ in range(2)]}
    plan = sharding.plan(model, mesh_of(4), {"**": "split"}, form=form)
    _, step = sharding.make_step(loss, optax.sgd(0.1), plan, loss_is="mean", **options)
    assert program_of(step).gradient_bytes == 128 * bytes_each


def test_products_in_loops_count_with_their_rounds():
    f = lambda w, state, x: (jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0], state)
    x, w = jnp.ones((4, 8)), jnp.ones((6, 8, 8))
    assert sharding.ahead(jax.jit(f), w, (), x).flops == 6 * 2 * 4 * 8 * 8
    until = lambda w, state, x: jax.lax.while_loop(lambda x: x.sum() < 7, lambda x: x @ w[0], x)
    found = sharding.ahead(jax.jit(until), w, (), x)
    assert found.flops is None
    assert repr(found).endswith("so its products are not counted")
    with pytest.raises(ValueError, match="so its time cannot be estimated"):
        found.seconds(bandwidth=1, flops=1)


def test_convolutions_count_where_input_and_weight_meet():
    f = lambda w, state, x: jax.lax.conv_general_dilated(x, w, (1,), "SAME")
    x, w = jnp.ones((5, 3, 10)), jnp.ones((7, 3, 3))
    assert sharding.ahead(jax.jit(f), w, (), x).flops == 2 * 5 * 7 * 3 * (3 * 10 - 2)


def test_seconds():
    moved = sharding.Collectives((
        Collective("all-gather", 800, 1, ("a",)),
        Collective("all-reduce", 100, 2, ("a", "b")),
    ))
    found = sharding.Ahead(4, 0, 0, 0, 0, 0, 0, 0, 0, 5000, (), moved)
    assert found.seconds(bandwidth=100, flops=1000) == (10, 5)
    assert found.seconds(bandwidth={"a": 100, "b": 50}, flops=1000) == (8 + 4, 5)
    assert repr(found.seconds(bandwidth=100, flops=1000)).startswith("moving 10 s, computing 5 s: moving takes longer")
    assert repr(found.seconds(bandwidth=1000, flops=1000)) == "moving 1 s, computing 5 s"
    assert "5.0 kFLOP of matrix products and convolutions, 5 for each byte moved" in repr(found)
    with pytest.raises(ValueError, match=r"along the axis 'b'; bandwidth has only \["):
        found.seconds(bandwidth={"a": 100}, flops=1000)
    with pytest.raises(ValueError, match="more than 0, got 0"):
        found.seconds(bandwidth=1, flops=0)


# -- Devices that are not there ----------------------------------------------------------------------------------------

HAS_TPU_COMPILER = importlib.util.find_spec("libtpu") is not None


class Here:
    """A topology of devices that are there."""

    devices = jax.devices()


@pytest.mark.parametrize("mesh", [AbstractMesh((8,), ("data",)), mesh_of(8)], ids=["abstract", "of devices"])
def test_a_topology_of_other_devices(mesh):
    step, params, state = started_of_shapes(mesh)
    found = sharding.ahead(step, params, state, *BATCH, topology=Here)
    assert found == ahead_of_eight()


def test_an_abstract_mesh_needs_a_topology():
    step, params, state = started_of_shapes(AbstractMesh((4,), ("data",)))
    assert isinstance(params, jax.ShapeDtypeStruct)
    with pytest.raises(ValueError, match='which has no devices; name some: topology="v5e:2x4"'):
        sharding.ahead(step, params, state, *BATCH)
    with pytest.raises(ValueError, match=r"'given' has 8 devices, the mesh \{'data': 4\} has 4; make the plan over"):
        sharding.ahead(step, params, state, *BATCH, topology=Here)
    with pytest.raises(TypeError, match="topology must be a name, such as"):
        sharding.ahead(step, params, state, *BATCH, topology=8)
    with pytest.raises(ValueError, match="there is no mesh to map to the topology"):
        sharding.ahead(jax.jit(lambda params, state: params), np.ones(3), (), topology=Here)


@pytest.mark.skipif(HAS_TPU_COMPILER, reason="the compiler of TPUs is installed")
def test_without_the_compiler_of_tpus():
    with pytest.raises(ValueError, match="topology 'v5e:2x4': the TPU compiler is not installed; pip install"):
        sharding.ahead(*started_of_shapes(AbstractMesh((8,), ("data",))), *BATCH, topology="v5e:2x4")


@pytest.fixture
def tpu_compiler(monkeypatch):
    if not HAS_TPU_COMPILER:
        pytest.skip("needs the compiler of TPUs: pip install libtpu")
    monkeypatch.setenv("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")  # several workers of pytest load it


def test_a_compiler_of_tpus_that_another_process_has(monkeypatch):
    def fails(**_):
        raise RuntimeError('Internal error when accessing libtpu multi-process lockfile. Run "rm /tmp/lockfile"')

    monkeypatch.setattr(jax.experimental.topologies, "get_topology_desc", fails)
    with pytest.raises(ValueError, match=r"another process uses the TPU compiler.*ALLOW_MULTIPLE_LIBTPU_LOAD=1"):
        sharding.ahead(*started_of_shapes(AbstractMesh((8,), ("data",))), *BATCH, topology="v5e:2x4")


@pytest.mark.usefixtures("tpu_compiler")
def test_tpus_that_are_not_there():
    step, params, state = started_of_shapes(AbstractMesh((8,), ("data",)))
    found = sharding.ahead(step, params, state, *BATCH, topology="v5e:2x4")
    assert (found.devices, found.parameters) == (8, params.size * 4 // 8)
    assert found.moved.count() == 2
    assert found.flops > 0
    with pytest.raises(ValueError, match="topology 'v5' does not exist, expected a name such as"):
        sharding.ahead(step, params, state, *BATCH, topology="v5")


@pytest.mark.usefixtures("tpu_compiler")
@pytest.mark.parametrize("width", [256, 252])  # shares of whole lines of 128 numbers, and others
def test_tpus_reduce_and_scatter_a_vector(width):
    model = {"w": jax.ShapeDtypeStruct((4, width, width), jnp.float32)}
    of = lambda model, x: jnp.mean(functools.reduce(lambda x, w: jnp.tanh(x @ w), model["w"], x) ** 2)
    plan = sharding.plan(model, AbstractMesh((8,), ("data",)), {"**": "split"}, form="vector")
    init, step = sharding.make_step(of, optax.sgd(0.05), plan, loss_is="mean")
    x = jax.ShapeDtypeStruct((64, width), jnp.float32)
    found = sharding.ahead(step, *init(model), x, topology="v5e:2x4").moved
    assert (found.count("reduce-scatter"), found.count("all-reduce")) == (1, 0)
    assert found.bytes < 2.1 * 4 * width**2 * 4


def test_of_one_device_and_of_arrays():
    found = sharding.ahead(jax.jit(lambda params, state: params + 1), np.ones((3, 4), np.float32), jnp.ones(2))
    assert (found.devices, found.parameters, found.state, found.batch) == (1, 48, 8, 0)


def test_what_is_no_step():
    with pytest.raises(
        TypeError, match=r"expected a step of sharding\.make_step or a jax\.jit function, got a function"
    ):
        sharding.ahead(lambda params, state: params, {}, ())


# -- The example -------------------------------------------------------------------------------------------------------

EXAMPLE = pathlib.Path(__file__).parents[2] / "examples" / "ahead.py"
program = types.SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
SHAPES = program.transformer(8, 64, 128)
COUNT = 8 * (12 * 64**2 + 2 * 64) + 64 + 2 * 128 * 64


def bytes_of(tree):
    return 4 * sum(leaf.size for leaf in jax.tree.leaves(tree))


def test_how_many_parameters():
    assert bytes_of(SHAPES) == 4 * COUNT
    for wanted in (1e9, 1e11):
        width = program.width_of(wanted, 64, 65536)
        assert width % 512 == 0
        assert bytes_of(program.transformer(64, width, 65536)) / 4 == pytest.approx(wanted, rel=0.07)


def test_the_loss_is_that_of_a_transformer(standard_promotion):
    leaves, treedef = jax.tree.flatten(program.transformer(2, 128, 50))
    draw = np.random.default_rng(0).standard_normal
    model = treedef.unflatten([draw(leaf.shape).astype(np.float32) / 10 for leaf in leaves])
    tokens = np.random.default_rng(1).integers(0, 50, (2, 7))

    def normed(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6) * scale[None]

    def attended(query, key, value):
        scores = np.where(np.tri(len(query)) > 0, query @ key.T / 8, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True) @ value

    def of_one(tokens):
        x = model["embed"][tokens[:-1]]
        for layer in model["layers"]:
            y = normed(x, layer["norm_attention"])
            heads = zip(*(np.split(y @ layer[name], 2, -1) for name in ("query", "key", "value")), strict=True)
            x = x + np.concatenate([attended(*head) for head in heads], -1) @ layer["out"]
            y = normed(x, layer["norm_feed_forward"])
            x = x + np.asarray(jax.nn.gelu(y @ layer["up"])) @ layer["down"]
        logits = normed(x, model["norm"]) @ model["head"]
        return np.log(np.exp(logits).sum(-1)) - logits[np.arange(len(logits)), tokens[1:]]

    stacks, restructure = tp.stack(model)
    got = program.loss(stacks, restructure, jnp.asarray(tokens))
    np.testing.assert_allclose(got, np.mean([of_one(each) for each in tokens]), rtol=1e-5)


@pytest.mark.parametrize(
    ("rule", "split", "states", "moved"),
    [
        ("adamw", "state", 2, 3),  # gathered once; an all-reduce counts twice
        ("sgd", "gradients", 0, 2),
        ("muon", "parameters", 1, 3 + 2 / len(jax.devices())),  # twice, and the gradient; rows to the others and back
    ],
)
def test_a_step_over_the_devices_of_this_process(rule, split, states, moved, standard_promotion):
    found = program.compiled(SHAPES, rule, split, 8)
    whole = 4 * COUNT
    part = whole / len(jax.devices())
    assert found.devices == len(jax.devices())
    assert found.parameters == pytest.approx(part, rel=0.02)
    assert found.state == pytest.approx(states * part, rel=0.2, abs=1000)
    # The embedding and the head are used once, at the end of the way there and the start of that back: gathered once.
    assert found.moved.bytes == pytest.approx(moved * whole, rel=0.05)


def test_what_layers_compute_is_not_kept_where_they_are_checkpointed(standard_promotion):
    """With split parameters, too, where each layer is gathered again on the way back."""
    found = program.compiled(SHAPES, "sgd", "parameters", 256)
    scores = 4 * 256**2  # bytes, of each layer's attention
    assert found.temporaries < 8 * 4 * scores
