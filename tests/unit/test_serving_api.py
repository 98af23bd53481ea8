"""prism_ray.engines.api over a real engine and a real server: the openai client, identities, tenants, refusals, management, cancellation."""

from __future__ import annotations

import asyncio
import json
import math
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from prism_ray.core.errors import EnvironmentFault
from prism_ray.engines.api.exchange import Limits
from prism_ray.engines.api.text import Tokens
from prism_ray.engines.local_backend import LocalSettings
from prism_ray.engines.tenancy import OpenTenancy, TenantLimits
from prism_ray.formats.checkpoint import load_quantized_model
from prism_ray.models.tiny import tiny_tokenizer
from prism_ray.training.data import encode_candidates
from prism_ray.training.task import Example
from tests.serving import Material, Server, make_material, make_tenancy
from tests.unit._adapter_folders import make_adapter, make_base

CHAT = [{"role": "user", "content": "the cat in the hat"}]
BAD_IDS = [
    "../../etc/passwd",
    "/etc/passwd",
    "a/../../b",
    "%2e%2e/x",
    "x" * 300,
    "nul\0byte",
    "own\0",
    "",
    " ",
    "own@",
    "own@0",
    "own@-1",
    "own@99",
]
BAD_IDS += [
    "own@1@2",
    "own@1e3",
    "own:2",
    "tiny@1",
    "nope",
    "theirs",
    "theirs@1",
    "acme/own",
    "OWN",
    "own ",
    "..",
    ".hidden",
    "ünï",
    "\u202e",
]


@pytest.fixture(scope="module")
def material(tmp_path_factory) -> Material:
    return make_material(tmp_path_factory.mktemp("serving"))


@pytest.fixture(scope="module")
def server(material, tmp_path_factory) -> Iterator[Server]:
    served = Server(material, material.fill(str(tmp_path_factory.mktemp("store"))))
    yield served
    served.close()


@pytest.fixture(autouse=True)
def _idle(server) -> Iterator[None]:
    """Every test leaves no sequence and no pin, and no request counted."""
    yield
    server.until(lambda: server.idle() and not any(server.app.state.service.gate.running(name) for name in server.keys))


def ask(server: Server, model: str, who: str = "acme", **fields: Any) -> httpx.Response:
    body = {"model": model, "messages": CHAT, "max_tokens": 8, "temperature": 0, "ignore_eos": True} | fields
    with server.http(who) as http:
        return http.post("/v1/chat/completions", json=body)


def text_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def error_of(response: httpx.Response, status: int) -> dict[str, Any]:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"error"} and set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str) and "x-request-id" in response.headers
    return body["error"]


def events(text: str) -> list[Any]:
    """The JSON of server-sent events; the last is "[DONE]" as text."""
    lines = [line for line in text.split("\n\n") if line]
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


# --- the openai client -------------------------------------------------------------------------------------------------------


def test_the_client_lists_what_the_key_reaches(server):
    assert [model.id for model in server.openai("acme").models.list()] == ["tiny", "common", "own", "same"]
    assert [model.id for model in server.openai("other").models.list()] == ["tiny", "common", "same", "theirs"]
    assert server.openai().models.retrieve("own@1").id == "own@1"
    owners = {model.id: model.owned_by for model in server.openai("acme").models.list()}
    assert owners == {"tiny": "prism-ray", "common": "public", "own": "acme", "same": "acme"}
    with server.http() as http:
        for model in http.get("/v1/models").json()["data"]:
            Model.model_validate(model, strict=True)


@pytest.mark.parametrize("logprobs", [{}, {"logprobs": True}, {"logprobs": True, "top_logprobs": 3}], ids=["none", "chosen", "top"])
def test_a_streamed_chat_is_the_whole_one(server, logprobs):
    client = server.openai()
    fields: dict[str, Any] = {"model": "own", "messages": CHAT, "max_tokens": 9, "temperature": 1.2, "seed": 7, **logprobs}
    whole = client.chat.completions.create(**fields)
    chunks = list(client.chat.completions.create(**fields, stream=True, stream_options={"include_usage": True}))
    assert {chunk.id for chunk in chunks} == {chunks[0].id} and chunks[0].id.startswith("chatcmpl-")
    parts = [chunk.choices[0] for chunk in chunks if chunk.choices]
    assert parts[0].delta.role == "assistant"
    assert "".join(part.delta.content or "" for part in parts) == whole.choices[0].message.content
    assert [part.finish_reason for part in parts if part.finish_reason] == [whole.choices[0].finish_reason]
    assert chunks[-1].choices == [] and chunks[-1].usage is not None and whole.usage is not None
    counts = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [getattr(chunks[-1].usage, name) for name in counts] == [getattr(whole.usage, name) for name in counts]
    streamed = [token for part in parts for token in (part.logprobs.content or [] if part.logprobs else [])]
    expected = whole.choices[0].logprobs.content if whole.choices[0].logprobs else []
    assert streamed == expected and len(streamed) == (whole.usage.completion_tokens if logprobs else 0)
    for token in streamed:
        assert len(token.top_logprobs) == logprobs.get("top_logprobs", 0) and token.logprob <= 0
        assert token.bytes is not None and (token.token.startswith("bytes:") or token.token == bytes(token.bytes).decode())


