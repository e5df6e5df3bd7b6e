"""Only torch's private names in the table are used, none at import; a missing one disables only its feature."""

from __future__ import annotations

import ast
import functools
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from pacecar import torch_internals
from pacecar.torch_internals import FEATURES, INTERNALS, Internal

ROOT = Path(__file__).resolve().parent.parent.parent
JOB = ROOT / "tests" / "compatibility" / "job.py"

SOURCES = sorted(
    path
    for room in ("pacecar", "adapters", "commands", "controller", "job", "profiler")
    for path in (ROOT / room).rglob("*.py")
    if path != ROOT / "pacecar" / "torch_internals.py" and not any(parent.is_symlink() for parent in path.parents)
)

BY_NAME_TO_DYNAMO = {("profiler/timing/torch_compile.py", "torch._dynamo.graph_break")}
"""While dynamo traces a line it knows the call by this name; that it is there is asked just before."""

OF_OTHERS = {
    "_asdict", "_fields", "_replace", "_getframe", "_current_frames", "_exit",  # python's own
    "_make_closure", "_on_before_fetch", "_on_after_fetch", "_zero_grad_fn", "_results", "_step_fn", "_backward_fn",
    "_should_accumulate", "_training_step", "_prepare_inputs", "_save_checkpoint",  # lightning's and transformers'
}  # fmt: skip

BY_STRING = {"getattr", "hasattr", "setattr", "delattr"}

DUNDERS_OF_DETAIL = {"__func__", "__code__", "__self__", "__wrapped__"}


# --- the source -----------------------------------------------------------------------------------------------------


@functools.cache
def own_names() -> set[str]:
    """Return the private names that our own classes and modules define."""
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef):
                found.add(node.name)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
                found.add(node.attr)
    return found


