"""What the manifests of examples/kubernetes say of our program, and of each other."""

import re
from difflib import ndiff
from pathlib import Path
from typing import Any

import pytest
import yaml

from elastic_etcd import __version__
from elastic_etcd.agent.config import AgentConfig
from elastic_etcd.agent.followers.metrics import serving
from elastic_etcd.cli import parsers, steer
from elastic_etcd.core.schema import Limits
from elastic_etcd.launch import parse
from elastic_etcd.times import CHILD_GONE, KILLED, LEAVE_TIMEOUT, REVOKE_TIMEOUT
from tests.support.prometheus import get

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "kubernetes"
WITH_A_JOB = ("job", "jobset", "kueue")
FIELDS = {  # what Kubernetes fills in
    "metadata.name": "etcd-1",
    "metadata.labels['batch.kubernetes.io/job-name']": "digits",
    "metadata.labels['jobset.sigs.k8s.io/jobset-name']": "digits",
    "metadata.labels['batch.kubernetes.io/job-completion-index']": "3",
    "status.podIP": "10.0.0.7",
    "spec.nodeName": "gpu-17",
}


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def only(name: str, kind: str) -> dict[str, Any]:
    (found,) = [each for each in manifests(name) if each["kind"] == kind]
    return found


def job_spec(name: str) -> dict[str, Any]:
    if name != "jobset":
        return only(name, "Job")["spec"]  # type: ignore[no-any-return] # YAML
    (node,) = only(name, "JobSet")["spec"]["replicatedJobs"]
    return node["template"]["spec"]  # type: ignore[no-any-return] # YAML


def agent(name: str) -> dict[str, Any]:
    (container,) = job_spec(name)["template"]["spec"]["containers"]
    return container  # type: ignore[no-any-return] # YAML


def filled_in(container: dict[str, Any]) -> dict[str, str]:
    """Its environment, as Kubernetes makes it: what comes first can be named by what follows."""
    env: dict[str, str] = {}
    for each in container["env"]:
        field = each.get("valueFrom", {}).get("fieldRef", {}).get("fieldPath")
        text = FIELDS[field] if field else each["value"]
        env[each["name"]] = re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], text)
    return env


def configured(name: str) -> AgentConfig:
    """What our launcher makes of a manifest's arguments and environment."""
    container = agent(name)
    arguments = [arg.replace("/examples/", f"{ROOT}/examples/") for arg in container["args"]]
    return parse(arguments, filled_in(container))


def test_all_manifests_are_here() -> None:
    known = {"etcd", "etcd-tls", "monitoring", "job-tls", "kustomization", *WITH_A_JOB}
    assert {path.name for path in FOLDER.iterdir()} == {f"{name}.yaml" for name in known}


def test_all_variants_have_the_same_pods_and_policies() -> None:
    specs = [job_spec(name) for name in WITH_A_JOB]
    for spec, label in zip(specs, ("job-name", "jobset-name", "job-name"), strict=True):
        (job,) = [e for e in spec["template"]["spec"]["containers"][0]["env"] if "JOB" in e["name"]]
        field = job["valueFrom"].pop("fieldRef")["fieldPath"]
        assert field.endswith(f"/{label}']")
        spec.pop("suspend", None)
    assert specs[0] == specs[1] == specs[2]
    for kind in ("PodDisruptionBudget", "PersistentVolumeClaim", "NetworkPolicy"):
        assert only("job", kind) == only("jobset", kind) == only("kueue", kind)


def of_trainer(name: str, kind: str) -> dict[str, Any]:
    text = (FOLDER.with_name("kubeflow") / f"{name}.yaml").read_text()
    (found,) = [each for each in yaml.safe_load_all(text) if each["kind"] == kind]
    return found  # type: ignore[no-any-return] # YAML


