"""Evidence: is this very way to serve proven already, may it be tried again, or has its proof become stale?

A key names what a measurement is valid for. Before a pod runs, parts of it are unknown (the image's digest behind a
tag, the GPU's product, the driver), so the planner asks with a `Wanted`, of which an unknown part matches everything;
only a complete one can be written into evidence.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import StrEnum

from sm70_operator.api.conditions import Finding, Reason, with_remedy
from sm70_operator.api.pod import KeyReference
from sm70_operator.api.qualification import Evidence
from sm70_operator.api.types import OnInconclusive, Qualification, QualificationTime
from sm70_operator.render.revision import Revision
from sm70_profiles.base import printable
from sm70_profiles.identity import QualificationIdentity, digest, driver_branch
from sm70_profiles.qualification import Verdict
from sm70_profiles.report import DeviceFacts
from sm70_profiles.resolver import Resolution
from sm70_profiles.spec import CheckpointSource

CPU = "cpu"
"""Product and driver branch of a server that computes on no GPU."""
MAX_KNOWN = 256
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@dataclass(frozen=True)
class Place:
    """Where a server runs, as far as a measurement depends on it."""

    gpu_product: str
    driver_branch: str


def place_of(device: DeviceFacts) -> Place | None:
    """The place by the engine's own report; None while it does not say. Products are spelt as node labels are."""
    if device.compute_capability is None and device.driver is None:
        return Place(CPU, CPU)
    if not device.name or not device.driver:
        return None
    branch = driver_branch(printable(device.driver, 64))
    return Place(printable(device.name, 128).replace(" ", "-"), branch) if branch else None


def image_identity(image: str, image_id: str = "") -> str | None:
    """The digest that a pod really runs: the container's `imageID`, else the one in the reference; None if neither.

    A tag is no identity, since it can be moved.
    """
    for text in (image_id, image):
        if found := _DIGEST.findall(text):
            return str(found[-1])
    return None


def checkpoint_identity(source: CheckpointSource, sha256: dict[str, str] | None = None) -> str:
    """What is known of a checkpoint without reading it: its place, and the checksums that the spec demands.

    Files that are exchanged under the same path of a claim or folder are not noticed: pin `sha256`, or use another
    path.
    """
    if source.persistent_volume_claim is not None:
        claim = source.persistent_volume_claim
        text = f"claim {claim.claim_name}/{claim.path or ''}"
    elif source.host_path is not None:
        text = f"folder {source.host_path.path}"
    elif source.image is not None:
        text = f"image {source.image.reference}/{source.image.path or ''}"
    else:
        # At a hub the revision names the files, wherever they are kept.
        hub = source.hub
        assert hub is not None, "a checkpoint has exactly one source"
        text = f"{'huggingface' if source.hugging_face else 'modelscope'} {hub.repo}@{hub.pin}"
    if sha256:
        text += f" sha256 {digest(sha256)}"
    return text if len(text) <= MAX_KNOWN else f"source {digest(text)}"


@dataclass(frozen=True)
class Wanted:
    """An identity of which some parts may still be unknown (None)."""

    model: str
    draft: str | None
    profile_hash: str
    resolution_hash: str
    tensor_parallel_size: int
    pipeline_parallel_size: int
    image_digest: str | None = None
    gpu_product: str | None = None
    driver_branch: str | None = None

    def complete(self) -> QualificationIdentity | None:
        """The key, or None while something is unknown."""
        if self.image_digest is None or self.gpu_product is None or self.driver_branch is None:
            return None
        return QualificationIdentity.model_validate(vars(self))

    def matches(self, key: QualificationIdentity) -> bool:
        """The key is this one as far as this one is known."""
        return self.same_work(key) and self.same_place(key)

    def same_work(self, key: QualificationIdentity) -> bool:
        """Image, model, draft, configuration and sizes agree."""
        fixed = ("draft", "model", "profile_hash", "resolution_hash", "tensor_parallel_size", "pipeline_parallel_size")
        same = all(getattr(self, name) == getattr(key, name) for name in fixed)
        return same and self.image_digest in (None, key.image_digest)

    def same_place(self, key: QualificationIdentity) -> bool:
        """GPU product and driver branch agree."""
        return self.gpu_product in (None, key.gpu_product) and self.driver_branch in (None, key.driver_branch)


