"""A drift run over a Ray cluster: Ray Data gives units of work to actors that hold the base and one variant.

A unit is a group of batches of one benchmark for one variant (or the floor of one benchmark), and its result is one row: moments, per-sample sums, first
features. The batches are those of a single process, so the features are the same numbers and only the order of float64 sums differs. A worker that
dies takes its unit's result with it whole; Ray Data gives the unit to another worker, so nothing is counted twice and nothing is lost.

Units are ordered by variant, so that a worker loads each variant about once; the base's features are read again for every variant.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable
from typing import Any, cast

import ray

from prism_ray.core.compute import compute_dtype
from prism_ray.core.errors import EnvironmentFault, PrismError, one_line
from prism_ray.dist.cluster import unwrap
from prism_ray.drift import data as plans
from prism_ray.drift.config import DriftConfig
from prism_ray.drift.data import Benchmark
from prism_ray.drift.measure import BatchReading, measure_batch
from prism_ray.drift.reader import FeatureReader, layout
from prism_ray.drift.result import DriftResult, Floor, collect, summarize
from prism_ray.drift.run import load_benchmarks, measure_floor, threads
from prism_ray.drift.variants import linear_head, open_variant
from prism_ray.risk.cross import PairMoments
from prism_ray.risk.head import HeadTerms, LinearHead, feature_constant, head_terms, require_comparable

UNITS_PER_WORKER = 3
"""Units a worker gets of each (variant, benchmark): few enough to keep results small, enough to even out lengths."""


class DriftWorker:
    """An actor of Ray Data: the base, the variant in hand, their heads. Called with {"unit": pickled unit}, answers {"result": pickled result}."""

    def __init__(self, config: dict[str, Any], benchmarks: ray.ObjectRef, pad: int):
        self.config = DriftConfig.load(config)
        self.benchmarks: list[Benchmark] = ray.get(benchmarks)
        self.pad = pad
        self.dtype = compute_dtype(self.config.dtype)
        self.base = open_variant(self.config.base, base=self.config.base, dtype=self.dtype)
        self.reader, self.head = FeatureReader(self.base), linear_head(self.base)
        self.k_feat = feature_constant(self.head)
        self.held: int | None = None
        self.variant: tuple[FeatureReader, LinearHead, HeadTerms] | None = None

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        unit = pickle.loads(row["unit"])
        with threads(self.config.threads):
            try:
                answer: Any = self._floor(unit["benchmark"]) if unit["variant"] is None else self._measure(**unit)
            except PrismError as error:
                # A user's error is an answer: raised here, Ray Data would try the unit again and wrap the message in tracebacks.
                answer = error
        return {"number": row["number"], "result": pickle.dumps(answer)}

    def _floor(self, benchmark: int) -> Floor:
        entry = self.benchmarks[benchmark]
        plan = plans.floor_plan(entry, self.config.floor_samples)
        read = lambda place: self.reader.read(layout([entry.items[index] for index in plan[place]], self.pad))  # noqa: E731
        return measure_floor(self.config, entry, read, self.reader, self.head, self.k_feat, self.pad)

    def _measure(self, variant: int, benchmark: int, batches: list[list[int]], first: bool) -> tuple[HeadTerms | None, list[BatchReading]]:
        reader, head, terms = self._load(variant)
        items = self.benchmarks[benchmark].items
        readings: list[BatchReading] = []
        for indices in batches:
            batch = layout([items[index] for index in indices], self.pad)
            names = (self.config.base, self.config.variant_names[variant])
            readings.append(measure_batch(batch, self.reader.read(batch), reader.read(batch), (self.head, head), terms, names))
        # d x d matrices: sent once a (variant, benchmark).
        return terms if first else None, _with_merged_moments(readings)

    def _load(self, variant: int) -> tuple[FeatureReader, LinearHead, HeadTerms]:
        if self.held != variant or self.variant is None:
            self.variant = None
            model = open_variant(self.config.variants[variant], base=self.config.base, dtype=self.dtype)
            reader, head = FeatureReader(model), linear_head(model)
            require_comparable(self.head, head, self.config.variant_names[variant])
            self.variant, self.held = (reader, head, head_terms(self.head, head, k_feat=self.k_feat)), variant
        return self.variant


def run_on_ray(
    config: DriftConfig, *, workers: int, cpus_per_worker: float = 1.0, say: Callable[[str], None] = lambda line: None
) -> list[DriftResult]:
    """`run_drift` on the connected cluster, with `workers` actors. Raises what `run_drift` raises; EnvironmentFault when Ray loses a unit for good."""
    benchmarks, tokenizer = load_benchmarks(config)
    units = _units(config, benchmarks, workers)
    say(f"{len(units)} units over {workers} workers")
    rows = [{"number": number, "unit": pickle.dumps(unit)} for number, unit in enumerate(units)]
    logging.getLogger("ray.data").setLevel(logging.WARNING)
    ray.data.DataContext.get_current().enable_progress_bars = False
    arguments = (config.to_dict(), ray.put(benchmarks), int(tokenizer.pad_token_id))
    pipeline = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
        cast(Any, DriftWorker),
        fn_constructor_args=arguments,
        compute=ray.data.ActorPoolStrategy(size=workers),
        num_cpus=cpus_per_worker,
    )
    answers: dict[int, Any] = {}
    try:
        for row in pipeline.iter_rows():
            answers[int(row["number"])] = pickle.loads(row["result"])
    except Exception as error:
        cause = unwrap(error)
        if isinstance(cause, PrismError):
            raise cause from None
        raise EnvironmentFault(f"the drift run failed on Ray ({one_line(cause)})", remedy="see the workers' logs") from error
    for answer in answers.values():
        if isinstance(answer, PrismError):
            raise answer
    return _results(config, benchmarks, units, answers)


def _units(config: DriftConfig, benchmarks: list[Benchmark], workers: int) -> list[dict[str, Any]]:
    units: list[dict[str, Any]] = [{"variant": None, "benchmark": place} for place in range(len(benchmarks))]
    for variant in range(len(config.variants)):
        for place, benchmark in enumerate(benchmarks):
            groups = min(len(benchmark.batches), UNITS_PER_WORKER * workers)
            # Every groups-th batch, so that each unit has long and short ones.
            units += [
                {"variant": variant, "benchmark": place, "batches": benchmark.batches[start::groups], "first": start == 0}
                for start in range(groups)
            ]
    return units


def _with_merged_moments(readings: list[BatchReading]) -> list[BatchReading]:
    """The unit's moments in its first reading, zeros in the others: one pair of d x d matrices a unit is sent, not one a batch."""
    hidden = readings[0].first.shape[2]
    total = PairMoments.zero(hidden)
    for reading in readings:
        total = total + reading.moments
    return [
        BatchReading(
            moments=total if place == 0 else _NOTHING,
            samples=reading.samples,
            first=reading.first,
            kept=reading.kept,
            dropped=reading.dropped,
        )
        for place, reading in enumerate(readings)
    ]


# Broadcasts: adding it changes nothing whatever d, and it costs a few bytes.
_NOTHING = PairMoments.zero(1)


def _results(config: DriftConfig, benchmarks: list[Benchmark], units: list[dict[str, Any]], answers: dict[int, Any]) -> list[DriftResult]:
    floors: dict[int, Floor] = {unit["benchmark"]: answers[number] for number, unit in enumerate(units) if unit["variant"] is None}
    results: list[DriftResult] = []
    for variant, name in enumerate(config.variant_names):
        for place, benchmark in enumerate(benchmarks):
            batches: list[list[int]] = []
            readings: list[BatchReading] = []
            terms: HeadTerms | None = None
            for number, unit in enumerate(units):
                if unit["variant"] == variant and unit["benchmark"] == place:
                    found, part = answers[number]
                    terms = found or terms
                    batches += unit["batches"]
                    readings += part
            assert terms is not None
            hidden = terms.target_gram.shape[0]
            floor = floors[place]
            results.append(summarize(config, name, benchmark, collect(benchmark, batches, readings, hidden), terms, floor))
    return results
