"""Conversations as clients send them, each with the texts that its prompt must contain."""

from __future__ import annotations

from typing import Any

Message = dict[str, Any]
TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "Looks up a city.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city."}},
            "required": ["city"],
        },
    },
}


def said(role: str, text: str | None, **more: Any) -> Message:
    return {"role": role, "content": text, **more}


def call(city: Any = '{"city": "Paris"}', call_id: str = "call_abc12", name: str = "lookup") -> Message:
    return {"id": call_id, "type": "function", "function": {"name": name, "arguments": city}}


def called(*calls: Message, text: str | None = None, **more: Any) -> Message:
    return said("assistant", text, tool_calls=list(calls), **more)


def result(text: str = "RESULT", call_id: str = "call_abc12") -> Message:
    return {"role": "tool", "tool_call_id": call_id, "content": text}


ASK, ANSWER, AGAIN = said("user", "2+2?"), said("assistant", "It is 4."), said("user", "3+3?")
SYSTEM, SECOND = said("system", "SYSONE"), said("system", "SYSTWO")
DEVELOPER = said("developer", "DEVTEXT")

PLAIN: dict[str, list[Message]] = {
    "question": [ASK],
    "system": [SYSTEM, ASK],
    "developer": [DEVELOPER, ASK],
    "two systems": [SYSTEM, SECOND, ASK],
    "developer and system": [DEVELOPER, SYSTEM, ASK],
    "system and developer": [SYSTEM, DEVELOPER, ASK],
    "system later": [SYSTEM, ASK, ANSWER, SECOND, AGAIN],
    "system only later": [ASK, SYSTEM],
    "developer later": [SYSTEM, ASK, ANSWER, DEVELOPER, AGAIN],
    "only a system": [SYSTEM],
    "the same twice": [ASK, ASK],
    "two users": [ASK, AGAIN],
    "three users later": [ASK, ANSWER, AGAIN, said("user", "And?"), said("user", "Well?")],
    "two answers": [ASK, ANSWER, said("assistant", "Sure."), AGAIN],
    "answer first": [said("assistant", "Hello!"), ASK],
    "system, answer first": [SYSTEM, said("assistant", "Hello!"), ASK],
    "answer last": [ASK, ANSWER],
    "an empty answer": [ASK, said("assistant", ""), AGAIN],
    "an empty question": [said("user", ""), ANSWER, AGAIN],
}
CALLS: dict[str, list[Message]] = {
    "result": [ASK, called(call()), result()],
    "result, system": [SYSTEM, ASK, called(call()), result()],
    "result, no text": [ASK, called(call(), text=""), result()],
    "no arguments": [ASK, called(call("{}")), result()],
    "arguments null": [ASK, called(call("null")), result()],
    "arguments as an object": [ASK, called(call({"city": "Paris"})), result()],
    "arguments as text": [ASK, called(call('"London"')), result()],
    "arguments as bare text": [ASK, called(call("London")), result()],
    "arguments as a list": [ASK, called(call('["London"]')), result()],
    "arguments cut off": [ASK, called(call('{"city": "Lond')), result()],
    "an empty result": [ASK, called(call()), result("")],
    "text beside": [ASK, called(call(), text="I look it up."), result()],
    "reasoning beside": [ASK, called(call(), reasoning="WHYCALL"), result()],
    "text and reasoning beside": [ASK, called(call(), text="I look it up.", reasoning="WHYCALL"), result()],
    "two calls": [
        ASK,
        called(call(call_id="c1"), call('{"city": "Rome"}', "c2")),
        result("R1", "c1"),
        result("R2", "c2"),
    ],
    "two calls, results in another order": [
        ASK,
        called(call(call_id="c1"), call('{"city": "Rome"}', "c2")),
        result("R2", "c2"),
        result("R1", "c1"),
    ],
    "two calls, one result": [
        ASK,
        called(call(call_id="c1"), call('{"city": "Rome"}', "c2")),
        result("R1", "c1"),
        AGAIN,
    ],
    "user after result": [ASK, called(call()), result(), said("user", "<system-reminder>x</system-reminder>")],
    "two users after result": [ASK, called(call()), result(), AGAIN, said("user", "Well?")],
    "system after result": [SYSTEM, ASK, called(call()), result(), SECOND],
    "answer after result": [ASK, called(call()), result(), ANSWER, AGAIN],
    "cancelled": [ASK, called(call()), AGAIN],
    "cancelled, with text": [ASK, called(call(), text="I look it up."), AGAIN],
    "result without its call": [ASK, result()],
    "result without its call, later": [ASK, ANSWER, result(), AGAIN],
    "rounds": [
        SYSTEM,
        ASK,
        called(call(call_id="c1"), text="First."),
        result("R1", "c1"),
        called(call('{"city": "Rome"}', "c2"), text="Second."),
        result("R2", "c2"),
        ANSWER,
        AGAIN,
    ],
    "without ids": [
        ASK,
        called({"type": "function", "function": {"name": "lookup", "arguments": "{}"}}),
        {"role": "tool", "content": "RESULT"},
    ],
}
ALL = PLAIN | CALLS


