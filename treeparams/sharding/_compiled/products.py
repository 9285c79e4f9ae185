"""Counts the operations of the matrix products and convolutions of a compiled program.

XLA's own `cost_analysis` counts the body of a loop once, however often it runs, so it does not help for a model that
scans over its layers.
"""

import functools
import math
import re

from .hlo import Computation, Operation, Text, shapes_in
from .sums import Counts, summed

_CONTRACTED = re.compile(r"\blhs_contracting_dim(?:s=\{|ensions\W+\[)([\d,\"]*)")  # of XLA; and of cuBLAS, in JSON
_LABELS = re.compile(r"\bdim_labels=(\w+)_(\w+)->(\w+)")
_WINDOW = re.compile(r"\bwindow=\{([^}]*)\}")


def flops_of(text: Text) -> int | None:
    """Returns the floating-point operations of products on each device in one run, two for each multiplication.

    Returns `None` if some are in a loop whose number of rounds depends on values.
    """
    weigh = lambda counts: math.inf if None in counts.values() else float(sum(counts.values()))
    return summed(text, _flops_of_one, weigh).counts.get("", 0)


def _flops_of_one(_: str, operation: Operation, beside: Computation) -> Counts:
    operands = [beside[name].result for name in operation.operands[:2] if name in beside]
    if operation.kind not in ("dot", "convolution", "custom-call") or len(operands) < 2:
        return {}
    results, left, right = (shapes_in(types) for types in (operation.result, *operands))
    if not (results and left and right):
        return {}
    if operation.kind == "convolution":
        return {"": _of_convolution(operation.attributes, left[0], right[0], results[0])}
    if contracted := _CONTRACTED.search(operation.attributes):
        axes = map(int, re.findall(r"\d+", contracted[1]))
        return {"": 2 * math.prod(results[0]) * math.prod(left[0][axis] for axis in axes)}
    return {}


def _of_convolution(attributes: str, left: tuple[int, ...], right: tuple[int, ...], result: tuple[int, ...]) -> int:
    """Counts, for each example and feature of the result, its products with the features of the input."""
    labels = _LABELS.search(attributes)
    if labels is None:
        return 0
    of_left, of_right, of_result = (
        dict(zip(each, shape, strict=True)) for each, shape in zip(labels.groups(), (left, right, result), strict=True)
    )
    window = dict(part.split("=") for part in (_WINDOW.search(attributes) or ["", ""])[1].split())
    flops = 2 * of_result["b"] * of_result["f"] * of_right["i"]
    for n, axis in enumerate(sorted(label for label in of_result if label.isdigit())):
        given = {name: values.split("x")[n] for name, values in window.items()}
        flops *= _meetings(of_left[axis], of_right[axis], of_result[axis], tuple(sorted(given.items())))
    return flops


@functools.lru_cache(maxsize=1024)
def _meetings(size: int, kernel: int, result: int, window: tuple[tuple[str, str], ...]) -> int:
    """Returns how many pairs of an input and a weight meet along one axis.

    On TPU a batch of products is written as a convolution with a dilated batch axis. Of its size^2 pairs only those of
    one example meet.
    """
    given = dict(window)
    stride, apart, of_kernel = (int(given.get(name, 1)) for name in ("stride", "lhs_dilate", "rhs_dilate"))
    low = int(given.get("pad", "0_0").rsplit("_", 1)[0])
    end = (size - 1) * apart + 1
    places = (out * stride - low + k * of_kernel for out in range(result) for k in range(kernel))
    return sum(1 for place in places if 0 <= place < end and place % apart == 0)
