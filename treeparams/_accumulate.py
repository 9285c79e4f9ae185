"""The gradient of a large batch in the memory of a small one."""

import math
from collections.abc import Callable, Sequence
from typing import Any, SupportsIndex

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ._describe import count_of
from ._flat import added, as_given, as_vectors, leaves_of
from ._mesh import in_shard_map, laid_as, replicated, split_over, varying, varying_alike
from ._structure import common_dtype, describe
from ._vector import Restructure
from ._view import unwrapped


def accumulate(
    loss: Callable[..., Any], restructure: Restructure, microbatches: SupportsIndex
) -> Callable[..., tuple[Any, Any]]:
    """Value and gradient of a mean loss over a batch that is taken in pieces, one after another.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> vector, restructure = tp.ravel({"w": jnp.ones(3)})
    >>> loss = lambda model, x, y: jnp.mean((x @ model["w"] - y) ** 2)
    >>> x, y = jnp.ones((10, 3)), jnp.zeros(10)
    >>> value, gradient = tp.accumulate(loss, restructure, 4)(vector, x, y)  # pieces of 3, 3, 3 and 1
    >>> print(value, gradient)
    9.0 [6. 6. 6.]

    Gradients are added in place to one buffer. Beside it and what a single piece needs, it takes the memory of the
    leaves, once: the size of one vector, whatever the number of leaves and of pieces.

    Inside of a `jax.shard_map` give it the vector as one that differs from device to device, and average at the end:
    `jax.lax.pmean(accumulate(...)(jax.lax.pcast(vector, "x", to="varying"), x), "x")`. Of a vector that is the same on
    all devices JAX would sum the gradient over them at each piece.

    Args:
        loss: a function of the model and the batch that returns the *mean* over the examples, a real scalar.
        restructure: from `tp.ravel`. Inside of a `jax.jit` make it an argument, or its frozen arrays become constants
            of the program.
        microbatches: the number of pieces. They are of equal size, but for the last, which takes what is left and
            counts by its size. Fewer are made of few examples, and where the batch lies over devices by type, since
            each takes the same share of a piece.

    Returns:
        A function `(vector, *batch, **kwargs) -> (value, gradient)`. Every array in `batch` has the examples as its
        leading axis; keyword arguments go to the loss as they are, the same for each piece: a key for each example
        belongs into the batch. Value and gradient are summed in float32 (in float64 if the vector is); the gradient has
        the form of the vector, one or a tuple. Beside them nothing is returned; there is no `has_aux`.

    Raises:
        ValueError: `microbatches` is not positive; arrays of the batch have no or different leading axes, or there are
            no examples; as for calling `restructure`.
        TypeError: `restructure` is something else; as for calling it.
    """
    if not isinstance(restructure, Restructure):
        raise TypeError(f"expected a loss and the Restructure of tp.ravel, got {describe(restructure)}")
    pieces = count_of("microbatches", microbatches, "pieces")

    def value_and_gradient(vector: Any, /, *batch: Any, **kwargs: Any) -> tuple[Any, Any]:
        layout = restructure.layout
        given = as_vectors(layout, unwrapped(layout, vector))
        examples = _count_examples(batch)
        size = _size_of_piece(batch, examples, pieces)
        leaves = leaves_of(layout, given)  # outside of the loop, which runs in the memory of the sums and a piece

        def add(sums: Any, start: Any, count: int) -> Any:
            piece = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count), batch)
            of_leaves = lambda leaves: loss(restructure.rest.fill(leaves), *piece, **kwargs)
            value, grads = jax.value_and_grad(of_leaves)(leaves)
            weight = count / examples
            return sums[0] + jnp.asarray(value, sums[0].dtype) * weight, added(layout, sums[1], grads, weight)

        sums = _zeros([replicated(jnp.asarray(each)) for each in given])
        if in_shard_map():
            sums = _as_types(sums, jax.make_jaxpr(lambda sums: add(sums, 0, size))(sums).out_avals)
        whole, rest = divmod(examples, size)
        sums, _ = jax.lax.scan(lambda sums, i: (add(sums, i * size, size), None), sums, jnp.arange(whole))
        value, gradient = add(sums, whole * size, rest) if rest else sums
        laid = [laid_as(each, vector) for each, vector in zip(gradient, given, strict=True)]
        return value, as_given(layout, laid)

    return value_and_gradient


def _zeros(vectors: Sequence[Any]) -> Any:
    wide = [common_dtype([vector.dtype, jnp.float32]) for vector in vectors]
    gradient = tuple(jnp.zeros_like(vector, dtype) for vector, dtype in zip(vectors, wide, strict=True))
    return jnp.zeros((), common_dtype([jnp.float32, *(jnp.finfo(dtype).dtype for dtype in wide)])), gradient


def _as_types(arrays: Any, avals: Sequence[Any]) -> Any:
    # What a scan carries keeps its type, and what differs from device to device has another type than zeros.
    leaves, treedef = jax.tree.flatten(arrays)
    alike = [varying_alike([leaf], varying(aval))[0] for leaf, aval in zip(leaves, avals, strict=True)]
    return treedef.unflatten(alike)


def _size_of_piece(batch: Any, examples: int, pieces: int) -> int:
    # Over the devices of an explicit mesh lie only equal parts.
    devices = math.lcm(*(split_over(array) for array in jax.tree.leaves(batch)))
    return devices * -(-examples // (devices * pieces))


def _count_examples(batch: Any) -> int:
    found: dict[int, str] = {}
    for path, array in jtu.tree_flatten_with_path(batch)[0]:
        name = f"argument {jtu.keystr(path)} of the batch"
        if not getattr(array, "ndim", 0):
            raise ValueError(
                f"{name} must be an array whose leading axis is the examples, got {describe(array)}; pass what is not "
                "to be cut as a keyword argument"
            )
        found.setdefault(array.shape[0], name)
    if not found:
        raise ValueError("there is no batch to cut; pass the arrays of the batch after the vector")
    if len(found) > 1:
        counts = ", ".join(f"{name} has {count}" for count, name in found.items())
        raise ValueError(f"all arrays of the batch must have the same number of examples; {counts}")
    if 0 in found:
        raise ValueError(f"the batch has no examples: {found[0]} is empty")
    return next(iter(found))
