"""Names over a vector and over stacks."""

import collections
import pickle
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..long import some
from ..zoo import STRUCTURE_ALONE, ZOO, assert_same, ramp

SHARED = ramp(2, 2)
LAYERS = [{"w": SHARED, "b": ramp(2)}, {"w": ramp(2, 2, start=3), "b": ramp(2, start=5)}]
VECTOR, RESTRUCTURE = tp.ravel({"layers": LAYERS, "head": SHARED, "frozen": ramp(1), "n": np.arange(2)}, "!frozen")
VIEW, LAYOUT = RESTRUCTURE.view(VECTOR), RESTRUCTURE.layout
MIXED = {
    "c": ramp(2, dtype=jnp.complex64) * 1j,
    "half": ramp(2, 2, dtype=jnp.bfloat16),
    "head": SHARED,
    "layers": LAYERS,
    "n": np.arange(2),
    "t": SHARED.T,
    "x": ramp(start=7),
}
TIED = tp.layout(MIXED, freeze="layers.0.b", ties={"t": ("head", jnp.transpose)})
ROW_STACKS, ROW_WAY = tp.stack(MIXED, TIED)
ROWS = ROW_WAY.view(ROW_STACKS)


# The first two have paths of a kind of their own: one is empty, one is quoted.
@pytest.mark.parametrize("name", some(ZOO, [*STRUCTURE_ALONE[2:], "numpy leaves"]))
def test_a_view_is_a_mapping_of_what_is_trained(name):
    made = ZOO[name].make()
    layout = ZOO[name].layout(made)
    want = tp.trainables(made, layout)
    for at_rest, restructure in (tp.ravel(made, layout, pad_to=8), tp.stack(made, layout)):
        view = restructure.view(at_rest)
        assert list(view) == list(view.keys()) == list(want)
        assert len(view) == len(want)
        changed, others = jax.tree.map(np.array, at_rest), list(view)[::2]
        for path, part in view.items():
            slot = layout[path]
            array, at = (changed[slot.key], slot.row) if isinstance(changed, dict) else (changed, layout.slice(path))
            assert (part.dtype, part.shape) == (array.dtype, slot.shape)
            np.testing.assert_array_equal(part, np.asarray(want[path]).astype(part.dtype))
            array[at] += array.dtype.type(path in others)
        assert not others or assert_same(view.at[others].add(1), changed)


UNFIT = [
    (lambda: VIEW.at["layers.0.b"].set(np.ones(3)), ValueError, r"number or shape \(2,\) .*, got shape \(3,\)"),
    (lambda: VIEW.at["layers.*.b"].set(np.ones(3)), ValueError, r"the 4 elements selected, got shape \(3,\)"),
    (lambda: VIEW.at["layers.1.b"].set(VIEW["layers.0"]), ValueError, r"\['layers.1.b'\], got them at \['head'"),
    (lambda: VIEW.at["layers.0.b"].set(1j), TypeError, "'layers.0.b' is in an array of float32, which"),
    (lambda: VIEW["frozen"], KeyError, "'frozen' is frozen, so it has no slot"),
    (lambda: VIEW.at["fro*"], KeyError, "'fro[*]' selects only frozen parameters, such as 'frozen'"),
    (lambda: VIEW["layers.1"]["layers.0.b"], KeyError, "not in this part of the view"),
    (lambda: VIEW["layers.1"]["layers.0.*"], KeyError, "selects nothing in this part of the view"),
    (lambda: RESTRUCTURE.view(np.ones((2, 12), "f")), ValueError, r"got shape \(2, 12\); map .* with jax.vmap"),
    (lambda: VIEW + VIEW, TypeError, "unsupported operand"),
    (lambda: LAYOUT.indices("nowhere"), ValueError, "selects nothing"),
    (lambda: LAYOUT.block(np.ones((12, 11)), "head", "head"), ValueError, r"\(12, 12\) .*, got shape \(12, 11\)"),
    (lambda: ROWS.at["x"].set(1j), TypeError, "'x' is in an array of float32, which cannot hold complex64"),
    (lambda: ROWS.at["head"].set(np.ones(3, "f")), ValueError, r"\(2, 2\) at 'head', .*\(3,\)"),
]


