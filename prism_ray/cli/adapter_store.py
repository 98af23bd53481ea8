"""`prism-ray adapter publish, list, show, history, pull, revert, diff, gc`: the store of adapters.

The store is a folder or an s3://, gs:// or memory:// URL, given with --store or PRISM_RAY_STORE; credentials and endpoints come from the environment
(AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from prism_ray.core.errors import ConfigError

if TYPE_CHECKING:
    from prism_ray.adapters.store import AdapterStore, Event

Store = Annotated[str, typer.Option("--store", envvar="PRISM_RAY_STORE", help="folder or URL of the store")]
Tenant = Annotated[str, typer.Option(help="owner of the names")]
Cache = Annotated[Path | None, typer.Option(help="local folder that keeps what was read")]
Note = Annotated[str, typer.Option(help="a line for the history")]
Who = Annotated[str, typer.Option(help="who does it; default the login name")]
Referenced = Annotated[str, typer.Argument(metavar="NAME[@N]", help="adapter, or one of its versions")]
Name = Annotated[str, typer.Argument(help="adapter name")]


def register(app: typer.Typer) -> None:
    """Add the verbs to `prism-ray adapter`."""
    for name, verb in (
        ("publish", publish),
        ("publish-base", publish_base),
        ("list", list_),
        ("show", show),
        ("history", history),
        ("pull", pull),
        ("revert", revert),
        ("diff", diff),
        ("gc", gc),
    ):
        app.command(name)(verb)


def _open(url: str, cache: Path | None = None) -> AdapterStore:
    from prism_ray.adapters.store import AdapterStore

    return AdapterStore(url, cache=cache)


def publish(
    folder: Annotated[Path, typer.Argument(help="adapter folder with its manifest")],
    name: Name,
    store: Store,
    tenant: Tenant = "default",
    note: Note = "",
    who: Who = "",
    base: Annotated[Path | None, typer.Option(help="checkpoint folder of its base, to be stored too if the store lacks it")] = None,
    patches: Annotated[bool, typer.Option(help="keep the plane as a patch against the base's where that is smaller")] = True,
) -> None:
    """Store FOLDER as the next version of NAME, which becomes current."""
    opened = _open(store)
    if base is not None:
        opened.publish_base(base)
    event = opened.publish(folder, name, tenant=tenant, who=who or None, note=note, patches=patches)
    typer.echo(f"{event.reference}: {_size(event.bytes)} in {len(event.files)} files, manifest {event.digest[:12]}")


def publish_base(folder: Annotated[Path, typer.Argument(help="FP4 checkpoint folder with its manifest")], store: Store) -> None:
    """Store a base checkpoint: code plane, scale plane and the rest apart, each once."""
    base = _open(store).publish_base(folder)
    typer.echo(f"base {base.code_plane[:12]}, scale plane {base.scale_plane[:12]}: {_size(sum(f['bytes'] for f in base.files.values()))}")


def list_(
    store: Store,
    tenant: Tenant = "default",
    everybody: Annotated[bool, typer.Option("--all-tenants", help="names of every tenant")] = False,
) -> None:
    """Names, each with its current version."""
    events = _open(store).list(None if everybody else tenant)
    for event in events:
        owner = f"{event.tenant}/" if everybody else ""
        typer.echo(f"{owner}{event.reference}\t{event.latest} version(s)\t{event.when}\t{event.who}")
    if not events:
        typer.echo("no adapters")


def show(reference: Referenced, store: Store, tenant: Tenant = "default") -> None:
    """One version as JSON: files with their SHA-256, base, metrics, who and when."""
    event = _open(store).show(reference, tenant=tenant)
    typer.echo(json.dumps(_fields(event), indent=2, sort_keys=True))


def history(name: Name, store: Store, tenant: Tenant = "default") -> None:
    """Every publication and rollback of NAME, oldest first; the chain of digests is verified."""
    for event in _open(store).history(name, tenant=tenant):
        metrics = " ".join(f"{key}={value}" for key, value in sorted(event.metrics.items()))
        details = "\t".join(part for part in (event.digest[:12], metrics, event.note) if part)
        typer.echo(f"{event.seq}\t{event.when}\t{event.who}\t{event.event} {event.reference}\t{details}".rstrip())


def pull(
    reference: Referenced,
    out: Annotated[Path, typer.Argument(help="folder to write")],
    store: Store,
    tenant: Tenant = "default",
    cache: Cache = None,
    replace: Annotated[bool, typer.Option("--replace", help="overwrite an existing folder")] = False,
) -> None:
    """Write the adapter folder as it was published, every file verified."""
    if out.exists() and not replace:
        raise ConfigError("the folder exists already", where=str(out), remedy="choose another, or give --replace")
    event = _open(store, cache).pull(reference, out, tenant=tenant, replace=replace)
    typer.echo(f"{out}: {event.reference}, {len(event.files)} files verified, manifest {event.digest[:12]}")


def revert(
    name: Name,
    version: Annotated[int, typer.Argument(help="version that becomes current")],
    store: Store,
    tenant: Tenant = "default",
    expected: Annotated[int | None, typer.Option(help="refuse unless this version is current now")] = None,
    note: Note = "",
    who: Who = "",
) -> None:
    """Make an older (or newer) version current; the change itself goes to the history."""
    event = _open(store).rollback(name, version, tenant=tenant, expected=expected, note=note, who=who or None)
    typer.echo(f"{event.reference} is current, event {event.seq}")


def diff(first: Referenced, second: Referenced, store: Store, tenant: Tenant = "default") -> None:
    """Changed scale blocks of each layer between two versions."""
    found = _open(store).diff(first, second, tenant=tenant)
    for name, layer in found.layers.items():
        if layer.changed:
            typer.echo(f"{name}\t{layer.changed} of {layer.blocks}" + (f"\tonly {layer.only}" if layer.only else f"\t{layer.steps} steps"))
    typer.echo(f"{found.first} {found.second}: {found.changed} of {found.blocks} blocks differ")


def gc(store: Store, dry_run: Annotated[bool, typer.Option("--dry-run", help="count only")] = False) -> None:
    """Remove objects that nothing names and that are older than the store's grace period."""
    found = _open(store).gc(dry_run=dry_run)
    verb = "would be removed" if dry_run else "removed"
    typer.echo(f"{len(found.removed)} objects ({_size(found.removed_bytes)}) {verb}, {found.kept} in use, {found.young} too young")


def _size(count: int) -> str:
    return f"{count / 2**20:,.2f} MiB"


def _fields(event: Event) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(event) | {"reference": event.reference, "bytes": event.bytes}
