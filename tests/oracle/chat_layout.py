"""The chat layout that the embedded model was trained on, as plain string building.

Messages are {"role", "content", "reasoning"?, "calls"?: [(name, {argument: value})]}.
"""

from __future__ import annotations

import json
from typing import Any

BEFORE_TOOLS = "# Tools\n\nYou have access to the following functions:\n\n<tools>"
AFTER_TOOLS = """
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
- Function calls MUST follow the specified format: an inner <function=...></function> block \
must be nested within <tool_call></tool_call> XML tags
- Required parameters MUST be specified
- You may provide optional reasoning for your function call in natural language BEFORE the \
function call, but NOT after
- If there is no function call available, answer the question like normal with your current \
knowledge and do not tell the user about function calls
</IMPORTANT>"""


def lay_out_chat(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> str:
    """The training text of a whole chat, without a generation prompt."""
    last_question = max(i for i, message in enumerate(messages) if message["role"] == "user")
    text = _head(messages, tools)
    for i, message in enumerate(messages):
        content = (message.get("content") or "").strip()
        if message["role"] == "user":
            text += f"<|im_start|>user\n{content}<|im_end|>\n"
        elif message["role"] == "assistant":
            text += "<|im_start|>assistant\n"
            if i > last_question:
                text += f"<think>\n{(message.get('reasoning') or '').strip()}\n</think>\n\n"
            text += content + _calls(message.get("calls") or [], content) + "<|im_end|>\n"
        elif message["role"] == "tool":
            if i == 0 or messages[i - 1]["role"] != "tool":
                text += "<|im_start|>user"
            text += f"\n<tool_response>\n{content}\n</tool_response>"
            if i + 1 == len(messages) or messages[i + 1]["role"] != "tool":
                text += "<|im_end|>\n"
    return text


def _head(messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> str:
    is_system = messages[0]["role"] == "system"
    instructions = messages[0]["content"].strip() if is_system else ""
    if tools:
        lines = [BEFORE_TOOLS, *(json.dumps(tool, ensure_ascii=False) for tool in tools)]
        after = f"\n\n{instructions}" if instructions else ""
        return "<|im_start|>system\n" + "\n".join(lines) + AFTER_TOOLS + after + "<|im_end|>\n"
    return f"<|im_start|>system\n{instructions}<|im_end|>\n" if instructions else ""


def _calls(calls: list[tuple[str, dict[str, Any]]], content: str) -> str:
    blocks = []
    for name, arguments in calls:
        block = f"<tool_call>\n<function={name}>\n"
        for key, value in arguments.items():
            shown = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            block += f"<parameter={key}>\n{shown}\n</parameter>\n"
        blocks.append(block + "</function>\n</tool_call>")
    return ("\n\n" if content and blocks else "") + "\n".join(blocks)
