"""Settings of a conversation: prompt, sampling, form, tools; token probabilities; the key; the theme; shortcuts."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chat_page import SIZES, ChatPage
from tests.support.page_stub import Stub

pytestmark = pytest.mark.heavy


def test_the_system_prompt_belongs_to_the_conversation_and_is_seen(page: ChatPage, stub: Stub) -> None:
    page.set(system="Be kind.")
    page.see("#system-text", "Be kind.")
    page.ask("1 and 2")
    assert stub.requests[-1]["messages"][0] == {"role": "system", "content": "Be kind."}
    page.tab.reload()
    page.see("#system-text", "Be kind.")
    page.new_chat()
    page.tab.wait_for_selector("#system-strip", state="hidden")
    page.ask("3 and 4")
    assert stub.requests[-1]["messages"][0]["role"] == "user"


def test_every_sampling_parameter_of_the_server_can_be_set(page: ChatPage, stub: Stub) -> None:
    page.tab.click("#open-settings")
    page.tab.click(".more-settings >> nth=0 >> summary")
    page.tab.wait_for_selector("#parameter-top_p")
    names = set(page.run("[...document.querySelectorAll('[data-parameter]')].map((each) => each.dataset.parameter)"))
    assert {
        "top_k",
        "min_p",
        "typical_p",
        "seed",
        "stop",
        "repetition_penalty",
        "xtc_probability",
        "logit_bias",
    } <= names
    assert not {"messages", "model", "user", "stream", "use_beam_search"} & names
    assert page.texts(".parameter-group[open] > summary") == ["Sampling"]
    page.tab.fill("#parameter-top_p", "0.9")
    page.tab.fill("#find-parameter", "no parameter has this")
    assert page.texts(".parameters label:visible") == []
    page.tab.fill("#find-parameter", "end-of-seq")
    assert page.texts(".parameters label:visible") == ["ignore_eos"]
    page.tab.fill("#find-parameter", "")
    assert page.texts(".parameter-group[open] > summary") == ["Sampling 1 set"]
    page.run("document.querySelectorAll('.parameter-group').forEach((each) => (each.open = true))")
    page.tab.fill("#parameter-stop", "end\\n\nEND")
    page.tab.fill("#parameter-logit_bias", '{"5": -1}')
    page.tab.select_option("#parameter-ignore_eos", "true")
    page.tab.select_option("#parameter-reasoning_effort", "low")
    page.tab.keyboard.press("Escape")
    page.set(temperature="0.5", max_tokens="3")
    page.ask("a story")
    wanted = {"top_p": 0.9, "stop": ["end\n", "END"], "logit_bias": {"5": -1}, "ignore_eos": True}
    wanted |= {"reasoning_effort": "low", "temperature": 0.5, "max_tokens": 3}
    assert wanted.items() <= stub.requests[-1].items()
    assert page.texts(".stats")[0].endswith("reached the token limit")


def test_each_value_has_a_way_back_to_the_default(page: ChatPage, stub: Stub) -> None:
    page.set(temperature="0.5", max_tokens="7")
    page.tab.click("#open-settings")
    page.tab.fill("#parameter-top_p", "0.9")
    assert page.texts("#parameters-set") == ["3 set"]
    for name in ("temperature", "max tokens", "top_p"):
        page.tab.click(f"[aria-label='Default {name}']")
        assert not page.tab.is_visible(f"[aria-label='Default {name}']")
    assert page.run("document.activeElement.id") == "parameter-top_p"
    assert page.texts("#temperature-value") == ["model default"]
    page.tab.keyboard.press("Escape")
    page.ask("1 and 2")
    assert not {"temperature", "max_tokens", "top_p"} & set(stub.requests[-1])


def test_settings_for_new_chats_and_reset(page: ChatPage, stub: Stub) -> None:
    page.set(max_tokens="5", system="Be kind.")
    page.tab.click("#open-settings")
    page.tab.click("#keep-settings")
    page.tab.keyboard.press("Escape")
    page.tab.reload()
    page.wait_for_status("ready")
    page.ask("a story")
    assert stub.requests[-1]["max_tokens"] == 5
    page.tab.click("#open-settings")
    page.tab.click("#reset")
    page.tab.keyboard.press("Escape")
    page.ask("a story")
    assert "max_tokens" not in stub.requests[-1]
    assert stub.requests[-1]["messages"][0]["content"] == "Be kind."
    page.tab.click("#open-settings")
    page.tab.fill("#max-tokens", "3")
    page.tab.click("#reset")
    page.tab.click("#toast-action")  # undo, in the dialog
    assert page.run("document.querySelector('#max-tokens').value") == "3"
    page.tab.keyboard.press("Escape")
    page.ask("a story")
    assert stub.requests[-1]["max_tokens"] == 3


@pytest.mark.parametrize("size", SIZES)
def test_presets(page: ChatPage, stub: Stub, size: str) -> None:
    page.tab.set_viewport_size(SIZES[size])
    page.set(system="Be brief.", max_tokens="9")
    page.tab.click("#open-settings")
    page.tab.click("#save-preset")
    page.tab.keyboard.type("Brief")
    page.tab.keyboard.press("Enter")
    assert page.run("document.querySelector('#settings').open")
    page.tab.keyboard.press("Escape")
    page.ask("1 and 2")
    page.new_chat()
    page.tab.click("#open-settings")
    page.tab.select_option("#preset", "Brief")
    assert page.run("document.querySelector('#system').value") == "Be brief."
    page.tab.fill("#system", "Be long.")  # of this conversation, not of the preset
    page.tab.keyboard.press("Escape")
    page.ask("1 and 2")
    assert (stub.requests[-1]["max_tokens"], stub.requests[-1]["messages"][0]["content"]) == (9, "Be long.")
    assert "preset" not in stub.requests[-1]
    page.new_chat()
    page.tab.click("#open-settings")
    page.tab.select_option("#preset", "Brief")
    assert page.run("document.querySelector('#system').value") == "Be brief."
    page.tab.click("#toast-action")  # undo
    assert page.run("document.querySelector('#system').value") == ""
    page.tab.select_option("#preset", "Brief")
    page.tab.click("#delete-preset")
    assert page.texts("#preset option") == ["None"]
    page.tab.click("#toast-action")
    assert page.texts("#preset option") == ["None", "Brief"]


def test_a_json_schema(page: ChatPage, stub: Stub) -> None:
    page.set(schema="{not")
    assert "Not valid JSON" in page.run("document.querySelector('#schema-error').textContent")
    page.ask("1 and 2", until="failed")
    page.see(".failure-text", "Settings: Not valid JSON")
    page.set(schema='{"type": "object"}')
    page.ask("1 and 2")
    assert stub.requests[-1]["response_format"]["json_schema"]["schema"] == {"type": "object"}


WRONG = {
    "schema": {
        '{"type": "objct"}': 'type: "objct" is none of string',
        '{"properties": {"age": {"type": "integr"}}}': 'properties.age.type: "integr" is none of',
        '{"anyOf": [{"required": "a"}]}': "anyOf.0.required: must be a list",
        "3": "The schema: must be an object",
    },
    "tools": {
        '[{"description": "nameless"}]': 'Tool 1 needs a "name"',
        '[{"name": "a"}, {"type": "function", "function": {"name": "a"}}]': "Two tools have the name a",
        '{"name": "a", "parameters": {"type": "objct"}}': 'a.parameters.type: "objct"',
        "[null]": 'Tool 1 needs a "name"',
    },
}


@pytest.mark.parametrize("field", WRONG)
def test_tools_and_schemas_are_checked_while_they_are_typed(page: ChatPage, field: str) -> None:
    page.tab.click("#open-settings")
    page.run("document.querySelectorAll('#settings details').forEach((each) => (each.open = true))")
    error = f"document.querySelector('#{field}-error').textContent"
    for text, wanted in WRONG[field].items():
        page.tab.fill(f"#{field}", text)
        assert wanted in page.run(error), text
        assert page.tab.get_attribute(f"#{field}", "aria-invalid") == "true"
    page.tab.fill(f"#{field}", '{"name": "a", "parameters": {"type": ["object", "null"], "required": ["x"]}}')
    assert page.run(error) == ""


def test_demonstration_tools_run_in_the_page(page: ChatPage, stub: Stub) -> None:
    page.set(demo_tools=True)
    page.ask("call the calculator")
    page.see(".prose", "The tool said 126.")
    assert page.texts(".call-head") == ["Calls calculate"]
    assert page.texts(".call-result") == ["126"]
    first, second = stub.requests
    assert [tool["function"]["name"] for tool in first["tools"]] == ["get_time", "calculate"]
    assert second["messages"][-1] == {"role": "tool", "tool_call_id": "call-1", "content": "126"}
    assert second["messages"][-2]["tool_calls"][0]["function"]["name"] == "calculate"


def test_results_of_other_tools_are_typed_in(page: ChatPage, stub: Stub) -> None:
    page.set(tools='[{"name": "get_weather", "parameters": {"type": "object"}}]')
    page.ask("call it")
    page.tab.fill(".result textarea", "sunny")
    page.tab.click(".result button")
    page.see(".prose", "The tool said sunny.")
    assert stub.requests[-1]["messages"][-1]["content"] == "sunny"


SUMS = {
    "(17 + 25) * 3": 126,
    "2 ^ 3 ^ 2": 512,
    "-2 ** 2": -4,
    "1.5e3/4 - .5": 374.5,
    "sqrt(16) * (2 - -1)": 12,
}


def test_the_calculator(page: ChatPage) -> None:
    script = """async (texts) => {
        const { calculate } = await import("/static/js/tools.js");
        return texts.map((text) => { try { return calculate(text); } catch (error) { return error.message; } });
      }"""
    assert page.run(script, list(SUMS)) == list(SUMS.values())
    wrong = ["alert(1)", "2 +", "(1", "1 2", "window"]
    assert all(isinstance(answer, str) for answer in page.run(script, wrong))


def test_token_probabilities_and_alternatives(page: ChatPage, stub: Stub) -> None:
    page.set(logprobs=True)
    page.ask("1 and 2")
    assert (stub.requests[-1]["logprobs"], stub.requests[-1]["top_logprobs"]) == (True, 5)
    page.last(".show-tokens").click()
    assert page.texts(".tokens") == ["1 plus 2 is **3**."]
    page.tab.hover(".token >> nth=1")
    page.see("#alternatives", "90.5 %")
    assert "·other" in page.texts("#alternatives")[0]
    page.tab.reload()
    page.see(".prose", "1 plus 2 is 3.")
    assert page.last(".show-tokens").is_visible()


def test_a_key_is_asked_for_only_when_the_server_wants_one(context: Any, stub: Stub, url: str) -> None:
    page = ChatPage(context.new_page()).open(url)
    assert page.run("document.querySelector('#key-row').hidden")
    stub.api_key = "sesame"
    page.open(url, until="locked")
    page.see("#key-help", "requires an API key")
    assert page.run("document.activeElement.id") == "api-key"
    page.tab.keyboard.type("wrong")
    page.tab.keyboard.press("Escape")
    page.see("#key-error", "rejected this API key")
    assert page.run("getComputedStyle(document.querySelector('#key-error')).color") == "rgb(166, 58, 43)"
    page.tab.fill("#api-key", "sesame")
    page.tab.keyboard.press("Escape")
    page.wait_for_status("ready")
    page.tab.click("#open-settings")
    assert page.run("document.querySelector('#key-error').textContent") == ""
    page.tab.keyboard.press("Escape")
    page.ask("1 and 2")
    assert page.texts(".prose") == ["1 plus 2 is 3."]
    stub.api_key = "changed"
    page.ask("1 and 2", until="failed")
    page.see(".failure-text", "rejected this API key")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_the_theme_can_be_chosen(page: ChatPage, theme: str) -> None:
    page.tab.click("#open-settings")
    page.tab.click(f"[data-set-theme={theme}]")
    paper = {"light": "rgb(250, 248, 244)", "dark": "rgb(23, 22, 20)"}[theme]
    assert page.run("getComputedStyle(document.body).backgroundColor") == paper
    page.tab.reload()
    page.wait_for_status("ready")
    assert page.run("getComputedStyle(document.body).backgroundColor") == paper


def test_shortcuts_and_their_sheet(page: ChatPage) -> None:
    page.ask("1 and 2")
    page.tab.keyboard.press("Control+Shift+o")
    page.tab.wait_for_selector("#welcome", state="visible")
    page.tab.keyboard.press("Control+,")
    page.tab.wait_for_selector("#settings[open]")
    page.tab.keyboard.press("Escape")
    page.tab.keyboard.press("Control+/")
    page.see("#shortcuts", "Search conversations")
    page.tab.keyboard.press("Escape")
    page.tab.keyboard.press("Control+b")
    page.tab.wait_for_selector("#sidebar", state="hidden")
    page.run("document.activeElement.blur()")
    page.tab.keyboard.press("?")
    page.tab.wait_for_selector("#shortcuts[open]")
