"""What a deployment would do, before there is one.

step and transfer times    hardware, models ─► sheet  ┐
                           observations ─► calibrate  ┴─► cost; contention: two workers of one machine
what is simulated          options ─► deployment
headstart simulate         simulate: bench plays against target, in virtual time; watch looks at the workers
headstart plan             advise: demand ─► capacity ─► search ◄─ trial (a simulation) ─► report, figure
                           slo: latency targets; residency: a batch of shared prefixes in closed form
"""
