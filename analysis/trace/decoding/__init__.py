"""Decodes the bytes of a trace file, intact or damaged, into typed events and a header, in bounded memory.

In: a path (`compressed_source`: plain, gzip or zstd).  Out: batches of `events.KnownEvent`, and `header.TraceHeader`.
Start at `event_stream`; `broken_json` recovers events from invalid JSON.
"""
