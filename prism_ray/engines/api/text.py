"""Between text and tokens: prompts, chats, choices, and single tokens as the API shows them.

Prompts get the tokenizer's special tokens; chats are rendered by its chat template, which writes its own. Choices are tokenized together with the prompt, as in
training (`training.data.encode_candidates`): a choice is what follows the longest common beginning with the prompt's tokens, so a word that would merge with the
prompt's end is scored as it was learnt.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jinja2.exceptions import TemplateError
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.pre_tokenizers import ByteLevel

from prism_ray.core.errors import one_line
from prism_ray.engines.api.errors import ApiError, bad_request
from prism_ray.engines.api.schemas import Message

BROKEN = "�"


class Tokens:
    """A base's tokenizer for the API. tokenizer: of transformers, or None: then only token ids are understood."""

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._bytes_of: dict[str, int] | None = None
        self._shown: dict[int, tuple[str, list[int] | None]] = {}
        if isinstance(getattr(getattr(tokenizer, "backend_tokenizer", None), "decoder", None), ByteLevelDecoder):
            self._bytes_of = _byte_alphabet()

    @property
    def end(self) -> tuple[int, ...]:
        """The end of a turn, where the tokenizer names one."""
        found = getattr(self._tokenizer, "eos_token_id", None)
        return (found,) if isinstance(found, int) else ()

    def encode(self, prompt: str | Sequence[int]) -> list[int]:
        """Token ids of a prompt. Raises ApiError for a text without a tokenizer."""
        return self._encode([prompt])[0] if isinstance(prompt, str) else list(prompt)

    def encode_chat(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a chat, ready for the assistant's answer. Raises ApiError where there is no template or it refuses the messages."""
        return self._encode([self.render(messages)], special=False)[0]

    def render(self, messages: Sequence[Message]) -> str:
        """A chat as text."""
        if self._tokenizer is None or not getattr(self._tokenizer, "chat_template", None):
            raise bad_request("This model has no chat template: use /v1/completions.", "messages", "no_chat_template")
        # `developer` is the newer name of the same role; templates know the older one.
        chat = [{"role": "system" if each.role == "developer" else each.role, "content": each.text} for each in messages]
        try:
            return str(self._tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True))
        except (TemplateError, ValueError, TypeError) as error:
            raise bad_request(f"The chat template refuses these messages: {one_line(error)[:200]}", "messages", "chat_template") from None

    def encode_choices(self, prompt: str, choices: Sequence[str], *, special: bool) -> list[tuple[list[int], list[int]]]:
        """(tokens before, tokens of the choice) of each choice. special: whether the tokenizer adds its special tokens."""
        alone, *joined = self._encode([prompt, *(prompt + choice for choice in choices)], special=special)
        found = []
        for index, ids in enumerate(joined):
            boundary = next((place for place, (a, b) in enumerate(zip(alone, ids, strict=False)) if a != b), min(len(alone), len(ids)))
            if boundary in (0, len(ids)):
                what = "yields no token" if boundary else "needs a prompt of a token at least"
                raise bad_request(f"'choices.{index}': {what}.", "choices", "invalid_value")
            found.append((ids[:boundary], ids[boundary:]))
        return found

    def _encode(self, texts: list[str], *, special: bool = True) -> list[list[int]]:
        if self._tokenizer is None:
            raise bad_request("This model has no tokenizer: send token ids.", "prompt", "no_tokenizer")
        rows = [list(ids) for ids in self._tokenizer(texts, add_special_tokens=special)["input_ids"]]
        for ids, text in zip(rows, texts, strict=True):
            # Some tokenizers append the end of sequence; a text that goes on must not have ended.
            if len(ids) > 1 and ids[-1] in self.end and not text.endswith(str(self._tokenizer.eos_token)):
                ids.pop()
        return rows

    def show(self, token: int) -> tuple[str, list[int] | None]:
        """(text, UTF-8 bytes) of a token. A token that is a part of a character reads `bytes:\\xe2\\x80`; bytes: None where the tokenizer hides them."""
        if token not in self._shown:
            self._shown[token] = self._show(token)
        return self._shown[token]

    def _show(self, token: int) -> tuple[str, list[int] | None]:
        if self._tokenizer is None:
            return f"token:{token}", None
        piece = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # vocabularies are padded to a round size
            return f"token:{token}", None
        data = self._data(piece)
        text = self._tokenizer.decode([token], skip_special_tokens=False, clean_up_tokenization_spaces=False)
        if BROKEN not in text:
            return text, list(text.encode())
        return (f"token:{token}", None) if data is None else ("bytes:" + "".join(f"\\x{byte:02x}" for byte in data), list(data))

    def _data(self, piece: str) -> bytes | None:
        """The bytes of a token as the vocabulary writes it: `<0xE2>`, or in the byte-level alphabet."""
        if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
            return bytes.fromhex(piece[3:5])
        if self._bytes_of is not None and all(character in self._bytes_of for character in piece):
            return bytes(self._bytes_of[character] for character in piece)
        return None


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte of the byte-level alphabet: printable bytes stand for themselves, the others for code points from 256 on, in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    found = {chr(byte): byte for byte in printable}
    found |= {chr(256 + index): byte for index, byte in enumerate(byte for byte in range(256) if byte not in set(printable))}
    assert set(found) == set(ByteLevel.alphabet())
    return found


def context_error(prompt: int, answer: int, limit: int) -> ApiError:
    """The error of a request that does not fit the model."""
    return bad_request(
        f"This model's maximum context length is {limit} tokens. However, you requested {prompt + answer} tokens "
        f"({prompt} in the prompt, {answer} in the answer). Please reduce the length of either.",
        "messages",
        "context_length_exceeded",
    )
