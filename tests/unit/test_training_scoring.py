"""Label scores: packed branches against prompt + candidate one by one, and what must not matter (order, padding, company in the batch).

Tolerance of float32 scores that are mathematically equal: a running error bound. Two layers of seven products, one after the other, each summing at most
128 terms, and the head: n = 15 * 128 roundings of u = 2^-24 on numbers of the size of the logits, once per scored token.
"""

from __future__ import annotations

import pytest
import torch

from prism_ray.models.tiny import tiny_llama, tiny_qwen3_moe, tiny_tokenizer
from prism_ray.training.backends import InferenceBackend
from prism_ray.training.data import Encoded, collate, encode_candidates
from prism_ray.training.evaluate import label_accuracy
from prism_ray.training.objective import Objective
from prism_ray.training.scoring import pack_candidates
from prism_ray.training.task import Example

PER_TOKEN = 15 * 128 * 2.0**-24
PROMPTS = ("it is", "the question is on a ship, in the rain; what is it", "who", "one two three four five six")
LABELS = {
    "ragged": ("red", "a very long blue answer indeed", "on", "green is it"),
    "single tokens": ("a", "b", "c"),
    "shared first tokens": ("the red", "the reddest", "the", "the blue"),
    "one prefix of another": ("re", "red", "redre"),
}


def groups_of(labels: tuple[str, ...], prompts: tuple[str, ...] = PROMPTS, prefix: str = " ") -> list[list[Encoded]]:
    tokenizer = tiny_tokenizer()
    return [encode_candidates(Example(str(row), prompt, ""), labels, tokenizer, answer_prefix=prefix) for row, prompt in enumerate(prompts)]


@pytest.fixture(scope="module")
def objective() -> Objective:
    return Objective(tiny_llama(), torch.float32)


@torch.no_grad()
def plain(objective: Objective, groups: list[list[Encoded]]) -> torch.Tensor:
    """Summed log-likelihoods in float64 from the model's own logits, one candidate a call."""
    rows = []
    for group in groups:
        for item in group:
            logits = objective.model(input_ids=torch.tensor([item.input_ids])).logits[0].double().log_softmax(-1)
            first = max(item.prompt_tokens, 1)
            rows.append(sum(float(logits[place - 1, item.input_ids[place]]) for place in range(first, len(item.input_ids))))
    return torch.tensor(rows, dtype=torch.float64).view(len(groups), -1)


def tolerance(objective: Objective, groups: list[list[Encoded]]) -> torch.Tensor:
    """Per candidate: tokens * n u * the largest logit."""
    longest = collate([max(group, key=lambda item: len(item.input_ids)) for group in groups], 0)
    with torch.no_grad():
        size = float(objective.model(input_ids=longest.input_ids).logits.abs().max())
    tokens = torch.tensor([[item.answer_tokens for item in group] for group in groups], dtype=torch.float64)
    return tokens * PER_TOKEN * max(size, 6.0)  # the log of the vocabulary is below 6


@torch.no_grad()
def packed(objective: Objective, groups: list[list[Encoded]], pad_id: int = 0) -> torch.Tensor:
    return objective("scores", pack_candidates(groups, pad_id)).double()


@pytest.mark.parametrize("labels", LABELS.values(), ids=LABELS)
@pytest.mark.parametrize("prefix", [" ", ""], ids=["space", "joined"])
def test_packed_scores_are_those_of_each_candidate_alone(objective, labels, prefix):
    groups = groups_of(labels, prefix=prefix)
    wanted, allowed = plain(objective, groups), tolerance(objective, groups)
    assert ((packed(objective, groups) - wanted).abs() <= allowed).all()
    # The comparison means something: candidates lie much further apart than the tolerance.
    assert (wanted[:, 1:] - wanted[:, :1]).abs().min() > 10 * allowed.max()


def test_candidates_whose_prompts_split_before_the_answer(objective):
    """A label that merges with the end of the prompt: its boundary lies earlier, and only tokens after its own boundary count."""
    prompt = [5, 9, 40, 77]
    group = [
        Encoded([*prompt, 11, 12], 4, "0#0"),
        Encoded([5, 9, 40, 90, 13], 3, "0#1"),  # 77 was swallowed by 90
        Encoded([*prompt, 14], 4, "0#2"),
    ]
    found, wanted = packed(objective, [group]), plain(objective, [group])
    assert ((found - wanted).abs() <= tolerance(objective, [group])).all()
    pack = pack_candidates([group], 0)
    assert pack.targets.tolist() == [11, 12, 90, 13, 14] and pack.owner.tolist() == [0, 0, 1, 1, 2]