def texts_of(messages: list[Message]) -> list[str]:
    """Parts that the prompt of a conversation must contain: texts, names of calls, and cities."""
    found = []
    for message in messages:
        found += [message["content"]] if message.get("content") else []
        for each in message.get("tool_calls") or ():
            found.append(each["function"]["name"])
            found += [city for city in ("Paris", "Rome", "Lond") if city in str(each["function"]["arguments"])]
    return found


def as_items(messages: list[Message]) -> list[Message]:
    """The conversation as items of /v1/responses."""
    items: list[Message] = []
    for message in messages:
        if message["role"] == "tool":
            items.append(
                {"type": "function_call_output", "call_id": message.get("tool_call_id"), "output": message["content"]}
            )
            continue
        if message.get("reasoning"):
            content = [{"type": "reasoning_text", "text": message["reasoning"]}]
            items.append({"type": "reasoning", "summary": [], "content": content})
        if message.get("content") or not message.get("tool_calls"):
            items.append({"role": message["role"], "content": message["content"]})
        items += [
            {"type": "function_call", "call_id": each.get("id"), **each["function"]}
            for each in message.get("tool_calls") or ()
        ]
    return items


def as_anthropic(messages: list[Message]) -> list[Message]:
    """The conversation as messages of /v1/messages: results are blocks of the user's."""
    found: list[Message] = []
    for message in messages:
        role, text = message["role"], message.get("content")
        if role == "tool":
            block = {"type": "tool_result", "tool_use_id": message.get("tool_call_id"), "content": text}
            found.append({"role": "user", "content": [block]})
            continue
        blocks: list[Message] = []
        if message.get("reasoning"):
            blocks.append({"type": "thinking", "thinking": message["reasoning"], "signature": ""})
        if text or not message.get("tool_calls"):
            blocks.append({"type": "text", "text": text})
        for each in message.get("tool_calls") or ():
            function = each["function"]
            blocks.append(
                {"type": "tool_use", "id": each.get("id"), "name": function["name"], "input": function["arguments"]}
            )
        found.append({"role": "system" if role == "developer" else role, "content": blocks})
    return found


def as_ollama(messages: list[Message]) -> list[Message]:
    """The conversation as messages of /api/chat."""
    found = []
    for message in messages:
        kept = {name: message[name] for name in ("role", "content", "tool_call_id", "tool_calls") if name in message}
        found.append(kept | ({"thinking": message["reasoning"]} if message.get("reasoning") else {}))
    return found


def requests_of(messages: list[Message], tools: list[Message] | None, max_tokens: int = 2) -> dict[str, Message]:
    """The same conversation as a request to each API, by path."""
    functions = [tool["function"] for tool in tools or ()]
    of_responses = [{"type": "function", **each} for each in functions]
    of_anthropic = [
        {"name": each["name"], "description": each["description"], "input_schema": each["parameters"]}
        for each in functions
    ]
    common: Message = {"tools": tools} if tools else {}
    return {
        "/v1/chat/completions": {"messages": messages, "max_tokens": max_tokens, **common},
        "/tokenize": {"messages": messages, **common},
        "/v1/responses": {
            "input": as_items(messages),
            "max_output_tokens": max_tokens,
            **({"tools": of_responses} if tools else {}),
        },
        "/v1/messages": {
            "model": "toy",
            "messages": as_anthropic(messages),
            "max_tokens": max_tokens,
            "thinking": {"type": "adaptive"},
            **({"tools": of_anthropic} if tools else {}),
        },
        "/api/chat": {
            "model": "toy",
            "messages": as_ollama(messages),
            "stream": False,
            "options": {"num_predict": max_tokens},
            **common,
        },
    }
