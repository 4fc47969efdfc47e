"""Does a merged model compute what base and adapter compute? Logits over real prompts, and what rounding explains."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit import resources
from peftkit.data import CompletionRow, read_rows

ARITHMETIC_LIMIT = 1e-4
"""Relative logit difference that two orders of the same float32 sums stay under, with a wide margin."""
_EXAMPLES = ("address", "sentiment")


@dataclass(frozen=True)
class Equivalence:
    """How far two models' logits are apart."""

    max_abs: float
    """Largest absolute difference of a logit."""
    mean_abs: float
    """Mean absolute difference."""
    relative: float
    """Norm of the difference over the norm of the reference's logits."""
    kl: float
    """Mean over the positions of the Kullback-Leibler divergence of the model's next token from the reference's, in
    nats."""
    greedy_agreement: float
    """Share of positions at which both models' most likely token is the same."""
    num_prompts: int
    num_tokens: int
    limit: float
    """What `relative` may be at most."""

    @property
    def holds(self) -> bool:
        """Whether the difference is within the limit; a logit that isn't a number is beyond any."""
        return self.relative <= self.limit


def probe_texts(num_texts: int = 8) -> list[str]:
    """Real prompts with their answers, from the example sets by turns."""
    per_set = -(-num_texts // len(_EXAMPLES))
    texts = []
    for name in _EXAMPLES:
        rows = read_rows(resources.find(f"example:{name}/test.jsonl"), "completion")
        texts += [row.prompt + row.completion for row in islice(rows, per_set) if isinstance(row, CompletionRow)]
    return texts[:num_texts]


@torch.inference_mode()
def logits_of(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[Tensor]:
    """The model's logits over each text, float32 (T, V) on the CPU; one text at a time, so that nothing is padded."""
    return [
        model(torch.tensor([tokenizer(text).input_ids], device=model.device)).logits[0].float().cpu() for text in texts
    ]


def compare(reference: Sequence[Tensor], logits: Sequence[Tensor], limit: float) -> Equivalence:
    """Compares two models' logits over the same texts, each float32 (T, V)."""
    wanted, found = torch.cat(list(reference)), torch.cat(list(logits))
    difference = (found - wanted).abs()
    log_p, log_q = wanted.log_softmax(-1), found.log_softmax(-1)
    return Equivalence(
        max_abs=difference.max().item(),
        mean_abs=difference.mean().item(),
        relative=(difference.norm() / wanted.norm()).item(),
        kl=(log_p.exp() * (log_p - log_q)).sum(-1).mean().item(),
        greedy_agreement=(found.argmax(-1) == wanted.argmax(-1)).float().mean().item(),
        num_prompts=len(reference),
        num_tokens=len(wanted),
        limit=limit,
    )


def relative_limit(eps: Sequence[torch.dtype | float], num_layers: int) -> float:
    """The largest relative logit difference that rounding explains.

    `eps` are the spacings, or the types, that weights were rounded to or arithmetic was done in. The layers' roundings
    are independent, so that they grow as √L. Random Llamas of 30 layers cast to bfloat16 come to 0.2 to 1 times
    eps · √L (and updates at half their scale to more than 2.4 times), so twice that is the limit.
    """
    coarsest = max(torch.finfo(one).eps if isinstance(one, torch.dtype) else one for one in eps)
    return ARITHMETIC_LIMIT + 2 * coarsest * math.sqrt(num_layers)
