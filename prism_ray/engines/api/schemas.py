"""Requests, validated strictly: types are not converted, NaN and Infinity are refused, and so is every name that is not known.

A field of the OpenAI API falls into one of three kinds. *Served*: it does what the API says. *Neutral*: it changes nothing that a client could miss (`user`, `metadata`,
hints for caches), so it is accepted and ignored; so is `cache_salt`, which is the server's to set. *Unsupported*: it would change the answer (`tools`,
`logit_bias`, penalties, `n` above 1); its neutral value is accepted, any other is refused by name. Nothing is silently left out.
Beyond the API: `top_k`, `ignore_eos`, `stop_token_ids`.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from prism_ray.engines.api.errors import ApiError, bad_request

MAX_STOPS, MAX_STOP_CHARACTERS, MAX_CHOICES, MAX_TOP_LOGPROBS = 4, 1024, 256, 20
Seed = Annotated[int, Field(ge=-(2**63), lt=2**63)]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Version = Annotated[int, Field(ge=1, lt=10**9)]


def _neutral(value: Any) -> Any:
    if value in (None, False, 0, "", [], {}):
        return value
    raise PydanticCustomError("unsupported", "is not supported")


def _one(value: Any) -> Any:
    if value not in (None, 1):
        raise PydanticCustomError("unsupported", "only 1 is supported: send one request for each answer")
    return value


def _text_only(value: Any) -> Any:
    if value not in (None, {"type": "text"}, ["text"]):
        raise PydanticCustomError("unsupported", "only text is supported")
    return value


def _no_tool(value: Any) -> Any:
    if value not in (None, "none", "auto"):
        raise PydanticCustomError("unsupported", "there are no tools to choose from")
    return value


def _stops(value: str | list[str] | None) -> str | list[str] | None:
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > MAX_STOPS or not all(0 < len(stop) <= MAX_STOP_CHARACTERS for stop in stops):
        raise PydanticCustomError("stop", f"at most {MAX_STOPS} texts of 1 to {MAX_STOP_CHARACTERS} characters")
    return value


Unsupported = Annotated[Any, AfterValidator(_neutral)]
OnlyOne = Annotated[int | None, AfterValidator(_one)]
OnlyText = Annotated[Any, AfterValidator(_text_only)]
NoTool = Annotated[Any, AfterValidator(_no_tool)]


class Request(BaseModel):
    """Base of all bodies."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False, protected_namespaces=())


class StreamOptions(Request):
    """include_usage: a last chunk with the usage. include_obfuscation: a padding against observers of packet sizes, which is not sent."""

    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class Sampled(Request):
    """What completions and chat have in common."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=0, lt=2**31)
    seed: Seed | None = None
    stop: Annotated[str | list[str] | None, AfterValidator(_stops)] = None
    stop_token_ids: list[TokenId] | None = Field(default=None, max_length=64)
    ignore_eos: bool | None = None
    n: OnlyOne = None
    frequency_penalty: Unsupported = None
    presence_penalty: Unsupported = None
    logit_bias: Unsupported = None
    user: str | None = None
    cache_salt: Any = None

    @model_validator(mode="after")
    def _options_of_streams(self) -> Sampled:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is allowed with stream=true only")
        return self


class CompletionRequest(Sampled):
    """POST /v1/completions. prompt: a text or token ids; a list of one prompt is that prompt."""

    prompt: str | list[TokenId] | list[str] | list[list[TokenId]]
    logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    best_of: OnlyOne = None
    echo: Unsupported = None
    suffix: Unsupported = None

    @property
    def one_prompt(self) -> str | list[int]:
        """The prompt. Raises ApiError for several: they would be answered one by one anyway."""
        prompt: Any = self.prompt
        if isinstance(prompt, str):
            return prompt
        if prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise bad_request("Only one prompt a request is supported.", "prompt", "unsupported_parameter")
            prompt = prompt[0]
        return prompt if isinstance(prompt, str) else list(prompt)


class TextPart(Request):
    """A text in a list of content parts; images and audio are refused."""

    type: Literal["text"]
    text: str
    prompt_cache_breakpoint: Any = None


class Message(Request):
    """A message; the fields of an assistant message that a client sends back with it are accepted where they are empty."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]
    name: str | None = None
    refusal: Unsupported = None
    annotations: Unsupported = None
    audio: Unsupported = None
    function_call: Unsupported = None
    tool_calls: Unsupported = None

    @property
    def text(self) -> str:
        """All its text."""
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class ChatRequest(Sampled):
    """POST /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(default=None, ge=0, le=MAX_TOP_LOGPROBS)
    response_format: OnlyText = None
    modalities: OnlyText = None
    tools: Unsupported = None
    tool_choice: NoTool = None
    functions: Unsupported = None
    function_call: NoTool = None
    audio: Unsupported = None
    web_search_options: Unsupported = None
    moderation: Unsupported = None
    parallel_tool_calls: bool | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: Literal["auto", "default", "flex", "scale", "priority", "fast"] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: Literal["in_memory", "24h"] | None = None
    prediction: Any = None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None

    @model_validator(mode="after")
    def _logprobs(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise PydanticCustomError("top_logprobs", "top_logprobs is allowed with logprobs=true only")
        return self


class ScoreRequest(Request):
    """POST /v1/score: log-likelihood of each choice behind a prompt or a chat. Texts are joined as they are: a choice brings its own leading space."""

    model: str
    prompt: str | list[TokenId] | None = None
    messages: list[Message] | None = Field(default=None, min_length=1)
    choices: list[str] | list[list[TokenId]] = Field(min_length=1, max_length=MAX_CHOICES)
    user: str | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> ScoreRequest:
        if (self.prompt is None) == (self.messages is None):
            raise PydanticCustomError("prompt", "give either prompt or messages")
        if isinstance(self.prompt, list) != isinstance(self.choices[0], list):
            raise PydanticCustomError("choices", "prompt and choices are both texts or both token ids")
        return self


class PublishRequest(Request):
    """POST /v1/adapters. reference: `name` or `name@n` of the adapter store. allow_no_change: serve a version that answers as the base does."""

    reference: str
    allow_no_change: bool = False


class PinRequest(Request):
    """POST /v1/adapters/{name}/pin. version: null ends the pin."""

    version: Version | None


class RollbackRequest(Request):
    """POST /v1/adapters/{name}/rollback. expected: the version that must be current now."""

    version: Version
    expected: Version | None = None


R = TypeVar("R", bound=Request)


def parse(model: type[R], body: bytes) -> R:
    """A body as a request. Raises ApiError 400 with the first thing that is wrong and its place."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from None


def _refusal(error: ValidationError) -> ApiError:
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = [str(part)[:64] for part in first["loc"]]
    param = place[0] if place else None
    kind, message = first["type"], first["msg"]
    if kind == "json_invalid":
        return bad_request(f"The request body is not valid JSON: {message.removeprefix('Invalid JSON: ')}.")
    if kind == "extra_forbidden":
        return bad_request(f"Unrecognized request argument supplied: {'.'.join(place)}", param, "unknown_parameter")
    if kind == "missing":
        return bad_request(f"Missing required parameter: '{'.'.join(place)}'.", param, "missing_required_parameter")
    where = f"'{'.'.join(place)}': " if place else ""
    return bad_request(f"{where}{message}", param, "unsupported_parameter" if kind == "unsupported" else "invalid_value")
