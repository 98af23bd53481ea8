"""The files of cluster/ against Ray's and our schemas and the rules, and every rule against a manifest that breaks it (field cases RAY-04, RAY-07, RAY-08, RAY-09)."""

from __future__ import annotations

import copy
import dataclasses
import datetime
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from prism_ray.cli.cluster import parse_arguments
from prism_ray.core.errors import ConfigError
from prism_ray.core.workdir import check_package, packed_files
from prism_ray.dist.manifests.check import image_faults, manifest_findings
from prism_ray.dist.manifests.costs import Cost, Prices, cost, cost_lines, load_prices
from prism_ray.dist.manifests.entry import applications, script_arguments, unresolved
from prism_ray.dist.manifests.groups import cluster_spec, groups, start_flags
from prism_ray.dist.manifests.render import Manifest, render_all, render_text, templates
from prism_ray.dist.manifests.rules import images, is_python
from prism_ray.dist.manifests.values import ALLOWED, Values, load_values, pinned, placeholders

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "cluster"
VALUES = load_values(SOURCE / "values.example.yaml")
PRICES = load_prices(SOURCE / "prices.yaml")
RAY = pinned(ROOT, "ray")
MANIFESTS = {manifest.name: manifest for manifest in render_all(SOURCE, VALUES, ROOT)[0]}
KUBERAY = sorted(name for name in MANIFESTS if name.startswith("kuberay/"))
LAUNCHER = sorted(name for name in MANIFESTS if name.startswith("launcher/"))
GPU = sorted(name for name in MANIFESTS if name != "kuberay/ray-cluster.cpu.yaml")


def findings(manifest: Manifest) -> list[str]:
    return [finding.line() for finding in manifest_findings(manifest, ROOT, RAY, parse_arguments)[0]]


def changed(name: str, change: Callable[[Any], object]) -> Manifest:
    """A shipped manifest with its tree changed in place."""
    tree = copy.deepcopy(MANIFESTS[name].tree)
    change(tree)
    return dataclasses.replace(MANIFESTS[name], tree=tree)


def spec_of(tree: dict[str, Any]) -> dict[str, Any]:
    return cluster_spec(Manifest(name="kuberay/x", text="", tree=tree))


# --- the shipped files -----------------------------------------------------------------------------------------------------


def test_what_is_shipped():
    assert sorted(path.relative_to(SOURCE).as_posix() for path in templates(SOURCE)) == sorted(MANIFESTS)
    assert set(MANIFESTS) >= {
        "launcher/aws.yaml",
        "launcher/gcp.yaml",
        "kuberay/ray-cluster.gpu.yaml",
        "kuberay/ray-cluster.cpu.yaml",
        "kuberay/ray-job.sweep.yaml",
        "kuberay/ray-job.calibrate.yaml",
        "kuberay/ray-service.multi-adapter.yaml",
    }


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_a_shipped_manifest_has_no_finding(name):
    # The application's module has a test of its own, below.
    assert [line for line in findings(MANIFESTS[name]) if "import path" not in line] == []


def test_import_paths_resolve():
    for name in KUBERAY:
        if MANIFESTS[name].kind == "RayService":
            for _, path in applications(MANIFESTS[name]):
                if not (ROOT / path.partition(":")[0].replace(".", "/")).with_suffix(".py").exists():
                    pytest.xfail(f"{path} is not written yet; the RayService manifest names it already")
                assert unresolved(path, ROOT) == ""


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_images_and_versions_are_those_of_the_locks(name):
    found = dict(images(MANIFESTS[name].tree))
    assert found
    for image in found.values():
        assert image.rpartition(":")[2] == f"{RAY}-py311-{VALUES.image.build}"
    if name in KUBERAY:
        assert cluster_spec(MANIFESTS[name])["rayVersion"] == RAY == pinned(ROOT, "ray", "gpu")


