"""Names over a vector."""

import re

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp

from . import zoo
from .zoo import ZOO, Norm, assert_same, ramp

generated = hypothesis.settings(deadline=None, max_examples=40, derandomize=True)


def model():
    shared = ramp(2, 2)
    return {"layers": [{"w": shared, "b": ramp(2)}, {"w": ramp(2, 2, start=3), "b": ramp(2, start=5)}], "head": shared}


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize("options", [{}, {"pad_to": 8}])
def test_a_view_is_a_mapping_of_what_is_trained(name, options):
    made = ZOO[name].make()
    layout = ZOO[name].layout(made)
    vector, restructure = tp.ravel(made, layout, **options)
    view = restructure.view(vector)
    want = tp.trainables(made, layout)
    assert list(view) == list(view.keys()) == list(want)
    assert len(view) == len(want)
    for path, part in view.items():
        assert part.dtype == vector.dtype
        np.testing.assert_array_equal(part, np.asarray(want[path]).astype(part.dtype))
    for alias, path in ((alias, slot.path) for slot in layout.slots for alias in slot.aliases):
        if alias != "decoder":
            np.testing.assert_array_equal(view[alias], view[path])


@generated
@hypothesis.given(zoo.models())
def test_views_of_generated_models(made):
    vector, restructure = tp.ravel(made)
    view, layout, numbers = restructure.view(vector), restructure.layout, np.asarray(vector)
    for path in layout.paths:
        np.testing.assert_array_equal(view[path], numbers[layout.slice(path)].reshape(layout[path].shape))
        changed, want = view.at[path].add(1), numbers.copy()
        want[layout.slice(path)] += numbers.dtype.type(1)
        np.testing.assert_array_equal(changed, want)


def test_names_aliases_globs_nodes_regexes_and_classes():
    vector, restructure = tp.ravel(model())
    view = restructure.view(vector)
    np.testing.assert_array_equal(view["layers.0.w"], view["head"])  # the same slot
    assert list(view["layers.*.b"]) == ["layers.0.b", "layers.1.b"]
    assert list(view["layers.1"]) == ["layers.1.b", "layers.1.w"]
    assert list(view[re.compile(r".*\.1\..*")]) == ["layers.1.b", "layers.1.w"]
    assert list(view["**"]["layers.0"]["head"].shape) == [2, 2]
    assert "head" in view
    assert "layers.0" not in view
    assert "nowhere" not in view
    assert 3 not in view
    assert "head" not in view["layers.1"]
    norms, _restructure = tp.ravel({"n": Norm(ramp(2), ramp(2)), "w": ramp(1)})
    assert list(_restructure.view(norms)[Norm]) == ["n.scale"]
    assert view.get("layers.7.w") is None


def test_an_alias_with_a_transform_is_read_through_it():
    made = {"decoder": ramp(2, 3).T, "encoder": ramp(2, 3)}
    vector, restructure = tp.ravel(made, tp.layout(made, ties={"decoder": ("encoder", jnp.transpose)}))
    view = restructure.view(vector)
    np.testing.assert_array_equal(view["decoder"], view["encoder"].T)
    np.testing.assert_array_equal(view.at["encoder"].set(made["encoder"] + 1), vector + 1)
    with pytest.raises(KeyError, match="'decoder' is computed from 'encoder'; change it there"):
        view.at["decoder"]


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("layers.0.v", "'layers.0.v' selects nothing.*layers.0.b"),
        ("lairs.*", "selects nothing"),
        ("frozen", "'frozen' is frozen, so it has no slot"),
        ("fro*", "'fro[*]' selects only what is frozen, such as 'frozen'"),
        ("n", "n: int32.* is no parameter|no parameter"),
    ],
)
def test_what_is_not_there(path, message):
    made = model() | {"frozen": ramp(1), "n": jnp.arange(2)}
    vector, restructure = tp.ravel(made, tp.layout(made, freeze="frozen"))
    view = restructure.view(vector)
    with pytest.raises(KeyError, match=message):
        view[path]
    with pytest.raises(KeyError, match=message):
        view.at[path]
    with pytest.raises(KeyError, match="not in this part of the view"):
        view["layers.1"]["layers.0.b"]
    with pytest.raises(KeyError, match="selects nothing of this part of the view"):
        view["layers.1"]["layers.0.*"]


# -- Changes -----------------------------------------------------------------------------------------------------------


