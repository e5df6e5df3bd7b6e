"""One GPU at a time: what is asked of it, how often, what it means; `pacecar.monitor.collectors.gpu` runs it."""
