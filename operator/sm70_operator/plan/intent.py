"""What the spec asks for: a resolved revision, or why there is none. The operator's half of admission."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from pydantic import ValidationError

from sm70_operator.api import names
from sm70_operator.api.conditions import Finding, Reason, with_remedy
from sm70_operator.api.hashing import attempt_name, revision_name, source_name
from sm70_operator.api.types import Qualification, QualificationTime, Spec
from sm70_operator.observe.revisions import RevisionFacts
from sm70_operator.observe.snapshot import Resource, Snapshot, UserDocument
from sm70_operator.plan.evidence import AskedSuite
from sm70_operator.render import revision as revisions
from sm70_operator.render.revision import Revision, cache_volume, checkpoint_path, pod_resources, quantity
from sm70_operator.settings import Settings
from sm70_profiles.catalog import ProfileNotFoundError, load_profile
from sm70_profiles.documents import DocumentError, describe, parse_profile
from sm70_profiles.profile import Profile
from sm70_profiles.qualification import Performance, QualificationError, Suite, load_suite, parse_suite
from sm70_profiles.report import printable
from sm70_profiles.resolver import Resolution, ServeRequest, resolve


@dataclass(frozen=True)
class Target:
    """The spec resolves, or was resolved once: a stored revision of the same spec stands, whatever this operator's
    version would make of it.
    """

    spec: Spec
    name: str
    revision: Revision
    resolution: Resolution
    source: str
    """Names what of the spec it is made from."""
    attempt: str
    """Names the whole spec, for which a rejection holds."""
    suite: AskedSuite
    recorded: bool = False


@dataclass(frozen=True)
class Rejected:
    """The spec does not resolve. `spec` is None when it cannot even be read."""

    spec: Spec | None
    finding: Finding


class _Refused(Exception):  # noqa: N818  # carries a finding, not an error
    def __init__(self, reason: Reason, found: str) -> None:
        super().__init__(found)
        self.finding = Finding.false(reason, printable(with_remedy(reason, found), 4096))


def read_intent(snapshot: Snapshot, settings: Settings) -> Target | Rejected:
    """Reads and resolves the spec. Never raises: whatever is wrong becomes the finding for `Accepted`."""
    spec = None
    try:
        spec = _read_spec(snapshot.resource)
        suite, wrong = _read_suite(spec.qualification, snapshot.suite)
        if spec.rollout.rollback_to is not None:
            _refuse(wrong)
            return _recorded(snapshot, spec, spec.rollout.rollback_to, suite)
        profile = _read_profile(spec, snapshot.profile)
        source = source_name(snapshot.resource.spec, None if spec.profile is not None else profile)
        known = [one for one in _records(snapshot) if one.source == source and one.document is not None]
        if known:
            _refuse(wrong)
            return _target(snapshot, spec, max(known, key=lambda one: one.number), source, suite)
        return _resolve(snapshot.resource, spec, profile, settings, source, suite, wrong)
    except _Refused as refused:
        return Rejected(spec, refused.finding)


def _records(snapshot: Snapshot) -> list[RevisionFacts]:
    uid = snapshot.resource.uid
    return [one for one in snapshot.revisions if one.object.owner == uid and not one.object.deleting]


def _refuse(refusals: Sequence[str]) -> None:
    if refusals:
        raise _Refused(Reason.REFUSED, " ".join(_sentence(refusal) for refusal in refusals))


def _recorded(snapshot: Snapshot, spec: Spec, name: str, suite: AskedSuite) -> Target:
    """The stored revision of this name."""
    found = [one for one in _records(snapshot) if one.name == name]
    if found and found[0].document is not None:
        return _target(snapshot, spec, found[0], f"rollback to {name}", suite)
    there = ", ".join(f"`{one.name}`" for one in sorted(_records(snapshot), key=lambda one: -one.number)[:10])
    why = "cannot be read by this version of the operator" if found else f"found only {there or 'none'}"
    raise _Refused(Reason.REFUSED, f"`rollout.rollbackTo` must name a stored revision; `{name}` {why}.")


def _target(snapshot: Snapshot, spec: Spec, found: RevisionFacts, source: str, suite: AskedSuite) -> Target:
    document, resolution = found.document, found.resolution
    assert document is not None
    assert resolution is not None
    attempt = attempt_name(snapshot.resource.spec, source)
    return Target(spec, found.name, document, resolution, source, attempt, suite, recorded=True)


def _read_spec(resource: Resource) -> Spec:
    try:
        return Spec.model_validate(resource.spec)
    except ValidationError as error:
        raise _Refused(Reason.SCHEMA_UNSUPPORTED, f"The stored spec cannot be read: {describe(error)}.") from None


def _read_profile(spec: Spec, document: UserDocument | None) -> Profile:
    if spec.profile is not None:
        try:
            return load_profile(spec.profile)
        except ProfileNotFoundError as error:
            raise _Refused(Reason.PROFILE_NOT_FOUND, f"{_sentence(str(error))}") from None
    if document is None or document.text is None:
        missing = "`profileRef` could not be read" if document is None else document.missing
        raise _Refused(Reason.PROFILE_NOT_FOUND, _sentence(missing))
    try:
        return parse_profile(document.text)
    except DocumentError as error:
        raise _Refused(Reason.PROFILE_INVALID, _sentence(str(error))) from None


def _resolve(
    resource: Resource,
    spec: Spec,
    profile: Profile,
    settings: Settings,
    source: str,
    suite: AskedSuite,
    wrong: Sequence[str],
) -> Target:
    try:
        request = ServeRequest(
            profile=profile,
            model_path=checkpoint_path(spec.model, names.MODEL_MOUNT),
            draft_path=None if spec.draft is None else checkpoint_path(spec.draft, names.DRAFT_MOUNT),
            draft_sha256=(spec.draft.sha256 or None) if spec.draft else None,
            served_name=spec.model.served_name or resource.key.name,
            overrides=spec.overrides,
            extra_args=spec.extra_args,
            environment={one.name: one.value for one in spec.env if one.value is not None} or None,
            gpus=spec.gpus,
            acceleration=spec.acceleration,
            drain_timeout_seconds=spec.rollout.drain_timeout_seconds,
            port=names.HTTP_PORT,
        )
    except ValidationError as error:
        raise _Refused(Reason.SCHEMA_UNSUPPORTED, f"The stored spec cannot be read: {describe(error)}.") from None
    resolution = resolve(request)
    image = spec.engine.image or settings.engine_image(resolution.flavour)
    _refuse([*map(str, resolution.refusals), *_own_refusals(spec, resolution, image), *wrong])
    document = Revision(
        render_version=revisions.RENDER_VERSION,
        request=request,
        args=resolution.argv,
        env=resolution.env,
        user_env=spec.env,
        api_key=spec.auth.api_key_secret_ref,
        image=image,
        image_pull_policy=spec.engine.image_pull_policy,
        image_pull_secrets=spec.engine.image_pull_secrets,
        model=spec.model,
        draft=spec.draft,
        cache=cache_volume(resource.key.name, spec),
        gpus=resolution.gpus,
        resources=pod_resources(spec, resolution),
        pod=spec.pod,
    )
    attempt = attempt_name(resource.spec, source)
    return Target(spec, revision_name(document), document, resolution, source, attempt, suite)


def _own_refusals(spec: Spec, resolution: Resolution, image: str) -> list[str]:
    """What the resolver cannot know: images, the pod's environment and memory."""
    refusals = []
    if not image:
        refusals.append(
            f"ImageMissing: `engine.image` must be set, because the operator has no default image for the engine"
            f" `{resolution.flavour}`; found none. Set it, or give the operator one."
        )
    reserved = {*names.OWN_VARIABLES, *resolution.env}
    refusals += [
        f"EnvironmentOwned: `env[{position}].name` must not be a variable that the operator sets; found"
        f" `{variable.name}`. Remove it."
        for position, variable in enumerate(spec.env)
        if variable.name in reserved
    ]
    resources = pod_resources(spec, resolution)
    shared, limit = quantity(resources.shared_memory), quantity(resources.limits.get("memory", ""))
    if shared is not None and limit is not None and shared >= limit:
        refusals.append(
            "SharedMemory: `pod.sharedMemory` must be less than the memory limit, in which it is counted; found"
            f" {resources.shared_memory} of {resources.limits['memory']}. Lower it, or raise"
            " `pod.resources.limits.memory`."
        )
    return refusals


