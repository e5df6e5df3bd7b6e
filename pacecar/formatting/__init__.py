"""Formats numbers, bars and foreign text for people.

Start with `units` (knobs and their values) and `plain_text` (text that somebody else wrote); `ledger_headings` has the
words and colours of a ledger's headings, `ledger_bar` draws one with rich.
"""
