"""DeepSpeed's collectives, which its optimizer looks up here in each call."""

from torch.distributed import all_reduce, barrier, destroy_process_group

__all__ = ["all_reduce", "barrier", "destroy_process_group"]
