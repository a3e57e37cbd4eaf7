"""The chart and the kustomizations make the same of a job as examples/kubernetes does."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_etcd import __version__
from elastic_etcd.cli import steer
from elastic_etcd.cli.live import serve
from tests.support.charts import (
    BASE,
    CHART,
    KUBERNETES,
    Manifest,
    helm,
    kustomize,
    template,
    with_components,
)
from tests.support.venv import ROOT

pytestmark = [
    pytest.mark.timeout(1800),  # the first time, Go has to build them
    pytest.mark.nightly(part="kubernetes"),
]

WATCHED = ("--set", "monitoring.enabled=true")
TLS = ("--set", "tls.enabled=true")
ELSEWHERE = ("--set", "etcd.enabled=false,etcd.endpoints=etcd.example.com:2379")
OPERATED = ("--set", "forget.enabled=true,serve.enabled=true")
QUEUED = ("--set", "kueue.queue=training")


def files(*names: str) -> list[Manifest]:
    return [each for name in names for each in yaml.safe_load_all((BASE / name).read_text())]


def filled_in(env: list[Manifest]) -> dict[str, Any]:
    """By name. A variable that names another one has to come after that, for Kubernetes, too."""
    found: dict[str, Any] = {}
    for each in env:
        text = each.get("value") or each["valueFrom"]["fieldRef"]["fieldPath"]
        for name, value in found.items():
            text = text.replace(f"$({name})", value)
        assert "$(" not in text, f"{each['name']} is before what it names"
        found[each["name"]] = text
    return found


def alike(manifest: Manifest) -> Manifest:
    """Without the order of lists in which it has no meaning, and without helm's own words."""
    annotations = manifest["metadata"].pop("annotations", {})
    kept = {k: v for k, v in annotations.items() if not k.startswith("helm.sh/")}
    manifest["metadata"] |= {"annotations": kept} if kept else {}
    pod = manifest.get("spec", {}).get("template", {}).get("spec")
    if pod:
        (container,) = pod["containers"]
        container["env"] = filled_in(container["env"])
        container["volumeMounts"] = {v["mountPath"]: v for v in container["volumeMounts"]}
        pod["volumes"] = {v["name"]: v for v in pod.get("volumes", [])}
    return manifest


def by_name(manifests: list[Manifest]) -> dict[tuple[str, str], Manifest]:
    named = {(each["kind"], each["metadata"]["name"]): alike(each) for each in manifests}
    assert len(named) == len(manifests)
    return named


def charted(*flags: str) -> dict[tuple[str, str], Manifest]:
    """The chart's; the volume's name and etcd's claims as in the base: a release has its own."""
    text = yaml.safe_dump_all(template(*flags)).replace("digits-checkpoints", "checkpoints")
    named = by_name(list(yaml.safe_load_all(text)))
    if etcd := named.get(("StatefulSet", "etcd")):  # that of the manifests outlives each job
        assert etcd["spec"].pop("persistentVolumeClaimRetentionPolicy") == {"whenDeleted": "Delete"}
    return named


def test_the_base_is_the_manifests_and_the_chart() -> None:
    base = by_name(kustomize(BASE))
    assert base == by_name(files("etcd.yaml", "job.yaml", "monitoring.yaml"))
    assert base == charted(*WATCHED)


def test_with_tls(tmp_path: Path) -> None:
    secured = by_name(with_components(tmp_path, "tls"))
    assert secured == by_name(files("etcd-tls.yaml", "job-tls.yaml", "monitoring.yaml"))
    assert secured == charted(*TLS, *WATCHED)


def test_with_another_etcd_and_without_monitoring(tmp_path: Path) -> None:
    alone = by_name(with_components(tmp_path, "external-etcd", "no-monitoring"))
    assert set(alone) == {(each["kind"], each["metadata"]["name"]) for each in files("job.yaml")}
    agent = alone["Job", "digits"]["spec"]["template"]["spec"]["containers"][0]
    assert agent["env"]["PET_ETCD"] == "etcd.example.com:2379"
    assert alone == charted(*ELSEWHERE)


def test_in_a_queue(tmp_path: Path) -> None:
    queued = by_name(with_components(tmp_path, "kueue", "no-monitoring"))
    assert queued["Job", "digits"] == by_name(files("kueue.yaml"))["Job", "digits"]
    assert queued == charted(*QUEUED)


