"""What a cluster costs an hour: its head alone, and all its nodes; from a price table that the user edits.

minimum = head + sum over groups of min x price; maximum = head + the dearest choice of nodes that the maxima, of each group and of all together, allow. A job's bound is its deadline
times the maximum. Only machines are counted: no storage, network, addresses or fee of Kubernetes. A missing price is an error, not a zero.
"""

from __future__ import annotations

import datetime
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field, field_validator

from prism_ray.core.config import Config, suggest
from prism_ray.core.errors import ConfigError
from prism_ray.dist.manifests.groups import MARKETS, Group, groups
from prism_ray.dist.manifests.render import Manifest
from prism_ray.dist.manifests.values import load_config

OLD_DAYS = 180


class Prices(Config):
    """nodes: provider -> instance -> market -> price of one node for one hour. example: whether these are the shipped figures. as_of: when they held."""

    example: bool
    as_of: datetime.date
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")]
    nodes: dict[str, dict[str, dict[str, Annotated[float, Field(gt=0)]]]]

    @field_validator("nodes")
    @classmethod
    def _markets(cls, nodes: dict[str, dict[str, dict[str, float]]]) -> dict[str, dict[str, dict[str, float]]]:
        for provider, instances in nodes.items():
            for instance, markets in instances.items():
                unknown = sorted(set(markets) - set(MARKETS))
                if unknown:
                    raise ValueError(f"{provider} {instance} has a price for '{unknown[0]}'; markets are {', '.join(MARKETS)}")
        return nodes

    def price(self, provider: str, group: Group) -> float:
        """One node of a group for one hour; ConfigError when the table lacks it."""
        where = f"{provider} {group.instance} {group.market}"
        instances = self.nodes.get(provider, {})
        if group.instance not in instances:
            raise ConfigError(
                "has no price", where=where, remedy=f"add it to the price table; {suggest(group.instance, sorted(instances))}"
            )
        if group.market not in instances[group.instance]:
            raise ConfigError("has no price", where=where, remedy="add this market to the price table")
        return instances[group.instance][group.market]


def load_prices(path: Path) -> Prices:
    """The table from a YAML file."""
    return load_config(Prices, path, "cluster/prices.yaml")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """minimum, maximum: an hour. deadline_hours: of a job. doubled: whether an update has two clusters for a while."""

    name: str
    minimum: float
    maximum: float
    workers: int
    gpus: int
    deadline_hours: float | None = None
    doubled: bool = False

    @property
    def bound(self) -> float | None:
        """The most that one run can cost."""
        return None if self.deadline_hours is None else self.deadline_hours * self.maximum


def cost(manifest: Manifest, prices: Prices, provider: str) -> Cost:
    """An hour of one manifest's cluster. provider: of its machines."""
    every = groups(manifest)
    head = sum(prices.price(provider, group) for group in every if group.head)
    workers = [(prices.price(provider, group), group) for group in every if not group.head]
    least = sum(price * group.minimum for price, group in workers)
    cap = manifest.tree["max_workers"] if manifest.is_launcher else sum(group.maximum or 0 for _, group in workers)
    most, nodes, gpus = _most(workers, cap)
    seconds = manifest.tree["spec"].get("activeDeadlineSeconds") if manifest.kind == "RayJob" else None
    return Cost(
        name=manifest.name,
        minimum=head + least,
        maximum=head + most,
        workers=nodes,
        gpus=gpus,
        deadline_hours=None if seconds is None else seconds / 3600,
        doubled=manifest.kind == "RayService",
    )


def _most(workers: Sequence[tuple[float, Group]], cap: int) -> tuple[float, int, int]:
    """(price, nodes, GPUs) of the dearest `cap` nodes; a group without a maximum of its own may take them all."""
    total, left, gpus = 0.0, cap, 0
    for price, group in sorted(workers, key=lambda item: -item[0]):
        count = left if group.maximum is None else min(left, group.maximum)
        total, left, gpus = total + count * price, left - count, gpus + count * (group.gpus or 0)
    return total, cap - left, gpus


def cost_lines(costs: Sequence[Cost], prices: Prices, today: datetime.date) -> list[str]:
    """A table with the warnings that belong to it."""
    age = (today - prices.as_of).days
    kind = "EXAMPLE PRICES, not a quote: edit the price table" if prices.example else "prices of the table"
    old = f"; {age} days old, check them" if age > OLD_DAYS else ""
    rows = [["manifest", "least an hour", "most an hour", "workers", "GPUs", "most a run"]]
    for item in costs:
        bound = "" if item.bound is None else f"{item.bound:,.2f} in {item.deadline_hours:g} h"
        extra = f"{2 * item.maximum:,.2f} an hour in an update" if item.doubled else bound
        rows.append([item.name, f"{item.minimum:,.2f}", f"{item.maximum:,.2f}", f"0-{item.workers}", f"0-{item.gpus}", extra])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = []
    for name, *numbers in rows:
        cells = [name.ljust(widths[0]), *(number.rjust(width) for number, width in zip(numbers, widths[1:], strict=True))]
        table.append("  ".join(cells).rstrip())
    return [f"{prices.currency}, machines only, as of {prices.as_of.isoformat()}{old} ({kind})", *table]