@pytest.mark.parametrize("name", sorted(MANIFESTS))
def test_the_head_takes_no_work_and_workers_begin_at_zero(name):
    head, *workers = groups(MANIFESTS[name])
    assert (head.head, head.cpus, head.gpus, head.gpus_held, head.minimum, head.maximum) == (True, 0, 0, 0, 1, 1)
    assert workers and not any(group.head or group.minimum for group in workers)
    assert all(group.maximum for group in workers)
    if name in GPU:
        assert {group.market for group in workers} == {"spot", "on_demand"} and all(group.gpus for group in workers)


@pytest.mark.parametrize("name", [name for name in KUBERAY if name in GPU])
def test_copies_of_the_gpu_cluster_differ_only_where_the_service_must(name):
    def plain(manifest: str) -> dict[str, Any]:
        spec = copy.deepcopy(cluster_spec(MANIFESTS[manifest]))
        spec.pop("gcsFaultToleranceOptions", None)
        container = spec["headGroupSpec"]["template"]["spec"]["containers"][0]
        container["ports"] = [port for port in container["ports"] if port["name"] != "serve"]
        return spec

    assert plain(name) == plain("kuberay/ray-cluster.gpu.yaml")


def test_rays_autoscaler_reads_the_clusters_as_the_rules_do():
    from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

    config = _derive_autoscaling_config_from_ray_cr(MANIFESTS["kuberay/ray-cluster.gpu.yaml"].tree)
    types = config["available_node_types"]
    assert (types["headgroup"]["resources"]["CPU"], types["headgroup"]["resources"]["GPU"], types["headgroup"]["max_workers"]) == (0, 0, 0)
    assert types["gpu-spot"]["min_workers"] == types["gpu-on-demand"]["min_workers"] == 0
    assert types["gpu-spot"]["priority"] > types["gpu-on-demand"]["priority"]
    assert types["gpu-spot"]["resources"]["GPU"] == 8
    assert config["idle_timeout_minutes"] == VALUES.idle_minutes


@pytest.mark.parametrize("name", LAUNCHER)
def test_shell_commands_parse(name):
    tree = MANIFESTS[name].tree
    commands = [command for key, value in tree.items() if key.endswith("commands") for command in value]
    assert len(commands) >= 6
    for command in commands:
        done = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command}\n{done.stderr}"


def test_aws_machines_have_the_form_that_ec2_takes():
    session = pytest.importorskip("botocore.session", reason="botocore is in the images, not in the locks")
    from botocore.validate import ParamValidator

    shape = session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    for node in MANIFESTS["launcher/aws.yaml"].tree["available_node_types"].values():
        report = ParamValidator().validate(node["node_config"] | {"MinCount": 1, "MaxCount": 1}, shape)
        assert not report.has_errors(), report.generate_report()


def test_templates_hold_no_account(tmp_path):
    # Every string of the example that only an account can know comes from the values, none is in a template.
    for path in templates(SOURCE):
        text = path.read_text()
        for word in ("us-east-1", "us-central1", "registry.example.com", "example-project", "example-shared", "g6e.", "a3-highgpu"):
            assert word not in text, f"{path.name} names {word}"


# --- every rule against a manifest that breaks it ---------------------------------------------------------------------------

CLUSTER, JOB, SERVICE, AWS, GCP = (
    "kuberay/ray-cluster.gpu.yaml",
    "kuberay/ray-job.sweep.yaml",
    "kuberay/ray-service.multi-adapter.yaml",
    "launcher/aws.yaml",
    "launcher/gcp.yaml",
)


def head_of(tree: dict[str, Any]) -> dict[str, Any]:
    return spec_of(tree)["headGroupSpec"]


def head_box(tree: dict[str, Any]) -> dict[str, Any]:
    return head_of(tree)["template"]["spec"]["containers"][0]


def worker(tree: dict[str, Any], number: int = 0) -> dict[str, Any]:
    return spec_of(tree)["workerGroupSpecs"][number]


def node(tree: dict[str, Any], name: str) -> dict[str, Any]:
    return tree["available_node_types"][name]


