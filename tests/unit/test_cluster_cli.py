"""`prism-ray cluster render` and `check` as a user meets them: exit codes, one line for an error, all files or none."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from prism_ray.cli.main import run

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "cluster"
OWN = {
    "registry.example.com/team": "registry.acme.net/ml",
    "ami-example": "ami-0123456789abcdef0",
    "fs-example.efs.us-east-1.amazonaws.com:/": "fs-01234567.efs.us-east-1.amazonaws.com:/",
    "example-project": "acme-ml",
    "projects/example-project/global/images/family/gpu": "projects/acme-ml/global/images/family/gpu",
    "nfs.example.internal:/shared": "10.0.0.2:/shared",
    "example-shared": "acme-shared",
    "redis.example.internal:6379": "redis.acme.svc:6379",
    "example-org/llama-8b": "acme/llama-8b",
    "example-org/moe-120b": "acme/moe-120b",
    "s3://example-bucket/calibration.jsonl": "s3://acme/calibration.jsonl",
    "/shared/models/example-nvfp4": "/shared/models/acme-nvfp4",
}


def own(tree: Any) -> Any:
    """The example's values with every placeholder replaced."""
    if isinstance(tree, dict):
        return {key: own(value) for key, value in tree.items()}
    return OWN.get(tree, tree) if isinstance(tree, str) else tree


