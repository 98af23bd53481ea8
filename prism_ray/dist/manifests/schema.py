"""A JSON schema of the KubeRay 1.7 fields that our manifests use, and no others.

Written from the public API reference and Go types of ray.io/v1. It is narrower than the CRDs on purpose: what we do not use is refused, so a misspelt field, which the API server would drop or a
newer operator might take for another, cannot pass. Where KubeRay takes any pod, only the part of a pod that we write is here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jsonschema

Schema = dict[str, Any]

TEXT: Schema = {"type": "string", "minLength": 1}
COUNT: Schema = {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}
POSITIVE: Schema = COUNT | {"minimum": 1}
TEXTS: Schema = {"type": "array", "items": TEXT, "minItems": 1}
# Kubernetes label values are text: `true` without quotes would be refused by the API server.
LABELS: Schema = {
    "type": "object",
    "additionalProperties": {"type": "string", "pattern": r"^([A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?$"},
}
ANNOTATIONS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
# rayStartParams is a map of text to text, numbers included.
PARAMETERS: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
QUANTITY: Schema = {
    "anyOf": [{"type": "integer", "minimum": 0}, {"type": "string", "pattern": r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$"}],
}
NAME: Schema = {"type": "string", "pattern": r"^[a-z]([a-z0-9-]*[a-z0-9])?$", "maxLength": 47}


def _object(required: dict[str, Schema], optional: dict[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": required | (optional or {}),
        "required": sorted(required),
        "additionalProperties": False,
    }


def _array(items: Schema, *, least: int = 0) -> Schema:
    return {"type": "array", "items": items, "minItems": least}


RESOURCES = _object(
    {"limits": {"type": "object", "additionalProperties": QUANTITY}, "requests": {"type": "object", "additionalProperties": QUANTITY}}
)
SECURITY = _object(
    {"allowPrivilegeEscalation": {"const": False}, "runAsNonRoot": {"const": True}, "runAsUser": POSITIVE},
    {"capabilities": _object({"drop": TEXTS})},
)
# A value in plain sight; secrets come from KubeRay (authOptions), never through here.
ENVIRONMENT = _object({"name": TEXT, "value": {"type": "string"}})
CONTAINER = _object(
    {"name": TEXT, "image": TEXT, "resources": RESOURCES, "securityContext": SECURITY},
    {
        "imagePullPolicy": {"enum": ["Always", "IfNotPresent", "Never"]},
        "env": _array(ENVIRONMENT),
        "ports": _array(_object({"name": TEXT, "containerPort": POSITIVE | {"maximum": 65535}})),
        "volumeMounts": _array(_object({"name": TEXT, "mountPath": {"type": "string", "pattern": "^/"}})),
    },
)
VOLUME = _object(
    {"name": TEXT},
    {
        "emptyDir": _object({"sizeLimit": QUANTITY}, {"medium": {"enum": ["", "Memory"]}}),
        "persistentVolumeClaim": _object({"claimName": TEXT}),
    },
) | {"minProperties": 2, "maxProperties": 2}
EXPRESSION = _object({"key": TEXT, "operator": {"enum": ["In", "NotIn", "Exists", "DoesNotExist"]}}, {"values": TEXTS})
AFFINITY = _object(
    {
        "nodeAffinity": _object(
            {
                "requiredDuringSchedulingIgnoredDuringExecution": _object(
                    {"nodeSelectorTerms": _array(_object({"matchExpressions": _array(EXPRESSION, least=1)}), least=1)}
                )
            }
        )
    }
)
TOLERATION = _object(
    {"key": TEXT, "operator": {"enum": ["Exists", "Equal"]}, "effect": {"enum": ["NoSchedule", "NoExecute", "PreferNoSchedule"]}},
    {"value": {"type": "string"}},
)
POD = _object(
    # Autoscaler v2 takes each pod for one node's whole life.
    {"restartPolicy": {"const": "Never"}, "containers": _array(CONTAINER, least=1) | {"maxItems": 1}},
    {
        "terminationGracePeriodSeconds": POSITIVE,
        "securityContext": _object({"fsGroup": POSITIVE}),
        "nodeSelector": LABELS,
        "affinity": AFFINITY,
        "tolerations": _array(TOLERATION),
        "volumes": _array(VOLUME),
    },
)
TEMPLATE = _object({"spec": POD}, {"metadata": _object({}, {"annotations": ANNOTATIONS, "labels": LABELS})})
WORKERS = _object(
    {
        "groupName": {"type": "string", "pattern": "^[a-z0-9-]+$"},
        "replicas": COUNT,
        "minReplicas": COUNT,
        "maxReplicas": COUNT,
        "idleTimeoutSeconds": POSITIVE,
        "rayStartParams": PARAMETERS,
        "template": TEMPLATE,
    },
    {"priority": COUNT, "labels": LABELS},
)
CLUSTER = _object(
    {
        "rayVersion": {"type": "string", "pattern": r"^\d+\.\d+\.\d+$"},
        "authOptions": _object({"mode": {"const": "token"}}),
        "enableInTreeAutoscaling": {"const": True},
        "autoscalerOptions": _object(
            {"version": {"const": "v2"}, "idleTimeoutSeconds": POSITIVE},
            {"upscalingMode": {"enum": ["Default", "Aggressive", "Conservative"]}, "resources": RESOURCES},
        ),
        "headGroupSpec": _object({"rayStartParams": PARAMETERS, "template": TEMPLATE}, {"labels": LABELS}),
        "workerGroupSpecs": _array(WORKERS, least=1),
    },
    {"gcsFaultToleranceOptions": _object({"redisAddress": {"type": "string", "pattern": r":\d+$"}})},
)
JOB = _object(
    {
        "entrypoint": TEXT,
        "activeDeadlineSeconds": POSITIVE,
        "shutdownAfterJobFinishes": {"const": True},
        "rayClusterSpec": CLUSTER,
    },
    {
        "backoffLimit": COUNT,
        "ttlSecondsAfterFinished": COUNT,
        "submissionMode": {"enum": ["K8sJobMode", "HTTPMode", "SidecarMode"]},
        "submitterPodTemplate": TEMPLATE,
        "runtimeEnvYAML": TEXT,
    },
)
SERVICE = _object(
    {
        "serveConfigV2": TEXT,
        "rayClusterConfig": CLUSTER,
        "upgradeStrategy": _object({"type": {"const": "NewCluster"}}),
    },
    {"rayClusterDeletionDelaySeconds": COUNT},
)
SPECS = {"RayCluster": CLUSTER, "RayJob": JOB, "RayService": SERVICE}
CLUSTER_KEYS = {"RayJob": "rayClusterSpec", "RayService": "rayClusterConfig"}
"""Where the cluster of a kind is within its spec; a RayCluster's spec is the cluster."""


def kuberay_schema(kind: str) -> Schema:
    """The schema of one whole manifest."""
    return _object(
        {
            "apiVersion": {"const": "ray.io/v1"},
            "kind": {"const": kind},
            "metadata": _object({"name": NAME, "namespace": NAME}, {"annotations": ANNOTATIONS, "labels": LABELS}),
            "spec": SPECS[kind],
        }
    )


def schema_errors(tree: Any, schema: Schema) -> Iterator[tuple[str, str]]:
    """(dotted place, what) of every violation, in the tree's order."""
    validator = jsonschema.Draft202012Validator(schema)
    for error in sorted(validator.iter_errors(tree), key=lambda error: [str(part) for part in error.absolute_path]):
        yield (
            ".".join(str(part) for part in error.absolute_path),
            error.message if len(error.message) <= 200 else f"{error.message[:197]}...",
        )
