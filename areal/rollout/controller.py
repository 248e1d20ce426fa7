"""``RolloutController``: a blocking interface to episodes that run against an inference service.

Workflows run as tasks on an event loop in a separate thread; every public method blocks and is called from other
threads. The controller finds the service by address and key; it neither starts nor stops it.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, NamedTuple, ParamSpec, Self
from urllib.request import getproxies_environment

from areal.client.command import address_lookup, read_key_file
from areal.client.errors import CallerError, ClientError, DeadlineExceeded
from areal.client.inference import AsyncInferenceClient
from areal.client.loop_thread import LoopThread
from areal.errors import NotFound, TimedOut, UsageFault
from areal.http import tracing
from areal.loading import load_attr
from areal.proxies import loopback_without_proxy
from areal.reward.pool import close_pools_of_this_loop, open_pool_of_this_loop
from areal.rollout.dump import append_rollouts, fileroot_of, write_failure
from areal.rollout.engine import EpisodeEngine, PromptBatcher
from areal.rollout.episodes import EpisodeRunner
from areal.rollout.executor import Executor
from areal.rollout.failures import AttemptReport, Failure, RolloutsFailed
from areal.rollout.sessions import CLEAN_UP_S
from areal.rollout.staleness import EpisodeEnd, EpisodeSpec, Rollout, StalenessManager, StalenessWindow
from areal.rollout.workflows import WorkflowResolver, close_shared_http_client

if TYPE_CHECKING:
    from areal.api.config.rollout import InferenceEngineConfig


ADDRESS, KEY_FILE, MODEL = "AREAL_INFERENCE_ADDR", "AREAL_INFERENCE_KEY_FILE", "AREAL_INFERENCE_MODEL"
RECORD = "AREAL_INFERENCE_SERVICE"
_POLL_S = 0.5
_log = logging.getLogger(__name__)
_MIN_FAILURES = 8
_QUEUE_FACTOR = 16
_MAX_TASKS = 65536
_TARGET_TTL_S = 30.0
_LONGEST_WAIT_S = 7 * 24 * 3600.0  # the longest wait without a timeout: users and episodes may take days
Accept = Callable[[Any], bool] | str | None
Row = Mapping[str, Any]
P = ParamSpec("P")


class ServiceAddress(NamedTuple):
    """An address of an inference service. ``record``: the object with the current address, named as for ``areal get``,
    or ""."""

    address: str
    key: str | None = None
    model: str | None = None
    record: str = ""

    def __repr__(self) -> str:
        return f"ServiceAddress({self.address!r}, model={self.model!r})"


def find_service(
    config: InferenceEngineConfig, given: ServiceAddress, environment: Mapping[str, str]
) -> ServiceAddress:
    """Return the address of the service. Arguments override the configuration, and the configuration overrides the
    environment. If only the environment names the service, its model also overrides the configured one, because a job
    may use another model than its configuration names. Raises UsageFault, NotFound."""
    address = given.address or config.gateway_addr or environment.get(ADDRESS)
    if not address:
        raise UsageFault(
            "the address of the inference service is not given",
            hint=f"rollout.gateway_addr=http://HOST:PORT, or {ADDRESS}; areal inf status shows it",
        )
    key = given.key or config.admin_api_key or None
    key_file = config.admin_api_key_file or environment.get(KEY_FILE)
    if key is None and key_file:
        key = read_key_file(key_file)
    from_environment = not (given.address or config.gateway_addr)
    names = [environment.get(MODEL), config.model]
    model = next(filter(None, names if from_environment else reversed(names)), None)
    record = environment.get(RECORD, "") if from_environment else ""
    return ServiceAddress(address, key, given.model or model or None, record)


async def open_service(
    service: ServiceAddress, config: InferenceEngineConfig
) -> tuple[AsyncInferenceClient, int | None]:
    """Return a client, and the model's context length in tokens if the service reports it. Raises ClientError."""
    client = AsyncInferenceClient(
        service.address,
        service.key,
        model=service.model,
        timeout_s=config.request_timeout,
        lookup=address_lookup(service.record),
    )
    try:
        await client.wait_ready(config.setup_timeout)
        if config.min_required_servers > 1:
            await _wait_servers(client, config.min_required_servers, config.setup_timeout)
        entries = [each for each in await client.model_entries() if client.model in (None, each["id"])]
        return client, entries[0].get("max_model_len") if entries else None
    except BaseException:
        await client.close()
        raise


async def servers_of(client: AsyncInferenceClient) -> int:
    """Return the number of servers of the model; 0 if the key may not list them. Raises ClientError."""
    try:
        return sum(_serves(client, each) for each in await client.workers.list())
    except CallerError:
        return 0


