"""Matrices made of parameters, and parameters that stay where they belong.

A weight may be a struct that holds several arrays and multiplies like a matrix; each of its arrays is trained, frozen,
flattened and averaged like any other. A constrained array holds raw parameters, of which any value is a valid point.

The files, from the ground up:

    _nodes        the base of matrices and constrained arrays: no arrays themselves, they say how to get one
    _matrix       AbstractMatrix, from two products; transposes, products, sums
    _lineax       from_lineax, to_lineax; the matrix that a constructor was given
    _orthogonal   Orthogonal, Givens: products of reflections and of rotations
    _svd          SVD
    _imputing     PreImputing, PostImputing
    _constrained  AbstractConstrained, an array that stays on a set; Positive; materialise
    _low_rank     LowRank, lora, merge
"""

from ._constrained import (
    AbstractConstrained as AbstractConstrained,
    Positive as Positive,
    materialise as materialise,
)
from ._imputing import PostImputing as PostImputing, PreImputing as PreImputing
from ._lineax import from_lineax as from_lineax, to_lineax as to_lineax
from ._low_rank import LowRank as LowRank, lora as lora, merge as merge
from ._matrix import AbstractMatrix as AbstractMatrix
from ._orthogonal import Givens as Givens, Orthogonal as Orthogonal
from ._svd import SVD as SVD