def _read_suite(qualification: Qualification, document: UserDocument | None) -> tuple[AskedSuite, list[str]]:
    """The suite that is asked for, and what the judge would refuse: refused here, before anything is stopped."""
    asked = AskedSuite(qualification.suite)
    if qualification.when is QualificationTime.NEVER:
        return asked, []
    try:
        suite = load_suite(qualification.suite) if qualification.suite_ref is None else _own_suite(document)
    except QualificationError as error:
        where = "suite" if qualification.suite_ref is None else "suiteRef"
        must = "a built-in suite" if qualification.suite_ref is None else "a suite document"
        return asked, [f"Suite: `qualification.{where}` must name {must}; {error}. Choose one, or mend it."]
    if qualification.suite_ref is not None:
        asked = AskedSuite(suite.name, suite.reference.digest, qualification.suite_ref.config_map)
    rated = {gate.name for gate in suite.gates if isinstance(gate, Performance)}
    wrong = sorted(set(qualification.thresholds) - rated)
    if not wrong:
        return asked, []
    there = ", ".join(f"`{name}`" for name in sorted(rated)) or "it has none"
    return asked, [
        f"Threshold: `qualification.thresholds` must name performance gates of suite `{suite.name}` ({there}); found"
        f" {', '.join(f'`{name}`' for name in wrong)}. Remove them."
    ]


def _own_suite(document: UserDocument | None) -> Suite:
    if document is None or document.text is None:
        raise QualificationError("it could not be read" if document is None else document.missing)
    return _parsed_suite(document.text)


@lru_cache(maxsize=64)
def _parsed_suite(text: str) -> Suite:
    return parse_suite(text.encode())


def _sentence(text: str) -> str:
    return text if text.endswith(".") else f"{text}."
