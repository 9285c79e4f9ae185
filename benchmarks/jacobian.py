"""Jacobians in the parameters sample by sample, kernels `J J^T`, and what it takes to see what a loss reaches.

By hand a Jacobian is `vmap(jacrev)`, or of a scalar `vmap(grad)`, whose arrays are joined into one, for all samples at
once or for each by `ravel_pytree`; or it is taken in a vector, of which the model is made. By hand a kernel is the
product of that matrix with itself, or a sum over the parameters of `einsum`s or of matrix products. NetKet is compared
where it can be imported (`pip install netket`); its Jacobians are of scalars. `neural_tangents` 0.6.5 is not compared:
it imports names that JAX has not had since before 0.6.

Temporary memory is all that a program holds beside its arguments and its result, so several arrays of the largest size.
With `chunk=` a program is to be small and not fast; its time is only shown.

The last table is of `tp.reached`, which traces a loss and follows its program. The yardstick is to trace the loss as a
function of the arrays of the model, and no more.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

import treeparams as tp
from treeparams import nested

from ._harness import Scale, Table, Verdict, as_ratios, at_most, in_time, medians
from ._models import Attention, net
from ._programs import Function, built, rows, timed

_IS_WIDE = jax.config.jax_enable_x64
try:
    import netket.jax as netket
    from netket.jax._ntk import empirical_ntk_by_jacobian as netket_kernel
except ImportError:
    netket = None
jax.config.update("jax_enable_x64", _IS_WIDE)  # NetKet turns it on

_JACOBIAN, _KERNEL, _CHUNKED, _NETKET = "parameter_jacobian", "kernel", "chunk=", "NetKet"


class _Subject(NamedTuple):
    """A model, and samples to differentiate it at."""

    title: str
    model: Any
    xs: jax.Array
    chunk: int
    derivative: Callable[..., Any] = jax.grad  # by hand, of one sample
    mode: Any = "real"

    def of_params(self) -> tuple[Any, Callable[..., jax.Array]]:
        """The arrays of the model, and the model as a function of them."""
        params, static = eqx.partition(self.model, eqx.is_inexact_array)
        return params, lambda params, x: eqx.combine(params, static)(x)

    def by_hand(self, f: Callable[..., jax.Array]) -> Callable[..., Any]:
        """The Jacobian of a function of any parameters, for each sample."""
        parts = lambda y: jnp.stack([y.real, y.imag]) if self.mode == "complex" else y
        return jax.vmap(self.derivative(lambda params, x: parts(f(params, x))), (None, 0))


class _Amplitude(eqx.Module):
    """A complex number, of a net with two outputs."""

    parts: eqx.nn.MLP

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.complex(*self.parts(x))


class _Convolutions(eqx.Module):
    """A number of an image."""

    layers: list[eqx.nn.Conv2d]

    def __init__(self, channels: int) -> None:
        sizes = [1, channels, 2 * channels, 4 * channels]
        pairs = itertools.pairwise(sizes)
        self.layers = [eqx.nn.Conv2d(*pair, kernel_size=3, stride=2, key=jax.random.key(0)) for pair in pairs]

    def __call__(self, x: jax.Array) -> jax.Array:
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return jnp.mean(x)


class _Loop(eqx.Module):
    """A stack of layers as one loop."""

    weights: jax.Array

    def __call__(self, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, weight: (jnp.tanh(weight @ x), None), x, self.weights)[0]


def run(scale: Scale) -> Iterator[Table]:
    width, depth, inputs, many, few, chunk = (8, 1, 4, 4, 4, 2) if scale.is_smoke else (160, 3, 32, 200, 50, 10)
    dense = lambda outputs: eqx.nn.MLP(inputs, outputs, width, depth, jnp.tanh, key=jax.random.key(0))
    samples = lambda *shape: jax.random.normal(jax.random.key(1), shape)
    one = _Subject("1 output", dense("scalar"), samples(many, inputs), chunk)
    ten = _Subject("10 outputs", dense(10), samples(few, inputs), chunk, jax.jacrev)
    complex_one = _Subject("1 complex output", _Amplitude(dense(2)), one.xs, chunk, jax.jacrev, "complex")
    images = _Subject("1 output of images", _Convolutions(16), samples(2 * few, 1, 28, 28), chunk)
    if scale.is_smoke:
        of_jacobians, of_kernels = [complex_one], [ten]
    else:
        of_jacobians = [one, ten, complex_one]
        of_kernels = [one._replace(xs=samples(400, inputs)), ten, images]
    for subject in of_jacobians:
        yield _jacobians(subject, scale)
    for subject in of_kernels:
        yield _kernels(subject, scale)
    yield _reached(scale)


# -- Jacobians and kernels ---------------------------------------------------------------------------------------------


def _jacobians(subject: _Subject, scale: Scale) -> Table:
    params, f = subject.of_params()
    xs, mode = subject.xs, subject.mode
    vector, unravel = ravel_pytree(params)
    jacobian = subject.by_hand(f)
    join = lambda tree: ravel_pytree(tree)[0]
    join_each = jax.vmap(join if subject.derivative is jax.grad else jax.vmap(join))
    ours = lambda chunk: nested.parameter_jacobian(f, chunk=chunk, mode=mode)
    functions: dict[str, Function] = {
        "joined": (lambda params, xs: jnp.concatenate(_matrices(jacobian(params, xs), params), 1), (params, xs)),
        "ravel_pytree": (lambda params, xs: join_each(jacobian(params, xs)), (params, xs)),
        "of a vector": (subject.by_hand(lambda vector, x: f(unravel(vector), x)), (vector, xs)),
        _JACOBIAN: (ours(None), (params, xs)),
        _CHUNKED: (ours(subject.chunk), (params, xs)),
    }
    if netket and jax.eval_shape(f, params, xs[0]).ndim == 0:
        apply = lambda variables, xs: jax.vmap(f, (None, 0))(variables["params"], xs)
        dense = lambda params, xs: netket.jacobian(apply, params, xs, mode=mode, dense=True)
        functions[_NETKET] = (dense, (params, xs))
    size = 4 * jax.eval_shape(ours(None), params, xs).size
    units = {"J": size, "J of a chunk": size * subject.chunk // len(xs)}
    return _side_by_side(
        "Jacobian", subject, functions, units, {_JACOBIAN: (1.1, "J"), _CHUNKED: (2.1, "J of a chunk")}, scale
    )


def _kernels(subject: _Subject, scale: Scale) -> Table:
    params, f = subject.of_params()
    xs = subject.xs
    jacobian = subject.by_hand(f)
    matrices = lambda params, xs: _matrices(jacobian(params, xs), params)
    whole = lambda params, xs: jnp.concatenate(matrices(params, xs), 1)

    def einsums(params: Any, xs: jax.Array) -> jax.Array:
        leaves = [rows.reshape(len(xs), -1, rows.shape[1]) for rows in matrices(params, xs)]
        return sum(jnp.einsum("aoi,bpi->aobp", leaf, leaf) for leaf in leaves)

    ours = lambda chunk: nested.kernel(f, chunk=chunk)
    functions: dict[str, Function] = {
        "products": (lambda params, xs: sum(rows @ rows.T for rows in matrices(params, xs)), (params, xs)),
        "einsums": (einsums, (params, xs)),
        "J @ J.T": (lambda params, xs: (lambda rows: rows @ rows.T)(whole(params, xs)), (params, xs)),
        _KERNEL: (ours(None), (params, xs)),
        _CHUNKED: (ours(subject.chunk), (params, xs)),
    }
    if netket:
        by_jacobian = netket_kernel(jax.vmap(f, (None, 0)), trace_axes=(), vmap_axes=0)
        functions[_NETKET] = (lambda params, xs: by_jacobian(xs, None, params), (params, xs))
    largest = 4 * max(leaf.size for leaf in jax.tree.leaves(params))
    units = {
        "J": 4 * jax.eval_shape(whole, params, xs).size,
        "samples x largest": len(xs) * largest,
        "chunk x largest": subject.chunk * largest,
    }
    limits = {_KERNEL: (2, "J"), _CHUNKED: (4.5, "chunk x largest")}
    return _side_by_side("Kernel", subject, functions, units, limits, scale)


def _matrices(jacobian: Any, params: Any) -> list[jax.Array]:
    """One matrix for each parameter, with a row for each output of each sample."""
    pairs = zip(jax.tree.leaves(jacobian), jax.tree.leaves(params), strict=True)
    return [rows.reshape(-1, leaf.size) for rows, leaf in pairs]


def _side_by_side(
    what: str,
    subject: _Subject,
    functions: Mapping[str, Function],
    units: Mapping[str, int],
    limits: Mapping[str, tuple[float, str]],
    scale: Scale,
) -> Table:
    """Programs of which some are ours; their memory is limited, in units of so many bytes, and the first one's time."""
    programs = built(functions, 0)
    times = timed(programs, functions, scale)
    in_units = [
        [f"in {unit}", *(f"{program.temporary / size:.2f}" for program in programs.values())]
        for unit, size in units.items()
    ]
    ours = next(iter(limits))
    best = min(programs.keys() - limits.keys(), key=lambda name: times[name])
    lines: list[str | Verdict] = [at_most(1.1, "run time", times, ours, best)]
    for name, (limit, unit) in limits.items():
        found = programs[name].temporary / units[unit]
        lines.append(Verdict(f"temporary memory of {name} <= {limit:g}x {unit}", found <= limit, f"{found:.2f}x"))
    if not netket:
        lines.append("NetKet was not there to be compared.")
    size = sum(leaf.size for leaf in jax.tree.leaves(subject.of_params()[0]))
    title = f"{what}: {subject.title}, {len(subject.xs)} samples, {size:,} parameters, chunks of {subject.chunk}"
    return Table(title, ["", *programs], [*rows(programs.values(), times.values()), *in_units], lines)


