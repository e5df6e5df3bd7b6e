"""Formats numbers, bars and foreign text for people.  Start with `units` and `plain_text`."""
