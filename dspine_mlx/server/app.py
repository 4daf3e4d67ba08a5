"""Rebinding mlx_lm.server's globals, and running it."""

import logging
import os
import signal
import sys
import time
from argparse import Namespace
from functools import partial
from pathlib import Path
from threading import current_thread, main_thread
from typing import Any

from huggingface_hub.constants import HF_HUB_CACHE
from mlx_lm import server as host

from dspine_mlx.errors import InputError, LostRank
from dspine_mlx.server.connections import Connections, Server
from dspine_mlx.server.generator import ResponseGenerator
from dspine_mlx.server.handler import Handler
from dspine_mlx.server.in_group import follow
from dspine_mlx.server.options import Options
from dspine_mlx.server.prompt_cache import PromptCache
from dspine_mlx.server.provider import Provider, reachable

PORTS = (1 << 16) - 1
LAST_WORDS = 0.5  # seconds to tell waiting clients that the server stops


def bind(options: Options) -> None:
    host.ModelProvider = partial(Provider, options=options)
    host.run = partial(run, options=options)


def serve(options: Options, arguments: list[str]) -> None:
    """Run mlx_lm.server's main on its own flags."""
    bind(options)
    sys.argv = ["dspine-mlx serve", *arguments]
    host.main()


def run(address: str, port: int, provider: Provider, *, options: Options) -> None:
    """Run mlx_lm.server with our parts; returns after SIGINT or SIGTERM.

    `InputError` if the models that the command line names can't be loaded.
    """
    if not 0 <= port <= PORTS:
        raise InputError(f"--port is {port}; it must lie between 0 and {PORTS}")
    Path(HF_HUB_CACHE).mkdir(parents=True, exist_ok=True)  # /v1/models fails without
    prompt_cache = PromptCache(provider, *cache_limits(provider.cli_args))
    generator = ResponseGenerator(provider, prompt_cache, options)
    host.stream_generate = generator.stream_generate
    host.BatchGenerator = generator.batching.batch_generator
    if provider.group is not None and provider.group.follows:
        return follow(generator)
    if options.api_key is None and reachable(address):
        logging.warning(f"anyone who reaches {address}:{port} can use this server: set --api-key")
    on_sigterm(signal.default_int_handler)
    try:
        host._run_http_server(address, port, generator, server_for(generator), Handler)
    except KeyboardInterrupt:
        pass  # before the server loop, which catches its own
    except GenerationEnded as ended:
        if provider.group is not None and not generator.load_failure:
            raise LostRank("this group's server has ended; the log above says why") from ended
        raise InputError(generator.load_failure) if generator.load_failure else ended from None
    except OSError as error:
        raise InputError(f"can't listen on {address}:{port}: {error.strerror}") from error
    except UnicodeError as error:  # of a name that none can have
        raise InputError(f"--host is {address!a}, which is no name of a host") from error
    finally:
        stop(generator)
    return None


def on_sigterm(handler: Any) -> None:
    if current_thread() is main_thread():  # elsewhere, signals are the host program's
        signal.signal(signal.SIGTERM, handler)


class GenerationEnded(RuntimeError):
    """The generation thread has ended."""


def server_for(generator: ResponseGenerator) -> type[Server]:
    options = generator.options

    class Bounded(Server):
        connections = Connections(options.max_connections, options.head_seconds)

        def alive(self) -> None:
            if not generator.generation_available():
                raise GenerationEnded("the generation thread ended; the log above says why")

    return Bounded


def stop(generator: ResponseGenerator) -> None:
    """End the running round, then give waiting clients a moment to get their error. A generation
    thread that does not end does not block the exit."""
    on_sigterm(signal.SIG_IGN)
    generator.stop_and_join()
    deadline = time.monotonic() + LAST_WORDS
    while generator.handlers and time.monotonic() < deadline:
        time.sleep(0.01)
    if not generator.ended and current_thread() is main_thread():
        logging.error("the generation thread does not end; leaving without it")
        logging.shutdown()
        os._exit(1)


def cache_limits(cli_args: Namespace) -> tuple[int, int]:
    """Limits in sequences and bytes; mlx_lm's own run limits the bytes only while it batches."""
    size = cli_args.prompt_cache_bytes
    return cli_args.prompt_cache_size, (1 << 63) if size is None else size
