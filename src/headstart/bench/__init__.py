"""Workloads, the client that sends them to any server, what is measured, and how it is shown."""
