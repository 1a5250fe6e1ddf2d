"""Chat templates render as transformers renders them."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from lorikeet.chat.text_processor import read_chat_template
from lorikeet.core.chat_template import ChatTemplate, ContentForm, TemplateError
from lorikeet.models.default import prepare_default_model

MESSAGES = [
    {"role": "system", "content": 'Be <brief> & "kind".'},
    {"role": "user", "content": "Grüße, 日本語?\n"},
    {"role": "assistant", "content": "yes"},
    {"role": "user", "content": "  more  "},
]

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}{% set system = messages[0]['content'] %}"
    "{% else %}{% set rest = messages %}{% set system = false %}{% endif %}"
    "{% for message in rest %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant') }}{% endif %}"
    "{% if loop.index0 == 0 and system != false %}"
    "{% set content = '<<SYS>>' + system + '<</SYS>>' + message['content'] %}"
    "{% else %}{% set content = message['content'] %}{% endif %}"
    "{% if message['role'] == 'user' %}{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}"
    "{% else %}{{ ' ' + content.strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
WITH_STATEMENTS_ON_LINES = """
{%- for message in messages %}
    {% if message.role == 'system' %}
    {% continue %}
    {% endif %}
{{ message | tojson }}
    {% generation %}
{{ message.content | upper }}
    {% endgeneration %}
{%- endfor %}
{% if enable_thinking is defined and enable_thinking %}<think>{% endif %}
"""
WITH_NAMESPACE = (
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ m.content }}{% endfor %}"
    "{{ {'b': [1, 'é'], 'a': none} | tojson(indent=2) }}{% if tools %}tools{% endif %}{% if documents %}d{% endif %}"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}


@pytest.mark.parametrize("template", [LLAMA_2, WITH_STATEMENTS_ON_LINES, WITH_NAMESPACE])
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("extra", [{}, {"enable_thinking": True}])
def test_templates_render_as_in_transformers(template: str, generation: bool, extra: dict[str, Any]) -> None:
    ours = ChatTemplate(template, SPECIAL).render(MESSAGES, add_generation_prompt=generation, extra=extra)
    theirs, _ = render_jinja_template(
        [MESSAGES], chat_template=template, add_generation_prompt=generation, **SPECIAL, **extra
    )
    assert ours == theirs[0]


@pytest.mark.slow
def test_the_default_models_template_renders_as_in_transformers(default_model_cache: Path) -> None:
    from transformers import AutoTokenizer

    folder = prepare_default_model(default_model_cache)
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    template = read_chat_template(folder)
    assert template is not None
    for messages in (MESSAGES, MESSAGES[1:]):
        expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages, add_generation_prompt=True, extra={}) == expected


def test_refusal_of_a_template_has_its_reason() -> None:
    with pytest.raises(TemplateError, match="roles must alternate"):
        ChatTemplate(LLAMA_2, SPECIAL).render(MESSAGES[2:], add_generation_prompt=True, extra={})
    with pytest.raises(TemplateError, match="does not compile"):
        ChatTemplate("{% if %}", {})


@pytest.mark.parametrize("template", [LLAMA_2, WITH_STATEMENTS_ON_LINES])
def test_continued_prompt_ends_with_the_text_of_the_last_message(template: str) -> None:
    messages = [{"role": "user", "content": "what?"}, {"role": "assistant", "content": "7 yes, "}]
    compiled = ChatTemplate(template, SPECIAL)
    text = compiled.render_open(messages, extra={})
    # Space at its end stays where it would in a whole message, as in transformers.
    assert text.endswith("7 YES, " if template is WITH_STATEMENTS_ON_LINES else "7 yes,")
    whole = compiled.render(messages, add_generation_prompt=False, extra={})
    assert whole.startswith(text.rstrip())


def test_message_missing_from_the_prompt_cannot_be_continued() -> None:
    with pytest.raises(TemplateError, match="leaves out the last message"):
        ChatTemplate("{{ messages[0].content }}", {}).render_open(MESSAGES, extra={})


@pytest.mark.parametrize("source", ["{{ messages.__class__.__mro__ }}", "{{ messages.append(1) }}"])
def test_a_template_cannot_leave_its_sandbox(source: str) -> None:
    with pytest.raises(TemplateError):
        ChatTemplate(source, {}).render(MESSAGES, add_generation_prompt=True, extra={})


def test_a_template_is_read_from_wherever_checkpoints_keep_it(tmp_path: Path) -> None:
    def rendered(override: str = "") -> str | None:
        template = read_chat_template(tmp_path, override)
        return template and template.render([], add_generation_prompt=False, extra={})

    assert rendered() is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<s>"}}))
    assert rendered() == "config <s>"
    named = [{"name": "tool_use", "template": "tools"}, {"name": "default", "template": "named"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert rendered() == "named"
    (tmp_path / "chat_template.jinja").write_text("file")
    assert rendered() == "file"
    (tmp_path / "own.jinja").write_text("own")
    assert rendered(str(tmp_path / "own.jinja")) == "own"
    with pytest.raises(TemplateError, match="no such file"):
        rendered(str(tmp_path / "missing.jinja"))


@pytest.mark.parametrize(
    ("template", "role"),
    [
        ("{% for m in messages %}{{ m.role }}{% endfor %}", "system"),
        ("{% for m in messages %}{{ 'd' if m.role == 'developer' else m.role }}{% endfor %}", "d"),
    ],
)
def test_template_without_developer_role_gets_a_system_message(template: str, role: str) -> None:
    messages = [{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}]
    assert ChatTemplate(template, {}).render(messages, add_generation_prompt=False, extra={}) == f"{role}user"


def test_value_nested_too_deeply_for_a_filter_is_refused() -> None:
    nested: list[Any] = []
    for _ in range(20_000):
        nested = [nested]
    with pytest.raises(TemplateError, match="recursion"):
        ChatTemplate("{{ messages[0].x | tojson }}", {}).render(
            [{"role": "user", "x": nested}], add_generation_prompt=False, extra={}
        )


CONTENT = {
    ContentForm.TEXT: ["{{ m['content'] }}", "{{ m.content | trim }}", "{{ m.content.split('x')[0] }}"],
    ContentForm.PARTS: [
        "{% for p in m['content'] %}{% if p['type'] == 'text' %}{{ p['text'] }}{% endif %}{% endfor %}",
        "{% for p in m.content | selectattr('type', 'equalto', 'text') %}{{ p.text }}{% endfor %}",
        "{{ m.content[0].text }}",
        "{{ m['content'] | map(attribute='text') | join }}",
        "{% set c = m.content %}{% for p in c %}{{ p['text'] }}{% endfor %}",
    ],
    ContentForm.EITHER: [
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}",
        "{% macro show(c) %}{% if c is string %}{{ c }}{% else %}{{ c | map(attribute='text') | join }}{% endif %}"
        "{% endmacro %}{{ show(m.content) }}",
    ],
    ContentForm.NEITHER: ["{{ m.role }}", "{{ m.text }}"],
}


@pytest.mark.parametrize(("form", "inner"), [(form, each) for form, all_of in CONTENT.items() for each in all_of])
def test_form_of_content_for_a_template_is_detected(form: ContentForm, inner: str) -> None:
    source = f"{{% for m in messages %}}{{{{ m.role }}}}:{inner};{{% endfor %}}"
    template = ChatTemplate(source, SPECIAL)
    assert template.form_of("user") is form
    assert template.leaves_text_out == (form is ContentForm.NEITHER)
    if form is ContentForm.NEITHER:
        return
    messages: list[dict[str, Any]] = [{"role": "system", "content": "s"}, {"role": "user", "content": "Grüße"}]
    parts = [{**each, "content": [{"type": "text", "text": each["content"]}]} for each in messages]
    for given in (messages, parts):
        prompt = template.render(given, add_generation_prompt=True, extra={})
        assert prompt == "system:s;user:Grüße;"
        theirs, _ = render_jinja_template(
            [parts if form is ContentForm.PARTS else messages], chat_template=source, add_generation_prompt=True
        )
        assert prompt == theirs[0]
    assert template.render_open(messages, extra={}) == "system:s;user:Grüße"


def test_each_role_has_a_separate_form() -> None:
    source = (
        "{% for m in messages %}{% if m.role == 'user' %}{% for p in m.content %}{{ p.text }}{% endfor %}"
        "{% else %}{{ m.content }}{% endif %};{% endfor %}"
    )
    template = ChatTemplate(source, {})
    said = [{"role": role, "content": role[0]} for role in ("system", "user", "assistant", "user")]
    assert template.render(said, add_generation_prompt=False, extra={}) == "s;u;a;u;"


@pytest.mark.parametrize(
    ("inner", "is_text"),
    [
        ("{{ c.function.name + ' ' + c.function.arguments }}", True),
        ("{{ c['function']['arguments'] }}", True),
        ("{{ c.function.arguments | tojson }}", False),
        ("{% for k, v in c.function.arguments | items %}{{ k }}={{ v }}{% endfor %}", False),
        ("{% if c.function.arguments is string %}{{ c.function.arguments }}{% else %}"
         "{{ c.function.arguments | tojson }}{% endif %}", False),
    ],
)  # fmt: skip
def test_form_of_arguments_for_a_template_is_detected(inner: str, is_text: bool) -> None:
    calls = f"{{% for c in m.tool_calls or [] %}}{inner}{{% endfor %}}"
    source = f"{{% for m in messages %}}{{{{ m.content }}}}{calls}{{% endfor %}}"
    template = ChatTemplate(source, {})
    assert template.reads_arguments_as_text == is_text
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
    said = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert "x" in template.render(said, add_generation_prompt=False, extra={})


@pytest.mark.parametrize("form", ["text", "list", "object", "json", "files"])
def test_templates_are_found_in_every_form_that_transformers_writes(tmp_path: Path, form: str) -> None:
    texts = {"default": "d {{ messages[0].content }}", "tool_use": "t {{ tools }}"}
    config: dict[str, Any] = {"eos_token": "</s>"}
    if form == "text":
        config["chat_template"] = texts["default"]
    elif form == "list":
        config["chat_template"] = [{"name": name, "template": text} for name, text in texts.items()]
    elif form == "object":
        config["chat_template"] = texts
    elif form == "json":
        (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": texts}))
    else:
        (tmp_path / "additional_chat_templates").mkdir()
        (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text(texts["tool_use"])
        (tmp_path / "chat_template.jinja").write_text(texts["default"])
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    found = read_chat_template(tmp_path)
    assert found is not None
    assert found.source == texts["default"]
    assert found.special_tokens == {"eos_token": "</s>"}
    assert found.choose(tools=True).source == texts["default" if form == "text" else "tool_use"]
    assert found.choose(name="default", tools=True) is found
    if form != "text":
        by_name = read_chat_template(tmp_path, "tool_use")
        assert by_name is not None
        assert by_name.source == texts["tool_use"]
    with pytest.raises(TemplateError, match="no such file"):
        read_chat_template(tmp_path, "other")
    with pytest.raises(TemplateError, match="no chat template 'other', only default"):
        found.choose(name="other")
