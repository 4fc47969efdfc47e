"""Answers held to a JSON schema: which tokens may come next, by llguidance.

A schema's keyword that can't be kept is refused by name, never ignored. Between a document's parts stands no more white
space than JSON's usual ", " and ": ", so that a model can't go on for ever inside an open one.
"""

import json
import threading
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerFast

from peftkit.errors import InputError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from llguidance._lib import JsonCompileOptions

MAX_SCHEMA_BYTES = 2**18
_SPACING: "JsonCompileOptions" = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class JsonConstraint:
    """Where one answer stands in its schema; a `plan.Constraint`."""

    def __init__(self, matcher: "LLMatcher") -> None:
        self._matcher = matcher

    def allowed(self) -> bytes:
        return self._matcher.compute_bitmask()

    def accept(self, token_id: int) -> None:
        accepted = self._matcher.consume_token(token_id)
        assert accepted, f"token {token_id} was drawn against the grammar: {self._matcher.get_error()}"

    @property
    def complete(self) -> bool:
        return self._matcher.is_stopped()


class Grammars:
    """Makes constraints for one tokenizer. May be used from any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, vocab_size: int, eos_token_id: int | None) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos = eos_token_id
        self._lock = threading.Lock()
        self._table: LLTokenizer | None = None

    def json(self, schema: str) -> JsonConstraint:
        """A constraint at the beginning of an answer. Raises InputError (field "json_schema")."""
        from llguidance import LLMatcher

        if len(schema) > MAX_SCHEMA_BYTES:
            raise _refused(f"it has {len(schema)} characters, {MAX_SCHEMA_BYTES} are allowed")
        try:
            grammar = LLMatcher.grammar_from_json_schema(schema, defaults=_SPACING)
        except (ValueError, RecursionError) as error:
            raise _refused(str(error)) from None
        matcher = LLMatcher(self._tokens(), grammar, log_level=0)
        if error := matcher.get_error():
            raise _refused(error)
        matcher.compute_bitmask()
        if matcher.is_stopped():  # no document is empty
            raise _refused("no document is valid by it")
        return JsonConstraint(matcher)

    def _tokens(self) -> "LLTokenizer":
        """The vocabulary as llguidance reads it: made once, it takes seconds for a large one."""
        with self._lock:
            if self._table is None:
                from llguidance.hf import from_tokenizer

                self._table = from_tokenizer(self._tokenizer, n_vocab=self._vocab_size, eos_token=self._eos)
            return self._table


def any_object() -> str:
    """The schema of `{"type": "json_object"}`: any JSON object."""
    return json.dumps({"type": "object"})


def _refused(reason: str) -> InputError:
    first = next(iter(reason.strip().splitlines()), "unknown fault")[:300]
    return InputError(f"the schema can't be kept: {first}", field="json_schema")
