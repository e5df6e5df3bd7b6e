"""Let a rank of a test's job wait a moment for the tuner's gather that is out, so that its answer comes in few steps.

Steps of tests take milliseconds: on a busy machine a dozen are over before gloo's thread gets its turn.  What is stated
in steps (a switch, a compression taken back) then takes more of them, which says nothing of a job whose steps are
longer than a gather.  For the same reason votes and switches are waited for somewhat longer than the product does.
"""

from __future__ import annotations

import time

from pacecar.controller.consensus import rank_agreement
from pacecar.controller.consensus.protocol import AgreementUpdate
from pacecar.controller.consensus.rank_agreement import RankAgreement

__all__ = ["wait_for_gathers"]

MOMENT_SECONDS = 0.5
"""At most: the other rank may be waiting for this one."""

SWITCH_SECONDS = 2.0


def wait_for_gathers() -> None:
    """From now on the tuner of this process waits for each gather before it takes its answer."""
    receive_updates = RankAgreement.receive_updates

    def patient(agreement: RankAgreement) -> AgreementUpdate:
        limit = time.monotonic() + MOMENT_SECONDS
        side = agreement._side
        while not agreement.has_left and side.is_busy and not side._work.is_completed() and time.monotonic() < limit:
            time.sleep(0.0002)
        return receive_updates(agreement)

    RankAgreement.receive_updates = patient  # type: ignore[method-assign]
    rank_agreement.VOTE_SECONDS = (MOMENT_SECONDS, MOMENT_SECONDS)
    rank_agreement.SWITCH_SECONDS = (SWITCH_SECONDS, SWITCH_SECONDS)
