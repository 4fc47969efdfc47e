"""A model without data, filled from its base's folder a module at a time: for one that is too large to be whole."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from peftkit.base.folder import stored_tensors
from peftkit.errors import BaseModelError


class Filling:
    """Puts a base's weights into a model on the meta device, as transformers does where all are loaded at once.

    The model's linear layers may be bitsandbytes' in 4 bits, which are quantised on `device` one by one.
    """

    def __init__(self, model: PreTrainedModel, folder: Path, dtype: torch.dtype, device: torch.device) -> None:
        self._model, self._folder, self._dtype, self._device = model, folder, dtype, device
        self._tensors = stored_tensors(folder)
        self._filled: dict[int, tuple[nn.Parameter, nn.Parameter]] = {}
        """By the id of a parameter without data: itself, and the one in its place, which tied weights share."""

    def fill(self, *, outside: str) -> None:
        """All but what is in the module at a path, and the tables of positions, which no file holds."""
        for path, module in list(self._model.named_modules()):
            if not path.startswith(f"{outside}."):
                self._fill_one(path, module)
        trunk: Any = self._model.base_model
        trunk.rotary_emb = type(trunk.rotary_emb)(config=self._model.config).to(self._device)

    def fill_module(self, path: str) -> None:
        """The module at a path with all that is in it."""
        for name, module in self._model.get_submodule(path).named_modules(prefix=path):
            self._fill_one(name, module)

    def _fill_one(self, path: str, module: nn.Module) -> None:
        for name, empty in list(module.named_parameters(recurse=False)):
            if id(empty) not in self._filled:
                self._filled[id(empty)] = (empty, self._read(f"{path}.{name}", empty))
            setattr(module, name, self._filled[id(empty)][1])

    def _read(self, name: str, empty: nn.Parameter) -> nn.Parameter:
        if name not in self._tensors:  # the trunk may have been saved alone
            name = name.removeprefix(f"{self._model.base_model_prefix}.")
        if name not in self._tensors:
            raise BaseModelError(f"{self._folder}: tensor {name} is missing, so the base can't be loaded by layers")
        with safe_open(self._tensors[name].file, "pt") as file:
            value = file.get_tensor(name).to(self._device, self._dtype, copy=True)  # else it is the file's own memory
        if not hasattr(empty, "quant_state"):
            return nn.Parameter(value, requires_grad=False)
        quantised: Any = type(empty)  # with the settings that it has beside its data
        return quantised(value, requires_grad=False, **vars(empty)).to(self._device)
