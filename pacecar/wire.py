r"""Encodes records as frames, and decodes and checks frames, for the socket between training processes and the daemon.

The socket is a Unix socket of type SOCK_SEQPACKET.  It has connections, so the daemon knows each peer's uid and pid and
notices when it is gone, and it preserves messages, so a bad frame affects only itself.

    frame  = "PC" version:u8 0:u8 length:u32be  payload
    payload = length bytes of MessagePack, one tagged record of `Message`

Pure: bytes in, record out, or a FrameError.
"""

from __future__ import annotations

import struct
from enum import StrEnum

import msgspec

from pacecar.records import Answer, Command, DumpRequest, HealthRequest, HelloRefused, JobRecord, Request, Throttling
from pacecar.records.host_signals import HostSignals
from pacecar.records.job_orders import JobAnswer

__all__ = [
    "FRAME_BYTES_MAX", "VERSION", "FrameError", "Message", "Refusal", "decode_frame", "encode_frame", "payload_of",
]  # fmt: skip

Message = (
    JobRecord | Request | DumpRequest | HealthRequest | Command | Answer | JobAnswer | Throttling | HostSignals
    | HelloRefused
)  # fmt: skip
"""What may cross the socket, in either direction."""

VERSION = 1
"""Version of frame and handshake, raised when an older side would misunderstand a frame.  A new field, record or value
does not raise it: the older side skips unknown fields and refuses unknown records and values, frame by frame."""

MAGIC = b"PC"
_HEADER = struct.Struct(">2sBxI")

FRAME_BYTES_MAX = 64 * 1024
"""A StepRecord has less than 2 KiB; 64 KiB leave room and stay below the default socket buffer (208 KiB)."""


class Refusal(StrEnum):
    """Why a frame was refused: the label values of the refusal counter."""

    TRUNCATED = "truncated"
    OVERSIZED = "oversized"
    MAGIC = "magic"
    VERSION = "version"
    MALFORMED = "malformed"
    NO_HELLO = "no_hello"
    IDENTITY = "identity"
    LIMIT = "limit"


class FrameError(ValueError):
    """A frame that is refused.  `refusal` is the reason as a counter label, the message names the detail."""

    def __init__(self, refusal: Refusal, message: str) -> None:
        super().__init__(message)
        self.refusal = refusal


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Message)


def encode_frame(record: Message) -> bytes:
    """Return `record` as one frame.  Only decoding checks the ranges of its values.

    Raises:
        FrameError: the record is larger than FRAME_BYTES_MAX (OVERSIZED), or has a value that MessagePack cannot hold
            (MALFORMED): an integer of more than 64 bits, text that is not Unicode.
    """
    try:
        payload = _encoder.encode(record)
    except (OverflowError, UnicodeEncodeError, TypeError) as error:
        raise FrameError(Refusal.MALFORMED, f"a {type(record).__name__} cannot be encoded: {error}") from error
    if _HEADER.size + len(payload) > FRAME_BYTES_MAX:
        raise FrameError(
            Refusal.OVERSIZED,
            f"a {type(record).__name__} of {len(payload)} bytes is over the frame limit of {FRAME_BYTES_MAX}",
        )
    return _HEADER.pack(MAGIC, VERSION, len(payload)) + payload


def decode_frame(frame: bytes) -> Message:
    """Return the record in `frame`.

    Raises:
        FrameError: truncated, oversized, not pacecar's, of another version, or not a valid record: a field has a wrong
            type or is out of its range (`pacecar.records.ranges`).
    """
    if len(frame) > FRAME_BYTES_MAX:
        raise FrameError(Refusal.OVERSIZED, f"{len(frame)} bytes is over the frame limit of {FRAME_BYTES_MAX}")
    if len(frame) < _HEADER.size:
        raise FrameError(Refusal.TRUNCATED, f"{len(frame)} bytes is less than a frame header")
    magic, version, length = _HEADER.unpack_from(frame)
    if magic != MAGIC:
        raise FrameError(Refusal.MAGIC, f"frame begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise FrameError(
            Refusal.VERSION,
            f"frame has version {version}, this side speaks {VERSION}: upgrade the older one",
        )
    payload = memoryview(frame)[_HEADER.size :]
    if len(payload) < length:
        raise FrameError(Refusal.TRUNCATED, f"header promises {length} bytes, {len(payload)} came")
    if len(payload) > length:
        raise FrameError(Refusal.MALFORMED, f"header promises {length} bytes, {len(payload)} came")
    try:
        record: Message = _decoder.decode(payload)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise FrameError(Refusal.MALFORMED, f"payload is not a record: {error}") from error
    return record


def payload_of(frame: bytes) -> bytes:
    """Return the MessagePack in `frame`, which `decode_frame` accepted."""
    return frame[_HEADER.size :]
