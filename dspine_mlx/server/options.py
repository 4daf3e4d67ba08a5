"""The flags that `dspine-mlx serve` adds to mlx_lm.server's."""

import argparse
import logging
import re
from dataclasses import dataclass
from pathlib import Path

MEGABYTE = 1 << 20
SUPERSEDED = (
    "--speculate-up-to has no effect any more: requests are drafted for together; "
    "--decode-concurrency says how many at most, --prompt-concurrency how many prompts take turns"
)
ANY, OWN = "any", "own"  # of --allow-models


@dataclass(frozen=True)
class Options:
    verify_length: int | str = "auto"  # drafted tokens per round, unless a request says otherwise
    kernels: str = "auto"  # or "exact" or "off"
    lookup: bool = True  # copies of earlier text as drafts, where they are worth more
    profile: bool = True
    api_key: str | None = None
    max_request_bytes: int = 8 * MEGABYTE
    allow_models: tuple[str, ...] | None = None  # None: any on loopback, else the server's own
    allow_private_images: bool = False
    max_connections: int = 128  # half of them per address
    head_seconds: float = 10.0  # from a connection to its request's head
    idle_timeout: float = 60.0  # seconds a client may take over a body, or over one write
    patience: float = 300.0  # seconds to wait for another machine of a group before all end
    stall_seconds: float = 300.0  # without a step, after which /health says so

    @property
    def key_bytes(self) -> tuple[bytes, ...]:
        """The key as clients may send it: in UTF-8, or in HTTP's own latin-1."""
        key = self.api_key or ""
        spellings = {key.encode("utf-8", "surrogateescape"), key.encode("latin-1", "ignore")}
        return tuple(one for one in spellings if len(one) >= len(key) > 0)


def verify_length(text: str) -> int | str:
    if text == "auto" or text.isdecimal():
        return text if text == "auto" else int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is neither 'auto' nor a number of tokens")


def api_key(text: str) -> str:
    """A key, or @FILE to read it from a file, which keeps it out of the process list."""
    if text.startswith("@"):
        try:
            text = Path(text[1:]).read_text(encoding="utf-8").strip()
        except OSError as error:
            raise argparse.ArgumentTypeError(f"can't read {text[1:]}: {error.strerror}") from error
    if not text:
        raise argparse.ArgumentTypeError("the key is empty")
    return text


def model_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(","))
    if not all(names):
        raise argparse.ArgumentTypeError(f"{text!r} has an empty name")
    return () if names == (OWN,) else names


def positive(text: str) -> int:
    if text.isdecimal() and int(text) > 0:
        return int(text)
    raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")


def size(text: str) -> str:
    """A number of bytes as mlx_lm.server writes it; on anything else it fails."""
    if re.fullmatch(r"\d{1,18}(\.\d{0,18})?\s*([MG]B?)?", text, re.ASCII | re.IGNORECASE):
        return text
    raise argparse.ArgumentTypeError(f"{text!r} is no size, such as 2GB or 500MB")


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="dspine-mlx serve",
        usage="%(prog)s [--model MODEL] [--draft-model DRAFTER] [flags below and of mlx_lm.server]",
        description="mlx_lm.server with a block drafter as its --draft-model: a folder or Hub id; "
        "'auto' for a public one that fits; 'lookup' for none, only copies of earlier text.",
        add_help=False,
        allow_abbrev=False,
    )
    flags.add_argument(
        "--verify-length",
        type=verify_length,
        metavar="N",
        help="drafted tokens offered to the target per round: auto (default) or a number; 0 turns "
        "drafting off. A request's own verify_length comes first",
    )
    flags.add_argument("--num-draft-tokens", type=int, help="mlx_lm's name for --verify-length")
    flags.add_argument(
        "--prompt-cache-bytes",
        type=size,
        metavar="SIZE",
        help="bytes that all prompt caches may take, such as 2GB",
    )
    flags.add_argument(
        "--speculate-up-to",
        type=positive,
        metavar="N",
        help="no longer needed: requests are drafted for together, up to --decode-concurrency of "
        "them",
    )
    flags.add_argument(
        "--kernels",
        choices=["auto", "exact", "off"],
        default="auto",
        help="auto: the package's kernels where they win; exact: verify only with plain decoding's "
        "bits, as checked at load; off: plain MLX",
    )
    flags.add_argument(
        "--no-lookup",
        action="store_true",
        help="don't offer copies of earlier text where they are worth more than a draft",
    )
    flags.add_argument(
        "--no-profile",
        action="store_true",
        help="don't measure what verify rows cost on this machine when the model is loaded",
    )
    flags.add_argument(
        "--api-key",
        type=api_key,
        metavar="KEY",
        help="ask for 'Authorization: Bearer KEY' on every route but /health; @FILE reads the key "
        "from a file",
    )
    flags.add_argument(
        "--max-request-mb",
        type=positive,
        metavar="MB",
        default=Options.max_request_bytes // MEGABYTE,
        help="refuse larger request bodies (default: %(default)s)",
    )
    flags.add_argument(
        "--allow-models",
        type=model_names,
        metavar="NAMES",
        help="what requests may load besides the server's own models: any, own (nothing else), or "
        "names with commas between them (default: any on a loopback --host, else own)",
    )
    flags.add_argument(
        "--allow-private-images",
        action="store_true",
        help="fetch images of requests from private and loopback addresses, too",
    )
    flags.add_argument(
        "--max-connections",
        type=positive,
        metavar="N",
        default=Options.max_connections,
        help="connections in all, half of them per address (default: %(default)s)",
    )
    flags.add_argument(
        "--stall-seconds",
        type=positive,
        metavar="S",
        default=int(Options.stall_seconds),
        help="/health says 503 when generation has made no step for so long (default: %(default)s)",
    )
    flags.add_argument(
        "--patience",
        type=positive,
        metavar="S",
        default=int(Options.patience),
        help="on several machines: seconds to wait for another one before all end "
        "(default: %(default)s)",
    )
    return flags


def parse(arguments: list[str] | None = None) -> tuple[Options, list[str]]:
    """Our options, and the flags that are mlx_lm.server's to judge."""
    flags = parser()
    known, rest = flags.parse_known_args(arguments)
    if {"-h", "--help"} & set(rest):
        print(flags.format_help())
    if known.speculate_up_to is not None:
        logging.warning(SUPERSEDED)
    if known.prompt_cache_bytes is not None:
        rest += ["--prompt-cache-bytes", known.prompt_cache_bytes]
    length = known.verify_length
    if known.num_draft_tokens is not None:
        rest += ["--num-draft-tokens", str(known.num_draft_tokens)]
        if length is None:
            length = max(0, known.num_draft_tokens)
    options = Options(
        verify_length="auto" if length is None else length,
        kernels=known.kernels,
        lookup=not known.no_lookup,
        profile=not known.no_profile,
        api_key=known.api_key,
        max_request_bytes=known.max_request_mb * MEGABYTE,
        allow_models=known.allow_models,
        allow_private_images=known.allow_private_images,
        max_connections=known.max_connections,
        stall_seconds=known.stall_seconds,
        patience=known.patience,
    )
    return options, rest