def without(items: list[Any], word: str) -> list[Any]:
    return [item for item in items if word not in str(item)]


BROKEN: list[tuple[str, Callable[[Any], object], str]] = [
    # schemas
    (CLUSTER, lambda t: t.update(apiVersion="ray.io/v1alpha1"), "'ray.io/v1' was expected"),
    (CLUSTER, lambda t: worker(t).update(maxReplica=3), "'maxReplica' was unexpected"),
    (CLUSTER, lambda t: worker(t).pop("maxReplicas"), "'maxReplicas' is a required property"),
    (CLUSTER, lambda t: head_of(t)["rayStartParams"].update({"num-cpus": 0}), "0 is not of type 'string'"),
    (CLUSTER, lambda t: worker(t)["template"]["spec"]["nodeSelector"].update({"a/b": True}), "True is not of type 'string'"),
    (CLUSTER, lambda t: head_of(t)["template"]["spec"].update(restartPolicy="Always"), "'Never' was expected"),
    (CLUSTER, lambda t: spec_of(t)["autoscalerOptions"].update(version="v1"), "'v2' was expected"),
    (CLUSTER, lambda t: spec_of(t)["authOptions"].update(mode="disabled"), "'token' was expected"),
    (CLUSTER, lambda t: head_box(t)["securityContext"].update(runAsNonRoot=False), "True was expected"),
    (CLUSTER, lambda t: head_box(t)["env"].append({"name": "X", "valueFrom": {}}), "'value' is a required property"),
    (JOB, lambda t: t["spec"].pop("shutdownAfterJobFinishes"), "'shutdownAfterJobFinishes' is a required property"),
    (JOB, lambda t: t["spec"].update(shutdownAfterJobFinishes=False), "True was expected"),
    (JOB, lambda t: t["spec"].pop("activeDeadlineSeconds"), "'activeDeadlineSeconds' is a required property"),
    (JOB, lambda t: t["spec"].update(activeDeadlineSeconds=0), "0 is less than the minimum"),
    (SERVICE, lambda t: t["spec"].pop("upgradeStrategy"), "'upgradeStrategy' is a required property"),
    (SERVICE, lambda t: t["spec"].update(serveConfigV2="applications: [{import_path: nothing}]"), "Ray Serve refuses it"),
    (SERVICE, lambda t: t["spec"].update(serveConfigV2="a: [b"), "is no YAML"),
    (CLUSTER, lambda t: t.update(kind="RayCronJob"), "is of kind 'RayCronJob'"),
    (AWS, lambda t: t.update(max_worker=2), "'max_worker' was unexpected"),
    (AWS, lambda t: node(t, "gpu-spot").update(max_workers="4"), "'4' is not of type 'integer'"),
    (AWS, lambda t: t.update(head_node_type="none"), "Ray refuses it"),
    (AWS, lambda t: t.pop("docker"), "lacks docker"),
    (AWS, lambda t: t["docker"].update(imag="x"), "'imag' was unexpected"),
    # versions
    (CLUSTER, lambda t: spec_of(t).update(rayVersion="2.59.0"), f"is 2.59.0, the lock pins {RAY}"),
    (CLUSTER, lambda t: head_box(t).update(image="r/prism-ray-gpu:latest"), "has no tag of the form"),
    (CLUSTER, lambda t: head_box(t).update(image="r/prism-ray-gpu:2.59.0-py311-1"), "its tag says Ray 2.59.0"),
    (CLUSTER, lambda t: head_box(t).update(image=f"r/prism-ray-gpu:{RAY}-py312-1"), "its tag says Python 312"),
    (CLUSTER, lambda t: head_box(t).update(image=f"r/prism-ray-cpu:{RAY}-py311-1"), "nodes have 2 images"),
    (AWS, lambda t: t["docker"].update(image="rayproject/ray"), "has no tag of the form"),
    # the head
    (CLUSTER, lambda t: head_of(t)["rayStartParams"].pop("num-cpus"), "Ray would count 6 CPU on the head"),
    (CLUSTER, lambda t: head_of(t)["rayStartParams"].update({"num-gpus": "1"}), "Ray would count 1 GPU on the head"),
    (CLUSTER, lambda t: head_box(t)["resources"]["limits"].update({"nvidia.com/gpu": 1}), "the head holds 1 GPU(s)"),
    (CLUSTER, lambda t: head_box(t).update(env=without(head_box(t)["env"], "NVIDIA")), "may see its node's GPUs"),
    (AWS, lambda t: node(t, "head")["resources"].update(CPU=8), "Ray would count 8 CPU on the head"),
    (AWS, lambda t: node(t, "head")["resources"].pop("GPU"), "Ray would count None GPU on the head"),
    (GCP, lambda t: node(t, "head")["node_config"].update(guestAccelerators=[{"acceleratorCount": 2}]), "the head holds 2 GPU(s)"),
    (AWS, lambda t: t.update(head_start_ray_commands=["ray start --head --dashboard-host=127.0.0.1"]), "starts without num-cpus=0"),
    # from zero to a maximum, and back
    (CLUSTER, lambda t: worker(t).update(minReplicas=1), "keeps 1 node(s) when nothing runs"),
    (CLUSTER, lambda t: worker(t).update(replicas=2), "keeps 2 node(s) when nothing runs"),
    (AWS, lambda t: node(t, "gpu-on-demand").update(min_workers=3), "keeps 3 node(s) when nothing runs"),
    (AWS, lambda t: node(t, "gpu-spot").pop("max_workers"), "has no maximum"),
    (AWS, lambda t: t.pop("idle_timeout_minutes"), "has no idle_timeout_minutes"),
    (AWS, lambda t: t.update(idle_timeout_minutes=600), "idle nodes go after 600 minutes"),
    (CLUSTER, lambda t: spec_of(t)["autoscalerOptions"].update(idleTimeoutSeconds=7200), "idle nodes go after 120 minutes"),
    (CLUSTER, lambda t: [group.update(maxReplicas=0) for group in spec_of(t)["workerGroupSpecs"]], "no group can grow"),
    # markets
    (CLUSTER, lambda t: spec_of(t)["workerGroupSpecs"].pop(), "its GPU workers are all spot"),
    (AWS, lambda t: node(t, "gpu-spot")["node_config"].pop("InstanceMarketOptions"), "its GPU workers are all on_demand"),
    (GCP, lambda t: node(t, "gpu-spot")["node_config"]["scheduling"].pop("provisioningModel"), "its GPU workers are all on_demand"),
    (CLUSTER, lambda t: worker(t)["template"].pop("metadata"), "has no machine type or market"),
    # spilling, logs, health
    (CLUSTER, lambda t: worker(t)["rayStartParams"].pop("object-spilling-directory"), "objects spill to ''"),
    (CLUSTER, lambda t: worker(t)["rayStartParams"].update({"object-spilling-directory": "/nvmeX"}), "objects spill to '/nvmeX'"),
    (AWS, lambda t: t["docker"].update(run_options=without(t["docker"]["run_options"], ":/nvme")), "which is no mounted folder"),
    (CLUSTER, lambda t: head_box(t).update(env=without(head_box(t)["env"], "health_check_period")), "RAY_health_check_period_ms"),
    (AWS, lambda t: t["docker"].update(run_options=without(t["docker"]["run_options"], "ROTATION")), "RAY_ROTATION_MAX_BYTES"),
    # closed
    (AWS, lambda t: t["docker"].update(run_options=without(t["docker"]["run_options"], "AUTH_MODE")), "tokens are off"),
    (
        AWS,
        lambda t: t.update(head_start_ray_commands=[c.replace("127.0.0.1", "0.0.0.0") for c in t["head_start_ray_commands"]]),
        "listens on the network",
    ),
    (AWS, lambda t: t.update(rsync_exclude=without(t["rsync_exclude"], "safetensors")), "does not name *.safetensors"),
    (AWS, lambda t: t["setup_commands"].append("pip install ray"), "installs at start"),
    (AWS, lambda t: t.pop("head_setup_commands"), "Ray's default installs another Ray"),
    (JOB, lambda t: t["spec"].update(backoffLimit=3), "each retry starts a new cluster"),
    # no secret, no Python
    (CLUSTER, lambda t: head_box(t)["env"].append({"name": "HF_TOKEN", "value": "x"}), "looks like a secret"),
    (CLUSTER, lambda t: head_box(t)["env"].append({"name": "REDIS_PASSWORD", "value": "x"}), "looks like a secret"),
    (CLUSTER, lambda t: t["metadata"]["annotations"].update(note="AKIA" + "A" * 16) if t["metadata"].setdefault("annotations", {}) is not None else 0, "a secret"),
    (AWS, lambda t: t["docker"]["run_options"].append("--env=AWS_SECRET=abc"), "looks like a secret"),
    (AWS, lambda t: t["initialization_commands"].append("python3 -c 'print(1)'"), "holds Python"),
    (CLUSTER, lambda t: t["metadata"].update(annotations={"main.py": "import ray\nray.init()\n"}), "holds Python"),
    # entry points
    (JOB, lambda t: t["spec"].update(entrypoint="python /opt/prism-ray/jobs/gone.py"), "there is no jobs/gone.py"),
    (JOB, lambda t: t["spec"].update(entrypoint="python -m http.server"), "is not 'python /opt/prism-ray/jobs/<script>"),
    (JOB, lambda t: t["spec"].update(entrypoint=t["spec"]["entrypoint"] + " --spaces x"), "would refuse its arguments"),
    (JOB, lambda t: t["spec"].update(entrypoint=t["spec"]["entrypoint"].replace("llama_8b", "lama_8b")), "has no space"),
    (JOB, lambda t: t["spec"].update(entrypoint=t["spec"]["entrypoint"] + " train.stepz=3"), "unknown option 'train.stepz'"),
    (SERVICE, lambda t: t["spec"].update(serveConfigV2=t["spec"]["serveConfigV2"].replace("multi_adapter:build", "gone:build")), "there is no serve_apps/gone.py"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "change", "expected"), BROKEN, ids=[f"{number:02d}" for number in range(len(BROKEN))])
