"""A stand-in for the Hugging Face hub: the routes that its own library asks, on loopback, and a filled cache."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import pytest


@pytest.fixture(autouse=True)
def hub_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """In every test of a module that imports it: no variable of a hub but an empty cache."""
    for name in ("HF_TOKEN", "HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE", "HF_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def commit_of(name: str) -> str:
    return hashlib.sha1(name.encode()).hexdigest()


@dataclass
class Repository:
    """``revisions``: branch or tag to commit; ``commits``: the files of each. ``token``: who may see it; ``gated``: and
    not even they."""

    revisions: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    token: str = ""
    gated: bool = False

    def push(self, files: Mapping[str, bytes], name: str, branch: str = "main") -> str:
        """A commit on a branch."""
        commit = commit_of(name)
        self.commits[commit] = dict(files)
        self.revisions[branch] = commit
        return commit


class HubStandin:
    """``repositories`` by kind and id; ``asked`` is every request, ``sent`` the bytes of files."""

    def __init__(self) -> None:
        self.repositories: dict[tuple[str, str], Repository] = {}
        self.asked: list[str] = []
        self.sent = 0
        self.down = False
        self.cut_after: int | None = None  # a file's connection breaks after so many bytes, once
        standin = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                standin.answer(self, body=True)

            def do_HEAD(self) -> None:
                standin.answer(self, body=False)

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def repository(self, name: str, kind: str = "model") -> Repository:
        return self.repositories.setdefault((kind, name), Repository())

    def answer(self, request: BaseHTTPRequestHandler, *, body: bool) -> None:
        url = urlsplit(request.path)
        self.asked.append(f"{request.command} {request.path}")
        if self.down:
            self._send(request, 503, {"error": "down"}, body=body)
            return
        parts = [unquote(part) for part in url.path.strip("/").split("/")]
        if parts[0] == "api":
            self._api(request, parts[1:], parse_qs(url.query))
        else:
            self._resolve(request, parts, body=body)

    def _api(self, request: BaseHTTPRequestHandler, parts: list[str], query: dict[str, list[str]]) -> None:
        kind, rest = parts[0].rstrip("s"), parts[1:]
        verb = next((each for each in ("revision", "tree") if each in rest), None)
        at = rest.index(verb) if verb else len(rest)
        repository = self._allowed(request, kind, "/".join(rest[:at]), metadata=True)
        if repository is None:
            return
        asked = "/".join(rest[at + 1 :]) or "main"
        commit = repository.revisions.get(asked, asked)
        files = repository.commits.get(commit)
        if files is None:
            self._send(request, 404, {"error": "no revision"}, {"X-Error-Code": "RevisionNotFound"})
        elif verb == "tree":
            self._send(request, 200, [self._entry(name, data) for name, data in files.items()])
        else:
            siblings = [{"rfilename": name, "size": len(data)} for name, data in files.items()]
            self._send(request, 200, {"id": "/".join(rest[:at]), "sha": commit, "siblings": siblings})

    def _entry(self, name: str, data: bytes) -> dict[str, Any]:
        return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}

    def _resolve(self, request: BaseHTTPRequestHandler, parts: list[str], *, body: bool) -> None:
        kind = "dataset" if parts[0] == "datasets" else "model"
        parts = parts[1:] if kind == "dataset" else parts
        at = parts.index("resolve")
        repository = self._allowed(request, kind, "/".join(parts[:at]))
        if repository is None:
            return
        commit = repository.revisions.get(parts[at + 1], parts[at + 1])
        data = repository.commits.get(commit, {}).get("/".join(parts[at + 2 :]))
        if data is None:
            self._send(request, 404, {"error": "no file"}, {"X-Error-Code": "EntryNotFound"}, body=body)
            return
        headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start = int((request.headers.get("Range") or "bytes=0-").removeprefix("bytes=").partition("-")[0])
        part = data[start:]
        request.send_response(206 if start else 200)
        for name, value in {**headers, "Content-Length": str(len(part))}.items():
            request.send_header(name, value)
        if start:
            request.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        request.end_headers()
        if not body:
            return
        if self.cut_after is not None and len(part) > self.cut_after:
            part, self.cut_after = part[: self.cut_after], None
            request.close_connection = True
        with contextlib.suppress(ConnectionError):
            request.wfile.write(part)
            self.sent += len(part)

    def _allowed(
        self, request: BaseHTTPRequestHandler, kind: str, name: str, *, metadata: bool = False
    ) -> Repository | None:
        repository = self.repositories.get((kind, name))
        told = (request.headers.get("Authorization") or "").removeprefix("Bearer ")
        if repository is None or (repository.token and repository.token != told):
            self._send(request, 401, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"})
            return None
        if repository.gated:
            self._send(request, 403, {"error": "gated"}, {"X-Error-Code": "GatedRepo"})
            return None
        return repository

    @staticmethod
    def _send(
        request: BaseHTTPRequestHandler,
        status: int,
        document: Any,
        headers: Mapping[str, str] | None = None,
        *,
        body: bool = True,
    ) -> None:
        data = json.dumps(document).encode()
        request.send_response(status)
        sent = {"Content-Type": "application/json", "Content-Length": str(len(data)), **(headers or {})}
        for name, value in sent.items():
            request.send_header(name, value)
        request.end_headers()
        if body and request.command != "HEAD":
            request.wfile.write(data)


@contextlib.contextmanager
def hub_standin() -> Iterator[HubStandin]:
    standin = HubStandin()
    try:
        yield standin
    finally:
        standin.close()


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def fill_cache(cache: Path, name: str, folder: Path, *, kind: str = "model", commit: str = "") -> str:
    """What a download of ``folder``'s files by Hugging Face's own libraries leaves; the commit."""
    commit = commit or commit_of(name)
    repository = cache / f"{kind}s--{name.replace('/', '--')}"
    snapshot, blobs = repository / "snapshots" / commit, repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commit)
    for path in (path for path in folder.rglob("*") if path.is_file()):
        blob = blobs / hashlib.sha1(path.read_bytes()).hexdigest()
        shutil.copyfile(path, blob)
        place = snapshot / path.relative_to(folder)
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(blob)
    return commit
