"""A divided base on a GPU, where gathering runs on a stream of its own beside the layers' work."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from peftkit.base.divided import divide
from peftkit.data import Sample, collate
from peftkit.methods import BottleneckConfig, attach, fuse
from peftkit.train.loop import accumulate_gradients
from peftkit.train.recompute import Recompute, set_recompute

pytestmark = pytest.mark.gpu

SIZES: dict[str, Any] = {
    "vocab_size": 512, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 6,
    "num_attention_heads": 16, "num_key_value_heads": 4, "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture
def alone() -> Iterator[None]:
    """A group of this process alone."""
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("level", [Recompute(), Recompute("full"), Recompute("offload")], ids=str)
def test_layers_are_there_when_the_queue_comes_to_them(alone: None, level: Recompute, seed: int) -> None:
    ids = [torch.randint(512, (length,)).numpy().astype("int32") for length in (401, 311, 500)]
    batch = collate([Sample("", row, torch.arange(len(row)).numpy() > 0) for row in ids])
    found: list[list[Tensor]] = []
    for is_divided in (False, True):
        torch.manual_seed(seed)
        with torch.device("cuda"):
            model = LlamaForCausalLM(LlamaConfig(**SIZES)).requires_grad_(False)
        if is_divided:
            divide(model)
        attach(model, BottleneckConfig(bottleneck_size=16), seed=seed)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        for parameter in trained:
            torch.nn.init.normal_(parameter, std=0.02)
        fuse(model.train())
        set_recompute(model, level)
        own: list[Tensor] = []
        for _ in range(3):
            torch.cuda._sleep(200_000_000)  # about a tenth of a second, in which the host runs ahead
            own.append(torch.tensor(accumulate_gradients(model, [batch])))
            own += [parameter.grad.cpu() for parameter in trained if parameter.grad is not None]
            model.zero_grad()
        found.append(own)
    assert len(found[0]) == 3 * (1 + len(trained))
    for a, b in zip(*found, strict=True):
        assert (a - b).norm() <= 1e-4 * a.norm()
