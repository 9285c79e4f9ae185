"""Arrays put where a plan has them, whether they are values, traced or shapes; and the order of rows that are owned."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import NamedSharding

from .._joined import Form
from .._layout import Layout
from .._mesh import lay
from .._stacks import in_groups
from ._specs import Placed


def put_leaf(leaf: Any, sharding: NamedSharding) -> Any:
    """An array laid over a mesh, in a buffer of its own; of a shape the same with its sharding."""
    if isinstance(leaf, jax.ShapeDtypeStruct):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)
    if isinstance(leaf, Tracer):
        return lay(leaf, sharding)
    if isinstance(leaf, np.ndarray):
        leaf = leaf.astype(jax.dtypes.canonicalize_dtype(leaf.dtype))
    if sharding.is_fully_addressable:
        # The copy first: what is put on the device where it is already is not copied, not even with `may_alias=False`.
        return jax.device_put(jnp.copy(leaf), sharding)
    if not getattr(leaf, "is_fully_addressable", True):
        return jax.jit(jnp.copy, out_shardings=sharding)(leaf)
    # Over several processes each gives what its own devices have.
    is_key = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    values = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
    array = jax.make_array_from_callback(values.shape, sharding, lambda part: values[part])
    return jax.random.wrap_key_data(array, impl=jax.random.key_impl(leaf)) if is_key else array


def stacks_as_placed(layout: Layout, placed: Sequence[Placed], groups: Sequence[str], *, at_rest: bool = True) -> Form:
    """The stacks of slots, those that lie alike in one; at rest, rows that are owned are in an order of their own.

    Args:
        layout: of the model.
        placed: how each slot lies.
        groups: the names of all groups; of one alone there are no groups.
        at_rest: whether rows that are owned are in the order that they lie in, or else in tree order.
    """
    rows: dict[str, dict[str, list[int]]] = {name: {} for name in groups}
    for number, (slot, each) in enumerate(zip(layout.slots, placed, strict=True)):
        rows[each.group].setdefault(slot.key, []).append(number)
    if at_rest and "owned" in rows:
        rows["owned"] = {key: [its[i] for i in spread(len(its))] for key, its in rows["owned"].items()}
    numbers = {name: [i for its in keys.values() for i in its] for name, keys in rows.items()}
    return in_groups(layout, numbers if len(groups) > 1 else {None: [i for its in numbers.values() for i in its]})


def spread(count: int) -> list[int]:
    """The order of rows in which those that follow one another lie on different devices.

    Cut into 2, 4, 8, ... equal parts, each part has one row of any so many that follow one another: the remainders come
    in the order of their bits reversed. So the layers of a net can be gathered a few at a time, one from each device,
    and what was saved over some number of devices is right over another.

    >>> spread(8)  # over two devices the even rows and the odd ones
    [0, 4, 2, 6, 1, 5, 3, 7]
    """
    bits = (count & -count).bit_length() - 1 if count else 0
    power = 1 << bits
    reverse = lambda number: int(f"{number:0{bits}b}"[::-1], 2) if bits else 0
    return sorted(range(count), key=lambda row: (reverse(row % power), row // power))