def test_by_hand_layout():
    """Prompt of 2, candidates of 2 and 1: tokens 0 1 | 2 3 | 4, positions 0 1 2 3 2."""
    pack = pack_candidates([[Encoded([7, 8, 1, 2], 2, "a"), Encoded([7, 8, 3], 2, "b")]], pad_id=99)
    assert pack.input_ids.tolist() == [[7, 8, 1, 2, 3]]
    assert pack.position_ids.tolist() == [[0, 1, 2, 3, 2]]
    assert pack.allowed[0, 0].int().tolist() == [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 0, 0, 1]]
    assert pack.positions.tolist() == [[0, 1], [0, 2], [0, 1]] and pack.targets.tolist() == [1, 2, 3] and pack.owner.tolist() == [0, 0, 1]


def test_order_of_candidates_does_not_matter(objective):
    groups = groups_of(LABELS["ragged"])
    order = [2, 0, 3, 1]
    shuffled = packed(objective, [[group[place] for place in order] for group in groups])
    found = packed(objective, groups)
    allowed = tolerance(objective, groups)[:, order]
    assert ((shuffled - found[:, order]).abs() <= 2 * allowed).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_padding_rows_are_finite_and_the_pad_id_is_nothing(dtype):
    """The short row is mostly padding; a query without any key would be NaN and spread through the next layer."""
    objective = Objective(tiny_llama(dtype=dtype), dtype)
    groups = groups_of(LABELS["ragged"])
    with torch.no_grad():
        pack = pack_candidates(groups, 3)
        hidden = objective._parts.backbone(
            input_ids=pack.input_ids, position_ids=pack.position_ids, attention_mask=pack.additive_mask(dtype), use_cache=False
        ).last_hidden_state
    assert (pack.allowed.sum(-1) >= 1).all()
    assert bool(torch.isfinite(hidden).all())
    # Masked keys get a weight of exactly 0, so what stands in the padding cannot reach a score in any dtype.
    assert torch.equal(packed(objective, groups, pad_id=3), packed(objective, groups, pad_id=250))


def test_company_in_the_batch_does_not_matter(objective):
    groups = groups_of(LABELS["shared first tokens"])
    alone = torch.cat([packed(objective, [group]) for group in groups])
    assert ((packed(objective, groups) - alone).abs() <= 2 * tolerance(objective, groups)).all()


def test_sparse_models_score_alike_packed_and_plain():
    """Routing is by token, so packing is exact for mixtures of experts too."""
    objective = Objective(tiny_qwen3_moe(), torch.float32)
    groups = groups_of(LABELS["ragged"][:3], PROMPTS[:2])
    assert ((packed(objective, groups) - plain(objective, groups)).abs() <= tolerance(objective, groups)).all()


def test_accuracy_counts_and_loss_by_hand_for_any_batching(objective):
    groups = groups_of(LABELS["ragged"])
    scores = plain(objective, groups)
    best = scores.argmax(-1).tolist()
    labels = [best[0], best[1], (best[2] + 1) % 4, best[3]]
    wanted_loss = float(torch.nn.functional.cross_entropy(scores, torch.tensor(labels)))
    backend = InferenceBackend(objective)
    for options in ({}, {"max_batch": 1}, {"max_tokens": 90}, {"packed": False}, {"packed": False, "max_tokens": 64}):
        found = label_accuracy(backend, groups, labels, 0, **options)
        assert (found.correct, found.n) == (3, 4) and found.value == 0.75
        # A log-loss moves by at most twice the largest move of a score.
        assert found.loss == pytest.approx(wanted_loss, abs=2 * float(tolerance(objective, groups).max()), rel=0)


def test_wilson_interval_by_hand():
    """30 of 40: (p + z^2/2n +- z sqrt(p(1-p)/n + z^2/4n^2)) / (1 + z^2/n), z = 1.959964."""
    from prism_ray.training.evaluate import Accuracy

    low, high = Accuracy(correct=30, n=40, loss=0.0).interval
    assert low == pytest.approx(0.59806, abs=1e-5) and high == pytest.approx(0.85813, abs=1e-5)
