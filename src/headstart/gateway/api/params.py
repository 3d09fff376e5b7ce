"""Fields that chat and completions share: sampling, length, stopping, deadline."""

from dataclasses import dataclass
from random import Random

from headstart.core.request import SamplingParams, StopCriteria
from headstart.gateway.api.errors import invalid
from headstart.gateway.api.validate import Fields
from headstart.gateway.model import ModelBounds
from headstart.gateway.stream import StopRules

MAX_CHOICES = 128  # of one HTTP request, over all its prompts
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LEN = 1024
MAX_STOP_IDS = 256
MAX_BIASES = 1024

NOT_BUILT = {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "echo": (False,),
    "prompt_logprobs": (),
    "best_of": (1,),
    "suffix": ("",),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "regex": (),
    "ebnf": (),
    "lora_path": (),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "input_logprobs": (False,),
    "truncate_prompt_tokens": (),
}
"""What is refused by name, with the values that mean the same as leaving it out."""


@dataclass(frozen=True, slots=True)
class Common:
    """Checked fields of both APIs."""

    sampling: SamplingParams
    num_choices: int
    rules: StopRules
    min_tokens: int
    deadline_s: float
    stream: bool
    include_usage: bool
    return_token_ids: bool
    skip_special_tokens: bool


def read_common(fields: Fields, bounds: ModelBounds, rng: Random, max_deadline_s: float) -> Common:
    fields.refuse(NOT_BUILT)
    stream = fields.boolean("stream")
    options = fields.object("stream_options")
    if fields.has("stream_options") and not stream:
        raise invalid("'stream_options' needs 'stream' to be true", "stream_options", "invalid_value")
    eos = () if fields.boolean("ignore_eos") else bounds.eos_token_ids
    stop_ids = fields.token_ids("stop_token_ids", bounds.vocab_size, MAX_STOP_IDS)
    return Common(
        sampling=read_sampling(fields, bounds, rng),
        num_choices=fields.integer("n", 1, 1, MAX_CHOICES),
        rules=StopRules(frozenset((*eos, *stop_ids)), frozenset(eos), fields.strings("stop", MAX_STOPS, MAX_STOP_LEN)),
        min_tokens=fields.integer("min_tokens", 0, 0, bounds.context_len),
        deadline_s=fields.number("deadline_s", max_deadline_s, 0, max_deadline_s, above=True),
        stream=stream,
        include_usage=options.boolean("include_usage"),
        return_token_ids=fields.boolean("return_token_ids"),
        skip_special_tokens=fields.boolean("skip_special_tokens", True),
    )


def read_sampling(fields: Fields, bounds: ModelBounds, rng: Random) -> SamplingParams:
    return SamplingParams(
        temperature=fields.number("temperature", 1.0, 0, 2),
        top_p=fields.number("top_p", 1.0, 0, 1, above=True),
        top_k=max(fields.integer("top_k", 0, -1, 1 << 31), 0),
        min_p=fields.number("min_p", 0.0, 0, 1),
        presence_penalty=fields.number("presence_penalty", 0.0, -2, 2),
        frequency_penalty=fields.number("frequency_penalty", 0.0, -2, 2),
        repetition_penalty=fields.number("repetition_penalty", 1.0, 0, 10, above=True),
        logit_bias=read_logit_bias(fields, bounds.vocab_size),
        seed=fields.integer("seed", rng.getrandbits(63), -(1 << 63), (1 << 64) - 1) % (1 << 64),
    )


def read_logit_bias(fields: Fields, vocab_size: int) -> dict[int, float]:
    entries = fields.object("logit_bias")
    biases: dict[int, float] = {}
    for key, _ in entries.items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < vocab_size):
            raise invalid(f"'logit_bias' has {key[:20]!r}, which is no token id", "logit_bias", "invalid_value")
        biases[int(key)] = entries.number(key, 0.0, -100, 100)
    if len(biases) > MAX_BIASES:
        raise fields.error("logit_bias", f"an object of at most {MAX_BIASES} tokens")
    return biases


def stop_criteria(common: Common, max_tokens: int) -> StopCriteria:
    if common.min_tokens > max_tokens:
        raise invalid(f"'min_tokens' must not be above {max_tokens}, the most that is generated", "min_tokens")
    return StopCriteria(max_tokens, common.min_tokens, tuple(sorted(common.rules.token_ids)))


def output_budget(
    fields: Fields, names: tuple[str, ...], prompt_len: int, context_len: int, default: int | None
) -> int:
    """Tokens to generate at most: the first of `names` that is given, `default`, or what the context leaves."""
    room = context_len - prompt_len
    if room < 1:
        source = "messages" if len(names) > 1 else "prompt"
        message = f"'{source}' has {prompt_len} tokens; at most {context_len - 1} leave room for an answer"
        raise invalid(message, source, "context_length_exceeded")
    given = next((name for name in names if fields.has(name)), None)
    if given is None:
        return room if default is None else min(default, room)
    wanted = fields.integer(given, room, 1, 1 << 31)
    if wanted > room:
        message = f"'{given}' is {wanted} and the prompt has {prompt_len} tokens: more than the {context_len} that fit"
        raise invalid(message, given, "context_length_exceeded")
    return wanted
