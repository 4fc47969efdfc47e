"""Prompts, completions and conversations as ids: what is served is what was trained, and exactly the answers train."""

import hashlib
import json
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from peftkit.base import load_tokenizer, resolve_base
from peftkit.chat import (
    chat_template_of,
    check_messages,
    encode_chat,
    encode_completion,
    encode_prompt,
    render_chat,
)
from peftkit.errors import DataError

TEXT = [
    "the answer is yes and the question is no",
    "Review: the food was good.\nSentiment: positive",
    "user assistant system hello there\n\nhello again",
    "Answer: yes. Answer: no.\n\n\nthe the the",
]
SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "[INST]", "[/INST]", "<|header|>"]

CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\nBe kind<|im_end|>\n"
    "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CHATML_END_OUTSIDE = CHATML_MARKED.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
# trims contents; the header's two line ends are one token before nothing and two before a word
TRIMMED = (
    "<s>{% for m in messages %}<|header|>{{ m.role }}<|header|>\n\n{{ m.content | trim }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|header|>assistant<|header|>\n\n{% endif %}"
)
# the system message goes into the last user turn: what comes before a turn depends on what comes after it
FOLDED = (
    "<s>{% set ns = namespace(system='') %}"
    "{% if messages[0].role == 'system' %}{% set ns.system = messages[0].content %}"
    "{% set messages = messages[1:] %}{% endif %}{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% set last = messages | selectattr('role', 'eq', 'user') | list | last %}"
    "{% if m.role == 'user' %}[INST] {% if ns.system and m == last %}"
    "{{ ns.system }}\n\n{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
# thoughts of earlier turns are dropped, and the last turn gets an empty block if it has none
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% set c = m.content %}"
    "{% if '</think>' in c %}{% set thought = c.split('</think>')[0].replace('<think>', '').strip() %}"
    "{% set c = c.split('</think>')[1].lstrip() %}{% else %}{% set thought = '' %}{% endif %}"
    "{% if loop.last %}<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ c }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_END = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
END_AT_THE_CLOSE = NO_END + "<|im_end|>"

CONVERSATION = [
    {"role": "system", "content": "the system"},
    {"role": "user", "content": "hello there"},
    {"role": "assistant", "content": "the answer is yes"},
    {"role": "user", "content": "hello again"},
    {"role": "assistant", "content": "no and no"},
]


def byte_bpe(template: str | None = None, *, eos: str = "<|im_end|>", bos: str | None = None) -> Any:
    """Byte-level BPE with real merges; with `bos` its own rule adds it."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet)  # type: ignore[call-arg]
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
            single=f"{bos} $A {eos}", special_tokens=[(t, tokenizer.token_to_id(t)) for t in (bos, eos)]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=eos, bos_token=bos or "<s>", chat_template=template
    )


def sentencepiece_like(template: str | None = None) -> Any:
    """BPE over words that start with ▁, with a space put before the text and BOS, as in Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")  # type: ignore[assignment]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])  # type: ignore[assignment]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )  # type: ignore[assignment]
    bytes_ = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>", *SPECIAL, *bytes_])  # type: ignore[call-arg]
    tokenizer.train_from_iterator(TEXT * 4, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )


def trained_texts(tokenizer: Any, messages: list[dict[str, Any]]) -> list[str]:
    """The stretches of text that are trained on, decoded."""
    ids, trained = encode_chat(tokenizer, messages)
    assert len(ids) == len(trained)
    runs: list[list[int]] = []
    for i, (token, mark) in enumerate(zip(ids, trained, strict=True)):
        if mark:
            runs = [*runs[:-1], [*runs[-1], token]] if i and trained[i - 1] else [*runs, [token]]
    return [tokenizer.decode(run) for run in runs]


