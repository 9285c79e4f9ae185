"""Every kind of matrix of `treeparams.matrices`, in any shape it can have."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from treeparams import matrices


def normal(seed: int, *shape: int) -> jax.Array:
    # By NumPy, and put on the device as it is: nothing is compiled for each shape.
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def svd(seed: int, m: int, n: int, factors: int | None = None, kind: str = "householder") -> matrices.SVD:
    """As `SVD.random`, with other singular values than one."""
    least = min(m, n)
    of_u, of_v = (least, least) if factors is None else (factors, factors)
    d = 2 + jnp.cos(normal(seed, least))
    if kind == "givens":
        return matrices.SVD(
            matrices.Givens(normal(seed + 1, of_u, m // 2), m), d, matrices.Givens(normal(seed + 2, of_v, n // 2), n)
        )
    return matrices.SVD(
        matrices.Orthogonal(normal(seed + 1, of_u, m)), d, matrices.Orthogonal(normal(seed + 2, of_v, n))
    )


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
    "svd": Kind(lambda m, n: svd(0, m, n)),
    "svd of few reflections": Kind(lambda m, n: svd(1, m, n, 1)),
    "svd of rotations": Kind(lambda m, n: svd(2, m, n, 3, "givens")),
    "inverse of an svd": Kind(lambda m, n: svd(3, m, n).inv(), is_square=True),
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
