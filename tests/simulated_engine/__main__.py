"""`sm70-serve` of a simulated engine: reads the request that the operator hands over, lives, and leaves last words."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Mapping

from pydantic import ValidationError

from simulated_engine.behaviour import Behaviour, Moment
from simulated_engine.reporting import Reporter
from simulated_engine.server import Server
from sm70_engine.serve.failure import ServeError, refused
from sm70_engine.serve.last_words import failure, shutdown, termination_file, write_termination
from sm70_profiles.reasons import TerminationReason
from sm70_profiles.report import RouteCount
from sm70_profiles.resolver import ServeRequest, resolve
from sm70_profiles.termination import Termination

REQUEST_VARIABLE, KEY_VARIABLE = "SM70_SERVE_REQUEST", "VLLM_API_KEY"
REFUSED, FAILED = 2, 1


def read_request(environment: Mapping[str, str]) -> ServeRequest:
    """Raises ServeError as the real one does, for a request that is refused or a folder that is not there."""
    try:
        request = ServeRequest.model_validate_json(environment.get(REQUEST_VARIABLE, ""))
    except ValidationError as error:
        raise ServeError(TerminationReason.REFUSED, f"${REQUEST_VARIABLE} holds no request: {error}") from None
    for folder in filter(None, (request.model_path, request.draft_path)):
        if not os.path.isdir(folder):  # noqa: PTH112  # a str in the request
            raise ServeError(
                TerminationReason.PATH_NOT_FOUND, f"`{folder}` does not exist", "Check `model` and `draft`."
            )
    resolution = resolve(request)
    if resolution.refusals:
        raise refused(resolution.refusals)
    return request


class Life:
    """From the start to the last words."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self.environment = environment
        self.behaviour = Behaviour.load(environment)
        self.asked = asyncio.Event()
        self.changed = asyncio.Event()

    async def run(self) -> int:
        """Returns the exit status."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, lambda: None if self.behaviour.deaf else self.asked.set())
        loop.add_signal_handler(signal.SIGINT, self.asked.set)
        try:
            request = read_request(self.environment)
        except ServeError as error:
            return self._end(failure(error), REFUSED)
        reporter = Reporter(request, resolve(request), self.environment, self.behaviour)
        server = Server(reporter, self.environment.get(KEY_VARIABLE), request.served_name, self._changed)
        if self._dies_at(Moment.START):
            return await self._die(reporter.routes())
        if not await self._started():
            return self._end(shutdown("ended by SIGTERM before the server was started", ()), 0)
        reporter.fill_cache()
        await server.start(request.host, request.port)
        print(f"simulated engine: serves {request.profile.name} on port {server.port}", flush=True)
        dying = asyncio.create_task(self._wait_for_death())
        asking = asyncio.create_task(self.asked.wait())
        await asyncio.wait({dying, asking}, return_when=asyncio.FIRST_COMPLETED)
        if not asking.done():
            return await self._die(reporter.routes())
        dying.cancel()
        self._write(shutdown("shutting down", reporter.routes()))
        cut = await server.drain(request.drain_timeout_seconds)
        await asyncio.sleep(self.behaviour.drain_seconds)
        how = f"; {cut} requests were cut off" if cut else ""
        return self._end(shutdown(f"ended by SIGTERM{how}", reporter.routes()), 0)

    async def _started(self) -> bool:
        """False if it was asked to end before it listened."""
        waiting = None if self.behaviour.never_listens else self.behaviour.start_seconds
        try:
            await asyncio.wait_for(self.asked.wait(), waiting)
        except TimeoutError:
            return True
        return False

    def _dies_at(self, moment: Moment) -> bool:
        return self.behaviour.dies is not None and self.behaviour.dies.at is moment

    async def _wait_for_death(self) -> None:
        while not self._dies_at(Moment.SERVING):
            self.changed.clear()
            await self.changed.wait()

    def _changed(self, behaviour: Behaviour) -> None:
        self.behaviour = behaviour
        # A death that is asked for at run time is for this container's life, not for the next start.
        behaviour.model_copy(update={"dies": None}).keep(self.environment)
        self.changed.set()

    async def _die(self, routes: tuple[RouteCount, ...]) -> int:
        death = self.behaviour.dies
        assert death is not None
        await asyncio.sleep(death.after_seconds)
        hoard = [os.urandom(1 << 20) for _ in range(death.mebibytes)]
        if death.reason is None:
            print(f"simulated engine: dies, with {len(hoard)} MiB in hand", flush=True)
            os._exit(death.exit_code)
        return self._end(failure(ServeError(death.reason, death.message), routes), death.exit_code)

    def _write(self, termination: Termination) -> None:
        write_termination(termination_file(self.environment), termination)

    def _end(self, termination: Termination, status: int) -> int:
        print(f"simulated engine: {termination.reason}: {termination.message}", file=sys.stderr, flush=True)
        self._write(termination)
        return status


async def serve(environment: Mapping[str, str]) -> int:
    """One life."""
    return await Life(environment).run()


def main() -> None:
    """The command `sm70-serve` in the image of the simulated engine."""
    sys.exit(asyncio.run(serve(os.environ)))


if __name__ == "__main__":
    main()
