from __future__ import annotations

from pathlib import Path

import pytest

from tests.services.tokenizer_folder import write_tokenizer


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"))
