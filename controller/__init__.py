"""The loop of pacecar; see ARCHITECTURE.md."""
