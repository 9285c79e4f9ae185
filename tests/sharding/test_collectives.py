"""What compiled programs move, against numbers worked out by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec as P

from treeparams import sharding
from treeparams.sharding._compiled.collectives import Collective

from ..zoo import first_devices

X = jax.ShapeDtypeStruct((64, 32), jnp.float32)
PART = 16 * 32 * 4  # bytes of the rows of one of four devices
WHOLE = 4 * PART


def compiled(f, *arguments, mesh=None):
    """A function of what one device has of its arguments, over the axis "d"."""
    mesh = mesh or Mesh(np.array(first_devices(4)), "d")
    mapped = jax.shard_map(f, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False)
    return jax.jit(mapped).lower(*arguments or (X,)).compile()


def counts(f, **kw):
    return {(row.kind, row.bytes): row.times for row in sharding.collectives(compiled(f), **kw).rows}


def psum(x):
    return jax.lax.psum(x, "d")


def repeat(f, times):
    return lambda x: jax.lax.scan(lambda carry, _: (f(carry), None), x, length=times)[0]


@pytest.fixture(scope="module")
def of_each_kind():
    def f(x):
        whole = jax.lax.all_gather(x, "d", tiled=True)
        scattered = jax.lax.psum_scatter(whole * 2, "d", tiled=True)
        swapped = jax.lax.all_to_all(x, "d", 0, 0, tiled=True)
        sent = jax.lax.ppermute(x, "d", [(0, 1), (1, 0)])
        return jnp.sin(psum(x)) + scattered + swapped + sent

    return compiled(f)


def test_each_kind_counts_by_what_it_moves(of_each_kind):
    moved = sharding.collectives(of_each_kind)
    assert set(moved.rows) == {
        Collective("all-gather", WHOLE, 1),
        Collective("reduce-scatter", WHOLE, 1),
        Collective("all-reduce", 2 * PART, 1),
        Collective("all-to-all", PART, 1),
        Collective("collective-permute", PART, 1),
    }
    assert moved.bytes == 2 * WHOLE + 4 * PART
    assert moved.count() == 5
    assert moved.count("all-gather") == 1
    assert moved.count("collective-broadcast") == 0
    assert moved == sharding.collectives(of_each_kind.as_text())


def test_it_prints_as_a_table_of_the_largest_first(of_each_kind):
    lines = repr(sharding.collectives(of_each_kind)).splitlines()
    assert lines[0] == "collective          times  bytes each    bytes"
    assert "all-to-all              1      2.0 kB   2.0 kB" in lines
    assert lines[-2:] == ["", "total                   5              24.6 kB"]
    sizes = [row.total for row in sharding.collectives(of_each_kind).rows]
    assert sizes == sorted(sizes, reverse=True)
    assert '<td style="text-align:right;font-family:monospace;white-space:pre">24.6 kB</td>' in (
        sharding.collectives(of_each_kind)._repr_html_()
    )


@pytest.mark.parametrize(("ignore", "count"), [(0, 5), (PART - 1, 5), (PART, 3), (2 * PART, 2), (WHOLE, 0)])
def test_what_is_small_is_left_out(of_each_kind, ignore, count):
    assert sharding.collectives(of_each_kind, ignore=ignore).count() == count


def test_a_scalar_is_left_out_unless_asked_for():
    f = lambda x: x * jax.lax.psum(jnp.sum(x), "d")
    assert counts(f) == {}
    assert counts(f, ignore=0) == {("all-reduce", 8): 1}
    assert repr(sharding.collectives(compiled(f))) == "nothing is moved between devices"


def test_several_reductions_count_the_same_whether_joined_or_not():
    moved = sharding.collectives(compiled(lambda x: jax.lax.psum((x, jnp.sin(x), x[:1]), "d")))
    assert moved.bytes == 2 * (2 * PART + PART // 16)
    assert {row.kind for row in moved.rows} == {"all-reduce"}


def test_loops_multiply():
    assert counts(repeat(psum, 5)) == {("all-reduce", 2 * PART): 5}
    nested = repeat(lambda x: repeat(psum, 5)(jax.lax.ppermute(x, "d", [(0, 1)])), 3)
    assert counts(nested) == {("all-reduce", 2 * PART): 15, ("collective-permute", PART): 3}


def test_a_loop_that_counts_from_another_start_in_other_steps():
    f = lambda x: jax.lax.while_loop(lambda t: t[0] < 20, lambda t: (t[0] + 3, psum(t[1])), (2, x))[1]
    assert counts(f) == {("all-reduce", 2 * PART): 6}  # at 2, 5, ..., 17


def test_a_loop_until_a_value_is_reached_has_no_count():
    def f(x):
        x = jax.lax.while_loop(lambda x: jnp.sum(x) < 7, repeat(psum, 2), x)
        return jax.lax.ppermute(x, "d", [(0, 1)])

    moved = sharding.collectives(compiled(f))
    assert moved.rows == (Collective("all-reduce", 2 * PART, None), Collective("collective-permute", PART, 1))
    assert moved.rows[0].total is moved.bytes is moved.count() is moved.count("all-reduce") is None
    assert moved.count("collective-permute") == 1
    lines = repr(moved).splitlines()
    assert lines[1].split() == ["all-reduce", "unknown", "4.1", "kB", "unknown"]
    assert lines[-2].split() == ["total", "unknown", "unknown"]
    assert lines[-1].startswith("how often a loop runs depends on values")


def test_a_loop_of_unknown_length_that_moves_nothing_is_of_no_interest():
    f = lambda x: psum(jax.lax.while_loop(lambda x: jnp.sum(x) < 7, jnp.sin, x))
    moved = sharding.collectives(compiled(f))
    assert moved.bytes == 2 * PART
    assert not moved.notes


def test_what_the_condition_of_a_loop_moves_is_moved_once_more_often():
    condition = lambda t: (t[0] < 4) & (jnp.sum(psum(t[1])) < 1e9)
    f = lambda x: jax.lax.while_loop(condition, lambda t: (t[0] + 1, jnp.sin(t[1])), (0, x))[1]
    assert counts(f) == {("all-reduce", 2 * PART): None}
    assert sharding.collectives(LOOP.format(trips=4)).rows == (Collective("all-reduce", 256, 9),)  # 4 rounds, 5 tests


def test_of_a_conditional_the_branch_that_moves_most():
    gathered = lambda x: jax.lax.all_gather(x, "d", tiled=True)[:16]
    f = lambda x: jax.lax.switch(jnp.int32(jnp.sum(x)), [psum, gathered, jnp.sin], x)
    moved = sharding.collectives(compiled(f))
    assert moved.rows == (Collective("all-gather", WHOLE, 1),)
    assert repr(moved).endswith("of a conditional, the branch that moves most is counted")


def test_a_conditional_between_what_moves_nothing_is_of_no_interest():
    f = lambda x: psum(jax.lax.cond(jnp.sum(x) > 0, jnp.sin, jnp.cos, x))
    assert not sharding.collectives(compiled(f)).notes


def test_groups_of_one_device_move_nothing():
    mesh = Mesh(np.array(first_devices(4)).reshape(4, 1), ("d", "alone"))

    def f(x):
        alone = jax.lax.all_gather(jax.lax.psum(jnp.sin(x), "alone"), "alone", tiled=True)
        return psum(jnp.sin(jax.lax.ppermute(alone, "alone", [(0, 0)])))

    assert sharding.collectives(compiled(f, mesh=mesh)).rows == (Collective("all-reduce", 2 * PART, 1),)
    one = Mesh(np.array(first_devices(1)), "d")
    assert sharding.collectives(compiled(psum, mesh=one)).count() == 0


@pytest.mark.parametrize(
    "dtype", [jnp.bool_, jnp.int8, jnp.float16, jnp.float32, jnp.complex64], ids=lambda d: d.__name__
)
def test_elements_of_each_width(dtype):
    program = compiled(lambda x: jax.lax.all_gather(x, "d"), jax.ShapeDtypeStruct((64, 32), dtype))
    assert sharding.collectives(program).bytes == 64 * 32 * jnp.dtype(dtype).itemsize


# -- Texts as other compilers write them -------------------------------------------------------------------------------

LOOP = """HloModule jit_f, is_scheduled=true

