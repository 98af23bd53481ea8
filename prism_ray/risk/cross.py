"""The moments of a pair of models that the PRISM bound needs beyond the scalar ones: d x d matrices, per-channel sums, head terms.

`PairMoments` holds, for features Z_T, Z_P [n, d] on the same tokens,

- `token`, `sequence`: `FeatureMoments` with every token weighing 1, and with every token of a sequence of m scored tokens weighing 1/m. The
  second gives the sequence-level risk of prism-risk-bound App. D, whose rows are the same rows under other weights: Lipschitz and Jensen hold
  for any weights, so the bound does.
- C = Z_T' Z_P and S = Z_P' Z_P [d, d] with the column sums of Z_P, for alignments W other than I;
- per-channel sums, for a shape reading in which no channel outweighs the rest (field case DRF-04);
- sums of ||z_P (H_T - H_P) + b_T - b_P||^2, the head term at W = I, which needs no matrix.

All sums are float64, so parts of the data merge by addition: one process or fifty give the same numbers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

import torch

from prism_ray.risk.moments import FeatureMoments, feature_moments


@dataclass(frozen=True, kw_only=True)
class PairMoments:
    """Sums over tokens; `+` merges disjoint parts. Tensors are float64 on the CPU.

    cross, gram: [d, d]; proxy_sum, target_channel, proxy_channel, inner_channel: [d] (sum of z_P, z_T^2, z_P^2, z_T z_P per channel).
    head_token, head_sequence: sums of the squared head difference under the two weightings.
    """

    token: FeatureMoments
    sequence: FeatureMoments
    cross: torch.Tensor
    gram: torch.Tensor
    proxy_sum: torch.Tensor
    target_channel: torch.Tensor
    proxy_channel: torch.Tensor
    inner_channel: torch.Tensor
    head_token: float
    head_sequence: float

    def __add__(self, other: PairMoments) -> PairMoments:
        return PairMoments(**{field.name: getattr(self, field.name) + getattr(other, field.name) for field in fields(self)})

    @classmethod
    def zero(cls, hidden: int) -> PairMoments:
        """The neutral element for features of `hidden` channels."""
        shapes = {"cross": (hidden, hidden), "gram": (hidden, hidden)}
        tensors = {name: torch.zeros(shapes.get(name, (hidden,)), dtype=torch.float64) for name in TENSORS}
        return cls(token=FeatureMoments(), sequence=FeatureMoments(), head_token=0.0, head_sequence=0.0, **tensors)

    def to_arrays(self) -> dict[str, torch.Tensor]:
        """Every sum as a float64 tensor, for transport between processes."""
        scalars = {name: torch.tensor(getattr(self, name).to_list(), dtype=torch.float64) for name in ("token", "sequence")}
        heads = {"heads": torch.tensor([self.head_token, self.head_sequence], dtype=torch.float64)}
        return {name: getattr(self, name) for name in TENSORS} | scalars | heads

    @classmethod
    def from_arrays(cls, arrays: dict[str, torch.Tensor]) -> PairMoments:
        """Inverse of `to_arrays`."""
        head_token, head_sequence = arrays["heads"].tolist()
        return cls(
            token=FeatureMoments.from_list(arrays["token"].tolist()),
            sequence=FeatureMoments.from_list(arrays["sequence"].tolist()),
            head_token=head_token,
            head_sequence=head_sequence,
            **{name: arrays[name] for name in TENSORS},
        )

    @property
    def channel_one_minus_omega(self) -> float:
        """1 - Omega after dividing each channel by the target's RMS in it: every channel weighs the same. NaN without a channel that is on.

        Channels in which the target is exactly 0 are left out.
        """
        on = self.target_channel > 0
        weight = 1 / self.target_channel[on]
        target, proxy = float(on.sum()), float((self.proxy_channel[on] * weight).sum())
        if target == 0 or proxy == 0:
            return math.nan
        return 1 - float((self.inner_channel[on] * weight).sum()) / math.sqrt(target * proxy)


TENSORS = ("cross", "gram", "proxy_sum", "target_channel", "proxy_channel", "inner_channel")


def pair_moments(
    z_target: torch.Tensor,
    z_proxy: torch.Tensor,
    ce_target: torch.Tensor,
    ce_proxy: torch.Tensor,
    rows: torch.Tensor,
    head_squared: torch.Tensor | None = None,
) -> PairMoments:
    """Moments of one batch. z_*: [n, d]; ce_*: [n] nats; rows: int64 [n], the example of each token; head_squared: [n] of
    ||z_P (H_T - H_P) + b_T - b_P||^2, None for one head. An example's tokens must not be spread over two calls.
    """
    target, proxy = z_target.to(torch.float64).cpu(), z_proxy.to(torch.float64).cpu()
    ce_target, ce_proxy, rows = ce_target.cpu(), ce_proxy.cpu(), rows.cpu()
    _, index, sizes = torch.unique(rows, return_inverse=True, return_counts=True)
    weight = 1 / sizes.to(torch.float64)[index]
    head = torch.zeros(rows.numel(), dtype=torch.float64) if head_squared is None else head_squared.to(torch.float64).cpu()
    return PairMoments(
        token=feature_moments(target, proxy, ce_target, ce_proxy, rows),
        sequence=feature_moments(target, proxy, ce_target, ce_proxy, rows, weight=weight),
        cross=target.T @ proxy,
        gram=proxy.T @ proxy,
        proxy_sum=proxy.sum(0),
        target_channel=target.square().sum(0),
        proxy_channel=proxy.square().sum(0),
        inner_channel=(target * proxy).sum(0),
        head_token=float(head.sum()),
        head_sequence=float((head * weight).sum()),
    )
