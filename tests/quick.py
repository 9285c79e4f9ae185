"""XLA flags with which programs that run once, on little data, compile in half the time; none where XLA lacks them."""

import importlib.util
import os
import subprocess
import sys

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
