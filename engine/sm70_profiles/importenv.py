"""Reads the single-GPU launcher's vocabulary and writes the equivalent resource.

The launcher is a shell script that is configured by variables. Here they become typed settings of one of its nine
recipes. A knob that the launcher would ignore without a word is named; a key is noticed and never copied.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from sm70_profiles.base import printable
from sm70_profiles.catalog import load_profile
from sm70_profiles.envfile import BOOLEANS
from sm70_profiles.flags import path_of, setting_of
from sm70_profiles.reasons import Notice, NoticeCode, Refusal, RefusalCode, Severity
from sm70_profiles.resolver import ServeRequest, leaves
from sm70_profiles.resource import DRAFT_MOUNT, TARGET_MOUNT, resource
from sm70_profiles.settings import LongContextKernel, Overrides, merge
from sm70_profiles.typed import (
    Tree,
    UnreadableError,
    dynamic_tokens,
    join,
    nested,
    number,
    read_options,
    share,
    validated,
)

CONTEXTS = ("fast", "long", "huge")
METHODS = {"mtp": "mtp", "dflash2": "dflash2", "off": "off", "none": "off"}
SERVED_NAME = "qwen3.8-27b"
DEFAULT_PORT = 18_020
DEFAULT_INT8_LAYERS = "mlp|linear_attn|self_attn"


@dataclass(frozen=True)
class Imported:
    """A launcher's configuration in this project's words."""

    profile: str | None
    settings: Overrides = field(default_factory=Overrides)
    model: str | None = None
    draft: str | None = None
    extra_args: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    keyed: bool = False
    notices: tuple[Notice, ...] = ()
    refusals: tuple[Refusal, ...] = ()

    @property
    def gpus(self) -> int:
        return (self.settings.tensor_parallel_size or 1) * (self.settings.pipeline_parallel_size or 1)

    def request(self) -> ServeRequest:
        """The request that serves as the launcher would, on its own address. Only without refusals about the arm."""
        if self.profile is None:
            raise ValueError("the context or the speculation is not one of the launcher's")
        return ServeRequest.model_validate(
            {
                "profile": load_profile(self.profile),
                "model_path": self.model if self.model and self.model.startswith("/") else TARGET_MOUNT,
                "draft_path": (self.draft if self.draft.startswith("/") else DRAFT_MOUNT) if self.draft else None,
                "served_name": SERVED_NAME,
                "overrides": self.settings,
                "extra_args": self.extra_args,
                "environment": self.environment or None,
                "gpus": {"count": self.gpus},
                "host": self.host,
                "port": self.port,
                "drain_timeout_seconds": 0,
            }
        )

    def resource(self, name: str) -> dict[str, Any]:
        """The equivalent resource. The key is a reference to a Secret that the user makes."""
        return resource(
            name,
            profile=self.profile or "",
            model=self.model,
            draft=self.draft,
            served_name=SERVED_NAME,
            settings=self.settings,
            extra_args=self.extra_args,
            environment=self.environment,
            gpus=self.gpus,
        )


def import_knobs(knobs: Mapping[str, str], container: bool = False) -> Imported:
    """The launcher's configuration as typed settings. Never raises: what cannot be taken is among the refusals."""
    return _Importer({name: str(value) for name, value in knobs.items()}, container).run()


