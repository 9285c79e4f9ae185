"""Every kind of matrix of `treeparams.matrices`, and one of a user's own, in any shape that it can have."""

import pathlib
from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

import treeparams as tp
from treeparams import matrices

from ..blocks import blocks


def normal(seed: int, *shape: int) -> jax.Array:
    # By NumPy, and put on the device as it is: nothing is compiled for each shape.
    return jax.device_put(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def put(*numbers: Any) -> jax.Array:
    return jax.device_put(np.asarray(numbers, np.float32))


def svd(seed: int, m: int, n: int) -> matrices.SVD:
    """As `SVD.random`, with other singular values than one."""
    least = min(m, n)
    u, v = (matrices.Orthogonal(normal(seed + i, least, size)) for i, size in enumerate((m, n)))
    return matrices.SVD(u, put(*(2 + np.cos(np.arange(least)))), v)


def mixed(seed: int, m: int, n: int) -> matrices.SVD:
    """Of two blocks of reflections, and of rotations."""
    u = matrices.Orthogonal(normal(seed, m + 1, m))
    d, v = put(*(2 + np.cos(np.arange(min(m, n))))), matrices.Givens(normal(seed + 1, 3, n // 2), n)
    return matrices.SVD(u, d, v)


def low_rank(seed: int, m: int, n: int) -> matrices.LowRank:
    return matrices.LowRank(normal(seed, m, n), normal(seed + 1, m, 2), normal(seed + 2, 2, n), 0.5)


def composed(seed: int, m: int, n: int) -> Any:
    product = low_rank(seed, m, 2) @ low_rank(seed + 3, 2, n)
    return product - 2 * low_rank(seed + 6, n, m).T / put(3)[0]


def page(name: str, part: str) -> dict[str, Any]:
    """The names that one block of a page makes, the first with this part."""
    text = (pathlib.Path(__file__).parents[2] / "docs" / "pages" / "how-to" / name).read_text()
    code = next(block.code for block in blocks(text) if part in block.code)
    made = {"__name__": "page", "jax": jax, "jnp": jnp, "matrices": matrices}
    exec(code, made)
    return made


Circulant = page("own-matrix.md", "class Circulant")["Circulant"]
Int8 = page("matrices.md", "class Int8")["Int8"]


def int8(seed: int, m: int, n: int) -> Any:
    rows = np.random.default_rng(seed).integers(-127, 128, (m, n), np.int8)
    return Int8(jax.device_put(rows), put(*(np.arange(m) + 1) / 127))


class Codec(eqx.Module):
    """Of ties that its class declares, one by a transpose."""

    encoder: jax.Array
    decoder: jax.Array
    one: jax.Array
    same: jax.Array
    frozen: jax.Array = tp.field(trainable=False)


tp.declare(Codec, ties={"decoder": ("encoder", jnp.transpose), "same": "one"})
CODEC = Codec(normal(45, 2, 3), normal(45, 2, 3).T, normal(46, 2, 2), normal(46, 2, 2), normal(47, 2, 2))
TIED = dict.fromkeys(("one", "same"), normal(9, 3, 3)) | {"other": normal(10, 3, 3)}


def equations(jaxpr: Any) -> Iterator[Any]:
    """All of a program, with those of the programs in it."""
    for equation in jaxpr.eqns:
        yield equation
        for inner in jax.tree.leaves(equation.params, is_leaf=lambda each: hasattr(each, "eqns")):
            if hasattr(inner, "eqns"):
                yield from equations(inner)


IMPUTING = {"pre": matrices.PreImputing, "post": matrices.PostImputing}
# Each of rows and columns; those that are square take the number of columns.
MATRICES: dict[str, Callable[[int, int], Any]] = {
    "svd": lambda m, n: mixed(0, m, n),
    "inverse of an svd": lambda m, n: svd(3, n, n).inv(),
    "low rank": lambda m, n: low_rank(7, m, n),
    "pre-imputing": lambda m, n: matrices.PreImputing(normal(10, m, n), normal(11, n)),
    "post-imputing": lambda m, n: matrices.PostImputing(normal(12, m, n), normal(13, m)),
    "composed": lambda m, n: composed(30, m, n),
    "of a user's own": lambda m, n: Circulant(normal(16, n)),
}
