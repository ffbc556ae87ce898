"""ModelOpt checkpoints: as vLLM reads them, also with an E5M2 KV cache, and from compute capability 7.0 on.

vLLM refuses E5M2 for a checkpoint with stored scales of an FP8 cache, because those scales are made for E4M3. They are
not needed: E5M2 has the range for unit scales. Ours drops the stored ones.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from vllm.model_executor.layers.attention import Attention
from vllm.model_executor.layers.quantization import register_quantization_config
from vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsKVCacheMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.quantization.modelopt import ModelOptMixedPrecisionConfig, ModelOptNvFp4Config


class UnitScaleKvCache(CompressedTensorsKVCacheMethod):  # type: ignore[misc]
    """Reads the stored scales and forgets them.

    vLLM admits E5M2 for methods of this family whose configuration declares no scheme of its own.
    """

    def __init__(self) -> None:
        BaseKVCacheMethod.__init__(self, SimpleNamespace(kv_cache_scheme=None))

    def create_weights(self, layer: Any) -> None:
        BaseKVCacheMethod.create_weights(self, layer)

    def process_weights_after_loading(self, layer: Any) -> None:
        for scale in (layer.k_scale, layer.v_scale, layer.q_scale, layer.prob_scale):
            scale.data.fill_(1.0)
        BaseKVCacheMethod.process_weights_after_loading(self, layer)


class _OnSm70:
    """Before one of vLLM's configurations: our KV cache method, and a GPU that its own kernels do not serve."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 70

    def get_quant_method(self, layer: Any, prefix: str) -> Any:
        if isinstance(layer, Attention) and layer.kv_cache_dtype == "fp8_e5m2":
            return UnitScaleKvCache()
        return super().get_quant_method(layer, prefix)  # type: ignore[misc]


class Sm70ModelOptNvFp4Config(_OnSm70, ModelOptNvFp4Config):  # type: ignore[misc]
    """Checkpoints with all quantised layers in NVFP4."""


class Sm70ModelOptMixedConfig(_OnSm70, ModelOptMixedPrecisionConfig):  # type: ignore[misc]
    """Checkpoints that say the format of each layer."""


def register() -> None:
    """Puts our configurations in the place of vLLM's under the same names."""
    register_quantization_config("modelopt_fp4")(Sm70ModelOptNvFp4Config)
    register_quantization_config("modelopt_mixed")(Sm70ModelOptMixedConfig)
