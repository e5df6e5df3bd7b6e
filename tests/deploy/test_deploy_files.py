"""Containers, compose, Prometheus, Kubernetes and Slurm of deploy/, read by the tools that use them."""

from __future__ import annotations

import json
import os
import re
import shutil
import tomllib
from pathlib import Path

import pytest
import yaml

from pacecar.commands.main import cli
from pacecar.config import DaemonConfig, load_config
from pacecar.deploy import export
from tests.deploy.readers import DEPLOY, ROOT, beside_python, built, documents, operator_errors, ran, valid
from tests.kit.ours import ROOMS
from tests.kit.tools import find_tool

KUBERNETES = DEPLOY / "kubernetes"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SLURM = [DEPLOY / "slurm" / name for name in ("job.sbatch", "prolog.sh", "epilog.sh", "targets.sh")]


# --- the image --------------------------------------------------------------------------------------------------


def test_hadolint_finds_nothing_in_the_containerfile():
    done = ran(beside_python("hadolint"), "--failure-threshold", "style", DEPLOY / "container/Containerfile")
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_image_is_not_root_and_installs_nothing_that_is_not_pinned():
    text = (DEPLOY / "container/Containerfile").read_text()
    assert re.search(r"^USER 65532:65532$", text, re.MULTILINE)
    assert re.search(r"PYTHON_IMAGE=\S+:\d+\.\d+\.\d+-slim-\w+$", text, re.MULTILINE), "a version, and no `latest`"
    pinned = dict(
        line.split("==") for line in (DEPLOY / "container/requirements.txt").read_text().splitlines() if line[0] != "#"
    )
    wanted = [*PROJECT["project"]["dependencies"], *PROJECT["project"]["optional-dependencies"]["secure"]]
    bounds = dict(word.split(">=") for word in wanted)
    assert {name.lower() for name in pinned} == {name.lower() for name in bounds}
    for name, low in bounds.items():
        version = next(version for pin, version in pinned.items() if pin.lower() == name.lower())
        assert [int(part) for part in version.split(".")[:2]] >= [int(part) for part in low.split(".")], name
    assert f'image.version="{PROJECT["project"]["version"]}"' in text


def test_the_image_is_given_all_that_the_wheel_is_made_of():
    ignore = (DEPLOY / "container/Containerfile.dockerignore").read_text().splitlines()
    sent = {line[1:] for line in ignore if line.startswith("!")}
    rooms = set(ROOMS)
    assert sent == {"pyproject.toml", "README.md", "LICENSE", "pacecar"} | rooms


def test_the_healthcheck_asks_through_the_socket():
    """By HTTP it would need the certificate's name and a password; tests/monitor/test_health.py runs it under both."""
    text = (DEPLOY / "container/Containerfile").read_text()
    asked = re.search(r"^HEALTHCHECK .* CMD (\[.*\])$", text, re.MULTILINE)
    assert json.loads(asked[1]) == ["pacecar", "health"]
    assert "health" in cli.commands


@pytest.mark.parametrize(
    ("here", "asked"),
    [
        (["buildah", "podman", "docker"], "docker build -f deploy/container/Containerfile -t pacecar:VERSION ."),
        (
            ["buildah", "podman"],
            "podman build -f deploy/container/Containerfile --format docker --ignorefile"
            " deploy/container/Containerfile.dockerignore -t pacecar:VERSION .",
        ),
        ([], None),
    ],
)
def test_make_image_is_one_command_with_whichever_builder_is_here(here, asked, tmp_path):
    for name in ("bash", "sed", "sh"):
        (tmp_path / name).symlink_to(str(shutil.which(name)))
    for name in here:
        (tmp_path / name).write_text('#!/bin/sh\necho "${0##*/} $*"\n')
        (tmp_path / name).chmod(0o755)
    done = ran(shutil.which("make"), "--no-print-directory", "image", cwd=ROOT, env={"PATH": str(tmp_path)})
    if asked is None:
        assert done.returncode != 0
        assert "there is no docker, podman or buildah here" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert " ".join(done.stdout.split()) == asked.replace("VERSION", PROJECT["project"]["version"])
        for path in re.findall(r"deploy/\S+", asked):
            assert (ROOT / path).exists()


