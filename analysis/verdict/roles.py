"""Groups ranks that have the same role and can be compared: those of one pipeline stage.

Sends and receives connect the ranks of one pipeline.  (Collectives do not separate roles: all ranks share some.)  A
rank's stage is its position in its pipeline, in the order of ranks as in Megatron, DeepSpeed and torch.  If all
pipelines are equally long, the stages are the roles.  Without sends and receives all ranks have one role.

Pure.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from ..graph.job_graph import Joins

__all__ = ["roles_of"]


def roles_of(joins: Joins, ranks: int) -> list[list[int]]:
    """Return groups of places with the same role, stage by stage; one group if there are no pipelines."""
    everyone = [list(range(ranks))]
    pairs = np.flatnonzero(joins.is_pair[joins.join])
    if len(pairs) == 0:
        return everyone
    pipeline = np.arange(ranks)
    members: dict[int, set[int]] = defaultdict(set)
    for at in pairs.tolist():
        members[int(joins.join[at])].add(int(joins.rank[at]))
    links = {tuple(sorted(each)) for each in members.values() if len(each) > 1}
    changed = True
    while changed:
        changed = False
        for link in links:
            least = min(pipeline[place] for place in link)
            for place in link:
                if pipeline[place] != least:
                    pipeline[place], changed = least, True
    pipelines: dict[int, list[int]] = defaultdict(list)
    for place, number in enumerate(pipeline.tolist()):
        pipelines[number].append(place)
    lengths = {len(each) for each in pipelines.values()}
    if len(lengths) != 1 or lengths == {1}:
        return everyone
    return [list(stage) for stage in zip(*pipelines.values(), strict=True)]
