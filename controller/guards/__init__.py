"""Pauses tuning, or takes a change back, because of the node, another rank or the loss.

In come node signals, stragglers, hangs and losses, out go reasons to pause or to roll back.
Start with `tuning_pause`; `loss_monitor` reads what `divergence_detector` judges, `node_disturbance` judges the node.
"""
