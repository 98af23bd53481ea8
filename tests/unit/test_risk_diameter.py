"""head_diameter against brute force over heads of all shapes; what it looks at, what it keeps in memory, what it refuses.

Tolerance of a value: both sides take a norm of d float64 differences, each within (d/2 + 2) u relative, and the search may keep a pair that is
8 (d + 8) u shorter (module docstring of prism_ray.risk.diameter), together less than 10 (d + 8) u, u = 2^-53.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from prism_ray.core.errors import ConfigError, FormatError
from prism_ray.risk import diameter
from prism_ray.risk.diameter import CHUNK, Diameter, all_pairs_diameter, head_diameter, largest_row_norm

U = 2.0**-53


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def brute_force(weight: torch.Tensor) -> torch.Tensor:
    """All distances [V, V] by differences in float64."""
    rows = weight.to(torch.float64)
    return torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")


def tolerance(weight: torch.Tensor) -> float:
    return 10 * (weight.shape[1] + 8) * U


def require_right(found: Diameter, weight: torch.Tensor) -> None:
    distances = brute_force(weight)
    rows = weight.shape[0]
    assert found.value == pytest.approx(float(distances.max()), rel=tolerance(weight), abs=0)
    assert 0 <= found.first <= found.second < rows and (found.first < found.second or rows == 1 or found.value == 0)
    assert float(distances[found.first, found.second]) == pytest.approx(found.value, rel=tolerance(weight), abs=0)
    assert found.pairs_total == rows * (rows - 1) // 2 and 0 <= found.pairs_checked <= found.pairs_total


def outliers(count: int = 5) -> torch.Tensor:
    weight = randn(400, 24, seed=1)
    weight[7 : 7 + 9 * count : 9] *= 4
    return weight


HEADS = {
    "gaussian": randn(300, 16),
    "gaussian d=1": randn(200, 1),
    "d=2": randn(150, 2),
    "two rows": randn(2, 5),
    "three rows": randn(3, 5),
    "wide": randn(20, 300),
    "outliers": outliers(),
    "one outlier": outliers(1),
    "clusters": randn(12, 20, seed=2)[torch.arange(360) % 12] + 0.05 * randn(360, 20, seed=3),
    # The mean lies in the large cluster, so every pair over both clusters survives the radii.
    "far cluster": 0.1 * randn(300, 20, seed=4) + 9 * (torch.arange(300) < 40).double()[:, None],
    "sphere": torch.nn.functional.normalize(randn(300, 20, seed=5), dim=1),
    "circle": torch.stack([torch.linspace(0, 6, 250, dtype=torch.float64).sin(), torch.linspace(0, 6, 250, dtype=torch.float64).cos()], 1),
    "simplex": torch.eye(60, dtype=torch.float64),
    "duplicates": outliers()[torch.arange(400) % 90],
    "two values": torch.tensor([[1.0, 2.0], [-3.0, 0.5]], dtype=torch.float64)[torch.arange(80) % 2],
    "far from 0": randn(200, 16, seed=6) + 1e6,
    "tiny": 1e-30 * randn(100, 8),
    "large": 1e30 * randn(100, 8),
    "decades": randn(200, 8) * 10 ** (-6 * torch.rand(200, 1, generator=torch.Generator().manual_seed(7), dtype=torch.float64)),
    "zeros among": torch.cat([torch.zeros(50, 6, dtype=torch.float64), randn(50, 6)]),
}


IN_HALF = [name for name, weight in HEADS.items() if bool(weight.half().isfinite().all())]
CASES = [(name, dtype) for dtype in (torch.float64, torch.float32, torch.bfloat16) for name in HEADS] + [
    (n, torch.float16) for n in IN_HALF
]


@pytest.mark.parametrize(("name", "dtype"), CASES, ids=lambda case: str(case).removeprefix("torch."))
def test_equals_brute_force(name, dtype):
    weight = HEADS[name].to(dtype)
    before = weight.clone()
    require_right(head_diameter(weight), weight)
    assert torch.equal(weight, before)


@pytest.mark.parametrize("name", HEADS)
def test_the_block_size_changes_nothing(name):
    weight = HEADS[name][:40]
    whole = head_diameter(weight)
    for chunk in (1, 7, 10_000):
        found = head_diameter(weight, chunk=chunk)
        require_right(found, weight)
        assert found.value == pytest.approx(whole.value, rel=tolerance(weight), abs=0)
        if name in ("gaussian", "outliers", "one outlier", "clusters", "sphere", "decades"):  # heads whose longest pair is the only one
            assert (found.first, found.second) == (whole.first, whole.second)


def test_two_runs_give_the_same_bits():
    for weight in HEADS.values():
        assert head_diameter(weight, chunk=32) == head_diameter(weight, chunk=32)


@settings(max_examples=100, deadline=None)
@given(
    st.integers(1, 6).flatmap(
        lambda width: st.lists(
            # Small integers and halves make ties, duplicates and collinear rows; the rest are float32 of any size.
            st.lists(
                st.integers(-3, 3).map(float) | st.sampled_from([0.5, 1e-20, 1e20]) | st.floats(-1e3, 1e3, width=32),
                min_size=width,
                max_size=width,
            ),
            min_size=1,
            max_size=25,
        )
    ),
    st.sampled_from([1, 2, 5, CHUNK]),
    st.sampled_from([torch.float32, torch.float64]),
)
def test_any_head(rows, chunk, dtype):
    weight = torch.tensor(rows, dtype=dtype)
    require_right(head_diameter(weight, chunk=chunk), weight)


@pytest.mark.parametrize("gap", [1e-3, 1e-6, 1e-9, 1e-12])
@pytest.mark.parametrize("chunk", [1, 8, CHUNK])
def test_the_longer_of_two_nearly_equal_pairs_is_found(gap, chunk):
    """Around a mean of 0, 1.2 e_0 has the largest radius and -0.8 e_0 is farthest from it: the sweeps stay at L = 2 (rows 0, 1). Rows 5, 6 at +-(1 + gap) e_3
    are 2 (1 + gap) apart, which is also r_5 + r_6: an exclusion too eager by `gap` would lose them."""
    weight = torch.zeros(8, 12, dtype=torch.float64)
    weight[0, 0], weight[1, 0], weight[2, 0] = 1.2, -0.8, -0.4
    weight[5, 3], weight[6, 3] = 1 + gap, -(1 + gap)
    others = 0.1 * randn(50, 12)
    weight = torch.cat([weight, others, -others])
    assert diameter._sweep(weight, 0, chunk)[:2] == (2.0, (0, 1))
    found = head_diameter(weight, chunk=chunk)
    assert (found.first, found.second) == (5, 6)
    assert found.value == pytest.approx(2 * (1 + gap), rel=tolerance(weight), abs=0)


def test_a_pair_at_the_very_threshold_is_not_excluded():
    """On a line the triangle inequality is an equality for the longest pair: whatever rounding does to r_i + r_j, it must be looked at or kept."""
    for seed in range(40):
        weight = randn(30, 1, seed=seed) * randn(1, 7, seed=seed + 100) + randn(1, 7, seed=seed + 200)
        require_right(head_diameter(weight, chunk=4), weight)


@pytest.mark.parametrize("name", HEADS)
def test_the_search_does_not_rely_on_where_the_sweeps_end(name, monkeypatch):
    """One sweep only: L starts short of the diameter in most of these heads and must rise while blocks are looked at."""
    monkeypatch.setattr(diameter, "MOST_SWEEPS", 1)
    found = head_diameter(HEADS[name], chunk=16)
    assert found.sweeps == 1
    require_right(found, HEADS[name])


def test_sweeps_alone_would_miss_the_longest_pair():
    """Concentrated radii in few dimensions: the sweeps end at a pair that is not the longest, or the tests here show nothing of the search."""
    missed = 0
    for seed in range(20):
        weight = torch.nn.functional.normalize(randn(60, 4, seed=seed), dim=1)
        centre = weight.mean(0)
        start = int(torch.linalg.vector_norm(weight - centre, dim=1).argmax())
        missed += diameter._sweep(weight, start, 16)[0] < head_diameter(weight).value * (1 - 1e-3)
        require_right(head_diameter(weight, chunk=16), weight)
    assert missed >= 5


def test_degenerate_heads():
    one = head_diameter(torch.tensor([[3.0, 4.0]]))
    assert (one.value, one.first, one.second, one.pairs_total) == (0.0, 0, 0, 0)
    for value in (0.0, 1.0, 0.1, 1e-30):
        same = head_diameter(torch.full((3000, 7), value, dtype=torch.float64))
        assert same.value == 0.0 and same.pairs_checked == 0 and same.pairs_total == 3000 * 2999 // 2
    assert head_diameter(torch.tensor([[0.0], [-2.0], [5.0]])).value == 7.0


def test_few_pairs_are_looked_at_where_few_rows_lie_far_out():
    weight = randn(3000, 32, seed=9)
    weight[::300] *= 5
    found = head_diameter(weight, chunk=64)
    require_right(found, weight)
    # 10 far rows at about 28 from the mean, all others below 9: only far rows can pair up to L, about 40.
    assert found.pairs_checked <= 45 and found.sweeps < 8
    # Rows on a sphere are the case it cannot help: everything is looked at, once.
    sphere = torch.nn.functional.normalize(weight[:500], dim=1)
    found = head_diameter(sphere, chunk=64)
    assert found.pairs_checked > 0.9 * found.pairs_total
    require_right(found, sphere)


def test_a_parameter_needs_no_gradient_and_a_view_is_fine():
    weight = outliers().float()
    assert head_diameter(torch.nn.Parameter(weight)) == head_diameter(weight)
    assert head_diameter(weight.T.contiguous().T) == head_diameter(weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):  # reduced-precision products must not reach the search
        assert head_diameter(weight) == head_diameter(weight)
        require_right(head_diameter(weight), weight)


# --- memory ------------------------------------------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """The largest number of bytes of any tensor made under it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            # A view of the weight takes no memory of its own.
            if isinstance(tensor, torch.Tensor) and not tensor._is_view():
                self.largest = max(self.largest, tensor.numel() * tensor.element_size())
        return out


