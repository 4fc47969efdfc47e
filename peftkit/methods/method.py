"""What every method offers once it is attached to a model, and how names are matched to modules."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar, Self, cast

import regex
import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from peftkit.errors import AdapterError, InputError, did_you_mean

MAX_STRENGTH = 1e6
"""Most that an update may be scaled by: far above any use, far below what overflows."""

MAX_RANK = 2**14
"""Highest rank and widest bottleneck: that of the widest models, beyond which nothing is gained."""

MAX_ENCODER = 2**16
"""Widest hidden layer of a network that produces virtual tokens."""

_MATCH_SECONDS = 0.25


class MethodSettings(BaseModel):
    """Base of the method configs: frozen, and a key that isn't known is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    def identity(self) -> dict[str, Any]:
        """What of this config changes the function that the adapter computes, with sets in a fixed order."""
        raise AssertionError("every method config defines identity()")


class StartsFromText(MethodSettings):
    """Base of the configs whose virtual tokens may start from a text: giving `init_text` asks for `init: text`."""

    num_virtual_tokens: int = Field(default=20, ge=1)
    """Virtual tokens in front of the text."""
    init_text: str | None = None
    """The text for `init: text`; repeated or cut to the number of virtual tokens."""

    @model_validator(mode="after")
    def _text_goes_with_init(self) -> Self:
        if self.init_text is not None and "init" not in self.model_fields_set:
            object.__setattr__(self, "init", "text")
        init: str = getattr(self, "init")  # noqa: B009 - each config has its own set of starts
        if init == "text" and not (self.init_text or "").strip():
            raise ValueError("init: text needs init_text")
        if init != "text" and self.init_text is not None:
            raise ValueError(f"init_text is only used with init: text, not with init: {init}")
        return self


class Method(ABC):
    """One adapter attached to one model.

    `parameters()` is the trainable parametrisation (what a checkpoint holds); `export()` is what an adapter folder
    holds, under HF PEFT's keys. For methods without a reparameterisation the two are the same tensors.
    """

    kind: ClassVar[str]
    config: Any

    @abstractmethod
    def parameters(self) -> dict[str, nn.Parameter]:
        """Trainable parameters by stable name."""

    @property
    def exported_config(self) -> Any:
        """The config that goes with what `export` gives."""
        return self.config

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters is trained."""
        return any(parameter.requires_grad for parameter in self.parameters().values())

    def lr_factors(self) -> dict[str, float]:
        """Parameter name → factor on the learning rate, where it isn't 1."""
        return {}

    @abstractmethod
    def export(self) -> dict[str, Tensor]:
        """Tensors of the adapter folder by PEFT key: detached float32 copies on the CPU."""

    @abstractmethod
    def expected(self) -> dict[str, tuple[int, ...]]:
        """Shape of each tensor that `export` gives and `load` takes, by PEFT key."""

    @abstractmethod
    def detach(self) -> None:
        """Takes the adapter out of the model, which is then as it was before."""

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies exported tensors into the attached parameters.

        Raises AdapterError naming every missing or unexpected key and the first wrong shape; then nothing is copied.
        """
        check_tensors(tensors, self.expected())
        self.assign(tensors)

    @abstractmethod
    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Copies checked tensors into the parameters."""


def check_tensors(
    tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]], where: str = "adapter"
) -> None:
    """Raises AdapterError unless `tensors` has exactly the keys and shapes of `expected`."""
    unexpected = sorted(set(tensors) - set(expected))
    missing = sorted(set(expected) - set(tensors))
    if unexpected:
        hint = did_you_mean(unexpected[0], missing or expected)
        raise AdapterError(f"{where}: {len(unexpected)} tensors match nothing in the model: {_some(unexpected)}{hint}")
    if missing:
        raise AdapterError(f"{where}: {len(missing)} tensors that its config promises are missing: {_some(missing)}")
    for key, shape in expected.items():
        if tuple(tensors[key].shape) != shape:
            raise AdapterError(
                f"{where}: {key} has shape {list(tensors[key].shape)}, this base and config need {list(shape)}"
            )


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", …" if len(names) > 3 else "")


def attached(model: nn.Module) -> list["Method"]:
    """The adapters on `model`, in the order in which they were attached."""
    return list(cast(list[Method], getattr(model, "peftkit_methods", [])))


