"""Grafana dashboards of pacecar; see ARCHITECTURE.md."""
