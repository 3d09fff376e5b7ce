"""Renders a conversation with the model's own template, as transformers does, in a sandbox that cannot change anything."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headstart.core.errors import ErrorCode, RequestError, WorkerError
from headstart.text.tokenizer import TextTokenizer

DEFAULT_NAME = "default"
TOOLS_NAME = "tool_use"
REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")
PROBE = "a probe of the form of content"
RENDER_ERRORS = (TypeError, ValueError, KeyError, AttributeError, ArithmeticError)


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A model's template, and the one it has for conversations with tools, if that is another.

    `tokens` are bos_token and so on; `now` serves templates that print the date.
    """

    def __init__(
        self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime], tools_source: str | None = None
    ) -> None:
        environment = _environment(now)
        self._template = _compile(environment, source)
        self._tools_template = self._template if tools_source is None else _compile(environment, tools_source)
        self._tokens = tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text. `extra` are further names for the template, and win over special tokens.

        A message's content may be a text or a list of text parts; it is given in the form that the template takes.
        Raises RequestError if the template refuses the conversation.
        """
        names = {**self._tokens, **(extra or {}), "tools": tools, "documents": documents}
        template = self._template if tools is None else self._tools_template
        chat = [_with_reasoning(self._with_content(message)) for message in messages]
        try:
            return template.render(messages=chat, add_generation_prompt=add_generation_prompt, **names)
        except jinja2.TemplateError as error:
            message = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(ErrorCode.INVALID, message, "messages") from error
        except RENDER_ERRORS as error:
            message = "the model's chat template cannot render this conversation"
            raise RequestError(ErrorCode.INVALID, message, "messages") from error

    @cached_property
    def takes_text(self) -> bool:
        """Whether a message's content may be a text. True as well of a template that shows neither form."""
        return self._shows(PROBE) or not self.takes_parts

    @cached_property
    def takes_parts(self) -> bool:
        """Whether a message's content may be a list of parts."""
        return self._shows([_text_part(PROBE)])

    def _shows(self, content: Any) -> bool:
        """Whether a conversation with this content comes out with the probe's text, and without the part's keys."""
        user = {"role": "user", "content": content}
        system = {"role": "system", "content": content}
        for chat in ([user], [system, user]):
            try:
                text = self._template.render(messages=chat, add_generation_prompt=True, **self._tokens)
            except (jinja2.TemplateError, *RENDER_ERRORS):
                continue
            if PROBE in text:
                return not any(key in text for key in ("'text'", '"text"'))
        return False

    def _with_content(self, message: Mapping[str, Any]) -> dict[str, Any]:
        """The message without fields that are null, its content in a form that the template takes."""
        given = {key: value for key, value in message.items() if value is not None}
        content = given.get("content")
        if isinstance(content, str) and not self.takes_text:
            given["content"] = [_text_part(content)]
        elif isinstance(content, list) and not self.takes_parts:
            given["content"] = "".join(str(part.get("text", "")) for part in content)
        return given


def template_source(config: Mapping[str, Any], name: str = DEFAULT_NAME) -> str | None:
    """A template in tokenizer_config.json: the only one, or one of a list of named ones. None if there is none."""
    stated = config.get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get(name)
    elif name != DEFAULT_NAME:
        return None
    return stated if isinstance(stated, str) else None


def load_chat_template(tokenizer: TextTokenizer, now: Callable[[], datetime]) -> ChatTemplate | None:
    """The template that came with a tokenizer. None if the model has none; WorkerError if it does not compile."""
    source, tools_source = template_source(tokenizer.config), template_source(tokenizer.config, TOOLS_NAME)
    return ChatTemplate(source, tokenizer.named_special_tokens, now, tools_source) if source else None


def _environment(now: Callable[[], datetime]) -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = lambda form: now().strftime(form)
    return environment


def _compile(environment: ImmutableSandboxedEnvironment, source: str) -> jinja2.Template:
    try:
        return environment.from_string(source)
    except jinja2.TemplateError as error:
        raise WorkerError(f"the model's chat template does not compile: {error}") from error


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """A message's reasoning under the name that most templates read, and under `thinking` for those that read that."""
    reasoning = next((message[name] for name in REASONING_NAMES if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Plain JSON: jinja2's own filter escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)
