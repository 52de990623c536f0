"""The files of ``deploy/``, as far as they can be tried without a cluster."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from deployed import DEPLOY, ROOT, dashboard, panels
from prometheus_client import CollectorRegistry

from mmserve.cluster.config import load_cluster
from mmserve.config import ServerConfig, load
from mmserve.engine.shutdown import ENDING_SECONDS
from mmserve.http.app import APIS
from mmserve.observe.inventory import Calls

#: The oldest minor version of Kubernetes that its project still supports, and the newest that is described here.
VERSIONS = ("1.33", "1.37")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
SECRET = re.compile(r"(?i)(password|token|secret|api_?key)\s*[:=]\s*['\"]?[A-Za-z0-9+/_-]{8,}")


def documents(path: Path) -> list[Any]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document is not None]


def manifests() -> list[tuple[str, Any]]:
    return [(path.name, each) for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")) for each in documents(path)]


def ray_clusters() -> list[tuple[str, Any]]:
    cluster, service = (documents(DEPLOY / "ray" / f"{name}.yaml")[0] for name in ("raycluster", "rayservice"))
    return [("raycluster", cluster["spec"]), ("rayservice", service["spec"]["rayClusterConfig"])]


def pods() -> list[tuple[str, Any]]:
    """Every pod's specification, of Kubernetes and of Ray."""
    found = [(name, each["spec"]["template"]["spec"]) for name, each in manifests() if each["kind"] == "Deployment"]
    for name, spec in ray_clusters():
        found.append((f"{name} head", spec["headGroupSpec"]["template"]["spec"]))
        found += [(f"{name} {group['groupName']}", group["template"]["spec"]) for group in spec["workerGroupSpecs"]]
    return found


@pytest.mark.parametrize("path", sorted(DEPLOY.rglob("*.y*ml")), ids=lambda path: path.name)
def test_every_yaml_file_is_one(path: Path) -> None:
    assert documents(path)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(("name", "manifest"), manifests(), ids=[name for name, _ in manifests()])
def test_manifests_are_what_kubernetes_takes(name: str, manifest: Any, version: str) -> None:
    if manifest["kind"] == "Kustomization":
        listed = {*manifest["resources"], "kustomization.yaml"}
        assert listed == {path.name for path in (DEPLOY / "kubernetes").iterdir()}
        return
    kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize(("name", "pod"), pods(), ids=[name for name, _ in pods()])
def test_pods_run_without_privileges_and_what_they_mount_is_there(name: str, pod: Any) -> None:
    whole = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": pod}
    kubernetes_validate.validate(whole, VERSIONS[0], strict=True)
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    for container in pod["containers"]:
        inside = container["securityContext"]
        assert inside["allowPrivilegeEscalation"] is False and inside["capabilities"] == {"drop": ["ALL"]}
        mounted = {mount["name"] for mount in container["volumeMounts"]}
        assert mounted == {volume["name"] for volume in pod["volumes"]}
        assert {"requests", "limits"} <= set(container["resources"])
        if "ray" not in name:
            assert inside["readOnlyRootFilesystem"] is True


