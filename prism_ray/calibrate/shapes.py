"""The weights of a model from its config.json alone: what a calibration plan needs to know, without weights and without transformers.

A family is a function config -> ModelShape, registered under its `model_type`. Names and shapes are those of the modules of transformers 5, where experts are
fused 3-D parameters; `ModelShape.parameters()` lists every one of them, and tests hold the list against the real modules on the meta device.

Weights that read the same tensor carry the same `reads` label and share one Gram matrix: q, k and v; gate and up; the shared expert and everything else behind
the same norm. Each routed expert has two of its own (hidden for gate_up, moe_intermediate for down). A block-diagonal linear (`groups` > 1) has one Gram a group.

Source bytes: bf16 unless `quantization_config` says fp8 (1 byte, one float32 or E8M0 scale a block) or mxfp4 (4.25 bits, experts only).
`expert_dtype: fp4` beside fp8 means MXFP4 experts. Other quantized sources are refused: they hold 4-bit codes already, or need a reader that is not there.

Legend: O out, I in, E experts.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prism_ray.core.errors import ModelError
from prism_ray.core.registry import Registry

BF16_BITS = 16.0
FP8_BITS = 8.0
MXFP4_BITS = 4.0 + 8.0 / 32
"""E2M1 codes with one E8M0 byte for 32 of them."""

JSON = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class WeightShape:
    """One linear weight [O, I], or the fused experts [E, O, I] of one projection.

    name: path inside the block, the 3-D parameter itself for experts. reads: label of the input that it shares. experts: 0 for a linear.
    groups: diagonal blocks, each with its own I inputs and O / groups outputs. transposed: experts stored [E, I, O]. bias: the linear has one.
    source_bits: bits a weight in the checkpoint that is read.
    """

    name: str
    rows: int
    columns: int
    reads: str
    experts: int = 0
    groups: int = 1
    transposed: bool = False
    bias: bool = False
    source_bits: float = BF16_BITS

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter in transformers."""
        pair = (self.columns, self.rows) if self.transposed else (self.rows, self.columns)
        return (self.experts, *pair) if self.experts else pair

    @property
    def parameter(self) -> str:
        """Name of the parameter inside the block."""
        return self.name if self.experts else f"{self.name}.weight"

    @property
    def count(self) -> int:
        """Values in the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class KeptShape:
    """A parameter that no quantizer touches: a norm, a bias, a router, an embedding."""

    name: str
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """Values in the parameter."""
        return math.prod(self.shape)


@dataclass(frozen=True, kw_only=True)
class AttentionShape:
    """What attention costs. heads, width of a query-key product and of a value, compressed keys a token beside the plain one, and whether the
    scores [heads, length, keys] are held as a tensor (a model that runs eager attention only)."""

    heads: int
    qk_width: int
    v_width: int
    extra_keys: float = 0.0
    eager: bool = False


@dataclass(frozen=True, kw_only=True)
class BlockShape:
    """One decoder block. kind: what the printed plan calls it. top_k: experts a token visits, 0 for a dense block."""

    kind: str
    weights: tuple[WeightShape, ...]
    kept: tuple[KeptShape, ...]
    attention: AttentionShape
    top_k: int = 0

    @property
    def experts(self) -> int:
        """Routed experts, 0 for a dense block."""
        return max((weight.experts for weight in self.weights), default=0)

    @property
    def count(self) -> int:
        """Values in the block's parameters."""
        return sum(weight.count for weight in self.weights) + sum(kept.count for kept in self.kept)

    @property
    def source_bytes(self) -> float:
        """Bytes of the block in the checkpoint that is read."""
        return sum(w.count * w.source_bits for w in self.weights) / 8 + sum(kept.count for kept in self.kept) * BF16_BITS / 8

    @property
    def flops_per_token(self) -> float:
        """Multiplications and additions of the weights for one token; attention scores not counted."""
        dense = sum(2.0 * w.count for w in self.weights if not w.experts)
        routed = sum(2.0 * w.rows * w.columns * self.top_k for w in self.weights if w.experts)
        return dense + routed + sum(2.0 * kept.count for kept in self.kept if len(kept.shape) > 1)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A causal language model. streams: residual streams that travel between blocks (hidden values each). outer: parameters outside the blocks.
    tied: the head is the embedding. prefix: path of block i is prefix.format(i)."""

    model_type: str
    hidden: int
    vocab: int
    blocks: tuple[BlockShape, ...]
    outer: tuple[KeptShape, ...]
    tied: bool
    streams: int = 1
    prefix: str = "model.layers.{}"

    def parameters(self) -> dict[str, tuple[int, ...]]:
        """Every parameter's name and shape, as `named_parameters()` of the transformers model gives them."""
        found = {kept.name: kept.shape for kept in self.outer}
        for index, block in enumerate(self.blocks):
            path = self.prefix.format(index)
            found |= {f"{path}.{weight.parameter}": weight.shape for weight in block.weights}
            found |= {f"{path}.{kept.name}": kept.shape for kept in block.kept}
        return found

    @property
    def count(self) -> int:
        """Parameters in all, a tied head once."""
        return sum(block.count for block in self.blocks) + sum(kept.count for kept in self.outer)

    @property
    def active(self) -> int:
        """Parameters that one token uses: all but the experts that it is not routed to."""
        idle = sum((w.experts - block.top_k) * w.rows * w.columns for block in self.blocks for w in block.weights if w.experts)
        return self.count - idle

    @property
    def source_bytes(self) -> float:
        """Bytes of the checkpoint that is read."""
        return sum(block.source_bytes for block in self.blocks) + sum(kept.count for kept in self.outer) * BF16_BITS / 8

    def kinds(self) -> list[tuple[BlockShape, list[int]]]:
        """Each distinct block with the indices where it stands, in order of first appearance."""
        found: dict[BlockShape, list[int]] = {}
        for index, block in enumerate(self.blocks):
            found.setdefault(block, []).append(index)
        return list(found.items())


