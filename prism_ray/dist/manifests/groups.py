"""A cluster's nodes as one kind of object, whichever tool launches them, so that every rule and every price is written once.

The head is a group of exactly one. A launcher names its machine type itself; a pod's is in the annotations `prism-ray/instance` and `prism-ray/market`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from prism_ray.dist.manifests.render import Manifest
from prism_ray.dist.manifests.schema import CLUSTER_KEYS

GPU_RESOURCE = "nvidia.com/gpu"
MARKETS = ("on_demand", "spot")


@dataclass(frozen=True, kw_only=True)
class Group:
    """Nodes of one kind.

    name, where: in the manifest; minimum, maximum: nodes; cpus, gpus: what Ray schedules on one, None where the file leaves that to detection; gpus_held: what
    the machine or pod has, used or not; instance, market: for the price; image; start: `ray start` flags without dashes; mounts: folders that are mounted.
    """

    name: str
    where: str
    head: bool
    minimum: int
    maximum: int | None
    cpus: int | None
    gpus: int | None
    gpus_held: int
    instance: str
    market: str
    image: str
    start: dict[str, str]
    mounts: tuple[str, ...]
    environment: dict[str, str]


def cluster_spec(manifest: Manifest) -> dict[str, Any]:
    """The RayCluster part of a KubeRay manifest."""
    spec: dict[str, Any] = manifest.tree["spec"]
    key = CLUSTER_KEYS.get(manifest.kind)
    return spec if key is None else spec[key]


def groups(manifest: Manifest) -> list[Group]:
    """The head, then the workers. Asks for a tree that its schema has passed."""
    return _launcher_groups(manifest.tree) if manifest.is_launcher else _pod_groups(cluster_spec(manifest))


def start_flags(commands: list[str]) -> dict[str, str]:
    """The flags of the `ray start` among shell commands: {"num-cpus": "0", "head": ""}."""
    text = next((command for command in commands if "ray start" in command), "").partition("ray start")[2]
    return {name: value for name, _, value in re.findall(r"--([a-z-]+)(=(\S*))?", text)} if text else {}


def _launcher_groups(tree: dict[str, Any]) -> list[Group]:
    docker = tree["docker"]
    options = [str(option) for option in docker.get("run_options", [])]
    mounts = tuple(option.split(":")[1] for option in options if option.startswith("--volume="))
    environment = dict(option.removeprefix("--env=").partition("=")[::2] for option in options if option.startswith("--env="))
    found = []
    for name, node in tree["available_node_types"].items():
        head = name == tree["head_node_type"]
        config, resources = node["node_config"], node["resources"]
        options_of_market = config.get("InstanceMarketOptions", {}).get("MarketType"), config.get("scheduling", {}).get("provisioningModel")
        spot = options_of_market[0] == "spot" or options_of_market[1] == "SPOT" or bool(config.get("scheduling", {}).get("preemptible"))
        found.append(
            Group(
                name=name,
                where=f"available_node_types.{name}",
                head=head,
                minimum=1 if head else node.get("min_workers", 0),
                maximum=1 if head else node.get("max_workers"),
                cpus=resources.get("CPU"),
                gpus=resources.get("GPU"),
                gpus_held=sum(int(each.get("acceleratorCount", 1)) for each in config.get("guestAccelerators", [])),
                instance=str(config.get("InstanceType") or config.get("machineType") or ""),
                market="spot" if spot else "on_demand",
                image=str(docker.get("head_image" if head else "worker_image") or docker.get("image") or ""),
                start=start_flags(tree["head_start_ray_commands" if head else "worker_start_ray_commands"]),
                mounts=mounts,
                environment=environment,
            )
        )
    return sorted(found, key=lambda group: not group.head)


def _pod_groups(spec: dict[str, Any]) -> list[Group]:
    found = []
    for number, part in enumerate([spec["headGroupSpec"], *spec["workerGroupSpecs"]]):
        head = number == 0
        template = part["template"]
        container = template["spec"]["containers"][0]
        annotations = template.get("metadata", {}).get("annotations", {})
        limits, start = container["resources"]["limits"], part["rayStartParams"]
        held = int(limits.get(GPU_RESOURCE, 0))
        found.append(
            Group(
                name="head" if head else part["groupName"],
                where="headGroupSpec" if head else f"workerGroupSpecs.{part['groupName']}",
                head=head,
                minimum=1 if head else max(part["minReplicas"], part["replicas"]),
                maximum=1 if head else part["maxReplicas"],
                cpus=int(start["num-cpus"]) if "num-cpus" in start else _whole(limits.get("cpu")),
                gpus=int(start["num-gpus"]) if "num-gpus" in start else held,
                gpus_held=held,
                instance=annotations.get("prism-ray/instance", ""),
                market=annotations.get("prism-ray/market", "").replace("-", "_"),
                image=container["image"],
                start=start,
                mounts=tuple(mount["mountPath"] for mount in container.get("volumeMounts", [])),
                environment={entry["name"]: entry["value"] for entry in container.get("env", [])},
            )
        )
    return found


def _whole(quantity: int | str | None) -> int | None:
    """CPUs of a Kubernetes quantity, rounded up as KubeRay does."""
    if quantity is None:
        return None
    text = str(quantity)
    return -(-int(text[:-1]) // 1000) if text.endswith("m") else int(float(text))
