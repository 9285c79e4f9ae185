"""What a step takes of each device, before there is one: of any jitted step, and of the transformer of an example."""

import pathlib
import runpy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import sharding

MESH = Mesh(np.array(jax.devices()[:4]), "d")


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
    assert found.total == found.parameters + found.state + found.batch + found.temporaries
    assert found.moved == sharding.collectives(compiled)
    assert found.moved.count() > 0


def test_it_prints_as_a_table():
    moved = sharding.Collectives(())
    found = sharding.Ahead(64, 1000, 2000, 24, 500_000, moved)
    assert repr(found).splitlines() == [
        "each of 64      bytes",
        "parameters     1.0 kB",
        "state          2.0 kB  of the optimiser",
        "batch            24 B",
        "temporaries  500.0 kB  gradients, activations, what is gathered",
        "total        503.0 kB",
        "",
        "nothing is moved between devices",
    ]
    assert "503.0 kB" in found._repr_html_()


def test_of_one_device_and_of_arrays():
    found = sharding.ahead(jax.jit(lambda params, state: params + 1), np.ones((3, 4), np.float32), jnp.ones(2))
    assert (found.devices, found.parameters, found.state, found.batch) == (1, 48, 8, 0)


def test_what_is_no_step():
    with pytest.raises(
        TypeError, match=r"expected a step of sharding\.make_step, or what jax\.jit returns, got a function"
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
