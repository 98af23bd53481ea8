"""Feedback exposure outside transformers: IIR filters (App. M) and a Mamba layer (App. N of "Quantizing Looped Transformers").

    python jobs/reproduce/loop_controls.py [--out FILE.json] [--bits 4,6,8,10,12,16] [--seed 0]

Filters: the largest pole radius with A, B, C or D rounded alone, per design and precision. Mamba: a small random model of transformers' Mamba, four layers of which each
is read on random tokens; state divergence over time with each part rounded to INT4 and with Gaussian noise of equal norm, and the sweep of an identity path.
Random weights show the mechanism (what is exactly 0, what grows), not a trained model's magnitudes.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from prism_ray.calibrate.controls import DESIGNS, FilterRow, filter_table, identity_sweep, mamba_divergence, mamba_inputs
from prism_ray.core.files import write_json

LAYERS = 4
SEQUENCES, LENGTH = 4, 100


def random_mamba(seed: int) -> Any:
    """A MambaForCausalLM of 4 layers, width 64, state 16, in eval mode."""
    from transformers import MambaConfig, MambaForCausalLM

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = MambaConfig(vocab_size=256, hidden_size=64, state_size=16, num_hidden_layers=LAYERS, initializer_range=0.1)
        return MambaForCausalLM(config).eval()


def print_filters(rows: list[FilterRow]) -> None:
    """One line per design and matrix: radius at each precision, * where a pole lies on or outside the unit circle."""
    for design in dict.fromkeys(row.design for row in rows):
        own = [row for row in rows if row.design == design]
        print(f"{design}: as designed {own[0].radius:.4f}")
        for matrix in "ABCD":
            found = [row for row in own if row.matrix == matrix]
            print(f"  {matrix}  " + "  ".join(f"{row.bits:2d} bit {row.radius:.4f}{' ' if row.stable else '*'}" for row in found))


def mamba_rows(seed: int) -> dict[str, Any]:
    """Divergences of every layer and the identity sweep of layer 2, printed as they come."""
    model = random_mamba(seed)
    ids = torch.randint(0, 256, (SEQUENCES, LENGTH), generator=torch.Generator().manual_seed(seed))
    rows: list[dict[str, Any]] = []
    print(
        f"{'layer part':16s}{'kind':>10s}{'t=0':>11s}{'t=1':>11s}{'middle':>11s}{'end':>11s}{'growth':>9s}   relative divergence; growth: absolute"
    )
    for layer in range(LAYERS):
        mixer, x = mamba_inputs(model, ids, layer)
        for found in mamba_divergence(mixer, x):
            at = [float(found.relative[t]) for t in (0, 1, LENGTH // 2, LENGTH - 1)]
            shown = "".join(f"{value:11.3e}" for value in at)
            print(f"{layer:5d} {found.part:10s}{found.kind:>10s}{shown}{found.growth:9.2f}")
            rows.append({"layer": layer, "part": found.part, "kind": found.kind, "relative": at, "growth": found.growth})
    mixer, x = mamba_inputs(model, ids, LAYERS // 2)
    sweep = identity_sweep(mixer, x)
    for alpha, absolute, relative in sweep:
        print(f"identity share {alpha:.2f}: A_log divergence {absolute:.4e}, relative {relative:.4e} ({relative / sweep[0][2] - 1:+.0%})")
    return {"divergence": rows, "identity": [{"alpha": a, "absolute": b, "relative": c} for a, b, c in sweep]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--bits", default="4,6,8,10,12,16")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    filters = filter_table(DESIGNS, [int(text) for text in options.bits.split(",")])
    print_filters(filters)
    mamba = mamba_rows(options.seed)
    if options.out is not None:
        write_json(options.out, {"filters": [vars(row) for row in filters], "mamba": mamba})


if __name__ == "__main__":
    main()
