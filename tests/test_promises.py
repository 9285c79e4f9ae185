"""The page of promises: the expressions by hand that averages, norms, sums and products equal bit for bit."""

import functools
import re
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp
from treeparams import nested, optim

PAGE = Path(__file__).parent.parent / "docs" / "pages" / "promises.md"
pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="other platforms round otherwise")


class Row(NamedTuple):
    """A call, an expression by hand, and how far their results may be apart: in ulp of the largest operand."""

    ours: str
    by_hand: str
    inside: int  # `jax.jit`
    outside: int

    def line(self) -> str:
        """The row as the page has it."""
        apart = [f"{count} ulp" if count else "equal" for count in (self.inside, self.outside)]
        return " | ".join(["", f"`{self.ours}`", f"`{self.by_hand}`", *apart, ""]).strip()


ROWS = [
    Row("tp.ema(old, new, decay=d)", "old + (1 - d) * (new - old)", 0, 1),
    Row("tp.ema(old, new, decay=d)", "jax.jit(lambda old, new: old + (1 - d) * (new - old))(old, new)", 0, 0),
    Row("tp.ema(old, new, decay=d)", "d * old + (1 - d) * new", 1, 1),
    Row("tp.ema(old, new, tau=1 - d)", "optax.incremental_update(new, old, 1 - d)", 0, 1),
    Row("tp.ema(old, new, tau=1 - d)", "jax.jit(optax.incremental_update, static_argnums=2)(new, old, 1 - d)", 0, 0),
    Row("tp.ema(old, new, tau=1 - d)", "d * old + (1 - d) * new", 1, 1),
    Row("tp.Ema(old, decay=d).update(new).average", "old + (1 - d) * (new - old)", 0, 1),
    Row("tp.Ema(old, decay=d).update(new).average", "d * old + (1 - d) * new", 1, 1),
    Row("tp.Ema(old, tau=1 - d).update(new).average", "optax.incremental_update(new, old, 1 - d)", 0, 1),
    Row("tp.global_norm(new)", "jnp.sqrt(jnp.sum(new**2))", 0, 0),
    Row("tp.global_norm(grads)", "jnp.sqrt(sum(jnp.sum(g**2) for g in grads))", 4, 4),
    Row("clip.update(grads, clip.init(grads))[0]", "[g * (c / tp.global_norm(grads)) for g in grads]", 0, 0),
    Row("clip.update(grads, clip.init(grads))[0]", "optax.clip_by_global_norm(c).update(grads, None)[0]", 4, 4),
    Row("tp.accumulate(loss, pieces=4)(params, batch)[1]", "sum(jax.grad(loss)(params, p) / 4 for p in pieces)", 0, 32),
    Row("tp.accumulate(loss, pieces=4)(params, batch)[1]", "jax.grad(loss)(params, batch)", 32, 32),
    Row("nested.hvp(loss)(params, v)", "jax.jvp(jax.grad(loss), (params,), (v,))[1]", 0, 0),
]


@functools.cache
def arrays() -> dict[str, Any]:
    """The values of the names in the expressions: arrays with rows that no vector register fills."""
    random, shape = np.random.default_rng(0), (43, 71)
    normal = lambda *shape: jax.device_put(random.normal(size=shape).astype(np.float32))
    x = normal(64, 5)
    return {
        "old": normal(*shape),
        "new": normal(*shape),
        "grads": [normal(200, 50), normal(7), normal(7)],
        "params": normal(5),
        "v": normal(5),
        "batch": x,
        "pieces": list(map(jax.device_put, np.asarray(x).reshape(4, 16, 5))),
    }


def value(expression: str, names: dict[str, Any], d: Any) -> Any:
    loss = lambda params, x=names["batch"]: jnp.mean(jnp.tanh(x @ params) ** 2)
    known = {"jax": jax, "jnp": jnp, "optax": optax, "tp": tp, "nested": nested, "c": 0.5, "loss": loss, "d": d}
    return eval(expression, {**known, **names, "clip": optim.clip_by_global_norm(0.5)})


def ulp_apart(ours: Any, theirs: Any, operands: list[Any]) -> float:
    """How far two results are apart, in the spacing of floats at the operands, or else at the largest entry."""
    most = 0.0
    for one, other in zip(*(map(np.asarray, jax.tree.leaves(each)) for each in (ours, theirs)), strict=True):
        assert one.dtype == other.dtype == np.float32
        sizes = [np.abs(other).max(), *(np.abs(np.asarray(each)) for each in operands if each.shape == one.shape)]
        size = np.maximum(*sizes[1:]) if len(sizes) > 1 else sizes[0]
        most = max(most, np.max(np.abs(one.astype(np.float64) - other) / np.spacing(size)))
    return most


@functools.partial(jax.jit, static_argnames="of")
def compiled(names: dict[str, Any], *traced: jax.Array, of: str) -> Any:
    return value(of, names, *(traced or (0.9,)))


@functools.cache
def result(of: str, *d: float, inside: bool) -> Any:
    """What an expression gives; each is a program only once, whatever it is compared with."""
    names = {name: array for name, array in arrays().items() if name in of or name == "batch"}
    return compiled(names, *map(jnp.float32, d), of=of) if inside else value(of, names, 0.9)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.ours} | {row.by_hand}")
def test_what_is_equal_and_by_how_much_others_differ(row, standard_promotion):
    operands = [arrays()[name] for name in ("old", "new")]
    apart = lambda *d, **where: ulp_apart(*[result(of, *d, **where) for of in row[:2]], operands)
    assert apart(inside=False) <= row.outside
    assert apart(inside=True) <= row.inside
    if re.search(r"\bd\b", row.ours) and "Ema" not in row.ours and "static" not in row.by_hand:
        assert apart(0.9, inside=True) <= row.inside


def test_the_page_promises_what_is_tested():
    lines = [line for line in PAGE.read_text().splitlines() if line.endswith((" equal |", " ulp |"))]
    assert lines == [row.line() for row in ROWS]
