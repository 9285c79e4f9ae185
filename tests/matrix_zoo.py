"""Every kind of matrix of `treeparams.matrices`, in any shape it can have."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from treeparams import matrices


def normal(seed: int, *shape: int) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), shape)


@dataclasses.dataclass(frozen=True)
class Kind:
    make: Callable[[int, int], Any]  # of rows and columns
    is_square: bool = False


def _spread(seed: int, n: int) -> jax.Array:
    """Symmetric, with eigenvalues of at least one half."""
    a = normal(seed, n, n) / max(n, 1) ** 0.5
    return a @ a.T + jnp.eye(n) / 2


def _factor(size: int) -> int:
    return next(factor for factor in (2, 3, 5, 1) if size % factor == 0)


def _rest(size: int) -> int:
    return size // _factor(size)


def low_rank(seed: int, m: int, n: int) -> matrices.LowRank:
    return matrices.LowRank(normal(seed, m, n), normal(seed + 1, m, 2), normal(seed + 2, 2, n), 0.5)


MATRICES = {
    "svd": Kind(lambda m, n: matrices.SVD.from_dense(normal(1, m, n))),
    "svd of few reflections": Kind(lambda m, n: matrices.SVD.random(m, n, key=jax.random.key(2), reflections=2)),
    "svd of rotations": Kind(lambda m, n: matrices.SVD.random(m, n, key=jax.random.key(3), kind="givens")),
    "inverse of an svd": Kind(lambda m, n: matrices.SVD.from_dense(normal(4, m, n)).inv(), is_square=True),
    "orthogonal": Kind(lambda m, n: matrices.Orthogonal(normal(5, 3, n)), is_square=True),
    "low rank": Kind(lambda m, n: low_rank(7, m, n)),
    "transposed": Kind(lambda m, n: low_rank(7, n, m).T),
    "pre-imputing": Kind(lambda m, n: matrices.PreImputing(normal(10, m, n), normal(11, n))),
    "post-imputing": Kind(lambda m, n: matrices.PostImputing(normal(12, m, n), normal(13, m))),
    "diagonal": Kind(lambda m, n: matrices.Diagonal(normal(14, n)), is_square=True),
    "inverse of a diagonal": Kind(lambda m, n: matrices.Diagonal(2 + jnp.cos(normal(15, n))).inv(), is_square=True),
    "circulant": Kind(lambda m, n: matrices.Circulant(normal(16, n)), is_square=True),
    "inverse of a circulant": Kind(
        lambda m, n: matrices.Circulant(0.2 * jnp.sin(normal(17, n)) + 2 * jnp.eye(1, n)[0]).inv(), is_square=True
    ),
    "toeplitz": Kind(lambda m, n: matrices.Toeplitz(normal(18, m), normal(19, n))),
    "kronecker": Kind(
        lambda m, n: matrices.Kronecker(normal(20, *map(_rest, (m, n))), normal(21, *map(_factor, (m, n))))
    ),
    "permuted": Kind(
        lambda m, n: matrices.Permuted(
            matrices.Toeplitz(normal(22, m), normal(24, n)), jnp.arange(m)[::-1], jnp.roll(jnp.arange(n), 1)
        )
    ),
    "selection": Kind(lambda m, n: matrices.Permuted(normal(23, 3, 2), jnp.arange(m) % 2 * 2, jnp.arange(n) % 2 - 1)),
    "symmetric positive": Kind(lambda m, n: matrices.SymmetricPositive(_spread(24, n)), is_square=True),
    "inverse of a symmetric positive": Kind(
        lambda m, n: matrices.SymmetricPositive(_spread(25, n)).inv(), is_square=True
    ),
    "product": Kind(lambda m, n: low_rank(30, m, 3) @ low_rank(40, 3, n)),
    "sum": Kind(lambda m, n: low_rank(30, m, n) - 2 * low_rank(40, m, n) / jnp.array(3.0)),
}
