"""The server's side of `process`: a child for each template in use, one conversation at a time in each.

A template that takes too long holds up nobody but those who ask with the same one.
"""

import asyncio
import json
import os
import socket
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from peftkit.errors import AdapterError, DataError, RunError
from peftkit_serve.templates import process

_MAX_CHILDREN = 16
"""Templates that are kept compiled; the least recently used makes room."""
_MAX_BUSY = 4
"""Conversations that are rendered at a time."""
_START_S = 120.0
"""Until the process has imported what it needs: about a second of work."""
_PATIENCE_S = 30.0
"""A child's processor time is bounded: this is for a machine that gives it none."""
_SAMPLE_CHARS = 2**20

_USER = {"role": "user", "content": "What is an adapter?"}
SAMPLES: tuple[list[dict[str, str]], ...] = (
    [_USER],
    [_USER, {"role": "assistant", "content": "A small change to a large model."}, _USER],
    [{"role": "system", "content": "Answer in one sentence."}, _USER],
)
"""Conversations of which an adapter's own template must render one."""


class TemplateError(Exception):
    """A template that can't word a conversation."""

    def __init__(self, kind: str, reason: str) -> None:
        """kind: which is for any log. reason: for who sent the template; it may quote the conversation."""
        super().__init__(kind)
        self.kind, self.reason = kind, reason


class TemplateOverran(TemplateError):
    """It takes more time or memory than it may."""


class TextTooLong(Exception):
    """The text of a conversation has more characters than it may have."""

    def __init__(self, num_chars: int) -> None:
        super().__init__(num_chars)
        self.num_chars = num_chars


@dataclass(slots=True, eq=False)
class _Child:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    connection: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def close(self) -> None:
        """Ends it, now or when its time is up."""
        if self.connection is not None:
            self.connection[1].close()
            self.connection = None


class Templates:
    """Renders conversations by templates that came with adapters. Used on one event loop."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """tokenizer: the base's, whose special tokens templates know, and whose own template is no adapter's."""
        self._base = tokenizer.chat_template
        self._special_tokens = dict(tokenizer.special_tokens_map)
        self._children: OrderedDict[str, _Child] = OrderedDict()
        self._places = asyncio.Semaphore(_MAX_BUSY)
        self._starting = asyncio.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def own(self, template: str | None) -> str | None:
        """An adapter's template; None where it has none, or the base's, which most bring along."""
        return None if not template or template == self._base else template

    async def check(self, template: str) -> None:
        """Raises AdapterError (field "chat_template") for a template that can't be used, with the reason."""
        reasons: list[str] = []
        for sample in SAMPLES:
            try:
                await self.render(template, sample, (), max_chars=_SAMPLE_CHARS)
                return
            except DataError as error:
                reasons.append(str(error).removeprefix("messages: "))
            except TextTooLong as error:
                raise _unusable(f"its text has {error.num_chars} characters") from None
            except TemplateOverran as error:
                raise _unusable(error.reason) from None
            except TemplateError as error:
                reasons.append(error.reason)
        raise _unusable(reasons[0])

    async def render(
        self,
        template: str,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        *,
        max_chars: int,
    ) -> str:
        """The text of a conversation, as `peftkit.chat.render_text` makes it.

        Raises DataError as that does, TemplateError for a template that fails, TemplateOverran for one that takes too
        much, TextTooLong, and RunError when nothing can be rendered at the moment.
        """
        asked = {"messages": messages, "tools": list(tools) or None, "max_chars": max_chars}
        child = self._children.setdefault(template, _Child())
        self._children.move_to_end(template)
        async with child.lock, self._places:
            try:
                answer = await self._ask(child, template, asked)
            except BaseException:  # it may still answer what nobody waits for
                child.close()
                raise
        self._make_room()
        if "text" in answer:
            return str(answer["text"])
        if "num_chars" in answer:
            raise TextTooLong(int(answer["num_chars"]))
        if "refused" in answer:
            raise DataError(str(answer["refused"]), field=answer["field"])
        raise TemplateError(str(answer["failed"]), str(answer["reason"]))

    def close(self) -> None:
        """Ends the process and its children."""
        for child in self._children.values():
            child.close()
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    async def start(self) -> None:
        """Starts the process, which takes a second, unless it runs."""
        async with self._starting:
            if self._process is None or self._process.poll() is not None:
                self._process, self._control = await asyncio.to_thread(_start)

    async def _ask(self, child: _Child, template: str, asked: dict[str, Any]) -> dict[str, Any]:
        if child.connection is None:
            child.connection = await self._fork()
            child.connection[1].write(process.packed({"template": template, "special_tokens": self._special_tokens}))
        reader, writer = child.connection
        try:
            async with asyncio.timeout(_PATIENCE_S):
                writer.write(process.packed(asked))
                await writer.drain()
                size = int.from_bytes(await reader.readexactly(8), "little")
                return json.loads(await reader.readexactly(size))
        except (asyncio.IncompleteReadError, ConnectionError, TimeoutError):  # the kernel has ended it
            child.close()
            reason = f"it takes more than {process.SECONDS:g} s of processor time, or too much memory"
            raise TemplateOverran("too much time or memory", reason) from None

    async def _fork(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        await self.start()
        assert self._control is not None
        ours, theirs = socket.socketpair()
        with theirs:
            try:
                socket.send_fds(self._control, [b"."], [theirs.fileno()])
            except OSError as error:
                ours.close()
                raise RunError(f"chat templates can't be rendered now ({type(error).__name__})") from None
        ours.setblocking(False)
        return await asyncio.open_unix_connection(sock=ours)

    def _make_room(self) -> None:
        for template, child in list(self._children.items()):
            if len(self._children) <= _MAX_CHILDREN:
                return
            if not child.lock.locked():
                child.close()
                del self._children[template]


def _unusable(reason: str) -> AdapterError:
    message = f"peftkit.json: the chat template can't word a conversation of one message: {reason[:300]}"
    return AdapterError(message, field="chat_template")


def _start() -> tuple[subprocess.Popen[bytes], socket.socket]:
    ours, theirs = socket.socketpair()
    with theirs:
        started = subprocess.Popen(
            [sys.executable, "-P", "-m", "peftkit_serve.templates.process", str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            # libraries' threads don't live through a fork
            env={**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        )
    ours.settimeout(_START_S)
    try:
        ready = ours.recv(1)
    except TimeoutError:
        ready = b""
    if not ready:
        ours.close()
        started.kill()
        started.wait()
        raise RunError("the process that renders chat templates didn't start")
    ours.settimeout(None)
    return started, ours
