"""A home that an earlier commit (0ea3d210) wrote, without living processes, and the manifests beside it.

It has a suspended service with a model whose sessions are not exported, a suspended agent service with a session, a job
that succeeded, and an ``apply`` that was killed after it recorded its object. Commands of that commit made it in
``/tmp/recorded``: ``apply``, two turns in each session, a changed label, ``suspend``, and ``apply`` with
``AREAL_CRASH_AT=any:14``.
"""

from __future__ import annotations

import hashlib
import re
import shutil
import tarfile
from pathlib import Path

from areal.runtime.procfs import machine_id

ARCHIVE = Path(__file__).with_name("earlier_home.tar.gz")
MODEL = Path(__file__).resolve().parents[2] / "examples" / "reverse_digits" / "model"
_FOLDER = "/tmp/recorded"
_SIGNED = re.compile(r'\{"sha256": "[0-9a-f]{64}",\n"body": (?P<body>.*)\}\n', re.DOTALL)


def unpack(folder: Path, **replaced: str) -> None:
    """Make ``home`` and ``work`` below ``folder``, as if that commit had made them there, on this machine before it was
    started anew. ``replaced``: further strings of the recording."""
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(folder, filter="data")
    shutil.copytree(MODEL, folder / "work" / "model")
    strings = {_FOLDER: str(folder), "0" * 32: machine_id(), **replaced}
    for path in [*(folder / "home").rglob("*.json*"), *(folder / "work").glob("*.yaml")]:
        text = path.read_text()
        for old, new in strings.items():
            text = text.replace(old, new)
        if signed := _SIGNED.fullmatch(text):
            digest = hashlib.sha256(signed["body"].encode()).hexdigest()
            text = f'{{"sha256": "{digest}",\n"body": {signed["body"]}}}\n'
        path.write_text(text)