class _Importer:
    """One import: the knobs, the settings so far, and what there is to say about them."""

    def __init__(self, knobs: Mapping[str, str], container: bool) -> None:
        self._knobs = knobs
        self._container = container
        self._tree: Tree = {}
        self._notices: list[Notice] = []
        self._refusals: list[Refusal] = []
        self._context = ""
        self._method = ""

    def run(self) -> Imported:
        self._context = self._choice("CTX", CONTEXTS, "fast")
        self._method = METHODS.get(self._choice("SPEC", tuple(METHODS), "mtp"), "")
        self._check_booleans()
        if not self._context or not self._method:
            return Imported(profile=None, refusals=tuple(self._refusals))
        for step in (self._drafting, self._lengths, self._kernel, self._prefix_cache, self._precision, self._interface):
            step()
        extra = read_options(self._extra_words(), "EXTRA_ARGS")
        self._refusals += extra.refusals
        self._shadows(extra.settings)
        self._kernel_conflicts()
        settings = merge(self._validated(), extra.settings)
        model, draft = self._given("MODEL"), self._given("DRAFT") if self._method == "dflash2" else None
        if model is None:
            self._note(NoticeCode.MODEL_NOT_GIVEN, "MODEL", "is not set; the launcher would look for one")
        keyed = self._given("VLLM_API_KEY") is not None
        if keyed:
            self._note(NoticeCode.SECRET_NOT_COPIED, "VLLM_API_KEY", "is not copied; put it into the named Secret")
        return Imported(
            profile=f"rtx3090_{self._context}_{self._method}",
            settings=settings,
            model=model,
            draft=draft,
            extra_args=extra.rest,
            environment=self._passed_on(),
            host=self._host(keyed),
            port=self._port(),
            keyed=keyed,
            notices=tuple(self._notices),
            refusals=tuple(self._refusals),
        )

    # Reading knobs ----------------------------------------------------------------------------------------------------

    def _given(self, name: str) -> str | None:
        """The value if it is set and not empty."""
        return self._knobs.get(name) or None

    def _flag(self, name: str) -> bool | None:
        value = self._given(name)
        return None if value not in ("0", "1") else value == "1"

    def _set(self, path: str, value: Any) -> None:
        if value is not None:
            join(self._tree, nested(path, value))

    def _take(self, name: str, path: str, convert: Callable[[str], Any] = str) -> None:
        """Sets a setting from a knob; a value that does not convert is refused."""
        value = self._given(name)
        if value is None:
            return
        try:
            self._set(path, convert(value))
        except UnreadableError as error:
            self._refuse(name, str(error), value)

    def _choice(self, name: str, admitted: tuple[str, ...], default: str) -> str:
        value = self._given(name) or default
        if value in admitted:
            return value
        self._refuse(name, f"must be one of {', '.join(admitted)}", value)
        return ""

    def _check_booleans(self) -> None:
        for name in sorted(BOOLEANS & set(self._knobs)):
            value = self._given(name)
            if value is not None and value not in ("0", "1"):
                self._refuse(name, "must be 0 or 1", value)

    # Steps ------------------------------------------------------------------------------------------------------------

    def _drafting(self) -> None:
        block = self._method == "dflash2"
        if block:
            self._take("DFLASH_TOKENS", "speculation.tokens", number)
            self._take("DRAFT_METHOD", "speculation.method")
            self._set("speculation.lookup", self._flag("LOOKUP"))
            self._set("speculation.lookup_adaptive", self._flag("LOOKUP_ADAPTIVE"))
            self._take("VLLM_SPEC_DECODE_ATTN_QMAX", "single_gpu.split_kv_max_queries", number)
            self._ignored(("DRAFT_TOKENS",), "the block is DFLASH_TOKENS long")
        else:
            if self._method == "mtp":
                self._take("DRAFT_TOKENS", "speculation.tokens", number)
            else:
                self._ignored(("DRAFT_TOKENS", "DRAFT_SAMPLE"), "nothing speculates")
            names = ("DFLASH_TOKENS", "DFLASH_MAX_LEN", "DRAFT_METHOD", "LOOKUP", "LOOKUP_ADAPTIVE", "DRAFT")
            self._ignored(names, "only SPEC=dflash2 reads it")
        if self._method != "off":
            self._take("DRAFT_SAMPLE", "speculation.draft_sample_method")
        self._take("DYNAMIC_K", "speculation.dynamic_tokens", _rows)
        if self._method == "off" and "speculation" in self._tree:
            self._set("speculation.method", "None")
        if self._context == "fast" or (block and self._context == "long"):
            self._set("single_gpu.split_kv_verify", self._flag("SPEC_ATTN"))
        else:
            self._ignored(("SPEC_ATTN",), "this context forces or ignores it")
        self._set("async_scheduling", self._flag("ASYNC_SCHED"))

    def _lengths(self) -> None:
        block = self._method == "dflash2"
        own = block and self._given("DFLASH_MAX_LEN") is not None
        self._take("DFLASH_MAX_LEN" if own else "MAX_LEN", "max_model_len", number)
        self._take("MAX_SEQS", "max_num_seqs", number)
        self._take("GPU_UTIL", "gpu_memory_utilization_percent", share)
        self._take("API_SERVERS", "api_server_count", number)
        self._take("CG", "compilation.max_capture_size", number)
        if "KV_MEM" in self._knobs:
            # An empty value is a wish of its own: no fixed pool.
            self._set("kv_cache_memory_bytes", self._knobs["KV_MEM"] or "0")
        if self._context == "huge":
            self._take("KVARN_POOL_MEM_FRAC", "single_gpu.kvarn_pool_percent", share)
        else:
            self._ignored(("KVARN_POOL_MEM_FRAC",), "only CTX=huge reads it")
        self._set("single_gpu.embedding_in_host_memory", self._flag("EMBED_UVA") or None)
        self._set("single_gpu.wsl_pin_memory", self._flag("VLLM_WSL2_ENABLE_PIN_MEMORY"))
        self._allocator()

    def _allocator(self) -> None:
        value = self._given("PYTORCH_CUDA_ALLOC_CONF")
        switches = {"expandable_segments:True": True, "expandable_segments:False": False}
        if value in switches:
            self._set("expandable_segments", switches[value])

    def _kernel(self) -> None:
        pth, fa2 = self._flag("PTH_FA"), self._flag("FA2_FP8KV")
        kernel = LongContextKernel
        if pth and fa2:
            self._refuse("PTH_FA", "must not be 1 together with FA2_FP8KV", "1", RefusalCode.KERNEL_CONFLICT)
        elif pth:
            self._set("single_gpu.long_context_kernel", kernel.PTH_FLASH_ATTENTION)
        elif fa2:
            self._set("single_gpu.long_context_kernel", kernel.FA2_FP8)
        elif self._context == "long" and self._method != "off":
            excluded = [
                one for one, flag in ((kernel.PTH_FLASH_ATTENTION, pth), (kernel.FA2_FP8, fa2)) if flag is False
            ]
            self._set("single_gpu.excluded_kernels", excluded or None)

    def _kernel_conflicts(self) -> None:
        """The launcher's own check is by the option's name, whatever its value is."""
        words = [word.partition("=")[0] for word in self._extra_words()]
        if self._flag("PTH_FA") and "--speculative-config" in words:
            self._refuse(
                "EXTRA_ARGS",
                "must not hold `--speculative-config` while PTH_FA=1 sets it",
                "--speculative-config",
                RefusalCode.KERNEL_OVERRIDDEN,
            )

    def _prefix_cache(self) -> None:
        self._set("prefix_caching", self._flag("PREFIX_CACHE"))
        exported = self._knobs.get("VLLM_PREFIX_CACHE_RETENTION_INTERVAL")
        value = exported if exported is not None else self._knobs.get("PREFIX_RETENTION")
        names = ("PREFIX_RETENTION", "VLLM_PREFIX_CACHE_RETENTION_INTERVAL")
        if self._method == "off":
            self._ignored(names, "without speculation nothing is retained")
        elif value is not None:
            name = names[1] if exported is not None else names[0]
            try:
                interval = {"dense": True} if value in ("", "None") else {"interval_tokens": number(value)}
                self._set("prefix_retention", interval)
            except UnreadableError as error:
                self._refuse(name, str(error), value)
        self._take("CUDAGRAPH_MODE", "compilation.cudagraph_mode")

    def _precision(self) -> None:
        act = self._given("INT8_ACT")
        if act is not None and act != "int8":
            self._refuse("INT8_ACT", "must be int8 or empty", act)
        elif act is not None:
            layers = self._knobs.get("INT8_LAYERS", DEFAULT_INT8_LAYERS)
            self._set("single_gpu.int8_activations", True)
            self._set("single_gpu.int8_layers", layers.split("|") if layers else None)
        else:
            self._ignored(("INT8_LAYERS",), "INT8_ACT is off")
        self._take("PREFILL_ATTN", "single_gpu.prefill_attention")

    def _interface(self) -> None:
        self._set("tools.enabled", self._flag("TOOLS"))
        self._take("TOOL_PARSER", "tools.parser")
        self._take("TOOL_STRICT", "tools.strict_level")
        if self._flag("REQ_METRICS"):
            self._set("request_metrics", "Detailed" if self._flag("REQ_METRICS_DETAILED") else "Summary")
        else:
            self._ignored(("REQ_METRICS_DETAILED",), "REQ_METRICS is off")
        if self._knobs.get("SSE_KEEP_ALIVE") == "":
            self._set("sse_keep_alive_seconds", -1)
        self._take("SSE_KEEP_ALIVE", "sse_keep_alive_seconds", number)
        self._images()
        self._offload()
        self._ignored(("KV",), "it belongs to the batch mode")

    def _images(self) -> None:
        if not self._flag("VISION"):
            self._ignored(("VISION_OFFLOAD", "VLLM_VISION_CPU_OFFLOAD_GB"), "VISION is off")
            return
        self._set("vision.enabled", True)
        if self._flag("VISION_OFFLOAD") is False:
            self._set("vision.tower_offload_gib", 0)
        else:
            self._take("VLLM_VISION_CPU_OFFLOAD_GB", "vision.tower_offload_gib", number)

    def _offload(self) -> None:
        size = self._given("KV_OFFLOAD_GB")
        if size in (None, "0"):
            return
        if any(
            word.partition("=")[0] in ("--kv-offloading-size", "--kv-transfer-config") for word in self._extra_words()
        ):
            self._note(NoticeCode.CONNECTOR_WINS, "KV_OFFLOAD_GB", "is ignored: EXTRA_ARGS name a KV connector")
        else:
            self._take("KV_OFFLOAD_GB", "kv_offload.size_gib", number)

    # The rest ---------------------------------------------------------------------------------------------------------

    def _extra_words(self) -> list[str]:
        """The launcher splits on white space and honours no quotes."""
        return self._knobs.get("EXTRA_ARGS", "").split()

    def _shadows(self, extra: Overrides) -> None:
        mine = self._validated()
        recipe = load_profile(f"rtx3090_{self._context}_{self._method}").settings
        for setting, value in leaves(extra):
            known = setting_of(mine, setting) if setting_of(mine, setting) is not None else setting_of(recipe, setting)
            if known is not None and known != value:
                message = f"set `overrides.{path_of(setting)}` and win over the knob or the recipe"
                self._note(NoticeCode.KNOB_SHADOWED, "EXTRA_ARGS", message)

    def _passed_on(self) -> dict[str, str]:
        value = self._given("PYTORCH_CUDA_ALLOC_CONF")
        if value is None or "expandable_segments" in self._tree:
            return {}
        return {"PYTORCH_CUDA_ALLOC_CONF": value}

    def _host(self, keyed: bool) -> str:
        asked = self._given("HOST")
        if asked is not None:
            self._note(NoticeCode.EXPOSED_ADDRESS, "HOST", "is not taken: a pod listens on all its addresses")
            return asked
        return "0.0.0.0" if keyed or self._container else "127.0.0.1"  # noqa: S104  # as the launcher decides it

    def _port(self) -> int:
        value = self._given("PORT")
        try:
            return number(value) if value is not None else DEFAULT_PORT
        except UnreadableError as error:
            self._refuse("PORT", str(error), value or "")
            return DEFAULT_PORT

    def _validated(self) -> Overrides:
        """The settings so far; what does not validate is refused once and dropped."""
        names = {info.alias or name: name for name, info in Overrides.model_fields.items()}
        for _ in range(len(names)):
            try:
                return validated(self._tree)
            except ValueError as error:
                for one in getattr(error, "errors", list)():
                    section = names.get(str(one["loc"][0]), str(one["loc"][0]))
                    path = ".".join(str(part) for part in one["loc"])
                    self._refuse(path, f"has a value that is not admitted: {one['msg']}", str(one.get("input")))
                    self._tree.pop(section, None)
        return Overrides()

    def _ignored(self, names: tuple[str, ...], why: str) -> None:
        for name in names:
            if self._given(name) is not None:
                self._note(NoticeCode.KNOB_IGNORED, name, f"has no effect with CTX={self._context}: {why}")

    def _note(self, code: NoticeCode, knob: str, message: str) -> None:
        self._notices.append(Notice(code=code, severity=Severity.WARNING, field=knob, message=message))

    def _refuse(self, knob: str, must: str, found: str, code: RefusalCode = RefusalCode.KNOB_VALUE) -> None:
        self._refusals.append(
            Refusal(
                code=code,
                field=knob,
                must=must,
                found=f"`{printable(found, 60)}`",
                remedy="Correct the knob, or remove it.",
            )
        )


def _rows(text: str) -> list[Tree]:
    try:
        return dynamic_tokens(json.loads(text))
    except (ValueError, RecursionError):
        raise UnreadableError("must be a JSON list of [first batch, last batch, tokens]") from None
