"""Promises about the package itself."""

import ast
import importlib.metadata
import inspect
import json
import pathlib
import pickle
import subprocess
import sys

import jax
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices, nested, optim

from .zoo import assert_same

SOURCE = pathlib.Path(tp.__file__).parent
packages = pytest.mark.parametrize("package", [tp, optim, nested, matrices], ids=lambda package: package.__name__)


def public(package):
    return {name: value for name, value in vars(package).items() if name[0] != "_" and not inspect.ismodule(value)}


@packages
def test_each_public_name_shows_an_example_that_runs(package):
    assert len(public(package)) > 10
    for name, value in public(package).items():
        assert value.__doc__, name
        if inspect.isfunction(value) or issubclass(value, matrices.AbstractMatrix | matrices.AbstractConstrained):
            assert ">>>" in value.__doc__, name
        if package in (optim, matrices) and inspect.isclass(value):  # under which it pickles
            assert (value.__module__, value.__qualname__) == (package.__name__, name)


@packages
def test_the_map_of_the_files_is_complete(package):
    listed = {line.split()[0] for line in package.__doc__.splitlines() if line.startswith("    _")}
    assert listed == {path.stem for path in pathlib.Path(package.__file__).parent.glob("_*.py")} - {"__init__"}


def test_importing_changes_nothing_and_loads_nothing_else():
    code = """
import json, sys, warnings, jax, equinox, jaxtyping
before, modules = dict(jax.config.values), set(sys.modules)
hooks, filters = list(sys.meta_path), list(warnings.filters)
import treeparams
new = {name.partition(".")[0] for name in set(sys.modules) - modules}
same = before == dict(jax.config.values) and hooks == sys.meta_path and filters == warnings.filters
print(json.dumps([sorted(new), same, jax._src.xla_bridge.backends_are_initialized()]))
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    new, same, started = json.loads(printed)
    assert set(new) - {"treeparams", "jax"} <= set(sys.stdlib_module_names)  # jax.extend is no part of `import jax`
    assert same
    assert not started


def test_only_public_jax_is_used_and_the_version_is_that_of_the_package():
    nodes = [node for path in SOURCE.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    assert not [node for node in nodes if isinstance(node, ast.Attribute) and node.attr == "_src"]
    assert tp.__version__ == importlib.metadata.version("treeparams")


def test_values_of_public_classes_pickle():
    shared = np.ones(2)
    model = {"a": shared, "b": shared, "frozen": np.ones(1), "name": "net"}
    layout = tp.layout(model, freeze="frozen")
    (vector, restructure), (params, rest) = tp.ravel(model, layout), tp.partition(model, layout)
    svd = matrices.SVD.random(2, 2, key=jax.random.key(0))
    for value in (layout, layout.slots[0], restructure, rest, tp.Ema(model, 0.9), svd):
        again = pickle.loads(pickle.dumps(value))
        assert type(again) is type(value)
        assert type(value).__module__ in ("treeparams", "treeparams.matrices")
        assert jax.tree.structure(again) == jax.tree.structure(value)
    restructure, rest = pickle.loads(pickle.dumps((restructure, rest)))
    assert_same(restructure(vector), tp.combine(params, rest))
    assert_same(tp.combine(params, rest), model)
