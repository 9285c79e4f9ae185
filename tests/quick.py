"""XLA flags with which programs that run once, on little data, compile in half the time; none where XLA lacks them."""

import importlib.util
import os
import subprocess
import sys

# XLA of JAX 0.12 no longer has the first, and takes 2.5 times as long for a small program: it sets up MLIR for each
# kernel. What it has instead changes less than 1% (codegen in one part, the preset for fast compilation) or costs more
# (4% without its new lowering, half as much again without fusions).
_FLAGS = " --xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
_START = "import jaxlib.xla_client; jaxlib.xla_client.make_cpu_client()"


def flags() -> str:
    """Returns what to add to `XLA_FLAGS`. XLA aborts at flags that it does not have, and that for TPU has neither."""
    if importlib.util.find_spec("libtpu"):
        return ""
    quick = os.environ | {"XLA_FLAGS": os.environ.get("XLA_FLAGS", "") + _FLAGS}
    has_them = subprocess.run([sys.executable, "-c", _START], env=quick, capture_output=True).returncode == 0
    return _FLAGS if has_them else ""


if __name__ == "__main__":
    print(flags())