@pytest.fixture
def values(tmp_path: Path) -> Callable[..., Path]:
    """Write a values file: the edited example, changed by a function."""

    def write(change: Callable[[Any], object] = lambda tree: None) -> Path:
        tree = own(yaml.safe_load((SOURCE / "values.example.yaml").read_text()))
        change(tree)
        path = tmp_path / "values.yaml"
        path.write_text(yaml.safe_dump(tree))
        return path

    return write


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A repository of links with a cluster/ of its own, to be changed."""
    root = tmp_path / "repository"
    root.mkdir()
    for name in ("requirements", "pyproject.toml", "jobs", "tune_spaces", "prism_ray", "kernels", "README.md", "LICENSE"):
        (root / name).symlink_to(ROOT / name)
    shutil.copytree(SOURCE, root / "cluster")
    # What the service's manifest names, so that a check of an unchanged copy has nothing to say.
    (root / "serve_apps").mkdir()
    (root / "serve_apps" / "multi_adapter.py").write_text("def build(args): ...\n")
    return root


def cluster(*words: object) -> int:
    return run(["cluster", *map(str, words)])


def test_render_writes_every_manifest_with_a_record(values, tmp_path, capsys):
    out = tmp_path / "out"
    assert cluster("render", out, "--values", values(), "--source", SOURCE) == 0
    written = sorted(path.relative_to(out).as_posix() for path in out.rglob("*") if path.is_file())
    expected = sorted(f"{path.parent.name}/{path.name}" for folder in ("launcher", "kuberay") for path in (SOURCE / folder).glob("*.yaml"))
    assert written == sorted([*expected, "rendered.json"])
    assert [line.removeprefix(f"{out}/") for line in capsys.readouterr().out.splitlines()] == expected
    record = json.loads((out / "rendered.json").read_text())["files"]
    for name in expected:
        text = (out / name).read_text()
        assert "${" not in text and "example" not in text
        assert text.startswith(f"# Rendered from cluster/{name}: edit the values, not this file.\n")
        assert record[name] == hashlib.sha256(text.encode()).hexdigest()
    aws = yaml.safe_load((out / "launcher" / "aws.yaml").read_text())
    assert aws["docker"]["image"].startswith("registry.acme.net/ml/prism-ray-gpu:")
    assert aws["available_node_types"]["gpu-spot"]["max_workers"] == 4


def test_a_section_that_is_left_out_leaves_its_manifests_out(values, tmp_path, capsys):
    out = tmp_path / "out"
    path = values(lambda tree: [tree.pop(name) for name in ("gcp", "kubernetes")])
    assert cluster("render", out, "--values", path, "--source", SOURCE) == 0
    assert [each.name for each in out.rglob("*.yaml")] == ["aws.yaml"]
    assert "left out, no section for it: launcher/gcp.yaml" in capsys.readouterr().out


def test_placeholders_of_an_unused_section_are_no_hindrance(values, tmp_path):
    path = values(lambda tree: tree.pop("gcp"))
    assert cluster("render", tmp_path / "out", "--values", path, "--source", SOURCE) == 0


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda tree: tree["aws"].pop("ami"), "values.yaml: aws.ami: Field required"),
        (lambda tree: tree["aws"].update(regio="x"), "values.yaml: aws.regio: there is no such value; did you mean 'region'?"),
        (lambda tree: tree["aws"].update(regio=tree["aws"].pop("region")), "values.yaml: aws.regio: there is no such value; did you mean"),
        (lambda tree: tree["kubernetes"]["gpu"].update(gpus="four"), "values.yaml: kubernetes.gpu.gpus: Input should be a valid integer"),
        (
            lambda tree: tree["kubernetes"]["gpu"].update(gpus=0),
            "values.yaml: kubernetes.gpu.gpus: Input should be greater than or equal to 1",
        ),
        (
            lambda tree: tree["aws"]["gpu"].update(max_spot=0, max_on_demand=0),
            "values.yaml: aws.gpu: max_spot and max_on_demand are both 0",
        ),
        (lambda tree: tree["kubernetes"].update(shm_gib=1600), "values.yaml: kubernetes: shm_gib 1600 counts as the pod's memory"),
        (lambda tree: tree["gcp"].update(zone="us-central1-a\nevil: 1"), "values.yaml: gcp.zone: only letters, digits"),
        (lambda tree: tree.update(name="Prism Ray"), "values.yaml: name: must be at most 40 lowercase"),
        (lambda tree: tree["kubernetes"].update(spot_value=True), "values.yaml: kubernetes.spot_value: Input should be a valid string"),
        (
            lambda tree: [tree.pop(name) for name in ("aws", "gcp", "kubernetes")],
            "values.yaml: none of the sections aws, gcp, kubernetes is there",
        ),
        (lambda tree: tree["aws"].update(ami="ami-example"), "'aws.ami' is still the placeholder 'ami-example'"),
        (lambda tree: tree["image"].update(registry="registry.example.com/team"), "'image.registry' is still the placeholder"),
    ],
)
def test_bad_values_end_in_one_line_and_nothing_written(change, expected, values, tmp_path, capsys):
    path = values(change)
    before = sorted(tmp_path.iterdir())
    assert cluster("render", tmp_path / "out", "--values", path, "--source", SOURCE) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("error: ") and shown.err.count("\n") == 1
    assert expected in shown.err and "; " in shown.err
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [b", "values.yaml:1: is no YAML"),
        ("- 1", "must hold one YAML mapping"),
        ("1: 2", "has a key that is no text"),
        ("", "one YAML mapping"),
    ],
)
def test_files_that_hold_no_values(text, expected, tmp_path, capsys):
    path = tmp_path / "values.yaml"
    path.write_text(text)
    assert cluster("render", tmp_path / "out", "--values", path, "--source", SOURCE) == 2
    assert expected in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_missing_files(tmp_path, capsys):
    assert cluster("render", tmp_path / "out", "--values", tmp_path / "none.yaml", "--source", SOURCE) == 2
    assert "none.yaml: cannot be read" in capsys.readouterr().err
    assert cluster("check", "--values", SOURCE / "values.example.yaml", "--prices", SOURCE / "prices.yaml", "--source", tmp_path) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_an_existing_folder_is_kept_unless_it_is_ours(values, tmp_path, capsys):
    out, path = tmp_path / "out", values()
    assert cluster("render", out, "--values", path, "--source", SOURCE) == 0
    assert cluster("render", out, "--values", path, "--source", SOURCE) == 2
    assert "exists already" in capsys.readouterr().err
    stale = out / "launcher" / "aws.yaml"
    stale.write_text("changed by hand\n")
    assert cluster("render", out, "--values", path, "--source", SOURCE, "--replace") == 0
    assert "changed" not in stale.read_text()
    (out / "mine.txt").write_text("keep")
    assert cluster("render", out, "--values", path, "--source", SOURCE, "--replace") == 2
    assert "also holds 'mine.txt'" in capsys.readouterr().err
    assert (out / "mine.txt").read_text() == "keep"
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    assert cluster("render", foreign, "--values", path, "--source", SOURCE, "--replace") == 2
    assert "was not written by this command" in capsys.readouterr().err


def test_a_broken_template_leaves_the_earlier_rendering(values, repository, tmp_path, capsys):
    out, path = tmp_path / "out", values()
    assert cluster("render", out, "--values", path, "--source", repository / "cluster") == 0
    before = {each: each.read_text() for each in out.rglob("*") if each.is_file()}
    manifest = repository / "cluster" / "launcher" / "gcp.yaml"
    manifest.write_text(manifest.read_text().replace("${gcp.project}", "${gcp.projekt}"))
    capsys.readouterr()
    assert cluster("render", out, "--values", path, "--source", repository / "cluster", "--replace") == 2
    assert "launcher/gcp.yaml:" in (error := capsys.readouterr().err) and "did you mean 'gcp.project'?" in error
    assert {each: each.read_text() for each in out.rglob("*") if each.is_file()} == before
    assert not [each for each in tmp_path.iterdir() if each.name.startswith(".tmp-")]


def test_check_of_an_unchanged_copy_has_nothing_to_say(repository, capsys):
    assert cluster("check", "--source", repository / "cluster") == 0
    shown = capsys.readouterr().out
    names = [f"{path.parent.name}/{path.name}" for folder in ("launcher", "kuberay") for path in (SOURCE / folder).glob("*.yaml")]
    assert all(f"ok            {name}" in shown for name in names)
    assert "job package: " in shown and "EXAMPLE PRICES, not a quote" in shown
    assert [line.split() for line in shown.splitlines() if line.startswith("launcher/aws.yaml")] == [
        ["launcher/aws.yaml", "0.40", "27.70", "0-5", "0-20"]
    ]


@pytest.mark.parametrize(
    ("name", "old", "new", "expected"),
    [
        ("kuberay/ray-cluster.gpu.yaml", "minReplicas: 0", "minReplicas: 1", "keeps 1 node(s) when nothing runs"),
        ("launcher/aws.yaml", "--num-cpus=0 ", "", "the head starts without num-cpus=0"),
        ("kuberay/ray-job.sweep.yaml", "${image_gpu}", "rayproject/ray:2.59.0", "has no tag of the form"),
        (
            "kuberay/ray-service.multi-adapter.yaml",
            "multi_adapter:build",
            "multi_adapter:built",
            "serve_apps/multi_adapter.py defines no built",
        ),
        ("images/gpu.Dockerfile", "USER ray", "", "runs as root"),
        ("runtime-env.sweep.yaml", '  - ".git/"\n', "", "does not exclude .git/"),
        ("prices.yaml", "g6e.12xlarge", "g6e.16xlarge", "aws g6e.12xlarge spot: has no price"),
    ],
)
def test_check_finds_what_is_wrong(name, old, new, expected, repository, capsys):
    path = repository / "cluster" / name
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))
    assert cluster("check", "--source", repository / "cluster") == 1
    shown = capsys.readouterr()
    assert any(line.startswith("- ") and expected in line for line in shown.out.splitlines()), shown.out
    assert shown.err == ""


def test_check_stops_a_package_over_its_limit(repository, capsys):
    with open(repository / "weights.bin", "wb") as file:
        file.truncate(3 << 20)
    assert cluster("check", "--source", repository / "cluster", "--limit-mib", 2) == 1
    assert "the limit is 2.0 MiB; largest: weights.bin (3.0 MiB)" in capsys.readouterr().out


def test_versions_that_disagree_are_found(repository, capsys):
    (repository / "requirements").unlink()
    shutil.copytree(ROOT / "requirements", repository / "requirements")
    lock = repository / "requirements" / "gpu.txt"
    text = lock.read_text()
    pin = next(line for line in text.splitlines() if line.startswith("ray=="))
    lock.write_text(text.replace(f"\n{pin}\n", "\nray==2.59.0\n"))
    assert cluster("check", "--source", repository / "cluster") == 1
    assert "requirements/gpu.txt: pins Ray 2.59.0" in capsys.readouterr().out


def test_bad_prices_are_bad_input(repository, capsys):
    path = repository / "cluster" / "prices.yaml"
    path.write_text(path.read_text().replace("as_of: 2025-01-01", "as_of: yesterday"))
    assert cluster("check", "--source", repository / "cluster") == 2
    assert "prices.yaml: as_of: " in (error := capsys.readouterr().err) and error.count("\n") == 1
