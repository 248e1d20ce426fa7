"""A service whose model speaks in tool calls and reasoning, and the calls to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from tests.services.inference.running_service import Service
from tests.services.processes import Processes, engine_calls, script

# Like Qwen3's: reasoning in think tags, calls in tool_call tags, results as the user's.
TEMPLATE = """\
{%- if tools %}{{ '<|im_start|>system\n# Tools\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}
{%- for message in messages %}
{%- if message.role == 'tool' %}
{{- '<|im_start|>user\n<tool_response>\n' + message.content + '\n</tool_response><|im_end|>\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' }}
{%- if message.reasoning_content %}{{ '<think>\n' + message.reasoning_content + '\n</think>\n\n' }}{% endif %}
{{- message.content }}
{%- for call in message.tool_calls or [] %}
{%- if message.content or not loop.first %}{{ '\n' }}{% endif %}
{{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}{{ call.function.arguments | tojson }}
{{- '}\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- if think_first %}{{ '<think>\n' }}{% endif %}
{%- endif %}"""

WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
}
ROME = '{"city": "Rome", "days": 3}'
CALL = f'<tool_call>\n{{"name": "get_weather", "arguments": {ROME}}}\n</tool_call>'
TWO_CALLS = f'{CALL}\n<tool_call>\n{{"name": "now", "arguments": {{}}}}\n</tool_call>'
THOUGHT = "<think>\nThe user wants\nthe weather.\n</think>\n\n"


def build_talking_service(processes: Processes, tokenizer: Path, **reply: Any) -> Service:
    engine = processes.engine(tokenizer)
    script(engine, **reply)
    proxy = processes.data_proxy(engine, tokenizer, "--tool-call-parser", "hermes", "--reasoning-parser", "qwen3")
    router = processes.router()
    gateway = processes.gateway(router)
    processes.register(router, proxy)
    return Service(processes, (engine,), (proxy,), router, gateway)


def prompts(service: Service, tokenizer: Path) -> list[str]:
    """What the engine was asked to go on with, as text."""
    codec = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    ids = [call["body"]["input_ids"] for call in engine_calls(service.engine)]
    return [codec.decode(each, skip_special_tokens=False) for each in ids]


def sampled(service: Service) -> dict[str, Any]:
    sampling: dict[str, Any] = service.engine_saw()["sampling"]
    return sampling
