"""What of a tree is no plain array: numbers, texts, refs, states of Equinox, nodes without keys, and what hides one."""

import collections
import dataclasses
import enum
import functools
import logging
import threading
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file

import treeparams as tp
from treeparams import optim, saving
from treeparams._files.values import from_words, in_words
from treeparams._tree.types import value_of

from ..zoo import Net, ramp, with_refs
from .files import lying, planned, refused, there_and_back
from .test_saving import JAX_DTYPES, WIDE, patterns


def exactly(value):
    if isinstance(value, np.generic):
        return type(value), value.tobytes()
    return type(value), hex(value) if type(value) is int else repr(value)


INTS = [0, -1, 10**18 - 1, 10**18, -(10**18), 2**64, -(3**20_000)]
Colour = enum.IntEnum("Colour", ["RED"])
FLOATS = [0.0, -0.0, 0.1, 5e-324, 1.7976931348623157e308, float("inf"), -float("inf"), float("nan")]
RUN = {
    **{f"int {i}": each for i, each in enumerate(INTS)},
    **{f"float {i}": each for i, each in enumerate(FLOATS)},
    **{f"complex {i}": complex(a, b) for i, (a, b) in enumerate((a, b) for a in FLOATS for b in FLOATS)},
    "flags": [True, False],
    "texts": ["", "gelu", 'é"\\\n\0\u2028😀', np.str_("of NumPy")],
    "numpy": [np.bool_(True), np.float32(0.1), np.int64(-(2**63)), np.uint64(2**64 - 1), np.complex128(1 - 0j)],
    "__metadata__": 1,
}


def test_numbers_and_texts_come_back_as_saved(path):
    fresh = jax.tree.map(lambda _: 0, RUN)
    saving.save(path, {"run": RUN, "w": ramp(2)})
    got = saving.load(path, {"run": fresh, "w": ramp(2)})["run"]
    assert list(map(exactly, jax.tree.leaves(got))) == list(map(exactly, jax.tree.leaves(RUN)))
    assert list(saving.names(path)) == ["w"]  # which are arrays
    assert planned(path, {"run": fresh, "w": ramp(2)})["run"] == fresh
    assert exactly(there_and_back(path, 5, 0.5)) == (int, "0x5")  # as few as one value, and no array


def test_numpy_scalars_of_each_dtype_with_every_bit():
    scalars = [scalar for name in [*JAX_DTYPES, *WIDE] for scalar in patterns(name).reshape(-1)]
    assert len(scalars) > 1000
    assert list(map(exactly, map(from_words, map(in_words, scalars)))) == list(map(exactly, scalars))


def test_a_run_goes_on_where_it_was(path):
    saving.save(path, {"epoch": 5, "lr": np.float32(0.1), "act": "gelu", "w": ramp(2)})
    fresh = lambda: {"epoch": 0, "lr": np.float32(1), "act": "relu", "w": jnp.zeros(2)}
    # `eqx.filter_eval_shape` makes an array without a value of a NumPy scalar; a number of Python stays one.
    for like in (fresh(), eqx.filter_eval_shape(fresh), {**fresh(), "epoch": np.int8(0), "lr": "text"}):
        run = saving.load(path, like)
        assert (run["epoch"], exactly(run["lr"]), run["act"]) == (5, exactly(np.float32(0.1)), "gelu")


def test_functions_objects_and_static_fields_are_those_of_like(path):
    here, there = object(), object()
    saved = [Net([ramp(2)], jnp.tanh, 3), here, None, Colour.RED, np.datetime64(0, "s"), b"bytes"]
    like = [Net([jnp.zeros(2)], jnp.sin, 4), there, None, here, np.datetime64(1, "s"), b""]
    got = there_and_back(path, saved, like)
    assert (got[0].activation, got[0].width, *got[1:]) == (jnp.sin, 4, *like[1:])
    np.testing.assert_array_equal(got[0].layers[0], ramp(2))


@dataclasses.dataclass
class Buffer:
    items: object


class Slotted:
    __slots__ = ("_array", "empty")

    def __init__(self, array):
        self._array = array


def objects(*items):
    array = np.empty(len(items), object)
    array[:] = items
    return array


