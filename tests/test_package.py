"""Promises about the package itself."""

import importlib
import importlib.metadata
import inspect
import json
import pathlib
import pickle
import re
import subprocess
import sys
import tomllib

import jax
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices, nested, optim

from .blocks import run
from .zoo import ZOO, assert_same

SOURCE = pathlib.Path(tp.__file__).parent
ROOT = pathlib.Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
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


@pytest.mark.parametrize(
    "folder", ["", "_tree", "_files", "_slots", "_forms", "optim", "nested", "matrices", "saving", "sharding"]
)
def test_the_map_of_the_files_is_complete(folder):
    name = ".".join(["treeparams", *filter(None, folder.split("/"))])
    text = (ROOT / ".github/CONTRIBUTING.md").read_text()
    is_inner = folder.rpartition("/")[2][:1] == "_"
    text = importlib.import_module(name).__doc__ if is_inner else text.split(f"`{name}`:\n\n```\n")[1]
    listed = set(re.findall(r"^    (\w+) ", text.partition("```")[0], re.MULTILINE))
    entries = {path.stem for path in (SOURCE / folder).iterdir() if path.suffix == ".py" or path.is_dir()}
    assert listed == entries - {"__init__", "__pycache__"}
    assert len(entries - {"__pycache__"}) <= 26


@pytest.mark.parametrize("module", [tp, optim], ids=lambda module: module.__name__)
def test_the_help_of_a_module_lists_its_names_by_task(module):
    lines = re.findall(r"^    [\w. ,]+?  +(\w+(?:, \w+)*)$", module.__doc__, re.MULTILINE)
    assert sorted(", ".join(lines).split(", ")) == sorted(public(module))


def test_importing_changes_nothing_loads_nothing_else_and_brings_modules_when_they_are_asked_for():
    code = """
import json, sys, warnings, jax, equinox, jaxtyping
before, modules = dict(jax.config.values), set(sys.modules)
hooks, filters = list(sys.meta_path), list(warnings.filters)
import treeparams as tp
new = {name.partition(".")[0] for name in set(sys.modules) - modules}
same = before == dict(jax.config.values) and hooks == sys.meta_path and filters == warnings.filters
jax.config.update("jax_num_cpu_devices", 2)  # an error once a device is started
assert not {"optax", "treeparams.optim"} & set(sys.modules) and "optim" in dir(tp)
names = ("lax", "matrices", "nested", "optim", "plot", "saving", "sharding", "types")
print(json.dumps([sorted(new), same, [getattr(tp, name).__name__ for name in names]]))
tp.optimiser
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    new, same, modules = json.loads(done.stdout)
    assert set(new) - {"treeparams", "jax"} <= set(sys.stdlib_module_names)  # jax.extend is no part of `import jax`
    assert same
    assert modules == [f"treeparams.{name}" for name in tp._MODULES]
    assert "AttributeError: module 'treeparams' has no attribute 'optimiser'" in done.stderr


def test_only_public_jax_is_used():
    assert not [str(path) for path in SOURCE.rglob("*.py") if re.search(r"\b_src\b", path.read_text())]


def test_the_version_is_the_same_wherever_it_is_read():
    assert "version" in PROJECT["dynamic"]  # hatchling takes it from treeparams/__init__.py
    assert tp.__version__ == importlib.metadata.version("treeparams")
    assert re.findall("^version: (.*)$", (ROOT / ".github/CITATION.cff").read_text(), re.M) == [tp.__version__]
    newest, *_ = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest == tp.__version__


def test_the_versions_that_are_promised_are_those_that_are_tested():
    versions = re.findall(r"Python :: (3\.\d+)", "\n".join(PROJECT["classifiers"]))
    assert set(versions) == set(re.findall(r'"(3\.\d+)"', (ROOT / ".github/workflows/tests.yml").read_text()))
    assert PROJECT["requires-python"] == f">={versions[0]}"

    bounds = dict(line.split(">=") for line in PROJECT["dependencies"])
    pins = dict(re.findall(r"^([\w-]+)==(\S+)$", (ROOT / ".ci/oldest.txt").read_text(), re.M))
    assert pins.pop("jaxlib") == pins["jax"]
    assert pins.keys() == bounds.keys()
    assert all(f"{pins[name]}.".startswith(f"{bound}.") for name, bound in bounds.items()), (pins, bounds)

    page = (ROOT / "docs/pages/versions.md").read_text()
    assert f"| Python | {versions[0]} | {versions[-1]} |" in page
    said = dict(re.findall(r"^\| (\w+) \| (\S+) \| the newest", page, re.M))
    assert said == {name: bounds[name.lower()] for name in ("JAX", "Equinox", "Optax")}


def test_links_of_the_readme_lead_somewhere_in_any_checkout():
    """`hatch-fancy-pypi-readme` makes them absolute for the package index; `.ci/package` looks."""
    text = re.sub("^```.*?^```$", "", (ROOT / "README.md").read_text(), flags=re.M | re.S)
    links = re.findall(r"\]\(([^)\s]+)", text)
    assert len(links) > 10
    here = re.compile("https://treeparams.github.io/treeparams/(.+)/")
    places = [f"docs/pages/{found[1]}" if (found := here.fullmatch(link)) else link for link in links]
    assert not [link for link in places if not (ROOT / link).exists() and not (ROOT / f"{link}.md").exists()]
    assert len(set(places) - set(links)) == 4


def test_nothing_is_installed_from_where_it_is_not():
    """The package is not on PyPI; this goes with its first release."""
    folders = [ROOT / name for name in ("treeparams", "examples", "benchmarks", "notebooks", "docs", ".github")]
    pages = [ROOT / "README.md", *(path for folder in folders for path in folder.rglob("*.*") if path.is_file())]
    texts = {path: path.read_text() for path in pages if path.suffix in {".md", ".py", ".ipynb", ".yml"}}
    assert len(texts) > 150
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?treeparams(?!\S* @ git)")
    assert not [str(path) for path, text in texts.items() if wrong.search(text)]


def test_what_contributors_are_told_holds():
    page = ROOT / ".github/CONTRIBUTING.md"
    namespace, blocks = run(page)
    assert len(blocks) == 3
    for name in ("bf16 with f32", "same array twice", "batch norm"):
        namespace["test_norms_are_those_of_the_global_norm"](ZOO[name])
    files = re.findall(r"`([\w.-]+/[\w./-]+\w)`", page.read_text())
    assert len(files) > 8
    assert not [name for name in files if not (ROOT / name).exists()]


def test_workflows_use_actions_at_the_commit_that_was_read():
    workflows = sorted((ROOT / ".github/workflows").glob("*.yml"))
    used = [line for path in workflows for line in path.read_text().splitlines() if "uses:" in line]
    assert len(used) > 10
    assert not [line for line in used if not re.search(r"@[0-9a-f]{40} # v\d", line)]


def test_values_of_public_classes_pickle():
    shared = np.array([1.0, 2.0])
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
