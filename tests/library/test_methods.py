"""LoRA and prompt tuning on tiny random models: what attach promises, and what it refuses."""

from typing import Any, Literal

import pytest
import torch
from pydantic import ValidationError
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM, PreTrainedModel

from peftkit.errors import AdapterError, InputError, UnsupportedError
from peftkit.methods import (
    BottleneckConfig,
    LoraConfig,
    LoraSite,
    MethodConfig,
    PrefixTuningConfig,
    PromptTuningConfig,
    PTuningConfig,
    PTuningV2Config,
    attach,
    attached,
    detach,
)
from peftkit.methods.lora_layers import LoraLinear
from peftkit.methods.method import base_shapes, matrices

CONFIGS = [
    LoraConfig(r=4, alpha=8),
    LoraConfig(r=4, alpha=8, variant="dora"),
    LoraConfig(r=4, alpha=8, init="pissa"),
    LoraConfig(r=4, alpha=8, init="pissa", variant="dora", targets=["q_proj", "embed_tokens"]),
    LoraConfig(r=4, alpha=8, targets=["embed_tokens", "v_proj"]),
    LoraConfig(r=4, alpha=8, targets=["lm_head", "embed_tokens"], variant="dora"),
    LoraConfig(r=4, alpha=8, targets=["lm_head", "o_proj"], lora_bias=True, variant="rslora"),
    LoraConfig(r=4, alpha=8, modules_to_save=["lm_head", "norm"]),
    LoraConfig(r=4, alpha=8, targets=["k_proj"], modules_to_save=["embed_tokens", "1.mlp.up_proj"]),
    LoraConfig(r=4, alpha=8, trainable_token_indices=[7, 2, 96]),
    LoraConfig(r=4, alpha=8, trainable_token_indices={"lm_head": [5, 3], "embed_tokens": [4]}),
    BottleneckConfig(bottleneck_size=6),
    BottleneckConfig(variant="pfeiffer", bottleneck_size=6, ln_before=True, layers_to_transform=[1]),
    BottleneckConfig(variant="parallel", bottleneck_size=6),
    PrefixTuningConfig(num_virtual_tokens=5),
    PTuningV2Config(num_virtual_tokens=5),
    PTuningConfig(num_virtual_tokens=5),
    PTuningConfig(num_virtual_tokens=5, encoder="lstm", encoder_hidden_size=8),
    PromptTuningConfig(num_virtual_tokens=5),
]


_ELSEWHERE = ("lora_bias", "modules_to_save", "trainable_token_indices")


def name_of(config: MethodConfig) -> str:
    parts = [str(getattr(config, field)) for field in ("variant", "encoder") if hasattr(config, field)]
    if isinstance(config, LoraConfig):
        used = config.model_dump(include={"init", "targets", *_ELSEWHERE}, exclude_defaults=True)
        parts += [str(value) for value in used.values()]
    return "-".join([config.kind, *parts])


@pytest.fixture
def model(seed: int) -> PreTrainedModel:
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def randomise(model: PreTrainedModel) -> None:
    """Gives every adapter weight a value that shows in the logits."""
    for method in attached(model):
        for parameter in method.parameters().values():
            torch.nn.init.normal_(parameter, std=0.3)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_only_adapter_weights_require_grad_and_receive_one(model: PreTrainedModel, config: MethodConfig) -> None:
    attach(model, config, seed=3)
    randomise(model)
    ids = torch.stack([torch.randperm(97).repeat(2)[:120] for _ in range(2)])  # every token, and not only at the end
    model(input_ids=ids, labels=ids).loss.backward()
    (method,) = attached(model)
    ours = {id(parameter) for parameter in method.parameters().values()}
    assert {id(parameter) for parameter in model.parameters() if parameter.requires_grad} == ours
    assert all(
        parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in method.parameters().values()
    )


@pytest.mark.parametrize("config", [one for one in CONFIGS if one.kind in ("lora", "bottleneck")], ids=name_of)
def test_a_method_in_the_layers_starts_at_the_base(model: PreTrainedModel, config: MethodConfig) -> None:
    ids = torch.randint(1, 97, (2, 9))
    before = model(input_ids=ids).logits
    after = attach(model, config, seed=1)(input_ids=ids).logits
    is_exact = not isinstance(config, LoraConfig) or (
        config.variant != "dora" and config.init == "default" and not config.trainable_token_indices
    )
    torch.testing.assert_close(after, before, atol=0 if is_exact else 2e-6, rtol=0)


