"""Pauses tuning, or takes a change back, because of the node, another rank or the loss.

In come node signals, stragglers, hangs and losses, out go reasons to pause or to roll back.
Start with `tuning_pause`, which pauses for stragglers and hangs, and for what the daemon says of any rank's node:
`node_monitor` receives that, `node_disturbance` (pure) judges it.  `loss_monitor` reads loss and gradients,
`divergence_detector` (pure) judges them, `compression_rollback` takes compression back.
"""
