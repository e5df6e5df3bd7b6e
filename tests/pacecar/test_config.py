"""Later layers of the configuration win, and no setting is ignored."""

from __future__ import annotations

from pathlib import Path

import pytest

from pacecar.config import CONFIG_BYTES_MAX, Config, ConfigError, default_socket, load_config


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "pacecar.toml"
    file.write_text(text)
    return file


def test_the_file_gives_way_to_the_environment_and_that_to_flags(tmp_path: Path) -> None:
    file = written(tmp_path, '[daemon]\nport = 1\nhost = "a"\nperiod_seconds = 2.5\nlog_level = "debug"\n')
    environ = {"PACECAR_DAEMON_PORT": "2", "PACECAR_DAEMON_HOST": "b", "UNRELATED": "x"}
    config = load_config(file, environ=environ, flags={"daemon": {"port": 3, "host": None}})
    assert config.daemon.port == 3
    assert config.daemon.host == "b"
    assert config.daemon.period_seconds == 2.5
    assert config.tune == Config().tune


def test_a_byte_order_mark_is_no_part_of_the_file_and_utf_16_is_named(tmp_path: Path) -> None:
    text = '[daemon]\nport = 7\nhost = "ä"\n'
    file = tmp_path / "pacecar.toml"
    file.write_text(text, encoding="utf-8-sig")
    assert load_config(file, environ={}).daemon.port == 7
    file.write_bytes(b"\xef\xbb\xbf")
    assert load_config(file, environ={}) == load_config(environ={"PACECAR_CONFIG": ""})
    for encoding in ("utf-16", "utf-16-be"):
        file.write_bytes((b"\xfe\xff" if encoding == "utf-16-be" else b"") + text.encode(encoding))
        with pytest.raises(ConfigError, match=r"pacecar\.toml: not valid TOML: the file is UTF-16"):
            load_config(file, environ={})


def test_the_environment_can_name_the_file_and_an_argument_goes_before_it(tmp_path: Path) -> None:
    file = written(tmp_path, "[hook]\nwindow_interval_steps = 7\n")
    assert load_config(environ={"PACECAR_CONFIG": str(file)}).hook.window_interval_steps == 7
    other = tmp_path / "other.toml"
    other.write_text("[hook]\nwindow_interval_steps = 8\n")
    assert load_config(other, environ={"PACECAR_CONFIG": str(file)}).hook.window_interval_steps == 8


def test_the_environment_is_text_and_becomes_what_the_key_is() -> None:
    environ = {
        "PACECAR_HOOK_ENABLED": "false",
        "PACECAR_HOOK_OVERHEAD_BUDGET": "0.5",
        "PACECAR_TUNE_KNOBS": "bucket_bytes",
        "PACECAR_DAEMON_DISABLE": "gpu,disk",
        "PACECAR_JOB": "a job's name is not a section",
    }
    config = load_config(environ=environ)
    assert config.hook.enabled is False
    assert config.hook.overhead_budget == 0.5
    assert config.tune.knobs == ("bucket_bytes",)
    assert config.daemon.disable == ("gpu", "disk")


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[deamon]\nport = 1\n", ["[deamon]", "daemon, otlp, hook, tune"]),
        ("[daemon]\nprot = 1\n", ["[daemon]", "'prot'", "period_seconds"]),
        ('[daemon]\nport = "9850"\n', ["port", "'9850'", "int"]),
        ("[daemon]\nport = 70000\n", ["port = 70000", "65535"]),
        ('[tune]\nmode = "fast"\n', ["mode", "'fast'", "allowed: off, advise, exact, lossy, adaptive"]),
        ('[tune]\npolicy = "tpe"\n', ["[tune] policy", "'tpe'", "allowed: pacecar, throughput-doubling"]),
        ("daemon = 5\n", ["[daemon]"]),
        ("[hook]\noverhead_budget = 1.5\n", ["overhead_budget"]),
        ("[daemon\n", ["not valid TOML"]),
    ],
)
def test_a_wrong_line_in_the_file_is_an_error_that_names_file_and_key(
    tmp_path: Path, text: str, named: list[str]
) -> None:
    file = written(tmp_path, text)
    with pytest.raises(ConfigError) as caught:
        load_config(file, environ={})
    for part in [str(file), *named]:
        assert part in str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "named"),
    [
        ("PACECAR_DAEMON_PROT", "1", ["'prot'", "port"]),
        ("PACECAR_DEAMON_PORT", "1", ["[deamon]"]),
        ("PACECAR_DAEMON_PORT", "many", ["'many'"]),
        ("PACECAR_TUNE_KNOBS", "bucket_bytes,color", ["color", "allowed: micro_batch, "]),
    ],
)
def test_a_wrong_variable_is_an_error_that_names_it(variable: str, value: str, named: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(environ={variable: value})
    for part in [variable, *named]:
        assert part in str(caught.value)


def test_a_wrong_flag_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"flags: .*period_seconds"):
        load_config(environ={}, flags={"daemon": {"period_seconds": 0.0}})


def test_bounds_that_cross_are_an_error_also_when_two_layers_disagree(tmp_path: Path) -> None:
    file = written(tmp_path, "[tune]\nmicro_batch_min = 8\n")
    with pytest.raises(ConfigError, match="micro_batch_min is above micro_batch_max"):
        load_config(file, environ={"PACECAR_TUNE_MICRO_BATCH_MAX": "4"})


def test_a_file_that_cannot_be_read_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"absent\.toml: cannot be read: No such file"):
        load_config(tmp_path / "absent.toml", environ={})
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        load_config(tmp_path, environ={})


def test_an_endless_file_is_refused_and_not_read_to_its_end() -> None:
    with pytest.raises(ConfigError, match=f"larger than {CONFIG_BYTES_MAX} bytes"):
        load_config("/dev/zero", environ={})


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "binary.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(file, environ={})


def test_users_do_not_share_a_socket_unless_the_system_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.geteuid", lambda: 1234)
    assert default_socket({"XDG_RUNTIME_DIR": "/run/user/1234"}) == "/run/user/1234/pacecar.sock"
    assert default_socket({}) == "/tmp/pacecar-1234/pacecar.sock"
    monkeypatch.setattr("os.geteuid", lambda: 0)
    assert default_socket({}) == "/run/pacecar/pacecar.sock"
