"""A small looped causal language model: prelude, a non-residual loop-entry adapter, a residual core run T times, coda.

    e = prelude(embed(ids))        s_{t+1} = core(A [s_t ; e])   t = 0 … T-1        logits = head(norm(coda(s_T)))

A is one Linear 2h -> h over the concatenation of state and prelude output: nothing passes around it (looped-quantization, App. A), while every block of
prelude, core and coda adds to its input. Blocks are RMSNorm pre-norm, causal attention with rotary positions, and SwiGLU; no biases. T = config.num_loops
is the deployed recurrence depth; forward(num_loops=…) overrides it for one call.

*Initial state.* s_0 of the k-th real token of a sequence is row k of one fixed table of normal numbers, standard deviation config.state_std, drawn on the CPU from
config.state_seed: a function of the position alone, so neither the batch nor padding nor an earlier call changes it, and it is no part of the checkpoint.
As in Huginn it fills the state half of the adapter's first input with directions that no later step uses.

*Padding.* Positions count real tokens only and no real token attends to padding, so padding on either side leaves the logits of real tokens as they were, up to
the rounding of a longer reduction. A padding token attends to itself alone; its logits mean nothing.

Refuses: sequences of more real tokens than config.max_position_embeddings (the table has no row), widths that do not divide into heads. There is no key-value
cache: each step of each core block would need its own.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from prism_ray.core.errors import ConfigError, DataError
from prism_ray.models.tiny import MERGES, TINY_VOCAB_SIZE

MODEL_TYPE = "prism_looped"


class PrismLoopedConfig(PreTrainedConfig):
    """prelude_layers, core_layers, coda_layers: blocks of each part. num_loops: T. state_std, state_seed: of the initial state (module docstring)."""

    model_type = MODEL_TYPE

    vocab_size: int = TINY_VOCAB_SIZE
    hidden_size: int = 128
    intermediate_size: int = 512
    num_attention_heads: int = 4
    prelude_layers: int = 1
    core_layers: int = 2
    coda_layers: int = 1
    num_loops: int = 8
    state_std: float = 0.5
    state_seed: int = 0
    max_position_embeddings: int = 1024
    rope_theta: float = 10000.0
    rms_norm_eps: float = 1e-6
    initializer_range: float = 0.02
    tie_word_embeddings: bool = True
    use_cache: bool = False
    pad_token_id: int | None = 256 + len(MERGES)
    bos_token_id: int | None = 257 + len(MERGES)
    eos_token_id: int | list[int] | None = 258 + len(MERGES)

    def __post_init__(self, **kwargs: Any) -> None:
        if self.num_attention_heads < 1 or self.hidden_size % (2 * self.num_attention_heads):
            raise ConfigError(
                f"hidden_size {self.hidden_size} does not divide into {self.num_attention_heads} heads of even width", where="hidden_size"
            )
        if self.core_layers < 1 or self.num_loops < 1:
            raise ConfigError(
                f"core_layers is {self.core_layers} and num_loops {self.num_loops}, both must be at least 1", where=MODEL_TYPE
            )
        super().__post_init__(**kwargs)

    @property
    def num_hidden_layers(self) -> int:
        """Blocks that have weights of their own: prelude, core and coda."""
        return self.prelude_layers + self.core_layers + self.coda_layers


class RMSNorm(nn.Module):
    """w x / sqrt(mean x^2 + eps), in float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.square().mean(dim=-1, keepdim=True) + self.eps)).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention with rotary positions, as many key heads as query heads."""

    def __init__(self, config: PrismLoopedConfig):
        super().__init__()
        self.heads = config.num_attention_heads
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (
            nn.Linear(config.hidden_size, config.hidden_size, bias=False) for _ in range(4)
        )

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], allowed: Tensor | None) -> Tensor:
        batch, length, hidden = x.shape
        q, k, v = (proj(x).view(batch, length, self.heads, -1).transpose(1, 2) for proj in (self.q_proj, self.k_proj, self.v_proj))
        mixed = functional.scaled_dot_product_attention(
            _rotate(q, rotary), _rotate(k, rotary), v, attn_mask=allowed, is_causal=allowed is None
        )
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, length, hidden))


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: PrismLoopedConfig):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: PrismLoopedConfig):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, rotary: tuple[Tensor, Tensor], allowed: Tensor | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rotary, allowed)
        return x + self.mlp(self.post_attention_layernorm(x))


class PrismLoopedPreTrainedModel(PreTrainedModel):
    """What both classes share: config, prefix of the backbone."""

    config: PrismLoopedConfig
    config_class = PrismLoopedConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = False
    _supports_sdpa = True
    _no_split_modules = ["Block"]  # noqa: RUF012  (declared without ClassVar by transformers)


class PrismLoopedModel(PrismLoopedPreTrainedModel):
    """Token ids to the head's inputs."""

    def __init__(self, config: PrismLoopedConfig):
        super().__init__(config)
        self.embed_tokens: nn.Module = nn.Embedding(config.vocab_size, config.hidden_size)
        self.prelude = nn.ModuleList([Block(config) for _ in range(config.prelude_layers)])
        self.adapter = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.core = nn.ModuleList([Block(config) for _ in range(config.core_layers)])
        self.coda = nn.ModuleList([Block(config) for _ in range(config.coda_layers)])
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        # No buffer: from_pretrained builds the model without storage, and would have to be told how to fill one that is not in the file.
        self._table = initial_states(config)
        self.post_init()

    @property
    def layers(self) -> nn.ModuleList:
        """The blocks in order of first use, where families.decoder_layers looks; the adapter is none of them."""
        return nn.ModuleList([*self.prelude, *self.core, *self.coda])

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        num_loops: int | None = None,
        inputs_embeds: Tensor | None = None,
        **_: Any,
    ) -> BaseModelOutputWithPast:
        """input_ids [B, L] (or inputs_embeds [B, L, h]); attention_mask [B, L], 0 where padding."""
        if (input_ids is None) == (inputs_embeds is None):
            raise DataError("needs either input_ids or inputs_embeds", where=MODEL_TYPE)
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions, allowed = _positions(x, attention_mask, self.config.max_position_embeddings)
        rotary = _rotary(positions, self.config, x.dtype)
        for block in self.prelude:
            x = block(x, rotary, allowed)
        state = self._table.to(x.device)[positions].to(x.dtype).expand_as(x)
        steps = self.config.num_loops if num_loops is None else num_loops
        if steps < 1:
            raise ConfigError(f"num_loops is {steps}, expected at least 1", where=MODEL_TYPE)
        for _step in range(steps):
            state = self.adapter(torch.cat([state, x], dim=-1))
            for block in self.core:
                state = block(state, rotary, allowed)
        for block in self.coda:
            state = block(state, rotary, allowed)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(state))


