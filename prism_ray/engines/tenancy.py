"""Who asks: API keys, tenants, what each may see, and the salt of its caches (field case SRV-03).

    key         prism_<id>_<secret>: id of 4 to 32 lower-case letters and digits, which names the record; secret of 256 random bits in base64url
    at rest     sha256$<salt>$<SHA-256(salt || secret)>; a slow hash would protect guessable secrets, and there are none: what is not 43 base64url characters is
                no key. It would let anybody burn a core with wrong keys
    compare     constant time, also for an id that does not exist
    cache salt  HMAC-SHA256(server secret, length-prefixed parts), so ("ab", "c") and ("a", "bc") differ; nothing of it comes from the client

A tenancy is a YAML or JSON document, in a file (read again when it changes, so keys are revoked without a restart) or in an environment variable:

    format_version: "1.0"
    shared: [public]                  # tenants whose adapters everybody sees
    limits: {requests_per_second: 20, burst: 40, concurrent: 16}
    tenants:
      - id: acme
        keys: [{id: "k3f9", hash: "sha256$...", scopes: [infer, manage]}]

Scopes: `infer` asks models; `manage` also publishes, pins, rolls back and unloads the tenant's own adapters; `admin` does so for every tenant and reads metrics.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from prism_ray.adapters.ids import require_adapter_id
from prism_ray.adapters.store import DEFAULT_TENANT
from prism_ray.core.config import Config
from prism_ray.core.errors import ConfigError, PrismError, one_line
from prism_ray.core.optional import require

log = logging.getLogger(__name__)

Scope = Literal["infer", "manage", "admin"]
ENVIRONMENT = "PRISM_RAY_TENANCY"
SALT_ENVIRONMENT = "PRISM_RAY_CACHE_SECRET"
MAJOR = "1"
RECHECK_S = 1.0
_KEY = re.compile(r"prism_([a-z0-9]{4,32})_([A-Za-z0-9_-]{43})", re.ASCII)
_ID = re.compile(r"[a-z0-9]{4,32}", re.ASCII)
_HASH = re.compile(r"sha256\$([0-9a-f]{32})\$([0-9a-f]{64})", re.ASCII)
_NOBODY = "sha256$" + "0" * 32 + "$" + "0" * 64


class Unauthorized(PrismError):
    """No key, or one that is not known."""


class TenantLimits(Config):
    """Of one tenant, in one process of the HTTP front; None for no limit. burst: requests that may come at once after a pause."""

    requests_per_second: float | None = Field(default=None, gt=0, le=1e6)
    burst: int = Field(default=1, ge=1)
    concurrent: int | None = Field(default=None, ge=1)


class KeyRecord(Config):
    """A key at rest; see the module docstring."""

    id: str
    hash: str
    scopes: tuple[Scope, ...] = ("infer",)

    @field_validator("id")
    @classmethod
    def _legal_id(cls, value: str) -> str:
        if not _ID.fullmatch(value):
            raise ValueError("a key id has 4 to 32 lower-case letters and digits")
        return value

    @field_validator("hash")
    @classmethod
    def _legal_hash(cls, value: str) -> str:
        if not _HASH.fullmatch(value):
            raise ValueError("not of the form sha256$<32 hex digits>$<64 hex digits>: make keys with `new_key`")
        return value


class TenantConfig(Config):
    """id: as the adapter store calls it. limits: instead of the common ones. reads: further tenants whose adapters it sees."""

    id: str
    keys: tuple[KeyRecord, ...] = ()
    limits: TenantLimits | None = None
    reads: tuple[str, ...] = ()


class TenancyConfig(Config):
    """The document."""

    format_version: str
    tenants: tuple[TenantConfig, ...]
    shared: tuple[str, ...] = ()
    limits: TenantLimits = TenantLimits()

    @model_validator(mode="after")
    def _consistent(self) -> TenancyConfig:
        if self.format_version.split(".")[0] != MAJOR:
            raise ValueError(f"format_version {self.format_version} is not readable by this release (reads {MAJOR}.x)")
        for name in (*self.shared, *(name for tenant in self.tenants for name in (tenant.id, *tenant.reads))):
            try:
                require_adapter_id(name)
            except ConfigError:
                raise ValueError("a tenant id has 1 to 128 letters, digits, '.', '_' or '-', and does not begin with a dot") from None
        for what, ids in (
            ("tenant", [tenant.id for tenant in self.tenants]),
            ("key", [key.id for tenant in self.tenants for key in tenant.keys]),
        ):
            if len(set(ids)) != len(ids):
                raise ValueError(f"a {what} id occurs twice")
        return self


@dataclass(frozen=True, kw_only=True)
class Caller:
    """Who asks. sees: tenants whose adapters resolve, its own first."""

    tenant: str
    key: str
    scopes: frozenset[str]
    sees: tuple[str, ...]
    limits: TenantLimits

    @property
    def who(self) -> str:
        """As histories and logs name it."""
        return f"{self.tenant}/{self.key}"

    def may(self, scope: Scope) -> bool:
        """admin may everything, manage may infer."""
        granted = {"infer": {"infer", "manage", "admin"}, "manage": {"manage", "admin"}, "admin": {"admin"}}
        return bool(self.scopes & granted[scope])


def new_key(scopes: tuple[Scope, ...] = ("infer",), *, id: str | None = None) -> tuple[str, KeyRecord]:
    """(the key, which is shown once, and what to keep of it)."""
    key_id, secret, salt = id or secrets.token_hex(4), secrets.token_urlsafe(32), secrets.token_hex(16)
    record = KeyRecord(id=key_id, hash=f"sha256${salt}${_digest(salt, secret)}", scopes=scopes)
    return f"prism_{key_id}_{secret}", record


def _digest(salt: str, secret: str) -> str:
    return hashlib.sha256(bytes.fromhex(salt) + secret.encode()).hexdigest()


def cache_salt(secret: bytes, *parts: str) -> str:
    """HMAC-SHA256 of length-prefixed parts, in hexadecimal: no two lists of parts give one message."""
    message = b"".join(len(data).to_bytes(8, "big") + data for data in (part.encode() for part in parts))
    return hmac.new(secret, message, hashlib.sha256).hexdigest()


class Tenancy:
    """Authenticates requests. secret: of the cache salts; processes that share an engine should share it, else they only miss each other's prefixes."""

    def __init__(self, config: TenancyConfig, *, secret: bytes | None = None):
        self._secret = secret or secrets.token_bytes(32)
        self._take(config)

    @classmethod
    def load(cls, file: Path | str | None = None, *, environment: Mapping[str, str] = os.environ) -> Tenancy:
        """From a file, or from the variables of the environment. Raises ConfigError where neither is there or the document is wrong."""
        secret = environment.get(SALT_ENVIRONMENT, "").encode() or None
        if secret is not None and len(secret) < 16:
            raise ConfigError("has fewer than 16 bytes", where=SALT_ENVIRONMENT, remedy="take 32 random ones")
        if file is not None:
            return FileTenancy(Path(file), secret=secret)
        if ENVIRONMENT not in environment:
            raise ConfigError(
                "there are no API keys",
                where="tenancy",
                remedy=f"give a file, set {ENVIRONMENT}, or serve one user without keys on purpose",
            )
        return cls(parse_tenancy(environment[ENVIRONMENT], ENVIRONMENT), secret=secret)

    @property
    def open(self) -> bool:
        """Whether everybody is let in."""
        return False

    def authenticate(self, authorization: str | None) -> Caller:
        """The caller of a request with this Authorization header. Raises Unauthorized, and does not say which part was wrong."""
        scheme, _, token = (authorization or "").partition(" ")
        match = _KEY.fullmatch(token.strip()) if scheme.lower() == "bearer" else None
        key_id, secret = match.groups() if match else ("", "")
        tenant, record = self._keys.get(key_id, (None, None))
        _, salt, expected = (record.hash if record else _NOBODY).split("$")
        fine = hmac.compare_digest(_digest(salt, secret), expected)
        if tenant is None or record is None or not fine:
            raise Unauthorized("no valid API key", remedy="send it as 'Authorization: Bearer prism_...'")
        sees = dict.fromkeys((tenant.id, *tenant.reads, *self.config.shared))
        limits = tenant.limits or self.config.limits
        return Caller(tenant=tenant.id, key=record.id, scopes=frozenset(record.scopes), sees=tuple(sees), limits=limits)

    def salt(self, caller: Caller) -> str:
        """The salt of the tenant's prefix caches."""
        return cache_salt(self._secret, "prism-ray prefix cache", caller.tenant)

    def _take(self, config: TenancyConfig) -> None:
        self.config = config
        self._keys = {key.id: (tenant, key) for tenant in config.tenants for key in tenant.keys}


