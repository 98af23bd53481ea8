"""prism_ray.hessian.survey: ranks of inputs whose rank is known, overlap of spans whose angle is known, evenly spaced rows, one state a step and half."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from prism_ray.core.errors import DataError
from prism_ray.hessian.capture import NonFinite
from prism_ray.hessian.state import GramState
from prism_ray.hessian.survey import EvenRows, StepCapture, overlap, rank_gain, spectrum
from prism_ray.models.looped import looped_lm
from prism_ray.models.loops import count_calls


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def spanned(rows: int, width: int, axes: list[int], seed: int = 0) -> Tensor:
    """Rows [rows, width] that live on the given axes alone."""
    x = torch.zeros(rows, width)
    x[:, axes] = normal(rows, len(axes), seed=seed)
    return x


def state(x: Tensor, *, weight: float = 1.0) -> GramState:
    return GramState(width=x.shape[1]).add(x, weight=weight)


class TestRank:
    @pytest.mark.parametrize("rows", [12, 15, 16, 300])  # rows are kept below 32 / 2
    @pytest.mark.parametrize("rank", [1, 3, 10])
    def test_of_rows_on_known_axes(self, rows, rank):
        made = state(spanned(rows, 32, list(range(0, 2 * rank, 2))))
        assert (made.gram is None) == (rows < 16)
        # Condition of a [12, 10] normal matrix, squared, may pass 1e3: the exact rank is asked at a threshold below that and above rounding.
        found = spectrum([made], threshold=1e-6)
        assert (found.rank, found.rows, found.width, found.bound) == (rank, rows, 32, min(rows, 32))

    def test_the_threshold_is_relative_and_strict(self):
        # Squares 1, 1e-2, 1.1e-3, 0.9e-3, 0 against 1e-3; scaling all of them changes nothing.
        sizes = torch.tensor([1.0, 0.1, math.sqrt(1.1e-3), math.sqrt(0.9e-3), 0.0, 0.0, 0.0, 0.0])
        for scale in (1.0, 1e-6, 1e6):
            assert spectrum([state(torch.diag(sizes * scale))]).rank == 3
        assert spectrum([state(torch.diag(sizes))], threshold=1e-4).rank == 4
        exactly = torch.diag(torch.tensor([1.0, 0.5, 0.0, 0.0]))
        assert spectrum([state(exactly)], threshold=0.25).rank == 1

    @settings(max_examples=40, deadline=None)
    @given(rows=st.integers(1, 40), rank=st.integers(1, 20), seed=st.integers(0, 10**6))
    def test_both_forms_agree_with_singular_values(self, rows, rank, seed):
        # float64 bits of the same float32 rows: kept rows, a Gram matrix made of them, and the definition.
        x = (normal(rows, rank, seed=seed) @ normal(rank, 40, seed=seed + 1)).float()
        kept = GramState(width=40, tokens=rows, weight=float(rows), rows=((x, 1.0),))
        formed = GramState(width=40, tokens=rows, weight=float(rows), gram=x.double().T @ x.double())
        squares = torch.linalg.svdvals(x.double()).square()
        a, b = spectrum([kept], vectors=True), spectrum([formed], vectors=True)
        # Eigenvalues of a float64 product of k terms are off by at most about k 2^-52 of the largest, here 40 x 40 as room for the solver.
        tolerance = float(squares[0]) * 1600 * 2.0**-52
        for found in (a, b):
            count = min(rows, 40)
            torch.testing.assert_close(found.values[:count], squares[:count], rtol=0, atol=tolerance)
            assert bool((found.values[count:] <= tolerance).all()) and bool((found.values >= 0).all())
        near = (squares / squares[0] - 1e-3).abs() < 1e-9
        if not bool(near.any()):
            assert a.rank == b.rank == int((squares > 1e-3 * squares[0]).sum())
            same = overlap(a, b)
            # Angles between computed spans are errors over gaps; a gap of 1e-9 at the threshold still leaves 1e-3.
            assert same is not None and (same.value > 1 - 1e-3 or _gap(squares, a.rank) < 1e-6)

    def test_the_sum_of_states_is_the_spectrum_of_all_rows(self):
        x, y = spanned(40, 16, [0, 1, 2]), spanned(5, 16, [2, 3])
        together = spectrum([state(x), state(y)], threshold=1e-6)
        assert (together.rank, together.rows) == (4, 45)
        exact = torch.linalg.svdvals(torch.cat([x, y]).double()).square()
        # float32 products of 40 rows: 42 units of 2^-24 of the trace at most.
        torch.testing.assert_close(together.values, exact, rtol=0, atol=float(exact.sum()) * 42 * 2**-24)

    def test_weights_count(self):
        rows = torch.eye(8)[:2]
        heavy = GramState(width=8, tokens=2, weight=5.0, rows=((rows[:1], 4.0), (rows[1:], 1.0)))
        assert spectrum([heavy]).values.tolist() == [4.0, 1.0]

    def test_nothing_and_zeros_have_rank_0(self):
        none = spectrum([GramState(width=8)], vectors=True)
        assert (none.rank, none.effective, none.rows, none.bound) == (0, 0.0, 0, 0)
        assert none.basis is not None and none.basis.shape == (8, 0)
        zeros = spectrum([state(torch.zeros(20, 8))], vectors=True)
        assert (zeros.rank, zeros.effective) == (0, 0.0)
        assert overlap(none, zeros) is None
        assert rank_gain(zeros, none) is None

    def test_states_are_left_as_they_are(self):
        parts = [state(normal(20, 8)), state(normal(20, 8, seed=1))]
        before = [part.matrix().clone() for part in parts]
        spectrum(parts, vectors=True)
        assert all(torch.equal(part.matrix(), old) for part, old in zip(parts, before, strict=True))

    def test_bad_input(self):
        with pytest.raises(DataError, match="one width, not 2"):
            spectrum([GramState(width=8), GramState(width=16)])
        with pytest.raises(DataError, match="one width, not 0"):
            spectrum([])
        with pytest.raises(DataError, match="eigenvectors"):
            overlap(spectrum([state(normal(4, 4))]), spectrum([state(normal(4, 4))]))

    def test_the_note_stands_where_the_rows_bound_the_rank_and_only_there(self):
        assert spectrum([state(normal(7, 16))]).note == "n = 7 rows < 16 columns: the rank is at most 7"
        assert spectrum([state(normal(16, 16))]).note == ""


def _gap(squares: Tensor, rank: int) -> float:
    after = float(squares[rank]) if rank < len(squares) else 0.0
    return (float(squares[rank - 1]) - after) / float(squares[0])


def test_effective_rank():
    assert spectrum([state(2.0 * torch.eye(8))]).effective == pytest.approx(8, rel=1e-12)
    assert spectrum([state(spanned(20, 8, [3]))]).effective == pytest.approx(1, rel=1e-12)
    # Shares 3/4 and 1/4.
    two = state(torch.diag(torch.tensor([3.0**0.5, 1.0])))
    assert spectrum([two]).effective == pytest.approx(math.exp(-(0.75 * math.log(0.75) + 0.25 * math.log(0.25))), rel=1e-6)


def test_gain():
    first, second = state(spanned(30, 32, [0, 1])), state(spanned(30, 32, [1, 2, 3, 4]))
    assert rank_gain(spectrum([first, second]), spectrum([first])) == 2.5
    assert rank_gain(spectrum([first]), spectrum([first])) == 1.0


class TestOverlap:
    def test_of_known_angles(self):
        angle = 0.3
        one = torch.eye(8)[:2]
        other = torch.zeros(2, 8)
        other[0, 0], other[0, 2] = math.cos(angle), math.sin(angle)
        other[1, 3] = 1.0
        found = overlap(spectrum([state(one)], vectors=True), spectrum([state(other)], vectors=True))
        assert found is not None
        # Cosines cos(0.3) and 0; the rows are float32.
        assert found.value == pytest.approx(math.cos(angle) ** 2 / 2, abs=1e-6)
        assert (found.ranks, found.rows, found.chance) == ((2, 2), (2, 2), 0.25)

    @pytest.mark.parametrize("rows", [6, 60])
    def test_with_itself_is_1_and_with_its_complement_0(self, rows):
        one = spectrum([state(spanned(rows, 32, [0, 1, 2]))], vectors=True)
        other = spectrum([state(spanned(rows, 32, [3, 4], seed=1))], vectors=True)
        same, apart = overlap(one, one), overlap(one, other)
        assert same is not None and apart is not None
        assert same.value == pytest.approx(1, abs=1e-12)
        assert apart.value == pytest.approx(0, abs=1e-12)

    def test_a_span_inside_a_larger_one_is_covered_whole(self):
        one, other = (spectrum([state(spanned(40, 16, axes))], threshold=1e-6, vectors=True) for axes in ([1, 2], [0, 1, 2, 3, 4]))
        found = overlap(one, other)
        assert found is not None and found.value == pytest.approx(1, abs=1e-9) and found.ranks == (2, 5)

    def test_random_spans_are_at_chance(self):
        values = []
        for seed in range(20):
            found = overlap(*(spectrum([state(normal(8, 64, seed=2 * seed + half))], threshold=1e-9, vectors=True) for half in (0, 1)))
            assert found is not None and found.chance == 8 / 64
            values.append(found.value)
        mean = sum(values) / len(values)
        # A squared entry of V'W has mean 1/64 and standard deviation about sqrt(2)/64; 20 x 64 of them, divided by 8: five standard errors.
        assert abs(mean - 0.125) < 5 * math.sqrt(2) / 64 * math.sqrt(64 / 20) / 8

    def test_does_not_depend_on_the_form_or_the_scale(self):
        x, y = spanned(7, 32, [0, 1, 2]), spanned(7, 32, [1, 2, 3], seed=3)
        rows = overlap(*(spectrum([state(one)], vectors=True) for one in (x, y)))
        many = overlap(*(spectrum([state(one.repeat(5, 1) * 100)], vectors=True) for one in (x, y)))
        assert rows is not None and many is not None
        # A span is off by the float32 products' error over its smallest eigenvalue, at most 2^-24 x 37 x 1e3.
        assert many.value == pytest.approx(rows.value, abs=37 * 2**-24 * 1e3)


class TestEvenRows:
    @settings(max_examples=60, deadline=None)
    @given(limit=st.integers(1, 9), batches=st.lists(st.integers(0, 30), max_size=8))
    def test_keeps_every_stride_th_row_whatever_the_batches(self, limit, batches):
        total = sum(batches)
        stream = torch.arange(total, dtype=torch.float32)[:, None]
        kept = EvenRows(width=1, limit=limit)
        for piece in stream.split(batches) if batches else []:
            kept.add(piece)
        found = torch.cat([rows for rows, _ in kept.state.rows]).flatten().tolist() if total else []
        assert found == list(range(0, total, kept.stride))
        assert len(found) <= limit and kept.seen == total
        assert kept.stride == 1 or 2 * len(found) >= limit  # one doubling less would have been too many
        assert kept.state.tokens == len(found) == kept.state.weight

    def test_the_rows_are_copies(self):
        x = torch.ones(2, 3)
        kept = EvenRows(width=3, limit=4)
        kept.add(x)
        x.zero_()
        assert float(kept.state.rows[0][0].sum()) == 6


class Twice(nn.Module):
    """A Linear that is called three times on states that differ, and one that is called once."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.head = nn.Linear(8, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for _step in range(3):
            x = x + self.core(x)
        return self.head(x)


