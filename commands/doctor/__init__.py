"""Finds what this machine, driver, network and job could do better (`pacecar doctor`): facts, rules, findings.

    command          the options of `pacecar doctor`, and its exit code
    host_access      roots, environment, driver; bounded reads that note what could not be read
    facts/           what was read, each value with where it was read; one module for each source       read only
    collect_facts    all readers, one after the other
    transport_paths  which way gradients would go, by the facts                                         pure
    topology         how far apart cards are, and what they can use                                     pure
    findings         what a rule and a finding are (`facts.evidence`: a value that was read and where)
    rules/           facts -> what is wrong, what to do about it, and who says so                       pure
    sources          the documents that rules rest on
    terminal_report  findings in a terminal (rich)      document   the same as JSON
    reference        the table of rules in docs/doctor.md

A list of best practices would not do: most of it is wrong for any one machine, and advice that always comes is not
read.  So a rule speaks only where values that were read show the fault, and says which values and where they are.

Nothing is applied: a finding has the command, and a person runs it.  Left out: what needs a load to be seen (`pacecar
bench net`, the daemon's metrics), and everything that only a vendor's own diagnosis can tell (dcgmi diag).
"""
