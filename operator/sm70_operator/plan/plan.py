"""The plan as a value: actions with their reasons, the status, events, and when to look again.

`plan(snapshot, now, settings) -> Plan` is pure, and whoever carries a plan out (`act.apply.Executor`, or a model of the
world in a test) keeps to this:

- Actions are done in order. One that cannot be done now (another one is newer, something still ends) ends the round;
  nothing after it is done, and the next snapshot decides anew.
- `Apply` and `Scale` with `runs` start or keep pods of that revision. They are done only after a *fresh* look shows
  that no other revision, save those in `beside`, asks for pods or has any: with one set of GPUs, two never run.
- `Scale`, `Delete`, `Record` and an `Apply` with `version` name what was seen and fail if it has changed since.
- `Apply` with `promotes` moves the public Service's selector: the one decision about traffic, and its record.
- A plan may be given up between any two actions; the next one, from what then is, leads to the same world.
"""

from __future__ import annotations

from collections.abc import Mapping
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
    beside: frozenset[str] = frozenset()
    """Revisions that may run at the same time: a second set of GPUs is free."""
    starts: bool = False
    promotes: str = ""
    """The revision that gets the public traffic by this; set when that is another one than before."""
    version: str = ""
    """If set, the resourceVersion that the object must still have."""


@dataclass(frozen=True)
class Scale:
    """Sets the replicas of a Deployment, provided that it is still as it was seen, and changes nothing else of it."""

    name: str
    uid: str
    version: str
    replicas: int
    because: str
    runs: str = ""
    beside: frozenset[str] = frozenset()
    starts: bool = False


@dataclass(frozen=True)
class Delete:
    """Deletes an object, provided that it is still as it was seen.

    Without `uid` and `version`: an object of a kind that is not watched. Whoever acts looks first whether it is there
    and belongs to this service.
    """

    name: str
    uid: str
    version: str
    because: str
    kind: str = "Deployment"


@dataclass(frozen=True)
class Record:
    """Writes annotations on a ControllerRevision: a decision that must outlive this process. None removes one."""

    name: str
    uid: str
    version: str
    annotations: Mapping[str, str | None]
    because: str


@dataclass(frozen=True)
class Conclude:
    """Writes the status of an Sm70Qualification whose run has ended: the verdict, once and for all."""

    name: str
    uid: str
    status: Manifest
    because: str


Action: TypeAlias = Apply | Scale | Delete | Record | Conclude


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
    needs_nodes: bool = False
    """The snapshot came without nodes and holders, and they decide: look again with them before doing anything."""

    @property
    def promotes(self) -> bool:
        """Another revision gets the public traffic by this; the status says so, and is true once that is done."""
        return any(isinstance(action, Apply) and action.promotes for action in self.actions)
