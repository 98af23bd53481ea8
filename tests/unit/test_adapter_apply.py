"""Apply and rollback of checkpoint folders and of live models: byte for byte, as a whole or not at all (field cases ADP-02, FMT-02 to FMT-05)."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch
from peft import get_peft_model
from safetensors.torch import load_file, save_file

from prism_ray.adapters import generation
from prism_ray.adapters.admission import load_adapter
from prism_ray.adapters.apply import APPLIED, DELTA_NAME, STATE_NAME, apply_adapter, apply_plane, open_checkpoint, read_state, rollback
from prism_ray.adapters.audit import audit
from prism_ray.adapters.generation import locked, recover
from prism_ray.adapters.live import digest, prepare_swap, swap_plane
from prism_ray.adapters.merge import merge_to_folder
from prism_ray.adapters.planes import BasePlanes, ScalePlane
from prism_ray.adapters.scale_plane import adapter_layers
from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.core.errors import CheckpointError, ConfigError, FingerprintMismatch, FormatError, ModelError, PrismError, ResourceError
from prism_ray.core.manifest import MANIFEST_NAME, read_manifest
from prism_ray.formats import compressed_tensors as convention
from prism_ray.formats import safetensors_io
from prism_ray.formats.checkpoint import KIND, load_quantized_model, read_quantized
from prism_ray.formats.lint import lint_checkpoint
from prism_ray.formats.modules import quantized_modules
from prism_ray.formats.tensor import code_plane_fingerprint, scale_plane_fingerprint
from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe
from tests.unit._fuzzed_folders import make_adapter, make_base, tree_digest

IDS = torch.arange(12).reshape(1, 12)
BUILD = {
    "llama": lambda: tiny_llama(hidden_size=64, num_layers=1, intermediate_size=64),
    "moe": lambda: tiny_qwen3_moe(hidden_size=64, moe_intermediate_size=64, num_layers=1),
}
TARGETS = {"llama": {}, "moe": {"target_modules": ["gate_up_proj", "down_proj", "q_proj"], "experts": [1, 3]}}


@pytest.fixture(scope="module", params=[(model, name) for model in BUILD for name in ("nvfp4", "mxfp4")], ids="-".join)
def pair(request, tmp_path_factory) -> tuple[Path, Path]:
    """(base, adapter) of both formats, dense and with experts, in several shards."""
    model, name = request.param
    root = tmp_path_factory.mktemp("pair")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(safetensors_io, "SHARD_BYTES", 8_000)
        base = make_base(root / "base", BUILD[model](), format=name)
    assert len(list(base.glob("*.safetensors"))) > 2
    return base, make_adapter(base, root / "adapter", spread=2.0, **TARGETS[model])


@pytest.fixture(scope="module")
def llama(tmp_path_factory) -> tuple[Path, Path, Path]:
    root = tmp_path_factory.mktemp("llama")
    base = make_base(root / "base")
    return base, make_adapter(base, root / "one", seed=1), make_adapter(base, root / "two", seed=2)


@pytest.fixture
def copy(llama, tmp_path) -> Path:
    return shutil.copytree(llama[0], tmp_path / "model")


@torch.no_grad()
def logits(folder: Path) -> torch.Tensor:
    return load_quantized_model(folder, dtype=torch.float32)(IDS).logits


def random_plane(base: BasePlanes, seed: int, share: float = 0.3) -> ScalePlane:
    """Legal bytes in place of a share of the base's, zeros kept."""
    generator = torch.Generator().manual_seed(seed)
    out = {}
    for name, tensor in base.quantized.items():
        fresh = torch.randint(1, 120, tensor.scales.shape, dtype=torch.uint8, generator=generator)
        where = (torch.rand(tensor.scales.shape, generator=generator) < share) & (tensor.scales != 0)
        out[name] = torch.where(where, fresh, tensor.scales)
    return ScalePlane(out)


