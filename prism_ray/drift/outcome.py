"""Files of a drift run and whether it passes its thresholds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from prism_ray import __version__
from prism_ray.core.files import atomic_path, write_json
from prism_ray.drift.config import DriftConfig
from prism_ray.drift.measure import SAMPLE_COLUMNS
from prism_ray.drift.result import DriftResult
from prism_ray.risk.ranking import ABLATION, rank_variants

TABLE, SAMPLES, SUMMARY = "drift.parquet", "samples.parquet", "drift.json"


def table(results: Sequence[DriftResult]) -> pd.DataFrame:
    """One row a (variant, benchmark)."""
    return pd.DataFrame([result.row() for result in results])


def samples(results: Sequence[DriftResult]) -> pd.DataFrame:
    """One row a (variant, benchmark, sample), per-token means, ranked by how far the variant leaves the base there.

    residual: |Z_T - Z_P| / sqrt(m); scale: ||Z_T| - |Z_P|| / sqrt(m); shape: sqrt(residual^2 - scale^2), in units of features; head_residual: RMS of
    |z_P (H_T - H_P)|, in units of logits; m scored tokens. rank: by residual, where features are the same by head_residual.
    """
    frames = []
    for result in results:
        sums = pd.DataFrame(result.table.numpy(), columns=list(SAMPLE_COLUMNS))
        m = sums["tokens"]
        residual = sums["difference_squared"] / m
        scale = (sums["target_squared"] ** 0.5 - sums["proxy_squared"] ** 0.5) ** 2 / m
        means = sums[[name for name in SAMPLE_COLUMNS if name.startswith(("ce_", "confidence_", "correct_", "agreement", "kl", "same_"))]]
        frame = pd.DataFrame({"variant": result.variant, "benchmark": result.benchmark, "sample": result.ids, "tokens": m.astype("int64")})
        frame = pd.concat([frame, means.div(m, axis=0)], axis=1)
        frame["residual"] = residual**0.5
        frame["scale_residual"] = scale**0.5
        frame["shape_residual"] = (residual - scale).clip(lower=0) ** 0.5
        frame["head_residual"] = (sums["head_squared"] / m) ** 0.5
        ordered = frame.sort_values(["residual", "head_residual"], ascending=False, kind="stable").index
        frame.loc[ordered, "rank"] = range(1, len(frame) + 1)
        frame["rank"] = frame["rank"].astype("int64")
        frames.append(frame.sort_values("rank"))
    return pd.concat(frames, ignore_index=True)


def ranking(results: Sequence[DriftResult]) -> list[dict[str, Any]]:
    """Rows of the ablation where there are at least four variants; empty otherwise."""
    rows = [result.row() for result in results]
    if len({row["variant"] for row in rows}) < 4:
        return []
    return [
        {
            "reading": entry.reading,
            "what": ABLATION[entry.reading],
            "mean": entry.mean,
            "sem": entry.sem,
            "benchmarks": {name: asdict(value) for name, value in entry.per_benchmark.items()},
        }
        for entry in rank_variants(rows)
    ]


def failures(config: DriftConfig, results: Sequence[DriftResult]) -> list[str]:
    """What crosses the thresholds, one line each; empty when the run passes."""
    found: list[str] = []
    for result in results:
        where = f"{result.variant} on {result.benchmark}"
        if config.max_bound is not None and result.bound.value > config.max_bound:
            found.append(f"{where}: B = {result.bound.value:.4g} nats is above max_bound {config.max_bound:g}")
        if "rotation" in config.fail_on and result.direction is not None and result.direction.verdict == "rotation":
            test = result.direction
            found.append(
                f"{where}: rotation, cosine {test.cosine:.4f} below its own null {test.own_null.mean:.4f} - 2 x {test.own_null.sd:.4f}"
            )
        drifted = result.verdict.status == "drifted"
        if drifted and ("drift" in config.fail_on or result.verdict.axis in config.fail_on):
            found.append(f"{where}: drift on the {result.verdict.axis} axis, {100 * result.verdict.share:.0f} % of B")
    return found


def write(folder: Path, config: DriftConfig, results: Sequence[DriftResult], *, command: str) -> dict[str, Any]:
    """drift.json, drift.parquet and samples.parquet, each by one rename; returns the content of drift.json."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, frame in ((TABLE, table(results)), (SAMPLES, samples(results))):
        with atomic_path(folder / name) as path:
            frame.to_parquet(path, index=False)
    failed = failures(config, results)
    summary = {
        "version": __version__,
        "command": command,
        "config": config.to_dict(),
        "results": [result.to_dict() for result in results],
        "ranking": finite(ranking(results)),
        "failures": failed,
        "passed": not failed,
    }
    write_json(folder / SUMMARY, summary)
    return summary


def finite(value: Any) -> Any:
    """NaN and infinity as null, which JSON has."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
