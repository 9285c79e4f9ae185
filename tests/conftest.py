"""Strict JAX for all tests: what only works by silent promotion does not work."""

import os
import shutil
import tempfile

# Four CPU devices, before JAX starts; tests of sharding and of several devices need them.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=4"

import jaxtyping

jaxtyping.install_import_hook("treeparams", "beartype.beartype")

import jax
import pytest

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# The workers compile many of the same programs, small ones above all: what one has compiled the other takes from a
# folder, which goes with the session.


def pytest_configure(config):
    folder = getattr(config, "workerinput", {}).get("compiled")
    if folder is None:
        config.compiled = tempfile.mkdtemp(prefix="treeparams-")
        return
    jax.config.update("jax_compilation_cache_dir", folder)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node):
    node.workerinput["compiled"] = node.config.compiled


def pytest_unconfigure(config):
    if hasattr(config, "compiled"):
        shutil.rmtree(config.compiled, ignore_errors=True)


@pytest.fixture(autouse=True, scope="module")
def _forget_compiled_programs():
    """Compiled programs of one file are of no use to the next, and memory is finite."""
    yield
    jax.clear_caches()


@pytest.fixture
def standard_promotion():
    """As most users have it; rules of Optax multiply floats by integer counts."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.fixture
def without_type_checks():
    """As users run the library: without it, the run-time checks of the annotations come before our own errors."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)
