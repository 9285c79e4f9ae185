"""XLA flags with which programs that run once, on little data, compile in half the time; none where XLA lacks them."""

import importlib.metadata
import importlib.util

_FLAGS = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"


def flags() -> str:
    """Returns what to add to `XLA_FLAGS`. XLA aborts at flags that it does not have, as that for TPU."""
    # XLA of JAX 0.12 no longer has the first, and takes 2.5 times as long for a small program: it sets up MLIR for each
    # loop. What it has instead changes less than 1 %, or costs more: without fusions, twice as much.
    version = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2]))
    return _FLAGS if version < (0, 11) and importlib.util.find_spec("libtpu") is None else ""


if __name__ == "__main__":
    print(flags())
