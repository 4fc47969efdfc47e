"""Where adapters' own chat templates are rendered: `python -m peftkit_serve.templates.process DESCRIPTOR`.

    server ──a connection for each template──▶ this process ──fork──▶ a child that answers it, and ends with it

A template is a program by whoever made the adapter. Jinja's sandbox keeps it from everything outside of it, but not
from computing for ever or filling memory, and a thread that multiplies two numbers can't be stopped; so it runs in a
child, and the kernel ends one that takes more processor time or memory than a conversation may.

On a connection each message is its length in 8 bytes and that much JSON: first the template and the special tokens,
then conversations, each answered by a text or by why there is none.
"""

import gc
import json
import os
import signal
import socket
import sys
from pathlib import Path
from typing import IO, Any

from jinja2 import TemplateSyntaxError
from transformers import PreTrainedTokenizerBase

from peftkit.chat import render_text
from peftkit.errors import DataError

SECONDS = 0.8
"""Processor time for one conversation; ordinary ones take a thousandth."""
MEMORY_BYTES = 512 * 2**20
"""What a child may take beside what it shares with this process."""


class _Template(PreTrainedTokenizerBase):
    """A tokenizer that can do nothing but render conversations."""

    def __init__(self, template: str, special_tokens: dict[str, Any]) -> None:
        super().__init__(chat_template=template)
        self._given = special_tokens

    @property
    def special_tokens_map(self) -> dict[str, Any]:  # type: ignore[override] # of the tokenizer that it stands for
        return self._given


def read(stream: IO[bytes]) -> Any:
    """The next message; None at the end."""
    head = stream.read(8)
    return json.loads(stream.read(int.from_bytes(head, "little"))) if len(head) == 8 else None


def packed(message: Any) -> bytes:
    """A message as it goes over a connection."""
    body = json.dumps(message).encode()
    return len(body).to_bytes(8, "little") + body


def main(descriptor: int) -> None:
    """Forks a child for each connection that comes over the socket, until the server is gone."""
    for ending in (signal.SIGINT, signal.SIGTERM):  # for the server, which drains first, and then closes the socket
        signal.signal(ending, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # children leave no trace
    _answer(_Template("{{ messages[0].content | tojson }}", {}), {"messages": [{"role": "user", "content": ""}]})
    gc.freeze()  # what is loaded stays shared
    with socket.socket(fileno=descriptor) as control:
        control.sendall(b"r")
        while True:
            mark, connections, _, _ = socket.recv_fds(control, 1, 1)
            if not mark:
                return
            with socket.socket(fileno=connections[0]) as connection:
                if os.fork() == 0:
                    try:
                        control.close()
                        _bound_memory()
                        _serve(connection.makefile("rwb"))
                    finally:  # whatever it was, the server sees that the connection has ended
                        os._exit(0)


def _bound_memory() -> None:
    import resource  # not on Windows, where nothing of this runs

    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.exists():  # elsewhere the kernel doesn't keep this limit anyhow
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


def _serve(stream: Any) -> None:
    first = read(stream)
    template = _Template(first["template"], first["special_tokens"])
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    while (asked := read(stream)) is not None:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        answer = packed(_answer(template, asked))
        signal.setitimer(signal.ITIMER_PROF, 0)
        stream.write(answer)
        stream.flush()


def _answer(template: PreTrainedTokenizerBase, asked: dict[str, Any]) -> dict[str, Any]:
    """{"text"}, {"num_chars"} of one that is too long, {"refused", "field"} or {"failed", "reason"}."""
    try:
        text = render_text(template, asked["messages"], tools=asked.get("tools"))
    except DataError as error:
        if isinstance(error.__context__, TemplateSyntaxError):
            return {"failed": "TemplateSyntaxError", "reason": f"line {error.__context__.lineno}: {error.__context__}"}
        return {"refused": str(error), "field": error.field}
    except MemoryError:
        raise
    except Exception as error:  # it is a program: it may raise anything
        return {"failed": type(error).__name__, "reason": f"{type(error).__name__}: {error}"}
    return {"text": text} if len(text) <= asked.get("max_chars", len(text)) else {"num_chars": len(text)}


if __name__ == "__main__":
    main(int(sys.argv[1]))
