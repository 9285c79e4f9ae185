"""Names over a vector and over stacks."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from ..zoo import ZOO, Norm, assert_same, ramp

SHARED = ramp(2, 2)
LAYERS = [{"w": SHARED, "b": ramp(2)}, {"w": ramp(2, 2, start=3), "b": ramp(2, start=5)}]
VECTOR, RESTRUCTURE = tp.ravel({"layers": LAYERS, "head": SHARED, "frozen": ramp(1), "n": np.arange(2)}, "!frozen")
VIEW, LAYOUT = RESTRUCTURE.view(VECTOR), RESTRUCTURE.layout


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_a_view_is_a_mapping_of_what_is_trained(specimen):
    made = specimen.make()
    layout = specimen.layout(made)
    vector, restructure = tp.ravel(made, layout, pad_to=8)
    view, want = restructure.view(vector), tp.trainables(made, layout)
    assert list(view) == list(view.keys()) == list(want)
    assert len(view) == len(want)
    for path, part in view.items():
        assert part.dtype == vector.dtype
        np.testing.assert_array_equal(part, np.asarray(want[path]).astype(part.dtype))
        changed = np.array(vector)
        changed[layout.slice(path)] += changed.dtype.type(1)
        np.testing.assert_array_equal(view.at[path].add(1), changed)


def test_names_aliases_globs_nodes_regexes_and_classes():
    np.testing.assert_array_equal(VIEW["layers.0.w"], VIEW["head"])  # the same slot
    assert list(VIEW["layers.*.b"]) == ["layers.0.b", "layers.1.b"]
    assert list(VIEW["layers.1"]) == list(VIEW[re.compile(r".*\.1\..*")]) == ["layers.1.b", "layers.1.w"]
    assert VIEW["**"]["layers.0"]["head"].shape == (2, 2)
    assert [path in VIEW for path in ("head", "layers.0", "nowhere", 3)] == [True, False, False, False]
    assert "head" not in VIEW["layers.1"]
    norms, restructure = tp.ravel({"n": Norm(ramp(2), ramp(2)), "w": ramp(1)})
    assert list(restructure.view(norms)[Norm]) == ["n.scale"]


CHANGES = {"set": lambda old, new: new, "add": lambda old, new: old + new, "multiply": lambda old, new: old * new}


@pytest.mark.parametrize(("name", "compiled"), [("set", False), ("add", True), ("multiply", False)])
def test_changes(name, compiled):
    new = {"layers.0.b": ramp(2), "layers.1.b": ramp(2, start=4)}
    changes = [
        ("layers.0.b", 3.0, 3.0),
        ("head", ramp(2, 2, start=9), ramp(4, start=9)),
        ("layers.*.b", np.float64(2), 2),
        ("**", jnp.float32(7), 7),
        ("layers.*.b", new, np.concatenate(list(new.values()))),
        ("layers.1", VIEW["layers.1"], VECTOR[6:]),
    ]

    def changed(vector):
        view = RESTRUCTURE.view(vector)
        return [getattr(view.at[where], name)(value) for where, value, _ in changes]

    got = (jax.jit(changed) if compiled else changed)(VECTOR)
    for (where, _, flat), each in zip(changes, got, strict=True):
        want, at = np.array(VECTOR), LAYOUT.indices(where)
        want[at] = CHANGES[name](want[at], flat)
        assert each.dtype == VECTOR.dtype
        np.testing.assert_array_equal(each, want)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda: VIEW.at["layers.0.b"].set(np.ones(3)), ValueError, r"number or shape \(2,\) .*, got shape \(3,\)"),
        (lambda: VIEW.at["layers.*.b"].set(np.ones(3)), ValueError, r"the 4 elements selected, got shape \(3,\)"),
        (lambda: VIEW.at["layers.*.b"].set({"layers.0.b": 1.0}), ValueError, r"'layers.1.b'\], got them"),
        (lambda: VIEW.at["layers.1.b"].set(VIEW["layers.0"]), ValueError, r"\['layers.1.b'\], got them at \['head'"),
        (lambda: VIEW.at["layers.0.b"].set(1j), TypeError, "'layers.0.b' is in an array of float32, which"),
        (lambda: VIEW["layers.0.v"], KeyError, "'layers.0.v' selects nothing.*layers.0.b"),
        (lambda: VIEW["frozen"], KeyError, "'frozen' is frozen, so it has no slot"),
        (lambda: VIEW["fro*"], KeyError, "'fro[*]' selects only frozen parameters, such as 'frozen'"),
        (lambda: VIEW.at["fro*"], KeyError, "'fro[*]' selects only frozen parameters, such as 'frozen'"),
        (lambda: VIEW["n"], KeyError, "not a parameter"),
        (lambda: VIEW["layers.1"]["layers.0.b"], KeyError, "not in this part of the view"),
        (lambda: VIEW["layers.1"]["layers.0.*"], KeyError, "selects nothing in this part of the view"),
        (lambda: RESTRUCTURE(VIEW), TypeError, r"a vector of shape \(12,\) and floating dtype, got View"),
        (lambda: RESTRUCTURE.view(np.ones((2, 12), "f")), ValueError, r"got shape \(2, 12\); map .* with jax.vmap"),
        (lambda: VIEW + VIEW, TypeError, "unsupported operand"),
        (lambda: LAYOUT.slice("layers.0.v"), KeyError, r"'layers\.0\.v' is not a path of the model"),
        (lambda: LAYOUT.indices("nowhere"), ValueError, "selects nothing"),
        (lambda: LAYOUT.block(np.ones((12, 11)), "head", "head"), ValueError, r"\(12, 12\) .*, got shape \(12, 11\)"),
        (lambda: LAYOUT.block([[1.0]], "head", "head"), ValueError, r"array of shape \(12, 12\) .*, got list"),
    ],
)
def test_what_does_not_fit(use, error, message):
    with pytest.raises(error, match=message):
        use()


def test_what_is_computed_from_another_parameter_is_changed_there():
    made = {"dec": ramp(3, 2), "enc": ramp(2, 3), "z": ramp(1)}
    vector, restructure = tp.ravel(made, tp.layout(made, ties={"dec": ("enc", jnp.transpose)}))
    view = restructure.view(vector)
    np.testing.assert_array_equal(view["dec"], view["enc"].T)
    for where in ("de*", ["dec", "z"], lambda m: m["dec"]):
        with pytest.raises(KeyError, match="'dec' is computed from 'enc'; change 'enc' instead"):
            view.at[where]
    for where in ("enc", ["dec", "enc"]):
        np.testing.assert_array_equal(restructure.view(view.at[where].set(7.0))["dec"], np.full((3, 2), 7))


def test_it_prints_its_paths_and_is_equal_to_itself_and_no_pytree():
    vector, restructure = tp.ravel([ramp(1)] + [ramp(1, start=k) for k in range(9)])
    view = restructure.view(vector)
    assert repr(view) == "View('0', '1', '2', '3', '4', ..., '9')"
    assert repr(view[["1", "2"]]) == "View('1', '2')"
    assert view == view
    assert view != restructure.view(vector)
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
    for got in (read(VECTOR), jax.jit(jax.value_and_grad(read))(VECTOR)[0], jax.vmap(read)(VECTOR[None])[0]):
        np.testing.assert_allclose(got, want, 1e-6)


def test_reading_every_part_is_one_cut():
    vector, restructure = tp.ravel([ramp(2)] * 3 + [ramp(3, start=k) for k in range(40)])
    program = jax.make_jaxpr(jax.grad(lambda v: sum(jnp.sum(part**2) for part in restructure.view(v).values())))(vector)
    names = [eqn.primitive.name for eqn in program.eqns]
    assert (names.count("cut"), names.count("join"), names.count("pad")) == (1, 1, 0)


# -- Over stacks -------------------------------------------------------------------------------------------------------

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


@pytest.fixture(params=[None, {"heads": ["head", "c"], "rest": "**"}], ids=["plain", "groups"])
def stacked(request):
    return tp.stack(MIXED, TIED, groups=request.param)


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_a_view_of_stacks_is_a_mapping_of_rows(specimen):
    made = specimen.make()
    layout = specimen.layout(made)
    stacks, restructure = tp.stack(made, layout)
    view, want = restructure.view(stacks), tp.trainables(made, layout)
    assert list(view) == list(want)
    for path, part in view.items():
        assert (part.dtype, part.shape) == (layout[path].dtype, layout[path].shape)
        np.testing.assert_array_equal(part, np.asarray(want[path]).astype(part.dtype))
        changed = stacks | {key: np.array(stack) for key, stack in stacks.items()}
        changed[layout[path].key][layout[path].row] += changed[layout[path].key].dtype.type(1)
        assert_same(view.at[path].add(1), changed)


@pytest.mark.parametrize("compiled", [False, True])
def test_rows_by_path_alias_glob_and_node(stacked, compiled):
    stacks, restructure = stacked

    def read(stacks):
        view = restructure.view(stacks)
        whole = {path: view[path] for path in ("head", "layers.0.w", "t", "x", "c", "half", "layers.1.b")}
        return whole, dict(view["layers.*.w"]), dict(view["layers.1"]), dict(view[["x", "c"]])

    whole, matrices, layer, both = (jax.jit(read) if compiled else read)(stacks)
    for path, got in whole.items():
        np.testing.assert_array_equal(
            got, MIXED["head"].T if path == "t" else tp.trainables(MIXED, TIED)[TIED[path].path]
        )
        assert got.dtype == TIED[path].dtype
    assert list(matrices) == ["head", "layers.1.w"]  # `layers.0.w` is the alias of `head`
    assert list(layer) == ["layers.1.b", "layers.1.w"]
    assert list(both) == ["c", "x"]
    view = restructure.view(stacks)
    assert_same(view.form, stacks)
    with pytest.raises(KeyError, match=r"'layers\.0\.b' is frozen"):
        view["layers.0.b"]


@pytest.mark.parametrize(("name", "compiled"), [("set", True), ("multiply", False)])
def test_changes_over_several_stacks(stacked, name, compiled):
    stacks, restructure = stacked
    new = {"layers.1.b": ramp(2, start=4), "layers.1.w": ramp(2, 2, start=6)}
    over_all = np.arange(1, sum(TIED[path].size for path in ("head", "layers.1.w", "x")) + 1, dtype=np.float32)
    cases = [
        ("head", ramp(2, 2, start=9), {"head": ramp(2, 2, start=9)}),
        ("layers.0.w", 3.0, {"head": 3.0}),  # an alias means its slot
        ("half", ramp(4, start=2), {"half": ramp(2, 2, start=2).astype(jnp.bfloat16)}),
        ("c", 2j, {"c": np.complex64(2j)}),
        ("x", 5.0, {"x": 5.0}),
        ("**", 2.0, dict.fromkeys(TIED.paths, 2.0)),
        (["x", "layers.*.w"], over_all, {"head": over_all[:4], "layers.1.w": over_all[4:8], "x": over_all[8]}),
        ("layers.1", new, new),
        ("layers.1", restructure.view(stacks)["layers.1"], dict(restructure.view(stacks)["layers.1"])),
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


def test_reading_and_changing_rows_is_one_cut_of_each_stack():
    stacks, restructure = tp.stack([ramp(2, start=k) for k in range(20)] + [ramp(3, start=k) for k in range(20)])
    read = lambda s: sum(jnp.sum(part**2) for part in restructure.view(s).values())
    change = lambda s: restructure.view(s).at[["1", "3", "17", "21"]].multiply(2.0)
    # Inside of a trace a view cuts all; what is not read falls away. A change cuts what it changes once more.
    for f, cuts in ((jax.grad(read), 2), (change, 4)):
        names = [eqn.primitive.name for eqn in jax.make_jaxpr(f)(stacks).eqns]
        assert (names.count("cut"), names.count("join")) == (cuts, 2)
        assert not {"pad", "scatter", "slice"} & set(names)


@pytest.mark.parametrize(
    ("use", "error", "message"),
    [
        (lambda view: view.at["x"].set(1j), TypeError, "'x' is in an array of float32, which cannot hold complex64"),
        (lambda view: view.at["head"].set(np.ones(3, "f")), ValueError, r"\(2, 2\) at 'head', .*\(3,\)"),
        (lambda view: view.at[["x", "head"]].set(np.ones(3, "f")), ValueError, r"the 5 elements selected, .*\(3,\)"),
        (lambda view: view.at["t"], KeyError, "'t' is computed from 'head'; change 'head' instead"),
        (lambda view: view.at["layers.0.b"], KeyError, "'layers.0.b' is frozen"),
        (lambda view: view["head.w"], KeyError, "'head.w'"),
    ],
)
def test_what_does_not_fit_over_stacks(stacked, use, error, message):
    stacks, restructure = stacked
    with pytest.raises(error, match=message):
        use(restructure.view(stacks))


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