%body (p: f32[32]) -> f32[32] {{
  %p = f32[32]{{0}} parameter(0)
  ROOT %r = f32[32]{{0}} all-reduce(%p), replica_groups={{{{0,1}}}}, to_apply=%add
}}

%condition (q: f32[32]) -> pred[] {{
  %q = f32[32]{{0}} parameter(0)
  %r.1 = f32[32]{{0}} all-reduce(f32[32]{{0}} %q), replica_groups=[1,2]<=[2], to_apply=%add
  ROOT %less = pred[] custom-call(%r.1), custom_call_target="less"
}}

ENTRY %main (x: f32[32]) -> f32[32] {{
  %x = f32[32]{{0}} parameter(0)
  ROOT %w = f32[32] while(%x), condition=%condition, body=%body, backend_config={{"known_trip_count":{{"n":"{trips}"}}}}
}}
"""

ASYNCHRONOUS = """HloModule jit_f, entry_computation_layout={(f32[16,32]{1,0:T(8,128)})->f32[64,32]{1,0:T(8,128)}}

scattered {
  param = f32[64,32]{1,0} parameter(0)
  ROOT rs = f32[16,32]{1,0} reduce-scatter(param), replica_groups=[1,4]<=[4], dimensions={0}, to_apply=add
}, execution_thread="async"

