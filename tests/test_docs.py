"""The pages of the site do what they say, and name all that is public."""

import collections
import importlib
import importlib.util
import inspect
import json
import pathlib
import pkgutil
import re
import tomllib

import jax
import pytest

import treeparams as tp
from treeparams import lax, matrices, nested, optim, saving, sharding

from .blocks import run
from .long import LONG, some

pytestmark = pytest.mark.timeout(300)  # a page is a whole program
SITE = pathlib.Path(__file__).parent.parent / "docs"
PAGES = {str(path.relative_to(SITE / "pages")): path for path in sorted((SITE / "pages").rglob("*.md"))}
IDIOMS = "coming-from.md"
PORTS = ("how-to/adopt.md", "how-to/adopt-flax.md", "how-to/adopt-more.md")  # compared by tests/test_adopt.py
TRACED = re.compile(r"nested\.|matrices\.(Post|Pre|mat|lora)|tp\.(grad|vmap|lax|acc|ema|Ema|replace|maptr)|svd @")
OVERVIEW = "how-to/index.md"
HEAD = re.compile(r"---\ndescription: (.+)\n---\n\n# (.+)\n")
WITH_CODE = [name for name in PAGES if not name.startswith("api/") and name not in (IDIOMS, OVERVIEW, *PORTS)]
FIRST = ("index.md", "getting-started.md")  # run each time, and the others by `.ci/run`, as notebooks and examples are


