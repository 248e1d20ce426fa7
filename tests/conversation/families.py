"""The chat templates of TRL's wheel, each with a small tokenizer of its family, and conversations to render with them.

A family's tokenizer is byte-level BPE with a few merges and the family's own special tokens, as a
``PreTrainedTokenizerFast`` and as a model folder. The merges make several ways to write the same text in tokens.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_MERGES = ("t h", "th e", "Ġ a", "Ġ the", "i n", "in g", "o r", "l l", "Ċ Ċ", "a n", "an d", "r a", "ra in", "e r")

_MARKS = re.compile(
    r"<\|[^|<>\s{}]{1,40}\|>|<｜[^<>\s{}]{1,40}｜>|<\|[a-z_]+>|<[a-z_]+\|>|<(?:start|end)_of_\w+>|\[gMASK\]|<sop>"
)
_PLAIN_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


@dataclass(frozen=True)
class _Ends:
    """``bos`` and ``eos`` of a family's tokenizer, and the ids of its generation configuration as texts."""

    bos: str | None
    eos: str
    generation: tuple[str, ...] = ()


_ENDS: Mapping[str, _Ends] = {  # the longest prefix of the template's name counts
    "cohere": _Ends("<BOS_TOKEN>", "<|END_OF_TURN_TOKEN|>"),
    "deepseek": _Ends("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "diffusion_gemma": _Ends("<bos>", "<eos>", ("<eos>", "<turn|>")),
    "gemma": _Ends("<bos>", "<eos>", ("<eos>", "<end_of_turn>")),
    "gemma4": _Ends("<bos>", "<eos>", ("<eos>", "<turn|>", "<|tool_response>")),
    "glm": _Ends(None, "<|endoftext|>", ("<|endoftext|>", "<|user|>", "<|observation|>")),
    "gptoss": _Ends("<|startoftext|>", "<|return|>", ("<|return|>", "<|endoftext|>", "<|call|>")),
    "idefics3": _Ends("<|begin_of_text|>", "<end_of_utterance>"),
    "lfm2": _Ends("<|startoftext|>", "<|im_end|>"),
    "llama3": _Ends("<|begin_of_text|>", "<|eot_id|>", ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")),
    "llava": _Ends("<s>", "</s>"),
    "muse": _Ends("<|begin_of_text|>", "<|eot|>"),
    "nemotron": _Ends(None, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    "phi": _Ends("<s>", "<|endoftext|>", ("<|endoftext|>", "<|assistant|>", "<|end|>")),
    "qwen": _Ends(None, "<|im_end|>", ("<|im_end|>", "<|endoftext|>")),
    "smolvlm": _Ends("<|im_start|>", "<end_of_utterance>"),
}


@dataclass(frozen=True)
class Family:
    """A chat template and what belongs to it."""

    name: str
    source: str = field(repr=False)
    ends: _Ends = field(repr=False)

    @property
    def takes_tools(self) -> bool:
        """Whether the template has a place for the schemas of tools."""
        return re.search(r"\btools\b", re.sub(r"{#.*?#}", "", self.source, flags=re.DOTALL)) is not None

    @property
    def takes_parts(self) -> bool:
        """Whether the template takes contents as lists of parts only."""
        return self.name.removesuffix("_training") in ("idefics3", "llava_next", "smolvlm")

    @cached_property
    def special(self) -> tuple[str, ...]:
        """The texts of the special tokens."""
        named = (self.ends.bos or "", self.ends.eos, *self.ends.generation)
        return tuple(sorted({*_MARKS.findall(self.source), *filter(None, named)}))

    @cached_property
    def base(self) -> Tokenizer:
        """The tokenizer without a configuration."""
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        pieces = [*letters, *("".join(merge.split()) for merge in _MERGES)]
        model = models.BPE(
            vocab={piece: at for at, piece in enumerate(pieces)},
            merges=[(left, right) for left, right in (merge.split() for merge in _MERGES)],
        )
        tokenizer = Tokenizer(model)
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in self.special])
        plain = [text for text in _PLAIN_MARKS if text in self.source]
        tokenizer.add_tokens([AddedToken(text, normalized=False) for text in plain])
        return tokenizer

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerFast:
        from transformers import PreTrainedTokenizerFast

        return PreTrainedTokenizerFast(
            tokenizer_object=self.base,
            chat_template=self.source,
            bos_token=self.ends.bos,
            eos_token=self.ends.eos,
            clean_up_tokenization_spaces=False,
        )

    def id_of(self, text: str) -> int:
        found: int | None = self.base.token_to_id(text)
        assert found is not None, text
        return found

    def letters(self, text: str) -> list[int]:
        """The tokens of a sampled text: each character by itself, as no tokenizer would write it."""
        found = list[int]()
        for token in self.base.encode(text, add_special_tokens=False).ids:
            piece = self.base.decode([token], skip_special_tokens=False)
            whole = piece in self._added or "\ufffd" in piece  # or a part of a character
            found += [token] if whole else [each for char in piece for each in self.base.encode(char).ids]
        return found

    @cached_property
    def _added(self) -> frozenset[str]:
        return frozenset(token.content for token in self.base.get_added_tokens_decoder().values())

    @property
    def generation_ends(self) -> tuple[int, ...]:
        """``eos_token_id`` of ``generation_config.json``."""
        return tuple(self.id_of(text) for text in self.ends.generation or (self.ends.eos,))

    def write_folder(self, folder: Path) -> Path:
        """Write a model's folder without weights: tokenizer, its configuration, the template, the ids of the end."""
        folder.mkdir(parents=True, exist_ok=True)
        self.base.save(str(folder / "tokenizer.json"))
        named = {"bos_token": self.ends.bos, "eos_token": self.ends.eos}
        config = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            **{name: text for name, text in named.items() if text is not None},
        }
        (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
        (folder / "chat_template.jinja").write_text(self.source, encoding="utf-8")
        ends = {"eos_token_id": list(self.generation_ends)}
        (folder / "generation_config.json").write_text(json.dumps(ends), encoding="utf-8")
        return folder


def _ends_of(name: str) -> _Ends:
    return _ENDS[max((prefix for prefix in _ENDS if name.startswith(prefix)), key=len)]


def family_of(name: str, source: str, ends: str) -> Family:
    """Return a family of the test's own: a template with the tokens of the family ``ends``."""
    return Family(name, source, _ENDS[ends])


@cache
def families() -> dict[str, Family]:
    """Every template of TRL's wheel, by name."""
    found = importlib.util.find_spec("trl")
    assert found is not None and found.origin is not None
    files = sorted((Path(found.origin).parent / "chat_templates").glob("*.jinja"))
    return {file.stem: Family(file.stem, file.read_text(encoding="utf-8"), _ends_of(file.stem)) for file in files}


# Conversations as clients send them and data sets hold them: arguments as JSON text or as objects, keys that are null.


@dataclass(frozen=True)
class Case:
    """``messages`` and ``tools`` as they come. A last message of the user or of a tool makes it a prompt, one of the
    assistant a row to learn."""

    messages: Sequence[dict[str, Any]]
    tools: Sequence[dict[str, Any]] | None = None

    def __repr__(self) -> str:
        return json.dumps({"messages": self.messages, "tools": self.tools}, ensure_ascii=False)

    @property
    def has_calls(self) -> bool:
        return any(message.get("tool_calls") for message in self.messages)

    @property
    def has_thoughts(self) -> bool:
        return any(message.get("reasoning_content") for message in self.messages)


_WORDS = (
    "the rain",
    "and",
    " 41",
    "Oslo",
    "ring the bell",
    "<b>",
    "{x}",
    '"q"',
    "\\n",
    "\n",
    "\n\n",
    " ",
    "é",
    "日本",
    "🙂",
)
_letters = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=6)
texts = st.lists(st.one_of(st.sampled_from(_WORDS), _letters), max_size=5).map("".join)
full_texts = texts.filter(lambda text: text.strip() != "")
_names = st.sampled_from(("weather", "find_it", "a.b"))
_values = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(-9, 99), texts),
    lambda inner: st.one_of(
        st.lists(inner, max_size=2), st.dictionaries(st.sampled_from(("city", "n", "é")), inner, max_size=2)
    ),
    max_leaves=4,
)
_arguments = st.dictionaries(st.sampled_from(("city", "query", "days")), _values, max_size=3)


