"""The system prompt is a constant: byte for byte, and in step with the table of actions."""

import hashlib
import json

import pytest

from mage_jax.agent.calls import ACTIONS, ARGUMENTS, BUTTONS, FUNCTIONS, MAX_CALLS, STATUSES
from mage_jax.agent.parser import parse
from mage_jax.agent.prompt import ASSET, SYSTEM_PROMPT_SHA256, PromptError, load_system_prompt
from mage_jax.agent.repair import parse_with_repairs


def test_every_byte():
    digest = hashlib.sha256(ASSET.read_bytes()).hexdigest()
    assert digest == SYSTEM_PROMPT_SHA256 == "f4ee21e6ad7f3c02a9822f34eec0eb6e5300f3a24f60ae69a90c520ed896587a"
    assert load_system_prompt() + "\n" == ASSET.read_bytes().decode()


def test_its_schema_is_the_table_of_actions():
    lines = load_system_prompt().split("<tools>\n")[1].split("\n</tools>")[0].splitlines()
    schemas = {f["function"]["name"]: f["function"]["parameters"] for f in map(json.loads, lines)}
    assert tuple(schemas) == FUNCTIONS
    properties = schemas["computer_use"]["properties"]
    assert tuple(properties) == ("action", *ARGUMENTS)
    assert properties["action"]["enum"] == list(ACTIONS)
    assert properties["button"]["enum"] == list(BUTTONS) and properties["status"]["enum"] == list(STATUSES)
    assert list(schemas["bash"]["properties"]) == schemas["bash"]["required"] == ["command"]
    assert f"at most {MAX_CALLS} <tool_call> blocks" in load_system_prompt()


def test_its_example_has_the_grammar_of_a_turn():
    example = load_system_prompt().split("NO suffix:\n\n")[1].split("\n\n<IMPORTANT>")[0]
    call = '{"name": "example_function_name", "arguments": {"example_parameter_1": "value_1"}}'
    assert call in example
    turn = example.replace(call, '{"name": "bash", "arguments": {"command": "ls"}}')
    assert parse(turn).action == "one short imperative sentence describing the next move."
    assert parse_with_repairs(turn).repairs == ()


def test_a_file_of_ones_own(tmp_path):
    path = tmp_path / "prompt.txt"
    path.write_bytes(b"Be brief.\r\n\n")
    assert load_system_prompt(path) == load_system_prompt(str(path)) == "Be brief.\r\n"


@pytest.mark.parametrize("contents", [None, b" \n", b"\xff"])
def test_a_bad_file_is_named(tmp_path, contents):
    path = tmp_path / "prompt.txt"
    if contents is not None:
        path.write_bytes(contents)
    with pytest.raises(PromptError, match=r"system_prompt_path: .*prompt\.txt"):
        load_system_prompt(path)
