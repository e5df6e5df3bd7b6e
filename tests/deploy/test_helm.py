"""The Helm chart renders the objects of deploy/kubernetes, and refuses contradicting values."""

from __future__ import annotations

import base64
import gzip
import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from pacecar.config import load_config
from pacecar.deploy import export
from tests.deploy.readers import DEPLOY, ROOT, documents, operator_errors, ran, valid
from tests.kit.tools import find_tool

CHART = DEPLOY / "helm" / "pacecar"
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
GENERATED = ROOT / "dashboards" / "generated"

SECRET_BYTES_MAX = 1_048_576
"""Kubernetes' bound of a Secret, in which helm keeps a release: chart, values and what was rendered, as one gzip."""

EVERYTHING = """
image: {repository: registry.example/pacecar, digest: "sha256:DIGEST"}
imagePullSecrets: [{name: pull}]
config: |
  [daemon]
  disable = ["numa"]
  recorder_bytes = 64000000
port: 9851
host: 10.1.2.3
extraEnv: [{name: PACECAR_DAEMON_LOG_LEVEL, value: debug}]
recordings: {hostPath: /data/pacecar}
gpu: {runtimeClassName: nvidia}
web: {secretName: pacecar-web, scrape: {basicAuthSecret: scrape, caSecret: ca, serverName: node.example}}
monitor: {kind: ServiceMonitor, interval: 1m, scrapeTimeout: 15s, labels: {release: prom}}
rules: {enabled: true, labels: {release: prom}, runbookUrl: "https://wiki.example/pacecar"}
dashboards: {enabled: true, namespace: monitoring}
podAnnotations: {a: b}
podLabels: {c: d}
nodeSelector: {gpu: "yes"}
affinity: {nodeAffinity: {}}
maxUnavailable: 2
priorityClassName: low
""".replace("DIGEST", "a" * 64)


def helm(*words: str | Path, values: str = "", folder: Path) -> Any:
    """Run helm with a text of values; returns how it ended."""
    file = folder / "values.yaml"
    file.write_text(values)
    return ran(find_tool("helm"), *words, "--values", file)


def rendered(values: str, folder: Path, chart: Path = CHART) -> list[dict[str, Any]]:
    done = helm("template", "release", chart, "--namespace", "pacecar", values=values, folder=folder)
    assert done.returncode == 0, done.stderr
    return [one for one in yaml.load_all(done.stdout, yaml.CSafeLoader) if one is not None]


def only(kind: str, objects: list[dict[str, Any]]) -> dict[str, Any]:
    (one,) = [found for found in objects if found["kind"] == kind]
    return one


def leaves(value: Any, path: str = "") -> set[str]:
    """Return the keys of nested maps, by their paths; an empty map, or one that users fill, is a leaf."""
    if not isinstance(value, dict) or not value:
        return {path}
    return {leaf for key, item in value.items() for leaf in leaves(item, f"{path}.{key}".lstrip("."))}


def keys_of_schema(schema: dict[str, Any], path: str = "") -> set[str]:
    if "properties" not in schema:
        return {path}
    return {
        key for name, one in schema["properties"].items() for key in keys_of_schema(one, f"{path}.{name}".lstrip("."))
    }


# --- the chart as it stands, without helm -----------------------------------------------------------------------


def test_the_charts_version_is_the_projects():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (chart["version"], chart["appVersion"]) == (VERSION, VERSION)


def test_rules_and_dashboards_of_the_chart_are_links_to_the_generated_ones():
    links = {path.name: path for path in (CHART / "files").iterdir()}
    assert links.keys() == {path.name for path in GENERATED.iterdir() if path.suffix in {".json", ".yml"}}
    for name, link in links.items():
        assert link.is_symlink(), f"{name} is a copy"
        assert link.resolve() == (GENERATED / name).resolve()
        assert not link.readlink().is_absolute()


def test_every_value_is_in_the_schema_and_has_a_default():
    free = {"dashboards.labels", "dashboards.annotations", "resources", "tolerations"}
    given = {next((name for name in free if leaf.startswith(f"{name}.")), leaf) for leaf in leaves(VALUES)}
    assert given == keys_of_schema(SCHEMA) - {"global"}


def test_every_value_is_used_by_a_template():
    templates = "\n".join(path.read_text() for path in (CHART / "templates").iterdir())
    used = set(re.findall(r"\.Values\.([\w.]+)", templates)) | set(re.findall(r"\$values\.([\w.]+)", templates))
    unused = [leaf for leaf in leaves(VALUES) if not any(f"{leaf}.".startswith(f"{name}.") for name in used)]
    assert unused == []


