"""The Celery application of a fleet, and the bells that it carries.

A bell is a message without contents: "there is something to do in this queue". What there is to do
is read from the database, so a lost bell costs a few seconds, and one too many a look. Queues:
``compile.<arch>``, ``measure.<arch>`` and ``control``. JSON only, no results, no remote control.
"""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from typing import Any

from amqp.exceptions import AMQPError, MessageNacked
from celery import Celery, signals
from celery.beat import EmbeddedService, Scheduler
from celery.exceptions import CPendingDeprecationWarning, WorkerLostError
from celery.platforms import SecurityWarning
from celery.worker.consumer import Consumer
from kombu.entity import Exchange, Queue
from kombu.exceptions import OperationalError
from kombu.utils.url import parse_url

from tuner.errors import InputError
from workers.member import Member
from workers.settings import Settings, without_secrets

TASKS = {"compile": "flashtune.compile", "measure": "flashtune.measure", "control": "flashtune.tick"}

# RabbitMQ closes the channel of a message that is unacknowledged for 30 minutes. A slice may open a
# workload (300 s) and hold its finals (minutes) before it looks at the clock again.
SOFT_LIMIT_S, HARD_LIMIT_S = 1500, 1620
# Of the queue and not of the message, by the broker's clock; the same for everybody, whatever their
# FLASHTUNE_TICK_S, since RabbitMQ refuses to declare one queue in two ways.
_BELL_LIVES_S = 10
_BELLS_KEPT = 16
_REDIS_BELL_LIVES_S = 300  # by the clocks of two nodes, which may differ: Redis itself lets nothing expire
_KNOCK_S = 30.0
_SEND_S = 0.8  # to connect, and again for the broker's word that it has the bell
_QUIET_S = 5.0
_BROKER_ERRORS = (OSError, OperationalError, AMQPError, MessageNacked)

log = logging.getLogger("flashtune.worker")


def bell_queue(name: str) -> Queue:
    """Return the queue ``compile.<arch>``, ``measure.<arch>`` or ``control``: short, and soon empty."""
    arguments = {
        "x-queue-type": "quorum",
        "x-message-ttl": _BELL_LIVES_S * 1000,
        "x-max-length": 1 if name == "control" else _BELLS_KEPT,
        "x-overflow": "drop-head",
    }
    return Queue(name, Exchange(""), name, queue_arguments=arguments)


def make_app(settings: Settings, member: Member | None = None) -> Celery:
    """Return the application: of ``member``, or one that only rings.

    Raises:
        InputError: naming FLASHTUNE_BROKER_URL if it is not set or cannot be read.
    """
    app = Celery("flashtune", broker=_broker(settings), set_as_current=True)
    app.conf.update(_config(member))
    if member is not None:
        app.conf.update(_member_config(settings, member))
    return app


def _broker(settings: Settings) -> str:
    url = settings.broker_url
    if not url:
        raise InputError("FLASHTUNE_BROKER_URL is not set; write amqp://user:password@host/vhost")
    try:
        parse_url(url)
    except ValueError:  # its text may hold a part of the password
        raise InputError(
            f"FLASHTUNE_BROKER_URL is {without_secrets(url)!r}, which is no URL; "
            "in user and password write %2F for / and %40 for @"
        ) from None
    return url


def _config(member: Member | None) -> dict[str, Any]:
    return {
        "include": ["workers.tasks"],
        "accept_content": ["json"],
        "task_serializer": "json",
        "result_serializer": "json",
        "result_backend": None,
        "result_expires": None,  # or beat would schedule a clean-up of results
        "task_ignore_result": True,
        "task_default_queue": "control",
        "task_create_missing_queues": False,
        "task_queues": [bell_queue(member.queue if member else "control")],
        # A bell is acknowledged after its slice, so a busy worker holds one bell and the others go to idle ones.
        "task_acks_late": True,
        "task_reject_on_worker_lost": True,
        "worker_prefetch_multiplier": 1,
        "task_soft_time_limit": SOFT_LIMIT_S,
        "task_time_limit": HARD_LIMIT_S,
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # for ever
        "broker_transport_options": {
            "confirm_publish": True,
            "visibility_timeout": HARD_LIMIT_S + 180,  # Redis: longer than any task runs
            "socket_connect_timeout": 2.0,
            "socket_timeout": 10.0,
        },
    }


def _member_config(settings: Settings, member: Member) -> dict[str, Any]:
    """Return what only a worker needs. ``flashtune_member`` tells its pool child what it is."""
    every_s = settings.tick_s if member.role == "control" else _KNOCK_S
    return {
        "flashtune_member": vars(member),
        # One child, a fresh interpreter. It owns the measuring child and what is open in it, so it is not
        # replaced after some tasks: what leaks, leaks in children of its own, which are.
        "worker_pool": "prefork",
        "worker_pool_start_method": "spawn",
        "worker_concurrency": 1,
        "worker_max_tasks_per_child": None,
        "worker_proc_alive_timeout": 120.0,  # a fresh interpreter imports, and may meet a slow database
        "worker_lost_wait": 1.0,  # for an answer of a child that was killed; a bell has none
        "worker_consumer": "workers.celery_app:BellConsumer",
        "worker_detect_quorum_queues": True,
        "worker_enable_remote_control": False,
        "worker_send_task_events": False,
        "worker_hijack_root_logger": False,
        "worker_redirect_stdouts": False,
        # Whoever does not control knocks at its own queue, for the case that it could not begin (the database
        # away, the GPU in use) and nobody else rings there.
        "beat_schedule": {
            "bell": {"task": TASKS[member.role], "schedule": every_s, "options": {"queue": member.queue}}
        },
    }


