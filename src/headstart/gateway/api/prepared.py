"""A checked request, ready to run, and what is reported of it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headstart.core.errors import ErrorCode
from headstart.gateway.api.errors import ApiError, from_failure
from headstart.gateway.api.params import OutputOptions
from headstart.gateway.api.response_bodies import Usage
from headstart.gateway.api.response_format import ResponseFormat
from headstart.gateway.api.usage import MemoryUsage, build_usage
from headstart.gateway.generation import GenerationSpec
from headstart.gateway.stream import ChoiceOutput, Failure

log = logging.getLogger("headstart.gateway")


@dataclass(frozen=True, slots=True)
class Prepared:
    """What to generate and how to answer. `on_answer` is called with every choice that completes."""

    response_id: str
    endpoint: str
    spec: GenerationSpec
    output: OutputOptions
    response_format: ResponseFormat
    memory: MemoryUsage
    on_answer: Callable[[ChoiceOutput], None] = lambda answer: None

    def usage(self, answers: Sequence[ChoiceOutput]) -> Usage:
        ends = [answer.end for answer in answers if answer.end is not None]
        return build_usage(self.spec, ends, self.memory)

    def error(self, failure: Failure) -> ApiError:
        """What the client is told; an internal reason goes to the log."""
        if failure.code is ErrorCode.INTERNAL:
            log.error("request failed", extra={"request": self.response_id, "reason": failure.message})
        return from_failure(failure)
