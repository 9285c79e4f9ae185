"""Curvature of trained parameters: products with the Hessian and the Gauss-Newton matrix, or the matrix itself.

Everything here is of the trained parameters only, ties once; what is frozen costs nothing. Tangents are vectors, as of
`tp.ravel`, or trees, as of `tp.grad`, and results have the form of the tangent.

The files, from the ground up:

    _slots      a loss as a function of the trained parameters; tangents in either form
    _operators  hvp, hessian_operator, ggn_operator
    _dense      hessian, hessian_diagonal
"""

from ._dense import hessian as hessian, hessian_diagonal as hessian_diagonal
from ._operators import (
    Operator as Operator,
    ggn_operator as ggn_operator,
    hessian_operator as hessian_operator,
    hvp as hvp,
)
