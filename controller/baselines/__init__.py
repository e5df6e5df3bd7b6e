"""What would another tuner have done?  Known policies on the same actuators, so that ours can be compared and left.

Each is written from the description of the original, says where it differs, and speaks the same `Policy` protocol: it
runs on a live job (`policy = "gaussian-process"`) and on replayed curves alike.
"""
