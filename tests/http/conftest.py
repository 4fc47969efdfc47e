"""A tiny random base and adapters for it, served by a real uvicorn on a free port."""

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openai
import pytest
import sqlalchemy as sa
import torch
import uvicorn
from fastapi import FastAPI
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from peftkit.artifact import write_adapter
from peftkit.base import module_shapes
from peftkit.methods import LoraConfig, PromptTuningConfig
from peftkit_serve import AsyncEngine, Engine, EngineProcess
from peftkit_serve.http import bind, create_app, url_of
from peftkit_serve.http.protocol import BoundedHttp
from peftkit_serve.http.service import Service
from peftkit_serve.http.settings import Settings
from peftkit_serve.tenants.database import Database

CONTEXT = 2048
REAL_DATABASE = os.environ.get("PEFTKIT_TEST_DATABASE")
"""A PostgreSQL that tests of the lasting state use in SQLite's place: `make test-service` starts one."""

CONFIG = LlamaConfig(
    vocab_size=260,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=CONTEXT,
    initializer_range=0.4,  # spread enough that an adapter changes the tokens
    tie_word_embeddings=False,
    bos_token_id=None,
    eos_token_id=256,
    pad_token_id=None,
)

BASE_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'assistant' and loop.first %}{{ raise_exception('the user speaks first') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}<|end|>{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
OWN_TEMPLATE = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
BROKEN_TEMPLATE = "{{ 1 // (messages | length - 1) }}"


def byte_tokenizer(chat_template: str | None = BASE_TEMPLATE) -> PreTrainedTokenizerFast:
    """256 bytes and one special token: a text's token ids are its UTF-8 bytes."""
    # the byte-level alphabet by value: bytes that can be seen stand for themselves, the others come from 256 on
    seen, unseen = {*range(33, 127), *range(161, 173), *range(174, 256)}, iter(range(256, 512))
    alphabet = [chr(byte if byte in seen else next(unseen)) for byte in range(256)]
    tokenizer = Tokenizer(models.BPE(vocab={symbol: byte for byte, symbol in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|end|>", model_max_length=CONTEXT, chat_template=chat_template
    )


def write_base(folder: Path, chat_template: str | None = BASE_TEMPLATE) -> Path:
    """A two-layer Llama with fresh random weights."""
    weights_seed = random.SystemRandom().randrange(2**31)
    print(f"weights of the tiny base: torch.manual_seed({weights_seed})")
    torch.manual_seed(weights_seed)
    LlamaForCausalLM(CONFIG).save_pretrained(folder)
    byte_tokenizer(chat_template).save_pretrained(folder)
    return folder


def write_lora(folder: Path, seed: int, **record: Any) -> Path:
    """A random LoRA with a large update."""
    config = LoraConfig(r=4, alpha=8.0)
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for path, site in config.resolve(module_shapes(CONFIG)).items():
        for side, shape in (("A", (site.r, site.in_features)), ("B", (site.out_features, site.r))):
            tensors[f"base_model.model.{path}.lora_{side}.weight"] = torch.randn(shape, generator=generator) * 0.2
    return write_adapter(folder, config, tensors, record).path


def write_prompt(folder: Path, seed: int, num_virtual: int = 20) -> Path:
    """Random virtual tokens."""
    embeddings = torch.randn(num_virtual, CONFIG.hidden_size, generator=torch.Generator().manual_seed(seed))
    config = PromptTuningConfig(num_virtual_tokens=num_virtual, init="random")
    return write_adapter(folder, config, {"prompt_embeddings": embeddings}, {}).path


@pytest.fixture(scope="package", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keeps what peftkit remembers of the tiny base out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEFTKIT_HOME", str(tmp_path_factory.mktemp("peftkit-home")))
        yield


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny base, with a chat template."""
    return write_base(tmp_path_factory.mktemp("bases") / "tiny")


@pytest.fixture(scope="session")
def adapter_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Adapters by name: two LoRAs, a prompt, and LoRAs with chat templates of their own."""
    root = tmp_path_factory.mktemp("adapters")
    return {
        "red": write_lora(root / "red", 1),
        "blue": write_lora(root / "blue", 2),
        "soft": write_prompt(root / "soft", 3),
        "own": write_lora(root / "own", 4, chat_template={"text": OWN_TEMPLATE, "sha256": ""}),
        "broken": write_lora(root / "broken", 5, chat_template={"text": BROKEN_TEMPLATE, "sha256": ""}),
    }


@pytest.fixture(scope="session")
def make_engine(base_folder: Path) -> Callable[..., Engine]:
    """Makes a small deterministic engine on the CPU."""

    def make(base: Path = base_folder, **settings: Any) -> Engine:
        defaults: dict[str, Any] = {"max_requests": 8, "max_adapters": 4, "num_pages": 512}
        return Engine(base, device="cpu", deterministic=True, **(defaults | settings))

    return make


@dataclass(frozen=True)
class Served:
    """A server that answers."""

    url: str
    service: Service
    engine: Any
    """Only to look at: the server's own thread drives it."""
    app: FastAPI

    @property
    def database(self) -> Database:
        """The server's own."""
        return self.app.state.database

    def wait_idle(self, timeout_s: float = 10.0) -> None:
        """Waits until no request is left, then asserts that all pages, slots and references are back."""
        deadline = time.monotonic() + timeout_s
        while not self._is_whole():
            if time.monotonic() > deadline:
                assert not self.engine.has_work(), f"requests are left: {self.engine.stats()}"
                self.engine.check_integrity()
            time.sleep(0.002)
        assert all(self.engine.adapters.get(name).references == 0 for name in self.engine.adapters.names())

    def _is_whole(self) -> bool:
        """Whether nothing is held; the engine's thread may be about to give back what its last request had."""
        if self.engine.has_work():
            return False
        try:
            self.engine.check_integrity()
        except AssertionError:
            return False
        return True


def wipe(url: str) -> None:
    """Removes everything from a test database on PostgreSQL."""
    engine = sa.create_engine(url)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP SCHEMA public CASCADE"))
        connection.execute(sa.text("CREATE SCHEMA public"))
    engine.dispose()


@pytest.fixture
def database_url(tmp_path: Path) -> str:
    """An empty database: on SQLite, or the one that PEFTKIT_TEST_DATABASE names."""
    if REAL_DATABASE is None:
        return f"sqlite:///{tmp_path / 'store' / 'state.db'}"
    wipe(REAL_DATABASE)
    return REAL_DATABASE


@contextmanager
def serving(
    engine: Engine | EngineProcess, served_name: str = "tiny", *, tracer_provider: Any = None, **settings: Any
) -> Iterator[Served]:
    """Serves an engine from a thread."""
    served = AsyncEngine(engine) if isinstance(engine, Engine) else engine
    app = create_app(served, served_name=served_name, settings=Settings(**settings), tracer_provider=tracer_provider)
    listener = bind("127.0.0.1", 0, any_client=False)
    config = uvicorn.Config(app, http=BoundedHttp, log_config=None, access_log=False, timeout_graceful_shutdown=2)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            time.sleep(0.005)
        yield Served(url_of(listener), app.state.service, engine, app)
    finally:
        server.should_exit = True
        thread.join()


@pytest.fixture
def base_config() -> LlamaConfig:
    """The tiny base's."""
    return CONFIG


@pytest.fixture
def base_shapes() -> Any:
    """The tiny base's linear modules."""
    return module_shapes(CONFIG)


@pytest.fixture(name="write_lora")
def lora_writer() -> Callable[..., Path]:
    """`write_lora`, for a test that needs an adapter of its own."""
    return write_lora


@pytest.fixture(name="write_prompt")
def prompt_writer() -> Callable[..., Path]:
    """`write_prompt`, for a test that needs a prompt of its own."""
    return write_prompt


@pytest.fixture(scope="session")
def serve() -> Callable[..., Any]:
    """`serving`, for a test that needs a server of its own."""
    return serving


@pytest.fixture
def base_without_template(tmp_path: Path) -> Path:
    """A tiny base whose tokenizer has no chat template."""
    return write_base(tmp_path / "plain", chat_template=None)


@pytest.fixture(scope="session")
def shared_server(make_engine: Callable[..., Engine], adapter_folders: dict[str, Path]) -> Iterator[Served]:
    """One server for all tests that leave it as it was."""
    engine = make_engine()
    for name, folder in adapter_folders.items():
        engine.adapters.add(name, folder)
    with serving(engine) as served:
        yield served


@pytest.fixture
def server(shared_server: Served) -> Iterator[Served]:
    """The shared server, which must be idle and whole after each test."""
    yield shared_server
    shared_server.wait_idle()


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    """The official client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=30) as client:
        yield client
