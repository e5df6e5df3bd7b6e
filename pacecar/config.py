"""Loads the configuration from a TOML file, the environment and flags (later ones win), and checks every key.

A misspelt key must not be ignored silently, because the user would rely on it.  So an unknown key is an error that
names the file, the key and the keys that exist, and so is a value of the wrong type or out of range.  Each section is a
typed record that holds its bounds and defaults.

    [daemon]              PACECAR_DAEMON_PORT=9850            --port 9850
    [otlp]                PACECAR_OTLP_ENDPOINT=http://...
    [hook]                PACECAR_HOOK_OVERHEAD_BUDGET=0.01   attach(overhead_budget=0.01)
    [tune]                PACECAR_TUNE_MODE=exact             attach(tune="exact")
"""

from __future__ import annotations

import codecs
import os
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta

from pacecar.knobs import KnobName
from pacecar.records.ranges import Label, Ratio

__all__ = [
    "Config",
    "ConfigError",
    "DaemonConfig",
    "HookConfig",
    "OtlpConfig",
    "TuneConfig",
    "config_path",
    "default_recordings",
    "default_socket",
    "load_config",
]

CONFIG_BYTES_MAX = 1024 * 1024
"""A larger file is not a configuration but a wrong path (a log, a device)."""

SYSTEM_FILE = Path("/etc/pacecar/pacecar.toml")

LimitSeconds = Annotated[float, Meta(ge=1.0, le=1e9)]
"""How long something may last.  The upper bound, 30 years, means "for ever"."""

PositiveInt = Annotated[int, Meta(ge=1, le=10**12)]
FlopsEach = Annotated[float, Meta(gt=0.0, le=1e18)]
PeakFlops = Annotated[float, Meta(ge=1.0, le=1e18)]
"""At least 1, because code divides by it as a whole number.  The fastest board of 2026 does 2e16 per second."""


class ConfigError(ValueError):
    """The configuration cannot be used.  The message names the place and what is allowed there."""


def default_socket(environ: Mapping[str, str] = os.environ) -> str:
    """Return the default path of the daemon's socket: the system's if it exists, else the user's own.

    A daemon that root runs (systemd) listens in /run/pacecar.  A user's daemon cannot write there and uses
    $XDG_RUNTIME_DIR, or /tmp with the uid in the name, so that users do not connect to each other's daemon.
    `daemon_peer` checks who owns the daemon that listens there.
    """
    system = "/run/pacecar/pacecar.sock"
    if os.geteuid() == 0 or os.path.exists(system):
        return system
    runtime = environ.get("XDG_RUNTIME_DIR")
    if runtime and not _is_anothers(runtime):
        return f"{runtime}/pacecar.sock"
    return f"/tmp/pacecar-{os.geteuid()}/pacecar.sock"


def _is_anothers(folder: str) -> bool:
    """Return whether `folder` belongs to another user: su(1) leaves the old $XDG_RUNTIME_DIR in the environment."""
    try:
        return os.stat(folder).st_uid != os.geteuid()
    except OSError:
        return False


def default_recordings(environ: Mapping[str, str] = os.environ) -> str:
    """Return the default folder for recordings: where the service manager or the user keeps state.

    systemd passes the folders of StateDirectory= in $STATE_DIRECTORY, separated by colons (systemd.exec(5)).
    """
    state = environ.get("STATE_DIRECTORY", "").partition(":")[0]
    if state:
        return f"{state}/recordings"
    if os.geteuid() == 0:
        return "/var/lib/pacecar/recordings"
    home = environ.get("XDG_STATE_HOME") or f"{environ.get('HOME') or f'/tmp/pacecar-{os.geteuid()}'}/.local/state"
    return f"{home}/pacecar/recordings"


class DaemonConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [daemon] section."""

    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 9850
    socket: str = msgspec.field(default_factory=default_socket)
    period_seconds: Annotated[float, Meta(ge=0.1, le=60.0)] = 1.0
    jitter_ratio: Annotated[float, Meta(ge=0.0, le=0.5)] = 0.1
    glances_per_second: Annotated[float, Meta(ge=0.0, le=10.0)] = 10.0
    window_seconds: Annotated[float, Meta(ge=1.0, le=300.0)] = 15.0
    cpu_budget: Ratio = 0.05
    mounts: tuple[str, ...] = ()
    disable: tuple[str, ...] = ()
    proc_root: str = "/proc"
    sys_root: str = "/sys"
    jobs_max: Annotated[int, Meta(ge=1, le=10_000)] = 64
    ranks_max: Annotated[int, Meta(ge=1, le=100_000)] = 1024
    job_forget_seconds: LimitSeconds = 900.0
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    web_config_file: str | None = None
    socket_mode: Annotated[str, Meta(pattern="^0?[0-7]{3}$")] | None = None
    socket_group: str | None = None
    pod_logs: str = "/var/log/pods"
    recorder: bool = True
    recorder_seconds: Annotated[float, Meta(ge=10.0, le=3600.0)] = 300.0
    recorder_bytes: Annotated[int, Meta(ge=1_000_000, le=1_000_000_000)] = 32_000_000
    recordings: str = msgspec.field(default_factory=default_recordings)
    recordings_bytes: Annotated[int, Meta(ge=1_000_000, le=10**15)] = 256_000_000
    stall_seconds: LimitSeconds = 300.0

    def __post_init__(self) -> None:
        if self.recordings_bytes < self.recorder_bytes:
            raise ValueError("recordings_bytes is below recorder_bytes: one recording would not fit")


class OtlpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [otlp] section: where the daemon pushes its metrics."""

    endpoint: str | None = None
    period_seconds: Annotated[float, Meta(ge=1.0, le=3600.0)] = 15.0
    timeout_seconds: Annotated[float, Meta(ge=0.1, le=300.0)] = 10.0

    def __post_init__(self) -> None:
        if self.endpoint is not None:
            url = urlsplit(self.endpoint)
            if url.scheme not in ("http", "https") or not url.hostname:
                raise ValueError(f"[otlp] endpoint {self.endpoint!r} is not an http:// or https:// address")


class HookConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [hook] section: what the hook in a training process may do."""

    enabled: bool = True
    socket: str = msgspec.field(default_factory=default_socket)
    overhead_budget: Ratio = 0.01
    windows: bool = True
    window_warmup_steps: PositiveInt = 3
    window_interval_steps: PositiveInt = 50
    expected_seconds: LimitSeconds | None = None
    expected_steps: PositiveInt | None = None
    vitals_interval_steps: PositiveInt = 20
    count_flops: bool = True
    flops_per_sample: FlopsEach | None = None
    flops_per_token: FlopsEach | None = None
    peak_flops_per_second: PeakFlops | None = None
    job: Label | None = None
    run_dir: str | None = None
    crew: bool = True
    crew_period_steps: Annotated[int, Meta(ge=1, le=1024)] = 4
    cross_rank_windows: bool = True
    hang_seconds: LimitSeconds = 120.0


class TuneConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The [tune] section: how far the controller may go."""

    mode: Literal["off", "advise", "exact", "lossy", "adaptive"] = "exact"
    policy: Literal["pacecar", "throughput-doubling"] = "pacecar"
    exploration_budget: Ratio = 0.01
    warmup_steps: PositiveInt = 10
    dead_band: Ratio = 0.01
    false_accept_rate: Annotated[float, Meta(gt=0.0, le=0.5)] = 0.05
    bucket_bytes_min: PositiveInt = 256 * 1024
    bucket_bytes_max: PositiveInt = 256 * 1024 * 1024
    micro_batch_min: PositiveInt = 1
    micro_batch_max: PositiveInt = 65_536
    micro_tokens_min: PositiveInt = 1
    micro_tokens_max: PositiveInt = 16_777_216
    first_bucket_bytes_min: PositiveInt = 64 * 1024
    first_bucket_bytes_max: PositiveInt = 256 * 1024 * 1024
    loader_workers_min: Annotated[int, Meta(ge=0, le=1024)] = 1
    loader_workers_max: Annotated[int, Meta(ge=0, le=1024)] = 32
    loader_prefetch_min: PositiveInt = 1
    loader_prefetch_max: Annotated[int, Meta(ge=1, le=1024)] = 16
    gc_interval_min: Annotated[int, Meta(ge=0, le=65_536)] = 0
    gc_interval_max: Annotated[int, Meta(ge=0, le=65_536)] = 256
    loader_redraw: bool = False
    batch_samples_min: PositiveInt = 1
    batch_samples_max: PositiveInt = 1_048_576
    compression: tuple[Literal["bf16", "fp16", "powersgd", "topk"], ...] = ("bf16", "fp16")
    topk_ratio: Annotated[float, Meta(gt=0.0, le=0.5)] = 0.01
    powersgd_rank: Annotated[int, Meta(ge=1, le=64)] = 2
    learning_rate_rule: Literal["none", "linear", "sqrt", "adascale"] = "none"
    scheduler_by_samples: bool = False
    at_forward: bool = False
    meet_seconds: Annotated[float, Meta(gt=0.0, le=600.0)] = 30.0
    remember: bool = True
    knobs_file: str | None = None
    knobs: tuple[KnobName, ...] = get_args(KnobName)

    def __post_init__(self) -> None:
        for low in (name for name in self.__struct_fields__ if name.endswith("_min")):
            high = low.removesuffix("min") + "max"
            if getattr(self, low) > getattr(self, high):
                raise ValueError(f"{low} is above {high}")


