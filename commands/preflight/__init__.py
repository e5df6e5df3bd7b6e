"""Finds the slow nodes and links of a job before it begins: `pacecar preflight`.

`command` is the command line, `document` its JSON. `run_preflight` is one rank's run; on rank 0 it also collects and
judges. A rank measures its device, its node's disk and hardware alone (`node_checks`), and links together with another
rank (`link_checks`), in rounds that `pairing` decides. `verdict` says who is slow, and `text` prints it, with the nodes
to leave out in the launcher's words.
"""
