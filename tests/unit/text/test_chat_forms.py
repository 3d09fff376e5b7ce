"""A template gets a conversation in the form that it takes, and with what transformers gives it besides the messages."""

import pytest

from headstart.core.errors import RequestError
from headstart.text.chat_template import ChatTemplate

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}
TEXT = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
JOINED = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + eos_token }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m.role }}>{% for part in m.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}"
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0]['text'] }}{% endfor %}"
BOTH = (
    "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}({{ part['text'] }}){% endfor %}{% endif %}{% endfor %}"
)
SYSTEM_FIRST = "{% if messages[0].role != 'system' %}{{ raise_exception('no system') }}{% endif %}" + PARTS
AS_TEXT = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
AS_PARTS = [{"role": m["role"], "content": [{"type": "text", "text": m["content"]}]} for m in AS_TEXT]
TOOLS = [{"type": "function", "function": {"name": "look", "description": "ü <b>", "parameters": {"type": "object"}}}]
DOCUMENTS = [{"title": "One", "text": "first"}, {"title": "Two", "text": "second"}]


def template(source):
    return ChatTemplate(source, TOKENS, lambda: None)


def theirs(source, messages, **names):
    utils = pytest.importorskip("transformers.utils.chat_template_utils")
    names = {**TOKENS, "add_generation_prompt": True, **names}
    rendered, _ = utils.render_jinja_template(conversations=[messages], chat_template=source, **names)
    return rendered[0]


@pytest.mark.parametrize(
    ("source", "takes_text", "takes_parts"),
    [
        (TEXT, True, False),
        (JOINED, True, False),
        (PARTS, False, True),
        (FIRST_PART, False, True),
        (BOTH, True, True),
        (SYSTEM_FIRST, False, True),
        ("{{ messages | tojson }}", True, False),
        ("nothing of it", True, False),
        ("{{ raise_exception('never') }}", True, False),
    ],
)
def test_content_is_given_in_the_form_that_a_template_takes(source, takes_text, takes_parts):
    ours = template(source)
    assert (ours.takes_text, ours.takes_parts) == (takes_text, takes_parts)
    if "never" in source:
        return
    for messages in (AS_TEXT, AS_PARTS):
        expected = messages if takes_text and takes_parts else AS_TEXT if takes_text else AS_PARTS
        assert ours.render(messages) == theirs(source, expected)


def test_several_text_parts_are_joined_for_a_template_that_takes_text():
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    assert template(TEXT).render([{"role": "user", "content": parts}]) == "<user>Hello"


@pytest.mark.parametrize("name", ["reasoning_content", "thinking", "reasoning"])
@pytest.mark.parametrize("read", ["reasoning_content", "thinking"])
def test_reasoning_reaches_a_template_under_whatever_name_it_is_sent(name, read):
    source = "{% for m in messages %}{{ m." + read + " or '-' }}|{{ m.content }}{% endfor %}"
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes", name: "Hm"}]
    assert template(source).render(messages) == theirs(source, messages) == "-|HiHm|Yes"


def test_fields_that_are_null_are_left_out():
    source = "{% for m in messages %}{{ 'content' in m }}{{ 'name' in m }}{{ m.tool_calls is defined }}{% endfor %}"
    messages = [{"role": "assistant", "content": "x", "name": None, "tool_calls": None}]
    assert template(source).render(messages) == "TrueFalseFalse"


@pytest.mark.parametrize(
    "source",
    [
        "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{{ tools is none }}",
        "{% for t in tools or [] %}{{ t.function.name }}{{ t | tojson }}{% endfor %}",
        "{% for d in documents or [] %}{{ loop.index }}: {{ d['title'] }} {{ d.text }}\n{% endfor %}{{ documents is none }}",
        "{{ enable_thinking }}{{ add_generation_prompt }}{{ bos_token }}{{ unknown is defined }}",
    ],
)
@pytest.mark.parametrize(
    "names",
    [{}, {"tools": TOOLS}, {"documents": DOCUMENTS}, {"tools": TOOLS, "documents": DOCUMENTS}],
    ids=["plain", "tools", "documents", "both"],
)
def test_tools_and_documents_and_further_names_reach_a_template(source, names):
    extra = {"enable_thinking": False, "bos_token": "<other>"}
    ours = template(source).render(AS_TEXT, extra=extra, **names)
    assert ours == theirs(source, AS_TEXT, **extra, **names)


def test_a_template_for_tools_serves_only_conversations_with_tools():
    ours = ChatTemplate("plain", TOKENS, lambda: None, "{{ tools[0].function.name }}")
    assert (ours.render(AS_TEXT), ours.render(AS_TEXT, tools=TOOLS)) == ("plain", "look")


def test_a_template_that_takes_no_form_of_the_content_refuses_it_in_words():
    with pytest.raises(RequestError, match="never"):
        template("{{ raise_exception('never') }}").render(AS_PARTS)
