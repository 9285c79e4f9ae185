"""What type checkers are promised in typing_assertions.py holds at run time."""

import inspect

import jax
import jax.numpy as jnp
import pytest
from beartype.door import is_bearable

import treeparams as tp

from . import typing_assertions
from .blocks import blocks, module
from .test_readme import README
from .typing_assertions import NEED_NUMBERS, PARTS, loss


@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_each_value_is_of_the_type_that_the_checkers_find(part, monkeypatch):
    checked = []

    def assert_type(value, kind):
        assert is_bearable(value, kind), f"{value!r} is no {kind}"
        checked.append(value)
        return value

    monkeypatch.setattr(typing_assertions, "assert_type", assert_type)
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # as a user has it
        part() if part in NEED_NUMBERS else jax.eval_shape(part)
    assert checked


@pytest.mark.parametrize(
    "wrapped", [tp.grad(loss), tp.value_and_grad(loss), tp.accumulate(loss, pieces=2), tp.jit(loss)]
)
def test_parameters_are_kept(wrapped):
    assert inspect.signature(wrapped) == inspect.signature(loss)


def test_the_checkers_see_the_code_of_the_readme_line_by_line():
    page = README.read_text()
    lines, shown = module(page).splitlines(), page.splitlines()
    places = [i for block in blocks(page) for i in range(block.line - 1, block.line - 1 + block.code.count("\n"))]
    assert [lines[i] for i in places] == [shown[i] for i in places]
    assert len([line for line in lines[1:] if line]) == len([i for i in places if shown[i]]) > 10


def test_a_method_is_bound_to_its_instance():
    model = typing_assertions.make()
    assert isinstance(inspect.getattr_static(type(model), "decode"), type(tp.jit(loss)))
    assert type(model).decode.lower(model, jnp.ones(2)).compile()(model, jnp.ones(2)).shape == (3,)
    assert list(inspect.signature(model.encode).parameters) == ["x", "centred"]
