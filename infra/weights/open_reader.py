"""Where a role reads weights from, and puts them, by its configuration."""

from __future__ import annotations

from infra.clock import Clock
from infra.weights.flight_auth import read_credentials
from infra.weights.flight_client import FlightWeights
from infra.weights.flight_push import FlightPush
from infra.weights.weight_source import FastWeights
from infra.weights.weight_store import WeightReader


def open_reader(
    stored: WeightReader, server: str, *, token_file: str, ca_file: str, clock: Clock
) -> WeightReader:
    """The store, behind a weight server if there is one (``grpc://host:port``)."""
    if not server:
        return stored
    return FastWeights(_connect(server, token_file, ca_file), stored, clock=clock)


def open_push(
    server: str, run: str, *, token_file: str, ca_file: str, clock: Clock
) -> FlightPush | None:
    """The way into a weight server, if there is one."""
    return FlightPush(_connect(server, token_file, ca_file), run, clock) if server else None


def _connect(server: str, token_file: str, ca_file: str) -> FlightWeights:
    credentials = read_credentials(token_file=token_file, authority_file=ca_file)
    return FlightWeights(server, credentials=credentials)
