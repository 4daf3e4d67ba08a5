"""python -m dspine_mlx.server: see `dspine-mlx serve --help`."""

import sys

from dspine_mlx.errors import InputError
from dspine_mlx.server import main

if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