def test_a_broken_manifest_is_found_out(name, change, expected):
    lines = findings(changed(name, change))
    assert any(expected in line for line in lines), lines
    assert all(line.startswith(name) and "\n" not in line for line in lines)


def test_a_manifest_is_named_for_its_kind():
    moved = dataclasses.replace(MANIFESTS[JOB], name="kuberay/ray-cluster.sweep.yaml")
    assert any("holds a RayJob" in line for line in findings(moved))
    loose = dataclasses.replace(MANIFESTS[JOB], name="kuberay/sweep.yaml")
    assert any("is not called ray-<kind>.<case>.yaml" in line for line in findings(loose))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import os\nprint(os.getcwd())", True),
        ("def f(x):\n    return x", True),
        ("from ray import serve", True),
        ("python - <<'END'", True),
        ("python3 -c 'import ray'", True),
        ("python /opt/prism-ray/jobs/calibrate.py model --data x", False),
        ("import_path: serve_apps.multi_adapter:build", False),
        ("from the head to the workers", False),
        ("applications:\n  - name: a\n    import_path: a:b\n", False),
    ],
)
def test_python_is_told_from_text(text, expected):
    assert is_python(text) is expected


# --- values into text -------------------------------------------------------------------------------------------------------


def with_leaf(values: Values, path: list[str], text: str) -> Values:
    data = values.to_dict()
    place = data
    for name in path[:-1]:
        place = place[name]
    place[path[-1]] = text
    return Values.load(data)


