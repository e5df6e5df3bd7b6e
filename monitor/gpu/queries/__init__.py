"""Asks one GPU its queries and turns the answers into samples, in a bounded number of driver calls a tick.

In: a handle and the driver's protocol `Nvml`.  Out: samples of one GPU.  Start with `queries`, the tables of single
calls and how long each answer lasts; `query_schedule` chooses those of a tick, the longest overdue first.  `fields`
lists the numbers that one call returns together, `field_numbers` which driver knows each of them, and `field_reader`
makes that call.  `gpm` measures how busy each part of a GPU was, `derived` computes what the driver does not report,
and `refusals` decides when to ask again for a refused number.
"""
