"""What a user may set for `headstart bench`. Flags that mean what bench_serving's mean carry its names.

Imports nothing heavy: the command line reads this module whatever the subcommand.
"""

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from tyro.conf import Positional

from headstart.bench.errors import BenchError

Backend = Literal["auto", "openai", "sglang"]

MAX_ZIPF_ALPHA = 10.0
"""Beyond it hardly any group but the first is drawn, and at last weights leave the range of a float."""


def _at_least(options: object, least: float, *names: str) -> None:
    """Raise BenchError unless each of these fields is a finite number of at least `least`."""
    for name in names:
        value = getattr(options, name)
        if not (isfinite(value) and value >= least):
            raise BenchError(f"--{name.replace('_', '-')} must be at least {least:g}, got {value}")


def _share(options: object, name: str) -> None:
    """Raise BenchError unless this field is from 0 to 1."""
    if not 0 <= getattr(options, name) <= 1:
        raise BenchError(f"--{name.replace('_', '-')} must be from 0 to 1, got {getattr(options, name)}")


@dataclass(frozen=True)
class PrefixOptions:
    """shared-prefix: groups of prompts that begin alike."""

    gsp_preset: Literal["none", "sglang-19746", "sglang-22234"] = "none"
    """A published shape; it sets the groups and lengths below."""
    gsp_num_groups: int = 4
    """System prompts."""
    gsp_prompts_per_group: int = 8
    """Prompts per system prompt."""
    gsp_system_prompt_len: int = 512
    """Most tokens of a system prompt."""
    gsp_question_len: int = 64
    """Most tokens of a question."""
    gsp_output_len: int = 64
    """Most tokens of an output."""
    gsp_range_ratio: float = 1.0
    """Each length is drawn from [max(int(length * ratio), 1), length]."""
    gsp_num_turns: int = 1
    """More than 1: further questions continue the conversation."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "gsp_num_groups", "gsp_prompts_per_group", "gsp_output_len", "gsp_num_turns")
        _at_least(self, 0, "gsp_system_prompt_len", "gsp_question_len")
        _share(self, "gsp_range_ratio")
        if not self.gsp_system_prompt_len + self.gsp_question_len:
            raise BenchError("--gsp-system-prompt-len 0 with --gsp-question-len 0: the prompts are empty")


@dataclass(frozen=True)
class OrderOptions:
    """shared-prefix: which group comes when, and sweeps."""

    gsp_ordered: bool = False
    """Send group after group. Otherwise the prompts are shuffled."""
    gsp_group_distribution: Literal["uniform", "zipf"] = "uniform"
    """zipf: a prompt's group is drawn, rank k with weight 1 / k^alpha."""
    gsp_zipf_alpha: float = 1.0
    """The alpha of zipf."""
    prefix_share: tuple[float, ...] = ()
    """Measure once per value: this share of system plus question is the system prompt, at equal prompt length."""
    scale: float = 1.0
    """Divide every length by this: a preset's shape on a machine that its size does not fit."""

    def __post_init__(self) -> None:
        if not 0 <= self.gsp_zipf_alpha <= MAX_ZIPF_ALPHA:
            raise BenchError(f"--gsp-zipf-alpha must be from 0 to {MAX_ZIPF_ALPHA:g}, got {self.gsp_zipf_alpha}")
        if not (isfinite(self.scale) and self.scale > 0):
            raise BenchError(f"--scale must be positive, got {self.scale}")


@dataclass(frozen=True)
class LengthOptions:
    """multi-turn and no-reuse: how much and how long."""

    num_prompts: int = 16
    """no-reuse: prompts. multi-turn: sessions."""
    num_turns: int = 4
    """multi-turn: turns of each session."""
    random_input_len: int = 512
    """Most tokens of a prompt; in multi-turn of the first one."""
    turn_len: int = 64
    """multi-turn: most fresh tokens of each later turn."""
    random_output_len: int = 64
    """Most tokens of an output."""
    random_range_ratio: float = 1.0
    """Each length is drawn from [max(int(length * ratio), 1), length]."""
    turn_delay: float = 0.0
    """multi-turn: seconds between an answer and the next turn."""

    def __post_init__(self) -> None:
        _at_least(self, 1, "num_prompts", "num_turns", "random_input_len", "random_output_len")
        _at_least(self, 0, "turn_len", "turn_delay")
        _share(self, "random_range_ratio")


