"""Tokens, TLS and the command: one line for whoever is refused, and no secret in any of them."""

from __future__ import annotations

import re
import signal
import subprocess
import sys

import pytest

from infra.contracts.errors import ConfigError, StorageError
from infra.storage.local_store import LocalStore
from infra.weights.flight_auth import Credentials, read_credentials
from infra.weights.flight_client import FlightWeights
from infra.weights.flight_command import main
from infra.weights.flight_server import WeightServer
from infra.weights.stored_weights import StoredWeights
from tests.infra.weights.flight_setup import assert_same, make_arrays, make_manifest, publish

SECRET = "s3cret-token"


@pytest.mark.parametrize("shown", ["", "wrong", SECRET[:-1], SECRET + "x", SECRET.upper()])
def test_a_wrong_token_is_one_line(shown):
    server = WeightServer(credentials=Credentials(token=SECRET))
    publish(FlightWeights(server.address, credentials=Credentials(token=SECRET)), 1)
    client = FlightWeights(server.address, credentials=Credentials(token=shown))
    calls = [
        client.latest,
        lambda: client.fetch(1),
        lambda: client.put(make_manifest(2), make_arrays(2)),
        lambda: client.commit(make_manifest(1)),
        client.stats,
    ]
    for call in calls:
        with pytest.raises(ConfigError, match="wants a token and refused the one given") as e:
            call()
        assert "\n" not in str(e.value) and SECRET not in str(e.value)
    assert server.stats()["gets"] == 0
    server.close()


def test_a_token_is_never_shown():
    credentials = Credentials(token=SECRET, certificate=b"c", key=b"private")
    assert SECRET not in f"{credentials} {credentials!r}" and "private" not in repr(credentials)


def test_where_the_token_comes_from(tmp_path):
    path = tmp_path / "token"
    path.write_text(f"{SECRET}\n")
    environment = {"HEADRACE_WEIGHTS_TOKEN": "other"}
    assert read_credentials(environment={}).token == ""
    assert read_credentials(environment=environment).token == "other"
    assert read_credentials(token_file=str(path), environment=environment).token == SECRET


@pytest.mark.parametrize(
    "text, words",
    [(None, "cannot be read"), ("", "is empty"), ("a b", "printable ASCII"), ("ü", "printable")],
)
def test_bad_token_files(tmp_path, text, words):
    path = tmp_path / "token"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as e:
        read_credentials(token_file=str(path), environment={})
    assert str(path) in str(e.value) and "\n" not in str(e.value)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """Self-signed, for 127.0.0.1."""
    folder = tmp_path_factory.mktemp("tls")
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 1 "
        "-keyout key.pem -out cert.pem -subj /CN=localhost "
        "-addext subjectAltName=IP:127.0.0.1,DNS:localhost"
    )
    made = subprocess.run(command.split(), cwd=folder, capture_output=True, check=False)
    if made.returncode:
        pytest.skip("no openssl here that can make a certificate")
    return folder


def test_tls(certificate):
    own = read_credentials(
        certificate_file=str(certificate / "cert.pem"),
        key_file=str(certificate / "key.pem"),
        environment={"HEADRACE_WEIGHTS_TOKEN": SECRET},
    )
    server = WeightServer(credentials=own)
    assert server.address.startswith("grpc+tls://")
    trusted = Credentials(token=SECRET, authority=own.certificate)
    client = FlightWeights(server.address, credentials=trusted)
    publish(client, 1)
    assert_same(client.fetch(1), make_arrays(1))
    for address, credentials in (
        (server.address, Credentials(token=SECRET)),
        (server.address.replace("grpc+tls", "grpc"), trusted),
    ):
        stranger = FlightWeights(address, credentials=credentials, call_secs=3.0)
        with pytest.raises(StorageError, match=re.escape(address)) as e:
            stranger.latest()
        assert "\n" not in str(e.value)
    server.close()


def test_a_certificate_needs_its_key(certificate):
    with pytest.raises(ConfigError, match="both a certificate and its key"):
        read_credentials(certificate_file=str(certificate / "cert.pem"), environment={})


@pytest.fixture
def run(tmp_path):
    folder = tmp_path / "run"
    LocalStore(folder).create("run.toml", b"")
    StoredWeights(LocalStore(folder), "demo").publish(1, make_arrays(1))
    return str(folder)


class Served:
    """``headrace weights serve`` as a process."""

    def __init__(self, *arguments: str) -> None:
        code = "import sys; from infra.weights.flight_command import main; main(sys.argv[1:])"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments], stdout=subprocess.PIPE, text=True
        )
        self.line = self.process.stdout.readline()
        self.address = self.line.split(" at ")[1].split(" ")[0]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=20)
        self.process.stdout.close()
        return code


def test_the_command_serves_a_root_and_a_relay(run):
    root = Served(run)
    relay = Served(run, "--upstream", root.address, "--keep", "1")
    assert root.line.endswith("(root, keeps 2)\n") and f"relay of {root.address}" in relay.line
    client = FlightWeights(relay.address)
    assert_same(client.fetch(client.latest().version), make_arrays(1))
    assert FlightWeights(root.address).stats()["gets"] == 1
    assert relay.end() == 0 and root.end() == 0


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["{run}", "--keep", "0"], "--keep 0: at least 1"),
        (["{run}", "--listen", "0.0.0.0:0"], "others can reach that"),
        (["{run}", "--token-file", "/nowhere"], "/nowhere: cannot be read"),
        (["{run}", "--upstream", "http://x"], "'http://x': a weight server is at grpc"),
        (["{run}/nothing"], "there is no run"),
    ],
)
def test_bad_arguments_are_one_line(run, arguments, words, monkeypatch):
    monkeypatch.delenv("HEADRACE_WEIGHTS_TOKEN", raising=False)
    with pytest.raises(ConfigError) as e:
        main([text.format(run=run) for text in arguments])
    assert words in str(e.value) and "\n" not in str(e.value)
