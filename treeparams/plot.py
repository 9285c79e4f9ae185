"""Plots of layouts. Needs Matplotlib, which the extra `treeparams[plot]` installs.

>>> import jax.numpy as jnp
>>> from treeparams import plot
>>> axes = plot.layout({"embed": jnp.ones((10, 4)), "bias": jnp.ones(4)})
"""

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from ._slots.index import Slot
from ._slots.layout import Layout, Trainable, index_of, layout as layout_of
from ._tree.paths import join_path, split_path
from ._tree.text import in_bytes
from ._tree.types import PyTree

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.patches import Patch, Rectangle
except ModuleNotFoundError:
    needed = "treeparams.plot needs matplotlib, of the extra treeparams[plot]: pip install matplotlib"
    raise ModuleNotFoundError(needed) from None

# Okabe and Ito's colours, which the colour-blind can tell apart; frozen parameters are grey.
_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00")
_FROZEN, _EMPTY = "#BBBBBB", "#F4F4F4"
_LABELS = 22  # below a strip; with more, neighbours below one node share a label
_FONT = 9  # points
_LETTER = 0.6 * _FONT / 72  # inches, the mean width
_INCHES = 0.45  # of a unit of height, which is that of a strip
_SLOPE = 35  # degrees, of the names below a strip


class _Label(NamedTuple):
    text: str
    middle: float  # of the slots that it names, as a fraction of the strip
    width: float


class _Strip(NamedTuple):
    title: str
    slots: Sequence[Slot]
    length: int
    frozen: bool


def layout(model: PyTree, trainable: Trainable = None, *, ax: Axes | None = None) -> Axes:
    """Draws a layout: the vector as a strip of named parameters, with tied ones marked, and the frozen ones below it.

    >>> import equinox as eqx, jax, treeparams as tp
    >>> from treeparams import plot
    >>> mlp = eqx.nn.MLP(2, 1, 8, 2, key=jax.random.key(0))
    >>> axes = plot.layout(mlp, tp.layout(mlp, freeze="layers.0"))
    >>> [text.get_text() for text in axes.texts][:2]
    ['the vector: 81 float32, 324 B', 'layers.1.weight']

    Each strip has a separate scale, in elements. Parameters below one node share a colour; the node is the first one
    below the point where the paths branch. With more than about twenty parameters, neighbours share a name.

    Args:
        model: any pytree, also with `jax.ShapeDtypeStruct`s as leaves; or a `Layout`.
        trainable: the parameters to train, as for `tp.layout`.
        ax: the axes to draw on, a few inches wide; `None` makes a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: see `tp.layout`.
        TypeError: you passed `trainable` with a `Layout`; see also `tp.layout`.
    """
    if isinstance(model, Layout) and trainable is not None:
        raise TypeError("the first argument is a Layout, which fixes the trained parameters; drop `trainable`")
    known = model if isinstance(model, Layout) else layout_of(model, trainable)
    strips = _strips(known)
    width = 8.5 if ax is None else ax.get_window_extent().width / ax.figure.dpi
    labels = [_labels(strip, index_of(known).tied_to) for strip in strips]
    bases, bottom = _lower_edges([_inside_and_below(each, width)[1] for each in labels])
    if ax is None:
        _, ax = plt.subplots(figsize=(width, _INCHES * (1.8 - bottom)), layout="constrained")
    colours = _colours(known)
    for strip, base, each in zip(strips, bases, labels, strict=True):
        _draw(ax, strip, base, index_of(known).tied_to, colours)
        _name(ax, base, *_inside_and_below(each, width))
    ax.set(xlim=(-0.005, 1.07), ylim=(bottom, 1.8))
    ax.axis("off")
    marks = []
    if known.ties:
        marks.append(Patch(facecolor="grey", edgecolor="white", hatch="//", label="tied: at several paths"))
    if index_of(known).frozen:
        marks.append(Patch(facecolor=_FROZEN, edgecolor="black", label="frozen"))
    if marks:
        ax.legend(handles=marks, loc="upper right", ncols=2, frameon=False, fontsize=_FONT, borderaxespad=0)
    return ax


def _strips(known: Layout) -> list[_Strip]:
    title = f"the vector: {known.size:,} {known.dtype}, {in_bytes(known.size * known.dtype.itemsize)}"
    strips = [_Strip(title, known.slots, known.size, False)]
    frozen = index_of(known).frozen
    if frozen:
        size = sum(slot.size for slot in frozen)
        nbytes = sum(slot.size * slot.dtype.itemsize for slot in frozen)
        strips.append(_Strip(f"frozen, in no vector: {size:,} elements, {in_bytes(nbytes)}", frozen, size, True))
    return strips


