"""A drift run in one process: the base once a benchmark into a cache on disk, then each variant beside it.

Only one model is in memory at a time; of the base its head stays. Batches, their order and the padding are the same for base and variants.
"""

from __future__ import annotations

import gc
import math
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from prism_ray.core.compute import compute_dtype
from prism_ray.core.errors import DataError
from prism_ray.drift import data as plans
from prism_ray.drift.cache import FeatureCache
from prism_ray.drift.config import DriftConfig
from prism_ray.drift.data import Benchmark
from prism_ray.drift.measure import SAMPLE_COLUMNS, BatchReading, measure_batch
from prism_ray.drift.reader import FeatureReader, Features, layout
from prism_ray.drift.result import DriftResult, Floor, Readings, collect, summarize
from prism_ray.drift.variants import linear_head, open_tokenizer, open_variant, require_same_tokenizer
from prism_ray.models.load import load_tokenizer
from prism_ray.risk.bound import Bound, bounds
from prism_ray.risk.cross import PairMoments
from prism_ray.risk.head import HeadTerms, LinearHead, feature_constant, head_terms, require_comparable

Say = Callable[[str], None]


def load_benchmarks(config: DriftConfig, *, compare: bool = True) -> tuple[list[Benchmark], Any]:
    """The encoded benchmarks and the base's tokenizer; compare: every variant's own tokenizer must agree with it."""
    tokenizer = load_tokenizer(config.base)
    benchmarks = [
        plans.load(entry, tokenizer, max_batch=config.max_batch, max_batch_tokens=config.max_batch_tokens) for entry in config.data
    ]
    probes = [str(tokenizer.decode(entry.items[place].input_ids)) for entry in benchmarks for place in range(min(4, len(entry.items)))]
    for source, name in zip(config.variants, config.variant_names, strict=True) if compare else ():
        require_same_tokenizer(tokenizer, open_tokenizer(source, config.base), name, probes)
    return benchmarks, tokenizer


def run_drift(
    config: DriftConfig, *, device: str = "cpu", say: Say = lambda line: None, opener: Callable[[str], Any] | None = None
) -> list[DriftResult]:
    """Every variant on every benchmark, variants in the order given. Raises PrismError for bad input; writes nothing but temporary files.

    opener: makes the model of a variant's source where sources are not those of `open_variant`, for variants that exist in memory only; their tokenizer is
    then taken to be the base's.
    """
    with threads(config.threads), ExitStack() as stack:
        dtype = compute_dtype(config.dtype, device)
        benchmarks, tokenizer = load_benchmarks(config, compare=opener is None)
        pad = int(tokenizer.pad_token_id)
        for entry in benchmarks:
            say(f"{entry.name}: {len(entry.items)} samples, {entry.tokens} scored tokens, {entry.truncated} truncated")
        base = open_variant(config.base, base=config.base, dtype=dtype, device=device)
        reader, head = FeatureReader(base), linear_head(base)
        k_feat = feature_constant(head)
        say(f"base {config.base}: K_feat {k_feat:.4g}")
        caches: list[FeatureCache] = []
        floors: list[Floor] = []
        for entry in benchmarks:
            cache = FeatureCache(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="prism-drift-"))), entry)
            for number, indices in enumerate(entry.batches):
                cache.write(number, reader.read(layout([entry.items[index] for index in indices], pad)))
            caches.append(cache)
            places = {id(batch): number for number, batch in enumerate(entry.batches)}
            chosen = [places[id(batch)] for batch in plans.floor_plan(entry, config.floor_samples)]
            floors.append(measure_floor(config, entry, partial(_stored, cache, chosen), reader, head, k_feat, pad))
        del base, reader
        gc.collect()
        results: list[DriftResult] = []
        for source, name in zip(config.variants, config.variant_names, strict=True):
            model = open_variant(source, base=config.base, dtype=dtype, device=device) if opener is None else opener(source)
            reader, own = FeatureReader(model), linear_head(model)
            require_comparable(head, own, name)
            terms = head_terms(head, own, k_feat=k_feat)
            for entry, cache, floor in zip(benchmarks, caches, floors, strict=True):
                readings = read_variant(config, entry, cache, reader, (head, own), terms, name, pad)
                result = summarize(config, name, entry, readings, terms, floor)
                results.append(result)
                say(f"{name} on {entry.name}: B {result.bound.value:.4g}, delta CE {result.delta_ce:+.4f}, {result.verdict.status}")
            del model, reader, own
            gc.collect()
        return results


