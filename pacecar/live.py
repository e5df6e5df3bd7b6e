"""Keeps the deprecated path of `pacecar.records.status_document` working, and warns once when it is imported."""

from __future__ import annotations

import warnings

from pacecar.records.status_document import *  # noqa: F403  all that was public here

warnings.warn("pacecar.live is deprecated: import pacecar.records.status_document", DeprecationWarning, stacklevel=2)
