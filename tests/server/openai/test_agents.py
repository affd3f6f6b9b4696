"""/v1/responses as coding agents use it: namespaces, custom tools, a local shell, hosted tools, reasoning that comes
back.
"""

import json
import re
from typing import Any

import openai
import pytest
from openai.types.responses import Response

from server.settings import ServerConfig
from tests.server.openai.test_responses import PATH, events
from tests.support.fake_engine import GrammarEngine
from tests.support.live_server import Serve
from tests.support.live_server import start_answering as start
from tests.support.templates import HERMES, QWEN3

# What Codex CLI 0.169 sends with its first turn, cut down.
EXEC = {
    "type": "function",
    "name": "exec_command",
    "description": "Runs a command in a PTY.",
    "strict": False,
    "parameters": {
        "type": "object",
        "properties": {"cmd": {"type": "string"}, "login": {"type": "boolean"}},
        "required": ["cmd"],
        "additionalProperties": False,
    },
}
AGENTS = {
    "type": "namespace",
    "name": "multi_agent_v1",
    "description": "Tools for managing sub-agents.",
    "tools": [
        {
            "type": "function",
            "name": "close_agent",
            "description": "Close an agent.",
            "strict": False,
            "parameters": {"type": "object", "properties": {"target": {"type": "string"}}, "required": ["target"]},
        }
    ],
}
PATCH = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": 'start: "*** Begin Patch"'},
}
TOOLS = [EXEC, AGENTS, PATCH, {"type": "local_shell"}, {"type": "web_search", "external_web_access": False}]
CODEX: dict[str, Any] = {
    "model": "toy",
    "store": False,
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "reasoning": {"summary": "auto"},
    "include": ["reasoning.encrypted_content"],
    "prompt_cache_key": "01a20425",
    "client_metadata": {"session_id": "01a20425"},
    "tools": TOOLS,
    "input": [
        {"type": "message", "role": "developer",
        "content": [{"type": "input_text", "text": "You are a coding agent."}]},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "say hi"}]},
    ],
}  # fmt: skip


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def test_a_turn_of_codex(serve: Serve) -> None:
    patch = '*** Begin Patch\n+ "a"\n'
    arguments = [
        ("multi_agent_v1__close_agent", '{"target": "a"}'),
        ("apply_patch", json.dumps({"input": patch})),
        ("local_shell", '{"command": ["ls", "-l"], "timeout_ms": 5}'),
    ]
    live = start(serve, QWEN3, "<think>\nHm.\n</think>\n\n" + "".join(call(*each) for each in arguments))
    found = events(live, **CODEX)
    final = found[-1]["response"]
    reasoning, function, custom, shell = final["output"]
    assert reasoning["encrypted_content"]
    assert (function["namespace"], function["name"], function["arguments"]) == (
        "multi_agent_v1", "close_agent", '{"target": "a"}',
    )  # fmt: skip
    assert (custom["type"], custom["name"], custom["input"]) == ("custom_tool_call", "apply_patch", patch)
    assert shell["action"] == {"type": "exec", "command": ["ls", "-l"], "env": {}, "timeout_ms": 5}
    assert (final["status"], final["tools"]) == ("completed", TOOLS)
    assert [warning.partition(":")[0] for warning in final["warnings"]] == ["tools[4]"]
    texts = {e["type"]: e for e in found if e["type"].startswith("response.custom_tool_call_input")}
    assert texts["response.custom_tool_call_input.delta"]["delta"] == patch
    assert texts["response.custom_tool_call_input.done"]["input"] == patch
    prompt = live.prompt_text()
    assert "web_search" not in prompt
    assert '"name": "multi_agent_v1__close_agent"' in prompt
    assert "Tools for managing sub-agents." in prompt
    assert "*** Begin Patch" in prompt, "the model is shown the grammar"


