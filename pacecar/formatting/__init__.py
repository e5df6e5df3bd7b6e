"""Numbers, bars and foreign text as people read them.  Start with `units` (amounts) and `plain_text` (what others wrote)."""
