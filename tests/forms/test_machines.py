"""What differs between machines, seen in programs that are lowered, or written, for others than this one."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import layout

import treeparams as tp
from benchmarks._hbm import main_memory_bytes


def _lowered(f, *args, platform):
    return jax.jit(f).trace(*args).lower(lowering_platforms=(platform,)).as_text()


def _layers():
    return {"layers": [{"w": jnp.full((4, 4), i / 10)} for i in range(20)]}


@pytest.mark.skipif(not hasattr(layout, "Format"), reason="this JAX has other names for layouts")
@pytest.mark.parametrize("platform", ["tpu", "cpu", "cuda"])
def test_rows_are_outermost_before_a_loop_on_tpu_alone(platform):
    stacks, restructure = tp.stack(_layers())

    def scanned(stacks, x):
        return restructure.scan(lambda x, layer: (x @ layer["w"], None), x, stacks, "layers.*")[0]

    def unrolled(stacks, x):
        for layer in restructure(stacks)["layers"]:
            x = x @ layer["w"]
        return x

    x = jnp.ones(4)
    grads = jax.grad(lambda stacks, x: jnp.sum(scanned(stacks, x)))
    assert ("LayoutConstraint" in _lowered(grads, stacks, x, platform=platform)) == (platform == "tpu")
    assert "LayoutConstraint" not in _lowered(unrolled, stacks, x, platform=platform)
    vector, from_vector = tp.ravel(_layers())
    of_vector = lambda vector, x: from_vector.scan(lambda x, layer: (x @ layer["w"], None), x, vector, "layers.*")[0]
    assert "LayoutConstraint" not in _lowered(of_vector, vector, x, platform=platform)


_TILED = """\
HloModule step

%fused (a: f32[50,32], i: s32[]) -> f32[1,32] {
  %a = f32[50,32]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %row = f32[1,32]{1,0:T(1,128)} dynamic-slice(%a, %i, %zero), dynamic_slice_sizes={1,32}
}

ENTRY %main (p: f32[50,32], i: s32[]) -> f32[1,32] {
  %p = f32[50,32]{1,0:T(8,128)} parameter(0)
  %i = s32[]{:T(128)} parameter(1)
  %start = (f32[50,32]{1,0:T(8,128)S(1)}, f32[50,32]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%p)
  %fast = f32[50,32]{1,0:T(8,128)S(1)} copy-done(%start)
  %sum = f32[50,32]{1,0:T(8,128)S(1)} add(%fast, %fast)
  ROOT %out = f32[1,32]{1,0:T(1,128)} fusion(%p, %i), kind=kLoop, calls=%fused
}
"""


def test_bytes_of_main_memory_are_those_of_padded_tiles_each_copied_once():
    copied = 56 * 128 * 4  # 50 rows of 32 numbers, padded to 8 and 128; what is in fast memory counts nothing
    row = 128 * 4  # padded to 128 numbers; read, and written
    assert main_memory_bytes(_TILED) == copied + 2 * row
