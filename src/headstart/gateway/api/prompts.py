"""From what the client sent to token ids: a conversation, a text, or ids as they are."""

import asyncio
from typing import Any

from headstart.gateway.api.errors import invalid
from headstart.gateway.api.validate import Fields, check_token_ids
from headstart.gateway.model import ServedModel
from headstart.text.tokenizer import TextTokenizer

ROLES = ("system", "developer", "user", "assistant")
MAX_MESSAGES = 1 << 14
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


def render_chat(fields: Fields, model: ServedModel) -> str:
    """The conversation as the model's template writes it."""
    messages = read_messages(fields)
    if model.template is None:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    extra = {name: value for name, value in fields.object("chat_template_kwargs").items() if name not in TEMPLATE_NAMES}
    return model.template.render(messages, fields.boolean("add_generation_prompt", True), extra)


def read_messages(fields: Fields) -> list[dict[str, Any]]:
    messages = fields.raw("messages")
    if not isinstance(messages, list) or not messages:
        raise fields.error("messages", "a non-empty list of messages")
    if len(messages) > MAX_MESSAGES:
        raise fields.error("messages", f"a list of at most {MAX_MESSAGES} messages")
    return [_read_message(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _read_message(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, dict):
        raise invalid(f"'{path}' must be an object with 'role' and 'content'", path, "invalid_value")
    fields = Fields(message, path)
    role = message.get("role")
    if role not in ROLES:
        known = ", ".join(ROLES)
        raise invalid(f"'{path}.role' must be one of {known}", f"{path}.role", "invalid_value")
    fields.refuse({"tool_calls": ([],), "function_call": (), "audio": ()})
    content = message.get("content")
    if content is None and role != "assistant":
        raise fields.error("content", "a string or a list of text parts")
    return {"role": "system" if role == "developer" else role, "content": _read_content(content, fields)}


def _read_content(content: Any, fields: Fields) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise fields.error("content", "a string or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not isinstance(text, str):
            raise fields.error(f"content[{index}]", "a text part: only text is supported")
        texts.append(text)
    return "".join(texts)


async def read_prompts(fields: Fields, model: ServedModel, max_prompts: int) -> tuple[list[int], ...]:
    """`prompt` of the completions API: a text, ids, or a list of either."""
    prompt = fields.raw("prompt")
    vocab_size = model.bounds.vocab_size
    wanted = "a non-empty string, a non-empty list of token ids, or a list of either"
    if isinstance(prompt, str) or (isinstance(prompt, list) and prompt and _is_number(prompt[0])):
        prompt, names = [prompt], ["prompt"]
    elif isinstance(prompt, list) and prompt:
        names = [f"prompt[{index}]" for index in range(len(prompt))]
    else:
        raise fields.error("prompt", wanted)
    if len(prompt) > max_prompts:
        raise invalid(f"'prompt' has {len(prompt)} prompts; at most {max_prompts} are answered at once", "prompt")
    prompts = []
    for item, name in zip(prompt, names, strict=True):
        if isinstance(item, str):
            ids = await encode(model.tokenizer, item, add_special_tokens=True, name=name) if item else []
        elif isinstance(item, list):
            if len(item) <= model.bounds.context_len:  # longer ones are refused for their length, unread
                check_token_ids(item, vocab_size, name)
            ids = item
        else:
            raise invalid(f"'{name}' must be {wanted}", name, "invalid_value")
        if not ids:
            raise invalid(f"'{name}' is empty", name, "invalid_value")
        prompts.append(ids)
    return tuple(prompts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)