FREE_TEXT = [
    ["aws", "region"],
    ["aws", "nfs"],
    ["gcp", "image"],
    ["kubernetes", "gpu_value"],
    ["kubernetes", "spot_label"],
    ["jobs", "sweep", "model"],
]


# Every example renders and parses all manifests, some 0.3 s.
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    text=st.one_of(
        st.sampled_from(["true", "null", "1e3", "0x10", "12:30", "2025-01-01", "/", "a,b", "=", "1_0"]),
        st.from_regex(ALLOWED, fullmatch=True),
    )
)
def test_no_allowed_value_changes_anything_but_its_place(text):
    if not ALLOWED.fullmatch(text):
        return
    values = VALUES
    for path in FREE_TEXT:
        values = with_leaf(values, path, text)
    for manifest in render_all(SOURCE, values, ROOT)[0]:
        assert "${" not in manifest.text
        if manifest.name == AWS:
            assert manifest.tree["provider"]["region"] == text
        if manifest.name == CLUSTER:
            assert worker(manifest.tree)["template"]["spec"]["nodeSelector"] == {VALUES.kubernetes.gpu_label: text}


@pytest.mark.parametrize("text", ["", "a b", "a: b", "a #b", "a\nb", "'a'", '"', "{a}", "a:", "-a", "*a", "&a", "$(x)", "a;b", "ä"])
def test_characters_that_could_leave_their_place_are_refused(text):
    with pytest.raises(ConfigError):
        with_leaf(VALUES, ["aws", "region"], text)


