"""A whole cluster in one process and in virtual time: real gateway policy, schedulers, caches and worker loops; simulated
sockets, devices and launcher. Torch-free and deterministic: one seed, one history."""