def test_the_bytes_of_the_tokens_are_the_answer(server):
    answer = server.openai().chat.completions.create(model="own@1", messages=CHAT, max_tokens=12, temperature=1.5, seed=1, logprobs=True)
    content = answer.choices[0].logprobs.content
    data = b"".join(bytes(token.bytes) for token in content if not token.token.startswith("<"))
    text = answer.choices[0].message.content
    # The server drops a character that the last tokens left unfinished.
    assert data.decode("utf-8", "replace").rstrip("\ufffd") == text.rstrip("\ufffd")


def test_a_streamed_completion_is_the_whole_one(server):
    client = server.openai()
    fields: dict[str, Any] = {"model": "common", "prompt": "the cat", "max_tokens": 6, "temperature": 0, "logprobs": 2}
    whole = client.completions.create(**fields)
    chunks = list(client.completions.create(**fields, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text and whole.usage.prompt_tokens == 4
    for name in ("tokens", "token_logprobs", "text_offset", "top_logprobs"):
        joined = [value for chunk in chunks if chunk.choices[0].logprobs for value in getattr(chunk.choices[0].logprobs, name)]
        assert joined == getattr(whole.choices[0].logprobs, name)
    logprobs = whole.choices[0].logprobs
    assert logprobs.text_offset == [sum(map(len, logprobs.tokens[:index])) for index in range(len(logprobs.tokens))]
    assert all(
        top[token] == value for top, token, value in zip(logprobs.top_logprobs, logprobs.tokens, logprobs.token_logprobs, strict=True)
    )


def test_token_ids_and_lists_of_one_are_the_same_prompt(server):
    ids = tiny_tokenizer()("the cat")["input_ids"]
    client = server.openai()
    answers = {
        client.completions.create(model="tiny", prompt=prompt, max_tokens=6, temperature=0).choices[0].text
        for prompt in ("the cat", ["the cat"], ids, [ids])
    }
    assert len(answers) == 1
    with pytest.raises(openai.BadRequestError, match="one prompt"):
        client.completions.create(model="tiny", prompt=["a", "b"])


def test_the_default_length_of_a_completion_is_the_apis(server):
    answer = server.openai().completions.create(model="tiny", prompt="the", temperature=0, extra_body={"ignore_eos": True})
    assert answer.usage.completion_tokens == 16 and answer.choices[0].finish_reason == "length"


def test_raw_answers_fit_the_clients_types_strictly(server):
    with server.http() as http:
        body = {"model": "own", "messages": CHAT, "max_tokens": 3, "logprobs": True, "top_logprobs": 1}
        ChatCompletion.model_validate(http.post("/v1/chat/completions", json=body).json(), strict=True)
        streamed = events(http.post("/v1/chat/completions", json=body | {"stream": True, "stream_options": {"include_usage": True}}).text)
        assert streamed[-1] == "[DONE]"
        for chunk in streamed[:-1]:
            ChatCompletionChunk.model_validate(chunk, strict=True)
            assert "usage" in chunk
        body = {"model": "own", "prompt": "the", "max_tokens": 3, "logprobs": 2}
        Completion.model_validate(http.post("/v1/completions", json=body).json(), strict=True)
        streamed = events(http.post("/v1/completions", json=body | {"stream": True}).text)
        assert len(streamed) == 4 and all("usage" not in chunk for chunk in streamed[:-1])


def test_stop_texts_and_seeds(server):
    client = server.openai()
    fields: dict[str, Any] = {
        "model": "common",
        "prompt": "the cat",
        "max_tokens": 12,
        "temperature": 0,
        "extra_body": {"ignore_eos": True},
    }
    text = client.completions.create(**fields).choices[0].text
    stop = text[2:4]
    for given in (stop, [stop], ["never there", stop]):
        answer = client.completions.create(**fields, stop=given).choices[0]
        assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
    fields |= {"temperature": 1.8}
    seeded = [client.completions.create(**fields, seed=seed).choices[0].text for seed in (1, 1, 2)]
    assert seeded[0] == seeded[1] != seeded[2]
    assert client.completions.create(**fields | {"top_p": 0}).choices[0].text == text  # the likeliest token only


def test_an_answer_sent_back_by_the_client_is_accepted(server):
    client = server.openai()
    answer = client.chat.completions.create(model="own", messages=CHAT, max_tokens=3)
    history = [
        {"role": "developer", "content": [{"type": "text", "text": "be brief"}]},
        *CHAT,
        answer.choices[0].message.model_dump(),
        *CHAT,
    ]
    extra = {
        "user": "u",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "reasoning_effort": "low",
        "tools": [],
        "response_format": {"type": "text"},
    }
    assert client.chat.completions.create(model="own", messages=history, max_completion_tokens=3, n=1, **extra).usage.prompt_tokens > 10


def test_the_error_classes_of_the_client(server):
    for work, error in (
        (lambda: server.openai().chat.completions.create(model="nope", messages=CHAT), openai.NotFoundError),
        (lambda: server.openai().chat.completions.create(model="nope", messages=CHAT, stream=True), openai.NotFoundError),
        (lambda: server.openai().chat.completions.create(model="own", messages=CHAT, n=2), openai.BadRequestError),
        (lambda: server.openai().models.retrieve("nope"), openai.NotFoundError),
        (lambda: openai.OpenAI(base_url=f"{server.url}/v1", api_key="sk-wrong", max_retries=0).models.list(), openai.AuthenticationError),
    ):
        with pytest.raises(error) as caught:
            work()
        assert caught.value.code


# --- identity (SRV-01, SRV-02) -------------------------------------------------------------------------------------------------


def test_every_name_answers_with_its_own_plane(server):
    digests = server.material.digests
    expected = {
        ("acme", "own"): "own@2",
        ("acme", "own@1"): "own@1",
        ("acme", "own@2"): "own@2",
        ("acme", "same"): "same@1",  # its own hides the shared one
        ("acme", "common"): "common@1",
        ("other", "same"): "public/same@1",
        ("other", "theirs"): "theirs@1",
    }
    texts = {}
    for (who, model), reference in expected.items():
        response = ask(server, model, who)
        assert response.headers["x-prism-plane"] == digests[reference]
        name, _, version = reference.split("/")[-1].partition("@")
        assert (response.headers["x-prism-adapter"], response.headers["x-prism-adapter-version"]) == (name, version)
        assert response.json()["model"] == f"{name}@{version}" and digests[reference].startswith(response.json()["system_fingerprint"][3:])
        texts.setdefault(reference, set()).add(text_of(response))
    base = ask(server, "tiny")
    assert "x-prism-adapter" not in base.headers and base.headers["x-prism-plane"] == server.engine.base.scale_plane
    assert all(len(found) == 1 for found in texts.values())
    assert len({text_of(base), *(text for found in texts.values() for text in found)}) == len(texts) + 1
    with server.http() as http:
        streamed = http.post("/v1/completions", json={"model": "own@1", "prompt": "a", "stream": True})
        assert streamed.headers["x-prism-plane"] == digests["own@1"] and streamed.headers["content-type"].startswith("text/event-stream")
        scored = http.post("/v1/score", json={"model": "own@1", "prompt": "a", "choices": ["b"]})
        assert scored.headers["x-prism-plane"] == digests["own@1"]


def test_prefixes_are_shared_within_a_tenant_and_a_plane_only(server):
    """SRV-03: the salt comes from the key; what the body says of one is ignored."""
    prompt = [{"role": "user", "content": "a prompt of more than one page of the cache, which is sixteen tokens here"}]

    def cached(who: str, model: str, **fields: Any) -> int:
        return int(ask(server, model, who, messages=prompt, **fields).json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    theft = server.tenancy.salt(server.tenancy.authenticate(f"Bearer {server.keys['acme']}"))
    assert cached("acme", "common") == 0
    assert cached("other", "common") == 0
    assert cached("public", "common", cache_salt=theft) == 0
    assert cached("acme", "own") == 0 and cached("acme", "tiny") == 0  # another plane
    assert cached("acme", "common") > 0 and cached("reader", "common") > 0  # two keys of one tenant


# --- refusals (SRV-04, ADP-07) -------------------------------------------------------------------------------------------------


def test_missing_foreign_and_illegal_names_are_one_answer_before_any_work(server):
    before = server.engine.stats(), server.backend.cache_stats()
    bodies = set()
    with server.http() as http:
        for model in BAD_IDS:
            for stream in (False, True):
                response = http.post("/v1/chat/completions", json={"model": model, "messages": CHAT, "stream": stream})
                bodies.add(json.dumps(error_of(response, 404)))
            bodies.add(json.dumps(error_of(http.post("/v1/completions", json={"model": model, "prompt": "a"}), 404)))
            bodies.add(json.dumps(error_of(http.post("/v1/score", json={"model": model, "prompt": "a", "choices": ["b"]}), 404)))
            bodies.add(json.dumps(error_of(http.post("/v1/adapters", json={"reference": model}), 404)))
    assert len(bodies) == 1
    after = server.engine.stats(), server.backend.cache_stats()
    assert (after[0].prompt_tokens, after[1].loads, after[1].hits) == (before[0].prompt_tokens, before[1].loads, before[1].hits)


@pytest.mark.parametrize(
    "path", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "%2e%2e/x", "x" * 300, "nul%00byte", "%ff%fe", "theirs", "own/x", "a//b"]
)
def test_names_in_paths_are_never_joined_to_one(server, path):
    with server.http("reader") as reader, server.http("acme") as manager:
        answers = [reader.get(f"/v1/models/{path}"), reader.get(f"/v1/adapters/{path}"), manager.delete(f"/v1/adapters/{path}")]
        answers += [manager.post(f"/v1/adapters/{path}/pin", json={"version": 1})]
        for answer in answers:
            assert answer.status_code in (404, 405)
            assert "etc" not in answer.text and "passwd" not in answer.text and "store" not in answer.text and answer.json()["error"]


@pytest.mark.parametrize("header", [None, "", "Bearer", "Bearer wrong", "Basic abc", "Bearer prism_zzzz_" + "A" * 43])
def test_without_the_right_key_there_is_nothing(server, header):
    headers = {} if header is None else {"authorization": header}
    with server.http("") as http:
        for method, path in (
            ("GET", "/v1/models"),
            ("POST", "/v1/completions"),
            ("POST", "/v1/score"),
            ("GET", "/v1/adapters"),
            ("GET", "/metrics"),
            ("DELETE", "/v1/adapters/own"),
        ):
            response = http.request(method, path, headers=headers)
            assert error_of(response, 401)["code"] == "invalid_api_key" and response.headers["www-authenticate"] == "Bearer"
        assert http.get("/healthz").json() == {"status": "ok"} and http.get("/readyz").json() == {"status": "ready"}


def test_scopes_are_asked_for(server):
    with server.http("reader") as reader, server.http("acme") as manager:
        assert error_of(reader.post("/v1/adapters", json={"reference": "own@1"}), 403)["code"] == "insufficient_scope"
        assert error_of(reader.delete("/v1/adapters/own"), 403) and error_of(reader.get("/metrics"), 403)
        assert error_of(manager.delete("/v1/adapters/theirs?tenant=other"), 403) and error_of(manager.get("/v1/adapters?tenant=other"), 403)
        assert error_of(manager.delete("/v1/adapters/common"), 404)  # seen, but not its own


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ('"temperature": NaN', "temperature"),
        ('"temperature": Infinity', "temperature"),
        ('"temperature": -0.1', "temperature"),
        ('"temperature": 2.1', "temperature"),
        ('"temperature": 1e999', "temperature"),
        ('"temperature": "1"', "temperature"),
        ('"top_p": 1.1', "top_p"),
        ('"top_p": NaN', "top_p"),
        ('"top_k": -1', "top_k"),
        ('"max_tokens": 0', "max_tokens"),
        ('"max_tokens": 1.5', "max_tokens"),
        ('"max_tokens": true', "max_tokens"),
        ('"max_tokens": 100000', "max_tokens"),
        ('"max_tokens": 1' + "0" * 5000, None),
        ('"n": 2', "n"),
        ('"seed": 9223372036854775808', "seed"),
        ('"stop": ["a", "b", "c", "d", "e"]', "stop"),
        ('"stop": ""', "stop"),
        ('"stop": [1]', "stop"),
        ('"logprobs": 1', "logprobs"),
        ('"logprobs": true, "top_logprobs": 21', "top_logprobs"),
        ('"service_tier": "gold"', "service_tier"),
        ('"frequency_penalty": 0.5', "frequency_penalty"),
        ('"frequency_penalty": NaN', "frequency_penalty"),
        ('"logit_bias": {"1": 2}', "logit_bias"),
        ('"tools": [{"type": "function"}]', "tools"),
        ('"response_format": {"type": "json_object"}', "response_format"),
        ('"temprature": 1', "temprature"),
        ('"stream": "yes"', "stream"),
        ('"messages": []', "messages"),
        ('"messages": [{"role": "wizard", "content": "x"}]', "messages"),
        ('"messages": [{"role": "user", "content": null}]', "messages"),
        ('"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]', "messages"),
        ('"messages": [{"role": "user", "content": "\\ud800"}]', None),
        ('"model": 1', "model"),
        ('"model": null', "model"),
    ],
)
def test_a_wrong_field_is_named(server, change, param):
    body = json.dumps({"model": "own", "messages": CHAT, "max_tokens": 2})
    # Of two fields of one name the last one counts.
    with server.http() as http:
        response = http.post("/v1/chat/completions", content=f"{body[:-1]}, {change}}}", headers={"content-type": "application/json"})
    error = error_of(response, 400)
    assert error["type"] == "invalid_request_error" and error["param"] == param and "\n" not in error["message"]


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"model": "own"', b"[" * 100_000, b'{"a":' * 50_000, b"\0", b'{"model": "\xff"}'],
)
def test_a_body_that_is_no_request(server, content):
    with server.http() as http:
        for path in ("/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/adapters", "/v1/adapters/own/pin"):
            assert error_of(http.post(path, content=content), 400)


