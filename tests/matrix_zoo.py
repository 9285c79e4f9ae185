"""Every kind of matrix of `treeparams.matrices`, in any shape it can have."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from treeparams import matrices


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@dataclasses.dataclass
class Kind:
    make: Callable[[int, int], Any]  # of rows and columns
    is_square: bool = False


MATRICES = {
    "svd": Kind(lambda m, n: matrices.SVD.random(m, n, key=jax.random.key(0))),
    "svd from dense": Kind(lambda m, n: matrices.SVD.from_dense(normal(1, m, n))),
    "svd of few reflections": Kind(lambda m, n: matrices.SVD.random(m, n, key=jax.random.key(2), reflections=2)),
    "svd of rotations": Kind(lambda m, n: matrices.SVD.random(m, n, key=jax.random.key(3), kind="givens")),
    "inverse of an svd": Kind(lambda m, n: matrices.SVD.from_dense(normal(4, m, n)).inv(), is_square=True),
    "orthogonal": Kind(lambda m, n: matrices.Orthogonal(normal(5, 3, n)), is_square=True),
    "rotations": Kind(lambda m, n: matrices.Givens.random(n, key=jax.random.key(6)), is_square=True),
    "low rank": Kind(lambda m, n: matrices.LowRank(normal(7, m, n), normal(8, m, 2), normal(9, 2, n), 0.5)),
    "transposed": Kind(lambda m, n: matrices.LowRank(normal(7, n, m), normal(8, n, 2), normal(9, 2, m)).T),
    "product": Kind(
        lambda m, n: matrices.SVD.from_dense(normal(1, m, 3)) @ matrices.SVD.from_dense(normal(2, 3, n))
    ),
    "sum": Kind(
        lambda m, n: matrices.SVD.from_dense(normal(1, m, n)) - 2 * matrices.SVD.from_dense(normal(2, m, n)) / jnp.array(3.0)
    ),
}
