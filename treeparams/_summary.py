"""summary: lists the arrays of a model, which of them train, their sizes and their ties."""

import jax.tree_util as jtu

from ._forms.restructure import Restructure, halves_of
from ._slots.index import Summary
from ._slots.layout import Layout, Trainable, look_up
from ._tree.structure import structure_of
from ._tree.text import count_of
from ._tree.types import PyTree


def summary(model: PyTree, trainable: Trainable = None, *, depth: int | None = None) -> Summary:
    """Lists the arrays of a model: which of them train, their sizes and their ties.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> embed = jnp.arange(40.0).reshape(10, 4)
    >>> model = {
    ...     "embed": embed,
    ...     "norm": {"mean": jnp.zeros(4)},
    ...     "head": embed,
    ...     "steps": jnp.array(0),
    ...     "act": jnp.tanh,
    ... }
    >>> tp.summary(model, tp.layout(model, freeze="norm"))
    path       shape  dtype    elements  bytes  role     tied to
    embed      10,4   float32        40  160 B  trained  head
    norm.mean  4      float32         4   16 B  frozen
    steps      ()     int32           1    4 B  other
    <BLANKLINE>
    trained    40 elements in 1 array, 160 B
    frozen     4 elements in 1 array, 16 B
    other      1 element in 1 array, 4 B
    no arrays  act (function)

    You can pass the shapes of a model that is too large to make. `depth=1` gives one row for each of its entries:

    >>> make = lambda key: eqx.nn.MLP(512, 512, 8192, depth=8, key=key)
    >>> tp.summary(eqx.filter_eval_shape(make, jax.random.key(0)), "layers.8", depth=1)
    path    shape      dtype       elements   bytes  role
    layers  18 arrays  float32  478,216,704  1.9 GB  2 of 18 trained
    <BLANKLINE>
    trained    4,194,816 elements in 2 arrays, 16.8 MB
    frozen     474,021,888 elements in 16 arrays, 1.9 GB
    no arrays  activation (function), final_activation (function)

    The line "narrow" counts trained parameters with less than single precision:

    >>> tp.summary({"w": jnp.ones(3, jnp.bfloat16)})
    path  shape  dtype     elements  bytes  role
    w     3      bfloat16         3    6 B  trained
    <BLANKLINE>
    trained  3 elements in 1 array, 6 B
    narrow   3 trained in bfloat16, where small steps round to zero; optim.master and tp.Ema keep float32

    For a `Restructure` you see where each parameter is stored: in which stack and row, or at which elements of the
    vector.

    >>> tp.summary(tp.stack({"w": jnp.ones((2, 3)), "v": jnp.ones((2, 3))})[1])
    path  shape  dtype    elements  bytes  role     place
    v     2,3    float32         6   24 B  trained  float32[2,3] 0
    w     2,3    float32         6   24 B  trained  float32[2,3] 1
    <BLANKLINE>
    trained  12 elements in 2 arrays, 48 B

    To see which group of an optimiser each parameter is in, use `optim.report`. For a state of `optim.trainable`, the
    line "stuck" names narrow parameters that steps leave as they were.

    Args:
        model: any pytree, also with `jax.ShapeDtypeStruct`s as leaves; or a `Restructure`.
        trainable: the parameters to train, as for `tp.layout`; leave it out for a `Restructure`. The column "role"
            shows the result; "other" means arrays that are not parameters: ints, bools, keys.
        depth: how many entries of a path are shown; all deeper arrays below one node share a row. `None` shows every
            array.

    Returns:
        A `Summary`, which prints as a table; its totals count a tied parameter once. 1 kB is 1000 B.

    Raises:
        ValueError: `depth` is not a positive integer; see also `tp.layout`.
        TypeError: `model` is a `Layout`; you passed `trainable` with a `Restructure`; see also `tp.layout`.
    """
    if isinstance(model, Layout):
        raise TypeError("expected a model, got a Layout; write tp.summary(model, layout), or print the layout")
    if isinstance(model, Restructure):
        if trainable is not None:
            raise TypeError("a Restructure already fixes which parameters train; leave `trainable` out")
        halves = halves_of(model)
        index, places = halves.rest.index, halves.places
    else:
        leaves, _, structure = structure_of(model)
        index, places = look_up(structure, trainable, leaves)[1], {}
    if depth is not None:
        count_of("depth", depth, "entries")
    notes: dict[str, str] = {}
    has_more = lambda node: hasattr(type(node), "summary_notes")  # as a state of an optimiser has
    for node in filter(has_more, jtu.tree_leaves(model, is_leaf=has_more)):
        notes |= node.summary_notes()
    return index.summary(places, depth=depth, notes=notes)
