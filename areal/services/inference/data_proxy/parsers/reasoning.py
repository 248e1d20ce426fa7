"""Reasoning before an answer: where it begins, where it ends.

It is at the beginning of an answer or nowhere. Whether the model writes the mark that begins it or the chat template
did so already is seen from the prompt's end.
"""

from __future__ import annotations

from dataclasses import dataclass

from areal.services.inference.data_proxy.parsers.source import OnText, Source, Steps


@dataclass(frozen=True)
class ReasoningFormat:
    """``always``: an answer begins with reasoning unless the prompt has closed it, with the mark or without.
    ``breaks`` are marks that end it too; they belong to what follows."""

    start: str
    end: str
    always: bool = False
    breaks: tuple[str, ...] = ()

    @property
    def markers(self) -> tuple[str, ...]:
        return self.start, self.end

    def opened_by(self, prompt_tail: str) -> bool:
        """Whether an answer to a prompt that ends like this begins within reasoning."""
        tail = prompt_tail.rstrip()
        return tail.endswith(self.start) or (self.always and not tail.endswith(self.end))

    def parse(self, source: Source, on_reasoning: OnText, on_content: OnText, *, inside: bool) -> Steps[None]:
        source.mark()
        yield from source.space()
        begins = yield from source.accept(self.start)
        if begins or inside:
            source.forget_mark()
            yield from source.newlines()
            marker = yield from source.until((self.end, *self.breaks), on_reasoning)
            if marker == self.end:
                yield from source.newlines()
            elif marker is not None:
                on_content(marker)
        else:
            on_content(source.since_mark())
        yield from source.until((), on_content)