def read_variant(
    config: DriftConfig,
    benchmark: Benchmark,
    cache: FeatureCache,
    reader: FeatureReader,
    heads: tuple[LinearHead, LinearHead],
    terms: HeadTerms,
    name: str,
    pad: int,
) -> Readings:
    """All batches of a benchmark through a variant, beside the base's cached features."""
    readings: list[BatchReading] = []
    for number, indices in enumerate(benchmark.batches):
        batch = layout([benchmark.items[index] for index in indices], pad)
        readings.append(measure_batch(batch, cache.read(number), reader.read(batch), heads, terms, (config.base, name)))
    return collect(benchmark, benchmark.batches, readings, heads[0].weight.shape[1])


def measure_floor(
    config: DriftConfig,
    benchmark: Benchmark,
    stored: Callable[[int], Features],
    reader: FeatureReader,
    head: LinearHead,
    k_feat: float,
    pad: int,
) -> Floor:
    """The base in other batch shapes against itself in the plan's (field case DRF-02). stored: features of a batch of `floor_plan`, by its place there."""
    if config.floor_samples == 0:
        return Floor(bounds=[], agreement=math.nan, flips=None, samples=0)
    plan = plans.floor_plan(benchmark, config.floor_samples)
    by_sample: dict[int, Features] = {}
    for place, indices in enumerate(plan):
        features = stored(place)
        sizes = [benchmark.items[index].answer_tokens for index in indices]
        experts = [None] * len(sizes) if features.experts is None else features.experts.split(sizes)
        by_sample |= {
            index: Features(hidden, chosen) for index, hidden, chosen in zip(indices, features.hidden.split(sizes), experts, strict=True)
        }
    terms = head_terms(head, head, k_feat=k_feat)
    found: list[Bound] = []
    flips = choices = 0.0
    agreement = 1.0
    for _, side, batches in plans.other_layouts(plan, config.seed):
        moments = PairMoments.zero(head.weight.shape[1])
        for indices in batches:
            batch = layout([benchmark.items[index] for index in indices], pad, side)
            reading = measure_batch(
                batch, _join([by_sample[index] for index in indices]), reader.read(batch), (head, head), terms, ("", "")
            )
            moments = moments + reading.moments
            column = dict(zip(SAMPLE_COLUMNS, reading.samples.T, strict=True))
            flips += float(column["routing_flips"].sum())
            choices += float(column["routing_choices"].sum())
            agreement = min([agreement, *(column["agreement"] / column["tokens"]).tolist()])
        if moments.token.tokens:
            found.append(bounds(moments, terms, alignments=("identity",))["identity"])
    if not found:
        raise DataError("every sample gives NaN or infinite numbers in the base", where=config.base, remedy="mend the base, or use float32")
    return Floor(bounds=found, agreement=agreement, flips=flips / choices if choices else None, samples=len(by_sample))


def _stored(cache: FeatureCache, numbers: list[int], place: int) -> Features:
    return cache.read(numbers[place])


def _join(parts: list[Features]) -> Features:
    experts = [part.experts for part in parts if part.experts is not None]
    return Features(torch.cat([part.hidden for part in parts]), torch.cat(experts) if experts else None)


@contextmanager
def threads(count: int) -> Iterator[None]:
    """torch on `count` threads for a while; 0 leaves it alone."""
    before = torch.get_num_threads()
    if count:
        torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
