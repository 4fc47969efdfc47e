"""The modules that LoRA puts in the place of a model's own; the mathematics is in `lora.py`.

Each holds the module it stands for as `base_layer`, frozen, and names its tensors by the ends of their PEFT keys.
I inputs, O outputs, R rank, V vocabulary, H hidden, N token rows.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from peftkit.base.divided import gathered
from peftkit.methods.frozen import dequantized
from peftkit.methods.lora_config import LoraConfig, LoraSite
from peftkit.methods.lora_group import SMALLEST_NORM as SMALLEST_NORM
from peftkit.methods.lora_group import Copies, Projection, Update
from peftkit.methods.lora_linear import fits, project


class Adapted(nn.Module, ABC):
    """A module in the place of `base_layer`."""

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.train(base_layer.training)
        # what code that works with embeddings and output layers asks them for
        if isinstance(base_layer, nn.Linear):
            self.in_features, self.out_features = base_layer.in_features, base_layer.out_features
        if isinstance(base_layer, nn.Embedding):
            self.num_embeddings, self.embedding_dim = base_layer.num_embeddings, base_layer.embedding_dim

    @property
    def weight(self) -> Tensor:
        """The frozen weight, for code that asks a layer for its dtype or device."""
        weight = self.base_layer.weight
        assert isinstance(weight, Tensor)
        return weight

    @abstractmethod
    def trained(self) -> dict[str, nn.Parameter]:
        """The trained parameters by the ends of their PEFT keys."""

    def tensors(self) -> dict[str, Tensor]:
        """The tensors of the adapter folder by the ends of their keys."""
        return dict(self.trained())

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes tensors of the shapes that `tensors` gives."""
        with torch.no_grad():
            for name, parameter in self.trained().items():
                parameter.copy_(tensors[name])