def test_the_overlay_is_a_team_s() -> None:
    made = by_name(kustomize(ROOT / "examples" / "kustomize" / "overlay"))
    spec = made["Job", "resnet-7"]["spec"]
    (agent,) = spec["template"]["spec"]["containers"]
    assert agent["image"] == "registry.example.com/vision/resnet:7"
    assert agent["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert agent["env"]["PET_ETCD"].count("https://") == 3
    assert {each["metadata"]["namespace"] for each in made.values()} == {"vision"}
    ours = {kind for kind, name in made if name == "resnet-7"}
    assert ours == {"Job", "PodDisruptionBudget", "NetworkPolicy", "PersistentVolumeClaim"}
    claim = spec["template"]["spec"]["volumes"]["checkpoints"]["persistentVolumeClaim"]["claimName"]
    assert claim == "resnet-7"
    assert "digits" not in yaml.safe_dump(list(made.values()))


def test_the_chart_of_a_release_is_that_one(tmp_path: Path) -> None:
    release = (ROOT / "scripts" / "release", "--rehearse", tmp_path)
    subprocess.run(release, check=True, capture_output=True, timeout=300)
    (packed,) = tmp_path.glob("*.tgz")
    flags = ("--kube-version", KUBERNETES, *WATCHED)
    made = [helm("template", "digits", chart, *flags).stdout for chart in (CHART, packed)]
    assert made[0] == made[1]
    assert "JobDoesNotTrain" in made[1]


def test_helm_finds_no_fault_with_the_chart() -> None:
    done = helm("lint", "--strict", "--kube-version", KUBERNETES, CHART)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("nodes=9", "nodes has to be from nnodes.min to nnodes.max"),
        ("etcd.enabled=false", "etcd.endpoints has to name an etcd"),
        ("etcd.endpoints=etcd1:2379", "with it goes etcd.enabled=false"),
        ("flags[0]=--prefix=/teams/x", "--prefix=/teams/x is for `elastic-etcd`"),
        ("shm=", "at '/shm': minLength"),
        ("nprocPerNode=", "at '/nprocPerNode': minLength"),
        ("networkPolicy.monitoringNamespace=", "monitoringNamespace': minLength"),
        ("monitoring.runbooks=https://here", "does not match pattern"),
        ("node=4", "'node' not allowed"),
        ("leaveDeadline=soon", "want integer"),
        ("pod.volumes[0].name=data", "pod.volumes is the chart's own"),
        ("pod.terminationGracePeriodSeconds=9", "pod.terminationGracePeriodSeconds is the chart's"),
    ],
)
def test_wrong_values_are_refused(values: str, said: str) -> None:
    done = helm("template", "digits", CHART, "--kube-version", KUBERNETES, "--set", values)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize(
    ("release", "said"), [("123", ""), ("true", ""), ("etcd", "can't"), ("a.b", "can't")]
)
def test_names_of_releases(release: str, said: str) -> None:
    done = helm("template", release, CHART, "--kube-version", KUBERNETES)
    assert said in done.stderr
    made = [each for each in yaml.safe_load_all(done.stdout) if each]
    names = [each["metadata"]["name"] for each in made if each["kind"] == "Job"]
    assert names == ([] if said else [release]), "text, not a number"


def test_an_etcd_that_is_there_anyway_with_a_prefix_and_a_user() -> None:
    flags = ("etcd.prefix=/teams/x,etcd.user=trainer", "tls.enabled=true")
    made = charted(*ELSEWHERE, *(word for flag in flags for word in ("--set", flag)))
    (agent,) = made["Job", "digits"]["spec"]["template"]["spec"]["containers"]
    env = agent["env"]
    assert (env["PET_PREFIX"], env["PET_USER"]) == ("/teams/x", "trainer")
    assert env["PET_PASSWORD_FILE"].startswith(
        f"{agent['volumeMounts']['/etcd-user']['mountPath']}/"
    )
    assert env["PET_CACERT"]
    assert "PET_CERT" not in env


def test_monitoring_is_labelled_and_names_pages() -> None:
    page = "https://example.com/elastic-etcd/"
    given = f"monitoring.labels.release=prometheus,monitoring.runbooks={page}"
    made = charted(*WATCHED, "--set", given)
    labelled = [made[kind, "elastic-etcd"] for kind in ("PodMonitor", "PrometheusRule")]
    assert all(each["metadata"]["labels"] == {"release": "prometheus"} for each in labelled)
    rules = labelled[1]["spec"]["groups"][0]["rules"]
    assert all(r["annotations"]["runbook_url"].startswith(f"{page}docs/") for r in rules)