# -- What is reached ---------------------------------------------------------------------------------------------------


def _reached(scale: Scale) -> Table:
    layers, width = (2, 4) if scale.is_smoke else (30, 32)
    mlp = lambda activation: eqx.nn.MLP(width, width, width, layers, activation, key=jax.random.key(0))
    one, set_of_tokens = jnp.ones((2, width)), jnp.ones((2, 3, width))
    subjects: dict[str, tuple[Any, jax.Array]] = {
        f"{layers} layers, tanh": (net(2 * layers, width), one),
        f"{layers} layers, relu": (mlp(jax.nn.relu), one),
        f"{layers} layers, gelu": (mlp(jax.nn.gelu), one),
        f"{layers} layers in a loop": (_Loop(jnp.ones((layers, width, width))), one),
        "attention": (Attention(width), set_of_tokens),
    }
    body, targets = [], []
    for name, (model, x) in subjects.items():
        times = medians(_traces(model, x), scale)
        body.append([name, *as_ratios(list(times.values()), in_time)])
        targets.append(at_most(2, f"{name}: time", times, "reached", "make_jaxpr"))
    return Table("What a loss reaches", ["", "make_jaxpr", "reached"], body, targets)


def _traces(model: Any, x: jax.Array) -> dict[str, Callable[[], Any]]:
    params, static = eqx.partition(model, eqx.is_inexact_array)
    loss = lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    # A new function each time, as JAX remembers what it has traced.
    return {
        "make_jaxpr": lambda: jax.make_jaxpr(lambda params, x: loss(eqx.combine(params, static), x))(params, x),
        "reached": lambda: tp.reached(loss)(model, x),
    }
