"""A summary says what trains, how large it is and what is tied to what; a picture shows the same."""

import html
import io
import itertools
import re
import subprocess
import sys
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.figure
import numpy as np
import optax
import pytest
import rich.console

import treeparams as tp
from treeparams import optim, plot

from .zoo import ZOO


class Model(eqx.Module):
    mean: jax.Array = tp.field(trainable=False)
    embed: jax.Array
    layers: tuple[eqx.nn.Linear, ...]
    head: jax.Array
    steps: jax.Array
    key: jax.Array
    act: Any
    rate: float = 0.1


def model() -> Model:
    embed = jnp.ones((10, 4))
    layers = tuple(eqx.nn.Linear(4, 4, key=jax.random.key(i)) for i in range(3))
    return Model(jnp.zeros(4), embed, layers, embed, jnp.array(0), jax.random.key(1), jnp.tanh)


GROUPS = {"layers": optax.sgd(1.0), "**": optax.adam(1.0)}


def _nbytes(leaf: Any) -> int:
    return leaf.nbytes if isinstance(leaf, jax.Array) else jnp.asarray(leaf).nbytes  # int64 of NumPy is int32 here


# -- The table


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_totals_count_every_array_once(specimen):
    tree = specimen.make()
    layout = specimen.layout(tree)
    summary = tp.summary(tree, layout)
    assert summary.totals["trained"] == (len(layout.slots), layout.size, layout.nbytes)
    computed = tree["decoder"] if specimen is ZOO["transposed tie"] else None
    arrays = {
        id(leaf): leaf
        for leaf in jax.tree.leaves(tree)
        if eqx.is_array_like(leaf) and hasattr(leaf, "dtype") and leaf is not computed
    }
    assert sum(total.arrays for total in summary.totals.values()) == len(arrays) == len(summary.rows)
    assert sum(total.elements for total in summary.totals.values()) == sum(leaf.size for leaf in arrays.values())
    assert sum(total.nbytes for total in summary.totals.values()) == sum(map(_nbytes, arrays.values()))


def test_an_abstract_model_has_the_same_summary():
    tree = eqx.tree_at(lambda m: m.head, model(), jnp.ones((4, 10)))  # identity does not outlive abstraction
    ties = {"head": ("embed", jnp.transpose)}
    concrete = repr(tp.summary(tree, tp.layout(tree, ties=ties)))
    abstract = eqx.filter_eval_shape(lambda: tree)
    assert repr(tp.summary(abstract, tp.layout(abstract, ties=ties))) == concrete
    assert "head (transpose)" in concrete


def test_what_is_shown_of_each_array():
    rows = {row.path: row for row in tp.summary(model(), ("embed", "head")).rows}
    assert list(rows) == [
        "mean", "embed", *(f"layers.{i}.{name}" for i in range(3) for name in ("weight", "bias")), "steps", "key"
    ]  # fmt: skip
    assert rows["embed"] == ("embed", (10, 4), "float32", 1, 40, 160, "trained", "head", "")
    assert rows["steps"] == ("steps", (), "int32", 1, 1, 4, "other", "", "")
    assert [rows[path].role for path in ("mean", "layers.0.bias", "key")] == ["frozen", "frozen", "other"]


def test_what_is_no_array_is_named():
    assert repr(tp.summary(model())).splitlines()[-1] == "no arrays  act (function), rate (float)"


def test_depth_folds_what_lies_deeper_and_keeps_the_totals():
    whole, folded = tp.summary(model(), "layers.*.bias"), tp.summary(model(), "layers.*.bias", depth=1)
    assert folded.totals == whole.totals
    lines = repr(folded).splitlines()
    assert [line.split("  ")[0] for line in lines[1 : lines.index("")]] == [
        "mean", "embed", "layers", "steps", "key"
    ]  # fmt: skip
    assert re.search(r"^layers +6 arrays +float32 +60 +240 B +3 of 6 trained$", "\n".join(lines), re.M)
    assert repr(tp.summary(model(), depth=9)) == repr(tp.summary(model()))


def test_groups_come_from_a_report():
    tx = optim.trainable(optim.groups(GROUPS))
    summary = tp.summary(model(), groups=optim.report(tx, model()).groups)
    assert summary.totals["group layers"] == (6, 60, 240)
    assert summary.totals["group **"] == (1, 40, 160)
    assert {row.path: row.group for row in summary.rows}["mean"] == ""
    assert "tied to  group" in repr(summary)


def test_the_first_group_that_matches_counts_and_an_alias_stands_for_its_parameter():
    groups = {"head": "by its alias", "**": "the rest"}
    assert {row.path: row.group for row in tp.summary(model(), groups=groups).rows}["embed"] == "by its alias"


@pytest.mark.usefixtures("without_type_checks")
def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="depth must be a whole number of entries, at least 1, got 0"):
        tp.summary(model(), depth=0)
    with pytest.raises(ValueError, match="'heads' selects nothing; nearest: 'head'"):
        tp.summary(model(), groups={"heads": "x"})
    with pytest.raises(TypeError, match="groups is a dictionary from a `where` to a name, got 0 for 'head'"):
        tp.summary(model(), groups={"head": 0})
    with pytest.raises(TypeError, match=r"a summary is of a model, got a Layout; write tp.summary\(model, layout\)"):
        tp.summary(tp.layout(model()))


