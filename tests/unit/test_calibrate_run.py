"""The layer-streamed pass in one process: what it computes, what a killed run leaves, what stops it, and the command over it."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from prism_ray.calibrate import units, worker
from prism_ray.calibrate.assemble import quantized_model, write_checkpoint
from prism_ray.calibrate.config import CalibrateConfig
from prism_ray.calibrate.run import LocalCrew, calibrate
from prism_ray.calibrate.skeleton import Skeleton
from prism_ray.calibrate.text import make_chunks, make_samples, read_texts
from prism_ray.calibrate.worker import BadSample
from prism_ray.cli.main import run
from prism_ray.core.errors import CalibrationFailed, ConfigError, ModelError
from prism_ray.formats.parameters import meta_model
from prism_ray.formats.policy import DEFAULT_IGNORE, QuantPolicy, make_plan
from prism_ray.hessian.capture import Capture
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe

TEXT = "".join(f"{'the rain in the town ' * (1 + line % 3)}is {line} and on a street\n" for line in range(200))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "text.txt").write_text(TEXT)
    save_tiny(folder / "llama", tiny_llama(num_layers=3, dtype=torch.bfloat16))
    save_tiny(folder / "moe", tiny_qwen3_moe(num_experts=8, dtype=torch.bfloat16))
    return folder


def config(root: Path, model: str = "llama", **values) -> CalibrateConfig:
    data = {"location": str(root / "text.txt"), "samples": 12, "length": 24, "chunk": 2} | values.pop("data", {})
    return CalibrateConfig.load(
        {"model": str(root / model), "data": data, "dtype": "float32", "lanes": 4, "max_fallback_share": 1.0, "options": {"refine": 1}}
        | values
    )


def quiet(line: str) -> None:
    pass


def parts(work: Path) -> dict[str, str]:
    """Digest of every file of planes and records."""
    return {str(path.relative_to(work)): hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(work.rglob("part-*"))}


@pytest.fixture(scope="module")
def undisturbed(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("undisturbed") / "work"
    calibrate(config(root), work, say=quiet)
    return work


def test_a_block_is_quantized_on_what_comes_out_of_the_quantized_ones_before(root, undisturbed):
    """The second block's Gram matrix, read off the records, is that of a model whose first block is quantized already."""
    settings = config(root)
    plan = make_plan(meta_model(root / "llama"), settings.policy)
    model = quantized_model(root / "llama", undisturbed, plan, torch.float32)
    full = load_model(root / "llama", dtype=torch.float32)
    # Blocks after the first in full precision.
    for index in (1, 2):
        model.model.layers[index] = full.model.layers[index]
    seen: list[torch.Tensor] = []
    model.model.layers[1].self_attn.q_proj.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    assert settings.data is not None
    samples = make_samples(read_texts(settings.data), load_tokenizer(root / "llama"), settings.data)
    for sample in samples.tokens:
        model(torch.tensor([sample]))
    x = torch.cat(seen, 1)[0].double()
    planes = units.read_planes(undisturbed / "blocks" / "0001", {"self_attn.q_proj": "nvfp4"})
    weight = full.model.layers[1].self_attn.q_proj.weight.double()
    error = weight - planes["self_attn.q_proj"].dequantize().double()
    expected = float((x @ error.T).square().sum() / (x @ weight.T).square().sum())
    records = {record["name"]: record for record in units.read_records(undisturbed / "blocks" / "0001")}
    record = records["model.layers.1.self_attn.q_proj"]
    assert record["tokens"] == 12 * 24
    # The record is summed in float32 over chunks of two; the reference runs one sample at a time in float64.
    assert record["error_after"] == pytest.approx(expected, rel=1e-4)
    assert record["error_after"] < record["error_before"]


def test_fused_projections_share_their_tensor_scale(root, undisturbed):
    names = {f"self_attn.{name}_proj": "nvfp4" for name in "qkv"} | {"mlp.gate_proj": "nvfp4", "mlp.up_proj": "nvfp4"}
    planes = units.read_planes(undisturbed / "blocks" / "0000", names)
    assert len({float(planes[f"self_attn.{name}_proj"].tensor_scale) for name in "qkv"}) == 1
    assert float(planes["mlp.gate_proj"].tensor_scale) == float(planes["mlp.up_proj"].tensor_scale)


