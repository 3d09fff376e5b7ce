"""From options to runs: workloads, paces, seeds and addresses."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headstart.bench.errors import BenchError
from headstart.bench.load_generator import Pace
from headstart.bench.machine import commit
from headstart.bench.measure import RunSpec
from headstart.bench.options import Options, OrderOptions, PrefixOptions, TargetOptions
from headstart.bench.presets import PRESETS, scaled, with_prefix_share
from headstart.bench.target import Address
from headstart.bench.trace import TraceReplay, read_trace
from headstart.bench.workload import Length, MultiTurn, NoReuse, SharedPrefix, Workload

NUM_COMPARED_SEEDS = 3

Shape = SharedPrefix | MultiTurn | NoReuse | TraceReplay


def seeds(options: Options) -> range:
    """A comparison gets three seeds unless told otherwise."""
    number = options.load.num_seeds or (NUM_COMPARED_SEEDS if options.target.against else 1)
    return range(options.load.seed, options.load.seed + number)


def paces(options: Options) -> Iterator[Pace]:
    for limit in options.load.max_concurrency:
        yield Pace(limit or None, options.load.request_rate, options.trace.open_loop, options.trace.speed)


def addresses(target: TargetOptions) -> list[Address]:
    rest = (target.backend, target.model, target.api_key, target.temperature)
    first = Address(server_root(target.base_url), target.label, *rest)
    return [first, Address(server_root(target.against), target.against_label, *rest)] if target.against else [first]


def server_root(url: str) -> str:
    """A server's address without the /v1 that clients of the OpenAI API are given with it."""
    return url.rstrip("/").removesuffix("/v1")


def run_specs(options: Options, context_len: int | None) -> Iterator[RunSpec]:
    """Every combination of prefix share, concurrency and seed. `context_len`: the longest request the target takes.
    Raises BenchError for one that is longer; as text, nobody knows yet how long one is."""
    code = commit()
    for share, shape in shapes(options, context_len):
        for pace in paces(options):
            for seed in seeds(options):
                workload, flush = shape.build(seed), not options.load.no_flush
                if context_len and options.load.prompt_format == "ids":
                    _refuse_too_long(workload, context_len)
                yield RunSpec(workload, described(shape), pace, seed, share, flush, code)


def _refuse_too_long(workload: Workload, context_len: int) -> None:
    for session in (*workload.warmup, *workload.measured):
        num_tokens = 0
        for number, turn in enumerate(session.turns, 1):
            kept_len = num_tokens if turn.keep is None else turn.keep
            num_tokens = kept_len + sum(piece.length for piece in turn.fresh) + turn.output_len
            if num_tokens > context_len:
                raise BenchError(
                    f"{session.name} turn {number} needs {num_tokens} tokens, output included; {context_len} are served"
                )


def prefix_shape(prefix: PrefixOptions, order: OrderOptions) -> SharedPrefix:
    if prefix.gsp_preset != "none":
        return PRESETS[prefix.gsp_preset]
    return SharedPrefix(
        prefix.gsp_num_groups,
        prefix.gsp_prompts_per_group,
        Length(prefix.gsp_system_prompt_len, prefix.gsp_range_ratio),
        Length(prefix.gsp_question_len, prefix.gsp_range_ratio),
        Length(prefix.gsp_output_len, prefix.gsp_range_ratio),
        prefix.gsp_num_turns,
        order.gsp_ordered,
        order.gsp_group_distribution,
        order.gsp_zipf_alpha,
    )


def shapes(options: Options, context_len: int | None) -> Iterator[tuple[float | None, Shape]]:
    """Workloads to measure, with the prefix share where that is swept. Raises BenchError for what cannot be built."""
    length = options.length
    first, fresh, output = (
        Length(tokens, length.random_range_ratio)
        for tokens in (length.random_input_len, length.turn_len, length.random_output_len)
    )
    match options.workload:
        case "shared-prefix":
            yield from _prefix_shapes(options)
        case "multi-turn":
            yield None, MultiTurn(length.num_prompts, length.num_turns, first, fresh, output, length.turn_delay)
        case "no-reuse":
            yield None, NoReuse(length.num_prompts, first, output)
        case "trace":
            yield None, _trace_shape(options, context_len)


def _prefix_shapes(options: Options) -> Iterator[tuple[float | None, Shape]]:
    shape = scaled(prefix_shape(options.prefix, options.order), options.order.scale)
    if not options.order.prefix_share:
        yield None, shape
    for share in options.order.prefix_share:
        if not 0 <= share < 1:
            raise BenchError(f"--prefix-share {share}: shares are from 0 up to below 1")
        yield share, with_prefix_share(shape, share)


def _trace_shape(options: Options, context_len: int | None) -> TraceReplay:
    if not options.trace_file:
        raise BenchError("the trace workload needs a file: trace FILE")
    trace = options.trace
    path = Path(options.trace_file)
    if not path.is_file():
        raise BenchError(f"{path} is no file")
    return TraceReplay(
        path.name,
        tuple(read_trace(path)),
        trace.trace_warmup,
        trace.trace_sessions or None,
        trace.trace_context_length or context_len,
    )


def described(shape: Shape) -> dict[str, Any]:
    """What makes two workloads the same, for the report."""
    if isinstance(shape, TraceReplay):
        return {
            "trace": shape.name,
            "num_warmup": shape.num_warmup,
            "num_sessions": shape.num_sessions,
            "context_len": shape.context_len,
        }
    return {name: _plain(getattr(shape, name)) for name in shape.__dataclass_fields__}


def _plain(value: Any) -> Any:
    return [value.tokens, value.ratio, value.sd] if isinstance(value, Length) else value