async def _wait_servers(client: AsyncInferenceClient, wanted: int, timeout_s: float) -> None:
    ready = 0
    try:
        async with asyncio.timeout(timeout_s):
            while True:
                ready = sum(each["state"] == "ready" for each in await client.workers.list() if _serves(client, each))
                if ready >= wanted:
                    return
                await asyncio.sleep(_POLL_S)
    except TimeoutError as error:
        raise DeadlineExceeded(f"{ready} of {wanted} servers are ready after {timeout_s:g} s") from error


def _serves(client: AsyncInferenceClient, worker: Mapping[str, object]) -> bool:
    return client.model is None or worker.get("model") in (None, client.model)


def _trajectories(
    take: Callable[Concatenate[RolloutController, P], list[Rollout]],
) -> Callable[Concatenate[RolloutController, P], list[Any]]:
    """Return a variant of the method that returns only trajectories, without versions and ids. It writes them to files
    if ``dump_to_file`` is set, and acknowledges them."""

    @wraps(take)
    def call(self: RolloutController, /, *args: P.args, **kwargs: P.kwargs) -> list[Any]:
        return [each.trajectory for each in self._dump_and_acknowledge(take(self, *args, **kwargs))]

    call.__signature__ = inspect.signature(take).replace(return_annotation="list[Any]")  # type: ignore[attr-defined]
    return call