class TestPrompts:
    def test_a_tokenizer_that_adds_nothing_gives_the_plain_text(self):
        tokenizer = byte_bpe()
        assert tokenizer.decode(encode_prompt(tokenizer, "the answer")) == "the answer"

    def test_bos_stands_once_where_the_tokenizer_adds_it_and_eos_never(self):
        tokenizer = byte_bpe(bos="<s>")
        assert tokenizer.encode("the answer")[-1] == tokenizer.eos_token_id
        ids = encode_prompt(tokenizer, "the answer")
        assert ids[0] == tokenizer.bos_token_id and ids.count(tokenizer.bos_token_id) == 1
        assert tokenizer.eos_token_id not in ids

    def test_a_prompt_that_writes_bos_itself_gets_no_second_one(self):
        tokenizer = byte_bpe(bos="<s>")
        assert encode_prompt(tokenizer, "<s>the answer") == encode_prompt(tokenizer, "the answer")

    def test_an_empty_prompt_is_bos_alone_or_nothing(self):
        assert encode_prompt(byte_bpe(), "") == []
        tokenizer = byte_bpe(bos="<s>")
        assert encode_prompt(tokenizer, "") == [tokenizer.bos_token_id]


class TestCompletions:
    @pytest.mark.parametrize("make", [byte_bpe, lambda: byte_bpe(bos="<s>"), sentencepiece_like])
    @pytest.mark.parametrize(
        ("prompt", "completion"),
        [
            ("Review: the food was good.\nSentiment:", " positive"),
            ("the ans", "wer is yes"),
            ("Answer: ", "yes"),
            ("hello\n", "\nhello"),
            ("", "the answer"),
            ("the 😀", "😀 yes"),
        ],
    )
    def test_training_starts_from_the_ids_that_are_served(self, make, prompt, completion):
        tokenizer = make()
        ids, num_prompt = encode_completion(tokenizer, prompt, completion)
        assert ids[:num_prompt] == encode_prompt(tokenizer, prompt)
        assert ids[-1] == tokenizer.eos_token_id and ids.count(tokenizer.eos_token_id) == 1

    @pytest.mark.parametrize("make", [byte_bpe, sentencepiece_like])
    def test_the_completion_reads_as_written(self, make):
        tokenizer = make()
        ids, num_prompt = encode_completion(tokenizer, "Review: the food.\nSentiment:", " positive")
        assert tokenizer.decode(ids[:-1], skip_special_tokens=True) == "Review: the food.\nSentiment: positive"
        assert num_prompt < len(ids) - 1

    def test_words_that_would_merge_across_the_border_are_tokenised_apart(self):
        tokenizer = byte_bpe()
        ids, num_prompt = encode_completion(tokenizer, "the ans", "wer is yes")
        assert tokenizer.decode(ids[num_prompt:-1]) == "wer is yes"
        assert ids[:-1] != tokenizer.encode("the answer is yes", add_special_tokens=False)

    def test_a_completion_that_ends_its_turn_itself_gets_no_second_end(self):
        tokenizer = byte_bpe()
        assert encode_completion(tokenizer, "a", " b<|im_end|>") == encode_completion(tokenizer, "a", " b")

    def test_an_empty_completion_is_the_end_of_turn(self):
        tokenizer = byte_bpe()
        ids, num_prompt = encode_completion(tokenizer, "the answer", "")
        assert ids[num_prompt:] == [tokenizer.eos_token_id]

    def test_a_tokenizer_without_eos_is_refused(self):
        tokenizer = byte_bpe()
        tokenizer.eos_token = None
        with pytest.raises(DataError, match="no EOS"):
            encode_completion(tokenizer, "a", "b")