FAMILIES: Registry[Callable[[Reader], ModelShape]] = Registry("model_type")


class Reader:
    """A config.json with one error for a key that is missing or of the wrong type, and the source's bits a weight."""

    def __init__(self, config: JSON, where: str):
        self.config, self.where = config, where
        self.dense_bits, self.expert_bits = _source_bits(config, where)

    def whole(self, key: str, default: int | None = None) -> int:
        """A whole number >= 0; ModelError when it is missing without a default."""
        value = self.config.get(key)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ModelError(f"'{key}' is {value!r}, a whole number is needed", where=self.where, remedy="give the model's own config.json")
        return value

    def linear(self, name: str, rows: int, columns: int, reads: str, **more: Any) -> WeightShape:
        """A linear stored at the source's dense precision."""
        return WeightShape(name=name, rows=rows, columns=columns, reads=reads, **({"source_bits": self.dense_bits} | more))

    def fused(self, name: str, rows: int, columns: int, reads: str, experts: int, *, transposed: bool = False) -> WeightShape:
        """Fused experts stored at the source's expert precision."""
        bits = self.expert_bits
        return WeightShape(name=name, rows=rows, columns=columns, reads=reads, experts=experts, transposed=transposed, source_bits=bits)

    def model(self, blocks: list[BlockShape], *outer: KeptShape, streams: int = 1) -> ModelShape:
        """The whole model around its blocks: embedding, final norm, and a head where it is not tied."""
        hidden, vocab, tied = self.whole("hidden_size"), self.whole("vocab_size"), bool(self.config.get("tie_word_embeddings", False))
        head = () if tied else (KeptShape(name="lm_head.weight", shape=(vocab, hidden)),)
        ends = (KeptShape(name="model.embed_tokens.weight", shape=(vocab, hidden)), KeptShape(name="model.norm.weight", shape=(hidden,)))
        return ModelShape(
            model_type=self.config["model_type"],
            hidden=hidden,
            vocab=vocab,
            blocks=tuple(blocks),
            outer=(*ends, *outer, *head),
            tied=tied,
            streams=streams,
        )


def _source_bits(config: JSON, where: str) -> tuple[float, float]:
    """Bits a weight of (linears, experts) in the checkpoint."""
    quantization = config.get("quantization_config")
    if quantization is None:
        return BF16_BITS, BF16_BITS
    method = quantization.get("quant_method")
    if method == "mxfp4":
        return BF16_BITS, MXFP4_BITS
    if method == "fp8":
        block = quantization.get("weight_block_size") or [1, 1]
        scale_bits = 8 if quantization.get("scale_fmt") == "ue8m0" else 32
        bits = FP8_BITS + (scale_bits / math.prod(block) if math.prod(block) > 1 else 0.0)
        return bits, MXFP4_BITS if config.get("expert_dtype") == "fp4" else bits
    raise ModelError(
        f"its weights are quantized already (quant_method {method!r})", where=where, remedy="give a bf16, fp8 or mxfp4 source of the model"
    )