def hidden(w):
    partial, scale, cached = functools.partial, eqx.nn.LayerNorm(2), lambda x: x
    cached.its = w
    held = [Buffer(w), Buffer([{"a": (1, eqx.nn.Lambda(w))}]), types.SimpleNamespace(a=[w]), Slotted(w)]
    held += [collections.deque([1, w]), type("Names", (list,), {})([w]), objects(1, [w]), Buffer(np.asarray(w)), cached]
    held += [jax.vmap(scale), jax.checkpoint(scale), jax.jit(scale), jax.jit(jax.vmap(scale)), partial(scale, 1)]
    return [*held, Buffer(jax.random.split(jax.random.key(0))), partial(jnp.add, w), partial(jnp.add, y=w)]


def test_an_array_that_would_not_be_saved_is_refused_and_all_are_named(tmp_path):
    tensor = type("Tensor", (), {"shape": (2,), "dtype": "float32"})()
    masked, mapping = np.ma.masked_array([1.0], [True]), types.MappingProxyType({"a": ramp(2)})
    has_refs = hasattr(jax, "Ref")  # before JAX 0.7.2 the type of refs is private
    refs = [types.SimpleNamespace(mean=jax.new_ref(jnp.ones(2)))] if has_refs else []
    for why, leaves in {
        ", which JAX does not have, so it": [mapping, np.array(["a"]), tensor, np.longdouble(1), masked],
        " and not a pytree, so its array .*\\[2\\]": [*hidden(ramp(2)), *refs],
    }.items():
        for leaf in leaves:
            said = f"'x' is a {type(leaf).__qualname__}{why} would not be saved: keep arrays"
            refused(said, saving.save, tmp_path / "m", {"w": ramp(1), "x": leaf}, kind=TypeError)
    two = [Buffer(ramp(2)), {"a": collections.deque([ramp(2)])}]
    refused(r"(?s)'0' is a Buffer .*'1\.a' is a deque ", saving.dumps, two, kind=TypeError)
    assert not any(tmp_path.iterdir())


def test_what_holds_no_array_is_left_alone(path):
    weight, cycle = ramp(2), Buffer(None)
    cycle.items = [cycle, {"a": cycle}, objects(cycle)]
    thread = threading.Thread(target=print)
    tree = {
        "w": weight,
        "functions": [lambda x: weight @ x, len, jax.nn.relu, jax.jit(jnp.sin), Buffer(1).__eq__],
        "closures": [jax.jit(lambda x: weight @ x), eqx.filter_jit(lambda x: weight @ x)],
        "optax": optax.chain(optax.clip(1.0), optax.adam(0.1)),
        "wrapped": [eqx.nn.Lambda(jnp.tanh), jax.tree_util.Partial(jnp.add, weight), functools.partial(jnp.add, 1.0)],
        "others": [cycle, objects("a", 1), np.random.default_rng(0), logging.getLogger(), thread, threading.Lock()],
        "two looks away": [Buffer(collections.deque([weight])), types.SimpleNamespace(a=Slotted(weight))],
        "empty": [Slotted.__new__(Slotted), Buffer(jax.ShapeDtypeStruct((), int))],
    }
    assert there_and_back(path, tree, tree)["others"] == tree["others"]


@functools.partial(jax.jit, static_argnums=0)
def _stepped(tx, grads, model):
    return optim.step(tx, grads, tx.init(model), model)[1]


def test_a_state_of_another_form_or_of_plain_optax_is_named_with_the_line_that_carries_it(path):
    model, rule = {"a": ramp(2), "b": ramp(3)}, optax.sgd(0.1, momentum=0.5)
    for saved, wanted, at in [("tree", "vector", "optimiser"), ("vector", "tree", "optimiser"), ("tree", "stacks", "")]:
        in_tree = lambda state, at=at: {at: state} if at else state
        tx, before = (optim.trainable(rule, form=form) for form in (wanted, saved))
        words = f"'{at}' has the form '{saved}' in the file, '{wanted}' in the"
        state, fresh = _stepped(before, model, model), tx.init(model)
        said = refused(words, there_and_back, path, in_tree(state), in_tree(fresh))
        line = said.splitlines()[-1].removeprefix("state = ")
        carried = eval(line, {"saving": saving, "model": model, "tx": tx, "path": path})
        assert not tp.diff(carried, _stepped(tx, model, model))
        tx, words = optim.trainable(rule), f"'{at}' is one of plain Optax .* write state = optim.from_optax\\(tx, state"
        refused(words, there_and_back, path, in_tree(rule.init(model)), in_tree(tx.init(model)))
    assert not tp.diff(optim.from_optax(tx, saving.load(path, rule.init(model)), model), tx.init(model))


