"""Chat messages as text, in the layout that the model is trained on."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NotRequired, TypedDict

ToolCall = tuple[str, Mapping[str, Any]]


class Message(TypedDict):
    """One message. Only an assistant message has `reasoning` or `calls` (name and arguments)."""

    role: str
    content: str
    reasoning: NotRequired[str]
    calls: NotRequired[Sequence[ToolCall]]


TOOLS_HEAD = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
TOOLS_TAIL = """
</tools>

If you choose to call a function ONLY reply in the following format with NO suffix:

<tool_call>
<function=example_function_name>
<parameter=example_parameter_1>
value_1
</parameter>
<parameter=example_parameter_2>
This is the value for the second parameter
that can span
multiple lines
</parameter>
</function>
</tool_call>

<IMPORTANT>
Reminder:
- Function calls MUST follow the specified format: an inner <function=...></function> block must \
be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the \
function call, but NOT after
- If there is no function call available, answer the question like normal with your current \
knowledge and do not tell the user about function calls
</IMPORTANT>"""


def render(messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """Render a whole conversation.

    Messages of role system (first place only), user, assistant and tool; at least one is of a
    user. Reasoning is kept in the turns after the last user message and dropped before it.
    """
    last_user = max(i for i, message in enumerate(messages) if message["role"] == "user")
    parts = [_system_block(messages[0], tools)]
    for i, message in enumerate(messages):
        content = (message["content"] or "").strip()
        if message["role"] == "user":
            parts.append(f"<|im_start|>user\n{content}<|im_end|>\n")
        elif message["role"] == "assistant":
            parts.append(_assistant_block(message, content, is_reasoning_kept=i > last_user))
        elif message["role"] == "tool":
            is_first = messages[i - 1]["role"] != "tool"
            is_last = i + 1 == len(messages) or messages[i + 1]["role"] != "tool"
            parts.append("<|im_start|>user" if is_first else "")
            parts.append(f"\n<tool_response>\n{content}\n</tool_response>")
            parts.append("<|im_end|>\n" if is_last else "")
    return "".join(parts)


def _system_block(first: Message, tools: Sequence[Mapping[str, Any]] | None) -> str:
    text = first["content"].strip() if first["role"] == "system" else ""
    if tools:
        definitions = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in tools)
        text = TOOLS_HEAD + definitions + TOOLS_TAIL + ("\n\n" + text if text else "")
    return f"<|im_start|>system\n{text}<|im_end|>\n" if text else ""


def _assistant_block(message: Message, content: str, is_reasoning_kept: bool) -> str:
    text = "<|im_start|>assistant\n"
    if is_reasoning_kept:
        text += f"<think>\n{(message.get('reasoning') or '').strip()}\n</think>\n\n"
    text += content
    for k, (name, arguments) in enumerate(message.get("calls") or ()):
        text += "\n" if k > 0 else "\n\n" if content else ""
        text += f"<tool_call>\n<function={name}>\n"
        for parameter, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            text += f"<parameter={parameter}>\n{shown}\n</parameter>\n"
        text += "</function>\n</tool_call>"
    return text + "<|im_end|>\n"
