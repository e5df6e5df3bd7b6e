"""Known tuning policies on pacecar's actuators, so that its own policy can be compared with them and replaced by one.

Each is written from the description of the original, says where it differs, and implements the same `Policy` protocol:
it runs on a live job (`policy = "gaussian-process"`) and on replayed curves alike.
Start with `search`, the part that all share.
"""