def test_a_large_body_is_answered_413(server):
    def chunked() -> Iterator[bytes]:
        for _ in range(40):
            yield b"x" * (1 << 16)

    with server.http() as http:
        for content in (b"x" * (10 << 20), b"x" * ((1 << 20) + 1), chunked()):
            assert error_of(http.post("/v1/completions", content=content), 413)["code"] == "request_too_large"
        body = {"model": "own", "prompt": "a", "max_tokens": 1, "user": "u" * ((1 << 20) - 100)}
        assert http.post("/v1/completions", json=body).status_code == 200


def test_prompts_that_do_not_fit(server):
    with server.http() as http:
        error = error_of(http.post("/v1/completions", json={"model": "own", "prompt": "cat " * 600, "max_tokens": 1}), 400)
        assert error["code"] == "context_length_exceeded" and "512" in error["message"]
        assert error_of(http.post("/v1/completions", json={"model": "own", "prompt": [1] * 500, "max_tokens": 13}), 400)
        assert http.post("/v1/completions", json={"model": "own", "prompt": [1] * 500, "max_tokens": 12}).status_code == 200
        for prompt in ("", [], [[]], [10**6], [-1]):
            assert error_of(http.post("/v1/completions", json={"model": "own", "prompt": prompt, "max_tokens": 1}), 400)
        # Without a length the answer of a chat may fill the context.
        assert http.post("/v1/completions", json={"model": "own", "prompt": [1] * 510}).json()["usage"]["completion_tokens"] <= 2


