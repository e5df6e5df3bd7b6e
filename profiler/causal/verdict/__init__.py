"""Decides from like work on other ranks who held the job up, in what, and what mending it would save."""
