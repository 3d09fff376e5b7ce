"""What a client asks for, as it travels from the gateway to a decode worker."""

from msgspec import Struct

from headstart.core.arrays import EMPTY, Int32Array


class SamplingParams(Struct, frozen=True):
    """How the next token is drawn. Validated by the gateway; ranges in the comments.

    The random numbers of output `i` of choice `j` are a pure function of (seed, j, i), so retraction, failover and
    migration reproduce the same stream.
    """

    temperature: float = 1.0  # >= 0; 0 is greedy
    top_p: float = 1.0  # (0, 1]
    top_k: int = 0  # 0: off
    min_p: float = 0.0  # [0, 1]
    presence_penalty: float = 0.0  # [-2, 2]
    frequency_penalty: float = 0.0  # [-2, 2]
    repetition_penalty: float = 1.0  # > 0
    logit_bias: dict[int, float] = {}  # token id -> [-100, 100]
    seed: int = 0  # unsigned 64 bits
    allowed_token_ids: tuple[int, ...] = ()  # only these are drawn; empty: any
    banned_token_ids: tuple[int, ...] = ()  # these are never drawn


class StopCriteria(Struct, frozen=True):
    """When the decode worker ends a choice. Stop strings are the gateway's business."""

    max_new_tokens: int
    min_new_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()  # includes the model's EOS ids unless ignore_eos was asked for


class ChoiceRef(Struct, frozen=True, cache_hash=True):
    """Names one choice of one request at one attempt of the gateway to get it served."""

    request_id: str
    choice: int = 0
    attempt: int = 0


class Request(Struct, frozen=True, eq=False):
    """One choice to be generated. `output_ids` are tokens an earlier attempt already delivered: a resumed request
    enters like a fresh one whose prompt is `prompt + output_ids`."""

    ref: ChoiceRef
    prompt: Int32Array
    sampling: SamplingParams
    stop: StopCriteria
    namespace: bytes
    remaining_s: float  # until the deadline, when the message was sent
    output_ids: Int32Array = EMPTY
    num_top_logprobs: int | None = None  # None: no logprobs; 0: the chosen token's only
    cacheable: bool = True  # False for warm-up and health requests: never matched, never inserted


class RequestStats(Struct, frozen=True):
    """What serving a choice cost: becomes `usage.headstart` and `cached_tokens`."""

    cached_tokens: int = 0  # prompt tokens whose KV was not computed for this request
    decode_prefix_len: int = 0  # tokens found in the decode worker's radix cache at first admission
    prefill_prefix_len: int = 0  # tokens the prefill worker found in its own cache
    bytes_moved: int = 0
    miss_reason: str = ""  # "", "cold", "new", "diverged", "evicted", "uncacheable"
    num_retractions: int = 0
    stage_s: dict[str, float] = {}  # seconds in: queue, prefill, first_step


class FinishReason:
    STOP = "stop"
    LENGTH = "length"
