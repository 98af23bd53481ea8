"""prism_ray.formats.gpt_oss: golden bytes, explicit row orders, and refusal of every other packing (FMT-01, FMT-08)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism_ray.core.errors import CheckpointError, FormatError
from prism_ray.core.manifest import read_manifest
from prism_ray.formats import e2m1, gpt_oss
from prism_ray.formats.checkpoint import KIND
from prism_ray.formats.gpt_oss import ExpertWeight, contiguous, from_checkpoint, interleaved, read_quantized, to_checkpoint, write_quantized
from prism_ray.formats.spec import FORMATS
from prism_ray.formats.tensor import QuantTensor
from prism_ray.quantizers.rtn import rtn

MXFP4 = FORMATS["mxfp4"]
GATE_UP, DOWN = "model.layers.0.mlp.experts.gate_up_proj", "model.layers.0.mlp.experts.down_proj"
CONFIG = {"model_type": "gpt_oss", "hidden_size": 64}


def random(seed: int, *shape: int) -> QuantTensor:
    return rtn(torch.randn(shape, generator=torch.Generator().manual_seed(seed)), MXFP4)[0]


def experts(rows: gpt_oss.RowOrder = "interleaved") -> dict[str, ExpertWeight]:
    gate_up = ExpertWeight(tensor=random(1, 2, 8, 64), rows=rows, bias=torch.arange(16.0).view(2, 8).to(torch.bfloat16))
    return {GATE_UP: gate_up, DOWN: ExpertWeight(tensor=random(2, 2, 64, 32), rows="single", bias=torch.ones(2, 64))}


@pytest.fixture
def folder(tmp_path) -> Path:
    write_quantized(tmp_path / "q", experts(), {"model.norm.weight": torch.ones(64)}, CONFIG)
    return tmp_path / "q"


def edit(folder: Path, change) -> None:
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_golden_bytes():
    # 32 values that no other order of nibbles leaves alone, negative codes and -0 among them; scale byte 128 is 2.
    codes = (torch.arange(32, dtype=torch.uint8) * 5 + 1) % 16
    tensor = QuantTensor(
        codes=e2m1.pack(codes.view(1, 1, 32)), scales=torch.tensor([[[128]]], dtype=torch.uint8), tensor_scale=torch.ones(1), format=MXFP4
    )
    stored = to_checkpoint(DOWN, ExpertWeight(tensor=tensor, rows="single"))
    blocks = stored[f"{DOWN}_blocks"]
    assert blocks.shape == (1, 1, 1, 16) and blocks[0, 0, 0, :4].tolist() == [0x61, 0x0B, 0xA5, 0x4F]
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    assert torch.equal(gpt_oss.parameter(tensor, torch.float32)[0, :, 0], 2 * table[codes.long()])


def test_gate_of_ones_and_up_of_twos():
    # FMT-08's own case: 2 experts, inner width 4, hidden 64. In the file even rows are gate, odd rows up.
    weight = torch.empty(2, 8, 64)
    weight[:, 0::2], weight[:, 1::2] = 1.0, 2.0
    loaded = from_checkpoint(GATE_UP, to_checkpoint(GATE_UP, ExpertWeight(tensor=rtn(weight, MXFP4)[0], rows="interleaved")))
    assert loaded.rows == "interleaved"
    halves = loaded.with_rows("contiguous").tensor.dequantize()
    assert torch.equal(halves[:, :4], torch.ones(2, 4, 64)) and torch.equal(halves[:, 4:], torch.full((2, 4, 64), 2.0))


def test_row_orders_are_inverse_and_explicit():
    rows = torch.arange(6)
    assert contiguous(rows, 0).tolist() == [0, 2, 4, 1, 3, 5] and interleaved(rows, 0).tolist() == [0, 3, 1, 4, 2, 5]
    assert torch.equal(interleaved(contiguous(rows, 0), 0), rows)
    start = experts()[GATE_UP]
    moved = start.with_rows("contiguous")
    assert moved.rows == "contiguous" and not torch.equal(moved.tensor.codes, start.tensor.codes)
    assert moved.bias is not None and moved.bias[0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7]
    back = moved.with_rows("interleaved")
    assert torch.equal(back.tensor.codes, start.tensor.codes) and torch.equal(back.tensor.scales, start.tensor.scales)
    # Files are interleaved, whichever order the caller holds.
    assert all(
        torch.equal(a, b) for a, b in zip(to_checkpoint(GATE_UP, start).values(), to_checkpoint(GATE_UP, moved).values(), strict=True)
    )
    with pytest.raises(FormatError, match="single cannot become contiguous"):
        experts()[DOWN].with_rows("contiguous")
    with pytest.raises(FormatError, match="said to be single"):
        to_checkpoint(GATE_UP, ExpertWeight(tensor=random(1, 2, 8, 64), rows="single"))
    with pytest.raises(FormatError, match="said to be contiguous"):
        to_checkpoint(DOWN, ExpertWeight(tensor=random(1, 2, 8, 64), rows="contiguous"))
    with pytest.raises(FormatError, match="7 rows"):
        ExpertWeight(tensor=random(1, 2, 7, 64), rows="interleaved")
    with pytest.raises(FormatError, match="bias has shape"):
        ExpertWeight(tensor=random(1, 2, 8, 64), rows="interleaved", bias=torch.zeros(2, 4))


def test_width_2880_is_ninety_blocks():
    stored = to_checkpoint(DOWN, ExpertWeight(tensor=random(1, 1, 2, 2880), rows="single"))
    assert stored[f"{DOWN}_blocks"].shape == (1, 2, 90, 16) and stored[f"{DOWN}_scales"].shape == (1, 2, 90)
    assert from_checkpoint(DOWN, stored).tensor.shape == (1, 2, 2880)


@pytest.mark.parametrize("last", [15, 32])
def test_blocks_of_another_packing(last):
    stored = to_checkpoint(GATE_UP, experts()[GATE_UP])
    stored[f"{GATE_UP}_blocks"] = torch.zeros(2, 8, 2, last, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=rf"shape \[2, 8, 2, {last}\], expected .* 16\]"):
        from_checkpoint(GATE_UP, stored)


def test_other_refusals():
    stored = to_checkpoint(GATE_UP, experts()[GATE_UP])
    with pytest.raises(CheckpointError, match=r"'.*_scales' has shape \[2, 8, 1\], the blocks need \[2, 8, 2\]"):
        from_checkpoint(GATE_UP, stored | {f"{GATE_UP}_scales": stored[f"{GATE_UP}_scales"][..., :1]})
    scales = stored[f"{GATE_UP}_scales"].clone()
    scales[1, 3, 0] = 255
    with pytest.raises(FormatError, match=r"0xFF at \[1, 3, 0\]"):
        from_checkpoint(GATE_UP, stored | {f"{GATE_UP}_scales": scales})
    with pytest.raises(CheckpointError, match="expected bytes"):
        from_checkpoint(GATE_UP, stored | {f"{GATE_UP}_blocks": stored[f"{GATE_UP}_blocks"].float()})
    for end in ("_blocks", "_scales"):
        with pytest.raises(CheckpointError, match=f"'{GATE_UP}{end}' is missing"):
            from_checkpoint(GATE_UP, {name: t for name, t in stored.items() if not name.endswith(end)})
    with pytest.raises(FormatError, match="experts are mxfp4"):
        ExpertWeight(tensor=rtn(torch.randn(2, 4, 32), FORMATS["nvfp4"])[0], rows="single")


def test_read_then_write_gives_the_same_files(folder, tmp_path):
    quantized, plain = read_quantized(folder)
    assert set(quantized) == {GATE_UP, DOWN} and set(plain) == {"model.norm.weight"}
    assert quantized[GATE_UP].rows == "interleaved" and quantized[DOWN].bias is not None
    assert read_manifest(folder, KIND)["row_order"] == {"gate_up_proj": "interleaved"}
    config = json.loads((folder / "config.json").read_text())
    # Held in the other order meanwhile: the files come out the same.
    quantized[GATE_UP] = quantized[GATE_UP].with_rows("contiguous")
    write_quantized(tmp_path / "again", quantized, plain, config)
    for file in folder.iterdir():
        assert file.read_bytes() == (tmp_path / "again" / file.name).read_bytes(), file.name
    assert config["quantization_config"]["quant_method"] == "mxfp4"


def test_a_folder_that_lacks_something(folder):
    edit(folder, lambda tensors: tensors.pop(f"{DOWN}_scales"))
    with pytest.raises(CheckpointError, match=f"'{DOWN}_scales' is missing"):
        read_quantized(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(CheckpointError, match="'None' is not gpt-oss's mxfp4"):
        read_quantized(folder)
