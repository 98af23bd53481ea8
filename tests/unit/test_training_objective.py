"""Objective: features, cross-entropies and drift do not depend on batching or padding (field cases DRF-01, CAL-07), nor on how the head is cut.

Tolerances: see test_training_scoring.py, n u with n = 15 * 128 and u = 2^-24, relative to the largest number of the kind.
"""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from peft import get_peft_model

from prism_ray.adapters.scale_qlora import ScaleQLoraConfig
from prism_ray.calibrate.quantize import quantize_model
from prism_ray.formats.policy import QuantPolicy
from prism_ray.models.tiny import tiny_llama
from prism_ray.training import objective as objective_module
from prism_ray.training.backends import InferenceBackend
from prism_ray.training.data import Encoded, collate
from prism_ray.training.evaluate import answer_loss, measure_drift, spread
from prism_ray.training.objective import Objective

ROUNDING = 15 * 128 * 2.0**-24
EOS = 285
# Sequences of 3, 7 and 20 tokens with 2, 4 and 17 scored ones; token 0 and the end id stand in the text, the end id pads (DRF-01).
ITEMS = [
    Encoded([5, 0, EOS], 1, "a"),
    Encoded([0, 17, EOS, 40, 0, 9, EOS], 3, "b"),
    Encoded([7, 9, 0, *range(30, 46), EOS], 3, "c"),
]


@pytest.fixture(scope="module")
def objective() -> Objective:
    model = tiny_llama(num_layers=1)
    quantize_model(model, QuantPolicy())
    model = get_peft_model(model, ScaleQLoraConfig(r=2, alpha=4.0))
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "qast_B" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
        # A padding position that counted would show: its embedding has norm 50 (CAL-07).
        row = model.get_input_embeddings().weight[EOS]
        row.mul_(50 / row.norm())
    return Objective(model.eval(), torch.float32)


@torch.no_grad()
def one_by_one(objective: Objective) -> tuple[torch.Tensor, torch.Tensor]:
    """Features and cross-entropies from the model's own outputs, a sequence a call, no mask."""
    hidden, ce = [], []
    for item in ITEMS:
        inner = objective.model.get_base_model()
        out = inner(input_ids=torch.tensor([item.input_ids]), output_hidden_states=True)
        places = range(item.prompt_tokens - 1, len(item.input_ids) - 1)
        hidden.append(out.hidden_states[-1][0, list(places)])
        logits = out.logits[0].double().log_softmax(-1)
        ce.append(torch.stack([-logits[place, item.input_ids[place + 1]] for place in places]))
    return torch.cat(hidden), torch.cat(ce)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_features_of_every_batching_are_those_of_single_sequences(objective, size):
    wanted, wanted_ce = one_by_one(objective)
    assert wanted.shape[0] == 2 + 4 + 17
    with torch.no_grad():
        parts = [objective("features", collate(ITEMS[first : first + size], EOS)) for first in range(0, 3, size)]
    hidden, ce = torch.cat([part[0] for part in parts]), torch.cat([part[1] for part in parts])
    assert hidden.shape == wanted.shape and ce.dtype == torch.float32
    assert (hidden - wanted).abs().max() <= ROUNDING * wanted.abs().max()
    assert (ce - wanted_ce).abs().max() <= ROUNDING * max(6.0, float(wanted_ce.max()))


@pytest.mark.parametrize(("max_batch", "max_tokens"), [(1, 2048), (2, 2048), (3, 2048), (32, 14), (32, 1)])
def test_losses_and_drift_equal_the_batch_of_one(objective, max_batch, max_tokens):
    backend = InferenceBackend(objective)
    _, ce = one_by_one(objective)
    loss, tokens = answer_loss(backend, ITEMS, EOS, max_batch=max_batch, max_tokens=max_tokens)
    assert tokens == 23
    assert loss == pytest.approx(float(ce.mean()), rel=ROUNDING)
    alone = measure_drift(backend, ITEMS, EOS, max_batch=1).moments
    found = measure_drift(backend, ITEMS, EOS, max_batch=max_batch, max_tokens=max_tokens)
    assert (found.moments.tokens, found.moments.examples) == (23, 3) == (found.null.tokens, found.null.examples)
    assert found.moments.one_minus_omega == pytest.approx(alone.one_minus_omega, rel=4 * ROUNDING / math.sqrt(alone.one_minus_omega))
    assert found.moments.rho_proxy == pytest.approx(alone.rho_proxy, rel=ROUNDING)
    assert found.moments.delta_ce == pytest.approx(alone.delta_ce, abs=2 * ROUNDING * float(ce.max()))
    assert found.moments.one_minus_omega > 1e-4, "the adapter of this test must drift"
    # The null is base against base: nothing but rounding, squared.
    assert found.null.one_minus_omega <= ROUNDING**2
    assert abs(found.null.delta_ce) <= ROUNDING * float(ce.max())


