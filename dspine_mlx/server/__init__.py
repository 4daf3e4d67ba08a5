"""mlx_lm.server with drafting: its endpoints, flags, parsers and prompt cache stay its own.

`install()` rebinds four globals of mlx_lm.server (ModelProvider, stream_generate, BatchGenerator
and run) to subclasses and wrappers of what was there; `main()` installs and starts mlx_lm.server's
own main.
"""

from dspine_mlx.server.compatibility import check_host
from dspine_mlx.server.options import Options, parse

__all__ = ["Options", "install", "main"]


def install(options: Options | None = None) -> None:
    """Give mlx_lm.server drafting; `InputError` if this mlx-lm lacks the parts that takes."""
    check_host()
    from dspine_mlx.server.app import bind  # subclasses mlx_lm.server's classes: after the check

    bind(options or Options())


def main(arguments: list[str] | None = None) -> None:
    """Parse our flags, leave the others to mlx_lm.server, and serve until SIGINT or SIGTERM."""
    check_host()
    from dspine_mlx.server.app import serve

    serve(*parse(arguments))
