"""What could this machine, driver, network and job do better?  `pacecar doctor`: facts, rules, findings.

    places     where to look: roots, environment, driver; bounded reads that note what could not be read
    facts      what was read, each value with where it was read                                         values
    ...facts   one part of the world each (host, PCI, GPUs, network, environment, log, script, run)     read only
    ...rules   facts -> what is wrong, what to do about it, and who says so                             pure
    rulebook   all rules, and what comes of applying them                                               pure
    picture    findings in a terminal (rich)      document   the same as JSON

A list of best practices cannot answer: most of it is wrong for any one machine, and advice that always comes is not
read.  So a rule speaks only where values that were read show the fault, and says which values and where they are.

Nothing is applied: a finding has the command, and a person runs it.  Left out: what needs a load to be seen (`pacecar
bench net`, the daemon's metrics), and everything that only a vendor's own diagnosis can tell (dcgmi diag).
"""