@pytest.mark.parametrize("model", ["llama", "moe"])
def test_the_checkpoint_computes_what_the_pass_propagated(root, tmp_path, model):
    """The pass's own last activations, through the head, equal the loaded checkpoint's logits."""
    settings = config(root, model)
    summary = calibrate(settings, tmp_path / "work", say=quiet)
    plan = make_plan(meta_model(root / model), settings.policy)
    write_checkpoint(root / model, tmp_path / "work", plan, tmp_path / "out", details={"summary": summary})
    loaded = load_model(tmp_path / "out", dtype=torch.float32)
    last = len(list((tmp_path / "work" / "blocks").iterdir()))
    frame = Skeleton(root / model, torch.float32)
    for number, chunk in enumerate(worker.read_chunks(tmp_path / "work" / worker.CHUNKS)):
        hidden = load_file(tmp_path / "work" / "activations" / f"{last:04d}" / f"{number:06d}.safetensors")["hidden"]
        with torch.no_grad():
            # Planes are multiplied at every use here and once there: the same float32 weights, so only sums may differ.
            torch.testing.assert_close(loaded(chunk.input_ids).logits, frame.logits(chunk, hidden), rtol=1e-4, atol=1e-4)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert set(manifest["reports"]) and manifest["summary"]["weights"] == len(manifest["reports"])


def test_a_quantized_head_gets_its_own_statistics(root, tmp_path):
    policy = QuantPolicy(ignore=DEFAULT_IGNORE[2:], untie=True)
    settings = config(root, policy=policy.to_dict())
    summary = calibrate(settings, tmp_path / "work", say=quiet)
    (record,) = units.read_records(tmp_path / "work" / "blocks" / "0003")
    assert record["name"] == "lm_head" and record["tokens"] == 12 * 24 and record["method"] == "gptq"
    assert summary["weights"] == 3 * 7 + 1
    model = quantized_model(root / "llama", tmp_path / "work", make_plan(meta_model(root / "llama"), policy), torch.float32)
    full = load_model(root / "llama", dtype=torch.float32)
    assert torch.equal(model.get_input_embeddings().weight, full.get_input_embeddings().weight)


class Killed(Exception):
    """Stands for the end of the process."""


@pytest.mark.parametrize("after", [1, 2])
def test_a_run_killed_after_a_block_goes_on_with_the_same_bytes(root, undisturbed, tmp_path, after):
    work = tmp_path / "work"
    lines: list[str] = []

    def say(line: str) -> None:
        if line.startswith(f"block {after}/"):
            raise Killed
        lines.append(line)

    with pytest.raises(Killed):
        calibrate(config(root), work, say=say)
    finished = {path: path.stat().st_mtime_ns for path in work.rglob("part-*")}
    assert finished
    calibrate(config(root), work, say=quiet)
    assert parts(work) == parts(undisturbed)
    assert all(path.stat().st_mtime_ns == time for path, time in finished.items()), "a finished block was solved again"


