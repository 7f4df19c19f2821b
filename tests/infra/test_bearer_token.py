from __future__ import annotations

import pytest

from infra.bearer_token import WORKER, read_token
from infra.contracts.errors import ConfigError


def test_where_the_token_comes_from(tmp_path):
    file = tmp_path / "token"
    file.write_text("word\n")
    environment = {"HEADRACE_WORKER_TOKEN": "other"}
    assert read_token(WORKER, str(file), environment) == "word"
    assert read_token(WORKER, "", environment) == "other"
    assert read_token(WORKER, "", {}) == ""
    for text, message in (("\n", "is empty"), ("two words", "printable ASCII")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=message):
            read_token(WORKER, str(file), {})
    with pytest.raises(ConfigError, match="cannot be read"):
        read_token(WORKER, str(tmp_path / "none"), {})
