"""How the tests run each command of the pages, and why they do not run some.

The first recipe whose pattern is the whole command holds.  `Run` runs it as it stands, but for what SCRATCH and the
recipe itself exchange.  `Cannot` says why it is not run, and checks what can be: every path, unit, tag,
extra and option.
"""

from __future__ import annotations

import re
import shlex
import subprocess
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import click
import yaml
from packaging.requirements import Requirement

from pacecar.commands.main import cli
from pacecar.commands.man_pages import man_pages
from tests.docs.pages import ROOT
from tests.docs.world import JOB, World

__all__ = ["RECIPES", "Cannot", "Run", "click_accepts", "recipe_for", "written"]

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
CONTAINERFILE = ROOT / "deploy/container/Containerfile"
UNITS = ROOT / "deploy/systemd"


@dataclass(frozen=True)
class Run:
    """Run it.  `needs` names the required parts of the World, `exits` the allowed codes.

    What `is_long` is run by `make test-all` only, and read by the command's own parser in each test run, as all are.
    """

    pattern: str
    needs: tuple[str, ...] = ()
    exchange: tuple[tuple[str, str], ...] = ()
    append: str = ""
    exits: tuple[int, ...] = (0,)
    says: str = ""
    fill: Mapping[str, Callable[[World], str]] = field(default_factory=dict)
    is_long: bool = False


@dataclass(frozen=True)
class Cannot:
    """Do not run it, because of `reason`; `check` raises AssertionError if it names something that does not exist."""

    pattern: str
    reason: str
    check: Callable[[str], None]


# --- what is exchanged in every command that runs ------------------------------------------------------------------

SCRATCH = (
    (r"\bJOB\b", JOB),
    (r"\bDIR\b", "exported"),
    (r"(?<![\w/])/tmp/", "tmp/"),
    (r"/scratch/traces", "tmp/scratch"),
    (r"--nproc-per-node 8", "--nproc-per-node 2"),  # two ranks on two cores
    (r"--nnodes 2 (.*)--rdzv-endpoint node-a:29400", r"--nnodes 1 \1--rdzv-endpoint 127.0.0.1:0"),
    (r"\b(127\.0\.0\.1|node-a):9850", "127.0.0.1:PORT"),
)


def written(recipe: Run, command: str, before: tuple[str, ...], world: World) -> str:
    """Return the script for bash: variables from the block, then the command, with replacements."""
    for need in recipe.needs:
        getattr(world, need)()
    line = command + (f" {recipe.append}" if recipe.append else "")
    for pattern, text in (*recipe.exchange, *SCRATCH):
        line = re.sub(pattern, text, line)
    for word, value in recipe.fill.items():
        line = re.sub(word, lambda _, value=value: value(world), line)  # type: ignore[misc]
    line = line.replace("127.0.0.1:PORT", f"127.0.0.1:{world.port}")
    return "; ".join([*before, line])


# --- what can be said of a command without running it --------------------------------------------------------------


def click_accepts(words: list[str]) -> None:
    """Parse the command with pacecar's own parser; raises AssertionError with its message."""
    command: click.Command = cli
    name = "pacecar"
    while isinstance(command, click.Group) and words and not words[0].startswith("-"):
        assert words[0] in command.commands, f"{name} has no command {words[0]}"
        name, command, words = f"{name} {words[0]}", command.commands[words[0]], words[1:]
    try:
        command.make_context(name, list(words))
    except click.exceptions.Exit:
        return
    except click.UsageError as error:
        if "does not exist" not in error.message:  # files are not the parser's business here
            raise AssertionError(f"{name}: {error.message}") from error


def there(path: str) -> None:
    """Check that the checkout has it."""
    assert (ROOT / path.split("#")[0]).exists(), f"{path} is not in the checkout"


def nothing_more(_: str) -> None:
    """A third-party command without our names."""


def tag_is_ours(command: str) -> None:
    for tag in re.findall(r"\bpacecar:(\d[\w.]*)", command):
        assert tag == PROJECT["project"]["version"], f"the tag {tag} is not the version"


def docker(command: str) -> None:
    tag_is_ours(command)
    for path in re.findall(r" -f (\S+)", command):
        there(path)
    text = CONTAINERFILE.read_text(encoding="utf-8")
    for argument in re.findall(r"--build-arg (\w+)=", command):
        assert f"ARG {argument}=" in text, f"{argument} is no argument of the Containerfile"
    for image in re.findall(r"docker\.io/\S+?(?=@|\s|$)", command):
        assert image in text, f"{image} is not the base image"


