"""A summary says what trains, how large it is and what is tied to what; a picture shows the same."""

import re
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import pytest

import treeparams as tp
from treeparams import plot

from .zoo import ZOO, ramp


def model() -> Any:
    embed, steps, weights = np.array(ramp(10, 4)), jnp.array(0), {"<b>": jnp.ones((4, 4)), "bias": jnp.ones(4)}
    return {"act": jnp.tanh, "embed": embed, "head": embed, "layers": {"[red]": weights}, "steps": [steps, steps]}


TRAINED = ("embed", "head", "**.bias")
TEXT = """\
path                 shape  dtype    elements  bytes  role     tied to
embed                10,4   float32        40  160 B  trained  head
layers."[red]".<b>   4,4    float32        16   64 B  frozen
layers."[red]".bias  4      float32         4   16 B  trained
steps.0              ()     int32           1    4 B  other

trained    44 elements in 2 arrays, 176 B
frozen     16 elements in 1 array, 64 B
other      1 element in 1 array, 4 B
no arrays  act (function)"""


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_totals_count_every_array_once(specimen):
    tree = specimen.make()
    layout = specimen.layout(tree)
    summary = tp.summary(tree, layout)
    assert [row.path for row in summary.rows if row.role == "trained"] == list(layout.paths)
    assert summary.totals["trained"][3:6] == (len(layout.slots), layout.size, layout.nbytes)
    computed = tree["decoder"] if specimen is ZOO["transposed tie"] else None
    leaves = [leaf for leaf in jax.tree.leaves(tree) if isinstance(leaf, (jax.Array, np.ndarray))]
    arrays = {id(leaf): jnp.asarray(leaf) for leaf in leaves if leaf is not computed}
    want = [(1, array.size, array.nbytes) for array in arrays.values()]
    assert [row[3:6] for row in summary.rows] == want
    assert [sum(total[i] for total in summary.totals.values()) for i in (3, 4, 5)] == np.sum(want, 0).tolist()
    assert repr(tp.summary(eqx.filter_eval_shape(lambda: tree), layout)) == repr(summary)  # of an abstract model, too


def test_every_form_is_the_text():
    summary = tp.summary(model(), TRAINED)
    assert repr(summary) == TEXT
    assert re.findall(">([^<]+)</t[hd]>", summary._repr_html_())[:3] == ["path", "shape", "dtype"]


def test_depth_folds_what_lies_deeper_and_keeps_the_totals():
    whole, folded = tp.summary(model(), TRAINED), tp.summary(model(), TRAINED, depth=1)
    assert (folded.totals, folded.rows) == (whole.totals, whole.rows)
    assert repr(folded).splitlines()[2] == "layers   2 arrays  float32        20   80 B  1 of 2 trained"
    assert repr(tp.summary(model(), TRAINED, depth=9)) == TEXT
    with pytest.raises(ValueError, match="depth must be a whole number of entries, at least 1, got 0"):
        tp.summary(model(), depth=0)


def test_of_many_rows_the_middle_is_left_out_but_not_of_the_totals():
    summary = tp.summary({f"w{i:03}": np.ones(2) for i in range(60)})
    assert re.findall(r"^w\d+|^\.\.\..*", repr(summary), re.M)[18:22] == ["w018", "w019", "... 20 more", "w040"]
    assert "120 elements in 60 arrays, 480 B" in repr(summary)


def _picture(*args: Any) -> tuple[Any, list[str], list[Any]]:
    """The axes, all texts in them, and the names below strips."""
    ax = plot.layout(*args, ax=matplotlib.figure.Figure(figsize=(10, 3)).add_subplot())
    return ax, [text.get_text() for text in ax.texts], [text for text in ax.texts if text.get_rotation()]


@pytest.mark.parametrize("name", ["mlp", "frozen tie", "empty leaves", "all frozen"])
def test_every_parameter_has_a_box_of_its_share(name):
    model = ZOO[name].make()
    layout = ZOO[name].layout(model)
    frozen = [row for row in tp.summary(model, layout).rows if row.role == "frozen"]
    patches = _picture(layout)[0].patches
    boxes = [(each.get_x(), each.get_width()) for each in patches if each.get_fill() and each.get_hatch() is None]
    assert len(boxes) == 1 + len(layout.slots) + bool(frozen) + len(frozen)
    assert boxes[0] == (0, 1)  # the strip itself, then what lies in it
    want = [(slot.offset / max(layout.size, 1), slot.size / max(layout.size, 1)) for slot in layout.slots]
    np.testing.assert_allclose(np.ravel(boxes[1 : 1 + len(want)]), np.ravel(want))


def test_ties_are_hatched_and_named_and_what_is_frozen_is_set_apart():
    ax, texts, _ = _picture(model() | {"c$d$": np.ones(2)}, TRAINED)
    assert texts[0] == "the vector: 44 float32, 176 B"
    assert {"embed = head", "frozen, in no vector: 18 elements, 72 B", "c$d$"} < set(texts)
    assert {text.get_parse_math() for text in ax.texts} == {False}  # names are no mathematics
    assert sum(patch.get_hatch() is not None for patch in ax.patches) == 1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["tied: at several paths", "frozen"]
    with pytest.raises(TypeError, match="a Layout already fixes which parameters train; leave `trainable` out"):
        plot.layout(tp.layout(model()), "embed")
    restructure = tp.ravel(model(), TRAINED)[1]
    assert _picture(restructure)[1] == _picture(restructure.layout)[1]


def test_names_keep_apart_and_many_neighbours_share_one():
    names = _picture({"params": {f"Block_{i:02}": {"w": np.ones(64), "b": np.ones(8)} for i in range(24)}})[2]
    assert [text.get_text() for text in names] == [f"params.Block_{i:02}" for i in range(0, 24, 2)]
    places = [text.get_position()[0] for text in _picture({f"w{i:03}": np.ones(1) for i in range(200)})[2]]
    assert len(places) == 20
    assert np.diff(places).min() > 0.04
    assert places[-1] <= 1