@pytest.mark.parametrize(("use", "error", "message"), UNFIT)
def test_what_does_not_fit(use, error, message, without_type_checks):
    with pytest.raises(error, match=message):
        use()


def test_it_prints_its_paths_and_is_equal_to_itself_and_no_pytree():
    vector, restructure = tp.ravel([ramp(1)] + [ramp(1, start=k) for k in range(9)])
    view = restructure.view(vector)
    assert repr(view) == "View('0', '1', '2', '3', '4', ..., '9')"
    assert view == view
    for other in (restructure.view(vector), collections.UserDict(view), np.ones(2)):
        assert (view == other, view != other) == (False, True)
    assert len({view, view}) == 1
    assert jax.tree.leaves(VIEW) == [VIEW]
    assert VIEW.form is VECTOR


def test_nothing_leaks_out_of_an_inner_trace():
    def read(v):
        outer = RESTRUCTURE.view(v)  # read first inside, then outside
        inside = jax.lax.scan(lambda c, _: (c + jnp.sum(outer["head"]), None), 0.0, None, length=2)[0]
        chosen = jax.lax.cond(inside > 0, lambda: jnp.sum(outer["layers.0.b"]), lambda: 0.0)
        return inside + chosen + jnp.sum(outer["head"])

    want = 3 * np.sum(VIEW["head"]) + np.sum(VIEW["layers.0.b"])
    inside = jax.jit(lambda v: (jax.value_and_grad(read)(v)[0], jax.vmap(read)(v[None])[0]))
    np.testing.assert_allclose([read(VECTOR), *inside(VECTOR)], [want] * 3, 1e-6)


# -- Over stacks -------------------------------------------------------------------------------------------------------

CHANGES = {"set": lambda old, new: new, "add": lambda old, new: old + new, "multiply": lambda old, new: old * new}
FORMS = {
    "vector": tp.ravel(MIXED, TIED),
    "stacks": (ROW_STACKS, ROW_WAY),
    "groups": tp.stack(MIXED, TIED, groups={"heads": ["head", "c"], "rest": "**"}),
}


@pytest.mark.parametrize("form", FORMS)
def test_it_is_pickled_with_its_arrays(form):
    at_rest, restructure = FORMS[form]
    for view in (restructure.view(at_rest), restructure.view(at_rest)["layers.1"]):
        again = pickle.loads(pickle.dumps(view))
        assert_same((dict(again), again.form), (dict(view), at_rest))


@pytest.mark.parametrize("form", FORMS)
def test_what_is_computed_from_another_parameter_is_changed_there(form):
    at_rest, restructure = FORMS[form]
    view = restructure.view(at_rest)
    for where in ("t", "t*", ["t", "x"], lambda m: m["t"]):
        with pytest.raises(KeyError, match="'t' is computed from 'head'; change 'head' instead"):
            view.at[where]
    for where in ("head", ["t", "head"]):
        np.testing.assert_array_equal(restructure.view(view.at[where].set(7.0))["t"], np.full((2, 2), 7))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("compiled", [False, True])
def test_names_aliases_globs_nodes_and_regexes(form, compiled):
    at_rest, restructure = FORMS[form]
    names = {
        "layers.*.w": ["head", "layers.1.w"],  # `layers.0.w` is an alias of `head`
        "layers.1": ["layers.1.b", "layers.1.w"],
        re.compile(r".*\.1\..*"): ["layers.1.b", "layers.1.w"],
        ("x", "c"): ["c", "x"],
        "**": list(TIED.paths),
    }

    def read(at_rest):
        view = restructure.view(at_rest)
        assert {where: list(view[where]) for where in names} == names
        assert [path in view for path in ("head", "layers.1", "nowhere", 3)] == [True, False, False, False]
        assert "head" not in view["layers.1"]
        return {path: view[path] for path in ("head", "layers.0.w", "t", "x", "c", "half", "layers.1.b")}

    for path, got in (jax.jit(read) if compiled else read)(at_rest).items():
        want = MIXED["head"].T if path == "t" else tp.trainables(MIXED, TIED)[TIED[path].path]
        np.testing.assert_array_equal(got, np.asarray(want).astype(got.dtype))
        assert got.dtype == (np.complex64 if form == "vector" else TIED[path].dtype)
    assert_same(restructure.view(at_rest).form, at_rest)


