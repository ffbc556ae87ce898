"""`sm70-serve` of a simulated engine: the real one's start and last words, and in the place of vLLM a small server."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

from simulated_engine.behaviour import Behaviour, Moment
from simulated_engine.reporting import Reporter, cache_identity
from simulated_engine.server import Server
from sm70_engine.cache.use import CacheUse, prepared
from sm70_engine.serve import preflight as looking
from sm70_engine.serve.arguments import read_command_line
from sm70_engine.serve.failure import ServeError
from sm70_engine.serve.last_words import failure, shutdown, termination_file, write_termination
from sm70_engine.serve.launch import Launch, plan_launch, verified
from sm70_engine.serve.status import answered
from sm70_engine.session import SessionFolder
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import StartupPhase
from sm70_profiles.resolver import ServeRequest
from sm70_profiles.termination import Termination

KEY_VARIABLE = "VLLM_API_KEY"
REFUSED = 2
PHASES = (
    StartupPhase.STARTING,
    StartupPhase.LOADING_WEIGHTS,
    StartupPhase.COMPILING,
    StartupPhase.CAPTURING_GRAPHS,
    StartupPhase.WARMING,
)


class Life:
    """From the start to the last words."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.behaviour = Behaviour.load(environment)
        self.asked = asyncio.Event()
        self.changed = asyncio.Event()

    async def run(self, request: ServeRequest) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: None if self.behaviour.deaf else self.asked.set())
        loop.add_signal_handler(signal.SIGINT, self.asked.set)
        try:
            launch = verified(plan_launch(request, self.environment), self.environment)
        except ServeError as error:
            return self.end(failure(error), REFUSED)
        folder = SessionFolder.create(self.environment)
        identity = cache_identity(launch, self.environment)
        try:
            with (
                prepared(launch.resolution, identity, self.environment) as cache,
                answered(self.environment, folder.startup),
            ):
                return await self._live(launch, cache, folder)
        except ServeError as error:
            return self.end(failure(error), REFUSED)
        finally:
            folder.remove()

    async def _live(self, launch: Launch, cache: CacheUse, folder: SessionFolder) -> int:
        request = launch.request
        reporter = Reporter(launch, launch.session(cache), folder, self.environment, self.behaviour)
        reporter.enter(StartupPhase.STARTING)
        if self._dies_at(Moment.START):
            return await self._die(reporter)
        if not await self._started(reporter):
            return self.end(shutdown("ended by SIGTERM before the server was started", ()), 0)
        reporter.compile(cache)
        server = Server(reporter, self.environment.get(KEY_VARIABLE), request.served_name, self._change)
        await server.start(request.host, request.port)
        reporter.enter(StartupPhase.SERVING)
        print(f"simulated engine: serves {request.profile.name} on port {server.port}", flush=True)
        dying = asyncio.create_task(self._wait_for_death())
        asking = asyncio.create_task(self.asked.wait())
        await asyncio.wait({dying, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return await self._die(reporter)
        dying.cancel()
        self._write(shutdown("shutting down", reporter.executed()))
        cut = await server.drain(request.drain_timeout_seconds)
        await asyncio.sleep(self.behaviour.drain_seconds)
        how = f"; {cut} requests were cut off" if cut else ""
        return self.end(shutdown(f"ended by SIGTERM{how}", reporter.executed()), 0)

    async def _started(self, reporter: Reporter) -> bool:
        """Goes through the phases; False if it was asked to end before it listened."""
        for phase in PHASES:
            reporter.enter(phase)
            seconds = None if phase is self.behaviour.stuck_in else self.behaviour.start_seconds / len(PHASES)
            try:
                await asyncio.wait_for(self.asked.wait(), seconds)
            except TimeoutError:
                continue
            return False
        return True

    def _dies_at(self, moment: Moment) -> bool:
        return self.behaviour.dies is not None and self.behaviour.dies.at is moment

    async def _wait_for_death(self) -> None:
        while not self._dies_at(Moment.SERVING):
            self.changed.clear()
            await self.changed.wait()

    def _change(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        # A death that is asked for at run time is for this container's life, not for the next start.
        behaviour.model_copy(update={"dies": None}).keep(self.environment)
        self.changed.set()

    async def _die(self, reporter: Reporter) -> int:
        death = self.behaviour.dies
        assert death is not None
        await asyncio.sleep(death.after_seconds)
        hoard = [os.urandom(1 << 20) for _ in range(death.mebibytes)]
        if death.reason is None:
            print(f"simulated engine: dies, with {len(hoard)} MiB in hand", flush=True)
            os._exit(death.exit_code)
        return self.end(failure(ServeError(death.reason, death.message), reporter.executed()), death.exit_code)

    def _write(self, termination: Termination) -> None:
        write_termination(termination_file(self.environment), termination)

    def end(self, termination: Termination, status: int) -> int:
        """Says the last words on the log and in the termination message."""
        print(f"simulated engine: {termination.reason}: {termination.message}", file=sys.stderr, flush=True)
        self._write(termination)
        return status


async def serve(arguments: list[str], environment: Mapping[str, str]) -> int:
    """One life, or one preflight."""
    life = Life(environment)
    try:
        command_line = read_command_line(arguments, environment)
    except ServeError as error:
        return life.end(failure(error), REFUSED)
    if command_line.request is None:
        return life.end(failure(ServeError(TerminationReason.REFUSED, "nothing to serve")), REFUSED)
    if command_line.preflight:
        return _preflight(life, command_line.request)
    return await life.run(command_line.request)


def _preflight(life: Life, request: ServeRequest) -> int:
    """The real one, save for the vLLM that is not there."""
    vars(looking).update(check_versions=lambda _flavour: None)
    found = looking.preflight(request, life.environment, parse=lambda _launch, _environment: None)
    print(looking.readable(found), flush=True)
    return life.end(found, 0 if found.reason is TerminationReason.PASSED else REFUSED)


def main() -> None:
    """The command `sm70-serve` in the image of the simulated engine."""
    sys.exit(asyncio.run(serve(sys.argv[1:], os.environ)))


if __name__ == "__main__":
    main()
