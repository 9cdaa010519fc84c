"""S2: chat messages are brought into one form before the template (facts 1.2)."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.chat.messages import MAX_MESSAGES, MessageError, normalize_messages

USER: dict[str, Any] = {"role": "user", "content": "hi"}


def call(call_id: str | None, arguments: object = "{}", name: str = "f") -> dict[str, Any]:
    made: dict[str, Any] = {
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
    return made if call_id is None else made | {"id": call_id}


def assistant(*calls: dict[str, Any], **fields: object) -> dict[str, Any]:
    return {"role": "assistant", "content": None, "tool_calls": list(calls), **fields}


def tool(call_id: str | None, content: object = "r") -> dict[str, Any]:
    return {"role": "tool", "content": content, "tool_call_id": call_id}


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("plain", "plain"),
        ("", ""),
        ([], ""),
        ([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}], "ab"),
        ([{"type": "input_text", "text": "a"}, {"type": "output_text", "text": "b"}], "ab"),
        ([{"type": "refusal", "refusal": "no"}], "no"),
    ],
)
def test_content_becomes_text(content: object, text: str) -> None:
    """S2 (1.2 item 1). Oracle: the parts' texts, joined."""
    assert normalize_messages([{"role": "user", "content": content}])[0]["content"] == text


@pytest.mark.parametrize("role", ["assistant", "tool"])
def test_null_content_is_empty_where_models_and_tools_may_say_nothing(role: str) -> None:
    """S2 (1.2 item 1). Oracle: null == absent == empty."""
    for message in ({"role": role, "content": None}, {"role": role}):
        assert normalize_messages([USER, message])[1]["content"] == ""


def test_leading_system_messages_become_one() -> None:
    """S2 (1.2 item 2). Oracle: joined by an empty line, developer counts as system."""
    messages = [
        {"role": "developer", "content": "a"},
        {"role": "system", "content": [{"type": "text", "text": "b"}]},
        {"role": "system", "content": " "},
        USER,
    ]
    assert normalize_messages(messages) == [{"role": "system", "content": "a\n\nb"}, USER]
    assert normalize_messages([messages[2], USER])[0]["content"] == " "


def test_a_later_system_message_is_a_user_turn_in_its_place() -> None:
    """S2 (1.2 item 2). Oracle: order kept, nothing refused."""
    messages = [
        {"role": "system", "content": "s"},
        USER,
        {"role": "assistant", "content": "a"},
        {"role": "developer", "content": "later"},
        USER,
    ]
    normal = normalize_messages(messages)
    assert [message["role"] for message in normal] == [
        "system",
        "user",
        "assistant",
        "user",
        "user",
    ]
    assert normal[3]["content"] == "later"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": 1, "b": [true, null]}', {"a": 1, "b": [True, None]}),
        ("", {}),
        (None, {}),
        ("{}", {}),
        ({"a": 1}, {"a": 1}),
        ('{"z": 1, "a": 2}', {"z": 1, "a": 2}),
    ],
)
def test_arguments_become_objects(arguments: object, expected: dict[str, Any]) -> None:
    """S2 (1.2 item 4). Oracle: json.loads; the order of keys is kept."""
    normal = normalize_messages([USER, assistant(call("c", arguments))])
    found = normal[1]["tool_calls"][0]["function"]["arguments"]
    assert list(found.items()) == list(expected.items())
    assert normal[1]["content"] == ""


def test_arguments_may_be_absent() -> None:
    """S2 (1.2 item 4). Oracle: an empty object."""
    made = {"id": "c", "function": {"name": "f"}}
    normal = normalize_messages([USER, assistant(made)])
    assert normal[1]["tool_calls"][0]["function"]["arguments"] == {}
    assert normal[1]["tool_calls"][0]["type"] == "function"


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_has_one_name(name: str) -> None:
    """S2 (1.2 item 5). Oracle: the name that templates read."""
    normal = normalize_messages([USER, {"role": "assistant", "content": "a", name: "r"}])
    assert normal[1] == {"role": "assistant", "content": "a", "reasoning_content": "r"}


def test_null_and_unknown_keys_are_dropped() -> None:
    """S2 (1.2 item 5). Oracle: only what a template can read is left."""
    message = {"role": "assistant", "content": "a", "audio": None, "reasoning": None, "x": 1}
    normal = normalize_messages([USER | {"name": "bo"}, message | {"tool_calls": []}])
    assert normal == [USER | {"name": "bo"}, {"role": "assistant", "content": "a"}]


@pytest.mark.parametrize(
    ("content", "reasoning", "answer"),
    [
        ("<think>\nr\n</think>\n\na", "r", "a"),
        ("\n<think></think>a", "", "a"),
        ("<think>r</think>a</think>b", "r", "a</think>b"),
    ],
)
def test_raw_output_sent_back_is_split(content: str, reasoning: str, answer: str) -> None:
    """S2. Oracle: as if the client had sent reasoning_content."""
    normal = normalize_messages([USER, {"role": "assistant", "content": content}])
    assert (normal[1]["reasoning_content"], normal[1]["content"]) == (reasoning, answer)


