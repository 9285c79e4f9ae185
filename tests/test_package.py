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
import jax.numpy as jnp
import pytest

import treeparams as tp
from treeparams import matrices, nested, optim

SOURCE = pathlib.Path(tp.__file__).parent
PUBLIC = {name: value for name, value in vars(tp).items() if not name.startswith("_") and not inspect.ismodule(value)}


OPTIM = {name: value for name, value in vars(optim).items() if not name.startswith("_") and not inspect.ismodule(value)}
NESTED = {name: value for name, value in vars(nested).items() if name[0] != "_" and not inspect.ismodule(value)}
MATRICES = {name: value for name, value in vars(matrices).items() if name[0] != "_" and not inspect.ismodule(value)}


def test_the_public_names():
    assert sorted(PUBLIC) == [
        "Ema", "Layout", "Rest", "Restructure", "Slot", "Summary", "View", "accumulate", "biwalk", "combine", "copy",
        "declare", "ema", "field", "global_norm", "grad", "jit", "layout", "leaves", "mapreduce", "maptrainable",
        "partition", "project", "ravel", "summary", "tie", "trainables", "untie", "value_and_grad",
    ]  # fmt: skip
    assert tp.__version__ == importlib.metadata.version("treeparams")


def test_the_public_names_of_optim():
    assert sorted(OPTIM) == [
        "ClipState", "GroupsState", "ModelTransformation", "Report", "TrainableState", "adjust", "apply_updates",
        "clip_by_global_norm", "clip_state", "flat", "groups", "report", "set_trainable", "step", "trainable",
    ]  # fmt: skip


def test_the_public_names_of_nested():
    assert sorted(NESTED) == [
        "Operator", "batched_gradient", "batched_jacobian", "ggn_operator", "gradient", "hessian", "hessian_diagonal",
        "hessian_operator", "hvp", "jacobian", "jvp", "laplacian", "per_example_gradients", "per_example_norms", "vjp",
    ]  # fmt: skip


def test_the_public_names_of_matrices():
    assert sorted(MATRICES) == [
        "AbstractConstrained", "AbstractMatrix", "Bounded", "Givens", "LowRank", "LowerTriangular", "Orthogonal",
        "Positive", "PostImputing", "PreImputing", "SVD", "Simplex", "Symmetric", "UnitNorm", "from_lineax", "lora",
        "materialise", "merge", "to_lineax",
    ]  # fmt: skip


BY_MODULE = {"tp": PUBLIC, "optim": OPTIM, "nested": NESTED, "matrices": MATRICES}


@pytest.mark.parametrize(
    "value",
    [value for names in BY_MODULE.values() for value in names.values()],
    ids=[f"{module}.{name}" for module, names in BY_MODULE.items() for name in names],
)
def test_every_public_function_shows_an_example_that_runs(value):
    assert value.__doc__
    if inspect.isfunction(value) or issubclass(value, matrices.AbstractMatrix | matrices.AbstractConstrained):
        assert ">>>" in value.__doc__


@pytest.mark.parametrize("package", [tp, optim, nested, matrices])
def test_the_map_of_the_files_is_complete(package):
    listed = {line.split()[0] for line in package.__doc__.splitlines() if line.startswith("    _")}
    assert listed == {path.stem for path in pathlib.Path(package.__file__).parent.glob("_*.py")} - {"__init__"}


def _run(code):
    return json.loads(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)


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
    new, same, started = _run(code)
    assert set(new) - {"treeparams", "jax"} <= set(sys.stdlib_module_names)  # jax.extend is no part of `import jax`
    assert same
    assert not started


def test_only_public_jax_is_used():
    found = [
        (path.name, node.attr)
        for path in SOURCE.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Attribute) and node.attr == "_src"
    ]
    assert found == []


def test_public_classes_pickle_under_the_public_name():
    model = {"w": jnp.ones(2), "frozen": jnp.ones(1)}
    layout = tp.layout(model, freeze="frozen")
    (_, restructure), (_, rest) = tp.ravel(model, layout), tp.partition(model, layout)
    for value in (layout, layout.slots[0], restructure, rest):
        assert type(value).__module__ == "treeparams"
        again = pickle.loads(pickle.dumps(value))
        assert type(again) is type(value)
    assert jax.tree.structure(pickle.loads(pickle.dumps(tp.Ema(model, 0.9)))).num_leaves == 4


def test_states_and_matrices_pickle_under_the_public_name():
    for module, names in (("treeparams.optim", OPTIM), ("treeparams.matrices", MATRICES)):
        for name, value in names.items():
            if inspect.isclass(value):
                assert (value.__module__, value.__qualname__) == (module, name)
    svd = matrices.SVD.random(2, 2, key=jax.random.key(0))
    assert jax.tree.structure(pickle.loads(pickle.dumps(svd))) == jax.tree.structure(svd)
