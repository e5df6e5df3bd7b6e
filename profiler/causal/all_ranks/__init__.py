"""Joins the ranks' graphs into one, plays it with other durations, and walks its critical path."""
