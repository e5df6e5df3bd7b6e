"""Formats numbers, tables, bars and foreign text for people.

Start with `quantities` (shares, sizes, speeds, times) and `plain_text` (text that somebody else wrote);
`ledger_headings` has the words and colours of a ledger's headings, `ledger_bar` draws one with rich.  `tables` lays out
tables, as lines and with rich.  `page` writes HTML
pages.  Values of knobs are in `pacecar.knobs`.
"""
