"""The words in which refusals, warnings and disabled paths are explained. Each has one meaning, defined here once."""

from __future__ import annotations

from enum import StrEnum

from sm70_profiles.base import Document


class RefusalCode(StrEnum):
    """Why a request cannot be served as it stands."""

    PROFILE_NOT_FOUND = "ProfileNotFound"
    PROFILE_INVALID = "ProfileInvalid"
    OWNED_FLAG = "OwnedFlag"
    GPU_COUNT = "GPUCount"
    DTYPE = "Dtype"
    DRAFT_MISSING = "DraftMissing"
    DRAFT_UNUSED = "DraftUnused"
    DRAFT_INCOMPATIBLE = "DraftIncompatible"
    SPECULATION_WITH_PREFIX_CACHE = "SpeculationWithPrefixCache"
    MODEL_INCOMPATIBLE = "ModelIncompatible"
    BUDGET = "Budget"


class PathReason(StrEnum):
    """Why a path is not enabled. The spellings are those that users of the release profile know."""

    KV_DTYPE = "kv_dtype"
    BUDGET = "budget<8000"
    PAGE_SIZE = "page_size"
    USER_OVERRIDE = "user_override"
    COMPILE_CACHE_DISABLED = "compile_cache_disabled"
    NOT_APPLICABLE = "not_applicable"
    OPERATOR_MISSING = "operator_missing"
    CONTRACT_MISMATCH = "contract_mismatch"


class TerminationReason(StrEnum):
    """Why the server ended, as `sm70-serve` classifies it."""

    SHUTDOWN = "Shutdown"
    REFUSED = "Refused"
    PATH_NOT_FOUND = "PathNotFound"
    PATH_UNREADABLE = "PathUnreadable"
    DRAFT_INCOMPATIBLE = "DraftIncompatible"
    CHECKSUM_MISMATCH = "ChecksumMismatch"
    MODEL_INVALID = "ModelInvalid"
    ENGINE_UNSUPPORTED = "EngineUnsupported"
    OUT_OF_MEMORY = "OutOfMemory"
    SHARED_MEMORY = "SharedMemoryTooSmall"
    ENGINE_DIED = "EngineDied"
    UNKNOWN = "Unknown"


class Refusal(Document):
    """One mistake: what must hold, what was found, what to do. `field` is a path into the spec."""

    code: RefusalCode
    field: str
    must: str
    found: str
    remedy: str

    def __str__(self) -> str:
        return f"{self.code}: `{self.field}` {self.must}; found {self.found}. {self.remedy}"
