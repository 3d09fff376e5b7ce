"""The model as the gateway serves it: names, bounds, tokenizer and template. Never its weights."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from headstart.text.chat_template import ChatTemplate, load_chat_template
from headstart.text.folder import load_tokenizer
from headstart.text.tokenizer import TextTokenizer


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """What config.json says."""

    vocab_size: int
    context_len: int  # longest prompt plus output, tokens
    eos_token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`name` is what clients call it."""

    name: str
    bounds: ModelBounds
    tokenizer: TextTokenizer
    template: ChatTemplate | None


def load_served_model(
    folder: Path, name: str, bounds: ModelBounds, now: Callable[[], datetime] = datetime.now
) -> ServedModel:
    """Read what is needed from a model folder. Raises WorkerError. `now` is for templates that print the date."""
    tokenizer = load_tokenizer(folder)
    return ServedModel(name, bounds, tokenizer, load_chat_template(tokenizer, now))
