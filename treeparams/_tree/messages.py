"""Warnings at the line that calls this library, and the error that names a deleted array."""

import inspect
import os
import warnings
from collections.abc import Hashable

import jax
import jaxtyping
from jax.core import Tracer

from .flattening import flatten
from .memory import is_new
from .structure import scan
from .types import PyTree

AS_ARRAY = "write jnp.asarray(number), or tp.field(converter=jnp.asarray) in its class"
# Where run-time checks of annotations are switched on, they stand between the calls of this library.
OURS = (os.path.dirname(os.path.dirname(__file__)), os.path.dirname(jaxtyping.__file__), "<@beartype(treeparams")


def warn(message: str, about: Hashable = None) -> None:
    """Gives a warning at the line that called this library; only once for each `about`."""
    if about is not None and not is_new(about):
        return
    frame, levels = inspect.currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(OURS):
        frame, levels = frame.f_back, levels + 1
    warnings.warn(message, UserWarning, stacklevel=levels)


def name_deleted(error: Exception, tree: PyTree) -> None:
    """Raises an error that names a deleted array of a tree, if there is one.

    Call it after JAX has failed: asking each array beforehand would cost more than all other checks.
    """
    leaves, treedef = flatten(tree)
    for leaf, path in zip(leaves, scan(tree, leaves, treedef).paths, strict=True):
        if is_concrete(type(leaf)) and leaf.is_deleted():
            raise RuntimeError(
                f"the array at {path!r} has been deleted, as by a step that donates it; if you need the model after "
                "the step, keep a copy, tp.copy(model)"
            ) from error


def is_concrete(kind: type) -> bool:
    """Returns whether a type is that of JAX arrays that have values."""
    return issubclass(kind, jax.Array) and not issubclass(kind, Tracer)