def test_other_routes_and_methods(server):
    with server.http() as http:
        assert http.get("/nothing").json()["error"]["code"] == "not_found"
        assert http.get("/v1/completions").json()["error"]["code"] == "method_not_allowed"
        assert http.post("/v1/models/").status_code in (404, 405)
        document = http.get("/openapi.json").json()
        assert {"/v1/completions", "/v1/chat/completions", "/v1/score", "/v1/models", "/v1/adapters"} <= set(document["paths"])
        assert "ChatRequest" in document["components"]["schemas"]


def test_without_a_chat_template_there_is_no_chat(server):
    app = server.make_app(OpenTenancy("acme"))
    bare, picky = tiny_tokenizer(), tiny_tokenizer()
    bare.chat_template, picky.chat_template = None, "{{ raise_exception('roles must alternate') }}"

    async def post(client: httpx.AsyncClient) -> httpx.Response:
        return await client.post("/v1/chat/completions", json={"model": "own", "messages": CHAT})

    for tokenizer, say in ((bare, "no chat template"), (picky, "roles must alternate"), (None, "no chat template")):
        app.state.service._tokens = Tokens(tokenizer)
        assert say in error_of(server.asgi(app, "", post), 400)["message"]


# --- scores --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
def test_scores_are_the_likelihoods_of_plain_transformers(server, chat):
    """Tokens as training cuts them (`encode_candidates`); log-probabilities of the ordinary loader's model, in one sequence each."""
    prompt, choices = "the cat sat on", [" the", " a hat", "e", "\u00e9"]
    tokenizer = tiny_tokenizer()
    model = load_quantized_model(server.material.base, dtype=torch.float32)
    example = Example(id="x", prompt=prompt, answer=choices[0])
    expected = []
    for item in encode_candidates(example, choices, tokenizer, answer_prefix="", chat=chat):
        with torch.no_grad():
            logprobs = torch.log_softmax(model(torch.tensor([item.input_ids])).logits[0].double(), -1)
        tail = range(item.prompt_tokens, len(item.input_ids))
        expected.append((sum(float(logprobs[place - 1, item.input_ids[place]]) for place in tail), len(tail)))
    body = {"model": "tiny", "choices": choices} | ({"messages": [{"role": "user", "content": prompt}]} if chat else {"prompt": prompt})
    with server.http() as http:
        found = http.post("/v1/score", json=body).json()
        other = http.post("/v1/score", json=body | {"model": "own"}).json()
    assert [choice["tokens"] for choice in found["choices"]] == [tokens for _, tokens in expected]
    for choice, (logprob, _) in zip(found["choices"], expected, strict=True):
        # float32 forward passes of up to 4 layers of products of 128 terms, summed over at most 3 tokens: 1e-3 is a hundred times their rounding.
        assert abs(choice["logprob"] - logprob) < 1e-3
    weights = [math.exp(choice["logprob"]) for choice in found["choices"]]
    assert all(abs(choice["probability"] - weight / sum(weights)) < 1e-9 for choice, weight in zip(found["choices"], weights, strict=True))
    assert found["best"] == max(range(4), key=lambda index: expected[index][0])
    assert [choice["logprob"] for choice in other["choices"]] != [choice["logprob"] for choice in found["choices"]]