CHANGES = {"set": lambda old, new: new, "add": lambda old, new: old + new, "multiply": lambda old, new: old * new}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", CHANGES)
def test_changes(name, compiled):
    vector, restructure = tp.ravel(model())
    layout, apply = restructure.layout, jax.jit if compiled else lambda f: f
    want = np.asarray(vector)

    def changed(where, value):
        return apply(lambda v: getattr(restructure.view(v).at[where], name)(value))(vector)

    for where, value in (
        ("layers.0.b", 3.0),
        ("head", ramp(2, 2, start=9)),
        ("he*", ramp(4, start=9)),
        ("layers.*.b", 2),
        ("**", jnp.float32(7)),
        ("layers.1", ramp(6)),
        ("layers.*.b", {"layers.0.b": ramp(2), "layers.1.b": ramp(2, start=4)}),
        ("layers.1", restructure.view(vector)["layers.1"]),
    ):
        flat = value
        if isinstance(value, (dict, tp.View)):
            flat = jnp.concatenate([value[path].ravel() for path in value])
        copy, at = want.copy(), layout.indices(where)
        copy[at] = CHANGES[name](copy[at], np.asarray(flat).ravel() if np.ndim(flat) else flat)
        np.testing.assert_array_equal(changed(where, value), copy)


def test_a_change_keeps_the_dtype_of_the_vector():
    vector, restructure = tp.ravel({"a": ramp(2, dtype=jnp.bfloat16), "c": ramp(1, dtype=jnp.bfloat16)})
    changed = restructure.view(vector).at["a"].set(np.float64(2))
    assert changed.dtype == jnp.bfloat16
    np.testing.assert_array_equal(changed.astype(jnp.float32), [2, 2, vector[2]])


@pytest.mark.parametrize(
    ("where", "value", "error", "message"),
    [
        ("layers.0.b", jnp.ones(3), ValueError, r"number or shape \(2,\) at 'layers.0.b', got shape \(3,\)"),
        ("layers.*.b", jnp.ones(3), ValueError, r"vector of the 4 elements selected, got shape \(3,\)"),
        ("layers.*.b", {"layers.0.b": 1.0}, ValueError, r"expected values at \['layers.0.b', 'layers.1.b'\], got them"),
        ("layers.0.b", 1j, TypeError, "'layers.0.b' lies in a vector of float32, got complex64"),
    ],
)
def test_values_that_do_not_fit(where, value, error, message):
    vector, restructure = tp.ravel(model())
    with pytest.raises(error, match=message):
        restructure.view(vector).at[where].set(value)


def test_what_is_computed_from_another_parameter_is_changed_there():
    made = {"dec": ramp(3, 2), "enc": ramp(2, 3), "z": ramp(1)}
    vector, restructure = tp.ravel(made, tp.layout(made, ties={"dec": ("enc", jnp.transpose)}))
    view = restructure.view(vector)
    np.testing.assert_array_equal(view["dec"], view["enc"].T)
    for where in ("dec", "de*", ["dec", "z"], re.compile("d.*"), lambda m: m["dec"]):
        with pytest.raises(KeyError, match="'dec' is computed from 'enc'; change it there"):
            view.at[where]
    for where in ("enc", "*", ["dec", "enc"]):
        np.testing.assert_array_equal(restructure.view(view.at[where].set(7.0))["dec"], np.full((3, 2), 7))


def test_it_prints_its_paths_and_is_equal_to_itself():
    vector, restructure = tp.ravel([ramp(1)] + [ramp(1, start=k) for k in range(9)])
    view = restructure.view(vector)
    assert repr(view) == "View('0', '1', '2', '3', '4', ..., '9')"
    assert repr(view[["1", "2"]]) == "View('1', '2')"
    assert view == view
    assert view != restructure.view(vector)
    assert len({view, view}) == 1


# -- Derivatives and transformations -----------------------------------------------------------------------------------


def test_the_gradient_of_what_reads_a_view_is_the_slice_of_the_flat_gradient():
    vector, restructure = tp.ravel(model())
    layout = restructure.layout
    for path in (*layout.paths, "head"):
        gradient = jax.grad(lambda v, path=path: jnp.sum(restructure.view(v)[path] ** 2))(vector)
        want = jnp.zeros_like(vector).at[layout.slice(path)].set(2 * vector[layout.slice(path)])
        np.testing.assert_array_equal(gradient, want)
        np.testing.assert_array_equal(restructure.view(gradient)[path], 2 * restructure.view(vector)[path])
    both = jax.grad(lambda v: zoo.loss(restructure(v)))(vector)
    in_tree = tp.grad(zoo.loss)(model())
    for path, part in tp.trainables(in_tree).items():
        np.testing.assert_allclose(restructure.view(both)[path], part, 1e-5)


