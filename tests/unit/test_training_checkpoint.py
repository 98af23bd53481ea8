"""Training checkpoints and saved adapters: complete or passed over (RAY-01), exact, without pickle, and training touches nothing but the factors (RAY-02)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from peft import PeftModel, get_peft_model
from safetensors.torch import load_file

from prism_ray.adapters.merge import base_planes
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.core.errors import CheckpointError
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.formats.policy import QuantPolicy
from prism_ray.formats.spec import FP4_FORMATS
from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.models.tiny import tiny_llama
from prism_ray.training.backends import FIRST_MOMENT, SECOND_MOMENT, VALUE, LocalBackend
from prism_ray.training.checkpoint import (
    ADAPTER_FILE,
    KIND,
    PROGRESS_FILE,
    TRAINER_FILE,
    Progress,
    latest_complete,
    load_checkpoint,
    save_adapter,
    save_checkpoint,
)
from prism_ray.training.config import OptimizerConfig
from prism_ray.training.data import Encoded, collate
from prism_ray.training.objective import Objective

IDS = torch.tensor([[1, 5, 9, 40, 200, 7]])
BATCH = collate([Encoded([7, 30, 60, 90, 4], 2, "a"), Encoded([9, 31, 61], 1, "b")], 286)


def quantized(name: str = "nvfp4"):
    model = tiny_llama(num_layers=1)
    quantize_model(model, QuantPolicy(format=name))
    return model


def trained(steps: int = 3, name: str = "nvfp4") -> LocalBackend:
    """A back end after some real updates."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = get_peft_model(quantized(name), ScaleQLoraConfig(r=2, alpha=4.0, task_type="CAUSAL_LM"))
    backend = LocalBackend(Objective(model, torch.float32), OptimizerConfig())
    for _ in range(steps):
        backend.backward(backend.run("features", BATCH)[1].sum())
        backend.step(0.2)
    return backend


def checkpoint(folder: Path, step: int = 3, backend: LocalBackend | None = None) -> Path:
    backend = backend or trained(step)
    state = backend.export_state()
    best = {name: entry[VALUE] * 0.5 for name, entry in state.items()}
    progress = Progress(
        step=step, best_step=step, best_metric=0.5, best_loss=1.25, history=[{"step": float(step), "loss": 2.0}], resumed_at=[1]
    )
    save_checkpoint(backend.objective.model, state, best, progress, folder)
    return folder


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Path:
    return checkpoint(tmp_path_factory.mktemp("checkpoint") / "3")


@torch.no_grad()
def logits(model) -> torch.Tensor:
    return model.eval()(input_ids=IDS).logits


# --- what a checkpoint holds -------------------------------------------------------------------------------------------------------


def test_round_trip_is_exact(saved):
    state, best, progress = load_checkpoint(saved)
    wanted = trained().export_state()
    assert state.keys() == wanted.keys() and len(wanted) == 14
    for name, entry in wanted.items():
        assert entry.keys() == state[name].keys() == {VALUE, FIRST_MOMENT, SECOND_MOMENT}
        assert all(torch.equal(state[name][key], value) and value.dtype == torch.float32 for key, value in entry.items())
        assert torch.equal(best[name], entry[VALUE] * 0.5)
    assert (
        progress.step == 3
        and progress.best_loss == 1.25
        and progress.history == [{"step": 3.0, "loss": 2.0}]
        and progress.resumed_at == [1]
    )
    assert any(bool(entry[SECOND_MOMENT].any()) for entry in state.values())


def test_a_fresh_back_end_goes_on_to_the_byte(saved):
    whole = trained(5).export_state()
    backend = trained(0)
    state, _, progress = load_checkpoint(saved)
    backend.import_state(state, progress.step)
    for _ in range(2):
        backend.backward(backend.run("features", BATCH)[1].sum())
        backend.step(0.2)
    for name, entry in backend.export_state().items():
        assert all(torch.equal(whole[name][key], value) for key, value in entry.items()), name


def test_only_json_and_safetensors_no_pickle(saved):
    files = sorted(path.name for path in saved.iterdir())
    assert files == sorted(["adapter_config.json", ADAPTER_FILE, MANIFEST_NAME, PROGRESS_FILE, TRAINER_FILE])
    for path in saved.iterdir():
        if path.suffix == ".json":
            assert json.loads(path.read_text())
        else:
            # A safetensors file: a length, then its JSON header. A pickle has its opcodes there, a zip of pickles begins with PK.
            assert path.read_bytes()[8:10] == b'{"' and load_file(path)


def test_the_manifest_counts_every_file_and_is_about_this_step(saved):
    manifest = read_manifest(saved, KIND)
    assert manifest["step"] == 3
    assert set(manifest["files"]) == {path.name for path in saved.iterdir()} - {MANIFEST_NAME}


def test_without_a_best_adapter(tmp_path):
    backend = trained(1)
    save_checkpoint(backend.objective.model, backend.export_state(), None, Progress(step=1), tmp_path)
    state, best, progress = load_checkpoint(tmp_path)
    assert best is None and progress == Progress(step=1) and len(state) == 14


# --- incomplete ones ---------------------------------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * 0.9)])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {"truncated at 90 %": truncate, "missing": Path.unlink, "one bit": flip, "empty": lambda path: path.write_bytes(b"")}