@pytest.mark.parametrize(
    ("form", "name", "compiled"),
    [("vector", "set", True), ("stacks", "add", True), ("groups", "multiply", False)],
)
def test_changes(form, name, compiled):
    stacks, restructure = FORMS[form]
    new = {"layers.1.b": ramp(2, start=4), "layers.1.w": ramp(2, 2, start=6)}
    over_all = np.arange(1, sum(TIED[path].size for path in ("head", "layers.1.w", "x")) + 1, dtype=np.float32)
    cases = [
        ("head", ramp(2, 2, start=9), {"head": ramp(2, 2, start=9)}),
        ("layers.0.w", 3.0, {"head": 3.0}),  # an alias means its slot
        ("half", np.arange(4, dtype="f"), {"half": np.arange(4).reshape(2, 2)}),
        ("c", 2j, {"c": np.complex64(2j)}),
        ("x", 5.0, {"x": 5.0}),
        ("**", 2.0, dict.fromkeys(TIED.paths, 2.0)),
        (["x", "layers.*.w"], over_all, {"head": over_all[:4], "layers.1.w": over_all[4:8], "x": over_all[8]}),
        ("layers.1", new, new),
        ("layers.1", restructure.view(stacks)["layers.1"], {f"layers.1.{name}": LAYERS[1][name] for name in "bw"}),
    ]

    def changed(stacks):
        return [getattr(restructure.view(stacks).at[where], name)(value) for where, value, _ in cases]

    for each, (where, _, at) in zip((jax.jit(changed) if compiled else changed)(stacks), cases, strict=True):
        want = dict(tp.trainables(MIXED, TIED))
        for path, value in at.items():
            value = np.asarray(value).astype(want[path].dtype)
            value = value.reshape(want[path].shape) if value.size > 1 else value
            want[path] = jnp.broadcast_to(CHANGES[name](want[path], value), want[path].shape)
        got = tp.trainables(restructure(each), TIED)
        assert jax.tree.structure(each) == jax.tree.structure(stacks)
        assert {path: leaf.dtype for path, leaf in got.items()} == {path: leaf.dtype for path, leaf in want.items()}
        for path in want:
            np.testing.assert_array_equal(got[path], want[path], err_msg=f"{where}: {path}")


def test_reading_and_changing_is_one_cut_of_each_array():
    model = [ramp(2, start=k) for k in range(20)] + [ramp(3, start=k) for k in range(20)]
    for (at_rest, restructure), arrays in ((tp.stack(model), 2), (tp.ravel(model), 1)):
        read = lambda x, way=restructure: sum(jnp.sum(part**2) for part in way.view(x).values())
        change = lambda x, way=restructure: way.view(x).at[["1", "3", "17", "21"]].multiply(2.0)
        # Inside of a trace a view cuts all; what is not read falls away. A change cuts what it changes once more.
        for f, cuts in ((jax.grad(read), arrays), (change, 2 * arrays)):
            names = [eqn.primitive.name for eqn in jax.make_jaxpr(f)(at_rest).eqns]
            assert (names.count("cut"), names.count("join")) == (cuts, arrays)
            assert not {"pad", "scatter", "slice"} & set(names)


# -- Of a layout -------------------------------------------------------------------------------------------------------


def test_slices_indices_and_blocks():
    assert [LAYOUT.slice(path) for path in LAYOUT.paths] == [slice(0, 4), slice(4, 6), slice(6, 8), slice(8, 12)]
    assert LAYOUT.slice("layers.0.w") == LAYOUT.slice("head")
    assert LAYOUT.indices("layers.*.b").tolist() == [4, 5, 6, 7]
    assert LAYOUT.indices(["layers.1.w", "head"]).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    hessian = np.arange(144, dtype=np.float32).reshape(12, 12)
    block = jax.jit(lambda h: LAYOUT.block(h, "layers.*.b", "head"))
    np.testing.assert_array_equal(block(hessian), hessian[4:8, 0:4])
    assert LAYOUT.block(hessian, "head", "layers.*.w").shape == (4, 8)
    assert jax.make_jaxpr(block)(hessian).consts == []  # in one piece
    stack = np.stack([hessian, 2 * hessian])
    np.testing.assert_array_equal(LAYOUT.block(stack, "head", "layers.1.b"), stack[:, 0:4, 6:8])