@pytest.mark.parametrize("where", ["solve", "propagate", "collect"])
def test_a_run_killed_inside_a_block_goes_on_with_the_same_bytes(root, undisturbed, tmp_path, monkeypatch, where):
    work = tmp_path / "work"
    true = getattr(LocalCrew, where)

    def killed(self, index, *arguments):
        if index == 1:
            if where == "propagate":
                # Half of the chunks are written.
                true(self, index, [arguments[0][0][:3]])
            if where == "solve":
                true(self, index, [arguments[0][0][:2]], *arguments[1:])
            raise Killed
        return true(self, index, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(LocalCrew, where, killed)
        with pytest.raises(Killed):
            calibrate(config(root), work, say=quiet)
    calibrate(config(root), work, say=quiet)
    assert parts(work) == parts(undisturbed)


def test_a_run_whose_activations_are_lost_replays_them(root, undisturbed, tmp_path):
    work = tmp_path / "work"
    shutil.copytree(undisturbed, work)
    shutil.rmtree(work / "activations")
    shutil.rmtree(work / "blocks" / "0002")
    calibrate(config(root), work, say=quiet)
    assert parts(work) == parts(undisturbed)


def test_a_full_disk_leaves_a_run_that_goes_on(root, undisturbed, tmp_path, monkeypatch):
    work = tmp_path / "work"
    written = 0

    def full(tensors, path, *arguments, **options):
        nonlocal written
        written += 1
        if written == 4:
            Path(path).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return save_file(tensors, path, *arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(units, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            calibrate(config(root), work, say=quiet)
    assert not [path for path in work.rglob("part-*.safetensors") if path.read_bytes() == b"half"]
    calibrate(config(root), work, say=quiet)
    assert parts(work) == parts(undisturbed)


def test_a_work_folder_of_another_run_is_refused(root, undisturbed):
    before = parts(undisturbed)
    with pytest.raises(ConfigError, match=r"belongs to a run with other settings \(options\)"):
        calibrate(config(root, options={"refine": 0}), undisturbed, say=quiet)
    assert parts(undisturbed) == before


@pytest.fixture
def poisoned(root, tmp_path) -> Path:
    """The model with an embedding that is not finite for one token, which only sample 5 holds."""
    settings = config(root)
    assert settings.data is not None
    samples = make_samples(read_texts(settings.data), load_tokenizer(root / "llama"), settings.data)
    others = {token for number, sample in enumerate(samples.tokens) if number != 5 for token in sample}
    (token, *_) = sorted(set(samples.tokens[5]) - others)
    model = load_model(root / "llama", dtype=torch.float32)
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = torch.nan
    return save_tiny(tmp_path / "poisoned", model)


def test_a_sample_that_is_not_finite_stops_the_run_by_name(root, poisoned, tmp_path):
    """Field case CAL-10."""
    settings = config(root).with_overrides({"model": str(poisoned)})
    with pytest.raises(BadSample, match=r"model\.layers\.0\.self_attn\.q_proj, sample 5: its input holds NaN or infinity"):
        calibrate(settings, tmp_path / "work", say=quiet)


def test_a_dropped_sample_is_in_no_sum_of_any_layer(root, poisoned, tmp_path):
    settings = config(root, nonfinite="drop", max_dropped=0.2).with_overrides({"model": str(poisoned)})
    summary = calibrate(settings, tmp_path / "work", say=quiet)
    assert summary["dropped"] == [5]
    records = [record for index in range(3) for record in units.read_records(tmp_path / "work" / "blocks" / f"{index:04d}")]
    assert {record["tokens"] for record in records} == {11 * 24}
    strict = config(root, nonfinite="drop", max_dropped=0.0).with_overrides({"model": str(poisoned)})
    with pytest.raises(CalibrationFailed, match="1 of 12 samples make inputs that are not finite"):
        calibrate(strict, tmp_path / "strict", say=quiet)


def test_padding_counts_in_no_sum(root, tmp_path):
    """Field case CAL-07: rows of several lengths give the same states in chunks of one and of three, up to the sums' rounding."""
    rows = [" ".join(["rain"] * (3 + 5 * (line % 4))) for line in range(9)]
    (tmp_path / "rows.jsonl").write_text("\n".join(json.dumps({"text": row}) for row in rows))
    found = []
    for chunk in (1, 3):
        data = {"location": str(tmp_path / "rows.jsonl"), "mode": "rows", "samples": 9, "length": 32, "chunk": chunk}
        calibrate(config(root, data=data, method="rtn"), tmp_path / f"work-{chunk}", say=quiet)
        found.append(
            [record for index in range(3) for record in units.read_records(tmp_path / f"work-{chunk}" / "blocks" / f"{index:04d}")]
        )
    alone, padded = found
    assert [record["tokens"] for record in alone] == [record["tokens"] for record in padded]
    for one, other in zip(alone, padded, strict=True):
        assert other["error_after"] == pytest.approx(one["error_after"], rel=1e-4)


def test_fallbacks_above_the_limit_fail_the_run_with_its_reasons(root, tmp_path):
    settings = config(root, "moe", options={"starved": "rtn", "refine": 0}, data={"samples": 2}, max_fallback_share=0.0)
    with pytest.raises(CalibrationFailed, match=r"% of 40 weights fell back to another method, allowed 0\.0% .*rows for \d+ columns"):
        calibrate(settings, tmp_path / "work", say=quiet)
    summary = json.loads((tmp_path / "work" / "summary.json").read_text())
    assert summary["fallbacks"] == sum(summary["fallback_reasons"].values()) > 0


def test_a_looped_model_is_not_run_block_by_block(root, tmp_path):
    """Without this the statistics of one step would pass for all (field case CAL-03)."""
    frame = Skeleton(root / "llama", torch.float32)
    with frame.loaded(0) as block:
        forward = block.forward
        twice = lambda hidden, *arguments, **options: forward(forward(hidden, *arguments, **options), *arguments, **options)  # noqa: E731
        block.forward = twice
        (chunk,) = make_chunks([[5, 6, 7]], 1, 0)
        hidden = torch.zeros(1, 3, 64)
        twice_called = pytest.raises(ModelError, match="was called 2 times in a forward pass, not 1")
        with Capture(block, ["self_attn.q_proj"]) as capture, torch.no_grad(), twice_called, capture.batch(chunk.mask):
            frame.run(chunk, hidden)


def test_progress_can_be_read_from_a_file(undisturbed):
    lines = [json.loads(line) for line in (undisturbed / "progress.jsonl").read_text().splitlines()]
    assert [line["block"] for line in lines] == [0, 1, 2] and {line["samples"] for line in lines} == {12}
    assert all(line["peak_bytes"] > 0 and line["seconds_left"] >= 0 for line in lines) and lines[-1]["seconds_left"] == 0


def test_the_command_writes_a_checkpoint_and_cleans_up(root, tmp_path, capsys):
    arguments = [
        "quantize",
        str(root / "llama"),
        "--data",
        str(root / "text.txt"),
        "--samples",
        "4",
        "--length",
        "16",
        "--out",
        str(tmp_path / "q"),
    ]
    assert run([*arguments, "dtype=float32", "options.refine=0"]) == 0
    assert "nvfp4 by gptq" in capsys.readouterr().out
    assert (tmp_path / "q" / "manifest.json").is_file() and not (tmp_path / "q.work").exists()
    load_model(tmp_path / "q", dtype=torch.float32)
    assert run(arguments) == 2
    assert "the folder exists already" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--method", "gptq"], 2, "method 'gptq' needs calibration text; give --data FILE"),
        (["--method", "gtpq"], 2, "unknown method 'gtpq'"),
        (["--format", "nvfp5"], 2, "unknown format 'nvfp5'"),
        (["--data", "missing.txt"], 2, "missing.txt: file does not exist"),
        (["--data", "TEXT", "options.dampning=0.1"], 2, "dampning"),
        (["--data", "TEXT", "--length", "1000000"], 2, "gives no window of 1000000 tokens"),
    ],
)
def test_bad_input_is_one_line_and_writes_nothing(root, tmp_path, capsys, options, code, message):
    options = [str(root / "text.txt") if option == "TEXT" else option for option in options]
    assert run(["quantize", str(root / "llama"), "--out", str(tmp_path / "q"), *options]) == code
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1
    assert not (tmp_path / "q").exists()


@pytest.mark.parametrize("method", ["rtn", "mse"])
def test_methods_without_statistics_need_no_text(root, tmp_path, method):
    settings = config(root, "moe", method=method).with_overrides({"data": None})
    summary = calibrate(settings, tmp_path / "work", say=quiet)
    assert summary["weights"] == 40 and summary["fallbacks"] == summary["starved"] == 0 and summary["error_after"] is None
    assert not (tmp_path / "work" / "activations").exists()
