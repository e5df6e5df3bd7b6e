"""Pauses tuning, or takes a change back, because of the node, another rank or the loss.

Node signals, stragglers, hangs and losses come in; reasons to pause or to roll back go out.  The tuner calls them
through `Guard` in `observation`; `StatisticalPace`, with the global batch, is one too.  Start with `tuning_pause`,
which pauses for stragglers, hangs, and what the daemon reports of any rank's node: `node_monitor` receives and judges
that.  `loss_monitor` reads loss and gradients, `divergence_detector` (pure) judges them, `compression_rollback` takes
compression back.  `collection_cost` does so with the interval of garbage collections, and makes their cost part of the
pace, and `objection_rollback` with what a rank objects to; all three are a `knob_rollback`.
"""
