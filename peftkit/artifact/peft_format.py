"""`adapter_config.json` as HF PEFT 0.21 writes it, to and from our method configs.

LORA, PREFIX_TUNING, P_TUNING and PROMPT_TUNING are HF PEFT's; BOTTLENECK is ours, in the same container.

A field that changes what an adapter computes and that we don't honour must hold its neutral value, else the adapter is
refused by the field's name. A field that PEFT doesn't have is refused unless it is empty.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from peftkit.errors import AdapterError, UnsupportedError, did_you_mean
from peftkit.methods import (
    AnyConfig,
    BottleneckConfig,
    LoraConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
)
from peftkit.methods.method import MethodSettings

PEFT_VERSION = "0.21.2"
_Config = TypeVar("_Config", bound=MethodSettings)

# fields that name things or steer training alone: read past, written with these values
_COMMON: dict[str, Any] = {
    "auto_mapping": None,
    "inference_mode": True,
    "peft_version": PEFT_VERSION,
    "revision": None,
    "task_type": "CAUSAL_LM",
}

# fields of peft_type LORA that must be neutral (the value given here) because we don't honour them
_LORA_NEUTRAL: dict[str, Any] = {
    "alora_invocation_tokens": None,
    "arrow_config": None,
    "bias": "none",
    "corda_config": None,
    "eva_config": None,
    "fan_in_fan_out": False,
    "kasa_config": None,
    "layer_replication": None,
    "lora_ga_config": None,
    "monteclora_config": None,
    "target_parameters": None,
    "use_bdlora": None,
    "use_qalora": False,
    "velora_config": None,
}
_LORA_IGNORED: dict[str, Any] = {
    "ensure_weight_tying": False,
    "loftq_config": {},
    "megatron_config": None,
    "megatron_core": "megatron.core",
    "qalora_group_size": 16,
}
# initialisations that leave the base as it was; the others (PiSSA, OLoRA, CorDA, LoftQ, …) also change the base
_PLAIN_INITS = (True, False, "gaussian", "eva", "orthogonal")

_LORA_FIELDS = (
    "r",
    "lora_alpha",
    "lora_dropout",
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "rank_pattern",
    "alpha_pattern",
    "use_rslora",
    "use_dora",
    "init_lora_weights",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
)
# shape of the base and reparameterisation in the prompt family: the exported tensor has all that counts
_VIRTUAL_FIELDS = (
    "num_virtual_tokens",
    "token_dim",
    "num_attention_heads",
    "num_layers",
    "prefix_projection",
    "init_weights",
    "encoder_hidden_size",
    "encoder_reparameterization_type",
    "encoder_num_layers",
    "encoder_dropout",
    "prompt_tuning_init",
    "prompt_tuning_init_text",
    "tokenizer_name_or_path",
    "tokenizer_kwargs",
)
_VIRTUAL_NEUTRAL: dict[str, Any] = {"num_transformer_submodules": 1, "modules_to_save": None}
_BOTTLENECK_FIELDS = (
    "variant",
    "reduction_factor",
    "bottleneck_size",
    "non_linearity",
    "scaling",
    "ln_before",
    "layers_to_transform",
)
# our names of the settings that HF PEFT calls otherwise
_THEIR_NAMES = {
    "alpha": "lora_alpha",
    "dropout": "lora_dropout",
    "targets": "target_modules",
    "exclude": "exclude_modules",
    "encoder": "encoder_reparameterization_type",
}
PEFT_TYPES = ("LORA", "PREFIX_TUNING", "P_TUNING", "PROMPT_TUNING", "BOTTLENECK")
_BASE_FIELDS = ("peft_type", "base_model_name_or_path", *_COMMON)


def to_peft(config: AnyConfig, base: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `adapter_config.json`.

    `base` is what a record says of the base (`id`, and for the prompt family its `layers`, `kv_heads` and `heads`);
    `tensors` (PEFT key → tensor) say which layers "all-linear" came to.
    """
    common = {**_COMMON, "base_model_name_or_path": base.get("id")}
    if isinstance(config, LoraConfig):
        return {
            **common,
            **_LORA_NEUTRAL,
            **_LORA_IGNORED,
            "peft_type": "LORA",
            "r": config.r,
            "lora_alpha": _number(config.alpha),
            "lora_dropout": config.dropout,
            "target_modules": _target_modules(config, tensors),
            "exclude_modules": config.exclude or None,
            "layers_to_transform": config.layers_to_transform,
            "layers_pattern": None,
            "rank_pattern": dict(config.rank_pattern),
            "alpha_pattern": {key: _number(value) for key, value in config.alpha_pattern.items()},
            "use_rslora": config.variant == "rslora",
            "use_dora": config.variant == "dora",
            "init_lora_weights": True,
            "lora_bias": config.lora_bias,
            "modules_to_save": config.modules_to_save or None,
            "trainable_token_indices": config.trainable_token_indices,
        }
    if isinstance(config, BottleneckConfig):
        return {**common, "peft_type": "BOTTLENECK", **config.model_dump(include=set(_BOTTLENECK_FIELDS))}
    (embeddings,) = tensors.values()
    return {**common, **_VIRTUAL_NEUTRAL, **_virtual_tokens(config, base, int(embeddings.shape[1]))}


