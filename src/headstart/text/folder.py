"""Reads a model folder's tokenizer files. What transformers' AutoTokenizer makes of the folder is the right value."""

import json
from pathlib import Path
from typing import Any

import tokenizers

from headstart.core.errors import WorkerError
from headstart.text.class_parts import replace_parts
from headstart.text.special_tokens import TokenFiles, gather
from headstart.text.tokenizer import TextTokenizer
from headstart.text.tokenizer_class import CLASS_TOKENS, tokenizer_class

TEMPLATE_FILE = "chat_template.jinja"
TEMPLATE_FOLDER = "additional_chat_templates"

Json = dict[str, Any]


def load_tokenizer(folder: Path) -> TextTokenizer:
    """Read a tokenizer and what belongs to it. Raises WorkerError with a message for the user."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        raise WorkerError(f"{folder} has no tokenizer.json")
    file = _read(path)
    config, model = _read(folder / "tokenizer_config.json"), _read(folder / "config.json")
    stated = config.get("tokenizer_class") or model.get("tokenizer_class")
    name = tokenizer_class(stated, model.get("model_type"), _is_byte_level(file))
    listed = file.get("added_tokens") or ()
    files = TokenFiles(config, _read(folder / "special_tokens_map.json"), _read(folder / "added_tokens.json"), listed)
    try:
        tokens = gather(files, CLASS_TOKENS.get(name, {}))
        backend = _backend(path, replace_parts(file, name, config))
        known = [token.content for token in backend.get_added_tokens_decoder().values()]
        backend.add_tokens(tokens.missing_from(known))
    except Exception as error:  # the library raises bare Exception
        raise WorkerError(f"cannot read {path}: {error}") from error
    backend.encode_special_tokens = bool(config.get("split_special_tokens", False))
    return TextTokenizer(backend, _with_templates(config, folder), tokens.texts)


def _read(path: Path) -> Json:
    """A JSON object; empty if there is no such file."""
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WorkerError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(found, dict):
        raise WorkerError(f"{path} holds no JSON object")
    return found


def _backend(path: Path, replaced: Json | None) -> tokenizers.Tokenizer:
    """The library's tokenizer, from the file as it is or with parts of it `replaced`."""
    if replaced is None:
        backend = tokenizers.Tokenizer.from_file(str(path))
    else:
        backend = tokenizers.Tokenizer.from_str(json.dumps(replaced))
    backend.no_truncation()
    backend.no_padding()
    return backend


def _is_byte_level(file: Json) -> bool:
    steps = [file.get(key) or {} for key in ("pre_tokenizer", "decoder", "post_processor")]
    for step in steps:
        steps += [inner for key in ("pretokenizers", "decoders", "processors") for inner in step.get(key, ())]
    return any(step.get("type") == "ByteLevel" for step in steps)


def _with_templates(config: Json, folder: Path) -> Json:
    """`config` with the templates of files, which win over its own."""
    named = {path.stem: _text(path) for path in sorted((folder / TEMPLATE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).is_file():
        named["default"] = _text(folder / TEMPLATE_FILE)
    if not named:
        return config
    return {**config, "chat_template": [{"name": name, "template": source} for name, source in named.items()]}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise WorkerError(f"{path} is not UTF-8: {error}") from error
