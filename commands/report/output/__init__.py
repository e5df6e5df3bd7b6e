"""Renders a report's document as a page, as markdown or on a terminal, from the same tables.

In: `document.Report` or `document.RunComparison`.  Out: text.

    html, charts         the page; start here
    markdown, terminal   for an issue; for the end of the demo
    life_tables          all attempts of a restarted job
    tables               pace, ledger, decisions and what-if bounds as text
    utilization_tables   utilization, energy, cost, incidents, ranks, trust
    comparison_tables    several runs
"""