def test_scores_of_token_ids_and_refusals(server):
    tokenizer = tiny_tokenizer()
    with server.http() as http:
        text = http.post("/v1/score", json={"model": "own", "prompt": "the cat", "choices": ["!", "?"]}).json()
        ids = http.post(
            "/v1/score",
            json={
                "model": "own",
                "prompt": tokenizer("the cat")["input_ids"],
                "choices": [tokenizer("!")["input_ids"], tokenizer("?")["input_ids"]],
            },
        ).json()
        assert text["choices"] == ids["choices"]
        for change in (
            {"choices": []},
            {"choices": [""]},
            {"choices": ["a"] * 257},
            {"choices": [[1]]},
            {"prompt": None},
            {"messages": CHAT},
            {"prompt": ""},
        ):
            assert error_of(http.post("/v1/score", json={"model": "own", "prompt": "the", "choices": ["a"]} | change), 400)
        assert error_of(http.post("/v1/score", json={"model": "own", "prompt": [1], "choices": [[2], []]}), 400)
        assert error_of(http.post("/v1/score", json={"model": "own", "prompt": [1], "choices": [[2] * 600]}), 400)


# --- cancellation (SRV-10), deadlines, limits ------------------------------------------------------------------------------------


LONG = {"model": "own", "messages": CHAT, "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def test_a_closed_stream_ends_the_sequence_and_lets_the_plane_go(server):
    client, aborted = server.openai(), server.engine.stats().aborted
    for _ in range(10):
        stream = client.chat.completions.create(model="own", messages=CHAT, max_tokens=400, stream=True, extra_body={"ignore_eos": True})
        for _ in range(3):
            next(stream)
        stream.close()
    server.until(lambda: server.engine.stats().aborted == aborted + 10, 10)
    server.until(server.idle, 1.0)


def test_a_dropped_request_ends_too(server):
    aborted = server.engine.stats().aborted
    body = json.dumps(LONG).encode()
    for _ in range(5):
        with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.keys['acme']}\r\ncontent-length: {len(body)}\r\n\r\n"
            raw.sendall(head.encode() + body)
            server.until(lambda: server.engine.stats().running > 0)
        server.until(server.idle, 2.0)
    assert server.engine.stats().aborted == aborted + 5
    assert 'prism_cancelled_requests_total{route="chat"}' in server.registry.render().decode()


