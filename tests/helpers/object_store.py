"""An S3 server on this machine, moto's, in a process of its own, which fails as it is told to.

    with serve_objects() as store:      # or the fixture `object_store`, with the environment set
        store.make_bucket("data")       # then s3://data through s3fs, boto3, Energon, msc://...
        store.fail(0.1)                 # a tenth of the requests from now on
        store.objects("s3://data/out")  # {"train-000000.tar": b"..."}

A part of a multipart upload may have `PART_BYTES`, so that small shards have several.
"""

import json
import os
import random
import subprocess
import sys
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

#: Least size of a part, but the last, and what s3fs makes parts of; an upload below twice this is
#: one request.
PART_BYTES: Final = 1 << 16
_CONTROL: Final = "/_faults"
_KEYS: Final = {"AWS_ACCESS_KEY_ID": "test-key", "AWS_SECRET_ACCESS_KEY": "test-secret"}
_ERROR: Final = "<?xml version='1.0'?><Error><Code>{}</Code><Message>told to</Message></Error>"
#: What S3 answers when it fails, and connections that end before and after the request is done.
_FAILURES: Final = ("500 InternalError", "503 SlowDown", "drop", "drop after")


@dataclass(frozen=True)
class Faults:
    """What the server does to requests."""

    #: of all requests
    failing_share: float = 0.0
    seed: int = 0
    #: writes that are allowed before all others are answered with 403; None: all are
    writes_allowed: int | None = None
    #: before each write is done
    write_seconds: float = 0.0


@dataclass(frozen=True)
class ObjectStore:
    """A running server. Its methods are never failed."""

    endpoint: str
    part_bytes: int = PART_BYTES

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which botocore and s3fs find the server, and upload in small parts."""
        return {
            **_KEYS,
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
            "FSSPEC_S3": json.dumps({"default_block_size": self.part_bytes}),
        }

    @cached_property
    def client(self) -> Any:
        """boto3's."""
        import boto3

        return boto3.client(
            "s3",
            endpoint_url=self.endpoint,
            region_name="us-east-1",
            aws_access_key_id=_KEYS["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=_KEYS["AWS_SECRET_ACCESS_KEY"],
        )

    def make_bucket(self, name: str) -> None:
        """An empty bucket of a new name."""
        self.client.create_bucket(Bucket=name)

    def keys(self, url: str) -> list[str]:
        """Names of the objects under s3://bucket/folder, relative to it, sorted."""
        bucket, _, folder = url.removeprefix("s3://").partition("/")
        prefix = f"{folder.rstrip('/')}/" if folder else ""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=prefix)
        found = (one["Key"] for page in pages for one in page.get("Contents", ()))
        return sorted(key.removeprefix(prefix) for key in found)

    def objects(self, url: str) -> dict[str, bytes]:
        """Content of all objects under s3://bucket/folder, by their names relative to it."""
        return {key: self.read(f"{url.rstrip('/')}/{key}") for key in self.keys(url)}

    def read(self, url: str) -> bytes:
        """Content of an object."""
        bucket, _, key = url.removeprefix("s3://").partition("/")
        data: bytes = self.client.get_object(Bucket=bucket, Key=key)["Body"].read()
        return data

    def put_folder(self, folder: Path, url: str) -> None:
        """Store all files of a folder under s3://bucket/folder."""
        bucket, _, prefix = url.removeprefix("s3://").partition("/")
        for path in sorted(one for one in folder.rglob("*") if one.is_file()):
            key = f"{prefix.rstrip('/')}/{path.relative_to(folder)}".lstrip("/")
            self.client.put_object(Bucket=bucket, Key=key, Body=path.read_bytes())

    def unfinished_uploads(self, bucket: str) -> list[str]:
        """Names of objects of which parts lie in a bucket."""
        found = self.client.list_multipart_uploads(Bucket=bucket)
        return [upload["Key"] for upload in found.get("Uploads", ())]

    def fail(self, share: float, seed: int = 0) -> None:
        """Fail a share of all requests: answers 500 and 503, and connections that end."""
        self.set_faults(Faults(failing_share=share, seed=seed))

    def set_faults(self, faults: Faults = Faults()) -> None:
        """From now on; without an argument, nothing fails. `counts` begins again."""
        self._control(json.dumps(asdict(faults)).encode())

    def counts(self) -> dict[str, int]:
        """Requests since faults were set last: 'PUT', 'GET', …, 'failed', 'denied'."""
        return dict(self._control(None))

    def _control(self, data: bytes | None) -> Any:
        with urllib.request.urlopen(self.endpoint + _CONTROL, data, timeout=60) as answer:
            return json.loads(answer.read())


