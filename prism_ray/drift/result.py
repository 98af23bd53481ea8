"""What a run found for one variant on one benchmark, from the readings of its batches."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from prism_ray.core.errors import DataError
from prism_ray.drift.config import DriftConfig
from prism_ray.drift.data import CLASS_SAMPLES, Benchmark
from prism_ray.drift.measure import SAMPLE_COLUMNS, BatchReading
from prism_ray.risk.agreement import SplitReading, split_readings
from prism_ray.risk.bound import Alignment, Axis, Bound, RangeBound, bounds, sequence_bound
from prism_ray.risk.cross import PairMoments
from prism_ray.risk.floor import AxisReading, BootstrapInterval, axis_readings, bound_interval
from prism_ray.risk.head import HeadTerms
from prism_ray.risk.noise import DirectionTest, direction_test
from prism_ray.risk.transfer import Transfer, transfer_test
from prism_ray.risk.verdict import Verdict, verdict


@dataclass(frozen=True, kw_only=True)
class Readings:
    """All batches of a variant on a benchmark: samples in benchmark order of the kept ones, `index` their places in `benchmark.items`."""

    moments: PairMoments
    samples: torch.Tensor
    first: torch.Tensor
    index: list[int]
    dropped: dict[str, str]


def collect(benchmark: Benchmark, batches: Sequence[list[int]], readings: Sequence[BatchReading], hidden: int) -> Readings:
    """Merge batch readings in plan order: the sums do not depend on which process made which batch."""
    moments = PairMoments.zero(hidden)
    dropped: dict[str, str] = {}
    index: list[int] = []
    for batch, reading in zip(batches, readings, strict=True):
        moments = moments + reading.moments
        dropped |= reading.dropped
        index += [batch[row] for row in reading.kept]
    order = sorted(range(len(index)), key=lambda place: index[place])
    return Readings(
        moments=moments,
        samples=torch.cat([reading.samples for reading in readings])[order],
        first=torch.cat([reading.first for reading in readings])[order],
        index=[index[place] for place in order],
        dropped=dropped,
    )


@dataclass(frozen=True, kw_only=True)
class Floor:
    """The base against itself on one benchmark: a bound a layout, the smallest per-sample mean cosine of outputs over all layouts (NaN without a floor),
    the share of routings that flip (None for dense models), and the number of samples."""

    bounds: list[Bound]
    agreement: float
    flips: float | None
    samples: int


@dataclass(frozen=True, kw_only=True)
class DriftResult:
    """One cell of the table. delta_ce: R_P - R_T in nats a token; flips: share of (token, layer) routings that differ, None for dense models."""

    variant: str
    benchmark: str
    samples: int
    tokens: int
    truncated: int
    dropped: dict[str, str]
    risk_target: float
    risk_proxy: float
    delta_ce: float
    delta_ce_se: float
    delta_ce_sequence: float
    bounds: dict[Alignment, Bound]
    sequence: Bound
    tight: RangeBound
    interval: BootstrapInterval
    channel_one_minus_omega: float
    axes: dict[Axis, AxisReading]
    direction: DirectionTest | None
    classes: tuple[str, str] | None
    transfer: Transfer | None
    agreement: float
    kl: float
    splits: list[SplitReading]
    flips: float | None
    floor: Floor
    verdict: Verdict
    table: torch.Tensor
    ids: list[str]

    @property
    def bound(self) -> Bound:
        """The bound at W = I."""
        return self.bounds["identity"]

    def row(self) -> dict[str, Any]:
        """Flat numbers for tables."""
        bound = self.bound
        row: dict[str, Any] = {
            "variant": self.variant,
            "benchmark": self.benchmark,
            "samples": self.samples,
            "tokens": self.tokens,
            "risk_target": self.risk_target,
            "risk_proxy": self.risk_proxy,
            "delta_ce": self.delta_ce,
            "delta_ce_se": self.delta_ce_se,
            "rho_target": bound.rho_target,
            "rho_proxy": bound.rho_proxy,
            "omega": bound.omega,
            "one_minus_omega": bound.one_minus_omega,
            "channel_one_minus_omega": self.channel_one_minus_omega,
            "delta": bound.delta,
            "gamma": bound.gamma,
            "bound": bound.value,
            "feature_range": self.tight.feature,
            "head_range": self.tight.head,
            "bound_range": self.tight.value,
            "bound_mixed": bound.delta + self.tight.head,
            "bound_low": self.interval.low,
            "bound_high": self.interval.high,
            "bound_sequence": self.sequence.value,
            "delta_ce_sequence": self.delta_ce_sequence,
            "k_feat": bound.k_feat,
            "dominant": bound.dominant,
            "status": self.verdict.status,
            "agreement": self.agreement,
            "kl": self.kl,
            "routing_flips": _number(self.flips),
            "routing_choices": int(self.table[:, SAMPLE_COLUMNS.index("routing_choices")].sum()),
            "floor_routing_flips": _number(self.floor.flips),
            "floor_samples": self.floor.samples,
            "floor_agreement": self.floor.agreement,
            "truncated": self.truncated,
            "dropped": len(self.dropped),
        }
        for name, entry in self.bounds.items():
            if name != "identity":
                row |= {
                    f"one_minus_omega_{name}": entry.one_minus_omega,
                    f"delta_{name}": entry.delta,
                    f"gamma_{name}": entry.gamma,
                    f"bound_{name}": entry.value,
                }
        for axis, reading in self.axes.items():
            row |= {f"floor_{axis}": reading.floor_mean, f"floor_{axis}_largest": reading.floor_largest}
        if self.direction is not None:
            row |= {
                "direction_cosine": self.direction.cosine,
                "direction_null": self.direction.own_null.mean,
                "direction_null_sd": self.direction.own_null.sd,
                "direction_n": self.direction.n,
                "direction_verdict": self.direction.verdict,
            }
        return row

    def to_dict(self) -> dict[str, Any]:
        """Everything but the per-sample table, JSON-able; NaN as null."""
        plain = {
            "row": self.row(),
            "bounds": {name: entry.to_dict() for name, entry in self.bounds.items()},
            "sequence": self.sequence.to_dict(),
            "range_bound": asdict(self.tight) | {"bound": self.tight.value},
            "interval": asdict(self.interval),
            "axes": {axis: asdict(entry) | {"distinguishable": entry.distinguishable} for axis, entry in self.axes.items()},
            "classes": self.classes,
            "direction": None if self.direction is None else _without_draws(self.direction) | _derived(self.direction),
            # Its rotation test is `direction`, on the same rows.
            "transfer": None if self.transfer is None else {k: v for k, v in _without_draws(self.transfer).items() if k != "rotation"},
            "agreement_splits": [asdict(entry) | {"separation": entry.separation} for entry in self.splits],
            "dropped": self.dropped,
            "verdict": asdict(self.verdict),
        }
        return _jsonable(plain)


def _number(value: float | None) -> float:
    return math.nan if value is None else value


def _without_draws(value: Any) -> dict[str, Any]:
    """asdict without the single cosines of a null, of which mean and sd are kept."""
    return {key: _strip(entry) for key, entry in asdict(value).items()}


def _derived(test: DirectionTest) -> dict[str, Any]:
    return {name: getattr(test, name) for name in ("floor", "callable_deficit", "n", "d")}


def _strip(value: Any) -> Any:
    return {key: _strip(entry) for key, entry in value.items() if key != "cosines"} if isinstance(value, dict) else value


def _jsonable(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _jsonable(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(entry) for entry in value]
    if isinstance(value, torch.Tensor):
        return _jsonable(value.tolist())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value


def summarize(
    config: DriftConfig,
    variant: str,
    benchmark: Benchmark,
    readings: Readings,
    terms: HeadTerms,
    floor: Floor,
) -> DriftResult:
    """Judge what was read. DataError when more samples were dropped than `max_dropped` allows, naming the first and the model."""
    if len(readings.dropped) > config.max_dropped:
        sample, model = next(iter(readings.dropped.items()))
        raise DataError(
            f"{len(readings.dropped)} samples give NaN or infinite numbers, {config.max_dropped} allowed; the first is {sample}, in {model}",
            where=benchmark.name,
            remedy="mend the model or the sample, or raise max_dropped",
        )
    moments = readings.moments
    column = {name: readings.samples[:, place] for place, name in enumerate(SAMPLE_COLUMNS)}
    found = bounds(moments, terms, alignments=_with_identity(config.alignments))
    bound = found["identity"]
    axes = axis_readings(bound, floor.bounds)
    direction, moved = _classes(config, benchmark, readings)
    tokens = column["tokens"]
    right = (column["correct_proxy"] / tokens).tolist()
    splits = split_readings((column["agreement"] / tokens).tolist(), right, "agreement")
    splits += split_readings((column["confidence_proxy"] / tokens).tolist(), right, "confidence")
    choices = float(column["routing_choices"].sum())
    total = moments.token
    return DriftResult(
        variant=variant,
        benchmark=benchmark.name,
        samples=total.examples,
        tokens=total.tokens,
        truncated=benchmark.truncated,
        dropped=readings.dropped,
        risk_target=total.ce_target / total.tokens,
        risk_proxy=total.ce_proxy / total.tokens,
        delta_ce=total.delta_ce,
        delta_ce_se=total.delta_ce_se,
        delta_ce_sequence=moments.sequence.delta_ce,
        bounds=found,
        sequence=sequence_bound(moments, terms),
        tight=RangeBound(
            feature=float(column["feature_range"].sum() / tokens.sum()), head=float(column["head_range"].sum() / tokens.sum())
        ),
        interval=bound_interval(
            tokens.tolist(), column["difference_squared"].tolist(), column["head_squared"].tolist(), terms.k_feat, seed=config.seed
        ),
        channel_one_minus_omega=moments.channel_one_minus_omega,
        axes=axes,
        direction=direction,
        classes=benchmark.classes,
        transfer=moved,
        agreement=float((column["agreement"] / tokens).mean()),
        kl=float(column["kl"].sum() / tokens.sum()),
        splits=splits,
        flips=float(column["routing_flips"].sum()) / choices if choices else None,
        floor=floor,
        verdict=verdict(
            variant,
            benchmark.name,
            bound,
            axes,
            delta_ce=total.delta_ce,
            delta_ce_se=total.delta_ce_se,
            samples=total.examples,
            tokens=total.tokens,
            rotation=None if direction is None else direction.verdict,
        ),
        table=readings.samples,
        ids=[benchmark.items[place].id for place in readings.index],
    )


def _with_identity(alignments: tuple[Alignment, ...]) -> tuple[Alignment, ...]:
    return alignments if "identity" in alignments else ("identity", *alignments)


def _classes(config: DriftConfig, benchmark: Benchmark, readings: Readings) -> tuple[DirectionTest | None, Transfer | None]:
    """Direction test and probe transfer between the two most frequent answers, on features at the first scored position."""
    classes = benchmark.classes
    if classes is None:
        return None, None
    parts = []
    for answer in classes:
        chosen = torch.tensor([benchmark.answers[place] == answer for place in readings.index])
        parts.append(readings.first[chosen])
    if min(len(part) for part in parts) < CLASS_SAMPLES:
        return None, None
    (base_a, variant_a), (base_b, variant_b) = ((part[:, 0], part[:, 1]) for part in parts)
    test = direction_test(base_a, base_b, variant_a, variant_b, splits=config.splits, seed=config.seed)
    if test.verdict == "undefined":
        return test, None
    return test, transfer_test(base_a, base_b, variant_a, variant_b, seed=config.seed, rotation=test)