@pytest.mark.parametrize("name", ["adapter_config.json", ADAPTER_FILE, TRAINER_FILE, PROGRESS_FILE, MANIFEST_NAME])
@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_for_the_one_before(saved, tmp_path, name, damage):
    older = Path(shutil.copytree(saved, tmp_path / "older"))
    newer = checkpoint(tmp_path / "newer", 4)
    assert latest_complete([newer, older]) == newer == latest_complete([older, newer])
    damage(newer / name)
    if name == MANIFEST_NAME and damage is flip:
        # The last byte of the manifest is the line break after the brace.
        assert latest_complete([older, newer]) in (older, newer)
        return
    assert latest_complete([newer, older]) == older == latest_complete([older, newer])
    with pytest.raises(CheckpointError) as caught:
        load_checkpoint(newer)
    assert (name if name != MANIFEST_NAME else "newer") in str(caught.value) and "\n" not in str(caught.value)


def test_no_complete_checkpoint_at_all(tmp_path):
    (tmp_path / "empty").mkdir()
    assert latest_complete([]) is None
    assert latest_complete([tmp_path / "empty", tmp_path / "absent"]) is None


def test_the_highest_step_wins_not_the_name(saved, tmp_path):
    ten = checkpoint(tmp_path / "a", 4)
    nine = Path(shutil.copytree(saved, tmp_path / "b"))
    assert latest_complete([nine, ten, nine]) == ten


def test_another_kind_of_folder_is_no_checkpoint(saved, tmp_path):
    folder = Path(shutil.copytree(saved, tmp_path / "other"))
    manifest = json.loads((folder / MANIFEST_NAME).read_text())
    for change in ({"kind": "scale-adapter"}, {"format_version": "2.0"}):
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest | change))
        assert latest_complete([folder]) is None
        with pytest.raises(CheckpointError):
            load_checkpoint(folder)


# --- the adapter in it -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_peft_opens_the_saved_adapter_with_bit_equal_logits(tmp_path, name):
    backend = trained(3, name)
    values = {key: entry[VALUE] for key, entry in backend.export_state().items()}
    save_adapter(backend.objective.model, values, tmp_path / "adapter")
    opened = PeftModel.from_pretrained(quantized(name), str(tmp_path / "adapter"))
    assert torch.equal(logits(opened), logits(backend.objective.model))
    assert not torch.equal(logits(opened), logits(quantized(name)))
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["inference_mode"] is True
    assert backend.objective.model.peft_config["default"].inference_mode is False, "saving must not switch the trained model to inference"


def test_the_checkpoint_is_an_adapter_folder_too(saved):
    assert torch.equal(logits(PeftModel.from_pretrained(quantized(), str(saved))), logits(trained().objective.model))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_an_adapter_that_is_not_finite_is_refused(tmp_path, bad):
    backend = trained(1)
    values = {key: entry[VALUE] for key, entry in backend.export_state().items()}
    next(iter(values.values()))[0, 0] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        save_adapter(backend.objective.model, values, tmp_path)


def test_an_empty_or_short_adapter_is_refused(tmp_path):
    """What a save without gathering gives: shapes [0] (field case ADP-05), or tensors left out."""
    backend = trained(1)
    values = {key: entry[VALUE] for key, entry in backend.export_state().items()}
    hollow = {key: value.new_zeros(0) for key, value in values.items()}
    with pytest.raises(CheckpointError, match="empty"):
        save_adapter(backend.objective.model, hollow, tmp_path / "hollow")
    with pytest.raises(CheckpointError, match="0 tensors to write"):
        save_adapter(backend.objective.model, {}, tmp_path / "nothing")
    short = dict(list(values.items())[:-1])
    with pytest.raises(CheckpointError, match="13 tensors to write, the adapter has 14"):
        save_adapter(backend.objective.model, short, tmp_path / "short")
    assert list(tmp_path.iterdir()) == [], "a refused adapter leaves nothing behind"


# --- what training may touch -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FP4_FORMATS)
def test_training_changes_the_factors_and_nothing_else(name):
    backend = trained(0, name)
    model = backend.objective.model
    before = {key: value.clone() for key, value in model.state_dict().items()}
    codes, scales = code_plane_fingerprint(base_planes(model)), scale_plane_fingerprint(base_planes(model))
    for _ in range(3):
        backend.backward(backend.run("features", BATCH)[1].sum())
        backend.step(0.2)
        assert code_plane_fingerprint(base_planes(model)) == codes and scale_plane_fingerprint(base_planes(model)) == scales
    changed = {key for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {key for key in before if "qast_" in key}


def test_trainable_are_the_factors_and_only_they_have_optimizer_state():
    backend = trained(1)
    names = {name for name, parameter in backend.objective.model.named_parameters() if parameter.requires_grad}
    assert names == set(backend.parameters) and len(names) == 14
    assert all(name.split(".")[-2] in ("qast_A", "qast_B") for name in names)
    held = {id(parameter) for group in backend.optimizer.param_groups for parameter in group["params"]}
    assert held == {id(parameter) for parameter in backend.parameters.values()} == {id(parameter) for parameter in backend.optimizer.state}
    assert all(parameter.grad is None for name, parameter in backend.objective.model.named_parameters() if name not in names)
