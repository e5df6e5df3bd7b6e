"""Writes the page of an analysis (`pacecar analyze --html`), and one of its drawings alone (`--picture`).

In: an `Analysis`, the document with the columns and times behind it.  Out: HTML or SVG that needs no network.  Start
with `page.write_page`, which decides the order of sections.  The parts of any page are in `pacecar.formatting.page`.

    page             headline, tiles, sections
    charts           ledgers as bars, what-if as lengths
    rank_lanes       which step and ranks are drawn, and when each was charged to what
    rank_timeline    one rank or many drawn on one axis, with the critical path
    picture          that drawing as an SVG file
"""
