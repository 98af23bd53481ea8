"""Tiny random models and a tiny tokenizer, built from configs in memory: tests need no download and no seconds.

Every weight is drawn from the given seed and the global random state is left alone. in_features of every linear is a multiple of 32,
so that NVFP4 (blocks of 16) and MXFP4 (blocks of 32) both fit. The initial weights are larger than usual (std 0.1), so that argmax,
routing and quantization error are not decided by rounding noise.
"""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar

import torch
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast, Qwen3MoeConfig, Qwen3MoeForCausalLM

from prism_ray.core.errors import ConfigError
from prism_ray.core.files import atomic_folder

PAD, BOS, EOS = "<pad>", "<s>", "</s>"
SPECIAL_TOKENS = (PAD, BOS, EOS, "<|user|>", "<|assistant|>")
# Common English pairs in the byte-level alphabet, where Ġ stands for a space.
MERGES = (
    *("Ġ t", "h e", "i n", "r e", "o n", "Ġ a", "e r", "Ġt he", "Ġ s", "a t", "n d", "Ġ w", "o r", "i s", "e n", "Ġ o", "e s"),
    *("in g", "Ġ c", "i t", "a n", "Ġ b", "Ġ p", "o u", "Ġ f", "e d", "a l"),
)
TINY_VOCAB_SIZE = 256 + len(MERGES) + len(SPECIAL_TOKENS)
HEAD_DIM = 16
BLOCK = 32
INITIALIZER_STD = 0.1

CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)

M = TypeVar("M", bound=PreTrainedModel)


def tiny_llama(
    seed: int = 0,
    *,
    hidden_size: int = 64,
    num_layers: int = 2,
    intermediate_size: int = 128,
    vocab_size: int = TINY_VOCAB_SIZE,
    tie: bool = True,
    dtype: torch.dtype = torch.float32,
) -> LlamaForCausalLM:
    """A random Llama in eval mode; attention heads of 16, two query heads to a key-value head.

    Raises ConfigError for a width that is no multiple of 32.
    """
    _require_widths(hidden_size=hidden_size, intermediate_size=intermediate_size)
    config = LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // HEAD_DIM // 2,
        max_position_embeddings=512,
        initializer_range=INITIALIZER_STD,
        tie_word_embeddings=tie,
        pad_token_id=256 + len(MERGES),
        bos_token_id=257 + len(MERGES),
        eos_token_id=258 + len(MERGES),
    )
    return _build(LlamaForCausalLM, config, seed, dtype)


def tiny_qwen3_moe(
    seed: int = 0,
    *,
    num_experts: int = 4,
    experts_per_token: int = 2,
    hidden_size: int = 64,
    moe_intermediate_size: int = 32,
    num_layers: int = 2,
    vocab_size: int = TINY_VOCAB_SIZE,
    tie: bool = False,
    dtype: torch.dtype = torch.float32,
) -> Qwen3MoeForCausalLM:
    """A random Qwen3-MoE in eval mode, every layer sparse; transformers 5 fuses its experts:

    experts.gate_up_proj [experts, 2 * moe_intermediate, hidden] and experts.down_proj [experts, hidden, moe_intermediate].
    Raises ConfigError for a width that is no multiple of 32, or more experts per token than experts.
    """
    _require_widths(hidden_size=hidden_size, moe_intermediate_size=moe_intermediate_size)
    if not 1 <= experts_per_token <= num_experts:
        raise ConfigError(f"experts_per_token is {experts_per_token}, expected 1 to num_experts ({num_experts})", where="tiny_qwen3_moe")
    config = Qwen3MoeConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=2 * hidden_size,
        moe_intermediate_size=moe_intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=hidden_size // HEAD_DIM,
        num_key_value_heads=hidden_size // HEAD_DIM // 2,
        num_experts=num_experts,
        num_experts_per_tok=experts_per_token,
        decoder_sparse_step=1,
        norm_topk_prob=True,
        max_position_embeddings=512,
        initializer_range=INITIALIZER_STD,
        tie_word_embeddings=tie,
        pad_token_id=256 + len(MERGES),
        bos_token_id=257 + len(MERGES),
        eos_token_id=258 + len(MERGES),
    )
    return _build(Qwen3MoeForCausalLM, config, seed, dtype)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of TINY_VOCAB_SIZE tokens: any text round-trips, nothing is added to it, a chat template is set.

    Ids: the 256 bytes, the merges, then `<pad>`, `<s>`, `</s>` and two chat markers; padding on the right.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [(left, right) for left, right in (merge.split(" ") for merge in MERGES)]
    vocabulary = {token: index for index, token in enumerate([*alphabet, *(left + right for left, right in merges)])}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        bos_token=BOS,
        eos_token=EOS,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


def save_tiny(folder: Path | str, model: PreTrainedModel | None = None) -> Path:
    """Save a model (default `tiny_llama()`) and the tiny tokenizer as a Hugging Face folder, which appears whole; returns it.

    Raises FileExistsError when the folder exists.
    """
    folder = Path(folder)
    with atomic_folder(folder) as temporary:
        (tiny_llama() if model is None else model).save_pretrained(temporary)
        tiny_tokenizer().save_pretrained(temporary)
    return folder


def _build(cls: type[M], config: LlamaConfig | Qwen3MoeConfig, seed: int, dtype: torch.dtype) -> M:
    """Draw the weights in float32 on the CPU from a generator state of its own, then cast."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = cls(config)
    model.config.dtype = dtype
    nn.Module.to(model, dtype)
    return model.eval()


def _require_widths(**widths: int) -> None:
    for name, width in widths.items():
        if width <= 0 or width % BLOCK:
            raise ConfigError(f"{name} is {width}, expected a positive multiple of {BLOCK}", where=name)