@contextmanager
def serve_objects(part_bytes: int = PART_BYTES) -> Iterator[ObjectStore]:
    """A server on a free port, while the block runs; it ends with this process as well."""
    command = [sys.executable, "-m", "tests.helpers.object_store"]
    root = str(Path(__file__).parents[2])
    environment = {**os.environ, "PYTHONPATH": root, "S3_UPLOAD_PART_MIN_SIZE": str(part_bytes)}
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as process:
        assert process.stdout is not None
        port = process.stdout.readline().strip()
        assert port, "the server did not start"
        try:
            yield ObjectStore(f"http://127.0.0.1:{port}", part_bytes)
        finally:
            process.kill()


class _FailingServer:
    """A WSGI application that hands requests on to another, or fails them."""

    def __init__(self, application: Callable[..., Iterable[bytes]]) -> None:
        self._application = application
        self._lock = threading.Lock()
        self._set(Faults())

    def _set(self, faults: Faults) -> None:
        with self._lock:
            self._faults = faults
            self._dice = random.Random(faults.seed)
            self._counts: Counter[str] = Counter()

    def __call__(
        self, environment: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        if environment["PATH_INFO"] == _CONTROL:
            return self._be_told(environment, start_response)
        if environment.get("HTTP_USER_AGENT", "").startswith("Boto3"):  # ObjectStore's
            return self._application(environment, start_response)
        failure = self._choose(environment)
        if failure is None:
            return self._application(environment, start_response)
        if failure.startswith("drop"):
            if failure == "drop after":
                b"".join(self._application(environment, lambda *answer: None))
            environment["werkzeug.socket"].shutdown(2)
            start_response("500 Dropped", [])
            return [b"dropped"]
        code = failure.partition(" ")[2]
        start_response(failure, [("Content-Type", "application/xml")])
        return [] if environment["REQUEST_METHOD"] == "HEAD" else [_ERROR.format(code).encode()]

    def _choose(self, environment: Mapping[str, Any]) -> str | None:
        """How a request fails; None: it does not."""
        method, query = environment["REQUEST_METHOD"], environment.get("QUERY_STRING", "")
        writes = method == "PUT" or (method == "POST" and not query.startswith("delete"))
        with self._lock:
            self._counts[method] += 1
            self._counts["writes"] += writes
            faults = self._faults
            limit = faults.writes_allowed
            if writes and limit is not None and self._counts["writes"] > limit:
                self._counts["denied"] += 1
                return "403 AccessDenied"
            failure = None
            if self._dice.random() < faults.failing_share:
                self._counts["failed"] += 1
                failure = self._dice.choice(_FAILURES)
        time.sleep(writes * faults.write_seconds)
        return failure

    def _be_told(
        self, environment: Mapping[str, Any], start_response: Callable[..., Any]
    ) -> list[bytes]:
        if environment["REQUEST_METHOD"] == "POST":
            size = int(environment["CONTENT_LENGTH"])
            self._set(Faults(**json.loads(environment["wsgi.input"].read(size))))
        start_response("200 OK", [("Content-Type", "application/json")])
        return [json.dumps(self._counts).encode()]


def main() -> None:
    """Serve until stdin ends; the first line of stdout is the port."""
    import logging

    from moto.moto_server.werkzeug_app import (
        DomainDispatcherApplication,
        MotoRequestHandler,
        create_backend_app,
    )
    from werkzeug.serving import make_server

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    application = _FailingServer(DomainDispatcherApplication(create_backend_app))
    server = make_server(
        "127.0.0.1", 0, application, threaded=True, request_handler=MotoRequestHandler
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    os.write(1, f"{server.port}\n".encode())
    sys.stdin.read()
    os._exit(0)


if __name__ == "__main__":
    main()
