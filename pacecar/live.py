"""Keeps the deprecated path of `pacecar.records.status_document` working: its names of then, and a warning."""

from __future__ import annotations

import warnings

from pacecar.records.status_document import (
    VERSION,
    Host,
    Ladder,
    LateRank,
    Move,
    Rank,
    Saving,
)
from pacecar.records.status_document import (
    CollectorStatus as Collector,
)
from pacecar.records.status_document import (
    DaemonStatus as Daemon,
)
from pacecar.records.status_document import (
    GpuStatus as Gpu,
)
from pacecar.records.status_document import (
    HangStatus as Hang,
)
from pacecar.records.status_document import (
    JobStatus as Job,
)
from pacecar.records.status_document import (
    LinkStatus as Link,
)
from pacecar.records.status_document import (
    StatusDocument as Document,
)
from pacecar.records.status_document import (
    StatusHistory as History,
)
from pacecar.records.status_document import (
    TunerView as Tuner,
)

__all__ = [
    "VERSION",
    "Collector",
    "Daemon",
    "Document",
    "Gpu",
    "Hang",
    "History",
    "Host",
    "Job",
    "Ladder",
    "LateRank",
    "Link",
    "Move",
    "Rank",
    "Saving",
    "Tuner",
]

warnings.warn("pacecar.live is deprecated: import pacecar.records.status_document", DeprecationWarning, stacklevel=2)
