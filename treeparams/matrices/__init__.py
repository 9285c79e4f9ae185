"""Matrices made of parameters, and what keeps parameters where they belong."""

from ._low_rank import LowRank as LowRank, lora as lora, merge as merge
from ._matrix import AbstractMatrix as AbstractMatrix
from ._orthogonal import Givens as Givens, Orthogonal as Orthogonal
from ._svd import SVD as SVD
from ._weights import from_lineax as from_lineax, to_lineax as to_lineax