@st.composite
def tools_lists(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Schemas of one or two tools; some with the nulls that Parquet's unified structs have."""
    tools = []
    for name in draw(st.lists(_names, min_size=1, max_size=2, unique=True)):
        properties: dict[str, Any] = {"city": {"type": "string", "description": draw(full_texts)}}
        if draw(st.booleans()):
            properties["query"] = None
        parameters = {"type": "object", "properties": properties, "required": ["city"]}
        tools.append(
            {"type": "function", "function": {"name": name, "description": draw(full_texts), "parameters": parameters}}
        )
    return tools


@st.composite
def _calls(draw: st.DrawFn, turn: int, *, most: int) -> list[dict[str, Any]]:
    calls = []
    for number in range(draw(st.integers(1, most))):
        arguments = draw(_arguments)
        as_text = draw(st.booleans())
        function = {"name": draw(_names), "arguments": json.dumps(arguments) if as_text else arguments}
        calls.append({"id": f"call{turn:02}{number:03}", "type": "function", "function": function})
    return calls


@st.composite
def cases(
    draw: st.DrawFn,
    *,
    tools: bool = True,
    thoughts: bool = True,
    system: bool = True,
    turns: int = 3,
    answered: bool | None = None,
    nulls: bool = True,
    content: st.SearchStrategy[str] = texts,
) -> Case:
    """Draw a conversation of one to ``turns`` questions. ``answered``: whether it ends with the assistant's message."""
    messages: list[dict[str, Any]] = []
    given = draw(st.none() | tools_lists()) if tools else None
    if system and draw(st.booleans()):
        messages.append({"role": "system", "content": draw(content)})
    count = draw(st.integers(1, turns))
    ends = draw(st.booleans()) if answered is None else answered
    for turn in range(count):
        messages.append({"role": "user", "content": draw(content)})
        last = turn == count - 1
        if last and not ends and draw(st.booleans()):
            break
        if given is not None and draw(st.booleans()):
            calls = draw(_calls(turn, most=2))
            message: dict[str, Any] = {"role": "assistant", "content": draw(st.one_of(st.none(), content))}
            messages.append(message | {"tool_calls": calls} | _thought(draw, thoughts=thoughts))
            messages += [{"role": "tool", "tool_call_id": call["id"], "content": draw(content)} for call in calls]
            if last and not ends:
                break
        elif last and not ends:
            break
        messages.append({"role": "assistant", "content": draw(content)} | _thought(draw, thoughts=thoughts))
    if nulls and draw(st.booleans()):
        messages = [{**dict.fromkeys(("name", "tool_calls", "refusal")), **message} for message in messages]
    return Case(messages, given)


def _thought(draw: st.DrawFn, *, thoughts: bool) -> dict[str, Any]:
    return {"reasoning_content": draw(full_texts)} if thoughts and draw(st.booleans()) else {}
