"""A file at a URL, opened with fsspec: s3, gs, hf, http, memory and whatever else has a driver.

A driver's own exceptions become OSError here, so that a remote file fails as a local one does.  Credentials and
endpoints are the driver's: its environment variables, or fsspec's configuration.

Left out: which files there are (`reading.trace_paths`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, BinaryIO, cast
from urllib.parse import urlsplit

__all__ = ["TracePlace", "Url", "driver_errors", "place_of"]

_CHAIN = re.compile(r"::(?=[a-z][a-z0-9+]*://)")
_LOGIN = re.compile(r"(?<!github)://[^/:]*:[^/]*@")
"""A user and a password; in "github://owner:repository@branch" this is where the files are."""
_WEB_URL = re.compile(r"https?://[^\s'\"]+")

FSSPEC_MISSING = "opening URLs needs fsspec and the driver of the store: pip install 'pacecar[remote]', and s3fs for s3"


@dataclass(frozen=True)
class Url(os.PathLike[str]):
    """A file at `text`.  `size` is in bytes, 0 if unknown; `version` changes with the content, "" if unknown."""

    text: str
    size: int = field(default=0, compare=False)
    version: str = field(default="", compare=False)

    def __str__(self) -> str:
        return self.text

    def __fspath__(self) -> str:
        return self.shown

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.shown.rstrip("/").rpartition("/")[2]

    @cached_property
    def shown(self) -> str:
        """The URL without user, password and query, which may hold a signature."""
        if len(chain := _CHAIN.split(self.text)) > 1:
            return "::".join(Url(each).shown for each in chain)
        try:
            parts = urlsplit(self.text)
        except ValueError:
            return self.text.partition("?")[0]
        if parts.scheme not in ("http", "https"):  # elsewhere `?` and `@` may belong to the name
            return _LOGIN.sub("://", self.text)
        return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl()

    def open(self, mode: str = "rb") -> BinaryIO:
        """Return the bytes as a file that can be read, and set back to its beginning.  Raises OSError."""
        assert mode == "rb"
        return cast(BinaryIO, _RemoteBytes(self))

    def driver(self) -> tuple[Any, str]:
        """Return fsspec's file system of this URL, and the path there.  Raises OSError."""
        with driver_errors(self):
            try:
                from fsspec.core import url_to_fs
            except ImportError:
                raise OSError(FSSPEC_MISSING) from None
            found: tuple[Any, str] = url_to_fs(self.text)
            return found


TracePlace = Path | Url
"""Where a trace is."""


def place_of(text: str) -> TracePlace:
    """Return the place that a user typed."""
    return Url(text) if "://" in text else Path(text)


@contextmanager
def driver_errors(url: Url) -> Iterator[None]:
    """Turn any exception of a driver into an OSError with one line, without the URL's secrets."""
    try:
        yield
    except OSError as error:
        if error.strerror or not str(error):
            raise OSError(error.errno, error.strerror or type(error).__name__) from error
        raise OSError(_line(error, url)) from error
    except Exception as error:  # drivers raise their own library's classes
        raise OSError(_line(error, url)) from error


def _line(error: BaseException, url: Url) -> str:
    if isinstance(error, FileNotFoundError):
        cause = error.__cause__  # the driver of web servers calls every failure a missing file
        if cause is None or not type(cause).__module__.startswith("aiohttp."):
            return "no such file or directory"
        error = cause
    text = str(error) if str(error).strip() else type(error).__name__
    text = text.strip().splitlines()[0].replace(url.text, url.shown)
    return _WEB_URL.sub(lambda found: Url(found[0]).shown, text)  # as the driver spells it


class _RemoteBytes:
    """The bytes of a URL.  Going back to the beginning opens it again, since some servers send streams only."""

    def __init__(self, url: Url) -> None:
        self._url = url
        self._file = self._opened()

    def _opened(self) -> Any:  # noqa: ANN401  fsspec is not typed
        driver, path = self._url.driver()
        with driver_errors(self._url):
            return driver.open(path, "rb")

    def read(self, count: int) -> bytes:
        with driver_errors(self._url):
            data: bytes = self._file.read(count)
            return data

    def seekable(self) -> bool:
        return True

    def seek(self, place: int) -> None:
        assert place == 0
        self.close()
        self._file = self._opened()

    def close(self) -> None:
        with driver_errors(self._url):
            self._file.close()

    def __enter__(self) -> _RemoteBytes:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
