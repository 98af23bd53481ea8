"""prism_ray.engines.tenancy, throttle and metrics: keys, tenants, salts, limits, bounded labels."""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import pickle

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from prism_ray.core.errors import ConfigError
from prism_ray.engines.metrics import OTHER, BoundedLabels, PrometheusMetrics, ServingMetrics
from prism_ray.engines.plane_cache import PlaneCacheStats
from prism_ray.engines.protocol import EngineStats
from prism_ray.engines.tenancy import (
    ENVIRONMENT,
    RECHECK_S,
    SALT_ENVIRONMENT,
    Caller,
    FileTenancy,
    OpenTenancy,
    Tenancy,
    TenantLimits,
    Unauthorized,
    cache_salt,
    new_key,
    parse_tenancy,
)
from prism_ray.engines.throttle import TenantGate, TokenBucket, TooManyRequests


def document(**tenants) -> dict:
    return {"format_version": "1.0", "tenants": [{"id": name, **fields} for name, fields in tenants.items()], "shared": ["public"]}


@pytest.fixture(scope="module")
def keys():
    return {name: new_key(scopes) for name, scopes in {"a": ("infer",), "b": ("infer", "manage"), "root": ("admin",)}.items()}


@pytest.fixture
def tenancy(keys) -> Tenancy:
    text = json.dumps(document(**{name: {"keys": [record.to_dict()]} for name, (_, record) in keys.items()}))
    return Tenancy(parse_tenancy(text, "test"), secret=b"s" * 32)


# --- keys --------------------------------------------------------------------------------------------------------------------


def test_a_key_opens_its_tenant_and_no_other(tenancy, keys):
    for name, (key, _) in keys.items():
        caller = tenancy.authenticate(f"Bearer {key}")
        assert caller.tenant == name and caller.sees == (name, "public")
    assert tenancy.authenticate(f"bearer  {keys['a'][0]} ").tenant == "a"


def test_scopes(tenancy, keys):
    may = {
        name: [tenancy.authenticate(f"Bearer {key}").may(scope) for scope in ("infer", "manage", "admin")]
        for name, (key, _) in keys.items()
    }
    assert may == {"a": [True, False, False], "b": [True, True, False], "root": [True, True, True]}


def test_whatever_is_no_key_is_one_error(tenancy, keys):
    a, b = keys["a"][0], keys["b"][0]
    swapped = "_".join(a.split("_")[:2] + b.split("_", 2)[2:])
    wrong = [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {a}",
        a,
        f"Bearer {a[:-1]}",
        f"Bearer {a}x",
        f"Bearer {swapped}",
        "Bearer prism_zzzz_" + "A" * 43,
    ]
    wrong += [f"Bearer {a}\0", f"Bearer {a} {b}", f"Bearer {a.upper()}", "Bearer " + "x" * 100_000, "Bearer ü" * 9, keys["a"][1].hash]
    messages = set()
    for header in wrong:
        with pytest.raises(Unauthorized) as caught:
            tenancy.authenticate(header)
        messages.add(str(caught.value))
    assert len(messages) == 1


def test_a_key_at_rest_does_not_hold_the_secret(keys):
    for key, record in keys.values():
        secret = key.split("_", 2)[2]
        stored = json.dumps(record.to_dict())
        assert secret not in stored and len(secret) == 43
        _, salt, digest = record.hash.split("$")
        assert hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest() == digest
    first, second = new_key(id="same1"), new_key(id="same1")
    assert first[0] != second[0] and first[1].hash.split("$")[1] != second[1].hash.split("$")[1]


@pytest.mark.parametrize(
    ("text", "say"),
    [
        ("", "no document"),
        ("[1]", "no document"),
        ("a: [", "neither YAML nor JSON"),
        ("{", "neither YAML nor JSON"),
        ("format_version: '2.0'\ntenants: []", "2.0"),
        ("format_version: '1.0'", "tenants"),
        ("format_version: '1.0'\ntenants: [{id: ../x}]", "tenant id"),
        ("format_version: '1.0'\ntenants: [{id: a}, {id: a}]", "twice"),
        ("format_version: '1.0'\ntenants: [{id: a, keys: [{id: k3f9, hash: plain}]}]", "sha256"),
        ("format_version: '1.0'\ntenants: [{id: a, keys: [{id: 'K', hash: x}]}]", "key id"),
        ("format_version: '1.0'\ntenants: [{id: a, limit: {}}]", "limits"),
        ("format_version: '1.0'\ntenants: [{id: a, limits: {requests_per_second: .nan}}]", "requests_per_second"),
        ("format_version: '1.0'\nshared: ['']\ntenants: []", "tenant id"),
        ("1: 2", "no text"),
    ],
)
def test_a_wrong_document_is_one_line_with_its_place(text, say):
    with pytest.raises(ConfigError, match=say) as caught:
        parse_tenancy(text, "keys.yaml")
    assert "keys.yaml" in str(caught.value) and "\n" not in str(caught.value)


