"""Taking models apart: head(backbone(x)) is the model, tied storage is found whatever the names and the config say (CAL-09)."""

import pytest
import torch
import transformers
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch import nn

from prism_ray.core.errors import ModelError
from prism_ray.models.families import decoder_layers, shares_storage, split_head
from prism_ray.models.load import load_model
from prism_ray.models.tiny import save_tiny, tiny_llama, tiny_qwen3_moe

IDS = torch.arange(10).reshape(2, 5)
SMALL = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
# Families whose head differs in some way: softcap, scaled logits, other module names, no final norm of the usual kind, absolute positions.
FAMILIES = {
    "Llama": {},
    "Qwen2": {},
    "Qwen3": {},
    "Mistral": {},
    "Mixtral": {"num_local_experts": 4},
    "Gemma2": {"final_logit_softcapping": 2.0},
    "Olmo2": {},
    "Phi3": {},
    "Cohere": {"logit_scale": 0.25},
    "Granite": {"logits_scaling": 4.0},
    "FalconH1": {"lm_head_multiplier": 0.5, "mamba_d_ssm": 32, "mamba_n_heads": 2, "mamba_d_head": 16, "mamba_d_state": 8},
    "GPT2": {"n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64},
    "GPTNeoX": {},
    "OPT": {"ffn_dim": 64, "word_embed_proj_dim": 16},
}


def build(name, **options):
    config_class, model_class = getattr(transformers, f"{name}Config"), getattr(transformers, f"{name}ForCausalLM", None)
    common = {"vocab_size": 64, "pad_token_id": 0} if name == "GPT2" else SMALL
    torch.manual_seed(0)
    return (model_class or transformers.GPT2LMHeadModel)(config_class(**{**common, **options})).eval()


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_the_parts_of_each_family_give_the_models_logits(name):
    model = build(name, **FAMILIES[name])
    parts = split_head(model)
    hidden = parts.backbone(input_ids=IDS, attention_mask=torch.ones_like(IDS)).last_hidden_state
    assert hidden.shape == (2, 5, parts.head.in_features)
    # The same operations in the same order, so equal to the bit.
    assert torch.equal(parts.logits(hidden), model(IDS, attention_mask=torch.ones_like(IDS)).logits)
    assert len(decoder_layers(parts.backbone)) == 2
    assert parts.tied == bool(model.config.tie_word_embeddings)


def test_softcap_and_scale_are_reported():
    assert split_head(build("Gemma2", final_logit_softcapping=2.0)).softcap == 2.0
    assert split_head(build("Gemma2", final_logit_softcapping=None)).softcap is None
    assert split_head(build("Granite", logits_scaling=4.0)).logit_scale == 0.25
    assert split_head(build("Cohere", logit_scale=0.25)).logit_scale == 0.25
    plain = split_head(tiny_llama())
    assert (plain.softcap, plain.logit_scale) == (None, 1.0)


@pytest.mark.parametrize("tie", [True, False])
@pytest.mark.parametrize("tiny", [tiny_llama, tiny_qwen3_moe])
def test_a_tie_is_found_by_storage(tiny, tie):
    model = tiny(tie=tie)
    parts = split_head(model)
    assert parts.tied is tie
    assert parts.head is model.lm_head and parts.backbone is model.model


def test_a_tie_that_the_config_denies_is_refused():
    model = tiny_llama(tie=False)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(ModelError, match="share one storage, but config.tie_word_embeddings is false"):
        split_head(model)


def test_a_view_of_the_same_bytes_is_a_tie_too():
    model = tiny_llama(tie=False)
    model.lm_head.weight = nn.Parameter(model.model.embed_tokens.weight.data)
    assert model.lm_head.weight is not model.model.embed_tokens.weight
    with pytest.raises(ModelError, match="share one storage"):
        split_head(model)


def test_a_tie_that_the_config_claims_but_the_storages_lack_is_refused():
    model = tiny_llama(tie=True)
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    with pytest.raises(ModelError, match="tie_word_embeddings is true, but head and input embedding are different"):
        split_head(model)


def test_a_checkpoint_with_a_trained_head_beside_a_tied_config_is_refused(tmp_path):
    model = tiny_llama(tie=False)
    model.config.tie_word_embeddings = True
    loaded = load_model(save_tiny(tmp_path / "model", model), dtype=torch.float32)
    with pytest.raises(ModelError, match="LlamaForCausalLM: config.tie_word_embeddings is true"):
        split_head(loaded)


def test_empty_and_meta_weights_share_nothing_by_address():
    with torch.device("meta"):
        a, b = torch.empty(4, 4), torch.empty(4, 4)
    assert shares_storage(a, a) and not shares_storage(a, b)
    assert not shares_storage(torch.empty(0), torch.empty(0))
    assert not shares_storage(None, a)
    flat = torch.zeros(32)
    assert not shares_storage(flat[:16], flat[16:])
    assert shares_storage(flat[:16], flat[:16])


@torch.no_grad()
def test_a_peft_model_is_taken_apart_with_its_adapter_active():
    base = tiny_llama()
    before = base(IDS).logits
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "down_proj"], init_lora_weights=False)).eval()
    parts = split_head(model)
    assert parts.tied
    logits = parts.logits(parts.backbone(input_ids=IDS).last_hidden_state)
    assert torch.equal(logits, model(IDS).logits) and not torch.equal(logits, before)
    with model.disable_adapter():
        assert torch.equal(parts.logits(parts.backbone(input_ids=IDS).last_hidden_state), before)


@torch.no_grad()
def test_an_adapter_on_the_head_stays_linear_and_untied_storage_is_seen():
    model = get_peft_model(tiny_llama(tie=False), LoraConfig(r=4, target_modules=["lm_head"], init_lora_weights=False)).eval()
    parts = split_head(model)
    assert parts.head.in_features == 64 and not parts.tied
    assert torch.equal(parts.logits(parts.backbone(input_ids=IDS).last_hidden_state), model(IDS).logits)


def test_models_that_cannot_be_taken_apart_are_refused_by_name():
    config = tiny_llama().config
    with pytest.raises(ModelError, match=r"LlamaModel: has no linear head \(output embedding: none\)"):
        split_head(transformers.LlamaModel(config))
    with pytest.raises(ModelError, match="LlamaForSequenceClassification: has no linear head"):
        split_head(transformers.LlamaForSequenceClassification(config))
    t5 = transformers.T5Config(vocab_size=64, d_model=32, d_kv=16, d_ff=32, num_layers=1, num_heads=2)
    with pytest.raises(ModelError, match="T5ForConditionalGeneration: is an encoder-decoder"):
        split_head(transformers.T5ForConditionalGeneration(t5))
    with pytest.raises(ModelError, match="Linear: is no transformers model"):
        split_head(nn.Linear(2, 2))
    with pytest.raises(ModelError, match="Linear: has no decoder layers"):
        decoder_layers(nn.Linear(2, 2))


def test_a_head_that_is_not_linear_is_refused():
    model = tiny_llama(tie=False)
    model.lm_head = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 288))
    with pytest.raises(ModelError, match=r"LlamaForCausalLM: has no linear head \(output embedding: Sequential\)"):
        split_head(model)


def test_a_prompt_learning_adapter_is_refused():
    model = get_peft_model(tiny_llama(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    with pytest.raises(ModelError, match="adapter 'default' is a prompt-learning one"):
        split_head(model)


def test_an_unknown_logit_scaling_is_refused():
    model = tiny_llama()
    model.config.logits_scaling = 8.0
    with pytest.raises(ModelError, match="'logits_scaling' in a way that is not known for model type 'llama'"):
        split_head(model)