@pytest.mark.parametrize(
    ("arguments", "text"),
    [("{", ""), ('{"inp', ""), ('{"input"\n: ', ""), ('{"input": "a \\"b', 'a "b'), ('{"input": "a\\', "a")],
)
def test_a_custom_call_that_is_cut_has_the_text_alone(serve: Serve, arguments: str, text: str) -> None:
    live = start(serve, QWEN3, call("apply_patch", arguments).partition("}\n</tool_call>")[0])
    final = events(live, **CODEX)[-1]["response"]
    assert final["status"] == "incomplete"
    (item,) = final["output"]
    assert (item["type"], item["status"], item["input"]) == ("custom_tool_call", "incomplete", text)


def test_the_turn_after(serve: Serve) -> None:
    """The model sees its calls as it wrote them, and its reasoning, though the client sends only what is packed."""
    live = start(serve, QWEN3.replace("m.content }}", "(m.reasoning or '') + m.content }}"), "Done.")
    live.engine.answer = "<think>\nHm.\n</think>\n\n" + call("apply_patch", '{"input": "x"}')
    first = live.post(PATH, **CODEX).json()["output"]
    packed = {name: value for name, value in first[0].items() if name not in ("content", "status")}
    items = [
        packed,
        first[1],
        {"type": "custom_tool_call_output", "call_id": first[1]["call_id"], "output": "patched"},
        {"type": "function_call", "call_id": "2", "namespace": "multi_agent_v1", "name": "close_agent",
         "arguments": '{"target": "a"}'},
        {"type": "function_call_output", "call_id": "2", "output": "closed"},
        {"type": "local_shell_call", "id": "lsh_1", "call_id": "3", "status": "completed",
         "action": {"type": "exec", "command": ["ls"], "env": {}}},
        {"type": "local_shell_call_output", "id": "3", "output": "a b"},
    ]  # fmt: skip
    response = live.post(PATH, **{**CODEX, "input": CODEX["input"] + items}).json()
    assert live.prompt_text().partition("say hi")[2] == (
        "<|im_end|>\n<|im_start|>assistant\nHm." + call("apply_patch", '{"input": "x"}')
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\npatched\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n" + call("multi_agent_v1__close_agent", '{"target": "a"}')
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\nclosed\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n" + call("local_shell", '{"command": ["ls"]}')
        + "<|im_end|>\n<|im_start|>user\n<tool_response>\na b\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    )  # fmt: skip
    assert [warning.partition(":")[0] for warning in response["warnings"]] == ["tools[4]"]


def test_items_of_other_servers_are_left_out_and_named(serve: Serve) -> None:
    items = [
        {"role": "user", "content": "a"},
        {"type": "web_search_call", "id": "ws_1", "status": "completed", "action": {"type": "search", "query": "x"}},
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "gAAAA"},
        {"type": "compaction", "encrypted_content": "gAAAA"},
        {"role": "user", "content": "b"},
    ]
    live = start(serve, HERMES, "Done.")
    response = live.post(PATH, input=items).json()
    assert live.prompt_text() == (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>user\nb<|im_end|>\n<|im_start|>assistant\n"
    )
    names = [warning.partition(":")[0] for warning in response["warnings"]]
    assert names == ["input[1]", "input[2].encrypted_content", "input[3].encrypted_content"]
    strict = start(serve, HERMES, "Done.", ServerConfig(strict=True))
    error = strict.post(PATH, input=items).json()["error"]
    assert (error["code"], error["param"]) == (400, "input[1]")
    error = strict.post(PATH, input="a", tools=TOOLS).json()["error"]
    assert (error["code"], error["param"]) == (400, "tools[4]")


def test_a_cut_call(serve: Serve) -> None:
    live = start(serve, HERMES, call("apply_patch", json.dumps({"input": "*** Begin\n" * 9})))
    response = live.post(PATH, **CODEX, max_output_tokens=88).json()
    (item,) = response["output"]
    assert (response["status"], item["status"]) == ("incomplete", "incomplete")
    assert item["input"].startswith("*** Begin\n*** ")