@pytest.mark.parametrize(("name", "chunk"), [("outliers", 8), ("sphere", 8), ("sphere", 30)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_no_tensor_exceeds_the_stated_bound(name, chunk, dtype):
    weight = HEADS[name].to(dtype)
    rows, hidden = weight.shape
    with LargestTensor() as seen:
        head_diameter(weight, chunk=chunk)
    bound = 8 * max(rows, hidden, chunk * hidden, chunk * chunk)
    assert 0 < seen.largest <= bound < 8 * rows * hidden
    with LargestTensor() as seen:
        largest_row_norm(weight, chunk=chunk)
    assert 0 < seen.largest <= bound


# --- the other two functions -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [1, 7, CHUNK])
def test_largest_row_norm(chunk):
    weight = outliers()
    value, row = largest_row_norm(weight, chunk=chunk)
    norms = torch.linalg.vector_norm(weight, dim=1)
    assert row == int(norms.argmax()) and value == pytest.approx(float(norms.max()), rel=tolerance(weight), abs=0)
    assert largest_row_norm(torch.tensor([[3.0, 4.0], [-4.0, 3.0], [0.0, 1.0]])) == (5.0, 0)
    assert largest_row_norm(torch.zeros(3, 2)) == (0.0, 0)


@pytest.mark.parametrize("name", ["gaussian", "outliers", "sphere", "far cluster", "two rows", "far from 0"])
def test_all_pairs_agree(name):
    """float32 products: a pair within 4 d 2^-24 of the longest may be taken for it."""
    weight = HEADS[name].float()
    found = all_pairs_diameter(weight, 50)
    assert found.value == pytest.approx(head_diameter(weight).value, rel=4 * weight.shape[1] * 2.0**-24, abs=0)
    assert found.pairs_checked == found.pairs_total == head_diameter(weight).pairs_total
    assert float(brute_force(weight)[found.first, found.second]) == pytest.approx(found.value, rel=tolerance(weight), abs=0)


@pytest.mark.parametrize("function", [head_diameter, largest_row_norm, all_pairs_diameter])
def test_what_is_refused(function):
    for bad in (math.nan, math.inf, -math.inf):
        for row in (0, 3, 39):
            weight = outliers()[:40].float()
            weight[row, 2] = bad
            with pytest.raises(FormatError, match=f"row {row} of the head") as raised:
                function(weight, chunk=7)
            assert "NaN" in str(raised.value) and "\n" not in str(raised.value)
    for weight in (torch.zeros(0, 4), torch.zeros(4, 0), torch.zeros(4), torch.zeros(1, 2, 3)):
        with pytest.raises(FormatError, match="has shape"):
            function(weight, chunk=7)
    for dtype in (torch.int64, torch.uint8, torch.complex64, torch.float8_e4m3fn):
        with pytest.raises(FormatError, match="convert it"):
            function(torch.zeros(4, 4).to(dtype), chunk=7)
    with pytest.raises(ConfigError, match="chunk"):
        function(torch.zeros(4, 4), chunk=0)


def test_values_too_large_to_square_are_refused_by_row():
    weight = randn(20, 4)
    weight[11] *= 1e200
    with pytest.raises(FormatError, match="row 11 of the head"):
        largest_row_norm(weight)
    with pytest.raises(FormatError, match="row 11 of the head"):
        head_diameter(weight)
    weight = torch.full((20, 4), 1e308, dtype=torch.float64)
    with pytest.raises(FormatError, match="too large to square"):
        head_diameter(weight)