def read_config(path: Path | str) -> JSON:
    """The JSON object of a config.json, given as the file or its folder; ModelError when it is neither."""
    file = Path(path) / "config.json" if Path(path).is_dir() else Path(path)
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"no config can be read ({error})", where=str(file), remedy="give a config.json or the folder of one") from None
    if not isinstance(config, dict):
        raise ModelError("the file holds no JSON object", where=str(file), remedy="give a config.json or the folder of one")
    return config


def model_shape(config: JSON, where: str = "config.json") -> ModelShape:
    """The shape of a model from its config; UnknownName for a family that is not registered, ModelError for a config that contradicts itself."""
    name = config.get("model_type")
    if not isinstance(name, str):
        raise ModelError("it names no model_type", where=where, remedy="give the model's own config.json")
    shape = FAMILIES[name](Reader(config, where))
    if not shape.blocks:
        raise ModelError("it has no decoder block (num_hidden_layers is 0)", where=where)
    for block, _ in shape.kinds():
        if min(min(weight.shape) for weight in block.weights) < 1 or block.top_k > block.experts:
            raise ModelError(f"a weight of its {block.kind} blocks is empty, or more experts are visited than exist", where=where)
    doubled = [name for block, _ in shape.kinds() for name, times in Counter(w.name for w in block.weights).items() if times > 1]
    assert not doubled, doubled
    return shape


def _norms(hidden: int) -> tuple[KeptShape, ...]:
    return tuple(KeptShape(name=f"{name}.weight", shape=(hidden,)) for name in ("input_layernorm", "post_attention_layernorm"))


def _biases(weights: tuple[WeightShape, ...]) -> tuple[KeptShape, ...]:
    return tuple(KeptShape(name=f"{weight.name}.bias", shape=(weight.rows,)) for weight in weights if weight.bias)


