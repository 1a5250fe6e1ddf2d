"""Chat templates of adapters."""

OWN_TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if tools %}<|tool_call|>{{ tools | length }}{% endif %}{{ eos_token }}"
)