def test_a_hash_in_a_wrong_document_is_not_shown():
    record = new_key()[1].hash
    with pytest.raises(ConfigError) as caught:
        parse_tenancy(json.dumps(document(a={"keys": [{"id": "K", "hash": record}, {"id": "abcd", "hash": record + "x"}]})), "keys.yaml")
    assert record.split("$")[2] not in str(caught.value)


def test_one_key_id_for_two_tenants_is_refused():
    record = new_key()[1].to_dict()
    with pytest.raises(ConfigError, match="twice"):
        parse_tenancy(json.dumps(document(a={"keys": [record]}, b={"keys": [record]})), "keys")


def test_from_the_environment_and_from_nothing(keys):
    key, record = keys["a"]
    text = json.dumps(document(a={"keys": [record.to_dict()]}))
    assert Tenancy.load(environment={ENVIRONMENT: text}).authenticate(f"Bearer {key}").tenant == "a"
    with pytest.raises(ConfigError, match="no API keys"):
        Tenancy.load(environment={})
    with pytest.raises(ConfigError, match="16 bytes"):
        Tenancy.load(environment={ENVIRONMENT: text, SALT_ENVIRONMENT: "short"})
    one, two = (Tenancy.load(environment={ENVIRONMENT: text, SALT_ENVIRONMENT: "x" * 32}) for _ in range(2))
    caller = one.authenticate(f"Bearer {key}")
    assert one.salt(caller) == two.salt(caller)
    assert Tenancy.load(environment={ENVIRONMENT: text}).salt(caller) != Tenancy.load(environment={ENVIRONMENT: text}).salt(caller)


def test_a_changed_file_holds_and_a_broken_one_does_not(tmp_path, keys, caplog):
    file, now = tmp_path / "keys.yaml", [0.0]
    (a, a_record), (b, b_record) = keys["a"], keys["b"]

    def write(text: str, age: int) -> None:
        file.write_text(text)
        os.utime(file, ns=(age, age))
        now[0] += RECHECK_S

    write(json.dumps(document(a={"keys": [a_record.to_dict()]})), 1)
    tenancy = FileTenancy(file, clock=lambda: now[0])
    assert tenancy.authenticate(f"Bearer {a}").tenant == "a"
    write(json.dumps(document(b={"keys": [b_record.to_dict()]})), 2)
    assert tenancy.authenticate(f"Bearer {b}").tenant == "b"
    with pytest.raises(Unauthorized):  # revoked
        tenancy.authenticate(f"Bearer {a}")
    write("{broken", 3)
    assert tenancy.authenticate(f"Bearer {b}").tenant == "b" and "not used" in caplog.text
    file.unlink()
    now[0] += RECHECK_S
    assert tenancy.authenticate(f"Bearer {b}").tenant == "b"
    with pytest.raises(ConfigError, match="cannot be read"):
        FileTenancy(tmp_path / "absent.yaml")


def test_an_open_tenancy_lets_everybody_be_the_one_tenant():
    caller = OpenTenancy().authenticate(None)
    assert caller.tenant == "default" and caller.may("admin") and OpenTenancy().open
    assert OpenTenancy().salt(caller) != OpenTenancy().salt(caller)  # no secret is shared by two processes unless it is given


# --- salts -------------------------------------------------------------------------------------------------------------------


def test_the_salt_is_the_hmac_of_length_prefixed_parts():
    message = b"\0" * 7 + b"\2ab" + b"\0" * 7 + b"\1c"
    assert cache_salt(b"secret", "ab", "c") == hmac.new(b"secret", message, hashlib.sha256).hexdigest()


@given(st.lists(st.text(max_size=4), max_size=3), st.lists(st.text(max_size=4), max_size=3))
@settings(max_examples=200, deadline=None)
def test_two_lists_of_parts_have_two_salts(one, two):
    assert (cache_salt(b"k", *one) == cache_salt(b"k", *two)) == (one == two)


def test_tenants_have_salts_of_their_own(tenancy, keys):
    callers = [tenancy.authenticate(f"Bearer {key}") for key, _ in keys.values()]
    assert len({tenancy.salt(caller) for caller in callers}) == len(callers)
    assert all(len(tenancy.salt(caller)) == 64 for caller in callers)


