"""Scale-QLoRA on a GPU: the bytes that a GPU trains are the bytes that a CPU merges."""

from __future__ import annotations

import pytest
import torch
from peft import get_peft_model

from prism_ray.adapters.qast import effective_scales
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FORMATS, FP4_FORMATS
from prism_ray.models.tiny import tiny_llama

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_effective_scales_of_gpu_and_cpu_are_the_same_bytes(name: str):
    spec = FORMATS[name]
    generator = torch.Generator().manual_seed(0)
    base = torch.randint(1, 126, (4096, 256), generator=generator, dtype=torch.uint8)
    a, b = torch.randn(16, 256, generator=generator) * 0.2, torch.randn(4096, 16, generator=generator) * 0.2
    on_cpu = effective_scales(base, a, b, 2.0, spec)
    on_gpu = effective_scales(base.cuda(), a.cuda(), b.cuda(), 2.0, spec)
    assert torch.equal(on_cpu, on_gpu.cpu())


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_training_steps_on_the_gpu_lower_the_loss(name: str):
    model = tiny_llama().cuda()
    quantize_model(model, QuantPolicy(format=name))
    peft = get_peft_model(model, ScaleQLoraConfig(r=2, alpha=8.0))
    ids = torch.randint(0, 288, (4, 16), generator=torch.Generator().manual_seed(0)).cuda()
    optimizer = torch.optim.AdamW([value for value in peft.parameters() if value.requires_grad], lr=2e-2)
    losses = []
    for _ in range(20):
        loss = peft(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    assert losses[-1] < losses[0]