# --- what helm makes of it ---------------------------------------------------------------------------------------


@pytest.mark.slow
def test_helm_lints_the_chart_strictly(tmp_path):
    for values in ("", EVERYTHING):
        done = helm("lint", CHART, "--strict", values=values, folder=tmp_path)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "WARNING" not in done.stdout
        assert "ERROR" not in done.stdout


@pytest.mark.slow
def test_without_values_it_is_the_base_of_the_kustomization(tmp_path):
    objects = rendered("", tmp_path)
    (base,) = documents(DEPLOY / "kubernetes/base/daemonset.yaml")
    ours = only("DaemonSet", objects)["spec"]
    for container in (*ours["template"]["spec"]["containers"], *ours["template"]["spec"]["initContainers"]):
        assert container.pop("image") == f"pacecar:{VERSION}"
        assert container.pop("imagePullPolicy") == "IfNotPresent"
    theirs = base["spec"]["template"]["spec"]
    for container in (*theirs["containers"], *theirs["initContainers"]):
        container.pop("image")
    assert ours == base["spec"]
    assert {one["kind"] for one in objects} == {"DaemonSet", "ServiceAccount"}
    assert only("ServiceAccount", objects)["automountServiceAccountToken"] is False
    assert {one["metadata"]["namespace"] for one in objects} == {"pacecar"}
    done = valid(objects, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_with_every_value_kubernetes_and_the_operator_accept_it(tmp_path):
    objects = rendered(EVERYTHING, tmp_path)
    done = valid(objects, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert operator_errors(objects) == []
    pod = only("DaemonSet", objects)["spec"]["template"]
    container = pod["spec"]["containers"][0]
    assert container["image"] == "registry.example/pacecar@sha256:" + "a" * 64
    (port,) = container["ports"]
    environ = {variable["name"]: variable["value"] for variable in container["env"]}
    (tmp_path / "pacecar.toml").write_text(
        next(one["data"]["pacecar.toml"] for one in objects if "pacecar.toml" in one.get("data", {}))
    )
    config = load_config(tmp_path / "pacecar.toml", environ=environ).daemon
    assert (config.port, config.host, config.recorder_bytes) == (port["hostPort"], "10.1.2.3", 64_000_000)
    assert config.disable == ("numa",)
    assert config.log_level == "debug"
    assert config.web_config_file == "/etc/pacecar-web/web.yml"
    assert "httpGet" not in json.dumps(container), "the kubelet has no password"
    (endpoint,) = only("ServiceMonitor", objects)["spec"]["endpoints"]
    assert endpoint["scheme"] == "https"
    assert endpoint["tlsConfig"]["serverName"] == "node.example"
    assert endpoint["basicAuth"]["password"] == {"name": "scrape", "key": "password"}


@pytest.mark.slow
def test_monitors_rules_and_dashboards_are_those_of_the_components(tmp_path):
    components = DEPLOY / "kubernetes" / "components"
    pods = rendered("monitor: {kind: PodMonitor}\nrules: {enabled: true}\ndashboards: {enabled: true}\n", tmp_path)
    (monitor,) = documents(components / "podmonitor/podmonitor.yaml")
    assert only("PodMonitor", pods)["spec"] == monitor["spec"]
    (rule,) = documents(components / "prometheusrule/prometheusrule.yaml")
    assert only("PrometheusRule", pods)["spec"] == rule["spec"]
    given = {name: text for one in pods if one["kind"] == "ConfigMap" for name, text in one["data"].items()}
    assert given == {path.name: path.read_text() for path in GENERATED.glob("*.json")}
    services = rendered("monitor: {kind: ServiceMonitor}", tmp_path)
    (monitor,) = documents(components / "servicemonitor/servicemonitor.yaml")
    (service,) = documents(components / "servicemonitor/service.yaml")
    assert only("ServiceMonitor", services)["spec"] == monitor["spec"]
    assert only("Service", services)["spec"] == service["spec"]
    for objects in (pods, services):
        assert operator_errors(objects) == []


@pytest.mark.slow
def test_the_readmes_values_are_values_of_the_chart(tmp_path):
    (values,) = re.findall(r"`values\.yaml`:\n\n```yaml\n(.*?)```", (DEPLOY / "README.md").read_text(), re.DOTALL)
    kinds = {one["kind"] for one in rendered(values, tmp_path)}
    assert {"PodMonitor", "PrometheusRule", "ConfigMap", "DaemonSet"} <= kinds


@pytest.mark.slow
def test_alerts_lead_to_a_page_of_ones_own(tmp_path):
    rules = only("PrometheusRule", rendered('rules: {enabled: true, runbookUrl: "https://wiki.example/p"}', tmp_path))
    links = [rule["annotations"] for group in rules["spec"]["groups"] for rule in group["rules"] if "alert" in rule]
    assert {"runbook" in link for link in links} == {False}
    assert links[0]["runbook_url"] == "https://wiki.example/p#pacecargpuxid"


CONTRADICTIONS = {
    "scraped-twice": (
        "scrapeAnnotations: true\nmonitor: {kind: PodMonitor}",
        "scrapeAnnotations is true and monitor.kind is PodMonitor",
    ),
    "timeout": ("monitor: {kind: PodMonitor, interval: 900ms}", "monitor.scrapeTimeout (4s) is longer than"),
    "tls-of-nothing": ("web: {scrape: {caSecret: ca}}\nmonitor: {kind: PodMonitor}", "web.secretName is not"),
    "tls-off": (
        "web: {secretName: w, tls: false, scrape: {caSecret: ca}}\nmonitor: {kind: PodMonitor}",
        "web.scrape.caSecret is for TLS, and web.tls is false",
    ),
    "nobody-told": ("web: {secretName: w, scrape: {basicAuthSecret: s}}", "monitor.kind is none"),
    "config-port": ("config: |\n  [daemon]\n  port = 9000", "config sets port"),
    "config-job": ("config: |\n  [tune]\n  mode = 'off'", "config has a section [tune]"),
    "env-host": (
        "extraEnv: [{name: PACECAR_DAEMON_HOST, value: 0.0.0.0}]",
        "PACECAR_DAEMON_HOST, which",
    ),
    "env-config": (
        "config: |\n  [daemon]\n  log_level = 'info'\nextraEnv: [{name: PACECAR_DAEMON_LOG_LEVEL, value: debug}]",
        "config sets log_level and extraEnv sets PACECAR_DAEMON_LOG_LEVEL",
    ),
    "own-label": ('podLabels: {app.kubernetes.io/name: "other"}', "podLabels has app.kubernetes.io/name"),
    "own-annotation": ('podAnnotations: {prometheus.io/scrape: "true"}', "use the value scrapeAnnotations"),
    "misspelt": ("monitor: {knd: PodMonitor}", "knd"),
    "kind": ("monitor: {kind: podmonitor}", "/monitor/kind"),
    "digest": ("image: {digest: latest}", "/image/digest"),
}

QUICK = {"scraped-twice", "env-config", "misspelt"}
"""One of each sort; the rest is left to `make test-all`."""


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=() if case in QUICK else pytest.mark.full) for case in CONTRADICTIONS]
)
def test_values_that_cannot_be_together_are_named(case, tmp_path):
    values, said = CONTRADICTIONS[case]
    done = helm("template", "release", CHART, values=values, folder=tmp_path)
    assert done.returncode != 0
    assert said in done.stderr, done.stderr
    assert "kind: DaemonSet" not in done.stdout


