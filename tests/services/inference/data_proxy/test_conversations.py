"""What a session's model is served, turn by turn, with the chat templates of several families: over HTTP."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.conversation.families import Family, families, family_of
from tests.services.inference.recorder.rollouts import CHAT, begin, export
from tests.services.processes import Process, Processes, Stream, engine_calls, script

# Like Mistral's (v3, Nemo): the system prompt stands in the last question; a call has an id of nine characters.
MISTRAL = """\
{%- if messages[0].role == 'system' %}{% set system = messages[0].content %}{% set messages = messages[1:] %}{% endif %}
{%- set ns = namespace(last=0) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}
{{- bos_token }}
{%- for m in messages %}
{%- if m.role == 'user' %}
{%- if tools and loop.index0 == ns.last %}{{ '[AVAILABLE_TOOLS] ' + (tools|tojson) + '[/AVAILABLE_TOOLS]' }}{% endif %}
{{- '[INST] ' }}{% if system is defined and loop.index0 == ns.last %}{{ system + '\\n\\n' }}{% endif %}
{{- m.content + '[/INST]' }}
{%- elif m.tool_calls %}{{ '[TOOL_CALLS] [' }}
{%- for c in m.tool_calls %}
{%- if c.id|length != 9 %}{{ raise_exception('the id of a call has nine characters') }}{% endif %}
{{- '{"name": "' + c.function.name + '", "arguments": ' + (c.function.arguments|tojson) + ', "id": "' + c.id + '"}' }}
{{- '' if loop.last else ', ' }}{% endfor %}{{ ']' + eos_token }}
{%- elif m.role == 'tool' %}
{%- if m.tool_call_id|length != 9 %}{{ raise_exception('the id of a call has nine characters') }}{% endif %}
{{- '[TOOL_RESULTS] {"content": ' + (m.content|tojson) + ', "call_id": "' + m.tool_call_id + '"}[/TOOL_RESULTS]' }}
{%- else %}{{ ' ' + m.content + eos_token }}{% endif %}
{%- endfor %}"""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather",
            "parameters": {
                "type": "object",
                "properties": {"city": {"type": "string"}, "query": None},
                "required": None,
            },
        },
    }
]
SYSTEM = {"role": "system", "content": "Be brief."}


@dataclass
class Talk:
    """A session at a data proxy whose engine answers what the test prescribes, in tokens of single characters."""

    family: Family
    engine: Process
    proxy: Process
    admin_key: str
    streamed: bool = False
    more: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        script(self.engine, reset=True)
        self.rollout = begin(self.proxy, self.admin_key)
        self.messages: list[dict[str, Any]] = []

    def say(self, sampled: str, *messages: dict[str, Any], cut: bool = False) -> dict[str, Any]:
        """Send messages; the engine answers with ``sampled``. Returns the answer's message, as a client keeps it."""
        self.messages += messages
        ids = self.family.letters(sampled)
        script(self.engine, token_ids=ids, exact=True)
        body = {"messages": self.messages, **self.more, **({"max_tokens": len(ids) - 1} if cut else {})}
        if self.streamed:
            message = _joined(list(Stream(self.proxy.port, CHAT, {**body, "stream": True}, self.rollout.key).events()))
        else:
            answer = self.rollout.post(CHAT, body)
            assert answer.status == 200, answer.body
            message = answer.json()["choices"][0]["message"]
        self.messages.append({name: message.get(name) for name in ("role", "content", "tool_calls")})
        return message

    def prompts(self) -> list[list[int]]:
        """What the engine was given, turn by turn."""
        return [call["body"]["input_ids"] for call in engine_calls(self.engine)]

    def texts(self) -> list[str]:
        return [self.family.base.decode(prompt, skip_special_tokens=False) for prompt in self.prompts()]

    def rows(self) -> list[list[int]]:
        """The rows of the session."""
        self.rollout.reward(1.0)
        traj = export(self.proxy, self.admin_key, [self.rollout.session_id], style="concat")["traj"]
        return [ids[: sum(mask)] for ids, mask in zip(traj["input_ids"], traj["attention_mask"], strict=True)]


