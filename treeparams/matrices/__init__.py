"""Matrices made of parameters, and parameters that stay where they belong.

A weight may be a struct that holds several arrays and multiplies like a matrix; each of its arrays is trained, frozen,
flattened and averaged like any other. A constrained array holds raw parameters, of which any value is a valid point.
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
