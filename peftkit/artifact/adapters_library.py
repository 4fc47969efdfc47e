"""Bottleneck adapters as the `adapters` library (AdapterHub) saves them, to and from ours.

A folder holds `adapter_config.json`, whose `config` has the library's settings and `name` the adapter's name, and
`adapter.safetensors`, where H is the hidden size, b the bottleneck's:

    model.layers.{i}.attention_adapters.adapters.{name}.…       attn_adapter
    model.layers.{i}.output_adapters.adapters.{name}.…          mlp_adapter
        adapter_down.0.{weight (b, H), bias (b,)}               down; adapter_down.1 with an input norm
        adapter_up.{weight (H, b), bias (H,)}                   up
        adapter_down.0, adapter_norm_before .{weight, bias}     norm, held twice

Three settings of many are known, those of DoubleSeqBnConfig (houlsby), SeqBnConfig (pfeiffer) and ParBnConfig
(parallel). A setting that changes what an adapter computes and that we don't honour is refused by name.
"""

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from peftkit.artifact.files import CONFIG_FILE, present, read_json, read_tensors
from peftkit.base.folder import ARCHITECTURES
from peftkit.errors import AdapterError, InputError, UnsupportedError, did_you_mean
from peftkit.methods import AnyConfig, BottleneckConfig
from peftkit.methods.bottleneck import PREFIX, Variant
from peftkit.methods.method import check_tensors

logger = logging.getLogger(__name__)

LIBRARY_TENSOR_FILE = "adapter.safetensors"
_PICKLED = "pytorch_adapter.bin"
_VERSION = "adapters.1.3.0"
_HEAD_FILES = ("head_config.json", "model_head.safetensors", "pytorch_model_head.bin")
_FUSION_FILES = ("adapter_fusion_config.json", "model_adapter_fusion.safetensors", "pytorch_model_adapter_fusion.bin")
_INTERFACE_FILE = "adapter_interface.json"

# where the adapters stand and what they read; together they name the variant
_PLACEMENT: dict[Variant, dict[str, bool]] = {
    "houlsby": {"mh_adapter": True, "output_adapter": True, "original_ln_before": False, "is_parallel": False},
    "pfeiffer": {"mh_adapter": False, "output_adapter": True, "original_ln_before": True, "is_parallel": False},
    "parallel": {"mh_adapter": False, "output_adapter": True, "original_ln_before": False, "is_parallel": True},
}
_PLACEMENT_DEFAULT = {"mh_adapter": None, "output_adapter": None, "original_ln_before": False, "is_parallel": False}
# fields that must be neutral (the value given here, which is also the library's default) as we don't honour them
_NEUTRAL: dict[str, Any] = {
    "adapter_residual_before_ln": False,
    "cross_adapter": False,
    "inv_adapter": None,
    "ln_after": False,
    "original_ln_after": True,
    "phm_layer": False,
    "residual_before_ln": True,
    "use_gating": False,
}
# fields of a training to come, of its start, or of what _NEUTRAL refuses: read past, written with these values
_IGNORED: dict[str, Any] = {
    "factorized_phm_W": True,
    "factorized_phm_rule": False,
    "hypercomplex_nonlinearity": "glorot-uniform",
    "init_weights": "bert",
    "init_weights_seed": None,
    "inv_adapter_reduction_factor": None,
    "learn_phm": True,
    "phm_bias": True,
    "phm_c_init": "normal",
    "phm_dim": 4,
    "phm_init_range": 0.0001,
    "phm_rank": 1,
    "shared_W_phm": False,
    "shared_phm_rule": True,
    "stochastic_depth": 0.0,
}
_HONOURED = ("reduction_factor", "non_linearity", "scaling", "ln_before", "leave_out", "dropout")
_KNOWN = (*_PLACEMENT_DEFAULT, *_NEUTRAL, *_IGNORED, *_HONOURED)
# the places that the library itself names for families which it reaches through an interface
_INTERFACE: dict[str, str | None] = {
    "model_layers": "layers",
    "layer_self_attn": "self_attn",
    "attn_o_proj": "o_proj",
    "layer_output_proj": "mlp.down_proj",
    "layer_pre_ffn": "post_attention_layernorm",
    "layer_ln_1": None,
    "layer_ln_2": None,
}
_PLACES = {"attn_adapter": "attention_adapters", "mlp_adapter": "output_adapters"}


def is_adapters_library(fields: Mapping[str, Any]) -> bool:
    """Whether the content of an `adapter_config.json` is the `adapters` library's."""
    return "config" in fields and "model_type" in fields and "peft_type" not in fields


