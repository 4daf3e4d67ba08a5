"""python -m dspine_mlx.cli"""

from dspine_mlx.cli import main

main()