class LoraLayer(Adapted):
    """A layer with weight W (O, I) and its low-rank update; A, B and what goes with them are float32."""

    NAME_A, NAME_B = "lora_A.weight", "lora_B.weight"

    def __init__(self, base_layer: nn.Module, site: LoraSite, config: LoraConfig, generator: torch.Generator) -> None:
        super().__init__(base_layer)
        self.scale, self.dropout = site.scale, config.dropout
        self.copies: Copies | None = None
        """Of the model's updates, where they may be held over several passes."""
        device = self.weight.device
        A, B = self._start(site, generator)
        self.lora_A, self.lora_B = nn.Parameter(A.to(device)), nn.Parameter(B.to(device))
        self.lora_bias = nn.Parameter(torch.zeros(site.out_features, device=device)) if config.lora_bias else None
        self.start_A: Tensor | None
        self.start_B: Tensor | None
        self.register_buffer("start_A", None, persistent=False)
        self.register_buffer("start_B", None, persistent=False)
        self.square_O: Tensor
        """‖W‖² by row, for DoRA."""
        self.lora_magnitude_vector: nn.Parameter | None = None
        if config.variant == "dora":
            self.register_buffer("square_O", self.dense().float().square().sum(1), persistent=False)
            self.lora_magnitude_vector = nn.Parameter(self.square_O.sqrt())

    @abstractmethod
    def dense(self) -> Tensor:
        """W (O, I) as the layer multiplies by it: an NF4 weight dequantised."""

    @abstractmethod
    def _start(self, site: LoraSite, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """The first A (R, I) and B (O, R), float32 on the CPU."""

    @abstractmethod
    def _product(self, A: Tensor) -> Tensor:
        """W Aᵀ (O, R)."""

    def begin(self, A: Tensor, B: Tensor, *, subtracted: bool) -> None:
        """Starts from A (R, I) and B (O, R). With `subtracted` their product is taken off for good, so that the layer
        computes what it did."""
        with torch.no_grad():
            self.lora_A.copy_(A)
            self.lora_B.copy_(B)
            if subtracted:
                self.start_A, self.start_B = self.lora_A.detach().clone(), self.lora_B.detach().clone()
            if self.lora_magnitude_vector is not None:
                self.lora_magnitude_vector.copy_(self.row_norms())

    def update(self) -> Update:
        """What the layer adds to its base in the mode that it is in."""
        magnitude_O = self.lora_magnitude_vector
        return Update(
            self.lora_A,
            self.lora_B,
            self.scale,
            self.dropout if self.training else 0.0,
            self.lora_bias,
            self.start_A,
            self.start_B,
            magnitude_O,
            None if magnitude_O is None else self.square_O,
            self.copies,
        )

    def factors(self) -> tuple[Tensor, Tensor]:
        """See `Update.factors`."""
        return self.update().factors()

    def trained(self) -> dict[str, nn.Parameter]:
        named = {self.NAME_A: self.lora_A, self.NAME_B: self.lora_B}
        if self.lora_bias is not None:
            named["lora_B.bias"] = self.lora_bias
        if self.lora_magnitude_vector is not None:
            named["lora_magnitude_vector"] = self.lora_magnitude_vector
        return named

    def tensors(self) -> dict[str, Tensor]:
        A, B = self.factors()
        return {**self.trained(), self.NAME_A: A, self.NAME_B: B}

    def assign(self, tensors: Mapping[str, Tensor]) -> None:
        R = len(self.lora_A)
        A, B = tensors[self.NAME_A], tensors[self.NAME_B]
        super().assign({**tensors, self.NAME_A: A[:R], self.NAME_B: B[:, :R]})
        if self.start_A is not None and self.start_B is not None:
            self.start_A.copy_(A[R:])
            self.start_B.copy_(-B[:, R:])

    def row_norms(self) -> Tensor:
        """‖W + s B A‖ by row, float32 (O,), without gradient and without an (O, I) matrix."""
        with torch.no_grad():
            update = self.update()
            return update.row_norms(self._product(update.factors()[0]))

    def combined(self, y: Tensor, update: Tensor, bias: Tensor | None = None) -> Tensor:
        """The layer's output from the base's y (…, O), which has the base's bias in it, and s (B A x + b)."""
        if self.lora_magnitude_vector is None:
            return y + update.to(y.dtype)
        c = self.lora_magnitude_vector / self.row_norms()
        unbiased = y if bias is None else y - bias
        return y + ((c - 1) * unbiased + c * update).to(y.dtype)


class LoraLinear(LoraLayer):
    """A frozen linear layer with its LoRA update. x (…, I) → y (…, O) in the base layer's dtype."""

    base_layer: nn.Linear
    fused = False
    """Whether it runs as one step of autograd (`lora_linear.py`) where it can."""
    _projection: Projection
    _made_of: Sequence[float] = ()

    def dense(self) -> Tensor:
        return dequantized(self.weight)

    def projection(self) -> Projection:
        """The layer as a member of a group; the same one as long as it is made of the same."""
        base_layer, lora_A = self.base_layer, self.lora_A
        tensors = (self._parameters, self._buffers, base_layer._parameters)
        # all of which are held by it, so that none of the numbers is given a second time
        made_of: list[float] = [id(tensor) for named in tensors for tensor in named.values()]
        made_of.append(id(self.copies))
        made_of += lora_A.shape[0], self.scale, self.dropout if self.training else 0.0
        if made_of != self._made_of:
            self._projection, self._made_of = Projection(self.weight, base_layer.bias, self.update()), made_of
        return self._projection

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and fits(self.base_layer, x):
            return project(x, [self.projection()])[0]
        y = self.base_layer(x)
        A, B = self.factors()
        h = F.dropout(x, self.dropout, self.training).to(A.dtype)
        update = F.linear(F.linear(h, A), B, self.lora_bias) * self.scale
        return self.combined(y, update, self.base_layer.bias)

    def _start(self, site: LoraSite, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        A = torch.empty(site.r, site.in_features)
        nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
        return A, torch.zeros(site.out_features, site.r)

    def _product(self, A: Tensor) -> Tensor:
        weight, bias = gathered(self.weight), self.base_layer.bias
        product_RO = self.base_layer(A.to(weight.dtype if weight.is_floating_point() else A.dtype))
        return (product_RO if bias is None else product_RO - bias).to(A.dtype).T


class LoraEmbedding(LoraLayer):
    """A frozen embedding with its LoRA update. Token ids (…) → (…, H) in the base layer's dtype."""

    NAME_A, NAME_B = "lora_embedding_A", "lora_embedding_B"
    base_layer: nn.Embedding

    def dense(self) -> Tensor:
        return self.weight.detach().T

    def forward(self, ids: Tensor) -> Tensor:
        A, B = self.factors()
        return self.combined(self.base_layer(ids), F.linear(F.embedding(ids, A.T), B) * self.scale)

    def _start(self, site: LoraSite, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        # the other way round than elsewhere, as in HF PEFT
        A = torch.zeros(site.r, site.in_features)
        return A, torch.randn(site.out_features, site.r, generator=generator)

    def _product(self, A: Tensor) -> Tensor:
        return (A.to(self.weight.dtype) @ self.weight).to(A.dtype).T


class WholeModule(Adapted):
    """A module whose parameters are trained as float32 copies; it computes in the base's dtype."""

    def __init__(self, base_layer: nn.Module, names: Sequence[str]) -> None:
        super().__init__(base_layer)
        self.copies = nn.ParameterDict(
            {name: nn.Parameter(gathered(base_layer.get_parameter(name)).detach().float().clone()) for name in names}
        )

    def trained(self) -> dict[str, nn.Parameter]:
        return dict(self.copies.items())

    def forward(self, x: Tensor) -> Tensor:
        dtype = self.weight.dtype
        return functional_call(self.base_layer, {name: copy.to(dtype) for name, copy in self.copies.items()}, (x,))


class TokenRows(Adapted):
    """An embedding, of the input or the output, some of whose rows (N, H) are trained float32 copies.

    With `rows` it takes another's for its own: an output embedding that is tied.
    """

    KEY = "token_adapter.trainable_tokens_delta"

    def __init__(self, base_layer: nn.Module, ids: Sequence[int], rows: nn.Parameter | None = None) -> None:
        super().__init__(base_layer)
        device = self.weight.device
        self.ids_N: Tensor
        self.register_buffer("ids_N", torch.tensor(ids, device=device), persistent=False)
        self.place_V: Tensor
        """Token id → its row, or -1."""
        self.register_buffer("place_V", torch.full((len(self.weight),), -1, device=device), persistent=False)
        self.place_V[self.ids_N] = torch.arange(len(ids), device=device)
        self._follows = rows is not None
        self.rows_NH = nn.Parameter(self.weight.detach()[self.ids_N].float()) if rows is None else rows

    def trained(self) -> dict[str, nn.Parameter]:
        return {} if self._follows else {self.KEY: self.rows_NH}

    def forward(self, x: Tensor) -> Tensor:
        y = self.base_layer(x)
        rows_NH = self.rows_NH.to(y.dtype)
        if isinstance(self.base_layer, nn.Linear):  # x (…, H) → logits (…, V)
            return y.index_copy(-1, self.ids_N, F.linear(x, rows_NH))
        place = self.place_V[x]  # token ids (…) → (…, H)
        return torch.where((place >= 0)[..., None], F.embedding(place.clamp(min=0), rows_NH), y)
