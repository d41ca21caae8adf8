"""The files of docs/many_machines.md: manifests by their published schemas, scripts with fakes.

TFJob is checked by Kubeflow's own models (`kubeflow-training`), pods and policies by those of
`kubernetes`. No package on the registries has KubeRay's schema of a RayJob: its fields, by name and
kind, are listed here after the Go types of ray.io/v1 (those that are used), and its pods are
checked as above.
"""

import importlib.util
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[1] / "docs"
CLUSTER = {
    "headGroupSpec": "RayHeadGroup",
    "workerGroupSpecs": "list[RayWorkerGroup]",
    "rayVersion": "str",
    "enableInTreeAutoscaling": "bool",
}
GROUP = {"rayStartParams": "dict(str, str)", "template": "V1PodTemplateSpec"}
RAY = {
    "RayJob": {
        "apiVersion": "str",
        "kind": "str",
        "metadata": "V1ObjectMeta",
        "spec": "RayJobSpec",
    },
    "RayJobSpec": {
        "backoffLimit": "int",
        "rayClusterSpec": "RayClusterSpec",
        "entrypoint": "str",
        "shutdownAfterJobFinishes": "bool",
    },
    "RayClusterSpec": CLUSTER,
    "RayHeadGroup": GROUP,
    "RayWorkerGroup": GROUP | {"groupName": "str", "minReplicas": "int", "maxReplicas": "int"},
}
REQUIRED = {
    "RayClusterSpec": {"headGroupSpec"},
    "RayHeadGroup": {"rayStartParams", "template"},
    "RayWorkerGroup": {"groupName", "rayStartParams", "template"},
}
PLAIN = {"str": str, "int": int, "bool": bool, "float": float, "object": object}


def check(value, kind: str, where: str = "") -> None:
    """Raises ValueError where a value is not of a kind: a class of the packages, or of `RAY`."""
    from kubeflow.training import models as kubeflow
    from kubernetes.client import models as kubernetes

    inner = re.fullmatch(r"dict\(str, (.*)\)|list\[(.*)\]", kind)
    if inner:
        if not isinstance(value, dict if inner[1] else list):
            raise ValueError(f"{where}: {kind} expected, found {value!r}")
        for key, item in value.items() if inner[1] else enumerate(value):
            check(item, inner[1] or inner[2], f"{where}.{key}")
    elif kind in PLAIN:
        if not isinstance(value, PLAIN[kind]) or (kind == "int" and isinstance(value, bool)):
            raise ValueError(f"{where}: {kind} expected, found {value!r}")
    else:
        model = getattr(kubeflow, kind, None) or getattr(kubernetes, kind, None)
        fields = RAY.get(kind) or {
            name: model.openapi_types[attribute] for attribute, name in model.attribute_map.items()
        }
        if not isinstance(value, dict) or value.keys() - fields:
            raise ValueError(f"{where}: {kind} has no {set(value) - fields.keys()}")
        if REQUIRED.get(kind, set()) - value.keys():
            raise ValueError(f"{where}: {kind} needs {REQUIRED[kind] - value.keys()}")
        for name, item in value.items():
            check(item, fields[name], f"{where}.{name}")
        if model and kind not in RAY:  # refuses what is required and missing, and unknown values
            names = {name: attribute for attribute, name in model.attribute_map.items()}
            model(**{names[name]: item for name, item in value.items()})


def manifest(name: str) -> dict:
    import yaml

    return yaml.safe_load((DOCS / name).read_text(encoding="utf-8"))


@pytest.mark.ray
@pytest.mark.parametrize(
    "name, kind",
    [
        ("tfjob.yaml", "KubeflowOrgV1TFJob"),
        ("rayjob.yaml", "RayJob"),
        ("network_policy.yaml", "V1NetworkPolicy"),
    ],
)
def test_a_manifest_has_the_published_structure(name, kind):
    check(manifest(name), kind)


