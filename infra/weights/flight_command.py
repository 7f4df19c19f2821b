"""``headrace weights serve RUN``: keep the newest weights in memory for the workers.

The root of a tree stands in front of the store; a relay (``--upstream``), one for each host of
workers, stands in front of another server and falls back to the store.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Sequence

from infra.bearer_token import WEIGHTS
from infra.contracts.errors import ConfigError
from infra.storage.open_run import open_run
from infra.weights.flight_auth import Credentials, read_credentials
from infra.weights.flight_client import FlightWeights
from infra.weights.flight_server import WeightServer
from infra.weights.stored_weights import StoredWeights
from infra.weights.weight_source import FastWeights
from infra.weights.weight_store import WeightReader

_LOOPBACK = ("127.", "localhost:", "[::1]:")
_EXAMPLES = """examples:
  headrace weights serve runs/demo                                     on this machine, a free port
  headrace weights serve gs://b/run --listen 0.0.0.0:7411 --token-file t --tls-cert c --tls-key k
  headrace weights serve gs://b/run --upstream grpc+tls://root:7411 --token-file t --tls-ca ca
"""


def main(argv: Sequence[str]) -> int:
    """Serve until SIGTERM. Raises ``ConfigError`` for what was asked wrongly."""
    args = _parse(argv)
    credentials = read_credentials(
        token_file=args.token_file,
        certificate_file=args.tls_cert,
        key_file=args.tls_key,
        authority_file=args.tls_ca,
    )
    if not credentials.token and not args.listen.startswith(_LOOPBACK):
        raise ConfigError(
            f"--listen {args.listen}: others can reach that, and could read and replace the "
            f"weights; give --token-file FILE or {WEIGHTS}, or listen on 127.0.0.1"
        )
    server = WeightServer(
        args.listen,
        source=_source(args.run, args.upstream, credentials),
        relay=bool(args.upstream),
        keep=args.keep,
        credentials=credentials,
    )
    ended = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: ended.set())
    behind = f"relay of {args.upstream}" if args.upstream else "root"
    print(f"weights of {args.run} at {server.address} ({behind}, keeps {args.keep})", flush=True)
    ended.wait()
    if not server.close():
        # A reader that takes no bytes would hold the process until its deadline. Nothing here is
        # durable, so nothing is lost.
        os._exit(0)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace weights serve",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", help="the run's folder")
    parser.add_argument(
        "--listen", metavar="HOST:PORT", default="127.0.0.1:0", help="port 0: a free one"
    )
    parser.add_argument("--upstream", metavar="URL", default="", help="be a relay of this server")
    parser.add_argument("--keep", type=int, default=2, metavar="N", help="versions in memory")
    parser.add_argument(
        "--token-file",
        metavar="FILE",
        default="",
        help=f"holds the token callers must show (else {WEIGHTS})",
    )
    parser.add_argument("--tls-cert", metavar="FILE", default="", help="PEM; serve over TLS")
    parser.add_argument("--tls-key", metavar="FILE", default="", help="PEM; its key")
    parser.add_argument("--tls-ca", metavar="FILE", default="", help="PEM; trusted for --upstream")
    args = parser.parse_args(argv)
    if args.keep < 1:
        raise ConfigError(f"--keep {args.keep}: at least 1")
    return args


def _source(run: str, upstream: str, credentials: Credentials) -> WeightReader:
    stored = StoredWeights(open_run(run), "")
    if not upstream:
        return stored
    return FastWeights(FlightWeights(upstream, credentials=credentials), stored)
