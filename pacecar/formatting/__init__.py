"""Formats numbers, tables, bars and foreign text for people.

Start with `quantities` (shares, sizes, speeds, times) and `plain_text` (text from elsewhere, such as job names).
`ledger_headings` has the words and colours of a ledger's headings; `ledger_bar` draws a ledger with rich.  `tables`
defines tables by their values; `terminal_tables` draws them with rich.  `page` writes HTML pages.
Values of knobs are formatted in `pacecar.knobs`.
"""
