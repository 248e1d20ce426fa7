"""The APIs by which a model is called: each reads its own bodies, and has its own shape of an answer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from areal.services.inference.data_proxy.asks import Ask, read_chat, read_completion
from areal.services.inference.data_proxy.dialects import anthropic, responses
from areal.services.inference.data_proxy.dialects.writer import DialectShape, Translated, named
from areal.services.inference.data_proxy.fields import Fields
from areal.services.inference.data_proxy.reading import Parsers
from areal.services.inference.data_proxy.shapes import ChatShape, CompletionShape, Frame, Shape
from areal.services.inference.data_proxy.tokenizer import TextCodec
from areal.services.inference.engines.base import Capabilities


@dataclass(frozen=True)
class Asked:
    """A call as it was read. ``names`` are those that its API has for the fields of an ask, where they differ."""

    ask: Ask
    shape: Callable[[Frame], Shape]
    id_prefix: str
    names: Mapping[str, str] = field(default_factory=dict)


Read = Callable[[Fields], Asked]
"""Raises 400 naming the field."""


class Apis:
    def __init__(self, codec: TextCodec, capabilities: Capabilities, parsers: Parsers) -> None:
        self._codec = codec
        self._capabilities = capabilities
        self._parsers = parsers

    def chat(self, fields: Fields) -> Asked:
        return Asked(self._chat(fields), ChatShape, "chatcmpl-")

    def completion(self, fields: Fields) -> Asked:
        return Asked(read_completion(fields, self._codec, self._capabilities), CompletionShape, "cmpl-")

    def messages(self, fields: Fields) -> Asked:
        return self._dialect(anthropic.translate(fields, self._uses), "msg_")

    def tokens_of_messages(self, fields: Fields) -> Asked:
        return self._dialect(anthropic.translate(fields, self._uses, counting=True), "msg_")

    def responses(self, fields: Fields) -> Asked:
        return self._dialect(responses.translate(fields, self._uses), "resp_")

    def _chat(self, fields: Fields) -> Ask:
        return read_chat(fields, self._codec, self._capabilities, self._parsers)

    def _uses(self, variable: str) -> bool:
        return self._codec.template is not None and self._codec.template.uses(variable)

    def _dialect(self, said: Translated, id_prefix: str) -> Asked:
        with named(said.names):
            ask = replace(self._chat(Fields(said.chat)), ignored=said.ignored)

        def shape(frame: Frame) -> Shape:
            return DialectShape(frame, said.writer(frame.answer_id, frame.model, frame.created))

        return Asked(ask, shape, id_prefix, said.names)
