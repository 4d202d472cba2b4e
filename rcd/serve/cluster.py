"""A Ray cluster under the server: joining or starting one, and the application of replicas on it."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import socket
import threading
import time
from typing import Any

from rcd.errors import RCDError, first_line, reason
from rcd.serve.loading import Models
from rcd.serve.replica import DEPLOYMENT, Replica
from rcd.serve.settings import RaySettings, ServeSettings

STORE = 2**28
"""Bytes of the object store of a Ray of our own: pieces are small and travel beside it."""
CONNECTING = 10.0
"""Seconds in which the head of a cluster must answer."""
LOOK = 0.1
"""Seconds between questions whether replicas run."""


class Cluster:
    """The one that `--ray-address` or RAY_ADDRESS names, else a Ray of its own on this machine."""

    def __init__(self, settings: ServeSettings, placing: RaySettings) -> None:
        self.settings, self.placing = settings, placing
        self._address = placing.ray_address or os.environ.get("RAY_ADDRESS")
        _prepare()
        try:
            from rcd.serve.ray import RayService, replicas_running
        except ImportError as error:  # Ray without what its Serve needs
            raise RCDError(
                f"Ray Serve cannot be imported ({first_line(error)}); install the extras: pip install "
                "'residual-context-diffusion[ray,serve]'."
            ) from error
        self.service = RayService(settings, lambda: replicas_running(placing.ray_app))
        self._lock = threading.Lock()
        self._joined = self._deployed = self._closing = False

    def begin(self, models: Models, note: Any) -> None:
        """Bring the replicas up and let the service send requests to them; returns when all of them run, or as many as
        `auto` begins with. It may be called from any thread."""
        with self._lock:
            if self._closing:
                return
            handle = self._deploy(models, note)
        self._wait()
        if not self._closing:
            self.service.begin(handle)

    def join(self) -> None:
        """From the main thread, before the server runs: Ray takes the process's signals for itself, and whoever wants
        them takes them back."""
        import ray

        for name in ("ray", "ray.serve"):
            logging.getLogger(name).setLevel(logging.ERROR)
        logging.getLogger("asyncio").addFilter(_not_rays)
        own: dict[str, Any] = {}
        if self._address is not None:
            _check(self._address)
        else:
            own = dict(include_dashboard=False, object_store_memory=STORE)
        try:
            ray.init(
                address=self._address or "local", namespace="rcd", log_to_driver=False, logging_level="ERROR", **own
            )
        except (ConnectionError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
            if self._address is not None:
                raise _unreachable(self._address, first_line(error)) from error
            raise RCDError(
                f"Ray cannot be started on this machine ({first_line(error)}); its logs in /tmp/ray say more."
            ) from error
        self._joined = True

    def _deploy(self, models: Models, note: Any) -> Any:
        import ray
        from ray import serve

        have = ray.cluster_resources()
        options = actor_options(self.placing, bool(have.get("GPU")))
        room = fitting(options, have)
        count = self.placing.count or self.placing.min_replicas
        if count > room:
            said = f"{count} replicas of {_shown(options)} each do not fit: there is room for {room}"
            if self._address is None:
                raise RCDError(f"{said}; take fewer with --replicas, or less each with --replica-cpus.")
            note(f"{said}; they wait for machines that join")
        serve.start(proxy_location="Disabled")  # this process answers HTTP
        name = self.placing.ray_app
        if name in serve.status().applications:
            note(f"an application {name!r} is on the cluster already; this server takes it over")
        made = application(models.elsewhere(), self.settings, self.placing, options, room)
        (handle,) = serve.run_many(
            [serve.RunTarget(made, name=name, route_prefix=None)], wait_for_applications_running=False
        )
        self._deployed = True
        return handle

    def _wait(self) -> None:
        from ray import serve

        while True:
            with self._lock:  # who ends Ray meanwhile waits for the answer
                if self._closing:
                    return
                found = serve.status().applications.get(self.placing.ray_app)
            status = None if found is None else found.status.value
            if status == "RUNNING":
                return
            if found is not None and status in ("DEPLOY_FAILED", "UNHEALTHY"):
                told = [one.message for one in found.deployments.values()]
                raise RCDError(cause("\n".join([*told, found.message])))
            time.sleep(LOOK)

    def close(self) -> None:
        """End the replicas, and the Ray that was started for them."""
        self._closing = True
        with self._lock:
            if not self._joined:
                return
            import ray
            from ray import serve

            self._joined = False
            if self._address is not None and self._deployed:
                with contextlib.suppress(ray.exceptions.RayError, serve.exceptions.RayServeException, TimeoutError):
                    serve.delete(self.placing.ray_app, _blocking=False)
            ray.shutdown()  # with a Ray of our own, everything that ran on it


def _prepare() -> None:
    """The environment that Ray reads when it is imported; who has set one of these keeps it."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".*")  # what goes on inside stands in Ray's files, not here


