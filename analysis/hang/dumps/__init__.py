"""Reads dumps of torch's flight recorder into accounts of ranks.

dump_folder      a folder of them, or a run folder, and what could not be read
flight_recorder  the bytes of one dump to one `RankAccount`
call_order       whether the latest calls of a dump follow the order of all its calls
"""
