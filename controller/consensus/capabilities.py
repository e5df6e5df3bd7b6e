"""Computes which knobs every rank can turn, from the offer that each rank sends once.

A knob that one rank cannot turn must not be turned anywhere, so an offer contains refusals too.  Every rank computes
the answer from the same offers; it need not be sent.  Ranks that differ by design (pipeline stages) have different
layouts, so the knob is refused for that reason.  Pure: values in, values out.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Sequence

import msgspec

from ..observation import KnobSpace

__all__ = ["OFFER_WORDS", "KnobOffer", "Offer", "decode_offer", "encode_offer", "live_knobs", "space_hash"]

OFFER_WORDS = 1536
"""Size of an offer on the wire in 64-bit words: 12 KiB hold KNOBS_MAX knobs with DOMAIN_MAX values each, two of them
with all companions."""

DOMAIN_MAX = 64
"""A knob never tries more values than this; an offer keeps those nearest to the present value."""

COMPANIONS_MAX = 24
"""Most settings of other knobs that an offer names; values whose companions are cut off are not offered."""

REASON_CHARS_MAX = 200


class KnobOffer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One rank's knob.  `refusal` is the reason why it must not be turned, None if it may."""

    knob: str
    value: int | None
    domain: tuple[int, ...]
    refusal: str | None
    layout: str
    companions: tuple[tuple[int, str, int], ...] = ()


class Offer(msgspec.Struct, frozen=True):
    """All knobs of one rank."""

    knobs: tuple[KnobOffer, ...]


_decoder = msgspec.msgpack.Decoder(Offer)


def encode_offer(offer: Offer) -> list[int]:
    """Return `offer` as OFFER_WORDS words; long reasons and large domains are shortened."""
    payload = msgspec.msgpack.encode(Offer(tuple(_cut(k) for k in offer.knobs)))
    room = (OFFER_WORDS - 1) * 8
    if len(payload) > room:
        raise ValueError(f"an offer of {len(payload)} bytes is over the limit of {room}")
    return [len(payload), *struct.unpack(f"<{OFFER_WORDS - 1}q", payload.ljust(room, b"\0"))]


def decode_offer(words: Sequence[int]) -> Offer:
    """Return the offer in `words`.

    Raises:
        ValueError: not an offer.
    """
    payload = struct.pack(f"<{len(words) - 1}q", *words[1:])[: words[0]]
    try:
        return _decoder.decode(payload)
    except msgspec.MsgspecError as error:
        raise ValueError(f"not an offer: {error}") from error


def live_knobs(offers: Sequence[Offer]) -> tuple[tuple[KnobSpace, ...], dict[str, str]]:
    """Return the knobs that all ranks offer, by name, and the reason against each of the others."""
    spaces: list[KnobSpace] = []
    refused: dict[str, str] = {}
    by_rank = [{k.knob: k for k in offer.knobs} for offer in offers]
    for knob in sorted({name for knobs in by_rank for name in knobs}):
        reason = _disagreement(knob, by_rank)
        if reason is not None:
            refused[knob] = reason
            continue
        value = by_rank[0][knob].value
        assert value is not None, "a knob without a value is a disagreement"
        named = [set(knobs[knob].companions) for knobs in by_rank]
        companions = set.intersection(*named)
        alone = {one for one, *_ in set.union(*named)} - {one for one, *_ in companions}
        domain = set.intersection(*(set(knobs[knob].domain) for knobs in by_rank)) - alone | {value}
        if len(domain) == 1:
            refused[knob] = f"no value but the present {value} is possible on all ranks"
            continue
        spaces.append(KnobSpace(knob, value, tuple(sorted(domain)), tuple(sorted(companions))))
    return tuple(spaces), refused


def space_hash(spaces: Sequence[KnobSpace]) -> int:
    """Return 62 bits that are equal on all ranks that turn the same knobs."""
    text = repr([(s.knob, s.value, s.domain, s.companions) for s in spaces])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 2


def _disagreement(knob: str, by_rank: Sequence[dict[str, KnobOffer]]) -> str | None:
    for rank, knobs in enumerate(by_rank):
        offer = knobs.get(knob)
        if offer is None:
            return f"rank {rank} does not have it"
        if offer.refusal is not None:
            return offer.refusal if rank == 0 else f"rank {rank}: {offer.refusal}"
        if offer.value is None:
            return f"rank {rank} does not know its value"
    first = by_rank[0][knob]
    for rank, knobs in enumerate(by_rank):
        if knobs[knob].layout != first.layout:
            return f"rank {rank} has another layout than rank 0"
        if knobs[knob].value != first.value:
            return f"rank {rank} starts at {knobs[knob].value}, rank 0 at {first.value}"
    return None


def _cut(offer: KnobOffer) -> KnobOffer:
    domain = offer.domain
    if len(domain) > DOMAIN_MAX and offer.value is not None:
        value = offer.value
        domain = tuple(sorted(sorted(domain, key=lambda v: abs(v - value))[:DOMAIN_MAX]))
    companions = offer.companions[:COMPANIONS_MAX]
    cut = {one for one, *_ in offer.companions} - {one for one, *_ in companions}
    domain = tuple(one for one in domain if one not in cut or one == offer.value)
    refusal = offer.refusal if offer.refusal is None else offer.refusal[:REASON_CHARS_MAX]
    return msgspec.structs.replace(offer, domain=domain, refusal=refusal, companions=companions)
