"""The examples run, and reach what they promise."""

import contextlib
import importlib.util
import io
import itertools
import subprocess
import sys
from pathlib import Path

import chex
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import treeparams as tp

from .zoo import enable_x64

datasets = pytest.importorskip("sklearn.datasets", reason="pip install 'treeparams[examples]'")
pytest.importorskip("tqdm", reason="pip install 'treeparams[examples]'")
pytest.importorskip("matplotlib", reason="pip install 'treeparams[examples]'")

ROOT = Path(__file__).parents[1]
FORMS = {"tree": [], "vector": ["--flat"]}


def load(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def script(name, *argv):
    command = [sys.executable, f"examples/{name}.py", *argv]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=ROOT)


# -- digits ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def digits():
    module = load("digits")
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
    assert tp.layout(start).ties == {"encoder.weight": ("decoder.weight",)}
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
    finished = script("digits", "--epochs", "5")
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("  ok  ") == 5
    assert "5/5" in finished.stderr
    assert "loss=" in finished.stderr


# -- finetune --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def finetune():
    return load("finetune")


@pytest.fixture(scope="module")
def finetuned(finetune, tmp_path_factory):
    """The stages of a whole run, the printed text, and the plot."""
    plot = tmp_path_factory.mktemp("finetune") / "norms.png"
    # Optax's Adam raises a float to an integer power, which strict promotion refuses.
    with contextlib.redirect_stdout(io.StringIO()) as printed, jax.numpy_dtype_promotion("standard"):
        outcomes = finetune.main(["--epochs", "6", "--plot", str(plot)])
    return outcomes, printed.getvalue(), plot


HEAD = {"head.weight", "head.bias"}
BLOCK = {f"blocks.2.{part}.{name}" for part in ("norm", "convolution") for name in ("weight", "bias")}


def test_stages_train_what_they_say_and_nothing_else(finetuned):
    models = [finetuned[0][0].before.model, *(outcome.after.model for outcome in finetuned[0])]
    leaves = [arrays_by_path(model) for model in models]
    changed = [
        {path for path in before if np.asarray(before[path]).tobytes() != np.asarray(after[path]).tobytes()}
        for before, after in itertools.pairwise(leaves)
    ]
    rest = set(leaves[0]) - {"normalise.mean", "normalise.scale"}
    assert changed == [HEAD, BLOCK, rest, rest]
    chex.assert_trees_all_equal(finetuned[0][-1].after.ema.average.normalise, models[0].normalise)


def test_stages_are_one_run_after_another_with_the_rates_of_their_layers(finetuned, finetune):
    for before, after in itertools.pairwise(finetuned[0]):
        chex.assert_trees_all_equal(after.before.model, before.after.model)
        chex.assert_trees_all_equal(after.before.ema, before.after.ema)  # the average goes on
    for outcome in finetuned[0]:
        for groups in groups_of(outcome.after.state):
            states = [groups.inner_states[layer].inner_state for layer in finetune.LAYERS]
            rates = [float(each.hyperparams["learning_rate"]) for each in states]
            np.testing.assert_allclose(rates, [outcome.stage.factor * 4e-3 * 0.6**i for i in range(5)], rtol=1e-6)
    assert list(finetune.RATES) == ["head", "blocks.2", "blocks.1", "blocks.0", "stem"]


def groups_of(state):
    return [groups for _, groups in (*state.runs, *state.held)]


