"""What is remembered of models may warn, once for each model, and never changes a number; and it has a limit."""

import json
import pathlib
import re
import subprocess
import sys
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import treeparams as tp
from treeparams._slots import accidents

from ..verbs import OTHERS, VERBS
from ..zoo import Norm, ramp

# -- Once for each model that a person would call another --------------------------------------------------------------

count = iter(range(10**6))


def tied(*shape: int, name: str = "w") -> dict[str, Any]:
    embed = ramp(*shape)
    return {"embed": embed, "head": embed, name: ramp(2)}


def lose(model: Any) -> list[str]:
    """Loses the ties of a model that was met in a trace, and in a copy outside. Returns the warnings of both."""
    tp.layout(model)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        jax.eval_shape(tp.grad(lambda model: 0.0), model)
        tp.layout(jax.tree.map(lambda leaf: leaf + 0, model))
    found = [re.match(r"'(\S+)' and '\S+' were one array", str(each.message)) for each in caught]
    return [each[1] for each in found if each]


LOSSES = (
    ({"a": tied(2, 3)}, "a"),  # in the trace, and outside
    ({"b": tied(2, 3)}, "b"),  # another name above
    ({"a": tied(4, 3)}, "a"),  # other shapes
    ({"held": {"a": tied(2, 3)}, "body": ramp(3)}, ""),  # a model that holds the first
    (tied(2, 3), ""),  # a part of the first
    ({"a": tied(2, 3, name="v")}, "a"),  # another layer beside them
    ({"a": tied(2, 3), "b": tied(2, 3)}, ""),
    ({"body": ramp(3), "nets": [tied(5)]}, "nets.0"),
    ({"body": ramp(4), "nets": [tied(5)]}, "nets.0"),  # other shapes elsewhere
)


def test_a_lost_tie_is_noticed_once_for_each_model():
    for model, node in LOSSES:
        assert lose(model) == [f"{node}.embed"] * 2 * bool(node)


def test_ties_that_a_layout_was_given_are_missed_once_for_each_model():
    def forget(model: Any, node: str) -> int:
        tp.layout(model, ties={f"{node}.y": f"{node}.x"})
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tp.partition(model), tp.ravel(model)
        return len(caught)

    model = lambda *shape: {"x": ramp(*shape), "y": ramp(*shape) + 1}
    for name, size, count in (("a", 2, 1), ("b", 2, 1), ("a", 3, 1), ("a", 2, 0)):
        assert forget({name: model(size)}, name) == count
    assert forget({"held": {"a": model(2)}, "z": ramp(1)}, "held.a") == 0


# -- A limit -----------------------------------------------------------------------------------------------------------


def test_many_kinds_leave_as_many_entries_as_there_may_be(monkeypatch):
    monkeypatch.setattr(accidents, "_MOST", 40)
    monkeypatch.setattr(accidents, "_SHAPES", 10)
    shared = ramp(2)
    for i in range(60):
        model = {f"x{i}": shared, f"y{i}": shared, f"z{i}": np.ones(2, "f")}
        tp.layout(tp.tie(tp.untie(model), f"y{i}", to=f"x{i}"), ties={f"z{i}": f"x{i}"})
        tp.layout({"x": (each := ramp(i + 1)), "y": each})  # one kind, of many shapes
    assert 30 < len(accidents._facts) <= 40
    assert max(map(len, accidents._facts.values())) <= 11


def test_what_was_met_last_is_known_when_the_first_is_forgotten(monkeypatch):
    monkeypatch.setattr(accidents, "_MOST", 40)
    tp.layout(first := tied(2, 3, name=f"v{next(count)}"))
    for i in range(50):
        tp.layout({f"k{i}": np.ones(2, "f")})
    assert tp.layout(jax.tree.map(lambda leaf: leaf + 0, first)).ties == {}  # nothing but a warning is lost
    assert lose(tied(2, 3, name=f"v{next(count)}")) == ["embed", "embed"]


# -- It never changes a number -----------------------------------------------------------------------------------------


def model_of(kind: str) -> dict[str, Any]:
    """A model of a kind of its own, with two arrays of each sort that are one."""
    shared, bias, mean, zero = ramp(2, 3), jnp.zeros(2), jnp.ones(2), jnp.array(0)
    net = {f"embed {kind}": shared, f"head {kind}": shared, "norms": [Norm(ramp(2), mean), Norm(ramp(2), mean)]}
    return {f"net {kind}": net, "steps": zero, "episodes": zero, "bias": bias, "shift": bias, "rate": 1.0}


EVERY = VERBS | OTHERS


def program(verb: str, kind: str) -> str:
    """The program of a verb in a trace, with the numbers that are constants in it: what tells all of its results."""
    made = jax.make_jaxpr(EVERY[verb])(model_of(kind))
    return re.sub(r"0x\w+", "", f"{made} {[np.asarray(each).tolist() for each in made.consts]}")


@pytest.fixture(scope="module")
def fresh():
    command, root = [sys.executable, "-m", __spec__.name], pathlib.Path(__file__).parents[2]
    printed = subprocess.run(command, capture_output=True, text=True, check=True, cwd=root).stdout
    return json.loads(printed)


@pytest.mark.filterwarnings("ignore")
def test_a_verb_in_a_trace_is_the_same_program_whatever_was_met_before(fresh: dict[str, str]):
    accidents._facts.clear()
    for verb in EVERY.values():
        verb(model_of("met"))
    assert {verb: program(verb, "met") for verb in EVERY} == fresh


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    print(json.dumps({verb: program(verb, verb) for verb in EVERY}))
