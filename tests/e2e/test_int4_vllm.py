"""An INT4 checkpoint of ours in vllm-cpu: the planes it loads, its own WNA16 kernel against our dequantized product, and greedy text against our forward.

vllm-cpu builds that kernel for AVX-512 machines and not into its AVX2 library; elsewhere loading is still tested, and what runs the kernel is skipped.
"""

from __future__ import annotations

import gc
import math
import os

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from prism_ray.calibrate.quantize import quantize_to_folder
from prism_ray.formats import e2m1
from prism_ray.formats.checkpoint import load_quantized_model, read_quantized
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import TINY_VOCAB_SIZE, tiny_tokenizer

pytestmark = pytest.mark.e2e

PROMPTS = ([1, 5, 9, 40, 200, 7], [3, 250, 11, 8, 120, 33, 64, 90], [17, 17, 2])
NEW_TOKENS = 16
SERVED = {
    "self_attn.qkv_proj": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj": ("self_attn.o_proj",),
    "mlp.gate_up_proj": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj": ("mlp.down_proj",),
}


def small_llama() -> LlamaForCausalLM:
    """Random, with heads of 64 (vllm-cpu's attention has no 16) and weights large enough that rounding noise decides no token."""
    config = LlamaConfig(
        vocab_size=TINY_VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=256,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=0.1, generator=generator)
    return model.to(torch.bfloat16)


@pytest.fixture(scope="module", params=["int4-g32", "int4-g64"])
def served(request, tmp_path_factory):
    """(folder, vllm.LLM) with the engine in this process, so that its layers can be called."""
    pytest.importorskip("vllm", reason="needs the vllm extra")
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_NO_USAGE_STATS": "1"}
    from vllm import LLM

    folder = tmp_path_factory.mktemp(request.param) / "model"
    quantize_to_folder(small_llama(), tiny_tokenizer(), QuantPolicy(format=request.param), folder)
    engine = LLM(model=str(folder), dtype="bfloat16", enforce_eager=True, max_model_len=128, max_num_seqs=4, enable_prefix_caching=False)
    yield folder, engine
    del engine
    gc.collect()


@pytest.fixture
def kernel(served):
    """Skips where vllm's extension library was built without the kernel."""
    if not hasattr(torch.ops._C, "cpu_gemm_wna16"):
        pytest.skip("vllm-cpu has its WNA16 kernel on AVX-512 machines only")


def fused(quantized, layer: int, name: str):
    """The QuantTensors that vllm stacks into its layer `name`."""
    return [quantized[f"model.layers.{layer}.{part}"] for part in SERVED[name]]


@torch.no_grad()
def gaps(model, prompt: list[int], tokens: list[int]) -> list[float]:
    """By how much our best logit exceeds that of each token, in bfloat16 steps at the best logit; 0 where it is our own greedy choice."""
    ids, out = list(prompt), []
    for token in tokens:
        logits = model(torch.tensor([ids])).logits[0, -1].float()
        best = float(logits.max())
        out.append((best - float(logits[token])) / 2.0 ** (math.floor(math.log2(best)) - 7))
        ids.append(token)
    return out


def test_vllm_loads_our_codes_and_scales_byte_for_byte(served):
    """Its layout after loading: 16 output channels a block, [out / 16, in * 2] words that hold 8 channels each; scales [groups, out]."""
    folder, engine = served
    _, quantized, _ = read_quantized(folder)

    def compare(model):
        for layer in range(2):
            for name in SERVED:
                module = model.get_submodule(f"model.layers.{layer}.{name}")
                parts = fused(quantized, layer, name)
                assert type(module.scheme.kernel).__name__ == "CPUWNA16LinearKernel"
                rows, columns = sum(part.shape[0] for part in parts), parts[0].shape[1]
                words = module.weight_packed.data.view(rows // 16, columns, 2).permute(1, 0, 2).reshape(columns, rows // 8).contiguous()
                assert torch.equal(e2m1.unpack(words.view(torch.uint8)).T, torch.cat([e2m1.unpack(part.codes) for part in parts]))
                scales = torch.cat([part.format.grid.decode(part.scales) for part in parts])
                assert module.weight_scale.dtype == torch.bfloat16 and torch.equal(module.weight_scale.data.float().T, scales)
        return True

    assert engine.apply_model(compare) == [True]


@pytest.mark.parametrize("tokens", [1, 7, 16])
def test_every_projection_is_our_dequantized_product(served, kernel, tokens):
    """Weights and result are rounded to bfloat16, each by 2^-9 of itself at most; errors of the terms average out, so their sum bounds the norm."""
    folder, engine = served
    _, quantized, _ = read_quantized(folder)

    def measure(model):
        found = {}
        for layer in range(2):
            for name in SERVED:
                module = model.get_submodule(f"model.layers.{layer}.{name}")
                weight = torch.cat([part.dequantize() for part in fused(quantized, layer, name)]).double()
                x = torch.randn(tokens, weight.shape[1], generator=torch.Generator().manual_seed(layer)).to(torch.bfloat16)
                wanted = x.double() @ weight.T
                found[f"{layer}.{name}"] = float((module.quant_method.apply(module, x, None).double() - wanted).norm() / wanted.norm())
        return found

    errors = engine.apply_model(measure)[0]
    assert len(errors) == 8 and max(errors.values()) < 2 * 2.0**-9, errors


def test_greedy_text_is_that_of_our_own_forward(served, kernel):
    """A random model ties now and then: two equal bfloat16 logits, of which either may be taken. Two steps are one rounding on either side."""
    from vllm import SamplingParams

    folder, engine = served
    ours = load_quantized_model(folder)
    outputs = engine.generate(
        [{"prompt_token_ids": prompt} for prompt in PROMPTS],
        SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True),
        use_tqdm=False,
    )
    found = [gap for prompt, output in zip(PROMPTS, outputs, strict=True) for gap in gaps(ours, prompt, list(output.outputs[0].token_ids))]
    assert len(found) == len(PROMPTS) * NEW_TOKENS and max(found) <= 2 and sum(gap == 0 for gap in found) >= 0.9 * len(found)