def test_a_half_sent_body_is_no_request(server):
    with socket.create_connection(("127.0.0.1", int(server.url.rsplit(":", 1)[1]))) as raw:
        raw.sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {server.keys['acme']}\r\ncontent-length: 50\r\n\r\n{{".encode()
        )
    app = server.make_app(OpenTenancy("acme"), Limits(body_s=0.05))

    async def slow(client: httpx.AsyncClient) -> httpx.Response:
        async def content():
            yield b"{"
            await asyncio.sleep(5)

        return await client.post("/v1/completions", content=content())

    assert error_of(server.asgi(app, "", slow), 408)["code"] == "request_timeout"


def test_a_deadline_ends_a_request_and_a_stream(server):
    app = server.make_app(OpenTenancy("acme"), Limits(deadline_s=0.4))

    async def post(client: httpx.AsyncClient) -> tuple[httpx.Response, httpx.Response]:
        return await client.post("/v1/chat/completions", json=LONG), await client.post("/v1/chat/completions", json=LONG | {"stream": True})

    whole, stream = server.asgi(app, "", post)
    assert error_of(whole, 504)["code"] == "deadline_exceeded"
    found = events(stream.text)
    assert stream.status_code == 200 and found[-1]["error"]["code"] == "deadline_exceeded" and len(found) > 2


def test_limits_of_a_tenant(server):
    tenancy, keys = make_tenancy(TenantLimits(requests_per_second=0.01, burst=3))
    app = server.make_app(tenancy)

    async def many(client: httpx.AsyncClient) -> list[httpx.Response]:
        return [await client.get("/v1/models") for _ in range(5)]

    found = server.asgi(app, keys["acme"], many)
    assert [response.status_code for response in found] == [200] * 3 + [429] * 2
    assert error_of(found[-1], 429)["code"] == "rate_limit_exceeded" and 90 <= int(found[-1].headers["retry-after"]) <= 100
    assert server.asgi(app, keys["reader"], many)[0].status_code == 429  # the tenant's, not the key's
    assert server.asgi(app, keys["other"], many)[0].status_code == 200


def test_requests_at_a_time(server):
    tenancy, keys = make_tenancy(TenantLimits(concurrent=2))
    app = server.make_app(tenancy)

    async def many(client: httpx.AsyncClient) -> list[int]:
        body = LONG | {"model": "tiny", "max_tokens": 20}
        found = await asyncio.gather(*(client.post("/v1/chat/completions", json=body) for _ in range(6)))
        after = await client.post("/v1/chat/completions", json=body)
        assert all(response.headers.get("retry-after") == "1" for response in found if response.status_code == 429)
        return [*sorted(response.status_code for response in found), after.status_code]

    assert server.asgi(app, keys["acme"], many) == [200, 200, 429, 429, 429, 429, 200]


def test_an_error_in_a_stream_reaches_the_client_as_one(server, monkeypatch):
    generate = server.backend.generate

    async def breaking(target, request):
        async for count, piece in _counted(generate(target, request)):
            if count == 3:
                raise OSError("/secret/path is gone")
            yield piece

    monkeypatch.setattr(server.backend, "generate", breaking)
    with pytest.raises(openai.APIError) as caught:
        for _ in server.openai().chat.completions.create(
            model="own", messages=CHAT, max_tokens=50, stream=True, extra_body={"ignore_eos": True}
        ):
            pass
    assert caught.value.code == "internal_error" and "secret" not in str(caught.value.body)
    assert "secret" not in json.dumps(error_of(ask(server, "own", max_tokens=9), 500))


async def _counted(pieces):
    count = 0
    async for piece in pieces:
        yield count, piece
        count += 1


# --- management ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def managed(material, tmp_path) -> Iterator[Server]:
    """A server of its own, whose store a test may change."""
    served = Server(material, material.fill(str(tmp_path / "store")), LocalSettings(refresh_s=0.0, broken_s=0.0, unload_s=0.2))
    yield served
    served.until(served.idle)
    served.close()


def plane_of(server: Server, model: str, who: str = "acme") -> str:
    response = ask(server, model, who, max_tokens=2)
    assert response.status_code == 200, response.text
    found = {digest: reference for reference, digest in server.material.digests.items()}
    return found[response.headers["x-prism-plane"]]


def test_publish_pin_roll_back_unload(managed):
    server, digests = managed, managed.material.digests
    with server.http() as http:
        assert http.get("/v1/adapters/own").json()["version"] == 2
        # Roll back, with compare and swap.
        assert error_of(http.post("/v1/adapters/own/rollback", json={"version": 1, "expected": 1}), 409)["code"] == "conflict"
        assert http.post("/v1/adapters/own/rollback", json={"version": 1, "expected": 2}).json()["version"] == 1
        assert plane_of(server, "own") == "own@1" and plane_of(server, "own@2") == "own@2"
        assert error_of(http.post("/v1/adapters/own/rollback", json={"version": 9}), 404)
        # Pin: a publication does not move the name until the pin ends.
        assert http.post("/v1/adapters/own/pin", json={"version": 1}).json()["pinned"] == 1
        server.store.publish(server.material.folders["same@1"], "own", tenant="acme")
        assert plane_of(server, "own") == "own@1" and plane_of(server, "own@3") == "same@1"
        assert error_of(http.post("/v1/adapters/own/rollback", json={"version": 2}), 409)
        assert http.post("/v1/adapters/own/pin", json={"version": None}).json()["pinned"] is None
        assert plane_of(server, "own") == "same@1"
        # Publish an older version: it becomes current.
        answer = http.post("/v1/adapters", json={"reference": "own@2"}).json()
        assert (answer["version"], answer["current"], answer["latest"]) == (2, 2, 3) and 2 in answer["resident"]
        assert plane_of(server, "own") == "own@2"
        # Unload: the name and its versions are gone, until it is published again.
        answer = http.delete("/v1/adapters/own").json()
        assert answer["deleted"] and answer["resident"] == [] and not answer["served"]
        assert digests["own@2"] not in server.engine.stats().planes and "acme/own" not in server.registry.render().decode()
        assert ask(server, "own").status_code == ask(server, "own@1").status_code == 404
        assert "own" not in [model.id for model in server.openai().models.list()]
        assert http.post("/v1/adapters", json={"reference": "own@1"}).status_code == 200
        assert plane_of(server, "own") == "own@1"
        history = http.get("/v1/adapters/own").json()["history"]
        assert [change["action"] for change in history].count("publish") == 4  # three by the store, one that ended the unload
        assert {change["who"].split("/")[0] for change in history if change["action"] in ("pin", "unload")} == {"acme"}
    with server.http("root") as root:
        assert [info["name"] for info in root.get("/v1/adapters?tenant=other").json()["data"]] == ["theirs"]
        assert root.delete("/v1/adapters/theirs?tenant=other").json()["deleted"] and ask(server, "theirs", "other").status_code == 404


def test_unload_lets_running_requests_end(managed):
    server = managed
    stream = server.openai().chat.completions.create(
        model="own", messages=CHAT, max_tokens=150, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    with server.http() as http:
        answer = http.delete("/v1/adapters/own").json()
        assert answer["draining"] == [2] and ask(server, "own").status_code == 404
    assert [chunk.choices[0].finish_reason for chunk in stream][-1] == "length"
    server.until(lambda: server.material.digests["own@2"] not in server.engine.stats().planes)


def test_two_processes_over_one_store_converge(managed):
    other = Server(managed.material, managed.store)
    try:
        with managed.http() as http:
            assert http.post("/v1/adapters/own/rollback", json={"version": 1}).status_code == 200
            assert plane_of(other, "own") == "own@1"  # refresh_s is 0
            http.delete("/v1/adapters/same")
        assert ask(other, "same").status_code == 404
    finally:
        other.close()


def damage_objects(store: Path) -> None:
    for path in (store / "objects").rglob("*"):
        if path.is_file():
            data = path.read_bytes()
            path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))