class BellConsumer(Consumer):  # type: ignore[misc]
    """Celery's consumer without the 28 queues for delayed messages, of which there are none."""

    class Blueprint(Consumer.Blueprint):  # type: ignore[misc]
        default_steps = tuple(s for s in Consumer.Blueprint.default_steps if not s.endswith(":DelayedDelivery"))


class BellScheduler(Scheduler):  # type: ignore[misc]
    """Celery's scheduler, in memory (the usual one keeps a shelf, which is pickle), with our bells."""

    producer = None

    def __init__(self, app: Celery, **options: Any) -> None:
        self._bells = Bells(app)
        super().__init__(app, **options)

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        self._bells.ring(entry.options["queue"])


class Bells:
    """Rings for queues; a broker that is away costs a line in the log and at most two seconds.

    Not for use by several threads at once.
    """

    def __init__(self, app: Celery) -> None:
        self._app = app
        self._expiry = {"expires": _REDIS_BELL_LIVES_S} if app.conf.broker_url.startswith("redis") else {}
        self._producer: Any = None
        self._quiet_until = 0.0

    def ring(self, queue: str) -> None:
        """Say that a queue has something to do. The database will be asked anyway, so nothing is raised."""
        if time.monotonic() < self._quiet_until:
            return
        try:
            try:
                self._send(queue)
            except _BROKER_ERRORS:  # the broker was restarted meanwhile, and this is an old connection
                self._close()
                self._send(queue)
        except _BROKER_ERRORS as e:
            self._close()
            self._quiet_until = time.monotonic() + _QUIET_S
            log.warning("no bell for %s: %s; the work is in the database, and is rung for again", queue, e)

    def _send(self, queue: str) -> None:
        if self._producer is None:
            connection = self._app.connection_for_write(connect_timeout=_SEND_S)
            connection.ensure_connection(max_retries=0)
            self._producer = self._app.amqp.Producer(connection)
        task = TASKS[queue.partition(".")[0]]
        self._app.send_task(
            task,
            queue=bell_queue(queue),
            producer=self._producer,
            retry=False,
            confirm_timeout=_SEND_S,
            ignore_result=True,
            **self._expiry,
        )

    def _close(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.connection.collect(socket_timeout=_SEND_S)


def log_to_stderr(name: str) -> None:
    """Write what the worker called ``name`` says to standard error, and of Celery what went wrong."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter(f"%(asctime)s %(levelname)s {name}: %(message)s"))
    handler.addFilter(_shorten)
    logging.getLogger().handlers = [handler]
    logging.getLogger().setLevel(logging.WARNING)
    logging.getLogger("flashtune").setLevel(logging.INFO)


def serve(app: Celery) -> int:
    """Run the worker in this process until a signal ends it; return the exit code.

    SIGTERM, SIGINT or SIGHUP: what is being measured is finished, the rest given back. Once more: now.
    """
    member = Member(**app.conf.flashtune_member)
    log_to_stderr(member.name)
    warnings.simplefilter("ignore", SecurityWarning)  # of root, in containers: it is about pickle, which is off
    worker = app.Worker(
        hostname=f"{member.name}@{os.uname().nodename}",
        queues=[member.queue],
        without_gossip=True,
        without_mingle=True,
        without_heartbeat=True,
        quiet=True,
    )
    warnings.simplefilter("ignore", CPendingDeprecationWarning)  # of a default that Celery 6 will change
    beat = EmbeddedService(app, thread=True, scheduler_cls=BellScheduler)  # which beat_scheduler alone does not say
    asked = 0

    def ready(**_: object) -> None:
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))  # not a restart in place, as Celery has it
        worker.hub.call_repeatedly(0.5, lambda: None)  # a signal is noticed when the loop turns: else every 5 s
        beat.start()
        log.info("listens to %s", member.queue)

    def stopping(**_: object) -> None:
        nonlocal asked
        asked += 1
        if asked > 1:
            os._exit(1)  # the kernel ends our children with us
        for pid in worker.pool.info["processes"]:
            os.kill(pid, signal.SIGUSR2)

    signals.worker_ready.connect(ready, weak=False)
    signals.worker_shutting_down.connect(stopping, weak=False)
    worker.start()
    return int(worker.exitcode or 0)


def _shorten(record: logging.LogRecord) -> bool:
    """Leave one line of what Celery says of a broker that is away and a child that was killed; it adds a stack."""
    kind = record.exc_info[0] if record.exc_info else None
    if kind is not None and issubclass(kind, (*_BROKER_ERRORS, WorkerLostError)):
        record.exc_info = None
    if not record.name.startswith("flashtune") and not record.exc_info:
        record.msg, record.args = " ".join(record.getMessage().split()), ()
    return True


def _leave_logging_alone(**_: object) -> None:
    """With a receiver of this signal, Celery sets no logging up."""


signals.setup_logging.connect(_leave_logging_alone, weak=False)