%all-reduce-scatter.3 {
  input = f32[128,32]{1,0:T(8,128)} parameter(0)
  sum = f32[128,32]{1,0:T(8,128)} all-reduce(input), replica_groups={{0,1,2,3}}, to_apply=add
  ROOT part = f32[32,32]{1,0:T(8,128)} dynamic-slice(sum, at, at)
}

ENTRY main {
  x = f32[16,32]{1,0:T(8,128)S(1)} parameter(0)
  y = bf16[16,32]{1,0:T(8,128)(2,1)} parameter(1)
  gather = ((f32[16,32]{1,0:T(8,128)S(1)}, bf16[16,32]), (f32[64,32], bf16[64,32])) all-gather-start(x, y)
  gathered = (f32[64,32], bf16[64,32]) all-gather-done(gather), metadata={op_name="jit(f)/(all_gather"}
  whole = f32[64,32]{1,0} get-tuple-element(gathered), index=0
  scatter = ((f32[64,32]), f32[16,32], u32[]) async-start(f32[64,32]{1,0} whole), calls=scattered
  scattering = ((f32[64,32]), f32[16,32], u32[]) async-update(scatter), calls=scattered
  part = f32[16,32] async-done(((f32[64,32]), f32[16,32], u32[]) scattering), calls=scattered
  reduce = (f32[16,32], /*index=1*/bf16[16,32]) all-reduce-start(x, /*index=1*/y), replica_groups={}, to_apply=add
  reduced = (f32[16,32], bf16[16,32]) all-reduce-done(reduce)
  exchange = ((f32[16,32]), f32[16,32], u32[]) all-to-all-start(x), replica_groups={{0,1,2,3}}, dimensions={0}
  exchanged = f32[16,32] all-to-all-done(exchange)
  send = (f32[16,32], f32[16,32], u32[]{:S(2)}, u32[]{:S(2)}) collective-permute-start(x), source_target_pairs={{0,1}}
  sent = f32[16,32] collective-permute-done(send)
  small = (f32[8,32], f32[32,32], u32[]) all-gather-start(half), dimensions={0}, replica_groups={{0,1,2,3}}
  half = f32[8,32] slice(x), slice={[0:8], [0:32]}
  to_itself = f32[16,32] collective-permute(x), source_target_pairs={{0,0},{1,1},{12,12}}
  alone = f32[16,32] all-reduce(x), replica_groups=[4,1]<=[4], to_apply=add
  by_axis = f32[16,32] all-reduce(x), replica_groups=mesh['d'=4,'one'=1] {'one'}, to_apply=add
  twice = f32[128,32] concatenate(whole, whole), dimensions={0}
  summed = f32[32,32] fusion(twice), kind=kCustom, calls=%all-reduce-scatter.3
  cast = f32[16,32] collective-broadcast(x), replica_groups=mesh['d'=4,'one'=1] {'d','one'}
  at = s64[4] constant({0, 4, 8, 12})
  ragged = f32[64,32] ragged-all-to-all(x, whole, at, at, at, at), replica_groups={{0,1,2,3}}
  place = s32[] constant(0)
  sliced = f32[64,32] collective-permute(x, whole, place, place), source_target_pairs={{0,1}}, slice_sizes={{16,32}}
  ROOT last = f32[64,32] add(whole, ragged)
}
"""


def test_a_pair_of_start_and_done_counts_once():
    moved = sharding.collectives(ASYNCHRONOUS)
    assert set(moved.rows) == {
        Collective("all-gather", WHOLE + WHOLE // 2, 1),
        Collective("all-gather", WHOLE // 2, 1),
        Collective("reduce-scatter", WHOLE, 1),
        Collective("reduce-scatter", 2 * WHOLE, 1),
        Collective("all-reduce", 2 * (PART + PART // 2), 1),
        Collective("all-to-all", PART, 1),
        Collective("collective-permute", PART, 2),
        Collective("collective-broadcast", PART, 1),
        Collective("ragged-all-to-all", PART, 1),
    }


def test_other_writings_of_branches_and_trip_counts():
    text = """HloModule jit_f

