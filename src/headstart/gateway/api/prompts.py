"""From what the client sent to token ids: a conversation, a text, or ids as they are."""

import asyncio
from collections.abc import Sequence
from typing import Any

from headstart.gateway.api.errors import invalid
from headstart.gateway.api.params import check_token_ids
from headstart.gateway.api.request_bodies import MAX_CHOICES, ChatBody, ChatMessage, CompletionBody, TokenizeBody
from headstart.gateway.api.validation import Problems
from headstart.gateway.model import ServedModel
from headstart.text.tokenizer import TextTokenizer

INLINE_CHARS = 4_000  # longer texts are encoded off the event loop
TEMPLATE_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt"})


async def encode(tokenizer: TextTokenizer, text: str, *, add_special_tokens: bool, name: str) -> list[int]:
    """Raises ApiError for a text that is no Unicode text."""
    if not text:
        return []
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise invalid(f"'{name}' holds a lone surrogate, which is no character", name, "invalid_value") from error
    if len(text) <= INLINE_CHARS:
        return tokenizer.encode(text, add_special_tokens)
    return await asyncio.to_thread(tokenizer.encode, text, add_special_tokens)


def render_chat(body: ChatBody | TokenizeBody, model: ServedModel) -> str:
    """The conversation as the model's template writes it."""
    assert body.messages is not None
    messages = read_messages(body.messages)
    if model.template is None:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    extra = {name: value for name, value in body.chat_template_kwargs.items() if name not in TEMPLATE_NAMES}
    return model.template.render(messages, body.add_generation_prompt, extra)


def read_messages(messages: Sequence[ChatMessage]) -> list[dict[str, Any]]:
    """As templates take them. Raises ApiError for a message without content, which only an assistant's may be."""
    problems = Problems()
    for index, message in enumerate(messages):
        if message.content is None and message.role != "assistant":
            problems.must_be(f"messages[{index}].content", "a string or a list of text parts", None)
    problems.refuse()
    return [_template_message(message) for message in messages]


def _template_message(message: ChatMessage) -> dict[str, Any]:
    parts = message.content or ""
    content = parts if isinstance(parts, str) else "".join(part.text for part in parts)
    optional = {"name": message.name, "reasoning_content": message.reasoning_content}
    return {
        "role": "system" if message.role == "developer" else message.role,
        "content": content,
        **{name: value for name, value in optional.items() if value is not None},
    }


async def read_prompts(body: CompletionBody, model: ServedModel) -> tuple[list[int], ...]:
    """`prompt` of the completions API: a text, ids, or a list of either. Raises ApiError."""
    named = _named_prompts(body)
    if len(named) * body.n > MAX_CHOICES:
        message = f"'prompt' has {len(named)} prompts and 'n' is {body.n}; at most {MAX_CHOICES} are answered at once"
        raise invalid(message, "prompt" if len(named) > MAX_CHOICES else "n", "invalid_value")
    special = body.add_special_tokens is not False
    prompts = []
    for name, item in named:
        if isinstance(item, str):
            ids = await encode(model.tokenizer, item, add_special_tokens=special, name=name)
        else:
            ids = _checked_ids(item, model, name)
        if not ids:
            raise invalid(f"'{name}' is empty", name, "invalid_value")
        prompts.append(ids)
    return tuple(prompts)


def _named_prompts(body: CompletionBody) -> list[tuple[str, Any]]:
    """Each prompt under the name that errors give it. A list that begins with an id is one prompt."""
    prompt = body.prompt
    if isinstance(prompt, str) or isinstance(prompt[0], int):
        return [("prompt", prompt)]
    return [(f"prompt[{index}]", item) for index, item in enumerate(prompt)]


def _checked_ids(item: Any, model: ServedModel, name: str) -> list[int]:
    """A list longer than the context is refused for its length, its ids unread."""
    problems = Problems()
    if not isinstance(item, list):
        problems.must_be(name, "a string or a list of token ids, as the first one", item)
    elif len(item) <= model.bounds.context_len:
        stranger = next((position for position, value in enumerate(item) if not isinstance(value, int)), None)
        if stranger is None:
            check_token_ids(item, model.bounds.vocab_size, name, problems)
        else:
            problems.must_be(f"{name}[{stranger}]", "a token id, as the first one", item[stranger])
    problems.refuse()
    ids: list[int] = item
    return ids
