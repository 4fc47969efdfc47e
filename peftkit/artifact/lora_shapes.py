"""The shapes of a base's weights, as far as a LoRA's own tensors speak of them: what a folder can be checked against
where its base isn't at hand."""

from collections.abc import Mapping

from torch import Tensor

from peftkit.errors import AdapterError
from peftkit.methods import LoraConfig
from peftkit.methods.lora import EMBEDDING, PREFIX
from peftkit.methods.lora_layers import LoraEmbedding, LoraLinear, TokenRows

_SIDES = {name: side for kind in (LoraLinear, LoraEmbedding) for name, side in ((kind.NAME_A, "A"), (kind.NAME_B, "B"))}
_ROWS = f".{TokenRows.KEY}"


def own_shapes(tensors: Mapping[str, Tensor], config: LoraConfig, where: str) -> dict[str, tuple[int, ...]]:
    """Name of each weight that the tensors, by PEFT key, change → its shape; `where` is named in errors.

    An embedding known only by its token rows is as large as its highest token asks for. Raises AdapterError for a name
    that no LoRA has, and for half of a pair.
    """
    sides: dict[str, dict[str, Tensor]] = {}
    shapes: dict[str, tuple[int, ...]] = {}
    for name, tensor in tensors.items():
        path, _, end = name.removeprefix(PREFIX).rpartition(".lora_")
        end = f"lora_{end}"
        if not name.startswith(PREFIX):
            raise AdapterError(f"{where}: {name} isn't a tensor of a LoRA")
        if end in _SIDES and tensor.dim() == 2:
            sides.setdefault(path, {})[_SIDES[end]] = tensor
        elif name.endswith(_ROWS) and tensor.dim() == 2:
            path = name.removeprefix(PREFIX).removesuffix(_ROWS)
            shapes[f"{path}.weight"] = (_vocabulary(config), tensor.shape[1])
        elif end not in ("lora_B.bias", "lora_magnitude_vector"):
            if not any(path_of(name).endswith(saved) for saved in config.modules_to_save):
                raise AdapterError(f"{where}: {name} isn't a tensor of a LoRA, nor of a module in modules_to_save")
            shapes[name.removeprefix(PREFIX)] = tuple(tensor.shape)
    for path, pair in sides.items():
        if set(pair) != {"A", "B"}:
            raise AdapterError(f"{where}: {path} has only lora_{next(iter(pair))}")
        out_features, in_features = pair["B"].shape[0], pair["A"].shape[1]
        is_embedding = path == EMBEDDING
        shapes[f"{path}.weight"] = (in_features, out_features) if is_embedding else (out_features, in_features)
    return shapes


def path_of(name: str) -> str:
    """Path of the module that a saved parameter, by PEFT key, belongs to."""
    return name.removeprefix(PREFIX).rpartition(".")[0]


def _vocabulary(config: LoraConfig) -> int:
    given = config.trainable_token_indices or []
    return 1 + max(
        (token for ids in (given.values() if isinstance(given, dict) else [given]) for token in ids), default=-1
    )