def nothing_beside(folder: Path) -> bool:
    return not [path for path in folder.parent.iterdir() if path.name.startswith(".tmp-") and "lock" not in path.name]


# Folders


def test_apply_gives_the_merged_model_to_the_bit_and_rollback_the_base_to_the_byte(pair, tmp_path):
    base, adapter = pair
    folder = shutil.copytree(base, tmp_path / "model")
    before = tree_digest(folder)
    state = apply_adapter(folder, adapter)
    model = load_adapter(load_quantized_model(base, dtype=torch.float32), adapter)
    with torch.no_grad():
        assert torch.equal(logits(folder), model(IDS).logits)
    merge_to_folder(model, base, tmp_path / "merged")
    assert audit(folder, tmp_path / "merged").verdict == "identical"
    assert audit(folder, base).verdict == "scale_plane"
    assert (state.adapter, state.base_scale_plane) == ("adapter", BasePlanes.from_checkpoint(base).scale_plane)
    manifest = read_manifest(folder, KIND)
    _, written, _ = read_quantized(folder)
    fused = convention.fuse_experts(written)
    assert manifest["code_plane"] == code_plane_fingerprint(fused) == state.code_plane
    assert manifest["scale_plane"] == scale_plane_fingerprint(fused) == state.scale_plane
    assert manifest["applied_adapter"] == "adapter" and manifest["base_scale_plane"] == state.base_scale_plane
    assert lint_checkpoint(folder) == []
    assert rollback(folder) == state.base_scale_plane
    assert tree_digest(folder) == before and nothing_beside(folder)


def test_the_shared_global_scale_and_the_scale_rule_stay(pair, tmp_path):
    """FMT-02, FMT-03, FMT-05: the divisors' bytes and the rule are the base's, so fused projections still share one."""
    base, adapter = pair
    folder = shutil.copytree(base, tmp_path / "model")
    apply_adapter(folder, adapter)
    old, new = dict(safetensors_io.read_tensors(base)), dict(safetensors_io.read_tensors(folder))
    divisors = [name for name in old if name.endswith(convention.DIVISOR)]
    assert bool(divisors) == (read_manifest(base, KIND)["format"] == "nvfp4")
    assert old.keys() == new.keys() and all(torch.equal(old[name], new[name]) for name in divisors)
    assert read_manifest(folder, KIND)["scale_rule"] == read_manifest(base, KIND)["scale_rule"]


def test_a_base_whose_global_scale_is_inverted_is_another_base(llama, copy):
    """FMT-02: same codes and scale bytes, the reciprocal scalar: the fingerprint knows."""
    tensors = load_file(copy / "model.safetensors")
    for name in list(tensors):
        if name.endswith(convention.DIVISOR):
            tensors[name] = 1.0 / tensors[name]
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / MANIFEST_NAME).unlink()
    before = tree_digest(copy)
    with pytest.raises(FingerprintMismatch, match="the adapter's scale_plane is"):
        apply_adapter(copy, llama[1])
    assert tree_digest(copy) == before