@pytest.mark.parametrize("content", ["a <think>r</think>", "<think>r", "a</think>b"])
def test_other_mentions_of_thinking_are_text(content: str) -> None:
    """S2. Oracle: the content unchanged."""
    normal = normalize_messages([USER, {"role": "assistant", "content": content}])
    assert normal[1] == {"role": "assistant", "content": content}


def test_tool_results_follow_the_order_of_their_calls() -> None:
    """S2 (1.2 item 6). Oracle: the order of the ids in tool_calls, per run of results."""
    messages = [
        USER,
        assistant(call("a"), call("b"), call("c")),
        tool("c", [{"type": "text", "text": "3"}]),
        tool("a", "1"),
        tool("b", "2"),
        assistant(call("a"), call("d")),
        tool("d", "5"),
        tool("a", "4"),
    ]
    normal = normalize_messages(messages)
    results = [message["content"] for message in normal if message["role"] == "tool"]
    assert results == ["1", "2", "3", "4", "5"]


def test_tool_results_without_ids_keep_their_order() -> None:
    """S2 (1.2 item 6). Oracle: the given order."""
    messages = [USER, assistant(call("a"), call("b")), tool("b", "1"), tool(None, "2")]
    assert [m["content"] for m in normalize_messages(messages)[2:]] == ["1", "2"]


def deep(levels: int) -> str:
    return '{"a":' * levels + "1" + "}" * levels


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        (None, "messages"),
        ([], "messages"),
        ({}, "messages"),
        ("hi", "messages"),
        ([USER] * (MAX_MESSAGES + 1), "messages"),
        (["hi"], "messages[0]"),
        ([{"content": "x"}], "messages[0].role"),
        ([{"role": "function", "content": "x"}], "messages[0].role"),
        ([{"role": ["user"], "content": "x"}], "messages[0].role"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": None}], "messages[0].content"),
        ([{"role": "user", "content": 3}], "messages[0].content"),
        ([{"role": "user", "content": {"type": "text"}}], "messages[0].content"),
        ([{"role": "user", "content": "a\ud800"}], "messages[0].content"),
        ([USER, {"role": "user", "content": ["x"]}], "messages[1].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        (
            [USER, {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "file"}]}],
            "messages[1].content[1]",
        ),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": ["text"]}]}], "messages[0].content[0]"),
        ([{"role": "system", "content": "s"}], "messages"),
        ([{"role": "assistant", "content": "s"}], "messages"),
        ([USER, assistant(function_call={"name": "f"})], "messages[1].function_call"),
        ([USER, {"role": "assistant", "tool_calls": {}}], "messages[1].tool_calls"),
        ([USER, assistant({"type": "custom"})], "messages[1].tool_calls[0]"),
        ([USER, assistant({"type": "function"})], "messages[1].tool_calls[0].function"),
        ([USER, assistant(call("a", name=""))], "messages[1].tool_calls[0].function.name"),
        (
            [USER, assistant(call("a"), call("b", "{"))],
            "messages[1].tool_calls[1].function.arguments",
        ),
        ([USER, assistant(call("a", "[1]"))], "messages[1].tool_calls[0].function.arguments"),
        ([USER, assistant(call("a", 3))], "messages[1].tool_calls[0].function.arguments"),
        ([USER, assistant(call("a", "NaN"))], "messages[1].tool_calls[0].function.arguments"),
        (
            [USER, assistant(call("a", '{"a": NaN}'))],
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            [USER, assistant(call("a", '{"a": "\\ud800"}'))],
            "messages[1].tool_calls[0].function.arguments",
        ),
        (
            [USER, assistant(call("a", deep(100_000)))],
            "messages[1].tool_calls[0].function.arguments",
        ),
        ([USER, assistant(reasoning=["r"])], "messages[1].reasoning"),
        ([USER, assistant(call("a")), tool("b")], "messages[2].tool_call_id"),
        ([USER, tool("a")], "messages[1].tool_call_id"),
        ([USER | {"name": 3}], "messages[0].name"),
        ([USER | {"name": "n" * 2000}], "messages[0].name"),
    ],
)
def test_malformed_messages_name_the_field(messages: object, param: str) -> None:
    """S2 (1.1, 1.2). Oracle: the path of the value at fault, also in the message."""
    with pytest.raises(MessageError) as caught:
        normalize_messages(messages)
    assert caught.value.param == param
    assert str(caught.value).startswith(param)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "tool_calls", "id", "function"])
            | st.text(max_size=3),
            inner,
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(messages=JSON | st.lists(JSON, max_size=4))
def test_any_json_is_normalized_or_refused(messages: object) -> None:
    """S2. Oracle: MessageError is the only exception; normalizing again changes nothing."""
    try:
        normal = normalize_messages(messages)
    except MessageError:
        return
    assert normalize_messages(json.loads(json.dumps(normal))) == normal