@pytest.mark.parametrize(
    ("template", "value"),
    [
        ("a: ${x}\n", "true"),
        ("a: ${x}\n", "1: 2"),
        ("a: ${x}\n", "1\nb: 2"),
        ('a: "${x}"\n', 3),
        ("a: [${x}]\n", "1, 2"),
        ("a: ${x}\n", "b # c"),
    ],
)
def test_a_template_that_lets_a_value_out_is_refused(template, value):
    with pytest.raises(ConfigError):
        render_text(template, {"x": value}, "probe.yaml")


def test_render_keeps_comments_and_types():
    text, tree, used = render_text('# kept\na: ${n}  # and this\nb: "x-${s}-y"\n"${s}": 1\n', {"n": 3, "s": "t"}, "probe.yaml")
    assert text == '# kept\na: 3  # and this\nb: "x-t-y"\n"t": 1\n'
    assert tree == {"a": 3, "b": "x-t-y", "t": 1}
    assert used == {"n", "s"}


def test_an_unknown_placeholder_names_its_line_and_the_nearest():
    with pytest.raises(ConfigError, match=r"probe.yaml:2: nothing is known as 'regio'; did you mean 'region'\?"):
        render_text("a: 1\nb: ${regio}\n", {"region": "x"}, "probe.yaml")


def test_every_value_is_used_by_a_manifest():
    used = set().union(*(manifest.used for manifest in MANIFESTS.values()))
    # These enter through others: images, seconds, totals, prices, and sizes that only the price of a launcher's head and the values' own checks read.
    indirect = {"image.registry", "image.build", "kubernetes.provider"}
    indirect |= {f"jobs.{name}.deadline_hours" for name in ("sweep", "calibrate")} | {"kubernetes.gpu.max_nodes"}
    indirect |= {f"{cloud}.{key}" for cloud in ("aws", "gcp") for key in ("head.cpus", "head.memory_gib", "gpu.memory_gib")}
    assert set(placeholders(VALUES, ROOT)) - used == indirect


# --- costs ------------------------------------------------------------------------------------------------------------------


def test_costs_by_hand():
    # Head 0.40; 4 spot at 4.20 and 1 on demand at 10.50.
    aws = cost(MANIFESTS[AWS], PRICES, "aws")
    assert (aws.minimum, aws.workers, aws.gpus, aws.bound) == (0.40, 5, 20, None)
    assert aws.maximum == pytest.approx(0.40 + 4 * 4.20 + 10.50)
    # Head 0.39; 2 spot at 35.40 and 1 at 88.50; 24 hours.
    job = cost(MANIFESTS[JOB], PRICES, "gcp")
    assert job.maximum == pytest.approx(0.39 + 2 * 35.40 + 88.50)
    assert job.bound == pytest.approx(24 * job.maximum)
    assert cost(MANIFESTS[SERVICE], PRICES, "gcp").doubled


