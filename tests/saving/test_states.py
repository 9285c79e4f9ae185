"""A state of an optimiser is restored whatever was frozen and thawed when it was saved, also by a plan."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint
import pytest
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import treeparams as tp
from treeparams import optim, saving

from ..zoo import STACKS, filled, first_devices, ramp
from .files import bits, fresh, refused, taken, there_and_back

pytestmark = pytest.mark.usefixtures("standard_promotion")

SHARED = ramp(2, start=3)
MODEL = {"a": ramp(2), "b": [ramp(2, 2), SHARED], "*.c": ramp(), "d": filled(eqx.nn.Linear, 2, 1), "tied": SHARED}
NARROW = MODEL | {"a": ramp(2, dtype=jnp.bfloat16)}
SLOTS = tp.layout(MODEL).paths
NONE = jax.tree.map(lambda _: False, MODEL)
FLAX = nnx.State({
    name: {"bias": nnx.Param(ramp(size)), "kernel": nnx.Param(ramp(2, size))} for name, size in {"a": 3, "b": 1}.items()
})
MOMENTUM, ADAM = optax.sgd(0.1, momentum=0.9), optax.adam(0.01)
_zeros = lambda tree: jax.tree.map(jnp.zeros_like, tree)
RULES = {
    "momentum": optax.sgd(optax.linear_schedule(0.1, 0.0, 20), momentum=0.9),
    "clip": optax.chain(optim.clip_by_global_norm(1.0), ADAM),  # the histories share its last norm
    "master": optim.master(ADAM),
    # A part has nodes without arrays for the parameters of the others, and none for those that wait.
    "groups": optim.groups({"b": MOMENTUM}, default=ADAM),
    "one group keeps nothing": optim.groups({"b": optax.sgd(0.1)}, default=ADAM),
    "masked": optax.masked(optax.trace(0.9), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
    "rows": optim.per_leaf(optax.adafactor(0.01, min_dim_size_to_factor=2)),
    "adam": ADAM,
    # A state that is the gradients alone, and one that lists its leaves.
    "gradients": optax.GradientTransformation(_zeros, lambda updates, state, _: (updates, updates)),
    "listed": optax.GradientTransformation(lambda tree: jax.tree.leaves(_zeros(tree)), lambda *args: args[:2]),
}
_OF_FLAX = set(tp.layout(FLAX).paths)
_EACH, _PART = '"*.c"', {"a", "b.0", '"*.c"'}
# The rule, its form, and what trained first and then, each with whether a step was taken before; the model; and the
# state into which the file is loaded.
RUNS = [
    ("momentum", "tree", set(SLOTS), [], MODEL, "shapes"),
    ("momentum", "vector", {_EACH}, [], MODEL, "everything"),  # a scalar is a row of its vector, too
    ("clip", "tree", {"a"}, [({"b.0"}, True), (set(SLOTS), False), (set(), False)], NARROW, "a part"),
    ("clip", "vector", {"b.1", "d.weight"}, [({"b.1", "a", "b.0"}, True), ({"a"}, False)], NARROW, "a part"),
    ("master", "stacks", _PART, [({_EACH}, True), ({"a"}, True)], NARROW, "everything"),
    ("master", "tree", {"a", "b.1"}, [({"a"}, True), (set(SLOTS), True)], NARROW, "shapes"),
    ("groups", "tree", {"b.0", "a"}, [({"a", "b.1"}, True), ({"b.0"}, True)], MODEL, "a part"),
    ("groups", "tree", {"b.1"}, [], MODEL, "a part"),  # of one group neither has an array
    ("groups", "stacks", _PART, [({"b.0"}, True), (set(SLOTS), True)], MODEL, "shapes"),
    ("one group keeps nothing", "stacks", set(SLOTS), [({"b.0", "b.1"}, True)], MODEL, "everything"),
    ("masked", "tree", set(SLOTS), [({"b.0", "a"}, True)], MODEL, "everything"),
    ("rows", "stacks", _PART, [({_EACH, "b.1"}, True), ({"a"}, True), (set(SLOTS), True)], NARROW, "a part"),
    ("adam", "tree", _OF_FLAX, [({"b.bias", "b.kernel"}, True), (_OF_FLAX, False)], FLAX, "everything"),
    ("adam", "stacks", _OF_FLAX, [({"b.bias", "b.kernel"}, True)], FLAX, "everything"),
    *(("gradients", form, set(SLOTS), [({"a"}, True)], MODEL, "everything") for form in ("tree", "vector")),
    ("listed", "tree", set(SLOTS), [(set(SLOTS), True)], NARROW, "everything"),
]
with_ties = lambda paths: sorted(paths | {"tied"} if "b.1" in paths else paths)  # a tie is trained as a whole


def by_history(state):
    roles = state.roles
    histories = [*((True, *its) for its in roles.running), *((False, *its) for its in roles.held)]
    each = zip(histories, (*state.runs, *state.held), state.counts, strict=True)
    return {its: (jax.tree.structure(run), [*jax.tree.leaves(run), count]) for its, run, count in each}


def assert_has(state, other):
    ours, theirs = by_history(state), by_history(other)
    for its, (structure, leaves) in theirs.items():
        assert ours[its][0] == structure
        assert [leaf.dtype for leaf in ours[its][1]] == [leaf.dtype for leaf in leaves]
        np.testing.assert_equal(list(map(np.asarray, ours[its][1])), list(map(np.asarray, leaves)))
    return len(ours) == len(theirs)


_made = functools.cache(lambda rule, form, *trainable: optim.trainable(RULES[rule], *trainable, form=form))


@pytest.mark.filterwarnings("ignore:'b.1' and 'tied' were one array")  # of shapes alone they are not
@pytest.mark.parametrize(("rule", "form", "first", "then", "model", "started"), RUNS)
def test_a_state_is_restored_whatever_was_frozen_and_thawed(path, rule, form, first, then, model, started):
    tx = _made(rule, form)
    state = optim.set_trainable(tx, fresh(tx, model), model, with_ties(first), reset=True)
    for chosen, is_stepped in then:
        state = taken(state) if is_stepped else state
        state = optim.set_trainable(tx, state, model, with_ties(chosen) or NONE)
    start = _made(rule, form, "b.0") if started == "a part" else tx
    like = eqx.filter_eval_shape(tx.init, model) if started == "shapes" else fresh(start, model)
    got = there_and_back(path, {"state": state}, {"state": like})["state"]
    assert got.layout.paths == state.layout.paths
    thawed = lambda state: optim.set_trainable(tx, state, model)
    for change in (lambda state: state, thawed, lambda state: thawed(taken(state))):
        assert assert_has(change(got), change(state))
    assert assert_has(saving.loads(saving.dumps([state]), [like])[0][0], got)
    if started == "everything":
        assert_has(saving.plan(model, model).state(saving.names(path, "state"), like), state)


def make(seed):
    values = np.random.default_rng(seed).normal(size=(8, 4)).astype("f")
    values[0, :2] = np.nan, -0.0
    embed, low = jnp.asarray(values), functools.partial(ramp, dtype=jnp.bfloat16)
    layers = tuple({"weight": ramp(4, 4, start=i), "scale": low(4, start=i)} for i in range(4))
    return {"embed": embed, "layers": layers, "same": embed, "calls": jnp.asarray(seed), "activation": jax.nn.relu}


def sharding(leaf, devices):
    mesh = Mesh(np.array(first_devices(devices)), ("data",))
    axis = next((axis for axis, length in enumerate(leaf.shape) if length % devices == 0), None)
    return NamedSharding(mesh, PartitionSpec() if axis is None else PartitionSpec(*[None] * axis, "data"))


def shapes_over(tree):
    shape = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding(leaf, 2))
    return jax.tree.map(shape, tree)


TXS = {"stacked": STACKS(MOMENTUM), "histories": optim.trainable(MOMENTUM)}


def stepped(name, model):
    state = taken(TXS[name].init(model))
    for where in ("layers", "layers.1", "layers.0") if name == "histories" else ():
        state = taken(optim.set_trainable(TXS[name], state, model, tp.layout(model, freeze=where)))
    return jax.device_put(state)


TREES = {
    "stacks": lambda model: tp.stack(model)[0],
    "average": lambda model: tp.Ema(model, decay=0.9).update(model),
    **{name: lambda model, name=name: stepped(name, model) for name in TXS},
}
ORBAX = orbax.checkpoint.StandardCheckpointer()


def stored(folder, tree):
    ORBAX.save(folder, tree)
    ORBAX.wait_until_finished()
    return folder


def test_trees_come_back_bit_for_bit_over_fewer_devices(tmp_path):
    # From NumPy, since JAX compiles a program to cut an array of its own.
    lay = lambda leaf: jax.device_put(np.asarray(leaf), sharding(leaf, 4)) if eqx.is_array(leaf) else leaf
    trees = {name: jax.tree.map(lay, of(make(0))) for name, of in TREES.items()}
    like = {name: shapes_over(of(make(1))) for name, of in TREES.items()}
    back = ORBAX.restore(stored(tmp_path / "trees", trees), like)
    assert all(any(not leaf.is_fully_replicated for leaf in jax.tree.leaves(tree)) for tree in trees.values())
    assert (jax.tree.structure(back), bits(back)) == (jax.tree.structure(like), bits(trees))
    assert [leaf.sharding for leaf in jax.tree.leaves(back)] == [leaf.sharding for leaf in jax.tree.leaves(like)]


def test_a_state_restored_without_a_target_is_that_of_its_plan(tmp_path):
    model, pair = make(0), {"a": ramp(2), "b": ramp(2)}
    of_pair = {form: optim.trainable(MOMENTUM, form=form).init(pair) for form in ("vector", "stacks")}
    tx = optim.trainable(optim.groups({"layers": optax.inject_hyperparams(optax.adam)(0.1)}, default=MOMENTUM))
    state = tx.init(model)
    for choice in ("layers.[01]", "layers.[12]"):
        state = taken(optim.set_trainable(tx, state, model, choice))
    restored = ORBAX.restore(stored(tmp_path / "states", jax.device_put(of_pair | {"groups": state})))
    back = saving.plan(model, model).state(restored["groups"], like=tx.init(model))
    assert (jax.tree.structure(back), bits(back)) == (jax.tree.structure(state), bits(state))
    words = "nothing tells which parameters the arrays of the state are of"
    for form, like in of_pair.items():
        refused(words, saving.plan(pair, pair).state, restored[form], like=like)
