"""`FLASH_ATTN_V100`: vLLM's attention backend over this repository's kernels.

It registers as vLLM's CUSTOM backend, since a new name in vLLM's enumeration cannot be sent to its engine process. The
KV cache has vLLM's layout [blocks, KV heads, page, 2 D], a token's K and V side by side.

CUDA graphs: a captured batch is uniform (every request has as many queries), so that one launch serves it whatever the
lengths; padded requests have length 0. Everything that a kernel reads lies in vLLM's persistent tensors or in the
workspace that is made with the layers, before memory is profiled.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import Any, ClassVar

import torch
from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    MultipleOf,
)

from sm70_engine.acceleration.routes import count_now
from sm70_engine.attention.dispatch import (
    BRIDGE,
    HEAD_DIMS,
    MAX_GROUP,
    Given,
    Heads,
    Kernel,
    Part,
    Segment,
    choose,
    kv_format,
    parts,
    reserved_rows,
    segments,
)
from sm70_engine.attention.present import operators_present
from sm70_engine.kernels import torch_bridge, torch_ops
from sm70_engine.kernels.plans import VERIFY_TILES, KvFormat
from sm70_engine.kernels.prefill import PREFILL_DIMS, bridge_workspace_bytes
from sm70_profiles.routes import FallbackReason
from sm70_profiles.rules import switched_off

NAME = "FLASH_ATTN_V100"
MAX_ROWS = 256
"""Queries of one launch of the row-wise fallback."""
logger = init_logger("vllm.sm70")
refusals: dict[str, FallbackReason] = {}
"""By route and stage, why a fallback is taken in this process: known from the layers, before anything is served."""


def capturing() -> bool:
    """Whether launches go into a CUDA graph; never where there is no GPU."""
    return bool(torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())


@cache
def has_prefill() -> bool:
    """Whether the prefill kernels are among this build's objects."""
    return "splitd_prefill" in operators_present()


@cache
def has_bridge() -> bool:
    """Whether FP8 contexts are expanded: the kernels are there and the user did not turn the path off."""
    return "fp8_prefill_bridge" in operators_present() and not switched_off("fp8_prefill_bridge", os.environ)


@dataclass
class FlashAttnV100Metadata:
    """One step. Tensors are vLLM's persistent ones; `row_lengths` [tokens] is made when it is needed."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool
    segments: tuple[Segment, ...]
    given: Given
    lengths: tuple[int, ...] = ()
    """Of the requests, on the host: exact for those in prefill."""
    row_lengths: torch.Tensor | None = None
    _parts: dict[Heads, tuple[Part, ...]] = field(default_factory=dict)
    _schedules: dict[tuple[Heads, Part], torch.Tensor] = field(default_factory=dict)

    def parts_of(self, heads: Heads) -> tuple[Part, ...]:
        """The calls of this step for layers of this shape; the same for all of them."""
        if heads not in self._parts:
            self._parts[heads] = parts(heads, self.segments, self.given, self.lengths)
        return self._parts[heads]

    def schedule_of(self, heads: Heads, part: Part, make: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The prefill kernel's schedule of a part on the device, made by the first layer that needs it."""
        if (heads, part) not in self._schedules:
            made, device = make(), self.seq_lens.device
            # Pinned, the copy does not wait for what the GPU still does.
            self._schedules[heads, part] = (
                made.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else made
            )
        return self._schedules[heads, part]

    def lengths_of_rows(self) -> torch.Tensor:
        """int32 [tokens]: the tokens that each query of a causal batch sees, itself included."""
        if self.row_lengths is None:
            starts, device = self.query_start_loc, self.seq_lens.device
            token = torch.arange(self.num_actual_tokens, device=device, dtype=torch.int32)
            request = torch.searchsorted(starts[1:].contiguous(), token, right=True)
            request.clamp_(max=self.seq_lens.shape[0] - 1)
            self.row_lengths = (self.seq_lens[request] - (starts[request + 1] - 1 - token)).int()
        return self.row_lengths


