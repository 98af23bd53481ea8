"""Random requests over the OpenAPI document: never a 5xx, never a hang, always JSON of the promised shape; the engine is idle and right afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism_ray.engines.api.exchange import Limits
from prism_ray.engines.local_backend import LocalSettings
from prism_ray.models.tiny import TINY_VOCAB_SIZE
from tests.serving import Server, make_material

VALID: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "own", "prompt": "the cat", "max_tokens": 2},
    "/v1/chat/completions": {"model": "common", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2},
    "/v1/score": {"model": "tiny", "prompt": "the", "choices": [" cat", " hat"]},
    "/v1/adapters": {"reference": "own@1"},
    "/v1/adapters/{name}/pin": {"version": 1},
    "/v1/adapters/{name}/rollback": {"version": 1},
}
NAMES = st.sampled_from(["own", "own@1", "same", "common", "theirs", "tiny", "", "..", "own@0"]) | st.text(max_size=12)
NUMBERS = st.integers(-3, 40) | st.floats() | st.sampled_from([2**31, 2**63, -(2**63), 10**30, 1e308, -0.0])
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[Server]:
    material = make_material(tmp_path_factory.mktemp("fuzz"))
    limits = Limits(max_tokens=6, deadline_s=20.0)
    served = Server(material, material.fill(str(tmp_path_factory.mktemp("store"))), LocalSettings(refresh_s=0.0, broken_s=0.0), limits)
    yield served
    served.until(served.idle)
    served.close()


@pytest.fixture(scope="module")
def document(server) -> dict[str, Any]:
    with server.http() as http:
        return dict(http.get("/openapi.json").json())


def drawn(schema: dict[str, Any], components: dict[str, Any], depth: int = 0) -> st.SearchStrategy[Any]:
    """Values that a JSON schema allows, roughly: bounds are overstepped now and then."""
    if "$ref" in schema:
        return drawn(components[schema["$ref"].rsplit("/", 1)[1]], components, depth + 1)
    if "anyOf" in schema:
        return st.one_of(*(drawn(option, components, depth + 1) for option in schema["anyOf"]))
    if "enum" in schema or "const" in schema:
        return st.sampled_from(schema.get("enum", [schema.get("const")]))
    match schema.get("type"):
        case "string":
            return st.text(max_size=12)
        case "integer":
            return st.integers(-2, 12)
        case "number":
            return st.floats(-0.5, 2.5) | st.sampled_from([float("nan"), float("inf")])
        case "boolean":
            return st.booleans()
        case "null":
            return st.none()
        case "array":
            return st.lists(drawn(schema.get("items", {}), components, depth + 1), max_size=3)
        case "object":
            if "properties" not in schema or depth > 6:
                return st.dictionaries(st.text(max_size=6), st.text(max_size=6), max_size=2)
            fields = {name: drawn(field, components, depth + 1) for name, field in schema["properties"].items()}
            needed = {name: fields.pop(name) for name in schema.get("required", ())}
            return st.fixed_dictionaries(needed, optional=fields)
    return JSON


def check(response: httpx.Response) -> None:
    assert response.status_code < 500, (response.status_code, response.text[:500])
    if response.headers.get("content-type", "").startswith("text/event-stream"):
        assert response.text.endswith("data: [DONE]\n\n")
        return
    body = response.json()
    if response.status_code >= 400:
        assert set(body) == {"error"} and isinstance(body["error"]["message"], str) and body["error"]["message"]


FUZZ = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])


@pytest.mark.parametrize("path", VALID)
def test_bodies_of_the_document(server, document, path):
    written = next(known for known in document["paths"] if known.replace(":path", "") == path)
    schema = document["paths"][written]["post"]["requestBody"]["content"]["application/json"]["schema"]
    by_schema = drawn(schema, document["components"]["schemas"])
    valid = VALID[path]
    fields = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]["properties"]
    changed = st.dictionaries(st.sampled_from(sorted(fields)) | st.text(max_size=8), JSON, max_size=2).map(lambda extra: valid | extra)
    one_field = st.sampled_from(sorted(fields)).flatmap(
        lambda name: drawn(fields[name], document["components"]["schemas"]).map(lambda value: valid | {name: value})
    )

    with server.http() as http:

        @FUZZ
        @given(by_schema | changed | one_field | JSON, NAMES)
        def run(body: Any, name: str) -> None:
            target = path.replace("{name}", quote(name, safe=""))
            check(http.post(target, content=json.dumps(body).encode(), headers={"content-type": "application/json"}))

        run()
        assert http.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1}).status_code == 200
    server.until(server.idle)


@given(st.sampled_from(sorted(VALID)), st.binary(max_size=60), NAMES)
@FUZZ
def test_bytes_for_bodies(server, path, body, name):
    with server.http() as http:
        check(http.post(path.replace("{name}", quote(name, safe="")), content=body))


@given(
    st.sampled_from(["/v1/models/", "/v1/adapters/", "/v1/", "/"]),
    NAMES,
    st.text(max_size=10),
    st.sampled_from(["GET", "DELETE", "PUT", "HEAD"]),
)
@FUZZ
def test_paths_and_queries(server, prefix, name, query, method):
    with server.http("other") as http:
        response = http.request(method, f"{prefix}{quote(name, safe='')}?tenant={quote(query)}&{quote(query)}")
        if method == "HEAD":
            assert response.status_code < 500
        else:
            check(response)


@given(st.text(st.characters(min_codepoint=32, max_codepoint=255, exclude_characters="\x7f"), max_size=80))
@FUZZ
def test_headers_of_authorization(server, value):
    with httpx.Client(base_url=server.url, timeout=60) as http:
        response = http.get("/v1/models", headers={b"authorization": value.strip().encode("latin-1")})
        assert response.status_code in (400, 401)


@given(
    st.lists(st.integers(0, TINY_VOCAB_SIZE - 1), min_size=1, max_size=20),
    st.integers(0, 20),
    st.floats(0, 2),
    st.floats(0, 1),
    st.booleans(),
)
@FUZZ
def test_any_legal_request_is_answered(server, prompt, logprobs, temperature, top_p, stream):
    body = {"model": "common", "prompt": prompt, "logprobs": logprobs, "temperature": temperature, "top_p": top_p, "stream": stream}
    with server.http() as http:
        response = http.post("/v1/completions", json=body | {"max_tokens": 3})
        assert response.status_code == 200, response.text
        check(response)
