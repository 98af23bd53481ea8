"""What serving decided about an adapter, in the adapter store beside its versions: a pinned version, or that it is not served.

    serving/<tenant>/<name>/00000001.json, 2, 3, ...      each created exclusively and never changed; the last one holds

The store's own log says which version is current; this one lets an operator hold a version while publications go on, or take an adapter off, for all
processes that serve the store and with a history. Records carry their own SHA-256 (`adapters.store.records`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from typing import Any

from prism_ray.adapters.ids import require_adapter_id
from prism_ray.adapters.store.backend import Backend
from prism_ray.adapters.store.records import decode_record, encode_record
from prism_ray.core.errors import CheckpointError, EnvironmentFault, one_line

_ATTEMPTS = 50


@dataclass(frozen=True, kw_only=True)
class Directive:
    """served: whether requests reach the adapter at all. pinned: version that the bare name means, 0 for the store's current one.
    no_change: versions that may equal the base (declared when they were published)."""

    seq: int = 0
    action: str = ""
    served: bool = True
    pinned: int = 0
    no_change: tuple[int, ...] = ()
    who: str = ""
    when: str = ""


class ServingLog:
    """The directives of all adapters of a store."""

    def __init__(self, backend: Backend):
        self._backend = backend

    def last(self, tenant: str, name: str) -> Directive:
        """The directive that holds; the default where there is none. Raises CheckpointError for a damaged record."""
        numbers = self._numbers(tenant, name)
        return self._read(tenant, name, numbers[-1]) if numbers else Directive()

    def history(self, tenant: str, name: str) -> list[Directive]:
        """All directives, oldest first."""
        return [self._read(tenant, name, number) for number in self._numbers(tenant, name)]

    def append(self, tenant: str, name: str, action: str, *, who: str, **changes: Any) -> Directive:
        """Add a directive: the last one with `changes`. Nothing is written where they change nothing."""
        for _ in range(_ATTEMPTS):
            last = self.last(tenant, name)
            if replace(last, **changes) == last:
                return last
            now = datetime.now(UTC).isoformat(timespec="seconds")
            made = replace(last, **changes, seq=last.seq + 1, action=action, who=who, when=now)
            fields = asdict(made) | {"no_change": list(made.no_change), "tenant": tenant, "name": name}
            if self._backend.create(self._path(tenant, name, made.seq), encode_record(fields)):
                return made
        raise EnvironmentFault(f"{_ATTEMPTS} other writers were faster", where=name, remedy="try again")

    @staticmethod
    def _folder(tenant: str, name: str) -> str:
        return f"serving/{require_adapter_id(tenant)}/{require_adapter_id(name)}"

    def _path(self, tenant: str, name: str, number: int) -> str:
        return f"{self._folder(tenant, name)}/{number:08d}.json"

    def _numbers(self, tenant: str, name: str) -> list[int]:
        names = [found.removesuffix(".json") for found in self._backend.names(self._folder(tenant, name))]
        return sorted(int(found) for found in names if found.isdigit())

    def _read(self, tenant: str, name: str, number: int) -> Directive:
        path = self._path(tenant, name, number)
        where = f"{self._backend.url}: {path}"
        try:
            fields = decode_record(self._backend.read(path), where)
            if (fields["seq"], fields["tenant"], fields["name"]) != (number, tenant, name):
                raise ValueError("is another adapter's")
            known = {key: fields[key] for key in Directive.__dataclass_fields__}
            return Directive(**known | {"no_change": tuple(known["no_change"])})
        except (FileNotFoundError, KeyError, ValueError, TypeError) as error:
            raise CheckpointError(f"is no directive ({one_line(error)})", where=where, remedy="restore the file from a backup") from None
