"""Says the sends and receives between pipeline stages, one by one or as batches.

One by one, each message has a kernel, and a stream for its direction.  Batched, a rank sends what a pass gave and
receives what the next pass needs in one kernel wherever a forward pass follows a backward pass or the other way round
(Megatron's send_forward_recv_backward), and goes on when both are done.
"""

from __future__ import annotations

from .instructions import Stream
from .schedules import Pass
from .step_builder import StepBuilder

__all__ = ["Messages"]


class Messages:
    """The messages of one step of one stage."""

    def __init__(self, builder: StepBuilder) -> None:
        self._builder = builder
        self._unsent: tuple[Pass, int] | None = None
        model = builder.model
        if model.is_batched and model.chunks > 1:
            raise ValueError("batches of interleaved schedules are not simulated")

    def receive(self, one: Pass) -> None:
        """Get what the pass needs from the stage before it; compute waits for it."""
        b = self._builder
        peer = -1 if one.is_forward else 1
        is_needed = not self._is_end(one, is_first=one.is_forward)
        if not b.model.is_batched:
            if is_needed:
                b.wait(self._single("recv", "forward" if one.is_forward else "backward", peer))
            return
        messages: list[tuple[str, int]] = []
        if self._unsent is not None:
            given, to = self._unsent
            messages.append(("send", to))
            self._unsent = None
            if given.is_forward == one.is_forward or not is_needed:
                b.wait(b.batch(*messages))
                messages = []
        if is_needed:
            b.wait(b.batch(*messages, ("recv", peer)))

    def send(self, one: Pass) -> None:
        """Give what the pass made to the stage after it."""
        if self._is_end(one, is_first=not one.is_forward):
            return
        peer = 1 if one.is_forward else -1
        if self._builder.model.is_batched:
            self._unsent = one, peer
        else:
            self._single("send", "forward" if one.is_forward else "backward", peer)

    def finish(self) -> None:
        """Send what is left."""
        if self._unsent is not None:
            self._builder.wait(self._builder.batch(("send", self._unsent[1])))

    def _is_end(self, one: Pass, *, is_first: bool) -> bool:
        """Return whether the pass is at the first, or at the last, layers of the model."""
        b = self._builder
        if is_first:
            return b.stage == 0 and one.chunk == 0
        return b.stage == b.layout.pipeline - 1 and one.chunk == b.model.chunks - 1

    def _single(self, operation: str, role: str, peer: int) -> int:
        b = self._builder
        stream = Stream[f"{operation}_{role}".upper()]
        return b.collective(operation, role, b.model.activation_bytes // b.layout.tensor, stream=stream, peer=peer)
