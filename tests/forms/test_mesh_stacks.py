"""Stacks over several devices: rows lie as their leaves did, and gradients as what they are of."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec as P

import treeparams as tp
from treeparams import optim

from ..long import LONG
from ..zoo import ramp
from .test_mesh import AUTO, EXPLICIT, assert_near, auto_within, axes, explicit_within, mesh_of, put

LAYERS = {
    "layers": [{"b": ramp(4, start=k), "f": ramp(4, 2, start=k + 0.5), "w": ramp(4, 2, start=k)} for k in range(4)],
    "head": ramp(4, 2, start=9),
    "lone": ramp(3),
    "tail": ramp(4, 2, start=11),  # with it the rows can be halved
    "x": [ramp(start=7), ramp(start=8)],
}
FROZEN = tp.layout(LAYERS, freeze="layers.*.f")
STACKS, WAY = tp.stack(LAYERS, FROZEN)
SPECS = {"b": ("x",), "f": ("x", None), "w": (None, "x"), "head": ("x", None), "tail": ("x", None)}


def over(mesh, specs=SPECS):
    """The layers, each array as its name says."""
    put_leaf = lambda path, leaf: put(leaf, mesh, *specs.get(getattr(path[-1], "key", None), ()))
    return jax.tree_util.tree_map_with_path(put_leaf, LAYERS)


@jax.jit
def smooth(model):
    """A function of all leaves in which nothing is contracted along an axis that lies over the devices."""
    totals = [(k + 1) * jnp.sum(jnp.sin(leaf) + leaf**2) for k, leaf in enumerate(jax.tree.leaves(model))]
    return jnp.tanh(sum(totals) / 1000)


def of_node(total, node):
    return total + jnp.sum(jnp.sin(node["w"] + node["f"]) * 2) + jnp.sum(node["b"] ** 3), None


def by_scan(stacks, restructure):
    total, _ = restructure.scan(of_node, jnp.float32(0), stacks, "layers.*")
    return total + jnp.sum(restructure.part(stacks, "head") ** 2)


def by_nodes(stacks, restructure):
    model = restructure(stacks)
    total = jnp.sum(model["head"] ** 2)
    for node in model["layers"]:
        total, _ = of_node(total, node)
    return total


@jax.jit
def derivatives(stacks, restructure):
    """By the model, by a scan and by nodes: the value, the gradient and its change; then the model and the nodes."""
    found = []
    for side in (lambda s, r: smooth(r(s)), by_scan, by_nodes):
        of = lambda s, side=side: side(s, restructure)
        found.append((of(stacks), *jax.jvp(jax.grad(of), (stacks,), (stacks,))))
    return found, restructure(stacks), restructure.repeated(stacks, "layers.*")


@jax.jit
@jax.grad
def through_stacks(params, rest):
    return smooth(tp.stack(tp.combine(params, rest), FROZEN)[0])


@jax.jit
@jax.value_and_grad
def by_both(stacks, restructure):
    return smooth(restructure(stacks)) + by_nodes(stacks, restructure)


def spec_of(array):
    """How an array lies, one entry for each axis."""
    spec = array.sharding.spec
    return (*spec, *[None] * (array.ndim - len(spec)))


@explicit_within
def test_rows_of_stacks_lie_as_their_leaves(kind, within):
    mesh = mesh_of(kind, 2)
    model = over(mesh, {"b": ("x",), "f": ("x", None), "w": ("x", None), "head": ("x", None), "tail": ("x", None)})
    with jax.set_mesh(mesh) if within else jax.default_device(None):
        stacks, restructure = tp.stack(model, FROZEN)
        jax.tree.map(np.testing.assert_array_equal, stacks, STACKS)
        assert spec_of(stacks["float32[4,2]"]) == (None, "x", None)
        assert spec_of(stacks["float32[4]"]) == (None, "x")
        back = restructure(stacks)
        jax.tree.map(np.testing.assert_array_equal, back, model)
        assert jax.tree.map(spec_of, back) == jax.tree.map(spec_of, model)
        for made in (restructure.ravel(back), restructure.ravel_gradient(back)):
            jax.tree.map(np.testing.assert_array_equal, made, STACKS)
            assert jax.tree.map(spec_of, made) == jax.tree.map(spec_of, stacks)
        node, head = restructure.repeated(stacks, "layers.*"), restructure.part(stacks, "head")
        assert (spec_of(node["w"]), spec_of(node["f"]), spec_of(head)) == (
            (None, "x", None),
            (None, "x", None),
            ("x", None),
        )
        np.testing.assert_array_equal(node["w"], np.stack([layer["w"] for layer in LAYERS["layers"]]))
        np.testing.assert_allclose(tp.global_norm(stacks), tp.global_norm(STACKS), 1e-6)


@auto_within
def test_views_of_stacks_over_devices(kind, within):
    mesh = mesh_of(kind, 2)
    model = over(mesh, {"b": ("x",), "w": ("x", None), "head": ("x", None), "tail": ("x", None)})
    with jax.set_mesh(mesh) if within else jax.default_device(None):
        stacks, restructure = tp.stack(model, FROZEN)
        view = restructure.view(stacks)
        np.testing.assert_array_equal(view["layers.1.w"], LAYERS["layers"][1]["w"])
        assert spec_of(view["layers.1.w"]) == ("x", None)
        lying = put(ramp(4, 2, start=5), mesh, "x", None)
        cases = [
            ("layers.1.w", 3.0),
            ("layers.1.w", np.ones((4, 2), np.float32)),
            ("layers.1.w", lying),
            (["head", "layers.2.b"], np.arange(12, dtype=np.float32)),
            ("layers.0", view["layers.0"]),
        ]
        plain = WAY.view(STACKS)
        for where, value in cases:
            plainly = dict(plain["layers.0"]) if where == "layers.0" else np.asarray(value)
            want = plain.at[where].add(plainly)
            changed = view.at[where].add(value)
            jax.tree.map(np.testing.assert_array_equal, changed, want)
            assert jax.tree.map(spec_of, changed) == jax.tree.map(spec_of, stacks)


@pytest.mark.parametrize(("kind", "rows"), [(AUTO, True), pytest.param(EXPLICIT, False, marks=LONG), (EXPLICIT, True)])
def test_gradients_in_stacks_over_devices(kind, rows):
    """Over the axes of each row, and over the rows: layers that lie on different devices."""
    mesh = mesh_of(kind, 2)
    spec = lambda x: ("x",) if rows and len(x) % 2 == 0 else (None, "x") if x.ndim > 1 and x.shape[1] == 4 else ()
    stacks = jax.tree.map(lambda x: put(x, mesh, *spec(x)), STACKS)
    restructure = jax.tree.map(lambda x: put(x, mesh, *spec(x)), WAY)
    want = derivatives(STACKS, WAY)
    with jax.set_mesh(mesh):
        got = derivatives(stacks, restructure)
    assert_near(got, want)
    assert_near(got[0][1], got[0][2])
    if kind == AxisType.Explicit:
        for _, gradient, second in got[0]:
            assert jax.tree.map(spec_of, gradient) == jax.tree.map(spec_of, stacks)
            assert jax.tree.map(spec_of, second) == jax.tree.map(spec_of, stacks)
    with jax.set_mesh(mesh):
        jax.tree.map(np.testing.assert_array_equal, restructure(stacks), LAYERS)
        np.testing.assert_array_equal(restructure.view(stacks)["layers.3.w"], LAYERS["layers"][3]["w"])


@auto_within
def test_leaves_of_one_shape_that_lie_differently(kind, within):
    mesh = mesh_of(kind, 2)
    model = over(mesh)  # `head` otherwise than the weights
    with jax.set_mesh(mesh) if within else jax.default_device(None):
        stacks, restructure = tp.stack(model, FROZEN)
        jax.tree.map(np.testing.assert_array_equal, stacks, STACKS)
        jax.tree.map(np.testing.assert_array_equal, restructure(stacks), LAYERS)
        if kind == AxisType.Explicit:
            assert stacks["float32[4,2]"].is_fully_replicated
    with jax.set_mesh(mesh):
        gradient = through_stacks(*tp.partition(model, FROZEN))
    want = through_stacks(*tp.partition(LAYERS, FROZEN))
    assert_near(gradient, want)
    if kind == AxisType.Explicit:
        assert spec_of(gradient["head"]) == ("x", None)
        assert spec_of(gradient["layers"][0]["w"]) == (None, "x")


@axes
def test_frozen_arrays_lie_as_they_did(kind):
    mesh = mesh_of(kind, 2)
    specs = [("x", None), (None, "x"), (), ("x", None)]
    model = [{"t": put(ramp(4, 2, start=k), mesh, *spec), "w": put(ramp(3), mesh)} for k, spec in enumerate(specs)]
    stacks, restructure = tp.stack(model, "*.w")
    back = restructure(stacks)
    jax.tree.map(np.testing.assert_array_equal, back, model)
    assert jax.tree.map(spec_of, back) == jax.tree.map(spec_of, model)
    with jax.set_mesh(mesh):
        node = restructure.repeated(stacks, "*")
    np.testing.assert_array_equal(node["t"], np.stack([ramp(4, 2, start=k) for k in range(4)]))


@explicit_within
def test_many_rows_outside_of_a_trace(kind, within):
    mesh = mesh_of(kind, 2)
    model = [put(ramp(2, 2, start=k), mesh, "x", None) for k in range(130)]
    with jax.set_mesh(mesh) if within else jax.default_device(None):
        stacks, restructure = tp.stack(model)
        assert spec_of(stacks["float32[2,2]"]) == (None, "x", None)
        along_rows = {"float32[2,2]": put(stacks["float32[2,2]"], mesh, "x", None, None)}
        for given in (stacks, along_rows):
            jax.tree.map(np.testing.assert_array_equal, restructure(given), model)
        assert {spec_of(leaf) for leaf in restructure(stacks)} == {("x", None)}
        np.testing.assert_array_equal(restructure.repeated(along_rows, "*"), np.stack(list(map(np.asarray, model))))


@axes
def test_stacks_in_shard_map(kind):
    mesh = mesh_of(kind)
    want = jax.jit(jax.grad(lambda s: smooth(WAY(s)) + by_scan(s, WAY)))(STACKS)

    def step(stacks, restructure, x):
        of = lambda s: (smooth(restructure(s)) + by_scan(s, restructure)) * jnp.sum(x)
        gradient = jax.grad(lambda s: jax.lax.pmean(of(s), "x"))(stacks)
        return gradient, tp.stack(restructure(stacks), FROZEN)[0], restructure.view(gradient)["head"]

    inside = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P())
    gradient, again, head = jax.jit(inside)(STACKS, WAY, put(jnp.ones(4), mesh, "x"))
    assert_near(gradient, want)
    assert_near(head, WAY.view(want)["head"])
    jax.tree.map(np.testing.assert_array_equal, again, STACKS)


def test_an_ensemble_of_stacks_over_devices():
    mesh = mesh_of(AxisType.Explicit)
    many = jax.tree.map(lambda x: put(jnp.stack([x * (k + 1) for k in range(4)]), mesh, "x"), STACKS)
    with jax.set_mesh(mesh):
        values, gradients = jax.vmap(by_both, (0, None))(many, put(WAY, mesh))
    assert {spec_of(each)[0] for each in jax.tree.leaves(gradients)} == {"x"}
    for k in range(4):
        one = jax.tree.map(lambda x, k=k: x * (k + 1), STACKS)
        assert_near(jax.tree.map(lambda x, k=k: np.asarray(x)[k], (values, gradients)), by_both(one, WAY))


def test_rows_that_run_in_turns_stay_on_their_devices():
    """As many rows at once as there are devices: each runs its own, and none is sent."""
    mesh = mesh_of(AxisType.Auto)
    rows = put(ramp(16, 3), mesh, "x")
    tx = optim.per_leaf(optax.sgd(0.1, momentum=0.9), at_once=4)
    update = jax.jit(tx.update).lower(rows, tx.init(rows), rows).compile()
    assert "all-gather" not in update.as_text()
    np.testing.assert_allclose(update(rows, tx.init(rows), rows)[0], -0.1 * np.asarray(rows), rtol=1e-6)