def read_adapters_library(path: str | Path) -> tuple[BottleneckConfig, dict[str, Tensor]]:
    """Reads the folder that the library's `save_adapter` wrote: our config, and CPU tensors by our keys.

    With `leave_out` the adapted layers are those that the file holds, as the library doesn't say how many the base has.
    A head beside the adapter isn't read, with a warning. Raises AdapterError for a folder that is damaged or
    incomplete, UnsupportedError for another method, model family or setting.
    """
    folder = Path(path)
    where = str(folder / CONFIG_FILE)
    fields = read_json(present(folder, CONFIG_FILE))
    name, hidden_size = _check_top(fields, where)
    settings: dict[str, Any] = fields["config"]
    _check_settings(settings, where)
    _check_beside(folder)
    tensors = read_tensors(folder, LIBRARY_TENSOR_FILE, _PICKLED)
    num_layers = _num_layers(tensors, name, folder)
    config = _config(settings, hidden_size, num_layers, where)
    shapes = config.expected_tensors(num_layers, hidden_size)
    keys = {key: _their_keys(key, name, config.ln_before) for key in shapes}
    # saved from the bare trunk the keys start at the layers
    start = "layers." if all(key.startswith("layers.") for key in tensors) else "model.layers."
    expected = {start + theirs: shapes[key] for key, copies in keys.items() for theirs in copies}
    check_tensors(tensors, expected, str(folder / LIBRARY_TENSOR_FILE))
    for first, *others in keys.values():
        if any(not torch.equal(tensors[start + first], tensors[start + other]) for other in others):
            raise AdapterError(f"{folder / LIBRARY_TENSOR_FILE}: the two copies of {start + first} differ")
    return config, {key: tensors[start + copies[0]] for key, copies in keys.items()}


