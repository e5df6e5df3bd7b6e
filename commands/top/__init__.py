"""Shows the daemon's status document live in a terminal: `pacecar top`, drawn with rich.

    command        the options of `pacecar top`
    daemon_poller  gets the document from a daemon's address      thread
    table          rows that fit a width, cut and aligned         pure
    panes          one part of the document -> lines              pure
    screen         which panes, how high, what is chosen          pure
    key_decoder    bytes of a terminal -> names of keys           pure
    run            the loop: keys in, screens out

rich and not textual: the demo and `pacecar analyze` draw with it already, it starts in a tenth of a second, and what a
loop of keys needs is sixty lines.  Left out: the mouse, and everything that changes a job (that is `pacecar tune`).
"""
