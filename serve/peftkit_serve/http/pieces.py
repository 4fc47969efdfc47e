"""A streamed answer's chunks as JSON. In most of them nothing but the text is new: the rest is written once."""

import json
import uuid
from dataclasses import replace
from typing import Any

from peftkit_serve.http.forms import Form
from peftkit_serve.request import RequestOutput

_encode = json.JSONEncoder(ensure_ascii=False).encode


class Pieces:
    """The chunks of one stream."""

    def __init__(self, form: Form, head: dict[str, Any], unused: set[str] | None) -> None:
        """
        head: what each chunk begins with: id, created, model.
        unused: fields that no chunk has.
        """
        self._form, self._head, self._unused = form, head, unused
        self._sent: dict[int, RequestOutput] = {}
        self._frames: dict[int, tuple[str, str]] = {}
        """Of each choice, what stands before the text and what behind it."""

    def next(self, index: int, output: RequestOutput) -> str | None:
        """The chunk of a choice's next output; None where it would have nothing new."""
        before = self._sent.get(index)
        if before is not None and not output.delta and not output.finish_reason:
            return None
        self._sent[index] = output
        if before is None or output.finish_reason or not self._form.only_text:
            return self._whole(index, output, before)
        frame = self._frames.get(index)
        if frame is None:
            mark = uuid.uuid4().hex  # in no name that a client gave
            start, _, end = self._whole(index, replace(output, delta=mark), before).partition(f'"{mark}"')
            frame = self._frames[index] = start, end
        return f"{frame[0]}{_encode(output.delta)}{frame[1]}"

    def _whole(self, index: int, output: RequestOutput, before: RequestOutput | None) -> str:
        return self._form.chunk(self._head, index, output, before).model_dump_json(exclude=self._unused)
