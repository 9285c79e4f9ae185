"""What a step moves between devices, compiled for TPUs that are not there, and on CPU."""

import functools
import importlib.util
import os
import random
import re

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType

import treeparams as tp
from benchmarks._moved import moved
from treeparams import optim, sharding

from ..nets import mesh_of

pytestmark = pytest.mark.usefixtures("standard_promotion")
LAYERS, WIDTH, VOCABULARY, TOKENS = 6, 256, 512, 32
TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))


def make(layers=LAYERS):
    attention = lambda: {name: jnp.zeros((WIDTH, WIDTH)) for name in "qkvo"}
    ahead = lambda: {"up": jnp.zeros((WIDTH, 4 * WIDTH)), "down": jnp.zeros((4 * WIDTH, WIDTH))}
    biases = lambda: {"b1": jnp.zeros(4 * WIDTH), "b2": jnp.zeros(WIDTH)}
    layers = [attention() | ahead() | biases() for _ in range(layers)]
    return {"embed": jnp.zeros((VOCABULARY, WIDTH)), "head": jnp.zeros((WIDTH, VOCABULARY)), "layers": layers}


def block(x, p):
    h = (*x.shape[:-1], -1, 64)
    q, k, v = ((x @ p[name]).reshape(h) for name in "qkv")
    x = x + jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ p["o"]
    return x + jax.nn.gelu(x @ p["up"] + p["b1"][None, None]) @ p["down"] + p["b2"][None, None]


def ending(x, head, tokens):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(x @ head, tokens[:, 1:])).astype(jnp.float32)


def of_model(net, tokens):
    x = net["embed"][tokens[:, :-1]]
    for each in net["layers"]:
        x = jax.checkpoint(block)(x, each)
    return ending(x, net["head"], tokens)


def of_form(stacks, restructure, tokens):
    x = restructure.part(stacks, "embed")[tokens[:, :-1]]
    x, _ = restructure.scan(lambda x, layer: (block(x, layer), None), x, stacks, "layers.*")
    return ending(x, restructure.part(stacks, "head"), tokens)


def compiled(mesh, form="tree", rules=None, tx=TX, layers=LAYERS, compiler=None, **options):
    shapes = jax.eval_shape(lambda: make(layers))
    plan = sharding.plan(shapes, mesh, rules or {"**": "split"}, form=form)
    loss = of_form if "loss_takes" in options else of_model
    init, step = sharding.make_step(loss, tx, plan, **options)
    tokens = jax.ShapeDtypeStruct((16, TOKENS), jnp.int32, sharding=plan.batch)
    return step.lower(*init(shapes), tokens).compile(compiler_options=compiler)


@functools.cache
def of_tpus():
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the compiler for TPU is not installed: pip install libtpu")
    from jax.experimental import topologies

    os.environ |= {"ALLOW_MULTIPLE_LIBTPU_LOAD": "1", "TPU_SKIP_MDS_QUERY": "1"}
    devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x4").devices
    return jax.make_mesh((8,), ("data",), devices=list(devices), axis_types=(AxisType.Auto,))


SIZE = sum(leaf.size * 4 for leaf in jax.tree.leaves(jax.eval_shape(make)))
SCAN = {"form": "stacks", "loss_takes": "form"}
MUON = optim.per_leaf(optax.contrib.muon(1e-3))
OWNED = {"embed": "whole", "head": "whole", "**": "owned"}
# In sizes of the parameters: what is moved, and temporary memory. Plain jax.jit with the two constraints: 1.52, 0.207.
# Plain jax.jit of stacked layers with the constraint in the body of a scan: 1.99.
ON_TPU = {
    "tree": ({}, 1.55, 0.21),
    "stacks": ({"form": "stacks"}, 1.55, 0.21),
    "stacks, scanned": (SCAN, 1.995, 0.1),
    # Weights are gathered in bfloat16, and XLA sums gradients where it computes them, in bfloat16 too.
    "tree, bfloat16": ({"compute_dtype": jnp.bfloat16}, 1.01, 0.42),
    "stacks, scanned, bfloat16": (SCAN | {"compute_dtype": jnp.bfloat16}, 1.5, 0.1),
    "tree, pieces": ({"microbatches": 2}, 2.52, 0.21),
    "stacks, matrices to their owners and back": ({"form": "stacks", "rules": OWNED, "tx": MUON}, 3, jnp.inf),
}


@pytest.mark.parametrize("name", ON_TPU)
def test_what_a_step_moves_over_eight_tpus(name):
    options, most, temporary = ON_TPU[name]
    program = compiled(of_tpus(), **options)
    assert moved(program).bytes <= most * SIZE
    assert program.memory_analysis().temp_size_in_bytes <= temporary * SIZE


@pytest.mark.parametrize("form", ["tree", "stacks", "vector"])
def test_on_cpu_gradients_are_reduced_and_then_divided(form):
    """XLA for CPU has no reduce-scatter: it sums each gradient on all devices."""
    layers = int(form == "stacks")  # of which one shape has several rows
    found = moved(compiled(mesh_of(8), form, layers=layers))
    assert found.bytes <= 3.2 * tp.layout(jax.eval_shape(lambda: make(layers))).nbytes
    assert "reduce-scatter" not in found.counts


@pytest.mark.parametrize("options", [{}, {"form": "stacks"}, SCAN], ids=["tree", "stacks", "scanned"])
def test_weights_are_gathered_in_the_dtype_of_the_loss(options, tmp_path):
    """Read where XLA divides the program: for CPU it widens narrow floats later."""
    dump = {"xla_dump_to": str(tmp_path), "xla_dump_hlo_pass_re": "spmd-partitioning"}
    tx = optax.sgd(random.random())  # else the program may be one that was kept, and nothing is dumped
    compiled(mesh_of(8), layers=1, tx=tx, compiler=dump, compute_dtype=jnp.bfloat16, **options)
    (path,) = tmp_path.glob("*after_spmd-partitioning*")
    gathered = re.findall(r"= (b?f\d+)\[\S* all-gather\(", path.read_text())
    assert len(gathered) > 2
    assert set(gathered) == {"bf16"}


def test_what_the_counter_reads():
    """A loop counts with its rounds; an all-reduce moves its operand twice."""
    batch = jax.sharding.NamedSharding(mesh_of(4), jax.sharding.PartitionSpec("data"))
    center = lambda x, _: (x - x.mean(axis=0, keepdims=True), None)
    f = jax.jit(lambda x: jax.lax.scan(center, x, length=3)[0], in_shardings=batch, out_shardings=batch)
    found = moved(f.lower(jax.ShapeDtypeStruct((64, 1000), jnp.float32)).compile())
    assert found == (24_000, {"all-reduce": 3})
