"""Foreign checkpoint layouts against the code that other people read them with: transformers' gpt-oss and FP8 loaders, and a plain forward of the experts.

An import-export round trip can be wrong the same way twice (field case FMT-08), so the tests compare forward outputs and foreign loaders' weights.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, GptOssConfig, GptOssForCausalLM, Mxfp4Config, Qwen3MoeConfig

from prism_ray.formats import compressed_tensors, modelopt
from prism_ray.formats.gpt_oss import ExpertWeight, parameter, read_quantized, write_quantized
from prism_ray.formats.sources import TensorSource
from prism_ray.formats.spec import FORMATS
from prism_ray.quantizers.rtn import rtn

MXFP4 = FORMATS["mxfp4"]
IDS = torch.tensor([[1, 5, 9, 40, 20, 7], [3, 3, 3, 25, 11, 0]])


def tiny_gpt_oss() -> GptOssForCausalLM:
    torch.manual_seed(11)
    config = GptOssConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        layer_types=["sliding_attention", "full_attention"],
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = GptOssForCausalLM(config)
    with torch.no_grad():
        for weight in model.parameters():
            # Large enough that the experts matter in the logits, biases included.
            weight.copy_(torch.randn(weight.shape) * 0.2)
    return model.to(torch.bfloat16).eval()


def rounding_bound(gate: torch.Tensor, up: torch.Tensor, terms: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """First-order bound [..., H] on the float32 error of an expert's output, u = 2^-24.

    terms [..., 2, F]: sums of the magnitudes that gate and up add (64 products and a bias: 65 roundings at most). g sigmoid(1.702 g) has a slope below 1.1, the
    product with up + 1 passes both errors on, and its five operations add a rounding each; the last sum has 32 products and a bias.
    """
    u = 2.0**-24
    hidden = ((up + 1) * gate * torch.sigmoid(1.702 * gate)).abs()
    error = 65 * u * (1.1 * (up + 1).abs() * terms[..., 0, :] + gate.abs() * terms[..., 1, :]) + 5 * u * hidden
    return (error + 33 * u * hidden) @ down.abs().T


def expert_names(model) -> list[str]:
    return [name for name, _ in model.named_parameters() if name.endswith((".gate_up_proj", ".down_proj"))]


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> tuple[Path, GptOssForCausalLM, dict[str, ExpertWeight]]:
    """(folder that we wrote, the model with our dequantized experts in place, its experts)."""
    model = tiny_gpt_oss()
    plain, quantized = dict(model.state_dict()), {}
    for name in expert_names(model):
        tensor, _ = rtn(plain.pop(name).transpose(1, 2).float(), MXFP4)
        bias = plain.pop(f"{name}_bias")
        quantized[name] = ExpertWeight(tensor=tensor, rows="interleaved" if name.endswith("gate_up_proj") else "single", bias=bias)
    folder = tmp_path_factory.mktemp("gpt-oss") / "q"
    write_quantized(folder, quantized, plain, model.config.to_dict())
    for name, weight in quantized.items():
        model.get_parameter(name).data = parameter(weight.tensor)
    return folder, model, quantized


@torch.no_grad()
def test_transformers_loads_our_folder_and_gives_our_logits(written):
    folder, model, _ = written
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, quantization_config=Mxfp4Config(dequantize=True)).eval()
    for name in expert_names(model):
        assert torch.equal(theirs.get_parameter(name), model.get_parameter(name)), name
    assert torch.equal(theirs(IDS).logits, model(IDS).logits)
    # The logits depend on the experts' row order at all: with gate and up exchanged they differ.
    experts = theirs.model.layers[0].mlp.experts
    experts.gate_up_proj.data = experts.gate_up_proj.data.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    assert not torch.allclose(theirs(IDS).logits, model(IDS).logits, atol=1e-2)


@torch.no_grad()
def test_experts_against_a_plain_forward(written):
    # Independent of transformers' reading: gate = rows 0, 2, 4 … of the file's codes, decoded one nibble at a time; one expert, one token, float64.
    folder, model, _ = written
    stored = load_file(folder / "model.safetensors")
    values = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    values += [-value for value in values]

    def matrix(name: str, expert: int) -> torch.Tensor:
        blocks, scales = stored[f"{name}_blocks"][expert], stored[f"{name}_scales"][expert]
        out = torch.zeros(blocks.shape[0], blocks.shape[1] * 32, dtype=torch.float64)
        for row in range(blocks.shape[0]):
            for column in range(out.shape[1]):
                byte = int(blocks[row, column // 32, column % 32 // 2])
                code = byte >> 4 if column % 2 else byte & 15
                out[row, column] = values[code] * 2.0 ** (int(scales[row, column // 32]) - 127)
        return out

    prefix, expert = "model.layers.1.mlp.experts", 3
    x = torch.randn(64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    both = matrix(f"{prefix}.gate_up_proj", expert) @ x.double() + stored[f"{prefix}.gate_up_proj_bias"][expert].double()
    gate, up = both[0::2].clamp(max=7.0), both[1::2].clamp(-7.0, 7.0)
    hidden = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    expected = matrix(f"{prefix}.down_proj", expert) @ hidden + stored[f"{prefix}.down_proj_bias"][expert].double()
    module = model.model.layers[1].mlp.experts.float()
    found = module(x.float()[None], torch.tensor([[expert]]), torch.ones(1, 1))[0]
    sizes = matrix(f"{prefix}.gate_up_proj", expert).abs() @ x.double().abs() + stored[f"{prefix}.gate_up_proj_bias"][expert].double().abs()
    bound = rounding_bound(gate, up, torch.stack([sizes[0::2], sizes[1::2]]), matrix(f"{prefix}.down_proj", expert))
    assert bool(((found.double() - expected).abs() <= bound + 2.0**-24 * expected.abs()).all())
    assert float((bound / expected.abs().max()).max()) < 1e-3  # the bound can fail: a wrong row order is off by the size of the output
    module.to(torch.bfloat16)


@torch.no_grad()
def test_rows_in_the_other_order_give_the_same_output(written):
    # Contiguous [gate; up] rows, used as such, against transformers' interleaved forward of the same expert.
    _, model, quantized = written
    weight = quantized["model.layers.0.mlp.experts.gate_up_proj"].with_rows("contiguous")
    down = quantized["model.layers.0.mlp.experts.down_proj"]
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(4))
    rows = weight.tensor[2].dequantize()
    gate, up = (x @ rows.T + weight.bias[2].float()).chunk(2, dim=-1)
    gate, up = gate.clamp(max=7.0), up.clamp(-7.0, 7.0)
    expected = ((up + 1) * gate * torch.sigmoid(1.702 * gate)) @ down.tensor[2].dequantize().T + down.bias[2].float()
    module = model.model.layers[0].mlp.experts.float()
    found = module(x, torch.full((5, 1), 2), torch.ones(5, 1))
    module.to(torch.bfloat16)
    sizes = (x.abs() @ rows.abs().T + weight.bias[2].float().abs()).unflatten(-1, (2, -1))
    # Both are float32 sums of the same terms, so each is within the bound of the exact one.
    bound = 2 * rounding_bound(gate, up, sizes, down.tensor[2].dequantize())
    assert bool(((found - expected).abs() <= bound + 2.0**-23 * expected.abs()).all())


def test_what_transformers_gives_is_read_back(written):
    folder, model, quantized = written
    again, _ = read_quantized(folder)
    for name, weight in again.items():
        assert torch.equal(parameter(weight.tensor), model.get_parameter(name))
        assert torch.equal(weight.tensor.scales, quantized[name].tensor.scales)


def test_fp8_source_against_transformers_own_dequantization(tmp_path):
    # transformers dequantizes FP8 on a CPU where blocks divide the weight: the same product in float32, rounded once to bfloat16, so bit for bit.
    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=32,
        num_experts=3,
        num_experts_per_tok=2,
    )
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors[name].float()
        blocks = weight.unflatten(0, (-1, 32)).unflatten(2, (-1, 32))
        scale = blocks.abs().amax(dim=(1, 3)) / 448
        tensors[name] = (blocks / scale[:, None, :, None]).flatten(2).flatten(0, 1).to(torch.float8_e4m3fn)
        tensors[f"{name}_scale_inv"] = scale
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    settings = {"quant_method": "fp8", "weight_block_size": [32, 32], "activation_scheme": "dynamic"}
    (tmp_path / "config.json").write_text(
        json.dumps(json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": settings})
    )
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    source = TensorSource(tmp_path)
    for name in source.names():
        if ".experts." not in name:
            assert torch.equal(source.get(name, torch.bfloat16), theirs[name]), name
    for index in range(3):
        gate, up = (source.get(f"model.layers.0.mlp.experts.{index}.{part}_proj.weight", torch.bfloat16) for part in ("gate", "up"))
        assert torch.equal(torch.cat([gate, up]), theirs["model.layers.0.mlp.experts.gate_up_proj"][index])


@pytest.mark.parametrize("amax", [1e-3, 0.75, 2688.0, 3e4])
def test_modelopt_and_compressed_tensors_hold_the_same_weight(amax):
    # FMT-02 over magnitudes: whatever the size of the scalar, both conventions give the same weight, within E2M1 and E4M3 of the original.
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(1))
    weight *= amax / weight.abs().max()
    tensor, _ = rtn(weight, FORMATS["nvfp4"])
    ours = modelopt.from_checkpoint("n", modelopt.to_checkpoint("n", tensor)).dequantize()
    theirs = compressed_tensors.from_checkpoint("n", compressed_tensors.to_checkpoint("n", tensor), FORMATS["nvfp4"]).dequantize()
    assert torch.equal(ours, theirs)
    # A block's scale is within 2^-4 of its maximum over 6, and half the widest E2M1 step is 1 of 6: at most (1 + 2^-4) / 6 of the block's maximum,
    # and a scale rounded down clips its maximum by at most 2^-4 of it.
    block = weight.unflatten(-1, (-1, 16)).abs().amax(-1, keepdim=True)
    assert bool(((ours - weight).unflatten(-1, (-1, 16)).abs() <= (1 + 2**-4) / 6 * block).all())
