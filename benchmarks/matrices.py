"""Matrices made of parameters next to one array: a product with a batch of 256, and its gradient.

The product is that of a layer, `jax.vmap(lambda x: weight @ x)`; the gradient is in the parameters and in the batch, of
the sum of squares. `lineax` and `quax` have the same change of low rank.
Reflections and layers of rotations are per factor of the decomposition.
"""

from collections.abc import Callable, Iterator
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import lineax
import quax
from quax.examples.lora import LoraArray

from treeparams import matrices

from ._harness import Scale, Table, Verdict, as_ratios, at_most, in_time
from ._programs import Function, Program, built, in_bytes, in_millions, timed

_BATCH, _RANK = 256, 8
_DENSE, _SVD = "one array", "SVD, n/16 reflections"
Product = Callable[[Any, jax.Array], jax.Array]


def run(scale: Scale) -> Iterator[Table]:
    sizes = (16,) if scale.is_smoke else (256, 1024, 4096)
    for title, of, several in (("Product", lambda product: product, sizes), ("Gradient", _gradient, sizes[:2])):
        found = {n: _measured(n, of, scale) for n in several}
        header = ["n", *found[sizes[0]][0]]
        times = [[str(n), *as_ratios(list(times.values()), in_time)] for n, (_, times) in found.items()]
        lines = [_target(n, times) for n, (_, times) in found.items() if title == "Product" and n >= 1024]
        yield Table(f"{title}: run time", header, times, lines)
        yield Table(f"{title}: operations", header, _rows(found, lambda each: each.flops, in_millions))
        yield Table(f"{title}: temporary memory", header, _rows(found, lambda each: each.temporary, in_bytes))


def _rows(found: Any, figure: Callable[[Program], float], text: Callable[[float], str]) -> list[list[str]]:
    return [[str(n), *(text(figure(each)) for each in programs.values())] for n, (programs, _) in found.items()]


def _measured(n: int, of: Callable[[Product], Any], scale: Scale) -> tuple[dict[str, Program], dict[str, float]]:
    x = jax.random.normal(jax.random.key(1), (4 if scale.is_smoke else _BATCH, n))
    functions: dict[str, Function] = {}
    for name, (product, weight) in _weights(n).items():
        arrays, static = eqx.partition(weight, eqx.is_inexact_array)
        whole = lambda arrays, x, product=product, static=static: product(eqx.combine(arrays, static), x)
        functions[name] = (of(whole), (arrays, x))
    programs = built(functions, patience=0)
    return programs, timed(programs, functions, scale)


def _gradient(product: Product) -> Any:
    return jax.grad(lambda weight, x: jnp.sum(product(weight, x) ** 2), (0, 1))


def _weights(n: int) -> dict[str, tuple[Product, Any]]:
    """What is multiplied, and how."""
    key = jax.random.key(0)
    w = jax.random.normal(key, (n, n)) / n**0.5
    low_rank = matrices.LowRank.random(w, _RANK, key=key)
    a, b = low_rank.a, low_rank.b
    return {
        _DENSE: (_layer, w),
        _SVD: (_layer, matrices.SVD.random(n, n, key=key, reflections=n // 16)),
        "SVD, 8 layers of rotations": (_layer, matrices.SVD.random(n, n, key=key, reflections=8, kind="givens")),
        "LowRank": (_low_rank, (w, a, b)),
        "lineax, low rank": (_lineax_low_rank, (w, a, b)),
        "quax, low rank": (_quax_low_rank, (w, a, b)),
    }


def _layer(weight: Any, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda x: weight @ x)(x)


# The base takes no gradient in any of the three.


def _low_rank(arrays: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    base, a, b = arrays
    return _layer(matrices.LowRank(jax.lax.stop_gradient(base), a, b), x)


def _lineax_low_rank(arrays: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    base, a, b = map(lineax.MatrixLinearOperator, (jax.lax.stop_gradient(arrays[0]), *arrays[1:]))
    return jax.vmap((base + a @ b).mv)(x)


def _quax_low_rank(arrays: tuple[jax.Array, ...], x: jax.Array) -> jax.Array:
    base, a, b = arrays
    weight = LoraArray(base, rank=_RANK, key=jax.random.key(0))  # freezes the base by itself
    weight = eqx.tree_at(lambda weight: (weight.a, weight.b), weight, (a, b))
    return quax.quaxify(_layer)(weight, x)


def _target(n: int, times: dict[str, float]) -> Verdict:
    return at_most(0.6, f"n = {n}: product", times, _SVD, _DENSE)
