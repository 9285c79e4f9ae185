"""Strict JAX for all tests: what only works by silent promotion does not work."""

import atexit
import functools
import gc
import os
import shutil
import tempfile

from . import quick

# Eight CPU devices, before JAX starts; tests of sharding and of several devices need them.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"

# Most of the time would go into code for programs that run once, on little data: this halves it. Costs that are counted
# (FLOPs, bytes, temporary memory) are of what XLA has before that, and the same.
if "PYTEST_XDIST_WORKER" not in os.environ:
    os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
    os.environ["XLA_FLAGS"] += quick.flags()

    # A third of the programs have been compiled before, in another test or by the other worker. With a folder that is
    # kept, JAX_COMPILATION_CACHE_DIR=..., the next run takes over what this one has compiled.
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        os.environ["JAX_COMPILATION_CACHE_DIR"] = tempfile.mkdtemp()
        atexit.register(shutil.rmtree, os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Two workers on two cores take 5 % less where each stays on its own.
if os.environ.get("PYTEST_XDIST_WORKER_COUNT") == str(os.cpu_count()) and hasattr(os, "sched_setaffinity"):
    os.sched_setaffinity(0, {int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))})

import jaxtyping
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
            item.add_marker(pytest.mark.skip(reason="a law of which other cases are in each run; all with --long"))
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

    _share_contexts()

    jax.config.update("jax_numpy_dtype_promotion", "strict")
    jax.config.update("jax_numpy_rank_promotion", "raise")
    jax.monitoring.register_event_duration_secs_listener(_count_compilations)

    # Tracing makes many objects that live on; looking for cycles among them at Python's pace takes 5% of the time.
    gc.freeze()
    gc.set_threshold(50_000, 20, 50)


def _share_contexts():
    """Lowers the programs of a file in one context of MLIR.

    JAX makes one for each program. That takes longer than all else of lowering a small one, and a megabyte that stays.
    """
    from jax._src.interpreters import mlir
    from jax._src.lib.mlir import ir

    make = mlir.make_ir_context
    shared = functools.cache(make)

    def context():
        try:
            is_within = ir.Context.current is not None  # an operation that lowering calls for: it would end up there
        except ValueError:  # the older way to say that there is none
            is_within = False
        return make() if is_within else shared()

    context.forget = shared.cache_clear
    mlir.make_ir_context = context


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Memory is finite; but programs of single operations serve the next files too."""
    yield
    from jax._src.interpreters import mlir

    mlir.make_ir_context.forget()
    if len(_compiled) > 3000:
        import jax

        jax.clear_caches()
        _compiled.clear()


@pytest.fixture(autouse=True)
def _forget_ties():
    """Small models of different tests look alike; a tie of one must not be missed in another."""
    yield
    from treeparams._slots import accidents
    from treeparams._tree import lost_ties, messages

    memories = [lost_ties._met_tied, lost_ties._met_apart, lost_ties._given, lost_ties.said, lost_ties._untied]
    for memory in (*memories, lost_ties._told, accidents._looked_at, accidents._compared, messages._warned_of):
        memory.clear()
    lost_ties._note_change()


@pytest.fixture
def standard_promotion():
    """As most users have it; rules of Optax multiply floats by integer counts."""
    import jax

    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def without_type_checks():
    """As users run the library: without it, the run-time checks of the annotations come before our own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
