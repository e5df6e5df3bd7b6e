"""Decodes the bytes of a terminal into names of keys, as htop and nvitop call them.

An escape sequence may arrive in two reads over a slow line, so an incomplete one is kept; a lone Escape counts if
nothing follows it within a tenth of a second.  Pure.
"""

from __future__ import annotations

__all__ = ["KEYS_MAX", "Keys"]

KEYS_MAX = 256
"""Bytes kept of one read, so that pasting a file does not fill memory."""

SEQUENCES = {
    b"\x1b[A": "up", b"\x1b[B": "down", b"\x1b[C": "right", b"\x1b[D": "left",
    b"\x1bOA": "up", b"\x1bOB": "down", b"\x1bOC": "right", b"\x1bOD": "left",
    b"\x1b[H": "home", b"\x1b[F": "end", b"\x1b[1~": "home", b"\x1b[4~": "end", b"\x1bOH": "home", b"\x1bOF": "end",
    b"\x1b[5~": "page_up", b"\x1b[6~": "page_down", b"\x1b[Z": "shift_tab",
    b"\x1bOP": "f1", b"\x1bOR": "f3", b"\x1bOS": "f4", b"\x1b[11~": "f1", b"\x1b[13~": "f3", b"\x1b[14~": "f4",
    b"\x1b[[A": "f1", b"\x1b[[C": "f3", b"\x1b[[D": "f4",
    b"\x1b[15~": "f5", b"\x1b[17~": "f6", b"\x1b[21~": "f10",
}  # fmt: skip
"""Sequences of xterm, the Linux console and vt220; terminfo has the same for common terminals."""

PLAIN = {
    b"\r": "enter", b"\n": "enter", b"\t": "tab", b"\x7f": "backspace", b"\x08": "backspace",
    b"\x03": "interrupt", b"\x0c": "redraw",
}  # fmt: skip


class Keys:
    """Turns bytes into keys, and keeps an unfinished sequence."""

    def __init__(self) -> None:
        self._rest = b""

    def decode(self, data: bytes) -> list[str]:
        """Return the keys in `data` and the sequence left from the previous call."""
        rest, keys = (self._rest + data)[:KEYS_MAX], list[str]()
        while rest:
            if rest.startswith(b"\x1b"):
                found = next((sequence for sequence in SEQUENCES if rest.startswith(sequence)), None)
                if found is not None:
                    keys.append(SEQUENCES[found])
                    rest = rest[len(found) :]
                elif any(sequence.startswith(rest) for sequence in SEQUENCES):
                    break  # it may continue
                else:
                    rest = _after_sequence(rest)
                continue
            size = _size(rest[0])
            if len(rest) < size:
                break
            letter, rest = rest[:size], rest[size:]
            key = PLAIN.get(letter) or letter.decode("utf-8", "ignore")
            if key and (key in PLAIN.values() or key.isprintable()):
                keys.append(key)
        self._rest = rest
        return keys

    def quiet(self) -> list[str]:
        """Return Escape if it was pressed alone; call this when no bytes followed in time."""
        rest, self._rest = self._rest, b""
        return ["escape"] if rest == b"\x1b" else []


def _after_sequence(rest: bytes) -> bytes:
    """Skip an unknown sequence: CSI ends with a byte from @ to ~ (ECMA-48)."""
    if not rest.startswith(b"\x1b["):
        return rest[2:]
    for place in range(2, len(rest)):
        if 0x40 <= rest[place] <= 0x7E:
            return rest[place + 1 :]
    return b""


def _size(first: int) -> int:
    """Return the length of the UTF-8 character that begins with `first`."""
    return 4 if first >= 0xF0 else 3 if first >= 0xE0 else 2 if first >= 0xC0 else 1