def wanted_identity(
    revision: Revision, resolution: Resolution, image_id: str = "", device: DeviceFacts | None = None
) -> Wanted:
    """The identity of a revision. `image_id` and `device` are those of its running pod, where there is one."""
    place = None if device is None else place_of(device)
    settings = resolution.settings
    draft = revision.draft
    return Wanted(
        model=checkpoint_identity(revision.model),
        draft=None if draft is None else checkpoint_identity(draft, draft.sha256),
        profile_hash=resolution.profile_hash,
        resolution_hash=_work(revision, resolution),
        tensor_parallel_size=settings.tensor_parallel_size or 1,
        pipeline_parallel_size=settings.pipeline_parallel_size or 1,
        image_digest=image_identity(revision.image, image_id),
        gpu_product=None if place is None else place.gpu_product,
        driver_branch=None if place is None else place.driver_branch,
    )


def _work(revision: Revision, resolution: Resolution) -> str:
    """How the server computes. A user's own variables reach the engine beside the resolved ones, so they count too."""
    if not revision.user_env:
        return resolution.hash
    return digest({"resolution": resolution.hash, "env": revision.user_env})


class Standing(StrEnum):
    """What the evidence says of a revision."""

    NOT_REQUIRED = "NotRequired"
    PROVEN = "Proven"
    FAILED = "Failed"
    UNDECIDED = "Undecided"
    """All attempts ended Inconclusive or Error."""
    RUNNING = "Running"
    MISSING = "Missing"
    """None yet, or attempts are left."""
    STALE = "Stale"
    """Proven on another GPU product or driver branch: it must be judged again, and nothing is stopped for that."""


@dataclass(frozen=True)
class EvidenceView:
    """`evidence` is the object that decides; `next_attempt` is the number of the run that would come next."""

    standing: Standing
    finding: Finding
    evidence: Evidence | None = None
    next_attempt: int = 1
    last: Verdict | None = None
    """The verdict of the newest finished run against the key."""
    certain: bool = False
    """The whole key is known: image digest, product and driver of what really runs."""

    def admits(self, policy: Qualification) -> bool:
        """The revision may have the public traffic, as far as evidence is concerned.

        What is proven for a part of the key is good enough to begin a rollout with, and no proof for what then runs.
        """
        if self.standing is Standing.NOT_REQUIRED:
            return True
        if self.standing is Standing.UNDECIDED:
            promotes = policy.on_inconclusive is OnInconclusive.PROMOTE and self.last is Verdict.INCONCLUSIVE
            return self.certain and promotes
        return self.certain and self.standing is Standing.PROVEN


@dataclass(frozen=True)
class AskedSuite:
    """The suite by which a revision is judged. `digest` and `config` are set where it is the user's own."""

    name: str
    digest: str | None = None
    config: KeyReference | None = None


def judge_evidence(
    found: Sequence[Evidence],
    wanted: Wanted | None,
    policy: Qualification | None,
    suite: AskedSuite | None = None,
) -> EvidenceView:
    """What the namespace's evidence says of an identity, with the finding for `Qualified`.

    Any run that passed proves the key, whichever service it was made for; a run that failed decides too, because the
    same key is not tried again while its evidence exists. `wanted` None: nothing is known of the revision. `suite`
    None: the built-in one that the policy names.
    """
    view = _judged(found, wanted, policy, suite)
    return replace(view, certain=wanted is not None and wanted.complete() is not None)


