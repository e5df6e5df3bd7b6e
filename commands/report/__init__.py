"""What did a run do, what was changed in it, and what did that bring?  `pacecar report`: records in, one page out.

    inputs      what lies in a run folder or a recording        lines     a rank's file, in pieces
    gather      first reading: who, what was decided            weave     second: steps of all ranks, side by side
    tally       what the steps add up to, in bounded memory     build     the document: the public face
    html, svg, markdown, comparison    how it is shown          command   files, exit codes

A run of a week is gigabytes of records, so nothing is kept that grows with it: files are read twice, in pieces, and
what is added up has a bounded number of bins.  Before and after can only be told apart when all verdicts are known;
that is what the first reading is for.

Pure but for `inputs`, `lines` and `command`.  No torch and no numpy: a report is made wherever the folder lies.
"""
