"""Judges why a job hangs, from what its ranks say of themselves.

    dumps            flight recorder dumps to accounts
    group_members    accounts to process groups: what each member has called and finished
    turns            ranks that made a call out of turn, and those that kept their order
    mismatches       members that called something else at the same number
    rank_facts       ranks that are a cause by themselves, and accounts that cannot be true
    wait_graph       who waits for whom, and the ranks at which all waiting ends
    case             all of it together, and what a finding is
    findings         what is at each end of the waiting
    weighing         findings that others may explain become `unknown`
    judgement        the verdict
    document         what `pacecar analyze --hang` prints
    sentences        the words of the verdict

`judge` takes accounts of any source: dumps, ranks that answer each other, the daemon.  Only
`dumps.dump_folder` reads files.  Nothing here compares the clocks of two ranks.
"""