class TestStepCapture:
    def collected(self, **options) -> tuple[StepCapture, list[Tensor]]:
        model, inputs = Twice(), [normal(2, 5, 8, seed=seed) for seed in (1, 2)]
        masks = [torch.ones(2, 5, dtype=torch.bool), torch.ones(2, 5, dtype=torch.bool)]
        masks[0][1, 3:] = False
        seen: list[Tensor] = []
        with torch.no_grad(), StepCapture(model, ["core", "head"], steps={"core": 3}, **options) as capture:
            for half, (x, mask) in enumerate(zip(inputs, masks, strict=True)):
                capture.half = half
                with capture.batch(mask):
                    model(x)
                for _step in range(3):
                    seen.append(x[mask])
                    x = x + model.core(x)
        return capture, seen

    def test_one_state_for_each_step_and_half(self):
        capture, seen = self.collected()
        states = capture.states_of("core")
        assert sorted(states) == [(0, 0), (0, 1), (1, 0), (2, 0), (2, 1)]
        for slot, rows in (((0, 0), seen[0]), ((2, 0), seen[2]), ((0, 1), seen[3]), ((2, 1), seen[5])):
            assert states[slot].tokens == len(rows)
            # float32 sums of at most 10 rows, 12 units.
            torch.testing.assert_close(states[slot].matrix(), rows.double().T @ rows.double(), rtol=12 * 2**-24, atol=1e-4)
        assert states[1, 0].tokens == len(seen[1]) + len(seen[4]) == 18  # the middle step pools the halves
        assert sorted(capture.states_of("head")) == [(0, 0), (0, 1)]
        tallies = capture.tallies["core"]
        assert {step: tally.rows for step, tally in tallies.items()} == {0: 18, 1: 18, 2: 18}
        assert tallies[0].squares == pytest.approx(float(seen[0].square().sum() + seen[3].square().sum()), rel=1e-5)

    def test_limited_rows_and_counts_alone(self):
        capture, seen = self.collected(limits={"core": 4, "head": 0})
        state = capture.states_of("core")[0, 0]
        assert torch.equal(torch.cat([rows for rows, _ in state.rows]), seen[0][::4])  # 8 rows, at most 4 / 2
        middle = capture.states_of("core")[1, 0]
        assert torch.equal(torch.cat([rows for rows, _ in middle.rows]), torch.cat([seen[1], seen[4]])[::8])  # 18 rows, at most 4
        assert capture.tallies["core"][0].rows == 18  # counts stay whole
        assert capture.states_of("head") == {} and capture.tallies["head"][0].rows == 18

    @pytest.mark.parametrize("limits", [{}, {"core": 2}, {"core": 0}])
    def test_not_a_number_is_caught_also_in_rows_that_are_not_kept(self, limits):
        model, x = Twice(), normal(2, 5, 8)
        x[1, 3, 2] = math.nan
        mask = torch.ones(2, 5, dtype=torch.bool)
        capture = StepCapture(model, ["core"], steps={"core": 3}, limits=limits)
        with torch.no_grad(), capture, pytest.raises(NonFinite) as error, capture.batch(mask):
            model(x)
        assert error.value.where == "core" and error.value.row == 1

    def test_large_inputs_do_not_overflow(self):
        capture = StepCapture(Twice(), ["core"], steps={"core": 3})
        capture._mask = torch.ones(1, 2, dtype=torch.bool)
        capture._add("core", "core", torch.full((2, 8), 3e38), 0)
        assert capture.tallies["core"][0].squares == pytest.approx(16 * 9e76, rel=1e-6)

    def test_of_the_looped_model(self):
        model = looped_lm(0, hidden_size=32, intermediate_size=64, num_attention_heads=2, num_loops=4, max_position_embeddings=64)
        calls = count_calls(model)
        names = ["model.adapter", "model.core.0.mlp.down_proj", "model.coda.0.self_attn.q_proj"]
        ids = torch.randint(0, 200, (2, 9), generator=torch.Generator().manual_seed(0))
        capture = StepCapture(model, names, steps={name: calls[name] for name in names})
        with torch.no_grad(), capture, capture.batch(torch.ones(2, 9, dtype=torch.bool)):
            model(input_ids=ids)
        assert [sorted(capture.tallies[name]) for name in names] == [[0, 1, 2, 3], [0, 1, 2, 3], [0]]
        # Adapter, step 0: the second half of the input is the prelude's output, the same at every step; the first half is not.
        first, last = (capture.states_of("model.adapter")[step, 0].matrix() for step in (0, 3))
        torch.testing.assert_close(first[32:, 32:], last[32:, 32:])
        assert not torch.allclose(first[:32, :32], last[:32, :32], rtol=0.1)
