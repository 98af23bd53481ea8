"""QAST: the effective scales of a Scale-QLoRA adapter, on the grid. One function, called by every forward pass and by the merge.

s_eff = grid(clip(s0 * (1 + scaling * B A), s_min, s_max)),   scaling = alpha / r      (scale-qlora §3; design.md "Scale-QLoRA")

s0 [O, G] are the decoded base scales, B [O, r] and A [r, G] the trained factors. The rounding is `grid.encode`: nearest with ties to even on
E4M3 under the 448 ceiling clamp, nearest in the log2 domain on E8M0. Because the merge writes exactly the bytes that this function returned in the
forward pass, max |dW| of a merge is 0 by construction.

The product is taken in float64. In float32 its last bit depends on the number of threads and on the device, and about one block in a million lies
close enough to a rounding boundary for that bit to move its byte; then a plane merged elsewhere would differ from the one trained.

A block whose base scale is 0 stays 0: a multiplicative correction cannot revive it (field case FMT-04).
"""

from __future__ import annotations

import torch

from prism_ray.core.errors import FormatError
from prism_ray.formats.spec import FormatSpec


def corrected_scales(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec) -> torch.Tensor:
    """Real-valued s0 * (1 + scaling * B A), float64 [O, G], before clip and rounding. base: uint8 bytes [O, G]."""
    return _correct(spec.grid.decode(base), a, b, scaling)


def effective_scales(base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec) -> torch.Tensor:
    """The on-grid scale bytes uint8 [O, G] for base bytes [O, G], A [r, G], B [O, r]; see the module docstring.

    NaN factors give an illegal byte that decodes to NaN, so that the layer's output is NaN. The loss need not be: torch's attention on CPUs returns
    zeros for NaN queries and keys. Hence `require_finite` before factors are saved or merged.
    """
    return round_scales(base, a, b, scaling, spec)[0]


def round_scales(
    base: torch.Tensor, a: torch.Tensor, b: torch.Tensor, scaling: float, spec: FormatSpec
) -> tuple[torch.Tensor, torch.Tensor]:
    """(`effective_scales`, inside): `inside` is bool [O, G], true where the clip left the scale alone, which is where a gradient passes."""
    grid = spec.grid
    decoded = grid.decode(base)
    raw = _correct(decoded, a, b, scaling)
    clipped = raw.clamp(grid.smallest, grid.largest)
    return grid.encode(clipped.to(torch.float32)).mul_(decoded != 0), clipped == raw


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
