"""Writes HTML pages that need nothing else: no network, no font and no file beside them.

In: titles, tables and drawings of a report.  Out: one page as a string.  Start with `document.whole_page`;
`table` has the tables, `svg` what drawings are made of, `template` the parts that `page.html.jinja` makes, `style.css`
how all of it looks, `sort_tables.js` the one script, for pages whose tables can be sorted.

`pacecar report` and `pacecar analyze --html` write theirs with it.
"""
