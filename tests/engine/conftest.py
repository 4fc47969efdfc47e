"""A tiny random base with a tokenizer, adapter folders for it, and engines over it."""

import copy
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from peftkit.artifact import load_adapter, write_adapter
from peftkit.base import parameter_shapes
from peftkit.errors import AdapterError
from peftkit.methods import (
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
)
from peftkit.methods.prefix import kv_width
from peftkit_serve import Engine, Request, RequestOutput, SamplingParams, runner
from peftkit_serve.graphs import Drawn
from peftkit_serve.pages import PAGE_TOKENS, PageAllocator, Prefix, pages_for
from peftkit_serve.plan import Chunk, StepPlan, StepResult
from peftkit_serve.runner import Launched
from peftkit_serve.scheduler import Residence, Scheduler, Sequence

CONTEXT = 160

Reference = Callable[[torch.dtype], Callable[..., Any]]
"""A model of transformers in a dtype."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--duration", type=float, default=3.0, help="seconds that each fuzz of the engine takes")


CONFIG = LlamaConfig(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    initializer_range=0.4,  # spread enough that an adapter, or one wrong key, changes the tokens
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=256,
    pad_token_id=None,
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """256 bytes and one special token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={symbol: index for index, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|end|>", model_max_length=CONTEXT)


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A two-layer Llama with fresh random weights."""
    weights_seed = random.SystemRandom().randrange(2**31)
    print(f"weights of the tiny base: torch.manual_seed({weights_seed})")
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(weights_seed)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def lora_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes a random LoRA with a large update and returns its folder."""

    def write(seed: int, r: int = 4, config: PretrainedConfig = CONFIG, **fields: Any) -> Path:
        method = LoraConfig.model_validate({"r": r, "alpha": 2.0 * r} | fields)
        generator = torch.Generator().manual_seed(seed)
        shapes = method.expected_tensors(parameter_shapes(config), tied=config.tie_word_embeddings)
        tensors = {name: torch.randn(shape, generator=generator) * 0.2 for name, shape in shapes.items()}
        for name in shapes:
            if name.endswith("lora_magnitude_vector"):
                tensors[name] = torch.rand(shapes[name], generator=generator) * 3.0 + 0.5
        return write_adapter(tmp_path / f"lora-{seed}-{r}", method, tensors, {}).path

    return write


@pytest.fixture
def prompt_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes random virtual tokens and returns their folder."""

    def write(seed: int, num_virtual: int = 20) -> Path:
        generator = torch.Generator().manual_seed(seed)
        embeddings = torch.randn(num_virtual, CONFIG.hidden_size, generator=generator)
        config = PromptTuningConfig(num_virtual_tokens=num_virtual, init="random")
        return write_adapter(tmp_path / f"prompt-{seed}", config, {"prompt_embeddings": embeddings}, {}).path

    return write


@pytest.fixture
def bottleneck_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes random bottleneck adapters with a large effect and returns their folder."""

    def write(seed: int, config: PretrainedConfig = CONFIG, **fields: Any) -> Path:
        method = BottleneckConfig.model_validate({"bottleneck_size": 5} | fields).resolved(config.hidden_size)
        generator = torch.Generator().manual_seed(seed)
        shapes = method.expected_tensors(config.num_hidden_layers, config.hidden_size)
        tensors = {name: torch.randn(shape, generator=generator) * 0.3 for name, shape in shapes.items()}
        return write_adapter(tmp_path / f"{method.variant}-{seed}", method, tensors, {}).path

    return write


VIRTUAL = {
    "prompt": PromptTuningConfig,
    "ptuning": PTuningConfig,
    "prefix": PrefixTuningConfig,
    "ptuning_v2": PTuningV2Config,
}


@pytest.fixture
def virtual_folder(tmp_path: Path) -> Callable[..., Path]:
    """Writes random virtual tokens of a kind of the prompt family and returns their folder."""

    def write(kind: str, seed: int, num_virtual: int = 20, config: PretrainedConfig = CONFIG) -> Path:
        width = config.hidden_size if kind in ("prompt", "ptuning") else config.num_hidden_layers * 2 * kv_width(config)
        table = torch.randn(num_virtual, width, generator=torch.Generator().manual_seed(seed))
        method = VIRTUAL[kind](num_virtual_tokens=num_virtual)
        record = {"base": {"layers": config.num_hidden_layers, "kv_heads": config.num_key_value_heads}}
        return write_adapter(tmp_path / f"{kind}-{seed}", method, {"prompt_embeddings": table}, record).path

    return write


ENDS: dict[str, dict[str, Any]] = {
    "head": {"targets": ["v_proj", "lm_head"]},
    "ends": {"targets": ["embed_tokens", "lm_head", "up_proj"]},
    "saved-head": {"targets": ["o_proj"], "modules_to_save": ["lm_head"]},
    "saved-embedding": {"targets": ["lm_head"], "modules_to_save": ["embed_tokens"]},
    "tokens": {"targets": ["k_proj"], "trainable_token_indices": [*range(200, 0, -3)]},
    "tokens-apart": {
        "targets": ["q_proj"],
        "trainable_token_indices": {"embed_tokens": [*range(0, 250, 2)], "lm_head": [7, 65]},
    },
}
"""Kinds of LoRA that change the embeddings, token rows for so many tokens that every prompt has some."""


@pytest.fixture
def every_kind(
    lora_folder: Callable[..., Path], bottleneck_folder: Callable[..., Path], virtual_folder: Callable[..., Path]
) -> Callable[..., dict[str, Path]]:
    """Writes an adapter of every kind that is served, named by its kind."""

    def write(seed: int, config: PretrainedConfig = CONFIG) -> dict[str, Path]:
        folders = {
            "lora": lora_folder(seed, config=config),
            "lora-some": lora_folder(seed + 1, 9, config=config, targets=["q_proj", "down_proj"], variant="rslora"),
            "lora-attention": lora_folder(seed + 3, 4, config=config, targets=["q_proj", "v_proj"]),
            "dora": lora_folder(seed + 2, 3, config=config, targets=["k_proj", "o_proj", "up_proj"], variant="dora"),
            "houlsby": bottleneck_folder(seed, config),
            "pfeiffer": bottleneck_folder(seed, config, variant="pfeiffer", ln_before=True, non_linearity="gelu"),
            "parallel": bottleneck_folder(seed, config, variant="parallel", layers_to_transform=[1], scaling=1.5),
        }
        for number, (kind, fields) in enumerate(ENDS.items()):
            folders[kind] = lora_folder(seed + 4 + number, config=config, **fields)
        for kind, num_virtual in (("prompt", 20), ("ptuning", 32), ("prefix", 7), ("ptuning_v2", 21)):
            folders[kind] = virtual_folder(kind, seed, num_virtual, config)
        return folders

    return write


@pytest.fixture
def make_engine(base_folder: Path) -> Iterator[Callable[..., Engine]]:
    """Makes a small deterministic engine on the CPU; at the end every one must be whole."""
    engines: list[Engine] = []

    def make(base: Path = base_folder, **settings: Any) -> Engine:
        defaults: dict[str, Any] = {
            "device": "cpu",
            "max_tokens_per_step": 32,
            "max_requests": 8,
            "max_adapters": 2,
            "num_pages": 64,
            "deterministic": True,
        }
        engines.append(Engine(base, **(defaults | settings)))
        return engines[-1]

    yield make
    for engine in engines:
        engine.check_integrity()


@pytest.fixture(
    params=[
        "cpu-float32",
        "cpu-bfloat16",
        pytest.param("cuda-float32", marks=pytest.mark.gpu),
        pytest.param("cuda-bfloat16", marks=pytest.mark.gpu),
    ]
)
def compute(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The device of engines, which compute in the dtype behind it."""
    device, dtype = request.param.split("-")
    monkeypatch.setattr(runner, "auto_dtype", lambda *_: getattr(torch, dtype))
    return device


@pytest.fixture
def record_logits(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], dict[tuple[str, int], Tensor]]:
    """Watches an engine: the logits that each (request, number of its token) is drawn from come into the dictionary."""

    def watch(engine: Engine) -> dict[tuple[str, int], Tensor]:
        seen: dict[tuple[str, int], Tensor] = {}
        launch, logits, graphs = engine._runner.launch, engine._runner._decoder.logits, engine._runner._graphs
        rows: list[Tensor] = []

        def keep(*args: Any) -> Tensor:
            rows[:] = [logits(*args)]
            return rows[0]

        def keep_graphs(run: Callable[..., Drawn], chunks: tuple[Chunk, ...], *args: Any) -> Drawn:
            drawn = run(chunks, *args)
            rows[:] = [drawn.logits_NV[[row for row, chunk in enumerate(chunks) if chunk.sample is not None]]]
            return drawn

        def watched(plan: StepPlan) -> Launched | StepResult:
            result = launch(plan)
            drawn = [chunk for chunk in plan.chunks if chunk.sample is not None]
            for row, chunk in enumerate(drawn):
                assert chunk.sample is not None
                seen[chunk.request_id, chunk.sample.step] = rows[0][row].clone()
            return result

        monkeypatch.setattr(engine._runner._decoder, "logits", keep)
        if graphs is not None:
            monkeypatch.setattr(graphs, "run", partial(keep_graphs, graphs.run))
        monkeypatch.setattr(engine._runner, "launch", watched)
        return seen

    return watch


@pytest.fixture
def method_model() -> Callable[[Path, Path | None, torch.dtype], PreTrainedModel]:
    """A base in transformers with an adapter by peftkit's methods, all weights of one dtype."""
    bare: dict[Path, PreTrainedModel] = {}

    def load(base: Path, adapter: Path | None, dtype: torch.dtype) -> PreTrainedModel:
        if base not in bare:
            bare[base] = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        model = copy.deepcopy(bare[base])
        if adapter is not None:
            load_adapter(model, adapter)
        for parameter in model.parameters():
            parameter.data = parameter.data.to(dtype)
        return model

    return load


@pytest.fixture
def assert_served() -> Callable[..., None]:
    """Asserts that an answer's logits are those of a reference, and that each of its tokens has the largest.

    Logits: those recorded of the request. Reference: dtype → the model in it, whose forward over prompt and answer in
    float32 they are held against: each by `atol`, or in bfloat16 all by four times the norm of what rounding costs the
    reference itself. So where the two best logits differ by more than that, the token is the reference's.
    """

    def check(
        request: Request,
        output: RequestOutput,
        logits: Mapping[tuple[str, int], Tensor],
        reference: Reference,
        atol: float = 1e-4,
    ) -> None:
        assert isinstance(request.prompt, list) and len(output.token_ids) == request.sampling.max_tokens
        answer = torch.tensor(output.token_ids)
        ours = torch.stack([logits[request.request_id, step].cpu() for step in range(len(answer))])
        assert torch.equal(ours.gather(1, answer[:, None])[:, 0], ours.max(dim=1).values), request.adapter

        def computed(dtype: torch.dtype) -> Tensor:
            with torch.no_grad():
                found = reference(dtype)(input_ids=torch.tensor([[*request.prompt, *output.token_ids]])).logits[0]
            return found[-len(answer) - 1 : -1].float()  # HF PEFT gives logits for virtual tokens too

        exact = computed(torch.float32)
        if ours.dtype == torch.float32:
            torch.testing.assert_close(ours, exact, atol=atol, rtol=0, msg=lambda text: f"{request.adapter}: {text}")
        else:
            error, rounding = (ours.float() - exact).norm(), (computed(ours.dtype) - exact).norm()
            assert error <= 4 * rounding, (request.adapter, error, rounding)

    return check


@dataclass
class FakeAdapters:
    """LoRA slots and prefixes without tensors. A uid "p20" is a prompt of 20 virtual tokens, any other a LoRA."""

    pages: PageAllocator
    num_slots: int = 2
    references: Counter[str] = field(default_factory=Counter)
    pins: Counter[str] = field(default_factory=Counter)
    slots: dict[str, int] = field(default_factory=dict)
    prefixes: dict[str, Prefix] = field(default_factory=dict)
    broken: set[str] = field(default_factory=set)

    def retain(self, uid: str) -> None:
        self.references[uid] += 1

    def release(self, uid: str) -> None:
        assert self.references[uid] > self.pins[uid]
        self.references[uid] -= 1

    def num_pages_to_pin(self, uid: str) -> int:
        return pages_for(int(uid[1:])) if uid[0] == "p" and uid not in self.prefixes else 0

    def pin(self, uid: str) -> Residence | None:
        if uid in self.broken:
            raise AdapterError(f"{uid} is broken")
        if uid[0] == "p":
            if uid not in self.prefixes:
                size = int(uid[1:])
                self.prefixes[uid] = Prefix(tuple(self.pages.take(pages_for(size))), size)
            self.pins[uid] += 1
            return Residence(prefix=self.prefixes[uid])
        if uid not in self.slots:
            taken = {slot for other, slot in self.slots.items() if self.pins[other]}
            free = sorted(set(range(self.num_slots)) - taken)
            if not free:
                return None
            self.slots = {other: slot for other, slot in self.slots.items() if slot != free[0]} | {uid: free[0]}
        self.pins[uid] += 1
        return Residence(slot=self.slots[uid])

    def unpin(self, uid: str) -> None:
        assert self.pins[uid] > 0
        self.pins[uid] -= 1

    def reclaim(self, num_pages: int, keep: str | None) -> bool:
        chosen = [uid for uid in self.prefixes if not self.pins[uid] and uid != keep]
        if sum(len(self.prefixes[uid].pages) for uid in chosen) < num_pages:
            return False
        for uid in chosen:
            self.pages.release(self.prefixes.pop(uid).pages)
        return True


class Bench:
    """A scheduler, its fakes, and a model whose next token is always 7."""

    def __init__(
        self,
        *,
        num_pages: int = 64,
        budget: int = 32,
        max_requests: int = 8,
        slots: int = 2,
        bypass: int = 4,
        wait_steps: int = 1024,
        ahead: bool = False,
        cache: bool = False,
    ):
        self.pages = PageAllocator(num_pages)
        self.adapters = FakeAdapters(self.pages, slots)
        self.scheduler = Scheduler(
            self.pages,
            self.adapters,
            max_tokens_per_step=budget,
            max_requests=max_requests,
            max_bypass=bypass,
            max_wait_steps=wait_steps,
            prefix_cache=cache,
        )
        self.budget = budget
        self.ahead = ahead
        self.under_way: StepPlan | None = None
        self.done: list[str] = []
        self.admitted: list[str] = []

    def add(
        self, name: str, prompt: int | list[int] = 4, max_tokens: int = 3, uid: str | None = None, tenant: str = ""
    ) -> None:
        virtual = int(uid[1:]) if uid and uid[0] == "p" else 0
        params, ids = SamplingParams(max_tokens=max_tokens), prompt if isinstance(prompt, list) else list(range(prompt))
        self.scheduler.add(Sequence(name, ids, len(ids), params, seed=0, uid=uid, num_virtual=virtual, tenant=tenant))

    def step(self) -> StepPlan:
        plan = self.scheduler.schedule()
        for sequence, _ in self.scheduler.take_rejected():
            self.scheduler.finish(sequence.request_id)
            self.done.append(sequence.request_id)
        self.admitted += [c.request_id for c in plan.chunks if c.start == c.num_virtual and self._is_new(c.request_id)]
        assert sum(len(chunk.token_ids) for chunk in plan.chunks) <= self.budget
        assert all(len(c.block_table) * PAGE_TOKENS >= c.start + len(c.token_ids) for c in plan.chunks)
        self.check()
        booked, self.under_way = (self.under_way, plan) if self.ahead else (plan, None)
        if booked is not None:
            self.book(booked)
        return plan

    def book(self, plan: StepPlan) -> None:
        result = StepResult({chunk.request_id: 7 for chunk in plan.chunks if chunk.sample})
        for chunk in plan.chunks:
            sequence = self.scheduler.of(chunk)
            if sequence is None or not self.scheduler.update(sequence, chunk, result):
                continue
            if sequence.num_generated == sequence.params.max_tokens:
                self.scheduler.finish(sequence.request_id)
                self.done.append(sequence.request_id)
        self.check()

    def _is_new(self, name: str) -> bool:
        return name not in self.admitted

    def run(self, max_steps: int = 10_000) -> int:
        steps = 0
        while self.scheduler.has_work():
            self.step()
            steps += 1
            assert steps < max_steps, "starved"
        self.check_idle()
        return steps

    def traffic(self, rng: random.Random, add: Callable[[str], None]) -> None:
        """60 requests, some of which are aborted, with steps in between; then runs to the end."""
        for number in range(60):
            add(str(number))
            for _ in range(rng.randint(0, 4)):
                if self.scheduler.has_work():
                    self.step()
            live = [s.request_id for s in (*self.scheduler.running, *self.scheduler.waiting)]
            if live and rng.random() < 0.15:
                self.scheduler.finish(rng.choice(live))
                self.check()
        self.run()

    def check(self) -> None:
        held = self.scheduler.check_integrity()
        for prefix in self.adapters.prefixes.values():
            held.update(prefix.pages)
        self.pages.check_integrity(held)
        queued = [*self.scheduler.running, *self.scheduler.waiting]
        assert +self.adapters.references == Counter(s.uid for s in queued if s.uid)
        assert +self.adapters.pins == Counter(s.uid for s in self.scheduler.running if s.uid)

    def check_idle(self) -> None:
        self.adapters.reclaim(0, None)
        assert not +self.adapters.references and not +self.adapters.pins
        self.pages.check_integrity({})


@pytest.fixture
def make_bench() -> type[Bench]:
    """A scheduler over fakes, for tests of what it plans."""
    return Bench