@pytest.mark.ray
def test_the_manifests_mean_what_the_page_says():
    tfjob = manifest("tfjob.yaml")["spec"]["tfReplicaSpecs"]["Worker"]
    (container,) = tfjob["template"]["spec"]["containers"]
    assert container["name"] == "tensorflow" and tfjob["restartPolicy"] == "OnFailure"
    threads = {each["name"]: each["value"] for each in container["env"]}
    cpus = container["resources"]["limits"]["cpu"]
    assert threads == dict.fromkeys(("TF_NUM_INTRAOP_THREADS", "OMP_NUM_THREADS"), cpus)
    rayjob = manifest("rayjob.yaml")["spec"]
    from launch.on_ray import read_options

    words = shlex.split(rayjob["entrypoint"])
    options = read_options(words[words.index("launch.on_ray") + 1 :])
    (group,) = rayjob["rayClusterSpec"]["workerGroupSpecs"]
    assert options.workers == (group["minReplicas"], group["maxReplicas"])
    (container,) = group["template"]["spec"]["containers"]
    assert container["resources"]["limits"]["cpu"] == str(options.cpus_per_worker)
    (mount,) = container["volumeMounts"]
    assert str(options.run_dir).startswith(mount["mountPath"])


@pytest.mark.ray
def test_the_images_are_those_of_the_manifests():
    dockerfile = (DOCS / "Dockerfile").read_text(encoding="utf-8")
    (tfjob_pod,) = find_all(manifest("tfjob.yaml"), "image")
    assert f"--target recipes -t {tfjob_pod} -\n" in dockerfile
    (ray_pod,) = set(find_all(manifest("rayjob.yaml"), "image"))
    assert f"--target ray -t {ray_pod} -\n" in dockerfile
    (version,) = find_all(manifest("rayjob.yaml"), "rayVersion")
    assert f'"ray[default]=={version}"' in dockerfile
    lock = (DOCS.parent / "requirements-ray.lock").read_text(encoding="utf-8")
    assert f"\nray=={version} " in lock


def find_all(node, name: str) -> list:
    """Returns the values of a name anywhere in a manifest."""
    if isinstance(node, list):
        return [value for item in node for value in find_all(item, name)]
    if not isinstance(node, dict):
        return []
    below = [value for item in node.values() for value in find_all(item, name)]
    return [node[name], *below] if name in node else below


@pytest.mark.parametrize("status", [0, 1, 75])
@pytest.mark.parametrize("script", ["slurm.sh", "slurm_ray.sh"])
def test_a_slurm_job_that_saved_is_queued_again(script, status, tmp_path):
    """`srun`, `scontrol` and Python are fakes, which note how they are called."""
    fakes = {
        "srun": 'echo "srun $*" >> notes; case "$*" in *hostname*) echo 127.0.0.1;;'
        ' *ray\\ start*) ;; *) while [ "${1#-}" != "$1" ]; do shift; done; "$@";; esac',
        "scontrol": 'echo "scontrol $*" >> notes; [ "$1" = show ] && printf "a\\nb\\n"; true',
        "seq": "echo 1",
        ".venv/bin/python": f'sleep 0.5; echo "python $*" >> notes; exit {status}',
    }
    (tmp_path / ".venv" / "bin").mkdir(parents=True)
    for name, code in fakes.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{code}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "17",
        "SLURM_JOB_NODELIST": "a,b",
        "SLURM_NNODES": "2",
        "SLURM_CPUS_PER_TASK": "8",
    }
    done = subprocess.run(["bash", DOCS / script], cwd=tmp_path, env=environment, timeout=60)
    notes = (tmp_path / "notes").read_text().splitlines()
    assert done.returncode == status
    assert ("scontrol requeue 17" in notes) == (status == 75)
    (python,) = [line for line in notes if line.startswith("python")]
    assert "recipes.bert_mlm --run-dir /shared/runs/first" in python
    modules = re.findall(r"-m ([\w.]+)", python)
    assert modules and all(importlib.util.find_spec(module) for module in modules)
    if script == "slurm_ray.sh":
        assert "--address 127.0.0.1:6379 --workers 1:2 --cpus-per-worker 8" in python
        assert len([line for line in notes if "ray start" in line]) == 2
