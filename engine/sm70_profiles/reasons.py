"""The words in which refusals, notices and disabled paths are explained.

Each is defined here once with its meaning; `docs/reference/reasons.md` is generated from this module.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Self

from sm70_profiles.base import Document


class Vocabulary(StrEnum):
    """Words with a documented meaning: a member is written `NAME = "spelling", "meaning"`."""

    meaning: str

    def __new__(cls, spelling: str, meaning: str) -> Self:
        member = str.__new__(cls, spelling)
        member._value_ = spelling
        member.meaning = meaning
        return member


class RefusalCode(Vocabulary):
    """Why a request cannot be served as it stands."""

    PROFILE_NOT_FOUND = "ProfileNotFound", "No built-in profile has this name."
    PROFILE_INVALID = "ProfileInvalid", "The profile document does not fit the schema."
    RESOURCE_INVALID = "ResourceInvalid", "The resource does not fit the schema."
    OWNED_FLAG = "OwnedFlag", "`extraArgs` holds an option that a typed field owns."
    FLAG_UNKNOWN = "FlagUnknown", "`extraArgs` holds an option that the engine does not have."
    FLAG_UNSUPPORTED = "FlagUnsupported", "A setting needs an option, variable or value that the engine does not have."
    GPU_COUNT = "GPUCount", "The number of GPUs is not tensor parallel size times pipeline parallel size."
    GPU_ARCHITECTURE = "GPUArchitecture", "The GPU has another compute capability than the recipe's kernels."
    GPU_PRODUCT = "GPUProduct", "No GPU at hand is one of the products that the recipe admits."
    GPU_MEMORY = "GPUMemory", "One GPU has less memory than the recipe demands."
    TOPOLOGY = "Topology", "The GPUs are not connected as the recipe demands."
    DTYPE = "Dtype", "The GPU cannot compute in this type."
    DTYPE_WITH_SPECULATION = "DtypeWithSpeculation", "The engine's verify kernel cannot compute in this type."
    DRAFT_MISSING = "DraftMissing", "Speculation needs a draft model and none is given or pinned."
    DRAFT_UNUSED = "DraftUnused", "A draft model is given and nothing speculates with it."
    DRAFT_INCOMPATIBLE = "DraftIncompatible", "The draft model was made for another target."
    DRAFT_IN_TARGET_PATH = "DraftInTargetPath", "The target's path would make the engine take it for a draft."
    SPECULATION_WITH_PREFIX_CACHE = (
        "SpeculationWithPrefixCache",
        "The CPU engine cannot speculate on a hybrid model while prefix caching is on.",
    )
    SPECULATION_METHOD = "SpeculationMethodMissing", "Speculation is configured without a method."
    MODEL_INCOMPATIBLE = "ModelIncompatible", "The model's architecture or shape is not the one the recipe is for."
    PARALLEL_SHAPE = "ParallelShape", "Heads or layers cannot be split into so many parts."
    BUDGET = "Budget", "A step may hold fewer tokens than sequences."
    BUDGET_OVER_POOL = "BudgetOverPool", "A step this large needs more KV cache than the recipe's fixed pool holds."
    CONTEXT_TOO_LONG = "ContextTooLong", "The context is longer than the model's positions."
    POOL_TOO_SMALL = "PoolTooSmall", "The KV cache cannot hold one request at the full context length."
    MEMORY = "Memory", "The prediction leaves no headroom on the GPU."
    CAPTURE_TOO_LARGE = "CaptureTooLarge", "Graphs for batches this large do not fit beside the recipe's pool."
    VISION_RESIDENT = "VisionResident", "The vision tower does not fit on the GPU beside a draft model."
    VISION_LIMITS = "VisionLimits", "The smallest image is larger than the largest."
    DYNAMIC_TOKENS_WITH_PREFIX_CACHE = (
        "DynamicTokensWithPrefixCache",
        "A verify length that changes with the batch corrupts prefix hits on this KV format.",
    )
    DYNAMIC_TOKENS_RANGE = "DynamicTokensRange", "A batch size has two draft lengths, or one above `tokens`."
    CUDAGRAPH_UNSAFE = "CudagraphUnsafe", "Full graphs corrupt prefix hits on this KV format with this method."
    KERNEL_ARM = "KernelArm", "The long-context kernel was not measured with this context and speculation."
    KERNEL_SETUP = "KernelSetup", "The long-context kernel was measured with another drafting setup."
    KERNEL_OVERRIDDEN = "KernelOverridden", "A setting contradicts what the long-context kernel fixes."
    KERNEL_WITH_OFFLOAD = "KernelWithOffload", "The long-context kernel was not tested with a KV tier in host memory."
    KERNEL_MISSING = "KernelMissing", "The long-context kernel is not installed in the engine."
    KERNEL_CONFLICT = "KernelConflict", "Two long-context kernels are demanded at once."
    KV_BACKEND = "KvBackend", "The attention backend cannot read this KV format on this GPU."
    RETENTION_MULTIPLE = "RetentionMultiple", "The retention interval is not a multiple of the attention block."
    MATCH_UNIT = "MatchUnit", "The prefix match unit is not a multiple of the KV format's tile."
    PREFIX_SETTING_WITHOUT_CACHE = "PrefixSettingWithoutCache", "A prefix-cache setting is given while caching is off."
    BLOCK_SIZE = "BlockSize", "Block sizes do not fit each other or the engine's granularity."
    ALLOCATOR_WITH_OFFLOAD = "AllocatorWithOffload", "Expandable segments are rejected beside a KV connector."
    ALLOCATOR_WITH_ALL_REDUCE = (
        "AllocatorWithAllReduce",
        "Expandable segments cannot be exported to the custom all-reduce under graphs.",
    )
    ACTIVATION_LAYERS = "ActivationLayers", "INT8 activations on this choice of layers crash the compiler."
    METRICS_WITHOUT_STATS = "MetricsWithoutStats", "Request metrics need the engine's statistics, which are off."
    SHARED_MEMORY = "SharedMemory", "The KV tier in host memory is larger than the shared memory."
    KNOB_VALUE = "KnobValue", "A knob of the launcher has a value outside its set."
    KNOB_SYNTAX = "KnobSyntax", "A line of the environment file cannot be read without running it."
    ALLOWED_PATH_UNKNOWN = (
        "AllowedPathUnknown",
        "`acceleration.allowDisabled` names a path that the recipe does not expect.",
    )


class PathReason(Vocabulary):
    """Why a path is not enabled. The spellings are those that users of the release profile know."""

    KV_DTYPE = "kv_dtype", "The KV cache has another type than the path reads."
    BUDGET = (
        "budget<8000",
        "The token budget of a step is neither the path's native size nor at least 8000.",
    )
    PAGE_SIZE = "page_size", "The KV page holds fewer tokens than the path's partitions."
    PAGE_ALIGNMENT = "page_alignment", "The KV page is not a multiple of 16 tokens."
    USER_OVERRIDE = "user_override", "A setting or a switch of the environment turns the path off."
    COMPILATION_DISABLED = "compilation_disabled", "Graphs are turned off in the compilation settings."
    COMPILE_CACHE_DISABLED = (
        "compile_cache_disabled",
        "Compiled code is not kept between starts. Decoding is as fast as with a cache.",
    )
    INDUCTOR_CACHE_DISABLED = "inductor_cache_disabled", "The compiler's own cache is turned off in the environment."
    NOT_APPLICABLE = "not_applicable", "The path belongs to another engine, GPU, model or method."
    OPERATOR_MISSING = "operator_missing", "The engine lacks the operator; spelled `operator_missing:NAME`."
    CONTRACT_MISMATCH = (
        "contract_mismatch",
        "Model, draft or hardware differ from what the path was qualified on; spelled `contract_mismatch:FIELD`.",
    )
    METHOD = "method", "Another speculation method than the path verifies; spelled `method=FOUND≠WANTED`."
    NUM_SPECULATIVE_TOKENS = (
        "num_speculative_tokens",
        "Another draft length than the path verifies; spelled `num_speculative_tokens=FOUND≠WANTED`.",
    )
    TENSOR_PARALLEL_SIZE = (
        "tensor_parallel_size",
        "Another tensor parallel size than the path's shapes; spelled `tensor_parallel_size=FOUND≠WANTED`.",
    )
    PIPELINE_PARALLEL_SIZE = (
        "pipeline_parallel_size",
        "Another pipeline parallel size than the path's shapes; spelled `pipeline_parallel_size=FOUND≠WANTED`.",
    )
    CONTEXT_CAPACITY = "context_capacity", "The context length is not the one that the path's workspace is cut for."
    HEAD_DIM = "head_dim", "The attention heads have another size than the kernel's tiles."
    GQA = "gqa", "The kernel does not pack this many query heads to one KV head."
    CODEC = "codec", "The weights are stored in another format than the path reads."
    PREFIX_CACHING_DISABLED = "prefix_caching_disabled", "The path works on cached prefixes, and caching is off."
    CONFIGURATION_NOT_RESOLVED = (
        "configuration_not_resolved",
        "A setting or shape that decides is not known yet, so the path is not claimed.",
    )


class NoticeCode(Vocabulary):
    """What the resolver changed, or what a user should know although it is served."""

    VERIFY_LENGTH_PINNED = (
        "VerifyLengthPinned",
        "The verify length is held constant: a changing one corrupts prefix hits.",
    )
    POOL_UNPINNED = "PoolUnpinned", "The fixed KV pool was sized for one GPU and is left to the engine on several."
    ALLOCATOR_FOR_WSL = "AllocatorForWsl", "Expandable segments are off: the paravirtual driver rejects them."
    ALLOCATOR_FOR_OFFLOAD = (
        "AllocatorForOffload",
        "Expandable segments are off: the engine rejects them with a KV tier.",
    )
    ALLOCATOR_FOR_ALL_REDUCE = (
        "AllocatorForAllReduce",
        "Expandable segments are off: the custom all-reduce cannot export them under graphs.",
    )
    PINNED_MEMORY_FOR_WSL = "PinnedMemoryForWsl", "Pinned buffers are on: the V2 runner needs them there."
    KERNEL_CHOSEN = "KernelChosen", "Which long-context kernel reads the KV cache."
    KERNEL_OVER_DEFAULT = "KernelOverDefault", "The chosen kernel displaced the default one."
    SPLIT_KV_WITHOUT_EFFECT = "SplitKvWithoutEffect", "The chosen kernel brings its own split-KV verify."
    SEATS_OVER_RESIDENTS = "SeatsOverResidents", "More sequences are admitted than the KV cache can hold at once."
    SEATS_OVER_MEASURED = "SeatsOverMeasured", "More sequences than were seen to survive the first prompt."
    POOL_OVER_DEFAULT = "PoolOverDefault", "The KV pool is larger than the recipe's and eats its headroom."
    LONG_BLOCK_ON_SEVERAL_GPUS = "LongBlockOnSeveralGpus", "A long verify block lost speed on several GPUs."
    DYNAMIC_TOKENS_IGNORED = "DynamicTokensIgnored", "Draft lengths by batch size have no effect without speculation."
    RETENTION_UNMEASURED = "RetentionUnmeasured", "No retention interval was measured for this draft length."
    LARGE_DRAFT = "LargeDraft", "The draft is larger than the one that the memory defaults were sized for."
    CONNECTOR_WINS = "ConnectorWins", "A KV connector in `extraArgs` wins over `kvOffload`."
    KNOB_IGNORED = "KnobIgnored", "A knob has no effect with this context and speculation."
    KNOB_SHADOWED = "KnobShadowed", "An option of the extra arguments displaces a knob."
    SECRET_NOT_COPIED = "SecretNotCopied", "A key was found and is not written; create a Secret for it."
    EXPOSED_ADDRESS = "ExposedAddress", "The launcher bound an address that a pod cannot keep."
    MODEL_NOT_GIVEN = "ModelNotGiven", "The launcher would search for a model; name one."
    UNSAFE_ACKNOWLEDGED = "UnsafeAcknowledged", "The user asked for what the recipe calls unsafe."
    UNMEASURED_ACKNOWLEDGED = "UnmeasuredAcknowledged", "The user asked for what was not measured."
    BLOCK_SIZE_WILL_GROW = "BlockSizeWillGrow", "The engine enlarges the KV page so that it covers a recurrent state."
    DOWNLOAD = "Download", "The first start downloads a checkpoint."
    FEATURE_MISSING = "FeatureMissing", "The engine lacks a feature of the recipe and serves without it."
    HEADROOM = "Headroom", "Little memory is left for mixed loads."
    UNVERIFIED = "Unverified", "A pinned checksum is unknown, so the checkpoint cannot be verified."
    STATE_CACHE_MODE_DROPPED = "StateCacheModeDropped", "Without prefix caching no recurrent states are kept."
    LOGPROBS_UNVERIFIED = "LogprobsUnverified", "Prompt log-probabilities were wrong with this combination before."
    KV_GROUPS_DIFFER = "KvGroupsDiffer", "The engine groups layers otherwise than the recipe's figures assume."


class TerminationReason(Vocabulary):
    """Why the server ended, as `sm70-serve` classifies it."""

    SHUTDOWN = "Shutdown", "It was asked to stop and did."
    PASSED = "Passed", "A preflight found nothing that would keep the server from starting."
    REFUSED = "Refused", "The request does not resolve; the message lists the refusals."
    PATH_NOT_FOUND = "PathNotFound", "The model or draft folder does not exist."
    PATH_UNREADABLE = "PathUnreadable", "The server's user may not read the model or draft."
    DRAFT_INCOMPATIBLE = "DraftIncompatible", "The draft does not fit the target."
    ACCELERATION_REFUSED = (
        "AccelerationRefused",
        "A strict start was asked for and an expected path is not enabled.",
    )
    CHECKSUM_MISMATCH = "ChecksumMismatch", "A file has another SHA-256 than the one demanded."
    MODEL_INVALID = "ModelInvalid", "The checkpoint is incomplete or of no known format."
    ENGINE_UNSUPPORTED = "EngineUnsupported", "vLLM or torch has another version than the engine was made for."
    OUT_OF_MEMORY = "OutOfMemory", "The container's memory ran out."
    GPU_OUT_OF_MEMORY = "GPUOutOfMemory", "A GPU's memory ran out."
    NO_KERNEL_IMAGE = "NoKernelImage", "The engine has no code for this GPU's architecture."
    DRIVER_TOO_OLD = "DriverTooOld", "The node's driver is older than the engine's CUDA needs."
    NCCL_FAILURE = "NCCLFailure", "The ranks could not communicate."
    SHARED_MEMORY = "SharedMemoryTooSmall", "The shared memory is too small for the workers."
    DISK_FULL = "DiskFull", "A disk has less room than what has to be written to it."
    CACHE_UNWRITABLE = "CacheUnwritable", "A volume that has to be written to cannot be."
    DOWNLOAD_FAILED = "DownloadFailed", "A download was interrupted by the network or the hub; it can be gone on with."
    REPOSITORY_NOT_FOUND = "RepositoryNotFound", "The hub has no such repository or revision, or does not show it."
    ACCESS_DENIED = "AccessDenied", "The repository is gated and the token does not open it."
    ENGINE_DIED = "EngineDied", "The engine's process ended by itself."
    UNKNOWN = "Unknown", "None of the known causes; the message holds the last error."


class Refusal(Document):
    """One mistake: what must hold, what was found, what to do. `field` is a path into the spec."""

    code: RefusalCode
    field: str
    must: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code}: `{self.field}` {self.must}; found {self.found}. {self.remedy}"


class Severity(StrEnum):
    """How much a notice matters."""

    ADJUSTMENT = "adjustment"
    WARNING = "warning"
    NOTE = "note"


class Notice(Document):
    """Something that was changed or should be known. `field` is a path into the spec."""

    code: NoticeCode
    severity: Severity
    field: str
    message: str

    def __str__(self) -> str:
        return f"{self.code}: `{self.field}` {self.message}"