class TestRendering:
    @pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, TRIMMED, FOLDED, THINKING])
    @pytest.mark.parametrize("go_on", [True, False])
    def test_ids_equal_those_of_transformers(self, template, go_on):
        tokenizer = byte_bpe(template, bos="<s>", eos="</s>")
        expected = tokenizer.apply_chat_template(CONVERSATION[:4], add_generation_prompt=go_on, return_dict=False)
        assert render_chat(tokenizer, CONVERSATION[:4], go_on) == expected

    def test_a_template_that_writes_bos_leaves_exactly_one(self):
        tokenizer = byte_bpe(TRIMMED, bos="<s>")
        assert render_chat(tokenizer, CONVERSATION[:2]).count(tokenizer.bos_token_id) == 1

    def test_text_parts_are_joined(self):
        tokenizer = byte_bpe(CHATML)
        parts = [{"type": "text", "text": "hello "}, {"type": "text", "text": "there"}]
        assert render_chat(tokenizer, [{"role": "user", "content": parts}]) == render_chat(
            tokenizer, [{"role": "user", "content": "hello there"}]
        )

    def test_what_the_template_refuses_is_an_error_with_its_words(self):
        tokenizer = byte_bpe(FOLDED)
        with pytest.raises(DataError, match="roles must alternate") as refused:
            render_chat(tokenizer, [{"role": "user", "content": "a"}, {"role": "user", "content": "b"}])
        assert refused.value.field == "messages"

    def test_a_base_without_a_template_is_refused(self):
        with pytest.raises(DataError, match="no chat template"):
            render_chat(byte_bpe(), CONVERSATION[:2])

    def test_the_template_is_known_by_the_hash_of_its_text(self):
        template = chat_template_of(byte_bpe(CHATML))
        assert template is not None
        assert template.text == CHATML
        assert template.sha256 == hashlib.sha256(CHATML.encode()).hexdigest()
        assert chat_template_of(byte_bpe()) is None


class TestMessages:
    @pytest.mark.parametrize(
        ("messages", "field"),
        [
            ([], "messages"),
            ("hello", "messages"),
            ({"role": "user"}, "messages"),
            (["hello"], "messages[0]"),
            ([{"content": "a"}], "messages[0].role"),
            ([{"role": "usr", "content": "a"}], "messages[0].role"),
            ([{"role": "user"}], "messages[0].content"),
            ([{"role": "user", "content": 3}], "messages[0].content"),
            ([{"role": "user", "content": "a"}, {"role": "assistant", "content": None}], "messages[1].content"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "text", "text": 1}]}], "messages[0].content"),
            ([{"role": "assistant", "content": "", "tool_calls": [{}]}], "messages[0].tool_calls"),
        ],
    )
    def test_each_fault_names_its_field(self, messages, field):
        with pytest.raises(DataError) as refused:
            check_messages(messages)
        assert refused.value.field == field
        assert field in str(refused.value)

    def test_a_misspelt_role_gets_the_nearest_one(self):
        with pytest.raises(DataError, match="did you mean 'assistant'"):
            check_messages([{"role": "asistant", "content": "a"}])

    def test_a_name_and_fields_that_are_null_are_accepted(self):
        message = {"role": "user", "content": "a", "name": "ann", "tool_calls": None}
        assert check_messages([message]) == [{"role": "user", "content": "a", "name": "ann"}]


