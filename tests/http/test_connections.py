"""Connections that never come to a request: headers without end, and heads that never come."""

import json
import socket
import time
from typing import Any

import pytest

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


def connect(url: str) -> socket.socket:
    host, port = url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def everything(connection: socket.socket) -> bytes:
    """What comes until the server closes the connection."""
    answer = b""
    while block := connection.recv(65536):
        answer += block
    return answer


@pytest.mark.parametrize("piece", [b"x" * 2**14, b"X-Header: x\r\n" * 2**10])
def test_headers_without_end_are_400_and_not_kept(server: Any, piece: bytes) -> None:
    with connect(server.url) as connection:
        connection.sendall(HEAD + b"X: ")
        num_bytes = 0
        try:
            while num_bytes < 2**23:
                connection.sendall(piece)
                num_bytes += len(piece)
                time.sleep(0.002)
            raise AssertionError("they were all taken")
        except (ConnectionResetError, BrokenPipeError):
            pass
    assert num_bytes < 2**21
    with connect(server.url) as connection:  # whoever stops in time reads why
        connection.sendall(HEAD + b"X: ")
        for _ in range(5):
            time.sleep(0.02)
            connection.sendall(b"x" * 2**14)
        assert everything(connection).startswith(b"HTTP/1.1 400 ")


def test_a_head_that_never_comes_is_closed_and_one_that_came_is_not(
    server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peftkit_serve.http.protocol.HEAD_TIMEOUT_S", 0.3)
    content = json.dumps({"model": "tiny", "prompt": "a", "max_tokens": 1500, "ignore_eos": True}).encode()
    length = b"Content-Length: " + str(len(content)).encode() + b"\r\n\r\n"
    with connect(server.url) as silent, connect(server.url) as half, connect(server.url) as whole:
        half.sendall(HEAD)
        whole.sendall(HEAD + length + content)
        begin = time.monotonic()
        assert everything(silent) == everything(half) == b"" and time.monotonic() - begin < 5
        answer = whole.recv(65536)
        assert answer.startswith(b"HTTP/1.1 200 ") and time.monotonic() - begin > 0.3
        whole.sendall(HEAD)  # a second request's head
        while block := whole.recv(65536):
            answer += block
        assert answer.count(b"HTTP/1.1 ") == 1
