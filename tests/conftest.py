"""Strict JAX for all tests: what only works by silent promotion does not work.

Two variables say how they run otherwise: `TREEPARAMS_TEST_OPTIMISED=1` compiles programs as those of users are, and
`TREEPARAMS_TEST_PLATFORM=cuda` runs them there.
"""

import gc
import importlib.metadata
import importlib.util
import os
import pathlib
import shutil

# What is tested is the same on each platform, so that of the machine's is not taken by accident. On others, products of
# float32 are rounded to fewer bits if JAX is not told otherwise.
_PLATFORM = os.environ.get("TREEPARAMS_TEST_PLATFORM", "cpu")
os.environ["JAX_PLATFORMS"] = ",".join(dict.fromkeys([_PLATFORM, "cpu"]))
if _PLATFORM != "cpu":
    os.environ["JAX_DEFAULT_MATMUL_PRECISION"] = "highest"

# Most of the time would go into code for programs that run once, on little data: this halves it. Costs that are counted
# (FLOPs, bytes, temporary memory) are of what XLA has before that, and the same.
if "PYTEST_XDIST_WORKER" not in os.environ:
    if "TREEPARAMS_TEST_OPTIMISED" not in os.environ:
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
        # Older XLA compiles small programs in half the time with these. It aborts at flags that it does not have, as
        # that for TPU; the newer one sets up MLIR for each loop, and what it has instead changes less than 1 %.
        _older = tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11)
        if _older and importlib.util.find_spec("libtpu") is None:
            _flags = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_flags}"

    # Compiling is most of the time, and nearly all programs are those of the last run: with what it has compiled, a run
    # takes less than half. JAX finds a program by its text, its options and the versions of JAX, so none can be stale.
    # `pytest --cache-clear` empties the folder, and so does a run that finds it full.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        _kept = pathlib.Path(__file__).parent.parent / ".pytest_cache" / "d" / "compiled"
        if sum(file.stat().st_size for file in _kept.glob("*") if file.exists()) > 2**30:
            shutil.rmtree(_kept, ignore_errors=True)  # another run may use it
        os.environ["JAX_COMPILATION_CACHE_DIR"] = str(_kept)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Two workers on two cores take 5 % less where each stays on its own.
if os.environ.get("PYTEST_XDIST_WORKER_COUNT") == str(os.cpu_count()) and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))})

import pytest

from . import type_checks

_compiled: list[str] = []  # since the last time that they were forgotten


def _count_compilations(event: str, *_, **__):
    if event == "/jax/core/compile/backend_compile_duration":
        _compiled.append(event)


def pytest_addoption(parser):
    parser.addoption("--long", action="store_true", help="repeat for minutes what is else tested a few times")


def pytest_collection_modifyitems(items):
    """A law holds for models too that train nothing; that these are warned of is a test of its own."""
    for item in items:
        if "long" in item.keywords and not item.config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="other cases are in each run; all with --long, see tests/long.py"))
        if "nothing trained" in item.name or "all frozen" in item.name:
            item.add_marker(pytest.mark.filterwarnings("ignore:nothing is trained"))


def pytest_configure(config):
    """Before any test is imported; the process that only hands tests to others starts them sooner without."""
    config.addinivalue_line("markers", "long: a case that is run with --long alone")
    if config.getoption("dist", "no") != "no":
        return
    type_checks.install("treeparams")

    import jax

    import treeparams  # noqa: F401 - with its types checked, before what else imports it

    jax.config.update("jax_num_cpu_devices", 8)  # tests of several devices need them
    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.monitoring.register_event_duration_secs_listener(_count_compilations)

    # Tracing makes many objects that live on; looking for cycles among them at Python's pace takes 5% of the time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Memory is finite; but programs of single operations serve the next files too."""
    yield
    if len(_compiled) > 3000:
        import jax

        jax.clear_caches()
        _compiled.clear()


@pytest.fixture(autouse=True)
def _forget_ties():
    """Small models of different tests look alike; a tie of one must not be missed in another."""
    yield
    from treeparams._slots import accidents
    from treeparams._tree import text

    accidents._facts.clear()
    accidents.changes += 1
    text._given.clear()


@pytest.fixture
def standard_promotion():
    """As most users have it; rules of Optax multiply floats by integer counts."""
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def without_type_checks():
    """As users run the library: without it, the run-time checks of the annotations come before our own errors."""
    with type_checks.off():
        yield
