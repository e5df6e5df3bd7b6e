"""Models what all ranks of a job did and waited for as one graph, which can be replayed with other durations.

rank_events                                columns of one rank; `causes` names what took time
waits, device_waits, launchless_waits      what waits for what
rank_graph                                 one rank condensed to nodes and edges
job_graph                                  the ranks joined at their collectives
replay, shared_wire, bucket_sizes          the job replayed with other durations, links and buckets
critical_path                              every nanosecond of the job charged to one rank and cause
"""