def test_the_pad_id_changes_nothing(objective):
    with torch.no_grad():
        first, second = (objective("features", collate(ITEMS, pad)) for pad in (EOS, 11))
    assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])


def test_hidden_is_the_features_without_the_head(objective):
    batch = collate(ITEMS, EOS)
    with torch.no_grad():
        assert torch.equal(objective("hidden", batch), objective("features", batch)[0])
    with pytest.raises(ValueError, match="unknown mode"):
        objective("logits", batch)


@pytest.mark.parametrize("chunk", [1, 7, 23, 64])
def test_head_chunks_give_the_same_numbers_and_gradients(objective, monkeypatch, chunk):
    """Each row's loss is computed alone, so the chunk must not show in values; gradients of factors add up over chunks in another order."""
    batch = collate(ITEMS, EOS)

    def measure(size: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
        monkeypatch.setattr(objective_module, "HEAD_CHUNK", size)
        parameters = [parameter for parameter in objective.parameters() if parameter.requires_grad]
        _, ce = objective("features", batch)
        return ce.detach(), list(torch.autograd.grad(ce.sum(), parameters))

    whole_ce, whole = measure(10_000)
    ce, grads = measure(chunk)
    assert (ce - whole_ce).abs().max() <= ROUNDING * whole_ce.max()
    largest = max(float(grad.abs().max()) for grad in whole)
    assert largest > 1e-3
    for found, wanted in zip(grads, whole, strict=True):
        assert (found - wanted).abs().max() <= ROUNDING * largest


def test_no_logits_of_the_whole_sequence(objective, monkeypatch):
    """The head sees scored rows only, at most a chunk at a time (DRF-03)."""
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(objective_module, "HEAD_CHUNK", 8)
    handle = objective._parts.head.register_forward_hook(lambda module, args, out: seen.append(tuple(out.shape)))
    with torch.no_grad():
        objective("features", collate(ITEMS, EOS))
    assert [shape[0] for shape in seen] == [8, 8, 7] and {len(shape) for shape in seen} == {2}
    # With gradients the logits of a chunk are made again in its backward pass instead of being kept.
    seen.clear()
    _, ce = objective("features", collate(ITEMS, EOS))
    assert len(seen) == 3
    ce.sum().backward()
    objective.zero_grad(set_to_none=True)
    handle.remove()
    assert sorted(shape[0] for shape in seen) == [7, 7, 8, 8, 8, 8]


def test_softcap_is_part_of_the_loss():
    model = tiny_llama(num_layers=1)
    batch = collate(ITEMS, EOS)
    with torch.no_grad():
        hidden = Objective(model, torch.float32)("hidden", batch)
        model.config.final_logit_softcapping = 2.0
        _, ce = Objective(model, torch.float32)("features", batch)
        logits = 2.0 * torch.tanh(model.lm_head(hidden).double() / 2.0)
    wanted = torch.nn.functional.cross_entropy(logits, batch.targets, reduction="none")
    assert (ce - wanted).abs().max() <= ROUNDING * wanted.max()
    uncapped = torch.nn.functional.cross_entropy(model.lm_head(hidden).double(), batch.targets, reduction="none")
    assert (ce - uncapped).abs().max() > 100 * ROUNDING * wanted.max()


@pytest.mark.parametrize("world", [1, 2, 3, 5])
def test_every_worker_runs_the_same_number_of_passes_and_each_batch_counts_once(world):
    batches = [[0, 1], [2], [3, 4, 5], [6]]
    shares = [list(spread(batches, SimpleNamespace(rank=rank, world=world))) for rank in range(world)]
    assert len({len(share) for share in shares}) == 1
    counted = [tuple(indices) for share in shares for indices, counts in share if counts]
    assert sorted(counted) == sorted(map(tuple, batches))
