"""`AdapterStore`: bases and adapters on any fsspec URL that has exclusive create (scale-qlora §5.2: one code plane, many scale planes).

    store.json                                    format version, grace period
    objects/sha256/ab/cdef...                     content-addressed bytes            (`objects`)
    bases/<code plane>/<scale plane>.json         a base checkpoint                  (`bases`)
    tenants/<tenant>/<name>/log/00000001.json     versions and rollbacks of a name   (`records`)
    gc/<lease>                                    a collector at work                (`collect`)

Publishing writes the objects first and one event last, by exclusive create; a killed publication leaves objects that the collector removes, and nothing else.
Where the store has the adapter's base, the scale plane is kept as a patch against the base's (`adapters.patch`) if that is smaller; `pull` gives back the file
byte for byte either way, verified by SHA-256.

A name belongs to a tenant: another tenant's adapter and one that does not exist are the same error, because they are looked up at different places.
"""

from __future__ import annotations

import getpass
import hashlib
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from prism_ray.adapters.folder import inside
from prism_ray.adapters.ids import require_adapter_id
from prism_ray.adapters.patch import decode_patch, encode_patch
from prism_ray.adapters.scale_plane import ADAPTER_KIND, SCALE_PLANE_NAME
from prism_ray.adapters.store import bases, collect, compare
from prism_ray.adapters.store.admit import Admitted, admit_folder
from prism_ray.adapters.store.backend import Backend
from prism_ray.adapters.store.ids import DEFAULT_TENANT, parse_reference
from prism_ray.adapters.store.objects import Objects
from prism_ray.adapters.store.planefile import Experts, full_planes, join_file, matching_base, read_factors, split_file
from prism_ray.adapters.store.records import Event, Log, decode_record, encode_record
from prism_ray.core.errors import CheckpointError, ConfigError, FingerprintMismatch
from prism_ray.core.files import atomic_folder
from prism_ray.core.manifest import read_manifest, verify_file

GRACE_S = 86400.0
_STORE = "store.json"


