from __future__ import annotations

import pytest

from infra.contracts.errors import ConfigError
from infra.storage.open_store import open_store


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "{}/"])
def test_a_folder_by_path_or_url(tmp_path, form):
    store = open_store(form.format(tmp_path / "a run"))
    assert store.create("key", b"x")
    assert (tmp_path / "a run" / "key").read_bytes() == b"x"
    assert open_store(store.url).read("key") == b"x"


def test_quoted_urls(tmp_path):
    assert open_store(f"file://{tmp_path}/a%20run").url == str(tmp_path / "a run")


def test_a_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert open_store("runs/demo").url == str(tmp_path / "runs" / "demo")


def test_opening_writes_nothing(tmp_path):
    store = open_store(str(tmp_path / "none"))
    assert store.list_after("") == [] and store.list_folders("") == []
    assert store.read_with_token("a") is None
    store.delete("a")
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    "url, words",
    [
        ("gs://", "no bucket's name; give gs://bucket/path"),
        ("gs:///run", "no bucket's name; give gs://bucket/path"),
        ("gs://My_Bucket/run", "no bucket's name; give gs://bucket/path"),
        ("gcs://bucket/run", "not a location.*gs://bucket/path"),
        ("s3://bucket/run", "not a location"),
        ("memory://", "not a location"),
        ("", "not a location"),
        ("file://elsewhere/run", "this machine"),
        ("file://", "this machine"),
        ("file:///", "this machine"),
    ],
)
def test_refused(url, words):
    with pytest.raises(ConfigError, match=words) as e:
        open_store(url)
    assert "\n" not in str(e.value)