class FileTenancy(Tenancy):
    """A tenancy whose file is read again when it has changed. A file that is wrong then is reported, and the one before stays in force."""

    def __init__(self, file: Path, *, secret: bytes | None = None, clock: Callable[[], float] = time.monotonic):
        self._file, self._clock = file, clock
        self._stamp, self._checked = self._stat(), clock()
        super().__init__(self._read(), secret=secret)

    def authenticate(self, authorization: str | None) -> Caller:
        if self._clock() - self._checked >= RECHECK_S:
            self._checked = self._clock()
            stamp = self._stat()
            if stamp != self._stamp:
                self._stamp = stamp
                try:
                    self._take(self._read())
                except ConfigError as error:
                    log.error("the changed key file is not used: %s", error)
        return super().authenticate(authorization)

    def _stat(self) -> tuple[int, int, int] | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino

    def _read(self) -> TenancyConfig:
        try:
            text = self._file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read ({one_line(error)})", where=str(self._file), remedy="give a YAML or JSON file") from None
        return parse_tenancy(text, str(self._file))


class OpenTenancy(Tenancy):
    """Everybody is one tenant with every scope; for one user on one machine."""

    def __init__(self, tenant: str = DEFAULT_TENANT):
        super().__init__(TenancyConfig(format_version="1.0", tenants=(TenantConfig(id=tenant),)))
        self._caller = Caller(tenant=tenant, key="anybody", scopes=frozenset({"admin"}), sees=(tenant,), limits=TenantLimits())

    @property
    def open(self) -> bool:
        return True

    def authenticate(self, authorization: str | None) -> Caller:
        return self._caller


def parse_tenancy(text: str, where: str) -> TenancyConfig:
    """A document as a config. Raises ConfigError, whose line names the place and shows no hash."""
    yaml = require("yaml", "serve")
    try:
        document: Any = json.loads(text) if text.lstrip().startswith("{") else yaml.safe_load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError(
            f"is neither YAML nor JSON ({one_line(error)[:80]})", where=where, remedy="see prism_ray.engines.tenancy"
        ) from None
    if not isinstance(document, dict):
        raise ConfigError("is no document with tenants", where=where, remedy="see prism_ray.engines.tenancy")
    try:
        return TenancyConfig.load(document)
    except ConfigError as error:
        raise ConfigError(f"{error.where}: {error.what.split(' (got')[0]}", where=where, remedy=error.remedy) from None
    except TypeError:
        raise ConfigError("a key of the document is no text", where=where, remedy="see prism_ray.engines.tenancy") from None
