"""The tiny models: deterministic, silent about the global random state, of widths that both FP4 formats can block."""

import pytest
import torch
from torch import nn

from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import ConfigError
from prism_ray.models.load import load_model, load_tokenizer
from prism_ray.models.tiny import TINY_VOCAB_SIZE, save_tiny, tiny_llama, tiny_qwen3_moe, tiny_tokenizer

TEXTS = ["", "Hello the thing", "  two  spaces\n\ttab", "é 日本 🙂", "a</s><|user|>b<pad>", "in the winter of 1999"]


def digest(model):
    return sha256_tensors(model.state_dict().items())


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3_moe])
def test_the_seed_decides_every_weight_and_the_global_state_none(build):
    torch.manual_seed(123)
    before = torch.get_rng_state()
    first = digest(build(0))
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(321)
    assert digest(build(0)) == first
    assert digest(build(1)) != first


@pytest.mark.parametrize("build", [tiny_llama, tiny_qwen3_moe])
def test_every_linear_width_is_a_multiple_of_32(build):
    model = build()
    widths = [module.in_features for module in model.modules() if isinstance(module, nn.Linear)]
    widths += [weight.shape[-1] for name, weight in model.named_parameters() if ".experts." in name]
    assert widths and all(width % 32 == 0 for width in widths)
    assert not model.training


def test_the_experts_are_fused():
    experts = tiny_qwen3_moe(num_experts=6).model.layers[0].mlp.experts
    assert experts.gate_up_proj.shape == (6, 64, 64) and experts.down_proj.shape == (6, 64, 32)


def test_widths_that_no_block_fits_are_refused():
    with pytest.raises(ConfigError, match="hidden_size is 48"):
        tiny_llama(hidden_size=48)
    with pytest.raises(ConfigError, match="moe_intermediate_size is 16"):
        tiny_qwen3_moe(moe_intermediate_size=16)
    with pytest.raises(ConfigError, match="experts_per_token is 5"):
        tiny_qwen3_moe(experts_per_token=5)


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_round_trips_through_the_tokenizer(text):
    tokenizer = tiny_tokenizer()
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text
    assert all(0 <= index < TINY_VOCAB_SIZE for index in ids)


def test_the_tokenizer_merges_pads_and_chats():
    tokenizer = tiny_tokenizer()
    assert len(tokenizer) == TINY_VOCAB_SIZE == 288
    assert len(tokenizer(" the").input_ids) == 1
    batch = tokenizer(["a", "abc"], padding=True)
    assert batch.input_ids[0] == [*tokenizer("a").input_ids, tokenizer.pad_token_id, tokenizer.pad_token_id]
    assert batch.attention_mask == [[1, 0, 0], [1, 1, 1]]
    prompt = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True)
    assert prompt == "<|user|>hi</s><|assistant|>"
    assert tokenizer(prompt).input_ids == [
        tokenizer.convert_tokens_to_ids(token) for token in ("<|user|>", "h", "i", "</s>", "<|assistant|>")
    ]


def test_the_models_know_the_tokenizers_special_tokens():
    tokenizer = tiny_tokenizer()
    for config in (tiny_llama().config, tiny_qwen3_moe().config):
        ids = (tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id)
        assert (config.pad_token_id, config.bos_token_id, config.eos_token_id) == ids


@pytest.mark.parametrize("model", [tiny_llama(), tiny_llama(tie=False), tiny_qwen3_moe()], ids=["tied", "untied", "moe"])
def test_a_saved_model_loads_with_the_same_logits_and_tokens(tmp_path, model):
    folder = save_tiny(tmp_path / "model", model)
    ids = torch.arange(12).reshape(2, 6)
    again = load_model(folder, dtype=torch.float32)
    assert torch.equal(again(ids).logits, model(ids).logits)
    tokenizer = load_tokenizer(folder)
    for text in TEXTS:
        assert tokenizer(text).input_ids == tiny_tokenizer()(text).input_ids
    assert tokenizer.chat_template == tiny_tokenizer().chat_template
    with pytest.raises(FileExistsError):
        save_tiny(folder)
