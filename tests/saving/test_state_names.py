"""Values of an `eqx.nn.State` go by the name of their layer, and children of nodes without keys by position."""

import dataclasses

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving

from .files import lying, planned, refused


def model_of(*names):

    def init(self):
        for name in names:
            setattr(self, name, eqx.nn.BatchNorm(3, "batch", mode="ema"))

    return type("Layers", (eqx.Module,), {"__annotations__": dict.fromkeys(names, eqx.Module), "__init__": init})


Then, Swapped, Grown = model_of("first", "second"), model_of("second", "first"), model_of("first", "inserted", "second")


def run(cls, first=None, second=None):
    model, state = eqx.nn.make_with_state(cls)()
    for layer, mean in ((model.first, first), (model.second, second)):
        if mean is not None:
            state = state.set(layer.ema_state_index, (jnp.full(3, mean, "f4"), jnp.full(3, 10 + mean, "f4")))
    return {"model": model, "state": state}


def means(run):
    return [float(run["state"].get(getattr(run["model"], name).ema_state_index)[0][0]) for name in ("first", "second")]


def test_one_name_in_files_plans_walks_layouts_and_averages(path):
    tree = run(Then, 1, 2)
    values = ("ema_first_time_index", "ema_state_index.0")
    names = [f"state.{name}.{its}" for name in ("first", "second") for its in values]
    saving.save(path, tree)
    assert set(names) <= set(saving.names(path)) == set(saving.names(tree))
    assert set(names) <= {row.path for row in saving.plan(path, tree).rows}
    thawed = tp.layout(tree, thaw="state.second")  # a glob selects what lies below, as of a node
    index = "state.second.ema_state_index"
    assert [path for path in thawed.paths if path.startswith("state")] == [f"{index}.0", f"{index}.1"]
    assert tp.layout(tree, thaw="state.*.ema_state_index.0").paths[-2:] == (names[1], names[3])
    assert list(tp.trainables(tree, thawed))[-1] == f"{index}.1"


ADAM = optax.adam(1.0)
TREES = [
    (lambda m, s: (m, s), "1.first.ema_state_index.0"),
    (lambda m, s: (s, m), "0.first.ema_state_index.0"),
    # Beside an optimiser, and within one; alone, and without one of its layers.
    (lambda m, s: {"a": ADAM.init(eqx.filter(m, eqx.is_array)), "m": m, "s": s}, "s.first.ema_state_index.0"),
    (lambda *ms: optim.trainable(ADAM, tp.layout(ms, thaw="1")).init(ms), "runs.0.0.mu.1.first.ema_state_index.0"),
    (lambda m, s: s, "1.0"),
    (lambda m, s: (m.first, s), "1.1.0"),
]


@pytest.mark.parametrize(("tree", "want"), TREES, ids=[want for _, want in TREES])
def test_a_name_is_the_path_of_the_index_in_the_model(tree, want):
    its = run(Then)
    assert want in saving.names(tree(its["model"], its["state"]))


def test_a_diff_is_by_name():
    before, after = run(Then, 1, 2), run(Grown, 1, 3)
    differ = tp.diff(before, after)
    assert {"state.inserted.ema_state_index", "state.second.ema_state_index.0"} <= set(differ.paths)
    assert not [path for path in differ.paths if path.startswith("state.first")]
    assert not [row for row in differ.rows if row.path == "state"]  # its keys differ, and each is named


def test_fields_may_change_places_and_a_layer_that_is_inserted_shifts_no_other(path):
    saving.save(path, run(Then, 1, 2))
    assert means(saving.load(path, run(Swapped))) == means(planned(path, run(Swapped))) == [1, 2]
    plan = saving.plan(path, run(Grown), strict=False)
    assert means(plan(path)) == [1, 2]
    assert "state.inserted.ema_state_index.0" in plan.missing
    refused(r"'state.inserted.ema_state_index.0' is in the tree and not in", saving.load, path, run(Grown))


