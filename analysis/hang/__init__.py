"""Judges why a job hangs, from what its ranks say of themselves.

    dump_folder      a folder of flight recorder dumps to accounts, and what could not be read
    flight_recorder  the bytes of one dump to one `RankAccount`
    group_members    accounts to process groups: what each member has called and finished
    mismatches       members that called something else at the same number
    rank_facts       ranks that are a cause by themselves, and accounts that cannot be true
    wait_graph       who waits for whom, and the ranks at which all waiting ends
    case             all of it together, and what a finding is
    findings         what is at each end of the waiting
    weighing         findings that others may explain become `unknown`
    judgement        the verdict
    document         what `pacecar analyze --hang` prints
    sentences        the words of the verdict

`judge` takes accounts of any source: dumps, ranks that answer each other, the daemon.  Only `dump_folder` reads files.
Nothing here compares the clocks of two ranks.
"""