@pytest.mark.parametrize("bias", [False, True])
def test_dora_equals_its_formula_on_the_dense_weight(seed: int, bias: bool) -> None:
    site = LoraSite(r=3, scale=1.7, out_features=11, in_features=7)
    base = torch.nn.Linear(7, 11, bias=bias).requires_grad_(False)
    layer = LoraLinear(base, site, LoraConfig(r=3, variant="dora"), torch.Generator().manual_seed(seed))
    assert layer.lora_magnitude_vector is not None
    for parameter in layer.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter)
    updated = base.weight.double() + 1.7 * (layer.lora_B.double() @ layer.lora_A.double())
    norms = updated.norm(dim=1)
    torch.testing.assert_close(layer.row_norms().double(), norms, atol=1e-5, rtol=1e-5)
    x = torch.randn(5, 7)
    weight = updated * (layer.lora_magnitude_vector.double() / norms)[:, None]
    expected = x.double() @ weight.T + (base.bias.double() if bias else 0)
    torch.testing.assert_close(layer(x).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_detach_gives_the_base_back_bit_for_bit(model: PreTrainedModel, config: MethodConfig) -> None:
    ids = torch.randint(1, 97, (2, 9))
    before, names = model(input_ids=ids).logits, sorted(model.state_dict())
    attach(model, config)
    randomise(model)
    assert not torch.equal(model(input_ids=ids).logits, before)
    detach(model)
    assert torch.equal(model(input_ids=ids).logits, before)
    assert sorted(model.state_dict()) == names
    assert attached(model) == []


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_one_seed_gives_one_start(model: PreTrainedModel, config: MethodConfig) -> None:
    first = attached(attach(model, config, seed=7))[0].export()
    second = attached(attach(detach(model), config, seed=7))[0].export()
    other = attached(attach(detach(model), config, seed=8))[0].export()
    assert all(torch.equal(first[key], second[key]) for key in first)
    assert any(not torch.equal(first[key], other[key]) for key in first)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_left_padded_batch_equals_each_sequence_alone(model: PreTrainedModel, config: MethodConfig) -> None:
    randomise(attach(model, config))
    model.double()  # the two ways differ by rounding alone, which large random weights multiply by up to a thousand
    short, long = torch.randint(1, 97, (1, 4)), torch.randint(1, 97, (1, 11))
    ids = torch.cat([torch.cat([torch.zeros(1, 7, dtype=torch.long), short], 1), long])
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    batch = model(input_ids=ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(batch[0, 7:], model(input_ids=short).logits[0], atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(batch[1], model(input_ids=long).logits[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_generation_equals_teacher_forced_forward(model: PreTrainedModel, config: MethodConfig) -> None:
    randomise(attach(model, config))
    model.double()  # as above
    lengths, width, new = [3, 8], 8, 12
    ids = torch.randint(1, 97, (2, width))
    mask = torch.ones_like(ids)
    mask[0, : width - lengths[0]] = 0
    out = model.generate(
        input_ids=ids * mask,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
    )
    for row, length in enumerate(lengths):
        alone = out.sequences[row : row + 1, width - length :]
        forced = model(input_ids=alone).logits[0, length - 1 : -1]
        stepwise = torch.stack([step[row] for step in out.logits]).double()  # generate gives them in float32
        torch.testing.assert_close(stepwise, forced, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_gradient_checkpointing_changes_neither_loss_nor_gradients(
    model: PreTrainedModel, config: MethodConfig
) -> None:
    randomise(attach(model, config))
    ids = torch.randint(1, 97, (2, 9))

    def loss_and_grads() -> tuple[torch.Tensor, list[torch.Tensor]]:
        model.zero_grad()
        loss = model.train()(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        return loss, [p.grad.clone() for p in attached(model)[0].parameters().values() if p.grad is not None]

    plain = loss_and_grads()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    checkpointed = loss_and_grads()
    assert torch.equal(plain[0], checkpointed[0])
    assert len(plain[1]) == len(checkpointed[1]) > 0
    assert all(torch.equal(a, b) for a, b in zip(plain[1], checkpointed[1], strict=True))


def test_logits_are_for_the_text_alone(model: PreTrainedModel) -> None:
    attach(model, PromptTuningConfig(num_virtual_tokens=5))
    assert model(input_ids=torch.randint(1, 97, (3, 7))).logits.shape == (3, 7, 97)


def test_prompt_tuning_equals_embeddings_put_in_front_by_hand(model: PreTrainedModel) -> None:
    ids = torch.randint(1, 97, (2, 6))
    attach(model, PromptTuningConfig(num_virtual_tokens=4))
    randomise(model)
    ours = model(input_ids=ids).logits
    prompt = attached(model)[0].export()["prompt_embeddings"]
    detach(model)
    embeds = torch.cat([prompt.expand(2, -1, -1), model.get_input_embeddings()(ids)], 1)
    torch.testing.assert_close(ours, model(inputs_embeds=embeds).logits[:, 4:], atol=1e-5, rtol=1e-4)


class Tokenizer:
    """Has three tokens for any text."""

    def __call__(self, text: str, add_special_tokens: bool) -> "Tokenizer":
        assert not add_special_tokens
        self.input_ids = [5, 6, 7]
        return self


@pytest.mark.parametrize("config", [PromptTuningConfig(num_virtual_tokens=5), PTuningConfig(num_virtual_tokens=5)])
@pytest.mark.parametrize(
    "other",
    [
        LoraConfig(r=4, targets=["embed_tokens"]),
        LoraConfig(targets=["q_proj"], modules_to_save=["embed_tokens"]),
        LoraConfig(targets=["q_proj"], trainable_token_indices=[3, 9]),
    ],
    ids=name_of,
)
def test_an_embedding_adapted_after_a_soft_prompt_counts_as_one_adapted_before(
    model: PreTrainedModel, config: MethodConfig, other: LoraConfig
) -> None:
    ids = torch.randperm(97)[None]
    logits = []
    for pair in ((config, other), (other, config)):
        for one in pair:
            attach(model, one)
        for method in sorted(attached(model), key=lambda method: method.kind):
            torch.manual_seed(0)
            for _, parameter in sorted(method.parameters().items()):
                torch.nn.init.normal_(parameter, std=0.3)
        logits.append(model(input_ids=ids).logits)
        detach(model)
    torch.testing.assert_close(*logits, rtol=0, atol=0)


@pytest.mark.parametrize("encoder", ["mlp", "lstm", None])
def test_text_init_takes_the_texts_own_embeddings(model: PreTrainedModel, encoder: Literal["mlp", "lstm"]) -> None:
    text: dict[str, Any] = {"num_virtual_tokens": 5, "init_text": "some words"}
    config = PTuningConfig(**text, encoder=encoder) if encoder else PromptTuningConfig(**text)
    assert config.init == "text"
    attach(model, config, tokenizer=Tokenizer())  # type: ignore[arg-type]
    expected = model.get_input_embeddings().weight[[5, 6, 7, 5, 6]]
    assert torch.equal(attached(model)[0].export()["prompt_embeddings"], expected)


def test_text_init_needs_text_and_a_tokenizer(model: PreTrainedModel) -> None:
    with pytest.raises(ValidationError, match="init_text"):
        PromptTuningConfig(init="text")
    with pytest.raises(ValidationError, match="init_text"):
        PromptTuningConfig(init="random", init_text="words")
    with pytest.raises(InputError, match="tokenizer"):
        attach(model, PromptTuningConfig(init_text="words"))


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        (
            {"targets": ["q_proj", "layers.1.mlp.up_proj"]},
            {"0.self_attn.q_proj", "1.self_attn.q_proj", "1.mlp.up_proj"},
        ),
        ({"targets": r".*\.0\..*(k|v)_proj"}, {"0.self_attn.k_proj", "0.self_attn.v_proj"}),
        ({"targets": ["q_proj", "o_proj"], "exclude": ["o_proj"]}, {"0.self_attn.q_proj", "1.self_attn.q_proj"}),
        ({"targets": ["q_proj"], "layers_to_transform": [1]}, {"1.self_attn.q_proj"}),
    ],
)
def test_targets_pick_the_layers_they_name(
    model: PreTrainedModel, settings: dict[str, object], expected: set[str]
) -> None:
    sites = LoraConfig(**settings).resolve(matrices(base_shapes(model)))  # type: ignore[arg-type]
    assert {path.removeprefix("model.layers.") for path in sites} == expected


def test_all_linear_takes_every_decoder_layer_and_not_the_output_embedding(model: PreTrainedModel) -> None:
    sites = LoraConfig().resolve(matrices(base_shapes(model)))
    assert len(sites) == 2 * 7 and "lm_head" not in sites


def test_the_first_matching_pattern_wins_and_scales_follow_the_variant(model: PreTrainedModel) -> None:
    patterns = {"rank_pattern": {"q_proj": 4, "layers.1.self_attn.q_proj": 8}, "alpha_pattern": {"v_proj": 2.0}}
    sites = LoraConfig(r=16, alpha=32, **patterns).resolve(matrices(base_shapes(model)))  # type: ignore[arg-type]
    rs = LoraConfig(r=16, alpha=32, variant="rslora", **patterns).resolve(matrices(base_shapes(model)))  # type: ignore[arg-type]
    q1, v0, k0 = (f"model.layers.{name}_proj" for name in ("1.self_attn.q", "0.self_attn.v", "0.self_attn.k"))
    assert [(sites[p].r, sites[p].scale) for p in (q1, v0, k0)] == [(4, 8.0), (16, 0.125), (16, 2.0)]
    assert [rs[p].scale for p in (q1, v0, k0)] == [16.0, 0.5, 8.0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"targets": ["q_proj", "v_prj"]}, "'v_prj' matches no module.*did you mean 'v_proj'"),
        ({"targets": ["q_proj"], "exclude": ["nothing"]}, "exclude: 'nothing'"),
        ({"targets": "nothing.*"}, "targets: 'nothing"),
        ({"targets": "q_proj"}, r"a string is a regular expression .* write \['q_proj'\]"),
        ({"targets": "all_linear"}, "did you mean 'all-linear'"),
        ({"targets": "(("}, "not a regular expression"),
        ({"targets": []}, "targets is empty"),
        ({"targets": ["q_proj"], "exclude": ["q_proj"]}, "leave no layer"),
        ({"rank_pattern": {"q_prj": 4}}, "rank_pattern: 'q_prj'.*did you mean 'q_proj'"),
        ({"alpha_pattern": {"lm_head": 4}}, "alpha_pattern: 'lm_head'"),
        ({"layers_to_transform": [5]}, "no layer 5, this model has 0 to 1"),
        ({"modules_to_save": ["lm_heed"]}, "modules_to_save: 'lm_heed'.*did you mean 'lm_head'"),
        (
            {"targets": ["lm_head"], "modules_to_save": ["lm_head"]},
            "modules_to_save: lm_head is changed in another way",
        ),
        ({"trainable_token_indices": {"embed_token": [1]}}, "'embed_token' is no embedding.*mean 'embed_tokens'"),
        ({"trainable_token_indices": [97]}, "there is no token 97, the vocabulary has 97"),
        ({"targets": ["embed_tokens"], "trainable_token_indices": [1]}, "embed_tokens is changed in another way"),
        ({"targets": ["lm_head"], "trainable_token_indices": [1]}, "lm_head is changed in another way"),
        ({"targets": ["embed_tokens"], "lora_bias": True}, "lora_bias: an embedding has none"),
        ({"init": "loftq"}, "init: loftq.* isn't held in NF4"),
        ({"init": "pissa", "r": 33}, "init: pissa can't start a rank of 33"),
        ({"init": "pissa", "alpha_pattern": {"q_proj": -1.0}}, "needs an alpha above 0"),
        ({"targets": "((m|mo)*o*)*del_layers_0$"}, "targets: .*(takes too long|matches no module)"),
        ({"rank_pattern": {"(.*)*(.*)*(.*)*(.*)*(.*)*x": 4}}, "rank_pattern: .*(takes too long|matches no adapted)"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(
    model: PreTrainedModel, settings: dict[str, object], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        attach(model, LoraConfig(**settings))  # type: ignore[arg-type]
    assert attached(model) == []
    assert not any("lora" in name for name in model.state_dict())


@pytest.mark.parametrize(
    "settings",
    [
        {"r": 0},
        {"r": 10**9},
        {"rank_pattern": {"q_proj": 10**12}},
        {"dropout": 1.0},
        {"alpha": 0},
        {"alpha": 1e308},
        {"rank_pattern": {"((": 4}},
        {"alpha_pattern": {"q_proj": -1e30}},
        {"lora_r": 4},
        {"lr_ratio": 0},
        {"trainable_token_indices": [3, 3]},
        {"trainable_token_indices": []},
        {"trainable_token_indices": {"embed_tokens": [-1]}},
        {"lora_bias": True, "variant": "dora"},
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        LoraConfig(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (BottleneckConfig, {"bottleneck_size": 10**10}),
        (BottleneckConfig, {"bottleneck_size": 4, "reduction_factor": 8}),
        (PTuningConfig, {"encoder_hidden_size": 10**7}),
        (PTuningConfig, {"encoder_num_layers": 10**6}),
        (PrefixTuningConfig, {"encoder_hidden_size": 10**9}),
    ],
)
def test_a_width_beyond_all_use_or_given_twice_is_refused(kind: type[MethodConfig], settings: dict[str, int]) -> None:
    with pytest.raises(ValidationError, match="|".join(settings)):
        kind(**settings)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BottleneckConfig(layers_to_transform=[]), "layers_to_transform is empty"),
        (PromptTuningConfig(num_virtual_tokens=128), "num_virtual_tokens: 128 leave no room .* 128 positions"),
        (PTuningConfig(num_virtual_tokens=10**12), "num_virtual_tokens: .* leave no room"),
        (PrefixTuningConfig(num_virtual_tokens=10**12), "num_virtual_tokens: .* leave no room"),
        (PTuningV2Config(num_virtual_tokens=128, init="zero"), "num_virtual_tokens: .* leave no room"),
    ],
    ids=str,
)
def test_a_method_that_can_train_nothing_is_refused(model: PreTrainedModel, config: MethodConfig, message: str) -> None:
    with pytest.raises(InputError, match=message):
        attach(model, config)
    assert attached(model) == []


def test_a_second_adapter_of_a_kind_is_refused(model: PreTrainedModel) -> None:
    attach(model, LoraConfig(r=2))
    with pytest.raises(InputError, match="already"):
        attach(model, LoraConfig(r=4))


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_load_refuses_wrong_tensors_and_copies_none(model: PreTrainedModel, config: MethodConfig) -> None:
    (method,) = attached(attach(model, config))
    before = method.export()
    name = next(iter(before))
    good = {key: torch.randn_like(value) for key, value in before.items()}
    for bad in (
        {key: value for key, value in good.items() if key != name},
        {**good, "base_model.model.stray": torch.zeros(1)},
        {**good, name: good[name][:-1]},
    ):
        with pytest.raises(AdapterError, match=r"missing|match nothing|has shape"):
            method.load(bad)
        assert all(torch.equal(value, before[key]) for key, value in method.export().items())
    method.load(good)
    assert all(torch.equal(value, good[key]) for key, value in method.export().items())


def test_dropout_acts_in_training_alone(model: PreTrainedModel) -> None:
    randomise(attach(model, LoraConfig(r=4, dropout=0.5)))
    ids = torch.randint(1, 97, (1, 9))
    assert torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)
    model.train()
    assert not torch.equal(model(input_ids=ids).logits, model(input_ids=ids).logits)


def test_text_beyond_a_sliding_window_is_refused_by_soft_prompts_and_not_by_prefixes(seed: int) -> None:
    settings = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 12}
    model = MistralForCausalLM(MistralConfig(**settings, **heads)).eval()  # type: ignore[arg-type]
    attach(model, PromptTuningConfig(num_virtual_tokens=4))
    model(input_ids=torch.randint(1, 97, (1, 8)))
    with pytest.raises(UnsupportedError, match="window of 12"):
        model(input_ids=torch.randint(1, 97, (1, 9)))
    attach(detach(model), PTuningV2Config(num_virtual_tokens=4))
    model(input_ids=torch.randint(1, 97, (1, 20)))
    attach(detach(model), PTuningV2Config(num_virtual_tokens=15))
    ids = torch.randint(1, 97, (1, 20))
    generate = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    cached, whole = (model.generate(ids, use_cache=use_cache, **generate) for use_cache in (True, False))
    assert torch.equal(cached, whole)


@pytest.mark.parametrize("frozen", [0, 1])
def test_of_two_methods_either_is_trained_alone(model: PreTrainedModel, frozen: int) -> None:
    configs = [LoraConfig(r=2), PromptTuningConfig(num_virtual_tokens=3)]
    attach(model, configs[0], seed=1)
    if frozen == 0:
        for parameter in attached(model)[0].parameters().values():
            parameter.requires_grad_(False)
    attach(model, configs[1], seed=1)
    kept, trained = attached(model)[frozen], attached(model)[1 - frozen]
    for parameter in kept.parameters().values():
        parameter.requires_grad_(False)
    randomise(model)
    ids = torch.randint(1, 97, (2, 9))
    model(input_ids=ids, labels=ids).loss.backward()
    assert not kept.trainable and trained.trainable
    assert all(parameter.grad is None for parameter in kept.parameters().values())
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in trained.parameters().values())


def test_attaching_a_second_method_leaves_a_frozen_first_one_frozen(model: PreTrainedModel) -> None:
    attach(model, LoraConfig(r=2))
    for parameter in attached(model)[0].parameters().values():
        parameter.requires_grad_(False)
    attach(model, PTuningV2Config(num_virtual_tokens=3))
    assert [method.trainable for method in attached(model)] == [False, True]
