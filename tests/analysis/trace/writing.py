"""Small traces of the tests' own making, as kineto writes them."""

import gzip
import json
import sys

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

PACKINGS = {"plain": bytes, "gzip": gzip.compress, "zstd": zstd.compress}


def kernel(start=100, dur=10, name="gemm", correlation=1, cat="kernel", ph="X", **args):
    """Return a row on device 0, stream 7."""
    where = {"device": 0, "stream": 7, "correlation": correlation}
    return {"ph": ph, "cat": cat, "name": name, "pid": 0, "tid": 7, "ts": start, "dur": dur, "args": where | args}


def host(start=90, dur=5, name="aten::mm", cat="cpu_op", tid=2, **args):
    """Return a row of process 1."""
    return {"ph": "X", "cat": cat, "name": name, "pid": 1, "tid": tid, "ts": start, "dur": dur, "args": args}


def launch(start=95, dur=2, correlation=1, name="cudaLaunchKernel", tid=2):
    """Return the call that launches the kernel of the same correlation."""
    return host(start, dur, name, "cuda_runtime", tid, correlation=correlation)


def document(events, before=None, after=None):
    """Return the bytes of a trace; `before` and `after` are the members around the events."""
    parts = ["{"]
    parts += [f'"{key}": {json.dumps(value)},' for key, value in (before or {"schemaVersion": 1}).items()]
    written = [event if isinstance(event, str) else json.dumps(event, indent=1) for event in events]
    parts.append('"traceEvents": [\n' + ",\n".join(written) + "\n]")
    parts += [f', "{key}": {json.dumps(value)}' for key, value in (after or {}).items()]
    return ("".join(parts) + "}").encode()


def codes(trace):
    """Return the warnings' codes and counts."""
    return {warning.code: warning.count for warning in trace.warnings}
