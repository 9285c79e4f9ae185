"""Gradients of the trained parameters only: of one batch, or of a large batch in pieces.

The model is split before it is differentiated, so frozen parameters cost no backward work: JAX differentiates with
respect to whole arguments and computes every gradient that it was asked for.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, ParamSpec, SupportsIndex, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike

from ._forms.mesh import result_varies, vary, varying
from ._reached import reached
from ._slots.layout import Trainable
from ._slots.parts import take_apart
from ._tree.structure import naming_deleted
from ._tree.text import count_of, describe, function_name, quoted
from ._tree.types import PyTree, widened

P = ParamSpec("P")  # the model and further arguments; not told apart, or a lambda's model would be an `object`
R = TypeVar("R")
Aux = TypeVar("Aux")
Unreached = Literal["zeros", "none", "error"]


@overload
def value_and_grad(
    f: Callable[P, R], trainable: Trainable = None, has_aux: bool = False, *, unreached: Unreached = "zeros"
) -> Callable[P, tuple[R, PyTree]]: ...


@overload
def value_and_grad(
    *, trainable: Trainable = None, has_aux: bool = False, unreached: Unreached = "zeros"
) -> Callable[[Callable[P, R]], Callable[P, tuple[R, PyTree]]]: ...


def value_and_grad(
    f: Callable[..., Any] | None = None,
    trainable: Trainable = None,
    has_aux: bool = False,
    *,
    unreached: Unreached = "zeros",
) -> Callable[..., Any]:
    """`jax.value_and_grad` of `f(model, *args, **kwargs)` with respect to the trained parameters of the model.

    >>> import equinox as eqx, jax, jax.numpy as jnp, treeparams as tp
    >>> mlp = eqx.nn.MLP(2, 1, 4, 1, key=jax.random.key(0))
    >>> value, grads = tp.value_and_grad(lambda model, x: jnp.sum(model(x)), "!layers.0")(mlp, jnp.ones(2))
    >>> grads.layers[0].weight is None, grads.layers[1].bias  # the first layer is frozen
    (True, Array([1.], dtype=float32))

    Frozen arrays cost no backward work. Inside a surrounding `jit` they stay arguments and do not become constants. You
    can also use it as a decorator with options: `@tp.value_and_grad(has_aux=True)`.

    The model may hold integers, keys, functions and numbers. Complex parameters follow JAX's convention: the gradient
    is the conjugate of the direction of steepest ascent, so descend along its conjugate.

    To take a step, write `tp.maptrainable(lambda x, g: x - rate * g, model, grads)`, which sets all paths of a tie. If
    you add a canonical tree to the model leaf by leaf, you change only the first path.

    In a `jax.jit` or `equinox.filter_jit` whose argument is the model, pass a layout that you made outside as
    `trainable`: inside, ties by identity are lost (see `tp.layout`). Outside `jit`, each call splits the model again,
    which costs about as much as flattening it twice. For a fast loop without `jit`, call `tp.partition` once and
    differentiate with respect to `params`.

    The value is that of the model with its ties filled. If an alias does not have the value of its source yet (see
    `tp.tie`), the value is not `f(model)`.

    Args:
        f: a function of the model and further arguments that returns a real scalar, or `(scalar, aux)`.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        has_aux: whether `f` returns `(scalar, aux)`.
        unreached: the gradient of a parameter that `f` does not depend on (see `tp.reached`): `"zeros"`, as in JAX;
            `"none"`, so that `optim.trainable` takes no step there (with zeros, AdamW would decay it); or `"error"`.
            With `"none"` and `"error"`, `f` is traced once more.

    Returns:
        A function with the same arguments as `f`. It returns `(value, grads)`, or `((value, aux), grads)`. `grads` is
        the canonical tree: it has the structure of the model, the gradient at each slot's path (summed over a tie), and
        `None` everywhere else.

    Raises:
        ValueError: when called: `f` does not depend on a trained parameter and `unreached="error"`; see also
            `tp.layout`.
        TypeError: when called: see `tp.layout`, and with `"none"` or `"error"` also `tp.reached`.

    Warns:
        UserWarning: nothing is trained; the gradient is `None` everywhere.
    """
    _check_options(trainable, has_aux, unreached)
    if f is None:
        return functools.partial(value_and_grad, trainable=trainable, has_aux=has_aux, unreached=unreached)
    call = _checked_loss(f, "value_and_grad")

    @functools.wraps(f)
    def value_and_gradient(model: Any, /, *args: Any, **kwargs: Any) -> tuple[Any, PyTree]:
        parts = take_apart(model, trainable)
        if not parts.slots:
            parts.index.warn_of_nothing()
            return call(model, *args, **kwargs), parts.canonical(())
        missed: dict[int, str] = {}  # slots that the loss does not reach
        if unreached != "zeros":
            hit = {*reached(call, parts.layout, has_aux)(model, *args, **kwargs).paths}
            missed = {slot: path for slot, path in enumerate(parts.layout.paths) if path not in hit}
        if missed and unreached == "error":
            paths = [*missed.values()]
            what = f"the loss does not depend on these trained parameters: {quoted(paths, 5)}"
            raise ValueError(f"{what}; freeze them, tp.layout(model, freeze=[{paths[0]!r}]), or pass unreached='none'")

        of_slots = lambda slots: call(parts.model(slots), *args, **kwargs)
        try:
            with naming_deleted(model):
                value, grads = jax.value_and_grad(of_slots, has_aux=has_aux)(parts.slots)
        except TypeError as error:
            _check_result(of_slots, parts.slots, has_aux, error)
            raise
        return value, parts.canonical([None if i in missed else grad for i, grad in enumerate(grads)])

    return value_and_gradient


@overload
def grad(
    f: Callable[P, tuple[Any, Aux]], trainable: Trainable = None, *, has_aux: Literal[True], unreached: Unreached = ...
) -> Callable[P, tuple[PyTree, Aux]]: ...


@overload
def grad(
    f: Callable[P, Any], trainable: Trainable = None, has_aux: bool = False, *, unreached: Unreached = "zeros"
) -> Callable[P, PyTree]: ...


@overload
def grad(
    *, trainable: Trainable = None, has_aux: bool = False, unreached: Unreached = "zeros"
) -> Callable[[Callable[P, Any]], Callable[P, Any]]: ...


def grad(
    f: Callable[..., Any] | None = None,
    trainable: Trainable = None,
    has_aux: bool = False,
    *,
    unreached: Unreached = "zeros",
) -> Callable[..., Any]:
    """`jax.grad` of `f(model, *args, **kwargs)` with respect to the trained parameters of the model.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> weight = jnp.array([1.0, 2.0])  # one array: one gradient
    >>> tp.grad(lambda m: jnp.sum(3 * m["x"] + 13 * m["z"]))({"x": weight, "z": weight})
    {'x': Array([16., 16.], dtype=float32), 'z': None}

    With `unreached="none"`, a parameter that the loss does not depend on gets the gradient `None`, so it takes no step:

    >>> model = {"w": jnp.ones(2), "unused": jnp.ones(2)}
    >>> tp.grad(lambda m: jnp.sum(m["w"]), unreached="none")(model)
    {'unused': None, 'w': Array([1., 1.], dtype=float32)}

    Args:
        f: see `value_and_grad`.
        trainable: see `value_and_grad`.
        has_aux: see `value_and_grad`.
        unreached: see `value_and_grad`.

    Returns:
        A function that returns the canonical gradient, or `(gradient, aux)`; see `value_and_grad`.

    Raises:
        ValueError: see `value_and_grad`.
        TypeError: see `value_and_grad`.

    Warns:
        UserWarning: nothing is trained.
    """
    if f is None:
        return functools.partial(grad, trainable=trainable, has_aux=has_aux, unreached=unreached)
    with_value = value_and_grad(_checked_loss(f, "grad"), trainable, has_aux, unreached=unreached)

    @functools.wraps(f)
    def gradient(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        value, grads = with_value(model, *args, **kwargs)
        return (grads, value[1]) if has_aux else grads

    return gradient


# -- In pieces ---------------------------------------------------------------------------------------------------------


@overload
def accumulate(
    f: Callable[P, Any], trainable: Trainable = None, *, pieces: SupportsIndex
) -> Callable[P, tuple[jax.Array, PyTree]]: ...


@overload
def accumulate(
    *, trainable: Trainable = None, pieces: SupportsIndex
) -> Callable[[Callable[P, Any]], Callable[P, tuple[jax.Array, PyTree]]]: ...


def accumulate(
    f: Callable[..., Any] | None = None, trainable: Trainable = None, *, pieces: SupportsIndex
) -> Callable[..., Any]:
    """Computes the value and the gradient of a mean loss over a batch in pieces, one after another.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> loss = lambda model, batch: jnp.mean((batch["x"] @ model["w"] - batch["y"]) ** 2)
    >>> model, batch = {"w": jnp.ones(3)}, {"x": jnp.ones((10, 3)), "y": jnp.zeros(10)}
    >>> value, grads = tp.accumulate(loss, pieces=4)(model, batch)  # pieces of 3, 3, 3 and 1
    >>> print(value, grads)
    9.0 {'w': Array([6., 6., 6.], dtype=float32)}

    A large batch needs the memory of one piece and of one sum of gradients. You can pass a vector as the model:

    >>> vector, restructure = tp.ravel(model)
    >>> print(tp.accumulate(lambda v, batch: loss(restructure(v), batch), pieces=4)(vector, batch)[1])
    [6. 6. 6.]

    Inside a `jax.shard_map`, the gradient of a parameter that is the same on all devices is summed over the devices, as
    by `jax.grad`, but once at the end instead of once per piece.

    Args:
        f: a function of the model, a batch and further arguments that returns the *mean* over the batch, a real scalar.
        trainable: the parameters to train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.
        pieces: the number of pieces. They have equal sizes, except that the last one holds the examples that are left
            and is weighted by its size. You get fewer pieces if there are few examples, or if the type of the batch
            says that it is split over devices: each device then contributes equally to a piece.

    Returns:
        A function `(model, batch, *args, **kwargs) -> (value, grads)`. `batch` is a tree of arrays with the examples
        along their leading axis; further arguments are the same for each piece. Both results are summed in at least
        float32; `grads` is the canonical tree, each leaf in its own dtype.

    Raises:
        ValueError: `pieces` is not positive; arrays of the batch have no leading axis or different ones; the batch has
            no examples; see also `tp.layout`.

    Warns:
        UserWarning: nothing is trained.
    """
    pieces = count_of("pieces", pieces, "pieces")
    if f is None:
        return functools.partial(accumulate, trainable=trainable, pieces=pieces)
    call = _checked_loss(f, "accumulate")

    @functools.wraps(f)
    def value_and_gradient(model: Any, /, batch: PyTree, *args: Any, **kwargs: Any) -> tuple[jax.Array, PyTree]:
        parts, examples = take_apart(model, trainable), _count_examples(batch)
        devices = math.lcm(*map(_split_over, jax.tree.leaves(batch)))
        if not parts.slots:
            parts.index.warn_of_nothing()

        def of_piece(slots: Sequence[jax.Array], start: ArrayLike, count: int) -> Any:
            piece = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(x, start, count), batch)
            return call(parts.model(slots), piece, *args, **kwargs)

        slots = tuple(map(jnp.asarray, parts.slots))
        value, grads = _summed(of_piece, slots, examples, size=devices * -(-examples // (devices * pieces)))
        return value, parts.canonical(grads)

    return value_and_gradient


def _summed(
    of_piece: Callable[..., Any], slots: tuple[jax.Array, ...], examples: int, size: int
) -> tuple[jax.Array, list[jax.Array]]:
    """Returns the mean loss over all examples, and its gradients, from `of_piece(slots, first example, number)`."""
    # Where the loss differs from device to device, so do the parameters from here on: each device sums a gradient of
    # its own. Of parameters that are the same everywhere JAX would sum it over the devices at each piece.
    local = result_varies(lambda slots: of_piece(slots, 0, size), slots)
    added = [local - varying(jax.typeof(slot)) for slot in slots]
    slots = tuple(vary(slot, local) for slot in slots)
    wide = [jax.dtypes.canonicalize_dtype(float), *(widened(slot.dtype) for slot in slots)]
    dtypes = []  # of the value; the same for all pieces

    def add(sums: list[jax.Array], start: ArrayLike, count: int) -> list[jax.Array]:
        value, grads = jax.value_and_grad(of_piece)(slots, start, count)
        dtypes.append(widened(jnp.result_type(value)))
        news = [jnp.asarray(each, dtype) for each, dtype in zip((value, *grads), wide, strict=True)]
        return [total + new * (count / examples) for total, new in zip(sums, news, strict=True)]

    # The carry of a scan keeps its type, and the axes over which it differs from device to device are part of that.
    zeros = [jnp.zeros((), wide[0]), *map(jnp.zeros_like, slots, wide[1:])]
    sums = list(map(vary, zeros, [local, *(varying(jax.typeof(slot)) for slot in slots)]))
    whole, rest = divmod(examples, size)
    sums, _ = jax.lax.scan(lambda sums, i: (add(sums, i * size, size), None), sums, jnp.arange(whole))
    value, *grads = add(sums, whole * size, rest) if rest else sums
    grads = [jax.lax.psum(each, tuple(axes)) if axes else each for each, axes in zip(grads, added, strict=True)]
    return value.astype(dtypes[0]), [each.astype(slot.dtype) for each, slot in zip(grads, slots, strict=True)]


def _split_over(array: ArrayLike) -> int:
    """Returns over how many devices the leading axis of an array is split by type."""
    sharding = jax.typeof(array).sharding
    axes = sharding.spec[0] or ()
    return math.prod(sharding.mesh.shape[axis] for axis in ([axes] if isinstance(axes, str) else axes))


def _count_examples(batch: PyTree) -> int:
    """Returns the number of examples: the length of the first axis of all arrays."""
    arrays = jtu.tree_flatten_with_path(batch)[0]
    counts = {f"batch{jtu.keystr(path)}": (*getattr(array, "shape", ()), 0)[0] for path, array in arrays}
    if len({*counts.values()}) != 1 or 0 in counts.values():
        expected = "expected arrays of examples in the batch, as many along the leading axis of each and at least one"
        got = ", ".join(f"{name} has {count}" for name, count in counts.items()) or "no arrays"
        raise ValueError(f"{expected}, got: {got}; pass anything that is not to be split as a further argument")
    return next(iter(counts.values()))


# -- Checks of a loss, of its options, and of the value that it returns ------------------------------------------------


def _checked_loss(f: Any, verb: str) -> Callable[..., Any]:
    """Returns the function to differentiate; raises a `TypeError` if an option was passed in its place."""
    if not callable(f):
        what = f"expected a function of the model, got {describe(f)}"
        raise TypeError(f"{what}; name the options: tp.{verb}(trainable=...), and write tp.{verb}(loss)(model, x)")
    return f


def _check_options(trainable: object, has_aux: object, unreached: object) -> None:
    """Raises an error if an option is none, or an argument of the loss or of `jax.grad` was passed in its place."""
    if isinstance(trainable, int) and not isinstance(trainable, bool):
        what = "gradients are with respect to the model, the first argument of the loss"
        raise TypeError(f"{what}; drop the number, got {trainable} for trainable=")
    code = getattr(trainable, "__code__", None)  # of a function
    if code is not None and code.co_argcount - len(getattr(trainable, "__defaults__", None) or ()) > 1:
        what = f"expected a `where`, such as a function of the model alone, got {function_name(trainable)}"
        raise TypeError(f"{what}, which takes more; the loss comes first: tp.grad(loss, trainable)(model, x)")
    if not isinstance(has_aux, bool):
        raise TypeError(f"has_aux must be True or False, got {describe(has_aux)}; write tp.grad(loss)(model, x)")
    if unreached not in get_args(Unreached):
        raise ValueError(f"unreached must be 'zeros', 'none' or 'error', got {unreached!r}")


def _check_result(of_slots: Callable[..., Any], slots: Sequence[Any], has_aux: bool, error: TypeError) -> None:
    """Raises an error that describes the loss's result, if that is the reason why it has no gradient."""
    try:
        result = jax.eval_shape(of_slots, slots)
    except Exception:
        return
    got = f"a tuple of {len(result)}" if isinstance(result, tuple) else describe(result)
    if has_aux and not (isinstance(result, tuple) and len(result) == 2):
        raise TypeError(f"with has_aux=True the loss must return (value, aux), got {got}; drop has_aux=True") from error
    value = result[0] if has_aux else result
    dtype = getattr(value, "dtype", object)
    if getattr(value, "shape", None) != () or not jnp.issubdtype(dtype, jnp.floating):
        what = f"expected the loss to return a real scalar, got {describe(value) if has_aux else got}"
        mean = "write jnp.mean(...) or jnp.sum(...) of an array"
        raise TypeError(f"{what}; {mean}; if it is the first of several results, write has_aux=True") from error
