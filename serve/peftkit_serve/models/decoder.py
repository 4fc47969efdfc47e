"""One paged decoder for the Llama, Mistral, Qwen2 and Qwen3 families.

A layer, for the packed rows of a step (x: its input, shared by all requests; pages: each request's own):

    h = norm(x);   q k v = h @ W_qkv;   rotate q and k, write k and v into the pages
    x = x + bottleneck(attention(q, pages) @ W_o)
    h = norm(x);   gate up = h @ W_gate_up
    x = x + bottleneck((activation(gate) · up) @ W_down)

and each of the four products takes its rows' LoRA updates on top, whatever adapters the rows have. A row without a
bottleneck adapter passes the two bottlenecks as it is.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from peftkit_kernels import (
    Segments,
    embedding,
    gelu_tanh_and_mul,
    grouped_bottleneck,
    grouped_lora,
    linear,
    paged_attention,
    rms_norm,
    rope_write_kv,
    silu_and_mul,
)
from peftkit_kernels.dispatch import unchecked
from peftkit_serve.adapters.memory import AdapterMemory, BottleneckTables, LoraTables
from peftkit_serve.batch import Batch, Extras
from peftkit_serve.models.ends import embed, replace_logits
from peftkit_serve.models.spec import ModelSpec
from peftkit_serve.models.weights import LayerWeights, Matrix, ModelWeights, product

# a step's tensors have the shapes that this file gives them, so that no call of a layer need look at them again
_rms_norm, _rope_write_kv, _paged_attention = unchecked(rms_norm), unchecked(rope_write_kv), unchecked(paged_attention)
_grouped_lora, _grouped_bottleneck = unchecked(grouped_lora), unchecked(grouped_bottleneck)
_silu_and_mul, _gelu_tanh_and_mul = unchecked(silu_and_mul), unchecked(gelu_tanh_and_mul)


class Decoder:
    """The forward pass. Holds weights and rotary tables; pages and adapters come with each call."""

    def __init__(
        self, spec: ModelSpec, weights: ModelWeights, memory: AdapterMemory, *, max_position: int, deterministic: bool
    ) -> None:
        """
        max_position: positions that the rotary tables cover; no chunk goes beyond.
        deterministic: a row's result doesn't depend on the rows beside it.
        """
        self._spec, self._weights, self._memory = spec, weights, memory
        self._deterministic = deterministic
        self._gate = _silu_and_mul if spec.activation == "silu" else _gelu_tanh_and_mul
        q, k, v, o, gate, up, down = (shape[0] for shape in spec.projection_shapes)
        self._qkv, self._o, self._gate_up, self._down = (q, k, v), (o,), (gate, up), (down,)
        self._head = (spec.vocab_size,)
        self._cos_XE, self._sin_XE = _rotary_tables(spec, max_position, weights.embedding_VH)

    def forward(
        self, batch: Batch, kv: Sequence[Tensor], inputs_TH: Tensor | None = None, *, num_layers: int | None = None
    ) -> Tensor:
        """Computes a step and writes its keys and values into the pages.

        kv: each layer's kv_PZ2KD. inputs_TH: input embeddings in the place of those of `batch.token_T`. num_layers: so
        many of the layers alone, for what launches their kernels only. Returns the normalised hidden rows (X, H) of
        `batch.sample_row_X`, for `logits`.
        """
        eps = self._spec.norm_eps
        cos_TE, sin_TE = (table.index_select(0, batch.position_T) for table in (self._cos_XE, self._sin_XE))
        x_TH = self._embed(batch) if inputs_TH is None else inputs_TH
        extras = self._extras(batch)
        with_bottlenecks = batch.segments is not None and extras.bottlenecks
        residual_TH: Tensor | None = None
        for index, layer in enumerate(self._weights.layers[:num_layers]):
            adapted = None if batch.segments is None else self._memory.grouped_tables(index)
            beside = self._memory.bottleneck_tables(index) if with_bottlenecks else None
            h_TH, residual_TH = _rms_norm(x_TH, layer.input_norm_H, eps, residual_TH)
            x_TH = self._attention(batch, index, layer, h_TH, cos_TE, sin_TE, kv[index], adapted)
            if beside is not None:
                x_TH = self._bottleneck(batch, x_TH, residual_TH, beside[0])
            h_TH, residual_TH = _rms_norm(x_TH, layer.post_norm_H, eps, residual_TH)
            x_TH = self._mlp(batch, layer, h_TH, adapted if extras.feed_forward else None)
            if beside is not None:
                x_TH = self._bottleneck(batch, x_TH, residual_TH, beside[1])
        assert residual_TH is not None, "a decoder has layers"
        rows = batch.sample_row_X
        return _rms_norm(x_TH[rows], self._weights.norm_H, eps, residual_TH[rows])[0]

    def logits(self, hidden_XH: Tensor, batch: Batch) -> Tensor:
        """Logits (X, V) of the rows that `forward` returned."""
        logits_XV = linear(hidden_XH, self._weights.head_VH, deterministic=self._deterministic)
        rows, extras = batch.sample_segments, self._extras(batch)
        if rows is None:
            return logits_XV
        if extras.ends:
            given = (rows.row_X, batch.sample_spans, self._memory.ends)
            replace_logits(logits_XV, hidden_XH, *given, deterministic=self._deterministic)
        if extras.head_lora:
            self._add_lora(logits_XV, hidden_XH, rows, self._memory.head_tables(), self._head)
        return logits_XV

    def _extras(self, batch: Batch) -> Extras:
        return self._memory.extras if batch.extras is None else batch.extras

    def _embed(self, batch: Batch) -> Tensor:
        x_TH = embedding(batch.token_T, self._weights.embedding_VH)
        if batch.segments is not None and self._extras(batch).ends:
            given = (batch.segments.row_X, batch.spans, self._memory.ends)
            embed(x_TH, batch.token_T, *given, deterministic=self._deterministic)
        return x_TH

    def _attention(
        self,
        batch: Batch,
        index: int,
        layer: LayerWeights,
        h_TH: Tensor,
        cos_TE: Tensor,
        sin_TE: Tensor,
        kv_PZ2KD: Tensor,
        adapted: list[LoraTables] | None,
    ) -> Tensor:
        spec = self._spec
        tables_qkv, tables_o = (None, None) if adapted is None else adapted[:2]
        qkv_TO = self._linear(batch, h_TH, layer.qkv_OI, layer.qkv_bias_O, tables_qkv, self._qkv)
        qkv_TCD = qkv_TO.view(h_TH.shape[0], -1, spec.head_dim)
        if layer.q_norm_D is not None and layer.k_norm_D is not None:
            for heads, weight_D in (
                (qkv_TCD[:, : spec.num_heads], layer.q_norm_D),
                (qkv_TCD[:, spec.num_heads : -spec.num_kv_heads], layer.k_norm_D),
            ):
                heads.copy_(_rms_norm(heads, weight_D, spec.norm_eps)[0])
        q_TQD = _rope_write_kv(qkv_TCD, cos_TE, sin_TE, batch.cell_T, kv_PZ2KD)
        y_TQD = _paged_attention(
            q_TQD,
            kv_PZ2KD,
            batch.page_NM,
            batch.cu_seqlens_N1,
            batch.context_N,
            batch.num_virtual_N,
            scale=spec.head_dim**-0.5,
            window=spec.windows[index],
            deterministic=self._deterministic,
        )
        return self._linear(batch, y_TQD.flatten(1), layer.o_OI, layer.o_bias_O, tables_o, self._o)

    def _mlp(self, batch: Batch, layer: LayerWeights, h_TH: Tensor, adapted: list[LoraTables] | None) -> Tensor:
        tables_gate_up, tables_down = (None, None) if adapted is None else adapted[2:]
        wide_TO = self._linear(batch, h_TH, layer.gate_up_OI, layer.gate_up_bias_O, tables_gate_up, self._gate_up)
        gated = self._gate(wide_TO, deterministic=self._deterministic)
        return self._linear(batch, gated, layer.down_OI, layer.down_bias_O, tables_down, self._down)

    def _linear(
        self,
        batch: Batch,
        x_TI: Tensor,
        weight_OI: Matrix,
        bias_O: Tensor | None,
        tables: LoraTables | None,
        out_features: tuple[int, ...],
    ) -> Tensor:
        """A frozen product, and on top the updates of the adapted rows where `tables` is given."""
        rows = None if tables is None else batch.segments
        y_TO = product(x_TI, weight_OI, bias_O, deterministic=self._deterministic)
        if tables is None or rows is None:
            return y_TO
        return self._add_lora(y_TO, x_TI, rows, tables, out_features)

    def _add_lora(
        self, y_TO: Tensor, x_TI: Tensor, rows: Segments, tables: LoraTables, out_features: tuple[int, ...]
    ) -> Tensor:
        return _grouped_lora(
            y_TO,
            x_TI,
            self._memory.weights,
            rows.row_X,
            rows.start_G1,
            rows.slot_G,
            rows.row_slot_X,
            *tables,
            out_features,
            x_settled=True,  # y is a product of it
            deterministic=self._deterministic,
        )

    def _bottleneck(self, batch: Batch, y_TH: Tensor, residual_TH: Tensor, tables: BottleneckTables) -> Tensor:
        """A sub-layer's output with the bottleneck adapters of its rows."""
        rows = batch.segments
        assert rows is not None
        return _grouped_bottleneck(
            y_TH,
            residual_TH,
            self._memory.weights,
            rows.row_X,
            rows.start_G1,
            rows.slot_G,
            rows.row_slot_X,
            *tables,
            deterministic=self._deterministic,
        )


def _rotary_tables(spec: ModelSpec, max_position: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine of position × frequency, each (max_position, D / 2), in `like`'s dtype and on its device.

    The angle is rounded to float32 as transformers has it; its cosine is taken in float64, where the size of the table
    can't change a bit of the result.
    """
    angle = torch.arange(max_position, dtype=torch.float32)[:, None] * torch.tensor(spec.inv_freq, dtype=torch.float32)
    tables = (angle.double().cos(), angle.double().sin())
    cos, sin = ((table.float() * spec.rope_magnitude).to(like.device, like.dtype) for table in tables)
    return cos, sin
