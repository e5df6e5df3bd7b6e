"""The hook of pacecar; see ARCHITECTURE.md."""