def test_the_deployment_serves_what_its_configuration_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_kind = {each["kind"]: each for _name, each in manifests()}
    text = by_kind["ConfigMap"]["data"]["mmserve.toml"]
    (tmp_path / "mmserve.toml").write_text(text)
    config = load(tmp_path / "mmserve.toml")
    pod = by_kind["Deployment"]["spec"]["template"]["spec"]
    [container] = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    server = config.server
    assert ports == {"grpc": server.port, "http": server.http_port, "metrics": server.metrics_port}
    assert {port["targetPort"] for port in by_kind["Service"]["spec"]["ports"]} == set(ports)
    for probe in ("startupProbe", "readinessProbe"):
        assert container[probe]["grpc"]["port"] == server.port
    assert pod["terminationGracePeriodSeconds"] > 5 + server.drain_seconds + ENDING_SECONDS
    [tenant] = config.tenants
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert str(Path(tenant.token_file).parent) == mounts["tokens"]
    assert config.encoder_cache.disk_folder.startswith(mounts["cache"])
    assert container["args"] == ["serve", "--config", f"{mounts['config']}/mmserve.toml", "--log-format", "json"]
    labels = by_kind["Deployment"]["spec"]["template"]["metadata"]["labels"]
    for kind in ("Deployment", "PodDisruptionBudget"):
        assert by_kind[kind]["spec"]["selector"]["matchLabels"] == labels
    assert by_kind["Service"]["spec"]["selector"] == labels
    assert by_kind["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]["name"] == "mmserve"
    monitoring = by_kind["Deployment"]["spec"]["template"]["metadata"]["annotations"]
    assert monitoring["prometheus.io/port"] == str(server.metrics_port)
    env = [each["name"] for each in container["env"]]
    assert env.index("POD_NAME") < env.index("OTEL_RESOURCE_ATTRIBUTES"), "only what is above is filled in"


@pytest.mark.parametrize(("name", "spec"), ray_clusters(), ids=[name for name, _ in ray_clusters()])
def test_ray_clusters_have_a_front_and_workers_of_the_supported_version(name: str, spec: Any) -> None:
    wanted = re.search(r'^ray = \["ray>=(\d+\.\d+),', (ROOT / "pyproject.toml").read_text(), re.M)
    assert wanted is not None and spec["rayVersion"].startswith(wanted[1] + ".")
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    groups = {group["groupName"]: group for group in spec["workerGroupSpecs"]}
    assert set(groups) == {"front", "workers"}
    assert all(group["minReplicas"] <= group["replicas"] <= group["maxReplicas"] for group in groups.values())
    [front] = groups["front"]["template"]["spec"]["containers"]
    service = next(each for each in documents(DEPLOY / "ray" / f"{name}.yaml") if each["kind"] == "Service")
    kubernetes_validate.validate(service, VERSIONS[0], strict=True)
    assert service["spec"]["selector"] == {"ray.io/group": "front"}
    assert {p["targetPort"] for p in service["spec"]["ports"]} == {p["name"] for p in front["ports"]}


def test_the_front_is_started_by_hand_in_the_one_and_by_serve_in_the_other() -> None:
    [cluster, _service], [service, _] = (
        documents(DEPLOY / "ray/raycluster.yaml"),
        documents(DEPLOY / "ray/rayservice.yaml"),
    )
    assert cluster["metadata"]["annotations"] == {"ray.io/overwrite-container-cmd": "true"}
    templates = [cluster["spec"]["headGroupSpec"], *cluster["spec"]["workerGroupSpecs"]]
    for container in (template["template"]["spec"]["containers"][0] for template in templates):
        assert "$KUBERAY_GEN_RAY_START_CMD" in container["args"][0]
    [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
    module, _, name = application["import_path"].partition(":")
    source = (DEPLOY / "ray" / f"{module}.py").read_text()
    assert f"def {name}(args" in source and f"{module}.py" in DOCKERFILE
    assert all(f'args["{key}"]' in source for key in application["args"])
    [front] = [g for g in service["spec"]["rayClusterConfig"]["workerGroupSpecs"] if g["groupName"] == "front"]
    assert yaml.safe_load(yaml.safe_load(front["rayStartParams"]["resources"])) == {"mmserve-front": 1}


@pytest.mark.parametrize(("name", "spec"), ray_clusters(), ids=[name for name, _ in ray_clusters()])
def test_a_front_listens_where_its_service_and_probes_reach_it(name: str, spec: Any) -> None:
    config, cluster = load(DEPLOY / "ray/mmserve.toml"), load_cluster(DEPLOY / "ray/cluster.toml")
    assert cluster.cluster.address == "auto" and config.engine.max_tokens
    assert config.server.host == config.server.metrics_host == "0.0.0.0"
    [front] = [g["template"]["spec"]["containers"][0] for g in spec["workerGroupSpecs"] if g["groupName"] == "front"]
    ports = {port["name"]: port["containerPort"] for port in front["ports"]}
    assert ports == {"grpc": config.server.port, "metrics": config.server.metrics_port}
    mounts = {mount["name"]: mount["mountPath"] for mount in front["volumeMounts"]}
    assert [str(Path(tenant.token_file).parent) for tenant in config.tenants] == [mounts["tokens"]]
    files = [f"{mounts['config']}/{file}.toml" for file in ("cluster", "mmserve")]
    if name == "raycluster":
        assert "mmserve serve --cluster {} --config {} ".format(*files) in front["args"][0]
    else:
        [service, _] = documents(DEPLOY / "ray/rayservice.yaml")
        [application] = yaml.safe_load(service["spec"]["serveConfigV2"])["applications"]
        assert [application["args"][key] for key in ("cluster", "config")] == files
        source = (DEPLOY / "ray/mmserve_front.py").read_text()
        assert '"--cluster", args["cluster"], "--config", args["config"]' in source


def instructions() -> Iterator[tuple[str, str]]:
    """Keyword and arguments of each instruction of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.M).replace("\\\n", " ")
    for line in filter(None, map(str.strip, text.splitlines())):
        keyword, _, rest = line.partition(" ")
        yield keyword, " ".join(rest.split())


def test_the_image_is_built_of_files_that_exist_and_are_not_ignored() -> None:
    ignored = (DEPLOY / "Dockerfile.dockerignore").read_text().splitlines()
    assert "*" in ignored
    allowed = {line[1:] for line in ignored if line.startswith("!")}
    copied = set[str]()
    for keyword, rest in instructions():
        if keyword == "COPY" and "--from=" not in rest:
            *sources, _target = rest.split()
            copied |= set(sources)
    assert {path for path in copied if not (ROOT / path).exists()} == set()
    assert copied == allowed, "all that is needed is sent to the builder, and nothing else"
    assert {"pyproject.toml", "mmserve", "kernels", "protos"} <= copied


def test_the_image_keeps_to_good_practice() -> None:
    stages: dict[str, list[tuple[str, str]]] = {}
    for keyword, rest in instructions():
        if keyword == "FROM":
            image, _, name = rest.partition(" AS ")
            stages[name] = []
            pinned = ":" in image and not image.endswith(":latest")
            assert pinned or image.partition("$")[0].rstrip("-") == "base" or image in stages, f"{image} has no version"
        elif stages:
            stages[name].append((keyword, rest))
    *_, last = stages.values()
    used = {keyword for of in stages.values() for keyword, _ in of}
    assert not used & {"ADD", "MAINTAINER", "ONBUILD", "SHELL"}
    by_keyword = dict(last)
    assert by_keyword["USER"] == "10001:10001"
    assert by_keyword["ENTRYPOINT"].startswith("[") and by_keyword["CMD"].startswith("["), "signals reach the server"
    assert "HEALTHCHECK" in by_keyword and by_keyword["STOPSIGNAL"] == "SIGTERM"
    for keyword, rest in (step for of in stages.values() for step in of):
        if keyword == "RUN" and "apt-get install" in rest:
            assert "--no-install-recommends" in rest and "rm -rf /var/lib/apt/lists" in rest
        assert "sudo" not in rest and "|" not in rest
    assert {"base-cpu", "base-cuda"} <= set(stages), "what ACCELERATOR chooses"
    extras = re.search(r"ARG EXTRAS=(\S+)", DOCKERFILE)
    known_extras = re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M)
    assert extras is not None and set(extras[1].split(",")) <= set(known_extras)


def test_the_containers_configuration_is_one_and_its_ports_are_exposed() -> None:
    server = load(DEPLOY / "container.toml").server
    exposed = next(rest for keyword, rest in instructions() if keyword == "EXPOSE")
    assert set(map(int, exposed.split())) == {server.port, server.http_port, server.metrics_port}
    assert {server.host, server.metrics_host} == {"0.0.0.0"}


def test_compose_services_find_each_other() -> None:
    [compose] = documents(DEPLOY / "compose.yaml")
    services = compose["services"]
    grace = float(services["mmserve"]["stop_grace_period"].removesuffix("s"))
    assert grace > ServerConfig().drain_seconds + ENDING_SECONDS
    build = services["mmserve"]["build"]
    assert ((DEPLOY / build["context"]) / build["dockerfile"]).resolve() == DEPLOY / "Dockerfile"
    assert all(f"ARG {name}" in DOCKERFILE for name in build["args"])
    for service in services.values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (DEPLOY / source).exists() if source.startswith(".") else source in compose["volumes"]
        assert all(port.startswith("127.0.0.1:") for port in service["ports"]), "on this machine alone"
        assert set(service.get("depends_on", ())) <= set(services)
        assert "build" in service or not service["image"].endswith(":latest")
    assert "TRITON_CACHE_DIR=/tmp/" in DOCKERFILE and services["mmserve"]["read_only"]
    assert services["mmserve"]["tmpfs"] == ["/tmp:exec"], "Docker's are noexec, and Triton loads what it compiles"
    [scrape] = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text())["scrape_configs"]
    [target] = scrape["static_configs"][0]["targets"]
    assert (
        target == f"mmserve:{load(DEPLOY / 'container.toml').server.metrics_port}" and scrape["job_name"] == "mmserve"
    )
    [source] = yaml.safe_load((DEPLOY / "grafana/provisioning/datasources/prometheus.yaml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090" and source["type"] == "prometheus"
    [provider] = yaml.safe_load((DEPLOY / "grafana/provisioning/dashboards/mmserve.yaml").read_text())["providers"]
    assert any(volume.split(":")[1] == provider["options"]["path"] for volume in services["grafana"]["volumes"])


def test_the_server_of_compose_has_a_gpu_where_its_image_is_for_one() -> None:
    [compose], [override] = documents(DEPLOY / "compose.yaml"), documents(DEPLOY / "compose.cuda.yaml")
    own, cuda = compose["services"]["mmserve"], override["services"]["mmserve"]
    assert set(override) == {"services"} and set(override["services"]) <= set(compose["services"])
    assert set(cuda) == {"build", "image", "deploy"} and set(cuda["build"]) == {"args"}
    assert own["build"]["args"]["ACCELERATOR"] == "cpu" and cuda["build"]["args"] == {"ACCELERATOR": "cuda"}
    assert cuda["image"] != own["image"], "an image of the other kind is not taken for it"
    for accelerator in ("cpu", "cuda"):
        assert re.search(rf"^FROM \S+ AS base-{accelerator}$", DOCKERFILE, re.M)
    [device] = cuda["deploy"]["resources"]["reservations"]["devices"]
    assert device == {"driver": "nvidia", "count": 1, "capabilities": ["gpu"]}
    assert "deploy/compose.cuda.yaml" in (ROOT / "docs/deployment.md").read_text()


def test_the_alert_about_failing_requests_counts_them_over_grpc_and_http() -> None:
    [group] = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    [expr] = [rule["expr"] for rule in group["rules"] if rule["alert"] == "MmserveRequestsFail"]
    registry = CollectorRegistry()
    calls = Calls(registry)
    for method in ("/mmserve.v1.GenerationService/Generate", *APIS):
        calls.handled(method, "OK", 1.0)
    [counted] = [family for family in registry.collect() if family.name == "grpc_server_handled"]
    methods = {each.labels["grpc_method"] for each in counted.samples}
    patterns = re.findall(r'grpc_method=~"([^"]+)"', expr)
    assert len(patterns) == 2
    for pattern in patterns:
        assert all(re.fullmatch(pattern, method) for method in methods)
        assert not re.fullmatch(pattern, "Check"), "requests alone"


def test_the_dashboard_is_whole() -> None:
    found = dashboard()
    ids = [panel["id"] for panel in found["panels"]]
    assert len(set(ids)) == len(ids)
    places = {(p["gridPos"]["x"], p["gridPos"]["y"]) for p in found["panels"]}
    assert len(places) == len(ids), "no panel on another"
    variables = {variable["name"] for variable in found["templating"]["list"]} | {"__rate_interval"}
    assert set(re.findall(r"\$(\w+)", " ".join(e for p in panels() for e in p.expressions))) <= variables
    assert all(panel.description and panel.expressions for panel in panels())
    shown = {panel.title for panel in panels()}
    assert {"First draft", "First commit", "First text", "Queue by stage", "Shed", "Memory"} <= shown


def test_no_file_holds_a_secret() -> None:
    files = [path for path in DEPLOY.rglob("*") if path.is_file() and path.suffix != ".pyc"]
    found = [f"{path.name}: {m[0]}" for path in files for m in SECRET.finditer(path.read_text()) if "${" not in m[0]]
    assert [line for line in found if "mmserve-tokens" not in line and "allow_plaintext" not in line] == []
    kinds = {each["kind"] for path in files if path.suffix == ".yaml" for each in documents(path) if "kind" in each}
    assert "Deployment" in kinds and "Secret" not in kinds
    assert SECRET.search("token: abcdef123456") and SECRET.search('password="hunter2hunter2"')


promtool = pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")


def run_promtool(*command: str, folder: Path = DEPLOY / "prometheus") -> None:
    done = subprocess.run(["promtool", *command], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@promtool
def test_promtool_accepts_rules_and_configuration_and_the_alerts_fire_when_they_should() -> None:
    run_promtool("check", "rules", "alerts.yml")
    run_promtool("check", "config", "prometheus.yml")
    run_promtool("test", "rules", "alerts_test.yml")


@promtool
def test_promtool_accepts_every_expression_of_the_dashboard(tmp_path: Path) -> None:
    expressions = [each.replace("$__rate_interval", "5m") for panel in panels() for each in panel.expressions]
    rules = [{"record": f"panel:{number}", "expr": each} for number, each in enumerate(expressions)]
    (tmp_path / "panels.yml").write_text(yaml.safe_dump({"groups": [{"name": "panels", "rules": rules}]}))
    run_promtool("check", "rules", "panels.yml", folder=tmp_path)


kubectl = pytest.mark.skipif(shutil.which("kubectl") is None, reason="kubectl is not installed")


@kubectl
def test_kustomize_joins_the_manifests() -> None:
    done = subprocess.run(
        ["kubectl", "kustomize", str(DEPLOY / "kubernetes")], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    whole = list(yaml.safe_load_all(done.stdout))
    assert {each["metadata"].get("namespace", "mmserve") for each in whole} == {"mmserve"}
    [deployment] = [each for each in whole if each["kind"] == "Deployment"]
    assert deployment["spec"]["template"]["spec"]["containers"][0]["image"] == "mmserve:latest"