def _colours(known: Layout) -> dict[str, str]:
    """Returns the colour of each parameter."""
    index = index_of(known)
    entries = [index.structure.entries[i] for i in index.distinct]
    paths = [index.structure.paths[i] for i in index.distinct]
    shared = _common_entries(paths)
    heads = {path: entry[: shared + 1] for path, entry in zip(paths, entries, strict=True)}
    number = {head: i for i, head in enumerate(dict.fromkeys(heads.values()))}
    return {path: _COLOURS[number[head] % len(_COLOURS)] for path, head in heads.items()}


def _common_entries(paths: Iterable[str]) -> int:
    """Returns how many entries all paths have in common at their start."""
    entries = zip(*map(split_path, paths), strict=False)
    return len(list(itertools.takewhile(lambda each: len(set(each)) == 1, entries)))


def _labels(strip: _Strip, tied: dict[str, str]) -> list[_Label]:
    # The deepest names that are few enough; where even those at which the paths part are too many, some of them.
    groups: dict[str, list[Slot]] = {}
    shallowest = _common_entries(slot.path for slot in strip.slots) + 1
    deepest = max((len(split_path(slot.path)) for slot in strip.slots), default=0)
    for depth in range(max(deepest, shallowest), shallowest - 1, -1):
        groups = {}
        for slot in strip.slots:
            groups.setdefault(join_path(split_path(slot.path)[:depth]), []).append(slot)
        if len(groups) <= _LABELS:
            break
    chosen = list(groups.items())[:: -(-len(groups) // _LABELS) or 1]
    labels, length = [], max(strip.length, 1)
    for name, slots in chosen:
        ties = tied.get(slots[0].path) if len(slots) == 1 else None
        start, stop = slots[0].offset / length, (slots[-1].offset + slots[-1].size) / length
        labels.append(_Label((name or "the model") + (f" = {ties}" if ties else ""), (start + stop) / 2, stop - start))
    return labels


def _inside_and_below(labels: Sequence[_Label], inches: float) -> tuple[list[_Label], list[_Label]]:
    """Returns the labels that fit inside the strip, and the others."""
    inside, below = [], []
    for label in labels:
        fits = len(label.text) * _LETTER < 0.95 * label.width * inches
        (inside if fits else below).append(label)
    return inside, below


def _lower_edges(below: Sequence[Sequence[_Label]]) -> tuple[list[float], float]:
    """Returns the base of each strip under which these labels are written, and where the last one ends."""
    bases, base = [], 0.0
    for labels in below:
        bases.append(base)
        longest = max((len(label.text) for label in labels), default=0)
        depth = 0.55 + longest * _LETTER * math.sin(math.radians(_SLOPE)) / _INCHES if labels else 0.0
        base -= depth + 1.9
    return bases, base + 1.6


def _draw(ax: Axes, strip: _Strip, base: float, tied: dict[str, str], colours: dict[str, str]) -> None:
    scale = 1 / max(strip.length, 1)
    ax.text(0, base + 1.12, strip.title, fontsize=10, weight="bold", va="bottom", parse_math=False)
    ax.add_patch(Rectangle((0, base), 1, 1, facecolor=_EMPTY, edgecolor="grey", linewidth=0.5))
    for slot in strip.slots:
        face = _FROZEN if strip.frozen else colours[slot.path]
        where = (slot.offset * scale, base), slot.size * scale, 1.0
        ax.add_patch(Rectangle(*where, facecolor=face, edgecolor="black", linewidth=0.5))
        if slot.path in tied:
            ax.add_patch(Rectangle(*where, fill=False, edgecolor="white", linewidth=0, hatch="//"))


def _name(ax: Axes, base: float, inside: Sequence[_Label], below: Sequence[_Label]) -> None:
    for label in inside:
        box = {"facecolor": "white", "alpha": 0.6, "linewidth": 0, "boxstyle": "round,pad=0.15"}
        ax.text(
            label.middle, base + 0.5, label.text, fontsize=_FONT, ha="center", va="center", bbox=box, parse_math=False
        )
    for label, x in zip(below, _apart([label.middle for label in below]), strict=True):
        xs, ys = [label.middle, label.middle, x, x], [base, base - 0.12, base - 0.4, base - 0.5]
        ax.plot(xs, ys, color="grey", linewidth=0.6)
        turned = {"rotation": -_SLOPE, "rotation_mode": "anchor", "ha": "left", "va": "center", "parse_math": False}
        ax.text(x, base - 0.58, label.text, fontsize=_FONT, **turned)


def _apart(middles: Sequence[float]) -> np.ndarray:
    """Moves positions apart, in the same order, so that there is room for a name at each.

    >>> print(_apart([0.2, 0.21, 1.0]).round(3))
    [0.2   0.245 1.   ]
    """
    # Label i cannot be left of label i - 1 plus one step. With i steps taken off, that is a running maximum. The same
    # from the right end keeps the last labels within the strip.
    steps = 0.98 / max(len(middles), _LABELS) * np.arange(len(middles))
    return np.minimum(np.maximum.accumulate(np.asarray(middles) - steps) + steps, 1 - steps[::-1])
