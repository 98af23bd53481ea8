"""prism_ray.training.data: answer boundary, masks, padding, step order."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from prism_ray.core.errors import ConfigError, DataError
from prism_ray.training.data import Batch, Encoded, StepSampler, batches_by_length, collate, encode, encode_all, encode_candidates, shard
from prism_ray.training.task import Example

CORPUS = ["the disk is full", "question: what is full? answer: the disk", "card arrival", "a slow query is slow"] * 4


def build(*, bos: bool = False, eos: bool = False) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer in memory; pad id == end id, as many real ones have it."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        CORPUS, trainers.BpeTrainer(vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False)
    )
    single = ("<s> " if bos else "") + "$A" + (" </s>" if eos else "")
    raw.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 0), ("</s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>", pad_token="</s>")


PLAIN, BOS, BOS_EOS = build(), build(bos=True), build(bos=True, eos=True)
END = 1


def decoded(ids: list[int]) -> str:
    return str(PLAIN.decode(ids, clean_up_tokenization_spaces=False))


@pytest.mark.parametrize("tokenizer", [PLAIN, BOS, BOS_EOS])
def test_boundary_and_eos(tokenizer: PreTrainedTokenizerFast) -> None:
    example = Example("train-1", "question: what is full?", "the disk", None)
    found = encode(example, tokenizer)
    assert found.input_ids.count(END) == 1 and found.input_ids[-1] == END
    prompt, answer = found.input_ids[: found.prompt_tokens], found.input_ids[found.prompt_tokens :]
    assert decoded([token for token in prompt if token]) == "question: what is full?"
    assert decoded(answer[:-1]) == " the disk"
    assert encode(example, tokenizer, add_eos=False).input_ids == found.input_ids[:-1]
    assert (found.input_ids[0] == 0) == (tokenizer is not PLAIN)


def test_a_token_across_the_border_is_an_answer_token() -> None:
    # "fu" + "ll" are the one token "full" when joined, so nothing of it may count as prompt.
    example = Example("x", "the disk is fu", "ll", None)
    found = encode(example, PLAIN, answer_prefix="", add_eos=False)
    assert found.input_ids == PLAIN("the disk is full")["input_ids"]
    assert decoded(found.input_ids[: found.prompt_tokens]) == "the disk is"
    assert found.answer_tokens == 1


@settings(max_examples=60, deadline=None)
@given(st.text(max_size=30), st.text(max_size=20), st.sampled_from(["", " ", "\n"]), st.integers(2, 40), st.booleans())
def test_encode_properties(prompt: str, answer: str, prefix: str, max_tokens: int, add_eos: bool) -> None:
    example = Example("x", prompt, answer, None)
    joined = list(BOS(prompt + prefix + answer)["input_ids"])
    alone = list(BOS(prompt)["input_ids"])
    try:
        found = encode(example, BOS, answer_prefix=prefix, max_tokens=max_tokens, add_eos=add_eos)
    except DataError:
        assert not add_eos and joined == alone[: len(joined)]
        return
    full = joined + [END] * add_eos
    assert 2 <= len(found.input_ids) <= max_tokens
    assert len(full) == len(found.input_ids) + found.cut_prompt_tokens + found.cut_answer_tokens
    boundary = found.prompt_tokens + found.cut_prompt_tokens
    assert full[:boundary] == alone[:boundary] and (boundary == len(alone) or full[boundary] != alone[boundary])
    # What is kept is the end of the prompt (after BOS) and the beginning of the answer.
    assert found.input_ids[found.prompt_tokens :] == full[boundary : len(full) - found.cut_answer_tokens]
    kept = found.input_ids[1 : found.prompt_tokens]
    assert kept == full[boundary - len(kept) : boundary]


def test_truncation_is_counted() -> None:
    long = Example("long", "the disk is full " * 20, "card", None)
    short = Example("short", "the disk", "card", None)
    wordy = Example("wordy", "the disk", "slow query " * 20, None)
    found = encode_all([long, short, wordy], BOS, max_tokens=12)
    assert (found.truncated_prompts, found.truncated_answers) == (2, 1)
    first, second, third = found.items
    assert (second.cut_prompt_tokens, second.cut_answer_tokens) == (0, 0)
    assert len(first.input_ids) == len(third.input_ids) == 12
    assert first.input_ids[0] == 0 and first.input_ids[-1] == END
    assert third.input_ids[-1] != END and third.prompt_tokens == 1


def test_candidates_share_the_prompt() -> None:
    example = Example("test-7", "question: what is full? the disk is full answer:", "x", None)
    found = encode_candidates(example, ["card", "the disk is slow, the query is slow"], BOS, max_tokens=16)
    assert [item.id for item in found] == ["test-7#0", "test-7#1"]
    left, right = (item.input_ids[: item.prompt_tokens] for item in found)
    assert left == right and found[0].cut_prompt_tokens > 0
    assert len(found[0].input_ids) < len(found[1].input_ids) <= 16
    assert END not in found[0].input_ids


def test_candidates_stay_aligned_where_one_merges_with_the_prompt() -> None:
    example = Example("x", "the disk is slow, the disk is fu", "x", None)
    found = encode_candidates(example, ["ll", "query"], PLAIN, answer_prefix="", max_tokens=8)
    merged, other = found
    assert 0 < merged.cut_prompt_tokens == other.cut_prompt_tokens
    assert merged.prompt_tokens < other.prompt_tokens
    assert merged.input_ids[: merged.prompt_tokens] == other.input_ids[: merged.prompt_tokens]
    assert max(len(item.input_ids) for item in found) == 8


def test_chat_template() -> None:
    tokenizer = build(bos=True)
    example = Example("x", "what is full?", "the disk", None)
    with pytest.raises(ConfigError, match="no chat template"):
        encode(example, tokenizer, chat=True)
    tokenizer.chat_template = (
        "<s>{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}{% if add_generation_prompt %}bot:{% endif %}"
    )
    found = encode(example, tokenizer, chat=True, answer_prefix="")
    assert found.input_ids[:1] == [0] and found.input_ids.count(0) == 1
    # The template's own end token stays in the prompt; the added one ends the answer.
    assert found.input_ids[: found.prompt_tokens].count(END) == 1
    assert decoded(found.input_ids[found.prompt_tokens : -1]) == "the disk"


def test_nothing_to_score() -> None:
    with pytest.raises(DataError, match="example x: the answer yields no token"):
        encode(Example("x", "the disk", "", None), PLAIN, answer_prefix="", add_eos=False)
    with pytest.raises(DataError, match="no token"):
        encode(Example("x", "", "a", None), PLAIN, answer_prefix="", add_eos=False)
    bare = build()
    bare.eos_token = None
    with pytest.raises(ConfigError, match="no end-of-sequence token"):
        encode(Example("x", "the disk", "a", None), bare)


# --- batches --------------------------------------------------------------------------------------------------------------------


def test_collate_by_hand() -> None:
    batch = collate([Encoded([5, 6, 7, END], 2, "a"), Encoded([8, END, 9], 1, "b"), Encoded([4, 3], 0, "c")], pad_id=END)
    assert batch.input_ids.tolist() == [[5, 6, 7, END], [8, END, 9, END], [4, 3, END, END]]
    assert batch.attention_mask.tolist() == [[1, 1, 1, 1], [1, 1, 1, 0], [1, 1, 0, 0]]
    assert batch.answer_mask.int().tolist() == [[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 0]]
    assert batch.targets.tolist() == [7, END, END, 9, 3]
    assert batch.target_rows.tolist() == [0, 0, 1, 1, 2]
    assert (batch.answer_tokens, batch.ids) == (5, ("a", "b", "c"))
    assert (batch.input_ids.dtype, batch.attention_mask.dtype, batch.answer_mask.dtype) == (torch.int64, torch.int64, torch.bool)
    with pytest.raises(dataclasses.FrozenInstanceError):
        batch.ids = ()  # type: ignore[misc]
    assert isinstance(batch.to("cpu"), Batch)
    with pytest.raises(ValueError, match="empty batch"):
        collate([], 0)


# Few ids, so that pad, end and id 0 all occur as text.
encoded_item = st.lists(st.integers(0, 3), min_size=2, max_size=20).flatmap(
    lambda ids: st.integers(0, len(ids) - 1).map(lambda prompt: Encoded(ids, prompt, f"{len(ids)}-{prompt}"))
)


@settings(max_examples=150, deadline=None)
@given(st.lists(encoded_item, min_size=1, max_size=6), st.integers(0, 3))
def test_padding_never_counts(items: list[Encoded], pad_id: int) -> None:
    """Field cases DRF-01 and CAL-07: a batch scores exactly what its members score alone, whatever the pad id."""
    batch = collate(items, pad_id)
    alone = [collate([item], pad_id) for item in items]
    assert batch.answer_tokens == sum(item.answer_tokens for item in items) == int(batch.answer_mask.sum())
    assert torch.equal(batch.targets, torch.cat([single.targets for single in alone]))
    assert int(batch.attention_mask.sum()) == sum(len(item.input_ids) for item in items)
    assert not batch.answer_mask[:, -1].any()
    rows, columns = batch.answer_mask.nonzero(as_tuple=True)
    assert torch.equal(batch.input_ids[rows, columns + 1], batch.targets)
    assert (batch.attention_mask[rows, columns + 1] == 1).all()
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        assert column + 1 >= items[row].prompt_tokens


# --- order ----------------------------------------------------------------------------------------------------------------------


@settings(max_examples=80, deadline=None)
@given(st.integers(1, 40), st.integers(1, 50), st.integers(0, 3))
def test_sampler_epochs_are_permutations(count: int, batch: int, seed: int) -> None:
    sampler = StepSampler(count, batch, seed)
    steps = [sampler.indices(step) for step in range(3 * count // batch + 2)]
    assert all(len(step) == batch for step in steps)
    flat = [index for step in steps for index in step]
    for epoch in range(len(flat) // count):
        assert sorted(flat[epoch * count : (epoch + 1) * count]) == list(range(count))
    # Any step alone, in any order, from a new object: the same.
    assert [StepSampler(count, batch, seed).indices(step) for step in reversed(range(len(steps)))] == steps[::-1]


def test_sampler_seeds_differ_and_known_order() -> None:
    orders = {tuple(StepSampler(30, 30, seed).indices(epoch)) for seed in range(3) for epoch in range(3)}
    assert len(orders) == 9
    # Pinned: a change of this order would change the batches of every resumed run.
    assert StepSampler(5, 4, 0).indices(7) == [1, 3, 2, 4]
    assert StepSampler(10, 4, 0).epoch(5) == 2.0
    for count, batch in ((0, 1), (1, 0)):
        with pytest.raises(ConfigError, match="cannot draw batches"):
            StepSampler(count, batch, 0)


@given(st.lists(st.integers()), st.integers(1, 8))
def test_shards_part_the_batch(indices: list[int], world: int) -> None:
    shards = [shard(indices, rank, world) for rank in range(world)]
    assert sorted(index for part in shards for index in part) == sorted(indices)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1
    with pytest.raises(ValueError, match="rank"):
        shard(indices, world, world)


@settings(max_examples=80, deadline=None)
@given(st.lists(encoded_item, max_size=30), st.integers(1, 8), st.integers(1, 60))
def test_batches_by_length(items: list[Encoded], max_batch: int, max_tokens: int) -> None:
    batches = list(batches_by_length(items, max_batch, max_tokens))
    assert sorted(index for batch in batches for index in batch) == list(range(len(items)))
    lengths = [[len(items[index].input_ids) for index in batch] for batch in batches]
    assert all(len(batch) <= max_batch and (len(batch) == 1 or len(batch) * max(batch) <= max_tokens) for batch in lengths)
    assert [length for batch in lengths for length in batch] == sorted((length for batch in lengths for length in batch), reverse=True)
    assert batches == list(batches_by_length(items, max_batch, max_tokens))


def test_batches_by_length_refuses_zero() -> None:
    with pytest.raises(ConfigError):
        list(batches_by_length([], 0, 1))