def test_a_state_alone_goes_by_number_and_never_into_one_with_names(path):
    tree = run(Then, 1, 2)
    saving.save(path, tree["state"])
    assert sorted(saving.names(path)) == ["0", "1.0", "1.1", "2", "3.0", "3.1"]
    assert means({**tree, "state": saving.load(path, run(Then)["state"])}) == [1, 2]
    refused(r"(?s)'' is a State of 4 children .* 6 .*model in one tree", saving.load, path, run(Grown)["state"])
    alone = {"state": tree["state"]}
    for saved, like in ((alone, tree), (tree, alone)):
        saving.save(path, saved)
        for call in (saving.load, saving.plan):
            refused(r"'state' is .*the names of its layers.*; save a state and its model in one tree", call, path, like)


def without_keys(name, *fields):
    cls = type(name, (), {"__init__": lambda self, **values: vars(self).update(values)})
    flatten = lambda each: (tuple(getattr(each, field) for field in fields), None)
    jtu.register_pytree_node(cls, flatten, lambda _, values: cls(**dict(zip(fields, values, strict=True))))
    return cls


NORMAL, GAMMA, STUDENT = (
    without_keys(name, *fields)
    for name, fields in {"Normal": ["loc", "scale"], "Gamma": ["rate", "shape"], "Student": "abc"}.items()
)
LIKE_NORMAL = without_keys("Normal", "loc", "scale")  # as the class is called in another process
KEYED = jtu.register_dataclass(dataclasses.make_dataclass("Normal", ["loc", "scale"]), ["loc", "scale"], [])
normal = lambda cls=NORMAL, loc=0.0, scale=1.0: {"dist": cls(loc=jnp.array(loc), scale=jnp.array(scale))}
ZERO = jnp.array(0.0)
ANOTHER = {"dist": GAMMA(rate=ZERO, shape=ZERO + 1)}
OTHERS = {"class": ANOTHER, "number": {"dist": STUDENT(a=ZERO, b=ZERO + 1, c=ZERO + 2)}, "with keys": normal(KEYED)}


def test_nodes_without_keys_go_by_position_into_the_same_class(path):
    saving.save(path, normal(loc=3.0, scale=4.0))
    like, message = normal(LIKE_NORMAL), saving.dumps(normal(loc=3.0, scale=4.0))
    for got in (saving.load(path, like), planned(path, like), saving.loads(message, like)[0]):
        assert (float(got["dist"].loc), float(got["dist"].scale)) == (3, 4)
    refused(r"'dist' is a Normal of 2 children .* in the message", saving.loads, message, ANOTHER)


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize("is_saved", [True, False])
def test_another_class_or_number_is_refused(path, name, is_saved):
    saved, like = (OTHERS[name], normal()) if is_saved else (normal(), OTHERS[name])
    saving.save(path, saved)
    message = "'dist' is a.* of 2 children without keys.*register_pytree_with_keys"
    for call, source in ((saving.load, path), (saving.plan, path), (saving.plan, saved)):
        refused(message, call, source, like)
    plan = saving.plan(path, like, strict=False)
    assert any("register_pytree_with_keys" in why for why in plan.disagrees)
    assert all(a is b for a, b in zip(jax.tree.leaves(plan(path)), jax.tree.leaves(like), strict=True))


def test_an_explicit_rename_goes_into_another_class(path):
    saving.save(path, normal(loc=3.0, scale=4.0))
    swapped = planned(path, ANOTHER, rename={"dist.0": "dist.1", "dist.1": "dist.0"})
    assert jax.tree.leaves(swapped) == [4, 3]
    keyed = planned(path, normal(KEYED), rename={"dist.0": "dist.loc", "dist.1": "dist.scale"})
    assert jax.tree.leaves(keyed) == [3, 4]
    plan = saving.plan(normal(), normal())
    saving.save(path, ANOTHER)
    refused(r"a Normal of 2 children without keys at 'dist'.* another class", plan, path)


def test_unmarked_files_load_by_position(path):
    saving.save(path, normal(loc=3.0))
    lying(path, path.read_bytes(), lambda words: words.pop("unkeyed") and None)
    for load in (saving.load, planned):
        assert float(load(path, ANOTHER)["dist"].rate) == 3
    flat = {"dist.0": np.array(3, "f4"), "dist.1": np.array(4, "f4")}
    for arrays in (flat, {"dist": dict(zip("01", flat.values(), strict=True))}):  # as of PyTorch, and of Orbax
        assert planned(arrays, normal())["dist"].loc == 3
