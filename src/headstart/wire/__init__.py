"""Framing, bounds and authentication of the messages in core.messages. Never unpickles, never evaluates."""
