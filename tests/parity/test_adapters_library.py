"""The `adapters` library's files and logits, recorded by reference/adapters/record.py, beside ours."""

import json
import logging
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from peftkit.artifact import (
    Artifact,
    load_adapter,
    read_adapter,
    read_adapters_library,
    save_adapter,
    write_adapters_library,
)
from peftkit.artifact.adapters_library import to_adapters_library
from peftkit.cli.main import run
from peftkit.errors import AdapterError, BaseMismatchError, InputError, UnsupportedError
from peftkit.merge import export_adapters, named_base
from peftkit.methods import BottleneckConfig, LoraConfig, attach, attached
from peftkit.methods.bottleneck import Variant

REFERENCE = Path(__file__).parent / "reference" / "adapters"
CASES = sorted(path.parent.name for path in REFERENCE.glob("*/adapter_config.json"))
FAMILIES = sorted({case.split("-")[0] for case in CASES})
EVERY_PART = "llama-houlsby-norm-gelu"
"""The case whose adapters stand in both places and have every tensor."""


def tiny_model(family: str) -> PreTrainedModel:
    """The recorded base; each family takes the weights that it has."""
    config = AutoConfig.for_model(family, **json.loads((REFERENCE / "base.json").read_text()))
    model = AutoModelForCausalLM.from_config(config).eval()
    weights = safetensors.torch.load_file(REFERENCE / "base.safetensors")
    model.load_state_dict({name: weights[name] for name in model.state_dict()})
    return model


def recorded(name: str) -> Tensor:
    return safetensors.torch.load_file(REFERENCE / "logits.safetensors")[name]


def logits_of(model: PreTrainedModel) -> Tensor:
    with torch.no_grad():
        return model(input_ids=recorded("input_ids")).logits


def fields_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "adapter_config.json").read_text())


