"""Workloads that others published numbers for."""

from dataclasses import replace

from headstart.bench.workload import Length, SharedPrefix

PRESETS: dict[str, SharedPrefix] = {
    # SGLang #19746: aiperf, 20 prefixes of 50,000 tokens, 1,000 requests, concurrency 128.
    "sglang-19746": SharedPrefix(20, 50, Length(50_000), Length(4_500, sd=500), Length(350, sd=100)),
    # SGLang #22234: generated-shared-prefix with range ratio 0.5, 640 requests, concurrency 128.
    "sglang-22234": SharedPrefix(80, 8, Length(7_000, 0.5), Length(1_000, 0.5), Length(1_000, 0.5)),
}


def scaled(workload: SharedPrefix, divisor: float) -> SharedPrefix:
    """The same shape with every length divided: for a machine or a context that the original does not fit."""
    if divisor == 1:
        return workload
    return replace(
        workload,
        system=workload.system.scaled(divisor),
        question=workload.question.scaled(divisor),
        output=workload.output.scaled(divisor),
    )


def with_prefix_share(workload: SharedPrefix, share: float) -> SharedPrefix:
    """The same prompt length, of which `share` is the system prompt and the rest the question."""
    total = workload.system.tokens + workload.question.tokens
    system_len = min(round(total * share), total - 1)
    return replace(
        workload,
        system=replace(workload.system, tokens=system_len, sd=0.0),
        question=replace(workload.question, tokens=total - system_len, sd=0.0),
    )