class PrismLoopedForCausalLM(PrismLoopedPreTrainedModel, GenerationMixin):
    """The backbone with a language-model head, tied to the embedding where the config says so."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}  # noqa: RUF012

    def __init__(self, config: PrismLoopedConfig):
        super().__init__(config)
        self.model = PrismLoopedModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_loops: int | None = None,
        inputs_embeds: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        **_: Any,
    ) -> CausalLMOutputWithPast:
        """labels [B, L] are the input ids, shifted here; -100 is not scored. Other keywords that generate() passes are of no use here."""
        out = self.model(input_ids=input_ids, attention_mask=attention_mask, num_loops=num_loops, inputs_embeds=inputs_embeds)
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss: Any = None
        if labels is not None:
            # The logit of a padding position predicts a real token only in left padding: its label must not be scored there.
            target = labels if attention_mask is None else labels.masked_fill(~_predicted(attention_mask), -100)
            loss = functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), target[:, 1:].flatten(), ignore_index=-100)
        return CausalLMOutputWithPast(loss=loss, logits=logits)


def initial_states(config: PrismLoopedConfig) -> Tensor:
    """s_0 by position, float32 [max_position_embeddings, hidden], on the CPU whatever device is the default."""
    generator = torch.Generator().manual_seed(config.state_seed)
    drawn = torch.randn(config.max_position_embeddings, config.hidden_size, generator=generator, device="cpu")
    return drawn * config.state_std


def _positions(x: Tensor, mask: Tensor | None, limit: int) -> tuple[Tensor, Tensor | None]:
    """(positions [1 or B, L], which key each query may see [B, 1, L, L], or None for plain causal attention)."""
    length = x.shape[1]
    # A mask of ones takes the same attention kernel as none: the two must give the same bits.
    if mask is None or bool((mask != 0).all()):
        used, positions, allowed = length, torch.arange(length, device=x.device)[None], None
    else:
        real = mask != 0
        used = int(real.sum(dim=-1).max())
        causal = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()
        # Every query sees itself: a padding query that saw nothing would be NaN, and NaN times a zero weight is NaN.
        itself = torch.eye(length, dtype=torch.bool, device=x.device)
        positions, allowed = (real.cumsum(dim=-1) - 1).clamp(min=0), (causal & (real[:, None, :] | itself))[:, None]
    if used > limit:
        raise DataError(f"a sequence of {used} tokens is longer than max_position_embeddings {limit}", where=MODEL_TYPE, remedy="cut it")
    return positions, allowed


def _predicted(mask: Tensor) -> Tensor:
    """Real tokens that follow a real token, [B, L]."""
    real = mask != 0
    before = torch.zeros_like(real)
    before[:, 1:] = real[:, :-1]
    return real & before


def _rotary(positions: Tensor, config: PrismLoopedConfig, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosine and sine [1 or B, 1, L, head width / 2], computed in float32."""
    half = config.hidden_size // config.num_attention_heads // 2
    frequency = config.rope_theta ** (-torch.arange(half, device=positions.device, dtype=torch.float32) / half)
    angle = positions[:, None, :, None].float() * frequency
    return angle.cos().to(dtype), angle.sin().to(dtype)


def _rotate(x: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
    """Rotate the pairs (x_i, x_{i + d/2}) of each head [B, heads, L, d]."""
    cos, sin = rotary
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def looped_lm(seed: int = 0, *, std: float | None = None, dtype: torch.dtype = torch.float32, **fields: Any) -> PrismLoopedForCausalLM:
    """A seeded random model in eval mode, by default the preset of 1.1 M parameters apart from the embedding. The global random state is left alone.

    std: of the initial weights, default config.initializer_range; fields: of PrismLoopedConfig.
    """
    config = PrismLoopedConfig(**fields) if std is None else PrismLoopedConfig(initializer_range=std, **fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = PrismLoopedForCausalLM(config)
    model.config.dtype = dtype
    nn.Module.to(model, dtype)
    return model.eval()


def register() -> None:
    """Make transformers' Auto classes know the family; done on import, and harmless to repeat."""
    AutoConfig.register(MODEL_TYPE, PrismLoopedConfig, exist_ok=True)
    AutoModel.register(PrismLoopedConfig, PrismLoopedModel, exist_ok=True)
    AutoModelForCausalLM.register(PrismLoopedConfig, PrismLoopedForCausalLM, exist_ok=True)


register()
