"""The checks of annotations that all tests run under."""

import importlib
import sys

import beartype.roar
import jax.numpy as jnp
import jaxtyping
import pytest

from . import type_checks

CODE = """
import dataclasses
from jaxtyping import Array, Float

def whole(x: "int | Later") -> str:
    def inner(y: int) -> str:
        return y
    return inner(x) if x != 3 else "three"

def square(x: Float[Array, "n n"]) -> int:
    return len(x)

class Later:
    def name(self, x: int) -> str:
        return str(x)

@dataclasses.dataclass
class Fields:
    count: int
    square: Float[Array, "n n"]
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "annotated.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "annotated", raising=False)
    with type_checks.install("annotated"):
        return importlib.import_module("annotated")


def test_arguments_and_results_are_checked_in_functions_within_functions_too(module):
    wrong = beartype.roar.BeartypeCallHintViolation
    assert module.whole(3) == "three"
    assert module.Later().name(2) == "2"
    with pytest.raises(wrong, match=r"annotated\.whole\(\) parameter x='a'"):
        module.whole("a")
    with pytest.raises(wrong, match=r"inner\(\) return 2 violates"):
        module.whole(2)
    with pytest.raises(wrong, match=r"name\(\) parameter x='a'"):
        module.Later().name("a")


def test_an_axis_of_one_name_has_one_length_and_fields_are_checked(module):
    assert module.square(jnp.ones((2, 2))) == module.Fields(2, jnp.ones((2, 2))).count
    with pytest.raises(jaxtyping.TypeCheckError, match="Float"):
        module.square(jnp.ones((2, 3)))
    for wrong in (("a", jnp.ones((2, 2))), (1, jnp.ones((2, 3)))):
        with pytest.raises(jaxtyping.TypeCheckError, match="Fields"):
            module.Fields(*wrong)


def test_they_can_be_switched_off(module, without_type_checks):
    assert module.whole(2) == 2
    assert module.square(jnp.ones((2, 3))) == 2
