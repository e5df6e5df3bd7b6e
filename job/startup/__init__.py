"""Brings pacecar into a process before its script runs: `pacecar run` puts this folder onto PYTHONPATH.

Every python of a job reads its modules at each start, even one without pacecar or torch, or of another version.  So
they are small, import nothing of pacecar and raise nothing.  What needs torch (`pacecar.job.autoattach`) waits until
the script has imported it.
"""
