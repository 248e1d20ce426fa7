"""Models and data sets of the Hugging Face hub, by id and revision, in the cache of the hub's library.

A path names a folder if there is one, otherwise an id (``org/name``). A revision (branch, tag or commit) is resolved to
a commit. The commit's snapshot is a folder in the cache that never changes, so that a restarted process has the same
weights. Cached files need neither the network nor ``huggingface_hub``. The hub is asked when possible; if it cannot be
reached, or with ``HF_HUB_OFFLINE``, only cached files are available.

The settings are the library's: HF_ENDPOINT, HF_TOKEN, HF_HOME, HF_HUB_CACHE, HF_HUB_OFFLINE.
"""

from __future__ import annotations

import fnmatch
import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from areal.dataclasses import dataclass, field
from areal.errors import ArealError, NotFound, UsageFault
from areal.files import parse_json

Kind = Literal["model", "dataset"]
ByteReporter = Callable[[int, int | None], None]
"""Called with the bytes done, and of how many (None: not known)."""

MAIN = "main"
COMMITS_VARIABLE = "AREAL_HUB_COMMITS"
"""Of a driver: the commits of ids (JSON) that the models of its job have, whatever their branches are at by now."""
TOKENIZER_FILES: tuple[str, ...] = (
    *("tokeniz*", "*processor_config.json", "special_tokens_map.json", "added_tokens.json", "vocab*", "merges.txt"),
    *("*.tiktoken", "*.model", "chat_template*", "additional_chat_templates/*", "config.json"),
    "generation_config.json",
)
_ID = re.compile(r"[A-Za-z0-9_][\w.-]*(/[A-Za-z0-9_][\w.-]*)?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_LONGEST_ID = 96
_ASK_S = 10.0
_BY_PATH = "a folder of this machine needs no hub: name it by its path, as ./NAME"
_SHARD = re.compile(r"(.+)-\d{5}-of-(\d{5})(\.safetensors|\.bin)")
_TRUE = {"1", "true", "yes", "on"}

# Weights for other programs, and copies of what safetensors hold.
_NEVER: tuple[str, ...] = (
    "*.gguf",
    "*.onnx",
    "*.onnx_data",
    "*.h5",
    "*.msgpack",
    "*.ot",
    "*.tflite",
    "*.mlmodel",
    "*.mlpackage/*",
)
_NEVER += ("onnx/*", "openvino/*", "coreml/*", "original/*", "consolidated*", "*.png", "*.jpg", "*.mp4")
_BESIDE_SAFETENSORS = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf")
_NO_WEIGHTS = {"training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth"}


def is_id(text: str) -> bool:
    """Return whether the hub could have a repository of this name."""
    fits = len(text) <= _LONGEST_ID and _ID.fullmatch(text) is not None
    return fits and "--" not in text and ".." not in text and not text.endswith((".git", ".ipynb", "/.", "."))


def is_commit(revision: str) -> bool:
    return _COMMIT.fullmatch(revision) is not None


@dataclass(frozen=True)
class Hub:
    """The hub's address and cache. ``token`` None: the token that the library finds."""

    cache: Path
    endpoint: str = ""
    token: str | None = field(default=None, repr=False)
    offline: bool = False

    @classmethod
    def of(cls, environment: Mapping[str, str] | None = None) -> Hub:
        """Return the settings of this process's environment, overlaid with ``environment``."""
        env = {**os.environ, **(environment or {})}
        home = env.get("HF_HOME") or str(Path(env.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface")
        cache = env.get("HF_HUB_CACHE") or env.get("HUGGINGFACE_HUB_CACHE") or str(Path(home) / "hub")
        offline = any(env.get(name, "").lower() in _TRUE for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"))
        token = env.get("HF_TOKEN") or env.get("HUGGING_FACE_HUB_TOKEN") or None
        return cls(Path(os.path.expandvars(cache)).expanduser(), env.get("HF_ENDPOINT", "").rstrip("/"), token, offline)

    def repository(self, repo: str, kind: Kind = "model") -> Path:
        return self.cache / f"{kind}s--{repo.replace('/', '--')}"

    def cached_commit(self, repo: str, revision: str = MAIN, kind: Kind = "model") -> str | None:
        """Return the cached commit of a revision; None if the commit or its files are not in the cache."""
        folder = self.repository(repo, kind)
        try:
            commit = revision if is_commit(revision) else (folder / "refs" / revision).read_text().strip()
        except (OSError, ValueError):
            return None
        return commit if (folder / "snapshots" / commit).is_dir() else None

    def cached(
        self, repo: str, revision: str = MAIN, kind: Kind = "model", only: Sequence[str] | None = None
    ) -> Path | None:
        """Return the snapshot's folder in the cache; None if it is missing or incomplete: without a file of ``only``,
        or, if that is None, without all weights of a model."""
        commit = self.cached_commit(repo, revision, kind)
        if commit is None:
            return None
        folder = self.repository(repo, kind) / "snapshots" / commit
        if only is not None:
            files = (path for path in folder.rglob("*") if path.is_file())
            found = any(_matches(str(path.relative_to(folder)), only) for path in files)
        else:
            found = kind != "model" or holds_weights(folder)
        return folder if found else None

    def has(self, repo: str, kind: Kind = "model", only: Sequence[str] | None = None) -> bool:
        """Return whether the cache has any commit of a repository, in the sense of ``cached``."""
        folder = self.repository(repo, kind) / "snapshots"
        return folder.is_dir() and any(self.cached(repo, path.name, kind, only) for path in folder.iterdir())

    def commit(
        self, repo: str, revision: str = MAIN, kind: Kind = "model", *, only: Sequence[str] | None = None
    ) -> str:
        """Return the current commit of a revision, of which ``only`` (as for ``snapshot``) is available. Raises
        NotFound, ArealError."""
        found = self._about(repo, revision, kind, only)
        return found.commit if found is not None else self._needed(repo, revision, kind, only).name

    def snapshot(
        self,
        repo: str,
        revision: str = MAIN,
        kind: Kind = "model",
        *,
        only: Sequence[str] | None = None,
        force: bool = False,
        report: ByteReporter | None = None,
    ) -> Path:
        """Return the folder of a revision's snapshot, named by its commit, with all useful files. Missing files are
        downloaded. ``only``: patterns of files; ``force``: download existing files again. Raises NotFound, ArealError.
        """
        about = self._about(repo, revision, kind, only)
        if about is None:
            return self._needed(repo, revision, kind, only)
        import huggingface_hub

        names = about.chosen(only)
        folder = self.repository(repo, kind) / "snapshots" / about.commit
        left = [about.sizes[name] for name in names if force or not (folder / name).exists()]
        with self._explained(repo, revision, kind):
            found = huggingface_hub.snapshot_download(
                repo,
                repo_type=kind,
                revision=revision,
                cache_dir=self.cache,
                endpoint=self.endpoint or None,
                token=self.token,
                allow_patterns=[literal_pattern(name) for name in names],
                force_download=force,
                tqdm_class=_bar(report, sum(left)),
            )
        return Path(found)

    def files(self, repo: str, revision: str = MAIN, kind: Kind = "model") -> list[str]:
        """Return the names of a revision's files, from the hub or from the cache. Raises NotFound, ArealError."""
        about = self._about(repo, revision, kind)
        if about is not None:
            return list(about.sizes)
        folder = self._needed(repo, revision, kind)
        return [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]

    def _about(self, repo: str, revision: str, kind: Kind, only: Sequence[str] | None = None) -> _HubRevision | None:
        """Return the hub's description of a revision; None if offline, or if the hub does not answer and the revision
        is cached."""
        if not is_id(repo):
            raise NotFound(f"{repo!r} is neither a folder nor a {kind} id of the Hugging Face hub")
        if self.offline:
            return None
        try:
            from huggingface_hub import HfApi
        except ImportError as error:
            if self.cached(repo, revision, kind, only) is not None:
                return None
            raise UsageFault(
                f"{repo} is no folder here and is not in the cache {self.cache}; to take it from the Hugging Face hub,"
                " huggingface_hub is needed",
                hint=f"pip install huggingface_hub; {_BY_PATH}",
            ) from error
        try:
            with self._explained(repo, revision, kind):
                api = HfApi(endpoint=self.endpoint or None, token=self.token, library_name="areal")
                found: Any = api.repo_info(repo, repo_type=kind, revision=revision, timeout=_ASK_S, files_metadata=True)
        except ArealError:
            if self.cached(repo, revision, kind, only) is not None:
                return None
            raise
        return _HubRevision(found.sha, {file.rfilename: file.size or 0 for file in found.siblings or ()})

    def _needed(self, repo: str, revision: str, kind: Kind, only: Sequence[str] | None = None) -> Path:
        folder = self.cached(repo, revision, kind, only)
        if folder is not None:
            return folder
        at = "" if revision == MAIN else f" at {revision}"
        raise NotFound(
            f"{kind} {repo}{at} is {self._extent(repo, revision, kind)}, and HF_HUB_OFFLINE forbids asking the hub",
            hint=f"areal models pull {repo}, without HF_HUB_OFFLINE; or name a folder" if kind == "model" else None,
        )

    def _extent(self, repo: str, revision: str, kind: Kind) -> str:
        """Return in words how much of an incomplete revision is in the cache."""
        partly = self.cached_commit(repo, revision, kind) is not None
        return f"only in part in the cache {self.cache}" if partly else f"not in the cache {self.cache}"

    @contextmanager
    def _explained(self, repo: str, revision: str, kind: Kind) -> Iterator[None]:
        """Convert errors of the library to ArealError."""
        from huggingface_hub import errors

        where = self.endpoint or "https://huggingface.co"
        try:
            yield
        except errors.GatedRepoError as error:
            raise ArealError(
                f"{kind} {repo} is gated: {where} gives it to those who have accepted its terms",
                hint=f"accept them at {where}/{repo}, and set HF_TOKEN to a token of that account",
            ) from error
        except errors.RevisionNotFoundError as error:
            raise NotFound(f"{kind} {repo} has no revision {revision!r} at {where}") from error
        except errors.RepositoryNotFoundError as error:
            key = "that token may not see it" if self.token else "it is private and HF_TOKEN is not set"
            raise NotFound(
                f"{kind} {repo} is not at {where}, or {key}", hint=f"check the spelling; {_BY_PATH}"
            ) from error
        except errors.LocalEntryNotFoundError as error:
            raise ArealError(f"{kind} {repo} cannot be downloaded: {_first_line(error)}", hint=_BY_PATH) from error
        except errors.HfHubHTTPError as error:
            raise ArealError(f"{kind} {repo}: {where} answers: {_first_line(error)}", hint=_BY_PATH) from error
        except OSError as error:
            raise ArealError(f"{kind} {repo} cannot be stored in {self.cache}: {_first_line(error)}") from error
        except ArealError:
            raise
        except Exception as error:
            if type(error).__module__.partition(".")[0] not in ("httpx", "httpx2", "httpcore", "requests", "urllib3"):
                raise
            raise ArealError(
                f"{kind} {repo} is no folder here and {self._extent(repo, revision, kind)}, and the hub cannot be"
                f" reached at {where}: {_first_line(error) or type(error).__name__}",
                hint=f"{_BY_PATH}; or check HF_ENDPOINT and the network",
            ) from error


@dataclass(frozen=True)
class _HubRevision:
    commit: str
    sizes: Mapping[str, int]

    def chosen(self, only: Sequence[str] | None) -> list[str]:
        """Return the files to download: those that match ``only``, else all except duplicates and files for other
        programs."""
        if only is not None:
            return [name for name in self.sizes if _matches(name, only)]
        doubles = _BESIDE_SAFETENSORS if any(name.endswith(".safetensors") for name in self.sizes) else ()
        return [name for name in self.sizes if not _matches(name, (*_NEVER, *doubles))]


def model_folder(path: str, only: Sequence[str] | None = None) -> Path:
    """Return the folder ``path``, or the folder of the model with this id on the hub, at the commit in
    AREAL_HUB_COMMITS, else at the commit that this process used first. ``only``: as for ``Hub.snapshot``. Raises
    NotFound, ArealError."""
    local = Path(path).expanduser()
    if local.is_dir() or path.startswith((".", "/", "~")) or not is_id(path):
        return local
    hub = Hub.of()
    given = json.loads(os.environ.get(COMMITS_VARIABLE) or "{}").get(path)
    folder = hub.snapshot(path, given or _COMMITS.get((hub, path), MAIN), only=only)
    _COMMITS[hub, path] = folder.name
    return folder


_COMMITS: dict[tuple[Hub, str], str] = {}


def holds_weights(folder: Path) -> bool:
    """Return whether a folder has weight files, and all files that its index names."""
    names = [path.name for path in folder.iterdir() if path.suffix in _WEIGHTS and path.exists()]
    return bool(set(names) - _NO_WEIGHTS) and not any(missing_shards(folder))


def missing_shards(folder: Path) -> Iterator[str]:
    """Return the missing weight files, which an index names or which follow from the number in a shard's name."""
    wanted: set[str] = set()
    names = {path.name for path in folder.iterdir()}
    for index in (name for name in names if name.endswith((".safetensors.index.json", ".bin.index.json"))):
        try:
            wanted |= set(parse_json((folder / index).read_text()).get("weight_map", {}).values())
        except (OSError, ValueError, AttributeError):
            continue
    for match in filter(None, map(_SHARD.fullmatch, names)):
        count = int(match[2])
        wanted |= {f"{match[1]}-{number:05}-of-{count:05}{match[3]}" for number in range(1, count + 1)}
    present = {name for name in wanted if (folder / name).exists()}
    formats = {Path(name).suffix for name in present}
    # An index of a format that was never downloaded says nothing: another one has all the weights.
    return iter(sorted(name for name in wanted - present if not formats or Path(name).suffix in formats))


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def literal_pattern(name: str) -> str:
    """Return a pattern that matches only this file name."""
    return re.sub(r"([*?[])", r"[\1]", name)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else ""


def _bar(report: ByteReporter | None, total: int) -> type[Any]:
    """Return a progress class for the library that prints nothing and reports bytes."""
    from tqdm import tqdm

    class Bar(tqdm):  # type: ignore[type-arg,misc,unused-ignore]
        def __init__(self, *args: Any, **settings: Any) -> None:
            bytes_written = settings.get("unit") == "B" and "transfer" not in str(settings.get("name", ""))
            self._report = report if bytes_written else None
            settings.pop("name", None)
            super().__init__(*args, **{**settings, "disable": True})
            self._done = 0

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            if self._report is not None:
                self._report(self._done, max(total, self._done) or None)
            return None

    return Bar
