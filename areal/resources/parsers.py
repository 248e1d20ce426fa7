"""The fields that name parsers: their types, and the rules between them for editors."""

from collections.abc import Iterable, Iterator
from typing import Annotated, TypeAlias

from pydantic import AfterValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from areal.errors import UsageFault
from areal.resources.fields import EXPRESSION, Schema, text, when, written
from areal.wire.parsers import REASONING_PARSERS, TOOL_CALL_PARSERS, WHOLE, ParserNames


def _check_parser(names: ParserNames) -> AfterValidator:
    def check(name: str) -> str:
        try:
            names.resolve(name)
        except UsageFault as error:
            raise PydanticCustomError(
                "areal_parser", "{problem}; {known}", {"problem": error.message, "known": error.hint}
            ) from error
        return name

    return AfterValidator(check)


def _parser_schema(names: ParserNames) -> WithJsonSchema:
    return WithJsonSchema({"anyOf": [{"enum": names.spellings}, text(_spelled(names, names.spellings))]})


def _spelled(names: ParserNames, wanted: Iterable[str]) -> str:
    """Return a regular expression for every spelling of these parsers, which ``names.resolve`` accepts."""
    spellings = [each for each in names.spellings if each in wanted or names.canonical.get(each, each) in wanted]
    return "|".join(
        "".join("[-_]" if char == "_" else f"[{char}{char.upper()}]" if char.isalpha() else char for char in each)
        for each in spellings
    )


ToolCallParser: TypeAlias = Annotated[str, _check_parser(TOOL_CALL_PARSERS), _parser_schema(TOOL_CALL_PARSERS)]
ReasoningParser: TypeAlias = Annotated[str, _check_parser(REASONING_PARSERS), _parser_schema(REASONING_PARSERS)]


def parser_rules() -> Iterator[Schema]:
    """Yield ``parser_conflict`` as rules."""
    for name in WHOLE:
        same: list[Schema] = [{"type": "null"}, EXPRESSION, text(_spelled(TOOL_CALL_PARSERS, (name,)))]
        yield when(
            written("reasoningParser", text(_spelled(REASONING_PARSERS, (name,)))),
            {"properties": {"toolCallParser": {"anyOf": same}}},
        )
        thoughts = text(f"{_spelled(REASONING_PARSERS, (name,))}|[nN][oO][nN][eE]")
        yield when(
            written("toolCallParser", text(_spelled(TOOL_CALL_PARSERS, (name,)))),
            {"properties": {"reasoningParser": {"anyOf": [{"type": "null"}, EXPRESSION, thoughts]}}},
        )