def assert_same_tensors(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name


def saved_again(case: str, folder: Path) -> Artifact:
    """A recorded adapter as our own folder."""
    return save_adapter(load_adapter(tiny_model(case.split("-")[0]), REFERENCE / case), folder)


def random_adapter(config: BottleneckConfig, folder: Path) -> Artifact:
    model = attach(tiny_model("llama"), config)
    for parameter in attached(model)[0].parameters().values():
        torch.nn.init.normal_(parameter)
    return save_adapter(model, folder)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_bare_base_computes_what_was_recorded(family: str) -> None:
    torch.testing.assert_close(logits_of(tiny_model(family)), recorded(family), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_the_librarys_adapter_computes_what_the_library_computed(case: str) -> None:
    family = case.split("-")[0]
    assert (recorded(case) - recorded(family)).abs().max() > 1, "the adapter must count"
    ours = logits_of(load_adapter(tiny_model(family), REFERENCE / case))
    torch.testing.assert_close(ours, recorded(case), rtol=0, atol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_our_export_is_what_the_library_itself_saved(case: str, tmp_path: Path) -> None:
    artifact = saved_again(case, tmp_path / "ours")
    write_adapters_library(tmp_path / "out", artifact, name="foo", base_name=fields_of(REFERENCE / case)["model_name"])
    ours, theirs = fields_of(tmp_path / "out"), fields_of(REFERENCE / case)
    # several factors come to the same size
    factors = [fields["config"].pop("reduction_factor") for fields in (ours, theirs)]
    assert len({int(32 // factor) for factor in factors}) == 1
    # our folder doesn't keep what only steers training
    assert (ours["config"].pop("dropout"), theirs["config"].pop("dropout")) in ((0.0, 0.0), (0.0, 0.1))
    assert ours == theirs
    read = [
        safetensors.torch.load_file(folder / "adapter.safetensors") for folder in (tmp_path / "out", REFERENCE / case)
    ]
    assert_same_tensors(*read)


@pytest.mark.parametrize("variant", ["houlsby", "pfeiffer", "parallel"])
@pytest.mark.parametrize("settings", [{}, {"ln_before": True, "layers_to_transform": [1], "scaling": 3}])
def test_an_exported_adapter_reads_back_as_itself(
    seed: int, variant: Variant, settings: dict[str, Any], tmp_path: Path
) -> None:
    artifact = random_adapter(BottleneckConfig(variant=variant, **settings), tmp_path / "ours")
    export_adapters(tmp_path / "ours", tmp_path / "out", name="other-name")
    back = read_adapter(tmp_path / "out", config=tiny_model("llama").config)
    assert back.uid == artifact.uid and back.record == {}
    assert_same_tensors(back.tensors, artifact.tensors)
    assert back.config.identity() == artifact.config.identity()


def test_any_bottleneck_size_survives_the_librarys_reduction_factor(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(2000):
        hidden = rng.randint(1, 8192)
        size = rng.randint(1, 2 * hidden)
        config = BottleneckConfig(bottleneck_size=size)
        base = {"model_type": "llama", "layers": 1}
        tensors = {
            name: torch.empty(shape, device="meta") for name, shape in config.expected_tensors(1, hidden).items()
        }
        fields, _ = to_adapters_library(config, tensors, base, "foo")
        assert int(hidden // fields["config"]["reduction_factor"]) == size, (hidden, size)


@pytest.mark.parametrize(("hidden", "factor"), [(32, 3.2), (576, 16), (100, 16), (7, 16), (30, 0.1 * 3 / 0.1)])
def test_a_reduction_factor_comes_to_the_librarys_size(hidden: int, factor: float) -> None:
    config = BottleneckConfig(reduction_factor=factor).resolved(hidden)
    assert config.bottleneck_size == max(1, int(hidden // factor))


def test_our_folder_may_give_a_factor_in_place_of_a_size(seed: int, tmp_path: Path) -> None:
    artifact = random_adapter(BottleneckConfig(), tmp_path / "ours")
    (tmp_path / "ours" / "peftkit.json").unlink()
    fields = {**fields_of(tmp_path / "ours"), "bottleneck_size": None, "reduction_factor": 16, "non_linearity": None}
    (tmp_path / "ours" / "adapter_config.json").write_text(json.dumps(fields))
    assert read_adapter(tmp_path / "ours").uid == artifact.uid


def test_keys_of_a_trunk_saved_without_its_head_are_read(tmp_path: Path) -> None:
    folder = shutil.copytree(REFERENCE / EVERY_PART, tmp_path / "trunk")
    tensors = safetensors.torch.load_file(folder / "adapter.safetensors")
    trunk = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(trunk, folder / "adapter.safetensors")
    assert_same_tensors(read_adapters_library(folder)[1], read_adapters_library(REFERENCE / EVERY_PART)[1])


def test_a_head_beside_the_adapter_is_named_and_left(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read_adapter(REFERENCE / "llama-houlsby")
    assert "model_head.safetensors" in caplog.text
    caplog.clear()
    read_adapter(REFERENCE / "llama-pfeiffer")
    assert not caplog.text


def test_the_base_is_named_as_the_library_names_it() -> None:
    assert named_base(read_adapter(REFERENCE / "qwen2-parallel")) == "tiny/qwen2"


def test_another_family_is_another_base() -> None:
    with pytest.raises(BaseMismatchError, match=r"llama base, not for mistral"):
        load_adapter(tiny_model("mistral"), REFERENCE / "llama-pfeiffer")


REFUSED_SETTINGS: list[tuple[str, Any]] = [
    ("adapter_residual_before_ln", True),
    ("architecture", "lora"),
    ("architecture", "union"),
    ("cross_adapter", True),
    ("inv_adapter", "nice"),
    ("is_parallel", True),  # with adapters at the attention too
    ("ln_after", True),
    ("ln_before", "perhaps"),
    ("mh_adapter", False),  # houlsby at the feed-forward alone
    ("non_linearity", "leakyrelu"),
    ("non_linearity", None),
    ("original_ln_after", False),
    ("original_ln_before", True),
    ("output_adapter", False),
    ("phm_layer", True),
    ("reduction_factor", {"0": 8, "default": 4}),
    ("reduction_factor", 0),
    ("residual_before_ln", False),
    ("residual_before_ln", "post_add"),
    ("scaling", "channel"),
    ("scaling", "learned"),
    ("use_gating", True),
    ("use_something_new", True),
]


@pytest.mark.parametrize(("field", "value"), REFUSED_SETTINGS)
def test_a_setting_that_cannot_be_honoured_is_refused_by_name(field: str, value: Any, tmp_path: Path) -> None:
    folder = shutil.copytree(REFERENCE / EVERY_PART, tmp_path / "refused")
    fields = fields_of(folder)
    fields["config"][field] = value
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    with pytest.raises(UnsupportedError, match=field) as refusal:
        read_adapter(folder)
    assert refusal.value.field is not None and str(folder) in str(refusal.value)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("model_type", "bert", UnsupportedError),
        ("version", "3.2.1", UnsupportedError),
        ("version", None, UnsupportedError),
        ("name", None, AdapterError),
        ("name", "bar", UnsupportedError),
        ("hidden_size", 64, AdapterError),
        ("hidden_size", None, AdapterError),
        ("config", None, AdapterError),
    ],
)
def test_a_folder_that_is_not_what_it_says_is_refused(
    field: str, value: Any, error: type[AdapterError], tmp_path: Path
) -> None:
    folder = shutil.copytree(REFERENCE / EVERY_PART, tmp_path / "refused")
    (folder / "adapter_config.json").write_text(json.dumps({**fields_of(folder), field: value}))
    with pytest.raises(error, match=str(folder)):
        read_adapter(folder)


def with_tensors(folder: Path, change: dict[str, Tensor | None]) -> Path:
    copy = shutil.copytree(REFERENCE / EVERY_PART, folder)
    tensors: dict[str, Tensor | None] = {**safetensors.torch.load_file(copy / "adapter.safetensors"), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    safetensors.torch.save_file(kept, copy / "adapter.safetensors")
    return copy


ATTENTION = "model.layers.0.attention_adapters.adapters.foo."


@pytest.mark.parametrize(
    ("key", "tensor", "message"),
    [
        (ATTENTION + "adapter_up.bias", None, "missing"),
        (ATTENTION + "adapter_norm_before.bias", None, "missing"),
        (ATTENTION + "adapter_norm_before.bias", torch.zeros(32), "two copies"),
        (ATTENTION + "adapter_up.bias", torch.zeros(31), r"shape \[31\]"),
        (ATTENTION + "adapter_up.bias", torch.full((32,), float("nan")), "finite"),
        (ATTENTION + "gate.weight", torch.zeros(1, 32), "match nothing"),
        (ATTENTION.replace("foo", "bar") + "adapter_up.bias", torch.zeros(32), "isn't a tensor of"),
        ("model.layers.0.self_attn.q_proj.loras.foo.lora_A", torch.zeros(2, 32), "isn't a tensor of"),
        ("model.invertible_adapters.foo.F.0.weight", torch.zeros(2, 16), "isn't a tensor of"),
        ("bert.encoder.layer.0.output.adapters.foo.adapter_up.bias", torch.zeros(32), "isn't a tensor of"),
    ],
)
def test_tensors_that_are_not_the_adapters_are_refused_by_key(
    key: str, tensor: Tensor | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(AdapterError, match=message) as refusal:
        read_adapter(with_tensors(tmp_path / "refused", {key: tensor}))
    # values are looked at under our own keys
    assert key in str(refusal.value) or message == "finite"


def test_a_missing_last_layer_is_seen_beside_the_base(tmp_path: Path) -> None:
    names = safetensors.torch.load_file(REFERENCE / EVERY_PART / "adapter.safetensors")
    folder = with_tensors(tmp_path / "cut", {name: None for name in names if ".layers.1." in name})
    with pytest.raises(AdapterError, match="missing"):
        load_adapter(tiny_model("llama"), folder)


def test_a_pickled_file_is_refused_with_the_command_that_converts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = shutil.copytree(REFERENCE / EVERY_PART, tmp_path / "pickled")
    tensors = safetensors.torch.load_file(folder / "adapter.safetensors")
    for name in [name for name in tensors if "adapter_norm_before" in name]:
        tensors[name.replace("adapter_norm_before", "adapter_down.0")] = tensors[name]  # one storage, as in the library
    torch.save(tensors, folder / "pytorch_adapter.bin")
    (folder / "adapter.safetensors").unlink()
    with pytest.raises(AdapterError, match=r"pytorch_adapter\.bin") as refusal:
        read_adapter(folder)
    monkeypatch.chdir(folder)
    exec(str(refusal.value).split("python -c '")[1].rstrip("'"), {})
    assert_same_tensors(read_adapter(folder).tensors, read_adapter(REFERENCE / EVERY_PART).tensors)


def test_a_fusion_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(REFERENCE / EVERY_PART, tmp_path / "fused")
    (folder / "adapter_fusion_config.json").write_text("{}")
    with pytest.raises(UnsupportedError, match="fusion"):
        read_adapter(folder)


def test_an_interface_that_places_adapters_elsewhere_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(REFERENCE / "qwen3-pfeiffer", tmp_path / "elsewhere")
    content = json.loads((folder / "adapter_interface.json").read_text())
    content["interface"]["layer_pre_ffn"] = "mlp"
    (folder / "adapter_interface.json").write_text(json.dumps(content))
    with pytest.raises(UnsupportedError, match="layer_pre_ffn is 'mlp'"):
        read_adapter(folder)


def test_a_fields_absence_is_the_librarys_default(tmp_path: Path) -> None:
    folder = shutil.copytree(REFERENCE / "llama-houlsby", tmp_path / "short")
    fields = fields_of(folder)
    needed = ("mh_adapter", "output_adapter", "reduction_factor", "non_linearity")
    fields["config"] = {name: fields["config"][name] for name in needed}
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    assert read_adapter(folder).uid == read_adapter(REFERENCE / "llama-houlsby").uid


@pytest.mark.parametrize("name", ["", "a.b", "a,b", "items"])
def test_a_name_that_the_library_cannot_use_is_refused(seed: int, name: str, tmp_path: Path) -> None:
    random_adapter(BottleneckConfig(), tmp_path / "ours")
    with pytest.raises(InputError, match="name"):
        export_adapters(tmp_path / "ours", tmp_path / "out", name=name)
    assert not (tmp_path / "out").exists()


def test_another_method_is_refused(tmp_path: Path) -> None:
    save_adapter(attach(tiny_model("llama"), LoraConfig(r=2)), tmp_path / "lora")
    with pytest.raises(UnsupportedError, match="not lora"):
        export_adapters(tmp_path / "lora", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_record_without_the_base_is_refused(seed: int, tmp_path: Path) -> None:
    random_adapter(BottleneckConfig(), tmp_path / "ours")
    (tmp_path / "ours" / "peftkit.json").unlink()
    with pytest.raises(AdapterError, match="model_type and layers"):
        export_adapters(tmp_path / "ours", tmp_path / "out")


def test_the_command_exports_for_the_library(seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    artifact = random_adapter(BottleneckConfig(variant="parallel"), tmp_path / "ours")
    argv = ["export", tmp_path / "ours", "--out", tmp_path / "out", "--format", "adapters", "--base-name", "org/model"]
    assert run(list(map(str, argv))) == 0, capsys.readouterr().err
    assert "use_safetensors=True" in capsys.readouterr().out
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["adapter.safetensors", "adapter_config.json"]
    assert fields_of(tmp_path / "out")["model_name"] == "org/model"
    assert read_adapter(tmp_path / "out").uid == artifact.uid
