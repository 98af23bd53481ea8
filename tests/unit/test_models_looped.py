"""The looped language model: its recurrence written out, padding, batches, saving, and the seams that the rest of the library takes it apart by."""

import pytest
import torch
from torch.nn import functional

from prism_ray.core.digests import sha256_tensors
from prism_ray.core.errors import ConfigError, DataError
from prism_ray.formats.policy import QuantPolicy, make_plan
from prism_ray.models.families import decoder_layers, split_head
from prism_ray.models.load import load_model
from prism_ray.models.looped import PrismLoopedConfig, PrismLoopedForCausalLM, _positions, _rotary, initial_states, looped_lm

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_loops": 3, "max_position_embeddings": 64}
# Sums of at most 64 float32 products of size about 1 through 6 block calls: 64 * 2^-24 * 6 = 2.3e-5 relative to logits of size about 1.
CLOSE = {"rtol": 1e-4, "atol": 3e-5}


def small(seed=0, **fields):
    return looped_lm(seed, std=0.2, **{**SMALL, **fields})


def tokens(rows=2, length=10, seed=0):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def test_the_seed_decides_every_weight_and_the_global_state_none():
    before = torch.get_rng_state()
    first = sha256_tensors(small(0).state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)
    assert sha256_tensors(small(0).state_dict().items()) == first
    assert sha256_tensors(small(1).state_dict().items()) != first


def test_the_preset_has_one_to_two_million_parameters_apart_from_the_embedding():
    model = looped_lm()
    assert 1e6 < sum(p.numel() for p in model.parameters()) - model.model.embed_tokens.weight.numel() < 2e6


@torch.no_grad()
def test_the_forward_pass_is_the_recurrence_written_out():
    model = small()
    ids = tokens()
    inner = model.model
    x = inner.embed_tokens(ids)
    positions, allowed = _positions(x, None, 64)
    rotary = _rotary(positions, model.config, x.dtype)
    e = inner.prelude[0](x, rotary, allowed)
    state = initial_states(model.config)[:10].expand(2, -1, -1)
    for _ in range(3):
        state = torch.cat([state, e], dim=-1) @ inner.adapter.weight.T
        for block in inner.core:
            state = block(state, rotary, allowed)
    logits = inner.norm(inner.coda[0](state, rotary, allowed)) @ inner.embed_tokens.weight.T
    torch.testing.assert_close(model(input_ids=ids).logits, logits, **CLOSE)


@torch.no_grad()
def test_no_identity_path_goes_around_the_adapter():
    model = small()
    model.model.adapter.weight.zero_()
    logits = model(input_ids=tokens()).logits
    torch.testing.assert_close(logits, logits[:1, :1].expand_as(logits), **CLOSE)


@torch.no_grad()
def test_the_number_of_loops_is_the_configs_unless_a_call_overrides_it():
    model, ids = small(), tokens()
    calls = []
    handle = model.model.adapter.register_forward_hook(lambda *_: calls.append(1))
    three, five = model(input_ids=ids).logits, model(input_ids=ids, num_loops=5).logits
    handle.remove()
    assert len(calls) == 8
    assert torch.equal(model(input_ids=ids, num_loops=3).logits, three)
    assert not torch.allclose(three, five, atol=1e-2)
    model.config.num_loops = 5
    assert torch.equal(model(input_ids=ids).logits, five)


@pytest.mark.parametrize("left", [True, False])
@torch.no_grad()
def test_padding_changes_nothing_at_real_tokens(left):
    model, ids = small(), tokens()
    alone = model(input_ids=ids[:1, :6]).logits[0]
    mask = torch.ones(2, 10, dtype=torch.long)
    padded = ids.clone()
    real = slice(4, 10) if left else slice(0, 6)
    mask[0] = 0
    mask[0, real] = 1
    padded[0, real] = ids[0, :6]
    logits = model(input_ids=padded, attention_mask=mask).logits
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits[0, real], alone, **CLOSE)
    torch.testing.assert_close(logits[1], model(input_ids=ids[1:]).logits[0], **CLOSE)


@torch.no_grad()
def test_a_mask_of_ones_gives_the_bits_of_no_mask():
    model, ids = small(), tokens()
    assert torch.equal(model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits, model(input_ids=ids).logits)