%small (a: f32[64]) -> f32[64] {
  %a = f32[64]{0} parameter(0)
  ROOT %r = f32[64]{0} all-reduce(%a), to_apply=%add
}

%large (b: f32[64]) -> f32[64] {
  %b = f32[64]{0} parameter(0)
  ROOT %w = f32[64] while(%b), condition=%test, body=%small, backend_config="{\\"known_trip_count\\":{\\"n\\":\\"9\\"}}"
}

%fused (c: f32[64]) -> f32[64] {
  %c = f32[64]{0} parameter(0)
  %p = pred[] parameter(1)
  ROOT %d = f32[64]{0} conditional(%p, %c, %c), true_computation=%large, false_computation=%small
}

ENTRY %main (x: f32[64]) -> f32[64] {
  %x = f32[64]{0} parameter(0)
  %y = f32[64]{0} fusion(%x), kind=kCustom, calls=%fused
  ROOT %z = f32[64]{0} call(%y), to_apply=%fused
}
"""
    assert sharding.collectives(text).rows == (Collective("all-reduce", 512, 18),)


# -- What is refused ---------------------------------------------------------------------------------------------------


def test_what_is_no_compiled_program(without_type_checks):
    f = jax.jit(jnp.sin)
    with pytest.raises(TypeError, match=r"expected a compiled program, got a Lowered; write \.compile\(\) after it"):
        sharding.collectives(f.lower(X))
    with pytest.raises(TypeError, match=r"write \.lower\(\.\.\.\)\.compile\(\) after it"):
        sharding.collectives(f)
    with pytest.raises(ValueError, match=r"expected the text of a compiled program, such as compiled\.as_text\(\)"):
        sharding.collectives(f.lower(X).as_text())


def test_an_ignore_and_a_kind_that_are_none(of_each_kind, without_type_checks):
    with pytest.raises(ValueError, match="ignore must be a whole number of bytes, at least 0, got -1"):
        sharding.collectives(of_each_kind, ignore=-1)
    with pytest.raises(ValueError, match="there is no collective 'allgather'; expected one of all-gather, reduce-"):
        sharding.collectives(of_each_kind).count("allgather")


# -- Between which devices ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("written", "axes"),
    [
        ("replica_groups={}", ("a", "b", "c")),
        ("replica_groups={{0,1},{2,3},{4,5},{6,7}}", ("c",)),
        ("replica_groups=[4,2]<=[8]", ("c",)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", ("a",)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", ("a", "c")),
        ("replica_groups=mesh['x'=2,'y'=4] {'y'}", ("b", "c")),
        ("replica_groups=mesh['x'=8] {'x':(2)2}", ("b",)),
        ("source_target_pairs={{0,2},{2,0}}", ("b",)),
    ],
)
def test_the_axes_of_the_mesh(written, axes):
    text = f"""HloModule jit_f

