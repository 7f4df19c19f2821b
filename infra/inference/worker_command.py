"""``headrace worker URL``: look at one inference worker, pause it, abort what it does, drain it."""

from __future__ import annotations

import argparse
import json
from urllib.parse import urlsplit

from infra.bearer_token import WORKER, read_token
from infra.contracts.errors import ConfigError, InferenceError
from infra.inference.http_connections import HttpAnswer, HttpConnections
from infra.inference.native_worker import raise_for_status
from infra.inference.worker import Busy, Call, Failed, Unreachable

_EXAMPLES = """examples:
  headrace worker http://localhost:8000               version, load, what it waits for
  headrace worker URL pause                           finish what runs, take nothing new
  headrace worker URL pause --mode in_place           hold what runs where it is, until resume
  headrace worker URL pause --mode abort              end what runs (segments are answered)
  headrace worker URL resume
  headrace worker URL abort --request ID              end one request (or: --all)
  headrace worker URL drain                           finish what runs, then end the process
"""
_ACTIONS = ("status", "pause", "resume", "abort", "drain")
_MODES = ("finish", "in_place", "abort")
_SECS = 10.0


def main(argv: list[str]) -> int:
    """Do one thing and print the worker's health after it."""
    args = _parse(argv)
    parts = urlsplit(args.url if "://" in args.url else f"http://{args.url}")
    try:
        port = parts.port
    except ValueError:
        port = None
    if parts.scheme != "http" or not parts.hostname or not port:
        raise ConfigError(f"worker '{args.url}': give http://host:port")
    token = read_token(WORKER, args.token_file)
    headers = {"Authorization": f"Bearer {token}"} if token else None
    http = HttpConnections(parts.hostname, port, headers=headers)
    try:
        health = _ask(f"worker {parts.hostname}:{port}", http, args)
    finally:
        http.close()
    print(json.dumps(health) if args.json else _as_text(health))
    return 0


def _parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="headrace worker",
        description=__doc__,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("url", metavar="URL", help="http://host:port of the worker")
    parser.add_argument("action", nargs="?", choices=_ACTIONS, default="status")
    parser.add_argument("--mode", choices=_MODES, help="pause: what becomes of what runs")
    parser.add_argument("--request", metavar="ID", help="abort: this request and its segments")
    parser.add_argument("--all", action="store_true", help="abort: everything")
    parser.add_argument("--token-file", metavar="FILE", default="", help=f"default: ${WORKER}")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    args = parser.parse_args(argv)
    if args.mode and args.action != "pause":
        raise ConfigError(f"headrace worker {args.action}: --mode is for pause")
    if (args.request is not None) + args.all != (args.action == "abort"):
        raise ConfigError("headrace worker abort: give either --request ID or --all")
    return args


def _ask(name: str, http: HttpConnections, args: argparse.Namespace) -> dict[str, object]:
    """Raises ``InferenceError``: no answer, or a refusal."""
    body: dict[str, object] = {}
    if args.action == "pause":
        body = {"mode": args.mode or _MODES[0]}
    elif args.action == "abort":
        body = {"all": True} if args.all else {"request_id": args.request}
    try:
        answer = _send(http, args.action, json.dumps(body).encode())
        raise_for_status(name, answer)
        return json.loads(answer.body)
    except (Unreachable, Busy, Failed, ValueError) as e:
        raise InferenceError(f"{name}: {e}") from e


def _send(http: HttpConnections, action: str, body: bytes) -> HttpAnswer:
    if action == "status":
        return http.get("/healthz", _SECS)
    return http.post(f"/v1/{action}", body, _SECS, Call(), lambda: None)


def _as_text(health: dict[str, object]) -> str:
    lines = [f"{name:<10} {value}" for name, value in health.items() if name != "sync_secs"]
    sync = health.get("sync_secs")
    if isinstance(sync, dict) and sync:
        parts = "  ".join(f"{part} {secs:.3f}" for part, secs in sync.items())
        lines.append(f"{'sync_secs':<10} {parts}")
    return "\n".join(lines)
