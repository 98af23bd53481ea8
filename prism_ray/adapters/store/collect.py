"""The collector: removes objects that no version and no base names and that nobody has written for a grace period.

What it could get wrong is an object that a publication running beside it is about to name. Three rules keep them apart:

1. A publication writes every object anew, also one that is there already, so the time of each is that of the publication, not of the first upload.
2. The collector announces itself by a lease before it looks at any time, takes "now" from the storage's own clock (the time of its lease), and looks at an
   object's time again right before deleting it. A publication waits for every lease that it sees between its last object and its record, then checks that all
   its objects are there and writes those that are not. A collector that it does not see came later, and sees objects younger than the grace period.
3. A publication that took more than half the grace period between object and record writes its objects once more before the record.

A lease ends with its collector; that of a killed one counts for LEASE_S, and a collector deletes nothing in the last quarter of its own.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from prism_ray.adapters.store.backend import Backend
from prism_ray.adapters.store.objects import FOLDER, Objects, digest_of
from prism_ray.core.errors import EnvironmentFault

LEASES = "gc"
LEASE_S = 600.0
_POLL_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Collected:
    """removed, kept: objects; young: unreferenced ones within the grace period; removed_bytes: freed, or what would be with dry_run."""

    removed: tuple[str, ...]
    removed_bytes: int
    kept: int
    young: int
    dry_run: bool


def collect(backend: Backend, referenced: Callable[[], set[str]], *, grace_s: float, dry_run: bool = False) -> Collected:
    """Remove what `referenced` does not name; it is asked after the lease is there. Temporaries of killed writers go by the same rule."""
    lease = f"{LEASES}/{secrets.token_hex(16)}"
    if not backend.create(lease, secrets.token_bytes(16)):
        raise EnvironmentFault("the lease could not be written", where=backend.url, remedy="try again")
    try:
        entry = backend.entry(lease)
        if entry is None:
            raise EnvironmentFault("the lease is gone again", where=backend.url, remedy="let nobody else write below gc/")
        began, now = time.monotonic(), entry.modified
        named = referenced()
        removed, freed, young, kept = [], 0, 0, 0
        for path, found in sorted(backend.files(FOLDER).items()):
            digest = digest_of(path)
            if digest in named:
                kept += 1
            elif now - found.modified <= grace_s:
                young += 1
            else:
                if not dry_run:
                    if time.monotonic() - began > 0.75 * LEASE_S:
                        break
                    current = backend.entry(path)
                    if current is None or now - current.modified <= grace_s:
                        continue
                    backend.delete(path)
                removed.append(digest or path)
                freed += found.size
        return Collected(removed=tuple(removed), removed_bytes=freed, kept=kept, young=young, dry_run=dry_run)
    finally:
        backend.delete(lease)


def wait_for_collectors(backend: Backend) -> None:
    """Return when no collector that is at work now can still delete something; leases of killed ones run out after LEASE_S."""
    deadline = time.monotonic() + LEASE_S
    for lease in [f"{LEASES}/{name}" for name in backend.names(LEASES)]:
        # The clocks of storage and machine may differ: twice the time before a lease counts as left behind.
        while time.monotonic() < deadline and (entry := backend.entry(lease)) is not None and time.time() - entry.modified < 2 * LEASE_S:
            time.sleep(_POLL_S)
        backend.delete(lease)


def mend(objects: Objects, digests: Iterable[str], write: Callable[[str], None]) -> None:
    """Write those of a publication's objects that a collector has removed."""
    for digest in digests:
        if not objects.present(digest):
            write(digest)