def _virtual_tokens(
    config: PromptTuningConfig | PTuningConfig | PrefixTuningConfig | PTuningV2Config,
    base: Mapping[str, Any],
    width: int,
) -> dict[str, Any]:
    """Fields of the prompt family. How the tokens began no longer matters; TEXT would have PEFT ask for a tokenizer."""
    fields: dict[str, Any] = {
        "num_virtual_tokens": config.num_virtual_tokens,
        "num_layers": base.get("layers"),
        "num_attention_heads": base.get("heads"),
        "token_dim": width,
    }
    match config:
        case PromptTuningConfig():
            start = {"prompt_tuning_init": "RANDOM", "prompt_tuning_init_text": None}
            return {
                **fields,
                "peft_type": "PROMPT_TUNING",
                **start,
                "tokenizer_name_or_path": None,
                "tokenizer_kwargs": None,
            }
        case PTuningConfig():
            return {
                **fields,
                "peft_type": "P_TUNING",
                "encoder_reparameterization_type": config.encoder.upper(),
                "encoder_hidden_size": config.encoder_hidden_size or width,
                "encoder_num_layers": config.encoder_num_layers,
                "encoder_dropout": config.encoder_dropout,
            }
        case _:
            layers = base.get("layers")
            projection = isinstance(config, PrefixTuningConfig)
            return {
                **fields,
                "peft_type": "PREFIX_TUNING",
                "token_dim": width // (2 * layers) if layers else None,
                "num_attention_heads": base.get("kv_heads"),
                "prefix_projection": projection,
                "encoder_hidden_size": (config.encoder_hidden_size if projection else None) or base.get("hidden_size"),
                "init_weights": None,
            }


def from_peft(fields: Mapping[str, Any], where: str) -> AnyConfig:
    """The method config of an `adapter_config.json`; `where` is named in errors.

    Raises UnsupportedError for a feature that can't be honoured, AdapterError for a missing or wrong field.
    """
    peft_type, base = fields.get("peft_type"), fields.get("base_model_name_or_path")
    if not isinstance(base, str | None):
        raise AdapterError(
            f"{where}: base_model_name_or_path must be a name or path, not {base!r}", field="base_model_name_or_path"
        )
    if peft_type is None:
        raise AdapterError(f"{where}: peft_type is missing", field="peft_type")
    if peft_type not in PEFT_TYPES:
        hint = did_you_mean(str(peft_type), PEFT_TYPES)
        raise UnsupportedError(
            f"{where}: peft_type {peft_type} isn't one of {', '.join(PEFT_TYPES)}{hint}", field="peft_type"
        )
    if peft_type == "LORA":
        return _lora(fields, where)
    if peft_type == "BOTTLENECK":
        _refuse_unknown(fields, (*_BASE_FIELDS, *_BOTTLENECK_FIELDS), where)
        return _validated(
            BottleneckConfig, {name: fields[name] for name in _BOTTLENECK_FIELDS if name in fields}, where
        )
    _refuse_unknown(fields, (*_BASE_FIELDS, *_VIRTUAL_FIELDS, *_VIRTUAL_NEUTRAL), where)
    _refuse_not_neutral(fields, _VIRTUAL_NEUTRAL, where)
    settings: dict[str, Any] = {"num_virtual_tokens": fields.get("num_virtual_tokens")}
    if peft_type == "PROMPT_TUNING":
        return _validated(PromptTuningConfig, settings, where)
    if peft_type == "PREFIX_TUNING" and not fields.get("prefix_projection"):
        return _validated(PTuningV2Config, settings, where)
    settings["encoder_hidden_size"] = fields.get("encoder_hidden_size")
    if peft_type == "PREFIX_TUNING":
        return _validated(PrefixTuningConfig, settings, where)
    settings["encoder"] = str(fields.get("encoder_reparameterization_type", "MLP")).lower()
    for name in ("encoder_num_layers", "encoder_dropout"):
        if fields.get(name) is not None:
            settings[name] = fields[name]
    return _validated(PTuningConfig, settings, where)


