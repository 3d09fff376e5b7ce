"""What a deployment would do, before there is one.

step and transfer times    gpu_specs, models ─► roofline   ┐
                           observations ─► calibrate       ┴─► cost; contention: two workers of one machine
what is simulated          options ─► deployment
headstart simulate         simulate_command: bench plays against target, in virtual time; utilisation samples the workers
headstart plan             advise: workload_stats ─► capacity ─► search ◄─ simulated_split ─► report, figure
                           slo: latency targets; residency: a batch of shared prefixes in closed form
"""
