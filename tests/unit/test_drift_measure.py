"""One batch to readings: chunks of the head change nothing and bound the memory (field case DRF-03), sums merge, bad samples leave both models."""

from __future__ import annotations

import math

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from prism_ray.drift import measure
from prism_ray.drift.measure import SAMPLE_COLUMNS, measure_batch, output_pairs
from prism_ray.drift.reader import Features
from prism_ray.risk.head import LinearHead, head_terms
from prism_ray.training.data import Encoded, collate

D, V = 16, 4096
LENGTHS = ((3, 1), (7, 2), (20, 5), (30, 9))  # tokens, prompt tokens


def batch():
    return collate([Encoded(list(range(1, n + 1)), prompt, f"s{n}") for n, prompt in LENGTHS], 0)


def case(noise: float = 0.1):
    generator = torch.Generator().manual_seed(0)
    made = batch()
    n = made.answer_tokens
    z = torch.randn(n, D, generator=generator)
    heads = tuple(LinearHead(weight=torch.randn(V, D, generator=generator)) for _ in range(2))
    features = Features(z, None), Features(z + noise * torch.randn(n, D, generator=generator), None)
    return made, features, heads, head_terms(heads[0], heads[1], k_feat=1.0)


def chunked(monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    monkeypatch.setattr(measure, "CHUNK_BYTES", 4 * V * tokens)


@pytest.mark.parametrize("tokens", [1, 7, 64])
def test_the_chunk_changes_nothing(monkeypatch, tokens):
    made, (base, variant), heads, _ = case()
    chunked(monkeypatch, 10_000)
    whole = output_pairs(base.hidden, variant.hidden, heads, made.targets, kept=False)
    chunked(monkeypatch, tokens)
    parts = output_pairs(base.hidden, variant.hidden, heads, made.targets, kept=False)
    for name in ("ce_target", "ce_proxy", "kl", "cosine", "confidence_proxy", "feature_range", "head_range"):
        torch.testing.assert_close(getattr(parts, name), getattr(whole, name), rtol=1e-6, atol=1e-6)
    assert torch.equal(parts.correct_proxy, whole.correct_proxy)


class Peak(TorchDispatchMode):
    """Largest number of elements of any tensor made under it."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.largest = max(self.largest, tensor.numel())
        return out


@pytest.mark.parametrize("tokens", [1, 7])
def test_no_tensor_is_larger_than_a_chunk_of_logits_or_the_moments(monkeypatch, tokens):
    made, (base, variant), heads, terms = case()
    chunked(monkeypatch, tokens)
    with Peak() as peak:
        measure_batch(made, base, variant, heads, terms, ("base", "variant"))
    assert peak.largest == max(tokens * V, D * D)
    assert made.answer_tokens * V > 4 * peak.largest  # the whole would have been seen


def test_sums_are_those_of_each_sample_alone():
    made, (base, variant), heads, terms = case()
    found = measure_batch(made, base, variant, heads, terms, ("base", "variant"))
    assert found.samples.shape == (4, len(SAMPLE_COLUMNS))
    start = 0
    for row, (length, prompt) in enumerate(LENGTHS):
        tokens = length - prompt
        part = slice(start, start + tokens)
        sums = dict(zip(SAMPLE_COLUMNS, found.samples[row].tolist(), strict=True))
        assert sums["tokens"] == tokens
        assert sums["difference_squared"] == pytest.approx(
            float((base.hidden.double() - variant.hidden.double())[part].square().sum()), rel=1e-9
        )
        logits = variant.hidden[part] @ heads[1].weight.T
        ce = torch.nn.functional.cross_entropy(logits, made.targets[part], reduction="sum")
        assert sums["ce_proxy"] == pytest.approx(float(ce), rel=1e-5)
        assert torch.equal(found.first[row, 0], base.hidden[start])
        start += tokens
    assert found.moments.token.tokens == sum(n - prompt for n, prompt in LENGTHS)
    assert found.moments.token.ce_proxy == pytest.approx(float(found.samples[:, SAMPLE_COLUMNS.index("ce_proxy")].sum()), rel=1e-12)


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_one_bad_number_takes_its_sample_out_of_both_models_and_no_other(side, bad):
    made, features, heads, terms = case()
    clean = measure_batch(made, *features, heads, terms, ("base", "variant"))
    place = 2 + 5 + 3  # a token of the third sample
    broken = [Features(entry.hidden.clone(), None) for entry in features]
    broken[side].hidden[place, 4] = bad
    found = measure_batch(made, broken[0], broken[1], heads, terms, ("base", "variant"))
    assert found.dropped == {"s20": ("base", "variant")[side]}
    assert found.kept == [0, 1, 3]
    torch.testing.assert_close(found.samples, clean.samples[[0, 1, 3]], rtol=1e-9, atol=0)
    assert found.moments.token.examples == 3
    assert torch.isfinite(found.moments.cross).all()


def test_a_batch_of_bad_samples_gives_zero_sums():
    made, (base, variant), heads, terms = case()
    found = measure_batch(made, Features(torch.full_like(base.hidden, math.nan), None), variant, heads, terms, ("base", "variant"))
    assert (found.kept, len(found.dropped), found.moments.token.tokens) == ([], 4, 0)
    assert found.samples.shape == (0, len(SAMPLE_COLUMNS))


def test_a_flipped_expert_is_counted_once_a_layer():
    made, (base, variant), heads, terms = case()
    experts = torch.zeros(made.answer_tokens, 3, 2, dtype=torch.int16)
    experts[:, :, 1] = 1
    other = experts.clone()
    other[0, 1, 1] = 5  # the first token, one layer, one of two experts
    other[1, 0] = 7  # the second token, one layer, both experts
    found = measure_batch(made, Features(base.hidden, experts), Features(variant.hidden, other), heads, terms, ("base", "variant"))
    flips, choices = found.samples[:, SAMPLE_COLUMNS.index("routing_flips")], found.samples[:, SAMPLE_COLUMNS.index("routing_choices")]
    assert flips.tolist() == [2.0, 0.0, 0.0, 0.0]
    assert choices.tolist() == [3.0 * (n - prompt) for n, prompt in LENGTHS]
