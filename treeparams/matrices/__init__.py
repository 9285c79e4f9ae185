"""Matrices and constrained arrays that are made of parameters, for the weights of a model.

A weight may be a struct that holds several arrays and multiplies like a matrix. You train, freeze, flatten and average
each of its arrays like any other. A constrained array holds raw parameters, and any value of these is a valid point.
"""

from .._tree.text import answer_calls as _answer_calls
from ._constrained import AbstractConstrained as AbstractConstrained, Positive as Positive, materialise as materialise
from ._low_rank import (
    LowRank as LowRank,
    PostImputing as PostImputing,
    PreImputing as PreImputing,
    lora as lora,
    merge as merge,
)
from ._matrix import AbstractMatrix as AbstractMatrix, from_lineax as from_lineax, to_lineax as to_lineax
from ._orthogonal import SVD as SVD, Givens as Givens, Orthogonal as Orthogonal

_answer_calls(__name__, globals())
