"""Tokenization, masks, batches and their order; torch only.

Legend: B sequences of a batch, S longest length, n scored positions of the batch.

The tokens of an example are those of the *joined* text prompt + separator + answer, and the boundary is the longest common prefix of its
tokens with those of the prompt alone: a token that straddles the border is an answer token. Position t of a sequence is scored when
token t+1 is an answer token; the first token of a sequence is never a target. Lengths, not token ids, decide what is padding, so a pad id
that equals the end id (or id 0) neither adds nor removes a scored position.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch

from prism_ray.core.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from prism_ray.training.task import Example


@dataclass(frozen=True, slots=True)
class Encoded:
    """Tokens of one example. prompt_tokens: how many leading ids are prompt; cut_*: how many tokens did not fit and were left out."""

    input_ids: list[int]
    prompt_tokens: int
    id: str
    cut_prompt_tokens: int = 0
    cut_answer_tokens: int = 0

    @property
    def answer_tokens(self) -> int:
        """Scored tokens: all after the prompt, except a sequence's very first one."""
        return len(self.input_ids) - max(self.prompt_tokens, 1)


@dataclass(frozen=True, slots=True)
class EncodedSet:
    """Encoded examples, and how many of them lost prompt or answer tokens to `max_tokens`."""

    items: list[Encoded]
    truncated_prompts: int
    truncated_answers: int


@dataclass(frozen=True, slots=True)
class Batch:
    """A right-padded batch.

    input_ids, attention_mask: int64 [B, S]; answer_mask: bool [B, S], true where the *next* token is an answer token;
    targets: int64 [n], so that hidden[answer_mask] (row-major) pairs with targets; ids: the examples' ids, B of them.
    """

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    answer_mask: torch.Tensor
    targets: torch.Tensor
    ids: tuple[str, ...]

    @property
    def answer_tokens(self) -> int:
        """n, the number of scored positions."""
        return self.targets.numel()

    @property
    def target_rows(self) -> torch.Tensor:
        """int64 [n]: the batch row that each target belongs to, for sums by sequence."""
        return self.answer_mask.nonzero()[:, 0]

    def to(self, device: torch.device | str) -> Batch:
        """The batch on another device."""
        return Batch(
            self.input_ids.to(device), self.attention_mask.to(device), self.answer_mask.to(device), self.targets.to(device), self.ids
        )


def encode(
    example: Example,
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer_prefix: str = " ",
    max_tokens: int = 512,
    add_eos: bool = True,
    chat: bool = False,
) -> Encoded:
    """Tokenize prompt + answer_prefix + answer, at most `max_tokens` ids.

    A prompt that is too long loses its beginning (a leading BOS stays); an answer that alone does not fit keeps one prompt token and
    loses its end and its EOS. Both are counted in the result. chat: the prompt is rendered through the tokenizer's chat template, with the
    generation prompt, and no special tokens are added. DataError when the answer yields no token to score.
    """
    prompt, full = _tokens(example, [example.answer], tokenizer, answer_prefix, add_eos, chat)
    cut, keep_bos = _prompt_cut(prompt, full, max_tokens, tokenizer)
    return _fit(example.id, _boundary(prompt, full[0]), full[0], cut, keep_bos, max_tokens)


def encode_candidates(
    example: Example,
    answers: Sequence[str],
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer_prefix: str = " ",
    max_tokens: int = 512,
    add_eos: bool = False,
    chat: bool = False,
) -> list[Encoded]:
    """`encode` once per answer, ids '<id>#<position>', for scoring labels by answer log-likelihood.

    All candidates see the same part of a too long prompt (what the longest answer leaves), so that their scores compare.
    """
    prompt, full = _tokens(example, answers, tokenizer, answer_prefix, add_eos, chat)
    cut, keep_bos = _prompt_cut(prompt, full, max_tokens, tokenizer)
    return [_fit(f"{example.id}#{index}", _boundary(prompt, ids), ids, cut, keep_bos, max_tokens) for index, ids in enumerate(full)]


def encode_all(
    examples: Sequence[Example],
    tokenizer: PreTrainedTokenizerBase,
    *,
    answer_prefix: str = " ",
    max_tokens: int = 512,
    add_eos: bool = True,
    chat: bool = False,
) -> EncodedSet:
    """`encode` every example; the result says how many were truncated, which the caller must print."""
    items = [encode(item, tokenizer, answer_prefix=answer_prefix, max_tokens=max_tokens, add_eos=add_eos, chat=chat) for item in examples]
    return EncodedSet(items, sum(item.cut_prompt_tokens > 0 for item in items), sum(item.cut_answer_tokens > 0 for item in items))


def collate(items: Sequence[Encoded], pad_id: int) -> Batch:
    """Right-pad to the longest; see `Batch`. ValueError for an empty batch."""
    if not items:
        raise ValueError("an empty batch has no shape")
    shape = (len(items), max(len(item.input_ids) for item in items))
    input_ids = torch.full(shape, pad_id, dtype=torch.int64)
    attention_mask = torch.zeros(shape, dtype=torch.int64)
    answer_mask = torch.zeros(shape, dtype=torch.bool)
    targets: list[int] = []
    for row, item in enumerate(items):
        length, first = len(item.input_ids), max(item.prompt_tokens, 1)
        input_ids[row, :length] = torch.tensor(item.input_ids, dtype=torch.int64)
        attention_mask[row, :length] = 1
        answer_mask[row, first - 1 : length - 1] = True
        targets += item.input_ids[first:]
    return Batch(input_ids, attention_mask, answer_mask, torch.tensor(targets, dtype=torch.int64), tuple(item.id for item in items))