class RolloutController:
    """Runs episodes against an inference service. ``should_accept_fn`` decides for each trajectory whether to train on
    it (dynamic sampling); a rejected one is replaced by another prompt's. A ``timeout`` is in seconds, by default a
    week: ``request_timeout`` bounds a request, ``episode_timeout`` an episode. Use it as a context manager, or call
    ``initialize`` and ``destroy``."""

    def __init__(
        self,
        config: InferenceEngineConfig,
        *,
        gateway_addr: str | None = None,
        admin_api_key: str | None = None,
        model: str | None = None,
        seed: int | None = None,
        dump_folder: Path | None = None,
        drop_incomplete_group: bool = False,
    ) -> None:
        """Create a controller. ``dump_folder``: for ``config.dump_to_file``; by default below the configuration's
        fileroot. ``drop_incomplete_group``: one failed member fails its group. ``seed`` determines the samples,
        together with the order of the data; None: they differ from run to run."""
        self.config = config
        self._dump_folder = dump_folder or fileroot_of(config)
        self._address = gateway_addr
        self._key = admin_api_key
        self._model = model
        self._seed = seed
        self._numbers = itertools.count()
        self._places = {is_eval: itertools.count() for is_eval in (False, True)}
        self._tasks: dict[str, int] = {}
        self._leases: dict[str, int] = {}  # the number of the episode that holds each
        self._streams: dict[int, tuple[Any, Iterator[Any]]] = {}
        self._thread: LoopThread | None = None
        self._opened = contextlib.AsyncExitStack()
        self._workflows = WorkflowResolver(
            config.agent or config.openai,
            drop_incomplete_group=drop_incomplete_group,
            check=config.check_trajectory_format,
        )

    def __enter__(self) -> Self:
        self.initialize()
        return self

    def __exit__(self, *error: object) -> None:
        self.destroy()

    def initialize(self, *_: Any, **__: Any) -> None:
        """Wait until the service is ready. Arguments are ignored; AReaL drivers pass those of their servers. Raises
        UsageFault if no service is named, and DeadlineExceeded."""
        if self._thread is not None:
            return
        service = self.service()
        tracing.start("trainer", own_code=True)
        self._thread = LoopThread("areal-rollouts")
        try:
            self._thread.run(self._open(service))
        except BaseException:
            self.destroy()
            raise

    def service(self) -> ServiceAddress:
        """Return the service from which episodes are sampled. Raises UsageFault, NotFound."""
        return find_service(self.config, ServiceAddress(self._address or "", self._key, self._model), os.environ)

    def current_address(self) -> str:
        """Return the current address of the service: that of its record once nothing listens at the previous one."""
        return self._loop.run(self._client.current_address())

    async def _open(self, service: ServiceAddress) -> None:
        config, opened = self.config, self._opened
        if getproxies_environment():  # agents' own clients run in this process and read them
            os.environ.update(loopback_without_proxy(os.environ))
        opened.push_async_callback(close_shared_http_client)
        opened.push_async_callback(self._workflows.close)
        self._client, self._context = await open_service(service, config)
        opened.push_async_callback(self._client.close)
        self._batcher = PromptBatcher(self._client, await servers_of(self._client))
        opened.push_async_callback(self._batcher.close)
        open_pool_of_this_loop(config.reward_workers)
        opened.push_async_callback(close_pools_of_this_loop)
        window = StalenessWindow(config.consumer_batch_size, config.max_head_offpolicyness, config.concurrency)
        runner = EpisodeRunner(
            self._engine,
            1 + config.request_retries,
            config.episode_timeout,
            config.check_trajectory_format,
            AttemptReport().add,
        )
        max_failures = max(_MIN_FAILURES, 2 * config.consumer_batch_size)
        staleness = StalenessManager(window, seed=self._seed or 0)
        self._executor = Executor(staleness, runner.run, runner.head_of, max_failures, self._failed)
        opened.push_async_callback(self._executor.close)

    def destroy(self) -> None:
        """Cancel running episodes and close the client. Idempotent; the service keeps running."""
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            thread.run(self._opened.aclose())
        finally:
            thread.close()

    def _engine(self, item: EpisodeSpec) -> EpisodeEngine:
        config = self.config
        return EpisodeEngine(
            self._client,
            self._batcher,
            item.task_id,
            lambda: self._executor.staleness.version,
            config.request_timeout,
            self._context,
            seed=self._seed or 0 if config.deterministic_sampling else self._seed,
            seed_field="seed" if config.deterministic_sampling else "default_seed",
            place=item.place,
            number=item.number,
            leases=self._leases,
        )

    def submit(
        self,
        data: Row,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, object] | None = None,
        should_accept_fn: Accept = None,
        group_size: int = 1,
        task_id: str | None = None,
        is_eval: bool = False,
    ) -> str:
        """Queue one episode (a group of ``group_size``) and return its id. With ``is_eval`` it runs outside the
        staleness window, and only ``wait_for_task`` returns it. Raises CallerError if the queue is full."""
        make = self._item_factory(
            workflow, workflow_kwargs, should_accept_fn, group_size, outside_window=is_eval, is_eval=is_eval
        )
        item = make(data, task_id)

        def put() -> None:
            executor, config = self._executor, self.config
            size = config.queue_size or _QUEUE_FACTOR * config.concurrency
            if len(executor.staleness.pending) >= size:
                raise CallerError(f"{size} episodes wait already: wait for some first", code="queue_full")
            if is_eval:
                executor.expect(item.number)
            executor.submit([item])

        self._loop.call(put)
        self._tasks[item.task_id] = item.number
        if len(self._tasks) > _MAX_TASKS:
            del self._tasks[next(iter(self._tasks))]
        return item.task_id

    def _item_factory(
        self,
        workflow: Any,
        kwargs: Mapping[str, object] | None,
        accept: Accept,
        group_size: int,
        *,
        outside_window: bool,
        is_eval: bool = False,
    ) -> Callable[[Row, str | None], EpisodeSpec]:
        runs = self._workflows.resolve(workflow, kwargs, group_size)
        accepts = load_attr(accept, "should_accept_fn") if isinstance(accept, str) else accept
        prefix = (self.config.trial_name or "rollout") + ("-eval" if is_eval else "")

        def make(data: Row, task_id: str | None = None) -> EpisodeSpec:
            number, row = next(self._numbers), next(self._places[is_eval])
            row = getattr(data, "position", row)  # the same when a trainer resumes
            place = f"{'eval' if is_eval else 'train'}:{row}:{getattr(data, 'tries', 0)}"
            name = task_id or f"{prefix}-{row}"
            return EpisodeSpec(number, data, runs, name, accepts, outside_window, is_eval, place)

        return make

    def wait(self, count: int, timeout: float | None = None, raise_timeout: bool = True) -> list[Any]:
        """Return the trajectories of ``count`` accepted episodes, those of the oldest weights first, in an order
        independent of when they ended. Raises TimedOut, RolloutsFailed; without ``raise_timeout``, a timeout returns
        []."""
        return [each.trajectory for each in self.take(count, timeout, raise_timeout=raise_timeout)]

    def take(self, count: int, timeout: float | None = None, *, raise_timeout: bool = True) -> list[Rollout]:
        """Return the rollouts of ``wait``: trajectories with versions, prompts and task ids."""
        try:
            taken = self._loop.run(self._executor.take(count, self._timeout(timeout), completed=False, low_water=0))
        except TimedOut:
            if raise_timeout:
                raise
            return []
        assert taken is not None
        return self._dump_and_acknowledge(taken)

    def wait_for_task(self, task_id: str, timeout: float | None = None) -> Any | None:
        """Return the trajectory of one episode, or None if it was rejected or abandoned as too old. Raises NotFound,
        TimedOut, RolloutFailed."""
        number = self._tasks.get(task_id)
        if number is None:
            raise NotFound(f"there is no episode {task_id!r}")
        rollout = self._loop.run(self._executor.take_one(number, self._timeout(timeout)))
        del self._tasks[task_id]
        self.acknowledge(self.spent_leases())
        return rollout.trajectory if rollout is not None else None

    def run_batch(
        self,
        data: Sequence[Row],
        workflow: Any = None,
        workflow_kwargs: Mapping[str, object] | None = None,
        should_accept_fn: Accept = None,
        group_size: int = 1,
        timeout: float | None = None,
        is_eval: bool = False,
    ) -> list[Rollout]:
        """Run these rows outside the staleness window, and return the accepted episodes in the order of ``data``.
        ``rollout_batch`` returns trajectories; ``run_batch`` also returns versions, prompts and task ids, and leaves
        ``dump_to_file`` and ``acknowledge`` to its caller. Failures are logged and kept in ``failures``. Raises
        TimedOut, and RolloutsFailed if all episodes failed."""
        make = self._item_factory(
            workflow, workflow_kwargs, should_accept_fn, group_size, outside_window=True, is_eval=is_eval
        )
        items = [make(row, None) for row in data]
        ends = self._loop.run(self._executor.run_all(items, self._timeout(timeout)))
        failed = [end for end in ends if isinstance(end, Failure)]
        if failed and len(failed) == len(items):
            raise RolloutsFailed(f"all {len(items)} episodes failed", failed)
        for failure in failed:
            _log.warning("episode %s failed by fault of the %s: %r", failure.task_id, failure.blame, failure.error)
        return [end for end in ends if isinstance(end, Rollout)]

    rollout_batch = _trajectories(run_batch)

    def take_prepared(
        self,
        dataloader: Iterable[Any] | None,
        workflow: Any = None,
        workflow_kwargs: Mapping[str, object] | None = None,
        should_accept_fn: Accept = None,
        group_size: int = 1,
        dynamic_bs: bool = False,
        timeout: float | None = None,
    ) -> list[Rollout]:
        """Return the next batch of ``consumer_batch_size`` while episodes for later batches keep running.
        ``prepare_batch`` returns trajectories; ``take_prepared`` also returns versions, prompts and task ids, and
        leaves ``dump_to_file`` and ``acknowledge`` to its caller. ``dataloader`` yields rows or lists of rows and is
        restarted at its end; None in online mode, where users start the episodes. With ``dynamic_bs`` the batch has the
        accepted episodes among that many finished ones, perhaps fewer. Arguments apply to newly submitted prompts."""
        make = self._item_factory(workflow, workflow_kwargs, should_accept_fn, group_size, outside_window=False)
        rows, count, executor = self._rows(dataloader), self.config.consumer_batch_size, self._executor
        enough = min(executor.staleness.window.size, self.config.concurrency + 2 * count)
        low_water, timeout_s = max(1, count // 2), self._timeout(timeout)

        async def take(items: list[EpisodeSpec]) -> list[Rollout] | None:
            executor.submit(items)
            return await executor.take(count, timeout_s, completed=dynamic_bs, low_water=low_water)

        while True:
            missing = enough - len(executor.staleness.pending)
            items = [make(row, None) for row in itertools.islice(rows, max(0, missing))]
            if (taken := self._loop.run(take(items))) is not None:
                return taken

    prepare_batch = _trajectories(take_prepared)

    def _rows(self, dataloader: Iterable[Any] | None) -> Iterator[Row]:
        """Return one endless stream for each data loader, continued across calls."""
        if dataloader is None:
            return itertools.repeat({})
        key = id(dataloader)
        if key not in self._streams or self._streams[key][0] is not dataloader:
            self._streams[key] = (dataloader, _endless(dataloader))
        return self._streams[key][1]

    def _dump_and_acknowledge(self, taken: list[Rollout]) -> list[Rollout]:
        if self.config.dump_to_file and taken:
            append_rollouts(self._dump_folder, self.get_version(), taken, self.model)
        self.acknowledge(self.spent_leases())
        return taken

    def _failed(self, item: EpisodeSpec, failure: Failure) -> None:
        if self.config.dump_to_file:
            write_failure(self._dump_folder, item, failure)

    def spent_leases(self) -> list[str]:
        """Return the leases of online mode whose episodes were taken, or ended without a result."""

        def read() -> list[str]:
            still_open = self._executor.open_numbers()
            return [lease for lease, number in self._leases.items() if number not in still_open]

        return self._loop.call(read) if self._leases else []

    def acknowledge(self, leases: Sequence[str]) -> None:
        """Acknowledge leases whose results are durable, so that the service deletes their trajectories. Otherwise they
        are offered again after this process has ended. A service that does not answer causes a warning, and the leases
        stay in ``spent_leases``."""

        async def notify() -> None:
            try:
                async with asyncio.timeout(CLEAN_UP_S):
                    await self._client.acknowledge_leases(leases)
            except (ClientError, TimeoutError, OSError) as error:
                _log.warning("%d trajectories of users are not acknowledged yet: %r", len(leases), error)
                return
            for lease in leases:
                self._leases.pop(lease, None)

        if leases:
            self._loop.run(notify())

    def pause(self) -> None:
        """Start no new episode."""
        self._loop.call(lambda: self._executor.pause())

    def resume(self) -> None:
        self._loop.call(lambda: self._executor.resume())

    def pause_generation(self) -> None:
        """Pause the whole service. Returns when no further token of the current weights can be sampled."""
        self._loop.run(self._client.workers.pause())

    def continue_generation(self) -> None:
        self._loop.run(self._client.workers.resume())

    def set_version(self, version: int) -> None:
        """Announce a published version. The weight update itself sets the version of new tokens."""
        self._loop.call(lambda: self._executor.set_version(version))

    def get_version(self) -> int:
        return self._staleness.version

    def chat_completion(self, messages: Sequence[Mapping[str, object]], **fields: Any) -> dict[str, Any]:
        """Return one chat completion, outside any episode."""
        return self._loop.run(self._client.chat(messages, **fields))

    def register_scrape_target(self, target: str, labels: Mapping[str, str]) -> None:
        """Register ``target`` (host:port) in the service's list of Prometheus targets, and renew it."""

        async def keep() -> None:
            while True:
                # A service that is down, or of an older release, cannot register it.
                with contextlib.suppress(ClientError, TimeoutError, OSError):
                    await self._client.register_scrape_target(target, labels, _TARGET_TTL_S)
                await asyncio.sleep(_TARGET_TTL_S / 3)

        self._registering = self._loop.start(keep())

    @property
    def model(self) -> str:
        """The model that is sampled from; "" for the only model of the service."""
        return self._client.model or ""

    def failures(self) -> list[Failure]:
        """Return the last 256 failures."""
        return self._loop.call(lambda: list(self._executor.staleness.failures))

    def export_stats(self) -> dict[str, float]:
        """Return the counts since the start, and the numbers of running, pending and ready episodes."""

        def read() -> dict[str, float]:
            state = self._executor.staleness
            now = {"running": len(state.running), "pending": len(state.pending), "ready": len(state.accepted)}
            return {**asdict(state.counts), **now, "version": state.version}

        return self._loop.call(read)

    def ends(self) -> list[EpisodeEnd]:
        """Return the episodes since the last call that are not trained on, and why. The first call starts the
        record."""
        return self._staleness.drain_ends()

    def served_version(self) -> int | None:
        """Return the highest weight version of the model's servers; None if no server reports one."""
        model = self._client.model

        async def ask() -> list[int]:
            versions = await self._client.workers.versions()
            ours = {each["worker_addr"] for each in await self._client.workers.list() if model in (None, each["model"])}
            return [version for address, version in versions.items() if address in ours]

        return max(self._loop.run(ask()), default=None)

    def outstanding(self) -> list[Row]:
        """Return the prompts that were submitted but not consumed, for a checkpoint."""

        def read() -> list[Row]:
            executor = self._executor
            return [item.data for item in (*executor.staleness.outstanding(), *executor.in_flight())]

        return self._loop.call(read)

    @staticmethod
    def _timeout(timeout: float | None) -> float:
        return _LONGEST_WAIT_S if timeout is None else timeout

    @property
    def _loop(self) -> LoopThread:
        if self._thread is None:
            raise RuntimeError("the controller is not initialized")
        return self._thread

    @property
    def _staleness(self) -> StalenessManager:
        """The state of the episodes, for single reads, which need not wait for the event loop."""
        assert self._loop is not None
        return self._executor.staleness


RolloutControllerV2 = RolloutController


def _endless(dataloader: Iterable[Any]) -> Iterator[Row]:
    """Yield rows forever. Raises ValueError for an empty data loader."""
    while True:
        empty = True
        for item in dataloader:
            empty = False
            yield from [item] if isinstance(item, Mapping) else item
        if empty:
            raise ValueError("the data loader has no rows")
