"""What clients send, one struct a route: the types, the bounds and the defaults of every field that is built.

The OpenAPI document and docs/http-api.md are made from these structs. A field that is null counts as left out. Bounds
that depend on the model or on other fields are checked in `params` and `prompts`.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

MAX_CHOICES = 128  # of one HTTP request, over all its prompts
MAX_TOP_LOGPROBS = 20
MAX_STOPS = 16
MAX_STOP_LEN = 1024
MAX_STOP_IDS = 256
MAX_ALLOWED_IDS = 4096
MAX_BAD_WORDS = 256
MAX_BIASES = 1024
MAX_MESSAGES = 1 << 14
MAX_SALT_LEN = 1024
MAX_SEED = (1 << 64) - 1
DEFAULT_TEMPERATURE = 1.0
COMPLETION_DEFAULT_TOKENS = 16

TokenId = Annotated[int, Meta(ge=0)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]
Prompt = (
    Annotated[str, Meta(min_length=1)]
    | Annotated[
        list[TokenId | Annotated[str, Meta(min_length=1)] | Annotated[list[TokenId], Meta(min_length=1)]],
        Meta(min_length=1),
    ]
)
Bias = Annotated[float, Meta(ge=-100, le=100)]
BiasKey = Annotated[str, Meta(pattern="^[0-9]{1,9}$")]
OutputLimit = Annotated[int, Meta(ge=1, le=1 << 31)]


class StreamOptions(Struct, frozen=True, kw_only=True):
    """How a stream reports usage."""

    include_usage: Annotated[bool, Meta(description="a last chunk with `usage` before `[DONE]`")] = False
    continuous_usage_stats: Annotated[
        bool, Meta(description="with `include_usage`: each chunk has the token counts so far")
    ] = False
    include_obfuscation: Annotated[bool, Meta(description="accepted: chunks are never padded")] = True


class GenerationBody(Struct, frozen=True, kw_only=True):
    """The fields that chat and plain completions share."""

    model: Annotated[str, Meta(description="the served model's name; may be left out")] = ""
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES, description="choices for each prompt")] = 1
    max_tokens: Annotated[OutputLimit | None, Meta(description="tokens to generate at most")] = None
    min_tokens: Annotated[int, Meta(ge=0, description="tokens before a stop id may end the answer")] = 0
    temperature: Annotated[float, Meta(ge=0, le=2, description="0 is greedy")] = DEFAULT_TEMPERATURE
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=-1, le=1 << 31, description="0 and -1: off")] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10, description="over prompt and output")] = 1.0
    logit_bias: Annotated[
        dict[BiasKey, Bias], Meta(max_length=MAX_BIASES, description="token id to what is added to its logit")
    ] = {}
    allowed_token_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1, max_length=MAX_ALLOWED_IDS)] | None,
        Meta(description="only these are generated"),
    ] = None
    bad_words: Annotated[
        list[Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LEN)]],
        Meta(max_length=MAX_BAD_WORDS, description="never generated; words of one token each"),
    ] = []
    seed: Annotated[
        int | None,
        Meta(
            description="the same seed draws the same tokens; negative ones count from 2^64 down",
            extra_json_schema={"minimum": -(1 << 63), "maximum": MAX_SEED},
        ),
    ] = None
    stop: Annotated[
        StopString | Annotated[list[StopString], Meta(max_length=MAX_STOPS)],
        Meta(description="texts that end the answer"),
    ] = []
    stop_token_ids: Annotated[list[TokenId], Meta(max_length=MAX_STOP_IDS, description="ids that end the answer")] = []
    include_stop_str_in_output: Annotated[bool, Meta(description="what ended the answer stays in its text")] = False
    ignore_eos: Annotated[bool, Meta(description="the model's own end tokens do not end the answer")] = False
    skip_special_tokens: Annotated[bool, Meta(description="special tokens have no text")] = True
    add_special_tokens: Annotated[
        bool | None, Meta(description="the tokenizer adds what it wants around a text (BOS); by default not to chats")
    ] = None
    return_token_ids: Annotated[
        bool, Meta(description="choices have `token_ids`, the first part of each also `prompt_token_ids`")
    ] = False
    deadline_s: Annotated[
        Annotated[float, Meta(gt=0)] | None,
        Meta(description="seconds that the request may take, at most the server's `--request-timeout`"),
    ] = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_LEN, description="divides the cache of one key further")] = ""
    stream: Annotated[bool, Meta(description="server-sent events")] = False
    stream_options: Annotated[StreamOptions | None, Meta(description="needs `stream`")] = None


class TextPart(Struct, frozen=True, tag_field="type", tag="text"):
    """A part of a message. Only text is supported."""

    text: str


class ChatMessage(Struct, frozen=True, kw_only=True):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None


Messages = Annotated[
    list[ChatMessage], Meta(min_length=1, max_length=MAX_MESSAGES, description="the conversation; text only")
]
GenerationPrompt = Annotated[bool, Meta(description="the template opens the assistant's message")]
TemplateArguments = Annotated[dict[str, Any], Meta(description="variables for the model's own chat template")]


class ChatBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/chat/completions"""

    messages: Messages
    max_completion_tokens: Annotated[OutputLimit | None, Meta(description="wins over `max_tokens`")] = None
    logprobs: Annotated[bool, Meta(description="each token's log-probability")] = False
    top_logprobs: Annotated[
        int, Meta(ge=0, le=MAX_TOP_LOGPROBS, description="the best tokens at each position; needs `logprobs`")
    ] = 0
    add_generation_prompt: GenerationPrompt = True
    chat_template_kwargs: TemplateArguments = {}


class CompletionBody(GenerationBody, frozen=True, kw_only=True):
    """POST /v1/completions"""

    prompt: Annotated[Prompt, Meta(description="a text, token ids, or a list of either")]
    logprobs: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] | Literal[False] | None,
        Meta(description="log-probabilities of each token and of so many best at its position"),
    ] = None


class TokenizeBody(Struct, frozen=True, kw_only=True):
    """POST /tokenize"""

    model: Annotated[str, Meta(description="the served model's name; may be left out")] = ""
    prompt: Annotated[str | None, Meta(description="a text; or give `messages`")] = None
    messages: Messages | None = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="the tokenizer adds what it wants around a text (BOS); by default not to chats")
    ] = None
    add_generation_prompt: GenerationPrompt = True
    chat_template_kwargs: TemplateArguments = {}