without_refs = lambda: {name: value_of(leaf) for name, leaf in with_refs().items()}
fresh_refs = lambda: (
    with_refs() | {"w": jnp.zeros(2), "mean": jax.new_ref(jnp.zeros(3)), "steps": jax.new_ref(jnp.array(0))}
)
FROM_FILES = (saving.load, planned, lambda path, like: saving.loads(path.read_bytes(), like)[0])


def assert_full(model):
    for name, want in {"w": ramp(2), "mean": [7, 7, 7], "steps": 4}.items():
        np.testing.assert_array_equal(value_of(model[name]), want)


def test_a_file_has_the_values_of_refs_and_the_digest_of_arrays(path):
    model, files = with_refs(), []
    for tree in (without_refs(), model):
        saving.save(path, tree)
        files.append(path.read_bytes())
    assert files[0] == files[1]
    assert saving.dumps(without_refs()) == saving.dumps(model)
    stored = load_file(path)
    assert sorted(stored) == ["mean", "seen", "steps", "w"]
    for names in (stored, saving.names(model), saving.names({"net": model}, "net"), saving.names(path)):
        assert sorted(names) == sorted(stored)
        np.testing.assert_array_equal(names["mean"], [7, 7, 7])


def test_what_is_loaded_is_written_into_refs(path):
    saving.save(path, with_refs())
    of_memory = lambda _, like: planned(with_refs(), like)
    of_theirs = lambda path, like: saving.plan(saving.names(path), like)(load_file(path))
    for load in (*FROM_FILES, of_memory, of_theirs):
        like = fresh_refs()
        got = load(path, like)
        assert (got["mean"], got["steps"]) == (like["mean"], like["steps"])
        assert_full(got)
        got = load(path, {**like, "mean": jnp.zeros(3), "steps": jnp.array(0)})
        assert isinstance(got["mean"], jax.Array)
        assert_full(got)
    like = fresh_refs()
    got = saving.plan({"mean": np.ones(3, np.float32)}, like, strict=False)({"mean": np.full(3, 2, np.float32)})
    np.testing.assert_array_equal(like["mean"][...], [2, 2, 2])  # what comes, and nothing else
    assert got["steps"] is like["steps"]
    assert int(like["steps"][...]) == 0


def test_nothing_is_written_before_all_is_checked(path):
    saving.save(path, with_refs())
    path.write_bytes(path.read_bytes()[:-1] + b"\xff")
    like = fresh_refs()
    for load in FROM_FILES:
        refused("checksum", load, path, like)
        refused("mean", load, path, {**like, "mean": jax.new_ref(jnp.zeros(2))})
        np.testing.assert_array_equal(like["mean"][...], [0, 0, 0])
        assert int(like["steps"][...]) == 0


def test_changes_of_refs_keys_and_refs_at_two_paths(path):
    have, model = with_refs(), with_refs()
    model["mean"][...] = jnp.array([7.0, 8.0, 7.0])
    got, _ = saving.loads(saving.dumps(model, version=2, since=(1, with_refs())), have, version=1)
    assert got["mean"] is have["mean"]
    np.testing.assert_array_equal(have["mean"][...], [7, 8, 7])
    refs = [jax.new_ref(jnp.full(2, fill)) for fill in (1.0, 0.0)]
    model, like = ({"key": jax.new_ref(jax.random.key(i)), "a": ref, "b": ref} for i, ref in enumerate(refs))
    saving.save(path, model)
    got = saving.load(path, like)
    assert got["a"] is got["b"] is like["a"]
    np.testing.assert_array_equal(got["a"][...], [1, 1])
    np.testing.assert_array_equal(*(jax.random.key_data(its["key"][...]) for its in (got, model)))


