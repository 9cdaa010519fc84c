"""Chats in which an assistant calls functions and reports what they return."""

from random import Random
from typing import Any

from tools.embedded_model.render import Message, render
from tools.embedded_model.synthetic.chat import SYSTEM_LINES
from tools.embedded_model.synthetic.language import with_article
from tools.embedded_model.synthetic.lexicon import QUESTIONS
from tools.embedded_model.synthetic.made_up_tools import made_up_tool
from tools.embedded_model.synthetic.smalltalk import small_exchange
from tools.embedded_model.synthetic.tools import TOOLS, Tool

_PARALLEL = ("get_weather", "get_time", "get_price")


def tool_chat(rng: Random) -> str:
    """One or two calls with their results; or none is needed; or the chat ends at the call."""
    tools = _random_tools(rng)
    definitions = [tool.definition for tool in tools]
    messages: list[Message] = []
    if rng.random() < 0.4:
        messages.append({"role": "system", "content": rng.choice(SYSTEM_LINES)})
    x = rng.random()
    if x < 0.2:
        return render([*messages, *_direct_answer(rng)], definitions)
    is_open_ended = x < 0.4
    for _ in range(rng.choice([1, 1, 1, 2])):
        messages += _call(rng, rng.choice(tools), is_open_ended)
        if is_open_ended:
            break
    return render(messages, definitions)


def _random_tools(rng: Random) -> list[Tool]:
    """Up to four functions of different names."""
    num_tools = rng.randint(1, 4)
    tools = rng.sample(TOOLS, num_tools)
    if rng.random() < 0.5:
        for _ in range(rng.randint(1, 3)):
            tool = made_up_tool(rng)
            if tool.name not in [other.name for other in tools]:
                tools.append(tool)
        rng.shuffle(tools)
    return tools[:4]


def _direct_answer(rng: Random) -> list[Message]:
    is_small_talk = rng.choice([True, False])
    question, answer = small_exchange(rng) if is_small_talk else rng.choice(QUESTIONS)
    reply: Message = {"role": "assistant", "content": answer}
    if rng.random() < 0.5:
        reply["reasoning"] = "No function is needed for this. I can answer directly."
    return [{"role": "user", "content": question}, reply]


def _call(rng: Random, tool: Tool, is_open_ended: bool) -> list[Message]:
    """Request, call, results and report; request and call only if the chat is open ended."""
    requests, arguments = tool.ask(rng)
    is_thinking = rng.random() < 0.5
    is_parallel = rng.random() < 0.12 and tool.name in _PARALLEL
    request = rng.choice(requests)
    calls = [(tool.name, arguments)]
    if is_parallel:
        _, second = tool.ask(rng)
        if second != arguments:
            calls.append((tool.name, second))
            request = _joint_request(tool, request, second)
    call: Message = {"role": "assistant", "content": "", "calls": calls}
    if is_thinking:
        call["reasoning"] = _call_reasoning(tool, arguments)
    messages: list[Message] = [{"role": "user", "content": request}, call]
    if is_open_ended:
        return messages
    results = [tool.result(rng, arguments) for _, arguments in calls]
    messages += [{"role": "tool", "content": output} for output, _ in results]
    report: Message = {"role": "assistant", "content": " ".join(text for _, text in results)}
    if is_thinking:
        report["reasoning"] = "I have the result, so I can answer now."
    return [*messages, report]


def _joint_request(tool: Tool, request: str, second: dict[str, Any]) -> str:
    (value,) = second.values()
    joined = with_article(value) if tool.name == "get_price" else f"in {value}"
    return f"{request.rstrip('?.')} and {joined}?"


def _call_reasoning(tool: Tool, arguments: dict[str, Any]) -> str:
    short = [f"{key} = {value}" for key, value in arguments.items() if len(str(value)) < 40]
    return f"I should call {tool.name} with {', '.join(short) or 'the given values'}."
