"""Shows the daemon's status document live in a terminal: `pacecar top`, drawn with rich.

    command        the options of `pacecar top`
    daemon_poller  gets the document from a daemon's address      thread
    table          rows that fit a width, cut and aligned         pure
    panes          one part of the document -> lines              pure
    screen         selection and height of panes, and keys        pure
    key_decoder    bytes of a terminal -> names of keys           pure
    run_top        the loop: keys in, screens out

rich rather than textual: the demo and `pacecar analyze` use it already, it starts in a tenth of a second, and the key
loop takes sixty lines.  Left out: the mouse, and changing a job (`pacecar tune`).
"""
