"""prism_ray.hessian.windows: the table of its docstring row by row, and the row choice of equal-row over chunks."""

from __future__ import annotations

from typing import get_args

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from prism_ray.core.errors import ConfigError
from prism_ray.hessian.state import GramState
from prism_ray.hessian.windows import Window, WindowName

NAMES = get_args(WindowName)
TABLE = {
    # name: (w_0, w_t between, w_(T-1))
    "first": (1.0, 0.0, 0.0),
    "all": (1.0, 1.0, 1.0),
    "skip-first": (0.0, 1.0, 1.0),
    "last": (0.0, 0.0, 1.0),
    "alpha": (0.15, 1.0, 1.0),
    "equal-row": (1.0, 1.0, 1.0),
}


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("steps", [2, 3, 8])
def test_the_table(name, steps):
    first, between, last = TABLE[name]
    assert [Window(name=name).weight(step, steps) for step in range(steps)] == [first, *[between] * (steps - 2), last]


def test_alpha_is_the_weight_of_the_first_step():
    assert [Window(name="alpha", alpha=0.4).weight(step, 3) for step in range(3)] == [0.4, 1.0, 1.0]
    assert Window().name == "all"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "skip-first"])
def test_one_step_is_the_plain_hessian_bit_for_bit(name):
    x = torch.randn(40, 16, generator=torch.Generator().manual_seed(0))
    window = Window(name=name)
    kept = window.rows(x, 0, 1, 13)
    assert kept is x
    state = GramState(width=16).add(kept, weight=window.weight(0, 1))
    assert torch.equal(state.matrix(), GramState(width=16).add(x).matrix())


def test_skip_first_of_one_step_is_refused():
    with pytest.raises(ConfigError, match="skip-first"):
        Window(name="skip-first").weight(0, 1)


@pytest.mark.parametrize(("name", "alpha"), [("middle", 0.1), ("alpha", -0.1)])
def test_unknown_windows_and_negative_weights_are_refused(name, alpha):
    with pytest.raises(ConfigError):
        Window.load({"name": name, "alpha": alpha})


@pytest.mark.parametrize("name", [name for name in NAMES if name != "equal-row"])
def test_other_windows_keep_all_rows(name):
    x = torch.randn(10, 4)
    assert Window(name=name).rows(x, 1, 3, 5) is x


@given(chunks=st.lists(st.integers(0, 12), max_size=6), steps=st.integers(2, 5))
def test_equal_row_takes_row_r_at_step_r_mod_t_over_all_chunks(chunks, steps):
    window = Window(name="equal-row")
    taken: list[tuple[int, int]] = []
    offset = 0
    for count in chunks:
        numbers = torch.arange(offset, offset + count)[:, None]
        for step in range(steps):
            taken += [(int(row), step) for row in window.rows(numbers, step, steps, offset).flatten()]
        offset += count
    # Every row of the pass once, so as many in all as one step has; and at its own step.
    assert sorted(taken) == [(row, row % steps) for row in range(sum(chunks))]