class TestTrainedSpans:
    @pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_END_OUTSIDE, TRIMMED])
    def test_exactly_the_answers_and_their_ends_are_trained(self, template):
        texts = trained_texts(byte_bpe(template), CONVERSATION)
        assert texts == ["the answer is yes<|im_end|>", "no and no<|im_end|>"]

    @pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_END_OUTSIDE, TRIMMED, FOLDED, THINKING])
    def test_training_starts_from_the_ids_that_are_served(self, template):
        tokenizer = byte_bpe(template, eos="</s>" if template == FOLDED else "<|im_end|>")
        ids, trained = encode_chat(tokenizer, CONVERSATION[:3])
        served = render_chat(tokenizer, CONVERSATION[:2])
        assert ids[: len(served)] == served
        assert trained.index(True) == len(served)

    @pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_END_OUTSIDE])
    def test_later_turns_start_from_the_ids_that_are_served(self, template):
        tokenizer = byte_bpe(template)
        ids, trained = encode_chat(tokenizer, CONVERSATION)
        served = render_chat(tokenizer, CONVERSATION[:4])
        assert ids[: len(served)] == served
        assert trained[len(served)] and not trained[len(served) - 1]

    def test_an_answer_that_would_merge_with_the_prompt_is_split_there(self):
        tokenizer = byte_bpe(CHATML)
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "\n\nhello there"}]
        served = render_chat(tokenizer, messages[:1])
        together = tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
        assert together[: len(served)] != served, "the case needs a merge across the border"
        ids, _ = encode_chat(tokenizer, messages)
        assert ids[: len(served)] == served
        assert trained_texts(tokenizer, messages) == ["\n\nhello there<|im_end|>"]

    def test_a_template_that_rewrites_earlier_turns_trains_the_answers(self):
        texts = trained_texts(byte_bpe(FOLDED, eos="</s>"), CONVERSATION)
        assert [text.strip() for text in texts] == ["the answer is yes</s>", "no and no</s>"]

    def test_thoughts_that_the_template_adds_after_the_prompt_are_trained(self):
        texts = trained_texts(byte_bpe(THINKING), CONVERSATION)
        assert texts == ["the answer is yes<|im_end|>", "<think>\n\n</think>\n\nno and no<|im_end|>"]

    def test_thoughts_that_the_answer_brings_are_trained(self):
        messages = [*CONVERSATION[:4], {"role": "assistant", "content": "<think>the food</think>no"}]
        assert trained_texts(byte_bpe(THINKING), messages)[-1] == "<think>\nthe food\n</think>\n\nno<|im_end|>"

    def test_a_sentencepiece_tokenizer_trains_the_same_answers(self):
        texts = trained_texts(sentencepiece_like(FOLDED), CONVERSATION)
        assert [text.strip() for text in texts] == ["the answer is yes</s>", "no and no</s>"]

    def test_equal_answers_are_told_apart_and_trained_each(self):
        messages = [{"role": "user", "content": "yes"}, {"role": "assistant", "content": "yes"}] * 2
        assert trained_texts(byte_bpe(CHATML), messages) == ["yes<|im_end|>", "yes<|im_end|>"]

    def test_an_answer_that_quotes_the_end_token_is_trained_to_its_real_end(self):
        for template in (CHATML, CHATML_MARKED, CHATML_END_OUTSIDE):
            messages = [
                {"role": "user", "content": "hello"},
                {"role": "assistant", "content": "a <|im_end|> b"},
                {"role": "user", "content": "hello"},
            ]
            assert trained_texts(byte_bpe(template), messages) == ["a <|im_end|> b<|im_end|>"]

    def test_an_empty_answer_trains_its_end(self):
        messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": ""}]
        assert trained_texts(byte_bpe(CHATML), messages) == ["<|im_end|>"]

    def test_characters_of_several_tokens_are_trained_whole(self):
        messages = [{"role": "user", "content": "😀"}, {"role": "assistant", "content": "😀 ß 😀"}]
        assert trained_texts(byte_bpe(CHATML), messages) == ["😀 ß 😀<|im_end|>"]

    def test_a_conversation_that_begins_with_the_assistant_is_trained(self):
        assert trained_texts(byte_bpe(CHATML), [{"role": "assistant", "content": "hello"}]) == ["hello<|im_end|>"]

    def test_a_conversation_without_an_answer_is_refused(self):
        with pytest.raises(DataError, match="no assistant message"):
            encode_chat(byte_bpe(CHATML), CONVERSATION[:2])

    @pytest.mark.parametrize("template", [NO_END, END_AT_THE_CLOSE])
    def test_a_template_that_does_not_end_turns_is_refused(self, template):
        with pytest.raises(DataError, match="never stop"):
            encode_chat(byte_bpe(template), CONVERSATION)

    @pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_END_OUTSIDE])
    def test_a_template_that_ends_turns_with_another_token_is_refused(self, template):
        with pytest.raises(DataError, match=r"'</s>'.*\"eos_token\": \"<\|im_end\|>\""):
            encode_chat(byte_bpe(template, eos="</s>"), CONVERSATION)

    def test_a_template_that_drops_an_answer_is_refused(self):
        dropped = "{% for m in messages %}{% if m.role == 'user' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        with pytest.raises(DataError, match=r"messages\[2\].*can't be found"):
            encode_chat(byte_bpe(dropped), CONVERSATION)

    def test_a_template_that_says_an_answer_twice_is_refused(self):
        twice = "{% for m in messages %}{{ m.content }} {{ m.content }}<|im_end|>{% endfor %}"
        with pytest.raises(DataError, match="can't be found"):
            encode_chat(byte_bpe(twice), CONVERSATION)

    def test_generation_blocks_that_mark_nothing_are_refused(self):
        nothing = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}{% generation %}{% endgeneration %}"
        with pytest.raises(DataError, match="marks no assistant token"):
            encode_chat(byte_bpe(nothing), CONVERSATION)