def test_a_broken_adapter_is_503_and_no_one_else_notices(managed, tmp_path, caplog):
    server = managed
    assert plane_of(server, "common") == "common@1"
    damage_objects(tmp_path / "store")
    for fields in ({}, {"stream": True}):
        response = ask(server, "own", **fields)
        assert error_of(response, 503)["code"] == "adapter_unavailable" and str(tmp_path) not in response.text
    assert "corrupted" in caplog.text  # the reason is in the log
    assert plane_of(server, "common") == "common@1" and ask(server, "tiny").status_code == 200
    with server.http() as http:
        refused = http.post("/v1/adapters", json={"reference": "own@1"})
        assert error_of(refused, 422)["code"] == "adapter_refused" and str(tmp_path) not in refused.text
        assert http.get("/v1/adapters/own").json()["current"] == 2  # nothing was changed
    damage_objects(tmp_path / "store")  # the same bit again: whole
    assert plane_of(server, "own") == "own@2"


def test_a_damaged_log_is_503_for_that_name(managed, tmp_path):
    log = tmp_path / "store" / "tenants" / "acme" / "own" / "log" / "00000002.json"
    log.write_text(log.read_text().replace("acme", "acmf"))
    assert error_of(ask(managed, "own"), 503)["code"] == "adapter_unavailable"
    assert [model.id for model in managed.openai().models.list()] == ["tiny", "common", "same"]