@pytest.mark.skipif(not hasattr(nnx, "with_vars"), reason="this version of Flax has no variables that are refs")
def test_a_model_of_nnx_under_ref(path):
    with nnx.var_defaults(ref=True):
        state, like = (nnx.State({"kernel": nnx.Param(ramp(2, 3, start=start))}) for start in (0, 1))
    saving.save(path, state)
    assert sorted(load_file(path)) == sorted(saving.names(state)) == ["kernel"]
    saving.load(path, like)
    np.testing.assert_array_equal(like["kernel"][...], ramp(2, 3, start=0))


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
    thawed = tp.layout(tree, thaw="state.second")  # a glob selects what lies below, as of a node
    index = "state.second.ema_state_index"
    assert [path for path in thawed.paths if path.startswith("state")] == [f"{index}.0", f"{index}.1"]
    assert tp.layout(tree, thaw="state.*.ema_state_index.0").paths[-2:] == (names[1], names[3])
    assert list(tp.trainables(tree, thawed))[-1] == f"{index}.1"


ADAM = optax.adam(1.0)
TREES = {
    "0.first.ema_state_index.0": lambda m, s: (s, m),
    # Beside an optimiser, and within one; and without one of its layers.
    "s.first.ema_state_index.0": lambda m, s: {"a": ADAM.init(eqx.filter(m, eqx.is_array)), "m": m, "s": s},
    "runs.0.0.mu.1.first.ema_state_index.0": lambda *ms: optim.trainable(ADAM, tp.layout(ms, thaw="1")).init(ms),
    "1.1.0": lambda m, s: (m.first, s),
}


def test_a_name_is_the_path_of_the_index_in_the_model():
    its = run(Then)
    for name, tree in TREES.items():
        assert name in saving.names(tree(its["model"], its["state"]))
    differ = tp.diff(run(Then, 1, 2), run(Grown, 1, 3))
    assert {"state.inserted.ema_state_index", "state.second.ema_state_index.0"} <= set(differ.paths)
    assert not [path for path in differ.paths if path == "state" or path.startswith("state.first")]


def test_fields_may_change_places_and_a_layer_that_is_inserted_shifts_no_other(path):
    saving.save(path, run(Then, 1, 2))
    assert means(saving.load(path, run(Swapped))) == means(planned(path, run(Swapped))) == [1, 2]
    plan = saving.plan(path, run(Grown), strict=False)
    assert means(plan(path)) == [1, 2]
    assert "state.inserted.ema_state_index.0" in plan.missing


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


def test_nodes_without_keys_go_by_position_into_the_same_class_or_as_a_plan_says(path):
    full = normal(loc=3.0, scale=4.0)
    saving.save(path, full)
    message = saving.dumps(full)
    for load in (*FROM_FILES, lambda _, like: saving.loads(message, like)[0]):
        assert jax.tree.leaves(load(path, normal(LIKE_NORMAL))) == [3, 4]
    refused(r"'dist' is a Normal of 2 children .* in the message", saving.loads, message, ANOTHER)
    swapped = planned(path, ANOTHER, rename={"dist.0": "dist.1", "dist.1": "dist.0"})
    assert jax.tree.leaves(swapped) == [4, 3]
    keyed = planned(path, normal(KEYED), rename={"dist.0": "dist.loc", "dist.1": "dist.scale"})
    assert jax.tree.leaves(keyed) == [3, 4]
    # A file, and arrays as of PyTorch, that say nothing of a class.
    lying(path, path.read_bytes(), lambda words: words.pop("unkeyed") and None)
    for load in (saving.load, planned):
        assert float(load(path, ANOTHER)["dist"].rate) == 3
    assert planned({"dist.0": np.array(3, "f4"), "dist.1": np.array(4, "f4")}, normal())["dist"].loc == 3
    saving.save(path, ANOTHER)
    refused(r"a Normal of 2 children without keys at 'dist'.* another class", saving.plan(full, full), path)


@pytest.mark.parametrize("name", OTHERS)
def test_another_class_or_number_is_refused(path, name):
    for saved, like in ((OTHERS[name], normal()), (normal(), OTHERS[name])):
        saving.save(path, saved)
        message = "'dist' is a.* of 2 children without keys.*register_pytree_with_keys"
        for call, source in ((saving.load, path), (saving.plan, path), (saving.plan, saved)):
            refused(message, call, source, like)
        plan = saving.plan(path, like, strict=False)
        assert any("register_pytree_with_keys" in why for why in plan.disagrees)
        assert all(a is b for a, b in zip(jax.tree.leaves(plan(path)), jax.tree.leaves(like), strict=True))
