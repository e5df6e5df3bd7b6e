"""Decides by comparing ranks what held the job up, for what cause, and what a fix would save."""
