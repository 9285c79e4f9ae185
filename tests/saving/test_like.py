"""load into a tree: its ties and the file's, all that does not fit at once, and where the arrays lie."""

import re

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec as P, SingleDeviceSharding

import treeparams as tp
from treeparams import optim, saving
from treeparams._files.file import File
from treeparams._files.source import OnDisk

from ..zoo import assert_same, first_devices, ramp
from .test_saving import assert_bits, emptied, there_and_back


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Each test writes it anew."""
    return tmp_path_factory.mktemp("saving") / "model.safetensors"


# -- Ties --------------------------------------------------------------------------------------------------------------


class Frozen(eqx.Module):
    a: jax.Array = tp.field(trainable=False)
    b: jax.Array = tp.field(trainable=False)


def with_state(is_one):
    norm = eqx.nn.BatchNorm(3, "batch", mode="ema")
    state = eqx.nn.State(norm)  # its arrays are those in the norm
    return norm, state if is_one else jax.tree.map(jnp.ones_like, state)


UNTRAINED = {
    "frozen": lambda is_one: Frozen(shared := ramp(3), shared if is_one else ramp(3) + 1),
    "integers": lambda is_one: {"a": (zero := jnp.array(0)), "b": zero if is_one else jnp.array(1)},
    "keys": lambda is_one: {"a": (key := jax.random.key(0)), "b": key if is_one else jax.random.key(1)},
    "statistics": with_state,
}


@pytest.mark.parametrize("case", UNTRAINED)
@pytest.mark.parametrize("is_one", [True, False], ids=["one in the file", "one in the tree"])
def test_what_does_not_train_is_read_at_its_own_path(path, case, is_one):
    saved, like = UNTRAINED[case](is_one), UNTRAINED[case](not is_one)
    saving.save(path, saved)
    plan = saving.plan(path, like)
    for got in (saving.load(path, like), plan(path), saving.plan(saved, like)(saved)):
        assert not [row for row in tp.diff(got, saved).rows if row.what == "elements"]
    if case == "frozen":
        arrays = dict(saving.names(path))
        traced = jax.jit(plan)(arrays | {"b": arrays.get("b", arrays["a"])})
        np.testing.assert_array_equal(traced.b, saved.b)


class Codec(eqx.Module):
    encoder: jax.Array
    decoder: jax.Array = tp.field(tied_to="encoder", transform=jnp.transpose)


class Language(eqx.Module):
    embed: jax.Array
    head: jax.Array = tp.field(tied_to="embed")
    other: jax.Array | None = None


def test_a_tie_is_in_the_file_once(path):
    shared, count, key = ramp(100, 100), jnp.arange(10), jax.random.key(0)
    model = {"embed": shared, "head": [shared, shared], "n": count, "m": count, "key": (key, key)}
    got = there_and_back(path, model)
    assert assert_bits(got, model) == 7
    assert path.stat().st_size < shared.nbytes + 2000
    assert set(saving.names(path)) == {"embed", "m", "n", "key.0", "key.1"}  # what is no parameter goes by its path
    # A declared tie too, also through a transform, where its alias is what it is declared to be.
    codec, language = Codec(shared, shared.T), Language(shared, tp.copy(shared))
    for model in (codec, language):
        got = there_and_back(path, model)
        assert assert_same(got, model, identity=False) == 2
        assert path.stat().st_size < shared.nbytes + 1000
    assert got.embed is got.head


def test_an_alias_that_does_not_agree_yet_is_stored_by_itself(path):
    first, second, third = ramp(2, 3), np.asarray(ramp(3, 2, start=7)), ramp(2, 3, start=9)
    for model in (Codec(first, second), Language(first, third), Language(first, third, third), Codec(first, first.T)):
        got = there_and_back(path, model, like=model)
        assert_bits(got, model)


@pytest.mark.parametrize("where", ["file", "tree"])
def test_other_ties_are_refused_with_the_call_that_mends_it(path, where):
    shared = ramp(2)
    tied, apart = ({"a": shared, "deep": [leaf]} for leaf in (shared, tp.copy(shared)))
    saved, like = (tied, apart) if where == "file" else (apart, tied)
    saving.save(path, saved)
    call = {"file": "tp.tie(model, 'deep.0', to='a')", "tree": "tp.untie(model, 'deep.0')"}[where]
    with pytest.raises(ValueError, match=rf"'a'.* are one array in the {where} only: {re.escape(call)}$"):
        saving.load(path, like)
    assert_bits(saving.load(path, eval(call, {"tp": tp, "model": like})), saved)


def test_a_declared_tie_in_the_file_only(path):
    saving.save(path, Codec(ramp(2, 3), ramp(2, 3).T))
    like = {"encoder": ramp(2, 3), "decoder": ramp(3, 2)}
    with pytest.raises(
        ValueError, match=r"'decoder' is transpose.* of 'encoder' in the file, .* declare it, tp.field\("
    ):
        saving.load(path, like)


# -- What does not fit -------------------------------------------------------------------------------------------------


def test_all_that_does_not_fit_is_said_at_once_before_anything_is_read(path, monkeypatch):
    read = []
    monkeypatch.setattr(File, "arrays", lambda *args, **_: read.append(args))
    saving.save(
        path, {"layers": [{"weight": ramp(2), "bias": ramp(1)}], "n": jnp.arange(2), "old": ramp(1), "rate": ramp(1)}
    )
    like = {"layers": [{"weight": ramp(3), "bais": ramp(1)}], "n": ramp(2), "new": {"deep": ramp(1)}, "rate": 0.5}
    with pytest.raises(ValueError, match=re.escape(f"{str(path)!r} does not fit the tree:\n")) as error:
        saving.load(path, like)
    for line in (
        "'layers.0.weight' is float32[3] in the tree, float32[2] in the file",
        "'layers.0.bais' is in the tree and not in the file; nearest: 'layers.0.bias'",
        "'layers.0.bias' is in the file and not in the tree; nearest: 'layers.0.bais'",
        "'n' is float32[2] in the tree, int32[2] in the file",
        "'new.deep' is in the tree and not in the file",
        "the file also has 'old', which the tree lacks",
        "'rate' is float in the tree, float32[1] in the file",
    ):
        assert line in str(error.value)
    assert read == []


def test_each_array_is_read_once_and_compared_with_its_checksum(path, monkeypatch):
    read, read_at = [], OnDisk.read_at
    tree = {"a": ramp(2), "large": ramp(70, 100), "m": ramp(5), "z": ramp(3)}
    size = sum(array.nbytes for array in tree.values())
    saving.save(path, tree)
    first = path.stat().st_size - size

    def note(file, into, start):
        read.extend([len(into)] * (start >= first))
        return read_at(file, into, start)

    monkeypatch.setattr(OnDisk, "read_at", note)
    saving.load(path, tree)
    assert (len(read), sum(read)) == (4, size)
    read.clear()
    assert assert_same(dict(saving.names(path)), tree) == 4
    assert (len(read), sum(read)) == (4, size)
    damaged = bytearray(path.read_bytes())
    damaged[-1] ^= 1
    path.write_bytes(damaged)
    for load in (
        lambda: saving.load(path, tree),
        lambda: saving.names(path)["z"],
        lambda: saving.plan(path, tree)(path),
    ):
        with pytest.raises(ValueError, match="'z' has another checksum than when it was saved"):
            load()
    np.testing.assert_array_equal(saving.names(path)["a"], tree["a"])
    got = saving.load(path, tree, checksum=False)
    assert [bool((got[name] == tree[name]).all()) for name in tree] == [True, True, True, False]


# -- Where arrays lie --------------------------------------------------------------------------------------------------


def test_loaded_arrays_lie_where_those_of_like_do(path):
    devices = first_devices(4)
    mesh = jax.sharding.Mesh(np.array(devices), ("x",))
    rows, whole, third = NamedSharding(mesh, P("x")), NamedSharding(mesh, P()), SingleDeviceSharding(devices[3])
    tree = {
        "rows": ramp(8, 3),
        "whole": ramp(3),
        "third": ramp(4),
        "free": ramp(5),
        "keys": jax.random.split(jax.random.key(5), 4),
    }
    saving.save(path, tree)
    like = emptied(tree)
    places = {"rows": rows, "whole": whole, "third": third, "keys": rows}
    like |= {name: jax.device_put(like[name], place) for name, place in places.items()}
    shapes = {n: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=places.get(n)) for n, leaf in tree.items()}
    for each in (like, shapes):
        got = saving.load(path, each)
        assert assert_same(got, tree) == 5
        assert {name: got[name].sharding for name in places} == places
        assert (got["third"].committed, got["free"].committed) == (True, False)
    # Sharded arrays are written whole, and go back onto one device.
    saving.save(path, got)
    assert_bits(saving.load(path, emptied(tree)), tree)
    with jax.default_device(devices[2]):
        free = {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in tree.items() if name != "keys"}
    saving.save(path, {name: tree[name] for name in free})
    for leaf in saving.load(path, free).values():
        assert (leaf.devices(), leaf.committed) == ({devices[2]}, False)


def test_a_tie_over_several_devices(path):
    place = NamedSharding(jax.sharding.Mesh(np.array(first_devices(2)), ("x",)), P("x"))
    codec = Codec(jax.device_put(ramp(2, 4), place), jax.device_put(ramp(2, 4).T, place))
    got = there_and_back(path, codec, like=codec)
    assert assert_same(got, codec) == 2
    assert (got.encoder.sharding, got.decoder.sharding) == (place, place)


def test_loaded_arrays_hang_on_nothing(path):
    tree = {"jax": ramp(300, 300), "numpy": np.arange(1000.0), "small": ramp(3)}
    got = there_and_back(path, tree)
    with open(path, "r+b") as file:
        file.truncate(0)
    assert assert_bits(got, tree) == 3
    again = there_and_back(path, tree)
    path.write_bytes(b"\xff" * path.stat().st_size)
    assert assert_bits(again, tree) == 3
    again["numpy"] += 1  # it may be written to
    arrays = {name: got[name] for name in ("jax", "small")}
    twice = jax.jit(lambda tree: jax.tree.map(lambda x: 2 * x, tree), donate_argnums=0)(arrays)
    np.testing.assert_array_equal(twice["jax"], 2 * tree["jax"])
    assert arrays["jax"].is_deleted()
    np.testing.assert_array_equal(again["jax"], tree["jax"])


def test_a_part_of_a_file(path):
    saving.save(path, {"a.b": {"w": ramp(2)}})
    with pytest.raises(ValueError, match=r"""the file has such a tree below '"a\.b"': load into"""):
        saving.load(path, {"w": ramp(2)})
    alone = saving.names(path, '"a.b"')
    assert_same(saving.plan(alone, {"w": ramp(2) + 1})(alone), {"w": ramp(2)})
    saving.save(path, {"model": {"w": ramp(2)}, "average": {"w": ramp(2)}})
    with pytest.raises(ValueError, match="the file has such a tree below 'average', 'model': load into"):
        saving.load(path, {"w": ramp(2)})
    with pytest.raises(ValueError, match="the file also has 'average', which the tree lacks; to load a part"):
        saving.load(path, {"model": {"w": ramp(2)}})
    with pytest.raises(
        ValueError, match="the source has such a model below 'average', 'model'; to load one, write names"
    ):
        saving.plan(path, {"w": ramp(2)})
    with pytest.raises(TypeError, match="'' is a Names, which JAX does not have, so it would not be saved"):
        saving.save(path, saving.names(path))


PARTS = {
    "groups": optim.groups({"body": optax.adam(0.1), "head": optax.sgd(0.1, momentum=0.9)}),
    "one group keeps nothing": optim.groups({"body": optax.adam(0.1), "head": optax.sgd(0.1)}),
    "masked": optax.masked(optax.trace(0.9), lambda tree: jax.tree.map(lambda leaf: leaf.ndim > 1, tree)),
}
WAITS = [
    ("groups", "tree", "head"),
    ("groups", "stacks", "body.v"),
    ("one group keeps nothing", "stacks", "body.v"),
    ("one group keeps nothing", "stacks", "head"),
    ("masked", "tree", "body.v"),
]


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize(("name", "form", "waits"), WAITS)
def test_parts_of_a_rule_of_which_one_waits(name, form, waits, tmp_path):
    """A part has nodes without arrays for the parameters of the others, and none for those that wait."""
    model = {"body": {"w": jnp.ones((2, 2)), "v": jnp.ones(3)}, "head": {"w": jnp.ones(3)}}
    renamed = {"trunk": model["body"], "head": model["head"]}
    tx = optim.trainable(PARTS[name], form=form)
    model, state = optim.step(tx, jax.tree.map(jnp.ones_like, model), tx.init(model), model)
    state = optim.set_trainable(tx, state, model, tp.layout(model, freeze=waits))
    saving.save(tmp_path / "run.safetensors", state)
    loaded = saving.load(tmp_path / "run.safetensors", tx.init(model))
    assert jax.tree.structure(loaded) == jax.tree.structure(state)
    carried = saving.plan(model, model).state(saving.names(tmp_path / "run.safetensors"), tx.init(model))
    grads = jax.tree.map(jnp.ones_like, model)
    want = optim.step(tx, grads, state, model)
    for each in (loaded, carried):
        got = optim.step(tx, grads, each, model)
        assert not tp.diff(got[0], want[0])
        assert not tp.diff(jax.tree.leaves(got[1]), jax.tree.leaves(want[1]))
        assert not tp.diff(optim.set_trainable(tx, got[1], model), optim.set_trainable(tx, want[1], model))
    if name == "groups":
        rules = optim.groups({"trunk": optax.adam(0.1), "head": optax.sgd(0.1, momentum=0.9)})
        after = optim.trainable(rules, form=form)
        plan = saving.plan(model, renamed, rename={"body.**": "trunk.**"})
        there = plan.state(state, after.init(renamed))
        got = optim.step(after, jax.tree.map(jnp.ones_like, renamed), there, plan(model))
        assert not tp.diff(got[0], plan(want[0]))