def _not_rays(record: logging.LogRecord) -> bool:
    """Ray's router asks replicas in tasks of its own, and leaves it to asyncio to tell of those that have died."""
    import ray
    from ray import serve

    error = record.exc_info[1] if record.exc_info else None
    return not isinstance(error, ray.exceptions.RayError | serve.exceptions.RayServeException)


def _check(address: str) -> None:
    """Whether anybody listens there: Ray itself tries for minutes."""
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit():
        return  # such as `auto`
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECTING).close()
    except (OSError, OverflowError) as error:
        raise _unreachable(address, reason(error)) from error


def _unreachable(address: str, why: str) -> RCDError:
    return RCDError(
        f"the Ray cluster at {address} cannot be reached ({why}); check --ray-address or RAY_ADDRESS, and "
        "set RAY_AUTH_MODE=token if it asks for a token."
    )


def actor_options(placing: RaySettings, gpus: bool) -> dict[str, float]:
    """What a replica reserves."""
    each = placing.replica_gpus if placing.replica_gpus is not None else float(gpus)
    return {"num_cpus": placing.replica_cpus, "num_gpus": each}


def fitting(options: dict[str, float], have: dict[str, float]) -> int:
    """Replicas for which there is room, by what the whole cluster has."""
    found = [
        math.floor(have.get(resource, 0) / options[name] + 1e-9)
        for name, resource in (("num_cpus", "CPU"), ("num_gpus", "GPU"))
        if options[name]
    ]
    return min(found, default=4096)


def _shown(options: dict[str, float]) -> str:
    gpus = f" and {options['num_gpus']:g} GPU" if options["num_gpus"] else ""
    return f"{options['num_cpus']:g} CPU{gpus}"


def application(
    models: Models, settings: ServeSettings, placing: RaySettings, options: dict[str, float], room: int
) -> Any:
    """The replicas, as Ray Serve deploys them."""
    from ray import serve

    return serve.deployment(Replica, name=DEPLOYMENT, **scale(settings, placing, room)).options(
        max_ongoing_requests=placing.max_ongoing or 2 * settings.max_batch, max_queued_requests=settings.max_queue,
        ray_actor_options=options, graceful_shutdown_timeout_s=settings.drain,
        graceful_shutdown_wait_loop_s=min(1.0, settings.drain or 1.0),
        health_check_period_s=placing.health_period, health_check_timeout_s=placing.health_timeout,
        max_constructor_retry_count=1, logging_config={"enable_access_log": False, "log_level": "WARNING"},
    ).bind(models, settings)  # fmt: skip


def scale(settings: ServeSettings, placing: RaySettings, room: int) -> dict[str, Any]:
    if placing.count is not None:
        return {"num_replicas": placing.count}
    most = placing.max_replicas or max(room, placing.min_replicas)
    return {
        "autoscaling_config": {
            "min_replicas": placing.min_replicas, "max_replicas": most,
            "target_ongoing_requests": placing.target_ongoing or float(settings.max_batch),
            "upscale_delay_s": placing.upscale_delay, "downscale_delay_s": placing.downscale_delay,
        }
    }  # fmt: skip


def cause(told: str) -> str:
    """The sentence in what Ray says of a replica that could not start: our own, else the error's last line."""
    own = re.search(r"RCDError: (.+)", told)
    if own is not None:
        return own.group(1).strip()
    lines = [line.strip() for line in told.splitlines() if re.match(r"\s*[\w.]*(Error|Exception|Exit)\b", line)]
    why = lines[-1] if lines else first_line(RuntimeError(told))
    return f"a replica could not start ({why[:300].rstrip('.')}); the logs of Ray Serve on its machine say more."
