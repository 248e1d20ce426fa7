"""When an engine is behind what was published."""

from __future__ import annotations

from pathlib import Path

from areal.services.inference.data_proxy.engine_watch import EngineWatch
from areal.services.inference.data_proxy.published import Published, Standing
from areal.services.inference.engines.base import EngineState
from areal.services.inference.recording.folder import PUBLISHED


class Engine:
    """What the watch asks; ``version`` None: it is gone."""

    def __init__(self) -> None:
        self.version: int | None = 0

    async def state(self) -> EngineState:
        return EngineState("gone" if self.version is None else None, self.version)


async def seen(watch: EngineWatch, times: int = 2) -> None:
    for _ in range(times):
        await watch.refresh()


async def test_standing_of_an_engine_that_took_what_is_published_until_it_is_lost(tmp_path: Path) -> None:
    engine = Engine()
    watch = EngineWatch(engine.state)
    await seen(watch)
    standing = Standing(watch, tmp_path, "base")
    assert standing.reason is None, "nothing is published"
    standing.took("actor", 0)
    assert standing.reason is None
    standing.commit(standing.of("actor", 0, None, None))
    assert standing.reason is None
    standing.took("actor", 1)
    assert standing.reason is None, "version 0 counts until 1 is committed"
    engine.version = None
    await seen(watch)
    engine.version = 0
    await seen(watch)
    assert standing.behind == Published("actor", 0, base="base"), "a fresh engine is at 0 too"
    again = Standing(watch, tmp_path, "base")
    assert again.behind == standing.behind
    assert Standing(watch, tmp_path, "another").behind is None


async def test_standing_of_a_data_proxy_that_missed_an_update_is_behind_until_its_engine_has_it(tmp_path: Path) -> None:
    engine = Engine()
    watch = EngineWatch(engine.state)
    await seen(watch)
    here, there = Standing(watch, tmp_path, None), Standing(watch, tmp_path, None)
    there.commit(there.of("actor", 7, "/weights/v7", "http://127.0.0.1:1"))
    here.look()
    assert here.reason == "version 7 of the pair 'actor' is published, and the engine does not have it yet"
    engine.version = 7
    await seen(watch)
    assert here.reason is None, "the engine says that it has it"
    engine.version = 9
    await seen(watch)
    assert here.reason is None, "a version that somebody set by hand is theirs to answer for"


async def test_standing_after_the_trainer_is_what_it_left_or_nothing(tmp_path: Path) -> None:
    watch = EngineWatch(Engine().state)
    standing = Standing(watch, tmp_path, None)
    standing.commit(standing.of("actor", 7, None, "http://127.0.0.1:1"))
    standing.end("critic", None)
    assert standing.published is not None, "another pair's"
    standing.end("actor", {"path": str(tmp_path), "version": 7})
    assert standing.published == Published("actor", 7, str(tmp_path))
    standing.end("actor", {"path": str(tmp_path), "version": 6})
    assert standing.published is None
    assert not (tmp_path / PUBLISHED).exists()


async def test_standing_with_a_file_that_is_no_record_serves(tmp_path: Path) -> None:
    for text in ("", "[]", '{"pair": "actor"}', '{"pair": "actor", "version": "x"}'):
        (tmp_path / PUBLISHED).write_text(text)
        assert Standing(EngineWatch(Engine().state), tmp_path, None).behind is None