def _grouped_query(r: Reader, *, bias: bool, out_bias: bool, head_norms: bool, eager: bool = False, **more: Any) -> tuple[Any, ...]:
    """(weights, kept, attention) of grouped-query attention."""
    hidden, heads = r.whole("hidden_size"), r.whole("num_attention_heads")
    width = r.whole("head_dim", hidden // max(1, heads))
    values = r.whole("num_key_value_heads", heads) * width
    weights = tuple(
        r.linear(f"self_attn.{name}_proj", rows, hidden, "attention", bias=bias, **more)
        for name, rows in (("q", heads * width), ("k", values), ("v", values))
    )
    weights = (*weights, r.linear("self_attn.o_proj", hidden, heads * width, "attention output", bias=out_bias, **more))
    kept = tuple(KeptShape(name=f"self_attn.{name}_norm.weight", shape=(width,)) for name in ("q", "k") if head_norms)
    return weights, (*kept, *_biases(weights)), AttentionShape(heads=heads, qk_width=width, v_width=width, eager=eager)


def _gated(r: Reader, path: str, inner: int, *, reads: str = "mlp", bias: bool = False) -> tuple[WeightShape, ...]:
    """gate, up and down of a gated MLP."""
    hidden = r.whole("hidden_size")
    pair = tuple(r.linear(f"{path}.{name}_proj", inner, hidden, reads, bias=bias) for name in ("gate", "up"))
    return (*pair, r.linear(f"{path}.down_proj", hidden, inner, f"{path} inner", bias=bias))


def _routed(r: Reader, experts: int, inner: int, *, transposed: bool = False) -> tuple[WeightShape, ...]:
    """The fused experts; their inputs are each expert's own rows."""
    hidden = r.whole("hidden_size")
    return (
        r.fused("mlp.experts.gate_up_proj", 2 * inner, hidden, "expert", experts, transposed=transposed),
        r.fused("mlp.experts.down_proj", hidden, inner, "expert inner", experts, transposed=transposed),
    )


def _dense(r: Reader, *, bias: bool, out_bias: bool, head_norms: bool = False, mlp_bias: bool = False) -> ModelShape:
    weights, kept, attention = _grouped_query(r, bias=bias, out_bias=out_bias, head_norms=head_norms)
    mlp = _gated(r, "mlp", r.whole("intermediate_size"), bias=mlp_bias)
    kept = (*kept, *_biases(mlp), *_norms(r.whole("hidden_size")))
    block = BlockShape(kind="dense", weights=(*weights, *mlp), kept=kept, attention=attention)
    return r.model([block] * r.whole("num_hidden_layers"))


def llama(r: Reader) -> ModelShape:
    """Llama; also SmolLM2 and others of its type."""
    bias = bool(r.config.get("attention_bias", False))
    return _dense(r, bias=bias, out_bias=bias, mlp_bias=bool(r.config.get("mlp_bias", False)))


def mistral(r: Reader) -> ModelShape:
    """Mistral: Llama without biases."""
    return _dense(r, bias=False, out_bias=False)


def qwen2(r: Reader) -> ModelShape:
    """Qwen2: biases on q, k and v."""
    return _dense(r, bias=True, out_bias=False)


def qwen3(r: Reader) -> ModelShape:
    """Qwen3: norms over the heads of q and k."""
    bias = bool(r.config.get("attention_bias", False))
    return _dense(r, bias=bias, out_bias=bias, head_norms=True)


def mixtral(r: Reader) -> ModelShape:
    """Mixtral: every block routed."""
    hidden, experts = r.whole("hidden_size"), r.whole("num_local_experts")
    weights, kept, attention = _grouped_query(r, bias=False, out_bias=False, head_norms=False)
    kept = (*kept, KeptShape(name="mlp.gate.weight", shape=(experts, hidden)), *_norms(hidden))
    routed = _routed(r, experts, r.whole("intermediate_size"))
    block = BlockShape(kind="MoE", weights=(*weights, *routed), kept=kept, attention=attention, top_k=r.whole("num_experts_per_tok"))
    return r.model([block] * r.whole("num_hidden_layers"))


def qwen3_moe(r: Reader) -> ModelShape:
    """Qwen3-MoE: routed blocks, dense where mlp_only_layers or decoder_sparse_step say so."""
    hidden = r.whole("hidden_size")
    experts = r.whole("num_experts", r.config.get("num_local_experts"))
    bias = bool(r.config.get("attention_bias", False))
    weights, kept, attention = _grouped_query(r, bias=bias, out_bias=bias, head_norms=True)
    router = KeptShape(name="mlp.gate.weight", shape=(experts, hidden))
    norms = _norms(hidden)
    step, only = r.whole("decoder_sparse_step", 1), set(r.config.get("mlp_only_layers") or ())
    blocks = []
    for index in range(r.whole("num_hidden_layers")):
        if index in only or not experts or (index + 1) % step:
            mlp = _gated(r, "mlp", r.whole("intermediate_size"))
            blocks.append(BlockShape(kind="dense", weights=(*weights, *mlp), kept=(*kept, *norms), attention=attention))
            continue
        routed = _routed(r, experts, r.whole("moe_intermediate_size"))
        top_k = r.whole("num_experts_per_tok")
        blocks.append(BlockShape(kind="MoE", weights=(*weights, *routed), kept=(*kept, router, *norms), attention=attention, top_k=top_k))
    return r.model(blocks)


def gpt_oss(r: Reader) -> ModelShape:
    """gpt-oss: biases everywhere, attention sinks (eager scores), experts stored [E, I, O]; MXFP4 covers the experts alone."""
    hidden, experts, inner = r.whole("hidden_size"), r.whole("num_local_experts"), r.whole("intermediate_size")
    bias = bool(r.config.get("attention_bias", True))
    weights, kept, attention = _grouped_query(r, bias=bias, out_bias=bias, head_norms=False, eager=True)
    kept = (
        *kept,
        KeptShape(name="self_attn.sinks", shape=(attention.heads,)),
        KeptShape(name="mlp.router.weight", shape=(experts, hidden)),
        KeptShape(name="mlp.router.bias", shape=(experts,)),
        KeptShape(name="mlp.experts.gate_up_proj_bias", shape=(experts, 2 * inner)),
        KeptShape(name="mlp.experts.down_proj_bias", shape=(experts, hidden)),
        *_norms(hidden),
    )
    routed = _routed(r, experts, inner, transposed=True)
    block = BlockShape(kind="MoE", weights=(*weights, *routed), kept=kept, attention=attention, top_k=r.whole("num_experts_per_tok"))
    return r.model([block] * r.whole("num_hidden_layers"))


def deepseek_v3(r: Reader) -> ModelShape:
    """DeepSeek-V3: latent attention, first blocks dense, one shared expert that reads what the router reads. The MTP head is not loaded."""
    hidden, heads, experts = r.whole("hidden_size"), r.whole("num_attention_heads"), r.whole("n_routed_experts")
    nope, rope, value, rank = (r.whole(key) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank"))
    bias = bool(r.config.get("attention_bias", False))
    weights: tuple[WeightShape, ...]
    kept: tuple[KeptShape, ...] = ()
    if r.config.get("q_lora_rank") is None:
        weights = (r.linear("self_attn.q_proj", heads * (nope + rope), hidden, "attention"),)
    else:
        q_rank = r.whole("q_lora_rank")
        kept = (KeptShape(name="self_attn.q_a_layernorm.weight", shape=(q_rank,)),)
        weights = (
            r.linear("self_attn.q_a_proj", q_rank, hidden, "attention", bias=bias),
            r.linear("self_attn.q_b_proj", heads * (nope + rope), q_rank, "query latent"),
        )
    weights = (
        *weights,
        r.linear("self_attn.kv_a_proj_with_mqa", rank + rope, hidden, "attention", bias=bias),
        r.linear("self_attn.kv_b_proj", heads * (nope + value), rank, "key-value latent"),
        r.linear("self_attn.o_proj", hidden, heads * value, "attention output", bias=bias),
    )
    kept = (*kept, KeptShape(name="self_attn.kv_a_layernorm.weight", shape=(rank,)), *_biases(weights), *_norms(hidden))
    attention = AttentionShape(heads=heads, qk_width=nope + rope, v_width=value)
    dense = BlockShape(kind="dense", weights=(*weights, *_gated(r, "mlp", r.whole("intermediate_size"))), kept=kept, attention=attention)
    inner = r.whole("moe_intermediate_size")
    routed = (*_routed(r, experts, inner), *_gated(r, "mlp.shared_experts", inner * r.whole("n_shared_experts")))
    router = KeptShape(name="mlp.gate.weight", shape=(experts, hidden))
    top_k = r.whole("num_experts_per_tok")
    moe = BlockShape(kind="MoE", weights=(*weights, *routed), kept=(*kept, router), attention=attention, top_k=top_k)
    layers = r.whole("num_hidden_layers")
    first = min(layers, r.whole("first_k_dense_replace", 0))
    return r.model([dense] * first + [moe] * (layers - first))


V4_RATIOS = {0: "sliding_attention", 4: "compressed_sparse_attention", 128: "heavily_compressed_attention"}
V4_KINDS = {"sliding_attention": "MoE", "compressed_sparse_attention": "MoE, sparse", "heavily_compressed_attention": "MoE, heavy"}


def _v4_layers(r: Reader) -> list[str]:
    """Attention type of every block, from layer_types or from the checkpoint's own compress_ratios."""
    layers = r.whole("num_hidden_layers")
    kinds = r.config.get("layer_types") or [V4_RATIOS.get(ratio, str(ratio)) for ratio in r.config.get("compress_ratios") or ()]
    wrong = sorted({kind for kind in kinds[:layers] if kind not in V4_KINDS})
    if len(kinds) < layers or wrong:
        raise ModelError(
            f"layer_types or compress_ratios must name the attention of {layers} blocks, got {len(kinds)} names, unknown: {wrong or 'none'}",
            where=r.where,
            remedy="give the model's own config.json",
        )
    return list(kinds[:layers])


def _v4_compressor(r: Reader, kind: str, rates: JSON) -> tuple[tuple[WeightShape, ...], tuple[KeptShape, ...], float]:
    """Compressor and indexer of a compressed attention: their linears (bf16 in the checkpoint), kept tensors, compressed keys a token."""
    if kind == "sliding_attention":
        return (), (), 0.0
    hidden, width, path = r.whole("hidden_size"), r.whole("head_dim"), "self_attn.compressor"
    rate = int(rates[kind])
    wide = 2 * width if kind == "compressed_sparse_attention" else width
    weights = tuple(r.linear(f"{path}.{name}_proj", wide, hidden, "attention", source_bits=BF16_BITS) for name in ("kv", "gate"))
    kept: tuple[KeptShape, ...] = (
        KeptShape(name=f"{path}.position_bias", shape=(rate, wide)),
        KeptShape(name=f"{path}.kv_norm.weight", shape=(width,)),
    )
    if kind == "compressed_sparse_attention":
        heads, small = r.whole("index_n_heads"), r.whole("index_head_dim")
        path = f"{path}.indexer"
        pair = (r.linear(f"{path}.{name}_proj", 2 * small, hidden, "attention", source_bits=BF16_BITS) for name in ("kv", "gate"))
        scorer = r.linear(f"{path}.scorer.weights_proj", heads, hidden, "attention", source_bits=BF16_BITS)
        queries = r.linear(f"{path}.q_b_proj", heads * small, r.whole("q_lora_rank"), "query latent")
        weights = (*weights, *pair, queries, scorer)
        kept = (
            *kept,
            KeptShape(name=f"{path}.position_bias", shape=(rate, 2 * small)),
            KeptShape(name=f"{path}.kv_norm.weight", shape=(small,)),
        )
    return weights, kept, 1.0 / rate


def deepseek_v4(r: Reader) -> ModelShape:
    """DeepSeek-V4: shared-key attention with a grouped output projection, compressors by layer, hc_mult residual streams, every block routed."""
    hidden, heads, width = r.whole("hidden_size"), r.whole("num_attention_heads"), r.whole("head_dim")
    groups, o_rank, q_rank, streams = (r.whole(key) for key in ("o_groups", "o_lora_rank", "q_lora_rank", "hc_mult"))
    experts, inner, top_k = r.whole("n_routed_experts"), r.whole("moe_intermediate_size"), r.whole("num_experts_per_tok")
    rates = {kind: rate for rate, kind in V4_RATIOS.items()} | dict(r.config.get("compress_rates") or {})
    base = (
        r.linear("self_attn.q_a_proj", q_rank, hidden, "attention"),
        r.linear("self_attn.q_b_proj", heads * width, q_rank, "query latent"),
        r.linear("self_attn.kv_proj", width, hidden, "attention"),
        r.linear("self_attn.o_a_proj", groups * o_rank, heads * width // max(1, groups), "attention output", groups=groups),
        r.linear("self_attn.o_b_proj", hidden, groups * o_rank, "output latent"),
    )
    # V4's MLP class reads moe_intermediate_size whatever n_shared_experts says.
    mlp = (*_routed(r, experts, inner), *_gated(r, "mlp.shared_experts", inner))
    mixes = (2 + streams) * streams
    kept: tuple[KeptShape, ...] = (
        KeptShape(name="self_attn.sinks", shape=(heads,)),
        KeptShape(name="self_attn.q_a_norm.weight", shape=(q_rank,)),
        KeptShape(name="self_attn.kv_norm.weight", shape=(width,)),
        KeptShape(name="mlp.gate.weight", shape=(experts, hidden)),
        *_norms(hidden),
    )
    for name in ("attn_hc", "ffn_hc"):
        sizes = (("fn", (mixes, streams * hidden)), ("base", (mixes,)), ("scale", (3,)))
        kept = (*kept, *(KeptShape(name=f"{name}.{part}", shape=shape) for part, shape in sizes))
    blocks = []
    for kind in _v4_layers(r):
        weights, more, extra = _v4_compressor(r, kind, rates)
        attention = AttentionShape(heads=heads, qk_width=width, v_width=width, extra_keys=extra, eager=True)
        blocks.append(
            BlockShape(kind=V4_KINDS[kind], weights=(*base, *weights, *mlp), kept=(*kept, *more), attention=attention, top_k=top_k)
        )
    heads_of_streams = (("hc_fn", (streams, streams * hidden)), ("hc_base", (streams,)), ("hc_scale", (1,)))
    return r.model(blocks, *(KeptShape(name=f"model.hc_head.{name}", shape=shape) for name, shape in heads_of_streams), streams=streams)


for _family in (llama, mistral, qwen2, qwen3, mixtral, qwen3_moe, gpt_oss, deepseek_v3, deepseek_v4):
    FAMILIES.add(_family.__name__, _family)
