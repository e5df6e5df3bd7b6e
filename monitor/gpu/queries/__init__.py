"""Asks one GPU its questions: what, how often, and how answers become samples.

In: a handle and the driver's protocol `Nvml`.  Out: samples of one GPU, within a bounded number of driver calls a tick.
Start at `queries`, the tables of single calls with the time after which each is stale; `query_schedule` chooses those
of a tick, the longest overdue first.  `fields` is the table of what one call for many numbers brings, and
`field_numbers` says which driver knows which of them; `field_reader` makes that call.  `gpm` says how busy each part of
a GPU was, `derived` what the driver does not report; `refusals` decides when to ask again for what was refused.
"""
