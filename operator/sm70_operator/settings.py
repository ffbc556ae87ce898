"""The operator's settings: one typed object, read once from the environment (prefix `SM70_OPERATOR_`)."""

from __future__ import annotations

import os
from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError

from sm70_profiles.profile import EngineFlavour

PREFIX = "SM70_OPERATOR_"
Image = Annotated[str, StringConstraints(max_length=512)]


class SettingsError(ValueError):
    """A variable has a value that cannot be used. The message names all of them."""


class LogFormat(StrEnum):
    TEXT = "text"
    JSON = "json"


class Settings(BaseModel):
    """Every field is the variable `SM70_OPERATOR_` + its name in capitals."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    namespaces: tuple[str, ...] = Field(
        default=(), description="Namespaces to serve, separated by commas; empty: the whole cluster."
    )
    engine_image_cpu: Image = Field(default="", description="Engine image of the flavour `cpu`.")
    engine_image_sm70: Image = Field(default="", description="Engine image of the flavour `sm70`.")
    judge_image: Image = Field(
        default="", description="Image with `sm70-qualify`, the operator's own; without it nothing can be qualified."
    )
    preflight: bool = Field(
        default=True, description="Check a new revision by a Job without GPUs before a serving one is stopped for it."
    )
    observe_nodes: bool = Field(
        default=True,
        description="Watch Nodes, to say which GPUs there are when a pod waits. Needs get, list and watch on nodes.",
    )
    poll_seconds: int = Field(default=15, ge=1, le=3600, description="Between two reads of a pod's report.")
    poll_timeout_seconds: int = Field(default=5, ge=1, le=60, description="For one read of a pod's report.")
    polls_at_once: int = Field(default=32, ge=1, le=1024, description="Reports that are read at the same time.")
    report_grace_seconds: int = Field(
        default=60, ge=0, le=3600, description="How long the last report stands when the engine does not answer."
    )
    routes_seconds: int = Field(
        default=60, ge=1, le=3600, description="Least time between two writes of `status.routes`."
    )
    resync_seconds: int = Field(
        default=600, ge=1, le=86_400, description="Every service is looked at again after this time, come what may."
    )
    profile_refresh_seconds: int = Field(
        default=60, ge=1, le=3600, description="How often the ConfigMap of a `profileRef` is read again."
    )
    workers: int = Field(
        default=32,
        ge=1,
        le=256,
        description="Services that are reconciled at the same time: one that hangs holds one of them.",
    )
    backoff_base_milliseconds: int = Field(default=500, ge=10, le=60_000, description="First wait after a failure.")
    backoff_limit_seconds: int = Field(default=120, ge=1, le=3600, description="Longest wait after failures in a row.")
    request_timeout_seconds: int = Field(default=15, ge=1, le=300, description="For one request to the API server.")
    watch_timeout_seconds: int = Field(
        default=60, ge=10, le=600, description="A watch is renewed after this time, which also shows that it lives."
    )
    leader_election: bool = Field(default=True, description="Act only while holding the Lease.")
    lease_name: str = Field(default="sm70-operator", min_length=1, max_length=63, description="The Lease's name.")
    lease_namespace: str = Field(
        default="", description="Default: the namespace that the operator runs in, or `default` outside a cluster."
    )
    lease_seconds: int = Field(
        default=15, ge=3, le=300, description="How long a Lease holds that is not renewed; renewed after a third of it."
    )
    listen: str = Field(default="0.0.0.0", description="Address of /metrics and /healthz.")  # noqa: S104
    port: int = Field(default=8080, ge=0, le=65_535, description="Port of /metrics and /healthz; 0: any free one.")
    log_format: LogFormat = Field(default=LogFormat.TEXT, description="`text` or `json`, one object a line.")
    log_level: Annotated[str, StringConstraints(pattern=r"^(DEBUG|INFO|WARNING|ERROR)$")] = Field(
        default="INFO", description="`DEBUG` also shows what kopf does."
    )

    def engine_image(self, flavour: EngineFlavour) -> str:
        """The default image of a flavour; empty when none was given."""
        return self.engine_image_cpu if flavour is EngineFlavour.CPU else self.engine_image_sm70

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Settings:
        """Reads the variables. Raises SettingsError, also for a misspelt name."""
        values: dict[str, object] = {
            name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if name.startswith(PREFIX)
        }
        if "namespaces" in values:
            values["namespaces"] = tuple(filter(None, map(str.strip, str(values["namespaces"]).split(","))))
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            lines = [
                f"{PREFIX}{'.'.join(map(str, one['loc'])).upper()}: {one['msg']}"
                for one in error.errors(include_url=False, include_input=False)
            ]
            raise SettingsError("; ".join(lines)) from None

    @classmethod
    def describe(cls) -> str:
        """Every variable with its default and its meaning, as a Markdown table."""
        lines = ["| variable | default | meaning |", "|---|---|---|"]
        for name, field in cls.model_fields.items():
            default = field.default if field.default not in ("", ()) else ""
            lines.append(
                f"| `{PREFIX}{name.upper()}` | {f'`{default}`' if default != '' else ''} | {field.description or ''} |"
            )
        return "\n".join(lines) + "\n"