def test_an_adapter_that_changes_nothing_is_not_served(managed, tmp_path):
    """ADP-04: neither by a request nor by publishing, unless it is declared."""
    managed.store.publish(make_adapter(managed.material.base, tmp_path / "zero", 9, strength=0.0), "zero", tenant="acme")
    assert error_of(ask(managed, "zero"), 503)["code"] == "adapter_unavailable"
    with managed.http() as http:
        error = error_of(http.post("/v1/adapters", json={"reference": "zero"}), 422)
        assert "changes nothing" in error["message"]
        assert http.post("/v1/adapters", json={"reference": "zero", "allow_no_change": True}).status_code == 200
    assert text_of(ask(managed, "zero")) == text_of(ask(managed, "tiny"))


def test_adapters_of_another_base_do_not_exist_here(managed, tmp_path):
    foreign = make_base(tmp_path / "foreign", format="mxfp4")
    managed.store.publish(make_adapter(foreign, tmp_path / "adapter", 1), "stray", tenant="acme")
    assert ask(managed, "stray").status_code == 404
    assert "stray" not in [model.id for model in managed.openai().models.list()]


def test_a_store_that_is_away_serves_what_is_known(managed, monkeypatch):
    assert plane_of(managed, "own") == "own@2"

    def away(*_: Any) -> list[str]:
        raise EnvironmentFault("storage failed (no route to host)", where="s3://secret/bucket")

    monkeypatch.setattr(managed.store.backend, "names", away)
    assert plane_of(managed, "own") == "own@2"
    unknown = ask(managed, "common")
    assert error_of(unknown, 503)["code"] == "adapter_unavailable" and "bucket" not in unknown.text
    assert ask(managed, "tiny").status_code == 200


def test_full_of_planes_in_use_is_503_with_a_time(material, tmp_path):
    settings = LocalSettings(refresh_s=0.0, capacity_bytes=material.plane_bytes, wait_s=0.3, fair_s=0.1)
    server = Server(material, material.fill(str(tmp_path / "store")), settings)
    try:
        stream = server.openai().chat.completions.create(
            model="own", messages=CHAT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        response = ask(server, "common")
        assert error_of(response, 503)["code"] == "adapter_slots_busy" and response.headers["retry-after"] == "1"
        assert ask(server, "tiny").status_code == 200
        # A client that goes away while its plane waits for room leaves nothing either.
        with pytest.raises(httpx.ReadTimeout), httpx.Client(base_url=server.url, timeout=0.1) as http:
            http.post("/v1/chat/completions", json=LONG | {"model": "same"}, headers={"authorization": f"Bearer {server.keys['acme']}"})
        stream.close()
        server.until(server.idle, 2.0)
        assert plane_of(server, "common") == "common@1"
        assert set(server.engine.stats().planes) == {"base", material.digests["common@1"]}
    finally:
        server.close()


def test_an_engine_that_stopped_is_not_ready(managed):
    managed.run(managed.engine.stop())
    with managed.http() as http:
        assert http.get("/healthz").status_code == 200 and http.get("/readyz").status_code == 503
        for body in (LONG, LONG | {"model": "tiny", "stream": True}):
            response = http.post("/v1/chat/completions", json=body)
            assert error_of(response, 503)["code"] == "engine_unavailable" and "retry-after" in response.headers


def test_a_stop_of_the_engine_is_an_error_in_running_answers(managed):
    found: list[Any] = []

    def whole() -> None:
        found.append(ask(managed, "own", max_tokens=400))

    thread = threading.Thread(target=whole)
    thread.start()
    stream = managed.openai().chat.completions.create(
        model="own", messages=CHAT, max_tokens=400, stream=True, extra_body={"ignore_eos": True}
    )
    next(stream)
    managed.until(lambda: managed.engine.stats().running == 2)
    managed.run(managed.engine.stop())
    with pytest.raises(openai.APIError):
        list(stream)
    thread.join(30)
    assert error_of(found[0], 503)["code"] == "engine_unavailable"


def test_metrics_for_the_operator(server):
    ask(server, "own")
    with server.http("root") as http:
        text = http.get("/metrics").text
    for line in (
        'prism_adapter_tokens_total{adapter="acme/own",kind="generated"}',
        "prism_planes_resident ",
        "prism_plane_loads_total ",
        'prism_requests_total{route="chat",status="200",tenant="acme"}',
        "prism_first_token_seconds_bucket",
    ):
        assert line in text
