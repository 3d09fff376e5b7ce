"""Templates render as transformers renders them, refuse in words, and can change nothing."""

from datetime import datetime

import pytest

from headstart.core.errors import RequestError, WorkerError
from headstart.text.chat_template import ChatTemplate, template_source
from tests.support.small_tokenizers import CHATML, byte_level

MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi <there> & ü"}]
TRICKY = """
{%- for message in messages %}
    {%- if message.role == 'user' %}
        {{- bos_token + message.content | trim + eos_token }}
    {%- else %}
        {{- message | tojson }} {% generation %}{{ message.content }}{% endgeneration %}
    {%- endif %}
    {%- if loop.index0 > 3 %}{% break %}{% endif %}
{% endfor %}
{%- if add_generation_prompt %}>>>{% endif %}"""


def template(source, tokens=None):
    return ChatTemplate(source, tokens or {"bos_token": "<s>", "eos_token": "</s>"}, lambda: datetime(2026, 7, 26))


@pytest.mark.parametrize("source", [CHATML, TRICKY])
@pytest.mark.parametrize("add_generation_prompt", [True, False])
def test_a_render_equals_the_one_of_transformers(source, add_generation_prompt):
    transformers_renderer = pytest.importorskip("transformers.utils.chat_template_utils")
    theirs, _ = transformers_renderer.render_jinja_template(
        conversations=[MESSAGES],
        chat_template=source,
        add_generation_prompt=add_generation_prompt,
        bos_token="<s>",
        eos_token="</s>",
    )
    assert template(source).render(MESSAGES, add_generation_prompt) == theirs[0]


def test_a_template_may_refuse_a_conversation_and_its_words_reach_the_client():
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        template("{{ raise_exception('roles must alternate') }}").render(MESSAGES)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("source", ["{{ messages[0]['content'] + 1 }}", "{{ messages[9].content }}", "{{ 1 // 0 }}"])
def test_a_template_that_trips_over_a_conversation_refuses_it(source):
    with pytest.raises(RequestError, match="chat template"):
        template(source).render(MESSAGES)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
        "{% set x = messages[0].update({'a': 1}) %}",
        "{{ cycler.__init__.__globals__ }}",
    ],
)
def test_a_template_cannot_leave_its_sandbox(source):
    with pytest.raises(RequestError):
        template(source).render([dict(message) for message in MESSAGES])


def test_a_broken_template_is_found_when_the_model_is_loaded():
    with pytest.raises(WorkerError, match="does not compile"):
        template("{% for %}")


def test_dates_come_from_the_given_clock():
    assert template("{{ strftime_now('%d %b %Y') }}").render(MESSAGES) == "26 Jul 2026"


def test_the_template_is_found_by_itself_and_among_named_ones():
    assert template_source(byte_level().config) == CHATML
    named = {"chat_template": [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]}
    assert template_source(named) == "d"
    assert template_source({}) is None
    assert byte_level().named_special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
