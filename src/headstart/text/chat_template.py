"""Renders a conversation with the model's own template, as transformers does, in a sandbox that cannot change anything."""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from headstart.core.errors import ErrorCode, RequestError, WorkerError

FALLBACK_NAME = "default"


class _GenerationTag(Extension):
    """`{% generation %}` marks the assistant's words for training; here it renders its body."""

    tags = {"generation"}  # noqa: RUF012 (jinja2's own protocol)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One compiled template. `tokens` are bos_token and so on; `now` serves templates that print the date."""

    def __init__(self, source: str, tokens: Mapping[str, str], now: Callable[[], datetime]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise WorkerError(f"the model's chat template does not compile: {error}") from error
        self._tokens = tokens

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        extra: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text. Raises RequestError where the template refuses the conversation."""
        names = {**(extra or {}), **self._tokens, "tools": None, "documents": None}
        try:
            return self._template.render(messages=messages, add_generation_prompt=add_generation_prompt, **names)
        except jinja2.TemplateError as error:
            message = f"the model's chat template refuses this conversation: {error}"
            raise RequestError(ErrorCode.INVALID, message, "messages") from error
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            message = "the model's chat template cannot render this conversation"
            raise RequestError(ErrorCode.INVALID, message, "messages") from error


def template_source(config: Mapping[str, Any]) -> str | None:
    """The template in tokenizer_config.json, by itself or in a list of named ones; None if the model has none."""
    stated = config.get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get(FALLBACK_NAME)
    return stated if isinstance(stated, str) else None


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