class AdapterStore:
    """A store at `url`, made at the first publication. storage_options: for fsspec (endpoint_url, key, ...); the usual environment variables work too.

    cache: local folder of read objects, verified like the store's. grace_s: of a new store, the age at which the collector may take an unreferenced object.
    """

    def __init__(
        self,
        url: str | Path,
        *,
        storage_options: Mapping[str, Any] | None = None,
        cache: Path | str | None = None,
        grace_s: float = GRACE_S,
    ):
        if not grace_s > 0:
            raise ConfigError(f"must be above 0, got {grace_s}", where="grace_s", remedy="an hour is 3600")
        self.backend = Backend(url, storage_options)
        self.objects = Objects(self.backend, None if cache is None else Path(cache))
        self._grace_s = grace_s
        self._planes: dict[str, dict[str, torch.Tensor]] = {}

    # --- writing -----------------------------------------------------------------------------------------------------------

    def publish(
        self,
        folder: Path | str,
        name: str,
        *,
        tenant: str = DEFAULT_TENANT,
        who: str | None = None,
        note: str = "",
        metrics: Mapping[str, Any] | None = None,
        patches: bool = True,
    ) -> Event:
        """Store an adapter folder as the next version of `name`, which becomes current. metrics: the manifest's by default; patches: keep the plane as one.

        Raises what `admit_folder` raises, FormatError or FingerprintMismatch when the base in the store has other layers; nothing is published then.
        """
        log = self._log(tenant, name)
        admitted = admit_folder(folder)
        sources: dict[str, Path | bytes] = {}
        files: dict[str, dict[str, Any]] = {}
        for file, (digest, size) in admitted.files.items():
            files[file] = {"sha256": digest, "bytes": size, "object": digest, "encoding": "raw"}
            sources[digest] = admitted.folder / file
        if patches and (made := self._patch(admitted)) is not None:
            patch, experts = made
            entry = files[SCALE_PLANE_NAME]
            entry |= {"object": hashlib.sha256(patch).hexdigest(), "encoding": "patch", "experts": experts}
            sources[entry["object"]] = patch
        sources = {digest: sources[digest] for digest in {entry["object"] for entry in files.values()}}
        fields: dict[str, Any] = {
            "who": who or _user(),
            "note": note,
            "metrics": dict(admitted.metrics if metrics is None else metrics),
            "digest": admitted.files["manifest.json"][0],
            "files": files,
            "identity": admitted.identity,
        }

        def event(head: Event | None) -> Event:
            latest = (head.latest if head else 0) + 1
            return _after(head, log, event="publish", version=latest, latest=latest, **fields)

        return self._commit(sources, lambda: log.append(event))

    def publish_base(self, folder: Path | str) -> bases.Base:
        """Store a quantized checkpoint folder; one that the store has is left as it is. Raises what `bases.split_base` raises."""
        with tempfile.TemporaryDirectory(prefix="prism-ray-base-") as scratch:
            base, sources = bases.split_base(Path(folder), Path(scratch))
            found = self.base(base.code_plane, base.scale_plane)
            if found is not None and all(self.objects.present(digest) for digest in found.objects):
                return found
            self._commit(dict(sources), lambda: bases.write_record(self.backend, base))
        return base

    def rollback(
        self, name: str, version: int, *, tenant: str = DEFAULT_TENANT, expected: int | None = None, who: str | None = None, note: str = ""
    ) -> Event:
        """Make an older version current again; the change is an event of the history.

        expected: the version that must be current now (compare and swap). Raises ConfigError where another one is, or for a version that does not exist.
        """
        log = self._log(tenant, name)
        seen = self._head(log)
        if not 1 <= version <= seen.latest:
            raise _unknown(name, version)
        wanted = seen.version if expected is None else expected

        def event(head: Event | None) -> Event:
            assert head is not None  # events are never removed
            if head.version != wanted:
                raise ConfigError(
                    f"version {head.version} is current, not {wanted}: somebody changed it",
                    where=name,
                    remedy="look at the history and decide again",
                )
            return _after(head, log, event="rollback", version=version, latest=head.latest, who=who or _user(), note=note)

        return log.append(event)

    def gc(self, *, dry_run: bool = False) -> collect.Collected:
        """Remove objects that nothing names and that are older than the store's grace period."""
        return collect.collect(self.backend, self._referenced, grace_s=self.grace_s, dry_run=dry_run)

    # --- reading -----------------------------------------------------------------------------------------------------------

    def list(self, tenant: str | None = DEFAULT_TENANT) -> tuple[Event, ...]:
        """The last event of every name of a tenant, by name; of all tenants with None, which is for the operator."""
        tenants = self.backend.names("tenants") if tenant is None else [require_adapter_id(tenant)]
        heads = [Log(self.backend, owner, name).head() for owner in tenants for name in self.backend.names(f"tenants/{owner}")]
        return tuple(head for head in heads if head is not None)

    def show(self, reference: str, *, tenant: str = DEFAULT_TENANT) -> Event:
        """The publication of `name@n`, or of the current version of `name`. Raises ConfigError where the tenant has no such adapter or version."""
        wanted = parse_reference(reference)
        log = self._log(tenant, wanted.name)
        head = self._head(log)
        version = head.version if wanted.version is None else wanted.version
        found = log.publication(version)
        if found is None:
            raise _unknown(wanted.name, version)
        if found.event != "publish" or found.version != version:
            raise CheckpointError(
                f"event {found.seq} is not the publication of version {version}", where=wanted.name, remedy="restore the store"
            )
        return found

    def history(self, name: str, *, tenant: str = DEFAULT_TENANT) -> tuple[Event, ...]:
        """All events of a name, oldest first, after checking that each follows the one before."""
        log = self._log(tenant, name)
        self._head(log)
        return tuple(log.history())

    def pull(self, reference: str, out: Path | str, *, tenant: str = DEFAULT_TENANT, replace: bool = False) -> Event:
        """Write the adapter folder as it was published, every file verified; `out` appears complete or not at all."""
        event = self.show(reference, tenant=tenant)
        with atomic_folder(out, replace=replace) as temporary:
            for file, entry in event.files.items():
                inside(temporary, file)  # refuses a name that leaves the folder: whoever writes to the bucket can write a record
                path = temporary / file
                path.parent.mkdir(parents=True, exist_ok=True)
                if entry["encoding"] == "raw":
                    self.objects.fetch(entry["object"], path, f"{event.reference}, {file}")
                else:
                    path.write_bytes(self._plane_file(event))
                verify_file(path, entry["bytes"], entry["sha256"])
            read_manifest(temporary, ADAPTER_KIND)
        return event

    def scale_plane(self, reference: str, *, tenant: str = DEFAULT_TENANT) -> dict[str, torch.Tensor]:
        """The adapter's scale plane {layer: uint8 [..., O, G]}, verified, without writing a file. Experts it does not change have their base's bytes."""
        return self._plane_of(self.show(reference, tenant=tenant))

    def diff(self, first: str, second: str, *, tenant: str = DEFAULT_TENANT) -> compare.PlaneDiff:
        """Changed blocks of each layer between two versions. A layer that one of them does not touch has its base's scales where the store has the base.

        Raises FingerprintMismatch for versions over different code planes.
        """
        a, b = self.show(first, tenant=tenant), self.show(second, tenant=tenant)
        if a.identity.get("base_code_plane") != b.identity.get("base_code_plane"):
            raise FingerprintMismatch(
                f"{a.reference} and {b.reference} belong to different code planes", where="diff", remedy="compare versions over one base"
            )
        plain = [self._base_scales(event.identity) or {} for event in (a, b)]
        return compare.diff_planes(a.reference, self._plane_of(a), plain[0], b.reference, self._plane_of(b), plain[1])

    def base(self, code_plane: str, scale_plane: str) -> bases.Base | None:
        """The stored base with these fingerprints, or None."""
        return bases.read_base(self.backend, code_plane, scale_plane)

    def list_bases(self) -> tuple[bases.Base, ...]:
        """Every stored base."""
        return tuple(bases.list_bases(self.backend))

    def pull_base(self, code_plane: str, scale_plane: str, out: Path | str, *, replace: bool = False) -> bases.Base:
        """Write the checkpoint folder as it was published. Raises ConfigError for a base that the store does not have."""
        base = self.base(code_plane, scale_plane)
        if base is None:
            raise ConfigError(
                f"no base with code plane {code_plane[:12]} and that scale plane", where=self.backend.url, remedy="publish it first"
            )
        bases.join_base(self.objects, base, Path(out), replace=replace)
        return base

    def stored_bytes(self) -> int:
        """Bytes of all objects, which is what bases and adapters occupy; records not counted."""
        return sum(entry.size for entry in self.backend.files("objects").values())

    @property
    def grace_s(self) -> float:
        """The grace period of the store, or of the one that the first publication will make."""
        try:
            fields = decode_record(self.backend.read(_STORE), f"{self.backend.url}: {_STORE}")
        except FileNotFoundError:
            return self._grace_s
        return float(fields["grace_s"])

    # --- inside ------------------------------------------------------------------------------------------------------------

    def _commit(self, sources: Mapping[str, Path | bytes], record: Callable[[], Any]) -> Any:
        """Write objects, then the record, by the rules of `collect`."""
        self.backend.require_exclusive_create()
        self.backend.create(_STORE, encode_record({"kind": "adapter-store", "grace_s": self._grace_s}))
        grace = self.grace_s

        def write(digest: str) -> None:
            self.objects.put(digest, sources[digest])

        began = None
        while began is None or time.monotonic() - began > grace / 2:
            began = time.monotonic()
            for digest in sources:
                write(digest)
            collect.wait_for_collectors(self.backend)
            collect.mend(self.objects, sources, write)
            # A grace period shorter than the writing itself could be repeated for ever; the collector's rule 2 still holds.
            if time.monotonic() - began > grace:
                break
        made = record()
        if time.monotonic() - began > grace / 2:
            collect.mend(self.objects, sources, write)
        return made

    def _log(self, tenant: str, name: str) -> Log:
        return Log(self.backend, require_adapter_id(tenant), require_adapter_id(name))

    @staticmethod
    def _head(log: Log) -> Event:
        head = log.head()
        if head is None:
            raise _unknown(log.name, None)
        return head

    def _referenced(self) -> set[str]:
        """Digests that any base or version names."""
        named = {digest for base in self.list_bases() for digest in base.objects}
        for tenant in self.backend.names("tenants"):
            for name in self.backend.names(f"tenants/{tenant}"):
                for event in Log(self.backend, tenant, name).history():
                    named |= {entry["object"] for entry in event.files.values()}
        return named

    def _base_scales(self, identity: Mapping[str, Any]) -> dict[str, torch.Tensor] | None:
        """The base scale plane that an adapter belongs to, None where the store does not have the base. Kept, since many adapters share one."""
        code_plane, scale_plane = str(identity.get("base_code_plane")), str(identity.get("base_scale_plane"))
        key = f"{code_plane}/{scale_plane}"
        if key not in self._planes:
            base = self.base(code_plane, scale_plane)
            if base is None:
                return None
            self._planes = {key: bases.stored_scales(self.objects, base)}
        return self._planes[key]

    def _patch(self, admitted: Admitted) -> tuple[bytes, Experts] | None:
        """(patch of the folder's plane, experts it holds), None where there is no base or the file itself is no larger."""
        base = self._base_scales(admitted.identity)
        if base is None:
            return None
        data = (admitted.folder / SCALE_PLANE_NAME).read_bytes()
        plane, experts = split_file(data)
        factors = read_factors(admitted.folder, admitted.manifest, plane, experts)
        patch = encode_patch(matching_base(base, experts), plane, factors=factors)
        # The file is made again from its tensors; one that another program laid out otherwise is kept as it is.
        return (patch, experts) if len(patch) < len(data) and join_file(plane, experts) == data else None

    def _plane_file(self, event: Event) -> bytes:
        """The bytes of a version's scale plane file, verified."""
        entry = event.files[SCALE_PLANE_NAME]
        what = f"{event.reference}, {SCALE_PLANE_NAME}"
        data = self.objects.read(entry["object"], what)
        if entry["encoding"] != "patch":
            return data
        base = self._base_scales(event.identity)
        if base is None:
            raise CheckpointError(
                "the base that its plane is a patch of is missing", where=event.reference, remedy="publish the base again"
            )
        data = join_file(decode_patch(data, matching_base(base, entry["experts"])), entry["experts"])
        if hashlib.sha256(data).hexdigest() != entry["sha256"]:
            raise CheckpointError(
                f"{what} has another SHA-256 than was published", where=self.backend.url, remedy="publish the folder again"
            )
        return data

    def _plane_of(self, event: Event) -> dict[str, torch.Tensor]:
        return full_planes(*split_file(self._plane_file(event)), self._base_scales(event.identity), event.reference)


def _after(head: Event | None, log: Log, **fields: Any) -> Event:
    """The event that follows `head`."""
    return Event(
        seq=(head.seq if head else 0) + 1,
        tenant=log.tenant,
        name=log.name,
        when=datetime.now(UTC).isoformat(timespec="seconds"),
        previous=head.sha256 if head else "",
        **fields,
    )


def _unknown(name: str, version: int | None) -> ConfigError:
    what = f"no adapter '{name}'" if version is None else f"adapter '{name}' has no version {version}"
    return ConfigError(what, where="store", remedy="list shows what there is")


def _user() -> str:
    """The login name, or what stands for it where the system knows none (a container with a bare user id)."""
    try:
        return getpass.getuser()
    except (OSError, KeyError):
        return "unknown"
