"""Renders episodes for a terminal. Text from models and data sets is untrusted: control characters are escaped. With
colors, generated tokens are colored by log-probability, by weight version, or by the mask alone, and the prompt is dim.
Without colors, prompt and answer have headings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

from areal.numbers import number
from areal.terminal import ESCAPE, safe
from areal.trajectories.record import Episode
from areal.trajectories.view import ShownToken, ShownTurn, Stretch, origin, stretches, text_of_messages

Paint = Literal["logprob", "version", "mask"]

# The least log-probability of each 256-color foreground, from likely to unlikely (e^-0.1 = 0.9, e^-5 = 0.007).
LOGPROB_STEPS = ((-0.1, 77), (-0.36, 113), (-0.7, 149), (-1.6, 185), (-3.0, 214), (-5.0, 208), (float("-inf"), 203))
_VERSIONS = (75, 214, 113, 176, 80, 203, 185, 141)
_DIM, _BOLD, _OFF = f"{ESCAPE}[2m", f"{ESCAPE}[1m", f"{ESCAPE}[0m"


def render_terminal(episode: Episode, conversation: Sequence[ShownTurn], *, paint: Paint | None) -> str:
    """Return the text of an episode. ``paint`` None: no colors."""
    lines = [_head(episode, paint), *_tree(stretches(conversation))]
    versions = sorted({version for turn in conversation for version in turn.versions})
    for turn in conversation:
        lines.append("")
        indent = "  " * turn.depth
        lines.append(indent + _title(turn, paint))
        if turn.row.response is not None:
            messages = (f"{safe(role)}: {safe(text)}" for role, text in text_of_messages(turn.row))
            body = [line for message in messages for line in message.splitlines()]
        else:
            body = _tokens(turn, paint, versions)
        lines += [f"{indent}  {line}".rstrip() for line in body]
    return "\n".join(lines)


def _tree(found: Sequence[Stretch], before: str = "  ") -> list[str]:
    """Return the lines of a tree of branches; empty for a conversation without branches."""
    if before == "  " and len(found) == 1 and not found[0].branches:
        return []
    lines = []
    for place, stretch in enumerate(found):
        last = place == len(found) - 1
        first, final = stretch.turns[0], stretch.turns[-1]
        span = first.number if first is final else f"{first.number} … {final.number}"
        rewards = [turn.row.original_reward for turn in stretch.turns if turn.row.rewarded]
        reward = f"  reward {number(sum(rewards))}" if rewards else ""
        lines.append(f"{before}{'└─' if last else '├─'} {span}{reward}")
        lines += _tree(stretch.branches, before + ("   " if last else "│  "))
    return lines


def legend(paint: Paint | None, versions: Sequence[int] = ()) -> str:
    if paint == "logprob":
        steps = [(f"p>{math.exp(least):.2g}", colour) for least, colour in LOGPROB_STEPS[:-1]]
        return "  ".join(_coloured(text, colour) for text, colour in [*steps, ("less", LOGPROB_STEPS[-1][1])])
    if paint == "version":
        return "  ".join(_coloured(f"version {each}", _version_colour(each, versions)) for each in versions)
    return ""


def _head(episode: Episode, paint: Paint | None) -> str:
    reward = "no reward" if episode.reward is None else f"reward {number(episode.reward)}"
    models = ", ".join(sorted({row.model for row in episode.interactions}))
    turns = f"{episode.turns} turn" + ("s" if episode.turns != 1 else "")
    parts = [f"episode {safe(episode.episode)}", *origin(episode), reward, turns]
    parts += [f"{episode.generated_tokens} tokens generated", safe(models)]
    if episode.failures:
        failed = (f"{safe(str(each.get('code')))} x{safe(str(each.get('count')))}" for each in episode.failures)
        parts.append("failures: " + ", ".join(failed))
    text = "  ·  ".join(part for part in parts if part)
    return f"{_BOLD}{text}{_OFF}" if paint else text


def _title(turn: ShownTurn, paint: Paint | None) -> str:
    row = turn.row
    reward = f"reward {number(row.original_reward)}" if row.rewarded else "no reward"
    if row.reward != row.original_reward:
        reward += f" (return {number(row.reward)})"
    parts = [f"[{turn.number}] {safe(row.interaction_id)}", reward, safe(row.finish_reason)]
    if row.advantage is not None:
        parts.insert(2, f"advantage {number(row.advantage)}")
    mean = turn.mean_logprob
    if mean is not None:
        parts.append(f"mean logprob {number(mean)}")
        parts.append("temperature " + ",".join(number(each) for each in turn.temperatures))
        parts.append("version " + ",".join(map(str, turn.versions)))
    text = "  ".join(part for part in parts if part)
    return f"{_BOLD}{text}{_OFF}" if paint else text


def _tokens(turn: ShownTurn, paint: Paint | None, versions: Sequence[int]) -> list[str]:
    lines: list[str] = []
    if turn.shown_before:
        lines.append(_dim(f"({turn.shown_before} tokens as above)", paint))
    for generated, tokens in turn.runs():
        if paint is None:
            several = f" of turn {tokens[0].turn + 1}" if generated and len(turn.turn_ids) > 1 else ""
            lines.append(f"answer{several}:" if generated else "prompt:")
            lines += [f"  {line}" for line in _plain(tokens).rstrip("\n").split("\n")]
        else:
            colour = _colour_of(paint, versions) if generated else (lambda token: None)
            lines += _painted(tokens, colour, dim=not generated).split("\n")
    return lines


def _plain(tokens: Sequence[ShownToken]) -> str:
    if any(token.text is None for token in tokens):
        return " ".join(str(token.id) for token in tokens)
    return safe("".join(token.text or "" for token in tokens))


def _painted(tokens: Sequence[ShownToken], colour: Callable[[ShownToken], int | None], *, dim: bool) -> str:
    parts = []
    for token in tokens:
        text = f"{token.id} " if token.text is None else safe(token.text)
        code = colour(token)
        # Colors end with each line: the indentation of the next line must not be colored.
        parts.append("\n".join(_dim(p, "mask") if dim else _coloured(p, code) for p in text.split("\n")))
    return "".join(parts)


def _colour_of(paint: Paint, versions: Sequence[int]) -> Callable[[ShownToken], int | None]:
    if paint == "logprob":
        return lambda token: next(colour for least, colour in LOGPROB_STEPS if token.logprob >= least)
    if paint == "version":
        return lambda token: _version_colour(token.version, versions)
    return lambda token: None


def _version_colour(version: int, versions: Sequence[int]) -> int:
    return _VERSIONS[list(versions).index(version) % len(_VERSIONS)]


def _coloured(text: str, colour: int | None) -> str:
    return f"{ESCAPE}[38;5;{colour}m{text}{_OFF}" if text and colour is not None else text


def _dim(text: str, paint: Paint | None) -> str:
    return f"{_DIM}{text}{_OFF}" if text and paint else text