@pytest.mark.slow
def test_an_exported_chart_is_whole_and_can_be_packed_and_kept_as_a_release(tmp_path):
    export(tmp_path / "out")
    chart = tmp_path / "out/deploy/helm/pacecar"
    assert not [path for path in chart.rglob("*") if path.is_symlink()]
    here = sorted(path.relative_to(CHART) for path in CHART.rglob("*"))
    assert sorted(path.relative_to(chart) for path in chart.rglob("*")) == here
    done = ran(find_tool("helm"), "package", chart, "--destination", tmp_path)
    assert done.returncode == 0, done.stderr
    packed = tmp_path / f"pacecar-{VERSION}.tgz"
    shutil.unpack_archive(packed, tmp_path / "unpacked", filter="data")
    everything = "dashboards: {enabled: true}\nrules: {enabled: true}\n"
    assert rendered(everything, tmp_path, tmp_path / "unpacked/pacecar") == rendered(everything, tmp_path)
    # helm's driver: gzip of JSON, in which the files of the chart are base64, and the whole as base64 once more.
    manifest = helm("template", "release", chart, values=everything, folder=tmp_path).stdout
    files = {str(path): base64.b64encode(path.read_bytes()).decode() for path in chart.rglob("*") if path.is_file()}
    release = json.dumps({"manifest": manifest, "chart": files}).encode()
    assert len(base64.b64encode(gzip.compress(release))) < 0.8 * SECRET_BYTES_MAX
