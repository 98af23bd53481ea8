"""The parts of a causal language model that measurements need: backbone, linear head, decoder layers.

logits = softcap(logit_scale * head(Z)) with Z = backbone(...).last_hidden_state, [batch, time, hidden], taken after the final norm, and
softcap(x) = c tanh(x / c). Works on a transformers model and on a PEFT model around one; adapters stay active in the parts.

Tied embeddings are found by storage, never by name or by the config alone: two names on one storage mean that writing to the head also
writes to the embedding table. A config that says otherwise is refused, because saving such a model drops one of the two (CAL-09).
Refuses by name: models without a linear head, encoder-decoders, prompt-learning adapters, unknown scalings between head and loss.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn

from prism_ray.core.errors import ModelError

# Config field and whether the head's output is multiplied (+1) or divided (-1) by it, per start of config.model_type.
_LOGIT_SCALES: dict[str, tuple[str, int]] = {
    "cohere": ("logit_scale", 1),
    "granite": ("logits_scaling", -1),
    "hyperclovax": ("logits_scaling", 1),
    "falcon_h1": ("lm_head_multiplier", 1),
}
_SCALE_FIELDS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "output_multiplier")
_LAYER_PATHS = ("layers", "h", "blocks", "decoder.layers", "language_model.layers")


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model taken apart; nothing is copied, the parts are the model's own modules.

    backbone: maps input_ids, attention_mask, … to an output whose last_hidden_state is the input of the head.
    head: the output projection, linear-like (in_features, out_features), [vocab, hidden].
    softcap: c of the final tanh in logits, or None. tied: whether head and input embedding share storage.
    logit_scale: factor between head and softcap (1 for most families).
    """

    backbone: nn.Module
    head: nn.Module
    softcap: float | None
    tied: bool
    logit_scale: float = 1.0

    def logits(self, hidden: Tensor) -> Tensor:
        """Head inputs [..., hidden] to the model's logits [..., vocab]."""
        logits = self.head(hidden)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits


def unwrap(model: nn.Module) -> nn.Module:
    """The transformers model inside a PEFT model (its adapters stay injected), or the model itself.

    Raises ModelError for prompt-learning adapters, which live outside the model and would be lost.
    """
    get_base_model = getattr(model, "get_base_model", None)
    if not callable(get_base_model):
        return model
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ModelError(
            f"adapter '{cast(Any, model).active_adapter}' is a prompt-learning one, which cannot be taken apart",
            where=type(model).__name__,
            remedy="use an adapter that sits in the layers (LoRA, Scale-QLoRA)",
        )
    return cast(nn.Module, get_base_model())


def split_head(model: nn.Module) -> LanguageModel:
    """Take a causal language model apart into backbone and linear head.

    model: a transformers PreTrainedModel or a PeftModel around one. Raises ModelError, naming the class, for models without a linear
    head, encoder-decoders, logit scalings it does not know, and a config that contradicts which storages are shared.
    """
    inner = cast(Any, unwrap(model))
    name = type(inner).__name__
    config = getattr(inner, "config", None)
    if config is None or not hasattr(inner, "get_output_embeddings"):
        raise ModelError("is no transformers model", where=name, remedy="load it with prism_ray.models.load.load_model")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("is an encoder-decoder; only causal language models can be taken apart", where=name)
    head = inner.get_output_embeddings()
    backbone = inner.base_model
    if head is None or not (hasattr(head, "in_features") and hasattr(head, "out_features")):
        found = "none" if head is None else type(head).__name__
        raise ModelError(f"has no linear head (output embedding: {found})", where=name, remedy="load it as a causal language model")
    if backbone is inner:
        raise ModelError("has no backbone apart from its head", where=name, remedy="load it as a causal language model")
    text = config.get_text_config()
    return LanguageModel(
        backbone=backbone,
        head=head,
        softcap=_softcap(text, name),
        tied=_tied(inner, head, name),
        logit_scale=_logit_scale(text, name),
    )


def decoder_layers(backbone: nn.Module) -> nn.ModuleList:
    """The decoder blocks of a backbone in order; ModelError naming the class when they are not where known families keep them."""
    for path in _LAYER_PATHS:
        found: Any = backbone
        for part in path.split("."):
            found = getattr(found, part, None)
        if isinstance(found, nn.ModuleList):
            return found
    raise ModelError(f"has no decoder layers under {', '.join(_LAYER_PATHS)}", where=type(backbone).__name__)


def shares_storage(a: Tensor | None, b: Tensor | None) -> bool:
    """Whether two weights are one: the same object, or the same first byte, shape and type.

    Empty and meta tensors have no address, so only object identity counts for them.
    """
    if a is None or b is None:
        return False
    if a is b:
        return True
    if a.device != b.device or a.device.type == "meta" or a.numel() == 0 or b.numel() == 0:
        return False
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.dtype == b.dtype


def _tied(inner: Any, head: nn.Module, name: str) -> bool:
    """Storage identity of head and input embedding, checked against tie_word_embeddings."""
    tied = shares_storage(getattr(head, "weight", None), getattr(inner.get_input_embeddings(), "weight", None))
    # The flag of the outer config decides for transformers too; older multimodal configs keep it in the text part only.
    declared = getattr(inner.config, "tie_word_embeddings", None)
    if declared is None:
        declared = getattr(inner.config.get_text_config(), "tie_word_embeddings", None)
    if declared is None or bool(declared) == tied:
        return tied
    if tied:
        what = "head and input embedding share one storage, but config.tie_word_embeddings is false"
        remedy = "set it to true, or give the head a copy of its own"
    else:
        what = "config.tie_word_embeddings is true, but head and input embedding are different tensors"
        remedy = "set it to false and save both, or call model.tie_weights()"
    raise ModelError(what, where=name, remedy=remedy)


def _softcap(text: Any, name: str) -> float | None:
    softcap = getattr(text, "final_logit_softcapping", None)
    if softcap is None:
        return None
    if not softcap > 0:
        raise ModelError(f"final_logit_softcapping is {softcap}, expected a positive number", where=name, remedy="mend config.json")
    return float(softcap)


def _logit_scale(text: Any, name: str) -> float:
    """The factor on the head's output; a scaling of a family not listed is refused, its direction differs between families."""
    field, sign = next((entry for start, entry in _LOGIT_SCALES.items() if text.model_type.startswith(start)), ("", 1))
    for other in _SCALE_FIELDS:
        if other != field and getattr(text, other, None) not in (None, 1, 1.0):
            raise ModelError(
                f"scales its logits by '{other}' in a way that is not known for model type '{text.model_type}'",
                where=name,
                remedy="add the family to prism_ray/models/families.py",
            )
    value = getattr(text, field, None) if field else None
    return 1.0 if value is None else float(value) ** sign
