"""Writes self-contained HTML pages, without network access, fonts or other files.

In: titles, tables and drawings of a report.  Out: one page as a string.  Start with `document.whole_page`.
`document` calls the macros of `page.html.jinja`, `svg` has the pieces of drawings, `style.css` is the style, and
`sort_tables.js` the only script, for pages with sortable tables.

`pacecar report` and `pacecar analyze --html` use it.
"""