class StepSampler:
    """Which examples each optimizer step sees, as a pure function of (num_examples, batch_size, seed, step).

    The epochs' permutations, each seeded by (seed, epoch), are laid end to end and cut into batches of exactly `batch_size`; a batch may
    cross an epoch border. A resumed run therefore sees the same batches, and any rank can compute the whole global batch.
    """

    def __init__(self, num_examples: int, batch_size: int, seed: int):
        if num_examples < 1 or batch_size < 1:
            raise ConfigError(
                f"cannot draw batches of {batch_size} from {num_examples} examples", where="batch_size", remedy="both must be 1 or more"
            )
        self.num_examples, self.batch_size, self.seed = num_examples, batch_size, seed

    def indices(self, step: int) -> list[int]:
        """The example indices of a step (0-based), `batch_size` of them."""
        first = step * self.batch_size
        return [
            _permutation(self.num_examples, self.seed, place // self.num_examples)[place % self.num_examples]
            for place in range(first, first + self.batch_size)
        ]

    def epoch(self, step: int) -> float:
        """Passes over the data that are complete before `step`."""
        return step * self.batch_size / self.num_examples


def shard(indices: Sequence[int], rank: int, world: int) -> list[int]:
    """Every `world`-th index from `rank` on: the shards part the batch. A shard is empty when there are fewer indices than ranks."""
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank} is not in 0..{world - 1}")
    return list(indices[rank::world])


def batches_by_length(items: Sequence[Encoded], max_batch: int, max_batch_tokens: int) -> Iterator[list[int]]:
    """Index lists that part `items` into batches of similar length, longest first, for evaluation.

    A batch has at most `max_batch` sequences and at most `max_batch_tokens` tokens *after padding*; a single longer sequence makes
    a batch of its own. Longest first, so that a batch that does not fit memory fails at once. Ties keep the order of `items`.
    """
    if max_batch < 1 or max_batch_tokens < 1:
        raise ConfigError("max_batch and max_batch_tokens must be 1 or more", where="max_batch")
    order = sorted(range(len(items)), key=lambda index: (-len(items[index].input_ids), index))
    start = 0
    while start < len(order):
        longest = max(1, len(items[order[start]].input_ids))
        size = min(max_batch, max(1, max_batch_tokens // longest))
        yield order[start : start + size]
        start += size


@lru_cache(maxsize=4)
def _permutation(num_examples: int, seed: int, epoch: int) -> tuple[int, ...]:
    order = list(range(num_examples))
    # Seeded by text: Python hashes it with SHA-512, so neighbouring seeds and epochs are unrelated.
    random.Random(f"prism-ray order {seed} {epoch}").shuffle(order)
    return tuple(order)


def _tokens(
    example: Example, answers: Sequence[str], tokenizer: PreTrainedTokenizerBase, prefix: str, add_eos: bool, chat: bool
) -> tuple[list[int], list[list[int]]]:
    """Ids of the prompt alone, and of prompt + prefix + answer for each answer; EOS at the end exactly where `add_eos`."""
    prompt = _render_chat(example.prompt, tokenizer) if chat else example.prompt
    texts = [prompt, *(prompt + prefix + answer for answer in answers)]
    rows: list[list[int]] = [list(ids) for ids in tokenizer(texts, add_special_tokens=not chat)["input_ids"]]
    end = tokenizer.eos_token_id
    if add_eos and end is None:
        raise ConfigError("the tokenizer has no end-of-sequence token", where="add_eos", remedy="use a tokenizer that declares eos_token")
    for ids, text in zip(rows, texts, strict=True):
        # Some tokenizers append EOS themselves; in the prompt it would end the text before the answer.
        if ids and ids[-1] == end and not text.endswith(str(tokenizer.eos_token)) and len(ids) > (ids[0] == tokenizer.bos_token_id):
            ids.pop()
    return rows[0], [[*ids, end] if add_eos else ids for ids in rows[1:]]


def _render_chat(prompt: str, tokenizer: PreTrainedTokenizerBase) -> str:
    if not tokenizer.chat_template:
        raise ConfigError("the tokenizer has no chat template", where="chat", remedy="set chat=false, or use an instruction-tuned model")
    return str(tokenizer.apply_chat_template([{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True))


def _boundary(prompt: Sequence[int], full: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    for place, (left, right) in enumerate(zip(prompt, full, strict=False)):
        if left != right:
            return place
    return min(len(prompt), len(full))


def _prompt_cut(
    prompt: Sequence[int], full: Sequence[Sequence[int]], max_tokens: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, bool]:
    """(how many prompt tokens to leave out, whether a leading BOS stays) so that the longest of `full` fits.

    The same for all candidates, also where one of them merges with the last prompt token, so that their prompts stay aligned. At least one
    prompt token is kept, since the first answer token needs a position to predict it.
    """
    common = min(_boundary(prompt, ids) for ids in full)
    room = max(1, max_tokens - (max(map(len, full)) - common))
    keep_bos = room > 1 and common > 0 and prompt[0] == tokenizer.bos_token_id
    return max(0, common - room), keep_bos


def _fit(name: str, boundary: int, full: list[int], cut_prompt: int, keep_bos: bool, max_tokens: int) -> Encoded:
    ids = [full[0], *full[cut_prompt + 1 :]] if cut_prompt and keep_bos else full[cut_prompt:]
    cut_answer = max(0, len(ids) - max_tokens)
    result = Encoded(ids[: len(ids) - cut_answer], boundary - cut_prompt, name, cut_prompt, cut_answer)
    if result.answer_tokens < 1:
        raise DataError("the answer yields no token to score", where=f"example {name}", remedy="check the answer column and the tokenizer")
    return result
