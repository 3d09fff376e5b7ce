"""The gateway: HTTP in front, workers behind. Tokenises, routes, keeps streams exactly-once, and never imports torch."""
