"""ZeRO 3's coordinator: job_deepspeed counts what it gathers, and here there is nothing to gather."""

from typing import Any


class PartitionedParameterCoordinator:
    def __all_gather_params(self, params: Any) -> None:
        raise NotImplementedError
