"""A tokenizer read from a model folder encodes, decodes and renders as transformers does with the same folder."""

import itertools
import json
import threading

import pytest

from headstart.core.errors import WorkerError
from headstart.text.chat_template import ChatTemplate, template_source
from headstart.text.folder import load_tokenizer

from .small import byte_level

TEXTS = ["", "The quick brown fox", " leading and  double  spaces\n\n", "äöü 你好 🙂", "a<|im_end|>b", "<|im_start|>"]
MESSAGES = [{"role": "system", "content": "Be <brief>."}, {"role": "user", "content": "Hi 🙂"}]


@pytest.fixture
def folder(tmp_path):
    tokenizer = byte_level()
    tokenizer._backend.save(str(tmp_path / "tokenizer.json"))
    config = {**tokenizer.config, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


def test_ids_texts_and_chats_equal_those_of_transformers(folder):
    transformers = pytest.importorskip("transformers")
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(str(folder))
    ours = load_tokenizer(folder)
    for text in TEXTS:
        ids = ours.encode(text)
        assert ids == theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip) == theirs.decode(ids, skip_special_tokens=skip)
    template = ChatTemplate(template_source(ours.config), ours.named_special_tokens, lambda: None)
    chat = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert ours.encode(template.render(MESSAGES), add_special_tokens=False) == chat


def test_bytes_of_single_ids_add_up_to_the_text():
    tokenizer = byte_level()
    for text in TEXTS:
        assert b"".join(map(tokenizer.token_bytes, tokenizer.encode(text))) == text.encode()
    assert tokenizer.token_bytes(10**6) == b""


def test_special_tokens_are_known_by_id_and_text():
    assert byte_level().special_ids == {0, 1, 2}
    assert byte_level().special_texts == ("<|endoftext|>", "<|im_start|>", "<|im_end|>")


def test_a_separate_template_file_wins(folder):
    (folder / "chat_template.jinja").write_text("{{ messages[0].content }}")
    assert template_source(load_tokenizer(folder).config) == "{{ messages[0].content }}"


@pytest.mark.parametrize(
    ("name", "content"), [("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("tokenizer.json", None)]
)
def test_a_folder_that_cannot_be_read_is_named(folder, name, content):
    path = folder / name
    path.unlink() if content is None else path.write_text(content)
    with pytest.raises(WorkerError, match=name):
        load_tokenizer(folder)


def test_other_threads_run_while_a_long_text_is_encoded():
    byte_level().encode("warm")
    turns, counted = itertools.count(), []

    def encode():
        before = next(turns)
        byte_level().encode(TEXTS[1] * 20_000)
        counted.append(next(turns) - before)

    encoding = threading.Thread(target=encode)
    encoding.start()
    while encoding.is_alive():
        encoding.join(0.001)
        next(turns)
    assert counted[0] > 10
