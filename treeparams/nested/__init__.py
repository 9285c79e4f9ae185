"""Derivatives within losses, curvature of trained parameters, and derivatives sample by sample.

You call each function like `jax.grad` and `jax.hessian`: it takes f and options, and returns a function that takes the
model first. You call that one like f, `nested.hessian(f)(model, *args)`, with two additions. A tangent comes after the
model: `nested.hvp(f)(model, tangent, *args)`, `nested.linearised(f)(model, tangent, *args)`. And functions that work
sample by sample take samples with a leading axis where f takes one: `nested.parameter_jacobian(f)(model, xs)`,
`nested.kernel(f)(model, xs, ys)`, `nested.per_example_gradients(f)(model, *batch)`.

Names that begin with `input_` differentiate a model's output in its input x, the first argument after the model. All
others differentiate in the trained parameters of a model, in which a tied parameter counts once; frozen arrays cost
nothing, and `trainable` is the second argument, `nested.hessian(f, "layers.1")`. You may give a tangent as a vector, as
of `tp.ravel`, or as a tree, as of `tp.grad`, and get the result in the same form.
"""

from .._tree.text import answer_calls as _answer_calls
from ._curvature import (
    Operator as Operator,
    ggn_operator as ggn_operator,
    hessian as hessian,
    hessian_operator as hessian_operator,
    hvp as hvp,
)
from ._inputs import (
    input_gradient as input_gradient,
    input_jacobian as input_jacobian,
    input_laplacian as input_laplacian,
)
from ._jacobian import (
    kernel as kernel,
    linearised as linearised,
    parameter_jacobian as parameter_jacobian,
    per_example_gradients as per_example_gradients,
)
from ._reals import real_vector as real_vector

_answer_calls(__name__, globals())