def _judged(
    found: Sequence[Evidence], wanted: Wanted | None, policy: Qualification | None, suite: AskedSuite | None
) -> EvidenceView:
    if policy is None or policy.when is QualificationTime.NEVER:
        text = "No qualification is demanded."
        return EvidenceView(Standing.NOT_REQUIRED, Finding.unknown(Reason.NOT_REQUIRED, text))
    suite = suite or AskedSuite(policy.suite)
    runs = [one for one in found if _asks(one, suite, policy) and not one.deleting]
    mine = [] if wanted is None else [one for one in runs if wanted.matches(one.spec.key)]
    mine.sort(key=lambda one: (one.spec.attempt, one.name))
    attempts = policy.repeats + 1
    upcoming = max((one.spec.attempt for one in mine), default=0) + 1
    if passed := _with(mine, Verdict.PASSED):
        text = f"`{passed.name}` passed suite `{suite.name}` ({passed.status.summary} gates)."
        return EvidenceView(Standing.PROVEN, Finding.true(Reason.PASSED, text), passed, upcoming, Verdict.PASSED)
    if failed := _with(mine, Verdict.FAILED):
        finding = _false(Reason.GATE_FAILED, f"`{failed.name}`: {_wrong(failed)}")
        return EvidenceView(Standing.FAILED, finding, failed, upcoming, Verdict.FAILED)
    done = [one for one in mine if one.finished]
    last = done[-1] if done else None
    verdict = None if last is None else last.status.verdict
    if running := next((one for one in reversed(mine) if not one.finished), None):
        text = f"`{running.name}` runs suite `{suite.name}`, attempt {running.spec.attempt} of {attempts}."
        return EvidenceView(Standing.RUNNING, Finding.unknown(Reason.RUNNING, text), running, upcoming, verdict)
    if last is not None:
        reason = Reason.INCONCLUSIVE if verdict is Verdict.INCONCLUSIVE else Reason.RUN_ERROR
        tried = f"attempt {len(done)} of {attempts}"
        over = len(done) >= attempts
        text = f"`{last.name}` ({tried}): {_wrong(last)}"
        finding = _false(reason, text) if over else Finding.unknown(reason, f"{text} It is run again.")
        return EvidenceView(Standing.UNDECIDED if over else Standing.MISSING, finding, last, upcoming, verdict)
    if wanted is not None and (stale := _stale(runs, wanted)) is not None:
        key = stale.spec.key
        then, now = f"`{key.gpu_product}`, driver {key.driver_branch}", _place_text(wanted)
        finding = _false(Reason.STALE, f"`{stale.name}` passed on {then}; the server now runs on {now}.")
        return EvidenceView(Standing.STALE, finding, stale, upcoming)
    text = f"There is no evidence of suite `{suite.name}` for this revision yet."
    return EvidenceView(Standing.MISSING, Finding.unknown(Reason.EVIDENCE_MISSING, text), None, upcoming)


def _asks(run: Evidence, suite: AskedSuite, policy: Qualification) -> bool:
    asked = (suite.name, suite.digest, policy.thresholds)
    return (run.spec.suite, run.spec.suite_digest, run.spec.thresholds) == asked


def _with(runs: Sequence[Evidence], verdict: Verdict) -> Evidence | None:
    return next((one for one in reversed(runs) if one.status.verdict is verdict), None)


def _stale(runs: Sequence[Evidence], wanted: Wanted) -> Evidence | None:
    """A pass for the same work in another place, the newest one."""
    passed = [one for one in runs if one.status.verdict is Verdict.PASSED and wanted.same_work(one.spec.key)]
    elsewhere = [one for one in passed if not wanted.same_place(one.spec.key)]
    return max(elsewhere, key=lambda one: (str(one.status.finished_at), one.name), default=None)


def _wrong(run: Evidence) -> str:
    """The gates that are not passed, in the form `name: 41 tokens/s, at least 60`."""
    gates = [gate for gate in run.status.gates if gate.verdict is not Verdict.PASSED]
    texts = []
    for gate in gates[:6]:
        unit = f" {printable(gate.unit, 32)}" if gate.unit else ""
        figures = ""
        if gate.measured is not None and gate.threshold is not None:
            side = "at least" if gate.bound.value == "AtLeast" else "at most"
            figures = f": {printable(gate.measured, 40)}{unit}, {side} {printable(gate.threshold, 40)}"
        why = f" ({printable(gate.message, 300)})" if gate.message else ""
        texts.append(f"gate `{printable(gate.name, 63)}` {gate.verdict}{figures}{why}")
    if len(gates) > len(texts):
        texts.append(f"{len(gates) - len(texts)} more gates")
    text = "; ".join(texts) or printable(run.status.message, 600) or f"verdict {run.status.verdict}"
    return text if text.endswith((".", "…")) else f"{text}."


def _place_text(wanted: Wanted) -> str:
    return f"`{wanted.gpu_product or 'unknown'}`, driver {wanted.driver_branch or 'unknown'}"


def _false(reason: Reason, found: str) -> Finding:
    return Finding.false(reason, with_remedy(reason, found))