# as Qwen's and Hermes' templates print them
TOOLS = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.content %}\n{{ m.content }}{% endif %}"
    "{% for call in m.tool_calls or [] %}\n<call>{{ call.function.name }} {{ call.function.arguments | tojson }}</call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{% endif %}"
)
TOOLS_MARKED = TOOLS.replace(
    "{% if m.content %}\n{{ m.content }}{% endif %}",
    "{% if m.role == 'assistant' %}{% generation %}\n{{ m.content }}{% for call in m.tool_calls or [] %}<call>"
    "{{ call.function.name }} {{ call.function.arguments | tojson }}</call>{% endfor %}<|im_end|>{% endgeneration %}"
    "\n{% continue %}{% endif %}\n{{ m.content }}",
)
TOOL_LIST = [{"type": "function", "function": {"name": "answer", "description": "the answer"}}]
CALLING = [
    {"role": "user", "content": "the question"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": {"name": "answer", "arguments": '{"to": "all"}'}}],
    },
    {"role": "tool", "content": "yes", "tool_call_id": "a"},
    {"role": "assistant", "content": "the answer is yes"},
]


# as Qwen3's: the last turn alone has a block for thoughts, so a conversation up to a call isn't how the whole begins
TOOLS_THINKING = TOOLS.replace(
    "<|im_start|>{{ m.role }}{%",
    "<|im_start|>{{ m.role }}{% if loop.last and m.role == 'assistant' %}\n<think>\n\n</think>\n{% endif %}{%",
)
# as DeepSeek's: arguments are text
TOOLS_JOINED = TOOLS.replace(
    "{{ call.function.name }} {{ call.function.arguments | tojson }}",
    "{{ call.function.name + ' ' + call.function.arguments }}",
)
# as Llama 3's: what is said beside a call isn't printed
TOOLS_SILENT = TOOLS.replace("{% if m.content %}", "{% if m.content and not m.tool_calls %}")


