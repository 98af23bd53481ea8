"""What an engine offers: load a base, attach scale planes, generate, score, say how it is.

An engine writes no scheduler of its own: transformers' continuous batching or vLLM decide what runs in a step. What is added is that every sequence carries the
content hash of the plane that it runs on, that a step may mix planes, and that key-value and prefix caches are keyed by that hash and a salt.

    plane digest      SHA-256 of a plane's on-grid bytes (adapters.planes.ScalePlane.digest); `BASE` names the base's own scales
    cache key         (salt, plane digest, token ids): a sequence never reads what another plane or another tenant's salt wrote (field cases SRV-01 to SRV-03)
    attach, detach    take effect between steps; a plane in use cannot be detached; a digest means the same bytes for ever, so nothing is replaced in place

All methods are safe to call from one asyncio loop; long work runs off it. Everything that a caller can get wrong is refused before the first token.

Errors: UnknownPlane (digest not attached), PlaneInUse (detach), RequestRefused (prompt or parameters that this model cannot serve), EngineStopped.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch

from prism_ray.core.errors import PrismError

BASE = "base"
"""The digest under which the base's own scales are always attached."""

FinishReason = Literal["stop", "length", "abort"]


class UnknownPlane(PrismError):
    """No plane of that digest is attached."""


class PlaneInUse(PrismError):
    """Sequences run on the plane."""


class RequestRefused(PrismError):
    """The request cannot be served by this model, whatever the load: prompt too long, empty, token ids outside the vocabulary."""


class EngineStopped(PrismError):
    """The engine is not running; what it was doing is lost."""


@dataclass(frozen=True, kw_only=True)
class Plane:
    """A validated scale plane. digest: SHA-256 of its bytes. scales: Linear name as a checkpoint names it -> uint8 [O, G * width]; layers that are missing
    keep the base's scales."""

    digest: str
    scales: Mapping[str, torch.Tensor]

    @property
    def nbytes(self) -> int:
        """Bytes of the scales."""
        return sum(tensor.numel() for tensor in self.scales.values())


@dataclass(frozen=True, kw_only=True)
class BaseInfo:
    """The base that an engine holds. max_length: prompt and answer together, in tokens. scale_bytes: of its own scale plane. code_plane, scale_plane: fingerprints."""

    model: str
    format: str
    code_plane: str
    scale_plane: str
    max_length: int
    vocab_size: int
    scale_bytes: int


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """temperature 0 is greedy. seed: fixes the draws of one request, whatever else is in the batch. logprobs: top candidates a token, 0 for the chosen alone, None for none.
    stop_token_ids: end of sequence tokens among them. stop: texts that end the answer and are not part of it."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, kw_only=True)
class Generation:
    """One sequence to generate. request_id: unique among running ones. plane: digest. salt: of the cache, derived from the tenant by the server, never by the client."""

    request_id: str
    prompt: Sequence[int]
    sampling: Sampling
    plane: str = BASE
    salt: str = ""


@dataclass(frozen=True, kw_only=True)
class TokenLogprob:
    """Natural logarithm of a token's probability under the distribution before temperature; top: (token id, logprob) of the best candidates, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Delta:
    """New tokens of a sequence. text: what they add, stop texts cut off, nothing that could still become one. finish: set on the last delta only.
    cached_tokens: prompt tokens that came from the prefix cache, on the first delta."""

    token_ids: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    finish: FinishReason | None = None
    cached_tokens: int = 0


@dataclass(frozen=True, kw_only=True)
class Scoring:
    """Log-likelihood of each of several continuations of one prompt."""

    request_id: str
    prompt: Sequence[int]
    choices: Sequence[Sequence[int]]
    plane: str = BASE
    salt: str = ""


@dataclass(frozen=True, kw_only=True)
class Score:
    """Sum of the natural log-probabilities of a continuation's tokens, and how many there are."""

    logprob: float
    tokens: int


@dataclass(frozen=True, kw_only=True)
class EngineStats:
    """running, waiting: sequences. planes: digest -> resident bytes. in_use: digest -> sequences on it. cache_hit_tokens, prompt_tokens, generated_tokens, aborted: totals since the start."""

    running: int
    waiting: int
    planes: Mapping[str, int] = field(default_factory=dict)
    in_use: Mapping[str, int] = field(default_factory=dict)
    cache_hit_tokens: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    aborted: int = 0


class Engine(Protocol):
    """One base and its planes; `engines.transformers_engine` and `engines.vllm_engine` are its two implementations, under one conformance suite."""

    @property
    def base(self) -> BaseInfo:
        """The base."""

    @property
    def tokenizer(self) -> Any:
        """The base's tokenizer, as transformers has it; None where its folder has none."""

    async def start(self) -> None:
        """Load the base and begin stepping. Raises what loading raises."""

    async def stop(self) -> None:
        """End: running sequences get a last delta with finish "abort"."""

    async def attach(self, plane: Plane) -> None:
        """Make a plane resident; a digest that is there already is not loaded again. Raises FormatError for scales that do not fit the base: nothing is changed then."""

    async def detach(self, digest: str) -> None:
        """Drop a plane, its memory and what the caches hold of it. Raises UnknownPlane, PlaneInUse."""

    def generate(self, request: Generation) -> AsyncIterator[Delta]:
        """Deltas until one has a finish reason. Closing the iterator aborts the sequence and frees what it holds. Raises UnknownPlane, RequestRefused, EngineStopped, all before
        the first delta; EngineStopped also later."""

    async def score(self, request: Scoring) -> list[Score]:
        """One score a choice, in order."""

    async def abort(self, request_id: str) -> bool:
        """End a sequence within one step; False where none of that name runs."""

    def stats(self) -> EngineStats:
        """As of now; cheap."""