def base_shapes(model: nn.Module) -> dict[str, tuple[int, ...]]:
    """Name → shape of the parameters of a model's base, as they are without quantisation and adapters.

    A tied weight is there under each of its names.
    """
    ours = {id(parameter) for method in attached(model) for parameter in method.parameters().values()}
    shapes: dict[str, tuple[int, ...]] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if id(parameter) not in ours:
                shape = tuple(parameter.shape)
                if isinstance(module, nn.Linear) and name == "weight":
                    shape = (module.out_features, module.in_features)
                shapes[f"{path}.{name}".replace(".base_layer.", ".")] = shape
    return shapes


def input_embedding(model: PreTrainedModel) -> nn.Embedding:
    """A model's input embedding; one that is adapted stands for the base's with all that is asked of it."""
    return cast(nn.Embedding, model.get_input_embeddings())


def matrices(parameters: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, int]]:
    """Path of each linear layer and embedding → shape of its weight, from the parameters of a model."""
    return {
        name.removesuffix(".weight"): (shape[0], shape[1])
        for name, shape in parameters.items()
        if name.endswith(".weight") and len(shape) == 2
    }


def matches(path: str, name: str) -> bool:
    """HF PEFT's rule for a list of names: the whole path, or its end after a dot."""
    return path == name or path.endswith("." + name)


def match_names(names: Iterable[str], paths: Iterable[str], field: str, *, partial: bool = False) -> set[str]:
    """Paths matched by a list of names; a name that matches none raises InputError with the nearest right name.

    With `partial` the paths are some of a model's only, and a name may match none of them.
    """
    paths = list(paths)
    found: set[str] = set()
    for name in names:
        hit = {path for path in paths if matches(path, name)}
        if not hit and not partial:
            known = {path.rsplit(".", 1)[-1] for path in paths} | set(paths)
            raise InputError(
                f"{field}: '{name}' matches no module of this model{did_you_mean(name, known)}", field=field
            )
        found |= hit
    return found


def match_regex(pattern: str, paths: Iterable[str], field: str, *, partial: bool = False) -> set[str]:
    """Paths that a regular expression matches whole, as HF PEFT reads a string; InputError when there is none.

    With `partial` the paths are some of a model's only, and none of them need match.
    """
    paths = list(paths)
    found = {path for path in paths if fullmatch(pattern, path, field)}
    if not found and not partial:
        if any(matches(path, pattern) for path in paths):
            hint = f"; a string is a regular expression for whole paths, for a name write ['{pattern}']"
        else:
            hint = did_you_mean(pattern, {path.rsplit(".", 1)[-1] for path in paths} | {"all-linear"})
        raise InputError(f"{field}: '{pattern}' matches no module of this model{hint}", field=field)
    return found


def fullmatch(pattern: str, path: str, field: str) -> bool:
    """Whether a regular expression matches a path whole.

    Raises InputError for one that isn't a regular expression, or that takes longer than a path can be worth: those of
    a stranger's adapter may go through exponentially many ways.
    """
    try:
        return regex.fullmatch(pattern, path, timeout=_MATCH_SECONDS, concurrent=True) is not None
    except regex.error as error:
        raise InputError(f"{field}: '{pattern}' is not a regular expression: {error}", field=field) from error
    except TimeoutError as error:
        raise InputError(
            f"{field}: '{pattern}' takes too long to match {path}: write it simpler", field=field
        ) from error


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Puts `module` at a dotted path of `model`."""
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, module)


def exported(tensor: Tensor) -> Tensor:
    """A detached float32 copy on the CPU."""
    return tensor.detach().to("cpu", torch.float32, copy=True).contiguous()


def text_positions(position_ids: Tensor | None, mask_BM: Tensor, length: int) -> Tensor:
    """Positions (B, length) of the text's last `length` tokens: as given, else counted along the mask."""
    if position_ids is not None:
        return position_ids.expand(mask_BM.shape[0], length)
    return (mask_BM.long().cumsum(-1) - 1).clamp(min=0)[:, -length:]


def initial_token_ids(
    text: str | None,
    num_tokens: int,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
    generator: torch.Generator,
) -> Tensor:
    """Token ids (num_tokens,) that virtual tokens start from: the text's, repeated or cut, or drawn at random."""
    if text is None:
        return torch.randint(vocab_size, (num_tokens,), generator=generator)
    if tokenizer is None:
        raise InputError("init: text needs the base's tokenizer: pass tokenizer= to attach", field="init")
    ids = tokenizer(text, add_special_tokens=False).input_ids
    if not ids:
        raise InputError(f"init_text: {text!r} comes to no token: write another text", field="init_text")
    return torch.tensor((ids * (num_tokens // len(ids) + 1))[:num_tokens])


@contextmanager
def seeded(generator: torch.Generator) -> Iterator[None]:
    """Inside, torch's own initialisers draw by this generator's seed; outside, the global generator is as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(generator.initial_seed())
        yield
