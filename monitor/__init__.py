"""The daemon of pacecar; see ARCHITECTURE.md."""