def _lora(fields: Mapping[str, Any], where: str) -> LoraConfig:
    _refuse_unknown(fields, (*_BASE_FIELDS, *_LORA_FIELDS, *_LORA_NEUTRAL, *_LORA_IGNORED), where)
    _refuse_not_neutral(fields, _LORA_NEUTRAL, where)
    init = fields.get("init_lora_weights", True)
    if init not in _PLAIN_INITS:
        raise UnsupportedError(
            f"{where}: init_lora_weights '{init}' changed the base in training: convert it to a plain LoRA first",
            field="init_lora_weights",
        )
    if fields.get("layers_pattern") not in (None, "layers", ["layers"], []):
        raise UnsupportedError(f"{where}: layers_pattern can't be honoured", field="layers_pattern")
    if fields.get("use_rslora") and fields.get("use_dora"):
        raise UnsupportedError(f"{where}: use_dora with use_rslora can't be honoured", field="use_dora")
    variant = "rslora" if fields.get("use_rslora") else "dora" if fields.get("use_dora") else "plain"
    layers = fields.get("layers_to_transform")
    settings: dict[str, Any] = {
        "r": fields.get("r"),
        "alpha": fields.get("lora_alpha"),
        "dropout": fields.get("lora_dropout") or 0.0,
        "targets": fields.get("target_modules"),
        "exclude": fields.get("exclude_modules") or [],
        "layers_to_transform": [layers] if isinstance(layers, int) else layers,
        "rank_pattern": fields.get("rank_pattern") or {},
        "alpha_pattern": fields.get("alpha_pattern") or {},
        "variant": variant,
        "lora_bias": fields.get("lora_bias") or False,
        "modules_to_save": fields.get("modules_to_save") or [],
        "trainable_token_indices": fields.get("trainable_token_indices") or None,
    }
    return _validated(LoraConfig, settings, where)


def _validated(kind: type[_Config], settings: dict[str, Any], where: str) -> _Config:
    try:
        return kind(**settings)
    except ValidationError as error:
        first = error.errors()[0]
        message = first["msg"].removeprefix("Value error, ")
        if not first["loc"]:  # of several fields, which the message names
            raise AdapterError(f"{where}: {message}") from error
        field = _THEIR_NAMES.get(str(first["loc"][0]), str(first["loc"][0]))
        raise AdapterError(f"{where}: {field}: {message}, not {str(first['input'])[:80]!r}", field=field) from error


def _refuse_not_neutral(fields: Mapping[str, Any], neutral: Mapping[str, Any], where: str) -> None:
    for name, wanted in neutral.items():
        value = fields.get(name, wanted)
        if value != wanted and value not in (None, False, [], {}):
            raise UnsupportedError(f"{where}: {name} is {value!r}, which can't be honoured", field=name)


def _refuse_unknown(fields: Mapping[str, Any], known: tuple[str, ...], where: str) -> None:
    for name, value in fields.items():
        if name not in known and value not in (None, False, [], {}):
            hint = did_you_mean(name, known)
            raise UnsupportedError(
                f"{where}: field '{name}' isn't known, so its effect can't be honoured{hint}", field=name
            )


def _target_modules(config: LoraConfig, tensors: Mapping[str, Any]) -> list[str] | str:
    if config.targets != "all-linear":
        return config.targets if isinstance(config.targets, str) else sorted(set(config.targets))
    return sorted({key.split(".lora_")[0].rsplit(".", 1)[-1] for key in tensors if ".lora_" in key})


def _number(value: float) -> float | int:
    return int(value) if float(value).is_integer() else value
