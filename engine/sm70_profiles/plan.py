"""A request on its way to a resolution: the settings so far, who decided each, and what was noticed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from sm70_profiles.engines import EngineTable, Feature
from sm70_profiles.facts import EngineFacts, Facts, GpuFacts, HostFacts, ModelFacts, complete
from sm70_profiles.flags import setting_of, spec_path
from sm70_profiles.memory import draft_tokens, gpu_models
from sm70_profiles.profile import EngineFlavour, Profile
from sm70_profiles.reasons import Notice, NoticeCode, Severity
from sm70_profiles.settings import (
    DRAFT_MODEL_METHODS,
    Acknowledgement,
    KvCacheDtype,
    Overrides,
    SpeculationMethod,
    with_value,
)

if TYPE_CHECKING:
    from sm70_profiles.resolver import ServeRequest


@dataclass
class Plan:
    """The one mutable object of a resolution; it never leaves `resolve`."""

    request: ServeRequest
    facts: Facts
    table: EngineTable
    settings: Overrides
    adjusted: dict[str, str] = field(default_factory=dict)
    """Why each adjusted setting has its value, by its dotted path."""
    notices: list[Notice] = field(default_factory=list)

    @property
    def profile(self) -> Profile:
        return self.request.profile

    @property
    def gpu(self) -> GpuFacts:
        """The GPU at hand, completed by what is known of its product."""
        gpu = self.facts.gpu or GpuFacts()
        known = gpu_models().get(gpu.product or "")
        if known is None:
            return gpu
        return gpu.model_copy(
            update={
                "memory_mib": gpu.memory_mib or known.memory_mib,
                "compute_capability": gpu.compute_capability or known.compute_capability,
            }
        )

    @property
    def model(self) -> ModelFacts:
        """The model at hand; what it does not say of itself is taken from the recipe's."""
        return complete(self.facts.model, self.profile.model_shape) or ModelFacts()

    @property
    def draft(self) -> ModelFacts | None:
        """The draft at hand, completed in the same way."""
        return complete(self.facts.draft, self.profile.draft.shape)

    @property
    def engine(self) -> EngineFacts:
        return self.facts.engine or EngineFacts()

    @property
    def host(self) -> HostFacts:
        return self.facts.host or HostFacts()

    @property
    def method(self) -> SpeculationMethod:
        speculation = self.settings.speculation
        return (speculation.method if speculation else None) or SpeculationMethod.NONE

    @property
    def drafts_with_model(self) -> bool:
        return self.method in DRAFT_MODEL_METHODS

    @property
    def tokens(self) -> int:
        """Draft tokens a round; 0 when nothing speculates."""
        return draft_tokens(self.settings, self.draft)

    @property
    def trained_tokens(self) -> int:
        """Draft tokens that the draft was trained for; longer blocks are filled by lookup."""
        return self.profile.draft.tokens or 7

    @property
    def long_block(self) -> bool:
        return self.drafts_with_model and self.tokens > self.trained_tokens

    @property
    def kvarn(self) -> bool:
        return self.settings.kv_cache_dtype is KvCacheDtype.KVARN_K4V2

    @property
    def caching(self) -> bool:
        """Prefix caching; the engine turns it on unless told otherwise."""
        return self.settings.prefix_caching is not False

    @property
    def ranks(self) -> int:
        return (self.settings.tensor_parallel_size or 1) * (self.settings.pipeline_parallel_size or 1)

    @property
    def connector(self) -> bool:
        """Whether keys and values leave the GPU: a tier in host memory or a transfer configuration."""
        offload = self.settings.kv_offload
        return bool(offload and offload.size_gib) or self.has_argument("--kv-transfer-config")

    @property
    def single_gpu(self) -> bool:
        """Whether the recipe is one of the single-GPU launcher's."""
        return self.profile.engine.flavour is EngineFlavour.SINGLE_GPU

    def has_argument(self, option: str) -> bool:
        """Whether `extraArgs` hold the option."""
        return any(word.partition("=")[0] == option for word in self.request.extra_args)

    def has_feature(self, feature: Feature) -> bool:
        """Whether the engine is known to have it."""
        return feature in (self.engine.features or ())

    def lacks_feature(self, feature: Feature) -> bool:
        """Whether the engine is known to lack it."""
        return self.engine.features is not None and feature not in self.engine.features

    def acknowledged(self, what: Acknowledgement) -> bool:
        return what in (self.settings.acknowledge or ())

    def value(self, setting: str) -> Any:
        """The value so far, by its dotted path."""
        return setting_of(self.settings, setting)

    def explicit(self, setting: str) -> Any:
        """What the user asked for, or None."""
        return setting_of(self.request.overrides, setting)

    def adjust(self, setting: str, value: Any, because: str) -> None:
        """Gives a setting another value and remembers why; nothing is remembered when it has that value already."""
        if self.value(setting) != value:
            self.settings = with_value(self.settings, setting, value)
            self.adjusted[setting] = because

    def adjustment(self, code: NoticeCode, setting: str, value: Any, because: str) -> None:
        """An adjustment that the user should see."""
        self.adjust(setting, value, because)
        self.notice(code, Severity.ADJUSTMENT, setting, because)

    def notice(self, code: NoticeCode, severity: Severity, setting: str, message: str) -> None:
        """Something that the user should know. `setting` is a dotted path, or a field outside the overrides."""
        self.notices.append(Notice(code=code, severity=severity, field=spec_path(setting), message=message))
