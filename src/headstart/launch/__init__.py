"""What starts processes: `headstart serve`, the launcher and its children, and `headstart doctor`."""
