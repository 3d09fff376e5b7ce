"""What bench, simulate and plan refuse before anything is sent."""

import math

import pytest

from headstart.bench.errors import BenchError
from headstart.bench.options import LengthOptions, LoadOptions, OrderOptions, PrefixOptions, TraceOptions

WRONG = [
    (PrefixOptions, {"gsp_num_groups": 0}),
    (PrefixOptions, {"gsp_prompts_per_group": -1}),
    (PrefixOptions, {"gsp_output_len": 0}),
    (PrefixOptions, {"gsp_question_len": -3}),
    (PrefixOptions, {"gsp_num_turns": 0}),
    (PrefixOptions, {"gsp_range_ratio": 2.0}),
    (PrefixOptions, {"gsp_range_ratio": math.nan}),
    (OrderOptions, {"gsp_zipf_alpha": 1e6}),
    (OrderOptions, {"scale": 0.0}),
    (OrderOptions, {"scale": math.inf}),
    (LengthOptions, {"num_prompts": 0}),
    (LengthOptions, {"random_input_len": 0}),
    (LengthOptions, {"turn_delay": math.nan}),
    (LengthOptions, {"random_range_ratio": -0.1}),
    (TraceOptions, {"speed": 0.0}),
    (TraceOptions, {"speed": math.nan}),
    (TraceOptions, {"trace_warmup": -1}),
    (LoadOptions, {"request_rate": math.nan}),
    (LoadOptions, {"num_seeds": -1}),
    (LoadOptions, {"token_ids": (5, 5)}),
    (LoadOptions, {"token_ids": (0, 1 << 32)}),
]


@pytest.mark.parametrize(("kind", "field"), WRONG)
def test_a_value_out_of_range_is_refused_by_its_flag(kind, field):
    (name,) = field
    with pytest.raises(BenchError, match=f"--{name.replace('_', '-')}"):
        kind(**field)


def test_prompts_of_no_tokens_are_refused():
    with pytest.raises(BenchError, match="prompts are empty"):
        PrefixOptions(gsp_system_prompt_len=0, gsp_question_len=0)


def test_the_ends_of_the_ranges_are_taken():
    PrefixOptions(gsp_system_prompt_len=0, gsp_question_len=1, gsp_output_len=1, gsp_range_ratio=0.0)
    LengthOptions(turn_len=0, random_input_len=1, turn_delay=0.0)
    LoadOptions(request_rate=math.inf, max_concurrency=(0,))
