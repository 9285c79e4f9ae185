"""The examples run, reach what they promise, and in both forms take the same steps."""

import contextlib
import importlib.util
import io
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

import treeparams as tp

pytest.importorskip("sklearn", reason="pip install 'treeparams[examples]'")
pytest.importorskip("tqdm", reason="pip install 'treeparams[examples]'")

SCRIPT = Path(__file__).parents[1] / "examples" / "digits.py"
FORMS = {"tree": [], "vector": ["--flat"]}


def load():
    spec = importlib.util.spec_from_file_location("digits", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def digits():
    module = load()
    optimiser = module.OPTIMISER

    def update(*args):
        # Optax's Adam raises a float to an integer power, which strict promotion refuses; all else stays strict.
        with jax.numpy_dtype_promotion("standard"):
            return optimiser.update(*args)

    module.OPTIMISER = optax.GradientTransformation(optimiser.init, update)
    return module


@pytest.fixture(scope="module")
def outcomes(digits):
    """The losses and the printed text of a whole run in each form."""

    def outcome(argv):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            losses = digits.main(argv)
        return np.asarray(losses), printed.getvalue()

    return {form: outcome(argv) for form, argv in FORMS.items()}


def test_both_forms_take_the_same_steps(outcomes):
    tree, vector = outcomes["tree"][0], outcomes["vector"][0]
    assert tree.shape == (2 * 15 * (1437 // 32),)
    assert tree[0] > 2, "it starts with nothing learned"
    assert tree[-44:].mean() < 0.05, "it ends with little to learn"
    np.testing.assert_allclose(vector, tree, rtol=1e-5, atol=0)


@pytest.mark.parametrize("form", FORMS)
def test_it_prints_what_trains_and_what_was_checked(outcomes, form):
    printed = outcomes[form][1]
    one, two = printed.split("Stage two")
    assert f"trains a {form}" in one
    assert "encoder.weight     128,64  float32  frozen" in one
    assert "3 slots, 1,354 elements" in one
    assert "decoder.weight (transpose)" in two
    assert "5 slots, 9,674 elements" in two
    assert printed.count("test accuracy: model 9") == 2
    assert printed.count("  ok  ") == 5
    assert "FAILED" not in printed


@pytest.mark.parametrize("flat", [False, True])
def test_what_is_frozen_stays_and_the_tie_holds(digits, flat):
    data, _ = digits.load(seed=3)
    model = digits.Network(data[0], key=jax.random.key(3))
    start = tp.combine(*tp.partition(model))
    assert tp.ties(start) == {"encoder.weight": ("decoder.weight",)}
    before = {path: np.array(array) for path, array in arrays_by_path(start).items()}
    heads = tp.layout(start, freeze="encoder")
    changed = []
    for layout in (heads, heads.thaw("encoder")):
        ema = tp.Ema(start, decay=0.99, warmup=True)
        model, ema, _ = digits.train(start, ema, layout, data, jax.random.key(4), 1, flat)
        for each in (model, ema.average):
            np.testing.assert_array_equal(each.decoder.weight, each.encoder.weight.T)
            after = arrays_by_path(each)
            changed.append({path for path in before if not np.array_equal(before[path], after[path])})
    first = {"decoder.bias", "classifier.weight", "classifier.bias"}
    second = first | {"encoder.weight", "encoder.bias", "decoder.weight"}
    assert changed == [first, first, second, second]
    assert set(before) - second == {"normalise.mean", "normalise.scale"}


def arrays_by_path(model):
    leaves = jax.tree_util.tree_leaves_with_path(model)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def test_the_checks_can_fail(digits):
    data, _ = digits.load(seed=0)
    model = digits.Network(data[0], key=jax.random.key(0))  # its decoder is still its own
    other = digits.Network(data[0] + 1, key=jax.random.key(1))
    facts = digits.facts(model, other, model, other)
    assert len(facts) == 4
    assert not any(facts.values())


def test_a_run_too_short_to_learn_exits_with_an_error(digits, capsys):
    with pytest.raises(SystemExit) as stopped:
        digits.main(["--epochs", "1", "--seed", "0"])
    assert stopped.value.code == 1
    assert "FAILED  test accuracy is at least 95%" in capsys.readouterr().out


def test_it_runs_as_a_script():
    command = [sys.executable, str(SCRIPT), "--epochs", "5"]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=SCRIPT.parents[1])
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("  ok  ") == 5
    assert "5/5" in finished.stderr
    assert "loss=" in finished.stderr


@pytest.mark.parametrize("missing", ["sklearn.datasets", "tqdm"])
def test_a_missing_package_names_the_extra(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {missing}: pip install 'treeparams\[examples\]'"):
        load()
