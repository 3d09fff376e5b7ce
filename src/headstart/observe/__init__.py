"""What a process tells about itself: structured log lines and Prometheus metrics."""
