"""Brings pacecar into a process before its script runs: `pacecar run` puts this folder onto PYTHONPATH.

Its modules are read by any python of a job, also by one that has no pacecar, no torch and another version, and at
each start: so they are small, import nothing of pacecar and raise nothing.
Left out: everything that needs torch (`pacecar.job.autoattach`), which waits until the script has imported it.
"""
