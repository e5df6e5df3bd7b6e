"""How does pacecar get into a process before its script runs?  This folder goes onto PYTHONPATH (`pacecar run`).

Its modules are read by any python of a job, also by one that has no pacecar, no torch and another version, and at
each start: so they are small, import nothing of pacecar and raise nothing.
Left out: everything that needs torch (`pacecar.job.autoattach`), which waits until the script has imported it.
"""