def is_own(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def torch_names(tree: ast.AST) -> dict[str, str]:
    """Return local name -> dotted name of all that is imported from torch."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    found[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                found[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    return found


def dotted(node: ast.expr, names: dict[str, str]) -> str | None:
    """Return the dotted name of an attribute of something imported from torch; None for any other."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in names:
        return None
    return ".".join([names[node.id], *reversed(parts)])


def is_private(name: str) -> bool:
    return any(
        part in DUNDERS_OF_DETAIL or (part.startswith("_") and not part.startswith("__")) for part in name.split(".")
    )


def private_uses(path: Path) -> Iterator[tuple[int, str, bool]]:
    """Yield line, name and whether it is reached from torch itself, of each private name of others in a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    names = torch_names(tree)
    for local in names.values():
        if is_private(local):
            yield 0, local, True
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            full = dotted(node, names)
            if full is not None:
                if is_private(full):
                    yield node.lineno, full, True
            elif is_private(node.attr) and node.attr not in DUNDERS_OF_DETAIL and not is_own(node.value):
                yield node.lineno, node.attr, False
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in BY_STRING:
            name = str(node.args[1].value) if isinstance(node.args[1], ast.Constant) else ""
            if is_private(name) and name not in DUNDERS_OF_DETAIL:
                yield node.lineno, name, False


@pytest.mark.slow
@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_private_name_of_torch_is_spelled_outside_the_table(path: Path) -> None:
    own, listed = own_names(), {internal.attribute for internal in INTERNALS}
    where = str(path.relative_to(ROOT))
    wrong = []
    for line, name, is_from_torch in private_uses(path):
        if is_from_torch:
            if (where, name) not in BY_NAME_TO_DYNAMO and not any(
                where == place and allowed.startswith(name) for place, allowed in BY_NAME_TO_DYNAMO
            ):
                wrong.append(f"{where}:{line}: {name}: look it up by torch_internals")
        elif name not in own | listed | OF_OTHERS:
            wrong.append(f"{where}:{line}: {name}: in no row of the table")
    assert wrong == []


def test_the_check_finds_what_it_is_for(tmp_path: Path) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(
        "import torch\nimport torch.distributed as dist\nfrom torch.nn.modules.batchnorm import _BatchNorm\n"
        "torch.autograd.Function.apply.__func__\ndist._register_comm_hook\ngetattr(ddp, '_unheard_of')\n"
    )
    assert {name for _, name, _ in private_uses(bad)} == {
        "torch.nn.modules.batchnorm._BatchNorm", "torch.autograd.Function.apply.__func__",
        "torch.distributed._register_comm_hook", "_unheard_of",
    }  # fmt: skip


@pytest.mark.full
@pytest.mark.slow
def test_importing_every_module_looks_nothing_up() -> None:
    """A name that a future torch lacks must not matter before its use."""
    script = """
import importlib, pkgutil, sys
from pacecar import torch_internals
def touched(*names):
    raise AssertionError(f"{names} at import")
for name in ("find", "need", "lacking", "own_has"):
    setattr(torch_internals, name, touched)
import pacecar, pacecar.commands, pacecar.controller, pacecar.profiler, pacecar.job.autoattach
done = 0
for package in (pacecar.profiler, pacecar.controller, pacecar.job.autoattach, pacecar.commands):
    for found in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if found.name.endswith("__main__"):
            continue
        try:
            importlib.import_module(found.name)
        except ModuleNotFoundError as error:  # an extra that is not installed
            assert not (error.name or "pacecar").startswith(("pacecar", "torch")), error
        done += 1
import pacecar.job.attach, torch
assert not torch.cuda.is_initialized()
print(done)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert int(ran.stdout) > 100


# --- the table ------------------------------------------------------------------------------------------------------


def test_every_row_says_what_is_off_or_what_is_done_instead() -> None:
    for internal in INTERNALS:
        assert bool(internal.features) != bool(internal.instead), internal.name
        assert set(internal.features) <= set(FEATURES)
    assert {feature for internal in INTERNALS for feature in internal.features} == set(FEATURES)


def test_what_is_seen_where_is_what_make_compatibility_saw() -> None:
    """The versions in the table are those of the committed runs: first and last that had the name."""
    rows = [json.loads(path.read_text()) for path in (ROOT / "tests" / "compatibility" / "ran").glob("*.json")]
    ran = [row for row in rows if not str(row["cells"].get("attach", "not run")).startswith("not run")]
    assert ran, "run `make compatibility`"
    minors = {row["version"]: ".".join(row["version"].split(".")[:2]) for row in ran}
    for internal in INTERNALS:
        if internal.owner in ("mark", "FSDPModule", "FSDPState", "FSDPParamGroup"):
            continue
        had = sorted(
            (minors[row["version"]] for row in ran if internal.name not in row["missing"]),
            key=lambda version: tuple(int(part) for part in version.split(".")),
        )
        assert (had[0], had[-1]) == internal.seen, internal.name


def test_a_name_that_is_not_in_the_table_cannot_be_looked_up() -> None:
    with pytest.raises(AssertionError, match="not in the table"):
        torch_internals.find("torch._C._nobody_knows")


@pytest.fixture
def fresh() -> Iterator[None]:
    torch_internals.forget()
    yield
    torch_internals.forget()


@pytest.mark.usefixtures("fresh")
def test_a_missing_name_is_told_once_with_version_consequence_and_remedy(caplog: pytest.LogCaptureFixture) -> None:
    torch = pytest.importorskip("torch")
    torch_internals.suppose_missing(["torch._C._autograd._enable_profiler"])
    with caplog.at_level("WARNING", logger="pacecar"):
        reason = torch_internals.lacking("windows")
        assert torch_internals.lacking("windows") == reason
    version = torch.__version__.partition("+")[0]
    assert reason == (
        f"torch {version} has no torch._C._autograd._enable_profiler: no exact windows are taken, so ledgers are not"
        " exact (use torch 2.4 to 2.15, or a newer pacecar)"
    )
    assert [record.getMessage() for record in caplog.records] == [f"pacecar: {reason}"]
    assert torch_internals.lacking("flops") is None


@pytest.mark.usefixtures("fresh")
def test_what_was_found_is_remembered() -> None:
    pytest.importorskip("torch")
    name = "torch._C._len_torch_dispatch_stack"
    assert torch_internals.find(name) is torch_internals.find(name)
    torch_internals.suppose_missing([name])
    assert torch_internals.find(name) is None
    with pytest.raises(torch_internals.InternalMissingError, match=name):
        torch_internals.need(name)


@pytest.mark.usefixtures("fresh")
def test_without_the_mark_of_a_scheduler_the_global_batch_stays_as_it_is() -> None:
    pytest.importorskip("torch")
    from pacecar.controller.knobs.batch.global_batch import _scheduled_step

    step = {"scheduled step": _scheduled_step()}
    assert torch_internals.lacking("batch_samples", step) is None
    torch_internals.suppose_missing(["torch.optim.Optimizer.step._wrapped_by_lr_sched"])
    assert "the global batch is not tuned" in str(torch_internals.lacking("batch_samples", step))


@pytest.mark.usefixtures("fresh")
def test_without_the_mark_of_synchronized_gradients_run_does_not_tune_fsdp2() -> None:
    pytest.importorskip("torch")
    group = {"FSDPParamGroup": SimpleNamespace(reduce_grads=True)}
    assert torch_internals.lacking("run_fsdp", group) is None
    torch_internals.suppose_missing(["torch.distributed.fsdp.FSDPParamGroup.reduce_grads"])
    assert "`pacecar run` does not tune FSDP2" in str(torch_internals.lacking("run_fsdp", group))


# --- jobs without one of the names ----------------------------------------------------------------------------------

DDP = {"steps": 40, "knobs": ["bucket_bytes", "first_bucket_bytes"], "mode": "lossy", "crew": True}
KINDS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "plain": (1, "plain", {"steps": 12, "trace": True}),
    "ddp": (2, "ddp", DDP),
    "fsdp2": (2, "fsdp2", {"steps": 24}),
    "unwatched": (1, "unwatched", {"steps": 10}),
}

