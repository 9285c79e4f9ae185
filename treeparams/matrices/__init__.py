"""Matrices made of parameters, and parameters that stay where they belong.

A weight may be a struct that holds several arrays and multiplies like a matrix; each of its arrays is trained, frozen,
flattened and averaged like any other. A constrained array holds raw parameters, of which any value is a valid point.

The files, from the ground up:

    _printing     how both print
    _replace      nodes of a class replaced, ties once
    _constrained  AbstractConstrained: an array that stays on a set; materialise
    _matrix       AbstractMatrix: what follows from two products; transposes, products, sums
    _weights      what constructors take for a matrix or an array; from_lineax, to_lineax
    _invertible   what square matrices with an inverse share
    _orthogonal   Orthogonal, Givens: products of reflections and of rotations
    _svd          SVD
    _low_rank     LowRank, lora, merge
    _imputing     PreImputing, PostImputing
    _structured   Diagonal, Kronecker, Permuted
    _circulant    Circulant, Toeplitz
    _constraints  Positive, Bounded, UnitNorm, Simplex
    _triangular   LowerTriangular, Symmetric
    _symmetric    SymmetricPositive
"""

from ._circulant import Circulant as Circulant, Toeplitz as Toeplitz
from ._constrained import AbstractConstrained as AbstractConstrained, materialise as materialise
from ._constraints import Bounded as Bounded, Positive as Positive, Simplex as Simplex, UnitNorm as UnitNorm
from ._imputing import PostImputing as PostImputing, PreImputing as PreImputing
from ._low_rank import LowRank as LowRank, lora as lora, merge as merge
from ._matrix import AbstractMatrix as AbstractMatrix
from ._orthogonal import Givens as Givens, Orthogonal as Orthogonal
from ._structured import Diagonal as Diagonal, Kronecker as Kronecker, Permuted as Permuted
from ._svd import SVD as SVD
from ._symmetric import SymmetricPositive as SymmetricPositive
from ._triangular import LowerTriangular as LowerTriangular, Symmetric as Symmetric
from ._weights import from_lineax as from_lineax, to_lineax as to_lineax
