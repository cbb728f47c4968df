"""An S3 server on 127.0.0.1 for tests: moto, and a proxy before it that makes faults."""

from __future__ import annotations

import http.client
import logging
import random
import re
import sys
import threading
import time
from collections import Counter
from contextlib import nullcontext
from datetime import datetime, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from moto.server import ThreadedMotoServer

#: Share of the requests that have each fault. Those of bodies are only of answers that have some, those of lists only of lists.
FAULTS = {
    "refused": 0.01,  # the connection ends before the request reaches the store
    "lost": 0.01,  # the request is carried out, and the connection ends without an answer
    "unavailable": 0.01,  # 503
    "failed": 0.01,  # 500, and the request is carried out
    "cut": 0.02,  # the connection ends in the middle of the body
    "slow": 0.02,  # the body comes in pieces
    "stale": 0.3,  # manifests of the last seconds are not listed
}
#: Age in seconds below which a manifest may not be listed.
STALE = 3.0
#: Headers that belong to one connection.
HOP = {"connection", "keep-alive", "transfer-encoding", "content-length", "date", "server"}


class FaultyS3:
    """Serves one bucket while it is entered. `endpoint` is its address; `counts` says how often each fault was made."""

    def __init__(self, bucket: str, seed: int) -> None:
        self.bucket, self.random, self.lock = bucket, random.Random(seed), threading.Lock()
        self.writing = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.is_faulty = True
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.moto = ThreadedMotoServer("127.0.0.1", 0, verbose=False)

    def __enter__(self) -> FaultyS3:
        self.moto.start()
        self.port = self.moto.get_host_and_port()[1]
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("PUT", f"/{self.bucket}")
        assert connection.getresponse().status == 200
        connection.close()
        owner = self

        class Handler(Proxy):
            s3 = owner

        self.proxy = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.proxy.server_address[1]}"
        threading.Thread(target=self.proxy.serve_forever, daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.proxy.shutdown()
        self.proxy.server_close()
        self.moto.stop()

    def environment(self) -> dict[str, str]:
        """The variables with which a client finds the server."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ALLOW_HTTP": "true",
            "AWS_ACCESS_KEY_ID": "test",
            "AWS_SECRET_ACCESS_KEY": "test",
            "AWS_REGION": "us-east-1",
        }

    def keys(self, prefix: str) -> list[str]:
        """The first thousand objects below a prefix, from the server itself."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("GET", f"/{self.bucket}?list-type=2&prefix={quote(prefix, safe='')}")
        answer = connection.getresponse().read().decode()
        connection.close()
        return re.findall("<Key>(.*?)</Key>", answer)

    def strikes(self, fault: str) -> bool:
        """Whether this request has the fault."""
        with self.lock:
            found = self.is_faulty and self.random.random() < FAULTS[fault]
            self.counts[fault] += found
            return found


class Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Prints only what is no client that was killed."""
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Proxy(BaseHTTPRequestHandler):
    """Passes requests on, with faults."""

    protocol_version = "HTTP/1.1"
    s3: FaultyS3

    def setup(self) -> None:
        super().setup()
        self.upstream = http.client.HTTPConnection("127.0.0.1", self.s3.port, timeout=60)

    def finish(self) -> None:
        self.upstream.close()
        super().finish()

    def log_message(self, format: str, *args: Any) -> None:
        """Prints nothing."""

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.s3.counts["requests"] += 1
        if self.s3.strikes("refused"):
            self.close_connection = True
            return
        if self.s3.strikes("unavailable"):
            self.answer(503, {}, b"<Error><Code>SlowDown</Code></Error>")
            return
        # moto compares and writes in two steps. One write at a time makes put-if-absent what it is elsewhere.
        with self.s3.writing if self.command == "PUT" else nullcontext():
            self.upstream.request(self.command, self.path, body, dict(self.headers))
            response = self.upstream.getresponse()
            content = response.read()
        if self.s3.strikes("lost"):
            self.close_connection = True
            return
        if self.s3.strikes("failed"):
            self.answer(500, {}, b"<Error><Code>InternalError</Code></Error>")
            return
        headers = {name: value for name, value in response.getheaders() if name.lower() not in HOP}
        if self.command == "HEAD":
            headers["Content-Length"] = response.getheader("Content-Length") or "0"
        if self.lists_manifests() and self.s3.strikes("stale"):
            content = without_newest(content)
        self.answer(response.status, headers, content)

    def lists_manifests(self) -> bool:
        prefix = parse_qs(urlsplit(self.path).query).get("prefix", [""])[0]
        return self.command == "GET" and "list-type" in self.path and "branches" in unquote(prefix)

    def answer(self, status: int, headers: dict[str, str], content: bytes) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        if self.command != "HEAD":
            self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "GET" or not content:
            self.wfile.write(b"" if self.command == "HEAD" else content)
        elif self.s3.strikes("cut"):
            self.wfile.write(content[: len(content) // 2])
            self.close_connection = True
        elif self.s3.strikes("slow"):
            for at in range(4):
                self.wfile.write(content[len(content) * at // 4 : len(content) * (at + 1) // 4])
                self.wfile.flush()
                time.sleep(0.1)
        else:
            self.wfile.write(content)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve


def without_newest(content: bytes) -> bytes:
    """A list without the manifests of the last seconds."""

    def kept(entry: re.Match[bytes]) -> bytes:
        modified = re.search(rb"<LastModified>([^<.Z]*)", entry[0])
        assert modified is not None
        written = datetime.fromisoformat(modified[1].decode()).replace(tzinfo=timezone.utc)
        return b"" if time.time() - written.timestamp() < STALE else entry[0]

    return re.sub(rb"<Contents>.*?</Contents>", kept, content, flags=re.DOTALL)
