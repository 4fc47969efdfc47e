"""Composed adapters against float64 sums of their changes and HF PEFT where it is right; saved, reloaded, served."""

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import peft
import pytest
import torch
from peft.utils import merge_utils
from safetensors.torch import save_file
from torch import Tensor

import peftkit
from peftkit.artifact import Artifact, read_adapter, write_adapter
from peftkit.base import load_base
from peftkit.errors import AdapterError, BaseMismatchError, InputError, RunError, UnsupportedError
from peftkit.merge import by_layer, compose, compose_to_folder, diff, export_gguf, export_peft, merge_to_folder
from peftkit.merge.compose import DENSITY, _sparse
from peftkit.merge.factors import Factors, factors_of
from peftkit.methods import AnyConfig, LoraConfig, PromptTuningConfig, attached
from peftkit_serve import Engine, Request, SamplingParams

PLAIN = LoraConfig(r=4, alpha=8)
RSLORA = LoraConfig(r=3, alpha=9, variant="rslora", targets=["q_proj", "down_proj"])
PATTERNS = LoraConfig(r=4, alpha=8, rank_pattern={"k_proj": 2}, alpha_pattern={"layers.1.self_attn.v_proj": -3})
ENDS = LoraConfig(r=2, alpha=6, targets=["embed_tokens", "lm_head", "o_proj"])
SUMS = {"plain": PLAIN, "rslora": RSLORA, "patterns": PATTERNS, "ends": ENDS}
OTHERS = {
    "dora": LoraConfig(r=2, alpha=4, variant="dora", targets=["q_proj"]),
    "bias": LoraConfig(r=2, alpha=4, lora_bias=True, targets=["q_proj"]),
    "saved": LoraConfig(r=2, alpha=4, targets=["q_proj"], modules_to_save=["norm"]),
    "tokens": LoraConfig(r=2, alpha=4, targets=["q_proj"], trainable_token_indices=[7]),
}
MakeAdapter = Callable[..., Artifact]


@pytest.fixture
def make_adapter(seed: int, tiny_base: Path, tmp_path: Path) -> MakeAdapter:
    """Saves a random adapter over the tiny base."""

    def make(config: AnyConfig, name: str = "a") -> Artifact:
        model, _ = load_base(tiny_base)
        peftkit.attach(model, config)
        for parameter in attached(model)[0].parameters().values():
            torch.nn.init.normal_(parameter, std=0.1)
        return peftkit.save_adapter(model, tmp_path / name)

    return make


def changes(artifact: Artifact) -> dict[str, Tensor]:
    """ΔW by module in float64, from the tensors and the config as HF PEFT defines them."""
    config = artifact.config
    assert isinstance(config, LoraConfig)
    found: dict[str, Tensor] = {}
    for key, A in artifact.tensors.items():
        if "lora_A" in key or "lora_embedding_A" in key:
            path = key.removeprefix("base_model.model.").partition(".lora_")[0]
            r = len(A)
            alpha = next(
                (a for k, a in config.alpha_pattern.items() if path.endswith(k.replace("\\", ""))), config.alpha
            )
            scale = alpha / (math.sqrt(r) if config.variant == "rslora" else r)
            B = artifact.tensors[key.replace("_A", "_B")]
            found[path] = scale * B.double() @ A.double()
    return found


def summed(parts: Sequence[tuple[dict[str, Tensor], float]]) -> dict[str, Tensor]:
    paths = {path for change, _ in parts for path in change}
    return {path: sum((w * c[path] for c, w in parts if path in c), torch.zeros(())) for path in paths}


def assert_same(found: dict[str, Tensor], wanted: dict[str, Tensor], rtol: float = 1e-6) -> None:
    assert found.keys() == wanted.keys()
    for path, change in wanted.items():
        assert (found[path] - change).norm() <= rtol * change.norm() + 1e-9, path


@pytest.mark.parametrize("second", SUMS)
@pytest.mark.parametrize("first", SUMS)
def test_exact_is_the_weighted_sum_whatever_ranks_and_scales(
    first: str, second: str, make_adapter: MakeAdapter
) -> None:
    a, b = make_adapter(SUMS[first], "a"), make_adapter(SUMS[second], "b")
    found = compose([a, b], [0.7, -1.3])
    assert found.kept == 1.0
    assert_same(changes(found.artifact), summed([(changes(a), 0.7), (changes(b), -1.3)]))


@pytest.mark.parametrize("method", ["exact", "svd", *DENSITY])
@pytest.mark.parametrize("name", SUMS | OTHERS)
def test_weights_one_and_zero_give_the_first_adapter(name: str, method: str, make_adapter: MakeAdapter) -> None:
    a, b = make_adapter((SUMS | OTHERS)[name], "a"), make_adapter(PLAIN, "b")
    assert compose([a, b], [1, 0], method=method).artifact.uid == a.uid  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("name", OTHERS)
