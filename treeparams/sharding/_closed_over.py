"""Arrays that a loss closes over, split over explicit axes: JAX runs no such loss over devices."""

import contextlib
import re
from collections.abc import Iterator

# Of `jax.shard_map`, and of a function under automatic partitioning. Both show the type of the array, with its axes.
_SAID_BY_JAX = ("Closing over inputs to shard_map", "should match the aval mesh")


@contextlib.contextmanager
def naming_closed_over() -> Iterator[None]:
    """Says in words of this library that a loss closes over a split array, where JAX says it in its own."""
    try:
        yield
    except (NotImplementedError, ValueError) as error:
        found = re.search(r"\w+\[[^\]]*@[^\]]*\]", str(error))
        if found is None or not any(words in str(error) for words in _SAID_BY_JAX):
            raise
        raise ValueError(
            f"the loss closes over an array {found.group()}, which is split over explicit axes of the mesh. Pass it in "
            "the batch or in the model, or let it be whole on each device: jax.device_put(array, plan.whole)"
        ) from error
