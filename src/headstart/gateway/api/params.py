"""Fields that chat and completions share, once their types are right: what depends on the model or on other fields."""

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from headstart.core.request import SamplingParams, StopCriteria
from headstart.gateway.api.request_bodies import MAX_SEED, GenerationBody, StreamOptions
from headstart.gateway.api.validation import Problems
from headstart.gateway.model import ServedModel
from headstart.gateway.stream import StopRules


@dataclass(frozen=True, slots=True)
class AnswerOptions:
    """How the answer is sent."""

    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    skip_special_tokens: bool


@dataclass(frozen=True, slots=True)
class Common:
    """Checked fields of both APIs."""

    sampling: SamplingParams
    num_choices: int
    rules: StopRules
    min_tokens: int
    deadline_s: float
    output: AnswerOptions


def read_common(body: GenerationBody, model: ServedModel, rng: Random, max_deadline_s: float) -> Common:
    """Raises ApiError 400 that names everything that is wrong."""
    problems, bounds = Problems(), model.bounds
    check_token_ids(body.stop_token_ids, bounds.vocab_size, "stop_token_ids", problems)
    if body.min_tokens > bounds.context_len:
        problems.must_be("min_tokens", f"an integer from 0 to {bounds.context_len}", body.min_tokens)
    if body.deadline_s is not None and body.deadline_s > max_deadline_s:
        problems.must_be("deadline_s", f"a number above 0 up to {max_deadline_s:g}", body.deadline_s)
    # An end token that the vocabulary lacks is never drawn.
    eos = () if body.ignore_eos else tuple(i for i in bounds.eos_token_ids if i < bounds.vocab_size)
    strings = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    ending = frozenset((*eos, *body.stop_token_ids))
    rules = StopRules(ending, frozenset(eos), strings, body.include_stop_str_in_output)
    common = Common(
        sampling=read_sampling(body, model, rng, problems),
        num_choices=body.n,
        rules=rules,
        min_tokens=body.min_tokens,
        deadline_s=min(body.deadline_s or max_deadline_s, max_deadline_s),
        output=read_output(body, problems),
    )
    check_something_is_left(common, body.allowed_token_ids, problems)
    problems.refuse()
    return common


def read_output(body: GenerationBody, problems: Problems) -> AnswerOptions:
    options = body.stream_options or StreamOptions()
    if body.stream_options is not None and not body.stream:
        problems.add("stream_options", "'stream_options' needs 'stream' to be true")
    if options.continuous_usage_stats and not options.include_usage:
        name = "stream_options.continuous_usage_stats"
        problems.add(name, f"'{name}' needs 'stream_options.include_usage' to be true")
    return AnswerOptions(
        stream=body.stream,
        include_usage=options.include_usage,
        continuous_usage=options.continuous_usage_stats,
        return_token_ids=body.return_token_ids,
        skip_special_tokens=body.skip_special_tokens,
    )


def read_sampling(body: GenerationBody, model: ServedModel, rng: Random, problems: Problems) -> SamplingParams:
    seed = rng.getrandbits(63) if body.seed is None else body.seed
    if not -(1 << 63) <= seed <= MAX_SEED:
        problems.must_be("seed", f"an integer from {-(1 << 63)} to {MAX_SEED}", seed)
    vocab_size = model.bounds.vocab_size
    check_token_ids(body.allowed_token_ids or (), vocab_size, "allowed_token_ids", problems)
    return SamplingParams(
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=max(body.top_k, 0),
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=read_biases(body, vocab_size, problems),
        seed=seed % (1 << 64),
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        banned_token_ids=tuple(sorted(set(read_bad_words(body.bad_words, model, problems)))),
    )


def read_biases(body: GenerationBody, vocab_size: int, problems: Problems) -> dict[int, float]:
    biases = {int(key): bias for key, bias in body.logit_bias.items()}
    for token_id in biases:
        if token_id >= vocab_size:
            problems.add("logit_bias", f"'logit_bias' has {token_id}, which is no token id from 0 to {vocab_size - 1}")
    return biases


def read_bad_words(words: Sequence[str], model: ServedModel, problems: Problems) -> list[int]:
    """The tokens that are never drawn: each word as it begins a text, and as it stands after a space.

    A word of several tokens would have to be banned by what stands before its last one; it is refused by name.
    """
    banned = []
    for index, word in enumerate(words):
        name = f"bad_words[{index}]"
        try:
            word.encode()
        except UnicodeEncodeError:
            problems.add(name, f"'{name}' holds a lone surrogate, which is no character")
            continue
        begins = model.tokenizer.encode(word.lstrip(), add_special_tokens=False)
        follows = model.tokenizer.encode(f" {word.lstrip()}", add_special_tokens=False)
        if len(begins) != 1:
            problems.add(name, f"'{name}' is {len(begins)} tokens; only words of one token are supported")
            continue
        banned += begins + (follows if len(follows) == 1 else [])
    return banned


def check_something_is_left(common: Common, allowed: Sequence[int] | None, problems: Problems) -> None:
    """Refuse an allow-list of which nothing may be drawn."""
    if allowed is None:
        return
    left = set(allowed).difference(common.sampling.banned_token_ids)
    if not left:
        problems.add("allowed_token_ids", "'bad_words' bans everything in 'allowed_token_ids'")
    elif common.min_tokens and common.rules.token_ids.issuperset(left):
        message = "'allowed_token_ids' has only ids that end the answer, which 'min_tokens' puts off"
        problems.add("allowed_token_ids", message)


def check_token_ids(values: Sequence[int], vocab_size: int, name: str, problems: Problems) -> None:
    """Note the first that is none of the model's."""
    for position, value in enumerate(values):
        if value >= vocab_size:
            problems.must_be(f"{name}[{position}]", f"a token id from 0 to {vocab_size - 1}", value)
            return


def stop_criteria(common: Common, max_tokens: int) -> StopCriteria:
    problems = Problems()
    if common.min_tokens > max_tokens:
        message = f"'min_tokens' must not be above {max_tokens}, the most that is generated, got {common.min_tokens}"
        problems.add("min_tokens", message)
    problems.refuse()
    return StopCriteria(max_tokens, common.min_tokens, tuple(sorted(common.rules.token_ids)))