class TestTools:
    @pytest.mark.parametrize("template", [TOOLS, TOOLS_THINKING, TOOLS_JOINED, TOOLS_SILENT])
    @pytest.mark.parametrize("arguments", [{"to": "all"}, {}, {"to": "<|im_end|>", "deep": {"a": [1, {"b": "}"}]}}])
    def test_a_call_is_trained_to_its_end_however_the_template_prints_it(self, template, arguments):
        calls = [{"function": {"name": name, "arguments": arguments}} for name in ("first", "second")]
        messages = [CALLING[0], {"role": "assistant", "content": None, "tool_calls": calls}, *CALLING[2:]]
        first, last = trained_texts(byte_bpe(template), messages)
        printed = json.dumps(arguments)
        assert first.strip() == f"<call>first {printed}</call><call>second {printed}</call><|im_end|>"
        assert last.endswith("the answer is yes<|im_end|>") and "tool" not in last

    def test_a_call_without_an_end_of_turn_is_refused(self):
        template = TOOLS.replace("{% endfor %}<|im_end|>", "{% endfor %}{% if not m.tool_calls %}<|im_end|>{% endif %}")
        with pytest.raises(DataError, match="never stop"):
            encode_chat(byte_bpe(template), CALLING)

    def test_words_beside_a_call_that_the_template_leaves_out_are_refused(self):
        messages = [CALLING[0], {**CALLING[1], "content": "let me see"}, *CALLING[2:]]
        with pytest.raises(DataError, match="leaves out what is said beside a call") as refused:
            encode_chat(byte_bpe(TOOLS_SILENT), messages)
        assert refused.value.field == "messages[1].content"

    def test_calls_and_answers_are_trained_and_tools_and_results_are_not(self):
        tokenizer = byte_bpe(TOOLS)
        ids, trained = encode_chat(tokenizer, CALLING, tools=TOOL_LIST)
        kept = [token for token, mark in zip(ids, trained, strict=True) if mark]
        assert tokenizer.decode(kept) == ('<call>answer {"to": "all"}</call><|im_end|>the answer is yes<|im_end|>')
        assert tokenizer.decode(ids).startswith("<|im_start|>system\n{")

    def test_generation_blocks_mark_calls_too(self):
        texts = trained_texts(byte_bpe(TOOLS_MARKED), CALLING)
        assert texts == ['<call>answer {"to": "all"}</call><|im_end|>', "the answer is yes<|im_end|>"]

    @pytest.mark.parametrize("template", [TOOLS, TOOLS_MARKED])
    def test_each_turn_starts_from_the_ids_that_are_served(self, template):
        tokenizer = byte_bpe(template)
        ids, trained = encode_chat(tokenizer, CALLING, tools=TOOL_LIST)
        for turn in (1, 3):
            served = render_chat(tokenizer, CALLING[:turn], tools=TOOL_LIST)
            assert ids[: len(served)] == served
            assert trained[len(served)] and not trained[len(served) - 1]

    def test_arguments_as_text_and_as_an_object_are_the_same(self):
        tokenizer = byte_bpe(TOOLS)
        function = {"name": "answer", "arguments": {"to": "all"}}
        other = [CALLING[0], {**CALLING[1], "tool_calls": [{"function": function}]}, *CALLING[2:]]
        assert render_chat(tokenizer, CALLING) == render_chat(tokenizer, other)

    @pytest.mark.parametrize(
        ("messages", "tools", "field"),
        [(CALLING[:2], None, "messages[1].tool_calls"), (CALLING[:1], TOOL_LIST, "tools")],
    )
    def test_a_template_that_leaves_out_tools_is_refused(self, messages, tools, field):
        with pytest.raises(DataError, match="leaves this out") as refused:
            render_chat(byte_bpe(CHATML), messages, tools=tools)
        assert refused.value.field == field

    def test_a_template_that_leaves_out_results_is_refused(self):
        template = CHATML.replace("{{ m.content }}", "{{ m.content if m.role != 'tool' }}")
        with pytest.raises(DataError, match="leaves this out") as refused:
            render_chat(byte_bpe(template), [CALLING[0], CALLING[2]])
        assert refused.value.field == "messages[1].content"


class TestTurns:
    @pytest.mark.parametrize("template", [CHATML, CHATML_MARKED, CHATML_END_OUTSIDE, TRIMMED])
    def test_chosen_turns_alone_are_trained(self, template):
        tokenizer = byte_bpe(template)
        for turn, text in ((2, "the answer is yes<|im_end|>"), (4, "no and no<|im_end|>")):
            ids, trained = encode_chat(tokenizer, CONVERSATION, turns=[turn])
            assert tokenizer.decode([t for t, mark in zip(ids, trained, strict=True) if mark]) == text
            served = render_chat(tokenizer, CONVERSATION[:turn])
            assert ids[: len(served)] == served
            assert trained.index(True) == len(served)

    def test_a_turn_that_is_not_the_assistants_is_never_trained(self):
        with pytest.raises(DataError, match="no assistant message"):
            encode_chat(byte_bpe(CHATML), CONVERSATION, turns=[1])

    def test_a_template_that_marks_fewer_answers_than_there_are_cannot_choose(self):
        template = CHATML_MARKED.replace("m.role == 'assistant' %}", "m.role == 'assistant' and loop.last %}")
        with pytest.raises(DataError, match="marks 1 answers of 2"):
            encode_chat(byte_bpe(template), CONVERSATION, turns=[4])


@pytest.mark.slow
def test_the_embedded_base_trains_answers_alone(embedded_cache):
    tokenizer = load_tokenizer(resolve_base("smollm2-135m"))
    assert trained_texts(tokenizer, CONVERSATION) == ["the answer is yes<|im_end|>", "no and no<|im_end|>"]
    ids, num_prompt = encode_completion(tokenizer, "Review: fine.\nSentiment:", " positive")
    assert tokenizer.convert_ids_to_tokens(ids[num_prompt:]) == ["Ġpositive", "<|im_end|>"]
