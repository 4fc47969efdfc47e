"""llama.cpp reads our GGUF files of the real base and generates our greedy tokens."""

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

import peftkit
from peftkit import resources
from peftkit.base import EMBEDDED, load_base
from peftkit.data import CompletionRow, read_rows
from peftkit.merge import export_gguf, merge_to_folder

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("embedded_cache")]


def assert_greedy(model: Any, answers: list[tuple[list[int], list[int]]]) -> None:
    """Each token of an answer is the one that our model finds most likely after what stands before it."""
    for prompt, answer in answers:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + answer])).logits[0]
        assert logits[len(prompt) - 1 : -1].argmax(-1).tolist() == answer


def llama_cpp_greedy(
    prompts: list[str], count: int, model: Path, lora: Path | None = None
) -> list[tuple[list[int], list[int]]]:
    llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python isn't installed")
    llama = llama_cpp.Llama(str(model), lora_path=lora and str(lora), n_ctx=256, verbose=False, n_threads=2)
    answers = []
    for prompt in prompts:
        ids = llama.tokenize(prompt.encode(), add_bos=False, special=True)
        llama.reset()
        answers.append((ids, list(islice(llama.generate(ids, temp=0.0, top_k=1, repeat_penalty=1.0), count))))
    return answers


def real_prompts(count: int) -> list[str]:
    rows = read_rows(resources.find("example:address/test.jsonl"), "completion")
    return [row.prompt for row in islice(rows, count) if isinstance(row, CompletionRow)]


@pytest.mark.parametrize("dtype", ["float16", "q8_0"])
def test_llama_cpp_generates_our_greedy_tokens_with_a_merged_model(dtype: str, tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python isn't installed")
    adapter, prompts = resources.find("adapters/address-lora"), real_prompts(3)
    merge_to_folder(adapter, tmp_path / "out", "smollm2-135m", format="gguf", dtype=dtype, verify=False)
    (file,) = (tmp_path / "out").glob("*.gguf")
    model, tokenizer = load_base("smollm2-135m", quant="nf4")
    peftkit.load_adapter(model, adapter)
    answers = llama_cpp_greedy(prompts, 16, file)
    assert [ids for ids, _ in answers] == [tokenizer(prompt).input_ids for prompt in prompts]
    assert_greedy(model, answers)


def test_llama_cpp_generates_our_greedy_tokens_with_a_lora_over_its_base(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp", reason="llama-cpp-python isn't installed")
    adapter, prompts = resources.find("adapters/address-lora"), real_prompts(3)
    export_gguf(adapter, tmp_path / "out", "smollm2-135m")
    gguf_base = EMBEDDED["smollm2-135m"].gguf()
    assert gguf_base is not None
    model, tokenizer = load_base("smollm2-135m")
    peftkit.load_adapter(model, adapter)
    answers = llama_cpp_greedy(prompts, 16, gguf_base, tmp_path / "out" / "adapter-f32.gguf")
    assert [ids for ids, _ in answers] == [tokenizer(prompt).input_ids for prompt in prompts]
    assert_greedy(model, answers)
