"""plan.state over many rules, in all forms: what it makes is what regrouping by owners makes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import optim, saving
from treeparams._forms.form import vector_of
from treeparams._forms.states import Copies, entries_of
from treeparams._slots.layout import index_of
from treeparams.optim._state import Roles, TrainableState, rule_of
from treeparams.optim._step import Rule

from ..zoo import STACKS, VECTOR, assert_same, ramp

pytestmark = pytest.mark.usefixtures("standard_promotion")

# -- States without a program ------------------------------------------------------------------------------------------


def _fresh(rule, layout, start=0):
    """A state of NumPy arrays, with numbers that are not those of another one, and no trial of the rule."""
    like, at = rule.like(layout), index_of(layout).positions
    leaves, treedef = jax.tree.flatten(like.state)
    arrays = [np.asarray(np.arange(x.size).reshape(x.shape) + start + 50 * i, x.dtype) for i, x in enumerate(leaves)]
    roles = Roles(layout, (at,), (), (like.division,))
    return TrainableState((treedef.unflatten(arrays),), (), (np.array(int(start > 0), np.int32),), roles)


def _copies(state, number=0):
    return Copies(entries_of(state.runs[number]), state.roles.divisions[number])


def _pieces(copies, names=lambda path: path):
    """What each parameter has, alone, by place and name; and what is shared."""
    alone = {(at, names(path)): copies.piece(at, path).alone() for at, path in copies.at}
    return alone | {entries: copies.shared(entries) for entries in copies.common}


def _assert_pieces(got, want):
    assert got.keys() == want.keys()
    for at, array in want.items():
        np.testing.assert_array_equal(got[at], array)
    return len(want)


OLD = {"x": ramp(2, 3), "y": ramp(2, 3), "deep": {"z": ramp(3)}, "s": ramp()}
NEW = {"x": ramp(2, 3), "y": ramp(2, 3), "w": ramp(3), "s": ramp()}
MORE = {"begins": ramp(2, 3), "late": ramp(2)}
RENAME = {"x": "y", "y": "x", "deep.z": "w"}
OLD_LAYOUT, NEW_LAYOUT = tp.layout(OLD), tp.layout(NEW)
NAMES = RENAME | {"s": "s"}

FORMS = {
    "tree": optim.trainable,
    "vector": VECTOR,
    "stacks": STACKS,
}
_matrices = functools.partial(jax.tree.map, lambda x: x.ndim == 2)
_injected = optax.inject_hyperparams(optax.adam)(0.1)
# One rule for each kind of state: most of Optax keep some moments and a count, as Adam does.
ELEMENTWISE = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "schedule": optax.sgd(optax.linear_schedule(0.1, 0.0, 9)),
    "adam": optax.adam(0.1),
    "rprop": optax.rprop(0.1),
    "chain": optax.chain(optim.clip_by_global_norm(1.0), optax.clip_by_global_norm(2.0), optax.adam(0.1)),
    "injected": _injected,
    "MultiSteps": optax.MultiSteps(optax.adam(0.1), 3).gradient_transformation(),
    "if finite": optax.apply_if_finite(optax.adam(0.1), 3),
    "plateau": optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau()),
    "ema": optax.chain(optax.ema(0.9), optax.trace(0.9)),
    "cocob": optax.contrib.cocob(),
    "prodigy": optax.contrib.prodigy(),
    "schedule free": optax.contrib.schedule_free(optax.sgd(0.1), 0.1),
}
BY_SHAPE = {
    "novograd": optax.novograd(0.1),
    "sm3": optax.sm3(0.1),
    "adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "muon": optax.contrib.muon(0.1),
    "masked": optax.masked(optax.trace(0.9), _matrices),
    "per leaf": optim.per_leaf(optax.adam(0.1)),
    "injected per leaf": optim.per_leaf(_injected),
    "factored per leaf": optim.per_leaf(optax.adafactor(0.1, min_dim_size_to_factor=2)),
    "groups": optim.groups({("x", "y"): optax.adam(0.1)}, default=optax.sgd(0.1, momentum=0.9)),
    "groups per leaf": optim.groups({("x", "y"): optim.per_leaf(_injected)}, default=optax.adam(0.1)),
}
RULES = ELEMENTWISE | BY_SHAPE
# Over the vector and the tree, which have the pieces of the stacks by themselves, a few.
FEW = ["adam", "injected", "MultiSteps"]
AS_TREES = ["novograd", "sm3", "adafactor", "muon", "masked", "groups"]
CASES = [
    *((name, form) for name in FEW for form in ("tree", "vector")),
    *((name, "tree") for name in AS_TREES),
    *((name, "stacks") for name in RULES if name not in AS_TREES[:4]),
]


def _cases(cases):
    return pytest.mark.parametrize(("name", "form"), cases, ids=map("-".join, cases))


@functools.cache
def _rule(name, form):
    return rule_of(FORMS[form](RULES[name]))


@functools.cache
def _plans():
    back = {right: left for left, right in RENAME.items()}
    return saving.plan(OLD_LAYOUT, NEW, rename=RENAME), saving.plan(NEW_LAYOUT, OLD, rename=back)


@_cases(CASES)
def test_there_and_back(name, form):
    rule, (there, back) = _rule(name, form), _plans()
    state, like = _fresh(rule, OLD_LAYOUT, 7), _fresh(rule, NEW_LAYOUT)
    carried = there.state(state, like)
    assert jax.tree.structure(carried) == jax.tree.structure(like)
    _assert_pieces(_pieces(_copies(carried)), _pieces(_copies(state), NAMES.__getitem__))
    assert_same(back.state(carried, _fresh(rule, OLD_LAYOUT)), state)


@_cases([
    ("adam", "vector"),
    ("prodigy", "stacks"),
    ("injected per leaf", "stacks"),
    ("sm3", "tree"),
    ("groups", "tree"),
])
def test_what_begins_is_fresh_and_the_rest_as_it_was(name, form):
    rule, model = _rule(name, form), OLD | MORE
    layout = tp.layout(model)
    state, like = _fresh(rule, OLD_LAYOUT, 7), _fresh(rule, layout)
    made = saving.plan(OLD, model, strict=False).state(state, like)
    assert [each.layout.paths for each in rule.histories(made)] == [OLD_LAYOUT.paths, ("begins", "late")]
    _assert_pieces(_pieces(_copies(made)), _pieces(_copies(state)))
    begun, fresh = (_pieces(_copies(its, number)) for its, number in ((made, 1), (like, 0)))
    _assert_pieces(begun, {at: fresh[at] for at in begun})


# -- What begins is as what thaws --------------------------------------------------------------------------------------

_PER_LEAF = optim.per_leaf(_injected)


def test_a_parameter_that_begins_is_as_one_that_is_thawed():
    """The rule never sees the state that is cut out for some of its parameters."""
    tx = optim.trainable(optim.groups({"[xd]*": _PER_LEAF}, default=_PER_LEAF), form="stacks")
    old = {"x": ramp(2, 3), "y": ramp(2, 3)}
    new = old | {"d": ramp(2, 3), "w": ramp(2, 3)}
    # Moments and counts after some steps, and rates as they were made.
    more = lambda state: jax.tree.map(lambda x: x + 1 if x.ndim == 3 or x.dtype == jnp.int32 else x, state)
    fresh = tx.init(new)
    thawed = optim.set_trainable(tx, more(optim.set_trainable(tx, fresh, new, ("x", "y"), reset=True)), new)
    made = saving.plan(old, new, strict=False).state(more(tx.init(old)), fresh)
    assert made.roles.running == thawed.roles.running
    change = lambda state: optim.set_trainable(tx, optim.set_trainable(tx, state, new, ("y", "d")), new)
    for one, other in ((made, thawed), (change(made), change(thawed))):
        assert_same((one.runs, one.counts), (other.runs, other.counts))
    update = jax.jit(tx.update)
    assert_same(*(update(new, optim.adjust(each, learning_rate=0.5), new)[0] for each in (made, thawed)))


# -- Wrong before ------------------------------------------------------------------------------------------------------


def test_what_two_parameters_have_changes_places_with_them():
    """SM3 keeps a list of vectors for each parameter, without its name."""
    model, tx = {"x": ramp(2, 3), "y": ramp(2, 3)}, optim.trainable(optax.sm3(0.1))
    filled = lambda x, y: {"x": [np.full(2, x, "f"), np.full(3, x, "f")], "y": [np.full(2, y, "f"), np.full(3, y, "f")]}
    state = tx.init(model)
    is_sm3 = lambda node: hasattr(node, "mu")
    fill = lambda node: node._replace(mu=filled(1, 100)) if is_sm3(node) else node
    state = dataclasses.replace(state, runs=jax.tree.map(fill, state.runs, is_leaf=is_sm3))
    plan = saving.plan(model, model, rename={"x": "y", "y": "x"})
    (made,) = [node for node in jax.tree.leaves(plan.state(state, tx.init(model)).runs, is_leaf=is_sm3) if is_sm3(node)]
    assert_same(made.mu, filled(100, 1), identity=False)


@pytest.mark.parametrize("make", [lambda n: {"head": ramp(n, 3), "b": ramp(2)}, lambda n: [ramp(n, 3), ramp(7, 2)]])
def test_a_padded_vector_is_not_opened_as_another_one(make, tmp_path):
    """Of 10 classes or of 11 it is as long."""
    path, runs = tmp_path / "run.safetensors", []
    for classes in (10, 11):
        layout = tp.layout(make(classes))
        form = vector_of(layout, pad_to=128)
        rule = Rule(optax.adam(0.1), None, lambda _, form=form: form)
        vector, restructure = tp.ravel(make(classes), pad_to=128)
        runs.append(({"vector": vector, "back": restructure}, {"vector": vector, "state": _fresh(rule, layout, 1)}))
    for ours, theirs in zip(*runs, strict=True):
        saving.save(path, ours)
        assert_same(jax.tree.leaves(saving.load(path, ours)), jax.tree.leaves(ours))
        with pytest.raises(ValueError, match=r"of shape \(11, 3\) in the tree, .*of shape \(10, 3\) in the file"):
            saving.load(path, theirs)


def test_a_vector_of_the_same_parameters_in_another_order_is_not_opened(tmp_path):
    path = tmp_path / "run.safetensors"
    one, other = (dataclasses.make_dataclass("Model", names) for names in (["a", "b"], ["b", "a"]))
    for cls in (one, other):
        jax.tree_util.register_dataclass(cls, [field.name for field in dataclasses.fields(cls)], [])
    runs = [dict(zip(("vector", "back"), tp.ravel(cls(a=ramp(2), b=ramp(2) + 1)), strict=True)) for cls in (one, other)]
    saving.save(path, runs[0])
    with pytest.raises(ValueError, match=r"'back' opens, 'b' is \[0:2\] of shape \(2,\) in the tree, \[2:4\] of shape"):
        saving.load(path, runs[1])
