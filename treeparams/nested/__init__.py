"""Derivatives within losses, curvature of trained parameters, and derivatives sample by sample.

Derivatives are taken in the trained parameters of a model, ties once; frozen arrays cost nothing. You may give a
tangent as a vector, as of `tp.ravel`, or as a tree, as of `tp.grad`, and get such a one back. `gradient`, `jacobian`
and `laplacian` are of a model's output in its input.

The files, from the ground up:

    _slots        real_vector; a loss as a function of the trained parameters; tangents, vectors or trees
    _inputs       gradient, jacobian; a map over all values or some at a time
    _series       value, Jacobian and Laplacian of a result, through one equation
    _laplacian    laplacian: the same through a program
    _curvature    hvp, hessian, hessian_diagonal
    _operator     hessian_operator, ggn_operator
    _jacobian     parameter_jacobian, linearised
    _kernel       kernel
    _batched      batched_gradient, batched_jacobian
    _per_example  per_example_gradients
"""

from ._batched import batched_gradient as batched_gradient, batched_jacobian as batched_jacobian
from ._curvature import hessian as hessian, hessian_diagonal as hessian_diagonal, hvp as hvp
from ._inputs import gradient as gradient, jacobian as jacobian
from ._jacobian import linearised as linearised, parameter_jacobian as parameter_jacobian
from ._kernel import kernel as kernel
from ._laplacian import laplacian as laplacian
from ._operator import (
    Operator as Operator,
    ggn_operator as ggn_operator,
    hessian_operator as hessian_operator,
)
from ._per_example import per_example_gradients as per_example_gradients
from ._slots import real_vector as real_vector
