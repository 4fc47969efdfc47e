"""The low-rank updates of a LoRA by module, with the scale folded in, and their singular values without out × in."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from peftkit.artifact import Artifact
from peftkit.artifact.lora_shapes import own_shapes
from peftkit.errors import UnsupportedError
from peftkit.methods import LoraConfig
from peftkit.methods.lora import PREFIX
from peftkit.methods.lora_layers import LoraEmbedding, LoraLinear
from peftkit.methods.method import matrices


@dataclass(frozen=True, slots=True)
class Factors:
    """ΔW = B A, float32; an embedding's is the transpose of its weight's change."""

    A: Tensor
    """(r, in)"""
    B: Tensor
    """(out, r)"""
    embedding: bool = False

    @property
    def shape(self) -> tuple[int, int]:
        """(out, in)"""
        return len(self.B), self.A.shape[1]

    def dense(self) -> Tensor:
        """ΔW (out, in)."""
        return self.B @ self.A

    def svd(self) -> tuple[Tensor, Tensor, Tensor]:
        """U (out, r), S (r,) and Vᵀ (r, in) of ΔW in float64, by QR of both factors: no out × in matrix is formed."""
        Q_out, R_out = torch.linalg.qr(self.B.double())
        Q_in, R_in = torch.linalg.qr(self.A.double().T)
        U, S, Vh = torch.linalg.svd(R_out @ R_in.T, full_matrices=False)
        return Q_out @ U, S, Vh @ Q_in.T


def factors_of(artifact: Artifact) -> dict[str, Factors]:
    """Module path → its update. Raises UnsupportedError for an adapter that isn't a sum of low-rank updates."""
    config = artifact.config
    if not isinstance(config, LoraConfig):
        raise UnsupportedError(f"{artifact.path} is a {config.kind} adapter: only LoRA is a change of weights")
    beside = {
        "variant dora rescales rows by norms that depend on the base": config.variant == "dora",
        "lora_bias adds biases": config.lora_bias,
        "modules_to_save replaces weights": bool(config.modules_to_save),
        "trainable_token_indices replaces rows": bool(config.trainable_token_indices),
    }
    if reasons := [reason for reason, used in beside.items() if used]:
        raise UnsupportedError(
            f"{artifact.path} is more than a low-rank change of weights: {'; '.join(reasons)}. Such adapters have no "
            "exact composition: merge each into the base by itself"
        )
    return _factors(config, artifact.tensors, str(artifact.path))


def _factors(config: LoraConfig, tensors: Mapping[str, Tensor], where: str) -> dict[str, Factors]:
    factors: dict[str, Factors] = {}
    for path, site in config.resolve(matrices(own_shapes(tensors, config, where))).items():
        layer = LoraEmbedding if site.embedding else LoraLinear
        A, B = (tensors[f"{PREFIX}{path}.{name}"].float() for name in (layer.NAME_A, layer.NAME_B))
        factors[path] = Factors(A, B * site.scale, site.embedding)
    return factors