ENTRY %main (x: f32[64]) -> f32[64] {{
  %x = f32[64]{{0}} parameter(0)
  ROOT %r = f32[64]{{0}} all-reduce(%x), {written}, to_apply=%add
}}
"""
    moved = sharding.collectives(text, mesh=jax.sharding.AbstractMesh((2, 2, 2), ("a", "b", "c")))
    assert moved.rows == (Collective("all-reduce", 512, 1, axes),)
    assert moved.over == {axes: 512}
    assert repr(moved).splitlines()[1].endswith(f"512 B  {', '.join(axes)}")
    with pytest.raises(ValueError, match="the axes depend on the mesh"):
        _ = sharding.collectives(text).over


# ruff: noqa: E501 - lines as compilers write them
# Compiled for TPU v5e, of a scan over six layers; shortened.
OF_TPU = """HloModule jit_f, is_scheduled=true

%started (param_0: bf16[1,32,256]) -> (bf16[1,32,256], bf16[1,256,256]) {
  %param_0 = bf16[1,32,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %all-gather.19 = bf16[1,256,256]{2,1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=8, replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.4 = (bf16[1,32,256], bf16[1,256,256]) custom-call(%all-gather.19), custom_call_target="AsyncCollectiveStart"
}

%done (param_0: bf16[1,32,256], param_1: bf16[1,256,256]) -> bf16[1,256,256] {
  %param_0 = bf16[1,32,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(0)
  %param_1 = bf16[1,256,256]{2,1,0:T(8,128)(2,1)S(1)} parameter(1)
  %all-gather.23 = bf16[1,256,256]{2,1,0:T(8,128)(2,1)} all-gather(%param_0), channel_id=8, replica_groups=mesh['axis_0'=8,'axis_1'=1] {'axis_0'}, dimensions={1}, frontend_attributes={chain_id="0"}
  ROOT %custom-call.6 = bf16[1,256,256] custom-call(%param_0, %param_1, %all-gather.23), custom_call_target="AsyncCollectiveDone"
}

%body (carry: (s32[], bf16[1,32,256], s32[])) -> (s32[], bf16[1,32,256], s32[]) {
  %one = s32[]{:T(128)} constant(1)
  %carry = (s32[]{:T(128)}, bf16[1,32,256]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.301 = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %copy.9 = s32[]{:T(128)S(6)} copy(%get-tuple-element.301)
  %part = bf16[1,32,256]{2,1,0:T(8,128)(2,1)S(1)} get-tuple-element(%carry), index=1
  %start = (bf16[1,32,256], bf16[1,256,256]) fusion(%part), kind=kCustom, calls=%started
  %got = bf16[1,256,256]{2,1,0} get-tuple-element(%start), index=1
  %end = bf16[1,256,256]{2,1,0} fusion(%part, %got), kind=kCustom, calls=%done
  %add.25 = s32[]{:T(128)} add(%copy.9, %one)
  %limit = s32[]{:T(128)} get-tuple-element(%carry), index=2
  ROOT %tuple.52 = (s32[]{:T(128)}, bf16[1,32,256], s32[]{:T(128)}) tuple(%add.25, %part, %limit)
}

%condition (carry: (s32[], bf16[1,32,256], s32[])) -> pred[] {
  %six = s32[]{:T(128)} constant(6)
  %carry = (s32[]{:T(128)}, bf16[1,32,256]{2,1,0:T(8,128)(2,1)S(1)}, s32[]{:T(128)}) parameter(0)
  %get-tuple-element.221 = s32[]{:T(128)} get-tuple-element(%carry), index=0
  %kept = s32[]{:T(128)} get-tuple-element(%carry), index=2
  ROOT %lt.10 = pred[]{:T(512)} compare(%get-tuple-element.221, %LIMIT), direction=LT
}

ENTRY %main (x: bf16[1,32,256]) -> (s32[], bf16[1,32,256], s32[]) {
  %x = bf16[1,32,256]{2,1,0} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %four = s32[]{:T(128)} constant(4)
  %tuple.59 = (s32[]{:T(128)}, bf16[1,32,256], s32[]{:T(128)}) tuple(%zero, %x, %four)
  ROOT %while.30 = (s32[], bf16[1,32,256], s32[]) while(%tuple.59), condition=%condition, body=%body
}
"""


@pytest.mark.parametrize(("limit", "trips"), [("six", 6), ("kept", 4), ("get-tuple-element.221", None)])
def test_programs_of_tpus(limit, trips):
    moved = sharding.collectives(OF_TPU.replace("LIMIT", limit))
    assert moved.rows == (Collective("all-gather", 2 * 256 * 256, trips),)
