"""What may pause tuning or take a change back: the node, the loss, the user.

In come node signals, losses and commands, out go reasons to pause or to roll back.
Start with `tuning_pause`; `loss_monitor` watches for divergence, `node_disturbance` for throttling and neighbours.
"""
