"""Finds what this machine, driver, network and job could do better (`pacecar doctor`): facts, rules, findings.

    command          the options of `pacecar doctor`, and its exit code
    host_access      roots, environment, driver; bounded reads that note failures
    facts/           the values that were read, each with its source; one module per source             read only
    collect_facts    calls all readers
    transport_paths  the path that gradients would take                                                 pure
    topology         how far apart cards are, and how they can communicate                              pure
    findings         the types of rules and findings (`facts.evidence`: a value and its source)
    rules/           facts -> findings with remedies and sources                                        pure
    sources          the documents that rules cite
    terminal_report  findings in a terminal (rich)
    document         findings as JSON
    reference        the table of rules in docs/doctor.md

Most of a list of best practices does not apply to a given machine, and advice that always appears is not read.  So a
rule reports only faults that the values show, with these values and their sources.

Nothing is applied: a finding has the command, and a person runs it.  Left out: faults that show only under load
(`pacecar bench net`, the daemon's metrics), and what only a vendor's own diagnosis can find (dcgmi diag).
"""