def test_the_images_variables_are_keys_that_exist():
    text = (DEPLOY / "container/Containerfile").read_text()
    environ = dict(re.findall(r"(PACECAR_\w+)=(\S+)", text.partition("USER ")[0]))
    config = load_config(environ=environ).daemon
    assert config.socket == "/run/pacecar/pacecar.sock"
    assert f"EXPOSE {config.port}" in text


# --- compose ----------------------------------------------------------------------------------------------------

COMPOSE = DEPLOY / "compose" / "compose.yaml"


@pytest.mark.slow
def test_the_compose_file_fits_the_compose_specification():
    schema = ["--builtin-schema", "vendor.compose-spec"]
    done = ran(beside_python("check-jsonschema"), *schema, COMPOSE)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_slip_in_the_compose_file_would_be_found(tmp_path):
    broken = tmp_path / "compose.yaml"
    broken.write_text(COMPOSE.read_text().replace("read_only:", "readonly:"))
    done = ran(beside_python("check-jsonschema"), "--builtin-schema", "vendor.compose-spec", broken)
    assert done.returncode == 1


def test_every_service_of_the_compose_file_is_sealed_pinned_and_local():
    for name, service in documents(COMPOSE)[0]["services"].items():
        assert service["read_only"] is True, name
        assert service["cap_drop"] == ["ALL"], name
        assert service["security_opt"] == ["no-new-privileges:true"], name
        assert re.search(r":v?\d+\.\d+\.\d+\}$", service["image"]), f"{name}: {service['image']}"
        # They listen on the loopback, or not at all.
        text = json.dumps(service)
        assert name in ("folder", "daemon") or "127.0.0.1" in text, name