@torch.no_grad()
def test_a_token_changes_only_what_comes_after_it():
    model, ids = small(), tokens()
    other = ids.clone()
    other[:, 6] = (ids[:, 6] + 1) % 256
    a, b = model(input_ids=ids).logits, model(input_ids=other).logits
    torch.testing.assert_close(a[:, :6], b[:, :6], **CLOSE)
    assert ((a[:, 6:] - b[:, 6:]).abs().amax(dim=-1) > 1e-3).all()


@torch.no_grad()
def test_the_loss_scores_real_tokens_that_follow_real_tokens():
    model, ids = small(), tokens(1)
    mask = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1, 0, 0]])
    out = model(input_ids=ids, attention_mask=mask, labels=ids)
    torch.testing.assert_close(out.loss, functional.cross_entropy(out.logits[0, 3:7], ids[0, 4:8]))


@torch.no_grad()
def test_generation_is_greedy_without_a_cache():
    model, ids = small(), tokens(1, 5)
    model.generation_config.eos_token_id = None
    found = model.generate(ids, max_new_tokens=4, do_sample=False)
    expected = ids
    for _ in range(4):
        expected = torch.cat([expected, model(input_ids=expected).logits[:, -1:].argmax(dim=-1)], dim=1)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("tie", [True, False])
def test_a_saved_model_loads_with_the_same_logits(tie, tmp_path):
    model = small(tie_word_embeddings=tie, state_seed=7, state_std=0.8)
    model.save_pretrained(tmp_path / "model")
    again = load_model(tmp_path / "model", dtype=torch.float32)
    assert isinstance(again, PrismLoopedForCausalLM)
    assert torch.equal(again(input_ids=tokens()).logits, model(input_ids=tokens()).logits)
    assert split_head(again).tied is tie


def test_the_plan_names_every_projection_and_the_adapter():
    names = {entry.name for entry in make_plan(small(), QuantPolicy(format="mxfp4")).entries}
    assert {"model.adapter", "model.core.1.mlp.down_proj", "model.prelude.0.self_attn.q_proj", "model.coda.0.mlp.up_proj"} <= names
    assert len(names) == 4 * 7 + 1


def test_it_comes_apart_into_backbone_head_and_layers():
    model = small()
    parts = split_head(model)
    layers = decoder_layers(parts.backbone)
    assert parts.backbone is model.model and parts.tied
    assert [id(layer) for layer in layers] == [id(layer) for layer in (*model.model.prelude, *model.model.core, *model.model.coda)]
    assert len(layers) == model.config.num_hidden_layers == 4
    ids = tokens()
    assert torch.equal(parts.logits(parts.backbone(input_ids=ids).last_hidden_state), model(input_ids=ids).logits)


def test_the_initial_state_depends_on_the_position_and_the_seed_alone():
    config = PrismLoopedConfig(**SMALL)
    with torch.device("meta"):
        table = initial_states(config)
    assert table.device.type == "cpu" and torch.equal(table, initial_states(config))
    # 64 * 32 draws: the sample deviation of a normal has relative error 1 / sqrt(2 * 2048) = 1.6 %; four of them.
    assert float(table.std()) == pytest.approx(0.5, rel=0.065)
    assert not torch.equal(table, initial_states(PrismLoopedConfig(**SMALL, state_seed=1)))


def test_what_it_cannot_do_is_refused():
    with pytest.raises(ConfigError, match="does not divide into 3 heads"):
        PrismLoopedConfig(hidden_size=32, num_attention_heads=3)
    with pytest.raises(ConfigError, match="num_loops 0"):
        PrismLoopedConfig(num_loops=0)
    with pytest.raises(ConfigError, match="num_loops is 0"):
        small()(input_ids=tokens(), num_loops=0)
    with pytest.raises(DataError, match="65 tokens is longer than max_position_embeddings 64"):
        small()(input_ids=tokens(1, 65))
    padded = torch.cat([torch.zeros(1, 10), torch.ones(1, 64)], dim=1).long()
    assert small()(input_ids=tokens(1, 74), attention_mask=padded).logits.shape[1] == 74
