"""QAST: the effective scales of a Scale-QLoRA adapter, on the grid. One function, called by every forward pass and by the merge.

s_eff = grid(clip(s0 * (1 + scaling * B A), s_min, s_max)),   scaling = alpha / r      (scale-qlora §3; design.md "Scale-QLoRA")

s0 [O, G] are the decoded base scales, B [O, r] and A [r, G] the trained factors. The rounding is `grid.encode`: nearest with ties to even on
E4M3 under the 448 ceiling clamp, nearest in the log2 domain on E8M0. Because the merge writes exactly the bytes that this function returned in the
forward pass, max |dW| of a merge is 0 by construction.

The product is taken in float64. In float32 its last bit depends on the number of threads and on the device, and about one block in a million lies
close enough to a rounding boundary for that bit to move its byte; then a plane merged elsewhere would differ from the one trained.

A block whose base scale is 0 stays 0: a multiplicative correction cannot revive it (field case FMT-04).

Without QAST (`clipped_scales`) the forward uses the clipped correction as it is, and a merge rounds what training never saw rounded: the comparison that
shows what the rounding in the forward is for (scale-qlora §G.3).

Legend: O rows, G scale blocks of a row, r rank. Experts have a leading dimension and are computed one at a time: a batched product may sum in another
order than the product of the one expert that a forward takes.
"""

from __future__ import annotations

import torch

from prism_ray.core.errors import FormatError
from prism_ray.formats.spec import FormatSpec

# The name of `grid.encode`'s rule, for manifests: a plane is read and merged again by the rule that it was trained with (field case FMT-03).
ROUNDING = {"e4m3": "nearest-even", "e8m0": "nearest-log2", "bf16": "nearest-even"}


def corrected_scales(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec) -> torch.Tensor:
    """Real-valued s0 * (1 + scaling * B A), float64 [O, G], before clip and rounding. base: uint8 bytes [O, G]."""
    return _correct(spec.grid.decode(base), a, b, scaling)


def effective_scales(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec) -> torch.Tensor:
    """The on-grid scale bytes uint8 [O, G] for base bytes [O, G], A [r, G], B [O, r], or all three with a leading dimension of experts.

    NaN factors give an illegal byte that decodes to NaN, so that the layer's output is NaN. The loss need not be: torch's attention on CPUs returns
    zeros for NaN queries and keys. Hence `require_finite` before factors are saved or merged.
    """
    if base.ndim == 2:
        return round_scales(base, a, b, scaling, spec)[0]
    out = torch.empty_like(base)
    for expert in range(base.shape[0]):
        out[expert] = round_scales(base[expert], a[expert], b[expert], scaling, spec)[0]
    return out


def round_scales(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`effective_scales`, inside): `inside` is bool [O, G], true where the clip left the scale alone, which is where a gradient passes."""
    scale, inside = clipped_scales(base, a, b, scaling, spec)
    # An encoder keeps a zero where its grid has one; E8M0 has none, and no base scale of it is zero.
    return spec.grid.encode(scale), inside


def clipped_scales(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(scales, inside) before the rounding: clip(s0 * (1 + scaling * B A)) as float32 [O, G], zero where s0 is; the mask of `round_scales`."""
    grid = spec.grid
    decoded = grid.decode(base)
    raw = _correct(decoded, a, b, scaling)
    clipped = raw.clamp(grid.smallest, grid.largest)
    return clipped.to(torch.float32).masked_fill_(decoded == 0, 0.0), clipped == raw


def straight_through(
    grad_scale: torch.Tensor, base: torch.Tensor, inside: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients (dA [r, G], dB [O, r]) from dL/ds_eff [O, G]: the rounding passes the gradient, the clip stops it outside its range.

    inside: the mask that `round_scales` returned for the same factors.
    """
    grad = spec.grid.decode(base).mul_(grad_scale.to(torch.float32)).mul_(inside)
    return (b.to(torch.float32).T @ grad).mul_(scaling).to(a.dtype), (grad @ a.to(torch.float32).T).mul_(scaling).to(b.dtype)


def _correct(decoded: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float) -> torch.Tensor:
    delta = b.to(torch.float64) @ a.to(torch.float64)
    return delta.mul_(scaling).add_(1.0).mul_(decoded)


def require_finite(name: str, a: torch.Tensor, b: torch.Tensor) -> None:
    """Raise FormatError when trained factors hold NaN or infinity; `name` is the layer."""
    if not bool(torch.isfinite(a).all() and torch.isfinite(b).all()):
        raise FormatError(
            "adapter factors hold NaN or infinity",
            where=name,
            remedy="training diverged: use an earlier checkpoint or a lower learning rate",
        )
