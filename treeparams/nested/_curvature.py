"""The Hessian and the Gauss-Newton matrix: as operators, linearised once; products with them; as a matrix."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import jax.tree_util as jtu
from jax.typing import ArrayLike
from jaxtyping import Array, Float

from .._forms.form import Form
from .._forms.mesh import is_sharded, lay
from .._slots.layout import Layout, Trainable, index_of
from .._slots.parts import Parts
from .._tree.structure import is_array
from .._tree.text import describe, imported
from .._tree.types import PyTree, common_dtype
from ._reals import Reals, array_parts, form_of_reals, from_reals, in_reals, mapped, of_reals, scalar, taken


class Operator(eqx.Module):
    """A symmetric matrix over the trained parameters, defined by its products: `operator(tangent)`.

    It is a pytree: you may pass it to and return it from `jax.jit`, close over it, map it and scan over it.
    `hessian_operator` and `ggn_operator` make it.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0])}
    >>> operator = nested.hessian_operator(lambda model: jnp.prod(model["w"]) ** 2, damping=1.0)(model)
    >>> operator @ jnp.eye(2)
    Array([[9., 8.],
           [8., 3.]], dtype=float32)
    >>> operator.diagonal()
    Array([9., 3.], dtype=float32)

    Attributes:
        layout: of the model.
        shape: `(n, n)` with n the length of `real_vector`, in which a complex parameter is a pair of reals.
        damping: the number added to the diagonal; `None`: nothing.
    """

    _linear: Any
    damping: ArrayLike | None
    layout: Layout = eqx.field(static=True)
    _shardings: Any = eqx.field(static=True)  # of the slots in reals, where their types say how they lie

    @property
    def shape(self) -> tuple[int, int]:
        """The shape of the matrix."""
        (length,) = form_of_reals(self.layout).blocks[0].shape
        return length, length

    def __repr__(self) -> str:
        return f"Operator(shape={self.shape}, damping={self.damping}, {self.layout!r})"

    def __call__(self, tangent: PyTree) -> PyTree:
        """Returns the product with a tangent, plus `damping` times the tangent; result and errors as for `hvp`.

        Args:
            tangent: as for `hvp`.
        """
        direction = taken(self.layout, tangent)
        leaves, treedef = jax.tree.flatten(direction)
        placed = [leaf if to is None else lay(leaf, to) for leaf, to in zip(leaves, self._shardings, strict=True)]
        product = self._linear(treedef.unflatten(placed))
        if self.damping is not None:
            product = jax.tree.map(lambda y, x: y + jnp.asarray(self.damping, y.dtype) * x, product, direction)
        return _given_back(self.layout, product, tangent)

    def __matmul__(self, matrix: Any) -> Array:
        """Returns the product with a vector, `(n,)`, or with each column of a matrix, `(n, k)`."""
        if not is_array(matrix) or jnp.ndim(matrix) not in (1, 2):
            raise TypeError(
                f"operator @ needs a vector (n,) or a matrix (n, k), got {describe(matrix)}; for a tree call it"
            )
        return self(matrix) if jnp.ndim(matrix) == 1 else jax.vmap(self, 1, 1)(matrix)

    __array_ufunc__ = None  # so that `array @ operator` of NumPy comes here

    def __rmatmul__(self, matrix: Any) -> Array:
        """Returns the product with a real vector, `(n,)`, or with each row of a matrix, `(k, n)`, by symmetry."""
        if not is_array(matrix) or jnp.ndim(matrix) not in (1, 2) or jnp.iscomplexobj(matrix):
            raise TypeError(f"@ operator needs a real vector (n,) or matrix (k, n), got {describe(matrix)}")
        return (self @ matrix.T).T

    def diagonal(self, *, chunk: int | None = None) -> Float[Array, " n"]:
        """Returns the diagonal over the real vector of the parameters, damping included: exact, by n products.

        With fewer products you can estimate it: the mean of `signs * operator(signs)` over random signs (Bekas,
        Kokiopoulou and Saad, 2007).

        >>> import jax, jax.numpy as jnp
        >>> from treeparams import nested
        >>> loss = lambda model: jnp.sum(model["w"] ** 3) + model["w"][0] * model["w"][1]
        >>> operator = nested.hessian_operator(loss)({"w": jnp.array([1.0, 2.0])})
        >>> operator.diagonal()
        Array([ 6., 12.], dtype=float32)
        >>> signs = jax.random.rademacher(jax.random.key(0), (100, 2), float)
        >>> print(jnp.round(jnp.mean(signs * jax.vmap(operator)(signs), axis=0)))
        [ 6. 12.]

        Args:
            chunk: how many products are computed at once, which bounds the memory; `None`: all.

        Returns:
            The diagonal, shape `(n,)` with n the length of `real_vector`; without complex parameters of `tp.ravel`.

        Raises:
            ValueError: `chunk` is no count.
        """
        return self._columns(chunk, lambda column, i: jnp.sum(column, where=jnp.arange(column.size) == i))

    def matrix(self, *, chunk: int | None = None) -> Float[Array, "n n"]:
        """Returns the matrix over the real vector of the parameters, damping included, by n products.

        Args:
            chunk: as for `diagonal`.

        Returns:
            The matrix, shape `(n, n)`, of which `layout.block` finds the blocks by name.

        Raises:
            ValueError: `chunk` is no count.
        """
        return self._columns(chunk, lambda column, _: column)

    def _columns(self, chunk: int | None, of: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        """Returns `of(column, number)` for each column of the matrix."""
        block = form_of_reals(self.layout).blocks[0]
        one = lambda i: of(self(jax.nn.one_hot(i, block.size, dtype=block.dtype)), i)
        return mapped(one, jnp.arange(block.size), chunk, "products")

    def as_lineax(self, tags: object = None) -> Any:
        """Returns the operator for lineax's solvers, over the real vector of the parameters.

        >>> import jax.numpy as jnp, lineax
        >>> from treeparams import nested
        >>> model = {"w": jnp.array([1.0, 2.0])}
        >>> operator = nested.hessian_operator(lambda model: jnp.sum(model["w"] ** 3), damping=2.0)(model)
        >>> linear = operator.as_lineax(lineax.positive_semidefinite_tag)
        >>> print(lineax.linear_solve(linear, jnp.ones(2), lineax.CG(1e-5, 1e-5)).value)
        [0.125      0.07142857]

        Args:
            tags: the properties that lineax may rely on, such as `lineax.positive_semidefinite_tag`, which are not
                checked; `None`: that it is symmetric.

        Returns:
            A `lineax.FunctionLinearOperator` from vectors `(n,)` to the same, as of `diagonal`.

        Raises:
            ModuleNotFoundError: lineax is not installed.
        """
        lineax, block = imported("lineax", "lineax", "as_lineax"), form_of_reals(self.layout).blocks[0]
        shape = jax.ShapeDtypeStruct(block.shape, block.dtype)
        return lineax.FunctionLinearOperator(self, shape, lineax.symmetric_tag if tags is None else tags)


Operator.__module__ = "treeparams.nested"


def _shardings_of(tree: PyTree) -> tuple[Any, ...]:
    """Returns the sharding in the type of each array; `None` if it is whole on each device."""
    return tuple(jax.typeof(leaf).sharding if is_sharded(leaf) else None for leaf in jax.tree.leaves(tree))


def _loss_of(f: Callable[..., Any], parts: Parts, *args: object) -> Callable[[Any], Any]:
    """Returns a loss as a function of the slots in reals."""
    return lambda reals: scalar(of_reals(f, parts, *args)(reals))


def hessian_operator(
    f: Callable[..., Array], trainable: Trainable = None, *, damping: ArrayLike | None = None
) -> Callable[..., Operator]:
    """Computes the Hessian of a loss over a batch as an operator: linearised once, for many products.

    >>> import jax, jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> loss = lambda model: jnp.sum(model["a"] ** 2) * model["b"] + model["b"] ** 2
    >>> vector, restructure = tp.ravel({"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)})
    >>> @jax.jit
    ... def newton(vector):  # a damped step
    ...     model = restructure(vector)
    ...     operator = nested.hessian_operator(loss, damping=10.0)(model)
    ...     gradient = restructure.ravel_gradient(tp.grad(loss)(model))
    ...     return vector - jax.scipy.sparse.linalg.cg(operator, gradient)[0]
    >>> bool(loss(restructure(newton(vector))) < loss(restructure(vector)))
    True

    If you make it inside the compiled function, as here, it is traced with it once. If you make it outside, it is a
    separate program, and a compiled function that takes it as an argument is compiled again for each.

    You get the Hessian and its diagonal from `operator.matrix()` and `operator.diagonal()`, and an operator for
    lineax's solvers from `operator.as_lineax()`.

    Args:
        f: called as `f(model, *args)`, returns a scalar.
        trainable: as for `hvp`.
        damping: a number or traced scalar added to the diagonal; `None`: nothing.

    Returns:
        A function of `(model, *args)` that returns an `Operator`, from vectors or trees to the same.

    Raises:
        ValueError: when called: as `tp.layout`.
        TypeError: when called: as `hvp`.
    """

    def operator(model: PyTree, *args: object) -> Operator:
        parts = array_parts(model, trainable)
        slots = in_reals(parts.slots)
        _, linear = jax.linearize(jax.grad(_loss_of(f, parts, *args)), slots)
        return Operator(linear, damping, parts.layout, _shardings_of(slots))

    return operator


def ggn_operator(
    f: Callable[..., PyTree],
    loss: Callable[[Any], Array],
    trainable: Trainable = None,
    *,
    damping: ArrayLike | None = None,
) -> Callable[..., Operator]:
    """Computes the generalised Gauss-Newton matrix `J^T H J` of a batch as an operator, linearised once.

    J is the Jacobian of the outputs in the parameters, H the exact Hessian of the loss in the outputs. If H is positive
    semi-definite, as for squared errors and cross-entropies, so is the product, which the Hessian of a network is not
    (Schraudolph, 2002). If the outputs are linear in the parameters, the two are equal.

    >>> import jax.numpy as jnp
    >>> from treeparams import nested
    >>> model, x = {"w": jnp.array([1.0, 2.0])}, jnp.array([[1.0, 0.0], [1.0, 1.0]])
    >>> operator = nested.ggn_operator(lambda model, x: x @ model["w"], lambda y: jnp.sum(y**2))(model, x)
    >>> operator(jnp.array([1.0, 0.0]))  # the first column of 2 x^T x
    Array([4., 2.], dtype=float32)

    Args:
        f: called as `f(model, *args)`, returns the outputs for the batch, an array or a tree of arrays; complex ones
            count as pairs of reals.
        loss: called as `loss(outputs)`, returns a scalar.
        trainable: as for `hvp`.
        damping: as for `hessian_operator`.

    Returns:
        A function of `(model, *args)` that returns an `Operator`, from vectors or trees to the same.

    Raises:
        ValueError: when called: as `tp.layout`.
        TypeError: when called: as `hvp`.
    """

    def operator(model: PyTree, *args: object) -> Operator:
        parts = array_parts(model, trainable)
        of_parameters, slots = of_reals(f, parts, *args), in_reals(parts.slots)
        outputs, forward = jax.linearize(lambda reals: in_reals(of_parameters(reals)), slots)
        _, curvature = jax.linearize(jax.grad(lambda outputs: loss(from_reals(outputs))), outputs)
        return Operator(jtu.Partial(_gauss_newton, forward, curvature), damping, parts.layout, _shardings_of(slots))

    return operator


def _gauss_newton(forward: Callable[[Any], Any], curvature: Callable[[Any], Any], direction: Reals) -> Reals:
    """Returns `J^T H J` times a direction, from linear functions that are pytrees."""
    (product,) = jax.linear_transpose(forward, direction)(curvature(forward(direction)))
    return product


def hvp(f: Callable[..., Array], trainable: Trainable = None) -> Callable[..., PyTree]:
    """Computes the product of the Hessian of a loss over a batch with a tangent, forward over reverse.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"w": jnp.array([1.0, 2.0]), "frozen": jnp.ones(1)}
    >>> loss = lambda model, x: x * jnp.sum(model["w"] ** 3) * model["frozen"][0]
    >>> product = nested.hvp(loss, "w")
    >>> product(model, jnp.array([1.0, 1.0]), 2.0)
    Array([12., 24.], dtype=float32)
    >>> product(model, {"w": jnp.array([1.0, 0.0])}, 2.0)["w"]
    Array([12.,  0.], dtype=float32)

    For many products at one model, `hessian_operator` shares their common work.

    Args:
        f: called as `f(model, *args)`, returns a scalar.
        trainable: the parameters that train: `None` (as declared), a mask, a `where` or a `Layout`; see `tp.layout`.

    Returns:
        A function of `(model, tangent, *args)`. The tangent is a vector, as of `tp.ravel`, or a tree with entries at
        paths of the model, where missing entries count as zero. It is a value of the parameters: at a tie the slot's
        entry counts. For a complex parameter it is the change of the real part plus i times that of the imaginary one;
        you may also pass the real vector of `real_vector`.

        The function returns the product in the same form as the tangent, a vector or a canonical tree. It is computed
        in the parameters' own dtypes, to which the tangent is rounded, as `jax.jvp` requires: for bfloat16 parameters
        it is no more precise than bfloat16. The result has the wider of the parameters' and the tangent's dtype, so
        that a solver in float32 gets float32. For a complex parameter the product is the derivative in its real part
        plus i times that in the imaginary one, so that the Hessian of `|z|^2 / 2` is the identity. (Gradients of JAX
        and of `tp.grad` are the conjugate of that.)

    Raises:
        ValueError: when called: the tangent is a vector of another length, has an entry of another shape, or at a path
            where the model has no leaf; as `tp.layout`.
        TypeError: when called: f returns no real scalar; as `tp.layout`.
    """

    def product(model: PyTree, tangent: PyTree, *args: object) -> PyTree:
        parts = array_parts(model, trainable)
        gradient = jax.grad(_loss_of(f, parts, *args))
        _, change = jax.jvp(gradient, (in_reals(parts.slots),), (taken(parts.layout, tangent),))
        return _given_back(parts.layout, change, tangent)

    return product


def hessian(
    f: Callable[..., Array], trainable: Trainable = None, *, chunk: int | None = None
) -> Callable[..., Float[Array, "n n"]]:
    """Computes the Hessian of a loss over a batch as a matrix over the vector of the trained parameters.

    >>> import jax.numpy as jnp, treeparams as tp
    >>> from treeparams import nested
    >>> model = {"a": jnp.array([1.0, 2.0]), "b": jnp.array(3.0)}
    >>> matrix = nested.hessian(lambda model: jnp.sum(model["a"] ** 2) * model["b"])(model)
    >>> tp.layout(model).block(matrix, "a", "b")
    Array([[2.],
           [4.]], dtype=float32)

    You get its diagonal alone, without the matrix, from `nested.hessian_operator(f)(model).diagonal()`.

    Args:
        f: called as `f(model, *args)`, returns a scalar.
        trainable: as for `hvp`.
        chunk: how many columns are computed at once, which bounds the memory; `None`: all.

    Returns:
        A function of `(model, *args)` that returns the matrix, shape `(n, n)` with n the length of the vector; its
        blocks by name are `layout.block`. With complex parameters it is over the vector of `real_vector`.

    Raises:
        ValueError: when called: `chunk` is no count; as `tp.layout`.
        TypeError: when called: as `hvp`.
    """

    def matrix(model: PyTree, *args: object) -> jax.Array:
        return hessian_operator(f, trainable)(model, *args).matrix(chunk=chunk)

    return matrix


def _given_back(layout: Layout, reals: Reals, tangent: PyTree) -> PyTree:
    """Returns one value per slot in reals in the form of the tangent, a vector, a real vector or a tree.

    No dtype is narrower than in the tangent.
    """
    shape = getattr(tangent, "shape", None)
    if shape == (layout.size,):
        return _no_narrower(Form.vector(layout).join(from_reals(reals)), tangent)
    if shape == (form_of_reals(layout).blocks[0].size,):
        return _no_narrower(form_of_reals(layout).join(jax.tree.leaves(reals)), tangent)
    index = index_of(layout)
    entries = index.per_slot(tangent, "first")
    return index.canonical(list(map(_no_narrower, from_reals(reals), entries)), index.structure.treedef)


def _no_narrower(product: jax.Array, tangent: Any) -> jax.Array:
    dtype = getattr(tangent, "dtype", product.dtype)
    return product.astype(common_dtype([product.dtype, jax.dtypes.canonicalize_dtype(dtype)]))
