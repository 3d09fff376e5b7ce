"""Worker processes: the step loop, its sockets and heartbeat, the composition root, and the launcher."""
