"""gptq_block against prism_ray.quantizers.gptq, bit by bit: values and errors of a block are the same float32 operations in the same order.

The same tests run twice: here on the CPU path, and in a process of its own under Triton's interpreter (`test_under_the_interpreter`), since TRITON_INTERPRET
must be set before prism_kernels is imported. Between blocks both call torch.bmm on the same numbers, so on one machine whole panels agree bit for bit as well.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from prism_kernels.dispatch import INTERPRETED
from prism_kernels.gptq import GPTQ_TILES, GptqTile, gptq_block, gptq_block_ref

from prism_ray.formats.codes import E2M1
from prism_ray.formats.spec import FORMATS
from prism_ray.quantizers.gptq import PANEL, _panel, sweep

NAMES = ("nvfp4", "mxfp4")


@pytest.mark.skipif(INTERPRETED, reason="this is the inner run")
@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="Triton is not installed")
def test_under_the_interpreter():
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(Path(__file__).resolve())],
        cwd=Path(__file__).resolve().parents[2],
        env={**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout[-6000:] + done.stderr[-2000:]


def problem(experts: int, columns: int, rows: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(work, steps, upper): random weights, steps that clip some of them, and a true factor of a damped inverse."""
    generator = torch.Generator().manual_seed(seed)
    work = torch.randn(experts, columns, rows, generator=generator)
    steps = torch.rand(experts, columns, rows, generator=generator) * 0.5 + 0.05
    x = torch.randn(experts, 2 * columns + 3, columns, generator=generator, dtype=torch.float64)
    hessian = x.mT @ x + torch.eye(columns, dtype=torch.float64)
    upper = torch.linalg.cholesky(torch.linalg.inv(hessian), upper=True).float()
    return work, steps, upper / upper.diagonal(dim1=-2, dim2=-1).mean()


def same_as_the_library(
    work: torch.Tensor, steps: torch.Tensor, upper: torch.Tensor, name: str, tile: GptqTile | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    expected = work.clone()
    errors = _panel(expected, steps, torch.where(steps > 0, steps, torch.inf), upper, FORMATS[name])
    held, again = work.clone(), work.clone()
    got = gptq_block(held, steps, upper, name, tile=tile)
    reference = gptq_block_ref(again, steps, upper, name)
    assert torch.equal(got, errors) and torch.equal(held, expected)
    assert torch.equal(reference, errors) and torch.equal(again, expected)
    return held, got


def test_hand_worked():
    # Two columns of one row, step 1: 2.6 rounds to 3, e = -0.4 / 2 = -0.2; the second becomes 1 - 0.5 * -0.2 = 1.1 and rounds to 1, e = 0.1 / 4.
    work = torch.tensor([[[2.6], [1.0]]])
    upper = torch.tensor([[[2.0, 0.5], [0.0, 4.0]]])
    error = gptq_block(work, torch.ones(1, 2, 1), upper)
    first = (torch.tensor(2.6) - 3) / 2
    second = torch.tensor(1.0) - 0.5 * first
    assert error[0, :, 0].tolist() == [first.item(), ((second - 1) / 4).item()]
    assert work[0, :, 0].tolist() == [torch.tensor(2.6).item(), second.item()]


@pytest.mark.parametrize("name", NAMES)
def test_ties_zeros_and_clipping(name):
    """A diagonal factor spreads nothing: every column alone, at each midpoint, beside it, at zeros, beyond the grid and under a zero step."""
    middles = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
    values = torch.cat(
        [middles, middles.nextafter(torch.tensor(0.0)), middles.nextafter(torch.tensor(9.0)), torch.tensor([0, 6, 100.0, 1e-45])]
    )
    values = torch.cat([values, -values])
    columns = FORMATS[name].block
    work = values.expand(1, columns, len(values)).clone()
    for step in (1.0, 0.0, 2.0**-9, 448.0):
        steps = torch.full_like(work, step)
        scaled = work * (step or 1.0)
        upper = torch.eye(columns)[None] * 0.3
        held, error = same_as_the_library(scaled, steps, upper, name)
        assert torch.equal(held, scaled)
        rounded = E2M1.decode(E2M1.round_to_codes(values)) * step
        assert torch.equal(error[0, 0], (scaled[0, 0] - rounded) / torch.tensor(0.3))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("experts", "columns", "rows"), [(1, 1, 1), (1, 16, 5), (3, 32, 70), (2, 33, 1), (1, 70, 130)])
