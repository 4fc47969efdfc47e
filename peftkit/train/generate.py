"""Greedy answers of the model that is being trained."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from peftkit.chat import end_of_turn
from peftkit.evaluate import Answer, Example
from peftkit.methods import attached

BATCH_ROWS = 16
"""Most rows that are answered together."""


@torch.no_grad()
def generate_answers(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    examples: Sequence[Example],
    limits: Sequence[int],
    *,
    batch_positions: int,
) -> list[Answer]:
    """An answer to each example, up to the end of its turn or its limit, or the end of the base's context.

    Prompts of like length go together, padded on the left: at most `batch_positions` tokens with their answers, or a
    single row. The model's mode stays as it was.
    """
    answers: dict[int, Answer] = {}
    training = model.training
    model.eval()
    for places in _batches(examples, limits, batch_positions):
        prompts = [examples[place].prompt_ids for place in places]
        generated = _generate(model, prompts, max(limits[place] for place in places), end_of_turn(tokenizer))
        for place, ids in zip(places, generated, strict=True):
            ids = ids[: limits[place]]
            answers[place] = Answer(str(tokenizer.decode(ids, skip_special_tokens=True)), tuple(ids))
    model.train(training)
    return [answers[place] for place in range(len(examples))]


def _batches(examples: Sequence[Example], limits: Sequence[int], batch_positions: int) -> list[list[int]]:
    """Places of the examples that are answered together."""
    batches: list[list[int]] = []
    longest = max(limits, default=0)
    for place in sorted(range(len(examples)), key=lambda place: len(examples[place].prompt_ids)):
        rows = min(batch_positions // (len(examples[place].prompt_ids) + longest), BATCH_ROWS)
        if not batches or len(batches[-1]) >= rows:
            batches.append([])
        batches[-1].append(place)
    return batches


def _generate(model: PreTrainedModel, prompts: Sequence[Sequence[int]], limit: int, end: int) -> list[list[int]]:
    width = max(len(prompt) for prompt in prompts)
    virtual = sum(getattr(method.config, "num_virtual_tokens", 0) for method in attached(model))
    limit = min(limit, int(model.config.max_position_embeddings) - virtual - width)
    if limit < 1:
        return [[] for _ in prompts]
    ids = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, width - len(prompt) :] = torch.tensor(prompt)
        mask[row, width - len(prompt) :] = 1
    settings = GenerationConfig(max_new_tokens=limit, do_sample=False, eos_token_id=end, pad_token_id=end)
    generate: Any = model.generate
    found: Tensor = generate(ids.to(model.device), attention_mask=mask.to(model.device), generation_config=settings)
    rows = found[:, width:].tolist()
    return [row[: row.index(end)] if end in row else row for row in rows]
