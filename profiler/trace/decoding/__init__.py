"""Decodes the bytes of a trace file into typed events and a header, in bounded memory and however damaged they are.

In: a path (`compressed_source`: plain, gzip or zstd).  Out: batches of `events.KnownEvent`, and `header.TraceHeader`.
Start at `event_stream`; `broken_json` recovers events from a part that is not valid JSON.
"""