def _joined(events: list[Any]) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": None}
    calls: dict[int, dict[str, Any]] = {}
    for event in events:
        for choice in () if event == "[DONE]" else event["choices"]:
            delta = choice["delta"]
            for name in ("content", "reasoning_content"):
                if delta.get(name):
                    message[name] = (message.get(name) or "") + delta[name]
            for part in delta.get("tool_calls") or ():
                call = calls.setdefault(part["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
                call |= {"id": part["id"]} if part.get("id") else {}
                for name, text in part["function"].items():
                    call["function"][name] += text or ""
    if calls:
        message["tool_calls"] = [calls[index] for index in sorted(calls)]
    return message


Begin = Callable[..., Talk]


@pytest.fixture(scope="module")
def talk(module_processes: Processes, tmp_path_factory: pytest.TempPathFactory) -> Begin:
    served: dict[tuple[str, str], tuple[Process, Process]] = {}

    def begin_talk(family: Family, reasoning_parser: str = "none", **more: Any) -> Talk:
        known = family.name, reasoning_parser
        if known not in served:
            folder = family.write_folder(tmp_path_factory.mktemp(family.name))
            engine = module_processes.engine(folder)
            state = tmp_path_factory.mktemp("state")
            flags = ("--state-dir", str(state), "--reasoning-parser", reasoning_parser)
            served[known] = engine, module_processes.data_proxy(engine, folder, *flags)
        return Talk(family, *served[known], module_processes.key, **more)

    return begin_talk


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("streamed", [False, True])
def test_mistral_system_prompt_and_call_ids_are_rendered_once(talk: Begin, streamed: bool) -> None:
    family = family_of("mistral", MISTRAL, "llava")
    session = talk(family, streamed=streamed, more={"tools": TOOLS})
    called = session.say(
        '[TOOL_CALLS] [{"name": "weather", "arguments": {"city": "Oslo"}, "id": "Ab3dEf9hI"}]</s>',
        SYSTEM,
        user("Oslo?"),
    )
    assert [call["id"] for call in called["tool_calls"]] == ["Ab3dEf9hI"]
    session.say(" Rain.</s>", {"role": "tool", "tool_call_id": called["tool_calls"][0]["id"], "content": "rain"})
    session.say(" Dry.</s>", user("And Rome?"))
    first, second, third = session.texts()
    assert '"id": "Ab3dEf9hI"}]</s>[TOOL_RESULTS] {"content": "rain", "call_id": "Ab3dEf9hI"}' in second
    assert [text.count("Be brief.") for text in (first, second, third)] == [1, 1, 1]
    assert "null" not in first
    prompts = session.prompts()
    assert prompts[1][: len(prompts[0])] == prompts[0]
    assert prompts[2][: len(prompts[0])] != prompts[0]
    assert len(session.rows()) == 2, "the system prompt moves to the last question"


_THOUGHT = "<think>\nHm, the rain.\n</think>\n\n"
_R1_THOUGHT = "Hm, the rain.\n</think>\n\n"
FORGETFUL = [
    ("qwen3", "qwen3", _THOUGHT, "<|im_end|>"),
    ("deepseek_r1_distill", "deepseek_r1", _R1_THOUGHT, "<｜end▁of▁sentence｜>"),
    ("deepseekv3", "deepseek_r1", _R1_THOUGHT, "<｜end▁of▁sentence｜>"),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("parser", [True, False])
@pytest.mark.parametrize(("name", "reasoning_parser", "thought", "end"), FORGETFUL)
def test_dropped_thoughts_start_new_branch(
    talk: Begin, name: str, reasoning_parser: str, thought: str, end: str, parser: bool, streamed: bool
) -> None:
    session = talk(families()[name], reasoning_parser if parser else "none", streamed=streamed)
    for question in ("Oslo?", "Rome?", "Bergen?"):
        reply = session.say(f"{thought}The rain.{end}", user(question))
        assert ("reasoning_content" in reply) == parser
    tokenizer = session.family.tokenizer
    for at, prompt in enumerate(session.prompts()):
        held = session.messages[: 2 * at + 1]
        wanted = tokenizer.apply_chat_template(held, add_generation_prompt=True, tokenize=False)
        assert session.family.base.decode(prompt, skip_special_tokens=False) == wanted
    assert len(session.rows()) == 3


def test_kept_thoughts_stay_as_sampled(talk: Begin) -> None:
    session = talk(families()["qwen3"], "qwen3", more={"tools": TOOLS})
    call = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    for turn in range(3):
        answered = session.messages[-1:] and [
            {"role": "tool", "tool_call_id": session.messages[-1]["tool_calls"][0]["id"], "content": "rain"}
        ]
        session.say(f"<think>\nTry {turn}.\n</think>\n\n{call}<|im_end|>", *(answered or [user("Oslo?")]))
    *_, last = session.texts()
    assert last.count("<think>\nTry ") == 2
    assert len(session.rows()) == 1


_JSON_CALL = '{"name": "weather", "arguments": {"city": "Bergen"'
CUT = [
    ("qwen3", f"<tool_call>\n{_JSON_CALL}"),
    ("qwen2_5", f"<tool_call>\n{_JSON_CALL}"),
    ("qwen3_5_think", "<tool_call>\n<function=weather>\n<parameter=city>\nBergen"),
    ("glm4moe", "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bergen"),
    ("gptoss", '<|channel|>commentary to=functions.weather json<|message|>{"city": "Bergen"'),
    ("llama3_1", _JSON_CALL.replace("arguments", "parameters")),
    ("mistral", f"[TOOL_CALLS] [{_JSON_CALL}"),
]


@pytest.mark.parametrize(("name", "sampled"), CUT)
def test_truncated_call_is_accepted_in_later_turns(talk: Begin, name: str, sampled: str) -> None:
    family = family_of("mistral", MISTRAL, "llava") if name == "mistral" else families()[name]
    session = talk(family, more={"tools": TOOLS})
    reply = session.say(sampled, user("Oslo?"), cut=True)
    (call,) = reply["tool_calls"]
    assert call["function"]["name"] == "weather"
    with pytest.raises(ValueError):
        json.loads(call["function"]["arguments"])
    session.say("The rain.", {"role": "tool", "tool_call_id": call["id"], "content": "invalid"}, cut=True)
    for question in ("Rome?", "Paris?"):
        session.say("The rain.", user(question), cut=True)
    for text in session.texts()[1:]:
        assert "weather" in text.partition("Oslo?")[2] and "Berge" in text


def test_content_beside_call_is_accepted_in_later_turns(talk: Begin) -> None:
    session = talk(families()["gptoss"], more={"tools": TOOLS})
    reply = session.say(
        "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.weather json<|message|>{"city": "Oslo"}<|call|>',
        user("Oslo?"),
    )
    assert reply["content"] == "Let me look."
    result = {"role": "tool", "tool_call_id": reply["tool_calls"][0]["id"], "content": "rain"}
    session.say("<|channel|>final<|message|>Rain.<|return|>", result)
    session.say("<|channel|>final<|message|>Dry.<|return|>", user("Rome?"))
    *_, before, last = session.texts()
    assert "Let me look." in before and "Let me look." not in last  # the template takes it for a thought


@pytest.mark.parametrize("arguments", ["", " ", "null", "{}", {}, None])
@pytest.mark.parametrize("name", ["qwen3", "qwen3_5_think", "glm4moe", "llama3_1", "gptoss"])
def test_blank_or_null_arguments_mean_none(talk: Begin, name: str, arguments: object) -> None:
    session = talk(families()[name], more={"tools": TOOLS})
    call = {"id": "call00001", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    session.say(
        "The rain.",
        user("Oslo?"),
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call00001", "content": "rain"},
        cut=True,
    )
    (text,) = session.texts()
    assert "null" not in text and "None" not in text
    calls = [{**call, "function": {"name": "weather", "arguments": {}}}]
    without = json.loads(json.dumps(TOOLS).replace(', "query": null', "").replace(', "required": null', ""))
    messages = [session.messages[0], {"role": "assistant", "content": "", "tool_calls": calls}, session.messages[2]]
    assert text == session.family.tokenizer.apply_chat_template(
        messages, tools=without, add_generation_prompt=True, tokenize=False
    )


def test_glm_turn_ends_with_next_role_token(talk: Begin) -> None:
    session = talk(families()["glm4moe"])
    for question in ("Oslo?", "Rome?", "Bergen?"):
        reply = session.say("\n<think></think>\nThe rain.<|user|>", user(question))
        assert not reply["content"].endswith("<|user|>")
    (row,) = session.rows()
    text = session.family.base.decode(row, skip_special_tokens=False)
    assert "<|user|><|user|>" not in text
    assert text.count("<|user|>\n") == 3
