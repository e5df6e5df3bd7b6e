"""A step in which the loop saved a checkpoint or evaluated is known as such, and the next one is not."""

import torch


def test_a_step_with_a_checkpoint_or_an_evaluation_inside_was_paused_and_no_other(job, attach):
    paused, hook = [], None

    def on_boundary(step):
        paused.append(step is not None and hook.loop.was_paused(step.raw.start_ns))

    hook = attach(job, on_boundary=on_boundary)
    job.run(4)
    with hook.loop.checkpoint():
        pass
    job.run(3)
    job.model.eval()
    with torch.no_grad():
        job.model(job.batches[0][0])
    job.model.train()
    job.run(3)
    assert paused == [False] * 4 + [True, False, False] + [True, False, False]
