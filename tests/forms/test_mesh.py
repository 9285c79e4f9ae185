"""Forms over several devices: explicit and automatic axes, `shard_map`, padding; rows lie as their leaves did."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P

import treeparams as tp
from treeparams import optim
from treeparams._forms import form

from ..nets import AUTO, EXPLICIT
from ..zoo import first_devices, ramp

axes = pytest.mark.parametrize("kind", [AUTO, EXPLICIT], ids=["auto", "explicit"])
# Each law meets either kind of axes, and the mesh set and not; together the laws meet all four.
explicit_within = pytest.mark.parametrize(("kind", "within"), [(AUTO, False), (EXPLICIT, True)])
auto_within = pytest.mark.parametrize(("kind", "within"), [(AUTO, True), (EXPLICIT, False)])


def mesh_of(kind, count=4):
    return jax.make_mesh((count,), ("x",), axis_types=(kind,), devices=first_devices(count))


def set_if(within, mesh):
    return jax.set_mesh(mesh) if within else contextlib.nullcontext()


def put(tree, mesh, *spec):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def assert_near(got, want):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, 1e-5, 1e-6), got, want)


@jax.jit
def loss(model, x):
    return jnp.mean(jnp.tanh(x @ model["w"] + (model["b"] + model["frozen"])[None]) ** 2)


MODEL = {"b": ramp(2), "frozen": ramp(2, start=3), "w": ramp(2, 2)}
LAYOUT = tp.layout(MODEL, freeze="frozen")
X = np.sin(np.arange(16, dtype=np.float32)).reshape(8, 2)
VECTOR, RESTRUCTURE = tp.ravel(MODEL, LAYOUT)


@pytest.fixture(scope="module")
def want():
    """The loss and its gradient in the vector, on one device."""
    return jax.jit(jax.value_and_grad(lambda v: loss(RESTRUCTURE(v), X)))(VECTOR)


@pytest.mark.parametrize(
    ("kind", "spec", "within"),
    [(AUTO, (None, "x"), False), (EXPLICIT, ("x", None), True), (EXPLICIT, (None, "x"), False)],
)
def test_there_and_back_and_gradients_over_sharded_leaves(kind, spec, within, want):
    mesh = mesh_of(kind, 2)
    model = put(MODEL, mesh) | {"w": put(MODEL["w"], mesh, *spec)}
    with set_if(within, mesh):
        vector, restructure = tp.ravel(model, LAYOUT)
        assert kind == AUTO or vector.is_fully_replicated
        back = restructure(vector)
        jax.tree.map(np.testing.assert_array_equal, back, model)
        for made in (vector, restructure.ravel(back), restructure.ravel_gradient(model)):
            np.testing.assert_array_equal(made, VECTOR)
        view = restructure.view(vector)
        np.testing.assert_array_equal(view["w"], MODEL["w"])
        np.testing.assert_array_equal(view.at["w"].add(1.0)[2:], VECTOR[2:] + 1)

    def gradients(vector, restructure, model, x):
        of_vector = lambda v, x: loss(restructure(v), x)
        through = jax.grad(lambda m: jnp.sum(tp.ravel(m, LAYOUT)[0] ** 2))(model)
        return jax.grad(of_vector)(vector, x), tp.accumulate(of_vector, pieces=2)(vector, x)[1], through["w"]

    with jax.set_mesh(mesh):
        got = jax.jit(gradients)(vector, restructure, model, put(X, mesh, "x"))
    assert_near(got, (want[1], want[1], 2 * MODEL["w"]))


@pytest.mark.parametrize(("kind", "spec"), [(AUTO, ()), (EXPLICIT, ("x",))])
def test_a_padded_vector_lies_over_the_devices(kind, spec, want):
    mesh = mesh_of(kind)
    vector, restructure = tp.ravel(MODEL, LAYOUT, pad_to=4)
    padded = np.append(want[1], [0, 0])
    # On the mesh as well: with explicit axes what meets must lie on one mesh.
    over, restructure, x = put(vector, mesh, "x"), put(restructure, mesh), put(X, mesh, *spec)
    assert over.addressable_shards[0].data.shape == (2,)

    @jax.jit
    def run(v, r, x):
        gradient = jax.grad(lambda v: loss(r(v), x))(v)
        accumulated = tp.accumulate(lambda v, x: loss(r(v), x), pieces=3)(v, x)  # of eight examples, or two of four
        return gradient, v - 0.1 * gradient, tp.global_norm(v), accumulated

    with jax.set_mesh(mesh):
        gradient, *others = run(over, restructure, x)
        assert_near([gradient, *others], [padded, vector - 0.1 * padded, np.linalg.norm(VECTOR), (want[0], padded)])
        for back in (restructure(over), restructure.view(over)):
            np.testing.assert_array_equal(back["w"], MODEL["w"])
    assert kind == AUTO or gradient.sharding.spec == others[-1][1].sharding.spec == P("x")
    # A change of it lies as it does.
    value = put(ramp(4, start=9), mesh, "x")
    changed = restructure.view(over).at["w"].set(value)
    assert changed.sharding.is_equivalent_to(over.sharding, 1)
    np.testing.assert_array_equal(changed, np.concatenate([VECTOR[:2], value, [0, 0]]))


@axes
def test_one_gather_brings_the_vector_together(kind):
    mesh = mesh_of(kind)
    vector, restructure = tp.ravel([ramp(4) for _ in range(20)], pad_to=4)
    with jax.set_mesh(mesh):
        of = jax.jit(lambda v: sum(jnp.sum(each) for each in restructure(v)))
        program = of.lower(put(vector, mesh, "x")).compile().as_text()
    assert program.count(" all-gather(") == 1
    assert "collective-permute" not in program


@axes
def test_gradients_and_accumulation_in_shard_map(kind, want):
    mesh, index = mesh_of(kind, 2), np.arange(4)

    def step(vector, restructure, x):
        gradient = jax.grad(lambda v: jax.lax.pmean(loss(restructure(v), x), "x"))(vector)
        again, _ = tp.ravel(restructure(vector), LAYOUT)
        argument = tp.accumulate(lambda v, x: loss(restructure(v), x), pieces=3)(vector, x)
        closure = tp.accumulate(lambda v, i: loss(restructure(v), x[i]), pieces=3)(vector, index)
        # As of `jax.grad`, the gradient is summed over the two devices.
        several = [(jax.lax.pmean(value, "x"), gradient / 2) for value, gradient in (argument, closure)]
        return (gradient, tp.global_norm(gradient), restructure.view(gradient)["w"], again), several

    inside = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P())
    got = jax.jit(inside)(VECTOR, RESTRUCTURE, put(X, mesh, "x"))
    once = want[1], np.linalg.norm(want[1]), RESTRUCTURE.view(want[1])["w"], VECTOR
    assert_near(got, (once, [want] * 2))


@pytest.mark.parametrize(("kind", "varying_first"), [(AUTO, False), (EXPLICIT, True)])
def test_whole_and_varying_leaves_in_shard_map(kind, varying_first):
    mesh = mesh_of(kind)
    whole, apart = ramp(2, start=1), put(np.arange(8, dtype=np.float32), mesh, "x")
    joined = lambda a, b: tp.ravel({"a": b, "b": a} if varying_first else {"a": a, "b": b})[0]

    def grads(a, b):
        return jax.grad(lambda a, b: jax.lax.psum(jnp.sum(joined(a, b) ** 2), "x"), (0, 1))(a, b)

    inside = jax.shard_map(grads, mesh=mesh, in_specs=(P(), P("x")), out_specs=(P(), P("x")))
    of_whole, of_apart = jax.jit(inside)(whole, apart)
    np.testing.assert_allclose(of_whole, 4 * 2 * whole)  # it is on four devices
    np.testing.assert_allclose(of_apart, 2 * np.asarray(apart))
    with pytest.raises(ValueError, match="which require replication"):
        jax.jit(jax.shard_map(joined, mesh=mesh, in_specs=(P(), P("x")), out_specs=P()))(whole, apart)


def test_one_leaf_for_all_and_one_for_each_device():
    mesh = mesh_of(EXPLICIT)
    stack, whole = put(ramp(4, 2), mesh, "x", None), put(ramp(3), mesh)
    joined = lambda a, b: tp.ravel({"a": a, "b": b})[0]
    of = lambda a, b: (joined(a, b), *jax.grad(lambda a, b: jnp.sum(joined(a, b) ** 2), (0, 1))(a, b))
    with jax.set_mesh(mesh):
        vectors, of_whole, of_stack = jax.jit(jax.vmap(of, (None, 0)))(whole, stack)
    assert vectors.sharding.spec[0] == "x"
    np.testing.assert_array_equal(vectors, np.concatenate([np.tile(ramp(3), (4, 1)), ramp(4, 2)], 1))
    np.testing.assert_array_equal(of_whole, np.tile(2 * ramp(3), (4, 1)))
    np.testing.assert_array_equal(of_stack, 2 * ramp(4, 2))


# -- Stacks -----------------------------------------------------------------------------------------------------------

LAYERS = {
    "layers": [{"b": ramp(4, start=k), "f": ramp(4, 2, start=k + 0.5), "w": ramp(4, 2, start=k)} for k in range(2)],
    "head": ramp(4, 2, start=9),
    "tail": ramp(4, 2, start=11),  # with it the rows can be halved
    "x": [ramp(start=7), ramp(start=8)],
}
FROZEN = tp.layout(LAYERS, freeze="layers.*.f")
STACKS, WAY = tp.stack(LAYERS, FROZEN)
ALIKE = {"b": ("x",)} | dict.fromkeys(("f", "w", "head", "tail"), ("x", None))
TWELVE = np.arange(12, dtype=np.float32)
APART = ALIKE | {"w": (None, "x")}  # `head` otherwise than the weights


def over(mesh, specs):
    """The layers, each array as its name says."""
    put_leaf = lambda path, leaf: put(leaf, mesh, *specs.get(getattr(path[-1], "key", None), ()))
    return jax.tree_util.tree_map_with_path(put_leaf, LAYERS)


@jax.jit
def smooth(model):
    """A function of all leaves in which nothing is contracted along an axis that lies over the devices."""
    return jnp.tanh(sum(jnp.sum(jnp.sin((k + 1) * leaf)) for k, leaf in enumerate(jax.tree.leaves(model))) / 100)


def both_ways(stacks, restructure):
    """A function of the model, of its layers in a scan, and of a part."""
    turn = lambda total, node: (total + jnp.sum(jnp.sin(node["w"] + node["f"]) * 2) + jnp.sum(node["b"] ** 3), None)
    total, _ = restructure.scan(turn, jnp.float32(0), stacks, "layers.*")
    return smooth(restructure(stacks)) + total + jnp.sum(restructure.part(stacks, "head") ** 2)


@jax.jit
def derivatives(stacks, restructure):
    """The value and the gradient, how both change, the model and the nodes."""
    of = jax.value_and_grad(lambda stacks: both_ways(stacks, restructure))
    return jax.jvp(of, (stacks,), (stacks,)), restructure(stacks), restructure.repeated(stacks, "layers.*")


@jax.jit
@jax.grad
def through_stacks(params, rest):
    return smooth(tp.stack(tp.combine(params, rest), FROZEN)[0])


def spec_of(array):
    """How an array lies, one entry for each axis."""
    spec = array.sharding.spec
    return (*spec, *[None] * (array.ndim - len(spec)))


def assert_equal(got, want, like=None):
    """Equal arrays, which lie as those of another tree."""
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert like is None or jax.tree.map(spec_of, got) == jax.tree.map(spec_of, like)


@explicit_within
def test_rows_of_stacks_lie_as_their_leaves(kind, within):
    mesh = mesh_of(kind, 2)
    model = over(mesh, ALIKE)
    with set_if(within, mesh):
        stacks, restructure = tp.stack(model, FROZEN)
        assert_equal(stacks, STACKS)
        assert [spec_of(stacks[f"float32[4{more}]"]) for more in (",2", "")] == [(None, "x", None), (None, "x")]
        back = restructure(stacks)
        assert_equal(back, model, like=model)
        for made in (restructure.ravel(back), restructure.ravel_gradient(back)):
            assert_equal(made, STACKS, like=stacks)
        node, head = restructure.repeated(stacks, "layers.*"), restructure.part(stacks, "head")
        found = [spec_of(each) for each in (node["w"], node["f"], head)]
        assert found == [(None, "x", None), (None, "x", None), ("x", None)]
        assert_equal(node["w"], np.stack([layer["w"] for layer in LAYERS["layers"]]))
        if kind == EXPLICIT:
            np.testing.assert_allclose(tp.global_norm(stacks), tp.global_norm(STACKS), 1e-6)


@auto_within
def test_views_of_stacks_over_devices(kind, within):
    mesh = mesh_of(kind, 2)
    with set_if(within, mesh):
        stacks, restructure = tp.stack(over(mesh, ALIKE), FROZEN)
        own = restructure.view(stacks)["layers.1.w"]
        assert_equal(own, LAYERS["layers"][1]["w"])
        assert spec_of(own) == ("x", None)
        cases = (
            ("layers.1.w", put(ramp(4, 2, start=5), mesh, None, "x"), {"layers.1.w": ramp(4, 2, start=5)}),
            (["head", "layers.1.b"], TWELVE, {"head": TWELVE[:8].reshape(4, 2), "layers.1.b": TWELVE[8:]}),
            ("layers.1.w", 3.0, {"layers.1.w": 3.0}),
            ("layers.0", None, {f"layers.0.{name}": LAYERS["layers"][0][name] for name in "bw"}),  # its own values
        )

        def changes(stacks):
            view = restructure.view(stacks)
            return [view.at[where].add(view[where] if value is None else value) for where, value, _ in cases]

        found = (jax.jit(changes) if kind == EXPLICIT else changes)(stacks)
        for changed, (_, _, at) in zip(found, cases, strict=True):
            want = jax.tree.map(np.array, STACKS)
            for path, added in at.items():
                _, key, row = WAY.place(path)
                want[key][row] += added
            assert_equal(changed, want, like=stacks)


def test_gradients_in_stacks_over_devices():
    """Over the axes of each row, and over the rows: layers that lie on different devices."""
    mesh = mesh_of(EXPLICIT, 2)  # on automatic axes a program knows nothing of devices, which are XLA's concern
    spec = lambda x: ("x",) if len(x) % 2 == 0 else (None, "x") if x.ndim > 1 and x.shape[1] == 4 else ()
    stacks, restructure = (jax.tree.map(lambda x: put(x, mesh, *spec(x)), tree) for tree in (STACKS, WAY))
    with jax.set_mesh(mesh):
        got = derivatives(stacks, restructure)
        assert_equal(restructure(stacks), LAYERS)
        assert_equal(restructure.view(stacks)["layers.1.w"], LAYERS["layers"][1]["w"])
    assert_near(got, derivatives(STACKS, WAY))
    for _, gradient in got[0]:
        assert jax.tree.map(spec_of, gradient) == jax.tree.map(spec_of, stacks)


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
    assert_equal(restructure(stacks), model, like=model)
    with jax.set_mesh(mesh):
        node = restructure.repeated(stacks, "*")
    assert_equal(node["t"], np.stack([ramp(4, 2, start=k) for k in range(4)]))


@explicit_within
def test_many_rows_outside_of_a_trace(kind, within, monkeypatch):
    monkeypatch.setattr(form, "_AT_ONCE", 4)
    mesh = mesh_of(kind, 2)
    model = put([ramp(2, 2, start=k) for k in range(8)], mesh, "x", None)
    with set_if(within, mesh):
        stacks, restructure = tp.stack(model)
        assert spec_of(stacks["float32[2,2]"]) == (None, "x", None)
        along_rows = {"float32[2,2]": put(stacks["float32[2,2]"], mesh, "x", None, None)}
        for given in (stacks, along_rows):
            assert_equal(restructure(given), model)
        assert {spec_of(leaf) for leaf in restructure(stacks)} == {("x", None)}
        assert_equal(restructure.repeated(along_rows, "*"), np.stack(model))


def test_stacks_in_shard_map():
    mesh = mesh_of(EXPLICIT)  # of either kind is the same where all of them are manual
    ((_, want), _), *_ = derivatives(STACKS, WAY)

    def step(stacks, restructure, x):
        gradient = jax.grad(lambda s: jax.lax.pmean(both_ways(s, restructure) * jnp.sum(x), "x"))(stacks)
        return gradient, tp.stack(restructure(stacks), FROZEN)[0], restructure.view(gradient)["head"]

    inside = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P("x")), out_specs=P())
    gradient, again, head = jax.jit(inside)(STACKS, WAY, put(np.ones(4, "f"), mesh, "x"))
    assert_near((gradient, head), (want, WAY.view(want)["head"]))
    assert_equal(again, STACKS)


def test_rows_that_run_in_turns_stay_on_their_devices():
    """As many rows at once as there are devices: each runs its own, and none is sent."""
    rows = put(ramp(16, 3), mesh_of(AUTO), "x")
    tx = optim.per_leaf(optax.sgd(0.1, momentum=0.9), at_once=4)
    update = jax.jit(tx.update).lower(rows, tx.init(rows), rows).compile()
    assert "all-gather" not in update.as_text()
    np.testing.assert_allclose(update(rows, tx.init(rows), rows)[0], -0.1 * np.asarray(rows), rtol=1e-6)