def pip(command: str) -> None:
    for word in shlex.split(command.split("install", 1)[1]):
        if word.startswith("-"):
            continue
        wanted = re.sub(r"^\.", "pacecar", word)
        requirement = Requirement(wanted)
        assert requirement.name == "pacecar"
        missing = requirement.extras - set(PROJECT["project"]["optional-dependencies"])
        assert not missing, f"no extra is called {sorted(missing)}"


def make(command: str) -> None:
    target, *variables = shlex.split(command)[1:]
    done = subprocess.run(
        ["make", "-n", target, *variables], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    for variable in variables:
        assert f"\n{variable.split('=')[0]} ?=" in text, f"the Makefile does not know {variable}"


def systemctl(command: str) -> None:
    verbs = {"daemon-reload", "enable", "disable", "stop", "start", "restart", "reload", "status"}
    words = [word for word in shlex.split(command) if word not in {"sudo", "systemctl", "--now"}]
    assert words[0] in verbs, f"systemctl {words[0]}?"
    for unit in words[1:]:
        assert (UNITS / (unit if "." in unit else f"{unit}.service")).exists(), f"no unit {unit}"


def journal(command: str) -> None:
    unit = re.search(r" -u (\S+)", command)
    systemctl(f"systemctl status {unit[1]}")


def copy(command: str) -> None:
    there(shlex.split(command)[2])


def remove(command: str) -> None:
    """Pages, units or manifests create what the command removes, apart from the lines that remove it."""
    texts = [path.read_text(encoding="utf-8") for path in (ROOT / "deploy").rglob("*") if path.suffix in MAKERS]
    texts.append((ROOT / "docs/configuration.md").read_text(encoding="utf-8"))
    made = "\n".join(line for text in texts for line in text.splitlines() if not line.startswith("sudo rm "))
    for path in shlex.split(command)[3:]:
        stem = path.removesuffix("*").removesuffix("/pacecar.conf").replace("/var/lib/private/", "/var/lib/")
        state = stem == "/var/lib/pacecar" and "StateDirectory=pacecar" in made
        folder, _, name = stem.rpartition("/")
        unit = folder == "/etc/systemd/system" and (UNITS / name.removesuffix(".d")).exists()
        assert stem in made or state or unit, f"nobody makes {path}"


def sysuser(command: str) -> None:
    """sysusers.conf creates the user that the command removes."""
    assert f"u {command.split()[-1]} " in (UNITS / "sysusers.conf").read_text(encoding="utf-8")


def deb(command: str) -> None:
    """`make deb` writes this file, in our version."""
    found = re.search(r"dist/pacecar_(\S+)-1_(amd64|arm64)\.deb$", command)
    assert found is not None, "no such file is built"
    assert found[1] == PROJECT["project"]["version"]
    assert '"$out/pacecar_$version-1_$arch.deb"' in (ROOT / "deploy/deb/build.sh").read_text(encoding="utf-8")


def man(command: str) -> None:
    page = f"{command.split()[1]}.1"
    assert page in man_pages(cli), f"there is no page {page}"


def helm(command: str) -> None:
    """The chart exists and has the values that the command sets."""
    chart = shlex.split(command)[3]
    there(f"{chart}/Chart.yaml")
    values = yaml.safe_load((ROOT / chart / "values.yaml").read_text(encoding="utf-8"))
    for setting in re.findall(r"--set (\S+?)=", command):
        found = values
        for key in setting.split("."):
            assert key in found, f"the chart has no value {setting}"
            found = found[key]


MAKERS = {".md", ".service", ".conf", ".socket", ".yaml"}


def venv_pip(command: str) -> None:
    assert "/opt/pacecar/bin/pacecar" in (UNITS / "pacecar.service").read_text(encoding="utf-8")
    if " install" in command:
        pip(command)


def sbatch(command: str) -> None:
    name = shlex.split(command)[1].rpartition("/")[2]
    there(f"deploy/slurm/{name}")


def inside(command: str) -> None:
    """A third-party launcher with a command of ours, which must parse."""
    _, found, rest = command.partition("pacecar ")
    while found and not re.match(r"[a-z-]+", rest):
        _, found, rest = rest.partition("pacecar ")
    assert found, "no command of pacecar's in it"
    click_accepts(shlex.split(rest.replace("$HOST_IP", "127.0.0.1")))


def kubectl(command: str) -> None:
    for folder in re.findall(r" -k (\S+)", command):
        if folder != ".":
            there(f"{folder}/kustomization.yaml")
    objects: set[tuple[str, str, str]] = set()
    for place in ("base", "sidecar"):
        kustomization = yaml.safe_load((ROOT / f"deploy/kubernetes/{place}/kustomization.yaml").read_text())
        for name in kustomization["resources"]:
            for one in yaml.safe_load_all((ROOT / f"deploy/kubernetes/{place}/{name}").read_text()):
                if one is not None:
                    objects.add((kustomization["namespace"], one["kind"].lower(), one["metadata"]["name"]))
    space = re.search(r" -n (\S+)", command)
    for kind, name in re.findall(r"\b(daemonset|job|pod)/([\w-]+)", command):
        assert space is not None, f"{kind}/{name} is in a namespace"
        assert (space[1], kind, name) in objects, f"no {kind} {name} in {space[1]}"
    if " -- pacecar " in command:
        inside(command.split(" -- ", 1)[1])


# --- the table ------------------------------------------------------------------------------------------------------

ROOT_ONLY = "needs root, and changes the machine"
NO_INDEX = "installs from an index or builds a wheel, which tests/deploy/test_wheel.py does; the extras are checked"
NO_CLUSTER = "there is no cluster; namespace, kind, name and folder are checked, the objects themselves in tests/deploy"
NO_SLURM = "there is no Slurm; the script and our own command are checked, the script's behaviour in tests/deploy"
NO_DOCKER = (
    "there is no container runtime; files, tag and arguments are checked, hadolint reads the file in tests/deploy"
)
LONG = "installs, or runs for minutes; make's own dry run and the variables are checked"
ONCE = (r"$", " --once")

RECIPES: tuple[Run | Cannot, ...] = (
    # pacecar itself, of which everything runs.
    Run(r"(\w+=\S+ )?pacecar daemon( &| --.*)?"),  # served and ended: see test_commands
    Run(r"pacecar demo( .*)?", exchange=((r"$", " --steps 12 --port 0 --run-dir tmp/demo"),), says="How far to trust",
        is_long=True),  # tests/commands/demo runs it in its own sizes
    Run(r"pacecar version", says=PROJECT["project"]["version"]),
    Run(r"pacecar sample.*"),
    Run(r"pacecar health", ("daemon",), says="ok"),
    Run(r"pacecar top( --once)?( node-a:9850| 127.0.0.1:9850)?", ("job",), (ONCE,), says=JOB),
    Run(r"pacecar top https://.*", ("job",), ((r"https://\S+", "http://127.0.0.1:PORT"), ONCE), says=JOB),
    Run(r"pacecar doctor --pid 4242.*", fill={"4242": lambda world: str(world.rank_pid())}, exits=(0, 1)),
    Run(r"pacecar doctor.*", exchange=((r"runs/first", "runs/latest"),), exits=(0, 1), says=r"CPU|findings"),
    Run(r"(sudo )?pacecar report FILE .*", ("job",),
        ((r"^sudo ", ""),), fill={"FILE": lambda world: str(world.recording())}, append=f"--job {JOB}", exits=(0, 1)),
    Run(r"pacecar report .*", exchange=((r"runs/(first|1234)", "runs/latest"),), says=r".html|#|\{"),
    Run(r"pacecar analyze .*--picture.*", exchange=((r"test\.json\.gz", "trace.json.gz"), ("1013", "3"))),
    Run(r"pacecar analyze .*--tables.*", exchange=(
        (r"(test|qwen)\.json\.gz", "trace.json.gz"), (r"param_dlrm\w+/", "traces/"))),
    Run(r"pacecar analyze .*--engine dask.*", exchange=(
        (r"/shared/traces", "traces/"), (r"--engine dask --dask-address \S+", "--engine local"))),
    Run(r"pacecar analyze s3://.*", exchange=((r"s3://\S+", "traces/"), ("0-63,512", "0-63"))),
    # Traces that others recorded, which are not in the checkout; tests/analysis reads them where they are.
    Run(r"pacecar analyze (--compare )?(test\.json\.gz|param_dlrm\w+/|kineto_tb_\w+ .*)", exchange=(
        (r"test\.json\.gz|param_dlrm\w+/", "traces/"),
        (r"kineto_tb_nw0_\w+", "before"), (r"kineto_tb_nw4_\w+", "after"))),
    Run(r"pacecar analyze .*"),
    Run(r"pacecar trace JOB.*", ("job",), says=r"json"),
    Run(r"pacecar tune .*", ("job",), (("4MiB", "512KiB"),)),  # the job's model has less than 4 MiB
    Run(r"pacecar job .*", ("job",), fill={r"s3://bucket/run": lambda world: f"file://{world.folder}"}),
    Run(r"pacecar knobs .*", fill={"4f2a91": lambda world: world.remembered()}),
    Run(r"(sudo )?pacecar dump --note .*", ("job",), (("^sudo ", ""),)),
    Run(r"pacecar dump --show FILE.*", ("job",), fill={"FILE": lambda world: str(world.recording())}),
    Run(r"pacecar deploy (show|export|man|completion).*", exchange=((r"~/\.local/share", "share"),)),
    Run(r"mkdir -p ~/.*", exchange=((r"~/\.local/share", "share"),)),
    Run(r"pacecar dashboards export .*"),
    Run(r"pacecar dashboards push .*", exchange=(
        (r"^(.* --user .*)$", r"GRAFANA_PASSWORD=secret GRAFANA_TOKEN= \1"),
        (r"^pacecar", "GRAFANA_TOKEN=secret pacecar"),
    ), fill={r"https://grafana\.example\.com|\bURL\b": lambda world: world.grafana()}),
    Run(r"torchrun .* -m pacecar bench net", append="-e 4K -n 3 -w 0", says="busbw"),
    Run(r"torchrun .* -m pacecar preflight.*", says="# preflight: 2 ranks",
        exchange=((r" +#.*", ""), ("per-node 8", "per-node 2"), ("$", " --tolerance 0.9"))),
    Run(r"pacecar preflight --local.*", exchange=((r" --reference \S+", ""),), says="no peer to compare with"),
    Run(r"pacecar run .*--print-(env|pth).*", exchange=((r"\$site", "tmp"),)),
    Run(r"pacecar run -- COMMAND\.\.\.", exchange=((r"COMMAND\.\.\.", "python -c 'print(42)'"),), says="42"),
    Run(r"pacecar run .*--tune .*-- torchrun .*train\.py.*", ("daemon",), says=r"pacecar: measures job .* mode exact"),
    # One rank suffices where ranks agree on nothing, and is faster.
    Run(r"pacecar run .*-- torchrun .*train\.py.*", ("daemon",), ((r"--nproc-per-node \d", "--nproc-per-node 1"),),
        says=r"pacecar: measures job"),
    # Tools that are here.
    Run(r"curl -s .* [|] head", ("job",), exits=(0, 23), says="pacecar"),  # 23: head left first
    Run(r"curl -s .*", ("job",), says=r"pacecar|ok"),
    Run(r"python3 -m venv pacecar-env", append="--without-pip"),
    Run(r"\. pacecar-env/bin/activate", ("environment",)),
    Run(r"site=\$\(python .*\)"),
    Run(r"export \w+=.*|(PACECAR_\w+=\S+ ?)+"),
    Run(r"make help", says="make run"),
    Run(r"promtool check config prometheus\.yml", exchange=(
        (r"^", "pacecar deploy show prometheus/prometheus.yml > prometheus.yml; "),)),
    Run(r"promtool check rules .*", exchange=(
        (r"^", "pacecar dashboards export pacecar-dashboards; "),), says="SUCCESS"),
    Run(r"promtool query instant .*", ("prometheus",), says="pacecar_build_info",
        fill={"9090": lambda world: str(world.prometheus_port)}),
    Run(r"systemd-analyze security --offline=true .*", says="exposure level"),
    # Others' tools and others' machines.
    Cannot(r"systemd-analyze verify .*", "wants /opt/pacecar to be there; tests/deploy verifies it with another path",
           lambda command: there(shlex.split(command)[2])),
    Cannot(r"pip install .*", NO_INDEX, pip),
    Cannot(r"make .*", LONG, make),
    Cannot(r"sudo (python3 -m venv /opt/pacecar|/opt/pacecar/bin/pip install .*)", ROOT_ONLY, venv_pip),
    Cannot(r"sudo cp .*", ROOT_ONLY, copy),
    Cannot(r"sudo rm -r?f .*", ROOT_ONLY, remove),
    Cannot(r"sudo apt install \./dist/.*", ROOT_ONLY + "; tests/deploy installs it below a scratch root", deb),
    Cannot(r"man pacecar.*", "needs man, and MANPATH; tests/deploy shows the pages", man),
    Cannot(r"helm .*", NO_CLUSTER, helm),
    Cannot(r"sudo userdel pacecar", ROOT_ONLY, sysuser),
    Cannot(r"sudo systemctl .*", "systemd does not run here; verbs and units are checked", systemctl),
    Cannot(r"sudo systemd-sysusers", ROOT_ONLY + "; tests/deploy runs it below a scratch root", nothing_more),
    Cannot(r"journalctl .*", "there is no journal here; the unit is checked", journal),
    Cannot(r"docker .*", NO_DOCKER, docker),
    Cannot(r"syft .*", "syft reads an image, and there is none", tag_is_ours),
    Cannot(r"kubectl .*", NO_CLUSTER, kubectl),
    Cannot(r"sbatch .*", NO_SLURM, sbatch),
    Cannot(r"srun .*", NO_SLURM, inside),
)  # fmt: skip


def recipe_for(command: str) -> Run | Cannot | None:
    """Return the first recipe that matches the whole command, or None."""
    return next((recipe for recipe in RECIPES if re.fullmatch(recipe.pattern, command)), None)
