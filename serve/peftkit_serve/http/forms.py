"""How the two completion routes word what the engine says: whole answers, chunks, log-probabilities."""

from collections.abc import Sequence
from typing import Any, Protocol

from pydantic import BaseModel

from peftkit_serve.http.answers import (
    ChatAnswer,
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    Completion,
    CompletionChoice,
    TextLogprobs,
    TokenLogprob,
    TopLogprob,
    Usage,
)
from peftkit_serve.http.schemas import ChatRequest, CompletionRequest
from peftkit_serve.request import RequestOutput, TokenLogprobs
from peftkit_serve.vocabulary import Places, Vocabulary


class Form(Protocol):
    """How one of the two routes words an answer. `head` is what its bodies begin with: id, created, model."""

    @property
    def only_text(self) -> bool:
        """Whether a chunk between the first and the last of a choice differs from others by its new text alone."""
        ...

    def whole(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> BaseModel:
        """The body of an answer that isn't streamed, from each choice's last output."""
        ...

    def chunk(self, head: dict[str, Any], index: int, output: RequestOutput, before: RequestOutput | None) -> BaseModel:
        """The next piece of a choice; `before` is its output before, None at its beginning."""
        ...

    def usage(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> BaseModel:
        """The chunk that ends a stream when the client asked for token counts."""
        ...


class TextForm:
    """`/v1/completions`."""

    def __init__(self, body: CompletionRequest, prompts: Sequence[tuple[str, Sequence[int]]], vocabulary: Vocabulary):
        """prompts: text and token ids of each."""
        self._body, self._prompts, self._vocabulary = body, prompts, vocabulary
        self._num_choices = body.num_choices
        self._places: dict[int, Places] = {}
        """Of each choice, where its answer's tokens begin."""
        self.only_text = body.logprobs is None and body.max_tokens != 0

    def whole(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> Completion:
        shown = [self._shown(output) for output in outputs]
        choices = [self._choice(i, output, None) for i, output in enumerate(shown)]
        return Completion(**head, choices=choices, usage=count_tokens(shown, self._num_choices))

    def chunk(
        self, head: dict[str, Any], index: int, output: RequestOutput, before: RequestOutput | None
    ) -> Completion:
        return Completion(**head, choices=[self._choice(index, self._shown(output), before)])

    def usage(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> Completion:
        shown = [self._shown(output) for output in outputs]
        return Completion(**head, choices=[], usage=count_tokens(shown, self._num_choices))

    def _shown(self, output: RequestOutput) -> RequestOutput:
        """The output without its one token where the client asked for none."""
        if self._body.max_tokens != 0:
            return output
        return RequestOutput(
            output.request_id, "", "", (), output.num_prompt_tokens, output.finish_reason and "length",
            prompt_logprobs=output.prompt_logprobs,
        )  # fmt: skip

    def _choice(self, index: int, output: RequestOutput, before: RequestOutput | None) -> CompletionChoice:
        """The whole choice, or what is new since `before`."""
        echoed = self._prompts[index // self._num_choices] if self._body.echo else ("", ())
        return CompletionChoice(
            index=index,
            text=echoed[0] + output.text if before is None else output.delta,
            logprobs=None if self._body.logprobs is None else self._logprobs(index, output, before, echoed),
            finish_reason=output.finish_reason,
        )

    def _logprobs(
        self, index: int, output: RequestOutput, before: RequestOutput | None, echoed: tuple[str, Sequence[int]]
    ) -> TextLogprobs:
        """Of all tokens, or of those that are new since `before`."""
        text, prompt = echoed
        offsets: list[int] = []
        scored = output.logprobs[0 if before is None else len(before.logprobs) :]
        answer = [one.token_id for one in scored]
        if before is None:
            self._places[index] = Places(self._vocabulary, len(text))
            offsets = self._prompt_offsets(text, prompt)
            scored = (*(output.prompt_logprobs if prompt else ()), *scored)
        else:
            prompt = ()
        offsets += [self._places[index].next(token) for token in answer]
        unknown = [None] * len(prompt[:1])
        return TextLogprobs(
            tokens=[self._vocabulary.word(token) for token in (*prompt, *answer)],
            token_logprobs=[*unknown, *(one.logprob for one in scored)],
            top_logprobs=[*unknown, *map(self._top, scored)],
            text_offset=offsets,
        )

    def _prompt_offsets(self, text: str, prompt: Sequence[int]) -> list[int]:
        """Where the prompt's tokens begin in its text, which may lack what a tokenizer puts before it."""
        places = Places(self._vocabulary, special=True)
        offsets = [places.next(token) for token in prompt]
        return [max(0, offset + len(text) - places.end) for offset in offsets]

    def _top(self, one: TokenLogprobs) -> dict[str, float]:
        # of parts of characters, which look alike, the likeliest stays
        return {self._vocabulary.word(token): value for token, value in reversed(one.top)}


class ChatForm:
    """`/v1/chat/completions`."""

    def __init__(self, body: ChatRequest, vocabulary: Vocabulary):
        self._body, self._vocabulary = body, vocabulary
        self._num_choices = body.num_choices
        self.only_text = not body.logprobs

    def whole(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> ChatCompletion:
        choices = [
            ChatChoice(
                index=i,
                message=ChatAnswer(content=output.text),
                logprobs=self._logprobs(output, None),
                finish_reason=output.finish_reason,
            )
            for i, output in enumerate(outputs)
        ]
        return ChatCompletion(**head, choices=choices, usage=count_tokens(outputs, self._num_choices))

    def chunk(self, head: dict[str, Any], index: int, output: RequestOutput, before: RequestOutput | None) -> ChatChunk:
        first = before is None
        delta = ChatDelta(role="assistant" if first else None, content=output.delta if first or output.delta else None)
        choice = ChatChunkChoice(
            index=index,
            delta=delta,
            logprobs=self._logprobs(output, before),
            finish_reason=output.finish_reason,
        )
        return ChatChunk(**head, choices=[choice])

    def usage(self, head: dict[str, Any], outputs: Sequence[RequestOutput]) -> ChatChunk:
        return ChatChunk(**head, choices=[], usage=count_tokens(outputs, self._num_choices))

    def _logprobs(self, output: RequestOutput, before: RequestOutput | None) -> ChatLogprobs | None:
        if not self._body.logprobs:
            return None
        new = output.logprobs[0 if before is None else len(before.logprobs) :]
        return ChatLogprobs(content=[self._token(one) for one in new])

    def _token(self, one: TokenLogprobs) -> TokenLogprob:
        tops = [self._top(token, value) for token, value in one.top]
        return TokenLogprob(**self._top(one.token_id, one.logprob).model_dump(), top_logprobs=tops)

    def _top(self, token_id: int, logprob: float) -> TopLogprob:
        words = self._vocabulary
        return TopLogprob(token=words.word(token_id), logprob=logprob, bytes=words.bytes(token_id))


def count_tokens(outputs: Sequence[RequestOutput], num_choices: int) -> Usage:
    """Token counts of a request, from each choice's last output; `num_choices` of them share a prompt."""
    prompt = sum(output.num_prompt_tokens for output in outputs[::num_choices])
    generated = sum(len(output.token_ids) for output in outputs)
    return Usage(prompt_tokens=prompt, completion_tokens=generated, total_tokens=prompt + generated)
