"""Admission: what is checked before an adapter's tensors touch a base.

An adapter belongs to one code plane and one base scale plane; their fingerprints stand in its config and are compared with the base's (field case
ADP-03). Its files are checked against its manifest, and its keys against the layers they are for (field cases ADP-04, ADP-06).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors.torch import load_file

from prism_ray.adapters.merge import ADAPTER_KIND, PEFT_PREFIX
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.core.errors import CheckpointError, FingerprintMismatch, ModelError
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.formats.modules import planes
from prism_ray.formats.safetensors_io import check_safetensors
from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint


def load_adapter(model: Any, folder: Path | str, *, adapter: str = "default") -> PeftModel:
    """`PeftModel.from_pretrained` after every check. Raises ModelError, CheckpointError, FingerprintMismatch, GridMismatch; `model` is untouched then."""
    folder = Path(folder)
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise ModelError(
            "no adapter_config.json, so this is no adapter folder", where=str(folder), remedy="give the folder that training wrote"
        )
    if (folder / MANIFEST_NAME).is_file():
        read_manifest(folder, ADAPTER_KIND)
    check_safetensors(folder / "adapter_model.safetensors")
    values = json.loads(path.read_text())
    if values.get("peft_type") != "SCALE_QLORA":
        raise ModelError(f"holds a {values.get('peft_type')} adapter, not a Scale-QLoRA one", where=str(path))
    base = planes(model)
    for key, found in (("code_plane", code_plane_fingerprint), ("scale_plane", scale_plane_fingerprint)):
        if values.get(key) not in (None, found(base)):
            raise FingerprintMismatch(
                f"the adapter's {key} is {values[key][:12]}, the base has {found(base)[:12]}",
                where=str(folder),
                remedy="use the base it was trained on",
            )
    for name in load_file(folder / "adapter_model.safetensors"):
        layer = name.removeprefix(PEFT_PREFIX).rsplit(".qast_", 1)[0]
        if layer not in base:
            raise CheckpointError(
                f"tensor '{name}' belongs to no quantized layer of the base", where=str(folder), remedy="use the base it was trained on"
            )
    return PeftModel.from_pretrained(model, str(folder), adapter_name=adapter, config=ScaleQLoraConfig.from_pretrained(str(folder)))