def to_adapters_library(
    config: AnyConfig, tensors: Mapping[str, Tensor], base: Mapping[str, Any], name: str
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The fields of the library's `adapter_config.json`, and the tensors by its keys.

    `base` is what the adapter's record says of the base: `id`, `model_type`, `layers`. Raises UnsupportedError for a
    method other than bottleneck adapters, AdapterError when the record doesn't say enough, InputError for a name that
    the library can't use.
    """
    if not isinstance(config, BottleneckConfig):
        raise UnsupportedError(f"only bottleneck adapters are written for the adapters library, not {config.kind}")
    if not re.fullmatch(r"[\w-]+", name) or hasattr(nn.ModuleDict(), name):
        raise InputError(f"name: the adapters library can't call an adapter '{name}': choose another", field="name")
    model_type, num_layers = base.get("model_type"), base.get("layers")
    if model_type not in ARCHITECTURES or not isinstance(num_layers, int):
        raise AdapterError(
            "the adapter's record doesn't say its base's model_type and layers, which the adapters library needs: "
            "attach the adapter to its base and save it again"
        )
    hidden_size = next(tensor.shape[1] for key, tensor in tensors.items() if key.endswith("down.weight"))
    fields = {
        "config": _settings(config.resolved(hidden_size), hidden_size, num_layers),
        "hidden_size": hidden_size,
        "model_class": ARCHITECTURES[model_type],
        "model_name": base.get("id"),
        "model_type": model_type,
        "name": name,
        "version": _VERSION,
    }
    theirs = {
        f"model.layers.{copy}": tensor.clone()
        for key, tensor in tensors.items()
        for copy in _their_keys(key, name, config.ln_before)
    }
    return fields, theirs


def _check_top(fields: Mapping[str, Any], where: str) -> tuple[str, int]:
    """The adapter's name and the hidden size; all fields but `model_class` and `model_name` count."""
    name, hidden_size, version = (fields.get(field) for field in ("name", "hidden_size", "version"))
    if fields.get("model_type") not in ARCHITECTURES:
        raise UnsupportedError(
            f"{where}: model_type {fields.get('model_type')} isn't one of {', '.join(ARCHITECTURES)}",
            field="model_type",
        )
    if not isinstance(version, str) or not version.startswith("adapters."):
        raise UnsupportedError(f"{where}: version {version} isn't one of the adapters library", field="version")
    if not isinstance(name, str) or not name:
        raise AdapterError(f"{where}: name must be the adapter's name", field="name")
    if not isinstance(hidden_size, int) or hidden_size < 1:
        raise AdapterError(f"{where}: hidden_size must be a whole number", field="hidden_size")
    if not isinstance(fields.get("config"), dict):
        raise AdapterError(f"{where}: config must hold the adapter's settings", field="config")
    return name, hidden_size


def _check_settings(settings: Mapping[str, Any], where: str) -> None:
    """Refuses what isn't a bottleneck adapter or can't be honoured."""
    if (architecture := settings.get("architecture")) is not None:
        raise UnsupportedError(
            f"{where}: architecture {architecture}: of this library's methods only bottleneck adapters are read",
            field="architecture",
        )
    for name, wanted in _NEUTRAL.items():
        if (value := settings.get(name, wanted)) != wanted:
            raise UnsupportedError(f"{where}: {name} is {value!r}, which can't be honoured", field=name)
    for name, value in settings.items():
        if name not in (*_KNOWN, "architecture") and value not in (None, False, [], {}):
            raise UnsupportedError(
                f"{where}: field '{name}' isn't known, so its effect can't be honoured{did_you_mean(name, _KNOWN)}",
                field=name,
            )


def _check_beside(folder: Path) -> None:
    """What lies beside the adapter and may change what it does."""
    for name in _FUSION_FILES:
        if (folder / name).exists():
            raise UnsupportedError(f"{folder / name}: a fusion of adapters can't be honoured")
    if (folder / _INTERFACE_FILE).exists():
        interface = read_json(folder / _INTERFACE_FILE).get("interface") or {}
        for name, wanted in _INTERFACE.items():
            if interface.get(name) != wanted:
                raise UnsupportedError(
                    f"{folder / _INTERFACE_FILE}: {name} is {interface.get(name)!r}, which can't be honoured",
                    field=name,
                )
    if heads := [name for name in _HEAD_FILES if (folder / name).exists()]:
        logger.warning(
            "%s: the head beside the adapter (%s) isn't read: if it was trained, the answers differ",
            folder,
            ", ".join(heads),
        )


def _config(settings: Mapping[str, Any], hidden_size: int, num_layers: int, where: str) -> BottleneckConfig:
    """Our config of an adapter whose tensors reach up to layer `num_layers` - 1."""
    placement = {field: settings.get(field, default) for field, default in _PLACEMENT_DEFAULT.items()}
    variant = next((name for name, known in _PLACEMENT.items() if known == placement), None)
    if variant is None:
        raise UnsupportedError(
            f"{where}: {', '.join(f'{field} {value}' for field, value in placement.items())} together are none of the "
            f"known adapters, {', '.join(_PLACEMENT)}",
            field=next(iter(placement)),
        )
    factor, scaling = settings.get("reduction_factor"), settings.get("scaling", 1.0)
    if isinstance(factor, bool) or not isinstance(factor, int | float) or not 0 < factor < math.inf:
        raise UnsupportedError(
            f"{where}: reduction_factor {factor!r} isn't one number above 0 for all layers", field="reduction_factor"
        )
    if isinstance(scaling, bool) or not isinstance(scaling, int | float):
        raise UnsupportedError(f"{where}: scaling {scaling!r} isn't a fixed number", field="scaling")
    left_out = settings.get("leave_out") or []
    if not isinstance(left_out, list):
        raise AdapterError(f"{where}: leave_out must be a list of layers", field="leave_out")
    try:
        return BottleneckConfig.model_validate(
            {
                "variant": variant,
                "bottleneck_size": max(1, int(hidden_size // factor)),
                "non_linearity": settings.get("non_linearity") or "",
                "scaling": scaling,
                "ln_before": settings.get("ln_before", False),
                "dropout": settings.get("dropout", 0.0),
                "layers_to_transform": [i for i in range(num_layers) if i not in left_out] if left_out else None,
            }
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = str(first["loc"][0])
        raise UnsupportedError(f"{where}: {field} {settings.get(field)!r}: {first['msg']}", field=field) from error


def _settings(config: BottleneckConfig, hidden_size: int, num_layers: int) -> dict[str, Any]:
    """The library's settings of a resolved config."""
    assert config.bottleneck_size is not None and config.scaling is not None
    adapted = {int(place.split(".")[0]) for place in config.places(num_layers)}
    return {
        **_PLACEMENT[config.variant],
        **_NEUTRAL,
        **_IGNORED,
        "reduction_factor": _reduction_factor(hidden_size, config.bottleneck_size),
        "non_linearity": config.non_linearity,
        "scaling": float(config.scaling),
        "ln_before": config.ln_before,
        "leave_out": [layer for layer in range(num_layers) if layer not in adapted],
        "dropout": config.dropout,
        "init_weights": "mam_adapter" if config.variant == "parallel" else "bert",
    }


def _reduction_factor(hidden_size: int, bottleneck_size: int) -> int | float:
    """The factor from which the library comes to this bottleneck size, a whole number where there is one."""
    if hidden_size % bottleneck_size == 0:
        return hidden_size // bottleneck_size
    factor = hidden_size / bottleneck_size
    # a quotient that was rounded up goes into the hidden size one time less
    return factor if hidden_size // factor == bottleneck_size else math.nextafter(factor, 0)


def _num_layers(tensors: Mapping[str, Tensor], name: str, folder: Path) -> int:
    """One more than the last layer that the keys speak of; a key of anything else is refused."""
    places = "|".join(_PLACES.values())
    pattern = re.compile(rf"(?:model\.)?layers\.([0-9]{{1,4}})\.(?:{places})\.adapters\.{re.escape(name)}\.[a-z_0-9.]+")
    last = -1
    for key in tensors:
        if not (match := pattern.fullmatch(key)):
            raise UnsupportedError(
                f"{folder / LIBRARY_TENSOR_FILE}: {key} isn't a tensor of the bottleneck adapter '{name}'"
            )
        last = max(last, int(match[1]))
    return last + 1


def _their_keys(key: str, name: str, ln_before: bool) -> list[str]:
    """The library's key of our tensor, from the layer's number on; two for a norm, which is held twice."""
    layer, place, part, kind = key.removeprefix(PREFIX).split(".")
    parts = {
        "norm": ["adapter_norm_before", "adapter_down.0"],
        "down": ["adapter_down.1" if ln_before else "adapter_down.0"],
        "up": ["adapter_up"],
    }
    return [f"{layer}.{_PLACES[place]}.adapters.{name}.{theirs}.{kind}" for theirs in parts[part]]
