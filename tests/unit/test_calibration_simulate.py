"""prism_ray.calibrate.simulate: closed forms, bounds, hand-worked losses, and what must hold however many workers are lost."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any, ClassVar

import pytest

from prism_ray.calibrate import simulate as module
from prism_ray.calibrate.costs import GIB, MACHINES, PlanOptions
from prism_ray.calibrate.plan import Plan, make_plan
from prism_ray.calibrate.shapes import ModelShape, model_shape, read_config
from prism_ray.calibrate.simulate import Result, SimulationOptions, critical_path, scaling, simulate, stages, work
from prism_ray.core.errors import ResourceError
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy

CONFIGS = Path(__file__).resolve().parents[1] / "data" / "configs"
# Sums of some thousand float64 terms in two orders: 1e-12 would do, and no defect is that small.
SAME = 1e-9

MOE = {
    "model_type": "mixtral",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": 1000,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
}
# Slow enough that a block takes minutes: losses then fall into every kind of stage.
SLOW = {
    "forward_flops_per_s": 1e9,
    "gram_flops_per_s": 1e9,
    "solve_flops_per_s": 2e8,
    "network_bytes_per_s": 2e6,
    "read_bytes_per_s": 2e6,
    "write_bytes_per_s": 2e6,
}


def plan_of(workers: int, *, shape: ModelShape | None = None, **values: Any) -> Plan:
    base = {"memory_bytes": 8 * GIB, "machine": MACHINES["cpu2"].with_overrides(SLOW), "samples": 16, "length": 512, "lanes": None}
    return make_plan(shape or model_shape(MOE), PlanOptions(**(base | {"workers": workers} | values)))


def big(workers: int, name: str = "gpt-oss-120b") -> Plan:
    shape = model_shape(read_config(CONFIGS / f"{name}.json"))
    policy = QuantPolicy(format="mxfp4") if name == "gpt-oss-120b" else QuantPolicy()
    return make_plan(shape, PlanOptions(workers=workers, memory_bytes=128 * GIB, machine=MACHINES["h100"], policy=policy))


def lossy(rate: float, seed: int = 0, **values: Any) -> SimulationOptions:
    return SimulationOptions(seed=seed, losses_per_hour=rate, **({"replace_s": 30.0} | values))


# ---------------------------------------------------------------- without stragglers and losses


@pytest.mark.parametrize("name", ["gpt-oss-120b", "qwen3-235b-a22b", "deepseek-v4-flash"])
def test_one_worker_takes_the_sum_of_the_phases(name):
    plan = big(1, name)
    result = simulate(plan)
    assert result.makespan_s == pytest.approx(plan.seconds, rel=SAME) == pytest.approx(work(plan), rel=SAME)
    assert result.utilization == (pytest.approx(1.0),)
    assert result.moved_bytes == 0 and result.losses == 0


@pytest.mark.parametrize("workers", [2, 3, 5, 8, 16])
def test_the_replay_of_a_calm_run_is_the_plan(workers):
    """Barriers after every stage: the makespan is the closed form, whatever the order of events."""
    plan = plan_of(workers)
    result = simulate(plan, record=True)
    assert result.makespan_s == pytest.approx(plan.seconds, rel=SAME)
    assert result.makespan_s >= critical_path(plan) * (1 - SAME)
    assert result.makespan_s >= work(plan) / workers * (1 - SAME)
    assert sum(result.useful_s) == pytest.approx(work(plan), rel=SAME) and sum(result.wasted_s) == 0
    assert result.moved_bytes == pytest.approx(plan.moved_bytes, rel=SAME) and result.resent_bytes == 0
    assert {merge.slot for merge in result.merges} == set(range(workers)) or workers > 8


def test_several_waves_are_replayed_too():
    shape = model_shape({**MOE, "hidden_size": 2048, "intermediate_size": 4096, "num_hidden_layers": 1})
    plan = plan_of(2, shape=shape, memory_bytes=int(2.6 * GIB), samples=8, length=4096)
    assert plan.blocks[0].waves > 1
    assert [stage.kind for stage in stages(plan)] == ["collect", "solve"] * plan.blocks[0].waves + ["propagate"]
    result = simulate(plan, lossy(0.7, seed=3), record=True)
    assert simulate(plan).makespan_s == pytest.approx(plan.seconds, rel=SAME)
    assert result.losses and exactly_once(plan, result)


def test_uneven_shards_wait_for_the_largest():
    plan = plan_of(3)
    assert plan.shard_samples == (5, 5, 6)
    assert simulate(plan).makespan_s == pytest.approx(plan.seconds, rel=SAME)


# ---------------------------------------------------------------- hand-worked losses


class Scripted:
    """Stands in for random.Random: speed 1, and the life that the test gives (slot, incarnation), in seconds at one loss an hour."""

    lives: ClassVar[dict[tuple[int, int], float]] = {}

    def __init__(self, key: str):
        _, slot, incarnation = key.split("/")
        self.key = (int(slot), int(incarnation))

    def gauss(self, mean: float, sigma: float) -> float:
        return 0.0

    def expovariate(self, rate: float) -> float:
        return self.lives.get(self.key, 1e12) / 3600


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(lives: dict[tuple[int, int], float]) -> SimulationOptions:
        monkeypatch.setattr(Scripted, "lives", lives)
        monkeypatch.setattr(module.random, "Random", Scripted)
        return SimulationOptions(losses_per_hour=1.0, replace_s=100.0)

    return use


def two_units(**values: Any) -> Plan:
    """One dense block with two units, q+k+v and down: each of two workers owns one."""
    shape = model_shape({**MOE, "model_type": "llama", "num_hidden_layers": 1})
    policy = QuantPolicy(ignore=(*DEFAULT_IGNORE, "*.o_proj", "*.gate_proj", "*.up_proj"))
    return plan_of(2, shape=shape, policy=policy, **values)


def parts(plan: Plan) -> tuple[float, float, dict[int, float], float]:
    """(load, collect, seconds of each owner's unit, propagate and write) of the only block."""
    block = plan.blocks[0]
    (forward, gram) = block.collect_s[0]
    rest = block.publish_s + block.propagate_s + block.write_s
    return block.load_s, forward + gram, {task.owner: task.seconds for task in block.tasks}, rest


def test_a_worker_lost_while_collecting_starts_its_shard_again(script):
    plan = two_units()
    load, collect, _, _ = parts(plan)
    lost = 0.5 * (load + collect)
    result = simulate(plan, script({(1, 0): lost}), record=True)
    # The stage is repeated from the replacement's arrival on; nothing else changes.
    assert result.makespan_s == pytest.approx(plan.seconds + lost + 100, rel=SAME)
    assert result.wasted_s == (0.0, pytest.approx(lost)) and result.losses == 1
    assert {merge.incarnations for merge in result.merges} == {(0, 1)}


def test_an_owner_lost_during_its_solve_is_redone_by_another(script):
    plan = two_units()
    load, collect, units, rest = parts(plan)
    assert set(units) == {0, 1} and units[0] < 100
    lost = load + collect + 0.5 * units[1]
    result = simulate(plan, script({(1, 0): lost}), record=True)
    # Slot 0 solves its own unit meanwhile, and then waits for the lost shard's states: replacement, load, collect. Then it takes the lost unit.
    assert result.makespan_s == pytest.approx(lost + 100 + load + collect + units[1] + rest, rel=SAME)
    assert [(merge.slot, merge.incarnations) for merge in result.merges] == [(0, (0, 0)), (0, (0, 1))]
    lost_task = next(task for task in plan.blocks[0].tasks if task.owner == 1)
    assert result.resent_bytes == lost_task.moved_bytes
    assert result.wasted_s == (0.0, pytest.approx(0.5 * units[1] + load + collect))
    assert sum(result.useful_s) == pytest.approx(work(plan), rel=SAME)


def test_a_worker_lost_while_propagating_reads_planes_from_disk(script):
    plan = two_units()
    load, collect, units, rest = parts(plan)
    start = load + collect + max(units.values())
    result = simulate(plan, script({(0, 0): start + 0.25 * rest}))
    block = plan.blocks[0]
    planes = max(0.0, block.plane_bytes / SLOW["read_bytes_per_s"] - block.publish_s)
    assert result.makespan_s == pytest.approx(start + 0.25 * rest + 100 + load + planes + rest, rel=SAME)
    assert result.resent_bytes == 0 and result.shards_written == (1, 1)


def test_activations_that_are_written_are_not_written_again(script):
    plan = two_units(samples=3)
    assert plan.shard_samples == (1, 2)
    _, _, _, rest = parts(plan)
    # The smaller shard is done before this moment, the larger one is not.
    result = simulate(plan, script({(0, 0): plan.seconds - 0.01 * rest}))
    assert result.losses == 1 and result.makespan_s == pytest.approx(plan.seconds, rel=SAME)
    assert result.shards_written == (1, 1) and sum(result.wasted_s) == 0


def test_a_finished_shard_is_collected_again_when_its_states_die(script):
    plan = two_units(samples=3)
    load, collect, _, _ = parts(plan)
    half = load + 0.5 * collect
    lost = half + 0.1 * collect
    result = simulate(plan, script({(0, 0): lost}), record=True)
    again = lost + 100 + half
    assert result.makespan_s == pytest.approx(plan.seconds - (load + collect) + max(again, load + collect), rel=SAME)
    assert result.wasted_s[0] == pytest.approx(half) and {merge.incarnations for merge in result.merges} == {(1, 0)}


# ---------------------------------------------------------------- whatever is lost


def exactly_once(plan: Plan, result: Result) -> bool:
    """Every unit of every wave of every block is merged once, from one state of each shard; every shard of every block is written once."""
    expected = sorted((layer, task.wave, task.label) for block in plan.blocks for layer in block.layers for task in block.tasks)
    found = sorted((merge.layer, merge.wave, merge.label) for merge in result.merges)
    layers = len(plan.shape.blocks)
    return (
        found == expected
        and all(len(merge.incarnations) == plan.options.workers for merge in result.merges)
        and result.shards_written == (layers,) * plan.options.workers
    )


@pytest.mark.parametrize("workers", [1, 2, 3, 7])
@pytest.mark.parametrize("seed", range(8))
def test_every_shard_counts_exactly_once_however_many_are_lost(workers, seed):
    plan = plan_of(workers)
    result = simulate(plan, lossy(6.0, seed), record=True)
    assert exactly_once(plan, result)
    for slot in range(workers):
        # A state of a dead incarnation is never merged after one of its successor.
        order = [merge.incarnations[slot] for merge in result.merges]
        assert order == sorted(order)
    # Useful work is the plan's, to the second: nothing durable is repeated as useful, nothing is left out.
    assert sum(result.useful_s) == pytest.approx(work(plan), rel=SAME)
    assert result.makespan_s >= critical_path(plan) * (1 - SAME)
    assert result.makespan_s >= (sum(result.useful_s) + sum(result.wasted_s)) / workers * (1 - SAME)
    assert all(0 <= share <= 1 + SAME for share in result.utilization)
    assert min(result.wasted_s) >= -1e-6


def test_losses_do_fall_into_every_kind_of_stage():
    """The property test above would show little if no owner were ever lost."""
    results = [simulate(plan_of(3), lossy(6.0, seed), record=True) for seed in range(8)]
    assert sum(result.losses for result in results) > 8
    assert any(result.resent_bytes > 0 for result in results)
    assert any(max(merge.incarnations) > 1 for result in results for merge in result.merges)


@pytest.mark.parametrize("seed", range(6))
def test_bytes_sent_are_bytes_received(seed):
    plan = plan_of(5)
    result = simulate(plan, lossy(6.0, seed))
    assert sum(result.sent_bytes) == pytest.approx(sum(result.received_bytes), rel=SAME)
    assert min(result.sent_bytes) >= 0 and min(result.received_bytes) >= 0
    states = sum(len(block.layers) * block.moved_bytes for block in plan.blocks)
    # States go once, and once more where a loss says so; planes may come from disk instead.
    assert states + result.resent_bytes <= result.moved_bytes * (1 + SAME) <= (plan.moved_bytes + result.resent_bytes) * (1 + SAME) ** 2


def test_more_losses_take_longer_on_average():
    plan = plan_of(4)
    means = [sum(simulate(plan, lossy(rate, seed)).makespan_s for seed in range(24)) / 24 for rate in (0.0, 0.5, 2.0, 8.0)]
    assert means == sorted(means) and means[0] == pytest.approx(plan.seconds, rel=SAME) and means[-1] > 1.2 * means[0]


def test_a_slower_replacement_takes_longer_on_average():
    plan = plan_of(4)
    means = [sum(simulate(plan, lossy(1.0, seed, replace_s=wait)).makespan_s for seed in range(24)) / 24 for wait in (0.0, 60.0, 600.0)]
    assert means == sorted(means) and means[2] > 1.2 * means[0]


# ---------------------------------------------------------------- stragglers


def test_one_straggler_stretches_the_whole_run():
    plan = plan_of(1)
    for seed in range(4):
        speed = math.exp(0.4 * random.Random(f"{seed}/0/0").gauss(0.0, 1.0))
        assert simulate(plan, SimulationOptions(seed=seed, straggler_sigma=0.4)).makespan_s == pytest.approx(plan.seconds * speed, rel=SAME)


def test_stragglers_hold_up_every_barrier():
    plan = plan_of(8)
    runs = [simulate(plan, SimulationOptions(seed=seed, straggler_sigma=0.3)) for seed in range(16)]
    for result in runs:
        assert result.makespan_s >= sum(result.useful_s) / 8 * (1 - SAME)
        assert sum(result.wasted_s) == 0 and result.moved_bytes == pytest.approx(plan.moved_bytes, rel=SAME)
    # The slowest of 8 lognormal workers is at exp(0.3 x 1.42) on average; the barrier waits for it.
    assert sum(result.makespan_s for result in runs) / 16 > 1.2 * plan.seconds


# ---------------------------------------------------------------- determinism, tables, refusals


def test_a_run_depends_on_its_seed_alone():
    plan = plan_of(4)
    first, again, other = (simulate(plan, lossy(4.0, seed, straggler_sigma=0.2), record=True) for seed in (7, 7, 8))
    assert first == again and first != other


def test_workers_that_die_before_their_work_is_done_are_refused():
    with pytest.raises(
        ResourceError, match=r"11 losses and block 0 is not done: a worker lives 4 s, so one of 2 is lost every 2 s and replaced after 30 s"
    ) as caught:
        simulate(plan_of(2), lossy(900.0, max_losses=10))
    assert "\n" not in str(caught.value)


def test_the_scaling_table_keeps_refusals_and_compares_with_the_first_that_fits():
    shape = model_shape(read_config(CONFIGS / "llama-3.1-8b.json"))
    options = PlanOptions(workers=4, memory_bytes=64 * GIB, machine=MACHINES["h100"], disk_bytes=12 * GIB, cpus=5)
    rows = scaling(shape, options, [1, 4, 8, 600], SimulationOptions())
    assert "disk" in rows[0].refusal and rows[0].result is None and "every lane a sample" in rows[3].refusal
    four, eight = rows[1].result, rows[2].result
    assert four is not None and eight is not None and four.efficiency(four) == 1
    assert eight.efficiency(four) == pytest.approx(4 * four.makespan_s / (8 * eight.makespan_s)) and eight.efficiency(four) < 1
    assert rows[1].to_dict()["planned_s"] == pytest.approx(four.makespan_s) and set(rows[0].to_dict()) == {"workers", "refusal"}


def test_the_largest_table_entry_of_a_big_model():
    plan = big(512)
    result = simulate(plan)
    assert result.makespan_s == pytest.approx(plan.seconds, rel=SAME) and len(result.utilization) == 512
