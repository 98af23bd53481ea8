"""What is checked before an adapter touches a base (field cases ADP-03, ADP-04, ADP-06)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from prism_ray.adapters.admission import load_adapter
from prism_ray.adapters.merge import adapter_layers, write_scale_plane
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.core.errors import CheckpointError, FingerprintMismatch, GridMismatch, ModelError, PrismError
from prism_ray.core.manifest import MANIFEST_NAME
from prism_ray.formats.modules import planes
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.models.tiny import tiny_llama

IDS = torch.arange(12).reshape(1, 12)


def base(seed: int = 0, format: str = "nvfp4"):
    model = tiny_llama(seed)
    quantize_model(model, QuantPolicy(format=format))
    return model


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    model = base()
    config = ScaleQLoraConfig(r=2, code_plane=code_plane_fingerprint(planes(model)), scale_plane=scale_plane_fingerprint(planes(model)))
    peft = get_peft_model(model, config)
    torch.manual_seed(0)
    for layer in adapter_layers(peft).values():
        torch.nn.init.normal_(layer.qast_B["default"], std=0.5)
    peft.save_pretrained(tmp_path / "adapter")
    write_scale_plane(peft, tmp_path / "adapter")
    torch.save(peft(IDS).logits, tmp_path / "logits.pt")
    return tmp_path / "adapter"


def test_the_right_adapter_on_the_right_base_gives_the_trained_logits(adapter: Path):
    model = load_adapter(base(), adapter)
    assert torch.equal(model(IDS).logits, torch.load(adapter.parent / "logits.pt"))
    assert not torch.equal(model(IDS).logits, base()(IDS).logits)


def rewrite(adapter: Path, tensors: dict[str, torch.Tensor]) -> None:
    save_file(tensors, adapter / "adapter_model.safetensors")
    (adapter / MANIFEST_NAME).unlink()


def other_base(adapter: Path) -> tuple[object, type[PrismError], str]:
    return base(seed=1), FingerprintMismatch, "code_plane"


def other_format(adapter: Path) -> tuple[object, type[PrismError], str]:
    config = json.loads((adapter / "adapter_config.json").read_text()) | {"code_plane": None, "scale_plane": None}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    (adapter / MANIFEST_NAME).unlink()
    return base(format="mxfp4"), GridMismatch, "e4m3"


def truncated(adapter: Path) -> tuple[object, type[PrismError], str]:
    path = adapter / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 9 // 10])
    return base(), CheckpointError, "truncated"


def tampered(adapter: Path) -> tuple[object, type[PrismError], str]:
    path = adapter / "scale_plane.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))
    return base(), CheckpointError, "SHA-256"


def wrong_prefix(adapter: Path) -> tuple[object, type[PrismError], str]:
    tensors = load_file(adapter / "adapter_model.safetensors")
    rewrite(adapter, {name.replace("model.layers", "model.language_model.layers"): tensor for name, tensor in tensors.items()})
    return base(), CheckpointError, "belongs to no quantized layer"


def no_adapter(adapter: Path) -> tuple[object, type[PrismError], str]:
    (adapter / "adapter_config.json").unlink()
    return base(), ModelError, "no adapter_config.json"


@pytest.mark.parametrize("fault", [other_base, other_format, truncated, tampered, wrong_prefix, no_adapter])
def test_a_wrong_or_damaged_adapter_is_refused_and_the_base_untouched(adapter: Path, fault):
    model, kind, text = fault(adapter)
    before = model(IDS).logits
    with pytest.raises(kind) as caught:
        load_adapter(model, adapter)
    assert text in str(caught.value)
    assert "\n" not in str(caught.value)
    assert torch.equal(model(IDS).logits, before)