def test_in_transformations():
    vector, restructure = tp.ravel(model())
    read = lambda v: jnp.sum(restructure.view(v)["head"] * restructure.view(v)["layers.1.w"])
    want = read(vector)
    np.testing.assert_allclose(jax.jit(read)(vector), want, 1e-6)
    np.testing.assert_allclose(jax.vmap(read)(jnp.stack([vector, vector])), [want, want], 1e-6)
    view = restructure.view(vector)

    def with_inner_traces(v):
        outer = restructure.view(v)  # read first inside, then outside: no piece may leak out of the inner trace
        inside = jax.lax.scan(lambda c, _: (c + jnp.sum(outer["head"]), None), 0.0, None, length=2)[0]
        return (
            inside
            + jax.lax.cond(inside > 0, lambda: jnp.sum(outer["layers.0.b"]), lambda: 0.0)
            + jnp.sum(outer["head"])
        )

    want = 3 * jnp.sum(view["head"]) + jnp.sum(view["layers.0.b"])
    np.testing.assert_allclose(with_inner_traces(vector), want, 1e-6)
    np.testing.assert_allclose(jax.jit(with_inner_traces)(vector), want, 1e-6)
    assert jax.grad(with_inner_traces)(vector).shape == vector.shape


def test_a_view_is_neither_a_pytree_nor_an_argument():
    vector, restructure = tp.ravel(model())
    view = restructure.view(vector)
    assert jax.tree.leaves(view) == [view]
    assert_same(restructure(view.vector), model())
    with pytest.raises(TypeError, match=r"expected a vector of shape \(12,\) and floating dtype, got View"):
        restructure(view)
    with pytest.raises(ValueError, match=r"got shape \(2, 12\); map over a stack of vectors with jax.vmap"):
        restructure.view(jnp.stack([vector, vector]))


def test_reading_every_part_is_one_cut():
    vector, restructure = tp.ravel([ramp(2)] * 3 + [ramp(3, start=k) for k in range(40)])
    program = jax.make_jaxpr(jax.grad(lambda v: sum(jnp.sum(part**2) for part in restructure.view(v).values())))(vector)
    names = [eqn.primitive.name for eqn in program.eqns]
    assert (names.count("cut"), names.count("join"), names.count("pad")) == (1, 1, 0)


def test_a_view_of_other_parts_is_no_value_for_these():
    made = {"a": ramp(2), "b": ramp(2)}
    (first, one), (second, other) = tp.ravel(made, "a"), tp.ravel(made, "b")
    with pytest.raises(ValueError, match=r"expected values at \['a'\], got them at \['b'\]"):
        one.view(first).at["a"].set(other.view(second))
    with pytest.raises(TypeError, match="unsupported operand"):
        one.view(first) + other.view(second)


# -- Places ------------------------------------------------------------------------------------------------------------


def test_slices_indices_and_blocks():
    vector, restructure = tp.ravel(model())
    layout = restructure.layout
    assert [layout.slice(path) for path in layout.paths] == [slice(0, 4), slice(4, 6), slice(6, 8), slice(8, 12)]
    assert layout.slice("layers.0.w") == layout.slice("head")
    assert layout.indices("layers.*.b").tolist() == [4, 5, 6, 7]
    assert layout.indices(["layers.1.w", "head"]).tolist() == [0, 1, 2, 3, 8, 9, 10, 11]
    hessian = jax.hessian(lambda v: zoo.loss(restructure(v)))(vector)
    np.testing.assert_array_equal(layout.block(hessian, "head", "layers.1.b"), hessian[0:4, 6:8])
    np.testing.assert_array_equal(layout.block(hessian, "layers.*.b", "head"), hessian[4:8, 0:4])
    np.testing.assert_array_equal(jax.jit(lambda h: layout.block(h, "head", "head"))(hessian), hessian[:4, :4])
    assert layout.block(np.asarray(hessian), "head", "layers.*.w").shape == (4, 8)
    assert jax.make_jaxpr(lambda h: layout.block(h, "head", "layers.*.b"))(hessian).consts == []  # in one piece
    with pytest.raises(KeyError, match=r"'layers\.0\.v' is no path of the model"):
        layout.slice("layers.0.v")
    stack = jnp.stack([hessian, 2 * hessian])
    np.testing.assert_array_equal(layout.block(stack, "head", "layers.1.b"), stack[:, 0:4, 6:8])
    with pytest.raises(ValueError, match=r"array of shape \(12, 12\) over the vector of .*, got shape \(12, 11\)"):
        layout.block(hessian[:, :11], "head", "head")
    with pytest.raises(ValueError, match=r"array of shape \(12, 12\) .*, got list"):
        layout.block([[1.0]], "head", "head")
    with pytest.raises(ValueError, match="selects nothing"):
        layout.indices("nowhere")
