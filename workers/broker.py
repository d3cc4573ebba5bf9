"""Whether the broker of a fleet can carry its bells: a look for ``flashtune doctor``.

>>> check("amqp://flashtune:secret@mq.example/flashtune")  # doctest: +SKIP
'amqp://flashtune:***@mq.example/flashtune: RabbitMQ 4.1.5, makes quorum queues'
"""

from __future__ import annotations

import queue
import threading
import uuid
from typing import Any

from kombu.connection import Connection
from kombu.exceptions import OperationalError
from kombu.utils.url import parse_url

from tuner.errors import FlashtuneError, InputError, Unavailable
from workers.celery_app import bell_queue
from workers.settings import without_secrets

TIMEOUT_S = 3.0
_GONE_AFTER_MS = 60_000  # the queue of a look that was killed halfway


def check(url: str) -> str:
    """Connect, make a queue as the fleet has them and delete it; return what was seen, without the password.

    Raises:
        Unavailable: if there is no answer within three seconds.
        InputError: if the broker refuses, or is none for a fleet.
    """
    shown = without_secrets(url)
    if url.startswith("memory:"):
        raise InputError(f"broker {shown} reaches no other process; write amqp://user:password@host/vhost")
    found: queue.SimpleQueue[str | FlashtuneError] = queue.SimpleQueue()
    # A thread, since nothing bounds how long a name server may take
    threading.Thread(target=lambda: found.put(_outcome(url, shown)), daemon=True).start()
    try:
        outcome = found.get(timeout=TIMEOUT_S)
    except queue.Empty:
        raise Unavailable(
            f"broker {shown}: no answer within {TIMEOUT_S:g} s; check the URL, the network, and that it runs"
        ) from None
    if isinstance(outcome, FlashtuneError):
        raise outcome
    return f"{shown}: {outcome}"


def _outcome(url: str, shown: str) -> str | FlashtuneError:
    try:
        parse_url(url)
    except ValueError:  # its text may hold a part of the password
        return InputError(f"broker {shown}: this is no URL; in user and password write %2F for / and %40 for @")
    try:
        with _connection(url) as connection:
            connection.ensure_connection(max_retries=0)
            return _redis(connection) if url.startswith("redis") else _quorum_queue(connection)
    except ImportError:  # kombu brings RabbitMQ's client, and none for Redis
        return InputError(f"broker {shown}: Redis needs one more package; pip install 'flashtune[redis]'")
    except Exception as e:  # each broker's client has a tree of errors of its own
        return _explain(e, shown)


def _connection(url: str) -> Any:
    options = {"socket_connect_timeout": TIMEOUT_S, "socket_timeout": TIMEOUT_S}
    if url.startswith("amqp"):
        options = {"read_timeout": TIMEOUT_S, "write_timeout": TIMEOUT_S}
    return Connection(url, connect_timeout=TIMEOUT_S, transport_options=options)


def _quorum_queue(connection: Any) -> str:
    says = connection.connection.server_properties
    channel = connection.default_channel
    bell: Any = bell_queue(f"measure.doctor-{uuid.uuid4().hex[:12]}")  # a name that a restricted user may use, too
    bell.queue_arguments["x-expires"] = _GONE_AFTER_MS
    bound = bell(channel)
    bound.queue_declare()
    bound.delete()
    product, version = says.get("product", "a broker"), says.get("version", "of unknown version")
    if product != "RabbitMQ":  # others take the argument and make a queue of another type
        return f"{product} {version}, which is not RabbitMQ: whether its queues outlive a node is not known"
    return f"RabbitMQ {version}, makes quorum queues"


def _redis(connection: Any) -> str:
    version = connection.default_channel.client.info("server")["redis_version"]
    return f"Redis {version}; bells may be lost there, and are rung again (quorum queues are RabbitMQ's)"


def _explain(error: Exception, shown: str) -> FlashtuneError:
    cause = error.__cause__ if isinstance(error, OperationalError) and error.__cause__ else error
    why = " ".join(str(getattr(cause, "strerror", None) or getattr(cause, "reply_text", None) or cause).split())
    code = getattr(cause, "reply_code", None)
    # https://www.rabbitmq.com/amqp-0-9-1-reference: 403 user or right, 530 virtual host, 406 arguments of a queue
    if code in (403, 530) or "Auth" in type(cause).__name__ or why.startswith(("NOAUTH", "WRONGPASS")):
        next_step = "check user, password and virtual host, and that the user may configure, write and read there"
        return InputError(f"broker {shown}: refused: {why or type(cause).__name__}; {next_step}")
    if code in (406, 540, 541):
        return InputError(f"broker {shown}: makes no quorum queue: {why}; use RabbitMQ 3.10 or newer")
    return Unavailable(f"broker {shown}: {why or type(cause).__name__}; check the URL, and that the broker runs")
