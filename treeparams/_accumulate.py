"""The gradient of a large batch in the memory of a small one."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import jax.tree_util as jtu

from ._flat import added, as_given, as_vectors, leaves_of
from ._mesh import is_varying
from ._structure import common_dtype, describe
from ._vector import Restructure
from ._view import unwrapped


def accumulate(loss: Callable[..., Any], restructure: Restructure, microbatches: int) -> Callable[..., tuple[Any, Any]]:
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

    Args:
        loss: a function of the model and the batch that returns the *mean* over the examples, a real scalar.
        restructure: from `tp.ravel`. Inside of a `jax.jit` make it an argument, or its frozen arrays become constants
            of the program.
        microbatches: the number of pieces. They are of equal size, but for the last, which takes what is left and
            counts by its size; of few examples fewer pieces may be made.

    Returns:
        A function `(vector, *batch, **kwargs) -> (value, gradient)`. Every array in `batch` has the examples as its
        leading axis; keyword arguments go to the loss as they are. Value and gradient are summed in float32 (in float64
        if the vector is); the gradient has the form of the vector, one or a tuple.

    Raises:
        ValueError: `microbatches` is not positive; arrays of the batch have no or different leading axes, or there are
            no examples; as for calling `restructure`.
        TypeError: as for calling `restructure`.
    """
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"microbatches must be a positive number of pieces, got {microbatches!r}")

    def value_and_gradient(vector: Any, /, *batch: Any, **kwargs: Any) -> tuple[Any, Any]:
        layout = restructure.layout
        vectors = as_vectors(layout, unwrapped(layout, vector))
        examples = _count_examples(batch)
        size = -(-examples // microbatches)

        leaves = leaves_of(layout, vectors)  # outside of the loop, which runs in the memory of the sums and a piece

        def add(sums: Any, start: Any, count: int) -> Any:
            piece = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count), batch)
            value, grads = jax.value_and_grad(lambda leaves: loss(restructure.rest.fill(leaves), *piece, **kwargs))(
                leaves
            )
            weight = count / examples
            return sums[0] + value.astype(sums[0].dtype) * weight, added(layout, sums[1], grads, weight)

        sums = _zeros(vectors)
        whole, rest = divmod(examples, size)
        # What differs from device to device inside a `shard_map` has another type than zeros, so that only after a
        # first piece the sums have the type that the scan keeps.
        first = 1 if is_varying((vectors, batch, restructure)) else 0
        if first:
            sums = add(sums, 0, size)
        if whole > first:
            sums, _ = jax.lax.scan(lambda sums, i: (add(sums, i * size, size), None), sums, jnp.arange(first, whole))
        value, gradient = add(sums, whole * size, rest) if rest else sums
        return value, as_given(layout, gradient)

    return value_and_gradient


def _zeros(vectors: tuple[Any, ...]) -> Any:
    wide = [common_dtype([vector.dtype, jnp.float32]) for vector in vectors]
    gradient = tuple(jnp.zeros_like(vector, dtype) for vector, dtype in zip(vectors, wide, strict=True))
    return jnp.zeros((), common_dtype([jnp.float32, *(jnp.finfo(dtype).dtype for dtype in wide)])), gradient


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
