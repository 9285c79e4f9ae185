from ._average import copy, ema
from ._declare import declare, field
from ._ema import Ema
from ._grad import grad, value_and_grad
from ._jit import jit
from ._layout import Layout, Slot
from ._partition import combine, partition, Rest
from ._project import global_norm, project
from ._resolve import layout, trainable
from ._ties import tie, ties, untie
from ._vector import ravel, Restructure
from ._walk import biwalk, mapreduce, maptrainable, trainables