class Config(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """All sections."""

    daemon: DaemonConfig = msgspec.field(default_factory=DaemonConfig)
    otlp: OtlpConfig = msgspec.field(default_factory=OtlpConfig)
    hook: HookConfig = msgspec.field(default_factory=HookConfig)
    tune: TuneConfig = msgspec.field(default_factory=TuneConfig)


_SECTIONS: dict[str, type[msgspec.Struct]] = {
    "daemon": DaemonConfig,
    "otlp": OtlpConfig,
    "hook": HookConfig,
    "tune": TuneConfig,
}
_ENV_PREFIX = "PACECAR_"
_ENV_OTHER = frozenset({"PACECAR_ATTEMPT", "PACECAR_CONFIG", "PACECAR_JOB", "PACECAR_RUN"})

S = TypeVar("S", bound=msgspec.Struct)


def config_path(file: str | os.PathLike[str] | None = None, *, environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file that `load_config` reads; only the system's, the last choice, may be missing."""
    return Path(file or environ.get("PACECAR_CONFIG") or SYSTEM_FILE)


def load_config(
    file: str | os.PathLike[str] | None = None,
    *,
    environ: Mapping[str, str] = os.environ,
    flags: Mapping[str, Mapping[str, Any]] | None = None,
) -> Config:
    """Return the configuration from a TOML file, the environment and flags; later ones win.

    Without `file`, read $PACECAR_CONFIG, else /etc/pacecar/pacecar.toml if it exists.  `flags` is section -> key ->
    value; None means that the flag was not given.

    Raises:
        ConfigError: unreadable file, bad TOML, unknown section or key, wrong type or range.  It names file and key.
    """
    layers: list[tuple[str, dict[str, dict[str, Any]]]] = []
    path = config_path(file, environ=environ)
    if file or environ.get("PACECAR_CONFIG") or path.exists():
        layers.append((str(path), _read_toml(path)))
    layers.append(("environment", _read_environment(environ)))
    given = {s: {k: v for k, v in keys.items() if v is not None} for s, keys in (flags or {}).items()}
    layers.append(("flags", given))

    merged: dict[str, dict[str, Any]] = {name: {} for name in _SECTIONS}
    for origin, sections in layers:
        for name, keys in sections.items():
            _check_section(origin, name, keys)
            merged[name].update(keys)
    try:
        return msgspec.convert(merged, Config, strict=True)
    except msgspec.ValidationError as error:  # each layer is valid, so two layers contradict each other (min > max)
        raise ConfigError(f"configuration from {', '.join(o for o, _ in layers)}: {error}") from error


def _read_toml(path: Path) -> dict[str, dict[str, Any]]:
    try:
        with path.open("rb") as stream:
            raw = stream.read(CONFIG_BYTES_MAX + 1)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    if len(raw) > CONFIG_BYTES_MAX:
        raise ConfigError(f"{path}: larger than {CONFIG_BYTES_MAX} bytes, not a configuration file")
    if raw.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ConfigError(f"{path}: not valid TOML: the file is UTF-16; save it as UTF-8")
    try:
        return tomllib.loads(raw.decode("utf-8-sig"))  # editors on Windows write a byte order mark
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error


def _read_environment(environ: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {}
    for variable, text in sorted(environ.items()):
        if not variable.startswith(_ENV_PREFIX) or variable in _ENV_OTHER:
            continue
        section, _, key = variable.removeprefix(_ENV_PREFIX).lower().partition("_")
        if section not in _SECTIONS:
            raise ConfigError(f"environment: {variable}: no section [{section}]; there are {', '.join(_SECTIONS)}")
        struct = _SECTIONS[section]
        hints = {f.name: f for f in msgspec.structs.fields(struct)}
        if key not in hints:
            raise ConfigError(f"environment: {variable}: [{section}] has no key {key!r}; it has {', '.join(hints)}")
        value: Any = text
        if "tuple" in str(hints[key].type):
            value = [part for part in text.split(",") if part]
        try:
            sections.setdefault(section, {})[key] = msgspec.convert(value, hints[key].type, strict=False)
        except msgspec.ValidationError as error:
            raise ConfigError(f"environment: {variable}={text!r}: {_fault(error, hints[key].type)}") from error
    return sections


def _check_section(origin: str, name: str, keys: object) -> None:
    if name not in _SECTIONS:
        raise ConfigError(f"{origin}: no section [{name}]; there are {', '.join(_SECTIONS)}")
    if not isinstance(keys, dict):
        raise ConfigError(f"{origin}: {name} is a section: write [{name}] and its keys below it")
    known = {field.name: field for field in msgspec.structs.fields(_SECTIONS[name])}
    for key, value in keys.items():
        if key not in known:
            raise ConfigError(f"{origin}: [{name}] has no key {key!r}; it has {', '.join(known)}")
        try:
            msgspec.convert(value, known[key].type, strict=True)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{origin}: [{name}] {key} = {value!r}: {_fault(error, known[key].type)}") from error


def _fault(error: msgspec.ValidationError, kind: object) -> str:
    """Return msgspec's message, with the allowed words if the value must be one of a set."""
    words = _words(kind)
    is_other_word = str(error).startswith("Invalid enum value")
    return f"{error}; allowed: {', '.join(words)}" if words and is_other_word else str(error)


def _words(kind: object) -> list[str]:
    """Return every literal word that a type allows, nested ones included."""
    return [word for part in get_args(kind) for word in ([part] if isinstance(part, str) else _words(part))]
