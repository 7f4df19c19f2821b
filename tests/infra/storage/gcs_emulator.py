"""Google Cloud Storage's JSON API over real HTTP, in this process's memory, with faults on order.

Only what ``GcsStore`` uses, but that to the letter: generations and preconditions (checked when an
upload begins and again when it ends), multipart and resumable uploads, ranges, crc32c, listings
with prefix, delimiter, start offset and page token. ``gcp-storage-emulator`` lacks preconditions,
start offsets and pages (docs/storage.md has the list).
"""

from __future__ import annotations

import json
import re
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from urllib.parse import parse_qs, unquote, urlsplit

from tests.infra.storage.gcs_objects import (
    MULTIPLE,
    ApiError,
    Fault,
    Stored,
    Upload,
    listing,
    resource,
)


class GcsEmulator:
    """Use as a context manager; ``endpoint`` is its address, ``requests`` what was asked."""

    def __init__(self, *buckets: str) -> None:
        self.buckets: dict[str, dict[str, Stored]] = {bucket: {} for bucket in buckets}
        self.uploads: dict[str, Upload] = {}
        self.faults: list[Fault] = []
        self.requests: list[str] = []
        self.lock = threading.RLock()
        self._generation = 1_700_000_000_000_000
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.emulator = self
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> GcsEmulator:
        serve = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        serve.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()

    def fault(self, method: str, target: str) -> Fault | None:
        with self.lock:
            self.requests.append(f"{method} {target}")
            for fault in self.faults:
                if fault.times and fault.method == method and fault.part in target:
                    fault.times -= 1
                    return fault
        return None

    def objects(self, bucket: str) -> dict[str, Stored]:
        if bucket not in self.buckets:
            raise ApiError(404, "The specified bucket does not exist.")
        return self.buckets[bucket]

    def find(self, bucket: str, name: str) -> Stored:
        found = self.objects(bucket).get(name)
        if found is None:
            raise ApiError(404, f"No such object: {bucket}/{name}")
        return found

    def check(self, bucket: str, name: str, expected: int | None) -> None:
        found = self.objects(bucket).get(name)
        if expected is not None and (found.generation if found else 0) != expected:
            raise ApiError(412, "At least one of the pre-conditions you specified did not hold.")

    def store(
        self, bucket: str, name: str, data: bytes, metadata: dict, expected: int | None = None
    ) -> Stored:
        """What another program would do to the object, too."""
        with self.lock:
            self.check(bucket, name, expected)
            self._generation += 1
            stored = Stored(data=data, generation=self._generation, metadata=metadata)
            self.objects(bucket)[name] = stored
            return stored


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # headers and body in one packet: else 40 ms per answer
    disable_nagle_algorithm = True

    @property
    def emulator(self) -> GcsEmulator:
        return self.server.emulator

    def log_message(self, *_: object) -> None:
        """Silence."""

    def handle_any(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        fault = self.emulator.fault(self.command, self.path) or Fault(method="")
        try:
            if fault.status:
                raise ApiError(fault.status, f"The emulator says {fault.status}.\nTwice.")
            with self.emulator.lock:
                status, headers, answer = self.answer(body, fault)
        except ApiError as e:
            headers = {"Content-Type": "application/json"}
            status = e.status
            answer = json.dumps({"error": {"code": status, "message": str(e)}}).encode()
        if fault.act:
            fault.act()
        if fault.lost or fault.keep is not None:
            self.hang_up()
            return
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        if fault.cut:
            self.wfile.write(answer[: len(answer) // 2])
            self.hang_up()
            return
        if fault.damage:
            answer = bytes([answer[0] ^ 1]) + answer[1:]
        self.wfile.write(answer)

    do_GET = do_POST = do_PUT = do_DELETE = handle_any

    def hang_up(self) -> None:
        self.wfile.flush()
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True

    def answer(self, body: bytes, fault: Fault) -> tuple[int, dict[str, str], bytes]:
        target = urlsplit(self.path)
        query = {key: values[0] for key, values in parse_qs(target.query).items()}
        bucket, name = re.search(r"/b/([^/]+)/o/?(.*)", target.path).groups()
        name = unquote(name)
        expected = query.get("ifGenerationMatch")
        expected = None if expected is None else int(expected)
        if self.command == "PUT":
            return self.chunk(self.emulator.uploads[query["upload_id"]], body, fault)
        if self.command == "POST":
            return self.upload(bucket, body, query, expected)
        if self.command == "DELETE":
            self.emulator.find(bucket, name)
            self.emulator.check(bucket, name, expected)
            del self.emulator.objects(bucket)[name]
            return 204, {}, b""
        if not name:
            return _json(listing(self.emulator.objects(bucket), bucket, query))
        stored = self.emulator.find(bucket, name)
        if query.get("alt") == "media":
            return self.download(stored)
        return _json(resource(bucket, name, stored))

    def download(self, stored: Stored) -> tuple[int, dict[str, str], bytes]:
        headers = {
            "Content-Type": "application/octet-stream",
            "X-Goog-Generation": str(stored.generation),
            "X-Goog-Metageneration": "1",
            "X-Goog-Hash": f"crc32c={stored.crc32c}",
            "X-Goog-Stored-Content-Length": str(len(stored.data)),
        }
        span = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range", ""))
        if not span:
            return 200, headers, stored.data
        first, last = int(span[1]), min(int(span[2]), len(stored.data) - 1)
        if first >= len(stored.data):
            raise ApiError(416, "The requested range cannot be satisfied.")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(stored.data)}"
        return 206, headers, stored.data[first : last + 1]

    def upload(
        self, bucket: str, body: bytes, query: dict[str, str], expected: int | None
    ) -> tuple[int, dict[str, str], bytes]:
        if query["uploadType"] == "multipart":
            boundary = re.search(rb'boundary="?([^";]+)', self.headers["Content-Type"].encode())
            _, first, second, _ = body.split(b"--" + boundary[1])
            described = json.loads(first.partition(b"\r\n\r\n")[2])
            data = second.partition(b"\r\n\r\n")[2].removesuffix(b"\r\n")
            name, metadata = described["name"], described.get("metadata", {})
            made = Stored(data=data, generation=0, metadata={})
            if described.get("crc32c") not in (None, made.crc32c):
                raise ApiError(400, f"Provided CRC32C does not match {made.crc32c}.")
            return _json(
                resource(bucket, name, self.emulator.store(bucket, name, data, metadata, expected))
            )
        described = json.loads(body)
        self.emulator.check(bucket, described["name"], expected)
        upload_id = f"upload-{len(self.emulator.uploads)}"
        self.emulator.uploads[upload_id] = Upload(
            bucket=bucket,
            name=described["name"],
            expected=expected,
            metadata=described.get("metadata", {}),
        )
        location = f"{self.emulator.endpoint}{self.path}&upload_id={upload_id}"
        return 200, {"Location": location}, b""

    def chunk(self, upload: Upload, body: bytes, fault: Fault) -> tuple[int, dict[str, str], bytes]:
        span = re.fullmatch(r"bytes (?:(\d+)-(\d+)|\*)/(\d+|\*)", self.headers["Content-Range"])
        if span[1] and not upload.done:
            first, last = int(span[1]), int(span[2])
            if first > len(upload.data) or last + 1 - first != len(body):
                raise ApiError(400, "The range does not fit what is stored.")
            if span[3] == "*" and len(body) % MULTIPLE:
                raise ApiError(400, f"Not a multiple of {MULTIPLE}.")
            arrived = body if fault.keep is None else body[: fault.keep]
            upload.data += arrived[len(upload.data) - first :]
        if not upload.done and span[3] == str(len(upload.data)):
            upload.done = self.emulator.store(
                upload.bucket,
                upload.name,
                bytes(upload.data),
                upload.metadata,
                upload.expected,
            )
        if upload.done:
            return _json(resource(upload.bucket, upload.name, upload.done))
        stored = {"Range": f"bytes=0-{len(upload.data) - 1}"} if upload.data else {}
        return 308, stored, b""


def _json(value: object) -> tuple[int, dict[str, str], bytes]:
    return 200, {"Content-Type": "application/json"}, json.dumps(value).encode()