def test_the_maximum_of_all_workers_caps_the_dearest_first():
    capped = cost(changed(AWS, lambda t: t.update(max_workers=2)), PRICES, "aws")
    assert (capped.maximum, capped.workers) == (pytest.approx(0.40 + 10.50 + 4.20), 2)
    kept = cost(changed(AWS, lambda t: node(t, "gpu-spot").update(min_workers=2)), PRICES, "aws")
    assert kept.minimum == pytest.approx(0.40 + 2 * 4.20)


def test_a_missing_price_is_an_error_and_not_a_zero():
    data = PRICES.to_dict()
    del data["nodes"]["aws"]["g6e.12xlarge"]["spot"]
    with pytest.raises(ConfigError, match="aws g6e.12xlarge spot: has no price; add this market"):
        cost(MANIFESTS[AWS], Prices.load(data), "aws")
    with pytest.raises(ConfigError, match="azure m7i.2xlarge on_demand: has no price"):
        cost(MANIFESTS[AWS], PRICES, "azure")


@pytest.mark.parametrize(
    "nodes", [{"aws": {"a": {"spott": 1.0}}}, {"aws": {"a": {"spot": 0.0}}}, {"aws": {"a": {"spot": "x"}}}, {"aws": {"a": 1.0}}]
)
def test_a_price_table_is_strict(nodes):
    with pytest.raises(ConfigError):
        Prices.load(PRICES.to_dict() | {"nodes": nodes})


def test_example_and_old_prices_say_so():
    row = Cost(name="a", minimum=1.0, maximum=2.5, workers=3, gpus=6, deadline_hours=4.0)
    first, _, last = cost_lines([row], PRICES, PRICES.as_of + datetime.timedelta(days=181))
    assert "EXAMPLE PRICES" in first and "181 days old" in first and PRICES.as_of.isoformat() in first
    assert last.split() == ["a", "1.00", "2.50", "0-3", "0-6", "10.00", "in", "4", "h"]
    mine = Prices.load(PRICES.to_dict() | {"example": False})
    assert "EXAMPLE" not in cost_lines([row], mine, mine.as_of)[0] and "old" not in cost_lines([row], mine, mine.as_of)[0]


# --- entry points, images, packages -----------------------------------------------------------------------------------------


def test_job_scripts_are_read_without_running_them(tmp_path):
    assert script_arguments(ROOT / "jobs" / "sweep_pqt.py", ["--space", "x"]) == ["sweep", "--space", "x"]
    assert script_arguments(ROOT / "jobs" / "calibrate.py", ["m"]) == ["quantize", "m", "--ray"]
    script = tmp_path / "job.py"
    script.write_text("import sys\nraise SystemExit(print)\nrun([name, *sys.argv[1:]])\n")
    with pytest.raises(ConfigError, match="something other than texts"):
        script_arguments(script, [])
    script.write_text("print(1)\n")
    with pytest.raises(ConfigError, match="not exactly once"):
        script_arguments(script, [])


def test_import_paths_are_resolved_without_importing(tmp_path):
    (tmp_path / "pack").mkdir()
    (tmp_path / "pack" / "app.py").write_text("raise RuntimeError('imported')\ndef build(args): ...\napp = 1\nclass A: ...\n")
    (tmp_path / "pack" / "__init__.py").write_text("def top(): ...\n")
    assert [unresolved(path, tmp_path) for path in ("pack.app:build", "pack.app:app", "pack.app:A", "pack:top")] == ["", "", "", ""]
    assert unresolved("pack.app:gone", tmp_path) == "pack/app.py defines no gone"
    assert unresolved("pack.gone:build", tmp_path) == "there is no pack/gone.py"
    for path in ("pack.app", "pack.app:", "../pack:build", "pack app:build", ":build"):
        assert unresolved(path, tmp_path) == "is not of the form package.module:name"