@pytest.mark.parametrize(
    ("choice", "first"),
    [
        ({"type": "custom", "name": "digits"}, "custom_tool_call"),
        ({"type": "function", "name": "close_agent", "namespace": "multi_agent_v1"}, "function_call"),
        ({"type": "allowed_tools", "mode": "required", "tools": [{"type": "web_search"}, {"type": "local_shell"}]},
         "local_shell_call"),
    ],
)  # fmt: skip
def test_a_chosen_tool_is_called(serve: Serve, choice: Any, first: str) -> None:
    digits = {
        "type": "custom",
        "name": "digits",
        "format": {"type": "grammar", "syntax": "regex", "definition": "[0-9]+|x"},
    }
    live = serve(GrammarEngine(template=HERMES, max_model_len=4096))
    live.engine.answer = call("nothing of the kind", "{}")
    body = {"input": "Hi", "tools": [*TOOLS, digits], "tool_choice": choice}
    for seed in range(5):
        response = live.post(PATH, **body, seed=seed, max_output_tokens=900).json()
        Response.model_validate(response)
        item = response["output"][0]
        assert item["type"] == first
        if first == "custom_tool_call" and item["status"] == "completed":
            assert item["input"] == "x" or item["input"].isdigit()


# A part of what Codex sends with its tool.
LARK = """start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?
hunk: "*** Add File: " filename LF add_line+
filename: /([a-z.]+)/
add_line: "+" /(.{1,4})/ LF -> line
%import common.LF
"""


def test_a_grammar_is_enforced(serve: Serve) -> None:
    live = serve(GrammarEngine(template=HERMES, max_model_len=4096))
    custom: dict[str, Any] = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": LARK}}
    live.engine.answer = call("apply_patch", '{"input": "hello')
    body = {"input": "Hi", "tools": [custom], "tool_choice": {"type": "custom", "name": "apply_patch"}}
    inputs = [live.post(PATH, **body, seed=seed, max_output_tokens=900).json()["output"][0] for seed in range(8)]
    complete = [item["input"] for item in inputs if item["status"] == "completed"]
    assert complete
    for text in complete:
        assert re.fullmatch(
            r"\*\*\* Begin Patch\n(\*\*\* Add File: [a-z.]+\n(\+[^\n]{1,4}\n)+)+\*\*\* End Patch\n?", text
        )


def test_a_grammar_that_cannot_be_enforced_is_named(serve: Serve) -> None:
    custom: dict[str, Any] = {**PATCH, "format": {"type": "grammar", "syntax": "lark", "definition": "start: /(?i)a/"}}
    live = serve(GrammarEngine(template=HERMES, max_model_len=4096))
    live.engine.answer = call("apply_patch", '{"input": "hello"}')
    choice = {"type": "custom", "name": "apply_patch"}
    body = live.post(PATH, input="Hi", tools=[custom], tool_choice=choice, max_output_tokens=300).json()
    (warning,) = body["warnings"]
    assert warning.startswith("tools[0]: the arguments of apply_patch: input may be any text, for its grammar: ")


def test_two_tools_of_one_name_are_refused(serve: Serve) -> None:
    live = start(serve, HERMES, "Done.")
    same = {"type": "function", "name": "multi_agent_v1__close_agent"}
    error = live.post(PATH, input="a", tools=[same, {"type": "web_search"}, AGENTS]).json()["error"]
    assert (error["code"], error["param"]) == (400, "tools[2].tools[0].name")


def test_the_official_client_reads_custom_calls(serve: Serve) -> None:
    live = start(
        serve, HERMES, call("apply_patch", '{"input": "x"}') + call("multi_agent_v1__close_agent", '{"target": "a"}')
    )
    base_url = f"http://127.0.0.1:{live.port}/v1"
    tools: Any = TOOLS
    with openai.OpenAI(base_url=base_url, api_key="none", max_retries=0, _strict_response_validation=True) as client:
        with client.responses.stream(model="toy", input="Hi", tools=tools) as stream:
            kinds = [event.type for event in stream if event.type.startswith("response.custom_tool_call_input")]
            final = stream.get_final_response()
        assert kinds == ["response.custom_tool_call_input.delta", "response.custom_tool_call_input.done"]
        assert [item.type for item in final.output] == ["custom_tool_call", "function_call"]
        again: Any = [{"role": "user", "content": "Hi"}, *final.output]
        assert client.responses.create(model="toy", input=again, tools=tools).status == "completed"