def test_every_file_that_the_compose_file_mounts_is_there():
    named = volumes = 0
    for service in documents(COMPOSE)[0]["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            volumes += 1
            if source.startswith("."):
                named += 1
                assert (COMPOSE.parent / source).exists(), source
    assert named >= 4
    assert volumes > named


def test_the_sockets_folder_is_the_daemons_again_after_a_reboot():
    """/run is empty then, docker creates the folder as root, and no one runs `compose up`."""
    services = documents(COMPOSE)[0]["services"]
    assert services["folder"]["restart"] == "unless-stopped", "or it ran once, before the reboot"
    assert "exec sleep infinity" in services["folder"]["entrypoint"][-1], "what ends at once is started over and over"
    assert services["daemon"]["depends_on"] == {"folder": {"condition": "service_healthy"}}
    assert services["daemon"]["restart"] == "unless-stopped", "it may be started before the folder is its own"


def test_grafana_is_given_a_prometheus_and_the_folder_of_dashboards():
    (source,) = documents(COMPOSE.parent / "grafana/provisioning/datasources/pacecar.yaml")[0]["datasources"]
    assert (source["type"], source["url"]) == ("prometheus", "http://127.0.0.1:9090")
    (provider,) = documents(COMPOSE.parent / "grafana/provisioning/dashboards/pacecar.yaml")[0]["providers"]
    mounts = documents(COMPOSE)[0]["services"]["grafana"]["volumes"]
    assert f"../../dashboards/generated:{provider['options']['path']}:ro" in mounts
    # Grafana would stop at a file there that is no dashboard, but it reads .json only.
    for file in (ROOT / "dashboards/generated").glob("*.json"):
        assert {"title", "panels", "uid"} <= set(json.loads(file.read_text())), file.name


# --- Prometheus -------------------------------------------------------------------------------------------------

SCRAPES = [*sorted((DEPLOY / "prometheus").glob("*.yml")), COMPOSE.parent / "prometheus.yml"]
SCRAPES = [path for path in SCRAPES if path.name != "alertmanager.yml"]


@pytest.mark.parametrize("path", SCRAPES, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_promtool_accepts_every_scrape_configuration(path, tmp_path):
    promtool = find_tool("promtool")
    copy = tmp_path / "prometheus.yml"
    text = path.read_text()
    if (
        "kubernetes_sd_configs" in text
        and "kubernetes_sd_configs not found" in ran(promtool, "check", "config", path).stderr
    ):
        # Debian builds Prometheus without clouds; check the rest of the job.
        config = yaml.safe_load(text)
        for job in config["scrape_configs"]:
            job["static_configs"] = [{"targets": ["127.0.0.1:9850"]}] if job.pop("kubernetes_sd_configs") else []
        text = yaml.safe_dump(config)
    copy.write_text(text.replace("/etc/prometheus/pacecar", str(ROOT / "dashboards/generated")))
    done = ran(promtool, "check", "config", copy)
    assert done.returncode == 0, done.stdout + done.stderr
    # All agree on what they scrape, and how often.
    (job, *_) = yaml.safe_load(text)["scrape_configs"]
    assert (job["job_name"], job["scrape_interval"], job["scrape_timeout"]) == ("pacecar", "5s", "4s")


def relabelled(rules: list[dict], labels: dict[str, str]) -> dict[str, str] | None:
    """Return a target's labels after Prometheus' relabelling, or None if it is dropped."""
    labels = dict(labels)
    for rule in rules:
        rule = {re.sub("[A-Z]", lambda found: "_" + found[0].lower(), key): value for key, value in rule.items()}
        value = rule.get("separator", ";").join(labels.get(name, "") for name in rule.get("source_labels", ()))
        found = re.fullmatch(rule.get("regex", "(.*)"), value)
        action = rule.get("action", "replace")
        if (action == "keep" and found is None) or (action == "drop" and found is not None):
            return None
        if action == "replace" and found is not None:
            labels[rule["target_label"]] = found.expand(re.sub(r"\$(\d)", r"\\\1", rule.get("replacement", "$1")))
    return labels


def pod(name: str, component: str, phase: str = "Running") -> dict[str, str]:
    meta = "__meta_kubernetes_pod_"
    return {
        "__address__": "10.0.0.7:9850", "job": "pacecar", f"{meta}phase": phase, f"{meta}container_name": "pacecar",
        f"{meta}annotation_prometheus_io_scrape": "true", f"{meta}annotation_prometheus_io_port": "9850",
        f"{meta}node_name": "node-7", f"{meta}name": name, f"{meta}label_app_kubernetes_io_component": component,
    }  # fmt: skip


def relabellings() -> list[list[dict]]:
    (job,) = documents(DEPLOY / "prometheus/kubernetes.yml")[0]["scrape_configs"]
    (monitor,) = documents(KUBERNETES / "components/podmonitor/podmonitor.yaml")
    return [job["relabel_configs"], monitor["spec"]["podMetricsEndpoints"][0]["relabelings"]]


def test_a_service_names_its_daemons_by_their_nodes():
    """Endpoints of a service have the labels of their pods; sidecars are not among them."""
    (monitor,) = documents(KUBERNETES / "components/servicemonitor/servicemonitor.yaml")
    (service,) = documents(KUBERNETES / "components/servicemonitor/service.yaml")
    (endpoint,) = monitor["spec"]["endpoints"]
    labels = relabelled(endpoint["relabelings"], pod("pacecar-x", "node") | {"job": "the service's name"})
    assert (labels["instance"], labels["job"]) == ("node-7", "pacecar")
    assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert endpoint["port"] == service["spec"]["ports"][0]["name"]
    (daemons,) = [one for one in plain_objects() if one["kind"] == "DaemonSet"]
    assert service["spec"]["selector"].items() <= daemons["spec"]["template"]["metadata"]["labels"].items()
    # Both of the operator's monitors are alike.
    (pods,) = documents(KUBERNETES / "components/podmonitor/podmonitor.yaml")
    for key in ("interval", "scrapeTimeout", "port"):
        assert endpoint[key] == pods["spec"]["podMetricsEndpoints"][0][key]
    assert monitor["spec"]["sampleLimit"] == pods["spec"]["sampleLimit"]


def test_the_operator_is_given_the_rules_that_prometheus_is_given():
    (rule,) = documents(KUBERNETES / "components/prometheusrule/prometheusrule.yaml")
    files = ("pacecar.rules.yml", "pacecar-alerts.rules.yml")
    groups = [group for name in files for (one,) in [documents(ROOT / "dashboards/generated" / name)]
              for group in one["groups"]]  # fmt: skip
    assert rule["spec"]["groups"] == groups, "run `make dashboards` and commit what it wrote"


@pytest.mark.parametrize("rules", relabellings(), ids=["kubernetes.yml", "podmonitor"])
def test_each_daemon_of_a_node_is_an_instance_of_its_own(rules):
    """Two targets with the same labels are one to Prometheus, and rules join by instance."""
    pods = [pod("pacecar-x", "node"), pod("train-a", "training"), pod("train-b", "training")]
    found = [relabelled(rules, labels) for labels in pods]
    assert [labels["instance"] for labels in found if labels] == ["node-7", "node-7/train-a", "node-7/train-b"]
    assert {labels["job"] for labels in found if labels} == {"pacecar"}
    assert {labels["__address__"] for labels in found if labels} == {"10.0.0.7:9850"}


def test_the_pod_of_a_job_that_ended_is_no_target():
    """The operator leaves such pods out by itself (`filterRunning`)."""
    rules, _ = relabellings()
    assert relabelled(rules, pod("train-a", "training", "Succeeded")) is None
    assert relabelled(rules, pod("train-a", "training", "Failed")) is None


def test_alertmanager_would_read_its_configuration():
    config = documents(DEPLOY / "prometheus/alertmanager.yml")[0]
    assert config["route"]["receiver"] in [receiver["name"] for receiver in config["receivers"]]
    assert set(config) == {"route", "receivers"}
    # Alerts are about a node or a job.
    assert set(config["route"]["group_by"]) == {"cluster", "instance", "training_job", "launch"}
    done = ran(find_tool("amtool"), "check-config", DEPLOY / "prometheus/alertmanager.yml")
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", ["victoriametrics.yml", "prometheus.yml", "kubernetes.yml", "slurm.yml", "lean.yml"])
def test_victoriametrics_accepts_the_same_jobs(name, tmp_path):
    """Strictly, as by default, and with Kubernetes, which Debian's Prometheus lacks."""
    copy = tmp_path / name
    text = (DEPLOY / "prometheus" / name).read_text()
    copy.write_text(re.sub(r"(?m)^rule_files:\n(?:  .*\n)+", "", text))  # vmalert's
    victoria = find_tool("victoria-metrics")
    done = ran(victoria, f"-promscrape.config={copy}", "-promscrape.config.dryRun")
    assert done.returncode == 0, done.stdout + done.stderr
    copy.write_text(copy.read_text().replace("scrape_timeout", "scrape_timout"))
    assert ran(victoria, f"-promscrape.config={copy}", "-promscrape.config.dryRun").returncode != 0, "it looks"


# --- Kubernetes -------------------------------------------------------------------------------------------------

OVERLAY = """
apiVersion: kustomize.config.k8s.io/v1beta1
kind: Kustomization
resources: [deploy/kubernetes/base]
components: [{components}]
"""


def plain_objects() -> list[dict]:
    """Return the objects in the files, without kustomize."""
    return [one for path in sorted(KUBERNETES.rglob("*.yaml")) if path.name != "kustomization.yaml"
            for one in documents(path)]  # fmt: skip


@pytest.mark.slow
def test_kubernetes_and_the_operator_know_every_field_of_every_object(tmp_path):
    objects = plain_objects()
    assert {one["kind"] for one in objects} == {
        "Namespace", "ServiceAccount", "DaemonSet", "Job", "NetworkPolicy", "Service",
        "PodMonitor", "ServiceMonitor", "PrometheusRule",
    }  # fmt: skip
    done = valid(objects, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert operator_errors(objects) == []


@pytest.mark.slow
def test_a_slip_in_an_object_would_be_found(tmp_path):
    objects = plain_objects()
    (daemons,) = [one for one in objects if one["kind"] == "DaemonSet"]
    daemons["spec"]["template"]["spec"]["containers"][0]["livenesProbe"] = {}
    assert valid(objects, tmp_path).returncode != 0
    (monitor,) = [one for one in objects if one["kind"] == "ServiceMonitor"]
    monitor["spec"]["endpoints"][0]["scrapeTimout"] = monitor["spec"]["endpoints"][0].pop("scrapeTimeout")
    (said,) = operator_errors(objects)
    assert "ServiceMonitor/pacecar: $.spec.endpoints[0]" in said
    assert "scrapeTimout" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    "components",
    ["", "podmonitor", "scrape-annotations,nvidia,web-config", "servicemonitor,prometheusrule,grafana-dashboards"],
)
def test_kustomize_builds_the_base_with_its_components(components, tmp_path):
    """Exported, as used without a checkout: components find the dashboards beside deploy/."""
    export(tmp_path)
    named = ", ".join(f"deploy/kubernetes/components/{name}" for name in components.split(",") if name)
    (tmp_path / "kustomization.yaml").write_text(OVERLAY.format(components=named))
    objects = built(tmp_path)
    done = valid(objects, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert operator_errors(objects) == []
    (pod,) = [one["spec"]["template"] for one in objects if one["kind"] == "DaemonSet"]
    image = pod["spec"]["containers"][0]["image"]
    assert image == f"pacecar:{PROJECT['project']['version']}"
    assert ("PodMonitor" in {one["kind"] for one in objects}) == ("podmonitor" in components)
    if "grafana-dashboards" in components:
        boards = [one for one in objects if one["kind"] == "ConfigMap"]
        given = {name: text for one in boards for name, text in one["data"].items()}
        assert given == {path.name: path.read_text() for path in (ROOT / "dashboards/generated").glob("*.json")}
        assert {one["metadata"]["labels"]["grafana_dashboard"] for one in boards} == {"1"}
    if "nvidia" in components:
        assert pod["spec"]["runtimeClassName"] == "nvidia"
        assert pod["metadata"]["annotations"]["prometheus.io/port"] == "9850"
        environ = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
        assert environ["PACECAR_DAEMON_WEB_CONFIG_FILE"] == "/etc/pacecar-web/web.yml"
        assert "httpGet" not in json.dumps(pod["spec"]["containers"][0]), "the kubelet has no password"


@pytest.mark.slow
def test_the_sidecar_builds(tmp_path):
    objects = built(KUBERNETES / "sidecar")
    done = valid(objects, tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


def containers() -> list[tuple[str, dict, dict]]:
    """Return (name, container, pod) of all containers of pacecar."""
    pods = [(one["kind"], one.get("spec", {}).get("template", {}).get("spec")) for one in plain_objects()]
    return [
        (f"{kind}/{container['name']}", container, pod)
        for kind, pod in pods
        if pod
        for container in (*pod["containers"], *pod.get("initContainers", ()))
        if container["image"] == "pacecar"
    ]


def test_no_container_of_ours_has_a_privilege_but_the_one_that_makes_folders():
    assert len(containers()) == 3
    for name, container, pod in containers():
        security = container["securityContext"]
        assert security["readOnlyRootFilesystem"] is True, name
        assert security["allowPrivilegeEscalation"] is False, name
        assert security["capabilities"]["drop"] == ["ALL"], name
        assert security["capabilities"].get("add", []) == (["CHOWN"] if name.endswith("folders") else []), name
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}, name
        assert pod["securityContext"]["runAsNonRoot"] is True, name
        assert pod["automountServiceAccountToken"] is False, "the daemon never asks Kubernetes anything"
        assert "memory" in container["resources"]["limits"], name


def test_no_job_gives_way_to_its_monitor_or_waits_for_it():
    (daemons,) = [one for one in plain_objects() if one["kind"] == "DaemonSet"]
    spec = daemons["spec"]["template"]["spec"]
    assert "priorityClassName" not in spec, "on a full node the scheduler would evict a training pod for it"
    # The mount for training pods: a hostPath that must exist would keep the job from starting.
    text = (DEPLOY / "README.md").read_text()
    (path_type,) = re.findall(r"hostPath: \{path: /run/pacecar, type: (\w+)\}", text)
    assert path_type == "DirectoryOrCreate"
    assert spec["volumes"][0]["hostPath"] == {"path": "/run/pacecar", "type": path_type}


def test_the_containers_variables_are_keys_that_exist():
    for name, container, _ in containers():
        environ = {v["name"]: v.get("value", "10.0.0.1") for v in container.get("env", ())}
        config = load_config(environ=environ).daemon
        for port in container.get("ports", ()):
            assert port["containerPort"] == config.port, name


def test_daemon_and_job_of_the_sidecar_share_the_folder_where_hooks_look_first():
    (job,) = [one for one in plain_objects() if one["kind"] == "Job"]
    pod = job["spec"]["template"]["spec"]
    mounts = [c["volumeMounts"] for c in (*pod["containers"], *pod["initContainers"])]
    assert all({"name": "pacecar", "mountPath": "/run/pacecar"} in one for one in mounts)
    assert pod["shareProcessNamespace"] is True
    assert pod["initContainers"][0]["restartPolicy"] == "Always"


def test_the_network_policy_closes_the_port_and_not_the_training():
    (policy,) = [one["spec"] for one in plain_objects() if one["kind"] == "NetworkPolicy"]
    (job,) = [one for one in plain_objects() if one["kind"] == "Job"]
    labels = job["spec"]["template"]["metadata"]["labels"]
    assert policy["podSelector"]["matchLabels"].items() <= labels.items()
    by_port, between_ranks = policy["ingress"]
    assert [port["port"] for port in by_port["ports"]] == [DaemonConfig().port]
    assert "ports" not in between_ranks
    assert between_ranks["from"][0]["podSelector"]["matchLabels"].items() <= labels.items()


def test_the_podmonitor_finds_the_pods_and_their_port():
    (monitor,) = documents(KUBERNETES / "components/podmonitor/podmonitor.yaml")
    assert monitor["apiVersion"] == "monitoring.coreos.com/v1"
    for kind in ("DaemonSet", "Job"):
        (one,) = [found for found in plain_objects() if found["kind"] == kind]
        labels = one["spec"]["template"]["metadata"]["labels"]
        assert monitor["spec"]["selector"]["matchLabels"].items() <= labels.items(), kind
    names = {port["name"] for _, container, _ in containers() for port in container.get("ports", ())}
    assert {end["port"] for end in monitor["spec"]["podMetricsEndpoints"]} == names == {"metrics"}
    # The job's name as in prometheus.yml, which dashboards and rules select.
    (end,) = monitor["spec"]["podMetricsEndpoints"]
    assert {"targetLabel": "job", "replacement": "pacecar"} in end["relabelings"]


# --- Slurm ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_shellcheck_finds_nothing_in_the_scripts():
    deb = sorted((DEPLOY / "deb").glob("*.sh"))
    assert len(deb) == 5
    for severity, scripts in (("style", [*SLURM, *deb]), ("warning", [ROOT / ".ci/run", ROOT / ".ci/tools"])):
        done = ran(beside_python("shellcheck"), f"--severity={severity}", *scripts)
        assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("name", ["prolog.sh", "epilog.sh"])
@pytest.mark.parametrize("environ", [{}, {"SLURM_JOB_ID": "77"}, {"SLURM_JOB_ID": "../../etc"}])
def test_a_prolog_never_drains_a_node(name, environ, tmp_path):
    """Even if every program on the PATH fails, the exit code is 0."""
    for program in ("systemctl", "timeout", "logger", "rm"):
        (tmp_path / program).write_text("#!/bin/sh\nexit 1\n")
        (tmp_path / program).chmod(0o755)
    done = ran("/bin/sh", DEPLOY / "slurm" / name, env={"PATH": str(tmp_path), **environ})
    assert done.returncode == 0, done.stderr


def test_the_epilog_removes_what_the_job_left_and_nothing_else(tmp_path):
    number = f"{os.getpid()}00077"
    left, other = Path(f"/tmp/pacecar-{number}-recordings"), Path(f"/tmp/pacecar-{number}9-recordings")
    try:
        for folder in (left, other):
            folder.mkdir()
        done = ran("/bin/sh", DEPLOY / "slurm/epilog.sh", env={"PATH": os.environ["PATH"], "SLURM_JOB_ID": number})
        assert done.returncode == 0
        assert not left.exists()
        assert other.exists()
    finally:
        shutil.rmtree(left, ignore_errors=True)
        shutil.rmtree(other, ignore_errors=True)


def test_nodes_of_slurm_become_targets_of_prometheus_in_one_move(tmp_path):
    sinfo, file = tmp_path / "sinfo", tmp_path / "pacecar.json"
    sinfo.write_text("#!/bin/sh\nprintf 'node-b\\nnode-a\\nnode-b\\n'\n")
    sinfo.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    done = ran("/bin/sh", DEPLOY / "slurm/targets.sh", file, "9900", env=environ)
    assert done.returncode == 0, done.stderr
    assert json.loads(file.read_text()) == [
        {"targets": [f"{node}:9900"], "labels": {"instance": node}} for node in ("node-a", "node-b")
    ]
    sinfo.write_text("#!/bin/sh\nexit 0\n")
    before = file.read_text()
    done = ran("/bin/sh", DEPLOY / "slurm/targets.sh", file, env=environ)
    assert done.returncode == 1
    assert "lists no node" in done.stderr
    assert file.read_text() == before, "an empty answer takes no node away"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pacecar.json", "sinfo"]


def test_the_job_gets_its_processors_and_the_daemon_sees_its_gpus(tmp_path):
    """With stand-ins of Slurm's commands that record their arguments."""
    calls = tmp_path / "calls"
    for program, text in {
        "srun": f'#!/bin/sh\necho "$*" >>{calls}\ncase "$*" in *daemon) exec sleep 60 ;; *train.py)'
        f" until grep -q 'daemon$' {calls}; do sleep 0.01; done; exit 3 ;; esac\n",
        "scontrol": "#!/bin/sh\nprintf 'node-a\\nnode-b\\n'\n",
    }.items():
        (tmp_path / program).write_text(text)
        (tmp_path / program).chmod(0o755)
    slurm = {"JOB_ID": "7", "SUBMIT_DIR": str(tmp_path), "JOB_NAME": "train", "JOB_NODELIST": "node-[a-b]",
             "JOB_NUM_NODES": "2", "GPUS_ON_NODE": "8", "CPUS_PER_TASK": "64"}  # fmt: skip
    environ = {"PATH": f"{tmp_path}:{os.environ['PATH']}", **{f"SLURM_{name}": value for name, value in slurm.items()}}
    done = ran("bash", DEPLOY / "slurm/job.sbatch", env=environ)
    assert done.returncode == 3, "the training's own exit code: " + done.stderr
    daemon, train = sorted(calls.read_text().splitlines(), key=lambda call: "daemon" not in call)
    assert "--overlap" in daemon
    assert "--gpus" not in daemon, "a step without GPUs is shut off from them by its control group"
    assert "--cpus-per-task=64" in train, "srun does not take it over from sbatch"
    assert "--rdzv-endpoint node-a:29400 train.py" in train


def test_the_jobs_variables_are_keys_that_exist():
    text = (DEPLOY / "slurm/job.sbatch").read_text()
    named = set(re.findall(r"^export (PACECAR_(?:DAEMON|HOOK)_\w+)=", text, re.MULTILINE))
    assert len(named) == 4
    load_config(environ=dict.fromkeys(named, "/tmp/x"))


def test_the_lean_scrape_drops_what_exists_and_nothing_that_a_rule_or_the_fleet_needs():
    from pacecar.metrics.catalog import CATALOG

    (job,) = documents(DEPLOY / "prometheus/lean.yml")[0]["scrape_configs"]
    (rule,) = job["metric_relabel_configs"]
    assert rule["action"] == "drop"
    dropped = {metric.name for metric in CATALOG if re.fullmatch(rule["regex"], metric.name)}
    assert len(dropped) == 7
    generated = ROOT / "dashboards/generated"
    for path in [*generated.glob("*.yml"), *generated.glob("fleet.json")]:
        assert not dropped & set(re.findall(r"pacecar_[a-z0-9_]+", path.read_text())), path.name
