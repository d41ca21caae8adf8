"""Writes the turns of a chat as `transformers` reads them: a Jinja template of messages."""

import json

from data.templates import Chat

# In templates of chats without a system role: its message begins the first turn.
SYSTEM_FIRST = (
    "{% set system = '' %}"
    "{% if messages[0]['role'] == 'system' %}"
    "{% set system = CONTENT + '\\n\\n' %}"
    "{% set messages = messages[1:] %}"
    "{% endif %}"
)


def jinja_of(chat: Chat, start: str | None) -> str:
    """Returns the `chat_template` whose text has the tokens that `data.templates.Template` makes.

    Args:
        chat: the form of the turns.
        start: the token that begins a text, or None.
    """
    header, _, end = chat.turn.partition("{text}")
    before_role, _, after_role = header.partition("{role}")
    opening = chat.between + header.replace("{role}", chat.assistant)
    content = "(message['content'] | trim)" if chat.strips else "message['content']"
    parts = [f"{{{{ {_quoted(start)} }}}}"] if start else []
    text = content
    if not chat.has_system:
        parts.append(SYSTEM_FIRST.replace("CONTENT", content.replace("message", "messages[0]")))
        text = f"(system if loop.first else '') + {content}"
    parts += [
        "{% for message in messages %}",
        f"{{{{ '' if loop.first else {_quoted(chat.between)} }}}}",
        "{% set role = message['role'] %}",
        f"{{% if role == 'assistant' %}}{{% set role = {_quoted(chat.assistant)} %}}{{% endif %}}",
        f"{{{{ {_quoted(before_role)} + role + {_quoted(after_role)} }}}}",
        f"{{{{ {text} }}}}",
        f"{{{{ {_quoted(end)} }}}}",
        "{% endfor %}",
        f"{{% if add_generation_prompt %}}{{{{ {_quoted(opening)} }}}}{{% endif %}}",
    ]
    return "".join(parts)


def _quoted(text: str) -> str:
    """Returns a string of Jinja."""
    return json.dumps(text, ensure_ascii=False)
