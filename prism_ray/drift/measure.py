"""One batch of base and variant features to moments and per-sample readings; heads applied in token chunks.

Memory beside the features of a batch: seven float32 blocks of at most `CHUNK_BYTES`, whatever batch, length or vocabulary (field case DRF-03), and the
d x d moments.

Legend: B samples of a batch, n scored tokens, d hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from prism_ray.drift.reader import Features
from prism_ray.risk.agreement import OutputPair, compare_outputs
from prism_ray.risk.cross import PairMoments, pair_moments
from prism_ray.risk.head import HeadTerms, LinearHead
from prism_ray.training.data import Batch

CHUNK_BYTES = 16 * 2**20

SAMPLE_COLUMNS = (
    "tokens",
    "target_squared",
    "proxy_squared",
    "inner",
    "difference_squared",
    "head_squared",
    "ce_target",
    "ce_proxy",
    "agreement",
    "kl",
    "confidence_target",
    "confidence_proxy",
    "correct_target",
    "correct_proxy",
    "same_token",
    "feature_range",
    "head_range",
    "routing_flips",
    "routing_choices",
)
"""Per sample, sums over its scored tokens. routing_*: (token, layer) pairs whose expert set differs, and all of them."""


@dataclass(frozen=True, kw_only=True)
class BatchReading:
    """moments of the batch's kept samples; samples: float64 [B', columns]; first: features [B', 2, d] of base and variant at each sample's first
    scored position; kept: batch rows; dropped: ids of samples with NaN or infinite numbers, by model."""

    moments: PairMoments
    samples: torch.Tensor
    first: torch.Tensor
    kept: list[int]
    dropped: dict[str, str]


def output_pairs(
    z_target: torch.Tensor, z_proxy: torch.Tensor, heads: tuple[LinearHead, LinearHead], targets: torch.Tensor, *, kept: bool
) -> OutputPair:
    """`compare_outputs` over token chunks. z_*: [n, d]; targets: int64 [n]; kept: the heads are the same."""
    size = max(1, CHUNK_BYTES // (4 * heads[0].weight.shape[0]))
    parts: list[OutputPair] = []
    for start in range(0, targets.numel(), size):
        part = slice(start, start + size)
        mixed = None if kept else heads[0].logits(z_proxy[part])
        parts.append(compare_outputs(heads[0].logits(z_target[part]), heads[1].logits(z_proxy[part]), targets[part], mixed))
    return OutputPair(**{field.name: torch.cat([getattr(part, field.name) for part in parts]) for field in fields(OutputPair)})


@torch.inference_mode()
def measure_batch(
    batch: Batch, base: Features, variant: Features, heads: tuple[LinearHead, LinearHead], terms: HeadTerms, names: tuple[str, str]
) -> BatchReading:
    """Readings of one batch; samples in which either model has a NaN or infinite feature or loss are left out of both. names: for `dropped`."""
    rows = batch.target_rows
    z_target, z_proxy = base.hidden, variant.hidden
    finite = [z.isfinite().all(dim=1) for z in (z_target, z_proxy)]
    usable = finite[0] & finite[1]
    clean = [torch.where(usable.unsqueeze(1), z, 0) for z in (z_target, z_proxy)]
    pair = output_pairs(clean[0], clean[1], heads, batch.targets, kept=terms.kept)
    finite[0] &= pair.ce_target.isfinite()
    finite[1] &= pair.ce_proxy.isfinite()
    dropped: dict[str, str] = {}
    for good, name in zip(finite, names, strict=True):
        for row in rows[~good].unique().tolist():
            dropped.setdefault(batch.ids[row], name)
    kept = [row for row in range(len(batch.ids)) if batch.ids[row] not in dropped]
    token = torch.isin(rows, torch.tensor(kept, dtype=rows.dtype))
    rows, z_target, z_proxy = rows[token], z_target[token], z_proxy[token]
    pair = OutputPair(**{field.name: getattr(pair, field.name)[token] for field in fields(OutputPair)})
    head = terms.squared(z_proxy)
    if not kept:
        hidden = z_target.shape[1]
        return BatchReading(
            moments=PairMoments.zero(hidden),
            samples=torch.zeros(0, len(SAMPLE_COLUMNS), dtype=torch.float64),
            first=torch.zeros(0, 2, hidden),
            kept=[],
            dropped=dropped,
        )
    flips, choices = _routing(base.experts, variant.experts, token)
    target, proxy = z_target.double(), z_proxy.double()
    columns: Sequence[torch.Tensor] = (
        torch.ones(rows.numel()),
        target.square().sum(1),
        proxy.square().sum(1),
        (target * proxy).sum(1),
        (target - proxy).square().sum(1),
        head,
        pair.ce_target,
        pair.ce_proxy,
        pair.cosine,
        pair.kl,
        pair.confidence_target,
        pair.confidence_proxy,
        pair.correct_target,
        pair.correct_proxy,
        pair.same_token,
        pair.feature_range,
        pair.head_range,
        flips,
        choices,
    )
    place = torch.searchsorted(torch.tensor(kept), rows)
    samples = torch.zeros(len(kept), len(columns), dtype=torch.float64)
    samples.index_add_(0, place, torch.stack([column.double() for column in columns], dim=1))
    first = torch.searchsorted(rows, torch.tensor(kept))
    return BatchReading(
        moments=pair_moments(z_target, z_proxy, pair.ce_target, pair.ce_proxy, rows, None if terms.kept else head),
        samples=samples,
        first=torch.stack([z_target[first], z_proxy[first]], dim=1),
        kept=kept,
        dropped=dropped,
    )


def _routing(base: torch.Tensor | None, variant: torch.Tensor | None, token: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(flips [n], choices [n]) per kept token; zeros for dense models."""
    kept = int(token.sum())
    if base is None or variant is None or base.shape != variant.shape:
        return torch.zeros(kept), torch.zeros(kept)
    flips = (base[token] != variant[token]).any(dim=2).sum(dim=1).float()
    return flips, torch.full((kept,), float(base.shape[1]))
