"""Plots of layouts. Needs Matplotlib, which the extra `treeparams[plot]` installs.

>>> import jax.numpy as jnp
>>> from treeparams import plot
>>> axes = plot.layout({"embed": jnp.ones((10, 4)), "bias": jnp.ones(4)})
"""

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ._forms.restructure import Restructure
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

__all__ = ["layout"]


def __dir__() -> list[str]:
    return __all__  # what is imported here is no name of this module


# Okabe and Ito's colours, which the colour-blind can tell apart; frozen parameters are grey.
_COLOURS = ("#56B4E9", "#E69F00", "#009E73", "#F0E442", "#CC79A7", "#0072B2", "#D55E00")
_FROZEN, _EMPTY = "#BBBBBB", "#F4F4F4"
_LABELS = 22  # below a strip; with more, neighbours below one node share a label
_FONT = 9  # points
_LETTER = 0.6 * _FONT / 72  # inches, the mean width
_INCHES = 0.45  # of a unit of height, which is that of a strip
_SLOPE = 35  # degrees, of the names below a strip


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
        model: any pytree, also with `jax.ShapeDtypeStruct`s as leaves; or a `Layout` or a `Restructure`.
        trainable: the parameters to train, as for `tp.layout`.
        ax: the axes to draw on, a few inches wide; `None` makes a new figure.

    Returns:
        The axes.

    Raises:
        ValueError: see `tp.layout`.
        TypeError: you passed `trainable` with a `Layout` or a `Restructure`; see also `tp.layout`.
    """
    known = model.layout if isinstance(model, Restructure) else model  # of which the leaves are the frozen arrays
    if isinstance(known, Layout) and trainable is not None:
        raise TypeError(f"a {type(model).__name__} already fixes which parameters train; leave `trainable` out")
    known = known if isinstance(known, Layout) else layout_of(known, trainable)
    index, bottom = index_of(known), 0.0
    figure = None if ax else plt.figure(layout="constrained")
    ax = ax or plt.axes()
    for title, slots in _strips(known).items():
        bottom -= _draw(ax, title, slots, bottom, index.tied_to, _colours(known))
    if figure:
        figure.set_size_inches(8.5, _INCHES * (0.2 - bottom))
    ax.set(xlim=(-0.005, 1.07), ylim=(bottom + 1.6, 1.8))
    ax.axis("off")
    tied = Patch(facecolor="grey", edgecolor="white", hatch="//", label="tied: at several paths")
    frozen = Patch(facecolor=_FROZEN, edgecolor="black", label="frozen")
    marks = [tied] * bool(known.ties) + [frozen] * bool(index.frozen)
    if marks:
        ax.legend(handles=marks, loc="upper right", ncols=2, frameon=False, fontsize=_FONT, borderaxespad=0)
    return ax


def _strips(known: Layout) -> Mapping[str, Sequence[Slot]]:
    """Returns the parameters of each strip by its title."""
    title = f"the vector: {known.size:,} {known.dtype}, {in_bytes(known.size * known.dtype.itemsize)}"
    strips, frozen = {title: known.slots}, index_of(known).frozen
    if frozen:
        size, nbytes = sum(slot.size for slot in frozen), sum(slot.size * slot.dtype.itemsize for slot in frozen)
        strips[f"frozen, in no vector: {size:,} elements, {in_bytes(nbytes)}"] = frozen
    return strips


def _colours(known: Layout) -> dict[str, str]:
    """Returns the colour of each parameter."""
    index = index_of(known)
    paths = [index.structure.paths[i] for i in index.distinct]
    depth = _branching(paths)
    heads = {path: split_path(path)[:depth] for path in paths}
    number = {head: i for i, head in enumerate(dict.fromkeys(heads.values()))}
    colours = {path: _COLOURS[number[head] % len(_COLOURS)] for path, head in heads.items()}
    return colours | {slot.path: _FROZEN for slot in index.frozen}


def _branching(paths: Iterable[str]) -> int:
    """Returns at which entry paths part."""
    entries = zip(*map(split_path, paths), strict=False)
    return 1 + len(list(itertools.takewhile(lambda each: len(set(each)) == 1, entries)))


def _labels(slots: Sequence[Slot], length: int, tied: Mapping[str, str]) -> list[tuple[float, str]]:
    """Returns names, each with the middle of its slots as a fraction of the strip."""
    # The deepest names that are few enough; where even those at which the paths part are too many, some of them.
    groups: list[tuple[str, list[Slot]]] = []
    shallowest = _branching(slot.path for slot in slots)
    for depth in range(max([shallowest, *(len(split_path(slot.path)) for slot in slots)]), shallowest - 1, -1):
        head = lambda slot, depth=depth: join_path(split_path(slot.path)[:depth])
        groups = [(name, list(its)) for name, its in itertools.groupby(slots, head)]
        if len(groups) <= _LABELS:
            break
    labels = []
    for name, its in groups[:: -(-len(groups) // _LABELS) or 1]:
        ties = tied.get(its[0].path) if len(its) == 1 else None
        middle = (its[0].offset + its[-1].offset + its[-1].size) / 2
        labels.append((middle / length, (name or "the model") + (f" = {ties}" if ties else "")))
    return labels


def _draw(
    ax: Axes, title: str, slots: Sequence[Slot], base: float, tied: Mapping[str, str], colours: Mapping[str, str]
) -> float:
    """Draws a strip, and the names of its parameters below it. Returns the height of both."""
    length = max(sum(slot.size for slot in slots), 1)  # in elements
    ax.text(0, base + 1.12, title, fontsize=10, weight="bold", va="bottom", parse_math=False)
    ax.add_patch(Rectangle((0, base), 1, 1, facecolor=_EMPTY, edgecolor="grey", linewidth=0.5))
    for slot in slots:
        where = (slot.offset / length, base), slot.size / length, 1.0
        ax.add_patch(Rectangle(*where, facecolor=colours[slot.path], edgecolor="black", linewidth=0.5))
        if slot.path in tied:
            ax.add_patch(Rectangle(*where, fill=False, edgecolor="white", linewidth=0, hatch="//"))
    # Label i cannot be left of label i - 1 plus one step. With i steps taken off, that is a running maximum. The same
    # from the right end keeps the last labels within the strip.
    labels = _labels(slots, length, tied)
    steps = 0.98 / max(len(labels), _LABELS) * np.arange(len(labels))
    middles = np.array([middle for middle, _ in labels])
    apart = np.minimum(np.maximum.accumulate(middles - steps) + steps, 1 - steps[::-1])
    for (middle, text), x in zip(labels, apart, strict=True):
        ax.plot([middle, middle, x, x], [base, base - 0.12, base - 0.4, base - 0.5], color="grey", linewidth=0.6)
        turned = {"rotation": -_SLOPE, "rotation_mode": "anchor", "ha": "left", "va": "center", "parse_math": False}
        ax.text(x, base - 0.58, text, fontsize=_FONT, **turned)
    longest = max([len(text) for _, text in labels], default=0)
    return 1.9 + (0.55 + longest * _LETTER * math.sin(math.radians(_SLOPE)) / _INCHES if labels else 0)
