"""Numbers and texts of a tree: they come back as saved, or are refused by path; arrays that no pytree holds."""

import collections
import concurrent.futures
import dataclasses
import enum
import functools
import json
import logging
import sys
import threading
import types

import equinox as eqx
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving
from treeparams._files.values import from_words, in_words
from treeparams._tree.structure import scan_tree

from ..zoo import Net, ramp
from .files import planned, refused, there_and_back
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


@hypothesis.settings(max_examples=25, deadline=None)
@hypothesis.given(value=st.booleans() | st.integers() | st.floats() | st.complex_numbers() | st.text('a0."\0\\é😀'))
def test_any_number_and_any_text_in_words(value):
    assert exactly(from_words(json.loads(json.dumps(in_words(value))))) == exactly(value)


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


def test_what_does_not_fit_is_refused_by_path(path):
    for saved, like, words in [
        (5, ramp(), ["'x'", "float32[] in the tree", "int in the file"]),
        (5, jax.ShapeDtypeStruct((), jnp.int32), ["'x'", "int32[]", "int in the file", "filter_eval_shape"]),
        (np.float32(5), jnp.int32(5), ["'x'", "int32[]", "numpy.float32 in the file"]),
        (ramp(), 5, ["'x'", "int in the tree", "float32[] in the file", "jnp.asarray("]),
        (ramp(2), "text", ["'x'", "str in the tree", "float32[2] in the file", "jnp.asarray("]),
        (ramp(2), jnp.tanh, ["'x'", "function in the tree", "float32[2]"]),
        ("text", object(), ["'x'", "object in the tree", "str in the file"]),
        (jnp.tanh, 5, ["'x'", "in the tree and not in the file"]),
        (5, None, ["'x'", "which the tree lacks"]),
        ([5, 6], [5], ["'x.1'", "in the file and not in the tree", "nearest: 'x.0'", "saving.plan"]),
    ]:
        said = refused("does not fit", there_and_back, path, {"w": ramp(2), "x": saved}, {"w": ramp(2), "x": like})
        assert [word for word in words if word not in said] == []


@dataclasses.dataclass
class Buffer:
    items: object


class Slotted:
    __slots__ = ("_array", "empty")

    def __init__(self, array):
        self._array = array


HELD = {"array": ramp(2)}


def with_a_global(x, shift=HELD["array"]):
    return HELD["array"] + x + shift


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
    for why, leaves in {
        ", which JAX does not have, so it": [mapping, np.array(["a"]), tensor, np.longdouble(1), masked],
        " and not a pytree, so its array .*\\[2\\]": hidden(ramp(2)),
    }.items():
        for leaf in leaves:
            said = f"'x' is a {type(leaf).__qualname__}{why} would not be saved: keep arrays"
            refused(said, saving.save, tmp_path / "m", {"w": ramp(1), "x": leaf}, kind=TypeError)
    two = [Buffer(ramp(2)), {"a": collections.deque([ramp(2)])}]
    refused(r"(?s)'0' is a Buffer .*'1\.a' is a deque ", saving.save, tmp_path / "m", two, kind=TypeError)
    assert not any(tmp_path.iterdir())


def test_what_holds_no_array_is_left_alone(path):
    weight, cycle = ramp(2), Buffer(None)
    cycle.items = [cycle, {"a": cycle}, objects(cycle)]
    thread = threading.Thread(target=print)
    tree = {
        "w": weight,
        "functions": [lambda x: weight @ x, len, jnp.sin, jax.nn.relu, jax.nn.silu, jax.jit(jnp.sin), Buffer(1).__eq__],
        "closures": [jax.jit(lambda x: weight @ x), eqx.filter_jit(lambda x: weight @ x), with_a_global],
        "optax": optax.chain(optax.clip(1.0), optax.adam(0.1)),
        "wrapped": [eqx.nn.Lambda(jnp.tanh), jax.tree_util.Partial(jnp.add, weight), functools.partial(jnp.add, 1.0)],
        "others": [cycle, objects("a", 1), np.random.default_rng(0), logging.getLogger(), thread, threading.Lock()],
        "jax": [jax.devices()[0], jax.sharding.SingleDeviceSharding(jax.devices()[0])],
        "abstract": Buffer(jax.ShapeDtypeStruct((), int)),
        "classes": [Buffer, eqx, Colour.RED, np.float32, range(3), collections.deque([1, "a"])],
        "two looks away": [Buffer(collections.deque([weight])), types.SimpleNamespace(a=Slotted(weight))],
        "empty": Slotted.__new__(Slotted),
    }
    assert there_and_back(path, tree, tree)["others"] == tree["others"]


