"""NCCL's RAS on loopback: it speaks the protocol of src/ras/client_support.cc, and can be odd in every part of it."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

__all__ = ["Ras", "ras_answer", "serve_ras"]


def ras_answer(
    launched: Mapping[int, int],
    *,
    missing: Mapping[int, bool] | None = None,
    unresponsive: bool = True,
    hash: str = "0xa1",
    has_comma: bool = True,
) -> bytes:
    """Return RAS's JSON of one communicator: rank -> all-reduces, and of missing ranks whether they are given up.

    `unresponsive`: whether the missing ranks' processes did not answer; `has_comma`: 2.28.7 and 2.28.9 leave one out.
    """
    missing = missing or {}
    ranks = [
        f"""
        {{
          "rank": {rank},
          "host": "10.0.0.{rank}",
          "pid": {1000 + rank},
          "cuda_dev": {rank},
          "nvml_dev": {rank},
          "status": {{
            "init_state": 0,
            "async_error": 0,
            "finalize_called": false,
            "destroy_flag": false,
            "abort_flag": false
          }},
          "collective_counts": {{
            "Broadcast": 1,
            "AllReduce": {count}
          }}
        }}"""
        for rank, count in launched.items()
    ]
    absent = [
        f"""
        {{
          "rank": {rank},
          "host": "10.0.0.{rank}",
          "pid": {1000 + rank},
          "cuda_dev": {rank},
          "nvml_dev": {rank}{"," if has_comma else ""}
          "status": {{
            "unresponsive": {json.dumps(unresponsive)},
            "considered_dead": {json.dumps(is_dead)}
          }}
        }}"""
        for rank, is_dead in missing.items()
    ]
    return f"""{{
  "nccl_version": "2.28.9",
  "cuda_runtime_version": 12090,
  "cuda_driver_version": 13000,
  "timestamp": "2026-11-28 04:00:00",
  "communicators_count": 1,
  "communicators": [
    {{
      "hash": "{hash}",
      "secondary_hash": "0x1:0x2",
      "size": {len(launched) + len(missing)},
      "ranks_count": {len(launched)},
      "missing_ranks_count": {len(missing)},
      "ranks": [{",".join(ranks)}

      ],
      "missing_ranks": [{",".join(absent)}
      ]
    }}
  ],
  "ras": {{
    "collection_time_sec": 0.001,
    "timeouts_count": 0
  }}
}}
""".encode()


@dataclass
class Ras:
    """A server's replies; `asked` are the lines it got."""

    answers: list[bytes]
    """The answers to status requests, in turn; the last one is repeated."""
    replies: dict[str, bytes] = field(default_factory=dict)
    """First word of a command, in lower case -> another reply than RAS's own; b"" closes the connection."""
    is_silent: bool = False
    asked: list[str] = field(default_factory=list)
    port: int = 0

    @property
    def address(self) -> tuple[str, int]:
        return "127.0.0.1", self.port

    def serve(self, connection: socket.socket) -> None:
        with connection, connection.makefile("rwb") as stream:
            for raw in stream:
                line = raw.decode().strip()
                self.asked.append(line)
                word = line.split()[0].lower()
                if self.is_silent:
                    continue
                if word in self.replies:
                    stream.write(self.replies[word])
                    if not self.replies[word]:
                        return
                elif word == "client":
                    stream.write(b"SERVER PROTOCOL 2\n")
                elif word in ("timeout", "set"):
                    stream.write(b"OK\n")
                else:
                    stream.write(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0])
                    return
                stream.flush()


@contextmanager
def serve_ras(*answers: bytes, replies: Mapping[str, bytes] | None = None, is_silent: bool = False) -> Iterator[Ras]:
    """Serve at a free port of loopback while the block runs."""
    ras = Ras(list(answers), dict(replies or {}), is_silent)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        ras.port = listener.getsockname()[1]

        def accept() -> None:
            while True:
                try:
                    connection, _ = listener.accept()
                except OSError:  # closed
                    return
                threading.Thread(target=ras.serve, args=(connection,), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        yield ras
        listener.shutdown(socket.SHUT_RDWR)
