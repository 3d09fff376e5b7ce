"""What the server sends, one struct a body: the OpenAPI document is made from these."""

from typing import Annotated, Any, Literal

from msgspec import UNSET, Meta, Struct, UnsetType

from headstart.core.messages import WorkerLoad

Count = Annotated[int, Meta(ge=0)]
FinishedBy = Literal["stop", "length"]


class ErrorDetail(Struct, frozen=True):
    message: Annotated[str, Meta(min_length=1)]
    type: str
    param: str | None
    code: str | None


class ErrorBody(Struct, frozen=True):
    """Every answer that is not a success, and a stream's last event if it fails."""

    error: ErrorDetail


# ---- usage -------------------------------------------------------------------------------------------------------------


class PromptTokensDetails(Struct, frozen=True):
    cached_tokens: Count


class UsageDetails(Struct, frozen=True):
    """What a request cost, in Headstart's own terms: docs/http-api.md says what each means."""

    decode_prefix_len: Count | UnsetType = UNSET
    prefill_prefix_len: Count | UnsetType = UNSET
    bytes_moved: Count | UnsetType = UNSET
    miss_reason: str | UnsetType = UNSET
    num_retractions: Count | UnsetType = UNSET
    num_attempts: Count | UnsetType = UNSET
    stage_s: dict[str, float] | UnsetType = UNSET
    remembered_tokens: Count | UnsetType = UNSET
    text_divergence: int | UnsetType | None = UNSET


class AnswerUsage(Struct, frozen=True):
    """The last two only once every choice has ended."""

    prompt_tokens: Annotated[int, Meta(ge=1)]
    completion_tokens: Count
    total_tokens: Annotated[int, Meta(ge=1)]
    prompt_tokens_details: PromptTokensDetails | UnsetType = UNSET
    headstart: UsageDetails | UnsetType = UNSET


# ---- chat --------------------------------------------------------------------------------------------------------------


class TokenText(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]


class ChatTokenLogprob(Struct, frozen=True):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TokenText]


class ChatLogprobs(Struct, frozen=True):
    content: list[ChatTokenLogprob]
    refusal: None = None


class AnswerMessage(Struct, frozen=True):
    content: str
    role: Literal["assistant"] = "assistant"
    refusal: None = None


class ChatChoice(Struct, frozen=True, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None
    finish_reason: FinishedBy
    stop_reason: str | int | None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatCompletion(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: Annotated[list[ChatChoice], Meta(min_length=1)]
    usage: AnswerUsage
    system_fingerprint: None = None


class ChatDelta(Struct, frozen=True):
    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET


class ChatChunkChoice(Struct, frozen=True, kw_only=True):
    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishedBy | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class ChatChunk(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: None = None
    usage: AnswerUsage | UnsetType | None = UNSET


# ---- completions -------------------------------------------------------------------------------------------------------


class CompletionLogprobs(Struct, frozen=True):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]


class CompletionChoice(Struct, frozen=True, kw_only=True):
    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishedBy | None = None
    stop_reason: str | int | UnsetType | None = UNSET
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: list[int] | UnsetType = UNSET


class TextCompletion(Struct, frozen=True, kw_only=True):
    """Also a chunk of one, then without usage, or with none yet."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: None = None
    usage: AnswerUsage | UnsetType | None = UNSET


# ---- everything else ---------------------------------------------------------------------------------------------------


class ModelCard(Struct, frozen=True, kw_only=True):
    id: str
    object: Literal["model"] = "model"
    created: int = 0
    owned_by: str = "headstart"
    max_model_len: int


class ModelList(Struct, frozen=True, kw_only=True):
    object: Literal["list"] = "list"
    data: list[ModelCard]


class TokenizedText(Struct, frozen=True):
    count: Count
    max_model_len: int
    tokens: list[Count]


class FlushedCaches(Struct, frozen=True):
    num_pages: Count
    flushed: bool = True


class HealthReport(Struct, frozen=True):
    status: str


class ReadyReport(Struct, frozen=True):
    ready: bool


class WorkerReport(Struct, frozen=True, kw_only=True):
    """One worker process as the gateway knows it."""

    name: str
    incarnation: int
    role: str
    state: str
    silent_s: float
    loop_age_s: float
    capacity_tokens: int
    peer_address: str
    kv: dict[str, Any]
    open_choices: int
    load: WorkerLoad


class ClusterReport(Struct, frozen=True, kw_only=True):
    model: str
    ready: bool
    draining: bool
    context_len: int
    unfinished: int
    remembered_tokens: int
    counters: dict[str, int]
    workers: list[WorkerReport]


class OpenApiDocument(Struct, frozen=True, kw_only=True):
    openapi: str
    info: dict[str, str]
    paths: dict[str, Any]
    components: dict[str, Any]
