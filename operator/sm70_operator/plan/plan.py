"""The plan as a value: actions with their reasons, the status, events, and when to look again."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

from sm70_operator.api.types import Status
from sm70_operator.render.objects import Manifest


@dataclass(frozen=True)
class Apply:
    """Server-side apply of a whole object."""

    manifest: Manifest
    because: str
    known: bool
    """The object was seen and is ours. Otherwise whoever acts must look first that nobody else has the name."""
    runs: str = ""
    """The revision that runs by this: whoever acts must make sure that no other one does, by a fresh look."""
    starts: bool = False


@dataclass(frozen=True)
class Scale:
    """Sets the replicas of a Deployment, provided that it is still as it was seen, and changes nothing else of it."""

    name: str
    uid: str
    version: str
    replicas: int
    because: str
    runs: str = ""
    starts: bool = False


@dataclass(frozen=True)
class Delete:
    """Deletes a Deployment, provided that it is still as it was seen."""

    name: str
    uid: str
    version: str
    because: str


Action: TypeAlias = Apply | Scale | Delete


class EventType(StrEnum):
    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True)
class Event:
    """Something that changed, for `kubectl describe`. Never repeated while nothing changes."""

    type: EventType
    reason: str
    action: str
    note: str


@dataclass(frozen=True)
class Plan:
    """`status` None: leave it alone (the service is being deleted)."""

    actions: tuple[Action, ...] = ()
    status: Status | None = None
    events: tuple[Event, ...] = ()
    wake_after_seconds: float | None = None