def test_what_has_no_exact_sum_is_refused_by_name(name: str, make_adapter: MakeAdapter) -> None:
    a, b = make_adapter(OTHERS[name], "a"), make_adapter(PLAIN, "b")
    named = {"dora": "dora", "bias": "lora_bias", "saved": "modules_to_save", "tokens": "trainable_token_indices"}[name]
    with pytest.raises(UnsupportedError, match=rf"{named}.* merge each into the base by itself"):
        compose([b, a])
    with pytest.raises(UnsupportedError, match="only LoRA is a change of weights"):
        compose([b, make_adapter(PromptTuningConfig(num_virtual_tokens=2), "p")])


def test_svd_is_the_best_approximation_and_forms_no_dense_matrix(
    make_adapter: MakeAdapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    exact = summed([(changes(a), 1.0), (changes(b), 0.5)])
    monkeypatch.setattr(Factors, "dense", lambda self: pytest.fail("a dense matrix"))
    found = compose([a, b], [1, 0.5], method="svd", rank=3)
    kept = whole = 0.0
    for path, change in changes(found.artifact).items():
        values = torch.linalg.svdvals(exact[path])
        error = (change - exact[path]).norm()
        assert error == pytest.approx(values[3:].norm().item(), rel=1e-5, abs=1e-6)
        kept, whole = kept + values[:3].square().sum().item(), whole + values.square().sum().item()
    assert found.kept == pytest.approx(kept / whole, rel=1e-6)
    assert found.artifact.config.max_rank == 3  # pyright: ignore[reportAttributeAccessIssue]


def test_svd_to_the_full_rank_is_exact(make_adapter: MakeAdapter) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(ENDS, "b")
    found = compose([a, b], [1, 2], method="svd", rank=64)
    assert_same(changes(found.artifact), summed([(changes(a), 1.0), (changes(b), 2.0)]), rtol=1e-5)
    assert found.kept == 1.0


@pytest.mark.parametrize("density", [0.2, 0.5, 1.0])
def test_ties_of_equal_weights_is_what_peft_computes_on_the_changes(seed: int, density: float) -> None:
    tasks = [torch.randn(24, 40) for _ in range(3)]
    found = _sparse([(task, 0.5) for task in tasks], "ties", density, torch.Generator())
    if density == 1.0:
        with pytest.warns(UserWarning, match="no pruning"):
            wanted = merge_utils.ties(tasks, torch.full((3,), 0.5), density)
    else:
        wanted = merge_utils.ties(tasks, torch.full((3,), 0.5), density)
    torch.testing.assert_close(found, wanted)


def test_ties_elects_by_the_weighted_sum(seed: int) -> None:
    change = torch.randn(16, 16)
    # the second is subtracted, and outweighs the first
    found = _sparse([(change, 1.0), (change, -2.0)], "ties", 1.0, torch.Generator())
    torch.testing.assert_close(found, -2 * change)


@pytest.mark.parametrize("method", ["dare_linear", "dare_ties"])
def test_dare_is_what_peft_computes_of_the_same_drops(method: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks, density = [torch.randn(24, 40) for _ in range(2)], 0.6
    generator = torch.Generator().manual_seed(seed)
    masks = iter([(torch.rand(24, 40, generator=generator) < density).float() for _ in tasks])
    monkeypatch.setattr(torch, "bernoulli", lambda _: next(masks))
    wanted = getattr(merge_utils, method)(tasks, torch.full((2,), 0.5), density)
    found = _sparse(
        [(task, 0.5) for task in tasks],
        method,  # pyright: ignore[reportArgumentType]
        density,
        torch.Generator().manual_seed(seed),
    )
    torch.testing.assert_close(found, wanted)


def test_dares_expectation_is_the_sum(seed: int) -> None:
    tasks = [torch.randn(8, 8) for _ in range(2)]
    generator = torch.Generator().manual_seed(seed)
    draws = [_sparse([(task, 1.0) for task in tasks], "dare_linear", 0.5, generator) for _ in range(4000)]
    # an entry's standard deviation is |w| at density a half, so that the mean's is |w| / √4000
    spread = torch.stack(tasks).square().sum(0).sqrt() / math.sqrt(4000)
    assert ((torch.stack(draws).mean(0) - sum(tasks)).abs() <= 6 * spread).all()


@pytest.mark.parametrize("method", list(DENSITY))
def test_sparse_methods_have_defaults_and_a_seed(method: str, make_adapter: MakeAdapter) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(PATTERNS, "b")
    first, again, other, whole = (
        compose([a, b], [0.5, 0.5], method=method, **settings)  # pyright: ignore[reportArgumentType]
        for settings in ({}, {}, {"seed": 1}, {"rank": 64})
    )
    assert first.artifact.uid == again.artifact.uid
    assert (first.artifact.uid == other.artifact.uid) == (method == "ties")
    assert 0.3 < first.kept < whole.kept == pytest.approx(1.0, abs=1e-6)
    assert first.artifact.record["composed"]["density"] == DENSITY[method]
    # at a density of 1 nothing is dropped: dare_linear is the sum
    if method == "dare_linear":
        dense = compose([a, b], [0.5, 0.5], method="dare_linear", density=1.0)
        assert_same(changes(dense.artifact), summed([(changes(a), 0.5), (changes(b), 0.5)]), rtol=1e-4)


def test_weights_by_layer(make_adapter: MakeAdapter) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    found = changes(compose([a, b], [[0.25, 2.0], 1.0]).artifact)
    for path, change in found.items():
        wanted = (0.25 if ".0." in path else 2.0) * changes(a)[path] + changes(b).get(path, torch.zeros(()))
        assert (change - wanted).norm() <= 1e-6 * wanted.norm(), path
    with pytest.raises(InputError, match="3 layers' weights for a base of 2 layers"):
        compose([a, b], [[1, 2, 3], 1])
    with pytest.raises(InputError, match="lies in no layer: give this adapter one weight"):
        compose([make_adapter(ENDS, "c"), b], [[1, 2], 1])


def test_the_result_saves_reloads_and_serves_as_the_merged_model_answers(
    make_adapter: MakeAdapter, tiny_base: Path, tmp_path: Path
) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    made = compose_to_folder([a.path, b.path], tmp_path / "both", [0.5, 0.5])
    back = read_adapter(tmp_path / "both", strict_base=True)
    assert back.uid == made.artifact.uid
    assert [one["uid"] for one in back.record["composed"]["adapters"]] == [a.uid, b.uid]
    model, _ = load_base(tiny_base)
    ids = torch.randint(3, 259, (1, 20))
    with torch.no_grad():
        merged = peftkit.merge(model, [a.path, b.path], weights=[0.5, 0.5])
        found = peftkit.load_adapter(model, tmp_path / "both")(ids).logits
        theirs = peft.PeftModel.from_pretrained(load_base(tiny_base)[0], str(tmp_path / "both")).eval()
        torch.testing.assert_close(merged(ids).logits, found, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(theirs(ids).logits, found, rtol=1e-4, atol=1e-4)
    engine = Engine(tiny_base, num_pages=64)
    engine.adapters.add("both", tmp_path / "both")
    request = Request(prompt=ids[0].tolist(), adapter="both", sampling=SamplingParams(max_tokens=8, temperature=0))
    (output,) = engine.generate([request])
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(ids)}
    wanted = merged.generate(ids, **settings)[0, 20:].tolist()
    assert list(output.token_ids) == wanted[: len(output.token_ids)] and len(output.token_ids) > 0


def test_peft_agrees_where_it_is_right(make_adapter: MakeAdapter, tiny_base: Path) -> None:
    """`cat` of plain LoRAs: its rank adds up and its sum is exact."""
    a, b = make_adapter(PLAIN, "a"), make_adapter(PATTERNS.model_copy(update={"rank_pattern": {}}), "b")
    theirs = peft.PeftModel.from_pretrained(load_base(tiny_base)[0], str(a.path), adapter_name="a")
    theirs.load_adapter(str(b.path), adapter_name="b")
    theirs.add_weighted_adapter(["a", "b"], [0.5, 2.0], "both", combination_type="cat")
    theirs.set_adapter("both")
    ours, _ = load_base(tiny_base)
    composed = compose([a, b], [0.5, 2.0]).artifact
    attach_composed(ours, composed)
    ids = torch.randint(3, 259, (2, 16))
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs.eval()(ids).logits, rtol=1e-4, atol=1e-4)


def attach_composed(model: torch.nn.Module, artifact: Artifact) -> None:
    peftkit.attach(model, artifact.config)  # pyright: ignore[reportArgumentType]
    attached(model)[0].load(artifact.tensors)


def test_a_merged_folder_of_a_composed_adapter_holds(
    make_adapter: MakeAdapter, tiny_base: Path, tmp_path: Path
) -> None:
    composed = compose([make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")], [0.5, 0.5]).artifact
    report = merge_to_folder(composed, tmp_path / "out", tiny_base)
    assert report.equivalence is not None and report.equivalence.relative < 1e-5


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"weights": [1.0]}, "weights: 1 for 2 adapters"),
        ({"weights": [0, 0]}, "all are 0"),
        ({"weights": [float("nan"), 1]}, "finite"),
        ({"weights": [[], 1]}, "empty list"),
        ({"rank": 4}, "use method svd"),
        ({"method": "svd", "density": 0.5}, "density: svd keeps every entry"),
        ({"method": "ties", "density": 0.0}, "above 0"),
        ({"method": "svd", "rank": 0}, "at least 1"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(
    settings: dict[str, object], message: str, make_adapter: MakeAdapter
) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    with pytest.raises(InputError, match=message):
        compose([a, b], **settings)  # pyright: ignore[reportArgumentType]


def test_adapters_of_different_bases_are_refused(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(PLAIN, "b")
    record = copy.deepcopy(b.record)
    record["base"]["fingerprint"]["tokenizer"] = "0" * 64
    other = write_adapter(tmp_path / "other", b.config, b.tensors, record)
    with pytest.raises(BaseMismatchError, match="their tokenizer differs"):
        compose([a, other])
    wide = {key: torch.zeros(tensor.shape[0], 2 * tensor.shape[1]) for key, tensor in b.tensors.items() if "_A" in key}
    (tmp_path / "other" / "peftkit.json").unlink()
    save_file(b.tensors | wide, tmp_path / "other" / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=r"has the shapes .* the adapters are for different bases"):
        compose([a, read_adapter(tmp_path / "other")])


def test_weights_too_large_for_the_result_are_refused(make_adapter: MakeAdapter) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    for adapter in (a, b):
        for tensor in adapter.tensors.values():
            tensor.mul_(100)
    with pytest.raises(InputError, match=r"lora_B\.weight comes out with values that aren't finite"):
        compose([a, b], [3e38, 3e38])


def test_ties_keeps_an_entry_at_any_density(make_adapter: MakeAdapter) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    found = changes(compose([a, b], method="ties", density=1e-9).artifact)
    assert all(change.count_nonzero() for change in found.values())


def test_a_taken_target_is_refused_before_anything_is_read(make_adapter: MakeAdapter, tmp_path: Path) -> None:
    a = make_adapter(PLAIN, "a")
    with pytest.raises(InputError, match="exists and isn't empty"):
        compose_to_folder([tmp_path / "nowhere", a.path], a.path)


def test_room_is_checked_before_a_composed_or_exported_adapter_is_written(
    make_adapter: MakeAdapter, tiny_base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    for write in (
        lambda out: compose_to_folder([a.path, b.path], out),
        lambda out: export_peft(a.path, out),
        lambda out: export_gguf(a.path, out, tiny_base),
        lambda out: merge_to_folder(a, out, tiny_base, format="gguf"),
    ):
        with pytest.raises(RunError, match="no room for"):
            write(tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_diff_gives_norms_cosines_and_overlaps_of_the_dense_changes(make_adapter: MakeAdapter) -> None:
    a, b = make_adapter(PLAIN, "a"), make_adapter(RSLORA, "b")
    modules = {one.name: one for one in diff(a, b)}
    first, second = changes(a), changes(b)
    assert modules.keys() == first.keys()
    for path, one in modules.items():
        assert one.norm_a == pytest.approx(first[path].norm().item(), rel=1e-5)
        if path not in second:
            assert (one.norm_b, one.cosine, one.overlap_in, one.overlap_out) == (0, None, None, None)
            continue
        inner = (first[path] * second[path]).sum() / (first[path].norm() * second[path].norm())
        assert one.cosine == pytest.approx(inner.item(), abs=1e-6)
        (U, _, V), (X, _, Y) = (torch.linalg.svd(change[path], full_matrices=False) for change in (first, second))
        assert one.overlap_out == pytest.approx((U[:, :4].T @ X[:, :3]).norm().square().item() / 3, rel=1e-4)
        assert one.overlap_in == pytest.approx((V[:4] @ Y[:3].T).norm().square().item() / 3, rel=1e-4)
    layers = by_layer(diff(a, b))
    assert [layer.name for layer in layers] == ["layers.0", "layers.1"]
    squares = sum(change.square().sum().item() for path, change in first.items() if ".0." in path)
    assert layers[0].norm_a == pytest.approx(math.sqrt(squares), rel=1e-5)


def test_an_adapter_is_like_itself_and_unlike_its_negative(make_adapter: MakeAdapter) -> None:
    a = make_adapter(PLAIN, "a")
    for layer in by_layer(diff(a, compose([a], [-2.0]).artifact)):
        assert layer.cosine == pytest.approx(-1) and layer.norm_b == pytest.approx(2 * layer.norm_a)
        assert layer.overlap_in == pytest.approx(1) and layer.overlap_out == pytest.approx(1)
    with pytest.raises(UnsupportedError, match="dora"):
        diff(a, make_adapter(OTHERS["dora"], "d"))


def test_factors_of_an_adapter_without_effect_have_no_directions(make_adapter: MakeAdapter) -> None:
    a = make_adapter(PLAIN, "a")
    nothing = compose([a], [1e-300]).artifact
    assert all(one.norm_b == 0 and one.cosine is None for one in diff(a, nothing))
    assert set(factors_of(nothing)) == set(factors_of(a))