@pytest.mark.parametrize("profile", ["cpu", "gpu"])
def test_images_are_built_from_the_locks(profile):
    text = (SOURCE / "images" / f"{profile}.Dockerfile").read_text()
    assert list(image_faults(text, profile, ROOT)) == []
    for old, new, expected in (
        ("python:3.11.11-slim-bookworm", "python:3.12.1-slim-bookworm", "its base is"),
        ("python:3.11.11-slim-bookworm", "python:latest", "its base is"),
        (f"-r requirements/{profile}.txt", "-r requirements/dev.txt", f"does not install requirements/{profile}.txt"),
        ("COPY jobs jobs", "COPY job jobs", "copies job, which is not there"),
        ("COPY serve_apps serve_apps\n", "", "does not copy serve_apps"),
        ("WORKDIR /opt/prism-ray", "WORKDIR /work", "does not work in /opt/prism-ray"),
        ("USER ray", "USER root", "runs as root"),
        ("rsync ", "", "lacks rsync"),
        ("CMD", f"ENV X=hf_{'a' * 30}\nCMD", "holds a secret"),
    ):
        assert old in text
        assert any(expected in what for what, _ in image_faults(text.replace(old, new), profile, ROOT)), expected


def test_launcher_pins_change_nothing_that_the_locks_pin():
    pins = dict(
        line.split("==") for line in (SOURCE / "images" / "launcher.txt").read_text().splitlines() if line and not line.startswith("#")
    )
    for profile in ("cpu", "gpu"):
        lock = dict(
            line.split("==")
            for line in (ROOT / "requirements" / f"{profile}.txt").read_text().splitlines()
            if "==" in line and line[0] != "#"
        )
        assert not set(pins) & set(lock)


def test_the_size_that_is_printed_is_the_one_that_ray_packs(tmp_path):
    from ray._private.runtime_env.packaging import create_package

    table = check_package(ROOT, 20 << 20)
    assert len(table.splitlines()) == 11
    create_package(str(ROOT), tmp_path / "job.zip", include_gitignore=True, excludes=[], logger=None)
    with zipfile.ZipFile(tmp_path / "job.zip") as archive:
        packed = {item.filename: item.file_size for item in archive.infolist() if not item.is_dir()}
    # Files of other processes may come and go between the two walks of the tree; caches of this run do.
    mine = {name: size for name, size in packed_files(ROOT) if "__pycache__" not in name}
    assert set(packed) == set(mine)
    assert (tmp_path / "job.zip").stat().st_size < 20 << 20


def test_shipped_excludes_keep_a_large_tree_small(tmp_path):
    for name in (".gitignore", ".rayignore"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    for name, size in ((".git/objects/pack.bin", 120 << 20), ("models/model.safetensors", 200 << 20), ("runs/a/data.parquet", 50 << 20)):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "wb") as file:
            file.truncate(size)
    for number in range(100):
        (tmp_path / "tests").mkdir(exist_ok=True)
        (tmp_path / "tests" / f"{number}.txt").write_text("x" * 100)
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "job.py").write_text("print(1)\n")
    assert {name for name, _ in packed_files(tmp_path)} == {".gitignore", ".rayignore", "jobs/job.py"}
    assert check_package(tmp_path, 1 << 20)


def test_start_flags_are_read_from_shell():
    assert start_flags(["ray stop", "ulimit -n 1; ray start --head --num-cpus=0 --x-y=/a/b\n--port=1"]) == {
        "head": "",
        "num-cpus": "0",
        "x-y": "/a/b",
        "port": "1",
    }
    assert start_flags(["ray stop"]) == {}


def test_runtime_environments_parse():
    for path in SOURCE.glob("runtime-env.*.yaml"):
        assert {".git/", ".venv/", "*.safetensors"} <= set(yaml.safe_load(path.read_text())["excludes"])
