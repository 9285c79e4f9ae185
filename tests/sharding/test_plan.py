"""Plans: rules over paths, and where parameters, states of rules, averages and models then lie."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec as P

import treeparams as tp
from treeparams import optim, sharding

from ..nets import mesh_of
from ..zoo import assert_same, ramp

MESH = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
EMBED = ramp(16, 4)
MODEL = {
    "embed": EMBED,
    "f": jnp.tanh,
    "head": EMBED,
    "key": jax.random.key(0),
    "layers": [{"b": ramp(3, start=i), "w": ramp(4, 4, start=i)} for i in range(4)],
    "mean": ramp(12),
    "name": "net",
}
LAYOUT = tp.layout(MODEL, freeze="mean")
ALL_TRAINED = {name: node for name, node in MODEL.items() if name != "mean"}  # no plan of a model but needs its layout
# Matrices in parts, and what is small whole.
RULES = {"layers.*.b": "whole", "**": "split"}
GROUPS = {"embed": "split", "layers.*.w": "owned", "**": "whole"}

FORMS = pytest.mark.parametrize(("form", "rules"), [("tree", RULES), ("vector", {"**": "split"}), ("stacks", GROUPS)])


def plan_of(rules=RULES, model=LAYOUT, mesh=MESH, **options):
    return sharding.plan(model, mesh, rules, **options)


def specs_of(shardings):
    """Which axes are split along what, without entries that say nothing at the end."""
    entries = lambda spec: next((spec[:n] for n in range(len(spec), 0, -1) if spec[n - 1] is not None), ())
    return jax.tree.map(lambda each: tuple(entries(tuple(each.spec))), shardings)


def test_the_first_rule_that_matches_and_how_a_plan_prints():
    plan = plan_of({"layers.3": "whole", "layers.*.b": P(), tp.leaves(lambda path, leaf: leaf.ndim == 2): "split"})
    assert repr(plan).splitlines()[7:] == [
        "layers.2.w  float32[4,4]   P('data')                    16",
        "layers.3.b  float32[3]     whole                        12",
        "layers.3.w  float32[4,4]   whole                        64",
        "mean        float32[12]    whole, frozen                48",
        "tree over ('data': 4): 608 bytes (48 frozen), 272 on each device",
        "whole on each device: 6, the largest 'layers.3.w' of 64 bytes",
    ]
    assert list(plan.replicated.items()) == [
        ("layers.3.w", 64),
        ("mean", 48),
        *((f"layers.{i}.b", 12) for i in range(4)),
    ]


@FORMS
def test_no_value_is_read(form, rules):
    shapes = eqx.filter_eval_shape(lambda: ALL_TRAINED)
    plans = [
        plan_of(rules, shapes if ties is None else tp.layout(shapes, ties=ties), mesh, form=form)
        for ties in (None, {"head": "embed"})
        for mesh in (AbstractMesh((4,), ("data",)), MESH)
    ]
    assert [repr(plans[0]), repr(plans[2])] == [repr(plans[1]), repr(plans[3])]
    assert ["head" in repr(plan) for plan in plans[:3:2]] == [True, False]
    assert all(isinstance(each, jax.ShapeDtypeStruct) for each in jax.tree.leaves(plans[0].ravel(shapes)))
    with pytest.raises(ValueError, match=r"the plan was made from shapes.*pass the state of the step"):
        plans[3].model(plans[3].ravel(ALL_TRAINED))


def test_a_tie_lies_as_its_source():
    for both in ("embed", ("embed", "head")):
        assert plan_of({both: "whole", **RULES}).replicated["embed"] == 256
    assert plan_of({("head", "layers.*.b"): "whole", "**": "split"}).replicated.keys().isdisjoint({"embed"})
    assert "embed" not in plan_of({"layers.*.b": "whole", "embed": "split", "**": "whole"}).replicated


# -- Where it all lies -------------------------------------------------------------------------------------------------


def test_specs_of_parameters_in_each_form():
    tree = specs_of(plan_of({"embed": P(None, "data"), **RULES}).params)
    assert tree["embed"] == (None, "data")
    assert tree["layers"] == [{"b": (), "w": ("data",)}] * 4
    assert tree["head"] is tree["mean"] is tree["f"] is None
    assert specs_of(plan_of({"**": "split"}, form="vector").params) == ("data",)
    stacks = specs_of(plan_of(GROUPS, form="stacks").params)
    assert stacks == {"float32[16,4]": (None, "data"), "float32[4,4]": ("data",), "float32[3]": ()}
    assert specs_of(plan_of({"**": "whole"}, form="stacks").params)["float32[4,4]"] == ()
    of_many = AbstractMesh((3, 2, 2), ("a", "replica", "fsdp"))
    hsdp = plan_of(GROUPS, mesh=of_many, form="stacks", axis=("fsdp",), batch_axis=("replica", "fsdp"))
    assert specs_of(hsdp.params) == jax.tree.map(lambda word: "fsdp" if word == "data" else word, stacks)
    assert specs_of(hsdp.batch) == (("replica", "fsdp"),)
    both = plan_of(RULES, mesh=of_many, axis=("replica", "fsdp"))
    assert specs_of(both.params)["embed"] == (("replica", "fsdp"),)
    assert specs_of(both.batch) == (("replica", "fsdp"),)


def test_the_state_of_rules_of_parts():
    per_leaf = optim.per_leaf(optax.adafactor(1e-3, min_dim_size_to_factor=2))
    state = specs_of(plan_of(GROUPS, form="stacks").state(per_leaf))
    factored, of_split = state.states["float32[4,4]"][0], state.states["float32[16,4]"][0]
    assert factored.v_row == factored.v_col == factored.count == ("data",)
    assert of_split.v_row == of_split.v_col == ()  # factors are small, and whole
    groups = optim.groups({"layers.**": optax.adam(1e-3), "**": optax.sgd(0.1, 0.9)})
    state = plan_of(RULES).state(groups).inner_states
    assert specs_of(state["layers.**"].inner_state[0].mu["layers"]) == [{"b": (), "w": ("data",)}] * 4
    assert specs_of(state["**"].inner_state[0].trace["embed"]) == ("data",)


def test_arrays_of_other_shapes_than_their_parameters():
    """After further axes they lie as the parameter does; in stacks rows are divided; all others are whole."""
    sm3 = specs_of(plan_of({"embed": P(None, "data"), **RULES}).state(optax.sm3(0.1)))[0]
    assert (sm3.mu["embed"], sm3.nu["embed"]) == ([(), ()], (None, "data"))
    memory = specs_of(plan_of({"embed": P(None, "data"), **RULES}).state(optax.scale_by_lbfgs(2)))
    assert memory.diff_params_memory["embed"] == (None, None, "data")
    rows = {"layers.*.w": "owned", "embed": "split", "**": "whole"}
    stacks = specs_of(plan_of(rows, form="stacks").state(optim.per_leaf(optax.sm3(0.1))))
    assert stacks.states["float32[4,4]"][0].mu == [("data",), ("data",)]


def test_a_state_that_is_not_kept_leaf_by_leaf():
    rule = optax.flatten(optax.adam(0.1))
    with pytest.raises(ValueError, match="not kept leaf by leaf"):
        plan_of().state(rule)
    assert specs_of(plan_of({"**": "whole"}).state(rule))[0].mu == ()  # where nothing is split, nothing is asked


def test_an_average_lies_as_what_it_is_of():
    plan = plan_of()
    for average in (0.9, functools.partial(tp.Ema, decay=0.9, warmup=True)):
        made = tp.Ema(plan.ravel(MODEL), decay=0.9, warmup=callable(average))
        ema = jax.device_put(made, plan.average(average))
        assert ema.average["embed"].addressable_shards[0].data.shape == (4, 4)
        assert ema.average["layers"][0]["b"].is_fully_replicated


@FORMS
def test_there_and_back(form, rules):
    plan = plan_of(rules, ALL_TRAINED, form=form)
    params = plan.ravel(ALL_TRAINED)
    lie = jax.tree.map(lambda leaf, to: leaf.sharding.is_equivalent_to(to, leaf.ndim), params, plan.params)
    assert jax.tree.all(lie)
    back = plan.model(params)
    assert_same(back, ALL_TRAINED)
    assert back["f"] is jnp.tanh
    within = jax.jit(lambda params: plan.ravel(plan.model(params)))(params)
    jax.tree.map(np.testing.assert_array_equal, within, params)
    assert jax.tree.structure(plan.shapes()) == jax.tree.structure(params)
    with pytest.raises((ValueError, TypeError), match="expected the parameters in their form"):
        plan.model(jnp.ones(3))
    with pytest.raises(ValueError, match=r"does not fit the layout.*\n'key' is"):
        plan.ravel(ALL_TRAINED | {"key": ramp(4)})


@FORMS
def test_a_model_is_put(form, rules):
    model = tp.copy(MODEL)
    plan = plan_of(rules, form=form)
    put = plan.put(model)
    assert_same(put, model)
    assert put["embed"] is put["head"]
    assert put["f"] is jnp.tanh
    parts = 1 if form == "vector" else 4
    assert put["embed"].addressable_shards[0].data.shape == (16 // parts, 4)
    assert put["mean"].is_fully_replicated == (form == "stacks")
    assert put["layers"][0]["w"].is_fully_replicated == (form != "tree")
    # Its buffers are its own.
    given = [put["embed"], put["layers"][1]["b"], put["mean"]]
    jax.jit(lambda arrays: list(map(jnp.negative, arrays)), donate_argnums=0)(given)
    assert_same(model, MODEL)
    with pytest.raises(ValueError, match="'mean' is float32"):
        plan.put(MODEL | {"mean": ramp(4)})


def test_keys_of_stacks_are_those_of_tp_stack_unless_rows_of_one_shape_lie_in_several_ways():
    keys = set(tp.stack(MODEL, LAYOUT)[0])
    for rules in (GROUPS, {"**": "whole"}, {"layers.0.w": "split", "layers.*.b": "whole", "**": P("data")}):
        assert set(plan_of(rules, form="stacks").params) == keys
    plan = plan_of({"layers.0.w": "whole", **RULES}, form="stacks")
    parts = {"float32[4,4] whole", "float32[4,4] P('data')"}
    assert set(plan.params) == keys - {"float32[4,4]"} | parts
    alone = sharding.plan(LAYOUT, mesh_of(1), {"layers.0.w": "whole", **RULES}, form="stacks")
    assert set(alone.params) == keys  # on one device all lie alike


def test_what_lies_over_shapes_alone_is_not_put():
    plan = plan_of(mesh=AbstractMesh((4,), ("data",)))
    for place in (plan.put, plan.ravel):
        with pytest.raises(ValueError, match=r"AbstractMesh.*jax\.make_mesh|abstract mesh.*jax\.make_mesh"):
            place(MODEL)


# -- Frozen parameters -------------------------------------------------------------------------------------------------

ANY = AbstractMesh((4,), ("data",))


def test_those_that_no_rule_matches_are_whole_and_listed():
    model = {"w": ramp(8, 4), "base": ramp(16, 4), "small": ramp(3), "copy": ramp(4, 8), "n": jnp.arange(5)}
    layout = tp.layout(model, freeze=("base", "small", "copy"))
    plan = sharding.plan(layout, ANY, {"w": "split", "small": "whole"})
    assert plan.replicated == {"base": 256, "copy": 128, "small": 12}
    # A rule for frozen parameters alone is one.
    plan = sharding.plan(layout, ANY, {"w": "whole", "base": "split", "copy": P(None, "data")})
    assert repr(plan).splitlines()[2:] == [
        "base   float32[16,4]  P('data'), frozen                      64",
        "copy   float32[4,8]   P(None, 'data'), frozen                32",
        "small  float32[3]     whole, frozen                          12",
        "tree over ('data': 4): 524 bytes (396 frozen), 236 on each device",
        "whole on each device: 2, the largest 'w' of 128 bytes",
    ]


def test_a_frozen_alias_lies_as_its_source():
    base = ramp(8, 4)
    model = {"again": base, "base": base, "turned": base.T, "w": ramp(8)}
    layout = tp.layout(model, freeze=("again", "base", "turned"), ties={"turned": ("base", jnp.transpose)})
    plan = sharding.plan(layout, mesh_of(4), {"base": "split", "w": "whole"})
    put = plan.put(model)
    assert put["again"] is put["base"]
    assert put["base"].addressable_shards[0].data.shape == (2, 4)
    assert put["turned"].addressable_shards[0].data.shape == (1, 8)
    assert "again" not in repr(plan)


def test_buffers_and_integers_are_whole_whatever_rules_say():
    norm = eqx.nn.BatchNorm(3, "batch", mode="batch")
    model = {"norm": norm, "numbers": jnp.arange(5), "key": jax.random.key(0), "w": ramp(8)}
    plan = sharding.plan(model, mesh_of(4), {"norm.weight": "whole", "norm.bias": "whole", "**": "split"})
    assert "frozen" not in repr(plan)
    put = plan.put(model)
    arrays = [leaf for leaf in jax.tree.leaves((put["norm"], put["numbers"], put["key"])) if eqx.is_array(leaf)]
    assert len(arrays) > 4
    assert all(leaf.is_fully_replicated for leaf in arrays)


def test_shapes_lie_as_values_do():
    model = MODEL | {"masks": [ramp(8), ramp(8, start=1)]}
    layout = tp.layout(model, freeze=("masks", "mean"))
    plan = plan_of({("masks", "mean"): "split", **GROUPS}, layout, form="stacks")
    for options in ({}, {"loss_takes": "form"}):
        init, _ = sharding.make_step(lambda *args: 0.0, optax.sgd(0.1), plan, **options)
        states = init(model)[1], init(eqx.filter_eval_shape(lambda: model))[1], tp.jit(init)(model)[1]
        assert len(set(map(jax.tree.structure, states[:2]))) == 1
        values, *others = map(jax.tree.leaves, states)
        shapes = [value.addressable_shards[0].data.shape for value in values]  # of frozen ones, in parts
        assert (3,) in shapes
        assert (2, 2) in shapes if options else shapes.count((2,)) == 2
        for value, *same in zip(values, *others, strict=True):
            assert all(value.sharding.is_equivalent_to(each.sharding, value.ndim) for each in same)
