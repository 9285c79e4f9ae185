"""The page of promises: the expressions by hand that averages, norms, sums and products equal bit for bit."""

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


def arrays(shape: tuple[int, ...]) -> dict[str, Any]:
    """The values of the names in the expressions."""
    random = np.random.default_rng(len(shape))
    normal = lambda *shape: jnp.asarray(random.normal(size=shape), jnp.float32)
    x = normal(64, 5)
    return {
        "old": normal(*shape),
        "new": normal(*shape),
        "grads": [normal(*shape), normal(7), normal(7), normal(200, 50)],
        "params": normal(5),
        "v": normal(5),
        "batch": x,
        "pieces": list(x.reshape(4, 16, 5)),
    }


def value(expression: str, names: dict[str, Any], d: Any) -> Any:
    batch = names["batch"]

    def loss(params: jax.Array, x: jax.Array = batch) -> jax.Array:
        return jnp.mean(jnp.tanh(x @ params) ** 2)

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


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row.ours} | {row.by_hand}")
@pytest.mark.parametrize("shape", [(40, 7), (3000,)])
def test_what_is_equal_and_by_how_much_others_differ(row, shape, standard_promotion):
    names = arrays(shape)
    operands = [names["old"], names["new"]]
    pair = [value(expression, names, 0.9) for expression in (row.ours, row.by_hand)]
    assert ulp_apart(*pair, operands) <= row.outside
    takes_traced = "Ema" not in row.ours and "static" not in row.by_hand
    for d in (0.9, jnp.float32(0.9))[: 1 + takes_traced]:
        compiled = jax.jit(lambda names, *traced, of: value(of, names, *(traced or (0.9,))), static_argnames="of")
        traced = (d,) if isinstance(d, jax.Array) else ()
        pair = [compiled(names, *traced, of=expression) for expression in (row.ours, row.by_hand)]
        assert ulp_apart(*pair, operands) <= row.inside


def test_the_page_promises_what_is_tested():
    lines = [line for line in PAGE.read_text().splitlines() if line.endswith((" equal |", " ulp |"))]
    assert lines == [row.line() for row in ROWS]