def test_o1_the_chart_has_what_forgets_and_what_shows_jobs() -> None:
    """As secured as agents are, and reaching etcd as they do."""
    given = ("--set", "serve.hosts={jobs.example.com},etcd.prefix=/teams/x")
    made = charted(*OPERATED, *given, *TLS, *WATCHED)
    agent = made["Job", "digits"]["spec"]["template"]["spec"]
    reached = {"PET_ETCD", "PET_PREFIX", "PET_CACERT", "PET_CERT", "PET_KEY"}
    deployment = made["Deployment", "digits-serve"]["spec"]
    cron = made["CronJob", "digits-forget"]["spec"]["jobTemplate"]
    templates = {"serve": deployment["template"], "forget": alike(cron | {"metadata": {}})["spec"]}
    templates["forget"] = templates["forget"]["template"]
    for name, parser in (("serve", serve.parser), ("forget", steer.forget)):
        pod = templates[name]["spec"]
        (container,), (trained,) = pod["containers"], agent["containers"]
        assert container["command"] == ["elastic-etcd", name]
        args = parser().parse_args(container["args"])
        assert container["env"].items() <= trained["env"].items()
        assert set(container["env"]) == reached
        for field in ("image", "securityContext"):
            assert container[field] == trained[field]
        assert pod["securityContext"] == agent["securityContext"]
        assert not pod["automountServiceAccountToken"]
        assert pod["volumes"].items() <= agent["volumes"].items()
        assert container["volumeMounts"].items() <= trained["volumeMounts"].items()
        assert set(container["volumeMounts"]) == {"/etcd-client"}
        if name == "serve":
            assert args.listen == ("0.0.0.0", 8484)
            assert args.allow_host == ["digits-serve", "jobs.example.com"]
        else:
            assert (args.all, args.yes, args.older_than) == (True, True, 604800)
    labels = templates["serve"]["metadata"]["labels"]
    for selector in (
        deployment["selector"]["matchLabels"],
        made["Service", "digits-serve"]["spec"]["selector"],
        made["PodMonitor", "digits-serve"]["spec"]["selector"]["matchLabels"],
        made["NetworkPolicy", "digits-client"]["spec"]["podSelector"]["matchLabels"],
    ):
        assert selector.items() <= labels.items()
    ours = made["Job", "digits"]["spec"]["template"]["metadata"]["labels"]
    assert not labels.items() & ours.items(), "no policy, budget or monitor takes it for an agent"
    (of_etcd, *_) = made["NetworkPolicy", "etcd"]["spec"]["ingress"]
    let_in = [peer["podSelector"]["matchLabels"] for peer in of_etcd["from"]]
    for pods in templates.values():
        assert any(each.items() <= pods["metadata"]["labels"].items() for each in let_in)


@pytest.mark.parametrize(
    ("given", "rendered"),
    [
        ("registry:5000/vision/resnet", f"registry:5000/vision/resnet:{__version__}"),
        ("vision/resnet:7", "vision/resnet:7"),
        ("registry:5000/resnet@sha256:abc", "registry:5000/resnet@sha256:abc"),
    ],
)
def test_an_image_has_a_version(given: str, rendered: str) -> None:
    spec = charted("--set", f"image={given}")["Job", "digits"]["spec"]["template"]["spec"]
    assert [container["image"] for container in spec["containers"]] == [rendered]


def test_what_a_team_gives_is_taken() -> None:
    given = {
        "image": "registry.example.com/vision/resnet:7",
        "nodes": 2,
        "nprocPerNode": "gpu",
        "leaveDeadline": 120,
        "flags": ["--max-restarts=9"],
        "env": [{"name": "NCCL_DEBUG", "value": "WARN"}],
        "checkpoints": {"claim": "resnets"},
        "volumes": [{"name": "data", "hostPath": {"path": "/data"}}],
        "volumeMounts": [{"name": "data", "mountPath": "/data", "readOnly": True}],
        "pod": {"nodeSelector": {"gpu": "h100"}, "securityContext": {"runAsUser": 2000}},
        "resources": {"limits": {"nvidia.com/gpu": 8}},
    }
    flags = [f"--set-json={name}={json.dumps(value)}" for name, value in given.items()]
    made = charted(*flags)
    assert ("PersistentVolumeClaim", "checkpoints") not in made
    spec = made["Job", "digits"]["spec"]
    assert (spec["parallelism"], spec["completions"]) == (2, 2)
    pod = spec["template"]["spec"]
    assert pod["nodeSelector"] == {"gpu": "h100"}
    kept = charted()["Job", "digits"]["spec"]["template"]["spec"]["securityContext"]
    assert pod["securityContext"] == kept | {"runAsUser": 2000}
    assert kept["runAsNonRoot"]
    assert pod["volumes"]["data"]["hostPath"] == {"path": "/data"}
    assert pod["terminationGracePeriodSeconds"] == 140
    assert pod["volumes"]["checkpoints"]["persistentVolumeClaim"] == {"claimName": "resnets"}
    (agent,) = pod["containers"]
    assert agent["image"] == given["image"]
    assert agent["volumeMounts"]["/data"]["readOnly"]
    assert set(agent["volumeMounts"]) > {"/tmp", "/data"}
    assert agent["env"]["NCCL_DEBUG"] == "WARN"
    assert agent["resources"]["limits"]["nvidia.com/gpu"] == 8
    assert agent["resources"]["requests"], "what is not given stays"
    assert agent["args"][0:3] == ["--nnodes=2:8", "--nproc-per-node=gpu", "--leave-deadline=120"]
    assert "--max-restarts=9" in agent["args"]
