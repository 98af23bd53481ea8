"""prism_ray.hessian.state: when rows are kept, merging, what is shared with what, and the tree that makes any split over workers the same bytes."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_ray.calibrate.worker import _merge_node, merge
from prism_ray.core.errors import DataError
from prism_ray.hessian.state import GramState, lane_nodes, reduce_lanes, tree_size


def rows(count: int, width: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def filled(count: int, width: int, seed: int = 0) -> GramState:
    state = GramState(width=width)
    for batch in rows(count, width, seed).split(3) if count else []:
        state = state.add(batch)
    return state


def content(state: GramState) -> tuple[object, ...]:
    """Everything a state holds, as plain values and bytes."""
    gram = None if state.gram is None else state.gram.numpy().tobytes()
    absolute = None if state.absolute is None else state.absolute.numpy().tobytes()
    kept = tuple((piece.numpy().tobytes(), weight) for piece, weight in state.rows)
    return state.width, state.tokens, state.weight, dict(state.steps), kept, gram, absolute


class TestRows:
    @pytest.mark.parametrize("width", [16, 17])
    def test_rows_are_kept_until_twice_their_number_reaches_the_width(self, width):
        state = GramState(width=width)
        for count in range(1, width + 1):
            state = state.add(rows(1, width, count))
            assert (state.gram is None) == (2 * count < width), count
            assert bool(state.rows) == (2 * count < width), count
            assert state.tokens == count

    @pytest.mark.parametrize(("left", "right"), [(3, 4), (4, 4), (1, 7), (8, 1), (1, 8), (9, 9)])
    def test_a_merge_switches_at_the_same_place(self, left, right):
        merged = filled(left, 16, 1) + filled(right, 16, 2)
        assert (merged.gram is None) == (2 * (left + right) < 16)
        expected = torch.cat([rows(left, 16, 1), rows(right, 16, 2)]).double()
        # 16 products of float32 numbers below 5 an entry: 18 * 2^-24 * sum|xy| < 1e-4.
        torch.testing.assert_close(merged.matrix(), expected.T @ expected, rtol=0, atol=1e-4)

    def test_one_large_batch_is_never_kept(self):
        assert GramState(width=16).add(rows(8, 16)).rows == ()
        assert GramState(width=16).add(rows(7, 16)).gram is None

    @pytest.mark.parametrize("width", [64, 200, 512])
    def test_under_a_tenth_of_the_rows_costs_a_quarter_of_a_dense_state_or_less(self, width):
        count = width // 10
        dense = filled(width, width).nbytes
        assert dense == 8 * width * width + 8 * width
        sparse = filled(count, width).nbytes
        assert sparse == 4 * count * width + 8 * width
        assert 4 * sparse <= dense

    def test_kept_rows_do_not_follow_the_callers_tensor(self):
        x = rows(2, 16)
        state = GramState(width=16).add(x)
        before = state.matrix()
        x.zero_()
        assert torch.equal(state.matrix(), before)

    def test_no_rows_change_nothing_and_an_empty_state_is_zero(self):
        empty = GramState(width=4)
        assert empty.add(torch.empty(0, 4)) is empty
        assert torch.equal(empty.matrix(), torch.zeros(4, 4, dtype=torch.float64))
        assert torch.equal(empty.magnitude(), torch.zeros(4, dtype=torch.float64))
        assert empty.nbytes == 0
        assert empty.starved

    def test_starved_means_fewer_rows_than_columns(self):
        assert filled(15, 16).starved
        assert not filled(16, 16).starved

    @pytest.mark.parametrize("shape", [(4,), (2, 5), (2, 3, 4)])
    def test_rows_of_another_width_are_refused(self, shape):
        with pytest.raises(DataError, match="4 wide"):
            GramState(width=4).add(torch.zeros(shape))

    def test_states_of_two_widths_are_refused(self):
        with pytest.raises(DataError, match="widths 4 and 5"):
            GramState(width=4) + GramState(width=5)

    def test_steps_are_counted_apart_and_merged(self):
        one = GramState(width=4).add(rows(3, 4), step=0).add(rows(2, 4), step=2)
        two = GramState(width=4).add(rows(5, 4), step=2).add(rows(1, 4), step=1)
        assert dict(one.steps) == {0: 3, 2: 2}
        assert dict((one + two).steps) == {0: 3, 1: 1, 2: 7}
        assert (one + two).tokens == 11

    def test_gradients_are_not_recorded(self):
        x = rows(4, 4).requires_grad_()
        state = GramState(width=4).add(x)
        assert state.gram is not None
        assert not state.gram.requires_grad


class TestSharing:
    """`add` may reuse storage, a sum must not: what a sum was made of stays as it was, also when the sum grows afterwards."""

    @pytest.mark.parametrize(("left", "right"), [(0, 0), (0, 3), (3, 0), (0, 20), (20, 0), (3, 3), (3, 20), (20, 3), (20, 20), (4, 4)])
    def test_a_sum_and_what_is_added_to_it_leave_its_parts_alone(self, left, right):
        a, b = filled(left, 16, 1), filled(right, 16, 2)
        before = content(a), content(b)
        merged = a + b
        assert (content(a), content(b)) == before
        merged.add(rows(9, 16, 3)).add(rows(2, 16, 4))
        assert (content(a), content(b)) == before

    def test_the_matrix_of_a_state_of_kept_rows_is_its_own(self):
        state = filled(3, 16)
        before = content(state)
        state.matrix().zero_()
        assert content(state) == before


class TestLanes:
    def parts(self, lanes: int, width: int = 8, per_lane: int = 3) -> list[GramState]:
        return [filled(per_lane + lane % 3, width, seed=lane) for lane in range(lanes)]

    @pytest.mark.parametrize(("lanes", "size"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16)])
    def test_tree_size(self, lanes, size):
        assert tree_size(lanes) == size

    @pytest.mark.parametrize(
        ("start", "stop", "lanes", "nodes"),
        [
            (0, 8, 8, [(0, 8)]),
            (0, 5, 5, [(0, 5)]),
            (1, 4, 8, [(1, 2), (2, 4)]),
            (3, 7, 8, [(3, 4), (4, 6), (6, 7)]),
            (4, 7, 7, [(4, 7)]),
            (2, 2, 4, []),
        ],
    )
    def test_nodes_worked_by_hand(self, start, stop, lanes, nodes):
        assert lane_nodes(start, stop, lanes) == nodes

    @pytest.mark.parametrize("lanes", range(1, 10))
    def test_nodes_cover_a_range_once_and_are_the_fewest(self, lanes):
        tree = {
            (low, min(low + size, lanes))
            for power in range(5)
            for size in (1 << power,)
            for low in range(0, lanes, size)
            if size <= tree_size(lanes)
        }
        for start, stop in itertools.combinations(range(lanes + 1), 2):
            nodes = lane_nodes(start, stop, lanes)
            assert [lane for node in nodes for lane in range(*node)] == list(range(start, stop))
            assert set(nodes) <= tree
            # Fewest: no two neighbours of the answer are together a node.
            assert not {(a[0], b[1]) for a, b in itertools.pairwise(nodes)} & tree

    @pytest.mark.parametrize("lanes", range(1, 10))
    def test_every_split_over_one_to_four_workers_gives_the_same_bytes(self, lanes):
        """A worker merges the nodes that its lanes fill, the owner merges those of all workers, as calibrate.worker does."""
        states = self.parts(lanes)
        alone = content(reduce_lanes({(lane, lane + 1): state for lane, state in enumerate(states)}, lanes))
        for workers in range(1, 5):
            for cuts in itertools.combinations_with_replacement(range(lanes + 1), workers - 1):
                bounds = (0, *cuts, lanes)
                assert content(collected(states, bounds)) == alone, bounds

    def test_the_tree_matters(self):
        """Were float64 sums of Gram matrices associative, the test above would hold for any order: here one order differs from the tree."""
        # 9 * 2^50 has steps of 2 in float64: it swallows ones that come singly, and not their sum.
        parts = [GramState(width=1).add(torch.full((1, 1), value)) for value in (1.0, 1.0, 3 * 2.0**25, 1.0)]
        tree = reduce_lanes({(lane, lane + 1): part for lane, part in enumerate(parts)}, 4)
        assert torch.equal(tree.matrix(), (parts[0].matrix() + parts[1].matrix()) + (parts[2].matrix() + parts[3].matrix()))
        line = ((parts[2].matrix() + parts[3].matrix()) + parts[0].matrix()) + parts[1].matrix()
        assert not torch.equal(tree.matrix(), line)

    @given(data=st.data())
    @settings(max_examples=60, deadline=None)
    def test_random_splits_with_experts_that_some_lanes_never_see(self, data):
        lanes = data.draw(st.integers(1, 20))
        counts = data.draw(st.lists(st.integers(0, 9), min_size=lanes, max_size=lanes))
        cuts = sorted(data.draw(st.lists(st.integers(0, lanes), max_size=5)))
        states = [filled(count, 8, seed) for seed, count in enumerate(counts)]
        alone, split = collected(states, (0, lanes)), collected(states, (0, *cuts, lanes))
        if not sum(counts):
            assert alone is None
            assert split is None
            return
        assert alone is not None
        assert split is not None
        assert content(alone) == content(split)
        assert alone.tokens == sum(counts)
        exact = torch.cat([rows(count, 8, seed) for seed, count in enumerate(counts)]).double()
        # At most 180 rows of magnitude below 5: 180 * 2^-24 * 180 * 25 < 0.05; in practice far less, and a lane lost or counted twice is far more.
        torch.testing.assert_close(alone.matrix(), exact.T @ exact, rtol=1e-4, atol=1e-4)

    @pytest.mark.parametrize(
        ("nodes", "message"),
        [
            ([(0, 2), (3, 4)], r"lanes missing: \[2\], counted twice: \[\], of 4"),
            ([(0, 4), (2, 3)], r"lanes missing: \[\], counted twice: \[2\], of 4"),
            ([(0, 2), (0, 1)], r"lanes missing: \[2, 3\], counted twice: \[0\], of 4"),
            ([], r"lanes missing: \[0, 1, 2, 3\]"),
            ([(0, 2), (2, 4), (4, 6)], r"counted twice: \[\], of 4"),
        ],
    )
    def test_missing_and_repeated_lanes_are_named(self, nodes, message):
        """CAL-05, CAL-06: a shard that was lost, or delivered twice after a retry."""
        with pytest.raises(DataError, match=message):
            reduce_lanes({node: GramState(width=4).add(torch.ones(1, 4)) for node in nodes}, 4)
        with pytest.raises(DataError, match=message):
            merge({node: {"q": GramState(width=4).add(torch.ones(1, 4))} for node in nodes}, "q", 4)
        with pytest.raises(DataError, match=message):
            merge({node: {} for node in nodes}, "q", 4)

    def test_a_range_that_is_no_node_is_refused(self):
        parts = {node: GramState(width=4).add(torch.ones(1, 4)) for node in [(0, 1), (1, 3), (3, 4)]}
        with pytest.raises(DataError, match="lane 1 is no node"):
            reduce_lanes(parts, 4)

    def test_a_lane_delivered_again_under_its_key_counts_once(self):
        parts = {(0, 1): filled(3, 8, 0), (1, 2): filled(4, 8, 1)}
        parts |= {(1, 2): filled(4, 8, 1)}
        assert reduce_lanes(parts, 2).tokens == 7


def collected(states: list[GramState], bounds: tuple[int, ...]) -> GramState | None:
    """The merged state of lanes that workers with the given bounds hold; a lane without rows has no state there."""
    lanes = len(states)
    sent = {}
    for start, stop in itertools.pairwise(bounds):
        for node in lane_nodes(start, stop, lanes):
            parts = {(lane, lane + 1): {"q": states[lane]} if states[lane].tokens else {} for lane in range(*node)}
            sent[node] = {"q": _merge_node(parts, node, "q")} if any(parts.values()) else {}
    return merge(sent, "q", lanes)