def test_o11_a_train_job_has_the_pods_of_a_job_set() -> None:
    """But for what is a TrainJob's to say, and the names that Trainer asks for."""
    runtime = of_trainer("runtime", "ClusterTrainingRuntime")["spec"]
    assert set(runtime["mlPolicy"]) == {"numNodes"}
    ours, jobset = runtime["template"]["spec"], only("jobset", "JobSet")["spec"]
    (node,), (known,) = ours["replicatedJobs"], jobset["replicatedJobs"]
    labels = node["template"].pop("metadata")["labels"]
    assert labels == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    spec, other = node["template"]["spec"], known["template"]["spec"]
    del other["parallelism"], other["completions"]
    del other["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
    (container,), (agent_,) = (s["template"]["spec"]["containers"] for s in (spec, other))
    own = agent_["args"].index("/examples/digits_ddp.py") + 1
    del agent_["args"][own:]
    assert container["name"] == "node"
    container["name"] = agent_["name"]
    for rule in spec["podFailurePolicy"]["rules"]:
        if "onExitCodes" in rule:
            assert rule["onExitCodes"]["containerName"] == "node"
            rule["onExitCodes"]["containerName"] = agent_["name"]
    assert ours == jobset


def test_o11_a_train_job_is_of_that_runtime_and_our_launcher_accepts_it() -> None:
    runtime, job = (
        of_trainer("runtime", "ClusterTrainingRuntime"),
        of_trainer("trainjob", "TrainJob"),
    )
    assert job["spec"]["runtimeRef"] == {"name": runtime["metadata"]["name"]}
    trainer = job["spec"]["trainer"]
    arguments = [arg.replace("/examples/", f"{ROOT}/examples/") for arg in trainer["args"]]
    config = parse(arguments, filled_in(agent("jobset")))
    assert config.job == job["metadata"]["name"] == "digits"
    assert config.limits.min_nodes <= trainer["numNodes"] <= config.limits.max_nodes
    budget = of_trainer("trainjob", "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == config.limits.min_nodes
    policy = of_trainer("trainjob", "NetworkPolicy")["spec"]
    labels = {"jobset.sigs.k8s.io/jobset-name": "digits"}
    assert budget["selector"] == policy["podSelector"] == {"matchLabels": labels}
    given = runtime["spec"]["template"]["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = given["template"]["spec"]["containers"]
    flags = [flag for flag in container["args"] if flag.startswith("--")]
    assert trainer["args"][: len(flags)] == flags
    claim = of_trainer("trainjob", "PersistentVolumeClaim")["metadata"]["name"]
    assert claim == only("jobset", "PersistentVolumeClaim")["metadata"]["name"]


def test_o11_the_chart_is_of_this_version() -> None:
    chart = yaml.safe_load((FOLDER.with_name("helm") / "elastic-etcd" / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == __version__


def code(name: str) -> str:
    """A manifest without its comments."""
    text = (FOLDER / f"{name}.yaml").read_text()
    return re.sub(r" *# .*", "", text)


@pytest.mark.parametrize("name", ["job", "etcd"])
def test_o10_the_variants_with_tls_differ_in_nothing_else(name: str) -> None:
    plain, tls = code(name), code(f"{name}-tls")
    assert set(re.findall(r"http://.*:(\d+)", tls)) <= {"2381"}, "but for metrics and probes"
    before, after = (re.sub("https?://", "", text).split("\n") for text in (plain, tls))
    changed = [line for line in ndiff(before, after) if line[0] in "-+" and line[1:].strip()]
    known = ("/etcd-", "etcd-server", "etcd-client", "CERT_AUTH", "CERT_ALLOWED", "volumes:")
    assert all(line[0] == "+" and any(word in line for word in known) for line in changed), changed


def test_o10_agents_with_tls_show_a_certificate_and_check_etcd_s() -> None:
    config = configured("job-tls").etcd
    assert config
    assert config.tls
    mounts = {each["mountPath"]: each["name"] for each in agent("job-tls")["volumeMounts"]}
    files = (config.cacert, config.cert, config.key)
    assert {mounts[str(Path(str(file)).parent)] for file in files} == {"etcd-client"}


def let_in(name: str, labels: dict[str, str], namespace: str = "here") -> set[str] | None:
    """The ports at which a policy lets a pod of these labels in; None for all."""
    found: set[str] = set()
    for rule in only(name, "NetworkPolicy")["spec"]["ingress"]:
        for peer in rule["from"]:
            pods = peer.get("podSelector", {}).get("matchLabels", {}).items()
            where = peer.get("namespaceSelector", {}).get("matchLabels")
            there = where == {"kubernetes.io/metadata.name": namespace}
            if pods <= labels.items() and (there or (where is None and namespace == "here")):
                if "ports" not in rule:
                    return None
                found |= {each["port"] for each in rule["ports"]}
    return found


def test_o10_nobody_else_reaches_agents_and_etcd() -> None:
    agents = job_spec("job")["template"]["metadata"]["labels"]
    etcd = only("etcd", "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    other_job = agents | {"app.kubernetes.io/name": "other"}
    assert let_in("job", agents) is None
    assert let_in("job", other_job) == let_in("job", etcd) == set()
    assert let_in("job", agents, "elsewhere") == set()
    assert let_in("job", {}, "monitoring") == {"metrics"}
    assert let_in("etcd", agents) == {"client"}
    assert let_in("etcd", etcd) == {"client", "peer"}
    assert let_in("etcd", {"app.kubernetes.io/name": "digits"}) == set()
    assert let_in("etcd", {}, "monitoring") == {"metrics"}
    for name, labels in (("job", agents), ("etcd", etcd)):
        spec = only(name, "NetworkPolicy")["spec"]
        assert spec["podSelector"]["matchLabels"].items() <= labels.items()
        assert spec["policyTypes"] == ["Ingress"]


@pytest.mark.parametrize("name", [*WITH_A_JOB, "job-tls"])
def test_o10_the_image_is_in_nobody_s_registry(name: str) -> None:
    """A name without a registry would be somebody's on Docker Hub."""
    assert agent(name)["image"].startswith("registry.example.com/")


def test_all_pods_of_a_job_have_one_version() -> None:
    """Without a tag a pod that comes later may have another one."""
    texts = [
        path.read_text()
        for name in ("kubernetes", "kubeflow")
        for path in FOLDER.with_name(name).iterdir()
    ]
    page = (ROOT / "docs" / "kubernetes.md").read_text()
    found = re.findall(r"registry\.example\.com/elastic-etcd/node(\S*)", "".join([*texts, page]))
    assert len(found) == 8
    assert set(found) == {f":{__version__}"}


@pytest.mark.parametrize("name", WITH_A_JOB)
def test_our_launcher_accepts_the_arguments(name: str) -> None:
    config = configured(name)
    assert agent(name)["command"] == ["python", "-m", "elastic_etcd.launch"]
    assert (config.job, config.node, config.advertise) == ("digits", "gpu-17-3", "10.0.0.7")
    script = Path(config.argv[2])
    asked = [arg.partition("=")[0] for arg in config.argv[3:]]
    assert asked
    assert all(f'"{flag}"' in script.read_text() for flag in asked)


def test_agents_look_for_etcd_where_it_is() -> None:
    etcd, service = only("etcd", "StatefulSet"), only("etcd", "Service")
    assert etcd["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    ports = {each["name"]: each["port"] for each in service["spec"]["ports"]}
    (container,) = etcd["spec"]["template"]["spec"]["containers"]
    opened = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports.items() <= opened.items()
    members = [f"etcd-{index}" for index in range(etcd["spec"]["replicas"])]
    hosts = [f"{member}.{service['metadata']['name']}" for member in members]
    config = configured("job").etcd
    assert config
    assert list(config.endpoints) == [f"{host}:{ports['client']}" for host in hosts]
    env = filled_in(container)
    initial = [f"{m}=http://{host}:{ports['peer']}" for m, host in zip(members, hosts, strict=True)]
    assert env["ETCD_INITIAL_CLUSTER"].split(",") == initial
    assert env["ETCD_ADVERTISE_CLIENT_URLS"] == f"http://{hosts[1]}:{ports['client']}"
    assert env["ETCD_INITIAL_ADVERTISE_PEER_URLS"] == f"http://{hosts[1]}:{ports['peer']}"
    for what in ("client", "peer", "metrics"):
        assert env[f"ETCD_LISTEN_{what.upper()}_URLS"] == f"http://0.0.0.0:{opened[what]}"
    (mount,) = container["volumeMounts"]
    (claim,) = etcd["spec"]["volumeClaimTemplates"]
    assert mount["name"] == claim["metadata"]["name"]
    assert env["ETCD_DATA_DIR"].startswith(f"{mount['mountPath']}/")


class Asked(dict[str, str]):
    """An environment that knows which of its variables somebody has looked for."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def get(self, name: str, default: Any = None) -> Any:
        self.names.add(name)
        return default


@pytest.mark.parametrize("name", WITH_A_JOB)
def test_our_launcher_reads_the_variables_also_those_in_comments(name: str) -> None:
    read = Asked()
    parsers.build_parser(read)
    text = (FOLDER / f"{name}.yaml").read_text()
    named = set(re.findall(r"name: (PET_\w+)", text))
    assert len(re.findall(r"# - \{name: PET_", text)) == 5
    assert len(named) == 9
    assert named <= read.names


def test_probes_ask_for_what_is_served() -> None:
    container = agent("job")
    config = configured("job")
    assert config.metrics_addr
    host, port = config.metrics_addr
    assert host == "0.0.0.0"
    assert container["ports"] == [{"name": "metrics", "containerPort": port}]
    probes = {
        kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")
    }
    assert {probe["port"] for probe in probes.values()} == {"metrics"}
    served = AgentConfig(
        None, "j", ("train",), "n1", 1, Limits(1, 1), metrics_addr=("127.0.0.1", 0)
    )
    with serving(served) as metrics:
        status = {kind: get(metrics.address, probe["path"])[0] for kind, probe in probes.items()}
    assert status == {"startup": 200, "liveness": 200, "readiness": 503}, "it has not joined"


def test_all_is_watched() -> None:
    monitor, rules = only("monitoring", "PodMonitor"), only("monitoring", "PrometheusRule")
    (endpoint,) = monitor["spec"]["podMetricsEndpoints"]
    assert endpoint["port"] in [each["name"] for each in agent("job")["ports"]]
    matched = monitor["spec"]["selector"]["matchLabels"]
    for name in WITH_A_JOB:
        assert matched.items() <= job_spec(name)["template"]["metadata"]["labels"].items()
    alerts = (ROOT / "examples/prometheus/alerts.yml").read_text()
    assert rules["spec"] == yaml.safe_load(alerts)
    charted = ROOT / "examples/helm/elastic-etcd/alerts.yml"
    assert not charted.is_symlink(), "a copied chart is whole"
    assert charted.read_text() == alerts, f"cp examples/prometheus/alerts.yml {charted}"


def test_o3_each_alert_names_its_runbook() -> None:
    alerts = yaml.safe_load((ROOT / "examples/prometheus/alerts.yml").read_text())
    for rule in alerts["groups"][0]["rules"]:
        page, _, anchor = rule["annotations"]["runbook_url"].partition("#")
        heads = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in [head.lower().replace(" ", "-") for head in heads], rule["alert"]


def test_exit_codes_are_the_documented_ones() -> None:
    page = (ROOT / "docs/failures.md").read_text().partition("## Exit codes")[2]
    rows = dict(re.findall(r"^\| ([\w +]+) \| (.*) \|$", page, re.MULTILINE))
    rules = job_spec("job")["podFailurePolicy"]["rules"]
    by_code = {
        c: r["action"] for r in rules if "onExitCodes" in r for c in r["onExitCodes"]["values"]
    }
    stopped = configured("job").stop_exit_code
    final = dict.fromkeys((2, 3, 9, stopped), "FailJob")
    assert by_code == {143: "Ignore"} | final
    assert str(stopped) not in rows, "only a stopped job's agents give it"
    assert "wrong usage" in rows["2"]
    assert "newer elastic_etcd" in rows["7"], "which counts: a pod with a newer image may do better"
    assert "--max-restarts" in rows["3"]
    assert "143 for SIGTERM" in rows["128 + n"]
    assert configured("job").leave_exit_code is None
    names = {r["onExitCodes"]["containerName"] for r in rules if "onExitCodes" in r}
    assert names == {agent("job")["name"]}
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]


def test_the_grace_is_long_enough() -> None:
    hook = agent("job")["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[:2] == ["sh", "-c"], "Kubernetes fills in no variables in a hook"
    *program, job, flag = hook[2].removeprefix("exec ").split()
    assert (program, job, flag) == (["elastic-etcd", "drain"], '"$PET_JOB"', "--self")
    waits = steer.drain().get_default("timeout")
    leaves = KILLED + 2 * (LEAVE_TIMEOUT + REVOKE_TIMEOUT) + CHILD_GONE
    needed = waits + configured("job").limits.leave_deadline + leaves
    assert needed <= job_spec("job")["template"]["spec"]["terminationGracePeriodSeconds"]


@pytest.mark.parametrize("name", WITH_A_JOB)
def test_the_numbers_of_nodes_agree(name: str) -> None:
    spec, limits = job_spec(name), configured(name).limits
    assert spec["parallelism"] == spec["completions"], "else they can't be changed together"
    assert limits.min_nodes <= spec["parallelism"] <= limits.max_nodes
    budget = only(name, "PodDisruptionBudget")["spec"]
    assert budget["minAvailable"] == limits.min_nodes
    labels = spec["template"]["metadata"]["labels"]
    assert budget["selector"]["matchLabels"].items() <= labels.items()


def test_kueue_admits_what_can_train() -> None:
    job, queue = only("kueue", "Job"), only("kueue", "LocalQueue")
    annotations, limits = job["metadata"]["annotations"], configured("kueue").limits
    assert annotations["kueue.x-k8s.io/job-min-parallelism"] == str(limits.min_nodes)
    assert job["spec"]["suspend"]
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]
    cluster, flavor = only("kueue", "ClusterQueue"), only("kueue", "ResourceFlavor")
    assert queue["spec"]["clusterQueue"] == cluster["metadata"]["name"]
    (group,) = cluster["spec"]["resourceGroups"]
    assert [each["name"] for each in group["flavors"]] == [flavor["metadata"]["name"]]
    requested = agent("kueue")["resources"]["requests"]
    assert set(requested) | {"nvidia.com/gpu"} == set(group["coveredResources"])
    quota = {each["name"]: each["nominalQuota"] for each in group["flavors"][0]["resources"]}
    gpus = quota.pop("nvidia.com/gpu")
    assert gpus == 8 * limits.max_nodes, "for the line that is a comment in the Job"
    assert quota == {"cpu": limits.max_nodes, "memory": f"{4 * limits.max_nodes}Gi"}
    assert requested == {"cpu": "1", "memory": "4Gi"}


@pytest.mark.parametrize(("name", "kind"), [("job", "Job"), ("etcd", "StatefulSet")])
def test_containers_may_do_no_more_than_they_need(name: str, kind: str) -> None:
    pod = only(name, kind)["spec"]["template"]["spec"]
    assert pod["securityContext"]["runAsNonRoot"]
    assert not pod["automountServiceAccountToken"]
    for container in pod["containers"]:
        context = container["securityContext"]
        assert context["readOnlyRootFilesystem"]
        assert not context["allowPrivilegeEscalation"]
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert container["resources"]["limits"]["memory"]


def test_what_is_written_has_a_place() -> None:
    pod, config = job_spec("job")["template"]["spec"], configured("job")
    mounts = {each["mountPath"]: each["name"] for each in agent("job")["volumeMounts"]}
    volumes = {each["name"]: each for each in pod["volumes"]}
    assert set(mounts.values()) == set(volumes)
    shm = volumes[mounts[config.memory_dir]]["emptyDir"]
    assert shm["medium"] == "Memory"
    assert int(shm["sizeLimit"][:-2]) < int(agent("job")["resources"]["limits"]["memory"][:-2])
    assert filled_in(agent("job"))["HOME"] in mounts
    claim = volumes[mounts["/checkpoints"]]["persistentVolumeClaim"]["claimName"]
    assert claim == only("job", "PersistentVolumeClaim")["metadata"]["name"]


def test_the_image_has_what_the_manifests_need() -> None:
    docker = (ROOT / "Dockerfile").read_text()
    assert "'.[metrics,web]'" in docker
    assert "COPY examples /examples" in docker
    user = job_spec("job")["template"]["spec"]["securityContext"]["runAsUser"]
    assert f"useradd --uid {user} " in docker