def test_the_head_is_held_while_it_rests_and_then_goes_on(finetuned):
    first, second, third, last = (outcome.after.state for outcome in finetuned[0])
    assert [len(state.held) for state in (first, second, third, last)] == [0, 1, 0, 0]
    chex.assert_trees_all_equal(second.held, first.runs)
    steps = [len(outcome.steps.loss) for outcome in finetuned[0]]
    assert steps == 4 * [6 * (448 // 32)]
    adam = {  # the count of Adam itself, of each leaf that it trains
        path: int(part.inner_state.inner_state[0].count)
        for groups in groups_of(last)
        for part in groups.inner_states.values()
        for path in arrays_by_path(part.inner_state.inner_state[0].mu)
    }
    assert adam == {path: (3 if path in HEAD | BLOCK else 2) * steps[0] for path in last.layout.paths}


def test_it_prints_the_plan_the_stages_and_what_was_checked(finetuned):
    printed = finetuned[1]
    assert "normalise.mean               8,8      float32  frozen" in printed
    assert "blocks.2.norm.weight         8        float32  blocks.2" in printed
    assert "normalise.mean               8,8      float32  frozen" in printed.split("after all stages")[1]
    assert "blocks.0.norm.weight         8        float32  blocks.0  2          168" in printed
    assert "head.bias                    5        float32  head      1          252" in printed
    lines = {line[0]: line for line in printed.splitlines() if line[:2] in ("1 ", "2 ", "3 ", "4 ")}
    assert "  head         2 of 18       165     84 " in lines["1"]
    assert "  blocks.2     4 of 18       600     84       0%       1  " in lines["2"]
    assert "  all layers  16 of 18     2,045     84 " in lines["3"]
    assert "  all layers  16 of 18     2,045     84 " in lines["4"]
    assert printed.count("  ok  ") == 9
    assert "FAILED" not in printed


def test_the_plot_is_a_picture_of_every_step(finetuned, finetune):
    assert finetuned[2].read_bytes().startswith(b"\x89PNG")
    top, middle, bottom = finetune.figure(finetuned[0]).axes
    norms = [line.get_ydata() for line in middle.lines if len(line.get_xdata()) == 84]
    np.testing.assert_array_equal(norms[0], finetuned[0][0].steps.norm)
    assert [axes.get_ylabel() for axes in (top, middle, bottom)] == ["loss", "norm of the gradient", "steps clipped"]
    assert [text.get_text().split("\n")[0] for text in top.texts] == [
        "1 the head",
        "2 the last block",
        "3 everything",
        "4 everything, slower",
    ]


def test_the_checks_of_stages_can_fail(finetuned, finetune):
    first, second, third, last = finetuned[0]
    other = lambda tree: jax.tree.map(lambda x: x + jnp.ones((), x.dtype), tree)
    steps = last.steps._replace(norm=jnp.full_like(last.steps.norm, 2.0))
    bad = [
        first._replace(after=first.after._replace(model=first.before.model), scores=(1.0, 1.0)),  # trained nothing
        second._replace(after=other(second.after)),  # trained everything
        third._replace(traces=0),
        last._replace(after=other(last.after), steps=steps, scores=(0.9, 0.9)),
    ]
    checks = {**finetune.facts(bad), **finetune.scored(bad)}
    assert len(checks) == 9
    assert not any(checks.values())


def test_a_failed_check_exits_with_an_error(finetune, monkeypatch, capsys):
    monkeypatch.setattr(finetune, "run", lambda epochs, seed, plot: ([], {"it holds": True, "it does not": False}))
    with pytest.raises(SystemExit) as stopped:
        finetune.main([])
    assert stopped.value.code == 1
    assert capsys.readouterr().out == "\nChecked:\n  ok  it holds\n  FAILED  it does not\n"


def test_a_plot_without_a_directory_is_refused_before_the_training():
    finished = script("finetune", "--plot", "no/such/directory/norms.png")
    assert finished.returncode == 2
    assert "there is no directory no/such/directory for the plot" in finished.stderr


# -- lbfgs -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def double():
    """What the example sets, taken back after the tests of it; and standard promotion, for L-BFGS of Optax."""
    with jax.numpy_dtype_promotion("standard"):
        yield
    jax.config.update("jax_enable_x64", False)


@pytest.fixture(scope="module")
def lbfgs():
    return load("lbfgs")


@pytest.fixture(scope="module")
def minima(lbfgs, double):
    """Where each method arrived, and the printed text."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        found = lbfgs.main([])
    return found, printed.getvalue()


def test_all_methods_find_the_minimum_that_newton_finds(minima):
    measured, benign = datasets.load_breast_cancer(return_X_y=True)
    standard = ((measured - measured.mean(0)) / measured.std(0)).reshape(-1, 3, 10)
    # Mean and worst value are weighed alike; then the bias, and the weights of the errors.
    columns = np.hstack([standard[:, 0] + standard[:, 2], np.ones((569, 1)), standard[:, 1]])
    vector = np.zeros(21)
    for _ in range(20):
        chance = 1 / (1 + np.exp(-columns @ vector))
        gradient = columns.T @ (chance - benign) / 569 + 1e-3 * vector
        hessian = (columns.T * chance * (1 - chance)) @ columns / 569 + 1e-3 * np.eye(21)
        vector -= np.linalg.solve(hessian, gradient)
    assert np.linalg.norm(gradient) < 1e-14
    assert len(minima[0]) == 3
    for found in minima[0].values():
        np.testing.assert_allclose(tp.ravel(found.model)[0], vector, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(found.model.worst.weight, found.model.mean.weight)
        np.testing.assert_allclose(found.model.standardise.centre.reshape(-1), measured.mean(0), rtol=1e-12)
        assert found.iterations < found.evaluations


def test_it_prints_the_model_the_methods_and_what_was_checked(minima):
    printed = minima[1]
    assert "mean.weight         1,10   float64       0    10  worst.weight" in printed
    assert "3 slots, 21 elements" in printed
    for name in ("optim.flat(optax.lbfgs())", "optim.trainable(optax.lbfgs())", "scipy, L-BFGS-B over tp.ravel"):
        assert f"\n{name} " in printed
    assert printed.count("  ok  ") == 5
    assert "FAILED" not in printed


def test_the_checks_of_minima_can_fail(minima, lbfgs):
    data = lbfgs.load()
    found = dict(minima[0])
    name, some = found.popitem()
    start = lbfgs.Classifier(data.measured + 1, key=jax.random.key(0))
    found[name] = some._replace(model=start)
    checks = lbfgs.facts(some.model, found, {name: lbfgs.measured(each.model, data) for name, each in found.items()})
    assert len(checks) == 5
    assert not any(checks.values())


def test_too_few_iterations_exit_with_an_error_as_a_script():
    finished = script("lbfgs", "--most", "3")
    assert finished.returncode == 1
    assert "FAILED  all reach a gradient of norm 1e-08" in finished.stdout
    assert finished.stdout.count("  ok  ") >= 2
    assert "Traceback" not in finished.stderr
    assert "3/3" in finished.stderr


# -- pinn and hamiltonian --------------------------------------------------------------------------------------------


def quick(name, monkeypatch, argv=(), **constants):
    """A module with other constants, and what it prints where too little is done for its checks."""
    module = load(name)
    for constant, value in constants.items():
        monkeypatch.setattr(module, constant, value)
    with contextlib.redirect_stdout(io.StringIO()) as printed, pytest.raises(SystemExit) as stopped:
        module.main(argv)
    assert stopped.value.code == 1
    return module, printed.getvalue()


def test_what_is_called_exact_solves_the_equation(double):
    jax.config.update("jax_enable_x64", True)
    pinn = load("pinn")
    points = pinn.grid(5, border=True)
    residuals = jax.jit(lambda points: pinn.residuals(pinn.exact, points))
    np.testing.assert_allclose(residuals(points), 0, atol=1e-12)
    border = np.any((np.asarray(points) % 1) == 0, axis=1)
    assert border.sum() == 16
    net = pinn.Solution(key=jax.random.key(0))
    np.testing.assert_array_equal(jax.vmap(net)(points)[border], 0)
    assert pinn.error(net) > 0.5
    loss = eqx.filter_jit(pinn.loss)
    numeric = (loss(eqx.tree_at(bias, net, bias(net) + 1e-6), points) - loss(net, points)) / 1e-6
    np.testing.assert_allclose(bias(eqx.filter_jit(tp.grad(pinn.loss))(net, points))[0], numeric, rtol=1e-3)


def bias(net):
    return net.mlp.layers[-1].bias


def test_too_few_steps_of_newton_exit_with_an_error(double, monkeypatch, tmp_path):
    argv = ["--newton", "2", "--plot", str(tmp_path / "plot.png")]
    _, printed = quick("pinn", monkeypatch, argv, ADAM=30, MORE=30, PRODUCTS=5)
    assert "frequencies          16,2   float64        32   256 B  frozen" in printed
    for line in ("Adam, 30 steps", "Newton, 2", "  FAILED  Newton's", "  ok  no step of the two raised the loss"):
        assert line in printed
    assert printed.count("  ok  ") + printed.count("  FAILED  ") == 5
    assert (tmp_path / "plot.png").stat().st_size > 10_000


def test_even_an_untrained_energy_is_constant_along_its_motion(monkeypatch, tmp_path):
    argv = ["--plot", str(tmp_path / "plot.png")]
    module, printed = quick("hamiltonian", monkeypatch, argv, STEPS=3, TIME=5.0)
    assert "  ok  the learned energy is constant along its motion to 1e-4" in printed
    assert "  FAILED  the pendulum's energy then changes by less than 4 %" in printed
    assert printed.count("  ok  ") + printed.count("  FAILED  ") == 4
    assert (tmp_path / "plot.png").stat().st_size > 10_000
    rates = module.hamilton(lambda _, state: module.energy(state), None, jnp.array([0.5, 1.5]))
    np.testing.assert_allclose(rates, [1.5, -np.sin(0.5)], rtol=1e-6)


@pytest.mark.parametrize("name", ["pinn", "hamiltonian"])
def test_a_picture_needs_a_directory_and_its_package(name, monkeypatch, capsys):
    module = load(name)
    with pytest.raises(SystemExit) as stopped:
        module.main(["--plot", "no/such/directory/picture.png"])
    assert stopped.value.code == 2
    assert "there is no directory no/such/directory for the plot" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ModuleNotFoundError, match=r"--plot needs matplotlib.figure: pip install 'treeparams\[plot\]'"):
        module.draw({}, Path("picture.png"))


# -- imputing --------------------------------------------------------------------------------------------------------


@pytest.fixture
def imputing():
    with enable_x64(False):  # the examples above turn it on for the module
        yield load("imputing")


@pytest.fixture(scope="module")
def imputed():
    """How the nets of four seeds end, and the printed text."""
    # Optax's Adam raises a float to an integer power, which strict promotion refuses.
    with contextlib.redirect_stdout(io.StringIO()) as printed, jax.numpy_dtype_promotion("standard"), enable_x64(False):
        return load("imputing").main(["--seeds", "4"]), printed.getvalue()


def test_learned_values_beat_the_mean(imputed):
    outcomes, printed = imputed
    assert len(outcomes) == 7
    assert "branches.weight.psi     3,10     float32     480    30" in printed
    assert printed.count(" 4 of 4 seeds") >= 3
    assert printed.count("  ok  ") == 6
    assert "FAILED" not in printed


def test_what_is_lost(imputing):
    measured = datasets.load_breast_cancer().data.reshape(-1, 3, 10)
    standard = (measured - measured.mean(0)) / measured.std(0)
    for how, least, most in ((imputing.RANGE, 0.5, 1), (imputing.NOT_TAKEN, 0.3, 1), (imputing.RANDOM, -0.05, 0.05)):
        gone = imputing.lost(measured, how, np.random.default_rng(0))
        assert 0.32 < gone.mean() < 0.36
        assert least < standard[gone].mean() < most
        whole = np.all(gone, axis=2) | ~np.any(gone, axis=2)
        assert whole.all() == (how == imputing.NOT_TAKEN)


def test_a_net_is_scored_on_held_out_tumours_with_what_it_learned(imputing, imputed):
    data = imputing.Data(*datasets.load_breast_cancer(return_X_y=True))
    data = data._replace(measured=data.measured.reshape(-1, 3, 10))
    for how, kind in ((imputing.RANGE, imputing.PRE), (imputing.NOT_TAKEN, imputing.POST)):
        outcome = imputed[0][how, kind]
        net = jax.tree.map(lambda leaf: np.asarray(leaf)[3], outcome.net)
        x, benign = map(np.asarray, imputing.draw(data, how, 3).test)
        assert len(x) == 169
        weight = net.branches.weight
        if kind == imputing.PRE:
            x = np.where(np.isnan(x), weight.psi, x)
        branches = np.einsum("nbi,boi->nbo", x, weight.matrix)
        if kind == imputing.POST:
            branches = np.where(np.isnan(branches), weight.psi, branches)
        scores = np.maximum((branches + net.branches.bias).sum(1), 0) @ net.scores.weight.T + net.scores.bias
        chance = np.exp(scores) / np.exp(scores).sum(1, keepdims=True)
        np.testing.assert_allclose(outcome.log_loss[3], -np.log(chance[np.arange(169), benign]).mean(), rtol=1e-4)
        np.testing.assert_allclose(outcome.accuracy[3], np.mean(scores.argmax(1) == benign), rtol=1e-6)


def test_the_checks_of_imputing_can_fail(imputing, imputed):
    bad = {
        key: outcome._replace(
            net=jax.tree.map(jnp.zeros_like, outcome.net), loss=outcome.loss + i, log_loss=outcome.log_loss * jnp.nan
        )
        for i, (key, outcome) in enumerate(imputed[0].items())
    }
    checks = imputing.facts(bad)
    assert len(checks) == 6
    assert not any(checks.values())


def test_a_spread_needs_two_seeds(imputing, capsys):
    with pytest.raises(SystemExit) as stopped:
        imputing.main(["--seeds", "1"])
    assert stopped.value.code == 2
    assert "a spread needs at least 2 seeds, got 1" in capsys.readouterr().err


# -- All -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "missing"),
    [
        ("digits", "sklearn.datasets"),
        ("digits", "tqdm"),
        ("finetune", "matplotlib.figure"),
        ("finetune", "sklearn.datasets"),
        ("finetune", "tqdm"),
        ("imputing", "sklearn.datasets"),
        ("lbfgs", "scipy.optimize"),
        ("lbfgs", "sklearn.datasets"),
        ("lbfgs", "tqdm"),
    ],
)
def test_a_missing_package_names_the_extra(monkeypatch, name, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ModuleNotFoundError, match=rf"needs {missing}: pip install 'treeparams\[examples\]'"):
        load(name)
