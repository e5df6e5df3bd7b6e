"""The main job: a daemon, a real distributed training run and the tuner, in one command."""