# --- limits ------------------------------------------------------------------------------------------------------------------


def caller_with(limits: TenantLimits, tenant: str = "a") -> Caller:
    return Caller(tenant=tenant, key="k", scopes=frozenset({"infer"}), sees=(tenant,), limits=limits)


def test_the_bucket_by_hand():
    bucket = TokenBucket(2.0, 3, now=0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]
    assert bucket.take(0.25) == 0.25  # half a token is there
    assert bucket.take(0.5) == 0.0 and bucket.take(0.5) == 0.5
    assert [bucket.take(100.0) for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]  # never more than the burst


@given(st.floats(0.1, 50), st.integers(1, 10), st.lists(st.floats(0, 3), min_size=1, max_size=60))
@settings(max_examples=100, deadline=None)
def test_no_window_passes_more_than_burst_and_rate_allow(rate, burst, steps):
    bucket, now, passed = TokenBucket(rate, burst, 0.0), 0.0, []
    for step in steps:
        now += step
        wait = bucket.take(now)
        if wait == 0:
            passed.append(now)
        else:
            # The told time is the right one: a moment before, there is no token. (Rounding: relative 1e-9 of a token.)
            assert 0 < wait <= 1 / rate * (1 + 1e-9)
    for first, start in enumerate(passed):
        for last, end in enumerate(passed[first:], start=first):
            assert last - first + 1 <= burst + rate * (end - start) + 1e-6


def test_the_gate_counts_each_tenant_alone():
    now = [0.0]
    gate = TenantGate(clock=lambda: now[0])
    one, two = caller_with(TenantLimits(concurrent=2), "a"), caller_with(TenantLimits(concurrent=1), "b")
    with gate.enter(one), gate.enter(one), gate.enter(two):
        for caller in (one, two):
            with pytest.raises(TooManyRequests), gate.enter(caller):
                pass
        assert (gate.running("a"), gate.running("b"), gate.running("c")) == (2, 1, 0)
    with pytest.raises(ZeroDivisionError), gate.enter(one):
        raise ZeroDivisionError
    assert gate.running("a") == gate.running("b") == 0


def test_a_refusal_by_concurrency_takes_no_token_and_changed_limits_hold():
    now = [0.0]
    gate = TenantGate(clock=lambda: now[0])
    limits = TenantLimits(requests_per_second=1, burst=2, concurrent=1)
    with gate.enter(caller_with(limits)):
        for _ in range(5):
            with pytest.raises(TooManyRequests), gate.enter(caller_with(limits)):
                pass
    with gate.enter(caller_with(limits)):
        pass
    with pytest.raises(TooManyRequests) as caught, gate.enter(caller_with(limits)):
        pass
    assert caught.value.retry_after == 1.0 and pickle.loads(pickle.dumps(caught.value)).retry_after == 1.0
    with gate.enter(caller_with(TenantLimits(requests_per_second=100, burst=5))):
        pass


# --- metrics -----------------------------------------------------------------------------------------------------------------


def test_labels_are_bounded_and_come_free():
    labels = BoundedLabels(2)
    assert [labels.of(name) for name in "abcab"] == ["a", "b", OTHER, "a", "b"]
    assert labels.release("a") and not labels.release("c")
    assert [labels.of(name) for name in "ca"] == ["c", OTHER]


def test_a_thousand_adapters_make_a_bounded_number_of_series_which_go_again():
    registry = PrometheusMetrics()
    metrics = ServingMetrics(registry, max_adapters=10)
    for index in range(1000):
        metrics.answered(f"t/{index}", prompt=2, generated=3)
    text = registry.render().decode()
    assert text.count("prism_adapter_requests_total{") == 11
    assert 'prism_adapter_tokens_total{adapter="other",kind="generated"} 2970.0' in text
    for index in range(1000):
        metrics.forget(f"t/{index}")
    text = registry.render().decode()
    assert "t/" not in text and text.count("prism_adapter_requests_total{") == 1


def test_totals_are_followed_also_through_a_restart():
    registry = PrometheusMetrics()
    metrics = ServingMetrics(registry)
    cache = PlaneCacheStats(loads=3, hits=5, evictions=1, unloads=0, failures=2, busy=0, resident=2, resident_bytes=64, pinned=1, loading=0)
    for tokens in (10, 25, 5):
        metrics.state(EngineStats(running=1, waiting=2, generated_tokens=tokens), cache)
    text = registry.render().decode()
    assert "prism_engine_generated_tokens_total 30.0" in text and "prism_plane_loads_total 3.0" in text
    assert "prism_planes_resident_bytes 64.0" in text and "prism_sequences_waiting 2.0" in text