OF_RANKS = ("ranks", "last_collective", "agreement", "ddp_buckets", "compression", "micro_batch", "loader")
DDP_KNOBS = {"bucket_bytes", "first_bucket_bytes", "compression"}
KNOBS = {
    "ddp_buckets": DDP_KNOBS, "compression": {"compression"}, "micro_batch": {"micro_batch"},
    "loader": {"loader_workers", "loader_prefetch"}, "fsdp_prefetch": {"fsdp_prefetch"},
    "fsdp_reshard": {"fsdp_reshard"}, "module_calls": {"backward", "flops"},
    "agreement": DDP_KNOBS | {"micro_batch", "loader_workers", "loader_prefetch"},
}  # fmt: skip


def kinds_of(internal: Internal) -> list[str]:
    """Return the jobs that show what is off without a name."""
    if internal.owner == "mark" or internal.features in (("batch_samples",), ("checkpointed_blocks",)):
        return []  # a mark is absent unless its thing is in use; the others have tests of their own
    kinds = {
        "ddp" if feature in OF_RANKS else "fsdp2" if feature.startswith("fsdp") else
        "unwatched" if feature in ("run_models", "run_waits") else "plain"
        for feature in internal.features if feature not in ("run_gathering", "run_fsdp")
    }  # fmt: skip
    if not internal.features:
        kinds = {"ddp" if any(w in internal.name for w in ("istributed", "_foreach")) else "plain"}
    return sorted(kinds)


CASES = [(internal, kind) for internal in INTERNALS for kind in kinds_of(internal)]


def _parameters() -> Iterator[Any]:
    """Yield the cases; in each kind of job the first that has a feature decides, the others go the same way."""
    decided: set[str] = set()
    for internal, kind in CASES:
        decides = bool(internal.features) and kind not in decided
        if decides:
            decided.add(kind)
        marks = () if decides else (pytest.mark.full,)
        yield pytest.param(internal, kind, id=f"{internal.name}-{kind}", marks=marks)


def alive(kind: str, answer: dict[str, Any]) -> set[str]:
    """Return what a job had: features of the hook, and knobs that could be turned."""
    if kind == "plain":
        has = {"windows": answer["windows"], "flops": answer["flops"], "traces": answer["trace"].startswith("done")}
        return {name for name, there in has.items() if there} | ({"backward"} & {p[:-3] for p in answer["phases"]})
    if kind == "unwatched":
        return set() if any("does not attach" in line for line in answer["lines"]) else {"run_models"}
    found = set(answer["offered"])
    if kind == "ddp":
        found |= {"ranks"} if answer["crew"] is None else set()
        found |= {"last_collective"} if answer["sequence"] is not None else set()
    return found


@pytest.fixture(scope="module")
def answers(request: pytest.FixtureRequest) -> dict[tuple[str, str], dict[str, Any]]:
    """Return what each job answered, by the name that was taken away ("" for none) and the kind of the job.

    Those that are asked about in this session are run, no others.
    """
    pytest.importorskip("torch", reason="the extra `torch` is not installed")
    chosen = [
        (item.callspec.params["internal"], item.callspec.params["kind"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.path == request.path and "answers" in item.fixturenames
    ]
    keys: list[tuple[str, str]] = []
    cases = []
    for kind in sorted({kind for _, kind in chosen}):
        world, job, options = KINDS[kind]
        if kind != "unwatched":
            keys.append(("without pacecar", kind))
            cases.append({"world": world, "jobs": [[job, {**options, "pace": False}]]})
        keys.append(("", kind))
        cases.append({"world": world, "jobs": [[job, options]]})
    for internal, kind in chosen:
        world, job, options = KINDS[kind]
        keys.append((internal.name, kind))
        cases.append({"world": world, "jobs": [[job, {**options, "missing": [internal.name]}]]})
    ran = subprocess.run(
        [sys.executable, str(JOB), json.dumps({"cases": cases})],
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    return dict(zip(keys, map(json.loads, ran.stdout.splitlines()), strict=True))


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.parametrize(("internal", "kind"), list(_parameters()))
def test_without_a_name_the_job_trains_to_the_same_bits_and_lacks_that_feature_alone(
    internal: Internal, kind: str, answers: dict[tuple[str, str], dict[str, Any]]
) -> None:
    answer, whole = answers[internal.name, kind], answers["", kind]
    assert "raised" not in answer, answer
    bare = answers.get(("without pacecar", kind), whole)
    assert answer["losses"] == whole["losses"] == bare["losses"]
    off = set().union(*(KNOBS.get(feature, {feature}) for feature in internal.features))
    assert alive(kind, answer) == alive(kind, whole) - off
    if internal.features and kind != "unwatched":
        said = [line for line in answer["lines"] if internal.name in line]
        shown = [feature for feature in internal.features if any(FEATURES[feature] in line for line in said)]
        assert shown, answer["lines"]
    for knob in off & set(answer.get("refused", {})):
        assert internal.name in answer["refused"][knob]
