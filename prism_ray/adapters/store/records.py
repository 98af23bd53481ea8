"""Records: what the store says about versions and bases, as JSON that carries its own SHA-256.

An event log is the whole state of one name: `tenants/<tenant>/<name>/log/00000001.json`, 2, 3, ... Each event is created exclusively under the next
free number and never changed, so all writers agree on one order and none loses anything. An event is a publication or a rollback; it says which version is
current from then on (`version`) and how many there are (`latest`). The last event therefore is the pointer of the name, and the log is its history.
`previous` is the SHA-256 of the event before: a history that somebody edited does not verify.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from prism_ray.adapters.store.backend import Backend
from prism_ray.core.errors import CheckpointError, EnvironmentFault, one_line

MAJOR, MINOR = 1, 0
_ATTEMPTS = 500
_DIGITS = 8
REPAIR = "restore the file from a backup of the store"


def encode_record(fields: dict[str, Any]) -> bytes:
    """A record's bytes: sorted JSON with `format_version`, a nonce (so that no two writers' bytes are equal) and the SHA-256 over the rest."""
    body = fields | {"format_version": f"{MAJOR}.{MINOR}", "nonce": secrets.token_hex(8)}
    return _text(body | {"sha256": hashlib.sha256(_text(body)).hexdigest()})


def decode_record(data: bytes, where: str) -> dict[str, Any]:
    """The fields of a record, `sha256` included. Raises CheckpointError for another major version, no JSON, or another SHA-256."""
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise TypeError("no JSON object")
        version = str(fields["format_version"])
        digest = fields["sha256"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise CheckpointError(f"is no record of the store ({one_line(error)})", where=where, remedy=REPAIR) from None
    if version.split(".")[0] != str(MAJOR):
        raise CheckpointError(
            f"format version {version} is not readable by this release (reads {MAJOR}.x)", where=where, remedy="update prism-ray"
        )
    if hashlib.sha256(_text({key: value for key, value in fields.items() if key != "sha256"})).hexdigest() != digest:
        raise CheckpointError("record is corrupted: its SHA-256 differs", where=where, remedy=REPAIR)
    return fields


def _text(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields, sort_keys=True, indent=1, allow_nan=False) + "\n").encode()


@dataclass(frozen=True, kw_only=True)
class Event:
    """One line of a name's history. version: current from here on; latest: highest version so far; files, identity: of a publication, by file name
    {sha256, bytes, object, encoding} and the manifest's base and format; digest: SHA-256 of the published manifest."""

    seq: int
    event: Literal["publish", "rollback"]
    tenant: str
    name: str
    version: int
    latest: int
    who: str
    when: str
    note: str = ""
    metrics: dict[str, Any] = field(default_factory=dict)
    digest: str = ""
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    identity: dict[str, Any] = field(default_factory=dict)
    previous: str = ""
    sha256: str = ""

    @property
    def reference(self) -> str:
        """`name@n` of the version that is current from here on."""
        return f"{self.name}@{self.version}"

    @property
    def bytes(self) -> int:
        """Bytes of the published files."""
        return sum(int(entry["bytes"]) for entry in self.files.values())


class Log:
    """The events of one name."""

    def __init__(self, backend: Backend, tenant: str, name: str):
        self.backend, self.tenant, self.name = backend, tenant, name
        self.folder = f"tenants/{tenant}/{name}/log"

    def numbers(self) -> list[int]:
        """The numbers of all events, 1 .. k. Raises CheckpointError when one in between is gone."""
        found = sorted(int(name.removesuffix(".json")) for name in self.backend.names(self.folder) if name.removesuffix(".json").isdigit())
        if found != list(range(1, len(found) + 1)):
            missing = next(number for number, seen in enumerate(found, start=1) if number != seen)
            raise CheckpointError(f"event {missing} is missing", where=f"{self.backend.url}: {self.folder}", remedy=REPAIR)
        return found

    def read(self, seq: int) -> Event:
        """One event, verified. Raises CheckpointError where it is corrupted or is another name's."""
        path = f"{self.folder}/{seq:0{_DIGITS}d}.json"
        where = f"{self.backend.url}: {path}"
        try:
            fields = decode_record(self.backend.read(path), where)
        except FileNotFoundError:
            raise CheckpointError("event is missing", where=where, remedy=REPAIR) from None
        try:
            event = Event(**{key: value for key, value in fields.items() if key in Event.__dataclass_fields__})
        except TypeError as error:
            raise CheckpointError(f"is no event ({one_line(error)})", where=where, remedy=REPAIR) from None
        if (event.seq, event.tenant, event.name) != (seq, self.tenant, self.name):
            raise CheckpointError(f"is event {event.seq} of another name", where=where, remedy=REPAIR)
        return event

    def head(self) -> Event | None:
        """The last event, which points to the current version; None for an unknown name."""
        numbers = self.numbers()
        return self.read(numbers[-1]) if numbers else None

    def history(self) -> list[Event]:
        """All events in order; raises CheckpointError when the chain of SHA-256 is broken."""
        events = [self.read(seq) for seq in self.numbers()]
        for before, after in itertools.pairwise(events):
            if after.previous != before.sha256:
                raise CheckpointError(
                    f"event {before.seq} is not the one that event {after.seq} followed",
                    where=f"{self.backend.url}: {self.folder}",
                    remedy=REPAIR,
                )
        return events

    def publication(self, version: int) -> Event | None:
        """The event that published a version, None where there is no such version."""
        numbers = self.numbers()
        if not numbers or version < 1 or version > self.read(numbers[-1]).latest:
            return None
        # `latest` never falls, and version n came with event n at the earliest: the first event whose latest is n.
        low, high = version, numbers[-1]
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.read(middle).latest >= version else (middle + 1, high)
        return self.read(low)

    def append(self, build: Callable[[Event | None], Event]) -> Event:
        """Add the event that `build` makes of the last one; it is called again with the new last one when another writer was faster.

        Whatever `build` raises is raised, and nothing is written.
        """
        for attempt in range(_ATTEMPTS):
            event = build(self.head())
            fields = {key: value for key, value in asdict(event).items() if key != "sha256"}
            data = encode_record(fields)
            if self.backend.create(f"{self.folder}/{event.seq:0{_DIGITS}d}.json", data):
                return self.read(event.seq)
            time.sleep(random.uniform(0, min(0.2, 0.002 * 2 ** min(attempt, 7))))
        raise EnvironmentFault(f"{_ATTEMPTS} other writers were faster", where=f"{self.backend.url}: {self.folder}", remedy="publish again")