def test_the_librarys_panel(name, experts, columns, rows):
    work, steps, upper = problem(experts, columns, rows, columns)
    steps[:, :, ::3] *= 0.1  # clipped: magnitudes above 6 steps
    steps[:, columns // 2, 0] = 0.0
    held, error = same_as_the_library(work, steps, upper, name)
    if columns > 1:
        assert not torch.equal(held, work)  # errors were spread
    assert error.abs().max() > 0


@pytest.mark.parametrize("tile", [*GPTQ_TILES, GptqTile(16, 1)])
def test_every_tile_gives_the_same_bits(tile):
    same_as_the_library(*problem(2, 40, 150, 1), "nvfp4", tile)


def test_a_whole_sweep_made_of_panels():
    """prism_ray's sweep over more than a panel, made with gptq_block: the same values."""
    work, steps, upper = problem(2, PANEL + 48, 6, 7)
    step = steps.unflatten(1, (-1, 16))[:, :, 0].mT.contiguous()  # [E, O, G]
    expected = sweep(work.mT.contiguous(), step, FORMATS["nvfp4"], upper)
    steps = step.repeat_interleave(16, -1).mT.contiguous()
    for start in range(0, work.shape[1], PANEL):
        stop = min(start + PANEL, work.shape[1])
        panel = work[:, start:stop].contiguous()
        error = gptq_block(panel, steps[:, start:stop], upper[:, start:stop, start:stop])
        work[:, start:stop] = panel
        if stop < work.shape[1]:
            work[:, stop:] -= torch.bmm(upper[:, start:stop, stop:].transpose(1, 2), error)
    assert torch.equal(work.mT, expected)


def test_experts_do_not_see_each_other():
    work, steps, upper = problem(3, 16, 20, 9)
    together = gptq_block(work.clone(), steps, upper)
    for e in range(3):
        assert torch.equal(together[e], gptq_block(work[e : e + 1].clone(), steps[e : e + 1], upper[e : e + 1])[0])


def test_no_experts_and_no_rows():
    assert gptq_block(torch.zeros(0, 16, 3), torch.zeros(0, 16, 3), torch.zeros(0, 16, 16)).shape == (0, 16, 3)
    assert gptq_block(torch.zeros(2, 16, 0), torch.zeros(2, 16, 0), torch.zeros(2, 16, 16)).shape == (2, 16, 0)


@pytest.mark.parametrize(
    ("message", "call"),
    [
        ("work is torch.float64", lambda w, s, u: gptq_block(w.double(), s, u)),
        ("contiguous", lambda w, s, u: gptq_block(w.mT, s.mT, u)),
        ("contiguous", lambda w, s, u: gptq_block(w[0], s[0], u)),
        ("must agree", lambda w, s, u: gptq_block(w, s[:, :3].contiguous(), u)),
        ("upper has shape", lambda w, s, u: gptq_block(w, s, u[:, :3])),
        ("no kernel", lambda w, s, u: gptq_block(w, s, u, "int4-g32")),
    ],
)
def test_refusals(message, call):
    with pytest.raises(ValueError, match=message) as caught:
        call(*problem(1, 16, 4, 1))
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(INTERPRETED, reason="the interpreter needs real tensors, as a compiler never has")
def test_torchs_tools_see_the_operator():
    torch.library.opcheck(torch.ops.prism_kernels.gptq_block.default, (*problem(1, 16, 4, 1), 16, []))