nested = lambda levels: functools.reduce(lambda tree, _: {"a": tree}, range(levels), ramp(2))


def in_thread(call):
    """Levels that jaxlib loses belong to a thread."""
    limit = sys.getrecursionlimit()
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        done = pool.submit(call)
    sys.setrecursionlimit(limit)
    return done


def test_a_deep_tree_is_saved_as_deep_as_jax_takes_it(path):
    taken = lambda tree: there_and_back(path, tree, tree)

    def too_deep(tree):
        for call in (saving.save, saving.load):
            refused(r"the tree is nested too deeply for jax\.tree\.flatten", call, path, tree)
        assert not tp.diff(taken(nested(500)), nested(500))  # there are levels left

    for levels in (700, 3000):
        tree = nested(levels)
        takes = in_thread(functools.partial(jax.tree.flatten, tree)).exception() is None
        assert takes or levels == 3000
        in_thread(functools.partial(taken if takes else too_deep, tree)).result()
    # Python has fewer levels than JAX from 3.12 on. There is no recursion in what reads a tree.
    _, treedef = jax.tree.flatten(nested(700))
    in_thread(lambda: [sys.setrecursionlimit(120), scan_tree(nested(700), [ramp(2)], treedef)]).result()


@pytest.mark.usefixtures("without_type_checks")
def test_the_path_comes_first(path):
    model = {"w": ramp(2)}
    for call in (saving.save, saving.load):
        for wrong in (model, eqx.nn.Identity(), jnp.tanh, ramp(2), None, 5, [path]):
            refused(rf"path of a file, got .* first: saving\.{call.__name__}\(", call, wrong, path, kind=TypeError)
        said = rf"expected a tree .*, got the text .* first: saving\.{call.__name__}"
        for tree in ("a text", path, bytes(path)):
            refused(said, call, "a text", tree, kind=TypeError)


@pytest.mark.parametrize("at", ["optimiser", ""])
def test_a_state_of_another_form_or_of_plain_optax_is_named_with_the_line_that_carries_it(path, at):
    model, rule = {"a": ramp(2), "b": ramp(3)}, optax.sgd(0.1, momentum=0.5)
    in_tree = lambda state: {"optimiser": state} if at else state
    stepped = lambda tx: optim.step(tx, tp.copy(model), tx.init(model), model)[1]
    for saved, wanted in [("tree", "vector"), ("tree", "stacks"), ("vector", "tree")][: 3 if at else 1]:
        tx, before = (optim.trainable(rule, form=form) for form in (wanted, saved))
        words = f"'{at}' has the form '{saved}' in the file, '{wanted}' in the"
        said = refused(words, there_and_back, path, in_tree(stepped(before)), in_tree(tx.init(model)))
        line = said.splitlines()[-1].removeprefix("state = ")
        assert not tp.diff(eval(line, {"saving": saving, "model": model, "tx": tx, "path": path}), stepped(tx))
    tx, words = optim.trainable(rule), f"'{at}' is one of plain Optax .* write state = optim.from_optax\\(tx, state"
    refused(words, there_and_back, path, in_tree(rule.init(model)), in_tree(tx.init(model)))
    theirs = saving.load(path, in_tree(rule.init(model)))
    assert not tp.diff(optim.from_optax(tx, theirs["optimiser"] if at else theirs, model), tx.init(model))
