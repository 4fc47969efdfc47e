"""The attention kernels against float64 softmax: small in Triton's interpreter, at full size on a GPU."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import ModuleType

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="Triton is made for Linux only, where the tests always have it")

NAN = float("nan")
PAGE = 16
BOUNDS = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 1e-2}


@pytest.fixture
def interpreted(interpreter: Callable[[str], ModuleType]) -> ModuleType:
    """The module, its kernels in Triton's interpreter."""
    return interpreter("attention")


@dataclass
class Case:
    """Requests whose keys and values are scattered over pages; all else in the pages is NaN."""

    q: Tensor
    kv: Tensor
    page: Tensor
    cu_seqlens: Tensor
    context: Tensor
    num_virtual: Tensor

    def run(self, module: ModuleType, *, window: int | None = None, deterministic: bool = False) -> Tensor:
        metadata = (self.page, self.cu_seqlens, self.context, self.num_virtual)
        scale = self.q.shape[2] ** -0.5
        return module.paged_attention(
            self.q, self.kv, *metadata, scale=scale, window=window, deterministic=deterministic
        )

    def exact(self, window: int | None = None) -> Tensor:
        """The requests' rows, in float64."""
        rows: list[Tensor] = []
        for n, (start, end) in enumerate(pairwise(self.cu_seqlens.tolist())):
            context = int(self.context[n])
            keys, values = self.kv[self.page[n, : -(-context // PAGE)].long()].flatten(0, 1)[:context].unbind(1)
            j = torch.arange(context, device=self.q.device)
            for part in torch.arange(start, end, device=self.q.device).split(64):
                position = (context - end + part)[:, None]
                seen = j <= position
                if window is not None:
                    seen &= (j > position - window) | (j < self.num_virtual[n])
                rows.append(_attend(self.q[part], keys, values, seen))
        return torch.cat(rows)

    def alone(self, n: int, cuts: Sequence[int]) -> Iterator["Case"]:
        """Request n by itself, its new rows in chunks of these lengths."""
        row, end = int(self.cu_seqlens[n]), int(self.cu_seqlens[n + 1])
        assert sum(cuts) == end - row
        for length in cuts:
            row += length
            cu_seqlens = torch.tensor([0, length], dtype=torch.int32, device=self.q.device)
            own = {"page": self.page[n : n + 1], "num_virtual": self.num_virtual[n : n + 1]}
            context = self.context[n : n + 1] - (end - row)
            yield replace(self, q=self.q[row - length : row], cu_seqlens=cu_seqlens, context=context, **own)


def _attend(q_RQD: Tensor, k_CKD: Tensor, v_CKD: Tensor, seen_RC: Tensor) -> Tensor:
    q_RKGD = q_RQD.double().unflatten(1, (k_CKD.shape[1], -1)) / q_RQD.shape[2] ** 0.5
    score = torch.einsum("rkgd,ckd->rkgc", q_RKGD, k_CKD.double()).masked_fill(~seen_RC[:, None, None], float("-inf"))
    return torch.einsum("rkgc,ckd->rkgd", score.softmax(-1), v_CKD.double()).flatten(1, 2)


def make_case(
    requests: Sequence[tuple[int, int]],
    virtual: Sequence[int] = (),
    *,
    heads: tuple[int, int] = (4, 2),
    size: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    padded_rows: int = 0,
) -> Case:
    """requests: (new tokens, positions before them). heads: of queries, of keys. padded_rows: NaN behind the last."""
    contexts = [new + before for new, before in requests]
    num_pages = [-(-context // PAGE) for context in contexts]
    order = torch.randperm(sum(num_pages) + 3).tolist()
    kv = torch.full((len(order), PAGE, 2, heads[1], size), NAN, dtype=dtype, device=device)
    page = torch.full((len(requests), max(num_pages)), -(1 << 30), dtype=torch.int32)
    for n, context in enumerate(contexts):
        pages = torch.tensor([order.pop() for _ in range(num_pages[n])], dtype=torch.int64)
        page[n, : len(pages)] = pages
        cell = (pages[:, None] * PAGE + torch.arange(PAGE)).flatten()[:context].to(device)
        kv.flatten(0, 1)[cell] = torch.randn(context, 2, heads[1], size, device=device).to(dtype)
    new = [0, *(count for count, _ in requests)]
    q = torch.full((sum(new) + padded_rows, heads[0], size), NAN, dtype=dtype, device=device)
    q[: sum(new)] = torch.randn(sum(new), heads[0], size, device=device)
    ints = {"dtype": torch.int32, "device": device}
    return Case(
        q=q,
        kv=kv,
        page=page.to(device),
        cu_seqlens=torch.tensor(new, device=device).cumsum(0).int(),
        context=torch.tensor(contexts, **ints),
        num_virtual=torch.tensor([*virtual, *[0] * (len(requests) - len(virtual))], **ints),
    )


MIXED = [(1, 0), (5, 0), (1, 16), (0, 9), (1, 40), (3, 30), (18, 2), (0, 0)]


def small(module: ModuleType, kind: str, **changes: int) -> object:
    """Tiles that the little cases of the interpreter fill more than once."""
    config = {
        "decode": module.Config(16, 16, 1, 1, per_sm=2, shares=4, share=16),
        "prefill": module.Config(16, 16, 1, 1),
        "steady": module.Config(16, 16, 1, 1, per_sm=4, share=32),
    }[kind]
    return module.override(replace(config, **changes))


@pytest.mark.parametrize(
    ("heads", "size", "dtype"), [((4, 1), 16, torch.float32), ((6, 2), 20, torch.float16), ((4, 2), 8, torch.float16)]
)
def test_single_rows(
    seed: int, assert_near: Callable[..., None], interpreted: ModuleType, heads: tuple[int, int], size: int,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    case = make_case([(1, 0), (1, 15), (0, 20), (1, 16), (1, 70)], heads=heads, size=size, dtype=dtype)
    with small(interpreted, "decode"):
        assert_near(case.run(interpreted), case.exact(), BOUNDS[dtype])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("heads", [(2, 2), (6, 2), (8, 1)])
def test_chunks_and_single_rows_in_one_batch(
    seed: int, assert_near: Callable[..., None], interpreted: ModuleType, heads: tuple[int, int], deterministic: bool
) -> None:
    case = make_case(MIXED, heads=heads)
    with small(interpreted, "steady" if deterministic else "prefill", per_sm=4, share=32):
        assert_near(case.run(interpreted, deterministic=deterministic), case.exact())


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("window", [1, 20])
@pytest.mark.parametrize("single", [False, True])
def test_a_window_hides_old_text_but_never_virtual_tokens(
    seed: int, assert_near: Callable[..., None], interpreted: ModuleType, window: int, single: bool, deterministic: bool
) -> None:
    requests = [(1, 50), (1, 3), (1, 40), (1, 33)] if single else [(1, 50), (7, 20), (1, 3), (20, 20)]
    case = make_case(requests, virtual=[20, 0, 2, 7])
    kind = "steady" if deterministic else "decode" if single else "prefill"
    with small(interpreted, kind, per_sm=2, shares=4, share=16):
        assert_near(case.run(interpreted, window=window, deterministic=deterministic), case.exact(window))


def test_padded_requests_and_rows_are_passed_over(
    seed: int, assert_near: Callable[..., None], interpreted: ModuleType
) -> None:
    case = make_case([(1, 20), (1, 3), (0, 0), (0, 0)], padded_rows=2)
    assert_near(case.run(interpreted)[:2], case.exact())


def test_more_rows_than_one_of_a_request_among_as_many_requests(
    seed: int, assert_near: Callable[..., None], interpreted: ModuleType
) -> None:
    case = make_case([(2, 20), (0, 5), (1, 40), (0, 0)], padded_rows=1)
    with small(interpreted, "decode"):
        assert_near(case.run(interpreted)[:3], case.exact())


def test_a_prompt_alone_and_a_row_alone(seed: int, assert_near: Callable[..., None], interpreted: ModuleType) -> None:
    for requests in ([(21, 0)], [(9, 30)], [(1, 64)]):
        case = make_case(requests)
        with small(interpreted, "prefill", per_sm=2, shares=4, share=16):
            assert_near(case.run(interpreted), case.exact())


def test_what_a_deterministic_row_meets_changes_no_bit(seed: int, interpreted: ModuleType) -> None:
    case = make_case([(1, 70), (12, 30), (1, 3)], virtual=[5, 5], dtype=torch.float16)
    with small(interpreted, "steady"):
        for window in (None, 25):
            together = case.run(interpreted, window=window, deterministic=True)
            assert together.equal(case.run(interpreted, window=window, deterministic=True))
            for n, cuts in ((0, [1]), (1, [12]), (1, [1, 7, 3, 1])):
                start, end = case.cu_seqlens[n : n + 2].tolist()
                alone = [part.run(interpreted, window=window, deterministic=True) for part in case.alone(n, cuts)]
                assert together[start:end].equal(torch.cat(alone))


def test_counters_are_zero_after_every_launch(seed: int, interpreted: ModuleType) -> None:
    case = make_case([(1, 90), (1, 33)])
    for deterministic, kind in ((False, "decode"), (True, "steady")):
        with small(interpreted, kind):
            first, again = (case.run(interpreted, deterministic=deterministic) for _ in range(2))
        counters = interpreted.counters_of("paged_attention", interpreted._COUNTERS, case.q.device)
        assert first.equal(again) and not counters.any()


LLAMA, QWEN = ((32, 8), 128), ((12, 2), 128)
SMOL = ((9, 3), 64)
MODELS = [(torch.bfloat16, *shape) for shape in (LLAMA, QWEN, SMOL, ((8, 8), 80), ((8, 1), 256))]


@pytest.fixture
def compiled() -> ModuleType:
    """The module as a GPU runs it."""
    from peftkit_kernels.triton import attention

    return attention


def lengths(rng: random.Random, number: int, longest: int) -> list[int]:
    return [rng.choice([0, 1, 15, 16, rng.randint(1, longest)]) for _ in range(number)]


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "size"), [*MODELS, (torch.float16, *QWEN), (torch.float32, *SMOL)])
@pytest.mark.parametrize("window", [None, 700])
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("kind", ["single", "mixed", "prompt"])
def test_at_full_size(
    seed: int, assert_near: Callable[..., None], compiled: ModuleType, dtype: torch.dtype, heads: tuple[int, int],
    size: int, window: int | None, deterministic: bool, kind: str,
) -> None:  # fmt: skip
    rng = random.Random(seed)
    requests = {
        "single": [(1, before) for before in lengths(rng, 24, 4000)] + [(0, 40), (1, 8191)],
        "mixed": [(rng.choice([1, 1, 0, rng.randint(1, 700)]), before) for before in lengths(rng, 12, 2000)],
        "prompt": [(2500, 0)],
    }[kind]
    if sum(new for new, _ in requests) == 0:
        requests.append((3, 5))
    virtual = [rng.randint(0, before) for _, before in requests]
    case = make_case(requests, virtual, heads=heads, size=size, dtype=dtype, device="cuda")
    y = case.run(compiled, window=window, deterministic=deterministic)
    assert_near(y, case.exact(window), BOUNDS[dtype])
    assert y.equal(case.run(compiled, window=window, deterministic=deterministic))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "heads", "size"), MODELS)
@pytest.mark.parametrize("window", [None, 300])
def test_deterministic_rows_at_full_size(
    seed: int, compiled: ModuleType, dtype: torch.dtype, heads: tuple[int, int], size: int, window: int | None
) -> None:
    requests = [(1, 5000), (900, 1500), (1, 3), (1, 1023), (1, 1024), (40, 0), (1, 2399)]
    case = make_case(requests, [20, 20, 2], heads=heads, size=size, dtype=dtype, device="cuda")
    together = case.run(compiled, window=window, deterministic=True)
    assert not together.isnan().any()
    for n, (new, _) in enumerate(requests):
        start, end = case.cu_seqlens[n : n + 2].tolist()
        for cuts in ([new], [1, *([new - 2, 1] if new > 2 else [])]):
            alone = [part.run(compiled, window=window, deterministic=True) for part in case.alone(n, cuts)]
            assert together[start:end].equal(torch.cat(alone))


@pytest.mark.gpu
def test_a_graph_holds_for_other_lengths(seed: int, assert_near: Callable[..., None], compiled: ModuleType) -> None:
    heads, size = LLAMA
    captured = make_case([(1, 4000)] * 8, heads=heads, size=size, dtype=torch.bfloat16, device="cuda")
    captured.run(compiled)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = captured.run(compiled)
    for befores in ([0, 1, 15, 16, 3999, 700, 31], [4000] * 8, [17]):
        case = make_case([(1, n) for n in befores], heads=heads, size=size, dtype=torch.bfloat16, device="cuda")
        captured.kv[: len(case.kv)] = case.kv
        captured.q[: len(befores)] = case.q
        captured.page[: len(befores), : case.page.shape[1]] = case.page
        captured.cu_seqlens.fill_(len(befores))[: len(befores) + 1] = case.cu_seqlens
        captured.context.zero_()[: len(befores)] = case.context
        y.fill_(NAN)
        graph.replay()
        assert_near(y[: len(befores)], case.exact(), 1e-2)


@pytest.mark.gpu
def test_lengths_compile_nothing_new(seed: int, compiled: ModuleType) -> None:
    heads, size = QWEN
    kernels = (compiled.decode_kernel, compiled.prefill_kernel, compiled.steady_kernel)

    def run(requests: list[tuple[int, int]]) -> list[int]:
        case = make_case(requests, heads=heads, size=size, dtype=torch.bfloat16, device="cuda")
        for deterministic in (False, True):
            for window in (None, 1, 16, 33):
                case.run(compiled, window=window, deterministic=deterministic)
        return [sum(len(cache[0]) for cache in kernel.device_caches.values()) for kernel in kernels]

    for start in ([(1, 20)], [(3, 20), (1, 5)]):
        before = run(start)
    for more in ([(1, 1)] * 16, [(1, 4000)] * 3, [(64, 0), (1, 1)], [(17, 300)]):
        assert run(more) == before