def of_site(name):
    """A module of the site's, which is no package and not installed."""
    spec = importlib.util.spec_from_file_location(name, SITE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


names, checked, notebook_pages, benchmark_pages, dialect, search = map(
    of_site, ("names", "checked", "notebook_pages", "benchmark_pages", "dialect", "search")
)


@pytest.mark.usefixtures("standard_promotion")
@pytest.mark.parametrize("name", some(WITH_CODE, long={*WITH_CODE} - {*FIRST}))
def test_the_code_of_a_page_runs_and_prints_what_is_shown(name):
    namespace, blocks = run(PAGES[name])
    assert blocks
    assert "tp" in namespace
    assert any(block.shown for block in blocks)


@LONG
@pytest.mark.usefixtures("standard_promotion")
def test_each_line_of_the_tables_of_idioms_runs_after_its_code():
    namespace, blocks = run(PAGES[IDIOMS])
    rows = [row.split("|")[1:-1] for row in re.findall(r"^\| .*\|$", PAGES[IDIOMS].read_text(), re.MULTILINE)]
    rows = [row for row in rows if row[0].strip() != "idiom"]
    assert (len(blocks), {len(row) for row in rows}) == (1, {3})
    lines = [line for _, here, _ in rows for line in re.findall("`([^`]+)`", here)]
    assert len(lines) == len(rows) > 70
    for line in dict.fromkeys(lines):  # some are the idiom here of several elsewhere
        once = lambda line=line: exec(compile(line, line, "exec"), dict(namespace))
        # Where no number is asked for, within a trace, in which nothing is compiled.
        jax.eval_shape(once) if TRACED.search(line) else once()


def test_steps_of_models_are_compiled_by_one_function():
    """By `tp.jit`, which takes functions in models; plain `jax.jit` with a layout is on the page about it."""
    steps = {
        name: re.findall(r"^@(\S+)\n(def .*\n(?:(?: .*)?\n)*)", page.read_text(), re.M) for name, page in PAGES.items()
    }
    assert sum(wrapper.startswith("tp.jit") for found in steps.values() for wrapper, _ in found) > 20
    plain = {name for name, found in steps.items() if any("jax.jit" in w and ".layout" in code for w, code in found)}
    assert plain <= {"how-to/transformations.md"}
    for page in (SITE.parent / "README.md", PAGES["index.md"], PAGES["getting-started.md"]):
        assert "@tp.jit" in page.read_text()
        assert "@jax.jit" not in page.read_text()


@pytest.mark.parametrize("texts", ["docstrings", "pages", "notebooks", "readme"])
def test_prose_is_as_easy_to_read_as_that_of_equinox_and_optax(texts):
    counted = dialect.counted(getattr(dialect, texts)())
    you = counted.pop("you")
    assert {word: count for word, count in counted.items() if count > dialect.GOALS[word]} == {}
    assert you > dialect.GOALS["you"]
    assert dialect.counted(["What `what` is ```what```, you say."])["what"] == 1000 / 4


def test_the_overview_has_a_line_for_each_page():
    listed = re.findall(r"^\| \[(.*)\]\((.*)\) \| \S.*\. \|$", PAGES[OVERVIEW].read_text(), re.MULTILINE)
    pages = {name.removeprefix("how-to/"): page for name, page in PAGES.items() if name.startswith("how-to/")}
    del pages["index.md"]
    assert sorted(name for _, name in listed) == sorted(pages)
    assert [name for title, name in listed if HEAD.match(pages[name].read_text())[2] != title] == []


def test_each_page_is_described_in_one_short_sentence():
    described = {name: HEAD.match(page.read_text())[1] for name, page in PAGES.items()}
    for path in (SITE.parent / "notebooks").glob("*.ipynb"):
        described[path.name] = json.loads(path.read_text())["metadata"]["description"]
    assert len(set(described.values())) == len(described) > len(PAGES)
    for name, text in described.items():
        assert re.fullmatch(r"[A-Z][^`#]*\.", text), name
        assert 40 < len(text) <= 160, name
        assert ": " not in text, name  # which YAML reads as a mapping


def test_every_public_name_is_listed_once():
    entries = [
        entry
        for name, path in PAGES.items()
        if name.startswith("api/")
        for entry in re.findall(r"^::: (\S+)$", re.sub("<!--.*?-->", "", path.read_text(), flags=re.DOTALL), re.M)
    ]
    listed = collections.defaultdict(list)
    for entry in entries:
        module, _, name = entry.rpartition(".")
        assert hasattr(importlib.import_module(module), name), entry
        listed[module].append(name)
    for module in (tp, lax, optim, nested, matrices, saving, sharding):
        public = [name for name, value in vars(module).items() if name[0] != "_" and not inspect.ismodule(value)]
        if module is lax:  # a file and no package: it has names that it imports
            public = [name for name in public if vars(lax)[name].__module__ == lax.__name__ and len(name) > 1]
        assert sorted(listed[module.__name__]) == sorted(public)


def exists(name):
    try:
        found = pkgutil.resolve_name(name)
        return not inspect.ismodule(found) or found is getattr(tp, name.rpartition(".")[2], None)
    except (AttributeError, ImportError):
        return False


def test_the_installation_page_agrees_with_the_package():
    project = tomllib.loads((SITE.parent / "pyproject.toml").read_text())["project"]
    text = PAGES["installation.md"].read_text()
    extras = re.findall(r"^\| `(\w+)` \|", text, re.M)
    assert len(extras) > 5
    assert set(extras) <= project["optional-dependencies"].keys()
    assert f"Python {project['requires-python'].removeprefix('>=')}" in text
    jax = next(each for each in project["dependencies"] if each.startswith("jax>="))
    assert f"JAX ({jax.removeprefix('jax>=')} or newer)" in text


def test_every_page_is_in_the_navigation_once():
    def pages(entry):
        return [entry] if isinstance(entry, str) else [page for below in entry for page in pages(below)]

    def lists(entry):
        return [each if isinstance(each, str) else lists(*each.values()) for each in entry]

    configuration = tomllib.loads((SITE / "zensical.toml").read_text())
    assert sorted(pages(lists(configuration["project"]["nav"]))) == sorted(PAGES)


def test_names_documented_elsewhere_exist_and_are_listed_once():
    listed = [name for _, name, _ in names.elsewhere()]
    assert len(listed) == len(set(listed)) > 80
    newer = {"optax.freeze"}  # than the oldest versions that are supported
    assert {name for name in listed if not exists(name)} <= newer
    anchors = re.findall(r"\{ #(\S+) \}", "".join(path.read_text() for path in PAGES.values()))
    named = [anchor for anchor in anchors if "." in anchor]  # others are of headings
    assert len(named) == 9
    assert all(map(exists, named))


def test_names_on_pages_are_links():
    undocumented = {"jax.config.update", "jax.sharding.reshard", "optax.MaskedNode", "treeparams.plot"}
    seen = collections.Counter()
    for page in PAGES.values():
        text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
        for prefix, rest in re.findall(r"`(\w+)((?:\.\w+)+)[(\[`]", text):
            name = names.PREFIXES.get(prefix, prefix) + rest
            package = name.partition(".")[0]
            if package in ("treeparams", "jax", "equinox", "optax") and exists(name):
                seen[package] += 1
                assert name in names.documented() | undocumented, page
    assert len(seen) == 4
    assert min(seen.values()) > 20


def library_names(text):
    """Names after one of the prefixes of the library's modules, anywhere in the backticks of a text."""
    prefixes = "tp|lax|optim|nested|matrices|saving|sharding|plot"
    spans = re.findall(r"`([^`]+)`", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
    return [
        names.PREFIXES[prefix] + rest
        for span in spans
        for prefix, rest in re.findall(rf"(?<![\w.])({prefixes})((?:\.\w+)+)", span)
    ]


def test_names_of_the_library_exist():
    notebooks = "".join("".join(cell["source"]) for cell in cells_of_notebooks("markdown"))
    written = library_names(notebooks)
    assert len(written) > 20
    for page in (*PAGES.values(), SITE.parent / "README.md"):
        written += library_names(page.read_text())
    assert len(set(written)) > 60
    assert [name for name in written if not exists(name)] == []
    for wrong in ("`tp.grads`", "`optim.clipp(1.0)`", "`f(nested.hessians(loss, x))`"):
        (name,) = library_names(wrong)
        assert not exists(name)


def cells_of_notebooks(kind):
    notebooks = (json.loads(path.read_text()) for path in sorted((SITE.parent / "notebooks").glob("*.ipynb")))
    return [cell for notebook in notebooks for cell in notebook["cells"] if cell["cell_type"] == kind]


def test_code_that_the_site_shows_fits_100_columns():
    blocks = [
        *(block for page in PAGES.values() for block in re.findall(r"^ *```.*?^ *```$", page.read_text(), re.M | re.S)),
        *("".join(cell["source"]) for cell in cells_of_notebooks("code")),
    ]
    lines = [line for block in blocks for line in block.splitlines()]
    for module in (SITE.parent / "treeparams").rglob("*.py"):
        lines += re.findall(r"^ *(?:>>>|\.\.\.) (.*)$", module.read_text(), re.M)
    assert len(lines) > 4000
    assert [line for line in lines if len(line) > 100] == []


def test_links_stand_at_names_and_not_in_code():
    text = (
        "# `tp.grad`\n`tp.grad(f)(x)`, `jnp.where`, `optim.none`, [`tp.ema`](x.md)\n```\n`tp.grad`\n```\n`layout.mask`"
    )
    assert names.linked(text) == (
        "# `tp.grad`\n[`tp.grad(f)(x)`][treeparams.grad], [`jnp.where`][jax.numpy.where], `optim.none`, "
        "[`tp.ema`](x.md)\n```\n`tp.grad`\n```\n[`layout.mask`][treeparams.Layout.mask]"
    )
    rows = re.findall(r"^\| .*\|$", names.at_a_glance(PAGES["api/index.md"].read_text()), re.M)
    assert not re.findall(r"(?<!\[)`[\w.]+`(?!\])", "".join(rows))  # the table of the API has links only


def test_links_that_lead_nowhere_are_found(tmp_path):
    (tmp_path / "sub").mkdir()
    (tmp_path / "404.html").write_text("<a href='/nowhere'>")
    (tmp_path / "b.png").write_text("")
    (tmp_path / "a.html").write_text(
        "<h1 id=x></h1><a href=#x><a href=#y><a href=sub/c.html#z><a href=https://e.org/n><img src=n.png>"
    )
    (tmp_path / "sub" / "c.html").write_text("<h1 id=z></h1><a href=../a.html><a href=a.html><img src=../b.png>")
    dead = ["a.html: #y leads nowhere", "a.html: n.png leads nowhere", "sub/c.html: a.html leads nowhere"]
    assert sorted(checked.dead_links(tmp_path)) == dead


def test_a_notebook_becomes_a_page(tmp_path):
    picture = {"data": {"image/png": "AAAA"}, "metadata": {"image/png": {"width": 300, "alt": "a < b"}}}
    cells = [
        {"cell_type": "markdown", "source": ["# Title\n", "Lead."]},
        {"cell_type": "code", "source": ["draw()"], "metadata": {"tags": ["hide-input"]}, "outputs": [picture]},
        {"cell_type": "code", "source": ["1"], "metadata": {}, "outputs": [{"name": "stdout", "text": ["1\n"]}]},
    ]
    notebook = tmp_path / "some.ipynb"
    notebook.write_text(json.dumps({"cells": cells, "metadata": {"description": "About it."}}))
    (tmp_path / "out").mkdir()
    page = notebook_pages.write(notebook, tmp_path / "out")
    assert page.startswith("---\ndescription: About it.\nsource: https://github.com/")
    folded = ["<details", "```python\ndraw()\n```", "</details>", 'src="some-2.0.png" alt="a &lt; b" width="300"']
    places = [page.index(each) for each in ["# Title", 'href="some.ipynb" download', "Lead.", *folded]]
    assert places == sorted(places)
    assert page.rstrip().endswith("```python\n1\n```\n\n```text\n1\n```")
    assert (tmp_path / "out" / "some-2.0.png").read_bytes() == bytes(3)
    assert (tmp_path / "out" / "some.ipynb").read_bytes() == notebook.read_bytes()


def test_benchmarks_become_pages_with_all_claims():
    results, gpu = ((SITE.parent / "benchmarks" / name).read_text() for name in ("RESULTS.md", "GPU.md"))
    pages = dict(benchmark_pages.pages(results, gpu))
    verdicts = re.findall(r"^\| .*\| +(met|unclear|\*\*missed\*\*) \|$", results, re.M)
    assert len(verdicts) > 150
    assert len(re.findall(r"^\| .*\| (?:met|unclear|\*\*missed\*\*) \|$", pages["index.md"], re.M)) == len(verdicts)
    assert f"{verdicts.count('met')} of {len(verdicts)} claims are met" in pages["index.md"]
    for page in pages.values():
        assert re.match(r"---\ndescription: .{1,160}\nsource: \S+\nsearch:\n  exclude: true\n---\n\n# .*\n", page)


SEARCHES = {
    "faq.md": "number of parameters; Buffer has been deleted or donated; not a valid JAX type; gradient is None; scan",
    "how-to/freeze.md": "freeze layers",
    "how-to/tie.md": "weight tying",
    "how-to/resume.md": "checkpoint and resume; keep the best checkpoint",
    "how-to/over-several-devices.md": "multi GPU",
    "how-to/over-several-processes.md": "multi host",
    "how-to/bfloat16.md": "mixed precision",
    "how-to/bounds.md": "error bars; bounds for L-BFGS-B",
    "how-to/least-squares.md": "Levenberg Marquardt; Gauss-Newton; ODE parameters; least squares",
    "how-to/batch-norm.md": "batchnorm",
    "how-to/target-network.md": "replay buffer; exponential moving average; target network",
    "how-to/clip.md": "gradient clipping",
    "how-to/large-batch.md": "gradient accumulation",
    "how-to/weight-decay.md": "weight decay mask",
    "how-to/rates.md": "learning rate per layer",
    "how-to/matrices.md": "lora",
    "how-to/pytorch.md": "load pytorch weights",
    "how-to/derivatives-in-losses.md": "pinn",
    "how-to/hessian.md": "hessian",
    "how-to/dp-sgd.md": "per example gradients",
    "how-to/keep-best.md": "early stopping",
    "how-to/other-models.md": "flax nnx",
    "how-to/muon.md": "muon",
    "how-to/why-compile.md": "recompilation",
    "how-to/populations.md": "ensemble",
    "how-to/one-vector.md": "flatten parameters to vector",
    "how-to/prune.md": "pruning",
    "how-to/two-losses.md": "GAN generator discriminator; SAC; soft actor-critic; temperature",
}


@pytest.mark.parametrize("name", SEARCHES)
def test_a_search_finds_the_page_among_the_first_three(name):
    for query in SEARCHES[name].split("; "):
        assert name in search.ranked(query)[:3], query


def test_no_how_to_is_too_long_to_read():
    assert {
        name for name, page in PAGES.items() if name.startswith("how-to/") and len(page.read_text().split()) > 1500
    } == set()