class FlashAttnV100Builder(AttentionMetadataBuilder[FlashAttnV100Metadata]):  # type: ignore[misc]
    """Makes a step's metadata; all layers of a group share it."""

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH
    # Lengths and block tables are read on the device when a graph is replayed: nothing has to be made anew.
    supports_draft_decode_metadata_update: bool = True

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        speculative = vllm_config.speculative_config
        self._drafted = int(speculative.num_speculative_tokens or 0) if speculative is not None else 0
        self._prefill = has_prefill()
        tail, long = (not switched_off(path, os.environ) for path in ("scalar_tail", "long_context"))
        self._page = int(kv_cache_spec.block_size) if tail else 0
        self._capacity = int(vllm_config.model_config.max_model_len) if long else 0
        self._init_reorder_batch_threshold(1, supports_spec_as_decode=True)

    def build(
        self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False
    ) -> FlashAttnV100Metadata:
        common = common_attn_metadata
        if isinstance(common.causal, torch.Tensor):
            raise NotImplementedError(f"{NAME}: requests of one batch must all be causal, or none")
        requests, bound = common.num_reqs, common.seq_lens_cpu_upper_bound
        known = bound is not None and not capturing()
        given = Given(bool(common.causal), self._drafted, self._prefill, known, self._page, self._capacity)
        return FlashAttnV100Metadata(
            num_actual_tokens=common.num_actual_tokens,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table_tensor,
            slot_mapping=common.slot_mapping,
            causal=given.causal,
            segments=segments(common.query_start_loc_cpu[: requests + 1].tolist()),
            given=given,
            lengths=tuple(bound[:requests].tolist()) if known else (),
        )

    def build_for_cudagraph_capture(self, common_attn_metadata: Any) -> FlashAttnV100Metadata:
        metadata = self.build(0, common_attn_metadata)
        metadata.given = replace(metadata.given, lengths=False)  # they are other ones at every replay
        metadata.seq_lens.fill_(1)
        return metadata

    def update_draft_decode_metadata(self, metadata: FlashAttnV100Metadata) -> None:
        """Nothing to do: see above."""


