"""How does a test talk to a real Prometheus?  It starts the program, and asks it over HTTP as Grafana does.

promtool evaluates invented series and so finds what an expression means; it cannot find that a label which a daemon
serves is spelt otherwise, that a rule fails, or that a scrape drops what two series share.  This can.
"""

from __future__ import annotations

import json
import re
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from tests.kit.tools import find_tool

__all__ = ["Prometheus", "RefusedError"]

START_SECONDS_MAX = 20.0
ANSWER_SECONDS_MAX = 20.0

_LISTENS = re.compile(r'msg="Listening on" address=127\.0\.0\.1:(\d+)')
_READY = "Server is ready to receive web requests"


class RefusedError(Exception):
    """Prometheus did not carry out a query; the message is its own."""


class Prometheus:
    """A Prometheus server that scrapes `targets` (address -> labels to add).  A context manager."""

    def __init__(
        self,
        folder: Path,
        targets: Mapping[str, Mapping[str, str]],
        rules: Sequence[Path] = (),
        *,
        scrape_seconds: int = 1,
        features: Sequence[str] = (),
    ) -> None:
        self._folder = folder
        self._features = features
        self.scrape_seconds = scrape_seconds
        self._log = folder / "prometheus.log"
        self._process: subprocess.Popen[bytes] | None = None
        self.url = ""
        configuration = {
            "global": {"scrape_interval": f"{scrape_seconds}s", "evaluation_interval": f"{scrape_seconds}s"},
            "rule_files": [str(path.resolve()) for path in rules],
            "scrape_configs": [
                {
                    "job_name": "pacecar",
                    "scrape_timeout": f"{scrape_seconds}s",
                    "static_configs": [
                        {"targets": [address], "labels": dict(labels)} for address, labels in targets.items()
                    ],
                }
            ],
        }
        (folder / "prometheus.yml").write_text(json.dumps(configuration), encoding="utf-8")  # JSON is YAML

    def __enter__(self) -> Self:
        command = [str(find_tool("prometheus")), f"--config.file={self._folder / 'prometheus.yml'}"]
        command += [f"--storage.tsdb.path={self._folder / 'tsdb'}", "--web.listen-address=127.0.0.1:0"]
        command += ["--log.format=logfmt"]
        if self._features:
            command += [f"--enable-feature={','.join(self._features)}"]
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stdout=log, stderr=log)
        try:
            self.url = f"http://127.0.0.1:{self._port()}"
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.terminate()
            self._process.wait(ANSWER_SECONDS_MAX)
            self._process = None

    def instant(self, expression: str) -> list[dict[str, Any]]:
        """Return the series that `expression` has now."""
        found: list[dict[str, Any]] = self._get("query", query=expression)["result"]
        return found

    def over(self, expression: str, seconds: float) -> list[dict[str, Any]]:
        """Return the series that `expression` had at any moment of the last `seconds`."""
        now = time.time()
        found: list[dict[str, Any]] = self._get(
            "query_range", query=expression, start=f"{now - seconds}", end=f"{now}", step=f"{self.scrape_seconds}"
        )["result"]
        return found

    def label_values(self, label: str, selector: str | None = None) -> list[str]:
        """Return the values of `label` in the series that `selector` finds, as Grafana's `label_values` does."""
        found: list[str] = self._get(f"label/{label}/values", **({"match[]": selector} if selector else {}))
        return found

    def firing(self) -> list[dict[str, Any]]:
        """Return the alerts that fire, with labels and annotations."""
        return [alert for alert in self._get("alerts")["alerts"] if alert["state"] == "firing"]

    def metadata(self) -> dict[str, dict[str, str]]:
        """Return family -> what its targets say of it: type, help, unit."""
        return {name: said[0] for name, said in self._get("metadata").items()}

    def rules(self) -> list[dict[str, Any]]:
        """Return every rule with its health and its last error."""
        return [rule for group in self._get("rules")["groups"] for rule in group["rules"]]

    def _get(self, what: str, **parameters: str) -> Any:
        url = f"{self.url}/api/v1/{what}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=ANSWER_SECONDS_MAX) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as refusal:
            raise RefusedError(f"{json.load(refusal)['error']}, asked for {parameters}") from None

    def _port(self) -> int:
        assert self._process is not None
        limit = time.monotonic() + START_SECONDS_MAX
        while time.monotonic() < limit:
            said = self._log.read_text(encoding="utf-8")
            found = _LISTENS.search(said)
            if found and _READY in said:
                return int(found[1])
            assert self._process.poll() is None, said
            time.sleep(0.05)
        raise AssertionError(self._log.read_text(encoding="utf-8"))