@dataclass(frozen=True)
class TraceOptions:
    """trace: how a recorded file is replayed."""

    open_loop: bool = False
    """Send at the recorded times. Otherwise session after session, with the recorded delays between turns."""
    speed: float = 1.0
    """Divides recorded times and delays."""
    trace_sessions: int = 0
    """Play this many sessions of the file. 0: all."""
    trace_warmup: int = 1
    """Sessions before them that are played first and not measured."""
    trace_context_length: int = 0
    """End a session before its first request that needs more tokens, output included. 0: what the server says."""

    def __post_init__(self) -> None:
        if not (isfinite(self.speed) and self.speed > 0):
            raise BenchError(f"--speed must be positive, got {self.speed}")
        _at_least(self, 0, "trace_sessions", "trace_warmup", "trace_context_length")


@dataclass(frozen=True)
class LoadOptions:
    """How hard, and how often."""

    max_concurrency: tuple[int, ...] = (8,)
    """Sessions at once (open loop: requests at once). Several values: one run each. 0: no limit."""
    request_rate: float = float("inf")
    """Session starts per second, with exponential gaps."""
    seed: int = 1
    """Seed of lengths, tokens and order; the first of --num-seeds."""
    num_seeds: int = 0
    """Runs with consecutive seeds. 0: 3 with --against, else 1."""
    token_ids: tuple[int, int] = (1000, 30_000)
    """Prompts are made of token ids from the first up to but without the second."""
    prompt_format: Literal["ids", "text"] = "ids"
    """text: for servers that take or return no token ids. Generated tokens then rarely match again."""
    no_flush: bool = False
    """Leave the server's cache as it is before each run."""

    def __post_init__(self) -> None:
        low, high = self.token_ids
        if not 0 <= low < high <= 1 << 31:
            raise BenchError(f"--token-ids {low} {high}: the second must be above the first, and at most {1 << 31}")
        _at_least(self, 0, "num_seeds")
        if not self.request_rate > 0:
            raise BenchError(f"--request-rate must be positive, got {self.request_rate}")
        if any(value < 0 for value in self.max_concurrency) or not self.max_concurrency:
            raise BenchError("--max-concurrency needs values of 0 or more")


@dataclass(frozen=True)
class TargetOptions:
    """What is measured."""

    base_url: str = "http://127.0.0.1:8000"
    """The server."""
    label: str = ""
    """Its name in tables and plots. Empty: what kind of server it is."""
    against: str = ""
    """A second server for the same workload, run in turns with the first; ratios are printed."""
    against_label: str = ""
    """The second server's name."""
    backend: Backend = "auto"
    """openai: /v1/completions. sglang: /generate. auto: by what the server says it is."""
    model: str = ""
    """Model to ask for. Empty: the first that the server lists."""
    api_key: str = ""
    """Bearer token."""
    temperature: float = 0.0
    """Sampling temperature."""


@dataclass(frozen=True)
class ReportOptions:
    """Where results go besides the terminal."""

    output_file: str = ""
    """JSON report."""
    details: bool = False
    """Keep every request's lengths and arrival times in the report: `headstart simulate --calibrate` needs them."""
    append: bool = False
    """Add to the report instead of replacing it: several deployments in one file are compared at their best."""
    plots: str = ""
    """Folder for pictures, PNG and SVG."""
    compare: tuple[str, ...] = ()
    """Two JSON reports, A and B: print B's ratios to A and measure nothing."""


@dataclass(frozen=True)
class Options:
    """All of them."""

    workload: Positional[Literal["shared-prefix", "multi-turn", "no-reuse", "trace"]] = "shared-prefix"
    """What is sent."""
    trace_file: Positional[str] = ""
    """trace: the recorded file."""
    prefix: PrefixOptions = field(default_factory=PrefixOptions)
    order: OrderOptions = field(default_factory=OrderOptions)
    length: LengthOptions = field(default_factory=LengthOptions)
    trace: TraceOptions = field(default_factory=TraceOptions)
    load: LoadOptions = field(default_factory=LoadOptions)
    target: TargetOptions = field(default_factory=TargetOptions)
    output: ReportOptions = field(default_factory=ReportOptions)
