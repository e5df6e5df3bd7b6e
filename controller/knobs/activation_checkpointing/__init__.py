"""Turns activation checkpointing on or off for each of a model's repeated blocks.

Input: a model.  Output: how many of its blocks compute their activations again in backward.  Start with `knob`.

    knob           the knob "checkpointed_blocks"
    blocks         finds the blocks, says which cannot be switched, and switches one
    block_probe    measures one step: what a block keeps, how long it takes, whether it computes the same again
"""