def test_an_array_that_is_no_parameter_is_shown_once_with_its_other_paths():
    counter = jnp.array(3)
    (row,) = tp.summary({"a": counter, "b": [counter]}).rows
    assert (row.path, row.tied_to, row.elements) == ("a", "b.0", 1)


def test_of_many_rows_the_middle_is_left_out_of_every_form_but_not_of_the_totals():
    tree = {f"w{i:03}": jnp.ones(2) for i in range(60)}
    summary = tp.summary(tree)
    for text in (repr(summary), summary._repr_html_(), _by_rich(summary)):
        assert "... 20 more" in text
        assert "w019" in text
        assert "w020" not in text
        assert "120 elements in 60 arrays, 480 B" in text


def _by_rich(value: Any) -> str:
    console = rich.console.Console(file=io.StringIO(), width=120, color_system=None)
    console.print(value)
    return console.file.getvalue()


def test_html_and_rich_show_the_same_cells_as_the_text():
    tree = {"<b>": {"w": jnp.ones(2)}, "[red]": jnp.ones(3)}
    tree["alias"] = tree["[red]"]
    summary = tp.summary(tree)
    markup = summary._repr_html_()
    assert html.unescape(markup.removeprefix("<pre>").removesuffix("</pre>")) == repr(summary)
    assert "<b>" not in markup
    cells = {cell for line in repr(summary).split("\n\n")[0].splitlines() for cell in re.split(r"  +", line)}
    assert {"<b>.w", '"[red]"', "alias"} <= cells
    assert all(cell in _by_rich(summary) for cell in cells)


def test_rich_and_matplotlib_are_needed_only_where_they_are_used():
    code = """
import sys
sys.modules["rich"] = sys.modules["matplotlib"] = None
import jax.numpy as jnp, treeparams as tp
print(tp.summary({"w": jnp.ones(2)}))
try:
    import treeparams.plot
except ModuleNotFoundError as error:
    print(error)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "trained  2 elements in 1 array, 8 B" in printed
    assert "treeparams.plot needs matplotlib: pip install 'treeparams[plot]'" in printed.replace(".pyplot", "")


# -- The picture


def _axes() -> Any:
    return matplotlib.figure.Figure(figsize=(10, 3)).add_subplot()


def _boxes(ax: Any) -> list[tuple[float, float]]:
    filled = [patch for patch in ax.patches if patch.get_fill() and patch.get_hatch() is None]
    return [(patch.get_x(), patch.get_width()) for patch in filled]


@pytest.mark.parametrize("specimen", ZOO.values(), ids=ZOO)
def test_every_parameter_has_a_box_of_its_share(specimen):
    tree = specimen.make()
    layout = specimen.layout(tree)
    rows = tp.summary(tree, layout).rows
    frozen = [row for row in rows if row.role == "frozen"]
    boxes = _boxes(plot.layout(layout, ax=_axes()))
    assert len(boxes) == 1 + len(layout.slots) + bool(frozen) + len(frozen)
    assert boxes[0] == (0, 1)  # the strip itself, then what lies in it
    want = [(slot.offset / max(layout.size, 1), slot.size / max(layout.size, 1)) for slot in layout.slots]
    np.testing.assert_allclose(np.ravel(boxes[1 : 1 + len(want)]), np.ravel(want))


def test_ties_are_hatched_and_named_and_what_is_frozen_is_set_apart():
    ax = plot.layout(model(), ax=_axes())
    texts = [text.get_text() for text in ax.texts]
    assert texts[0] == "the vector: 100 float32, 400 B"
    assert "embed = head" in texts
    assert texts[texts.index("frozen, in no vector: 4 elements, 16 B") + 1] == "mean"
    assert sum(patch.get_hatch() is not None for patch in ax.patches) == 1
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["tied: at several paths", "frozen"]


def test_names_keep_apart_and_many_neighbours_share_one():
    mlp = eqx.nn.MLP(30, 10, 64, 20, key=jax.random.key(0))
    ax = plot.layout(mlp, ax=_axes())
    names = [text for text in ax.texts if text.get_rotation()]
    assert [text.get_text() for text in names] == [f"layers.{i}" for i in range(21)]
    places = [text.get_position()[0] for text in names]
    assert min(b - a for a, b in itertools.pairwise(places)) > 0.04
    assert places[-1] <= 1
    flat = plot.layout({f"w{i:03}": jnp.ones(1) for i in range(200)}, ax=_axes())
    assert len([text for text in flat.texts if text.get_rotation()]) == 20
    block = {"kernel": jnp.ones((3, 3)), "bias": jnp.ones(3)}
    wrapped = plot.layout({"params": {f"Block_{i:02}": tp.copy(block) for i in range(24)}}, ax=_axes())
    assert [text.get_text() for text in wrapped.texts][1:3] == ["params.Block_00", "params.Block_02"]


def test_names_are_no_mathematics():
    ax = plot.layout({"$\\frac{$": jnp.ones(2), "c$d$": jnp.ones(2)}, ax=_axes())
    ax.figure.canvas.draw()
    assert {text.get_parse_math() for text in ax.texts} == {False}


def test_a_layout_takes_no_second_choice():
    with pytest.raises(TypeError, match="the first argument is a Layout, which says what is trained; drop `trainable`"):
        plot.layout(tp.layout(model()), "embed")
