"""What a step takes of each device, before there is one: of any jitted step, and of the command's transformer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

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
    with pytest.raises(TypeError, match=r"expected a step of sharding\.step, or what jax\.jit returns, got a function"):
        sharding.ahead(lambda params, state: params, {}, ())
