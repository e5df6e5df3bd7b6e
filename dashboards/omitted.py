"""Lists the metrics that are on no panel, with the reason; a test compares it with the catalog and the panels."""

from __future__ import annotations

__all__ = ["NOT_DRAWN"]

NOT_DRAWN = {
    "pacecar_daemon_config_last_reload_success_timestamp_seconds": "for alerts; whether it succeeded is drawn",
    "pacecar_gpu_memory_free_bytes": "size minus used, and both are drawn",
    **{
        f"pacecar_daemon_otlp_{name}": "of daemons that push, which a store that does not scrape draws itself"
        for name in ("exports_total", "export_duration_seconds", "success_age_seconds")
    },
    "pacecar_job_hang_collectives": "for the alert about hangs, which names the rank that has begun fewest",
    "pacecar_job_samples_guessed": "what the panels of samples say in words: a number of its own would be read as one",
    "pacecar_job_start_time_seconds": "puts the newest launch first where one is chosen; the graphs begin there",
}
"""Metric -> why it is on no panel."""