def test_zero_blocks_stay_zero_blocks(llama, copy):
    """FMT-04: a plane cannot revive a block whose scale code is 0."""
    tensors = load_file(copy / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight_scale"
    tensors[name].view(torch.uint8)[3, 1] = 0
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    (copy / MANIFEST_NAME).unlink()
    base = BasePlanes.from_checkpoint(copy)
    plane = dict(random_plane(base, 0).tensors)
    assert plane["model.layers.0.mlp.up_proj"][3, 1] == 0
    apply_plane(copy, ScalePlane(plane), adapter_id="a")
    rollback(copy)
    before = tree_digest(copy)
    plane["model.layers.0.mlp.up_proj"][3, 1] = 9
    with pytest.raises(FormatError, match=r"the scale at \[3, 1\] is 0 in the base"):
        apply_plane(copy, ScalePlane(plane), adapter_id="a")
    assert tree_digest(copy) == before


def test_rollback_of_100_random_adapters_byte_for_byte(copy):
    base = BasePlanes.from_checkpoint(copy)
    before = tree_digest(copy)
    for seed in range(100):
        plane = random_plane(base, seed, share=0.01 * (seed + 1))
        state = apply_plane(copy, plane, adapter_id=f"adapter-{seed}")
        written = ScalePlane.from_checkpoint(copy)
        assert written.digest() == plane.digest()
        assert state.changed == sum(int((data != base.quantized[name].scales).sum()) for name, data in plane.tensors.items()) > 0
        assert rollback(copy) == base.scale_plane
        assert tree_digest(copy) == before


def test_an_adapter_over_another_replaces_it_and_rolls_back_to_the_base(llama, copy):
    base, one, two = llama
    before = tree_digest(copy)
    apply_adapter(copy, one)
    alone = tree_digest(copy)
    apply_adapter(copy, two, adapter_id="second")
    both = tree_digest(copy)
    state = read_state(copy)
    assert state is not None and state.adapter == "second" and both != alone
    assert open_checkpoint(copy).base.scale_plane == BasePlanes.from_checkpoint(base).scale_plane
    apply_adapter(copy, one)
    assert tree_digest(copy) == alone
    apply_adapter(copy, one)  # again: nothing changes
    assert tree_digest(copy) == alone
    rollback(copy)
    assert tree_digest(copy) == before
    apply_adapter(copy, two, adapter_id="second")
    assert tree_digest(copy) == both  # the same folder, whatever was applied before


def test_rollback_needs_the_delta_or_the_base_and_trusts_neither(llama, copy, tmp_path):
    base, one, _ = llama
    before = tree_digest(copy)
    with pytest.raises(ModelError, match="no adapter is applied"):
        rollback(copy)
    apply_adapter(copy, one)
    (copy / MANIFEST_NAME).unlink()  # the manifest would refuse first
    delta = copy / APPLIED / DELTA_NAME
    data = delta.read_bytes()
    delta.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    damaged = tree_digest(copy)
    with pytest.raises(CheckpointError, match="SHA-256 differs from state.json's"):
        rollback(copy)
    other = make_base(tmp_path / "other", tiny_llama(seed=1, hidden_size=32, num_layers=1, intermediate_size=32))
    with pytest.raises(FingerprintMismatch, match="is not a scale plane over other: codes:"):
        rollback(copy, base=other)
    plane = shutil.copytree(base, tmp_path / "plane")
    apply_plane(plane, random_plane(BasePlanes.from_checkpoint(base), 5), adapter_id="x")
    with pytest.raises(FingerprintMismatch, match="the restored scale plane is"):
        rollback(copy, base=plane)
    assert tree_digest(copy) == damaged
    rollback(copy, base=base)
    assert tree_digest(copy) == before


def test_bytes_changed_after_the_apply_are_found_before_anything_is_written_and_mended_from_the_base(llama, copy):
    base, one, _ = llama
    before = tree_digest(copy)
    apply_adapter(copy, one)
    tensors = load_file(copy / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight_scale"].view(torch.uint8)[0, 0] = 0x7F
    save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
    tampered = tree_digest(copy)
    with pytest.raises(CheckpointError, match="truncated or changed|SHA-256 differs"):
        rollback(copy)
    (copy / MANIFEST_NAME).unlink()
    with pytest.raises(PrismError):
        rollback(copy)
    assert tree_digest(copy) == {name: value for name, value in tampered.items() if name != MANIFEST_NAME}
    assert rollback(copy, base=base) == BasePlanes.from_checkpoint(base).scale_plane
    assert tree_digest(copy) == before


def test_a_merged_folder_is_restored_from_its_base(llama, tmp_path):
    base, one, _ = llama
    merge_to_folder(load_adapter(load_quantized_model(base), one), base, tmp_path / "merged")
    rollback(tmp_path / "merged", base=base)
    assert audit(tmp_path / "merged", base).verdict == "identical"
    assert read_manifest(tmp_path / "merged", KIND)["scale_plane"] == BasePlanes.from_checkpoint(base).scale_plane


def test_a_folder_without_manifest_gets_none(llama, copy):
    (copy / MANIFEST_NAME).unlink()
    before = tree_digest(copy)
    apply_adapter(copy, llama[1])
    assert not (copy / MANIFEST_NAME).exists() and (copy / APPLIED / STATE_NAME).is_file()
    rollback(copy)
    assert tree_digest(copy) == before


@pytest.mark.parametrize("fault", ["id", "adapter", "manifest", "code", "write", "rest", "probe"])
def test_whatever_is_refused_leaves_the_folder_as_it_was(llama, copy, monkeypatch, fault):
    options: dict = {}
    kind: type[PrismError] = CheckpointError
    if fault == "id":
        options, kind = {"adapter_id": "../x"}, ConfigError
    elif fault == "adapter":
        monkeypatch.setattr("prism_ray.adapters.apply.admit", lambda *a, **k: (_ for _ in ()).throw(FormatError("no")))
        kind = FormatError
    elif fault == "manifest":
        with open(copy / "generation_config.json", "ab") as file:
            file.write(b" ")
    elif fault == "code":
        tensors = load_file(copy / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight_packed"][0, 0] ^= 1
        save_file(tensors, copy / "model.safetensors", metadata={"format": "pt"})
        (copy / MANIFEST_NAME).unlink()
        kind = FingerprintMismatch
    elif fault in ("write", "rest"):
        real = generation._patched_copy

        def wrong(source: Path, target: Path, tensors: dict[str, torch.Tensor]) -> None:
            real(source, target, {} if fault == "write" else tensors)
            if fault == "rest":  # another tensor's byte
                data = bytearray(target.read_bytes())
                header = safetensors_io.read_safetensors_header(target)
                length = int.from_bytes(data[:8], "little")
                data[8 + length + header["model.norm.weight"]["data_offsets"][0]] ^= 1
                target.write_bytes(bytes(data))

        monkeypatch.setattr(generation, "_patched_copy", wrong)
    else:
        options, kind = {"probe": lambda folder: torch.zeros(2)}, ModelError
    before = tree_digest(copy)
    with pytest.raises(kind) as caught:
        apply_adapter(copy, llama[1], **options)
    assert str(caught.value).isprintable()
    assert tree_digest(copy) == before and nothing_beside(copy)


def test_a_probe_sees_the_old_and_the_new_folder_before_the_switch(llama, copy):
    seen = []
    apply_adapter(copy, llama[1], probe=lambda folder: seen.append(logits(folder)) or seen[-1])
    assert torch.equal(seen[0], logits(llama[0])) and torch.equal(seen[1], logits(copy)) and not torch.equal(*seen)


def test_links_and_subfolders_come_along(llama, copy, tmp_path):
    (tmp_path / "shared.txt").write_text("shared")
    (copy / "link.txt").symlink_to("../shared.txt")
    (copy / "notes").mkdir()
    (copy / "notes" / "a.txt").write_text("a")
    shard = tmp_path / "blob"
    os.replace(copy / "model.safetensors", shard)
    (copy / "model.safetensors").symlink_to("../blob")
    (copy / MANIFEST_NAME).unlink()
    blob = shard.read_bytes()
    apply_adapter(copy, llama[1])
    assert (
        (copy / "link.txt").is_symlink() and (copy / "link.txt").read_text() == "shared" and (copy / "notes" / "a.txt").read_text() == "a"
    )
    assert shard.read_bytes() == blob  # a shard of a shared cache is copied, not written through the link


def test_a_second_apply_waits_and_then_says_so(llama, copy, monkeypatch):
    monkeypatch.setattr(generation, "LOCK_SECONDS", 0.1)
    with locked(copy), pytest.raises(ResourceError, match="another apply or rollback is at work"):
        apply_adapter(copy, llama[1])
    with pytest.raises(ModelError, match="is no folder"):
        apply_adapter(copy.parent / "none", llama[1])


# Kills


def killed(work, at: str | None, delay: float) -> None:
    """Run `work(step)` in a forked child that is killed at a step, or after `delay` seconds."""
    child = os.fork()
    if child == 0:
        try:
            work(lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == at else None)
        finally:
            os._exit(0)
    if at is None:
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)  # until it is waited for, an ended child still has its id
    os.waitpid(child, 0)


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two-renames"])
def test_50_kills_leave_the_old_folder_or_the_new_one(llama, copy, monkeypatch, exchange):
    """At every step and at random delays, of applies and rollbacks in turn. What other programs see before `recover` is whole too (or, where the file
    system cannot exchange and the kill falls between two renames, absent)."""
    if not exchange:
        monkeypatch.setattr(generation, "_exchange", lambda one, other: False)
    base, one, _ = llama
    old = tree_digest(copy)
    steps: list[str] = []
    started = time.monotonic()
    apply_adapter(copy, one, step=steps.append)
    seconds = time.monotonic() - started
    new = tree_digest(copy)
    rollback(copy)
    assert {"admitted", "linked", "delta", "manifest", "checked", "ready", "switched", "cleaned"} <= set(steps)
    assert ("between" in steps) != exchange
    dice = random.Random(3)
    outcomes = {"old": 0, "new": 0}
    for number in range(50):
        at = dice.choice(steps) if number % 2 else None
        applied = read_state(copy) is not None
        killed(
            (lambda step: rollback(copy, step=step)) if applied else (lambda step: apply_adapter(copy, one, step=step)),
            at,
            dice.uniform(0, seconds),
        )
        if copy.exists():
            assert tree_digest(copy) in (old, new), (number, at)
        else:
            assert not exchange and at in ("between", None)
        recover(copy)
        found = tree_digest(copy)
        assert found in (old, new), (number, at)
        outcomes["new" if (found == new) != applied else "old"] += 1
        assert nothing_beside(copy)
    assert min(outcomes.values()) > 0  # some kills came before the switch, some after
    rollback(copy, base=base)
    assert tree_digest(copy) == old


# Live models


def scales(model) -> dict[str, torch.Tensor]:
    return {name: module.scales.clone() for name, module in quantized_modules(model)}


@pytest.mark.parametrize("how", ["pointer", "copy"])
def test_a_live_swap_gives_the_applied_checkpoint_and_its_rollback_the_base(pair, tmp_path, how):
    base, adapter = pair
    folder = shutil.copytree(base, tmp_path / "model")
    apply_adapter(folder, adapter)
    model = load_quantized_model(base, dtype=torch.float32)
    before, addresses = scales(model), {name: module.scales.data_ptr() for name, module in quantized_modules(model)}
    with torch.no_grad():
        plain = model(IDS).logits
        swap = swap_plane(model, ScalePlane.read(adapter), how=how, probe=lambda live: live(IDS).logits)
        assert torch.equal(model(IDS).logits, logits(folder))
        state = read_state(folder)
        assert state is not None and swap.changed == state.changed
        moved = {name for name, module in quantized_modules(model) if module.scales.data_ptr() != addresses[name]}
        assert bool(moved) == (how == "pointer")
        swap.rollback()
        swap.rollback()
        assert torch.equal(model(IDS).logits, plain)
    assert all(torch.equal(data, before[name]) for name, data in scales(model).items())


@pytest.mark.parametrize("how", ["pointer", "copy"])
def test_1000_cycles_leave_every_hash_unchanged(llama, how):
    model = load_quantized_model(llama[0], dtype=torch.float32)
    base = BasePlanes.from_model(model)
    modules = dict(quantized_modules(model))
    before = digest(modules)
    swaps = [prepare_swap(model, random_plane(base, seed), how=how) for seed in range(4)]
    planes = {swap.after for swap in swaps}
    assert len(planes) == 4 and before not in planes
    for number in range(1000):
        swap = swaps[number % 4]
        swap.apply()
        assert digest(modules) == swap.after
        swap.rollback()
        assert digest(modules) == before
    after = BasePlanes.from_model(model)
    assert (after.code_plane, after.scale_plane) == (base.code_plane, base.scale_plane)


def test_a_plane_that_does_not_fit_or_shows_nothing_leaves_the_live_model(llama):
    model = load_quantized_model(llama[0], dtype=torch.float32)
    base = BasePlanes.from_model(model)
    before = digest(dict(quantized_modules(model)))
    good = random_plane(base, 0)
    first = next(iter(good.tensors))
    illegal = dict(good.tensors)
    illegal["model.layers.0.self_attn.v_proj"] = torch.full_like(illegal["model.layers.0.self_attn.v_proj"], 0xFF)  # the last to be checked
    for plane, kind in (
        (ScalePlane(illegal), FormatError),
        (ScalePlane({**good.tensors, "model.layers.7.x": good.tensors[first]}), CheckpointError),
        (ScalePlane({first: good.tensors[first][:1]}), CheckpointError),
    ):
        for how in ("pointer", "copy"):
            with pytest.raises(kind):
                swap_plane(model, plane, how=how)
    with pytest.raises(ModelError, match="the same before and after"):
        swap_plane(model, good, probe=lambda live: torch.zeros(1))
    with pytest.raises(ConfigError, match="unknown swap 'memcpy'"):
        prepare_swap(model, good, how="memcpy")
    assert digest(dict(quantized_modules(model))) == before


def test_a_copy_that_fails_halfway_is_put_back(llama, monkeypatch):
    model = load_quantized_model(llama[0], dtype=torch.float32)
    swap = prepare_swap(model, random_plane(BasePlanes.from_model(model), 0), how="copy")
    before = digest(dict(quantized_modules(model)))
    real, calls = torch.Tensor.copy_, []

    def failing(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        return real(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "copy_", failing)
        with pytest.raises(KeyboardInterrupt):
            swap.apply()
    assert len(calls) == 4 and not swap.active
    assert digest(dict(quantized_modules(model))) == before


@pytest.mark.parametrize("how", ["pointer", "copy"])
def test_swaps_are_undone_in_order(llama, how):
    model = load_quantized_model(llama[0], dtype=torch.float32)
    base = BasePlanes.from_model(model)
    before = digest(dict(quantized_modules(model)))
    one, two = swap_plane(model, random_plane(base, 1), how=how), swap_plane(model, random_plane(base, 2), how=how)
    with pytest.raises(CheckpointError, match="the live scales are not those that this swap left"):
        one.rollback()
    two.rollback()
    one.rollback()
    assert digest(dict(quantized_modules(model))) == before


def test_a_live_swap_under_a_peft_adapter_keeps_away_from_a_merged_one(llama):
    model = get_peft_model(load_quantized_model(llama[0], dtype=torch.float32), ScaleQLoraConfig(r=1))
    base = BasePlanes.from_model(model)
    swap = swap_plane(model, random_plane(base, 1))
    swap.rollback()
    next(iter(adapter_layers(model).values())).merge()
    with pytest.raises(ModelError, match="an adapter is merged in place; unmerge it first"):
        prepare_swap(model, random_plane(base, 1))


def test_state_json_is_what_the_folder_says(llama, copy):
    state = apply_adapter(copy, llama[1])
    assert json.loads((copy / APPLIED / STATE_NAME).read_text()) == state.to_dict()
    assert set(state.base_files) == {"model.safetensors"}