class FlashAttnV100Backend(AttentionBackend):  # type: ignore[misc]
    """What vLLM asks before it chooses."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "fp8", "fp8_e4m3", "fp8_e5m2"]
    forward_includes_kv_cache_update: bool = False

    @staticmethod
    def get_name() -> str:
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[FlashAttnV100]:
        return FlashAttnV100

    @staticmethod
    def get_builder_cls() -> type[FlashAttnV100Builder]:
        return FlashAttnV100Builder

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[Any]:
        return [MultipleOf(16)]

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        return head_size in HEAD_DIMS

    @classmethod
    def supports_non_causal(cls) -> bool:
        return True

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return bool(attn_type == AttentionType.DECODER)

    @classmethod
    def supports_device_cpu_query_lens_mismatch(cls) -> bool:
        return False  # segments are made of the host's query lengths


class FlashAttnV100(AttentionImpl):  # type: ignore[misc]
    """One attention layer."""

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        **extra: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype = kv_cache_dtype
        self.kv_sharing_target_layer_name = kv_sharing_target_layer_name
        unknown = sorted(name for name, value in extra.items() if value is not None)
        if alibi_slopes is not None or logits_soft_cap or unknown or num_heads > MAX_GROUP * self.num_kv_heads:
            raise NotImplementedError(
                f"{NAME} takes 1 to {MAX_GROUP} query heads a KV head, no ALiBi slopes, no soft cap and none of "
                f"{unknown or 'other options'}; choose another `attentionBackend` for this model"
            )
        group = num_heads // self.num_kv_heads
        form = kv_format(kv_cache_dtype)
        self.heads = Heads(head_size, group, self.num_kv_heads, form, sliding_window or 0)
        self._workspace = _workspace_for(self.heads)
        self._copy, rows = _copy_for(self.heads)
        self.heads = replace(self.heads, bridge_rows=rows)
        _note_refusals(self.heads)

    # ------------------------------------------------------------ KV cache

    def _view(self, kv_cache: torch.Tensor) -> torch.Tensor:
        """[blocks, 2, page, KV heads, D] of vLLM's [blocks, KV heads, page, 2 D]."""
        return kv_cache.unflatten(3, (2, self.head_size)).permute(0, 3, 2, 1, 4)

    def _scales(self, layer: Any) -> tuple[float, float]:
        if self.heads.kv_format is KvFormat.F16:
            return 1.0, 1.0
        return float(layer._k_scale_float), float(layer._v_scale_float)

    def do_kv_cache_update(
        self,
        layer: Any,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        if kv_cache.numel() == 0:
            return
        view, form = self._view(kv_cache), str(self.heads.kv_format)
        torch_ops.kv_cache_write(view, key, value, slot_mapping, form, *self._scales(layer))

    # ------------------------------------------------------------ attention

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: FlashAttnV100Metadata | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """query, output: FP16 [tokens, heads, D]. Padded tokens behind the last request get nothing."""
        if attn_metadata is None:  # memory is being profiled
            return output.fill_(0)
        view, scales = self._view(kv_cache), self._scales(layer)
        for part in attn_metadata.parts_of(self.heads):
            count_now(part.choice.route, part.choice.stage, capturing(), part.choice.refusal)
            if part.choice.bridged:
                count_now(BRIDGE, part.choice.stage, capturing())
            first, last = part.segments[0], part.segments[-1]
            tokens = slice(first.token, last.token + last.count * last.queries)
            _Call(self, query[tokens], output[tokens], view, attn_metadata, part, scales).run()
        return output

    @property
    def workspace(self) -> torch.Tensor:
        return self._workspace.tensor

    @property
    def copy(self) -> torch.Tensor:
        return self._copy.tensor


@dataclass(frozen=True)
class _Call:
    """One part of a batch in one layer."""

    layer: FlashAttnV100
    query: torch.Tensor
    out: torch.Tensor
    cache: torch.Tensor
    metadata: FlashAttnV100Metadata
    part: Part
    scales: tuple[float, float]

    @property
    def segment(self) -> Segment:
        return self.part.segments[0]

    def _requests(self) -> slice:
        last = self.part.segments[-1]
        return slice(self.segment.first, last.first + last.count)

    def run(self) -> None:
        match self.part.choice.kernel:
            case Kernel.DECODE:
                self.decode()
            case Kernel.VERIFY:
                self.verify()
            case Kernel.PREFILL:
                self.prefill()
            case Kernel.ROWS:
                self.rows()

    def prefill(self) -> None:
        rows, metadata, heads = self._requests(), self.metadata, self.layer.heads
        queries = [segment.queries for segment in self.part.segments for _ in range(segment.count)]
        lengths, form = metadata.lengths[rows], str(heads.kv_format)

        sequences, workspace = tuple(zip(queries, lengths, strict=True)), self.layer.workspace[torch_ops.KEPT_BYTES :]
        if self.part.choice.bridged:
            make = partial(torch_bridge.bridged_work, self.cache, form, heads.group, sequences)
            torch_bridge.bridged_attention(
                self.out, workspace, self.layer.copy, self.query, self.cache, metadata.block_table[rows],
                metadata.schedule_of(heads, self.part, make), form, queries, lengths, True, self.layer.scale,
                *self.scales,
            )  # fmt: skip
            return
        make = partial(torch_ops.prefill_work, self.cache, form, heads.group, sequences, True, heads.window)
        torch_ops.prefill_attention(
            self.out, workspace, self.query, self.cache, metadata.block_table[rows],
            metadata.schedule_of(heads, self.part, make), form, queries, lengths, True, self.layer.scale, *self.scales,
            heads.window,
        )  # fmt: skip

    def decode(self) -> None:
        rows, metadata = self._requests(), self.metadata
        self._decode(self.query, self.out, metadata.block_table[rows], metadata.seq_lens[rows], self.layer.heads.window)

    def _decode(
        self, query: torch.Tensor, out: torch.Tensor, table: torch.Tensor, lengths: torch.Tensor, window: int
    ) -> None:
        form, scale = str(self.layer.heads.kv_format), self.layer.scale
        workspace = self.layer.workspace
        torch_ops.decode_attention(out, workspace, query, self.cache, table, lengths, form, scale, *self.scales, window)

    def verify(self) -> None:
        rows, metadata, heads = self._requests(), self.metadata, self.layer.heads
        torch_ops.verify_attention(
            self.out, self.layer.workspace, self.query, self.cache, metadata.block_table[rows],
            metadata.seq_lens[rows], str(heads.kv_format), self.segment.queries, metadata.causal, self.layer.scale,
            *self.scales, heads.window,
        )  # fmt: skip

    def rows(self) -> None:
        """Every query as a sequence of its own. In a graph: by the query's place within its request, any lengths."""
        if not self.metadata.causal or capturing():
            self._rows_by_place()
        else:
            self._rows_by_request()

    def _rows_by_request(self) -> None:
        lengths, queries, window = self.metadata.lengths_of_rows(), self.segment.queries, self.layer.heads.window
        for index in range(self.segment.count):
            request, begin = self.segment.first + index, index * queries
            for first in range(begin, begin + queries, MAX_ROWS):
                rows = slice(first, min(first + MAX_ROWS, begin + queries))
                seen = lengths[self.segment.token + rows.start : self.segment.token + rows.stop]
                table = self.metadata.block_table[request : request + 1].expand(rows.stop - rows.start, -1)
                self._decode(self.query[rows], self.out[rows], table, seen, window)

    def _rows_by_place(self) -> None:
        """A query that is not causal sees the whole sequence, and a window that begins where its own does."""
        queries, window, causal = self.segment.queries, self.layer.heads.window, self.metadata.causal
        rows = self._requests()
        lengths, table = self.metadata.seq_lens[rows], self.metadata.block_table[rows]
        for place in range(queries):
            behind = queries - 1 - place
            seen = (lengths - behind).clamp_(min=0) if causal else lengths
            wide = window + behind if window and not causal else window
            self._decode(self.query[place::queries], self.out[place::queries], table, seen, wide)


# ---------------------------------------------------------------- workspace


class _Workspace:
    """Scratch memory that all layers of a device share: they run one after another on one stream.

    Grows only while layers are made, which is before memory is profiled and before a graph is captured.
    """

    def __init__(self, device: torch.device) -> None:
        self.device, self.tensor = device, torch.zeros(0, dtype=torch.uint8, device=device)

    def reserve(self, needed: int) -> None:
        if self.tensor.numel() < needed:
            self.tensor = torch.zeros(needed, dtype=torch.uint8, device=self.device)


_workspaces: dict[torch.device, _Workspace] = {}
_copies: dict[torch.device, _Workspace] = {}


def _workspace_for(heads: Heads) -> _Workspace:
    device = torch.device("cuda", torch.cuda.current_device())
    multiprocessors = torch_ops.prepare(device)
    config = get_current_vllm_config()
    sequences = max(MAX_ROWS, config.scheduler_config.max_num_seqs)
    queries = 8 * max(VERIFY_TILES.get(heads.dim, (0,))) // heads.group
    needed = torch_ops.attention_workspace_bytes(
        str(heads.kv_format), heads.kv_heads, heads.group, heads.dim, sequences, queries, multiprocessors
    )
    if heads.dim in PREFILL_DIMS:
        needed = max(needed, torch_ops.KEPT_BYTES + torch_ops.prefill_workspace_bytes(heads.dim, multiprocessors))
    workspace = _workspaces.setdefault(device, _Workspace(device))
    workspace.reserve(needed)
    return workspace


def _copy_for(heads: Heads) -> tuple[_Workspace, int]:
    """The memory of expanded contexts, and how many tokens it holds for layers of this shape; 0 where none are.

    Reserved for the longest request that the server admits, before memory is profiled.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    copy = _copies.setdefault(device, _Workspace(device))
    rows = reserved_rows(heads, int(get_current_vllm_config().model_config.max_model_len)) if has_bridge() else 0
    copy.reserve(bridge_workspace_bytes(rows, heads.kv_heads, heads.dim))
    return copy, rows


def reserved_bytes() -> int:
    """What expanded contexts keep of this process's GPU, whatever is served."""
    return sum(copy.tensor.numel() for copy in _copies.values())


def _note_refusals(heads: Heads) -> None:
    """What this layer will take a fallback for, whatever is served: said once, before the first request."""
    speculative = get_current_vllm_config().speculative_config
    drafted = int(speculative.num_speculative_tokens or 0) if speculative is not None else 0
    for queries, causal in ((1, True), (1 + drafted, True), (1 + drafted, drafted == 0), (4096, True)):
        choice = choose(heads, queries, Given(causal, drafted, has_prefill()))
        name = f"{choice.route}/{choice.stage}"
        if choice.refusal is not None and name not in refusals:
            refusals[name] = choice.refusal
            logger.info("sm70: %s: %s (%s)", name, choice.refusal.meaning, heads)
