"""`sm70-serve`: serves a model by a profile, and ends with a message that says why.

Exit status: 0 after a shutdown that was asked for, 1 when the server failed, 2 when it was refused before it started.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager

from sm70_engine.acceleration.routes import CountersError, create_counters, read_counters
from sm70_engine.acceleration.startup import enter
from sm70_engine.acceleration.strict import STRICT_ENVIRONMENT, strict
from sm70_engine.cache.key import complete
from sm70_engine.cache.use import CacheUse, prepared
from sm70_engine.serve.arguments import USAGE, CommandLine, read_command_line
from sm70_engine.serve.display import decisions
from sm70_engine.serve.failure import ServeError
from sm70_engine.serve.last_words import classify, failure, oom_kills, shutdown, termination_file, write_termination
from sm70_engine.serve.launch import Launch, explained, plan_launch, strict_start, verified
from sm70_engine.serve.preflight import preflight, readable, refused_preflight
from sm70_engine.serve.status import answered
from sm70_engine.serve.supervise import FORWARDED, Supervisor
from sm70_engine.serve.versions import check_versions
from sm70_engine.session import SESSION_ENVIRONMENT, SessionFolder
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import RouteCount, StartupPhase
from sm70_profiles.resolver import ServeRequest
from sm70_profiles.termination import Termination

REFUSED, FAILED = 2, 1


def main(arguments: list[str] | None = None, environment: MutableMapping[str, str] = os.environ) -> int:
    """Returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        # The first process of a container is deaf to signals that it does not handle, so they are handled from here on.
        for number in FORWARDED:
            signal.signal(number, _asked_early)
        command_line = read_command_line(arguments, environment)
        if command_line.help or command_line.request is None:
            print(USAGE)
            return 0
        return _run(command_line, command_line.request, environment)
    except ServeError as error:
        if "--preflight" in arguments:
            return _end_preflight(refused_preflight(error), environment)
        return _end(failure(error), REFUSED, environment)
    except _AskedEarlyError as asked:
        return _end(shutdown(f"ended by {asked} before the server was started", ()), 0, environment)


class _AskedEarlyError(Exception):
    """A signal asked for the end while there was no server yet."""


def _asked_early(number: int, _frame: object) -> None:
    raise _AskedEarlyError(signal.Signals(number).name)


def _run(command_line: CommandLine, request: ServeRequest, environment: MutableMapping[str, str]) -> int:
    """Raises ServeError for whatever is refused."""
    strictly = strict_start(command_line.from_environment, environment)
    if strict(environment) and not strictly:
        print(f"sm70-serve: warning: {STRICT_ENVIRONMENT[0]} has no effect: the request's policy judges", flush=True)
    if command_line.preflight:
        return _end_preflight(preflight(request, environment, command_line.skip, strictly), environment)
    launch = plan_launch(request, environment, strictly=strictly)
    print(decisions(launch), flush=True)
    if command_line.render:
        return 0
    check_versions(launch.resolution.flavour)
    return _serve(verified(launch, environment, command_line.skip), environment)


def _serve(launch: Launch, environment: MutableMapping[str, str]) -> int:
    resolution = launch.resolution
    identity = complete(resolution.cache, resolution.flavour, environment) if resolution.cache is not None else None
    with prepared(resolution, identity, environment) as cache, session_folder_of(environment) as folder:
        if cache.enabled and cache.message:
            print(f"sm70-serve: warning: compile cache: {cache.message}", flush=True)
        folder.write(launch.session(cache))
        create_counters(folder.counters)
        enter(folder.startup, StartupPhase.STARTING)
        with answered(environment, folder.startup):
            variables = {**environment, **launch.environment, **cache.variables()}
            return _supervise(launch, variables, folder, environment, cache)


def _supervise(
    launch: Launch,
    variables: dict[str, str],
    folder: SessionFolder,
    environment: MutableMapping[str, str],
    cache: CacheUse,
) -> int:
    supervisor = Supervisor(
        launch.command, {**variables, SESSION_ENVIRONMENT: str(folder.path)}, launch.request.drain_timeout_seconds
    )
    kills = oom_kills()

    def counts() -> tuple[RouteCount, ...]:
        try:
            return read_counters(folder.counters)
        except CountersError:
            return ()

    # Written before the server is told and again afterwards: the first stands if the rest is cut short.
    def at_signal() -> None:
        write_termination(termination_file(environment), shutdown("shutting down", counts()))

    status = supervisor.run(at_signal)
    if supervisor.asked is not None:
        how = "" if status == 0 else f"; the server's own status was {status}"
        # The message stands already: if the grace period ends in what follows, nothing is lost but the extension.
        if status == 0 and (more := cache.extend()):
            print(f"sm70-serve: compile cache: {more} files that requests compiled are published too", flush=True)
        return _end(shutdown(f"ended by {supervisor.asked.name}{how}", counts()), 0, environment)
    refusal = folder.refusal()
    if refusal is not None:
        return _end(failure(explained(refusal)), REFUSED, environment)
    error = classify(status, supervisor.tail, oom_kills() - kills)
    return _end(failure(error, counts()), FAILED, environment)


@contextmanager
def session_folder_of(environment: MutableMapping[str, str]) -> Iterator[SessionFolder]:
    """A session's folder that goes with the context."""
    folder = SessionFolder.create(environment)
    try:
        yield folder
    finally:
        folder.remove()


def _end_preflight(found: Termination, environment: MutableMapping[str, str]) -> int:
    print(readable(found), flush=True)
    write_termination(termination_file(environment), found)
    return 0 if found.reason is TerminationReason.PASSED else REFUSED


def _end(termination: Termination, status: int, environment: MutableMapping[str, str]) -> int:
    """Says the last words on the log and in the termination message."""
    print(f"sm70-serve: {termination.reason}: {termination.message}", file=sys.stderr)
    if termination.remedy:
        print(f"sm70-serve: {termination.remedy}", file=sys.stderr)
    write_termination(termination_file(environment), termination)
    return status


if __name__ == "__main__":
    sys.exit(main())
