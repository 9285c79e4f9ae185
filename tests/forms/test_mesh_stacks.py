"""Stacks over several devices: rows lie as their leaves did, and gradients as what they are of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import treeparams as tp
from treeparams import optim
from treeparams._forms import form

from ..long import LONG
from ..zoo import ramp
from .test_mesh import AUTO, EXPLICIT, assert_near, auto_within, axes, explicit_within, mesh_of, put, set_if

LAYERS = {
    "layers": [{"b": ramp(4, start=k), "f": ramp(4, 2, start=k + 0.5), "w": ramp(4, 2, start=k)} for k in range(2)],
    "head": ramp(4, 2, start=9),
    "lone": ramp(3),
    "tail": ramp(4, 2, start=11),  # with it the rows can be halved
    "x": [ramp(start=7), ramp(start=8)],
}
FROZEN = tp.layout(LAYERS, freeze="layers.*.f")
STACKS, WAY = tp.stack(LAYERS, FROZEN)
ALIKE = {"b": ("x",)} | dict.fromkeys(("f", "w", "head", "tail"), ("x", None))
APART = ALIKE | {"w": (None, "x")}  # `head` otherwise than the weights


def over(mesh, specs):
    """The layers, each array as its name says."""
    put_leaf = lambda path, leaf: put(leaf, mesh, *specs.get(getattr(path[-1], "key", None), ()))
    return jax.tree_util.tree_map_with_path(put_leaf, LAYERS)


@jax.jit
def smooth(model):
    """A function of all leaves in which nothing is contracted along an axis that lies over the devices."""
    totals = [(k + 1) * jnp.sum(jnp.sin(leaf) + leaf**2) for k, leaf in enumerate(jax.tree.leaves(model))]
    return jnp.tanh(sum(totals) / 1000)


def both_ways(stacks, restructure):
    """A function of the model, of its layers in a scan, and of a part."""
    turn = lambda total, node: (total + jnp.sum(jnp.sin(node["w"] + node["f"]) * 2) + jnp.sum(node["b"] ** 3), None)
    total, _ = restructure.scan(turn, jnp.float32(0), stacks, "layers.*")
    return smooth(restructure(stacks)) + total + jnp.sum(restructure.part(stacks, "head") ** 2)


@jax.jit
def derivatives(stacks, restructure):
    """The value, the gradient and its change, the model and the nodes."""
    of = lambda stacks: both_ways(stacks, restructure)
    found = of(stacks), *jax.jvp(jax.grad(of), (stacks,), (stacks,))
    return found, restructure(stacks), restructure.repeated(stacks, "layers.*")


@jax.jit
@jax.grad
def through_stacks(params, rest):
    return smooth(tp.stack(tp.combine(params, rest), FROZEN)[0])


def spec_of(array):
    """How an array lies, one entry for each axis."""
    spec = array.sharding.spec
    return (*spec, *[None] * (array.ndim - len(spec)))


def assert_equal(got, want):
    jax.tree.map(np.testing.assert_array_equal, got, want)


@explicit_within
def test_rows_of_stacks_lie_as_their_leaves(kind, within):
    mesh = mesh_of(kind, 2)
    model = over(mesh, ALIKE)
    with set_if(within, mesh):
        stacks, restructure = tp.stack(model, FROZEN)
        assert_equal(stacks, STACKS)
        assert [spec_of(stacks[f"float32[4{more}]"]) for more in (",2", "")] == [(None, "x", None), (None, "x")]
        back = restructure(stacks)
        assert_equal(back, model)
        assert jax.tree.map(spec_of, back) == jax.tree.map(spec_of, model)
        for made in (restructure.ravel(back), restructure.ravel_gradient(back)):
            assert_equal(made, STACKS)
            assert jax.tree.map(spec_of, made) == jax.tree.map(spec_of, stacks)
        node, head = restructure.repeated(stacks, "layers.*"), restructure.part(stacks, "head")
        found = [spec_of(each) for each in (node["w"], node["f"], head)]
        assert found == [(None, "x", None), (None, "x", None), ("x", None)]
        assert_equal(node["w"], np.stack([layer["w"] for layer in LAYERS["layers"]]))
        np.testing.assert_allclose(tp.global_norm(stacks), tp.global_norm(STACKS), 1e-6)


@auto_within
def test_views_of_stacks_over_devices(kind, within):
    mesh = mesh_of(kind, 2)
    with set_if(within, mesh):
        stacks, restructure = tp.stack(over(mesh, ALIKE), FROZEN)
        view = restructure.view(stacks)
        assert_equal(view["layers.1.w"], LAYERS["layers"][1]["w"])
        assert spec_of(view["layers.1.w"]) == ("x", None)
        twelve = np.arange(12, dtype=np.float32)
        for where, value, at in (
            ("layers.1.w", 3.0, {"layers.1.w": 3.0}),
            ("layers.1.w", put(ramp(4, 2, start=5), mesh, "x", None), {"layers.1.w": ramp(4, 2, start=5)}),
            (["head", "layers.1.b"], twelve, {"head": twelve[:8].reshape(4, 2), "layers.1.b": twelve[8:]}),
            ("layers.0", view["layers.0"], {f"layers.0.{name}": LAYERS["layers"][0][name] for name in "bw"}),
        ):
            want = jax.tree.map(np.array, STACKS)
            for path, added in at.items():
                _, key, row = WAY.place(path)
                want[key][row] += added
            changed = view.at[where].add(value)
            assert_equal(changed, want)
            assert jax.tree.map(spec_of, changed) == jax.tree.map(spec_of, stacks)


@pytest.mark.parametrize(("kind", "rows"), [(AUTO, True), pytest.param(EXPLICIT, False, marks=LONG), (EXPLICIT, True)])
def test_gradients_in_stacks_over_devices(kind, rows):
    """Over the axes of each row, and over the rows: layers that lie on different devices."""
    mesh = mesh_of(kind, 2)
    spec = lambda x: ("x",) if rows and len(x) % 2 == 0 else (None, "x") if x.ndim > 1 and x.shape[1] == 4 else ()
    stacks, restructure = (jax.tree.map(lambda x: put(x, mesh, *spec(x)), tree) for tree in (STACKS, WAY))
    with jax.set_mesh(mesh):
        got = derivatives(stacks, restructure)
        assert_equal(restructure(stacks), LAYERS)
        assert_equal(restructure.view(stacks)["layers.1.w"], LAYERS["layers"][1]["w"])
    assert_near(got, derivatives(STACKS, WAY))
    for each in got[0][1:] if kind == EXPLICIT else ():
        assert jax.tree.map(spec_of, each) == jax.tree.map(spec_of, stacks)


@auto_within
def test_leaves_of_one_shape_that_lie_differently(kind, within):
    mesh = mesh_of(kind, 2)
    model = over(mesh, APART)
    with set_if(within, mesh):
        stacks, restructure = tp.stack(model, FROZEN)
        assert_equal((stacks, restructure(stacks)), (STACKS, LAYERS))
        assert kind == AUTO or stacks["float32[4,2]"].is_fully_replicated
    with jax.set_mesh(mesh):
        gradient = through_stacks(*tp.partition(model, FROZEN))
    assert_near(gradient, through_stacks(*tp.partition(LAYERS, FROZEN)))
    assert kind == AUTO or spec_of(gradient["head"]) == ("x", None)
    assert kind == AUTO or spec_of(gradient["layers"][0]["w"]) == (None, "x")


@axes
def test_frozen_arrays_lie_as_they_did(kind):
    mesh = mesh_of(kind, 2)
    specs = [("x", None), (None, "x"), (), ("x", None)]
    model = [{"t": put(ramp(4, 2, start=k), mesh, *spec), "w": put(ramp(3), mesh)} for k, spec in enumerate(specs)]
    stacks, restructure = tp.stack(model, "*.w")
    back = restructure(stacks)
    assert_equal(back, model)
    assert jax.tree.map(spec_of, back) == jax.tree.map(spec_of, model)
    with jax.set_mesh(mesh):
        node = restructure.repeated(stacks, "*")
    assert_equal(node["t"], np.stack([ramp(4, 2, start=k) for k in range(4)]))


@explicit_within
def test_many_rows_outside_of_a_trace(kind, within, monkeypatch):
    monkeypatch.setattr(form, "_AT_ONCE", 4)
    mesh = mesh_of(kind, 2)
    model = put([ramp(2, 2, start=k) for k in range(10)], mesh, "x", None)
    with set_if(within, mesh):
        stacks, restructure = tp.stack(model)
        assert spec_of(stacks["float32[2,2]"]) == (None, "x", None)
        along_rows = {"float32[2,2]": put(stacks["float32[2,2]"], mesh, "x", None, None)}
        for given in (stacks, along_rows):
            assert_equal(restructure(given), model)
        assert {spec_of(leaf) for leaf in restructure(stacks)} == {("x", None)}
        assert_equal(restructure.repeated(along_rows, "*"), np.stack(model))


# That axes are of either kind makes no difference where all of them are manual.
@pytest.mark.parametrize("kind", [pytest.param(AUTO, marks=LONG), EXPLICIT])
def test_stacks_in_shard_map(kind):
    mesh = mesh_of(kind)
    want = derivatives(STACKS, WAY)[0][1]

    def step(stacks, restructure, x):
        gradient = jax.grad(lambda s: jax.lax.pmean(both_ways(s, restructure) * jnp.sum(x), "x"))(stacks)
        return gradient, tp.stack(restructure(stacks), FROZEN)[0], restructure.view(gradient)["head"]

    inside = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P())
    gradient, again, head = jax.jit(inside)(STACKS, WAY, put(np.ones(4, "f"), mesh, "x"))
    assert_near((gradient, head), (want, WAY.view(want)["head"]))
    assert_equal(again, STACKS)


def test_an_ensemble_of_stacks_over_devices():
    mesh = mesh_of(EXPLICIT)
    of = jax.jit(jax.value_and_grad(lambda s, r: smooth(r(s)) + jnp.sum(r.part(s, "head") ** 2)))
    many = jax.tree.map(lambda x: put(np.stack([x * np.float32(k + 1) for k in range(4)]), mesh, "x"), STACKS)
    with jax.set_mesh(mesh):
        found = jax.vmap(of, (0, None))(many, put(WAY, mesh))
    assert {spec_of(each)[0] for each in jax.tree.leaves(found[1])} == {"x"}
    for k in range(4):
        got, one = (jax.tree.map(lambda x, k=k: np.asarray(x)[k], tree) for tree in (found, many))
        assert_near(got, of(one, WAY))


def test_rows_that_run_in_turns_stay_on_their_devices():
    """As many rows at once as there are devices: each runs its own, and none is sent."""
    rows = put(ramp(16, 3), mesh_of(AUTO), "x")
    tx = optim.per_leaf(optax.sgd(0.1, momentum=0.9), at_once=4)
    update = jax.jit(tx.update).lower(rows, tx.init(rows), rows).compile()
    assert "all-gather" not in update.as_text()
    np.testing.assert_allclose(update(rows, tx.init(rows), rows)[0], -0.1 * np.asarray(rows), rtol=1e-6)
